/* Tiled decode. If there are enough sequences, a work item is (sequence, some KV heads): it computes their tiles of 512
 * slots one after the other and finishes their output. Otherwise an item is one tile, and a second pass over (sequence,
 * KV head) merges the tiles; the workspace limits how many sequences are processed at a time. Either way partial
 * results merge in ascending order.
 *
 * K and V are read once for all query heads of a KV head. */
#include "attention/cpu/kernels.h"

typedef struct kvf__decode {
    const kvf__call *c;
    const kvf__kernels *k;
    const kvf__workspace *w;
    uint32_t seq_begin; /* of this turn */
    uint32_t n_tables;  /* (sequence, group) pairs of this turn; index holds their first tiles unless whole */
    uint32_t heads;     /* KV heads of an item */
    uint32_t max_tiles; /* of a table of the call */
    bool whole;         /* an item takes all tiles; they lie in its thread's part of the workspace */
    size_t pad, tile_floats;
} kvf__decode;

/* One KV head of one sequence. */
typedef struct kvf__head {
    const uint32_t *row;
    kvf__columns columns;
    uint32_t seq, kv_head, head, n_tiles;
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
    kvf__columns columns = kvf__columns_of(c, seq, group);
    kvf__head h = {c->view.rows + c->view.row_offset[t],
                   columns,
                   seq,
                   group * c->pages.heads_per_group + head,
                   head,
                   kvf__n_tiles(columns),
                   0};
    if (!d->whole) h.first_item = d->w->index[table] + (uint64_t)head * h.n_tiles;
    return h;
}

/* The first column of a head's t-th tile; the first of it that is seen. */
static uint32_t tile_begin(const kvf__head *h, uint32_t t) { return (h->columns.begin / KVF_TILE + t) * KVF_TILE; }
static uint32_t seen_begin(const kvf__head *h, uint32_t t) { return KVF__MAX(h->columns.begin, tile_begin(h, t)); }

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
    memset(row, 0, (h->columns.begin - h->columns.shift) * sizeof *row);
    for (uint32_t t = 0; t < h->n_tiles; t++) {
        kvf__tile tile = tile_at(d, h->first_item + t);
        uint32_t begin = seen_begin(h, t), end = KVF__MIN(h->columns.end, tile_begin(h, t) + KVF_TILE);
        float f[64];
        for (uint32_t i = 0; i < g; i++)
            f[i] = kvf__exp(tile.state[i].m - kvf__exp_base(state[i].m)) * kvf__state_inverse(state[i]);
        d->k->mass_row(row + (begin - h->columns.shift), tile.p + begin % KVF_TILE, f, g, end - begin,
                       c->mass.row_gqa ? (kvf_gqa)c->mass.row_gqa[h->seq] : KVF_GQA_SUM);
    }
}

enum {
    PAGE_BYTES = 4096,                    /* of memory: within one the processor fetches ahead by itself */
    MOST_LINES = 8 * 256 * 4 / KVF__LINE, /* of a run */
    STREAMS = 8,                          /* runs that are asked for side by side */
    ITEM_HEADS = 8,                       /* at most */
    KEPT_BYTES = 1 << 18 /* of more than two heads until their mass is known: more leaves the second-level cache */
};

/* Some tiles of n KV heads that lie side by side. */
typedef struct kvf__item {
    const kvf__head *first;
    uint32_t n, begin, end; /* heads; columns that are seen */
} kvf__item;

/* Where an item is in its pieces, in the order they are read: of each tile K of its slots and heads, then V. */
typedef struct kvf__cursor {
    uint32_t begin, end; /* slots of the tile */
    uint32_t slot, head;
    bool v;
} kvf__cursor;

/* Reads an item piece by piece and prefetches later pieces. A piece is some rows of a head in one block; pieces of
 * heads that are adjacent in a page form a run, and so does a single piece. While one run is processed, cache lines
 * of the STREAMS runs after the next are prefetched, one line of each in turn: of the run needed soonest its last
 * lines, of the run needed latest its first. The processor prefetches by itself only within a page, and only after it
 * has seen some accesses there. So as many pages as it can follow are in flight at any time, and they begin one after
 * the other. */
typedef struct kvf__reader {
    const kvf__call *c;
    const kvf__item *it;
    size_t row_bytes, piece_bytes, share_bytes;
    uint32_t rows;       /* of a piece: a page of them, but 8 at least and a block at most */
    uint32_t run, piece; /* pieces of a run, and which of them is next */
    uint32_t soonest;
    kvf__cursor now, next;
    const unsigned char *last; /* run that is asked for: again, where none is left */
    const unsigned char *streams[STREAMS];
    const unsigned char *ahead[MOST_LINES + STREAMS]; /* while the run is read */
} kvf__reader;

