/* Growth: append with copy-on-write, its dry run, rollback, and the copy lists. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- Copy lists ---------------------------------------------------------------------------------- */

void kvf__copies_add(kvf_manager *m, kvf_copy_list *copies, kvf_copy_kind kind, uint32_t src, uint32_t dst,
                     uint32_t n_slots) {
    copies->items[copies->n++] = (kvf_copy){kind, src, dst, n_slots};
    kvf__pool_pin(kind == KVF_COPY_BLOCK ? &m->blocks : &m->pages, src, dst);
}

static kvf__pool *copy_pool(kvf_manager *m, uint32_t kind) {
    return kind == KVF_COPY_BLOCK ? &m->blocks : kind == KVF_COPY_SCORE_PAGE ? &m->pages : NULL;
}

kvf_status kvf_copies_done(kvf_manager *manager, kvf_copy_list *copies) {
    if (!manager) return KVF_E_INVALID;
    if (!copies || (copies->n && !copies->items)) return kvf__fail(manager->error, KVF_E_INVALID, "copies: is NULL");
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        kvf__pool *p = copy_pool(manager, c->kind);
        if (p && kvf__pool_copy_pending(p, c->src, c->dst)) {
            p->entries[c->dst].copy_src = KVF_NO_BLOCK; /* a second item for it is not pending */
            continue;
        }
        for (uint32_t j = 0; j < i; j++) {
            const kvf_copy *seen = &copies->items[j];
            copy_pool(manager, seen->kind)->entries[seen->dst].copy_src = seen->src;
        }
        return kvf__fail(manager->error, KVF_E_STALE, "copies[%u]: kind %u, %u to %u is not pending", i, c->kind,
                         c->src, c->dst);
    }
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        kvf__pool_unpin(copy_pool(manager, c->kind), c->src, c->dst);
    }
    if (manager->profile) kvf__profile_copied(manager, copies);
    copies->n = 0;
    return KVF_OK;
}

/* ---- Append ---------------------------------------------------------------------------------------- */

/* What a batch takes: blocks and pages beyond the promises, and copies. */
typedef struct need {
    uint64_t blocks, pages;
    uint32_t copies;
} need;

static kvf_status check_item(const kvf_manager *m, const kvf_append_item *item, uint32_t index) {
    const kvf__seq *s = &m->seqs[index];
    if (!item->n_tokens) return kvf__fail(m->error, KVF_E_INVALID, "append: n_tokens 0: must be 1 or more");
    if (s->n_compacting)
        return kvf__fail(m->error, KVF_E_STATE,
                         "append: a compaction of the sequence is under way; commit or cancel it");
    if (item->n_tokens > UINT32_MAX - s->next_pos)
        return kvf__fail(m->error, KVF_E_LIMIT, "append: n_tokens %u from position %u: positions end at 2^32 - 1",
                         item->n_tokens, s->next_pos);
    for (uint32_t t = index * m->seq_tables; t < (index + 1) * m->seq_tables; t++)
        if (item->n_tokens > m->config.max_slots - m->tables[t].n_slots)
            return kvf__fail(m->error, KVF_E_LIMIT, "append: n_tokens %u to a table of %u slots: max_slots is %u",
                             item->n_tokens, m->tables[t].n_slots, m->config.max_slots);
    return KVF_OK;
}

static uint32_t index_of(const kvf_manager *m, kvf_seq seq) {
    uint32_t index = 0;
    (void)kvf__seq_find(m, seq, &index);
    return index;
}

static kvf_status check_items(const kvf_manager *m, const kvf_append_item *items, uint32_t n_items) {
    if (n_items && !items) return kvf__fail(m->error, KVF_E_INVALID, "items: is NULL");
    kvf_status s = KVF_OK;
    uint32_t n_marked = 0;
    for (; !s && n_marked < n_items; n_marked++) {
        uint32_t index;
        s = kvf__seq_find(m, items[n_marked].seq, &index);
        if (s) break;
        if (m->seqs[index].mark) {
            s = kvf__fail(m->error, KVF_E_INVALID, "items[%u]: the sequence is in the batch twice", n_marked);
            break;
        }
        s = check_item(m, &items[n_marked], index);
        m->seqs[index].mark = true;
    }
    for (uint32_t i = 0; i < n_marked; i++) m->seqs[index_of(m, items[i].seq)].mark = false;
    return s;
}

