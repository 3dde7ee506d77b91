/* Layers of different geometry: a pool of blocks for each class, one decision over all of them. */
#include "kvfold/prefix.h"
#include "kvfold/profile.h"
#include "test_blockmgr_util.h"

enum { BS = 8 };

typedef struct setup {
    uint32_t n_layers, n_classes;
    uint32_t layer_class[4];
    kvf_block_class classes[4];
    uint32_t cache, host_pages;
} setup;

static kvf_manager_config config_for(const setup *s) {
    kvf_manager_config c = config_of((shape){s->n_layers, 1, 1, BS, 0, 32, 4, 64});
    c.block_bytes = 0;
    c.n_classes = s->n_classes;
    c.classes = s->classes;
    c.layer_class = s->layer_class;
    c.prefix_cache = s->cache;
    c.n_host_score_pages = s->host_pages;
    return c;
}

static kvf_manager *make_classes(const setup *s) {
    kvf_manager_config c = config_for(s);
    kvf_manager *m = NULL;
    kvf_error err = {.text = ""};
    kvf_profile_config profile;
    kvf_profile_config_init(&profile, sizeof profile);
    c.profile = &profile;
    cr_assert_eq(kvf_manager_create(&c, &m, &err), KVF_OK, "%s", err.text);
    return m;
}

static kvf_pool_occupancy of_class(const kvf_manager *m, uint32_t c) {
    kvf_pool_occupancy p;
    OK(kvf_class_occupancy(m, c, &p, NULL, NULL));
    return p;
}

/* The ids of each layer's blocks are of its class, whose ids count on from those before it. */
static void expect_ids(const kvf_manager *m, kvf_seq seq, const setup *s) {
    for (uint32_t l = 0; l < s->n_layers; l++) {
        uint32_t first = 0, c = s->layer_class[l];
        for (uint32_t i = 0; i < c; i++) first += s->classes[i].n_blocks;
        for (uint32_t b = 0; b < blocks(m, seq, l); b++)
            cr_assert(block(m, seq, l, b) >= first && block(m, seq, l, b) < first + s->classes[c].n_blocks,
                      "layer %u has block %u", l, block(m, seq, l, b));
    }
}

static void expect_refused(const kvf_manager_config *c, kvf_status status, const char *what) {
    kvf_error err = {.text = ""};
    size_t bytes = 0;
    FAILS(status, kvf_manager_bytes(c, &bytes, &err));
    cr_assert(strstr(err.text, what), "%s", err.text);
}

Test(blockmgr_classes, a_config_is_copied_checked_and_can_be_given_again) {
    setup s = {3, 2, {0, 1, 0}, {{8, 3, 100}, {4, 2, 30}}, 0, 0};
    kvf_manager *m = make_classes(&s);
    s.layer_class[0] = 1;
    s.classes[1].n_blocks = 99;
    const kvf_manager_config *kept = kvf_manager_get_config(m);
    cr_assert(kept->n_blocks == 12 && kept->n_host_blocks == 5 && kept->n_score_pages == 32);
    cr_assert(kept->layer_class[0] == 0 && kept->layer_class[1] == 1 && kept->classes[1].n_blocks == 4);
    size_t bytes = 0;
    OK(kvf_manager_bytes(kept, &bytes, NULL));
    kvf_manager_destroy(m);
    s = (setup){3, 2, {0, 1, 0}, {{8, 3, 100}, {4, 2, 30}}, 0, 0};
    kvf_manager_config c = config_for(&s);
    c.n_blocks = 11;
    expect_refused(&c, KVF_E_INVALID, "n_blocks 11");
    c = config_for(&s);
    c.n_host_blocks = 4;
    expect_refused(&c, KVF_E_INVALID, "n_host_blocks 4");
    c = config_for(&s);
    c.block_bytes = 7;
    expect_refused(&c, KVF_E_INVALID, "block_bytes 7");
    c = config_for(&s);
    c.layer_class = NULL;
    expect_refused(&c, KVF_E_INVALID, "n_classes 2");
    c = config_for(&s);
    c.n_classes = KVF_BLOCK_CLASSES_MAX + 1;
    expect_refused(&c, KVF_E_INVALID, "n_classes 9");
    c = config_for(&s);
    c.n_classes = 0;
    expect_refused(&c, KVF_E_INVALID, "n_classes 0");
    c = config_for(&s);
    s.layer_class[2] = 2;
    expect_refused(&c, KVF_E_INVALID, "layer_class[2] 2");
    s.layer_class[1] = s.layer_class[2] = 0;
    expect_refused(&c, KVF_E_INVALID, "classes[1]: no layer");
    s.layer_class[1] = 1;
    s.classes[0].n_blocks = 0;
    expect_refused(&c, KVF_E_INVALID, "classes[0]: n_blocks 0");
    s.classes[0].n_blocks = s.classes[1].n_blocks = 3u << 29;
    expect_refused(&c, KVF_E_OVERFLOW, "n_blocks: 3221225472");
    s.classes[0] = (kvf_block_class){8, 0, UINT64_MAX / 16};
    expect_refused(&c, KVF_E_OVERFLOW, "classes[0]: block_bytes");
}

