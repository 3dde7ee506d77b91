/* How texts are cut into words before they are merged: by the file's rule, by the reference's, and not at all. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <jansson.h>

#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/open_tiny.h"
#include "tests/tokenize_rig.h"

typedef struct joined {
    char text[512];
    size_t n;
} joined;

static kvf_status join_word(void *ctx, const char *word, size_t n) {
    joined *j = ctx;
    j->n += (size_t)snprintf(j->text + j->n, sizeof j->text - j->n, "%s%.*s", j->n ? "|" : "", (int)n, word);
    return KVF_OK;
}

Test(words, cuts_words_as_the_file_says) {
    static const struct {
        const char *pre, *text, *words;
    } cases[] = {
        {"smollm", "Hello  world's 1234, x", "Hello| | world|'s| |1|2|3|4|,| x"},
        {"smollm", "a  7", "a|  |7"},
        {"gpt-2", "Hello  world's 1234, x", "Hello| | world|'s| 1234|,| x"},
        {"gpt-2", "a  7\n\n b  ", "a| | 7|\n\n| b|  "},
        {"gpt-2", "I'M don't", "I|'|M| don|'t"},
        {"default", "Hi there 1234567!", "Hi| there| |123|456|7|!"},
        {"llama-bpe", "Hello  world'S 12345,x\r\n\r\n  y", "Hello| | world|'S| |123|45|,x|\r\n\r\n| | y"},
        {"llama-bpe", "f(x)\n\n", "f|(x|)\n\n"},
        {"qwen2", "a 123.5", "a| |1|2|3|.|5"},
        {"qwen2", "don'T  you?\n ok", "don|'T| | you|?\n| ok"},
        {"gpt-2",
         "\xc3\xa9\xc3\xa9 \xe2\x82\xac"
         "5 \xd9\xa3",
         "\xc3\xa9\xc3\xa9| \xe2\x82\xac|5| \xd9\xa3"},
        {"gpt-2",
         "a\xc2\xa0"
         "b\xe1\xa0\x8e"
         "c",
         "a|\xc2\xa0|b|\xe1\xa0\x8e|c"}, /* U+180E is no white space ... */
        {"gpt-2",
         "a\xe1\xa0\x8e!\xe1\xa0\x8e"
         "c",
         "a|\xe1\xa0\x8e!\xe1\xa0\x8e|c"}, /* ... so it joins a sign */
        {"gpt-2",
         "a\xc2\x85\xe3\x80\x80"
         "b",
         "a|\xc2\x85|\xe3\x80\x80|b"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_model *model = open_tiny_words(&(struct tiny_model_params){.pre = cases[i].pre});
        const kvf_tokenizer *t = kvf_model_tokenizer(model);
        void *match = kvf__pretokenize_begin(t->pre);
        joined j = {.n = 0};
        cr_assert_eq(kvf__pretokenize(t->pre, match, cases[i].text, strlen(cases[i].text), join_word, &j, NULL),
                     KVF_OK);
        cr_assert_str_eq(j.text, cases[i].words, "%s: %s, wanted %s", cases[i].pre, j.text, cases[i].words);
        kvf__pretokenize_end(match);
        kvf_model_close(model);
    }
}

typedef struct lengths {
    const json_t *wanted;
    size_t n;
    const char *what;
} lengths;

static kvf_status check_length(void *ctx, const char *word, size_t n) {
    lengths *l = ctx;
    size_t wanted = (size_t)json_integer_value(json_array_get(l->wanted, l->n));
    cr_assert_eq(n, wanted, "%s: word %zu \"%.*s\" has %zu bytes, wanted %zu", l->what, l->n, (int)n, word, n, wanted);
    l->n++;
    return KVF_OK;
}

Test(words, cuts_words_as_the_reference_does) {
    json_error_t error;
    json_t *root = json_load_file(KVF_TEST_DATA "/pretokenize_vectors.json", 0, &error);
    cr_assert_not_null(root, "%s", error.text);
    const json_t *texts = json_object_get(root, "texts"), *text;
    cr_assert_geq(json_array_size(texts), 200);
    for (int p = 0; p < N_PRE; p++) {
        const json_t *kind = json_object_get(json_object_get(root, "kinds"), pre_names[p]);
        cr_assert_eq(json_array_size(kind), json_array_size(texts));
        kvf_model *model = open_tiny_words(&(struct tiny_model_params){.pre = pre_names[p]});
        const kvf_tokenizer *t = kvf_model_tokenizer(model);
        void *match = kvf__pretokenize_begin(t->pre);
        size_t i;
        json_array_foreach(texts, i, text) {
            char what[128];
            snprintf(what, sizeof what, "%s, text %zu", pre_names[p], i);
            lengths l = {json_array_get(kind, i), 0, what};
            const char *bytes = json_string_value(text);
            cr_assert_eq(kvf__pretokenize(t->pre, match, bytes, strlen(bytes), check_length, &l, NULL), KVF_OK);
            cr_assert_eq(l.n, json_array_size(l.wanted), "%s: \"%s\"", what, bytes);
        }
        kvf__pretokenize_end(match);
        kvf_model_close(model);
    }
    json_decref(root);
}
