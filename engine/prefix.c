/* The prefix cache in the engine: the keys of requests, and the column sums of cached prompts (snapshots).
 *
 * A snapshot page holds the sums of block_size tokens, (n_layers, n_q_heads, block_size). */
#include "engine/internal.h"

kvf_prefix_key kvf__live_key(const kvf__live *r, uint32_t n_tokens) {
    return (kvf_prefix_key){.struct_size = sizeof(kvf_prefix_key),
                            .tokens = r->tokens,
                            .n_tokens = n_tokens,
                            .salt = r->salt,
                            .salt_bytes = r->salt_bytes};
}

uint64_t kvf__engine_snapshot_page_bytes(const kvf_engine *e) {
    return (uint64_t)e->shape.n_layers * e->shape.n_q_heads * e->config.block_size * sizeof(float);
}

/* Loads the sums of the tokens found in the cache from their snapshot. */
kvf_status kvf__engine_restore_sums(kvf_engine *e, const kvf_step_item *item, float *sums, kvf_error *err) {
    uint32_t n = 0, capacity = kvf__ceil_div(e->config.max_context, e->config.block_size);
    kvf_status st = kvf_prefix_snapshot_get(e->manager, item->match, e->page_ids, capacity, &n);
    if (st)
        return kvf__fail(err, st, "snapshot of %u tokens: %s", item->match->n_snapshot_tokens,
                         kvf_manager_error(e->manager)->text);
    return e->runner.snapshot(e->runner.ctx, sums, e->page_ids, item->match->n_snapshot_tokens, 0, err);
}

/* Stores snapshots of the prompts that have reached a point where others may continue. Without room none is stored. */
kvf_status kvf__engine_keep_sums(kvf_engine *e, const kvf_step *step, kvf_error *err) {
    kvf_status st = KVF_OK;
    for (uint32_t i = step->n_decode; i < step->n_items && !st; i++) {
        const kvf_step_item *item = &step->items[i];
        const kvf__live *r = e->rows[i];
        if (!r || !item->take_snapshot || item->prefill_offset == UINT32_MAX)
            continue; /* of column sums: such alone take snapshots */
        uint32_t n = 0, n_tokens = item->token_begin + item->n_tokens;
        kvf_prefix_key key = kvf__live_key(r, n_tokens);
        if (kvf_prefix_snapshot_put(e->manager, item->seq, &key, n_tokens, item->snapshot_flags, e->page_ids,
                                    kvf__ceil_div(e->config.max_context, e->config.block_size), &n) == KVF_OK &&
            n)
            st = e->runner.snapshot(e->runner.ctx, e->prompt_sums[i], e->page_ids, n_tokens, 1, err);
    }
    if (st && kvf_prefix_clear(e->manager)) return KVF_E_CORRUPT; /* it names pages without contents */
    return st;
}

/* With the request's own tokens, since samples of one prompt differ. */
kvf_status kvf__engine_set_prefix(kvf_engine *e, const kvf__live *r) {
    kvf_sched_prefix prefix = {.struct_size = sizeof prefix,
                               .prefix_end = r->prefix_end,
                               .no_hits = r->no_cache_hits,
                               .prompt_only = e->config.deterministic};
    if (e->config.prefix_cache) prefix.key = kvf__live_key(r, r->n_prompt);
    return kvf_sched_set_prefix(e->sched, r->id, &prefix);
}
