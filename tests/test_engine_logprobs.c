/* The likeliest tokens of each step: against forced runs, alone and in company, through preemption. */
#define _DEFAULT_SOURCE
#include "tests/engine_model.h"

enum { N_PROMPT = 20, N_NEW = 12, MAX_TOP = KVF_TOP_LOGPROBS_MAX };

typedef struct answer {
    uint32_t n, n_top, n_preempted, tokens[N_NEW], top[N_NEW * MAX_TOP];
    double logprobs[N_NEW], top_logprobs[N_NEW * MAX_TOP];
} answer;

TestSuite(engine_logprobs, .init = open_model, .fini = close_model);

static kvf_engine *create_of(uint32_t n_blocks) {
    kvf_engine_config c = model_config(n_blocks, 8);
    return create(&c);
}

static void on_finish(void *user, const kvf_result *r) {
    answer *a = user;
    cr_assert_eq(r->finish, KVF_FINISH_LENGTH, "%s", r->error ? r->error : "");
    a->n = r->n_tokens;
    a->n_top = r->n_top_logprobs;
    a->n_preempted = r->n_preempted;
    memcpy(a->tokens, r->tokens, r->n_tokens * sizeof *r->tokens);
    memcpy(a->logprobs, r->logprobs, r->n_tokens * sizeof *r->logprobs);
    cr_assert_eq(r->n_top_logprobs != 0, r->top_tokens != NULL);
    size_t n = (size_t)r->n_tokens * r->n_top_logprobs;
    if (n) memcpy(a->top, r->top_tokens, n * sizeof *a->top);
    if (n) memcpy(a->top_logprobs, r->top_logprobs, n * sizeof *a->top_logprobs);
}

static kvf_generate request_of(uint32_t *prompt, uint64_t seed, uint32_t n_top, answer *a) {
    random_prompt(prompt, N_PROMPT, seed);
    memset(a, 0, sizeof *a);
    return (kvf_generate){.struct_size = sizeof(kvf_generate),
                          .tokens = prompt,
                          .n_tokens = N_PROMPT,
                          .max_tokens = N_NEW,
                          .ignore_end = 1,
                          .user = a,
                          .on_finish = on_finish,
                          .n_top_logprobs = n_top};
}

static void submit(kvf_engine *e, const kvf_generate *g) {
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_engine_submit(e, g, NULL, &err), KVF_OK, "%s", err.text);
}

Test(engine_logprobs, are_those_that_forced_tokens_get) {
    uint32_t prompt[N_PROMPT], forced[N_NEW];
    answer a, b;
    kvf_engine *e = create_of(200);
    kvf_generate g = request_of(prompt, 1, MAX_TOP, &a);
    submit(e, &g);
    run(e);
    cr_assert(a.n == N_NEW && a.n_top == MAX_TOP);
    for (uint32_t s = 0; s < N_NEW; s++) {
        const uint32_t *top = a.top + s * MAX_TOP;
        const double *lp = a.top_logprobs + s * MAX_TOP;
        cr_expect_eq(top[0], a.tokens[s], "greedy takes the likeliest");
        cr_expect_eq(lp[0], a.logprobs[s], "the same bits as the token's own");
        double sum = 0;
        for (uint32_t k = 0; k < MAX_TOP; k++) {
            cr_expect(!k || lp[k] < lp[k - 1] || (!(lp[k] > lp[k - 1]) && top[k] > top[k - 1]), "step %u: place %u", s,
                      k);
            sum += exp(lp[k]);
        }
        cr_expect(sum < 1 + 1e-9);
    }
    /* The last step again, with each alternative forced: an independent way to its probability. */
    for (uint32_t k = 0; k < MAX_TOP; k++) {
        g = request_of(prompt, 1, k % 3, &b);
        memcpy(forced, a.tokens, sizeof forced);
        forced[N_NEW - 1] = a.top[(N_NEW - 1) * MAX_TOP + k];
        g.forced = forced;
        submit(e, &g);
        run(e);
        cr_expect_float_eq(b.logprobs[N_NEW - 1], a.top_logprobs[(N_NEW - 1) * MAX_TOP + k], 1e-5, "alternative %u", k);
        cr_assert_eq(b.n_top, k % 3);
        for (uint32_t i = 0; i < k % 3; i++)
            cr_expect_eq(b.top[(N_NEW - 1) * (k % 3) + i], a.top[(N_NEW - 1) * MAX_TOP + i]);
    }
    kvf_engine_destroy(e);
}

Test(engine_logprobs, survive_preemption) {
    uint32_t prompt[N_PROMPT], n_preempted = 0;
    answer alone[6], crowd[6];
    for (uint32_t i = 0; i < 6; i++) {
        kvf_engine *e = create_of(200);
        kvf_generate g = request_of(prompt, i, 5, &alone[i]);
        submit(e, &g);
        run(e);
        kvf_engine_destroy(e);
    }
    kvf_engine *e = create_of(30); /* a request ends with 4 blocks in each of 3 layers */
    for (uint32_t i = 0; i < 6; i++) {
        kvf_generate g = request_of(prompt, i, 5, &crowd[i]);
        submit(e, &g);
    }
    run(e);
    kvf_engine_destroy(e);
    for (uint32_t i = 0; i < 6; i++) {
        n_preempted += crowd[i].n_preempted;
        cr_assert_eq(crowd[i].n, N_NEW);
        for (uint32_t s = 0; s < N_NEW * 5; s++) {
            cr_expect_eq(crowd[i].top[s], alone[i].top[s], "request %u, place %u", i, s);
            cr_expect_float_eq(crowd[i].top_logprobs[s], alone[i].top_logprobs[s], 1e-4);
        }
    }
    cr_expect(n_preempted > 0, "the pool was not tight enough to preempt");
}

Test(engine_logprobs, more_than_there_may_be_are_refused) {
    uint32_t prompt[N_PROMPT];
    answer a;
    kvf_engine *e = create_of(100);
    kvf_generate g = request_of(prompt, 1, MAX_TOP + 1, &a);
    kvf_error err = {.text = ""};
    cr_expect_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "n_top_logprobs 21") != NULL, "%s", err.text);
    g.struct_size = offsetof(kvf_generate, n_top_logprobs); /* a caller that was built before there was the field */
    submit(e, &g);
    run(e);
    cr_expect(a.n == N_NEW && a.n_top == 0);
    kvf_engine_destroy(e);
}
