/* SentencePiece tokens and dialogues as the reference encodes them (tests/data/spm_vectors.json). */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <jansson.h>

#include "tests/spm_vocabulary.h"

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

Test(spm_reference, r3_agrees_with_the_reference) {
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
            size_t n = encode(model, text, strlen(text), 0, ids, MAX_IDS);
            cr_assert(n == n_wanted && !memcmp(ids, wanted, n * sizeof *ids), "%s, case %zu: \"%s\"", name, i, text);
            cr_assert_leq(n, kvf_tokenizer_max_ids(kvf_model_tokenizer(model), strlen(text)));
            cr_assert_geq(n, kvf_tokenizer_min_ids(kvf_model_tokenizer(model), text, strlen(text)));
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
    cr_assert_geq(n_cases, 600);
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
    kvf_error err = {.text = ""};
    kvf_status status =
        kvf_chat_encode(kvf_model_tokenizer(model), template_name, list, (uint32_t)k, ids, MAX_IDS, &n, &err);
    cr_assert_eq(status, KVF_OK, "dialogue %zu: %s", i, err.text);
    cr_assert(n == n_wanted && !memcmp(ids, wanted, n * sizeof *ids), "dialogue %zu", i);
    cr_assert_eq(kvf_chat_render(kvf_model_tokenizer(model), template_name, list, (uint32_t)k, NULL, 0, &n_bytes, &err),
                 KVF_E_LIMIT);
    cr_assert_leq(n, kvf_tokenizer_max_ids(kvf_model_tokenizer(model), n_bytes));
}

Test(spm_reference, encodes_dialogues_as_the_reference_does) {
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
    cr_assert_eq(i, 24);
    json_decref(root);
}
