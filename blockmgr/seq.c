/* Sequences: create, fork, free, reservations, score pages. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- Create, fork, free --------------------------------------------------------------------------- */

static kvf_status check_new(kvf_manager *m, const kvf_seq *out) {
    if (!out) return kvf__fail(m->error, KVF_E_INVALID, "out: is NULL");
    if (m->n_seqs == m->config.max_seqs)
        return kvf__fail(m->error, KVF_E_LIMIT, "max_seqs %u: so many sequences are alive; free one first",
                         m->config.max_seqs);
    return KVF_OK;
}

/* The tables of a dead sequence are empty already. */
static uint32_t seq_open(kvf_manager *m) {
    uint32_t i = m->free_seqs[m->config.max_seqs - 1 - m->n_seqs++];
    m->n_seqs_max = KVF__MAX(m->n_seqs_max, m->n_seqs);
    kvf__seq *s = &m->seqs[i];
    *s = (kvf__seq){.generation = s->generation, .alive = true};
    memset(m->seq_blocks_max + (size_t)i * m->config.n_layers, 0, m->config.n_layers * sizeof *m->seq_blocks_max);
    for (uint32_t t = i * m->seq_tables; t < (i + 1) * m->seq_tables; t++) m->private_at[t] = m->tail_at[t] = m->epoch;
    return i;
}

kvf_status kvf_seq_create(kvf_manager *manager, kvf_seq *out) {
    if (!manager) return KVF_E_INVALID;
    kvf_status s = check_new(manager, out);
    if (s) return s;
    *out = kvf__seq_handle(manager, seq_open(manager));
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}

/* The child's promise for table t of its parent: the whole reservation, because the child has no private blocks. With growth
 * the shared whole blocks count against it. */
static uint32_t fork_promise(const kvf_manager *m, uint32_t t) {
    const kvf__table *table = &m->tables[t];
    if (!table->growth) return table->reserve;
    return kvf__promise_owed(table->reserve, m->n_slots[t] >> m->block_shift);
}

/* What a fork of tables [first, first + seq_tables) needs: score pages, and promises in both kinds of pools. */
static kvf_status check_fork(kvf_manager *m, uint32_t first, const kvf_copy_list *copies) {
    kvf__counts blocks = {{0}};
    uint64_t pages = 0, n_copies = 0, entered = 0;
    for (uint32_t t = first; t < first + m->seq_tables; t++) {
        entered += kvf__n_blocks(m, t);
        blocks.of[kvf__class_of(m, t)] += fork_promise(m, t);
        pages += KVF__MAX(m->n_pages[t], m->tables[t].page_reserve);
        n_copies += m->n_pages[t];
    }
    if (n_copies > kvf__copies_room(copies))
        return kvf__fail(m->error, KVF_E_LIMIT, "copies: room for %u, %llu are needed", kvf__copies_room(copies),
                         (unsigned long long)n_copies);
    for (uint32_t i = 0; i < m->config.n_classes; i++)
        if (blocks.of[i] > kvf__pool_spare(&m->blocks[i]))
            return kvf__fail(m->error, KVF_E_NO_BLOCKS,
                             "fork: %llu blocks are to be promised, %u are free and not promised yet",
                             (unsigned long long)blocks.of[i], kvf__pool_spare(&m->blocks[i]));
    if (pages > kvf__pool_spare(&m->pages))
        return kvf__fail(m->error, KVF_E_NO_BLOCKS, "fork: %llu score pages are needed, %u are free and not promised",
                         (unsigned long long)pages, kvf__pool_spare(&m->pages));
    return kvf__check_table_blocks(m, "fork", entered);
}

