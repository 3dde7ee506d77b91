/* The policy driver: all that a moment needs, from the metric to the commit (kvfold/events.h). */
#include "d2o_policy/events.h"

/* ---- Create ------------------------------------------------------------------------------------------- */

static bool carve(kvf_events *x, kvf__slab *s) {
    size_t rows = x->config.max_rows, n = rows * x->n_tables;
    const kvf_policy_state_config *c = &x->config.policies->config;
    x->values = kvf__slab_take(s, (size_t)c->n_layers * c->n_q_heads_total, sizeof *x->values);
    x->events = kvf__slab_take(s, n, sizeof *x->events);
    x->batch_events = kvf__slab_take(s, n, sizeof *x->batch_events);
    x->items = kvf__slab_take(s, n, sizeof *x->items);
    x->item_of_event = kvf__slab_take(s, n, sizeof *x->item_of_event);
    x->batch_items = kvf__slab_take(s, n, sizeof *x->batch_items);
    x->group_keep = kvf__slab_take(s, n, sizeof *x->group_keep);
    x->keep = kvf__slab_take(s, x->n_tables, sizeof *x->keep);
    x->table_slots = kvf__slab_take(s, x->n_tables, sizeof *x->table_slots);
    x->before = kvf__slab_take(s, rows, sizeof *x->before);
    x->dropped = kvf__slab_take(s, rows, sizeof *x->dropped);
    x->workspace = kvf__slab_take(s, x->workspace_bytes, 1);
    return !s->bad;
}

/* Manager and policies must be made for the same tables. */
static kvf_status read_config(kvf_events *x, const kvf_events_config *config, kvf_error *err) {
    kvf_status st = kvf__config_read(&x->config, sizeof x->config, config, "kvf_events_config", err);
    if (st || (st = kvf__allocator_resolve(&x->config.allocator, &x->allocator, err))) return st;
    const kvf_manager_config *m = kvf_manager_get_config(x->config.manager);
    if (!m || !x->config.policies) return kvf__fail(err, KVF_E_INVALID, "%s: is NULL", m ? "policies" : "manager");
    const kvf_policy_state_config *c = &x->config.policies->config;
    if (m->n_layers != c->n_layers || m->n_kv_heads != c->n_kv_heads || m->block_size != c->block_size ||
        m->max_slots > c->max_slots || m->max_seqs > c->max_seqs)
        return kvf__fail(
            err, KVF_E_INVALID,
            "policies: made for %u layers of %u KV heads, blocks of %u, %u slots, %u sequences: the manager has "
            "%u, %u, %u, %u, %u",
            c->n_layers, c->n_kv_heads, c->block_size, c->max_slots, c->max_seqs, m->n_layers, m->n_kv_heads,
            m->block_size, m->max_slots, m->max_seqs);
    if (!x->config.max_rows) x->config.max_rows = m->max_seqs;
    if (x->config.max_rows > m->max_seqs)
        return kvf__fail_field(err, KVF_E_INVALID, "max_rows", x->config.max_rows, 0,
                               "must be at most the manager's max_seqs %u", m->max_seqs);
    x->n_layers = m->n_layers;
    x->heads_per_group = m->heads_per_group;
    x->n_groups = m->n_kv_heads / m->heads_per_group;
    x->n_tables = x->n_layers * x->n_groups;
    uint64_t one_table = (uint64_t)m->max_slots * m->n_kv_heads, entries = x->config.plan_entries;
    if (!entries) entries = (uint64_t)1 << 20;
    x->config.plan_entries = KVF__MAX(entries, one_table);
    return kvf_policy_workspace_bytes(kvf_stream_n_threads(x->config.stream), c->head_dim, c->n_kv_heads, m->max_slots,
                                      &x->workspace_bytes);
}

