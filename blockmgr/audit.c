/* kvf_audit: walks all data and names the first broken invariant. It counts in scratch and clears it again. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

#define BROKEN(...) kvf__fail(err, KVF_E_CORRUPT, __VA_ARGS__)

static void clear(const kvf__pool *p) {
    for (uint32_t i = p->first; i < p->first + p->n; i++) p->entries[i].scratch = 0;
}

/* References = appearances in rows (in scratch) + holds + pins. The state must follow from them. */
static kvf_status check_state(const kvf__pool *p, const char *what, uint32_t id, kvf_error *err) {
    const kvf__entry *e = &p->entries[id];
    uint32_t state = *kvf__state(p, id), refs = e->refs, alone = p->heads[id] & KVF__ALONE;
    bool cached = kvf__pool_node(p, id) != KVF_NO_BLOCK;
    if (state > KVF__COUNTED) return BROKEN("%s %u: state %u is none", what, id, state);
    if (state != KVF__COUNTED) {
        if (cached != (state == KVF__IDLE || state == KVF__CACHED))
            return BROKEN("%s %u: state %u, but the node that names it is %u", what, id, state, kvf__pool_node(p, id));
        if ((alone && state != KVF__APART) || refs || e->holds || e->pins)
            return BROKEN("%s %u: state %u, but %u references, %u holds (alone: %u), %u pins are noted", what, id,
                          state, refs, e->holds, alone, e->pins);
        if (e->scratch != (state == KVF__ROW || state == KVF__CACHED))
            return BROKEN("%s %u: state %u, but in %u rows", what, id, state, e->scratch);
        return KVF_OK;
    }
    if (refs != (uint64_t)e->scratch + e->holds + e->pins || !refs)
        return BROKEN("%s %u: %u references, but in %u rows, %u holds, %u pins", what, id, refs, e->scratch, e->holds,
                      e->pins);
    if (alone || (refs == 1 && !e->pins && !(cached && e->holds)))
        return BROKEN("%s %u: counted, but one holder has it", what, id);
    return KVF_OK;
}

static kvf_status check_refs(const kvf__pool *p, const char *what, kvf_error *err) {
    uint32_t n_shared = 0, n_held = 0, n_idle = 0;
    for (uint32_t i = p->first; i < p->first + p->n; i++) {
        kvf_status s = check_state(p, what, i, err);
        if (s) return s;
        n_held += kvf__pool_refs(p, i) != 0;
        n_idle += *kvf__state(p, i) == KVF__IDLE;
        n_shared += kvf__pool_holders(p, i) > 1;
    }
    if (n_shared != p->n_shared) return BROKEN("%ss: n_shared %u, counted %u", what, p->n_shared, n_shared);
    if (n_idle != p->n_idle) return BROKEN("%ss: n_idle %u, counted %u", what, p->n_idle, n_idle);
    if (n_held + n_idle + p->n_free != p->n)
        return BROKEN("%ss: %u held + %u idle + %u free are not %u", what, n_held, n_idle, p->n_free, p->n);
    if (n_held > p->n - p->n_least) return BROKEN("%ss: n_held_max %u, held %u", what, p->n - p->n_least, n_held);
    return KVF_OK;
}

/* other: the pool of the other tier. */
static kvf_status check_pins(const kvf__pool *p, const kvf__pool *other, const char *what, kvf_error *err) {
    clear(p);
    for (uint32_t i = p->first; i < p->first + p->n; i++) {
        if (!p->entries[i].copy_src) continue;
        uint32_t src = p->entries[i].copy_src - 1;
        bool same = p->first + p->n > KVF__OTHER_TIER - 1 || !(src & KVF__OTHER_TIER);
        uint32_t id = same ? src : src & ~KVF__OTHER_TIER;
        const kvf__pool *from = same ? p : other;
        if (!kvf__pool_has(from, id))
            return BROKEN("%s %u: copied from %u, there are %u from %u on", what, i, id, from->n, from->first);
        if (same) p->entries[id].scratch++;
        p->entries[i].scratch++;
    }
    for (uint32_t i = other->first; i < other->first + other->n; i++) {
        uint32_t src = other->entries[i].copy_src - 1;
        if (!other->entries[i].copy_src || !(src & KVF__OTHER_TIER)) continue;
        src &= ~KVF__OTHER_TIER;
        if (!kvf__pool_has(p, src))
            return BROKEN("%s %u: copied to the other tier, there are %u from %u on", what, src, p->n, p->first);
        p->entries[src].scratch++;
    }
    for (uint32_t i = p->first; i < p->first + p->n; i++)
        if (p->entries[i].pins != p->entries[i].scratch)
            return BROKEN("%s %u: %u pins, %u ends of pending copies", what, i, p->entries[i].pins,
                          p->entries[i].scratch);
    return KVF_OK;
}

