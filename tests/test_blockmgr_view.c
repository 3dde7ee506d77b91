/* Copies of the view: what a fill lists, and a device that reads what is sent later than it is told to. */
#include "kvfold/prefix.h"
#include "test_blockmgr_util.h"
#include "view_mirror.h"

enum { BS = 8 };

static kvf_manager *make_copies(shape s) {
    kvf_manager_config c = config_of(s);
    kvf_manager *m = NULL;
    kvf_error err = {.text = ""};
    c.view_copies = 1;
    cr_assert_eq(kvf_manager_create(&c, &m, &err), KVF_OK, "%s", err.text);
    return m;
}

static kvf_view fill(kvf_manager *m, uint32_t which, const kvf_seq *seqs, uint32_t n) {
    kvf_view v = {.struct_size = sizeof v};
    OK(kvf_view_fill(m, which, seqs, n, &v));
    AUDIT(m);
    return v;
}

/* The last fill of a buffer lists just these. */
static void expect_ranges(kvf_manager *m, uint32_t which, const kvf_view_range *want, uint32_t n) {
    kvf_view_changes c = {.struct_size = sizeof c};
    uint64_t n_bytes = 0;
    OK(kvf_view_read_changes(m, which, &c));
    cr_assert_eq(c.n_ranges, n, "%u ranges, not %u", c.n_ranges, n);
    for (uint32_t i = 0; i < n; i++) {
        const kvf_view_range *r = &c.ranges[i];
        n_bytes += (uint64_t)r->n * (r->array == KVF_VIEW_ROW_OFFSET ? 8 : 4);
        cr_assert(r->first == want[i].first && r->n == want[i].n && r->array == want[i].array,
                  "range %u: %u entries from %llu of array %u", i, r->n, (unsigned long long)r->first, r->array);
    }
    cr_assert_eq(c.n_bytes, n_bytes);
}
#define RANGES(m, which, ...)                                         \
    do {                                                              \
        const kvf_view_range want_[] = {__VA_ARGS__};                 \
        expect_ranges(m, which, want_, sizeof want_ / sizeof *want_); \
    } while (0)
#define ROWS(first, n) \
    { first, n, KVF_VIEW_ROWS }
#define SCORES(first, n) \
    { first, n, KVF_VIEW_SCORE_ROWS }
#define OFFSETS(first, n) \
    { first, n, KVF_VIEW_ROW_OFFSET }
#define SLOTS(first, n) \
    { first, n, KVF_VIEW_N_SLOTS }
#define POSITIONS(first, n) \
    { first, n, KVF_VIEW_NEXT_POS }
#define INDICES(first, n) \
    { first, n, KVF_VIEW_SEQ_INDEX }

/* Two layers, rows of at most 4 blocks: sequence 0 has the rows at 0 and 4, sequence 1 those at 8 and 12. */
Test(blockmgr_view, a_fill_lists_what_has_changed_in_its_buffer) {
    kvf_manager *m = make_copies((shape){2, 1, 1, BS, 16, 16, 3, 32});
    kvf_seq s[2] = {new_seq(m), new_seq(m)}, turned[2] = {s[1], s[0]};
    const uint32_t cover[2] = {8, 8};
    static list l;
    OK(append(m, s[0], 7, NULL));
    OK(append(m, s[1], 9, NULL));
    fill(m, 0, s, 2);
    RANGES(m, 0, ROWS(0, 1), ROWS(4, 1), ROWS(8, 2), ROWS(12, 2), OFFSETS(0, 4), SLOTS(0, 4), POSITIONS(0, 2),
           INDICES(0, 2));
    fill(m, 0, s, 2);
    expect_ranges(m, 0, NULL, 0);
    OK(append(m, s[0], 1, NULL)); /* within the block */
    fill(m, 0, s, 2);
    RANGES(m, 0, SLOTS(0, 2), POSITIONS(0, 1));
    OK(append(m, s[0], 1, NULL)); /* a block more */
    fill(m, 1, s, 2);             /* the other buffer has seen nothing yet */
    RANGES(m, 1, ROWS(0, 2), ROWS(4, 2), ROWS(8, 2), ROWS(12, 2), OFFSETS(0, 4), SLOTS(0, 4), POSITIONS(0, 2),
           INDICES(0, 2));
    fill(m, 0, s, 2);
    RANGES(m, 0, ROWS(1, 1), ROWS(5, 1), SLOTS(0, 2), POSITIONS(0, 1));
    fill(m, 0, turned, 2); /* the order: both have 9 slots */
    RANGES(m, 0, OFFSETS(0, 4), INDICES(0, 2));
    OK(kvf_seq_take_scores(m, s[1], cover));
    compact(m, s[1], 1, 8);
    fill(m, 0, turned, 2);
    RANGES(m, 0, ROWS(13, 1), SCORES(8, 1), SCORES(12, 1), SLOTS(1, 1));
    kvf_seq child = 0;
    OK(kvf_seq_fork(m, s[0], list_of(&l), &child));
    OK(append(m, s[0], 1, &l.list)); /* copies its last blocks */
    fill(m, 0, turned, 2);
    RANGES(m, 0, ROWS(1, 1), ROWS(5, 1), SLOTS(2, 2), POSITIONS(1, 1));
    fill(m, 1, s + 1, 1); /* a smaller batch lists its own */
    RANGES(m, 1, ROWS(13, 1), SCORES(8, 1), SCORES(12, 1), OFFSETS(0, 2), SLOTS(1, 1), INDICES(0, 1));
    OK(kvf_seq_rollback(m, s[0], 2));
    fill(m, 0, turned, 2);
    RANGES(m, 0, ROWS(1, 1), ROWS(5, 1), SLOTS(2, 2), POSITIONS(1, 1));
    kvf_manager_destroy(m);
}

