/* The prefix cache: field reports by name, then the rules of prefix.h one by one. */
#include "tests/prefix_util.h"

/* ---- Field reports ---------------------------------------------------------------------------------------- */

Test(prefix, a1_reused_cached_block_is_queued_once) {
    kvf_manager *m = make_cache((plan){.blocks = 3});
    kvf_prefix_key a = key(count_from(1), BS), longer = key(a.tokens, BS + 1);
    OK(kvf_seq_free(m, run_cold(m, a, 0)));
    uint32_t id = KVF_NO_BLOCK;
    for (int i = 0; i < 2; i++) { /* take the reference and give it back, twice */
        kvf_seq s = start_hit(m, longer, BS);
        id = block(m, s, 0, 0);
        cr_assert_eq(occupancy(m).blocks.n_held, 1);
        OK(kvf_seq_free(m, s));
        AUDIT(m);
        cr_assert_eq(n_free(m) + idle(m) + occupancy(m).blocks.n_held, 3);
        cr_assert_eq(n_free(m), 2);
        cr_assert_eq(idle(m), 1);
    }
    kvf_seq s = start_hit(m, longer, BS); /* while it is referenced it is never handed out */
    kvf_block taken[3];
    for (int i = 0; i < 2; i++) {
        OK(kvf_block_take(m, 0, &taken[i]));
        cr_assert_neq(kvf_block_id(taken[i]), id);
    }
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &taken[2]));
    OK(kvf_seq_free(m, s));
    OK(kvf_block_take(m, 0, &taken[2]));
    cr_assert_eq(kvf_block_id(taken[2]), id);
    AUDIT(m);
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &taken[0]));
    cr_assert_eq(stats(m).evicted, 1);
    kvf_manager_destroy(m);
}

Test(prefix, b1_refused_request_pins_nothing) {
    for (int growth = 0; growth < 2; growth++) {
        kvf_manager *m = make_cache((plan){.blocks = 6});
        kvf_prefix_key a = key(count_from(1), 2 * BS), c = key(a.tokens, 5 * BS), d = key(a.tokens, 2 * BS + 1);
        kvf_seq sa = run_cold(m, a, 0);
        uint32_t a0 = block(m, sa, 0, 0), a1 = block(m, sa, 0, 1);
        OK(kvf_seq_free(m, sa));
        kvf_seq b = new_seq(m);
        OK(append(m, b, 2 * BS, NULL));
        cr_assert_eq(n_free(m), 2);
        cr_assert_eq(idle(m), 2);
        kvf_prefix_match hit = look_for(m, c, 0);
        cr_assert_eq(hit.n_tokens, 2 * BS);
        cr_assert_eq(hit.n_idle, 2);
        kvf_seq sc = new_seq(m), sd = new_seq(m);
        dump before, after;
        dump_take(&before, m, (kvf_seq[]){b, sc}, 2);
        kvf_prefix_stats counted = stats(m);
        for (int i = 0; i < 3; i++) FAILS(KVF_E_NO_BLOCKS, attach_as(m, sc, c, &hit, 5 * BS, growth));
        dump_take(&after, m, (kvf_seq[]){b, sc}, 2);
        dump_same(&before, &after);
        kvf_prefix_stats now = stats(m);
        cr_assert_eq(memcmp(&counted, &now, sizeof now), 0, "a refused request is not counted");
        AUDIT(m);
        hit = look_for(m, d, 0);
        OK(attach_as(m, sd, d, &hit, 2 * BS + 1, growth));
        cr_assert_eq(block(m, sd, 0, 0), a0);
        cr_assert_eq(block(m, sd, 0, 1), a1);
        cr_assert_eq(occupancy(m).blocks.n_promised, 1);
        OK(append(m, sd, 1, NULL)); /* its own hits are no victims */
        cr_assert_eq(block(m, sd, 0, 0), a0);
        cr_assert_eq(block(m, sd, 0, 1), a1);
        cr_assert_eq(known(m, a), 2 * BS);
        cr_assert_eq(stats(m).hits, 1);
        AUDIT(m);
        kvf_manager_destroy(m);
    }
}