static kvf_status check_free(const kvf__pool *p, const char *what, kvf_error *err) {
    clear(p);
    for (uint32_t i = 0; i < p->n_free; i++) {
        uint32_t id = p->free_ids[i];
        if (!kvf__pool_has(p, id) || kvf__pool_refs(p, id))
            return BROKEN("%s %u: on the free list, but held or no id", what, id);
        if (p->entries[id].scratch++) return BROKEN("%s %u: on the free list twice", what, id);
    }
    return KVF_OK;
}

static kvf_status check_pool(const kvf__pool *p, const kvf__pool *other, const char *what, uint64_t promised,
                             kvf_error *err) {
    if (p->n_free > p->n) return BROKEN("%ss: n_free %u of %u", what, p->n_free, p->n);
    if (p->n_promised > (uint64_t)p->n_free + p->n_idle)
        return BROKEN("%ss: %u promised, %u free, %u idle", what, p->n_promised, p->n_free, p->n_idle);
    if (p->n_promised != promised)
        return BROKEN("%ss: n_promised %u, the tables' sum is %llu", what, p->n_promised, (unsigned long long)promised);
    kvf_status s = check_refs(p, what, err);
    if (!s) s = check_pins(p, other, what, err);
    if (!s) s = check_free(p, what, err);
    return s;
}

/* Counts the ids of a row in scratch. The entries after them must be KVF_NO_BLOCK. */
static kvf_status count_row(const kvf_manager *m, const kvf__pool *p, const uint32_t *row, uint32_t n, uint32_t t,
                            kvf_error *err) {
    uint32_t capacity = m->rows.capacity[t];
    if (n > capacity) return BROKEN("table %u: %u blocks in a row of %u", t, n, capacity);
    for (uint32_t i = 0; i < capacity; i++) {
        if (i >= n && row[i] != KVF_NO_BLOCK) return BROKEN("table %u: id %u beyond its %u", t, row[i], n);
        if (i >= n) continue;
        if (!kvf__pool_has(p, row[i])) return BROKEN("table %u: id %u of %u from %u on", t, row[i], p->n, p->first);
        p->entries[row[i]].scratch++;
    }
    return KVF_OK;
}

/* Checks private_at and tail_at. */
static kvf_status check_private(const kvf_manager *m, uint32_t t, kvf_error *err) {
    const uint32_t *row = kvf__row(m, t);
    uint32_t n_blocks = kvf__n_blocks(m, t);
    if (!m->epoch || m->private_at[t] > m->epoch || m->tail_at[t] > m->epoch)
        return BROKEN("table %u: private at %u, its last block at %u, the epoch is %u", t, m->private_at[t],
                      m->tail_at[t], m->epoch);
    for (uint32_t i = 0; kvf__is_private(m, t) && i < n_blocks; i++)
        if (*kvf__state(m->blocks, row[i]) != KVF__ROW)
            return BROKEN("table %u: block %u has state %u, but the table counts as private", t, row[i],
                          *kvf__state(m->blocks, row[i]));
    if (m->tail_at[t] == m->epoch && m->n_slots[t] % m->config.block_size &&
        kvf__pool_holders(m->blocks, row[n_blocks - 1]) > 1)
        return BROKEN("table %u: block %u, its last, counts as its own, but has %u holders", t, row[n_blocks - 1],
                      kvf__pool_holders(m->blocks, row[n_blocks - 1]));
    if (m->tail_at[t] == m->epoch && kvf__tail_covered(m, t))
        return BROKEN("table %u: block %u, its last, counts as its own, but its node covers slots beyond the table's",
                      t, row[n_blocks - 1]);
    return KVF_OK;
}

