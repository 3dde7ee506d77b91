/* The scores of a repeated prompt after the forward passes: KVzip+'s factor |W_o,h v| of every slot.
 *
 * W_o,h are the columns of the output projection that belong to query head h. Its Gram matrix G = W_o,h^T W_o,h is as small as a
 * head, and |W_o,h v|^2 = v . G v: so a layer's matrix is dequantised once, a panel of rows at a time, and the values of all slots
 * meet only G. */
#include <math.h>

#include "base/page_index.h"
#include "base/view_stamp.h"
#include "model/forward.h"

typedef struct score {
    const kvf_model *m;
    kvf_activations *a;
    kvf_repetition r;
    kvf_view view;
    kvf_pages pages;
    const kvf__gemv_ops *ops;
    const kvf__matrix *w; /* (n_embd, q): the layer's output projection */
    uint32_t layer, panel_begin, panel_rows;
} score;

static const void *row_of(const kvf__matrix *w, uint32_t row, uint32_t *type) {
    uint32_t i = 0;
    for (; row >= w->parts[i].n_rows; i++) row -= w->parts[i].n_rows;
    *type = w->parts[i].type;
    return (const unsigned char *)w->parts[i].data + row * w->parts[i].row_bytes;
}

/* A row of the panel becomes a column of (q, KVF__GRAM_ROWS). */
static void transpose_row(void *ctx, uint32_t item, uint32_t thread) {
    const score *s = ctx;
    uint32_t type;
    const void *data = row_of(s->w, s->panel_begin + item, &type);
    float *row = s->a->scratch + thread * s->m->weights->scratch_floats;
    (void)s->ops->dequantize(type, data, s->w->k, row);
    for (size_t i = 0; i < s->w->k; i++) s->a->gram_panel[i * KVF__GRAM_ROWS + item] = row[i];
}

/* y (m, n) = x (m, k) times the transpose of w (n, k), or added to y. Never depends on m. */
static void multiply(const score *s, const float *w, uint32_t n, uint32_t k, const float *x, float *y, uint32_t m,
                     size_t stride, bool add) {
    for (uint32_t i = 0; i < n; i += KVF__GEMV_ROWS)
        for (uint32_t j = 0, now; j < m; j += now) {
            now = KVF__MIN(m - j, s->ops->rows);
            s->ops->dots(&(kvf__dots){.w = w + i * stride,
                                      .x = x + j * stride,
                                      .y = y + (size_t)j * n + i,
                                      .w_stride = stride,
                                      .x_stride = stride,
                                      .y_stride = n,
                                      .n_w = KVF__MIN(n - i, (uint32_t)KVF__GEMV_ROWS),
                                      .m = now,
                                      .n = k,
                                      .accumulate = add});
        }
}

/* Adds the panel to the Gram matrix of one query head. */
static void add_panel(void *ctx, uint32_t head, uint32_t thread) {
    const score *s = ctx;
    uint32_t d = s->m->info.head_dim;
    const float *w = s->a->gram_panel + (size_t)head * d * KVF__GRAM_ROWS;
    (void)thread;
    multiply(s, w, d, s->panel_rows, w, s->a->gram + (size_t)head * d * d, d, KVF__GRAM_ROWS, s->panel_begin > 0);
}

/* The slots of the prompt's positions in a table; in the order of the positions. */
static uint32_t first_slot(const score *s, uint64_t table, uint32_t pos) {
    uint32_t n = s->view.n_slots[table], from_end = s->view.next_pos[s->r.seq] - pos;
    return n - KVF__MIN(n, from_end);
}

static void read_value(const score *s, uint64_t table, uint32_t head, uint32_t slot, float *out) {
    const kvf_pages *p = &s->pages;
    uint32_t block = s->view.rows[s->view.row_offset[table] + slot / p->block_size];
    const void *v = kvf__v_at(p, block, head, slot % p->block_size);
    for (uint32_t i = 0; i < p->head_dim; i++)
        out[i] = p->dtype == KVF_F32 ? ((const float *)v)[i] : kvf__widen(p->dtype, ((const uint16_t *)v)[i]);
}

