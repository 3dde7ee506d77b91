/* Layers of a window and layers that keep nothing: what is dropped and when, what is refused. */
#include "kvfold/prefix.h"
#include "kvfold/profile.h"
#include "test_blockmgr_util.h"

enum { BS = 8, NOTHING = UINT32_MAX };

static kvf_manager *make_windows(uint32_t layers, const uint32_t *windows, uint32_t n_blocks, uint32_t max_slots,
                                 int cache) {
    kvf_manager_config c = config_of((shape){layers, 1, 1, BS, n_blocks, 16, 4, max_slots});
    kvf_manager *m = NULL;
    kvf_error err = {.text = ""};
    kvf_profile_config profile;
    kvf_profile_config_init(&profile, sizeof profile);
    c.layer_windows = windows;
    c.prefix_cache = (uint32_t)cache;
    c.profile = &profile;
    cr_assert_eq(kvf_manager_create(&c, &m, &err), KVF_OK, "%s", err.text);
    return m;
}

Test(blockmgr_windows, config_is_copied_and_checked) {
    uint32_t windows[3] = {0, 20, NOTHING};
    kvf_manager *m = make_windows(3, windows, 8, 64, 0);
    windows[1] = 5;
    const uint32_t *kept = kvf_manager_get_config(m)->layer_windows;
    cr_assert(kept != windows && kept[0] == 0 && kept[1] == 20 && kept[2] == KVF_LAYER_NONE);
    kvf_manager_destroy(m);
    kvf_manager_config c = config_of((shape){3, 1, 1, BS, 8, 8, 4, 64});
    kvf_error err = {.text = ""};
    size_t bytes = 0;
    windows[0] = windows[1] = NOTHING;
    c.layer_windows = windows;
    FAILS(KVF_E_INVALID, kvf_manager_bytes(&c, &bytes, &err));
    cr_assert(strstr(err.text, "all 3 are KVF_LAYER_NONE"), "%s", err.text);
    windows[0] = 0;
    OK(kvf_manager_bytes(&c, &bytes, &err));
    c.prefix_cache = 1;
    FAILS(KVF_E_UNSUPPORTED, kvf_manager_bytes(&c, &bytes, &err));
    cr_assert(strstr(err.text, "2 are KVF_LAYER_NONE"), "%s", err.text);
}

/* Any number of positions in a pool that has just what the header says is the most a window holds. */
Test(blockmgr_windows, a_window_holds_no_more_than_the_header_says_and_always_grows) {
    for (uint32_t window = 1; window <= 26; window++)
        for (uint32_t n = 1; n <= 21; n += 4) {
            uint32_t most = window + n + BS - 2, windows[2] = {window, NOTHING}, n_blocks = (most + BS - 1) / BS;
            uint32_t reserve[2] = {most, most}, held_most = 0;
            kvf_manager *m = make_windows(2, windows, n_blocks, 64, 0);
            kvf_seq s = new_seq(m);
            OK(kvf_seq_reserve(
                m, s, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = reserve, .with_scores = 0}));
            for (uint32_t pos = 0; pos < 200; pos += n) {
                uint32_t missing = 9;
                OK(kvf_can_append(m, &(kvf_append_item){s, n}, 1, &missing));
                OK(append(m, s, n, NULL));
                AUDIT(m);
                uint32_t held = slots(m, s, 0), next_pos = 0;
                OK(kvf_seq_next_pos(m, s, &next_pos));
                held_most = held > held_most ? held : held_most;
                cr_assert(next_pos == pos + n && held <= most && slots(m, s, 1) == 0);
                /* What the first of them saw, and the tokens themselves. */
                cr_assert_geq(held, pos < window - 1 ? next_pos : window - 1 + n);
            }
            cr_assert_eq(occupancy(m).blocks.n_promised + blocks(m, s, 0), n_blocks, "the reservation has worn off");
            cr_assert_gt(held_most, most - BS);
            OK(kvf_seq_rollback(m, s, n)); /* a step */
            OK(append(m, s, n, NULL));
            OK(kvf_seq_free(m, s));
            cr_assert_eq(n_free(m), n_blocks);
            kvf_manager_destroy(m);
        }
}

