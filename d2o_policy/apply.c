/* apply: merges, moves the kept slots to their places, and carries the scores along.
 *
 * Slot order is canonical: a prompt event leaves ascending positions, a decode event moves the survivors of slots
 * >= n_keep into the victims' slots below, both ascending. order[i] is the old slot of new slot i.
 *
 * Fresh blocks: every kept slot is written to them, and the old blocks are only read. In place: evicted rows are merged into their
 * targets first (only evicted slots are read, so nothing that is read has been written), then slots move as order says. Both
 * round once, from the same numbers, and so give the same bits.
 */
#include <math.h>

#include "d2o_policy/pages.h"

#define MAX_WEIGHT 0x1p100 /* of a slot: far above any, and finite whatever the scores are */

typedef struct apply_job {
    kvf__call call;
    const kvf_plan *plan;
    bool fresh; /* this pass: tables with fresh blocks; an in-place table may hold blocks they still read */
} apply_job;

double kvf__merge_weights(kvf_merge merge, const float *u, const float *mass, uint32_t n, double *we) {
    double sum = 0.0;
    switch (merge) {
    case KVF_MERGE_PAPER:
        sum = exp(1.0);
        for (uint32_t i = 0; i < n; i++) sum += we[i] = exp((double)u[i]);
        for (uint32_t i = 0; i < n; i++) we[i] /= sum;
        return exp(1.0) / sum;
    case KVF_MERGE_AUTHORS: /* shrinks, and takes the sign of u: the weights do not add up to 1 */
        for (uint32_t i = 0; i < n; i++) we[i] = (double)u[i] / (1.0 + n);
        return 1.0 / (1.0 + n);
    case KVF_MERGE_MASS:
    case KVF_MERGE_ATTENTION:
        sum = (double)mass[n];
        for (uint32_t i = 0; i < n; i++) sum += (double)mass[i];
        for (uint32_t i = 0; i < n; i++) we[i] = (double)mass[i] / sum;
        return (double)mass[n] / sum;
    case KVF_MERGE_AVERAGE:
    case KVF_MERGE_NONE: break;
    }
    for (uint32_t i = 0; i < n; i++) we[i] = 1.0 / (1.0 + n);
    return 1.0 / (1.0 + n);
}

/* acc = the weighted sum of the receiver and its sources. If the weights add up to 1, differences are added instead, so that equal
 * values stay exactly as they are. */
static void fold_row(const kvf__fold *w, kvf__head old, bool keys, uint32_t target, uint32_t entry, double wc) {
    const kvf_pages *p = old.pages;
    uint32_t d = p->head_dim, i = 0;
    float *base = w->x.rows, *acc = base + d, *row = acc + d;
    bool convex = w->options->merge != KVF_MERGE_AUTHORS;
    w->kernels->load(p->dtype, keys ? kvf__k_row(&old, target) : kvf__v_row(&old, target), d, base);
    memset(acc, 0, d * sizeof *acc);
    w->kernels->blend(acc, NULL, base, convex ? 1.0f : (float)wc, d);
    for (uint32_t e = entry; e != KVF__NONE; e = w->x.next[e], i++) {
        uint32_t slot = w->entries[e].slot;
        w->kernels->load(p->dtype, keys ? kvf__k_row(&old, slot) : kvf__v_row(&old, slot), d, row);
        w->kernels->blend(acc, convex ? base : NULL, row, (float)w->x.weights[i], d);
    }
    uint32_t slot = kvf__fold_slot(w, target);
    void *out = keys ? kvf__k_row(&w->to, slot) : kvf__v_row(&w->to, slot);
    w->kernels->store(p->dtype, acc, d, out);
    w->kernels->load(p->dtype, out, d, row); /* norms are of what is stored */
    if (!keys)
        kvf__fold_norm(w, target, row);
    else if (p->key_norm)
        p->key_norm[kvf__slot_index(&w->to, slot)] = w->kernels->norm(row, d);
}

