/* blockmgr/manager.h: the manager's own structs, each with its invariant. kvf_audit checks every one of them.
 *
 * Glossary, beyond kvfold/blockmgr.h and pool.h
 *   table index  t = (seq index * n_layers + layer) * n_groups + group; its row: kvf__row.
 *   seq layer    the groups of one (sequence, layer): sl = t / n_groups.
 *   run          adjacent layers that keep slots and have the same class and the same window (or none).
 *   blocks       m->blocks: the pools of the classes. They share the arrays indexed by id, so the first pool can read the
 *                state of any block.
 *   fresh row    blocks taken by kvf_compact_begin for a table that must not be written in place.
 *   private      private to a table: a block that only this table holds, and whose free slots it may write. A cached block
 *                is private unless it is the table's last block and its node covers slots beyond the table's.
 *   swapped      a sequence whose tables are empty and whose rows name ids of the host's pools (tier.c).
 *
 * Memory: one allocation (slab), in this order
 *   kvf_manager | error | blocks: free_ids, states, heads, entries | host_blocks, pages, host_pages: likewise
 *   | layer_class, with several classes | seqs
 *   | free_seqs
 *   | tables | n_slots | n_pages | promise | page_promise | private_at | tail_at | seq_blocks_max
 *   | layer_blocks | layer_blocks_max | layer_slots | rows: ids, pages, at, capacity | compaction: entries, dst_row, fresh
 *   | windows, runs | host_slots, n_host_pages, where there is a host tier
 *   | views: row_offset, n_slots, next_pos, seq_index (twice; with view_copies also rows of their own, ranges)
 *   | cache (cache.c), where there is one | profile, likewise
 *
 * Promises (R: the table's reservation in blocks, p: its promise, private: the number of its private blocks)
 *   - reserve sets p = max(0, R - private). A fork gives the child p = R, because it has no private blocks (with
 *     growth: R - the shared whole blocks).
 *   - Taking a block for the table lowers p. If p is 0, it needs a spare block.
 *   - rollback raises p by the blocks given up, to at most R - private: it undoes an append.
 *   - commit sets p = max(0, R - blocks held); all blocks held are private then. If p has to rise, the blocks that this
 *     table freed are used first, then spare blocks, table by table in the order of the batch.
 *   - attach, of cached blocks to an empty table, sets p = max(0, R - private). An idle block that it takes uses up the
 *     promise or a spare block.
 *   - Private blocks that a window drops are promised to it again, to at most R - private. They come from the blocks that
 *     become free by this.
 *   With growth, replace private by kept: all blocks of the table except a last one that an append would have to copy.
 *   So p + private >= R holds after reserve, attach, fork (child) or commit. It ends when a private block of the table
 *   becomes shared (by a fork of this sequence, a hold, a prefix hit of another), is given up while pinned, or is cached and
 *   rolled back in part (with growth, also: is given up while shared). While it holds, growing to R blocks never fails for
 *   lack of blocks: it takes at most R - private blocks, including the copy of a shared last block. To restore it for
 *   the parent of a fork, reserve again. Score pages are always private. They have promises of the same kind.
 */
#ifndef KVF_BLOCKMGR_MANAGER_H
#define KVF_BLOCKMGR_MANAGER_H

#include "base/base.h"
#include "base/view_stamp.h"
#include "blockmgr/cache.h"
#include "blockmgr/pool.h"
#include "kvfold/blockmgr.h"

/* The fields of a table that an append does not need. Those that it needs are arrays of the manager, so that one pass reads
 * many tables. Invariant: n_fresh and fresh_promise are 0 outside a compaction; promise + fresh_promise <= reserve. */
