/* tests/failing.h: an allocator that fails after so many. */
#ifndef KVF_TESTS_FAILING_H
#define KVF_TESTS_FAILING_H

#include <stdint.h>
#include <stdlib.h>

struct failing {
    int64_t left, alive;
};

static inline void *failing_alloc(void *ctx, size_t bytes, size_t align) {
    struct failing *f = ctx;
    if (f->left-- <= 0) return NULL;
    f->alive++;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static inline void failing_free(void *ctx, void *p, size_t bytes) {
    (void)bytes;
    ((struct failing *)ctx)->alive--;
    free(p);
}

#endif