/* A5, where each layer has a pool of its own and any of them may be the one that is empty. */
Test(blockmgr_classes, a5_what_one_class_lacks_takes_nothing_from_the_others) {
    for (uint32_t short_of = 0; short_of < 3; short_of++) {
        setup s = {3, 3, {0, 1, 2}, {{4, 0, 1}, {4, 0, 1}, {4, 0, 1}}, 0, 0};
        s.classes[short_of].n_blocks = 2;
        kvf_manager *m = make_classes(&s);
        static dump before, after;
        const uint32_t reserve[3] = {32, 32, 32};
        kvf_seq held = new_seq(m), a = new_seq(m), child = 0, all[2] = {held, a};
        uint32_t missing = 0;
        OK(append(m, held, 8, NULL));
        OK(append(m, a, 8, NULL));
        cr_assert_eq(of_class(m, short_of).n_free, 0);
        dump_take(&before, m, all, 2);
        for (int i = 0; i < 100; i++) {
            kvf_append_item item = {a, 1};
            FAILS(KVF_E_NO_BLOCKS, kvf_can_append(m, &item, 1, &missing));
            cr_assert_eq(missing, 1);
            FAILS(KVF_E_NO_BLOCKS, append(m, a, 1, NULL));
            FAILS(KVF_E_NO_BLOCKS,
                  kvf_seq_reserve(
                      m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = reserve, .with_scores = 0}));
            AUDIT(m);
        }
        dump_take(&after, m, all, 2);
        dump_same(&before, &after);
        OK(kvf_seq_free(m, held));
        OK(append(m, a, 8, NULL));
        expect_ids(m, a, &s);
        OK(kvf_seq_fork(m, a, NULL, &child));
        compact(m, a, (short_of + 1) % 3, 3); /* to a fresh block: that class has one */
        kvf_compact_item item = {a, short_of, 3, NULL};
        kvf_compaction c;
        FAILS(KVF_E_NO_BLOCKS, kvf_compact_begin(m, &item, 1, &c));
        AUDIT(m);
        OK(kvf_seq_free(m, child));
        OK(kvf_seq_free(m, a));
        for (uint32_t i = 0; i < 3; i++) cr_assert_eq(of_class(m, i).n_free, s.classes[i].n_blocks);
        AUDIT(m);
        kvf_manager_destroy(m);
    }
}

