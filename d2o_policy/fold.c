/* fold: this project's own policy, a preset of d2o's core.
 *
 * What it takes from D2O (arXiv 2406.13035): sizes of layers from the variance of their attention, and that an evicted
 * token enters the kept one whose key is nearest. What it changes: more to layers of high variance, not less; scores by
 * the root of the number of queries that saw the token (accumulated sums favour old tokens) and by the norm of its value
 * (what attention to it can move); half of S is the recent window; keys, which are rotated to their positions, are left
 * alone, and values are folded by the attention that they got (merge attention; that a kept token should answer for
 * those it took in is KeepKV's idea, arXiv 2504.09936, which counts tokens), above a fixed cosine. The query heads of a
 * KV head count by the one that looks most. docs/fold.md has the evidence. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_fold = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "fold",
    .summary = "d2o with scores per query and values folded by their attention",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
};

void kvf__preset_fold(kvf_policy_options *o) {
    o->metric = KVF_METRIC_LAYER_MINMAX;
    o->layer_sign = -1;
    o->n_parts = 1;
    o->score = KVF_SCORE_SQRT;
    o->score_norm = KVF_SCORE_NORM_V;
    o->gqa = KVF_GQA_MAX;
    o->merge = KVF_MERGE_ATTENTION;
    o->merge_keys = 0;
    o->gate = 0.7;
}
