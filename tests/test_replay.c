/* The replay against figures computed by hand, and the report's parts: the series, the Prometheus text, the page. */
#define _XOPEN_SOURCE 700
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/replay.h"

static const double no_density = 0;

typedef struct rig {
    kvf__trace trace;
    kvf_policy_options policy;
    kvf__replay_config c;
    kvf__occ occ;
    kvf__chrome chrome;
    kvf__replay_result result;
} rig;

/* 4 layers of one group, blocks of 8 slots and 1,000 bytes, a step of 1 s. */
static void rig_make(rig *r, const char *policy, const char *rho, uint32_t n_blocks) {
    memset(r, 0, sizeof *r);
    cr_assert_eq(kvf_policy_options_init(&r->policy, sizeof r->policy, policy, NULL, NULL), KVF_OK);
    if (rho) cr_assert_eq(kvf_policy_option_set(&r->policy, "rho", rho, NULL), KVF_OK);
    if (rho) cr_assert_eq(kvf_policy_option_set(&r->policy, "min_tokens", "16", NULL), KVF_OK);
    r->c = (kvf__replay_config){.trace = &r->trace,
                                .policy = &r->policy,
                                .n_layers = 4,
                                .n_kv_heads = 2,
                                .block_size = 8,
                                .chunk = 64,
                                .max_running = 4,
                                .max_context = 512,
                                .n_blocks = n_blocks,
                                .block_bytes = 1000,
                                .step_s = 1,
                                .speed = 1};
    cr_assert(kvf__chrome_open(&r->chrome, NULL, "", 4));
}

static void add(rig *r, double arrival, uint32_t prompt, uint32_t output, const double *densities) {
    const kvf__trace_request q = {
        .arrival_s = arrival, .n_prompt = prompt, .n_output = output, .group = KVF__TRACE_NONE};
    cr_assert(kvf__trace_add(&r->trace, q, densities));
}

static void go(rig *r) {
    cr_assert(kvf__occ_begin(&r->occ, 4, 8, r->c.n_blocks, 1000));
    cr_assert(kvf__replay(&r->c, &r->occ, &r->chrome, &r->result));
}

static void rig_free(rig *r) {
    kvf__occ_free(&r->occ);
    kvf__trace_free(&r->trace);
}

#define IS(a, b)                                                                                 \
    cr_assert_eq((uint64_t)(a), (uint64_t)(b), #a " is %llu, not %llu", (unsigned long long)(a), \
                 (unsigned long long)(b))

Test(replay, a_full_cache_by_hand) {
    rig r;
    rig_make(&r, "full", NULL, 100);
    add(&r, 0, 100, 5, &no_density); /* two chunks, then 4 steps: 104 slots are 13 blocks a layer */
    add(&r, 3.5, 8, 1, &no_density); /* arrives within the 4th step: one step of its own prompt, the 5th */
    go(&r);
    IS(r.occ.n_steps, 6);
    IS(r.result.n_done, 2);
    IS(r.occ.profile.held_max, 4 * 13 + 4);
    IS(r.occ.full_max, 4 * 13 + 4);
    IS(r.occ.profile.held, 0);
    IS(r.occ.output_tokens, 6);
    IS(r.result.n_compactions, 0);
    cr_assert_float_eq(r.occ.end_s, 6, 1e-9);
    const kvf__occ_step *p = r.occ.points;
    IS(r.occ.n_points, 6);
    IS(p[0].n_prefill_tokens, 64);
    IS(p[1].n_prefill_tokens, 36);
    IS(p[2].n_decode_tokens, 1);
    IS(p[4].n_prefill_tokens, 8);
    IS(p[1].held, 4 * 13);
    IS(r.occ.point_blocks[4 * 4], 14); /* the second is there within the step, and gone after it */
    IS(p[4].held, 4 * 14);
    IS(p[4].held_after, 4 * 13);
    cr_assert_float_eq(r.occ.wait_max_s, 0.5, 1e-9);
    IS(r.occ.queue_steps_max, 0);
    rig_free(&r);
}

