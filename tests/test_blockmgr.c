/* The block manager, behaviour by behaviour: config, handles, field reports, append, copies, rollback. */
#include "test_blockmgr_util.h"

/* ---- Config ------------------------------------------------------------------------------------ */

Test(blockmgr, config_defaults_are_filled_in) {
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    cr_assert_eq(c.struct_size, sizeof c);
    c = (kvf_manager_config){.struct_size = sizeof c, .n_layers = 2, .n_kv_heads = 3, .n_blocks = 5};
    kvf_manager *m = NULL;
    OK(kvf_manager_create(&c, &m, NULL));
    const kvf_manager_config *r = kvf_manager_get_config(m);
    cr_assert(r->block_size == 16 && r->max_seqs == 256 && r->max_slots == 8192 && r->heads_per_group == 3);
    cr_assert(r->n_score_pages == 5 && r->allocator.alloc != NULL);
    cr_assert_str_eq(kvf_manager_error(m)->text, "");
    AUDIT(m);
    kvf_manager_destroy(m);
    kvf_manager_destroy(NULL);
}

Test(blockmgr, config_out_of_range_names_the_field) {
    const struct {
        shape s;
        const char *text;
    } bad[] = {
        {{0, 1, 1, 8, 4, 4, 4, 64}, "n_layers 0"},
        {{1025, 1, 1, 8, 4, 4, 4, 64}, "n_layers 1025"},
        {{1, 0, 0, 8, 4, 4, 4, 64}, "n_kv_heads 0"},
        {{1, 1025, 1, 8, 4, 4, 4, 64}, "n_kv_heads 1025"},
        {{1, 6, 4, 8, 4, 4, 4, 64}, "heads_per_group 4"},
        {{1, 6, 7, 8, 4, 4, 4, 64}, "heads_per_group 7"},
        {{1, 1, 1, 12, 4, 4, 4, 64}, "block_size 12: must be a power of two in [8, 256]"},
        {{1, 1, 1, 4, 4, 4, 4, 64}, "block_size 4"},
        {{1, 1, 1, 512, 4, 4, 4, 64}, "block_size 512"},
        {{1, 1, 1, 8, 0, 4, 4, 64}, "n_blocks 0"},
        {{1, 1, 1, 8, (1u << 31) + 1, 4, 4, 64}, "n_blocks 2147483649"},
        {{1, 1, 1, 8, 4, UINT32_MAX, 4, 64}, "n_score_pages 4294967295"},
        {{1, 1, 1, 8, 4, 4, (1u << 20) + 1, 64}, "max_seqs 1048577"},
        {{1, 1, 1, 8, 4, 4, 4, UINT32_MAX}, "max_slots 4294967295"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        kvf_manager_config c = config_of(bad[i].s);
        size_t bytes = 77;
        kvf_manager *m = NULL;
        kvf_error err = {.text = ""};
        FAILS(KVF_E_INVALID, kvf_manager_bytes(&c, &bytes, &err));
        cr_assert(strstr(err.text, bad[i].text), "%s", err.text);
        FAILS(KVF_E_INVALID, kvf_manager_create(&c, &m, NULL));
        cr_assert(bytes == 77 && !m);
    }
    size_t bytes;
    FAILS(KVF_E_INVALID, kvf_manager_bytes(NULL, &bytes, NULL));
    kvf_manager_config c = config_of((shape){1, 1, 1, 8, 4, 4, 4, 64});
    FAILS(KVF_E_INVALID, kvf_manager_bytes(&c, NULL, NULL));
    FAILS(KVF_E_INVALID, kvf_manager_create(&c, NULL, NULL));
}

Test(blockmgr, config_sizes_that_wrap_are_refused) {
    size_t bytes = 77;
    kvf_error err = {.text = ""};
    kvf_manager_config c = config_of((shape){1024, 1024, 1, 8, 1u << 31, 0, 1u << 20, 1u << 31});
    FAILS(KVF_E_OVERFLOW, kvf_manager_bytes(&c, &bytes, &err));
    cr_assert(strstr(err.text, "max_seqs 1048576"), "%s", err.text);
    c = config_of((shape){1, 1, 1, 8, 1u << 31, 0, 1, 8});
    c.block_bytes = UINT64_MAX / (1u << 31) + 1;
    FAILS(KVF_E_OVERFLOW, kvf_manager_bytes(&c, &bytes, &err));
    cr_assert(strstr(err.text, "block_bytes"), "%s", err.text);
    cr_assert_eq(bytes, 77);
    c = config_of((shape){1024, 1, 1, 8, 1u << 31, 0, 1u << 20, 1u << 31});
    c.n_table_blocks = UINT64_MAX; /* huge, but no wrap: 2^30 tables of 2^28 */
    OK(kvf_manager_bytes(&c, &bytes, NULL));
    cr_assert_gt(bytes, (size_t)1 << 60);
}

Test(blockmgr, config_of_another_version) {
    struct {
        kvf_manager_config c;
        uint64_t later[2];
    } longer = {config_of((shape){1, 1, 1, 8, 4, 4, 4, 64}), {0, 0}};
    longer.c.struct_size = sizeof longer;
    kvf_manager *m = NULL;
    OK(kvf_manager_create(&longer.c, &m, NULL));
    kvf_manager_destroy(m);
    longer.later[1] = 1;
    FAILS(KVF_E_UNSUPPORTED, kvf_manager_create(&longer.c, &m, NULL));
    kvf_manager_config shorter = config_of((shape){1, 1, 1, 8, 4, 4, 4, 64});
    shorter.struct_size = offsetof(kvf_manager_config, n_score_pages);
    shorter.n_score_pages = 99; /* beyond what this caller knew */
    OK(kvf_manager_create(&shorter, &m, NULL));
    cr_assert(kvf_manager_get_config(m)->n_score_pages == 4 && kvf_manager_get_config(m)->max_seqs == 256);
    kvf_manager_destroy(m);
    shorter.struct_size = 4;
    FAILS(KVF_E_INVALID, kvf_manager_create(&shorter, &m, NULL));
}

typedef struct counter {
    int n, fail_at, live;
    size_t bytes;
} counter;

static void *counting_alloc(void *ctx, size_t bytes, size_t align) {
    counter *c = ctx;
    if (c->n++ == c->fail_at) return NULL;
    c->live++;
    c->bytes = bytes;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void counting_free(void *ctx, void *p, size_t bytes) {
    counter *c = ctx;
    c->live--;
    cr_assert_eq(bytes, c->bytes);
    free(p);
}

Test(blockmgr, allocates_once_at_create) {
    static list l;
    kvf_manager_config c = config_of((shape){2, 1, 1, 8, 16, 16, 4, 64});
    size_t bytes;
    OK(kvf_manager_bytes(&c, &bytes, NULL));
    for (int fail_at = 0; fail_at < 2; fail_at++) {
        counter count = {0, fail_at, 0, 0};
        c.allocator = (kvf_allocator){counting_alloc, counting_free, &count};
        kvf_manager *m = NULL;
        kvf_error err = {.text = ""};
        if (fail_at == 0) {
            FAILS(KVF_E_NO_MEMORY, kvf_manager_create(&c, &m, &err));
            cr_assert(!m && count.live == 0 && strstr(err.text, "bytes"), "%s", err.text);
            continue;
        }
        OK(kvf_manager_create(&c, &m, &err));
        cr_assert_eq(count.bytes, bytes);
        kvf_seq a = new_seq(m), b;
        OK(append(m, a, 20, list_of(&l)));
        OK(kvf_seq_fork(m, a, list_of(&l), &b));
        OK(append(m, b, 1, list_of(&l)));
        OK(kvf_copies_done(m, &l.list));
        compact(m, b, 0, 9);
        cr_assert_eq(count.n, 1);
        kvf_manager_destroy(m);
        cr_assert_eq(count.live, 0);
    }
    c.allocator = (kvf_allocator){counting_alloc, NULL, NULL};
    FAILS(KVF_E_INVALID, kvf_manager_bytes(&c, &bytes, NULL));
}

/* ---- Handles ---------------------------------------------------------------------------------------- */

/* Llama-3-8B, fp16, blocks of 16: 64 KiB of keys and values each. The metadata is at most 0.5% of them, for a pool of
 * 16 GiB and the default 256 sequences of up to 8,192 tokens and for any larger one; so is each block's and each
 * sequence's share. */
Test(blockmgr, metadata_is_small) {
    const double block_bytes = 2 * 8 * 128 * 2 * 16;
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = 32;
    c.n_kv_heads = 8;
    size_t bytes, with_more_blocks, with_more_seqs;
    for (c.n_blocks = 1u << 18; c.n_blocks <= 1u << 22; c.n_blocks *= 4) {
        OK(kvf_manager_bytes(&c, &bytes, NULL));
        cr_assert_leq((double)bytes, 0.005 * block_bytes * c.n_blocks, "%zu bytes for %u blocks", bytes, c.n_blocks);
    }
    c.n_blocks = 1u << 18;
    OK(kvf_manager_bytes(&c, &bytes, NULL));
    c.n_blocks += 4096;
    OK(kvf_manager_bytes(&c, &with_more_blocks, NULL));
    double per_block = (double)(with_more_blocks - bytes) / 4096;
    cr_assert_leq(per_block, 0.002 * block_bytes, "%.1f bytes a block", per_block);
    c.n_blocks = 1u << 18;
    c.max_seqs += 64;
    OK(kvf_manager_bytes(&c, &with_more_seqs, NULL));
    double per_seq = (double)(with_more_seqs - bytes) / 64;
    cr_assert_leq(per_seq, 0.001 * block_bytes * 32 * 8192 / 16, "%.0f bytes a sequence", per_seq);
}

Test(blockmgr, stale_and_foreign_handles_are_refused) {
    static list l;
    shape s = {1, 1, 1, 8, 8, 8, 4, 64};
    kvf_manager *m = make(s), *other = make(s);
    kvf_seq a = new_seq(m), foreign = new_seq(other), child = 5;
    OK(append(other, foreign, 3, list_of(&l)));
    OK(append(m, a, 3, list_of(&l)));
    kvf_seq gone = new_seq(m);
    OK(kvf_seq_free(m, gone));
    kvf_seq again = new_seq(m); /* the same index, another generation */
    cr_assert_neq(again, gone);
    const kvf_seq bad[] = {0, gone, foreign, a + ((kvf_seq)1 << 36), a + 2, a ^ (1u << 20), UINT64_MAX};
    dump before, after;
    dump_take(&before, m, &a, 1);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint32_t n = 77, slots1[1] = {8};
        const uint32_t *row = NULL;
        kvf_append_item item[2] = {{a, 1}, {bad[i], 1}};
        kvf_compact_item ci = {bad[i], 0, 1, NULL};
        kvf_compaction c;
        kvf_view v = {.struct_size = sizeof v};
        kvf_layer_occupancy lo;
        kvf_seq pair[2] = {a, bad[i]};
        FAILS(KVF_E_STALE, kvf_seq_free(m, bad[i]));
        FAILS(KVF_E_STALE, kvf_seq_index(m, bad[i], &n));
        FAILS(KVF_E_STALE, kvf_seq_next_pos(m, bad[i], &n));
        FAILS(KVF_E_STALE, kvf_seq_table(m, bad[i], 0, 0, &n, &n, &row));
        FAILS(KVF_E_STALE, kvf_seq_fork(m, bad[i], list_of(&l), &child));
        FAILS(KVF_E_STALE,
              kvf_seq_reserve(m, bad[i],
                              &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = slots1, .with_scores = 0}));
        FAILS(KVF_E_STALE, kvf_seq_take_scores(m, bad[i], slots1));
        FAILS(KVF_E_STALE, kvf_append(m, item, 2, list_of(&l)));
        FAILS(KVF_E_STALE, kvf_can_append(m, item, 2, &n));
        FAILS(KVF_E_STALE, kvf_seq_rollback(m, bad[i], 1));
        FAILS(KVF_E_STALE, kvf_compact_begin(m, &ci, 1, &c));
        FAILS(KVF_E_STALE, kvf_view_fill(m, 0, pair, 2, &v));
        FAILS(KVF_E_STALE, kvf_seq_occupancy(m, bad[i], &lo, sizeof lo));
        cr_assert(n == 77 && row == NULL && child == 5);
        cr_assert_str_not_empty(kvf_manager_error(m)->text);
        AUDIT(m);
    }
    dump_take(&after, m, &a, 1);
    dump_same(&before, &after);
    kvf_manager_destroy(m);
    kvf_manager_destroy(other);
}

