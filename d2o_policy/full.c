/* full: append only. Nothing is observed, sized or evicted; a request holds all its tokens, and rho is without effect.
 * The baseline of every comparison. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_full = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "full",
    .summary = "keeps every token",
    .budget = kvf__policy_budget,
    .match = kvf__policy_match,
    .gate = kvf__policy_gate,
    .apply = kvf__policy_apply,
    .flags = KVF_POLICY_KEEPS_ALL,
};

void kvf__preset_full(kvf_policy_options *o) {
    o->rho = 1.0;
    o->merge = KVF_MERGE_NONE;
}
