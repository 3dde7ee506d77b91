/* The inner loops with AVX-512: the chains of scalar.c, 16 side by side.
 *
 * A dot product of decode has 8 lanes, so a register holds the lanes of two rows. */
#include "attention/cpu/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

enum { ROWS = 8, PANELS = 3 }; /* of prefill: 24 sums leave room for what is multiplied */
enum { MOST = 8 };             /* heads that decode takes at a time */

INLINE size_t size_of(kvf_dtype dtype) { return dtype == KVF_F32 ? 4 : 2; }

INLINE __m512 widen16(__m256i x, kvf_dtype dtype) {
    if (dtype == KVF_F16) return _mm512_cvtph_ps(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* 16 elements of a row that lies in memory as dtype. */
INLINE __m512 load16(const unsigned char *at, kvf_dtype dtype) {
    if (dtype == KVF_F32) return _mm512_loadu_ps(at);
    return widen16(_mm256_loadu_si256((const __m256i *)(const void *)at), dtype);
}
/* The same, and zeros beyond the first 8. */
INLINE __m512 load8(const unsigned char *at, kvf_dtype dtype) {
    if (dtype == KVF_F32) return _mm512_zextps256_ps512(_mm256_loadu_ps((const float *)(const void *)at));
    return widen16(_mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)at)), dtype);
}

INLINE __mmask16 first_lanes(uint32_t n) { return (__mmask16)((1u << KVF__MIN(n, 16)) - 1); }

INLINE __m512 exp16(__m512 x) {
    const __m512 magic = _mm512_set1_ps(KVF__EXP_MAGIC), one = _mm512_set1_ps(1.0f);
    __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(KVF__EXP_LOG2E), magic), n = _mm512_sub_ps(t, magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVF__EXP_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-KVF__EXP_LN2_LO), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(KVF__EXP_C6), r, _mm512_set1_ps(KVF__EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVF__EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVF__EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(KVF__EXP_C2));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_castps_si512(one));
    __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(KVF__EXP_LEAST), _CMP_NLT_UQ);
    return _mm512_maskz_mul_ps(counts, p, _mm512_castsi512_ps(bits));
}

/* ---- Prefill -------------------------------------------------------------------------------- */