typedef struct kvf__table {
    uint32_t reserve, page_reserve; /* blocks and score pages of the reservation */
    uint32_t n_fresh;               /* blocks of the fresh row; 0: the table is written in place */
    uint32_t fresh_promise;         /* how many of them came from the promise; a cancel gives them back */
    uint32_t n_keep;                /* while compacting: slots to keep, possibly all */
    uint32_t n_for_cached; /* within kvf_compact_begin: fresh blocks wanted because blocks are cached; else 0 */
    bool compacting;
    bool growth; /* the reservation counts shared blocks as held (kvf_reserve.growth) */
} kvf__table;

/* Invariant: a dead sequence has empty tables and no promise; its index is on free_seqs. A swapped sequence has empty tables
 * and no promise, is in no compaction, and known_at is not the epoch. */
typedef struct kvf__seq {
    uint32_t generation; /* 1..2^28 - 1, rises with each free */
    uint32_t next_pos;
    uint32_t n_compacting; /* items of the compaction under way */
    uint64_t node;         /* handle of the last node of whole blocks that it has attached or stored; 0: none */
    bool alive, has_scores;
    bool compacted; /* one of its tables was compacted, or one of a parent before the fork */
    bool swapped;
    bool mark; /* within one call: seen already; false between calls */
    /* Within one append: whether any of its tables takes an id; whether any last block may be shared. */
    bool takes, may_share;
    /* A cache for appends. It is valid while known_at == epoch. Then in every table the last block is not shared and has at
     * least `room` free slots, the table has at most `longest` slots, and has a score page for each block, if it has score
     * pages. An append of up to `room` tokens then need not look at the tables. */
    uint32_t known_at, room, longest;
} kvf__seq;

typedef struct kvf__compact_entry {
    uint32_t table; /* the first of the (sequence, layer); its groups follow */
} kvf__compact_entry;

typedef struct kvf__profile kvf__profile; /* profile.h */

typedef struct kvf__run {
    uint32_t first, n_tables; /* the tables [first, first + n_tables) of a sequence */
    uint32_t window;          /* 0: none */
    uint32_t block_class;
} kvf__run;

/* One number for each class. */
typedef struct kvf__counts {
    uint64_t of[KVF_BLOCK_CLASSES_MAX];
} kvf__counts;

/* The rows of all tables, one after another, each with two words before it:
 *
 *     8 x KVF_NO_BLOCK | table, capacity, ids ... | table, capacity, ids ... | ... end
 *
 * `pages` has the score pages at the same places. A row that becomes too short is copied to the end, with room for what its
 * table has been promised, and for a quarter more than it needs. What it leaves, and what tables give up, stays until the rows slide to the front. They slide when a third of
 * [0, end) belongs to no table, so adding an entry costs O(1) on average, and rows move only in calls that take blocks.
 * Invariant: a table without a row has at = capacity = 0. A row belongs to its table if the table's `at` is its first entry.
 * In `pages`, entries of [0, high) that name no page of a table are KVF_NO_BLOCK.
 * live: entries of the rows that belong to tables, their two words included; at most kvf__rows_room and what is promised. */
typedef struct kvf__row_array {
    uint32_t *ids, *pages; /* [size] */
    uint64_t *at;          /* (seq, layer, group): the row's first entry */
    uint32_t *capacity;    /* (seq, layer, group): its entries */
    uint64_t size, end, live, high;
} kvf__row_array;

/* A view buffer's copy of the rows, or of the score rows. Invariant: the first known[t] entries equal the table's own, and
 * the table has at least that many; the entries from filled[t] to the row's capacity are KVF_NO_BLOCK. Code that changes or
 * removes an entry of a row calls kvf__row_cut. Adding entries at the end needs no call. */
typedef struct kvf__row_copy {
    uint32_t *known, *filled;
} kvf__row_copy;