kvf_status kvf_events_create(const kvf_events_config *config, kvf_events **out, kvf_error *err) {
    kvf_events x = {0};
    if (!out) return kvf__fail(err, KVF_E_INVALID, "kvf_events_create: out is NULL");
    kvf_status st = read_config(&x, config, err);
    if (st) return st;
    kvf__slab s = {0};
    (void)kvf__slab_take(&s, 1, sizeof x);
    if (!carve(&x, &s))
        return kvf__fail_field(err, KVF_E_OVERFLOW, "max_rows", x.config.max_rows, 0, "%u tables: sizes wrap",
                               x.n_tables);
    x.bytes = s.used;
    s = (kvf__slab){.base = kvf__alloc(&x.allocator, x.bytes)};
    if (!s.base) return kvf__fail(err, KVF_E_NO_MEMORY, "policy driver: %zu bytes could not be allocated", x.bytes);
    kvf_events *self = kvf__slab_take(&s, 1, sizeof *self);
    (void)carve(&x, &s);
    *self = x;
    uint32_t n_heads = x.config.policies->config.n_kv_heads;
    st = kvf_plan_create(&x.allocator, n_heads, KVF__MAX(x.n_layers, 1024u), x.config.plan_entries, &self->plan, err);
    if (st)
        kvf_events_destroy(self);
    else
        *out = self;
    return st;
}

void kvf_events_destroy(kvf_events *events) {
    if (!events) return;
    kvf_allocator a = events->allocator;
    kvf_plan_destroy(events->plan);
    kvf__free(&a, events, events->bytes);
}

/* ---- Rows ---------------------------------------------------------------------------------------------- */

static kvf__policy_seq *seq_of(const kvf_events *x, uint32_t row) {
    return kvf__policy_seq_get(x->config.policies, x->rows->view->seq_index[row]);
}

/* Whether the row still takes part. */
static bool lives(const kvf_events *x, uint32_t row) { return x->rows->seqs[row] && !x->dropped[row]; }

static void note(const kvf_events *x, uint32_t row, uint8_t flag) {
    if (x->rows->changed) x->rows->changed[row] |= flag;
}

static kvf_policy_batch batch_of(const kvf_events *x) {
    const kvf_moment_rows *r = x->rows;
    kvf_policy_batch b = {.struct_size = sizeof b,
                          .view = r->view,
                          .pages = r->pages,
                          .scores = r->scores,
                          .workspace = x->workspace,
                          .workspace_bytes = x->workspace_bytes,
                          .path = x->config.path};
    if (r->moment != KVF_AT_PROMPT_END) return b;
    b.prompt_sums = r->prompt_sums;
    b.prompt_stride = r->prompt_stride;
    b.prompt_last = r->prompt_last;
    b.prompt_squares = r->prompt_squares;
    b.prompt_logprobs = r->prompt_logprobs;
    return b;
}

/* Slots of an event's tables, which all have equally many; and the number of KV heads. */
static uint32_t event_slots(const kvf_events *x, const kvf_event *e) {
    uint32_t group = e->n_groups ? e->group_begin : 0;
    return x->rows->view->n_slots[kvf__view_table(x->rows->view, e->row, e->layer, group)];
}
static uint32_t event_heads(const kvf_events *x, const kvf_event *e) {
    return (e->n_groups ? e->n_groups : x->n_groups) * x->heads_per_group;
}

static void remember(kvf__before *b, const kvf__policy_seq *s) {
    *b = (kvf__before){s->budgeted, s->sized,  s->deferred, s->changed, s->has_density,
                       s->n_prompt, s->budget, s->lo,       s->counts};
}
static void restore(const kvf__before *b, kvf__policy_seq *s) {
    s->budgeted = b->budgeted;
    s->sized = b->sized;
    s->deferred = b->deferred;
    s->changed = b->changed;
    s->has_density = b->has_density;
    s->n_prompt = b->n_prompt;
    s->budget = b->budget;
    s->lo = b->lo;
    s->counts = b->counts;
}

/* ---- Room ------------------------------------------------------------------------------------------------ */

