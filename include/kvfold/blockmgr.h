/* kvfold/blockmgr.h: the block manager. Host metadata only: it knows block ids and byte
 * sizes, never a pointer into the KV memory, which belongs to the caller.
 *
 * Nouns
 *   head group   the KV heads of a layer that share one block table; by default all of this rank's.
 *   block        block_size token slots of one head group's K and V; any block serves any layer,
 *                group and sequence: what one gives up another has at once.
 *   class        layers whose blocks have equal bytes. Where some have other KV heads or another head_dim, each class has a pool of
 *                its own; ids count on from class to class, so that an id says which class it is of.
 *   table        per (sequence, layer, head group): the block ids and the number of slots used.
 *                Tables of one sequence differ in length once a policy has evicted.
 *   score page   what one sequence has accumulated over one block's slots. From a pool of its own,
 *                private to a sequence, copied at a fork, parallel to the table's blocks.
 *   reservation  blocks promised to a table beyond those it holds: a count, not blocks.
 *                Always: promised <= free + cached idle.
 *   cached       a block that the prefix cache finds (prefix.h); idle when nobody refers to it: it is then
 *                handed out when no other is free.
 *   shared       a block that a second table holds too. A shared block is read-only.
 *   window       a layer whose queries see its newest w positions alone, themselves included. Its tables are cut off at the
 *                front, block by block, as tokens arrive; their slots are always the newest positions, ascending.
 *   copy list    work for the caller: copy block src to block dst. A ticket pins both until done.
 *   host tier    a second pool of ids, for memory beyond the device: where a swapped sequence lies.
 *   view         what a kernel gets for a batch, all layers at once.
 *
 * All or nothing: a call that needs blocks in 48 layers gets them all or changes nothing.
 * Running out is the ordinary status KVF_E_NO_BLOCKS. No allocation after create.
 * NULL for an object or an output that is not optional is KVF_E_INVALID in every call.
 */
#ifndef KVFOLD_BLOCKMGR_H
#define KVFOLD_BLOCKMGR_H

#include "kvfold/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_manager kvf_manager;

/* A sequence. Carries a generation and its manager's tag: a handle that was freed, or that
 * another manager gave out, is KVF_E_STALE. 0 is never a sequence. */
typedef uint64_t kvf_seq;

/* A block by handle (id and generation), for callers that hold blocks outside a table. */
typedef uint64_t kvf_block;

#define KVF_NO_BLOCK UINT32_MAX

/* As a layer's window: the layer keeps nothing, its tables stay empty (it has no KV, or reads another layer's). */
#define KVF_LAYER_NONE UINT32_MAX

#define KVF_BLOCK_CLASSES_MAX 8u

/* A pool of blocks for layers of one geometry. The first class has the ids from 0 on, the next those that follow, on the
 * host likewise: in the memory of class c, an id stands at id - (blocks of the classes before it). */
typedef struct kvf_block_class {
    uint32_t n_blocks; /* 1.. */
    uint32_t n_host_blocks;
    uint64_t block_bytes; /* as kvf_manager_config.block_bytes */
} kvf_block_class;

