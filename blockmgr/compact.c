/* Compaction: fresh rows for tables that share, in place for the others; commit, cancel. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

static uint32_t first_table(const kvf_manager *m, uint32_t index, uint32_t layer) {
    return index * m->seq_tables + layer * m->n_groups;
}

static bool shrinks(const kvf_manager *m, uint32_t t) { return m->tables[t].n_keep < m->n_slots[t]; }

/* Reads how many slots each table of an item keeps. */
static kvf_status read_keep(kvf_manager *m, const kvf_compact_item *item, uint32_t i, uint32_t first) {
    bool any = false;
    for (uint32_t g = 0; g < m->n_groups; g++) {
        uint32_t t = first + g, n = item->n_keep_group ? item->n_keep_group[g] : item->n_keep;
        if (!n || n > m->n_slots[t] || (!item->n_keep_group && n == m->n_slots[t]))
            return kvf__fail(m->error, KVF_E_INVALID,
                             "items[%u]: n_keep %u of group %u: must be at least 1 and %s the table's %u slots", i, n,
                             g, item->n_keep_group ? "at most" : "under", m->n_slots[t]);
        m->tables[t].n_keep = n;
        any = any || shrinks(m, t);
    }
    if (any) return KVF_OK;
    return kvf__fail(m->error, KVF_E_INVALID, "items[%u]: every table keeps all its slots: one must shrink", i);
}

/* Marks the tables of one item and adds its entry. */
static kvf_status enter_item(kvf_manager *m, const kvf_compact_item *item, uint32_t i) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(m, item->seq, &index);
    if (s) return s;
    if (item->layer >= m->config.n_layers)
        return kvf__fail(m->error, KVF_E_INVALID, "items[%u]: layer %u: must be under %u", i, item->layer,
                         m->config.n_layers);
    if (m->seqs[index].swapped) return kvf__fail_swapped(m, "compaction");
    uint32_t first = first_table(m, index, item->layer), window = kvf__window_of(m, first % m->seq_tables);
    if (window)
        return kvf__fail(m->error, KVF_E_INVALID, "items[%u]: layer %u keeps %s: it is not compacted", i, item->layer,
                         window == KVF_LAYER_NONE ? "nothing" : "a window");
    if (m->tables[first].compacting)
        return kvf__fail(m->error, KVF_E_INVALID, "items[%u]: layer %u of the sequence is in the batch twice", i,
                         item->layer);
    if ((s = read_keep(m, item, i, first))) return s;
    for (uint32_t t = first; t < first + m->n_groups; t++) m->tables[t].compacting = true;
    m->seqs[index].n_compacting++;
    m->entries[m->n_entries++] = (kvf__compact_entry){first};
    return KVF_OK;
}

/* Clears the marks: no compaction is under way any more. */
static void leave_all(kvf_manager *m) {
    for (uint32_t e = 0; e < m->n_entries; e++) {
        uint32_t first = m->entries[e].table;
        for (uint32_t t = first; t < first + m->n_groups; t++) {
            m->tables[t].compacting = false;
            m->tables[t].n_fresh = m->tables[t].fresh_promise = 0;
        }
        m->seqs[first / m->seq_tables].n_compacting--;
    }
    m->n_entries = 0;
    m->compacting = false;
}

/* Whether a table shrinks and must not be written in place. Holders that come earlier in the batch and go to fresh rows no
 * longer count (scratch), so the last one is written in place. A pin counts: a pending copy still reads or writes the block. */
static bool needs_fresh(kvf_manager *m, uint32_t t) {
    if (!shrinks(m, t) || kvf__is_private(m, t)) return false;
    (void)kvf__table_private(m, t);
    if (kvf__is_private(m, t)) return false;
    const uint32_t *row = kvf__row(m, t);
    for (uint32_t i = 0, n = kvf__n_blocks(m, t); i < n; i++)
        if (kvf__pool_refs(m->blocks, row[i]) - m->blocks->entries[row[i]].scratch > 1) return true;
    return false;
}