/* r[i] becomes what was element i of each of the 16 rows. */
INLINE void transpose16(__m512 r[16]) {
    __m512 t[16], u[16];
    UNROLL for (int i = 0; i < 16; i += 4) { /* 4 by 4 within quarters */
        __m512 a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
        __m512 c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = _mm512_shuffle_ps(a, c, 0x44);
        t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
        t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++) { /* 4 by 4 of quarters */
        u[i] = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
        u[i + 4] = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        u[i + 8] = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
        u[i + 12] = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(u[i], u[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(u[i], u[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(u[i + 4], u[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(u[i + 4], u[i + 12], 0xdd);
    }
}

/* 16 elements of up to 16 rows, or 8 of them, into a panel's columns [column, column + rows). */
INLINE void pack_square(float *to, const unsigned char *from, size_t row, uint32_t rows, uint32_t column,
                        kvf_dtype dtype, const bool wide) {
    __m512 r[16];
    UNROLL for (uint32_t n = 0; n < 16; n++) {
        r[n] = n >= rows ? _mm512_setzero_ps() : wide ? load16(from + n * row, dtype) : load8(from + n * row, dtype);
    }
    transpose16(r);
    const __mmask16 lanes = first_lanes(rows);
    UNROLL for (size_t n = 0; n < 16; n++) {
        if (wide || n < 8) _mm512_mask_storeu_ps(to + n * 16 + column, lanes, r[n]);
    }
}

INLINE void pack_k_as(float *panels, uint32_t at, const kvf__rows *k, kvf_dtype dtype) {
    size_t row = k->d * size_of(dtype);
    for (uint32_t j = 0, rows; j < k->n; j += rows) {
        uint32_t column = (at + j) % 16;
        rows = KVF__MIN(k->n - j, 16 - column);
        float *to = panels + (size_t)((at + j) / 16) * k->d * 16;
        const unsigned char *from = k->rows + j * row;
        uint32_t i = 0;
        for (; i + 16 <= k->d; i += 16)
            pack_square(to + (size_t)i * 16, from + i * size_of(dtype), row, rows, column, dtype, true);
        if (i < k->d) pack_square(to + (size_t)i * 16, from + i * size_of(dtype), row, rows, column, dtype, false);
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
    const size_t size = size_of(v->dtype), row = v->d * size;
    for (uint32_t j = 0; j < v->n; j++) {
        const unsigned char *from = v->rows + j * row;
        float *to = panels + (size_t)(at + j) * 16;
        uint32_t i = 0;
        for (; i + 16 <= v->d; i += 16, to += KVF_TILE * 16) _mm512_storeu_ps(to, load16(from + i * size, v->dtype));
        if (i < v->d) _mm512_storeu_ps(to, load8(from + i * size, v->dtype));
    }
}

INLINE void logits_n(float *s, const float *const *q, const float *panel, uint32_t d, const size_t N) {
    __m512 x[ROWS][PANELS];
    UNROLL for (size_t r = 0; r < ROWS; r++) { UNROLL for (size_t n = 0; n < N; n++) x[r][n] = _mm512_setzero_ps(); }
    for (size_t i = 0; i < d; i++) {
        __m512 k[PANELS];
        UNROLL for (size_t n = 0; n < N; n++) k[n] = _mm512_loadu_ps(panel + (n * d + i) * 16);
        UNROLL for (size_t r = 0; r < ROWS; r++) {
            __m512 y = _mm512_set1_ps(q[r][i]);
            UNROLL for (size_t n = 0; n < N; n++) x[r][n] = _mm512_fmadd_ps(y, k[n], x[r][n]);
        }
    }
    UNROLL for (size_t r = 0; r < ROWS; r++) {
        UNROLL for (size_t n = 0; n < N; n++) _mm512_storeu_ps(s + r * KVF_TILE + n * 16, x[r][n]);
    }
}

static void logits(float *s, const float *const *q, const float *panels, uint32_t d, uint32_t n_panels) {
    if (n_panels == 3)
        logits_n(s, q, panels, d, 3);
    else if (n_panels == 2)
        logits_n(s, q, panels, d, 2);
    else
        logits_n(s, q, panels, d, 1);
}

INLINE __m512 logit16(__mmask16 lanes, const float *s, __m512 scale, const float *bias) {
    __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, s), scale);
    return bias ? _mm512_add_ps(x, _mm512_maskz_loadu_ps(lanes, bias)) : x;
}

/* kvf__sum8 of lanes i + (i + 8). */
INLINE float sum16(__m512 x) {
    float lane[8];
    _mm256_storeu_ps(lane, _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    return kvf__sum8(lane);
}

INLINE void softmax_as(float *s, uint32_t n, float scale, const float *bias, float *m, float *l) {
    const __m512 factor = _mm512_set1_ps(scale), least = _mm512_set1_ps(-INFINITY);
    __m512 top[2], sum = _mm512_setzero_ps();
    top[0] = top[1] = least;
    for (uint32_t j = 0; j < n; j += 32) UNROLL for (uint32_t i = 0; i < 2; i++) {
            uint32_t at = j + 16 * i;
            if (at >= n) break;
            __mmask16 lanes = first_lanes(n - at);
            __m512 x = logit16(lanes, s + at, factor, bias ? bias + at : NULL);
            x = _mm512_mask_mov_ps(least, lanes, x);
            _mm512_storeu_ps(s + at, x);
            top[i] = _mm512_max_ps(x, top[i]);
        }
    float lane[16], largest = -INFINITY;
    _mm512_storeu_ps(lane, _mm512_max_ps(top[0], top[1]));
    for (int i = 0; i < 16; i++) largest = lane[i] > largest ? lane[i] : largest;
    const __m512 base = _mm512_set1_ps(kvf__exp_base(largest));
    for (uint32_t j = 0; j < n; j += 16) {
        __m512 p = exp16(_mm512_sub_ps(_mm512_loadu_ps(s + j), base));
        _mm512_storeu_ps(s + j, p);
        sum = _mm512_add_ps(sum, p);
    }
    *m = largest;
    *l = sum16(sum);
}

static void softmax(float *s, uint32_t n, float scale, const float *bias, float *m, float *l) {
    if (bias)
        softmax_as(s, n, scale, bias, m, l);
    else
        softmax_as(s, n, scale, NULL, m, l);
}

INLINE void values_n(float *o, size_t stride, const float *p, const float *panel, uint32_t n, const size_t N) {
    __m512 x[ROWS][PANELS];
    UNROLL for (size_t r = 0; r < ROWS; r++) { UNROLL for (size_t i = 0; i < N; i++) x[r][i] = _mm512_setzero_ps(); }
    for (size_t j = 0; j < n; j++) {
        __m512 v[PANELS];
        UNROLL for (size_t i = 0; i < N; i++) v[i] = _mm512_loadu_ps(panel + (i * KVF_TILE + j) * 16);
        UNROLL for (size_t r = 0; r < ROWS; r++) {
            __m512 y = _mm512_set1_ps(p[r * KVF_TILE + j]);
            UNROLL for (size_t i = 0; i < N; i++) x[r][i] = _mm512_fmadd_ps(y, v[i], x[r][i]);
        }
    }
    UNROLL for (size_t r = 0; r < ROWS; r++) {
        UNROLL for (size_t i = 0; i < N; i++) _mm512_storeu_ps(o + r * stride + i * 16, x[r][i]);
    }
}

static void values(float *o, size_t stride, const float *p, const float *panels, uint32_t n, uint32_t n_panels) {
    if (n_panels == 3)
        values_n(o, stride, p, panels, n, 3);
    else if (n_panels == 2)
        values_n(o, stride, p, panels, n, 2);
    else
        values_n(o, stride, p, panels, n, 1);
}

static void values_row(float *o, const float *p, const float *panel, uint32_t n) {
    __m512 x = _mm512_loadu_ps(o);
    for (size_t j = 0; j < n; j++) x = _mm512_fmadd_ps(_mm512_set1_ps(p[j]), _mm512_loadu_ps(panel + j * 16), x);
    _mm512_storeu_ps(o, x);
}

INLINE void col_sums_as(float *sums, const float *s, uint32_t n, float scale, const float *bias, float m, float inv) {
    const __m512 factor = _mm512_set1_ps(scale), base = _mm512_set1_ps(m), inverse = _mm512_set1_ps(inv);
    for (uint32_t j = 0; j < n; j += 16) {
        __mmask16 lanes = first_lanes(n - j);
        __m512 p = exp16(_mm512_sub_ps(logit16(lanes, s + j, factor, bias ? bias + j : NULL), base));
        __m512 x = _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, sums + j), _mm512_mul_ps(p, inverse));
        _mm512_mask_storeu_ps(sums + j, lanes, x);
    }
}

static void col_sums(float *sums, const float *s, uint32_t n, float scale, const float *bias, float m, float inv) {
    if (bias)
        col_sums_as(sums, s, n, scale, bias, m, inv);
    else
        col_sums_as(sums, s, n, scale, NULL, m, inv);
}

INLINE void col_max_as(float *largest, const float *s, uint32_t n, float scale, const float *bias, float m, float inv,
                       float factor) {
    const __m512 by = _mm512_set1_ps(scale), base = _mm512_set1_ps(m), inverse = _mm512_set1_ps(inv);
    for (uint32_t j = 0; j < n; j += 16) {
        __mmask16 lanes = first_lanes(n - j);
        __m512 p = exp16(_mm512_sub_ps(logit16(lanes, s + j, by, bias ? bias + j : NULL), base));
        __m512 x = _mm512_mul_ps(_mm512_mul_ps(p, inverse), _mm512_set1_ps(factor));
        _mm512_mask_storeu_ps(largest + j, lanes, _mm512_max_ps(x, _mm512_maskz_loadu_ps(lanes, largest + j)));
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
    const __m512 x = _mm512_set1_ps(a), y = _mm512_set1_ps(b);
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 lanes = first_lanes(n - i);
        __m512 from = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, part + i), y);
        _mm512_mask_storeu_ps(o + i, lanes, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, o + i), x, from));
    }
}

