/* base/page_index.h: where a slot lies. The one place that computes it, for C and CUDA alike, in 64 bits throughout: a pool may have more
 * than 2^32 slots, and a block's offset more than 2^32 bytes.
 *
 *     K, V       block -> [head in group][slot][head_dim], blocks k_block_stride or v_block_stride bytes apart
 *     metadata   [block][head in group][slot]: pos, key_norm, weight, bias, score
 *     scores     [page][array][head in group][slot]
 */
#ifndef KVF_BASE_PAGE_INDEX_H
#define KVF_BASE_PAGE_INDEX_H

#include "kvfold/attention.h"

#ifdef __CUDACC__
#define KVF__HOST_DEVICE __host__ __device__
#else
#define KVF__HOST_DEVICE
#endif

/* Index of a table in the view's arrays. */
KVF__HOST_DEVICE static inline uint64_t kvf__view_table(const kvf_view *v, uint64_t row, uint32_t layer,
                                                        uint32_t group) {
    return (row * v->n_layers + layer) * v->n_groups + group;
}

/* Bytes from the first block to another. */
KVF__HOST_DEVICE static inline uint64_t kvf__block_at(uint64_t block, uint64_t block_stride) {
    return block * block_stride;
}

/* Index in the metadata arrays. slot: in the block. */
KVF__HOST_DEVICE static inline uint64_t kvf__meta_at(const kvf_pages *p, uint64_t block, uint32_t head, uint32_t slot) {
    return (block * p->heads_per_group + head) * p->block_size + slot;
}

KVF__HOST_DEVICE static inline uint64_t kvf__row_bytes(const kvf_pages *p) {
    return (uint64_t)p->head_dim * (p->dtype == KVF_F32 ? 4 : 2);
}

/* Bytes from K or V's base to a slot's row. */
KVF__HOST_DEVICE static inline uint64_t kvf__row_at(const kvf_pages *p, uint64_t block_stride, uint64_t block,
                                                    uint32_t head, uint32_t slot) {
    return kvf__block_at(block, block_stride) + ((uint64_t)head * p->block_size + slot) * kvf__row_bytes(p);
}
KVF__HOST_DEVICE static inline unsigned char *kvf__k_at(const kvf_pages *p, uint64_t block, uint32_t head,
                                                        uint32_t slot) {
    return (unsigned char *)p->k + kvf__row_at(p, p->k_block_stride, block, head, slot);
}
KVF__HOST_DEVICE static inline unsigned char *kvf__v_at(const kvf_pages *p, uint64_t block, uint32_t head,
                                                        uint32_t slot) {
    return (unsigned char *)p->v + kvf__row_at(p, p->v_block_stride, block, head, slot);
}

/* Index in the score pages. */
KVF__HOST_DEVICE static inline uint64_t kvf__score_index(const kvf_score_pages *s, uint64_t page, uint32_t array,
                                                         uint32_t head, uint32_t slot) {
    return ((page * s->n_arrays + array) * s->heads_per_group + head) * s->block_size + slot;
}

#endif
