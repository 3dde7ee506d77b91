/* The forward pass of a Llama decoder over paged K and V, for a mixed batch of decode and prefill rows. */
#include "model/fast.h"
#include "model/gemm.h"
#include "model/gemv.h"
#include "model/ops.h"
#include "model/weights.h"

enum {
    ROWS_AN_ITEM = 8,
    TARGET_ROWS = 64 /* whose logits are there at a time, for the probabilities of targets */
};

/* One slab. Rows are tokens of the step; after the last layer's attention, those of them that something is wanted of. */
struct kvf_activations {
    const kvf_model *model;
    kvf_allocator allocator;
    size_t slab_bytes;
    uint32_t max_tokens, max_seqs, max_slots, n_threads;
    kvf__cpu cpu;
    float *x;                                  /* (max_tokens, n_embd): the residual stream */
    float *norm;                               /* (max_tokens, n_embd) */
    float *qkv;                                /* (max_tokens, q + kv + kv) */
    float *attention;                          /* (max_tokens, q) */
    float *gate_up;                            /* (max_tokens, n_ff + n_ff) */
    float *rotation;                           /* (max_tokens, n_rot): cos and sin of every pair */
    uint32_t *position;                        /* (max_tokens) */
    float **col_sums, **last_sums, **sq_sums;  /* (max_seqs): of the layer at hand */
    uint32_t *out_at, *target_row, *target_at; /* (max_tokens): see keep_wanted_rows */
    float *target_logits;                      /* (TARGET_ROWS, n_vocab) */
    float *scratch;                            /* (n_threads, scratch_floats of the weights) */
    void *quantised;                           /* (max_tokens, the widest input of a product): activations in 8 bits */
    uint32_t *seq_of, *bad_in; /* (max_tokens): a row's sequence, and where it first had a number that is not finite */
    float *kept;               /* (kept_floats): sums as they were, of the layers so far; grows, apart from the slab */
    size_t kept_floats;
    void *workspace;
    size_t workspace_bytes;
};

/* A pass under way. */
typedef struct pass {
    const kvf_model *m;
    kvf_activations *a;
    kvf_stream *stream;
    const kvf__ops *ops;
    const kvf__gemv_ops *gemv_ops;
    const kvf__fast_ops *fast_ops; /* or NULL */
    kvf_forward f;
    kvf_view view;
    uint32_t n_rows, n_targets;
    uint32_t target_begin;    /* of the targets at hand */
    uint32_t checked;         /* the layer that a row which is not finite is put down to */
    uint32_t n_layers_kept;   /* whose sums are in a->kept */
    uint32_t q, kv;           /* floats of a token's Q; of its K, and of its V */
    const float *norm_weight; /* of the norm at hand */
    const float *qkv_bias;    /* of the layer at hand; or NULL */
    void (*row_fn)(const struct pass *p, uint32_t row);
    kvf_mass mass;
    kvf_attention attention;
    kvf_error *err;
} pass;

static bool carve(kvf_activations *a, kvf__slab *s) {
    const kvf_model_info *info = &a->model->info;
    size_t n = a->max_tokens, d = info->head_dim, q = info->n_q_heads * d, kv = info->n_kv_heads * d, f = sizeof(float);
    a->x = kvf__slab_take(s, n, info->n_embd * f);
    a->norm = kvf__slab_take(s, n, info->n_embd * f);
    a->qkv = kvf__slab_take(s, n, (q + 2 * kv) * f);
    a->attention = kvf__slab_take(s, n, q * f);
    a->gate_up = kvf__slab_take(s, n, (size_t)info->n_ff * 2 * f);
    a->rotation = kvf__slab_take(s, n, a->model->n_rot * f);
    a->position = kvf__slab_take(s, n, sizeof *a->position);
    float ***sums[] = {&a->col_sums, &a->last_sums, &a->sq_sums};
    for (size_t i = 0; i < 3; i++) *sums[i] = kvf__slab_take(s, a->max_seqs, sizeof **sums[i]);
    uint32_t **rows[] = {&a->out_at, &a->target_row, &a->target_at, &a->seq_of, &a->bad_in};
    for (size_t i = 0; i < 5; i++) *rows[i] = kvf__slab_take(s, n, sizeof **rows[i]);
    a->target_logits = kvf__slab_take(s, KVF__MIN(n, (size_t)TARGET_ROWS), info->n_vocab * f);
    a->scratch = kvf__slab_take(s, a->n_threads, a->model->weights->scratch_floats * f);
    size_t widest = KVF__MAX(KVF__MAX((size_t)info->n_embd, q), (size_t)info->n_ff);
    size_t quantised_bytes = kvf__gemm_quantised_bytes(a->max_tokens, (uint32_t)widest);
    a->quantised = kvf__slab_take(s, quantised_bytes, 1);
    s->bad |= !quantised_bytes;
    a->workspace = kvf__slab_take(s, a->workspace_bytes, 1);
    return !s->bad;
}

