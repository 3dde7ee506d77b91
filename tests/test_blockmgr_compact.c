/* The block manager, behaviour by behaviour: compaction, reservations, score pages, view, occupancy. */
#include "test_blockmgr_util.h"

/* ---- Compaction ----------------------------------------------------------------------------------------------- */

Test(blockmgr_compact, compaction_leaves_exactly_what_is_needed) {
    static list l;
    for (uint32_t bs = 8; bs <= 256; bs *= 2)
        for (uint32_t per_group = 1; per_group <= 3; per_group += 2) { /* groups of 1 head, of all heads */
            uint32_t groups = 3 / per_group, n_tables = 4 * groups, full = 10 * n_tables;
            kvf_manager *m = make((shape){4, 3, per_group, bs, full, full, 4, 10 * bs});
            kvf_seq a = new_seq(m), b = new_seq(m);
            OK(append(m, a, 10 * bs, list_of(&l)));
            FAILS(KVF_E_NO_BLOCKS, append(m, b, 1, list_of(&l)));
            const uint32_t keep[4] = {1, bs, bs + 1, 7 * bs - 1};
            kvf_compact_item items[4];
            uint32_t held = 0;
            for (uint32_t i = 0; i < 4; i++) {
                items[i] = (kvf_compact_item){a, i, keep[i], NULL};
                held += (keep[i] + bs - 1) / bs * groups;
            }
            kvf_compaction c;
            OK(kvf_compact_begin(m, items, 4, &c));
            cr_assert(c.items == items && c.n_items == 4 && c.n_groups == groups);
            for (uint32_t t = 0; t < n_tables; t++) cr_assert_null(c.dst_row[t]);
            AUDIT(m);
            OK(kvf_compact_commit(m));
            AUDIT(m);
            for (uint32_t i = 0; i < 4; i++)
                for (uint32_t g = 0; g < groups; g++) {
                    uint32_t n_slots, n_blocks;
                    OK(kvf_seq_table(m, a, i, g, &n_slots, &n_blocks, NULL));
                    cr_assert(n_slots == keep[i] && n_blocks == (keep[i] + bs - 1) / bs);
                }
            cr_assert_eq(n_free(m), full - held);
            /* At once another sequence has what fell free. */
            uint32_t fits = (full - held) / n_tables * bs;
            OK(append(m, b, fits, list_of(&l)));
            cr_assert_eq(n_free(m), (full - held) % n_tables);
            kvf_layer_occupancy lo[4];
            OK(kvf_seq_occupancy(m, a, lo, sizeof *lo));
            for (uint32_t i = 0; i < 4; i++)
                cr_assert(lo[i].n_blocks_max == 10 * groups && lo[i].slots_used == (uint64_t)keep[i] * groups &&
                          lo[i].slots_idle == (uint64_t)lo[i].n_blocks * bs - lo[i].slots_used);
            uint32_t pos = 0;
            OK(kvf_seq_next_pos(m, a, &pos));
            cr_assert_eq(pos, 10 * bs);
            AUDIT(m);
            kvf_manager_destroy(m);
        }
}

static void table_is(const kvf_manager *m, kvf_seq seq, uint32_t group, uint32_t want_slots, uint32_t want_blocks) {
    uint32_t n_slots, n_blocks;
    OK(kvf_seq_table(m, seq, 0, group, &n_slots, &n_blocks, NULL));
    cr_assert(n_slots == want_slots && n_blocks == want_blocks, "group %u: %u slots, %u blocks", group, n_slots,
              n_blocks);
}

