/* evict: d2o without merging: evicted tokens are dropped.
 *
 * Source: D2O, arXiv 2406.13035, its ablation of the compensation mechanism (section on ablations, table 6): layers are
 * sized and tokens chosen as d2o does. No key is compared. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_evict = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "evict",
    .summary = "d2o without merging",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
};

void kvf__preset_evict(kvf_policy_options *o) { o->merge = KVF_MERGE_NONE; }
