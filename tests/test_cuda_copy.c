/* The CUDA module's device, on the CPU: its copies against kvf_copies_run, in every thread order; and the stand-in that runs it. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/cuda/module.h"
#include "cuda_on_cpu/cuda_on_cpu.h"
#include "cuda_on_cpu/cuda_runtime_api.h"
#include "kvfold/attention.h"

enum { BLOCKS = 12, MAX_COPIES = 6, N = 96 };

cudaError_t selftest_block_sum(const int *in, int *out, unsigned n_blocks, int with_barrier);
cudaError_t selftest_warp_sum(const int *in, int *out, unsigned n_blocks);
cudaError_t selftest_fault(int which);

static uint32_t random_below(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % n;
}

/* Pages of one tier: one area, so that all of it can be compared. */
typedef struct area {
    kvf_pages pages;
    kvf_score_pages scores;
    unsigned char *bytes;
    size_t n_bytes;
} area;

static void area_create(const kvf_device *cuda, area *a, kvf_memory kind, kvf_dtype dtype, const uint32_t shape[3],
                        int side_by_side, int all_metadata) {
    uint32_t block_size = shape[0], heads = shape[1], dim = shape[2];
    a->pages = (kvf_pages){.struct_size = sizeof a->pages,
                           .dtype = dtype,
                           .n_blocks = BLOCKS,
                           .block_size = block_size,
                           .heads_per_group = heads,
                           .head_dim = dim};
    size_t half = (size_t)kvf_pages_block_bytes(&a->pages) / 2, meta = (size_t)BLOCKS * heads * block_size * 4;
    a->n_bytes = BLOCKS * half * 2 + meta * 7;
    kvf_status st = cuda->alloc(cuda->ctx, NULL, kind, a->n_bytes, (void **)&a->bytes, NULL);
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
    for (uint32_t i = 0; i < n; i++)
        items[i] = (kvf_copy){random_below(seed, KVF_COPY_KINDS), MAX_COPIES + random_below(seed, BLOCKS - MAX_COPIES),
                              i, 1 + random_below(seed, block_size)};
    return n;
}

/* The kernel moves 4-byte slots by fours, so that up to three slots past n_slots, which hold nothing, may differ. */
static void forget_idle_slots(area *tiers, const kvf_copy *c) {
    area *a = &tiers[c->kind == KVF_COPY_BLOCK_OUT || c->kind == KVF_COPY_SCORE_OUT];
    uint32_t bs = a->pages.block_size, end = (c->n_slots + 3) / 4 * 4;
    int block = c->kind == KVF_COPY_BLOCK || c->kind == KVF_COPY_BLOCK_OUT || c->kind == KVF_COPY_BLOCK_IN;
    float *planes[5] = {block ? (float *)(void *)a->pages.pos : a->scores.base, a->pages.key_norm, a->pages.weight,
                        a->pages.bias, a->pages.score};
    uint32_t rows = a->pages.heads_per_group * (block ? 1 : a->scores.n_arrays);
    for (int i = 0; i < (block ? 5 : 1); i++)
        for (uint32_t r = 0; planes[i] && r < rows; r++)
            for (uint32_t s = c->n_slots; s < end; s++) memset(&planes[i][(c->dst * rows + r) * bs + s], 0, 4);
}

static void compare(const kvf_device *cuda, kvf_stream *stream, kvf_device_event *event, area *want, area *have,
                    uint64_t seed) {
    kvf_copy items[MAX_COPIES];
    uint64_t state = seed;
    kvf_copy_list list = {items, random_copies(&state, want->pages.block_size, items), MAX_COPIES};
    kvf_error err = {.text = ""};
    kvf_status st = KVF_OK;
    for (int m = 0; m < 2 && !st; m++) {
        for (size_t i = 0; i < want[m].n_bytes; i++) want[m].bytes[i] = (unsigned char)random_below(&state, 256);
        st = cuda->copy(cuda->ctx, stream, have[m].bytes, want[m].bytes, want[m].n_bytes, &err);
    }
    if (!st)
        st = kvf_copies_queue(cuda, stream, &have->pages, &have->scores, &have[1].pages, &have[1].scores, &list, &err);
    if (!st && stream) st = cuda->event_record(cuda->ctx, event, &err);
    if (!st && stream) st = cuda->event_wait(cuda->ctx, event, &err);
    cr_assert_eq(st, KVF_OK, "seed %llu: %s", (unsigned long long)seed, err.text);
    cr_assert_eq(kvf_copies_run(&want->pages, &want->scores, &want[1].pages, &want[1].scores, &list), KVF_OK);
    for (uint32_t i = 0; i < list.n; i++) {
        forget_idle_slots(want, &items[i]);
        forget_idle_slots(have, &items[i]);
    }
    for (int m = 0; m < 2; m++)
        for (size_t i = 0; i < want[m].n_bytes; i++)
            cr_assert_eq(want[m].bytes[i], have[m].bytes[i], "seed %llu: byte %zu of %zu differs in memory %d",
                         (unsigned long long)seed, i, want[m].n_bytes, m);
}

static kvf_device gpu(void) {
    kvf_device d = {.struct_size = sizeof d};
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf__cuda_device(0, &d, &err), KVF_OK, "%s", err.text);
    return d;
}

