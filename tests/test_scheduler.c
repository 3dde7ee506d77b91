/* The scheduler call by call: refusals, field reports, order, steps, aborts. */
#include "scheduler_steps.h"

/* ---- Create ---------------------------------------------------------------------------------------- */

typedef struct counting {
    int n_allocs, n_frees, fail_at;
} counting;

static void *counting_alloc(void *ctx, size_t bytes, size_t align) {
    counting *c = ctx;
    if (++c->n_allocs == c->fail_at) return NULL;
    void *p = aligned_alloc(align, (bytes + align - 1) / align * align);
    if (p) memset(p, 0xa5, bytes); /* the scheduler may not count on cleared memory */
    return p;
}

static void counting_free(void *ctx, void *p, size_t bytes) {
    (void)bytes;
    ((counting *)ctx)->n_frees++;
    free(p);
}

Test(scheduler, config_is_checked) {
    rig *g = rig_create(rig_pool(2, 1, 8), rig_config(8));
    kvf_error err = {.text = ""};
    kvf_sched *out = (kvf_sched *)&err;
    const kvf_sched_config good = {
        .struct_size = sizeof good, .manager = g->manager, .policies = g->policies, .chunk = 8};
    struct {
        size_t offset;
        uint32_t value;
        const char *text;
    } bad[] = {
        {offsetof(kvf_sched_config, chunk), 12, "chunk 12: must be a multiple of the block size 8"},
        {offsetof(kvf_sched_config, max_running), 17, "max_running 17: must be at most the manager's max_seqs 16"},
        {offsetof(kvf_sched_config, max_waiting), 1u << 25, "max_waiting 33554432: must be at most 16777216"},
        {offsetof(kvf_sched_config, max_context), 513, "max_context 513: must be in [2, 512]"},
        {offsetof(kvf_sched_config, max_context), 1, "max_context 1: must be in [2, 512]"},
        {offsetof(kvf_sched_config, max_batch_tokens), 23, "max_batch_tokens 23: must be at least 24"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvf_sched_config c = good;
        memcpy((char *)&c + bad[i].offset, &bad[i].value, sizeof bad[i].value);
        cr_assert(kvf_sched_create(&c, &out, &err) == KVF_E_INVALID, "case %zu", i);
        cr_assert(strstr(err.text, bad[i].text), "case %zu: %s", i, err.text);
        cr_assert(out == (kvf_sched *)&err, "the output was touched");
    }
    kvf_sched_config c = good;
    c.chunk = UINT32_MAX / 8 * 8;
    cr_assert(kvf_sched_create(&c, &out, &err) == KVF_E_OVERFLOW, "%s", err.text);
    c = good;
    c.policies = NULL;
    cr_assert(kvf_sched_create(&c, &out, &err) == KVF_E_INVALID && strstr(err.text, "policies: is NULL"));
    c = good;
    c.struct_size = 4;
    cr_assert(kvf_sched_create(&c, &out, &err) == KVF_E_INVALID);
    cr_assert(kvf_sched_create(&good, NULL, NULL) == KVF_E_INVALID);
    kvf_sched_destroy(NULL);
    rig_destroy(g);
}

Test(scheduler, create_allocates_once_and_fails_cleanly) {
    counting counts = {.fail_at = 1};
    kvf_sched_config sc = rig_config(8);
    sc.allocator = (kvf_allocator){counting_alloc, counting_free, &counts};
    rig *g = rig_create(rig_pool(2, 1, 8), rig_config(8));
    sc.manager = g->manager;
    sc.policies = g->policies;
    kvf_sched *out = NULL;
    kvf_error err = {.text = ""};
    cr_assert(kvf_sched_create(&sc, &out, &err) == KVF_E_NO_MEMORY && !out && strstr(err.text, "lower max_waiting 512"),
              "%s", err.text);
    cr_assert(counts.n_allocs == 1 && counts.n_frees == 0);
    rig_destroy(g);

    counts = (counting){0};
    sc.max_waiting = 8;
    g = rig_create(rig_pool(2, 1, 8), sc);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 8; i++) rig_submit(g, i, 8 + i, 5, rig_options(i % 2 ? "full" : "streaming", NULL));
        rig_run(g, 400);
    }
    rig_submit(g, 9, 16, 20, rig_options("full", NULL)); /* destroyed while it runs, and one while it waits */
    rig_submit(g, 9, 16, 20, rig_options("full", NULL));
    rig_step(g);
    cr_assert(counts.n_allocs == 1, "%d allocations", counts.n_allocs);
    rig_destroy(g);
    cr_assert(counts.n_frees == 1);
}

