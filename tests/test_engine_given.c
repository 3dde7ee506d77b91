/* Requests that give their tokens when they may run (kvf_generate.give_tokens): the same answers as from copies, and none of them is
 * asked while it cannot run. */
#define _GNU_SOURCE
#include "tests/engine_model.h"
#include "tests/failing.h"

TestSuite(engine_given, .init = open_model, .fini = close_model);

enum { N = 6, N_PROMPT = 70, N_OUT = 12, RUNNING = 2 };

typedef struct job {
    uint32_t tokens[N_PROMPT + N_OUT], n_asked, out[N_OUT], n_out, n_cached;
    double logprobs[N_OUT];
    kvf_finish finish;
    kvf_status answer; /* of give_tokens */
    char error[200];
    bool ended;
} job;

static kvf_status give(void *user, uint32_t *tokens, uint32_t n) {
    job *j = user;
    j->n_asked++;
    memcpy(tokens, j->tokens, n * sizeof *tokens);
    return j->answer;
}

static void on_finish(void *user, const kvf_result *r) {
    job *j = user;
    j->n_out = r->n_tokens;
    j->n_cached = r->n_cached;
    j->finish = r->finish;
    j->ended = true;
    snprintf(j->error, sizeof j->error, "%s", r->error ? r->error : "");
    if (r->n_tokens) memcpy(j->out, r->tokens, r->n_tokens * sizeof *j->out);
    if (r->n_tokens) memcpy(j->logprobs, r->logprobs, r->n_tokens * sizeof *j->logprobs);
}

/* Prompts of which all begin alike. */
static void make_jobs(job jobs[N]) {
    memset(jobs, 0, N * sizeof *jobs);
    for (uint32_t i = 0; i < N; i++) {
        random_prompt(jobs[i].tokens, N_PROMPT, 5);
        random_prompt(jobs[i].tokens + 40, N_PROMPT + N_OUT - 40, 6 + i);
    }
}

static void submit_all(kvf_engine *e, job jobs[N], const kvf_policy_options *o, bool gives, bool forced) {
    for (uint32_t i = 0; i < N; i++) {
        kvf_generate g = {.struct_size = sizeof g, .n_tokens = N_PROMPT, .max_tokens = N_OUT, .policy = o};
        g.ignore_end = 1, g.user = &jobs[i], g.on_finish = on_finish;
        if (gives) {
            g.give_tokens = give, g.given_answer = forced;
        } else {
            g.tokens = jobs[i].tokens, g.forced = forced ? jobs[i].tokens + N_PROMPT : NULL;
        }
        kvf_error err = {.text = ""};
        cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_OK, "%s", err.text);
    }
}

/* Sampled and forced, with and without the prefix cache, in a pool that preempts. */
Test(engine_given, answers_are_those_of_copied_tokens) {
    for (int what = 0; what < 4; what++) {
        static job jobs[2][N];
        kvf_engine_config c = model_config(60, RUNNING);
        const kvf_policy_options o = options_of(what & 1 ? "h2o rho=0.3 min_tokens=16" : "full");
        c.prefix_cache = what & 1;
        c.deterministic = 1;
        for (int gives = 0; gives < 2; gives++) {
            make_jobs(jobs[gives]);
            kvf_engine *e = create(&c);
            submit_all(e, jobs[gives], &o, gives, what & 2);
            run(e);
            kvf_engine_destroy(e);
        }
        for (uint32_t i = 0; i < N; i++) {
            const job *a = &jobs[0][i], *b = &jobs[1][i];
            expect_tokens(a->out, a->logprobs, a->n_out, b->out, b->logprobs, b->n_out, 0, "given");
            cr_expect(b->n_out == N_OUT && b->finish == KVF_FINISH_LENGTH && b->n_asked == 1, "%u", b->n_asked);
            cr_expect(!(what & 2) || !memcmp(b->out, b->tokens + N_PROMPT, sizeof b->out), "forced");
            cr_expect(!(what & 1) || i < RUNNING || b->n_cached > 0, "%u: nothing found", i);
        }
    }
}

/* Only what may run is asked; what waits holds no array of tokens. */
Test(engine_given, what_waits_is_not_asked) {
    static job jobs[N];
    struct failing f = {INT64_MAX, 0};
    kvf_engine_config c = model_config(200, RUNNING);
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    make_jobs(jobs);
    kvf_engine *e = create(&c);
    int64_t before = f.alive;
    submit_all(e, jobs, NULL, true, false);
    cr_expect_eq(f.alive - before, N, "%lld allocations for %d requests", (long long)(f.alive - before), N);
    int more = 1;
    for (uint32_t n_steps = 0; more; n_steps++) {
        uint32_t n_ended = 0, n_asked = 0;
        step(e, &more);
        for (uint32_t i = 0; i < N; i++) n_ended += jobs[i].ended, n_asked += jobs[i].n_asked;
        cr_assert(n_asked <= n_ended + RUNNING && (n_steps || n_asked == RUNNING), "%u asked, %u ended", n_asked,
                  n_ended);
    }
    cr_expect_eq(f.alive, before);
    /* One that never ran has a result without tokens. */
    make_jobs(jobs);
    submit_all(e, jobs, NULL, true, true);
    kvf_engine_destroy(e);
    for (uint32_t i = 0; i < N; i++) cr_expect(jobs[i].finish == KVF_FINISH_ABORTED && !jobs[i].n_asked);
}

/* Faults of one request end only that. */
Test(engine_given, bad_tokens_end_their_request) {
    static job jobs[N];
    kvf_engine_config c = model_config(200, RUNNING);
    make_jobs(jobs);
    jobs[1].tokens[3] = UINT32_MAX;
    jobs[2].answer = KVF_E_IO;
    kvf_engine *e = create(&c);
    submit_all(e, jobs, NULL, true, false);
    run(e);
    for (uint32_t i = 0; i < N; i++)
        cr_expect_eq(jobs[i].finish, i == 1 || i == 2 ? KVF_FINISH_ERROR : KVF_FINISH_LENGTH, "%u", i);
    cr_expect(strstr(jobs[1].error, "token id 4294967295 at index 3"), "%s", jobs[1].error);
    cr_expect(strstr(jobs[2].error, "give_tokens: "), "%s", jobs[2].error);
    const kvf_generate bad[] = {{.tokens = jobs[0].tokens, .give_tokens = give},
                                {.give_tokens = give, .forced = jobs[0].tokens},
                                {.give_tokens = give, .n = 2},
                                {.give_tokens = give, .beam_width = 2},
                                {.tokens = jobs[0].tokens, .given_answer = 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvf_generate g = bad[i];
        kvf_error err = {.text = ""};
        g.struct_size = sizeof g, g.n_tokens = N_PROMPT, g.max_tokens = N_OUT;
        g.user = &jobs[0], g.on_finish = on_finish;
        cr_expect_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID, "%zu", i);
        cr_expect(strstr(err.text, i < 4 ? "give_tokens: is in place of" : "given_answer: "), "%s", err.text);
    }
    kvf_engine_destroy(e);
}
