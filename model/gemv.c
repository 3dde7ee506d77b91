/* Products with few rows in plain C, and the choice of the instruction set. */
#include "model/gemv.h"

#include "model/weights.h"

enum { LANES = 8 };

/* Lanes as a vector unit has them, which compilers turn into it. */
static float dot(const float *w, const float *x, uint32_t n) {
    float lane[LANES] = {0}, rest = 0;
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) lane[j] += w[i + (uint32_t)j] * x[i + (uint32_t)j];
    for (; i < n; i++) rest += w[i] * x[i];
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7])) + rest;
}

static void dots_plain(const kvf__dots *d) {
    for (uint32_t j = 0; j < d->m; j++)
        for (uint32_t i = 0; i < d->n_w; i++) {
            float v = dot(d->w + i * d->w_stride, d->x + j * d->x_stride, d->n), *y = d->y + j * d->y_stride + i;
            *y = d->accumulate ? *y + v : v;
        }
}

const kvf__gemv_ops *kvf__gemv_ops_for(kvf__cpu cpu) {
    static const kvf__gemv_ops plain = {kvf__dequantize, dots_plain, 4, 4};
#if defined(__x86_64__)
    static const kvf__gemv_ops avx2 = {kvf__dequantize_avx2, kvf__dots_avx2, 32, 3};
    static const kvf__gemv_ops avx512 = {kvf__dequantize_avx512, kvf__dots_avx512, 64, 6};
    if (cpu.avx512) return &avx512;
    if (cpu.avx2_fma_f16c) return &avx2;
#endif
    (void)cpu;
    return &plain;
}