static void scale_row(float *out, const float *o, uint32_t n, float x) {
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 lanes = first_lanes(n - i);
        _mm512_mask_storeu_ps(out + i, lanes, _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, o + i), _mm512_set1_ps(x)));
    }
}

static void mass_row(float *row, const float *p, const float *f, uint32_t g, uint32_t n, kvf_gqa gqa) {
    uint32_t heads = gqa == KVF_GQA_FIRST ? 1 : g;
    for (uint32_t j = 0; j < n; j += 16) { /* p is readable up to a multiple of 16 */
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(p + j), _mm512_set1_ps(f[0]));
        for (uint32_t h = 1; h < heads; h++) {
            __m512 y = _mm512_loadu_ps(p + (size_t)h * KVF_TILE + j), factor = _mm512_set1_ps(f[h]);
            x = gqa == KVF_GQA_SUM ? _mm512_fmadd_ps(y, factor, x) : _mm512_max_ps(_mm512_mul_ps(y, factor), x);
        }
        _mm512_mask_storeu_ps(row + j, first_lanes(n - j), x);
    }
}

/* ---- Decode: up to 8 query heads at a time ---------------------------------------------------- */

/* kvf__sum8 of 8 rows whose lanes lie in x as pairs of rows (0, 1), (2, 3), (4, 5), (6, 7). */
INLINE __m256 sum8x8(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x88), _mm512_shuffle_ps(c, d, 0xdd));
    /* Quarters: lanes 0 to 3 of rows 0, 2, 4, 6; lanes 4 to 7 of them; the same of rows 1, 3, 5, 7. */
    __m512 x = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, x));
}