typedef struct kvf_manager_config {
    size_t struct_size;
    uint32_t n_layers;            /* 1..1024 */
    uint32_t n_kv_heads;          /* KV heads of this rank, 1..1024 */
    uint32_t heads_per_group;     /* divides n_kv_heads; 0: n_kv_heads, one group a layer */
    uint32_t block_size;          /* slots; a power of two in [8, 256]; 0: 16 */
    uint32_t n_blocks;            /* 1..2^31 */
    uint32_t n_score_pages;       /* 0: n_blocks */
    uint32_t max_seqs;            /* sequences alive at once, 1..2^20; 0: 256 */
    uint32_t max_slots;           /* most slots of one table, in general the model's context; 0: 8192 */
    uint64_t block_bytes;         /* K and V of one block, for figures in bytes; 0: figures in bytes are 0 */
    kvf_allocator allocator;      /* all zero: the default */
    uint32_t prefix_cache;        /* 1: keep a prefix cache (prefix.h); 0: none, at no cost */
    uint32_t prefix_eviction;     /* kvf_prefix_eviction; 0: LRU */
    uint32_t n_snapshot_pages;    /* pages of block_size tokens for snapshots of column sums; 0: none */
    uint32_t reserved;            /* 0 */
    uint64_t snapshot_page_bytes; /* of one such page, for figures in bytes */
    const struct kvf_profile_config *profile; /* kvfold/profile.h; copied; NULL: keeps no profile */
    uint32_t n_host_blocks;                   /* blocks of the host tier, under 2^31; 0: none */
    uint32_t n_host_score_pages;              /* score pages of the host tier, likewise */
    /* [n_layers], copied: 0: every position is kept (until a policy evicts it); KVF_LAYER_NONE; else the layer's window. Tables
     * of a window have no score pages and are never compacted. NULL: all 0. */
    const uint32_t *layer_windows;
    uint32_t view_copies; /* 1: each view buffer has rows of its own and lists what has changed in them; 0: none */
    /* Layers of different geometry: 1..KVF_BLOCK_CLASSES_MAX classes, copied; n_blocks and n_host_blocks are then 0 or the sums,
     * block_bytes 0. A block is of its layer's class in every call; block_size and the number of head groups are the same in all, how many
     * KV heads a group of a class has is the caller's business. Score pages have one pool: of the largest group. 0: one class. */
    uint32_t n_classes;
    const kvf_block_class *classes; /* [n_classes] */
    const uint32_t
        *layer_class; /* [n_layers], copied: each under n_classes, and each class with a layer. NULL: all 0 */
} kvf_manager_config;

/** A config with struct_size set and every default filled in; n_layers, n_kv_heads and n_blocks stay 0.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API kvf_manager_config kvf_manager_config_default(void);

/** Bytes of metadata that a manager of this config takes, all of it at create.
 *  @param config see above. @param bytes result. @param err detail, or NULL.
 *  @own nothing. @threads any.
 *  @errors KVF_E_INVALID (a field out of range), KVF_E_OVERFLOW (sizes wrap), KVF_E_UNSUPPORTED (longer struct).
 *  @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_manager_bytes(const kvf_manager_config *config, size_t *bytes, kvf_error *err);

/** Creates a manager with all blocks free: one slab, one allocation.
 *  @param config see above. @param out the manager. @param err detail, or NULL.
 *  @own the caller, kvf_manager_destroy. @threads any; the manager itself one thread at a time.
 *  @errors those of kvf_manager_bytes, KVF_E_NO_MEMORY.
 *  @cost O(n_blocks + max_seqs), with view_copies O(max_seqs * tables * blocks of max_slots) besides; allocates once. The rows of
 *  a sequence are written when there is first one in its place: with the default allocator the others take no memory. */
KVF_API KVF_CHECK kvf_status kvf_manager_create(const kvf_manager_config *config, kvf_manager **out, kvf_error *err);

/** Frees the manager with everything in it; NULL is allowed. Handles into it become invalid.
 *  @param manager a manager.
 *  @own takes the manager. @threads no other call may run. @errors none. @cost one free. */
KVF_API void kvf_manager_destroy(kvf_manager *manager);

/** Detail of the manager's last failed call, "" when none has failed.
 *  @param manager a manager.
 *  @own the manager's, until its next failing call. @threads as the manager. @errors none. @cost O(1). */
KVF_API const char *kvf_manager_error(const kvf_manager *manager);

/** The config as resolved (defaults filled in).
 *  @param manager a manager.
 *  @own the manager's. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_manager_config *kvf_manager_get_config(const kvf_manager *manager);

/* ---- Copy lists -------------------------------------------------------------------------- */

typedef enum kvf_copy_kind {
    KVF_COPY_BLOCK = 0,      /* K, V and slot metadata of a block */
    KVF_COPY_SCORE_PAGE = 1, /* a score page */
    KVF_COPY_BLOCK_OUT = 2,  /* a block of the device to one of the host */
    KVF_COPY_BLOCK_IN = 3,   /* a block of the host to one of the device */
    KVF_COPY_SCORE_OUT = 4,  /* likewise score pages */
    KVF_COPY_SCORE_IN = 5,
    KVF_COPY_KINDS = 6 /* one more than the last of this version */
} kvf_copy_kind;

