/* The audit finds every kind of damage; and what only damage, or 2^32 tokens, can bring about. Looks inside the manager. */
#include "test_blockmgr_util.h"

#include "blockmgr/manager.h"

/* Two sequences that share, a pending copy, score pages, a hold, promises, and a compaction with a fresh row. */
typedef struct scene {
    kvf_manager *m;
    kvf_seq a, b;
    uint32_t ta, tb; /* table indices of layer 0 */
    list l;
} scene;

static void set_up(scene *s) {
    s->m = make((shape){2, 1, 1, 8, 40, 40, 4, 64});
    s->a = new_seq(s->m);
    const uint32_t cover[2] = {20, 20}, reserve[2] = {32, 32};
    kvf_block h;
    OK(append(s->m, s->a, 20, list_of(&s->l)));
    OK(kvf_seq_take_scores(s->m, s->a, cover));
    OK(kvf_seq_reserve(s->m, s->a,
                       &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = reserve, .with_scores = 1}));
    OK(kvf_seq_fork(s->m, s->a, list_of(&s->l), &s->b));
    OK(append(s->m, s->b, 1, &s->l.list));
    OK(kvf_block_hold(s->m, block(s->m, s->a, 0, 1), &h));
    uint32_t ia, ib;
    OK(kvf_seq_index(s->m, s->a, &ia));
    OK(kvf_seq_index(s->m, s->b, &ib));
    s->ta = ia * 2;
    s->tb = ib * 2;
    AUDIT(s->m);
}

static void expect_damage(kvf_manager *m, uint32_t *word, uint32_t value, int i) {
    kvf_error err = {.text = ""};
    uint32_t right = *word;
    cr_assert_neq(right, value, "damage %d is none", i);
    *word = value;
    cr_assert_eq(kvf_audit(m, &err), KVF_E_CORRUPT, "damage %d was not found", i);
    cr_assert_str_not_empty(err.text);
    cr_assert_eq(kvf_audit(m, NULL), KVF_E_CORRUPT);
    *word = right;
    AUDIT(m);
}