static void fork_table(kvf_manager *m, uint32_t from, uint32_t to, kvf_copy_list *copies) {
    kvf__table *a = &m->tables[from], *b = &m->tables[to];
    uint32_t bs = m->config.block_size, n_blocks = kvf__n_blocks(m, from), n_pages = m->n_pages[from];
    kvf__row_need(m, to, n_blocks);
    const uint32_t *row = kvf__row(m, from), *score_row = kvf__score_row(m, from);
    kvf__pool *p = kvf__pool_at(m, from);
    for (uint32_t i = 0; i < n_blocks; i++) kvf__pool_share(p, row[i]);
    memcpy(kvf__row(m, to), row, n_blocks * sizeof *row);
    m->n_slots[to] = m->n_slots[from];
    m->private_at[from] = m->private_at[to] = m->tail_at[from] = m->tail_at[to] = 0;
    kvf__table_count(m, to, 0);
    b->reserve = a->reserve;
    b->page_reserve = a->page_reserve;
    b->growth = a->growth;
    kvf__promise_set(p, &m->promise[to], fork_promise(m, from));
    kvf__pool_take(&m->pages, kvf__score_row(m, to), n_pages);
    m->n_pages[to] = n_pages;
    for (uint32_t i = 0; i < n_pages; i++)
        kvf__copies_add(m, copies, KVF_COPY_SCORE_PAGE, score_row[i], kvf__score_row(m, to)[i],
                        KVF__MIN(bs, m->n_slots[from] - i * bs));
    kvf__promise_set(&m->pages, &m->page_promise[to], kvf__promise_owed(a->page_reserve, n_pages));
}

kvf_status kvf_seq_fork(kvf_manager *manager, kvf_seq parent, kvf_copy_list *copies, kvf_seq *out) {
    uint32_t from = 0;
    kvf_status s = kvf__seq_find(manager, parent, &from);
    if (s) return s;
    if (manager->seqs[from].n_compacting)
        return kvf__fail(manager->error, KVF_E_STATE,
                         "fork: a compaction of the parent is under way; commit or cancel it");
    if (manager->seqs[from].swapped) return kvf__fail_swapped(manager, "fork");
    s = check_new(manager, out);
    if (s) return s;
    s = check_fork(manager, from * manager->seq_tables, copies);
    if (s) return s;
    uint32_t to = seq_open(manager), first_copy = copies ? copies->n : 0;
    manager->seqs[from].known_at = 0;
    manager->seqs[to].next_pos = manager->seqs[from].next_pos;
    manager->seqs[to].has_scores = manager->seqs[from].has_scores;
    manager->seqs[to].node = manager->seqs[from].node;
    manager->seqs[to].compacted = manager->seqs[from].compacted;
    for (uint32_t t = 0; t < manager->seq_tables; t++)
        fork_table(manager, from * manager->seq_tables + t, to * manager->seq_tables + t, copies);
    if (manager->profile) kvf__profile_forked(manager, to, copies, first_copy);
    *out = kvf__seq_handle(manager, to);
    return KVF_OK;
}

static void empty_table(kvf_manager *m, uint32_t t, uint32_t layer) {
    uint32_t n_blocks = kvf__n_blocks(m, t);
    kvf__pool *p = kvf__pool_at(m, t);
    (void)kvf__pool_trim(p, kvf__row(m, t), n_blocks, 0, kvf__is_private(m, t));
    if (m->n_pages[t]) (void)kvf__pool_trim(&m->pages, kvf__score_row(m, t), m->n_pages[t], 0, false);
    kvf__row_cut(m, t, 0, 0);
    kvf__row_drop(m, t);
    m->layer_blocks[layer] -= n_blocks;
    m->layer_slots[layer] -= m->n_slots[t];
    m->n_slots[t] = m->n_pages[t] = 0;
    m->tables[t].reserve = m->tables[t].page_reserve = 0;
    m->tables[t].growth = false;
    kvf__promise_set(p, &m->promise[t], 0);
    kvf__promise_set(&m->pages, &m->page_promise[t], 0);
}

kvf_status kvf_seq_free(kvf_manager *manager, kvf_seq seq) {
    uint32_t index = 0;
    kvf_status status = kvf__seq_find(manager, seq, &index);
    if (status) return status;
    kvf__seq *s = &manager->seqs[index];
    if (s->n_compacting) kvf__compact_drop(manager);
    if (s->swapped) kvf__swap_drop(manager, index);
    for (uint32_t l = 0, t = index * manager->seq_tables; l < manager->config.n_layers; l++)
        for (uint32_t g = 0; g < manager->n_groups; g++, t++) empty_table(manager, t, l);
    *s = (kvf__seq){.generation = s->generation == KVF__SEQ_GENERATION_MAX ? 1 : s->generation + 1};
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
    if (n_slots) *n_slots = manager->n_slots[t];
    if (n_blocks) *n_blocks = kvf__n_blocks(manager, t);
    if (blocks) *blocks = kvf__row(manager, t);
    return KVF_OK;
}

