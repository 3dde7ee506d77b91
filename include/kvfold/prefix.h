/* kvfold/prefix.h: the prefix cache: blocks that stay findable by the tokens they hold.
 *
 * Switched on by kvf_manager_config.prefix_cache; off, it takes no memory and its calls are KVF_E_UNSUPPORTED.
 *
 * Nouns
 *   node         one block position of one content, in all tables (layers x head groups) at once: so many block ids,
 *                and the tokens they hold. Nodes form chains, from a prompt's first block on: a node's parent is the
 *                node one block earlier. Its hash covers all tokens so far; a hit also needs the very same parent and
 *                equal token ids, so a collision of hashes is never a hit.
 *   partial node a node of fewer tokens than block_size; the end of a chain.
 *   salt         up to 64 bytes that divide the cache, of a tenant for instance: only equal salts meet.
 *   extra        what else than its token ids a prompt's K and V depend on, by position: a LoRA id at 0, the hash of an
 *                image at its first token. It counts from its block on.
 *   idle         a cached block that no table, hold or pending copy refers to. Idle blocks are handed out when no
 *                others are free: their nodes are then evicted, the tail of a chain before its head.
 *   snapshot     what a policy that observes prompts must know beside K and V: column sums over all tokens up to a node's
 *                end. The caller's memory in pages of block_size tokens, all layers; here are the page ids. It belongs to the
 *                node wherever its blocks lie: what ends at a snapshot does so for a node on the host as well.
 *   host copy    of a node, where there is a host tier (n_host_blocks): kvf_prefix_offload makes them. When the device's
 *                blocks of such a node are needed it stays findable on the host alone; a hit brings it back. Both tiers
 *                evict in the same order, each for itself, the tail of a chain before its head; a node that goes from the
 *                device without a copy takes with it what lies on the host behind it.
 *
 * The cache holds no reference. A block that one table holds and that is cached counts as this table's own (private) for
 * what is promised and needed, but is not written: an append copies it when its node covers tokens beyond the table's, a
 * compaction goes to fresh blocks or, when too few are spare, first takes the table's blocks out of the cache.
 *
 * A request, in a server that calls the manager from one thread
 *   lookup               as often as it waits: counts nothing, changes nothing
 *   kvf_seq_create, attach with its reservation: all or nothing, counted once, a miss too
 *   [carry out the copies of what came from the host]
 *   [snapshot_get        reads the pages before any other call on the manager]
 *   append, run; then store what is written, [snapshot_put], at each chunk's end
 *   kvf_seq_free         its blocks stay findable until their memory is needed
 */
#ifndef KVFOLD_PREFIX_H
#define KVFOLD_PREFIX_H

#include "kvfold/blockmgr.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_PREFIX_SALT_MAX 64u

/* Which node goes first when a block is needed (kvf_manager_config.prefix_eviction). Whatever the order says, a node's
 * descendants go before it. LRU is O(1) a node; the others, and all with a host tier, are O(log nodes). */
typedef enum kvf_prefix_eviction {
    KVF_PREFIX_LRU = 0,     /* the longest idle */
    KVF_PREFIX_FIFO = 1,    /* the first stored */
    KVF_PREFIX_LFU = 2,     /* the least often attached; of these the longest idle */
    KVF_PREFIX_PRIORITY = 3 /* the lowest priority (kvf_prefix_store); of these the longest idle */
} kvf_prefix_eviction;

typedef struct kvf_prefix_extra {
    uint64_t key[2];
    uint32_t position; /* under the key's n_tokens */
    uint32_t reserved; /* 0 */
} kvf_prefix_extra;

/* What a prompt is found by. All memory is the caller's and is read during the call only. */
typedef struct kvf_prefix_key {
    size_t struct_size;
    const uint32_t *tokens;         /* [n_tokens] */
    uint32_t n_tokens;              /* 1 or more */
    uint32_t salt_bytes;            /* at most KVF_PREFIX_SALT_MAX: of a longer one give a hash */
    const void *salt;               /* [salt_bytes] */
    const kvf_prefix_extra *extras; /* [n_extras], ascending in position */
    uint32_t n_extras;
} kvf_prefix_key;

typedef struct kvf_prefix_options {
    size_t struct_size;
    uint32_t max_tokens; /* most tokens of a hit; 0: n_tokens - 1, since the last token's query has to run */
    int need_snapshot;   /* only where a snapshot is: a policy that observes prompts */
    int partial;         /* also part of a block: the next append copies it (without need_snapshot) */
    int host;            /* also what lies on the host alone: attach then needs a copy list (kvf_prefix_attach_tiers) */
    int again;           /* the request was preempted and is computed again: counted apart from first queries */
} kvf_prefix_options;