/* Checks known_at, room and longest of the sequence against one table. */
static kvf_status check_known(const kvf_manager *m, uint32_t t, kvf_error *err) {
    const kvf__seq *seq = &m->seqs[t / m->seq_tables];
    uint32_t n_blocks = kvf__n_blocks(m, t), room = n_blocks * m->config.block_size - m->n_slots[t];
    if (seq->known_at > m->epoch) return BROKEN("table %u: known at %u, the epoch is %u", t, seq->known_at, m->epoch);
    uint32_t window = kvf__window_of(m, t % m->seq_tables);
    if (seq->known_at != m->epoch || window == KVF_LAYER_NONE) return KVF_OK;
    if (kvf__window_drops(m, window, m->n_slots[t]))
        return BROKEN("table %u: known to drop nothing, but its window of %u does", t, window);
    if (m->n_slots[t] > seq->longest || room < seq->room || (room && m->tail_at[t] != m->epoch) ||
        (seq->has_scores && !window && m->n_pages[t] != n_blocks))
        return BROKEN("table %u: %u slots, room for %u, %u pages, but known are: at most %u, room for %u", t,
                      m->n_slots[t], room, m->n_pages[t], seq->longest, seq->room);
    return KVF_OK;
}

/* A table is either on the device or, if its sequence is swapped, wholly on the host. */
static kvf_status check_host(const kvf_manager *m, uint32_t t, kvf_error *err) {
    const kvf__seq *seq = &m->seqs[t / m->seq_tables];
    uint32_t n_slots = m->host_slots ? m->host_slots[t] : 0, n_pages = m->host_slots ? m->n_host_pages[t] : 0;
    if (!seq->swapped && (n_slots || n_pages))
        return BROKEN("table %u: %u slots and %u score pages on the host, but its sequence is not swapped", t, n_slots,
                      n_pages);
    if (!seq->swapped) return KVF_OK;
    if (!m->host_slots || m->n_slots[t] || m->n_pages[t] || m->promise[t] || m->page_promise[t] || seq->n_compacting ||
        seq->known_at == m->epoch)
        return BROKEN("table %u: swapped, but it holds something here", t);
    if (n_slots > m->config.max_slots || n_pages > (seq->has_scores ? kvf__blocks_for(m, n_slots) : 0))
        return BROKEN("table %u: %u slots and %u score pages on the host", t, n_slots, n_pages);
    kvf_status s =
        count_row(m, &m->host_blocks[kvf__class_of(m, t)], kvf__row(m, t), kvf__blocks_for(m, n_slots), t, err);
    return s ? s : count_row(m, &m->host_pages, kvf__score_row(m, t), n_pages, t, err);
}

/* A window's table has the slots that the next token sees. A layer that keeps nothing has none. */
static kvf_status check_window(const kvf_manager *m, uint32_t t, kvf_error *err) {
    uint32_t window = kvf__window_of(m, t % m->seq_tables), n_slots = m->n_slots[t];
    uint32_t next_pos = m->seqs[t / m->seq_tables].next_pos;
    if (!window || m->seqs[t / m->seq_tables].swapped) return KVF_OK;
    if (m->n_pages[t] || m->tables[t].page_reserve)
        return BROKEN("table %u: of window %u, but with score pages", t, window);
    if (window == KVF_LAYER_NONE) {
        if (n_slots || m->tables[t].reserve) return BROKEN("table %u: of a layer that keeps nothing", t);
        return KVF_OK;
    }
    if (n_slots > next_pos || n_slots < KVF__MIN(window - 1, next_pos) || (next_pos - n_slots) % m->config.block_size)
        return BROKEN("table %u: %u slots of %u positions in a window of %u", t, n_slots, next_pos, window);
    return KVF_OK;
}