static float *score_of(const kvf__fold *w, uint32_t slot) {
    if (w->gathered) return &w->x.score[w->roles.score][slot];
    return kvf__score_at(&w->old, w->call->batch->scores, w->roles.score, slot);
}

/* What a query that saw the slot gave it on average. */
static double attention_of(const kvf__fold *w, uint32_t slot) {
    uint32_t seen = w->call->batch->view->next_pos[w->event->row] - w->old.pages->pos[kvf__slot_index(&w->old, slot)];
    return (double)*score_of(w, slot) / seen;
}

/* The masses of a merge by attention. Each source gets a share of the kept slot's weight: its own attention divided by the kept slot's.
 * A share above 1, which mostly comes from few queries, counts as 1; NaN and negative scores give a share in [0, 1] too. From then
 * on the kept slot stands for its sources, so its score grows in proportion to its weight. */
static double attention_masses(const kvf__fold *w, uint32_t entry, uint32_t target, double own) {
    double kept = attention_of(w, target), times = 1.0;
    uint32_t n = 0;
    for (uint32_t e = entry; e != KVF__NONE; e = w->x.next[e]) {
        double a = attention_of(w, w->entries[e].slot), share = a < kept ? fmin(fmax(a / kept, 0.0), 1.0) : 1.0;
        w->x.mass[n++] = (float)(own * share);
        times += share;
    }
    float *score = score_of(w, target);
    *score = (float)((double)*score * times);
    return fmin(own * times, MAX_WEIGHT);
}

/* Of the slots that are merged the largest score from the model counts. */
static void fold_score(const kvf__fold *w, uint32_t entry, uint32_t target) {
    bool repeat = kvf__policy_asks_repeat(w->options);
    float *plane = w->old.pages->score, most = repeat ? *score_of(w, target) : plane[kvf__slot_index(&w->old, target)];
    for (uint32_t e = entry; e != KVF__NONE; e = w->x.next[e]) {
        uint32_t slot = w->entries[e].slot; /* a number rather than NaN */
        most = fmaxf(most, repeat ? *score_of(w, slot) : plane[kvf__slot_index(&w->old, slot)]);
    }
    *(repeat ? score_of(w, target) : &plane[kvf__slot_index(&w->to, kvf__fold_slot(w, target))]) = most;
}

/* Merges the chain of entries that starts at entry into its target. */
static void fold(const kvf__fold *w, uint32_t entry) {
    const kvf_pages *p = w->old.pages;
    uint32_t target = w->entries[entry].target, n = 0;
    double mass = 0.0;
    for (uint32_t e = entry; e != KVF__NONE; e = w->x.next[e]) {
        w->x.u[n] = w->entries[e].u;
        w->x.mass[n] = p->weight ? p->weight[kvf__slot_index(&w->old, w->entries[e].slot)] : 1.0f;
        mass += (double)w->x.mass[n++];
    }
    w->x.mass[n] = p->weight ? p->weight[kvf__slot_index(&w->old, target)] : 1.0f;
    mass += (double)w->x.mass[n];
    if (w->options->merge == KVF_MERGE_ATTENTION) mass = attention_masses(w, entry, target, (double)w->x.mass[n]);
    double wc = kvf__merge_weights(w->options->merge, w->x.u, w->x.mass, n, w->x.weights);
    if (w->options->merge_keys) fold_row(w, w->old, true, target, entry, wc);
    fold_row(w, w->old, false, target, entry, wc);
    if (p->score || kvf__policy_asks_repeat(w->options)) fold_score(w, entry, target);
    if (kvf_policy_needs_weights(w->options)) {
        size_t i = kvf__slot_index(&w->to, kvf__fold_slot(w, target));
        p->weight[i] = (float)mass;
        p->bias[i] = logf((float)mass);
    }
}

