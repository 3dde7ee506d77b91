/* The result of an answer: what it holds, its figures, its text; and the callback that gets it. */
#include <math.h>

#include "engine/internal.h"

/* The KV part of the result of a request that has its sequence. */
static void result_kv(kvf_engine *e, const kvf__live *r, kvf_layer_occupancy *layers, kvf_result *result) {
    uint32_t index, next_pos;
    if (kvf_seq_index(e->manager, r->seq, &index) || kvf_seq_next_pos(e->manager, r->seq, &next_pos) ||
        kvf_seq_occupancy(e->manager, r->seq, layers, sizeof *layers))
        return;
    result->layers = layers;
    result->layer_bytes = sizeof *layers;
    result->sizes = kvf_policy_sizes(e->policies, index);
    result->group_sizes = kvf_policy_group_sizes(e->policies, index);
    result->density = kvf_policy_density(e->policies, index);
    kvf_policy_counts counts = {.struct_size = sizeof counts};
    if (!kvf_policy_get_counts(e->policies, index, &counts))
        result->merged = counts.merged, result->dropped = counts.dropped;
    for (uint32_t l = 0; l < e->shape.n_layers; l++) result->held_tokens += layers[l].slots_used;
    result->full_tokens = (uint64_t)next_pos * e->n_tables;
    result->kept = result->held_tokens * e->pages.heads_per_group;
    if (kvf_seq_sharing(e->manager, r->seq, &result->own_blocks, &result->shared_blocks)) result->own_blocks = 0;
}

void kvf__live_note_single(kvf_engine *e) {
    const kvf__live *single = NULL;
    e->single.request = 0;
    for (const kvf__live *r = e->first_running; r; r = r->next_running) {
        if (r->idle) continue; /* what is idle goes before anything ends */
        if (single) return;
        single = r;
    }
    if (!single) return;
    kvf_result result = {.request = single->id};
    uint32_t n_layers = e->shape.n_layers;
    result_kv(e, single, e->single_layers, &result);
    if (result.sizes) result.sizes = memcpy(e->single_sizes, result.sizes, n_layers * sizeof *e->single_sizes);
    if (result.group_sizes)
        result.group_sizes = memcpy(e->single_groups, result.group_sizes, e->n_tables * sizeof *e->single_groups);
    if (result.density)
        result.density = memcpy(e->single_density, result.density, n_layers * sizeof *e->single_density);
    if (result.layers) e->single = result;
}

/* The KV that a request holds, or held before the scheduler ended it. */
void kvf__live_take_kv(kvf_engine *e, const kvf__live *r, kvf_layer_occupancy *layers, kvf_result *result) {
    memset(layers, 0, e->shape.n_layers * sizeof *layers);
    result->layers = layers;
    result->layer_bytes = sizeof *layers;
    result->n_groups = e->n_groups;
    if (r->seq) {
        result_kv(e, r, layers, result);
    } else if (e->single.request == r->id) {
        result->layers = e->single.layers;
        result->sizes = e->single.sizes;
        result->group_sizes = e->single.group_sizes;
        result->density = e->single.density;
        result->merged = e->single.merged;
        result->dropped = e->single.dropped;
        result->held_tokens = e->single.held_tokens;
        result->full_tokens = e->single.full_tokens;
        result->kept = e->single.kept;
        result->own_blocks = e->single.own_blocks;
        result->shared_blocks = e->single.shared_blocks;
    }
}

static kvf_limit limit_of(const kvf_engine *e, const kvf__live *r, kvf_finish finish) {
    if (finish != KVF_FINISH_LENGTH) return KVF_LIMIT_NONE;
    if (r->memory_full) return KVF_LIMIT_MEMORY;
    return r->n_known == e->config.max_context ? KVF_LIMIT_CONTEXT : KVF_LIMIT_TOKENS;
}

kvf_result kvf__live_result(const kvf_engine *e, const kvf__live *r, kvf_finish finish, const kvf_error *error) {
    double now = kvf__engine_clock(e), sum = 0;
    uint32_t n = r->n_known - r->n_begin, first = r->n_begin - r->n_prompt;
    for (uint32_t i = 0; i < n; i++) sum += r->logprobs[first + i];
    return (kvf_result){.struct_size = sizeof(kvf_result),
                        .request = r->group ? r->group->id : r->id,
                        .user = r->user,
                        .finish = finish,
                        .limit = limit_of(e, r, finish),
                        .error = error ? error->text : NULL,
                        .detail = error,
                        .stop_string = finish == KVF_FINISH_STOP ? r->stopped_by : NULL,
                        .tokens = n ? r->tokens + r->n_begin : NULL,
                        .logprobs = r->logprobs + first,
                        .n_tokens = n,
                        .n_prompt = kvf__live_seen(r, r->n_begin),
                        .n_preempted = r->n_preempted,
                        .n_cached = r->n_cached,
                        .block_steps = r->block_steps,
                        .reserved_block_steps = r->reserved_block_steps,
                        .n_block_steps = r->n_block_steps,
                        .first_token_s = r->first_token > 0 ? r->first_token - r->submitted : 0,
                        .queue_steps = r->started > 0 ? r->started_step - r->submitted_step : UINT64_MAX,
                        .start_s = r->started > 0 ? r->started - r->submitted : NAN,
                        .total_s = now - r->submitted,
                        .n_top_logprobs = r->n_top,
                        .top_tokens = r->n_top ? r->top_tokens + (size_t)first * r->n_top : NULL,
                        .top_logprobs = r->n_top ? r->top_logprobs + (size_t)first * r->n_top : NULL,
                        .index = r->index,
                        .n_results = r->group ? r->group->n : 1,
                        .score = n ? sum / n : 0};
}

/* The caller has removed it from the list, since the callback may submit or abort. */
void kvf__live_deliver(kvf_engine *e, kvf__live *r, kvf_result *result) {
    e->done_merged += result->merged;
    e->done_dropped += result->dropped;
    e->done_kept += result->kept;
    e->stats.n_finished++;
    kvf__live_tell(e, r, result);
}

const kvf_error kvf__no_text = {.text = "out of host memory for the text", .rank = -1};

void kvf__live_tell(kvf_engine *e, kvf__live *r, kvf_result *result) {
    size_t text_bytes = kvf__utf8_clean(r->text, r->text_bytes, NULL);
    char *text = kvf__alloc(&e->allocator, text_bytes + 1);
    if (text) kvf__utf8_clean(r->text, r->text_bytes, text);
    result->text = text ? text : "";
    result->text_bytes = text ? text_bytes : 0;
    if (!text) {
        result->finish = KVF_FINISH_ERROR;
        result->detail = &kvf__no_text;
        result->error = kvf__no_text.text;
    }
    static const uint32_t no_token;
    static const double no_logprob;
    if (!result->tokens) result->tokens = &no_token; /* copying none of them is then no fault of the caller's */
    if (!result->logprobs) result->logprobs = &no_logprob;
    if (r->on_finish) r->on_finish(r->user, result);
    kvf__free(&e->allocator, text, text_bytes + 1);
}