/* Densities of the trace decide the budgets as the policy says: less for high ones. */
Test(replay, budgets_follow_the_densities_of_the_trace) {
    rig r;
    rig_make(&r, "d2o", "0.5", 400);
    const double f[4] = {0.1, 0.9, 0.5, 0.5};
    r.trace.n_layers = 4;
    add(&r, 0, 200, 50, f);
    go(&r);
    uint64_t total = 0;
    for (int l = 0; l < 4; l++) {
        total += r.occ.layers[l].keep_sum;
        cr_assert_float_eq(r.occ.layers[l].density_sum, f[l], 1e-12);
    }
    IS(total, 4 * 100); /* rho * 200 a layer, exactly */
    /* 400 * softmax(-F) is 143.37, 64.42, 96.10, 96.10: the one token left goes to the largest remainder. */
    IS(r.occ.layers[0].keep_sum, 143);
    IS(r.occ.layers[1].keep_sum, 65);
    IS(r.occ.layers[2].keep_sum, 96);
    IS(r.result.n_compactions, 4 + 4 * 49); /* the prompt's, then one a layer and step */
    IS(r.occ.profile.evicted_slots, 4 * 100 + 4 * 49);
    IS(r.occ.profile.held_max, 4 * 25);
    IS(r.occ.full_max, 4 * 32);
    rig_free(&r);
}

Test(replay, a_small_pool_queues_and_preempts_and_all_end) {
    rig r;
    rig_make(&r, "full", NULL, 4 * 16);
    for (int i = 0; i < 12; i++) add(&r, 0, 40 + i, 30, &no_density);
    go(&r);
    IS(r.result.n_done, 12);
    cr_assert(r.occ.n_preempted > 0 && r.occ.profile.held_max <= 64 && r.occ.waiting_max >= 8);
    cr_assert(r.occ.queue_steps_max > 30 && r.occ.n_longest == KVF__OCC_SLOWEST);
    for (uint32_t i = 1; i < r.occ.n_longest; i++)
        cr_assert_leq(r.occ.longest[i].start_s - r.occ.longest[i].arrival_s,
                      r.occ.longest[i - 1].start_s - r.occ.longest[i - 1].arrival_s);
    IS(r.occ.profile.taken_blocks, r.occ.profile.freed_blocks);
    rig_free(&r);
}

Test(replay, what_can_never_fit_is_refused_and_the_rest_runs) {
    rig r;
    rig_make(&r, "full", NULL, 40);
    add(&r, 0, 300, 5, &no_density);
    add(&r, 0, 20, 5, &no_density);
    go(&r);
    IS(r.result.n_refused, 1);
    IS(r.result.n_done, 1);
    cr_assert(strstr(r.result.refused, "needs 152 blocks, the pool has 40"), "%s", r.result.refused);
    rig_free(&r);
}

/* All policies, prompts under and over the budget, outputs of 0 tokens: everything ends, nothing is left, and the same
 * trace gives the same replay. */
Test(replay, every_policy_ends_and_repeats) {
    static const char *const policies[] = {"full", "d2o", "h2o", "streaming", "d2o:serving", "d2o:authors", "kvzip"};
    for (size_t k = 0; k < sizeof policies / sizeof *policies; k++) {
        uint64_t taken[2], steps[2];
        for (int again = 0; again < 2; again++) {
            rig r;
            char name[32];
            snprintf(name, sizeof name, "%s", policies[k]);
            char *preset = strchr(name, ':');
            if (preset) *preset++ = '\0';
            rig_make(&r, "full", NULL, 300);
            cr_assert_eq(kvf_policy_options_init(&r.policy, sizeof r.policy, name, preset, NULL), KVF_OK);
            if (k) cr_assert_eq(kvf_policy_option_set(&r.policy, "rho", "0.3", NULL), KVF_OK);
            r.c.seed = 3;
            const kvf__trace_make m = {.n_requests = 60,
                                       .seed = k + 1,
                                       .rate = 0.2,
                                       .prompt_mean = 60,
                                       .prompt_sigma = 0.9,
                                       .output_mean = 40,
                                       .output_sigma = 0.9,
                                       .prompt_max = 400,
                                       .output_max = 100};
            cr_assert(kvf__trace_generate(&m, &r.trace));
            r.trace.requests[5].n_output = 0;
            go(&r);
            cr_assert(r.result.n_done == 60 && r.occ.n_requests == 60, "%s: %llu done", policies[k],
                      (unsigned long long)r.result.n_done);
            IS(r.occ.profile.held, 0);
            IS(r.occ.profile.events_dropped, 0);
            taken[again] = r.occ.profile.taken_blocks;
            steps[again] = r.occ.n_steps;
            rig_free(&r);
        }
        cr_assert(taken[0] == taken[1] && steps[0] == steps[1] && taken[0] > 0, "%s", policies[k]);
    }
}

