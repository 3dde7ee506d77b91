/* The copy kernel, on the CPU: against kvf_copies_run, in every thread order; and the stand-in that runs it. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cuda/module.h"
#include "cuda_on_cpu/cuda_on_cpu.h"
#include "cuda_on_cpu/cuda_runtime_api.h"

enum { BLOCKS = 12, MAX_COPIES = 6, N = 96 };

cudaError_t selftest_block_sum(const int *in, int *out, unsigned n_blocks, int with_barrier);
cudaError_t selftest_warp_sum(const int *in, int *out, unsigned n_blocks);
cudaError_t selftest_fault(int which);

static uint32_t random_below(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % n;
}

/* Pages, once for the host and once "on the device": one area each, so that all of it can be compared. */
typedef struct area {
    kvf_pages pages;
    kvf_score_pages scores;
    unsigned char *bytes;
    size_t n_bytes;
} area;

static void area_create(const kvf__cuda_ops *cuda, area *a, kvf_dtype dtype, uint32_t block_size, uint32_t heads,
                        uint32_t dim, int side_by_side, int all_metadata) {
    a->pages = (kvf_pages){.struct_size = sizeof a->pages,
                           .dtype = dtype,
                           .n_blocks = BLOCKS,
                           .block_size = block_size,
                           .heads_per_group = heads,
                           .head_dim = dim};
    size_t half = (size_t)kvf_pages_block_bytes(&a->pages) / 2, meta = (size_t)BLOCKS * heads * block_size * 4;
    a->n_bytes = BLOCKS * half * 2 + meta * 7;
    kvf_status st = cuda->alloc(a->n_bytes, (void **)&a->bytes, NULL);
    cr_assert_eq(st, KVF_OK);
    unsigned char *at = a->bytes;
    a->pages.k = at;
    a->pages.v = side_by_side ? at + half : at + BLOCKS * half;
    a->pages.k_block_stride = a->pages.v_block_stride = side_by_side ? half * 2 : half;
    at += BLOCKS * half * 2;
    a->pages.pos = (uint32_t *)(void *)at;
    a->pages.key_norm = all_metadata ? (float *)(void *)(at + meta) : NULL;
    a->pages.weight = all_metadata ? (float *)(void *)(at + 2 * meta) : NULL;
    a->pages.bias = all_metadata ? (float *)(void *)(at + 3 * meta) : NULL;
    a->pages.score = all_metadata ? (float *)(void *)(at + 4 * meta) : NULL;
    a->scores = (kvf_score_pages){.struct_size = sizeof a->scores,
                                  .base = (float *)(void *)(at + 5 * meta),
                                  .n_pages = BLOCKS,
                                  .n_arrays = 2,
                                  .heads_per_group = heads,
                                  .block_size = block_size};
}

/* Distinct targets, and no target is a source: as the manager makes them. */
static uint32_t random_copies(uint64_t *seed, uint32_t block_size, kvf_copy *items) {
    uint32_t n = 1 + random_below(seed, MAX_COPIES);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t kind = random_below(seed, 3) ? KVF_COPY_BLOCK : KVF_COPY_SCORE_PAGE;
        items[i] = (kvf_copy){kind, MAX_COPIES + random_below(seed, BLOCKS - MAX_COPIES), i,
                              1 + random_below(seed, block_size)};
    }
    return n;
}

/* The kernel moves 4-byte slots by fours, so that up to three slots past n_slots, which hold nothing, may differ. */
static void forget_idle_slots(area *a, const kvf_copy *c) {
    uint32_t bs = a->pages.block_size, end = (c->n_slots + 3) / 4 * 4;
    int block = c->kind == KVF_COPY_BLOCK;
    float *planes[5] = {block ? (float *)(void *)a->pages.pos : a->scores.base, a->pages.key_norm, a->pages.weight,
                        a->pages.bias, a->pages.score};
    uint32_t rows = a->pages.heads_per_group * (block ? 1 : a->scores.n_arrays);
    for (int i = 0; i < (block ? 5 : 1); i++)
        for (uint32_t r = 0; planes[i] && r < rows; r++)
            for (uint32_t s = c->n_slots; s < end; s++) memset(&planes[i][(c->dst * rows + r) * bs + s], 0, 4);
}

