/* model/gemm.h: products with a weight matrix. */
#ifndef KVF_MODEL_GEMM_H
#define KVF_MODEL_GEMM_H

#include "base/base.h"

/* y (m, n) = x (m, k) times the transpose of w (n, k), added to y when accumulate is set. Rows of x and y are x_stride
 * and y_stride floats apart, those of w k. All sizes fit an int. */
typedef struct kvf__gemm {
    uint32_t m, n, k;
    const float *x, *w;
    float *y;
    size_t x_stride, y_stride;
    bool accumulate;
} kvf__gemm;

/* The work is cut into slices of fixed sizes, so that the result does not depend on the number of threads. It
 * may depend on m: logits of one token in batches of different sizes agree within rounding. KVF_E_NO_MEMORY: the library
 * behind it had none; y is then undefined. */
kvf_status kvf__gemm_run(kvf_stream *stream, const kvf__gemm *g);

#endif
