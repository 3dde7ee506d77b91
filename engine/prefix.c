/* The prefix cache in the engine: the keys of requests, and the statistics of cached prompts (snapshots).
 *
 * A snapshot page holds one statistic of block_size tokens, (rows, block_size), and has room for the n_layers * n_q_heads rows of the
 * column sums. Squares have n_layers * n_kv_heads rows, log-probabilities one. */
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

kvf__statistic kvf__engine_statistic(const kvf_engine *e, uint32_t stat) {
    const kvf_runner_shape *m = &e->shape;
    const kvf_runner_buffers *b = &e->buffer;
    if (stat == KVF_SNAPSHOT_SUMS) return (kvf__statistic){m->n_layers * m->n_q_heads, b->sums};
    if (stat == KVF_SNAPSHOT_SQUARES) return (kvf__statistic){m->n_layers * m->n_kv_heads, b->squares};
    return (kvf__statistic){1, b->prompt_logprobs};
}

/* Moves the `wanted` ones of the statistics between the columns at `offset` of the accumulators and the pages in page_ids, which are
 * of a snapshot with `stats`. */
static kvf_status move_statistics(kvf_engine *e, uint32_t stats, uint32_t wanted, uint32_t offset, uint32_t n_tokens,
                                  int to_pages, kvf_error *err) {
    const uint32_t *ids = e->page_ids;
    kvf_status st = KVF_OK;
    for (uint32_t stat = KVF_SNAPSHOT_SUMS; stat <= KVF_SNAPSHOT_LOGPROBS && !st; stat <<= 1) {
        kvf__statistic x = kvf__engine_statistic(e, stat);
        if (stats & wanted & stat && x.columns) /* NULL: a runner without arithmetic */
            st = e->runner.snapshot(e->runner.ctx, x.columns + offset, x.n_rows, ids, n_tokens, to_pages, err);
        if (stats & stat) ids += kvf__ceil_div(n_tokens, e->config.block_size);
    }
    return st;
}

/* Loads the statistics of the tokens found in the cache from their snapshot. */
kvf_status kvf__engine_restore(kvf_engine *e, const kvf_step_item *item, uint32_t wanted, kvf_error *err) {
    uint32_t n = 0;
    kvf_status st = kvf_prefix_snapshot_get(e->manager, item->match, e->page_ids, e->n_page_ids, &n);
    if (st)
        return kvf__fail(err, st, "snapshot of %u tokens: %s", item->match->n_snapshot_tokens,
                         kvf_manager_error(e->manager)->text);
    return move_statistics(e, item->match->snapshot_stats, wanted, item->prefill_offset, item->match->n_snapshot_tokens,
                           0, err);
}

/* Stores snapshots of the prompts that have reached a point where others may continue. Without room none is stored. */
kvf_status kvf__engine_keep_sums(kvf_engine *e, const kvf_step *step, kvf_error *err) {
    kvf_status st = KVF_OK;
    for (uint32_t i = step->n_decode; i < step->n_items && !st; i++) {
        const kvf_step_item *item = &step->items[i];
        const kvf__live *r = e->rows[i];
        if (!r || !item->take_snapshot || item->prefill_offset == UINT32_MAX)
            continue; /* only prompts with accumulators take snapshots */
        uint32_t n = 0, n_tokens = item->token_begin + item->n_tokens;
        kvf_prefix_key key = kvf__live_key(r, n_tokens);
        if (kvf_prefix_snapshot_put(e->manager, item->seq, &key, n_tokens, item->snapshot_flags, e->page_ids,
                                    e->n_page_ids, &n) == KVF_OK &&
            n)
            st = move_statistics(e, item->snapshot_flags, UINT32_MAX, item->prefill_offset, n_tokens, 1, err);
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
