/* Several answers to one prompt whose head groups have sizes of their own: samples with policies of their own, samples of one
 * policy, beams. Each is to the bit what a request of its own is, whoever is preempted. */
#define _DEFAULT_SOURCE
#include "tests/engine_variants_rig.h"

TestSuite(engine_head_forks, .init = open_wide_model, .fini = close_model);

/* Equal and adaptive side by side: an event of a whole layer beside those of single groups. */
static const char *const all[] = {
    "h2o rho=0.4 min_tokens=16 head_budget=adaptive",
    "full",
    "h2o rho=0.4 min_tokens=16",
    "d2o rho=0.3 min_tokens=16 head_budget=adaptive nm=7:1",
    "d2o rho=0.3 min_tokens=16",
    "streaming rho=0.3 min_tokens=16",
    "d2o rho=0.4 min_tokens=16 budget_unit=block head_budget=adaptive head_floor=0",
    "d2o authors rho=0.3",
    "d2o rho=0.4 min_tokens=16 merge=mass merge_keys=0 gate=0.2 head_budget=adaptive",
    "d2o budget_tokens=64 head_budget=adaptive",
    "h2o budget_tokens=120 head_budget=adaptive", /* more than the prompt has */
    "d2o rho=0.4 min_tokens=16 defer_first_decode=1 head_budget=adaptive",
    "h2o rho=0.4 min_tokens=16 head_budget=adaptive", /* once more */
    "d2o rho=1 head_budget=adaptive",
};
enum { N_ALL = sizeof all / sizeof *all };

static const char *const others[] = {
    "roco rho=0.4 min_tokens=16 head_budget=adaptive evict_every=3",
    "snapkv rho=0.4 min_tokens=16 window=8 score_window=16 head_budget=adaptive",
    "snapkv rho=0.4 min_tokens=16 window=8 score_window=16",
    "pyramidkv rho=0.4 min_tokens=16 window=16 score_window=16 head_budget=adaptive",
    "cam rho=0.4 min_tokens=16 head_budget=adaptive",
    "cam h2o rho=0.4 min_tokens=16 cam_mode=sample cam_seed=5 evict_every=4 head_budget=adaptive",
    "sirllm rho=0.4 min_tokens=16 head_budget=adaptive",
    "fold rho=0.4 min_tokens=16 head_budget=adaptive",
    "h2o rho=0.4 min_tokens=16 score=window score_window=16 score_norm=v score_pool=5 head_budget=adaptive",
};
enum { N_OTHERS = sizeof others / sizeof *others };

Test(engine_head_forks, samples_with_policies_of_their_own_are_what_each_is_alone) {
    static struct job together, other, first;
    uint32_t prompt[MAX_TOKENS];
    for (int kind = 0; kind < 3; kind++) {
        kvf_engine_config c = config_of(8000);
        c.heads_per_group = 1 + (kind & 1);
        kvf_generate g = request_of(prompt, 101, 3 + kind, 24);
        if (kind & 1) g.forced = prompt + 110; /* the prompt's array goes on */
        answer_alone(&c, &together, g, all, N_ALL);
        cr_expect_eq(together.n_prompt_tokens, 101u);
        expect_as_alone(&c, &together, g, all, N_ALL);
        answer_alone(&c, &other, g, others, N_OTHERS);
        expect_as_alone(&c, &other, g, others, N_OTHERS);
        /* Threads, chunks and a prompt that is found: the same. */
        c.n_threads = 1;
        c.chunk = kind & 2 ? 8 : 128;
        c.prefix_cache = 1;
        kvf_engine *e = create(&c);
        submit(e, &first, g, all, 1);
        run(e);
        submit(e, &first, g, all, N_ALL);
        run(e);
        cr_expect_gt(first.answers[0].n_cached, 0u);
        for (uint32_t i = 0; i < N_ALL; i++) expect_bits(&together.answers[i], &first.answers[i], all[i]);
        kvf_engine_destroy(e);
    }
}

