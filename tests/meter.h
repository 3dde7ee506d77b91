/* tests/meter.h: an allocator that counts, remembers the largest request, and can fail the n-th. */
#ifndef KVF_TESTS_METER_H
#define KVF_TESTS_METER_H

#include <stdlib.h>

#include "base/base.h"

typedef struct meter {
    size_t n_live, n_calls, fail_at, largest, bytes_live;
} meter;

static inline void *meter_alloc(void *ctx, size_t bytes, size_t align) {
    meter *m = ctx;
    m->n_calls++;
    m->largest = KVF__MAX(m->largest, bytes);
    if (m->n_calls == m->fail_at) return NULL;
    m->n_live++;
    m->bytes_live += bytes;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static inline void meter_free(void *ctx, void *p, size_t bytes) {
    ((meter *)ctx)->n_live--;
    ((meter *)ctx)->bytes_live -= bytes;
    free(p);
}

#endif