/* A sequence that has another's place: what is left of that is cleared, and what is the same is not sent. */
Test(blockmgr_view, a_place_that_is_used_again_is_cleared) {
    kvf_manager *m = make_copies((shape){1, 1, 1, BS, 8, 8, 1, 32});
    kvf_seq s = new_seq(m);
    OK(append(m, s, 30, NULL));
    kvf_view v = fill(m, 0, &s, 1);
    uint32_t first = v.rows[0];
    OK(kvf_seq_free(m, s));
    s = new_seq(m);
    OK(append(m, s, 16, NULL));
    cr_assert_eq(block(m, s, 0, 0), first);
    v = fill(m, 0, &s, 1);
    RANGES(m, 0, ROWS(2, 2), SLOTS(0, 1), POSITIONS(0, 1));
    cr_assert(v.rows[1] != KVF_NO_BLOCK && v.rows[2] == KVF_NO_BLOCK && v.rows[3] == KVF_NO_BLOCK);
    kvf_manager_destroy(m);
}

Test(blockmgr_view, a_hit_and_what_windows_drop_are_listed) {
    const uint32_t windows[2] = {0, 9};
    uint32_t tokens[40];
    for (uint32_t i = 0; i < 40; i++) tokens[i] = i;
    kvf_manager_config c = config_of((shape){2, 1, 1, BS, 24, 24, 2, 48});
    kvf_manager *m = NULL;
    view_mirror d = {0};
    c.view_copies = c.prefix_cache = 1;
    c.layer_windows = windows;
    OK(kvf_manager_create(&c, &m, NULL));
    mirror_open(&d, m);
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = 40};
    kvf_prefix_match match = {.struct_size = sizeof match};
    kvf_seq s = new_seq(m);
    kvf_view v = {.struct_size = sizeof v};
    for (uint32_t i = 0; i < 40; i++) { /* a token at a time, in both buffers by turns */
        OK(append(m, s, 1, NULL));
        if (i % 8 == 7) OK(kvf_prefix_store(m, s, &key, i + 1, NULL, NULL));
        v = fill(m, i & 1, &s, 1);
        const char *wrong = mirror_send(&d, m, i & 1, &s, &v);
        cr_assert_null(wrong, "token %u: %s", i, wrong);
    }
    OK(kvf_seq_free(m, s));
    OK(kvf_prefix_lookup(m, &key, NULL, &match));
    cr_assert_eq(match.n_tokens, 32);
    s = new_seq(m);
    OK(kvf_prefix_attach(m, s, &key, &match, NULL, NULL));
    for (uint32_t i = 0; i < 4; i++) {
        v = fill(m, i & 1, &s, 1);
        const char *wrong = mirror_send(&d, m, i & 1, &s, &v);
        cr_assert_null(wrong, "after the hit, %u: %s", i, wrong);
        if (i == 1) OK(append(m, s, 1, NULL));
    }
    mirror_close(&d);
    kvf_manager_destroy(m);
}

Test(blockmgr_view, what_is_forgotten_is_listed_again) {
    kvf_manager *m = make_copies((shape){1, 1, 1, BS, 8, 8, 2, 32});
    kvf_seq s = new_seq(m);
    OK(append(m, s, 12, NULL));
    fill(m, 0, &s, 1);
    fill(m, 1, &s, 1);
    OK(kvf_view_forget(m, 1));
    expect_ranges(m, 1, NULL, 0);
    AUDIT(m);
    fill(m, 0, &s, 1);
    expect_ranges(m, 0, NULL, 0);
    fill(m, 1, &s, 1);
    RANGES(m, 1, ROWS(0, 2), OFFSETS(0, 1), SLOTS(0, 1), POSITIONS(0, 1), INDICES(0, 1));
    kvf_manager_destroy(m);
}

