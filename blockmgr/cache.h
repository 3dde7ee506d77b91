/* blockmgr/cache.h: the nodes of the prefix cache, their order of eviction, and their snapshots.
 *
 * Glossary, beyond kvfold/prefix.h
 *   root         a node without a parent: a prompt's first block. It stores the salt.
 *   end          the number of tokens up to and including a node's last: depth * block_size + n_tokens.
 *   here         on the device. A node is here, on the host, or both; it is on the host alone if it is not here.
 *   order        the nodes with an idle block on the device, in order of eviction: a list (LRU without a host tier) or a
 *                heap.
 *   host order   the nodes with an idle block on the host, in order of eviction. Copies of nodes that are in use on the
 *                device come first, because nobody needs them meanwhile.
 *   bare         a node on the device whose blocks are all idle and that has no host copy. kvf_prefix_offload copies such
 *                nodes.
 *   keeps_place  a node that was idle until its copy to the host pinned its blocks. It keeps its place in the order.
 *   chosen, hint the node that eviction has chosen and the descendant that it has reached. The next eviction continues
 *                there, so that evicting a chain whose head is chosen takes O(chain) and not O(chain^2).
 *   handle       generation << 32 | index, for matches and sequences; stale once the node is removed or grows.
 *
 * Links are node indices; KVF__NO_NODE means none. Siblings form two rings, those on the device and those on the host alone,
 * the newest first:
 *
 *     parent.child[0] -> newest -> ... -> oldest -+        roots likewise, from cache.root
 *                          ^----------------------+
 */
#ifndef KVF_BLOCKMGR_CACHE_H
#define KVF_BLOCKMGR_CACHE_H

#include "blockmgr/pool.h"
#include "kvfold/prefix.h"

#define KVF__NO_NODE UINT32_MAX

typedef struct kvf__hash {
    uint64_t low, high;
} kvf__hash;

enum { KVF__HERE = 1, KVF__ON_HOST = 2 };

typedef enum kvf__heap_kind {
    KVF__ORDER,
    KVF__DEADLINES, /* ordered by `until`; the other heaps by the order of eviction */
    KVF__HOST_ORDER,
    KVF__BARE,
    KVF__N_HEAPS
} kvf__heap_kind;

/* Invariant of a live node:
 *   - It is on the device, on the host, or both, and its blocks' entries name it.
 *   - Its parent is a whole node one level up. If the node is on the device, so is its parent.
 *   - A partial node has no child.
 *   - No other node has the same parent, tokens, extras and salt.
 *   - n_idle counts its device blocks without references, n_host_idle its host blocks without references. It is in the
 *     order, or in the host order, exactly if that count is not 0.
 *   - It is in the heap of bare nodes exactly if it is only on the device and all its blocks are idle.
 * n_tokens = 0: not live. */
typedef struct kvf__node {
    /* The fields that a walk reads, in one cache line. */
    kvf__hash hash;   /* of the parent's hash, the tokens and the extras */
    kvf__hash extras; /* of the extras in this block; 0 without */
    uint32_t parent, bucket_next;
    uint32_t n_tokens, depth;
    uint32_t generation; /* 1.., rises when the node is removed or grows */
    uint32_t n_idle;
    uint32_t n_pages; /* pages of its snapshot */
    uint32_t tiers;   /* KVF__HERE, KVF__ON_HOST */
    /* The rest. */
    uint64_t stamp; /* counter value when it became idle; with FIFO, when it was stored */
    uint64_t until; /* when its priority ends */
    uint32_t next, prev;
    uint32_t child[2];               /* the newest child on the device; on the host alone */
    uint32_t order_prev, order_next; /* links of the list */
    uint32_t place[KVF__N_HEAPS];    /* its place in each heap; KVF__NO_NODE: not in it */
    uint32_t n_host_idle;
    uint32_t hits, priority;
    uint32_t page; /* first page of its snapshot; page_next links the others */
    uint32_t snapshot_prev, snapshot_next;
    uint32_t salt_bytes;
    bool keep_long, whole_only, keeps_place;
    uint8_t stats; /* KVF_SNAPSHOT_SUMS, _SQUARES, _LOGPROBS of its snapshot */
} kvf__node;

