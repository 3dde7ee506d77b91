/* What the engine's tests share: a tiny random model, requests and what became of them. */
#ifndef KVF_TESTS_ENGINE_RIG_H
#define KVF_TESTS_ENGINE_RIG_H

#include "tests/engine_model.h"

enum { MAX_TOKENS = 512 };

/* ---- A request and what became of it -------------------------------------------------------------------- */

struct answer {
    kvf_engine *engine;
    kvf_request id;
    uint32_t tokens[MAX_TOKENS], n_tokens, n_prompt, n_preempted;
    double logprobs[MAX_TOKENS];
    char text[4096];
    kvf_finish finish;
    uint64_t held, full, merged, dropped;
    uint32_t blocks[8];
    int ended, abort_at; /* abort_at: in the callback of that many tokens, 0: never */
    uint32_t k;          /* checks memory when not 0 */
};

static inline void on_finish(void *user, const kvf_result *r) {
    struct answer *a = user;
    cr_assert_eq(a->ended, 0, "finished twice");
    a->ended = 1;
    a->finish = r->finish;
    a->n_tokens = r->n_tokens;
    a->n_prompt = r->n_prompt;
    a->n_preempted = r->n_preempted;
    if (r->n_tokens) memcpy(a->tokens, r->tokens, r->n_tokens * sizeof *r->tokens);
    if (r->n_tokens) memcpy(a->logprobs, r->logprobs, r->n_tokens * sizeof *r->logprobs);
    snprintf(a->text, sizeof a->text, "%s", r->text);
    a->held = r->held_tokens;
    a->full = r->full_tokens;
    a->merged = r->merged;
    a->dropped = r->dropped;
    for (uint32_t l = 0; l < 3; l++) a->blocks[l] = r->layers[l].n_blocks;
}

/* Directly after the prompt's events: ceil(S / bs) blocks exactly; in decode at most ceil((S + k) / bs). */
static inline void check_memory(struct answer *a) {
    const kvf_policy_state *policies;
    const kvf_manager *m = kvf_engine_manager(a->engine, &policies);
    uint32_t index = kvf_engine_seq_index(a->engine, a->id, 0);
    const kvf_layer_size *sizes = kvf_policy_sizes(policies, index);
    if (!sizes) return;
    kvf_layer_occupancy layers[3];
    cr_assert_eq(kvf_seq_occupancy(m, kvf__live_find(a->engine, a->id)->seq, layers, sizeof *layers), KVF_OK);
    for (uint32_t l = 0; l < 3; l++) {
        uint32_t n_groups = a->engine->n_groups;
        if (a->n_tokens == 1) cr_expect_leq(layers[l].n_blocks, n_groups * kvf__ceil_div(sizes[l].keep, BLOCK));
        cr_expect_leq(layers[l].n_blocks, n_groups * kvf__ceil_div(sizes[l].keep + a->k, BLOCK));
        cr_expect_lt(layers[l].slots_used, (uint64_t)n_groups * (sizes[l].keep + a->k));
    }
}

static inline void on_token(void *user, kvf_request request, uint32_t token, double logprob) {
    struct answer *a = user;
    (void)token;
    (void)logprob;
    a->n_tokens++;
    if (a->k) check_memory(a);
    if (a->abort_at && (int)a->n_tokens == a->abort_at) cr_assert_eq(kvf_engine_abort(a->engine, request), KVF_OK);
}

static inline kvf_engine_config config_of(uint32_t n_blocks) { return model_config(n_blocks, 8); }

static inline kvf_generate request_of(uint32_t *prompt, uint32_t n, uint32_t seed, uint32_t max_tokens,
                                      struct answer *a) {
    random_prompt(prompt, MAX_TOKENS, seed);
    return (kvf_generate){.struct_size = sizeof(kvf_generate),
                          .tokens = prompt,
                          .n_tokens = n,
                          .max_tokens = max_tokens,
                          .ignore_end = 1,
                          .user = a,
                          .on_finish = on_finish,
                          .on_token = on_token};
}

static inline void submit(kvf_engine *e, struct answer *a, uint32_t n, uint32_t seed, uint32_t max_tokens,
                          const char *policy) {
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o = options_of(policy);
    kvf_generate g = request_of(prompt, n, seed, max_tokens, a);
    kvf_error err = {.text = ""};
    g.policy = &o;
    a->engine = e;
    cr_assert_eq(kvf_engine_submit(e, &g, &a->id, &err), KVF_OK, "%s", err.text);
}

static inline void answer_alone(const kvf_engine_config *c, struct answer *a, uint32_t n, uint32_t seed,
                                uint32_t max_tokens, const char *policy) {
    kvf_engine *e = create(c);
    memset(a, 0, sizeof *a);
    submit(e, a, n, seed, max_tokens, policy);
    run(e);
    kvf_engine_destroy(e);
    cr_assert(a->ended);
}

static inline void expect_same(const struct answer *a, const struct answer *b, double bound, const char *what) {
    expect_tokens(a->tokens, a->logprobs, a->n_tokens, b->tokens, b->logprobs, b->n_tokens, bound, what);
    cr_expect_eq(a->held, b->held, "%s: holds %llu and %llu", what, (unsigned long long)a->held,
                 (unsigned long long)b->held);
}

#endif
