/* Samples of one prompt and forks in the scheduler: the prompt runs once, admission counts, preemption, ends. */
#include "scheduler_steps.h"

static uint64_t current_seed;

static void print_seed(void) {
    if (current_seed) fprintf(stderr, "seed %llu\n", (unsigned long long)current_seed);
}

static kvf_policy_options d2o(const char *budget) {
    return rig_set(rig_options("d2o", "paper"), "budget_tokens", budget);
}

static rig_request *submit_group(rig *g, uint64_t seed, uint32_t n, uint32_t n_prompt, uint32_t max_new,
                                 kvf_policy_options o) {
    kvf_status status = rig_try_group(g, seed, n, n_prompt, max_new, o);
    cr_assert(status == KVF_OK, "%s", kvf_sched_error(g->sched)->text);
    return &g->requests[g->n_requests - n];
}

static void expect_undisturbed(rig *g) {
    for (uint32_t i = 0; i < g->n_requests; i++) {
        const rig_request *r = &g->requests[i];
        cr_assert(r->state == RIG_GONE);
        rig_expect_undisturbed(g, r);
    }
}

Test(scheduler_forks, a_prompt_runs_once_for_all_its_samples) {
    const char *const names[] = {"full", "streaming", "h2o", "d2o"};
    for (uint32_t p = 0; p < 4; p++) {
        rig *g = rig_create(rig_pool(3, 2, 900), rig_config(16));
        kvf_policy_options o = rig_options(names[p], NULL);
        if (p) o = rig_set(rig_set(o, "rho", "0.4"), "min_tokens", "16");
        rig_request *r = submit_group(g, 5, 6, 60, 20, o);
        for (uint32_t step = 0; step < 4; step++) { /* chunks of 16 */
            rig_step(g);
            cr_assert(g->step.n_items == 1 && g->step.items[0].request == r->name && g->step.n_tokens <= 16);
            cr_assert(g->step.n_running == 1 && g->step.n_waiting == 5);
            cr_assert(g->step.items[0].n_held == (step == 3 ? 5u : 0u));
        }
        rig_step(g);
        cr_assert(g->step.n_items == 6 && g->step.n_decode == 6 && g->n_forked == 5);
        rig_run(g, 100);
        expect_undisturbed(g);
        rig_destroy(g);
    }
}

/* 6 samples of 64 + 8 in 2 layers: 16 blocks are the prompt's, each sample adds 2; by themselves they would take 108. */
Test(scheduler_forks, samples_share_the_blocks_of_their_prompt) {
    rig *g = rig_create(rig_pool(2, 1, 64), rig_config(64));
    submit_group(g, 5, 6, 64, 8, rig_options("full", NULL));
    rig_step(g);
    cr_assert(counted(g) == 16, "%u", counted(g));
    rig_step(g);
    cr_assert(counted(g) == 16 + 6 * 2, "%u", counted(g));
    cr_assert(g->n_copies == 0, "the prompt ends with a block");
    rig_run(g, 100);
    cr_assert(g->n_preempted == 0);
    rig_destroy(g);
}

/* A last block that is partly filled is copied by all but the last. */
Test(scheduler_forks, the_last_block_is_copied_by_all_but_one) {
    rig *g = rig_create(rig_pool(2, 1, 64), rig_config(64));
    submit_group(g, 5, 4, 61, 8, rig_options("full", NULL));
    rig_step(g);
    rig_step(g);
    cr_assert(g->n_copies == 3 * 2, "%u copies", g->n_copies);
    cr_assert(counted(g) == 16 + 3 * 2, "%u", counted(g));
    rig_run(g, 100);
    expect_undisturbed(g);
    rig_destroy(g);
}

/* The rule of admission: the prompt's need, and each further sample's whole reservation. */
Test(scheduler_forks, admission_counts_every_sample) {
    kvf_policy_options o = d2o("16"); /* 2 layers that add up to 32 slots, and one more each until they evict */
    kvf_policy_need need;
    cr_assert(kvf_policy_project(&o, 2, 1, 8, 80, 20, &need, NULL) == KVF_OK && need.bounded);
    uint32_t steady = (uint32_t)need.steady_blocks, prompt = (uint32_t)need.prompt_blocks;
    cr_assert(prompt == 20 && steady == 6);
    for (uint32_t lack = 0; lack < 2; lack++) {
        rig *g = rig_create(rig_pool(2, 1, prompt + 3 * steady - lack + 20), rig_config(80));
        kvf_block held[32];
        for (uint32_t i = 0; i < 20; i++) OK(kvf_block_take(g->manager, 0, &held[i]));
        submit_group(g, 5, 4, 80, 20, o);
        if (lack) { /* nothing runs: it comes apart rather than waiting for what nobody gives back */
            rig_step(g);
            cr_assert(g->step.n_running == 1 && g->step.items[0].n_held == 0);
        } else {
            rig_step(g);
            cr_assert(g->step.items[0].n_held == 3 && g->n_forked == 3);
            rig_run(g, 100);
            cr_assert(g->n_preempted == 0 && g->n_shed == 0, "what was promised was not there");
        }
        release_all(g, held, 20);
        if (lack)
            for (uint32_t i = 0; i < g->n_requests; i++)
                if (g->requests[i].state != RIG_GONE) rig_abort(g, &g->requests[i]);
        rig_destroy(g);
    }
}

