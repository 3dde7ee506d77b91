/* Budgets that change while a request runs: bit-equal to requests submitted so, promises, refusals; rho 1 and the mass. */
#define _DEFAULT_SOURCE
#include "tests/engine_model.h"

enum { MAX_TOKENS = 512 };

TestSuite(engine_budget, .init = open_model, .fini = close_model);

/* ---- A request and what became of it -------------------------------------------------------------------- */

struct answer {
    kvf_engine *engine;
    kvf_request id;
    uint32_t tokens[MAX_TOKENS], n_tokens, n_preempted;
    double logprobs[MAX_TOKENS];
    uint64_t held, full, merged, dropped;
    int ended;
    uint32_t change_at; /* in the callback of that many tokens, not 0, the budget becomes: */
    double rho;
    uint32_t budget;
};

static void on_finish(void *user, const kvf_result *r) {
    struct answer *a = user;
    a->ended = 1;
    a->n_tokens = r->n_tokens;
    a->n_preempted = r->n_preempted;
    memcpy(a->tokens, r->tokens, r->n_tokens * sizeof *r->tokens);
    memcpy(a->logprobs, r->logprobs, r->n_tokens * sizeof *r->logprobs);
    a->held = r->held_tokens;
    a->full = r->full_tokens;
    a->merged = r->merged;
    a->dropped = r->dropped;
}

static void on_token(void *user, kvf_request request, uint32_t token, double logprob) {
    struct answer *a = user;
    (void)token, (void)logprob;
    if (++a->n_tokens == a->change_at)
        cr_assert_eq(kvf_engine_set_budget(a->engine, request, a->rho, a->budget, NULL), KVF_OK);
}

static kvf_engine_config config_of(uint32_t n_blocks) { return model_config(n_blocks, 8); }

/* policy: its name, a preset or none, options NAME=VALUE. */
static void submit(kvf_engine *e, struct answer *a, uint32_t n, uint32_t seed, uint32_t max_tokens,
                   const char *policy) {
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o = options_of(policy);
    kvf_error err = {.text = ""};
    random_prompt(prompt, n, seed);
    kvf_generate g = {.struct_size = sizeof g,
                      .tokens = prompt,
                      .n_tokens = n,
                      .max_tokens = max_tokens,
                      .ignore_end = 1,
                      .policy = &o,
                      .user = a,
                      .on_finish = on_finish,
                      .on_token = on_token};
    a->engine = e;
    cr_assert_eq(kvf_engine_submit(e, &g, &a->id, &err), KVF_OK, "%s", err.text);
}

static void answer_alone(const kvf_engine_config *c, struct answer *a, uint32_t n, uint32_t seed, uint32_t max_tokens,
                         const char *policy) {
    kvf_engine *e = create(c);
    memset(a, 0, sizeof *a);
    submit(e, a, n, seed, max_tokens, policy);
    run(e);
    kvf_engine_destroy(e);
    cr_assert(a->ended);
}

static void expect_same(const struct answer *a, const struct answer *b, double bound, const char *what) {
    expect_tokens(a->tokens, a->logprobs, a->n_tokens, b->tokens, b->logprobs, b->n_tokens, bound, what);
    cr_expect_eq(a->held, b->held, "%s: holds %llu and %llu", what, (unsigned long long)a->held,
                 (unsigned long long)b->held);
}

/* ---- Tests ------------------------------------------------------------------------------------------------ */

/* With the mass on, too; and it takes score pages then only. */
Test(engine_budget, a_budget_that_may_change_changes_nothing_by_itself) {
    kvf_engine_config c = config_of(400);
    struct answer full, d2o;
    answer_alone(&c, &full, 150, 1, 40, "full");
    answer_alone(&c, &d2o, 150, 1, 40, "d2o rho=1 budget_may_change=1");
    expect_same(&full, &d2o, 0, "d2o");
    for (int may_change = 0; may_change < 2; may_change++) {
        struct answer a = {0};
        kvf_engine *e = create(&c);
        kvf_engine_stats s = {.struct_size = sizeof s};
        submit(e, &a, 100, 1, 30, may_change ? "d2o rho=1 budget_may_change=1" : "d2o rho=1");
        while (a.n_tokens < 10) cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
        cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
        cr_assert_eq(s.occupancy.score_pages.n_held, may_change ? s.occupancy.blocks.n_held : 0);
        run(e);
        kvf_engine_destroy(e);
    }
}

static void answer_changed(const kvf_engine_config *c, struct answer *a, uint32_t n, uint32_t max_tokens,
                           const char *policy, uint32_t at, double rho, uint32_t budget) {
    kvf_engine *e = create(c);
    memset(a, 0, sizeof *a);
    a->change_at = at;
    a->rho = rho;
    a->budget = budget;
    submit(e, a, n, 5, max_tokens, policy);
    run(e);
    kvf_engine_destroy(e);
    cr_assert(a->ended && a->n_tokens == max_tokens);
}

