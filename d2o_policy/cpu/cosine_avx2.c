/* The inner loops of matching and merging with AVX2, FMA and F16C. Called only where the CPU has them. */
#include "d2o_policy/cpu/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

static inline __m256 load8(kvf_dtype dtype, const void *row, uint32_t i) {
    if (dtype == KVF_F32) return _mm256_loadu_ps((const float *)row + i);
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)row + i));
    if (dtype == KVF_F16) return _mm256_cvtph_ps(x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

/* kvf__bf16_from_f32 of 8. */
static inline __m128i bf16_from_f32(__m256 x) {
    __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    return _mm256_castsi256_si128(packed);
}

void kvf__policy_load_avx2(kvf_dtype dtype, const void *row, uint32_t d, float *out) {
    for (uint32_t i = 0; i < d; i += 8) _mm256_storeu_ps(out + i, load8(dtype, row, i));
}

void kvf__policy_store_avx2(kvf_dtype dtype, const float *in, uint32_t d, void *row) {
    for (uint32_t i = 0; i < d; i += 8) {
        __m256 x = _mm256_loadu_ps(in + i);
        if (dtype == KVF_F32)
            _mm256_storeu_ps((float *)row + i, x);
        else
            _mm_storeu_si128((__m128i *)(void *)((uint16_t *)row + i),
                             dtype == KVF_F16 ? _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT) : bf16_from_f32(x));
    }
}

static inline void transpose8(__m256 r[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

void kvf__policy_pack_avx2(kvf_dtype dtype, const void *const rows[8], uint32_t d, float *panel, float rnorm[8]) {
    __m256 sum = _mm256_setzero_ps();
    for (uint32_t i = 0; i < d; i += 8) {
        __m256 r[8];
        for (int c = 0; c < 8; c++) r[c] = load8(dtype, rows[c], i);
        transpose8(r);
        for (uint32_t c = 0; c < 8; c++) {
            sum = _mm256_fmadd_ps(r[c], r[c], sum);
            _mm256_storeu_ps(panel + (size_t)(i + c) * KVF__PANEL, r[c]);
        }
    }
    float s[8];
    _mm256_storeu_ps(s, sum);
    for (int c = 0; c < 8; c++) rnorm[c] = kvf__rnorm(s[c]);
}

static inline __m256 cosine8(__m256 dot, __m256 ri, __m256 rj) {
    __m256 u = _mm256_mul_ps(_mm256_mul_ps(dot, ri), rj);
    u = _mm256_and_ps(u, _mm256_cmp_ps(u, u, _CMP_ORD_Q));
    return _mm256_max_ps(_mm256_min_ps(u, _mm256_set1_ps(1.0f)), _mm256_set1_ps(-1.0f));
}

/* kvf__rnorm of 8. */
static inline __m256 rnorm8(__m256 sum) {
    __m256 in_range = _mm256_and_ps(_mm256_cmp_ps(sum, _mm256_setzero_ps(), _CMP_GT_OQ),
                                    _mm256_cmp_ps(sum, _mm256_set1_ps(3.402823466e38f), _CMP_LE_OQ));
    return _mm256_and_ps(_mm256_div_ps(_mm256_set1_ps(1.0f), _mm256_sqrt_ps(sum)), in_range);
}

/* Two groups of 8 rows, transposed in registers: the folds of one hide the latency of the other's. */
void kvf__policy_cosines_avx2(kvf_dtype dtype, const void *rows, const void *ahead, uint32_t d, const float *x,
                              float x_rnorm, float u[16]) {
    __m256 dot[2], sum[2], r[8];
    dot[0] = dot[1] = sum[0] = sum[1] = _mm256_setzero_ps();
    size_t row_bytes = d * kvf_dtype_bytes(dtype);
    const unsigned char *next = ahead; /* by the end all of its lines: 16 rows in d / 4 turns */
    for (uint32_t i = 0; i < d; i += 8, x += 8 * KVF__PANEL)
        for (uint32_t half = 0; half < 2; half++) {
            const unsigned char *from = (const unsigned char *)rows + half * 8 * row_bytes;
            for (size_t line = 0; line < row_bytes / d; line++, next += 64)
                _mm_prefetch((const char *)next, _MM_HINT_T0);
            for (uint32_t c = 0; c < 8; c++) r[c] = load8(dtype, from + c * row_bytes, i);
            transpose8(r);
            for (uint32_t c = 0; c < 8; c++) {
                dot[half] = _mm256_fmadd_ps(_mm256_broadcast_ss(x + c * KVF__PANEL), r[c], dot[half]);
                sum[half] = _mm256_fmadd_ps(r[c], r[c], sum[half]);
            }
        }
    for (uint32_t half = 0; half < 2; half++)
        _mm256_storeu_ps(u + 8 * half, cosine8(dot[half], _mm256_set1_ps(x_rnorm), rnorm8(sum[half])));
}

/* Cosines from sums in any order. A sum of squares that is infinite or NaN makes 0 / 0: the exact form must tell. */
static inline __m256 near8(__m256 dot, __m256 sum, __m256 x_rnorm) {
    __m256 zero = _mm256_setzero_ps(), none = _mm256_cmp_ps(sum, zero, _CMP_EQ_OQ);
    __m256 u = _mm256_div_ps(_mm256_mul_ps(dot, x_rnorm), _mm256_sqrt_ps(sum));
    __m256 strange = _mm256_cmp_ps(sum, _mm256_set1_ps(3.402823466e38f), _CMP_NLE_UQ);
    return _mm256_or_ps(_mm256_andnot_ps(none, u), _mm256_and_ps(strange, _mm256_set1_ps(NAN)));
}

/* Lane c: the sum of the lanes of v[c]. */
static inline __m256 sums8(const __m256 v[8]) {
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/* Line `line` of those of eight parts, one part after the other: pages that are asked for side by side keep the memory busy. */
static inline void fetch(const void *const ahead[8], uint32_t line) {
    _mm_prefetch((const char *)ahead[line % 8] + line / 8 * 64, _MM_HINT_T0);
    KVF__PREFETCHES();
}

/* Row by row, without a transposition; the sums of eight rows become lanes together. */
static void near_cosines(const void *rows, const void *const ahead[8], uint32_t d, const float *x, float x_rnorm,
                         float u[16]) {
    const uint16_t *row = rows;
    uint32_t line = 0;
    for (int half = 0; half < 2; half++) {
        __m256 dot[8], sum[8];
        for (int c = 0; c < 8; c++, row += d) {
            __m256 a = _mm256_setzero_ps(), b = a;
            for (uint32_t i = 0; i < d; i += 8) {
                __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(row + i)));
                a = _mm256_fmadd_ps(_mm256_loadu_ps(x + i), y, a);
                b = _mm256_fmadd_ps(y, y, b);
            }
            for (uint32_t i = 0; i < d; i += 32) fetch(ahead, line++);
            dot[c] = a;
            sum[c] = b;
        }
        _mm256_storeu_ps(u + 8 * half, near8(sums8(dot), sums8(sum), _mm256_set1_ps(x_rnorm)));
    }
}

static void widen(const void *rows, uint32_t d, float *out, float rnorm[16]) {
    const uint16_t *row = rows;
    const __m256 one = _mm256_set1_ps(1.0f);
    for (int half = 0; half < 2; half++) {
        __m256 sum[8];
        for (int c = 0; c < 8; c++, row += d, out += KVF__NEAR_STRIDE) {
            sum[c] = _mm256_setzero_ps();
            for (uint32_t i = 0; i < d; i += 8) {
                __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(row + i)));
                _mm256_storeu_ps(out + i, y);
                sum[c] = _mm256_fmadd_ps(y, y, sum[c]);
            }
        }
        _mm256_storeu_ps(rnorm + 8 * half, near8(one, sums8(sum), one));
    }
}

