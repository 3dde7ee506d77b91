/* What an engine and its requests take of memory: no more than what runs needs. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"
#include "tests/meter.h"
#include "tests/peak.h"

TestSuite(engine_memory, .init = open_model, .fini = close_model);

/* Reserved for 65,536 that run at once, or for a context of a million: what is not used takes no memory. */
Test(engine_memory, r36_what_is_reserved_takes_no_memory_before_it_is_used) {
    enum { MANY = 65536, MOST = 128 << 20 };
    kvf_engine_config c = config_of(600);
    kvf_engine *e = create(&c); /* what the first one sets up in the process does not count */
    kvf_engine_destroy(e);
    for (int i = 0; i < 2; i++) {
        if (i) open_model_of(&(struct tiny_model_params){.n_layers = N_LAYERS, .n_context = 1000000, .seed = 7});
        size_t before = resident_bytes();
        c = config_of(600);
        c.model = model;
        if (!i) c.max_running = MANY;
        e = create(&c);
        struct answer a[5];
        memset(a, 0, sizeof a);
        for (uint32_t k = 0; k < 5; k++) submit(e, &a[k], 10 + k, k, 8, "d2o rho=0.5");
        int more = 1;
        while (more) step(e, &more);
        size_t now = resident_bytes(), took = now > before ? now - before : 0;
        cr_expect_lt(took, (size_t)MOST, "%d: %zu bytes", i, took);
        for (uint32_t k = 0; k < 5; k++) cr_expect(a[k].ended && a[k].n_tokens == 8);
        kvf_engine_destroy(e);
    }
}

/* Every byte that the allocator gave out has its part, and only requests change the sum. */
Test(engine_memory, r36_what_is_reserved_can_be_asked) {
    uint64_t least = 0;
    for (uint32_t max_running = 4; max_running <= 64; max_running *= 16) {
        meter m = {0};
        kvf_engine_config c = config_of(600);
        c.allocator = (kvf_allocator){meter_alloc, meter_free, &m};
        c.max_running = max_running;
        c.prefix_cache = 1;
        c.host_bytes = 1 << 20;
        kvf_engine *e = create(&c);
        kvf_engine_memory all = {.struct_size = sizeof all}, now = all;
        cr_assert_eq(kvf_engine_get_memory(e, &all), KVF_OK);
        cr_assert(m.bytes_live > all.reserved_bytes && m.bytes_live < all.reserved_bytes + (64 << 10),
                  "%zu live, %llu reserved", m.bytes_live, (unsigned long long)all.reserved_bytes);
        const uint64_t parts[] = {all.kv_bytes,        all.host_bytes,   all.snapshot_bytes, all.manager_bytes,
                                  all.scheduler_bytes, all.policy_bytes, all.runner_bytes,   all.engine_bytes};
        uint64_t sum = 0;
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            cr_expect(parts[i] && parts[i] < all.reserved_bytes, "part %zu: %llu", i, (unsigned long long)parts[i]);
            sum += parts[i];
        }
        cr_expect(sum == all.reserved_bytes && !all.request_bytes && all.kv_bytes >= c.kv_bytes / 2);
        struct answer a = {0};
        submit(e, &a, 10, 1, 8, "d2o rho=0.5");
        cr_assert_eq(kvf_engine_get_memory(e, &now), KVF_OK);
        cr_expect(now.request_bytes > 10 * sizeof(uint32_t) && now.reserved_bytes == all.reserved_bytes);
        int more = 1;
        while (more) step(e, &more);
        cr_assert_eq(kvf_engine_get_memory(e, &now), KVF_OK);
        cr_expect(a.ended && !now.request_bytes && now.reserved_bytes == all.reserved_bytes);
        kvf_engine_destroy(e);
        uint64_t grows = all.policy_bytes + all.scheduler_bytes + all.manager_bytes;
        cr_expect(!m.n_live && !m.bytes_live && grows > least, "%llu", (unsigned long long)grows);
        least = grows;
    }
}

/* ---- Requests -------------------------------------------------------------------------------------------- */

static kvf_status submit_all(kvf_engine *e, struct answer *a, uint32_t seed, kvf_generate more, kvf_error *err) {
    uint32_t prompt[MAX_TOKENS];
    kvf_generate g = request_of(prompt, 12, seed, more.max_tokens, a);
    g.n_top_logprobs = more.n_top_logprobs;
    g.beam_width = more.beam_width;
    g.best_of = more.best_of;
    g.sampling.temperature = more.best_of ? 1.0f : 0;
    g.ignore_end = !more.beam_width;
    a->engine = e;
    return kvf_engine_submit(e, &g, &a->id, err);
}

