/* match: which slots an event evicts, and the nearest kept key of each (README.md, token level and merging). */
#include <math.h>

#include "d2o_policy/pages.h"

uint64_t kvf__select_key(float score, uint32_t pos, uint32_t window_begin, uint32_t sinks) {
    /* bit 63: neither in the window nor a sink; bits 62-31: score, falling; bits 30-0: position. */
    if (pos >= window_begin) return KVF__MAX_POSITION - pos;
    if (pos < sinks) return (1ull << 31) | pos;
    uint32_t bits, rank = 0; /* rank rises with the score; NaN stays at 0, below minus infinity */
    if (!isnan(score)) {
        score += 0.0f; /* -0 and 0 are a tie */
        memcpy(&bits, &score, sizeof bits);
        rank = bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    return (1ull << 63) | ((uint64_t)~rank << 31) | pos;
}

/* A heap of the n_evict highest keys so far, the lowest of them on top. */
static void sift_down(const uint64_t *keys, uint32_t *heap, uint32_t n, uint32_t hole, uint32_t slot) {
    for (uint32_t child; (child = 2 * hole + 1) < n; hole = child) {
        if (child + 1 < n && keys[heap[child + 1]] < keys[heap[child]]) child++;
        if (keys[heap[child]] >= keys[slot]) break;
        heap[hole] = heap[child];
    }
    heap[hole] = slot;
}

void kvf__select_evicted(const uint64_t *keys, uint32_t n, uint32_t n_evict, uint32_t *heap) {
    if (n_evict == 0) return;
    for (uint32_t slot = 0; slot < n_evict; slot++) heap[slot] = slot;
    for (uint32_t i = n_evict / 2; i > 0; i--) sift_down(keys, heap, n_evict, i - 1, heap[i - 1]);
    for (uint32_t slot = n_evict; slot < n; slot++)
        if (keys[slot] > keys[heap[0]]) sift_down(keys, heap, n_evict, 0, slot);
}

/* Slots of the n_evict highest keys. */
static void highest_keys(const kvf__head *h, const kvf__scratch *x, const float *worth, uint32_t window_begin,
                         uint32_t sinks, uint32_t n_evict) {
    uint32_t n = h->n_slots;
    for (uint32_t begin = 0, rows; begin < n; begin += rows) {
        const uint32_t *pos = h->pages->pos + kvf__slot_index(h, begin);
        rows = KVF__MIN(h->pages->block_size, n - begin);
        for (uint32_t i = 0, slot = begin; i < rows; i++, slot++)
            x->keys[slot] = kvf__select_key(worth[slot], pos[i] & KVF__MAX_POSITION, window_begin, sinks);
    }
    kvf__select_evicted(x->keys, n, n_evict, x->slots);
}

/* The same for one, by the scores alone, in loops that compilers turn into vectors: the lowest score between sinks and
 * window, of equals the highest position. false: scores of NaN or infinity, or none there; keys tell. */
static bool lowest_score(const kvf__head *h, const kvf__scratch *x, const float *worth, uint32_t window_begin,
                         uint32_t sinks) {
    if (window_begin <= sinks) return false;
    uint32_t n = h->n_slots, bs = h->pages->block_size, bad = 0, found = KVF__NONE, found_pos = 0;
    float least = INFINITY;
    for (uint32_t begin = 0, rows; begin < n; begin += rows) {
        const uint32_t *pos = h->pages->pos + kvf__slot_index(h, begin);
        rows = KVF__MIN(bs, n - begin);
        for (uint32_t i = 0, slot = begin; i < rows; i++, slot++) {
            bad |= !(worth[slot] - worth[slot] == 0);
            x->u[slot] = (pos[i] & KVF__MAX_POSITION) - sinks < window_begin - sinks ? worth[slot] : INFINITY;
        }
    }
    float lane[8];
    for (int j = 0; j < 8; j++) lane[j] = INFINITY;
    uint32_t slot = 0;
    for (; slot + 8 <= n; slot += 8)
        for (uint32_t j = 0; j < 8; j++) lane[j] = x->u[slot + j] < lane[j] ? x->u[slot + j] : lane[j];
    for (; slot < n; slot++) lane[0] = KVF__MIN(lane[0], x->u[slot]);
    for (int j = 0; j < 8; j++) least = KVF__MIN(least, lane[j]);
    if (bad || !(least < INFINITY)) return false;
    for (slot = 0; slot < n; slot++) {
        if (x->u[slot] != least) continue;
        uint32_t pos = h->pages->pos[kvf__slot_index(h, slot)] & KVF__MAX_POSITION;
        if (found == KVF__NONE || pos > found_pos) found = slot, found_pos = pos;
    }
    x->slots[0] = found;
    return true;
}

/* Chooses the evicted slots of one head: entries in ascending position, evicted[slot] set. */
static void choose(const kvf__call *c, const kvf_plan_event *pe, uint32_t kv_head, const kvf__head *h,
                   const kvf__scratch *x, kvf_plan_entry *entries) {
    const kvf_event *e = &pe->event;
    const kvf__policy_seq *s = kvf__event_seq(c, e);
    uint32_t next_pos = c->batch->view->next_pos[e->row], n = h->n_slots;
    uint32_t window = KVF__MIN(kvf__size_of(c->state, s, e->layer, kv_head)->window, e->n_keep);
    uint32_t window_begin = next_pos - KVF__MIN(window, next_pos);
    const float *worth = kvf__event_worth(c, e, kv_head, x);
    if (pe->n_evict != 1 || !lowest_score(h, x, worth, window_begin, s->options.sinks))
        highest_keys(h, x, worth, window_begin, s->options.sinks, pe->n_evict);
    memset(x->evicted, 0, n);
    for (uint32_t i = 0; i < pe->n_evict; i++) {
        uint32_t slot = x->slots[i];
        x->evicted[slot] = 1;
        x->sorted[i] = (uint64_t)h->pages->pos[kvf__slot_index(h, slot)] << 32 | slot;
    }
    kvf__sort_u64(x->sorted, pe->n_evict);
    for (uint32_t i = 0; i < pe->n_evict; i++)
        entries[i] = (kvf_plan_entry){.slot = (uint32_t)x->sorted[i], .target = KVF__NONE, .u = 0.0f, .merge = 0};
}

/* Packs up to three panels of kept rows, starting at slot; returns where the next tile starts. */
static uint32_t pack_tile(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, uint32_t slot,
                          kvf__tile *tile) {
    const void *rows[KVF__TILE_COLUMNS];
    uint32_t d = h->pages->head_dim;
    tile->n = 0;
    for (; slot < h->n_slots && tile->n < KVF__TILE_COLUMNS; slot++) {
        if (x->evicted[slot]) continue;
        tile->pos[tile->n] = h->pages->pos[kvf__slot_index(h, slot)];
        tile->slot[tile->n] = slot;
        rows[tile->n++] = kvf__match_row(h, slot);
    }
    if (tile->n == 0) return slot;
    for (uint32_t i = tile->n; i < KVF__TILE_COLUMNS; i++)
        rows[i] = rows[0]; /* defined numbers in columns nobody reads */
    for (uint32_t p = 0; p < KVF__TILE_PANELS; p++)
        c->kernels->pack(h->pages->dtype, rows + p * KVF__PANEL, d, x->tile + (size_t)p * d * KVF__PANEL,
                         tile->rnorm + p * KVF__PANEL);
    tile->panels = x->tile;
    return slot;
}

/* The nearest kept key of n <= KVF__CHUNK evicted ones: they are made float once, the kept ones once a chunk. */
static void match_chunk(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entries,
                        uint32_t n) {
    uint32_t d = h->pages->head_dim;
    for (uint32_t r = 0; r < n; r += KVF__PANEL) {
        const void *rows[KVF__PANEL];
        for (uint32_t i = 0; i < KVF__PANEL; i++) rows[i] = kvf__match_row(h, entries[KVF__MIN(r + i, n - 1)].slot);
        c->kernels->pack(h->pages->dtype, rows, d, x->panels + (size_t)r * d, x->chunk_norm + r);
    }
    for (uint32_t r = 0; r < n; r++) x->best[r] = (kvf__best){-2.0f, UINT32_MAX, KVF__NONE};
    kvf__tile tile;
    for (uint32_t slot = pack_tile(c, h, x, 0, &tile); tile.n; slot = pack_tile(c, h, x, slot, &tile))
        for (uint32_t r = 0; r < n; r += KVF__PANEL)
            c->kernels->nearest(&tile, x->panels + (size_t)r * d, 0, KVF__MIN(KVF__PANEL, n - r), x->chunk_norm + r, d,
                                x->best + r);
    for (uint32_t r = 0; r < n; r++) {
        entries[r].u = x->best[r].u;
        entries[r].target = x->best[r].slot;
    }
}

/* FEW: evicted rows for which packing the kept ones costs more than it saves. GROUP: rows of one call of cosines. AHEAD:
 * rows that are asked for before they are read. */
enum { FEW = 2, GROUP = 16, AHEAD = 64 };

/* Rows of a group, and those that will be read soon. Two blocks of 8 rows come side by side in the scratch. */
typedef struct group {
    const void *rows, *ahead;
} group;

static group group_at(const kvf__head *h, const kvf__scratch *x, uint32_t begin) {
    const kvf_pages *p = h->pages;
    size_t row_bytes = p->head_dim * kvf_dtype_bytes(p->dtype);
    uint32_t n = h->n_slots, bs = p->block_size;
    group g = {x->tile, x->tile};
    if (begin + AHEAD < n) g.ahead = kvf__match_row(h, begin + AHEAD);
    if (bs >= GROUP)
        g.rows = kvf__match_row(h, begin);
    else
        for (uint32_t i = 0; i < GROUP && begin + i < n; i += bs)
            memcpy((unsigned char *)x->tile + i * row_bytes, kvf__match_row(h, begin + i), bs * row_bytes);
    return g;
}

/* Cosines within the slack of all kept rows, by groups, into x->u; from where on a row may be the nearest, which NaN always
 * may. */
static float near_rows(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, const float *panel, float rnorm) {
    uint32_t n = h->n_slots, d = h->pages->head_dim;
    float *row = x->rows, most = -2.0f;
    for (uint32_t i = 0; i < d; i++) row[i] = panel[i * KVF__PANEL];
    for (uint32_t begin = 0; begin < n; begin += GROUP) {
        float u[GROUP];
        group g = group_at(h, x, begin);
        c->kernels->near_cosines(g.rows, g.ahead, d, row, rnorm, u);
        uint32_t rows = KVF__MIN(n - begin, (uint32_t)GROUP);
        for (uint32_t i = 0; i < rows; i++) {
            x->u[begin + i] = u[i];
            most = u[i] > most && !x->evicted[begin + i] ? u[i] : most;
        }
    }
    return most - 2 * kvf__cosine_slack(d);
}

static bool may_be_nearest(const kvf__scratch *x, uint32_t begin, uint32_t end, float least) {
    bool any = false;
    for (uint32_t slot = begin; slot < end; slot++) any |= !(x->u[slot] < least) && !x->evicted[slot];
    return any;
}

/* The nearest kept key of the evicted row whose panel is given, straight from the pages: first nearly, then exactly where it
 * may be. Rows past the table's end, and the evicted ones, are computed with the others and passed over. */
static void match_row(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entry,
                      const float *panel, float rnorm) {
    const kvf_pages *p = h->pages;
    uint32_t n = h->n_slots;
    kvf__best best = {-2.0f, UINT32_MAX, KVF__NONE};
    bool nearly = c->kernels->near_cosines && p->dtype == KVF_F16;
    float least = nearly ? near_rows(c, h, x, panel, rnorm) : -2.0f;
    for (uint32_t begin = 0; begin < n; begin += GROUP) {
        float u[GROUP];
        uint32_t end = KVF__MIN(begin + GROUP, n);
        if (nearly && !may_be_nearest(x, begin, end, least)) continue;
        group g = group_at(h, x, begin);
        c->kernels->cosines(p->dtype, g.rows, nearly ? g.rows : g.ahead, p->head_dim, panel, rnorm, u);
        for (uint32_t i = 0, slot = begin; slot < end; i++, slot++)
            if (u[i] >= best.u && !x->evicted[slot]) kvf__raise(&best, u[i], p->pos[kvf__slot_index(h, slot)], slot);
    }
    entry->u = best.u;
    entry->target = best.slot;
}

static void match_few(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entries,
                      uint32_t n) {
    const void *rows[KVF__PANEL];
    for (uint32_t i = 0; i < KVF__PANEL; i++) rows[i] = kvf__match_row(h, entries[KVF__MIN(i, n - 1)].slot);
    c->kernels->pack(h->pages->dtype, rows, h->pages->head_dim, x->panels, x->chunk_norm);
    for (uint32_t i = 0; i < n; i++) match_row(c, h, x, entries + i, x->panels + i, x->chunk_norm[i]);
}

typedef struct match_job {
    kvf__call call;
    kvf_plan *plan;
} match_job;

static void match_head(void *ctx, uint32_t item, uint32_t thread) {
    const match_job *job = ctx;
    const kvf__call *c = &job->call;
    uint32_t n_heads = c->state->config.n_kv_heads, kv_head = item % n_heads;
    const kvf_plan_event *pe = &job->plan->events[item / n_heads];
    if (pe->n_evict == 0 || kvf__event_lacks(c->batch->view, &pe->event, kv_head)) return;
    kvf__scratch x = kvf__call_scratch(c, thread);
    kvf__head h = kvf__head_of(c->batch->view, c->batch->pages, pe->event.row, pe->event.layer, kv_head);
    kvf_plan_entry *entries = job->plan->entries + kvf__entries_at(c->batch->view, pe, kv_head);
    choose(c, pe, kv_head, &h, &x, entries);
    const kvf_policy_options *o = &kvf__event_seq(c, &pe->event)->options;
    if (o->merge == KVF_MERGE_NONE) return;
    h.by_value = o->match == KVF_MATCH_VALUE;
    if (pe->n_evict <= FEW) {
        match_few(c, &h, &x, entries, pe->n_evict);
        return;
    }
    for (uint32_t i = 0; i < pe->n_evict; i += KVF__CHUNK)
        match_chunk(c, &h, &x, entries + i, KVF__MIN(KVF__CHUNK, pe->n_evict - i));
}

static bool reduces(const kvf__policy_seq *s) {
    return s->options.scope == KVF_SCOPE_LAYER && s->options.merge != KVF_MERGE_NONE;
}

/* Lays the plan out; changes nothing when it does not fit. */
static kvf_status lay_out(const kvf__call *c, kvf_plan *plan, kvf_error *err) {
    const kvf_policy_batch *b = c->batch;
    uint32_t n_heads = c->state->config.n_kv_heads;
    if (!plan || plan->n_kv_heads != n_heads)
        return kvf__fail(err, KVF_E_INVALID, "match: plan for %u KV heads: the state has %u",
                         plan ? plan->n_kv_heads : 0, n_heads);
    uint64_t entries = 0, reduce = 0;
    for (int pass = 0; pass < 2; pass++) {
        entries = reduce = 0;
        for (uint32_t i = 0; i < b->n_events; i++) {
            const kvf_event *e = &b->events[i];
            kvf__event_part part = kvf__part_of(b->view, e);
            uint32_t n = b->view->n_slots[part.table];
            if (pass) plan->events[i] = (kvf_plan_event){*e, n, n - e->n_keep, entries, reduce};
            entries += (uint64_t)(n - e->n_keep) * part.n_heads;
            if (n > e->n_keep && reduces(kvf__event_seq(c, e))) reduce += n - e->n_keep + 1;
        }
        if (b->n_events > plan->event_capacity || entries > plan->entry_capacity || reduce > plan->reduce_capacity)
            return kvf__fail(err, KVF_E_LIMIT, "match: %u events with %llu entries: the plan holds %u and %llu",
                             b->n_events, (unsigned long long)entries, plan->event_capacity,
                             (unsigned long long)plan->entry_capacity);
    }
    plan->n_events = b->n_events;
    plan->n_entries = entries;
    plan->n_reduce = reduce;
    for (uint64_t i = 0; i < (uint64_t)b->n_events * n_heads; i++) plan->tau[i] = NAN;
    return KVF_OK;
}

kvf_status kvf__policy_match(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                             kvf_error *err) {
    match_job job = {.plan = plan};
    kvf_status st = kvf__batch_check(state, stream, batch, "match", &job.call, err);
    if (!st) st = lay_out(&job.call, plan, err);
    if (st) return st;
    kvf__stream_for(stream, batch->n_events * state->config.n_kv_heads, match_head, &job);
    for (uint32_t i = 0; i < batch->n_events; i++) {
        const kvf_plan_event *pe = &plan->events[i];
        if (pe->n_evict == 0 || !reduces(kvf__event_seq(&job.call, &pe->event))) continue;
        double *sums = plan->reduce + pe->reduce_begin;
        uint32_t n_heads = kvf__part_of(batch->view, &pe->event).n_heads;
        for (uint32_t k = 0; k < pe->n_evict; k++) {
            sums[k] = 0.0;
            for (uint32_t h = 0; h < n_heads; h++)
                sums[k] += (double)plan->entries[pe->entry_begin + (uint64_t)h * pe->n_evict + k].u;
        }
        sums[pe->n_evict] = n_heads;
    }
    return KVF_OK;
}
