/* The inner loops in plain C: they define each result, one operation at a time. */
#include "attention/cpu/kernels.h"

static float element(const kvf__rows *r, uint32_t row, uint32_t i) {
    size_t at = (size_t)row * r->d + i;
    if (r->dtype == KVF_F32) return ((const float *)(const void *)r->rows)[at];
    return kvf__widen(r->dtype, ((const uint16_t *)(const void *)r->rows)[at]);
}

static void pack_k(float *panels, uint32_t at, const kvf__rows *k) {
    for (uint32_t j = 0; j < k->n; j++) {
        float *to = panels + (size_t)((at + j) / 16) * k->d * 16 + (at + j) % 16;
        for (uint32_t i = 0; i < k->d; i++) to[i * 16] = element(k, j, i);
    }
}

static void pack_v(float *panels, uint32_t at, const kvf__rows *v) {
    for (uint32_t i = 0; i < kvf__pad16(v->d); i++) {
        float *to = panels + (size_t)(i / 16) * KVF_TILE * 16 + i % 16;
        for (uint32_t j = 0; j < v->n; j++) to[(at + j) * 16] = i < v->d ? element(v, j, i) : 0.0f;
    }
}

enum { ROWS = 6 };

static void logits(float *s, const float *const *q, const float *panel, uint32_t d, uint32_t n_panels) {
    (void)n_panels; /* 1 */
    for (uint32_t r = 0; r < ROWS; r++)
        for (uint32_t j = 0; j < 16; j++) {
            float x = 0;
            for (uint32_t i = 0; i < d; i++) x = fmaf(q[r][i], panel[i * 16 + j], x);
            s[r * KVF_TILE + j] = x;
        }
}

static float logit(float s, float scale, const float *bias, uint32_t j) {
    float x = s * scale;
    return bias ? x + bias[j] : x;
}

static void softmax(float *s, uint32_t n, float scale, const float *bias, float *m, float *l) {
    float top = -INFINITY, lane[16] = {0};
    for (uint32_t j = 0; j < n; j++) {
        s[j] = logit(s[j], scale, bias, j);
        top = s[j] > top ? s[j] : top;
    }
    float base = kvf__exp_base(top);
    for (uint32_t j = 0; j < n; j++) {
        s[j] = kvf__exp(s[j] - base);
        lane[j % 16] += s[j];
    }
    for (uint32_t j = n; j < kvf__pad16(n); j++) s[j] = 0;
    for (uint32_t i = 0; i < 8; i++) lane[i] += lane[i + 8];
    *m = top;
    *l = kvf__sum8(lane);
}

static void values_row(float *o, const float *p, const float *panel, uint32_t n) {
    for (uint32_t j = 0; j < n; j++)
        for (uint32_t i = 0; i < 16; i++) o[i] = fmaf(p[j], panel[j * 16 + i], o[i]);
}

static void values(float *o, size_t stride, const float *p, const float *panel, uint32_t n, uint32_t n_panels) {
    (void)n_panels; /* 1 */
    for (uint32_t r = 0; r < ROWS; r++) {
        memset(o + r * stride, 0, 16 * sizeof *o);
        values_row(o + r * stride, p + r * KVF_TILE, panel, n);
    }
}

static void col_sums(float *sums, const float *s, uint32_t n, float scale, const float *bias, float m, float inv) {
    for (uint32_t j = 0; j < n; j++) sums[j] += kvf__exp(logit(s[j], scale, bias, j) - m) * inv;
}

static void col_max(float *largest, const float *s, uint32_t n, float scale, const float *bias, float m, float inv,
                    float factor) {
    for (uint32_t j = 0; j < n; j++) {
        float x = kvf__exp(logit(s[j], scale, bias, j) - m) * inv * factor;
        largest[j] = x > largest[j] ? x : largest[j];
    }
}

static void merge(float *o, const float *part, uint32_t n, float a, float b) {
    for (uint32_t i = 0; i < n; i++) o[i] = fmaf(o[i], a, part[i] * b);
}

static void scale_row(float *out, const float *o, uint32_t n, float x) {
    for (uint32_t i = 0; i < n; i++) out[i] = o[i] * x;
}

static void dots(float *s, const float *q, uint32_t g, const kvf__rows *k) {
    for (uint32_t h = 0; h < g; h++)
        for (uint32_t j = 0; j < k->n; j++) {
            float lane[8] = {0};
            for (uint32_t i = 0; i < k->d; i++)
                lane[i % 8] = fmaf(q[(size_t)h * k->d + i], element(k, j, i), lane[i % 8]);
            s[(size_t)h * KVF_TILE + j] = kvf__sum8(lane);
        }
}

static void add_values(float *o, size_t stride, const float *p, uint32_t g, const kvf__rows *v) {
    for (uint32_t h = 0; h < g; h++)
        for (uint32_t j = 0; j < v->n; j++)
            for (uint32_t i = 0; i < v->d; i++)
                o[h * stride + i] = fmaf(p[(size_t)h * KVF_TILE + j], element(v, j, i), o[h * stride + i]);
}

static void mass_row(float *row, const float *p, const float *f, uint32_t g, uint32_t n, kvf_gqa gqa) {
    for (uint32_t j = 0; j < n; j++) {
        float x = p[j] * f[0];
        for (uint32_t h = 1; h < g && gqa != KVF_GQA_FIRST; h++) {
            float y = p[(size_t)h * KVF_TILE + j];
            if (gqa == KVF_GQA_SUM)
                x = fmaf(y, f[h], x);
            else
                x = y * f[h] > x ? y * f[h] : x;
        }
        row[j] = x;
    }
}

const kvf__kernels *kvf__kernels_scalar(void) {
    static const kvf__kernels table = {ROWS,     1,       pack_k, pack_v,    logits, softmax,    values,  values_row,
                                       col_sums, col_max, merge,  scale_row, dots,   add_values, mass_row};
    return &table;
}
