/* kvfold/profile.h: what the blocks of a manager do over time: gauges, high-water marks, histograms, events.
 * A manager keeps a profile if its config has one (kvf_manager_config.profile). Without a profile a call pays one branch.
 * With it, a call that changes a table does O(changed blocks) more work. Nothing is allocated after create.
 *
 * Simple use
 *     kvf_status profiled(kvf_manager_config config, uint64_t (*nanoseconds)(void *ctx), kvf_manager **manager) {
 *         kvf_profile_config profile;
 *         kvf_profile_config_init(&profile, sizeof profile);
 *         profile.clock = nanoseconds; // or leave it NULL and call kvf_profile_tick before each step
 *         config.profile = &profile;   // copied by kvf_manager_create
 *         return kvf_manager_create(&config, manager, NULL);
 *     }
 *     // in any thread, at any time while the manager works
 *     kvf_status held_blocks(const kvf_manager *manager, uint64_t *n_held) {
 *         kvf_profile profile = {.struct_size = sizeof profile};
 *         kvf_status status = kvf_profile_read(manager, &profile, NULL, 0, 0);
 *         if (!status) *n_held = profile.held;
 *         return status;
 *     }
 *
 * Nouns
 *   use          of a block: it is taken, written by an append or a compaction, or gains a holder. Reads by attention do not
 *                count: the manager does not see them.
 *   lifetime     the time from when a block is taken until it becomes free.
 *   idle time    the time from a block's last use until it becomes free.
 *   reuse gap    the time from a block's last use until it gains a holder (fork, hold, prefix hit).
 *   free gap     the time from when a block becomes free until it is taken again.
 *   freed bytes, evicted bytes
 *                a compaction evicts slots, but only whole blocks give memory back. So the two differ: to evict one slot
 *                may free a whole block or nothing.
 *
 * Rules
 *   - All times are in the unit of the caller's clock: nanoseconds, steps. The library reads no clock of its own. If the
 *     clock goes back, the time stays as it was, and this is counted.
 */
#ifndef KVFOLD_PROFILE_H
#define KVFOLD_PROFILE_H

#include "kvfold/blockmgr.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_profile_config {
    size_t struct_size;
    uint32_t n_events; /* capacity of the event ring; rounded up to a power of two, at most 2^24; 0: 4096 */
    uint64_t (*clock)(
        void *ctx); /* read once in each call that changes something; NULL: kvf_profile_tick sets the time */
    void *clock_ctx;
} kvf_profile_config;

/** Sets struct_size and the defaults.
 *  @param config filled; NULL does nothing. @param struct_size sizeof *config: no byte beyond it is written.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API void kvf_profile_config_init(kvf_profile_config *config, size_t struct_size);

/* ---- Figures ----------------------------------------------------------------------------------- */

enum { KVF_HISTOGRAM_BUCKETS = 65 };

/* Bucket 0 counts zeros, bucket b counts values in [2^(b-1), 2^b). */
typedef struct kvf_histogram {
    uint64_t n, sum, max;
    uint64_t buckets[KVF_HISTOGRAM_BUCKETS];
} kvf_histogram;

/* Figures of the whole pool. Always held + cached + free = total, also in a copy read while the manager works. */
typedef struct kvf_profile {
    size_t struct_size;
    uint64_t now;               /* the clock at the last change */
    uint64_t n_calls;           /* calls that changed something */
    uint64_t n_clock_back;      /* times the clock went back */
    uint64_t block_bytes;       /* as configured */
    uint64_t total, free, held; /* blocks; held: by a table, a handle or a pending copy */
    uint64_t cached;            /* idle blocks in the prefix cache */
    uint64_t outside;           /* the part of held that is in no layer's table (kvf_block_take) */
    uint64_t promised, shared;  /* shared: more than one holder */
    uint64_t held_max, shared_max, cached_max, promised_max;
    uint64_t pages_held, pages_held_max; /* score pages */
    uint64_t seqs, seqs_max;
    uint64_t slots_used, slots_idle; /* over all tables; a shared block's slots count in each */
    uint64_t slots_idle_max;
    uint64_t fragmentation_ppm; /* slots_idle per million slots of all tables */
    uint64_t taken_blocks;      /* since create, like all figures below */
    uint64_t shared_blocks;     /* holders gained beyond the first */
    uint64_t freed_blocks;      /* sum of all freed_by_*: each block has one cause; taken - freed = held + cached */
    uint64_t freed_by_end, freed_by_compaction, freed_by_rollback, freed_by_release;
    uint64_t freed_by_eviction; /* idle blocks evicted from the prefix cache because a block was needed */
    uint64_t copied_blocks, copied_pages;
    uint64_t compactions;   /* (sequence, layer) pairs */
    uint64_t evicted_slots; /* by compactions, over all tables */
    uint64_t evicted_bytes; /* bytes of these slots */
    /* Bytes that compactions gave back as whole blocks: the blocks whose last holder they removed (including those that the
     * prefix cache keeps), minus the fresh blocks they took. It is the highest value so far, so that it never falls. It may
     * exceed evicted_bytes: a block may hold a single slot. */
    uint64_t freed_bytes;
    uint64_t events, events_dropped;
    kvf_histogram lifetime, idle_time, reuse_gap, free_gap;
    uint64_t freed_by_swap; /* their sequence was swapped out */
    uint64_t swapped_out_blocks, swapped_in_blocks;
    uint64_t host_held, host_held_max;        /* blocks of the host */
    uint64_t freed_by_window;                 /* left the window of their layer */
    uint64_t host_cached, host_cached_max;    /* host blocks in the prefix cache that no copy pins */
    uint64_t offloaded_blocks, loaded_blocks; /* prefix cache: copied to the host; copied back by hits */
    uint64_t
        freed_by_adoption; /* the prefix cache took over a sequence's blocks with the same tokens, or more, instead */
    uint64_t
        freed_by_removal; /* removed from the prefix cache other than by eviction: drop, clear, about to be written */
} kvf_profile;

