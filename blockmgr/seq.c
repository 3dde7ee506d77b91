/* Sequences: handles, create, fork, free, reservations, score pages. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- Handles ----------------------------------------------------------------------------------
 *      63        generation        36 35        tag        20 19        index        0
 * The generation is never 0, so a handle is never 0. */
#define INDEX_BITS 20u
#define TAG_BITS 16u
#define GENERATION_MAX ((1u << 28) - 1)

static kvf_seq seq_handle(const kvf_manager *m, uint32_t index) {
    uint64_t tag = m->tag & ((1u << TAG_BITS) - 1);
    return (uint64_t)m->seqs[index].generation << (INDEX_BITS + TAG_BITS) | tag << INDEX_BITS | index;
}

kvf_status kvf__seq_find(const kvf_manager *m, kvf_seq seq, uint32_t *index) {
    if (!m) return KVF_E_INVALID;
    uint32_t i = (uint32_t)(seq & ((1u << INDEX_BITS) - 1));
    if (i >= m->config.max_seqs || !m->seqs[i].alive || seq_handle(m, i) != seq)
        return kvf__fail(m->error, KVF_E_STALE, "sequence %#llx: was freed, or another manager gave it out",
                         (unsigned long long)seq);
    *index = i;
    return KVF_OK;
}

/* ---- Create, fork, free --------------------------------------------------------------------------- */

static kvf_status check_new(kvf_manager *m, const kvf_seq *out) {
    if (!out) return kvf__fail(m->error, KVF_E_INVALID, "out: is NULL");
    if (m->n_seqs == m->config.max_seqs)
        return kvf__fail(m->error, KVF_E_LIMIT, "max_seqs %u: so many sequences are alive; free one first",
                         m->config.max_seqs);
    return KVF_OK;
}

/* Its tables are empty: free leaves them so. */
static uint32_t seq_open(kvf_manager *m) {
    uint32_t i = m->free_seqs[m->config.max_seqs - 1 - m->n_seqs++];
    m->n_seqs_max = KVF__MAX(m->n_seqs_max, m->n_seqs);
    kvf__seq *s = &m->seqs[i];
    *s = (kvf__seq){.generation = s->generation, .alive = true};
    for (uint32_t l = 0; l < m->config.n_layers; l++)
        m->seq_layers[i * m->config.n_layers + l] = (kvf__seq_layer){0, 0};
    return i;
}

kvf_status kvf_seq_create(kvf_manager *manager, kvf_seq *out) {
    if (!manager) return KVF_E_INVALID;
    kvf_status s = check_new(manager, out);
    if (s) return s;
    *out = seq_handle(manager, seq_open(manager));
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}

/* What a fork of tables [first, first + seq_tables) takes: score pages, and promises in both pools. */
static kvf_status check_fork(kvf_manager *m, uint32_t first, const kvf_copy_list *copies) {
    uint64_t blocks = 0, pages = 0, n_copies = 0;
    for (uint32_t t = first; t < first + m->seq_tables; t++) {
        const kvf__table *table = &m->tables[t];
        blocks += table->blocks.reserve;
        pages += KVF__MAX(table->n_pages, table->pages.reserve);
        n_copies += table->n_pages;
    }
    if (n_copies > kvf__copies_room(copies))
        return kvf__fail(m->error, KVF_E_LIMIT, "copies: room for %u, %llu are needed", kvf__copies_room(copies),
                         (unsigned long long)n_copies);
    if (blocks > kvf__pool_spare(&m->blocks))
        return kvf__fail(m->error, KVF_E_NO_BLOCKS,
                         "fork: %llu blocks are to be promised, %u are free and not promised yet",
                         (unsigned long long)blocks, kvf__pool_spare(&m->blocks));
    if (pages > kvf__pool_spare(&m->pages))
        return kvf__fail(m->error, KVF_E_NO_BLOCKS, "fork: %llu score pages are needed, %u are free and not promised",
                         (unsigned long long)pages, kvf__pool_spare(&m->pages));
    return KVF_OK;
}

static void fork_table(kvf_manager *m, uint32_t from, uint32_t to, kvf_copy_list *copies) {
    kvf__table *a = &m->tables[from], *b = &m->tables[to];
    uint32_t bs = m->config.block_size;
    for (uint32_t i = 0; i < a->n_blocks; i++) {
        kvf__row(m, to)[i] = kvf__row(m, from)[i];
        kvf__pool_share(&m->blocks, kvf__row(m, from)[i]);
    }
    b->n_slots = a->n_slots;
    b->n_blocks = a->n_blocks;
    a->maybe_shared = b->maybe_shared = true;
    kvf__table_count(m, to, 0, 0);
    kvf__promise_set(&m->blocks, &b->blocks, a->blocks.reserve, a->blocks.reserve);
    for (; b->n_pages < a->n_pages; b->n_pages++) {
        uint32_t src = kvf__score_row(m, from)[b->n_pages], dst = kvf__pool_take(&m->pages, NULL, to);
        kvf__score_row(m, to)[b->n_pages] = dst;
        kvf__copies_add(m, copies, KVF_COPY_SCORE_PAGE, src, dst, KVF__MIN(bs, a->n_slots - b->n_pages * bs));
    }
    kvf__promise_set(&m->pages, &b->pages, a->pages.reserve, kvf__promise_owed(a->pages.reserve, b->n_pages));
}

