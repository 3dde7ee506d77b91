/* The prefix cache over two tiers, case by case. */
#include "kvfold/profile.h"
#include "prefix_util.h"

enum { N_TAKEN = 64 };

static list room;
static kvf_copy_list *copies;

static kvf_manager *open_tiers(plan p) {
    copies = list_of(&room);
    return make_cache(p);
}

static kvf_prefix_match look_far(const kvf_manager *m, kvf_prefix_key k) {
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf_prefix_match match = {.struct_size = sizeof match};
    o.host = 1;
    o.max_tokens = k.n_tokens;
    OK(kvf_prefix_lookup(m, &k, &o, &match));
    return match;
}
/* Tokens that are found, and how many of their blocks lie on the host alone. */
static void expect_known(const kvf_manager *m, kvf_prefix_key k, uint32_t n_tokens, uint32_t n_host) {
    kvf_prefix_match match = look_far(m, k);
    cr_assert(match.n_tokens == n_tokens && match.n_host_blocks == n_host,
              "%u tokens, %u blocks on the host, not %u and %u", match.n_tokens, match.n_host_blocks, n_tokens, n_host);
    AUDIT(m);
}
static kvf_status start_far(kvf_manager *m, kvf_prefix_key k, kvf_seq *seq) {
    kvf_prefix_match match = look_far(m, k);
    *seq = new_seq(m);
    return kvf_prefix_attach(m, *seq, &k, &match, NULL, copies);
}
static uint32_t offload(kvf_manager *m, uint32_t max_nodes) {
    uint32_t n = 99;
    OK(kvf_prefix_offload(m, max_nodes, copies, &n));
    AUDIT(m);
    return n;
}
static void done(kvf_manager *m) {
    OK(kvf_copies_done(m, copies));
    AUDIT(m);
}
/* A prompt that ran, was stored and is idle. */
static kvf_prefix_key leave_idle(kvf_manager *m, uint32_t first, uint32_t n_tokens) {
    kvf_prefix_key k = key(count_from(first), n_tokens);
    OK(kvf_seq_free(m, run_cold(m, k, 0)));
    AUDIT(m);
    return k;
}
/* Takes n blocks and gives them back: what was idle in them is not here any more. */
static void press(kvf_manager *m, uint32_t n) {
    kvf_block taken[N_TAKEN];
    for (uint32_t i = 0; i < n; i++) OK(kvf_block_take(m, 0, &taken[i]));
    AUDIT(m);
    for (uint32_t i = 0; i < n; i++) OK(kvf_block_release(m, taken[i]));
    AUDIT(m);
}
static void expect_pools(const kvf_manager *m, uint32_t held, uint32_t cached, uint32_t host_held,
                         uint32_t host_cached) {
    kvf_occupancy o = occupancy(m);
    AUDIT(m);
    cr_assert_eq(o.blocks.n_free + o.blocks.n_held + o.n_cached_idle, o.blocks.n_total);
    cr_assert_eq(o.host_blocks.n_free + o.host_blocks.n_held + o.n_host_cached_idle, o.host_blocks.n_total);
    cr_assert(o.blocks.n_held == held && o.n_cached_idle == cached, "%u held and %u idle here, not %u and %u",
              o.blocks.n_held, o.n_cached_idle, held, cached);
    cr_assert(o.host_blocks.n_held == host_held && o.n_host_cached_idle == host_cached,
              "%u held and %u idle on the host, not %u and %u", o.host_blocks.n_held, o.n_host_cached_idle, host_held,
              host_cached);
}

/* ---- Accounting ---------------------------------------------------------------------------------------------- */

