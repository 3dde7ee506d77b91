/* Calls of the policies: observe after each layer; events at a prompt's end, at an overflow, and in decode. */
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

/* Called by the forward pass after each layer. Adjacent rows of one policy are observed in one call. */
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

/* Slots of an event's tables, which all have equally many; and the number of KV heads. */
static uint32_t event_slots(const kvf_engine *e, const kvf_event *event) {
    uint32_t group = event->n_groups ? event->group_begin : 0;
    return e->view.n_slots[((size_t)event->row * e->info->n_layers + event->layer) * e->n_groups + group];
}
static uint32_t event_heads(const kvf_engine *e, const kvf_event *event) {
    return event->n_groups ? event->n_groups * e->pages.heads_per_group : e->info->n_kv_heads;
}

/* Sets the accumulators that each row's policy needs. sums: the row's first column; NULL: it has none. */
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

/* Runs the events in their order, in batches that the plan can hold. If several tables share a block, all but the last in this order
 * have fresh blocks (kvf_compact_begin), and within a batch apply writes to fresh blocks first. So a shared block has been read
 * by all before its last owner writes to it, however the batches are cut. */
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
        uint64_t more = (uint64_t)(event_slots(e, event) - event->n_keep) * event_heads(e, event);
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

/* Adds an event of some head groups to its layer's compaction item. Groups without an event so far keep their slots. */
static void list_group(kvf_engine *e, const kvf_event *event, bool new_item, uint32_t item) {
    uint32_t *keep = e->group_keep + (size_t)item * e->n_groups;
    const uint32_t *slots = e->view.n_slots + ((size_t)event->row * e->info->n_layers + event->layer) * e->n_groups;
    if (new_item) memcpy(keep, slots, e->n_groups * sizeof *keep);
    for (uint32_t g = 0; g < event->n_groups; g++) keep[event->group_begin + g] = event->n_keep;
    e->items[item].n_keep_group = keep;
}

/* Sets the compaction item of each event; returns the number of items. The events of a layer's groups are adjacent. */
static uint32_t list_items(kvf_engine *e, uint32_t n_events) {
    uint32_t n_items = 0, row = UINT32_MAX, layer = UINT32_MAX;
    for (uint32_t i = 0; i < n_events; i++) {
        const kvf_event *event = &e->events[i];
        e->item_of_event[i] = UINT32_MAX;
        if (event->n_keep >= event_slots(e, event)) continue;
        bool new_item = event->row != row || event->layer != layer;
        row = event->row;
        layer = event->layer;
        if (new_item) e->items[n_items++] = (kvf_compact_item){e->seqs[row], layer, event->n_keep, NULL};
        e->item_of_event[i] = n_items - 1;
        if (event->n_groups) list_group(e, event, new_item, n_items - 1);
    }
    return n_items;
}

/* Too few blocks for shared tables: preempts the latest request and drops its events. */
static kvf_status make_room(kvf_engine *e, uint32_t *n_events, kvf_error *err) {
    kvf_step_item shed;
    kvf_status st = kvf_sched_shed(e->sched, &shed);
    if (st) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    kvf__live_preempted(e, shed.user, shed.swapped);
    uint32_t n = 0;
    for (uint32_t i = 0; i < *n_events; i++)
        if (e->rows[e->events[i].row]) e->events[n++] = e->events[i];
    *n_events = n;
    return KVF_OK;
}

/* Runs e->events. Rows of requests that were preempted for them are NULL afterwards. */
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

/* How many tables have an event together: those of a layer, or one if the layer's groups have different sizes. */
static uint32_t event_tables(const kvf_engine *e, uint32_t row) {
    return kvf_policy_group_sizes(e->policies, e->view.seq_index[row]) ? 1 : e->n_groups;
}

static kvf_event event_of(const kvf_engine *e, uint32_t row, uint32_t table, uint32_t n_tables, uint32_t n_keep,
                          kvf_event_kind kind) {
    kvf_event event = {row, table / e->n_groups, n_keep, (uint32_t)kind, 0, 0};
    if (n_tables < e->n_groups) {
        event.group_begin = table % e->n_groups;
        event.n_groups = 1;
    }
    return event;
}

/* Adds the due tables of a row to e->events. sums: as for run_events. */
static kvf_status collect(kvf_engine *e, uint32_t row, kvf_moment moment, kvf_event_kind kind, float *const *sums,
                          uint32_t *n_events, kvf_error *err) {
    kvf_policy_batch b = batch_base(e);
    uint32_t n_due = 0;
    if (sums) accumulators(e, sums, &b);
    kvf_status st = kvf_policy_due_tables(e->policies, e->stream, &b, row, moment, e->keep, &n_due, err);
    if (st || !n_due) return st;
    uint32_t step = event_tables(e, row);
    for (uint32_t t = 0; t < e->n_tables; t += step)
        if (e->keep[t]) e->events[(*n_events)++] = event_of(e, row, t, step, e->keep[t], kind);
    return KVF_OK;
}

/* The first events of a row, with the reservation that they need if blocks are shared. */
static kvf_status collect_first(kvf_engine *e, uint32_t row, kvf_moment moment, float *const *sums, uint32_t *n_events,
                                kvf_error *err) {
    uint32_t n = *n_events;
    kvf_status st = collect(e, row, moment, KVF_EVENT_PROMPT, sums, n_events, err);
    if (st) return st;
    bool any = *n_events > n;
    st = any ? kvf_sched_event_room(e->sched, e->rows[row]->id) : KVF_OK;
    return st ? kvf__fail(err, st, "%s", kvf_sched_error(e->sched)) : KVF_OK;
}

/* Before a token is appended: compacts requests whose prompt fitted the budget and that would now exceed it, and requests whose budget
 * has changed. */
