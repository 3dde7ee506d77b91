/* The occupancy profile: figures computed by hand, events, the ring. test_blockmgr_random.c compares it with the naive
 * model; main_profile.c reads it from other threads. */
#include "tests/test_blockmgr_util.h"

#include "kvfold/prefix.h"
#include "kvfold/profile.h"

typedef struct rig {
    kvf_manager *m;
    uint64_t now;
} rig;

static uint64_t clock_of(void *ctx) { return ((rig *)ctx)->now; }

/* 2 layers, one group, blocks of 8 slots and 1,000 bytes. */
static void rig_make(rig *r, uint32_t n_blocks, uint32_t n_events, bool clock) {
    kvf_manager_config c = config_of((shape){2, 1, 1, 8, n_blocks, n_blocks, 4, 64});
    kvf_profile_config pc;
    kvf_profile_config_init(&pc, sizeof pc);
    pc.n_events = n_events;
    if (clock) pc.clock = clock_of, pc.clock_ctx = r;
    c.profile = &pc;
    *r = (rig){NULL, 0};
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_manager_create(&c, &r->m, &err), KVF_OK, "%s", err.text);
    memset(&pc, 0xa5, sizeof pc); /* it was copied */
}

static kvf_profile read_all(const rig *r, kvf_profile_layer layers[2]) {
    kvf_profile p = {.struct_size = sizeof p};
    OK(kvf_profile_read(r->m, &p, layers, sizeof *layers, layers ? 2 : 0));
    AUDIT(r->m);
    return p;
}

#define IS(a, b)                                                                                 \
    cr_assert_eq((uint64_t)(a), (uint64_t)(b), #a " is %llu, not %llu", (unsigned long long)(a), \
                 (unsigned long long)(b))

Test(profile, figures_of_one_life_by_hand) {
    rig r;
    rig_make(&r, 32, 0, true);
    kvf_profile_layer l[2];
    kvf_profile p = read_all(&r, l);
    IS(p.total, 32);
    IS(p.free, 32);
    IS(p.block_bytes, 1000);
    IS(p.n_calls, 0);

    r.now = 100;
    kvf_seq s = new_seq(r.m);
    OK(append(r.m, s, 20, NULL)); /* 3 blocks a layer, 4 slots idle in each */
    p = read_all(&r, l);
    IS(p.held, 6);
    IS(p.free, 26);
    IS(p.slots_used, 40);
    IS(p.slots_idle, 8);
    IS(p.fragmentation_ppm, 8 * 1000000 / 48);
    IS(p.taken_blocks, 6);
    IS(l[0].held, 3);
    IS(l[1].slots_idle, 4);
    IS(p.seqs, 1);

    r.now = 110; /* 9 of 20 slots go: 11 fill 2 blocks, 1 falls free */
    kvf_compact_item item = {s, 1, 11, NULL};
    kvf_compaction c;
    OK(kvf_compact_begin(r.m, &item, 1, &c));
    r.now = 117;
    OK(kvf_compact_commit(r.m));
    p = read_all(&r, l);
    IS(p.compactions, 1);
    IS(p.evicted_slots, 9);
    IS(p.evicted_bytes, 9 * 1000 / 8);
    IS(p.freed_bytes, 1000);
    IS(p.freed_by_compaction, 1);
    IS(l[1].evicted_slots, 9);
    IS(l[1].held, 2);
    IS(l[1].held_max, 3);
    IS(p.lifetime.n, 1);
    IS(p.lifetime.sum, 17);
    IS(p.lifetime.buckets[5], 1); /* [16, 32) */
    IS(p.idle_time.sum, 17);

    r.now = 150;
    OK(append(r.m, s, 1, NULL)); /* layer 0: 21 slots in 3 blocks, layer 1: 12 in 2: the last blocks are used */
    r.now = 164;
    OK(kvf_seq_free(r.m, s));
    p = read_all(&r, l);
    IS(p.held, 0);
    IS(p.held_max, 6);
    IS(p.freed_by_end, 5);
    IS(p.freed_blocks, 6);
    IS(p.lifetime.sum, 17 + 5 * 64);
    /* idle: layer 0: two blocks since 100, one since 150; layer 1: one since 117, one since 150 */
    IS(p.idle_time.sum, 17 + 64 + 64 + 14 + 47 + 14);
    IS(p.free_gap.n, 0);
    IS(p.slots_idle, 0);
    IS(p.slots_idle_max, (24 - 20) + (16 - 11));

    r.now = 200;
    s = new_seq(r.m);
    OK(append(r.m, s, 64, NULL)); /* 16 blocks, of which those 6 that were held before lay free */
    p = read_all(&r, l);
    IS(p.free_gap.n, 6);
    IS(p.free_gap.sum, 5 * (200 - 164) + (200 - 117));
    IS(p.free_gap.max, 83);
    kvf_manager_destroy(r.m);
}

