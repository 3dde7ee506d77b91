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

/* The r->n_top likeliest tokens of a step: a list kept sorted, which few logits enter. */
static void take_top(const kvf__live *r, uint32_t step, const float *logits, uint32_t n_vocab) {
    normalizer norm = normalize(logits, n_vocab);
    uint32_t *tokens = r->top_tokens + (size_t)step * r->n_top, n = 0;
    double *logprobs = r->top_logprobs + (size_t)step * r->n_top;
    for (uint32_t id = 0; id < n_vocab; id++) {
        if (logits[id] != logits[id] || (n == r->n_top && !(logits[id] > logits[tokens[n - 1]]))) continue;
        uint32_t at = n < r->n_top ? n++ : n - 1;
        for (; at && logits[id] > logits[tokens[at - 1]]; at--) tokens[at] = tokens[at - 1];
        tokens[at] = id;
    }
    for (uint32_t i = 0; i < n; i++) logprobs[i] = logprob_of(&norm, logits[tokens[i]]);
    for (uint32_t i = n; i < r->n_top; i++) tokens[i] = KVF_NO_TOKEN, logprobs[i] = -INFINITY;
}

static void sample_row(void *ctx, uint32_t i, uint32_t thread) {
    kvf_engine *e = ctx;
    kvf__live *r = e->rows[e->sampled[i]];
    uint32_t n_vocab = e->info->n_vocab, step = r->n_known - r->n_prompt;
    const float *logits = e->logits + (size_t)i * n_vocab;
    double logprob;
    if (r->forced) {
        e->tokens[i] = r->forced[step];
        normalizer norm = normalize(logits, n_vocab);
        logprob = logprob_of(&norm, logits[r->forced[step]]);
    } else {
        char *scratch = (char *)e->sample_scratch + (size_t)thread * n_vocab * 8;
        e->tokens[i] = kvf_sample(&r->sampling, step, logits, n_vocab, scratch, &logprob);
    }
    e->sampled_logprob[i] = logprob;
    if (r->n_top) take_top(r, step, logits, n_vocab);
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
    if (r->on_token) r->on_token(r->user, r->id, token, logprob);
    if (stopped < 0)
        kvf__live_finish(e, r, KVF_FINISH_ERROR, "out of host memory for the text");
    else if (stopped)
        kvf__live_finish(e, r, KVF_FINISH_STOP, NULL);
    else if (ended)
        kvf__live_finish(e, r, KVF_FINISH_LENGTH, NULL);
    return KVF_OK;
}

