/* Runners under the engine (kvfold/runner.h): the null runner makes the decisions of one that computes. */
#define _GNU_SOURCE
#include "tests/engine_model.h"
#include "tests/failing.h"

TestSuite(runner, .init = open_model, .fini = close_model);

enum { N = 5, N_PROMPT = 70, N_OUT = 40 };

typedef struct answer {
    uint64_t held, full, dropped;
    uint32_t n_tokens, n_preempted, n_cached;
    kvf_finish finish;
    double total_s;
} answer;

static void on_finish(void *user, const kvf_result *r) {
    answer *a = user;
    *a = (answer){r->held_tokens, r->full_tokens, r->dropped, r->n_tokens,
                  r->n_preempted, r->n_cached,    r->finish,  r->total_s};
}

/* Some requests with the same beginning, in a pool that is too small for all. */
static void run_all(const kvf_engine_config *c, const char *policy, answer out[N]) {
    kvf_engine *e = create(c);
    kvf_error err = {.text = ""};
    uint32_t prompt[N_PROMPT], forced[N_OUT];
    kvf_policy_options o = options_of(policy);
    random_prompt(forced, N_OUT, 3);
    memset(out, 0, N * sizeof *out);
    for (uint32_t i = 0; i < N; i++) {
        random_prompt(prompt, N_PROMPT, 5);
        random_prompt(prompt + 32, N_PROMPT - 32, 6 + i);
        const kvf_generate g = {.struct_size = sizeof g,
                                .tokens = prompt,
                                .n_tokens = N_PROMPT - i,
                                .max_tokens = N_OUT,
                                .forced = forced,
                                .policy = &o,
                                .user = &out[i],
                                .on_finish = on_finish};
        kvf_request id;
        cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_OK, "%s", err.text);
    }
    run(e);
    kvf_engine_destroy(e);
}

/* What has no metric decides from sizes alone: tables, preemptions, prefix hits are those of the CPU's runner. */
Test(runner, null_runner_decides_as_the_cpu_does) {
    const char *const policies[] = {"full", "streaming rho=0.3 min_tokens=16", "h2o rho=0.3 min_tokens=16",
                                    "uniform rho=0.4 min_tokens=16 merge=none", "snapkv rho=0.4 min_tokens=16"};
    for (size_t p = 0; p < sizeof policies / sizeof *policies; p++)
        for (int cache = 0; cache < 2; cache++) {
            answer want[N], got[N];
            kvf_engine_config c = model_config(60, 4);
            c.prefix_cache = cache;
            run_all(&c, policies[p], want);
            kvf_error err = {.text = ""};
            kvf_runner runner = {.struct_size = sizeof runner};
            const kvf_model_info *m = kvf_model_get_info(model);
            const kvf_runner_null_config null = {
                .struct_size = sizeof null,
                .shape = {m->n_layers, m->n_q_heads, m->n_kv_heads, m->head_dim, m->n_vocab, m->n_context, 0, 0, NULL},
                .step_s = 1};
            cr_assert_eq(kvf_runner_create_null(&null, &runner, &err), KVF_OK, "%s", err.text);
            c.model = NULL;
            c.runner = &runner;
            run_all(&c, policies[p], got);
            for (int i = 0; i < N; i++) {
                cr_expect(want[i].held == got[i].held && want[i].full == got[i].full,
                          "%s, %d: %llu of %llu, not %llu of %llu", policies[p], i, (unsigned long long)got[i].held,
                          (unsigned long long)got[i].full, (unsigned long long)want[i].held,
                          (unsigned long long)want[i].full);
                cr_expect(want[i].n_tokens == got[i].n_tokens && want[i].finish == got[i].finish);
                cr_expect(want[i].n_preempted == got[i].n_preempted && want[i].n_cached == got[i].n_cached, "%s, %d",
                          policies[p], i);
                cr_expect(got[i].total_s >= N_OUT && got[i].total_s < 500, "%g s of the clock", got[i].total_s);
            }
            kvf_runner_destroy(&runner);
        }
}