/* 8 / VECTORS rows by VECTORS registers of evicted ones at a time: eight sums hide one another's latency. */
static inline __attribute__((always_inline)) void near_n(kvf__near *q, const float *rows, const float *rnorm,
                                                         uint32_t valid, const void *const ahead[8], uint16_t may[16],
                                                         const uint32_t VECTORS) {
    const uint32_t n = 8 / VECTORS, d = q->d;
    const __m256 slack = _mm256_set1_ps(q->slack);
    uint32_t line = 0;
    for (uint32_t r = 0; r < 16; r += n, rows += n * KVF__NEAR_STRIDE) {
        __m256 acc[8];
        const float *x = q->x, *row = rows;
        for (uint32_t j = 0; j < 8; j++) acc[j] = _mm256_setzero_ps();
        for (uint32_t i = 0; i < d; i += 4 * VECTORS) {
            fetch(ahead, line++);
            for (uint32_t e = 0; e < 4 * VECTORS; e++, row++, x += KVF__LANES)
                for (size_t j = 0; j < 8; j++)
                    acc[j] = _mm256_fmadd_ps(_mm256_broadcast_ss(row + j / VECTORS * KVF__NEAR_STRIDE),
                                             _mm256_loadu_ps(x + j % VECTORS * 8), acc[j]);
        }
        for (uint32_t j = 0; j < 8; j++) {
            uint32_t c = r + j / VECTORS, lane = j % VECTORS * 8;
            if (!(valid >> c & 1)) continue;
            __m256 u = _mm256_mul_ps(_mm256_mul_ps(acc[j], _mm256_loadu_ps(q->rnorm + lane)), _mm256_set1_ps(rnorm[c]));
            __m256 most = _mm256_loadu_ps(q->most + lane);
            int mask = _mm256_movemask_ps(_mm256_cmp_ps(u, _mm256_sub_ps(most, slack), _CMP_NLT_UQ));
            may[c] |= (uint16_t)((uint32_t)mask << lane & q->lanes);
            _mm256_storeu_ps(q->most + lane, _mm256_max_ps(u, most)); /* NaN raises nothing */
        }
    }
}

