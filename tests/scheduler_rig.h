/* A scheduler with a toy model behind it, that checks every step it runs.
 *
 * The toy model writes a value made of (token, position, table) into each slot and samples a hash of what a request
 * knows and of how many slots each of its tables holds. So a token differs from an undisturbed run's as soon as a
 * token was lost, doubled, or an eviction did not happen again where it had happened first; and where nothing was
 * evicted every slot is read back through the tables, which finds a block that two requests believe theirs. */
#ifndef KVF_TESTS_SCHEDULER_RIG_H
#define KVF_TESTS_SCHEDULER_RIG_H

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvfold/scheduler.h"

#define RIG_MAX_REQUESTS 512
#define RIG_MAX_LAYERS 8
#define RIG_Q_HEADS 4
#define RIG_NO_VALUE UINT64_MAX

#define OK(call)                                                                       \
    do {                                                                               \
        kvf_status ok_status_ = (call);                                                \
        cr_assert(ok_status_ == KVF_OK, "%s: %s", #call, kvf_status_name(ok_status_)); \
    } while (0)

typedef enum rig_state { RIG_WAITING, RIG_RUNNING, RIG_DECODES, RIG_GONE, RIG_HELD } rig_state;

typedef struct rig_request {
    kvf_request name;
    kvf_seq seq;
    rig_state state;
    uint32_t n_prompt, max_new, n_known, n_computed, n_run, n_preempted;
    uint32_t prefill_offset;
    uint32_t *tokens;
    uint64_t seed;
    uint32_t sample; /* of a group: each samples tokens of its own */
    kvf_policy_options options;
    bool finished, aborted, changed; /* changed: its budget */
    uint32_t end;                    /* kvf_end_reason, of those the scheduler ended */
    uint32_t end_order;
} rig_request;

typedef struct rig {
    kvf_manager *manager;
    kvf_policy_state *policies;
    kvf_sched *sched;
    kvf_manager_config mc;
    kvf_sched_config sc;
    uint32_t n_groups;
    uint64_t *slots; /* [n_blocks][block_size] */
    rig_request requests[RIG_MAX_REQUESTS];
    uint32_t n_requests, n_live, n_ended;
    uint32_t n_steps, n_idle, n_preempted, n_bounced; /* bounced: kvf_sched_prompt_done had no room */
    uint32_t n_forked, n_copies, n_shed;
    uint32_t most_running;
    kvf_step step;
    /* called with the step planned and not yet done */
    void (*mid_step)(struct rig *rig, void *ctx);
    void *mid_ctx;
} rig;

static inline uint64_t rig_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) + 0x9e3779b97f4a7c15u;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

static inline uint64_t rig_random(uint64_t *state) { return rig_mix(0, (*state)++); }

static inline uint32_t rig_below(uint64_t *state, uint32_t n) { return (uint32_t)(rig_random(state) >> 33) % n; }

static inline kvf_policy_options rig_options(const char *policy, const char *preset) {
    kvf_policy_options o;
    kvf_error err = {""};
    kvf_status status = kvf_policy_options_init(&o, policy, preset, &err);
    cr_assert(status == KVF_OK, "%s", err.text);
    return o;
}

static inline kvf_policy_options rig_set(kvf_policy_options o, const char *name, const char *value) {
    kvf_error err = {""};
    kvf_status status = kvf_policy_option_set(&o, name, value, &err);
    cr_assert(status == KVF_OK, "%s", err.text);
    return o;
}

static inline kvf_manager_config rig_pool(uint32_t n_layers, uint32_t n_groups, uint32_t n_blocks) {
    kvf_manager_config c = kvf_manager_config_default();
    c.n_layers = n_layers;
    c.n_kv_heads = n_groups;
    c.heads_per_group = 1;
    c.block_size = 8;
    c.n_blocks = n_blocks;
    c.max_seqs = 16;
    c.max_slots = 512;
    return c;
}

static inline kvf_sched_config rig_config(uint32_t chunk) {
    kvf_sched_config c = kvf_sched_config_default();
    c.chunk = chunk;
    c.max_waiting = RIG_MAX_REQUESTS;
    return c;
}

