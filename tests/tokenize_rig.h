/* tests/tokenize_rig.h: texts into ids, as tests of every kind of tokenizer ask for them. */
#ifndef KVF_TESTS_TOKENIZE_RIG_H
#define KVF_TESTS_TOKENIZE_RIG_H

#include <criterion/criterion.h>

#include "kvfold/model.h"

enum { MAX_IDS = 4096 };

/* How files say that texts are cut into words. */
static const char *const pre_names[] = {"smollm", "gpt-2", "default", "llama-bpe", "qwen2"};
enum { N_PRE = sizeof pre_names / sizeof *pre_names };

static inline size_t encode(const kvf_model *model, const char *text, size_t n, uint32_t flags, uint32_t *ids,
                            size_t capacity) {
    size_t n_ids = 0;
    kvf_error err = {.text = ""};
    kvf_status status = kvf_tokenizer_encode(kvf_model_tokenizer(model), text, n, flags, ids, capacity, &n_ids, &err);
    cr_assert_eq(status, KVF_OK, "%s: %s", kvf_status_name(status), err.text);
    return n_ids;
}

static inline void must_encode(const kvf_model *model, const char *text, uint32_t flags, const uint32_t *wanted,
                               size_t n_wanted) {
    uint32_t ids[MAX_IDS];
    size_t n = encode(model, text, strlen(text), flags, ids, MAX_IDS);
    cr_assert_eq(n, n_wanted, "\"%s\": %zu ids, wanted %zu", text, n, n_wanted);
    for (size_t i = 0; i < n; i++)
        cr_assert_eq(ids[i], wanted[i], "\"%s\": id %zu is %u, wanted %u", text, i, ids[i], wanted[i]);
}

static inline double limit_seconds(void) { /* a sanitizer's build may take longer, and still not quadratic time */
#if defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
    return 10;
#else
    return 1;
#endif
}

#endif