Test(prefix, b2_evicted_block_is_not_found_under_its_old_content) {
    kvf_manager *m = make_cache((plan){.blocks = 2});
    kvf_prefix_key a = key(count_from(1), BS), b = key(count_from(100), 2 * BS);
    OK(kvf_seq_free(m, run_cold(m, a, 0)));
    cr_assert_eq(known(m, a), BS);
    kvf_seq sb = new_seq(m);
    OK(append(m, sb, 2 * BS, NULL));
    cr_assert_eq(known(m, a), 0, "as soon as another owns the block");
    store(m, sb, b, 2 * BS, 0);
    OK(kvf_seq_free(m, sb));
    cr_assert_eq(known(m, a), 0);
    cr_assert_eq(known(m, b), 2 * BS);
    /* Handed out as a partly filled block; under its new content it is found again. */
    kvf_prefix_key c = key(count_from(500), 3);
    kvf_seq sc = new_seq(m);
    OK(append(m, sc, 3, NULL));
    cr_assert_eq(known(m, b), BS, "the tail has gone, the head has not");
    store(m, sc, c, 3, KVF_PREFIX_PARTIAL);
    cr_assert_eq(known(m, c), 3);
    cr_assert_eq(stats(m).n_nodes, 2);
    kvf_manager_destroy(m);
}

Test(prefix, b3_two_copies_of_one_prefix) {
    for (int swapped = 0; swapped < 2; swapped++) {
        kvf_manager *m = make_cache((plan){.blocks = 6, .layers = 1});
        kvf_prefix_key p = key(count_from(1), 2 * BS);
        kvf_seq x = new_seq(m), y = new_seq(m);
        OK(append(m, x, 2 * BS, NULL));
        OK(append(m, y, 2 * BS, NULL));
        store(m, x, p, 2 * BS, 0);
        store(m, y, p, 2 * BS, 0); /* a second physical copy, not cached */
        cr_assert_eq(stats(m).n_nodes, 2);
        cr_assert_eq(stats(m).duplicates, 2);
        kvf_seq first = swapped ? y : x, second = swapped ? x : y;
        OK(kvf_seq_free(m, first));
        kvf_block taken[4];
        uint32_t n = n_free(m) + idle(m);
        for (uint32_t i = 0; i < n; i++) OK(kvf_block_take(m, 0, &taken[i]));
        AUDIT(m);
        if (swapped) {
            cr_assert_eq(known(m, p), 2 * BS, "the cached copy is held");
        } else {
            cr_assert_eq(known(m, p), 0);
            store(m, second, p, 2 * BS, 0); /* its chain has gone: the walk begins at the root again */
            cr_assert_eq(known(m, p), 2 * BS, "now by the second's blocks");
        }
        kvf_prefix_key more = key(p.tokens, 2 * BS + 1);
        kvf_seq z = start_hit(m, more, 2 * BS);
        cr_assert_eq(block(m, z, 0, 0), block(m, second, 0, 0), "not the recycled ids");
        OK(kvf_seq_free(m, z));
        OK(kvf_seq_free(m, second));
        for (uint32_t i = 0; i < n; i++) OK(kvf_block_release(m, taken[i]));
        for (int i = 0; i < 6; i++) OK(kvf_block_take(m, 0, &(kvf_block){0}));
        cr_assert_eq(stats(m).n_nodes, 0, "evicted, the index is empty");
        cr_assert_eq(n_free(m) + idle(m), 0);
        AUDIT(m);
        kvf_manager_destroy(m);
    }
}

Test(prefix, b3_copies_of_a_sequence_that_is_free_are_given_up_for_one_in_use) {
    kvf_manager *m = make_cache((plan){.blocks = 8, .layers = 2});
    kvf_prefix_key p = key(count_from(1), BS);
    kvf_seq x = new_seq(m), y = new_seq(m);
    OK(append(m, x, BS, NULL));
    OK(append(m, y, BS, NULL));
    store(m, x, p, BS, 0);
    OK(kvf_seq_free(m, x));
    cr_assert_eq(idle(m), 2);
    store(m, y, p, BS, 0);
    cr_assert_eq(idle(m), 0, "the node has adopted y's blocks");
    cr_assert_eq(n_free(m), 6);
    cr_assert_eq(stats(m).adopted, 1);
    kvf_seq z = start_hit(m, key(p.tokens, BS + 1), BS);
    cr_assert_eq(block(m, z, 1, 0), block(m, y, 1, 0));
    kvf_manager_destroy(m);
}

