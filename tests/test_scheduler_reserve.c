/* What the scheduler promises to a request: by the projected need, by the exact sizes, and where they do not fit. */
#include "scheduler_steps.h"

Test(scheduler_reserve, admission_counts_the_projected_need_and_then_the_exact_one) {
    rig *g = rig_create(rig_pool(3, 2, 200), rig_config(16));
    kvf_policy_options d2o = rig_set(rig_set(rig_options("d2o", NULL), "budget_tokens", "21"), "evict_every", "4");
    kvf_policy_need need;
    const uint32_t lengths[] = {100, 22, 21, 5}; /* B < L by far, just, B = L, B > L */
    for (size_t i = 0; i < 4; i++) {
        rig_request *r = rig_submit(g, i, lengths[i], 100, d2o);
        OK(kvf_policy_project(&d2o, 3, 2, 8, lengths[i], 100, &need, NULL));
        uint64_t total = need.prompt_blocks > need.steady_blocks ? need.prompt_blocks : need.steady_blocks;
        rig_plan(g);
        cr_assert(need.bounded && counted(g) == total, "prompt %u: %u blocks are counted, not %llu", lengths[i],
                  counted(g), (unsigned long long)total);
        rig_forward(g, &g->step.items[0]);
        OK(kvf_sched_done(g->sched));
        rig_end_item(g, &g->step.items[0]);
        uint32_t most = 0;
        while (r->state != RIG_GONE) {
            const kvf_layer_size *sizes = NULL;
            uint32_t index, exact = 0;
            if (r->state == RIG_DECODES) {
                OK(kvf_seq_index(g->manager, r->seq, &index));
                sizes = kvf_policy_sizes(g->policies, index);
                cr_assert((sizes != NULL) == (lengths[i] > 21 || r->n_computed > 21));
                for (uint32_t l = 0; sizes && l < 3; l++) exact += 2 * ((sizes[l].reserve + 7) / 8);
                cr_assert(counted(g) == (sizes ? exact : need.steady_blocks), "prompt %u at %u: %u blocks", lengths[i],
                          r->n_computed, counted(g));
            }
            if (counted(g) > most) most = counted(g);
            rig_step(g);
        }
        cr_assert(r->finished && most <= total);
    }
    rig_destroy(g);
}

