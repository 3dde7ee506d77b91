/* uniform: d2o with the same S in every layer.
 *
 * Source: D2O, arXiv 2406.13035, its ablation of the layer level (section on ablations, table 4): tokens are chosen and
 * merged as d2o does, the layers share the budget equally. No metric is taken. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_uniform = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "uniform",
    .summary = "d2o with equally many tokens in every layer",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
    .flags = KVF_POLICY_EQUAL_LAYERS,
};

void kvf__preset_uniform(kvf_policy_options *o) { (void)o; }
