/* One step: overflow events -> plan -> copies -> forward (observe) -> events -> sample -> finish. */
#include <math.h>

#include "engine/internal.h"

/* A row's largest logit and the log of its probabilities' sum relative to that. */
typedef struct normalizer {
    double max, log_sum;
} normalizer;

/* Both follow from the logit and log-probability of the likeliest token. */
static normalizer normalize(const float *logits, uint32_t n_vocab) {
    double logprob;
    uint32_t best = kvf_sample(&(kvf_sampling){.temperature = 0}, 0, logits, n_vocab, NULL, &logprob);
    return (normalizer){(double)logits[best], -logprob};
}

/* Natural log of the probability of one token. */
static double logprob_of(const normalizer *n, float logit) { return (double)logit - n->max - n->log_sum; }

/* Insertion into a sorted list: few logits are large enough to enter it. */
void kvf__engine_top(const float *logits, uint32_t n_vocab, uint32_t k, uint32_t *tokens, double *logprobs) {
    normalizer norm = normalize(logits, n_vocab);
    uint32_t n = 0;
    for (uint32_t id = 0; id < n_vocab; id++) {
        if (logits[id] != logits[id] || (n == k && !(logits[id] > logits[tokens[n - 1]]))) continue;
        uint32_t at = n < k ? n++ : n - 1;
        for (; at && logits[id] > logits[tokens[at - 1]]; at--) tokens[at] = tokens[at - 1];
        tokens[at] = id;
    }
    for (uint32_t i = 0; i < n; i++) logprobs[i] = logprob_of(&norm, logits[tokens[i]]);
    for (uint32_t i = n; i < k; i++) tokens[i] = KVF_NO_TOKEN, logprobs[i] = -INFINITY;
}

static void draw_one(void *ctx, uint32_t i, uint32_t thread) {
    kvf_engine *e = ctx;
    kvf__draw *d = &e->draws[i];
    kvf__live *r = d->live;
    uint32_t n_vocab = e->shape.n_vocab, step = r->n_known - r->n_prompt;
    if (d->failed) return;
    if (!d->logits) { /* the runner computes none: the caller gives the tokens */
        d->token = r->tokens[r->n_known];
        return;
    }
    if (r->n_top)
        kvf__engine_top(d->logits, n_vocab, r->n_top, r->top_tokens + (size_t)step * r->n_top,
                        r->top_logprobs + (size_t)step * r->n_top);
    if (r->group && r->group->beams) {
        r->choices.n = r->group->n_choices;
        kvf__engine_top(d->logits, n_vocab, r->choices.n, r->choices.tokens, r->choices.logprobs);
    } else if (r->forced) {
        d->token = r->tokens[r->n_known];
        normalizer norm = normalize(d->logits, n_vocab);
        d->logprob = logprob_of(&norm, d->logits[d->token]);
    } else {
        char *scratch = (char *)e->sample_scratch + (size_t)thread * n_vocab * 8;
        d->token = kvf_sample(&r->sampling, step, d->logits, n_vocab, scratch, &d->logprob);
    }
}

static void tell_caller(const kvf__live *r, uint32_t token, double logprob) {
    if (r->group && r->group->ranked) return;
    if (r->on_sample_token)
        r->on_sample_token(r->user, r->index, r->group ? r->group->id : r->id, token, logprob);
    else if (r->on_token)
        r->on_token(r->user, r->group ? r->group->id : r->id, token, logprob);
}

/* Adds the new token; finishes the request if it was the last. */
static kvf_status take_token(kvf_engine *e, kvf__live *r, uint32_t token, double logprob, kvf_error *err) {
    uint32_t step = r->n_known - r->n_prompt;
    int ended = 0;
    kvf_status st = kvf_sched_token(e->sched, r->id, &ended);
    if (st) return kvf__fail_as(err, st, kvf_sched_error(e->sched));
    r->n_failures = 0;
    if (r->first_token == 0) r->first_token = kvf__engine_clock(e);
    r->tokens[r->n_known++] = token;
    r->logprobs[step] = logprob;
    int stopped = kvf__live_text(e, r, token);
    if (!r->ignore_end && e->tokenizer && kvf_tokenizer_is_end(e->tokenizer, token)) stopped = 1;
    tell_caller(r, token, logprob);
    if (stopped < 0)
        kvf__live_finish(e, r, KVF_FINISH_ERROR, &kvf__no_text);
    else if (stopped || ended)
        kvf__live_answered(e, r, stopped ? KVF_FINISH_STOP : KVF_FINISH_LENGTH);
    return KVF_OK;
}

