/* kvfold/profile.h: what a manager's blocks do over time: gauges, high-water marks, histograms, events.
 *
 * A manager keeps a profile when its config names one (kvf_manager_config.profile); without it a call pays one branch.
 * With it each call that changes a table looks at that table once more, O(blocks that changed), and nothing is allocated.
 *
 *     kvf_profile_config pc = kvf_profile_config_default();
 *     pc.clock = my_nanoseconds;                       // or: kvf_profile_tick(manager, step) before each step
 *     config.profile = &pc;                            // copied by kvf_manager_create
 *     ...
 *     kvf_profile_read(manager, &profile, layers, n);  // from any thread, at any time
 *     kvf_profile_drain(manager, events, 256, &n);     // from one other thread, or the manager's
 *
 * Nouns
 *   use         of a block: it is taken, written by an append or a compaction, or gains a holder. Attention's reads are
 *               no use: the manager does not see them.
 *   lifetime    from the taking of a block to its falling free.
 *   idle time   from its last use to its falling free.
 *   reuse gap   from its last use to the use by which it gains a holder (fork, hold, a hit of the prefix cache).
 *   free gap    from an id's falling free to its next taking.
 *   freed bytes against evicted bytes: slots that a compaction evicts give memory back only as whole blocks; the block
 *               that one token began comes back whole when one token goes.
 *
 * All times are in the clock's unit, which is the caller's: nanoseconds, steps. The library reads no clock. One that
 * goes back counts as standing still, and is counted.
 */
#ifndef KVFOLD_PROFILE_H
#define KVFOLD_PROFILE_H

#include "kvfold/blockmgr.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_profile_config {
    size_t struct_size;
    uint32_t n_events;            /* room of the event ring; rounded up to a power of two, at most 2^24; 0: 4096 */
    uint64_t (*clock)(void *ctx); /* read once a call that changes something; NULL: kvf_profile_tick sets the time */
    void *clock_ctx;
} kvf_profile_config;

/** A config with struct_size set and the defaults filled in.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API kvf_profile_config kvf_profile_config_default(void);

/* ---- Figures ----------------------------------------------------------------------------------- */

enum { KVF_HISTOGRAM_BUCKETS = 65 };

/* Bucket 0 counts zeros, bucket b values in [2^(b-1), 2^b). */
typedef struct kvf_histogram {
    uint64_t n, sum, max;
    uint64_t buckets[KVF_HISTOGRAM_BUCKETS];
} kvf_histogram;

/* Of the whole pool. Always held + cached + free = total, also in a copy read while the manager works. */
typedef struct kvf_profile {
    size_t struct_size;
    uint64_t now;               /* the clock at the last change */
    uint64_t n_calls;           /* calls that changed something */
    uint64_t n_clock_back;      /* times the clock went back */
    uint64_t block_bytes;       /* as configured */
    uint64_t total, free, held; /* blocks; held: by a table, a handle or a pending copy */
    uint64_t cached;            /* held by nobody, kept for the prefix cache */
    uint64_t outside;           /* of held: in no layer's table (kvf_block_take) */
    uint64_t promised, shared;  /* shared: more than one holder */
    uint64_t held_max, shared_max, cached_max, promised_max;
    uint64_t pages_held, pages_held_max; /* score pages */
    uint64_t seqs, seqs_max;
    uint64_t slots_used, slots_idle; /* over all tables; a shared block's slots count in each */
    uint64_t slots_idle_max;
    uint64_t fragmentation_ppm; /* slots_idle in a million slots of all tables */
    uint64_t taken_blocks;      /* since create, as are all below */
    uint64_t shared_blocks;     /* holders gained beyond the first */
    uint64_t freed_blocks; /* fell free, each by one cause: the sum of all freed_by_*; taken - freed = held + cached */
    uint64_t freed_by_end, freed_by_compaction, freed_by_rollback, freed_by_release;
    uint64_t freed_by_eviction; /* from the prefix cache, where they had lain idle, because a block was needed */
    uint64_t copied_blocks, copied_pages;
    uint64_t compactions;   /* (sequence, layer) pairs */
    uint64_t evicted_slots; /* by compactions, over tables */
    uint64_t evicted_bytes; /* what these slots took */
    /* What compactions gave back, as whole blocks: those whose last holder they were, also when the prefix cache keeps
     * them, less those they took for tables that share. The most that this has come to, so that it never falls. May be
     * more than evicted_bytes: a block that holds one slot. */
    uint64_t freed_bytes;
    uint64_t events, events_dropped;
    kvf_histogram lifetime, idle_time, reuse_gap, free_gap;
    uint64_t freed_by_swap; /* their sequence went to the host */
    uint64_t swapped_out_blocks, swapped_in_blocks;
    uint64_t host_held, host_held_max;     /* blocks of the host */
    uint64_t freed_by_window;              /* out of the window of their layer */
    uint64_t host_cached, host_cached_max; /* blocks of the host that the prefix cache keeps there, held by no copy */
    uint64_t offloaded_blocks, loaded_blocks; /* of the prefix cache: copied to the host, brought back by hits */
    uint64_t
        freed_by_adoption;     /* the prefix cache took over a sequence's blocks of the same tokens, or more, instead */
    uint64_t freed_by_removal; /* out of the prefix cache without need of room: dropped, cleared, about to be written */
} kvf_profile;

