/* model/gemv.h: the parts of products with few rows: fast dequantisation, and dot products of rows in fp32. */
#ifndef KVF_MODEL_GEMV_H
#define KVF_MODEL_GEMV_H

#include "base/base.h"

enum { KVF__GEMV_ROWS = 8 }; /* rows of w at a time */

/* n_w rows of w (1 to KVF__GEMV_ROWS) by m rows of x, n elements each: y[j * y_stride + i] = w_i . x_j, or added to it.
 * Strides in floats. */
typedef struct kvf__dots {
    const float *w, *x;
    float *y;
    size_t w_stride, x_stride, y_stride;
    uint32_t n_w, m, n;
    bool accumulate;
} kvf__dots;

/* The same operations for three instruction sets. A dot product's bits depend only on the instruction set and n, not
 * on what else is computed; dequantisation gives the same bits with all. */
typedef struct kvf__gemv_ops {
    bool (*dequantize)(uint32_t type, const void *src, size_t n, float *out); /* as kvf__dequantize */
    void (*dots)(const kvf__dots *d);
    uint32_t few;  /* rows of x up to which this is faster than oneDNN: measured */
    uint32_t rows; /* of x that `dots` holds in registers */
} kvf__gemv_ops;

/* The best that `cpu` has. */
const kvf__gemv_ops *kvf__gemv_ops_for(kvf__cpu cpu);

bool kvf__dequantize_avx2(uint32_t type, const void *src, size_t n, float *out);
void kvf__dots_avx2(const kvf__dots *d);
bool kvf__dequantize_avx512(uint32_t type, const void *src, size_t n, float *out);
void kvf__dots_avx512(const kvf__dots *d);

#endif
