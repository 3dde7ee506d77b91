/* The host tier, case by case: sequences swapped out and in, over a device whose copies run late. */
#include "tier_world.h"

Test(tier, a2_each_tier_counts_its_own_blocks) {
    kvf_manager *m = make_tiers((shape){1, 1, 1, 8, 2, 2, 4, 64}, 2, 0);
    list l;
    kvf_copy_list *copies = list_of(&l);
    kvf_seq old = 0;
    for (int i = 0; i < 10; i++) {
        kvf_seq s = new_seq(m);
        OK(append(m, s, 16, copies));
        expect_tiers(m, 2, old ? 2 : 0);
        FAILS(KVF_E_NO_BLOCKS, append(m, s, 1, copies));
        if (old) { /* the host is full */
            FAILS(KVF_E_NO_BLOCKS, kvf_swap_out(m, &s, 1, copies));
            FAILS(KVF_E_NO_BLOCKS, kvf_swap_in(m, &old, 1, 0, copies));
            expect_tiers(m, 2, 2);
            OK(kvf_seq_free(m, old));
            expect_tiers(m, 2, 0);
        }
        OK(kvf_swap_out(m, &s, 1, copies));
        expect_tiers(m, 2, 2); /* the copies hold the blocks here */
        cr_assert_eq(copies->n, 2);
        OK(kvf_copies_done(m, copies));
        expect_tiers(m, 0, 2);
        FAILS(KVF_E_STATE, kvf_swap_out(m, &s, 1, copies)); /* never its own victim */
        if (i % 2) {
            OK(kvf_swap_in(m, &s, 1, 0, copies));
            expect_tiers(m, 2, 2);
            OK(kvf_copies_done(m, copies));
            expect_tiers(m, 2, 0);
            OK(kvf_swap_out(m, &s, 1, copies));
            OK(kvf_copies_done(m, copies));
        }
        old = s;
    }
    OK(kvf_seq_free(m, old));
    expect_tiers(m, 0, 0);
    kvf_manager_destroy(m);
}

Test(tier, c5_forks_with_little_or_no_host_room) {
    for (uint32_t host = 0; host < 5; host++) {
        kvf_manager *m = make_tiers((shape){1, 1, 1, 8, 4, 4, 4, 64}, host, 0);
        list l;
        kvf_copy_list *copies = list_of(&l);
        kvf_seq a = new_seq(m), b = 0, other = new_seq(m);
        OK(append(m, a, 16, copies));
        OK(kvf_seq_fork(m, a, copies, &b));
        OK(append(m, a, 1, copies)); /* two shared, one own each */
        OK(append(m, b, 1, copies));
        expect_tiers(m, 4, 0);
        FAILS(KVF_E_NO_BLOCKS, append(m, other, 1, copies));
        const kvf_seq both[] = {a, b};
        if (host < 4) { /* refused; the group can still be computed again */
            FAILS(KVF_E_NO_BLOCKS, kvf_swap_out(m, both, 2, copies));
            expect_tiers(m, 4, 0);
            cr_assert_eq(copies->n, 0);
            OK(kvf_seq_rollback(m, a, 1));
            OK(kvf_seq_rollback(m, b, 1));
            expect_tiers(m, 2, 0);
            OK(kvf_seq_rollback(m, a, 8)); /* a shared block from one of them: nothing falls free */
            expect_tiers(m, 2, 0);
            OK(kvf_seq_rollback(m, b, 8));
            expect_tiers(m, 1, 0);
        } else { /* what they share goes out once, and comes back shared */
            OK(kvf_swap_out(m, both, 2, copies));
            cr_assert_eq(copies->n, 4);
            OK(kvf_copies_done(m, copies));
            expect_tiers(m, 0, 4);
            OK(append(m, other, 1, copies));
            FAILS(KVF_E_NO_BLOCKS, kvf_swap_in(m, both, 2, 0, copies));
            expect_tiers(m, 1, 4);
            OK(kvf_swap_in(m, both, 1, 0, copies)); /* one alone: copies of its own */
            expect_tiers(m, 4, 4);
            OK(kvf_copies_done(m, copies));
            expect_tiers(m, 4, 3);
            OK(kvf_seq_free(m, a));
            OK(kvf_seq_free(m, b));
            expect_tiers(m, 1, 0);
        }
        OK(append(m, other, 1, copies));
        kvf_manager_destroy(m);
    }
}