Test(engine_head_forks, preempted_samples_lose_and_change_nothing) {
    static struct job roomy, tight;
    enum { N = 8 };
    uint32_t prompt[MAX_TOKENS];
    uint64_t n_preempted = 0, n_swapped = 0;
    for (uint32_t per_group = 1; per_group <= 2; per_group++)
        for (uint32_t n_blocks = 60; n_blocks < 140; n_blocks += 12) {
            kvf_engine_config c = config_of(5000);
            c.heads_per_group = per_group;
            kvf_generate g = request_of(prompt, 45, 2, 60);
            if (n_blocks == 60) answer_alone(&c, &roomy, g, all, N);
            c.kv_bytes = config_of(2 * n_blocks).kv_bytes;
            c.prefix_cache = n_blocks / 12 & 1;
            c.host_bytes = n_blocks / 24 & 1 ? c.kv_bytes : 0;
            kvf_engine *e = create(&c);
            submit(e, &tight, g, all, N);
            run(e);
            n_preempted += stats_of(e).n_preempted;
            n_swapped += stats_of(e).n_swapped_in;
            kvf_engine_destroy(e);
            for (uint32_t i = 0; i < N; i++) expect_bits(&roomy.answers[i], &tight.answers[i], all[i]);
        }
    cr_expect(n_preempted > 10 && n_swapped > 2, "%llu preempted, %llu back", (unsigned long long)n_preempted,
              (unsigned long long)n_swapped);
}

/* ---- Samples of one policy, and beams ------------------------------------------------------------------------- */

static void submit_one(kvf_engine *e, struct job *j, kvf_generate g, const char *policy) {
    kvf_policy_options o = options_of(policy);
    kvf_error err = {.text = ""};
    memset(j, 0, sizeof *j);
    j->engine = e;
    g.policy = &o;
    g.user = j;
    if (g.beam_width) g.on_sample_token = NULL;
    cr_assert_eq(kvf_engine_submit(e, &g, &j->id, &err), KVF_OK, "%s", err.text);
}

static void run_one(const kvf_engine_config *c, struct job *j, kvf_generate g, const char *policy,
                    uint64_t *preempted) {
    kvf_engine *e = create(c);
    submit_one(e, j, g, policy);
    run(e);
    *preempted += stats_of(e).n_preempted;
    kvf_engine_destroy(e);
}

/* Beams and ranked samples tell no token on their way: what they end with counts. */
static void expect_ends(const struct job *a, const struct job *b, const char *what) {
    cr_assert_eq(a->n_ended, b->n_ended, "%s", what);
    for (uint32_t i = 0; i < a->n_ended; i++) {
        const struct answer *x = &a->answers[i], *y = &b->answers[i];
        cr_assert_eq(x->n_tokens, y->n_tokens, "%s, answer %u", what, i);
        cr_assert(!memcmp(x->tokens, y->tokens, x->n_tokens * sizeof *x->tokens), "%s, answer %u", what, i);
        cr_assert(!memcmp(x->logprobs, y->logprobs, x->n_tokens * sizeof *x->logprobs), "%s, answer %u", what, i);
        cr_assert(x->held == y->held && x->merged == y->merged, "%s, answer %u: %llu, %llu held", what, i,
                  (unsigned long long)x->held, (unsigned long long)y->held);
    }
}

Test(engine_head_forks, samples_and_beams_of_one_policy) {
    static struct job base, other, alone;
    uint32_t prompt[MAX_TOKENS];
    uint64_t n_preempted = 0, none = 0;
    for (uint32_t p = 0; p < N_ALL + N_OTHERS; p += 2)
        for (uint32_t kind = p / 2 % 2; kind < 6; kind += 2) { /* samples, the best of them, beams */
            const char *policy = p < N_ALL ? all[p] : others[p - N_ALL];
            kvf_engine_config c = config_of(4000);
            c.heads_per_group = 1 + kind % 2;
            kvf_generate g = request_of(prompt, 61, 3 + p, 30);
            g.n = kind / 2 == 1 ? 3 : 5 - kind / 2;
            g.best_of = kind / 2 == 1 ? 6 : 0;
            g.beam_width = kind / 2 == 2 ? 3 : 0;
            if (g.beam_width) g.sampling.temperature = 0;
            run_one(&c, &base, g, policy, &none);
            for (uint32_t i = 0; i < g.n && kind / 2 == 0; i++) {
                kvf_generate one = g;
                one.n = 1;
                one.sampling.seed += i;
                run_one(&c, &alone, one, policy, &none);
                expect_bits(&alone.answers[0], &base.answers[i], policy);
            }
            c.n_threads = 1;
            c.chunk = 16;
            c.prefix_cache = 1;
            run_one(&c, &other, g, policy, &none);
            expect_ends(&base, &other, policy);
            if (kind / 2 == 2) continue; /* a search that does not fit as a whole is refused */
            c.prefix_cache = p % 3 == 0;
            c.kv_bytes = config_of(76).kv_bytes;
            c.host_bytes = p % 4 ? c.kv_bytes : 0;
            run_one(&c, &other, g, policy, &n_preempted);
            expect_ends(&base, &other, policy);
        }
    cr_expect_gt(n_preempted, 5, "%llu", (unsigned long long)n_preempted);
    cr_expect_eq(none, 0u);
}
