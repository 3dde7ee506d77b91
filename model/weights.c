/* model/weights.c: the memory that the forward pass multiplies with, filled from the file. */
#define _DEFAULT_SOURCE
#include "model/weights.h"

#include <limits.h>
#include <math.h>
#include <sys/mman.h>

enum { ROWS_AN_ITEM = 64 };

/* Where the next tensor goes. Without a base the first walk only counts; the second one dequantises. */
typedef struct loader {
    kvf__slab slab;
    kvf_stream *stream;
    kvf_error *err;
    kvf_status status;
} loader;

struct rows {
    const kvf__tensor *tensor;
    float *out;
};

static void dequantize_rows(void *ctx, uint32_t item, uint32_t thread) {
    const struct rows *r = ctx;
    (void)thread;
    uint32_t begin = item * ROWS_AN_ITEM, end = KVF__MIN(begin + ROWS_AN_ITEM, r->tensor->n_rows);
    for (uint32_t i = begin; i < end; i++) kvf__tensor_row(r->tensor, i, r->out + (size_t)i * r->tensor->n_cols);
}

/* A row must be whole blocks, and a BLAS counts in int. */
static bool loadable(loader *l, const kvf__tensor *t) {
    uint32_t elements, bytes;
    if (!kvf__tensor_type_geometry(t->type, &elements, &bytes))
        l->status =
            kvf__fail(l->err, KVF_E_UNSUPPORTED, "tensor %s: type %u: must be " KVF__TENSOR_TYPES, t->name, t->type);
    else if (t->n_cols % elements)
        l->status =
            kvf__fail(l->err, KVF_E_FORMAT, "tensor %s: rows of %u elements: must be a multiple of %u in type %s",
                      t->name, t->n_cols, elements, kvf__tensor_type_name(t->type));
    else if (t->n_rows > INT_MAX / 2 || t->n_cols > INT_MAX / 2)
        l->status = kvf__fail(l->err, KVF_E_UNSUPPORTED, "tensor %s: %u rows of %u: each must be at most %d", t->name,
                              t->n_rows, t->n_cols, INT_MAX / 2);
    return !l->status;
}

/* Tensors that stand one after another in one matrix. */
static const float *take(loader *l, uint32_t n, const kvf__tensor *const *tensors) {
    size_t total = 0, one;
    for (uint32_t i = 0; i < n; i++) {
        if (l->status || (!l->slab.base && !loadable(l, tensors[i]))) return NULL;
        if (!kvf__mul(tensors[i]->n_rows, tensors[i]->n_cols, &one) || !kvf__add(total, one, &total))
            l->slab.bad = true;
    }
    float *out = kvf__slab_take(&l->slab, total, sizeof *out), *to = out;
    for (uint32_t i = 0; out && i < n; i++) {
        struct rows r = {tensors[i], to};
        kvf__stream_for(l->stream, kvf__ceil_div(tensors[i]->n_rows, ROWS_AN_ITEM), dequantize_rows, &r);
        to += (size_t)tensors[i]->n_rows * tensors[i]->n_cols;
    }
    return out;
}

/* What the angle of a pair is multiplied with: a pair that turns often within the original context keeps its frequency,
 * one that turns seldom gets 1 / factor of it, those between a mean of both by their number of turns. */
static double llama3_scale(const kvf__rope_scaling *s, double frequency) {
    double turns = s->original_context * frequency / (2 * acos(-1));
    double keep = (turns - (double)s->low_turns) / ((double)s->high_turns - (double)s->low_turns);
    keep = KVF__MIN(KVF__MAX(keep, 0), 1);
    return keep + (1 - keep) / (double)s->factor;
}

static const double *take_frequencies(loader *l, const kvf_model *m) {
    const kvf__rope_scaling *s = &m->rope_scaling;
    uint32_t half = m->n_rot / 2;
    double *out = kvf__slab_take(&l->slab, half, sizeof *out);
    for (uint32_t i = 0; out && i < half; i++) {
        float divisor = 1;
        if (m->rope_freqs.data)
            memcpy(&divisor, (const unsigned char *)m->rope_freqs.data + i * sizeof divisor, sizeof divisor);
        double frequency = pow((double)m->info.rope_base, -2.0 * i / m->n_rot);
        if (s->kind == KVF__ROPE_LINEAR) frequency /= (double)s->factor;
        if (s->kind == KVF__ROPE_LLAMA3) frequency *= llama3_scale(s, frequency);
        out[i] = frequency / (double)divisor;
    }
    return out;
}

