/* One layer of a view as CSR arrays (compressed rows), as other attention kernels take them. */
#include "base/base.h"
#include "base/page_index.h"
#include "base/view_stamp.h"

static kvf_status check(const kvf_view *v, const kvf_pages *p, uint32_t layer, uint32_t group, const kvf_csr *csr,
                        kvf_error *err) {
    if (!v || !csr) return kvf__fail(err, KVF_E_INVALID, "kvf_view_csr: %s is NULL", !v ? "view" : "csr");
    if (csr->struct_size < sizeof *csr)
        return kvf__fail(err, KVF_E_INVALID, "csr: struct_size must be sizeof(kvf_csr), %zu", sizeof *csr);
    if (!csr->indptr || (v->n_seqs && !csr->last_page_len) || (csr->capacity && !csr->indices))
        return kvf__fail(err, KVF_E_INVALID, "csr: indptr, indices and last_page_len must be given");
    if (!v->rows || !v->row_offset || !v->n_slots || !v->block_size)
        return kvf__fail(err, KVF_E_INVALID,
                         "view: rows, row_offset, n_slots and block_size must be set: fill it with kvf_view_fill");
    if (!kvf__view_is_current(v))
        return kvf__fail(err, KVF_E_STALE, "view: its buffer has been filled again since; use the view of that fill");
    if (layer >= v->n_layers) return kvf__fail(err, KVF_E_INVALID, "layer %u: the view has %u", layer, v->n_layers);
    if (group >= v->n_groups) return kvf__fail(err, KVF_E_INVALID, "group %u: the view has %u", group, v->n_groups);
    if (p && p->bias)
        return kvf__fail(err, KVF_E_UNSUPPORTED,
                         "kvf_view_csr: the pages carry biases, which the attention of others would leave out: use "
                         "pages without (no merge=mass), or kvf_attention_decode");
    return KVF_OK;
}

kvf_status kvf_view_csr(const kvf_view *view, const kvf_pages *pages, uint32_t layer, uint32_t group, kvf_csr *csr,
                        kvf_error *err) {
    kvf_view v = {0};
    kvf_pages p = {0};
    kvf_status s = KVF_OK;
    if (view) s = kvf__config_read(&v, sizeof v, view, "kvf_view", err);
    if (!s && pages) s = kvf__config_read(&p, sizeof p, pages, "kvf_pages", err);
    if (!s) s = check(view ? &v : NULL, pages ? &p : NULL, layer, group, csr, err);
    if (s) return s;
    view = &v;
    uint32_t bs = view->block_size;
    uint64_t n = 0;
    for (uint32_t i = 0; i < view->n_seqs; i++)
        n += kvf__ceil_div(view->n_slots[kvf__view_table(view, i, layer, group)], bs);
    if (n > INT32_MAX) return kvf__fail(err, KVF_E_OVERFLOW, "kvf_view_csr: %llu blocks", (unsigned long long)n);
    csr->n_indices = (uint32_t)n;
    if (n > csr->capacity)
        return kvf__fail(err, KVF_E_LIMIT, "csr: capacity %u: the layer has %u blocks", csr->capacity, csr->n_indices);
    int32_t at = 0;
    csr->indptr[0] = 0;
    for (uint32_t i = 0; i < view->n_seqs; i++) {
        uint64_t t = kvf__view_table(view, i, layer, group);
        const uint32_t *row = view->rows + view->row_offset[t];
        uint32_t n_slots = view->n_slots[t], n_blocks = kvf__ceil_div(n_slots, bs);
        for (uint32_t b = 0; b < n_blocks; b++) csr->indices[at++] = (int32_t)row[b];
        csr->indptr[i + 1] = at;
        csr->last_page_len[i] = n_slots ? (int32_t)((n_slots - 1) % bs + 1) : 0;
    }
    return KVF_OK;
}
