/* The CPU as a device. */
#include "base/cpu/stream.h"

static kvf_status cpu_alloc(void *ctx, const kvf_allocator *allocator, kvf_memory kind, size_t bytes, void **out,
                            kvf_error *err) {
    (void)ctx, (void)kind;
    void *p = allocator->alloc(allocator->ctx, bytes ? bytes : 1, KVF__CACHE_LINE);
    if (!p) return kvf__fail(err, KVF_E_NO_MEMORY, "cpu memory: %zu bytes could not be allocated", bytes);
    *out = p;
    return KVF_OK;
}

static void cpu_free(void *ctx, const kvf_allocator *allocator, kvf_memory kind, void *p, size_t bytes) {
    (void)ctx, (void)kind;
    kvf__free(allocator, p, bytes);
}

static kvf_status cpu_stream_create(void *ctx, const kvf_allocator *allocator, kvf_stream **out, kvf_error *err) {
    (void)ctx;
    kvf_stream *s = NULL;
    kvf_status st = kvf_stream_create_cpu(allocator, 1, &s, err);
    if (!st && (st = kvf__queue_create(&s->allocator, &s->queue, err))) kvf_stream_destroy(s);
    if (!st) *out = s;
    return st;
}

static void cpu_stream_destroy(void *ctx, kvf_stream *stream) {
    (void)ctx;
    kvf_stream_destroy(stream);
}

static kvf_status cpu_copy(void *ctx, kvf_stream *stream, void *dst, const void *src, size_t bytes, kvf_error *err) {
    (void)ctx, (void)err;
    kvf__queue_post(stream, &(kvf__op){.kind = KVF__OP_COPY, .dst = dst, .src = src, .bytes = bytes});
    return KVF_OK;
}

static kvf_status cpu_fill(void *ctx, kvf_stream *stream, void *dst, int byte, size_t bytes, kvf_error *err) {
    (void)ctx, (void)err;
    kvf__queue_post(stream, &(kvf__op){.kind = KVF__OP_FILL, .dst = dst, .byte = byte, .bytes = bytes});
    return KVF_OK;
}

static kvf_status cpu_copy_blocks(void *ctx, kvf_stream *stream, const kvf_block_copies *copies, kvf_error *err) {
    (void)ctx, (void)err;
    kvf__queue_post(stream, &(kvf__op){.kind = KVF__OP_BLOCKS, .blocks = *copies});
    return KVF_OK;
}

static kvf_status cpu_stream_wait(void *ctx, kvf_stream *stream, kvf_device_event *event, kvf_error *err) {
    (void)ctx, (void)err;
    if (event->ticket)
        kvf__queue_post(stream, &(kvf__op){.kind = KVF__OP_WAIT, .stream = event->stream, .ticket = event->ticket});
    return KVF_OK;
}

static kvf_status cpu_event_create(void *ctx, kvf_stream *stream, kvf_device_event **out, kvf_error *err) {
    (void)ctx;
    kvf_device_event *event = kvf__alloc(&stream->allocator, sizeof *event);
    if (!event) return kvf__fail(err, KVF_E_NO_MEMORY, "event: %zu bytes could not be allocated", sizeof *event);
    event->stream = stream;
    *out = event;
    return KVF_OK;
}

static void cpu_event_destroy(void *ctx, kvf_device_event *event) {
    (void)ctx;
    if (event) kvf__free(&event->stream->allocator, event, sizeof *event);
}

static kvf_status cpu_event_record(void *ctx, kvf_device_event *event, kvf_error *err) {
    (void)ctx, (void)err;
    event->ticket = event->stream->queue ? event->stream->queue->n_posted : 0;
    return KVF_OK;
}

static kvf_status cpu_event_query(void *ctx, kvf_device_event *event, int *done, kvf_error *err) {
    (void)ctx, (void)err;
    kvf__queue *q = event->ticket ? event->stream->queue : NULL;
    if (q) pthread_mutex_lock(&q->lock);
    *done = !q || q->n_done >= event->ticket;
    if (q) pthread_mutex_unlock(&q->lock);
    return KVF_OK;
}

static kvf_status cpu_event_wait(void *ctx, kvf_device_event *event, kvf_error *err) {
    (void)ctx, (void)err;
    if (event->ticket) kvf__queue_wait(event->stream->queue, event->ticket);
    return KVF_OK;
}

const kvf_device *kvf_device_cpu(void) {
    static const kvf_device cpu = {.struct_size = sizeof cpu,
                                   .name = "cpu",
                                   .cpu_access = 1,
                                   .alloc = cpu_alloc,
                                   .free = cpu_free,
                                   .stream_create = cpu_stream_create,
                                   .stream_destroy = cpu_stream_destroy,
                                   .stream_wait = cpu_stream_wait,
                                   .copy = cpu_copy,
                                   .fill = cpu_fill,
                                   .copy_blocks = cpu_copy_blocks,
                                   .event_create = cpu_event_create,
                                   .event_destroy = cpu_event_destroy,
                                   .event_record = cpu_event_record,
                                   .event_query = cpu_event_query,
                                   .event_wait = cpu_event_wait};
    return &cpu;
}