Test(scheduler_reserve, admission_counts_no_more_than_the_last_token_can_need) {
    rig *g = rig_create(rig_pool(2, 1, 200), rig_config(32));
    kvf_policy_options d2o = rig_set(rig_options("d2o", NULL), "budget_tokens", "60");
    kvf_policy_options serving = rig_set(rig_options("d2o", "serving"), "budget_tokens", "28");
    struct {
        kvf_policy_options o;
        uint32_t n_prompt, max_new, n_blocks;
        const char *why;
    } cases[] = {
        {d2o, 9, 8, 4, "the 17th token is sampled and not computed"},
        {d2o, 9, 9, 6, "17 slots"},
        {serving, 10, 100, 8, "7 blocks by the budget, but until the overflow two tables of 28 slots"},
        {rig_options("full", NULL), 16, 9, 6, "the prompt and one token more"},
        {rig_options("full", NULL), 16, 1, 4, "the prompt alone"},
        {rig_options("full", NULL), 16, 0, 4, "the prompt alone"},
        {rig_options("full", NULL), 15, 100, 4, "not the whole answer"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig_submit(g, i, cases[i].n_prompt, cases[i].max_new, cases[i].o);
        rig_plan(g);
        cr_assert(counted(g) == cases[i].n_blocks, "%s: %u blocks are counted", cases[i].why, counted(g));
        rig_forward(g, &g->step.items[0]);
        OK(kvf_sched_done(g->sched));
        rig_end_item(g, &g->step.items[0]);
        rig_run(g, 120);
    }
    rig_destroy(g);
}

/* The authors' preset compresses at the first decode step: the prompt's tables get one token more, then fall to S. */
Test(scheduler_reserve, a_first_event_put_off_keeps_its_room_until_then) {
    rig *g = rig_create(rig_pool(4, 1, 200), rig_config(16));
    kvf_policy_options o =
        rig_set(rig_set(rig_options("d2o", "paper"), "budget_tokens", "16"), "defer_first_decode", "1");
    rig_request *r = rig_submit(g, 1, 64, 30, o);
    while (r->state != RIG_DECODES) rig_step(g);
    cr_assert(counted(g) == 4 * 9, "%u", counted(g));
    rig_step(g);
    rig_step(g);
    cr_assert(counted(g) < 20, "%u", counted(g));
    rig_run(g, 60);
    cr_assert(r->finished);
    rig_expect_undisturbed(g, r);
    rig_destroy(g);
}

/* A caller that sets the reservation while the overflow's compaction is still to come: the next plan makes it exact. */
Test(scheduler_reserve, a_reservation_set_too_early_is_settled_by_the_next_plan) {
    rig *g = rig_create(rig_pool(3, 1, 100), rig_config(16));
    kvf_policy_options d2o = rig_set(rig_options("d2o", NULL), "budget_tokens", "64");
    rig_request *r = rig_submit(g, 1, 40, 100, d2o);
    while (r->n_computed < 64) rig_step(g);
    uint32_t n_slots[] = {64, 64, 64}, keep[3], index, exact = 0;
    OK(kvf_seq_index(g->manager, r->seq, &index));
    cr_assert(!kvf_policy_sizes(g->policies, index));
    cr_assert(kvf__policy_due_layers(g->policies, index, KVF_BEFORE_APPEND, n_slots, keep) > 0);
    const kvf_layer_size *sizes = kvf_policy_sizes(g->policies, index);
    for (uint32_t l = 0; l < 3; l++) exact += (sizes[l].reserve + 7) / 8;
    kvf_status status = kvf_sched_resize(g->sched, r->name);
    cr_assert(status == KVF_OK && counted(g) > exact, "%u counted, %u exact", counted(g), exact);
    rig_audit(g);
    kvf_compact_item items[3];
    kvf_compaction compaction;
    uint32_t n = 0;
    for (uint32_t l = 0; l < 3; l++)
        if (keep[l]) items[n++] = (kvf_compact_item){r->seq, l, keep[l], NULL};
    OK(kvf_compact_begin(g->manager, items, n, &compaction));
    OK(kvf_compact_commit(g->manager));
    kvf_step step = {.struct_size = sizeof step};
    OK(kvf_sched_plan(g->sched, 0, &step));
    cr_assert(counted(g) == exact, "%u counted, %u exact", counted(g), exact);
    OK(kvf_sched_done(g->sched));
    rig_abort(g, r);
    rig_destroy(g);
}

/* ---- Sizes larger than what admission counted ----------------------------------------------------------- */

/* Runs until the prompt is computed, has the policy believe in a longer one, and says that its events are done. */
static kvf_status overstated_prompt(rig *g, rig_request *r, uint32_t n_prompt) {
    bool ends = false;
    while (!ends) {
        rig_plan(g);
        for (uint32_t i = 0; i < g->step.n_items; i++)
            ends |= g->step.items[i].user == r && g->step.items[i].prompt_ends;
        for (uint32_t i = 0; i < g->step.n_items; i++) rig_forward(g, &g->step.items[i]);
        OK(kvf_sched_done(g->sched));
        for (uint32_t i = 0; i < g->step.n_items; i++)
            if (g->step.items[i].user == r)
                r->n_computed += g->step.items[i].n_tokens;
            else
                rig_end_item(g, &g->step.items[i]);
    }
    uint32_t index;
    const double variance[RIG_MAX_LAYERS * RIG_Q_HEADS] = {0};
    OK(kvf_seq_index(g->manager, r->seq, &index));
    OK(r->options.ops->budget(g->policies, index, variance, n_prompt, NULL));
    kvf_status status = kvf_sched_prompt_done(g->sched, r->name);
    rig_audit(g);
    return status;
}

Test(scheduler_reserve, a_prompt_whose_sizes_find_no_room_waits_again_and_ends_when_alone) {
    rig *g = rig_create(rig_pool(2, 1, 20), rig_config(32));
    kvf_policy_options half = rig_set(rig_set(rig_options("d2o", NULL), "min_tokens", "16"), "rho", "0.5");
    rig_request *a = rig_submit(g, 1, 30, 10, rig_options("full", NULL));
    rig_request *b = rig_submit(g, 2, 40, 200, half); /* 10 blocks; would be 40 with a prompt of 300 */
    cr_assert(overstated_prompt(g, b, 300) == KVF_E_NO_BLOCKS);
    cr_assert(strstr(kvf_sched_error(g->sched)->text, "put back in the queue"), "%s", kvf_sched_error(g->sched)->text);
    b->state = RIG_WAITING;
    b->n_computed = 0;
    b->seq = 0;
    g->n_bounced++;
    while (a->state != RIG_GONE) rig_step(g);
    cr_assert(b->state != RIG_GONE);
    rig_abort(g, b);
    rig_request *c = rig_submit(g, 3, 40, 200, half);
    cr_assert(overstated_prompt(g, c, 300) == KVF_E_NO_BLOCKS);
    cr_assert(strstr(kvf_sched_error(g->sched)->text, "alone"), "%s", kvf_sched_error(g->sched)->text);
    cr_assert(kvf_sched_finish(g->sched, c->name) == KVF_E_NOT_FOUND, "it is gone");
    rig_submit(g, 4, 5, 1, half);
    rig_plan(g);
    cr_assert(c->state == RIG_GONE && c->end == KVF_END_NO_BLOCKS && g->step.n_ends == 1 && g->step.n_items == 1);
    rig_destroy(g);
}

/* S + k beside a layer that never evicts can be more than the prompt's peak. Alone it goes on without the promise. */
Test(scheduler_reserve, an_unbounded_request_without_room_for_its_sizes_goes_on_alone) {
    rig *g = rig_create(rig_pool(2, 1, 20), rig_config(32));
    kvf_policy_options o = rig_set(
        rig_set(rig_set(rig_options("d2o", NULL), "budget_tokens", "30"), "full_layers", "0"), "evict_every", "100");
    rig_request *a = rig_submit(g, 1, 30, 10, rig_options("full", NULL));
    rig_request *b = rig_submit(g, 2, 40, 200, o);
    rig_run(g, 300);
    cr_assert(g->n_bounced > 0 && a->finished && a->n_preempted == 0);
    cr_assert(b->end == KVF_END_LENGTH && b->n_known == 89, "%u: 11 blocks of layer 0 and 9 of layer 1 hold 88",
              b->n_known);
    rig_destroy(g);
}

Test(scheduler_reserve, an_overflow_without_room_for_the_sizes_is_no_error) {
    rig *g = rig_create(rig_pool(2, 1, 20), rig_config(32));
    kvf_policy_options o = rig_set(
        rig_set(rig_set(rig_options("d2o", NULL), "budget_tokens", "30"), "full_layers", "0"), "evict_every", "100");
    rig_request *a = rig_submit(g, 1, 30, 20, rig_options("full", NULL));
    rig_request *b = rig_submit(g, 2, 25, 40, o);
    while (b->n_computed < 30) rig_step(g);
    rig_events(g, b, KVF_BEFORE_APPEND);
    uint32_t index, before = counted(g);
    OK(kvf_seq_index(g->manager, b->seq, &index));
    cr_assert(kvf_policy_sizes(g->policies, index));
    OK(kvf_sched_resize(g->sched, b->name));
    cr_assert(counted(g) == before, "S + k of layer 1 fit although they should not");
    rig_run(g, 200);
    cr_assert(a->finished && b->finished && a->n_preempted == 0);
    rig_expect_undisturbed(g, b);
    rig_destroy(g);
}

/* Put back after its prompt it is behind a later arrival, and comes in beside it: items are in order all the same. */
Test(scheduler_reserve, a_request_that_was_put_back_comes_before_later_ones_again) {
    kvf_sched_config sc = rig_config(8);
    sc.max_batch_tokens = 80;
    rig *g = rig_create(rig_pool(2, 1, 64), sc);
    kvf_policy_options o = rig_set(
        rig_set(rig_set(rig_options("d2o", NULL), "budget_tokens", "30"), "full_layers", "0"), "evict_every", "100");
    rig_request *a = rig_submit(g, 1, 30, 6, rig_options("full", NULL));
    rig_request *b = rig_submit(g, 2, 40, 90, o);
    rig_request *c = rig_submit(g, 3, 160, 10, rig_options("full", NULL));
    while (!g->n_bounced) rig_step(g);
    while (b->state == RIG_WAITING) rig_step(g);
    cr_assert(a->state == RIG_GONE && c->state == RIG_RUNNING);
    cr_assert(g->step.n_items == 2 && g->step.items[0].request == b->name && g->step.items[1].request == c->name);
    rig_run(g, 300);
    cr_assert(b->finished && c->finished);
    rig_expect_undisturbed(g, b);
    rig_expect_undisturbed(g, c);
    rig_destroy(g);
}

Test(scheduler_reserve, a_policy_state_of_other_sizes_ends_the_request_and_not_the_queue) {
    kvf_manager_config mc = rig_pool(2, 1, 20);
    rig *g = rig_create(mc, rig_config(8));
    kvf_policy_state_config pc = {.struct_size = sizeof pc,
                                  .n_layers = 2,
                                  .n_kv_heads = 1,
                                  .n_q_heads = 1,
                                  .head_dim = 8,
                                  .block_size = 8,
                                  .max_seqs = 1,
                                  .max_slots = 512};
    kvf_policy_state *small = NULL;
    kvf_sched *sched = NULL;
    OK(kvf_policy_state_create(&pc, &small, NULL));
    kvf_sched_config sc = g->sc;
    sc.policies = small;
    sc.max_batch_tokens = 0;
    OK(kvf_sched_create(&sc, &sched, NULL));
    kvf_policy_options full = rig_options("full", NULL);
    const kvf_sched_request request = {.struct_size = sizeof request, .n_prompt = 6, .max_new = 2, .options = &full};
    kvf_request a, b;
    kvf_step step = {.struct_size = sizeof step};
    OK(kvf_sched_submit(sched, &request, &a));
    OK(kvf_sched_submit(sched, &request, &b));
    OK(kvf_sched_plan(sched, 0, &step));
    cr_assert(step.n_items == 1 && step.items[0].request == a && step.n_ends == 1 && step.ends[0].request == b);
    cr_assert(step.ends[0].reason == KVF_END_REFUSED && step.n_waiting == 0);
    kvf_sched_destroy(sched);
    kvf_policy_state_destroy(small);
    rig_destroy(g);
}

/* What one that never evicts takes, it takes from the later arrivals; what is promised to a bounded one stays. */
Test(scheduler_reserve, bounded_requests_grow_under_pressure_without_preempting) {
    rig *g = rig_create(rig_pool(2, 1, 24), rig_config(16));
    kvf_policy_options d2o = rig_set(rig_set(rig_options("d2o", NULL), "budget_tokens", "16"), "evict_every", "4");
    kvf_block held[24];
    rig_request *a = rig_submit(g, 1, 30, 60, d2o), *b = rig_submit(g, 2, 10, 60, d2o);
    rig_step(g);
    rig_step(g);
    rig_step(g);
    uint32_t n_held = take_all(g, held);
    cr_assert(n_held > 0);
    rig_run(g, 200);
    cr_assert(a->finished && b->finished && g->n_preempted == 0 && g->n_bounced == 0);
    release_all(g, held, n_held);
    rig_expect_undisturbed(g, a);
    rig_expect_undisturbed(g, b);
    rig_destroy(g);
}