kvf_status kvf_activations_create(const kvf_model *model, uint32_t max_tokens, uint32_t max_seqs, uint32_t max_slots,
                                  uint32_t n_threads, kvf_activations **out, kvf_error *err) {
    if (!model || !out)
        return kvf__fail(err, KVF_E_INVALID, "kvf_activations_create: %s is NULL", model ? "out" : "model");
    if (!model->weights)
        return kvf__fail(err, KVF_E_STATE,
                         "kvf_activations_create: the model was opened with tokenizer_only and has no weights");
    if (!max_tokens || max_tokens > 1u << 24) /* index arithmetic of a BLAS is in int */
        return kvf__fail(err, KVF_E_INVALID, "max_tokens %u: must be in [1, %u]", max_tokens, 1u << 24);
    if (!max_seqs || !max_slots)
        return kvf__fail(err, KVF_E_INVALID, "%s 0: must be at least 1", max_seqs ? "max_slots" : "max_seqs");
    if (!n_threads || n_threads > 1024)
        return kvf__fail(err, KVF_E_INVALID, "n_threads %u: must be in [1, 1024], the stream's", n_threads);
    const kvf_model_info *info = &model->info;
    kvf_activations a = {.model = model,
                         .allocator = model->allocator,
                         .max_tokens = max_tokens,
                         .max_seqs = max_seqs,
                         .max_slots = max_slots,
                         .n_threads = n_threads,
                         .cpu = kvf__cpu_detect()};
    kvf_status st = kvf_attention_workspace_bytes(n_threads, info->head_dim, info->n_q_heads, info->n_kv_heads,
                                                  max_slots, max_seqs, max_tokens, &a.workspace_bytes);
    if (st)
        return kvf__fail(err, st, "activations: no attention workspace for %u tokens, %u sequences, %u slots",
                         max_tokens, max_seqs, max_slots);
    kvf__slab s = {0};
    (void)kvf__slab_take(&s, 1, sizeof a);
    if (!carve(&a, &s))
        return kvf__fail(err, KVF_E_OVERFLOW, "activations: %u tokens, %u sequences: sizes wrap", max_tokens, max_seqs);
    a.slab_bytes = s.used;
    s = (kvf__slab){.base = kvf__alloc(&a.allocator, a.slab_bytes)};
    if (!s.base) return kvf__fail(err, KVF_E_NO_MEMORY, "activations: %zu bytes could not be allocated", a.slab_bytes);
    kvf_activations *self = kvf__slab_take(&s, 1, sizeof *self);
    (void)carve(&a, &s);
    *self = a;
    *out = self;
    return KVF_OK;
}

void kvf_activations_destroy(kvf_activations *a) {
    if (!a) return;
    kvf_allocator allocator = a->allocator;
    kvf__free(&allocator, a->kept, a->kept_floats * sizeof *a->kept);
    kvf__free(&allocator, a, a->slab_bytes);
}

/* ---- Rows in parallel ------------------------------------------------------------------------------- */

