/* kvfold/prefix.h: the prefix cache. It finds blocks by the tokens they hold, so that prompts that begin alike share them.
 * Turn it on with kvf_manager_config.prefix_cache. If it is off, it takes no memory and its calls return
 * KVF_E_UNSUPPORTED.
 *
 * Simple use
 *     kvf_status start(kvf_manager *manager, kvf_seq seq, const uint32_t *prompt, uint32_t n, uint32_t *n_cached) {
 *         kvf_prefix_key key = {.struct_size = sizeof key, .tokens = prompt, .n_tokens = n};
 *         kvf_prefix_match match = {.struct_size = sizeof match};
 *         kvf_status status = kvf_prefix_lookup(manager, &key, NULL, &match);
 *         if (!status) status = kvf_prefix_attach(manager, seq, &key, &match, NULL, NULL); // seq shares the blocks of the hit
 *         if (status) return status;
 *         kvf_append_item rest = {seq, n - match.n_tokens};
 *         *n_cached = match.n_tokens; // run the model on the tokens from here on
 *         return kvf_append(manager, &rest, 1, NULL);
 *     } // when K and V of the prompt are written: kvf_prefix_store(manager, seq, &key, n, NULL, NULL)
 *
 * Nouns
 *   node         the blocks of one block position in all tables (layers x head groups), and the tokens they hold. The nodes
 *                of a prompt form a chain: the parent of a node is the node one block earlier. A node's hash covers
 *                all tokens from the prompt's start. A hit also requires the same parent and equal token ids, so two prompts
 *                with the same hash are never confused.
 *   partial node a node with fewer than block_size tokens. It is the end of its chain.
 *   salt         up to 64 bytes that partition the cache, by tenant for instance. Prompts share blocks only if their salts
 *                are equal.
 *   extra        anything besides token ids that K and V of a prompt depend on, with its position: a LoRA id at 0, the
 *                hash of an image at its first token. It affects the block at its position and all later ones.
 *   idle         a cached block that no table, hold or pending copy refers to. Idle blocks are handed out when no block
 *                is free. Their nodes are then evicted, the tail of a chain before its head.
 *   snapshot     column sums, or other sums, over all tokens up to the end of a node. A policy that observes prompts needs them in addition to K
 *                and V. Snapshots lie in the caller's memory, in pages of block_size tokens for all layers; the cache
 *                keeps the page ids. A snapshot belongs to its node, whether the node is on the device or the host.
 *   host copy    a copy of a node's blocks in the host tier (n_host_blocks), made by kvf_prefix_offload. If the device
 *                needs the blocks of such a node, the node stays findable on the host, and a hit copies it back. Each tier
 *                evicts for itself, both in the same order, the tail of a chain before its head. When a node without a
 *                host copy is evicted from the device, the nodes below it on the host are evicted too.
 *
 * Rules
 *   - The cache holds no reference. A cached block that one table holds counts as private to that table in promises.
 *   - The tokens that a node covers are never overwritten. An append copies the block if its node covers slots beyond
 *     the table's. A compaction writes to fresh blocks or, if too few are available, first removes the table's blocks from
 *     the cache.
 *   - One thread calls the manager. For each request it calls, in this order:
 *     1. kvf_prefix_lookup, as often as needed while the request waits: it changes and counts nothing.
 *     2. kvf_seq_create and kvf_prefix_attach with the reservation: all or nothing. A miss is attached too, and counted.
 *     3. With a host tier: run the copies that attach returned.
 *     4. With snapshots: kvf_prefix_snapshot_get, and read the pages before any other call on the manager.
 *     5. kvf_append, and run the model; after each chunk kvf_prefix_store and, with snapshots, kvf_prefix_snapshot_put.
 *     6. kvf_seq_free. The blocks stay findable until their memory is needed.
 */
#ifndef KVFOLD_PREFIX_H
#define KVFOLD_PREFIX_H

#include "kvfold/blockmgr.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_PREFIX_SALT_MAX 64u

/* Which node is evicted first when a block is needed (kvf_manager_config.prefix_eviction). In every order, a node's
 * descendants are evicted before it. LRU costs O(1) per node; the others, and every order with a host tier, O(log nodes). */
