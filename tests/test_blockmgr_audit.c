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
    OK(kvf_seq_reserve(s->m, s->a, reserve, 1));
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
    kvf_error err = {""};
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
    const kvf_compact_item item = {s.b, 1, 9};
    OK(kvf_compact_begin(m, &item, 1, &c));
    cr_assert_not_null(c.dst_row[0]);
    AUDIT(m);
    kvf__table *a = &m->tables[s.ta], *b = &m->tables[s.tb];
    uint32_t shared = kvf__row(m, s.ta)[0], unused = m->blocks.free_ids[0], src = s.l.items[s.l.list.n - 1].src;
    uint32_t dst = s.l.items[s.l.list.n - 1].dst;
    struct {
        uint32_t *word, value;
    } damage[] = {
        {&m->blocks.entries[shared].refs, 1},
        {&m->blocks.entries[shared].refs, 3},
        {&m->blocks.entries[shared].holds, 1},
        {&m->blocks.entries[unused].refs, 1},
        {&m->blocks.entries[src].pins, 0},
        {&m->blocks.entries[dst].copy_src, unused},
        {&m->blocks.entries[dst].copy_src, 1u << 20},
        {&m->blocks.entries[dst].copy_src, KVF_NO_BLOCK},
        {&m->pages.entries[kvf__score_row(m, s.ta)[0]].refs, 9},
        {&m->pages.entries[kvf__score_row(m, s.ta)[0]].copy_src, kvf__score_row(m, s.ta)[1]},
        {&m->blocks.free_ids[0], shared},
        {&m->blocks.free_ids[0], m->blocks.free_ids[1]},
        {&m->blocks.free_ids[0], UINT32_MAX},
        {&m->blocks.n_free, m->blocks.n_free - 1},
        {&m->blocks.n_free, 1000},
        {&m->blocks.n_promised, 0},
        {&m->blocks.n_shared, 0},
        {&m->blocks.n_held_max, 1},
        {&m->pages.n_promised, 39},
        {&m->pages.n_free, 0},
        {&a->n_slots, 25},
        {&a->n_slots, 1000},
        {&a->n_blocks, 2},
        {&a->n_pages, 2},
        {&a->n_pages, 4},
        {&a->blocks.promise, 5},
        {&a->blocks.promise, 0},
        {&a->pages.promise, 0},
        {&b->blocks.reserve, 1},
        {&b->fresh_promise, 2},
        {&m->tables[s.tb + 1].n_fresh, 0},
        {&kvf__row(m, s.ta)[0], kvf__row(m, s.ta)[1]},
        {&kvf__row(m, s.ta)[0], KVF_NO_BLOCK},
        {&kvf__row(m, s.ta)[5], shared},
        {&kvf__score_row(m, s.ta)[3], 0},
        {&kvf__score_row(m, s.ta)[0], kvf__score_row(m, s.tb)[0]},
        {&m->fresh[0], unused},
        {&m->layers[0].n_blocks, 1},
        {&m->layers[1].n_blocks_max, 1},
        {&m->seq_layers[s.ta].n_blocks, 1},
        {&m->seq_layers[s.ta].n_blocks_max, 0},
        {&m->n_seqs, 3},
        {&m->n_seqs_max, 1},
        {&m->seqs[s.ta / 2].n_compacting, 1},
        {&m->seqs[s.tb / 2].n_compacting, 0},
        {&m->seqs[s.ta / 2].generation, 0},
        {&m->free_seqs[0], s.ta / 2},
        {&m->tables[(m->free_seqs[0]) * 2].blocks.reserve, 1},
    };
    for (size_t i = 0; i < sizeof damage / sizeof damage[0]; i++)
        expect_damage(m, damage[i].word, damage[i].value, (int)i);
    /* Left scratch is reported once and cleared: every call relies on zeros. */
    m->blocks.entries[3].scratch = 1;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    AUDIT(m);
    a->maybe_shared = false;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    a->maybe_shared = true;
    m->layers[0].slots_used++;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    m->layers[0].slots_used--;
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
    b->compacting = true;
    FAILS(KVF_E_CORRUPT, kvf_audit(m, NULL));
    b->compacting = false;
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

/* A private table's compaction does not look at its blocks: the flag is set by fork and hold, and a scan clears it. */
Test(blockmgr_audit, private_tables_are_not_scanned) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 16, 16, 2, 64});
    kvf_seq a = new_seq(m), b;
    OK(append(m, a, 40, list_of(&l)));
    cr_assert(!m->tables[0].maybe_shared);
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    cr_assert(m->tables[0].maybe_shared && m->tables[1].maybe_shared);
    compact(m, b, 0, 20);
    cr_assert(!m->tables[1].maybe_shared); /* all its blocks are fresh */
    compact(m, a, 0, 30);
    cr_assert(!m->tables[0].maybe_shared); /* the scan found nothing */
    kvf_block h;
    OK(kvf_block_hold(m, block(m, a, 0, 0), &h));
    cr_assert(m->tables[0].maybe_shared && !m->tables[1].maybe_shared);
    OK(kvf_seq_free(m, b));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    OK(kvf_seq_free(m, a));
    OK(kvf_block_release(m, h));
    compact(m, b, 0, 20);
    cr_assert(!m->tables[1].maybe_shared);
    OK(kvf_block_hold(m, block(m, b, 0, 1), &h)); /* the blocks know their table again */
    cr_assert(m->tables[1].maybe_shared);
    AUDIT(m);
    /* A fresh block that is held before the commit. */
    kvf_compaction c;
    const kvf_compact_item item = {b, 0, 8};
    OK(kvf_compact_begin(m, &item, 1, &c));
    kvf_block h2;
    OK(kvf_block_hold(m, c.dst_row[0][0], &h2));
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert(m->tables[1].maybe_shared);
    kvf_manager_destroy(m);
}

/* Generations wrap around and skip 0. */
Test(blockmgr_audit, generations_wrap) {
    kvf_manager *m = make((shape){1, 1, 1, 8, 4, 4, 1, 64});
    m->seqs[0].generation = (1u << 28) - 1;
    m->blocks.entries[0].generation = UINT32_MAX;
    kvf_seq a = new_seq(m);
    OK(kvf_seq_free(m, a));
    kvf_seq b = new_seq(m);
    cr_assert(b != 0 && a != b && m->seqs[0].generation == 1);
    kvf_block x, y;
    OK(kvf_block_take(m, &x));
    OK(kvf_block_release(m, x));
    OK(kvf_block_take(m, &y));
    cr_assert(kvf_block_id(x) == kvf_block_id(y) && x != y);
    FAILS(KVF_E_STALE, kvf_block_release(m, x));
    m->blocks.entries[0].refs = UINT32_MAX; /* 2^32 holders are refused */
    FAILS(KVF_E_LIMIT, kvf_block_hold(m, 0, &x));
    m->blocks.entries[0].refs = 1;
    AUDIT(m);
    kvf_manager_destroy(m);
}
