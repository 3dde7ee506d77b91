/* Matching with AVX-512: a register holds two evicted rows by 8 kept columns. The loops that wait for memory are those of
 * AVX2. Called only where the CPU has it. */
#include "d2o_policy/cpu/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

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

/* The six sums of 2 pairs of rows by 24 columns stay in registers. */
static inline __attribute__((always_inline)) void nearest_n(const kvf__tile *tile, const float *panel, uint32_t r,
                                                            const uint32_t n, const float *rnorm, uint32_t d,
                                                            kvf__best *best) {
    __m512 a0 = _mm512_setzero_ps(), a1 = a0, a2 = a0, b0 = a0, b1 = a0, b2 = a0;
    const float *p0 = tile->panels, *p1 = p0 + (size_t)d * KVF__PANEL, *p2 = p1 + (size_t)d * KVF__PANEL;
    const float *x = panel + r;
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(2));
    for (uint32_t i = 0; i < d; i++, x += 8, p0 += 8, p1 += 8, p2 += 8) {
        __m512 rows = _mm512_broadcast_f32x4(_mm_maskz_loadu_ps((__mmask8)((1u << n) - 1), x));
        __m512 c0 = twice(p0), c1 = twice(p1), c2 = twice(p2), pair = _mm512_permutevar_ps(rows, first);
        a0 = _mm512_fmadd_ps(pair, c0, a0);
        a1 = _mm512_fmadd_ps(pair, c1, a1);
        a2 = _mm512_fmadd_ps(pair, c2, a2);
        if (n <= 2) continue;
        pair = _mm512_permutevar_ps(rows, second);
        b0 = _mm512_fmadd_ps(pair, c0, b0);
        b1 = _mm512_fmadd_ps(pair, c1, b1);
        b2 = _mm512_fmadd_ps(pair, c2, b2);
    }
    raise(tile, a0, a1, a2, rnorm, KVF__MIN(n, 2u), best);
    if (n > 2) raise(tile, b0, b1, b2, rnorm + 2, n - 2, best + 2);
}

static void nearest(const kvf__tile *tile, const float *panel, uint32_t r, uint32_t n, const float *rnorm, uint32_t d,
                    kvf__best *best) {
    switch (n) {
    case 1: nearest_n(tile, panel, r, 1, rnorm, d, best); break;
    case 2: nearest_n(tile, panel, r, 2, rnorm, d, best); break;
    case 3: nearest_n(tile, panel, r, 3, rnorm, d, best); break;
    default: nearest_n(tile, panel, r, 4, rnorm, d, best); break;
    }
}

const kvf__kernels kvf__policy_kernels_avx512 = {kvf__policy_load_avx2,  kvf__policy_store_avx2,
                                                 kvf__policy_pack_avx2,  nearest,
                                                 kvf__policy_blend_avx2, kvf__policy_norm_avx2};
#else
typedef int kvf__policy_no_avx512; /* a translation unit is never empty */
#endif