/* A prompt's columns in an accumulator, cleared before its first tokens; NULL if not wanted. */
static kvf_status columns(kvf_engine *e, const kvf_step_item *item, bool wanted, float *all, uint32_t n_heads,
                          float **out, kvf_error *err) {
    *out = wanted && all ? all + item->prefill_offset : NULL;
    if (!*out || !item->begins) return KVF_OK;
    return e->runner.clear(e->runner.ctx, *out, e->shape.n_layers * n_heads, e->config.max_prefill_tokens,
                           item->n_columns, err);
}

/* The log-probability of a prompt's token, where its policy reads it. */
static kvf_status put_logprob(kvf_engine *e, uint32_t column, double logprob, kvf_error *err) {
    const float value = (float)logprob;
    if (!e->buffer.prompt_logprobs) return KVF_OK;
    return e->runner.write(e->runner.ctx, e->buffer.prompt_logprobs + column, &value, sizeof value, err);
}

/* The target of a row is the next token, if that belongs to a prompt. The very first token counts as certain. */
static kvf_status want_logprobs(kvf_engine *e, const kvf_step_item *item, uint32_t i, kvf_error *err) {
    const kvf__live *r = item->user;
    bool decode = item->kind == KVF_STEP_DECODE;
    uint32_t end = decode ? 0 : kvf__live_segment_at(r, item->token_begin).end;
    for (uint32_t t = 0; t < item->n_tokens; t++) {
        uint32_t next = item->token_begin + t + 1;
        if (next >= end && !kvf__live_segment_begins(r, next)) continue;
        e->targets[e->q_begin[i] + t] = r->tokens[next];
        e->n_targets++;
    }
    if (decode || !item->begins) return KVF_OK;
    return put_logprob(e, item->prefill_offset + item->token_begin, item->token_begin ? r->first_logprob : 0.0, err);
}

/* Prepares a prompt's accumulators: cleared, or loaded from a snapshot, before its first tokens. */
static kvf_status lay_out_sums(kvf_engine *e, const kvf_step_item *item, uint32_t i, kvf_error *err) {
    const kvf__live *r = item->user;
    kvf__prompt_needs prompt = kvf__live_needs(r);
    uint32_t needs = prompt.needs;
    e->row_gqa[i] = (uint8_t)prompt.gqa;
    e->prompt_sums[i] = e->buffer.sums ? e->buffer.sums + item->prefill_offset : NULL;
    const kvf_runner_buffers *b = &e->buffer;
    kvf_status st = columns(e, item, needs & KVF_NEEDS_COL_SUMS, b->sums, e->shape.n_q_heads, &e->added_sums[i], err);
    if (!st)
        st = columns(e, item, needs & KVF_NEEDS_LAST_ROWS, b->last_sums, e->shape.n_q_heads, &e->added_last[i], err);
    if (!st)
        st = columns(e, item, needs & KVF_NEEDS_SQUARES, b->squares, e->shape.n_kv_heads, &e->added_squares[i], err);
    if (st) return st;
    kvf__token_range range = kvf__live_segment_at(r, item->token_begin);
    e->last_begin[i] = range.end - KVF__MIN(prompt.score_window, range.end - range.begin);
    if (needs & KVF_NEEDS_LOGPROBS && (st = want_logprobs(e, item, i, err))) return st;
    bool found =
        item->match && item->match->n_snapshot_tokens; /* else none of those that share the prompt needs them */
    uint32_t stats = (needs & KVF_NEEDS_COL_SUMS ? KVF_SNAPSHOT_SUMS : 0u) |
                     (needs & KVF_NEEDS_SQUARES ? KVF_SNAPSHOT_SQUARES : 0u) |
                     (needs & KVF_NEEDS_LOGPROBS ? KVF_SNAPSHOT_LOGPROBS : 0u);
    if (found && stats) st = kvf__engine_restore(e, item, stats, err);
    if (item->logits_only) e->added_sums[i] = e->added_last[i] = e->added_squares[i] = NULL;
    return st;
}

