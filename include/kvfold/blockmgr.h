/* kvfold/blockmgr.h: the block manager of a paged KV cache: block tables, reference counts, free blocks.
 * It keeps host metadata only: block ids and byte sizes. The KV memory belongs to the caller.
 * Blocks that must be copied are returned as a copy list. Kernels get the block tables as a view.
 *
 * Simple use
 *     kvf_manager_config config;
 *     kvf_manager_config_init(&config, sizeof config);
 *     config.n_layers = 32, config.n_kv_heads = 8, config.n_blocks = 4096;
 *     kvf_manager *manager;
 *     kvf_seq seq;
 *     kvf_view view = {.struct_size = sizeof view};
 *     kvf_status status = kvf_manager_create(&config, &manager, NULL);
 *     if (status) return status;
 *     status = kvf_seq_create(manager, &seq); // a block table for each layer, all empty
 *     kvf_append_item item = {seq, 100};      // 100 tokens: 7 blocks of 16 slots in every layer, or KVF_E_NO_BLOCKS
 *     if (!status) status = kvf_append(manager, &item, 1, NULL); // NULL: nothing is shared, so nothing is copied
 *     if (!status) status = kvf_view_fill(manager, 0, &seq, 1, &view);
 *     // token i of layer l lies in slot i % 16 of block view.rows[view.row_offset[l] + i / 16]
 *     kvf_manager_destroy(manager);
 *     return status;
 *
 * Nouns
 *   head group   the KV heads of a layer that share one block table; by default all KV heads of this rank.
 *   block        block_size token slots of one head group's K and V. Any block can serve any layer, group and
 *                sequence. A block that one sequence frees is available to the others at once.
 *   class        the layers whose blocks have the same number of bytes. A model whose layers differ in KV heads or head_dim
 *                has several classes, each with a pool of its own. Block ids run on from class to class, so an id tells its
 *                class.
 *   table        the block table of one (sequence, layer, head group): its block ids and the number of slots used.
 *                Once a policy has evicted, the tables of one sequence differ in length.
 *   score page   the scores of one block's slots in one table. Score pages come from a pool of their own, stand
 *                parallel to the table's blocks, are never shared, and are copied by a fork.
 *   reservation  the number of blocks that a table can grow to without failing. The part that it does not hold yet is
 *                promised to it: a count, not particular blocks. Always: promised <= free + cached idle.
 *   hold         a reference to a block from outside the tables (kvf_block_take, kvf_block_hold).
 *   cached       a block that the prefix cache can find (prefix.h). It is idle if no table, hold or copy refers to it. An
 *                idle block is handed out when no block is free.
 *   shared       a block with more than one holder. A shared block is read-only.
 *   private      private to a table: a block that only this table holds.
 *   window       sliding-window attention: queries of the layer see its newest w positions only, their own included. As
 *                tokens arrive, whole blocks are dropped from the front of its tables. The slots of such a table are always
 *                the newest positions in ascending order.
 *   copy list    copies that the caller has to run: block src to block dst. Both are pinned until the copy is done.
 *   host tier    a second pool of ids, for blocks in host memory. Swapped sequences lie there.
 *   view         the tables of a batch in all layers, as arrays for a kernel.
 *
 * Rules
 *   - All or nothing: a call that needs blocks in 48 layers gets all of them or changes nothing.
 *   - Running out of blocks is the ordinary status KVF_E_NO_BLOCKS.
 *   - Nothing is allocated after create.
 *   - NULL for an object, or for an output that is not optional, is KVF_E_INVALID in every call.
 */
#ifndef KVFOLD_BLOCKMGR_H
#define KVFOLD_BLOCKMGR_H

#include "kvfold/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_manager kvf_manager;

/* A sequence handle. It contains a generation and its manager's tag, so a freed handle, or one of
 * another manager, gives KVF_E_STALE. 0 is never a sequence. */
typedef uint64_t kvf_seq;

/* A block handle (id and generation), for callers that hold blocks outside the tables. */
typedef uint64_t kvf_block;

#define KVF_NO_BLOCK UINT32_MAX

/* Value for a layer's window: the layer keeps nothing and its tables stay empty (it has no KV, or reads another layer's). */
#define KVF_LAYER_NONE UINT32_MAX

#define KVF_BLOCK_CLASSES_MAX 8u

/* The pool of blocks of one class. Ids are numbered class by class: the first class has the ids from 0, the next class the
 * ids after those, and likewise on the host. In the memory of class c, a block has index id - (blocks of the classes before
 * c). */
