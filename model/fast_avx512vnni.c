/* Products with activations in 8 bits with AVX-512 VNNI. */
#include "model/fast.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
#define INLINE static inline __attribute__((always_inline))

enum { MOST = 8 }; /* rows of x at a time */

INLINE __mmask16 first_lanes(uint32_t n) { return (__mmask16)((1u << n) - 1); }

INLINE __m512i four_of(const int8_t *q) {
    int32_t bytes;
    memcpy(&bytes, q, sizeof bytes);
    return _mm512_set1_epi32(bytes);
}

/* R rows of x by all rows of w. */
INLINE void tile(const kvf__fast_dots *d, size_t row, const uint32_t type, const int R) {
    const __mmask16 some = first_lanes(d->n_w);
    const __m512 off = _mm512_set1_ps((float)kvf__fast_zero(type));
    const int8_t *q = d->q + row * d->q_stride;
    const kvf__fast_block *blocks = d->blocks + row * d->block_stride;
    float *y = d->y + row * d->y_stride;
    __m512 sum[MOST];
    UNROLL for (int r = 0; r < R; r++) {
        sum[r] = d->accumulate ? _mm512_maskz_loadu_ps(some, y + (size_t)r * d->y_stride) : _mm512_setzero_ps();
    }
    for (size_t b = 0; b < d->n_blocks; b++, q += KVF__FAST_BLOCK) {
        const kvf__fast_panel *p = &d->panels[b];
        __m512i whole[MOST];
        UNROLL for (int r = 0; r < R; r++) whole[r] = _mm512_setzero_si512();
        UNROLL for (int k = 0; k < KVF__FAST_BLOCK / 4; k++) {
            __m512i u = _mm512_loadu_si512(p->q[k]);
            UNROLL for (int r = 0; r < R; r++) {
                whole[r] = _mm512_dpbusd_epi32(whole[r], u, four_of(q + (size_t)r * d->q_stride + 4 * k));
            }
        }
        __m512 scale = _mm512_loadu_ps(p->d);
        UNROLL for (int r = 0; r < R; r++) {
            const kvf__fast_block *x = &blocks[(size_t)r * d->block_stride + b];
            __m512 v = _mm512_cvtepi32_ps(whole[r]);
            if (type != KVF__TENSOR_Q4_1) v = _mm512_fnmadd_ps(off, _mm512_set1_ps(x->sum), v);
            sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_set1_ps(x->d)), v, sum[r]);
            if (type == KVF__TENSOR_Q4_1)
                sum[r] = _mm512_fmadd_ps(_mm512_loadu_ps(p->m), _mm512_set1_ps(x->d_sum), sum[r]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) { _mm512_mask_storeu_ps(y + (size_t)r * d->y_stride, some, sum[r]); }
}

INLINE void rows_of(const kvf__fast_dots *d, size_t row, uint32_t n, const uint32_t type) {
    switch (n) {
    case 1: tile(d, row, type, 1); break;
    case 2: tile(d, row, type, 2); break;
    case 3: tile(d, row, type, 3); break;
    case 4: tile(d, row, type, 4); break;
    case 5: tile(d, row, type, 5); break;
    case 6: tile(d, row, type, 6); break;
    case 7: tile(d, row, type, 7); break;
    default: tile(d, row, type, 8); break;
    }
}

void kvf__fast_dots_avx512vnni(const kvf__fast_dots *d) {
    /* As few groups of rows of x as there must be, of about the same size. */
    for (uint32_t j = 0, groups = kvf__ceil_div(d->m, MOST), now; j < d->m; j += now, groups--) {
        now = kvf__ceil_div(d->m - j, groups);
        if (d->type == KVF__TENSOR_Q4_1)
            rows_of(d, j, now, KVF__TENSOR_Q4_1);
        else if (d->type == KVF__TENSOR_Q4_0)
            rows_of(d, j, now, KVF__TENSOR_Q4_0);
        else
            rows_of(d, j, now, KVF__TENSOR_Q8_0);
    }
}

/* ---- Unpacking ------------------------------------------------------------------------------------------ */

