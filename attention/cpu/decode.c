/* Tiled decode: one item for each (sequence, some KV heads, tile of 512 slots), partial results merged in ascending order.
 *
 * K and V are read once, for all query heads of a KV head. Where a table has one tile its item finishes the answer;
 * else a second pass over (sequence, KV head) merges. As many sequences at a time as the workspace holds tiles of. */
#include "attention/cpu/kernels.h"

typedef struct kvf__decode {
    const kvf__call *c;
    const kvf__kernels *k;
    const kvf__workspace *w;
    uint32_t seq_begin; /* of this turn */
    uint32_t n_tables;  /* (sequence, group) pairs of this turn; index holds their first tiles */
    uint32_t heads;     /* KV heads of an item */
    size_t pad, tile_floats;
} kvf__decode;

/* One KV head of one sequence. */
typedef struct kvf__head {
    const uint32_t *row;
    uint32_t seq, kv_head, head, n_slots, n_tiles;
    uint64_t first_item;
} kvf__head;

/* What an item keeps: p (g, KVF_TILE), o (g, pad), state (g). */
typedef struct kvf__tile {
    float *p, *o;
    kvf__state *state;
} kvf__tile;

static kvf__tile tile_at(const kvf__decode *d, uint64_t item) {
    float *base = (float *)(void *)d->w->rest + item * d->tile_floats;
    size_t g = d->c->n_per_kv;
    kvf__tile t = {base, base + g * KVF_TILE, (kvf__state *)(void *)(base + g * (KVF_TILE + d->pad))};
    return t;
}

static kvf__head head_of(const kvf__decode *d, uint32_t table, uint32_t head) {
    const kvf__call *c = d->c;
    uint32_t groups = c->view.n_groups, seq = d->seq_begin + table / groups, group = table % groups;
    size_t t = kvf__table(c, seq, group);
    kvf__head h = {c->view.rows + c->view.row_offset[t],
                   seq,
                   group * c->pages.heads_per_group + head,
                   head,
                   c->view.n_slots[t],
                   kvf__ceil_div(c->view.n_slots[t], KVF_TILE),
                   0};
    h.first_item = d->w->index[table] + (uint64_t)head * h.n_tiles;
    return h;
}

static bool wants_row(const kvf__call *c, uint32_t seq) {
    return c->mass.row && (!c->mass.row_wanted || c->mass.row_wanted[seq]);
}

/* Merges a head's tiles: output, lse, mass. */
static void finish(const kvf__decode *d, const kvf__head *h) {
    const kvf__call *c = d->c;
    uint32_t dim = c->pages.head_dim, token = c->a.q_begin[h->seq], g = c->n_per_kv;
    kvf__state state[64];
    for (uint32_t i = 0; i < g; i++) {
        uint32_t q_head = h->kv_head * g + i;
        float *out = c->a.out + (size_t)token * c->a.out_stride + (size_t)q_head * dim;
        state[i] = (kvf__state){-INFINITY, 0};
        memset(out, 0, dim * sizeof *out);
        for (uint32_t t = 0; t < h->n_tiles; t++) {
            kvf__tile tile = tile_at(d, h->first_item + t);
            kvf__state_merge(d->k, &state[i], out, tile.state[i], tile.o + i * d->pad, dim);
        }
        d->k->scale(out, out, dim, kvf__state_inverse(state[i]));
        if (c->mass.lse) c->mass.lse[(size_t)token * c->a.n_q_heads + q_head] = kvf__state_lse(state[i]);
    }
    if (!wants_row(c, h->seq)) return;
    float *row = c->mass.row + ((size_t)h->seq * c->n_kv_heads + h->kv_head) * c->mass.row_stride;
    for (uint32_t t = 0; t < h->n_tiles; t++) {
        kvf__tile tile = tile_at(d, h->first_item + t);
        float f[64];
        for (uint32_t i = 0; i < g; i++)
            f[i] = kvf__exp(tile.state[i].m - kvf__exp_base(state[i].m)) * kvf__state_inverse(state[i]);
        d->k->mass_row(row + (size_t)t * KVF_TILE, tile.p, f, g, KVF__MIN(h->n_slots - t * KVF_TILE, KVF_TILE),
                       c->mass.row_gqa ? (kvf_gqa)c->mass.row_gqa[h->seq] : KVF_GQA_SUM);
    }
}

enum {
    AHEAD_BYTES = 12 << 10, /* between what is read and what is prefetched */
    MOST_HEADS = 16         /* KV heads of an item */
};

/* One tile of n KV heads that lie side by side. */
typedef struct kvf__item {
    const kvf__head *first;
    kvf__tile tiles[MOST_HEADS];
    uint32_t n, n_blocks, begin;
    const uint32_t *row; /* its blocks */
} kvf__item;

/* The i-th of an item's runs of rows, in the order of memory: K of its blocks and heads, then V; NULL past the last. */
static const unsigned char *run_of(const kvf__call *c, const kvf__item *it, uint32_t i) {
    uint32_t block = i / it->n, head = it->first->head + i % it->n;
    if (block < it->n_blocks) return kvf__k_rows(c, it->row[block], head);
    return block < 2 * it->n_blocks ? kvf__v_rows(c, it->row[block - it->n_blocks], head) : NULL;
}

