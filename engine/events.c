/* The policies' moments in the engine: observe after each layer; the driver (kvfold/events.h) at a prompt's end, before an append and
 * after a decode step. */
#include "engine/internal.h"

/* Called by the forward pass after each layer. */
kvf_status kvf__engine_observe(void *ctx, uint32_t layer, const kvf_mass *mass) {
    kvf_engine *e = ctx;
    const kvf_policy_batch b = {.struct_size = sizeof b,
                                .view = &e->view,
                                .pages = &e->pages,
                                .scores = &e->scores,
                                .layer = layer,
                                .row_end = e->n_decode,
                                .mass = mass,
                                .logprobs = e->logprobs,
                                .path = e->config.path};
    return kvf_policy_observe(e->policies, e->stream, &b, e->observe_error);
}

/* ---- What the driver asks ------------------------------------------------------------------------------ */

static kvf_status reserve(void *ctx, uint32_t row, kvf_error *err) {
    kvf_engine *e = ctx;
    kvf_status st = kvf_sched_event_room(e->sched, e->rows[row]->id);
    return st ? kvf__fail_as(err, st, kvf_sched_error(e->sched)) : KVF_OK;
}

/* Too few blocks for shared tables: preempts the latest request. */
static kvf_status make_room(void *ctx, uint8_t *dropped, kvf_error *err) {
    kvf_engine *e = ctx;
    kvf_step_item shed;
    kvf_status st = kvf_sched_shed(e->sched, &shed);
    if (st) return kvf__fail_as(err, st, kvf_sched_error(e->sched));
    kvf__live_preempted(e, shed.user, shed.swapped);
    for (uint32_t row = 0; row < e->view.n_seqs; row++) dropped[row] = !e->rows[row];
    return KVF_OK;
}

static kvf_status metric(void *ctx, uint32_t row, double *values, kvf_error *err) {
    const kvf_engine *e = ctx;
    return e->runner.metric ? e->runner.metric(e->runner.ctx, e->rows[row]->user, values, err) : KVF_OK;
}

kvf_status kvf__engine_create_events(kvf_engine *e, kvf_error *err) {
    const kvf_events_config c = {.struct_size = sizeof c,
                                 .manager = e->manager,
                                 .policies = e->policies,
                                 .stream = e->stream,
                                 .path = e->config.path,
                                 .max_rows = e->max_running,
                                 .allocator = e->allocator,
                                 .ctx = e,
                                 .reserve = reserve,
                                 .make_room = make_room,
                                 .metric = metric};
    return kvf_events_create(&c, &e->events, err);
}

/* ---- Moments ------------------------------------------------------------------------------------------- */

/* The rows [begin, end) of e->view. Afterwards rows of requests that were preempted for others' events are NULL. */
static kvf_status run(kvf_engine *e, kvf_moment moment, uint32_t begin, uint32_t end, kvf_error *err) {
    for (uint32_t row = begin; row < end; row++)
        if (!e->rows[row]) e->seqs[row] = 0;
    kvf_moment_rows r = {.struct_size = sizeof r,
                         .moment = moment,
                         .view = &e->view,
                         .seqs = e->seqs,
                         .row_begin = begin,
                         .row_end = end,
                         .pages = e->runner.device ? &e->pages : NULL,
                         .scores = &e->scores,
                         .n_prompt = e->batch_prompts,
                         .prompt_sums = e->batch_sums,
                         .prompt_stride = e->config.max_prefill_tokens,
                         .prompt_last = e->batch_last,
                         .prompt_squares = e->batch_squares,
                         .prompt_logprobs = e->batch_logprobs,
                         .changed = e->changed};
    return kvf_events_run(e->events, &r, err);
}

/* New sizes: the scheduler reserves by them. */
static kvf_status resize(kvf_engine *e, uint32_t begin, uint32_t end, kvf_error *err) {
    for (uint32_t row = begin; row < end; row++) {
        kvf_status st;
        if (!e->rows[row] || !(e->changed[row] & KVF_ROW_RESIZED)) continue;
        if ((st = kvf_sched_resize(e->sched, e->rows[row]->id)))
            return kvf__fail_as(err, st, kvf_sched_error(e->sched));
    }
    return KVF_OK;
}

/* Before a token is appended: compacts requests whose prompt fitted the budget and that would now exceed it, and requests whose budget
 * has changed. */
kvf_status kvf__engine_overflow(kvf_engine *e, kvf_error *err) {
    uint32_t n = 0;
    for (kvf__live *r = e->first_running; r; r = r->next_running) {
        uint32_t index, next_pos;
        if (r->in_prompt || kvf_seq_index(e->manager, r->seq, &index)) continue;
        int changed = r->changed;
        r->changed = 0;
        if (!changed &&
            (r->idle || kvf_seq_next_pos(e->manager, r->seq, &next_pos) || kvf__live_segment_begins(r, next_pos)))
            continue; /* no token is appended; what a segment takes beyond the budget goes at its end */
        if (!kvf_policy_evicts(&r->policy) || (!changed && kvf_policy_sizes(e->policies, index))) continue;
        e->rows[n] = r;
        e->seqs[n++] = r->seq;
    }
    if (!n) return KVF_OK;
    kvf_status st = kvf_view_fill(e->manager, 1, e->seqs, n, &e->view);
    if (st) return kvf__fail_as(err, st, kvf_manager_error(e->manager));
    if ((st = run(e, KVF_BEFORE_APPEND, 0, n, err))) return st;
    return resize(e, 0, n, err);
}

/* Sets the accumulators that a row's policies need. */
static void accumulators(kvf_engine *e, uint32_t row) {
    const kvf__live *r = e->rows[row];
    const float *sums = e->prompt_sums[row];
    uint32_t needs = r && sums ? kvf_policy_needs(&r->policy) : 0;
    if (!(needs & ~(uint32_t)KVF_NEEDS_ROW)) needs = 0; /* the columns are others' */
    size_t at = needs ? (size_t)(sums - e->buffer.sums) : 0;
    e->batch_sums[row] = needs & KVF_NEEDS_COL_SUMS ? e->buffer.sums + at
                         : needs & KVF_NEEDS_REPEAT ? e->buffer.prompt_max + at
                                                    : NULL;
    e->batch_last[row] = needs & KVF_NEEDS_LAST_ROWS ? e->buffer.last_sums + at : NULL;
    e->batch_squares[row] = needs & KVF_NEEDS_SQUARES ? e->buffer.squares + at : NULL;
    e->batch_logprobs[row] = needs & KVF_NEEDS_LOGPROBS ? e->buffer.prompt_logprobs + at : NULL;
    e->batch_prompts[row] = r ? r->n_seen : 0;
}

/* The prompts of these rows, or segments, have ended: sizes, then their events together. */
kvf_status kvf__engine_prompt_end(kvf_engine *e, uint32_t row_begin, uint32_t row_end, kvf_error *err) {
    for (uint32_t row = row_begin; row < row_end; row++) accumulators(e, row);
    return run(e, KVF_AT_PROMPT_END, row_begin, row_end, err);
}

kvf_status kvf__engine_decode_events(kvf_engine *e, uint32_t n_decode, kvf_error *err) {
    kvf_status st = run(e, KVF_AFTER_STEP, 0, n_decode, err);
    return st ? st : resize(e, 0, n_decode, err);
}
