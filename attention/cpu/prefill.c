/* Tiled prefill: blocks of query rows over tiles of 512 slots, and column sums.
 *
 * A column sum needs a row's final denominator, which is known after the row's last tile. If the logits of enough rows
 * fit in a thread's scratch memory they are kept until then and added to the columns at the end of the block (`kept`).
 * Blocks of one KV head add one after another, in the order of their queries. For longer contexts a second pass over the
 * columns computes the logits again.
 *
 * The g query heads of a KV head are stacked: row r of a block of tokens is token r / g, head r % g. So a tile of K and V
 * is packed once for all of them. A row's result depends only on its query and its slots, not on how rows are grouped or
 * on which thread computes them. */
#include <sched.h>
#include <stdatomic.h>

#include "attention/cpu/kernels.h"

typedef struct kvf__prefill {
    const kvf__call *c;
    const kvf__kernels *k;
    const kvf__workspace *w;
    float *stats;          /* (token, query head, 2): base of the exponents, 1 / denominator */
    uint32_t block_tokens; /* of one item of the first pass */
    uint32_t col_width;    /* of one item of the second pass: a multiple of 16 that divides KVF_TILE */
    uint32_t n_seqs, n_items;
    bool keeps; /* logits, for the column sums; else there is a second pass */
} kvf__prefill;

/* One KV head of one sequence. */
typedef struct kvf__chunk {
    const uint32_t *row; /* block ids */
    uint32_t seq, kv_head, head;
    uint32_t n_slots, n_tokens, first_row; /* first_row: of q, for token 0 of the chunk */
    uint32_t shift;                        /* column of slot 0 */
    const kvf__call *c;
} kvf__chunk;

/* A thread's scratch, for one block of rows. */
typedef struct kvf__block {
    float *k, *v; /* packed tile */
    float *s;     /* (KVF__SUB_ROWS, KVF_TILE) */
    float *part;  /* (KVF__SUB_ROWS, pad) */
    float *o;     /* (rows, pad) */
    kvf__state *state;
    float *bias_room;
    const float *bias;            /* of the tile, or NULL */
    uint32_t token_begin, n_rows; /* in the chunk; rows of all heads */
    size_t pad;
    float *kept; /* (rows, kept_stride): logits from column kept_begin on */
    size_t kept_stride;
    uint32_t kept_begin, kept_from; /* kept_from: the first row of which they are kept */
} kvf__block;

static kvf__chunk chunk_of(const kvf__call *c, uint32_t seq, uint32_t kv_head) {
    uint32_t hpg = c->pages.heads_per_group;
    size_t t = kvf__table(c, seq, kv_head / hpg);
    kvf__chunk chunk = {c->view.rows + c->view.row_offset[t],
                        seq,
                        kv_head,
                        kv_head % hpg,
                        c->view.n_slots[t],
                        c->a.q_begin[seq + 1] - c->a.q_begin[seq],
                        c->a.q_begin[seq],
                        kvf__columns_of(c, seq, kv_head / hpg).shift,
                        c};
    return chunk;
}

/* Columns up to the last that a token of the chunk sees, and how many of them lie in [begin, begin + width). */
static uint32_t seen(const kvf__chunk *ch, uint32_t token) {
    return ch->shift + ch->n_slots - ch->n_tokens + token + 1;
}
static uint32_t seen_in(const kvf__chunk *ch, uint32_t token, uint32_t begin, uint32_t width) {
    uint32_t n = seen(ch, token);
    return n <= begin ? 0 : KVF__MIN(n - begin, width);
}

/* The first column that it sees, and how many of those from begin on it does not. */
static uint32_t first_seen(const kvf__chunk *ch, uint32_t token) {
    return ch->shift + kvf__first_seen(ch->c, seen(ch, token) - ch->shift);
}
static uint32_t hidden_in(const kvf__chunk *ch, uint32_t token, uint32_t begin) {
    uint32_t first = first_seen(ch, token);
    return first > begin ? first - begin : 0;
}
/* Columns from begin on that no slot stands for. */
static uint32_t missing_in(const kvf__chunk *ch, uint32_t begin) { return ch->shift > begin ? ch->shift - begin : 0; }

