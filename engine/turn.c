/* Dialogues: requests that stay open when their answer has ended, and their next turns (segments). */
#include "engine/internal.h"

void kvf__live_answered(kvf_engine *e, kvf__live *r, kvf_finish finish) {
    if (!r->keep_open || kvf_sched_pause(e->sched, r->id)) {
        kvf__live_finish(e, r, finish, NULL);
        return;
    }
    kvf_result result = kvf__live_result(e, r, finish, NULL);
    kvf__live_take_kv(e, r, e->result_layers, &result);
    r->idle = 1;
    e->n_idle++;
    kvf__live_tell(e, r, &result);
}

/* Allocates arrays with room for a turn and copies the present ones. false: out of memory, nothing is allocated. */
static bool make_room(kvf_engine *e, const kvf__live *r, const kvf_turn *turn, kvf__live *to) {
    const kvf_allocator *a = &e->allocator;
    uint32_t n_known = r->n_known, n_after = r->n_known - r->n_prompt, begin = n_known + turn->n_tokens;
    uint32_t n_answer = KVF__MIN(turn->max_tokens, e->config.max_context - begin),
             n_forced = turn->forced ? n_answer : 0;
    size_t n_top = (size_t)r->n_top * n_after;
    *to = (kvf__live){.max_tokens = n_after + turn->n_tokens + n_answer,
                      .n_prompt = r->n_prompt,
                      .n_top = r->n_top,
                      .n_known = begin,
                      .n_begin = begin,
                      .forced = turn->forced != NULL,
                      .n_segments = r->n_segments + 1};
    bool good = kvf__live_take_arrays(e, to, n_after + turn->n_tokens + n_forced);
    to->segments = kvf__alloc(a, to->n_segments * sizeof *to->segments);
    if (!good || !to->segments) return false;
    memcpy(to->tokens, r->tokens, n_known * sizeof *to->tokens);
    memcpy(to->tokens + n_known, turn->tokens, turn->n_tokens * sizeof *to->tokens);
    if (n_after) memcpy(to->logprobs, r->logprobs, n_after * sizeof *to->logprobs);
    if (n_top) memcpy(to->top_tokens, r->top_tokens, n_top * sizeof *to->top_tokens);
    if (n_top) memcpy(to->top_logprobs, r->top_logprobs, n_top * sizeof *to->top_logprobs);
    if (r->n_segments) memcpy(to->segments, r->segments, r->n_segments * sizeof *to->segments);
    to->segments[r->n_segments] = (kvf_sched_segment){n_known, begin};
    if (n_forced) memcpy(to->tokens + begin, turn->forced, n_forced * sizeof *to->tokens);
    return true;
}

static void give_room(kvf_engine *e, kvf__live *r) {
    const kvf_allocator *a = &e->allocator;
    kvf__live_free_arrays(e, r);
    kvf__free(a, r->segments, r->n_segments * sizeof *r->segments);
}

/* Gives the request the arrays of make_room; the caller frees the old ones. Counters of the answer start again. */
static void take_room(kvf_engine *e, kvf__live *r, const kvf__live *to) {
    r->room = to->room;
    r->tokens = to->tokens;
    r->logprobs = to->logprobs;
    r->segments = to->segments;
    r->n_segments = to->n_segments;
    r->forced = to->forced;
    r->top_tokens = to->top_tokens;
    r->top_logprobs = to->top_logprobs;
    r->max_tokens = to->max_tokens;
    r->n_known = to->n_known;
    r->n_begin = to->n_begin;
    r->text_bytes = 0;
    r->stopped_by = NULL;
    r->first_token = r->started = 0;
    r->submitted = kvf__engine_clock(e);
    r->submitted_step = e->stats.n_steps;
    r->block_steps = r->reserved_block_steps = r->n_block_steps = 0;
    r->idle = 0;
    e->n_idle--;
}

static kvf_status check_turn(const kvf_engine *e, const kvf__live *r, const kvf_turn *turn, kvf_error *err) {
    kvf_status st;
    if (!turn->tokens || !turn->n_tokens) return kvf__fail(err, KVF_E_INVALID, "turn: has no token; give at least one");
    if (!turn->max_tokens) return kvf__fail(err, KVF_E_INVALID, "turn: max_tokens 0: must be 1 at least");
    if (!e->buffer.logits && !turn->forced)
        return kvf__fail(err, KVF_E_UNSUPPORTED, "forced: runner %.64s has no logits: give all tokens of the answer",
                         e->runner.name ? e->runner.name : "?");
    if (turn->n_tokens >= e->config.max_context - r->n_known)
        return kvf__engine_no_context(e, r->n_known, turn->n_tokens, err);
    if ((st = kvf__engine_check_ids(e, turn->tokens, turn->n_tokens, "token id", err))) return st;
    return turn->forced ? kvf__engine_check_ids(e, turn->forced, turn->max_tokens, "forced token id", err) : KVF_OK;
}

kvf_status kvf_engine_extend(kvf_engine *e, kvf_request request, const kvf_turn *turn, kvf_error *err) {
    if (!e) return kvf__fail(err, KVF_E_INVALID, "engine: is NULL");
    kvf_turn t;
    kvf__live *r = kvf__live_find(e, request), to;
    kvf_status st = kvf__config_read(&t, sizeof t, turn, "kvf_turn", err);
    if (st) return st;
    if (!r)
        return kvf__fail(err, KVF_E_NOT_FOUND, "request %llu: is not live: it was never given out, or has ended",
                         (unsigned long long)request);
    if (!r->idle)
        return kvf__fail(err, KVF_E_STATE, "request %llu: %s", (unsigned long long)request,
                         r->keep_open ? "its answer has not ended" : "was not submitted with keep_open");
    if ((st = check_turn(e, r, &t, err))) return st;
    if (make_room(e, r, &t, &to))
        st = kvf_sched_extend(e->sched, r->id, to.segments, to.n_segments, t.max_tokens);
    else
        st = KVF_E_NO_MEMORY;
    if (st) {
        give_room(e, &to);
        return st == KVF_E_NO_MEMORY ? kvf__fail(err, st, "turn: its tokens could not be allocated")
                                     : kvf__engine_refused(e, st, err);
    }
    kvf__live was = *r;
    take_room(e, r, &to);
    st = kvf__engine_set_prefix(e, r); /* which reads the tokens that it was given before */
    give_room(e, &was);
    return st ? kvf__engine_refused(e, st, err) : KVF_OK;
}
