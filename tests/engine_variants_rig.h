/* tests/engine_variants_rig.h: requests whose samples have policies of their own, on a tiny random model. */
#ifndef KVF_TESTS_ENGINE_VARIANTS_RIG_H
#define KVF_TESTS_ENGINE_VARIANTS_RIG_H

#include "tests/engine_model.h"
#include "tests/failing.h"

enum { MAX_TOKENS = 256, MAX_ANSWERS = 64 };

struct answer {
    uint32_t tokens[MAX_TOKENS], n_tokens, n_seen, n_preempted, n_cached, n_block_steps;
    double logprobs[MAX_TOKENS];
    uint64_t kept[MAX_TOKENS]; /* digest of the positions held when the token came */
    char text[2048];
    kvf_finish finish;
    uint64_t held, merged, dropped, block_steps, reserved_block_steps, reserve_blocks;
    int ended;
};

struct job { /* first in what callbacks get */
    kvf_engine *engine;
    kvf_request id;
    struct answer answers[MAX_ANSWERS];
    uint32_t n_results, n_ended, abort_at, abort_index; /* abort_at: tokens of abort_index, 0: never */
    uint64_t n_prompt_tokens, n_copies;
};

static inline void on_finish(void *user, const kvf_result *r) {
    struct job *j = user;
    cr_assert(r->index < (uint32_t)MAX_ANSWERS && r->index < r->n_results);
    struct answer *a = &j->answers[r->index];
    cr_assert_eq(a->ended, 0, "answer %u came twice", r->index);
    cr_assert(r->request == j->id && r->error == NULL, "%s", r->error ? r->error : "another request");
    a->ended = 1;
    a->finish = r->finish;
    a->n_tokens = r->n_tokens;
    memcpy(a->tokens, r->tokens, r->n_tokens * sizeof *r->tokens);
    memcpy(a->logprobs, r->logprobs, r->n_tokens * sizeof *r->logprobs);
    snprintf(a->text, sizeof a->text, "%s", r->text);
    a->held = r->held_tokens;
    a->merged = r->merged;
    a->dropped = r->dropped;
    a->n_preempted = r->n_preempted;
    a->n_cached = r->n_cached;
    a->block_steps = r->block_steps;
    a->reserved_block_steps = r->reserved_block_steps;
    a->n_block_steps = r->n_block_steps;
    for (uint32_t l = 0; r->sizes && l < N_LAYERS; l++) a->reserve_blocks += kvf__ceil_div(r->sizes[l].reserve, BLOCK);
    j->n_results = r->n_results;
    j->n_ended++;
}

static inline kvf__live *live_of(kvf_engine *e, kvf_request request, uint32_t index) {
    for (kvf__live *r = e->first; r; r = r->next)
        if (r->index == index && (r->group ? r->group->id : r->id) == request) return r;
    return NULL;
}

static inline uint64_t kept_of(kvf_engine *e, kvf_request id) {
    uint32_t pos[2 * MAX_TOKENS], n = 0;
    uint64_t digest = 14695981039346656037u;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t h = 0; h < kvf_model_get_info(model)->n_kv_heads; h++) {
            cr_assert_eq(kvf_engine_positions(e, id, l, h, pos, 2 * MAX_TOKENS, &n), KVF_OK);
            for (uint32_t i = 0; i < n; i++) digest = (digest ^ pos[i]) * 1099511628211u;
            digest = (digest ^ 0xffffffffu) * 1099511628211u;
        }
    return digest;
}

static inline void on_sample_token(void *user, uint32_t index, kvf_request request, uint32_t token, double logprob) {
    struct job *j = user;
    struct answer *a = &j->answers[index];
    kvf__live *r = live_of(j->engine, request, index);
    cr_assert(r != NULL && (request == j->id || !j->id));
    a->tokens[a->n_seen] = token;
    a->kept[a->n_seen] = kept_of(j->engine, r->id);
    a->logprobs[a->n_seen++] = logprob;
    if (j->abort_at && index == j->abort_index && a->n_seen == j->abort_at)
        cr_assert_eq(kvf_engine_abort_sample(j->engine, request, index), KVF_OK);
}

static inline kvf_engine_config config_of(uint32_t n_blocks) {
    kvf_engine_config c = model_config(n_blocks, 16);
    c.n_score_arrays = 4;
    c.deterministic = 1;
    return c;
}

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

/* n policies for n samples; 0: the request's own. */
static inline void submit(kvf_engine *e, struct job *j, kvf_generate g, const char *const *policies, uint32_t n) {
    kvf_policy_options o[MAX_ANSWERS];
    kvf_error err = {.text = ""};
    memset(j, 0, sizeof *j);
    j->engine = e;
    for (uint32_t i = 0; i < n; i++) o[i] = options_of(policies[i]);
    g.n = n;
    if (n) g.sample_policies = o;
    g.user = j;
    cr_assert_eq(kvf_engine_submit(e, &g, &j->id, &err), KVF_OK, "%s", err.text);
}

static inline void answer_alone(const kvf_engine_config *c, struct job *j, kvf_generate g, const char *const *policies,
                                uint32_t n) {
    kvf_engine *e = create(c);
    submit(e, j, g, policies, n);
    run(e);
    j->n_prompt_tokens = stats_of(e).n_prompt_tokens;
    kvf_engine_destroy(e);
    cr_assert(j->n_ended == j->n_results && j->n_ended > 0);
}

static inline void expect_bits(const struct answer *a, const struct answer *b, const char *what) {
    expect_tokens(a->tokens, a->logprobs, a->n_tokens, b->tokens, b->logprobs, b->n_tokens, 0, what);
    for (uint32_t i = 0; i < a->n_tokens; i++)
        cr_assert_eq(a->kept[i], b->kept[i], "%s: token %u: other positions are kept", what, i);
    cr_assert_str_eq(a->text, b->text);
    cr_expect(a->held == b->held && a->merged == b->merged && a->dropped == b->dropped, "%s", what);
}

/* Each sample is to the bit what a request of its own, with its policy, gives, and reserves as much. */
static inline void expect_as_alone(const kvf_engine_config *c, const struct job *together, kvf_generate g,
                                   const char *const *policies, uint32_t n) {
    static struct job alone;
    cr_assert(together->n_ended == n && together->n_results == n);
    for (uint32_t i = 0; i < n; i++) {
        kvf_generate one = g;
        one.sampling.seed += i;
        answer_alone(c, &alone, one, &policies[i], 1);
        expect_bits(&alone.answers[0], &together->answers[i], policies[i]);
        cr_expect_eq(together->answers[i].n_seen, g.max_tokens);
        cr_expect(together->answers[i].reserved_block_steps == alone.answers[0].reserved_block_steps, "%s",
                  policies[i]);
    }
}

#endif
