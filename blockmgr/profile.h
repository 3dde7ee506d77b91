/* blockmgr/profile.h: the manager's side of a profile: what calls tell it after they have changed something.
 *
 * The hot path knows nothing of it: a call that succeeded names the tables it may have changed, and the profile finds
 * out what changed by comparing their rows with its own copy of them. So whoever adds a call that changes tables adds
 * one line to it, and nothing to the pool.
 *
 * Glossary
 *   words    the figures as they are read: kvf_profile from `now` on, then the layers, each an atomic of 64 bits. Written
 *            by the manager's thread alone, between two steps of `version`, which is odd meanwhile. Stores release and
 *            loads acquire, so that a reader that has seen a new word sees the odd version too.
 *   touched  blocks whose state may have changed in this call: settled at its end, when all tables are as they will be.
 *   gone     blocks that fell free in this call from the cache or a window; they may have been taken again since.
 *   fresh    blocks that a compaction has taken and no table has yet.
 *   ring     events [tail, head) of a power of two; the manager moves head, the reader tail.
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

/* Invariant between calls: live = it is held or idle in the prefix cache (idle); shared = it has two or more holders; not
 * touched, not gone. */
typedef struct kvf__profile_block {
    uint64_t born, used; /* not live: used is when it fell free, born is 1 when it ever was live */
    uint32_t layer;      /* n_layers: in no layer's table */
    uint32_t seq;        /* that lost it last */
    uint8_t cause;       /* likewise: kvf__cause */
    bool live, idle, shared, touched, fresh, gone;
} kvf__profile_block;

/* Invariant between calls: as the table's own. */
typedef struct kvf__profile_table {
    uint32_t n_slots, n_blocks;
} kvf__profile_table;

/* A layer's counts of distinct blocks; index n_layers: those in no layer. */
typedef struct kvf__profile_count {
    uint64_t held, shared, cached; /* cached: idle ones */
} kvf__profile_count;

struct kvf__profile {
    kvf_profile_config config; /* resolved */
    uint64_t now, begun;       /* begun: the compaction under way */
    uint32_t n_fresh;          /* of it: m->fresh[0 .. n_fresh) */
    kvf__counts fresh_taken;   /* by all compactions */
    kvf__counts freed;         /* blocks whose last holder they were: fell free, or idle into the prefix cache */
    uint64_t n_stored, n_gone; /* nodes of the prefix cache, as it counted them at the last call */
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

/* profile_read.c: checks the caller's config; takes its part of the slab; the first state. */
kvf_status kvf__profile_resolve(const kvf_profile_config *in, kvf_profile_config *out, kvf_error *err);
void kvf__profile_lay_out(kvf_manager *m, kvf__slab *slab, const kvf_profile_config *config);
void kvf__profile_start(kvf_manager *m, const kvf_profile_config *config);

/* profile.c: a block is not cached any more; p: the profile. A sequence's window has let one fall free. Called within a
 * call, any number of times. */
void kvf__profile_gone(void *p, uint32_t id, kvf__gone_why why, bool fell_free);
void kvf__profile_dropped(kvf__profile *p, uint32_t id, uint32_t seq);

/* What has happened. Each is called at most once at the end of a call, when m->profile is set. */
void kvf__profile_figures(kvf_manager *m); /* promises, sequences or score pages alone have changed */
/* After kvf_append: the copies are those from first_copy on. */
void kvf__profile_appended(kvf_manager *m, const kvf_append_item *items, uint32_t n_items, const kvf_copy_list *copies,
                           uint32_t first_copy);
/* All tables of a sequence, whatever was done to them. */
void kvf__profile_seq(kvf_manager *m, uint32_t index, kvf__cause cause);
void kvf__profile_forked(kvf_manager *m, uint32_t index, const kvf_copy_list *copies, uint32_t first_copy);
/* After a swap of the sequences: the copies are those from first_copy on. */
void kvf__profile_swapped(kvf_manager *m, const kvf_seq *seqs, uint32_t n_seqs, const kvf_copy_list *copies,
                          uint32_t first_copy);
/* After an attach of the sequence, and after an offload: likewise. */
void kvf__profile_attached(kvf_manager *m, uint32_t index, const kvf_copy_list *copies, uint32_t first_copy);
void kvf__profile_offloaded(kvf_manager *m, const kvf_copy_list *copies, uint32_t first_copy);
void kvf__profile_copied(kvf_manager *m, const kvf_copy_list *copies); /* they are done */
void kvf__profile_begun(kvf_manager *m);                               /* a compaction: its fresh rows are taken */
void kvf__profile_committed(kvf_manager *m);                           /* before its entries are forgotten */
void kvf__profile_cancelled(kvf_manager *m);
/* These three return KVF_OK, for tail calls. */
kvf_status kvf__profile_taken(kvf_manager *m, uint32_t id); /* a block outside the tables */
kvf_status kvf__profile_held(kvf_manager *m, uint32_t id);
kvf_status kvf__profile_released(kvf_manager *m, uint32_t id);

/* For kvf_audit: the profile says what walking everything says. */
kvf_status kvf__profile_audit(const kvf_manager *m, kvf_error *err);

#endif