Test(blockmgr_view, what_cannot_be_is_refused_and_changes_no_list) {
    kvf_manager *m = make_copies((shape){1, 1, 1, BS, 8, 8, 2, 32}), *plain = make((shape){1, 1, 1, BS, 8, 8, 2, 32});
    kvf_seq s = new_seq(m), gone = new_seq(m);
    kvf_view_changes c = {.struct_size = sizeof c};
    kvf_view v = {.struct_size = sizeof v};
    OK(kvf_seq_free(m, gone));
    OK(append(m, s, 3, NULL));
    fill(m, 0, &s, 1);
    OK(append(m, s, 8, NULL));
    FAILS(KVF_E_STALE, kvf_view_fill(m, 0, (kvf_seq[]){s, gone}, 2, &v));
    RANGES(m, 0, ROWS(0, 1), OFFSETS(0, 1), SLOTS(0, 1), POSITIONS(0, 1), INDICES(0, 1));
    FAILS(KVF_E_INVALID, kvf_view_read_changes(m, 2, &c));
    FAILS(KVF_E_INVALID, kvf_view_read_changes(m, 0, NULL));
    FAILS(KVF_E_INVALID, kvf_view_read_changes(NULL, 0, &c));
    FAILS(KVF_E_INVALID, kvf_view_forget(m, 2));
    FAILS(KVF_E_UNSUPPORTED, kvf_view_read_changes(plain, 0, &c));
    FAILS(KVF_E_UNSUPPORTED, kvf_view_forget(plain, 0));
    cr_assert(strstr(kvf_manager_error(plain)->text, "view_copies 0"), "%s", kvf_manager_error(plain)->text);
    kvf_manager_config config = *kvf_manager_get_config(plain);
    size_t bytes = 0, with = 0;
    OK(kvf_manager_bytes(&config, &bytes, NULL));
    config.view_copies = 1;
    OK(kvf_manager_bytes(&config, &with, NULL));
    cr_assert_gt(with, bytes);
    config.view_copies = 2;
    FAILS(KVF_E_INVALID, kvf_manager_bytes(&config, &bytes, NULL));
    kvf_manager_destroy(plain);
    kvf_manager_destroy(m);
}

/* ---- C10: a step that uses the block table of the next step ------------------------------------------------------- */

/* A device whose stream runs only when it is flushed: a copy reads its source then. A kernel reads the device's copy of a row, and
 * of each of its blocks the number that lies there, which is the block's own. */
typedef struct op {
    void *to;
    const void *from;
    size_t n; /* of a kernel 0 */
    uint32_t which;
} op;
typedef struct device {
    view_mirror copies;
    op ops[64];
    uint32_t n_ops, results[2][2];
} device;

static void upload(device *d, kvf_manager *m, uint32_t which, const kvf_view *v) {
    kvf_view_changes c = {.struct_size = sizeof c};
    OK(kvf_view_read_changes(m, which, &c));
    for (uint32_t i = 0; i < c.n_ranges; i++) {
        const kvf_view_range *r = &c.ranges[i];
        size_t word = mirror_word(r->array), at = r->first * word;
        d->ops[d->n_ops++] =
            (op){d->copies.arrays[which][r->array] + at, mirror_source(v, r->array) + at, r->n * word, which};
    }
    d->ops[d->n_ops++] = (op){.which = which};
}

static void flush(device *d) {
    for (uint32_t i = 0; i < d->n_ops; i++) {
        const op *o = &d->ops[i];
        uint64_t offset;
        if (o->n) {
            memcpy(o->to, o->from, o->n);
            continue;
        }
        memcpy(&offset, d->copies.arrays[o->which][KVF_VIEW_ROW_OFFSET], sizeof offset);
        memcpy(d->results[o->which], d->copies.arrays[o->which][KVF_VIEW_ROWS] + offset * sizeof(uint32_t),
               2 * sizeof(uint32_t));
    }
    d->n_ops = 0;
}

Test(blockmgr_view, c10_two_steps_in_flight_use_each_their_own_tables) {
    kvf_manager *m = make_copies((shape){1, 1, 1, BS, 4, 4, 1, 16});
    static device d;
    mirror_open(&d.copies, m);
    for (uint32_t round = 0; round < 3; round++) {
        kvf_block held[2];
        kvf_seq s = new_seq(m);
        OK(append(m, s, 16, NULL));
        const uint32_t first[2] = {block(m, s, 0, 0), block(m, s, 0, 1)};
        kvf_view v = fill(m, 0, &s, 1);
        upload(&d, m, 0, &v);
        for (int i = 0; i < 2; i++) OK(kvf_block_hold(m, first[i], &held[i]));
        OK(kvf_seq_free(m, s));
        s = new_seq(m); /* in the same place */
        OK(append(m, s, 16, NULL));
        const uint32_t second[2] = {block(m, s, 0, 0), block(m, s, 0, 1)};
        v = fill(m, 1, &s, 1);
        upload(&d, m, 1, &v);
        flush(&d);
        cr_assert_eq(memcmp(d.results[0], first, sizeof first), 0, "round %u: step 1 read blocks %u and %u", round,
                     d.results[0][0], d.results[0][1]);
        cr_assert_eq(memcmp(d.results[1], second, sizeof second), 0, "round %u: step 2 read blocks %u and %u", round,
                     d.results[1][0], d.results[1][1]);
        cr_assert(first[0] != second[0] && first[1] != second[1]);
        OK(kvf_seq_free(m, s));
        for (int i = 0; i < 2; i++) OK(kvf_block_release(m, held[i]));
    }
    mirror_close(&d.copies);
    kvf_manager_destroy(m);
}