/* ---- Refusals ---------------------------------------------------------------------------------------- */

static void expect_refusal(rig *g, kvf_status want, uint32_t n_prompt, uint32_t max_new, kvf_policy_options o,
                           const char *const *texts) {
    kvf_status status = rig_try_submit(g, 1, n_prompt, max_new, o);
    cr_assert(status == want, "%s, not %s: %s", kvf_status_name(status), kvf_status_name(want),
              kvf_sched_error(g->sched)->text);
    for (; *texts; texts++)
        cr_assert(strstr(kvf_sched_error(g->sched)->text, *texts), "no \"%s\" in: %s", *texts,
                  kvf_sched_error(g->sched)->text);
}

#define TEXTS(...) ((const char *const[]){__VA_ARGS__, NULL})

Test(scheduler, refusals_name_both_numbers_and_the_remedy) {
    kvf_sched_config sc = rig_config(8);
    sc.max_context = 128;
    sc.max_prefill_tokens = 64;
    sc.max_waiting = 3;
    rig *g = rig_create(rig_pool(2, 2, 40), sc);
    kvf_policy_options full = rig_options("full", NULL), d2o = rig_set(rig_options("d2o", NULL), "min_tokens", "16");
    cr_assert(strcmp(kvf_sched_error(g->sched)->text, "") == 0);
    expect_refusal(g, KVF_E_INVALID, 0, 4, full, TEXTS("n_prompt 0", "at least 1 token"));
    expect_refusal(g, KVF_E_NEVER_FITS, 128, 4, full, TEXTS("n_prompt 128", "128 positions", "at most 127"));
    expect_refusal(g, KVF_E_NEVER_FITS, 81, 0, full,
                   TEXTS("n_blocks 40: a prompt of 81", "needs 44 blocks", "the pool has 40", "give at least 44",
                         "at most 80 tokens"));
    expect_refusal(g, KVF_E_NEVER_FITS, 65, 4, d2o, TEXTS("n_prompt 65", "max_prefill_tokens 64", "d2o"));
    kvf_policy_options bad = full;
    bad.ops = NULL;
    cr_assert(rig_try_submit(g, 1, 8, 4, bad) == KVF_E_INVALID);
    kvf_sched_request request = {.struct_size = sizeof request, .n_prompt = 8};
    kvf_request name = 7;
    cr_assert(kvf_sched_submit(g->sched, &request, &name) == KVF_E_INVALID &&
              strstr(kvf_sched_error(g->sched)->text, "kvf_policy_options_init"));
    cr_assert(kvf_sched_submit(g->sched, NULL, &name) == KVF_E_INVALID && name == 7);
    request.options = &full;
    cr_assert(kvf_sched_submit(g->sched, &request, NULL) == KVF_E_INVALID);
    for (uint32_t i = 0; i < 3; i++) rig_submit(g, i, 80, 1, full);
    expect_refusal(g, KVF_E_LIMIT, 8, 1, full, TEXTS("max_waiting 3"));
    rig_run(g, 100);
    rig_submit(g, 1, 80, 1, full);
    rig_run(g, 100);
    rig_destroy(g);
}

