/* fold: this project's own policy, presets of d2o's core.
 *
 * Presets probe and repeat rank tokens by the model itself and drop the others: scores from KVzap's probe (arXiv 2601.07891) or KVzip's
 * repetition with KVzip+'s norms (arXiv 2505.23416, 2601.07891), KVzip's one threshold over all layers and heads, with a floor for each
 * head (Ada-KV, arXiv 2407.11550), and half of each head's budget as recent window.
 *
 * Preset attention (the default). What it takes from D2O (arXiv 2406.13035): sizes of layers from the variance of their attention, and that an evicted
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

static void by_model(kvf_policy_options *o) {
    o->n_parts = 1;
    o->budget = KVF_BUDGET_GLOBAL;
    o->head_floor = 0.25;
    o->merge = KVF_MERGE_NONE;
}

void kvf__preset_fold_probe(kvf_policy_options *o) {
    by_model(o);
    o->score = KVF_SCORE_PROBE;
}

void kvf__preset_fold_repeat(kvf_policy_options *o) {
    by_model(o);
    o->score = KVF_SCORE_REPEAT;
    o->score_norm = KVF_SCORE_NORM_OUTPUT;
}