typedef struct kvf_copy {
    uint32_t kind;    /* kvf_copy_kind */
    uint32_t src;     /* id */
    uint32_t dst;     /* id */
    uint32_t n_slots; /* leading slots that hold something; a whole copy is allowed too */
} kvf_copy;

/* The caller's buffer. A call appends to items and raises n. If capacity is too small the call
 * fails with KVF_E_LIMIT and changes nothing; n_tables + n_score_pages of the parent always do.
 * A NULL list is one of capacity 0. Copies are carried out in order, before the slots that the call
 * made are written and before anything else is written into either end. */
typedef struct kvf_copy_list {
    kvf_copy *items;
    uint32_t n;
    uint32_t capacity;
} kvf_copy_list;

/** Says that all copies of a list have been carried out: unpins both ends and empties the list.
 *  Until then neither end can be handed out again, whatever is freed.
 *  @param manager a manager. @param copies a list that calls on this manager filled.
 *  @own nothing. @threads as the manager.
 *  @errors KVF_E_STALE (an item that is not pending; nothing is changed), KVF_E_INVALID (n above the capacity).
 *  @cost O(items), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_copies_done(kvf_manager *manager, kvf_copy_list *copies);

/* ---- Sequences ---------------------------------------------------------------------------- */

/** A new sequence with empty tables in all layers.
 *  @param manager a manager. @param out the handle.
 *  @own the caller, kvf_seq_free. @threads as the manager.
 *  @errors KVF_E_LIMIT (max_seqs alive). @cost O(tables), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_create(kvf_manager *manager, kvf_seq *out);

/** A child that shares every block of its parent and copies its score pages (the copies are appended
 *  to the list). The child is promised the parent's whole reservation again, in every table that
 *  has one, since its first compaction will need fresh blocks.
 *  @param manager a manager. @param parent a sequence with no compaction under way.
 *  @param copies score page copies to carry out. @param out the child.
 *  @own the caller, kvf_seq_free. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_LIMIT (max_seqs, list capacity), KVF_E_NO_BLOCKS (score pages or promise), KVF_E_STATE (a
 *  compaction of the parent is under way, or it lies on the host).
 *  @cost O(blocks of the parent), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_fork(kvf_manager *manager, kvf_seq parent, kvf_copy_list *copies, kvf_seq *out);

/** Frees a sequence: its blocks that nobody else holds and its score pages fall free at once
 *  (blocks pinned by a pending copy when that is done), its promises are dropped.
 *  @param manager a manager. @param seq a sequence; a compaction that it takes part in is cancelled first, as a whole.
 *  @own takes the handle. @threads as the manager. @errors KVF_E_STALE. @cost O(its blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_free(kvf_manager *manager, kvf_seq seq);

/** The small number of a live sequence, < max_seqs: where parallel arrays (a policy's state) keep it.
 *  @param manager a manager. @param seq a sequence. @param index result.
 *  @own nothing. @threads as the manager. @errors KVF_E_STALE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_index(const kvf_manager *manager, kvf_seq seq, uint32_t *index);

/** Slots and blocks of one table.
 *  @param manager a manager. @param seq a sequence. @param layer layer. @param group head group.
 *  @param n_slots slots used, or NULL. @param n_blocks blocks held, or NULL.
 *  @param blocks first block id of the table's row, or NULL; valid until the next call that changes seq.
 *  @own the row is the manager's. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (layer or group). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_table(const kvf_manager *manager, kvf_seq seq, uint32_t layer, uint32_t group,
                                           uint32_t *n_slots, uint32_t *n_blocks, const uint32_t **blocks);

/** The position the next appended token will have: all tokens appended so far, evicted ones included.
 *  @param manager a manager. @param seq a sequence. @param next_pos result.
 *  @own nothing. @threads as the manager. @errors KVF_E_STALE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_next_pos(const kvf_manager *manager, kvf_seq seq, uint32_t *next_pos);

/** Sets the reservation of every table: each is promised ceil(n_slots / block_size) blocks in all, those it
 *  holds privately included (and as many score pages when with_scores). Replaces the former one; 0 drops it.
 *  A growth within its reservation never fails for want of blocks, until a block that the table held privately
 *  becomes shared (by a fork of this sequence, a hold, or another's hit on what it has stored), or is given up while a
 *  copy pins it, or is cached and taken back in part by a rollback; then the caller may reserve again. A commit or a
 *  rollback gives back the promise for what the table gives up.
 *  @param manager a manager. @param seq a sequence.
 *  @param n_slots [n_layers][n_groups], slots; each at most max_slots. Of a window, what it holds at most: in a sequence that
 *  grows by up to n tokens at once that is w + n + block_size - 2 slots, whatever its length. Nothing is promised to a layer
 *  that keeps nothing, no score page to a window.
 *  @param with_scores whether score pages are promised too.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (more than max_slots), KVF_E_NO_BLOCKS, KVF_E_STATE (it lies on the host).
 *  @cost O(tables), and the blocks of tables that were forked, of any once after a kvf_block_hold; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_reserve(kvf_manager *manager, kvf_seq seq, const uint32_t *n_slots,
                                             int with_scores);

/* A reservation in full. growth = 0 is for a sequence that may be compacted, which takes fresh blocks for all that it
 * shares: only private blocks count as held. 1 is for one that only grows: all its blocks count, but a partly filled last one
 * that an append would have to copy; it is safe until that one becomes shared, or shared blocks are rolled back. */
