/* Swap and offload over a device that copies as late as it may, and one that fails. */
#define _DEFAULT_SOURCE
#include "tests/engine_forks_rig.h"
#include "tests/failing.h"
#include "tests/fake_device.h"

TestSuite(engine_device, .init = open_model, .fini = close_model);

enum { N_JOBS = 14, N_PROMPTS = 5 };

static uint64_t n_taken; /* blocks, by take_and_write */

typedef struct outcome {
    struct job jobs[N_JOBS];
    kvf_engine_stats stats;
} outcome;

static kvf_engine_config config_late(uint32_t n_blocks, const kvf_device *device) {
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = 16;
    c.deterministic = 1; /* results are compared to the bit */
    c.prefix_cache = 1;
    c.snapshot_bytes = 1 << 20;
    c.host_bytes = config_of(300).kv_bytes;
    c.preempt = KVF_PREEMPT_SWAP;
    c.device = device;
    return c;
}

/* Prompts that come again, answers that grow, every fifth of three samples. */
static void submit_job(kvf_engine *e, struct job *j, uint32_t i, const char *policy) {
    uint32_t prompt[MAX_TOKENS];
    kvf_generate g = request_of(prompt, 60 + 9 * (i % N_PROMPTS), 1 + i % N_PROMPTS, i % 4 ? 30 + 2 * i : 100);
    g.n = i % 3 == 1 ? 3 : 1;
    submit(e, j, g, policy);
}

/* Somebody takes all the blocks that are free, and writes them over. */
static void take_and_write(void *ctx) {
    kvf_engine *e = ctx;
    kvf_seq seq;
    kvf_occupancy o = {.struct_size = sizeof o};
    if (kvf_occupancy_read(e->manager, &o, NULL, 0) || kvf_seq_create(e->manager, &seq)) return;
    kvf_append_item item = {seq, o.blocks.n_free / e->n_tables * BLOCK};
    while (item.n_tokens && kvf_append(e->manager, &item, 1, NULL)) item.n_tokens -= BLOCK;
    for (uint32_t t = 0; item.n_tokens && t < e->n_tables; t++) {
        uint32_t n_slots;
        const uint32_t *blocks;
        cr_assert_eq(kvf_seq_table(e->manager, seq, t / e->n_groups, t % e->n_groups, &n_slots, NULL, &blocks), KVF_OK);
        for (uint32_t i = 0; i < n_slots / BLOCK; i++) {
            memset((char *)e->pages.k + e->pages.k_block_stride * blocks[i], 0xee, e->pages.k_block_stride);
            memset((char *)e->pages.v + e->pages.v_block_stride * blocks[i], 0xee, e->pages.v_block_stride);
            n_taken++;
        }
    }
    cr_assert_eq(kvf_seq_free(e->manager, seq), KVF_OK);
}

static void run_all(const kvf_engine_config *c, const char *policy, struct fake_device *f, outcome *out) {
    kvf_engine *e = create(c);
    memset(out, 0, sizeof *out);
    if (f) f->meanwhile = take_and_write, f->meanwhile_ctx = e;
    for (uint32_t i = 0; i < N_JOBS; i++) {
        submit_job(e, &out->jobs[i], i, i % 7 == 3 ? "full" : policy);
        if (i % 7 == 6) run(e);
    }
    run(e);
    out->stats = stats_of(e);
    cr_assert_eq(out->stats.occupancy.host_blocks.n_held, 0);
    kvf_engine_destroy(e);
}

static void expect_equal(const outcome *a, const outcome *b, const char *what) {
    for (uint32_t j = 0; j < N_JOBS; j++) {
        cr_assert_eq(a->jobs[j].n_ended, b->jobs[j].n_ended);
        for (uint32_t i = 0; i < a->jobs[j].n_ended; i++)
            expect_same(&a->jobs[j].answers[i], &b->jobs[j].answers[i], 0, what);
    }
}

Test(engine_device, no_block_is_used_before_its_copy_is_done) {
    outcome *plain = malloc(sizeof *plain), *late = malloc(sizeof *late);
    cr_assert(plain && late);
    const size_t which[] = {0, 3, 6, 2, N_POLICIES - 2}; /* the last has budgets of its head groups */
    struct fake_device f;
    uint64_t n_waits = 0, n_done = 0, n_swapped = 0, n_offloaded = 0, n_loaded = 0;
    for (size_t p = 0; p < sizeof which / sizeof *which; p++) {
        const char *policy = policies[which[p]];
        kvf_engine_config big = config_late(3000, NULL);
        big.host_bytes = 0;
        big.heads_per_group = heads_for(policy);
        run_all(&big, policy, NULL, plain);
        for (uint32_t n_blocks = 80; n_blocks <= 152; n_blocks += 24) {
            const kvf_device device = fake_device(&f);
            kvf_engine_config small = config_late(n_blocks, &device);
            f.rng = n_blocks;
            small.heads_per_group = big.heads_per_group;
            run_all(&small, policy, &f, late);
            expect_equal(plain, late, policy);
            cr_assert_eq(f.n_alive, 0, "%s: %llu are left behind", policy, (unsigned long long)f.n_alive);
            cr_assert_eq(f.n_changed, 0, "%s, %u blocks: %llu rows changed before they were read", policy, n_blocks,
                         (unsigned long long)f.n_changed);
            cr_assert_eq(f.n_touched, 0, "%s, %u blocks: %llu bytes touched before they came", policy, n_blocks,
                         (unsigned long long)f.n_touched);
            cr_assert_eq(late->stats.n_copy_waits + f.n_found_done, f.n_asked);
            n_waits += late->stats.n_copy_waits;
            n_done += f.n_found_done;
            n_swapped += late->stats.n_swapped_in;
            n_offloaded += late->stats.prefix.offloaded;
            n_loaded += late->stats.prefix.loaded;
        }
    }
    cr_assert_gt(n_taken, 300, "%llu blocks", (unsigned long long)n_taken);
    cr_assert(n_waits > 50 && n_done > 10 && n_swapped > 50 && n_offloaded > 100 && n_loaded > 20,
              "%llu waits, %llu done before, %llu swapped in, %llu offloaded, %llu loaded", (unsigned long long)n_waits,
              (unsigned long long)n_done, (unsigned long long)n_swapped, (unsigned long long)n_offloaded,
              (unsigned long long)n_loaded);
    free(plain);
    free(late);
}

