/* The host tier: sequences are swapped out of the device's pools and in again. Nothing is copied here: a call fills a copy
 * list, whose items pin src and dst until they are done. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- A batch --------------------------------------------------------------------------------------- */

static kvf_status check_seq(const kvf_manager *m, uint32_t index, uint32_t i, bool swapped) {
    const kvf__seq *s = &m->seqs[index];
    if (s->mark) return kvf__fail(m->error, KVF_E_INVALID, "seqs[%u]: the sequence is in the batch twice", i);
    if (s->swapped && !swapped) return kvf__fail(m->error, KVF_E_STATE, "seqs[%u]: is swapped out already", i);
    if (!s->swapped && swapped) return kvf__fail(m->error, KVF_E_STATE, "seqs[%u]: is not swapped out", i);
    if (s->n_compacting)
        return kvf__fail(m->error, KVF_E_STATE,
                         "seqs[%u]: a compaction of the sequence is under way; commit or cancel it", i);
    return KVF_OK;
}

static kvf_status check_batch(const kvf_manager *m, const kvf_seq *seqs, uint32_t n_seqs, bool swapped) {
    if (n_seqs && !seqs) return kvf__fail(m->error, KVF_E_INVALID, "seqs: is NULL");
    if (n_seqs > m->config.max_seqs)
        return kvf__fail(m->error, KVF_E_INVALID, "n_seqs %u: of distinct ones at most max_seqs %u", n_seqs,
                         m->config.max_seqs);
    kvf_status s = KVF_OK;
    uint32_t n_marked = 0, index = 0;
    for (; !s && n_marked < n_seqs; n_marked++) {
        s = kvf__seq_find(m, seqs[n_marked], &index);
        if (!s) s = check_seq(m, index, n_marked, swapped);
        if (s) break;
        m->seqs[index].mark = true;
    }
    for (uint32_t i = 0; i < n_marked; i++) m->seqs[kvf__seq_index(seqs[i])].mark = false;
    return s;
}

/* The number of slots of a table, on the device or on the host. */
static uint32_t slots_of(const kvf_manager *m, uint32_t t, bool swapped) {
    return swapped ? m->host_slots[t] : m->n_slots[t];
}

/* Counts in scratch how often each id appears in the rows of the batch. Returns the number of distinct ids. p: the pools of
 * the tier. */
static kvf__counts count_ids(const kvf_manager *m, const kvf__pool *p, const kvf_seq *seqs, uint32_t n_seqs,
                             bool swapped) {
    kvf__counts n_ids = {{0}};
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t first = kvf__seq_index(seqs[i]) * m->seq_tables;
        for (uint32_t t = first; t < first + m->seq_tables; t++)
            for (uint32_t b = 0, n = kvf__blocks_for(m, slots_of(m, t, swapped)); b < n; b++)
                n_ids.of[kvf__class_of(m, t)] += !p->entries[kvf__row(m, t)[b]].scratch++;
    }
    return n_ids;
}

static void clear_ids(const kvf_manager *m, const kvf__pool *p, const kvf_seq *seqs, uint32_t n_seqs, bool swapped) {
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t first = kvf__seq_index(seqs[i]) * m->seq_tables;
        for (uint32_t t = first; t < first + m->seq_tables; t++)
            for (uint32_t b = 0, n = kvf__blocks_for(m, slots_of(m, t, swapped)); b < n; b++)
                p->entries[kvf__row(m, t)[b]].scratch = 0;
    }
}

/* The spare blocks of each class of a tier. */
static kvf__counts spare(const kvf_manager *m, const kvf__pool *pools) {
    kvf__counts n = {{0}};
    for (uint32_t i = 0; i < m->config.n_classes; i++) n.of[i] = kvf__pool_spare(&pools[i]);
    return n;
}

static uint64_t sum(const kvf__counts *n) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < KVF_BLOCK_CLASSES_MAX; i++) all += n->of[i];
    return all;
}