Test(scheduler, bounded_requests_are_refused_by_the_larger_of_prompt_and_budget) {
    kvf_manager_config mc = rig_pool(2, 1, 12);
    rig *g = rig_create(mc, rig_config(16));
    kvf_policy_options d2o = rig_set(rig_options("d2o", NULL), "budget_tokens", "60");
    /* B = 60 > L, k = 1: floor(2 * (60 + 1 + 7) / 8) = 17 blocks */
    expect_refusal(g, KVF_E_NEVER_FITS, 16, 100, d2o,
                   TEXTS("a prompt of 16", "needs 17 blocks", "the pool has 12", "lower the budget"));
    /* with 9 + 3 tokens no table ever passes 11 slots */
    rig_submit(g, 1, 9, 3, d2o);
    rig_run(g, 20);
    d2o = rig_set(d2o, "budget_tokens", "20");
    expect_refusal(g, KVF_E_NEVER_FITS, 49, 4, d2o, TEXTS("a prompt of 49", "needs 14 blocks"));
    rig_submit(g, 1, 48, 4, d2o);
    rig_run(g, 20);
    rig_destroy(g);

    mc.n_score_pages = 8;
    g = rig_create(mc, rig_config(16));
    expect_refusal(g, KVF_E_NEVER_FITS, 48, 4, d2o, TEXTS("n_score_pages 8", "needs 12 score pages", "the pool has 8"));
    rig_submit(g, 1, 32, 40, d2o);
    rig_run(g, 60);
    rig_destroy(g);
}

/* ---- Field reports, at twice their block size ---------------------------------------------------------- */

/* A request that can never fit, an empty prompt, one that fits now and not later, one of no answer. */
Test(scheduler, c1_never_fits_is_not_not_now) {
    rig *g = rig_create(rig_pool(1, 1, 4), rig_config(8));
    kvf_policy_options full = rig_options("full", NULL);
    expect_refusal(g, KVF_E_NEVER_FITS, 40, 4, full, TEXTS("needs 5 blocks", "the pool has 4"));
    rig_request *r2 = rig_submit(g, 2, 8, 4, full);
    expect_refusal(g, KVF_E_INVALID, 0, 4, full, TEXTS("n_prompt 0"));
    rig_run(g, 100);
    cr_assert(r2->finished && r2->n_known == 12);
    rig_request *r3 = rig_submit(g, 3, 24, 16, full);
    rig_run(g, 100);
    /* 32 slots hold the prompt and 8 tokens; the 9th is sampled from them and has no slot of its own */
    cr_assert(!r3->finished && r3->end == KVF_END_LENGTH && r3->n_known == 24 + 9 && r3->n_preempted == 0);
    rig_expect_undisturbed(g, r3);
    rig_request *r5 = rig_submit(g, 5, 24, 0, full);
    rig_run(g, 100);
    cr_assert(r5->finished && r5->n_known == 24);
    rig_request *whole = rig_submit(g, 6, 32, 4, full); /* the pool exactly: no room for a promise of one more */
    rig_run(g, 100);
    cr_assert(whole->end == KVF_END_LENGTH && whole->n_known == 33);
    rig_destroy(g);
}

/* Two long prompts that together do not fit. Admission counts whole prompts, so the second waits for the first. */
Test(scheduler, c2_part_loaded_prompts_never_block_each_other) {
    rig *g = rig_create(rig_pool(1, 1, 6), rig_config(16));
    rig_request *r1 = rig_submit(g, 1, 40, 4, rig_options("full", NULL));
    rig_request *r2 = rig_submit(g, 2, 40, 4, rig_options("full", NULL));
    rig_run(g, 40);
    cr_assert(g->n_preempted <= 2 && r1->finished && r2->finished && r1->end_order < r2->end_order);
    rig_expect_undisturbed(g, r1);
    rig_expect_undisturbed(g, r2);
    /* and where both were admitted and then grow into each other */
    g->n_steps = 0;
    r1 = rig_submit(g, 3, 20, 20, rig_options("full", NULL));
    r2 = rig_submit(g, 4, 20, 20, rig_options("full", NULL));
    rig_run(g, 60);
    cr_assert(g->n_preempted >= 1 && g->n_preempted <= 2 && r1->n_preempted == 0 && r1->end_order < r2->end_order);
    rig_expect_undisturbed(g, r1);
    rig_expect_undisturbed(g, r2);
    rig_destroy(g);
}