Test(prefix, b4_whole_prompt_leaves_one_token_to_compute) {
    kvf_manager *m = make_cache((plan){.blocks = 16});
    const uint32_t *t = count_from(1);
    OK(kvf_seq_free(m, run_cold(m, key(t, 2 * BS), 0)));
    static const struct {
        uint32_t n, whole_blocks, partial;
    } cases[] = {
        {2 * BS, BS, 2 * BS - 1}, {2 * BS + 1, 2 * BS, 2 * BS}, {BS, 0, BS - 1}, {BS - 1, 0, BS - 2}, {1, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int partial = 0; partial < 2; partial++) {
            kvf_prefix_options o;
            kvf_prefix_options_init(&o, sizeof o);
            o.partial = partial;
            kvf_prefix_key k = key(t, cases[i].n);
            kvf_prefix_match match = {.struct_size = sizeof match};
            OK(kvf_prefix_lookup(m, &k, &o, &match));
            uint32_t wanted = partial ? cases[i].partial : cases[i].whole_blocks;
            cr_assert_eq(match.n_tokens, wanted, "%u tokens: %u, not %u", k.n_tokens, match.n_tokens, wanted);
            kvf_seq s = new_seq(m);
            list copies;
            OK(kvf_prefix_attach(m, s, &k, &match, NULL, NULL));
            cr_assert_eq(slots(m, s, 0), wanted, "computed length and table length agree");
            OK(append(m, s, k.n_tokens - wanted, list_of(&copies)));
            cr_assert_eq(copies.list.n, wanted % BS != 0, "the cached block is copied, not written");
            OK(kvf_copies_done(m, &copies.list));
            store(m, s, k, k.n_tokens, 0);
            cr_assert_eq(stats(m).n_nodes, 2, "its last block is cached once");
            OK(kvf_seq_free(m, s));
            AUDIT(m);
        }
    kvf_manager_destroy(m);
}

static void b6(bool zero_hash) {
    static const uint32_t pairs[][BS] = {/* equal under h = 31 h + t, and under the sum of t_i 31^i */
                                         {10, 50, 7, 9, 1, 2, 3, 4},
                                         {11, 19, 7, 9, 1, 2, 3, 4},
                                         {41, 49, 7, 9, 1, 2, 3, 4}};
    kvf_manager *m = make_cache((plan){.blocks = 32});
    m->cache.zero_hash = zero_hash;
    for (int i = 0; i < 3; i++) {
        for (int j = i; j < 3; j++) cr_assert_eq(known(m, key(pairs[j], BS)), 0);
        OK(kvf_seq_free(m, run_cold(m, key(pairs[i], BS), 0)));
    }
    /* Prompts that differ in block 0, in block 1, and only in the parent. */
    uint32_t prompts[4][2 * BS];
    for (uint32_t i = 0; i < 2 * BS; i++) {
        for (int p = 0; p < 4; p++) prompts[p][i] = 1000 + i;
    }
    prompts[1][3] = 5, prompts[2][BS + 3] = 5, prompts[3][0] = 6;
    uint32_t ids[4];
    for (int p = 0; p < 4; p++) {
        uint32_t wanted = p == 2 ? BS : 0, n = look_for(m, key(prompts[p], 2 * BS), 2 * BS).n_tokens;
        cr_assert_eq(n, wanted, "prompt %d: a hit of %u", p, n);
        kvf_seq s = run_cold(m, key(prompts[p], 2 * BS), 0);
        ids[p] = block(m, s, 0, 1);
        OK(kvf_seq_free(m, s));
    }
    for (int p = 0; p < 4; p++) {
        kvf_prefix_match hit = look_for(m, key(prompts[p], 2 * BS), 2 * BS);
        kvf_seq s = new_seq(m);
        cr_assert_eq(hit.n_tokens, 2 * BS);
        OK(kvf_prefix_attach(
            m, s, &(kvf_prefix_key){.struct_size = sizeof(kvf_prefix_key), .tokens = prompts[p], .n_tokens = 2 * BS},
            &hit, NULL, NULL));
        cr_assert_eq(block(m, s, 0, 1), ids[p]);
        OK(kvf_seq_free(m, s));
        AUDIT(m);
    }
    kvf_manager_destroy(m);
}

Test(prefix, b6_equal_hashes_never_share) {
    b6(false);
    b6(true);
}

/* ---- Keys ---------------------------------------------------------------------------------------------------- */

Test(prefix, salts_and_extras_divide) {
    for (int zero_hash = 0; zero_hash < 2; zero_hash++) {
        kvf_manager *m = make_cache((plan){.blocks = 64});
        m->cache.zero_hash = zero_hash;
        const uint32_t *t = count_from(1);
        kvf_prefix_extra lora[2] = {{{1, 0}, 0, 0}, {{2, 0}, 0, 0}},
                         image[2] = {{{1, 0}, BS + 2, 0}, {{1, 1}, BS + 2, 0}};
        kvf_prefix_extra elsewhere = {{1, 0}, BS + 3, 0};
        kvf_prefix_key keys[8];
        for (int i = 0; i < 8; i++) keys[i] = key(t, 3 * BS);
        keys[1].salt = "tenant", keys[1].salt_bytes = 6;
        keys[2].salt = "tenan", keys[2].salt_bytes = 5;
        for (int i = 0; i < 2; i++) keys[3 + i].extras = &lora[i], keys[3 + i].n_extras = 1;
        for (int i = 0; i < 2; i++) keys[5 + i].extras = &image[i], keys[5 + i].n_extras = 1;
        keys[7].extras = &elsewhere, keys[7].n_extras = 1;
        for (int i = 0; i < 8; i++) {
            uint32_t wanted = i > 4 ? BS : 0; /* an image counts from its block on */
            cr_assert_eq(look_for(m, keys[i], 3 * BS).n_tokens, wanted, "key %d", i);
            OK(kvf_seq_free(m, run_cold(m, keys[i], 0)));
            cr_assert_eq(look_for(m, keys[i], 3 * BS).n_tokens, 3 * BS);
        }
        OK(kvf_prefix_drop(m, "tenant", 6));
        AUDIT(m);
        for (int i = 0; i < 8; i++) cr_assert_eq(look_for(m, keys[i], 3 * BS).n_tokens, i == 1 ? 0 : 3 * BS);
        OK(kvf_prefix_drop(m, NULL, 0));
        AUDIT(m);
        for (int i = 0; i < 8; i++) cr_assert_eq(look_for(m, keys[i], 3 * BS).n_tokens, i == 2 ? 3 * BS : 0);
        OK(kvf_prefix_clear(m));
        cr_assert_eq(n_free(m), 64);
        AUDIT(m);
        kvf_manager_destroy(m);
    }
}

Test(prefix, bad_input) {
    kvf_manager *m = make_cache((plan){.blocks = 16, .snapshot_pages = 4}), *other = make_cache((plan){.blocks = 16});
    const uint32_t *t = count_from(1);
    kvf_prefix_key good = key(t, 2 * BS + 3), k = good;
    kvf_seq s = run_cold(m, good, 0), foreign = new_seq(other), gone = new_seq(m);
    OK(kvf_seq_free(m, gone));
    kvf_prefix_match match = look_for(m, good, 0), found = {.struct_size = sizeof found};
    uint32_t ids[8], n = 77;
    static char megabytes[4 << 20];
    k.salt = megabytes, k.salt_bytes = sizeof megabytes;
    FAILS(KVF_E_LIMIT, kvf_prefix_lookup(m, &k, NULL, &found));
    FAILS(KVF_E_LIMIT, kvf_prefix_drop(m, megabytes, sizeof megabytes));
    k = good, k.salt_bytes = 3;
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    FAILS(KVF_E_INVALID, kvf_prefix_drop(m, NULL, 3));
    kvf_prefix_extra unsorted[2] = {{{1, 2}, 5, 0}, {{1, 2}, 4, 0}}, beyond = {{1, 2}, 2 * BS + 3, 0},
                     odd = {{1, 2}, 1, 9};
    k = good, k.extras = unsorted, k.n_extras = 2;
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    k.extras = &beyond, k.n_extras = 1;
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    k.extras = &odd;
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    k.extras = NULL;
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    k = key(t, 0);
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    k = key(NULL, 5);
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    k = good, k.struct_size = 3;
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &k, NULL, &found));
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, NULL, NULL, &found));
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(m, &good, NULL, NULL));
    FAILS(KVF_E_INVALID, kvf_prefix_lookup(NULL, &good, NULL, &found));
    /* Sequences that are not, or not empty; matches of another key, or that are made up. */
    FAILS(KVF_E_STALE, kvf_prefix_attach(m, foreign, &good, &match, NULL, NULL));
    FAILS(KVF_E_STALE, kvf_prefix_attach(m, gone, &good, &match, NULL, NULL));
    FAILS(KVF_E_STATE, kvf_prefix_attach(m, s, &good, &match, NULL, NULL));
    FAILS(KVF_E_STALE, kvf_prefix_store(m, foreign, &good, 3, NULL, NULL));
    FAILS(KVF_E_STALE, kvf_prefix_store(m, gone, &good, 3, NULL, NULL));
    FAILS(KVF_E_STALE, kvf_prefix_snapshot_put(m, gone, &good, BS, 0, ids, 8, &n));
    kvf_seq e = new_seq(m);
    k = key(count_from(2), 2 * BS + 3);
    FAILS(KVF_E_INVALID, kvf_prefix_attach(m, e, &k, &match, NULL, NULL));
    kvf_prefix_match lie = match;
    lie.n_tokens = BS;
    FAILS(KVF_E_INVALID, kvf_prefix_attach(m, e, &good, &lie, NULL, NULL));
    lie.n_tokens = 1u << 30;
    FAILS(KVF_E_INVALID, kvf_prefix_attach(m, e, &good, &lie, NULL, NULL));
    lie = match, lie.node ^= 1ull << 40;
    FAILS(KVF_E_STALE, kvf_prefix_attach(m, e, &good, &lie, NULL, NULL));
    lie.node = UINT64_MAX;
    FAILS(KVF_E_STALE, kvf_prefix_attach(m, e, &good, &lie, NULL, NULL));
    kvf_reserve r = {.struct_size = sizeof r};
    FAILS(KVF_E_INVALID, kvf_prefix_attach(m, e, &good, &match, &r, NULL));
    FAILS(KVF_E_INVALID, kvf_seq_reserve(m, e, &r));
    FAILS(KVF_E_INVALID, kvf_seq_reserve(m, e, NULL));
    FAILS(KVF_E_INVALID, attach_as(m, e, good, &match, 257, 1));
    FAILS(KVF_E_INVALID, kvf_prefix_attach(m, e, &good, NULL, NULL, NULL));
    /* Stores beyond the table or the key, with other tokens than before, with unknown options. */
    k = key(t, 64);
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &k, 2 * BS + 4, NULL, NULL));
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &k, UINT32_MAX, NULL, NULL));
    k = key(t, BS);
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &k, BS + 1, NULL, NULL));
    uint32_t changed[2 * BS + 3];
    memcpy(changed, t, sizeof changed);
    changed[1]++;
    k = key(changed, 2 * BS + 3);
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &k, 2 * BS + 3, NULL, NULL));
    FAILS(KVF_E_INVALID, kvf_prefix_snapshot_put(m, s, &k, 2 * BS, 0, ids, 8, &n));
    k = good, k.salt = "x", k.salt_bytes = 1;
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &k, 2 * BS, NULL, NULL));
    k = good, k.extras = unsorted, k.n_extras = 1;
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &k, 2 * BS, NULL, NULL));
    kvf_prefix_store_options o = {.struct_size = sizeof o, .flags = 2};
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &good, BS, &o, NULL));
    o = (kvf_prefix_store_options){.struct_size = sizeof o, .priority = 101};
    FAILS(KVF_E_INVALID, kvf_prefix_store(m, s, &good, BS, &o, NULL));
    /* Snapshots. */
    FAILS(KVF_E_NOT_FOUND, kvf_prefix_snapshot_put(m, s, &good, 2 * BS + 3, 0, ids, 8, &n));
    FAILS(KVF_E_INVALID, kvf_prefix_snapshot_put(m, s, &good, 2 * BS + 4, 0, ids, 8, &n));
    FAILS(KVF_E_INVALID, kvf_prefix_snapshot_put(m, s, &good, 0, 0, ids, 8, &n));
    FAILS(KVF_E_INVALID, kvf_prefix_snapshot_put(m, s, &good, BS, 32, ids, 8, &n));
    FAILS(KVF_E_LIMIT, kvf_prefix_snapshot_put(m, s, &good, 2 * BS, 0, ids, 1, &n));
    FAILS(KVF_E_INVALID, kvf_prefix_snapshot_put(m, s, &good, BS, 0, NULL, 8, &n));
    FAILS(KVF_E_STALE, kvf_prefix_snapshot_get(m, &match, ids, 8, &n));
    FAILS(KVF_E_UNSUPPORTED, kvf_prefix_snapshot_put(other, foreign, &good, BS, 0, ids, 8, &n));
    OK(kvf_prefix_tick(m, 5));
    FAILS(KVF_E_INVALID, kvf_prefix_tick(m, 4));
    kvf_prefix_stats none = {.struct_size = 0};
    FAILS(KVF_E_INVALID, kvf_prefix_stats_read(m, &none));
    cr_assert_eq(n, 77);
    AUDIT(m);
    cr_assert_eq(stats(m).queries, 0);
    OK(kvf_prefix_attach(m, e, &good, &match, NULL, NULL));
    OK(kvf_seq_free(m, e));
    OK(kvf_prefix_clear(m)); /* the match does not hold any more */
    e = new_seq(m);
    FAILS(KVF_E_STALE, kvf_prefix_attach(m, e, &good, &match, NULL, NULL));
    kvf_manager_destroy(m);
    kvf_manager_destroy(other);
}