typedef struct kvf__view_buffer {
    uint64_t *row_offset;
    uint32_t *n_slots, *next_pos, *seq_index;
    /* With view_copies, else NULL. The rows lie one after another without words between them. A row that becomes too short
     * gets a new place at the end. When there is no more room, no table has a row any more, and the batch's rows are placed
     * anew. What lies in [0, rows.high) is what a device's copy has there, whether or not a row has it. */
    kvf__row_array rows;
    kvf__row_copy blocks, pages;
    kvf_view_range *ranges;
    uint32_t n_ranges;
    uint64_t n_bytes;
    struct kvf_view_stamp stamp;
} kvf__view_buffer;

struct kvf_manager {
    kvf_manager_config config; /* resolved */
    size_t slab_bytes;
    kvf_error *error; /* a pointer, so that calls on a const manager can write their failure too */
    uint32_t n_groups;
    uint32_t seq_tables;                     /* tables of one sequence */
    uint32_t row_capacity;                   /* most blocks of a table */
    uint32_t block_shift;                    /* log2 of block_size */
    uint64_t tag;                            /* hash of the manager's address: marks its handles */
    kvf__profile *profile;                   /* NULL: none; in a cache line that every call reads anyway */
    kvf__pool blocks[KVF_BLOCK_CLASSES_MAX]; /* [config.n_classes] */
    kvf__pool pages;
    kvf__seq *seqs; /* [max_seqs] */
    uint32_t *free_seqs;
    uint32_t n_seqs, n_seqs_max; /* free_seqs holds max_seqs - n_seqs */
    kvf__table *tables;          /* (seq, layer, group), like the next six arrays */
    /* Invariant: a row has ceil(n_slots / block_size) blocks, and n_pages is at most that, 0 without scores. The entries
     * after them are KVF_NO_BLOCK. In a window's table slot j has position next_pos - n_slots + j, the table begins at a
     * multiple of block_size, and n_slots >= min(window - 1, next_pos). A table in no run has 0 slots. In a swapped sequence
     * both are 0, and the rows have the ids of host_slots slots and n_host_pages score pages in the host's pools; in other
     * sequences host_slots and n_host_pages are 0. */
    uint32_t *n_slots, *n_pages;
    uint32_t *promise, *page_promise; /* blocks and score pages that are still promised */
    /* Caches of what a scan of a row finds. private_at == epoch: every block of the table is in state ROW. tail_at == epoch:
     * no other holder has its last block. Any other value: unknown, scan the row. A fork resets them. A hold on a block of a
     * table starts a new epoch, because the table is not known. */
    uint32_t *private_at, *tail_at;
    uint32_t epoch;           /* 1 or more */
    uint32_t *seq_blocks_max; /* (seq, layer): most blocks of all its groups together since the sequence was created */
    /* Invariant: sums over all tables of the layer; layer_blocks_max >= layer_blocks. */
    uint32_t *layer_blocks, *layer_blocks_max; /* (layer) */
    uint64_t *layer_slots;                     /* (layer): slots used */
    kvf__row_array rows;
    uint64_t n_swapped_blocks; /* entries of the rows of swapped sequences */
    uint32_t *windows;         /* (layer), as in the config; NULL: all 0 */
    kvf__run *runs;            /* ascending; without windows and classes one run of all tables */
    uint32_t n_runs;
    bool windowed;   /* a run has a window */
    bool compacting; /* between begin and commit or cancel */
    uint32_t n_entries;
    kvf__compact_entry *entries; /* [max_seqs * n_layers] */
    const uint32_t **dst_row;    /* [max_seqs * n_layers * n_groups], in the order of the items */
    uint32_t *fresh;             /* [n_blocks]: the fresh rows, one after another */
    kvf__view_buffer views[2];
    uint64_t view_rows_size; /* entries of a view's arrays of rows */
    kvf__cache cache;
    kvf__pool host_blocks[KVF_BLOCK_CLASSES_MAX];
    kvf__pool host_pages;
    kvf_block_class classes[KVF_BLOCK_CLASSES_MAX];
    uint32_t *layer_class;               /* (layer); NULL: one class */
    uint32_t *host_slots, *n_host_pages; /* (seq, layer, group); NULL without a host tier */
    uint32_t n_swapped;
};

