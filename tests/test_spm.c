/* SentencePiece vocabularies: what the reference encodes and decodes, every byte, long texts, files that make no sense. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <jansson.h>
#include <time.h>
#include <unistd.h>

#include "gguf_writer.h"
#include "kvfold/model.h"
#include "tests/meter.h"

enum { MAX_IDS = 4096, MAX_TOKENS = 1024, NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };
enum { UNK_ID = 0, BOS_ID = 1, EOS_ID = 2 };

/* ---- Vocabularies ------------------------------------------------------------------------------------------- */

typedef struct vocabulary {
    const char *texts[MAX_TOKENS];
    float scores[MAX_TOKENS];
    int types[MAX_TOKENS];
    size_t n;
    bool no_space;            /* add_space_prefix false; else the key is absent */
    const char *skip;         /* keys to leave out */
    const char *true_key;     /* a boolean key that is set */
    const char *charsmap;     /* NULL: absent */
    const char *chat;         /* template; NULL: absent */
    size_t n_scores, n_types; /* 0: n */
    uint32_t unknown_id;      /* 0: UNK_ID */
} vocabulary;

static void write_vocabulary(gw *w, void *ctx) {
    const vocabulary *v = ctx;
    w->skip = v->skip;
    gw_key_text(w, "tokenizer.ggml.model", "llama");
    gw_key_texts(w, "tokenizer.ggml.tokens", v->texts, v->n);
    size_t n_scores = v->n_scores ? v->n_scores : v->n, n_types = v->n_types ? v->n_types : v->n;
    if (gw_key_array(w, "tokenizer.ggml.scores", GW_FLOAT, n_scores)) gw_put(&w->keys, v->scores, n_scores * 4);
    if (gw_key_array(w, "tokenizer.ggml.token_type", GW_I32, n_types)) gw_put(&w->keys, v->types, n_types * 4);
    gw_key_u32(w, "tokenizer.ggml.unknown_token_id", v->unknown_id);
    gw_key_u32(w, "tokenizer.ggml.bos_token_id", BOS_ID);
    gw_key_u32(w, "tokenizer.ggml.eos_token_id", EOS_ID);
    if (v->no_space) gw_key_bool(w, "tokenizer.ggml.add_space_prefix", 0);
    if (v->chat) gw_key_text(w, "tokenizer.chat_template", v->chat);
    if (v->true_key) gw_key_bool(w, v->true_key, 1);
    if (v->charsmap) {
        gw_key_array(w, "tokenizer.ggml.precompiled_charsmap", GW_U8, strlen(v->charsmap));
        gw_put(&w->keys, v->charsmap, strlen(v->charsmap));
    }
    /* Without tensors there is no embedding whose rows would have to agree. */
    w->infos.n = w->data.n = 0;
    w->n_tensors = 0;
}

static kvf_status open_status(const vocabulary *v, const kvf_allocator *allocator, kvf_model **model, kvf_error *err) {
    struct tiny_model_params params = {
        .extra = write_vocabulary,
        .ctx = (void *)(uintptr_t)v,
        .skip = "tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type "
                "tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id "
                "tokenizer.ggml.add_bos_token llama.vocab_size tokenizer.chat_template"};
    kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = 1};
    char path[256];
    if (allocator) config.allocator = *allocator;
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, &params), 0);
    kvf_status status = kvf_model_open(path, &config, model, err);
    unlink(path);
    return status;
}

static kvf_model *open_vocabulary(const vocabulary *v) {
    kvf_model *model = NULL;
    kvf_error err = {""};
    cr_assert_eq(open_status(v, NULL, &model, &err), KVF_OK, "%s", err.text);
    return model;
}

static char byte_texts[256][8];

/* <unk>, <s>, </s>, the 256 bytes, then the given tokens, normal, the first with the highest score. */
static void begin_vocabulary(vocabulary *v, const char *const *texts, size_t n) {
    static const char *const fixed[] = {"<unk>", "<s>", "</s>"};
    memset(v, 0, sizeof *v);
    for (int i = 0; i < 3; i++) v->texts[i] = fixed[i], v->types[i] = i ? CONTROL : UNKNOWN;
    for (int i = 0; i < 256; i++) {
        snprintf(byte_texts[i], sizeof byte_texts[i], "<0x%02X>", (unsigned)i);
        v->texts[3 + i] = byte_texts[i];
        v->types[3 + i] = BYTE;
    }
    v->n = 259;
    for (size_t i = 0; i < n; i++, v->n++) {
        v->texts[v->n] = texts[i];
        v->types[v->n] = NORMAL;
        v->scores[v->n] = -(float)i;
    }
}
#define BYTE_ID(b) (3u + (unsigned char)(b))

