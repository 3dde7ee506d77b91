/* What all tests of the engine share: the tiny random model, engines over it, policies by their words. */
#ifndef KVF_TESTS_ENGINE_MODEL_H
#define KVF_TESTS_ENGINE_MODEL_H

#include <criterion/criterion.h>
#include <math.h>

#include "engine/internal.h"
#include "tests/open_tiny.h"

enum { BLOCK = 8, N_LAYERS = 3 };

static kvf_model *model;

/* A test's own model comes after its suite's. */
static inline void open_model_of(const struct tiny_model_params *params) {
    if (model) kvf_model_close(model);
    model = open_tiny(params);
}

static inline void open_model(void) { open_model_of(&(struct tiny_model_params){.n_layers = N_LAYERS, .seed = 7}); }
/* Of four KV heads: as many head groups, or two. */
static inline void open_wide_model(void) {
    open_model_of(&(struct tiny_model_params){.n_layers = N_LAYERS, .n_q_heads = 8, .n_kv_heads = 4, .seed = 8});
}

static inline void close_model(void) { kvf_model_close(model); }

/* A random probe for the model, of hidden states so wide. */
static inline kvf_probe *random_probe(uint32_t n_embd) {
    const kvf_model_info *m = kvf_model_get_info(model);
    uint32_t n = m->n_layers * m->n_kv_heads;
    float *weight = malloc((size_t)n * n_embd * sizeof *weight), *bias = calloc(n, sizeof *bias);
    for (size_t i = 0; i < (size_t)n * n_embd; i++) weight[i] = sinf((float)i * 12.9898f);
    const kvf_probe_data d = {.struct_size = sizeof d,
                              .n_layers = m->n_layers,
                              .n_kv_heads = m->n_kv_heads,
                              .n_embd = n_embd,
                              .weight = weight,
                              .bias = bias};
    kvf_probe *p = NULL;
    cr_assert_eq(kvf_probe_create(&d, NULL, &p, NULL), KVF_OK);
    free(weight);
    free(bias);
    return p;
}

static inline kvf_engine *create(const kvf_engine_config *c) {
    kvf_engine *e = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_engine_create(c, &e, &err), KVF_OK, "%s", err.text);
    return e;
}

static inline void step(kvf_engine *e, int *more) {
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_engine_step(e, more, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(kvf_audit(kvf_engine_manager(e, NULL), &err), KVF_OK, "%s", err.text);
}

static inline kvf_engine_stats stats_of(kvf_engine *e) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    return s;
}

/* Until all have ended, and nothing is left of them. */
static inline void run(kvf_engine *e) {
    int more = 1;
    for (int n = 0; more; n++) {
        step(e, &more);
        cr_assert_lt(n, 5000, "no end");
    }
    kvf_engine_stats s = stats_of(e);
    cr_expect(s.occupancy.blocks.n_held == 0 && s.occupancy.blocks.n_promised == 0, "blocks are left behind");
    cr_expect(s.occupancy.score_pages.n_held == 0 && s.occupancy.n_seqs == 0);
}

/* An engine over the model with so many blocks. */
static inline kvf_engine_config model_config(uint32_t n_blocks, uint32_t max_running) {
    kvf_engine_config c;
    kvf_engine_config_init(&c, sizeof c);
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

/* What most tests of the engine run: every kind of policy and of a moment at which it evicts. */
#define ENGINE_POLICIES                                                                                       \
    "full", "streaming rho=0.3 min_tokens=16", "h2o rho=0.3 min_tokens=16", "d2o rho=0.3 min_tokens=16",      \
        "d2o serving rho=0.4 min_tokens=16", "d2o authors rho=0.3",                                           \
        "d2o rho=0.3 min_tokens=16 merge=mass merge_keys=0 gate=0.2",                                         \
        "h2o rho=0.3 min_tokens=16 merge=attention gate=0.2", "fold rho=0.3 min_tokens=16 gate=0.2",          \
        "d2o rho=0.3 min_tokens=16 scope=layer gqa=max sinks_extra=1 score=prompt_plus_current score_norm=v " \
        "evict_every=5",                                                                                      \
        "d2o budget_tokens=64"

/* n tokens that are bytes. */
static inline void random_prompt(uint32_t *prompt, uint32_t n, uint64_t seed) {
    for (uint32_t i = 0; i < n; i++) prompt[i] = TINY_BYTE_0 + (uint32_t)(gw_random(&seed) % 250);
}

/* Tokens of an answer are those of another, and their log-probabilities no farther off than the bound. */
static inline void expect_tokens(const uint32_t *a, const double *a_logprobs, uint32_t n_a, const uint32_t *b,
                                 const double *b_logprobs, uint32_t n_b, double bound, const char *what) {
    cr_assert_eq(n_a, n_b, "%s: %u and %u tokens", what, n_a, n_b);
    for (uint32_t i = 0; i < n_a; i++) {
        cr_assert_eq(a[i], b[i], "%s: token %u", what, i);
        cr_assert_leq(fabs(a_logprobs[i] - b_logprobs[i]), bound, "%s: token %u: %.17g and %.17g", what, i,
                      a_logprobs[i], b_logprobs[i]);
    }
}

/* "POLICY [PRESET] [NAME=VALUE ...]" */
static inline kvf_policy_options options_of(const char *text) {
    char words[256], *save = NULL;
    snprintf(words, sizeof words, "%s", text);
    char *policy = strtok_r(words, " ", &save), *preset = NULL, *w = strtok_r(NULL, " ", &save);
    if (w && !strchr(w, '=')) preset = w, w = strtok_r(NULL, " ", &save);
    kvf_policy_options o;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_policy_options_init(&o, sizeof o, policy, preset, &err), KVF_OK, "%s", err.text);
    for (; w; w = strtok_r(NULL, " ", &save)) {
        char *value = strchr(w, '=');
        *value++ = 0;
        cr_assert_eq(kvf_policy_option_set(&o, w, value, &err), KVF_OK, "%s", err.text);
    }
    return o;
}

#endif