/* The index of a live sequence, or KVF_E_STALE. */
kvf_status kvf__seq_find(const kvf_manager *m, kvf_seq seq, uint32_t *index);

/* A handle. The generation is never 0, so a handle is never 0.
 *      63        generation        36 35        tag        20 19        index        0 */
#define KVF__SEQ_INDEX_BITS 20u
#define KVF__SEQ_TAG_BITS 16u
#define KVF__SEQ_GENERATION_MAX ((1u << 28) - 1)
static inline kvf_seq kvf__seq_handle(const kvf_manager *m, uint32_t index) {
    uint64_t tag = m->tag & ((1u << KVF__SEQ_TAG_BITS) - 1);
    return (uint64_t)m->seqs[index].generation << (KVF__SEQ_INDEX_BITS + KVF__SEQ_TAG_BITS) |
           tag << KVF__SEQ_INDEX_BITS | index;
}

/* The index in a handle that kvf__seq_find has accepted. */
static inline uint32_t kvf__seq_index(kvf_seq seq) { return (uint32_t)(seq & ((1u << KVF__SEQ_INDEX_BITS) - 1)); }

/* KVF_E_INVALID if there is no such class (classes.c). */
kvf_status kvf__class_check(const kvf_manager *m, uint32_t block_class);

static inline uint32_t kvf__blocks_for(const kvf_manager *m, uint32_t n_slots) {
    return (n_slots >> m->block_shift) + ((n_slots & (m->config.block_size - 1)) != 0);
}
static inline uint32_t kvf__n_blocks(const kvf_manager *m, uint32_t t) { return kvf__blocks_for(m, m->n_slots[t]); }
static inline uint32_t *kvf__row(const kvf_manager *m, uint32_t t) { return m->rows.ids + m->rows.at[t]; }
static inline uint32_t *kvf__score_row(const kvf_manager *m, uint32_t t) { return m->rows.pages + m->rows.at[t]; }
static inline uint32_t kvf__class_of(const kvf_manager *m, uint32_t t) {
    return m->layer_class ? m->layer_class[t % m->seq_tables / m->n_groups] : 0;
}
/* The pool of table t's blocks. */
static inline kvf__pool *kvf__pool_at(kvf_manager *m, uint32_t t) { return &m->blocks[kvf__class_of(m, t)]; }
static inline bool kvf__is_private(const kvf_manager *m, uint32_t t) { return m->private_at[t] == m->epoch; }

/* Blocks of a sequence in a layer, over its head groups. */
uint32_t kvf__seq_layer_blocks(const kvf_manager *m, uint32_t seq_layer);
/* Updates the figures of the layer and sequence after table t has changed from n_slots_before slots. */
void kvf__table_count(kvf_manager *m, uint32_t t, uint32_t n_slots_before);

/* How many blocks of table t are private. Sets private_at and tail_at if all are private and none is pinned or cached. */
uint32_t kvf__table_private(kvf_manager *m, uint32_t t);

/* Whether the last block of table t is partly filled and cached by a node that covers slots beyond the table's. */
static inline bool kvf__tail_covered(const kvf_manager *m, uint32_t t) {
    uint32_t filled = m->n_slots[t] & (m->config.block_size - 1);
    return m->cache.on && filled && kvf__cache_covers(&m->cache, kvf__row(m, t)[kvf__n_blocks(m, t) - 1]) > filled;
}

/* Whether an append to table t must copy the table's last block: it is partly filled, and has another holder or a node that
 * covers the slots to be written. During an append, scratch counts the tables of the batch that have left the block already,
 * so that the last holder writes in place. */
bool kvf__leaves_shared(const kvf_manager *m, uint32_t t);

/* ---- Classes (classes.c) ---------------------------------------------------------------------------------- */

