/* base/view_stamp.h: what kvf_view_fill guarantees of a view's block ids, so that nobody has to read them all again in every layer. */
#ifndef KVF_BASE_VIEW_STAMP_H
#define KVF_BASE_VIEW_STAMP_H

#include "kvfold/blockmgr.h"

#define KVF__IDS_UNKNOWN UINT32_MAX

/* Of one view buffer of a manager. Invariant: the blocks of each table of `view`, ceil(n_slots / block_size) entries of its row, are
 * below n_blocks. */
struct kvf_view_stamp {
    uint64_t generation; /* number of fills of the buffer */
    uint32_t n_blocks;   /* KVF__IDS_UNKNOWN: a row has been changed since */
    kvf_view view;
};

/* False: the view's buffer has been filled again, so its arrays belong to another batch. */
static inline int kvf__view_is_current(const kvf_view *v) { return !v->stamp || v->stamp->generation == v->generation; }

/* Whether the ids of a view are known to be below n_blocks. Not where the caller put the view together itself, or changed it. */
static inline int kvf__view_ids_below(const kvf_view *v, uint32_t n_blocks) {
    if (!v->stamp || v->stamp->n_blocks > n_blocks) return 0;
    const kvf_view *f = &v->stamp->view;
    return v->rows == f->rows && v->row_offset == f->row_offset && v->n_slots == f->n_slots && v->n_seqs == f->n_seqs &&
           v->n_layers == f->n_layers && v->n_groups == f->n_groups && v->block_size == f->block_size;
}

#endif