Test(prefix, off_costs_nothing) {
    kvf_manager_config c = config_of((shape){2, 1, 1, BS, 32, 0, 4, 64});
    size_t off, on;
    OK(kvf_manager_bytes(&c, &off, NULL));
    c.prefix_eviction = KVF_PREFIX_LFU, c.n_snapshot_pages = 8; /* of no consequence */
    size_t same;
    OK(kvf_manager_bytes(&c, &same, NULL));
    cr_assert_eq(off, same);
    c.prefix_cache = 1;
    OK(kvf_manager_bytes(&c, &on, NULL));
    cr_assert_gt(on, off);
    c.prefix_cache = 2;
    FAILS(KVF_E_INVALID, kvf_manager_bytes(&c, &on, NULL));
    c.prefix_cache = 1, c.prefix_eviction = 4;
    FAILS(KVF_E_INVALID, kvf_manager_bytes(&c, &on, NULL));
    c.prefix_eviction = 0, c.snapshot_page_bytes = UINT64_MAX;
    FAILS(KVF_E_OVERFLOW, kvf_manager_bytes(&c, &on, NULL));
    kvf_manager *m = make((shape){2, 1, 1, BS, 32, 0, 4, 64});
    kvf_prefix_key k = key(count_from(1), 9);
    kvf_prefix_match match = {.struct_size = sizeof match};
    kvf_seq s = new_seq(m);
    FAILS(KVF_E_UNSUPPORTED, kvf_prefix_lookup(m, &k, NULL, &match));
    FAILS(KVF_E_UNSUPPORTED, kvf_prefix_store(m, s, &k, 0, NULL, NULL));
    FAILS(KVF_E_UNSUPPORTED, kvf_prefix_clear(m));
    FAILS(KVF_E_UNSUPPORTED, kvf_prefix_tick(m, 1));
    cr_assert_eq(stats(m).n_nodes, 0);
    kvf_manager_destroy(m);
}