static inline rig *rig_create(kvf_manager_config mc, kvf_sched_config sc) {
    rig *g = calloc(1, sizeof *g);
    kvf_error err = {""};
    cr_assert(kvf_manager_create(&mc, &g->manager, &err) == KVF_OK, "%s", err.text);
    g->mc = *kvf_manager_get_config(g->manager);
    kvf_policy_state_config pc = {.struct_size = sizeof pc,
                                  .n_layers = g->mc.n_layers,
                                  .n_kv_heads = g->mc.n_kv_heads,
                                  .n_q_heads = RIG_Q_HEADS * g->mc.n_kv_heads,
                                  .head_dim = 8,
                                  .block_size = g->mc.block_size,
                                  .max_seqs = g->mc.max_seqs,
                                  .max_slots = g->mc.max_slots};
    cr_assert(kvf_policy_state_create(&pc, &g->policies, &err) == KVF_OK, "%s", err.text);
    sc.manager = g->manager;
    sc.policies = g->policies;
    cr_assert(kvf_sched_create(&sc, &g->sched, &err) == KVF_OK, "%s", err.text);
    g->sc = sc;
    if (!g->sc.max_running) g->sc.max_running = g->mc.max_seqs;
    if (!g->sc.max_batch_tokens) g->sc.max_batch_tokens = sc.chunk + g->sc.max_running;
    if (!g->sc.max_prefill_tokens) g->sc.max_prefill_tokens = g->mc.max_slots;
    if (!g->sc.max_context) g->sc.max_context = g->mc.max_slots;
    g->n_groups = g->mc.n_kv_heads / g->mc.heads_per_group;
    size_t n = (size_t)g->mc.n_blocks * g->mc.block_size;
    g->slots = malloc(n * sizeof *g->slots);
    memset(g->slots, 0xff, n * sizeof *g->slots);
    return g;
}

static inline void rig_audit(rig *g) {
    kvf_error err = {""};
    cr_assert(kvf_audit(g->manager, &err) == KVF_OK, "step %u: %s", g->n_steps, err.text);
    kvf_occupancy o = {.struct_size = sizeof o};
    OK(kvf_occupancy_read(g->manager, &o, NULL));
    cr_assert(o.blocks.n_promised <= o.blocks.n_free && o.blocks.n_held <= g->mc.n_blocks);
    cr_assert(o.score_pages.n_promised <= o.score_pages.n_free);
}

static inline void rig_expect_all_free(rig *g) {
    kvf_occupancy o = {.struct_size = sizeof o};
    rig_audit(g);
    OK(kvf_occupancy_read(g->manager, &o, NULL));
    cr_assert(o.n_seqs == 0, "%u sequences left", o.n_seqs);
    for (uint32_t i = 0; i < g->mc.max_seqs; i++)
        cr_assert(!kvf_policy_get_options(g->policies, i), "the policy state %u is still open", i);
    cr_assert(o.blocks.n_free == o.blocks.n_total && o.blocks.n_promised == 0);
    cr_assert(o.score_pages.n_free == o.score_pages.n_total && o.score_pages.n_promised == 0);
}

static inline void rig_destroy(rig *g) {
    kvf_sched_destroy(g->sched);
    rig_expect_all_free(g);
    kvf_policy_state_destroy(g->policies);
    kvf_manager_destroy(g->manager);
    for (uint32_t i = 0; i < g->n_requests; i++) free(g->requests[i].tokens);
    free(g->slots);
    free(g);
}

/* The status of the submission; on success the request is the last of g->requests. */
static inline kvf_status rig_try_submit(rig *g, uint64_t seed, uint32_t n_prompt, uint32_t max_new,
                                        kvf_policy_options o) {
    cr_assert(g->n_requests < RIG_MAX_REQUESTS);
    rig_request *r = &g->requests[g->n_requests];
    *r = (rig_request){.n_prompt = n_prompt, .max_new = max_new, .n_known = n_prompt, .seed = seed, .options = o};
    r->tokens = malloc(((size_t)n_prompt + max_new + 1) * sizeof *r->tokens);
    for (uint32_t i = 0; i < n_prompt; i++) r->tokens[i] = (uint32_t)rig_mix(seed, i);
    const kvf_sched_request request = {
        .struct_size = sizeof request, .n_prompt = n_prompt, .max_new = max_new, .options = &r->options, .user = r};
    kvf_status status = kvf_sched_submit(g->sched, &request, &r->name);
    if (status != KVF_OK) {
        free(r->tokens);
        return status;
    }
    cr_assert(r->name != 0 && (g->n_requests == 0 || r->name > r[-1].name));
    g->n_requests++;
    g->n_live++;
    return KVF_OK;
}