typedef struct kvf__heap {
    uint32_t *nodes;
    uint32_t n;
    kvf__heap_kind kind;
} kvf__heap;

typedef struct kvf__descent {
    uint32_t chosen, hint;
} kvf__descent;

/* Invariant: the least recently used first; n_pages is the sum over the list. */
typedef struct kvf__snapshot_list {
    uint32_t first, last, n_pages;
} kvf__snapshot_list;

/* Why a block is no longer cached. */
typedef enum kvf__gone_why {
    KVF__GONE_EVICTED, /* a block was needed, and this one became free */
    KVF__GONE_ADOPTED, /* its node took over a sequence's block instead */
    KVF__GONE_REMOVED  /* any other reason: drop, clear, about to be written */
} kvf__gone_why;

typedef struct kvf__cache {
    bool on, zero_hash;                           /* zero_hash: for tests, every hash is 0 */
    bool listed;                                  /* the order is a list, not a heap */
    kvf__pool *blocks, *host;                     /* [n_classes]; host NULL: no host tier */
    uint32_t *table_class;                        /* [n_tables]; NULL: all tables are of the first class */
    uint32_t class_tables[KVF_BLOCK_CLASSES_MAX]; /* how many of a node's blocks are of each class */
    uint32_t n_max, n_nodes, n_tables, block_size;
    uint32_t n_here, n_on_host; /* nodes on the device, on the host; a node on both counts in both */
    uint32_t bucket_mask;
    kvf_prefix_eviction eviction;
    uint64_t seed, clock, now;     /* clock: the last stamp; now: of kvf_prefix_tick */
    uint32_t *node_of;             /* (block), the same array as the pool's `nodes` */
    kvf__node *nodes;              /* [n_max] */
    uint32_t *node_blocks;         /* (node, table) */
    uint32_t *host_node_of;        /* (host block) */
    uint32_t *host_blocks;         /* (node, table) */
    uint32_t *node_tokens;         /* (node, block_size) */
    unsigned char *salts;          /* (node, KVF_PREFIX_SALT_MAX) */
    uint32_t *buckets;             /* [bucket_mask + 1] */
    uint32_t *free_nodes;          /* [n_max]; n_max - n_nodes are on it */
    uint32_t *chain;               /* [blocks of max_slots]: within a call, the nodes of one match */
    uint32_t *ids;                 /* [n_tables]: within a call, the blocks of one position */
    uint32_t root[2], first, last; /* root: the newest root, like a node's child; first, last: of the list */
    kvf__descent descent, host_descent;
    kvf__heap order, deadlines, host_order, bare;
    kvf__pool pages;                 /* pages of snapshots */
    uint32_t *page_next;             /* [pages.n] */
    kvf__snapshot_list snapshots[2]; /* [keep_long] */
    bool evicting;                   /* removals now count as evictions */
    /* Called for each block that is no longer cached, if the manager keeps a profile; or NULL. */
    void (*gone)(void *ctx, uint32_t id, kvf__gone_why why, bool fell_free);
    void *gone_ctx;
    kvf_prefix_stats stats; /* counters; kvf_prefix_stats_read fills in the current figures */
} kvf__cache;

void kvf__cache_carve(kvf__cache *c, kvf__slab *slab, const kvf_manager_config *config, uint32_t n_tables);
/* host: the host's pools; they have no blocks if there is no host tier. */
void kvf__cache_init(kvf__cache *c, kvf__pool *blocks, kvf__pool *host, const kvf_manager_config *config,
                     uint64_t seed);

/* The device pool of a node's k-th block. */
static inline kvf__pool *kvf__cache_pool(const kvf__cache *c, uint32_t k) {
    return c->table_class ? &c->blocks[c->table_class[k]] : c->blocks;
}

/* The pool of a node's k-th block, among the pools of one tier. */
static inline kvf__pool *kvf__pool_at_table(const kvf__cache *c, kvf__pool *pools, uint32_t k) {
    return c->table_class ? &pools[c->table_class[k]] : pools;
}

