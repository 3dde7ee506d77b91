/* kvzip: after the prompt the model is asked to repeat it, and keeps what it looked at.
 *
 * Source: KVzip, arXiv 2505.23416. From the paper: a slot is worth the highest probability that any query of the repetition, and any
 * query head of its KV head, gives it; one threshold over all layers and heads (its non-uniform budgets); only the prompt is
 * compressed, generated tokens are all kept. From the public code (snu-mllab/KVzip, and NVIDIA's kvpress): pieces of 2,048 tokens, the
 * first 4 tokens are always kept, no recent window, no floor for a head.
 *
 * Other than there: probabilities are over all that a query sees, where the code normalises over the sinks, the piece's own slots and
 * the repetition; and the instruction before each piece is the same, where the code quotes the last tokens before it. The last token of the
 * prompt is kept (a window of 1, the least here). */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_kvzip = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "kvzip",
    .summary = "keeps what the model looks at when it repeats its prompt",
    .needs = KVF_NEEDS_REPEAT,
    .flags = KVF_POLICY_EQUAL_LAYERS | KVF_POLICY_PROMPT_ONLY,
};

void kvf__preset_kvzip(kvf_policy_options *o) {
    o->score = KVF_SCORE_REPEAT;
    o->repeat_piece = 2048;
    o->budget = KVF_BUDGET_GLOBAL;
    o->head_floor = 0.0;
    o->window = 1;
    o->merge = KVF_MERGE_NONE;
}