/* Stores the sums of H heads by N pairs of rows; of an odd pair only its first row. */
INLINE void store_sums(float *s, const __m512 *x, bool odd, const int H, const int N) {
    UNROLL for (int h = 0; h < H; h += N == 2 ? 2 : 1) {
        const __m512 *y = x + h * N;
        float *to = s + h * (int)KVF_TILE;
        if (N == 2) { /* two heads at once, whose sums lie one after the other */
            const __m512 *z = h + 1 < H ? y + 2 : y;
            __m256 sums = sum8x8(y[0], y[1], z[0], z[1]);
            _mm_storeu_ps(to, _mm256_castps256_ps128(sums));
            if (h + 1 < H) _mm_storeu_ps(to + KVF_TILE, _mm256_extractf128_ps(sums, 1));
            continue;
        }
        __m256 sums = sum8x8(y[0], y[N > 1], y[N > 2 ? 2 : 0], y[N > 2 ? 3 : 0]);
        if (N == 4)
            _mm256_storeu_ps(to, sums);
        else if (odd)
            *to = _mm256_cvtss_f32(sums);
        else
            _mm_storel_pi((__m64 *)(void *)to, _mm256_castps256_ps128(sums));
    }
}

/* H heads by N pairs of rows; odd: the pair is one row twice. ahead: a line to ask for by line of the rows, or NULL. */
INLINE void dots_block(float *s, const float *q, const unsigned char *k, const unsigned char *const *ahead, uint32_t d,
                       bool odd, kvf_dtype dtype, const int H, const int N) {
    const size_t row = d * size_of(dtype), second = odd ? 0 : row, step = 2 * (size_t)N * size_of(dtype);
    __m512 x[MOST * 4];
    UNROLL for (int i = 0; i < H * N; i++) x[i] = _mm512_setzero_ps();
    size_t i = 0;
    for (; i + 16 <= d; i += 16) {
        if (ahead) {
            UNROLL for (size_t line = 0; line < 16 * step / KVF__LINE; line++)
                _mm_prefetch((const char *)ahead[line], _MM_HINT_T0);
            ahead += 16 * step / KVF__LINE;
        }
        __m512 low[4], high[4];
        UNROLL for (int n = 0; n < N; n++) {
            const unsigned char *a = k + (size_t)(2 * n) * row + i * size_of(dtype);
            __m512 y = load16(a, dtype), z = load16(a + second, dtype);
            low[n] = _mm512_insertf32x8(y, _mm512_castps512_ps256(z), 1);
            high[n] = _mm512_shuffle_f32x4(y, z, 0xee);
        }
        UNROLL for (int h = 0; h < H; h++) {
            __m512 y = _mm512_broadcast_f32x8(_mm256_loadu_ps(q + (size_t)h * d + i));
            UNROLL for (int n = 0; n < N; n++) x[h * N + n] = _mm512_fmadd_ps(y, low[n], x[h * N + n]);
        }
        UNROLL for (int h = 0; h < H; h++) {
            __m512 y = _mm512_broadcast_f32x8(_mm256_loadu_ps(q + (size_t)h * d + i + 8));
            UNROLL for (int n = 0; n < N; n++) x[h * N + n] = _mm512_fmadd_ps(y, high[n], x[h * N + n]);
        }
    }
    if (i < d) {
        UNROLL for (int n = 0; n < N; n++) {
            const unsigned char *a = k + (size_t)(2 * n) * row + i * size_of(dtype);
            __m512 y = load8(a, dtype), z = load8(a + second, dtype);
            y = _mm512_insertf32x8(y, _mm512_castps512_ps256(z), 1);
            UNROLL for (int h = 0; h < H; h++) {
                __m512 *to = &x[h * N + n];
                *to = _mm512_fmadd_ps(_mm512_broadcast_f32x8(_mm256_loadu_ps(q + (size_t)h * d + i)), y, *to);
            }
        }
    }
    store_sums(s, x, odd, H, N);
}

