/* Products of few rows with AVX-512. */
#include "model/gemv.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "model/weights.h"

/* ---- Dequantisation ---------------------------------------------------------------------------------- */

enum { BLOCK = 32, SCALES = 16, AHEAD = 1024 }; /* AHEAD: bytes that are asked for before they are read */

/* The 16 possible values of a 4-bit block are a table in one register, which an element's four bits index. The
 * permutation uses only the low bits of its index, so the low half of a byte needs no mask. */
static inline void look_up(const unsigned char *q, __m512 table, float *out) {
    __m512i i = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)q));
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(i, table));
    _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(i, 4), table));
}

static inline __m512i iota(void) { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

static inline __m512 count_from(float first) {
    return _mm512_add_ps(_mm512_cvtepi32_ps(iota()), _mm512_set1_ps(first));
}

/* Without optimisation gcc's gathers are macros, which convert their masks. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"

/* Converts the halves at the beginning of up to 16 blocks at once. They go through memory, hidden from the compiler:
 * broadcasts from memory need no shuffle, and shuffles are the bottleneck. */
static inline void scales_of(const unsigned char *src, size_t n_blocks, int block_bytes, float *out) {
    __m512i at = _mm512_mullo_epi32(iota(), _mm512_set1_epi32(block_bytes));
    __mmask16 some = (__mmask16)((1u << n_blocks) - 1);
    __m512i words = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), some, at, src, 1);
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
    __asm__ volatile("" : : "r"(out) : "memory");
}

/* The same for two halves of up to 8 blocks: d, m, d, m... */
static inline void pairs_of(const unsigned char *src, size_t n_blocks, int block_bytes, float *out) {
    __m256i at = _mm256_mullo_epi32(_mm512_castsi512_si256(iota()), _mm256_set1_epi32(block_bytes));
    __mmask8 some = (__mmask8)((1u << n_blocks) - 1);
    __m256i words = _mm256_mmask_i32gather_epi32(_mm256_setzero_si256(), some, at, src, 1);
    _mm512_storeu_ps(out, _mm512_cvtph_ps(words));
    __asm__ volatile("" : : "r"(out) : "memory");
}

#pragma GCC diagnostic pop

static void q4_0(const unsigned char *src, size_t n, float *out) {
    const __m512 steps = count_from(-8);
    float d[SCALES];
    for (size_t blocks = n / BLOCK, now; blocks; blocks -= now) {
        now = KVF__MIN(blocks, (size_t)SCALES);
        scales_of(src, now, 18, d);
        for (size_t i = 0; i < now; i++, src += 18, out += BLOCK) {
            _mm_prefetch((const char *)src + AHEAD, _MM_HINT_T0);
            look_up(src + 2, _mm512_mul_ps(_mm512_set1_ps(d[i]), steps), out);
        }
    }
}

static void q4_1(const unsigned char *src, size_t n, float *out) {
    const __m512 steps = count_from(0);
    float dm[SCALES];
    for (size_t blocks = n / BLOCK, now; blocks; blocks -= now) {
        now = KVF__MIN(blocks, (size_t)SCALES / 2);
        pairs_of(src, now, 20, dm);
        for (size_t i = 0; i < now; i++, src += 20, out += BLOCK) {
            _mm_prefetch((const char *)src + AHEAD, _MM_HINT_T0);
            __m512 table = _mm512_mul_ps(_mm512_set1_ps(dm[2 * i]), steps);
            look_up(src + 4, _mm512_add_ps(table, _mm512_set1_ps(dm[2 * i + 1])), out);
        }
    }
}

static void q8_0(const unsigned char *src, size_t n, float *out) {
    float d[SCALES];
    for (size_t blocks = n / BLOCK, now; blocks; blocks -= now) {
        now = KVF__MIN(blocks, (size_t)SCALES);
        scales_of(src, now, 34, d);
        for (size_t i = 0; i < now; i++, src += 34, out += BLOCK) {
            _mm_prefetch((const char *)src + AHEAD, _MM_HINT_T0);
            __m512 step = _mm512_set1_ps(d[i]);
            for (int half = 0; half < 32; half += 16) {
                __m128i q = _mm_loadu_si128((const __m128i *)(const void *)(src + 2 + half));
                _mm512_storeu_ps(out + half, _mm512_mul_ps(step, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q))));
            }
        }
    }
}

static inline __mmask16 first(size_t n) { return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1); }

static void f16(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 some = first(n - i);
        _mm_prefetch((const char *)src + 2 * i + AHEAD, _MM_HINT_T0);
        _mm512_mask_storeu_ps(out + i, some, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, src + 2 * i)));
    }
}