/* ---- The prefix cache: what is found, by hand ---------------------------------------------------------- */

static void add_grouped(rig *r, double arrival, uint32_t prompt, uint32_t output, uint32_t group, uint32_t shared) {
    const kvf__trace_request q = {
        .arrival_s = arrival, .n_prompt = prompt, .n_output = output, .group = group, .n_shared = shared};
    r->trace.n_groups = group >= r->trace.n_groups ? group + 1 : r->trace.n_groups;
    cr_assert(kvf__trace_add(&r->trace, q, NULL));
}

/* Prompts of 100 tokens, in blocks of 8: of 44 shared tokens five blocks are found, and 4 tokens of the sixth, copied. */
Test(replay, shared_prefixes_are_found_and_others_are_not) {
    for (int on = 0; on < 2; on++) {
        rig r;
        rig_make(&r, "full", NULL, 400);
        r.c.prefix_cache = on;
        add_grouped(&r, 0, 100, 5, 0, 0);
        add_grouped(&r, 20, 100, 5, 0, 44);
        add_grouped(&r, 40, 100, 5, 1, 0);   /* another group */
        add_grouped(&r, 60, 100, 5, 0, 100); /* the first prompt again: all but the last token */
        add(&r, 80, 100, 5, NULL);           /* alone */
        go(&r);
        IS(r.result.n_done, 5);
        IS(r.occ.prefix.struct_size != 0, on);
        IS(r.occ.prefix.queries, on ? 5 : 0);
        IS(r.occ.prefix.hits, on ? 2 : 0);
        IS(r.occ.prefix.query_tokens, on ? 500 : 0);
        IS(r.occ.prefix.hit_tokens, on ? 44 + 99 : 0);
        IS(r.occ.prefix.evicted, 0);
        IS(r.occ.profile.copied_blocks, on ? 2 * 4 : 0);
        uint64_t computed = 0;
        for (uint32_t i = 0; i < r.occ.n_points; i++) computed += r.occ.points[i].n_prefill_tokens;
        IS(computed, on ? 500 - 143 : 500);
        IS(r.occ.profile.held, 0);
        rig_free(&r);
    }
}

/* d2o sums the prompt's columns: a hit ends where a snapshot does, at the shared tokens' whole blocks. */
Test(replay, a_policy_that_observes_finds_what_a_snapshot_ends) {
    for (uint32_t n_pages = 0; n_pages <= 64; n_pages += 64) {
        rig r;
        rig_make(&r, "d2o", "0.5", 400);
        r.c.prefix_cache = true;
        r.c.n_snapshot_pages = n_pages;
        r.c.chunk = 256;
        add_grouped(&r, 0, 100, 5, 0, 0);
        add_grouped(&r, 20, 100, 5, 0, 44);
        add_grouped(&r, 40, 120, 5, 0, 44);
        go(&r);
        IS(r.result.n_done, 3);
        IS(r.occ.prefix.hits, n_pages ? 2 : 0);
        IS(r.occ.prefix.hit_tokens, n_pages ? 2 * 40 : 0);
        IS(r.result.n_compactions, 3 * (4 + 4 * 4)); /* as without: the prompt's, and one a layer and step */
        rig_free(&r);
    }
}

/* Compactions of tables that others share too, in a pool that is too small: some wait and begin again, all end. */
Test(replay, sharing_compaction_and_preemption_together) {
    for (int on = 0; on < 2; on++) {
        rig r;
        rig_make(&r, "d2o", "0.4", 4 * 40);
        r.c.prefix_cache = on;
        r.c.n_snapshot_pages = 64;
        for (int i = 0; i < 24; i++) add_grouped(&r, i / 8, 60 + 2 * i, 30, (uint32_t)i % 2, i < 2 ? 0 : 48);
        go(&r);
        IS(r.result.n_done, 24);
        IS(r.occ.profile.held, 0);
        cr_assert(!on || (r.occ.prefix.hits >= 4 && r.occ.prefix.evicted > 0), "%llu hits, %llu evicted",
                  (unsigned long long)r.occ.prefix.hits, (unsigned long long)r.occ.prefix.evicted);
        rig_free(&r);
    }
}