/* Decides fresh or in place for every table. Returns the fresh blocks needed beyond the promises. */
static kvf__counts decide(kvf_manager *m) {
    kvf__counts wanted = {{0}};
    for (uint32_t e = 0; e < m->n_entries; e++) {
        uint32_t first = m->entries[e].table;
        for (uint32_t t = first; t < first + m->n_groups; t++) {
            kvf__table *table = &m->tables[t];
            if (!needs_fresh(m, t)) continue;
            table->n_fresh = kvf__blocks_for(m, table->n_keep);
            wanted.of[kvf__class_of(m, t)] += kvf__promise_owed(table->n_fresh, m->promise[t]);
            for (uint32_t i = 0, n = kvf__n_blocks(m, t); i < n; i++) m->blocks->entries[kvf__row(m, t)[i]].scratch++;
        }
    }
    for (uint32_t e = 0; e < m->n_entries; e++) {
        uint32_t first = m->entries[e].table;
        for (uint32_t t = first; t < first + m->n_groups; t++)
            for (uint32_t i = 0, n = kvf__n_blocks(m, t); m->tables[t].n_fresh && i < n; i++)
                m->blocks->entries[kvf__row(m, t)[i]].scratch = 0;
    }
    return wanted;
}

static uint32_t node_of(const kvf_manager *m, uint32_t t, uint32_t i) {
    return kvf__pool_node(m->blocks, kvf__row(m, t)[i]);
}

/* Whether any block of the table is cached. A compaction in place may write any block: a slot that receives a merge is
 * changed where it is, before it moves. */
static bool any_cached(const kvf_manager *m, uint32_t t) {
    if (!m->cache.on || kvf__is_private(m, t)) return false;
    for (uint32_t i = 0, n = kvf__n_blocks(m, t); i < n; i++)
        if (node_of(m, t, i) != KVF_NO_BLOCK) return true;
    return false;
}

static void take_out_of_cache(kvf_manager *m, uint32_t t) {
    for (uint32_t i = kvf__n_blocks(m, t); i-- > 0;) {
        uint32_t node = node_of(m, t, i);
        if (node != KVF_NO_BLOCK) m->cache.stats.removed += kvf__node_remove_all(&m->cache, node);
    }
}

/* Finds the tables that would be written in place although blocks of them are cached, and sets n_for_cached. Returns the
 * fresh blocks beyond the promises that would keep those blocks cached. */
static kvf__counts want_for_cached(kvf_manager *m) {
    kvf__counts wanted = {{0}};
    for (uint32_t e = 0; e < m->n_entries; e++)
        for (uint32_t t = m->entries[e].table; t < m->entries[e].table + m->n_groups; t++) {
            kvf__table *table = &m->tables[t];
            uint32_t n = kvf__blocks_for(m, table->n_keep);
            if (table->n_fresh || !shrinks(m, t) || !any_cached(m, t)) continue;
            table->n_for_cached = n;
            wanted.of[kvf__class_of(m, t)] += kvf__promise_owed(n, m->promise[t]);
        }
    return wanted;
}

static bool exceeds(const kvf_manager *m, const kvf__counts *wanted, const kvf__counts *room) {
    for (uint32_t i = 0; i < m->config.n_classes; i++)
        if (wanted->of[i] > room->of[i]) return true;
    return false;
}

/* Gives tables with cached blocks fresh rows, if there are enough spare blocks for all of them. If not, removes the cached
 * blocks of one sequence after another from the cache, until the spare blocks suffice for the rest. */
static void keep_cached(kvf_manager *m, const kvf__counts *room) {
    kvf__counts wanted = want_for_cached(m);
    for (uint32_t e = 0; e < m->n_entries && exceeds(m, &wanted, room); e++) {
        uint32_t first = m->entries[e].table / m->seq_tables * m->seq_tables;
        for (uint32_t t = first; t < first + m->seq_tables; t++) {
            uint32_t n = m->tables[t].n_for_cached;
            if (!n) continue;
            take_out_of_cache(m, t);
            wanted.of[kvf__class_of(m, t)] -= kvf__promise_owed(n, m->promise[t]);
            m->tables[t].n_for_cached = 0;
        }
    }
    for (uint32_t e = 0; e < m->n_entries; e++)
        for (uint32_t t = m->entries[e].table; t < m->entries[e].table + m->n_groups; t++) {
            kvf__table *table = &m->tables[t];
            if (table->n_for_cached && any_cached(m, t)) table->n_fresh = table->n_for_cached;
            table->n_for_cached = 0;
        }
}