Test(blockmgr_compact, each_group_of_a_layer_keeps_a_number_of_its_own) {
    static list l;
    kvf_manager *m = make((shape){1, 3, 1, 8, 30, 30, 4, 64});
    kvf_seq a = new_seq(m), b;
    OK(append(m, a, 24, list_of(&l)));
    uint32_t keep[3] = {3, 24, 17};
    kvf_compact_item item = {a, 0, 0, keep};
    kvf_compaction c;
    OK(kvf_compact_begin(m, &item, 1, &c));
    keep[0] = 99; /* it has been read */
    cr_assert(!c.dst_row[0] && !c.dst_row[1] && !c.dst_row[2]);
    AUDIT(m);
    OK(kvf_compact_commit(m));
    AUDIT(m);
    table_is(m, a, 0, 3, 1);
    table_is(m, a, 1, 24, 3);
    table_is(m, a, 2, 17, 3);
    cr_assert_eq(n_free(m), 23);
    const uint32_t bad[4][3] = {{3, 24, 17}, {0, 9, 9}, {4, 9, 9}, {2, 25, 9}}; /* nothing shrinks, none, grow */
    for (size_t i = 0; i < 4; i++) {
        item.n_keep_group = bad[i];
        FAILS(KVF_E_INVALID, kvf_compact_begin(m, &item, 1, &c));
    }
    item = (kvf_compact_item){a, 0, 3, NULL}; /* all of the first group's */
    FAILS(KVF_E_INVALID, kvf_compact_begin(m, &item, 1, &c));
    /* Of shared tables those that shrink take fresh blocks; one that stays goes on sharing. */
    OK(append(m, a, 1, list_of(&l)));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    const uint32_t more[3] = {4, 10, 9};
    item = (kvf_compact_item){b, 0, 0, more};
    uint32_t before = n_free(m);
    OK(kvf_compact_begin(m, &item, 1, &c));
    cr_assert(!c.dst_row[0] && c.dst_row[1] && c.dst_row[2] && n_free(m) == before - 4);
    AUDIT(m);
    OK(kvf_compact_cancel(m));
    cr_assert_eq(n_free(m), before);
    OK(kvf_compact_begin(m, &item, 1, &c));
    OK(kvf_compact_commit(m));
    AUDIT(m);
    table_is(m, a, 1, 25, 4);
    table_is(m, b, 0, 4, 1);
    table_is(m, b, 1, 10, 2);
    table_is(m, b, 2, 9, 2);
    cr_assert_eq(block(m, a, 0, 0), block(m, b, 0, 0));
    kvf_manager_destroy(m);
}

Test(blockmgr_compact, compaction_of_shared_tables_takes_fresh_blocks) {
    static list l;
    kvf_manager *m = make((shape){2, 1, 1, 8, 10, 10, 4, 64});
    kvf_seq a = new_seq(m), b;
    OK(append(m, a, 24, list_of(&l)));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    OK(append(m, b, 1, list_of(&l))); /* private tail blocks are no targets */
    kvf_compaction c;
    const kvf_compact_item items[2] = {{b, 1, 9, NULL}, {b, 0, 3, NULL}};
    uint32_t old = block(m, b, 0, 0);
    FAILS(KVF_E_NO_BLOCKS, kvf_compact_begin(m, items, 2, &c)); /* 3 fresh, 2 free */
    AUDIT(m);
    OK(kvf_compact_begin(m, &items[0], 1, &c));
    cr_assert(c.dst_row[0] && c.dst_row[0][0] != c.dst_row[0][1] && n_free(m) == 0);
    AUDIT(m);
    FAILS(KVF_E_STATE, append(m, b, 1, list_of(&l)));
    FAILS(KVF_E_STATE, kvf_seq_rollback(m, b, 1));
    FAILS(KVF_E_STATE, kvf_seq_fork(m, b, list_of(&l), &a));
    FAILS(KVF_E_STATE, kvf_compact_begin(m, &items[1], 1, &c));
    OK(kvf_compact_cancel(m));
    cr_assert(n_free(m) == 2 && slots(m, b, 1) == 25 && block(m, b, 0, 0) == old);
    AUDIT(m);
    OK(kvf_compact_begin(m, &items[0], 1, &c));
    uint32_t fresh0 = c.dst_row[0][0], fresh1 = c.dst_row[0][1];
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert(block(m, b, 1, 0) == fresh0 && block(m, b, 1, 1) == fresh1 && slots(m, a, 1) == 24);
    cr_assert_eq(n_free(m), 1); /* only its own tail block fell free */
    OK(kvf_seq_free(m, a));     /* layer 1's three blocks fall free, layer 0's go to b alone */
    OK(kvf_compact_begin(m, &items[1], 1, &c));
    cr_assert_null(c.dst_row[0]); /* private again: in place */
    OK(kvf_seq_free(m, b));       /* cancels */
    FAILS(KVF_E_STATE, kvf_compact_commit(m));
    AUDIT(m);
    cr_assert_eq(n_free(m), 10);
    kvf_manager_destroy(m);
}