Test(blockmgr, block_handles_are_released_once) {
    static list l;
    shape s = {1, 1, 1, 8, 4, 4, 4, 64};
    kvf_manager *m = make(s), *other = make(s);
    kvf_block x, y, foreign;
    OK(kvf_block_take(m, 0, &x));
    OK(kvf_block_take(other, 0, &foreign));
    cr_assert_eq(kvf_block_id(x), kvf_block_id(foreign));
    FAILS(KVF_E_STALE, kvf_block_release(m, foreign));
    OK(kvf_block_hold(m, kvf_block_id(x), &y));
    cr_assert_eq(occupancy(m).blocks.n_shared, 1);
    OK(kvf_block_release(m, x));
    OK(kvf_block_release(m, y));
    FAILS(KVF_E_STALE, kvf_block_release(m, x));
    FAILS(KVF_E_STALE, kvf_block_hold(m, kvf_block_id(x), &y)); /* free */
    FAILS(KVF_E_STALE, kvf_block_hold(m, 4, &y));
    FAILS(KVF_E_STALE, kvf_block_hold(m, UINT32_MAX, &y));
    OK(kvf_block_take(m, 0, &y));
    cr_assert_eq(kvf_block_id(x), kvf_block_id(y));
    FAILS(KVF_E_STALE, kvf_block_release(m, x)); /* an earlier generation */
    OK(kvf_block_release(m, y));
    /* A handle's holds are its own: a table's reference cannot be released through it. */
    kvf_seq a = new_seq(m);
    OK(append(m, a, 8, list_of(&l)));
    OK(kvf_block_hold(m, block(m, a, 0, 0), &x));
    OK(kvf_block_release(m, x));
    FAILS(KVF_E_STALE, kvf_block_release(m, x));
    OK(kvf_block_hold(m, block(m, a, 0, 0), &y)); /* the block never fell free, but x was released */
    cr_assert_neq(x, y);
    FAILS(KVF_E_STALE, kvf_block_release(m, x));
    OK(kvf_block_release(m, y));
    FAILS(KVF_E_STALE, kvf_block_release(m, y + ((kvf_block)1 << 32))); /* the next, not given out yet */
    AUDIT(m);
    cr_assert_eq(n_free(m), 3);
    kvf_manager_destroy(m);
    kvf_manager_destroy(other);
}