static size_t encode(const kvf_model *model, const char *text, size_t n, uint32_t flags, uint32_t *ids,
                     size_t capacity) {
    size_t n_ids = 0;
    kvf_error err = {""};
    kvf_status status = kvf_tokenizer_encode(kvf_model_tokenizer(model), text, n, flags, ids, capacity, &n_ids, &err);
    cr_assert_eq(status, KVF_OK, "%s: %s", kvf_status_name(status), err.text);
    return n_ids;
}

static void must_encode(const kvf_model *model, const char *text, uint32_t flags, const uint32_t *wanted,
                        size_t n_wanted) {
    uint32_t ids[MAX_IDS];
    size_t n = encode(model, text, strlen(text), flags, ids, MAX_IDS);
    cr_assert_eq(n, n_wanted, "\"%s\": %zu ids, wanted %zu", text, n, n_wanted);
    for (size_t i = 0; i < n; i++)
        cr_assert_eq(ids[i], wanted[i], "\"%s\": id %zu is %u, wanted %u", text, i, ids[i], wanted[i]);
}
#define MUST_ENCODE(model, text, flags, ...) \
    must_encode(model, text, flags, (uint32_t[]){__VA_ARGS__}, sizeof(uint32_t[]){__VA_ARGS__} / sizeof(uint32_t))

static void must_decode(const kvf_model *model, const uint32_t *ids, size_t n_ids, int special, const char *wanted) {
    char text[MAX_IDS];
    size_t n = kvf_tokenizer_decode(kvf_model_tokenizer(model), ids, n_ids, special, text, sizeof text);
    cr_assert(n == strlen(wanted) && !memcmp(text, wanted, n), "\"%.*s\", wanted \"%s\"", (int)n, text, wanted);
}

/* ---- The reference ------------------------------------------------------------------------------------------ */