/* Blocks are missing: lets the caller free some, and drops the events of rows that this ends. */
static kvf_status make_room(kvf_events *x) {
    const kvf_moment_rows *r = x->rows;
    if (!x->config.make_room) return KVF_E_NO_BLOCKS;
    kvf_status st = x->config.make_room(x->config.ctx, x->dropped, x->err);
    uint32_t n = 0;
    for (uint32_t i = 0; i < x->n_events; i++)
        if (lives(x, x->events[i].row)) x->events[n++] = x->events[i];
    x->n_events = n;
    for (uint32_t row = r->row_begin; row < r->row_end; row++)
        if (x->dropped[row]) note(x, row, KVF_ROW_DROPPED);
    return st;
}

/* ---- Events -------------------------------------------------------------------------------------------- */

/* Adds an event of some head groups to its layer's compaction item. Groups without an event so far keep their slots. */
static void list_group(kvf_events *x, const kvf_event *e, bool new_item, uint32_t item) {
    uint32_t *keep = x->group_keep + (size_t)item * x->n_groups;
    const uint32_t *slots = x->rows->view->n_slots + kvf__view_table(x->rows->view, e->row, e->layer, 0);
    if (new_item) memcpy(keep, slots, x->n_groups * sizeof *keep);
    for (uint32_t g = 0; g < e->n_groups; g++) keep[e->group_begin + g] = e->n_keep;
    x->items[item].n_keep_group = keep;
}

/* Sets the compaction item of each event; returns the number of items. The events of a layer's groups are adjacent. */
static uint32_t list_items(kvf_events *x) {
    uint32_t n_items = 0, row = UINT32_MAX, layer = UINT32_MAX;
    for (uint32_t i = 0; i < x->n_events; i++) {
        const kvf_event *e = &x->events[i];
        x->item_of_event[i] = UINT32_MAX;
        if (e->n_keep >= event_slots(x, e)) continue;
        bool new_item = e->row != row || e->layer != layer;
        row = e->row;
        layer = e->layer;
        if (new_item) x->items[n_items++] = (kvf_compact_item){x->rows->seqs[row], layer, e->n_keep, NULL};
        x->item_of_event[i] = n_items - 1;
        if (e->n_groups) list_group(x, e, new_item, n_items - 1);
    }
    return n_items;
}

/* One batch of events of one policy. */
static kvf_status run_batch(kvf_events *x, kvf_policy_batch *b) {
    kvf_policy_state *s = x->config.policies;
    kvf_status st = kvf_policy_match(s, x->config.stream, b, x->plan, x->err);
    if (!st && x->plan->n_reduce && x->config.reduce)
        st = x->config.reduce(x->config.ctx, x->plan->reduce, x->plan->n_reduce, x->err);
    if (!st) st = kvf_policy_gate(s, x->config.stream, b, x->plan, x->err);
    if (!st) st = kvf_policy_apply(s, x->config.stream, b, x->plan, x->err);
    b->n_events = 0;
    return st;
}

/* Runs the events in their order, in batches that the plan can hold. If several tables share a block, all but the last in this order
 * have fresh blocks (kvf_compact_begin), and within a batch apply writes to fresh blocks first. So a shared block has been read
 * by all before its last owner writes to it, however the batches are cut. */
static kvf_status run_batches(kvf_events *x, const kvf_compaction *compaction) {
    kvf_policy_batch b = batch_of(x);
    b.events = x->batch_events;
    b.compaction = compaction;
    b.compaction_item = x->batch_items;
    const kvf_policy_ops *ops = NULL;
    uint64_t entries = 0;
    for (uint32_t i = 0; i < x->n_events; i++) {
        const kvf_event *e = &x->events[i];
        const kvf_policy_ops *next = seq_of(x, e->row)->options.ops;
        uint64_t more = (uint64_t)(event_slots(x, e) - e->n_keep) * event_heads(x, e);
        if (b.n_events &&
            (next != ops || entries + more > x->plan->entry_capacity || b.n_events == x->plan->event_capacity)) {
            kvf_status st = run_batch(x, &b);
            if (st) return st;
            entries = 0;
        }
        ops = next;
        entries += more;
        x->batch_events[b.n_events] = *e;
        x->batch_items[b.n_events++] = x->item_of_event[i];
    }
    return b.n_events ? run_batch(x, &b) : KVF_OK;
}

