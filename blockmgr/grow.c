/* Growth: append with copy-on-write, its dry run, rollback, and the copy lists. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- Copy lists ---------------------------------------------------------------------------------- */

/* The pools of a copy's src and dst; both are of the same class. */
typedef struct ends {
    kvf__pool *from, *to;
} ends;

/* Accepts any ids. If one is out of range, or they are of two classes, the result is a pair of pools without such a copy. */
static ends ends_of(kvf_manager *m, const kvf_copy *copy) {
    kvf__pool *const from[] = {m->blocks, &m->pages, m->blocks, m->host_blocks, &m->pages, &m->host_pages};
    kvf__pool *const to[] = {m->blocks, &m->pages, m->host_blocks, m->blocks, &m->host_pages, &m->pages};
    ends e = {from[copy->kind], to[copy->kind]};
    if (copy->kind == KVF_COPY_SCORE_PAGE || copy->kind == KVF_COPY_SCORE_OUT || copy->kind == KVF_COPY_SCORE_IN)
        return e;
    for (uint32_t i = 1; i < m->config.n_classes && !kvf__pool_has(e.from, copy->src); i++) e.from++, e.to++;
    return e;
}

static bool is_pending(kvf_manager *m, const kvf_copy *copy) {
    if (copy->kind >= KVF_COPY_KINDS) return false;
    ends e = ends_of(m, copy);
    return kvf__pool_copy_pending(e.from, copy->src, e.to, copy->dst);
}

void kvf__copies_add(kvf_manager *m, kvf_copy_list *copies, kvf_copy_kind kind, uint32_t src, uint32_t dst,
                     uint32_t n_slots) {
    const kvf_copy copy = {kind, src, dst, n_slots};
    ends e = ends_of(m, &copy);
    copies->items[copies->n++] = copy;
    kvf__pool_pin(e.from, src, e.to, dst);
}

kvf_status kvf_copies_done(kvf_manager *manager, kvf_copy_list *copies) {
    if (!manager) return KVF_E_INVALID;
    if (!copies || (copies->n && !copies->items)) return kvf__fail(manager->error, KVF_E_INVALID, "copies: is NULL");
    if (copies->n > copies->capacity)
        return kvf__fail(manager->error, KVF_E_INVALID, "copies: n %u: more than its capacity %u", copies->n,
                         copies->capacity);
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        if (is_pending(manager, c)) {
            kvf__pool_copy_unset(ends_of(manager, c).to,
                                 c->dst); /* so that a second item with the same dst is found not pending */
            continue;
        }
        for (uint32_t j = 0; j < i; j++) {
            const kvf_copy *seen = &copies->items[j];
            ends e = ends_of(manager, seen);
            kvf__pool_copy_set(e.from, seen->src, e.to, seen->dst);
        }
        return kvf__fail(manager->error, KVF_E_STALE, "copies[%u]: kind %u, %u to %u is not pending", i, c->kind,
                         c->src, c->dst);
    }
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        ends e = ends_of(manager, c);
        kvf__pool_unpin(e.from, c->src, e.to, c->dst);
    }
    if (manager->profile) kvf__profile_copied(manager, copies);
    copies->n = 0;
    return KVF_OK;
}

/* ---- Append ---------------------------------------------------------------------------------------- */

/* Three passes over the batch: check all sequences, clear the marks, grow all. The first and the last read and write the
 * tables' figures as arrays. They touch a row only if a block is taken. */

/* What a batch needs: blocks and pages beyond the promises, and copies. freed: blocks that windows drop first and that are
 * not promised again. */
typedef struct need {
    kvf__counts blocks, freed;
    uint64_t pages;
    uint32_t copies;
} need;

/* An append of n_tokens, with the block size as a mask and a shift. */
typedef struct step {
    uint32_t n_tokens, mask, shift;
} step;