Test(blockmgr_windows, blocks_go_as_the_last_of_their_positions_leaves) {
    const uint32_t windows[2] = {10, 0};
    kvf_manager *m = make_windows(2, windows, 16, 64, 0);
    kvf_seq s = new_seq(m);
    OK(append(m, s, 17, NULL)); /* position 17 sees 8..17 */
    uint32_t first = block(m, s, 0, 0), second = block(m, s, 0, 1);
    cr_assert_eq(slots(m, s, 0), 17);
    OK(append(m, s, 1, NULL));
    cr_assert_eq(slots(m, s, 0), 10);
    cr_assert_eq(block(m, s, 0, 0), second);
    cr_assert_eq(slots(m, s, 1), 18);
    OK(append(m, s, 7, NULL)); /* position 24 was the last to see 15 */
    cr_assert_eq(block(m, s, 0, 0), second);
    OK(append(m, s, 1, NULL));
    cr_assert_eq(slots(m, s, 0), 10);
    cr_assert_neq(block(m, s, 0, 0), second);
    kvf_profile p = {.struct_size = sizeof p};
    kvf_profile_layer l[2];
    OK(kvf_profile_read(m, &p, l, sizeof *l, 2));
    cr_assert(p.freed_by_window == 2 && p.freed_blocks == 2 && l[0].freed_blocks == 2 && l[1].freed_blocks == 0);
    kvf_profile_event e[64];
    uint32_t n = 0, n_freed = 0;
    OK(kvf_profile_drain(m, e, 64, &n));
    for (uint32_t i = 0; i < n; i++)
        if (e[i].kind == KVF_PROFILE_FREE) {
            cr_assert(e[i].layer == 0 && e[i].block == (n_freed ? second : first) && e[i].seq != UINT32_MAX);
            n_freed += e[i].n_blocks;
        }
    cr_assert_eq(n_freed, 2);
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(blockmgr_windows, a_fork_keeps_what_its_parent_drops) {
    const uint32_t windows[1] = {9};
    kvf_manager *m = make_windows(1, windows, 8, 64, 0);
    static list l;
    kvf_seq a = new_seq(m), b = 0;
    OK(append(m, a, 20, NULL));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    uint32_t first = block(m, a, 0, 0);
    OK(append(m, a, 4, &l.list)); /* drops one, copies the last */
    cr_assert_eq(l.list.n, 1);
    cr_assert_eq(block(m, b, 0, 0), first);
    cr_assert_eq(slots(m, a, 0), 16);
    cr_assert_eq(occupancy(m).blocks.n_shared, 1);
    OK(kvf_copies_done(m, &l.list));
    OK(kvf_seq_free(m, b));
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* What two of a batch give up serves them both, and nothing changes when it does not suffice. */
Test(blockmgr_windows, what_a_batch_drops_serves_it) {
    const uint32_t windows[1] = {8};
    kvf_manager *m = make_windows(1, windows, 6, 64, 0);
    kvf_seq s[2] = {new_seq(m), new_seq(m)};
    static dump before, after;
    uint32_t missing = 0;
    OK(append(m, s[0], 24, NULL));
    OK(append(m, s[1], 24, NULL));
    cr_assert_eq(n_free(m), 0);
    kvf_append_item items[2] = {{s[0], 17}, {s[1], 16}}; /* each drops two; five are taken */
    dump_take(&before, m, s, 2);
    FAILS(KVF_E_NO_BLOCKS, kvf_can_append(m, items, 2, &missing));
    cr_assert_eq(missing, 1);
    FAILS(KVF_E_NO_BLOCKS, kvf_append(m, items, 2, NULL));
    dump_take(&after, m, s, 2);
    dump_same(&before, &after);
    items[0].n_tokens = 16;
    OK(kvf_append(m, items, 2, NULL));
    AUDIT(m);
    cr_assert_eq(n_free(m), 0);
    cr_assert_eq(slots(m, s[0], 0), 24);
    kvf_manager_destroy(m);
}

Test(blockmgr_windows, what_cannot_be_done_to_a_window_is_refused) {
    const uint32_t windows[3] = {10, 0, NOTHING}, cover[3] = {5, 5, 0}, reserve[3] = {32, 32, 32};
    kvf_manager *m = make_windows(3, windows, 32, 64, 0);
    kvf_seq s = new_seq(m);
    kvf_compaction c;
    for (uint32_t i = 0; i < 30; i++) OK(append(m, s, 1, NULL));
    for (uint32_t l = 0; l < 3; l += 2) {
        kvf_compact_item item = {s, l, 3, NULL};
        FAILS(KVF_E_INVALID, kvf_compact_begin(m, &item, 1, &c));
        cr_assert(strstr(kvf_manager_error(m)->text, l ? "keeps nothing" : "keeps a window"), "%s",
                  kvf_manager_error(m)->text);
    }
    compact(m, s, 1, 12);
    /* 30 positions, of which the window has 16..29: position 27 would need 18, position 23 needs 14. */
    FAILS(KVF_E_INVALID, kvf_seq_rollback(m, s, 7));
    cr_assert(strstr(kvf_manager_error(m)->text, "window of 10"), "%s", kvf_manager_error(m)->text);
    OK(kvf_seq_rollback(m, s, 3));
    OK(kvf_seq_take_scores(m, s, cover));
    cr_assert_eq(occupancy(m).score_pages.n_held, 1);
    OK(kvf_seq_reserve(m, s, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = reserve, .with_scores = 1}));
    cr_assert_eq(occupancy(m).score_pages.n_promised, 3);
    cr_assert_eq(occupancy(m).blocks.n_promised, (4 - blocks(m, s, 0)) + (4 - blocks(m, s, 1)));
    OK(append(m, s, 20, NULL));
    AUDIT(m);
    cr_assert_eq(occupancy(m).score_pages.n_held, blocks(m, s, 1));
    kvf_manager_destroy(m);
}

/* ---- With the prefix cache ------------------------------------------------------------------------------------- */

static kvf_status store_all(kvf_manager *m, kvf_seq s, const uint32_t *tokens, uint32_t n, uint32_t *n_stored) {
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = n};
    return kvf_prefix_store(m, s, &key, n, NULL, n_stored);
}
static kvf_prefix_match look_for(kvf_manager *m, const uint32_t *tokens, uint32_t n) {
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = n};
    kvf_prefix_match match = {.struct_size = sizeof match};
    OK(kvf_prefix_lookup(m, &key, NULL, &match));
    return match;
}