static kvf_status one_layer(void *ctx, void *user, double *values, kvf_error *err) {
    (void)user, (void)err;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t h = 0; h < 4; h++) values[l * 4 + h] = ((const double *)ctx)[l];
    return KVF_OK;
}

/* A metric of the caller's decides the layers' sizes. */
Test(runner, null_runner_takes_densities) {
    double densities[N_LAYERS] = {0.1, 0.2, 3};
    kvf_error err = {.text = ""};
    kvf_runner runner = {.struct_size = sizeof runner};
    const kvf_runner_null_config null = {.struct_size = sizeof null,
                                         .shape = {N_LAYERS, 4, 2, 16, 300, 512, 0, 0, NULL},
                                         .metric = one_layer,
                                         .ctx = densities};
    cr_assert_eq(kvf_runner_create_null(&null, &runner, &err), KVF_OK, "%s", err.text);
    kvf_engine_config c = model_config(200, 2);
    c.model = NULL, c.runner = &runner;
    kvf_engine *e = create(&c);
    uint32_t prompt[200] = {0}, forced[8] = {0};
    kvf_policy_options o = options_of("d2o rho=0.3 min_tokens=16 metric=raw");
    answer a = {0};
    kvf_generate g = {.struct_size = sizeof g, .tokens = prompt, .n_tokens = 200, .max_tokens = 8, .forced = forced};
    g.policy = &o, g.user = &a, g.on_finish = on_finish;
    kvf_request id;
    cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_OK, "%s", err.text);
    int more;
    uint32_t low = 0, high = 0;
    for (int i = 0; i < 8; i++) {
        const kvf_policy_state *state;
        step(e, &more);
        uint32_t index = kvf_engine_seq_index(e, id, 0);
        (void)kvf_engine_manager(e, &state);
        const kvf_layer_size *sizes = index == UINT32_MAX ? NULL : kvf_policy_sizes(state, index);
        if (sizes) high = sizes[0].keep, low = sizes[2].keep;
    }
    cr_assert(low && high > low, "%u, %u", low, high);
    run(e);
    /* What needs logits or text is refused. */
    g.forced = NULL;
    cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_E_UNSUPPORTED);
    cr_assert(strstr(err.text, "no logits"), "%s", err.text);
    g.forced = forced, g.stop = (const char *const[]){"a"}, g.n_stop = 1;
    cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_E_UNSUPPORTED);
    cr_assert(strstr(err.text, "tokenizer"), "%s", err.text);
    kvf_engine_destroy(e);
    kvf_runner_destroy(&runner);
}

Test(runner, bad_tables) {
    kvf_error err = {.text = ""};
    kvf_runner runner = {.struct_size = sizeof runner};
    kvf_engine *e = NULL;
    kvf_runner_null_config null = {.struct_size = sizeof null, .shape = {N_LAYERS, 4, 2, 16, 300, 512, 0, 0, NULL}};
    kvf_engine_config c = model_config(200, 2);
#define REFUSES(word) cr_assert(kvf_engine_create(&c, &e, &err) < 0 && strstr(err.text, word), "%s", err.text)
    cr_assert_eq(kvf_runner_create_null(&null, &runner, &err), KVF_OK);
    c.runner = &runner;
    REFUSES("a model too");
    c.model = NULL;
    c.host_bytes = c.kv_bytes;
    REFUSES("no memory that could be swapped");
    c.host_bytes = 0;
    runner.shape.n_vocab = 0;
    REFUSES("shape.n_vocab 0");
    runner.shape.n_vocab = 300, runner.shape.n_q_heads = 3;
    REFUSES("multiple of n_kv_heads 2");
    runner.shape.n_q_heads = 4;
    kvf_runner torn = runner;
    torn.write = NULL;
    c.runner = &torn;
    REFUSES("write must be set");
    c.runner = NULL;
    REFUSES("or give a runner");
    kvf_runner_destroy(&runner);
    null.token_s = -1;
    cr_assert_eq(kvf_runner_create_null(&null, &runner, &err), KVF_E_INVALID);
}

