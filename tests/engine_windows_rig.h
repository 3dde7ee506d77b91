/* tests/engine_windows_rig.h: models of which layers have a sliding window, through the engine, against the decoder in double. */
#ifndef KVF_TESTS_ENGINE_WINDOWS_RIG_H
#define KVF_TESTS_ENGINE_WINDOWS_RIG_H

#include "tests/engine_forks_rig.h"
#include "tests/naive_llama.h"

enum { WINDOW = 24, N_PROMPT = 100, N_NEW = 30, N_ALL = N_PROMPT + N_NEW };

/* period: every so many layers slide, 0: all. */
static inline void open_windows(uint64_t seed, uint32_t period) {
    model = open_tiny(&(struct tiny_model_params){
        .arch = "mistral", .n_layers = N_LAYERS, .seed = seed, .sliding_window = WINDOW, .sliding_period = period});
}

static inline double naive_logprob(const double *logits, uint32_t token) {
    double most = logits[0], sum = 0;
    for (uint32_t i = 0; i < TINY_N_VOCAB; i++) most = logits[i] > most ? logits[i] : most;
    for (uint32_t i = 0; i < TINY_N_VOCAB; i++) sum += exp(logits[i] - most);
    return logits[token] - most - log(sum);
}

/* Each token of a greedy answer is the naive decoder's likeliest, with its probability. */
static inline void expect_naive(const uint32_t *prompt, uint32_t n_prompt, const struct answer *a, const char *what) {
    uint32_t ids[N_ALL];
    memcpy(ids, prompt, n_prompt * sizeof *ids);
    memcpy(ids + n_prompt, a->tokens, a->n_tokens * sizeof *ids);
    double *logits = naive_logits(model, ids, n_prompt + a->n_tokens, NAIVE_PAIRS);
    for (uint32_t i = 0; i < a->n_tokens; i++) {
        const double *at = logits + (size_t)(n_prompt + i - 1) * TINY_N_VOCAB;
        for (uint32_t v = 0; v < TINY_N_VOCAB; v++)
            cr_assert_leq(at[v], at[a->tokens[i]] + 1e-4, "%s: token %u is not the likeliest", what, i);
        double off = fabs(a->logprobs[i] - naive_logprob(at, a->tokens[i]));
        cr_assert_lt(off, 1e-4, "%s: token %u: its probability is off by %g", what, i, off);
    }
    free(logits);
}

static inline kvf_generate greedy(uint32_t *prompt, uint32_t n, uint32_t seed, uint32_t n_new) {
    kvf_generate g = request_of(prompt, n, seed, n_new);
    g.sampling.temperature = 0;
    return g;
}

/* Six requests in a pool for about two of them; three have short prompts, and grow into their windows as they decode. */
static inline void expect_preempted_naive(uint32_t n_blocks) {
    uint32_t prompts[6][MAX_TOKENS], n_preempted = 0;
    static struct job jobs[6];
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = 16;
    kvf_engine *e = create(&c);
    for (uint32_t i = 0; i < 6; i++)
        submit(e, &jobs[i], greedy(prompts[i], i < 3 ? N_PROMPT : 9, 10 + i, N_NEW), "full");
    run(e);
    for (uint32_t i = 0; i < 6; i++) {
        cr_assert_eq(jobs[i].answers[0].n_tokens, (uint32_t)N_NEW);
        n_preempted += jobs[i].answers[0].n_preempted;
        expect_naive(prompts[i], i < 3 ? N_PROMPT : 9, &jobs[i].answers[0], "preempted");
    }
    kvf_engine_destroy(e);
    cr_assert_gt(n_preempted, 0, "nobody was preempted");
}

/* n samples of one request are what requests of their own are. */
static inline void expect_samples_alone(uint32_t n) {
    uint32_t prompt[MAX_TOKENS];
    struct job together, alone;
    kvf_engine_config c = config_of(400);
    kvf_generate g = request_of(prompt, N_PROMPT, 5, N_NEW);
    c.chunk = 16;
    g.n = n;
    answer_alone(&c, &together, g, "full");
    for (uint32_t i = 0; i < n; i++) {
        kvf_generate one = g;
        one.n = 0;
        one.sampling.seed += i;
        answer_alone(&c, &alone, one, "full");
        expect_same(&alone.answers[0], &together.answers[i], 2e-4, "samples");
    }
}

/* The same prompt three times with the prefix cache. roomy: the pool keeps what it has stored. */
static inline void expect_cached_naive(uint32_t n_blocks, bool roomy) {
    uint32_t prompt[MAX_TOKENS];
    struct job j;
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = 16;
    c.prefix_cache = 1;
    kvf_engine *e = create(&c);
    for (int i = 0; i < 3; i++) {
        submit(e, &j, greedy(prompt, N_PROMPT, 3, N_NEW), "full");
        run(e);
        expect_naive(prompt, N_PROMPT, &j.answers[0], "cached");
    }
    kvf_prefix_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_prefix_stats_read(e->manager, &s), KVF_OK);
    cr_assert_eq(s.queries, 3u);
    if (roomy) cr_assert(s.hits == 2 && s.hit_tokens >= 2 * 96, "%llu hits", (unsigned long long)s.hits);
    kvf_engine_destroy(e);
}

/* Policies that evict, on a prompt beyond the window. words: in the refusal beside the window. */
static inline void expect_evicting_refused(const char *words) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(200);
    kvf_engine *e = create(&c);
    kvf_error err = {.text = ""};
    for (int p = 1; p < N_POLICIES; p++) {
        kvf_policy_options o = options_of(policies[p]);
        kvf_generate g = greedy(prompt, N_PROMPT, 3, N_NEW);
        kvf_request id;
        g.policy = &o;
        cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_E_UNSUPPORTED, "%s", policies[p]);
        cr_assert(strstr(err.text, "sliding window of 24") && strstr(err.text, words), "%s", err.text);
    }
    kvf_engine_destroy(e);
}

#endif
