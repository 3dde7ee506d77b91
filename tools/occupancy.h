/* tools/occupancy.h: records the blocks of a run or replay step by step, and writes the records in several formats.
 *
 * Invariants
 *   - Its memory does not grow with the run: a series of KVF__OCC_POINTS points, each the maximum over its steps, and
 *     lists of the slowest steps and longest waits.
 *   - Times are seconds since the beginning: by the clock in a run, by simulated time in a replay.
 */
#ifndef KVF_TOOLS_OCCUPANCY_H
#define KVF_TOOLS_OCCUPANCY_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "kvfold/policy.h"
#include "kvfold/prefix.h"
#include "kvfold/profile.h"

enum { KVF__OCC_POINTS = 1024, KVF__OCC_SLOWEST = 10 };

/* One step; a point of the series holds the maximum of its steps, or the end of its last one (held_after and the
 * fields after it). */
typedef struct kvf__occ_step {
    uint64_t step; /* from 1 on; of a point its first */
    double begin_s, end_s;
    double compaction_s; /* spent in compactions */
    uint32_t n_running, n_waiting, n_prefill_tokens, n_decode_tokens, n_preempted, n_compactions;
    uint32_t n_again_tokens; /* computed before, and again after a preemption: not in the two counts above */
    uint64_t held;           /* the most within the step: a prompt is whole before it is compacted */
    uint64_t full;           /* what a full cache would hold: the most */
    uint64_t held_after, cached, promised,
        shared;                      /* blocks at the end; held_after + cached + the free ones: the pool */
    uint64_t slots_used, slots_idle; /* likewise */
} kvf__occ_step;

typedef struct kvf__occ_request { /* one that has ended, or one of its answers */
    uint64_t id;
    uint32_t answer;                                 /* 0: the first; the others add no request, prompt or wait */
    double arrival_s, start_s, first_token_s, end_s; /* start: its first step; NAN: not known or never */
    uint32_t n_prompt, n_output, n_preempted;
    uint64_t queue_steps; /* steps between arrival and its first; UINT64_MAX: not known */
    const char *end;      /* "length", "stop", ... */
} kvf__occ_request;

typedef struct kvf__occ_layer { /* sums over the requests whose sizes became known */
    uint64_t keep_sum, n_keep;  /* slots kept; n_keep: requests of which the layer evicts */
    uint32_t keep_min, keep_max;
    double density_sum;
    uint64_t n_density;
    uint64_t n_groups_keep; /* requests whose head groups have sizes of their own */
} kvf__occ_layer;

typedef struct kvf__occ {                        /* kvf__occ_begin, kvf__occ_free */
    const char *title, *source, *policy, *clock; /* clock: "seconds" or "replayed seconds" */
    uint32_t n_layers, block_size;
    uint64_t n_blocks, block_bytes;
    uint64_t n_steps, stride; /* steps of one point */
    uint32_t n_points;
    kvf__occ_step *points;  /* [KVF__OCC_POINTS] */
    uint32_t *point_blocks; /* (point, layer): blocks held, the most */
    kvf__occ_step slowest[KVF__OCC_SLOWEST];
    uint32_t n_slowest;
    kvf__occ_request longest[KVF__OCC_SLOWEST]; /* waits */
    uint32_t n_longest;
    kvf__occ_layer *layers;
    uint32_t n_groups;    /* 0: no request's head groups had sizes of their own */
    uint64_t *group_keep; /* (layer, group): sums of the slots that these keep */
    uint64_t n_requests, n_answers, n_preempted, n_again_tokens, n_started, prompt_tokens, output_tokens, full_max,
        waiting_max, running_max;
    double wait_sum_s, wait_max_s, end_s;
    uint64_t queue_steps_sum, queue_steps_max;
    kvf_prefix_stats prefix;           /* at the end; struct_size 0: there was no prefix cache */
    uint64_t shared_tokens;            /* of a trace: prompt tokens that an earlier request of the group has too */
    kvf_histogram queue_histogram;     /* of queue steps */
    kvf_profile profile;               /* at the end */
    kvf_profile_layer *profile_layers; /* as profile: of the last kvf__occ_note, and of the end */
    uint32_t *now, *peak;              /* [n_layers] blocks held, by the events; and the most since the last note */
    uint64_t *held_max;                /* [n_layers] as the profile's, up to the last note */
    uint64_t now_held;
} kvf__occ;