typedef struct kvf_reserve {
    size_t struct_size;
    const uint32_t *n_slots; /* [n_layers][n_groups], slots; each at most max_slots */
    int with_scores;         /* whether score pages are promised too */
    int growth;
    int fresh; /* 1: a table with a block that another sequence holds is promised all of it: before the first event of a
                * sequence that holds private blocks too, and will write to fresh ones (not with growth) */
} kvf_reserve;

/** kvf_seq_reserve with all that a reservation has; a fork's child inherits `growth`.
 *  @param manager a manager. @param seq a sequence. @param reserve see kvf_reserve.
 *  @own nothing is kept. @threads as the manager.
 *  @errors those of kvf_seq_reserve; KVF_E_INVALID also for `growth` and `fresh` together.
 *  @cost as kvf_seq_reserve; with `growth` O(tables). */
KVF_API KVF_CHECK kvf_status kvf_seq_reserve_as(kvf_manager *manager, kvf_seq seq, const kvf_reserve *reserve);

/** Gives every table of the sequence score pages for its present slots and for all that it will hold: from now
 *  on they grow and shrink with the blocks. Called once, at the prompt's end, with the sizes after compaction.
 *  @param manager a manager. @param seq a sequence without score pages.
 *  @param n_slots [n_layers][n_groups]: slots to cover now, each at most the table's; a window's tables get no pages.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_STATE (has them already, lies on the host), KVF_E_INVALID, KVF_E_NO_BLOCKS.
 *  @cost O(pages), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_take_scores(kvf_manager *manager, kvf_seq seq, const uint32_t *n_slots);

typedef struct kvf_append_item {
    kvf_seq seq;
    uint32_t n_tokens; /* 1 or more: slots to add to every table of the sequence whose layer keeps something */
} kvf_append_item;

/** Appends tokens to a batch of sequences, in every layer, all or nothing. Where a table's last block is partly
 *  filled and shared, a fresh block takes its place in this table and a copy is appended to the list. A table of a window
 *  w first gives up its leading blocks whose positions are all <= next_pos - w, which none of these tokens sees: so it never
 *  holds more than w + n_tokens + block_size - 2 slots. Such blocks of its own serve this very append.
 *  @param manager a manager. @param items distinct sequences. @param n_items how many.
 *  @param copies copies to carry out before the new slots are written.
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (0 tokens, a sequence twice, more than max_seqs items), KVF_E_LIMIT (max_slots, 2^32 positions, list
 *  capacity), KVF_E_NO_BLOCKS, KVF_E_STATE (a compaction under way, a sequence on the host).
 *  @cost O(tables + blocks taken), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_append(kvf_manager *manager, const kvf_append_item *items, uint32_t n_items,
                                        kvf_copy_list *copies);

/** Whether kvf_append would succeed, and what it lacks if not.
 *  @param manager a manager. @param items see kvf_append. @param n_items how many.
 *  @param n_missing blocks (or score pages, the larger lack) that are missing, or NULL.
 *  @own nothing. @threads as the manager. @errors those of kvf_append. @cost O(tables). */
