/* Layers with a window: the runs of layers, and dropping blocks at the front of their tables. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

kvf_status kvf__windows_check(const kvf_manager_config *config, kvf_error *err) {
    uint32_t n_none = 0;
    if (!config->layer_windows) return KVF_OK;
    for (uint32_t l = 0; l < config->n_layers; l++) n_none += config->layer_windows[l] == KVF_LAYER_NONE;
    if (n_none == config->n_layers)
        return kvf__fail(err, KVF_E_INVALID, "layer_windows: all %u are KVF_LAYER_NONE: one must keep something",
                         config->n_layers);
    if (n_none && config->prefix_cache)
        return kvf__fail(
            err, KVF_E_UNSUPPORTED,
            "layer_windows: %u are KVF_LAYER_NONE: with prefix_cache every layer must keep something; leave "
            "those out of n_layers",
            n_none);
    return KVF_OK;
}

void kvf__runs_fill(kvf_manager *m) {
    m->n_runs = 0;
    for (uint32_t k = 0; k < m->seq_tables; k += m->n_groups) {
        uint32_t window = kvf__window_of(m, k);
        kvf__run *last = m->n_runs ? &m->runs[m->n_runs - 1] : NULL;
        if (window == KVF_LAYER_NONE) continue;
        m->windowed |= window != 0;
        uint32_t block_class = kvf__class_of(m, k);
        if (last && last->window == window && last->block_class == block_class && last->first + last->n_tables == k) {
            last->n_tables += m->n_groups;
        } else {
            m->runs[m->n_runs++] = (kvf__run){k, m->n_groups, window, block_class};
        }
    }
}

/* How many blocks after the first n count against the reservation. Other tables of the batch count as they are before the
 * append. What they drop or leave can only raise this number, so that the table needs a smaller promise. */
static uint32_t kept_behind(const kvf_manager *m, uint32_t t, uint32_t n) {
    uint32_t n_blocks = kvf__n_blocks(m, t), n_private = 0;
    if (kvf__is_private(m, t)) return n_blocks - n;
    const uint32_t *row = kvf__row(m, t);
    bool last_counts = true;
    if (n_blocks > n && m->n_slots[t] % m->config.block_size)
        last_counts = kvf__pool_holders(m->blocks, row[n_blocks - 1]) == 1 && !kvf__tail_covered(m, t);
    if (m->tables[t].growth) return n_blocks - n - !last_counts;
    for (uint32_t i = n; i < n_blocks; i++) n_private += kvf__pool_holders(m->blocks, row[i]) == 1;
    return n_private - (!last_counts && kvf__pool_holders(m->blocks, row[n_blocks - 1]) == 1);
}

kvf__dropping kvf__window_look(const kvf_manager *m, uint32_t t, uint32_t n) {
    kvf__dropping d = {0, 0};
    const uint32_t *row = kvf__row(m, t);
    for (uint32_t i = 0; i < n; i++)
        d.freed += kvf__pool_refs(m->blocks, row[i]) - m->blocks->entries[row[i]].scratch == 1;
    if (!m->tables[t].reserve) return d;
    uint32_t owed = kvf__promise_owed(m->tables[t].reserve, kept_behind(m, t, n));
    d.promised = KVF__MIN(kvf__promise_owed(owed, m->promise[t]), d.freed);
    return d;
}

static void drop_leading(kvf_manager *m, kvf__pool *p, uint32_t t, uint32_t n) {
    uint32_t *row = kvf__row(m, t), n_slots = m->n_slots[t], n_left = kvf__n_blocks(m, t) - n;
    kvf__dropping d = kvf__window_look(m, t, n);
    for (uint32_t i = n; i-- > 0;) {
        bool fell_free = kvf__pool_drop(p, row[i]) && kvf__pool_node(p, row[i]) == KVF_NO_BLOCK;
        if (fell_free && m->profile) kvf__profile_dropped(m->profile, row[i], t / m->seq_tables);
    }
    memmove(row, row + n, n_left * sizeof *row);
    memset(row + n_left, 0xff, n * sizeof *row); /* KVF_NO_BLOCK */
    kvf__row_cut(m, t, 0, UINT32_MAX);
    kvf__row_fit(m, t, n_left);
    m->n_slots[t] -= n << m->block_shift;
    kvf__promise_set(p, &m->promise[t], m->promise[t] + d.promised);
    kvf__table_count(m, t, n_slots);
}

void kvf__window_drop(kvf_manager *m, uint32_t index) {
    if (!m->seqs[index].takes) return; /* the append only fills blocks that the sequence has */
    for (uint32_t r = 0; r < m->n_runs; r++) {
        const kvf__run *run = &m->runs[r];
        uint32_t first = index * m->seq_tables + run->first;
        for (uint32_t t = first; run->window && t < first + run->n_tables; t++) {
            uint32_t n = kvf__window_drops(m, run->window, m->n_slots[t]);
            if (n) drop_leading(m, &m->blocks[run->block_class], t, n);
        }
    }
}
