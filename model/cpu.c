/* The operations of a forward pass on the CPU: rows in parallel, products by gemm.c, attention of the library. */
#include <math.h>

#include "base/page_index.h"
#include "model/forward.h"
#include "model/gemm.h"

enum { ROWS_AN_ITEM = 8 };

/* ---- Rows in parallel ------------------------------------------------------------------------------- */

static void run_rows(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__pass *p = ctx;
    (void)thread;
    uint32_t begin = item * ROWS_AN_ITEM, end = KVF__MIN(begin + ROWS_AN_ITEM, p->n_rows);
    for (uint32_t row = begin; row < end; row++) p->row_fn(p, row);
}

static void each_row(kvf__pass *p, void (*fn)(const kvf__pass *p, uint32_t row)) {
    p->row_fn = fn;
    kvf__stream_for(p->stream, kvf__ceil_div(p->n_rows, ROWS_AN_ITEM), run_rows, p);
}

static float *x_row(const kvf__pass *p, uint32_t row) { return p->a->x + (size_t)row * p->m->info.n_embd; }

static void embed_row(const kvf__pass *p, uint32_t row) {
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

static void norm_row(const kvf__pass *p, uint32_t row) {
    const kvf_model_info *info = &p->m->info;
    if (p->f.not_finite && p->a->bad_in[row] == KVF_FINITE && any_not_finite(x_row(p, row), info->n_embd, true))
        p->a->bad_in[row] = p->checked;
    p->row_ops->rms_norm(x_row(p, row), p->norm_weight, info->n_embd, info->norm_epsilon,
                         p->a->norm + (size_t)row * info->n_embd);
}

/* Q and K stand side by side, so all their heads in one go. */
static void bias_and_rope_row(const kvf__pass *p, uint32_t row) {
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

/* The scores of a token's KV heads at the layer at hand. Always the same bits, whatever else is in the batch. */
static void probe_row(const kvf__pass *p, uint32_t row) {
    const kvf_probe_data *d = &p->probe;
    const kvf_pages *pages = p->f.pages;
    const kvf_view *v = &p->view;
    uint32_t seq = p->a->seq_of[row], layer = p->attention.layer;
    float scores[KVF__GEMV_ROWS];
    for (uint32_t head = 0, n; head < d->n_kv_heads; head += n) {
        size_t first = (size_t)layer * d->n_kv_heads + head;
        n = KVF__MIN(d->n_kv_heads - head, (uint32_t)KVF__GEMV_ROWS);
        kvf__dots dots = {.w = d->weight + first * d->n_embd,
                          .x = p->a->norm + (size_t)row * d->n_embd,
                          .y = scores,
                          .w_stride = d->n_embd,
                          .x_stride = d->n_embd,
                          .y_stride = n,
                          .n_w = n,
                          .m = 1,
                          .n = d->n_embd};
        p->gemv_ops->dots(&dots);
        for (uint32_t i = 0; i < n; i++) {
            uint64_t table = kvf__view_table(v, seq, layer, (head + i) / v->heads_per_group);
            uint32_t slot = v->n_slots[table] - (p->f.q_begin[seq + 1] - row);
            uint32_t block = v->rows[v->row_offset[table] + slot / pages->block_size];
            pages->score[kvf__meta_at(pages, block, (head + i) % v->heads_per_group, slot % pages->block_size)] =
                scores[i] + d->bias[first + i];
        }
    }
}

static void swiglu_row(const kvf__pass *p, uint32_t row) {
    uint32_t n_ff = p->m->info.n_ff;
    float *gate = p->a->gate_up + (size_t)row * n_ff * 2;
    p->row_ops->swiglu(gate, gate + n_ff, n_ff);
}

static kvf_status embed(kvf__pass *p) {
    each_row(p, embed_row);
    return KVF_OK;
}

static kvf_status rms_norm(kvf__pass *p, const float *weight) {
    p->norm_weight = weight;
    each_row(p, norm_row);
    return KVF_OK;
}

static kvf_status rope(kvf__pass *p, const float *bias) {
    p->qkv_bias = bias;
    each_row(p, bias_and_rope_row);
    return KVF_OK;
}

static kvf_status probe(kvf__pass *p, uint32_t layer) {
    (void)layer; /* the attention's */
    each_row(p, probe_row);
    return KVF_OK;
}

static kvf_status swiglu(kvf__pass *p) {
    each_row(p, swiglu_row);
    return KVF_OK;
}

static kvf_status product(kvf__pass *p, const kvf__product *of) {
    kvf__gemm g = {.m = p->n_rows,
                   .w = of->w,
                   .x = of->x,
                   .y = of->y,
                   .x_stride = of->x_stride,
                   .y_stride = of->y_stride,
                   .accumulate = of->accumulate,
                   .deterministic = p->f.deterministic != 0,
                   .ops = p->gemv_ops,
                   .fast = p->fast_ops,
                   .quantised = p->a->quantised,
                   .scratch = p->a->scratch,
                   .scratch_floats = p->m->weights->scratch_floats};
    kvf_status st = kvf__gemm_run(p->stream, &g);
    return st ? kvf__fail(p->err, st, "forward: a product of %u rows, %u by %u, found no memory in oneDNN", p->n_rows,
                          of->w->n, of->w->k)
              : KVF_OK;
}

/* ---- A copy of the sums ------------------------------------------------------------------------------------- */

/* Copies the sums of a layer that this pass may add to, from the accumulators or back. Returns the number of floats;
 * with kept NULL it only counts them. */
static size_t copy_sums(const kvf__pass *p, uint32_t layer, float *kept, bool back) {
    float *const *const all[] = {p->f.prompt_sums, p->f.prompt_last, p->f.prompt_squares, p->f.prompt_max};
    const uint32_t n_q = p->m->info.n_q_heads, n_heads[] = {n_q, n_q, p->m->info.n_kv_heads, n_q};
    size_t n = 0;
    for (uint32_t i = p->f.n_decode; i < p->view.n_seqs; i++) {
        const uint32_t *slots = p->view.n_slots + kvf__view_table(&p->view, i, layer, 0);
        uint32_t n_columns = 0;
        for (uint32_t g = 0; g < p->view.n_groups; g++) n_columns = KVF__MAX(n_columns, slots[g]);
        for (size_t kind = 0; kind < 4; kind++) {
            float *sums = all[kind] ? all[kind][i] : NULL;
            if (sums && kind == 3) n_columns -= KVF__MIN(n_columns, p->view.next_pos[i] - p->f.max_end[i]);
            for (uint32_t h = 0; sums && h < n_heads[kind]; h++, n += n_columns) {
                float *row = sums + ((size_t)layer * n_heads[kind] + h) * p->f.prompt_stride;
                if (kept) memcpy(back ? row : kept + n, back ? kept + n : row, n_columns * sizeof *row);
            }
        }
    }
    return n;
}

/* Room for those of all layers, before anything has changed. */
static kvf_status keep_room(kvf__pass *p) {
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
static void keep_sums(kvf__pass *p, bool back) {
    if (p->f.sums_may_be_lost || !p->a->kept) return;
    float *kept = p->a->kept;
    for (uint32_t l = 0; l < p->n_layers_kept; l++) kept += copy_sums(p, l, back ? kept : NULL, back);
    if (!back) (void)copy_sums(p, p->n_layers_kept++, kept, false);
}

/* ---- Attention ------------------------------------------------------------------------------------------ */

/* While every sequence is shorter than the window, windowed attention equals full attention, also over tables from
 * which a policy has evicted. */
static uint32_t window_of(const kvf__pass *p, uint32_t layer) {
    uint32_t window = kvf_model_layer_window(p->m, layer), longest = 0;
    for (uint32_t i = 0; i < p->view.n_seqs; i++) longest = KVF__MAX(longest, p->view.next_pos[i]);
    return longest > window ? window : 0;
}

static void sums_of_layer(const kvf__pass *p, float *const *sums, uint32_t layer, uint32_t n_heads, float **out) {
    for (uint32_t i = 0; sums && i < p->view.n_seqs; i++)
        out[i] = sums[i] ? sums[i] + (size_t)layer * n_heads * p->f.prompt_stride : NULL;
}

static void query_scale_row(const kvf__pass *p, uint32_t row) {
    double square = 0;
    if (!p->f.max_by_residual[p->a->seq_of[row]]) {
        p->a->query_scale[row] = 1;
        return;
    }
    for (uint32_t i = 0; i < p->m->info.n_embd; i++) square += (double)x_row(p, row)[i] * (double)x_row(p, row)[i];
    p->a->query_scale[row] = square > 0 ? (float)(1 / sqrt(square)) : 0.0f;
}

static kvf_status attention(kvf__pass *p, uint32_t layer) {
    const kvf_forward *f = &p->f;
    kvf_attention *c = &p->attention;
    if (p->mass.query_scale) each_row(p, query_scale_row);
    sums_of_layer(p, f->prompt_max, layer, p->m->info.n_q_heads, p->a->max_prob);
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

/* ---- Results -------------------------------------------------------------------------------------------- */

static kvf_status note_not_finite(kvf__pass *p) {
    for (uint32_t row = 0; p->f.not_finite && row < p->n_rows; row++) {
        uint32_t *seq = &p->f.not_finite[p->a->seq_of[row]];
        *seq = KVF__MIN(*seq, p->a->bad_in[row]);
    }
    return KVF_OK;
}

static kvf_status keep_rows(kvf__pass *p, const uint32_t *wanted, uint32_t n) {
    const kvf_activations *a = p->a;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t row = wanted[i];
        if (row == i) continue;
        memcpy(x_row(p, i), x_row(p, row), p->m->info.n_embd * sizeof(float));
        memcpy(a->attention + (size_t)i * p->q, a->attention + (size_t)row * p->q, p->q * sizeof(float));
        a->seq_of[i] = a->seq_of[row];
        a->bad_in[i] = a->bad_in[row];
    }
    p->n_rows = n;
    return KVF_OK;
}

static kvf_status gather(kvf__pass *p, const uint32_t *at, uint32_t n) {
    size_t n_embd = p->m->info.n_embd;
    for (uint32_t i = 0; i < n; i++) memcpy(x_row(p, i), p->a->norm + at[i] * n_embd, n_embd * sizeof(float));
    return KVF_OK;
}

static void check_one(void *ctx, uint32_t i, uint32_t thread) {
    const kvf__pass *p = ctx;
    (void)thread;
    size_t n_vocab = p->m->info.n_vocab;
    uint32_t *bad_in = &p->a->bad_in[p->at[i]];
    if (*bad_in == KVF_FINITE && any_not_finite(p->logits + i * n_vocab, n_vocab, false)) *bad_in = p->m->info.n_layers;
}

static kvf_status check_logits(kvf__pass *p, const float *logits, const uint32_t *at, uint32_t n) {
    p->logits = logits;
    p->at = at;
    if (p->f.not_finite) kvf__stream_for(p->stream, n, check_one, p);
    return KVF_OK;
}

static void logprob_one(void *ctx, uint32_t i, uint32_t thread) {
    const kvf__pass *p = ctx;
    (void)thread;
    uint32_t row = p->at[i], n_vocab = p->m->info.n_vocab;
    p->f.logprobs[row] = kvf__token_logprob(p->logits + (size_t)i * n_vocab, n_vocab, p->f.targets[row]);
}

static kvf_status logprobs(kvf__pass *p, const float *logits, const uint32_t *rows, uint32_t n) {
    p->logits = logits;
    p->at = rows;
    kvf__stream_for(p->stream, n, logprob_one, p);
    return KVF_OK;
}

static void undo(kvf__pass *p) { keep_sums(p, true); }

kvf_status kvf__cpu_begin(kvf__pass *p) {
    static const kvf__forward_ops cpu_ops = {embed,    rms_norm,        product,   rope,   attention,
                                             probe,    swiglu,          keep_rows, gather, check_logits,
                                             logprobs, note_not_finite, undo};
    const kvf_forward *f = &p->f;
    const kvf_activations *a = p->a;
    const kvf_model_info *info = &p->m->info;
    kvf__cpu cpu = f->path == KVF_CPU_REF || f->path == KVF_CPU_SCALAR ? (kvf__cpu){0} : a->cpu;
    kvf_status st = keep_room(p);
    if (st) return st;
    p->ops = &cpu_ops;
    p->row_ops = kvf__ops_for(cpu.avx2_fma_f16c);
    p->gemv_ops = kvf__gemv_ops_for(cpu);
    p->fast_ops = f->fast_activations ? kvf__fast_ops_for(cpu) : NULL;
    for (uint32_t row = 0; row < p->n_rows; row++) a->bad_in[row] = KVF_FINITE;
    for (uint32_t i = 0; f->not_finite && i < p->view.n_seqs; i++) f->not_finite[i] = KVF_FINITE;
    p->mass = (kvf_mass){.struct_size = sizeof p->mass,
                         .col_sums = f->prompt_sums ? a->col_sums : NULL,
                         .last_sums = f->prompt_last ? a->last_sums : NULL,
                         .last_begin = f->last_begin,
                         .sq_sums = f->prompt_squares ? a->sq_sums : NULL,
                         .max_prob = f->prompt_max ? a->max_prob : NULL,
                         .max_begin = f->max_begin,
                         .max_end = f->max_end,
                         .query_scale = f->prompt_max && f->max_by_residual ? a->query_scale : NULL,
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
    return KVF_OK;
}