static kvf_status check_room(const kvf_manager *m, const char *where, kvf__counts blocks, kvf__counts n_blocks,
                             uint64_t pages, uint64_t n_pages) {
    bool fits = pages <= n_pages;
    for (uint32_t i = 0; i < m->config.n_classes; i++) fits &= blocks.of[i] <= n_blocks.of[i];
    if (fits) return KVF_OK;
    return kvf__fail(m->error, KVF_E_NO_BLOCKS,
                     "%s: %llu blocks and %llu score pages are needed, %llu and %llu are available", where,
                     (unsigned long long)sum(&blocks), (unsigned long long)pages, (unsigned long long)sum(&n_blocks),
                     (unsigned long long)n_pages);
}

static kvf_status check_list(const kvf_manager *m, const kvf_copy_list *copies, uint64_t n) {
    if (n <= kvf__copies_room(copies)) return KVF_OK;
    return kvf__fail(m->error, KVF_E_LIMIT, "copies: room for %u, %llu are needed", kvf__copies_room(copies),
                     (unsigned long long)n);
}

/* ---- Moving a row ----------------------------------------------------------------------------------- */

/* A direction: from a pool of one tier to the pool of the other. */
typedef struct way {
    kvf__pool *from, *to;
    kvf_copy_kind kind;
    bool single; /* the batch is a single sequence */
} way;

/* The way of a class, given the way of the first class. */
static way way_of(way first, uint32_t block_class) {
    return (way){first.from + block_class, first.to + block_class, first.kind, first.single};
}

/* Moves one row to the other tier. A block that several rows of the batch share is copied once; scratch of the source is
 * then 1 + its destination. Such a block is copied whole, because another sequence may have slots beyond this table's. For a
 * single sequence only its own slots are copied, because another holder of the block may write behind them at once. */
static void move_row(kvf_manager *m, way w, uint32_t *row, uint32_t n, uint32_t n_slots, kvf_copy_list *copies) {
    uint32_t bs = m->config.block_size;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t src = row[i], *moved = &w.from->entries[src].scratch;
        if (*moved) {
            row[i] = *moved - 1;
            kvf__pool_share(w.to, row[i]);
        } else {
            bool shared = !w.single && kvf__pool_holders(w.from, src) > 1;
            kvf__pool_take(w.to, &row[i], 1);
            *moved = row[i] + 1;
            kvf__copies_add(m, copies, w.kind, src, row[i], shared ? bs : KVF__MIN(bs, n_slots - i * bs));
        }
        (void)kvf__pool_drop(w.from, src);
    }
}

static void clear_moved(way w, const kvf_copy_list *copies, uint32_t first_copy) {
    for (uint32_t i = first_copy; copies && i < copies->n; i++)
        if (copies->items[i].kind == (uint32_t)w.kind) w.from->entries[copies->items[i].src].scratch = 0;
}

/* ---- Out ------------------------------------------------------------------------------------------------ */

static void table_out(kvf_manager *m, uint32_t t, way blocks, way pages, kvf_copy_list *copies) {
    uint32_t n_slots = m->n_slots[t];
    move_row(m, way_of(blocks, kvf__class_of(m, t)), kvf__row(m, t), kvf__n_blocks(m, t), n_slots, copies);
    move_row(m, pages, kvf__score_row(m, t), m->n_pages[t], n_slots, copies);
    kvf__row_cut(m, t, 0, 0);
    m->n_swapped_blocks += kvf__n_blocks(m, t);
    m->host_slots[t] = n_slots;
    m->n_host_pages[t] = m->n_pages[t];
    m->n_slots[t] = m->n_pages[t] = 0;
    m->private_at[t] = m->tail_at[t] = 0;
    kvf__promise_set(kvf__pool_at(m, t), &m->promise[t], 0);
    kvf__promise_set(&m->pages, &m->page_promise[t], 0);
    kvf__table_count(m, t, n_slots);
    kvf__row_fit(m, t, kvf__blocks_for(m, n_slots));
}