typedef struct kvf_block_class {
    uint32_t n_blocks; /* 1.. */
    uint32_t n_host_blocks;
    uint64_t block_bytes; /* as kvf_manager_config.block_bytes */
} kvf_block_class;

typedef struct kvf_manager_config {
    size_t struct_size;
    uint32_t n_layers;            /* 1..1024 */
    uint32_t n_kv_heads;          /* KV heads of this rank, 1..1024 */
    uint32_t heads_per_group;     /* divides n_kv_heads; 0: n_kv_heads, one group per layer */
    uint32_t block_size;          /* slots; a power of two in [8, 256]; 0: 16 */
    uint32_t n_blocks;            /* 1..2^31 */
    uint32_t n_score_pages;       /* 0: n_blocks */
    uint32_t max_seqs;            /* sequences alive at once, 1..2^20; 0: 256 */
    uint32_t max_slots;           /* most slots of one table, usually the model's context length; 0: 8192 */
    uint64_t block_bytes;         /* K and V of one block, for figures in bytes; 0: figures in bytes are 0 */
    kvf_allocator allocator;      /* all zero: the default */
    uint32_t prefix_cache;        /* 1: keep a prefix cache (prefix.h); 0: none, and no cost */
    uint32_t prefix_eviction;     /* kvf_prefix_eviction; 0: LRU */
    uint32_t n_snapshot_pages;    /* pages of block_size tokens for snapshots (prefix.h); 0: none */
    uint32_t reserved;            /* 0 */
    uint64_t snapshot_page_bytes; /* bytes of one such page, for figures in bytes */
    const struct kvf_profile_config *profile; /* kvfold/profile.h; copied; NULL: keep no profile */
    uint32_t n_host_blocks;                   /* blocks of the host tier, under 2^31; 0: none */
    uint32_t n_host_score_pages;              /* score pages of the host tier, under 2^31; 0: none */
    /* [n_layers], copied. 0: every position is kept until a policy evicts it. KVF_LAYER_NONE: the layer keeps nothing. Any
     * other value: the layer's window. Tables of a window have no score pages and are never compacted. NULL: all 0. */
    const uint32_t *layer_windows;
    uint32_t view_copies; /* 1: each view buffer has rows of its own and lists what a fill has changed in them; 0: no */
    /* Number of classes, 1..KVF_BLOCK_CLASSES_MAX; 0: one class. With classes, n_blocks and n_host_blocks are 0 or the sums
     * over them, and block_bytes is 0. All classes have the same block_size and number of head groups; they may differ in KV
     * heads per group. All share one pool of score pages, whose size is that of the largest group. */
    uint32_t n_classes;
    const kvf_block_class *classes; /* [n_classes], copied */
    const uint32_t *layer_class; /* [n_layers], copied: the class of each layer. Each class has a layer. NULL: all 0 */
    /* Most blocks in all tables together; KVF_E_LIMIT beyond. A block that two tables share counts twice, blocks of swapped
     * sequences count too. It sizes the memory of the tables and of the views' rows. 0: 2 * (n_blocks + n_host_blocks), with
     * prefix_cache all that the tables can hold, as with UINT64_MAX: any number of sequences may share a prefix. */
    uint64_t n_table_blocks;
} kvf_manager_config;

/** Sets struct_size and every default; n_layers, n_kv_heads and n_blocks become 0.
 *  @param config filled; NULL does nothing. @param struct_size sizeof *config: no byte beyond it is written.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API void kvf_manager_config_init(kvf_manager_config *config, size_t struct_size);

/** Bytes of metadata that a manager of this config takes, all of it at create.
 *  @param config see above. @param bytes result. @param err detail, or NULL.
 *  @own nothing. @threads any.
 *  @errors KVF_E_INVALID (a field out of range), KVF_E_OVERFLOW (sizes wrap), KVF_E_UNSUPPORTED (longer struct).
 *  @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_manager_bytes(const kvf_manager_config *config, size_t *bytes, kvf_error *err);

/** Creates a manager with all blocks free, in one allocation.
 *  @param config see above. @param out the manager. @param err detail, or NULL.
 *  @own the caller, kvf_manager_destroy. @threads any; the manager itself one thread at a time.
 *  @errors those of kvf_manager_bytes, KVF_E_NO_MEMORY.
 *  @cost O(n_blocks + max_seqs), with view_copies plus O(max_seqs * tables); allocates once. With the default allocator, rows
 *  take memory only as they are written: at most 16 bytes for each block in a table, and as much in each view buffer, plus a
 *  constant for each table. */
KVF_API KVF_CHECK kvf_status kvf_manager_create(const kvf_manager_config *config, kvf_manager **out, kvf_error *err);