/* n requests over one prompt, the last n of g->requests on success. */
static inline kvf_status rig_try_group(rig *g, uint64_t seed, uint32_t n, uint32_t n_prompt, uint32_t max_new,
                                       kvf_policy_options o) {
    cr_assert(n && g->n_requests + n <= RIG_MAX_REQUESTS);
    rig_request *first = &g->requests[g->n_requests];
    void *users[64];
    kvf_request names[64], name;
    for (uint32_t i = 0; i < n; i++) {
        rig_request *r = &first[i];
        *r = (rig_request){.n_prompt = n_prompt, .max_new = max_new, .n_known = n_prompt, .seed = seed, .options = o};
        r->sample = i;
        r->state = i ? RIG_HELD : RIG_WAITING;
        r->tokens = malloc(((size_t)n_prompt + max_new + 1) * sizeof *r->tokens);
        for (uint32_t k = 0; k < n_prompt; k++) r->tokens[k] = (uint32_t)rig_mix(seed, k);
        users[i] = r;
    }
    const kvf_sched_request request = {.struct_size = sizeof request,
                                       .n_prompt = n_prompt,
                                       .max_new = max_new,
                                       .options = &first->options,
                                       .n_samples = n,
                                       .sample_users = users,
                                       .sample_names = names};
    kvf_status status = kvf_sched_submit(g->sched, &request, &name);
    for (uint32_t i = 0; i < n && status != KVF_OK; i++) free(first[i].tokens);
    if (status != KVF_OK) return status;
    for (uint32_t i = 0; i < n; i++) {
        first[i].name = names[i];
        cr_assert(names[i] > (i ? names[i - 1] : 0));
    }
    cr_assert(name == names[0]);
    g->n_requests += n;
    g->n_live += n;
    return KVF_OK;
}

static inline rig_request *rig_submit(rig *g, uint64_t seed, uint32_t n_prompt, uint32_t max_new,
                                      kvf_policy_options o) {
    kvf_status status = rig_try_submit(g, seed, n_prompt, max_new, o);
    cr_assert(status == KVF_OK, "%s", kvf_sched_error(g->sched));
    return &g->requests[g->n_requests - 1];
}

static inline void rig_gone(rig *g, rig_request *r) {
    cr_assert(r->state != RIG_GONE);
    r->state = RIG_GONE;
    r->end_order = g->n_ended++;
    g->n_live--;
}

static inline void rig_finish(rig *g, rig_request *r) {
    OK(kvf_sched_finish(g->sched, r->name));
    r->finished = true;
    rig_gone(g, r);
    cr_assert(kvf_sched_finish(g->sched, r->name) == KVF_E_NOT_FOUND);
}

static inline void rig_abort(rig *g, rig_request *r) {
    OK(kvf_sched_finish(g->sched, r->name));
    r->aborted = true;
    rig_gone(g, r);
}

/* Changes the budget; the status of the call. */
static inline kvf_status rig_set_budget(rig *g, rig_request *r, double rho, uint32_t budget_tokens) {
    kvf_status status = kvf_sched_set_budget(g->sched, r->name, rho, budget_tokens);
    const kvf_policy_options *now = NULL;
    uint32_t index;
    if (r->seq && kvf_seq_index(g->manager, r->seq, &index) == KVF_OK) now = kvf_policy_get_options(g->policies, index);
    if (status != KVF_OK) {
        cr_assert(!now || (now->rho == r->options.rho && now->budget_tokens == r->options.budget_tokens));
        return status;
    }
    r->changed = true;
    r->options.rho = rho;
    r->options.budget_tokens = budget_tokens;
    if (now) r->options = *now;
    return status;
}

/* ---- The toy model -------------------------------------------------------------------------------- */

static inline uint64_t rig_value(const rig_request *r, uint32_t pos, uint32_t table) {
    return rig_mix(rig_mix(r->tokens[pos], pos), table) >> 1;
}

static inline uint64_t *rig_slot(rig *g, const rig_request *r, uint32_t table, uint32_t slot) {
    const uint32_t *blocks = NULL;
    OK(kvf_seq_table(g->manager, r->seq, table / g->n_groups, table % g->n_groups, NULL, NULL, &blocks));
    return &g->slots[(size_t)blocks[slot / g->mc.block_size] * g->mc.block_size + slot % g->mc.block_size];
}

static inline uint32_t rig_table_slots(rig *g, const rig_request *r, uint32_t table) {
    uint32_t n = 0;
    OK(kvf_seq_table(g->manager, r->seq, table / g->n_groups, table % g->n_groups, &n, NULL, NULL));
    return n;
}