static const float *query(const kvf__call *c, const kvf__chunk *ch, uint32_t token, uint32_t h) {
    return c->a.q + (size_t)(ch->first_row + token) * c->a.q_stride +
           (size_t)(ch->kv_head * c->n_per_kv + h) * c->pages.head_dim;
}

/* Query pointers of n rows from r on; beyond the last row the last one again. */
static void queries(const kvf__call *c, const kvf__chunk *ch, uint32_t token_begin, uint32_t r, uint32_t n,
                    uint32_t n_rows, const float **q) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = KVF__MIN(r + i, n_rows - 1);
        q[i] = query(c, ch, token_begin + at / c->n_per_kv, at % c->n_per_kv);
    }
}

const float *kvf__gather_bias(const kvf__call *c, const uint32_t *row, uint32_t head, uint32_t begin, uint32_t from,
                              uint32_t n, float *to) {
    if (!c->pages.bias) return NULL;
    uint32_t bs = c->pages.block_size;
    memset(to, 0, from * sizeof *to);
    for (uint32_t j = from, slot = begin; j < n; j += bs, slot += bs)
        memcpy(to + j, c->pages.bias + kvf__meta_at(&c->pages, row[slot / bs], head, slot % bs),
               KVF__MIN(bs, n - j) * sizeof *to);
    memset(to + n, 0, (kvf__pad16(n) - n) * sizeof *to);
    return to;
}

/* Columns that nobody reads, but that are multiplied. */
static void clear_columns(float *k, uint32_t d, uint32_t begin, uint32_t end) {
    for (uint32_t j = begin; j < end; j++)
        for (uint32_t i = 0; i < d; i++) k[((size_t)(j / 16) * d + i) * 16 + j % 16] = 0;
}

/* Packs K (and V unless v is NULL) of columns [begin, begin + n); begin is a multiple of 16. */
static void pack(const kvf__prefill *p, const kvf__chunk *ch, uint32_t begin, uint32_t n, float *k, float *v) {
    const kvf__call *c = p->c;
    uint32_t bs = c->pages.block_size, d = c->pages.head_dim, missing = missing_in(ch, begin);
    size_t row_bytes = d * kvf_dtype_bytes(c->pages.dtype);
    clear_columns(k, d, 0, missing);
    for (uint32_t j = missing, rows; j < n; j += rows) {
        uint32_t at = begin + j - ch->shift, block = ch->row[at / bs], slot = at % bs;
        rows = KVF__MIN(bs - slot, n - j);
        kvf__rows r = {kvf__k_at(&c->pages, block, ch->head, 0) + slot * row_bytes, NULL, rows, d, c->pages.dtype};
        p->k->pack_k(k, j, &r);
        r.rows = kvf__v_at(&c->pages, block, ch->head, 0) + slot * row_bytes;
        if (v) p->k->pack_v(v, j, &r);
    }
    clear_columns(k, d, n, (uint32_t)kvf__pad16(n));
}

static const float *gather_bias(const kvf__chunk *ch, uint32_t begin, uint32_t n, float *to) {
    uint32_t missing = missing_in(ch, begin);
    return kvf__gather_bias(ch->c, ch->row, ch->head, begin + missing - ch->shift, missing, n, to);
}

/* Logits of rows [r, r + n) of a block over n_cols packed columns into s; rows are k->rows at a time. */
static void logits(const kvf__prefill *p, const kvf__chunk *ch, const kvf__block *b, uint32_t r, uint32_t n,
                   uint32_t n_cols) {
    const float *q[KVF__SUB_ROWS];
    uint32_t d = p->c->pages.head_dim, n_panels = kvf__ceil_div(n_cols, 16);
    queries(p->c, ch, b->token_begin, r, KVF__SUB_ROWS, b->n_rows, q);
    for (uint32_t j = 0; j < n_panels; j += p->k->panels)
        for (uint32_t i = 0; i < n; i += p->k->rows)
            p->k->logits(b->s + (size_t)i * KVF_TILE + j * 16, q + i, b->k + (size_t)j * d * 16, d,
                         KVF__MIN(n_panels - j, p->k->panels));
}

/* The output of k->rows rows for one tile: columns that all of the rows see are computed together, the rest row by
 * row, so that no row meets a slot it must not see. */