/** Frees the manager with everything in it; NULL is allowed. Its handles become invalid.
 *  @param manager a manager.
 *  @own takes the manager. @threads no other call may run. @errors none. @cost one free. */
KVF_API void kvf_manager_destroy(kvf_manager *manager);

/** Detail of the manager's last failed call; its text is "" if none has failed.
 *  @param manager a manager.
 *  @own the manager's, until its next failing call. @threads as the manager. @errors none. @cost O(1). */
KVF_API const kvf_error *kvf_manager_error(const kvf_manager *manager);

/** The manager's config with the defaults filled in.
 *  @param manager a manager.
 *  @own the manager's. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_manager_config *kvf_manager_get_config(const kvf_manager *manager);

/* ---- Copy lists -------------------------------------------------------------------------- */

typedef enum kvf_copy_kind {
    KVF_COPY_BLOCK = 0,      /* K, V and slot metadata of a block */
    KVF_COPY_SCORE_PAGE = 1, /* a score page */
    KVF_COPY_BLOCK_OUT = 2,  /* a block from the device to the host */
    KVF_COPY_BLOCK_IN = 3,   /* a block from the host to the device */
    KVF_COPY_SCORE_OUT = 4,  /* a score page from the device to the host */
    KVF_COPY_SCORE_IN = 5,   /* a score page from the host to the device */
    KVF_COPY_KINDS = 6       /* one more than the last of this version */
} kvf_copy_kind;

typedef struct kvf_copy {
    uint32_t kind;    /* kvf_copy_kind */
    uint32_t src;     /* id */
    uint32_t dst;     /* id */
    uint32_t n_slots; /* only the first n_slots slots are in use; copying the whole block is allowed too */
} kvf_copy;

/* The caller's buffer. A call appends to items and raises n. If capacity is too small, the call fails with KVF_E_LIMIT and
 * changes nothing. For a fork or append, the number of tables plus the parent's score pages always suffices. A NULL list has
 * capacity 0. The caller runs the copies in order, before it writes the slots that the call appended and before it writes
 * anything else to src or dst. */
typedef struct kvf_copy_list {
    kvf_copy *items;
    uint32_t n;
    uint32_t capacity;
} kvf_copy_list;

/** Reports that all copies of a list are done: unpins src and dst of each and empties the list.
 *  Until then neither is handed out again, even if its last holder frees it.
 *  @param manager a manager. @param copies a list that calls on this manager filled.
 *  @own nothing. @threads as the manager.
 *  @errors KVF_E_STALE (an item is not pending; nothing changes), KVF_E_INVALID (n above the capacity).
 *  @cost O(items), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_copies_done(kvf_manager *manager, kvf_copy_list *copies);

/* ---- Sequences ---------------------------------------------------------------------------- */

/** Creates a sequence with empty tables in all layers.
 *  @param manager a manager. @param out the handle.
 *  @own the caller, kvf_seq_free. @threads as the manager.
 *  @errors KVF_E_LIMIT (max_seqs alive). @cost O(tables), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_create(kvf_manager *manager, kvf_seq *out);

/** Forks a sequence. The child shares every block of its parent. Score pages are copied (the copies are appended to the
 *  list). Where the parent's table has a reservation, the child's table gets the same one. The child is promised all of it,
 *  because its first compaction needs fresh blocks. With kvf_reserve.growth it is promised only what lies beyond the shared
 *  whole blocks.
 *  @param manager a manager. @param parent a sequence with no compaction under way.
 *  @param copies score page copies to carry out. @param out the child.
 *  @own the caller, kvf_seq_free. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_LIMIT (max_seqs, list capacity, n_table_blocks), KVF_E_NO_BLOCKS (score pages or promise), KVF_E_STATE (a
 *  compaction of the parent is under way, or the parent is swapped out).
 *  @cost O(blocks of the parent), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_fork(kvf_manager *manager, kvf_seq parent, kvf_copy_list *copies, kvf_seq *out);

/** Frees a sequence. Its score pages and the blocks that have no other holder become free at once; a block pinned by a
 *  pending copy becomes free when the copy is done. Its promises are dropped.
 *  @param manager a manager. @param seq a sequence; if it takes part in a compaction, the whole compaction is cancelled first.
 *  @own takes the handle. @threads as the manager. @errors KVF_E_STALE. @cost O(its blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_free(kvf_manager *manager, kvf_seq seq);

/** The index of a live sequence, < max_seqs, for the caller's own per-sequence arrays (such as a policy's state).
 *  @param manager a manager. @param seq a sequence. @param index result.
 *  @own nothing. @threads as the manager. @errors KVF_E_STALE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_index(const kvf_manager *manager, kvf_seq seq, uint32_t *index);

/** Slots and blocks of one table.
 *  @param manager a manager. @param seq a sequence. @param layer layer. @param group head group.
 *  @param n_slots slots used, or NULL. @param n_blocks blocks held, or NULL.
 *  @param blocks first block id of the table's row, or NULL; valid until the next call that changes seq or takes blocks.
 *  @own the row is the manager's. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (layer or group). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_table(const kvf_manager *manager, kvf_seq seq, uint32_t layer, uint32_t group,
                                           uint32_t *n_slots, uint32_t *n_blocks, const uint32_t **blocks);

/** The position of the next appended token: the number of tokens appended so far, evicted ones included.
 *  @param manager a manager. @param seq a sequence. @param next_pos result.
 *  @own nothing. @threads as the manager. @errors KVF_E_STALE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_next_pos(const kvf_manager *manager, kvf_seq seq, uint32_t *next_pos);

/* A reservation.
 * growth = 0: for a sequence that may be compacted. A compaction takes fresh blocks in place of shared ones, so only private
 * blocks count against the reservation.
 * growth = 1: for a sequence that only grows. All its blocks count, except a partly filled last block that an append would
 * have to copy. The guarantee also ends when the last block becomes shared or shared blocks are rolled back. */
