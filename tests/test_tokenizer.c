/* Text to ids and back: the real vocabulary's known answers, a naive merger, every byte. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <jansson.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "model/model.h"
#include "model/tokenizer.h"
#include "real_model.h"
#include "tests/meter.h"
#include "tests/open_tiny.h"
#include "tests/tokenize_rig.h"

static kvf_model *open_path(const char *path, const kvf_allocator *allocator) {
    kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = 1};
    kvf_model *model = NULL;
    kvf_error err = {.text = ""};
    if (allocator) config.allocator = *allocator;
    kvf_status status = kvf_model_open(path, &config, &model, &err);
    cr_assert_eq(status, KVF_OK, "%s: %s", kvf_status_name(status), err.text);
    return model;
}

static void must_round_trip(const kvf_model *model, const char *text, size_t n, uint32_t flags, const char *what) {
    uint32_t ids[MAX_IDS + 1];
    char back[MAX_IDS + 1];
    cr_assert_leq(n, (size_t)MAX_IDS);
    size_t n_ids = encode(model, text, n, flags, ids, n + 1);
    size_t n_back = kvf_tokenizer_decode(kvf_model_tokenizer(model), ids, n_ids, 1, back, sizeof back);
    cr_assert(n_back == n && !memcmp(back, text, n), "%s: %zu bytes came back as %zu others", what, n, n_back);
}

/* ---- The real vocabulary ---------------------------------------------------------------------------------- */

static json_t *known_answers(void) {
    json_error_t error;
    json_t *root = json_load_file(KVF_TEST_DATA "/smollm2_tokenize.json", 0, &error);
    cr_assert_not_null(root, "%s", error.text);
    return root;
}

static size_t json_ids(const json_t *list, uint32_t *ids) {
    size_t n = json_array_size(list);
    cr_assert_leq(n, (size_t)MAX_IDS);
    for (size_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return n;
}

Test(tokenizer, agrees_with_known_answers) {
    const char *path = kvf_test_real_model();
    if (!path) cr_skip("the real model is not here");
    kvf_model *model = open_path(path, NULL);
    json_t *root = known_answers(), *item;
    size_t i, n_cases = 0;
    uint32_t wanted[MAX_IDS], ids[MAX_IDS];
    json_array_foreach(json_object_get(root, "tokenize"), i, item) {
        const char *text = json_string_value(json_object_get(item, "text"));
        size_t n = json_ids(json_object_get(item, "ids"), wanted);
        must_encode(model, text, KVF_ENCODE_SPECIAL | KVF_ENCODE_BOS, wanted, n);
        char back[1024];
        size_t n_back = kvf_tokenizer_decode(kvf_model_tokenizer(model), wanted, n, 1, back, sizeof back);
        cr_assert(n_back == strlen(text) && !memcmp(back, text, n_back), "\"%s\" does not come back", text);
        n_cases++;
    }
    cr_assert_eq(n_cases, 15);
    json_array_foreach(json_object_get(root, "chat"), i, item) {
        const char *text = json_string_value(json_object_get(item, "user"));
        size_t n = json_ids(json_object_get(item, "ids"), wanted), n_ids;
        kvf_message message = {"user", text, strlen(text)};
        cr_assert_eq(kvf_chat_encode(kvf_model_tokenizer(model), "auto", &message, 1, ids, MAX_IDS, &n_ids, NULL),
                     KVF_OK);
        cr_assert(n_ids == n && !memcmp(ids, wanted, n * sizeof *ids), "\"%s\"", text);
        n_cases++;
    }
    cr_assert_eq(n_cases, 19);
    cr_assert(kvf_tokenizer_is_end(kvf_model_tokenizer(model), 0) &&
              kvf_tokenizer_is_end(kvf_model_tokenizer(model), 2));
    json_decref(root);
    kvf_model_close(model);
}

/* This vocabulary has no token for 21 bytes that its training never saw: those are left out, all others come back. */
Test(tokenizer, leaves_out_bytes_without_a_token) {
    const char *path = kvf_test_real_model();
    if (!path) cr_skip("the real model is not here");
    kvf_model *model = open_path(path, NULL);
    size_t n_lost = 0;
    for (unsigned byte = 0; byte < 256; byte++) {
        char text = (char)byte, back[8];
        uint32_t ids[2];
        size_t n = encode(model, &text, 1, 0, ids, 2);
        cr_assert(n == 1 || n == 0);
        if (n) cr_assert(kvf_tokenizer_decode(kvf_model_tokenizer(model), ids, 1, 0, back, 8) == 1 && back[0] == text);
        n_lost += n == 0;
    }
    cr_assert_eq(n_lost, 21);
    kvf_model_close(model);
}

/* ---- Bytes -------------------------------------------------------------------------------------------------- */

Test(tokenizer, gives_every_byte_back) {
    static const char *const odd[] = {"\xe6\xad",
                                      "\xff",
                                      "\xc0\x80",
                                      "\xed\xa0\x80",
                                      "",
                                      "\xe6\xad\xff\xe6\xad",
                                      "a\xc3",
                                      "\xf4\x90\x80\x80",
                                      "\xf0\x9f\x99",
                                      "\xf0\x9f\x99\x82",
                                      " \xc3\xa9\xc3 ",
                                      "'\xc5\xbf don't"};
    for (int p = 0; p < N_PRE; p++) {
        kvf_model *model = open_tiny_words(&(struct tiny_model_params){.pre = pre_names[p]});
        for (unsigned byte = 0; byte < 256; byte++) {
            char text[3] = {(char)byte, 'a', (char)byte};
            uint32_t id;
            cr_assert_eq(encode(model, text, 1, 0, &id, 1), 1);
            cr_assert_eq(id, TINY_BYTE_0 + byte);
            must_round_trip(model, text, 1, 0, "a byte");
            must_round_trip(model, text, 3, 0, "a byte beside a letter");
        }
        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) must_round_trip(model, odd[i], strlen(odd[i]), 0, odd[i]);
        must_round_trip(model, "nul \0\0 inside\0", 14, KVF_ENCODE_SPECIAL, "NUL");
        uint32_t id;
        cr_assert_eq(encode(model, NULL, 0, KVF_ENCODE_SPECIAL, &id, 0), 0);
        kvf_model_close(model);
    }
}

