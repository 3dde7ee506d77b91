/* blockmgr/profile.h: the manager's side of a profile: what calls report after they have changed something.
 *
 * The hot path contains no profiling code. At its end, a successful call names the tables that it may have changed. The
 * profile compares their rows with its own copy of them. So a new call that changes tables needs one line for the profile,
 * and the pool needs none.
 *
 * Glossary
 *   words    the figures that readers get: kvf_profile from `now` on, then the layers, each an atomic of 64 bits. Only the
 *            manager's thread writes them. It raises `version` before and after, so that it is odd meanwhile. Stores release
 *            and loads acquire: a reader that has seen a new word also sees the odd version.
 *   touched  blocks whose state may have changed in this call. They are evaluated at its end, when all tables are final.
 *   gone     blocks from the cache or a window that became free in this call; they may have been taken again since.
 *   fresh    blocks that a compaction has taken and that are in no table yet.
 *   ring     events [tail, head), a power of two; the manager moves head, the reader tail.
 */
#ifndef KVF_BLOCKMGR_PROFILE_H
#define KVF_BLOCKMGR_PROFILE_H

#include <stdatomic.h>

#include "blockmgr/manager.h"
#include "kvfold/profile.h"

/* Why a block lost a holder, or its place in the prefix cache. */
typedef enum kvf__cause {
    KVF__CAUSE_END,
    KVF__CAUSE_COMPACTION,
    KVF__CAUSE_ROLLBACK,
    KVF__CAUSE_RELEASE,
    KVF__CAUSE_EVICTION,
    KVF__CAUSE_SWAP,
    KVF__CAUSE_WINDOW,
    KVF__CAUSE_ADOPTION,
    KVF__CAUSE_REMOVAL
} kvf__cause;

/* Invariant between calls: live = the block is held, or idle in the prefix cache (idle); shared = it has two or more
 * holders; touched and gone are false. */
typedef struct kvf__profile_block {
    uint64_t born, used; /* if not live: used is when it became free, born is 1 if it ever was live */
    uint32_t layer;      /* n_layers: in no layer's table */
    uint32_t seq;        /* the sequence that lost it last */
    uint8_t cause;       /* why: kvf__cause */
    bool live, idle, shared, touched, fresh, gone;
} kvf__profile_block;

/* Invariant between calls: equal to the manager's figures of the table. */
typedef struct kvf__profile_table {
    uint32_t n_slots, n_blocks;
} kvf__profile_table;

/* Counts of distinct blocks of a layer; index n_layers: of blocks in no layer. */
typedef struct kvf__profile_count {
    uint64_t held, shared, cached; /* cached: idle blocks */
} kvf__profile_count;

struct kvf__profile {
    kvf_profile_config config; /* with defaults filled in */
    uint64_t now, begun;       /* begun: when the compaction under way began */
    uint32_t n_fresh;          /* its fresh blocks are m->fresh[0 .. n_fresh) */
    kvf__counts fresh_taken;   /* fresh blocks taken by all compactions */
    kvf__counts freed;         /* blocks whose last holder a compaction removed: free or idle in the prefix cache now */
    uint64_t n_stored, n_gone; /* the prefix cache's counts of nodes at the last call */
    _Atomic uint64_t version;
    _Atomic uint64_t *words;
    kvf__profile_block *blocks; /* [n_blocks] */
    kvf__profile_table *tables; /* [n_tables] */
    uint32_t *rows;             /* (seq, layer, group, row_capacity): the rows as they were after the last call */
    kvf__profile_count *counts; /* [n_layers + 1] */
    uint32_t *touched;          /* [n_blocks] */
    uint32_t n_touched;
    uint32_t *gone; /* [n_blocks] */
    uint32_t n_gone_blocks;
    kvf_profile_event *events; /* [config.n_events] */
    _Atomic uint64_t *head, *tail;
};

/* profile_read.c: checks the caller's config; lays its part of the slab out; sets the initial state. */
kvf_status kvf__profile_resolve(const kvf_profile_config *in, kvf_profile_config *out, kvf_error *err);
void kvf__profile_lay_out(kvf_manager *m, kvf__slab *slab, const kvf_profile_config *config);
void kvf__profile_start(kvf_manager *m, const kvf_profile_config *config);

/* profile.c: reports a block that is no longer cached (p: the profile), or one that a sequence's window has dropped. May be
 * called any number of times within a call. */
void kvf__profile_gone(void *p, uint32_t id, kvf__gone_why why, bool fell_free);
void kvf__profile_dropped(kvf__profile *p, uint32_t id, uint32_t seq);

/* Reports of calls. Each is called at most once, at the end of a call, if m->profile is set. first_copy: the call appended
 * the copies from there on. */
void kvf__profile_figures(kvf_manager *m); /* only promises, sequences or score pages have changed */
/* After kvf_append. */
void kvf__profile_appended(kvf_manager *m, const kvf_append_item *items, uint32_t n_items, const kvf_copy_list *copies,
                           uint32_t first_copy);
/* After any other change to the tables of a sequence. */
void kvf__profile_seq(kvf_manager *m, uint32_t index, kvf__cause cause);
void kvf__profile_forked(kvf_manager *m, uint32_t index, const kvf_copy_list *copies, uint32_t first_copy);
/* After a swap of the sequences. */
void kvf__profile_swapped(kvf_manager *m, const kvf_seq *seqs, uint32_t n_seqs, const kvf_copy_list *copies,
                          uint32_t first_copy);
/* After an attach of the sequence, and after an offload. */
void kvf__profile_attached(kvf_manager *m, uint32_t index, const kvf_copy_list *copies, uint32_t first_copy);
void kvf__profile_offloaded(kvf_manager *m, const kvf_copy_list *copies, uint32_t first_copy);
void kvf__profile_copied(kvf_manager *m, const kvf_copy_list *copies); /* the copies are done */
void kvf__profile_begun(kvf_manager *m);                               /* the fresh rows of a compaction are taken */
void kvf__profile_committed(kvf_manager *m); /* before the entries of the compaction are cleared */
void kvf__profile_cancelled(kvf_manager *m);
/* For blocks held outside the tables. These three return KVF_OK, for tail calls. */
kvf_status kvf__profile_taken(kvf_manager *m, uint32_t id);
kvf_status kvf__profile_held(kvf_manager *m, uint32_t id);
kvf_status kvf__profile_released(kvf_manager *m, uint32_t id);

/* For kvf_audit: checks the profile against a walk of all data. */
kvf_status kvf__profile_audit(const kvf_manager *m, kvf_error *err);

#endif
