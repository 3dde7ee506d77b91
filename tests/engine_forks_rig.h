/* tests/engine_forks_rig.h: requests with several answers through the engine, on a tiny random model. */
#ifndef KVF_TESTS_ENGINE_FORKS_RIG_H
#define KVF_TESTS_ENGINE_FORKS_RIG_H

#include "tests/engine_model.h"

enum { MAX_TOKENS = 256, MAX_ANSWERS = 16 };

/* ---- A request and its answers ---------------------------------------------------------------------------- */

struct answer {
    uint32_t tokens[MAX_TOKENS], n_tokens, n_seen, n_preempted;
    double logprobs[MAX_TOKENS], score;
    char text[2048];
    kvf_finish finish;
    uint64_t held, own, shared, merged;
    int ended;
};

struct job {
    kvf_engine *engine;
    kvf_request id;
    struct answer answers[MAX_ANSWERS];
    uint32_t n_results, n_ended, abort_at, abort_index; /* abort_at: tokens of abort_index, 0: never */
    char error[512];                                    /* of the last answer that has one */
};

static int answers_may_fail; /* else an answer with an error fails the test */

static inline void on_finish(void *user, const kvf_result *r) {
    struct job *j = user;
    cr_assert_lt(r->index, (uint32_t)MAX_ANSWERS);
    cr_assert_lt(r->index, r->n_results);
    struct answer *a = &j->answers[r->index];
    cr_assert_eq(a->ended, 0, "answer %u came twice", r->index);
    cr_assert(r->request == j->id && (!r->error || answers_may_fail), "%s", r->error ? r->error : "another request");
    cr_assert_eq(r->error != NULL, r->finish == KVF_FINISH_ERROR);
    if (r->error) snprintf(j->error, sizeof j->error, "%s", r->error);
    a->ended = 1;
    a->finish = r->finish;
    a->n_tokens = r->n_tokens;
    memcpy(a->tokens, r->tokens, r->n_tokens * sizeof *r->tokens);
    memcpy(a->logprobs, r->logprobs, r->n_tokens * sizeof *r->logprobs);
    snprintf(a->text, sizeof a->text, "%s", r->text);
    a->score = r->score;
    a->held = r->held_tokens;
    a->own = r->own_blocks;
    a->shared = r->shared_blocks;
    a->merged = r->merged;
    a->n_preempted = r->n_preempted;
    uint64_t blocks = 0;
    for (uint32_t l = 0; l < N_LAYERS; l++) blocks += r->layers[l].n_blocks;
    cr_expect(!a->held || blocks == a->own + a->shared);
    j->n_results = r->n_results;
    j->n_ended++;
}

static inline void on_sample_token(void *user, uint32_t index, kvf_request request, uint32_t token, double logprob) {
    struct job *j = user;
    struct answer *a = &j->answers[index];
    cr_assert(request == j->id || !j->id);
    a->tokens[a->n_seen] = token;
    a->logprobs[a->n_seen++] = logprob;
    if (j->abort_at && index == j->abort_index && a->n_seen == j->abort_at)
        cr_assert_eq(kvf_engine_abort_sample(j->engine, request, index), KVF_OK);
}

static inline kvf_engine_config config_of(uint32_t n_blocks) { return model_config(n_blocks, 16); }

static inline kvf_generate request_of(uint32_t *prompt, uint32_t n, uint32_t seed, uint32_t max_tokens) {
    random_prompt(prompt, MAX_TOKENS, seed);
    return (kvf_generate){.struct_size = sizeof(kvf_generate),
                          .tokens = prompt,
                          .n_tokens = n,
                          .max_tokens = max_tokens,
                          .ignore_end = 1,
                          .sampling = {.temperature = 1.2f, .top_k = 50, .seed = 100 + seed},
                          .on_finish = on_finish,
                          .on_sample_token = on_sample_token};
}

static inline void submit(kvf_engine *e, struct job *j, kvf_generate g, const char *policy) {
    kvf_policy_options o = options_of(policy);
    kvf_error err = {.text = ""};
    memset(j, 0, sizeof *j);
    j->engine = e;
    g.policy = &o;
    g.user = j;
    cr_assert_eq(kvf_engine_submit(e, &g, &j->id, &err), KVF_OK, "%s", err.text);
}

static inline void answer_alone(const kvf_engine_config *c, struct job *j, kvf_generate g, const char *policy) {
    kvf_engine *e = create(c);
    submit(e, j, g, policy);
    run(e);
    kvf_engine_destroy(e);
    cr_assert(j->n_ended == j->n_results && j->n_ended > 0);
}

static inline void expect_same(const struct answer *a, const struct answer *b, double bound, const char *what) {
    expect_tokens(a->tokens, a->logprobs, a->n_tokens, b->tokens, b->logprobs, b->n_tokens, bound, what);
    cr_assert_str_eq(a->text, b->text);
    cr_expect_eq(a->held, b->held, "%s: holds %llu and %llu", what, (unsigned long long)a->held,
                 (unsigned long long)b->held);
}

static const char *const policies[] = {
    ENGINE_POLICIES,
    "roco rho=0.4 min_tokens=16 evict_every=3",
    "snapkv rho=0.4 min_tokens=16 window=16 score_window=16",
    "pyramidkv rho=0.4 min_tokens=16 window=8 score_window=8 budget_unit=block",
    "cam rho=0.4 min_tokens=16",
    "cam h2o rho=0.4 min_tokens=16 cam_mode=sample cam_seed=5 evict_every=4",
    "sirllm rho=0.4 min_tokens=16",
    "d2o rho=0.3 min_tokens=16 score=window score_window=12 evict_every=2",
    "fold rho=0.4 min_tokens=16 gate=0.2 head_budget=adaptive",
    "snapkv rho=0.4 min_tokens=16 window=8 score_window=16 head_budget=adaptive",
};
enum { N_POLICIES = sizeof policies / sizeof *policies };

/* KV heads of a group, as kvf_engine_config.heads_per_group: budgets of heads need groups of their own. */
static inline uint32_t heads_for(const char *policy) { return strstr(policy, "head_budget") ? 1 : 0; }

#endif
