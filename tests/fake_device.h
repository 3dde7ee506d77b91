/* tests/fake_device.h: a device on whose queues nothing moves before an event is asked or waited for: rows then run in random
 * order, over all lists. It sees when somebody changes what it has yet to read, or touches what it has yet to write, and
 * can fail at any call. */
#ifndef KVF_TESTS_FAKE_DEVICE_H
#define KVF_TESTS_FAKE_DEVICE_H

#include <stdlib.h>

#include "base/base.h"
#include "tests/gguf_writer.h"

struct fake_row {
    unsigned char *dst, *then; /* then: what src held when the list came */
    const unsigned char *src;
    size_t bytes;
    uint64_t list;
};

struct fake_device {
    uint64_t rng;
    int64_t fail_after; /* calls, that one fails; below 0: none will */
    const char *failed; /* the call that did */
    uint64_t n_alive, n_calls, n_lists, n_asked, n_found_done;
    void (*meanwhile)(void *ctx); /* what happens before an event is asked for, while nothing has moved; or NULL */
    void *meanwhile_ctx;
    uint64_t n_changed, n_touched; /* sources changed, destinations touched before they were written: must be 0 */
};

struct kvf_device_queue {
    struct fake_device *f;
    uint64_t n_lists;
    struct fake_row *rows; /* still to run */
    size_t n_rows, capacity;
};

struct kvf_device_event {
    kvf_device_queue *queue;
    uint64_t list;
};

static inline kvf_status fake_call(struct fake_device *f, const char *name, kvf_error *err) {
    f->n_calls++;
    if (f->fail_after < 0 || f->fail_after-- > 0) return KVF_OK;
    f->failed = name;
    return kvf__fail(err, KVF_E_IO, "%s has failed", name);
}

static inline kvf_status fake_alloc(void *ctx, const kvf_allocator *allocator, kvf_memory kind, size_t bytes,
                                    void **out, kvf_error *err) {
    (void)allocator;
    (void)kind;
    kvf_status st = fake_call(ctx, "alloc", err);
    if (st) return st;
    void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!p) return KVF_E_NO_MEMORY;
    memset(p, 0xff, bytes); /* NaN */
    ((struct fake_device *)ctx)->n_alive++;
    *out = p;
    return KVF_OK;
}

static inline void fake_free(void *ctx, const kvf_allocator *allocator, kvf_memory kind, void *p, size_t bytes) {
    (void)allocator;
    (void)kind;
    if (!p) return;
    memset(p, 0xff, bytes); /* it is all there */
    free(p);
    ((struct fake_device *)ctx)->n_alive--;
}

static inline kvf_status fake_copy(void *ctx, const kvf_device_list *list, kvf_error *err) {
    kvf_status st = fake_call(ctx, "copy", err);
    return st ? st : kvf_device_cpu()->copy(NULL, list, err);
}

static inline kvf_status fake_queue_create(void *ctx, const kvf_allocator *allocator, kvf_device_queue **out,
                                           kvf_error *err) {
    (void)allocator;
    kvf_status st = fake_call(ctx, "queue_create", err);
    if (st) return st;
    kvf_device_queue *q = calloc(1, sizeof *q);
    if (!q) return KVF_E_NO_MEMORY;
    q->f = ctx;
    q->f->n_alive++;
    *out = q;
    return KVF_OK;
}

/* A row at random. */
static inline void fake_run_one(kvf_device_queue *q) {
    size_t at = gw_random(&q->f->rng) % q->n_rows;
    struct fake_row r = q->rows[at];
    q->rows[at] = q->rows[--q->n_rows];
    q->f->n_changed += memcmp(r.src, r.then, r.bytes) != 0;
    for (size_t i = 0; i < r.bytes; i++) q->f->n_touched += r.dst[i] != 0xff;
    memcpy(r.dst, r.src, r.bytes);
    free(r.then);
}

static inline void fake_queue_destroy(void *ctx, kvf_device_queue *q) {
    while (q->n_rows) fake_run_one(q);
    free(q->rows);
    free(q);
    ((struct fake_device *)ctx)->n_alive--;
}