static step step_of(const kvf_manager *m, uint32_t n_tokens) {
    return (step){n_tokens, m->config.block_size - 1, m->block_shift};
}
static inline uint32_t blocks_before(step s, uint32_t n_slots) { return (n_slots + s.mask) >> s.shift; }
static inline uint32_t blocks_after(step s, uint32_t n_slots) { return (n_slots + s.n_tokens + s.mask) >> s.shift; }

static kvf_status check_item(const kvf_manager *m, const kvf_append_item *item, uint32_t index) {
    const kvf__seq *s = &m->seqs[index];
    if (!item->n_tokens) return kvf__fail(m->error, KVF_E_INVALID, "append: n_tokens 0: must be 1 or more");
    if (s->n_compacting)
        return kvf__fail(m->error, KVF_E_STATE,
                         "append: a compaction of the sequence is under way; commit or cancel it");
    if (s->swapped) return kvf__fail_swapped(m, "append");
    if (item->n_tokens > UINT32_MAX - s->next_pos)
        return kvf__fail(m->error, KVF_E_LIMIT, "append: n_tokens %u from position %u: positions end at 2^32 - 1",
                         item->n_tokens, s->next_pos);
    return KVF_OK;
}

/* In scratch: a table of the batch leaves the block by a copy, whatever the others do. The copy will pin it, so it does not become free
 * when the last of them drops it. */
#define COPIED (1u << 31)

bool kvf__leaves_shared(const kvf_manager *m, uint32_t t) {
    if (m->tail_at[t] == m->epoch || m->n_slots[t] % m->config.block_size == 0) return false;
    uint32_t id = kvf__row(m, t)[kvf__n_blocks(m, t) - 1];
    return kvf__pool_holders(m->blocks, id) - (m->blocks->entries[id].scratch & ~COPIED) > 1 || kvf__tail_covered(m, t);
}

uint32_t kvf__table_kept(kvf_manager *m, uint32_t t) {
    if (!m->tables[t].growth) return kvf__table_private(m, t);
    return kvf__n_blocks(m, t) - kvf__leaves_shared(m, t);
}

/* The blocks that a table takes if its last block may be shared. */
static uint32_t count_shared(const kvf_manager *m, uint32_t t, step s, need *out) {
    uint32_t n_blocks = blocks_before(s, m->n_slots[t]), blocks = blocks_after(s, m->n_slots[t]) - n_blocks;
    if (!kvf__leaves_shared(m, t)) return blocks;
    uint32_t *scratch = &m->blocks->entries[kvf__row(m, t)[n_blocks - 1]].scratch;
    *scratch = (*scratch + 1) | (kvf__tail_covered(m, t) ? COPIED : 0);
    out->copies++;
    return blocks + 1;
}

/* Clears scratch of the blocks that the tables of a sequence were counted to leave or drop. */
static void clear_scratch(const kvf_manager *m, uint32_t index) {
    uint32_t first = index * m->seq_tables;
    for (uint32_t t = first; m->seqs[index].may_share && t < first + m->seq_tables; t++)
        if (m->n_slots[t] % m->config.block_size)
            m->blocks->entries[kvf__row(m, t)[kvf__n_blocks(m, t) - 1]].scratch = 0;
    for (uint32_t r = 0; m->windowed && m->seqs[index].takes && r < m->n_runs; r++)
        for (uint32_t k = 0; m->runs[r].window && k < m->runs[r].n_tables; k++) {
            uint32_t t = first + m->runs[r].first + k, n = kvf__window_drops(m, m->runs[r].window, m->n_slots[t]);
            for (uint32_t i = 0; i < n; i++) m->blocks->entries[kvf__row(m, t)[i]].scratch = 0;
        }
}

/* The result of one pass over the tables of a sequence. */
typedef struct seen {
    uint32_t longest; /* slots of the longest table */
    uint32_t unknown; /* not 0: a last block may be shared */
    uint32_t taken;   /* not 0: blocks are taken */
    uint64_t beyond;  /* blocks beyond the promises, of one class */
} seen;