static void compare(const kvf__cuda_ops *cuda, area *host, area *device, uint64_t seed) {
    kvf_copy items[MAX_COPIES];
    uint64_t state = seed;
    for (size_t i = 0; i < host->n_bytes; i++) host->bytes[i] = (unsigned char)random_below(&state, 256);
    kvf_copy_list list = {items, random_copies(&state, host->pages.block_size, items), MAX_COPIES};
    kvf_copy *device_items = NULL;
    kvf_error err = {.text = ""};
    kvf_status st = cuda->upload(device->bytes, host->bytes, host->n_bytes, &err);
    if (!st) st = cuda->alloc(list.n * sizeof *items, (void **)&device_items, &err);
    if (!st) st = cuda->copies_run(&device->pages, &device->scores, &list, device_items, &err);
    cr_assert_eq(st, KVF_OK, "seed %llu: %s", (unsigned long long)seed, err.text);
    cuda->free(device_items);
    cr_assert_eq(kvf_copies_run(&host->pages, &host->scores, NULL, NULL, &list), KVF_OK);
    for (uint32_t i = 0; i < list.n; i++) {
        forget_idle_slots(host, &items[i]);
        forget_idle_slots(device, &items[i]);
    }
    for (size_t i = 0; i < host->n_bytes; i++)
        cr_assert_eq(host->bytes[i], device->bytes[i], "seed %llu: byte %zu of %zu differs", (unsigned long long)seed,
                     i, host->n_bytes);
}

Test(cuda, copies_are_those_of_the_host) {
    static const uint32_t shapes[][3] = {
        {8, 1, 8}, {16, 3, 64}, {32, 2, 40}, {256, 1, 64}}; /* block_size, heads, head_dim */
    const kvf__cuda_ops *cuda = kvf__cuda_module();
    uint64_t seed = 1, before = cuda_on_cpu_n_threads();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int variant = 0; variant < 4; variant++) {
            area host, device;
            kvf_dtype dtype = variant & 1 ? KVF_F32 : variant & 2 ? KVF_BF16 : KVF_F16;
            area_create(cuda, &host, dtype, shapes[i][0], shapes[i][1], shapes[i][2], variant & 2, variant != 3);
            area_create(cuda, &device, dtype, shapes[i][0], shapes[i][1], shapes[i][2], variant & 2, variant != 3);
            for (int order = CUDA_ON_CPU_ASCENDING; order <= CUDA_ON_CPU_RANDOM; order++, seed++) {
                cuda_on_cpu_set_order((cuda_on_cpu_order)order, seed);
                compare(cuda, &host, &device, seed);
            }
            cuda->free(host.bytes);
            cuda->free(device.bytes);
        }
    cr_assert_gt(cuda_on_cpu_n_threads(), before);
}

Test(cuda, bad_copies_change_nothing) {
    const kvf__cuda_ops *cuda = kvf__cuda_module();
    area a;
    area_create(cuda, &a, KVF_F16, 16, 2, 32, 0, 1);
    memset(a.bytes, 7, a.n_bytes);
    kvf_copy good = {KVF_COPY_BLOCK, 3, 1, 16}, device_items[2];
    const kvf_copy bad[] = {{KVF_COPY_BLOCK, BLOCKS, 2, 16},
                            {KVF_COPY_BLOCK, 4, BLOCKS, 16},
                            {KVF_COPY_BLOCK, 4, 2, 17},
                            {2, 4, 2, 16},
                            {KVF_COPY_SCORE_PAGE, 4, BLOCKS, 16}};
    uint64_t before = cuda_on_cpu_n_threads();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvf_copy items[2] = {good, bad[i]};
        kvf_copy_list list = {items, 2, 2};
        kvf_error err = {.text = ""};
        cr_assert_eq(cuda->copies_run(&a.pages, &a.scores, &list, device_items, &err), KVF_E_INVALID, "case %zu", i);
        cr_assert(*err.text);
    }
    kvf_copy_list list = {&good, 1, 1};
    kvf_pages pages = a.pages;
    pages.k = (char *)pages.k + 8;
    cr_assert_eq(cuda->copies_run(&pages, &a.scores, &list, device_items, NULL), KVF_E_INVALID);
    pages = a.pages;
    pages.v_block_stride += 4;
    cr_assert_eq(cuda->copies_run(&pages, &a.scores, &list, device_items, NULL), KVF_E_INVALID);
    good.kind = KVF_COPY_SCORE_PAGE;
    cr_assert_eq(cuda->copies_run(&a.pages, NULL, &list, device_items, NULL), KVF_E_INVALID);
    list.n = 0;
    cr_assert_eq(cuda->copies_run(&a.pages, NULL, &list, device_items, NULL), KVF_OK);
    cr_assert_eq(cuda_on_cpu_n_threads(), before);
    cuda->free(a.bytes);
}

