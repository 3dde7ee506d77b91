/* blockmgr/pool.h: a pool of ids with reference counts and promises; used for blocks and for score pages, on the device and
 * on the host.
 *
 *   holder    a table or a handle (kvf_block_take, kvf_block_hold). Holders = references - pins.
 *   pin       one end of a pending copy. It keeps the id out of the free list, but it is no holder: the last holder of
 *             a pinned block appends to it in place.
 *   promise   ids that a table may still take without asking. A count, not ids.
 *   cached    an id that a node of the prefix cache names (cache.h). That is no reference: one without any is idle, neither
 *             free nor held, and is handed out when the free stack is too short.
 *   spare     ids that may be had and are promised to nobody: n_free + n_idle - n_promised.
 *
 *       free_ids  [ 7 | 3 | 9 | 0 | . . . . . ]    a stack, so taking and freeing are O(1)
 *                                 ^ n_free
 *       states    [ one byte per id: all that a life in one table's row ever touches; kvf__state ]
 *       heads     [ generation, alone ]                  per id, one word: all that a handle alone touches
 *       entries   [ refs pins holds copy_src scratch ]   per id, the rest
 */
#ifndef KVF_BLOCKMGR_POOL_H
#define KVF_BLOCKMGR_POOL_H

#include "base/base.h"
#include "kvfold/blockmgr.h"

/* Most ids live and die in one row. For them the state says it all, their refs, pins and holds are 0 and nobody looks:
 * a byte per id stays in the nearest cache where eight do not. An id that one handle alone holds is known by its head. */
enum {
    KVF__APART,   /* in no row: free, or one reference, a hold (KVF__ALONE in its head); not cached */
    KVF__IDLE,    /* no reference, but cached */
    KVF__ROW,     /* one reference: an appearance in a table or fresh row; not cached */
    KVF__CACHED,  /* one reference: an appearance in a row; cached */
    KVF__COUNTED, /* refs, pins and holds count: all that is none of the above, cached or not */
};

/* A head is generation << 1, which rises with the release of the last hold, so that older handles are stale; with KVF__ALONE
 * while one hold is the id's only reference, and it is not cached. A handle is head | KVF__ALONE over the id. So the release of
 * one compares a word and adds 1 to it. */
#define KVF__ALONE 1u

typedef struct kvf__entry {
    uint32_t refs;
    uint32_t pins;
    uint32_t holds;    /* handles given out and not released */
    uint32_t copy_src; /* the pending copy into this id reads that one; KVF_NO_BLOCK: none is pending; of the other tier
                        * with KVF__OTHER_TIER */
    uint32_t scratch;  /* counts within one call */
} kvf__entry;

#define KVF__OTHER_TIER (1u << 31) /* ids are below it, and below 2^31 - 1 where there is a host tier */

struct kvf__cache;

/* Invariant: n_promised <= n_free + n_idle <= n; n_promised is the sum over the tables; n_shared counts ids with two or
 * more holders, n_idle cached ones without references. Of a counted id, refs = appearances in tables and fresh rows + holds
 * + pins, and that is two or more or a pin, or the hold of a cached id; of another, refs = pins = holds = 0. pins = (copy_src is
 * set) + pending copies that read this id; scratch = 0 between calls. */
typedef struct kvf__pool {
    uint32_t first; /* its ids are [first, first + n) */
    uint32_t n, n_free, n_promised, n_shared, n_idle;
    uint32_t n_least; /* fewest that were free or idle */
    uint32_t *free_ids;
    /* By id. Pools of one kind share these arrays, so that any of them tells of any id; who changes what an id is must name its own
     * pool, which has the counts. */
    uint8_t *states;
    uint32_t *heads;
    kvf__entry *entries;
    struct kvf__cache *cache; /* NULL: nothing is ever cached */
    uint32_t *nodes;          /* (id) the node that names it, KVF_NO_BLOCK: not cached; NULL without a cache */
} kvf__pool;

/* Where an id's state lies: among its 4,096 neighbours, with the next 6 bits of the id mixed into the number of the cache
 * line. Sequences that grow in step have ids a power of two apart, which would share few of the cache's sets. */
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
/* Of several of one kind, that of an id which one of them has. */
static inline kvf__pool *kvf__pool_of(kvf__pool *pools, uint32_t id) {
    while (!kvf__pool_has(pools, id)) pools++;
    return pools;
}

/* Lays the pool out in a slab. */
void kvf__pool_carve(kvf__pool *p, kvf__slab *slab, uint32_t n);
/* All ids free, the first on top. Generations start at a number of the manager's, so that handles of another are stale. */
void kvf__pool_init(kvf__pool *p, uint32_t generation);

