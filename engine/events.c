/* The policy's moments: observe after each layer, events at a prompt's end, at an overflow, and in decode. */
#include <math.h>

#include "engine/internal.h"

static kvf_policy_batch batch_base(kvf_engine *e) {
    return (kvf_policy_batch){.struct_size = sizeof(kvf_policy_batch),
                              .view = &e->view,
                              .pages = &e->pages,
                              .scores = &e->scores,
                              .prompt_stride = e->config.max_prefill_tokens,
                              .workspace = e->workspace,
                              .workspace_bytes = e->workspace_bytes,
                              .path = e->config.path};
}

/* Called by the forward pass after each layer. Rows of one policy that stand together are one call. */
kvf_status kvf__engine_observe(void *ctx, uint32_t layer, const kvf_mass *mass) {
    kvf_engine *e = ctx;
    kvf_policy_batch b = batch_base(e);
    kvf_mass m = *mass;
    b.layer = layer;
    b.mass = &m;
    b.logprobs = e->logprobs;
    m.row_wanted = e->observed; /* some go by log-probabilities alone, and want no row */
    for (uint32_t i = 0; i < e->view.n_seqs;) {
        const kvf_policy_ops *ops = e->rows[i]->policy.ops;
        uint32_t end = i + 1;
        if (e->observed[i]) {
            while (end < e->view.n_seqs && e->observed[end] && e->rows[end]->policy.ops == ops) end++;
            b.row_begin = i;
            b.row_end = end;
            kvf_status st = kvf_policy_ops_resolve(ops).observe(e->policies, e->stream, &b, e->observe_error);
            if (st) return st;
        }
        i = end;
    }
    return KVF_OK;
}

/* Runs one batch of events of one policy: match, gate, apply. One rank has nothing to reduce. */
static kvf_status run_batch(kvf_engine *e, const kvf_policy_ops *policy, kvf_policy_batch *b, kvf_error *err) {
    kvf_status st;
    if (!b->n_events) return KVF_OK;
    kvf_policy_ops ops = kvf_policy_ops_resolve(policy);
    if ((st = ops.match(e->policies, e->stream, b, e->plan, err))) return st;
    if ((st = ops.gate(e->policies, e->stream, b, e->plan, err))) return st;
    st = ops.apply(e->policies, e->stream, b, e->plan, err);
    b->n_events = 0;
    return st;
}

static uint32_t layer_slots(const kvf_engine *e, uint32_t row, uint32_t layer) {
    return e->view.n_slots[((size_t)row * e->info->n_layers + layer) * e->n_groups];
}

/* The accumulators of each row that its policy needs. sums: where its columns begin, NULL: it has none. */
static void accumulators(kvf_engine *e, float *const *sums, kvf_policy_batch *b) {
    size_t stride = e->config.max_prefill_tokens;
    for (uint32_t i = 0; i < e->view.n_seqs; i++) {
        uint32_t needs = e->rows[i] && sums[i] ? kvf_policy_needs(&e->rows[i]->policy) : 0;
        size_t at = needs ? (size_t)(sums[i] - e->sums) : 0;
        e->batch_sums[i] = needs & KVF_NEEDS_COL_SUMS ? e->sums + at : NULL;
        e->batch_last[i] = needs & KVF_NEEDS_LAST_ROWS ? e->last_sums + at : NULL;
        e->batch_squares[i] = needs & KVF_NEEDS_SQUARES ? e->squares + at : NULL;
        e->batch_logprobs[i] = needs & KVF_NEEDS_LOGPROBS ? e->prompt_logprobs + at : NULL;
    }
    b->prompt_sums = e->batch_sums;
    b->prompt_last = e->batch_last;
    b->prompt_squares = e->batch_squares;
    b->prompt_logprobs = e->batch_logprobs;
    b->prompt_stride = stride;
}

/* Runs the events in their order, in batches that the plan can hold. Of the tables that share a block all but the last in
 * this order have fresh rows (kvf_compact_begin), and within a batch apply writes these first: so whatever reads a block
 * has done so before its last owner writes there, however the batches are cut. */
static kvf_status run_batches(kvf_engine *e, uint32_t n_events, const kvf_compaction *compaction, float *const *sums,
                              kvf_error *err) {
    kvf_policy_batch b = batch_base(e);
    if (sums) accumulators(e, sums, &b);
    b.events = e->batch_events;
    b.compaction = compaction;
    b.compaction_item = e->batch_items;
    const kvf_policy_ops *ops = NULL;
    uint64_t entries = 0;
    kvf_status st;
    for (uint32_t i = 0; i < n_events; i++) {
        const kvf_event *event = &e->events[i];
        const kvf_policy_ops *next = e->rows[event->row]->policy.ops;
        uint64_t more = (uint64_t)(layer_slots(e, event->row, event->layer) - event->n_keep) * e->info->n_kv_heads;
        if (b.n_events &&
            (next != ops || entries + more > e->plan->entry_capacity || b.n_events == e->plan->event_capacity)) {
            if ((st = run_batch(e, ops, &b, err))) return st;
            entries = 0;
        }
        ops = next;
        entries += more;
        e->batch_events[b.n_events] = *event;
        e->batch_items[b.n_events++] = e->item_of_event[i];
    }
    return b.n_events ? run_batch(e, ops, &b, err) : KVF_OK;
}