static inline uint32_t *kvf__node_blocks(const kvf__cache *c, uint32_t node) {
    return c->node_blocks + (size_t)node * c->n_tables;
}
static inline uint32_t *kvf__node_host_blocks(const kvf__cache *c, uint32_t node) {
    return c->host_blocks + (size_t)node * c->n_tables;
}
static inline bool kvf__is_here(const kvf__cache *c, uint32_t node) { return c->nodes[node].tiers & KVF__HERE; }
static inline bool kvf__is_on_host(const kvf__cache *c, uint32_t node) { return c->nodes[node].tiers & KVF__ON_HOST; }
static inline uint32_t *kvf__node_tokens(const kvf__cache *c, uint32_t node) {
    return c->node_tokens + (size_t)node * c->block_size;
}
static inline uint32_t kvf__node_end(const kvf__cache *c, uint32_t node) {
    return c->nodes[node].depth * c->block_size + c->nodes[node].n_tokens;
}
static inline uint64_t kvf__node_handle(const kvf__cache *c, uint32_t node) {
    return (uint64_t)c->nodes[node].generation << 32 | node;
}
/* The node of a handle; KVF__NO_NODE if the handle is stale. */
static inline uint32_t kvf__node_of(const kvf__cache *c, uint64_t handle) {
    uint32_t node = (uint32_t)(handle & UINT32_MAX);
    bool live = node < c->n_max && c->nodes[node].n_tokens && c->nodes[node].generation == handle >> 32;
    return live ? node : KVF__NO_NODE;
}
/* How many slots of a block its node covers; 0 if the block is not cached. */
static inline uint32_t kvf__cache_covers(const kvf__cache *c, uint32_t id) {
    uint32_t node = c->blocks->nodes[id];
    return node == KVF__NO_NODE ? 0 : c->nodes[node].n_tokens;
}

/* ---- Nodes (cache.c) ------------------------------------------------------------------------------------- */

/* Adds a node over blocks that have a holder and no node. w stands at its parent and has hashed its block. rows: all blocks
 * are in state ROW. */
struct kvf__walk;
uint32_t kvf__node_add(kvf__cache *c, const struct kvf__walk *w, const uint32_t *blocks, bool rows);
/* Gives a partial node without a snapshot longer content, in the same blocks or in others. */
void kvf__node_grow(kvf__cache *c, uint32_t node, const struct kvf__walk *w, const uint32_t *blocks);
/* Replaces the node's blocks by others with the same content. Its own are no longer cached; idle ones become free. */
void kvf__node_rebase(kvf__cache *c, uint32_t node, const uint32_t *blocks);
/* Removes a node without children. */
void kvf__node_remove(kvf__cache *c, uint32_t node);
/* Removes a node and all its descendants, the tails first. Returns the number of nodes removed. */
uint32_t kvf__node_remove_all(kvf__cache *c, uint32_t node);
/* Called when one of the node's blocks in this pool has lost its last reference. */
void kvf__cache_idle(kvf__cache *c, const kvf__pool *p, uint32_t node);
/* Called when a sequence has taken all blocks of the node. */
void kvf__node_attached(kvf__cache *c, uint32_t node);

/* ---- The two tiers (cache.c) --------------------------------------------------------------------------------- */

/* Gives device blocks to a node that is on the host alone. The blocks have a holder and no node. Its parent is on the
 * device. */
void kvf__node_enter(kvf__cache *c, uint32_t node, const uint32_t *blocks);
/* Removes a node from the device; it stays on the host. It has no child on the device. */
void kvf__node_leave(kvf__cache *c, uint32_t node);
/* Gives a node on the device a host copy, in host blocks that are held or pinned. */
void kvf__node_copied(kvf__cache *c, uint32_t node, const uint32_t *host_blocks);
/* Removes the host copy of a node on the device, if it has one. */
void kvf__node_uncopied(kvf__cache *c, uint32_t node);
/* Called when the node's host blocks are about to be pinned: none of them is idle after that. */
void kvf__node_host_pinned(kvf__cache *c, uint32_t node);

/* ---- The order of eviction (evict.c) ------------------------------------------------------------------------ */