static void walk(loader *l, const kvf_model *m, kvf__weights *w) {
    kvf__layer_weights *layers = kvf__slab_take(&l->slab, m->info.n_layers, sizeof *layers);
    for (uint32_t i = 0; i < m->info.n_layers && !l->status; i++) {
        const kvf__layer *t = &m->layers[i];
        kvf__layer_weights x = {.qkv_bias = NULL};
        x.attn_norm = take(l, 1, (const kvf__tensor *[]){&t->attn_norm});
        x.qkv = take(l, 3, (const kvf__tensor *[]){&t->attn_q, &t->attn_k, &t->attn_v});
        if (t->attn_q_bias.data)
            x.qkv_bias = take(l, 3, (const kvf__tensor *[]){&t->attn_q_bias, &t->attn_k_bias, &t->attn_v_bias});
        x.attn_output = take(l, 1, (const kvf__tensor *[]){&t->attn_output});
        x.ffn_norm = take(l, 1, (const kvf__tensor *[]){&t->ffn_norm});
        x.gate_up = take(l, 2, (const kvf__tensor *[]){&t->ffn_gate, &t->ffn_up});
        x.ffn_down = take(l, 1, (const kvf__tensor *[]){&t->ffn_down});
        if (layers) layers[i] = x;
    }
    w->layers = layers;
    w->output_norm = take(l, 1, (const kvf__tensor *[]){&m->output_norm});
    w->output = take(l, 1, (const kvf__tensor *[]){&m->output});
    w->rope_freqs = take_frequencies(l, m);
}

/* Fresh pages come from the system one by one when they are first written; large ones make that 512 times rarer. Advice
 * only: where it is refused nothing is lost. */
static void ask_for_large_pages(void *p, size_t bytes) {
    const uintptr_t large = (uintptr_t)1 << 21;
    uintptr_t begin = ((uintptr_t)p + large - 1) / large * large, end = ((uintptr_t)p + bytes) / large * large;
    if (begin < end) (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}

kvf_status kvf__weights_load(kvf_model *m, kvf_stream *stream, kvf_error *err) {
    kvf_allocator a = m->allocator;
    loader l = {.stream = stream, .err = err};
    kvf__weights *w = kvf__alloc(&a, sizeof *w);
    if (!w) return kvf__fail(err, KVF_E_NO_MEMORY, "weights: %zu bytes could not be allocated", sizeof *w);
    walk(&l, m, w);
    if (!l.status && l.slab.bad)
        l.status = kvf__fail(err, KVF_E_OVERFLOW, "weights: the tensors' sizes exceed the address space");
    if (!l.status) {
        w->slab_bytes = l.slab.used;
        w->slab = a.alloc(a.ctx, w->slab_bytes, KVF__CACHE_LINE); /* not zeroed: the threads touch it first */
        if (!w->slab)
            l.status =
                kvf__fail(err, KVF_E_NO_MEMORY, "weights: %zu bytes could not be allocated; a smaller model needs less",
                          w->slab_bytes);
    }
    if (l.status) {
        kvf__free(&a, w, sizeof *w);
        return l.status;
    }
    ask_for_large_pages(w->slab, w->slab_bytes);
    l.slab = (kvf__slab){.base = w->slab};
    walk(&l, m, w);
    w->allocator = a;
    m->weights = w;
    m->info.weight_bytes = w->slab_bytes;
    return KVF_OK;
}

void kvf__weights_free(kvf_model *m) {
    kvf__weights *w = m->weights;
    if (!w) return;
    kvf_allocator a = w->allocator;
    kvf__free(&a, w->slab, w->slab_bytes);
    kvf__free(&a, w, sizeof *w);
    m->weights = NULL;
}