Test(offload, a2_cached_blocks_count_in_their_own_tier) {
    kvf_manager *m = open_tiers((plan){.blocks = 2, .host = 2});
    for (uint32_t i = 0; i < 10; i++) {
        kvf_prefix_key k = key(count_from(1000 * i), 2 * BS), before = key(count_from(1000 * (i - 1)), 2 * BS);
        uint32_t on_host = i ? 2 : 0;
        kvf_seq seq = new_seq(m);
        OK(append(m, seq, 2 * BS, NULL)); /* both cached blocks leave for that, and stay on the host */
        expect_pools(m, 2, 0, 0, on_host);
        if (i) expect_known(m, before, 2 * BS, 2);
        store(m, seq, k, 2 * BS, 0);
        OK(kvf_seq_free(m, seq));
        expect_pools(m, 0, 2, 0, on_host);
        cr_assert_eq(offload(m, 9), 2); /* the host is full by now: what lies there alone has to go */
        expect_pools(m, 2, 0, 2, 0);
        if (i) expect_known(m, before, 0, 0);
        cr_assert_eq(offload(m, 9), 0);
        done(m);
        expect_pools(m, 0, 2, 0, 2);
        expect_known(m, k, 2 * BS, 0);
    }
    kvf_prefix_stats s = stats(m);
    cr_assert(s.stored == 20 && s.offloaded == 20 && s.left_device == 18 && s.left_host == 18 && s.evicted == 18);
    cr_assert(s.n_nodes == 2 && s.n_host_nodes == 2 && s.n_host_only == 0 && s.n_bare == 0 && s.removed == 0);
    OK(kvf_prefix_clear(m));
    expect_pools(m, 0, 0, 0, 0);
    kvf_manager_destroy(m);
}

Test(offload, a_hit_on_the_host_is_counted_once_and_comes_back) {
    kvf_manager *m = open_tiers((plan){.layers = 3, .blocks = 12, .host = 12});
    kvf_prefix_key k = leave_idle(m, 1, 4 * BS);
    cr_assert_eq(offload(m, 2), 2); /* the tails */
    done(m);
    press(m, 6);
    expect_known(m, k, 4 * BS, 6);
    cr_assert_eq(known(m, k), 2 * BS, "only what is here is found without being asked for");
    kvf_seq seq = 0;
    OK(start_far(m, k, &seq));
    cr_assert_eq(copies->n, 6);
    expect_pools(m, 12, 0, 6, 0);
    expect_known(m, k, 4 * BS, 0);
    kvf_prefix_stats s = stats(m);
    cr_assert(s.queries == 1 && s.hits == 1 && s.hit_tokens == 4 * BS && s.host_hit_tokens == 2 * BS && s.loaded == 2);
    kvf_seq other = 0;
    OK(start_far(m, k, &other)); /* shares what is about to come */
    cr_assert_eq(copies->n, 6);
    done(m);
    expect_pools(m, 12, 0, 0, 6);
    OK(kvf_seq_free(m, seq));
    OK(kvf_seq_free(m, other));
    expect_pools(m, 0, 12, 0, 6);
    cr_assert_eq(stats(m).loaded, 2);
    kvf_manager_destroy(m);
}

Test(offload, an_attach_takes_all_or_nothing) {
    kvf_manager *m = open_tiers((plan){.layers = 2, .blocks = 8, .host = 8});
    kvf_prefix_key k = leave_idle(m, 1, 2 * BS);
    cr_assert_eq(offload(m, 9), 2);
    done(m);
    press(m, 8);
    kvf_block taken[5];
    for (int i = 0; i < 5; i++) OK(kvf_block_take(m, 0, &taken[i]));
    kvf_prefix_match match = look_far(m, k);
    kvf_seq seq = new_seq(m);
    kvf_prefix_stats before = stats(m);
    FAILS(KVF_E_NO_BLOCKS, kvf_prefix_attach(m, seq, &k, &match, NULL, copies));
    OK(kvf_block_release(m, taken[4]));
    const uint32_t three[2] = {3 * BS, 2 * BS}; /* two blocks a table, and one more is promised */
    kvf_reserve r = {.struct_size = sizeof r, .n_slots = three};
    FAILS(KVF_E_NO_BLOCKS, kvf_prefix_attach(m, seq, &k, &match, &r, copies));
    copies->capacity = 3;
    FAILS(KVF_E_LIMIT, kvf_prefix_attach(m, seq, &k, &match, NULL, copies));
    FAILS(KVF_E_LIMIT, kvf_prefix_attach(m, seq, &k, &match, NULL, NULL));
    kvf_prefix_stats after = stats(m);
    cr_assert(!memcmp(&before, &after, sizeof before), "nothing is counted");
    expect_pools(m, 4, 0, 0, 4);
    copies->capacity = 4;
    OK(kvf_prefix_attach(m, seq, &k, &match, NULL, copies));
    expect_pools(m, 8, 0, 4, 0);
    kvf_manager_destroy(m);
}