Test(blockmgr, bad_arguments_are_refused) {
    static list l;
    kvf_manager *m = make((shape){2, 4, 2, 8, 16, 16, 2, 64});
    kvf_seq a = new_seq(m), b;
    kvf_view v = {.struct_size = sizeof v};
    kvf_occupancy o = {.struct_size = 0};
    uint32_t four[4] = {8, 8, 65, 8};
    OK(append(m, a, 8, list_of(&l)));
    FAILS(KVF_E_INVALID, kvf_seq_create(NULL, &b));
    FAILS(KVF_E_INVALID, kvf_seq_create(m, NULL));
    FAILS(KVF_E_INVALID, kvf_seq_table(m, a, 2, 0, NULL, NULL, NULL));
    FAILS(KVF_E_INVALID, kvf_seq_table(m, a, 0, 2, NULL, NULL, NULL));
    FAILS(KVF_E_INVALID,
          kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = NULL, .with_scores = 0}));
    FAILS(KVF_E_INVALID,
          kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = four, .with_scores = 0}));
    FAILS(KVF_E_INVALID, kvf_seq_take_scores(m, a, four));
    FAILS(KVF_E_INVALID, append(m, a, 0, list_of(&l)));
    FAILS(KVF_E_LIMIT, append(m, a, 57, list_of(&l)));
    FAILS(KVF_E_LIMIT, append(m, a, UINT32_MAX, list_of(&l)));
    FAILS(KVF_E_INVALID, kvf_append(m, NULL, 1, list_of(&l)));
    OK(kvf_append(m, NULL, 0, NULL));
    kvf_append_item twice[2] = {{a, 1}, {a, 1}};
    FAILS(KVF_E_INVALID, kvf_append(m, twice, 2, list_of(&l)));
    FAILS(KVF_E_INVALID, kvf_seq_rollback(m, a, 9));
    FAILS(KVF_E_INVALID, kvf_view_fill(m, 2, &a, 1, &v));
    FAILS(KVF_E_LIMIT, kvf_view_fill(m, 0, (kvf_seq[]){a, a, a}, 3, &v));
    FAILS(KVF_E_INVALID, kvf_occupancy_read(m, &o, NULL, 0));
    FAILS(KVF_E_INVALID, kvf_seq_occupancy(m, a, NULL, 0));
    b = new_seq(m);
    FAILS(KVF_E_LIMIT, kvf_seq_create(m, &b));
    FAILS(KVF_E_LIMIT, kvf_seq_fork(m, a, list_of(&l), &b));
    kvf_compaction c;
    const kvf_compact_item bad[] = {{a, 0, 0, NULL}, {a, 0, 8, NULL}, {a, 2, 1, NULL}, {b, 0, 1, NULL}};
    for (size_t i = 0; i < 4; i++) FAILS(KVF_E_INVALID, kvf_compact_begin(m, &bad[i], 1, &c));
    const kvf_compact_item again[] = {{a, 1, 1, NULL}, {a, 0, 1, NULL}, {a, 1, 2, NULL}};
    FAILS(KVF_E_INVALID, kvf_compact_begin(m, again, 3, &c));
    FAILS(KVF_E_INVALID, kvf_compact_begin(m, again, 5, &c)); /* beyond max_seqs * n_layers: not even read */
    FAILS(KVF_E_STATE, kvf_compact_commit(m));
    FAILS(KVF_E_STATE, kvf_compact_cancel(m));
    AUDIT(m);
    cr_assert(slots(m, a, 0) == 8 && n_free(m) == 12);
    kvf_manager_destroy(m);
}