Test(tokenizer, gives_random_bytes_back) {
    static const char *const pieces[] = {" ",  "\n", "\r\n", "the",      "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x99\x82",
                                         "12", "'s", "  ",   "\xc2\xa0", "<tool>",   "<|im_end|>",   "\xe1\xa0\x8e",
                                         "!!", "\t", "\xff", "\xcc\x81"};
    const uint64_t seed = 7;
    uint64_t rng = seed;
    for (int p = 0; p < N_PRE; p++) {
        kvf_model *model = open_tiny_words(&(struct tiny_model_params){.pre = pre_names[p]});
        for (int i = 0; i < 1000; i++) {
            char text[256];
            size_t n = 0, wanted = gw_random(&rng) % 200;
            while (n < wanted) {
                const char *piece = pieces[gw_random(&rng) % (sizeof pieces / sizeof *pieces)];
                if (i % 2) {
                    memcpy(text + n, piece, strlen(piece));
                    n += strlen(piece);
                } else {
                    text[n++] = (char)gw_random(&rng);
                }
            }
            char what[64];
            snprintf(what, sizeof what, "%s, seed %llu, text %d", pre_names[p], (unsigned long long)seed, i);
            must_round_trip(model, text, n, i % 3 ? 0 : KVF_ENCODE_SPECIAL, what);
        }
        kvf_model_close(model);
    }
}