Test(profile, sharing_copies_and_reuse_by_hand) {
    rig r;
    rig_make(&r, 32, 0, true);
    kvf_profile_layer l[2];
    list copies;
    r.now = 10;
    kvf_seq a = new_seq(r.m), b = 0;
    OK(append(r.m, a, 12, NULL));
    r.now = 16;
    OK(kvf_seq_fork(r.m, a, list_of(&copies), &b));
    kvf_profile p = read_all(&r, l);
    IS(p.shared, 4);
    IS(l[0].shared, 2);
    IS(l[0].entries, 4);
    IS(l[0].held, 2);
    IS(p.shared_blocks, 4);
    IS(p.reuse_gap.n, 4);
    IS(p.reuse_gap.sum, 24);
    r.now = 20;
    OK(append(r.m, b, 1, list_of(&copies))); /* the partly filled last block of each layer is copied */
    p = read_all(&r, l);
    IS(copies.list.n, 2);
    IS(p.copied_blocks, 2);
    IS(p.shared, 2);
    IS(p.held, 6);
    OK(kvf_seq_free(r.m, a)); /* its last blocks are pinned by the pending copies */
    p = read_all(&r, l);
    IS(p.held, 6);
    IS(p.shared, 0);
    IS(p.freed_blocks, 0);
    r.now = 30;
    OK(kvf_copies_done(r.m, &copies.list));
    p = read_all(&r, l);
    IS(p.held, 4);
    IS(p.freed_by_end, 2);
    IS(p.lifetime.sum, 2 * 20);
    IS(p.shared_max, 4);

    kvf_block handle, second;
    OK(kvf_block_take(r.m, 0, &handle));
    OK(kvf_block_hold(r.m, block(r.m, b, 1, 0), &second));
    p = read_all(&r, l);
    IS(p.outside, 1);
    IS(l[1].shared, 1);
    OK(kvf_block_release(r.m, handle));
    OK(kvf_block_release(r.m, second));
    OK(kvf_seq_rollback(r.m, b, 5)); /* 13 slots become 8: the second block of each layer falls free */
    p = read_all(&r, l);
    IS(p.freed_by_release, 1);
    IS(p.freed_by_rollback, 2);
    IS(p.held, 2);
    kvf_manager_destroy(r.m);
}

static uint32_t drain(const rig *r, kvf_profile_event *events, uint32_t capacity) {
    uint32_t n = 0;
    OK(kvf_profile_drain(r->m, events, capacity, &n));
    return n;
}

Test(profile, events_tell_what_happened_in_order) {
    rig r;
    rig_make(&r, 32, 64, true);
    list copies;
    kvf_profile_event e[64];
    r.now = 5;
    kvf_seq a = new_seq(r.m), b = 0;
    OK(append(r.m, a, 12, NULL));
    OK(kvf_seq_fork(r.m, a, list_of(&copies), &b));
    OK(append(r.m, b, 1, list_of(&copies)));
    OK(kvf_copies_done(r.m, &copies.list));
    r.now = 9;
    kvf_compact_item item = {a, 0, 8, NULL};
    kvf_compaction c;
    OK(kvf_compact_begin(r.m, &item, 1, &c)); /* its first block is b's too: a fresh row */
    r.now = 12;
    OK(kvf_compact_commit(r.m));
    OK(kvf_seq_free(r.m, b));
    static const struct {
        uint32_t kind, layer, seq, n_blocks;
    } expected[] = {{KVF_PROFILE_ALLOC, 0, 0, 2},   {KVF_PROFILE_ALLOC, 1, 0, 2}, {KVF_PROFILE_SHARE, 0, 1, 2},
                    {KVF_PROFILE_SHARE, 1, 1, 2},   {KVF_PROFILE_ALLOC, 0, 1, 1}, {KVF_PROFILE_COPY, 0, 1, 1},
                    {KVF_PROFILE_ALLOC, 1, 1, 1},   {KVF_PROFILE_COPY, 1, 1, 1},  {KVF_PROFILE_ALLOC, 0, 0, 1},
                    {KVF_PROFILE_COMPACT, 0, 0, 1}, {KVF_PROFILE_FREE, 0, 0, 1},  {KVF_PROFILE_FREE, 0, 1, 2},
                    {KVF_PROFILE_FREE, 1, 1, 1}};
    uint32_t n = drain(&r, e, 64);
    IS(n, sizeof expected / sizeof expected[0]);
    for (uint32_t i = 0; i < n; i++) {
        cr_assert(e[i].kind == expected[i].kind && e[i].layer == expected[i].layer && e[i].seq == expected[i].seq &&
                      e[i].n_blocks == expected[i].n_blocks,
                  "event %u: %s layer %u seq %u, %u blocks", i, kvf_profile_kind_name(e[i].kind), e[i].layer, e[i].seq,
                  e[i].n_blocks);
        IS(e[i].time, i < 8 ? 5 : i == 8 ? 9 : 12);
    }
    IS(e[9].duration, 3);
    IS(e[9].slots_before, 12);
    IS(e[9].slots_after, 8);
    IS(e[5].block, block(r.m, a, 0, 0) == e[5].block ? UINT32_MAX : e[5].block); /* not the compacted row's */
    IS(e[5].other, e[4].block);
    IS(drain(&r, e, 64), 0);
    kvf_manager_destroy(r.m);
}

