/* model/gemm.h: products with a weight matrix that stays quantised as in the file. */
#ifndef KVF_MODEL_GEMM_H
#define KVF_MODEL_GEMM_H

#include "base/base.h"

enum { KVF__MATRIX_PARTS = 3 };

/* A matrix (n, k), row major, of up to three tensors one after another: tensors that multiply the same input form one
 * product. Each part has its own type; a row consists of whole blocks. */
typedef struct kvf__matrix {
    uint32_t n_parts, n, k;
    struct {
        uint32_t type; /* kvf__tensor_type */
        uint32_t n_rows;
        const void *data; /* in the map */
        size_t row_bytes;
    } parts[KVF__MATRIX_PARTS];
} kvf__matrix;

typedef enum kvf__gemm_way {
    KVF__GEMM_AUTO,   /* by m */
    KVF__GEMM_ROWS,   /* a few rows of w at a time, dequantised into the first-level cache, by kernels of our own */
    KVF__GEMM_SLICES, /* a slice of w dequantised into the second-level cache, by oneDNN */
    KVF__GEMM_TILES   /* a slice of w dequantised into the second-level cache, by the kernels and with the bits of
                       * KVF__GEMM_ROWS */
} kvf__gemm_way;

/* y (m, n) = x (m, k) times the transpose of w, added to y when accumulate is set. Rows of x and y are x_stride and
 * y_stride floats apart. All sizes fit an int. */
typedef struct kvf__gemm {
    uint32_t m;
    const kvf__matrix *w;
    const float *x;
    float *y;
    size_t x_stride, y_stride;
    bool accumulate;
    bool deterministic; /* KVF__GEMM_AUTO chooses between ROWS and TILES alone: a row's bits depend on the row and w */
    kvf__gemm_way way;
    const struct kvf__gemv_ops *ops; /* kvf__gemv_ops_for */
    const struct kvf__fast_ops
        *fast;             /* kvf__fast_ops_for: x in 8 bits where w's type is one of those of fast.h; or NULL */
    void *quantised;       /* with fast: kvf__gemm_quantised_bytes of m and k, aligned as a cache line */
    float *scratch;        /* for each thread kvf__gemm_scratch_floats of the largest matrix */
    size_t scratch_floats; /* of one thread */
} kvf__gemm;

/* The work is divided into slices of fixed sizes, so the result does not depend on the number of threads. Unless
 * `deterministic` is set it may depend on m: logits of one token in batches of different sizes agree within rounding.
 * Products in 8 bits never depend on m. KVF_E_NO_MEMORY: oneDNN could not allocate; y is then undefined. */
kvf_status kvf__gemm_run(kvf_stream *stream, const kvf__gemm *g);

/* For m rows of k elements in 8 bits; 0 when that wraps. */
size_t kvf__gemm_quantised_bytes(uint32_t m, uint32_t k);

/* Of one thread, for products with this matrix; a multiple of a cache line. */
size_t kvf__gemm_scratch_floats(const kvf__matrix *w);

#endif
