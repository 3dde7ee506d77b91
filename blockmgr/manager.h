/* blockmgr/manager.h: the manager's own structs, each with its invariant. kvf_audit checks every one of them.
 *
 * Glossary, beyond kvfold/blockmgr.h and pool.h
 *   table index  t = (seq index * n_layers + layer) * n_groups + group; a table's row is rows[t * row_capacity ..].
 *   seq layer    the groups of one (sequence, layer): sl = t / n_groups.
 *   run          layers next to each other that keep slots, all of one class and of one window or of none; k-th tables of
 *                a sequence.
 *   blocks       the pools of the classes, which share their arrays by id: m->blocks alone tells of any block.
 *   fresh row    blocks taken by kvf_compact_begin for a table that may not be written in place.
 *   private      a block whose only holder is the table at hand, and which it may write behind its slots: a cached one is
 *                private unless it is the table's last and its node covers slots beyond the table's.
 *   swapped      a sequence whose tables are empty and whose rows name ids of the host's pools (tier.c).
 *
 * The slab
 *   kvf_manager | error | blocks: free_ids, states, heads, entries | host_blocks, pages, host_pages: likewise
 *   | layer_class, with several classes | seqs
 *   | free_seqs
 *   | tables | n_slots | n_pages | promise | page_promise | private_at | tail_at | seq_blocks_max
 *   | layer_blocks | layer_blocks_max | layer_slots | rows | score_rows | compaction: entries, dst_row, fresh
 *   | windows, runs | host_slots, n_host_pages, where there is a host tier
 *   | views: row_offset, n_slots, next_pos, seq_index (twice; with view_copies: rows, score_rows, what they know, ranges)
 *   | cache (cache.c), where there is one | profile, likewise
 *
 * What a promise is worth (R: the table's reservation in blocks, p: its promise, "private": its private blocks)
 *   - reserve sets p = max(0, R - private); a fork gives the child p = R, since it holds nothing privately.
 *   - taking a block for the table lowers p first; a taking beyond p needs a spare block.
 *   - rollback raises p again by the blocks given up, to at most R - private; so it undoes an append.
 *   - commit sets p = max(0, R - blocks held), which are all private then. What p lacks comes first out of what this
 *     table itself let fall free, then, table by table in the order of the batch, out of the spare blocks there are.
 *   - attach, of cached blocks to an empty table, sets p = max(0, R - private) too: an idle block that it takes is paid for
 *     by the promise, or by a spare one.
 *   - what a window drops of its own blocks is promised to it again, to at most R - private; that comes out of the blocks
 *     that fall free so.
 *   With growth, read "kept" for private: all blocks of the table but a last one that an append would have to copy.
 *   So p + private >= R holds from reserve, attach, fork (child) or commit on, until one of its private blocks becomes
 *   shared (by a fork of this sequence, a hold, a hit of another), is given up while pinned, or is cached and rolled back
 *   in part (with growth, also: is given up while shared). As long as it holds, a growth up to R blocks
 *   never fails for want of blocks: it takes at most R - private, the copy of a shared last block included. Who forks
 *   and wants the same for the parent reserves for it again. Score pages are always private; they have a promise too.
 */
#ifndef KVF_BLOCKMGR_MANAGER_H
#define KVF_BLOCKMGR_MANAGER_H

#include "base/base.h"
#include "blockmgr/cache.h"
#include "blockmgr/pool.h"
#include "kvfold/blockmgr.h"

/* What of a table is not needed to append to it; that lies in arrays of the manager, so that one pass reads many.
 * Invariant: n_fresh and fresh_promise are 0 outside a compaction; promise + fresh_promise <= reserve. */
typedef struct kvf__table {
    uint32_t reserve, page_reserve; /* held and promised in all, as kvf_seq_reserve asked */
    uint32_t n_fresh;               /* blocks of the fresh row; 0: in place */
    uint32_t fresh_promise;         /* how many of them the promise paid for, to be given back by a cancel */
    uint32_t n_keep;                /* while compacting: slots to shrink to, or all that there are */
    uint32_t n_aside;               /* within kvf_compact_begin: fresh blocks wanted to spare cached ones; else 0 */
    bool compacting;
    bool growth; /* of the reservation: shared blocks count as held */
} kvf__table;

/* Invariant: a dead sequence has empty tables and no promise; its index is on free_seqs. A swapped one has empty tables and no
 * promise either; it is in no compaction, and not known at any epoch. */
