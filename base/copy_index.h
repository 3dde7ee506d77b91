/* base/copy_index.h: the addresses that a copy of a block reads and writes. Shared by C and CUDA.
 *
 * The data of a block or a score page lies in planes (K, V, positions, ...). A plane is an array of blocks. A block is an
 * array of rows of block_size slots. A copy moves the first n_slots slots of every row, in vectors of 16 bytes:
 *
 *     base -> | block 0         | block 1         | ...        block_stride bytes apart
 *             | row 0 | row 1 | |                              row_vectors * 16 bytes apart
 *             | s s s . . . . . |                              the first n_slots slots are copied
 */
#ifndef KVF_BASE_COPY_INDEX_H
#define KVF_BASE_COPY_INDEX_H

#include "base/page_index.h"

enum { KVF__VECTOR_BYTES = 16 };

enum { /* the planes of a block, then the one of a score page */
       KVF__PLANE_K,
       KVF__PLANE_V,
       KVF__PLANE_POS,
       KVF__PLANE_KEY_NORM,
       KVF__PLANE_WEIGHT,
       KVF__PLANE_BIAS,
       KVF__PLANE_SCORE,
       KVF__PLANE_SCORES,
       KVF__N_PLANES
};

typedef struct kvf__copy_plane {
    unsigned char *base;   /* 16-byte aligned; NULL: the plane does not exist */
    uint64_t block_stride; /* bytes, a multiple of 16 */
    uint32_t n_rows;       /* rows of a block */
    uint32_t row_vectors;  /* vectors of a row */
    uint32_t slot_vectors; /* vectors of a slot; 0: a slot is 4 bytes, 4 slots a vector */
} kvf__copy_plane;

/* The arguments of the copy kernel. */
typedef struct kvf__copy_params {
    const kvf_copy *items; /* [n_items], in memory that the kernel can read */
    uint32_t n_items;
    kvf__copy_plane planes[KVF__N_PLANES];
} kvf__copy_params;

KVF__HOST_DEVICE static inline uint32_t kvf__copy_row_used(const kvf__copy_plane *plane, uint32_t n_slots) {
    return plane->slot_vectors ? n_slots * plane->slot_vectors : (n_slots + 3) / 4;
}

/* Vectors that a copy of n_slots slots moves in a plane. */
KVF__HOST_DEVICE static inline uint32_t kvf__copy_n_vectors(const kvf__copy_plane *plane, uint32_t n_slots) {
    return plane->n_rows * kvf__copy_row_used(plane, n_slots);
}

/* Bytes from the start of the block to the i-th of these vectors. */
KVF__HOST_DEVICE static inline uint64_t kvf__copy_offset(const kvf__copy_plane *plane, uint32_t n_slots, uint32_t i) {
    uint32_t used = kvf__copy_row_used(plane, n_slots);
    return ((uint64_t)(i / used) * plane->row_vectors + i % used) * KVF__VECTOR_BYTES;
}

#endif