/* Notes which item of the compaction each event is; returns how many items there are. */
static uint32_t list_items(kvf_engine *e, uint32_t n_events) {
    uint32_t n_items = 0;
    for (uint32_t i = 0; i < n_events; i++) {
        const kvf_event *event = &e->events[i];
        e->item_of_event[i] = UINT32_MAX;
        if (event->n_keep >= layer_slots(e, event->row, event->layer)) continue;
        e->item_of_event[i] = n_items;
        e->items[n_items++] = (kvf_compact_item){e->seqs[event->row], event->layer, event->n_keep, NULL};
    }
    return n_items;
}

/* Too few blocks for the tables that are shared: the latest arrival is preempted, and its events are gone. */
static kvf_status make_room(kvf_engine *e, uint32_t *n_events, kvf_error *err) {
    kvf_step_item shed;
    kvf_status st = kvf_sched_shed(e->sched, &shed);
    if (st) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    kvf__live_lost(e, shed.user);
    e->stats.n_preempted++;
    uint32_t n = 0;
    for (uint32_t i = 0; i < *n_events; i++)
        if (e->rows[e->events[i].row]) e->events[n++] = e->events[i];
    *n_events = n;
    return KVF_OK;
}

/* Carries e->events out. Rows of requests that made room for it are NULL afterwards. */
static kvf_status run_events(kvf_engine *e, uint32_t n_events, float *const *sums, kvf_error *err) {
    kvf_compaction compaction = {0};
    kvf_status st = KVF_OK;
    uint32_t n_items = list_items(e, n_events);
    while (n_items && (st = kvf_compact_begin(e->manager, e->items, n_items, &compaction)) == KVF_E_NO_BLOCKS) {
        if ((st = make_room(e, &n_events, err))) return st;
        n_items = list_items(e, n_events);
    }
    if (st) return kvf__fail(err, st, "%s", kvf_manager_error(e->manager));
    st = run_batches(e, n_events, &compaction, sums, err);
    if (n_items && !st && (st = kvf_compact_commit(e->manager)))
        kvf__fail(err, st, "%s", kvf_manager_error(e->manager));
    return st;
}

/* Adds the due layers of a row to e->events; returns the new count. */
static uint32_t collect(kvf_engine *e, uint32_t row, kvf_moment moment, kvf_event_kind kind, uint32_t n_events) {
    for (uint32_t l = 0; l < e->info->n_layers; l++) e->slots[l] = layer_slots(e, row, l);
    if (!kvf_policy_due(e->policies, e->view.seq_index[row], moment, e->slots, e->keep)) return n_events;
    for (uint32_t l = 0; l < e->info->n_layers; l++)
        if (e->keep[l]) e->events[n_events++] = (kvf_event){row, l, e->keep[l], (uint32_t)kind, 0, 0};
    return n_events;
}

/* The first events of a row, with the promise that they need where blocks are shared. */
static kvf_status collect_first(kvf_engine *e, uint32_t row, kvf_moment moment, uint32_t *n_events, kvf_error *err) {
    uint32_t n = collect(e, row, moment, KVF_EVENT_PROMPT, *n_events);
    bool any = n > *n_events;
    *n_events = n;
    kvf_status st = any ? kvf_sched_event_room(e->sched, e->rows[row]->id) : KVF_OK;
    return st ? kvf__fail(err, st, "%s", kvf_sched_error(e->sched)) : KVF_OK;
}

/* Before a token is appended: the first compaction of requests whose prompt fitted the budget, and that of requests whose
 * budget has changed. */
kvf_status kvf__engine_overflow(kvf_engine *e, kvf_error *err) {
    uint32_t n = 0;
    for (kvf__live *r = e->first; r; r = r->next) {
        uint32_t index, next_pos;
        if (!r->seq || r->in_prompt || kvf_seq_index(e->manager, r->seq, &index)) continue;
        int changed = r->changed;
        r->changed = 0;
        if (!changed && (r->idle || kvf_seq_next_pos(e->manager, r->seq, &next_pos) || kvf__live_turns(r, next_pos)))
            continue; /* no token is appended; what a segment takes beyond the budget goes at its end */
        if (!kvf_policy_evicts(&r->policy) || (!changed && kvf_policy_sizes(e->policies, index))) continue;
        e->rows[n] = r;
        e->seqs[n++] = r->seq;
    }
    if (!n) return KVF_OK;
    kvf_status st = kvf_view_fill(e->manager, 1, e->seqs, n, &e->view);
    if (st) return kvf__fail(err, st, "%s", kvf_manager_error(e->manager));
    uint32_t n_events = 0;
    for (uint32_t row = 0; row < n; row++)
        if ((st = collect_first(e, row, KVF_BEFORE_APPEND, &n_events, err))) return st;
    if (n_events && (st = run_events(e, n_events, NULL, err))) return st;
    for (uint32_t row = 0; row < n; row++)
        if (e->rows[row] && kvf_policy_sizes(e->policies, e->view.seq_index[row]) &&
            (st = kvf_sched_resize(e->sched, e->rows[row]->id)))
            return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    return KVF_OK;
}

