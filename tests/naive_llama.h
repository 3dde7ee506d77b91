/* tests/naive_llama.h: the decoder in double precision, one token after another, as simple as can be. */
#ifndef KVF_TESTS_NAIVE_LLAMA_H
#define KVF_TESTS_NAIVE_LLAMA_H

#include <math.h>
#include <stdlib.h>

#include "model/weights.h"

/* Which two dims of a head rotate together, and whether the rows of Q and K are put in that order first. */
typedef enum naive_order {
    NAIVE_PAIRS,        /* 2i and 2i + 1: the file's */
    NAIVE_HALVES,       /* i and i + d/2, rows put back into the order files had before their conversion */
    NAIVE_HALVES_WRONG, /* i and i + d/2 on the file's rows: the mistake */
} naive_order;

/* y (n_rows) += t x, or = when add is 0. permute_heads > 0: rows of each of so many heads from pairs to halves. */
static inline void naive_multiply(const kvf__tensor *t, const double *x, double *y, int add, uint32_t permute_heads) {
    float *row = malloc(t->n_cols * sizeof *row);
    uint32_t d = permute_heads ? t->n_rows / permute_heads : 0;
    for (uint32_t i = 0; i < t->n_rows; i++) {
        uint32_t from = d ? i / d * d + (i % d < d / 2 ? i % d * 2 : (i % d - d / 2) * 2 + 1) : i;
        double sum = 0;
        kvf__tensor_row(t, from, row);
        for (uint32_t j = 0; j < t->n_cols; j++) sum += row[j] * x[j];
        y[i] = add ? y[i] + sum : sum;
    }
    free(row);
}

static inline void naive_norm(const kvf__tensor *weight, const double *x, double epsilon, double *out) {
    float *w = malloc(weight->n_cols * sizeof *w);
    double sum = 0;
    kvf__tensor_row(weight, 0, w);
    for (uint32_t i = 0; i < weight->n_cols; i++) sum += x[i] * x[i];
    for (uint32_t i = 0; i < weight->n_cols; i++) out[i] = x[i] / sqrt(sum / weight->n_cols + epsilon) * w[i];
    free(w);
}

static inline void naive_rotate(const kvf_model *m, double *x, uint32_t n_heads, uint32_t pos, naive_order order) {
    uint32_t d = m->info.head_dim, half = m->n_rot / 2;
    for (uint32_t h = 0; h < n_heads; h++, x += d)
        for (uint32_t i = 0; i < half; i++) {
            double factor = m->rope_freqs.data ? ((const float *)m->rope_freqs.data)[i] : 1;
            double angle = pos * pow(m->info.rope_base, -2.0 * i / m->n_rot) / factor;
            double *a = order == NAIVE_PAIRS ? &x[2 * i] : &x[i], *b = order == NAIVE_PAIRS ? a + 1 : a + half;
            double u = *a, v = *b;
            *a = u * cos(angle) - v * sin(angle);
            *b = u * sin(angle) + v * cos(angle);
        }
}

/* One query over the keys of positions first..pos of a layer; out: its head of the output. */
static inline void naive_attend(const double *q, const double *k, const double *v, uint32_t first, uint32_t pos,
                                size_t stride, uint32_t d, double *out) {
    double *p = malloc((pos + 1) * sizeof *p), sum = 0;
    for (uint32_t j = first; j <= pos; j++) {
        p[j] = 0;
        for (uint32_t e = 0; e < d; e++) p[j] += q[e] * k[j * stride + e];
        p[j] = exp(p[j] / sqrt(d));
        sum += p[j];
    }
    for (uint32_t e = 0; e < d; e++) {
        out[e] = 0;
        for (uint32_t j = first; j <= pos; j++) out[e] += p[j] / sum * v[j * stride + e];
    }
    free(p);
}

static inline void naive_layer(const kvf_model *m, uint32_t layer, uint32_t pos, naive_order order, double *x,
                               double *k, double *v) {
    const kvf_model_info *info = &m->info;
    const kvf__layer *l = &m->layers[layer];
    uint32_t d = info->head_dim, n_q = info->n_q_heads, n_kv = info->n_kv_heads, permute = order == NAIVE_HALVES;
    size_t stride = (size_t)n_kv * d;
    uint32_t window = m->full_attention[layer] ? 0 : info->sliding_window, first = window && pos >= window ? pos - window + 1 : 0;
    double *h = malloc(info->n_embd * sizeof *h), *q = malloc(2 * n_q * d * sizeof *q), *out = q + n_q * d;
    double *gate = malloc(2 * info->n_ff * sizeof *gate), *up = gate + info->n_ff;
    naive_norm(&l->attn_norm, x, info->norm_epsilon, h);
    naive_multiply(&l->attn_q, h, q, 0, permute ? n_q : 0);
    naive_multiply(&l->attn_k, h, k + pos * stride, 0, permute ? n_kv : 0);
    naive_multiply(&l->attn_v, h, v + pos * stride, 0, 0);
    naive_rotate(m, q, n_q, pos, order);
    naive_rotate(m, k + pos * stride, n_kv, pos, order);
    for (uint32_t i = 0; i < n_q; i++) {
        size_t head = i / (n_q / n_kv) * d;
        naive_attend(q + i * d, k + head, v + head, first, pos, stride, d, out + i * d);
    }
    naive_multiply(&l->attn_output, out, x, 1, 0);
    naive_norm(&l->ffn_norm, x, info->norm_epsilon, h);
    naive_multiply(&l->ffn_gate, h, gate, 0, 0);
    naive_multiply(&l->ffn_up, h, up, 0, 0);
    for (uint32_t i = 0; i < info->n_ff; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    naive_multiply(&l->ffn_down, gate, x, 1, 0);
    free(h);
    free(q);
    free(gate);
}

/* logits: (n, n_vocab), after each of n ids from position 0 on. The caller frees. */
static inline double *naive_logits(const kvf_model *m, const uint32_t *ids, uint32_t n, naive_order order) {
    const kvf_model_info *info = &m->info;
    size_t layer_kv = (size_t)n * info->n_kv_heads * info->head_dim;
    double *k = malloc(info->n_layers * layer_kv * sizeof *k), *v = malloc(info->n_layers * layer_kv * sizeof *v);
    double *x = malloc(info->n_embd * sizeof *x), *logits = malloc((size_t)n * info->n_vocab * sizeof *logits);
    float *row = malloc(info->n_embd * sizeof *row);
    for (uint32_t pos = 0; pos < n; pos++) {
        kvf__tensor_row(&m->token_embd, ids[pos], row);
        for (uint32_t i = 0; i < info->n_embd; i++) x[i] = row[i];
        for (uint32_t l = 0; l < info->n_layers; l++)
            naive_layer(m, l, pos, order, x, k + l * layer_kv, v + l * layer_kv);
        naive_norm(&m->output_norm, x, info->norm_epsilon, x);
        naive_multiply(&m->output, x, logits + (size_t)pos * info->n_vocab, 0, 0);
    }
    free(k);
    free(v);
    free(x);
    free(row);
    return logits;
}

#endif