/* Logits, probabilities and output of one tile for the g query heads of each KV head. */
static void attend(const kvf__decode *d, kvf__item *it, float *bias_room) {
    const kvf__call *c = d->c;
    const kvf__head *h = it->first;
    uint32_t bs = c->pages.block_size, g = c->n_per_kv, n = KVF__MIN(h->n_slots - it->begin, KVF_TILE), i = 0;
    size_t q_floats = (size_t)g * c->pages.head_dim;
    uint32_t ahead = kvf__ceil_div(AHEAD_BYTES, (uint32_t)c->k_head_bytes); /* in runs */
    const float *q = c->a.q + (size_t)c->a.q_begin[h->seq] * c->a.q_stride + h->kv_head * q_floats;
    kvf__rows r = {NULL, NULL, 0, c->pages.head_dim, c->pages.dtype};
    for (uint32_t j = 0; j < n; j += bs)
        for (uint32_t k = 0; k < it->n; k++, i++) {
            r.rows = run_of(c, it, i);
            r.next = run_of(c, it, i + ahead);
            r.n = KVF__MIN(bs, n - j);
            d->k->dots(it->tiles[k].p + j, q + k * q_floats, g, &r);
        }
    for (uint32_t k = 0; k < it->n; k++) {
        kvf__tile *t = &it->tiles[k];
        const float *bias = kvf__gather_bias(c, h->row, h->head + k, it->begin, n, bias_room);
        for (uint32_t e = 0; e < g; e++)
            d->k->softmax(t->p + (size_t)e * KVF_TILE, n, c->scale, bias, &t->state[e].m, &t->state[e].l);
        memset(t->o, 0, g * d->pad * sizeof *t->o);
    }
    for (uint32_t j = 0; j < n; j += bs)
        for (uint32_t k = 0; k < it->n; k++, i++) {
            r.rows = run_of(c, it, i);
            r.next = run_of(c, it, i + ahead);
            r.n = KVF__MIN(bs, n - j);
            d->k->add_values(it->tiles[k].o, d->pad, it->tiles[k].p + j, g, &r);
        }
}

static void tile_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__decode *d = ctx;
    uint64_t slot = (uint64_t)item * d->heads;
    uint32_t table = kvf__find(d->w->index, d->n_tables, slot);
    uint32_t rest = (uint32_t)(slot - d->w->index[table]) / d->heads, ranges = d->c->pages.heads_per_group / d->heads;
    kvf__head h = head_of(d, table, rest % ranges * d->heads);
    uint32_t tile = rest / ranges, begin = tile * KVF_TILE, bs = d->c->pages.block_size;
    kvf__item it = {.first = &h,
                    .n = d->heads,
                    .n_blocks = kvf__ceil_div(KVF__MIN(h.n_slots - begin, KVF_TILE), bs),
                    .begin = begin,
                    .row = h.row + begin / bs};
    for (uint32_t k = 0; k < it.n; k++) it.tiles[k] = tile_at(d, h.first_item + (uint64_t)k * h.n_tiles + tile);
    attend(d, &it, d->w->scratch + thread * d->w->scratch_floats);
    for (uint32_t k = 0; k < it.n && h.n_tiles == 1; k++) {
        kvf__head one = head_of(d, table, h.head + k);
        finish(d, &one);
    }
}

static void merge_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__decode *d = ctx;
    (void)thread;
    kvf__head h = head_of(d, item / d->c->pages.heads_per_group, item % d->c->pages.heads_per_group);
    if (h.n_tiles > 1) finish(d, &h);
}

/* Takes sequences from seq_begin while their tiles fit; returns how many. At least one does. */
static uint32_t take_sequences(kvf__decode *d, uint64_t capacity, bool *long_ones) {
    const kvf__call *c = d->c;
    uint64_t n = 0;
    uint32_t taken = 0, groups = c->view.n_groups;
    *long_ones = false;
    for (; d->seq_begin + taken < c->a.seq_end; taken++) {
        uint64_t items = n;
        bool any_long = false;
        for (uint32_t g = 0; g < groups; g++) {
            uint32_t slots = c->view.n_slots[kvf__table(c, d->seq_begin + taken, g)];
            d->w->index[taken * groups + g] = items;
            items += (uint64_t)kvf__ceil_div(slots, KVF_TILE) * c->pages.heads_per_group;
            any_long |= slots > KVF_TILE;
        }
        if (items > capacity) break;
        n = items;
        *long_ones |= any_long;
    }
    d->n_tables = taken * groups;
    d->w->index[d->n_tables] = n;
    return taken;
}

/* The most KV heads of an item, a divisor of all, that leave every thread enough items: heads of a block lie side by side,
 * and long runs read faster. */
static uint32_t heads_of_item(const kvf__decode *d) {
    uint32_t hpg = d->c->pages.heads_per_group;
    uint64_t n = d->w->index[d->n_tables], enough = d->c->n_threads > 1 ? 8 * (uint64_t)d->c->n_threads : 1;
    for (uint32_t heads = KVF__MIN(hpg, MOST_HEADS); heads > 1; heads--)
        if (hpg % heads == 0 && n / heads >= enough) return heads;
    return 1;
}

kvf_status kvf__cpu_decode(kvf_stream *stream, const kvf__call *c, const kvf__workspace *w, kvf_cpu_path path,
                           kvf_error *err) {
    (void)err;
    kvf__decode d = {c, kvf__kernels_of(path), w, c->a.seq_begin, 0, 1, kvf__pad16(c->pages.head_dim), 0};
    d.tile_floats = kvf__decode_tile_floats(c->n_per_kv, c->pages.head_dim);
    uint64_t capacity = KVF__MIN(w->rest_bytes / (d.tile_floats * sizeof(float)), UINT32_MAX);
    while (d.seq_begin < c->a.seq_end) {
        bool long_ones;
        uint32_t taken = take_sequences(&d, capacity, &long_ones);
        d.heads = heads_of_item(&d);
        kvf__stream_for(stream, (uint32_t)w->index[d.n_tables] / d.heads, tile_item, &d);
        if (long_ones) kvf__stream_for(stream, d.n_tables * c->pages.heads_per_group, merge_item, &d);
        d.seq_begin += taken;
    }
    return KVF_OK;
}