/* ---- Field reports ----------------------------------------------------------------------------------- */

/* A reference taken again on a block whose other holders have gone puts it on the free list only once. */
Test(blockmgr, a1_no_phantom_on_the_free_list) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 3, 3, 4, 64});
    kvf_seq a = new_seq(m);
    OK(append(m, a, 8, list_of(&l)));
    uint32_t b = block(m, a, 0, 0);
    kvf_block cached, h, all[4];
    OK(kvf_block_hold(m, b, &cached));
    OK(kvf_seq_free(m, a));
    for (int i = 0; i < 2; i++) {
        OK(kvf_block_hold(m, b, &h));
        cr_assert_eq(n_free(m), 2);
        OK(kvf_block_release(m, h));
        cr_assert_eq(n_free(m), 2);
        AUDIT(m);
    }
    for (int i = 0; i < 2; i++) OK(kvf_block_take(m, 0, &all[i]));
    cr_assert(kvf_block_id(all[0]) != b && kvf_block_id(all[1]) != b);
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &all[2]));
    OK(kvf_block_release(m, cached));
    OK(kvf_block_take(m, 0, &all[2]));
    cr_assert_eq(kvf_block_id(all[2]), b);
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &all[3]));
    cr_assert_neq(kvf_block_id(all[0]), kvf_block_id(all[1]));
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* A failed growth changes nothing; the retry keeps the blocks there were. */
Test(blockmgr, a4_failed_append_keeps_the_table) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 4, 4, 4, 64});
    for (int i = 0; i < 1000; i++) {
        kvf_seq a = new_seq(m), b = new_seq(m);
        OK(append(m, a, 16, list_of(&l)));
        OK(append(m, b, 16, list_of(&l)));
        uint32_t b0 = block(m, a, 0, 0), b1 = block(m, a, 0, 1), missing = 0;
        kvf_append_item item = {a, 1};
        FAILS(KVF_E_NO_BLOCKS, kvf_can_append(m, &item, 1, &missing));
        cr_assert_eq(missing, 1);
        FAILS(KVF_E_NO_BLOCKS, append(m, a, 1, list_of(&l)));
        cr_assert(slots(m, a, 0) == 16 && blocks(m, a, 0) == 2 && block(m, a, 0, 0) == b0 && block(m, a, 0, 1) == b1);
        OK(kvf_seq_free(m, b));
        OK(append(m, a, 1, list_of(&l)));
        cr_assert(blocks(m, a, 0) == 3 && block(m, a, 0, 0) == b0 && block(m, a, 0, 1) == b1);
        OK(kvf_seq_free(m, a));
        cr_assert_eq(n_free(m), 4);
        AUDIT(m);
    }
    kvf_manager_destroy(m);
}

