/* Helpers of the prefix cache's tests. */
#ifndef KVF_TEST_PREFIX_UTIL_H
#define KVF_TEST_PREFIX_UTIL_H

#include "blockmgr/manager.h"
#include "kvfold/prefix.h"
#include "tests/test_blockmgr_util.h"

enum { BS = 8 }; /* the smallest block; the field reports say 4 */

typedef struct plan {
    uint32_t layers, blocks, seqs, slots, eviction, snapshot_pages, host;
} plan;

static inline kvf_manager *make_cache(plan p) {
    shape s = {p.layers ? p.layers : 1, 1, 1, BS, p.blocks, 0, p.seqs ? p.seqs : 8, p.slots ? p.slots : 256};
    kvf_manager_config c = config_of(s);
    kvf_manager *m = NULL;
    kvf_error err = {.text = ""};
    c.prefix_cache = 1;
    c.prefix_eviction = p.eviction;
    c.n_snapshot_pages = p.snapshot_pages;
    c.snapshot_page_bytes = 100;
    c.n_host_blocks = p.host;
    cr_assert_eq(kvf_manager_create(&c, &m, &err), KVF_OK, "%s", err.text);
    return m;
}

/* first, first + 1, ... */
static inline const uint32_t *count_from(uint32_t first) {
    static uint32_t tokens[8][512];
    static int next;
    uint32_t *t = tokens[next++ % 8];
    for (uint32_t i = 0; i < 512; i++) t[i] = first + i;
    return t;
}
static inline kvf_prefix_key key(const uint32_t *tokens, uint32_t n) {
    return (kvf_prefix_key){.struct_size = sizeof(kvf_prefix_key), .tokens = tokens, .n_tokens = n};
}
static inline kvf_prefix_match look_for(const kvf_manager *m, kvf_prefix_key k, uint32_t max_tokens) {
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf_prefix_match match = {.struct_size = sizeof match};
    o.max_tokens = max_tokens;
    OK(kvf_prefix_lookup(m, &k, &o, &match));
    return match;
}
/* Tokens that a lookup finds, partial ones and the last included. */
static inline uint32_t known(const kvf_manager *m, kvf_prefix_key k) {
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf_prefix_match match = {.struct_size = sizeof match};
    o.max_tokens = k.n_tokens;
    o.partial = 1;
    OK(kvf_prefix_lookup(m, &k, &o, &match));
    return match.n_tokens;
}
static inline kvf_status attach_as(kvf_manager *m, kvf_seq seq, kvf_prefix_key k, const kvf_prefix_match *match,
                                   uint32_t slots_each, int growth) {
    uint32_t n_slots[64];
    for (int i = 0; i < 64; i++) n_slots[i] = slots_each;
    kvf_reserve r = {.struct_size = sizeof r, .n_slots = n_slots, .growth = growth};
    return kvf_prefix_attach(m, seq, &k, match, slots_each ? &r : NULL, NULL);
}
static inline void store(kvf_manager *m, kvf_seq seq, kvf_prefix_key k, uint32_t n, uint32_t flags) {
    kvf_prefix_store_options o = {.struct_size = sizeof o, .flags = flags};
    OK(kvf_prefix_store(m, seq, &k, n, &o, NULL));
    AUDIT(m);
}
/* A sequence that runs a prompt cold and stores it. */
static inline kvf_seq run_cold(kvf_manager *m, kvf_prefix_key k, uint32_t flags) {
    kvf_seq seq = new_seq(m);
    OK(append(m, seq, k.n_tokens, NULL));
    store(m, seq, k, k.n_tokens, flags);
    return seq;
}
static inline kvf_seq start_hit(kvf_manager *m, kvf_prefix_key k, uint32_t wanted) {
    kvf_seq seq = new_seq(m);
    kvf_prefix_match match = look_for(m, k, 0);
    cr_assert_eq(match.n_tokens, wanted, "hit of %u, not %u", match.n_tokens, wanted);
    OK(kvf_prefix_attach(m, seq, &k, &match, NULL, NULL));
    AUDIT(m);
    return seq;
}
static inline kvf_prefix_stats stats(const kvf_manager *m) {
    kvf_prefix_stats s = {.struct_size = sizeof s};
    OK(kvf_prefix_stats_read(m, &s));
    return s;
}
/* free + idle + held = total, by hand: the free list as walked by the audit. */
static inline uint32_t idle(const kvf_manager *m) { return occupancy(m).n_cached_idle; }

#endif
