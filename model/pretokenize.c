/* model/pretokenize.c: splits a text into words with PCRE2, by the patterns of the file's pre-tokenizer.
 *
 * The patterns are those the models were trained with. White space is spelled out, because \s of PCRE2 has one character
 * (U+180E) more than Unicode's White_Space, which the training tokenizers use. No pattern can match the empty text, and
 * none backtracks over more than one run of white space, which it then consumes. So the steps per byte are bounded. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "model/tokenizer.h"

#define WS "\\p{Z}\\t-\\r\\x{85}" /* in a class: white space */
#define CONTRACTIONS "'s|'t|'re|'ve|'m|'ll|'d"
#define GPT2 CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^" WS "\\p{L}\\p{N}]+|[" WS "]+(?![^" WS "])|[" WS "]+"
#define LLAMA3(digits)                                                                                            \
    "(?i:" CONTRACTIONS ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" digits "| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n]*|[" WS \
    "]*[\\r\\n]+|[" WS "]+(?![^" WS "])|[" WS "]+"

enum { MAX_PASSES = 4 };

/* Each pass cuts every piece of the one before into its matches and what lies between them. */
typedef struct kind {
    const char *name;
    bool whole_words, add_bos;
    const char *passes[MAX_PASSES];
} kind;

static const kind kinds[] = {
    {"smollm", false, false, {"\\p{N}", GPT2}},
    {"gpt-2", false, false, {GPT2}},
    {"default", false, false, {"[\\p{P}$+<=>^~|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]"}},
    {"llama-bpe", true, true, {LLAMA3("{1,3}")}},
    {"qwen2", false, false, {LLAMA3("")}},
};

struct kvf__pretokenizer {
    kvf_allocator allocator;
    const kind *kind;
    pcre2_general_context *general;
    pcre2_match_context *limits;
    pcre2_code *codes[MAX_PASSES];
    uint32_t n_passes;
};

/* PCRE2 frees without a size: it lies before the memory. */
static void *take_memory(size_t bytes, void *ctx) {
    size_t all;
    if (!kvf__add(bytes, KVF__CACHE_LINE, &all)) return NULL;
    unsigned char *p = kvf__alloc(ctx, all);
    if (!p) return NULL;
    memcpy(p, &all, sizeof all);
    return p + KVF__CACHE_LINE;
}

static void give_memory(void *p, void *ctx) {
    if (!p) return;
    unsigned char *begin = (unsigned char *)p - KVF__CACHE_LINE;
    size_t all;
    memcpy(&all, begin, sizeof all);
    kvf__free(ctx, begin, all);
}

static const kind *find_kind(const kvf__gguf *gguf, kvf__text name, kvf_error *err) {
    char list[128] = "";
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kvf__text_equal(name, kinds[i].name)) return &kinds[i];
        strcat(strcat(list, i ? ", " : ""), kinds[i].name);
    }
    kvf__shown shown;
    (void)kvf__fail(err, KVF_E_UNSUPPORTED, "%s: key tokenizer.ggml.pre: pre-tokenizer \"%s\": must be one of %s",
                    gguf->path.text, kvf__show(&shown, name), list);
    return NULL;
}

static kvf_status compile(kvf__pretokenizer *pre, kvf_error *err) {
    pre->general = pcre2_general_context_create(take_memory, give_memory, &pre->allocator);
    pre->limits = pre->general ? pcre2_match_context_create(pre->general) : NULL;
    pcre2_compile_context *context = pre->general ? pcre2_compile_context_create(pre->general) : NULL;
    kvf_status status = pre->limits && context ? KVF_OK : KVF_E_NO_MEMORY;
    while (status == KVF_OK && pre->n_passes < MAX_PASSES && pre->kind->passes[pre->n_passes]) {
        int code;
        PCRE2_SIZE at;
        pcre2_code *compiled = pcre2_compile((PCRE2_SPTR)pre->kind->passes[pre->n_passes], PCRE2_ZERO_TERMINATED,
                                             PCRE2_UTF | PCRE2_UCP, &code, &at, context);
        if (compiled)
            pre->codes[pre->n_passes++] = compiled;
        else
            status = KVF_E_NO_MEMORY; /* the patterns are ours: nothing else can fail */
    }
    pcre2_compile_context_free(context);
    if (status != KVF_OK)
        return kvf__fail(err, status, "pre-tokenizer %s: no memory for its patterns", pre->kind->name);
    pcre2_set_match_limit(pre->limits, UINT32_MAX); /* counts backtracks, and those are linear in the text */
    pcre2_set_depth_limit(pre->limits, UINT32_MAX);
    pcre2_set_heap_limit(pre->limits, 64 * 1024); /* KiB; one frame suffices */
    return KVF_OK;
}