/* Chains the merging entries of each target, ascending by position, and folds each chain once. */
static void fold_all(const kvf__fold *w) {
    if (kvf__policy_folds(w->options->ops)) {
        kvf__cam_fold(w);
        return;
    }
    for (uint32_t e = 0; e < w->n_evict; e++)
        if (w->entries[e].merge) w->x.first[w->entries[e].target] = KVF__NONE;
    for (uint32_t e = w->n_evict; e-- > 0;) {
        if (!w->entries[e].merge) continue;
        w->x.next[e] = w->x.first[w->entries[e].target];
        w->x.first[w->entries[e].target] = e;
    }
    for (uint32_t e = 0; e < w->n_evict; e++)
        if (w->entries[e].merge && w->x.first[w->entries[e].target] == e) fold(w, e);
}

static void order_by_position(const kvf__fold *w) {
    uint32_t n = 0;
    bool ascending = true;
    for (uint32_t slot = 0; slot < w->old.n_slots; slot++) {
        if (w->x.evicted[slot]) continue;
        w->x.sorted[n] = (uint64_t)w->old.pages->pos[kvf__slot_index(&w->old, slot)] << 32 | slot;
        ascending = ascending && (n == 0 || w->x.sorted[n - 1] < w->x.sorted[n]);
        n++;
    }
    if (!ascending) kvf__sort_u64(w->x.sorted, n);
    for (uint32_t i = 0; i < n; i++) w->x.order[i] = (uint32_t)w->x.sorted[i];
}

static void order_by_holes(const kvf__fold *w) {
    uint32_t survivor = w->n_keep;
    for (uint32_t slot = 0; slot < w->n_keep; slot++) {
        w->x.order[slot] = slot;
        if (!w->x.evicted[slot]) continue;
        while (w->x.evicted[survivor]) survivor++;
        w->x.order[slot] = survivor++;
    }
}

/* The moves that bring order about in place: pairs of source and target, KVF__NONE the temporary row. A target that
 * holds an evicted slot starts a chain; what is then left are cycles. */
static uint32_t plan_moves(const kvf__fold *w) {
    uint32_t n = 0, *m = w->x.moves;
    const uint32_t *order = w->x.order;
    for (uint32_t i = 0; i < w->n_keep; i++) w->x.done[i] = order[i] == i;
    for (uint32_t i = 0; i < w->n_keep; i++) {
        if (!w->x.evicted[i]) continue;
        for (uint32_t to = i; to < w->n_keep; to = order[to], n++) {
            m[2 * n] = order[to];
            m[2 * n + 1] = to;
            w->x.done[to] = 1;
        }
    }
    for (uint32_t i = 0; i < w->n_keep; i++) {
        if (w->x.done[i]) continue;
        m[2 * n] = i;
        m[2 * n++ + 1] = KVF__NONE;
        for (uint32_t to = i; !w->x.done[to]; to = order[to], n++) {
            m[2 * n] = order[to] == i ? KVF__NONE : order[to];
            m[2 * n + 1] = to;
            w->x.done[to] = 1;
        }
    }
    return n;
}

/* The per-slot arrays beside K and V; those that are not kept are NULL. */
static uint32_t metadata(const kvf_pages *p, uint32_t *arrays[5]) {
    uint32_t n = 0;
    arrays[n++] = p->pos;
    if (p->key_norm) arrays[n++] = (uint32_t *)(void *)p->key_norm;
    if (p->weight) arrays[n++] = (uint32_t *)(void *)p->weight;
    if (p->bias) arrays[n++] = (uint32_t *)(void *)p->bias;
    if (p->score) arrays[n++] = (uint32_t *)(void *)p->score;
    return n;
}

/* The same for a decode event, whose survivors move into holes and leave none behind. */
static uint32_t fill_holes(const kvf__fold *w) {
    uint32_t n = 0, survivor = w->n_keep, *m = w->x.moves;
    const uint8_t *evicted = w->x.evicted, *hole = evicted;
    while ((hole = memchr(hole, 1, (size_t)(evicted + w->n_keep - hole)))) {
        while (evicted[survivor]) survivor++;
        m[2 * n] = survivor++;
        m[2 * n++ + 1] = (uint32_t)(hole++ - evicted);
    }
    return n;
}