/* The block that an append would write into and that may be shared: the last, when partly filled. NULL: none. */
static kvf__entry *partial_block(const kvf_manager *m, uint32_t t) {
    const kvf__table *table = &m->tables[t];
    if (table->n_slots % m->config.block_size == 0) return NULL;
    return &m->blocks.entries[kvf__row(m, t)[table->n_blocks - 1]];
}

static void count_table(const kvf_manager *m, uint32_t t, uint32_t n_tokens, bool has_scores, need *out) {
    const kvf__table *table = &m->tables[t];
    uint32_t n_after = kvf__blocks_for(m, table->n_slots + n_tokens);
    uint32_t blocks = n_after - table->n_blocks, pages = has_scores ? n_after - table->n_pages : 0;
    kvf__entry *e = partial_block(m, t);
    /* scratch counts the tables of this batch that have left the block: the last holder writes in place. */
    if (e && e->refs - e->pins - e->scratch > 1) {
        e->scratch++;
        blocks++;
        out->copies++;
    }
    out->blocks += blocks > table->blocks.promise ? blocks - table->blocks.promise : 0;
    out->pages += pages > table->pages.promise ? pages - table->pages.promise : 0;
}

static need count_items(const kvf_manager *m, const kvf_append_item *items, uint32_t n_items) {
    need n = {0, 0, 0};
    for (int pass = 0; pass < 2; pass++) /* the second clears scratch */
        for (uint32_t i = 0; i < n_items; i++) {
            uint32_t index = index_of(m, items[i].seq);
            for (uint32_t t = index * m->seq_tables; t < (index + 1) * m->seq_tables; t++) {
                if (pass == 0) {
                    count_table(m, t, items[i].n_tokens, m->seqs[index].has_scores, &n);
                } else {
                    kvf__entry *e = partial_block(m, t);
                    if (e) e->scratch = 0;
                }
            }
        }
    return n;
}

static uint64_t lack(uint64_t wanted, const kvf__pool *p) {
    return wanted > kvf__pool_spare(p) ? wanted - kvf__pool_spare(p) : 0;
}

/* All that can fail, before anything changes. */
static kvf_status plan(const kvf_manager *m, const kvf_append_item *items, uint32_t n_items, need *n,
                       uint32_t *n_missing) {
    kvf_status s = check_items(m, items, n_items);
    if (s) return s;
    *n = count_items(m, items, n_items);
    uint64_t blocks = lack(n->blocks, &m->blocks), pages = lack(n->pages, &m->pages);
    if (n_missing) *n_missing = (uint32_t)KVF__MIN(KVF__MAX(blocks, pages), UINT32_MAX);
    if (blocks || pages)
        return kvf__fail(m->error, KVF_E_NO_BLOCKS, "append: %llu blocks and %llu score pages are missing",
                         (unsigned long long)blocks, (unsigned long long)pages);
    return KVF_OK;
}

kvf_status kvf_can_append(const kvf_manager *manager, const kvf_append_item *items, uint32_t n_items,
                          uint32_t *n_missing) {
    need n;
    return manager ? plan(manager, items, n_items, &n, n_missing) : KVF_E_INVALID;
}

static void grow_table(kvf_manager *m, uint32_t t, uint32_t n_tokens, bool has_scores, kvf_copy_list *copies) {
    kvf__table *table = &m->tables[t];
    uint32_t *row = kvf__row(m, t), *score_row = kvf__score_row(m, t);
    uint32_t n_slots = table->n_slots, n_blocks = table->n_blocks, n_after = kvf__blocks_for(m, n_slots + n_tokens);
    uint32_t filled = n_slots % m->config.block_size;
    if (filled && kvf__pool_holders(&m->blocks, row[n_blocks - 1]) > 1) {
        uint32_t src = row[n_blocks - 1], dst = kvf__pool_take(&m->blocks, &table->blocks, t);
        kvf__copies_add(m, copies, KVF_COPY_BLOCK, src, dst, filled);
        (void)kvf__pool_drop(&m->blocks, src);
        row[n_blocks - 1] = dst;
    }
    for (; table->n_blocks < n_after; table->n_blocks++)
        row[table->n_blocks] = kvf__pool_take(&m->blocks, &table->blocks, t);
    for (; has_scores && table->n_pages < n_after; table->n_pages++)
        score_row[table->n_pages] = kvf__pool_take(&m->pages, &table->pages, t);
    table->n_slots += n_tokens;
    kvf__table_count(m, t, n_slots, n_blocks);
}

