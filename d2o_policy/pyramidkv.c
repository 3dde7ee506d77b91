/* pyramidkv: snapkv's choice of tokens, with more of them in lower layers and fewer in higher ones.
 *
 * Source: PyramidKV, arXiv 2406.02069, section 4 ("KV cache size allocation"), beta = 20. With C slots a layer on average and w
 * in the window, the last layer keeps (C - w) / beta beside its window and the first 2 (C - w) less that, those between by equal
 * steps; where the first would exceed the L - w there are, it gets those and the last layer the rest of the pair. The sizes that
 * follow from these weights add up to the budget exactly (the authors round each step down). With C <= w all are equal. */
#include "d2o_policy/policy.h"

#define BETA 20.0

static void weights(const kvf_policy_options *o, uint32_t n_prompt, uint32_t budget, const double *density,
                    uint32_t n_layers, double *weights) {
    double w = o->window, average = (double)budget - w, all = (double)n_prompt - w;
    (void)density;
    double least = average / BETA, most = 2 * average - least;
    if (average <= 0) least = most = average;
    if (average > 0 && most > all) {
        most = all;
        least = 2 * average - most;
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        double share = n_layers > 1 ? (double)l / (n_layers - 1) : 0.5;
        weights[l] = w + most - share * (most - least);
    }
}

const kvf_policy_ops kvf__policy_pyramidkv = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "pyramidkv",
    .summary = "snapkv with sizes that fall from the first layer to the last",
    .needs = KVF_NEEDS_LAST_ROWS,
    .flags = KVF_POLICY_EQUAL_LAYERS | KVF_POLICY_PROMPT_ONLY,
    .weights = weights,
};

void kvf__preset_pyramidkv(kvf_policy_options *o) { kvf__preset_snapkv(o); }