/* Copies the targets' log-probabilities to the prompts' accumulators. */
static kvf_status keep_logprobs(kvf_engine *e, const kvf_step *step, kvf_error *err) {
    for (uint32_t i = 0; i < step->n_items && e->n_targets; i++) {
        const kvf_step_item *item = &step->items[i];
        kvf__live *r = item->user;
        for (uint32_t t = 0; t < item->n_tokens; t++) {
            uint32_t row = e->q_begin[i] + t, next = item->token_begin + t + 1;
            if (e->targets[row] == KVF_NO_TOKEN) continue;
            kvf_status st = KVF_OK;
            if (kvf__live_segment_begins(r, next))
                r->first_logprob = e->target_logprobs[row];
            else
                st = put_logprob(e, item->prefill_offset + next, e->target_logprobs[row], err);
            if (st) return st;
        }
    }
    return KVF_OK;
}

/* What its prompt's policies need. A held sample that has become leader continues with its leader's needs: a budget that changed while
 * the prompt ran leaves it observing. */
static void take_options(const kvf_engine *e, kvf__live *r) {
    uint32_t index;
    if (kvf_seq_index(e->manager, r->seq, &index)) return;
    const kvf_policy_options *now = kvf_policy_get_options(e->policies, index);
    if (now) r->policy = *now;
}

/* Counts the tokens that were computed for the first time, in a step that did not fail. */
static void note_progress(kvf_engine *e, kvf__live *r, const kvf_step_item *item) {
    bool repeats = item->prompt_ends && kvf__live_needs(r).needs & KVF_NEEDS_REPEAT; /* its last token, again */
    if (repeats || item->kind == KVF_STEP_REPEAT) {
        e->n_repeat += item->n_tokens;
        return;
    }
    uint32_t end = item->token_begin + item->n_tokens, begin = KVF__MAX(item->token_begin, r->n_reached);
    if (begin >= end) return;
    uint32_t n_prompt = kvf__live_seen(r, end) - kvf__live_seen(r, begin);
    e->n_new_prompt += n_prompt;
    e->n_new_decode += end - begin - n_prompt; /* also the one that a preempted request had not computed yet */
    r->n_reached = end;
}

static kvf_status lay_out_tokens(kvf_engine *e, const kvf_step_item *item, uint32_t i, kvf_error *err) {
    uint32_t *tokens = e->tokens + e->q_begin[i];
    const kvf__live *r = item->user;
    e->added_max[i] = NULL;
    e->max_begin[i] = e->max_end[i] = 0;
    e->max_by_residual[i] = 0;
    for (uint32_t t = 0; t < item->n_tokens; t++) e->targets[e->q_begin[i] + t] = KVF_NO_TOKEN;
    if (item->kind == KVF_STEP_REPEAT) return kvf__engine_lay_out_piece(e, item, i, tokens, err);
    memcpy(tokens, r->tokens + item->token_begin, item->n_tokens * sizeof *tokens);
    return KVF_OK;
}