typedef enum kvf_prefix_eviction {
    KVF_PREFIX_LRU = 0,     /* the longest idle */
    KVF_PREFIX_FIFO = 1,    /* the first stored */
    KVF_PREFIX_LFU = 2,     /* the least often attached; among equals the longest idle */
    KVF_PREFIX_PRIORITY = 3 /* the lowest priority (kvf_prefix_store); among equals the longest idle */
} kvf_prefix_eviction;

typedef struct kvf_prefix_extra {
    uint64_t key[2];
    uint32_t position; /* under the key's n_tokens */
    uint32_t reserved; /* 0 */
} kvf_prefix_extra;

/* The key of a prompt. All memory is the caller's and is read only during the call. */
typedef struct kvf_prefix_key {
    size_t struct_size;
    const uint32_t *tokens;         /* [n_tokens] */
    uint32_t n_tokens;              /* 1 or more */
    uint32_t salt_bytes;            /* at most KVF_PREFIX_SALT_MAX: for a longer salt give its hash */
    const void *salt;               /* [salt_bytes] */
    const kvf_prefix_extra *extras; /* [n_extras], ascending by position */
    uint32_t n_extras;
} kvf_prefix_key;

typedef struct kvf_prefix_options {
    size_t struct_size;
    uint32_t max_tokens; /* most tokens of a hit; 0: n_tokens - 1, since the query of the last token has to run */
    int need_snapshot;   /* 1: a hit ends only where a snapshot exists, for a policy that observes prompts */
    int partial; /* 1: a hit may end inside a block; the next append copies that block (not with need_snapshot) */
    int host;    /* 1: also nodes that are only on the host; give kvf_prefix_attach a copy list */
    int again;   /* 1: the request was preempted and is recomputed; counted in the again_* figures */
    uint32_t snapshot_stats; /* with need_snapshot: KVF_SNAPSHOT_SUMS, _SQUARES, _LOGPROBS that it must have; 0: SUMS */
    int repeat_last; /* with need_snapshot: 1: the hit ends one token before its snapshot, whose last query runs again for its logits */
} kvf_prefix_options;

/* A hit, or a miss (n_tokens 0). Plain values. A match is valid until its nodes are evicted; attach and snapshot_get check
 * that. If the cache knows the whole prompt, whole is 1. With max_tokens 0 a hit then ends one token before the key's end
 * (without partial and need_snapshot, at the whole block before it), because the last query must run for its logits. The
 * snapshot, if one was needed, covers all tokens of the key. */
typedef struct kvf_prefix_match {
    size_t struct_size;
    uint32_t n_tokens;          /* slots of each table after attach */
    uint32_t n_blocks;          /* whole blocks of the hit */
    uint32_t n_partial;         /* tokens in one more block: n_tokens = n_blocks * block_size + n_partial */
    uint32_t whole;             /* 1: the cache knows every token of the key */
    uint32_t n_snapshot_tokens; /* tokens that the snapshot covers, n_tokens or the key's; 0: none was asked for */
    uint32_t n_snapshot_pages;
    uint32_t n_idle;         /* idle blocks of the hit, over all tables: attach takes them from the available blocks */
    uint32_t n_host_blocks;  /* blocks that are only on the host, over all tables: attach takes as many device blocks */
    uint64_t node, snapshot; /* opaque */
    uint32_t again;          /* kvf_prefix_options.again */
    uint32_t
        snapshot_stats; /* KVF_SNAPSHOT_SUMS, _SQUARES, _LOGPROBS that the snapshot has, in this order of its pages */
} kvf_prefix_match;