Test(blockmgr_classes, a_fork_is_promised_in_every_class_or_fails) {
    const setup s = {2, 2, {0, 1}, {{8, 0, 1}, {3, 0, 1}}, 0, 0};
    kvf_manager *m = make_classes(&s);
    const uint32_t reserve[2] = {16, 16};
    kvf_seq a = new_seq(m), child = 0;
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = reserve, .with_scores = 0}));
    cr_assert(of_class(m, 0).n_promised == 2 && of_class(m, 1).n_promised == 2);
    FAILS(KVF_E_NO_BLOCKS, kvf_seq_fork(m, a, NULL, &child)); /* two more of the first, not of the second */
    AUDIT(m);
    OK(append(m, a, 16, NULL));
    cr_assert(of_class(m, 0).n_promised == 0 && of_class(m, 1).n_promised == 0);
    OK(kvf_seq_rollback(m, a, 8));
    cr_assert(of_class(m, 0).n_promised == 1 && of_class(m, 1).n_promised == 1);
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(blockmgr_classes, handles_and_copies_are_of_their_class) {
    const setup s = {2, 2, {1, 0}, {{3, 0, 1}, {5, 0, 1}}, 0, 0};
    kvf_manager *m = make_classes(&s);
    kvf_block h[8], x;
    static list l;
    for (uint32_t i = 0; i < 3; i++) OK(kvf_block_take(m, 0, &h[i]));
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &x));
    for (uint32_t i = 3; i < 8; i++) OK(kvf_block_take(m, 1, &h[i]));
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 1, &x));
    FAILS(KVF_E_INVALID, kvf_block_take(m, 2, &x));
    FAILS(KVF_E_INVALID, kvf_block_take(m, 1, NULL));
    for (uint32_t i = 0; i < 8; i++) cr_assert_eq(kvf_block_id(h[i]), i);
    AUDIT(m);
    OK(kvf_block_hold(m, 7, &x));
    OK(kvf_block_release(m, x));
    FAILS(KVF_E_STALE, kvf_block_hold(m, 8, &x));
    for (uint32_t i = 0; i < 8; i++) OK(kvf_block_release(m, h[i]));
    for (uint32_t i = 0; i < 8; i++) FAILS(KVF_E_STALE, kvf_block_release(m, h[i]));
    cr_assert(of_class(m, 0).n_free == 3 && of_class(m, 1).n_free == 5);
    AUDIT(m);
    kvf_seq a = new_seq(m), b = 0;
    OK(append(m, a, 4, NULL));
    OK(kvf_seq_fork(m, a, NULL, &b));
    OK(append(m, b, 1, list_of(&l)));
    cr_assert_eq(l.list.n, 2);
    cr_assert(l.items[0].src >= 3 && l.items[0].dst >= 3 && l.items[1].src < 3 && l.items[1].dst < 3);
    OK(kvf_seq_free(m, a)); /* pinned until the copies are done */
    cr_assert(of_class(m, 0).n_free == 1 && of_class(m, 1).n_free == 3);
    kvf_copy right = l.items[0];
    l.items[0].src = 0; /* from another class: not pending */
    FAILS(KVF_E_STALE, kvf_copies_done(m, &l.list));
    l.items[0] = right;
    OK(kvf_copies_done(m, &l.list));
    cr_assert(of_class(m, 0).n_free == 2 && of_class(m, 1).n_free == 4);
    AUDIT(m);
    kvf_manager_destroy(m);
}

static kvf_prefix_key key_of(const uint32_t *tokens, uint32_t n) {
    return (kvf_prefix_key){.struct_size = sizeof(kvf_prefix_key), .tokens = tokens, .n_tokens = n};
}
static uint32_t hit(kvf_manager *m, const uint32_t *tokens, uint32_t n) {
    kvf_prefix_key key = key_of(tokens, n);
    kvf_prefix_match match = {.struct_size = sizeof match};
    OK(kvf_prefix_lookup(m, &key, NULL, &match));
    return match.n_tokens;
}

/* A hit is in all layers or none: what one class evicts for want of blocks is found in no other. */
Test(blockmgr_classes, a_hit_is_in_all_classes_or_none) {
    const setup s = {3, 2, {0, 1, 0}, {{16, 0, 1}, {5, 0, 1}}, 1, 0};
    uint32_t tokens[40];
    for (uint32_t i = 0; i < 40; i++) tokens[i] = i;
    kvf_manager *m = make_classes(&s);
    kvf_prefix_key key = key_of(tokens, 40);
    kvf_prefix_match match = {.struct_size = sizeof match};
    kvf_seq a = new_seq(m), b = new_seq(m);
    OK(append(m, a, 32, NULL));
    OK(kvf_prefix_store(m, a, &key, 32, NULL, NULL));
    OK(kvf_seq_free(m, a));
    cr_assert_eq(hit(m, tokens, 40), 32);
    cr_assert(of_class(m, 0).n_free == 8 && of_class(m, 1).n_free == 1);
    AUDIT(m);
    OK(append(m, b, 17, NULL)); /* three blocks a layer: the second class lacks two, the first none */
    AUDIT(m);
    cr_assert_eq(hit(m, tokens, 40), 16);
    cr_assert(of_class(m, 0).n_free == 6 && of_class(m, 1).n_free == 0);
    expect_ids(m, b, &s);
    a = new_seq(m);
    OK(kvf_prefix_lookup(m, &key, NULL, &match));
    cr_assert_eq(match.n_idle, 6);
    const uint32_t reserve[3] = {24, 24, 24};
    kvf_reserve r = {.struct_size = sizeof r, .n_slots = reserve, .growth = 1};
    FAILS(KVF_E_NO_BLOCKS,
          kvf_prefix_attach(m, a, &key, &match, &r, NULL)); /* nothing of the second class is left to promise */
    AUDIT(m);
    OK(kvf_prefix_attach(m, a, &key, &match, NULL, NULL));
    AUDIT(m);
    expect_ids(m, a, &s);
    uint32_t n_idle = 77;
    kvf_pool_occupancy p;
    OK(kvf_class_occupancy(m, 1, &p, NULL, &n_idle));
    cr_assert(n_idle == 0 && p.n_held == 5);
    FAILS(KVF_E_NO_BLOCKS, append(m, a, 1, NULL));
    kvf_manager_destroy(m);
}