static seen look_at_tables(const uint32_t *restrict n_slots, const uint32_t *restrict promise,
                           const uint32_t *restrict tail_at, uint32_t n, uint32_t epoch, step s) {
    uint32_t longest = 0, unknown = 0, taken = 0;
    uint64_t beyond = 0;
    for (uint32_t k = 0; k < n; k++) {
        uint32_t blocks = blocks_after(s, n_slots[k]) - blocks_before(s, n_slots[k]);
        longest = KVF__MAX(longest, n_slots[k]);
        unknown |= tail_at[k] ^ epoch;
        taken |= blocks;
        beyond += blocks > promise[k] ? blocks - promise[k] : 0;
    }
    return (seen){longest, unknown, taken, beyond};
}

/* The same for tables of a window, which drop blocks first. They take as many blocks as without dropping. */
static seen look_at_window(const kvf_manager *m, uint32_t first, const kvf__run *run, step s) {
    seen all = {0, 0, 0, 0};
    for (uint32_t t = first; t < first + run->n_tables; t++) {
        uint32_t n_slots = m->n_slots[t], n_dropped = kvf__window_drops(m, run->window, n_slots);
        all.longest = KVF__MAX(all.longest, n_slots - (n_dropped << s.shift));
        all.unknown |= m->tail_at[t] ^ m->epoch;
        all.taken |= (blocks_after(s, n_slots) - blocks_before(s, n_slots)) | n_dropped;
    }
    return all;
}

static void count_window(const kvf_manager *m, uint32_t first, const kvf__run *run, step s, need *out) {
    for (uint32_t t = first; t < first + run->n_tables; t++) {
        uint32_t blocks = count_shared(m, t, s, out), n_dropped = kvf__window_drops(m, run->window, m->n_slots[t]);
        kvf__dropping d = {0, 0};
        if (n_dropped) d = kvf__window_look(m, t, n_dropped);
        for (uint32_t i = 0; i < n_dropped; i++) m->blocks->entries[kvf__row(m, t)[i]].scratch++;
        out->blocks.of[run->block_class] += kvf__promise_owed(blocks, m->promise[t] + d.promised);
        out->freed.of[run->block_class] += d.freed - d.promised;
    }
}

static seen look_at_runs(const kvf_manager *m, uint32_t first, step s, kvf__counts *beyond) {
    seen all = {0, 0, 0, 0};
    for (uint32_t r = 0; r < m->n_runs; r++) {
        const kvf__run *run = &m->runs[r];
        uint32_t t = first + run->first;
        seen of = run->window
                      ? look_at_window(m, t, run, s)
                      : look_at_tables(m->n_slots + t, m->promise + t, m->tail_at + t, run->n_tables, m->epoch, s);
        all.longest = KVF__MAX(all.longest, of.longest);
        all.unknown |= of.unknown;
        all.taken |= of.taken;
        beyond->of[run->block_class] += of.beyond;
    }
    return all;
}

/* Counts the score pages: those taken, and those beyond the promises. */
static bool count_pages(const kvf_manager *m, size_t first, uint32_t n, step s, uint64_t *beyond) {
    const uint32_t *n_slots = m->n_slots + first, *n_pages = m->n_pages + first, *promise = m->page_promise + first;
    uint32_t taken = 0;
    for (uint32_t k = 0; k < n; k++) {
        uint32_t pages = blocks_after(s, n_slots[k]) - n_pages[k];
        taken |= pages;
        *beyond += pages > promise[k] ? pages - promise[k] : 0;
    }
    return taken != 0;
}