/* Preempted while decoding and again while its known tokens are prefilled: counts go on where they were. */
Test(scheduler, c4_a_preempted_request_goes_on_where_it_was) {
    rig *g = rig_create(rig_pool(2, 1, 32), rig_config(8));
    kvf_block held[32];
    rig_request *first = rig_submit(g, 1, 24, 60, rig_options("full", NULL));
    rig_request *r = rig_submit(g, 2, 6, 24, rig_options("full", NULL));
    while (r->n_known < 6 + 12) rig_step(g);
    uint32_t n_held = take_all(g, held);
    while (r->n_preempted == 0) rig_step(g);
    release_all(g, held, n_held);
    uint32_t n_known = r->n_known;
    cr_assert(n_known >= 18 && r->state == RIG_WAITING && first->n_preempted == 0);
    while (first->n_computed % 8 != 6) { /* two blocks are enough for the first to go on, and too few for r */
        n_held = take_all(g, held);
        OK(kvf_block_release(g->manager, held[--n_held]));
        OK(kvf_block_release(g->manager, held[--n_held]));
        rig_step(g);
        release_all(g, held, n_held);
        cr_assert(r->state == RIG_WAITING);
    }
    rig_step(g);
    cr_assert(r->state == RIG_RUNNING && r->n_computed == 8);
    n_held = take_all(g, held);
    rig_step(g);
    cr_assert(r->state == RIG_RUNNING && r->n_computed == 16);
    rig_step(g); /* the first needs a block in each table */
    cr_assert(r->state == RIG_WAITING && r->n_preempted == 2);
    release_all(g, held, n_held);
    for (uint32_t computed = 8; computed <= 16; computed += 8) { /* resumes in chunks, samples nothing on the way */
        rig_step(g);
        cr_assert(r->state == RIG_RUNNING && r->n_computed == computed && r->n_known == n_known);
    }
    while (r->state == RIG_RUNNING) rig_step(g);
    cr_assert(r->n_known == n_known + 1, "the step that computes the last known token samples the next");
    rig_run(g, 200);
    cr_assert(first->finished && r->finished && r->n_known == 6 + 24 && first->n_known == 24 + 60);
    rig_expect_undisturbed(g, first);
    rig_expect_undisturbed(g, r);
    rig_destroy(g);
}

/* ---- Order ------------------------------------------------------------------------------------------- */

Test(scheduler, the_latest_arrival_is_preempted_and_comes_back_in_its_order) {
    rig *g = rig_create(rig_pool(1, 1, 8), rig_config(16));
    rig_request *r[5];
    for (uint32_t i = 0; i < 5; i++) r[i] = rig_submit(g, i, 15, 40, rig_options("full", NULL));
    rig_run(g, 400);
    for (uint32_t i = 0; i < 5; i++) {
        cr_assert(r[i]->finished && r[i]->end_order == i, "request %u ended as number %u", i, r[i]->end_order);
        rig_expect_undisturbed(g, r[i]);
    }
    cr_assert(r[0]->n_preempted == 0 && g->n_preempted > 2);
    rig_destroy(g);
}

Test(scheduler, nobody_overtakes_a_head_that_waits_for_blocks_or_accumulators) {
    kvf_sched_config sc = rig_config(16);
    sc.max_prefill_tokens = 48;
    sc.max_batch_tokens = 64;
    rig *g = rig_create(rig_pool(1, 1, 64), sc);
    kvf_policy_options d2o = rig_set(rig_options("d2o", NULL), "budget_tokens", "16");
    rig_request *a = rig_submit(g, 1, 32, 8, d2o);
    rig_request *b = rig_submit(g, 2, 20, 8, d2o); /* 52 > 48: waits for a's accumulators though blocks are there */
    rig_request *c = rig_submit(g, 3, 8, 2, rig_options("full", NULL)); /* needs none, and still does not overtake */
    rig_step(g);
    cr_assert(a->prefill_offset == 0 && b->state == RIG_WAITING && c->state == RIG_WAITING);
    rig_step(g);
    cr_assert(a->state == RIG_DECODES && b->state == RIG_WAITING);
    rig_step(g);
    cr_assert(b->prefill_offset == 0 && c->state == RIG_DECODES && c->prefill_offset == UINT32_MAX);
    rig_run(g, 40);
    rig_destroy(g);
}