/* Mooncake's ids name blocks of 512 tokens: what is shared is found though its own form could not say so. */
Test(replay, mooncake_blocks_are_found_by_their_ids) {
    char path[] = "replay-XXXXXX";
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    FILE *f = fdopen(fd, "w");
    fputs("{\"timestamp\": 0, \"input_length\": 1100, \"output_length\": 2, \"hash_ids\": [1, 2, 3]}\n"
          "{\"timestamp\": 60000, \"input_length\": 1500, \"output_length\": 2, \"hash_ids\": [1, 4, 5]}\n"
          "{\"timestamp\": 120000, \"input_length\": 1536, \"output_length\": 2, \"hash_ids\": [1, 4, 9]}\n"
          "{\"timestamp\": 180000, \"input_length\": 1100, \"output_length\": 2, \"hash_ids\": [8, 2, 3]}\n",
          f);
    cr_assert_eq(fclose(f), 0);
    rig r;
    rig_make(&r, "full", NULL, 4 * 1000);
    cr_assert(kvf__trace_read(path, 0, &r.trace));
    remove(path);
    r.c.max_context = 2048;
    r.c.prefix_cache = true;
    go(&r);
    IS(r.result.n_done, 4);
    IS(r.occ.prefix.hits, 2);
    IS(r.occ.prefix.hit_tokens, 512 + 1024);
    IS(r.occ.shared_tokens, 512 + 1024);
    rig_free(&r);
}

/* ---- The series ------------------------------------------------------------------------------------ */

Test(occupancy, a_long_series_keeps_the_most_and_its_memory) {
    kvf__occ o;
    cr_assert(kvf__occ_begin(&o, 2, 8, 100000, 1));
    uint64_t compactions = 0;
    for (uint64_t i = 0; i < 10000; i++) {
        const uint32_t blocks[2] = {(uint32_t)i, i == 7777 ? 500000 : 3};
        const kvf__occ_step s = {.step = i + 1,
                                 .begin_s = (double)i,
                                 .end_s = (double)i + (i == 4321 ? 0.9 : 0.5),
                                 .held = i == 5555 ? 90000 : i,
                                 .n_compactions = (uint32_t)(i & 3)};
        compactions += i & 3;
        kvf__occ_add_step(&o, &s, blocks);
    }
    cr_assert(o.n_points <= KVF__OCC_POINTS && o.stride == 16 && o.n_points == 625 && o.n_steps == 10000);
    uint64_t most = 0, layer = 0, sum = 0;
    for (uint32_t i = 0; i < o.n_points; i++) {
        most = o.points[i].held > most ? o.points[i].held : most;
        layer = o.point_blocks[2 * i + 1] > layer ? o.point_blocks[2 * i + 1] : layer;
        sum += o.points[i].n_compactions;
        IS(o.points[i].step, 16 * i + 1);
        IS(o.point_blocks[2 * i], 16 * i + 15);
        cr_assert(i == 0 || o.points[i].begin_s >= o.points[i - 1].end_s);
    }
    IS(most, 90000);
    IS(layer, 500000);
    IS(sum, compactions);
    IS(o.slowest[0].step, 4322);
    IS(o.n_slowest, KVF__OCC_SLOWEST);
    kvf__occ_free(&o);
}

Test(occupancy, quantiles_are_the_ends_of_buckets) {
    kvf_histogram h = {0};
    IS(kvf__histogram_quantile(&h, 0.5), 0);
    h.n = 10;
    h.buckets[0] = 5;
    h.buckets[3] = 4;
    h.buckets[6] = 1;
    IS(kvf__histogram_quantile(&h, 0.5), 1);
    IS(kvf__histogram_quantile(&h, 0.6), 8);
    IS(kvf__histogram_quantile(&h, 0.95), 64);
}