/* What a parent held by itself is owed again once it is shared: what nobody was promised may go, and all still grow. */
Test(scheduler_forks, a_parent_is_promised_again_what_it_shares) {
    rig *g = rig_create(rig_pool(2, 1, 12), rig_config(16));
    submit_group(g, 5, 2, 10, 6, d2o("16")); /* 4 blocks each, and 4 for the shared table */
    rig_step(g);
    kvf_block held[16];
    uint32_t n_held = take_all(g, held);
    for (uint32_t i = 0; i < 4; i++) rig_step(g);
    cr_assert(g->n_forked == 1 && g->n_preempted == 0 && g->n_shed == 0, "%u preempted", g->n_preempted);
    release_all(g, held, n_held);
    rig_run(g, 100);
    expect_undisturbed(g);
    rig_destroy(g);
}

Test(scheduler_forks, samples_that_never_fit_together_run_in_parts) {
    rig *g = rig_create(rig_pool(2, 1, 30), rig_config(80));
    submit_group(g, 5, 6, 80, 12, d2o("16")); /* 20 blocks and 6 a sample: two at a time */
    uint32_t most = 0;
    while (rig_step(g)) most = g->step.n_decode > most ? g->step.n_decode : most;
    cr_assert(most >= 2 && g->n_forked == 3, "%u at once, %u forked", most, g->n_forked);
    expect_undisturbed(g);
    rig_destroy(g);

    kvf_sched_config sc = rig_config(16);
    sc.max_running = 3;
    g = rig_create(rig_pool(2, 1, 200), sc);
    submit_group(g, 5, 8, 20, 12, rig_options("full", NULL));
    rig_run(g, 200);
    cr_assert(g->n_forked == 5 && g->most_running == 3);
    expect_undisturbed(g);
    rig_destroy(g);
}

/* C5. A group of two with 2 shared blocks and one of its own each fills the device; another request needs a block. */
Test(scheduler_forks, c5_a_group_is_recomputed_and_nothing_aborts) {
    kvf_manager_config mc = rig_pool(1, 1, 4);
    rig *g = rig_create(mc, rig_config(16));
    rig_request *r = submit_group(g, 5, 2, 16, 12, rig_options("full", NULL));
    rig_step(g);
    rig_step(g);
    cr_assert(counted(g) == 4, "%u", counted(g)); /* 2 shared, 1 + 1 */
    /* Dropping a shared block from one fork frees none. */
    uint32_t n_blocks = 0;
    const uint32_t *row = NULL;
    OK(kvf_seq_table(g->manager, r[0].seq, 0, 0, NULL, &n_blocks, &row));
    cr_assert(n_blocks == 3);
    rig_submit(g, 6, 8, 4, rig_options("full", NULL)); /* waits: nobody overtakes, and nobody is thrown out for it */
    rig_run(g, 200);
    for (uint32_t i = 0; i < g->n_requests; i++) cr_assert(g->requests[i].finished);
    cr_assert(g->n_preempted >= 1 && r[0].n_preempted == 0, "the group's later request makes room for the earlier");
    expect_undisturbed(g);
    rig_destroy(g);

    /* Freeing: the block of its own falls free, the shared ones with the second. */
    g = rig_create(mc, rig_config(16));
    r = submit_group(g, 5, 2, 16, 12, rig_options("full", NULL));
    rig_step(g);
    rig_step(g);
    rig_abort(g, &r[1]);
    cr_assert(counted(g) == 3, "%u", counted(g));
    rig_abort(g, &r[0]);
    cr_assert(counted(g) == 0);
    rig_destroy(g);
}

/* Abort of one or of all, at every step: before admission, in the prompt, between the step and prompt_done, after. */
Test(scheduler_forks, an_abort_of_any_sample_at_any_time_leaves_the_others) {
    kvf_policy_options policies[] = {rig_options("full", NULL), d2o("24")};
    for (uint32_t p = 0; p < 2; p++)
        for (uint32_t at = 0; at < 14; at++)
            for (uint32_t which = 1; which < 16; which++) {
                rig *g = rig_create(rig_pool(2, 1, 200), rig_config(16));
                rig_request *r = submit_group(g, 7, 4, 40, 6, policies[p]);
                for (uint32_t i = 0; i < at && g->n_live; i++) rig_step(g);
                for (uint32_t i = 0; i < 4; i++)
                    if (which >> i & 1 && r[i].state != RIG_GONE) rig_abort(g, &r[i]);
                while (rig_step(g)) {}
                for (uint32_t i = 0; i < 4; i++) cr_assert(r[i].finished || (which >> i & 1));
                if (at % 4 == 0 && which % 5 == 0) expect_undisturbed(g);
                rig_destroy(g);
            }
}