/* H heads by all rows. */
INLINE void dots_heads(float *s, const float *q, const kvf__rows *k, const unsigned char *const *ahead, kvf_dtype dtype,
                       const int H) {
    const size_t row = k->d * size_of(dtype);
    const uint32_t step = H > 4 ? 4 : 8;
    uint32_t j = 0;
    for (; j + step <= k->n; j += step)
        dots_block(s + j, q, k->rows + j * row, ahead ? ahead + j * row / KVF__LINE : NULL, k->d, false, dtype, H,
                   H > 4 ? 2 : 4);
    for (; j < k->n; j += 2) /* the last of an odd number has no lines of a second row to give away */
        dots_block(s + j, q, k->rows + j * row, ahead && k->n - j > 1 ? ahead + j * row / KVF__LINE : NULL, k->d,
                   k->n - j == 1, dtype, H, 1);
}

/* Heads that one pass over some rows takes of `left`: as even as they can be. */
INLINE uint32_t heads_of(uint32_t left) { return kvf__ceil_div(left, kvf__ceil_div(left, MOST)); }

/* Runs CALL(H) for n heads. */
#define FOR_HEADS(n, CALL)   \
    switch (n) {             \
    case 1: CALL(1); break;  \
    case 2: CALL(2); break;  \
    case 3: CALL(3); break;  \
    case 4: CALL(4); break;  \
    case 5: CALL(5); break;  \
    case 6: CALL(6); break;  \
    case 7: CALL(7); break;  \
    default: CALL(8); break; \
    }

/* All g heads. The first pass prefetches, so that the next rows arrive while the other heads compute. */
INLINE void dots_as(float *s, const float *q, uint32_t g, const kvf__rows *k, kvf_dtype dtype) {
    const unsigned char *const *ahead = k->ahead;
    for (uint32_t h = 0, n; h < g; h += n, ahead = NULL) {
        n = heads_of(g - h);
#define DOTS(H) dots_heads(s + (size_t)h * KVF_TILE, q + (size_t)h * k->d, k, ahead, dtype, H)
        FOR_HEADS(n, DOTS)
    }
}

static void dots(float *s, const float *q, uint32_t g, const kvf__rows *k) {
    if (k->dtype == KVF_F16)
        dots_as(s, q, g, k, KVF_F16);
    else if (k->dtype == KVF_BF16)
        dots_as(s, q, g, k, KVF_BF16);
    else
        dots_as(s, q, g, k, KVF_F32);
}

/* H heads by N vectors of the output from element `at` on, over all rows; the last 8 elements of a head may be half a
 * vector. ahead: as above. */