static kvf_status check_table(const kvf_manager *m, uint32_t t, kvf_error *err) {
    const kvf__table *table = &m->tables[t];
    const kvf__seq *seq = &m->seqs[t / m->seq_tables];
    uint32_t n_blocks = kvf__n_blocks(m, t), n_pages = m->n_pages[t];
    if (m->n_slots[t] > m->config.max_slots)
        return BROKEN("table %u: %u slots, max_slots is %u", t, m->n_slots[t], m->config.max_slots);
    if (n_pages > (seq->has_scores ? n_blocks : 0))
        return BROKEN("table %u: %u score pages for %u blocks", t, n_pages, n_blocks);
    if ((uint64_t)m->promise[t] + table->fresh_promise > table->reserve || m->page_promise[t] > table->page_reserve)
        return BROKEN("table %u: promised %u blocks and %u pages of %u and %u", t, m->promise[t], m->page_promise[t],
                      table->reserve, table->page_reserve);
    if (!seq->alive && (m->n_slots[t] || n_pages || table->reserve || table->page_reserve))
        return BROKEN("table %u: holds something, but its sequence was freed", t);
    if (table->n_for_cached) return BROKEN("table %u: n_for_cached %u was left", t, table->n_for_cached);
    if (!m->compacting && (table->compacting || table->n_fresh || table->fresh_promise))
        return BROKEN("table %u: marked for a compaction that is not under way", t);
    kvf_status s = check_host(m, t, err);
    if (s || seq->swapped || t / m->seq_tables >= m->n_seqs_max)
        return s; /* rows of an index that was never used hold nothing */
    s = count_row(m, &m->blocks[kvf__class_of(m, t)], kvf__row(m, t), n_blocks, t, err);
    if (!s) s = count_row(m, &m->pages, kvf__score_row(m, t), n_pages, t, err);
    if (!s) s = check_private(m, t, err);
    if (!s) s = check_known(m, t, err);
    if (!s) s = check_window(m, t, err);
    return s;
}

/* Counts the fresh rows in scratch, like the rows of tables. */
static kvf_status check_compaction(const kvf_manager *m, kvf_error *err) {
    for (uint32_t e = 0; e < m->n_entries; e++)
        for (uint32_t g = 0; g < m->n_groups; g++) {
            uint32_t t = m->entries[e].table + g, n = m->tables[t].n_fresh;
            const uint32_t *fresh = m->dst_row[(size_t)e * m->n_groups + g];
            if (!m->tables[t].compacting || !m->seqs[t / m->seq_tables].n_compacting || (n == 0) != (fresh == NULL))
                return BROKEN("table %u: its compaction has lost its marks", t);
            for (uint32_t i = 0; i < n; i++) {
                if (!kvf__pool_has(&m->blocks[kvf__class_of(m, t)], fresh[i]))
                    return BROKEN("table %u: fresh block %u is not of its class", t, fresh[i]);
                m->blocks->entries[fresh[i]].scratch++;
            }
        }
    return KVF_OK;
}

static kvf_status check_layer(const kvf_manager *m, uint32_t l, kvf_error *err) {
    uint64_t n_blocks = 0, slots = 0;
    for (uint32_t s = 0; s < m->config.max_seqs; s++) {
        uint32_t sl = s * m->config.n_layers + l;
        uint64_t seq_blocks = 0;
        for (uint32_t t = sl * m->n_groups; t < (sl + 1) * m->n_groups; t++) {
            seq_blocks += kvf__n_blocks(m, t);
            slots += m->n_slots[t];
        }
        if (m->seq_blocks_max[sl] < seq_blocks && m->seqs[s].alive)
            return BROKEN("sequence %u, layer %u: n_blocks_max %u, counted %llu", s, l, m->seq_blocks_max[sl],
                          (unsigned long long)seq_blocks);
        n_blocks += seq_blocks;
    }
    if (m->layer_blocks[l] != n_blocks || m->layer_slots[l] != slots || m->layer_blocks_max[l] < n_blocks)
        return BROKEN("layer %u: n_blocks %u (most %u), slots_used %llu, counted %llu and %llu", l, m->layer_blocks[l],
                      m->layer_blocks_max[l], (unsigned long long)m->layer_slots[l], (unsigned long long)n_blocks,
                      (unsigned long long)slots);
    return KVF_OK;
}

/* The runs contain exactly the layers that keep slots, in order. */
static kvf_status check_runs(const kvf_manager *m, kvf_error *err) {
    uint32_t r = 0, k = 0;
    for (; k < m->seq_tables; k++) {
        uint32_t window = kvf__window_of(m, k);
        if (r < m->n_runs && k == m->runs[r].first + m->runs[r].n_tables) r++;
        if (window != KVF_LAYER_NONE && (r == m->n_runs || k < m->runs[r].first || m->runs[r].window != window ||
                                         m->runs[r].block_class != kvf__class_of(m, k)))
            return BROKEN("run %u: table %u has window %u and class %u", r, k, window, kvf__class_of(m, k));
        if (window == KVF_LAYER_NONE && r < m->n_runs && k >= m->runs[r].first)
            return BROKEN("run %u: table %u keeps nothing", r, k);
        if (window && window != KVF_LAYER_NONE && !m->windowed) return BROKEN("windowed: is not set");
    }
    return KVF_OK;
}