/* Scores of the pages, along moves without temporary rows. */
static void move_scores(const kvf__fold *w, const kvf_score_pages *scores, uint32_t n_arrays, uint32_t n) {
    for (uint32_t a = 0; a < n_arrays; a++)
        for (uint32_t i = 0; i < n; i++)
            *kvf__score_at(&w->old, scores, a, w->x.moves[2 * i + 1]) =
                *kvf__score_at(&w->old, scores, a, w->x.moves[2 * i]);
}

static void move_in_place(const kvf__fold *w, uint32_t n) {
    const kvf_pages *p = w->old.pages;
    size_t row_bytes = p->head_dim * kvf_dtype_bytes(p->dtype);
    uint32_t *arrays[5], n_arrays = metadata(p, arrays);
    for (int keys = 0; keys < 2; keys++)
        for (uint32_t i = 0; i < n; i++) {
            uint32_t src = w->x.moves[2 * i], dst = w->x.moves[2 * i + 1];
            void *from = src == KVF__NONE ? w->x.temp_row : keys ? kvf__k_row(&w->old, src) : kvf__v_row(&w->old, src);
            void *to = dst == KVF__NONE ? w->x.temp_row : keys ? kvf__k_row(&w->old, dst) : kvf__v_row(&w->old, dst);
            memcpy(to, from, row_bytes);
        }
    for (uint32_t a = 0; a < n_arrays; a++) {
        unsigned char temp[4], *base = (unsigned char *)arrays[a];
        for (uint32_t i = 0; i < n; i++) {
            uint32_t src = w->x.moves[2 * i], dst = w->x.moves[2 * i + 1];
            const unsigned char *from = src == KVF__NONE ? temp : base + 4 * kvf__slot_index(&w->old, src);
            memcpy(dst == KVF__NONE ? temp : base + 4 * kvf__slot_index(&w->old, dst), from, 4);
        }
    }
}

static void copy_to_fresh(const kvf__fold *w) {
    const kvf_pages *p = w->old.pages;
    size_t row_bytes = p->head_dim * kvf_dtype_bytes(p->dtype);
    uint32_t *arrays[5], n_arrays = metadata(p, arrays);
    for (uint32_t i = 0; i < w->n_keep; i++) {
        uint32_t src = w->x.order[i];
        w->x.slots[src] = i;
        memcpy(kvf__k_row(&w->to, i), kvf__k_row(&w->old, src), row_bytes);
        memcpy(kvf__v_row(&w->to, i), kvf__v_row(&w->old, src), row_bytes);
        for (uint32_t a = 0; a < n_arrays; a++)
            memcpy((unsigned char *)arrays[a] + 4 * kvf__slot_index(&w->to, i),
                   (unsigned char *)arrays[a] + 4 * kvf__slot_index(&w->old, src), 4);
    }
}

/* The fresh blocks of an event's table, NULL when it is written in place. */
static const uint32_t *fresh_row(const kvf_policy_batch *b, uint32_t event, uint32_t kv_head) {
    uint32_t item = b->compaction_item ? b->compaction_item[event] : event;
    if (!b->compaction || item == UINT32_MAX) return NULL;
    return b->compaction->dst_row[(size_t)item * b->compaction->n_groups + kv_head / b->view->heads_per_group];
}

static void write_scores(const kvf_policy_batch *b, const kvf__fold *w) {
    for (uint32_t a = 0; a < w->roles.n; a++)
        for (uint32_t i = 0; i < w->n_keep; i++)
            *kvf__score_at(&w->old, b->scores, a, i) = w->x.score[a][w->x.order[i]];
}