static void run_rows(void *ctx, uint32_t item, uint32_t thread) {
    const pass *p = ctx;
    (void)thread;
    uint32_t begin = item * ROWS_AN_ITEM, end = KVF__MIN(begin + ROWS_AN_ITEM, p->n_rows);
    for (uint32_t row = begin; row < end; row++) p->row_fn(p, row);
}

static void each_row(pass *p, void (*fn)(const pass *p, uint32_t row)) {
    p->row_fn = fn;
    kvf__stream_for(p->stream, kvf__ceil_div(p->n_rows, ROWS_AN_ITEM), run_rows, p);
}

static float *x_row(const pass *p, uint32_t row) { return p->a->x + (size_t)row * p->m->info.n_embd; }

static void embed_row(const pass *p, uint32_t row) {
    uint32_t n_rot = p->m->n_rot;
    kvf__tensor_row(&p->m->token_embd, p->f.tokens[row], x_row(p, row));
    kvf__rope_angles(p->a->position[row], p->m->weights->rope_freqs, n_rot / 2, p->a->rotation + (size_t)row * n_rot);
}

/* Whether one of n numbers is NaN or +inf; with below, -inf too. By bits: vector units take many at a time. */
static bool any_not_finite(const float *x, size_t n, bool below) {
    const uint32_t infinity = 0x7f800000u, sign = below ? 0 : 0x80000000u;
    uint32_t found = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        found |= (uint32_t)((bits & ~0x80000000u) >= infinity) & (uint32_t)(bits != (infinity | sign) || below);
    }
    return found != 0;
}

static void norm_row(const pass *p, uint32_t row) {
    const kvf_model_info *info = &p->m->info;
    if (p->f.not_finite && p->a->bad_in[row] == KVF_FINITE && any_not_finite(x_row(p, row), info->n_embd, true))
        p->a->bad_in[row] = p->checked;
    p->ops->rms_norm(x_row(p, row), p->norm_weight, info->n_embd, info->norm_epsilon,
                     p->a->norm + (size_t)row * info->n_embd);
}

/* Q and K stand side by side, so all their heads in one go. */
static void bias_and_rope_row(const pass *p, uint32_t row) {
    const kvf_model_info *info = &p->m->info;
    const float *rotation = p->a->rotation + (size_t)row * p->m->n_rot;
    uint32_t n = p->q + 2 * p->kv, n_heads = info->n_q_heads + info->n_kv_heads;
    float *qkv = p->a->qkv + (size_t)row * n;
    for (uint32_t i = 0; p->qkv_bias && i < n; i++) qkv[i] += p->qkv_bias[i];
    if (p->m->rope_halves)
        kvf__rope_halves(qkv, n_heads, info->head_dim, rotation, p->m->n_rot / 2);
    else
        kvf__rope(qkv, n_heads, info->head_dim, rotation, p->m->n_rot / 2);
}

static void swiglu_row(const pass *p, uint32_t row) {
    uint32_t n_ff = p->m->info.n_ff;
    float *gate = p->a->gate_up + (size_t)row * n_ff * 2;
    p->ops->swiglu(gate, gate + n_ff, n_ff);
}

static void normalise(pass *p, const float *weight) {
    p->norm_weight = weight;
    each_row(p, norm_row);
}

/* y (n_rows, n) = x (n_rows, k) times w (n, k) transposed. */
static kvf_status multiply(pass *p, const float *x, size_t x_stride, const kvf__matrix *w, float *y, size_t y_stride,
                           bool accumulate) {
    kvf__gemm g = {.m = p->n_rows,
                   .w = w,
                   .x = x,
                   .y = y,
                   .x_stride = x_stride,
                   .y_stride = y_stride,
                   .accumulate = accumulate,
                   .deterministic = p->f.deterministic != 0,
                   .ops = p->gemv_ops,
                   .fast = p->fast_ops,
                   .quantised = p->a->quantised,
                   .scratch = p->a->scratch,
                   .scratch_floats = p->m->weights->scratch_floats};
    kvf_status st = kvf__gemm_run(p->stream, &g);
    return st ? kvf__fail(p->err, st, "forward: a product of %u rows, %u by %u, found no memory in oneDNN", p->n_rows,
                          w->n, w->k)
              : KVF_OK;
}

