/* Failures within a step: whatever fails, after whatever layer, what follows is a run without it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>

#include "model/weights.h"
#include "tests/engine_forks_rig.h"
#include "tests/failing.h"

kvf_policy_ops kvf__policy_ops_resolve(const kvf_policy_ops *ops); /* d2o_policy/policy.h, whose names meet model/ */

TestSuite(engine_faults, .init = open_model, .fini = close_model);

/* ---- What fails: one of the products, or of the policy's calls, counted together ------------------------------- */

enum { NEVER = -1, ALWAYS = -2 };
static atomic_long calls, fail_at = NEVER;
static bool fails(void) {
    long at = atomic_load(&fail_at);
    return atomic_fetch_add(&calls, 1) == at || at == ALWAYS;
}

/* In place of oneDNN's, which this calls. */
int dnnl_sgemm(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
               const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
int dnnl_sgemm(char ta, char tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
               const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
    static int (*real)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t,
                       float, float *, int64_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "dnnl_sgemm");
    return fails() ? 1 /* out of memory */ : real(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

static kvf_policy_ops own, real;
static kvf_status broken(kvf_error *err) { return kvf__fail(err, KVF_E_IO, "the policy is out of order"); }
static kvf_status observe(kvf_policy_state *p, kvf_stream *s, const kvf_policy_batch *b, kvf_error *err) {
    return fails() ? broken(err) : real.observe(p, s, b, err);
}
static kvf_status budget(kvf_policy_state *p, uint32_t seq, const double *variance, uint32_t n, kvf_error *err) {
    return fails() ? broken(err) : real.budget(p, seq, variance, n, err);
}
static kvf_status match(kvf_policy_state *p, kvf_stream *s, const kvf_policy_batch *b, kvf_plan *plan, kvf_error *err) {
    return fails() ? broken(err) : real.match(p, s, b, plan, err);
}
static kvf_status gate(kvf_policy_state *p, kvf_stream *s, const kvf_policy_batch *b, kvf_plan *plan, kvf_error *err) {
    return fails() ? broken(err) : real.gate(p, s, b, plan, err);
}
/* After it: the pages are no more what they were. */
static kvf_status apply(kvf_policy_state *p, kvf_stream *s, const kvf_policy_batch *b, const kvf_plan *plan,
                        kvf_error *err) {
    kvf_status st = real.apply(p, s, b, plan, err);
    return fails() ? broken(err) : st;
}
static kvf_status always(kvf_policy_state *p, kvf_stream *s, const kvf_policy_batch *b, kvf_error *err) {
    (void)p, (void)s, (void)b;
    return broken(err);
}

/* A policy of these words, whose calls may fail. */
static kvf_policy_options fragile(const char *words) {
    kvf_policy_options o = options_of(words);
    own = real = kvf__policy_ops_resolve(o.ops);
    own.observe = observe;
    own.budget = budget;
    own.match = match;
    own.gate = gate;
    own.apply = apply;
    o.ops = &own;
    return o;
}

/* The CPU's runner, whose calls may fail; run after it has run. */
static kvf_runner inner;
static kvf_status run_may_fail(void *ctx, const kvf_forward *batch, kvf_error *err) {
    kvf_status st = inner.run(ctx, batch, err);
    return !st && fails() ? broken(err) : st;
}
static kvf_status clear_may_fail(void *ctx, float *columns, uint32_t n_rows, size_t stride, uint32_t n,
                                 kvf_error *err) {
    return fails() ? broken(err) : inner.clear(ctx, columns, n_rows, stride, n, err);
}
static kvf_status snapshot_may_fail(void *ctx, float *columns, uint32_t n_rows, const uint32_t *ids, uint32_t n,
                                    int to_pages, kvf_error *err) {
    return fails() ? broken(err) : inner.snapshot(ctx, columns, n_rows, ids, n, to_pages, err);
}
static kvf_status write_may_fail(void *ctx, void *to, const void *from, size_t bytes, kvf_error *err) {
    return fails() ? broken(err) : inner.write(ctx, to, from, bytes, err);
}

/* ---- A run in which one call fails ---------------------------------------------------------------------------------- */

enum { N_JOBS = 6 };

typedef struct outcome {
    struct job jobs[N_JOBS];
    uint64_t n_calls, n_failed_steps;
} outcome;

/* One that decodes while others prefill, the same prompt twice, samples, beams, samples with policies of their own. */
static void submit_all(kvf_engine *e, const char *words, outcome *out) {
    uint32_t prompt[MAX_TOKENS];
    for (uint32_t i = 0; i < N_JOBS; i++) {
        kvf_generate g = request_of(prompt, i == 1 ? 90 : 40, i == 4 ? 10 : 10 + i, 8);
        kvf_policy_options o = fragile(words), varied[2] = {o, options_of("full")};
        g.n = i == 2 ? 3 : i == 5 ? 2 : 1;
        if (i == 5) g.sample_policies = varied;
        if (i == 3) g.beam_width = 3, g.sampling = (kvf_sampling){0}, g.on_sample_token = NULL;
        memset(&out->jobs[i], 0, sizeof out->jobs[i]);
        out->jobs[i].engine = e;
        g.user = &out->jobs[i];
        g.policy = &o;
        cr_assert_eq(kvf_engine_submit(e, &g, &out->jobs[i].id, NULL), KVF_OK);
    }
}

static void run_all(const kvf_engine_config *c, const char *words, long k, outcome *out) {
    kvf_error err = {.text = ""};
    kvf_engine_config over = *c;
    inner.struct_size = sizeof inner;
    cr_assert_eq(kvf_runner_create_cpu(model, c->device, NULL, &inner, &err), KVF_OK, "%s", err.text);
    kvf_runner runner = inner;
    runner.run = run_may_fail, runner.clear = clear_may_fail, runner.snapshot = snapshot_may_fail;
    runner.write = write_may_fail;
    over.model = NULL, over.runner = &runner, over.tokenizer = kvf_model_tokenizer(model);
    kvf_engine *e = create(&over);
    uint32_t n_failed = 0;
    submit_all(e, words, out);
    atomic_store(&calls, 0);
    atomic_store(&fail_at, k);
    for (int more = 1, n = 0; more; n++) {
        kvf_status st = kvf_engine_step(e, &more, &err);
        n_failed += st != KVF_OK;
        cr_assert(!st || (st == KVF_E_NO_MEMORY && strstr(err.text, "oneDNN")) ||
                      (st == KVF_E_IO && strstr(err.text, "order")),
                  "%s", err.text);
        cr_assert_eq(kvf_audit(kvf_engine_manager(e, NULL), &err), KVF_OK, "%s, %ld: %s", words, k, err.text);
        cr_assert_lt(n, 500, "%s, %ld: no end", words, k);
    }
    out->n_calls = (uint64_t)atomic_load(&calls);
    atomic_store(&fail_at, NEVER);
    kvf_engine_stats s = stats_of(e);
    out->n_failed_steps = s.n_failed_steps;
    cr_assert_eq(n_failed, s.n_failed_steps);
    cr_assert(s.n_running == 0 && s.n_waiting == 0 && s.occupancy.blocks.n_held == 0 && s.occupancy.n_seqs == 0);
    cr_assert(s.occupancy.blocks.n_promised == 0 && s.occupancy.score_pages.n_held == 0);
    kvf_engine_destroy(e);
    kvf_runner_destroy(&inner);
}

static void expect_equal(const outcome *a, const outcome *b, const char *words, long k) {
    for (uint32_t j = 0; j < N_JOBS; j++) {
        cr_assert_eq(a->jobs[j].n_ended, b->jobs[j].n_ended);
        for (uint32_t i = 0; i < a->jobs[j].n_ended; i++) {
            const struct answer *x = &a->jobs[j].answers[i], *y = &b->jobs[j].answers[i];
            cr_assert_eq(x->finish, y->finish);
            cr_assert(x->n_tokens == y->n_tokens && !memcmp(x->tokens, y->tokens, x->n_tokens * sizeof *x->tokens),
                      "%s, call %ld, %u.%u: other tokens", words, k, j, i);
            cr_assert(!memcmp(x->logprobs, y->logprobs, x->n_tokens * sizeof *x->logprobs),
                      "%s, call %ld, %u.%u: a bit", words, k, j, i);
            cr_assert(x->held == y->held && x->merged == y->merged, "%s, call %ld, %u.%u: holds %llu, not %llu", words,
                      k, j, i, (unsigned long long)y->held, (unsigned long long)x->held);
        }
    }
}

static kvf_engine_config config_faults(uint32_t n_blocks, int prefix_cache, uint32_t host_blocks) {
    kvf_engine_config c = config_of(n_blocks);
    c.deterministic = 1;
    c.prefix_cache = prefix_cache;
    c.host_bytes = host_blocks ? config_of(host_blocks).kv_bytes : 0;
    c.preempt = host_blocks ? KVF_PREEMPT_SWAP : 0;
    return c;
}

/* Every `every`-th call fails, each in a run of its own. */
static void fail_in_turn(const kvf_engine_config *c, const char *words, long every, outcome *out) {
    run_all(c, words, NEVER, &out[0]);
    cr_assert_eq(out[0].n_failed_steps, 0u);
    for (long k = every / 3; k < (long)out[0].n_calls; k += every) {
        run_all(c, words, k, &out[1]);
        cr_assert_eq(out[1].n_failed_steps, 1u);
        expect_equal(&out[0], &out[1], words, k);
    }
}

Test(engine_faults, r1_a_step_that_fails_is_taken_back) {
    static const char *const words[] = {"full", "d2o rho=0.3 min_tokens=16", "h2o rho=0.3 min_tokens=16 evict_every=3",
                                        "d2o rho=0.4 min_tokens=16 scope=layer", "d2o budget_tokens=44 evict_every=2"};
    outcome *out = calloc(2, sizeof *out);
    cr_assert_not_null(out);
    for (size_t w = 0; w < sizeof words / sizeof *words; w++) {
        for (int prefix = 0; prefix < 2; prefix++) {
            const kvf_engine_config c = config_faults(400, prefix, 0);
            fail_in_turn(&c, words[w], 211, out);
        }
    }
    free(out);
}

Test(engine_faults, r1_so_it_is_among_preemptions_to_the_host) {
    outcome *out = calloc(2, sizeof *out);
    cr_assert_not_null(out);
    for (int prefix = 0; prefix < 2; prefix++) {
        const kvf_engine_config c = config_faults(60, prefix, 200);
        fail_in_turn(&c, "full", 163, out);
        fail_in_turn(&c, "d2o rho=0.5 min_tokens=16", 191, out);
    }
    free(out);
}

static void expect_counts(kvf_engine *e, uint32_t n_running, uint32_t n_waiting, const char *when) {
    kvf_engine_stats s = stats_of(e);
    cr_assert(s.n_running == n_running && s.n_waiting == n_waiting, "%s: %u run, %u wait; not %u and %u", when,
              s.n_running, s.n_waiting, n_running, n_waiting);
}

/* Its first answer, and behind a failing step of another's the second. */
static void talk(long k, struct job *first, struct job *other) {
    const kvf_engine_config c = config_faults(400, 0, 0);
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o = fragile("d2o rho=0.3 min_tokens=16");
    struct job *jobs[] = {first, other};
    int more = 1;
    for (int i = 0; i < 2; i++) {
        kvf_generate g = request_of(prompt, 40 + 10 * (uint32_t)i, 5 + (uint32_t)i, i ? 30 : 6);
        memset(jobs[i], 0, sizeof *jobs[i]);
        g.policy = &o;
        g.user = jobs[i];
        g.keep_open = i == 0;
        cr_assert_eq(kvf_engine_submit(e, &g, &jobs[i]->id, NULL), KVF_OK);
    }
    while (!first->n_ended) step(e, &more);
    memset(first->answers, 0, sizeof first->answers);
    atomic_store(&calls, 0);
    atomic_store(&fail_at, k);
    cr_assert_eq(kvf_engine_step(e, &more, NULL) != KVF_OK, k >= 0);
    atomic_store(&fail_at, NEVER);
    expect_counts(e, k < 0, k >= 0, "one is open, the other runs, or waits after a failure");
    kvf_turn turn = {.struct_size = sizeof turn, .tokens = prompt, .n_tokens = 12, .max_tokens = 6};
    cr_assert_eq(kvf_engine_extend(e, first->id, &turn, NULL), KVF_OK);
    while (first->n_ended < 2 || !other->n_ended) step(e, &more);
    cr_assert_eq(kvf_engine_abort(e, first->id), KVF_OK);
    kvf_engine_destroy(e);
}

Test(engine_faults, r1_dialogues_that_are_open_go_on_too) {
    struct job a[2], b[2];
    talk(NEVER, &a[0], &b[0]);
    for (long k = 0; k < 5; k++) {
        talk(k, &a[1], &b[1]);
        expect_same(&a[0].answers[0], &a[1].answers[0], 0, "the open one");
        expect_same(&b[0].answers[0], &b[1].answers[0], 0, "the other");
    }
}

/* What fails whenever one request runs ends that one; what always fails ends all. */
Test(engine_faults, r1_who_fails_again_and_again_ends_alone) {
    const kvf_engine_config c = config_faults(400, 0, 0);
    static kvf_policy_ops bad;
    struct job j[4], good[4];
    uint32_t prompt[MAX_TOKENS];
    answers_may_fail = 1;
    for (int pass = 0; pass < 2; pass++) {
        kvf_engine *e = create(&c);
        struct job *jobs = pass ? j : good;
        kvf_error err = {.text = ""};
        for (uint32_t i = 0; i < 4; i++) {
            kvf_generate g = request_of(prompt, 30 + i, 3 + i, 10);
            kvf_policy_options o = options_of("d2o rho=0.3 min_tokens=16");
            bad = kvf__policy_ops_resolve(o.ops);
            bad.observe = always;
            if (pass && i == 1) o.ops = &bad;
            memset(&jobs[i], 0, sizeof jobs[i]);
            g.policy = &o;
            g.user = &jobs[i];
            cr_assert_eq(kvf_engine_submit(e, &g, &jobs[i].id, &err), KVF_OK);
        }
        uint32_t n_failed = 0;
        for (int more = 1, n = 0; more; n++) {
            n_failed += kvf_engine_step(e, &more, &err) != KVF_OK;
            cr_assert_lt(n, 200);
        }
        cr_assert(pass ? n_failed == 3 : n_failed == 0, "%u steps failed", n_failed);
        kvf_engine_destroy(e);
    }
    for (uint32_t i = 0; i < 4; i++) {
        if (i == 1)
            cr_assert(j[i].answers[0].finish == KVF_FINISH_ERROR && strstr(j[i].error, "order"), "%s", j[i].error);
        else
            expect_same(&good[i].answers[0], &j[i].answers[0], 0, "beside one that fails");
    }
}

Test(engine_faults, r1_where_all_fails_all_ends) {
    outcome *out = calloc(1, sizeof *out);
    cr_assert_not_null(out);
    answers_may_fail = 1;
    for (int prefix = 0; prefix < 2; prefix++) {
        const kvf_engine_config c = config_faults(prefix ? 60 : 400, prefix, prefix ? 100 : 0);
        run_all(&c, "d2o rho=0.3 min_tokens=16", ALWAYS, out);
        for (uint32_t i = 0; i < N_JOBS; i++) {
            cr_assert_eq(out->jobs[i].n_ended, out->jobs[i].n_results);
            cr_assert(out->jobs[i].n_ended && strstr(out->jobs[i].error, "3 times"), "%u: %s", i, out->jobs[i].error);
        }
    }
    free(out);
}

/* Of the texts, which alone grow in a step. */
Test(engine_faults, r1_every_allocation_of_a_step_may_fail) {
    struct failing f = {INT64_MAX, 0};
    kvf_engine_config c = config_faults(400, 1, 0);
    outcome *out = calloc(2, sizeof *out);
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    answers_may_fail = 1;
    run_all(&c, "d2o rho=0.3 min_tokens=16", NEVER, &out[0]);
    for (int64_t k = 0, n = 1; n; k++) {
        kvf_engine *e = create(&c);
        kvf_error err = {.text = ""};
        submit_all(e, "d2o rho=0.3 min_tokens=16", &out[1]);
        f.left = k;
        for (int more = 1; more;) {
            cr_assert_eq(kvf_engine_step(e, &more, &err), KVF_OK, "%s", err.text);
            cr_assert_eq(kvf_audit(kvf_engine_manager(e, NULL), &err), KVF_OK, "%s", err.text);
            if (f.left < 0) f.left = INT64_MAX; /* it was that one alone */
        }
        n = f.left > INT64_MAX / 2;
        f.left = INT64_MAX;
        kvf_engine_destroy(e);
        cr_assert_eq(f.alive, 0);
        for (uint32_t i = 0; i < N_JOBS; i++) {
            cr_assert_eq(out[1].jobs[i].n_ended, out[0].jobs[i].n_ended);
            for (uint32_t a = 0; a < out[0].jobs[i].n_ended; a++) {
                const struct answer *x = &out[0].jobs[i].answers[a], *y = &out[1].jobs[i].answers[a];
                if (y->finish == KVF_FINISH_ERROR)
                    cr_assert(strstr(out[1].jobs[i].error, "memory"), "%s", out[1].jobs[i].error);
                else
                    expect_same(x, y, 0, "beside one that failed");
            }
        }
    }
    free(out);
}

/* ---- Figures of now ------------------------------------------------------------------------------------------------- */

Test(engine_faults, r20_figures_are_those_of_now) {
    kvf_engine_config c = config_faults(400, 0, 0);
    c.max_running = 4;
    kvf_engine *e = create(&c);
    struct job j[6];
    uint32_t prompt[MAX_TOKENS];
    int more;
    expect_counts(e, 0, 0, "at first");
    for (uint32_t i = 0; i < 5; i++) {
        kvf_generate g = request_of(prompt, 15, i, 40);
        kvf_policy_options o = fragile("h2o rho=0.9 min_tokens=16");
        memset(&j[i], 0, sizeof j[i]);
        g.policy = &o;
        g.user = &j[i];
        cr_assert_eq(kvf_engine_submit(e, &g, &j[i].id, NULL), KVF_OK);
        expect_counts(e, 0, i + 1, "submitted");
    }
    step(e, &more);
    expect_counts(e, 4, 1, "a step");
    cr_assert_eq(kvf_engine_abort(e, j[1].id), KVF_OK);
    expect_counts(e, 3, 1, "aborted");
    cr_assert_eq(kvf_engine_abort(e, j[4].id), KVF_OK);
    expect_counts(e, 3, 0, "aborted in the queue");
    atomic_store(&calls, 0);
    atomic_store(&fail_at, 0);
    cr_assert_eq(kvf_engine_step(e, &more, NULL), KVF_E_IO);
    atomic_store(&fail_at, NEVER);
    cr_assert(more);
    expect_counts(e, 0, 3, "a failure");
    run(e);
    expect_counts(e, 0, 0, "the end");
    kvf_generate g = request_of(prompt, 30, 1, 4);
    g.n = 3;
    submit(e, &j[5], g, "full");
    expect_counts(e, 0, 3, "three samples");
    step(e, &more);
    expect_counts(e, 3, 0, "forked");
    run(e);
    expect_counts(e, 0, 0, "the end of the samples");
    kvf_engine_destroy(e);
}

/* ---- NaN -------------------------------------------------------------------------------------------------------------- */

/* A copy of n floats with one that is none. */
static float *spoiled(const float *from, size_t n, float value) {
    float *to = malloc(n * sizeof *to);
    cr_assert_not_null(to);
    memcpy(to, from, n * sizeof *to);
    to[n / 2] = value;
    return to;
}

/* Whatever is asked of it ends with the place. */
static void expect_place(const char *place) {
    static const char *const words[] = {"full", "d2o rho=0.3 min_tokens=16", "sirllm rho=0.4 min_tokens=16"};
    uint32_t prompt[MAX_TOKENS], forced[8] = {0};
    for (size_t w = 0; w < sizeof words / sizeof *words; w++) {
        kvf_engine_config c = config_faults(400, 1, 0);
        kvf_engine *e = create(&c);
        struct job j[5];
        for (uint32_t i = 0; i < 5; i++) {
            kvf_generate g = request_of(prompt, i == 4 ? 90 : 20, i, 8);
            if (i == 1) g.forced = forced;
            if (i == 2) g.n_top_logprobs = 5, g.n = 2;
            if (i == 3) g.beam_width = 3, g.sampling = (kvf_sampling){0}, g.on_sample_token = NULL;
            submit(e, &j[i], g, words[w]);
        }
        run(e);
        for (uint32_t i = 0; i < 5; i++) {
            cr_assert_eq(j[i].n_ended, i == 2 ? 2u : 1u);
            cr_assert_eq(j[i].answers[0].finish, KVF_FINISH_ERROR, "%s, %u: %s", words[w], i, place);
            cr_assert(strstr(j[i].error, "NaN") && strstr(j[i].error, place), "%s, %u: %s", words[w], i, j[i].error);
        }
        kvf_engine_destroy(e);
    }
}

Test(engine_faults, r18_nan_and_infinity_end_with_their_place) {
    static const float values[] = {NAN, INFINITY, -INFINITY};
    kvf__weights *w = model->weights;
    answers_may_fail = 1;
    for (size_t v = 0; v < 3; v++) {
        const float **const fields[] = {&w->output_norm, &w->layers[0].attn_norm, &w->layers[2].ffn_norm};
        static const char *const places[] = {"in the head", "in layer 0 ", "in layer 2 "};
        for (size_t i = 0; i < 3; i++) {
            const float *was = *fields[i];
            float *now = spoiled(was, model->info.n_embd, values[v]);
            *fields[i] = now;
            expect_place(places[i]);
            *fields[i] = was;
            free(now);
        }
    }
}

/* One token's embedding is none: who has it in the prompt ends, and nothing of it is found by others. */
Test(engine_faults, r18_others_go_on_beside_it) {
    open_model_of(&(struct tiny_model_params){.n_layers = N_LAYERS, .seed = 7, .separate_output = 1});
    kvf_engine_config c = config_faults(400, 1, 0);
    struct job clean[3], j[3];
    uint32_t prompt[MAX_TOKENS], n_embd = model->info.n_embd;
    const uint8_t *was = model->token_embd.data;
    cr_assert_eq(model->token_embd.type, KVF__TENSOR_F32);
    answers_may_fail = 1;
    random_prompt(prompt, MAX_TOKENS, 5);
    prompt[70] = TINY_BYTE_0 + 251; /* which stands there alone */
    for (int pass = 0; pass < 2; pass++) {
        float *now = spoiled((const float *)(const void *)was, (size_t)n_embd * model->info.n_vocab, 0);
        now[prompt[70] * (size_t)n_embd] = pass ? NAN : 1;
        model->token_embd.data = (const void *)now;
        kvf_engine *e = create(&c);
        for (uint32_t i = 0; i < 3; i++) {
            uint32_t unused[MAX_TOKENS];
            kvf_generate g = request_of(unused, 90, 5, 8);
            g.tokens = prompt;
            g.n_tokens = i == 1 ? 90 : 60 + i;
            g.n = i == 1 ? 3 : 1;
            g.no_cache_hits = 1;
            submit(e, pass ? &j[i] : &clean[i], g, "d2o rho=0.3 min_tokens=16");
        }
        run(e);
        kvf_engine_destroy(e);
        model->token_embd.data = was;
        free(now);
    }
    cr_assert_eq(j[1].n_ended, 3u);
    for (uint32_t i = 0; i < 3; i++) cr_assert_eq(j[1].answers[i].finish, KVF_FINISH_ERROR);
    cr_assert(strstr(j[1].error, "NaN"), "%s", j[1].error);
    expect_same(&clean[0].answers[0], &j[0].answers[0], 0, "before it");
    expect_same(&clean[2].answers[0], &j[2].answers[0], 0, "behind it");
}

/* ---- Names, and ends for want of memory -------------------------------------------------------------------------------- */

struct lines {
    char warned[512];
};

static void note_line(void *ctx, kvf_log_level level, const char *line) {
    struct lines *l = ctx;
    if (level == KVF_LOG_WARN) snprintf(l->warned, sizeof l->warned, "%s", line);
}

Test(engine_faults, r27_the_log_names_a_request_as_its_caller_does) {
    for (int labels = 0; labels < 2; labels++) {
        struct lines lines = {""};
        kvf_engine_config c = config_faults(60, 0, 0);
        c.log = (kvf_log){note_line, &lines};
        kvf_engine *e = create(&c);
        struct job j[4];
        uint32_t prompt[MAX_TOKENS];
        for (uint32_t i = 0; i < 4; i++) {
            kvf_generate g = request_of(prompt, 40, i, 50);
            char label[32];
            snprintf(label, sizeof label, "line %u", 7 + i);
            g.label = labels ? label : NULL;
            submit(e, &j[i], g, "full");
        }
        run(e);
        cr_assert_gt(stats_of(e).n_preempted, 0u);
        cr_assert_eq(strncmp(lines.warned, labels ? "line " : "request ", labels ? 5 : 8), 0, "%s", lines.warned);
        kvf_engine_destroy(e);
    }
}

static void note_limit(void *user, const kvf_result *r) { *(kvf_limit *)user = r->limit; }

Test(engine_faults, r33_a_result_says_what_its_length_was_limited_by) {
    static const struct {
        uint32_t n_blocks, max_context, beam_width;
        kvf_limit limit;
    } cases[] = {{200, 0, 0, KVF_LIMIT_TOKENS},
                 {200, 64, 0, KVF_LIMIT_CONTEXT},
                 {18, 0, 0, KVF_LIMIT_MEMORY},
                 {24, 0, 2, KVF_LIMIT_MEMORY}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_engine_config c = config_faults(cases[i].n_blocks, 0, 0);
        c.max_context = cases[i].max_context;
        kvf_engine *e = create(&c);
        uint32_t prompt[MAX_TOKENS];
        kvf_limit limit = KVF_LIMIT_NONE;
        kvf_generate g = request_of(prompt, 20, 3, 80);
        g.on_sample_token = NULL;
        g.on_finish = note_limit;
        g.user = &limit;
        g.beam_width = cases[i].beam_width;
        if (g.beam_width) g.sampling = (kvf_sampling){0};
        cr_assert_eq(kvf_engine_submit(e, &g, NULL, NULL), KVF_OK);
        run(e);
        cr_assert_eq((int)limit, (int)cases[i].limit, "%zu: %d", i, (int)limit);
        kvf_engine_destroy(e);
    }
}