static void bf16(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 some = first(n - i);
        __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, src + 2 * i)), 16);
        _mm_prefetch((const char *)src + 2 * i + AHEAD, _MM_HINT_T0);
        _mm512_mask_storeu_ps(out + i, some, _mm512_castsi512_ps(high));
    }
}

bool kvf__dequantize_avx512(uint32_t type, const void *src, size_t n, float *out) {
    switch (type) {
    case KVF__TENSOR_F16: f16(src, n, out); return true;
    case KVF__TENSOR_BF16: bf16(src, n, out); return true;
    case KVF__TENSOR_Q8_0: q8_0(src, n, out); return true;
    case KVF__TENSOR_Q4_0: q4_0(src, n, out); return true;
    case KVF__TENSOR_Q4_1: q4_1(src, n, out); return true;
    default: return kvf__dequantize(type, src, n, out);
    }
}

/* ---- Dot products ------------------------------------------------------------------------------------ */

/* The sums of the lanes of four vectors. */
static inline __m128 sums4(__m512 a, __m512 b, __m512 c, __m512 d) {
#define HALF(v) _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1))
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(HALF(a), HALF(b)), _mm256_hadd_ps(HALF(c), HALF(d)));
#undef HALF
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* The 16 elements from e on, or as many of them as `some` says. n_w and m are constants where this is inlined, so that the
 * sums stay in registers. */
static inline __attribute__((always_inline)) void step(const float *const *w, const float *x, size_t x_stride, size_t e,
                                                       bool all, __mmask16 some, const int n_w, const int m,
                                                       __m512 sum[8][6]) {
    __m512 v[6];
#pragma GCC unroll 6
    for (int j = 0; j < m; j++) {
        const float *from = x + (size_t)j * x_stride + e;
        v[j] = all ? _mm512_loadu_ps(from) : _mm512_maskz_loadu_ps(some, from);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++) {
        __m512 u = all ? _mm512_loadu_ps(w[i] + e) : _mm512_maskz_loadu_ps(some, w[i] + e);
#pragma GCC unroll 6
        for (int j = 0; j < m; j++) sum[i][j] = _mm512_fmadd_ps(u, v[j], sum[i][j]);
    }
}

/* n_w (4 or 8) by m (up to 6) dot products, of which the first n_y of each row of x are stored. */
static inline __attribute__((always_inline)) void block(const kvf__dots *d, const float *const *w, const float *x,
                                                        float *y, int n_y, const int n_w, const int m) {
    __m512 sum[8][6];
#pragma GCC unroll 8
    for (int i = 0; i < n_w; i++)
#pragma GCC unroll 6
        for (int j = 0; j < m; j++) sum[i][j] = _mm512_setzero_ps();
    size_t e = 0, n = d->n;
    for (; e + 16 <= n; e += 16) step(w, x, d->x_stride, e, true, 0, n_w, m, sum);
    if (e < n) step(w, x, d->x_stride, e, false, (__mmask16)((1u << (n - e)) - 1), n_w, m, sum);
#pragma GCC unroll 2
    for (int i = 0; i < n_w; i += 4)
#pragma GCC unroll 6
        for (int j = 0; j < m; j++) {
            __m128 s = sums4(sum[i][j], sum[i + 1][j], sum[i + 2][j], sum[i + 3][j]);
            int stored = n_y - i;
            __mmask8 some = (__mmask8)(stored >= 4 ? 15 : stored > 0 ? (1 << stored) - 1 : 0);
            float *to = y + (size_t)j * d->y_stride + i;
            if (d->accumulate) s = _mm_add_ps(s, _mm_maskz_loadu_ps(some, to));
            _mm_mask_storeu_ps(to, some, s);
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
        CASE(4)
        CASE(5)
        CASE(6)
#undef CASE
    default: return;
    }
}

void kvf__dots_avx512(const kvf__dots *d) {
    const float *w[KVF__GEMV_ROWS];
    for (uint32_t i = 0; i < KVF__GEMV_ROWS; i++) w[i] = d->w + KVF__MIN(i, d->n_w - 1) * d->w_stride;
    /* As few groups of rows of x as there must be, of about the same size. */
    for (uint32_t j = 0, groups = kvf__ceil_div(d->m, 6), now; j < d->m; j += now, groups--) {
        now = kvf__ceil_div(d->m - j, groups);
        rows_of_x(d, w, d->x + j * d->x_stride, d->y + j * d->y_stride, now);
    }
}
#endif