/* A reader that never drains: later events are counted as dropped, nothing else differs. */
Test(profile, a_full_ring_drops_and_counts) {
    rig r;
    rig_make(&r, 32, 5, true); /* 8 */
    kvf_profile_event e[64];
    for (uint32_t i = 0; i < 50; i++) {
        kvf_seq s = new_seq(r.m);
        OK(append(r.m, s, 8, NULL));
        OK(kvf_seq_free(r.m, s));
    }
    kvf_profile p = read_all(&r, NULL);
    IS(p.events, 8);
    IS(p.events_dropped, 50 * 4 - 8);
    IS(p.taken_blocks, 100);
    IS(p.freed_blocks, 100);
    IS(drain(&r, e, 3), 3); /* the oldest first, a part at a time */
    IS(e[0].kind, KVF_PROFILE_ALLOC);
    IS(e[2].kind, KVF_PROFILE_FREE);
    IS(drain(&r, e, 64), 5);
    kvf_seq s = new_seq(r.m);
    OK(append(r.m, s, 8, NULL));
    IS(drain(&r, e, 64), 2);
    kvf_manager_destroy(r.m);
}

Test(profile, the_clock_is_the_callers_and_never_goes_back) {
    rig r;
    rig_make(&r, 8, 0, false);
    OK(kvf_profile_tick(r.m, 7));
    kvf_seq s = new_seq(r.m);
    IS(read_all(&r, NULL).now, 7);
    OK(append(r.m, s, 8, NULL));
    OK(kvf_profile_tick(r.m, 3));
    OK(kvf_seq_free(r.m, s));
    kvf_profile p = read_all(&r, NULL);
    IS(p.now, 7);
    IS(p.n_clock_back, 1);
    IS(p.lifetime.buckets[0], 2); /* as if it had stood still */
    OK(kvf_profile_tick(r.m, 9));
    kvf_manager_destroy(r.m);

    rig_make(&r, 8, 0, true);
    r.now = 50;
    s = new_seq(r.m);
    r.now = 20;
    OK(append(r.m, s, 8, NULL));
    p = read_all(&r, NULL);
    IS(p.now, 50);
    IS(p.n_clock_back, 1);
    kvf_manager_destroy(r.m);
}

/* Two managers go through the same calls, one with a profile: same ids, same figures. */
Test(profile, changes_nothing_in_the_manager) {
    rig r;
    rig_make(&r, 32, 0, true);
    kvf_manager *plain = make((shape){2, 1, 1, 8, 32, 32, 4, 64}), *both[] = {r.m, plain};
    kvf_profile p = {.struct_size = sizeof p};
    dump d[2];
    for (int i = 0; i < 2; i++) {
        list copies;
        kvf_seq a = new_seq(both[i]), b = 0;
        OK(append(both[i], a, 20, NULL));
        OK(kvf_seq_fork(both[i], a, list_of(&copies), &b));
        OK(append(both[i], b, 3, list_of(&copies)));
        OK(kvf_copies_done(both[i], &copies.list));
        compact(both[i], a, 1, 9);
        kvf_seq seqs[] = {a, b};
        dump_take(&d[i], both[i], seqs, 2);
    }
    dump_same(&d[0], &d[1]);
    IS(kvf_profile_read(plain, &p, NULL, 0, 0), KVF_E_STATE);
    kvf_manager_destroy(r.m);
    kvf_manager_destroy(plain);
}