Test(offload, pinned_blocks_keep_no_promise) {
    kvf_manager *m = open_tiers((plan){.blocks = 4, .host = 4});
    (void)leave_idle(m, 1, 4 * BS);
    kvf_seq seq = new_seq(m);
    const uint32_t three = 3 * BS;
    OK(kvf_seq_reserve(m, seq,
                       &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = &three, .with_scores = 0}));
    cr_assert_eq(offload(m, 9), 1, "one block is promised to nobody");
    OK(append(m, seq, 3 * BS, NULL));
    done(m);
    kvf_manager_destroy(m);
}

Test(offload, refuses_what_cannot_be) {
    kvf_manager *m = open_tiers((plan){.blocks = 4});
    FAILS(KVF_E_UNSUPPORTED, kvf_prefix_offload(m, 1, copies, NULL));
    FAILS(KVF_E_INVALID, kvf_prefix_offload(NULL, 1, copies, NULL));
    kvf_manager_destroy(m);
    m = open_tiers((plan){.blocks = 4, .host = 4});
    (void)leave_idle(m, 1, 2 * BS);
    uint32_t n_none = 9;
    OK(kvf_prefix_offload(m, 1, NULL, &n_none)); /* a list of no room */
    cr_assert_eq(n_none, 0);
    copies->capacity = 1;
    cr_assert_eq(offload(m, 9), 1, "as many as the list has room for");
    cr_assert_eq(offload(m, 0), 0);
    kvf_manager_destroy(m);
}

/* ---- Order ------------------------------------------------------------------------------------------------------ */

static uint64_t rng;
static uint32_t rnd(uint32_t n) {
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    return (uint32_t)((rng >> 20) % n);
}

/* Prompts that share beginnings run, are found again, with priorities, and are idle in the end. */
static void grow_tree(kvf_manager *m) {
    static uint32_t tokens[4 * BS];
    for (int i = 0; i < 24; i++) {
        for (uint32_t b = 0; b < 4; b++)
            for (uint32_t j = 0, token = rnd(2); j < BS; j++) tokens[b * BS + j] = token;
        kvf_prefix_key k = key(tokens, BS * (1 + rnd(4)));
        kvf_prefix_store_options o = {.struct_size = sizeof o, .priority = rnd(3) * rnd(30)};
        kvf_prefix_match match = look_far(m, k);
        kvf_seq seq = new_seq(m);
        if (kvf_prefix_attach(m, seq, &k, &match, NULL, copies) == KVF_OK &&
            (match.n_tokens == k.n_tokens || append(m, seq, k.n_tokens - match.n_tokens, NULL) == KVF_OK))
            OK(kvf_prefix_store(m, seq, &k, k.n_tokens, &o, NULL));
        OK(kvf_seq_free(m, seq));
        if (rnd(3) == 0) (void)offload(m, 1);
        done(m);
    }
}

/* Without a copy, though what it follows on has got one since. */
static bool skipped_a_tail(const kvf_manager *m, const bool *had_copy) {
    const kvf__cache *c = &m->cache;
    for (uint32_t i = 0; i < c->n_max; i++) {
        uint32_t parent = c->nodes[i].parent;
        if (!c->nodes[i].n_tokens || c->nodes[i].tiers != KVF__HERE || parent == KVF__NO_NODE) continue;
        if (kvf__is_on_host(c, parent) && !had_copy[parent]) return true;
    }
    return false;
}