/* Of one layer: distinct blocks, so that a block two sequences share counts once (entries: twice). */
typedef struct kvf_profile_layer {
    uint64_t entries, held, shared, cached, slots_used, slots_idle; /* cached: held by nobody */
    uint64_t entries_max, held_max, shared_max, slots_idle_max;
    uint64_t taken_blocks, freed_blocks, evicted_slots;
} kvf_profile_layer;

/** Sets the time of all that follows, where the config has no clock.
 *  @param manager a manager with a profile. @param now time; one before the last stays that and is counted.
 *  @own nothing. @threads as the manager. @errors KVF_E_STATE (no profile). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_profile_tick(kvf_manager *manager, uint64_t now);

/** A consistent copy of all figures: as they were between two calls on the manager.
 *  @param manager a manager with a profile. @param out struct_size set by the caller.
 *  @param layers result, or NULL. @param n_layers room in layers: that many are written, from layer 0 on; at most the
 *  manager's.
 *  @own plain values. @threads any, at any time, while another thread works with the manager; it never waits for this.
 *  This copies again while a call is changing the figures, and keeps no detail text on failure.
 *  @errors KVF_E_STATE (no profile), KVF_E_INVALID (out, struct_size, n_layers). @cost O(n_layers), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_profile_read(const kvf_manager *manager, kvf_profile *out, kvf_profile_layer *layers,
                                              uint32_t n_layers);

/** The least value that counts in a bucket: 0, 1, 2, 4, ...
 *  @param bucket 0..KVF_HISTOGRAM_BUCKETS - 1. @own nothing. @threads any. @errors none: UINT64_MAX past the last.
 *  @cost O(1). */
KVF_API uint64_t kvf_histogram_floor(uint32_t bucket);

/* ---- Events ------------------------------------------------------------------------------------- */

/* Numbers are pinned for ever. */
typedef enum kvf_profile_kind {
    KVF_PROFILE_ALLOC = 1, /* n_blocks were taken; block is the first of them */
    KVF_PROFILE_FREE = 2,  /* n_blocks fell free; block is the first */
    KVF_PROFILE_SHARE = 3, /* n_blocks gained a holder; block is the first */
    KVF_PROFILE_COPY = 4,  /* block is copied to other */
    KVF_PROFILE_STORE = 5, /* n_blocks became findable in the prefix cache, over all layers */
    KVF_PROFILE_EVICT = 6, /* n_blocks fell out of the prefix cache, over all layers; idle ones fell free */
    KVF_PROFILE_SWAP =
        7, /* n_blocks moved to (other 0) or from (other 1) the host: a sequence's, or the prefix cache's */
    KVF_PROFILE_COMPACT =
        8, /* a layer of a sequence, its longest table, went from slots_before to slots_after; duration: since begin */
    KVF_PROFILE_KINDS = 9 /* one more than the last of this version */
} kvf_profile_kind;

/* 48 bytes. What does not apply is 0, a layer or sequence UINT32_MAX, a block KVF_NO_BLOCK. */
typedef struct kvf_profile_event {
    uint64_t time;
    uint64_t duration;
    uint32_t kind; /* kvf_profile_kind */
    uint32_t layer;
    uint32_t seq; /* kvf_seq_index */
    uint32_t n_blocks;
    uint32_t block, other;
    uint32_t slots_before, slots_after;
} kvf_profile_event;

/** The name of a kind: "alloc", "free", ...
 *  @param kind a kvf_profile_kind. @own static. @threads any. @errors none: "?" for a number that is none. @cost O(1). */
KVF_API const char *kvf_profile_kind_name(uint32_t kind);

/** Takes the oldest events out of the ring. While nobody does, the ring fills, later events are dropped and counted
 *  (events_dropped), and the manager goes on as ever.
 *  @param manager a manager with a profile. @param events result. @param capacity room in it. @param n how many there were.
 *  @own plain values. @threads one at a time, which may be another than the manager's; it never waits for this.
 *  @errors KVF_E_STATE (no profile), KVF_E_INVALID. @cost O(events taken), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_profile_drain(const kvf_manager *manager, kvf_profile_event *events, uint32_t capacity,
                                               uint32_t *n);

#ifdef __cplusplus
}
#endif
#endif
