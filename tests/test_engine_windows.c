/* A model whose layers have a sliding window through the engine, against the decoder in double: chunks, preemption, several
 * answers, the prefix cache; what it holds; what is refused. */
#define _DEFAULT_SOURCE
#include "tests/engine_forks_rig.h"
#include "tests/naive_llama.h"

enum { WINDOW = 24, N_PROMPT = 100, N_NEW = 30, N_ALL = N_PROMPT + N_NEW };

static void open_sliding(void) {
    char path[256];
    gw_temp_path(path, sizeof path);
    struct tiny_model_params params = {.arch = "mistral", .n_layers = N_LAYERS, .seed = 8, .sliding_window = WINDOW};
    kvf_test_write_tiny_model(path, &params);
    kvf_model_config config = {.struct_size = sizeof config};
    kvf_error err = {""};
    cr_assert_eq(kvf_model_open(path, &config, &model, &err), KVF_OK, "%s", err.text);
    unlink(path);
}

TestSuite(engine_windows, .init = open_sliding, .fini = close_model);

static double logprob(const double *logits, uint32_t token) {
    double most = logits[0], sum = 0;
    for (uint32_t i = 0; i < TINY_N_VOCAB; i++) most = logits[i] > most ? logits[i] : most;
    for (uint32_t i = 0; i < TINY_N_VOCAB; i++) sum += exp(logits[i] - most);
    return logits[token] - most - log(sum);
}

/* Each token of a greedy answer is the naive decoder's likeliest, with its probability. */
static void expect_naive(const uint32_t *prompt, const struct answer *a, const char *what) {
    uint32_t ids[N_ALL];
    memcpy(ids, prompt, N_PROMPT * sizeof *ids);
    memcpy(ids + N_PROMPT, a->tokens, a->n_tokens * sizeof *ids);
    double *logits = naive_logits(model, ids, N_PROMPT + a->n_tokens, NAIVE_PAIRS);
    for (uint32_t i = 0; i < a->n_tokens; i++) {
        const double *at = logits + (size_t)(N_PROMPT + i - 1) * TINY_N_VOCAB;
        for (uint32_t v = 0; v < TINY_N_VOCAB; v++)
            cr_assert_leq(at[v], at[a->tokens[i]] + 1e-4, "%s: token %u is not the likeliest", what, i);
        double off = fabs(a->logprobs[i] - logprob(at, a->tokens[i]));
        cr_assert_lt(off, 1e-4, "%s: token %u: its probability is off by %g", what, i, off);
    }
    free(logits);
}

static kvf_generate greedy(uint32_t *prompt, uint32_t seed) {
    kvf_generate g = request_of(prompt, N_PROMPT, seed, N_NEW);
    g.sampling.temperature = 0;
    return g;
}

/* The most blocks that its tables hold, which is what the pool must have for it. */
static uint32_t most_blocks(uint32_t chunk) { return (WINDOW + chunk + BLOCK - 2 + BLOCK - 1) / BLOCK * N_LAYERS; }

Test(engine_windows, every_chunk_size_gives_the_naive_answer_in_a_bounded_pool) {
    static const uint32_t chunks[] = {8, 16, 64, 128};
    uint32_t prompt[MAX_TOKENS];
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        struct job j;
        char what[40];
        uint32_t n_blocks = most_blocks(chunks[i]), all = (N_PROMPT + BLOCK) / BLOCK * N_LAYERS;
        kvf_engine_config c = config_of(n_blocks < all ? n_blocks : all);
        c.chunk = chunks[i];
        snprintf(what, sizeof what, "chunk %u", chunks[i]);
        answer_alone(&c, &j, greedy(prompt, 3), "full");
        cr_assert(j.answers[0].finish == KVF_FINISH_LENGTH && j.answers[0].n_tokens == N_NEW);
        cr_assert_leq(j.answers[0].held, (uint64_t)N_LAYERS * (WINDOW + BLOCK - 1), "%s: holds %llu", what,
                      (unsigned long long)j.answers[0].held);
        expect_naive(prompt, &j.answers[0], what);
    }
}