typedef struct kvf__chrome kvf__chrome; /* below */

bool kvf__occ_begin(kvf__occ *occ, uint32_t n_layers, uint32_t block_size, uint64_t n_blocks, uint64_t block_bytes);
void kvf__occ_free(kvf__occ *occ);
/* blocks: held by each layer, distinct ones: [n_layers] */
void kvf__occ_add_step(kvf__occ *occ, const kvf__occ_step *step, const uint32_t *blocks);
/* Copies what the manager's profile and its events say about the step that has just ended into step and occ->peak;
 * compactions go to the trace. zero_s: the time on the profile's clock (nanoseconds) that is 0 in the report. False
 * without a profile. */
bool kvf__occ_note(kvf__occ *occ, kvf__chrome *chrome, const kvf_manager *manager, double zero_s, kvf__occ_step *step);
void kvf__occ_add_request(kvf__occ *occ, const kvf__occ_request *request);
/* sizes, densities: [n_layers], or NULL while unknown */
void kvf__occ_add_budget(kvf__occ *occ, const kvf_layer_size *sizes, const double *densities);
/* sizes: [n_layers][n_groups], of the same groups each time */
void kvf__occ_add_groups(kvf__occ *occ, const kvf_layer_size *sizes, uint32_t n_groups);
void kvf__occ_end(kvf__occ *occ, const kvf_manager *manager); /* takes the last figures of the profile */

/* The quantile of a histogram: that share of the values is under what is returned, the end of a bucket. */
uint64_t kvf__histogram_quantile(const kvf_histogram *histogram, double share);

/* ---- Writers: false after a message ------------------------------------------------------------------ */

json_t *kvf__occ_json(const kvf__occ *occ); /* the report as an object; NULL when out of memory */
/* By the end of the name: .json, .csv, else the Prometheus text format. */
bool kvf__occ_write_metrics(const kvf__occ *occ, const char *path);
bool kvf__occ_write_page(const kvf__occ *occ, const char *path); /* one HTML page that needs nothing else */
void kvf__occ_prometheus(const kvf__occ *occ, FILE *out);
void kvf__occ_csv(const kvf__occ *occ, FILE *out);

/* Writes a file through a function; reports a file that could not be written completely. */
typedef struct kvf__out_file {
    FILE *file;
    const char *path;
} kvf__out_file;
bool kvf__out_open(kvf__out_file *out, const char *path);
bool kvf__out_close(kvf__out_file *out); /* false after a message when any of it could not be written */

/* ---- The Chrome trace format (chrome.c): opens in Perfetto and chrome://tracing ------------------------- */

typedef struct kvf__chrome_batch { /* compactions that began and ended together */
    double begin_s, end_s;
    uint64_t n, n_slots, n_blocks;
} kvf__chrome_batch;

struct kvf__chrome {
    kvf__out_file out;
    bool is_open, failed;
    uint64_t n_events;
    uint32_t n_layers;
    uint32_t *last; /* [n_layers + 4]: counters as they were last written */
    kvf__chrome_batch batch;
    double batches_s; /* of batches since the last drain */
};

/* path NULL: writes nothing, here and below. */
bool kvf__chrome_open(kvf__chrome *chrome, const char *path, const char *title, uint32_t n_layers);
/* Counters: the most within the step at its begin, what is held after it at its end. */
void kvf__chrome_step(kvf__chrome *chrome, const kvf__occ *occ, const kvf__occ_step *step);
/* Compactions, from the manager's events; those with the same times become one slice, which kvf__chrome_flush ends. */
void kvf__chrome_compaction(kvf__chrome *chrome, double begin_s, double end_s, const kvf_profile_event *event);
void kvf__chrome_flush(kvf__chrome *chrome);
void kvf__chrome_request(kvf__chrome *chrome, const kvf__occ_request *request);
bool kvf__chrome_close(kvf__chrome *chrome); /* false after a message */

#endif