/* What is there now and what it is to become differ: who reads it early finds NaN. */
static inline bool fake_add_row(kvf_device_queue *q, const kvf_device_copy *c, size_t row) {
    if (q->n_rows == q->capacity) {
        size_t capacity = q->capacity ? 2 * q->capacity : 256;
        struct fake_row *rows = realloc(q->rows, capacity * sizeof *rows);
        if (!rows) return false;
        q->rows = rows;
        q->capacity = capacity;
    }
    struct fake_row r = {.dst = (unsigned char *)c->dst + row * c->dst_stride,
                         .then = malloc(c->bytes),
                         .src = (const unsigned char *)c->src + row * c->src_stride,
                         .bytes = c->bytes,
                         .list = q->n_lists};
    if (!r.then) return false;
    memcpy(r.then, r.src, r.bytes);
    memset(r.dst, 0xff, r.bytes);
    q->rows[q->n_rows++] = r;
    return true;
}

static inline kvf_status fake_queue_copy(void *ctx, kvf_device_queue *q, const kvf_device_list *list, kvf_error *err) {
    kvf_device_copy copies[KVF_DEVICE_COPIES];
    kvf_status st = fake_call(ctx, "queue_copy", err);
    if (st) return st;
    q->n_lists++;
    q->f->n_lists++;
    for (uint32_t n; (n = list->next(list->ctx, copies)) != 0;)
        for (uint32_t i = 0; i < n; i++)
            for (size_t row = 0; row < copies[i].n_rows; row++)
                if (!fake_add_row(q, &copies[i], row)) return KVF_E_NO_MEMORY;
    return KVF_OK;
}

static inline kvf_status fake_event_create(void *ctx, kvf_device_queue *q, kvf_device_event **out, kvf_error *err) {
    kvf_status st = fake_call(ctx, "event_create", err);
    if (st) return st;
    kvf_device_event *event = calloc(1, sizeof *event);
    if (!event) return KVF_E_NO_MEMORY;
    event->queue = q;
    q->f->n_alive++;
    *out = event;
    return KVF_OK;
}

static inline void fake_event_destroy(void *ctx, kvf_device_event *event) {
    free(event);
    ((struct fake_device *)ctx)->n_alive--;
}

static inline kvf_status fake_event_record(void *ctx, kvf_device_event *event, kvf_error *err) {
    kvf_status st = fake_call(ctx, "event_record", err);
    if (!st) event->list = event->queue->n_lists;
    return st;
}

static inline bool fake_is_done(const kvf_device_event *event) {
    for (size_t i = 0; i < event->queue->n_rows; i++)
        if (event->queue->rows[i].list <= event->list) return false;
    return true;
}

/* All that is there, or some of it. */
static inline kvf_status fake_event_query(void *ctx, kvf_device_event *event, int *done, kvf_error *err) {
    kvf_device_queue *q = event->queue;
    kvf_status st = fake_call(ctx, "event_query", err);
    if (st) return st;
    if (q->f->meanwhile) q->f->meanwhile(q->f->meanwhile_ctx);
    size_t n = gw_random(&q->f->rng) % 4 ? gw_random(&q->f->rng) % (q->n_rows + 1) : q->n_rows;
    while (n--) fake_run_one(q);
    *done = fake_is_done(event);
    q->f->n_asked++;
    q->f->n_found_done += *done != 0;
    return KVF_OK;
}

static inline kvf_status fake_event_wait(void *ctx, kvf_device_event *event, kvf_error *err) {
    kvf_status st = fake_call(ctx, "event_wait", err);
    while (!st && !fake_is_done(event)) fake_run_one(event->queue);
    return st;
}

static inline kvf_device fake_device(struct fake_device *f) {
    *f = (struct fake_device){.rng = 1, .fail_after = -1};
    return (kvf_device){.struct_size = sizeof(kvf_device),
                        .name = "fake",
                        .ctx = f,
                        .cpu_access = 1,
                        .alloc = fake_alloc,
                        .free = fake_free,
                        .copy = fake_copy,
                        .queue_create = fake_queue_create,
                        .queue_destroy = fake_queue_destroy,
                        .queue_copy = fake_queue_copy,
                        .event_create = fake_event_create,
                        .event_destroy = fake_event_destroy,
                        .event_record = fake_event_record,
                        .event_query = fake_event_query,
                        .event_wait = fake_event_wait};
}

#endif