static void values(const kvf__prefill *p, const kvf__block *b, uint32_t first, const uint32_t *n_seen,
                   const uint32_t *n_hidden) {
    uint32_t common = n_seen[first], hidden = n_hidden[first], n_panels = (uint32_t)b->pad / 16;
    for (uint32_t i = 1; i < p->k->rows; i++) {
        common = KVF__MIN(common, n_seen[first + i]);
        hidden = KVF__MAX(hidden, n_hidden[first + i]);
    }
    const float *s = b->s + (size_t)first * KVF_TILE;
    float *o = b->part + first * b->pad;
    if (hidden) {
        memset(o, 0, p->k->rows * b->pad * sizeof *o);
        for (size_t j = 0; j < n_panels; j++)
            for (uint32_t i = 0; i < p->k->rows; i++)
                p->k->values_row(o + i * b->pad + j * 16, s + (size_t)i * KVF_TILE + n_hidden[first + i],
                                 b->v + (j * KVF_TILE + n_hidden[first + i]) * 16,
                                 n_seen[first + i] - n_hidden[first + i]);
        return;
    }
    for (size_t j = 0; j < n_panels; j += p->k->panels)
        p->k->values(o + j * 16, b->pad, s, b->v + j * 16 * KVF_TILE, common,
                     KVF__MIN(n_panels - (uint32_t)j, p->k->panels));
    for (size_t j = 0; j < n_panels; j++)
        for (uint32_t i = 0; i < p->k->rows; i++)
            if (n_seen[first + i] > common)
                p->k->values_row(o + i * b->pad + j * 16, s + (size_t)i * KVF_TILE + common,
                                 b->v + (j * KVF_TILE + common) * 16, n_seen[first + i] - common);
}

/* Rows [r, r + n) over the packed tile at slot `begin`. */
static void attend_rows(const kvf__prefill *p, const kvf__chunk *ch, const kvf__block *b, uint32_t r, uint32_t n,
                        uint32_t begin) {
    uint32_t n_seen[KVF__SUB_ROWS], n_hidden[KVF__SUB_ROWS], most = 0, g = p->c->n_per_kv;
    for (uint32_t i = 0; i < KVF__SUB_ROWS; i++) {
        uint32_t token = b->token_begin + KVF__MIN(r + i, r + n - 1) / g;
        n_seen[i] = seen_in(ch, token, begin, KVF_TILE);
        n_hidden[i] = hidden_in(ch, token, begin);
        if (n_hidden[i] >= n_seen[i]) n_hidden[i] = n_seen[i] = 0;
        most = KVF__MAX(most, n_seen[i]);
    }
    if (most == 0) return;
    logits(p, ch, b, r, n, most);
    kvf__state part[KVF__SUB_ROWS];
    for (uint32_t i = 0; i < n; i++) {
        float *s = b->s + (size_t)i * KVF_TILE;
        kvf__hide(p->c, s, n_hidden[i]);
        if (n_seen[i] && r + i >= b->kept_from)
            memcpy(b->kept + (r + i) * b->kept_stride + (begin - b->kept_begin), s, n_seen[i] * sizeof *s);
        if (n_seen[i]) p->k->softmax(s, n_seen[i], p->c->scale, b->bias, &part[i].m, &part[i].l);
    }
    for (uint32_t i = 0; i < n; i += p->k->rows) values(p, b, i, n_seen, n_hidden);
    for (uint32_t i = 0; i < n; i++)
        if (n_seen[i])
            kvf__state_merge(p->k, &b->state[r + i], b->o + (r + i) * b->pad, part[i], b->part + i * b->pad,
                             (uint32_t)b->pad);
}

static void finish_rows(const kvf__prefill *p, const kvf__chunk *ch, const kvf__block *b) {
    const kvf__call *c = p->c;
    for (uint32_t r = 0; r < b->n_rows; r++) {
        uint32_t token = ch->first_row + b->token_begin + r / c->n_per_kv;
        uint32_t h = ch->kv_head * c->n_per_kv + r % c->n_per_kv, d = c->pages.head_dim;
        float inv = kvf__state_inverse(b->state[r]);
        p->k->scale(c->a.out + (size_t)token * c->a.out_stride + (size_t)h * d, b->o + r * b->pad, d, inv);
        if (c->mass.lse) c->mass.lse[(size_t)token * c->a.n_q_heads + h] = kvf__state_lse(b->state[r]);
        float *stats = p->stats + ((size_t)(token - c->token_begin) * c->a.n_q_heads + h) * 2;
        stats[0] = kvf__exp_base(b->state[r].m);
        stats[1] = inv;
    }
}