/* Rows, tokens, mass buffers of the planned step, and the number of rows that sample. */
static kvf_status lay_out(kvf_engine *e, const kvf_step *step, uint32_t *n_rows_out, kvf_error *err) {
    uint32_t n_tokens = 0, n_out = 0;
    e->n_targets = 0;
    e->n_decode = step->n_decode;
    for (uint32_t i = 0; i < step->n_items; i++) {
        const kvf_step_item *item = &step->items[i];
        kvf__live *r = item->user;
        kvf_status st = kvf__live_ask(e, r, err);
        if (st) return st;
        kvf__live_set_seq(e, r, item->seq);
        if (item->kind != KVF_STEP_DECODE) take_options(e, r);
        e->rows[i] = r;
        e->seqs[i] = item->seq;
        e->q_begin[i] = n_tokens;
        bool repeats = item->kind == KVF_STEP_REPEAT;
        if ((st = lay_out_tokens(e, item, i, err))) return st;
        n_tokens += item->n_tokens;
        int decode = item->kind == KVF_STEP_DECODE;
        e->row_wanted[i] = decode && (kvf_policy_needs(&r->policy) & KVF_NEEDS_ROW);
        e->row_gqa[i] = (uint8_t)r->policy.gqa;
        e->observed[i] = decode && kvf_policy_observes(&r->policy);
        if (decode) e->logprobs[i] = (float)r->logprobs[item->token_begin - r->n_prompt];
        if (decode && kvf_policy_needs(&r->policy) & KVF_NEEDS_LOGPROBS)
            (void)want_logprobs(e, item, i, err); /* none to write */
        if (!decode && !repeats) r->n_seen = kvf__live_seen(r, item->token_begin + item->n_tokens);
        r->in_prompt = !decode;
        e->stats.n_swapped_in += r->swapped && decode;
        r->swapped = 0;
        if (item->match && !r->n_preempted) r->n_cached = item->match->n_tokens;
        if (!(r->started > 0)) {
            r->started = kvf__engine_clock(e);
            r->started_step = e->stats.n_steps;
        }
        e->prompt_sums[i] = e->added_sums[i] = e->added_last[i] = e->added_squares[i] = NULL;
        e->last_begin[i] = 0;
        if (!decode && !repeats && item->prefill_offset != UINT32_MAX) {
            if ((st = lay_out_sums(e, item, i, err))) return st;
        }
        if (item->samples) {
            e->out_rows[n_out] = n_tokens - 1;
            e->sampled[n_out++] = i;
        }
    }
    e->q_begin[step->n_items] = n_tokens;
    *n_rows_out = n_out;
    return KVF_OK;
}

/* Slots of the longest decode table, 0 when no row is wanted. */
static uint32_t longest_row(const kvf_engine *e, uint32_t n_decode) {
    uint32_t longest = 0, wanted = 0;
    for (uint32_t i = 0; i < n_decode; i++) wanted |= e->row_wanted[i];
    for (size_t t = 0; wanted && t < (size_t)n_decode * e->n_tables; t++)
        longest = KVF__MAX(longest, e->view.n_slots[t]);
    return longest;
}

static kvf_status forward(kvf_engine *e, const kvf_step *step, uint32_t n_out, kvf_error *err) {
    uint32_t longest = longest_row(e, step->n_decode), observed = 0;
    bool repeats = false, by_residual = false;
    for (uint32_t i = step->n_decode; i < step->n_items; i++) {
        repeats |= e->added_max[i] != NULL;
        by_residual |= e->max_by_residual[i];
    }
    for (uint32_t i = 0; i < step->n_decode; i++) observed |= e->observed[i];
    kvf_forward f = {.struct_size = sizeof f,
                     .view = &e->view,
                     .pages = &e->pages,
                     .tokens = e->tokens,
                     .q_begin = e->q_begin,
                     .n_decode = step->n_decode,
                     .prompt_sums = e->added_sums,
                     .prompt_stride = e->config.max_prefill_tokens,
                     .row = longest ? e->buffer.row : NULL,
                     .row_stride = longest,
                     .row_wanted = e->row_wanted,
                     .row_gqa = e->row_gqa,
                     .after_layer = observed ? kvf__engine_observe : NULL,
                     .ctx = e,
                     .out_rows = e->out_rows,
                     .n_out = n_out,
                     .logits = e->buffer.logits,
                     .path = e->config.path,
                     .deterministic = e->config.deterministic,
                     .fast_activations = e->config.fast_activations,
                     .prompt_last = e->added_last,
                     .last_begin = e->last_begin,
                     .prompt_squares = e->added_squares,
                     .targets = e->n_targets ? e->targets : NULL,
                     .logprobs = e->target_logprobs,
                     .not_finite = e->not_finite,
                     .sums_may_be_lost = 1,
                     .probe = e->config.probe,
                     .prompt_max = repeats ? e->added_max : NULL,
                     .max_begin = e->max_begin,
                     .max_end = e->max_end,
                     .max_by_residual = by_residual ? e->max_by_residual : NULL};
    double begin = kvf__engine_clock(e);
    e->observe_error = err;
    kvf_status st = e->runner.run(e->runner.ctx, &f, err);
    if (st) return st;
    double seconds = kvf__engine_clock(e) - begin;
    e->stats.forward_s += seconds;
    e->n_new_prompt = e->n_new_decode = e->n_repeat = 0;
    for (uint32_t i = 0; i < step->n_items; i++) note_progress(e, step->items[i].user, &step->items[i]);
    uint32_t n_tokens = step->n_tokens ? step->n_tokens : 1;
    uint32_t n_again = n_tokens - e->n_new_prompt - e->n_new_decode - e->n_repeat;
    e->stats.prefill_s += seconds * e->n_new_prompt / n_tokens;
    e->stats.decode_s += seconds * e->n_new_decode / n_tokens;
    e->stats.recompute_s += seconds * n_again / n_tokens;
    e->stats.repeat_s += seconds * e->n_repeat / n_tokens;
    e->stats.n_repeat_tokens += e->n_repeat;
    e->stats.n_prompt_tokens += e->n_new_prompt;
    e->stats.n_decode_tokens += e->n_new_decode;
    e->stats.n_recomputed_tokens += n_again;
    return KVF_OK;
}

