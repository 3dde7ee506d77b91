/* tools/watch.h: feeds a run into the occupancy report, the traces and the figures.
 *
 * A recorded request is written when all submitted before it have ended, so that the file is in order of arrival. The
 * memory this takes is bounded by the requests in flight.
 */
#ifndef KVF_TOOLS_WATCH_H
#define KVF_TOOLS_WATCH_H

#include "tools/cli.h"
#include "tools/occupancy.h"
#include "tools/trace.h"

typedef struct kvf__watched
    kvf__watched; /* an answer of a request from its submission to its end; NULL where nothing is watched */
typedef struct kvf__watch_prefix kvf__watch_prefix;

typedef struct kvf__watch { /* zero: watches nothing, and all calls do nothing */
    const kvf__cli *cli;
    bool profiles; /* a page, a trace or figures are wanted: the manager keeps a profile */
    bool going;    /* between begin and end */
    bool failed;
    uint32_t n_layers;
    double zero_s, step_s; /* the clock at begin, and at the last step's */
    kvf__occ occ;
    kvf__chrome chrome;
    kvf__out_file record;
    char source[256], title[128], policy[112];
    kvf__watched *first, *last;  /* of record: in order of submission */
    uint64_t n_submitted;        /* requests */
    kvf__watch_prefix *prefixes; /* [n_prefixes]: first prompts of groups */
    uint32_t n_prefixes;
    /* of the last step */
    uint64_t n_steps, n_prompt_tokens, n_decode_tokens, n_again_tokens, n_preempted;
} kvf__watch;

/* The config of a manager whose profile this needs, or NULL: static. */
const kvf_profile_config *kvf__watch_profile(const kvf__cli *cli);

/* Checks that all outputs can be opened for writing, without changing them; false after a message. */
bool kvf__watch_check(const kvf__cli *cli);
bool kvf__watch_begin(kvf__watch *watch, const kvf__cli *cli, const kvf_model_info *info, kvf_engine *engine,
                      const char *label); /* false after a message; kvf__watch_end follows in both cases */
/* An answer of a request; the first is 0. */
kvf__watched *kvf__watch_submit(kvf__watch *watch, const uint32_t *tokens, size_t n_tokens, uint32_t answer);
void kvf__watch_refused(kvf__watch *watch, kvf__watched *request); /* it was not submitted after all */
void kvf__watch_finish(kvf__watch *watch, kvf__watched *request, const kvf_result *result);
void kvf__watch_stepping(kvf__watch *watch); /* a step begins */
void kvf__watch_step(kvf__watch *watch, kvf_engine *engine, const kvf_engine_stats *stats);
/* Writes the outputs that are written at the end; false after a message if any output could not be written, now or
 * before. */
bool kvf__watch_end(kvf__watch *watch, kvf_engine *engine);

#endif