kvf_status kvf__engine_overflow(kvf_engine *e, kvf_error *err) {
    uint32_t n = 0;
    for (kvf__live *r = e->first; r; r = r->next) {
        uint32_t index, next_pos;
        if (!r->seq || r->in_prompt || kvf_seq_index(e->manager, r->seq, &index)) continue;
        int changed = r->changed;
        r->changed = 0;
        if (!changed &&
            (r->idle || kvf_seq_next_pos(e->manager, r->seq, &next_pos) || kvf__live_segment_begins(r, next_pos)))
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
        if ((st = collect_first(e, row, KVF_BEFORE_APPEND, NULL, &n_events, err))) return st;
    if (n_events && (st = run_events(e, n_events, NULL, err))) return st;
    for (uint32_t row = 0; row < n; row++)
        if (e->rows[row] && kvf_policy_sizes(e->policies, e->view.seq_index[row]) &&
            (st = kvf_sched_resize(e->sched, e->rows[row]->id)))
            return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    return KVF_OK;
}

/* metric -> budget: computes the sizes of a row whose prompt has ended. */
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

/* Takes score pages for a row whose events are [begin, *n_events). Tables without an event get one that only stores their scores. */
static kvf_status take_scores(kvf_engine *e, uint32_t row, uint32_t begin, uint32_t *n_events, kvf_error *err) {
    kvf__live *r = e->rows[row];
    uint32_t step = event_tables(e, row), due = begin, n = 0;
    for (uint32_t t = 0; t < e->n_tables; t += step) {
        kvf_event event = event_of(e, row, t, step, 0, KVF_EVENT_PROMPT);
        const kvf_event *next = &e->events[due];
        bool is_due = due < *n_events && next->layer == event.layer && next->group_begin == event.group_begin;
        event.n_keep = is_due ? e->events[due++].n_keep : event_slots(e, &event);
        e->batch_events[n++] = event;
        for (uint32_t i = 0; i < step; i++) e->table_slots[t + i] = event.n_keep;
    }
    memcpy(e->events + begin, e->batch_events, n * sizeof *e->events);
    *n_events = begin + n;
    if (r->n_seen > r->n_prompt) return KVF_OK; /* it has them since its first prompt */
    kvf_status st;
    while ((st = kvf_seq_take_scores(e->manager, r->seq, e->table_slots)) == KVF_E_NO_BLOCKS) {
        if ((st = make_room(e, n_events, err))) return st;
        if (!e->rows[row]) return KVF_OK;
    }
    return st ? kvf__fail(err, st, "%s", kvf_manager_error(e->manager)) : KVF_OK;
}

/* metric -> budget -> due -> events with the prompt's sums, for all rows together. */
kvf_status kvf__engine_prompt_end(kvf_engine *e, uint32_t row_begin, uint32_t row_end, kvf_error *err) {
    uint32_t n_events = 0;
    kvf_status st;
    for (uint32_t row = row_begin; row < row_end; row++) {
        const kvf__live *r = e->rows[row];
        if (!r) continue;
        if (!(kvf_policy_needs(&r->policy) & ~(uint32_t)KVF_NEEDS_ROW)) e->prompt_sums[row] = NULL; /* others' */
        uint32_t begin = n_events;
        if ((st = find_sizes(e, row, err))) return st;
        if ((st = collect_first(e, row, KVF_AT_PROMPT_END, e->prompt_sums, &n_events, err))) return st;
        if (!kvf_policy_n_arrays(&r->policy) || !e->prompt_sums[row]) continue;
        if ((st = take_scores(e, row, begin, &n_events, err))) return st;
    }
    return n_events ? run_events(e, n_events, e->prompt_sums, err) : KVF_OK;
}

/* A layer whose first event is in decode gives its groups their sizes then. */
static void note_group_sizes(kvf_engine *e, uint32_t index) {
    const kvf_layer_size *groups = kvf_policy_group_sizes(e->policies, index);
    for (uint32_t t = 0; groups && t < e->n_tables; t++) e->table_slots[t] = groups[t].keep;
}
static bool group_sizes_differ(const kvf_engine *e, uint32_t index) {
    const kvf_layer_size *groups = kvf_policy_group_sizes(e->policies, index);
    bool differ = false;
    for (uint32_t t = 0; groups && t < e->n_tables; t++) differ |= e->table_slots[t] != groups[t].keep;
    return differ;
}

kvf_status kvf__engine_decode_events(kvf_engine *e, uint32_t n_decode, kvf_error *err) {
    kvf_status st;
    uint32_t n_events = 0;
    for (uint32_t row = 0; row < n_decode; row++) {
        kvf__live *r = e->rows[row];
        if (!r || !kvf_policy_evicts(&r->policy)) continue;
        uint32_t index = e->view.seq_index[row];
        int first = r->policy.defer_first_decode && !kvf_policy_sizes(e->policies, index);
        note_group_sizes(e, index);
        if (!first)
            st = collect(e, row, KVF_AFTER_STEP, KVF_EVENT_DECODE, NULL, &n_events, err);
        else
            st = collect_first(e, row, KVF_AFTER_STEP, NULL, &n_events, err);
        if (st) return st;
        e->out_rows[row] =
            (uint32_t)(first ? kvf_policy_sizes(e->policies, index) != NULL : group_sizes_differ(e, index));
    }
    st = n_events ? run_events(e, n_events, NULL, err) : KVF_OK;
    for (uint32_t row = 0; row < n_decode && !st; row++) {
        kvf__live *r = e->rows[row];
        if (!r || !kvf_policy_evicts(&r->policy) || !e->out_rows[row]) continue;
        if ((st = kvf_sched_resize(e->sched, r->id))) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    }
    return st;
}