Test(blockmgr_compact, of_several_owners_the_last_stays_in_place) {
    static list l;
    kvf_manager *m = make((shape){1, 2, 1, 8, 16, 16, 4, 64});
    kvf_seq s[3] = {new_seq(m), 0, 0};
    OK(append(m, s[0], 24, list_of(&l)));
    OK(kvf_seq_fork(m, s[0], list_of(&l), &s[1]));
    OK(kvf_seq_fork(m, s[1], list_of(&l), &s[2]));
    const kvf_compact_item items[3] = {{s[2], 0, 10, NULL}, {s[0], 0, 4, NULL}, {s[1], 0, 17, NULL}};
    kvf_compaction c;
    OK(kvf_compact_begin(m, items, 3, &c));
    cr_assert(c.dst_row[0] && c.dst_row[1] && c.dst_row[2] && c.dst_row[3] && !c.dst_row[4] && !c.dst_row[5]);
    AUDIT(m);
    cr_assert_eq(n_free(m), 16 - 6 - 2 * 2 - 2 * 1);
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert_eq(n_free(m), 16 - 2 * (2 + 1 + 3));
    cr_assert_eq(occupancy(m).blocks.n_shared, 0);
    OK(kvf_compact_begin(m, (kvf_compact_item[]){{s[2], 0, 1, NULL}, {s[1], 0, 1, NULL}}, 2, &c));
    for (int t = 0; t < 4; t++) cr_assert_null(c.dst_row[t]);
    OK(kvf_compact_commit(m));
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(blockmgr_compact, compaction_does_not_write_a_pinned_block) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 8, 8, 4, 64});
    kvf_seq a = new_seq(m), b;
    OK(append(m, a, 13, list_of(&l)));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    OK(append(m, b, 1, list_of(&l)));
    OK(kvf_seq_free(m, b)); /* a is the only holder, but the copy still reads its last block */
    kvf_compaction c;
    const kvf_compact_item item = {a, 0, 8, NULL};
    OK(kvf_compact_begin(m, &item, 1, &c));
    cr_assert_not_null(c.dst_row[0]);
    OK(kvf_compact_cancel(m));
    OK(kvf_copies_done(m, &l.list));
    OK(kvf_compact_begin(m, &item, 1, &c));
    cr_assert_null(c.dst_row[0]);
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert_eq(n_free(m), 7);
    kvf_manager_destroy(m);
}

/* ---- Reservations ------------------------------------------------------------------------------------------------ */