Test(scheduler, accumulators_are_first_fit_and_contiguous) {
    kvf_sched_config sc = rig_config(8);
    sc.max_prefill_tokens = 64;
    sc.max_batch_tokens = 64;
    rig *g = rig_create(rig_pool(1, 1, 64), sc);
    kvf_policy_options d2o = rig_set(rig_options("d2o", NULL), "budget_tokens", "16");
    uint32_t lengths[] = {20, 8, 24, 12};
    rig_request *r[4];
    for (uint32_t i = 0; i < 4; i++) r[i] = rig_submit(g, i, lengths[i], 40, d2o);
    rig_step(g); /* 20 + 8 + 24 + 12 = 64 fill it */
    uint32_t offsets[] = {0, 20, 28, 52};
    for (uint32_t i = 0; i < 4; i++) cr_assert(r[i]->prefill_offset == offsets[i]);
    cr_assert(r[1]->state == RIG_DECODES);
    rig_request *wide = rig_submit(g, 5, 12, 1, d2o), *hole = rig_submit(g, 6, 8, 1, d2o);
    rig_step(g); /* [20, 28) is free and too narrow for the head, [52, 64) falls free in this step */
    cr_assert(wide->state == RIG_WAITING && hole->state == RIG_WAITING);
    rig_step(g);
    cr_assert(wide->prefill_offset == 52 && hole->prefill_offset == 20);
    rig_run(g, 60);
    rig_destroy(g);
}

/* ---- Steps ------------------------------------------------------------------------------------------- */

Test(scheduler, decoding_goes_on_beside_prompts) {
    kvf_sched_config sc = rig_config(8);
    sc.max_batch_tokens = 8 + 16 + 9;
    rig *g = rig_create(rig_pool(1, 1, 64), sc);
    rig_request *a = rig_submit(g, 1, 3, 40, rig_options("full", NULL));
    rig_step(g);
    rig_request *b = rig_submit(g, 2, 30, 5, rig_options("full", NULL)),
                *c = rig_submit(g, 3, 24, 5, rig_options("full", NULL));
    rig_request *d = rig_submit(g, 4, 9, 5, rig_options("full", NULL)),
                *e = rig_submit(g, 5, 16, 5, rig_options("full", NULL));
    rig_step(g); /* 1 + 8 + 8 + 8 + 8 = 33 */
    cr_assert(g->step.n_decode == 1 && g->step.n_items == 5 && g->step.n_tokens == 33 && a->n_computed == 4);
    rig_step(g);
    cr_assert(b->n_computed == 16 && c->n_computed == 16 && d->state == RIG_DECODES && e->state == RIG_DECODES);
    rig_step(g);
    cr_assert(g->step.n_decode == 3 && g->step.n_items == 5);
    rig_run(g, 60);
    rig_destroy(g);
}

Test(scheduler, a_prompt_that_does_not_fit_the_step_is_not_passed_by_a_shorter_one) {
    kvf_sched_config sc = rig_config(16);
    sc.max_batch_tokens = 16 + 16 + 4;
    rig *g = rig_create(rig_pool(1, 1, 64), sc);
    rig_request *r[4];
    const uint32_t lengths[] = {32, 32, 32, 3};
    for (uint32_t i = 0; i < 4; i++) r[i] = rig_submit(g, i, lengths[i], 2, rig_options("full", NULL));
    rig_step(g);
    cr_assert(g->step.n_items == 2 && g->step.n_tokens == 32 && r[3]->state == RIG_WAITING);
    rig_step(g);
    cr_assert(r[2]->state == RIG_WAITING && r[3]->state == RIG_WAITING);
    rig_step(g);
    cr_assert(r[2]->n_computed == 16 && r[3]->state == RIG_DECODES);
    rig_run(g, 20);
    rig_destroy(g);
}

