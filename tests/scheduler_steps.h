/* tests/scheduler_steps.h: steps of the scheduler through the rig's toy model, each checked, and runs made of them. */
#ifndef KVF_TESTS_SCHEDULER_STEPS_H
#define KVF_TESTS_SCHEDULER_STEPS_H

#include "scheduler_dump.h"

/* ---- One step ------------------------------------------------------------------------------------- */

/* A held one that took its leader's place begins where that one was. */
static inline void rig_take_over(rig_request *r, const kvf_step_item *item) {
    if (r->state != RIG_HELD) return;
    r->state = RIG_RUNNING;
    r->n_computed = item->kind == KVF_STEP_REPEAT ? r->n_prompt - 1 : item->token_begin;
    r->prefill_offset = item->prefill_offset;
    r->seq = item->seq;
}

static inline bool rig_repeats(const rig_request *r) { return kvf_policy_needs(&r->options) & KVF_NEEDS_REPEAT; }

/* A part of a piece stands behind the whole prompt. */
static inline void rig_check_piece(rig *g, const kvf_step_item *item) {
    const rig_request *r = item->user;
    uint32_t next_pos = 0, end = item->token_begin + item->n_tokens, chunk = g->sc.chunk,
             size = item->piece_end - item->piece_begin;
    cr_assert(rig_repeats(r) && r->state != RIG_DECODES && !item->samples && !item->prompt_ends && !item->n_held);
    cr_assert(r->n_computed + 1 == r->n_prompt && item->token_begin == r->n_prompt + item->piece_at);
    cr_assert(item->n_tokens >= 1 && item->n_tokens <= chunk - item->token_begin % chunk);
    cr_assert(item->piece_end <= r->n_prompt && item->piece_at + item->n_tokens <= g->sc.n_instruction + size);
    cr_assert(item->begins == (item->piece_begin == 0 && item->piece_at == 0));
    cr_assert(size >= KVF__MIN(r->n_prompt, KVF_MIN_PIECE_TOKENS) || item->piece_end == r->n_prompt);
    OK(kvf_seq_next_pos(g->manager, item->seq, &next_pos));
    cr_assert(next_pos == end && end <= g->sc.max_context && item->prefill_offset != UINT32_MAX);
}

static inline void rig_check_item(rig *g, const kvf_step_item *item, uint32_t i) {
    rig_request *r = item->user;
    rig_take_over(r, item);
    const kvf_step *step = &g->step;
    uint32_t next_pos = 0, end = item->token_begin + item->n_tokens;
    cr_assert(r->name == item->request && r->state != RIG_GONE);
    cr_assert((item->kind == KVF_STEP_DECODE) == (i < step->n_decode));
    if (i && i != step->n_decode && !g->sc.order)
        cr_assert(step->items[i - 1].request < item->request, "items are not in order of arrival");
    if (item->kind == KVF_STEP_REPEAT) {
        rig_check_piece(g, item);
        return;
    }
    cr_assert(item->token_begin == r->n_computed, "request %llu begins at %u, %u are computed",
              (unsigned long long)item->request, item->token_begin, r->n_computed);
    cr_assert(item->n_tokens >= 1 && end <= r->n_known);
    OK(kvf_seq_next_pos(g->manager, item->seq, &next_pos));
    cr_assert(next_pos == end);
    bool owed = item->kind == KVF_STEP_PREFILL && !item->prompt_ends && end == r->n_prompt &&
                rig_repeats(r); /* its repetition */
    cr_assert((item->samples != 0) == (end == r->n_known && r->max_new > 0 && !owed));
    if (item->kind == KVF_STEP_DECODE) {
        cr_assert(item->n_tokens == 1 && !item->prompt_ends && r->state == RIG_DECODES);
        return;
    }
    uint32_t chunk = g->sc.chunk;
    cr_assert(r->state != RIG_DECODES);
    cr_assert(item->n_tokens <= chunk - item->token_begin % chunk && (end % chunk == 0 || item->prompt_ends || owed),
              "chunk [%u, %u) is off the grid of %u", item->token_begin, end, chunk);
    bool sums = kvf_policy_needs(&r->options) & (KVF_NEEDS_COL_SUMS | KVF_NEEDS_REPEAT);
    cr_assert(sums == (item->prefill_offset != UINT32_MAX));
    if (item->prompt_ends) cr_assert(end == r->n_prompt || (end == r->n_known && !sums));
    if (r->seq && item->token_begin) cr_assert(item->prefill_offset == r->prefill_offset);
}