/* metric -> budget: the sizes of a row whose prompt has ended. */
static kvf_status find_sizes(kvf_engine *e, uint32_t row, kvf_error *err) {
    const kvf__live *r = e->rows[row];
    kvf_policy_ops ops = kvf_policy_ops_resolve(r->policy.ops);
    kvf_policy_batch b = batch_base(e);
    accumulators(e, e->prompt_sums, &b);
    int has_metric =
        ops.metric && e->batch_sums[row] && r->n_seen == r->n_prompt; /* the weights are the first prompt's */
    kvf_status st = KVF_OK;
    if (has_metric) st = ops.metric(e->policies, e->stream, &b, row, r->n_seen, e->variance, err);
    if (st) return st;
    return ops.budget(e->policies, e->view.seq_index[row], has_metric ? e->variance : NULL, r->n_seen, err);
}

/* Score pages for a row whose events are the last of *n_events, from begin on. Layers without an event have one that moves
 * their scores out of the sums. */
static kvf_status take_scores(kvf_engine *e, uint32_t row, uint32_t begin, uint32_t *n_events, kvf_error *err) {
    kvf__live *r = e->rows[row];
    uint32_t n_layers = e->info->n_layers, due = begin;
    for (uint32_t l = 0; l < n_layers; l++) {
        uint32_t n_slots = layer_slots(e, row, l);
        uint32_t keep = due < *n_events && e->events[due].layer == l ? e->events[due++].n_keep : n_slots;
        e->batch_events[l] = (kvf_event){row, l, keep, KVF_EVENT_PROMPT, 0, 0};
        for (uint32_t g = 0; g < e->n_groups; g++) e->table_slots[l * e->n_groups + g] = keep;
    }
    memcpy(e->events + begin, e->batch_events, n_layers * sizeof *e->events);
    *n_events = begin + n_layers;
    if (r->n_seen > r->n_prompt) return KVF_OK; /* it has them since its first prompt */
    kvf_status st;
    while ((st = kvf_seq_take_scores(e->manager, r->seq, e->table_slots)) == KVF_E_NO_BLOCKS) {
        if ((st = make_room(e, n_events, err))) return st;
        if (!e->rows[row]) return KVF_OK;
    }
    return st ? kvf__fail(err, st, "%s", kvf_manager_error(e->manager)) : KVF_OK;
}

/* metric -> budget -> due -> events with the prompt's sums, of all rows together. */
kvf_status kvf__engine_prompt_end(kvf_engine *e, uint32_t row_begin, uint32_t row_end, kvf_error *err) {
    uint32_t n_events = 0;
    kvf_status st;
    for (uint32_t row = row_begin; row < row_end; row++) {
        const kvf__live *r = e->rows[row];
        if (!r) continue;
        if (!(kvf_policy_needs(&r->policy) & ~(uint32_t)KVF_NEEDS_ROW)) e->prompt_sums[row] = NULL; /* others' */
        uint32_t begin = n_events;
        if ((st = find_sizes(e, row, err))) return st;
        if ((st = collect_first(e, row, KVF_AT_PROMPT_END, &n_events, err))) return st;
        if (!kvf_policy_n_arrays(&r->policy) || !e->prompt_sums[row]) continue;
        if ((st = take_scores(e, row, begin, &n_events, err))) return st;
    }
    return n_events ? run_events(e, n_events, e->prompt_sums, err) : KVF_OK;
}

kvf_status kvf__engine_decode_events(kvf_engine *e, uint32_t n_decode, kvf_error *err) {
    kvf_status st;
    uint32_t n_events = 0;
    for (uint32_t row = 0; row < n_decode; row++) {
        kvf__live *r = e->rows[row];
        if (!r || !kvf_policy_evicts(&r->policy)) continue;
        uint32_t index = e->view.seq_index[row];
        int first = r->policy.defer_first_decode && !kvf_policy_sizes(e->policies, index);
        if (!first)
            n_events = collect(e, row, KVF_AFTER_STEP, KVF_EVENT_DECODE, n_events);
        else if ((st = collect_first(e, row, KVF_AFTER_STEP, &n_events, err)))
            return st;
        e->out_rows[row] = (uint32_t)(first && kvf_policy_sizes(e->policies, index));
    }
    st = n_events ? run_events(e, n_events, NULL, err) : KVF_OK;
    for (uint32_t row = 0; row < n_decode && !st; row++) {
        kvf__live *r = e->rows[row];
        if (!r || !kvf_policy_evicts(&r->policy) || !e->out_rows[row]) continue;
        if ((st = kvf_sched_resize(e->sched, r->id))) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    }
    return st;
}