/* Rows of a piece. */
static uint32_t piece_rows(const kvf_pages *p) {
    uint32_t rows = p->block_size;
    while (rows > 8 && rows * p->head_dim * kvf_dtype_bytes(p->dtype) > PAGE_BYTES) rows /= 2;
    return rows;
}

/* Pieces of a run, of items of so many heads, which are a whole number of runs. */
static uint32_t run_pieces(const kvf_pages *p, uint32_t heads) {
    size_t bytes = (size_t)p->block_size * p->head_dim * kvf_dtype_bytes(p->dtype);
    uint32_t n = heads;
    while (n > 1 && (heads % n != 0 || n * bytes > PAGE_BYTES)) n--;
    return n;
}

static kvf__cursor cursor_at(const kvf__reader *r) {
    const kvf__item *it = r->it;
    uint32_t shift = it->first->columns.shift, begin = (it->begin - shift) / r->rows * r->rows;
    uint32_t end = KVF__MIN((it->begin / KVF_TILE + 1) * KVF_TILE, it->end) - shift;
    return (kvf__cursor){begin, end, begin, 0, false};
}

/* The piece at the cursor, which goes on by n heads, to the next piece or run; NULL past the last. */
static const unsigned char *next_piece(const kvf__reader *r, kvf__cursor *at, uint32_t n) {
    if (at->slot >= at->end) return NULL;
    const kvf__item *it = r->it;
    uint32_t bs = r->c->pages.block_size, block = it->first->row[at->slot / bs], head = it->first->head + at->head;
    const unsigned char *rows =
        at->v ? kvf__v_at(&r->c->pages, block, head, 0) : kvf__k_at(&r->c->pages, block, head, 0);
    rows += at->slot % bs * r->row_bytes;
    if ((at->head += n) < it->n) return rows;
    at->head = 0;
    at->slot += r->rows;
    if (at->slot < at->end) return rows;
    if (at->v) {
        at->begin = at->end;
        at->end = KVF__MIN(at->begin + KVF_TILE, it->end - it->first->columns.shift);
    }
    at->slot = at->begin;
    at->v = !at->v;
    return rows;
}

static const unsigned char *next_stream(kvf__reader *r) {
    const unsigned char *run = next_piece(r, &r->next, r->run);
    if (run) r->last = run;
    return r->last;
}

static void ask(const unsigned char *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += KVF__LINE) __builtin_prefetch(from + at);
}

/* Asks for all that the first runs would have been asked for before them. */
static void reader_begin(kvf__reader *r, const kvf__call *c, const kvf__item *it) {
    r->c = c;
    r->it = it;
    r->row_bytes = c->pages.head_dim * kvf_dtype_bytes(c->pages.dtype);
    r->rows = piece_rows(&c->pages);
    r->piece_bytes = r->rows * r->row_bytes;
    r->run = run_pieces(&c->pages, it->n);
    size_t run_bytes = r->run * r->piece_bytes;
    r->share_bytes = kvf__ceil_div((uint32_t)run_bytes, STREAMS * KVF__LINE) * (size_t)KVF__LINE;
    r->now = r->next = cursor_at(r);
    r->soonest = r->piece = 0;
    r->last = next_piece(r, &r->next, r->run);
    if (!r->last) return;
    ask(r->last, run_bytes);
    ask(next_stream(r), run_bytes);
    for (uint32_t i = 0; i < STREAMS; i++) {
        size_t before = (STREAMS - 1 - i) * r->share_bytes;
        const unsigned char *run = next_stream(r);
        ask(run, before);
        r->streams[i] = run + before;
    }
}

/* What to ask for while the next run is read. */
static void read_run(kvf__reader *r) {
    /* Both arrays by way of r, so that the compiler sees that they are two. */
    for (size_t at = 0, to = 0; at < r->share_bytes; at += KVF__LINE, to += STREAMS)
        for (uint32_t i = 0; i < STREAMS; i++) r->ahead[to + i] = r->streams[i] + at;
    for (uint32_t i = 0; i < STREAMS; i++) r->streams[i] += r->share_bytes;
    r->streams[r->soonest] = next_stream(r);
    r->soonest = (r->soonest + 1) % STREAMS;
}