/* ---- Checks ------------------------------------------------------------------------------------------ */

static kvf_status check_shapes(const pass *p) {
    const kvf_forward *f = &p->f;
    const kvf_model_info *info = &p->m->info;
    const kvf_activations *a = p->a;
    if (a->model != p->m) return kvf__fail(p->err, KVF_E_INVALID, "forward: the activations belong to another model");
    if (kvf_stream_n_threads(p->stream) > a->n_threads)
        return kvf__fail(p->err, KVF_E_INVALID, "forward: a stream of %u threads: the activations were made for %u",
                         kvf_stream_n_threads(p->stream), a->n_threads);
    if (p->view.n_layers != info->n_layers || p->view.n_groups * (uint64_t)p->view.heads_per_group != info->n_kv_heads)
        return kvf__fail(p->err, KVF_E_INVALID,
                         "forward: a view of %u layers, %u groups of %u KV heads: the model has %u layers of %u",
                         p->view.n_layers, p->view.n_groups, p->view.heads_per_group, info->n_layers, info->n_kv_heads);
    if (f->pages->head_dim != info->head_dim)
        return kvf__fail(p->err, KVF_E_INVALID, "forward: pages of head_dim %u: the model has %u", f->pages->head_dim,
                         info->head_dim);
    if (p->view.n_seqs > a->max_seqs)
        return kvf__fail(p->err, KVF_E_INVALID, "forward: %u sequences: the activations take %u", p->view.n_seqs,
                         a->max_seqs);
    if (f->n_decode > p->view.n_seqs)
        return kvf__fail(p->err, KVF_E_INVALID, "forward: n_decode %u: there are %u sequences", f->n_decode,
                         p->view.n_seqs);
    size_t n_tables = (size_t)p->view.n_layers * p->view.n_groups;
    for (size_t i = 0; i < n_tables * p->view.n_seqs; i++)
        if (p->view.n_slots[i] > a->max_slots)
            return kvf__fail(p->err, KVF_E_INVALID,
                             "forward: sequence %zu has a table of %u slots: the activations take %u", i / n_tables,
                             p->view.n_slots[i], a->max_slots);
    return KVF_OK;
}

/* Rows, ids and positions; sets n_rows. */
static kvf_status check_rows(pass *p) {
    const kvf_forward *f = &p->f;
    uint32_t n_seqs = p->view.n_seqs, n_vocab = p->m->info.n_vocab, n = f->q_begin[n_seqs];
    if (f->q_begin[0] != 0) return kvf__fail(p->err, KVF_E_INVALID, "q_begin[0] %u: must be 0", f->q_begin[0]);
    for (uint32_t i = 0; i < n_seqs; i++) {
        if (f->q_begin[i + 1] < f->q_begin[i] || (i < f->n_decode && f->q_begin[i + 1] - f->q_begin[i] != 1))
            return kvf__fail(p->err, KVF_E_INVALID, "q_begin[%u] %u after %u: must ascend, by one up to n_decode %u",
                             i + 1, f->q_begin[i + 1], f->q_begin[i], f->n_decode);
        if (f->q_begin[i + 1] - f->q_begin[i] > p->view.next_pos[i])
            return kvf__fail(p->err, KVF_E_INVALID, "forward: sequence %u has %u new tokens: only %u were appended", i,
                             f->q_begin[i + 1] - f->q_begin[i], p->view.next_pos[i]);
    }
    if (n > p->a->max_tokens)
        return kvf__fail(p->err, KVF_E_INVALID, "forward: %u tokens: the activations take %u", n, p->a->max_tokens);
    for (uint32_t i = 0; i < n; i++)
        if (f->tokens[i] >= n_vocab)
            return kvf__fail(p->err, KVF_E_INVALID, "token %u at row %u: must be below the vocabulary's size, %u",
                             f->tokens[i], i, n_vocab);
    for (uint32_t i = 0; f->targets && i < n; i++)
        if (f->targets[i] >= n_vocab && f->targets[i] != KVF_NO_TOKEN)
            return kvf__fail(p->err, KVF_E_INVALID,
                             "targets[%u] %u: must be below the vocabulary's size, %u, or KVF_NO_TOKEN", i,
                             f->targets[i], n_vocab);
    for (uint32_t i = 0; i < f->n_out; i++)
        if (f->out_rows[i] >= n || (i && f->out_rows[i] <= f->out_rows[i - 1]))
            return kvf__fail(p->err, KVF_E_INVALID, "out_rows[%u] %u: must ascend and be below the number of rows, %u",
                             i, f->out_rows[i], n);
    p->n_rows = n;
    return KVF_OK;
}