static kvf_status check_seqs(const kvf_manager *m, kvf_error *err) {
    uint32_t n_alive = 0, n_compacting = 0, n_swapped = 0;
    for (uint32_t i = 0; i < m->config.max_seqs; i++) {
        const kvf__seq *s = &m->seqs[i];
        n_alive += s->alive;
        n_compacting += s->n_compacting;
        n_swapped += s->swapped;
        if (s->swapped && !s->alive) return BROKEN("sequence %u: swapped, but not alive", i);
        if (s->mark || !s->generation) return BROKEN("sequence %u: a mark was left, or its generation is 0", i);
    }
    if (n_alive != m->n_seqs || n_alive > m->n_seqs_max)
        return BROKEN("sequences: n_seqs %u (most %u), counted %u", m->n_seqs, m->n_seqs_max, n_alive);
    if (n_swapped != m->n_swapped) return BROKEN("sequences: n_swapped %u, counted %u", m->n_swapped, n_swapped);
    if (n_compacting != m->n_entries || (m->n_entries && !m->compacting))
        return BROKEN("sequences: %u items compacting, %u entries", n_compacting, m->n_entries);
    uint64_t n_blocks = 0;
    for (uint32_t t = 0; m->host_slots && t < m->config.max_seqs * m->seq_tables; t++)
        n_blocks += kvf__blocks_for(m, m->host_slots[t]);
    if (n_blocks != m->n_swapped_blocks)
        return BROKEN("sequences: n_swapped_blocks %llu, counted %llu", (unsigned long long)m->n_swapped_blocks,
                      (unsigned long long)n_blocks);
    for (uint32_t i = 0; i < m->config.max_seqs - m->n_seqs; i++)
        if (m->free_seqs[i] >= m->config.max_seqs || m->seqs[m->free_seqs[i]].alive)
            return BROKEN("sequence %u: alive, but on the free list", m->free_seqs[i]);
    return KVF_OK;
}

static kvf_status audit(const kvf_manager *m, kvf_error *err) {
    kvf__counts blocks = {{0}};
    uint64_t pages = 0;
    for (uint32_t i = 0; i < m->config.n_blocks; i++)
        if (m->blocks->entries[i].scratch)
            return BROKEN("block %u: scratch %u was left", i, m->blocks->entries[i].scratch);
    kvf_status s = check_runs(m, err);
    if (!s) s = check_seqs(m, err);
    for (uint32_t t = 0; !s && t < m->config.max_seqs * m->seq_tables; t++) {
        s = check_table(m, t, err);
        blocks.of[kvf__class_of(m, t)] += m->promise[t];
        pages += m->page_promise[t];
    }
    if (!s) s = check_compaction(m, err);
    for (uint32_t i = 0; !s && i < m->config.n_classes; i++) {
        s = check_pool(&m->blocks[i], &m->host_blocks[i], "block", blocks.of[i], err);
        if (!s) s = check_pool(&m->host_blocks[i], &m->blocks[i], "host block", 0, err);
    }
    if (!s) s = check_pool(&m->pages, &m->host_pages, "score page", pages, err);
    if (!s) s = check_pool(&m->host_pages, &m->pages, "host score page", 0, err);
    for (uint32_t l = 0; !s && l < m->config.n_layers; l++) s = check_layer(m, l, err);
    if (!s) s = kvf__rows_audit(m, err);
    if (!s && m->config.view_copies) s = kvf__views_audit(m, err);
    if (!s && m->cache.on) s = kvf__cache_audit(m, err);
    if (!s && m->profile) s = kvf__profile_audit(m, err);
    return s;
}

kvf_status kvf_audit(const kvf_manager *manager, kvf_error *err) {
    if (!manager) return kvf__fail(err, KVF_E_INVALID, "manager: is NULL");
    kvf_status s = audit(manager, err);
    for (uint32_t i = 0; i < manager->config.n_classes; i++) {
        clear(&manager->blocks[i]);
        clear(&manager->host_blocks[i]);
    }
    clear(&manager->pages);
    clear(&manager->host_pages);
    return s;
}
