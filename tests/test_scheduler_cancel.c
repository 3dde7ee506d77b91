/* A planned step that is taken back: the scheduler and the manager are as before, whatever states the requests are in. */
#include "scheduler_dump.h"

enum { CHUNK = 8 };

static rig_text before, after;

static kvf_request submit(rig *g, uint32_t n_prompt, uint32_t n_samples, bool forks, kvf_request *names) {
    const kvf_policy_options full = rig_options("full", NULL);
    const kvf_sched_request request = {.struct_size = sizeof request,
                                       .n_prompt = n_prompt,
                                       .max_new = 40,
                                       .options = &full,
                                       .n_samples = n_samples,
                                       .forks = forks,
                                       .sample_names = names};
    kvf_request name = 0;
    OK(kvf_sched_submit(g->sched, &request, &name));
    return name;
}

static void plan(rig *g) {
    g->step.struct_size = sizeof g->step;
    OK(kvf_sched_plan(g->sched, 0, &g->step));
    OK(kvf_copies_done(g->manager, &g->step.copies));
}

/* A step; then the events of prompts that have ended, and tokens, but not for the two named. */
static void step(rig *g, kvf_request no_events, kvf_request no_token) {
    plan(g);
    kvf_step_item items[16];
    uint32_t n = g->step.n_items;
    memcpy(items, g->step.items, n * sizeof *items);
    OK(kvf_sched_done(g->sched));
    for (uint32_t i = 0; i < n; i++) {
        kvf_request r = items[i].request;
        if (r == no_events) continue;
        if (items[i].prompt_ends) OK(kvf_sched_prompt_done(g->sched, r));
        if (items[i].samples && r != no_token) OK(kvf_sched_token(g->sched, r, NULL));
    }
    OK(kvf_copies_done(g->manager, kvf_sched_copies(g->sched)));
}

static kvf__req *at(rig *g, kvf_request name) { return kvf__sched_find(g->sched, name); }

/* Requests in every state. What is needed of the setup beside the calls: a swap, a preemption and a fork without room at once. */
typedef struct every {
    rig *g;
    kvf_request decode, beams[2], fork, swapped, paused, preempted, ended, prompts[2], waits, held[2];
} every;

static void every_begin(every *a) {
    kvf_manager_config mc = rig_pool(2, 1, 200);
    mc.n_host_blocks = 40;
    kvf_sched_config sc = rig_config(CHUNK);
    sc.preempt = KVF_PREEMPT_SWAP;
    sc.max_batch_tokens = 100;
    rig *g = a->g = rig_create(mc, sc);
    kvf_sched *s = g->sched;
    a->decode = submit(g, 4, 1, false, NULL);
    submit(g, 8, 2, true, a->beams);
    a->swapped = submit(g, 4, 1, false, NULL);
    a->paused = submit(g, 4, 1, false, NULL);
    a->preempted = submit(g, 4, 1, false, NULL);
    for (int i = 0; i < 3; i++) step(g, 0, i == 2 ? a->beams[0] : 0);
    a->ended = submit(g, 4, 1, false, NULL);
    a->prompts[0] = submit(g, 20, 2, false, a->held);
    a->prompts[1] = submit(g, 20, 1, false, NULL);
    step(g, a->ended, 0);
    a->waits = submit(g, 20, 2, false, a->held);
    OK(kvf_sched_pause(s, a->paused));
    OK(kvf_sched_pause(s, a->preempted));
    cr_assert(kvf__sched_preempt_paused(s) && kvf__sched_swap_out(s, at(g, a->swapped)));
    OK(kvf_copies_done(g->manager, &s->copies));
    s->copies.n = 0;
    uint32_t most = s->config.max_running;
    s->config.max_running = s->running.n;
    OK(kvf_sched_fork(s, a->beams[0], NULL, &a->fork));
    s->config.max_running = most;
    OK(kvf_sched_token(s, a->beams[1], NULL)); /* the parent of the fork has none, and no item */
    for (int i = KVF__REQ_WAITING; i < KVF__N_REQ_STATES; i++) cr_assert(s->n_in[i] > 0, "state %d: none", i);
    rig_audit(g);
}

static void cancel(rig *g, rig_text *to) {
    OK(kvf_sched_cancel(g->sched));
    cr_assert(kvf_sched_cancel(g->sched) == KVF_E_STATE);
    rig_audit(g);
    rig_dump(g, to);
}

