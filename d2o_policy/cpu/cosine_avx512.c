/* Matching with AVX-512: a register holds two evicted rows by 8 kept columns. The loops that wait for memory are those of
 * AVX2. Called only where the CPU has it. */
#include "d2o_policy/cpu/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

static inline __m512 cosine16(__m512 dot, __m512 ri, __m512 rj) {
    __m512 u = _mm512_mul_ps(_mm512_mul_ps(dot, ri), rj);
    u = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(u, u, _CMP_ORD_Q), u);
    return _mm512_max_ps(_mm512_min_ps(u, _mm512_set1_ps(1.0f)), _mm512_set1_ps(-1.0f));
}

static inline __m512 twice(const float *p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }

/* n of two rows. Most tiles raise nothing, which one comparison a row tells. */
static void raise(const kvf__tile *tile, __m512 dot0, __m512 dot1, __m512 dot2, const float *rnorm, uint32_t n,
                  kvf__best *best) {
    const __mmask16 halves[2] = {0x00ff, 0xff00};
    __m512 ri = _mm512_mask_mov_ps(_mm512_set1_ps(rnorm[0]), halves[1], _mm512_set1_ps(rnorm[n - 1]));
    __m512 u0 = cosine16(dot0, ri, twice(tile->rnorm)), u1 = cosine16(dot1, ri, twice(tile->rnorm + 8));
    __m512 u2 = cosine16(dot2, ri, twice(tile->rnorm + 16)), top = _mm512_max_ps(_mm512_max_ps(u0, u1), u2);
    for (uint32_t e = 0; e < n; e++) {
        if (_mm512_mask_reduce_max_ps(halves[e], top) < best[e].u) continue;
        float u[3][16];
        _mm512_storeu_ps(u[0], u0);
        _mm512_storeu_ps(u[1], u1);
        _mm512_storeu_ps(u[2], u2);
        for (uint32_t c = 0; c < tile->n; c++)
            kvf__raise(&best[e], u[c / 8][e * 8 + c % 8], tile->pos[c], tile->slot[c]);
    }
}

/* The sums of PAIRS pairs of rows by 24 columns stay in registers. Lanes of rows past the last hold rubbish or zeros. */
static inline __attribute__((always_inline)) void nearest_n(const kvf__tile *tile, const float *panel, uint32_t r,
                                                            uint32_t n, const uint32_t PAIRS, const float *rnorm,
                                                            uint32_t d, kvf__best *best) {
    __m512 acc[KVF__PANEL / 2][KVF__TILE_PANELS], zero = _mm512_setzero_ps();
    const float *p0 = tile->panels, *p1 = p0 + (size_t)d * KVF__PANEL, *p2 = p1 + (size_t)d * KVF__PANEL;
    const float *x = panel + r;
    const uint32_t mask = (1u << n) - 1;
    const __mmask8 low = (__mmask8)(mask & 0xf), high = (__mmask8)(mask >> 4);
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
#define FOR_PAIRS(STEP) STEP(0, a, first) STEP(1, a, second) STEP(2, b, first) STEP(3, b, second)
#define CLEAR(e, rows, order) acc[e][0] = acc[e][1] = acc[e][2] = zero;
#define ADD(e, rows, order)                               \
    if (e < PAIRS) {                                      \
        __m512 pair = _mm512_permutevar_ps(rows, order);  \
        acc[e][0] = _mm512_fmadd_ps(pair, c0, acc[e][0]); \
        acc[e][1] = _mm512_fmadd_ps(pair, c1, acc[e][1]); \
        acc[e][2] = _mm512_fmadd_ps(pair, c2, acc[e][2]); \
    }
    FOR_PAIRS(CLEAR)
    for (uint32_t i = 0; i < d; i++, x += 8, p0 += 8, p1 += 8, p2 += 8) {
        __m512 a = _mm512_broadcast_f32x4(_mm_maskz_loadu_ps(low, x)), b = zero;
        if (PAIRS > 2) b = _mm512_broadcast_f32x4(_mm_maskz_loadu_ps(high, x + 4));
        __m512 c0 = twice(p0), c1 = twice(p1), c2 = twice(p2);
        FOR_PAIRS(ADD)
    }
#define RAISE(e, rows, order)   \
    if (e < PAIRS && 2 * e < n) \
        raise(tile, acc[e][0], acc[e][1], acc[e][2], rnorm + 2 * e, KVF__MIN(n - 2 * e, 2u), best + 2 * e);
    FOR_PAIRS(RAISE)
}

static void nearest(const kvf__tile *tile, const float *panel, uint32_t r, uint32_t n, const float *rnorm, uint32_t d,
                    kvf__best *best) {
    if (n == 8)
        nearest_n(tile, panel, r, 8, 4, rnorm, d, best);
    else if (n > 4)
        nearest_n(tile, panel, r, n, 4, rnorm, d, best);
    else if (n == 4)
        nearest_n(tile, panel, r, 4, 2, rnorm, d, best);
    else
        nearest_n(tile, panel, r, n, 2, rnorm, d, best);
}

