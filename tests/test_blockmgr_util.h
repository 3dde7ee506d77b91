/* Helpers of the block manager's tests. */
#ifndef KVF_TEST_BLOCKMGR_UTIL_H
#define KVF_TEST_BLOCKMGR_UTIL_H

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvfold/blockmgr.h"

#define OK(call)                                                                  \
    do {                                                                          \
        kvf_status status_ = (call);                                              \
        cr_assert_eq(status_, KVF_OK, "%s: %s", #call, kvf_status_name(status_)); \
    } while (0)
#define FAILS(status, call)                                                                        \
    do {                                                                                           \
        kvf_status status_ = (call);                                                               \
        cr_assert_eq(status_, status, "%s: %s, not %s", #call, kvf_status_name(status_), #status); \
    } while (0)
#define AUDIT(m)                                                           \
    do {                                                                   \
        kvf_error err_ = {.text = ""};                                     \
        cr_assert_eq(kvf_audit(m, &err_), KVF_OK, "audit: %s", err_.text); \
    } while (0)

#define LIST_MAX 4096
typedef struct list {
    kvf_copy items[LIST_MAX];
    kvf_copy_list list;
} list;

static inline kvf_copy_list *list_of(list *l) {
    l->list = (kvf_copy_list){l->items, 0, LIST_MAX};
    return &l->list;
}

typedef struct shape {
    uint32_t layers, heads, per_group, block_size, blocks, pages, seqs, slots;
} shape;

static inline kvf_manager_config config_of(shape s) {
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = s.layers;
    c.n_kv_heads = s.heads;
    c.heads_per_group = s.per_group;
    c.block_size = s.block_size;
    c.n_blocks = s.blocks;
    c.n_score_pages = s.pages;
    c.max_seqs = s.seqs;
    c.max_slots = s.slots;
    c.block_bytes = 1000;
    return c;
}

static inline kvf_manager *make(shape s) {
    kvf_manager_config c = config_of(s);
    kvf_manager *m = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_manager_create(&c, &m, &err), KVF_OK, "%s", err.text);
    return m;
}

static inline kvf_seq new_seq(kvf_manager *m) {
    kvf_seq s = 0;
    OK(kvf_seq_create(m, &s));
    return s;
}

static inline kvf_status append(kvf_manager *m, kvf_seq seq, uint32_t n, kvf_copy_list *copies) {
    kvf_append_item item = {seq, n};
    return kvf_append(m, &item, 1, copies);
}

static inline uint32_t slots(const kvf_manager *m, kvf_seq seq, uint32_t layer) {
    uint32_t n = 0;
    OK(kvf_seq_table(m, seq, layer, 0, &n, NULL, NULL));
    return n;
}
static inline uint32_t blocks(const kvf_manager *m, kvf_seq seq, uint32_t layer) {
    uint32_t n = 0;
    OK(kvf_seq_table(m, seq, layer, 0, NULL, &n, NULL));
    return n;
}
static inline uint32_t block(const kvf_manager *m, kvf_seq seq, uint32_t layer, uint32_t i) {
    uint32_t n = 0;
    const uint32_t *row = NULL;
    OK(kvf_seq_table(m, seq, layer, 0, NULL, &n, &row));
    cr_assert_lt(i, n);
    return row[i];
}

static inline kvf_occupancy occupancy(const kvf_manager *m) {
    kvf_occupancy o = {.struct_size = sizeof o};
    OK(kvf_occupancy_read(m, &o, NULL, 0));
    return o;
}
static inline uint32_t n_free(const kvf_manager *m) { return occupancy(m).blocks.n_free; }

static inline void compact(kvf_manager *m, kvf_seq seq, uint32_t layer, uint32_t n_keep) {
    kvf_compact_item item = {seq, layer, n_keep, NULL};
    kvf_compaction c;
    OK(kvf_compact_begin(m, &item, 1, &c));
    AUDIT(m);
    OK(kvf_compact_commit(m));
    AUDIT(m);
}

/* Everything that the public calls tell, so that "nothing has changed" is one memcmp. */
typedef struct dump {
    kvf_occupancy o;
    uint32_t n;
    uint32_t words[4096];
} dump;

static inline void dump_take(dump *d, kvf_manager *m, const kvf_seq *seqs, uint32_t n_seqs) {
    memset(d, 0, sizeof *d);
    d->o = occupancy(m);
    kvf_view v = {.struct_size = sizeof v};
    OK(kvf_view_fill(m, 1, seqs, n_seqs, &v));
    for (uint32_t i = 0; i < n_seqs; i++) {
        uint32_t pos = 0;
        OK(kvf_seq_next_pos(m, seqs[i], &pos));
        d->words[d->n++] = pos;
    }
    for (uint32_t t = 0; t < n_seqs * v.n_layers * v.n_groups; t++) {
        uint32_t n_blocks = (v.n_slots[t] + v.block_size - 1) / v.block_size;
        cr_assert_lt(d->n + 1 + 2 * n_blocks, 4096u);
        d->words[d->n++] = v.n_slots[t];
        for (uint32_t b = 0; b < n_blocks; b++) {
            d->words[d->n++] = v.rows[v.row_offset[t] + b];
            d->words[d->n++] = v.score_rows[v.row_offset[t] + b];
        }
    }
}

/* High-water marks included: a call that fails takes nothing first. */
static inline void dump_same(const dump *before, const dump *after) {
    cr_assert_eq(memcmp(before, after, sizeof *before), 0, "a failed call has changed something");
}

#endif
