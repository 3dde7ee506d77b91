/* observe: attention probabilities become scores. metric: a prompt's column sums become one number per query head. */
#include "d2o_policy/pages.h"

enum {
    SERIAL_WORK = 1 << 13, /* floats below which waking the threads costs more than the loop */
    PART = 64,             /* blocks of an item */
    AHEAD = 8              /* pages fetched ahead: they lie anywhere, and each holds a few lines */
};

typedef struct observe_job {
    const kvf_policy_batch *batch;
    kvf_policy_state *state;
    const kvf__kernels *kernels;
    uint32_t n_parts; /* of the longest table */
} observe_job;

static bool wanted(const kvf_policy_batch *b, uint32_t row) {
    return !b->mass || !b->mass->row_wanted || b->mass->row_wanted[row];
}

/* One row of the batch: where its parts go. */
typedef struct target {
    kvf__roles roles;
    kvf_score score;
    bool turn; /* the window's last row: what was collected becomes the score */
    float surprise;
} target;

/* Adds n entries of a decode row to the arrays of a page. The newest slot starts with its own entry: its page holds nothing
 * yet. */
static void add_to_page(const kvf__head *h, const kvf_score_pages *s, const target *t, const float *x, uint32_t begin,
                        uint32_t n, bool with_newest) {
    const kvf__roles *r = &t->roles;
    float *score = r->score == KVF__NONE ? NULL : kvf__score_at(h, s, r->score, begin);
    float *recent = r->recent == KVF__NONE ? NULL : kvf__score_at(h, s, r->recent, begin);
    float *squares = r->squares == KVF__NONE ? NULL : kvf__score_at(h, s, r->squares, begin);
    if (score && !recent)
        for (uint32_t i = 0; i < n; i++) score[i] += x[i];
    else if (recent && t->score != KVF_SCORE_WINDOW)
        memcpy(recent, x, n * sizeof *x);
    else if (recent)
        for (uint32_t i = 0; i < n; i++) recent[i] += x[i];
    for (uint32_t i = 0; i < n && squares; i++) squares[i] += x[i] * x[i];
    if (with_newest) {
        if (score) score[n - 1] = recent ? 0.0f : x[n - 1];
        if (recent) recent[n - 1] = x[n - 1];
        if (squares) squares[n - 1] = x[n - 1] * x[n - 1];
    }
    if (!t->turn) return;
    memcpy(score, recent, n * sizeof *score);
    memset(recent, 0, n * sizeof *recent);
}

/* The newest slot's entries that no row gives. */
static void add_newest(const observe_job *job, const kvf__head *h, const target *t, uint32_t slot) {
    const kvf_score_pages *s = job->batch->scores;
    const kvf_pages *p = h->pages;
    if (t->roles.surprise != KVF__NONE) *kvf__score_at(h, s, t->roles.surprise, slot) = t->surprise;
    for (uint32_t a = t->roles.known; a < t->roles.n; a++) *kvf__score_at(h, s, a, slot) = 0.0f;
    if (t->roles.v_norm == KVF__NONE) return;
    float row[256]; /* the largest head_dim */
    job->kernels->load(p->dtype, kvf__v_row(h, slot), p->head_dim, row);
    *kvf__score_at(h, s, t->roles.v_norm, slot) = job->kernels->norm(row, p->head_dim);
}

/* The first array of a page, for all KV heads of the group. */
static void fetch_page(const kvf__head *h, const kvf_score_pages *s, uint32_t slot) {
    const char *page = (const char *)kvf__score_at(h, s, 0, slot);
    size_t bytes = (size_t)s->heads_per_group * s->block_size * sizeof(float);
    for (size_t at = 0; at < bytes; at += KVF__CACHE_LINE) __builtin_prefetch(page + at, 1);
    KVF__PREFETCHES();
}

static target target_of(const observe_job *job, uint32_t row) {
    const kvf_policy_batch *b = job->batch;
    const kvf__policy_seq *s = kvf__policy_seq_get(job->state, b->view->seq_index[row]);
    const kvf_policy_options *o = &s->options;
    target t = {.roles = kvf__score_roles(o), .score = o->score};
    t.turn = o->score == KVF_SCORE_WINDOW && t.roles.recent != KVF__NONE && s->rows[b->layer] + 1 >= o->score_window;
    if (t.roles.surprise != KVF__NONE) t.surprise = -b->logprobs[row];
    return t;
}