Test(blockmgr_audit, every_damage_is_found) {
    static scene s;
    set_up(&s);
    kvf_manager *m = s.m;
    kvf_compaction c;
    const kvf_compact_item item = {s.b, 1, 9, NULL};
    OK(kvf_compact_begin(m, &item, 1, &c));
    cr_assert_not_null(c.dst_row[0]);
    AUDIT(m);
    kvf__pool *p = m->blocks, *pages = &m->pages;
    const uint32_t *row = kvf__row(m, s.ta), *score_row = kvf__score_row(m, s.ta),
                   *last = &s.l.items[s.l.list.n - 1].src;
    uint32_t shared = row[0], unused = p->free_ids[0], src = last[0], dst = last[1];
    cr_assert(*kvf__state(p, shared) == KVF__COUNTED && *kvf__state(p, src) == KVF__COUNTED);
    struct {
        uint32_t *word, value;
    } damage[] = {
        {&p->entries[shared].refs, 1},
        {&p->entries[shared].refs, 3},
        {&p->heads[shared], p->heads[shared] | KVF__ALONE},
        {&p->entries[shared].holds, 1},
        {&p->entries[unused].refs, 1},
        {&p->heads[unused], p->heads[unused] | KVF__ALONE},
        {&p->heads[m->fresh[0]], p->heads[m->fresh[0]] | KVF__ALONE},
        {&p->entries[unused].holds, 1},
        {&p->entries[src].pins, 0},
        {&p->entries[dst].copy_src, unused + 1},
        {&p->entries[dst].copy_src, 1u << 20},
        {&p->entries[dst].copy_src, 0},
        {&pages->entries[score_row[0]].refs, 9},
        {&pages->entries[score_row[0]].copy_src, score_row[1] + 1},
        {&p->free_ids[0], shared},
        {&p->free_ids[0], p->free_ids[1]},
        {&p->free_ids[0], UINT32_MAX},
        {&p->n_free, p->n_free - 1},
        {&p->n_free, 1000},
        {&p->n_promised, 0},
        {&p->n_shared, 0},
        {&p->n_least, p->n - 1},
        {&pages->n_promised, 39},
        {&pages->n_free, 0},
        {&m->n_slots[s.ta], 25},
        {&m->n_slots[s.ta], 1000},
        {&m->n_slots[s.ta], 16},
        {&m->n_pages[s.ta], 2},
        {&m->n_pages[s.ta], 4},
        {&m->promise[s.ta], 5},
        {&m->promise[s.ta], 0},
        {&m->page_promise[s.ta], 0},
        {&m->tables[s.tb].reserve, 1},
        {&m->tables[s.tb].fresh_promise, 2},
        {&m->tables[s.tb + 1].n_fresh, 0},
        {&m->private_at[s.ta], m->epoch},
        {&m->private_at[s.ta], m->epoch + 1},
        {&m->tail_at[s.ta], m->epoch + 1},
        {&m->epoch, 0},
        {&m->seqs[s.ta / 2].known_at, m->epoch},
        {&m->seqs[s.ta / 2].known_at, m->epoch + 1},
        {&kvf__row(m, s.ta)[0], row[1]},
        {&kvf__row(m, s.ta)[0], KVF_NO_BLOCK},
        {&kvf__row(m, s.ta)[5], shared},
        {&kvf__score_row(m, s.ta)[3], 0},
        {&kvf__score_row(m, s.ta)[0], kvf__score_row(m, s.tb)[0]},
        {&m->fresh[0], unused},
        {&m->layer_blocks[0], 1},
        {&m->layer_blocks_max[1], 1},
        {&m->seq_blocks_max[s.ta], 0},
        {&m->n_seqs, 3},
        {&m->n_seqs_max, 1},
        {&m->seqs[s.ta / 2].n_compacting, 1},
        {&m->seqs[s.tb / 2].n_compacting, 0},
        {&m->seqs[s.ta / 2].generation, 0},
        {&m->free_seqs[0], s.ta / 2},
        {&m->tables[(m->free_seqs[0]) * 2].reserve, 1},
    };
    for (size_t i = 0; i < sizeof damage / sizeof damage[0]; i++)
        expect_damage(m, damage[i].word, damage[i].value, (int)i);
    /* Left scratch is reported once and cleared: every call relies on zeros. */
    m->blocks->entries[3].scratch = 1;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    AUDIT(m);
    const struct {
        uint32_t id, state;
    } states[] = {{shared, KVF__ROW}, {shared, KVF__APART},      {shared, 3},
                  {unused, KVF__ROW}, {unused, KVF__COUNTED},    {dst, KVF__ROW},
                  {dst, KVF__APART},  {m->fresh[0], KVF__APART}, {m->fresh[0], KVF__COUNTED}};
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        uint8_t right = *kvf__state(p, states[i].id);
        *kvf__state(p, states[i].id) = (uint8_t)states[i].state;
        FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
        *kvf__state(p, states[i].id) = right;
    }
    m->layer_slots[0]++;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    m->layer_slots[0]--;
    m->seqs[0].mark = true;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    m->seqs[0].mark = false;
    m->seqs[s.ta / 2].alive = false;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    m->seqs[s.ta / 2].alive = true;
    m->tables[s.tb + 1].compacting = false;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    m->tables[s.tb + 1].compacting = true;
    AUDIT(m);
    OK(kvf_compact_cancel(m));
    m->tables[s.tb].compacting = true;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    m->tables[s.tb].compacting = false;
    AUDIT(m);
    FAILS(KVF_E_INVALID, kvf_audit(NULL, NULL));
    kvf_manager_destroy(m);
}

Test(blockmgr_audit, positions_end_at_2_to_the_32) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 8, 8, 2, 64});
    kvf_seq a = new_seq(m);
    m->seqs[0].next_pos = UINT32_MAX - 4;
    FAILS(KVF_E_LIMIT, append(m, a, 5, list_of(&l)));
    OK(append(m, a, 4, list_of(&l)));
    FAILS(KVF_E_LIMIT, append(m, a, 1, list_of(&l)));
    uint32_t pos = 0;
    OK(kvf_seq_next_pos(m, a, &pos));
    cr_assert_eq(pos, UINT32_MAX);
    kvf_manager_destroy(m);
}

/* A private table's compaction does not look at its blocks: a fork and a hold end that, a scan begins it again. */
Test(blockmgr_audit, private_tables_are_not_scanned) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 16, 16, 2, 64});
    kvf_seq a = new_seq(m), b;
    OK(append(m, a, 40, list_of(&l)));
    cr_assert(kvf__is_private(m, 0));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    cr_assert(!kvf__is_private(m, 0) && !kvf__is_private(m, 1));
    compact(m, b, 0, 20);
    cr_assert(kvf__is_private(m, 1)); /* all its blocks are fresh */
    compact(m, a, 0, 30);
    cr_assert(kvf__is_private(m, 0)); /* the scan found nothing */
    kvf_block h;
    OK(kvf_block_hold(m, block(m, a, 0, 0), &h));
    cr_assert(!kvf__is_private(m, 0));
    AUDIT(m);
    compact(m, b, 0, 19);
    cr_assert(kvf__is_private(m, 1)); /* nor does a hold on another's block last */
    OK(kvf_seq_free(m, b));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    OK(kvf_seq_free(m, a));
    OK(kvf_block_release(m, h));
    compact(m, b, 0, 20);
    cr_assert(kvf__is_private(m, 1));
    OK(kvf_block_hold(m, block(m, b, 0, 1), &h));
    cr_assert(!kvf__is_private(m, 1));
    AUDIT(m);
    /* A fresh block that is held before the commit. */
    kvf_compaction c;
    const kvf_compact_item item = {b, 0, 8, NULL};
    OK(kvf_compact_begin(m, &item, 1, &c));
    kvf_block h2;
    OK(kvf_block_hold(m, c.dst_row[0][0], &h2));
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert(!kvf__is_private(m, 1));
    kvf_manager_destroy(m);
}