/* Figures of one layer. Blocks are distinct: a block that two sequences share counts once (in entries twice). */
typedef struct kvf_profile_layer {
    uint64_t entries, held, shared, cached, slots_used, slots_idle; /* cached: idle */
    uint64_t entries_max, held_max, shared_max, slots_idle_max;
    uint64_t taken_blocks, freed_blocks, evicted_slots;
} kvf_profile_layer;

/** Sets the time for all following calls, if the config has no clock.
 *  @param manager a manager with a profile. @param now time; a value before the last one is counted and changes nothing.
 *  @own nothing. @threads as the manager. @errors KVF_E_STATE (no profile). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_profile_tick(kvf_manager *manager, uint64_t now);

/** Reads a consistent copy of all figures, as they were between two calls on the manager.
 *  @param manager a manager with a profile. @param out struct_size set by the caller.
 *  @param layers result, or NULL. @param layer_bytes sizeof *layers. @param n_layers number of layers to write, from layer 0 on; at most the manager's.
 *  @own plain values. @threads any, at any time, while another thread uses the manager. That thread never waits for this
 *  call; this call retries while the figures change. A failure leaves no detail text.
 *  @errors KVF_E_STATE (no profile), KVF_E_INVALID (out, struct_size, n_layers). @cost O(n_layers), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_profile_read(const kvf_manager *manager, kvf_profile *out, kvf_profile_layer *layers,
                                              size_t layer_bytes, uint32_t n_layers);

/** The smallest value that a bucket counts: 0, 1, 2, 4, ...
 *  @param bucket 0..KVF_HISTOGRAM_BUCKETS - 1. @own nothing. @threads any. @errors none: UINT64_MAX past the last.
 *  @cost O(1). */
KVF_API uint64_t kvf_histogram_floor(uint32_t bucket);

/* ---- Events ------------------------------------------------------------------------------------- */

/* The numbers never change. */
typedef enum kvf_profile_kind {
    KVF_PROFILE_ALLOC = 1, /* n_blocks were taken; block is the first of them */
    KVF_PROFILE_FREE = 2,  /* n_blocks became free; block is the first */
    KVF_PROFILE_SHARE = 3, /* n_blocks gained a holder; block is the first */
    KVF_PROFILE_COPY = 4,  /* block is copied to other */
    KVF_PROFILE_STORE = 5, /* n_blocks, over all layers, were added to the prefix cache */
    KVF_PROFILE_EVICT = 6, /* n_blocks, over all layers, left the prefix cache; idle ones became free */
    KVF_PROFILE_SWAP =
        7, /* n_blocks moved to (other 0) or from (other 1) the host: a sequence's or the prefix cache's */
    /* The longest table of a (sequence, layer) went from slots_before to slots_after; duration: since begin. */
    KVF_PROFILE_COMPACT = 8,
    KVF_PROFILE_KINDS = 9 /* one more than the last of this version */
} kvf_profile_kind;

/* 48 bytes. A field that does not apply is 0; a layer or sequence is then UINT32_MAX, a block KVF_NO_BLOCK. */
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
 *  @param kind a kvf_profile_kind. @own static. @threads any. @errors none: "?" for any other number. @cost O(1). */
KVF_API const char *kvf_profile_kind_name(uint32_t kind);

/** Takes the oldest events out of the ring. If the ring is full, new events are dropped and counted (events_dropped); the
 *  manager never waits.
 *  @param manager a manager with a profile. @param events result. @param capacity room in events. @param n events taken.
 *  @own plain values. @threads one reader at a time, in the manager's thread or another.
 *  @errors KVF_E_STATE (no profile), KVF_E_INVALID. @cost O(events taken), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_profile_drain(const kvf_manager *manager, kvf_profile_event *events, uint32_t capacity,
                                               uint32_t *n);

#ifdef __cplusplus
}
#endif
#endif
