/* sirllm: keeps the least probable tokens, the first ones, and the newest; the others are dropped.
 *
 * Source: SirLLM, arXiv 2405.12528, its token entropy and its decay. A token's score is -log p(x_t | x_<t), the paper's token entropy, which the caller
 * passes (KVF_NEEDS_LOGPROBS) and all layers and heads share. Of S slots 4 are sinks and the rest is halved between the tokens of
 * highest score and the newest (option nm). At the end of each later prompt segment, a turn of the dialogue, what was there
 * before is multiplied by score_decay (the paper's decay ratio; 1 by default). The first token of all has no p and counts as
 * expected: a sink keeps it. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_sirllm = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "sirllm",
    .summary = "keeps the least expected tokens, the first and the newest",
    .needs = KVF_NEEDS_LOGPROBS,
    .flags = KVF_POLICY_EQUAL_LAYERS,
};

void kvf__preset_sirllm(kvf_policy_options *o) {
    o->merge = KVF_MERGE_NONE;
    o->n_parts = 1;
}
