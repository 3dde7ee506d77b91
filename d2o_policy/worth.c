/* worth: the scores by which the library's own policies rank slots, and how an event asks for them (README.md, token level). */
#include <math.h>

#include "d2o_policy/pages.h"

/* Sorts positions with their slots: the order that pooling goes by. out: [n]. */
static void order_by_pos(const uint32_t *pos, uint32_t n, uint64_t *out) {
    bool ascending = true;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = (uint64_t)pos[i] << 32 | i;
        ascending = ascending && (i == 0 || out[i - 1] < out[i]);
    }
    if (!ascending) kvf__sort_u64(out, n);
}

/* Averages over the kernel's neighbours by position, among the slots before the window. Beyond either end counts as 0, as in
 * SnapKV's padded pooling. Slots in the window are always kept, and their scores stay as they are. */
static void pool(const kvf_policy_slots *s, float *worth) {
    uint32_t n = 0, half = s->options->score_pool / 2, window = KVF__MIN(s->size->window, s->next_pos);
    uint64_t *order = (uint64_t *)(void *)s->scratch;
    order_by_pos(s->pos, s->n_slots, order);
    while (n < s->n_slots && (uint32_t)(order[n] >> 32) < s->next_pos - window) n++;
    /* One pass with the last `half` old numbers at hand: a slot's own is replaced once nobody reads it any more. */
    float old[KVF__MAX_POOL / 2];
    for (uint32_t i = 0; i < n; i++) {
        double sum = 0.0;
        for (uint32_t j = KVF__MIN(i, half); j > 0; j--) sum += (double)old[(i - j) % (KVF__MAX_POOL / 2)];
        for (uint32_t j = i; j < n && j <= i + half; j++) sum += (double)worth[(uint32_t)order[j]];
        old[i % (KVF__MAX_POOL / 2)] = worth[(uint32_t)order[i]];
        worth[(uint32_t)order[i]] = (float)(sum / s->options->score_pool);
    }
}

void kvf_policy_worth(const kvf_policy_slots *s, float *worth) {
    if (!s || !s->options || !worth) return;
    const kvf_policy_options *o = s->options;
    const float *base = s->model ? s->model : s->score ? s->score : s->surprise;
    uint32_t n = s->n_slots;
    for (uint32_t i = 0; i < n; i++) worth[i] = base ? base[i] : 0.0f;
    if (s->recent)
        for (uint32_t i = 0; i < n; i++) worth[i] += s->recent[i];
    if (s->score && (o->score == KVF_SCORE_MEAN || o->score == KVF_SCORE_SQRT))
        for (uint32_t i = 0; i < n; i++) { /* the token itself was the first query that saw it */
            float seen = (float)(s->next_pos - s->pos[i]);
            worth[i] /= o->score == KVF_SCORE_MEAN ? seen : sqrtf(seen);
        }
    if (s->v_norm)
        for (uint32_t i = 0; i < n; i++) worth[i] *= s->v_norm[i];
    if (o->score_pool > 1) pool(s, worth);
}

static const double LEAST_SUM = 1e-6; /* of column sums, under a logarithm */

/* Adds to the scores of a head the logarithm of its slots' attention, less the head's mean of that. */
static void mix_attention(const kvf__call *c, const kvf_event *e, const kvf__head *h, double mix, const float *sums,
                          const kvf__scratch *x) {
    uint32_t n = h->n_slots, next_pos = c->batch->view->next_pos[e->row];
    double mean = 0.0;
    for (uint32_t slot = 0; slot < n; slot++) {
        double seen = next_pos - h->pages->pos[kvf__slot_index(h, slot)];
        x->worth[slot] = (float)log(fmax((double)sums[slot], LEAST_SUM) / sqrt(seen));
        mean += (double)x->worth[slot] / n;
    }
    for (uint32_t slot = 0; slot < n; slot++) x->model[slot] += (float)(mix * ((double)x->worth[slot] - mean));
}