kvf_status kvf_seq_fork(kvf_manager *manager, kvf_seq parent, kvf_copy_list *copies, kvf_seq *out) {
    uint32_t from = 0;
    kvf_status s = kvf__seq_find(manager, parent, &from);
    if (s) return s;
    if (manager->seqs[from].n_compacting)
        return kvf__fail(manager->error, KVF_E_STATE,
                         "fork: a compaction of the parent is under way; commit or cancel it");
    s = check_new(manager, out);
    if (s) return s;
    s = check_fork(manager, from * manager->seq_tables, copies);
    if (s) return s;
    uint32_t to = seq_open(manager), first_copy = copies ? copies->n : 0;
    manager->seqs[to].next_pos = manager->seqs[from].next_pos;
    manager->seqs[to].has_scores = manager->seqs[from].has_scores;
    for (uint32_t t = 0; t < manager->seq_tables; t++)
        fork_table(manager, from * manager->seq_tables + t, to * manager->seq_tables + t, copies);
    if (manager->profile) kvf__profile_forked(manager, to, copies, first_copy);
    *out = seq_handle(manager, to);
    return KVF_OK;
}

kvf_status kvf_seq_free(kvf_manager *manager, kvf_seq seq) {
    uint32_t index = 0;
    kvf_status status = kvf__seq_find(manager, seq, &index);
    if (status) return status;
    kvf__seq *s = &manager->seqs[index];
    if (s->n_compacting) kvf__compact_drop(manager);
    for (uint32_t t = index * manager->seq_tables; t < (index + 1) * manager->seq_tables; t++) {
        kvf__table *table = &manager->tables[t];
        uint32_t n_slots = table->n_slots, n_blocks = table->n_blocks;
        (void)kvf__pool_trim(&manager->blocks, kvf__row(manager, t), &table->n_blocks, 0);
        (void)kvf__pool_trim(&manager->pages, kvf__score_row(manager, t), &table->n_pages, 0);
        kvf__promise_set(&manager->blocks, &table->blocks, 0, 0);
        kvf__promise_set(&manager->pages, &table->pages, 0, 0);
        table->n_slots = 0;
        table->maybe_shared = false;
        kvf__table_count(manager, t, n_slots, n_blocks);
    }
    *s = (kvf__seq){.generation = s->generation == GENERATION_MAX ? 1 : s->generation + 1};
    manager->free_seqs[manager->config.max_seqs - manager->n_seqs--] = index;
    if (manager->profile) kvf__profile_seq(manager, index, KVF__CAUSE_END);
    return KVF_OK;
}

/* ---- Reading ------------------------------------------------------------------------------------------ */

kvf_status kvf_seq_index(const kvf_manager *manager, kvf_seq seq, uint32_t *index) {
    uint32_t i = 0;
    kvf_status s = kvf__seq_find(manager, seq, &i);
    if (s) return s;
    if (!index) return kvf__fail(manager->error, KVF_E_INVALID, "index: is NULL");
    *index = i;
    return KVF_OK;
}

kvf_status kvf_seq_next_pos(const kvf_manager *manager, kvf_seq seq, uint32_t *next_pos) {
    uint32_t i = 0;
    kvf_status s = kvf__seq_find(manager, seq, &i);
    if (s) return s;
    if (!next_pos) return kvf__fail(manager->error, KVF_E_INVALID, "next_pos: is NULL");
    *next_pos = manager->seqs[i].next_pos;
    return KVF_OK;
}

kvf_status kvf_seq_table(const kvf_manager *manager, kvf_seq seq, uint32_t layer, uint32_t group, uint32_t *n_slots,
                         uint32_t *n_blocks, const uint32_t **blocks) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    if (layer >= manager->config.n_layers)
        return kvf__fail(manager->error, KVF_E_INVALID, "layer %u: must be under %u", layer, manager->config.n_layers);
    if (group >= manager->n_groups)
        return kvf__fail(manager->error, KVF_E_INVALID, "group %u: must be under %u", group, manager->n_groups);
    uint32_t t = index * manager->seq_tables + layer * manager->n_groups + group;
    if (n_slots) *n_slots = manager->tables[t].n_slots;
    if (n_blocks) *n_blocks = manager->tables[t].n_blocks;
    if (blocks) *blocks = kvf__row(manager, t);
    return KVF_OK;
}

/* ---- Reservations -------------------------------------------------------------------------------------- */

uint32_t kvf__table_private(kvf_manager *m, uint32_t t) {
    kvf__table *table = &m->tables[t];
    if (!table->maybe_shared) return table->n_blocks;
    const uint32_t *row = kvf__row(m, t);
    uint32_t n_private = 0, n_sole = 0;
    for (uint32_t i = 0; i < table->n_blocks; i++) {
        n_private += kvf__pool_holders(&m->blocks, row[i]) == 1;
        n_sole += m->blocks.entries[row[i]].refs == 1;
    }
    if (n_sole == table->n_blocks) {
        table->maybe_shared = false;
        for (uint32_t i = 0; i < table->n_blocks; i++) m->blocks.entries[row[i]].owner = t;
    }
    return n_private;
}