typedef struct kvf_reserve {
    size_t struct_size;
    /* [n_layers][n_groups], slots; each at most max_slots. For a window w, give the most slots it will hold:
     * w + n + block_size - 2 for appends of up to n tokens, whatever the sequence's length. A layer that keeps nothing is
     * promised nothing, a window no score pages. */
    const uint32_t *n_slots;
    int with_scores; /* whether score pages are promised too */
    int growth;
    int fresh; /* 1: a table with a block that another sequence holds is promised its whole reservation, since its first
                * compaction will write to fresh blocks only, whatever private blocks it has (not with growth) */
} kvf_reserve;

/** Sets the reservation of every table, in place of the former one; 0 drops it. A table's reservation is
 *  ceil(n_slots / block_size) blocks, its private blocks included (and as many score pages if with_scores). A fork's child
 *  inherits `growth`.
 *  An append within the reservation never fails for lack of blocks. This guarantee ends when a private block of the table
 *  - becomes shared: the sequence is forked, the block is held, or another sequence hits it in the prefix cache;
 *  - is given up while a copy pins it; or
 *  - is cached and then rolled back in part.
 *  The caller may then reserve again. When a commit or rollback gives up blocks of the table, they are promised to it again.
 *  @param manager a manager. @param seq a sequence. @param reserve see kvf_reserve.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (more than max_slots; growth and fresh together), KVF_E_NO_BLOCKS, KVF_E_STATE (the sequence is swapped out).
 *  @cost O(tables); without growth plus the blocks of tables that were forked, and once after a kvf_block_hold those of any table; no
 *  allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_reserve(kvf_manager *manager, kvf_seq seq, const kvf_reserve *reserve);

/** Gives every table of the sequence score pages for n_slots slots. From now on score pages are added and freed together
 *  with the table's blocks. Called once, at the end of the prompt, with the sizes after compaction.
 *  @param manager a manager. @param seq a sequence without score pages.
 *  @param n_slots [n_layers][n_groups]: slots to cover now, each at most the table's; a window's tables get no pages.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_STATE (has score pages already, is swapped out), KVF_E_INVALID, KVF_E_NO_BLOCKS.
 *  @cost O(pages), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_take_scores(kvf_manager *manager, kvf_seq seq, const uint32_t *n_slots);

typedef struct kvf_append_item {
    kvf_seq seq;
    uint32_t n_tokens; /* 1 or more: slots to add to every table of the sequence, except in layers that keep nothing */
} kvf_append_item;

/** Appends slots for new tokens to a batch of sequences, in every layer, all or nothing. If a table's last block is partly
 *  filled and shared, a fresh block replaces it in this table and a copy is appended to the list (copy-on-write). A table of
 *  a window w first drops the leading blocks whose positions are all <= next_pos - w: none of the new tokens sees them. So it
 *  never holds more than w + n_tokens + block_size - 2 slots. Private blocks that it drops are available to this append.
 *  @param manager a manager. @param items distinct sequences. @param n_items how many.
 *  @param copies copies to carry out before the new slots are written.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (0 tokens, a sequence twice, more than max_seqs items), KVF_E_LIMIT (max_slots, 2^32
 *  positions, list capacity, n_table_blocks), KVF_E_NO_BLOCKS, KVF_E_STATE (a compaction is under way, a sequence is swapped out).
 *  @cost O(tables + blocks taken), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_append(kvf_manager *manager, const kvf_append_item *items, uint32_t n_items,
                                        kvf_copy_list *copies);

/** Whether kvf_append would succeed, and how many blocks are missing if not.
 *  @param manager a manager. @param items see kvf_append. @param n_items how many.
 *  @param n_missing missing blocks or missing score pages, the larger number, or NULL.
 *  @own nothing. @threads as the manager. @errors those of kvf_append. @cost O(tables). */