void kvf__order_enter(kvf__cache *c, uint32_t node);
void kvf__order_leave(kvf__cache *c, uint32_t node);
/* Moves the node to the end of the order, as if it had become idle now. */
void kvf__order_touch(kvf__cache *c, uint32_t node);
/* Restores a node's place in the heaps after its tiers, idle blocks or priority have changed. */
void kvf__order_settle(kvf__cache *c, uint32_t node);
void kvf__heap_enter(kvf__cache *c, kvf__heap *h, uint32_t node);
void kvf__heap_leave(kvf__cache *c, kvf__heap *h, uint32_t node);
/* Evicts nodes until at least one block of the pool is free. The caller has checked that the pool has an idle block. */
void kvf__cache_evict(kvf__cache *c, const kvf__pool *p);
/* The first node of the host order; KVF__NO_NODE if there is none. */
uint32_t kvf__host_first(const kvf__cache *c);
void kvf__node_set_priority(kvf__cache *c, uint32_t node, uint32_t priority, uint64_t duration);
/* Ends a node's priority and removes it from the heap of deadlines. */
void kvf__node_end_priority(kvf__cache *c, uint32_t node);
void kvf__cache_tick(kvf__cache *c, uint64_t now);
bool kvf__heap_before(const kvf__cache *c, const kvf__heap *h, uint32_t a, uint32_t b);

/* ---- Walking a key (walk.c) ---------------------------------------------------------------------------------- */

/* A position in a key. The walk stands at `node` (KVF__NO_NODE: before the root), whose end is depth * block_size. n_hashed
 * tokens after it have been hashed. The two hashes are a pair whose roles swap with each step: copying one over the other
 * would make the next hash wait. */
typedef struct kvf__walk {
    kvf_prefix_key key;                    /* a checked copy of the caller's */
    uint32_t node, depth, n_hashed, extra; /* extra: the first one not yet passed */
    uint32_t turn;
    kvf__hash hashes[2]; /* [turn]: of the node; [turn ^ 1]: of the block last hashed */
    kvf__hash extras;    /* of the extras in the block last hashed */
} kvf__walk;
static inline kvf__hash kvf__walk_hashed(const kvf__walk *w) { return w->hashes[w->turn ^ 1]; }

/* Reads and checks a key; the walk stands before the root. */
kvf_status kvf__walk_begin(const kvf__cache *c, const kvf_prefix_key *key, kvf__walk *w, kvf_error *err);
/* Hashes the next n_tokens. */
void kvf__walk_hash(const kvf__cache *c, kvf__walk *w, uint32_t n_tokens);
/* The child with the content of the block last hashed, or KVF__NO_NODE. */
uint32_t kvf__walk_find(const kvf__cache *c, const kvf__walk *w);
/* Moves the walk to that child. */
void kvf__walk_step(const kvf__cache *c, kvf__walk *w, uint32_t node);
/* Computes a node's hash again, for the audit. */
kvf__hash kvf__node_hash(const kvf__cache *c, uint32_t node);
/* Moves the walk to a node, or to the node's last ancestor that ends at or before n_tokens. False, with w unchanged, if the
 * key does not begin with the node's tokens. */
bool kvf__walk_resume(const kvf__cache *c, kvf__walk *w, uint32_t node, uint32_t n_tokens);
/* Whether the key has, at the node's position, the node's first n_tokens and its extras; at the root also the salt. The walk
 * need not stand at the node's parent. */
bool kvf__walk_agrees(const kvf__cache *c, const kvf__walk *w, uint32_t node, uint32_t n_tokens);

/* ---- Snapshots (snapshot.c) ------------------------------------------------------------------------------------ */

/* KVF_SNAPSHOT_SUMS, _SQUARES and _LOGPROBS in flags; none means SUMS. */
static inline uint32_t kvf__snapshot_stats(uint32_t flags) {
    uint32_t stats = flags & (KVF_SNAPSHOT_SUMS | KVF_SNAPSHOT_SQUARES | KVF_SNAPSHOT_LOGPROBS);
    return stats ? stats : (uint32_t)KVF_SNAPSHOT_SUMS;
}
/* Pages of a snapshot of n_tokens. */
static inline uint32_t kvf__snapshot_pages(uint32_t stats, uint32_t n_tokens, uint32_t block_size) {
    return (uint32_t)__builtin_popcount(stats) * kvf__ceil_div(n_tokens, block_size);
}

/* Drops a node's snapshot, if it has one. */
void kvf__snapshot_drop(kvf__cache *c, uint32_t node);

#endif
