/* The inner loops with AVX2, FMA and F16C: the chains of scalar.c, 8 side by side. */
#include "attention/cpu/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

enum { ROWS = 6, PANELS = 1 }; /* of prefill: 12 sums leave room for what is multiplied */

/* 8 elements of a row that lies in memory as dtype. */
INLINE __m256 load8(const unsigned char *at, kvf_dtype dtype) {
    if (dtype == KVF_F32) return _mm256_loadu_ps((const float *)(const void *)at);
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)at);
    if (dtype == KVF_F16) return _mm256_cvtph_ps(x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
INLINE size_t size_of(kvf_dtype dtype) { return dtype == KVF_F32 ? 4 : 2; }

INLINE __m256 exp8(__m256 x) {
    const __m256 magic = _mm256_set1_ps(KVF__EXP_MAGIC), one = _mm256_set1_ps(1.0f);
    __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(KVF__EXP_LOG2E), magic), n = _mm256_sub_ps(t, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVF__EXP_LN2_HI), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-KVF__EXP_LN2_LO), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(KVF__EXP_C6), r, _mm256_set1_ps(KVF__EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVF__EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVF__EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(KVF__EXP_C2));
    p = _mm256_fmadd_ps(p, r, one);
    p = _mm256_fmadd_ps(p, r, one);
    __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_castps_si256(one));
    __m256 zero = _mm256_cmp_ps(x, _mm256_set1_ps(KVF__EXP_LEAST), _CMP_LT_OQ);
    return _mm256_andnot_ps(zero, _mm256_mul_ps(p, _mm256_castsi256_ps(bits)));
}

