/* model/fast.h: products of quantised weights with activations in 8 bits, computed with integer sums.
 *
 * Glossary
 *   block   32 elements of a row with one scale: of w as the file stores them, of x as `quantise` makes them
 *   panel   one block of each of 16 rows of w, unpacked to bytes, so that each lane of a register holds one row
 *
 * A row of x times a row of w adds the blocks one after another in fp32, starting from y or 0:
 *     y = fma(w.d * x.d, sum of w.q * x.q, y), and if w has a minimum y = fma(w.m, x.d * sum of x.q, y)
 * The integer sums are exact, so every instruction set gives the same bits, in any batch. */
#ifndef KVF_MODEL_FAST_H
#define KVF_MODEL_FAST_H

#include "base/base.h"
#include "model/gguf.h"

enum { KVF__FAST_ROWS = 16, KVF__FAST_BLOCK = 32 };
#define KVF__FAST_LEAST 1e-30f /* blocks of x whose every element is smaller are zeros */

typedef struct kvf__fast_block { /* of x */
    float d;                     /* an element is d times its q; NaN when an element is NaN or infinite */
    float sum, d_sum;            /* of q, a whole number; d times it */
} kvf__fast_block;

typedef struct kvf__fast_panel {
    uint8_t q[KVF__FAST_BLOCK / 4][KVF__FAST_ROWS][4]; /* elements 4 by 4, each plus kvf__fast_zero */
    float d[KVF__FAST_ROWS], m[KVF__FAST_ROWS];        /* m only where the type has it */
} kvf__fast_panel;

/* n_w rows of w (1 to KVF__FAST_ROWS) by m rows of x, n_blocks each: y[j * y_stride + i]. */
typedef struct kvf__fast_dots {
    const kvf__fast_panel *panels; /* [n_blocks] */
    const int8_t *q;               /* of x, q_stride apart */
    const kvf__fast_block *blocks; /* of x, block_stride apart */
    float *y;
    size_t q_stride, block_stride, y_stride;
    uint32_t type, n_w, m, n_blocks;
    bool accumulate;
} kvf__fast_dots;

/* The same operations in several forms, with the same results. */
typedef struct kvf__fast_ops {
    /* n is a multiple of KVF__FAST_BLOCK. */
    void (*quantise)(const float *x, uint32_t n, int8_t *q, kvf__fast_block *blocks);
    /* Rows beyond n_rows repeat the last one. */
    void (*unpack)(uint32_t type, const unsigned char *rows, size_t row_bytes, uint32_t n_rows, uint32_t n_blocks,
                   kvf__fast_panel *out);
    void (*dots)(const kvf__fast_dots *d);
} kvf__fast_ops;

/* Whether rows are multiplied so: those of Q4_0, Q4_1, Q8_0 (of less than 2^27 bytes). */
bool kvf__fast_can(uint32_t type, size_t row_bytes);

/* The best that `cpu` has. */
const kvf__fast_ops *kvf__fast_ops_for(kvf__cpu cpu);

void kvf__fast_quantise(const float *x, uint32_t n, int8_t *q, kvf__fast_block *blocks);
void kvf__fast_unpack(uint32_t type, const unsigned char *rows, size_t row_bytes, uint32_t n_rows, uint32_t n_blocks,
                      kvf__fast_panel *out);

void kvf__fast_quantise_avx2(const float *x, uint32_t n, int8_t *q, kvf__fast_block *blocks);
void kvf__fast_unpack_avx2(uint32_t type, const unsigned char *rows, size_t row_bytes, uint32_t n_rows,
                           uint32_t n_blocks, kvf__fast_panel *out);
void kvf__fast_dots_avx2(const kvf__fast_dots *d);
void kvf__fast_dots_avxvnni(const kvf__fast_dots *d);
void kvf__fast_unpack_avx512vnni(uint32_t type, const unsigned char *rows, size_t row_bytes, uint32_t n_rows,
                                 uint32_t n_blocks, kvf__fast_panel *out);
void kvf__fast_dots_avx512vnni(const kvf__fast_dots *d);

/* What an element has more than it stands for, so that it is a byte without sign. */
static inline uint32_t kvf__fast_zero(uint32_t type) {
    return type == KVF__TENSOR_Q4_0 ? 8 : type == KVF__TENSOR_Q8_0 ? 128 : 0;
}

/* Where the elements of a block of w begin. */
static inline size_t kvf__fast_header(uint32_t type) { return type == KVF__TENSOR_Q4_1 ? 4 : 2; }
static inline size_t kvf__fast_block_bytes(uint32_t type) {
    return kvf__fast_header(type) + (type == KVF__TENSOR_Q8_0 ? 32 : 16);
}

#endif