Test(offload, takes_what_eviction_would_take_next) {
    uint32_t n_seen = 0;
    for (uint32_t seed = 1; seed <= 400; seed++) {
        plan p = {.layers = 1 + seed % 2, .blocks = 24 * (1 + seed % 2), .host = 64, .eviction = seed / 2 % 4};
        kvf_manager *m = open_tiers(p);
        bool had_copy[128];
        rng = seed * 0x9e3779b97f4a7c15u;
        grow_tree(m);
        for (uint32_t i = 0; i < m->cache.n_max; i++) had_copy[i] = kvf__is_on_host(&m->cache, i);
        uint32_t wanted = 1 + rnd(6), n = offload(m, wanted);
        done(m);
        kvf_prefix_stats before = stats(m), now = before;
        cr_assert(n == wanted || before.n_bare == 0, "seed %u: %u of %u", seed, n, wanted);
        cr_assert(!skipped_a_tail(m, had_copy), "seed %u: a head was copied before its tail", seed);
        kvf_block block;
        while (now.left_device - before.left_device < n && kvf_block_take(m, 0, &block) == KVF_OK) now = stats(m);
        if (p.eviction == KVF_PREFIX_LRU) /* the others may choose a head with a copy before a tail that is bare */
            cr_assert_eq(now.evicted, before.evicted, "seed %u: what has no copy went before what was copied", seed);
        AUDIT(m);
        n_seen += n;
        kvf_manager_destroy(m);
    }
    cr_assert_gt(n_seen, 400);
}

Test(offload, tails_before_heads_on_both_tiers) {
    for (uint32_t eviction = 0; eviction < 4; eviction++) { /* FIFO would have the head first */
        kvf_manager *m = open_tiers((plan){.blocks = 4, .host = 2, .eviction = eviction});
        kvf_prefix_key k = leave_idle(m, 1, 4 * BS);
        for (uint32_t left = 3; left >= 2; left--) {
            cr_assert_eq(offload(m, 1), 1);
            done(m);
            kvf_block block;
            OK(kvf_block_take(m, 0, &block));
            expect_known(m, k, 4 * BS, 4 - left);
            cr_assert_eq(known(m, k), left * BS);
        }
        cr_assert_eq(offload(m, 1), 1, "the tail there makes room");
        expect_known(m, k, 3 * BS, 1);
        done(m);
        kvf_block block;
        OK(kvf_block_take(m, 0, &block));
        expect_known(m, k, 3 * BS, 2);
        OK(kvf_block_take(m, 0, &block)); /* the head has no copy: what is behind it goes too */
        expect_known(m, k, 0, 0);
        kvf_prefix_stats s = stats(m);
        cr_assert(s.evicted == 4 && s.left_host == 1 && s.left_device == 3 && s.n_nodes == 0);
        expect_pools(m, 4, 0, 0, 0);
        kvf_manager_destroy(m);
    }
}

Test(offload, a_full_host_gives_up_what_goes_first) {
    kvf_manager *m = open_tiers((plan){.blocks = 4, .host = 2});
    kvf_prefix_key a = leave_idle(m, 100, BS), b = leave_idle(m, 200, BS), c = leave_idle(m, 300, BS);
    cr_assert_eq(offload(m, 3), 2, "never a victim of its own call");
    done(m);
    cr_assert_eq(offload(m, 3), 0, "what leaves the device before it needs its copy more");
    press(m, 2); /* a block was free */
    expect_known(m, a, BS, 1);
    cr_assert_eq(offload(m, 3), 1);
    expect_known(m, a, 0, 0);
    done(m);
    kvf_seq seq = 0;
    OK(start_far(m, b, &seq));
    kvf_prefix_key d = leave_idle(m, 400, BS);
    uint64_t evicted = stats(m).evicted;
    cr_assert_eq(offload(m, 3), 1, "nobody needs the copy of what is in use");
    cr_assert_eq(stats(m).evicted, evicted);
    done(m);
    press(m, 3);
    expect_known(m, b, BS, 0);
    expect_known(m, c, BS, 1);
    expect_known(m, d, BS, 1);
    kvf_manager_destroy(m);
}

