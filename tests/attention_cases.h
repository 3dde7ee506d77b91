/* Hand-built pages, views and calls for the attention's tests, and a naive model over dense arrays. */
#ifndef KVF_TESTS_ATTENTION_CASES_H
#define KVF_TESTS_ATTENTION_CASES_H

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "kvfold/attention.h"

enum { MAX_SEQS = 4, LAYERS = 2, LAYER = 1, LAST = 4 }; /* LAST: newest tokens of a sequence that last_sums takes */

/* tokens[i] new tokens of sequence i after context[i] slots; in group j the context is j * 9 slots shorter where it
 * can be. */
typedef struct shape {
    uint32_t n_groups, heads_per_group, per_kv, head_dim, block_size, n_seqs;
    uint32_t context[MAX_SEQS], tokens[MAX_SEQS];
    kvf_dtype dtype;
    bool bias;
    uint32_t window, dropped; /* dropped: positions before the context, whole blocks */
} shape;

typedef struct world {
    shape s;
    uint32_t n_kv, n_q, n_total, stride; /* stride: slots of a dense row */
    size_t q_stride, kv_stride;
    uint32_t q_begin[MAX_SEQS + 1];
    float *q, *k, *v;                /* new tokens, ragged */
    float *dense_k, *dense_v, *bias; /* (seq, kv, slot, d), (seq, kv, slot) */
    kvf_pages pages;
    kvf_view view;
    uint32_t *rows, *n_slots, *next_pos;
    uint64_t *row_offset;
} world;

/* Outputs, dense: (token, head, d), (token, head), (seq, head, slot) twice, (seq, kv head, slot) twice, (seq, head, slot). */
typedef struct results {
    float *out, *lse, *cols, *last, *row, *squares, *largest;
    size_t n_out, n_lse, n_cols, n_row;
} results;

static inline uint64_t next_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
/* About normal, variance 1. */
static inline float random_float(uint64_t *state) {
    double x = 0;
    for (int i = 0; i < 3; i++) x += (double)(next_random(state) >> 11) * 0x1p-53 * 2 - 1;
    return (float)x;
}
static inline void *zeros(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size);
    cr_assert(p);
    return p;
}

static inline uint32_t context_of(const shape *s, uint32_t seq, uint32_t group) {
    uint32_t less = group * (s->window ? s->block_size : 9);
    return s->context[seq] > less ? s->context[seq] - less : s->context[seq];
}
static inline uint32_t table_of(const world *w, uint32_t seq, uint32_t group) {
    return (seq * LAYERS + LAYER) * w->s.n_groups + group;
}

static inline float stored(const world *w, float x) {
    return w->s.dtype == KVF_F32 ? x : kvf__widen(w->s.dtype, kvf__narrow(w->s.dtype, x));
}

static inline void put(const world *w, void *base, uint64_t stride, uint32_t block, size_t at, float x) {
    unsigned char *p = (unsigned char *)base + stride * block;
    if (w->s.dtype == KVF_F32)
        ((float *)(void *)p)[at] = x;
    else
        ((uint16_t *)(void *)p)[at] = kvf__narrow(w->s.dtype, x);
}

/* Sets all K and V of one block, or only slots from `slot` on. */
static inline void fill_block(const world *w, uint32_t block, uint32_t slot, float x) {
    for (uint32_t h = 0; h < w->s.heads_per_group; h++)
        for (uint32_t j = slot; j < w->s.block_size; j++)
            for (uint32_t i = 0; i < w->s.head_dim; i++) {
                size_t at = ((size_t)h * w->s.block_size + j) * w->s.head_dim + i;
                put(w, w->pages.k, w->pages.k_block_stride, block, at, x);
                put(w, w->pages.v, w->pages.v_block_stride, block, at, x);
            }
}