static size_t json_ids(const json_t *list, uint32_t *ids) {
    size_t n = json_array_size(list);
    cr_assert_leq(n, (size_t)MAX_IDS);
    for (size_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return n;
}

static void read_vocabulary(const json_t *root, const json_t *variant, vocabulary *v) {
    const json_t *tokens = json_object_get(root, "tokens"), *value;
    bool bytes = json_is_true(json_object_get(variant, "bytes"));
    size_t i;
    int types[MAX_TOKENS];
    memset(v, 0, sizeof *v);
    cr_assert_leq(json_array_size(tokens), (size_t)MAX_TOKENS);
    for (i = 0; i < json_array_size(tokens); i++)
        types[i] = (int)json_integer_value(json_array_get(json_object_get(root, "types"), i));
    json_array_foreach(json_object_get(variant, "unused"), i, value) types[json_integer_value(value)] = UNUSED;
    json_array_foreach(tokens, i, value) {
        if (types[i] == BYTE && !bytes) continue;
        v->texts[v->n] = json_string_value(value);
        v->scores[v->n] = (float)json_number_value(json_array_get(json_object_get(root, "scores"), i));
        v->types[v->n++] = types[i];
    }
    v->no_space = json_is_false(json_object_get(variant, "add_space"));
}

Test(spm, agrees_with_the_reference) {
    json_error_t error;
    json_t *root = json_load_file(KVF_TEST_DATA "/spm_vectors.json", 0, &error);
    cr_assert_not_null(root, "%s", error.text);
    const json_t *variant, *item;
    size_t v, i, n_cases = 0;
    json_array_foreach(json_object_get(root, "variants"), v, variant) {
        static vocabulary vocab;
        uint32_t ids[MAX_IDS], wanted[MAX_IDS];
        read_vocabulary(root, variant, &vocab);
        kvf_model *model = open_vocabulary(&vocab);
        const char *name = json_string_value(json_object_get(variant, "name"));
        json_array_foreach(json_object_get(variant, "encode"), i, item) {
            const char *text = json_string_value(json_array_get(item, 0));
            size_t n_wanted = json_ids(json_array_get(item, 1), wanted);
            /* User-defined tokens are found in any text there, and here where the caller asks for it. */
            size_t n = encode(model, text, strlen(text), strstr(text, "<tool>") ? KVF_ENCODE_SPECIAL : 0, ids, MAX_IDS);
            cr_assert(n == n_wanted && !memcmp(ids, wanted, n * sizeof *ids), "%s, case %zu: \"%s\"", name, i, text);
            cr_assert_leq(n, kvf_tokenizer_max_ids(kvf_model_tokenizer(model), strlen(text)));
            n_cases++;
            if (strstr(text, "\xe2\x96\x81") || !strcmp(name, "no_bytes")) continue;
            must_decode(model, ids, n, 1, text); /* what the reference does not do for every text */
        }
        json_array_foreach(json_object_get(variant, "decode"), i, item) {
            size_t n = json_ids(json_array_get(item, 0), ids);
            must_decode(model, ids, n, 0, json_string_value(json_array_get(item, 1)));
            n_cases++;
        }
        kvf_model_close(model);
    }
    cr_assert_eq(v, 4);
    cr_assert_geq(n_cases, 500);
    json_decref(root);
}

static void must_chat(const json_t *item, const kvf_model *model, const char *template_name, size_t i) {
    const json_t *message, *messages = json_object_get(item, "messages");
    kvf_message list[8];
    uint32_t ids[MAX_IDS], wanted[MAX_IDS];
    size_t k, n = 0, n_bytes = 0, n_wanted = json_ids(json_object_get(item, "ids"), wanted);
    json_array_foreach(messages, k, message) {
        const char *content = json_string_value(json_array_get(message, 1));
        list[k] = (kvf_message){json_string_value(json_array_get(message, 0)), content, strlen(content)};
    }
    kvf_error err = {""};
    kvf_status status =
        kvf_chat_encode(kvf_model_tokenizer(model), template_name, list, (uint32_t)k, ids, MAX_IDS, &n, &err);
    cr_assert_eq(status, KVF_OK, "dialogue %zu: %s", i, err.text);
    cr_assert(n == n_wanted && !memcmp(ids, wanted, n * sizeof *ids), "dialogue %zu", i);
    cr_assert_eq(kvf_chat_render(kvf_model_tokenizer(model), template_name, list, (uint32_t)k, NULL, 0, &n_bytes, &err),
                 KVF_E_LIMIT);
    cr_assert_leq(n, kvf_tokenizer_max_ids(kvf_model_tokenizer(model), n_bytes));
}

Test(spm, encodes_dialogues_as_the_reference_does) {
    json_error_t error;
    json_t *root = json_load_file(KVF_TEST_DATA "/spm_vectors.json", 0, &error);
    cr_assert_not_null(root, "%s", error.text);
    const json_t *item;
    size_t i;
    json_array_foreach(json_object_get(root, "chat"), i, item) {
        static vocabulary v;
        const char *name = json_string_value(json_object_get(item, "template"));
        read_vocabulary(root, json_array_get(json_object_get(root, "variants"), 0), &v);
        v.no_space = json_is_false(json_object_get(item, "add_space"));
        for (int k = 0; k < 2 && json_is_true(json_object_get(item, "control")); k++, v.n++)
            v.texts[v.n] = k ? "[/INST]" : "[INST]", v.types[v.n] = CONTROL;
        v.chat = strcmp(name, "llama2") ? "{{ bos_token + '[INST] ' + content }}" : "{{ '[INST] <<SYS>>' }}";
        kvf_model *model = open_vocabulary(&v);
        must_chat(item, model, name, i);
        must_chat(item, model, "auto", i);
        kvf_model_close(model);
    }
    cr_assert_eq(i, 20);
    json_decref(root);
}

/* ---- Merging -------------------------------------------------------------------------------------------------- */

static const char *const letters[] = {"ab",
                                      "a",
                                      "b",
                                      "aa",
                                      "bb",
                                      "abab",
                                      "\xc3\xa9",
                                      "ba",
                                      "aaa",
                                      "aab",
                                      "abb",
                                      "aaaa",
                                      "\xe2\x96\x81"
                                      "a",
                                      "\xe2\x96\x81",
                                      "\xc3\xa9"
                                      "a"};
enum { N_LETTERS = sizeof letters / sizeof *letters };

static uint32_t naive_find(const vocabulary *v, const char *text, size_t n) {
    for (size_t i = 259; i < v->n; i++)
        if (strlen(v->texts[i]) == n && !memcmp(v->texts[i], text, n)) return (uint32_t)i;
    return 0;
}

/* Merges the slow way: again and again the leftmost pair of the highest score. Texts of a, b, e acute, space, 0xff. */
static size_t naive_encode(const vocabulary *v, const char *text, uint32_t *ids) {
    char parts[64][256];
    size_t n = 1, n_ids = 0;
    strcpy(parts[0], "\xe2\x96\x81");
    for (; *text; text++, n++) {
        if (*text == ' ')
            strcpy(parts[n], "\xe2\x96\x81");
        else if (*text == '\xc3')
            strcpy(parts[n], "\xc3\xa9"), text++;
        else
            snprintf(parts[n], 2, "%c", *text);
    }
    for (;;) {
        size_t best = n;
        float best_score = -INFINITY;
        for (size_t i = 0; i + 1 < n; i++) {
            char sum[512];
            snprintf(sum, sizeof sum, "%s%s", parts[i], parts[i + 1]);
            uint32_t id = naive_find(v, sum, strlen(sum));
            if (id && v->scores[id] > best_score) best = i, best_score = v->scores[id];
        }
        if (best == n) break;
        size_t n_left = strlen(parts[best]);
        memcpy(parts[best] + n_left, parts[best + 1], KVF__MIN(strlen(parts[best + 1]) + 1, 256 - n_left));
        memmove(parts + best + 1, parts + best + 2, (n - best - 2) * sizeof *parts);
        n--;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t id = naive_find(v, parts[i], strlen(parts[i]));
        if (id) ids[n_ids++] = id;
        for (const char *p = parts[i]; !id && *p; p++) ids[n_ids++] = BYTE_ID(*p);
    }
    return n_ids;
}

Test(spm, merges_as_the_naive_way_does) {
    static const char *const pieces[] = {"a", "b", " ", "\xc3\xa9", "\xff", "aa", "ab"};
    const uint64_t seed = 3;
    uint64_t rng = seed;
    static vocabulary v;
    for (int round = 0; round < 20; round++) {
        begin_vocabulary(&v, letters, N_LETTERS);
        for (size_t i = 259; i < v.n; i++) v.scores[i] = (float)(gw_random(&rng) % 6); /* many equal ones */
        kvf_model *model = open_vocabulary(&v);
        for (int i = 0; i < 200; i++) {
            char text[128] = "";
            uint32_t wanted[256], ids[256];
            for (size_t n = gw_random(&rng) % 25 + 1; n; n--) strcat(text, pieces[gw_random(&rng) % 7]);
            size_t n = encode(model, text, strlen(text), 0, ids, 256), n_wanted = naive_encode(&v, text, wanted);
            cr_assert(n == n_wanted && !memcmp(ids, wanted, n * sizeof *ids), "seed %llu, round %d: \"%s\"",
                      (unsigned long long)seed, round, text);
            must_decode(model, ids, n, 0, text);
        }
        kvf_model_close(model);
    }
}

static double limit_seconds(void) { /* a sanitizer's build may take longer, and still not quadratic time */
#if defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
    return 10;
#else
    return 1;
#endif
}

Test(spm, takes_long_texts_in_linear_time) {
    static const char *const patterns[] = {"a", " ", "ab", "b", "\xc3\xa9", "\xff", "c", "a b"};
    enum { N = 1 << 20 };
    static vocabulary v;
    char *text = malloc(N), *back = malloc(N);
    uint32_t *ids = malloc((N + 2) * sizeof *ids);
    begin_vocabulary(&v, letters, N_LETTERS);
    for (int unused = 0; unused < 2; unused++) {
        for (size_t i = 259; i < v.n && unused; i += 2) v.types[i] = UNUSED;
        kvf_model *model = open_vocabulary(&v);
        for (size_t p = 0; p < sizeof patterns / sizeof *patterns; p++) {
            size_t length = strlen(patterns[p]), n = p || unused ? N / 4 : N;
            for (size_t at = 0; at < n; at++) text[at] = patterns[p][at % length];
            clock_t begin = clock();
            size_t n_ids = encode(model, text, n, KVF_ENCODE_SPECIAL | KVF_ENCODE_BOS, ids, n + 2);
            double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC; /* of this process, whatever else runs */
            cr_assert_lt(seconds, limit_seconds(), "\"%s\" took %.2f s", patterns[p], seconds);
            cr_assert(kvf_tokenizer_decode(kvf_model_tokenizer(model), ids, n_ids, 0, back, N) == n &&
                      !memcmp(back, text, n));
        }
        kvf_model_close(model);
    }
    free(ids);
    free(back);
    free(text);
}

/* ---- Bytes ---------------------------------------------------------------------------------------------------- */

Test(spm, gives_every_byte_back) {
    static const char *const odd[] = {"\xe6\xad",
                                      "\xff",
                                      "\xc0\x80",
                                      "\xed\xa0\x80",
                                      "",
                                      "\xe6\xad\xff\xe6\xad",
                                      "a\xc3",
                                      "\xf4\x90\x80\x80",
                                      " ",
                                      "  a  b  ",
                                      " \xff ",
                                      "\xf0\x9f\x99",
                                      "\xea\xb9\xb0",
                                      "\xf0\x9f\x99\x82",
                                      "<0x41><unk>",
                                      "\n \n"};
    for (int no_space = 0; no_space < 2; no_space++) {
        static vocabulary v;
        begin_vocabulary(&v, letters, N_LETTERS);
        v.no_space = no_space;
        kvf_model *model = open_vocabulary(&v);
        const kvf_tokenizer *t = kvf_model_tokenizer(model);
        uint32_t ids[64];
        char back[64];
        for (unsigned byte = 0; byte < 256; byte++) {
            char text[3] = {(char)byte, 'a', (char)byte};
            for (size_t n = 1; n <= 3; n += 2) {
                size_t n_ids = encode(model, text, n, 0, ids, n + 1);
                size_t n_back = kvf_tokenizer_decode(t, ids, n_ids, 0, back, sizeof back);
                cr_assert(n_back == n && !memcmp(back, text, n), "byte %u", byte);
            }
        }
        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
            size_t n = encode(model, odd[i], strlen(odd[i]), 0, ids, strlen(odd[i]) + 1);
            must_decode(model, ids, n, 0, odd[i]);
        }
        size_t n = encode(model, "nul \0\0 inside\0", 14, KVF_ENCODE_SPECIAL, ids, 16);
        n = kvf_tokenizer_decode(t, ids, n, 0, back, sizeof back);
        cr_assert(n == 14 && !memcmp(back, "nul \0\0 inside\0", 14));
        cr_assert_eq(encode(model, NULL, 0, KVF_ENCODE_SPECIAL, ids, 0), 0);
        cr_assert_eq(encode(model, NULL, 0, KVF_ENCODE_BOS, ids, 1), 1);
        kvf_model_close(model);
    }
}

