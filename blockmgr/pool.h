/* blockmgr/pool.h: a pool of ids with reference counts and promises; used twice, for blocks and for score pages.
 *
 *   holder    a table or a handle (kvf_block_take, kvf_block_hold). Holders = refs - pins.
 *   pin       one end of a pending copy. It keeps the id out of the free list, but it is no holder: the last holder of
 *             a pinned block appends to it in place.
 *   promise   ids that a table may still take without asking. A count, not ids.
 *   spare     free ids that are promised to nobody: n_free - n_promised.
 *
 *       free_ids  [ 7 | 3 | 9 | 0 | . . . . . ]    a stack, so taking and freeing are O(1)
 *                                 ^ n_free
 *       entries   [ refs pins holds generation copy_src owner scratch ] per id
 */
#ifndef KVF_BLOCKMGR_POOL_H
#define KVF_BLOCKMGR_POOL_H

#include "base/base.h"
#include "kvfold/blockmgr.h"

/* Invariant: refs = appearances in tables and fresh rows + holds + pins; pins = (copy_src is set) + pending copies
 * that read this id; refs = 0 exactly when the id is on the free stack; scratch = 0 between calls. */
typedef struct kvf__entry {
    uint32_t refs;
    uint32_t pins;
    uint32_t holds;      /* handles given out and not released */
    uint32_t generation; /* rises whenever the id falls free, so that older handles are stale */
    uint32_t copy_src;   /* the pending copy into this id reads that one; KVF_NO_BLOCK: none is pending */
    uint32_t owner;      /* the table that took it or last found all its blocks private; KVF_NO_BLOCK: none */
    uint32_t scratch;    /* counts within one call */
} kvf__entry;

/* Invariant: n_promised <= n_free <= n; n_promised is the sum over the tables; n_shared counts ids with two or more
 * holders. */
typedef struct kvf__pool {
    uint32_t n, n_free, n_promised, n_held_max, n_shared;
    uint32_t *free_ids;
    kvf__entry *entries;
} kvf__pool;

/* What one table was promised. Invariant: promise <= reserve, in units of the pool. */
typedef struct kvf__promise {
    uint32_t reserve; /* held and promised in all, as kvf_seq_reserve asked */
    uint32_t promise; /* of them still to come */
} kvf__promise;

static inline uint32_t kvf__pool_spare(const kvf__pool *p) { return p->n_free - p->n_promised; }
static inline uint32_t kvf__pool_holders(const kvf__pool *p, uint32_t id) {
    return p->entries[id].refs - p->entries[id].pins;
}

/* Lays the pool out in a slab. */
void kvf__pool_carve(kvf__pool *p, kvf__slab *slab, uint32_t n);
/* All ids free, 0 on top. Generations start at a number of the manager's, so that handles of another are stale. */
void kvf__pool_init(kvf__pool *p, uint32_t generation);

/* A free id with one reference. promise (NULL: none) is used up first; else the caller has seen that spare > 0. */
uint32_t kvf__pool_take(kvf__pool *p, kvf__promise *promise, uint32_t owner);
/* One holder more. */
void kvf__pool_share(kvf__pool *p, uint32_t id);
/* One holder less; true when the id fell free. */
bool kvf__pool_drop(kvf__pool *p, uint32_t id);
/* Drops the tail of a row down to n_new ids; returns how many fell free. */
uint32_t kvf__pool_trim(kvf__pool *p, uint32_t *row, uint32_t *n, uint32_t n_new);

/* A pending copy pins both ends until it is done. At most one is pending per dst, since dst is always fresh. */
void kvf__pool_pin(kvf__pool *p, uint32_t src, uint32_t dst);
bool kvf__pool_copy_pending(const kvf__pool *p, uint32_t src, uint32_t dst);
void kvf__pool_unpin(kvf__pool *p, uint32_t src, uint32_t dst);

/* What is still to come of a reservation when so many ids are held. */
static inline uint32_t kvf__promise_owed(uint32_t reserve, uint32_t held) {
    return reserve > held ? reserve - held : 0;
}
/* Raises a table's promise towards owed, by at most limit; the caller has seen that limit <= spare. */
void kvf__promise_raise(kvf__pool *p, kvf__promise *promise, uint32_t owed, uint32_t limit);
/* Sets both; the caller has seen that the pool can bear it. */
void kvf__promise_set(kvf__pool *p, kvf__promise *promise, uint32_t reserve, uint32_t count);

#endif