KVF_API KVF_CHECK kvf_status kvf_can_append(const kvf_manager *manager, const kvf_append_item *items, uint32_t n_items,
                                            uint32_t *n_missing);

/** Takes back the newest n_tokens of every table: a step that was planned and not run. Only right when nothing was
 *  evicted since they were appended. A window that has moved on since can not be taken back: each of its tables must be
 *  left with min(w - 1, next_pos) slots.
 *  @param manager a manager. @param seq a sequence. @param n_tokens 0..the shortest table.
 *  @own nothing. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (more than a table has, a window that has moved on), KVF_E_STATE (a compaction under way,
 *  on the host). @cost O(tables + blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_seq_rollback(kvf_manager *manager, kvf_seq seq, uint32_t n_tokens);

/* ---- The host tier -------------------------------------------------------------------------- */

/* A swapped sequence lies on the host: its tables are empty, and until it is back append, fork, rollback, compaction,
 * reservations, the view and the prefix cache refuse it (KVF_E_STATE). It keeps its handle, its index, its next position
 * and its reservations; freeing it is allowed. */

/** Moves sequences to the host, all or nothing: each block and score page that their tables hold, so a compressed one
 *  at its compressed size. A block that several of them share has one copy there; other holders of it (a fork that stays, the
 *  prefix cache) keep it here. The device blocks fall free once the copies are done; the promises at once, though they
 *  are remembered.
 *  @param manager a manager. @param seqs distinct sequences. @param n_seqs how many.
 *  @param copies copies to carry out (KVF_COPY_BLOCK_OUT, KVF_COPY_SCORE_OUT).
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_STATE (swapped already, a compaction under way), KVF_E_INVALID (a sequence twice),
 *  KVF_E_NO_BLOCKS (the host has too few, or no host tier), KVF_E_LIMIT (list capacity).
 *  @cost O(tables + blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_swap_out(kvf_manager *manager, const kvf_seq *seqs, uint32_t n_seqs,
                                          kvf_copy_list *copies);

/** Brings sequences back, all or nothing: with the reservations they had, and only where there is room for n_tokens more
 *  of each besides (which are not appended; a window counts as if it gave nothing up for them). What they shared among themselves they share again. The host's blocks fall free once the
 *  copies are done; they may begin before those that brought the sequences out are done, but run after them.
 *  @param manager a manager. @param seqs distinct swapped sequences. @param n_seqs how many. @param n_tokens 0 or more.
 *  @param copies copies to carry out before the sequences are read or written (KVF_COPY_BLOCK_IN, KVF_COPY_SCORE_IN).
 *  @own nothing is kept. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_STATE (not swapped), KVF_E_INVALID (a sequence twice), KVF_E_NO_BLOCKS, KVF_E_LIMIT
 *  (list capacity). @cost O(tables + blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_swap_in(kvf_manager *manager, const kvf_seq *seqs, uint32_t n_seqs, uint32_t n_tokens,
                                         kvf_copy_list *copies);

/** Whether a sequence lies on the host.
 *  @param manager a manager. @param seq a sequence. @param swapped 1 or 0.
 *  @own nothing. @threads as the manager. @errors KVF_E_STALE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_seq_is_swapped(const kvf_manager *manager, kvf_seq seq, int *swapped);

/* ---- Compaction: begin, let the policy write, commit -------------------------------------- */

/* One (sequence, layer) that shrinks to n_keep slots in each of its tables, or each table to a number of its own; no layer of
 * a window. */