kvf_status kvf_seq_sharing(const kvf_manager *manager, kvf_seq seq, uint64_t *n_own, uint64_t *n_shared) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    uint64_t own = 0, all = 0;
    for (uint32_t t = index * manager->seq_tables; t < (index + 1) * manager->seq_tables; t++) {
        uint32_t n = kvf__n_blocks(manager, t);
        all += n;
        for (uint32_t i = 0; i < n; i++) own += kvf__pool_holders(manager->blocks, kvf__row(manager, t)[i]) == 1;
    }
    if (n_own) *n_own = own;
    if (n_shared) *n_shared = all - own;
    return KVF_OK;
}

/* ---- Reservations -------------------------------------------------------------------------------------- */

kvf_status kvf__reserve_read(const kvf_manager *m, const kvf_reserve *in, kvf_reserve *out) {
    kvf_status s = kvf__config_read(out, sizeof *out, in, "kvf_reserve", m->error);
    if (s) return s;
    if (!out->n_slots) return kvf__fail(m->error, KVF_E_INVALID, "n_slots: is NULL");
    if (out->growth && out->fresh)
        return kvf__fail(m->error, KVF_E_INVALID, "growth, fresh: a reservation has one of them at most");
    for (uint32_t k = 0; k < m->seq_tables; k++)
        if (out->n_slots[k] > m->config.max_slots)
            return kvf__fail(m->error, KVF_E_INVALID, "n_slots[%u] %u: must be at most max_slots %u", k,
                             out->n_slots[k], m->config.max_slots);
    return KVF_OK;
}

kvf__reservation kvf__reservation_of(const kvf_manager *m, const kvf_reserve *reserve, uint32_t k) {
    uint32_t window = kvf__window_of(m, k);
    uint32_t blocks = window == KVF_LAYER_NONE ? 0 : kvf__blocks_for(m, reserve->n_slots[k]);
    return (kvf__reservation){blocks, reserve->with_scores && !window ? blocks : 0, reserve->growth != 0};
}

kvf__reservation kvf__table_reservation(const kvf_manager *m, uint32_t t) {
    return (kvf__reservation){m->tables[t].reserve, m->tables[t].page_reserve, m->tables[t].growth};
}

/* Whether a pool has enough ids if these tables are promised `owed` in place of `before` and n_taken more are taken. */
static kvf_status check_owed(const kvf_manager *m, const kvf__pool *p, const char *what, uint64_t owed, uint64_t before,
                             uint64_t n_taken) {
    uint64_t others = p->n_promised - before, n_available = (uint64_t)p->n_free + p->n_idle;
    if (others + owed + n_taken <= n_available) return KVF_OK;
    return kvf__fail(
        m->error, KVF_E_NO_BLOCKS,
        "reservation: %llu %s to promise and %llu idle or new ones of a prefix hit to take, but %llu are available",
        (unsigned long long)owed, what, (unsigned long long)n_taken, (unsigned long long)(n_available - others));
}

kvf_status kvf__check_owed(const kvf_manager *m, const kvf__owed *owed, kvf__counts taken) {
    kvf_status s = KVF_OK;
    for (uint32_t i = 0; !s && i < m->config.n_classes; i++)
        s = check_owed(m, &m->blocks[i], "blocks", owed->blocks.of[i], owed->blocks_before.of[i], taken.of[i]);
    return s ? s : check_owed(m, &m->pages, "score pages", owed->pages, owed->pages_before, 0);
}