/* Some blocks of one row's table: all KV heads of a page before the next page. */
static void observe_part(void *ctx, uint32_t item, uint32_t thread) {
    (void)thread;
    const observe_job *job = ctx;
    const kvf_policy_batch *b = job->batch;
    const kvf_view *v = b->view;
    uint32_t part = item % job->n_parts, group = item / job->n_parts % v->n_groups, bs = v->block_size;
    uint32_t row = b->row_begin + item / job->n_parts / v->n_groups, n_heads = v->heads_per_group;
    if (!wanted(b, row)) return;
    kvf__head h = kvf__head_of(v, b->pages, row, b->layer, group * n_heads);
    uint32_t n_blocks = kvf__ceil_div(h.n_slots, bs), end = KVF__MIN(n_blocks, (part + 1) * PART);
    target t = target_of(job, row);
    size_t stride = t.roles.score == KVF__NONE ? 0 : b->mass->row_stride;
    const float *x =
        stride ? b->mass->row + ((size_t)row * job->state->config.n_kv_heads + group * n_heads) * stride : NULL;
    for (uint32_t i = part * PART; i < end && i < part * PART + AHEAD; i++) fetch_page(&h, b->scores, i * bs);
    for (uint32_t i = part * PART; i < end; i++) {
        uint32_t begin = i * bs, n = KVF__MIN(bs, h.n_slots - begin);
        h.hg = 0;
        if (i + AHEAD < end) fetch_page(&h, b->scores, begin + AHEAD * bs);
        for (; h.hg < n_heads; h.hg++) {
            if (x) add_to_page(&h, b->scores, &t, x + h.hg * stride + begin, begin, n, i + 1 == n_blocks);
            if (i + 1 == n_blocks) add_newest(job, &h, &t, begin + n - 1);
        }
    }
}

/* The newest slot of one row's table once more. Its entries are set, not added, so that this may be done any number of times. */
static void observe_newest(void *ctx, uint32_t item, uint32_t thread) {
    (void)thread;
    const observe_job *job = ctx;
    const kvf_policy_batch *b = job->batch;
    const kvf_view *v = b->view;
    uint32_t row = b->row_begin + item / v->n_groups, n_heads = v->heads_per_group, head = item % v->n_groups * n_heads;
    if (!wanted(b, row)) return;
    kvf__head h = kvf__head_of(v, b->pages, row, b->layer, head);
    target t = target_of(job, row);
    t.turn = t.score == KVF_SCORE_WINDOW && t.roles.recent != KVF__NONE &&
             kvf__policy_seq_get(job->state, v->seq_index[row])->rows[b->layer] == 0;
    for (uint32_t i = h.n_slots - 1; h.n_slots && h.hg < n_heads; h.hg++) {
        if (t.roles.score != KVF__NONE) {
            size_t at = (size_t)row * job->state->config.n_kv_heads + head + h.hg;
            add_to_page(&h, b->scores, &t, b->mass->row + at * b->mass->row_stride + i, i, 1, true);
        }
        add_newest(job, &h, &t, i);
    }
}

static kvf_status check_observe(const kvf_policy_state *state, const kvf_policy_batch *b, uint64_t *work,
                                uint32_t *most_slots, kvf_error *err) {
    kvf_status st = kvf__view_check(state, b, "observe", err);
    if (st) return st;
    const kvf_view *v = b->view;
    if (b->layer >= v->n_layers || b->row_begin > b->row_end || b->row_end > v->n_seqs)
        return kvf__fail(err, KVF_E_INVALID, "observe: layer %u, rows [%u, %u): the view has %u layers and %u rows",
                         b->layer, b->row_begin, b->row_end, v->n_layers, v->n_seqs);
    if (b->row_begin == b->row_end) return KVF_OK;
    for (uint32_t row = b->row_begin; row < b->row_end; row++) {
        const kvf__policy_seq *s = kvf__policy_seq_get(state, v->seq_index[row]);
        if (!wanted(b, row)) continue;
        if (!s) return kvf__fail(err, KVF_E_STALE, "observe: seq %u is not open", v->seq_index[row]);
        uint32_t n_slots = 0;
        for (uint32_t g = 0; g < v->n_groups; g++)
            n_slots = KVF__MAX(n_slots, v->n_slots[kvf__table_index(v, row, b->layer, g * v->heads_per_group)]);
        kvf__roles r = kvf__score_roles(&s->options);
        if (r.score != KVF__NONE && (!b->mass || !b->mass->row))
            return kvf__fail(err, KVF_E_INVALID, "observe: mass with row must be set");
        if (r.surprise != KVF__NONE && !b->logprobs)
            return kvf__fail(err, KVF_E_INVALID, "observe: policy %s needs logprobs, [n_seqs]", s->options.ops->name);
        if (r.score != KVF__NONE && b->mass->row_stride < n_slots)
            return kvf__fail(err, KVF_E_INVALID, "observe: row_stride %zu: must be at least the table's %u slots",
                             b->mass->row_stride, n_slots);
        for (uint32_t g = 0; g < v->n_groups && !st; g++) {
            uint64_t t = kvf__table_index(v, row, b->layer, g * v->heads_per_group);
            kvf_event event = {.row = row, .layer = b->layer, .group_begin = g, .n_groups = 1};
            st = kvf__score_pages_check(b, r.n, &event, v->n_slots[t], err);
        }
        if (!st && r.v_norm != KVF__NONE) st = kvf__pages_check(state, b, "observe", err);
        if (st) return st;
        *work += (uint64_t)n_slots * state->config.n_kv_heads;
        *most_slots = KVF__MAX(*most_slots, n_slots);
    }
    return KVF_OK;
}