static inline void rig_check_extents(rig *g) {
    uint64_t room = g->sc.max_prefill_tokens;
    for (uint32_t i = 0; i < g->n_requests; i++) {
        const rig_request *a = &g->requests[i];
        if (a->state != RIG_RUNNING || a->prefill_offset == UINT32_MAX) continue;
        cr_assert((uint64_t)a->prefill_offset + a->n_prompt <= room);
        for (uint32_t j = 0; j < i; j++) {
            const rig_request *b = &g->requests[j];
            if (b->state != RIG_RUNNING || b->prefill_offset == UINT32_MAX) continue;
            cr_assert(a->prefill_offset + a->n_prompt <= b->prefill_offset ||
                          b->prefill_offset + b->n_prompt <= a->prefill_offset,
                      "the accumulators of two prompts overlap");
        }
    }
}

static inline void rig_note_losses(rig *g) {
    for (uint32_t i = 0; i < g->step.n_preempted; i++) {
        rig_request *r = g->step.preempted[i].user;
        cr_assert(r->name == g->step.preempted[i].request && (r->state == RIG_RUNNING || r->state == RIG_DECODES));
        for (uint32_t k = 0; k < g->step.n_items;
             k++) /* no later one runs in the room it made; a fork may, by itself */
            cr_assert(g->sc.order || g->step.items[k].request < r->name || (g->n_forked && g->step.items[k].user == r));
        rig_lose(g, r);
    }
    for (uint32_t i = 0; i < g->step.n_ends; i++) {
        rig_request *r = g->step.ends[i].user;
        cr_assert(r->name == g->step.ends[i].request && g->step.ends[i].reason != KVF_END_NONE);
        r->end = g->step.ends[i].reason;
        rig_gone(g, r);
        cr_assert(kvf_sched_finish(g->sched, r->name) == KVF_E_NOT_FOUND);
    }
}

/* Plans that are taken back. The first sets reservations and preempts; the second leaves all as it was. */
static inline void rig_cancel(rig *g) {
    static rig_text texts[2];
    bool same = true;
    for (int i = 0; i < 2 && same; i++) {
        OK(kvf_sched_plan(g->sched, g->n_steps, &g->step));
        same = i == 0 || !(g->step.n_preempted || g->step.n_ends);
        rig_note_losses(g);
        rig_copies(g, &g->step.copies);
        if (!g->step.n_items) return;
        OK(kvf_sched_cancel(g->sched));
        g->n_cancelled += same && i;
        rig_dump(g, &texts[i]);
    }
    if (same) RIG_EXPECT_SAME(texts[0], texts[1]);
    rig_audit(g);
}