/* A character over several tokens, the same cut short, and what no decoder may write as text. */
Test(tokenizer, g1_joins_bytes_of_a_character) {
    kvf_model *model = open_tiny_words(&(struct tiny_model_params){0});
    const kvf_tokenizer *t = kvf_model_tokenizer(model);
    char out[16];
    uint32_t korean[] = {TINY_BYTE_0 + 0xea, TINY_BYTE_0 + 0xb9, TINY_BYTE_0 + 0xb0, TINY_BYTE_0 + 'x'};
    cr_assert(kvf_tokenizer_decode(t, korean, 4, 0, out, sizeof out) == 4 && !memcmp(out, "\xea\xb9\xb0x", 4));
    korean[2] = korean[3];
    cr_assert(kvf_tokenizer_decode(t, korean, 3, 0, out, sizeof out) == 3 && !memcmp(out, "\xea\xb9x", 3));
    /* Counts all, writes what fits. */
    memset(out, '.', sizeof out);
    cr_assert(kvf_tokenizer_decode(t, korean, 3, 0, out, 2) == 3 && !memcmp(out, "\xea\xb9..", 4));
    cr_assert_eq(kvf_tokenizer_decode(t, korean, 3, 0, NULL, 0), 3);
    /* Ids of no token have no bytes. */
    const uint32_t outside[] = {TINY_N_VOCAB, UINT32_MAX, 1u << 31, TINY_BYTE_0 + 'y'};
    cr_assert(kvf_tokenizer_decode(t, outside, 4, 1, out, sizeof out) == 1 && out[0] == 'y');
    cr_assert_eq(kvf_tokenizer_is_end(t, UINT32_MAX), 0);
    kvf_model_close(model);
}

typedef struct token_list {
    const char *texts[8];
    int types[8];
    const char *merges[4];
} token_list;

/* A vocabulary of the given tokens in place of the tiny one. */
static void add_tokens(gw *w, void *ctx) {
    const token_list *list = ctx;
    size_t n = 0, n_merges = 0;
    while (n < 8 && list->texts[n]) n++;
    while (n_merges < 4 && list->merges[n_merges]) n_merges++;
    gw_key_texts(w, "tokenizer.ggml.tokens", list->texts, n);
    gw_key_array(w, "tokenizer.ggml.token_type", GW_I32, n);
    for (size_t i = 0; i < n; i++) gw_put32(&w->keys, (uint32_t)list->types[i]);
    gw_key_texts(w, "tokenizer.ggml.merges", list->merges, n_merges);
    /* Without tensors there is no embedding whose rows would have to agree. */
    w->infos.n = w->data.n = 0;
    w->n_tensors = 0;
}

static kvf_model *open_tokens(const token_list *list, kvf_status *status, kvf_error *err) {
    struct tiny_model_params params = {
        .extra = add_tokens,
        .ctx = (void *)(uintptr_t)list,
        .skip = "tokenizer.ggml.tokens tokenizer.ggml.token_type tokenizer.ggml.merges llama.vocab_size "
                "tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id"};
    char path[256];
    kvf_model *model = NULL;
    kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = 1};
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, &params), 0);
    *status = kvf_model_open(path, &config, &model, err);
    unlink(path);
    return model;
}

Test(tokenizer, reads_byte_tokens) {
    static const token_list good = {.texts = {"<0x0A>", "<0x41>", "<0x-1>", "<0xZZ>", "A"}, .types = {6, 1, 1, 1, 1}};
    kvf_status status;
    kvf_error err = {.text = ""};
    kvf_model *model = open_tokens(&good, &status, &err);
    cr_assert_not_null(model, "%s", err.text);
    const uint32_t all[] = {0, 1, 2, 3};
    char out[64];
    size_t n = kvf_tokenizer_decode(kvf_model_tokenizer(model), all, 4, 0, out, sizeof out);
    cr_assert(n == 19 && !memcmp(out, "\n<0x41><0x-1><0xZZ>", n), "%.*s", (int)n, out);
    must_encode(model, "A\nB", 0, (uint32_t[]){4, 0}, 2); /* B has no token here */
    kvf_model_close(model);
    static const char *const bad[] = {"<0x-1>", "<0xZZ>", "<0x4>", "<0x041>", "", "<0x0a>"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const token_list list = {.texts = {"A", bad[i]}, .types = {1, 6}};
        cr_assert_null(open_tokens(&list, &status, &err));
        cr_assert_eq(status, KVF_E_FORMAT);
        cr_assert(strstr(err.text, "byte token 1 \"") && strstr(err.text, bad[i]), "%s", err.text);
    }
}