/* A character over several tokens, the same cut short, and entries that look like bytes and are none. */
Test(spm, joins_byte_tokens) {
    static const char *const more[] = {"<0x-1>", "<0xZZ>", "<0x0a>", "<0x041>"};
    static vocabulary v;
    begin_vocabulary(&v, more, 4);
    kvf_model *model = open_vocabulary(&v);
    must_decode(model, (uint32_t[]){BYTE_ID(0xea), BYTE_ID(0xb9), BYTE_ID(0xb0)}, 3, 0, "\xea\xb9\xb0");
    must_decode(model, (uint32_t[]){BYTE_ID(0xea), BYTE_ID(0xb9), BYTE_ID('x')}, 3, 0, "\xea\xb9x");
    must_decode(model, (uint32_t[]){BYTE_ID(0xf0), BYTE_ID(0x9f), BYTE_ID(0x99), BYTE_ID(0x82)}, 4, 0,
                "\xf0\x9f\x99\x82");
    must_decode(model, (uint32_t[]){BYTE_ID(' '), BYTE_ID('x')}, 2, 0, " x"); /* this space was in the text */
    must_decode(model, (uint32_t[]){259, 260, 261, 262}, 4, 0, "<0x-1><0xZZ><0x0a><0x041>");
    MUST_ENCODE(model, "\xea\xb9\xb0", 0, BYTE_ID(0xe2), BYTE_ID(0x96), BYTE_ID(0x81), BYTE_ID(0xea), BYTE_ID(0xb9),
                BYTE_ID(0xb0)); /* this vocabulary lacks the space itself */
    kvf_model_close(model);
    for (size_t i = 0; i < 4; i++) {
        kvf_error err = {""};
        begin_vocabulary(&v, more + i, 1);
        v.types[259] = BYTE;
        cr_assert_eq(open_status(&v, NULL, &model, &err), KVF_E_FORMAT);
        cr_assert(strstr(err.text, "byte token 259 \"") && strstr(err.text, more[i]), "%s", err.text);
    }
}