/** Sets struct_size: whole blocks, no snapshot, at most n_tokens - 1 tokens.
 *  @param options filled; NULL does nothing. @param struct_size sizeof *options: no byte beyond it is written.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API void kvf_prefix_options_init(kvf_prefix_options *options, size_t struct_size);

/** Finds the longest prefix of a prompt that is cached in all layers. Changes nothing and counts nothing, so a waiting
 *  request may call it at every step.
 *  Without need_snapshot the hit has all cached tokens up to max_tokens, rounded down to whole blocks unless `partial`
 *  is set. With `partial` only the 64 newest children of the last whole node are searched.
 *  With need_snapshot the hit ends at the deepest whole node that ends at or before max_tokens and has a snapshot, with
 *  snapshot_stats and without KVF_SNAPSHOT_WHOLE. If a node with any snapshot ends where the key ends, the hit ends there.
 *  @param manager a manager. @param key the prompt. @param options NULL: the default.
 *  @param match result, its struct_size set by the caller. n_tokens is 0 if nothing is found.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_INVALID (0 tokens, extras unsorted or beyond the tokens), KVF_E_LIMIT (salt), KVF_E_UNSUPPORTED (no
 *  prefix cache). @cost O(n_tokens + n_extras): each block is hashed once; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_lookup(const kvf_manager *manager, const kvf_prefix_key *key,
                                               const kvf_prefix_options *options, kvf_prefix_match *match);

/** Gives an empty sequence the blocks of a match and sets its reservation, all or nothing: its tables have match->n_tokens
 *  slots then, and next_pos is match->n_tokens. Counts one query and, unless the match is a miss (n_tokens 0), one hit. With
 *  match->again the again_* figures count them instead. Nodes of the match that are only on the host get device blocks, and
 *  copies that fill them; from this call on lookups find these nodes on the device. Their host copies stay as long as there is
 *  room.
 *  @param manager a manager. @param seq a sequence with empty tables.
 *  @param key the key of the lookup; its tokens are compared again. @param match a result of kvf_prefix_lookup.
 *  @param reserve the sequence's new reservation; NULL: it keeps its own. Either way the promises are what the reservation
 *  has beyond the blocks attached, as in kvf_seq_reserve.
 *  @param copies copies to run before the sequence is read or written (KVF_COPY_BLOCK_IN), both ends of which are pinned; or NULL
 *  without a host tier.
 *  @own nothing is kept; the references are the sequence's. @threads as the manager.
 *  @errors KVF_E_NO_BLOCKS (too few blocks for all promises, this one included, or for nodes on the host), KVF_E_STALE (the sequence; or a node of the
 *  match is no longer cached: look up again), KVF_E_STATE (tables not empty), KVF_E_INVALID, KVF_E_LIMIT (salt; n_table_blocks; the list's
 *  capacity, which is 0 without one), KVF_E_UNSUPPORTED.
 *  After an error nothing has changed and nothing is counted.
 *  @cost O(n_tokens + blocks of the hit), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_attach(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                                               const kvf_prefix_match *match, const kvf_reserve *reserve,
                                               kvf_copy_list *copies);

/** Copies up to max_nodes idle nodes from the device to the host: nodes whose blocks are all idle and that have no host copy,
 *  in the order of eviction, descendants before their ancestor. A copied node keeps its place in the order of eviction. Its
 *  device blocks are available again when the copies are done.
 *  If the host is full, host copies of nodes that are in use on the device are dropped first. Then nodes that are only on the
 *  host are evicted, in the order of eviction, as long as they come before the node to be copied.
 *  The call stops early, without an error, if the host or the list has no more room, or if too few device blocks are left
 *  beside the promises (blocks pinned by a copy cannot serve a promise).
 *  @param manager a manager. @param max_nodes most nodes to copy.
 *  @param copies copies to run (KVF_COPY_BLOCK_OUT), one per table for each node. @param n_nodes nodes copied, or NULL.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_UNSUPPORTED (no prefix cache, no host tier), KVF_E_INVALID.
 *  @cost for each node O(log nodes + its blocks + descendants visited); no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_offload(kvf_manager *manager, uint32_t max_nodes, kvf_copy_list *copies,
                                                uint32_t *n_nodes);

enum { KVF_PREFIX_PARTIAL = 1 }; /* kvf_prefix_store_options.flags: also the partly filled last block */

typedef struct kvf_prefix_store_options {
    size_t struct_size;
    uint32_t flags;
    uint32_t priority; /* 0..100; a node keeps the highest priority it was stored with */
    uint64_t duration; /* ticks of kvf_prefix_tick's clock until the priority becomes 0; 0: it stays */
} kvf_prefix_store_options;