/* A hit, or none (n_tokens 0). Plain values; good until the nodes that it names go, which attach and get check.
 * A hit on the whole prompt, with max_tokens 0: n_tokens is n_tokens - 1 of the key, whole is 1, and the snapshot, when one
 * was needed, covers all tokens of the key: the last query runs again for its logits only. */
typedef struct kvf_prefix_match {
    size_t struct_size;
    uint32_t n_tokens;  /* what the tables will hold after attach */
    uint32_t n_blocks;  /* whole blocks of it */
    uint32_t n_partial; /* tokens of a further block, partly used: n_tokens = n_blocks * block_size + n_partial */
    uint32_t whole;     /* 1: the cache knows every token of the key */
    uint32_t n_snapshot_tokens; /* tokens that the snapshot covers, n_tokens or the key's; 0: none was asked for */
    uint32_t n_snapshot_pages;
    uint32_t n_idle; /* idle blocks of it, over all tables: attach takes so many of those to be had */
    uint32_t
        n_host_blocks; /* of it that lie on the host alone, over all tables: attach takes as many here, and copies */
    uint64_t node, snapshot; /* opaque */
    uint32_t again;          /* as the options said: attach counts it so */
    uint32_t reserved;
} kvf_prefix_match;

/** Options with struct_size set: whole blocks, no snapshot, at most n_tokens - 1 tokens.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API kvf_prefix_options kvf_prefix_options_default(void);

/** The longest prefix of a prompt that is cached in all layers. Changes nothing and counts nothing, so a request that
 *  waits may ask at each step.
 *  @param manager a manager. @param key the prompt. @param options NULL: the default.
 *  @param match result, filled wholly (struct_size too); n_tokens 0 when nothing is found.
 *  Without need_snapshot: as many tokens as there are, up to max_tokens, rounded down to whole blocks unless `partial`
 *  is set (of the last node's children the 64 newest are looked at). With it: the end of the deepest
 *  whole node that has a snapshot, not only for whole prompts, and ends at most at max_tokens; or, when a node with any
 *  snapshot ends where the key ends, that.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_INVALID (0 tokens, extras unsorted or beyond the tokens), KVF_E_LIMIT (salt), KVF_E_UNSUPPORTED (no
 *  prefix cache). @cost O(n_tokens + n_extras), of which each block is hashed once; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_lookup(const kvf_manager *manager, const kvf_prefix_key *key,
                                               const kvf_prefix_options *options, kvf_prefix_match *match);

/** Gives an empty sequence the blocks of a match and sets its reservation, in one decision: the tables and next_pos become
 *  match->n_tokens. Counts one query and, unless n_tokens is 0 (a miss, which is counted by this call too), one hit; with
 *  match->again both are counted among the again_* figures instead.
 *  @param manager a manager. @param seq a sequence with empty tables.
 *  @param key that of the lookup: its tokens are compared again. @param match a result of kvf_prefix_lookup.
 *  @param reserve the reservation that the sequence has from then on; NULL: keeps the one it has, reduced by what it
 *  now holds as kvf_seq_reserve would.
 *  @own nothing is kept; the references are the sequence's. @threads as the manager.
 *  @errors KVF_E_NO_BLOCKS (the promises, these included, would not be covered any more), KVF_E_STALE (the sequence; or a
 *  node of the match has gone: look up again), KVF_E_STATE (tables not empty), KVF_E_INVALID, KVF_E_LIMIT,
 *  KVF_E_UNSUPPORTED; KVF_E_LIMIT also when something of the match lies on the host alone by now: that needs a copy list.
 *  On any of them nothing has changed, nothing is counted.
 *  @cost O(n_tokens + blocks of the hit), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_attach(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                                               const kvf_prefix_match *match, const kvf_reserve *reserve);

/** kvf_prefix_attach with a host tier: what of the match lies on the host alone gets blocks here, and copies that fill them.
 *  From this call on others find it here. It keeps its copies on the host as long as there is room.
 *  @param manager a manager. @param seq a sequence with empty tables. @param key that of the lookup.
 *  @param match a result of kvf_prefix_lookup. @param reserve as kvf_prefix_attach.
 *  @param copies copies to carry out before the sequence is read or written (KVF_COPY_BLOCK_IN); they pin their ends.
 *  @own nothing is kept; the references are the sequence's. @threads as the manager.
 *  @errors those of kvf_prefix_attach: KVF_E_NO_BLOCKS also when the blocks here are too few; KVF_E_LIMIT (list capacity).
 *  @cost O(n_tokens + blocks of the hit), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_attach_tiers(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                                                     const kvf_prefix_match *match, const kvf_reserve *reserve,
                                                     kvf_copy_list *copies);

/** Gives idle nodes on the device copies on the host: those that are idle in all their blocks and have none, the first in
 *  the order of eviction first, and before each what follows on it. Such a node keeps its place in the order; its blocks
 *  here can be had once the copies are done. When the host is full, copies of what is in use here make room first, then
 *  nodes that lie on the host alone, in the order of eviction, as long as they go before what is to be copied. As many as
 *  there is room for, on the host, in the list, and in what is not promised here (a pinned block keeps no promise); fewer
 *  or none is no error.
 *  @param manager a manager. @param max_nodes how many at most.
 *  @param copies copies to carry out (KVF_COPY_BLOCK_OUT), one a table for each node. @param n_nodes how many, or NULL.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_UNSUPPORTED (no prefix cache, no host tier), KVF_E_INVALID.
 *  @cost O(log nodes) and its blocks for each, and the nodes passed that follow on a chosen one; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_offload(kvf_manager *manager, uint32_t max_nodes, kvf_copy_list *copies,
                                                uint32_t *n_nodes);

enum { KVF_PREFIX_PARTIAL = 1 }; /* kvf_prefix_store_options.flags: also the partly filled last block */

