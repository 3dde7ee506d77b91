/* Products with activations in 8 bits with AVX-VNNI. */
#include "model/fast.h"

#if defined(__x86_64__)
#define ZERO_OF_Q8_0 128
#include "model/fast_256.h"

INLINE void sums_of(const uint8_t (*w)[KVF__FAST_ROWS][4], const int8_t *q, size_t q_stride, uint32_t type, const int R,
                    __m256i sum[MOST]) {
    (void)type;
    UNROLL for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
    for (int k = 0; k < KVF__FAST_BLOCK / 4; k++) {
        __m256i u = _mm256_loadu_si256((const __m256i *)(const void *)w[k]);
        UNROLL for (int r = 0; r < R; r++) {
            sum[r] = _mm256_dpbusd_avx_epi32(sum[r], u, four_of(q + (size_t)r * q_stride + 4 * k));
        }
    }
}

void kvf__fast_dots_avxvnni(const kvf__fast_dots *d) { dots_256(d); }
#endif
