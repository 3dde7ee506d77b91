/* model/fast_256.h: the dot products of fast.h in registers of 8 rows. The file that includes it defines SUM, the sums of
 * one block. */
#include <immintrin.h>

#include "model/fast.h"

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
#define INLINE static inline __attribute__((always_inline))

enum { MOST = 4 }; /* rows of x at a time */

INLINE __m256i four_of(const int8_t *q) {
    int32_t bytes;
    memcpy(&bytes, q, sizeof bytes);
    return _mm256_set1_epi32(bytes);
}

/* The sums of a block's products for R rows of x, q_stride apart, and 8 rows of w. */
INLINE void sums_of(const uint8_t (*w)[KVF__FAST_ROWS][4], const int8_t *q, size_t q_stride, uint32_t type, const int R,
                    __m256i sum[MOST]);

/* The lanes below n of 8. */
INLINE __m256i first_lanes(uint32_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lanes);
}

/* R rows of x by the 8 rows of w from `half` on, of which n are stored. */
INLINE void tile(const kvf__fast_dots *d, size_t row, uint32_t half, uint32_t n, const uint32_t type, float zero,
                 const int R) {
    const __m256i some = first_lanes(n);
    const __m256 off = _mm256_set1_ps(zero);
    const int8_t *q = d->q + row * d->q_stride;
    const kvf__fast_block *blocks = d->blocks + row * d->block_stride;
    float *y = d->y + row * d->y_stride + half;
    __m256 sum[MOST];
    UNROLL for (int r = 0; r < R; r++) {
        sum[r] = d->accumulate ? _mm256_maskload_ps(y + (size_t)r * d->y_stride, some) : _mm256_setzero_ps();
    }
    for (size_t b = 0; b < d->n_blocks; b++, q += KVF__FAST_BLOCK) {
        const kvf__fast_panel *p = &d->panels[b];
        __m256i whole[MOST];
        sums_of((const uint8_t(*)[KVF__FAST_ROWS][4])(const void *)&p->q[0][half], q, d->q_stride, type, R, whole);
        __m256 scale = _mm256_loadu_ps(p->d + half);
        UNROLL for (int r = 0; r < R; r++) {
            const kvf__fast_block *x = &blocks[(size_t)r * d->block_stride + b];
            __m256 v = _mm256_cvtepi32_ps(whole[r]);
            if (type != KVF__TENSOR_Q4_1) v = _mm256_fnmadd_ps(off, _mm256_set1_ps(x->sum), v);
            sum[r] = _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_set1_ps(x->d)), v, sum[r]);
            if (type == KVF__TENSOR_Q4_1)
                sum[r] = _mm256_fmadd_ps(_mm256_loadu_ps(p->m + half), _mm256_set1_ps(x->d_sum), sum[r]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) { _mm256_maskstore_ps(y + (size_t)r * d->y_stride, some, sum[r]); }
}

INLINE void rows(const kvf__fast_dots *d, size_t row, uint32_t n, const uint32_t type, float zero) {
    for (uint32_t half = 0; half < d->n_w; half += 8) {
        uint32_t n_w = d->n_w - half;
        switch (n) {
        case 1: tile(d, row, half, n_w, type, zero, 1); break;
        case 2: tile(d, row, half, n_w, type, zero, 2); break;
        case 3: tile(d, row, half, n_w, type, zero, 3); break;
        default: tile(d, row, half, n_w, type, zero, 4); break;
        }
    }
}

/* As few groups of rows of x as there must be, of about the same size. */
INLINE void dots_256(const kvf__fast_dots *d) {
    float zero = (float)kvf__fast_zero(d->type);
    for (uint32_t j = 0, groups = kvf__ceil_div(d->m, MOST), now; j < d->m; j += now, groups--) {
        now = kvf__ceil_div(d->m - j, groups);
        if (d->type == KVF__TENSOR_Q4_1)
            rows(d, j, now, KVF__TENSOR_Q4_1, zero);
        else if (d->type == KVF__TENSOR_Q4_0)
            rows(d, j, now, KVF__TENSOR_Q4_0, zero);
        else
            rows(d, j, now, KVF__TENSOR_Q8_0, ZERO_OF_Q8_0);
    }
}