Test(cuda, copies_are_those_of_the_host) {
    static const uint32_t shapes[][3] = {
        {8, 1, 8}, {16, 3, 64}, {32, 2, 40}, {256, 1, 64}}; /* block_size, heads, head_dim */
    const kvf_device cuda = gpu();
    kvf_allocator a;
    kvf_stream *stream = NULL;
    kvf_device_event *event = NULL;
    uint64_t seed = 1, before = cuda_on_cpu_n_threads();
    cr_assert_eq(kvf__allocator_resolve(NULL, &a, NULL), KVF_OK);
    cr_assert_eq(cuda.stream_create(cuda.ctx, &a, &stream, NULL), KVF_OK);
    cr_assert_eq(cuda.event_create(cuda.ctx, stream, &event, NULL), KVF_OK);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int variant = 0; variant < 4; variant++) {
            area want[2], have[2];
            kvf_dtype dtype = variant & 1 ? KVF_F32 : variant & 2 ? KVF_BF16 : KVF_F16;
            for (int m = 0; m < 4; m++)
                area_create(&cuda, m / 2 ? &have[m % 2] : &want[m % 2], m % 2 ? KVF_MEMORY_HOST : KVF_MEMORY_DEVICE,
                            dtype, shapes[i], variant & 2, variant != 3);
            for (int order = CUDA_ON_CPU_ASCENDING; order <= CUDA_ON_CPU_RANDOM; order++, seed++) {
                cuda_on_cpu_set_order((cuda_on_cpu_order)order, seed);
                compare(&cuda, seed % 2 ? stream : NULL, event, want, have, seed);
            }
            for (int m = 0; m < 4; m++)
                cuda.free(cuda.ctx, NULL, m % 2 ? KVF_MEMORY_HOST : KVF_MEMORY_DEVICE,
                          (m / 2 ? have : want)[m % 2].bytes, have->n_bytes);
        }
    cr_assert_gt(cuda_on_cpu_n_threads(), before);
    cuda.event_destroy(cuda.ctx, event);
    cuda.stream_destroy(cuda.ctx, stream);
}

/* 48 layers of a swap: one launch, of four blocks of 256 threads for each copy. */
Test(cuda, a_list_is_one_launch) {
    const kvf_device cuda = gpu();
    kvf_copy items[48];
    area a;
    area_create(&cuda, &a, KVF_MEMORY_DEVICE, KVF_F16, (uint32_t[]){8, 1, 8}, 0, 0);
    a.pages.n_blocks = 96;
    for (uint32_t i = 0; i < 48; i++) items[i] = (kvf_copy){KVF_COPY_BLOCK, i % 6 + 6, i % 6, 0}; /* of no slot */
    uint64_t before = cuda_on_cpu_n_threads();
    cr_assert_eq(kvf_copies_run(&a.pages, NULL, NULL, NULL, &(kvf_copy_list){items, 48, 48}), KVF_OK);
    cr_assert_eq(cuda_on_cpu_n_threads(), before, "that was the CPU");
    cr_assert_eq(kvf_copies_queue(&cuda, NULL, &a.pages, NULL, NULL, NULL, &(kvf_copy_list){items, 48, 48}, NULL),
                 KVF_OK);
    cr_assert_eq(cuda_on_cpu_n_threads() - before, 48 * 4 * 256);
    cuda.free(cuda.ctx, NULL, KVF_MEMORY_DEVICE, a.bytes, a.n_bytes);
}

Test(cuda, what_is_refused_changes_nothing) {
    const kvf_device cuda = gpu();
    area a;
    kvf_error err = {.text = ""};
    area_create(&cuda, &a, KVF_MEMORY_DEVICE, KVF_F16, (uint32_t[]){16, 2, 32}, 0, 1);
    cr_assert_eq(cuda.fill(cuda.ctx, NULL, a.bytes, 7, a.n_bytes, NULL), KVF_OK);
    kvf_copy good = {KVF_COPY_BLOCK, 3, 1, 16};
    const kvf_copy_list list = {&good, 1, 1};
    uint64_t before = cuda_on_cpu_n_threads();
    kvf_pages pages = a.pages;
    pages.k = (char *)pages.k + 8;
    cr_assert_eq(kvf_copies_queue(&cuda, NULL, &pages, NULL, NULL, NULL, &list, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "plane 0: its base, block stride and rows must be multiples of 16"), "%s", err.text);
    pages = a.pages;
    pages.v_block_stride += 4;
    cr_assert_eq(kvf_copies_queue(&cuda, NULL, &pages, NULL, NULL, NULL, &list, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "plane 1"), "%s", err.text);
    cr_assert_eq(kvf_copies_queue(&cuda, NULL, &a.pages, NULL, NULL, NULL, &(kvf_copy_list){&good, 0, 1}, NULL),
                 KVF_OK);
    cr_assert_eq(cuda_on_cpu_n_threads(), before);
    cuda.free(cuda.ctx, NULL, KVF_MEMORY_DEVICE, a.bytes, a.n_bytes);
    kvf_device other = {.struct_size = sizeof other};
    cr_assert_eq(kvf__cuda_device(7, &other, &err), KVF_E_UNSUPPORTED);
    cr_assert(strstr(err.text, "CUDA device 7"), "%s", err.text);
    other.struct_size -= 8;
    cr_assert_eq(kvf__cuda_device(0, &other, &err), KVF_E_UNSUPPORTED);
    cr_assert(strstr(err.text, "another version"), "%s", err.text);
}

Test(cuda, a_module_that_is_not_there_is_told) {
    kvf_device device = {.name = NULL};
    void *handle = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf__cuda_open("no-such-module.so", 0, &handle, &device, &err), KVF_E_NOT_FOUND);
    cr_assert(strstr(err.text, "no-such-module.so") && strstr(err.text, "KVF_CUDA=ON"), "%s", err.text);
    cr_assert(!handle && !device.name);
#ifdef KVF_CUDA_MODULE /* the real one, with a device or without */
    kvf_status st = kvf__cuda_open(KVF_CUDA_MODULE, 0, &handle, &device, &err);
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
