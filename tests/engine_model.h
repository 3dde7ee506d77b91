/* What all tests of the engine share: the tiny random model, engines over it, policies by their words. */
#ifndef KVF_TESTS_ENGINE_MODEL_H
#define KVF_TESTS_ENGINE_MODEL_H

#include <criterion/criterion.h>
#include <math.h>
#include <unistd.h>

#include "engine/internal.h"
#include "tests/gguf_writer.h"

enum { BLOCK = 8, N_LAYERS = 3 };

static kvf_model *model;

static inline void open_model_of(const struct tiny_model_params *params) {
    char path[256];
    gw_temp_path(path, sizeof path);
    kvf_test_write_tiny_model(path, params);
    kvf_model_config config = {.struct_size = sizeof config};
    kvf_error err = {""};
    cr_assert_eq(kvf_model_open(path, &config, &model, &err), KVF_OK, "%s", err.text);
    unlink(path);
}

static inline void open_model(void) { open_model_of(&(struct tiny_model_params){.n_layers = N_LAYERS, .seed = 7}); }
/* Of four KV heads: as many head groups, or two. */
static inline void open_wide_model(void) {
    open_model_of(&(struct tiny_model_params){.n_layers = N_LAYERS, .n_q_heads = 8, .n_kv_heads = 4, .seed = 8});
}

static inline void close_model(void) { kvf_model_close(model); }

static inline kvf_engine *create(const kvf_engine_config *c) {
    kvf_engine *e = NULL;
    kvf_error err = {""};
    cr_assert_eq(kvf_engine_create(c, &e, &err), KVF_OK, "%s", err.text);
    return e;
}

/* An engine over the model with so many blocks. */
static inline kvf_engine_config model_config(uint32_t n_blocks, uint32_t max_running) {
    kvf_engine_config c = kvf_engine_config_default();
    c.model = model;
    c.kv_dtype = KVF_F32;
    c.n_threads = 2;
    c.block_size = BLOCK;
    c.chunk = 64;
    c.max_running = max_running;
    c.want_mass_bias = 1;
    c.kv_bytes = (uint64_t)n_blocks * BLOCK * 2 * 16 * 2 * 4; /* slots, heads, head size, K and V, floats */
    return c;
}

/* n tokens that are bytes. */
static inline void random_prompt(uint32_t *prompt, uint32_t n, uint64_t seed) {
    for (uint32_t i = 0; i < n; i++) prompt[i] = TINY_BYTE_0 + (uint32_t)(gw_random(&seed) % 250);
}

static inline kvf_policy_options options_of(const char *text) {
    char words[256], *save = NULL;
    snprintf(words, sizeof words, "%s", text);
    char *policy = strtok_r(words, " ", &save), *preset = NULL, *w = strtok_r(NULL, " ", &save);
    if (w && !strchr(w, '=')) preset = w, w = strtok_r(NULL, " ", &save);
    kvf_policy_options o;
    kvf_error err = {""};
    cr_assert_eq(kvf_policy_options_init(&o, policy, preset, &err), KVF_OK, "%s", err.text);
    for (; w; w = strtok_r(NULL, " ", &save)) {
        char *value = strchr(w, '=');
        *value++ = 0;
        cr_assert_eq(kvf_policy_option_set(&o, w, value, &err), KVF_OK, "%s", err.text);
    }
    return o;
}

#endif