static kvf_status count_item(const kvf_manager *m, const kvf_append_item *item, uint32_t index, need *out) {
    uint32_t first = index * m->seq_tables;
    kvf__seq *seq = &m->seqs[index];
    step s = step_of(m, item->n_tokens);
    kvf__counts beyond = {{0}};
    seen all = look_at_runs(m, first, s, &beyond);
    if (item->n_tokens > m->config.max_slots - all.longest)
        return kvf__fail(m->error, KVF_E_LIMIT, "append: n_tokens %u to a table of %u slots: max_slots is %u",
                         item->n_tokens, all.longest, m->config.max_slots);
    seq->mark = true;
    seq->may_share = all.unknown != 0;
    seq->takes = all.taken != 0;
    seq->longest = all.longest;
    for (uint32_t i = 0; !seq->may_share && i < m->config.n_classes; i++) out->blocks.of[i] += beyond.of[i];
    for (uint32_t r = 0; r < m->n_runs; r++) {
        const kvf__run *run = &m->runs[r];
        if (run->window) {
            count_window(m, first + run->first, run, s, out);
            continue;
        }
        for (uint32_t t = first + run->first, end = t + run->n_tables; seq->may_share && t < end; t++)
            out->blocks.of[run->block_class] += kvf__promise_owed(count_shared(m, t, s, out), m->promise[t]);
        if (seq->has_scores) seq->takes |= count_pages(m, first + run->first, run->n_tables, s, &out->pages);
    }
    return KVF_OK;
}

/* Whether an append only fills last blocks that are not shared, as in most steps. */
static bool fits(const kvf_manager *m, const kvf__seq *seq, uint32_t n_tokens) {
    return seq->known_at == m->epoch && n_tokens <= seq->room && n_tokens <= m->config.max_slots - seq->longest;
}

static kvf_status look_at(const kvf_manager *m, const kvf_append_item *items, uint32_t i, need *out) {
    uint32_t index;
    kvf_status s = kvf__seq_find(m, items[i].seq, &index);
    if (s) return s;
    if (m->seqs[index].mark)
        return kvf__fail(m->error, KVF_E_INVALID, "items[%u]: the sequence is in the batch twice", i);
    s = check_item(m, &items[i], index);
    if (s || !fits(m, &m->seqs[index], items[i].n_tokens)) return s ? s : count_item(m, &items[i], index, out);
    m->seqs[index].mark = true;
    m->seqs[index].may_share = m->seqs[index].takes = false;
    return KVF_OK;
}

static uint64_t lack(uint64_t wanted, const kvf__pool *p, uint64_t freed) {
    return wanted > kvf__pool_spare(p) + freed ? wanted - kvf__pool_spare(p) - freed : 0;
}

/* Whether the tables may hold the blocks that the batch takes. Counts them only if a block more than needed for each table
 * would be too much. */
static kvf_status check_tables(const kvf_manager *m, const kvf_append_item *items, uint32_t n_items) {
    uint64_t most = 0;
    int64_t taken = 0;
    for (uint32_t i = 0; i < n_items; i++)
        if (m->seqs[kvf__seq_index(items[i].seq)].takes)
            most += ((uint64_t)(items[i].n_tokens >> m->block_shift) + 1) * m->seq_tables;
    if (!most || kvf__table_blocks(m) + most <= m->config.n_table_blocks) return KVF_OK;
    for (uint32_t i = 0; i < n_items; i++) {
        step s = step_of(m, items[i].n_tokens);
        for (uint32_t r = 0; r < m->n_runs; r++) {
            const uint32_t *n_slots =
                m->n_slots + (size_t)kvf__seq_index(items[i].seq) * m->seq_tables + m->runs[r].first;
            for (uint32_t k = 0; k < m->runs[r].n_tables; k++) {
                uint32_t n_dropped = kvf__window_drops(m, m->runs[r].window, n_slots[k]);
                taken += (int64_t)blocks_after(s, n_slots[k]) - blocks_before(s, n_slots[k]) - n_dropped;
            }
        }
    }
    return taken > 0 ? kvf__check_table_blocks(m, "append", (uint64_t)taken) : KVF_OK;
}