Test(tier, a_group_shares_again_when_it_is_back) {
    kvf_manager *m = make_tiers((shape){2, 1, 1, 8, 16, 16, 4, 64}, 12, 12);
    list l;
    kvf_copy_list *copies = list_of(&l);
    kvf_seq a = new_seq(m), b = 0;
    const uint32_t four[2] = {32, 32};
    OK(append(m, a, 20, copies));
    OK(kvf_seq_fork(m, a, copies, &b)); /* 3 a layer, the last one partly filled and shared */
    const kvf_seq both[] = {a, b};
    OK(kvf_seq_reserve(m, b, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = four, .with_scores = 0}));
    cr_assert_eq(occupancy(m).blocks.n_promised, 8);
    OK(kvf_swap_out(m, both, 2, copies));
    OK(kvf_copies_done(m, copies));
    expect_tiers(m, 0, 6);
    cr_assert_eq(occupancy(m).blocks.n_promised, 0);
    kvf_block taken[5];
    for (int i = 0; i < 5; i++) OK(kvf_block_take(m, 0, &taken[i]));
    FAILS(KVF_E_NO_BLOCKS, kvf_swap_in(m, both, 2, 0, copies)); /* its reservation has no room */
    for (int i = 0; i < 5; i++) OK(kvf_block_release(m, taken[i]));
    OK(kvf_block_take(m, 0, &taken[0]));
    FAILS(KVF_E_NO_BLOCKS, kvf_swap_in(m, both, 2, 1, copies)); /* 6 to hold, 8 promised to b, 2 for a's next token */
    OK(kvf_block_release(m, taken[0]));
    OK(kvf_swap_in(m, both, 2, 1, copies));
    cr_assert_eq(occupancy(m).blocks.n_promised, 8);
    OK(kvf_swap_out(m, both, 2, copies)); /* back before it has come in */
    AUDIT(m);
    OK(kvf_copies_done(m, copies));
    OK(kvf_seq_free(m, b));
    OK(kvf_swap_in(m, &a, 1, 1, copies));
    expect_tiers(m, 6, 6);
    OK(kvf_copies_done(m, copies));
    expect_tiers(m, 6, 0);
    OK(kvf_seq_fork(m, a, copies, &b));
    const kvf_seq again[] = {b, a};
    OK(kvf_swap_out(m, again, 2, copies));
    OK(kvf_swap_in(m, again, 2, 1, copies)); /* before it has gone out; in new blocks, since the old ones are pinned */
    expect_tiers(m, 12, 6);
    OK(kvf_copies_done(m, copies));
    expect_tiers(m, 6, 0);
    cr_assert_eq(occupancy(m).blocks.n_shared, 6);
    cr_assert_eq(block(m, a, 1, 2), block(m, b, 1, 2));
    OK(append(m, a, 1, copies));
    cr_assert_eq(copies->n, 2); /* it leaves the shared ones */
    expect_tiers(m, 8, 0);
    kvf_manager_destroy(m);
}

/* A world of one layer, by hand. */
static void one_layer(world *w, uint32_t n_blocks, uint32_t host) {
    memset(w, 0, sizeof *w);
    w->rng = w->seed = 0x51ed27;
    w->op = "";
    w->m = make_tiers((shape){1, 1, 1, BS, n_blocks, n_blocks, 4, SLOTS}, host, 0);
    for (int i = 0; i < 2; i++) w->lists[i] = (kvf_copy_list){w->items[i], 0, COPIES_MAX};
    memset(w->mem, 0xff, sizeof w->mem); /* NaN */
}

static void fill(world *w, kvf_seq s, uint32_t value) {
    uint32_t id = block(w->m, s, 0, 0);
    for (uint32_t i = 0; i < BS; i++) w->mem[0][KV][id][i] = value;
}