Test(blockmgr_windows, what_is_stored_before_it_is_dropped_is_found) {
    const uint32_t windows[2] = {0, 12};
    uint32_t tokens[64], n_stored = 0, first;
    for (uint32_t i = 0; i < 64; i++) tokens[i] = i + 1;
    kvf_manager *m = make_windows(2, windows, 32, 64, 1);
    kvf_seq s = new_seq(m), hit = new_seq(m);
    for (uint32_t n = 16; n <= 48; n += 16) {
        OK(append(m, s, 16, NULL));
        OK(store_all(m, s, tokens, n, &n_stored));
        cr_assert_eq(n_stored, 2);
        AUDIT(m);
    }
    cr_assert_lt(blocks(m, s, 1), 6);
    kvf_prefix_match match = look_for(m, tokens, 60);
    cr_assert_eq(match.n_tokens, 48);
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = 60};
    OK(kvf_prefix_attach(m, hit, &key, &match, NULL, NULL));
    cr_assert(slots(m, hit, 0) == 48 && slots(m, hit, 1) == 48);
    first = block(m, hit, 0, 0);
    OK(append(m, hit, 12, NULL)); /* drops what is out of the window, which the cache keeps */
    AUDIT(m);
    cr_assert(slots(m, hit, 0) == 60 && slots(m, hit, 1) == 60 - 32);
    cr_assert_eq(block(m, hit, 0, 0), first);
    cr_assert_eq(look_for(m, tokens, 60).n_tokens, 48);
    OK(store_all(m, hit, tokens, 60, &n_stored));
    cr_assert_eq(n_stored, 1);
    cr_assert_eq(look_for(m, tokens, 60).n_tokens, 56);
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(blockmgr_windows, what_is_dropped_before_it_is_stored_ends_the_chain) {
    const uint32_t windows[2] = {0, 12};
    uint32_t tokens[64], n_stored = 77;
    for (uint32_t i = 0; i < 64; i++) tokens[i] = i + 1;
    kvf_manager *m = make_windows(2, windows, 32, 64, 1);
    kvf_seq s = new_seq(m), other = new_seq(m);
    OK(append(m, s, 30, NULL));
    OK(append(m, s, 10, NULL));
    OK(store_all(m, s, tokens, 40, &n_stored));
    cr_assert_eq(n_stored, 0);
    cr_assert_eq(look_for(m, tokens, 41).n_tokens, 0);
    AUDIT(m);
    OK(append(m, other, 24, NULL)); /* another stores what is missing: then the chain goes on over it */
    OK(store_all(m, other, tokens, 24, &n_stored));
    cr_assert_eq(n_stored, 3);
    OK(store_all(m, s, tokens, 40, &n_stored));
    cr_assert_eq(n_stored, 2);
    cr_assert_eq(look_for(m, tokens, 41).n_tokens, 40);
    AUDIT(m);
    kvf_manager_destroy(m);
}