static kvf_status run_events(kvf_events *x) {
    kvf_manager *m = x->config.manager;
    kvf_compaction compaction = {0};
    kvf_status st = KVF_OK;
    uint32_t n_items = list_items(x);
    while (n_items && (st = kvf_compact_begin(m, x->items, n_items, &compaction)) == KVF_E_NO_BLOCKS) {
        if ((st = make_room(x))) break;
        n_items = list_items(x);
    }
    if (st == KVF_E_NO_BLOCKS) return kvf__fail(x->err, st, "compaction: %s", kvf_manager_error(m)->text);
    if (st) return x->err && x->err->text[0] ? st : kvf__fail_as(x->err, st, kvf_manager_error(m));
    if (x->rows->pages && x->n_events) st = run_batches(x, &compaction);
    if (!n_items) return st;
    if (st) {
        kvf_status left = kvf_compact_cancel(m);
        return left ? left : st;
    }
    st = kvf_compact_commit(m);
    return st ? kvf__fail_as(x->err, st, kvf_manager_error(m)) : KVF_OK;
}

/* ---- One row ------------------------------------------------------------------------------------------- */

/* How many tables have an event together: those of a layer, or one if the layer's groups have different sizes. */
static uint32_t event_tables(const kvf_events *x, uint32_t row) {
    return kvf_policy_group_sizes(x->config.policies, x->rows->view->seq_index[row]) ? 1 : x->n_groups;
}

static kvf_event event_of(const kvf_events *x, uint32_t row, uint32_t table, uint32_t n_tables, uint32_t n_keep,
                          kvf_event_kind kind) {
    kvf_event e = {row, table / x->n_groups, n_keep, (uint32_t)kind, 0, 0};
    if (n_tables < x->n_groups) {
        e.group_begin = table % x->n_groups;
        e.n_groups = 1;
    }
    return e;
}

static void take_group_sizes(kvf_events *x, const kvf__policy_seq *s) {
    for (uint32_t t = 0; t < x->n_tables; t++) x->table_slots[t] = s->group_sizes[t].keep;
}
static bool group_sizes_differ(const kvf_events *x, const kvf__policy_seq *s) {
    for (uint32_t t = 0; t < x->n_tables; t++)
        if (x->table_slots[t] != s->group_sizes[t].keep) return true;
    return false;
}

/* The layers' sizes at a prompt's end. Their weights come from the first prompt, not from later segments. */
static kvf_status find_sizes(kvf_events *x, uint32_t row) {
    const kvf_moment_rows *r = x->rows;
    const kvf__policy_seq *s = seq_of(x, row);
    const kvf_policy_state_config *c = &x->config.policies->config;
    size_t n = (size_t)c->n_layers * c->n_q_heads_total;
    bool first = !s->budgeted && kvf_policy_has_metric(&s->options), given = r->prompt_sums && r->prompt_sums[row];
    kvf_policy_batch b = batch_of(x);
    kvf_status st = KVF_OK;
    if (first && !r->pages) {
        memset(x->values, 0, n * sizeof *x->values);
        if (x->config.metric) st = x->config.metric(x->config.ctx, row, x->values, x->err);
    } else if (first && given) {
        st = kvf_policy_metric(x->config.policies, x->config.stream, &b, row, r->n_prompt[row], x->values, x->err);
    } else {
        first = false;
    }
    if (!st && first && x->config.reduce) st = x->config.reduce(x->config.ctx, x->values, n, x->err);
    if (st) return st;
    return kvf_policy_budget(x->config.policies, r->view->seq_index[row], first ? x->values : NULL, r->n_prompt[row],
                             x->err);
}