/* The next piece and what to ask for meanwhile. */
static void read_piece(kvf__reader *r, kvf__rows *rows) {
    if (r->piece == 0) read_run(r);
    rows->rows = next_piece(r, &r->now, 1);
    rows->ahead = r->ahead + r->piece * (r->piece_bytes / KVF__LINE);
    if (++r->piece == r->run) r->piece = 0;
}

/* Logits, probabilities and output of the t-th tile for the g query heads of each KV head. */
static void attend(const kvf__decode *d, kvf__reader *from, kvf__tile *tiles, uint32_t t, float *bias_room) {
    const kvf__call *c = d->c;
    const kvf__item *it = from->it;
    const kvf__head *h = it->first;
    uint32_t step = from->rows, g = c->n_per_kv, begin = tile_begin(h, t);
    uint32_t n = KVF__MIN(it->end - begin, KVF_TILE), hidden = seen_begin(h, t) - begin, first = hidden / step * step;
    size_t q_floats = (size_t)g * c->pages.head_dim;
    const float *q = c->a.q + (size_t)c->a.q_begin[h->seq] * c->a.q_stride + h->kv_head * q_floats;
    kvf__rows r = {NULL, NULL, 0, c->pages.head_dim, c->pages.dtype};
    for (uint32_t j = first; j < n; j += step) {
        r.n = KVF__MIN(step, n - j);
        for (uint32_t k = 0; k < it->n; k++) {
            read_piece(from, &r);
            d->k->dots(tiles[k].p + j, q + k * q_floats, g, &r);
        }
    }
    uint32_t block = hidden / c->pages.block_size * c->pages.block_size;
    for (uint32_t k = 0; k < it->n; k++) {
        kvf__tile *to = &tiles[k];
        const float *bias =
            kvf__gather_bias(c, h->row, h->head + k, begin + block - h->columns.shift, block, n, bias_room);
        for (uint32_t e = 0; e < g; e++) {
            kvf__hide(c, to->p + (size_t)e * KVF_TILE, hidden);
            d->k->softmax(to->p + (size_t)e * KVF_TILE, n, c->scale, bias, &to->state[e].m, &to->state[e].l);
        }
        memset(to->o, 0, g * d->pad * sizeof *to->o);
    }
    for (uint32_t j = first; j < n; j += step) {
        uint32_t skipped = j < hidden ? hidden - j : 0; /* their values are not read: they may be anything */
        r.n = KVF__MIN(step, n - j) - skipped;
        for (uint32_t k = 0; k < it->n; k++) {
            read_piece(from, &r);
            r.rows += skipped * from->row_bytes;
            d->k->add_values(tiles[k].o, d->pad, tiles[k].p + j + skipped, g, &r);
        }
    }
}

/* All tiles of heads [head, head + d->heads) of a table, whose tiles lie in the thread's part of the workspace. */
static void whole_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__decode *d = ctx;
    uint32_t ranges = d->c->pages.heads_per_group / d->heads, table = item / ranges, head = item % ranges * d->heads;
    kvf__head heads[ITEM_HEADS];
    kvf__tile tiles[ITEM_HEADS];
    for (uint32_t k = 0; k < d->heads; k++) {
        heads[k] = head_of(d, table, head + k);
        heads[k].first_item = ((uint64_t)thread * d->heads + k) * d->max_tiles;
    }
    kvf__item it = {heads, d->heads, heads[0].columns.begin, heads[0].columns.end};
    kvf__reader from;
    reader_begin(&from, d->c, &it);
    bool keep = wants_row(d->c, heads[0].seq); /* else all tiles' probabilities share a place, which stays in cache */
    for (uint32_t t = 0; t < heads[0].n_tiles; t++) {
        for (uint32_t k = 0; k < it.n; k++) {
            tiles[k] = tile_at(d, heads[k].first_item + t);
            if (!keep) tiles[k].p = tile_at(d, heads[k].first_item).p;
        }
        attend(d, &from, tiles, t, d->w->scratch + thread * d->w->scratch_floats);
    }
    for (uint32_t k = 0; k < it.n; k++) finish(d, &heads[k]);
}