/* Some slots of one KV head: all its query heads. */
static void scale_slots(void *ctx, uint32_t item, uint32_t thread) {
    const score *s = ctx;
    const kvf_model_info *info = &s->m->info;
    uint32_t d = info->head_dim, kv = item % info->n_kv_heads, per_kv = info->n_q_heads / info->n_kv_heads;
    uint32_t hpg = s->view.heads_per_group;
    uint64_t table = kvf__view_table(&s->view, s->r.seq, s->layer, kv / hpg);
    uint32_t begin = first_slot(s, table, s->r.begin) + item / info->n_kv_heads * KVF__GRAM_SLOTS;
    uint32_t end = first_slot(s, table, s->r.end), n = begin < end ? KVF__MIN(end - begin, KVF__GRAM_SLOTS) : 0;
    float *values = s->a->gram_values + (size_t)thread * 2 * KVF__GRAM_SLOTS * d, *y = values + KVF__GRAM_SLOTS * d;
    for (uint32_t i = 0; i < n; i++) read_value(s, table, kv % hpg, begin + i, values + (size_t)i * d);
    for (uint32_t h = kv * per_kv; h < (kv + 1) * per_kv; h++) {
        float *column = s->r.prompt_max + ((size_t)s->layer * info->n_q_heads + h) * s->r.prompt_stride + begin;
        multiply(s, s->a->gram + (size_t)h * d * d, d, d, values, y, n, d, false);
        for (uint32_t i = 0; i < n; i++) {
            double square = 0;
            for (uint32_t e = 0; e < d; e++) square += (double)values[i * d + e] * (double)y[i * d + e];
            column[i] *= square > 0 ? (float)sqrt(square) : 0.0f; /* a rounded square may be below 0 */
        }
    }
}

static void scale_layer(kvf_stream *stream, score *s) {
    const kvf_model_info *info = &s->m->info;
    s->w = &s->m->weights->layers[s->layer].attn_output;
    for (s->panel_begin = 0; s->panel_begin < info->n_embd; s->panel_begin += s->panel_rows) {
        s->panel_rows = KVF__MIN(info->n_embd - s->panel_begin, (uint32_t)KVF__GRAM_ROWS);
        kvf__stream_for(stream, s->panel_rows, transpose_row, s);
        kvf__stream_for(stream, info->n_q_heads, add_panel, s);
    }
    uint32_t n_chunks = kvf__ceil_div(s->r.end - s->r.begin, KVF__GRAM_SLOTS);
    kvf__stream_for(stream, n_chunks * info->n_kv_heads, scale_slots, s);
}

static kvf_status check(const score *s, kvf_stream *stream, kvf_error *err) {
    const kvf_repetition *r = &s->r;
    const kvf_view *v = &s->view;
    const kvf_model_info *info = &s->m->info;
    if (s->a->model != s->m) return kvf__fail(err, KVF_E_INVALID, "score: the activations belong to another model");
    if (kvf_stream_n_threads(stream) > s->a->n_threads)
        return kvf__fail(err, KVF_E_INVALID, "score: a stream of %u threads: the activations were made for %u",
                         kvf_stream_n_threads(stream), s->a->n_threads);
    if (v->n_layers != info->n_layers || v->n_groups * (uint64_t)v->heads_per_group != info->n_kv_heads ||
        s->pages.head_dim != info->head_dim || s->pages.block_size != v->block_size)
        return kvf__fail(err, KVF_E_INVALID, "score: a view or pages of other sizes than the model's");
    if (r->seq >= v->n_seqs || !v->next_pos || r->begin > r->end || r->end > v->next_pos[r->seq])
        return kvf__fail(err, KVF_E_INVALID, "score: sequence %u, positions [%u, %u): the view has %u sequences",
                         r->seq, r->begin, r->end, v->n_seqs);
    if (!r->prompt_max || !s->pages.v)
        return kvf__fail(err, KVF_E_INVALID, "score: %s is NULL", r->prompt_max ? "pages.v" : "prompt_max");
    if (!kvf__view_is_current(v) || !kvf__view_ids_below(v, s->pages.n_blocks))
        return kvf__fail(err, KVF_E_STALE, "score: the view is not as kvf_view_fill has filled it last");
    for (uint32_t t = 0; t < v->n_layers * v->n_groups; t++) {
        uint32_t n = first_slot(s, (uint64_t)r->seq * v->n_layers * v->n_groups + t, r->end);
        if (n > r->prompt_stride)
            return kvf__fail(err, KVF_E_INVALID, "score: prompt_stride %zu: a table has %u slots of the prompt",
                             r->prompt_stride, n);
    }
    return KVF_OK;
}

kvf_status kvf_model_score(const kvf_model *model, kvf_activations *activations, kvf_stream *stream,
                           const kvf_repetition *repetition, kvf_error *err) {
    if (!model || !activations)
        return kvf__fail(err, KVF_E_INVALID, "kvf_model_score: %s is NULL", model ? "activations" : "model");
    score s = {.m = model, .a = activations, .ops = kvf__gemv_ops_for(activations->cpu)};
    kvf_status st = kvf__config_read(&s.r, sizeof s.r, repetition, "kvf_repetition", err);
    if (!st) st = kvf__config_read(&s.view, sizeof s.view, s.r.view, "kvf_view", err);
    if (!st) st = kvf__config_read(&s.pages, sizeof s.pages, s.r.pages, "kvf_pages", err);
    if (!st) st = check(&s, stream, err);
    for (s.layer = 0; s.layer < model->info.n_layers && !st; s.layer++) scale_layer(stream, &s);
    return st;
}
