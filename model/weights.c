/* model/weights.c: the weights of the forward pass: matrices in the mapped file, vectors in memory. */
#include "model/weights.h"

#include <limits.h>
#include <math.h>

/* Where the next tensor goes. Without a base the first walk only counts; the second one fills. */
typedef struct loader {
    kvf__slab slab;
    kvf_error *err;
    kvf_status status;
    size_t scratch_floats;
} loader;

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

/* Vectors that stand one after another, in fp32. */
static const float *take_vector(loader *l, uint32_t n, const kvf__tensor *const *tensors) {
    size_t total = 0;
    for (uint32_t i = 0; i < n; i++) total += tensors[i]->n_cols; /* at most 2^32 each */
    float *out = kvf__slab_take(&l->slab, total, sizeof *out), *to = out;
    for (uint32_t i = 0; out && i < n; to += tensors[i++]->n_cols) kvf__tensor_row(tensors[i], 0, to);
    return out;
}

/* Tensors that stand one after another in one matrix. */
static kvf__matrix take_matrix(loader *l, uint32_t n, const kvf__tensor *const *tensors) {
    kvf__matrix m = {.n_parts = n, .k = tensors[0]->n_cols};
    for (uint32_t i = 0; i < n && !l->status && loadable(l, tensors[i]); i++) {
        m.parts[i].type = tensors[i]->type;
        m.parts[i].n_rows = tensors[i]->n_rows;
        m.parts[i].data = tensors[i]->data;
        m.parts[i].row_bytes = tensors[i]->bytes / tensors[i]->n_rows;
        m.n += tensors[i]->n_rows;
    }
    if (!l->status) l->scratch_floats = KVF__MAX(l->scratch_floats, kvf__gemm_scratch_floats(&m));
    return m;
}

/* The factor of a pair's angle. A pair that makes many turns within the original context keeps its frequency; one
 * that makes few gets 1 / factor of it; those between get a mean of both, weighted by their number of turns. */
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
        x.attn_norm = take_vector(l, 1, (const kvf__tensor *[]){&t->attn_norm});
        x.qkv = take_matrix(l, 3, (const kvf__tensor *[]){&t->attn_q, &t->attn_k, &t->attn_v});
        if (t->attn_q_bias.data)
            x.qkv_bias = take_vector(l, 3, (const kvf__tensor *[]){&t->attn_q_bias, &t->attn_k_bias, &t->attn_v_bias});
        x.attn_output = take_matrix(l, 1, (const kvf__tensor *[]){&t->attn_output});
        x.ffn_norm = take_vector(l, 1, (const kvf__tensor *[]){&t->ffn_norm});
        x.gate_up = take_matrix(l, 2, (const kvf__tensor *[]){&t->ffn_gate, &t->ffn_up});
        x.ffn_down = take_matrix(l, 1, (const kvf__tensor *[]){&t->ffn_down});
        if (layers) layers[i] = x;
    }
    w->layers = layers;
    w->output_norm = take_vector(l, 1, (const kvf__tensor *[]){&m->output_norm});
    w->output = take_matrix(l, 1, (const kvf__tensor *[]){&m->output});
    w->rope_freqs = take_frequencies(l, m);
}

kvf_status kvf__weights_load(kvf_model *m, kvf_error *err) {
    kvf_allocator a = m->allocator;
    loader l = {.err = err};
    kvf__weights *w = kvf__alloc(&a, sizeof *w);
    if (!w) return kvf__fail(err, KVF_E_NO_MEMORY, "weights: %zu bytes could not be allocated", sizeof *w);
    walk(&l, m, w);
    if (!l.status && l.slab.bad)
        l.status = kvf__fail(err, KVF_E_OVERFLOW, "weights: the tensors' sizes exceed the address space");
    if (!l.status) {
        w->slab_bytes = l.slab.used;
        w->slab = kvf__alloc(&a, w->slab_bytes);
        if (!w->slab)
            l.status =
                kvf__fail(err, KVF_E_NO_MEMORY, "weights: %zu bytes could not be allocated; a smaller model needs less",
                          w->slab_bytes);
    }
    if (l.status) {
        kvf__free(&a, w, sizeof *w);
        return l.status;
    }
    l.slab = (kvf__slab){.base = w->slab};
    walk(&l, m, w);
    w->scratch_floats = l.scratch_floats;
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