KVF_API KVF_CHECK kvf_status kvf_can_append(const kvf_manager *manager, const kvf_append_item *items, uint32_t n_items,
                                            uint32_t *n_missing);

/** Removes the newest n_tokens from every table, to undo the append of a step that was not run. Valid only if nothing was
 *  evicted since that append. A window that has dropped blocks since may not allow it: each of its tables must keep
 *  min(w - 1, next_pos) slots, where next_pos is the position after the rollback.
 *  @param manager a manager. @param seq a sequence. @param n_tokens 0..the shortest table.
 *  @own nothing. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (more than a table has, or a window would keep too few), KVF_E_STATE (a compaction is
 *  under way, the sequence is swapped out). @cost O(tables + blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_rollback(kvf_manager *manager, kvf_seq seq, uint32_t n_tokens);

/* ---- The host tier -------------------------------------------------------------------------- */

/* A sequence that is swapped out lies on the host and its tables are empty. Until it is swapped in, append, fork, rollback,
 * compaction, reservations, the view and the prefix cache refuse it (KVF_E_STATE). It keeps its handle, index, next position
 * and reservations. It may be freed. */

/** Swaps sequences out to the host, all or nothing. Every block and score page that their tables hold is copied, so a
 *  compressed sequence moves at its compressed size. A block that several of these sequences share is copied once. If others
 *  hold it too (a fork that is not swapped, the prefix cache), it also stays on the device. The device's blocks become free
 *  when the copies are done. The promises end at once; kvf_swap_in restores them.
 *  @param manager a manager. @param seqs distinct sequences. @param n_seqs how many.
 *  @param copies copies to carry out (KVF_COPY_BLOCK_OUT, KVF_COPY_SCORE_OUT).
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_STATE (swapped out already, a compaction is under way), KVF_E_INVALID (a sequence twice),
 *  KVF_E_NO_BLOCKS (too few host blocks, or no host tier), KVF_E_LIMIT (list capacity).
 *  @cost O(tables + blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_swap_out(kvf_manager *manager, const kvf_seq *seqs, uint32_t n_seqs,
                                          kvf_copy_list *copies);

/** Swaps sequences in, all or nothing, with the reservations they had. Sequences that were swapped out in one call and are
 *  swapped in in one call share again the blocks that they shared. The host's blocks become free when the copies are done.
 *  The call is allowed before the copies of kvf_swap_out are done, but its own copies must run after those.
 *  @param manager a manager. @param seqs distinct swapped sequences. @param n_seqs how many.
 *  @param n_tokens 0 or more: fails unless each sequence could then append that many tokens, even if no window dropped
 *  blocks for them (they are not appended).
 *  @param copies copies to carry out before the sequences are read or written (KVF_COPY_BLOCK_IN, KVF_COPY_SCORE_IN).
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_STATE (not swapped out), KVF_E_INVALID (a sequence twice), KVF_E_NO_BLOCKS, KVF_E_LIMIT
 *  (list capacity). @cost O(tables + blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_swap_in(kvf_manager *manager, const kvf_seq *seqs, uint32_t n_seqs, uint32_t n_tokens,
                                         kvf_copy_list *copies);

/** Whether a sequence is swapped out.
 *  @param manager a manager. @param seq a sequence. @param swapped 1 or 0.
 *  @own nothing. @threads as the manager. @errors KVF_E_STALE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_is_swapped(const kvf_manager *manager, kvf_seq seq, int *swapped);

/* ---- Compaction: begin, let the policy write, commit -------------------------------------- */

/* One (sequence, layer) to shrink: all its tables to n_keep slots, or each table to its entry in n_keep_group. The layer has
 * no window. */
typedef struct kvf_compact_item {
    kvf_seq seq;
    uint32_t layer;
    uint32_t n_keep; /* 1..n_slots - 1; not read if n_keep_group is given */
    /* [n_groups], read by kvf_compact_begin; NULL: n_keep for each. 1..n_slots of the group's table; at least one table
     * shrinks. A table that keeps all its slots stays unchanged: it may be read but not written. */
    const uint32_t *n_keep_group;
} kvf_compact_item;