static kvf_status begin(pass *p, const kvf_forward *forward) {
    const kvf_forward *f = &p->f;
    kvf_status st = kvf__config_read(&p->f, sizeof p->f, forward, "kvf_forward", p->err);
    if (st) return st;
    st = kvf__config_read(&p->view, sizeof p->view, f->view, "kvf_view", p->err);
    if (st) return st;
    const char *missing = !f->pages                                  ? "pages"
                          : !f->q_begin                              ? "q_begin"
                          : !f->tokens && f->q_begin[p->view.n_seqs] ? "tokens"
                          : f->n_out && !f->out_rows                 ? "out_rows"
                          : f->n_out && !f->logits                   ? "logits"
                          : f->targets && !f->logprobs               ? "logprobs"
                          : f->prompt_last && !f->last_begin         ? "last_begin"
                                                                     : NULL;
    if (missing) return kvf__fail(p->err, KVF_E_INVALID, "kvf_forward: %s is NULL", missing);
    st = check_shapes(p);
    return st ? st : check_rows(p);
}

/* ---- The pass ---------------------------------------------------------------------------------------- */

static void prepare(pass *p) {
    const kvf_forward *f = &p->f;
    const kvf_activations *a = p->a;
    const kvf_model_info *info = &p->m->info;
    kvf__cpu cpu = f->path == KVF_CPU_REF || f->path == KVF_CPU_SCALAR ? (kvf__cpu){0} : a->cpu;
    p->ops = kvf__ops_for(cpu.avx2_fma_f16c);
    p->gemv_ops = kvf__gemv_ops_for(cpu);
    p->fast_ops = f->fast_activations ? kvf__fast_ops_for(cpu) : NULL;
    p->q = info->n_q_heads * info->head_dim;
    p->kv = info->n_kv_heads * info->head_dim;
    for (uint32_t i = 0; i < p->view.n_seqs; i++) {
        for (uint32_t row = f->q_begin[i]; row < f->q_begin[i + 1]; row++) {
            a->position[row] = p->view.next_pos[i] - (f->q_begin[i + 1] - row);
            a->seq_of[row] = i;
            a->bad_in[row] = KVF_FINITE;
        }
        if (f->not_finite) f->not_finite[i] = KVF_FINITE;
    }
    p->mass = (kvf_mass){.struct_size = sizeof p->mass,
                         .col_sums = f->prompt_sums ? a->col_sums : NULL,
                         .last_sums = f->prompt_last ? a->last_sums : NULL,
                         .last_begin = f->last_begin,
                         .sq_sums = f->prompt_squares ? a->sq_sums : NULL,
                         .col_stride = f->prompt_stride,
                         .row = f->row,
                         .row_stride = f->row_stride,
                         .row_wanted = f->row_wanted,
                         .row_gqa = f->row_gqa};
    size_t qkv_stride = p->q + 2 * (size_t)p->kv;
    p->attention = (kvf_attention){.struct_size = sizeof p->attention,
                                   .view = f->view,
                                   .pages = f->pages,
                                   .n_q_heads = info->n_q_heads,
                                   .q_begin = f->q_begin,
                                   .q = a->qkv,
                                   .k = a->qkv + p->q,
                                   .v = a->qkv + p->q + p->kv,
                                   .q_stride = qkv_stride,
                                   .kv_stride = qkv_stride,
                                   .out = a->attention,
                                   .out_stride = p->q,
                                   .mass = &p->mass,
                                   .workspace = a->workspace,
                                   .workspace_bytes = a->workspace_bytes,
                                   .path = f->path};
}