/** Adds the blocks of a sequence's first n_tokens to the prefix cache: every whole block and, with KVF_PREFIX_PARTIAL, the
 *  partly filled last one. The caller guarantees that K and V of these tokens HAVE been written, in all layers, and that they
 *  depend on nothing but the key. Takes no blocks and cannot run out of them.
 *  The same content has only one node. If the node exists already, the sequence's own block is not cached. But if all blocks
 *  of the existing node are idle, the node takes over the sequence's blocks and its own become free (adoption). A partial
 *  node without a snapshot grows when its block has more tokens. The call stops at a block that already belongs to a node of
 *  other content.
 *  @param manager a manager. @param seq a sequence none of whose tables was compacted.
 *  @param key the sequence's tokens, at least n_tokens of them. @param n_tokens at most the tables' slots.
 *  @param options NULL: no flags, priority 0. @param n_stored nodes added or grown, or NULL.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (n_tokens beyond the key or the tables; tokens, salt or extras that differ from what
 *  the sequence was attached or stored with; options), KVF_E_LIMIT (salt), KVF_E_STATE (a table was compacted, or a
 *  compaction of the sequence is under way), KVF_E_UNSUPPORTED.
 *  @cost O(n_tokens) to compare + O(new blocks * tables) to add; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_store(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                                              uint32_t n_tokens, const kvf_prefix_store_options *options,
                                              uint32_t *n_stored);

/** Sets the caller's clock, for priorities with a duration. Any unit; the clock never goes back.
 *  @param manager a manager. @param now ticks; less than before is KVF_E_INVALID.
 *  @own nothing. @threads as the manager. @errors KVF_E_INVALID, KVF_E_UNSUPPORTED.
 *  @cost O(log nodes) for each priority that ends; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_tick(kvf_manager *manager, uint64_t now);

enum {
    KVF_SNAPSHOT_KEEP_LONG = 1, /* evicted last: other requests are known to share it (a request's prefix_end) */
    KVF_SNAPSHOT_WHOLE = 2,     /* used only by a hit on the whole prompt, since its end is not the end of a chunk */
    /* What it has of each token. None of the three: SUMS. */
    KVF_SNAPSHOT_SUMS = 4,     /* column sums (KVF_NEEDS_COL_SUMS) */
    KVF_SNAPSHOT_SQUARES = 8,  /* sums of squares (KVF_NEEDS_SQUARES) */
    KVF_SNAPSHOT_LOGPROBS = 16 /* log-probabilities (KVF_NEEDS_LOGPROBS) */
};

/** Takes ceil(n_tokens / block_size) pages for a snapshot of the first n_tokens, and as many again for each further of SUMS, SQUARES and
 *  LOGPROBS in flags. The snapshot belongs to the node that ends there, which must have been stored. A node has one snapshot: one that
 *  lacks any of these gives way to the new one. If pages are missing, other snapshots are evicted, the longest unused first: those
 *  without KEEP_LONG and then, only for a snapshot with KEEP_LONG, those with it. The caller writes the pages before the next
 *  call on the manager. A snapshot is evicted with its node or before it.
 *  @param manager a manager. @param seq a sequence that holds the prompt (the search begins where it stored last).
 *  @param key the prompt. @param n_tokens tokens that the snapshot covers, at most the key's.
 *  @param flags KVF_SNAPSHOT_*; a snapshot that ends inside a block is always WHOLE.
 *  @param ids result: pages in the order of their tokens, first all of SUMS, then of SQUARES, then of LOGPROBS.
 *  @param capacity room in ids.
 *  @param n_pages ids written; 0 if the node has such a snapshot already: then there is nothing to write.
 *  @own the pages are the manager's. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_NOT_FOUND (no node ends there), KVF_E_NO_BLOCKS (more pages than are available),
 *  KVF_E_LIMIT (capacity, salt), KVF_E_INVALID, KVF_E_UNSUPPORTED (no prefix cache, no snapshot pages). After an error
 *  nothing has changed.
 *  @cost O(n_tokens), O(pages); no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_snapshot_put(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                                                     uint32_t n_tokens, uint32_t flags, uint32_t *ids,
                                                     uint32_t capacity, uint32_t *n_pages);

/** The pages of a match's snapshot. Read them before the next store, snapshot_put, append or attach on the manager.
 *  @param manager a manager. @param match a match with n_snapshot_pages.
 *  @param ids result: pages as in kvf_prefix_snapshot_put, of match->snapshot_stats. @param capacity room in ids. @param n_pages ids written.
 *  @own the pages are the manager's. @threads as the manager.
 *  @errors KVF_E_STALE (the node or its snapshot was evicted), KVF_E_LIMIT (capacity), KVF_E_INVALID, KVF_E_UNSUPPORTED.
 *  @cost O(pages), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_snapshot_get(kvf_manager *manager, const kvf_prefix_match *match, uint32_t *ids,
                                                     uint32_t capacity, uint32_t *n_pages);

/** Removes all nodes of one salt from the cache. Idle blocks become free; held blocks stay with their holders.
 *  @param manager a manager. @param salt its bytes, NULL with 0. @param salt_bytes at most KVF_PREFIX_SALT_MAX.
 *  @own nothing is kept. @threads as the manager. @errors KVF_E_INVALID, KVF_E_LIMIT, KVF_E_UNSUPPORTED.
 *  @cost O(first blocks of all chains, and the blocks that are taken out), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_drop(kvf_manager *manager, const void *salt, uint32_t salt_bytes);

/** Removes all nodes from the cache, after loading new weights for instance.
 *  @param manager a manager. @own nothing. @threads as the manager. @errors KVF_E_INVALID, KVF_E_UNSUPPORTED.
 *  @cost O(cached blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_clear(kvf_manager *manager);

/* Counters since create, each event counted once. n_nodes to snapshot_bytes and the n_* of the host tier are the current
 * state. */