static inline void rig_forward(rig *g, const kvf_step_item *item) {
    rig_request *r = item->user;
    for (uint32_t t = 0; t < g->mc.n_layers * g->n_groups; t++) {
        uint32_t n = rig_table_slots(g, r, t);
        for (uint32_t i = 0; i < item->n_tokens; i++)
            *rig_slot(g, r, t, n - item->n_tokens + i) = rig_value(r, item->token_begin + i, t);
    }
}

static inline uint32_t rig_sample(rig *g, const rig_request *r) {
    uint64_t h = 1 + r->sample;
    for (uint32_t i = 0; i < r->n_known; i++) h = rig_mix(h, r->tokens[i]);
    for (uint32_t t = 0; t < g->mc.n_layers * g->n_groups; t++) {
        uint32_t n = rig_table_slots(g, r, t);
        h = rig_mix(h, n);
        if (n != r->n_known) continue;
        for (uint32_t i = 0; i < n; i++)
            cr_assert(*rig_slot(g, r, t, i) == rig_value(r, i, t),
                      "request %llu: table %u slot %u holds somebody else's token", (unsigned long long)r->name, t, i);
    }
    return (uint32_t)h;
}

/* ---- The policy's events, memory left alone ---------------------------------------------------------- */

static inline void rig_budget(rig *g, rig_request *r, uint32_t seq_index) {
    double variance[RIG_MAX_LAYERS * RIG_Q_HEADS * 8];
    uint32_t n_heads = RIG_Q_HEADS * g->mc.n_kv_heads;
    cr_assert(g->mc.n_layers <= RIG_MAX_LAYERS && n_heads <= RIG_Q_HEADS * 8);
    for (uint32_t i = 0; i < g->mc.n_layers * n_heads; i++) variance[i] = (double)(rig_mix(r->seed, i) % 1000) / 100.0;
    const kvf_policy_ops *ops = r->options.ops;
    kvf_error err = {""};
    if (!ops->budget) return;
    kvf_status status = ops->budget(g->policies, seq_index, ops->metric ? variance : NULL, r->n_prompt, &err);
    cr_assert(status == KVF_OK, "%s", err.text);
}

static inline void rig_lose(rig *g, rig_request *r) {
    r->state = RIG_WAITING;
    r->n_computed = 0;
    r->seq = 0;
    r->n_preempted++;
    g->n_preempted++;
}

/* The copies of forks and of appends to shared blocks. */
static inline void rig_copies(rig *g, kvf_copy_list *copies) {
    size_t bs = g->mc.block_size;
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        if (c->kind == KVF_COPY_BLOCK)
            memcpy(g->slots + c->dst * bs, g->slots + c->src * bs, c->n_slots * sizeof *g->slots);
    }
    g->n_copies += copies->n;
    OK(kvf_copies_done(g->manager, copies));
}

/* Begun and committed; where there are too few blocks the latest arrivals make room. False when it is r itself. */
static inline bool rig_compact(rig *g, const rig_request *r, const kvf_compact_item *items, uint32_t n_items) {
    kvf_compaction compaction;
    kvf_status status;
    while ((status = kvf_compact_begin(g->manager, items, n_items, &compaction)) == KVF_E_NO_BLOCKS) {
        kvf_step_item shed;
        OK(kvf_sched_shed(g->sched, &shed));
        g->n_shed++;
        rig_lose(g, shed.user);
        if (shed.user == r) return false;
    }
    OK(status);
    OK(kvf_compact_commit(g->manager));
    return true;
}

static inline void rig_events(rig *g, rig_request *r, kvf_moment moment) {
    uint32_t n_slots[RIG_MAX_LAYERS], keep[RIG_MAX_LAYERS], cover[RIG_MAX_LAYERS * 8], index, n_items = 0;
    kvf_compact_item items[RIG_MAX_LAYERS];
    OK(kvf_seq_index(g->manager, r->seq, &index));
    for (uint32_t l = 0; l < g->mc.n_layers; l++) n_slots[l] = rig_table_slots(g, r, l * g->n_groups);
    if (moment == KVF_AT_PROMPT_END) rig_budget(g, r, index);
    uint32_t n_due = kvf_policy_due(g->policies, index, moment, n_slots, keep);
    for (uint32_t l = 0; l < g->mc.n_layers; l++) {
        if (n_due && keep[l] && keep[l] < n_slots[l]) items[n_items++] = (kvf_compact_item){r->seq, l, keep[l], NULL};
        for (uint32_t i = 0; i < g->n_groups; i++) cover[l * g->n_groups + i] = n_due && keep[l] ? keep[l] : n_slots[l];
    }
    if (moment == KVF_AT_PROMPT_END && kvf_policy_n_arrays(&r->options))
        OK(kvf_seq_take_scores(g->manager, r->seq, cover));
    if (n_items) (void)rig_compact(g, r, items, n_items);
}