/* Divides a thread's scratch. */
static kvf__block scratch(const kvf__prefill *p, uint32_t thread) {
    kvf__block b = {0};
    size_t d = p->c->pages.head_dim;
    b.pad = kvf__pad16(d);
    b.k = p->w->scratch + thread * p->w->scratch_floats;
    b.v = b.k + KVF_TILE * d;
    b.s = b.v + KVF_TILE * b.pad;
    b.part = b.s + (size_t)KVF__SUB_ROWS * KVF_TILE;
    b.o = b.part + KVF__SUB_ROWS * b.pad;
    b.bias_room = b.o + KVF__ROWS * b.pad;
    b.state = (kvf__state *)(void *)(b.bias_room + KVF_TILE);
    b.kept = (float *)(void *)(b.state + KVF__ROWS);
    return b;
}

/* Memory in which the columns of one item are added up. The probabilities of a query head and the sums over its group
 * so far are stored where the second pass packs no values. */
typedef struct kvf__cols {
    const kvf__chunk *ch;
    float *p, *reduced;  /* (KVF_TILE) */
    const float *bias;   /* of the first column, or NULL */
    size_t first;        /* column in the caller's rows */
    uint32_t last_token; /* of the chunk: the first that counts among the last */
    kvf_gqa gqa;
    kvf__max_slots largest; /* slots of the table */
} kvf__cols;

static float *sums_at(const kvf__call *c, float *const *sums, const kvf__cols *x, uint32_t row) {
    return sums && sums[x->ch->seq] ? sums[x->ch->seq] + row * c->mass.col_stride + x->first : NULL;
}

static kvf__cols cols_of(const kvf__prefill *p, const kvf__chunk *ch, const kvf__block *b, uint32_t begin) {
    const kvf__call *c = p->c;
    uint32_t missing = missing_in(ch, begin);
    kvf__cols x = {ch,
                   b->v,
                   b->v + KVF_TILE,
                   b->bias ? b->bias + missing : NULL,
                   begin + missing - ch->shift,
                   ch->n_tokens,
                   kvf__gqa_of(c, ch->seq),
                   kvf__max_slots_of(c, ch->seq, ch->n_slots)};
    if (!c->mass.last_sums || !c->mass.last_sums[ch->seq]) return x;
    uint32_t pos = c->view.next_pos[ch->seq] - ch->n_tokens, last = c->mass.last_begin[ch->seq];
    x.last_token = KVF__MIN(last - KVF__MIN(last, pos), ch->n_tokens);
    return x;
}

/* The first token of the chunk of which anything is wanted in n columns from the first slot of x on. */
static uint32_t first_wanted(const kvf__call *c, const kvf__cols *x, uint32_t n) {
    const kvf_mass *m = &c->mass;
    uint32_t seq = x->ch->seq;
    bool largest = x->largest.begin < x->first + n && x->largest.end > x->first;
    bool all = (m->col_sums && m->col_sums[seq]) || (m->sq_sums && m->sq_sums[seq]) || largest;
    return all ? 0 : x->last_token;
}

/* Squares take the group's probabilities together: heads come in order. Adding p to zeros leaves its bits. */
static void add_square(const kvf__prefill *p, const kvf__cols *x, const float *logit, uint32_t n, uint32_t in_group,
                       float *sums, const float *stats) {
    const kvf__call *c = p->c;
    float *q = in_group ? x->p : x->reduced, *reduced = x->reduced;
    if (in_group && x->gqa == KVF_GQA_FIRST) {
        if (in_group + 1 < c->n_per_kv) return;
    } else {
        memset(q, 0, n * sizeof *q);
        p->k->col_sums(q, logit, n, c->scale, x->bias, stats[0], stats[1]);
    }
    if (in_group && x->gqa == KVF_GQA_SUM)
        for (uint32_t j = 0; j < n; j++) reduced[j] += q[j];
    else if (in_group && x->gqa == KVF_GQA_MAX)
        for (uint32_t j = 0; j < n; j++) reduced[j] = q[j] > reduced[j] ? q[j] : reduced[j];
    if (in_group + 1 == c->n_per_kv)
        for (uint32_t j = 0; j < n; j++) sums[j] += reduced[j] * reduced[j];
}