static inline void make_pages(world *w, uint32_t n_blocks) {
    const shape *s = &w->s;
    kvf_pages *p = &w->pages;
    *p = (kvf_pages){.struct_size = sizeof *p,
                     .dtype = s->dtype,
                     .n_blocks = n_blocks,
                     .block_size = s->block_size,
                     .heads_per_group = s->heads_per_group,
                     .head_dim = s->head_dim};
    size_t half = kvf_pages_block_bytes(p) / 2, slots = (size_t)n_blocks * s->heads_per_group * s->block_size;
    p->k = malloc(n_blocks * half * 2); /* K and V of a block side by side */
    cr_assert(p->k);
    p->v = (unsigned char *)p->k + half;
    p->k_block_stride = p->v_block_stride = half * 2;
    p->pos = zeros(slots, sizeof *p->pos);
    p->key_norm = zeros(slots, sizeof(float));
    p->weight = zeros(slots, sizeof(float));
    p->score = zeros(slots, sizeof(float));
    if (s->bias) p->bias = zeros(slots, sizeof(float));
}

static inline void make_view(world *w, uint64_t *seed) {
    const shape *s = &w->s;
    uint32_t n_tables = s->n_seqs * LAYERS * s->n_groups, per_table = w->stride / s->block_size + 1;
    uint32_t n_blocks = n_tables * per_table + 3;
    make_pages(w, n_blocks);
    uint32_t *order = zeros(n_blocks, sizeof *order);
    for (uint32_t i = 0; i < n_blocks; i++) order[i] = i;
    for (uint32_t i = n_blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(next_random(seed) % (i + 1)), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    w->rows = order;
    w->row_offset = zeros(n_tables, sizeof *w->row_offset);
    w->n_slots = zeros(n_tables, sizeof *w->n_slots);
    w->next_pos = zeros(s->n_seqs, sizeof *w->next_pos);
    for (uint32_t t = 0; t < n_tables; t++) w->row_offset[t] = (uint64_t)t * per_table;
    w->view = (kvf_view){.struct_size = sizeof w->view,
                         .n_seqs = s->n_seqs,
                         .n_layers = LAYERS,
                         .n_groups = s->n_groups,
                         .heads_per_group = s->heads_per_group,
                         .block_size = s->block_size,
                         .rows = w->rows,
                         .row_offset = w->row_offset,
                         .n_slots = w->n_slots,
                         .next_pos = w->next_pos};
}

static inline size_t dense_at(const world *w, uint32_t seq, uint32_t kv, uint32_t slot) {
    return ((size_t)seq * w->n_kv + kv) * w->stride + slot;
}

/* Writes the context's slots, leaves NaN everywhere else, and sets the tables to the context. */
static inline void reset_pages(world *w) {
    const shape *s = &w->s;
    for (uint32_t b = 0; b < w->pages.n_blocks; b++) fill_block(w, b, 0, NAN);
    if (w->pages.bias)
        for (size_t i = 0; i < (size_t)w->pages.n_blocks * s->heads_per_group * s->block_size; i++)
            w->pages.bias[i] = NAN;
    for (uint32_t seq = 0; seq < s->n_seqs; seq++) {
        /* As after an eviction: positions run ahead of slots. */
        w->next_pos[seq] = s->context[seq] + (s->window ? s->dropped : 100);
        for (uint32_t kv = 0; kv < w->n_kv; kv++) {
            uint32_t group = kv / s->heads_per_group, head = kv % s->heads_per_group, t = table_of(w, seq, group);
            w->n_slots[t] = context_of(s, seq, group);
            for (uint32_t j = 0; j < w->n_slots[t]; j++) {
                uint32_t block = w->rows[w->row_offset[t] + j / s->block_size];
                size_t at = (size_t)head * s->block_size + j % s->block_size, from = dense_at(w, seq, kv, j);
                for (uint32_t i = 0; i < s->head_dim; i++) {
                    put(w, w->pages.k, w->pages.k_block_stride, block, at * s->head_dim + i,
                        w->dense_k[from * s->head_dim + i]);
                    put(w, w->pages.v, w->pages.v_block_stride, block, at * s->head_dim + i,
                        w->dense_v[from * s->head_dim + i]);
                }
                if (w->pages.bias)
                    w->pages.bias[((size_t)block * s->heads_per_group) * s->block_size + at] = w->bias[from];
            }
        }
    }
}

static inline world *make_world(shape s, uint64_t seed) {
    world *w = zeros(1, sizeof *w);
    w->s = s;
    w->n_kv = s.n_groups * s.heads_per_group;
    w->n_q = w->n_kv * s.per_kv;
    for (uint32_t i = 0; i < s.n_seqs; i++) {
        w->q_begin[i + 1] = w->q_begin[i] + s.tokens[i];
        w->stride = KVF__MAX(w->stride, s.context[i] + s.tokens[i]);
    }
    w->n_total = w->q_begin[s.n_seqs];
    w->q_stride = (size_t)w->n_q * s.head_dim + 8;
    w->kv_stride = (size_t)w->n_kv * s.head_dim + 24;
    w->q = zeros(w->n_total * w->q_stride, sizeof(float));
    w->k = zeros(w->n_total * w->kv_stride, sizeof(float));
    w->v = zeros(w->n_total * w->kv_stride, sizeof(float));
    size_t n = (size_t)s.n_seqs * w->n_kv * w->stride;
    w->dense_k = zeros(n * s.head_dim, sizeof(float));
    w->dense_v = zeros(n * s.head_dim, sizeof(float));
    w->bias = zeros(n, sizeof(float));
    for (size_t i = 0; i < n * s.head_dim; i++) w->dense_k[i] = stored(w, random_float(&seed));
    for (size_t i = 0; i < n * s.head_dim; i++) w->dense_v[i] = stored(w, random_float(&seed));
    for (size_t i = 0; i < w->n_total * w->q_stride; i++) w->q[i] = 2 * random_float(&seed);
    for (uint32_t seq = 0; seq < s.n_seqs; seq++)
        for (uint32_t kv = 0; kv < w->n_kv; kv++) {
            uint32_t context = context_of(&s, seq, kv / s.heads_per_group);
            for (uint32_t j = 0; s.bias && j < context; j++) w->bias[dense_at(w, seq, kv, j)] = random_float(&seed);
            for (uint32_t j = 0; j < s.tokens[seq]; j++) {
                size_t to = (w->q_begin[seq] + j) * w->kv_stride + kv * s.head_dim,
                       from = dense_at(w, seq, kv, context + j);
                memcpy(w->k + to, w->dense_k + from * s.head_dim, s.head_dim * sizeof(float));
                memcpy(w->v + to, w->dense_v + from * s.head_dim, s.head_dim * sizeof(float));
            }
        }
    make_view(w, &seed);
    reset_pages(w);
    return w;
}

static inline void free_world(world *w) {
    void *all[] = {
        w->q,          w->k,          w->v,          w->dense_k, w->dense_v,   w->bias,           w->rows,
        w->n_slots,    w->next_pos,   w->row_offset, w->pages.k, w->pages.pos, w->pages.key_norm, w->pages.weight,
        w->pages.bias, w->pages.score};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(w);
}

static inline results make_results(const world *w) {
    results r = {.n_out = (size_t)w->n_total * w->n_q * w->s.head_dim,
                 .n_lse = (size_t)w->n_total * w->n_q,
                 .n_cols = (size_t)w->s.n_seqs * w->n_q * w->stride,
                 .n_row = (size_t)w->s.n_seqs * w->n_kv * w->stride};
    r.out = zeros(r.n_out, sizeof(float));
    r.lse = zeros(r.n_lse, sizeof(float));
    r.cols = zeros(r.n_cols, sizeof(float));
    r.last = zeros(r.n_cols, sizeof(float));
    r.row = zeros(r.n_row, sizeof(float));
    r.squares = zeros(r.n_row, sizeof(float));
    r.largest = zeros(r.n_cols, sizeof(float));
    return r;
}
static inline void free_results(results *r) {
    free(r->out);
    free(r->lse);
    free(r->cols);
    free(r->last);
    free(r->row);
    free(r->squares);
    free(r->largest);
}

/* A call over all sequences, without queries, outputs and workspace. */
static inline kvf_attention make_call(const world *w) {
    return (kvf_attention){.struct_size = sizeof(kvf_attention),
                           .view = &w->view,
                           .pages = &w->pages,
                           .layer = LAYER,
                           .seq_end = w->s.n_seqs,
                           .n_q_heads = w->n_q,
                           .q_begin = w->q_begin,
                           .q = w->q,
                           .k = w->k,
                           .v = w->v,
                           .q_stride = w->q_stride,
                           .kv_stride = w->kv_stride,
                           .out_stride = w->q_stride,
                           .window = w->s.window};
}

/* Exactly the bytes a call needs, so that a write past them is seen. */
static inline void give_workspace(const world *w, kvf_attention *a, uint32_t n_threads) {
    uint32_t slots = 0, tokens = a->q_begin[a->seq_end] - a->q_begin[a->seq_begin];
    for (uint32_t i = a->seq_begin; i < a->seq_end; i++)
        for (uint32_t g = 0; g < w->s.n_groups; g++) slots = KVF__MAX(slots, w->n_slots[table_of(w, i, g)]);
    cr_assert_eq(kvf_attention_workspace_bytes(n_threads, w->s.head_dim, w->n_q, w->n_kv, slots,
                                               a->seq_end - a->seq_begin, tokens, &a->workspace_bytes),
                 KVF_OK);
    a->workspace = aligned_alloc(64, a->workspace_bytes);
    cr_assert(a->workspace);
    memset(a->workspace, 0xff, a->workspace_bytes); /* NaN */
}

/* How to run: the chunk (prefill), threads, path, range, and whether tokens go one by one through decode. */
typedef struct plan {
    kvf_cpu_path path;
    uint32_t n_threads, chunk, seq_begin, seq_end;
    bool decode, no_cols, no_last, no_squares, no_largest;
    const uint8_t *gqa, *row_wanted;
} plan;

/* The position before which queries do not count among the last. */
static inline uint32_t last_begin_of(const shape *s, uint32_t seq) {
    uint32_t end = s->context[seq] + (s->window ? s->dropped : 100) + s->tokens[seq];
    return end - KVF__MIN(end, (uint32_t)LAST);
}

/* The positions whose largest probabilities are wanted: from some of the context to some of the new tokens. */
static inline uint32_t max_begin_of(const shape *s, uint32_t seq) {
    return (s->window ? s->dropped : 100) + s->context[seq] - s->context[seq] * 2 / 3;
}
static inline uint32_t max_end_of(const shape *s, uint32_t seq) {
    return (s->window ? s->dropped : 100) + s->context[seq] + (s->context[seq] % 2 ? 0 : s->tokens[seq] / 2);
}
static inline float query_scale(uint32_t token) { return 0.25f + (float)(token % 7) * 0.3f; }

/* One step: tokens [done, done + chunk) of each sequence, where there are any. */
static inline bool run_step(world *w, const plan *p, kvf_stream *stream, uint32_t done, results *r) {
    const shape *s = &w->s;
    uint32_t q_begin[MAX_SEQS + 1] = {0}, d = s->head_dim;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        bool in = i >= p->seq_begin && i < p->seq_end && s->tokens[i] > done;
        uint32_t n = in ? KVF__MIN(p->chunk, s->tokens[i] - done) : 0;
        q_begin[i + 1] = q_begin[i] + n;
        w->next_pos[i] += n;
        for (uint32_t g = 0; g < s->n_groups; g++) w->n_slots[table_of(w, i, g)] += n;
    }
    uint32_t n = q_begin[s->n_seqs];
    if (n == 0) return false;
    float *q = zeros(n * w->q_stride, 4), *out = zeros(n * w->q_stride, 4), *lse = zeros((size_t)n * w->n_q, 4);
    float *k = zeros(n * w->kv_stride, 4), *v = zeros(n * w->kv_stride, 4);
    float *cols[MAX_SEQS], *last[MAX_SEQS], *squares[MAX_SEQS], *largest[MAX_SEQS], *scales = zeros(n, 4);
    uint32_t last_begin[MAX_SEQS], max_begin[MAX_SEQS], max_end[MAX_SEQS];
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        size_t from = w->q_begin[i] + done, rows = q_begin[i + 1] - q_begin[i];
        memcpy(q + q_begin[i] * w->q_stride, w->q + from * w->q_stride, rows * w->q_stride * 4);
        memcpy(k + q_begin[i] * w->kv_stride, w->k + from * w->kv_stride, rows * w->kv_stride * 4);
        memcpy(v + q_begin[i] * w->kv_stride, w->v + from * w->kv_stride, rows * w->kv_stride * 4);
        cols[i] = r->cols + (size_t)i * w->n_q * w->stride;
        last[i] = r->last + (size_t)i * w->n_q * w->stride;
        squares[i] = r->squares + (size_t)i * w->n_kv * w->stride;
        last_begin[i] = last_begin_of(s, i);
        largest[i] = r->largest + (size_t)i * w->n_q * w->stride;
        max_end[i] = KVF__MIN(max_end_of(s, i), w->next_pos[i]);
        max_begin[i] = KVF__MIN(max_begin_of(s, i), max_end[i]);
        for (uint32_t t = 0; t < rows; t++) scales[q_begin[i] + t] = query_scale((uint32_t)from + t);
    }
    kvf_mass mass = {.struct_size = sizeof mass,
                     .col_sums = p->no_cols ? NULL : cols,
                     .col_stride = w->stride,
                     .row = r->row,
                     .row_stride = w->stride,
                     .row_wanted = p->row_wanted,
                     .row_gqa = p->gqa,
                     .lse = lse,
                     .last_sums = p->no_last ? NULL : last,
                     .last_begin = p->no_last ? NULL : last_begin,
                     .sq_sums = p->no_squares ? NULL : squares,
                     .max_prob = p->no_largest ? NULL : largest,
                     .max_begin = max_begin,
                     .max_end = max_end,
                     .query_scale = scales};
    kvf_attention a = make_call(w);
    a.seq_begin = p->seq_begin;
    a.seq_end = p->seq_end;
    a.q_begin = q_begin;
    a.q = q;
    a.k = k;
    a.v = v;
    a.out = out;
    a.mass = &mass;
    a.path = p->path;
    give_workspace(w, &a, p->n_threads);
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_attention_append(stream, &a, &err), KVF_OK, "%s", err.text);
    kvf_status st = p->decode ? kvf_attention_decode(stream, &a, &err) : kvf_attention_prefill(stream, &a, &err);
    cr_assert_eq(st, KVF_OK, "%s", err.text);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        for (uint32_t t = 0; t < q_begin[i + 1] - q_begin[i]; t++) {
            size_t from = q_begin[i] + t, to = w->q_begin[i] + done + t;
            memcpy(r->out + to * w->n_q * d, out + from * w->q_stride, (size_t)w->n_q * d * 4);
            memcpy(r->lse + to * w->n_q, lse + from * w->n_q, (size_t)w->n_q * 4);
        }
    void *all[] = {q, k, v, out, lse, scales, a.workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return true;
}