typedef struct kvf_compact_item {
    kvf_seq seq;
    uint32_t layer;
    uint32_t n_keep; /* 1..n_slots - 1; not read where n_keep_group is given */
    /* [n_groups], read in kvf_compact_begin; NULL: n_keep in each. 1..n_slots of the group's table: one that keeps all its slots
     * is left as it is (it may be read, but not written), and at least one shrinks. */
    const uint32_t *n_keep_group;
} kvf_compact_item;

/* Where the kept slots go. Per item and group t = item * n_groups + group: in place when
 * dst_row[t] is NULL, else into these fresh blocks, ceil(n_keep / block_size) of them (n_keep of that table). Writers must
 * finish every table with a dst_row before they write one in place: a later in-place table may
 * hold blocks that an earlier one still reads. */
typedef struct kvf_compaction {
    const kvf_compact_item *items; /* the caller's array */
    uint32_t n_items;
    uint32_t n_groups;
    const uint32_t *const *dst_row; /* [n_items * n_groups], the manager's */
} kvf_compaction;

/** Prepares a compaction: a table with any block that another sequence holds gets ceil(n_keep / block_size) fresh
 *  blocks, all such tables at once, and so does one with a block that kvf_block_hold or a pending copy holds; a private
 *  one is written in place. If several owners of a block are in the batch, all but the last get fresh blocks. Tables with
 *  cached blocks get fresh blocks too as far as spare ones suffice for all of them; else,
 *  sequence by sequence, their blocks and all that follows on them are taken out of the prefix cache. Until
 *  commit or cancel the sequences accept no append, fork or rollback.
 *  @param manager a manager with no compaction under way. @param items distinct (seq, layer). @param n_items how many,
 *  at most max_seqs * n_layers. @param out filled; valid until commit or cancel.
 *  @own items stay the caller's and must live until then. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (n_keep, a pair twice, a window), KVF_E_NO_BLOCKS, KVF_E_STATE (one is under way, or a
 *  sequence lies on the host).
 *  @cost O(tables) when nothing is shared, else O(their blocks), once after a kvf_block_hold on a table's block too; no
 *  allocation. */
KVF_API KVF_CHECK kvf_status kvf_compact_begin(kvf_manager *manager, const kvf_compact_item *items, uint32_t n_items,
                                               kvf_compaction *out);

/** Ends it: tables take their fresh rows, shrink to n_keep slots, and every block beyond falls free at once.
 *  Score pages beyond fall free likewise.
 *  @param manager a manager with a compaction under way.
 *  @own nothing. @threads as the manager. @errors KVF_E_STATE. @cost O(blocks given up), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_compact_commit(kvf_manager *manager);

/** Drops it: fresh blocks go back, nothing else has changed but what has left the prefix cache. Right only before
 *  anything was written in place.
 *  @param manager a manager. @own nothing. @threads as the manager. @errors KVF_E_STATE. @cost O(fresh blocks). */
KVF_API KVF_CHECK kvf_status kvf_compact_cancel(kvf_manager *manager);

/* ---- The view ------------------------------------------------------------------------------ */

/* What a kernel gets for a batch, all layers at once. Table t = (i * n_layers + layer) * n_groups + group for
 * the i-th sequence of the batch. rows[row_offset[t] + b] is its b-th block; slot s lies in block s / block_size.
 * A row's place follows from kvf_seq_index and has room for max_slots (without view_copies: for n_blocks where these are fewer);
 * what lies beyond a table's blocks is KVF_NO_BLOCK. */
typedef struct kvf_view {
    size_t struct_size;
    uint32_t n_seqs, n_layers, n_groups, heads_per_group, block_size;
    const uint32_t *rows; /* block ids; base address fixed for the manager's life (with view_copies: of the buffer) */
    const uint32_t *score_rows; /* score page ids, same offsets; KVF_NO_BLOCK where a table has none */
    const uint64_t *row_offset; /* [n_seqs][n_layers][n_groups] */
    const uint32_t *n_slots;    /* [n_seqs][n_layers][n_groups] */
    const uint32_t *next_pos;   /* [n_seqs] */
    const uint32_t *seq_index;  /* [n_seqs], kvf_seq_index */
} kvf_view;