/* Where the kept slots are written. For table t = item * n_groups + group: in place if dst_row[t] is NULL, otherwise into the
 * fresh blocks dst_row[t][0 .. ceil(n_keep / block_size)). Writers must finish every table that has a dst_row before they
 * write a table in place: the one in place may hold blocks that another table still reads. */
typedef struct kvf_compaction {
    const kvf_compact_item *items; /* the caller's array */
    uint32_t n_items;
    uint32_t n_groups;
    const uint32_t *const *dst_row; /* [n_items * n_groups], the manager's */
} kvf_compaction;

/** Prepares a compaction. It decides for every table whether it is written in place or to fresh blocks, and takes the fresh
 *  blocks, all or nothing.
 *  A table gets ceil(n_keep / block_size) fresh blocks if any of its blocks is shared, held by kvf_block_hold or pinned by a
 *  pending copy. If several holders of a block are in the batch, all but the last get fresh blocks.
 *  A table with cached blocks gets fresh blocks too, so that the cached ones stay as they are. If the blocks that are neither
 *  in use nor promised do not suffice for all such tables, the cached blocks of one sequence after another are removed from
 *  the prefix cache, with the nodes below them, until they suffice. Tables whose blocks were removed are written in place.
 *  Any other table is written in place. Until commit or cancel the sequences accept no append, fork or rollback.
 *  @param manager a manager with no compaction under way. @param items distinct (seq, layer). @param n_items how many,
 *  at most max_seqs * n_layers. @param out filled; valid until commit or cancel.
 *  @own items stay the caller's and must live until then. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (n_keep, a pair twice, a window), KVF_E_NO_BLOCKS, KVF_E_STATE (one is under way
 *  already, or a sequence is swapped out).
 *  @cost O(tables) if nothing is shared, otherwise O(their blocks); also O(their blocks) once after a kvf_block_hold on a
 *  table's block; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_compact_begin(kvf_manager *manager, const kvf_compact_item *items, uint32_t n_items,
                                               kvf_compaction *out);

/** Ends the compaction: each table takes its fresh blocks, if any, and shrinks to n_keep slots. The blocks and score pages
 *  that it no longer needs become free at once.
 *  @param manager a manager with a compaction under way.
 *  @own nothing. @threads as the manager. @errors KVF_E_STATE. @cost O(blocks given up), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_compact_commit(kvf_manager *manager);

/** Cancels the compaction: the fresh blocks become free again and the tables stay as they were. Blocks that
 *  kvf_compact_begin removed from the prefix cache stay out of it. Valid only before anything was written in place.
 *  @param manager a manager. @own nothing. @threads as the manager. @errors KVF_E_STATE. @cost O(fresh blocks). */
KVF_API KVF_CHECK kvf_status kvf_compact_cancel(kvf_manager *manager);

/* ---- The view ------------------------------------------------------------------------------ */

/* The tables of a batch in all layers, for a kernel. The i-th sequence of the batch has the tables
 * t = (i * n_layers + layer) * n_groups + group. rows[row_offset[t] + b] is the id of the table's b-th block; slot s lies in
 * block b = s / block_size. A row has room for more blocks than the table has;
 * the entries after the table's last block, as far as the row reaches, are KVF_NO_BLOCK. A row whose table outgrows it is placed elsewhere in the same array. Kernels that
 * read row_offset from memory, as they read rows, need not know: the arrays themselves never move, so a captured graph stays
 * valid. One that has a row's address in it is captured again when row_offset has changed. */
struct kvf_view_stamp; /* internal */

typedef struct kvf_view {
    size_t struct_size;
    uint32_t n_seqs, n_layers, n_groups, heads_per_group, block_size;
    const uint32_t *rows;       /* block ids; the address never changes (with view_copies: it is one per buffer) */
    const uint32_t *score_rows; /* score page ids, same offsets; KVF_NO_BLOCK for blocks without one */
    const uint64_t *row_offset; /* [n_seqs][n_layers][n_groups] */
    const uint32_t *n_slots;    /* [n_seqs][n_layers][n_groups] */
    const uint32_t *next_pos;   /* [n_seqs] */
    const uint32_t *seq_index;  /* [n_seqs], kvf_seq_index */
    /* Set by kvf_view_fill. By them a call that takes the view knows without reading the rows that all ids are in range, and refuses a
     * view whose buffer has been filled again. stamp NULL, as in a view of your own: the call reads all ids itself. */
    const struct kvf_view_stamp *stamp; /* in the manager */
    uint64_t generation;
} kvf_view;