/* Decode takes a token of every sequence of its range: runs of sequences that still have one. */
static inline bool run_decode_step(world *w, plan p, kvf_stream *stream, uint32_t done, results *r) {
    uint32_t end = p.seq_end;
    bool any = false;
    for (uint32_t i = p.seq_begin; i < end; i = p.seq_end + 1) {
        for (p.seq_begin = i; p.seq_begin < end && w->s.tokens[p.seq_begin] <= done; p.seq_begin++) {}
        for (p.seq_end = p.seq_begin; p.seq_end < end && w->s.tokens[p.seq_end] > done; p.seq_end++) {}
        if (p.seq_begin < p.seq_end) any |= run_step(w, &p, stream, done, r);
    }
    return any;
}

static inline results run_plan(world *w, plan p) {
    results r = make_results(w);
    kvf_stream *stream;
    if (p.seq_end == 0) p.seq_end = w->s.n_seqs;
    if (p.chunk == 0) p.chunk = p.decode ? 1 : UINT32_MAX;
    if (p.n_threads == 0) p.n_threads = 1;
    cr_assert_eq(kvf_stream_create_cpu(NULL, p.n_threads, &stream, NULL), KVF_OK);
    reset_pages(w);
    for (uint32_t done = 0, more = 1; more; done += p.chunk) {
        more = p.decode ? run_decode_step(w, p, stream, done, &r) : run_step(w, &p, stream, done, &r);
        if (p.chunk > UINT32_MAX - done) break;
    }
    kvf_stream_destroy(stream);
    return r;
}