Test(tier, c6_a_block_is_not_reused_while_a_copy_reads_it) {
    world *w = malloc(sizeof *w);
    cr_assert_not_null(w);
    one_layer(w, 2, 2);
    kvf_seq a = new_seq(w->m), b = new_seq(w->m), c = new_seq(w->m);
    OK(append(w->m, a, BS, NULL));
    fill(w, a, 1);
    uint32_t five = block(w->m, a, 0, 0);
    OK(kvf_swap_out(w->m, &a, 1, &w->lists[0]));
    note_copies(w, 0, 0);
    OK(append(w->m, b, BS, NULL));
    fill(w, b, 2);
    cr_assert_neq(block(w->m, b, 0, 0), five);
    FAILS(KVF_E_NO_BLOCKS, append(w->m, c, BS, NULL)); /* the block is there when the copy is done, not before */
    flush(w);
    FAILS(KVF_E_NO_BLOCKS, append(w->m, c, BS, NULL));
    done(w, 0);
    AUDIT(w->m);
    OK(append(w->m, c, BS, NULL));
    cr_assert_eq(block(w->m, c, 0, 0), five);
    fill(w, c, 3);
    OK(kvf_seq_free(w->m, b));
    OK(kvf_swap_in(w->m, &a, 1, 0, &w->lists[0]));
    note_copies(w, 0, 0);
    done(w, 0);
    for (uint32_t i = 0; i < BS; i++) {
        cr_assert_eq(read_slot(w, KV, block(w->m, a, 0, 0), i), 1);
        cr_assert_eq(read_slot(w, KV, block(w->m, c, 0, 0), i), 3);
    }
    kvf_manager_destroy(w->m);
    free(w);
}

Test(tier, c6_mirror_a_block_is_not_reused_while_a_copy_writes_it) {
    world *w = malloc(sizeof *w);
    cr_assert_not_null(w);
    one_layer(w, 2, 1);
    kvf_seq a = new_seq(w->m), b = new_seq(w->m), c = new_seq(w->m), d = new_seq(w->m);
    OK(append(w->m, a, BS, NULL));
    fill(w, a, 1);
    OK(kvf_swap_out(w->m, &a, 1, &w->lists[0]));
    note_copies(w, 0, 0);
    done(w, 0);
    OK(append(w->m, b, BS, NULL));
    fill(w, b, 2);
    OK(kvf_swap_in(w->m, &a, 1, 0, &w->lists[0]));
    note_copies(w, 0, 0);
    uint32_t three = block(w->m, a, 0, 0);
    OK(kvf_seq_free(w->m, a)); /* aborted while its block is loaded */
    expect_tiers(w->m, 2, 1);
    FAILS(KVF_E_NO_BLOCKS, append(w->m, c, BS, NULL));
    FAILS(KVF_E_NO_BLOCKS, kvf_swap_out(w->m, &b, 1, &w->lists[1])); /* nor is the host's block free */
    done(w, 0);
    expect_tiers(w->m, 1, 0);
    OK(append(w->m, c, BS, NULL));
    cr_assert_eq(block(w->m, c, 0, 0), three); /* back once */
    fill(w, c, 3);
    flush(w);
    cr_assert_eq(read_slot(w, KV, three, 0), 3);
    FAILS(KVF_E_NO_BLOCKS, append(w->m, d, BS, NULL));
    FAILS(KVF_E_STALE, kvf_swap_in(w->m, &a, 1, 0, &w->lists[0]));
    kvf_manager_destroy(w->m);
    free(w);
}

