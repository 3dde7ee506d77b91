/* blockmgr/cache.h: the nodes of the prefix cache, their order of eviction, and the snapshots tied to them.
 *
 * Glossary, beyond kvfold/prefix.h
 *   root         a node without parent: a prompt's first block. The salt stands here.
 *   end          the tokens up to a node's last: depth * block_size + n_tokens.
 *   here         a node with blocks on the device; on the host: with a copy there; on the host alone: not here.
 *   order        the nodes with an idle block here, the next to go first: a list (LRU without a host tier) or a heap.
 *   host order   likewise those with an idle block on the host. A copy that nobody needs as long as its node is in use
 *                here goes before all others.
 *   bare         the nodes that are idle here in all their blocks and have no copy: what kvf_prefix_offload takes from.
 *   parked       a node whose blocks are pinned by its copy to the host and were idle before: it keeps its place in the order.
 *   chosen, hint the node that eviction is at work on and the descendant it has come to: so that a chain whose head is
 *                chosen goes in time O(chain) and not O(chain^2).
 *   handle       generation << 32 | index, for matches and sequences; stale once the node has gone or grown.
 *
 * Links are node indices, KVF__NO_NODE where there is none. Siblings form two rings, those here and those on the host alone,
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
    KVF__DEADLINES, /* by until; all others by the order of eviction */
    KVF__HOST_ORDER,
    KVF__BARE,
    KVF__N_HEAPS
} kvf__heap_kind;

/* Invariant of a live node: it is here or on the host or both, and its blocks' entries name it; its parent is a whole node
 * one level up, and is here when it is; a partial node has no child; no other node has the same parent, tokens, extras and
 * salt; n_idle counts its blocks here without references, n_host_idle those on the host, and it is in the order of each
 * exactly when that is not 0; it is bare exactly when it is here alone and all its blocks are idle. n_tokens = 0: not
 * live. */
typedef struct kvf__node {
    /* What a walk reads, in one cache line. */
    kvf__hash hash;   /* of the parent's hash, the tokens and the extras */
    kvf__hash extras; /* of the extras in this block; 0 without */
    uint32_t parent, bucket_next;
    uint32_t n_tokens, depth;
    uint32_t generation; /* 1.., rises when the node goes or grows */
    uint32_t n_idle;
    uint32_t n_pages; /* of its snapshot */
    uint32_t tiers;   /* KVF__HERE, KVF__ON_HOST */
    /* The rest. */
    uint64_t stamp; /* rises: since when it is idle; FIFO: when it was stored */
    uint64_t until; /* when its priority ends */
    uint32_t next, prev;
    uint32_t child[2];               /* here; on the host alone */
    uint32_t order_prev, order_next; /* of the list */
    uint32_t place[KVF__N_HEAPS];    /* in each heap; KVF__NO_NODE: in none */
    uint32_t n_host_idle;
    uint32_t hits, priority;
    uint32_t page; /* its snapshot's first, the others by page_next */
    uint32_t snapshot_prev, snapshot_next;
    uint32_t salt_bytes;
    bool keep_long, whole_only, parked;
} kvf__node;

typedef struct kvf__heap {
    uint32_t *nodes;
    uint32_t n;
    kvf__heap_kind kind;
} kvf__heap;

typedef struct kvf__descent {
    uint32_t chosen, hint;
} kvf__descent;

/* Invariant: the oldest first; n_pages is the sum over them. */
typedef struct kvf__snapshot_list {
    uint32_t first, last, n_pages;
} kvf__snapshot_list;

/* Why a block is not cached any more. */
typedef enum kvf__gone_why {
    KVF__GONE_EVICTED, /* its memory was needed, and it fell free by that */
    KVF__GONE_ADOPTED, /* its node took over a sequence's block in its place */
    KVF__GONE_REMOVED  /* all else: dropped, cleared, about to be written */
} kvf__gone_why;