typedef struct kvf__seq {
    uint32_t generation; /* 1..2^28 - 1, rises with each free */
    uint32_t next_pos;
    uint32_t n_compacting; /* items of the compaction under way */
    uint64_t node; /* handle of the node at the end of what it has attached or stored in whole blocks; 0: none */
    bool alive, has_scores;
    bool compacted; /* a table of it, or of a parent before the fork, was */
    bool swapped;
    bool mark; /* within one call: seen already; false between calls */
    /* Within one append, of its tables: one takes an id; a last block may be shared. */
    bool takes, may_share;
    /* known_at = epoch: every table has at least `room` slots left in its last block, which is its own, at most `longest`
     * slots, and a score page a block if any; so appends within that need not look at the tables. */
    uint32_t known_at, room, longest;
} kvf__seq;

typedef struct kvf__compact_entry {
    uint32_t table; /* the first of the (sequence, layer); its groups follow */
} kvf__compact_entry;

typedef struct kvf__profile kvf__profile; /* profile.h */

typedef struct kvf__run {
    uint32_t first, n_tables; /* of a sequence's tables */
    uint32_t window;          /* 0: none */
    uint32_t block_class;
} kvf__run;

/* A number for each class. */
typedef struct kvf__counts {
    uint64_t of[KVF_BLOCK_CLASSES_MAX];
} kvf__counts;

/* What a buffer's copy of the rows, or of the score rows, knows. Invariant: the first known[t] entries are as the table's own
 * and at most as many; those from filled[t] on are KVF_NO_BLOCK. Whoever changes an entry of a row, or lets it end earlier,
 * says so (kvf__row_cut); what is added behind its end needs no word. */
typedef struct kvf__row_copy {
    uint32_t *rows; /* (seq, layer, group, row_capacity) */
    uint32_t *known, *filled;
} kvf__row_copy;

typedef struct kvf__view_buffer {
    uint64_t *row_offset;
    uint32_t *n_slots, *next_pos, *seq_index;
    /* With view_copies, else NULL. */
    kvf__row_copy blocks, pages;
    kvf_view_range *ranges;
    uint32_t n_ranges;
    uint64_t n_bytes;
} kvf__view_buffer;

