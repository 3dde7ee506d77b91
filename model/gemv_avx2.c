/* Products of few rows with AVX2, FMA and F16C. */
#include "model/gemv.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "model/weights.h"

/* ---- Dequantisation ---------------------------------------------------------------------------------- */

enum { BLOCK = 32, AHEAD = 1024 }; /* AHEAD: bytes that are asked for before they are read */

static inline float half_at(const unsigned char *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return _cvtsh_ss(h);
}

static inline __m128i bytes8(const unsigned char *p) { return _mm_loadl_epi64((const __m128i *)(const void *)p); }

/* step * q + offset in two roundings, as the definition has it. */
static inline void put(float *out, __m256i q, __m256 step, const __m256 *offset) {
    __m256 v = _mm256_mul_ps(step, _mm256_cvtepi32_ps(q));
    _mm256_storeu_ps(out, offset ? _mm256_add_ps(v, *offset) : v);
}

static void q4_0(const unsigned char *src, size_t n, float *out) {
    const __m256i low = _mm256_set1_epi32(15), eight = _mm256_set1_epi32(8);
    for (size_t i = 0; i < n; i += BLOCK, src += 18, out += BLOCK) {
        _mm_prefetch((const char *)src + AHEAD, _MM_HINT_T0);
        __m256 d = _mm256_set1_ps(half_at(src));
        for (int j = 0; j < 16; j += 8) {
            __m256i q = _mm256_cvtepu8_epi32(bytes8(src + 2 + j));
            put(out + j, _mm256_sub_epi32(_mm256_and_si256(q, low), eight), d, NULL);
            put(out + 16 + j, _mm256_sub_epi32(_mm256_srli_epi32(q, 4), eight), d, NULL);
        }
    }
}

static void q4_1(const unsigned char *src, size_t n, float *out) {
    const __m256i low = _mm256_set1_epi32(15);
    for (size_t i = 0; i < n; i += BLOCK, src += 20, out += BLOCK) {
        _mm_prefetch((const char *)src + AHEAD, _MM_HINT_T0);
        __m256 d = _mm256_set1_ps(half_at(src)), m = _mm256_set1_ps(half_at(src + 2));
        for (int j = 0; j < 16; j += 8) {
            __m256i q = _mm256_cvtepu8_epi32(bytes8(src + 4 + j));
            put(out + j, _mm256_and_si256(q, low), d, &m);
            put(out + 16 + j, _mm256_srli_epi32(q, 4), d, &m);
        }
    }
}

static void q8_0(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += BLOCK, src += 34, out += BLOCK) {
        _mm_prefetch((const char *)src + AHEAD, _MM_HINT_T0);
        __m256 d = _mm256_set1_ps(half_at(src));
        for (int j = 0; j < BLOCK; j += 8) put(out + j, _mm256_cvtepi8_epi32(bytes8(src + 2 + j)), d, NULL);
    }
}

static void f16(const unsigned char *src, size_t n, float *out) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_prefetch((const char *)src + 2 * i + AHEAD, _MM_HINT_T0);
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(src + 2 * i))));
    }
    for (; i < n; i++) out[i] = half_at(src + 2 * i);
}

bool kvf__dequantize_avx2(uint32_t type, const void *src, size_t n, float *out) {
    switch (type) {
    case KVF__TENSOR_F16: f16(src, n, out); return true;
    case KVF__TENSOR_Q8_0: q8_0(src, n, out); return true;
    case KVF__TENSOR_Q4_0: q4_0(src, n, out); return true;
    case KVF__TENSOR_Q4_1: q4_1(src, n, out); return true;
    default: return kvf__dequantize(type, src, n, out);
    }
}

/* ---- Dot products ------------------------------------------------------------------------------------ */

/* The sums of the lanes of four vectors. */
static inline __m128 sums4(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* The 8 elements from e on, or as many of them as `some` says. n_w and m are constants where this is inlined, so that
 * the sums stay in registers. */
static inline __attribute__((always_inline)) void step(const float *const *w, const float *x, size_t x_stride, size_t e,
                                                       const __m256i *some, const int n_w, const int m,
                                                       __m256 sum[8][3]) {
    __m256 v[3];
#pragma GCC unroll 3
    for (int j = 0; j < m; j++) {
        const float *from = x + (size_t)j * x_stride + e;
        v[j] = some ? _mm256_maskload_ps(from, *some) : _mm256_loadu_ps(from);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++) {
        __m256 u = some ? _mm256_maskload_ps(w[i] + e, *some) : _mm256_loadu_ps(w[i] + e);
#pragma GCC unroll 3
        for (int j = 0; j < m; j++) sum[i][j] = _mm256_fmadd_ps(u, v[j], sum[i][j]);
    }
}

/* n_w (4 or 8) by m (up to 3) dot products, of which the first n_y of each row of x are stored. */
static inline __attribute__((always_inline)) void block(const kvf__dots *d, const float *const *w, const float *x,
                                                        float *y, int n_y, const int n_w, const int m) {
    static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    __m256 sum[8][3];
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++)
#pragma GCC unroll 3
        for (int j = 0; j < m; j++) sum[i][j] = _mm256_setzero_ps();
    size_t e = 0, n = d->n;
    for (; e + 8 <= n; e += 8) step(w, x, d->x_stride, e, NULL, n_w, m, sum);
    if (e < n) {
        __m256i some = _mm256_loadu_si256((const __m256i *)(const void *)(ones + 8 - (n - e)));
        step(w, x, d->x_stride, e, &some, n_w, m, sum);
    }
#pragma GCC unroll 2
    for (int i = 0; i < n_w; i += 4)
#pragma GCC unroll 3
        for (int j = 0; j < m; j++) {
            __m128 s = sums4(sum[i][j], sum[i + 1][j], sum[i + 2][j], sum[i + 3][j]);
            int stored = KVF__MAX(0, KVF__MIN(4, n_y - i));
            __m128i some = _mm_loadu_si128((const __m128i *)(const void *)(ones + 8 - stored));
            float *to = y + (size_t)j * d->y_stride + i;
            if (d->accumulate) s = _mm_add_ps(s, _mm_maskload_ps(to, some));
            _mm_maskstore_ps(to, some, s);
        }
}

/* Rows of w beyond d->n_w repeat the last one and are not stored. */
static void rows_of_x(const kvf__dots *d, const float *const *w, const float *x, float *y, uint32_t m) {
    int n = (int)d->n_w;
    switch (m) {
    case 1: n > 4 ? block(d, w, x, y, n, 8, 1) : block(d, w, x, y, n, 4, 1); return;
#define CASE(M)                                            \
    case M:                                                \
        block(d, w, x, y, n, 4, M);                        \
        if (n > 4) block(d, w + 4, x, y + 4, n - 4, 4, M); \
        return;
        CASE(2)
        CASE(3)
#undef CASE
    default: return;
    }
}

void kvf__dots_avx2(const kvf__dots *d) {
    const float *w[KVF__GEMV_ROWS];
    for (uint32_t i = 0; i < KVF__GEMV_ROWS; i++) w[i] = d->w + KVF__MIN(i, d->n_w - 1) * d->w_stride;
    /* As few groups of rows of x as there must be, of about the same size. */
    for (uint32_t j = 0, groups = kvf__ceil_div(d->m, 3), now; j < d->m; j += now, groups--) {
        now = kvf__ceil_div(d->m - j, groups);
        rows_of_x(d, w, d->x + j * d->x_stride, d->y + j * d->y_stride, now);
    }
}
#endif
