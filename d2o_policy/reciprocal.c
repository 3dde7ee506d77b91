/* reciprocal: d2o with layer weights that are the reciprocal of the density.
 *
 * Source: D2O, arXiv 2406.13035, table 4 (layer budgets), which compares its softmax with a rule of this name. The formula
 * is this project's: w_l = (1 + layer_strength * F_l) ^ -layer_sign. With the F of head_minmax, in [0, 1], a layer of the
 * highest density gets half of what one of the lowest gets; the 1 keeps a density of 0 from taking all. */
#include <math.h>

#include "d2o_policy/policy.h"

static void weights(const kvf_policy_options *o, uint32_t n_prompt, uint32_t budget, const double *density,
                    uint32_t n_layers, double *out) {
    (void)n_prompt;
    (void)budget;
    for (uint32_t l = 0; l < n_layers; l++) out[l] = pow(1.0 + o->layer_strength * density[l], -o->layer_sign);
}

const kvf_policy_ops kvf__policy_reciprocal = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "reciprocal",
    .summary = "d2o with layers weighed by the reciprocal of their density",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
    .weights = weights,
};

void kvf__preset_reciprocal(kvf_policy_options *o) { (void)o; }