/* Takes the fresh blocks, in the order of the items. */
static void take_fresh(kvf_manager *m) {
    uint32_t n_taken = 0;
    for (uint32_t e = 0; e < m->n_entries; e++)
        for (uint32_t g = 0; g < m->n_groups; g++) {
            uint32_t t = m->entries[e].table + g;
            kvf__table *table = &m->tables[t];
            m->dst_row[(size_t)e * m->n_groups + g] = table->n_fresh ? m->fresh + n_taken : NULL;
            kvf__pool *p = kvf__pool_at(m, t);
            table->fresh_promise = KVF__MIN(table->n_fresh, m->promise[t]);
            kvf__promise_use(p, &m->promise[t], table->n_fresh);
            kvf__pool_take(p, m->fresh + n_taken, table->n_fresh);
            n_taken += table->n_fresh;
        }
}

/* Decides where every table is written, and checks that there are enough blocks. */
static kvf_status find_room(kvf_manager *m) {
    kvf__counts wanted = decide(m), room = {{0}};
    for (uint32_t i = 0; i < m->config.n_classes; i++) {
        uint32_t spare = kvf__pool_spare(&m->blocks[i]);
        if (wanted.of[i] > spare)
            return kvf__fail(m->error, KVF_E_NO_BLOCKS,
                             "compaction: %llu fresh blocks beyond the promised ones, %u are free",
                             (unsigned long long)wanted.of[i], spare);
        room.of[i] = spare - wanted.of[i];
    }
    if (m->cache.on) keep_cached(m, &room);
    return KVF_OK;
}

kvf_status kvf_compact_begin(kvf_manager *manager, const kvf_compact_item *items, uint32_t n_items,
                             kvf_compaction *out) {
    if (!manager) return KVF_E_INVALID;
    if (manager->compacting)
        return kvf__fail(manager->error, KVF_E_STATE, "compaction: one is under way; commit or cancel it first");
    if (!out || (n_items && !items)) return kvf__fail(manager->error, KVF_E_INVALID, "items, out: must be given");
    if (n_items > (uint64_t)manager->config.max_seqs * manager->config.n_layers)
        return kvf__fail(manager->error, KVF_E_INVALID, "n_items %u: must be at most max_seqs %u times n_layers %u",
                         n_items, manager->config.max_seqs, manager->config.n_layers);
    kvf_status s = KVF_OK;
    for (uint32_t i = 0; !s && i < n_items; i++) s = enter_item(manager, &items[i], i);
    if (!s) s = find_room(manager);
    if (s) {
        leave_all(manager);
        return s;
    }
    take_fresh(manager);
    if (manager->profile) kvf__profile_begun(manager);
    manager->compacting = true;
    *out = (kvf_compaction){items, n_items, manager->n_groups, manager->dst_row};
    return KVF_OK;
}

/* Lowers a promise to `owed`, or raises it towards `owed` by at most `limit`. */
static void settle(kvf__pool *p, uint32_t *promise, uint32_t owed, uint32_t limit) {
    if (*promise > owed) kvf__promise_set(p, promise, owed);
    kvf__promise_raise(p, promise, owed, limit);
}

static void settle_table(kvf_manager *m, uint32_t t, uint32_t limit, uint32_t page_limit) {
    const kvf__table *table = &m->tables[t];
    settle(kvf__pool_at(m, t), &m->promise[t], kvf__promise_owed(table->reserve, kvf__n_blocks(m, t)), limit);
    settle(&m->pages, &m->page_promise[t], kvf__promise_owed(table->page_reserve, m->n_pages[t]), page_limit);
}

