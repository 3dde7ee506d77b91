/* Random workloads through the scheduler: every request ends, with the tokens of an undisturbed run, in a bounded
 * number of steps, whatever runs beside it. The rig checks each step. */
#include "scheduler_steps.h"

static uint64_t current_seed;

static void print_seed(void) {
    if (current_seed) fprintf(stderr, "seed %llu\n", (unsigned long long)current_seed);
}

/* A bound: the earliest live request runs in every step and is never preempted. So each costs no more steps than its
 * chunks (of all it will know, where that is prefilled again), its tokens, and one in which it ends. */
static uint32_t step_bound(const rig *g) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_requests; i++) {
        const rig_request *r = &g->requests[i];
        n += (r->n_prompt + r->max_new + g->sc.chunk - 1) / g->sc.chunk + r->max_new + 2;
        uint32_t n_pieces = rig_repeats(r) ? (r->n_prompt + KVF_MIN_PIECE_TOKENS - 1) / KVF_MIN_PIECE_TOKENS : 0;
        n += n_pieces * ((KVF_MIN_PIECE_TOKENS + g->sc.n_instruction) / g->sc.chunk + 2);
    }
    return n;
}

static kvf_policy_options random_policy(uint64_t *s) {
    char budget[16];
    snprintf(budget, sizeof budget, "%u", 16 + rig_below(s, 40));
    kvf_policy_options paper = rig_set(rig_options("d2o", "paper"), "budget_tokens", budget);
    switch (rig_below(s, 12)) {
    case 0: return rig_set(rig_options("streaming", NULL), "budget_tokens", budget);
    case 1: return rig_set(rig_options("h2o", NULL), "budget_tokens", budget);
    case 2: return paper;
    case 3: return rig_set(paper, "evict_every", "5");
    case 4: return rig_set(rig_set(rig_options("d2o", "serving"), "min_tokens", "28"), "rho", "0.3");
    case 5: return rig_set(paper, "defer_first_decode", "1");
    case 6:
        return rig_set(rig_set(rig_options("d2o", "paper"), "rho", "1"), "budget_may_change",
                       rig_below(s, 2) ? "1" : "0");
    case 7: return rig_set(rig_set(paper, "budget_tokens", "60"), "full_layers", "0");
    case 8: return rig_set(rig_options("d2o", "authors"), "rho", "0.4");
    case 9: return rig_set(rig_set(paper, "score", "repeat"), "repeat_piece", rig_below(s, 2) ? "64" : "0");
    case 10: return rig_set(rig_set(rig_options("h2o", NULL), "score", "repeat"), "rho", "0.3");
    default: return rig_options("full", NULL);
    }
}

typedef struct workload {
    uint64_t seed;
    bool full_only, aborts, outsiders, changes, orders, cancels;
} workload;

static void check_ends(const rig *g, bool outsiders) {
    for (uint32_t i = 0; i < g->n_requests; i++) {
        const rig_request *r = &g->requests[i];
        cr_assert(r->state == RIG_GONE);
        cr_assert(r->aborted || r->finished || r->end == KVF_END_LENGTH || (outsiders && r->end == KVF_END_NO_BLOCKS),
                  "request %u ended by %u", i, r->end);
        if (r->finished) cr_assert(r->n_known == r->n_prompt + r->max_new || r->n_known == g->sc.max_context);
        if (!r->changed && (i % 3 == 0 || !r->finished)) rig_expect_undisturbed(g, r);
    }
}

static uint32_t n_changes[2]; /* refused for want of room, made */

