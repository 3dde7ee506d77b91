/* SentencePiece tokens: merging, every byte, long texts, control tokens and spaces, files that make no sense. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <time.h>

#include "tests/meter.h"
#include "tests/spm_vocabulary.h"

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
Test(spm, g1_joins_byte_tokens) {
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
        kvf_error err = {.text = ""};
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
    for (uint32_t flags = 0; flags <= special; flags += special) {
        MUST_ENCODE(model, "x<tool>x", flags, SPACE_X, TOOL, X); /* of the text, which goes on */
        MUST_ENCODE(model, "<tool>x", flags, SPACE, TOOL, X);
    }
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
            cr_assert_geq(n_ids, kvf_tokenizer_min_ids(t, text, n));
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
        kvf_error err = {.text = ""};
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