void kvf__table_reserve(kvf_manager *m, uint32_t t, kvf__reservation r, uint32_t owed) {
    kvf__table *table = &m->tables[t];
    table->reserve = r.blocks;
    table->page_reserve = r.pages;
    table->growth = r.growth;
    table->fresh_promise = KVF__MIN(owed, table->n_fresh); /* these count as taken from the new reservation */
    kvf__promise_set(kvf__pool_at(m, t), &m->promise[t], owed - table->fresh_promise);
    kvf__promise_set(&m->pages, &m->page_promise[t], kvf__promise_owed(r.pages, m->n_pages[t]));
    kvf__row_fit(m, t, kvf__n_blocks(m, t));
}

/* How many blocks of table t would count against reservation r. fresh (kvf_reserve.fresh): none if any block is shared,
 * because the first compaction moves the whole table to fresh blocks. */
static uint32_t kept_under(kvf_manager *m, uint32_t t, kvf__reservation r, bool fresh) {
    bool growth = m->tables[t].growth;
    m->tables[t].growth = r.growth;
    uint32_t kept = kvf__table_kept(m, t);
    m->tables[t].growth = growth;
    return fresh && kept < kvf__n_blocks(m, t) ? 0 : kept;
}

kvf_status kvf_seq_reserve(kvf_manager *manager, kvf_seq seq, const kvf_reserve *reserve) {
    uint32_t index = 0;
    kvf_reserve given;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (!s) s = kvf__reserve_read(manager, reserve, &given);
    if (s) return s;
    if (manager->seqs[index].swapped) return kvf__fail_swapped(manager, "reserve");
    uint32_t first = index * manager->seq_tables;
    kvf__owed owed = {.pages = 0};
    for (uint32_t k = 0; k < manager->seq_tables; k++) {
        kvf__reservation r = kvf__reservation_of(manager, &given, k);
        uint32_t blocks = kvf__promise_owed(r.blocks, kept_under(manager, first + k, r, given.fresh != 0));
        uint32_t block_class = kvf__class_of(manager, k);
        owed.blocks.of[block_class] += blocks - KVF__MIN(blocks, manager->tables[first + k].n_fresh);
        owed.pages += kvf__promise_owed(r.pages, manager->n_pages[first + k]);
        owed.blocks_before.of[block_class] += manager->promise[first + k];
        owed.pages_before += manager->page_promise[first + k];
    }
    s = kvf__check_owed(manager, &owed, (kvf__counts){{0}});
    if (s) return s;
    for (uint32_t k = 0; k < manager->seq_tables; k++) {
        kvf__reservation r = kvf__reservation_of(manager, &given, k);
        kvf__table_reserve(manager, first + k, r,
                           kvf__promise_owed(r.blocks, kept_under(manager, first + k, r, given.fresh != 0)));
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
    if (manager->seqs[index].swapped) return kvf__fail_swapped(manager, "take_scores");
    if (manager->seqs[index].has_scores)
        return kvf__fail(manager->error, KVF_E_STATE, "take_scores: the sequence has its score pages already");
    uint32_t first = index * manager->seq_tables;
    uint64_t missing = 0;
    for (uint32_t i = 0; i < manager->seq_tables; i++) {
        if (n_slots[i] > manager->n_slots[first + i])
            return kvf__fail(manager->error, KVF_E_INVALID, "n_slots[%u] %u: must be at most the table's %u", i,
                             n_slots[i], manager->n_slots[first + i]);
        if (!kvf__window_of(manager, i))
            missing += kvf__promise_owed(kvf__blocks_for(manager, n_slots[i]), manager->page_promise[first + i]);
    }
    if (missing > kvf__pool_spare(&manager->pages))
        return kvf__fail(manager->error, KVF_E_NO_BLOCKS,
                         "take_scores: %llu score pages beyond the promised ones, %u are free",
                         (unsigned long long)missing, kvf__pool_spare(&manager->pages));
    for (uint32_t i = 0; i < manager->seq_tables; i++) {
        uint32_t n = kvf__window_of(manager, i) ? 0 : kvf__blocks_for(manager, n_slots[i]);
        kvf__pool_take(&manager->pages, kvf__score_row(manager, first + i), n);
        kvf__promise_use(&manager->pages, &manager->page_promise[first + i], n);
        manager->n_pages[first + i] = n;
    }
    manager->seqs[index].has_scores = true;
    manager->seqs[index].known_at = 0;
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}