static void near(kvf__near *q, const float *rows, const float *rnorm, uint32_t valid, const void *const ahead[8],
                 uint16_t may[16]) {
    if (q->lanes >> 8)
        near_n(q, rows, rnorm, valid, ahead, may, 2);
    else
        near_n(q, rows, rnorm, valid, ahead, may, 1);
}

static inline float max8(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

/* The sums come by value: an address of theirs would keep them in memory. Most tiles raise nothing, which one
 * comparison tells. */
static void raise(const kvf__tile *tile, __m256 dot0, __m256 dot1, __m256 dot2, float rnorm, kvf__best *best) {
    __m256 ri = _mm256_set1_ps(rnorm);
    __m256 u0 = cosine8(dot0, ri, _mm256_loadu_ps(tile->rnorm));
    __m256 u1 = cosine8(dot1, ri, _mm256_loadu_ps(tile->rnorm + 8));
    __m256 u2 = cosine8(dot2, ri, _mm256_loadu_ps(tile->rnorm + 16));
    if (max8(_mm256_max_ps(_mm256_max_ps(u0, u1), u2)) < best->u) return;
    float u[KVF__TILE_COLUMNS];
    _mm256_storeu_ps(u, u0);
    _mm256_storeu_ps(u + 8, u1);
    _mm256_storeu_ps(u + 16, u2);
    for (uint32_t c = 0; c < tile->n; c++) kvf__raise(best, u[c], tile->pos[c], tile->slot[c]);
}

enum { ROWS = 4 };

/* The twelve sums of 4 rows by 24 columns stay in registers: every index is a constant once n is. */
static inline __attribute__((always_inline)) void nearest_n(const kvf__tile *tile, const float *panel, uint32_t r,
                                                            const uint32_t n, const float *rnorm, uint32_t d,
                                                            kvf__best *best) {
    __m256 acc[ROWS][KVF__TILE_PANELS], zero = _mm256_setzero_ps();
    const float *p0 = tile->panels, *p1 = p0 + (size_t)d * KVF__PANEL, *p2 = p1 + (size_t)d * KVF__PANEL;
    const float *x = panel + r;
#define FOR_ROWS(STEP) STEP(0) STEP(1) STEP(2) STEP(3)
#define CLEAR(e) acc[e][0] = acc[e][1] = acc[e][2] = zero;
#define ADD(e)                                         \
    if (e < n) {                                       \
        __m256 b = _mm256_broadcast_ss(x + e);         \
        acc[e][0] = _mm256_fmadd_ps(b, c0, acc[e][0]); \
        acc[e][1] = _mm256_fmadd_ps(b, c1, acc[e][1]); \
        acc[e][2] = _mm256_fmadd_ps(b, c2, acc[e][2]); \
    }
    FOR_ROWS(CLEAR)
    for (uint32_t i = 0; i < d; i++, x += 8, p0 += 8, p1 += 8, p2 += 8) {
        __m256 c0 = _mm256_loadu_ps(p0), c1 = _mm256_loadu_ps(p1), c2 = _mm256_loadu_ps(p2);
        FOR_ROWS(ADD)
    }
#define RAISE(e) \
    if (e < n) raise(tile, acc[e][0], acc[e][1], acc[e][2], rnorm[e], &best[e]);
    FOR_ROWS(RAISE)
}

static void nearest(const kvf__tile *tile, const float *panel, uint32_t r, uint32_t n, const float *rnorm, uint32_t d,
                    kvf__best *best) {
    for (; n > ROWS; n -= ROWS, r += ROWS, rnorm += ROWS, best += ROWS) nearest_n(tile, panel, r, ROWS, rnorm, d, best);
    switch (n) {
    case 1: nearest_n(tile, panel, r, 1, rnorm, d, best); break;
    case 2: nearest_n(tile, panel, r, 2, rnorm, d, best); break;
    case 3: nearest_n(tile, panel, r, 3, rnorm, d, best); break;
    default: nearest_n(tile, panel, r, 4, rnorm, d, best); break;
    }
}

void kvf__policy_blend_avx2(float *acc, const float *base, const float *row, float w, uint32_t d) {
    __m256 weight = _mm256_set1_ps(w);
    for (uint32_t i = 0; i < d; i += 8) {
        __m256 x = _mm256_loadu_ps(row + i);
        if (base) x = _mm256_sub_ps(x, _mm256_loadu_ps(base + i));
        _mm256_storeu_ps(acc + i, _mm256_fmadd_ps(weight, x, _mm256_loadu_ps(acc + i)));
    }
}

/* A fold over one row has nothing to run side by side; here fmaf is one instruction. */
float kvf__policy_norm_avx2(const float *row, uint32_t d) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < d; i++) sum = fmaf(row[i], row[i], sum);
    return sqrtf(sum);
}

const kvf__kernels kvf__policy_kernels_avx2 = {kvf__policy_load_avx2,
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
typedef int kvf__policy_no_avx2; /* a translation unit is never empty */
#endif