/* While every sequence is shorter than the window, windowed attention equals full attention, also over tables from
 * which a policy has evicted. */
static uint32_t window_of(const pass *p, uint32_t layer) {
    uint32_t window = kvf_model_layer_window(p->m, layer), longest = 0;
    for (uint32_t i = 0; i < p->view.n_seqs; i++) longest = KVF__MAX(longest, p->view.next_pos[i]);
    return longest > window ? window : 0;
}

static void sums_of_layer(const pass *p, float *const *sums, uint32_t layer, uint32_t n_heads, float **out) {
    for (uint32_t i = 0; sums && i < p->view.n_seqs; i++)
        out[i] = sums[i] ? sums[i] + (size_t)layer * n_heads * p->f.prompt_stride : NULL;
}

/* ---- A copy of the sums ------------------------------------------------------------------------------------- */

/* Copies the sums of a layer that this pass may add to, from the accumulators or back. Returns the number of floats;
 * with kept NULL it only counts them. */
static size_t copy_sums(const pass *p, uint32_t layer, float *kept, bool back) {
    float *const *const all[] = {p->f.prompt_sums, p->f.prompt_last, p->f.prompt_squares};
    const uint32_t n_heads[] = {p->m->info.n_q_heads, p->m->info.n_q_heads, p->m->info.n_kv_heads};
    size_t n = 0;
    for (uint32_t i = p->f.n_decode; i < p->view.n_seqs; i++) {
        const uint32_t *slots = p->view.n_slots + ((size_t)i * p->view.n_layers + layer) * p->view.n_groups;
        uint32_t n_columns = 0;
        for (uint32_t g = 0; g < p->view.n_groups; g++) n_columns = KVF__MAX(n_columns, slots[g]);
        for (size_t kind = 0; kind < 3; kind++) {
            float *sums = all[kind] ? all[kind][i] : NULL;
            for (uint32_t h = 0; sums && h < n_heads[kind]; h++, n += n_columns) {
                float *row = sums + ((size_t)layer * n_heads[kind] + h) * p->f.prompt_stride;
                if (kept) memcpy(back ? row : kept + n, back ? kept + n : row, n_columns * sizeof *row);
            }
        }
    }
    return n;
}

/* Room for those of all layers, before anything has changed. */
static kvf_status keep_room(pass *p) {
    kvf_activations *a = p->a;
    size_t n = 0;
    for (uint32_t l = 0; l < p->m->info.n_layers && !p->f.sums_may_be_lost; l++) n += copy_sums(p, l, NULL, false);
    if (n <= a->kept_floats) return KVF_OK;
    float *kept = kvf__alloc(&a->allocator, n * sizeof *kept);
    if (!kept)
        return kvf__fail(p->err, KVF_E_NO_MEMORY,
                         "forward: %zu bytes for a copy of the prompts' sums could not be allocated", n * sizeof *kept);
    kvf__free(&a->allocator, a->kept, a->kept_floats * sizeof *kept);
    a->kept = kept;
    a->kept_floats = n;
    return KVF_OK;
}

/* Out before the attention of layer n_layers_kept; back: those of all layers that were. */
static void keep_sums(pass *p, bool back) {
    if (p->f.sums_may_be_lost || !p->a->kept) return;
    float *kept = p->a->kept;
    for (uint32_t l = 0; l < p->n_layers_kept; l++) kept += copy_sums(p, l, back ? kept : NULL, back);
    if (!back) (void)copy_sums(p, p->n_layers_kept++, kept, false);
}