static void tile_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__decode *d = ctx;
    uint64_t slot = (uint64_t)item * d->heads;
    uint32_t table = kvf__find(d->w->index, d->n_tables, slot);
    uint32_t rest = (uint32_t)(slot - d->w->index[table]) / d->heads, ranges = d->c->pages.heads_per_group / d->heads;
    kvf__head h = head_of(d, table, rest % ranges * d->heads);
    uint32_t tile = rest / ranges;
    kvf__item it = {&h, d->heads, seen_begin(&h, tile), KVF__MIN(h.columns.end, tile_begin(&h, tile) + KVF_TILE)};
    kvf__tile tiles[ITEM_HEADS];
    for (uint32_t k = 0; k < it.n; k++) tiles[k] = tile_at(d, h.first_item + (uint64_t)k * h.n_tiles + tile);
    kvf__reader from;
    reader_begin(&from, d->c, &it);
    attend(d, &from, tiles, tile, d->w->scratch + thread * d->w->scratch_floats);
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
            uint32_t tiles = kvf__n_tiles(kvf__columns_of(c, d->seq_begin + taken, g));
            d->w->index[taken * groups + g] = items;
            items += (uint64_t)tiles * c->pages.heads_per_group;
            any_long |= tiles > 1;
        }
        if (items > capacity) break;
        n = items;
        *long_ones |= any_long;
    }
    d->n_tables = taken * groups;
    d->w->index[d->n_tables] = n;
    return taken;
}

/* The largest number of KV heads of an item, a divisor of all. Heads of a block are adjacent, and adjacent pages are
 * found faster. But if a head's pieces do not fill pages, the runs of an item share pages and fewer pages are in
 * flight; then an item has no more heads than one run. */
static uint32_t most_heads(const kvf__call *c) {
    const kvf_pages *p = &c->pages;
    uint32_t heads = KVF__MIN(p->heads_per_group, (uint32_t)ITEM_HEADS);
    while (p->heads_per_group % heads != 0) heads--;
    uint32_t run = run_pieces(p, heads);
    return run * piece_rows(p) * p->head_dim * kvf_dtype_bytes(p->dtype) < PAGE_BYTES ? run : heads;
}

/* The same that leaves every thread enough items. */
static uint32_t heads_of_item(const kvf__decode *d) {
    uint32_t hpg = d->c->pages.heads_per_group;
    uint64_t n = d->w->index[d->n_tables], enough = d->c->n_threads > 1 ? 8 * (uint64_t)d->c->n_threads : 1;
    for (uint32_t heads = most_heads(d->c); heads > 1; heads--)
        if (hpg % heads == 0 && n / heads >= enough) return heads;
    return 1;
}

/* Whether items that cover all tiles of a sequence keep every thread busy to the end despite different lengths, and
 * each thread's tiles fit in the workspace; if so also the number of heads per item. */
static bool take_whole(kvf__decode *d, uint64_t capacity) {
    const kvf__call *c = d->c;
    uint32_t hpg = c->pages.heads_per_group, groups = c->view.n_groups;
    uint64_t n_tiles = 0, enough = c->n_threads > 1 ? 8 * (uint64_t)c->n_threads : 1;
    d->n_tables = (c->a.seq_end - c->a.seq_begin) * groups;
    d->max_tiles = 0;
    for (uint32_t seq = c->a.seq_begin; seq < c->a.seq_end; seq++)
        for (uint32_t g = 0; g < groups; g++) {
            uint32_t tiles = kvf__n_tiles(kvf__columns_of(c, seq, g));
            n_tiles += tiles;
            d->max_tiles = KVF__MAX(d->max_tiles, tiles);
        }
    size_t kept = c->mass.row ? d->max_tiles * d->tile_floats * sizeof(float) : 0; /* of a head, to its end */
    for (d->heads = most_heads(c); d->heads > 0; d->heads--)
        if (hpg % d->heads == 0 && (d->heads <= 2 || d->heads * kept <= KEPT_BYTES) &&
            n_tiles * (hpg / d->heads) >= enough * d->max_tiles &&
            (uint64_t)c->n_threads * d->heads * d->max_tiles <= capacity &&
            (uint64_t)d->n_tables * (hpg / d->heads) <= UINT32_MAX)
            return true;
    return false;
}

kvf_status kvf__cpu_decode(kvf_stream *stream, const kvf__call *c, const kvf__workspace *w, kvf_cpu_path path,
                           kvf_error *err) {
    (void)err;
    kvf__decode d = {.c = c, .k = kvf__kernels_of(path), .w = w, .seq_begin = c->a.seq_begin, .heads = 1};
    d.pad = kvf__pad16(c->pages.head_dim);
    d.tile_floats = kvf__decode_tile_floats(c->n_per_kv, c->pages.head_dim);
    uint64_t capacity = KVF__MIN(w->rest_bytes / (d.tile_floats * sizeof(float)), UINT32_MAX);
    d.whole = take_whole(&d, capacity);
    if (d.whole) {
        kvf__stream_for(stream, d.n_tables * (c->pages.heads_per_group / d.heads), whole_item, &d);
        return KVF_OK;
    }
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
