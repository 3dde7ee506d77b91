/* attention/cpu/kernels.h: the inner loops of the tiled paths, one table of functions for each instruction set.
 *
 * Every table gives the same bits: each result is defined here as a chain of single operations, and SIMD only runs
 * several chains side by side. Sums have a fixed order, by column or by element (a left fold adds one after another):
 *   dot of prefill   left fold over d with fma;
 *   dot of decode    8 lanes by d mod 8, each a left fold with fma, then sum8;
 *   tile's sum       16 lanes by column mod 16, each a left fold; lane i + lane i + 8; then sum8;
 *   output           left fold over the slots with fma. */
#ifndef KVF_ATTENTION_CPU_KERNELS_H
#define KVF_ATTENTION_CPU_KERNELS_H

#include <math.h>

#include "attention/call.h"

/* exp(x) for x <= 0 within 1e-7: 2^n * P(r), x = n ln 2 + r. Below KVF__EXP_LEAST it is 0; that covers -inf. */
#define KVF__EXP_LEAST (-86.0f)
#define KVF__EXP_LOG2E 1.44269504f
#define KVF__EXP_MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer */
#define KVF__EXP_LN2_HI 0.693359375f
#define KVF__EXP_LN2_LO (-0.000212194442f)
#define KVF__EXP_C2 0.49999994f /* P(r) = 1 + r + C2 r^2 + ... */
#define KVF__EXP_C3 0.166664302f
#define KVF__EXP_C4 0.0416680053f
#define KVF__EXP_C5 0.00837419648f
#define KVF__EXP_C6 0.0013843606f