/* Of n columns those whose largest probability is wanted. */
static void add_largest(const kvf__prefill *p, const kvf__cols *x, const float *logit, uint32_t n, uint32_t token,
                        uint32_t h, const float *stats) {
    const kvf__call *c = p->c;
    const kvf_mass *m = &c->mass;
    size_t begin = KVF__MAX((size_t)x->largest.begin, x->first), end = KVF__MIN((size_t)x->largest.end, x->first + n);
    if (begin >= end) return;
    size_t from = begin - x->first;
    float factor = m->query_scale ? m->query_scale[x->ch->first_row + token] : 1.0f;
    p->k->col_max(m->max_prob[x->ch->seq] + h * m->col_stride + begin, logit + from, (uint32_t)(end - begin), c->scale,
                  x->bias ? x->bias + from : NULL, stats[0], stats[1], factor);
}

/* One query head's probabilities over n columns, to all that wants them. */
static void add_columns(const kvf__prefill *p, const kvf__cols *x, const float *logit, uint32_t n, uint32_t token,
                        uint32_t in_group) {
    const kvf__call *c = p->c;
    uint32_t kv = x->ch->kv_head, h = kv * c->n_per_kv + in_group;
    const float *stats = p->stats + ((size_t)(x->ch->first_row + token - c->token_begin) * c->a.n_q_heads + h) * 2;
    float *cols = sums_at(c, c->mass.col_sums, x, h), *squares = sums_at(c, c->mass.sq_sums, x, kv);
    float *last = token >= x->last_token ? sums_at(c, c->mass.last_sums, x, h) : NULL;
    if (cols) p->k->col_sums(cols, logit, n, c->scale, x->bias, stats[0], stats[1]);
    if (last) p->k->col_sums(last, logit, n, c->scale, x->bias, stats[0], stats[1]);
    if (squares) add_square(p, x, logit, n, in_group, squares, stats);
    add_largest(p, x, logit, n, token, h, stats);
}

/* Adds the probabilities of all queries of the chunk to a range of columns, query by query. */
static void col_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__prefill *p = ctx;
    const kvf__call *c = p->c;
    uint32_t s = kvf__find(p->w->index, p->n_seqs, item), rest = item - (uint32_t)p->w->index[s];
    kvf__chunk ch = chunk_of(c, c->a.seq_begin + s, rest % c->n_kv_heads);
    uint32_t begin = rest / c->n_kv_heads * p->col_width, n = seen_in(&ch, ch.n_tokens - 1, begin, p->col_width);
    uint32_t missing = missing_in(&ch, begin);
    if (n == 0 || hidden_in(&ch, 0, begin) >= n) return; /* a table of another group is longer, or nobody sees it */
    kvf__block b = scratch(p, thread);
    b.bias = gather_bias(&ch, begin, n, b.bias_room);
    b.n_rows = ch.n_tokens * c->n_per_kv;
    kvf__cols cols = cols_of(p, &ch, &b, begin);
    uint32_t before = seen(&ch, 0) <= begin ? begin - seen(&ch, 0) + 1 : 0; /* tokens that see none of it */
    before = KVF__MAX(before, first_wanted(c, &cols, n - missing));
    if (before == ch.n_tokens) return;
    pack(p, &ch, begin, n, b.k, NULL);
    for (uint32_t r = before * c->n_per_kv; r < b.n_rows; r += KVF__SUB_ROWS) {
        if (hidden_in(&ch, r / c->n_per_kv, begin) >= n) break; /* and from all later ones */
        uint32_t rows = KVF__MIN(KVF__SUB_ROWS, b.n_rows - r);
        logits(p, &ch, &b, r, rows, seen_in(&ch, (r + rows - 1) / c->n_per_kv, begin, n));
        for (uint32_t i = 0; i < rows; i++) {
            uint32_t token = (r + i) / c->n_per_kv, in_group = (r + i) % c->n_per_kv;
            uint32_t n_seen = seen_in(&ch, token, begin, n), n_hidden = hidden_in(&ch, token, begin);
            float *logit = b.s + (size_t)i * KVF_TILE;
            if (n_hidden >= n_seen) continue;
            kvf__hide(c, logit, n_hidden);
            add_columns(p, &cols, logit + missing, n_seen - missing, token, in_group);
        }
    }
}

