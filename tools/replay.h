/* tools/replay.h: replays a trace against a pool and the scheduler, without a model.
 *
 * The scheduler, the manager and the policy's sizes are the real ones. The densities of the layers, which a model would
 * give, are in the trace, read from a file, or generated from a seed. Nothing is computed and no KV memory is allocated:
 * a compaction consists of its sizes alone.
 */
#ifndef KVF_TOOLS_REPLAY_H
#define KVF_TOOLS_REPLAY_H

#include "kvfold/scheduler.h"
#include "tools/occupancy.h"
#include "tools/progress.h"
#include "tools/trace.h"

typedef struct kvf__replay_config {
    const kvf__trace *trace;
    const kvf_policy_options *policy;
    uint32_t n_layers, n_kv_heads, heads_per_group, block_size, chunk, max_running, max_context;
    uint64_t n_blocks, block_bytes;
    bool prefix_cache;
    uint32_t n_snapshot_pages; /* with it: pages of block_size tokens, for policies that observe prompts */
    const double *densities;   /* [n_layers] for requests without their own; NULL: made from the seed */
    uint64_t seed;
    double step_s, token_s;   /* what a step takes, and each of its tokens beside */
    double speed;             /* arrivals come so many times as fast */
    volatile const int *stop; /* not 0: end after the step */
    kvf__progress *progress;  /* shown while it goes on; or NULL */
} kvf__replay_config;

typedef struct kvf__replay_result {
    uint64_t n_done, n_early; /* early: the pool was full, alone */
    uint64_t n_refused;       /* could never fit */
    char refused[480];        /* why, the first of them */
    uint64_t n_compactions;
    bool stopped;
} kvf__replay_result;

/* Into occ, which is begun. False after a message. */
bool kvf__replay(const kvf__replay_config *config, kvf__occ *occ, kvf__chrome *chrome, kvf__replay_result *result);

#endif