static inline void rig_plan(rig *g) {
    for (uint32_t i = 0; i < g->n_requests; i++) {
        rig_request *r = &g->requests[i];
        if (r->state != RIG_DECODES) continue;
        rig_events(g, r, KVF_BEFORE_APPEND);
        if (r->state != RIG_DECODES) continue;
        if (rig_mix(r->seed, g->n_steps) % 2) continue; /* the plan notices sizes by itself */
        OK(kvf_sched_resize(g->sched, r->name));
    }
    g->step.struct_size = sizeof g->step;
    if (g->cancels) rig_cancel(g);
    kvf_status status = kvf_sched_plan(g->sched, g->n_steps, &g->step);
    cr_assert(status == KVF_OK, "%s", kvf_sched_error(g->sched)->text);
    cr_assert(++g->n_steps < 100000);
    rig_note_losses(g);
    uint32_t n_tokens = 0;
    for (uint32_t i = 0; i < g->step.n_items; i++) {
        rig_check_item(g, &g->step.items[i], i);
        rig_request *r = g->step.items[i].user;
        n_tokens += g->step.items[i].n_tokens;
        if (r->state == RIG_WAITING) r->state = RIG_RUNNING;
        r->seq = g->step.items[i].seq;
        if (g->step.items[i].kind != KVF_STEP_DECODE) r->prefill_offset = g->step.items[i].prefill_offset;
        r->n_run = g->n_steps;
    }
    cr_assert(n_tokens == g->step.n_tokens && n_tokens <= g->sc.max_batch_tokens);
    cr_assert(g->step.n_running + g->step.n_waiting == g->n_live);
    cr_assert(g->step.n_items > 0 || g->n_live == 0, "step %u is empty and %u requests live", g->n_steps, g->n_live);
    if (g->step.n_running > g->most_running) g->most_running = g->step.n_running;
    kvf_request first_waiting = UINT64_MAX, last_running = 0;
    for (uint32_t i = 0; i < g->n_requests; i++) {
        const rig_request *r = &g->requests[i];
        if (r->state == RIG_WAITING && r->name < first_waiting) first_waiting = r->name;
        if ((r->state == RIG_RUNNING || r->state == RIG_DECODES) && r->name > last_running) last_running = r->name;
        if (r->state == RIG_DECODES)
            cr_assert(r->n_run == g->n_steps, "a decoding request was left out of step %u", g->n_steps);
    }
    if (!g->n_bounced && !g->sc.order) cr_assert(first_waiting > last_running, "a request was overtaken");
    cr_assert(g->step.copies.n == 0 || g->n_forked);
    rig_copies(g, &g->step.copies);
    rig_check_extents(g);
    rig_audit(g);
}

static inline void rig_take_token(rig *g, rig_request *r, int *ended) {
    r->tokens[r->n_known] = rig_sample(g, r);
    r->n_known++;
    OK(kvf_sched_token(g->sched, r->name, ended));
    cr_assert(*ended == (r->n_known - r->n_prompt == r->max_new || r->n_known == g->sc.max_context));
    if (*ended) rig_finish(g, r);
}

/* A prompt that samples are held for: its events are done, all of them run, or none. */
static inline void rig_end_group(rig *g, rig_request *leader) {
    kvf_status status = kvf_sched_prompt_done(g->sched, leader->name);
    uint32_t n = 0;
    if (status == KVF_E_NO_BLOCKS) {
        g->n_bounced++;
        rig_lose(g, leader);
        return;
    }
    cr_assert(status == KVF_OK, "%s", kvf_sched_error(g->sched)->text);
    rig_copies(g, kvf_sched_copies(g->sched));
    leader->state = RIG_DECODES;
    for (rig_request *r = leader + 1; r < g->requests + g->n_requests && r->sample > leader->sample; r++) {
        if (r->state != RIG_HELD || r->options.ops != leader->options.ops) continue;
        r->seq = kvf_sched_seq(g->sched, r->name);
        if (!r->seq) continue; /* of a group of its own */
        r->state = RIG_DECODES;
        r->n_computed = r->n_prompt;
        g->n_forked++;
        n++;
    }
    for (rig_request *r = leader; r < g->requests + g->n_requests && (r == leader || r->sample > leader->sample); r++) {
        int ended = 0;
        if (r->state != RIG_DECODES || r->n_known != r->n_prompt) continue;
        if (r->max_new)
            rig_take_token(g, r, &ended);
        else
            rig_finish(g, r);
    }
    (void)n;
}