/* All checks, before anything changes. */
static kvf_status plan(const kvf_manager *m, const kvf_append_item *items, uint32_t n_items, need *n,
                       uint32_t *n_missing) {
    if (n_items && !items) return kvf__fail(m->error, KVF_E_INVALID, "items: is NULL");
    if (n_items > m->config.max_seqs)
        return kvf__fail(m->error, KVF_E_INVALID, "n_items %u: each of a sequence of its own, at most max_seqs %u",
                         n_items, m->config.max_seqs);
    kvf_status s = KVF_OK;
    uint32_t n_marked = 0;
    *n = (need){.copies = 0};
    for (; n_marked < n_items; n_marked++) {
        s = look_at(m, items, n_marked, n);
        if (s) break;
    }
    for (uint32_t i = 0; i < n_marked; i++) {
        clear_scratch(m, kvf__seq_index(items[i].seq));
        m->seqs[kvf__seq_index(items[i].seq)].mark = false;
    }
    if (s) return s;
    uint64_t blocks = 0, pages = lack(n->pages, &m->pages, 0);
    for (uint32_t i = 0; i < m->config.n_classes; i++) blocks += lack(n->blocks.of[i], &m->blocks[i], n->freed.of[i]);
    if (n_missing) *n_missing = (uint32_t)KVF__MIN(KVF__MAX(blocks, pages), UINT32_MAX);
    if (blocks || pages)
        return kvf__fail(m->error, KVF_E_NO_BLOCKS, "append: %llu blocks and %llu score pages are missing",
                         (unsigned long long)blocks, (unsigned long long)pages);
    return check_tables(m, items, n_items);
}

kvf_status kvf_can_append(const kvf_manager *manager, const kvf_append_item *items, uint32_t n_items,
                          uint32_t *n_missing) {
    need n;
    return manager ? plan(manager, items, n_items, &n, n_missing) : KVF_E_INVALID;
}

/* Replaces shared last blocks by fresh ones. After that no last block of the sequence is shared. */
static void leave_shared(kvf_manager *m, uint32_t first, kvf_copy_list *copies) {
    for (uint32_t t = first; t < first + m->seq_tables; t++) {
        if (kvf__leaves_shared(m, t)) {
            uint32_t *last = kvf__row(m, t) + kvf__n_blocks(m, t) - 1, src = *last;
            kvf__pool *p = kvf__pool_at(m, t);
            kvf__pool_take(p, last, 1);
            kvf__promise_use(p, &m->promise[t], 1);
            kvf__copies_add(m, copies, KVF_COPY_BLOCK, src, *last, m->n_slots[t] % m->config.block_size);
            (void)kvf__pool_drop(p, src);
            kvf__row_cut(m, t, kvf__n_blocks(m, t) - 1, UINT32_MAX);
        }
        m->tail_at[t] = m->epoch;
    }
}

static uint32_t count_rows(const uint32_t *restrict n_slots, uint32_t n, step s) {
    uint32_t blocks = 0;
    for (uint32_t k = 0; k < n; k++) blocks += blocks_after(s, n_slots[k]) - blocks_before(s, n_slots[k]);
    return blocks;
}

/* Gives rows room for the blocks that their tables will take. */
static void need_rows(kvf_manager *m, uint32_t first, uint32_t n_tables, step s) {
    const uint32_t *restrict n_slots = m->n_slots + first, *restrict capacity = m->rows.capacity + first;
    uint32_t n_short = 0;
    for (uint32_t k = 0; k < n_tables; k++) n_short += blocks_after(s, n_slots[k]) > capacity[k];
    for (uint32_t k = 0; n_short && k < n_tables; k++)
        kvf__row_need(m, first + k, blocks_after(s, m->n_slots[first + k]));
}

/* Takes blocks for tables of one sequence. A block costs one store to its state and one to its row. */
static void take_rows(kvf_manager *m, kvf__pool *p, uint32_t first, uint32_t n_tables, step s) {
    const uint32_t *restrict top = p->free_ids + p->n_free, *restrict n_slots = m->n_slots + first;
    const uint64_t *restrict at = m->rows.at + first;
    uint32_t *restrict ids = m->rows.ids;
    uint8_t *restrict states = p->states;
    for (uint32_t k = 0; k < n_tables; k++) {
        uint32_t n_blocks = blocks_before(s, n_slots[k]), n = blocks_after(s, n_slots[k]) - n_blocks;
        uint32_t *row = ids + at[k];
        if (n == 1) {
            uint32_t id = top[-1];
            row[n_blocks] = id;
            states[kvf__state_at(id)] = KVF__ROW;
        } else if (n) {
            kvf__pool_take_run(top, states, row + n_blocks, n);
        }
        top -= n;
    }
    p->n_free = (uint32_t)(top - p->free_ids);
}