Test(offload, copies_of_what_is_in_use_go_before_what_lies_there_alone) {
    kvf_manager *m = open_tiers((plan){.blocks = 3, .host = 2});
    kvf_prefix_key a = leave_idle(m, 100, BS), b = leave_idle(m, 200, BS);
    cr_assert_eq(offload(m, 3), 2);
    done(m);
    kvf_seq seq = 0;
    OK(start_far(m, b, &seq));
    press(m, 2);
    expect_known(m, a, BS, 1);
    kvf_prefix_key c = leave_idle(m, 300, BS);
    cr_assert_eq(offload(m, 3), 1);
    expect_known(m, a, BS, 1);
    expect_known(m, b, BS, 0);
    expect_known(m, c, BS, 0);
    cr_assert(stats(m).evicted == 0 && stats(m).left_host == 1);
    kvf_manager_destroy(m);
}

Test(offload, a_tail_on_the_host_makes_room_for_its_head) {
    for (uint32_t eviction = 0; eviction < 4; eviction++) {
        kvf_manager *m = open_tiers((plan){.blocks = 2, .host = 1, .eviction = eviction});
        kvf_prefix_key k = leave_idle(m, 1, 2 * BS);
        kvf_block block;
        cr_assert_eq(offload(m, 1), 1);
        done(m);
        OK(kvf_block_take(m, 0, &block));
        expect_known(m, k, 2 * BS, 1);
        cr_assert_eq(offload(m, 1), 1);
        expect_known(m, k, BS, 0);
        kvf_manager_destroy(m);
    }
}

Test(offload, what_is_used_more_often_stays_on_the_host) {
    kvf_manager *m = open_tiers((plan){.blocks = 2, .host = 1, .eviction = KVF_PREFIX_LFU});
    kvf_prefix_key a = leave_idle(m, 100, BS);
    kvf_seq seq = 0;
    OK(start_far(m, a, &seq));
    OK(kvf_seq_free(m, seq));
    cr_assert_eq(offload(m, 1), 1);
    done(m);
    press(m, 2);
    kvf_prefix_key b = leave_idle(m, 200, BS);
    cr_assert_eq(offload(m, 1), 0);
    expect_known(m, a, BS, 1);
    for (int i = 0; i < 2; i++) {
        OK(start_far(m, b, &seq));
        OK(kvf_seq_free(m, seq));
    }
    cr_assert_eq(offload(m, 1), 1);
    expect_known(m, a, 0, 0);
    kvf_manager_destroy(m);
}

Test(offload, sequences_have_the_host_before_the_cache) {
    kvf_manager *m = open_tiers((plan){.blocks = 4, .host = 3});
    kvf_prefix_key k = leave_idle(m, 1, 2 * BS);
    cr_assert_eq(offload(m, 9), 2);
    kvf_seq seq = new_seq(m);
    OK(append(m, seq, 2 * BS, NULL));
    FAILS(KVF_E_NO_BLOCKS, kvf_swap_out(m, &seq, 1, copies)); /* both copies are on their way */
    done(m);
    OK(kvf_swap_out(m, &seq, 1, copies));
    expect_known(m, k, 2 * BS, 0);
    expect_pools(m, 2, 2, 2, 1);
    done(m);
    cr_assert_eq(stats(m).left_host, 1);
    kvf_manager_destroy(m);
}

/* ---- Copies under way ---------------------------------------------------------------------------------------------- */

/* A device that copies when it is told to. */
static double here[4], there[4];
static void flush(const kvf_copy_list *of) {
    for (uint32_t i = 0; i < of->n; i++) {
        const kvf_copy *c = &of->items[i];
        if (c->kind == KVF_COPY_BLOCK_OUT) there[c->dst] = here[c->src];
        if (c->kind == KVF_COPY_BLOCK_IN) here[c->dst] = there[c->src];
    }
}
static uint32_t block_of(const kvf_manager *m, kvf_seq seq) {
    const uint32_t *row = NULL;
    OK(kvf_seq_table(m, seq, 0, 0, NULL, NULL, &row));
    return row[0];
}