/* Lane c: the sum of the lanes of v[c]. Pairs of registers are halved together: adjacent lanes, then quarters. */
static inline __m512 sums16(const __m512 v[16]) {
    __m512 s[8], t[4];
    for (int i = 0; i < 8; i++) /* lanes of quarter q: pairs of v[2i], v[2i + 1] */
        s[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        t[i] = _mm512_add_ps(_mm512_shuffle_ps(s[2 * i], s[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(s[2 * i], s[2 * i + 1], 0xee)); /* rows 4i..4i + 3 in each quarter */
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(t[0], t[1], 0x88), _mm512_shuffle_f32x4(t[0], t[1], 0xdd));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(t[2], t[3], 0x88), _mm512_shuffle_f32x4(t[2], t[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* As that of AVX2. */
static inline void fetch(const void *const ahead[8], uint32_t line) {
    _mm_prefetch((const char *)ahead[line % 8] + line / 8 * 64, _MM_HINT_T0);
    KVF__PREFETCHES();
}

/* Lanes whose sum of squares is infinite or NaN, where the exact form must tell. */
static inline __mmask16 strange(__m512 sum) {
    return _mm512_cmp_ps_mask(sum, _mm512_set1_ps(3.402823466e38f), _CMP_NLE_UQ);
}

/* x / sqrt(sum): 0 where there is no sum, NaN where it is strange. */
static inline __m512 over_root(__m512 x, __m512 sum) {
    __mmask16 some = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    x = _mm512_maskz_div_ps(some, x, _mm512_sqrt_ps(sum));
    return _mm512_mask_mov_ps(x, strange(sum), _mm512_set1_ps(NAN));
}

/* As that of AVX2. The last elements of a row that are fewer than 16 are read under a mask. */
static void near_cosines(const void *rows, const void *const ahead[8], uint32_t d, const float *x, float x_rnorm,
                         float u[16]) {
    const uint16_t *row = rows;
    uint32_t line = 0;
    const __mmask16 rest = (__mmask16)((1u << d % 16) - 1);
    __m512 dot[16], sum[16];
    for (int c = 0; c < 16; c++, row += d) {
        __m512 a = _mm512_setzero_ps(), b = a;
        uint32_t i = 0;
        for (; i + 16 <= d; i += 16) {
            __m512 y = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(row + i)));
            a = _mm512_fmadd_ps(_mm512_loadu_ps(x + i), y, a);
            b = _mm512_fmadd_ps(y, y, b);
        }
        if (rest) {
            __m512 y = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, row + i));
            a = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(rest, x + i), y, a);
            b = _mm512_fmadd_ps(y, y, b);
        }
        for (i = 0; i < d; i += 32) fetch(ahead, line++);
        dot[c] = a;
        sum[c] = b;
    }
    _mm512_storeu_ps(u, over_root(_mm512_mul_ps(sums16(dot), _mm512_set1_ps(x_rnorm)), sums16(sum)));
}

static void widen(const void *rows, uint32_t d, float *out, float rnorm[16]) {
    const uint16_t *row = rows;
    const __mmask16 rest = (__mmask16)((1u << d % 16) - 1);
    __m512 sum[16];
    for (int c = 0; c < 16; c++, row += d, out += KVF__NEAR_STRIDE) {
        uint32_t i = 0;
        sum[c] = _mm512_setzero_ps();
        for (; i + 16 <= d; i += 16) {
            __m512 y = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(row + i)));
            _mm512_storeu_ps(out + i, y);
            sum[c] = _mm512_fmadd_ps(y, y, sum[c]);
        }
        if (!rest) continue;
        __m512 y = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, row + i));
        _mm512_mask_storeu_ps(out + i, rest, y);
        sum[c] = _mm512_fmadd_ps(y, y, sum[c]);
    }
    _mm512_storeu_ps(rnorm, over_root(_mm512_set1_ps(1.0f), sums16(sum)));
}

/* Sums of 16 rows by 16 evicted ones, in registers: an element of a row is broadcast as it is read. */
static void near(kvf__near *q, const float *rows, const float *rnorm, uint32_t valid, const void *const ahead[8],
                 uint16_t may[16]) {
    const uint32_t d = q->d;
    const float *x = q->x;
    __m512 acc[16];
    UNROLL for (int c = 0; c < 16; c++) acc[c] = _mm512_setzero_ps();
    for (uint32_t i = 0; i < d; i += 2, rows += 2, x += 2 * KVF__LANES) {
        __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + KVF__LANES);
        fetch(ahead, i / 2);
        UNROLL for (size_t c = 0; c < 16; c++) acc[c] =
            _mm512_fmadd_ps(_mm512_set1_ps(rows[c * KVF__NEAR_STRIDE]), x0, acc[c]);
        UNROLL for (size_t c = 0; c < 16; c++) acc[c] =
            _mm512_fmadd_ps(_mm512_set1_ps(rows[c * KVF__NEAR_STRIDE + 1]), x1, acc[c]);
    }
    __m512 most = _mm512_loadu_ps(q->most), x_rnorm = _mm512_loadu_ps(q->rnorm), slack = _mm512_set1_ps(q->slack);
    UNROLL for (int c = 0; c < 16; c++) {
        if (!(valid >> c & 1)) continue;
        __m512 u = _mm512_mul_ps(_mm512_mul_ps(acc[c], x_rnorm), _mm512_set1_ps(rnorm[c]));
        may[c] |= (uint16_t)(_mm512_cmp_ps_mask(u, _mm512_sub_ps(most, slack), _CMP_NLT_UQ) & q->lanes);
        most = _mm512_max_ps(u, most); /* NaN raises nothing */
    }
    _mm512_storeu_ps(q->most, most);
}

const kvf__kernels kvf__policy_kernels_avx512 = {kvf__policy_load_avx2,
                                                 kvf__policy_store_avx2,
                                                 kvf__policy_pack_avx2,
                                                 nearest,
                                                 kvf__policy_cosines_avx2,
                                                 near_cosines,
                                                 widen,
                                                 near,
                                                 kvf__policy_blend_avx2,
                                                 kvf__policy_norm_avx2};
#else
typedef int kvf__policy_no_avx512; /* a translation unit is never empty */
#endif
