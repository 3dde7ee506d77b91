/* tests/fake_device.h: a device on whose streams nothing moves before an event is asked or waited for. Operations then run in the
 * order of the stream, the rows of one operation in random order. It sees when somebody changes what it has yet to read, or touches
 * what it has yet to write, and can fail at any call. */
#ifndef KVF_TESTS_FAKE_DEVICE_H
#define KVF_TESTS_FAKE_DEVICE_H

#include <stdlib.h>

#include "base/copy_index.h"
#include "tests/gguf_writer.h"

struct fake_row {
    unsigned char *dst, *then; /* then: what src held when it was given; NULL: not known, an earlier row writes it */
    const unsigned char *src;
    size_t bytes;
    uint64_t op;
};

struct fake_wait { /* before operation `op`: until operation `until` of another stream is done */
    uint64_t op, until;
    kvf_stream *stream;
};

struct fake_device {
    uint64_t rng;
    int64_t fail_after; /* calls, that one fails; below 0: none will */
    const char *failed; /* the call that did */
    uint64_t n_alive, n_calls, n_ops, n_asked, n_found_done;
    void (*meanwhile)(void *ctx); /* what happens before an event is asked for, while nothing has moved; or NULL */
    void *meanwhile_ctx;
    uint64_t n_changed, n_touched; /* sources changed, destinations touched before they were written: must be 0 */
};

struct kvf_stream {
    const kvf_device *device; /* first, as in every stream */
    struct fake_device *f;
    uint64_t n_ops;
    struct fake_row *rows;                  /* [first, n_rows) are still to run, in the order of their operations */
    size_t first, op_end, n_rows, capacity; /* [first, op_end): of the first operation */
    struct fake_wait waits[16];
    uint32_t n_waits;
};

struct kvf_device_event {
    kvf_stream *stream;
    uint64_t op;
};

