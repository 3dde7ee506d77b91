/* The prefix cache's rules: eviction orders, partial blocks, snapshots, compaction, reservations. */
#include "tests/prefix_util.h"

/* ---- Eviction ------------------------------------------------------------------------------------------------ */

/* Takes blocks until one node has gone; which of n keys lost its first block. */
static uint32_t first_gone(kvf_manager *m, const kvf_prefix_key *keys, uint32_t n) {
    uint64_t evicted = stats(m).evicted;
    while (stats(m).evicted == evicted) OK(kvf_block_take(m, 0, &(kvf_block){0}));
    AUDIT(m);
    cr_assert_eq(stats(m).evicted, evicted + 1);
    for (uint32_t i = 0; i < n; i++)
        if (known(m, keys[i]) == 0) return i;
    return n;
}

Test(prefix_rules, eviction_orders) {
    static const uint32_t wanted[4] = {0, 1, 2, 3}; /* the victim of each order */
    for (uint32_t eviction = 0; eviction < 4; eviction++) {
        kvf_manager *m = make_cache((plan){.blocks = 8, .eviction = eviction});
        kvf_prefix_key keys[4];
        kvf_seq s[4];
        for (int i = 0; i < 4; i++) keys[i] = key(count_from(100 * (uint32_t)(i + 1)), BS + 1);
        static const uint32_t stored[4] = {1, 0, 2, 3}, priority[4] = {7, 7, 7, 3}, hits[4] = {3, 3, 1, 3};
        for (int i = 0; i < 4; i++) {
            kvf_prefix_store_options o = {.struct_size = sizeof o, .priority = priority[stored[i]]};
            s[stored[i]] = new_seq(m);
            OK(append(m, s[stored[i]], BS, NULL));
            OK(kvf_prefix_store(m, s[stored[i]], &keys[stored[i]], BS, &o, NULL));
        }
        for (int i = 0; i < 4; i++)
            for (uint32_t h = 0; h < hits[i]; h++) OK(kvf_seq_free(m, start_hit(m, keys[i], BS)));
        for (int i = 0; i < 4; i++) OK(kvf_seq_free(m, s[i])); /* 0 is idle for the longest */
        AUDIT(m);
        static const uint32_t fifo[4] = {1, 0, 2, 3};
        cr_assert_eq(first_gone(m, keys, 4), eviction == KVF_PREFIX_FIFO ? fifo[0] : wanted[eviction], "order %u",
                     eviction);
        kvf_manager_destroy(m);
    }
}

Test(prefix_rules, lru_order_is_by_idleness) {
    kvf_manager *m = make_cache((plan){.blocks = 4});
    kvf_prefix_key keys[3];
    for (int i = 0; i < 3; i++) {
        keys[i] = key(count_from(100 * (uint32_t)(i + 1)), BS + 1);
        kvf_seq s = new_seq(m);
        OK(append(m, s, BS, NULL));
        store(m, s, keys[i], BS, 0);
        OK(kvf_seq_free(m, s));
    }
    OK(kvf_seq_free(m, start_hit(m, keys[0], BS)));
    cr_assert_eq(first_gone(m, keys, 3), 1);
    cr_assert_eq(first_gone(m, (kvf_prefix_key[]){keys[0], keys[2]}, 2), 1);
    kvf_manager_destroy(m);
}

Test(prefix_rules, the_tail_of_a_chain_goes_before_its_head) {
    for (uint32_t eviction = 0; eviction < 4; eviction++) {
        kvf_manager *m = make_cache((plan){.blocks = 12, .layers = 2, .eviction = eviction});
        kvf_prefix_key k = key(count_from(1), 5 * BS);
        kvf_seq s = new_seq(m);
        for (int i = 0; i < 5; i++) { /* the head is stored first */
            OK(append(m, s, BS, NULL));
            kvf_prefix_store_options o = {.struct_size = sizeof o, .priority = (uint32_t)i};
            OK(kvf_prefix_store(m, s, &k, BS * (uint32_t)(i + 1), &o, NULL));
        }
        OK(kvf_seq_free(m, s));
        for (uint32_t n = 5; n-- > 0;) {
            uint64_t evicted = stats(m).evicted;
            while (stats(m).evicted == evicted) OK(kvf_block_take(m, 0, &(kvf_block){0}));
            AUDIT(m);
            cr_assert_eq(known(m, k), n * BS, "order %u: %u tokens left", eviction, known(m, k));
        }
        kvf_manager_destroy(m);
    }
}

