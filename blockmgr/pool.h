/* blockmgr/pool.h: a pool of ids with reference counts and promises. It is used for blocks and for score pages, on the
 * device and on the host.
 *
 *   holder    a table or a handle (kvf_block_take, kvf_block_hold). Holders = references - pins.
 *   pin       a pending copy pins its src and dst. A pin keeps an id from being handed out. It is not a holder: the last
 *             holder of a pinned block appends to it in place.
 *   promise   how many ids a table may still take without a check. A count, not particular ids.
 *   cached    an id that a node of the prefix cache names (cache.h). This is not a reference. A cached id without references
 *             is idle: neither free nor held. It is handed out when the free stack is too short.
 *   spare     ids that are available and not promised: n_free + n_idle - n_promised.
 *
 *       free_ids  [ 7 | 3 | 9 | 0 | . . . . . ]    a stack, so taking and freeing are O(1)
 *                                 ^ n_free
 *       states    [ one byte per id ]                    all that is touched if an id is only ever in one row; kvf__state
 *       heads     [ generation, KVF__ALONE ]             one word per id: all that is touched if only one handle holds it
 *       entries   [ refs pins holds copy_src scratch ]   per id: used in all other cases
 */
#ifndef KVF_BLOCKMGR_POOL_H
#define KVF_BLOCKMGR_POOL_H

#include "base/base.h"
#include "kvfold/blockmgr.h"

/* Most ids are taken into one row and freed from it. Then the state is enough; refs, pins and holds stay 0 and are not read.
 * One byte per id stays in the L1 cache where eight do not. An id held only by one handle is described by its
 * head. */
enum {
    KVF__APART,   /* in no row, not cached: free, or its only reference is a hold (KVF__ALONE in its head) */
    KVF__IDLE,    /* no reference, but cached */
    KVF__ROW,     /* one reference: an appearance in a table or fresh row; not cached */
    KVF__CACHED,  /* one reference: an appearance in a row; cached */
    KVF__COUNTED, /* any other case, cached or not: refs, pins and holds are valid */
};

/* All is 0 at first except the free ids, so that a large pool writes little.
 *
 * A head is generation << 1. The generation rises when the last hold is released, so that older handles are stale. Bit
 * KVF__ALONE is set while one hold is the id's only reference and the id is not cached. The upper word of a handle is
 * (head + the pool's first_head) | KVF__ALONE, the lower one the id. So releasing such a handle compares one word and adds 1 to it. */
#define KVF__ALONE 1u

typedef struct kvf__entry {
    uint32_t refs;
    uint32_t pins;
    uint32_t holds; /* handles given out and not released */
    uint32_t
        copy_src; /* 1 + the source of the pending copy into this id; 0: none. With KVF__OTHER_TIER the source is an id of
                        * the other tier */
    uint32_t scratch; /* a counter within one call */
} kvf__entry;

#define KVF__OTHER_TIER (1u << 31) /* ids are below it, and below 2^31 - 1 where there is a host tier */

struct kvf__cache;

/* Invariant: n_promised <= n_free + n_idle <= n. n_promised is the sum over the tables. n_shared counts ids with two or more
 * holders, n_idle cached ids without references.
 * A counted id has refs = appearances in tables and fresh rows + holds + pins. It has two or more references, or a pin, or is
 * cached and held by a handle. Any other id has refs = pins = holds = 0.
 * pins = (copy_src is set) + pending copies that read this id. scratch = 0 between calls. */
typedef struct kvf__pool {
    uint32_t first; /* its ids are [first, first + n) */
    uint32_t n, n_free, n_promised, n_shared, n_idle;
    uint32_t n_least;    /* lowest n_free + n_idle so far */
    uint32_t first_head; /* even; differs between managers, so that a handle of another one is stale */
    uint32_t *free_ids;
    /* Indexed by id. The pools of all classes share these arrays, so any of them can read the state of any id. Code that
     * changes an id's state must use the id's own pool, which has the counters. */
    uint8_t *states;
    uint32_t *heads;
    kvf__entry *entries;
    struct kvf__cache *cache; /* NULL: nothing is ever cached */
    uint32_t *nodes;          /* (id) the node that names the id, KVF_NO_BLOCK: not cached; NULL without a cache */
} kvf__pool;