typedef struct mid {
    uint32_t step, which;
} mid;

static void abort_in_step(rig *g, void *ctx) {
    const mid *m = ctx;
    if (g->n_steps != m->step) return;
    for (uint32_t i = 0; i < 3; i++)
        if (m->which >> i & 1 && g->requests[i].state != RIG_GONE) rig_abort(g, &g->requests[i]);
}

Test(scheduler_forks, the_next_sample_takes_over_in_the_middle_of_a_step) {
    for (uint32_t step = 1; step <= 4; step++)
        for (uint32_t which = 1; which < 8; which++) {
            rig *g = rig_create(rig_pool(2, 1, 200), rig_config(16));
            mid m = {step, which};
            g->mid_step = abort_in_step;
            g->mid_ctx = &m;
            submit_group(g, 7, 3, 40, 6, d2o("24"));
            while (rig_step(g)) {}
            for (uint32_t i = 0; i < 3; i++) cr_assert(g->requests[i].finished || (which >> i & 1));
            expect_undisturbed(g);
            rig_destroy(g);
        }
}

static kvf_policy_options random_policy(uint64_t *s) {
    char budget[16];
    snprintf(budget, sizeof budget, "%u", 16 + rig_below(s, 40));
    switch (rig_below(s, 9)) {
    case 0: return rig_set(rig_options("streaming", NULL), "budget_tokens", budget);
    case 1: return rig_set(rig_options("h2o", NULL), "budget_tokens", budget);
    case 2: return d2o(budget);
    case 3: return rig_set(d2o(budget), "evict_every", "5");
    case 4: return rig_set(d2o(budget), "defer_first_decode", "1");
    case 5: return rig_set(d2o("60"), "full_layers", "0");
    case 6: return rig_set(rig_options("d2o", "authors"), "rho", "0.4");
    case 7: return rig_set(rig_set(d2o(budget), "score", "repeat"), "repeat_piece", "64");
    default: return rig_options("full", NULL);
    }
}

/* Groups of all policies side by side in a small pool, with aborts and with blocks that somebody else takes. */
Test(scheduler_forks, random_workloads, .fini = print_seed) {
    uint32_t n_preempted = 0, n_forked = 0;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        current_seed = seed;
        uint64_t s = rig_mix(1, seed);
        bool aborts = seed % 3 == 0, outsiders = seed % 4 == 0;
        uint32_t n_layers = 1 + rig_below(&s, 4), n_groups = 1 + rig_below(&s, 2), n_held = 0;
        kvf_manager_config mc = rig_pool(n_layers, n_groups, n_layers * n_groups * (14 + rig_below(&s, 40)));
        kvf_sched_config sc = rig_config(8u << rig_below(&s, 3));
        if (rig_below(&s, 2)) sc.max_running = 2 + rig_below(&s, 8);
        if (rig_below(&s, 3) == 0) sc.max_context = 60 + rig_below(&s, 100);
        rig *g = rig_create(mc, sc);
        kvf_block held[512];
        uint32_t to_submit = 12 + rig_below(&s, 12);
        while (to_submit || g->n_live) {
            while (to_submit && rig_below(&s, 3)) {
                to_submit--;
                uint32_t n = 1 + rig_below(&s, 6), n_prompt = 1 + rig_below(&s, rig_below(&s, 2) ? 80 : 20);
                kvf_status status = rig_try_group(g, rig_random(&s), n, n_prompt, rig_below(&s, 30), random_policy(&s));
                cr_assert(status == KVF_OK || status == KVF_E_NEVER_FITS || status == KVF_E_INVALID, "%s",
                          kvf_sched_error(g->sched)->text);
            }
            if (outsiders && g->n_live > 1 && rig_below(&s, 4) == 0)
                for (uint32_t i = rig_below(&s, 20);
                     i && n_held < 512 && kvf_block_take(g->manager, 0, &held[n_held]) == KVF_OK; i--)
                    n_held++;
            rig_step(g);
            while (n_held && (rig_below(&s, 8) || g->n_live < 2)) OK(kvf_block_release(g->manager, held[--n_held]));
            if (aborts && g->n_live && rig_below(&s, 6) == 0) {
                rig_request *r = &g->requests[rig_below(&s, g->n_requests)];
                if (r->state != RIG_GONE) rig_abort(g, r);
            }
        }
        for (uint32_t i = 0; i < g->n_requests; i++) {
            const rig_request *r = &g->requests[i];
            cr_assert(r->state == RIG_GONE && (r->aborted || r->finished || r->end == KVF_END_LENGTH || outsiders),
                      "request %u ended by %u", i, r->end);
            if (i % 3 == 0 || !r->finished) rig_expect_undisturbed(g, r);
        }
        n_preempted += g->n_preempted;
        n_forked += g->n_forked;
        rig_destroy(g);
        current_seed = 0;
    }
    cr_assert(n_preempted > 100 && n_forked > 500, "%u preemptions, %u forks", n_preempted, n_forked);
}