/* Growing a run of tables updates promises, blocks per layer, maxima per (sequence, layer) and slots, and returns this. */
typedef struct grown {
    uint32_t promised; /* blocks taken that had been promised */
    uint32_t filled;   /* the highest index of a last slot within its block */
} grown;

/* The usual case, one group per layer, in a form that compilers vectorise. Counts of blocks are under 2^31. */
static grown grow_layers(uint32_t *restrict n_slots, uint32_t *restrict promise, uint32_t *restrict layer_blocks,
                         uint32_t *restrict most, uint32_t n, step s) {
    uint32_t promised = 0;
    int32_t filled = 0;
    for (uint32_t l = 0; l < n; l++) {
        uint32_t slots = n_slots[l], now = slots + s.n_tokens;
        int32_t after = (int32_t)blocks_after(s, slots), blocks = after - (int32_t)blocks_before(s, slots);
        int32_t owed = (int32_t)promise[l], used = KVF__MIN(owed, blocks), at = (int32_t)((now - 1) & s.mask);
        n_slots[l] = now;
        promise[l] = (uint32_t)(owed - used);
        layer_blocks[l] += (uint32_t)blocks;
        most[l] = (uint32_t)KVF__MAX((int32_t)most[l], after);
        promised += (uint32_t)used;
        filled = KVF__MAX(filled, at);
    }
    return (grown){promised, (uint32_t)filled};
}

static grown grow_groups(uint32_t *restrict n_slots, uint32_t *restrict promise, uint32_t *restrict layer_blocks,
                         uint32_t *restrict most, uint32_t n, uint32_t n_groups, step s) {
    grown all = {0, 0};
    for (uint32_t l = 0; l < n; l++) {
        uint32_t after = 0;
        for (uint32_t g = 0; g < n_groups; g++, n_slots++, promise++) {
            uint32_t now = blocks_after(s, *n_slots), blocks = now - blocks_before(s, *n_slots);
            uint32_t used = KVF__MIN(*promise, blocks);
            after += now;
            layer_blocks[l] += blocks;
            *promise -= used;
            all.promised += used;
            *n_slots += s.n_tokens;
            all.filled = KVF__MAX(all.filled, (*n_slots - 1) & s.mask);
        }
        most[l] = KVF__MAX(most[l], after);
    }
    return all;
}

/* The tables of a run take the blocks that they need. Returns the highest index of a last slot within its block. */
static uint32_t take_and_grow(kvf_manager *m, kvf__pool *p, uint32_t first, uint32_t n, step s) {
    uint32_t n_groups = m->n_groups, seq_layer = first / n_groups, layer = seq_layer % m->config.n_layers;
    uint32_t *n_slots = m->n_slots + first, *promise = m->promise + first;
    uint32_t *layer_blocks = m->layer_blocks + layer, *most = m->seq_blocks_max + seq_layer;
    if (m->cache.on) kvf__pool_make_room(p, count_rows(n_slots, n, s));
    take_rows(m, p, first, n, s);
    grown all = n_groups == 1 ? grow_layers(n_slots, promise, layer_blocks, most, n, s)
                              : grow_groups(n_slots, promise, layer_blocks, most, n / n_groups, n_groups, s);
    p->n_promised -= all.promised;
    return all.filled;
}