/* The logits that a block has kept, of one tile's columns, row by row. */
static void add_kept(const kvf__prefill *p, const kvf__chunk *ch, const kvf__block *b, uint32_t begin, uint32_t n) {
    const kvf__call *c = p->c;
    kvf__cols cols = cols_of(p, ch, b, begin);
    uint32_t missing = missing_in(ch, begin);
    for (uint32_t r = b->kept_from; r < b->n_rows; r++) {
        uint32_t token = b->token_begin + r / c->n_per_kv, in_group = r % c->n_per_kv;
        uint32_t n_seen = seen_in(ch, token, begin, n), n_hidden = hidden_in(ch, token, begin);
        if (n_hidden >= n_seen) continue;
        const float *logit = b->kept + r * b->kept_stride + (begin - b->kept_begin);
        add_columns(p, &cols, logit + missing, n_seen - missing, token, in_group);
    }
}

/* Waits until the blocks before this one have added their rows. They were taken before it, so that each of them is at work. */
static void take_turn(atomic_uint *turn, uint32_t block) {
    for (int spin = 0; atomic_load_explicit(turn, memory_order_acquire) != block; spin++)
        if (spin > 1000) sched_yield();
}

static void attend_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__prefill *p = ctx;
    const kvf__call *c = p->c;
    if (!p->keeps) item = p->n_items - 1 - item; /* the longest contexts first */
    uint32_t s = kvf__find(p->w->index, p->n_seqs, item), rest = item - (uint32_t)p->w->index[s];
    kvf__chunk ch = chunk_of(c, c->a.seq_begin + s, rest % c->n_kv_heads);
    kvf__block b = scratch(p, thread);
    uint32_t block = rest / c->n_kv_heads;
    b.token_begin = block * p->block_tokens;
    uint32_t token_end = KVF__MIN(ch.n_tokens - b.token_begin, p->block_tokens) + b.token_begin;
    b.n_rows = b.kept_from = (token_end - b.token_begin) * c->n_per_kv;
    uint32_t tile_begin = first_seen(&ch, b.token_begin) / KVF_TILE, last_seen = seen(&ch, token_end - 1);
    bool adds = p->keeps && kvf__wants_cols(c, ch.seq);
    if (adds) {
        kvf__cols cols = cols_of(p, &ch, &b, tile_begin * KVF_TILE);
        uint32_t first = first_wanted(c, &cols, last_seen);
        if (first < token_end) b.kept_from = (KVF__MAX(first, b.token_begin) - b.token_begin) * c->n_per_kv;
        b.kept_begin = tile_begin * KVF_TILE;
        b.kept_stride = kvf__pad16(last_seen - b.kept_begin);
    }
    memset(b.o, 0, b.n_rows * b.pad * sizeof *b.o);
    for (uint32_t r = 0; r < b.n_rows; r++) b.state[r] = (kvf__state){-INFINITY, 0};
    for (uint32_t begin = tile_begin * KVF_TILE; begin < last_seen; begin += KVF_TILE) {
        uint32_t n = seen_in(&ch, token_end - 1, begin, KVF_TILE);
        pack(p, &ch, begin, n, b.k, b.v);
        b.bias = gather_bias(&ch, begin, n, b.bias_room);
        for (uint32_t r = 0; r < b.n_rows; r += KVF__SUB_ROWS)
            attend_rows(p, &ch, &b, r, KVF__MIN(KVF__SUB_ROWS, b.n_rows - r), begin);
    }
    finish_rows(p, &ch, &b);
    if (!adds) return;
    atomic_uint *turn = (atomic_uint *)&p->w->turns[(size_t)s * c->n_kv_heads + ch.kv_head];
    take_turn(turn, block);
    for (uint32_t begin = b.kept_begin; begin < last_seen && b.kept_from < b.n_rows; begin += KVF_TILE) {
        uint32_t n = seen_in(&ch, token_end - 1, begin, KVF_TILE);
        b.bias = gather_bias(&ch, begin, n, b.bias_room);
        add_kept(p, &ch, &b, begin, n);
    }
    atomic_store_explicit(turn, block + 1, memory_order_release);
}

