/* libkvfold_cuda: a GPU as a kvf_device. */
#include <cuda_runtime_api.h>

#include "base/base.h"
#include "base/copy_index.h"
#include "base/cuda/module.h"

static const kvf_device gpu;

cudaError_t kvf__cuda_copy_blocks(const kvf_block_copies *copies, cudaStream_t stream);

struct kvf_stream {
    const kvf_device *device; /* first, as in every stream */
    kvf_allocator allocator;
    cudaStream_t stream;
};

struct kvf_device_event {
    kvf_stream *stream;
    cudaEvent_t event;
};

static kvf_status check(cudaError_t e, const char *what, kvf_error *err) {
    if (e == cudaSuccess) return KVF_OK;
    return kvf__fail(err, e == cudaErrorMemoryAllocation ? KVF_E_NO_MEMORY : KVF_E_DEVICE, "%s: %s", what,
                     cudaGetErrorString(e));
}

/* Calls go to the GPU that the calling thread has chosen; ctx is the number of this one. */
static kvf_status choose(const void *ctx, kvf_error *err) {
    return check(cudaSetDevice((int)(uintptr_t)ctx), "cudaSetDevice", err);
}

static cudaStream_t stream_of(const kvf_stream *stream) { return stream ? stream->stream : NULL; }

/* What an operation returns: without a stream it is waited for. */
static kvf_status done(const kvf_stream *stream, cudaError_t e, const char *what, kvf_error *err) {
    if (e == cudaSuccess && !stream) e = cudaStreamSynchronize(NULL);
    return check(e, what, err);
}

static kvf_status gpu_alloc(void *ctx, const kvf_allocator *allocator, kvf_memory kind, size_t bytes, void **out,
                            kvf_error *err) {
    (void)allocator;
    void *p = NULL;
    kvf_status st = choose(ctx, err);
    if (!st && kind == KVF_MEMORY_DEVICE) st = check(cudaMalloc(&p, bytes ? bytes : 1), "device memory", err);
    if (!st && kind == KVF_MEMORY_HOST)
        st = check(cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocPortable | cudaHostAllocMapped), "pinned memory",
                   err);
    if (!st) *out = p;
    return st;
}

static void gpu_free(void *ctx, const kvf_allocator *allocator, kvf_memory kind, void *p, size_t bytes) {
    (void)allocator, (void)bytes;
    if (p && !choose(ctx, NULL)) (void)(kind == KVF_MEMORY_DEVICE ? cudaFree(p) : cudaFreeHost(p));
}

static kvf_status gpu_stream_create(void *ctx, const kvf_allocator *a, kvf_stream **out, kvf_error *err) {
    kvf_status st = choose(ctx, err);
    if (st) return st;
    kvf_stream *s = a->alloc(a->ctx, sizeof *s, 64);
    if (!s) return kvf__fail(err, KVF_E_NO_MEMORY, "stream: %zu bytes could not be allocated", sizeof *s);
    *s = (kvf_stream){.device = &gpu, .allocator = *a};
    st = check(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "stream", err);
    if (st) {
        a->free(a->ctx, s, sizeof *s);
        return st;
    }
    *out = s;
    return KVF_OK;
}

static void gpu_stream_destroy(void *ctx, kvf_stream *s) {
    if (!s) return;
    if (!choose(ctx, NULL)) {
        (void)cudaStreamSynchronize(s->stream);
        (void)cudaStreamDestroy(s->stream);
    }
    kvf_allocator a = s->allocator;
    a.free(a.ctx, s, sizeof *s);
}

static kvf_status gpu_stream_wait(void *ctx, kvf_stream *stream, kvf_device_event *event, kvf_error *err) {
    kvf_status st = choose(ctx, err);
    return st ? st : check(cudaStreamWaitEvent(stream_of(stream), event->event, 0), "stream_wait", err);
}

static kvf_status gpu_copy(void *ctx, kvf_stream *stream, void *dst, const void *src, size_t bytes, kvf_error *err) {
    kvf_status st = choose(ctx, err);
    if (st) return st;
    return done(stream, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream)), "copy", err);
}

static kvf_status gpu_fill(void *ctx, kvf_stream *stream, void *dst, int byte, size_t bytes, kvf_error *err) {
    kvf_status st = choose(ctx, err);
    return st ? st : done(stream, cudaMemsetAsync(dst, byte, bytes, stream_of(stream)), "fill", err);
}