/* The place of an id's state in the array. Within groups of 4,096 ids, the next 6 bits of the id are mixed into the number of
 * the cache line. Sequences that grow together have ids that differ by a power of two; without the mixing their states
 * would fall into few sets of the CPU cache. */
#define KVF__STATE_GROUP 4096u
static inline size_t kvf__state_at(uint32_t id) { return id ^ (id >> 6 & 0xfc0u); }
static inline uint8_t *kvf__state(const kvf__pool *p, uint32_t id) { return p->states + kvf__state_at(id); }

static inline uint32_t kvf__pool_spare(const kvf__pool *p) { return p->n_free + p->n_idle - p->n_promised; }
static inline uint32_t kvf__pool_n_held(const kvf__pool *p) { return p->n - p->n_free - p->n_idle; }
static inline void kvf__pool_note_held(kvf__pool *p) {
    if (p->n_free + p->n_idle < p->n_least) p->n_least = p->n_free + p->n_idle;
}
static inline uint32_t kvf__pool_node(const kvf__pool *p, uint32_t id) {
    return p->nodes ? p->nodes[id] : KVF_NO_BLOCK;
}
static inline uint32_t kvf__pool_refs(const kvf__pool *p, uint32_t id) {
    uint32_t state = *kvf__state(p, id);
    return state == KVF__COUNTED ? p->entries[id].refs : state >= KVF__ROW || (p->heads[id] & KVF__ALONE);
}
static inline uint32_t kvf__pool_holders(const kvf__pool *p, uint32_t id) {
    return kvf__pool_refs(p, id) - p->entries[id].pins;
}
static inline uint32_t kvf__pool_holds(const kvf__pool *p, uint32_t id) {
    return p->heads[id] & KVF__ALONE ? 1 : p->entries[id].holds;
}

static inline bool kvf__pool_has(const kvf__pool *p, uint32_t id) { return id - p->first < p->n; }
/* The pool of an id among the pools of all classes. */
static inline kvf__pool *kvf__pool_of(kvf__pool *pools, uint32_t id) {
    while (!kvf__pool_has(pools, id)) pools++;
    return pools;
}

/* Lays the pool out in a slab. */
void kvf__pool_carve(kvf__pool *p, kvf__slab *slab, uint32_t n);
/* Makes all ids free, the first on top. */
void kvf__pool_init(kvf__pool *p, uint32_t generation);

/* Evicts from the cache until n ids of this pool are free. The caller has checked n <= n_free + n_idle. */
void kvf__pool_make_room(kvf__pool *p, uint32_t n);
/* Takes n ids into a row, one reference each. The caller has checked n <= n_free + n_idle, and updates the promises. */
void kvf__pool_take(kvf__pool *p, uint32_t *row, uint32_t n);
/* The same inside a loop over rows: takes the n ids below `top` in the free stack. */
void kvf__pool_take_run(const uint32_t *top, uint8_t *states, uint32_t *row, uint32_t n);
/* Adds a holder. */
void kvf__pool_share(kvf__pool *p, uint32_t id);
/* Removes one appearance in a row. True if it was the last reference: the id is free or idle now. */
bool kvf__pool_drop(kvf__pool *p, uint32_t id);
/* Shortens a row from n ids to n_new. Returns how many ids became free or idle. is_private: all are in state ROW. */
uint32_t kvf__pool_trim(kvf__pool *p, uint32_t *row, uint32_t n, uint32_t n_new, bool is_private);

/* Adds a hold to an id that has a holder; removes a hold from a counted id. */
void kvf__pool_hold(kvf__pool *p, uint32_t id);
void kvf__pool_release(kvf__pool *p, uint32_t id);

