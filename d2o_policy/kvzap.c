/* kvzap: a linear probe of each token's hidden state predicts what kvzip would find, and one fixed threshold decides.
 *
 * Source: KVzap, arXiv 2601.07891. From the paper: the probe predicts the logarithm of KVzip's normalised score (KVzip+) for each KV
 * head; slots below a fixed threshold go, so that what is kept depends on the prompt, not on a budget; the last 128 tokens are kept.
 * From the public code (NVIDIA's kvpress): a threshold of -4 as the default; another model's probe may need another.
 *
 * Other than there: prompts are judged at their end (the code judges each token when it leaves the window), generated tokens are all kept,
 * and the first 4 tokens are, too. The probe is linear; the paper also has one of two layers. rho has no say in what is kept: only
 * prompts longer than its budget are judged. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_kvzap = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "kvzap",
    .summary = "keeps what a probe scores above a fixed threshold",
    .needs = KVF_NEEDS_PROBE,
    .flags = KVF_POLICY_EQUAL_LAYERS | KVF_POLICY_PROMPT_ONLY,
};

void kvf__preset_kvzap(kvf_policy_options *o) {
    o->score = KVF_SCORE_PROBE;
    o->budget = KVF_BUDGET_GLOBAL;
    o->threshold = -4.0;
    o->head_floor = 0.0;
    o->window = 128;
    o->merge = KVF_MERGE_NONE;
}
