/* Scores: gathers the scores of each slot for one event, from the batch's sums and the score pages. */
#include <math.h>

#include "d2o_policy/pages.h"

float kvf__gqa_reduce(kvf_gqa gqa, const float *x, uint32_t g, size_t stride) {
    float r = x[0];
    for (uint32_t i = 1; i < g && gqa != KVF_GQA_FIRST; i++) {
        float y = x[i * stride];
        r = gqa == KVF_GQA_SUM ? r + y : y > r ? y : r;
    }
    return r;
}

/* The accumulator of a prompt's score: the column sums of all its queries, or of the last. NULL: there is none. */
static const float *prompt_scores(const kvf__call *c, const kvf_event *e, const kvf_policy_options *o,
                                  uint32_t kv_head) {
    const kvf_policy_batch *b = c->batch;
    const kvf_policy_state_config *config = &c->state->config;
    uint32_t g = config->n_q_heads / config->n_kv_heads;
    float *const *rows = o->score == KVF_SCORE_WINDOW ? b->prompt_last : b->prompt_sums;
    if (!rows || !rows[e->row]) return NULL;
    return rows[e->row] + ((size_t)e->layer * config->n_q_heads + (size_t)kv_head * g) * b->prompt_stride;
}

/* score repeat: what was scored before stays, the newest segment's tokens are scored now, and those generated in between are not. */
static void read_repetition(const kvf__call *c, const kvf_event *e, const kvf__head *h, const float *sums,
                            uint32_t scored, float *out) {
    const kvf_policy_batch *b = c->batch;
    const kvf_policy_state_config *config = &c->state->config;
    uint32_t g = config->n_q_heads / config->n_kv_heads, next_pos = b->view->next_pos[e->row];
    uint32_t begin = next_pos - KVF__MIN(kvf__event_seq(c, e)->segment, next_pos);
    for (uint32_t slot = 0; slot < h->n_slots; slot++) {
        if (slot < scored)
            out[slot] = *kvf__score_at(h, b->scores, 0, slot);
        else if (h->pages->pos[kvf__slot_index(h, slot)] >= begin)
            out[slot] = kvf__gqa_reduce(KVF_GQA_MAX, sums + slot, g, b->prompt_stride);
        else
            out[slot] = INFINITY;
    }
}

/* What a prompt, or a segment of it, gave each slot. Slots below scored had something before. */
static void read_prompt(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__head *h,
                        const kvf__roles *r, uint32_t scored, float *const *out) {
    const kvf_policy_batch *b = c->batch;
    const kvf_policy_state_config *config = &c->state->config;
    const kvf_policy_options *o = &kvf__event_seq(c, e)->options;
    uint32_t g = config->n_q_heads / config->n_kv_heads, n = h->n_slots;
    for (uint32_t a = 0; a < r->n; a++) memset(out[a], 0, n * sizeof(float));
    const float *sums = prompt_scores(c, e, o, kv_head);
    bool repeat = kvf__policy_asks_repeat(o);
    if (repeat) read_repetition(c, e, h, sums, scored, out[r->score]);
    for (uint32_t slot = 0; !repeat && r->score != KVF__NONE && sums && slot < n; slot++)
        out[r->score][slot] = kvf__gqa_reduce(o->gqa, sums + slot, g, b->prompt_stride);
    if (r->squares != KVF__NONE)
        memcpy(out[r->squares],
               b->prompt_squares[e->row] + ((size_t)e->layer * config->n_kv_heads + kv_head) * b->prompt_stride,
               n * sizeof(float));
    for (uint32_t slot = scored; r->surprise != KVF__NONE && slot < n; slot++)
        out[r->surprise][slot] = -b->prompt_logprobs[e->row][h->pages->pos[kvf__slot_index(h, slot)]];
}

/* Adds what the pages held before a segment. A row that was the newest then no longer is; the last queries' rows stay only
 * where the segment had fewer queries than their window. */
static void add_pages(const kvf_policy_batch *b, const kvf__head *h, const kvf_policy_options *o, const kvf__roles *r,
                      uint32_t scored, float *const *out) {
    float decay = (float)o->score_decay;
    bool window = o->score == KVF_SCORE_WINDOW, over = window && h->n_slots - scored >= o->score_window;
    for (uint32_t a = 0; a < r->n; a++) {
        if (a == r->v_norm || (a == r->score && kvf__policy_asks_repeat(o))) continue;
        if ((over && (a == r->score || a == r->recent)) || (a == r->recent && !window)) continue;
        float *to = a == r->recent ? out[r->score] : out[a], factor = a < r->known ? decay : 1.0f;
        for (uint32_t slot = 0; slot < scored; slot++) to[slot] += factor * *kvf__score_at(h, b->scores, a, slot);
    }
}

static void norms_of_v(const kvf__call *c, const kvf__head *h, const kvf__scratch *x, float *out) {
    for (uint32_t slot = 0; slot < h->n_slots; slot++) {
        c->kernels->load(h->pages->dtype, kvf__v_row(h, slot), h->pages->head_dim, x->rows);
        out[slot] = c->kernels->norm(x->rows, h->pages->head_dim);
    }
}

enum { AHEAD = 256 }; /* slots: pages lie anywhere */

void kvf__event_scores(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__scratch *x) {
    const kvf_policy_batch *b = c->batch;
    const kvf__policy_seq *s = kvf__event_seq(c, e);
    kvf__head h = kvf__head_of(b->view, b->pages, e->row, e->layer, kv_head);
    kvf__roles r = kvf__score_roles(&s->options);
    if (r.n == 0) return;
    if (kvf__of_prompt(b, e)) {
        uint32_t scored = KVF__MIN(s->scored[(size_t)e->layer * c->state->config.n_kv_heads + kv_head],
                                   h.n_slots); /* what was scored before this segment */
        read_prompt(c, e, kv_head, &h, &r, scored, x->score);
        if (scored) add_pages(b, &h, &s->options, &r, scored, x->score);
        if (r.v_norm != KVF__NONE) norms_of_v(c, &h, x, x->score[r.v_norm]);
        return;
    }
    for (uint32_t begin = 0, n; begin < h.n_slots; begin += n) {
        n = KVF__MIN(b->scores->block_size, h.n_slots - begin);
        for (uint32_t a = 0; a < r.n && begin + AHEAD < h.n_slots; a++)
            __builtin_prefetch(kvf__score_at(&h, b->scores, a, begin + AHEAD));
        for (uint32_t a = 0; a < r.n; a++)
            memcpy(x->score[a] + begin, kvf__score_at(&h, b->scores, a, begin), n * sizeof(float));
    }
    uint32_t scored = s->scored[(size_t)e->layer * c->state->config.n_kv_heads + kv_head];
    for (uint32_t slot = scored; kvf__policy_asks_repeat(&s->options) && slot < h.n_slots; slot++)
        x->score[r.score][slot] = INFINITY;
}

/* A receiver's value has changed, and with it the norm that its score is multiplied by. */
void kvf__fold_norm(const kvf__fold *w, uint32_t slot, const float *row) {
    if (w->roles.v_norm == KVF__NONE) return;
    float norm = w->kernels->norm(row, w->old.pages->head_dim);
    if (w->gathered)
        w->x.score[w->roles.v_norm][slot] = norm;
    else
        *kvf__score_at(&w->old, w->call->batch->scores, w->roles.v_norm, slot) = norm;
}