Test(cuda, a_module_that_is_not_there_is_told) {
    const kvf__cuda_ops *ops = NULL;
    void *handle = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf__cuda_open("no-such-module.so", &handle, &ops, &err), KVF_E_NOT_FOUND);
    cr_assert(strstr(err.text, "no-such-module.so") && strstr(err.text, "KVF_CUDA=ON"), "%s", err.text);
    cr_assert(!handle && !ops);
#ifdef KVF_CUDA_MODULE /* the real one, with a device or without */
    kvf_status st = kvf__cuda_open(KVF_CUDA_MODULE, &handle, &ops, &err);
    cr_assert(st == KVF_OK || (st == KVF_E_UNSUPPORTED && strstr(err.text, "no CUDA device")), "%s", err.text);
    kvf__cuda_close(handle);
#endif
}

Test(cuda_on_cpu, sums_are_right_in_every_order) {
    int in[4 * N], out[4];
    for (int i = 0; i < 4 * N; i++) in[i] = i * i % 101;
    int n_wrong = 0;
    for (uint64_t seed = 0; seed < 12; seed++) {
        cuda_on_cpu_set_order(seed < 2 ? (cuda_on_cpu_order)seed : CUDA_ON_CPU_RANDOM, seed);
        for (int kind = 0; kind < 3; kind++) {
            memset(out, 0, sizeof out);
            cudaError_t e = kind < 2 ? selftest_block_sum(in, out, 4, kind == 0) : selftest_warp_sum(in, out, 4);
            cr_assert_eq(e, cudaSuccess, "%s", cuda_on_cpu_error());
            for (int b = 0; b < 4; b++) {
                int sum = 0;
                for (int i = 0; i < N; i++) sum += in[b * N + i];
                if (kind != 1)
                    cr_assert_eq(out[b], sum, "kind %d, seed %d", kind, (int)seed);
                else
                    n_wrong += out[b] != sum;
            }
        }
    }
    cr_assert_gt(n_wrong, 0, "the missing barrier was never seen");
}

Test(cuda_on_cpu, faults_are_told) {
    for (int order = CUDA_ON_CPU_ASCENDING; order <= CUDA_ON_CPU_RANDOM; order++) {
        cuda_on_cpu_set_order((cuda_on_cpu_order)order, 5);
        cr_assert_neq(selftest_fault(0), cudaSuccess);
        cr_assert(strstr(cuda_on_cpu_error(), "barrier"), "%s", cuda_on_cpu_error());
        cr_assert_neq(selftest_fault(1), cudaSuccess);
        cr_assert(strstr(cuda_on_cpu_error(), "__shfl_sync") || strstr(cuda_on_cpu_error(), "__syncthreads"), "%s",
                  cuda_on_cpu_error());
        cr_assert_neq(selftest_fault(2), cudaSuccess);
        cr_assert(strstr(cuda_on_cpu_error(), "invalid configuration"), "%s", cuda_on_cpu_error());
    }
    int in[N] = {1}, out = 0; /* and after a fault all is as before */
    cr_assert_eq(selftest_block_sum(in, &out, 1, 1), cudaSuccess);
    cr_assert_eq(out, 1);
}