/* Tightened with the first token, before the second is computed: the prompt's compaction, a step later. Tightened to B when
 * it holds B: an overflow. Both bit for bit. */
Test(engine_budget, a_tightened_budget_compacts_as_if_submitted_so) {
    static const char *const kinds[] = {"d2o rho=1 min_tokens=16 layer_strength=0", "h2o rho=1 min_tokens=16",
                                        "d2o serving rho=1 min_tokens=16 layer_strength=0",
                                        "d2o rho=1 min_tokens=16 layer_strength=0 merge=mass gate=0.2",
                                        "streaming rho=1 min_tokens=16"};
    kvf_engine_config c = config_of(400);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char text[128];
        struct answer fixed, changed, untouched;
        for (int overflow = 0; overflow < 2; overflow++) {
            snprintf(text, sizeof text, "%s %s", kinds[i], overflow ? "budget_tokens=110" : "rho=0.3");
            answer_alone(&c, &fixed, 100, 5, 60, text);
            snprintf(text, sizeof text, "%s budget_may_change=1", kinds[i]);
            answer_alone(&c, &untouched, 100, 5, 60, text);
            answer_changed(&c, &changed, 100, 60, text, overflow ? 11 : 1, overflow ? 1 : 0.3, overflow ? 110 : 0);
            expect_same(&fixed, &changed, 0, text);
            cr_assert(fixed.merged == changed.merged && fixed.dropped == changed.dropped &&
                          fixed.merged + fixed.dropped,
                      "%s", text);
            cr_assert(!untouched.merged && !untouched.dropped && untouched.held > changed.held, "%s", text);
        }
    }
}

/* Waiting, in the prompt's chunks, or from the first decoded token on: the request goes on as one submitted so. */
Test(engine_budget, a_budget_changes_in_every_state) {
    kvf_engine_config c = config_of(400);
    for (uint32_t steps = 0; steps < 3; steps++) { /* the prompt has four chunks */
        struct answer fixed, changed = {0};
        answer_alone(&c, &fixed, 200, 5, 30, "d2o rho=0.3 min_tokens=16");
        kvf_engine *e = create(&c);
        submit(e, &changed, 200, 5, 30,
               steps ? "d2o rho=1 min_tokens=16 budget_may_change=1" : "d2o rho=1 min_tokens=16");
        for (uint32_t i = 0; i < steps; i++) cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
        cr_assert_eq(kvf_engine_set_budget(e, changed.id, 0.3, 0, NULL), KVF_OK);
        run(e);
        kvf_engine_destroy(e);
        expect_same(&fixed, &changed, 0, "changed before its prompt has ended");
    }
}

