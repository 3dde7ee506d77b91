/* Attention reads the block ids of a view once, when the manager fills it: none of the wrong views gets through. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "kvfold/attention.h"

enum { LAYERS = 2, BS = 8, BLOCKS = 32, TOKENS = 20, DIM = 8 };

typedef struct rig {
    kvf_manager *m;
    kvf_seq seqs[2];
    kvf_view view;
    kvf_pages pages;
    uint32_t q_begin[3];
    kvf_attention a;
    kvf_error err;
} rig;

static kvf_manager *make_manager(uint32_t n_blocks, int view_copies) {
    kvf_manager_config c;
    kvf_manager *m = NULL;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = LAYERS;
    c.n_kv_heads = 1;
    c.block_size = BS;
    c.n_blocks = n_blocks;
    c.max_seqs = 4;
    c.max_slots = 64;
    c.view_copies = view_copies;
    cr_assert_eq(kvf_manager_create(&c, &m, NULL), KVF_OK);
    return m;
}

static void fill(rig *r, kvf_manager *m, uint32_t which, const kvf_seq *seqs, uint32_t n) {
    r->view = (kvf_view){.struct_size = sizeof r->view};
    cr_assert_eq(kvf_view_fill(m, which, seqs, n, &r->view), KVF_OK);
    r->a.view = &r->view;
    r->a.seq_end = n;
}

static void make(rig *r, int view_copies) {
    *r = (rig){.m = make_manager(BLOCKS, view_copies)};
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(kvf_seq_create(r->m, &r->seqs[i]), KVF_OK);
        const kvf_append_item item = {r->seqs[i], TOKENS};
        cr_assert_eq(kvf_append(r->m, &item, 1, NULL), KVF_OK);
    }
    r->pages = (kvf_pages){.struct_size = sizeof r->pages,
                           .n_blocks = BLOCKS,
                           .block_size = BS,
                           .heads_per_group = 1,
                           .head_dim = DIM,
                           .k_block_stride = BS * DIM * sizeof(float),
                           .v_block_stride = BS * DIM * sizeof(float)};
    r->pages.k = calloc(BLOCKS, r->pages.k_block_stride);
    r->pages.v = calloc(BLOCKS, r->pages.v_block_stride);
    r->pages.pos = calloc(BLOCKS * BS, sizeof *r->pages.pos);
    r->a = (kvf_attention){.struct_size = sizeof r->a, .pages = &r->pages, .layer = 1, .q_begin = r->q_begin};
    r->a.n_q_heads = 1;
    fill(r, r->m, 0, r->seqs, 2);
}

static void drop(rig *r) {
    free(r->pages.k);
    free(r->pages.v);
    free(r->pages.pos);
    kvf_manager_destroy(r->m);
}

/* Of calls without query rows: they check everything, and touch nothing. */
static kvf_status check(rig *r) {
    r->err.text[0] = 0;
    kvf_status st = kvf_attention_append(NULL, &r->a, &r->err);
    cr_assert_eq(kvf_attention_prefill(NULL, &r->a, NULL), st, "%s", r->err.text);
    return st;
}

static void expect(rig *r, kvf_status status, const char *text) {
    cr_assert_eq(check(r), status, "\"%s\": %s", text, r->err.text);
    cr_assert(strstr(r->err.text, text), "\"%s\" is not in \"%s\"", text, r->err.text);
}

/* An id of the view's rows, which are const to a caller. */
static uint32_t *id_of(const kvf_view *v, uint32_t seq, uint32_t layer) {
    return (uint32_t *)(uintptr_t)(v->rows + v->row_offset[seq * LAYERS + layer]) + 1;
}

Test(view_stamp, ids_of_a_filled_view_are_not_read_again) {
    rig r;
    for (int copies = 0; copies < 2; copies++) {
        make(&r, copies);
        uint32_t *id = id_of(&r.view, 1, 1), before = *id;
        expect(&r, KVF_OK, "");
        *id = BLOCKS; /* behind the manager's back: whoever reads it sees it */
        expect(&r, KVF_OK, "");
        r.view.stamp = NULL;
        expect(&r, KVF_E_INVALID, "sequence 1, group 0, block 1: id 32: there are 32 blocks");
        *id = before;
        expect(&r, KVF_OK, "");
        drop(&r);
    }
}