Test(tokenizer, refuses_merges_that_make_no_sense) {
    static const struct {
        token_list list;
        const char *says;
    } cases[] = {
        {{{"a", "b", "ab"}, {1, 1, 1}, {"a"}}, "merge 0 \"a\": must be two parts"},
        {{{"a", "b", "ab"}, {1, 1, 1}, {"a b", ""}}, "merge 1 \"\": must be two parts"},
        {{{"a", "b", "ab"}, {1, 1, 1}, {" ab"}}, "merge 0 \" ab\": must be two parts"},
        {{{"a", "b", "ab"}, {1, 1, 1}, {"ab "}}, "merge 0 \"ab \": must be two parts"},
        {{{"a", "b", "ab"}, {1, 1, 1}, {"a b a"}}, "merge 0 \"a b a\": must be two parts"},
        {{{"a", "b", "ab"}, {1, 1, 1}, {"a c"}}, "merge 0 \"a c\": its parts and their sum"},
        {{{"a", "b", "ba"}, {1, 1, 1}, {"a b"}}, "merge 0 \"a b\": its parts and their sum"},
        {{{"a", "b", "ab"}, {1, 1, 3}, {"a b"}}, "merge 0 \"a b\": a control"}, /* text would become a control token */
        {{{"a", "b", "ab"}, {3, 1, 1}, {"a b"}}, "merge 0 \"a b\": a control"},
        {{{"a", "b", "ab"}, {1, 2, 1}, {"a b"}}, "merge 0 \"a b\": a control"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_status status;
        kvf_error err = {.text = ""};
        cr_assert_null(open_tokens(&cases[i].list, &status, &err));
        cr_assert_eq(status, KVF_E_FORMAT);
        cr_assert(strstr(err.text, cases[i].says), "%s, wanted %s", err.text, cases[i].says);
    }
    static const token_list twice = {.texts = {"a", "b", "ab", "a"}, .types = {1, 1, 1, 1}, .merges = {"a b", "a b"}};
    kvf_status status;
    kvf_model *model = open_tokens(&twice, &status, NULL);
    cr_assert_not_null(model); /* equal texts: the lowest id; equal merges: the first */
    must_encode(model, "aba", 0, (uint32_t[]){2, 0}, 2);
    kvf_model_close(model);
}

Test(tokenizer, takes_words_whole_where_the_model_does) {
    /* "abc" is a token, but its merges end at "ab": llama-bpe takes the word whole, others do not. */
    static const token_list list = {.texts = {"a", "b", "c", "ab", "abc"}, .types = {1, 1, 1, 1, 1}, .merges = {"a b"}};
    for (int p = 0; p < N_PRE; p++) {
        char path[256];
        kvf_model *model = NULL;
        kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = 1};
        struct tiny_model_params params = {.extra = add_tokens,
                                           .ctx = (void *)(uintptr_t)&list,
                                           .pre = pre_names[p],
                                           .skip =
                                               "tokenizer.ggml.tokens tokenizer.ggml.token_type tokenizer.ggml.merges "
                                               "llama.vocab_size"};
        gw_temp_path(path, sizeof path);
        cr_assert_eq(kvf_test_write_tiny_model(path, &params), 0);
        cr_assert_eq(kvf_model_open(path, &config, &model, NULL), KVF_OK);
        unlink(path);
        bool whole = !strcmp(pre_names[p], "llama-bpe");
        must_encode(model, "abc", 0, whole ? (uint32_t[]){4} : (uint32_t[]){3, 2}, whole ? 1 : 2);
        kvf_model_close(model);
    }
}

/* ---- Merging -------------------------------------------------------------------------------------------------- */

/* Merges one word the slow way: again and again the leftmost pair of the lowest rank. */
static size_t naive_word(const char *word, size_t n, uint32_t *ids) {
    for (size_t i = 0; i < n; i++) ids[i] = TINY_BYTE_0 + (unsigned char)word[i];
    for (;;) {
        size_t best = n, best_rank = 40;
        for (size_t i = 0; i + 1 < n; i++) {
            for (size_t rank = 0; rank < best_rank; rank++) {
                char pair[3][32];
                for (int side = 0; side < 2; side++) {
                    uint32_t id = ids[i + (size_t)side];
                    if (id < 260) {
                        gw_byte_text(id - TINY_BYTE_0, pair[side]);
                    } else {
                        const char *merge = gw_tiny_merges[id - 260], *space = strchr(merge, ' ');
                        snprintf(pair[side], 32, "%.*s%s", (int)(space - merge), merge, space + 1);
                    }
                }
                snprintf(pair[2], 32, "%.15s %.15s", pair[0], pair[1]);
                if (!strcmp(pair[2], gw_tiny_merges[rank])) best = i, best_rank = rank;
            }
        }
        if (best == n) return n;
        ids[best] = 260 + (uint32_t)best_rank;
        memmove(ids + best + 1, ids + best + 2, (n - best - 2) * sizeof *ids);
        n--;
    }
}