kvf_status kvf_swap_out(kvf_manager *manager, const kvf_seq *seqs, uint32_t n_seqs, kvf_copy_list *copies) {
    if (!manager) return KVF_E_INVALID;
    kvf_status s = check_batch(manager, seqs, n_seqs, false);
    if (s) return s;
    if (!manager->config.n_host_blocks)
        return kvf__fail(manager->error, KVF_E_NO_BLOCKS, "n_host_blocks 0: this manager has no host tier");
    kvf__counts n_blocks = count_ids(manager, manager->blocks, seqs, n_seqs, false);
    uint64_t n_pages = 0;
    clear_ids(manager, manager->blocks, seqs, n_seqs, false);
    for (uint32_t i = 0; i < n_seqs; i++)
        for (uint32_t k = 0; k < manager->seq_tables; k++)
            n_pages += manager->n_pages[kvf__seq_index(seqs[i]) * manager->seq_tables + k];
    s = check_room(manager, "swap out", n_blocks, spare(manager, manager->host_blocks), n_pages,
                   manager->host_pages.n_free);
    if (!s) s = check_list(manager, copies, sum(&n_blocks) + n_pages);
    if (s) return s;
    way blocks = {manager->blocks, manager->host_blocks, KVF_COPY_BLOCK_OUT, n_seqs == 1};
    way pages = {&manager->pages, &manager->host_pages, KVF_COPY_SCORE_OUT, true};
    uint32_t first_copy = copies ? copies->n : 0;
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t index = kvf__seq_index(seqs[i]), first = index * manager->seq_tables;
        for (uint32_t t = first; t < first + manager->seq_tables; t++) table_out(manager, t, blocks, pages, copies);
        manager->seqs[index].swapped = true;
        manager->seqs[index].known_at = 0;
    }
    clear_moved(blocks, copies, first_copy);
    clear_moved(pages, copies, first_copy);
    manager->n_swapped += n_seqs;
    if (manager->profile) kvf__profile_swapped(manager, seqs, n_seqs, copies, first_copy);
    return KVF_OK;
}

/* ---- In --------------------------------------------------------------------------------------------------- */

#define LEFT (1u << 31) /* in scratch: an earlier table of the batch will copy the block */

/* Whether an append, in the order of the batch, will make a table copy its partly filled last block. The last table that
 * shares the block writes in place. */
static bool leaves_next(uint32_t *scratch) {
    if ((*scratch & ~LEFT) == 1) return false;
    *scratch = (*scratch - 1) | LEFT;
    return true;
}

/* Adds the blocks and score pages that a table needs beyond those it has on the host: its promise, or what an append of
 * n_tokens takes, whichever is more. */
static void count_growth(const kvf_manager *m, uint32_t t, uint32_t n_tokens, kvf__counts *blocks, uint64_t *pages) {
    const kvf__table *table = &m->tables[t];
    const uint32_t *row = kvf__row(m, t);
    uint32_t n_slots = m->host_slots[t], n = kvf__blocks_for(m, n_slots), n_private = 0, n_pages = m->n_host_pages[t];
    uint32_t after = kvf__blocks_for(m, n_slots + KVF__MIN(n_tokens, m->config.max_slots - n_slots));
    for (uint32_t i = 0; i < n; i++) n_private += m->host_blocks->entries[row[i]].scratch == 1;
    uint32_t *last = n_slots % m->config.block_size ? &m->host_blocks->entries[row[n - 1]].scratch : NULL;
    uint32_t owed = kvf__promise_owed(table->reserve, table->growth ? n - (last && *last != 1) : n_private);
    bool leaves = n_tokens && last && leaves_next(last);
    uint32_t owed_pages = kvf__promise_owed(table->page_reserve, n_pages);
    uint32_t more_pages = m->seqs[t / m->seq_tables].has_scores && n_tokens ? after - n_pages : 0;
    blocks->of[kvf__class_of(m, t)] += KVF__MAX(owed, n_tokens ? after - n + leaves : 0);
    *pages += n_pages + KVF__MAX(owed_pages, more_pages);
}

static void table_in(kvf_manager *m, uint32_t t, way blocks, way pages, kvf_copy_list *copies) {
    uint32_t n_slots = m->host_slots[t], n_pages = m->n_host_pages[t];
    move_row(m, way_of(blocks, kvf__class_of(m, t)), kvf__row(m, t), kvf__blocks_for(m, n_slots), n_slots, copies);
    move_row(m, pages, kvf__score_row(m, t), n_pages, n_slots, copies);
    m->n_swapped_blocks -= kvf__blocks_for(m, n_slots);
    m->host_slots[t] = m->n_host_pages[t] = 0;
    m->n_slots[t] = n_slots;
    m->n_pages[t] = n_pages;
    kvf__table_count(m, t, 0);
}