/* The naive model: every new token over the dense arrays, in double. row: of the newest token. */
static inline results run_naive(const world *w, const uint8_t *gqa) {
    results r = make_results(w);
    const shape *s = &w->s;
    uint32_t d = s->head_dim;
    double *p = zeros(w->stride, sizeof *p), *reduced = zeros(w->stride, sizeof *p), scale = 1 / sqrt((double)d);
    for (uint32_t seq = 0; seq < s->n_seqs; seq++)
        for (uint32_t t = 0; t < s->tokens[seq]; t++)
            for (uint32_t h = 0; h < w->n_q; h++) {
                uint32_t kv = h / s->per_kv, n = context_of(s, seq, kv / s->heads_per_group) + t + 1;
                const float *q = w->q + (w->q_begin[seq] + t) * w->q_stride + (size_t)h * d;
                double sum = 0;
                uint32_t first = s->window && n > s->window ? n - s->window : 0;
                for (uint32_t j = 0; j < first; j++) p[j] = 0;
                for (uint32_t j = first; j < n; j++) {
                    const float *k = w->dense_k + dense_at(w, seq, kv, j) * d;
                    double x = 0;
                    for (uint32_t i = 0; i < d; i++) x += (double)q[i] * (double)k[i];
                    p[j] = exp(x * scale + (double)w->bias[dense_at(w, seq, kv, j)]);
                    sum += p[j];
                }
                size_t token = w->q_begin[seq] + t;
                r.lse[token * w->n_q + h] = (float)log(sum);
                for (uint32_t i = 0; i < d; i++) {
                    double x = 0;
                    for (uint32_t j = first; j < n; j++)
                        x += p[j] / sum * (double)w->dense_v[dense_at(w, seq, kv, j) * d + i];
                    r.out[(token * w->n_q + h) * d + i] = (float)x;
                }
                for (uint32_t j = 0; j < n; j++) {
                    double x = p[j] / sum;
                    size_t column = ((size_t)seq * w->n_q + h) * w->stride + j, at = dense_at(w, seq, kv, j);
                    r.cols[column] += (float)x;
                    if (t + LAST >= s->tokens[seq]) r.last[column] += (float)x;
                    uint32_t mode = gqa ? gqa[seq] : KVF_GQA_SUM, in_group = h % s->per_kv;
                    if (in_group == 0)
                        reduced[j] = x;
                    else if (mode == KVF_GQA_SUM)
                        reduced[j] += x;
                    else if (mode == KVF_GQA_MAX && x > reduced[j])
                        reduced[j] = x;
                    r.row[at] = (float)reduced[j];
                    if (in_group + 1 == s->per_kv) r.squares[at] += (float)(reduced[j] * reduced[j]);
                    uint32_t end = (s->window ? s->dropped : 100) + s->context[seq] + t + 1, pos = end - n + j;
                    if (pos < max_begin_of(s, seq) || pos >= max_end_of(s, seq)) continue;
                    r.largest[column] = KVF__MAX(r.largest[column], (float)x * query_scale((uint32_t)token));
                }
            }
    free(p);
    free(reduced);
    return r;
}