/* Rows of a block whose logits can be kept: 0 when they are too few for that. */
static uint32_t kept_rows(const kvf__prefill *p) {
    const kvf__call *c = p->c;
    uint32_t longest = 0;
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end; i++)
        for (uint32_t g = 0; g < c->view.n_groups && kvf__wants_cols(c, i); g++)
            longest = KVF__MAX(longest, kvf__columns_of(c, i, g).end);
    size_t rows = p->w->kept_floats / kvf__pad16((size_t)longest + 1);
    return rows < KVF__MAX(KVF__SUB_ROWS, c->n_per_kv) ? 0 : (uint32_t)KVF__MIN(rows, KVF__ROWS);
}

/* Counts items per sequence into the index. False when they are more than a call can have. */
static bool index_items(kvf__prefill *p, bool cols) {
    const kvf__call *c = p->c;
    uint64_t n = 0;
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end; i++) {
        uint32_t tokens = c->a.q_begin[i + 1] - c->a.q_begin[i], longest = 0;
        p->w->index[i - c->a.seq_begin] = n;
        for (uint32_t g = 0; g < c->view.n_groups && tokens; g++)
            longest = KVF__MAX(longest, kvf__columns_of(c, i, g).end);
        uint32_t shares = !cols                   ? kvf__ceil_div(tokens, p->block_tokens)
                          : kvf__wants_cols(c, i) ? kvf__ceil_div(longest, p->col_width)
                                                  : 0;
        n += (uint64_t)shares * c->n_kv_heads;
        if (n > UINT32_MAX) return false;
    }
    p->w->index[p->n_seqs] = n;
    p->n_items = (uint32_t)n;
    return true;
}

kvf_status kvf__cpu_prefill(kvf_stream *stream, const kvf__call *c, const kvf__workspace *w, kvf_cpu_path path,
                            kvf_error *err) {
    kvf__prefill p = {c,
                      kvf__kernels_of(path),
                      w,
                      (float *)(void *)w->rest,
                      KVF__MAX(KVF__ROWS / c->n_per_kv, 1u),
                      KVF_TILE,
                      c->a.seq_end - c->a.seq_begin,
                      0,
                      false};
    static const char *too_many = "prefill: more than 2^32 shares of work; split the batch";
    uint32_t enough = c->n_threads > 1 ? 4 * c->n_threads : 1;
    bool cols = c->mass.col_sums || c->mass.last_sums || c->mass.sq_sums || c->mass.max_prob;
    uint32_t rows = cols ? kept_rows(&p) : 0;
    if (rows) {
        p.keeps = true;
        cols = false;
        p.block_tokens = rows / c->n_per_kv;
        if (p.block_tokens > 8) p.block_tokens -= p.block_tokens % 8; /* whole KVF__SUB_ROWS, for most groups */
        memset(w->turns, 0, (size_t)p.n_seqs * c->n_kv_heads * sizeof *w->turns);
    }
    for (; cols; p.col_width /= 2) { /* the second pass is counted first, so that a failure changes nothing */
        if (!index_items(&p, true)) return kvf__fail(err, KVF_E_OVERFLOW, "%s", too_many);
        if (p.n_items >= enough || p.col_width == 64) break;
    }
    for (;; p.block_tokens = kvf__ceil_div(p.block_tokens, 2)) {
        if (!index_items(&p, false)) return kvf__fail(err, KVF_E_OVERFLOW, "%s", too_many);
        if (p.n_items >= enough || p.block_tokens * c->n_per_kv <= KVF__SUB_ROWS || p.block_tokens == 1) break;
    }
    kvf__stream_for(stream, p.n_items, attend_item, &p);
    if (!cols) return KVF_OK;
    if (!index_items(&p, true)) return kvf__fail(err, KVF_E_OVERFLOW, "%s", too_many);
    kvf__stream_for(stream, p.n_items, col_item, &p);
    return KVF_OK;
}