/* Layers of different lengths: a growth that fails at a later layer leaves the earlier ones as they were. */
Test(blockmgr, a5_growth_over_layers_is_transactional) {
    static list l;
    static dump before, after;
    kvf_manager *m = make((shape){3, 1, 1, 8, 6, 6, 4, 64});
    kvf_seq a = new_seq(m);
    const uint32_t seven[3] = {8, 16, 32}, six[3] = {8, 16, 24}, none[3] = {0, 0, 0};
    dump_take(&before, m, &a, 1);
    for (int i = 0; i < 100; i++)
        FAILS(KVF_E_NO_BLOCKS,
              kvf_seq_reserve(m, a,
                              &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = seven, .with_scores = 0}));
    dump_take(&after, m, &a, 1);
    dump_same(&before, &after);
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = six, .with_scores = 0}));
    cr_assert_eq(occupancy(m).blocks.n_promised, 6);
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = none, .with_scores = 0}));
    OK(append(m, a, 16, list_of(&l)));
    kvf_compaction c;
    const kvf_compact_item shrink[2] = {{a, 0, 8, NULL}, {a, 1, 8, NULL}};
    OK(kvf_compact_begin(m, shrink, 2, &c));
    OK(kvf_compact_commit(m)); /* 1 + 1 + 2 blocks, 2 free */
    kvf_block taken[2];
    for (int n_taken = 0; n_taken < 3; n_taken++) { /* fails at layer 2, then 1, then 0 */
        if (n_taken) OK(kvf_block_take(m, 0, &taken[n_taken - 1]));
        dump_take(&before, m, &a, 1);
        uint32_t missing = 0;
        kvf_append_item item = {a, 1};
        FAILS(KVF_E_NO_BLOCKS, append(m, a, 1, list_of(&l)));
        FAILS(KVF_E_NO_BLOCKS, kvf_can_append(m, &item, 1, &missing));
        cr_assert_eq(missing, (uint32_t)n_taken + 1);
        dump_take(&after, m, &a, 1);
        dump_same(&before, &after);
        AUDIT(m);
    }
    OK(kvf_block_release(m, taken[0]));
    OK(kvf_block_release(m, taken[1]));
    OK(kvf_seq_free(m, a));
    cr_assert_eq(n_free(m), 6);
    a = new_seq(m);
    OK(append(m, a, 16, list_of(&l)));
    AUDIT(m);
    kvf_manager_destroy(m);
}

