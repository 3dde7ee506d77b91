/* The reference: plain C in double precision, one thread, one query head at a time. */
#include "attention/call.h"

#include <math.h>

/* Where the answer of one query head over the first n slots of one table comes from. */
typedef struct kvf__ref_head {
    const kvf__call *c;
    const float *q;      /* (head_dim) */
    const uint32_t *row; /* block ids */
    uint32_t head;       /* in its group */
    uint32_t begin, n;   /* slots [begin, n) are seen */
} kvf__ref_head;

static double element(const kvf__call *c, const unsigned char *rows, uint32_t slot, uint32_t i) {
    size_t at = (size_t)(slot % c->pages.block_size) * c->pages.head_dim + i;
    if (c->pages.dtype == KVF_F32) return (double)((const float *)(const void *)rows)[at];
    return (double)kvf__widen(c->pages.dtype, ((const uint16_t *)(const void *)rows)[at]);
}

/* Probabilities p[n], 0 where a slot is not seen; returns the natural log of the denominator. */
static double probabilities(const kvf__ref_head *r, double *p) {
    const kvf__call *c = r->c;
    const kvf_pages *pages = &c->pages;
    double top = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < r->begin; j++) p[j] = 0;
    for (uint32_t j = r->begin; j < r->n; j++) {
        uint32_t block = r->row[j / pages->block_size];
        const unsigned char *k = kvf__k_at(&c->pages, block, r->head, 0);
        double s = 0;
        for (uint32_t i = 0; i < pages->head_dim; i++) s += (double)r->q[i] * element(c, k, j, i);
        s *= (double)c->scale;
        if (pages->bias) s += (double)pages->bias[kvf__meta_at(pages, block, r->head, j % pages->block_size)];
        p[j] = s;
        if (s > top) top = s;
    }
    for (uint32_t j = r->begin; j < r->n; j++) {
        p[j] = top == -INFINITY ? 0 : exp(p[j] - top);
        sum += p[j];
    }
    for (uint32_t j = r->begin; j < r->n; j++) p[j] = sum == 0 ? 0 : p[j] / sum;
    return top + log(sum);
}

static void weighted_values(const kvf__ref_head *r, const double *p, float *out) {
    const kvf__call *c = r->c;
    double o[256] = {0};
    for (uint32_t j = r->begin; j < r->n; j++) {
        const unsigned char *v = kvf__v_at(&c->pages, r->row[j / c->pages.block_size], r->head, 0);
        for (uint32_t i = 0; i < c->pages.head_dim; i++) o[i] += p[j] * element(c, v, j, i);
    }
    for (uint32_t i = 0; i < c->pages.head_dim; i++) out[i] = (float)o[i];
}

/* One query row of one head: output, lse, and its probabilities in p. */
static kvf__ref_head attend(const kvf__call *c, uint32_t seq, uint32_t token, uint32_t h, double *p) {
    uint32_t kv = h / c->n_per_kv, hpg = c->pages.heads_per_group;
    size_t t = kvf__table(c, seq, kv / hpg), at = (size_t)h * c->pages.head_dim;
    uint32_t n = c->view.n_slots[t] - (c->a.q_begin[seq + 1] - token - 1);
    kvf__ref_head r = {c,
                       c->a.q + (size_t)token * c->a.q_stride + at,
                       c->view.rows + c->view.row_offset[t],
                       kv % hpg,
                       kvf__first_seen(c, n),
                       n};
    double lse = probabilities(&r, p);
    weighted_values(&r, p, c->a.out + (size_t)token * c->a.out_stride + at);
    if (c->mass.lse) c->mass.lse[(size_t)token * c->a.n_q_heads + h] = (float)lse;
    return r;
}

/* Adds what a query head gives each slot to what wants it: queries come in order, and of each its heads. */
static void add_mass(const kvf__call *c, const kvf__ref_head *r, uint32_t seq, uint32_t token, uint32_t h,
                     const double *p, double *reduced) {
    const kvf_mass *m = &c->mass;
    float *cols = m->col_sums ? m->col_sums[seq] : NULL, *squares = m->sq_sums ? m->sq_sums[seq] : NULL;
    float *last = kvf__counts_last(c, seq, token) ? m->last_sums[seq] : NULL;
    uint32_t in_group = h % c->n_per_kv;
    kvf_gqa gqa = kvf__gqa_of(c, seq);
    kvf__max_slots x = kvf__max_slots_of(c, seq, r->n + c->a.q_begin[seq + 1] - token - 1);
    for (uint32_t j = x.begin; j < KVF__MIN(x.end, r->n); j++) {
        float *most = &m->max_prob[seq][(size_t)h * m->col_stride + j];
        float scaled = (float)(p[j] * (m->query_scale ? (double)m->query_scale[token] : 1));
        *most = scaled > *most ? scaled : *most;
    }
    for (uint32_t j = 0; j < r->n; j++) {
        if (cols) cols[(size_t)h * m->col_stride + j] += (float)p[j];
        if (last) last[(size_t)h * m->col_stride + j] += (float)p[j];
        if (in_group == 0)
            reduced[j] = p[j];
        else if (gqa == KVF_GQA_SUM)
            reduced[j] += p[j];
        else if (gqa == KVF_GQA_MAX && p[j] > reduced[j])
            reduced[j] = p[j];
        if (squares && in_group + 1 == c->n_per_kv)
            squares[(size_t)(h / c->n_per_kv) * m->col_stride + j] += (float)(reduced[j] * reduced[j]);
    }
}

kvf_status kvf__ref_prefill(const kvf__call *c, const kvf__workspace *w, kvf_error *err) {
    (void)err;
    double *p = (double *)(void *)w->rest, *reduced = p + c->max_slots;
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end; i++)
        for (uint32_t token = c->a.q_begin[i]; token < c->a.q_begin[i + 1]; token++)
            for (uint32_t h = 0; h < c->a.n_q_heads; h++) {
                kvf__ref_head r = attend(c, i, token, h, p);
                if (kvf__wants_cols(c, i)) add_mass(c, &r, i, token, h, p, reduced);
            }
    return KVF_OK;
}

kvf_status kvf__ref_decode(const kvf__call *c, const kvf__workspace *w, kvf_error *err) {
    (void)err;
    double *p = (double *)(void *)w->rest, *reduced = p + c->max_slots;
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end; i++)
        for (uint32_t h = 0; h < c->a.n_q_heads; h++) {
            kvf__ref_head r = attend(c, i, c->a.q_begin[i], h, p);
            if (!c->mass.row || (c->mass.row_wanted && !c->mass.row_wanted[i])) continue;
            uint32_t in_group = h % c->n_per_kv;
            kvf_gqa gqa = kvf__gqa_of(c, i);
            float *row = c->mass.row + ((size_t)i * c->n_kv_heads + h / c->n_per_kv) * c->mass.row_stride;
            for (uint32_t j = 0; j < r.n; j++) {
                if (in_group == 0)
                    reduced[j] = p[j];
                else if (gqa == KVF_GQA_SUM)
                    reduced[j] += p[j];
                else if (gqa == KVF_GQA_MAX && p[j] > reduced[j])
                    reduced[j] = p[j];
                row[j] = (float)reduced[j];
            }
        }
    return KVF_OK;
}