/* An append looks at a last block that a fork or a hold may have given another holder, once; then it knows. */
Test(blockmgr_audit, last_blocks_are_looked_at_once) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 16, 16, 2, 64});
    kvf_seq a = new_seq(m), b;
    OK(append(m, a, 20, list_of(&l)));
    cr_assert_eq(m->tail_at[0], m->epoch);
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    cr_assert(m->tail_at[0] != m->epoch && m->tail_at[1] != m->epoch);
    m->tail_at[1] = m->epoch;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    m->tail_at[1] = 0;
    OK(append(m, b, 1, &l.list));
    OK(append(m, a, 1, &l.list));
    cr_assert_eq(l.list.n, 1u); /* the last holder writes in place */
    cr_assert(m->tail_at[0] == m->epoch && m->tail_at[1] == m->epoch);
    AUDIT(m);
    kvf_block h; /* on a block that a copy pins, with one holder */
    OK(kvf_block_hold(m, block(m, b, 0, 2), &h));
    cr_assert(m->tail_at[0] != m->epoch && m->tail_at[1] != m->epoch);
    OK(append(m, b, 1, &l.list));
    cr_assert_eq(l.list.n, 2u);
    cr_assert_neq(block(m, b, 0, 2), kvf_block_id(h));
    AUDIT(m);
    OK(kvf_copies_done(m, &l.list));
    uint32_t epoch = m->epoch;
    OK(kvf_block_hold(m, kvf_block_id(h), &h)); /* no table has it */
    cr_assert_eq(m->epoch, epoch);
    OK(kvf_seq_rollback(m, b, 8)); /* its last block is one that it shares */
    cr_assert(m->tail_at[1] != m->epoch);
    OK(append(m, b, 1, &l.list));
    cr_assert_eq(l.list.n, 1u);
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* After 2^32 holds the numbers begin again, and nothing that was noted before counts. */
Test(blockmgr_audit, epochs_wrap) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 16, 16, 2, 64});
    kvf_seq a = new_seq(m);
    OK(append(m, a, 20, list_of(&l)));
    expect_damage(m, &m->seqs[0].room, 5, 100);
    expect_damage(m, &m->seqs[0].longest, 19, 101);
    cr_assert(m->epoch == 1 && m->seqs[0].known_at == 1 && m->seqs[0].room == 4 && m->seqs[0].longest == 20);
    m->epoch = UINT32_MAX;
    kvf_block h;
    OK(kvf_block_hold(m, block(m, a, 0, 2), &h));
    cr_assert_eq(m->epoch, 1u);
    AUDIT(m);
    OK(append(m, a, 1, &l.list));
    cr_assert_eq(l.list.n, 1u);
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* Generations wrap around and skip 0. */
Test(blockmgr_audit, generations_wrap) {
    kvf_manager *m = make((shape){1, 1, 1, 8, 4, 4, 1, 64});
    m->seqs[0].generation = (1u << 28) - 1;
    m->blocks->heads[0] = ~KVF__ALONE;
    kvf_seq a = new_seq(m);
    OK(kvf_seq_free(m, a));
    kvf_seq b = new_seq(m);
    cr_assert(b != 0 && a != b && m->seqs[0].generation == 1);
    kvf_block x, y;
    OK(kvf_block_take(m, 0, &x));
    OK(kvf_block_release(m, x));
    OK(kvf_block_take(m, 0, &y));
    cr_assert(kvf_block_id(x) == kvf_block_id(y) && x != y);
    FAILS(KVF_E_STALE, kvf_block_release(m, x));
    OK(kvf_block_hold(m, 0, &x));
    m->blocks->entries[0].refs = UINT32_MAX; /* 2^32 holders are refused */
    FAILS(KVF_E_LIMIT, kvf_block_hold(m, 0, &x));
    m->blocks->entries[0].refs = 2;
    AUDIT(m);
    kvf_manager_destroy(m);
}