/** Fills one of the manager's two view buffers. A step may use one buffer while the other is filled for the next step.
 *  @param manager a manager. @param which 0 or 1. @param seqs the batch, in the order kernels will see.
 *  @param n_seqs at most max_seqs. @param out the view, its struct_size set by the caller. Its arrays are valid until the
 *  same buffer is filled again; calls refuse it from then on (KVF_E_STALE). With view_copies nothing in it changes before. Without, rows are the
 *  tables' own: a call that takes blocks (append, fork, prefix attach) may move any row, so a view ends with it.
 *  @own the manager's. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (which), KVF_E_LIMIT (n_seqs), KVF_E_STATE (a sequence is swapped out).
 *  @cost O(n_seqs * tables), with view_copies plus the changed entries; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_view_fill(kvf_manager *manager, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs,
                                           kvf_view *out);

/* ---- Copies of the view: a device's memory --------------------------------------------------- */

/* With view_copies, the caller keeps a copy of each buffer's arrays in device memory, for kernels to read. The copy starts
 * with all bytes 0xff; rows and score_rows have kvf_view_row_entries entries. After each fill the caller sends the ranges that kvf_view_read_changes lists. The arrays of a buffer
 * change only when the same buffer is filled again; the transfers from it must be done by then. So while one step runs, the
 * next one can be filled and sent from the other buffer. */

typedef enum kvf_view_array {
    KVF_VIEW_ROWS = 0, /* uint32_t, like all except ROW_OFFSET */
    KVF_VIEW_SCORE_ROWS = 1,
    KVF_VIEW_ROW_OFFSET = 2, /* uint64_t */
    KVF_VIEW_N_SLOTS = 3,
    KVF_VIEW_NEXT_POS = 4,
    KVF_VIEW_SEQ_INDEX = 5,
    KVF_VIEW_ARRAYS = 6 /* one more than the last of this version */
} kvf_view_array;

typedef struct kvf_view_range {
    uint64_t first; /* entries [first, first + n) of the array */
    uint32_t n;
    uint32_t array; /* kvf_view_array */
} kvf_view_range;

typedef struct kvf_view_changes {
    size_t struct_size;
    const kvf_view_range *ranges; /* ascending by array, then in the order of the batch; none overlap */
    uint32_t n_ranges;
    uint64_t n_bytes; /* of the entries in all ranges */
} kvf_view_changes;

/** The entries of a buffer's rows, and of its score_rows. They depend on n_table_blocks, not on max_slots, and never change.
 *  @param manager a manager; NULL gives 0. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint64_t kvf_view_row_entries(const kvf_manager *manager);

/** What the last fill of a buffer has changed in its arrays since the previous fill of the same buffer.
 *  @param manager a manager with view_copies. @param which 0 or 1.
 *  @param out struct_size set by the caller; the ranges are valid until the same buffer is filled again.
 *  @own the manager's. @threads as the manager.
 *  @errors KVF_E_INVALID, KVF_E_UNSUPPORTED (no view_copies). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_view_read_changes(const kvf_manager *manager, uint32_t which, kvf_view_changes *out);

/** Resets a buffer: its next fill lists the whole batch as changed. For a device copy that starts again with all bytes 0xff.
 *  @param manager a manager with view_copies. @param which 0 or 1.
 *  @own nothing. @threads as the manager. @errors KVF_E_INVALID, KVF_E_UNSUPPORTED (no view_copies).
 *  @cost O(max_seqs * tables), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_view_forget(kvf_manager *manager, uint32_t which);

/* ---- Blocks held outside a table ------------------------------------------------------------ */

/** Takes one free block for a holder outside the tables.
 *  @param manager a manager. @param block_class under n_classes; 0 without classes. @param out its handle.
 *  @own the caller, kvf_block_release. @threads as the manager.
 *  @errors KVF_E_NO_BLOCKS, KVF_E_INVALID (block_class). @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_block_take(kvf_manager *manager, uint32_t block_class, kvf_block *out);

/** Adds a holder to a block that has one already.
 *  @param manager a manager. @param id the block's id (from a row or kvf_block_id). @param out a handle.
 *  @own the caller, kvf_block_release. @threads as the manager.
 *  @errors KVF_E_STALE (the block is free, the id out of range), KVF_E_LIMIT (2^32 holders). @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_block_hold(kvf_manager *manager, uint32_t id, kvf_block *out);

/** Releases one hold. The block becomes free with its last holder. Its handles become stale with its last hold.
 *  @param manager a manager. @param block a handle from take or hold.
 *  @own takes the handle. @threads as the manager.
 *  @errors KVF_E_STALE (the handle was released before or never existed; nothing changes). @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_block_release(kvf_manager *manager, kvf_block block);

/** The block id in a handle: an index into the KV memory.
 *  @param block a handle. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_block_id(kvf_block block);

/* ---- Accounting ------------------------------------------------------------------------------ */