Test(engine_windows, preempted_requests_give_the_same_answers) {
    uint32_t prompts[6][MAX_TOKENS], n_preempted = 0;
    static struct job jobs[6];
    kvf_engine_config c = config_of(2 * most_blocks(16) + 2);
    c.chunk = 16;
    kvf_engine *e = create(&c);
    for (uint32_t i = 0; i < 6; i++) {
        kvf_generate g = greedy(prompts[i], 10 + i);
        if (i >= 3) g.n_tokens = 9; /* such grow into their windows as they decode */
        submit(e, &jobs[i], g, "full");
    }
    run(e);
    for (uint32_t i = 0; i < 6; i++) {
        cr_assert_eq(jobs[i].answers[0].n_tokens, (uint32_t)N_NEW);
        n_preempted += jobs[i].answers[0].n_preempted;
        if (i < 3) expect_naive(prompts[i], &jobs[i].answers[0], "preempted");
    }
    kvf_engine_destroy(e);
    cr_assert_gt(n_preempted, 0, "nobody was preempted");
}

Test(engine_windows, several_answers_are_what_requests_of_their_own_are) {
    uint32_t prompt[MAX_TOKENS];
    struct job together, alone;
    kvf_engine_config c = config_of(400);
    kvf_generate g = request_of(prompt, N_PROMPT, 5, N_NEW);
    c.chunk = 16;
    g.n = 4;
    answer_alone(&c, &together, g, "full");
    for (uint32_t i = 0; i < 4; i++) {
        kvf_generate one = g;
        one.n = 0;
        one.sampling.seed += i;
        answer_alone(&c, &alone, one, "full");
        expect_same(&alone.answers[0], &together.answers[i], 2e-4, "samples");
    }
    g.n = g.beam_width = 3;
    g.sampling.temperature = 0;
    answer_alone(&c, &together, g, "full");
    c.chunk = 128;
    answer_alone(&c, &alone, g, "full");
    cr_assert_eq(together.n_ended, 3);
    for (uint32_t i = 0; i < 3; i++) expect_same(&alone.answers[i], &together.answers[i], 2e-4, "beams");
}

Test(engine_windows, the_prefix_cache_changes_no_answer) {
    uint32_t prompt[MAX_TOKENS];
    for (uint32_t n_blocks = 2 * most_blocks(16); n_blocks <= 400; n_blocks += 350) {
        kvf_engine_config c = config_of(n_blocks < 400 ? n_blocks : 400);
        c.chunk = 16;
        c.prefix_cache = 1;
        kvf_engine *e = create(&c);
        for (int i = 0; i < 3; i++) {
            struct job j;
            submit(e, &j, greedy(prompt, 3), "full");
            run(e);
            expect_naive(prompt, &j.answers[0], "cached");
        }
        kvf_prefix_stats s = {.struct_size = sizeof s};
        cr_assert_eq(kvf_prefix_stats_read(e->manager, &s), KVF_OK);
        cr_assert_eq(s.queries, 3u);
        if (n_blocks >= 350) cr_assert(s.hits == 2 && s.hit_tokens >= 2 * 96, "%llu hits", (unsigned long long)s.hits);
        kvf_engine_destroy(e);
    }
}

Test(engine_windows, policies_that_evict_are_refused_beyond_the_window) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(200);
    kvf_engine *e = create(&c);
    kvf_error err = {""};
    for (int p = 1; p < N_POLICIES; p++) {
        kvf_policy_options o = options_of(policies[p]);
        kvf_generate g = greedy(prompt, 3);
        kvf_request id;
        g.policy = &o;
        cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_E_UNSUPPORTED, "%s", policies[p]);
        cr_assert(strstr(err.text, "sliding window of 24") && strstr(err.text, "max_context of at most 24"), "%s",
                  err.text);
    }
    kvf_engine_destroy(e);
    c.max_context = WINDOW; /* within it, it is full attention */
    e = create(&c);
    struct job j;
    kvf_generate g = greedy(prompt, 3);
    g.n_tokens = 18;
    g.max_tokens = 6;
    submit(e, &j, g, "d2o rho=0.5 min_tokens=8");
    run(e);
    cr_assert_eq(j.answers[0].n_tokens, 6u);
    kvf_engine_destroy(e);
}