/* Rows, tokens, mass buffers of the planned step; returns the number of rows that sample. */
static uint32_t lay_out(kvf_engine *e, const kvf_step *step) {
    uint32_t n_tokens = 0, n_out = 0, n_layers = e->info->n_layers, n_heads = e->info->n_q_heads;
    for (uint32_t i = 0; i < step->n_items; i++) {
        const kvf_step_item *item = &step->items[i];
        kvf__live *r = item->user;
        r->seq = item->seq;
        e->rows[i] = r;
        e->seqs[i] = item->seq;
        e->q_begin[i] = n_tokens;
        memcpy(e->tokens + n_tokens, r->tokens + item->token_begin, item->n_tokens * sizeof *e->tokens);
        n_tokens += item->n_tokens;
        int observes = kvf__policy_observes(&r->policy), decode = item->kind == KVF_STEP_DECODE;
        e->row_wanted[i] = (uint8_t)(decode && observes && (r->policy.ops->needs & KVF_NEEDS_ROW));
        e->row_gqa[i] = (uint8_t)r->policy.gqa;
        r->in_prompt = !decode;
        e->prompt_sums[i] = NULL;
        if (!decode && observes && item->prefill_offset != UINT32_MAX) {
            size_t stride = e->config.max_prefill_tokens;
            e->prompt_sums[i] = e->sums + item->prefill_offset;
            for (size_t h = 0; item->token_begin == 0 && h < (size_t)n_layers * n_heads; h++)
                memset(e->prompt_sums[i] + h * stride, 0, r->n_prompt * sizeof(float));
        }
        if (item->samples) {
            e->out_rows[n_out] = n_tokens - 1;
            e->sampled[n_out++] = i;
        }
    }
    e->q_begin[step->n_items] = n_tokens;
    return n_out;
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
                     .prompt_sums = e->prompt_sums,
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

static kvf_status policy_moments(kvf_engine *e, const kvf_step *step, kvf_error *err) {
    double begin = kvf__clock();
    kvf_status st = kvf__engine_decode_events(e, step->n_decode, err);
    for (uint32_t i = step->n_decode; i < step->n_items && !st; i++) {
        kvf__live *r = e->rows[i];
        if (!step->items[i].prompt_ends) continue;
        r->in_prompt = 0;
        if ((st = kvf__engine_prompt_end(e, i, err))) break;
        r->blocks_needed = exact_need(e, i);
        st = kvf_sched_prompt_done(e->sched, r->id);
        if (st == KVF_E_NO_BLOCKS) { /* its exact sizes found no room: it waits and begins again */
            r->seq = 0;
            r->n_preempted++;
            e->rows[i] = NULL;
            st = KVF_OK;
        } else if (st) {
            kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
        }
    }
    e->stats.policy_s += kvf__clock() - begin;
    return st;
}

/* Sampling in parallel, then tokens, callbacks and ends in order. */
static kvf_status sample(kvf_engine *e, const kvf_step *step, uint32_t n_out, kvf_error *err) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_out; i++) { /* rows that fell out of the step leave no gap in the logits */
        if (!e->rows[e->sampled[i]]) continue;
        if (n != i)
            memmove(e->logits + (size_t)n * e->info->n_vocab, e->logits + (size_t)i * e->info->n_vocab,
                    e->info->n_vocab * sizeof(float));
        e->sampled[n++] = e->sampled[i];
    }
    kvf__stream_for(e->stream, n, sample_row, e);
    for (uint32_t i = 0; i < n; i++) {
        kvf__live *r = e->rows[e->sampled[i]];
        kvf_status st = r ? take_token(e, r, e->tokens[i], e->sampled_logprob[i], err) : KVF_OK;
        if (st) return st;
    }
    for (uint32_t i = step->n_decode; i < step->n_items; i++) /* nothing to generate */
        if (e->rows[i] && step->items[i].prompt_ends && e->rows[i]->max_tokens == 0)
            kvf__live_finish(e, e->rows[i], KVF_FINISH_LENGTH, NULL);
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
        r->seq = 0;
        r->n_preempted++;
        e->stats.n_preempted++;
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
        kvf__live_finish(e, r, error ? KVF_FINISH_ERROR : KVF_FINISH_LENGTH, error);
    }
}

static kvf_status run_step(kvf_engine *e, kvf_error *err) {
    kvf_step step;
    kvf_status st = kvf__engine_overflow(e, err);
    if (st) return st;
    memset(e->rows, 0, e->max_running * sizeof *e->rows);
    kvf__live_note_lone(e);
    if ((st = kvf_sched_plan(e->sched, &step))) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    e->stats.n_running = step.n_running;
    e->stats.n_waiting = step.n_waiting;
    e->stats.n_running_max = KVF__MAX(e->stats.n_running_max, step.n_running);
    fallen(e, &step);
    if (step.copies.n) {
        if ((st = kvf_copies_run(&e->pages, &e->scores, &step.copies)) ||
            (st = kvf_copies_done(e->manager, &step.copies)))
            return kvf__fail(err, st, "copies of a step: %s", kvf_manager_error(e->manager));
    }
    if (!step.n_items) return (st = kvf_sched_done(e->sched)) == KVF_E_STATE ? KVF_OK : st;
    uint32_t n_out = lay_out(e, &step);
    if ((st = kvf_view_fill(e->manager, 0, e->seqs, step.n_items, &e->view)))
        return kvf__fail(err, st, "%s", kvf_manager_error(e->manager));
    note_full_bytes(e);
    if ((st = forward(e, &step, n_out, err))) return st;
    if ((st = kvf_sched_done(e->sched))) return kvf__fail(err, st, "%s", kvf_sched_error(e->sched));
    e->stats.n_steps++;
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
        if (!r->abort) continue;
        kvf__live_finish(e, r, KVF_FINISH_ABORTED, NULL);
        next = e->first; /* the callback may have aborted others */
    }
    if (more) *more = e->first != NULL;
    return st;
}