Test(blockmgr_classes, a_sequence_goes_to_the_host_in_all_classes_or_stays) {
    setup s = {2, 2, {0, 1}, {{6, 6, 10}, {6, 2, 30}}, 0, 16};
    kvf_manager *m = make_classes(&s);
    static list l;
    kvf_seq a = new_seq(m);
    static dump before, after;
    OK(append(m, a, 24, NULL));
    dump_take(&before, m, &a, 1);
    FAILS(KVF_E_NO_BLOCKS, kvf_swap_out(m, &a, 1, list_of(&l))); /* three of the second class, the host has two */
    dump_take(&after, m, &a, 1);
    dump_same(&before, &after);
    cr_assert_eq(l.list.n, 0);
    OK(kvf_seq_rollback(m, a, 8));
    OK(kvf_swap_out(m, &a, 1, list_of(&l)));
    AUDIT(m);
    for (uint32_t i = 0; i < l.list.n; i++) /* of the second class: device ids from 6 on, host ids from 6 on */
        cr_assert_eq(l.items[i].src >= 6, l.items[i].dst >= 6);
    OK(kvf_copies_done(m, &l.list));
    cr_assert_eq(occupancy(m).held_bytes, 0);
    kvf_block h[6];
    for (uint32_t i = 0; i < 5; i++) OK(kvf_block_take(m, 1, &h[i]));
    FAILS(KVF_E_NO_BLOCKS, kvf_swap_in(m, &a, 1, 0, &l.list));
    OK(kvf_block_release(m, h[0]));
    FAILS(KVF_E_NO_BLOCKS, kvf_swap_in(m, &a, 1, 1, &l.list)); /* and a token more takes a third */
    AUDIT(m);
    OK(kvf_swap_in(m, &a, 1, 0, &l.list));
    AUDIT(m);
    expect_ids(m, a, &s);
    OK(kvf_copies_done(m, &l.list));
    kvf_pool_occupancy p, host;
    OK(kvf_class_occupancy(m, 1, &p, &host, NULL));
    cr_assert(p.n_free == 0 && host.n_free == 2 && host.n_held_max == 2);
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* Bytes: each block counts as much as its class says. */
Test(blockmgr_classes, bytes_are_those_of_the_classes) {
    const setup s = {2, 2, {0, 1}, {{8, 0, 1000}, {8, 0, 30}}, 0, 0};
    kvf_manager *m = make_classes(&s);
    kvf_seq a = new_seq(m);
    OK(append(m, a, 32, NULL));
    cr_assert_eq(occupancy(m).held_bytes, 4 * 1030);
    compact(m, a, 1, 10);
    cr_assert(occupancy(m).held_bytes == 4 * 1000 + 2 * 30 && occupancy(m).held_bytes_max == 4 * 1030);
    kvf_profile p = {.struct_size = sizeof p};
    OK(kvf_profile_read(m, &p, NULL, 0, 0));
    cr_assert(p.freed_bytes == 2 * 30 && p.evicted_bytes == 22 * 30 / 8, "%llu freed, %llu evicted",
              (unsigned long long)p.freed_bytes, (unsigned long long)p.evicted_bytes);
    compact(m, a, 0, 16);
    OK(kvf_profile_read(m, &p, NULL, 0, 0));
    cr_assert(p.freed_bytes == 2 * 1030 && p.evicted_bytes == 22 * 30 / 8 + 2000);
    cr_assert(p.total == 16 && p.free == 12 && p.held == 4);
    kvf_seq b = 0;
    OK(kvf_seq_fork(m, a, NULL, &b));
    compact(m, b, 1, 8); /* to a fresh block of the second class, and nothing falls free */
    OK(kvf_profile_read(m, &p, NULL, 0, 0));
    cr_assert_eq(p.freed_bytes, 2 * 1030, "%llu freed", (unsigned long long)p.freed_bytes); /* it never falls */
    compact(m, a, 1, 8); /* the block it does not share: what the fork took is made good, and no more */
    OK(kvf_profile_read(m, &p, NULL, 0, 0));
    cr_assert_eq(p.freed_bytes, 2 * 1030, "%llu freed", (unsigned long long)p.freed_bytes);
    kvf_manager_destroy(m);
}
