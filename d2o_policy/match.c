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

enum { SOON = 256 }; /* slots after those that are read whose metadata is asked for */

/* Slots of the n_evict highest keys. */
static void highest_keys(const kvf__head *h, const kvf__scratch *x, const float *worth, uint32_t window_begin,
                         uint32_t sinks, uint32_t n_evict) {
    uint32_t n = h->n_slots;
    for (uint32_t begin = 0, rows; begin < n; begin += rows) {
        const uint32_t *pos = h->pages->pos + kvf__slot_index(h, begin);
        rows = KVF__MIN(h->pages->block_size, n - begin);
        if (begin + SOON < n) __builtin_prefetch(h->pages->pos + kvf__slot_index(h, begin + SOON));
        for (uint32_t i = 0, slot = begin; i < rows; i++, slot++)
            x->keys[slot] = kvf__select_key(worth[slot], pos[i] & KVF__MAX_POSITION, window_begin, sinks);
    }
    kvf__select_evicted(x->keys, n, n_evict, x->slots);
}

/* The same for one victim, without keys, in loops that compilers vectorise: the slot with the lowest score between sinks and window,
 * on ties the highest position. false: a score is NaN or infinite, or there is no such slot; then the keys decide. */
static bool lowest_score(const kvf__head *h, const kvf__scratch *x, const float *worth, uint32_t window_begin,
                         uint32_t sinks) {
    if (window_begin <= sinks) return false;
    uint32_t n = h->n_slots, bs = h->pages->block_size, bad = 0, found = KVF__NONE, found_pos = 0;
    float least = INFINITY;
    for (uint32_t begin = 0, rows; begin < n; begin += rows) {
        const uint32_t *pos = h->pages->pos + kvf__slot_index(h, begin);
        rows = KVF__MIN(bs, n - begin);
        if (begin + SOON < n) __builtin_prefetch(h->pages->pos + kvf__slot_index(h, begin + SOON));
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
    const float *worth = kvf__event_worth(c, e, kv_head, true, x);
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

/* All slots that stay, into x->order; returns how many. */
static uint32_t list_kept(const kvf__head *h, const kvf__scratch *x) {
    uint32_t n = 0;
    for (uint32_t slot = 0; slot < h->n_slots; slot++)
        if (!x->evicted[slot]) x->order[n++] = slot;
    return n;
}

/* Packs up to three panels of the kept rows x->order[begin, end). */
static void pack_tile(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, uint32_t begin, uint32_t end,
                      kvf__tile *tile) {
    const void *rows[KVF__TILE_COLUMNS];
    uint32_t d = h->pages->head_dim;
    tile->n = KVF__MIN(end - begin, KVF__TILE_COLUMNS);
    for (uint32_t i = 0; i < tile->n; i++) {
        uint32_t slot = x->order[begin + i];
        tile->pos[i] = h->pages->pos[kvf__slot_index(h, slot)];
        tile->slot[i] = slot;
        rows[i] = kvf__match_row(h, slot);
    }
    for (uint32_t i = tile->n; i < KVF__TILE_COLUMNS; i++)
        rows[i] = rows[0]; /* defined numbers in columns nobody reads */
    for (uint32_t p = 0; p < KVF__TILE_PANELS; p++)
        c->kernels->pack(h->pages->dtype, rows + p * KVF__PANEL, d, x->tile + (size_t)p * d * KVF__PANEL,
                         tile->rnorm + p * KVF__PANEL);
    tile->panels = x->tile;
}

/* n <= KVF__CHUNK evicted rows as panels, and their inverse norms. */
static void pack_evicted(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, const kvf_plan_entry *entries,
                         uint32_t n) {
    const void *rows[KVF__PANEL];
    for (uint32_t r = 0; r < n; r += KVF__PANEL) {
        for (uint32_t i = 0; i < KVF__PANEL; i++) rows[i] = kvf__match_row(h, entries[KVF__MIN(r + i, n - 1)].slot);
        c->kernels->pack(h->pages->dtype, rows, h->pages->head_dim, x->panels + (size_t)r * h->pages->head_dim,
                         x->chunk_norm + r);
    }
}

/* The nearest of n_kept rows in x->order of n packed evicted ones: the kept ones are made float once. */
static void match_packed(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entries,
                         uint32_t n, uint32_t n_kept) {
    uint32_t d = h->pages->head_dim;
    for (uint32_t r = 0; r < n; r++) x->best[r] = (kvf__best){-2.0f, UINT32_MAX, KVF__NONE};
    kvf__tile tile;
    for (uint32_t i = 0; i < n_kept; i += KVF__TILE_COLUMNS) {
        pack_tile(c, h, x, i, n_kept, &tile);
        for (uint32_t r = 0; r < n; r += KVF__PANEL)
            c->kernels->nearest(&tile, x->panels + (size_t)r * d, 0, KVF__MIN(KVF__PANEL, n - r), x->chunk_norm + r, d,
                                x->best + r);
    }
    for (uint32_t r = 0; r < n; r++) {
        entries[r].u = x->best[r].u;
        entries[r].target = x->best[r].slot;
    }
}

/* FEW: evicted rows for which packing the kept ones costs more than it saves. GROUP: rows of one call of cosines. AHEAD:
 * groups that are asked for before they are read. HALF: rows that lie side by side whatever the block is. */
enum { FEW = 2, GROUP = 16, AHEAD = 8, HALF = 8, HALVES = AHEAD * GROUP / HALF };

/* Passes over the rows of a table by groups. */
typedef struct reader {
    const kvf__head *h;
    void *copy; /* where two blocks of 8 rows come side by side */
    size_t row_bytes;
    uint32_t next;                   /* the group after this one */
    const void *rows, *ahead[AHEAD]; /* of this group; 2 rows of each of those that follow, the last of the next one */
    const unsigned char *half[HALVES]; /* of those that follow, by their number */
} reader;

static const unsigned char *half_at(const reader *r, uint32_t slot) {
    return slot < r->h->n_slots ? kvf__match_row(r->h, slot) : r->copy;
}

/* From a group on. */
static reader reader_at(const kvf__head *h, const kvf__scratch *x, uint32_t begin) {
    reader r = {
        .h = h, .copy = x->tile, .row_bytes = h->pages->head_dim * kvf_dtype_bytes(h->pages->dtype), .next = begin};
    for (uint32_t i = 0, at = begin / HALF; i < HALVES; i++) r.half[(at + i) % HALVES] = half_at(&r, begin + i * HALF);
    return r;
}

static void read_group(reader *r) {
    uint32_t begin = r->next, at = begin / HALF;
    const unsigned char *first = r->half[at % HALVES], *second = r->half[(at + 1) % HALVES];
    r->next += GROUP;
    for (uint32_t i = 0; i < GROUP / HALF; i++)
        r->half[(at + i) % HALVES] = half_at(r, begin + AHEAD * GROUP + i * HALF);
    for (uint32_t i = 0; i < AHEAD; i++) {
        uint32_t row = (AHEAD - 1 - i) * (GROUP / AHEAD), half = at + (i + 1) * (GROUP / HALF) + row / HALF;
        r->ahead[i] = r->half[half % HALVES] + row % HALF * r->row_bytes;
    }
    r->rows = first;
    if (r->h->pages->block_size >= GROUP) return;
    memcpy(r->copy, first, HALF * r->row_bytes);
    if (begin + HALF < r->h->n_slots)
        memcpy((unsigned char *)r->copy + HALF * r->row_bytes, second, HALF * r->row_bytes);
    r->rows = r->copy;
}

/* Bits of the rows of a group that are in the table and stay. */
static uint32_t kept_of(const kvf__head *h, const kvf__scratch *x, uint32_t begin) {
    uint32_t bits = 0, rows = KVF__MIN(h->n_slots - begin, (uint32_t)GROUP);
    for (uint32_t i = 0; i < rows; i++) bits |= (uint32_t)!x->evicted[begin + i] << i;
    return bits;
}

static bool is_near(const kvf__call *c, const kvf__head *h) { return c->kernels->near && h->pages->dtype == KVF_F16; }

/* Sets of up to 16 evicted rows side by side, from their panels; returns how many there are. */
static uint32_t make_sets(const kvf__head *h, const kvf__scratch *x, uint32_t n, kvf__near *sets) {
    uint32_t d = h->pages->head_dim, n_sets = kvf__ceil_div(n, KVF__LANES);
    for (uint32_t s = 0; s < n_sets; s++) {
        float *x_lanes = x->lanes + (size_t)s * d * KVF__LANES;
        uint32_t rows = KVF__MIN(n - s * KVF__LANES, KVF__LANES);
        sets[s] = (kvf__near){.x = x_lanes, .d = d, .lanes = (1u << rows) - 1, .slack = 2 * kvf__cosine_slack(d)};
        memset(x_lanes, 0, (size_t)d * KVF__LANES * sizeof *x_lanes);
        for (uint32_t half = 0; half * KVF__PANEL < rows; half++) {
            const float *panel = x->panels + (size_t)(s * KVF__LANES + half * KVF__PANEL) * d;
            for (uint32_t i = 0; i < d; i++)
                memcpy(x_lanes + i * KVF__LANES + half * KVF__PANEL, panel + i * KVF__PANEL,
                       KVF__PANEL * sizeof *panel);
        }
        for (uint32_t i = 0; i < KVF__LANES; i++) {
            sets[s].rnorm[i] = i < rows ? x->chunk_norm[s * KVF__LANES + i] : 0.0f;
            sets[s].most[i] = -2.0f;
        }
    }
    return n_sets;
}

/* A few evicted rows, in one pass over the pages: first nearly, then exactly with those of the kept rows that may be the
 * nearest of any. */
static void match_some(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entries,
                       uint32_t n) {
    const void *nowhere[AHEAD];
    kvf__near sets[KVF__NEAR_SETS];
    float rnorm[GROUP];
    uint32_t n_may = 0;
    pack_evicted(c, h, x, entries, n);
    uint32_t n_sets = make_sets(h, x, n, sets);
    for (uint32_t i = 0; i < AHEAD; i++) nowhere[i] = x->tile;
    reader r = reader_at(h, x, 0);
    for (uint32_t begin = 0; begin < h->n_slots; begin += GROUP) {
        uint16_t may[GROUP] = {0};
        uint32_t kept = kept_of(h, x, begin);
        read_group(&r);
        c->kernels->widen(r.rows, h->pages->head_dim, x->wide, rnorm);
        for (uint32_t s = 0; s < n_sets; s++)
            c->kernels->near(&sets[s], x->wide, rnorm, kept, s ? nowhere : r.ahead, may);
        for (uint32_t i = 0; i < GROUP; i++)
            if (may[i]) x->order[n_may++] = begin + i;
    }
    match_packed(c, h, x, entries, n, n_may);
}

/* The highest of x[0..n), NaN counting as nothing, in lanes that compilers turn into vectors. */
static float highest(const float *x, uint32_t n) {
    float lane[GROUP], most = -INFINITY;
    uint32_t i = 0;
    for (uint32_t j = 0; j < GROUP; j++) lane[j] = -INFINITY;
    for (; i + GROUP <= n; i += GROUP)
        for (uint32_t j = 0; j < GROUP; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (; i < n; i++) lane[0] = x[i] > lane[0] ? x[i] : lane[0];
    for (uint32_t j = 0; j < GROUP; j++) most = KVF__MAX(most, lane[j]);
    return most;
}

/* Cosines within the slack of all rows, by groups, into x->u, minus infinity of evicted ones; from where on a row may be the
 * nearest, which NaN always may. */
static float near_rows(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, const float *panel, float rnorm) {
    uint32_t n = h->n_slots, d = h->pages->head_dim;
    float *row = x->rows, rest[GROUP];
    for (uint32_t i = 0; i < d; i++) row[i] = panel[i * KVF__PANEL];
    reader r = reader_at(h, x, 0);
    for (uint32_t begin = 0; begin < n; begin += GROUP) {
        bool whole = n - begin >= GROUP;
        read_group(&r);
        c->kernels->near_cosines(r.rows, r.ahead, d, row, rnorm, whole ? x->u + begin : rest);
        if (!whole) memcpy(x->u + begin, rest, (n - begin) * sizeof *rest);
    }
    for (const uint8_t *at = x->evicted; (at = memchr(at, 1, n - (size_t)(at - x->evicted))); at++)
        x->u[at - x->evicted] = -INFINITY;
    return highest(x->u, n) - 2 * kvf__cosine_slack(d);
}

static bool may_be_nearest(const kvf__scratch *x, uint32_t begin, uint32_t end, float least) {
    bool any = false;
    for (uint32_t slot = begin; slot < end; slot++) any |= !(x->u[slot] < least);
    return any;
}

/* The nearest kept key of the evicted row whose panel is given, straight from the pages: first nearly, then exactly where it
 * may be. Rows past the table's end, and the evicted ones, are computed with the others and passed over. */
static void match_row(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entry,
                      const float *panel, float rnorm) {
    const kvf_pages *p = h->pages;
    uint32_t n = h->n_slots;
    kvf__best best = {-2.0f, UINT32_MAX, KVF__NONE};
    bool nearly = is_near(c, h);
    float least = nearly ? near_rows(c, h, x, panel, rnorm) : -2.0f;
    reader r = reader_at(h, x, 0);
    for (uint32_t begin = 0; begin < n; begin += GROUP) {
        float u[GROUP];
        uint32_t end = KVF__MIN(begin + GROUP, n);
        if (nearly && !may_be_nearest(x, begin, end, least)) continue;
        if (nearly) r = reader_at(h, x, begin);
        read_group(&r);
        c->kernels->cosines(p->dtype, r.rows, nearly ? r.rows : r.half[(begin / HALF + AHEAD) % HALVES], p->head_dim,
                            panel, rnorm, u);
        for (uint32_t i = 0, slot = begin; slot < end; i++, slot++)
            if (u[i] >= best.u && !x->evicted[slot]) kvf__raise(&best, u[i], p->pos[kvf__slot_index(h, slot)], slot);
    }
    entry->u = best.u;
    entry->target = best.slot;
}

static void match_few(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entries,
                      uint32_t n) {
    pack_evicted(c, h, x, entries, n);
    for (uint32_t i = 0; i < n; i++) match_row(c, h, x, entries + i, x->panels + i, x->chunk_norm[i]);
}

/* The nearest kept row of n evicted ones. */
static void match_all(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, kvf_plan_entry *entries,
                      uint32_t n) {
    if (n > 1 && n <= KVF__NEAR_SETS * KVF__LANES && is_near(c, h)) {
        match_some(c, h, x, entries, n);
        return;
    }
    if (n <= FEW) {
        match_few(c, h, x, entries, n);
        return;
    }
    uint32_t n_kept = list_kept(h, x);
    for (uint32_t i = 0; i < n; i += KVF__CHUNK) {
        uint32_t rows = KVF__MIN(KVF__CHUNK, n - i);
        pack_evicted(c, h, x, entries + i, rows);
        match_packed(c, h, x, entries + i, rows, n_kept);
    }
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
    match_all(c, &h, &x, entries, pe->n_evict);
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