/* A decode event in place: only what moves is touched. */
static void apply_holes(const kvf_policy_batch *b, const kvf__fold *w) {
    const kvf__policy_seq *s = kvf__event_seq(w->call, w->event);
    uint32_t slot = s->scored[(size_t)w->event->layer * w->call->state->config.n_kv_heads + w->kv_head];
    for (; kvf__policy_asks_repeat(w->options) && slot < w->old.n_slots; slot++) *score_of(w, slot) = INFINITY;
    fold_all(w);
    uint32_t n_moves = fill_holes(w);
    move_in_place(w, n_moves);
    move_scores(w, b->scores, w->roles.n, n_moves);
}

static void apply_head(void *ctx, uint32_t item, uint32_t thread) {
    const apply_job *job = ctx;
    const kvf__call *c = &job->call;
    const kvf_policy_batch *b = c->batch;
    uint32_t n_heads = c->state->config.n_kv_heads, kv_head = item % n_heads, event = item / n_heads;
    const kvf_plan_event *pe = &job->plan->events[event];
    const kvf_event *e = &pe->event;
    if (kvf__event_lacks(b->view, e, kv_head)) return;
    const uint32_t *dst = pe->n_evict ? fresh_row(b, event, kv_head) : NULL;
    bool prompt = kvf__of_prompt(b, e);
    if ((dst != NULL) != job->fresh || (pe->n_evict == 0 && !prompt)) return;
    const kvf_policy_options *o = &kvf__event_seq(c, e)->options;
    kvf__head h = kvf__head_of(b->view, b->pages, e->row, e->layer, kv_head);
    kvf__fold w = {.kernels = c->kernels,
                   .options = o,
                   .call = c,
                   .event = e,
                   .kv_head = kv_head,
                   .roles = kvf__score_roles(o),
                   .entries = job->plan->entries + kvf__entries_at(b->view, pe, kv_head),
                   .n_evict = pe->n_evict,
                   .n_keep = e->n_keep,
                   .old = h,
                   .to = h,
                   .fresh = dst != NULL,
                   .gathered = dst || prompt || e->kind == KVF_EVENT_PROMPT,
                   .x = kvf__call_scratch(c, thread)};
    if (dst) w.to.rows = dst;
    memset(w.x.evicted, 0, h.n_slots);
    for (uint32_t i = 0; i < pe->n_evict; i++) w.x.evicted[w.entries[i].slot] = 1;
    if (!w.gathered) {
        apply_holes(b, &w);
        return;
    }
    kvf__event_scores(c, e, kv_head, &w.x);
    if (pe->n_evict && e->kind == KVF_EVENT_PROMPT)
        order_by_position(&w);
    else
        order_by_holes(&w);
    if (pe->n_evict && dst) {
        copy_to_fresh(&w);
        fold_all(&w);
    } else if (pe->n_evict) {
        fold_all(&w);
        move_in_place(&w, plan_moves(&w));
    }
    write_scores(b, &w);
}

static kvf_status check_compaction(const kvf_policy_batch *b, uint32_t i, kvf_error *err) {
    const kvf_event *e = &b->events[i];
    uint32_t item = b->compaction_item ? b->compaction_item[i] : i;
    if (!b->compaction || item == UINT32_MAX) return KVF_OK;
    const kvf_compaction *c = b->compaction;
    kvf__event_part part = kvf__part_of(b->view, e);
    uint32_t begin = part.head_begin / b->view->heads_per_group, end = begin + part.n_heads / b->view->heads_per_group;
    bool ours = item < c->n_items && c->n_groups == b->view->n_groups;
    if (ours && c->items) ours = c->items[item].layer == e->layer;
    for (uint32_t g = begin; ours && c->items && g < end; g++) {
        const uint32_t *n_keep = c->items[item].n_keep_group;
        ours = (n_keep ? n_keep[g] : c->items[item].n_keep) == e->n_keep;
    }
    if (!ours)
        return kvf__fail(err, KVF_E_INVALID, "apply: event %u: item %u of the compaction is not this event's", i, item);
    for (uint32_t g = begin; g < end; g++) {
        const uint32_t *row = c->dst_row[(size_t)item * c->n_groups + g];
        for (uint32_t k = 0; row && k < kvf__ceil_div(e->n_keep, b->view->block_size); k++)
            if (row[k] >= b->pages->n_blocks)
                return kvf__fail(err, KVF_E_INVALID, "apply: event %u: block %u: the pages have %u", i, row[k],
                                 b->pages->n_blocks);
    }
    return KVF_OK;
}