static void take_pages(kvf_manager *m, uint32_t first, uint32_t n_tables, step s) {
    for (uint32_t t = first; t < first + n_tables; t++) {
        uint32_t after = blocks_after(s, m->n_slots[t]), n = after - m->n_pages[t];
        kvf__pool_take(&m->pages, kvf__score_row(m, t) + m->n_pages[t], n);
        kvf__promise_use(&m->pages, &m->page_promise[t], n);
        m->n_pages[t] = after;
    }
}

/* Grows tables within their last blocks. Returns the highest index of a last slot within its block. */
static uint32_t add_slots(uint32_t *restrict n_slots, uint32_t n, step s) {
    uint32_t filled = 0;
    for (uint32_t k = 0; k < n; k++) {
        n_slots[k] += s.n_tokens;
        filled = KVF__MAX(filled, (n_slots[k] - 1) & s.mask);
    }
    return filled;
}

/* Whether the next append may drop blocks, so that it has to look at the tables. */
static bool drops_next(const kvf_manager *m, uint32_t first, const kvf__run *run) {
    uint32_t most = 0;
    for (uint32_t k = 0; k < run->n_tables; k++) most = KVF__MAX(most, m->n_slots[first + k]);
    return kvf__window_drops(m, run->window, most) != 0;
}

static void grow(kvf_manager *m, const kvf_append_item *item, kvf_copy_list *copies) {
    uint32_t index = kvf__seq_index(item->seq), first = index * m->seq_tables;
    kvf__seq *seq = &m->seqs[index];
    step s = step_of(m, item->n_tokens);
    if (seq->may_share) leave_shared(m, first, copies);
    seq->room = s.mask;
    seq->known_at = m->epoch;
    for (uint32_t r = 0; r < m->n_runs; r++) {
        const kvf__run *run = &m->runs[r];
        uint32_t t = first + run->first, n = run->n_tables;
        if (seq->takes) need_rows(m, t, n, s);
        if (seq->takes && seq->has_scores && !run->window) take_pages(m, t, n, s);
        uint32_t filled =
            seq->takes ? take_and_grow(m, &m->blocks[run->block_class], t, n, s) : add_slots(m->n_slots + t, n, s);
        seq->room = KVF__MIN(seq->room, s.mask - filled);
        if (run->window && drops_next(m, t, run)) seq->known_at = 0;
    }
    seq->longest += s.n_tokens;
    seq->next_pos += s.n_tokens;
}

/* Updates the figures of the whole batch. */
static void count_append(kvf_manager *m, const kvf_append_item *items, uint32_t n_items) {
    uint64_t n_slots = 0;
    for (uint32_t i = 0; i < n_items; i++) n_slots += (uint64_t)items[i].n_tokens * m->n_groups;
    for (uint32_t r = 0; r < m->n_runs; r++)
        for (uint32_t l = m->runs[r].first / m->n_groups, n = m->runs[r].n_tables / m->n_groups; n > 0; l++, n--) {
            m->layer_slots[l] += n_slots;
            m->layer_blocks_max[l] = KVF__MAX(m->layer_blocks_max[l], m->layer_blocks[l]);
        }
    for (uint32_t i = 0; i < m->config.n_classes; i++) kvf__pool_note_held(&m->blocks[i]);
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
    for (uint32_t i = 0; manager->windowed && i < n_items; i++) kvf__window_drop(manager, kvf__seq_index(items[i].seq));
    for (uint32_t i = 0; i < n_items; i++) grow(manager, &items[i], copies);
    count_append(manager, items, n_items);
    if (manager->profile) kvf__profile_appended(manager, items, n_items, copies, first_copy);
    return KVF_OK;
}

/* ---- Rollback ---------------------------------------------------------------------------------------- */

/* Shortens a table and promises it again the blocks that it gives up, up to its reservation, so that an append is undone. If
 * the cache covers the slots that were rolled back, the next append copies the last block; that block is promised too. */
