/* model/spm.c: text to ids by a SentencePiece vocabulary: pairs merge by the score of the token they form.
 *
 * The text, spaces written as U+2581 and one put before it where the model wants that, is a linked list of symbols, at
 * first one for each character (and for each byte that is part of none). Two neighbours merge if together they are a
 * token; the token with the highest score is made first, the leftmost if scores are equal. Candidates are in a heap;
 * outdated ones are dropped when they reach its top. A user-defined token is a symbol that never merges. A symbol that is
 * not a token in the end is written as its bytes. O(n log n) for n bytes, times the length of a token. */
#include "model/tokenizer.h"

#define SPACE KVF__SPM_SPACE
enum { SPACE_BYTES = sizeof SPACE - 1, NO_SYMBOL = -1 };

typedef struct symbol {
    uint32_t begin, bytes; /* in the text; bytes 0: merged away */
    uint32_t user_defined; /* the token that it is and stays, or KVF_NO_TOKEN */
    int32_t prev, next;
} symbol;

typedef struct candidate {
    float score;
    uint32_t id; /* of the sum */
    int32_t left, right;
} candidate;

struct kvf__spm_scratch {
    size_t capacity; /* symbols, and half the candidates */
    size_t text_capacity;
    char *text;
    symbol *symbols;
    candidate *heap;
    size_t n_heap;
    /* [n_vocab] bytes of the left part that an unused token was last offered for, 0: never. NULL: no token is unused */
    uint32_t *splits;
};

static kvf_status no_memory(const kvf__encoder *e, size_t n) {
    return kvf__fail(e->err, KVF_E_NO_MEMORY, "tokenizer: no memory for a text of %zu bytes", n);
}

/* ---- Scratch ------------------------------------------------------------------------------------------- */

kvf_status kvf__spm_open(kvf__encoder *e) {
    const kvf_tokenizer *t = e->tokenizer;
    e->spm = kvf__alloc(&t->allocator, sizeof *e->spm);
    if (!e->spm) return no_memory(e, 0);
    bool has_unused = memchr(t->types, KVF__TOKEN_UNUSED, t->n_vocab) != NULL;
    if (!has_unused) return KVF_OK;
    e->spm->splits = kvf__alloc(&t->allocator, t->n_vocab * sizeof *e->spm->splits);
    return e->spm->splits ? KVF_OK : no_memory(e, 0);
}

void kvf__spm_close(kvf__encoder *e) {
    const kvf_allocator *allocator = &e->tokenizer->allocator;
    kvf__spm_scratch *s = e->spm;
    if (!s) return;
    kvf__free(allocator, s->text, s->text_capacity);
    kvf__free(allocator, s->symbols, s->capacity * sizeof *s->symbols);
    kvf__free(allocator, s->heap, 2 * s->capacity * sizeof *s->heap);
    kvf__free(allocator, s->splits, e->tokenizer->n_vocab * sizeof *s->splits);
    kvf__free(allocator, s, sizeof *s);
}

static kvf_status take_text(kvf__encoder *e, size_t n) {
    kvf__spm_scratch *s = e->spm;
    if (n <= s->text_capacity) return KVF_OK;
    size_t capacity = KVF__MAX(n, 2 * s->text_capacity);
    char *text = kvf__alloc(&e->tokenizer->allocator, capacity);
    if (!text) return no_memory(e, n);
    kvf__free(&e->tokenizer->allocator, s->text, s->text_capacity);
    s->text = text;
    s->text_capacity = capacity;
    return KVF_OK;
}

static kvf_status take_symbols(kvf__encoder *e, size_t n) {
    const kvf_allocator *allocator = &e->tokenizer->allocator;
    kvf__spm_scratch *s = e->spm;
    if (n <= s->capacity) return KVF_OK;
    size_t capacity = KVF__MAX(n, 2 * s->capacity);
    symbol *symbols = kvf__alloc(allocator, capacity * sizeof *symbols);
    candidate *heap = kvf__alloc(allocator, 2 * capacity * sizeof *heap);
    if (!symbols || !heap) {
        kvf__free(allocator, symbols, capacity * sizeof *symbols);
        kvf__free(allocator, heap, 2 * capacity * sizeof *heap);
        return no_memory(e, n);
    }
    kvf__free(allocator, s->symbols, s->capacity * sizeof *symbols);
    kvf__free(allocator, s->heap, 2 * s->capacity * sizeof *heap);
    s->symbols = symbols;
    s->heap = heap;
    s->capacity = capacity;
    return KVF_OK;
}

