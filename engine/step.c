/* One step: overflow events -> plan -> copies -> forward (observe) -> events -> sample -> finish. */
#include <math.h>

#include "engine/internal.h"

/* A row's largest logit and the log of its probabilities' sum relative to that. */
typedef struct normalizer {
    double max, log_sum;
} normalizer;

/* The likeliest token's logit and log-probability say both. */
static normalizer normalize(const float *logits, uint32_t n_vocab) {
    double logprob;
    uint32_t best = kvf_sample(&(kvf_sampling){.temperature = 0}, 0, logits, n_vocab, NULL, &logprob);
    return (normalizer){(double)logits[best], -logprob};
}

/* Natural log of the probability of one token. */
static double logprob_of(const normalizer *n, float logit) { return (double)logit - n->max - n->log_sum; }

/* A list kept sorted, which few logits enter. */
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
    uint32_t n_vocab = e->info->n_vocab, step = r->n_known - r->n_prompt;
    if (r->n_top)
        kvf__engine_top(d->logits, n_vocab, r->n_top, r->top_tokens + (size_t)step * r->n_top,
                        r->top_logprobs + (size_t)step * r->n_top);
    if (r->group && r->group->beams) {
        r->choices.n = r->group->n_choices;
        kvf__engine_top(d->logits, n_vocab, r->choices.n, r->choices.tokens, r->choices.logprobs);
    } else if (r->forced) {
        d->token = r->forced[step];
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

/* Takes the new token in; finishes the request when it was the last. */
static kvf_status take_token(kvf_engine *e, kvf__live *r, uint32_t token, double logprob, kvf_error *err) {
    uint32_t step = r->n_known - r->n_prompt;
    int ended = 0;
    kvf_status st = kvf_sched_token(e->sched, r->id, &ended);
    if (st) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    if (!step && r->first_token == 0) r->first_token = kvf__clock();
    r->tokens[r->n_known++] = token;
    r->logprobs[step] = logprob;
    int stopped = kvf__live_text(e, r, token);
    if (!r->ignore_end && kvf_tokenizer_is_end(kvf_model_tokenizer(e->model), token)) stopped = 1;
    tell_caller(r, token, logprob);
    if (stopped < 0)
        kvf__live_finish(e, r, KVF_FINISH_ERROR, "out of host memory for the text");
    else if (stopped)
        kvf__live_finish(e, r, KVF_FINISH_STOP, NULL);
    else if (ended)
        kvf__live_finish(e, r, KVF_FINISH_LENGTH, NULL);
    return KVF_OK;
}

/* The accumulators of a prompt's item: cleared, or read back, before its first tokens. */
static kvf_status lay_out_sums(kvf_engine *e, const kvf_step_item *item, uint32_t i, kvf_error *err) {
    const kvf__live *r = item->user;
    size_t stride = e->config.max_prefill_tokens;
    e->prompt_sums[i] = e->sums + item->prefill_offset;
    e->added_sums[i] = item->logits_only ? NULL : e->prompt_sums[i];
    bool first = item->token_begin == 0 || item->match;
    for (size_t h = 0; first && h < (size_t)e->info->n_layers * e->info->n_q_heads; h++)
        memset(e->prompt_sums[i] + h * stride, 0, r->n_prompt * sizeof(float));
    return item->match ? kvf__engine_restore_sums(e, item, e->prompt_sums[i], err) : KVF_OK;
}

/* Rows, tokens, mass buffers of the planned step, and the number of rows that sample. */
static kvf_status lay_out(kvf_engine *e, const kvf_step *step, uint32_t *n_rows_out, kvf_error *err) {
    uint32_t n_tokens = 0, n_out = 0;
    for (uint32_t i = 0; i < step->n_items; i++) {
        const kvf_step_item *item = &step->items[i];
        kvf__live *r = item->user;
        r->seq = item->seq;
        e->rows[i] = r;
        e->seqs[i] = item->seq;
        e->q_begin[i] = n_tokens;
        memcpy(e->tokens + n_tokens, r->tokens + item->token_begin, item->n_tokens * sizeof *e->tokens);
        n_tokens += item->n_tokens;
        int decode = item->kind == KVF_STEP_DECODE;
        e->row_wanted[i] = decode && (kvf_policy_needs(&r->policy) & KVF_NEEDS_ROW);
        e->row_gqa[i] = (uint8_t)r->policy.gqa;
        r->in_prompt = !decode;
        e->stats.n_swapped_in += r->swapped && decode;
        r->swapped = 0;
        if (item->match && !r->n_preempted) r->n_cached = item->match->n_tokens;
        e->prompt_sums[i] = e->added_sums[i] = NULL;
        if (!decode && item->prefill_offset != UINT32_MAX) {
            kvf_status st = lay_out_sums(e, item, i, err);
            if (st) return st;
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
    uint32_t longest = longest_row(e, step->n_decode);
    kvf_forward f = {.struct_size = sizeof f,
                     .view = &e->view,
                     .pages = &e->pages,
                     .tokens = e->tokens,
                     .q_begin = e->q_begin,
                     .n_decode = step->n_decode,
                     .prompt_sums = e->added_sums,
                     .prompt_stride = e->config.max_prefill_tokens,
                     .row = longest ? e->row : NULL,
                     .row_stride = longest,
                     .row_wanted = e->row_wanted,
                     .row_gqa = e->row_gqa,
                     .after_layer = longest ? kvf__engine_observe : NULL,
                     .ctx = e,
                     .out_rows = e->out_rows,
                     .n_out = n_out,
                     .logits = e->logits,
                     .path = e->config.path,
                     .deterministic = e->config.deterministic,
                     .fast_activations = e->config.fast_activations};
    double begin = kvf__clock();
    e->observe_error = err;
    kvf_status st = kvf_model_forward(e->model, e->activations, e->stream, &f, err);
    double seconds = kvf__clock() - begin;
    e->stats.forward_s += seconds;
    uint32_t n_tokens = step->n_tokens ? step->n_tokens : 1, n_prompt = step->n_tokens - step->n_decode;
    e->stats.prefill_s += seconds * n_prompt / n_tokens;
    e->stats.decode_s += seconds * step->n_decode / n_tokens;
    e->stats.n_prompt_tokens += n_prompt;
    e->stats.n_decode_tokens += step->n_decode;
    return st;
}

/* Blocks of a row's exact sizes; what never evicts counts with what it holds. */
static uint64_t exact_need(const kvf_engine *e, uint32_t row) {
    const kvf_layer_size *sizes = kvf_policy_sizes(e->policies, e->view.seq_index[row]);
    uint64_t blocks = 0;
    for (uint32_t l = 0; sizes && l < e->info->n_layers; l++) {
        uint32_t held = e->view.n_slots[((size_t)row * e->info->n_layers + l) * e->n_groups];
        uint32_t slots = sizes[l].reserve == UINT32_MAX ? held : sizes[l].reserve;
        blocks += (uint64_t)kvf__ceil_div(slots, e->pages.block_size) * e->n_groups;
    }
    return blocks;
}

/* Its prompt's events are done. */
static kvf_status end_prompt(kvf_engine *e, kvf__live *r, uint32_t n_held, kvf_error *err) {
    kvf_status st = kvf_sched_prompt_done(e->sched, r->id);
    if (st == KVF_E_NO_BLOCKS) { /* its exact sizes found no room: it waits and begins again */
        kvf__live_lost(e, r);
        return KVF_OK;
    }
    if (st) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    return n_held ? kvf__group_forked(e, r, err) : KVF_OK;
}

static kvf_status policy_moments(kvf_engine *e, const kvf_step *step, kvf_error *err) {
    double begin = kvf__clock();
    kvf_status st = kvf__engine_decode_events(e, step->n_decode, err);
    for (uint32_t i = step->n_decode; i < step->n_items && !st; i++) {
        kvf__live *r = e->rows[i];
        if (!r || !step->items[i].prompt_ends) continue;
        r->in_prompt = 0;
        if ((st = kvf__engine_prompt_end(e, i, err))) break;
        if (!e->rows[i]) continue; /* the room that was found was its own */
        r->blocks_needed = exact_need(e, i);
        st = end_prompt(e, r, step->items[i].n_held, err);
    }
    e->stats.policy_s += kvf__clock() - begin;
    return st;
}

/* Who draws from which row: rows that fell out of the step leave none, a prompt's end has one for each that was forked.
 * (What was forked is preempted before what it was forked from.) */
static void list_draws(kvf_engine *e, uint32_t n_out) {
    e->n_draws = 0;
    for (uint32_t i = 0; i < n_out; i++) {
        kvf__live *r = e->rows[e->sampled[i]];
        const float *logits = e->logits + (size_t)i * e->info->n_vocab;
        if (!r) continue;
        bool beam = r->group && r->group->beams;
        e->draws[e->n_draws++] = (kvf__draw){.live = r, .group = beam ? r->group : NULL, .logits = logits};
        if (!r->group || beam) continue;
        for (uint32_t k = 0; k < r->group->width; k++) {
            kvf__live *sample = r->group->members[k];
            if (!sample || sample->draws_from != r) continue;
            sample->draws_from = NULL;
            e->draws[e->n_draws++] = (kvf__draw){.live = sample, .logits = logits};
        }
    }
}

/* What has no token to generate ends with its prompt, and all that was forked off with it. */
static void end_empty(kvf_engine *e, kvf__live *r) {
    kvf__group *g = r->group;
    for (uint32_t k = 0; g && !g->beams && k < g->width; k++) {
        kvf__live *sample = g->members[k];
        if (sample && sample->draws_from == r) kvf__live_finish(e, sample, KVF_FINISH_LENGTH, NULL);
    }
    kvf__live_finish(e, r, KVF_FINISH_LENGTH, NULL);
}

/* Sampling in parallel, then tokens, callbacks and ends in order. */
static kvf_status sample(kvf_engine *e, const kvf_step *step, uint32_t n_out, kvf_error *err) {
    list_draws(e, n_out);
    kvf__stream_for(e->stream, e->n_draws, draw_one, e);
    for (uint32_t i = 0; i < e->n_draws; i++) {
        if (e->draws[i].group) continue;
        kvf_status st = take_token(e, e->draws[i].live, e->draws[i].token, e->draws[i].logprob, err);
        if (st) return st;
    }
    for (uint32_t i = 0; i < e->n_draws; i++) {
        /* The last draw of a group's stands for it: the beams of the others may be gone after the step. */
        kvf__group *g = e->draws[i].group;
        for (uint32_t k = i + 1; g && k < e->n_draws; k++)
            if (e->draws[k].group == g) g = NULL;
        kvf_status st = g && kvf__beams_ready(g) ? kvf__beams_advance(e, g, err) : KVF_OK;
        if (st) return st;
    }
    for (uint32_t i = step->n_decode; i < step->n_items; i++) /* nothing to generate */
        if (e->rows[i] && step->items[i].prompt_ends && e->rows[i]->max_tokens == 0) end_empty(e, e->rows[i]);
    return KVF_OK;
}

/* What the sequences of this step would hold with the full cache. */
static void note_full_bytes(kvf_engine *e) {
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < e->view.n_seqs; i++) blocks += kvf__ceil_div(e->view.next_pos[i], e->pages.block_size);
    e->stats.full_bytes = blocks * e->n_tables * e->stats.block_bytes;
    e->stats.full_bytes_max = KVF__MAX(e->stats.full_bytes_max, e->stats.full_bytes);
}

/* Requests the scheduler preempted or ended. */
static void fallen(kvf_engine *e, const kvf_step *step) {
    for (uint32_t i = 0; i < step->n_preempted; i++) {
        kvf__live *r = step->preempted[i].user;
        kvf__live_lost(e, r);
        r->swapped = step->preempted[i].swapped;
        e->stats.n_preempted++;
        e->stats.n_swapped_out += r->swapped != 0;
    }
    for (uint32_t i = 0; i < step->n_ends; i++) {
        kvf__live *r = step->ends[i].user;
        r->seq = 0;
        kvf_error why = {""};
        if (step->ends[i].reason == KVF_END_NO_BLOCKS)
            kvf__fail(&why, KVF_E_NEVER_FITS,
                      "its exact sizes need %llu blocks, the pool has %u: give more KV memory (kv_bytes), or a smaller "
                      "budget (rho, budget_tokens)",
                      (unsigned long long)r->blocks_needed, e->pages.n_blocks);
        else if (step->ends[i].reason == KVF_END_REFUSED)
            kvf__fail(&why, KVF_E_INVALID, "its policy options are refused by the policy state");
        const char *error = why.text[0] ? why.text : NULL;
        if (r->group && r->group->beams) { /* the others are in this list too, or run */
            r->group->stuck = true;
            r->group->error = why;
        } else {
            kvf__live_finish(e, r, error ? KVF_FINISH_ERROR : KVF_FINISH_LENGTH, error);
        }
    }
    for (kvf__live *r = e->first; r;) {
        bool stuck = r->group && r->group->stuck;
        if (stuck) {
            const char *error = r->group->error.text[0] ? r->group->error.text : NULL;
            kvf__beams_stop(e, r->group, error ? KVF_FINISH_ERROR : KVF_FINISH_LENGTH, error);
        }
        r = stuck ? e->first : r->next;
    }
}

static kvf_status run_step(kvf_engine *e, kvf_error *err) {
    kvf_step step;
    kvf_status st = kvf__engine_transfers_end(e, err); /* of a step without items */
    if (st || (st = kvf__engine_overflow(e, err))) return st;
    memset(e->rows, 0, e->max_running * sizeof *e->rows);
    kvf__live_note_lone(e);
    if ((st = kvf__engine_offload(e, err))) return st;
    if ((st = kvf_sched_plan(e->sched, &step))) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    e->stats.n_running = step.n_running;
    e->stats.n_waiting = step.n_waiting;
    e->stats.n_running_max = KVF__MAX(e->stats.n_running_max, step.n_running);
    fallen(e, &step);
    if ((st = kvf__engine_copies(e, &step.copies, err))) return st;
    if (!step.n_items) return (st = kvf_sched_done(e->sched)) == KVF_E_STATE ? KVF_OK : st;
    uint32_t n_out;
    if ((st = lay_out(e, &step, &n_out, err))) return st;
    if ((st = kvf_view_fill(e->manager, 0, e->seqs, step.n_items, &e->view)))
        return kvf__fail(err, st, "%s", kvf_manager_error(e->manager));
    note_full_bytes(e);
    if ((st = forward(e, &step, n_out, err)) || (st = kvf__engine_transfers_end(e, err))) return st;
    if ((st = kvf_sched_done(e->sched))) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    e->stats.n_steps++;
    kvf__engine_keep_sums(e, &step);
    if ((st = policy_moments(e, &step, err))) return st;
    return sample(e, &step, n_out, err);
}

kvf_status kvf_engine_step(kvf_engine *e, int *more, kvf_error *err) {
    if (!e) return kvf__fail(err, KVF_E_INVALID, "engine: is NULL");
    e->in_step = 1;
    kvf_status st = e->first ? run_step(e, err) : KVF_OK;
    e->in_step = 0;
    for (kvf__live *r = e->first, *next; r; r = next) { /* aborted from within a callback */
        next = r->next;
        if (!r->abort && !(r->group && r->group->abort)) continue;
        kvf__live_finish(e, r, KVF_FINISH_ABORTED, NULL);
        next = e->first; /* the callback may have aborted others */
    }
    if (!e->first && !st) st = kvf__engine_transfers_end(e, err);
    if (more) *more = e->first != NULL;
    return st;
}