/* What the table is owed; while a compaction has fresh blocks for it, these count as taken from the new reservation. */
static uint32_t owed_blocks(kvf_manager *m, uint32_t t, uint32_t reserve, uint32_t *fresh_promise) {
    uint32_t owed = kvf__promise_owed(reserve, kvf__table_private(m, t));
    *fresh_promise = KVF__MIN(owed, m->tables[t].n_fresh);
    return owed - *fresh_promise;
}

static uint32_t owed_pages(const kvf_manager *m, uint32_t t, uint32_t reserve) {
    return kvf__promise_owed(reserve, m->tables[t].n_pages);
}

/* Whether a pool can bear owed in place of what these tables were promised so far. */
static kvf_status check_owed(const kvf_manager *m, const kvf__pool *p, const char *what, uint64_t owed,
                             uint64_t before) {
    uint64_t others = p->n_promised - before;
    if (others + owed <= p->n_free) return KVF_OK;
    return kvf__fail(m->error, KVF_E_NO_BLOCKS,
                     "reservation: %llu %s are to be promised, %llu are free and not promised",
                     (unsigned long long)owed, what, (unsigned long long)(p->n_free - others));
}

kvf_status kvf_seq_reserve(kvf_manager *manager, kvf_seq seq, const uint32_t *n_slots, int with_scores) {
    uint32_t index = 0, unused;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    if (!n_slots) return kvf__fail(manager->error, KVF_E_INVALID, "n_slots: is NULL");
    uint32_t first = index * manager->seq_tables;
    uint64_t blocks = 0, pages = 0, blocks_before = 0, pages_before = 0;
    for (uint32_t i = 0; i < manager->seq_tables; i++) {
        if (n_slots[i] > manager->config.max_slots)
            return kvf__fail(manager->error, KVF_E_INVALID, "n_slots[%u] %u: must be at most max_slots %u", i,
                             n_slots[i], manager->config.max_slots);
        uint32_t reserve = kvf__blocks_for(manager, n_slots[i]);
        blocks += owed_blocks(manager, first + i, reserve, &unused);
        pages += owed_pages(manager, first + i, with_scores ? reserve : 0);
        blocks_before += manager->tables[first + i].blocks.promise;
        pages_before += manager->tables[first + i].pages.promise;
    }
    s = check_owed(manager, &manager->blocks, "blocks", blocks, blocks_before);
    if (s) return s;
    s = check_owed(manager, &manager->pages, "score pages", pages, pages_before);
    if (s) return s;
    for (uint32_t i = 0; i < manager->seq_tables; i++) {
        kvf__table *table = &manager->tables[first + i];
        uint32_t reserve = kvf__blocks_for(manager, n_slots[i]), page_reserve = with_scores ? reserve : 0;
        uint32_t owed = owed_blocks(manager, first + i, reserve, &table->fresh_promise);
        kvf__promise_set(&manager->blocks, &table->blocks, reserve, owed);
        kvf__promise_set(&manager->pages, &table->pages, page_reserve, owed_pages(manager, first + i, page_reserve));
    }
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}

/* ---- Score pages ------------------------------------------------------------------------------------------ */

kvf_status kvf_seq_take_scores(kvf_manager *manager, kvf_seq seq, const uint32_t *n_slots) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    if (!n_slots) return kvf__fail(manager->error, KVF_E_INVALID, "n_slots: is NULL");
    if (manager->seqs[index].has_scores)
        return kvf__fail(manager->error, KVF_E_STATE, "take_scores: the sequence has its score pages already");
    uint32_t first = index * manager->seq_tables;
    uint64_t missing = 0;
    for (uint32_t i = 0; i < manager->seq_tables; i++) {
        const kvf__table *table = &manager->tables[first + i];
        if (n_slots[i] > table->n_slots)
            return kvf__fail(manager->error, KVF_E_INVALID, "n_slots[%u] %u: must be at most the table's %u", i,
                             n_slots[i], table->n_slots);
        uint32_t n = kvf__blocks_for(manager, n_slots[i]);
        missing += n > table->pages.promise ? n - table->pages.promise : 0;
    }
    if (missing > kvf__pool_spare(&manager->pages))
        return kvf__fail(manager->error, KVF_E_NO_BLOCKS,
                         "take_scores: %llu score pages beyond the promised ones, %u are free",
                         (unsigned long long)missing, kvf__pool_spare(&manager->pages));
    for (uint32_t i = 0; i < manager->seq_tables; i++) {
        kvf__table *table = &manager->tables[first + i];
        for (uint32_t n = kvf__blocks_for(manager, n_slots[i]); table->n_pages < n; table->n_pages++)
            kvf__score_row(manager, first + i)[table->n_pages] =
                kvf__pool_take(&manager->pages, &table->pages, first + i);
    }
    manager->seqs[index].has_scores = true;
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}