Test(view_stamp, a_view_of_a_buffer_filled_again_is_refused) {
    rig r;
    for (int copies = 0; copies < 2; copies++) {
        make(&r, copies);
        const kvf_view old = r.view;
        int32_t indptr[3], indices[8], last[2];
        kvf_csr csr = {sizeof csr, indptr, indices, last, 8, 0};
        fill(&r, r.m, 1, r.seqs, 2);
        r.a.view = &old;
        expect(&r, KVF_OK, ""); /* that was the other buffer */
        cr_assert_eq(kvf_view_csr(&old, NULL, 0, 0, &csr, NULL), KVF_OK);
        fill(&r, r.m, 0, r.seqs, 1);
        r.a.view = &old;
        expect(&r, KVF_E_STALE, "its buffer has been filled again");
        r.q_begin[1] = r.q_begin[2] = 1;
        cr_assert_eq(kvf_attention_decode(NULL, &r.a, &r.err), KVF_E_STALE);
        cr_assert_eq(kvf_view_csr(&old, NULL, 0, 0, &csr, &r.err), KVF_E_STALE);
        r.q_begin[1] = r.q_begin[2] = 0;
        r.a.view = &r.view;
        expect(&r, KVF_OK, "");
        if (copies) {
            cr_assert_eq(kvf_view_forget(r.m, 0), KVF_OK);
            expect(&r, KVF_E_STALE, "its buffer has been filled again");
        }
        drop(&r);
    }
}

Test(view_stamp, a_view_of_another_manager_is_read) {
    rig r;
    make(&r, 0);
    kvf_manager *other = make_manager(2 * BLOCKS, 0);
    kvf_seq seqs[2];
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(kvf_seq_create(other, &seqs[i]), KVF_OK);
        const kvf_append_item item = {seqs[i], 64};
        cr_assert_eq(kvf_append(other, &item, 1, NULL), KVF_OK);
    }
    fill(&r, other, 0, seqs, 2);
    r.pages.n_blocks = 2 * BLOCKS; /* the sizes only: nothing is touched */
    expect(&r, KVF_OK, "");
    uint32_t most = 0;
    for (uint32_t i = 0; i < 4; i++)
        most = most > id_of(&r.view, i / 2, i % 2)[6] ? most : id_of(&r.view, i / 2, i % 2)[6];
    r.pages.n_blocks = most;
    r.a.layer = 0;
    kvf_status first = check(&r);
    r.a.layer = 1;
    cr_assert(first || check(&r), "an id beyond these pages");
    cr_assert(strstr(r.err.text, "there are"), "%s", r.err.text);
    kvf_manager_destroy(other);
    drop(&r);
}

Test(view_stamp, a_row_that_the_manager_changes_is_read) {
    rig r;
    make(&r, 0);
    const kvf_compact_item shrink = {r.seqs[0], 1, 5, NULL};
    kvf_compaction out;
    cr_assert_eq(kvf_compact_begin(r.m, &shrink, 1, &out), KVF_OK);
    cr_assert_eq(kvf_compact_commit(r.m), KVF_OK);
    expect(&r, KVF_E_INVALID, "sequence 0, group 0, block 1: id 4294967295");
    r.a.layer = 0;
    expect(&r, KVF_OK, "");
    cr_assert_eq(kvf_seq_free(r.m, r.seqs[1]), KVF_OK);
    expect(&r, KVF_E_INVALID, "sequence 1, group 0, block 0: id 4294967295");
    fill(&r, r.m, 0, r.seqs, 1);
    expect(&r, KVF_OK, "");
    drop(&r);
    make(&r, 1); /* a copy of the rows stays as it was filled, so that the next step may be prepared */
    cr_assert_eq(kvf_seq_free(r.m, r.seqs[1]), KVF_OK);
    expect(&r, KVF_OK, "");
    drop(&r);
}

Test(view_stamp, a_view_that_the_caller_changes_is_read) {
    rig r;
    make(&r, 0);
    uint32_t row[] = {0, 1, BLOCKS}, n_slots[] = {TOKENS, TOKENS, TOKENS, TOKENS};
    uint64_t offset[4] = {0};
    const kvf_view filled = r.view;
    r.view.rows = row;
    r.view.row_offset = offset;
    expect(&r, KVF_E_INVALID, "block 2: id 32");
    r.view = filled;
    n_slots[1] = 30;
    r.view.n_slots = n_slots;
    expect(&r, KVF_E_INVALID, "block 3: id 4294967295");
    r.view = filled;
    memcpy(offset, filled.row_offset, sizeof offset);
    offset[3] += 1; /* one block on */
    r.view.row_offset = offset;
    expect(&r, KVF_E_INVALID, "sequence 1, group 0, block 2: id 4294967295");
    r.view = filled;
    r.view.struct_size = offsetof(kvf_view, stamp); /* of a caller with an older header */
    expect(&r, KVF_OK, "");
    *id_of(&r.view, 0, 1) = BLOCKS;
    expect(&r, KVF_E_INVALID, "id 32");
    drop(&r);
}