/* Blocks of a row: by its sizes; tables that never evict, and all tables if sizes are unknown, count the blocks they hold. */
static uint64_t blocks_of(const kvf_engine *e, uint32_t row, const kvf_layer_size *sizes) {
    const kvf_layer_size *groups = kvf_policy_group_sizes(e->policies, e->view.seq_index[row]);
    uint64_t blocks = 0;
    for (uint32_t t = 0; t < e->n_tables; t++) {
        uint32_t slots = e->view.n_slots[(size_t)row * e->n_tables + t];
        const kvf_layer_size *size = !sizes ? NULL : groups ? &groups[t] : &sizes[t / e->n_groups];
        if (size && size->reserve != UINT32_MAX) slots = size->reserve;
        blocks += kvf__ceil_div(slots, e->pages.block_size);
    }
    return blocks;
}

static const kvf_layer_size *sizes_of(const kvf_engine *e, uint32_t row) {
    return kvf_policy_sizes(e->policies, e->view.seq_index[row]);
}

/* Counts the blocks of a row that has drawn its next token. If its first event is deferred it holds more than its sizes ask for, and
 * this is reserved then. */
static void note_blocks(kvf_engine *e, uint32_t row, kvf__live *r) {
    uint64_t held = blocks_of(e, row, NULL), reserved = blocks_of(e, row, sizes_of(e, row));
    r->n_block_steps++;
    r->block_steps += held;
    r->reserved_block_steps += KVF__MAX(held, reserved);
}

/* Its prompt's events are done. */
static kvf_status end_prompt(kvf_engine *e, kvf__live *r, uint32_t n_held, kvf_error *err) {
    kvf_status st = kvf_sched_prompt_done(e->sched, r->id);
    if (st == KVF_E_NO_BLOCKS) { /* its exact sizes found no room: it waits and begins again */
        kvf__live_lost(e, r);
        return KVF_OK;
    }
    if (st) return kvf__fail_as(err, st, kvf_sched_error(e->sched));
    return n_held ? kvf__group_forked(e, r, err) : KVF_OK;
}

/* Runs the events of rows whose prompt has ended, then kvf_sched_prompt_done for each. */
static kvf_status end_prompts(kvf_engine *e, uint32_t begin, uint32_t end, uint32_t n_held, kvf_error *err) {
    kvf_status st = kvf__engine_prompt_end(e, begin, end, err);
    for (uint32_t i = begin; i < end && !st; i++) {
        kvf__live *r = e->rows[i];
        if (!r) continue; /* the room that was found was its own */
        r->blocks_needed = sizes_of(e, i) ? blocks_of(e, i, sizes_of(e, i)) : 0;
        st = end_prompt(e, r, n_held, err);
    }
    return st;
}

static void swap_rows(kvf_engine *e) {
    kvf__rows now = {e->rows, e->seqs, e->prompt_sums, e->view};
    e->rows = e->other_rows.rows;
    e->seqs = e->other_rows.seqs;
    e->prompt_sums = e->other_rows.prompt_sums;
    e->view = e->other_rows.view;
    e->other_rows = now;
}

/* Samples with policies of their own: forks them before anything is evicted; then all have their prompt events together, in the second
 * set of rows. */