Test(scheduler, calls_out_of_order_are_refused) {
    rig *g = rig_create(rig_pool(1, 1, 16), rig_config(8));
    kvf_step step = {.struct_size = sizeof step};
    int ended = 7;
    cr_assert(kvf_sched_done(g->sched) == KVF_E_STATE);
    OK(kvf_sched_plan(g->sched, 0, &step));
    cr_assert(step.n_items == 0 && step.n_waiting == 0);
    OK(kvf_sched_plan(g->sched, 0, &step)); /* an empty step needs no end, and may have one */
    OK(kvf_sched_done(g->sched));
    cr_assert(kvf_sched_done(g->sched) == KVF_E_STATE);
    rig_request *r = rig_submit(g, 1, 12, 2, rig_options("full", NULL));
    cr_assert(kvf_sched_token(g->sched, r->name, &ended) == KVF_E_STATE);
    cr_assert(kvf_sched_prompt_done(g->sched, r->name) == KVF_E_STATE);
    cr_assert(kvf_sched_resize(g->sched, r->name) == KVF_E_STATE);
    OK(kvf_sched_plan(g->sched, 0, &step));
    cr_assert(kvf_sched_plan(g->sched, 0, &step) == KVF_E_STATE &&
              strstr(kvf_sched_error(g->sched)->text, "a step of 1 items is planned"));
    OK(kvf_sched_done(g->sched));
    cr_assert(kvf_sched_token(g->sched, r->name, &ended) == KVF_E_STATE, "4 of 12 tokens are not computed");
    OK(kvf_sched_plan(g->sched, 0, &step));
    cr_assert(step.items[0].prompt_ends && step.items[0].samples);
    OK(kvf_sched_done(g->sched));
    OK(kvf_sched_token(g->sched, r->name, &ended));
    cr_assert(ended == 0 && kvf_sched_token(g->sched, r->name, &ended) == KVF_E_STATE);
    OK(kvf_sched_plan(g->sched, 0, &step));
    cr_assert(step.n_items == 0 && step.n_running == 1, "before its prompt events are done it does not decode");
    OK(kvf_sched_prompt_done(g->sched, r->name));
    cr_assert(kvf_sched_prompt_done(g->sched, r->name) == KVF_E_STATE);
    OK(kvf_sched_plan(g->sched, 0, &step));
    cr_assert(step.n_items == 1 && step.items[0].kind == KVF_STEP_DECODE && step.items[0].token_begin == 12);
    OK(kvf_sched_done(g->sched));
    OK(kvf_sched_token(g->sched, r->name, &ended));
    cr_assert(ended == 1 && kvf_sched_token(g->sched, r->name, NULL) == KVF_E_STATE);
    OK(kvf_sched_plan(g->sched, 0, &step));
    cr_assert(step.n_items == 0, "what has its last token does not run on");
    const kvf_request foreign[] = {0, r->name + 1, r->name + 65536, UINT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        cr_assert(kvf_sched_finish(g->sched, foreign[i]) == KVF_E_NOT_FOUND &&
                  kvf_sched_token(g->sched, foreign[i], &ended) == KVF_E_NOT_FOUND);
        cr_assert(kvf_sched_prompt_done(g->sched, foreign[i]) == KVF_E_NOT_FOUND &&
                  kvf_sched_resize(g->sched, foreign[i]) == KVF_E_NOT_FOUND);
    }
    rig_finish(g, r);
    rig_destroy(g);
}

