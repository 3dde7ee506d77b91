/* h2o: keeps heavy hitters by accumulated attention and a recent window, half each, equally many in every layer; the others
 * are dropped.
 *
 * Source: H2O, arXiv 2306.14048, its eviction policy. There is no metric, so that all layers get the same size. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_h2o = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "h2o",
    .summary = "keeps the most attended tokens and the newest, all layers alike",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
    .observe = kvf__policy_observe,
    .budget = kvf__policy_budget,
    .match = kvf__policy_match,
    .gate = kvf__policy_gate,
    .apply = kvf__policy_apply,
    .flags = KVF_POLICY_EQUAL_LAYERS,
};

void kvf__preset_h2o(kvf_policy_options *o) {
    o->merge = KVF_MERGE_NONE;
    o->n_parts = 1;
    o->sinks = 0;
}