typedef struct kvf__cache {
    bool on, zero_hash;                           /* zero_hash: the tests' hook, every hash is 0 */
    bool listed;                                  /* the order is a list */
    kvf__pool *blocks, *host;                     /* [n_classes]; host NULL: no host tier */
    uint32_t *table_class;                        /* [n_tables]; NULL: all of the first */
    uint32_t class_tables[KVF_BLOCK_CLASSES_MAX]; /* how many of a node's blocks are of each */
    uint32_t n_max, n_nodes, n_tables, block_size;
    uint32_t n_here, n_on_host; /* nodes; those on both tiers count in both */
    uint32_t bucket_mask;
    kvf_prefix_eviction eviction;
    uint64_t seed, clock, now;     /* clock: stamps; now: kvf_prefix_tick */
    uint32_t *node_of;             /* (block), as the pool's nodes */
    kvf__node *nodes;              /* [n_max] */
    uint32_t *node_blocks;         /* (node, table) */
    uint32_t *host_node_of;        /* (host block) */
    uint32_t *host_blocks;         /* (node, table) */
    uint32_t *node_tokens;         /* (node, block_size) */
    unsigned char *salts;          /* (node, KVF_PREFIX_SALT_MAX) */
    uint32_t *buckets;             /* [bucket_mask + 1] */
    uint32_t *free_nodes;          /* [n_max]; n_max - n_nodes are on it */
    uint32_t *chain;               /* [blocks of max_slots]: the nodes of one match, within a call */
    uint32_t *ids;                 /* [n_tables]: the blocks of one position, within a call */
    uint32_t root[2], first, last; /* root: as a node's children */
    kvf__descent descent, host_descent;
    kvf__heap order, deadlines, host_order, bare;
    kvf__pool pages;     /* of snapshots */
    uint32_t *page_next; /* [pages.n] */
    kvf__snapshot_list snapshots[2];
    bool evicting; /* what is taken out now makes room */
    /* Told of blocks that are not cached any more, where the manager keeps a profile; or NULL. */
    void (*gone)(void *ctx, uint32_t id, kvf__gone_why why, bool fell_free);
    void *gone_ctx;
    kvf_prefix_stats stats; /* the counters; figures of now are filled in by kvf_prefix_stats_read */
} kvf__cache;

void kvf__cache_carve(kvf__cache *c, kvf__slab *slab, const kvf_manager_config *config, uint32_t n_tables);
/* host: the host's pools, of no blocks without a host tier. */
void kvf__cache_init(kvf__cache *c, kvf__pool *blocks, kvf__pool *host, const kvf_manager_config *config,
                     uint64_t seed);

/* That of a node's k-th block. */
static inline kvf__pool *kvf__cache_pool(const kvf__cache *c, uint32_t k) {
    return c->table_class ? &c->blocks[c->table_class[k]] : c->blocks;
}

/* Likewise of a tier's pools. */
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
/* The node of a handle, KVF__NO_NODE when it has gone. */
static inline uint32_t kvf__node_of(const kvf__cache *c, uint64_t handle) {
    uint32_t node = (uint32_t)(handle & UINT32_MAX);
    bool live = node < c->n_max && c->nodes[node].n_tokens && c->nodes[node].generation == handle >> 32;
    return live ? node : KVF__NO_NODE;
}
/* How many slots of a block its node covers; 0: not cached. */
static inline uint32_t kvf__cache_covers(const kvf__cache *c, uint32_t id) {
    uint32_t node = c->blocks->nodes[id];
    return node == KVF__NO_NODE ? 0 : c->nodes[node].n_tokens;
}

/* ---- Nodes (cache.c) ------------------------------------------------------------------------------------- */

/* A new node over blocks that somebody holds and no node has; w stands at its parent and has hashed its block. rows: all of
 * them are in state ROW. */
struct kvf__walk;
uint32_t kvf__node_add(kvf__cache *c, const struct kvf__walk *w, const uint32_t *blocks, bool rows);
/* A partial node without snapshot becomes that of the longer content; the same blocks, or others of that content. */
void kvf__node_grow(kvf__cache *c, uint32_t node, const struct kvf__walk *w, const uint32_t *blocks);
/* The node takes other blocks of the same content; its own fall free or are only not found any more. */
void kvf__node_rebase(kvf__cache *c, uint32_t node, const uint32_t *blocks);
/* Takes a childless node out. */
void kvf__node_remove(kvf__cache *c, uint32_t node);
/* Takes a node and all that follows on it out, the tails first; returns how many nodes that were. */
uint32_t kvf__node_remove_all(kvf__cache *c, uint32_t node);
/* Nobody refers to one of the node's blocks in this pool any more. */
void kvf__cache_idle(kvf__cache *c, const kvf__pool *p, uint32_t node);
/* A sequence has taken all blocks of the node. */
void kvf__node_attached(kvf__cache *c, uint32_t node);

/* ---- The two tiers (cache.c) --------------------------------------------------------------------------------- */