static inline void rig_end_item(rig *g, const kvf_step_item *item) {
    rig_request *r = item->user;
    if (r->state == RIG_GONE || (r->state == RIG_WAITING && !r->seq)) return; /* shed in this step */
    if (item->kind == KVF_STEP_REPEAT) return;
    r->n_computed += item->n_tokens;
    if (item->kind == KVF_STEP_PREFILL && !item->prompt_ends && rig_repeats(r) && r->n_computed == r->n_prompt)
        r->n_computed--;
    if (item->prompt_ends)
        rig_events(g, r, KVF_AT_PROMPT_END);
    else if (item->kind == KVF_STEP_DECODE)
        rig_events(g, r, KVF_AFTER_STEP);
    if (r->state == RIG_WAITING) return;
    if (item->n_held) {
        rig_end_group(g, r);
        return;
    }
    int ended = r->max_new == 0 && item->prompt_ends;
    if (item->samples) {
        r->tokens[r->n_known] = rig_sample(g, r);
        r->n_known++;
        OK(kvf_sched_token(g->sched, r->name, &ended));
        cr_assert(ended == (r->n_known - r->n_prompt == r->max_new || r->n_known == g->sc.max_context));
    }
    if (ended) {
        rig_finish(g, r);
        return;
    }
    if (!item->prompt_ends) return;
    kvf_status status = kvf_sched_prompt_done(g->sched, r->name);
    if (status == KVF_OK) {
        r->state = RIG_DECODES;
        return;
    }
    cr_assert(status == KVF_E_NO_BLOCKS, "%s", kvf_sched_error(g->sched)->text);
    g->n_bounced++;
    r->state = RIG_WAITING;
    r->n_computed = 0;
    r->seq = 0;
}

/* False when nothing is left to do. */
static inline bool rig_step(rig *g) {
    if (g->n_live == 0) {
        cr_assert(++g->n_idle < 1000, "waits for what does not come");
        return false;
    }
    rig_plan(g);
    if (!g->step.n_items) return g->n_live > 0;
    if (g->mid_step) g->mid_step(g, g->mid_ctx);
    for (uint32_t i = 0; i < g->step.n_items; i++) {
        rig_request *r = g->step.items[i].user;
        rig_take_over(r, &g->step.items[i]);
        if (r->state != RIG_GONE) rig_forward(g, &g->step.items[i]);
    }
    kvf_step_item items[64];
    uint32_t n = g->step.n_items;
    cr_assert(n <= 64);
    memcpy(items, g->step.items, n * sizeof *items);
    OK(kvf_sched_done(g->sched));
    for (uint32_t i = 0; i < n; i++) rig_end_item(g, &items[i]);
    rig_audit(g);
    return g->n_live > 0;
}

static inline void rig_run(rig *g, uint32_t max_steps) {
    uint32_t begin = g->n_steps;
    while (rig_step(g))
        cr_assert(g->n_steps - begin < max_steps, "%u requests still live after %u steps", g->n_live, max_steps);
}

/* Takes every block that is not promised, so that the next growth finds none. */
static inline uint32_t take_all(rig *g, kvf_block *held) {
    uint32_t n = 0;
    while (kvf_block_take(g->manager, 0, &held[n]) == KVF_OK) n++;
    return n;
}

static inline void release_all(rig *g, kvf_block *held, uint32_t n) {
    while (n) OK(kvf_block_release(g->manager, held[--n]));
}

/* Blocks held or promised. */
static inline uint32_t counted(rig *g) {
    kvf_occupancy o = {.struct_size = sizeof o};
    OK(kvf_occupancy_read(g->manager, &o, NULL, 0));
    return o.blocks.n_held + o.blocks.n_promised;
}

/* The same request with the pool to itself: its tokens are what any run must give, as far as that run went. */
static inline void rig_expect_undisturbed(const rig *g, const rig_request *r) {
    kvf_manager_config mc = g->mc;
    kvf_sched_config sc = rig_config(g->sc.chunk);
    sc.max_context = g->sc.max_context;
    mc.n_blocks = mc.n_score_pages = mc.n_layers * g->n_groups * 64;
    mc.max_seqs = 1;
    rig *alone = rig_create(mc, sc);
    rig_request *twin = rig_submit(alone, r->seed, r->n_prompt, r->max_new, r->options);
    twin->sample = r->sample;
    rig_run(alone, 4096);
    cr_assert(twin->finished && twin->n_known >= r->n_known);
    for (uint32_t i = 0; i < r->n_known; i++)
        cr_assert(twin->tokens[i] == r->tokens[i], "%s request of %u + %u: token %u differs from the undisturbed run",
                  r->options.ops->name, r->n_prompt, r->max_new, i);
    rig_destroy(alone);
}

#endif