/* The next turn of a dialogue needs given tokens as its first one does. */
Test(runner, turns_without_logits_are_given) {
    kvf_error err = {.text = ""};
    kvf_runner runner = {.struct_size = sizeof runner};
    const kvf_runner_null_config null = {.struct_size = sizeof null,
                                         .shape = {N_LAYERS, 4, 2, 16, 300, 512, 0, 0, NULL}};
    cr_assert_eq(kvf_runner_create_null(&null, &runner, &err), KVF_OK, "%s", err.text);
    kvf_engine_config c = model_config(200, 2);
    c.model = NULL, c.runner = &runner;
    kvf_engine *e = create(&c);
    uint32_t tokens[20] = {0}, forced[8] = {0};
    answer a = {0};
    const kvf_generate g = {.struct_size = sizeof g,
                            .tokens = tokens,
                            .n_tokens = 20,
                            .max_tokens = 8,
                            .forced = forced,
                            .keep_open = 1,
                            .user = &a,
                            .on_finish = on_finish};
    kvf_request id;
    cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_OK, "%s", err.text);
    int more;
    for (a.n_tokens = 0; !a.n_tokens;) step(e, &more);
    cr_assert_eq(a.n_tokens, 8u);
    kvf_turn turn = {.struct_size = sizeof turn, .tokens = tokens, .n_tokens = 5, .max_tokens = 3};
    cr_assert_eq(kvf_engine_extend(e, id, &turn, &err), KVF_E_UNSUPPORTED);
    cr_assert(strstr(err.text, "no logits"), "%s", err.text);
    turn.forced = forced;
    cr_assert_eq(kvf_engine_extend(e, id, &turn, &err), KVF_OK, "%s", err.text);
    for (a.n_tokens = 0; !a.n_tokens;) step(e, &more);
    cr_assert_eq(a.n_tokens, 3u);
    cr_assert_eq(kvf_engine_abort(e, id), KVF_OK);
    run(e);
    kvf_engine_destroy(e);
    kvf_runner_destroy(&runner);
}

/* Each allocation of the CPU's runner may fail. The error names what is to be lowered. */
Test(runner, buffers_that_cannot_be_allocated) {
    struct failing f = {INT64_MAX, 0};
    const kvf_allocator allocator = {failing_alloc, failing_free, &f};
    kvf_error err = {.text = ""};
    kvf_runner runner = {.struct_size = sizeof runner};
    const kvf_runner_limits limits = {.struct_size = sizeof limits,
                                      .max_tokens = 64,
                                      .max_seqs = 2,
                                      .max_slots = 100,
                                      .max_prompt_tokens = 100,
                                      .block_size = 16,
                                      .n_snapshot_pages = 7};
    kvf_runner_buffers buffers = {.struct_size = sizeof buffers};
    cr_assert_eq(kvf_runner_create_cpu(model, NULL, &allocator, &runner, &err), KVF_OK, "%s", err.text);
    int64_t before = f.alive;
    int n_running = 0, n_snapshots = 0;
    for (int64_t n = 0;; n++) {
        f.left = n;
        if (!runner.begin(runner.ctx, &limits, &buffers, &err)) break;
        n_running += strstr(err.text, "lower max_running") != NULL;
        n_snapshots += strstr(err.text, "7 pages of snapshots") && strstr(err.text, "lower snapshot_bytes");
        cr_assert_eq(f.alive, before, "allocation %lld leaks", (long long)n);
    }
    cr_expect(n_running == 7 && n_snapshots == 1, "%d, %d", n_running, n_snapshots);
    kvf_runner_destroy(&runner);
    cr_expect_eq(f.alive, 0);
}