/* A node on the host alone gets blocks here, that somebody holds and no node has. Its parent is here. */
void kvf__node_enter(kvf__cache *c, uint32_t node, const uint32_t *blocks);
/* A node on the host too leaves the device; no child of it is here. */
void kvf__node_leave(kvf__cache *c, uint32_t node);
/* A node here gets a copy, in blocks of the host that somebody holds or pins. */
void kvf__node_copied(kvf__cache *c, uint32_t node, const uint32_t *host_blocks);
/* A node here loses its copy, when it has one. */
void kvf__node_uncopied(kvf__cache *c, uint32_t node);
/* Its blocks on the host are about to be pinned: none of them is idle any more. */
void kvf__node_host_pinned(kvf__cache *c, uint32_t node);

/* ---- The order of eviction (evict.c) ------------------------------------------------------------------------ */

void kvf__order_enter(kvf__cache *c, uint32_t node);
void kvf__order_leave(kvf__cache *c, uint32_t node);
/* The node became idle only now: it goes later. */
void kvf__order_touch(kvf__cache *c, uint32_t node);
/* What a node's place in the orders depends on has changed. */
void kvf__order_settle(kvf__cache *c, uint32_t node);
void kvf__heap_enter(kvf__cache *c, kvf__heap *h, uint32_t node);
void kvf__heap_leave(kvf__cache *c, kvf__heap *h, uint32_t node);
/* Frees at least one block of the pool: the invariant promised <= free + idle says that there is one. */
void kvf__cache_evict(kvf__cache *c, const kvf__pool *p);
/* The node that goes first when the host needs room: its copy, or it and what follows on it. KVF__NO_NODE: none can. */
uint32_t kvf__host_first(const kvf__cache *c);
void kvf__node_set_priority(kvf__cache *c, uint32_t node, uint32_t priority, uint64_t duration);
/* Ends a node's priority, so that nothing of it is left in the heap of deadlines. */
void kvf__node_end_priority(kvf__cache *c, uint32_t node);
void kvf__cache_tick(kvf__cache *c, uint64_t now);
bool kvf__heap_before(const kvf__cache *c, const kvf__heap *h, uint32_t a, uint32_t b);

/* ---- Walking a key (walk.c) ---------------------------------------------------------------------------------- */

/* At `node` (KVF__NO_NODE: before the root), whose end is depth * block_size. The block last hashed follows it. Both hashes lie in
 * a pair and change places with a step: a copy would have the next hash wait for it. */
typedef struct kvf__walk {
    kvf_prefix_key key; /* as read */
    uint32_t node, depth, n_hashed, extra;
    uint32_t turn;
    kvf__hash hashes[2]; /* [turn]: of the node; the other: of the block last hashed */
    kvf__hash extras;
} kvf__walk;
static inline kvf__hash kvf__walk_hashed(const kvf__walk *w) { return w->hashes[w->turn ^ 1]; }

/* Reads and checks a key; the walk stands before the root. */
kvf_status kvf__walk_begin(const kvf__cache *c, const kvf_prefix_key *key, kvf__walk *w, kvf_error *err);
/* Hashes the n_tokens that follow. */
void kvf__walk_hash(const kvf__cache *c, kvf__walk *w, uint32_t n_tokens);
/* The child that holds the block last hashed, or KVF__NO_NODE. */
uint32_t kvf__walk_find(const kvf__cache *c, const kvf__walk *w);
/* Goes on to the child that holds the block last hashed. */
void kvf__walk_step(const kvf__cache *c, kvf__walk *w, uint32_t node);
/* What a node's hash must be. */
kvf__hash kvf__node_hash(const kvf__cache *c, uint32_t node);
/* Goes to a node that the key's first tokens must lead to: false, and w unchanged, when they do not. Of a node that reaches
 * beyond n_tokens the ancestor that does not. */
bool kvf__walk_resume(const kvf__cache *c, kvf__walk *w, uint32_t node, uint32_t n_tokens);
/* Whether the key goes on with the first n_tokens of a node, whose parent the walk is not at, perhaps. */
bool kvf__walk_agrees(const kvf__cache *c, const kvf__walk *w, uint32_t node, uint32_t n_tokens);

/* ---- Snapshots (snapshot.c) ------------------------------------------------------------------------------------ */

/* Gives a node's snapshot up, when it has one. */
void kvf__snapshot_drop(kvf__cache *c, uint32_t node);

#endif