/* ---- Control tokens, spaces, flags -------------------------------------------------------------------------- */

enum { X = 259, SPACE_X, SPACE, SLASH, LESS, TOOL, PIPE };

static void small_vocabulary(vocabulary *v) {
    begin_vocabulary(v, (const char *const[]){"x", "\xe2\x96\x81x", "\xe2\x96\x81", "/s>", "<", "<tool>", "|", "/s"},
                     8);
    v->types[TOOL] = USER_DEFINED;
    v->types[PIPE] = CONTROL;
}

Test(spm, puts_a_space_before_a_text) {
    static vocabulary v;
    const uint32_t special = KVF_ENCODE_SPECIAL;
    small_vocabulary(&v);
    kvf_model *model = open_vocabulary(&v);
    MUST_ENCODE(model, "x", 0, SPACE_X);
    MUST_ENCODE(model, "x", KVF_ENCODE_BOS, BOS_ID, SPACE_X); /* without a key for it the begin token is wanted */
    MUST_ENCODE(model, " x x", 0, SPACE, SPACE_X, SPACE_X);
    MUST_ENCODE(model, "</s>", 0, SPACE, LESS, SLASH); /* its parts make a control token, and do not become it */
    MUST_ENCODE(model, "x</s>x", special, SPACE_X, EOS_ID, SPACE_X);
    MUST_ENCODE(model, "<s></s>", special, BOS_ID, EOS_ID);
    MUST_ENCODE(model, "x<tool>x", special, SPACE_X, TOOL, X); /* of the text, which goes on */
    MUST_ENCODE(model, "<tool>x", special, SPACE, TOOL, X);
    MUST_ENCODE(model, "<s><tool>", special, BOS_ID, SPACE, TOOL);
    MUST_ENCODE(model, "|x", special, PIPE, SPACE_X);
    must_decode(model, (uint32_t[]){SPACE_X, EOS_ID, SPACE_X}, 3, 1, "x</s>x");
    must_decode(model, (uint32_t[]){SPACE_X, EOS_ID, SPACE_X}, 3, 0, "x x");
    must_decode(model, (uint32_t[]){BOS_ID, SPACE_X, SPACE_X}, 3, 0, "x x");
    must_decode(model, (uint32_t[]){BOS_ID, SPACE, TOOL, X}, 4, 1, "<s><tool>x");
    must_decode(model, (uint32_t[]){SPACE, SPACE}, 2, 0, " ");
    /* A token alone keeps its space: in the middle of a text it belongs there. */
    char piece[4];
    cr_assert(kvf_tokenizer_piece(kvf_model_tokenizer(model), SPACE_X, 0, piece, 4) == 2 && !memcmp(piece, " x", 2));
    /* Counts all, writes what fits. */
    memset(piece, '.', sizeof piece);
    cr_assert_eq(kvf_tokenizer_decode(kvf_model_tokenizer(model), (uint32_t[]){SPACE_X, SPACE_X}, 2, 0, piece, 2), 3);
    cr_assert(!memcmp(piece, "x ..", 4));
    cr_assert_eq(kvf_tokenizer_find(kvf_model_tokenizer(model), "\xe2\x96\x81x"), SPACE_X);
    cr_assert(kvf_tokenizer_is_end(kvf_model_tokenizer(model), EOS_ID));
    kvf_model_close(model);

    v.no_space = true;
    model = open_vocabulary(&v);
    MUST_ENCODE(model, "x x", 0, X, SPACE_X);
    MUST_ENCODE(model, "</s> x", special, EOS_ID, SPACE_X);
    must_decode(model, (uint32_t[]){SPACE_X, EOS_ID, SPACE_X}, 3, 1, " x</s> x");
    kvf_model_close(model);
}

