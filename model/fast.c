/* Products with activations in 8 bits in plain C, and the choice of the instruction set. */
#include "model/fast.h"

#include <float.h>
#include <math.h>

bool kvf__fast_can(uint32_t type, size_t row_bytes) {
    if (row_bytes >= (size_t)INT32_MAX / KVF__FAST_ROWS) return false;
    return type == KVF__TENSOR_Q4_0 || type == KVF__TENSOR_Q4_1 || type == KVF__TENSOR_Q8_0;
}

/* Of |x|, compared as whole numbers, so that NaN is the largest. */
static float largest(const float *x) {
    uint32_t most = 0;
    for (int i = 0; i < KVF__FAST_BLOCK; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffffu;
        if (bits > most) most = bits;
    }
    float value;
    memcpy(&value, &most, sizeof value);
    return value;
}

void kvf__fast_quantise(const float *x, uint32_t n, int8_t *q, kvf__fast_block *blocks) {
    for (uint32_t i = 0; i < n; i += KVF__FAST_BLOCK, blocks++) {
        float most = largest(x + i), sum = 0;
        float inverse = most >= KVF__FAST_LEAST && most <= FLT_MAX ? 127 / most : 0;
        for (uint32_t j = i; j < i + KVF__FAST_BLOCK; j++) {
            q[j] = inverse > 0 ? (int8_t)lrintf(x[j] * inverse) : 0;
            sum += (float)q[j];
        }
        blocks->d = most <= FLT_MAX ? (inverse > 0 ? most / 127 : 0) : NAN;
        blocks->sum = sum;
        blocks->d_sum = blocks->d * sum;
    }
}

static float half_at(const unsigned char *p) { return kvf__f32_from_f16((uint16_t)(p[0] | p[1] << 8)); }

/* Element e of a block, as it is stored in a panel. */
static uint8_t element(uint32_t type, const unsigned char *q, uint32_t e) {
    if (type == KVF__TENSOR_Q8_0) return q[e] ^ 0x80;
    return e < 16 ? q[e] & 15 : q[e - 16] >> 4;
}

void kvf__fast_unpack(uint32_t type, const unsigned char *rows, size_t row_bytes, uint32_t n_rows, uint32_t n_blocks,
                      kvf__fast_panel *out) {
    size_t header = kvf__fast_header(type), bytes = kvf__fast_block_bytes(type);
    for (uint32_t b = 0; b < n_blocks; b++, out++)
        for (uint32_t r = 0; r < KVF__FAST_ROWS; r++) {
            const unsigned char *src = rows + KVF__MIN(r, n_rows - 1) * row_bytes + b * bytes;
            out->d[r] = half_at(src);
            if (header == 4) out->m[r] = half_at(src + 2);
            for (uint32_t e = 0; e < KVF__FAST_BLOCK; e++) out->q[e / 4][r][e % 4] = element(type, src + header, e);
        }
}

/* A row of x with all rows of a panel. */
static void add_panel(const kvf__fast_panel *p, const int8_t *x, const kvf__fast_block *b, float zero, bool has_min,
                      float y[KVF__FAST_ROWS]) {
    int32_t sum[KVF__FAST_ROWS] = {0};
    for (int k = 0; k < KVF__FAST_BLOCK / 4; k++)
        for (int r = 0; r < KVF__FAST_ROWS; r++)
            for (int e = 0; e < 4; e++) sum[r] += p->q[k][r][e] * x[4 * k + e];
    for (int r = 0; r < KVF__FAST_ROWS; r++) {
        y[r] = fmaf(p->d[r] * b->d, (float)sum[r] - zero * b->sum, y[r]); /* exact: below 2^24 */
        if (has_min) y[r] = fmaf(p->m[r], b->d_sum, y[r]);
    }
}

static void dots(const kvf__fast_dots *d) {
    float zero = (float)kvf__fast_zero(d->type);
    for (uint32_t j = 0; j < d->m; j++) {
        float sums[KVF__FAST_ROWS] = {0}, *y = d->y + j * d->y_stride;
        if (d->accumulate) memcpy(sums, y, d->n_w * sizeof *y);
        for (uint32_t b = 0; b < d->n_blocks; b++)
            add_panel(d->panels + b, d->q + j * d->q_stride + (size_t)b * KVF__FAST_BLOCK,
                      d->blocks + j * d->block_stride + b, zero, d->type == KVF__TENSOR_Q4_1, sums);
        memcpy(y, sums, d->n_w * sizeof *y);
    }
}

const kvf__fast_ops *kvf__fast_ops_for(kvf__cpu cpu) {
    static const kvf__fast_ops plain = {kvf__fast_quantise, kvf__fast_unpack, dots};
#if defined(__x86_64__)
    static const kvf__fast_ops avx2 = {kvf__fast_quantise_avx2, kvf__fast_unpack_avx2, kvf__fast_dots_avx2};
    static const kvf__fast_ops avxvnni = {kvf__fast_quantise_avx2, kvf__fast_unpack_avx2, kvf__fast_dots_avxvnni};
    static const kvf__fast_ops avx512vnni = {kvf__fast_quantise_avx2, kvf__fast_unpack_avx512vnni,
                                             kvf__fast_dots_avx512vnni};
    if (cpu.avx512 && cpu.avx512_vnni) return &avx512vnni;
    if (cpu.avx2_fma_f16c && cpu.avx_vnni) return &avxvnni;
    if (cpu.avx2_fma_f16c) return &avx2;
#endif
    (void)cpu;
    return &plain;
}