/* ---- The heap ------------------------------------------------------------------------------------------ */

static bool before(const candidate *a, const candidate *b) {
    return a->score > b->score || (a->score >= b->score && a->left < b->left);
}

/* Room: one candidate for each neighbouring pair at first, and each merge takes one and adds at most two. */
static void push(kvf__spm_scratch *s, candidate c) {
    size_t i = s->n_heap++;
    for (; i && before(&c, &s->heap[(i - 1) / 2]); i = (i - 1) / 2) s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = c;
}

static candidate pop(kvf__spm_scratch *s) {
    const candidate top = s->heap[0], last = s->heap[--s->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < s->n_heap; i = child) {
        if (child + 1 < s->n_heap && before(&s->heap[child + 1], &s->heap[child])) child++;
        if (!before(&s->heap[child], &last)) break;
        s->heap[i] = s->heap[child];
    }
    s->heap[i] = last;
    return top;
}

/* ---- Merging ------------------------------------------------------------------------------------------- */

/* The token of this text that text may become: never a control, unknown or byte token. */
static uint32_t find(const kvf_tokenizer *t, const char *text, size_t n) {
    if (n > t->max_text_bytes) return KVF_NO_TOKEN;
    uint32_t id = kvf__tokenizer_lookup(t, (kvf__text){text, n});
    return id != KVF_NO_TOKEN && kvf__token_is_plain(t->types[id]) ? id : KVF_NO_TOKEN;
}

static void offer(kvf__encoder *e, int32_t left, int32_t right) {
    kvf__spm_scratch *s = e->spm;
    if (left == NO_SYMBOL || right == NO_SYMBOL) return;
    const symbol *l = &s->symbols[left], *r = &s->symbols[right];
    if (l->user_defined != KVF_NO_TOKEN || r->user_defined != KVF_NO_TOKEN) return;
    uint32_t id = find(e->tokenizer, s->text + l->begin, (size_t)l->bytes + r->bytes);
    if (id == KVF_NO_TOKEN) return;
    if (e->tokenizer->types[id] == KVF__TOKEN_UNUSED) s->splits[id] = l->bytes;
    push(s, (candidate){e->tokenizer->scores[id], id, left, right});
}

static void merge_symbols(kvf__encoder *e) {
    kvf__spm_scratch *s = e->spm;
    while (s->n_heap) {
        const candidate c = pop(s);
        symbol *l = &s->symbols[c.left], *r = &s->symbols[c.right];
        /* Symbols only grow, so of this length the pair is still the one that was offered. */
        if (!l->bytes || !r->bytes || (size_t)l->bytes + r->bytes != e->tokenizer->texts[c.id].bytes) continue;
        l->bytes += r->bytes;
        r->bytes = 0;
        l->next = r->next;
        if (l->next != NO_SYMBOL) s->symbols[l->next].prev = c.left;
        offer(e, l->prev, c.left);
        offer(e, c.left, l->next);
    }
}

/* ---- Results ------------------------------------------------------------------------------------------- */

/* By bytes; those that have no token are the unknown token, one for a run of them. */
static kvf_status emit_bytes(kvf__encoder *e, const char *text, size_t n, bool *after_unknown) {
    const kvf_tokenizer *t = e->tokenizer;
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < n && status == KVF_OK; i++) {
        uint32_t id = t->byte_ids[(unsigned char)text[i]];
        bool unknown = id == KVF_NO_TOKEN;
        if (!unknown || !*after_unknown) status = kvf__encoder_id(e, unknown ? t->unknown_id : id);
        *after_unknown = unknown;
    }
    return status;
}

/* An unused token is written as the parts it was merged from, as in training. The heap, empty by now, holds the parts
 * still to be written (id: begin, left: bytes); there are fewer parts than symbols. */