static kvf_status check_planes(const kvf_block_copies *c, kvf_error *err) {
    for (unsigned i = 0; i < KVF_COPY_PLANES; i++)
        for (unsigned m = 0; m < 2; m++) {
            const kvf_copy_plane *p = &c->planes[i];
            if (p->base[m] && ((uintptr_t)p->base[m] % KVF__VECTOR_BYTES || p->block_stride[m] % KVF__VECTOR_BYTES ||
                               p->row_bytes % KVF__VECTOR_BYTES))
                return kvf__fail(err, KVF_E_INVALID,
                                 "plane %u: its base, block stride and rows must be multiples of 16 bytes", i);
        }
    return KVF_OK;
}

/* The items go to the device in the stream, which also frees them. */
static kvf_status gpu_copy_blocks(void *ctx, kvf_stream *stream, const kvf_block_copies *copies, kvf_error *err) {
    kvf_block_copies here = *copies;
    void *items = NULL;
    size_t bytes = copies->n_items * sizeof *copies->items;
    kvf_status st = check_planes(copies, err);
    if (!st) st = choose(ctx, err);
    if (st || !bytes) return st;
    if ((st = check(cudaMallocAsync(&items, bytes, stream_of(stream)), "copy_blocks: its list", err))) return st;
    here.items = items;
    cudaError_t e = cudaMemcpyAsync(items, copies->items, bytes, cudaMemcpyDefault, stream_of(stream));
    if (e == cudaSuccess) e = kvf__cuda_copy_blocks(&here, stream_of(stream));
    cudaError_t freed = cudaFreeAsync(items, stream_of(stream));
    return done(stream, e == cudaSuccess ? freed : e, "copy_blocks", err);
}

static kvf_status gpu_event_create(void *ctx, kvf_stream *stream, kvf_device_event **out, kvf_error *err) {
    const kvf_allocator *a = &stream->allocator;
    kvf_status st = choose(ctx, err);
    if (st) return st;
    kvf_device_event *event = a->alloc(a->ctx, sizeof *event, 64);
    if (!event) return kvf__fail(err, KVF_E_NO_MEMORY, "event: %zu bytes could not be allocated", sizeof *event);
    event->stream = stream;
    st = check(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming), "event", err);
    if (st) {
        a->free(a->ctx, event, sizeof *event);
        return st;
    }
    *out = event;
    return KVF_OK;
}

static void gpu_event_destroy(void *ctx, kvf_device_event *event) {
    if (!event) return;
    if (!choose(ctx, NULL)) (void)cudaEventDestroy(event->event);
    const kvf_allocator a = event->stream->allocator;
    a.free(a.ctx, event, sizeof *event);
}

static kvf_status gpu_event_record(void *ctx, kvf_device_event *event, kvf_error *err) {
    kvf_status st = choose(ctx, err);
    return st ? st : check(cudaEventRecord(event->event, event->stream->stream), "event_record", err);
}

static kvf_status gpu_event_query(void *ctx, kvf_device_event *event, int *is_done, kvf_error *err) {
    kvf_status st = choose(ctx, err);
    if (st) return st;
    cudaError_t e = cudaEventQuery(event->event);
    if (e != cudaSuccess && e != cudaErrorNotReady) return check(e, "event_query", err);
    *is_done = e == cudaSuccess;
    return KVF_OK;
}

static kvf_status gpu_event_wait(void *ctx, kvf_device_event *event, kvf_error *err) {
    kvf_status st = choose(ctx, err);
    return st ? st : check(cudaEventSynchronize(event->event), "event_wait", err);
}

static const kvf_device gpu = {.struct_size = sizeof gpu,
                               .name = "cuda",
                               .alloc = gpu_alloc,
                               .free = gpu_free,
                               .stream_create = gpu_stream_create,
                               .stream_destroy = gpu_stream_destroy,
                               .stream_wait = gpu_stream_wait,
                               .copy = gpu_copy,
                               .fill = gpu_fill,
                               .copy_blocks = gpu_copy_blocks,
                               .event_create = gpu_event_create,
                               .event_destroy = gpu_event_destroy,
                               .event_record = gpu_event_record,
                               .event_query = gpu_event_query,
                               .event_wait = gpu_event_wait};

kvf_status kvf__cuda_device(uint32_t index, kvf_device *out, kvf_error *err) {
    int n = 0; /* without a driver cudaGetDeviceCount leaves it untouched */
    if (out->struct_size != sizeof *out)
        return kvf__fail(err, KVF_E_UNSUPPORTED, "kvf_device of %zu bytes: the module is of another version",
                         out->struct_size);
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n <= 0)
        return kvf__fail(err, KVF_E_UNSUPPORTED, "no CUDA device: %s", e ? cudaGetErrorString(e) : "none is visible");
    if (index >= (uint32_t)n)
        return kvf__fail(err, KVF_E_UNSUPPORTED, "CUDA device %u: there are %d; the first is 0", index, n);
    *out = gpu;
    out->ctx = (void *)(uintptr_t)index;
    return KVF_OK;
}