/* kvf__sum8 of four vectors. */
INLINE __m128 sum8x4(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
INLINE float sum8(__m256 a) { return _mm_cvtss_f32(sum8x4(a, a, a, a)); }

INLINE __m256i first_lanes(uint32_t n) { /* all ones in lanes below n */
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE void transpose8(__m256 r[8]) {
    __m256 t[8], u[8];
    UNROLL for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

INLINE void pack_k_as(float *panels, uint32_t at, const kvf__rows *k, kvf_dtype dtype) {
    size_t row = k->d * size_of(dtype);
    for (uint32_t j = 0; j < k->n; j += 8) {
        float *to = panels + (size_t)((at + j) / 16) * k->d * 16 + (at + j) % 16;
        uint32_t rows = KVF__MIN(k->n - j, 8);
        for (uint32_t i = 0; i < k->d; i += 8) {
            const unsigned char *from = k->rows + j * row + i * size_of(dtype);
            __m256 r[8];
            UNROLL for (uint32_t n = 0; n < 8; n++) {
                r[n] = n < rows ? load8(from + n * row, dtype) : _mm256_setzero_ps();
            }
            transpose8(r);
            UNROLL for (uint32_t n = 0; n < 8; n++) _mm256_storeu_ps(to + (size_t)(i + n) * 16, r[n]);
        }
    }
}

static void pack_k(float *panels, uint32_t at, const kvf__rows *k) {
    if (k->dtype == KVF_F16)
        pack_k_as(panels, at, k, KVF_F16);
    else if (k->dtype == KVF_BF16)
        pack_k_as(panels, at, k, KVF_BF16);
    else
        pack_k_as(panels, at, k, KVF_F32);
}

static void pack_v(float *panels, uint32_t at, const kvf__rows *v) {
    size_t row = v->d * size_of(v->dtype);
    for (uint32_t j = 0; j < v->n; j++) {
        const unsigned char *from = v->rows + j * row;
        float *to = panels + (size_t)(at + j) * 16;
        for (uint32_t i = 0; i < v->d; i += 8)
            _mm256_storeu_ps(to + (size_t)(i / 16) * KVF_TILE * 16 + i % 16,
                             load8(from + i * size_of(v->dtype), v->dtype));
        if (v->d % 16) _mm256_storeu_ps(to + (size_t)(v->d / 16) * KVF_TILE * 16 + 8, _mm256_setzero_ps());
    }
}

static void logits(float *s, const float *const *q, const float *panel, uint32_t d, uint32_t n_panels) {
    (void)n_panels; /* 1 */
    __m256 x[ROWS][2];
    UNROLL for (size_t r = 0; r < ROWS; r++) x[r][0] = x[r][1] = _mm256_setzero_ps();
    for (size_t i = 0; i < d; i++) {
        __m256 k0 = _mm256_loadu_ps(panel + i * 16), k1 = _mm256_loadu_ps(panel + i * 16 + 8);
        UNROLL for (size_t r = 0; r < ROWS; r++) {
            __m256 y = _mm256_broadcast_ss(q[r] + i);
            x[r][0] = _mm256_fmadd_ps(y, k0, x[r][0]);
            x[r][1] = _mm256_fmadd_ps(y, k1, x[r][1]);
        }
    }
    UNROLL for (size_t r = 0; r < ROWS; r++) {
        _mm256_storeu_ps(s + r * KVF_TILE, x[r][0]);
        _mm256_storeu_ps(s + r * KVF_TILE + 8, x[r][1]);
    }
}

INLINE __m256 logit8(const float *s, __m256 scale, const float *bias) {
    __m256 x = _mm256_mul_ps(_mm256_loadu_ps(s), scale);
    return bias ? _mm256_add_ps(x, _mm256_loadu_ps(bias)) : x;
}

/* Scales, adds the bias, returns the largest; columns from n to a multiple of 16 become -inf. */
INLINE float finish_logits(float *s, uint32_t n, float scale, const float *bias) {
    __m256 top[2], factor = _mm256_set1_ps(scale), least = _mm256_set1_ps(-INFINITY);
    top[0] = top[1] = least;
    for (uint32_t j = 0; j < n; j += 16) UNROLL for (uint32_t i = 0; i < 2; i++) {
            uint32_t at = j + 8 * i;
            __m256 x = logit8(s + at, factor, bias ? bias + at : NULL);
            if (n - j < 16) x = _mm256_blendv_ps(least, x, _mm256_castsi256_ps(first_lanes(n > at ? n - at : 0)));
            _mm256_storeu_ps(s + at, x);
            top[i] = _mm256_max_ps(x, top[i]);
        }
    float lane[8], m = -INFINITY;
    _mm256_storeu_ps(lane, _mm256_max_ps(top[0], top[1]));
    for (int i = 0; i < 8; i++) m = lane[i] > m ? lane[i] : m;
    return m;
}

static void softmax(float *s, uint32_t n, float scale, const float *bias, float *m, float *l) {
    *m = bias ? finish_logits(s, n, scale, bias) : finish_logits(s, n, scale, NULL);
    __m256 base = _mm256_set1_ps(kvf__exp_base(*m)), sum[2];
    sum[0] = sum[1] = _mm256_setzero_ps();
    for (uint32_t j = 0; j < n; j += 16) UNROLL for (uint32_t i = 0; i < 2; i++) {
            __m256 p = exp8(_mm256_sub_ps(_mm256_loadu_ps(s + j + 8 * i), base));
            _mm256_storeu_ps(s + j + 8 * i, p);
            sum[i] = _mm256_add_ps(sum[i], p);
        }
    *l = sum8(_mm256_add_ps(sum[0], sum[1]));
}

static void values(float *o, size_t stride, const float *p, const float *panel, uint32_t n, uint32_t n_panels) {
    (void)n_panels; /* 1 */
    __m256 x[ROWS][2];
    UNROLL for (size_t r = 0; r < ROWS; r++) x[r][0] = x[r][1] = _mm256_setzero_ps();
    for (size_t j = 0; j < n; j++) {
        __m256 v0 = _mm256_loadu_ps(panel + j * 16), v1 = _mm256_loadu_ps(panel + j * 16 + 8);
        UNROLL for (size_t r = 0; r < ROWS; r++) {
            __m256 y = _mm256_broadcast_ss(p + r * KVF_TILE + j);
            x[r][0] = _mm256_fmadd_ps(y, v0, x[r][0]);
            x[r][1] = _mm256_fmadd_ps(y, v1, x[r][1]);
        }
    }
    UNROLL for (size_t r = 0; r < ROWS; r++) {
        _mm256_storeu_ps(o + r * stride, x[r][0]);
        _mm256_storeu_ps(o + r * stride + 8, x[r][1]);
    }
}

static void values_row(float *o, const float *p, const float *panel, uint32_t n) {
    __m256 x0 = _mm256_loadu_ps(o), x1 = _mm256_loadu_ps(o + 8);
    for (size_t j = 0; j < n; j++) {
        __m256 y = _mm256_broadcast_ss(p + j);
        x0 = _mm256_fmadd_ps(y, _mm256_loadu_ps(panel + j * 16), x0);
        x1 = _mm256_fmadd_ps(y, _mm256_loadu_ps(panel + j * 16 + 8), x1);
    }
    _mm256_storeu_ps(o, x0);
    _mm256_storeu_ps(o + 8, x1);
}

INLINE void col_sums_as(float *sums, const float *s, uint32_t n, float scale, const float *bias, float m, float inv) {
    __m256 factor = _mm256_set1_ps(scale), base = _mm256_set1_ps(m), inverse = _mm256_set1_ps(inv);
    uint32_t j = 0;
    for (; j + 8 <= n; j += 8) {
        __m256 p = exp8(_mm256_sub_ps(logit8(s + j, factor, bias ? bias + j : NULL), base));
        _mm256_storeu_ps(sums + j, _mm256_add_ps(_mm256_loadu_ps(sums + j), _mm256_mul_ps(p, inverse)));
    }
    if (j == n) return;
    __m256i lanes = first_lanes(n - j);
    __m256 p = exp8(_mm256_sub_ps(logit8(s + j, factor, bias ? bias + j : NULL), base));
    __m256 x = _mm256_add_ps(_mm256_maskload_ps(sums + j, lanes), _mm256_mul_ps(p, inverse));
    _mm256_maskstore_ps(sums + j, lanes, x);
}

static void col_sums(float *sums, const float *s, uint32_t n, float scale, const float *bias, float m, float inv) {
    if (bias)
        col_sums_as(sums, s, n, scale, bias, m, inv);
    else
        col_sums_as(sums, s, n, scale, NULL, m, inv);
}

INLINE void col_max_as(float *largest, const float *s, uint32_t n, float scale, const float *bias, float m, float inv,
                       float factor) {
    __m256 by = _mm256_set1_ps(scale), base = _mm256_set1_ps(m), inverse = _mm256_set1_ps(inv);
    for (uint32_t j = 0; j < n; j += 8) {
        __m256i lanes = first_lanes(n - j);
        __m256 x = _mm256_mul_ps(_mm256_maskload_ps(s + j, lanes), by);
        if (bias) x = _mm256_add_ps(x, _mm256_maskload_ps(bias + j, lanes));
        x = _mm256_mul_ps(_mm256_mul_ps(exp8(_mm256_sub_ps(x, base)), inverse), _mm256_set1_ps(factor));
        _mm256_maskstore_ps(largest + j, lanes, _mm256_max_ps(x, _mm256_maskload_ps(largest + j, lanes)));
    }
}

static void col_max(float *largest, const float *s, uint32_t n, float scale, const float *bias, float m, float inv,
                    float factor) {
    if (bias)
        col_max_as(largest, s, n, scale, bias, m, inv, factor);
    else
        col_max_as(largest, s, n, scale, NULL, m, inv, factor);
}

static void merge(float *o, const float *part, uint32_t n, float a, float b) {
    __m256 x = _mm256_set1_ps(a), y = _mm256_set1_ps(b);
    for (uint32_t i = 0; i < n; i += 8)
        _mm256_storeu_ps(o + i,
                         _mm256_fmadd_ps(_mm256_loadu_ps(o + i), x, _mm256_mul_ps(_mm256_loadu_ps(part + i), y)));
}

static void scale_row(float *out, const float *o, uint32_t n, float x) {
    __m256 y = _mm256_set1_ps(x);
    for (uint32_t i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(o + i), y));
}

static void mass_row(float *row, const float *p, const float *f, uint32_t g, uint32_t n, kvf_gqa gqa) {
    uint32_t heads = gqa == KVF_GQA_FIRST ? 1 : g;
    for (uint32_t j = 0; j < n; j += 8) { /* p is readable up to a multiple of 16 */
        __m256 x = _mm256_mul_ps(_mm256_loadu_ps(p + j), _mm256_set1_ps(f[0]));
        for (uint32_t h = 1; h < heads; h++) {
            __m256 y = _mm256_loadu_ps(p + (size_t)h * KVF_TILE + j), factor = _mm256_set1_ps(f[h]);
            x = gqa == KVF_GQA_SUM ? _mm256_fmadd_ps(y, factor, x) : _mm256_max_ps(_mm256_mul_ps(y, factor), x);
        }
        if (n - j >= 8)
            _mm256_storeu_ps(row + j, x);
        else
            _mm256_maskstore_ps(row + j, first_lanes(n - j), x);
    }
}

/* ---- Decode: H query heads at a time -------------------------------------------------------- */

/* H heads by N rows. ahead: a line to ask for by line of the rows, or NULL. */
INLINE void dots_block(float *s, const float *q, const unsigned char *k, const unsigned char *const *ahead, uint32_t d,
                       kvf_dtype dtype, const int H, const int N) {
    const size_t row = d * size_of(dtype), per_line = 64 / size_of(dtype);
    __m256 x[12];
    UNROLL for (int i = 0; i < H * N; i++) x[i] = _mm256_setzero_ps();
    for (size_t line = 0; line < d; line += per_line) {
        if (ahead && line + per_line <= d) {
            UNROLL for (size_t n = 0; n < (size_t)N; n++) {
                _mm_prefetch((const char *)ahead[line / per_line * (size_t)N + n], _MM_HINT_T0);
            }
        }
        for (size_t i = line, end = KVF__MIN(line + per_line, d); i < end; i += 8) UNROLL for (int n = 0; n < N; n++) {
                __m256 y = load8(k + (size_t)n * row + i * size_of(dtype), dtype);
                UNROLL for (int h = 0; h < H; h++) {
                    x[h * N + n] = _mm256_fmadd_ps(_mm256_loadu_ps(q + (size_t)h * d + i), y, x[h * N + n]);
                }
            }
    }
    UNROLL for (int h = 0; h < H; h++) {
        if (N == 1) s[h * (int)KVF_TILE] = sum8(x[h]);
        UNROLL for (int n = 0; n + 4 <= N; n += 4) {
            __m256 *y = x + h * N + n;
            _mm_storeu_ps(s + h * (int)KVF_TILE + n, sum8x4(y[0], y[1], y[2], y[3]));
        }
    }
}

/* Heads that one pass over some rows takes of `left`: 1 only when there is one in all. */
INLINE uint32_t heads_of(uint32_t left) { return left == 4 || left == 2 ? 2 : left > 2 ? 3 : 1; }

/* All g heads by N rows. The first pass prefetches, so that the next rows arrive while the other heads compute. */
INLINE void dots_rows(float *s, const float *q, uint32_t g, const kvf__rows *k, uint32_t j, kvf_dtype dtype,
                      const int N) {
    const uint32_t d = k->d;
    size_t at = j * d * size_of(dtype);
    const unsigned char *rows = k->rows + at, *const *ahead = k->ahead ? k->ahead + at / KVF__LINE : NULL;
    for (uint32_t h = 0, n; h < g; h += n, ahead = NULL) {
        n = heads_of(g - h);
        float *to = s + (size_t)h * KVF_TILE + j;
        const float *from = q + (size_t)h * d;
        if (n == 3)
            dots_block(to, from, rows, ahead, d, dtype, 3, N);
        else if (n == 2)
            dots_block(to, from, rows, ahead, d, dtype, 2, N);
        else
            dots_block(to, from, rows, ahead, d, dtype, 1, N);
    }
}

INLINE void dots_as(float *s, const float *q, uint32_t g, const kvf__rows *k, kvf_dtype dtype) {
    const size_t row = k->d * size_of(dtype);
    uint32_t j = 0;
    for (; g == 1 && j + 8 <= k->n; j += 8)
        dots_block(s + j, q, k->rows + j * row, k->ahead ? k->ahead + j * row / KVF__LINE : NULL, k->d, dtype, 1, 8);
    for (; j + 4 <= k->n; j += 4) dots_rows(s, q, g, k, j, dtype, 4);
    for (; j < k->n; j++) dots_rows(s, q, g, k, j, dtype, 1);
}

static void dots(float *s, const float *q, uint32_t g, const kvf__rows *k) {
    if (k->dtype == KVF_F16)
        dots_as(s, q, g, k, KVF_F16);
    else if (k->dtype == KVF_BF16)
        dots_as(s, q, g, k, KVF_BF16);
    else
        dots_as(s, q, g, k, KVF_F32);
}

/* H heads by 8 * N elements of the output, over all rows. ahead: as above. */
INLINE void add_block(float *o, size_t stride, const float *p, const kvf__rows *v, const unsigned char *const *ahead,
                      size_t at, kvf_dtype dtype, const int H, const int N) {
    size_t row = v->d * size_of(dtype);
    const unsigned char *from = v->rows + at * size_of(dtype);
    const size_t step = 8 * (size_t)N * size_of(dtype);
    __m256 x[12];
    if (ahead) ahead += at * v->n * size_of(dtype) / KVF__LINE;
    UNROLL for (int h = 0; h < H; h++) {
        UNROLL for (int n = 0; n < N; n++) x[h * N + n] = _mm256_loadu_ps(o + (size_t)h * stride + at + 8 * (size_t)n);
    }
    for (size_t j = 0; j < v->n; j++) {
        if (ahead) {
            UNROLL for (size_t line = 0; line < step; line += KVF__LINE) {
                _mm_prefetch((const char *)ahead[(j * step + line) / KVF__LINE], _MM_HINT_T0);
            }
        }
        UNROLL for (int n = 0; n < N; n++) {
            __m256 y = load8(from + j * row + 8 * (size_t)n * size_of(dtype), dtype);
            UNROLL for (int h = 0; h < H; h++) {
                x[h * N + n] = _mm256_fmadd_ps(_mm256_broadcast_ss(p + (size_t)h * KVF_TILE + j), y, x[h * N + n]);
            }
        }
    }
    UNROLL for (int h = 0; h < H; h++) {
        UNROLL for (int n = 0; n < N; n++) _mm256_storeu_ps(o + (size_t)h * stride + at + 8 * (size_t)n, x[h * N + n]);
    }
}

/* All g heads by 8 * N elements. */
INLINE void add_columns(float *o, size_t stride, const float *p, uint32_t g, const kvf__rows *v, size_t at,
                        kvf_dtype dtype, const int N) {
    const unsigned char *const *ahead = v->ahead;
    for (uint32_t h = 0, n; h < g; h += n, ahead = NULL) {
        n = heads_of(g - h);
        float *to = o + h * stride;
        const float *from = p + (size_t)h * KVF_TILE;
        if (n == 3)
            add_block(to, stride, from, v, ahead, at, dtype, 3, N);
        else if (n == 2)
            add_block(to, stride, from, v, ahead, at, dtype, 2, N);
        else
            add_block(to, stride, from, v, ahead, at, dtype, 1, N);
    }
}

INLINE void add_values_as(float *o, size_t stride, const float *p, uint32_t g, const kvf__rows *v, kvf_dtype dtype) {
    size_t i = 0;
    for (; g == 1 && i + 64 <= v->d; i += 64) add_block(o, stride, p, v, v->ahead, i, dtype, 1, 8);
    for (; i + 32 <= v->d; i += 32) add_columns(o, stride, p, g, v, i, dtype, 4);
    for (; i < v->d; i += 8) add_columns(o, stride, p, g, v, i, dtype, 1);
}

static void add_values(float *o, size_t stride, const float *p, uint32_t g, const kvf__rows *v) {
    if (v->dtype == KVF_F16)
        add_values_as(o, stride, p, g, v, KVF_F16);
    else if (v->dtype == KVF_BF16)
        add_values_as(o, stride, p, g, v, KVF_BF16);
    else
        add_values_as(o, stride, p, g, v, KVF_F32);
}

const kvf__kernels *kvf__kernels_avx2(void) {
    static const kvf__kernels table = {ROWS,     PANELS,  pack_k, pack_v,    logits, softmax,    values,  values_row,
                                       col_sums, col_max, merge,  scale_row, dots,   add_values, mass_row};
    return &table;
}

#else /* a machine without these instructions: never chosen */
const kvf__kernels *kvf__kernels_avx2(void) { return kvf__kernels_scalar(); }
#endif