Test(blockmgr_compact, growth_within_a_reservation_never_fails) {
    static list l;
    kvf_manager *m = make((shape){2, 1, 1, 8, 12, 12, 4, 96});
    kvf_seq a = new_seq(m), b = new_seq(m);
    const uint32_t r[2] = {24, 32};
    kvf_block h;
    OK(kvf_seq_reserve(m, a,
                       &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 0})); /* 3 + 4 */
    cr_assert_eq(occupancy(m).blocks.n_promised, 7);
    OK(append(m, b, 16, list_of(&l))); /* 4 of the 5 others */
    FAILS(KVF_E_NO_BLOCKS, append(m, b, 1, list_of(&l)));
    OK(kvf_block_take(m, 0, &h));
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &h)); /* the rest is promised */
    for (int i = 0; i < 24; i++) {
        OK(append(m, a, 1, list_of(&l)));
        AUDIT(m);
    }
    cr_assert(n_free(m) == 1 && occupancy(m).blocks.n_promised == 1);
    FAILS(KVF_E_NO_BLOCKS, append(m, a, 1, list_of(&l))); /* layer 0 is beyond its reservation */
    /* After a compaction the reservation stands again, with what fell free. */
    compact(m, a, 0, 8);
    compact(m, a, 1, 1);
    cr_assert(n_free(m) == 5 && occupancy(m).blocks.n_promised == 5);
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &h));
    OK(append(m, a, 16, list_of(&l)));
    OK(kvf_seq_rollback(m, a, 9)); /* and after a rollback */
    cr_assert_eq(n_free(m), occupancy(m).blocks.n_promised);
    OK(append(m, a, 9, list_of(&l)));
    /* Lowered, what is promised is given back; raised, it must be there. */
    const uint32_t low[2] = {8, 8}, high[2] = {96, 96}, none[2] = {0, 0};
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = low, .with_scores = 0}));
    cr_assert_eq(occupancy(m).blocks.n_promised, 0);
    FAILS(KVF_E_NO_BLOCKS,
          kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = high, .with_scores = 0}));
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 0}));
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = none, .with_scores = 0}));
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 0}));
    OK(kvf_seq_free(m, a)); /* drops its promises */
    cr_assert_eq(occupancy(m).blocks.n_promised, 0);
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(blockmgr_compact, a_fork_is_promised_the_whole_reservation) {
    static list l;
    kvf_manager *m = make((shape){2, 1, 1, 8, 13, 13, 4, 64});
    kvf_seq a = new_seq(m), b = 0, c;
    const uint32_t r[2] = {24, 0};
    OK(append(m, a, 20, list_of(&l)));
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 0}));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    cr_assert_eq(occupancy(m).blocks.n_promised, 3); /* layer 0's; layer 1 has no reservation */
    OK(kvf_seq_fork(m, b, list_of(&l), &c));
    cr_assert_eq(occupancy(m).blocks.n_promised, 6);
    kvf_block h;
    OK(kvf_block_take(m, 0, &h));
    kvf_seq d = 0;
    FAILS(KVF_E_NO_BLOCKS, kvf_seq_fork(m, b, list_of(&l), &d)); /* 6 free, 6 promised */
    cr_assert_eq(d, 0);
    OK(kvf_seq_free(m, c));
    /* The child compacts with its promise while nobody else could take a block. */
    kvf_block rest[3];
    for (int i = 0; i < 3; i++) OK(kvf_block_take(m, 0, &rest[i]));
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &h));
    kvf_compaction k;
    const kvf_compact_item item = {b, 0, 17, NULL};
    OK(kvf_compact_begin(m, &item, 1, &k));
    cr_assert_eq(occupancy(m).blocks.n_promised, 0);
    OK(kvf_compact_cancel(m)); /* gives the promise back */
    cr_assert_eq(occupancy(m).blocks.n_promised, 3);
    AUDIT(m);
    OK(kvf_compact_begin(m, &item, 1, &k));
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert(blocks(m, b, 0) == 3 && blocks(m, a, 0) == 3 && n_free(m) == 0);
    kvf_manager_destroy(m);
}

Test(blockmgr_compact, reserving_during_a_compaction_counts_fresh_blocks) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 12, 12, 4, 64});
    kvf_seq a = new_seq(m), b;
    OK(append(m, a, 24, list_of(&l)));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    const kvf_compact_item item = {b, 0, 16, NULL};
    const uint32_t r[1] = {32}, small[1] = {8};
    kvf_compaction k;
    OK(kvf_compact_begin(m, &item, 1, &k));
    OK(kvf_seq_reserve(m, b, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 0}));
    cr_assert_eq(occupancy(m).blocks.n_promised, 2);
    AUDIT(m);
    OK(kvf_compact_cancel(m));
    cr_assert_eq(occupancy(m).blocks.n_promised, 4);
    OK(kvf_compact_begin(m, &item, 1, &k));
    OK(kvf_seq_reserve(m, b, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = small, .with_scores = 0}));
    AUDIT(m);
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert(occupancy(m).blocks.n_promised == 0 && blocks(m, b, 0) == 2);
    kvf_manager_destroy(m);
}

/* ---- Score pages ---------------------------------------------------------------------------------------------------- */

static uint32_t score_pages(kvf_manager *m, kvf_seq seq, uint32_t layer) {
    kvf_view v = {.struct_size = sizeof v};
    uint32_t n = 0;
    OK(kvf_view_fill(m, 0, &seq, 1, &v));
    while (n < 8 && v.score_rows[v.row_offset[layer] + n] != KVF_NO_BLOCK) n++;
    return n;
}