/** Fills one of the manager's two view buffers (double buffered: a step may use one while the next is filled).
 *  @param manager a manager. @param which 0 or 1. @param seqs the batch, in the order kernels will see.
 *  @param n_seqs at most max_seqs. @param out the view, filled wholly (struct_size too): its arrays are the manager's
 *  and hold until the same buffer is filled again; n_slots are those of now, rows follow later growth or, with view_copies,
 *  do not.
 *  @own the manager's. @threads as the manager.
 *  @errors KVF_E_STALE, KVF_E_INVALID (which), KVF_E_LIMIT (n_seqs), KVF_E_STATE (a sequence lies on the host).
 *  @cost O(n_seqs * tables), with view_copies the changed entries besides; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_view_fill(kvf_manager *manager, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs,
                                           kvf_view *out);

/* ---- Copies of the view: a device's memory --------------------------------------------------- */

/* A kernel reads copies of a view's arrays, one for each buffer, that begin with all bytes 0xff. They are kept by sending what
 * a fill lists. The view's arrays, the source of what is sent, change only when the same buffer is filled again: by
 * then the copies out of it must be done, and so while one step runs the next can be filled and sent from the other one. */

typedef enum kvf_view_array {
    KVF_VIEW_ROWS = 0, /* uint32_t, as all but ROW_OFFSET */
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
    const kvf_view_range *ranges; /* ascending in array, then in the order of the batch; none overlap */
    uint32_t n_ranges;
    uint64_t n_bytes; /* of their entries */
} kvf_view_changes;

/** What the last fill of a buffer has changed in its arrays, against the fill before it of the same buffer.
 *  @param manager a manager with view_copies. @param which 0 or 1.
 *  @param out filled wholly (struct_size too); the ranges hold until the same buffer is filled again.
 *  @own the manager's. @threads as the manager.
 *  @errors KVF_E_INVALID, KVF_E_UNSUPPORTED (no view_copies). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_view_read_changes(const kvf_manager *manager, uint32_t which, kvf_view_changes *out);

/** Forgets what a buffer holds: its next fill lists all of its batch, for a copy that begins anew.
 *  @param manager a manager with view_copies. @param which 0 or 1.
 *  @own nothing. @threads as the manager. @errors KVF_E_INVALID, KVF_E_UNSUPPORTED (no view_copies).
 *  @cost O(max_seqs * tables * blocks of max_slots), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_view_forget(kvf_manager *manager, uint32_t which);

/* ---- Blocks held outside a table ------------------------------------------------------------ */

/** Takes one free block, of the first class, for a holder outside the tables.
 *  @param manager a manager. @param out its handle. @own the caller, kvf_block_release. @threads as the manager.
 *  @errors KVF_E_NO_BLOCKS. @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_block_take(kvf_manager *manager, kvf_block *out);

/** kvf_block_take of any class.
 *  @param manager a manager. @param block_class under n_classes. @param out its handle.
 *  @own the caller, kvf_block_release. @threads as the manager.
 *  @errors KVF_E_NO_BLOCKS, KVF_E_INVALID (block_class). @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_block_take_of(kvf_manager *manager, uint32_t block_class, kvf_block *out);

/** Adds a holder to a block that somebody holds.
 *  @param manager a manager. @param id the block's id (from a row or kvf_block_id). @param out a handle.
 *  @own the caller, kvf_block_release. @threads as the manager.
 *  @errors KVF_E_STALE (a free block, an id out of range), KVF_E_LIMIT (2^32 holders). @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_block_hold(kvf_manager *manager, uint32_t id, kvf_block *out);

/** Gives one hold up. The block falls free with its last holder; with its last hold its handles are stale.
 *  @param manager a manager. @param block a handle from take or hold.
 *  @own takes the handle. @threads as the manager.
 *  @errors KVF_E_STALE (freed before, or never given out: nothing changes). @cost O(1), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_block_release(kvf_manager *manager, kvf_block block);

/** The id in a handle, an index into the KV memory.
 *  @param block a handle. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_block_id(kvf_block block);

/* ---- Accounting ------------------------------------------------------------------------------ */