static kvf_status check_apply(const kvf__call *c, const kvf_plan *plan, kvf_error *err) {
    const kvf_policy_batch *b = c->batch;
    for (uint32_t i = 0; i < plan->n_events; i++) {
        const kvf_plan_event *pe = &plan->events[i];
        const kvf_event *e = &pe->event;
        const kvf_policy_options *o = &kvf__event_seq(c, e)->options;
        kvf_status st = KVF_OK;
        if (pe->n_evict && kvf__policy_has_tau(o) &&
            isnan(plan->tau[(size_t)i * plan->n_kv_heads + kvf__part_of(b->view, e).head_begin]))
            return kvf__fail(err, KVF_E_STATE, "apply: event %u has no threshold: gate the plan first", i);
        if (kvf_policy_needs_weights(o) && pe->n_evict && (!b->pages->weight || !b->pages->bias))
            return kvf__fail(err, KVF_E_INVALID,
                             "merge mass or attention: pages.weight and pages.bias must be set, or use another merge");
        if (pe->n_evict) st = check_compaction(b, i, err);
        uint32_t n_arrays = kvf_policy_n_arrays(o);
        if (!st && n_arrays && (pe->n_evict || kvf__of_prompt(b, e)))
            st = kvf__score_pages_check(b, n_arrays, e, e->n_keep, err);
        if (st) return st;
    }
    return KVF_OK;
}

/* What the event leaves in the state: tau, the counters, how many slots have scores. */
static void commit(const kvf__call *c, const kvf_plan *plan, uint32_t i) {
    const kvf_plan_event *pe = &plan->events[i];
    const kvf_event *e = &pe->event;
    kvf__policy_seq *s = kvf__event_seq(c, e);
    kvf__event_part part = kvf__part_of(c->batch->view, e);
    size_t first = (size_t)e->layer * plan->n_kv_heads + part.head_begin;
    bool prompt = kvf__of_prompt(c->batch, e), scores = kvf_policy_n_arrays(&s->options) && (pe->n_evict || prompt);
    for (uint32_t h = 0; h < part.n_heads && scores; h++) s->scored[first + h] = e->n_keep;
    if (prompt) s->rows[e->layer] = 0; /* what was collected is in the score */
    if (pe->n_evict == 0) return;
    if (kvf__policy_has_tau(&s->options))
        memcpy(s->tau + first, plan->tau + (size_t)i * plan->n_kv_heads + part.head_begin,
               part.n_heads * sizeof *s->tau);
    uint64_t merged = 0, all = (uint64_t)pe->n_evict * part.n_heads;
    for (uint64_t k = 0; k < all; k++) merged += plan->entries[pe->entry_begin + k].merge;
    s->counts.merged += merged;
    s->counts.dropped += all - merged;
    s->counts.n_events++;
}

kvf_status kvf__policy_apply(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                             const kvf_plan *plan, kvf_error *err) {
    apply_job job = {.plan = plan};
    kvf_status st = kvf__batch_check(state, stream, batch, "apply", &job.call, err);
    if (!st) st = kvf__plan_check(batch, plan, "apply", err);
    if (!st) st = check_apply(&job.call, plan, err);
    if (st) return st;
    uint32_t n_items = plan->n_events * plan->n_kv_heads;
    job.fresh = true;
    if (batch->compaction) kvf__stream_for(stream, n_items, apply_head, &job);
    job.fresh = false;
    kvf__stream_for(stream, n_items, apply_head, &job);
    for (uint32_t i = 0; i < plan->n_events; i++) commit(&job.call, plan, i);
    return KVF_OK;
}