Test(tokenizer, merges_as_the_naive_way_does) {
    static const char letters[] = "aaaahetinorsduwgl";
    const uint64_t seed = 11;
    uint64_t rng = seed;
    kvf_model *model = open_tiny_words(&(struct tiny_model_params){0});
    for (int i = 0; i < 500; i++) {
        char word[48];
        uint32_t wanted[48];
        size_t n = gw_random(&rng) % 40 + 1, at = 0;
        if (gw_random(&rng) % 2) word[at++] = ' ';
        while (at < n) word[at++] = letters[gw_random(&rng) % (sizeof letters - 1)];
        word[n] = 0;
        if (!strcmp(word, " ")) continue;
        must_encode(model, word, 0, wanted, naive_word(word, n, wanted));
    }
    kvf_model_close(model);
}

/* Quadratic time would be minutes for any of these. */
Test(tokenizer, takes_long_words_in_linear_time) {
    static const char *const patterns[] = {"a",    " ",        "ha",        "\n", " \n", "7",    "!",
                                           "\xff", "\xc3\xa9", "the user ", "'",  "<",   "\t \r"};
    enum { N = 1 << 20 };
    char *text = malloc(N);
    uint32_t *ids = malloc((N + 1) * sizeof *ids);
    for (int p = 0; p < N_PRE; p++) {
        kvf_model *model = open_tiny_words(&(struct tiny_model_params){.pre = pre_names[p]});
        for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
            size_t length = strlen(patterns[i]), n = p || i ? N / 8 : N;
            for (size_t at = 0; at < n; at++) text[at] = patterns[i][at % length];
            clock_t begin = clock();
            size_t n_ids = encode(model, text, n, KVF_ENCODE_SPECIAL, ids, n + 1);
            double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC; /* of this process, whatever else runs */
            cr_assert_lt(seconds, limit_seconds(), "%s: \"%s\" took %.2f s", pre_names[p], patterns[i], seconds);
            cr_assert_eq(kvf_tokenizer_decode(kvf_model_tokenizer(model), ids, n_ids, 0, NULL, 0), n);
        }
        kvf_model_close(model);
    }
    free(ids);
    free(text);
}

/* Length of the character at p the slow way: read a code point in every form, and write it back in the only right one. */
static uint32_t naive_length(const unsigned char *p, size_t n) {
    static const uint32_t first[] = {0, 0, 0x80, 0x800, 0x10000};
    uint32_t length = p[0] < 0x80             ? 1
                      : (p[0] & 0xe0) == 0xc0 ? 2
                      : (p[0] & 0xf0) == 0xe0 ? 3
                      : (p[0] & 0xf8) == 0xf0 ? 4
                                              : 0;
    if (!length || length > n) return 0;
    uint32_t c = length == 1 ? p[0] : p[0] & (0xffu >> (length + 1));
    for (uint32_t i = 1; i < length; i++) {
        if (p[i] >> 6 != 2) return 0;
        c = c << 6 | (p[i] & 0x3f);
    }
    return c < first[length] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000) ? 0 : length;
}

Test(tokenizer, knows_utf8) {
    static const unsigned char ends[] = {0, 0x7f, 0x80, 0xbf, 0xc0, 0xff};
    for (uint32_t i = 0; i < 256 * 256 * 6 * 6; i++) {
        unsigned char p[4] = {(unsigned char)(i >> 8), (unsigned char)i, ends[(i >> 16) % 6], ends[(i >> 16) / 6]};
        for (size_t n = 1; n <= 4; n++)
            cr_assert_eq(kvf__utf8_length((const char *)p, n, NULL), naive_length(p, n), "%02x %02x %02x %02x, %zu",
                         p[0], p[1], p[2], p[3], n);
    }
    cr_assert_eq(kvf__utf8_length("", 0, NULL), 0);
}

/* ---- Control tokens, flags, limits
 * ---------------------------------------------------------------------------------- */