Test(tier, a_swapped_sequence_is_refused_and_may_be_freed) {
    kvf_manager *m = make_tiers((shape){2, 1, 1, 8, 16, 16, 4, 64}, 8, 8);
    list l;
    kvf_copy_list *copies = list_of(&l), none = {NULL, 0, 0};
    kvf_seq a = new_seq(m), b = new_seq(m), child = 0;
    const uint32_t full[2] = {20, 20}, two[2] = {16, 16};
    int swapped = 7;
    OK(append(m, a, 20, copies));
    OK(append(m, b, 8, copies));
    OK(kvf_seq_take_scores(m, a, full));
    compact(m, a, 0, 5); /* 1 block in layer 0, 3 in layer 1 */
    FAILS(KVF_E_LIMIT, kvf_swap_out(m, &a, 1, &none));
    FAILS(KVF_E_INVALID, kvf_swap_out(m, (kvf_seq[]){a, b, a}, 3, copies));
    FAILS(KVF_E_STALE, kvf_swap_out(m, (kvf_seq[]){b, 12345}, 2, copies));
    FAILS(KVF_E_INVALID, kvf_swap_out(m, NULL, 1, copies));
    FAILS(KVF_E_STATE, kvf_swap_in(m, &a, 1, 0, copies));
    kvf_compact_item item = {a, 1, 4, NULL};
    kvf_compaction c;
    OK(kvf_compact_begin(m, &item, 1, &c));
    FAILS(KVF_E_STATE, kvf_swap_out(m, &a, 1, copies));
    OK(kvf_compact_cancel(m));
    cr_assert_eq(copies->n, 0);
    OK(kvf_swap_out(m, &a, 1, copies));
    cr_assert_eq(copies->n, 8); /* at its compressed size: 4 blocks and as many score pages */
    cr_assert_eq(copies->items[0].n_slots, 5);
    kvf_occupancy o = occupancy(m);
    cr_assert_eq(o.host_blocks.n_held, 4);
    cr_assert_eq(o.host_score_pages.n_held, 4);
    cr_assert_eq(o.n_swapped, 1);
    kvf_view v = {.struct_size = sizeof v};
    FAILS(KVF_E_STATE, append(m, a, 1, copies));
    FAILS(KVF_E_STATE, kvf_seq_rollback(m, a, 0));
    FAILS(KVF_E_STATE, kvf_seq_fork(m, a, copies, &child));
    FAILS(KVF_E_STATE,
          kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = two, .with_scores = 0}));
    FAILS(KVF_E_STATE, kvf_seq_take_scores(m, a, two));
    FAILS(KVF_E_STATE, kvf_view_fill(m, 0, (kvf_seq[]){b, a}, 2, &v));
    FAILS(KVF_E_STATE, kvf_compact_begin(m, &item, 1, &c));
    FAILS(KVF_E_LIMIT, kvf_swap_in(m, &a, 1, 0, &none));
    uint32_t pos = 0;
    OK(kvf_seq_next_pos(m, a, &pos));
    cr_assert_eq(pos, 20);
    OK(kvf_seq_is_swapped(m, a, &swapped));
    cr_assert_eq(swapped, 1);
    OK(kvf_seq_free(m, a)); /* its copies are still pending: nothing falls free */
    o = occupancy(m);
    cr_assert_eq(o.host_blocks.n_held, 4);
    cr_assert_eq(o.blocks.n_held, 6);
    AUDIT(m);
    kvf_copy twice = copies->items[0];
    kvf_copy_list bad = {&twice, 1, 1};
    twice.kind = KVF_COPY_BLOCK;
    FAILS(KVF_E_STALE, kvf_copies_done(m, &bad));
    twice.kind = 99;
    FAILS(KVF_E_STALE, kvf_copies_done(m, &bad));
    copies->items[7].dst ^= 1;
    FAILS(KVF_E_STALE, kvf_copies_done(m, copies));
    copies->items[7].dst ^= 1;
    AUDIT(m);
    OK(kvf_copies_done(m, copies));
    expect_tiers(m, 2, 0);
    cr_assert_eq(occupancy(m).host_score_pages.n_held, 0);
    kvf_manager_config config = config_of((shape){1, 1, 1, 8, 4, 4, 4, 64});
    kvf_manager *none_made = NULL;
    config.n_host_blocks = UINT32_C(1) << 31;
    FAILS(KVF_E_INVALID, kvf_manager_create(&config, &none_made, NULL));
    config.n_host_blocks = 0;
    config.n_host_score_pages = 3;
    FAILS(KVF_E_INVALID, kvf_manager_create(&config, &none_made, NULL));
    kvf_manager_destroy(m);
}