/* Gives one table its fresh row, or shortens its own row, and frees the blocks that it no longer needs. */
static void commit_table(kvf_manager *m, uint32_t t, const uint32_t *fresh) {
    uint32_t n_slots = m->n_slots[t], n_keep = m->tables[t].n_keep, n_after = kvf__blocks_for(m, n_keep),
             pages_after = KVF__MIN(m->n_pages[t], n_after);
    bool is_private = kvf__is_private(m, t);
    uint32_t freed =
        kvf__pool_trim(kvf__pool_at(m, t), kvf__row(m, t), kvf__n_blocks(m, t), fresh ? 0 : n_after, is_private);
    if (fresh) {
        is_private = true;
        memcpy(kvf__row(m, t), fresh, n_after * sizeof *fresh);
        for (uint32_t i = 0; i < n_after; i++) /* a block may have been held since begin */
            is_private &= *kvf__state(m->blocks, fresh[i]) == KVF__ROW;
    }
    m->private_at[t] = m->tail_at[t] = is_private ? m->epoch : 0;
    m->seqs[t / m->seq_tables].known_at = 0;
    m->n_slots[t] = n_keep;
    uint32_t freed_pages = kvf__pool_trim(&m->pages, kvf__score_row(m, t), m->n_pages[t], pages_after, false);
    m->n_pages[t] = pages_after;
    kvf__row_cut(m, t, fresh ? 0 : n_after, pages_after);
    settle_table(m, t, freed, freed_pages);
    kvf__row_fit(m, t, n_after);
    kvf__table_count(m, t, n_slots);
}

kvf_status kvf_compact_commit(kvf_manager *manager) {
    if (!manager) return KVF_E_INVALID;
    if (!manager->compacting) return kvf__fail(manager->error, KVF_E_STATE, "commit: no compaction is under way");
    for (uint32_t e = 0; e < manager->n_entries; e++)
        for (uint32_t g = 0; g < manager->n_groups; g++) {
            uint32_t t = manager->entries[e].table + g;
            if (shrinks(manager, t))
                commit_table(manager, t, manager->dst_row[(size_t)e * manager->n_groups + g]);
            else
                manager->tables[t].n_keep = 0; /* unchanged */
        }
    for (uint32_t e = 0; e < manager->n_entries; e++) /* again, since later tables have freed more blocks */
        for (uint32_t g = 0; g < manager->n_groups; g++) {
            uint32_t t = manager->entries[e].table + g;
            if (!manager->tables[t].n_keep) continue;
            settle_table(manager, t, kvf__pool_spare(kvf__pool_at(manager, t)), kvf__pool_spare(&manager->pages));
        }
    for (uint32_t e = 0; e < manager->n_entries; e++) {
        kvf__seq *seq = &manager->seqs[manager->entries[e].table / manager->seq_tables];
        seq->compacted = true;
        seq->node = 0;
    }
    if (manager->profile) kvf__profile_committed(manager);
    leave_all(manager);
    return KVF_OK;
}

void kvf__compact_drop(kvf_manager *m) {
    for (uint32_t e = 0; e < m->n_entries; e++)
        for (uint32_t g = 0; g < m->n_groups; g++) {
            uint32_t t = m->entries[e].table + g;
            const uint32_t *fresh = m->dst_row[(size_t)e * m->n_groups + g];
            for (uint32_t i = m->tables[t].n_fresh; i-- > 0;) (void)kvf__pool_drop(kvf__pool_at(m, t), fresh[i]);
            kvf__promise_set(kvf__pool_at(m, t), &m->promise[t], m->promise[t] + m->tables[t].fresh_promise);
        }
    leave_all(m);
    if (m->profile) kvf__profile_cancelled(m);
}

kvf_status kvf_compact_cancel(kvf_manager *manager) {
    if (!manager) return KVF_E_INVALID;
    if (!manager->compacting) return kvf__fail(manager->error, KVF_E_STATE, "cancel: no compaction is under way");
    kvf__compact_drop(manager);
    return KVF_OK;
}
