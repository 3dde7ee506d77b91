/* exp_decay: d2o with layer weights that fall with depth, whatever the attention.
 *
 * Source: D2O, arXiv 2406.13035, table 4 (layer budgets), which compares its softmax with a rule of this name. The formula
 * is this project's: w_l = exp(-layer_sign * layer_strength * l / (n_layers - 1)), so that the last layer gets 1 / e of
 * what the first gets; layer_sign -1 turns it around. No metric is taken. */
#include <math.h>

#include "d2o_policy/policy.h"

static void weights(const kvf_policy_options *o, uint32_t n_prompt, uint32_t budget, const double *density,
                    uint32_t n_layers, double *out) {
    (void)n_prompt;
    (void)budget;
    (void)density;
    double factor = o->layer_sign * o->layer_strength / KVF__MAX(n_layers - 1, 1u);
    double first = factor < 0.0 ? n_layers - 1 : 0.0; /* the largest weight is 1, whatever the strength */
    for (uint32_t l = 0; l < n_layers; l++) out[l] = exp(-factor * (l - first));
}

const kvf_policy_ops kvf__policy_exp_decay = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "exp_decay",
    .summary = "d2o with layers whose weights fall with their depth",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
    .flags = KVF_POLICY_EQUAL_LAYERS,
    .weights = weights,
};

void kvf__preset_exp_decay(kvf_policy_options *o) { (void)o; }