static inline double worst(const float *a, const float *b, size_t n) {
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)a[i] - (double)b[i]) / KVF__MAX(1.0, fabs((double)b[i]));
        if (!(e <= most)) most = e; /* a NaN stays */
    }
    return most;
}

static inline void expect_near(const results *a, const results *b, double bound, const char *what, bool cols,
                               bool row) {
    cr_assert(worst(a->out, b->out, a->n_out) <= bound, "%s: out off by %g", what, worst(a->out, b->out, a->n_out));
    cr_assert(worst(a->lse, b->lse, a->n_lse) <= bound, "%s: lse off by %g", what, worst(a->lse, b->lse, a->n_lse));
    const float *sums[][2] = {
        {a->cols, b->cols}, {a->last, b->last}, {a->largest, b->largest}, {a->squares, b->squares}};
    for (uint32_t i = 0; i < 4 && cols; i++) {
        size_t n = i < 3 ? a->n_cols : a->n_row;
        cr_assert(worst(sums[i][0], sums[i][1], n) <= bound, "%s: sums %u by column off by %g", what, i,
                  worst(sums[i][0], sums[i][1], n));
    }
    if (row)
        cr_assert(worst(a->row, b->row, a->n_row) <= bound, "%s: row off by %g", what, worst(a->row, b->row, a->n_row));
}