static inline kvf_status fake_call(struct fake_device *f, const char *name, kvf_error *err) {
    f->n_calls++;
    if (f->fail_after < 0 || f->fail_after-- > 0) return KVF_OK;
    f->failed = name;
    return kvf__fail(err, KVF_E_DEVICE, "%s has failed", name);
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

static inline kvf_status fake_stream_create(void *ctx, const kvf_allocator *allocator, kvf_stream **out,
                                            kvf_error *err) {
    (void)allocator;
    static const kvf_device fake = {.struct_size = sizeof fake, .name = "fake"};
    kvf_status st = fake_call(ctx, "stream_create", err);
    if (st) return st;
    kvf_stream *s = calloc(1, sizeof *s);
    if (!s) return KVF_E_NO_MEMORY;
    s->device = &fake;
    s->f = ctx;
    s->f->n_alive++;
    *out = s;
    return KVF_OK;
}

static inline void fake_run_to(kvf_stream *s, uint64_t op);

/* A row at random of the first operation. */
static inline void fake_run_one(kvf_stream *s) {
    uint64_t op = s->rows[s->first].op;
    if (s->op_end <= s->first) s->op_end = s->first + 1;
    while (s->op_end < s->n_rows && s->rows[s->op_end].op == op) s->op_end++;
    for (uint32_t i = 0; i < s->n_waits; i++)
        if (s->waits[i].op < op) {
            const struct fake_wait w = s->waits[i];
            s->waits[i--] = s->waits[--s->n_waits];
            fake_run_to(w.stream, w.until);
        }
    size_t at = s->first + gw_random(&s->f->rng) % (s->op_end - s->first);
    struct fake_row r = s->rows[at];
    s->rows[at] = s->rows[s->first++];
    if (s->first == s->n_rows) s->first = s->op_end = s->n_rows = 0;
    s->f->n_changed += r.then && memcmp(r.src, r.then, r.bytes) != 0;
    for (size_t i = 0; i < r.bytes; i++) s->f->n_touched += r.then && r.dst[i] != 0xff;
    memcpy(r.dst, r.src, r.bytes);
    free(r.then);
}

static inline void fake_run_to(kvf_stream *s, uint64_t op) {
    while (s->n_rows && s->rows[s->first].op <= op) fake_run_one(s);
}

static inline void fake_stream_destroy(void *ctx, kvf_stream *s) {
    fake_run_to(s, UINT64_MAX);
    free(s->rows);
    free(s);
    ((struct fake_device *)ctx)->n_alive--;
}

/* Whether an earlier operation is to write some of these bytes. */
static inline bool fake_is_pending(const kvf_stream *s, const unsigned char *p, size_t bytes) {
    for (size_t i = s->first; i < s->n_rows && s->rows[i].op != s->n_ops; i++)
        if (p < s->rows[i].dst + s->rows[i].bytes && s->rows[i].dst < p + bytes) return true;
    return false;
}

/* What is there now and what it is to become differ: who reads it early finds NaN. A row that goes on from an earlier one is not
 * watched. */
static inline bool fake_add_row(kvf_stream *s, void *dst, const void *src, size_t bytes) {
    if (!bytes) return true;
    if (s->n_rows == s->capacity) {
        size_t capacity = s->capacity ? 2 * s->capacity : 256;
        struct fake_row *rows = realloc(s->rows, capacity * sizeof *rows);
        if (!rows) return false;
        s->rows = rows;
        s->capacity = capacity;
    }
    struct fake_row r = {.dst = dst, .src = src, .bytes = bytes, .op = s->n_ops};
    if (!s->n_waits && !fake_is_pending(s, src, bytes) && !fake_is_pending(s, dst, bytes)) {
        if (!(r.then = malloc(bytes))) return false;
        memcpy(r.then, src, bytes);
        memset(dst, 0xff, bytes);
    }
    s->rows[s->n_rows++] = r;
    return true;
}

static inline void fake_begin(kvf_stream *s) {
    s->n_ops++;
    s->f->n_ops++;
}

static inline kvf_status fake_copy(void *ctx, kvf_stream *s, void *dst, const void *src, size_t bytes, kvf_error *err) {
    kvf_status st = fake_call(ctx, "copy", err);
    if (st || !s) return st ? st : kvf_device_cpu()->copy(NULL, NULL, dst, src, bytes, err);
    fake_begin(s);
    return fake_add_row(s, dst, src, bytes) ? KVF_OK : KVF_E_NO_MEMORY;
}

/* At once, after all that waits. */
static inline kvf_status fake_fill(void *ctx, kvf_stream *s, void *dst, int byte, size_t bytes, kvf_error *err) {
    kvf_status st = fake_call(ctx, "fill", err);
    if (!st && s) fake_run_to(s, UINT64_MAX);
    return st ? st : kvf_device_cpu()->fill(NULL, NULL, dst, byte, bytes, err);
}

static inline kvf_status fake_copy_blocks(void *ctx, kvf_stream *s, const kvf_block_copies *c, kvf_error *err) {
    kvf_status st = fake_call(ctx, "copy_blocks", err);
    if (st || !s) return st ? st : kvf_device_cpu()->copy_blocks(NULL, NULL, c, err);
    fake_begin(s);
    for (uint32_t i = 0; i < c->n_items; i++) {
        uint32_t kind = c->items[i].kind;
        for (int k = kvf__copy_first_plane(kind); k < kvf__copy_end_plane(kind); k++) {
            const kvf_copy_plane *p = &c->planes[k];
            if (!p->base[kvf__copy_from(kind)]) continue;
            unsigned char *dst = kvf__copy_at(p, kvf__copy_to(kind), c->items[i].dst);
            const unsigned char *src = kvf__copy_at(p, kvf__copy_from(kind), c->items[i].src);
            for (uint32_t row = 0; row < p->n_rows; row++, dst += p->row_bytes, src += p->row_bytes)
                if (!fake_add_row(s, dst, src, (size_t)c->items[i].n_slots * p->slot_bytes)) return KVF_E_NO_MEMORY;
        }
    }
    return KVF_OK;
}

static inline kvf_status fake_stream_wait(void *ctx, kvf_stream *s, kvf_device_event *event, kvf_error *err) {
    kvf_status st = fake_call(ctx, "stream_wait", err);
    if (st) return st;
    if (s->n_waits == 16) return KVF_E_LIMIT;
    s->waits[s->n_waits++] = (struct fake_wait){s->n_ops, event->op, event->stream};
    return KVF_OK;
}

static inline kvf_status fake_event_create(void *ctx, kvf_stream *s, kvf_device_event **out, kvf_error *err) {
    kvf_status st = fake_call(ctx, "event_create", err);
    if (st) return st;
    kvf_device_event *event = calloc(1, sizeof *event);
    if (!event) return KVF_E_NO_MEMORY;
    event->stream = s;
    s->f->n_alive++;
    *out = event;
    return KVF_OK;
}

static inline void fake_event_destroy(void *ctx, kvf_device_event *event) {
    free(event);
    ((struct fake_device *)ctx)->n_alive--;
}

static inline kvf_status fake_event_record(void *ctx, kvf_device_event *event, kvf_error *err) {
    kvf_status st = fake_call(ctx, "event_record", err);
    if (!st) event->op = event->stream->n_ops;
    return st;
}

static inline bool fake_is_done(const kvf_device_event *event) {
    return !event->stream->n_rows || event->stream->rows[event->stream->first].op > event->op;
}

/* All that is there, or some of it. */
static inline kvf_status fake_event_query(void *ctx, kvf_device_event *event, int *done, kvf_error *err) {
    kvf_stream *s = event->stream;
    kvf_status st = fake_call(ctx, "event_query", err);
    if (st) return st;
    if (s->f->meanwhile) s->f->meanwhile(s->f->meanwhile_ctx);
    size_t n = gw_random(&s->f->rng) % 4 ? gw_random(&s->f->rng) % (s->n_rows - s->first + 1) : s->n_rows - s->first;
    while (n--) fake_run_one(s);
    *done = fake_is_done(event);
    s->f->n_asked++;
    s->f->n_found_done += *done != 0;
    return KVF_OK;
}

static inline kvf_status fake_event_wait(void *ctx, kvf_device_event *event, kvf_error *err) {
    kvf_status st = fake_call(ctx, "event_wait", err);
    if (!st) fake_run_to(event->stream, event->op);
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
                        .stream_create = fake_stream_create,
                        .stream_destroy = fake_stream_destroy,
                        .stream_wait = fake_stream_wait,
                        .copy = fake_copy,
                        .fill = fake_fill,
                        .copy_blocks = fake_copy_blocks,
                        .event_create = fake_event_create,
                        .event_destroy = fake_event_destroy,
                        .event_record = fake_event_record,
                        .event_query = fake_event_query,
                        .event_wait = fake_event_wait};
}

#endif