typedef struct kvf_prefix_stats {
    size_t struct_size;
    uint64_t queries, hits;            /* calls of attach, except those with again; of these, the ones with tokens */
    uint64_t query_tokens, hit_tokens; /* tokens of their keys; of their matches */
    uint64_t stored;                   /* nodes added or grown by a store */
    uint64_t evicted;                  /* nodes evicted because a block of either tier was needed */
    uint64_t removed;                  /* nodes removed by compactions, drop and clear */
    uint64_t adopted;                  /* nodes that took over a sequence's blocks (kvf_prefix_store) */
    uint64_t duplicates;           /* block positions not cached: their content was cached already or could not be */
    uint64_t snapshots_put;        /* snapshots that took pages */
    uint64_t snapshots_evicted;    /* snapshots that ended, with their node or before it */
    uint32_t n_nodes, n_nodes_max; /* now; the high-water mark */
    uint32_t n_cached, n_idle;     /* cached blocks on the device; of these, the idle ones */
    uint32_t n_snapshots, n_snapshot_pages;
    uint64_t snapshot_bytes; /* n_snapshot_pages * snapshot_page_bytes */
    /* With a host tier. */
    uint64_t offloaded;   /* nodes copied to the host */
    uint64_t left_device; /* nodes whose device blocks were needed and that stayed on the host */
    uint64_t left_host;   /* host copies dropped to make room there; a node that was only there counts as evicted too */
    uint64_t loaded;      /* nodes copied back by hits */
    uint64_t host_hit_tokens;           /* the part of hit_tokens in those nodes */
    uint32_t n_host_nodes, n_host_only; /* nodes with a host copy; of these, the ones without device blocks */
    uint32_t n_bare;                    /* idle nodes without a host copy: candidates for an offload */
    uint32_t reserved;
    uint64_t evicted_blocks; /* device blocks that became free by eviction */
    /* Attaches of recomputed requests (kvf_prefix_options.again), which are not counted above. */
    uint64_t again_queries, again_tokens; /* their number; tokens of their keys */
    uint64_t again_hit_tokens;            /* tokens of these found in the cache: computation saved */
} kvf_prefix_stats;

/** The figures of the cache.
 *  @param manager a manager. @param out struct_size set by the caller; all figures are 0 without a prefix cache.
 *  @own plain values. @threads as the manager. @errors KVF_E_INVALID. @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_prefix_stats_read(const kvf_manager *manager, kvf_prefix_stats *out);

#ifdef __cplusplus
}
#endif
#endif