typedef struct kvf_prefix_store_options {
    size_t struct_size;
    uint32_t flags;
    uint32_t priority; /* 0..100; a node keeps the highest that it was stored with */
    uint64_t duration; /* ticks of kvf_prefix_tick's clock until that counts as 0; 0: for ever */
} kvf_prefix_store_options;

/** Makes the blocks of a sequence's first n_tokens findable: every whole block of them and, with KVF_PREFIX_PARTIAL, the
 *  partly filled last one. The caller promises that K and V of these tokens ARE written, in all layers, and that they
 *  follow from the key. Takes nothing and cannot run out.
 *  One node per content: where it exists already, the sequence's own block is not cached; but if nobody refers
 *  to any of the node's blocks, the node adopts the sequence's and its own fall free. A partial node that has no
 *  snapshot grows with its block. Blocks that a whole other content's node holds end the walk.
 *  @param manager a manager. @param seq a sequence none of whose tables was compacted.
 *  @param key the sequence's tokens, at least n_tokens of them. @param n_tokens at most the tables' slots.
 *  @param options NULL: no flags, priority 0. @param n_stored nodes that became findable, or NULL.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (n_tokens beyond the key or the tables; tokens, salt or extras that differ from what
 *  the sequence was attached or stored with; options), KVF_E_LIMIT (salt), KVF_E_STATE (a table was compacted, or a
 *  compaction of the sequence is under way), KVF_E_UNSUPPORTED.
 *  @cost O(n_tokens) to compare, new blocks x tables to enter; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_store(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                                              uint32_t n_tokens, const kvf_prefix_store_options *options,
                                              uint32_t *n_stored);

/** The caller's clock, for priorities that end: any unit, never back.
 *  @param manager a manager. @param now ticks; less than before is KVF_E_INVALID.
 *  @own nothing. @threads as the manager. @errors KVF_E_INVALID, KVF_E_UNSUPPORTED.
 *  @cost O(log nodes) for each priority that ends; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_tick(kvf_manager *manager, uint64_t now);

enum {
    KVF_SNAPSHOT_KEEP_LONG = 1, /* it is known that others will share it: a request's prefix_end */
    KVF_SNAPSHOT_WHOLE = 2      /* serves only a hit on the whole prompt: its end is no end of a chunk otherwise */
};