static kvf_status end_sample_prompts(kvf_engine *e, kvf__live *leader, float *sums, kvf_error *err) {
    const kvf__group *g = leader->group;
    kvf_status st = kvf_sched_fork_prompt(e->sched, leader->id);
    if (st == KVF_E_NO_BLOCKS) {
        kvf__live_lost(e, leader);
        return KVF_OK;
    }
    if (st) return kvf__fail_as(err, st, kvf_sched_error(e->sched));
    if ((st = kvf__group_forked(e, leader, err))) return st;
    swap_rows(e);
    uint32_t n = 0;
    for (uint32_t k = 0; k < g->width; k++) {
        kvf__live *r = g->members[k];
        if (!r || (r != leader && r->draws_from != leader)) continue;
        e->rows[n] = r;
        e->seqs[n] = r->seq;
        e->prompt_sums[n++] = sums;
    }
    st = kvf_view_fill(e->manager, 1, e->seqs, n, &e->view);
    if (st)
        kvf__fail_as(err, st, kvf_manager_error(e->manager));
    else
        st = end_prompts(e, 0, n, 0, err);
    swap_rows(e);
    return st;
}

static kvf_status policy_moments(kvf_engine *e, const kvf_step *step, kvf_error *err) {
    double begin = kvf__engine_clock(e);
    kvf_status st = kvf__engine_decode_events(e, step->n_decode, err);
    for (uint32_t i = step->n_decode; i < step->n_items && !st; i++) {
        kvf__live *r = e->rows[i];
        if (!r || !step->items[i].prompt_ends) continue;
        r->in_prompt = 0;
        if (step->items[i].n_held && r->group->own_policies)
            st = end_sample_prompts(e, r, e->prompt_sums[i], err);
        else
            st = end_prompts(e, i, i + 1, step->items[i].n_held, err);
    }
    e->stats.policy_s += kvf__engine_clock(e) - begin;
    return st;
}

/* Lists who draws from which row. A preempted row has no draw; a row where a prompt ended has one for each forked sample. */
static void list_draws(kvf_engine *e, const kvf_step *step, uint32_t n_out) {
    e->n_draws = 0;
    for (uint32_t i = 0; i < n_out; i++) {
        if (e->not_finite[e->sampled[i]] != KVF_FINITE) continue; /* it has ended */
        const kvf__live *of =
            step->items[e->sampled[i]].user; /* it may have been preempted, and what it was forked to not */
        kvf__live *r = e->rows[e->sampled[i]];
        kvf__group *g = of->group;
        const float *logits = e->buffer.logits ? e->buffer.logits + (size_t)i * e->shape.n_vocab : NULL;
        bool beam = g && g->beams;
        if (r) e->draws[e->n_draws++] = (kvf__draw){.live = r, .group = beam ? g : NULL, .logits = logits};
        if (r && r->n_known > r->n_begin) note_blocks(e, e->sampled[i], r);
        for (uint32_t k = 0; g && !beam && k < g->width; k++) {
            kvf__live *sample = g->members[k];
            if (!sample || sample->draws_from != of) continue;
            sample->draws_from = NULL;
            e->draws[e->n_draws++] = (kvf__draw){.live = sample, .logits = logits};
        }
    }
}

static void tell_logits(const kvf_engine *e) {
    for (uint32_t i = 0; i < e->n_draws; i++) {
        const kvf__live *r = e->draws[i].live;
        if (!r->on_logits || (r->group && r->group->ranked)) continue;
        r->on_logits(r->user, r->index, r->group ? r->group->id : r->id, r->n_known - r->n_begin, e->draws[i].logits);
    }
}

/* A request without tokens to generate ends with its prompt; forked samples that have drawn nothing end before it. */
static void end_empty(kvf_engine *e, const kvf_step *step) {
    for (kvf__live *r = e->first_running, *next; r; r = next) {
        next = r->next_running;
        if (r->draws_from) kvf__live_finish(e, r, KVF_FINISH_LENGTH, NULL);
    }
    for (uint32_t i = step->n_decode; i < step->n_items; i++)
        if (e->rows[i] && step->items[i].prompt_ends && e->rows[i]->max_tokens == 0)
            kvf__live_finish(e, e->rows[i], KVF_FINISH_LENGTH, NULL);
}

