/* The baselines through the engine: the same tokens, bits and kept positions for any chunk, threads, batch, with the prefix cache
 * and without; what each may find in it; what sirllm keeps, from the model's own probabilities. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"

TestSuite(engine_baselines, .init = open_model, .fini = close_model);

/* n_last: a hit ends so many tokens before the prompt's end; sums: at a snapshot. */
static const struct policy_case {
    const char *text;
    uint32_t n_last;
    bool sums;
} policies[] = {
    {"roco rho=0.3 min_tokens=16", 0, true},
    {"roco rho=0.3 min_tokens=16 gqa=max evict_every=4 budget_unit=block", 0, true},
    {"snapkv rho=0.3 min_tokens=16 window=16 score_window=16", 16, false},
    {"snapkv rho=0.3 min_tokens=16 window=8 score_window=20 score_pool=1 gqa=first", 20, false},
    {"pyramidkv rho=0.4 min_tokens=16 window=8 score_window=8", 8, false},
    {"pyramidkv rho=0.4 min_tokens=16 window=8 score_window=8 budget_unit=block", 8, false},
    {"cam rho=0.3 min_tokens=16", 0, true},
    {"cam h2o rho=0.3 min_tokens=16 cam_mode=sample cam_seed=3 evict_every=3", 0, true},
    {"sirllm rho=0.3 min_tokens=16", 1, true},
    {"d2o rho=0.3 min_tokens=16 score=window score_window=12", 12, true},
};
enum { N_POLICIES = sizeof policies / sizeof *policies, N_JOBS = 4, N_NEW = 30 };

/* A request, with a hash of all positions it holds after each token. */
typedef struct job {
    struct answer a;
    uint64_t kept[N_NEW];
    uint32_t n;
} job;

static uint64_t hash_positions(kvf_engine *e, kvf_request id) {
    static uint32_t pos[MAX_TOKENS];
    uint64_t h = 0xcbf29ce484222325u;
    uint32_t n = 0;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t kv = 0; kv < 2; kv++) {
            cr_assert_eq(kvf_engine_positions(e, id, l, kv, pos, MAX_TOKENS, &n), KVF_OK);
            for (uint32_t i = 0; i < n; i++) h = (h ^ pos[i]) * 0x100000001b3u;
            h = (h ^ n) * 0x100000001b3u;
        }
    return h;
}

static void note_token(void *user, kvf_request request, uint32_t token, double logprob) {
    job *j = user;
    (void)token;
    (void)logprob;
    j->kept[j->n++] = hash_positions(j->a.engine, request);
}

static void finish_job(void *user, const kvf_result *r) { on_finish(&((job *)user)->a, r); }

/* Prompt i: 70 of its tokens are those of prompt 0. */
static void submit_job(kvf_engine *e, job *j, uint32_t i, const char *policy) {
    static const uint32_t n[N_JOBS] = {131, 100, 75, 131};
    uint32_t prompt[MAX_TOKENS], tail[MAX_TOKENS];
    kvf_policy_options o = options_of(policy);
    kvf_error err = {.text = ""};
    memset(j, 0, sizeof *j);
    (void)request_of(tail, n[i], 900 + i % 3, N_NEW, &j->a);
    kvf_generate g = request_of(prompt, n[i], 1, N_NEW, &j->a);
    memcpy(prompt + 70, tail + 70, (n[i] - 70) * sizeof *prompt);
    g.user = j;
    g.on_token = note_token;
    g.on_finish = finish_job;
    g.policy = &o;
    j->a.engine = e;
    cr_assert_eq(kvf_engine_submit(e, &g, &j->a.id, &err), KVF_OK, "%s: %s", policy, err.text);
}

static kvf_engine_config config_as(uint32_t chunk, uint32_t threads, int cache) {
    kvf_engine_config c = config_of(2000);
    c.deterministic = 1;
    c.chunk = chunk;
    c.n_threads = threads;
    c.prefix_cache = cache;
    c.snapshot_bytes = 1 << 20;
    return c;
}