/* Beams that split: copy-on-write of the last block of each layer, once; nothing leaks into the next use. */
Test(blockmgr, c8_forks_copy_the_last_block_once) {
    static list l;
    kvf_manager *m = make((shape){2, 1, 1, 8, 12, 12, 4, 64});
    kvf_seq parent = new_seq(m), child, f1, f2;
    kvf_copy_list *copies = list_of(&l);
    OK(append(m, parent, 12, copies));
    compact(m, parent, 1, 6); /* layer 0: 12 slots in 2 blocks; layer 1: 6 in 1 */
    OK(kvf_seq_fork(m, parent, copies, &child));
    cr_assert(copies->n == 0 && n_free(m) == 9);
    uint32_t full = block(m, parent, 0, 0), tail = block(m, parent, 0, 1), tail1 = block(m, parent, 1, 0);
    OK(append(m, child, 1, copies));
    cr_assert_eq(copies->n, 2);
    cr_assert(copies->items[0].kind == KVF_COPY_BLOCK && copies->items[0].src == tail && copies->items[0].n_slots == 4);
    cr_assert_eq(copies->items[0].dst, block(m, child, 0, 1));
    cr_assert(copies->items[1].src == tail1 && copies->items[1].n_slots == 6);
    OK(append(m, parent, 1, copies)); /* the last holder writes in place */
    cr_assert(copies->n == 2 && block(m, parent, 0, 1) == tail && block(m, parent, 1, 0) == tail1);
    cr_assert(block(m, child, 0, 0) == full && occupancy(m).blocks.n_shared == 1);
    OK(kvf_copies_done(m, copies));
    OK(kvf_seq_free(m, parent));
    AUDIT(m);
    cr_assert(slots(m, child, 0) == 13 && slots(m, child, 1) == 7 && block(m, child, 0, 0) == full);
    cr_assert_eq(n_free(m), 9);
    /* Two forks, the middle one freed, both others append. */
    OK(kvf_seq_fork(m, child, copies, &f1));
    OK(kvf_seq_fork(m, child, copies, &f2));
    OK(kvf_seq_free(m, f1));
    OK(append(m, f2, 3, copies));
    cr_assert_eq(copies->n, 2);
    OK(append(m, child, 3, copies)); /* layer 0: 16 slots, full */
    cr_assert_eq(copies->n, 2);
    OK(kvf_copies_done(m, copies));
    OK(kvf_seq_fork(m, child, copies, &f1));
    OK(append(m, f1, 1, copies)); /* a full last block: a new block, no copy; layer 1 has 10 slots: a copy */
    cr_assert(copies->n == 1 && blocks(m, f1, 0) == 3 && copies->items[0].n_slots == 2);
    OK(kvf_copies_done(m, copies));
    OK(kvf_seq_free(m, child));
    OK(kvf_seq_free(m, f1));
    OK(kvf_seq_free(m, f2));
    child = new_seq(m);
    OK(append(m, child, 3, copies));
    cr_assert(copies->n == 0 && slots(m, child, 0) == 3 && slots(m, child, 1) == 3);
    OK(kvf_seq_free(m, child));
    AUDIT(m);
    cr_assert_eq(n_free(m), 12);
    kvf_manager_destroy(m);
}

