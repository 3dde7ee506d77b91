/* streaming: keeps the first tokens and the newest; the others are dropped, whatever their attention.
 *
 * Source: StreamingLLM, arXiv 2309.17453, its rolling cache with attention sinks. Of S slots min(sinks, S - 1) are
 * sinks and the rest the recent window. Keys keep the rotation of their true position, where the paper rotates again
 * by cache index. No scores: nothing is observed, so that a hit in a prefix cache needs none. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_streaming = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "streaming",
    .summary = "keeps the first tokens and the newest",
    .budget = kvf__policy_budget,
    .match = kvf__policy_match,
    .gate = kvf__policy_gate,
    .apply = kvf__policy_apply,
    .flags = KVF_POLICY_EQUAL_LAYERS | KVF_POLICY_RECENT,
};

void kvf__preset_streaming(kvf_policy_options *o) { o->merge = KVF_MERGE_NONE; }
