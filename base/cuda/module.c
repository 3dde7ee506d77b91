/* libkvfold_cuda: the host side. */
#include <cuda_runtime_api.h>

#include "base/base.h"
#include "base/copy_index.h"
#include "base/cuda/module.h"

cudaError_t kvf__cuda_copy_blocks(const kvf__copy_params *params, cudaStream_t stream);

static kvf_status check(cudaError_t e, const char *what, kvf_error *err) {
    if (e == cudaSuccess) return KVF_OK;
    return kvf__fail(err, e == cudaErrorMemoryAllocation ? KVF_E_NO_MEMORY : KVF_E_DEVICE, "%s: %s", what,
                     cudaGetErrorString(e));
}

static uint32_t n_devices(kvf_error *err) {
    int n = 0; /* without a driver cudaGetDeviceCount leaves it untouched */
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e == cudaSuccess && n > 0) return (uint32_t)n;
    (void)kvf__fail(err, KVF_E_DEVICE, "no CUDA device: %s", e ? cudaGetErrorString(e) : "none is visible");
    return 0;
}

static kvf_status device_alloc(size_t bytes, void **out, kvf_error *err) {
    void *p = NULL;
    kvf_status st = check(cudaMalloc(&p, bytes ? bytes : 1), "device memory", err);
    if (!st) *out = p;
    return st;
}

static void device_free(void *p) {
    if (p) (void)cudaFree(p);
}

static kvf_status upload(void *dst, const void *src, size_t bytes, kvf_error *err) {
    return check(cudaMemcpy(dst, src, bytes, cudaMemcpyHostToDevice), "upload", err);
}

static kvf_status download(void *dst, const void *src, size_t bytes, kvf_error *err) {
    return check(cudaMemcpy(dst, src, bytes, cudaMemcpyDeviceToHost), "download", err);
}

/* block_size is a multiple of 8, so that rows of 4-byte slots are whole vectors. */
static kvf__copy_plane slot_plane(void *base, uint32_t n_rows, uint32_t block_size) {
    return (kvf__copy_plane){base, (uint64_t)n_rows * block_size * 4, n_rows, block_size / 4, 0};
}

static kvf_status plan_planes(const kvf_pages *p, const kvf_score_pages *s, kvf__copy_plane *planes, kvf_error *err) {
    uint32_t slot_bytes = p->head_dim * (p->dtype == KVF_F32 ? 4u : 2u), heads = p->heads_per_group;
    uint32_t block_size = p->block_size, score_block_size = s ? s->block_size : block_size;
    if (!block_size || block_size % 8 || score_block_size != block_size)
        return kvf__fail_field(err, KVF_E_INVALID, "block_size", score_block_size, 0,
                               "must be a power of two in [8, 256], one for all pages");
    if (!slot_bytes || slot_bytes % KVF__VECTOR_BYTES)
        return kvf__fail_field(err, KVF_E_INVALID, "head_dim", p->head_dim, 0, "must be a multiple of 8");
    uint32_t slot_vectors = slot_bytes / KVF__VECTOR_BYTES, row_vectors = block_size * slot_vectors;
    planes[KVF__PLANE_K] = (kvf__copy_plane){p->k, p->k_block_stride, heads, row_vectors, slot_vectors};
    planes[KVF__PLANE_V] = (kvf__copy_plane){p->v, p->v_block_stride, heads, row_vectors, slot_vectors};
    planes[KVF__PLANE_POS] = slot_plane(p->pos, heads, block_size);
    planes[KVF__PLANE_KEY_NORM] = slot_plane(p->key_norm, heads, block_size);
    planes[KVF__PLANE_WEIGHT] = slot_plane(p->weight, heads, block_size);
    planes[KVF__PLANE_BIAS] = slot_plane(p->bias, heads, block_size);
    planes[KVF__PLANE_SCORE] = slot_plane(p->score, heads, block_size);
    if (s) planes[KVF__PLANE_SCORES] = slot_plane(s->base, s->n_arrays * s->heads_per_group, block_size);
    for (int i = 0; i < KVF__N_PLANES; i++)
        if (planes[i].block_stride % KVF__VECTOR_BYTES || (uintptr_t)planes[i].base % KVF__VECTOR_BYTES)
            return kvf__fail(err, KVF_E_INVALID, "plane %d: its base and block stride must be multiples of 16 bytes",
                             i);
    return KVF_OK;
}

static kvf_status check_items(const kvf_pages *p, const kvf_score_pages *s, const kvf_copy_list *copies,
                              kvf_error *err) {
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        if (c->kind != KVF_COPY_BLOCK && c->kind != KVF_COPY_SCORE_PAGE)
            return kvf__fail(err, KVF_E_INVALID, "copy kind %u: must be KVF_COPY_BLOCK or KVF_COPY_SCORE_PAGE",
                             c->kind);
        if (c->kind == KVF_COPY_BLOCK ? !p->k || !p->v : !s || !s->base)
            return kvf__fail(err, KVF_E_INVALID, "copy %u: its kind of page is not given", i);
        uint32_t n = c->kind == KVF_COPY_BLOCK ? p->n_blocks : s->n_pages;
        if (c->src >= n || c->dst >= n)
            return kvf__fail(err, KVF_E_INVALID, "copy id %u: is beyond the pool", c->src >= n ? c->src : c->dst);
        if (c->n_slots > p->block_size)
            return kvf__fail_field(err, KVF_E_INVALID, "n_slots", c->n_slots, p->block_size,
                                   "must be at most block_size");
    }
    return KVF_OK;
}

static kvf_status copies_run(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_copy_list *copies,
                             kvf_copy *items, kvf_error *err) {
    kvf__copy_params params = {.items = items, .n_items = copies->n};
    kvf_status st = plan_planes(pages, scores, params.planes, err);
    if (st || (st = check_items(pages, scores, copies, err)) || !copies->n) return st;
    if ((st = upload(items, copies->items, copies->n * sizeof *items, err))) return st;
    if ((st = check(kvf__cuda_copy_blocks(&params, NULL), "copy_blocks", err))) return st;
    return check(cudaDeviceSynchronize(), "copy_blocks", err);
}

const kvf__cuda_ops *kvf__cuda_module(void) {
    static const kvf__cuda_ops ops = {sizeof ops, n_devices, device_alloc, device_free, upload, download, copies_run};
    return &ops;
}