kvf_status kvf_append(kvf_manager *manager, const kvf_append_item *items, uint32_t n_items, kvf_copy_list *copies) {
    if (!manager) return KVF_E_INVALID;
    need n;
    kvf_status s = plan(manager, items, n_items, &n, NULL);
    if (s) return s;
    if (n.copies > kvf__copies_room(copies))
        return kvf__fail(manager->error, KVF_E_LIMIT, "copies: room for %u, %u are needed", kvf__copies_room(copies),
                         n.copies);
    uint32_t first_copy = copies ? copies->n : 0;
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t index = index_of(manager, items[i].seq);
        for (uint32_t t = index * manager->seq_tables; t < (index + 1) * manager->seq_tables; t++)
            grow_table(manager, t, items[i].n_tokens, manager->seqs[index].has_scores, copies);
        manager->seqs[index].next_pos += items[i].n_tokens;
    }
    if (manager->profile) kvf__profile_appended(manager, items, n_items, copies, first_copy);
    return KVF_OK;
}

/* ---- Rollback ---------------------------------------------------------------------------------------- */

/* What a table gives up it is promised again, as long as its reservation is not exceeded: an append is undone. */
static void shrink_table(kvf_manager *m, uint32_t t, uint32_t n_tokens) {
    kvf__table *table = &m->tables[t];
    uint32_t n_slots = table->n_slots, n_blocks = table->n_blocks, n_pages = table->n_pages;
    table->n_slots -= n_tokens;
    uint32_t n_after = kvf__blocks_for(m, table->n_slots);
    (void)kvf__pool_trim(&m->blocks, kvf__row(m, t), &table->n_blocks, n_after);
    (void)kvf__pool_trim(&m->pages, kvf__score_row(m, t), &table->n_pages, n_after);
    uint32_t owed = kvf__promise_owed(table->blocks.reserve, kvf__table_private(m, t));
    uint32_t owed_pages = kvf__promise_owed(table->pages.reserve, table->n_pages);
    owed = KVF__MIN(owed, table->blocks.promise + n_blocks - table->n_blocks);
    owed_pages = KVF__MIN(owed_pages, table->pages.promise + n_pages - table->n_pages);
    kvf__promise_raise(&m->blocks, &table->blocks, owed, kvf__pool_spare(&m->blocks));
    kvf__promise_raise(&m->pages, &table->pages, owed_pages, kvf__pool_spare(&m->pages));
    kvf__table_count(m, t, n_slots, n_blocks);
}

kvf_status kvf_seq_rollback(kvf_manager *manager, kvf_seq seq, uint32_t n_tokens) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    uint32_t first = index * manager->seq_tables, end = first + manager->seq_tables;
    if (manager->seqs[index].n_compacting)
        return kvf__fail(manager->error, KVF_E_STATE,
                         "rollback: a compaction of the sequence is under way; commit or cancel it");
    for (uint32_t t = first; t < end; t++)
        if (n_tokens > manager->tables[t].n_slots)
            return kvf__fail(manager->error, KVF_E_INVALID, "rollback: n_tokens %u: a table has %u slots", n_tokens,
                             manager->tables[t].n_slots);
    for (uint32_t t = first; t < end; t++) shrink_table(manager, t, n_tokens);
    manager->seqs[index].next_pos -= n_tokens;
    if (manager->profile) kvf__profile_seq(manager, index, KVF__CAUSE_ROLLBACK);
    return KVF_OK;
}