static void drop(void *user, const kvf_result *r) {
    (void)r;
    (*(uint32_t *)user)++;
}

/* Twenty alternatives, a context of 300,000 tokens, as many wanted: what waits holds its prompt, what runs what it has. */
Test(engine_memory, r15_a_request_holds_what_it_has_generated) {
    enum { N = 100, PER_WAITING = 4096, STEPS = 40, PER_TOKEN = 20 * 12 + 12 + 8 };
    open_model_of(&(struct tiny_model_params){.n_layers = N_LAYERS, .n_context = 300000, .seed = 7});
    meter m = {0};
    kvf_engine_config c = model_config(400, 2);
    c.allocator = (kvf_allocator){meter_alloc, meter_free, &m};
    kvf_engine *e = create(&c);
    size_t at_first = m.bytes_live;
    uint32_t prompt[12], n_ended = 0;
    random_prompt(prompt, 12, 3);
    for (uint32_t i = 0; i < N; i++) {
        kvf_generate g = {.struct_size = sizeof g, .tokens = prompt, .n_tokens = 12, .max_tokens = UINT32_MAX};
        g.n_top_logprobs = 20;
        g.ignore_end = 1;
        g.user = &n_ended;
        g.on_finish = drop;
        if (i % 10 == 9) g.beam_width = 2;
        if (i % 10 == 8) g.best_of = 4, g.n = 2;
        kvf_error err = {.text = ""};
        cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_OK, "%s", err.text);
    }
    size_t waiting = m.bytes_live - at_first, lives = N / 10 * (8 + 5 + 4);
    cr_expect_lt(waiting, lives * PER_WAITING, "%zu bytes for %zu that wait", waiting, lives);
    for (int i = 0, more = 1; i < STEPS; i++) step(e, &more);
    size_t grown = m.bytes_live - at_first - waiting;
    cr_expect_lt(grown, (size_t)2 * 2 * (STEPS + 16) * PER_TOKEN, "%zu bytes for %d steps of two", grown, STEPS);
    kvf_engine_destroy(e);
    cr_expect_eq(m.n_live, 0u);
    cr_expect_eq(m.bytes_live, 0u);
}

/* Any one allocation of a run fails: that request alone ends with an error that says so, the others as without it. */
Test(engine_memory, r15_a_growth_that_fails_ends_its_request_alone) {
    enum { N = 4, TOKENS = 40 };
    static const kvf_generate kinds[N] = {{.max_tokens = TOKENS, .n_top_logprobs = 3},
                                          {.max_tokens = TOKENS},
                                          {.max_tokens = TOKENS, .beam_width = 2},
                                          {.max_tokens = TOKENS, .best_of = 3}};
    static struct answer clean[N], a[N];
    size_t n_calls = 0;
    uint32_t n_failed = 0;
    for (size_t fail = 0; fail <= n_calls; fail++) {
        meter m = {0};
        kvf_engine_config c = config_of(400);
        c.allocator = (kvf_allocator){meter_alloc, meter_free, &m};
        c.n_threads = 1;
        kvf_engine *e = create(&c);
        struct answer *to = fail ? a : clean;
        memset(to, 0, N * sizeof *to);
        for (uint32_t i = 0; i < N; i++) {
            kvf_error err = {.text = ""};
            cr_assert_eq(submit_all(e, &to[i], 20 + i, kinds[i], &err), KVF_OK, "%s", err.text);
        }
        size_t before = m.n_calls;
        if (fail) m.fail_at = before + fail;
        int more = 1;
        while (more) step(e, &more);
        if (!fail) n_calls = m.n_calls - before;
        kvf_engine_destroy(e);
        cr_assert_eq(m.n_live, 0u, "%zu: %zu are left", fail, m.n_live);
        uint32_t n_bad = 0;
        for (uint32_t i = 0; fail && i < N; i++) {
            cr_assert(a[i].ended);
            bool bad = a[i].finish == KVF_FINISH_ERROR;
            n_bad += bad;
            if (!bad && !kinds[i].best_of) /* the best of those that are left */
                expect_same(&a[i], &clean[i], 1e-4, "beside one that failed");
        }
        cr_expect_leq(n_bad, 1u, "%zu: %u ended with errors", fail, n_bad);
        n_failed += n_bad;
    }
    cr_expect(n_calls > 20 && n_failed > 20, "%zu allocations, %u of which ended a request", n_calls, n_failed);
}
