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
    return (uint64_t)e->info->n_layers * e->info->n_q_heads * e->config.block_size * sizeof(float);
}

typedef struct move {
    const kvf_engine *e;
    float *sums;
    uint32_t n_tokens;
    bool to_pages;
} move;

/* Copies the columns of one (layer, query head) from or to snapshot pages. */
static void move_row(void *ctx, uint32_t item, uint32_t thread) {
    const move *m = ctx;
    (void)thread;
    uint32_t bs = m->e->config.block_size, n_rows = m->e->info->n_layers * m->e->info->n_q_heads;
    float *sums = m->sums + (size_t)item * m->e->config.max_prefill_tokens;
    for (uint32_t begin = 0; begin < m->n_tokens; begin += bs) {
        float *page = m->e->snapshots + ((size_t)m->e->page_ids[begin / bs] * n_rows + item) * bs;
        size_t bytes = KVF__MIN(bs, m->n_tokens - begin) * sizeof(float);
        memcpy(m->to_pages ? page : sums + begin, m->to_pages ? sums + begin : page, bytes);
    }
}

static void move_sums(kvf_engine *e, float *sums, uint32_t n_tokens, bool to_pages) {
    move m = {e, sums, n_tokens, to_pages};
    kvf__stream_for(e->stream, e->info->n_layers * e->info->n_q_heads, move_row, &m);
}

/* Loads the sums of the tokens found in the cache from their snapshot. */
kvf_status kvf__engine_restore_sums(kvf_engine *e, const kvf_step_item *item, float *sums, kvf_error *err) {
    uint32_t n = 0, capacity = kvf__ceil_div(e->config.max_context, e->config.block_size);
    kvf_status st = kvf_prefix_snapshot_get(e->manager, item->match, e->page_ids, capacity, &n);
    if (st)
        return kvf__fail(err, st, "snapshot of %u tokens: %s", item->match->n_snapshot_tokens,
                         kvf_manager_error(e->manager));
    move_sums(e, sums, item->match->n_snapshot_tokens, false);
    return KVF_OK;
}

/* Stores snapshots of the prompts that have reached a point where others may continue. Without room none is stored. */
void kvf__engine_keep_sums(kvf_engine *e, const kvf_step *step) {
    for (uint32_t i = step->n_decode; i < step->n_items; i++) {
        const kvf_step_item *item = &step->items[i];
        const kvf__live *r = e->rows[i];
        if (!r || !item->take_snapshot || !e->prompt_sums[i]) continue; /* of column sums: such alone take snapshots */
        uint32_t n = 0, n_tokens = item->token_begin + item->n_tokens;
        kvf_prefix_key key = kvf__live_key(r, n_tokens);
        if (kvf_prefix_snapshot_put(e->manager, item->seq, &key, n_tokens, item->snapshot_flags, e->page_ids,
                                    kvf__ceil_div(e->config.max_context, e->config.block_size), &n) == KVF_OK &&
            n)
            move_sums(e, e->prompt_sums[i], n_tokens, true);
    }
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