Test(scheduler, the_context_ends_a_request) {
    kvf_sched_config sc = rig_config(8);
    sc.max_context = 30;
    rig *g = rig_create(rig_pool(1, 1, 16), sc);
    rig_request *r = rig_submit(g, 1, 20, 100, rig_options("full", NULL));
    rig_request *last = rig_submit(g, 1, 29, 100, rig_options("full", NULL));
    rig_run(g, 60);
    cr_assert(r->finished && r->n_known == 30 && last->finished && last->n_known == 30);
    r = rig_submit(g, 2, 29, 100, rig_options("full", NULL));
    for (int i = 0; i < 4; i++) {
        rig_plan(g);
        OK(kvf_sched_done(g->sched));
        r->n_computed += g->step.items[0].n_tokens;
    }
    int ended = 0;
    OK(kvf_sched_token(g->sched, r->name, &ended));
    cr_assert(ended == 1 && kvf_sched_token(g->sched, r->name, &ended) == KVF_E_STATE);
    rig_finish(g, r);
    rig_destroy(g);
}

/* ---- Aborts -------------------------------------------------------------------------------------------- */

static void abort_mid_step(rig *g, void *ctx) {
    rig_request *r = ctx;
    for (uint32_t i = 0; i < g->step.n_items; i++)
        if (g->step.items[i].user == r) {
            rig_abort(g, r);
            return;
        }
}

/* Aborts the second of three requests before step `at`, or within it, and lets the others run out. */
static bool abort_at(kvf_policy_options o, uint32_t n_blocks, uint32_t at, bool mid) {
    rig *g = rig_create(rig_pool(2, 1, n_blocks), rig_config(8));
    rig_request *r[3];
    for (uint32_t i = 0; i < 3; i++) r[i] = rig_submit(g, i, 20 + i, 12, o);
    for (uint32_t i = 0; i < at && r[1]->state != RIG_GONE; i++) rig_step(g);
    bool alive = r[1]->state != RIG_GONE;
    if (alive && !mid) rig_abort(g, r[1]);
    if (alive && mid) {
        g->mid_step = abort_mid_step;
        g->mid_ctx = r[1];
        rig_step(g);
        g->mid_step = NULL;
    }
    rig_audit(g);
    rig_request *late = rig_submit(g, 9, 9, 3, o); /* may get the slot and the sequence that fell free */
    rig_run(g, 300);
    cr_assert(r[0]->finished && r[2]->finished && late->finished);
    rig_expect_undisturbed(g, r[0]);
    rig_expect_undisturbed(g, r[2]);
    rig_expect_undisturbed(g, late);
    rig_destroy(g);
    return alive;
}

Test(scheduler, abort_in_every_state) {
    kvf_policy_options o[] = {rig_options("full", NULL), rig_set(rig_options("d2o", NULL), "budget_tokens", "16"),
                              rig_set(rig_set(rig_options("d2o", NULL), "budget_tokens", "16"), "full_layers", "0")};
    for (size_t p = 0; p < 3; p++)
        for (uint32_t n_blocks = 10; n_blocks <= 40; n_blocks += 6) /* from waiting in line to side by side */
            for (int mid = 0; mid < 2; mid++) {
                uint32_t at = 0;
                while (abort_at(o[p], n_blocks, at, mid)) cr_assert(++at < 100);
                cr_assert(at >= 14);
            }
}

Test(scheduler, names_rise_and_are_never_used_again) {
    kvf_sched_config sc = rig_config(8);
    sc.max_waiting = 2;
    sc.max_running = 1;
    rig *g = rig_create(rig_pool(1, 1, 8), sc);
    kvf_request last = 0;
    for (uint32_t i = 0; i < 200; i++) {
        rig_request *r = rig_submit(g, i, 4, 1, rig_options("full", NULL));
        cr_assert(r->name > last);
        if (last) cr_assert(kvf_sched_finish(g->sched, last) == KVF_E_NOT_FOUND);
        last = r->name;
        if (i % 3)
            rig_run(g, 10);
        else
            rig_abort(g, r);
    }
    rig_destroy(g);
}
