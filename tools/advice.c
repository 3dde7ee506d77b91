/* How many requests fold (d2o if the model has no probe) would hold in the KV memory, by the admission rule and the mean of the
 * lines so far. */
#define _POSIX_C_SOURCE 200809L
#include "tools/advice.h"

#define ADVISED_RHO "0.3"

kvf__advice kvf__advice_begin(const kvf__cli *cli, const kvf_model_info *info, const kvf_policy_options *policy) {
    bool evicts = !info->sliding_window; /* beyond a window no policy that evicts is taken */
    bool on = evicts && !cli->policy && !cli->quiet && kvf__policy_keeps_all(policy);
    return (kvf__advice){.on = on, .policy = on && kvf__probe_exists(cli) ? "fold" : "d2o"};
}

void kvf__advice_add(kvf__advice *a, const kvf__line *line) {
    if (!a->on || !kvf__policy_keeps_all(&line->policy)) return;
    a->n_lines++;
    a->prompt_tokens += line->n_tokens;
    a->max_tokens += line->max_tokens;
}

static bool project(const kvf__advice *a, const kvf__cli *cli, const kvf_model_info *info, const char *policy,
                    kvf_policy_need *need) {
    kvf_policy_options options;
    kvf_error err;
    uint64_t context = cli->context ? cli->context : info->n_context, n_prompt = a->prompt_tokens / a->n_lines,
             n_new = a->max_tokens / a->n_lines;
    if (n_prompt >= context) return false;
    if (n_new > context - n_prompt) n_new = context - n_prompt;
    uint32_t n_groups = cli->heads_per_group ? info->n_kv_heads / cli->heads_per_group : 1;
    return !kvf_policy_options_init(&options, sizeof options, policy, NULL, &err) &&
           (kvf__policy_keeps_all(&options) || !kvf_policy_option_set(&options, "rho", ADVISED_RHO, &err)) &&
           !kvf_policy_project(&options, info->n_layers, n_groups, cli->block_size, (uint32_t)n_prompt, (uint32_t)n_new,
                               need, &err);
}

void kvf__advice_step(kvf__advice *a, const kvf__cli *cli, const kvf_model_info *info, const kvf_engine_stats *stats) {
    if (!a->on || !a->n_lines || !stats->n_running || (!stats->n_preempted && !stats->n_waiting)) return;
    const kvf_pool_occupancy *b = &stats->occupancy.blocks;
    kvf_policy_need full, less;
    if (!project(a, cli, info, "full", &full) || !project(a, cli, info, a->policy, &less)) return;
    uint64_t used = (uint64_t)b->n_held + b->n_promised, left = b->n_total > used ? b->n_total - used : 0;
    bool waits = stats->n_waiting && stats->n_running < cli->max_running && left < full.prompt_blocks;
    if (!stats->n_preempted && !waits) return;
    uint64_t steady = less.steady_blocks < full.steady_blocks ? less.steady_blocks : full.steady_blocks;
    uint64_t first = less.prompt_blocks > steady ? less.prompt_blocks : steady; /* one of them is in its prompt */
    uint64_t would = steady && b->n_total >= first ? 1 + (b->n_total - first) / steady : 0;
    if (would > cli->max_running) would = cli->max_running;
    if (would <= stats->n_running) return;
    a->on = false;
    kvf__say("the KV memory holds %u of these requests at once; --policy %s --rho " ADVISED_RHO
             " would hold about %llu (docs/results.md says what that costs)",
             stats->n_running, a->policy, (unsigned long long)would);
}
