/* snapkv: keeps the tokens that the last queries of the prompt attend to; all generated tokens are kept.
 *
 * Source: SnapKV, arXiv 2404.14469, section 4. The rows of the prompt's last 64 queries (option score_window) are summed,
 * averaged over neighbours with a kernel of 5 (score_pool; what lies outside counts as 0, as in the authors' code) and over the
 * query heads of a KV head (gqa sum: the same order). Of C slots the last 64 tokens (window) are kept, and the C - 64 best of
 * those before them. All layers get the same C. There are no decode events. */
#include "d2o_policy/policy.h"

const kvf_policy_ops kvf__policy_snapkv = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "snapkv",
    .summary = "compresses the prompt alone, to what its last queries look at",
    .needs = KVF_NEEDS_LAST_ROWS,
    .flags = KVF_POLICY_EQUAL_LAYERS | KVF_POLICY_PROMPT_ONLY,
};

void kvf__preset_snapkv(kvf_policy_options *o) {
    o->merge = KVF_MERGE_NONE;
    o->sinks = 0;
    o->score = KVF_SCORE_WINDOW;
    o->score_window = o->window = 64;
    o->score_pool = 5;
}
