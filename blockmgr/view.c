/* The all-layers view of a batch, in one of two buffers. */
#include "blockmgr/manager.h"

kvf_status kvf_view_fill(kvf_manager *manager, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs, kvf_view *out) {
    if (!manager) return KVF_E_INVALID;
    if (which > 1) return kvf__fail(manager->error, KVF_E_INVALID, "which %u: must be 0 or 1", which);
    if (!out || (n_seqs && !seqs)) return kvf__fail(manager->error, KVF_E_INVALID, "seqs, out: must be given");
    if (n_seqs > manager->config.max_seqs)
        return kvf__fail(manager->error, KVF_E_LIMIT, "n_seqs %u: must be at most max_seqs %u", n_seqs,
                         manager->config.max_seqs);
    uint32_t index = 0;
    for (uint32_t i = 0; i < n_seqs; i++) { /* all checked before the buffer changes */
        kvf_status s = kvf__seq_find(manager, seqs[i], &index);
        if (s) return s;
        if (manager->seqs[index].swapped) return kvf__fail_swapped(manager, "view");
    }
    const kvf__view_buffer *v = &manager->views[which];
    for (uint32_t i = 0; i < n_seqs; i++) {
        (void)kvf__seq_find(manager, seqs[i], &index);
        v->seq_index[i] = index;
        v->next_pos[i] = manager->seqs[index].next_pos;
        uint32_t n = manager->seq_tables, first = index * n;
        uint64_t *row_offset = v->row_offset + (size_t)i * n;
        for (uint32_t k = 0; k < n; k++) row_offset[k] = (uint64_t)(first + k) * manager->row_capacity;
        memcpy(v->n_slots + (size_t)i * n, manager->n_slots + first, n * sizeof *v->n_slots);
    }
    *out = (kvf_view){.struct_size = sizeof *out,
                      .n_seqs = n_seqs,
                      .n_layers = manager->config.n_layers,
                      .n_groups = manager->n_groups,
                      .heads_per_group = manager->config.heads_per_group,
                      .block_size = manager->config.block_size,
                      .rows = manager->rows,
                      .score_rows = manager->score_rows,
                      .row_offset = v->row_offset,
                      .n_slots = v->n_slots,
                      .next_pos = v->next_pos,
                      .seq_index = v->seq_index};
    return KVF_OK;
}