/* ---- One step ------------------------------------------------------------------------------------- */

/* A held one that took its leader's place begins where that one was. */
static inline void rig_take_over(rig_request *r, const kvf_step_item *item) {
    if (r->state != RIG_HELD) return;
    r->state = RIG_RUNNING;
    r->n_computed = item->token_begin;
    r->prefill_offset = item->prefill_offset;
    r->seq = item->seq;
}

static inline void rig_check_item(rig *g, const kvf_step_item *item, uint32_t i) {
    rig_request *r = item->user;
    rig_take_over(r, item);
    const kvf_step *step = &g->step;
    uint32_t next_pos = 0, end = item->token_begin + item->n_tokens;
    cr_assert(r->name == item->request && r->state != RIG_GONE);
    cr_assert((item->kind == KVF_STEP_DECODE) == (i < step->n_decode));
    if (i && i != step->n_decode)
        cr_assert(step->items[i - 1].request < item->request, "items are not in order of arrival");
    cr_assert(item->token_begin == r->n_computed, "request %llu begins at %u, %u are computed",
              (unsigned long long)item->request, item->token_begin, r->n_computed);
    cr_assert(item->n_tokens >= 1 && end <= r->n_known);
    OK(kvf_seq_next_pos(g->manager, item->seq, &next_pos));
    cr_assert(next_pos == end);
    cr_assert((item->samples != 0) == (end == r->n_known && r->max_new > 0));
    if (item->kind == KVF_STEP_DECODE) {
        cr_assert(item->n_tokens == 1 && !item->prompt_ends && r->state == RIG_DECODES);
        return;
    }
    uint32_t chunk = g->sc.chunk;
    cr_assert(r->state != RIG_DECODES);
    cr_assert(item->n_tokens <= chunk - item->token_begin % chunk && (end % chunk == 0 || item->prompt_ends),
              "chunk [%u, %u) is off the grid of %u", item->token_begin, end, chunk);
    bool sums = kvf_policy_needs(&r->options) & KVF_NEEDS_COL_SUMS;
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
            cr_assert(g->step.items[k].request < r->name || (g->n_forked && g->step.items[k].user == r));
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

static inline void rig_plan(rig *g) {
    for (uint32_t i = 0; i < g->n_requests; i++) {
        rig_request *r = &g->requests[i];
        if (r->state != RIG_DECODES) continue;
        rig_events(g, r, KVF_BEFORE_APPEND);
        if (r->state != RIG_DECODES) continue;
        if (rig_mix(r->seed, g->n_steps) % 2) continue; /* the plan notices sizes by itself */
        kvf_status status = kvf_sched_resize(g->sched, r->name);
        cr_assert(status == KVF_OK || status == KVF_E_NO_BLOCKS);
    }
    kvf_status status = kvf_sched_plan(g->sched, &g->step);
    cr_assert(status == KVF_OK, "%s", kvf_sched_error(g->sched));
    cr_assert(++g->n_steps < 100000);
    rig_note_losses(g);
    uint32_t n_tokens = 0;
    for (uint32_t i = 0; i < g->step.n_items; i++) {
        rig_check_item(g, &g->step.items[i], i);
        rig_request *r = g->step.items[i].user;
        n_tokens += g->step.items[i].n_tokens;
        if (r->state == RIG_WAITING) r->state = RIG_RUNNING;
        r->seq = g->step.items[i].seq;
        if (g->step.items[i].kind == KVF_STEP_PREFILL) r->prefill_offset = g->step.items[i].prefill_offset;
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
    if (!g->n_bounced) cr_assert(first_waiting > last_running, "a request was overtaken");
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
    cr_assert(status == KVF_OK, "%s", kvf_sched_error(g->sched));
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
    r->n_computed += item->n_tokens;
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
    cr_assert(status == KVF_E_NO_BLOCKS, "%s", kvf_sched_error(g->sched));
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
    while (kvf_block_take(g->manager, &held[n]) == KVF_OK) n++;
    return n;
}

static inline void release_all(rig *g, kvf_block *held, uint32_t n) {
    while (n) OK(kvf_block_release(g->manager, held[--n]));
}

/* Blocks held or promised. */
static inline uint32_t counted(rig *g) {
    kvf_occupancy o = {.struct_size = sizeof o};
    OK(kvf_occupancy_read(g->manager, &o, NULL));
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