Test(tokenizer, finds_control_tokens_only_when_asked) {
    kvf_model *model = open_tiny_words(&(struct tiny_model_params){0});
    const kvf_tokenizer *t = kvf_model_tokenizer(model);
    const char text[] = "<|im_start|>a<tool><|im_end|><|im_end";
    uint32_t ids[64], plain[64];
    size_t n = encode(model, text, strlen(text), KVF_ENCODE_SPECIAL, ids, 64);
    cr_assert(ids[0] == TINY_IM_START && ids[1] == TINY_BYTE_0 + 'a' && ids[2] == TINY_USER_DEFINED &&
              ids[3] == TINY_IM_END && n > 4);
    size_t n_plain = encode(model, text, strlen(text), 0, plain, 64);
    for (size_t i = 0; i < n_plain; i++) cr_assert(plain[i] >= TINY_BYTE_0 || plain[i] == TINY_USER_DEFINED);
    for (size_t i = 4; i < n; i++) cr_assert_geq(ids[i], TINY_BYTE_0);
    must_round_trip(model, text, strlen(text), 0, "as text");
    char out[64];
    cr_assert_eq(kvf_tokenizer_piece(t, TINY_IM_END, 0, out, sizeof out), 0);
    cr_assert_eq(kvf_tokenizer_piece(t, TINY_IM_END, 1, out, sizeof out), 10);
    cr_assert(!memcmp(out, "<|im_end|>", 10));
    cr_assert_eq(kvf_tokenizer_piece(t, TINY_USER_DEFINED, 0, out, sizeof out), 6);
    cr_assert_eq(kvf_tokenizer_find(t, "<|im_end|>"), TINY_IM_END);
    cr_assert_eq(kvf_tokenizer_find(t, "<|im_end|"), KVF_NO_TOKEN);
    cr_assert_eq(kvf_tokenizer_find(t, ""), KVF_NO_TOKEN);
    cr_assert(kvf_tokenizer_is_end(t, TINY_IM_END) && kvf_tokenizer_is_end(t, TINY_ENDOFTEXT) &&
              !kvf_tokenizer_is_end(t, TINY_IM_START));
    cr_assert_eq(kvf_tokenizer_n_vocab(t), TINY_N_VOCAB);
    kvf_model_close(model);
    /* Of two that begin alike the longer. */
    static const token_list list = {.texts = {"<a>", "<a><b>", "a", "<", ">"}, .types = {3, 4, 1, 1, 1}};
    kvf_status status;
    model = open_tokens(&list, &status, NULL);
    must_encode(model, "<a><b><a>", KVF_ENCODE_SPECIAL, (uint32_t[]){1, 0}, 2);
    kvf_model_close(model);
}