static kvf_status emit(kvf__encoder *e, const symbol *whole, bool *after_unknown) {
    const kvf_tokenizer *t = e->tokenizer;
    kvf__spm_scratch *s = e->spm;
    kvf_status status = KVF_OK;
    size_t n = 0;
    if (whole->user_defined != KVF_NO_TOKEN) {
        *after_unknown = false;
        return kvf__encoder_id(e, whole->user_defined);
    }
    s->heap[n++] = (candidate){0, whole->begin, (int32_t)whole->bytes, 0};
    while (n && status == KVF_OK) {
        const candidate c = s->heap[--n];
        const char *text = s->text + c.id;
        uint32_t id = find(t, text, (size_t)c.left);
        uint32_t split = id != KVF_NO_TOKEN && t->types[id] == KVF__TOKEN_UNUSED ? s->splits[id] : 0;
        if (split) {
            s->heap[n++] = (candidate){0, c.id + split, c.left - (int32_t)split, 0};
            s->heap[n++] = (candidate){0, c.id, (int32_t)split, 0};
        } else if (id == KVF_NO_TOKEN) {
            status = emit_bytes(e, text, (size_t)c.left, after_unknown);
        } else {
            *after_unknown = false;
            status = kvf__encoder_id(e, id);
        }
    }
    return status;
}

/* ---- Text ---------------------------------------------------------------------------------------------- */

static kvf_status write_spaces(kvf__encoder *e, const char *text, size_t n, bool prefix, size_t *n_written) {
    size_t n_spaces = prefix;
    for (size_t i = 0; i < n; i++) n_spaces += text[i] == ' ';
    size_t bytes = n + prefix + n_spaces * (SPACE_BYTES - 1); /* n is below 2^31: cannot wrap */
    if (bytes > INT32_MAX)
        return kvf__fail(e->err, KVF_E_LIMIT,
                         "text of %zu bytes, %zu with its spaces as the vocabulary writes them: must be at most %d: "
                         "encode it in parts",
                         n, bytes, INT32_MAX);
    kvf_status status = take_text(e, bytes);
    if (status != KVF_OK) return status;
    char *out = e->spm->text;
    if (prefix) out = (char *)memcpy(out, SPACE, SPACE_BYTES) + SPACE_BYTES;
    for (size_t i = 0; i < n; i++) {
        if (text[i] == ' ')
            out = (char *)memcpy(out, SPACE, SPACE_BYTES) + SPACE_BYTES;
        else
            *out++ = text[i];
    }
    *n_written = bytes;
    return KVF_OK;
}

/* User-defined tokens, and between them one symbol a character. */
static uint32_t cut_symbols(const kvf__encoder *e, size_t n, bool counting) {
    kvf__spm_scratch *s = e->spm;
    uint32_t n_symbols = 0;
    for (size_t at = 0; at < n; n_symbols++) {
        uint32_t id = KVF_NO_TOKEN;
        size_t length = kvf__user_defined_at(e->tokenizer, s->text + at, n - at, &id);
        if (!length) length = (uint32_t)kvf__utf8_length(s->text + at, n - at, NULL);
        if (!length) length = 1;
        if (!counting)
            s->symbols[n_symbols] = (symbol){(uint32_t)at, (uint32_t)length, id, (int32_t)n_symbols - 1,
                                             (int32_t)n_symbols + 1}; /* -1: NO_SYMBOL */
        at += length;
    }
    return n_symbols;
}

static kvf_status encode(kvf__encoder *e, const char *text, size_t n, bool prefix) {
    kvf__spm_scratch *s = e->spm;
    bool after_unknown = false;
    kvf_status status = write_spaces(e, text, n, prefix, &n);
    if (status != KVF_OK) return status;
    uint32_t n_symbols = cut_symbols(e, n, true);
    status = take_symbols(e, n_symbols);
    if (status != KVF_OK) return status;
    (void)cut_symbols(e, n, false);
    s->symbols[n_symbols - 1].next = NO_SYMBOL;
    s->n_heap = 0;
    for (uint32_t i = 0; i < n_symbols; i++) offer(e, (int32_t)i, s->symbols[i].next);
    merge_symbols(e);
    for (int32_t i = 0; i != NO_SYMBOL && status == KVF_OK; i = s->symbols[i].next)
        status = emit(e, &s->symbols[i], &after_unknown);
    e->at_begin = false;
    return status;
}

kvf_status kvf__spm_text(kvf__encoder *e, const char *text, size_t n) {
    return n ? encode(e, text, n, e->tokenizer->add_space && e->at_begin) : KVF_OK;
}