/* 16 bytes of 16 rows: out[j] gets the j-th four bytes of each. */
INLINE void side_by_side(const unsigned char *const src[KVF__FAST_ROWS], size_t at, __m512i out[4]) {
    __m512i z[4];
    UNROLL for (int i = 0; i < 4; i++) { /* of rows i, 4 + i, 8 + i, 12 + i: each quarter transposes on its own */
#define ROW(n) _mm_loadu_si128((const __m128i *)(const void *)(src[4 * (n) + i] + at))
        z[i] = _mm512_castsi128_si512(ROW(0));
        z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x00f0, ROW(1)); /* costs no shuffle, of which there are enough */
        z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x0f00, ROW(2));
        z[i] = _mm512_mask_broadcast_i32x4(z[i], 0xf000, ROW(3));
#undef ROW
    }
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

/* Without optimisation gcc's gathers are macros, which convert their masks. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"

/* The halves at the beginning of the rows' blocks: one, or two that follow one another. `offset` has the rows'. */
INLINE void scales(const unsigned char *rows, __m512i offset, bool two, kvf__fast_panel *p) {
    __m512i w = _mm512_i32gather_epi32(offset, rows, 1);
    _mm512_storeu_ps(p->d, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)));
    if (two) _mm512_storeu_ps(p->m, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16))));
}

#pragma GCC diagnostic pop

INLINE void unpack_as(const uint32_t type, const unsigned char *const src[KVF__FAST_ROWS], __m512i offset,
                      const unsigned char *next, uint32_t n_blocks, kvf__fast_panel *out) {
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8((char)0x80);
    const size_t header = kvf__fast_header(type), bytes = kvf__fast_block_bytes(type);
    for (size_t b = 0, at = 0; b < n_blocks; b++, at += bytes) {
        kvf__fast_panel *p = &out[b];
        __m512i v[4];
        for (size_t line = 0; line < KVF__FAST_ROWS * bytes; line += 64)
            _mm_prefetch((const char *)next + at * KVF__FAST_ROWS + line, _MM_HINT_T1);
        scales(src[0] + at, offset, type == KVF__TENSOR_Q4_1, p);
        side_by_side(src, at + header, v);
        UNROLL for (int j = 0; j < 4; j++) {
            if (type == KVF__TENSOR_Q8_0) {
                _mm512_storeu_si512(p->q[j], _mm512_xor_si512(v[j], sign));
            } else {
                _mm512_storeu_si512(p->q[j], _mm512_and_si512(v[j], low));
                _mm512_storeu_si512(p->q[4 + j], _mm512_and_si512(_mm512_srli_epi16(v[j], 4), low));
            }
        }
        if (type != KVF__TENSOR_Q8_0) continue;
        side_by_side(src, at + header + 16, v);
        UNROLL for (int j = 0; j < 4; j++) _mm512_storeu_si512(p->q[4 + j], _mm512_xor_si512(v[j], sign));
    }
}

void kvf__fast_unpack_avx512vnni(uint32_t type, const unsigned char *rows, size_t row_bytes, uint32_t n_rows,
                                 uint32_t n_blocks, kvf__fast_panel *out) {
    const unsigned char *src[KVF__FAST_ROWS], *next = rows + KVF__FAST_ROWS * row_bytes; /* asked for, never needed */
    int32_t offsets[KVF__FAST_ROWS];
    for (uint32_t i = 0; i < KVF__FAST_ROWS; i++) {
        src[i] = rows + KVF__MIN(i, n_rows - 1) * row_bytes;
        offsets[i] = (int32_t)(src[i] - rows);
    }
    __m512i offset = _mm512_loadu_si512(offsets);
    if (type == KVF__TENSOR_Q4_1)
        unpack_as(KVF__TENSOR_Q4_1, src, offset, next, n_blocks, out);
    else if (type == KVF__TENSOR_Q4_0)
        unpack_as(KVF__TENSOR_Q4_0, src, offset, next, n_blocks, out);
    else
        unpack_as(KVF__TENSOR_Q8_0, src, offset, next, n_blocks, out);
}
#endif