/* A budget of some request becomes another one; what is refused has a reason. */
static void change_some(rig *g, uint64_t *s) {
    rig_request *r = &g->requests[rig_below(s, g->n_requests)];
    if (r->state == RIG_GONE) return;
    uint32_t tokens = rig_below(s, 3) ? 16 + rig_below(s, 60) : 0;
    double rho = rig_below(s, 3) ? 0.1 + 0.1 * rig_below(s, 8) : 1;
    bool waits = r->state == RIG_WAITING, observes = kvf_policy_needs(&r->options) || !r->options.ops->needs;
    kvf_status status = rig_set_budget(g, r, rho, tokens);
    if (status == KVF_OK) cr_assert(waits || observes || (rho >= 1 && !tokens));
    if (status == KVF_E_STATE) cr_assert(!observes && !waits);
    if (status == KVF_E_INVALID) cr_assert(!strcmp(r->options.ops->name, "full") || r->options.n_full_layers);
    cr_assert(status == KVF_OK || status == KVF_E_STATE || status == KVF_E_INVALID || status == KVF_E_NEVER_FITS ||
                  status == KVF_E_NO_BLOCKS,
              "%s", kvf_sched_error(g->sched)->text);
    n_changes[status == KVF_OK] += status == KVF_OK || status == KVF_E_NO_BLOCKS;
    rig_audit(g);
}

/* Returns how often a request was preempted. */
static uint32_t run_workload(workload w) {
    current_seed = w.seed;
    uint64_t s = rig_mix(1, w.seed);
    uint32_t n_layers = 1 + rig_below(&s, 4), n_groups = 1 + rig_below(&s, 2), n_held = 0;
    kvf_manager_config mc = rig_pool(n_layers, n_groups, n_layers * n_groups * (10 + rig_below(&s, 30)));
    if (rig_below(&s, 3) == 0) mc.n_score_pages = mc.n_blocks - rig_below(&s, mc.n_blocks / 4);
    kvf_sched_config sc = rig_config(8u << rig_below(&s, 3));
    if (rig_below(&s, 2)) sc.max_running = 1 + rig_below(&s, 8);
    if (rig_below(&s, 2)) sc.max_batch_tokens = sc.chunk + 16 + rig_below(&s, 60);
    if (rig_below(&s, 2)) sc.max_prefill_tokens = 40 + rig_below(&s, 80);
    if (rig_below(&s, 3) == 0) sc.max_context = 60 + rig_below(&s, 100);
    sc.n_instruction = (uint32_t)(w.seed % 6);
    if (w.orders) sc.order = 1 + rig_below(&s, 3), sc.patience = 1 + rig_below(&s, 40);
    rig *g = rig_create(mc, sc);
    g->cancels = w.cancels;
    kvf_block held[512];
    uint32_t to_submit = 20 + rig_below(&s, 20);
    while (to_submit || g->n_live) {
        while (to_submit && rig_below(&s, 3)) {
            to_submit--;
            kvf_policy_options o = w.full_only ? rig_options("full", NULL) : random_policy(&s);
            uint32_t n_prompt = 1 + rig_below(&s, rig_below(&s, 2) ? 100 : 20), max_new = rig_below(&s, 40);
            kvf_status status = rig_try_submit(g, rig_random(&s), n_prompt, max_new, o);
            cr_assert(status == KVF_OK || status == KVF_E_NEVER_FITS || status == KVF_E_INVALID, "%s",
                      kvf_sched_error(g->sched)->text);
        }
        if (w.outsiders && g->n_live > 1 && rig_below(&s, 4) == 0)
            for (uint32_t i = rig_below(&s, 20);
                 i && n_held < 512 && kvf_block_take(g->manager, 0, &held[n_held]) == KVF_OK; i--)
                n_held++;
        if (w.changes && g->n_live && rig_below(&s, 3) == 0) change_some(g, &s);
        rig_step(g);
        while (n_held && (rig_below(&s, 8) || g->n_live < 2)) OK(kvf_block_release(g->manager, held[--n_held]));
        if (w.aborts && g->n_live && rig_below(&s, 6) == 0) {
            rig_request *r = &g->requests[rig_below(&s, g->n_requests)];
            if (r->state != RIG_GONE) rig_abort(g, r);
        }
    }
    if (!w.outsiders && !w.changes && !w.orders)
        cr_assert(g->n_steps <= step_bound(g), "%u steps, at most %u", g->n_steps, step_bound(g));
    if (!w.outsiders && !w.changes) cr_assert(g->n_bounced == 0, "sizes larger than what admission counted");
    check_ends(g, w.outsiders);
    uint32_t n_preempted = g->n_preempted;
    if (w.cancels) cr_assert(g->n_cancelled > 20, "%u steps were taken back", g->n_cancelled);
    rig_destroy(g);
    current_seed = 0;
    return n_preempted;
}

