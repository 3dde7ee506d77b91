/* d2o: sizes per layer from the density of its attention; evicted tokens merge into the nearest kept key.
 *
 * Source: D2O, arXiv 2406.13035 (ICLR 2025). Its layer-level dynamic allocation is metric and budget; its token level
 * is observe and match (eviction), gate (the moving threshold of its compensation mechanism) and apply (the merge).
 * README.md says where its authors' code differs, docs/options.md which of the two is whose default. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_d2o = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "d2o",
    .summary = "layers sized by their attention; evicted tokens merge into others",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
    .observe = kvf__policy_observe,
    .metric = kvf__policy_metric,
    .budget = kvf__policy_budget,
    .match = kvf__policy_match,
    .gate = kvf__policy_gate,
    .apply = kvf__policy_apply,
};

/* paper, the default. */
void kvf__preset_d2o(kvf_policy_options *o) { (void)o; }

void kvf__preset_d2o_serving(kvf_policy_options *o) {
    o->budget_unit = KVF_BUDGET_BLOCK;
    o->evict_every = 0;
}

void kvf__preset_d2o_authors(kvf_policy_options *o) {
    o->min_tokens = 0;
    o->redistribute = 0;
    o->full_layers[1] = 1;
    o->full_layers[2] = -1;
    o->n_full_layers = 3;
    o->n_parts = 1;
    o->merge = KVF_MERGE_AUTHORS;
    o->scope = KVF_SCOPE_LAYER;
    o->beta_new = o->beta_old = 0.5;
    o->defer_first_decode = 1;
}