/* Makes room for the next tokens, before they are drawn in parallel. */
static void make_rooms(kvf_engine *e) {
    for (uint32_t i = 0; i < e->n_draws; i++) {
        kvf__live *r = e->draws[i].live;
        e->draws[i].failed = !kvf__live_make_room(e, r, r->n_known - r->n_prompt + 1);
    }
}

static const kvf_error no_room = {
    .text = "out of host memory for its tokens: run fewer requests at once, or with a smaller max_tokens", .rank = -1};

/* A group of beams advances at its last draw: the other beams may be gone after the step. */
static kvf_status advance_group(kvf_engine *e, uint32_t draw, kvf_error *err) {
    kvf__group *g = e->draws[draw].group;
    bool failed = false;
    for (uint32_t k = draw + 1; g && k < e->n_draws; k++)
        if (e->draws[k].group == g) return KVF_OK;
    for (uint32_t k = 0; g && k <= draw; k++) failed |= e->draws[k].group == g && e->draws[k].failed;
    if (failed) kvf__beams_stop(e, g, KVF_FINISH_ERROR, &no_room);
    return g && !failed && kvf__beams_ready(g) ? kvf__beams_advance(e, g, err) : KVF_OK;
}

/* Sampling in parallel, then tokens, callbacks and ends in order. */
static kvf_status sample(kvf_engine *e, const kvf_step *step, uint32_t n_out, kvf_error *err) {
    list_draws(e, step, n_out);
    tell_logits(e);
    make_rooms(e);
    kvf__stream_for(e->stream, e->n_draws, draw_one, e);
    for (uint32_t i = 0; i < e->n_draws; i++) {
        const kvf__draw *d = &e->draws[i];
        if (d->group) continue;
        kvf_status st = KVF_OK;
        if (d->failed)
            kvf__live_finish(e, d->live, KVF_FINISH_ERROR, &no_room);
        else
            st = take_token(e, d->live, d->token, d->logprob, err);
        if (st) return st;
    }
    for (uint32_t i = 0; i < e->n_draws; i++) {
        kvf_status st = advance_group(e, i, err);
        if (st) return st;
    }
    end_empty(e, step);
    return KVF_OK;
}

/* Bytes that all requests with tables would need with the full cache, also those without an item in this step. */
static void note_full_bytes(kvf_engine *e) {
    uint64_t blocks = 0;
    uint32_t next_pos;
    for (const kvf__live *r = e->first_running; r; r = r->next_running)
        if (!r->swapped && kvf_seq_next_pos(e->manager, r->seq, &next_pos) == KVF_OK)
            blocks +=
                kvf__ceil_div(KVF__MIN(next_pos, r->n_known), e->pages.block_size); /* a repetition is no token of it */
    e->stats.full_bytes = blocks * e->n_tables * e->stats.block_bytes;
    e->stats.full_bytes_max = KVF__MAX(e->stats.full_bytes_max, e->stats.full_bytes);
}

/* Requests the scheduler preempted or ended. */
static void preempted_and_ended(kvf_engine *e, const kvf_step *step) {
    bool any_stuck = false;
    for (uint32_t i = 0; i < step->n_preempted; i++)
        kvf__live_preempted(e, step->preempted[i].user, step->preempted[i].swapped);
    for (uint32_t i = 0; i < step->n_ends; i++) {
        kvf__live *r = step->ends[i].user;
        kvf__live_set_seq(e, r, 0);
        kvf_error why = {.text = ""};
        if (step->ends[i].reason == KVF_END_NO_BLOCKS)
            kvf__fail_size(
                &why, KVF_E_NEVER_FITS, "kv_bytes", e->config.kv_bytes, r->blocks_needed * e->stats.block_bytes,
                "its exact sizes need %llu blocks, the pool has %u; lower the budget (rho, budget_tokens), or",
                (unsigned long long)r->blocks_needed, e->pages.n_blocks);
        else if (step->ends[i].reason == KVF_END_REFUSED)
            kvf__fail(&why, KVF_E_INVALID, "its policy options are refused by the policy state");
        const kvf_error *error = why.text[0] ? &why : NULL;
        r->memory_full = !error;
        if (r->group && r->group->beams) { /* the others are in this list too, or run */
            r->group->stuck = any_stuck = true;
            r->group->error = why;
        } else {
            kvf__live_finish(e, r, error ? KVF_FINISH_ERROR : KVF_FINISH_LENGTH, error);
        }
    }
    for (kvf__live *r = any_stuck ? e->first : NULL; r;) {
        bool stuck = r->group && r->group->stuck;
        if (stuck) {
            for (uint32_t i = 0; i < r->group->n_left; i++)
                r->group->members[i]->memory_full = !r->group->error.text[0];
            const kvf_error *error = r->group->error.text[0] ? &r->group->error : NULL;
            kvf__beams_stop(e, r->group, error ? KVF_FINISH_ERROR : KVF_FINISH_LENGTH, error);
        }
        r = stuck ? e->first : r->next;
    }
}