Test(tokenizer, begins_where_the_file_wants_it) {
    static const struct {
        struct tiny_model_params p;
        bool begins;
    } cases[] = {{{.add_bos = 1}, true},
                 {{.add_bos = 0}, false},
                 {{.add_bos = 1, .skip = "tokenizer.ggml.bos_token_id"}, false},
                 {{.skip = "tokenizer.ggml.add_bos_token"}, false},
                 {{.skip = "tokenizer.ggml.add_bos_token", .pre = "llama-bpe"}, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_model *model = open_tiny_words(&cases[i].p);
        must_encode(model, "a", KVF_ENCODE_BOS,
                    cases[i].begins ? (uint32_t[]){TINY_IM_START, TINY_BYTE_0 + 'a'} : (uint32_t[]){TINY_BYTE_0 + 'a'},
                    cases[i].begins ? 2 : 1);
        must_encode(model, "a", 0, (uint32_t[]){TINY_BYTE_0 + 'a'}, 1);
        kvf_model_close(model);
    }
}

/* By the longest token; bytes that have none count for nothing. */
Test(tokenizer, tells_the_fewest_ids_of_a_text) {
    kvf_model *model = open_tiny_words(&(struct tiny_model_params){0});
    const kvf_tokenizer *t = kvf_model_tokenizer(model);
    char text[4000];
    memset(text, 'a', sizeof text);
    size_t longest = 0, n = kvf_tokenizer_min_ids(t, text, sizeof text), n_ids;
    uint32_t ids[sizeof text];
    for (uint32_t id = 0; id < kvf_tokenizer_n_vocab(t); id++)
        longest = KVF__MAX(longest, kvf_tokenizer_piece(t, id, 1, NULL, 0));
    cr_assert(n && n <= (sizeof text - 1) / longest + 1 && n >= sizeof text / (2 * longest), "%zu", n);
    cr_assert_eq(kvf_tokenizer_encode(t, text, sizeof text, 0, ids, sizeof text, &n_ids, NULL), KVF_OK);
    cr_assert_geq(n_ids, n);
    cr_assert(kvf_tokenizer_min_ids(t, text, 0) == 0 && kvf_tokenizer_min_ids(t, text, 1) == 1);
    kvf_model_close(model);
}

Test(tokenizer, leaves_a_buffer_that_is_too_small) {
    kvf_model *model = open_tiny_words(&(struct tiny_model_params){0});
    uint32_t ids[4] = {7, 7, 7, 7};
    size_t n = 99;
    kvf_error err;
    cr_assert_eq(kvf_tokenizer_encode(kvf_model_tokenizer(model), "xyzxy", 5, 0, ids, 4, &n, &err), KVF_E_LIMIT);
    cr_assert(n == 5 && ids[0] == 7 && ids[3] == 7 && strstr(err.text, "capacity of 4 ids: the text has 5"));
    cr_assert_eq(kvf_tokenizer_max_ids(kvf_model_tokenizer(model), 5), 5 + 1); /* and the begin token */
    cr_assert_eq(kvf_tokenizer_encode(kvf_model_tokenizer(model), "a", (size_t)1 << 31, 0, ids, 4, &n, &err),
                 KVF_E_LIMIT);
    cr_assert(n == 5 && strstr(err.text, "text of 2147483648 bytes"));
    kvf_model_close(model);
}

Test(tokenizer, survives_every_failed_allocation) {
    char path[256], text[300];
    meter m = {0};
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, &(struct tiny_model_params){0}), 0);
    kvf_model *model = open_path(path, &(kvf_allocator){meter_alloc, meter_free, &m});
    unlink(path);
    memset(text, 'a', sizeof text);
    for (size_t i = 0; i < sizeof text; i += 50) text[i] = ' ';
    const kvf_message message = {"user", text, sizeof text};
    for (int chat = 0; chat < 2; chat++) {
        size_t n_live = m.n_live, n_ids = 77;
        kvf_status status = KVF_E_NO_MEMORY;
        for (size_t i = 1; status != KVF_OK; i++) {
            uint32_t ids[512] = {5};
            kvf_error err = {.text = ""};
            m.n_calls = 0;
            m.fail_at = i;
            status =
                chat ? kvf_chat_encode(kvf_model_tokenizer(model), "chatml", &message, 1, ids, 512, &n_ids, &err)
                     : kvf_tokenizer_encode(kvf_model_tokenizer(model), text, sizeof text, 0, ids, 512, &n_ids, &err);
            cr_assert(status == KVF_OK ? i > 5 : status == KVF_E_NO_MEMORY && err.text[0] && ids[0] == 5 && n_ids == 77,
                      "allocation %zu", i);
            cr_assert_eq(m.n_live, n_live, "allocation %zu leaks", i);
        }
    }
    kvf_model_close(model);
    cr_assert_eq(m.n_live, 0);
}

static void *encode_often(void *ctx) {
    const kvf_model *model = ctx;
    const char text[] = "the user and 42 hats\xff <|im_end|> aaaaaaaaaaaaaaaa";
    uint32_t first[64], ids[64];
    size_t n = encode(model, text, sizeof text, KVF_ENCODE_SPECIAL, first, 64);
    for (int i = 0; i < 200; i++)
        if (encode(model, text, sizeof text, KVF_ENCODE_SPECIAL, ids, 64) != n || memcmp(ids, first, n * sizeof *ids))
            return "differs";
    return NULL;
}

Test(tokenizer, may_be_shared_by_threads) {
    kvf_model *model = open_tiny_words(&(struct tiny_model_params){0});
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) cr_assert_eq(pthread_create(&threads[i], NULL, encode_often, model), 0);
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(threads[i], &result);
        cr_assert_null(result);
    }
    kvf_model_close(model);
}
