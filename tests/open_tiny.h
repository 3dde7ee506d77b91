/* tests/open_tiny.h: a tiny random model, written to a file that is gone once it is open. */
#ifndef KVF_TESTS_OPEN_TINY_H
#define KVF_TESTS_OPEN_TINY_H

#include <criterion/criterion.h>
#include <unistd.h>

#include "kvfold/model.h"
#include "tests/gguf_writer.h"

/* NULL where the config's allocator had no memory. */
static inline kvf_model *open_tiny_as(const struct tiny_model_params *params, const kvf_model_config *config) {
    char path[256];
    kvf_error err = {.text = ""};
    kvf_model *opened = NULL;
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, params), 0);
    kvf_status st = kvf_model_open(path, config, &opened, &err);
    unlink(path);
    bool may_fail = config && config->allocator.alloc;
    if (st) cr_assert(st == KVF_E_NO_MEMORY && may_fail && *err.text, "%s", err.text);
    return opened;
}

static inline kvf_model *open_tiny(const struct tiny_model_params *params) { return open_tiny_as(params, NULL); }

static inline kvf_model *open_tiny_words(const struct tiny_model_params *params) { /* the tokenizer alone */
    return open_tiny_as(params, &(kvf_model_config){.struct_size = sizeof(kvf_model_config), .tokenizer_only = 1});
}

#endif
