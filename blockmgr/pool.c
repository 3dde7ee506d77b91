/* The id pool: free stack, reference counts, pins, promises. Every operation is O(1) per id. */
#include "blockmgr/pool.h"

void kvf__pool_carve(kvf__pool *p, kvf__slab *slab, uint32_t n) {
    p->n = n;
    p->free_ids = kvf__slab_take(slab, n, sizeof *p->free_ids);
    p->entries = kvf__slab_take(slab, n, sizeof *p->entries);
}

void kvf__pool_init(kvf__pool *p, uint32_t generation) {
    p->n_free = p->n;
    for (uint32_t i = 0; i < p->n; i++) {
        p->free_ids[i] = p->n - 1 - i;
        p->entries[i] = (kvf__entry){.generation = generation, .copy_src = KVF_NO_BLOCK, .owner = KVF_NO_BLOCK};
    }
}

uint32_t kvf__pool_take(kvf__pool *p, kvf__promise *promise, uint32_t owner) {
    if (promise && promise->promise) {
        promise->promise--;
        p->n_promised--;
    }
    uint32_t id = p->free_ids[--p->n_free];
    p->entries[id].refs = 1;
    p->entries[id].owner = owner;
    p->n_held_max = KVF__MAX(p->n_held_max, p->n - p->n_free);
    return id;
}

/* One reference less, a holder's or a pin's; true when it was the last. */
static bool unref(kvf__pool *p, uint32_t id) {
    kvf__entry *e = &p->entries[id];
    if (--e->refs) return false;
    e->generation++;
    e->owner = KVF_NO_BLOCK;
    p->free_ids[p->n_free++] = id;
    return true;
}

void kvf__pool_share(kvf__pool *p, uint32_t id) {
    p->n_shared += kvf__pool_holders(p, id) == 1;
    p->entries[id].refs++;
}

bool kvf__pool_drop(kvf__pool *p, uint32_t id) {
    p->n_shared -= kvf__pool_holders(p, id) == 2;
    return unref(p, id);
}

uint32_t kvf__pool_trim(kvf__pool *p, uint32_t *row, uint32_t *n, uint32_t n_new) {
    uint32_t freed = 0;
    while (*n > n_new) {
        uint32_t id = row[--*n];
        row[*n] = KVF_NO_BLOCK;
        freed += kvf__pool_drop(p, id);
    }
    return freed;
}

void kvf__pool_pin(kvf__pool *p, uint32_t src, uint32_t dst) {
    p->entries[src].refs++;
    p->entries[src].pins++;
    p->entries[dst].refs++;
    p->entries[dst].pins++;
    p->entries[dst].copy_src = src;
}

bool kvf__pool_copy_pending(const kvf__pool *p, uint32_t src, uint32_t dst) {
    return src < p->n && dst < p->n && p->entries[dst].copy_src == src;
}

void kvf__pool_unpin(kvf__pool *p, uint32_t src, uint32_t dst) {
    p->entries[dst].copy_src = KVF_NO_BLOCK;
    p->entries[src].pins--;
    p->entries[dst].pins--;
    (void)unref(p, src);
    (void)unref(p, dst);
}

void kvf__promise_raise(kvf__pool *p, kvf__promise *promise, uint32_t owed, uint32_t limit) {
    if (owed <= promise->promise) return;
    uint32_t more = KVF__MIN(owed - promise->promise, limit);
    promise->promise += more;
    p->n_promised += more;
}

void kvf__promise_set(kvf__pool *p, kvf__promise *promise, uint32_t reserve, uint32_t count) {
    p->n_promised = p->n_promised - promise->promise + count;
    *promise = (kvf__promise){reserve, count};
}