/* ---- Memory: faults ---------------------------------------------------------------------------------------- */

typedef struct counted {
    int n_left, n_live;
} counted;
static void *fail_late(void *ctx, size_t bytes, size_t align) {
    counted *c = ctx;
    if (c->n_left-- == 0) return NULL;
    c->n_live++;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void give(void *ctx, void *p, size_t bytes) {
    (void)bytes;
    ((counted *)ctx)->n_live--;
    free(p);
}

Test(prefix, one_allocation_that_may_fail) {
    kvf_manager_config c = config_of((shape){2, 1, 1, BS, 32, 0, 4, 64});
    counted state = {0, 0};
    kvf_manager *m = NULL;
    c.prefix_cache = 1, c.n_snapshot_pages = 4;
    c.allocator = (kvf_allocator){fail_late, give, &state};
    FAILS(KVF_E_NO_MEMORY, kvf_manager_create(&c, &m, NULL));
    cr_assert_null(m);
    state.n_left = 1; /* the first succeeds, any other would fail */
    OK(kvf_manager_create(&c, &m, NULL));
    kvf_prefix_key k = key(count_from(1), 20);
    for (int i = 0; i < 3; i++) {
        kvf_seq s = new_seq(m);
        kvf_prefix_match match = look_for(m, k, 0);
        OK(kvf_prefix_attach(m, s, &k, &match, NULL, NULL));
        OK(append(m, s, 20 - match.n_tokens, NULL));
        store(m, s, k, 20, KVF_PREFIX_PARTIAL);
        OK(kvf_seq_free(m, s));
    }
    cr_assert_eq(state.n_left, 0);
    kvf_manager_destroy(m);
    cr_assert_eq(state.n_live, 0);
}
