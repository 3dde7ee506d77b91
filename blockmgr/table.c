/* What every call looks up or keeps of sequences and tables: handles, figures, which blocks are private. */
#include "blockmgr/manager.h"

/* ---- Sequences ---------------------------------------------------------------------------------- */

kvf_status kvf__seq_find(const kvf_manager *m, kvf_seq seq, uint32_t *index) {
    if (!m) return KVF_E_INVALID;
    uint32_t i = kvf__seq_index(seq);
    if (i >= m->config.max_seqs || !m->seqs[i].alive || kvf__seq_handle(m, i) != seq)
        return kvf__fail(m->error, KVF_E_STALE, "sequence %#llx: was freed, or another manager gave it out",
                         (unsigned long long)seq);
    *index = i;
    return KVF_OK;
}

kvf_status kvf__fail_swapped(const kvf_manager *m, const char *call) {
    return kvf__fail(m->error, KVF_E_STATE, "%s: the sequence lies on the host; bring it back first (kvf_swap_in)",
                     call);
}

kvf_status kvf__prefix_check(const kvf_manager *m) {
    if (!m) return KVF_E_INVALID;
    if (m->cache.on) return KVF_OK;
    return kvf__fail(m->error, KVF_E_UNSUPPORTED, "prefix_cache 0: this manager keeps no prefix cache");
}

/* ---- Tables -------------------------------------------------------------------------------------- */

uint32_t kvf__seq_layer_blocks(const kvf_manager *m, uint32_t seq_layer) {
    uint32_t n = 0;
    for (uint32_t g = 0; g < m->n_groups; g++) n += kvf__n_blocks(m, seq_layer * m->n_groups + g);
    return n;
}

void kvf__table_count(kvf_manager *m, uint32_t t, uint32_t n_slots_before) {
    uint32_t before = kvf__blocks_for(m, n_slots_before), now = kvf__n_blocks(m, t), seq_layer = t / m->n_groups;
    uint32_t layer = seq_layer % m->config.n_layers;
    m->layer_slots[layer] = m->layer_slots[layer] - n_slots_before + m->n_slots[t];
    m->layer_blocks[layer] = m->layer_blocks[layer] - before + now;
    if (now <= before) return;
    m->layer_blocks_max[layer] = KVF__MAX(m->layer_blocks_max[layer], m->layer_blocks[layer]);
    m->seq_blocks_max[seq_layer] = KVF__MAX(m->seq_blocks_max[seq_layer], kvf__seq_layer_blocks(m, seq_layer));
}

uint32_t kvf__table_private(kvf_manager *m, uint32_t t) {
    uint32_t n_blocks = kvf__n_blocks(m, t), n_private = 0, n_sole = 0;
    if (kvf__is_private(m, t)) return n_blocks;
    const uint32_t *row = kvf__row(m, t);
    for (uint32_t i = 0; i < n_blocks; i++) {
        n_private += kvf__pool_holders(m->blocks, row[i]) == 1;
        n_sole += *kvf__state(m->blocks, row[i]) == KVF__ROW;
    }
    if (n_sole == n_blocks) m->private_at[t] = m->tail_at[t] = m->epoch;
    if (kvf__tail_covered(m, t)) n_private -= kvf__pool_holders(m->blocks, row[n_blocks - 1]) == 1;
    return n_private;
}

void kvf__epoch_begin(kvf_manager *m) {
    if (++m->epoch) return;
    size_t bytes = (size_t)m->config.max_seqs * m->seq_tables * sizeof(uint32_t);
    memset(m->private_at, 0, bytes); /* the epoch wrapped around: start again at 1 */
    memset(m->tail_at, 0, bytes);
    for (uint32_t i = 0; i < m->config.max_seqs; i++) m->seqs[i].known_at = 0;
    m->epoch = 1;
}