/* The handle of an id. */
static inline uint64_t kvf__pool_handle(const kvf__pool *p, uint32_t id) {
    return (uint64_t)((p->heads[id] + p->first_head) | KVF__ALONE) << 32 | id;
}

/* Takes a free id for one hold, its only reference, and returns its handle. kvf__pool_release_held undoes this; it returns
 * false if the handle is stale or its hold is not the id's only reference. */
static inline uint64_t kvf__pool_take_held(kvf__pool *p) {
    uint32_t id = p->free_ids[--p->n_free], head = p->heads[id] | KVF__ALONE;
    p->heads[id] = head;
    kvf__pool_note_held(p);
    return (uint64_t)(head + p->first_head) << 32 | id;
}
static inline bool kvf__pool_release_held(kvf__pool *p, uint64_t handle) {
    uint32_t id = (uint32_t)handle, head = (uint32_t)(handle >> 32) - p->first_head;
    if (!kvf__pool_has(p, id) || p->heads[id] != head || !(head & KVF__ALONE)) return false;
    p->heads[id] = head + 1;
    p->free_ids[p->n_free++] = id;
    return true;
}

/* Pins src and dst of a pending copy, within one pool or between the pools of two tiers. At most one copy is pending per dst,
 * because dst is always fresh. The caller updates n_idle if src is idle. */
void kvf__pool_pin(kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst);
bool kvf__pool_copy_pending(const kvf__pool *from, uint32_t src, const kvf__pool *to, uint32_t dst);
/* Between unset and set the copy counts as done. */
void kvf__pool_copy_unset(kvf__pool *to, uint32_t dst);
void kvf__pool_copy_set(const kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst);
void kvf__pool_unpin(kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst);

/* Marks ids as cached by a node; each has a holder. */
void kvf__pool_cache(kvf__pool *p, const uint32_t *ids, uint32_t n, uint32_t node);
/* The same for ids that are all in state ROW. */
void kvf__pool_cache_rows(kvf__pool *p, const uint32_t *ids, uint32_t n, uint32_t node);
/* Ends the caching of an id. Returns 1 if the id was idle and is free now, otherwise 0. */
uint32_t kvf__pool_uncache(kvf__pool *p, uint32_t id);
/* Adds a holder to a cached id, which may be idle. The caller updates n_idle and n_least. */
static inline void kvf__pool_attach(kvf__pool *p, uint32_t id) {
    uint8_t *state = kvf__state(p, id);
    if (*state != KVF__IDLE) kvf__pool_share(p, id);
    if (*state == KVF__IDLE) *state = KVF__CACHED;
}
/* The same for ids that are all idle. */
void kvf__pool_attach_idle(kvf__pool *p, const uint32_t *ids, uint32_t n);

/* ---- Promises: each table has a number; the pool keeps their sum -------------------------------------------- */

/* The promise that a reservation needs if `held` ids are held. */
static inline uint32_t kvf__promise_owed(uint32_t reserve, uint32_t held) {
    return reserve > held ? reserve - held : 0;
}
/* Lowers the promise after n ids were taken. */
static inline void kvf__promise_use(kvf__pool *p, uint32_t *promise, uint32_t n) {
    uint32_t used = KVF__MIN(*promise, n);
    *promise -= used;
    p->n_promised -= used;
}
/* Raises a promise towards `owed`, by at most `limit`. The caller has checked limit <= spare. */
static inline void kvf__promise_raise(kvf__pool *p, uint32_t *promise, uint32_t owed, uint32_t limit) {
    uint32_t more = KVF__MIN(kvf__promise_owed(owed, *promise), limit);
    *promise += more;
    p->n_promised += more;
}
/* Sets a promise. The caller has checked that the pool has enough ids. */
static inline void kvf__promise_set(kvf__pool *p, uint32_t *promise, uint32_t count) {
    p->n_promised = p->n_promised - *promise + count;
    *promise = count;
}

#endif