kvf_status kvf__pretokenizer_create(const kvf__gguf *gguf, kvf__text name, const kvf_allocator *allocator,
                                    kvf__pretokenizer **out, kvf_error *err) {
    const kind *found = find_kind(gguf, name, err);
    if (!found) return KVF_E_UNSUPPORTED;
    kvf__pretokenizer *pre = kvf__alloc(allocator, sizeof *pre);
    if (!pre) return kvf__fail(err, KVF_E_NO_MEMORY, "pre-tokenizer %s: no memory", found->name);
    pre->allocator = *allocator;
    pre->kind = found;
    kvf_status status = compile(pre, err);
    if (status == KVF_OK)
        *out = pre;
    else
        kvf__pretokenizer_destroy(pre);
    return status;
}

void kvf__pretokenizer_destroy(kvf__pretokenizer *pre) {
    if (!pre) return;
    for (uint32_t i = 0; i < pre->n_passes; i++) pcre2_code_free(pre->codes[i]);
    pcre2_match_context_free(pre->limits);
    pcre2_general_context_free(pre->general);
    kvf__free(&pre->allocator, pre, sizeof *pre);
}

bool kvf__pretokenizer_whole_words(const kvf__pretokenizer *pre) { return pre->kind->whole_words; }

bool kvf__pretokenizer_adds_bos(const kvf__pretokenizer *pre) { return pre->kind->add_bos; }

void *kvf__pretokenize_begin(const kvf__pretokenizer *pre) { return pcre2_match_data_create(1, pre->general); }

void kvf__pretokenize_end(void *match) { pcre2_match_data_free(match); }

typedef struct run {
    const kvf__pretokenizer *pre;
    pcre2_match_data *match;
    kvf__word_fn fn;
    void *ctx;
    kvf_error *err;
} run;

/* Passes pass, pass + 1, ... over one piece. At most MAX_PASSES deep. */
static kvf_status cut(const run *r, uint32_t pass, const char *text, size_t n) {
    if (pass == r->pre->n_passes) return r->fn(r->ctx, text, n);
    kvf_status status = KVF_OK;
    for (size_t at = 0; at < n && status == KVF_OK;) {
        int rc =
            pcre2_match(r->pre->codes[pass], (PCRE2_SPTR)text, n, at, PCRE2_NO_UTF_CHECK, r->match, r->pre->limits);
        if (rc == PCRE2_ERROR_NOMATCH) return cut(r, pass + 1, text + at, n - at);
        if (rc < 0)
            return kvf__fail(r->err, KVF_E_NO_MEMORY, "pre-tokenizer %s: matching %zu bytes failed (PCRE2 error %d)",
                             r->pre->kind->name, n - at, rc);
        const PCRE2_SIZE *bounds = pcre2_get_ovector_pointer(r->match);
        size_t begin = bounds[0], end = bounds[1];
        if (begin > at) status = cut(r, pass + 1, text + at, begin - at);
        if (status == KVF_OK) status = cut(r, pass + 1, text + begin, end - begin);
        at = end;
    }
    return status;
}

kvf_status kvf__pretokenize(const kvf__pretokenizer *pre, void *match, const char *text, size_t n_bytes,
                            kvf__word_fn fn, void *ctx, kvf_error *err) {
    const run r = {pre, match, fn, ctx, err};
    return n_bytes ? cut(&r, 0, text, n_bytes) : KVF_OK;
}
