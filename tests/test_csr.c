/* Compressed rows of a layer: equal to the tables, whatever was compacted; refused where slots carry weights. */
#include <criterion/criterion.h>
#include <string.h>

#include "kvfold/attention.h"

enum { LAYERS = 3, GROUPS = 2, BS = 8 };

static kvf_manager *make(kvf_seq *seqs) {
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = LAYERS;
    c.n_kv_heads = 4;
    c.heads_per_group = 2;
    c.block_size = BS;
    c.n_blocks = 256;
    c.max_seqs = 4;
    c.max_slots = 128;
    kvf_manager *m;
    cr_assert_eq(kvf_manager_create(&c, &m, NULL), KVF_OK);
    const uint32_t tokens[] = {21, 0, 16};
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(kvf_seq_create(m, &seqs[i]), KVF_OK);
        const kvf_append_item item = {seqs[i], tokens[i]};
        if (tokens[i]) cr_assert_eq(kvf_append(m, &item, 1, NULL), KVF_OK);
    }
    const kvf_compact_item shrink = {seqs[0], 1, 9, NULL};
    kvf_compaction out;
    cr_assert_eq(kvf_compact_begin(m, &shrink, 1, &out), KVF_OK);
    cr_assert_eq(kvf_compact_commit(m), KVF_OK);
    return m;
}

Test(csr, is_the_tables) {
    kvf_seq seqs[3];
    kvf_manager *m = make(seqs);
    kvf_view view = {.struct_size = sizeof view};
    cr_assert_eq(kvf_view_fill(m, 0, seqs, 3, &view), KVF_OK);
    const kvf_pages pages = {.struct_size = sizeof pages, .block_size = BS};
    const uint32_t slots[LAYERS][3] = {{21, 0, 16}, {9, 0, 16}, {21, 0, 16}};
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t g = 0; g < GROUPS; g++) {
            int32_t indptr[4], indices[8], last[3];
            kvf_csr csr = {sizeof csr, indptr, indices, last, 8, 0};
            cr_assert_eq(kvf_view_csr(&view, &pages, l, g, &csr, NULL), KVF_OK);
            cr_assert_eq(indptr[0], 0);
            for (uint32_t i = 0; i < 3; i++) {
                const uint32_t *blocks, n = (slots[l][i] + BS - 1) / BS;
                cr_assert_eq(kvf_seq_table(m, seqs[i], l, g, NULL, NULL, &blocks), KVF_OK);
                cr_assert_eq(indptr[i + 1] - indptr[i], (int32_t)n);
                for (uint32_t b = 0; b < n; b++) cr_assert_eq(indices[indptr[i] + (int32_t)b], (int32_t)blocks[b]);
                cr_assert_eq(last[i], slots[l][i] ? (int32_t)(slots[l][i] - (n - 1) * BS) : 0);
            }
            cr_assert_eq(csr.n_indices, (uint32_t)indptr[3]);
        }
    kvf_manager_destroy(m);
}

Test(csr, says_what_it_lacks) {
    kvf_seq seqs[3];
    kvf_manager *m = make(seqs);
    kvf_view view = {.struct_size = sizeof view};
    cr_assert_eq(kvf_view_fill(m, 0, seqs, 3, &view), KVF_OK);
    kvf_pages pages = {.struct_size = sizeof pages, .block_size = BS};
    int32_t indptr[4] = {-1, -1, -1, -1}, indices[8], last[3];
    kvf_csr csr = {sizeof csr, indptr, indices, last, 4, 0};
    kvf_error err;
    cr_assert_eq(kvf_view_csr(&view, &pages, 0, 0, &csr, &err), KVF_E_LIMIT);
    cr_assert_eq(csr.n_indices, 5);
    cr_assert_eq(indptr[0], -1, "nothing else is written");
    cr_assert(strstr(err.text, "capacity 4"), "%s", err.text);
    csr.capacity = 8;
    float bias;
    pages.bias = &bias;
    cr_assert_eq(kvf_view_csr(&view, &pages, 0, 0, &csr, &err), KVF_E_UNSUPPORTED);
    pages.bias = NULL;
    cr_assert_eq(kvf_view_csr(&view, &pages, LAYERS, 0, &csr, &err), KVF_E_INVALID);
    cr_assert_eq(kvf_view_csr(&view, &pages, 0, GROUPS, &csr, &err), KVF_E_INVALID);
    csr.indptr = NULL;
    cr_assert_eq(kvf_view_csr(&view, &pages, 0, 0, &csr, &err), KVF_E_INVALID);
    csr.indptr = indptr;
    csr.struct_size = 8;
    cr_assert_eq(kvf_view_csr(&view, &pages, 0, 0, &csr, &err), KVF_E_INVALID);
    cr_assert_eq(kvf_view_csr(NULL, &pages, 0, 0, &csr, &err), KVF_E_INVALID);
    kvf_manager_destroy(m);
}

Test(csr, r29_needs_no_pages) {
    kvf_seq seqs[3];
    kvf_manager *m = make(seqs);
    kvf_view view = {.struct_size = sizeof view};
    cr_assert_eq(kvf_view_fill(m, 0, seqs, 3, &view), KVF_OK);
    kvf_pages pages = {.struct_size = sizeof pages, .block_size = BS};
    int32_t indptr[2][4], indices[2][64], last[2][3];
    for (int i = 0; i < 2; i++) {
        memset(indices[i], 0xff, sizeof indices[i]);
        kvf_csr csr = {sizeof csr, indptr[i], indices[i], last[i], 64, 0};
        cr_assert_eq(kvf_view_csr(&view, i ? NULL : &pages, 0, 0, &csr, NULL), KVF_OK);
    }
    cr_assert(!memcmp(indptr[0], indptr[1], sizeof *indptr) && !memcmp(indices[0], indices[1], sizeof *indices) &&
              !memcmp(last[0], last[1], sizeof *last));
    kvf_manager_destroy(m);
}
