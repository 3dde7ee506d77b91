/* Tiled decode: one item for each (sequence, KV head, tile of 512 slots), partial results merged in ascending order.
 *
 * K and V are read once, for all query heads of the KV head. Where a table has one tile its item finishes the answer;
 * else a second pass over (sequence, KV head) merges. As many sequences at a time as the workspace holds tiles of. */
#include "attention/cpu/kernels.h"

typedef struct kvf__decode {
    const kvf__call *c;
    const kvf__kernels *k;
    const kvf__workspace *w;
    uint32_t seq_begin; /* of this turn */
    uint32_t n_tables;  /* (sequence, group) pairs of this turn; index holds their first items */
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
    AHEAD = 2
}; /* runs between what is read and what is prefetched: one more hides a cache miss where a run is short */

/* The i-th of a tile's runs of rows: K of its blocks, then V; NULL past the last. */
static const unsigned char *ahead(const kvf__call *c, const kvf__head *h, const uint32_t *row, uint32_t i,
                                  uint32_t n_blocks) {
    if (i < n_blocks) return kvf__k_rows(c, row[i], h->head);
    return i < 2 * n_blocks ? kvf__v_rows(c, row[i - n_blocks], h->head) : NULL;
}

/* Logits, probabilities and output of one tile for the g query heads. */
static void attend(const kvf__decode *d, const kvf__head *h, uint32_t begin, kvf__tile *tile, float *bias_room) {
    const kvf__call *c = d->c;
    uint32_t bs = c->pages.block_size, g = c->n_per_kv, n = KVF__MIN(h->n_slots - begin, KVF_TILE);
    uint32_t n_blocks = kvf__ceil_div(n, bs);
    const uint32_t *row = h->row + begin / bs;
    const float *q = c->a.q + (size_t)c->a.q_begin[h->seq] * c->a.q_stride + (size_t)h->kv_head * g * c->pages.head_dim;
    kvf__rows r = {NULL, NULL, 0, c->pages.head_dim, c->pages.dtype};
    for (uint32_t j = 0; j < n; j += bs) {
        r.rows = kvf__k_rows(c, row[j / bs], h->head);
        r.next = ahead(c, h, row, j / bs + AHEAD, n_blocks);
        r.n = KVF__MIN(bs, n - j);
        d->k->dots(tile->p + j, q, g, &r);
    }
    const float *bias = kvf__gather_bias(c, h->row, h->head, begin, n, bias_room);
    for (uint32_t i = 0; i < g; i++)
        d->k->softmax(tile->p + (size_t)i * KVF_TILE, n, c->scale, bias, &tile->state[i].m, &tile->state[i].l);
    memset(tile->o, 0, g * d->pad * sizeof *tile->o);
    for (uint32_t j = 0; j < n; j += bs) {
        r.rows = kvf__v_rows(c, row[j / bs], h->head);
        r.next = ahead(c, h, row, n_blocks + j / bs + AHEAD, n_blocks);
        r.n = KVF__MIN(bs, n - j);
        d->k->add_values(tile->o, d->pad, tile->p + j, g, &r);
    }
}

static void tile_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__decode *d = ctx;
    uint32_t table = kvf__find(d->w->index, d->n_tables, item), rest = item - (uint32_t)d->w->index[table];
    uint32_t n_tiles = head_of(d, table, 0).n_tiles;
    kvf__head h = head_of(d, table, rest / n_tiles);
    kvf__tile tile = tile_at(d, item);
    float *bias = d->w->scratch + thread * d->w->scratch_floats;
    attend(d, &h, rest % n_tiles * KVF_TILE, &tile, bias);
    if (n_tiles == 1) finish(d, &h);
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

kvf_status kvf__cpu_decode(kvf_stream *stream, const kvf__call *c, const kvf__workspace *w, kvf_cpu_path path,
                           kvf_error *err) {
    (void)err;
    kvf__decode d = {c, kvf__kernels_of(path), w, c->a.seq_begin, 0, kvf__pad16(c->pages.head_dim), 0};
    d.tile_floats = kvf__decode_tile_floats(c->n_per_kv, c->pages.head_dim);
    uint64_t capacity = KVF__MIN(w->rest_bytes / (d.tile_floats * sizeof(float)), UINT32_MAX);
    while (d.seq_begin < c->a.seq_end) {
        bool long_ones;
        uint32_t taken = take_sequences(&d, capacity, &long_ones);
        kvf__stream_for(stream, (uint32_t)w->index[d.n_tables], tile_item, &d);
        if (long_ones) kvf__stream_for(stream, d.n_tables * c->pages.heads_per_group, merge_item, &d);
        d.seq_begin += taken;
    }
    return KVF_OK;
}