INLINE void add_block(float *o, size_t stride, const float *p, const kvf__rows *v, const unsigned char *const *ahead,
                      size_t at, kvf_dtype dtype, const bool wide, const int H, const int N) {
    const size_t row = v->d * size_of(dtype), step = 16 * (size_t)N * size_of(dtype);
    const unsigned char *from = v->rows + at * size_of(dtype);
    __m512 x[24];
    if (ahead) ahead += at * v->n * size_of(dtype) / KVF__LINE;
    o += at;
    UNROLL for (int h = 0; h < H; h++) {
        UNROLL for (int n = 0; n < N; n++) x[h * N + n] = _mm512_loadu_ps(o + (size_t)h * stride + 16 * (size_t)n);
    }
    for (size_t j = 0; j < v->n; j++, from += row) {
        if (ahead) {
            UNROLL for (size_t line = 0; line < step; line += KVF__LINE) {
                _mm_prefetch((const char *)ahead[(j * step + line) / KVF__LINE], _MM_HINT_T0);
            }
        }
        UNROLL for (int n = 0; n < N; n++) {
            const unsigned char *y_at = from + 16 * (size_t)n * size_of(dtype);
            __m512 y = wide ? load16(y_at, dtype) : load8(y_at, dtype);
            UNROLL for (int h = 0; h < H; h++) {
                x[h * N + n] = _mm512_fmadd_ps(_mm512_set1_ps(p[(size_t)h * KVF_TILE + j]), y, x[h * N + n]);
            }
        }
    }
    UNROLL for (int h = 0; h < H; h++) {
        UNROLL for (int n = 0; n < N; n++) _mm512_storeu_ps(o + (size_t)h * stride + 16 * (size_t)n, x[h * N + n]);
    }
}

/* H heads by all elements: as many at a time as the registers hold. */
INLINE void add_heads(float *o, size_t stride, const float *p, const kvf__rows *v, const unsigned char *const *ahead,
                      kvf_dtype dtype, const int H) {
    size_t i = 0;
    for (; H <= 3 && i + 128 <= v->d; i += 128) add_block(o, stride, p, v, ahead, i, dtype, true, H, H <= 3 ? 8 : 1);
    for (; H <= 6 && i + 64 <= v->d; i += 64) add_block(o, stride, p, v, ahead, i, dtype, true, H, H <= 6 ? 4 : 1);
    for (; i + 32 <= v->d; i += 32) add_block(o, stride, p, v, ahead, i, dtype, true, H, 2);
    for (; i + 16 <= v->d; i += 16) add_block(o, stride, p, v, ahead, i, dtype, true, H, 1);
    if (i < v->d) add_block(o, stride, p, v, ahead, i, dtype, false, H, 1);
}

INLINE void add_values_as(float *o, size_t stride, const float *p, uint32_t g, const kvf__rows *v, kvf_dtype dtype) {
    const unsigned char *const *ahead = v->ahead;
    for (uint32_t h = 0, n; h < g; h += n, ahead = NULL) {
        n = heads_of(g - h);
#define ADD(H) add_heads(o + h * stride, stride, p + (size_t)h * KVF_TILE, v, ahead, dtype, H)
        FOR_HEADS(n, ADD)
    }
}

static void add_values(float *o, size_t stride, const float *p, uint32_t g, const kvf__rows *v) {
    if (v->dtype == KVF_F16)
        add_values_as(o, stride, p, g, v, KVF_F16);
    else if (v->dtype == KVF_BF16)
        add_values_as(o, stride, p, g, v, KVF_BF16);
    else
        add_values_as(o, stride, p, g, v, KVF_F32);
}

const kvf__kernels *kvf__kernels_avx512(void) {
    static const kvf__kernels table = {ROWS,     PANELS,  pack_k, pack_v,    logits, softmax,    values,  values_row,
                                       col_sums, col_max, merge,  scale_row, dots,   add_values, mass_row};
    return &table;
}

#else /* a machine without these instructions: never chosen */
const kvf__kernels *kvf__kernels_avx512(void) { return kvf__kernels_scalar(); }
#endif