static inline float kvf__exp(float x) {
    float t = fmaf(x, KVF__EXP_LOG2E, KVF__EXP_MAGIC), n = t - KVF__EXP_MAGIC;
    float r = fmaf(n, -KVF__EXP_LN2_HI, x);
    r = fmaf(n, -KVF__EXP_LN2_LO, r);
    float p = fmaf(KVF__EXP_C6, r, KVF__EXP_C5);
    p = fmaf(p, r, KVF__EXP_C4);
    p = fmaf(p, r, KVF__EXP_C3);
    p = fmaf(p, r, KVF__EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    uint32_t bits;
    memcpy(&bits, &t, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < KVF__EXP_LEAST ? 0.0f : p * power;
}

/* The value that exponents are relative to. A row in which every logit is -inf uses 0, so that it gives zeros. */
static inline float kvf__exp_base(float m) { return m == -INFINITY ? 0.0f : m; }

static inline float kvf__sum8(const float a[8]) {
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
}

enum { KVF__LINE = 64 }; /* bytes that the memory moves at a time */

/* Rows of one head in one block, as decode reads them. */
typedef struct kvf__rows {
    const unsigned char *rows;         /* (n, d) */
    const unsigned char *const *ahead; /* for each line of them one to ask for meanwhile; NULL: nothing */
    uint32_t n, d;
    kvf_dtype dtype;
} kvf__rows;

typedef struct kvf__kernels {
    uint32_t rows, panels; /* that `logits` and `values` take at a time: rows divides KVF__SUB_ROWS */
    /* Columns [at, at + n) of panels (column / 16, d, 16) from n rows (n, d). */
    void (*pack_k)(float *panels, uint32_t at, const kvf__rows *k);
    /* Rows [at, at + n) of panels (d / 16, KVF_TILE, 16) from n rows (n, d). */
    void (*pack_v)(float *panels, uint32_t at, const kvf__rows *v);
    /* s[r * KVF_TILE + j] = q[r] . column j, all rows and the 16 columns of each of up to `panels` panels (d, 16). */
    void (*logits)(float *s, const float *const *q, const float *panel, uint32_t d, uint32_t n_panels);
    /* s[n] becomes p = exp(s * scale + bias - m), zeros up to a multiple of 16; m is the largest, l the sum of p.
     * bias may be NULL. */
    void (*softmax)(float *s, uint32_t n, float scale, const float *bias, float *m, float *l);
    /* o[r * stride + i] = sum over j < n of p[r * KVF_TILE + j] * panel[j][i], all rows, panels (KVF_TILE, 16). */
    void (*values)(float *o, size_t stride, const float *p, const float *panel, uint32_t n, uint32_t n_panels);
    /* o[i] goes on from what it is over n more slots, one row. */
    void (*values_row)(float *o, const float *p, const float *panel, uint32_t n);
    /* sums[j] += exp(s[j] * scale + bias[j] - m) * inv, j < n; s readable up to a multiple of 8. */
    void (*col_sums)(float *sums, const float *s, uint32_t n, float scale, const float *bias, float m, float inv);
    /* largest[j] = max(largest[j], exp(s[j] * scale + bias[j] - m) * inv * factor), j < n; a NaN is left out. */
    void (*col_max)(float *largest, const float *s, uint32_t n, float scale, const float *bias, float m, float inv,
                    float factor);
    /* o = o * a + part * b over n floats, n a multiple of 8: fma(o, a, part * b). */
    void (*merge)(float *o, const float *part, uint32_t n, float a, float b);
    /* out = o * x over n floats, n a multiple of 8. */
    void (*scale)(float *out, const float *o, uint32_t n, float x);
    /* Decode: s[h * KVF_TILE + j] = q[h] . row j, h < g, q (g, d). */
    void (*dots)(float *s, const float *q, uint32_t g, const kvf__rows *k);
    /* Decode: o[h * stride + i] goes on over the rows with p[h * KVF_TILE + j], h < g. */
    void (*add_values)(float *o, size_t stride, const float *p, uint32_t g, const kvf__rows *v);
    /* row[j] = reduction over h < g of p[h * KVF_TILE + j] * f[h], j < n. */
    void (*mass_row)(float *row, const float *p, const float *f, uint32_t g, uint32_t n, kvf_gqa gqa);
} kvf__kernels;

const kvf__kernels *kvf__kernels_scalar(void);
/* Their entries may be called only where kvf__cpu_detect says so. */
const kvf__kernels *kvf__kernels_avx2(void);
const kvf__kernels *kvf__kernels_avx512(void);

static inline const kvf__kernels *kvf__kernels_of(kvf_cpu_path path) {
    return path == KVF_CPU_AVX512 ? kvf__kernels_avx512()
           : path == KVF_CPU_AVX2 ? kvf__kernels_avx2()
                                  : kvf__kernels_scalar();
}

/* The state of a row, or a part of one: largest logit, denominator relative to it. */
typedef struct kvf__state {
    float m, l;
} kvf__state;

/* Merges the part (m, l, o) of a later tile into a state. */
static inline void kvf__state_merge(const kvf__kernels *k, kvf__state *s, float *o, kvf__state part,
                                    const float *o_part, uint32_t n) {
    float m = part.m > s->m ? part.m : s->m, base = kvf__exp_base(m);
    float a = kvf__exp(s->m - base), b = kvf__exp(part.m - base);
    s->m = m;
    s->l = fmaf(s->l, a, part.l * b);
    k->merge(o, o_part, n, a, b);
}
static inline float kvf__state_inverse(kvf__state s) { return s.l == 0.0f ? 0.0f : 1.0f / s.l; }
static inline float kvf__state_lse(kvf__state s) { return s.m + logf(s.l); }

/* Index of the work that item belongs to: the last i < n with index[i] <= item. */
static inline uint32_t kvf__find(const uint64_t *index, uint32_t n, uint64_t item) {
    uint32_t lo = 0, hi = n;
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (index[mid] <= item)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Bias of columns [from, n) of one head, the first of which is slot `begin`; zeros before and up to a multiple of 16. NULL
 * when the pages keep none. */
const float *kvf__gather_bias(const kvf__call *c, const uint32_t *row, uint32_t head, uint32_t begin, uint32_t from,
                              uint32_t n, float *to);

/* Hides columns [0, n) of a row of logits: they weigh nothing. */
static inline void kvf__hide(const kvf__call *c, float *s, uint32_t n) {
    float hidden = c->scale < 0 ? INFINITY : -INFINITY;
    for (uint32_t j = 0; j < n; j++) s[j] = hidden;
}

#endif