Test(offload, c6_a_cached_block_is_not_reused_while_its_copy_runs) {
    kvf_manager *m = open_tiers((plan){.blocks = 1, .host = 1});
    kvf_prefix_key k = key(count_from(1), BS);
    kvf_seq a = run_cold(m, k, 0), b = new_seq(m), again = 0;
    here[block_of(m, a)] = 1.0;
    OK(kvf_seq_free(m, a));
    cr_assert_eq(offload(m, 1), 1);
    FAILS(KVF_E_NO_BLOCKS, append(m, b, BS, NULL));
    flush(copies);
    done(m);
    OK(append(m, b, BS, NULL));
    here[block_of(m, b)] = 2.0;
    expect_known(m, k, BS, 1);
    OK(kvf_seq_free(m, b));
    OK(start_far(m, k, &again));
    flush(copies);
    done(m);
    cr_assert(here[block_of(m, again)] > 0.9 && here[block_of(m, again)] < 1.1, "it is %g", here[block_of(m, again)]);
    kvf_manager_destroy(m);
}

Test(offload, c6_an_aborted_load_keeps_its_blocks_until_it_is_done) {
    for (int forget = 0; forget < 2; forget++) {
        kvf_manager *m = open_tiers((plan){.blocks = 1, .host = 1});
        kvf_prefix_key k = leave_idle(m, 1, BS);
        cr_assert_eq(offload(m, 1), 1);
        done(m);
        press(m, 1);
        kvf_seq a = 0, c = new_seq(m);
        OK(start_far(m, k, &a));
        OK(kvf_seq_free(m, a));
        if (forget) OK(kvf_prefix_clear(m));
        FAILS(KVF_E_NO_BLOCKS, append(m, c, BS, NULL));
        expect_pools(m, 1, 0, 1, 0);
        done(m);
        expect_pools(m, 0, !forget, 0, !forget);
        OK(append(m, c, BS, NULL));
        expect_pools(m, 1, 0, 0, !forget);
        FAILS(KVF_E_NO_BLOCKS, append(m, c, BS, NULL)); /* it came back once */
        kvf_manager_destroy(m);
    }
}

Test(offload, what_is_forgotten_falls_free_with_its_copies) {
    kvf_manager *m = open_tiers((plan){.layers = 2, .blocks = 8, .host = 8});
    (void)leave_idle(m, 1, 3 * BS);
    cr_assert_eq(offload(m, 2), 2);
    OK(kvf_prefix_clear(m));
    expect_pools(m, 4, 0, 4, 0);
    done(m);
    expect_pools(m, 0, 0, 0, 0);
    kvf_manager_destroy(m);
}

Test(offload, a_copy_keeps_the_place_in_the_order) {
    kvf_manager *m = open_tiers((plan){.blocks = 4, .host = 4});
    kvf_prefix_key a = leave_idle(m, 100, BS), b = leave_idle(m, 200, BS);
    cr_assert_eq(offload(m, 1), 1);
    done(m);
    kvf_block block;
    for (int i = 0; i < 3; i++) OK(kvf_block_take(m, 0, &block));
    expect_known(m, a, BS, 1);
    expect_known(m, b, BS, 0);
    kvf_manager_destroy(m);
}

Test(offload, a_sequence_that_runs_again_brings_its_own_blocks) {
    kvf_manager *m = open_tiers((plan){.layers = 2, .blocks = 12, .host = 12});
    kvf_prefix_key k = leave_idle(m, 1, 3 * BS);
    cr_assert_eq(offload(m, 9), 3);
    done(m);
    press(m, 12);
    expect_known(m, k, 3 * BS, 6);
    kvf_seq seq = run_cold(m, k, 0);
    expect_known(m, k, 3 * BS, 0);
    kvf_prefix_stats s = stats(m);
    cr_assert(s.adopted == 3 && s.stored == 3 && s.loaded == 0 && s.n_nodes == 3 && s.n_host_nodes == 3);
    OK(kvf_seq_free(m, seq));
    kvf_manager_destroy(m);
}

Test(offload, nothing_is_stored_behind_what_lies_on_the_host_alone) {
    kvf_manager *m = open_tiers((plan){.blocks = 4, .host = 2, .snapshot_pages = 4});
    kvf_prefix_key whole = leave_idle(m, 1, BS), longer = key(count_from(1), 2 * BS), part = key(count_from(1), 5);
    cr_assert_eq(offload(m, 1), 1);
    done(m);
    press(m, 4);
    kvf_seq seq = run_cold(m, part, KVF_PREFIX_PARTIAL);
    uint32_t ids[4], n = 0;
    OK(kvf_prefix_snapshot_put(m, seq, &part, 5, 0, ids, 4, &n)); /* so that the block can be no other node's */
    OK(append(m, seq, 2 * BS - 5, NULL));
    store(m, seq, longer, 2 * BS, 0);
    expect_known(m, whole, BS, 1);
    expect_known(m, longer, BS, 1);
    kvf_manager_destroy(m);
}

