/* Products with activations in 8 bits with AVX2. */
#include "model/fast.h"

#if defined(__x86_64__)
#include <float.h>
#include <math.h>
#define ZERO_OF_Q8_0 0 /* its sums are of the signed elements */
#include "model/fast_256.h"

/* A product of two bytes and their sum fit 16 bits: eight of them with four bits of w, one with 8. */
INLINE void sums_of(const uint8_t (*w)[KVF__FAST_ROWS][4], const int8_t *q, size_t q_stride, uint32_t type, const int R,
                    __m256i sum[MOST]) {
    const __m256i ones = _mm256_set1_epi16(1), sign = _mm256_set1_epi8((char)0x80);
    UNROLL for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
    for (int k = 0; k < KVF__FAST_BLOCK / 4; k++) {
        __m256i u = _mm256_loadu_si256((const __m256i *)(const void *)w[k]), size = u;
        if (type == KVF__TENSOR_Q8_0) {
            u = _mm256_xor_si256(u, sign);
            size = _mm256_abs_epi8(u);
        }
        UNROLL for (int r = 0; r < R; r++) {
            __m256i x = four_of(q + (size_t)r * q_stride + 4 * k);
            if (type == KVF__TENSOR_Q8_0)
                sum[r] = _mm256_add_epi32(sum[r],
                                          _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(x, u)), ones));
            else
                sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(size, x));
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        if (type != KVF__TENSOR_Q8_0) sum[r] = _mm256_madd_epi16(sum[r], ones);
    }
}

void kvf__fast_dots_avx2(const kvf__fast_dots *d) { dots_256(d); }

/* ---- Quantising ---------------------------------------------------------------------------------------- */

static inline float top_of(__m256i bits) {
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(a));
}

static inline int sum_of(__m256i v) {
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

void kvf__fast_quantise_avx2(const float *x, uint32_t n, int8_t *q, kvf__fast_block *blocks) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (uint32_t i = 0; i < n; i += KVF__FAST_BLOCK, blocks++) {
        __m256 v[4];
        __m256i top = _mm256_setzero_si256(), w[4], sum = top;
        for (int j = 0; j < 4; j++) {
            v[j] = _mm256_loadu_ps(x + i + 8 * j);
            top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(v[j]), size));
        }
        float most = top_of(top);
        bool finite = most <= FLT_MAX, zero = !finite || most < KVF__FAST_LEAST;
        __m256 inverse = _mm256_set1_ps(zero ? 0 : 127 / most);
        for (int j = 0; j < 4; j++) {
            w[j] = zero ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(v[j], inverse));
            sum = _mm256_add_epi32(sum, w[j]);
        }
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
        _mm256_storeu_si256((__m256i *)(void *)(q + i), _mm256_permutevar8x32_epi32(bytes, order));
        blocks->d = !finite ? NAN : zero ? 0 : most / 127;
        blocks->sum = (float)sum_of(sum);
        blocks->d_sum = blocks->d * blocks->sum;
    }
}

/* ---- Unpacking ------------------------------------------------------------------------------------------ */

/* 16 bytes of 8 rows: out[j] gets the j-th four bytes of each. */
static inline void side_by_side(const unsigned char *const src[8], size_t at, __m256i out[4]) {
    __m256i z[4];
    for (int i = 0; i < 4; i++) /* quarters of rows i and 4 + i: each half of a register transposes on its own */
        z[i] = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(src[i] + at))),
            _mm_loadu_si128((const __m128i *)(const void *)(src[4 + i] + at)), 1);
    __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
    __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
}

static inline void halves(const unsigned char *const src[8], size_t at, float *out) {
    uint16_t h[8];
    for (int i = 0; i < 8; i++) memcpy(&h[i], src[i] + at, 2);
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)h)));
}

static inline void put(uint8_t (*to)[4], __m256i v) { _mm256_storeu_si256((__m256i *)(void *)to, v); }

void kvf__fast_unpack_avx2(uint32_t type, const unsigned char *rows_, size_t row_bytes, uint32_t n_rows,
                           uint32_t n_blocks, kvf__fast_panel *out) {
    const __m256i low = _mm256_set1_epi8(15), sign = _mm256_set1_epi8((char)0x80);
    const size_t header = kvf__fast_header(type), bytes = kvf__fast_block_bytes(type);
    for (uint32_t half = 0; half < KVF__FAST_ROWS; half += 8) {
        const unsigned char *src[8];
        for (uint32_t i = 0; i < 8; i++) src[i] = rows_ + KVF__MIN(half + i, n_rows - 1) * row_bytes;
        for (size_t b = 0, at = 0; b < n_blocks; b++, at += bytes) {
            kvf__fast_panel *p = &out[b];
            __m256i v[4];
            halves(src, at, p->d + half);
            if (header == 4) halves(src, at + 2, p->m + half);
            side_by_side(src, at + header, v);
            for (int j = 0; j < 4 && type == KVF__TENSOR_Q8_0; j++) put(&p->q[j][half], _mm256_xor_si256(v[j], sign));
            for (int j = 0; j < 4 && type != KVF__TENSOR_Q8_0; j++) {
                put(&p->q[j][half], _mm256_and_si256(v[j], low));
                put(&p->q[4 + j][half], _mm256_and_si256(_mm256_srli_epi16(v[j], 4), low));
            }
            if (type != KVF__TENSOR_Q8_0) continue;
            side_by_side(src, at + header + 16, v);
            for (int j = 0; j < 4; j++) put(&p->q[4 + j][half], _mm256_xor_si256(v[j], sign));
        }
    }
}
#endif