/* Reads the classes. Then n_classes is 1 or more, and n_blocks and n_host_blocks are the sums. */
kvf_status kvf__classes_resolve(kvf_manager_config *c, kvf_error *err);
/* Checks layer_class; n_layers must have been checked before. */
kvf_status kvf__classes_check(const kvf_manager_config *c, kvf_error *err);
void kvf__classes_carve(kvf_manager *m, kvf__slab *slab);
void kvf__classes_init(kvf_manager *m);
kvf_pool_occupancy kvf__pool_occupancy(const kvf__pool *p);
/* The sums over the pools of the classes. */
kvf_pool_occupancy kvf__pools_occupancy(const kvf_manager *m, const kvf__pool *pools);

/* ---- Rows (rows.c) --------------------------------------------------------------------------------------- */

/* The capacity that a row of n entries gets. */
uint32_t kvf__row_room(const kvf_manager *m, uint32_t n);
/* Entries of an array of rows in which n_table_blocks blocks and n_promised more have room, however they are distributed. */
uint64_t kvf__rows_size(const kvf_manager *m, uint64_t n_promised);
/* Entries that the rows of the tables need as they are now, without what is promised. */
uint64_t kvf__rows_room(const kvf_manager *m);
/* How far rows that need `room` entries may reach into an array of `size`. */
uint64_t kvf__rows_limit(uint64_t size, uint64_t room);
void kvf__rows_carve(kvf__row_array *r, kvf__slab *slab, size_t n_tables, uint64_t size);
void kvf__rows_init(kvf__row_array *r);
kvf_status kvf__rows_audit(const kvf_manager *m, kvf_error *err);

/* Blocks in all tables, swapped ones included. KVF_E_LIMIT if they and `more` exceed n_table_blocks. */
uint64_t kvf__table_blocks(const kvf_manager *m);
kvf_status kvf__check_table_blocks(const kvf_manager *m, const char *call, uint64_t more);

void kvf__row_grow(kvf_manager *m, uint32_t t, uint32_t n);
/* Gives table t's row room for n entries; the caller has called kvf__check_table_blocks. All rows may move. */
static inline void kvf__row_need(kvf_manager *m, uint32_t t, uint32_t n) {
    if (n > m->rows.capacity[t]) kvf__row_grow(m, t, n);
}
/* Shortens the row in place to what n entries need, after the table has given up blocks. */
void kvf__row_fit(kvf_manager *m, uint32_t t, uint32_t n);
void kvf__row_drop(kvf_manager *m, uint32_t t); /* the table is empty */

/* ---- Views (view.c) ------------------------------------------------------------------------------------ */

void kvf__views_carve(kvf_manager *m, kvf__slab *slab, size_t n_tables);
void kvf__views_init(kvf_manager *m);
void kvf__views_cut(kvf_manager *m, uint32_t t, uint32_t n_blocks, uint32_t n_pages);
kvf_status kvf__views_audit(const kvf_manager *m, kvf_error *err);
/* Reports that of table t only the first n_blocks entries of the row and n_pages of the score row are unchanged. */
static inline void kvf__row_cut(kvf_manager *m, uint32_t t, uint32_t n_blocks, uint32_t n_pages) {
    if (m->config.view_copies) {
        kvf__views_cut(m, t, n_blocks, n_pages);
    } else { /* views read the rows themselves */
        m->views[0].stamp.n_blocks = m->views[1].stamp.n_blocks = KVF__IDS_UNKNOWN;
    }
}

/* ---- Windows (window.c) ------------------------------------------------------------------------------ */

/* The window of the k-th table of a sequence. */
static inline uint32_t kvf__window_of(const kvf_manager *m, uint32_t k) {
    return m->windows ? m->windows[k / m->n_groups] : 0;
}
/* How many leading blocks of a table of n_slots slots are out of the window for all tokens still to come. */
static inline uint32_t kvf__window_drops(const kvf_manager *m, uint32_t window, uint32_t n_slots) {
    return window && n_slots >= window ? (n_slots + 1 - window) >> m->block_shift : 0;
}
kvf_status kvf__windows_check(const kvf_manager_config *config, kvf_error *err);
/* Computes the runs from the windows and classes. */
void kvf__runs_fill(kvf_manager *m);