/* The scores from the model, into x->model. A slot that has none yet counts as the mean of the others. */
static void read_model(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__roles *r, bool mixed,
                       const kvf__scratch *x) {
    kvf__head h = kvf__head_of(c->batch->view, c->batch->pages, e->row, e->layer, kv_head);
    double sum = 0.0;
    uint32_t n = 0, n_slots = h.n_slots, bs = h.pages->block_size;
    if (kvf__policy_asks_repeat(&kvf__event_seq(c, e)->options)) {
        memcpy(x->model, x->score[r->score], n_slots * sizeof *x->model);
    } else {
        for (uint32_t begin = 0; begin < n_slots; begin += bs)
            memcpy(x->model + begin, h.pages->score + kvf__slot_index(&h, begin),
                   KVF__MIN(bs, n_slots - begin) * sizeof *x->model);
    }
    double mix = kvf__event_seq(c, e)->options.score_mix;
    if (mixed && mix > 0 && r->score != KVF__NONE) mix_attention(c, e, &h, mix, x->score[r->score], x);
    for (uint32_t slot = 0; slot < n_slots; slot++)
        if (isfinite(x->model[slot])) sum += (double)x->model[slot], n++;
    float mean = n ? (float)(sum / n) : 0.0f;
    for (uint32_t slot = 0; slot < n_slots; slot++)
        if (isinf(x->model[slot]) && x->model[slot] > 0) x->model[slot] = mean;
}

void kvf__slots_fill(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__scratch *x,
                     const kvf__roles *r, kvf_policy_slots *out) {
    const kvf_policy_batch *b = c->batch;
    const kvf__policy_seq *s = kvf__event_seq(c, e);
    kvf__head h = kvf__head_of(b->view, b->pages, e->row, e->layer, kv_head);
    const float *const *a = (const float *const *)x->score;
    for (uint32_t begin = 0, rows; begin < h.n_slots; begin += rows) {
        rows = KVF__MIN(h.pages->block_size, h.n_slots - begin);
        memcpy(x->pos + begin, h.pages->pos + kvf__slot_index(&h, begin), rows * sizeof *x->pos);
    }
    *out = (kvf_policy_slots){.struct_size = sizeof *out,
                              .options = &s->options,
                              .size = kvf__size_of(c->state, s, e->layer, kv_head),
                              .layer = e->layer,
                              .kv_head = kv_head,
                              .n_slots = h.n_slots,
                              .n_keep = e->n_keep,
                              .next_pos = b->view->next_pos[e->row],
                              .kind = e->kind,
                              .pos = x->pos,
                              .score = r->score == KVF__NONE ? NULL : a[r->score],
                              .recent = r->recent == KVF__NONE ? NULL : a[r->recent],
                              .squares = r->squares == KVF__NONE ? NULL : a[r->squares],
                              .surprise = r->surprise == KVF__NONE ? NULL : a[r->surprise],
                              .v_norm = r->v_norm == KVF__NONE ? NULL : a[r->v_norm],
                              .arrays = a,
                              .n_arrays = r->n,
                              .scratch = (float *)(void *)x->work,
                              .model = kvf__policy_asks_model(&s->options) ? x->model : NULL};
}

const float *kvf__event_worth(const kvf__call *c, const kvf_event *e, uint32_t kv_head, bool mixed,
                              const kvf__scratch *x) {
    const kvf_policy_options *o = &kvf__event_seq(c, e)->options;
    void (*worth)(const kvf_policy_slots *, float *) = kvf__policy_ops_resolve(o->ops).worth;
    kvf__roles r = kvf__score_roles(o);
    kvf__event_scores(c, e, kv_head, x);
    bool model = kvf__policy_asks_model(o);
    if (model) {
        read_model(c, e, kv_head, &r, mixed, x);
        if (!worth && o->score_pool <= 1) return x->model;
    }
    /* Accumulated scores are used as they are: nothing is copied. */
    bool plain = !worth && !model && o->score == KVF_SCORE_ACCUMULATE && o->score_pool <= 1 && r.v_norm == KVF__NONE;
    if (plain && r.n) return x->score[r.score == KVF__NONE ? r.surprise : r.score];
    kvf_policy_slots slots;
    kvf__slots_fill(c, e, kv_head, x, &r, &slots);
    if (worth)
        worth(&slots, x->worth);
    else
        kvf_policy_worth(&slots, x->worth);
    return x->worth;
}