/* ---- Append and copies ---------------------------------------------------------------------------------- */

Test(blockmgr, a_batch_of_sharers_copies_all_but_the_last) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 4, 4, 4, 64});
    kvf_seq s[3];
    s[0] = new_seq(m);
    OK(append(m, s[0], 5, list_of(&l)));
    OK(kvf_seq_fork(m, s[0], list_of(&l), &s[1]));
    OK(kvf_seq_fork(m, s[1], list_of(&l), &s[2]));
    uint32_t b = block(m, s[0], 0, 0);
    const kvf_append_item items[3] = {{s[1], 1}, {s[2], 2}, {s[0], 3}};
    OK(kvf_append(m, items, 3, list_of(&l)));
    cr_assert(l.list.n == 2 && l.items[0].src == b && l.items[1].src == b && block(m, s[0], 0, 0) == b);
    cr_assert(slots(m, s[0], 0) == 8 && slots(m, s[1], 0) == 6 && slots(m, s[2], 0) == 7);
    AUDIT(m);
    cr_assert_eq(n_free(m), 1);
    kvf_manager_destroy(m);
}

Test(blockmgr, a_batch_is_all_or_nothing) {
    static list l;
    static dump before, after;
    kvf_manager *m = make((shape){2, 1, 1, 8, 8, 8, 4, 64});
    kvf_seq s[3] = {new_seq(m), new_seq(m), 0};
    OK(append(m, s[0], 5, list_of(&l)));
    OK(append(m, s[1], 8, list_of(&l)));
    OK(kvf_seq_fork(m, s[0], list_of(&l), &s[2]));
    kvf_copy one[1];
    kvf_copy_list small = {one, 0, 1};
    dump_take(&before, m, s, 3);
    kvf_append_item items[3] = {{s[0], 1}, {s[1], 9}, {s[2], 1}}; /* 2 copies + 4 blocks of 4 free */
    uint32_t missing = 77;
    FAILS(KVF_E_NO_BLOCKS, kvf_append(m, items, 3, list_of(&l)));
    FAILS(KVF_E_NO_BLOCKS, kvf_can_append(m, items, 3, &missing));
    cr_assert(missing == 2 && l.list.n == 0);
    items[1].n_tokens = 8; /* now 4 of 4 */
    FAILS(KVF_E_LIMIT, kvf_append(m, items, 3, &small));
    FAILS(KVF_E_LIMIT, kvf_append(m, items, 3, NULL));
    items[2].n_tokens = 64; /* beyond max_slots */
    FAILS(KVF_E_LIMIT, kvf_append(m, items, 3, list_of(&l)));
    items[2].n_tokens = 0;
    FAILS(KVF_E_INVALID, kvf_append(m, items, 3, list_of(&l)));
    dump_take(&after, m, s, 3);
    dump_same(&before, &after);
    AUDIT(m);
    items[2].n_tokens = 1;
    OK(kvf_can_append(m, items, 3, &missing));
    cr_assert_eq(missing, 0);
    OK(kvf_append(m, items, 3, list_of(&l)));
    cr_assert(l.list.n == 2 && n_free(m) == 0);
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(blockmgr, a_pending_copy_pins_both_ends) {
    static list l, other;
    kvf_manager *m = make((shape){1, 1, 1, 8, 3, 3, 4, 64});
    kvf_seq a = new_seq(m), b;
    kvf_block h;
    OK(append(m, a, 5, list_of(&l)));
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    OK(append(m, b, 1, list_of(&l)));
    uint32_t src = l.items[0].src, dst = l.items[0].dst;
    cr_assert_eq(occupancy(m).blocks.n_shared, 0); /* a pin is no holder */
    OK(kvf_seq_free(m, a));
    OK(kvf_seq_free(m, b));
    cr_assert_eq(n_free(m), 1);
    FAILS(KVF_E_STALE, kvf_block_hold(m, src, &h)); /* nobody holds it */
    OK(kvf_block_take(m, 0, &h));
    cr_assert(kvf_block_id(h) != src && kvf_block_id(h) != dst);
    kvf_block none;
    FAILS(KVF_E_NO_BLOCKS, kvf_block_take(m, 0, &none));
    AUDIT(m);
    const kvf_copy bad[] = {{KVF_COPY_BLOCK, dst, src, 5},
                            {KVF_COPY_SCORE_PAGE, src, dst, 5},
                            {2, src, dst, 5},
                            {KVF_COPY_BLOCK, src, UINT32_MAX, 5},
                            {KVF_COPY_BLOCK, KVF_NO_BLOCK, dst, 5}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        list_of(&other)->n = 2;
        other.items[0] = l.items[0];
        other.items[1] = bad[i];
        FAILS(KVF_E_STALE, kvf_copies_done(m, &other.list));
        cr_assert(other.list.n == 2 && n_free(m) == 0);
        AUDIT(m);
    }
    list_of(&other)->n = 2; /* the same item twice */
    other.items[0] = other.items[1] = l.items[0];
    FAILS(KVF_E_STALE, kvf_copies_done(m, &other.list));
    OK(kvf_copies_done(m, &l.list));
    cr_assert(l.list.n == 0 && n_free(m) == 2);
    l.list.n = 1;
    FAILS(KVF_E_STALE, kvf_copies_done(m, &l.list)); /* done already */
    AUDIT(m);
    kvf_manager_destroy(m);
}

Test(blockmgr, a_held_block_is_not_written) {
    static list l;
    kvf_manager *m = make((shape){1, 1, 1, 8, 8, 8, 4, 64});
    kvf_seq a = new_seq(m);
    kvf_block h;
    OK(append(m, a, 20, list_of(&l)));
    uint32_t tail = block(m, a, 0, 2);
    OK(kvf_block_hold(m, tail, &h));
    OK(append(m, a, 1, list_of(&l)));
    cr_assert(l.list.n == 1 && l.items[0].src == tail && block(m, a, 0, 2) != tail);
    OK(kvf_copies_done(m, &l.list));
    OK(kvf_block_release(m, h));
    kvf_block first;
    OK(kvf_block_hold(m, block(m, a, 0, 0), &first)); /* a table that was never forked */
    const kvf_compact_item item = {a, 0, 9, NULL};
    kvf_compaction c;
    OK(kvf_compact_begin(m, &item, 1, &c));
    cr_assert(c.dst_row[0] && c.dst_row[0][0] != kvf_block_id(first));
    OK(kvf_compact_commit(m));
    cr_assert_eq(n_free(m), 5); /* two of the table, one held */
    OK(kvf_block_release(m, first));
    AUDIT(m);
    cr_assert_eq(n_free(m), 6);
    kvf_manager_destroy(m);
}

Test(blockmgr, rollback_takes_the_newest_back) {
    static list l;
    static dump before, after;
    kvf_manager *m = make((shape){2, 2, 1, 8, 32, 32, 4, 64});
    kvf_seq a = new_seq(m), b;
    const uint32_t cover[4] = {10, 10, 10, 10}, reserve[4] = {24, 24, 24, 24};
    OK(append(m, a, 10, list_of(&l)));
    OK(kvf_seq_take_scores(m, a, cover));
    OK(kvf_seq_reserve(m, a, &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = reserve, .with_scores = 1}));
    dump_take(&before, m, &a, 1);
    OK(append(m, a, 13, list_of(&l)));
    cr_assert_eq(occupancy(m).blocks.n_promised, 0);
    OK(kvf_seq_rollback(m, a, 13));
    dump_take(&after, m, &a, 1);
    after.o.blocks.n_held_max = before.o.blocks.n_held_max;
    after.o.score_pages.n_held_max = before.o.score_pages.n_held_max;
    after.o.held_bytes_max = before.o.held_bytes_max;
    dump_same(&before, &after); /* promises included */
    OK(kvf_seq_fork(m, a, list_of(&l), &b));
    OK(kvf_copies_done(m, &l.list));
    OK(kvf_seq_rollback(m, b, 5)); /* gives up references, not blocks */
    cr_assert(slots(m, b, 1) == 5 && blocks(m, b, 1) == 1 && blocks(m, a, 1) == 2);
    OK(kvf_seq_rollback(m, b, 5));
    uint32_t pos = 7;
    OK(kvf_seq_next_pos(m, b, &pos));
    cr_assert(pos == 0 && blocks(m, b, 0) == 0);
    AUDIT(m);
    kvf_manager_destroy(m);
}