static kvf_status run_step(kvf_engine *e, kvf_error *err) {
    kvf_step step = {.struct_size = sizeof step};
    kvf_status st = kvf__engine_transfers_end(e, err); /* of a step without items */
    if (st || (st = kvf__engine_overflow(e, err))) return st;
    memset(e->rows, 0, e->max_running * sizeof *e->rows);
    kvf__live_note_single(e);
    if ((st = kvf__engine_offload_first(e, err))) return st;
    kvf__engine_ask(e);
    if ((st = kvf_sched_plan(e->sched, (uint64_t)(1e9 * kvf__engine_clock(e)), &step)))
        return kvf__fail_as(err, st, kvf_sched_error(e->sched));
    e->stats.n_running = step.n_running;
    e->stats.n_running_max = KVF__MAX(e->stats.n_running_max, step.n_running);
    preempted_and_ended(e, &step);
    if ((st = kvf__engine_copies(e, &step.copies, err))) return st;
    if (!step.n_items) return (st = kvf_sched_done(e->sched)) == KVF_E_STATE ? KVF_OK : st;
    uint32_t n_out = 0;
    if ((st = lay_out(e, &step, &n_out, err))) return st;
    if ((st = kvf_view_fill(e->manager, 0, e->seqs, step.n_items, &e->view)))
        return kvf__fail_as(err, st, kvf_manager_error(e->manager));
    note_full_bytes(e);
    if ((st = kvf__engine_offload(e, err))) return st;
    if ((st = forward(e, &step, n_out, err)) || (st = kvf__engine_score(e, &step, err)) ||
        (st = kvf__engine_transfers_end(e, err)))
        return st;
    if ((st = keep_logprobs(e, &step, err))) return st;
    kvf__engine_end_not_finite(e, &step);
    if ((st = kvf_sched_done(e->sched))) return kvf__fail_as(err, st, kvf_sched_error(e->sched));
    e->stats.n_steps++;
    if ((st = kvf__engine_keep_sums(e, &step, err))) return st;
    if ((st = policy_moments(e, &step, err))) return st;
    return sample(e, &step, n_out, err);
}

kvf_status kvf_engine_step(kvf_engine *e, int *more, kvf_error *err) {
    if (!e) return kvf__fail(err, KVF_E_INVALID, "engine: is NULL");
    kvf_error why = {.text = ""};
    e->in_step = 1;
    e->aborts = false;
    kvf_status st = kvf__engine_check_device(e, &why);
    if (!st && e->first) st = run_step(e, &why);
    e->in_step = 0;
    if (st && !why.text[0]) (void)kvf__fail(&why, st, "%s", kvf_status_text(st));
    if (st) kvf__engine_take_back(e, &why);
    if (st && err) *err = why;
    for (kvf__live *r = e->aborts ? e->first : NULL, *next; r; r = next) { /* aborted from within a callback */
        next = r->next;
        if (!r->abort && !(r->group && r->group->abort)) continue;
        kvf__live_finish(e, r, KVF_FINISH_ABORTED, NULL);
        next = e->first; /* the callback may have aborted others */
    }
    bool runs = e->n_live > e->n_idle;
    if (!runs && !st) st = kvf__engine_transfers_end(e, err);
    if (more) *more = runs;
    return st;
}