/* A head that is chosen again and again: the descent goes on where it was, so all of it is O(chain). */
Test(prefix_rules, a_long_chain_goes_in_linear_time, .timeout = 30) {
    enum { LONG = 100000 };
    kvf_manager *m = make_cache((plan){.blocks = LONG, .eviction = KVF_PREFIX_FIFO, .slots = LONG * BS, .seqs = 2});
    uint32_t *tokens = calloc(LONG * BS, sizeof *tokens);
    kvf_seq s = run_cold(m, key(tokens, LONG * BS), 0);
    OK(kvf_seq_free(m, s));
    for (int i = 0; i < LONG; i++) OK(kvf_block_take(m, 0, &(kvf_block){0})); /* a minute when it is not */
    cr_assert_eq(stats(m).n_nodes, 0);
    AUDIT(m);
    free(tokens);
    kvf_manager_destroy(m);
}

Test(prefix_rules, a_priority_ends) {
    kvf_manager *m = make_cache((plan){.blocks = 3, .eviction = KVF_PREFIX_PRIORITY});
    kvf_prefix_key keys[2] = {key(count_from(100), BS + 1), key(count_from(200), BS + 1)};
    for (uint32_t i = 0; i < 2; i++) {
        kvf_prefix_store_options o = {.struct_size = sizeof o, .priority = 50 - 10 * i, .duration = 10 + 90 * i};
        kvf_seq s = new_seq(m);
        OK(append(m, s, BS, NULL));
        OK(kvf_prefix_store(m, s, &keys[i], BS, &o, NULL));
        OK(kvf_seq_free(m, s));
    }
    OK(kvf_prefix_tick(m, 9));
    AUDIT(m);
    OK(kvf_prefix_tick(m, 10)); /* the first's 50 are worth 0 now */
    AUDIT(m);
    cr_assert_eq(first_gone(m, keys, 2), 0);
    kvf_manager_destroy(m);
}

/* ---- Partial blocks --------------------------------------------------------------------------------------------- */