/** Takes ceil(n_tokens / block_size) pages for a snapshot of the first n_tokens and ties them to the node that ends there,
 *  which has to be stored already. Other snapshots are evicted for it: first those without KEEP_LONG, the longest
 *  unused first; then, only for one with KEEP_LONG, those that have it. The caller writes the pages before the next call
 *  on the manager. A snapshot goes with its node, or before it.
 *  @param manager a manager. @param seq a sequence that holds the prompt (the walk begins where it stored last).
 *  @param key the prompt. @param n_tokens where the snapshot stands, at most the key's.
 *  @param flags KVF_SNAPSHOT_*; one in the middle of a block is always WHOLE.
 *  @param ids result, pages in the order of their tokens. @param capacity room in ids.
 *  @param n_pages how many were written to ids; 0 when the node has its snapshot already: nothing is to be written.
 *  @own the pages are the manager's. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_NOT_FOUND (no node ends there), KVF_E_NO_BLOCKS (more pages than may be had),
 *  KVF_E_LIMIT (capacity, salt), KVF_E_INVALID, KVF_E_UNSUPPORTED (no prefix cache, no snapshot pages); on any of them
 *  nothing has changed.
 *  @cost O(n_tokens), O(pages); no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_snapshot_put(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                                                     uint32_t n_tokens, uint32_t flags, uint32_t *ids,
                                                     uint32_t capacity, uint32_t *n_pages);

/** The pages of a match's snapshot; to be read before the next call on the manager that stores, puts, appends or attaches.
 *  @param manager a manager. @param match a match with n_snapshot_pages.
 *  @param ids result, pages in the order of their tokens. @param capacity room in ids. @param n_pages how many.
 *  @own the pages are the manager's. @threads as the manager.
 *  @errors KVF_E_STALE (the node or its snapshot has gone), KVF_E_LIMIT (capacity), KVF_E_INVALID, KVF_E_UNSUPPORTED.
 *  @cost O(pages), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_snapshot_get(kvf_manager *manager, const kvf_prefix_match *match, uint32_t *ids,
                                                     uint32_t capacity, uint32_t *n_pages);

/** Forgets everything of one salt: idle blocks fall free, held ones are only not found any more.
 *  @param manager a manager. @param salt its bytes, NULL with 0. @param salt_bytes at most KVF_PREFIX_SALT_MAX.
 *  @own nothing is kept. @threads as the manager. @errors KVF_E_INVALID, KVF_E_LIMIT, KVF_E_UNSUPPORTED.
 *  @cost O(first blocks of all chains, and the blocks that are taken out), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_drop(kvf_manager *manager, const void *salt, uint32_t salt_bytes);

/** Forgets everything, for new weights for instance.
 *  @param manager a manager. @own nothing. @threads as the manager. @errors KVF_E_INVALID, KVF_E_UNSUPPORTED.
 *  @cost O(cached blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_clear(kvf_manager *manager);

/* Since create, each thing counted once; the second half is of now. */
typedef struct kvf_prefix_stats {
    size_t struct_size;
    uint64_t queries, hits;            /* calls of attach for a prompt's first time; those with tokens */
    uint64_t query_tokens, hit_tokens; /* tokens of their keys; of their matches */
    uint64_t stored;                   /* nodes that became findable */
    uint64_t evicted;                  /* nodes taken out because a block of either tier was needed */
    uint64_t removed;                  /* nodes taken out by compactions, drop and clear */
    uint64_t adopted;                  /* nodes that took over a sequence's blocks and let their own fall free */
    uint64_t duplicates;               /* blocks left uncached since their content was, or could not be, entered */
    uint64_t snapshots_put;            /* snapshots that took pages */
    uint64_t snapshots_evicted;        /* of them those gone, with their node or before it */
    uint32_t n_nodes, n_nodes_max;     /* now; the high-water mark */
    uint32_t n_cached, n_idle;         /* blocks here; of them those that nobody refers to */
    uint32_t n_snapshots, n_snapshot_pages;
    uint64_t snapshot_bytes; /* n_snapshot_pages * snapshot_page_bytes */
    /* With a host tier. */
    uint64_t offloaded;       /* copies of nodes made there */
    uint64_t left_device;     /* nodes whose blocks here were needed, and that stayed there */
    uint64_t left_host;       /* copies given up for room there; of a node that was there alone it is evicted, too */
    uint64_t loaded;          /* nodes brought back by hits */
    uint64_t host_hit_tokens; /* of hit_tokens: those in them */
    uint32_t n_host_nodes, n_host_only; /* nodes with a copy; of them those without blocks here */
    uint32_t n_bare;                    /* idle nodes without a copy: what an offload would take */
    uint32_t reserved;
    uint64_t evicted_blocks; /* blocks here that fell free because one was needed */
    /* Attaches of requests that are computed again (kvf_prefix_options.again): not counted above. */
    uint64_t again_queries, again_tokens; /* their number; tokens of their keys */
    uint64_t again_hit_tokens;            /* of them those found: computation saved */
} kvf_prefix_stats;

/** The cache's figures.
 *  @param manager a manager. @param out struct_size set by the caller; all zero without a prefix cache.
 *  @own plain values. @threads as the manager. @errors KVF_E_INVALID. @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_stats_read(const kvf_manager *manager, kvf_prefix_stats *out);

#ifdef __cplusplus
}
#endif
#endif