static void same_job(const job *a, const job *b, const char *what) {
    expect_same(&a->a, &b->a, 0, what);
    cr_assert_eq(a->n, b->n);
    cr_assert_eq(a->a.merged, b->a.merged, "%s: %llu and %llu merged", what, (unsigned long long)a->a.merged,
                 (unsigned long long)b->a.merged);
    for (uint32_t i = 0; i < a->n; i++) cr_assert_eq(a->kept[i], b->kept[i], "%s: positions after token %u", what, i);
}

/* All jobs one after another, or together. */
static kvf_prefix_stats run_jobs(const kvf_engine_config *c, const char *policy, bool together, job *jobs) {
    kvf_engine *e = create(c);
    for (uint32_t i = 0; i < N_JOBS; i++) {
        submit_job(e, &jobs[i], i, policy);
        if (!together) run(e);
    }
    run(e);
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    kvf_engine_destroy(e);
    return s.prefix;
}

Test(engine_baselines, nothing_depends_on_chunks_threads_batch_or_the_cache) {
    static const struct {
        uint32_t chunk, threads;
        int cache;
        bool together;
    } ways[] = {{16, 1, 0, false}, {32, 3, 0, true}, {64, 2, 1, false},
                {512, 1, 0, true}, {16, 2, 1, true}, {16, 1, 1, false}};
    job *want = calloc(N_JOBS, sizeof *want), *have = calloc(N_JOBS, sizeof *have);
    for (uint32_t p = 0; p < N_POLICIES; p++)
        for (uint32_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            kvf_engine_config c = config_as(ways[w].chunk, ways[w].threads, ways[w].cache);
            run_jobs(&c, policies[p].text, ways[w].together, w ? have : want);
            for (uint32_t i = 0; i < N_JOBS && w; i++) {
                char what[200];
                snprintf(what, sizeof what, "%s, way %u, job %u", policies[p].text, w, i);
                same_job(&want[i], &have[i], what);
            }
        }
    free(want);
    free(have);
}

/* By hand, with chunks of 16: job 1 shares 70 tokens with job 0, job 2 has 75, job 3 is job 0 again. Without sums any token
 * that is no last query's may be found; with them a snapshot at the end of a chunk. */
Test(engine_baselines, each_finds_what_its_figures_allow) {
    job *jobs = calloc(N_JOBS, sizeof *jobs);
    for (uint32_t p = 0; p < N_POLICIES; p++) {
        const struct policy_case *c = &policies[p];
        kvf_engine_config config = config_as(16, 1, 1);
        kvf_prefix_stats s = run_jobs(&config, c->text, false, jobs);
        uint64_t want = 0;
        const uint32_t found[3] = {70, 70, 131}, n[3] = {100, 75, 131};
        for (uint32_t i = 0; i < 3; i++) {
            uint32_t most = KVF__MIN(found[i], n[i] - KVF__MAX(c->n_last, 1u));
            want += c->sums && (found[i] < n[i] || c->n_last) ? most / 16 * 16 : most;
        }
        cr_expect_eq(s.hit_tokens, want, "%s: found %llu, not %llu", c->text, (unsigned long long)s.hit_tokens,
                     (unsigned long long)want);
    }
    free(jobs);
}

/* A prompt no longer than the window of last queries, and one of a token. */
Test(engine_baselines, short_prompts) {
    for (uint32_t p = 0; p < N_POLICIES; p++)
        for (uint32_t n = 1; n <= 17; n += 8) {
            kvf_engine_config c = config_as(16, 1, 1);
            kvf_engine *e = create(&c);
            struct answer a[3];
            memset(a, 0, sizeof a);
            for (int i = 0; i < 3; i++) {
                submit(e, &a[i], n, 5, 50, policies[p].text);
                run(e);
                expect_same(&a[0], &a[i], 0, policies[p].text);
                cr_assert_eq(a[i].n_tokens, 50u);
            }
            kvf_engine_destroy(e);
        }
}