/* Evicts from the cache until n ids of this pool are free; the caller has seen that there are so many, idle ones included. */
void kvf__pool_make_room(kvf__pool *p, uint32_t n);
/* n free ids into a row, one reference each; the caller has seen that there are so many, and sees to the promises. */
void kvf__pool_take(kvf__pool *p, uint32_t *row, uint32_t n);
/* The same inside a loop over rows: from below `top` of the free stack. */
void kvf__pool_take_run(const uint32_t *top, uint8_t *states, uint32_t *row, uint32_t n);
/* One holder more. */
void kvf__pool_share(kvf__pool *p, uint32_t id);
/* An appearance less; true when it was the last: the id fell free or became idle. */
bool kvf__pool_drop(kvf__pool *p, uint32_t id);
/* Drops the tail of a row of n ids down to n_new; returns how many fell free or became idle. is_private: all are in state
 * ROW. */
uint32_t kvf__pool_trim(kvf__pool *p, uint32_t *row, uint32_t n, uint32_t n_new, bool is_private);

/* One hold more on an id that has a holder; one less on a counted id. */
void kvf__pool_hold(kvf__pool *p, uint32_t id);
void kvf__pool_release(kvf__pool *p, uint32_t id);

/* What a handle that is given out now says. */
static inline uint64_t kvf__pool_handle(const kvf__pool *p, uint32_t id) {
    return (uint64_t)(p->heads[id] | KVF__ALONE) << 32 | id;
}

/* A free id for one hold, its only reference, by its handle; and back: false when that is not what the handle is. */
static inline uint64_t kvf__pool_take_held(kvf__pool *p) {
    uint32_t id = p->free_ids[--p->n_free], head = p->heads[id] | KVF__ALONE;
    p->heads[id] = head;
    kvf__pool_note_held(p);
    return (uint64_t)head << 32 | id;
}
static inline bool kvf__pool_release_held(kvf__pool *p, uint64_t handle) {
    uint32_t id = (uint32_t)handle, head = (uint32_t)(handle >> 32);
    if (!kvf__pool_has(p, id) || p->heads[id] != head || !(head & KVF__ALONE)) return false;
    p->heads[id] = head + 1;
    p->free_ids[p->n_free++] = id;
    return true;
}

/* A pending copy, from one pool into the same or that of the other tier, pins both ends until it is done. At most one is
 * pending per dst, since dst is always fresh. The caller sees to n_idle when src is an idle id. */
void kvf__pool_pin(kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst);
bool kvf__pool_copy_pending(const kvf__pool *from, uint32_t src, const kvf__pool *to, uint32_t dst);
/* Between these, a copy counts as done. */
void kvf__pool_copy_unset(kvf__pool *to, uint32_t dst);
void kvf__pool_copy_set(const kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst);
void kvf__pool_unpin(kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst);

/* A node takes ids that somebody holds. It lets one go: 1 when the id was idle and falls free, else 0. */
void kvf__pool_cache(kvf__pool *p, const uint32_t *ids, uint32_t n, uint32_t node);
/* Likewise of ids that are all in state ROW. */
void kvf__pool_cache_rows(kvf__pool *p, const uint32_t *ids, uint32_t n, uint32_t node);
uint32_t kvf__pool_uncache(kvf__pool *p, uint32_t id);
/* One holder more of a cached id, which may be idle; the caller sees to n_idle and n_least. */
static inline void kvf__pool_attach(kvf__pool *p, uint32_t id) {
    uint8_t *state = kvf__state(p, id);
    if (*state != KVF__IDLE) kvf__pool_share(p, id);
    if (*state == KVF__IDLE) *state = KVF__CACHED;
}
/* Likewise of ids that are all idle. */
void kvf__pool_attach_idle(kvf__pool *p, const uint32_t *ids, uint32_t n);

/* ---- Promises: a number of the table's; the pool keeps the sum ---------------------------------------------- */

/* What is still to come of a reservation when so many ids are held. */
static inline uint32_t kvf__promise_owed(uint32_t reserve, uint32_t held) {
    return reserve > held ? reserve - held : 0;
}
/* A taking of n uses the promise up first. */
static inline void kvf__promise_use(kvf__pool *p, uint32_t *promise, uint32_t n) {
    uint32_t used = KVF__MIN(*promise, n);
    *promise -= used;
    p->n_promised -= used;
}
/* Raises a promise towards owed, by at most limit; the caller has seen that limit <= spare. */
static inline void kvf__promise_raise(kvf__pool *p, uint32_t *promise, uint32_t owed, uint32_t limit) {
    uint32_t more = KVF__MIN(kvf__promise_owed(owed, *promise), limit);
    *promise += more;
    p->n_promised += more;
}
/* The caller has seen that the pool can bear it. */
static inline void kvf__promise_set(kvf__pool *p, uint32_t *promise, uint32_t count) {
    p->n_promised = p->n_promised - *promise + count;
    *promise = count;
}

#endif