Test(blockmgr_compact, score_pages_follow_the_blocks) {
    static list l, k;
    static dump before, after;
    kvf_manager *m = make((shape){2, 1, 1, 8, 32, 12, 4, 64});
    kvf_seq a = new_seq(m), b = 0;
    const uint32_t cover[2] = {24, 9}, too_many[2] = {8, 33}, r[2] = {40, 24}, r_small[2] = {24, 16};
    OK(append(m, a, 32, list_of(&l)));
    FAILS(KVF_E_INVALID, kvf_seq_take_scores(m, a, too_many));
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r_small, .with_scores = 1}));
    cr_assert_eq(occupancy(m).score_pages.n_promised, 5);
    OK(kvf_seq_take_scores(m, a, cover));
    cr_assert(occupancy(m).score_pages.n_promised == 0 && score_pages(m, a, 0) == 3 && score_pages(m, a, 1) == 2);
    FAILS(KVF_E_STATE, kvf_seq_take_scores(m, a, cover));
    compact(m, a, 1, 9);
    compact(m, a, 0, 12);
    cr_assert(score_pages(m, a, 0) == 2 && score_pages(m, a, 1) == 2);
    OK(append(m, a, 8, list_of(&l))); /* 20 and 17 slots */
    cr_assert(score_pages(m, a, 0) == 3 && score_pages(m, a, 1) == 3);
    OK(kvf_seq_reserve(
        m, a,
        &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 1})); /* 5 + 3 pages, 6 held */
    cr_assert_eq(occupancy(m).score_pages.n_promised, 2);
    dump_take(&before, m, &a, 1);
    FAILS(KVF_E_NO_BLOCKS, kvf_seq_fork(m, a, list_of(&l), &b)); /* wants 8 pages, 4 are to be had */
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r_small, .with_scores = 1}));
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 1}));
    dump_take(&after, m, &a, 1);
    dump_same(&before, &after);
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = r, .with_scores = 0}));
    cr_assert_eq(occupancy(m).score_pages.n_promised, 0);
    kvf_copy five[5];
    kvf_copy_list small = {five, 0, 5};
    FAILS(KVF_E_LIMIT, kvf_seq_fork(m, a, &small, &b));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    cr_assert(l.list.n == 6 && b);
    for (uint32_t i = 0; i < 6; i++) {
        cr_assert(l.items[i].kind == KVF_COPY_SCORE_PAGE && l.items[i].src != l.items[i].dst);
        cr_assert_eq(l.items[i].n_slots, i == 2 ? 4u : i == 5 ? 1u : 8u);
    }
    AUDIT(m);
    OK(kvf_seq_free(m, a)); /* its pages stay out until the copies are done */
    cr_assert_eq(occupancy(m).score_pages.n_free, 0);
    FAILS(KVF_E_NO_BLOCKS, append(m, b, 8, list_of(&k)));
    kvf_append_item item = {b, 8};
    uint32_t missing = 0;
    FAILS(KVF_E_NO_BLOCKS, kvf_can_append(m, &item, 1, &missing));
    cr_assert_eq(missing, 2);
    OK(kvf_copies_done(m, &l.list));
    cr_assert_eq(occupancy(m).score_pages.n_free, 6);
    OK(append(m, b, 8, list_of(&l)));
    OK(kvf_seq_rollback(m, b, 28 - 9));
    cr_assert(score_pages(m, b, 0) == 2 && score_pages(m, b, 1) == 1);
    OK(kvf_seq_free(m, b));
    AUDIT(m);
    cr_assert_eq(occupancy(m).score_pages.n_free, 12);
    kvf_manager_destroy(m);
}

/* ---- View and occupancy ------------------------------------------------------------------------------------------------ */

Test(blockmgr_compact, the_view_addresses_every_table) {
    static list l;
    for (uint32_t per_group = 1; per_group <= 4; per_group *= 4) {
        uint32_t groups = 4 / per_group;
        kvf_manager *m = make((shape){3, 4, per_group, 8, 128, 128, 4, 48});
        kvf_seq s[2] = {new_seq(m), new_seq(m)};
        OK(append(m, s[0], 9, list_of(&l)));
        OK(append(m, s[1], 30, list_of(&l)));
        compact(m, s[1], 2, 17);
        kvf_view v[2];
        const kvf_seq swapped[2] = {s[1], s[0]};
        v[0].struct_size = sizeof v[0];
        OK(kvf_view_fill(m, 0, s, 2, &v[0]));
        v[1].struct_size = sizeof v[1];
        OK(kvf_view_fill(m, 1, swapped, 2, &v[1]));
        cr_assert(v[0].rows == v[1].rows && v[0].n_slots != v[1].n_slots && v[0].row_offset != v[1].row_offset);
        for (int w = 0; w < 2; w++) {
            cr_assert(v[w].n_seqs == 2 && v[w].n_layers == 3 && v[w].n_groups == groups && v[w].block_size == 8);
            cr_assert(v[w].heads_per_group == per_group && v[w].struct_size == sizeof v[w]);
            for (uint32_t t = 0; t < 2 * 3 * groups; t++) {
                kvf_seq seq = w ? swapped[t / (3 * groups)] : s[t / (3 * groups)];
                uint32_t n_slots, n_blocks;
                const uint32_t *row;
                OK(kvf_seq_table(m, seq, t / groups % 3, t % groups, &n_slots, &n_blocks, &row));
                cr_assert(v[w].rows + v[w].row_offset[t] == row && v[w].n_slots[t] == n_slots);
                for (uint32_t b = 0; b < 6; b++) cr_assert_eq(row[b] == KVF_NO_BLOCK, b >= n_blocks);
                for (uint32_t b = 0; b < 6; b++) cr_assert_eq(v[w].score_rows[v[w].row_offset[t] + b], KVF_NO_BLOCK);
            }
        }
        uint32_t index;
        OK(kvf_seq_index(m, s[1], &index));
        cr_assert(v[0].seq_index[1] == index && v[1].seq_index[0] == index && v[0].next_pos[1] == 30);
        OK(append(m, s[0], 1, list_of(&l))); /* rows follow, counts are those of the fill */
        cr_assert_eq(v[0].n_slots[0], 9);
        kvf_manager_destroy(m);
    }
}