/* Adds the row's due tables to the events. The first events of a row, in whole prompts or what amounts to one, reserve. */
static kvf_status collect(kvf_events *x, uint32_t row) {
    kvf__policy_seq *s = seq_of(x, row);
    kvf_policy_batch b = batch_of(x);
    uint32_t n_due = 0;
    bool adapts = kvf__groups_adapt(x->config.policies, s), was_sized = s->sized, was_changed = s->changed;
    kvf_event_kind kind = x->rows->moment == KVF_AFTER_STEP && was_sized ? KVF_EVENT_DECODE : KVF_EVENT_PROMPT;
    if (adapts) take_group_sizes(x, s);
    const kvf__ranks ranks = {x->config.reduce, x->config.ctx};
    kvf_status st = kvf__policy_due(x->config.policies, x->config.stream, &b, row, x->rows->moment, x->keep, &n_due,
                                    &ranks, x->err);
    if (st) return st;
    bool changed = x->rows->moment == KVF_AT_PROMPT_END || (was_changed && x->rows->moment == KVF_BEFORE_APPEND);
    s->resized |= !was_sized || changed || (adapts && group_sizes_differ(x, s));
    if (s->sized && s->resized) note(x, row, KVF_ROW_RESIZED);
    if (!n_due) return KVF_OK;
    uint32_t step = event_tables(x, row);
    for (uint32_t t = 0; t < x->n_tables; t += step)
        if (x->keep[t]) x->events[x->n_events++] = event_of(x, row, t, step, x->keep[t], kind);
    if (kind == KVF_EVENT_DECODE || !x->config.reserve) return KVF_OK;
    return x->config.reserve(x->config.ctx, row, x->err);
}

/* Takes score pages for a row whose events begin at `begin`. Tables without an event get one that only stores their scores. */
static kvf_status take_scores(kvf_events *x, uint32_t row, uint32_t begin) {
    uint32_t step = event_tables(x, row), due = begin, n = 0;
    for (uint32_t t = 0; t < x->n_tables; t += step) {
        kvf_event e = event_of(x, row, t, step, 0, KVF_EVENT_PROMPT);
        const kvf_event *next = &x->events[due];
        bool is_due = due < x->n_events && next->layer == e.layer && next->group_begin == e.group_begin;
        e.n_keep = is_due ? x->events[due++].n_keep : event_slots(x, &e);
        x->batch_events[n++] = e;
        for (uint32_t i = 0; i < step; i++) x->table_slots[t + i] = e.n_keep;
    }
    memcpy(x->events + begin, x->batch_events, n * sizeof *x->events);
    x->n_events = begin + n;
    kvf__policy_seq *s = seq_of(x, row);
    kvf_status st;
    if (s->has_pages) return KVF_OK;
    while ((st = kvf_seq_take_scores(x->config.manager, x->rows->seqs[row], x->table_slots)) == KVF_E_NO_BLOCKS) {
        if ((st = make_room(x))) break;
        if (!lives(x, row)) return KVF_OK;
    }
    if (st == KVF_OK) s->has_pages = true;
    if (!st || (st != KVF_E_NO_BLOCKS && x->err && x->err->text[0])) return st;
    return kvf__fail(x->err, st, "score pages: %s", kvf_manager_error(x->config.manager)->text);
}

/* Whether a prompt's end turns the row's sums into scores. */
static bool stores_scores(const kvf_events *x, uint32_t row) {
    const kvf_moment_rows *r = x->rows;
    if (!kvf_policy_n_arrays(&seq_of(x, row)->options)) return false;
    return !r->pages || (r->prompt_sums && r->prompt_sums[row]) || (r->prompt_last && r->prompt_last[row]) ||
           (r->prompt_squares && r->prompt_squares[row]) || (r->prompt_logprobs && r->prompt_logprobs[row]);
}