Test(scheduler_random, full, .fini = print_seed) {
    uint32_t n_preempted = 0;
    for (uint64_t seed = 1; seed <= 60; seed++)
        n_preempted += run_workload((workload){.seed = seed, .full_only = true, .aborts = seed % 3 == 0});
    cr_assert(n_preempted > 100, "%u preemptions", n_preempted);
}

Test(scheduler_random, all_policies_side_by_side, .fini = print_seed) {
    uint32_t n_preempted = 0;
    for (uint64_t seed = 1001; seed <= 1120; seed++)
        n_preempted += run_workload((workload){.seed = seed, .aborts = seed % 3 == 0});
    cr_assert(n_preempted > 100, "%u preemptions", n_preempted);
}

/* Blocks that somebody else takes and gives back: preemption at any place. */
Test(scheduler_random, pressure_from_outside, .fini = print_seed) {
    uint32_t n_preempted = 0;
    for (uint64_t seed = 2001; seed <= 2060; seed++)
        n_preempted += run_workload((workload){.seed = seed, .aborts = seed % 2, .outsiders = true});
    cr_assert(n_preempted > 100, "%u preemptions", n_preempted);
}

/* Each step is planned, taken back, and planned again. */
Test(scheduler_random, steps_taken_back, .fini = print_seed) {
    uint32_t n_preempted = 0;
    for (uint64_t seed = 6001; seed <= 6040; seed++)
        n_preempted += run_workload((workload){.seed = seed, .aborts = seed % 3 == 0, .cancels = true});
    cr_assert(n_preempted > 20, "%u preemptions", n_preempted);
}

/* In other orders a running request may be preempted for one that came later, which costs steps, but no token and no request. */
Test(scheduler_random, other_orders, .fini = print_seed) {
    uint32_t n_preempted = 0;
    for (uint64_t seed = 5001; seed <= 5060; seed++)
        n_preempted += run_workload((workload){.seed = seed, .aborts = seed % 3 == 0, .orders = true});
    cr_assert(n_preempted > 100, "%u preemptions", n_preempted);
}

/* Budgets that change in every state of a request: promises hold, and all still end. */
Test(scheduler_random, budgets_that_change, .fini = print_seed) {
    uint32_t n_preempted = 0;
    for (uint64_t seed = 4001; seed <= 4120; seed++)
        n_preempted += run_workload((workload){.seed = seed, .aborts = seed % 3 == 0, .changes = true});
    cr_assert(n_preempted > 100, "%u preemptions", n_preempted);
    cr_assert(n_changes[0] > 10 && n_changes[1] > 500, "%u had no room, %u were made", n_changes[0], n_changes[1]);
}

Test(scheduler_random, a_hundred_requests_in_few_blocks, .fini = print_seed) {
    for (uint64_t seed = 3001; seed <= 3003; seed++) {
        current_seed = seed;
        uint64_t s = rig_mix(1, seed);
        rig *g = rig_create(rig_pool(2, 1, 32), rig_config(16));
        kvf_policy_options d2o = rig_set(rig_options("d2o", NULL), "budget_tokens", "16");
        for (uint32_t i = 0; i < 100; i++)
            rig_submit(g, rig_random(&s), 1 + rig_below(&s, 90), 1 + rig_below(&s, 30),
                       seed % 2 ? d2o : rig_options("full", NULL));
        rig_run(g, step_bound(g));
        cr_assert(g->most_running >= 3);
        for (uint32_t i = 0; i < 100; i++) cr_assert(g->requests[i].finished);
        check_ends(g, false);
        rig_destroy(g);
        current_seed = 0;
    }
}