/* The job of a checked batch. work: (slot, KV head) pairs to visit. */
static kvf_status prepare_observe(kvf_policy_state *state, const kvf_policy_batch *batch, observe_job *job,
                                  uint64_t *work, kvf_error *err) {
    uint32_t most_slots = 0;
    const kvf__kernels *kernels = NULL;
    kvf_status st = check_observe(state, batch, work, &most_slots, err);
    if (!st) st = kvf__kernels_choose(batch->path, &kernels, err);
    if (st) return st;
    *job = (observe_job){batch, state, kernels, kvf__ceil_div(most_slots, batch->view->block_size * PART)};
    return KVF_OK;
}

kvf_status kvf__policy_observe(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                               kvf_error *err) {
    uint64_t work = 0;
    observe_job job;
    kvf_status st = prepare_observe(state, batch, &job, &work, err);
    if (st) return st;
    kvf__stream_for(work < SERIAL_WORK ? NULL : stream,
                    (batch->row_end - batch->row_begin) * batch->view->n_groups * job.n_parts, observe_part, &job);
    for (uint32_t row = batch->row_begin; row < batch->row_end; row++) {
        kvf__policy_seq *s = kvf__policy_seq_get(state, batch->view->seq_index[row]);
        if (!wanted(batch, row)) continue;
        uint32_t n_heads = state->config.n_kv_heads;
        for (uint32_t h = 0; h < n_heads; h++)
            s->scored[(size_t)batch->layer * n_heads + h] =
                batch->view->n_slots[kvf__table_index(batch->view, row, batch->layer, h)];
        uint32_t *rows = &s->rows[batch->layer];
        if (s->options.score == KVF_SCORE_WINDOW && ++*rows >= s->options.score_window) *rows = 0;
    }
    return KVF_OK;
}

kvf_status kvf__policy_observe_again(kvf_policy_state *state, const kvf_policy_batch *batch, kvf_error *err) {
    uint64_t work = 0;
    observe_job job;
    kvf_status st = prepare_observe(state, batch, &job, &work, err);
    if (st) return st;
    kvf__stream_for(NULL, (batch->row_end - batch->row_begin) * batch->view->n_groups, observe_newest, &job);
    return KVF_OK;
}

typedef struct metric_job {
    const float *sums;
    size_t stride;
    const kvf_policy_state_config *config;
    const kvf_policy_options *options;
    uint32_t n_tokens;
    double *variance;
} metric_job;

static void metric_head(void *ctx, uint32_t item, uint32_t thread) {
    (void)thread;
    const metric_job *job = ctx;
    const kvf_policy_state_config *c = job->config;
    uint32_t layer = item / c->n_q_heads, h = item % c->n_q_heads;
    job->variance[(size_t)layer * c->n_q_heads_total + c->q_head_begin + h] =
        kvf__metric_of(job->options, job->sums + (size_t)item * job->stride, job->n_tokens);
}

kvf_status kvf__policy_metric(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                              uint32_t n_tokens, double *variance, kvf_error *err) {
    if (!state || !batch || !batch->view || !variance || n_tokens == 0)
        return kvf__fail(err, KVF_E_INVALID, "metric: state, batch, view and variance must be set, n_tokens positive");
    if (row >= batch->view->n_seqs || !batch->prompt_sums || !batch->prompt_sums[row] ||
        batch->prompt_stride < n_tokens)
        return kvf__fail(err, KVF_E_INVALID,
                         "metric: row %u of %u: prompt_sums must be set, prompt_stride %zu at least %u", row,
                         batch->view->n_seqs, batch->prompt_stride, n_tokens);
    const kvf__policy_seq *s = kvf__policy_seq_get(state, batch->view->seq_index[row]);
    if (!s) return kvf__fail(err, KVF_E_STALE, "metric: seq %u is not open", batch->view->seq_index[row]);
    const kvf_policy_state_config *c = &state->config;
    memset(variance, 0, (size_t)c->n_layers * c->n_q_heads_total * sizeof *variance);
    metric_job job = {batch->prompt_sums[row], batch->prompt_stride, c, &s->options, n_tokens, variance};
    kvf__stream_for(stream, c->n_layers * c->n_q_heads, metric_head, &job);
    return KVF_OK;
}