static kvf_status attend(pass *p, uint32_t layer) {
    const kvf_forward *f = &p->f;
    kvf_attention *c = &p->attention;
    sums_of_layer(p, f->prompt_sums, layer, p->m->info.n_q_heads, p->a->col_sums);
    sums_of_layer(p, f->prompt_last, layer, p->m->info.n_q_heads, p->a->last_sums);
    sums_of_layer(p, f->prompt_squares, layer, p->m->info.n_kv_heads, p->a->sq_sums);
    keep_sums(p, false);
    c->layer = layer;
    c->window = window_of(p, layer);
    c->seq_begin = 0;
    c->seq_end = p->view.n_seqs;
    kvf_status st = kvf_attention_append(p->stream, c, p->err);
    if (!st && f->n_decode) {
        c->seq_end = f->n_decode;
        st = kvf_attention_decode(p->stream, c, p->err);
    }
    if (!st && f->n_decode < p->view.n_seqs) {
        c->seq_begin = f->n_decode;
        c->seq_end = p->view.n_seqs;
        st = kvf_attention_prefill(p->stream, c, p->err);
    }
    return st || !f->after_layer ? st : f->after_layer(f->ctx, layer, &p->mass);
}

/* The rows there are, to their sequences. */
static void note_not_finite(const pass *p) {
    for (uint32_t row = 0; p->f.not_finite && row < p->n_rows; row++) {
        uint32_t *seq = &p->f.not_finite[p->a->seq_of[row]];
        *seq = KVF__MIN(*seq, p->a->bad_in[row]);
    }
}

/* After the last attention only those rows matter whose logits or target probability is wanted. Records their
 * positions afterwards. */
static void keep_wanted_rows(pass *p) {
    const kvf_activations *a = p->a;
    uint32_t n = 0, n_out = 0;
    note_not_finite(p);
    for (uint32_t row = 0; row < p->n_rows; row++) {
        bool out = n_out < p->f.n_out && p->f.out_rows[n_out] == row;
        bool target = p->f.targets && p->f.targets[row] != KVF_NO_TOKEN;
        if (out) a->out_at[n_out++] = n;
        if (target) a->target_row[p->n_targets] = row, a->target_at[p->n_targets++] = n;
        if (!out && !target) continue;
        if (row != n) {
            memcpy(x_row(p, n), x_row(p, row), p->m->info.n_embd * sizeof(float));
            memcpy(a->attention + (size_t)n * p->q, a->attention + (size_t)row * p->q, p->q * sizeof(float));
            a->seq_of[n] = a->seq_of[row];
            a->bad_in[n] = a->bad_in[row];
        }
        n++;
    }
    p->n_rows = n;
}

static kvf_status run_layer(pass *p, uint32_t layer) {
    const kvf_model_info *info = &p->m->info;
    const kvf_activations *a = p->a;
    const kvf__layer_weights *w = &p->m->weights->layers[layer];
    uint32_t n_embd = info->n_embd, n_ff = info->n_ff, qkv = p->q + 2 * p->kv;
    p->checked = layer ? layer - 1 : 0; /* the embedding counts as the first one's */
    normalise(p, w->attn_norm);
    p->checked = layer;
    kvf_status st = multiply(p, a->norm, n_embd, &w->qkv, a->qkv, qkv, false);
    if (st) return st;
    p->qkv_bias = w->qkv_bias;
    each_row(p, bias_and_rope_row);
    st = attend(p, layer);
    if (st) return st;
    if (layer + 1 == info->n_layers) keep_wanted_rows(p);
    if (p->n_rows == 0) return KVF_OK;
    st = multiply(p, a->attention, p->q, &w->attn_output, a->x, n_embd, true);
    if (st) return st;
    normalise(p, w->ffn_norm);
    st = multiply(p, a->norm, n_embd, &w->gate_up, a->gate_up, 2 * (size_t)n_ff, false);
    if (st) return st;
    each_row(p, swiglu_row);
    return multiply(p, a->gate_up, 2 * (size_t)n_ff, &w->ffn_down, a->x, n_embd, true);
}