static inline void expect_same(const results *a, const results *b, const char *what) {
    cr_assert_arr_eq(a->out, b->out, a->n_out * sizeof(float), "%s: out", what);
    cr_assert_arr_eq(a->lse, b->lse, a->n_lse * sizeof(float), "%s: lse", what);
    cr_assert_arr_eq(a->cols, b->cols, a->n_cols * sizeof(float), "%s: column sums", what);
    cr_assert_arr_eq(a->last, b->last, a->n_cols * sizeof(float), "%s: column sums of the last queries", what);
    cr_assert_arr_eq(a->row, b->row, a->n_row * sizeof(float), "%s: row", what);
    cr_assert_arr_eq(a->squares, b->squares, a->n_row * sizeof(float), "%s: sums of squares", what);
    cr_assert_arr_eq(a->largest, b->largest, a->n_cols * sizeof(float), "%s: largest probabilities", what);
}

static inline const char *path_name(kvf_cpu_path path) {
    static const char *const names[] = {"auto", "ref", "scalar", "avx2", "avx512"};
    return names[path];
}

/* A world on every path against the naive model: as prefill, or as decode of the sequences' first four tokens. */
static inline void against_naive(const shape *s, size_t i, bool decode, double bound) {
    static const uint8_t gqa[MAX_SEQS] = {KVF_GQA_SUM, KVF_GQA_MAX, KVF_GQA_FIRST};
    shape cut = *s;
    for (uint32_t seq = 0; seq < s->n_seqs && decode; seq++) cut.tokens[seq] = KVF__MIN(s->tokens[seq], 4);
    world *w = make_world(cut, i + 1);
    results want = run_naive(w, gqa);
    for (kvf_cpu_path path = KVF_CPU_AUTO; path <= KVF_CPU_AVX512; path++) {
        char what[100];
        if (!kvf_cpu_has_path(path)) continue;
        snprintf(what, sizeof what, "shape %zu, %s, %s", i, path_name(path), decode ? "decode" : "prefill");
        results got = run_plan(w, (plan){.path = path, .n_threads = 2, .decode = decode, .gqa = gqa});
        expect_near(&got, &want, bound, what, !decode, decode);
        free_results(&got);
    }
    free_results(&want);
    free_world(w);
}

/* One shape of random, in chunks of some length and in decode. state: goes on. */
static inline void random_against_naive(const shape *s, uint64_t seed, uint64_t *state, double bound) {
    world *w = make_world(*s, seed);
    results want = run_naive(w, NULL);
    char what[100];
    for (int decode = 0; decode < 2; decode++) {
        snprintf(what, sizeof what, "seed %llu, decode %d", (unsigned long long)seed, decode);
        uint32_t chunk = decode ? 0 : 1 + next_random(state) % 9;
        results got = run_plan(w, (plan){.n_threads = 2, .decode = decode, .chunk = chunk});
        expect_near(&got, &want, bound, what, !decode, decode);
        free_results(&got);
    }
    free_results(&want);
    free_world(w);
}

#endif