static kvf_status run_row(kvf_events *x, uint32_t row) {
    uint32_t begin = x->n_events;
    bool prompt = x->rows->moment == KVF_AT_PROMPT_END;
    kvf_status st = prompt ? find_sizes(x, row) : KVF_OK;
    if (!st) st = collect(x, row);
    return !st && prompt && stores_scores(x, row) ? take_scores(x, row, begin) : st;
}

/* ---- A moment -------------------------------------------------------------------------------------------- */

static kvf_status check_rows(const kvf_events *x, kvf_error *err) {
    const kvf_moment_rows *r = x->rows;
    const kvf_view *v = r->view;
    if (!r->seqs) return kvf__fail(err, KVF_E_INVALID, "kvf_moment_rows: seqs is NULL");
    if (v->n_layers != x->n_layers || v->n_groups != x->n_groups)
        return kvf__fail(err, KVF_E_INVALID, "view: %u layers of %u groups: the manager has %u of %u", v->n_layers,
                         v->n_groups, x->n_layers, x->n_groups);
    if (r->row_begin > r->row_end || r->row_end > v->n_seqs || v->n_seqs > x->config.max_rows)
        return kvf__fail(err, KVF_E_INVALID, "rows [%u, %u): the view has %u, max_rows is %u", r->row_begin, r->row_end,
                         v->n_seqs, x->config.max_rows);
    if ((unsigned)r->moment > KVF_AFTER_STEP)
        return kvf__fail(err, KVF_E_INVALID, "moment %d: there is none", (int)r->moment);
    if (r->moment == KVF_AT_PROMPT_END && !r->n_prompt)
        return kvf__fail(err, KVF_E_INVALID, "kvf_moment_rows: n_prompt is NULL at a prompt's end");
    for (uint32_t row = r->row_begin; row < r->row_end; row++)
        if (r->seqs[row] && !seq_of(x, row))
            return kvf__fail(err, KVF_E_STALE,
                             "row %u: seq %u is not open in the policies: kvf_policy_open comes first", row,
                             v->seq_index[row]);
    return KVF_OK;
}

kvf_status kvf_events_run(kvf_events *events, const kvf_moment_rows *rows, kvf_error *err) {
    kvf_moment_rows r;
    kvf_error own = {.text = ""};
    if (!events) return kvf__fail(err, KVF_E_INVALID, "kvf_events_run: events is NULL");
    kvf_status st = kvf__config_read(&r, sizeof r, rows, "kvf_moment_rows", err);
    if (st) return st;
    kvf_events *x = events;
    kvf__batch copy;
    const kvf_policy_batch given = {.struct_size = sizeof given, .view = r.view, .pages = r.pages, .scores = r.scores};
    if ((st = kvf__batch_read(&copy, &given, "kvf_moment_rows", err))) return st;
    r.view = copy.b.view;
    r.pages = copy.b.pages;
    r.scores = copy.b.scores;
    x->rows = &r;
    x->err = err ? err : &own;
    x->n_events = 0;
    if ((st = check_rows(x, err))) return st;
    x->err->text[0] = '\0';
    memset(x->dropped, 0, r.view->n_seqs);
    for (uint32_t row = r.row_begin; row < r.row_end; row++) {
        if (r.changed) r.changed[row] = 0;
        if (r.seqs[row]) remember(&x->before[row], seq_of(x, row));
    }
    for (uint32_t row = r.row_begin; row < r.row_end && !st; row++)
        if (lives(x, row)) st = run_row(x, row);
    if (!st && x->n_events) st = run_events(x);
    for (uint32_t row = r.row_begin; row < r.row_end; row++) {
        if (!lives(x, row)) continue;
        kvf__policy_seq *s = seq_of(x, row);
        if (st) {
            restore(&x->before[row], s);
            if (r.changed) r.changed[row] = 0;
        } else {
            s->resized = false;
        }
    }
    return st;
}