/* What is tighter frees blocks in the next step; what is looser needs them promised, or nothing changes. */
Test(engine_budget, a_looser_budget_has_its_promise_or_is_refused) {
    kvf_engine_config c = config_of(60); /* 160 tokens in each of 3 layers */
    kvf_engine *e = create(&c);
    struct answer a = {0}, b = {0};
    kvf_error err = {.text = ""};
    kvf_engine_stats s = {.struct_size = sizeof s};
    submit(e, &a, 100, 1, 100, "d2o rho=0.9 min_tokens=16");
    while (a.n_tokens < 3) cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
    cr_assert_eq(kvf_engine_set_budget(e, a.id, 0.3, 0, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    cr_assert(s.occupancy.slots_used == 3 * 30, "%llu slots", (unsigned long long)s.occupancy.slots_used);
    submit(e, &b, 100, 2, 100, "d2o rho=0.75 min_tokens=16");
    while (b.n_tokens < 3) cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
    cr_assert_eq(kvf_engine_set_budget(e, a.id, 0.9, 0, &err), KVF_E_NO_BLOCKS);
    cr_assert(strstr(err.text, "a budget of 90 tokens a layer in place of 30 needs more blocks"), "%s", err.text);
    cr_assert_eq(kvf_engine_abort(e, b.id), KVF_OK);
    cr_assert_eq(kvf_engine_set_budget(e, a.id, 0.9, 0, &err), KVF_OK, "%s", err.text);
    while (a.n_tokens < 80) cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    cr_assert(s.occupancy.slots_used > 3 * 80 && s.occupancy.slots_used <= 3 * 90, "%llu slots",
              (unsigned long long)s.occupancy.slots_used);
    run(e);
    cr_assert(a.n_tokens == 100 && a.n_preempted == 0);
    kvf_engine_destroy(e);
}

Test(engine_budget, budgets_that_cannot_change_are_refused) {
    kvf_engine_config c = config_of(400);
    kvf_engine *e = create(&c);
    struct answer rho_1 = {0}, full = {0}, alone;
    kvf_error err = {.text = ""};
    submit(e, &rho_1, 100, 1, 30, "d2o rho=1");
    submit(e, &full, 100, 1, 30, "full");
    while (full.n_tokens < 3) cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
    cr_assert_eq(kvf_engine_set_budget(e, rho_1.id, 0.5, 0, &err), KVF_E_STATE);
    cr_assert(strstr(err.text, "rho 0.5: the request has rho 1") && strstr(err.text, "budget_may_change 1"), "%s",
              err.text);
    cr_assert_eq(kvf_engine_set_budget(e, full.id, 0.5, 0, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "policy full"), "%s", err.text);
    cr_assert_eq(kvf_engine_set_budget(e, rho_1.id, NAN, 0, &err), KVF_E_INVALID);
    cr_assert_eq(kvf_engine_set_budget(e, rho_1.id, 1, 3, &err), KVF_E_INVALID);
    cr_assert_eq(kvf_engine_set_budget(e, 12345, 1, 0, &err), KVF_E_NOT_FOUND);
    cr_assert_eq(kvf_engine_set_budget(NULL, 1, 1, 0, &err), KVF_E_INVALID);
    run(e);
    kvf_engine_destroy(e);
    answer_alone(&c, &alone, 100, 1, 30, "full");
    expect_same(&alone, &full, 5e-4, "full");
    expect_same(&alone, &rho_1, 5e-4, "rho 1");
}

/* A pool too small for all of them: preempted requests come back under the budget they have by then, and end. */
Test(engine_budget, preempted_requests_begin_again_under_it) {
    kvf_engine_config c = config_of(60);
    kvf_engine *e = create(&c);
    struct answer a[4];
    memset(a, 0, sizeof a);
    for (uint32_t i = 0; i < 4; i++) {
        a[i].change_at = 30 + 5 * i;
        a[i].rho = 0.5;
        submit(e, &a[i], 40, i, 100, "d2o rho=1 min_tokens=16 budget_may_change=1");
    }
    run(e);
    kvf_engine_destroy(e);
    uint32_t n_preempted = 0;
    for (uint32_t i = 0; i < 4; i++) {
        n_preempted += a[i].n_preempted;
        cr_assert(a[i].ended && a[i].n_tokens == 100 && a[i].held <= N_LAYERS * 20, "%u: %u tokens, holds %llu", i,
                  a[i].n_tokens, (unsigned long long)a[i].held);
        cr_assert(a[i].merged + a[i].dropped > 0);
    }
    cr_assert_gt(n_preempted, 0u, "the pool was not tight");
}

/* K and V of two heads of 16 floats in three layers: 768 bytes a token. */
Test(engine_budget, bytes_are_so_many_tokens) {
    static struct answer by_tokens, by_bytes;
    kvf_engine_config c = config_of(600);
    c.deterministic = 1;
    answer_alone(&c, &by_tokens, 100, 3, 20, "d2o budget_tokens=30");
    answer_alone(&c, &by_bytes, 100, 3, 20, "d2o budget_bytes=23807"); /* 31 tokens lack a byte */
    expect_same(&by_tokens, &by_bytes, 0, "submitted");
    for (int kind = 0; kind < 2; kind++) { /* while it waits, while it runs */
        kvf_engine *e[2] = {create(&c), create(&c)};
        struct answer *a[2] = {&by_tokens, &by_bytes};
        kvf_error err = {.text = ""};
        for (int i = 0; i < 2; i++) {
            memset(a[i], 0, sizeof *a[i]);
            submit(e[i], a[i], 100, 3, 20, "d2o rho=0.5 min_tokens=16");
            for (int s = 0; s < 5 * kind; s++) cr_assert_eq(kvf_engine_step(e[i], NULL, &err), KVF_OK, "%s", err.text);
        }
        cr_assert_eq(kvf_engine_set_budget(e[0], a[0]->id, 0.5, 30, &err), KVF_OK, "%s", err.text);
        cr_assert_eq(kvf_engine_set_budget_bytes(e[1], a[1]->id, 23807, &err), KVF_OK, "%s", err.text);
        cr_assert_eq(kvf_engine_set_budget_bytes(e[1], a[1]->id, 16 * 768 - 1, &err), KVF_E_INVALID, "%s", err.text);
        cr_assert_eq(kvf_engine_set_budget_bytes(e[1], a[1]->id, 0, &err), KVF_E_INVALID, "%s", err.text);
        cr_assert_eq(kvf_engine_set_budget_bytes(e[1], a[1]->id + 1, 23807, &err), KVF_E_NOT_FOUND);
        for (int i = 0; i < 2; i++) {
            run(e[i]);
            kvf_engine_destroy(e[i]);
        }
        expect_same(&by_tokens, &by_bytes, 0, "changed");
        cr_expect_eq(by_bytes.held, by_tokens.held);
    }
}