struct kvf_manager {
    kvf_manager_config config; /* resolved */
    size_t slab_bytes;
    kvf_error *error; /* behind a pointer: calls on a const manager note their failure too */
    uint32_t n_groups;
    uint32_t seq_tables;                     /* tables of one sequence */
    uint32_t row_capacity;                   /* blocks of a table of max_slots; at most all there are */
    uint32_t block_shift;                    /* log2 of block_size */
    uint64_t tag;                            /* hash of the manager's address: tells its handles from another's */
    kvf__profile *profile;                   /* NULL: keeps none; here, where every call looks anyway */
    kvf__pool blocks[KVF_BLOCK_CLASSES_MAX]; /* [config.n_classes] */
    kvf__pool pages;
    kvf__seq *seqs; /* [max_seqs] */
    uint32_t *free_seqs;
    uint32_t n_seqs, n_seqs_max; /* free_seqs holds max_seqs - n_seqs */
    kvf__table *tables;          /* (seq, layer, group), as the next six */
    /* Invariant: a row has ceil(n_slots / block_size) blocks; n_pages is at most that, 0 without scores; entries beyond
     * are KVF_NO_BLOCK. Of a window, slot j has position next_pos - n_slots + j, whole blocks are missing before it, and
     * n_slots >= min(window - 1, next_pos). In no run: 0. Of a swapped sequence both are 0, and the rows have ids of the
     * host's pools: as many as host_slots and n_host_pages say, which are 0 of any other. */
    uint32_t *n_slots, *n_pages;
    uint32_t *promise, *page_promise; /* blocks and score pages still to come of the reserve */
    /* private_at = epoch: every block of the table is in state ROW. tail_at = epoch: no other holder has its last block.
     * Anything else: not known, a look will tell. A fork unsets them; a hold on a block that a table has, which may be any
     * table, begins a new epoch. */
    uint32_t *private_at, *tail_at;
    uint32_t epoch;           /* 1 or more */
    uint32_t *seq_blocks_max; /* (seq, layer): most blocks of the groups together since its creation */
    /* Invariant: sums over all tables of the layer; layer_blocks_max >= layer_blocks. */
    uint32_t *layer_blocks, *layer_blocks_max; /* (layer) */
    uint64_t *layer_slots;                     /* (layer): used */
    uint32_t *rows, *score_rows;               /* (seq, layer, group, row_capacity) */
    uint32_t *windows;                         /* (layer), as in the config; NULL: all 0 */
    kvf__run *runs;                            /* ascending; without windows one of all tables */
    uint32_t n_runs;
    bool windowed;   /* some run has a window */
    bool compacting; /* between begin and commit or cancel */
    uint32_t n_entries;
    kvf__compact_entry *entries; /* [max_seqs * n_layers] */
    const uint32_t **dst_row;    /* [max_seqs * n_layers * n_groups], in the order of the items */
    uint32_t *fresh;             /* [n_blocks]: the fresh rows, one behind the other */
    kvf__view_buffer views[2];
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

/* The index in a handle that was found before. */
#define KVF__SEQ_INDEX_BITS 20u
static inline uint32_t kvf__seq_index(kvf_seq seq) { return (uint32_t)(seq & ((1u << KVF__SEQ_INDEX_BITS) - 1)); }

static inline uint32_t kvf__blocks_for(const kvf_manager *m, uint32_t n_slots) {
    return (n_slots >> m->block_shift) + ((n_slots & (m->config.block_size - 1)) != 0);
}
static inline uint32_t kvf__n_blocks(const kvf_manager *m, uint32_t t) { return kvf__blocks_for(m, m->n_slots[t]); }
static inline uint32_t *kvf__row(const kvf_manager *m, uint32_t t) { return m->rows + (size_t)t * m->row_capacity; }
static inline uint32_t *kvf__score_row(const kvf_manager *m, uint32_t t) {
    return m->score_rows + (size_t)t * m->row_capacity;
}
static inline uint32_t kvf__class_of(const kvf_manager *m, uint32_t t) {
    return m->layer_class ? m->layer_class[t % m->seq_tables / m->n_groups] : 0;
}
/* The pool that table t takes its blocks from. */
static inline kvf__pool *kvf__pool_at(kvf_manager *m, uint32_t t) { return &m->blocks[kvf__class_of(m, t)]; }
static inline bool kvf__is_private(const kvf_manager *m, uint32_t t) { return m->private_at[t] == m->epoch; }

/* Carries a table's change, already made, into the figures of its layer and sequence. */
void kvf__table_count(kvf_manager *m, uint32_t t, uint32_t n_slots_before);

/* How many blocks of a table are private. Notes it when all are and none is pinned or cached. */
uint32_t kvf__table_private(kvf_manager *m, uint32_t t);

/* Whether the last block of table t, partly filled, is cached by a node that covers slots beyond the table's. */
static inline bool kvf__tail_covered(const kvf_manager *m, uint32_t t) {
    uint32_t filled = m->n_slots[t] & (m->config.block_size - 1);
    return m->cache.on && filled && kvf__cache_covers(&m->cache, kvf__row(m, t)[kvf__n_blocks(m, t) - 1]) > filled;
}

/* Whether an append to table t would write into a block that another holder has, or whose node covers those slots: its
 * last, when partly filled. An append counts in scratch the tables of its batch that have left the block, so that the last
 * holder writes in place. */
bool kvf__leaves_shared(const kvf_manager *m, uint32_t t);

/* ---- Classes (classes.c) ---------------------------------------------------------------------------------- */

/* Reads the classes: n_classes is 1 or more then, n_blocks and n_host_blocks are the sums. */
kvf_status kvf__classes_resolve(kvf_manager_config *c, kvf_error *err);
/* Of a config whose n_layers is in range. */
kvf_status kvf__classes_check(const kvf_manager_config *c, kvf_error *err);
void kvf__classes_carve(kvf_manager *m, kvf__slab *slab);
void kvf__classes_init(kvf_manager *m);
kvf_pool_occupancy kvf__pool_occupancy(const kvf__pool *p);
/* The sums over the pools of the classes. */
kvf_pool_occupancy kvf__pools_occupancy(const kvf_manager *m, const kvf__pool *pools);

/* ---- Views (view.c) ------------------------------------------------------------------------------------ */

void kvf__views_carve(kvf_manager *m, kvf__slab *slab, size_t n_tables, size_t n_rows);
void kvf__views_init(kvf_manager *m);
void kvf__views_cut(kvf_manager *m, uint32_t t, uint32_t n_blocks, uint32_t n_pages);
kvf_status kvf__views_audit(const kvf_manager *m, kvf_error *err);
/* Of table t, only the first n_blocks of the row and n_pages of the score row are certainly as they were. */
static inline void kvf__row_cut(kvf_manager *m, uint32_t t, uint32_t n_blocks, uint32_t n_pages) {
    if (m->config.view_copies) kvf__views_cut(m, t, n_blocks, n_pages);
}

/* ---- Windows (window.c) ------------------------------------------------------------------------------ */

/* That of the k-th table of a sequence. */
static inline uint32_t kvf__window_of(const kvf_manager *m, uint32_t k) {
    return m->windows ? m->windows[k / m->n_groups] : 0;
}
/* Leading blocks that no token after n_slots of them sees any more. */
static inline uint32_t kvf__window_drops(const kvf_manager *m, uint32_t window, uint32_t n_slots) {
    return window && n_slots >= window ? (n_slots + 1 - window) >> m->block_shift : 0;
}
kvf_status kvf__windows_check(const kvf_manager_config *config, kvf_error *err);
/* Fills the runs from the windows. */
void kvf__runs_fill(kvf_manager *m);

/* What the dropping of leading blocks brings: how many fall free or idle, how many of these the table is promised again. */
typedef struct kvf__dropping {
    uint32_t freed, promised;
} kvf__dropping;

/* Of n of table t; what others of its batch drop or leave counts as gone (scratch). A batch-mate's dropping that comes first may make it more freed, never more promised than freed. */
kvf__dropping kvf__window_look(const kvf_manager *m, uint32_t t, uint32_t n);
/* Drops what the next tokens of a sequence do not see. */
void kvf__window_drop(kvf_manager *m, uint32_t index);

/* ---- Reservations (seq.c) --------------------------------------------------------------------------- */

typedef struct kvf__reservation {
    uint32_t blocks, pages;
    bool growth;
} kvf__reservation;

/* What tables are to be promised, and what they were promised before. */
typedef struct kvf__owed {
    kvf__counts blocks, blocks_before;
    uint64_t pages, pages_before;
} kvf__owed;

kvf_status kvf__reserve_read(const kvf_manager *m, const kvf_reserve *in, kvf_reserve *out);
/* That of the k-th table of a sequence, as the caller wants it; that of table t, as it is. */
kvf__reservation kvf__reservation_of(const kvf_manager *m, const kvf_reserve *reserve, uint32_t k);
kvf__reservation kvf__table_reservation(const kvf_manager *m, uint32_t t);
/* Whether the pools can bear it when taken idle blocks are held besides. */
kvf_status kvf__check_owed(const kvf_manager *m, const kvf__owed *owed, kvf__counts taken);
/* Sets it, and the table's promises; the caller has seen that the pools can bear it. */
void kvf__table_reserve(kvf_manager *m, uint32_t t, kvf__reservation r, uint32_t owed);
/* Blocks of a table that count against its reservation: the private ones or, with growth, all that it keeps. */
uint32_t kvf__table_kept(kvf_manager *m, uint32_t t);

/* The audit's part for the prefix cache. */
kvf_status kvf__cache_audit(const kvf_manager *m, kvf_error *err);

/* KVF_E_STATE, for a call that a swapped sequence is not allowed. */
kvf_status kvf__fail_swapped(const kvf_manager *m, const char *call);
/* Gives up what a swapped sequence has on the host; its rows are empty then. */
void kvf__swap_drop(kvf_manager *m, uint32_t index);

/* The d-th node of the cache's chain, on the host alone, gets blocks here in the rows of a sequence that attaches it. The
 * caller has seen that they are to be had, and room for the copies. */
void kvf__node_load(kvf_manager *m, uint32_t index, uint32_t d, kvf_copy_list *copies);

/* KVF_E_UNSUPPORTED without a prefix cache. */
kvf_status kvf__prefix_check(const kvf_manager *m);

/* A block has got a second holder, and no table is named: none is known to be private any more. */
void kvf__epoch_begin(kvf_manager *m);

/* Room in the caller's list; NULL is a list of no room. */
static inline uint32_t kvf__copies_room(const kvf_copy_list *copies) {
    return copies && copies->items && copies->capacity > copies->n ? copies->capacity - copies->n : 0;
}
/* Appends a copy and pins its ends; the caller has seen that there is room. */
void kvf__copies_add(kvf_manager *m, kvf_copy_list *copies, kvf_copy_kind kind, uint32_t src, uint32_t dst,
                     uint32_t n_slots);

/* Cancels the compaction under way. */
void kvf__compact_drop(kvf_manager *m);

#endif