Test(scheduler_cancel, all_is_as_before_in_every_state) {
    every a;
    every_begin(&a);
    rig *g = a.g;
    g->sched->config.max_batch_tokens = 2 + 2 * CHUNK; /* two that decode, two prompts: nothing is admitted */
    rig_dump(g, &before);
    plan(g);
    cr_assert(g->step.n_items == 4 && g->step.n_decode == 2 && g->step.n_tokens == 2 + 2 * CHUNK);
    cancel(g, &after);
    RIG_EXPECT_SAME(before, after);
    rig_destroy(g);
}

Test(scheduler_cancel, what_was_admitted_waits_again) {
    every a;
    every_begin(&a);
    rig *g = a.g;
    plan(g);
    cr_assert(g->step.n_items == 7);
    cancel(g, &before);
    cr_assert(at(g, a.swapped)->state == KVF__REQ_DECODE && at(g, a.fork)->state == KVF__REQ_FORKED);
    cr_assert(at(g, a.waits)->state == KVF__REQ_WAITING && at(g, a.held[1])->state == KVF__REQ_HELD);
    cr_assert(!kvf_sched_seq(g->sched, a.waits) && !kvf_sched_seq(g->sched, a.fork));
    kvf_step_item items[7];
    for (int again = 0; again < 2; again++) {
        plan(g);
        cr_assert(g->step.n_items == 7);
        for (uint32_t i = 0; i < 7 && again; i++) {
            const kvf_step_item *x = &items[i], *y = &g->step.items[i];
            cr_assert(x->request == y->request && x->token_begin == y->token_begin && x->n_tokens == y->n_tokens);
            cr_assert(x->kind == y->kind && x->begins == y->begins && x->n_columns == y->n_columns);
        }
        memcpy(items, g->step.items, sizeof items);
        cancel(g, &after);
        RIG_EXPECT_SAME(before, after);
    }
    OK(kvf_sched_token(g->sched, a.fork, NULL)); /* it may still be told */
    step(g, 0, 0);
    rig_destroy(g);
}

/* A segment's first chunk has its columns from this plan. A finished one is left alone. */
Test(scheduler_cancel, segments_and_finished_requests) {
    rig *g = rig_create(rig_pool(1, 1, 40), rig_config(CHUNK));
    const kvf_policy_options h2o = rig_set(rig_options("h2o", NULL), "rho", "0.9");
    const kvf_sched_request request = {.struct_size = sizeof request, .n_prompt = 6, .max_new = 4, .options = &h2o};
    const kvf_sched_segment segment = {.begin = 7, .end = 17};
    kvf_request r = 0, other = submit(g, 4, 1, false, NULL);
    OK(kvf_sched_submit(g->sched, &request, &r));
    step(g, 0, 0);
    OK(kvf_sched_pause(g->sched, r));
    OK(kvf_sched_extend(g->sched, r, &segment, 1, 2));
    step(g, 0, 0); /* the answer's last token */
    cr_assert(at(g, r)->state == KVF__REQ_PREFILL && !g->sched->n_extents);
    rig_dump(g, &before);
    plan(g);
    cr_assert(g->step.n_items == 2 && g->step.items[1].begins && g->sched->n_extents == 1);
    cancel(g, &after);
    RIG_EXPECT_SAME(before, after);
    plan(g);
    OK(kvf_sched_finish(g->sched, other));
    OK(kvf_sched_cancel(g->sched));
    cr_assert(at(g, r)->n_computed == 7 && g->sched->running.n == 1);
    rig_destroy(g);
}

/* A window drops blocks when it grows, and only those that it also lacks after the step is taken back. */
Test(scheduler_cancel, sliding_windows) {
    static const uint32_t windows[] = {8, 0};
    kvf_manager_config mc = rig_pool(2, 1, 40);
    mc.layer_windows = windows;
    rig *g = rig_create(mc, rig_config(CHUNK));
    const kvf_request r = submit(g, 37, 1, false, NULL);
    while (at(g, r)->n_known < 70) {
        plan(g);
        cancel(g, &before);
        plan(g);
        cr_assert(g->step.n_items == 1);
        cancel(g, &after);
        RIG_EXPECT_SAME(before, after);
        step(g, 0, 0);
    }
    rig_destroy(g);
}