Test(profile, refuses_what_is_wrong) {
    rig r;
    rig_make(&r, 8, 0, true);
    kvf_profile p = {.struct_size = sizeof p};
    kvf_profile_layer l[3];
    uint32_t n;
    kvf_profile_event e;
    FAILS(KVF_E_INVALID, kvf_profile_read(r.m, &p, l, sizeof *l, 3));
    FAILS(KVF_E_INVALID, kvf_profile_read(r.m, NULL, NULL, 0, 0));
    FAILS(KVF_E_INVALID, kvf_profile_read(NULL, &p, NULL, 0, 0));
    FAILS(KVF_E_INVALID, kvf_profile_drain(r.m, NULL, 1, &n));
    FAILS(KVF_E_INVALID, kvf_profile_drain(r.m, &e, 1, NULL));
    kvf_manager *plain = make((shape){2, 1, 1, 8, 8, 8, 4, 64});
    FAILS(KVF_E_STATE, kvf_profile_tick(plain, 1));
    FAILS(KVF_E_STATE, kvf_profile_drain(plain, &e, 1, &n));
    kvf_manager_config c = config_of((shape){2, 1, 1, 8, 8, 8, 4, 64});
    kvf_profile_config pc;
    kvf_profile_config_init(&pc, sizeof pc);
    pc.n_events = (1u << 24) + 1;
    c.profile = &pc;
    kvf_error err = {.text = ""};
    kvf_manager *m = NULL;
    FAILS(KVF_E_INVALID, kvf_manager_create(&c, &m, &err));
    cr_assert(strstr(err.text, "n_events 16777217: must be at most 16777216"), "%s", err.text);
    size_t with = 0, without = 0;
    pc.n_events = 0;
    OK(kvf_manager_bytes(&c, &with, NULL));
    c.profile = NULL;
    OK(kvf_manager_bytes(&c, &without, NULL));
    cr_assert_gt(with, without + 4096 * sizeof e);
    p.struct_size = offsetof(kvf_profile, total) + sizeof p.total; /* an older caller's */
    p.free = 77;
    OK(kvf_profile_read(r.m, &p, NULL, 0, 0));
    IS(p.total, 8);
    IS(p.free, 77);
    IS(kvf_histogram_floor(0), 0);
    IS(kvf_histogram_floor(1), 1);
    IS(kvf_histogram_floor(64), UINT64_C(1) << 63);
    cr_assert_str_eq(kvf_profile_kind_name(KVF_PROFILE_COMPACT), "compact");
    cr_assert_str_eq(kvf_profile_kind_name(99), "?");
    kvf_manager_destroy(plain);
    kvf_manager_destroy(r.m);
}

/* A prompt of 16 tokens in 2 layers: stored, idle, hit, idle again, evicted by another that needs the room. */
Test(profile, the_prefix_cache_by_hand) {
    rig r = {NULL, 0};
    kvf_manager_config c = config_of((shape){2, 1, 1, 8, 6, 6, 4, 64});
    kvf_profile_config pc;
    kvf_profile_config_init(&pc, sizeof pc);
    pc.clock = clock_of, pc.clock_ctx = &r;
    c.profile = &pc;
    c.prefix_cache = 1;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_manager_create(&c, &r.m, &err), KVF_OK, "%s", err.text);
    uint32_t tokens[17];
    for (uint32_t i = 0; i < 17; i++) tokens[i] = i + 1;
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = 17};
    kvf_profile_layer l[2];
    r.now = 10;
    kvf_seq s = new_seq(r.m);
    OK(append(r.m, s, 16, NULL));
    OK(kvf_prefix_store(r.m, s, &key, 16, NULL, NULL));
    r.now = 15;
    OK(kvf_seq_free(r.m, s));
    kvf_profile p = read_all(&r, l);
    IS(p.held, 0);
    IS(p.cached, 4);
    IS(p.free, 2);
    IS(l[1].cached, 2);
    IS(p.freed_blocks, 0); /* they live on */

    r.now = 30;
    kvf_prefix_match match = {.struct_size = sizeof match};
    OK(kvf_prefix_lookup(r.m, &key, NULL, &match));
    IS(match.n_tokens, 16);
    s = new_seq(r.m);
    OK(kvf_prefix_attach(r.m, s, &key, &match, NULL, NULL));
    p = read_all(&r, l);
    IS(p.held, 4);
    IS(p.cached, 0);
    IS(p.reuse_gap.n, 4);
    IS(p.reuse_gap.sum, 4 * 20);
    IS(p.taken_blocks, 4);
    OK(kvf_seq_free(r.m, s));

    r.now = 50;
    s = new_seq(r.m);
    OK(append(r.m, s, 24, NULL)); /* 6 blocks: all that there are */
    p = read_all(&r, l);
    IS(p.held, 6);
    IS(p.cached, 0);
    IS(p.cached_max, 4);
    IS(p.freed_by_eviction, 4);
    IS(p.lifetime.sum, 4 * 40);
    IS(p.idle_time.sum, 4 * 20);
    IS(p.free_gap.sum, 0); /* taken again at once */
    IS(p.free_gap.n, 4);
    IS(p.taken_blocks, 10);
    kvf_manager_destroy(r.m);
}