/* Log-probabilities of a prompt, from another run: each token forced after those before it. */
static void logprobs_of(const uint32_t *prompt, uint32_t n, double *logprobs) {
    kvf_engine_config c = config_as(64, 1, 0);
    kvf_engine *e = create(&c);
    kvf_policy_options full = options_of("full");
    struct answer *a = calloc(1, sizeof *a);
    kvf_generate g = {.struct_size = sizeof g,
                      .tokens = prompt,
                      .n_tokens = 1,
                      .max_tokens = n - 1,
                      .ignore_end = 1,
                      .forced = prompt + 1,
                      .policy = &full,
                      .user = a,
                      .on_finish = on_finish};
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_OK, "%s", err.text);
    run(e);
    logprobs[0] = 0;
    memcpy(logprobs + 1, a->logprobs, (n - 1) * sizeof *logprobs);
    kvf_engine_destroy(e);
    free(a);
}

/* What is kept beside the first four and the window is what was expected least, up to rounding; the same in every head. */
static void check_surprise(kvf_engine *e, kvf_request id, const double *logprobs, uint32_t n, const char *when) {
    static uint32_t pos[MAX_TOKENS], other[MAX_TOKENS];
    uint32_t held, again, size = 40;
    cr_assert_eq(kvf_engine_positions(e, id, 1, 0, pos, MAX_TOKENS, &held), KVF_OK);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        cr_assert_eq(kvf_engine_positions(e, id, l, 1, other, MAX_TOKENS, &again), KVF_OK);
        cr_assert(again == held && !memcmp(pos, other, held * sizeof *pos), "%s: heads differ", when);
    }
    cr_assert_eq(held, size, "%s: %u held", when, held);
    double most_kept = -INFINITY, least_gone = 0;
    for (uint32_t p = 0, i = 0; p < n; p++) {
        bool kept = i < held && pos[i] == p;
        i += kept;
        if (p < 4 || p >= n - size / 2)
            cr_assert(kept, "%s: position %u is a sink or new", when, p);
        else if (kept)
            most_kept = fmax(most_kept, logprobs[p]);
        else
            least_gone = fmin(least_gone, logprobs[p]);
    }
    cr_assert(most_kept <= least_gone + 1e-4, "%s: kept %g, gone %g", when, most_kept, least_gone);
}

Test(engine_baselines, sirllm_keeps_what_the_model_expected_least) {
    uint32_t prompt[MAX_TOKENS];
    static double logprobs[MAX_TOKENS];
    struct answer a = {0};
    kvf_engine_config c = config_as(32, 2, 0);
    kvf_engine *e = create(&c);
    kvf_generate g = request_of(prompt, 150, 9, 40, &a);
    kvf_policy_options o = options_of("sirllm budget_tokens=40");
    kvf_error err = {.text = ""};
    logprobs_of(prompt, 150, logprobs);
    g.policy = &o;
    g.sampling = (kvf_sampling){.temperature = 3, .seed = 2}; /* what it draws surprises it too */
    g.on_token = NULL;
    a.engine = e;
    cr_assert_eq(kvf_engine_submit(e, &g, &a.id, &err), KVF_OK, "%s", err.text);
    for (int more = 1, steps = 0; more; steps++) {
        char when[32];
        cr_assert_eq(kvf_engine_step(e, &more, &err), KVF_OK, "%s", err.text);
        const kvf__live *r = kvf__live_find(e, a.id);
        if (!r || r->n_known == 150) continue;
        /* The newest known token is not appended yet; what was drawn before goes by the probability it had then. */
        for (uint32_t i = 150; i < r->n_known; i++) logprobs[i] = r->logprobs[i - 150];
        snprintf(when, sizeof when, "step %d", steps);
        check_surprise(e, a.id, logprobs, r->n_known - 1, when);
    }
    cr_assert(a.ended && a.n_tokens == 40);
    kvf_engine_destroy(e);
}