typedef struct kvf_pool_occupancy {
    /* Blocks: n_free + n_held + n_cached_idle = n_total, n_promised <= n_free + n_cached_idle. */
    uint32_t n_total, n_free, n_held, n_promised;
    uint32_t n_held_max; /* high-water mark of n_held */
    uint32_t n_shared;   /* held by more than one holder */
} kvf_pool_occupancy;

/* Of several classes: sums over them, n_held_max and held_bytes_max too, though they may not have stood highest at one time. */
typedef struct kvf_occupancy {
    size_t struct_size;
    kvf_pool_occupancy blocks, score_pages;
    uint32_t n_seqs, n_seqs_max;
    uint64_t slots_used, slots_idle; /* over all tables; idle: slots of held blocks beyond the table's slots */
    uint64_t held_bytes, held_bytes_max;
    uint32_t n_cached, n_cached_idle; /* blocks that the prefix cache finds; of them those that nobody refers to */
    kvf_pool_occupancy host_blocks, host_score_pages;
    uint32_t n_swapped; /* sequences on the host */
    /* Blocks of the host that the prefix cache finds; of them those that no copy is pending of. Of the host's pool, too,
     * n_free + n_held + n_host_cached_idle = n_total. */
    uint32_t n_host_cached, n_host_cached_idle;
} kvf_occupancy;

typedef struct kvf_layer_occupancy {
    uint32_t n_blocks; /* entries of the layer's tables: a block two sequences share counts twice */
    uint32_t n_blocks_max;
    uint64_t slots_used, slots_idle;
} kvf_layer_occupancy;

/** The pool's figures and, per layer, those of all sequences together.
 *  @param manager a manager. @param out struct_size set by the caller. @param layers [n_layers] or NULL.
 *  @own plain values. @threads as the manager. @errors KVF_E_INVALID. @cost O(n_layers), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_occupancy_read(const kvf_manager *manager, kvf_occupancy *out,
                                                kvf_layer_occupancy *layers);

/** The pool of one class: device and host.
 *  @param manager a manager. @param block_class under n_classes. @param blocks result. @param host_blocks result, or NULL.
 *  @param n_cached_idle its blocks that nobody refers to, kept for the prefix cache, or NULL.
 *  @own plain values. @threads as the manager. @errors KVF_E_INVALID. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_class_occupancy(const kvf_manager *manager, uint32_t block_class,
                                                 kvf_pool_occupancy *blocks, kvf_pool_occupancy *host_blocks,
                                                 uint32_t *n_cached_idle);

/** One sequence's figures per layer (n_blocks_max: since its creation).
 *  @param manager a manager. @param seq a sequence. @param layers [n_layers].
 *  @own plain values. @threads as the manager. @errors KVF_E_STALE, KVF_E_INVALID. @cost O(tables). */
KVF_API KVF_CHECK kvf_status kvf_seq_occupancy(const kvf_manager *manager, kvf_seq seq, kvf_layer_occupancy *layers);

/** How many of a sequence's blocks, over all its tables, nobody else holds, and how many somebody does.
 *  @param manager a manager. @param seq a sequence. @param n_own result, or NULL. @param n_shared result, or NULL.
 *  @own plain values. @threads as the manager. @errors KVF_E_STALE. @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_seq_sharing(const kvf_manager *manager, kvf_seq seq, uint64_t *n_own,
                                             uint64_t *n_shared);

/** Checks every invariant by walking everything: free + held = total, each block's references = its appearances over
 *  all tables, holds and pins, no block both free and referenced, promises and counters; likewise score pages.
 *  @param manager a manager. @param err names the first broken invariant, or NULL.
 *  @own nothing. @threads as the manager. @errors KVF_E_CORRUPT, KVF_E_INVALID. @cost O(everything), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_audit(const kvf_manager *manager, kvf_error *err);

#ifdef __cplusplus
}
#endif
#endif