static void make_cached(rig *r, uint32_t n_blocks) {
    kvf_manager_config c = config_of((shape){2, 1, 1, 8, n_blocks, n_blocks, 4, 64});
    kvf_profile_config pc;
    kvf_profile_config_init(&pc, sizeof pc);
    pc.clock = clock_of, pc.clock_ctx = r;
    c.profile = &pc;
    c.prefix_cache = 1;
    *r = (rig){NULL, 0};
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_manager_create(&c, &r->m, &err), KVF_OK, "%s", err.text);
}

static kvf_seq stored_seq(rig *r, const kvf_prefix_key *key) {
    kvf_seq s = new_seq(r->m);
    OK(append(r->m, s, key->n_tokens, NULL));
    OK(kvf_prefix_store(r->m, s, key, key->n_tokens, NULL, NULL));
    return s;
}

/* Blocks that a compaction lets fall idle into the prefix cache are given back; what it takes for tables that share is not; and
 * what has been given back is never taken back. */
Test(profile, r9_compactions_give_back_into_the_prefix_cache) {
    rig r;
    make_cached(&r, 64);
    uint32_t tokens[40];
    for (uint32_t i = 0; i < 40; i++) tokens[i] = i + 1;
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = 40};
    kvf_seq a = stored_seq(&r, &key), b = 0; /* 5 blocks a layer */
    compact(r.m, a, 0, 11);                  /* to 2 fresh ones: what it had stays cached */
    kvf_profile p = read_all(&r, NULL);
    IS(p.cached, 5);
    IS(p.freed_by_compaction, 0);
    IS(p.freed_bytes, (5 - 2) * 1000);
    OK(kvf_seq_fork(r.m, a, NULL, &b));
    compact(r.m, b, 0, 8); /* shared: to a fresh one, and nothing falls free */
    p = read_all(&r, NULL);
    IS(p.freed_bytes, (5 - 2) * 1000);
    compact(r.m, a, 0, 8); /* the second of its two falls free: as many as the fork has taken */
    p = read_all(&r, NULL);
    IS(p.freed_by_compaction, 1);
    IS(p.freed_bytes, (5 - 2) * 1000);
    compact(r.m, a, 1, 8); /* the fork holds them too */
    compact(r.m, b, 1, 8); /* the last holder: 5 fall idle, and 2 were taken */
    p = read_all(&r, NULL);
    IS(p.freed_bytes, (5 - 2 + 5 - 2) * 1000);
    kvf_manager_destroy(r.m);
}

/* Of one content two sequences have computed blocks: the idle ones give way to those in use. That is no eviction, and nor is what is
 * cleared; what makes room is one, in both counters. */
Test(profile, r10_each_freed_block_has_one_cause) {
    rig r;
    make_cached(&r, 16);
    uint32_t tokens[64];
    for (uint32_t i = 0; i < 64; i++) tokens[i] = i + 1;
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = 16};
    OK(kvf_seq_free(r.m, stored_seq(&r, &key)));
    kvf_seq s = stored_seq(&r, &key); /* computed again without a look-up */
    kvf_profile p = read_all(&r, NULL);
    kvf_prefix_stats c = {.struct_size = sizeof c};
    OK(kvf_prefix_stats_read(r.m, &c));
    IS(c.adopted, 2);
    IS(p.freed_by_adoption, 4);
    IS(p.freed_by_eviction, 0);
    IS(c.evicted_blocks, 0);
    OK(kvf_seq_free(r.m, s));
    OK(kvf_prefix_clear(r.m));
    p = read_all(&r, NULL);
    IS(p.freed_by_removal, 4);
    IS(p.freed_by_eviction, 0);
    OK(kvf_seq_free(r.m, stored_seq(&r, &key)));
    s = new_seq(r.m);
    OK(append(r.m, s, 64, NULL)); /* all 16 blocks */
    p = read_all(&r, NULL);
    OK(kvf_prefix_stats_read(r.m, &c));
    IS(p.freed_by_eviction, 4);
    IS(c.evicted_blocks, 4);
    IS(p.freed_blocks, p.freed_by_adoption + p.freed_by_removal + p.freed_by_eviction);
    kvf_manager_destroy(r.m);
}