/* Until a step fails, or all is done; then once more: it stays failed. What ran has ended by then. */
static kvf_status run_faulty(kvf_engine *e, const struct fake_device *f) {
    kvf_error err = {.text = ""};
    kvf_status st = KVF_OK;
    for (int more = 1; more && !st;) {
        st = kvf_engine_step(e, &more, &err);
        cr_assert(!st == !f->failed, "%s: %d", f->failed, (int)st);
        if (kvf_audit(e->manager, NULL)) cr_assert_fail("%s: audit", f->failed);
    }
    if (!st) return st;
    cr_assert_eq(stats_of(e).n_running + stats_of(e).n_waiting, 0u, "r1: something waits for ever");
    cr_assert(strstr(err.text, "fake") && strstr(err.text, f->failed), "%s", err.text);
    cr_assert_eq(kvf_engine_step(e, NULL, &err), st, "it goes on");
    const uint32_t token = TINY_BYTE_0;
    const kvf_generate more_work = {.struct_size = sizeof more_work, .tokens = &token, .n_tokens = 1, .max_tokens = 1};
    cr_assert_eq(kvf_engine_submit(e, &more_work, NULL, &err), st, "it takes more");
    cr_assert(strstr(err.text, f->failed), "%s", err.text);
    return st;
}

/* One run whose k-th call of the device fails; false: it has not so many. */
static bool run_with_fault(int64_t k, uint32_t *n_created, outcome *out) {
    struct fake_device f;
    struct failing memory = {INT64_MAX, 0};
    const kvf_device device = fake_device(&f);
    kvf_engine_config c = config_late(110, &device);
    kvf_engine *e = NULL;
    kvf_error err = {.text = ""};
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &memory};
    f.fail_after = k;
    answers_may_fail = 1;
    kvf_status st = kvf_engine_create(&c, &e, &err);
    if (st) {
        cr_assert(f.failed && !e && strstr(err.text, f.failed), "%s", err.text);
        cr_assert_eq(st, KVF_E_DEVICE, "%s: %d", f.failed, (int)st);
    } else {
        ++*n_created;
        for (uint32_t i = 0; i < 9; i++) submit_job(e, &out->jobs[i], i, policies[3]);
        st = run_faulty(e, &f);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 9; i++) cr_assert_eq(out->jobs[i].n_ended, i % 3 == 1 ? 3 : 1, "%s, %u", f.failed, i);
    }
    cr_assert(f.n_alive == 0 && memory.alive == 0, "%s at %lld: %llu and %lld are left", f.failed, (long long)k,
              (unsigned long long)f.n_alive, (long long)memory.alive);
    cr_assert(f.n_changed == 0 && f.n_touched == 0, "%s at %lld: %llu changed, %llu touched", f.failed, (long long)k,
              (unsigned long long)f.n_changed, (unsigned long long)f.n_touched);
    return f.failed != NULL;
}

Test(engine_device, any_call_may_fail) {
    outcome *out = calloc(1, sizeof *out);
    cr_assert_not_null(out);
    uint32_t n_created = 0, n_runs = 0;
    for (int64_t k = 0; run_with_fault(k, &n_created, out); k += k < 60 ? 1 : 7) n_runs++;
    cr_assert(n_created > 20 && n_runs > n_created, "%u runs, %u created", n_runs, n_created);
    free(out);
}

Test(engine_device, refuses_what_makes_no_sense) {
    struct fake_device f;
    kvf_device d = fake_device(&f);
    kvf_engine_config c = config_late(110, &d);
    kvf_engine *e = NULL;
    kvf_error err = {.text = ""};
    d.event_wait = NULL;
    cr_assert_eq(kvf_engine_create(&c, &e, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "fake: event_wait is NULL"), "%s", err.text);
    d = fake_device(&f);
    d.cpu_access = 0;
    cr_assert_eq(kvf_engine_create(&c, &e, &err), KVF_E_UNSUPPORTED);
    cr_assert(strstr(err.text, "cpu_access"), "%s", err.text);
    d = fake_device(&f);
    d.struct_size = 0;
    cr_assert_eq(kvf_engine_create(&c, &e, &err), KVF_E_INVALID);
    cr_assert_eq(f.n_calls, 0);
}