static void shrink_table(kvf_manager *m, uint32_t t, uint32_t n_tokens) {
    uint32_t n_slots = m->n_slots[t], n_after = kvf__blocks_for(m, n_slots - n_tokens), n_blocks = kvf__n_blocks(m, t);
    uint32_t n_pages = m->n_pages[t], pages_after = KVF__MIN(n_pages, n_after);
    kvf__pool *p = kvf__pool_at(m, t);
    (void)kvf__pool_trim(p, kvf__row(m, t), n_blocks, n_after, kvf__is_private(m, t));
    (void)kvf__pool_trim(&m->pages, kvf__score_row(m, t), n_pages, pages_after, false);
    kvf__row_cut(m, t, n_after, pages_after);
    m->n_slots[t] -= n_tokens;
    m->n_pages[t] = pages_after;
    kvf__row_fit(m, t, n_after);
    if (!kvf__is_private(m, t)) m->tail_at[t] = 0; /* another block may be the last now */
    uint32_t owed = kvf__promise_owed(m->tables[t].reserve, kvf__table_kept(m, t));
    uint32_t owed_pages = kvf__promise_owed(m->tables[t].page_reserve, pages_after);
    owed = KVF__MIN(owed, m->promise[t] + n_blocks - n_after + kvf__tail_covered(m, t));
    owed_pages = KVF__MIN(owed_pages, m->page_promise[t] + n_pages - pages_after);
    kvf__promise_raise(p, &m->promise[t], owed, kvf__pool_spare(p));
    kvf__promise_raise(&m->pages, &m->page_promise[t], owed_pages, kvf__pool_spare(&m->pages));
    kvf__table_count(m, t, n_slots);
}

/* Moves the sequence's node up to the last one that ends at or before next_pos. */
static void leave_nodes(kvf_manager *m, uint32_t index) {
    const kvf__cache *c = &m->cache;
    uint32_t node = kvf__node_of(c, m->seqs[index].node);
    while (node != KVF__NO_NODE && kvf__node_end(c, node) > m->seqs[index].next_pos) node = c->nodes[node].parent;
    m->seqs[index].node = node == KVF__NO_NODE ? 0 : kvf__node_handle(c, node);
}

/* Every table must have the tokens. A window's table must keep the slots that the next token sees. */
static kvf_status check_rollback(const kvf_manager *m, uint32_t index, uint32_t n_tokens) {
    uint32_t next_pos = m->seqs[index].next_pos;
    for (uint32_t k = 0; k < m->seq_tables; k++) {
        uint32_t n_slots = m->n_slots[index * m->seq_tables + k], window = kvf__window_of(m, k);
        if (window == KVF_LAYER_NONE) continue;
        if (n_tokens > n_slots)
            return kvf__fail(m->error, KVF_E_INVALID, "rollback: n_tokens %u: a table has %u slots", n_tokens, n_slots);
        if (window && n_slots - n_tokens < KVF__MIN(window - 1, next_pos - n_tokens))
            return kvf__fail(m->error, KVF_E_INVALID,
                             "rollback: n_tokens %u: a window of %u has %u slots left and has dropped those before",
                             n_tokens, window, n_slots);
    }
    return KVF_OK;
}

kvf_status kvf_seq_rollback(kvf_manager *manager, kvf_seq seq, uint32_t n_tokens) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    uint32_t first = index * manager->seq_tables, end = first + manager->seq_tables;
    if (manager->seqs[index].n_compacting)
        return kvf__fail(manager->error, KVF_E_STATE,
                         "rollback: a compaction of the sequence is under way; commit or cancel it");
    if (manager->seqs[index].swapped) return kvf__fail_swapped(manager, "rollback");
    s = check_rollback(manager, index, n_tokens);
    if (s) return s;
    for (uint32_t t = first; t < end; t++)
        if (kvf__window_of(manager, t - first) != KVF_LAYER_NONE) shrink_table(manager, t, n_tokens);
    manager->seqs[index].next_pos -= n_tokens;
    manager->seqs[index].known_at = 0;
    if (manager->cache.on) leave_nodes(manager, index);
    if (manager->profile) kvf__profile_seq(manager, index, KVF__CAUSE_ROLLBACK);
    return KVF_OK;
}
