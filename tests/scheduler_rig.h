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

#include "d2o_policy/policy.h"
#include "scheduler/sched.h"

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
    bool cancels; /* each step is planned and taken back before */
    uint32_t n_cancelled;
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
    kvf_error err = {.text = ""};
    kvf_status status = kvf_policy_options_init(&o, sizeof o, policy, preset, &err);
    cr_assert(status == KVF_OK, "%s", err.text);
    return o;
}

static inline kvf_policy_options rig_set(kvf_policy_options o, const char *name, const char *value) {
    kvf_error err = {.text = ""};
    kvf_status status = kvf_policy_option_set(&o, name, value, &err);
    cr_assert(status == KVF_OK, "%s", err.text);
    return o;
}

static inline kvf_manager_config rig_pool(uint32_t n_layers, uint32_t n_groups, uint32_t n_blocks) {
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = n_layers;
    c.n_kv_heads = n_groups;
    c.heads_per_group = 1;
    c.block_size = 8;
    c.n_blocks = n_blocks;
    c.max_seqs = 16;
    c.max_slots = 512;
    c.n_table_blocks = UINT64_MAX; /* samples share */
    return c;
}

static inline kvf_sched_config rig_config(uint32_t chunk) {
    kvf_sched_config c;
    kvf_sched_config_init(&c, sizeof c);
    c.chunk = chunk;
    c.max_waiting = RIG_MAX_REQUESTS;
    return c;
}

static inline rig *rig_create(kvf_manager_config mc, kvf_sched_config sc) {
    rig *g = calloc(1, sizeof *g);
    kvf_error err = {.text = ""};
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
    kvf_error err = {.text = ""};
    cr_assert(kvf_audit(g->manager, &err) == KVF_OK, "step %u: %s", g->n_steps, err.text);
    cr_assert(!g->sched || kvf__sched_is_valid(g->sched), "step %u: the scheduler's state is not legal", g->n_steps);
    kvf_occupancy o = {.struct_size = sizeof o};
    OK(kvf_occupancy_read(g->manager, &o, NULL, 0));
    cr_assert(o.blocks.n_promised <= o.blocks.n_free && o.blocks.n_held <= g->mc.n_blocks);
    cr_assert(o.score_pages.n_promised <= o.score_pages.n_free);
}

static inline void rig_expect_all_free(rig *g) {
    kvf_occupancy o = {.struct_size = sizeof o};
    rig_audit(g);
    OK(kvf_occupancy_read(g->manager, &o, NULL, 0));
    cr_assert(o.n_seqs == 0, "%u sequences left", o.n_seqs);
    for (uint32_t i = 0; i < g->mc.max_seqs; i++)
        cr_assert(!kvf_policy_get_options(g->policies, i), "the policy state %u is still open", i);
    cr_assert(o.blocks.n_free == o.blocks.n_total && o.blocks.n_promised == 0);
    cr_assert(o.score_pages.n_free == o.score_pages.n_total && o.score_pages.n_promised == 0);
}

static inline void rig_destroy(rig *g) {
    kvf_sched_destroy(g->sched);
    g->sched = NULL;
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
    const kvf_sched_request request = {.struct_size = sizeof request,
                                       .n_prompt = n_prompt,
                                       .max_new = max_new,
                                       .options = &r->options,
                                       .user = r,
                                       .priority = (int32_t)(seed % 7) - 3,
                                       .deadline = seed % 2 ? seed % 256 : 0}; /* for other orders: by the seed */
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
    cr_assert(status == KVF_OK, "%s", kvf_sched_error(g->sched)->text);
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
            *rig_slot(g, r, t, n - item->n_tokens + i) =
                item->kind == KVF_STEP_REPEAT ? UINT64_MAX : rig_value(r, item->token_begin + i, t);
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
    kvf_error err = {.text = ""};
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
    uint32_t n_due = kvf__policy_due_layers(g->policies, index, moment, n_slots, keep);
    for (uint32_t l = 0; l < g->mc.n_layers; l++) {
        if (n_due && keep[l] && keep[l] < n_slots[l]) items[n_items++] = (kvf_compact_item){r->seq, l, keep[l], NULL};
        for (uint32_t i = 0; i < g->n_groups; i++) cover[l * g->n_groups + i] = n_due && keep[l] ? keep[l] : n_slots[l];
    }
    if (moment == KVF_AT_PROMPT_END && kvf_policy_n_arrays(&r->options))
        OK(kvf_seq_take_scores(g->manager, r->seq, cover));
    if (n_items) (void)rig_compact(g, r, items, n_items);
}

#endif