/* The effect of dropping leading blocks: how many become free or idle, and how many of these are promised to the table
 * again. */
typedef struct kvf__dropping {
    uint32_t freed, promised;
} kvf__dropping;

/* The effect of dropping the first n blocks of table t. Blocks that earlier tables of the batch drop or leave count as dropped
 * already (scratch). More blocks may become free than this says; promised never exceeds freed. */
kvf__dropping kvf__window_look(const kvf_manager *m, uint32_t t, uint32_t n);
/* Drops the blocks that the next tokens of a sequence do not see. */
void kvf__window_drop(kvf_manager *m, uint32_t index);

/* ---- Reservations (seq.c) --------------------------------------------------------------------------- */

typedef struct kvf__reservation {
    uint32_t blocks, pages;
    bool growth;
} kvf__reservation;

/* The promises that tables are to get, and those that they have. */
typedef struct kvf__owed {
    kvf__counts blocks, blocks_before;
    uint64_t pages, pages_before;
} kvf__owed;

kvf_status kvf__reserve_read(const kvf_manager *m, const kvf_reserve *in, kvf_reserve *out);
/* The reservation that the caller wants for the k-th table of a sequence; the present reservation of table t. */
kvf__reservation kvf__reservation_of(const kvf_manager *m, const kvf_reserve *reserve, uint32_t k);
kvf__reservation kvf__table_reservation(const kvf_manager *m, uint32_t t);
/* Whether the pools have enough blocks for the promises if `taken` more blocks are taken besides. */
kvf_status kvf__check_owed(const kvf_manager *m, const kvf__owed *owed, kvf__counts taken);
/* Sets the reservation and promises of table t; the caller has called kvf__check_owed. */
void kvf__table_reserve(kvf_manager *m, uint32_t t, kvf__reservation r, uint32_t owed);
/* Blocks of a table that count against its reservation: the private ones or, with growth, all but a last one that an append
 * would copy. */
uint32_t kvf__table_kept(kvf_manager *m, uint32_t t);

/* The audit's part for the prefix cache. */
kvf_status kvf__cache_audit(const kvf_manager *m, kvf_error *err);

/* Fails with KVF_E_STATE: the call is not allowed on a swapped sequence. */
kvf_status kvf__fail_swapped(const kvf_manager *m, const char *call);
/* Frees what a swapped sequence has on the host and empties its rows. */
void kvf__swap_drop(kvf_manager *m, uint32_t index);

/* Gives device blocks to the d-th node of the cache's chain, which is only on the host, and enters them in the rows of the
 * sequence that attaches it. The caller has checked that blocks and room for the copies are available. */
void kvf__node_load(kvf_manager *m, uint32_t index, uint32_t d, kvf_copy_list *copies);

/* Fails with KVF_E_UNSUPPORTED if there is no prefix cache. */
kvf_status kvf__prefix_check(const kvf_manager *m);

/* Starts a new epoch: a block of an unknown table has a second holder now, so no table is known to be private. */
void kvf__epoch_begin(kvf_manager *m);

/* Room in the caller's list; 0 for NULL. */
static inline uint32_t kvf__copies_room(const kvf_copy_list *copies) {
    return copies && copies->items && copies->capacity > copies->n ? copies->capacity - copies->n : 0;
}
/* Appends a copy and pins its src and dst; the caller has checked that there is room. */
void kvf__copies_add(kvf_manager *m, kvf_copy_list *copies, kvf_copy_kind kind, uint32_t src, uint32_t dst,
                     uint32_t n_slots);

/* Cancels the compaction under way. */
void kvf__compact_drop(kvf_manager *m);

#endif