static void check_logits(void *ctx, uint32_t i, uint32_t thread) {
    const pass *p = ctx;
    (void)thread;
    const float *logits = p->f.logits + (size_t)i * p->m->info.n_vocab;
    uint32_t row = p->a->out_at[i];
    if (p->a->bad_in[row] == KVF_FINITE && any_not_finite(logits, p->m->info.n_vocab, false))
        p->a->bad_in[row] = p->m->info.n_layers;
}

/* Logits of n rows of the final norm, which come to stand in place of the residual stream: nobody reads that any more. */
static kvf_status head(pass *p, const uint32_t *at, uint32_t n, float *logits) {
    uint32_t n_embd = p->m->info.n_embd;
    for (uint32_t i = 0; i < n; i++) memcpy(x_row(p, i), p->a->norm + (size_t)at[i] * n_embd, n_embd * sizeof(float));
    p->n_rows = n;
    return n ? multiply(p, p->a->x, n_embd, &p->m->weights->output, logits, p->m->info.n_vocab, false) : KVF_OK;
}

static void target_logprob(void *ctx, uint32_t i, uint32_t thread) {
    const pass *p = ctx;
    uint32_t row = p->a->target_row[p->target_begin + i], n_vocab = p->m->info.n_vocab;
    (void)thread;
    const float *logits = p->a->target_logits + (size_t)i * n_vocab;
    uint32_t *bad_in = &p->a->bad_in[p->a->target_at[p->target_begin + i]];
    p->f.logprobs[row] = kvf__token_logprob(logits, n_vocab, p->f.targets[row]);
    if (p->f.not_finite && *bad_in == KVF_FINITE && any_not_finite(logits, n_vocab, false))
        *bad_in = p->m->info.n_layers;
}

/* Some rows at a time: the logits of all would take rows x vocabulary. */
static kvf_status target_logprobs(pass *p) {
    for (uint32_t n; p->target_begin < p->n_targets; p->target_begin += n) {
        n = KVF__MIN(p->n_targets - p->target_begin, (uint32_t)TARGET_ROWS);
        kvf_status st = head(p, p->a->target_at + p->target_begin, n, p->a->target_logits);
        if (st) return st;
        kvf__stream_for(p->stream, n, target_logprob, p);
    }
    return KVF_OK;
}

/* From the last layer's rows to logits and probabilities. */
static kvf_status run_head(pass *p) {
    uint32_t n_rows = p->n_rows;
    p->checked = p->m->info.n_layers - 1;
    normalise(p, p->m->weights->output_norm);
    kvf_status st = head(p, p->a->out_at, p->f.n_out, p->f.logits);
    if (!st && p->f.not_finite) kvf__stream_for(p->stream, p->f.n_out, check_logits, p);
    if (!st) st = target_logprobs(p);
    p->n_rows = n_rows;
    if (!st) note_not_finite(p);
    return st;
}

kvf_status kvf_model_forward(const kvf_model *model, kvf_activations *activations, kvf_stream *stream,
                             const kvf_forward *forward, kvf_error *err) {
    if (!model || !activations)
        return kvf__fail(err, KVF_E_INVALID, "kvf_model_forward: %s is NULL", model ? "activations" : "model");
    pass p = {.m = model, .a = activations, .stream = stream, .err = err};
    kvf_status st = begin(&p, forward);
    if (!st) st = keep_room(&p);
    if (st) return st;
    prepare(&p);
    if (p.n_rows == 0) return KVF_OK;
    each_row(&p, embed_row);
    for (uint32_t layer = 0; layer < model->info.n_layers && !st; layer++) st = run_layer(&p, layer);
    if (!st && p.n_rows) st = run_head(&p);
    if (st) keep_sums(&p, true);
    return st;
}