/* The most ids of any text of n bytes over the alphabet, and of a dialogue of such a text. */
static size_t most_ids(const kvf_model *model, const char *alphabet, size_t n) {
    const kvf_tokenizer *t = kvf_model_tokenizer(model);
    size_t n_letters = strlen(alphabet), n_texts = 1, most = 0;
    char text[16];
    uint32_t ids[256];
    for (size_t i = 0; i < n; i++) n_texts *= n_letters;
    for (size_t k = 0; k < n_texts; k++) {
        size_t rest = k, n_ids = 0;
        for (size_t i = 0; i < n; i++, rest /= n_letters) text[i] = alphabet[rest % n_letters];
        for (uint32_t flags = 0; flags < 4; flags++) {
            n_ids = encode(model, text, n, flags, ids, 256);
            if (n_ids > most) most = n_ids;
        }
        kvf_error err;
        kvf_message message = {"user", text, n};
        cr_assert_eq(kvf_chat_encode(t, "none", &message, 1, ids, 256, &n_ids, &err), KVF_OK, "%s", err.text);
        if (n_ids > most) most = n_ids;
    }
    return most;
}

/* kvf_tokenizer_max_ids is what some text has, and no text has more: by every text of few bytes. */
Test(spm, bounds_the_ids_of_a_text) {
    static const struct {
        const char *space, *control, *unknown; /* unknown: byte tokens that are none */
        bool no_space;
        size_t most[7]; /* by bytes */
    } cases[] = {
        {"\xe2\x96\x81", "||||", "", false, {1, 3, 4, 5, 6, 7, 8}},
        {"\xe2\x96\x81", "||", "", false, {1, 3, 4, 5, 6, 7, 8}},
        {"\xe2\x96\x81", "|", "", false, {1, 3, 4, 6, 7, 9, 10}},
        {"\xe2\x96\x81", "|", "", true, {1, 2, 3, 4, 5, 6, 7}},
        {"y", "||", "", false, {1, 7, 10, 13, 16, 19, 22}},
        {"y", "|", "", false, {1, 7, 10, 14, 17, 21, 24}},
        {"y", "|", "", true, {1, 4, 7, 10, 13, 16, 19}},
        {"y", "|", "\xe2\x96", false, {1, 5, 7, 10, 12, 15, 17}}, /* a run of unknown bytes, and a byte */
        {"y", "|", "\x96", false, {1, 7, 10, 14, 17, 21, 24}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        static vocabulary v;
        begin_vocabulary(&v, (const char *const[]){"x", cases[c].space, cases[c].control}, 3);
        v.types[261] = CONTROL;
        v.no_space = cases[c].no_space;
        for (const char *p = cases[c].unknown; *p; p++) v.types[BYTE_ID(*p)] = NORMAL;
        kvf_model *model = open_vocabulary(&v);
        for (size_t n = 0; n < 7; n++) {
            cr_assert_eq(kvf_tokenizer_max_ids(kvf_model_tokenizer(model), n), cases[c].most[n],
                         "case %zu, %zu bytes: at most %zu", c, n,
                         kvf_tokenizer_max_ids(kvf_model_tokenizer(model), n));
            cr_assert_eq(most_ids(model, " x|", n), cases[c].most[n], "case %zu, %zu bytes", c, n);
        }
        cr_assert_eq(kvf_tokenizer_max_ids(kvf_model_tokenizer(model), SIZE_MAX), SIZE_MAX);
        kvf_model_close(model);
    }
}

/* What a fuzzer found: the token of the space is a control token, so that text writes a space by three bytes. */
Test(spm, takes_a_space_that_is_a_control_token) {
    static vocabulary v;
    small_vocabulary(&v);
    v.types[SPACE] = CONTROL;
    v.texts[SPACE_X] = "y";
    kvf_model *model = open_vocabulary(&v);
    const uint32_t a = BYTE_ID('\xe2'), b = BYTE_ID('\x96'), c = BYTE_ID('\x81');
    MUST_ENCODE(model, " x", KVF_ENCODE_SPECIAL, a, b, c, a, b, c, X);
    cr_assert_eq(kvf_tokenizer_max_ids(kvf_model_tokenizer(model), 2), 1 + 3 + 2 * 3);
    kvf_model_close(model);
}

/* A byte without a token is the unknown token, one for a run; without that it is left out. */
Test(spm, knows_unknown_bytes) {
    static vocabulary v;
    small_vocabulary(&v);
    for (int i = 3; i < 259; i++) v.types[i] = NORMAL;
    kvf_model *model = open_vocabulary(&v);
    MUST_ENCODE(model, "xyzx \xc3\xa9 \xffx", 0, SPACE_X, UNK_ID, X, SPACE, UNK_ID, SPACE, UNK_ID, X);
    kvf_model_close(model);
    v.skip = "tokenizer.ggml.unknown_token_id";
    model = open_vocabulary(&v);
    MUST_ENCODE(model, "xyzx", 0, SPACE_X, X);
    kvf_model_close(model);
}

Test(spm, leaves_a_buffer_that_is_too_small) {
    static vocabulary v;
    small_vocabulary(&v);
    kvf_model *model = open_vocabulary(&v);
    uint32_t ids[3] = {7, 7, 7};
    size_t n = 99;
    kvf_error err;
    cr_assert_eq(kvf_tokenizer_encode(kvf_model_tokenizer(model), "yy", 2, KVF_ENCODE_BOS, ids, 3, &n, &err),
                 KVF_E_LIMIT);
    cr_assert(n == 4 && ids[0] == 7 && strstr(err.text, "capacity of 3 ids: the text has 4"), "%s", err.text);
    kvf_model_close(model);
}

/* ---- Files ---------------------------------------------------------------------------------------------------- */

Test(spm, refuses_files_that_make_no_sense) {
    static const struct {
        vocabulary v;
        const char *says;
        kvf_status status;
    } cases[] = {
        {{.skip = "tokenizer.ggml.scores"}, "tokenizer.ggml.scores", KVF_E_FORMAT},
        {{.skip = "tokenizer.ggml.token_type"}, "tokenizer.ggml.token_type", KVF_E_FORMAT},
        {{.n_scores = 260}, "key tokenizer.ggml.scores: 260 elements", KVF_E_FORMAT},
        {{.n_types = 258}, "key tokenizer.ggml.token_type: 258 elements", KVF_E_FORMAT},
        {{.scores = {NAN}}, "token 259 has score NaN", KVF_E_FORMAT},
        {{.true_key = "tokenizer.ggml.remove_extra_whitespaces"}, "remove_extra_whitespaces: true", KVF_E_UNSUPPORTED},
        {{.unknown_id = 0x40000000}, "unknown_token_id: 1073741824: must be below the 267 tokens", KVF_E_FORMAT},
        {{.charsmap = "abc"}, "precompiled_charsmap: a table of 3 elements", KVF_E_UNSUPPORTED},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static vocabulary v;
        kvf_model *model = NULL;
        kvf_error err = {""};
        small_vocabulary(&v);
        v.skip = cases[i].v.skip;
        v.n_scores = cases[i].v.n_scores;
        v.n_types = cases[i].v.n_types;
        v.true_key = cases[i].v.true_key;
        v.charsmap = cases[i].v.charsmap;
        v.unknown_id = cases[i].v.unknown_id;
        if (isnan(cases[i].v.scores[0])) v.scores[X] = NAN;
        cr_assert_eq(open_status(&v, NULL, &model, &err), cases[i].status, "case %zu: %s", i, err.text);
        cr_assert(!model && strstr(err.text, cases[i].says), "case %zu: %s", i, err.text);
    }
    static vocabulary v;
    small_vocabulary(&v);
    v.charsmap = "";
    v.scores[X] = -INFINITY; /* merges last of all */
    kvf_model_close(open_vocabulary(&v));
}

Test(spm, survives_every_failed_allocation) {
    static vocabulary v;
    meter m = {0};
    const kvf_allocator allocator = {meter_alloc, meter_free, &m};
    kvf_model *model = NULL;
    kvf_status status = KVF_E_NO_MEMORY;
    kvf_error err;
    small_vocabulary(&v);
    v.types[X] = UNUSED;
    for (size_t i = 1; status != KVF_OK; i++) {
        m = (meter){.fail_at = i};
        status = open_status(&v, &allocator, &model, &err);
        cr_assert(status == KVF_OK || (status == KVF_E_NO_MEMORY && m.n_live == 0), "allocation %zu", i);
    }
    size_t n_live = m.n_live, n_ids = 77;
    status = KVF_E_NO_MEMORY;
    for (size_t i = 1; status != KVF_OK; i++) {
        uint32_t ids[64] = {5};
        m.n_calls = 0;
        m.fail_at = i;
        status = kvf_tokenizer_encode(kvf_model_tokenizer(model), "x x yy x</s>x and a longer text", 31,
                                      KVF_ENCODE_SPECIAL | KVF_ENCODE_BOS, ids, 64, &n_ids, &err);
        cr_assert(status == KVF_OK ? i > 5 : status == KVF_E_NO_MEMORY && ids[0] == 5 && n_ids == 77, "%zu", i);
        cr_assert_eq(m.n_live, n_live, "allocation %zu leaks", i);
    }
    kvf_model_close(model);
    cr_assert_eq(m.n_live, 0);
}
