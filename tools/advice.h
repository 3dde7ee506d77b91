/* tools/advice.h: a hint, printed once, if `full` runs by default and the KV memory is short: what a policy would hold. */
#ifndef KVF_TOOLS_ADVICE_H
#define KVF_TOOLS_ADVICE_H

#include "tools/request.h"

typedef struct kvf__advice {
    bool on;                                     /* false: nothing is said, or it has been */
    const char *policy;                          /* what is advised */
    uint64_t n_lines, prompt_tokens, max_tokens; /* of the lines submitted that run with full */
} kvf__advice;

/* Enabled if the command line names no policy, without --quiet, and the model supports policies that evict. */
kvf__advice kvf__advice_begin(const kvf__cli *cli, const kvf_model_info *info, const kvf_policy_options *policy);

/* A line that was submitted. */
void kvf__advice_add(kvf__advice *advice, const kvf__line *line);

/* Call after each step: prints the hint if requests wait for KV memory or one was preempted, and a policy would hold
 * more. */
void kvf__advice_step(kvf__advice *advice, const kvf__cli *cli, const kvf_model_info *info,
                      const kvf_engine_stats *stats);

#endif