typedef struct kvf_pool_occupancy {
    /* Blocks: n_free + n_held + n_cached_idle = n_total, n_promised <= n_free + n_cached_idle. */
    uint32_t n_total, n_free, n_held, n_promised;
    uint32_t n_held_max; /* high-water mark of n_held */
    uint32_t n_shared;   /* blocks with more than one holder */
} kvf_pool_occupancy;

/* With several classes these are sums over the classes. n_held_max and held_bytes_max are sums of maxima that the classes may
 * have reached at different times. */
typedef struct kvf_occupancy {
    size_t struct_size;
    kvf_pool_occupancy blocks, score_pages;
    uint32_t n_seqs, n_seqs_max;
    uint64_t slots_used, slots_idle; /* over all tables; idle: unused slots at the end of the tables' blocks */
    uint64_t held_bytes, held_bytes_max;
    uint32_t n_cached, n_cached_idle; /* blocks in the prefix cache; of these, the idle ones */
    kvf_pool_occupancy host_blocks, host_score_pages;
    uint32_t n_swapped; /* sequences that are swapped out */
    /* Host blocks in the prefix cache; of these, those without a pending copy. In the host's pool
     * n_free + n_held + n_host_cached_idle = n_total. */
    uint32_t n_host_cached, n_host_cached_idle;
} kvf_occupancy;

typedef struct kvf_layer_occupancy {
    uint32_t n_blocks; /* entries of the layer's tables: a block that two sequences share counts twice */
    uint32_t n_blocks_max;
    uint64_t slots_used, slots_idle;
} kvf_layer_occupancy;

/** The figures of the pools and, for each layer, of all sequences together.
 *  @param manager a manager. @param out struct_size set by the caller. @param layers [n_layers] or NULL.
 *  @param layer_bytes sizeof *layers.
 *  @own plain values. @threads as the manager. @errors KVF_E_INVALID. @cost O(n_layers), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_occupancy_read(const kvf_manager *manager, kvf_occupancy *out,
                                                kvf_layer_occupancy *layers, size_t layer_bytes);

/** The figures of one class: its pools on the device and on the host.
 *  @param manager a manager. @param block_class under n_classes. @param blocks result. @param host_blocks result, or NULL.
 *  @param n_cached_idle the class's idle blocks in the prefix cache, or NULL.
 *  @own plain values. @threads as the manager. @errors KVF_E_INVALID. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_class_occupancy(const kvf_manager *manager, uint32_t block_class,
                                                 kvf_pool_occupancy *blocks, kvf_pool_occupancy *host_blocks,
                                                 uint32_t *n_cached_idle);

/** The figures of one sequence for each layer (n_blocks_max: since its creation).
 *  @param manager a manager. @param seq a sequence. @param layers [n_layers]. @param layer_bytes sizeof *layers.
 *  @own plain values. @threads as the manager. @errors KVF_E_STALE, KVF_E_INVALID. @cost O(tables). */
KVF_API KVF_CHECK kvf_status kvf_seq_occupancy(const kvf_manager *manager, kvf_seq seq, kvf_layer_occupancy *layers,
                                               size_t layer_bytes);

/** How many blocks of a sequence, over all its tables, have no other holder, and how many have one.
 *  @param manager a manager. @param seq a sequence. @param n_own blocks without another holder, or NULL.
 *  @param n_shared blocks with another holder, or NULL.
 *  @own plain values. @threads as the manager. @errors KVF_E_STALE. @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_seq_sharing(const kvf_manager *manager, kvf_seq seq, uint64_t *n_own,
                                             uint64_t *n_shared);

/** Checks every invariant by walking all data: free + held + cached idle = total, each block's references = its appearances
 *  in tables + holds + pins, no block is both free and referenced, promises and counters are right; likewise score pages.
 *  @param manager a manager. @param err names the first broken invariant, or NULL.
 *  @own nothing. @threads as the manager. @errors KVF_E_CORRUPT, KVF_E_INVALID. @cost O(everything), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_audit(const kvf_manager *manager, kvf_error *err);

#ifdef __cplusplus
}
#endif
#endif
