/* fold: this project's own policy, presets of d2o's core.
 *
 * Preset probe: scores from KVzap's probe (arXiv 2601.07891) of the attention that a repetition of the prompt would give (KVzip, arXiv
 * 2505.23416, with KVzip+'s norms), to which the logarithm of the attention that the slot did get is added, .4 of it, where slots of one head compete: the probe knows
 * what a later question may look up, attention what the next tokens go on looking at. KVzip's one threshold over all layers and heads,
 * with a floor for each head (Ada-KV, arXiv 2407.11550), and half of each head's budget as recent window. Evicted values are merged
 * by attention as in preset attention, above a lower cosine.
 *
 * Preset light: the same scores without attention, the same threshold; evicted tokens are dropped. It needs no attention mass, so any
 * attention kernel serves. Preset repeat: light with the repetition's own scores instead of the probe's.
 *
 * Preset attention (the default of a library that has no model): what it takes from D2O (arXiv 2406.13035) are sizes of layers from the
 * variance of their attention, and that an evicted token enters the kept one whose key is nearest. What it changes: more to layers of
 * high variance, not less; scores by the root of the number of queries that saw the token (accumulated sums favour old tokens) and
 * by the norm of its value (what attention to it can move); half of S is the recent window; keys, which are rotated to their
 * positions, are left alone, and values are merged by the attention that they got (merge attention; that a kept token should answer
 * for those it took in is KeepKV's idea, arXiv 2504.09936, which counts tokens), above a fixed cosine. The query heads of a KV head
 * count by the one that looks most. docs/fold.md has the evidence. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_fold = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "fold",
    .summary = "ranks by a probe of the model, merges values by attention",
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
    o->evict_every = 0;
    o->merge = KVF_MERGE_NONE;
}

void kvf__preset_fold_light(kvf_policy_options *o) {
    by_model(o);
    o->score = KVF_SCORE_PROBE;
}

void kvf__preset_fold_probe(kvf_policy_options *o) {
    kvf__preset_fold_light(o);
    o->score_mix = 0.4;
    o->gqa = KVF_GQA_MAX;
    o->merge = KVF_MERGE_ATTENTION;
    o->merge_keys = 0;
    o->gate = 0.5;
}

void kvf__preset_fold_repeat(kvf_policy_options *o) {
    by_model(o);
    o->score = KVF_SCORE_REPEAT;
    o->score_norm = KVF_SCORE_NORM_OUTPUT;
}