Test(prefix_rules, part_of_a_block_is_copied_never_written) {
    kvf_manager *m = make_cache((plan){.blocks = 16, .layers = 2});
    const uint32_t *t = count_from(1);
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf_prefix_match match = {.struct_size = sizeof match};
    list copies;
    o.partial = 1;
    kvf_seq a = run_cold(m, key(t, 2 * BS), 0);
    uint32_t other[BS + 6];
    memcpy(other, t, sizeof other);
    other[BS + 5] = 999;
    kvf_prefix_key k = key(other, BS + 6);
    OK(kvf_prefix_lookup(m, &k, &o, &match));
    cr_assert_eq(match.n_tokens, BS + 5);
    cr_assert_eq(match.n_partial, 5);
    kvf_seq b = new_seq(m);
    OK(kvf_prefix_attach(m, b, &k, &match, NULL, NULL));
    AUDIT(m);
    cr_assert_eq(block(m, b, 0, 1), block(m, a, 0, 1));
    OK(append(m, b, 1, list_of(&copies)));
    cr_assert_eq(copies.list.n, 2);
    cr_assert_eq(copies.items[0].src, block(m, a, 0, 1));
    cr_assert_eq(copies.items[0].dst, block(m, b, 0, 1));
    cr_assert_eq(copies.items[0].n_slots, 5);
    OK(kvf_copies_done(m, &copies.list));
    cr_assert_eq(known(m, key(t, 2 * BS)), 2 * BS);
    AUDIT(m);
    /* Also when nobody else holds it: the cache does. */
    OK(kvf_seq_free(m, a));
    OK(kvf_seq_free(m, b));
    kvf_seq c = new_seq(m);
    OK(kvf_prefix_attach(m, c, &k, &match, NULL, NULL));
    OK(append(m, c, 1, list_of(&copies)));
    cr_assert_eq(copies.list.n, 2);
    cr_assert_eq(idle(m), 0, "pinned by the copy");
    OK(kvf_copies_done(m, &copies.list));
    cr_assert_eq(idle(m), 2);
    cr_assert_eq(known(m, key(t, 2 * BS)), 2 * BS);
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(prefix_rules, a_partial_node_grows_with_its_block) {
    kvf_manager *m = make_cache((plan){.blocks = 16});
    const uint32_t *t = count_from(1);
    kvf_seq s = new_seq(m);
    OK(append(m, s, 3, NULL));
    store(m, s, key(t, 3), 3, KVF_PREFIX_PARTIAL);
    cr_assert_eq(look_for(m, key(t, 3), 3).whole, 1);
    OK(append(m, s, 2, NULL)); /* in place: the node covers what is before */
    cr_assert_eq(blocks(m, s, 0), 1);
    AUDIT(m);
    store(m, s, key(t, 5), 5, KVF_PREFIX_PARTIAL);
    cr_assert_eq(stats(m).n_nodes, 1);
    cr_assert_eq(look_for(m, key(t, 3), 3).whole, 0);
    cr_assert_eq(look_for(m, key(t, 5), 5).whole, 1);
    OK(append(m, s, BS, NULL));
    store(m, s, key(t, BS + 5), BS + 5, 0);
    cr_assert_eq(known(m, key(t, BS + 5)), BS);
    cr_assert_eq(stats(m).n_nodes, 1);
    kvf_manager_destroy(m);
}

Test(prefix_rules, a_rollback_into_a_stored_block_is_followed_by_a_copy) {
    kvf_manager *m = make_cache((plan){.blocks = 16});
    const uint32_t *t = count_from(1);
    list copies;
    uint32_t other[2 * BS];
    kvf_seq s = run_cold(m, key(t, 2 * BS), 0);
    OK(kvf_seq_rollback(m, s, 3));
    AUDIT(m);
    memcpy(other, t, sizeof other);
    other[2 * BS - 2] = 7;
    OK(append(m, s, 3, list_of(&copies)));
    cr_assert_eq(copies.list.n, 1);
    OK(kvf_copies_done(m, &copies.list));
    cr_assert_eq(known(m, key(t, 2 * BS)), 2 * BS);
    store(m, s, key(other, 2 * BS), 2 * BS, 0);
    cr_assert_eq(known(m, key(other, 2 * BS)), 2 * BS);
    cr_assert_eq(stats(m).n_nodes, 3);
    kvf_manager_destroy(m);
}

/* ---- Snapshots --------------------------------------------------------------------------------------------------- */

static kvf_prefix_match with_snapshot(kvf_manager *m, kvf_prefix_key k) {
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf_prefix_match match = {.struct_size = sizeof match};
    o.need_snapshot = 1;
    OK(kvf_prefix_lookup(m, &k, &o, &match));
    return match;
}
static uint32_t put(kvf_manager *m, kvf_seq s, kvf_prefix_key k, uint32_t n, uint32_t flags) {
    uint32_t ids[64], n_pages = 0;
    OK(kvf_prefix_snapshot_put(m, s, &k, n, flags, ids, 64, &n_pages));
    AUDIT(m);
    return n_pages;
}

Test(prefix_rules, a_snapshot_bounds_the_hit) {
    kvf_manager *m = make_cache((plan){.blocks = 32, .snapshot_pages = 16});
    const uint32_t *t = count_from(1);
    kvf_prefix_key k = key(t, 3 * BS + 5);
    kvf_seq s = run_cold(m, k, KVF_PREFIX_PARTIAL);
    cr_assert_eq(with_snapshot(m, k).n_tokens, 0, "blocks, but no snapshot");
    cr_assert_eq(put(m, s, k, BS, 0), 1);
    cr_assert_eq(put(m, s, k, BS, 0), 0, "there already");
    cr_assert_eq(with_snapshot(m, k).n_tokens, BS);
    cr_assert_eq(put(m, s, k, 3 * BS + 5, 0), 4);
    kvf_prefix_match match = with_snapshot(m, k); /* the whole prompt: the last query runs again */
    cr_assert_eq(match.whole, 1);
    cr_assert_eq(match.n_tokens, 3 * BS + 4);
    cr_assert_eq(match.n_snapshot_tokens, 3 * BS + 5);
    cr_assert_eq(match.n_snapshot_pages, 4);
    uint32_t ids[4], n = 0;
    kvf_seq hit = new_seq(m);
    OK(kvf_prefix_attach(m, hit, &k, &match, NULL, NULL));
    OK(kvf_prefix_snapshot_get(m, &match, ids, 4, &n));
    cr_assert_eq(n, 4);
    cr_assert_eq(stats(m).hit_tokens, 3 * BS + 4);
    list copies;
    OK(append(m, hit, 1, list_of(&copies)));
    cr_assert_eq(copies.list.n, 1);
    OK(kvf_copies_done(m, &copies.list));
    cr_assert_eq(with_snapshot(m, key(t, 3 * BS + 6)).n_tokens, BS, "it serves the whole prompt only");
    cr_assert_eq(put(m, s, k, 2 * BS, KVF_SNAPSHOT_WHOLE), 2);
    cr_assert_eq(with_snapshot(m, key(t, 3 * BS)).n_tokens, BS);
    match = with_snapshot(m, key(t, 2 * BS));
    cr_assert_eq(match.n_tokens, 2 * BS - 1);
    cr_assert_eq(match.n_snapshot_tokens, 2 * BS);
    cr_assert_eq(put(m, s, k, 2 * BS, 0), 0, "from now on it serves longer prompts too");
    cr_assert_eq(with_snapshot(m, key(t, 3 * BS)).n_tokens, 2 * BS);
    kvf_prefix_stats now = stats(m);
    cr_assert_eq(now.n_snapshots, 3);
    cr_assert_eq(now.n_snapshot_pages, 7);
    cr_assert_eq(now.snapshot_bytes, 700);
    cr_assert_eq(now.snapshots_put, 3);
    kvf_manager_destroy(m);
}

/* Snapshots of sums, of squares and of log-probabilities: a request finds one that has all it needs, and a page is of one of these. */
Test(prefix_rules, a_snapshot_has_what_it_was_stored_with) {
    enum { SUMS = KVF_SNAPSHOT_SUMS, SQUARES = KVF_SNAPSHOT_SQUARES, LOGPROBS = KVF_SNAPSHOT_LOGPROBS };
    kvf_manager *m = make_cache((plan){.blocks = 32, .snapshot_pages = 16});
    uint32_t ids[64], n = 0;
    kvf_prefix_key k = key(count_from(1), 2 * BS + 3);
    kvf_seq s = run_cold(m, k, 0);
    cr_assert_eq(put(m, s, k, 2 * BS, SUMS), 2);
    kvf_prefix_match old = with_snapshot(m, k);
    static const uint32_t wanted[] = {0, SUMS, SQUARES, SUMS | SQUARES, LOGPROBS, SUMS | SQUARES | LOGPROBS};
    /* What is stored next, and which of `wanted` finds it, a bit each. Another set takes the place of one that lacks something. */
    static const struct {
        uint32_t flags, n_pages, found;
    } then[] = {
        {SUMS, 0, 3}, {SUMS | SQUARES, 4, 15}, {SUMS, 0, 15}, {LOGPROBS, 2, 16}, {SUMS | SQUARES | LOGPROBS, 6, 63}};
    for (size_t i = 0; i < sizeof then / sizeof *then; i++) {
        cr_expect_eq(put(m, s, k, 2 * BS, then[i].flags), then[i].n_pages, "%zu", i);
        for (uint32_t w = 0; w < 6; w++) {
            kvf_prefix_match match = {.struct_size = sizeof match};
            kvf_prefix_options o;
            kvf_prefix_options_init(&o, sizeof o);
            o.need_snapshot = 1, o.snapshot_stats = wanted[w], o.repeat_last = w & 1;
            OK(kvf_prefix_lookup(m, &k, &o, &match));
            bool found = then[i].found >> w & 1;
            cr_expect_eq(match.n_tokens, found ? 2u * BS - (w & 1) : 0u, "%zu, %u", i, w);
            cr_expect_eq(match.n_snapshot_tokens, found ? 2u * BS : 0u, "%zu, %u", i, w);
            if (found) OK(kvf_prefix_snapshot_get(m, &match, ids, 64, &n));
            if (found) cr_expect_eq(n, 2u * (uint32_t)__builtin_popcount(match.snapshot_stats));
        }
        cr_expect_eq(stats(m).n_snapshots, 1);
    }
    FAILS(KVF_E_STALE, kvf_prefix_snapshot_get(m, &old, ids, 64, &n));
    kvf_manager_destroy(m);
}

/* 17 tokens: the last block has one, so the tables stop a block earlier than the snapshot. */
Test(prefix_rules, a_whole_prompt_that_ends_with_one_token_in_a_block) {
    kvf_manager *m = make_cache((plan){.blocks = 32, .snapshot_pages = 16});
    kvf_prefix_key k = key(count_from(1), 2 * BS + 1);
    kvf_seq s = run_cold(m, k, KVF_PREFIX_PARTIAL);
    cr_assert_eq(put(m, s, k, 2 * BS + 1, 0), 3);
    OK(kvf_seq_free(m, s));
    kvf_prefix_match match = with_snapshot(m, k);
    cr_assert_eq(match.n_tokens, 2 * BS);
    cr_assert_eq(match.n_snapshot_tokens, 2 * BS + 1);
    kvf_seq hit = new_seq(m);
    OK(kvf_prefix_attach(m, hit, &k, &match, NULL, NULL));
    cr_assert_eq(blocks(m, hit, 0), 2);
    uint32_t ids[3], n;
    OK(kvf_prefix_snapshot_get(m, &match, ids, 3, &n));
    FAILS(KVF_E_LIMIT, kvf_prefix_snapshot_get(m, &match, ids, 2, &n));
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(prefix_rules, which_snapshots_go) {
    kvf_manager *m = make_cache((plan){.blocks = 64, .snapshot_pages = 6});
    kvf_prefix_key k[4];
    kvf_seq s[4];
    for (uint32_t i = 0; i < 4; i++) {
        k[i] = key(count_from(1000 * (i + 1)), 3 * BS);
        s[i] = run_cold(m, k[i], 0);
    }
    cr_assert_eq(put(m, s[0], k[0], 2 * BS, KVF_SNAPSHOT_KEEP_LONG), 2);
    cr_assert_eq(put(m, s[1], k[1], 2 * BS, 0), 2);
    cr_assert_eq(put(m, s[2], k[2], 2 * BS, 0), 2);
    kvf_prefix_match used = with_snapshot(m, k[1]);
    uint32_t ids[4], n;
    OK(kvf_prefix_snapshot_get(m, &used, ids, 4, &n)); /* used: goes later */
    cr_assert_eq(put(m, s[3], k[3], 2 * BS, 0), 2);
    cr_assert_eq(with_snapshot(m, k[2]).n_tokens, 0, "the longest unused");
    cr_assert_eq(with_snapshot(m, k[1]).n_tokens, 2 * BS);
    FAILS(KVF_E_NO_BLOCKS, kvf_prefix_snapshot_put(m, s[3], &k[3], 3 * BS, 0, ids, 2, &n) == KVF_E_LIMIT
                               ? KVF_E_NO_BLOCKS
                               : KVF_E_INVALID);
    cr_assert_eq(put(m, s[3], k[3], 3 * BS, 0), 3, "both others make room");
    cr_assert_eq(with_snapshot(m, k[0]).n_tokens, 2 * BS, "one that others will share stays");
    kvf_prefix_key longer = key(count_from(5000), 5 * BS);
    kvf_seq big = run_cold(m, longer, 0);
    uint32_t room[8];
    FAILS(KVF_E_NO_BLOCKS, kvf_prefix_snapshot_put(m, big, &longer, 5 * BS, 0, room, 8, &n));
    cr_assert_eq(with_snapshot(m, k[0]).n_tokens, 2 * BS, "all or nothing");
    cr_assert_eq(stats(m).n_snapshots, 2);
    cr_assert_eq(put(m, big, longer, 5 * BS, KVF_SNAPSHOT_KEEP_LONG), 5);
    cr_assert_eq(with_snapshot(m, k[0]).n_tokens, 0);
    /* With its node. */
    OK(kvf_prefix_clear(m));
    cr_assert_eq(stats(m).n_snapshots, 0);
    cr_assert_eq(stats(m).snapshots_evicted, stats(m).snapshots_put);
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* ---- Compaction ---------------------------------------------------------------------------------------------------- */

Test(prefix_rules, a_compaction_leaves_the_cache_alone_when_it_can) {
    for (uint32_t spare = 0; spare < 2; spare++) {
        kvf_manager *m = make_cache((plan){.blocks = 8 + spare * 2, .layers = 2});
        kvf_prefix_key k = key(count_from(1), 4 * BS);
        kvf_seq s = run_cold(m, k, 0);
        kvf_compact_item items[2] = {{s, 0, BS - 1, NULL}, {s, 1, BS - 1, NULL}};
        kvf_compaction c;
        OK(kvf_compact_begin(m, items, 2, &c));
        AUDIT(m);
        cr_assert_eq(c.dst_row[0] != NULL, spare, "fresh blocks when there are enough for all, else in place");
        cr_assert_eq(c.dst_row[1] != NULL, spare);
        OK(kvf_compact_commit(m));
        AUDIT(m);
        cr_assert_eq(known(m, k), spare ? 4 * BS : 0);
        cr_assert_eq(stats(m).removed, spare ? 0 : 4);
        cr_assert_eq(n_free(m) + idle(m), 6 + spare * 2);
        FAILS(KVF_E_STATE, kvf_prefix_store(m, s, &k, BS - 1, NULL, NULL));
        list copies;
        kvf_seq child;
        OK(kvf_seq_fork(m, s, list_of(&copies), &child));
        FAILS(KVF_E_STATE, kvf_prefix_store(m, child, &k, BS - 1, NULL, NULL));
        kvf_manager_destroy(m);
    }
}

Test(prefix_rules, a_compaction_leaves_other_owners_alone) {
    kvf_manager *m = make_cache((plan){.blocks = 8, .layers = 1});
    kvf_prefix_key k = key(count_from(1), 3 * BS + 1);
    kvf_seq a = new_seq(m);
    OK(append(m, a, 3 * BS, NULL));
    store(m, a, k, 3 * BS, 0);
    kvf_seq b = start_hit(m, k, 3 * BS);
    kvf_block taken[4];
    for (int i = 0; i < 4; i++) OK(kvf_block_take(m, 0, &taken[i]));
    dump before, after;
    dump_take(&before, m, (kvf_seq[]){a, b}, 2);
    kvf_compact_item item = {b, 0, BS + 1, NULL};
    kvf_compaction c;
    FAILS(KVF_E_NO_BLOCKS, kvf_compact_begin(m, &item, 1, &c)); /* two fresh blocks, one is free */
    dump_take(&after, m, (kvf_seq[]){a, b}, 2);
    dump_same(&before, &after);
    cr_assert_eq(known(m, k), 3 * BS, "nothing is taken out by a call that fails");
    OK(kvf_block_release(m, taken[0]));
    OK(kvf_compact_begin(m, &item, 1, &c));
    cr_assert_not_null(c.dst_row[0]);
    OK(kvf_compact_commit(m));
    AUDIT(m);
    cr_assert_eq(known(m, k), 3 * BS);
    cr_assert_eq(block(m, a, 0, 0), before.words[3]);
    kvf_manager_destroy(m);
}

Test(prefix_rules, out_of_the_cache_sequence_by_sequence) {
    kvf_manager *m = make_cache((plan){.blocks = 7, .layers = 1});
    kvf_prefix_key ka = key(count_from(1), 3 * BS), kb = key(count_from(500), 3 * BS);
    kvf_seq a = run_cold(m, ka, 0), b = run_cold(m, kb, 0);
    kvf_compact_item items[2] = {{a, 0, BS, NULL}, {b, 0, BS, NULL}};
    kvf_compaction c;
    OK(kvf_compact_begin(m, items, 2, &c)); /* one spare block: a's are taken out, b's stay */
    AUDIT(m);
    cr_assert_null(c.dst_row[0]);
    cr_assert_not_null(c.dst_row[1]);
    OK(kvf_compact_cancel(m));
    AUDIT(m);
    cr_assert_eq(known(m, ka), 0);
    cr_assert_eq(known(m, kb), 3 * BS);
    cr_assert_eq(slots(m, a, 0), 3 * BS);
    kvf_manager_destroy(m);
}

/* Only what an event writes has to leave the cache: a block behind n_keep is read and given up. */
Test(prefix_rules, blocks_behind_the_kept_slots_stay_cached) {
    kvf_manager *m = make_cache((plan){.blocks = 3, .layers = 1});
    const uint32_t *t = count_from(1);
    kvf_seq a = new_seq(m);
    OK(append(m, a, 2 * BS + 2, NULL));
    uint32_t n_stored = 99;
    kvf_prefix_key k = key(t, 2 * BS + 2);
    OK(kvf_prefix_store(m, a, &k, 2 * BS + 2, NULL, &n_stored));
    cr_assert_eq(n_stored, 2);
    compact(m, a, 0, BS);
    cr_assert_eq(known(m, k), 0, "all of a chain goes with its head");
    cr_assert_eq(n_free(m), 2);
    kvf_manager_destroy(m);
}

/* ---- Reservations ---------------------------------------------------------------------------------------------------- */

Test(prefix_rules, what_a_hit_needs_depends_on_the_policy) {
    for (int growth = 0; growth < 2; growth++) {
        kvf_manager *m = make_cache((plan){.blocks = 8});
        kvf_prefix_key k = key(count_from(1), 5 * BS);
        kvf_seq a = new_seq(m), b = new_seq(m);
        OK(append(m, a, 4 * BS, NULL));
        store(m, a, k, 4 * BS, 0);
        kvf_prefix_match hit = look_for(m, k, 0);
        cr_assert_eq(hit.n_idle, 0);
        /* 6 blocks in all: one that evicts may need all of them fresh, one that only grows needs two. */
        if (!growth) {
            FAILS(KVF_E_NO_BLOCKS, attach_as(m, b, k, &hit, 6 * BS, growth));
            OK(attach_as(m, b, k, &hit, 4 * BS, growth));
            cr_assert_eq(occupancy(m).blocks.n_promised, 4);
        } else {
            OK(attach_as(m, b, k, &hit, 6 * BS, growth));
            cr_assert_eq(occupancy(m).blocks.n_promised, 2);
            kvf_seq child;
            list copies;
            OK(kvf_seq_fork(m, b, list_of(&copies), &child));
            cr_assert_eq(occupancy(m).blocks.n_promised, 4);
            OK(append(m, b, 2 * BS, NULL));
            OK(append(m, child, 2 * BS, NULL));
            cr_assert_eq(occupancy(m).blocks.n_promised, 0);
        }
        AUDIT(m);
        kvf_manager_destroy(m);
    }
}

Test(prefix_rules, promises_count_idle_blocks) {
    kvf_manager *m = make_cache((plan){.blocks = 4});
    kvf_prefix_key k = key(count_from(1), 3 * BS + 1);
    kvf_seq a = new_seq(m), b = new_seq(m), c = new_seq(m);
    OK(append(m, a, 3 * BS, NULL));
    store(m, a, k, 3 * BS, 0);
    OK(kvf_seq_free(m, a));
    uint32_t n_slots[1] = {2 * BS};
    OK(kvf_seq_reserve(m, b,
                       &(kvf_reserve){.struct_size = sizeof(kvf_reserve),
                                      .n_slots = n_slots,
                                      .with_scores = 0})); /* 2 of 1 free and 3 idle */
    kvf_prefix_match hit = look_for(m, k, 0);
    FAILS(KVF_E_NO_BLOCKS,
          kvf_prefix_attach(m, c, &k, &hit, NULL, NULL)); /* 3 idle ones would leave 1 for a promise of 2 */
    hit = look_for(m, k, 2 * BS);
    OK(kvf_prefix_attach(m, c, &k, &hit, NULL, NULL));
    OK(append(m, b, 2 * BS, NULL)); /* evicts the last node */
    AUDIT(m);
    cr_assert_eq(stats(m).evicted, 1);
    cr_assert_eq(known(m, k), 2 * BS);
    kvf_manager_destroy(m);
}

Test(prefix_rules, a_hit_uses_the_promise_up) {
    kvf_manager *m = make_cache((plan){.blocks = 4});
    kvf_prefix_key k = key(count_from(1), 2 * BS + 1);
    OK(kvf_seq_free(m, run_cold(m, k, 0)));
    kvf_seq s = new_seq(m);
    uint32_t n_slots[1] = {4 * BS};
    OK(kvf_seq_reserve(m, s, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = n_slots, .with_scores = 0}));
    kvf_prefix_match hit = look_for(m, k, 0);
    OK(kvf_prefix_attach(m, s, &k, &hit, NULL, NULL));
    cr_assert_eq(occupancy(m).blocks.n_promised, 2);
    AUDIT(m);
    OK(append(m, s, 2 * BS, NULL));
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* A covered last block is to be copied: it counts as owed, so the copy never fails. */
Test(prefix_rules, the_copy_of_a_partly_used_block_is_promised) {
    for (int growth = 0; growth < 2; growth++) {
        kvf_manager *m = make_cache((plan){.blocks = 3});
        kvf_prefix_key k = key(count_from(1), 2 * BS);
        OK(kvf_seq_free(m, run_cold(m, k, 0)));
        kvf_prefix_options o;
        kvf_prefix_options_init(&o, sizeof o);
        kvf_prefix_match hit = {.struct_size = sizeof hit};
        o.partial = 1;
        OK(kvf_prefix_lookup(m, &k, &o, &hit));
        cr_assert_eq(hit.n_tokens, 2 * BS - 1);
        kvf_seq s = new_seq(m);
        list copies;
        OK(attach_as(m, s, k, &hit, 2 * BS, growth));
        cr_assert_eq(occupancy(m).blocks.n_promised, 1);
        FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &(kvf_block){0}));
        OK(append(m, s, 1, list_of(&copies)));
        OK(kvf_copies_done(m, &copies.list));
        cr_assert_eq(occupancy(m).blocks.n_promised, 0);
        cr_assert_eq(idle(m), 1);
        AUDIT(m);
        kvf_manager_destroy(m);
    }
}