Test(blockmgr_compact, occupancy_counts_what_is_held) {
    static list l;
    kvf_manager *m = make((shape){2, 1, 1, 8, 20, 20, 4, 64});
    kvf_seq a = new_seq(m), b;
    kvf_layer_occupancy layers[2];
    OK(append(m, a, 20, list_of(&l)));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    OK(append(m, b, 1, list_of(&l)));
    OK(kvf_copies_done(m, &l.list));
    kvf_occupancy o = {.struct_size = sizeof o};
    OK(kvf_occupancy_read(m, &o, layers, sizeof *layers));
    cr_assert(o.blocks.n_total == 20 && o.blocks.n_held == 8 && o.blocks.n_free == 12 && o.blocks.n_shared == 4);
    cr_assert(o.slots_used == 82 && o.slots_idle == 14 && o.held_bytes == 8000 && o.n_seqs == 2);
    cr_assert(layers[1].n_blocks == 6 && layers[1].slots_used == 41 && layers[1].slots_idle == 7);
    compact(m, b, 1, 3);
    OK(kvf_seq_free(m, a));
    OK(kvf_occupancy_read(m, &o, layers, sizeof *layers));
    cr_assert(o.blocks.n_held == 4 && o.blocks.n_held_max == 9 && o.blocks.n_shared == 0 && o.held_bytes_max == 9000);
    cr_assert(o.n_seqs == 1 && o.n_seqs_max == 2 && layers[1].n_blocks == 1 && layers[1].n_blocks_max == 6);
    struct {
        kvf_occupancy o;
        uint64_t later;
    } longer = {{.struct_size = sizeof longer}, 5};
    OK(kvf_occupancy_read(m, &longer.o, NULL, 0));
    cr_assert(longer.later == 5 && longer.o.struct_size == sizeof longer && longer.o.slots_used == 24);
    kvf_occupancy shorter = {.struct_size = offsetof(kvf_occupancy, n_seqs), .n_seqs = 99};
    OK(kvf_occupancy_read(m, &shorter, NULL, 0));
    cr_assert(shorter.n_seqs == 99 && shorter.blocks.n_held == 4);
    kvf_manager_destroy(m);
}

/* ---- Two managers ---------------------------------------------------------------------------------------------------------- */

Test(blockmgr_compact, two_managers_are_strangers) {
    static list l, k;
    kvf_manager *m = make((shape){1, 1, 1, 8, 4, 4, 2, 32}), *n = make((shape){2, 1, 1, 16, 4, 4, 2, 32});
    kvf_seq a = new_seq(m), b = new_seq(n);
    OK(append(m, a, 12, list_of(&l)));
    OK(append(n, b, 12, list_of(&k)));
    FAILS(KVF_E_STALE, append(n, a, 1, list_of(&k)));
    cr_assert_str_eq(kvf_manager_error(m)->text, "");
    cr_assert_str_not_empty(kvf_manager_error(n)->text);
    OK(kvf_seq_free(m, a));
    cr_assert(n_free(m) == 4 && n_free(n) == 2);
    kvf_manager_destroy(m);
    AUDIT(n);
    kvf_manager_destroy(n);
}