/* Restores a table's promises. Called when the whole batch is back, because then it is known which blocks are shared. */
static void promise_again(kvf_manager *m, uint32_t t) {
    const kvf__table *table = &m->tables[t];
    kvf__promise_set(kvf__pool_at(m, t), &m->promise[t], kvf__promise_owed(table->reserve, kvf__table_kept(m, t)));
    kvf__promise_set(&m->pages, &m->page_promise[t], kvf__promise_owed(table->page_reserve, m->n_pages[t]));
}

static void swap_in(kvf_manager *m, const kvf_seq *seqs, uint32_t n_seqs, kvf_copy_list *copies) {
    way blocks = {m->host_blocks, m->blocks, KVF_COPY_BLOCK_IN, n_seqs == 1};
    way pages = {&m->host_pages, &m->pages, KVF_COPY_SCORE_IN, true};
    uint32_t first_copy = copies ? copies->n : 0;
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t index = kvf__seq_index(seqs[i]), first = index * m->seq_tables;
        for (uint32_t t = first; t < first + m->seq_tables; t++) table_in(m, t, blocks, pages, copies);
        m->seqs[index].swapped = false;
    }
    clear_moved(blocks, copies, first_copy);
    clear_moved(pages, copies, first_copy);
    m->n_swapped -= n_seqs;
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t first = kvf__seq_index(seqs[i]) * m->seq_tables;
        for (uint32_t t = first; t < first + m->seq_tables; t++) promise_again(m, t);
    }
    if (m->profile) kvf__profile_swapped(m, seqs, n_seqs, copies, first_copy);
}

kvf_status kvf_swap_in(kvf_manager *manager, const kvf_seq *seqs, uint32_t n_seqs, uint32_t n_tokens,
                       kvf_copy_list *copies) {
    if (!manager) return KVF_E_INVALID;
    kvf_status s = check_batch(manager, seqs, n_seqs, true);
    if (s || !n_seqs) return s;
    kvf__counts n_blocks = count_ids(manager, manager->host_blocks, seqs, n_seqs, true);
    uint64_t n_copies = sum(&n_blocks), n_pages = 0;
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t first = kvf__seq_index(seqs[i]) * manager->seq_tables;
        for (uint32_t t = first; t < first + manager->seq_tables; t++) {
            count_growth(manager, t, n_tokens, &n_blocks, &n_pages);
            n_copies += manager->n_host_pages[t];
        }
    }
    clear_ids(manager, manager->host_blocks, seqs, n_seqs, true);
    s = check_room(manager, "swap in", n_blocks, spare(manager, manager->blocks), n_pages,
                   kvf__pool_spare(&manager->pages));
    if (!s) s = check_list(manager, copies, n_copies);
    if (!s) swap_in(manager, seqs, n_seqs, copies);
    return s;
}

void kvf__swap_drop(kvf_manager *m, uint32_t index) {
    for (uint32_t t = index * m->seq_tables; t < (index + 1) * m->seq_tables; t++) {
        uint32_t n_blocks = kvf__blocks_for(m, m->host_slots[t]);
        (void)kvf__pool_trim(&m->host_blocks[kvf__class_of(m, t)], kvf__row(m, t), n_blocks, 0, false);
        (void)kvf__pool_trim(&m->host_pages, kvf__score_row(m, t), m->n_host_pages[t], 0, false);
        m->n_swapped_blocks -= n_blocks;
        m->host_slots[t] = m->n_host_pages[t] = 0;
    }
    m->seqs[index].swapped = false;
    m->n_swapped--;
}

kvf_status kvf_seq_is_swapped(const kvf_manager *manager, kvf_seq seq, int *swapped) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    if (!swapped) return kvf__fail(manager->error, KVF_E_INVALID, "swapped: is NULL");
    *swapped = manager->seqs[index].swapped;
    return KVF_OK;
}
