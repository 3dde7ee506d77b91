/* base/copy_index.h: what a copy of a block or score page reads and writes (kvf_block_copies). Shared by C and CUDA. */
#ifndef KVF_BASE_COPY_INDEX_H
#define KVF_BASE_COPY_INDEX_H

#include "base/page_index.h"
#include "kvfold/device.h"

enum { KVF__VECTOR_BYTES = 16, KVF__PLANE_SCORES = KVF_COPY_PLANES - 1 };

KVF__HOST_DEVICE static inline int kvf__copy_is_block(uint32_t kind) {
    return kind == KVF_COPY_BLOCK || kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_BLOCK_IN;
}
/* The kvf_memory that it reads, that it writes. */
KVF__HOST_DEVICE static inline int kvf__copy_from(uint32_t kind) {
    return kind == KVF_COPY_BLOCK_IN || kind == KVF_COPY_SCORE_IN ? KVF_MEMORY_HOST : KVF_MEMORY_DEVICE;
}
KVF__HOST_DEVICE static inline int kvf__copy_to(uint32_t kind) {
    return kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_SCORE_OUT ? KVF_MEMORY_HOST : KVF_MEMORY_DEVICE;
}
/* Its planes are [first, end). */
KVF__HOST_DEVICE static inline int kvf__copy_first_plane(uint32_t kind) {
    return kvf__copy_is_block(kind) ? 0 : (int)KVF__PLANE_SCORES;
}
KVF__HOST_DEVICE static inline int kvf__copy_end_plane(uint32_t kind) {
    return kvf__copy_is_block(kind) ? (int)KVF__PLANE_SCORES : (int)KVF_COPY_PLANES;
}
KVF__HOST_DEVICE static inline unsigned char *kvf__copy_at(const kvf_copy_plane *plane, int memory, uint32_t block) {
    return plane->base[memory] + kvf__block_at(block, plane->block_stride[memory]);
}

/* In vectors: those of a row that hold its first n_slots slots, and the offset in bytes of the i-th vector of all rows. */
KVF__HOST_DEVICE static inline uint32_t kvf__copy_row_vectors(const kvf_copy_plane *plane, uint32_t n_slots) {
    return (n_slots * plane->slot_bytes + KVF__VECTOR_BYTES - 1) / KVF__VECTOR_BYTES;
}
KVF__HOST_DEVICE static inline uint64_t kvf__copy_offset(const kvf_copy_plane *plane, uint32_t row_vectors,
                                                         uint32_t i) {
    return (uint64_t)(i / row_vectors) * plane->row_bytes + (uint64_t)(i % row_vectors) * KVF__VECTOR_BYTES;
}

#endif