/* ---- Snapshots, figures ------------------------------------------------------------------------------------------------ */

Test(offload, a_snapshot_serves_wherever_its_blocks_lie) {
    kvf_manager *m = open_tiers((plan){.layers = 2, .blocks = 6, .host = 8, .snapshot_pages = 4});
    kvf_prefix_key k = key(count_from(1), 3 * BS);
    kvf_seq seq = run_cold(m, k, 0);
    uint32_t ids[4], n = 0;
    OK(kvf_prefix_snapshot_put(m, seq, &k, 2 * BS, 0, ids, 4, &n));
    OK(kvf_seq_free(m, seq));
    cr_assert_eq(offload(m, 9), 3);
    done(m);
    press(m, 6);
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf_prefix_match match = {.struct_size = sizeof match};
    o.need_snapshot = 1;
    OK(kvf_prefix_lookup(m, &k, &o, &match));
    cr_assert_eq(match.n_tokens, 0);
    o.host = 1;
    OK(kvf_prefix_lookup(m, &k, &o, &match));
    cr_assert(match.n_tokens == 2 * BS && match.n_snapshot_pages == 2 && match.n_host_blocks == 4,
              "a hit ends at a snapshot: %u tokens", match.n_tokens);
    seq = new_seq(m);
    OK(kvf_prefix_attach(m, seq, &k, &match, NULL, copies));
    uint32_t again[4] = {9, 9, 9, 9};
    OK(kvf_prefix_snapshot_get(m, &match, again, 4, &n));
    cr_assert(n == 2 && !memcmp(ids, again, 2 * sizeof *ids));
    done(m);
    OK(kvf_prefix_clear(m));
    cr_assert_eq(stats(m).n_snapshots, 0);
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(offload, a_profile_shows_both_ways) {
    kvf_manager_config config = config_of((shape){2, 1, 1, BS, 8, 0, 4, 64});
    kvf_profile_config pc;
    kvf_profile_config_init(&pc, sizeof pc);
    kvf_manager *m = NULL;
    config.prefix_cache = 1;
    config.n_host_blocks = 8;
    config.profile = &pc;
    copies = list_of(&room);
    OK(kvf_manager_create(&config, &m, NULL));
    kvf_prefix_key k = leave_idle(m, 1, 2 * BS);
    cr_assert_eq(offload(m, 9), 2);
    kvf_profile p = {.struct_size = sizeof p};
    OK(kvf_profile_read(m, &p, NULL, 0, 0));
    cr_assert(p.held == 4 && p.cached == 0 && p.host_held == 4 && p.host_cached == 0 && p.offloaded_blocks == 4);
    done(m);
    OK(kvf_profile_read(m, &p, NULL, 0, 0));
    cr_assert(p.held == 0 && p.cached == 4 && p.host_held == 0 && p.host_cached == 4);
    press(m, 8);
    kvf_seq seq = 0;
    OK(start_far(m, k, &seq));
    done(m);
    OK(kvf_seq_free(m, seq));
    OK(kvf_profile_read(m, &p, NULL, 0, 0));
    cr_assert(p.loaded_blocks == 4 && p.freed_by_eviction == 4 && p.host_cached_max == 4 && p.cached == 4);
    kvf_profile_event events[64];
    uint32_t n = 0, n_out = 0, n_in = 0;
    OK(kvf_profile_drain(m, events, 64, &n));
    for (uint32_t i = 0; i < n; i++) {
        if (events[i].kind != KVF_PROFILE_SWAP) continue;
        cr_assert_eq(events[i].n_blocks, 4);
        *(events[i].other ? &n_in : &n_out) += 1;
    }
    cr_assert(n_out == 1 && n_in == 1, "%u out, %u in", n_out, n_in);
    kvf_manager_destroy(m);
}
