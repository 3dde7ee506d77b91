/* The forward pass of a Llama decoder over paged K and V, for a mixed batch of decode and prefill rows: its buffers, the
 * checks, and the order of its operations (forward.h). */
#include "model/forward.h"

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
    float ***sums[] = {&a->col_sums, &a->last_sums, &a->sq_sums, &a->max_prob};
    for (size_t i = 0; i < 4; i++) *sums[i] = kvf__slab_take(s, a->max_seqs, sizeof **sums[i]);
    uint32_t **rows[] = {&a->wanted, &a->out_at, &a->target_row, &a->target_at, &a->seq_of, &a->bad_in};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = kvf__slab_take(s, n, sizeof **rows[i]);
    a->target_logits = kvf__slab_take(s, KVF__MIN(n, (size_t)KVF__TARGET_ROWS), info->n_vocab * f);
    a->query_scale = kvf__slab_take(s, n, f);
    a->gram = kvf__slab_take(s, q, d * f);
    a->gram_panel = kvf__slab_take(s, q, KVF__GRAM_ROWS * f);
    a->gram_values = kvf__slab_take(s, a->n_threads, 2 * KVF__GRAM_SLOTS * d * f);
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
        return kvf__fail_field(err, KVF_E_INVALID, "max_tokens", max_tokens, 0, "must be in [1, %u]", 1u << 24);
    if (!max_seqs || !max_slots)
        return kvf__fail(err, KVF_E_INVALID, "%s 0: must be at least 1", max_seqs ? "max_slots" : "max_seqs");
    if (!n_threads || n_threads > 1024)
        return kvf__fail_field(err, KVF_E_INVALID, "n_threads", n_threads, 0, "must be in [1, 1024], the stream's");
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

/* ---- Checks ------------------------------------------------------------------------------------------ */

static kvf_status check_shapes(const kvf__pass *p) {
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

/* The probe of the model, and a place for its scores. */
static kvf_status check_probe(kvf__pass *p) {
    const kvf_model_info *info = &p->m->info;
    kvf_probe_data *d = &p->probe;
    d->struct_size = sizeof *d;
    if (!p->f.probe) return KVF_OK;
    kvf_status st = kvf_probe_get(p->f.probe, d);
    if (st) return kvf__fail(p->err, st, "forward: the probe cannot be read");
    if (!p->f.pages->score)
        return kvf__fail(p->err, KVF_E_INVALID, "forward: a probe without pages.score, where its scores go");
    if (d->n_layers != info->n_layers || d->n_kv_heads != info->n_kv_heads || d->n_embd != info->n_embd)
        return kvf__fail(p->err, KVF_E_INVALID,
                         "forward: a probe of %u layers of %u KV heads, %u wide: the model has %u, %u, %u", d->n_layers,
                         d->n_kv_heads, d->n_embd, info->n_layers, info->n_kv_heads, info->n_embd);
    return KVF_OK;
}

/* Rows, ids and positions; sets n_rows. */
static kvf_status check_rows(kvf__pass *p) {
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

static kvf_status begin(kvf__pass *p, const kvf_forward *forward) {
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
                          : f->prompt_max && !f->max_begin           ? "max_begin"
                          : f->prompt_max && !f->max_end             ? "max_end"
                                                                     : NULL;
    if (missing) return kvf__fail(p->err, KVF_E_INVALID, "kvf_forward: %s is NULL", missing);
    st = check_shapes(p);
    if (!st) st = check_rows(p);
    if (!st) st = check_probe(p);
    if (st) return st;
    p->q = p->m->info.n_q_heads * p->m->info.head_dim;
    p->kv = p->m->info.n_kv_heads * p->m->info.head_dim;
    for (uint32_t i = 0; i < p->view.n_seqs; i++)
        for (uint32_t row = f->q_begin[i]; row < f->q_begin[i + 1]; row++) {
            p->a->position[row] = p->view.next_pos[i] - (f->q_begin[i + 1] - row);
            p->a->seq_of[row] = i;
        }
    return KVF_OK;
}

/* ---- The order ----------------------------------------------------------------------------------------- */

/* After the last attention only those rows matter whose logits or target probability is wanted. Records their
 * positions afterwards. */
static kvf_status keep_wanted_rows(kvf__pass *p) {
    const kvf_activations *a = p->a;
    uint32_t n = 0, n_out = 0;
    for (uint32_t row = 0; row < p->n_rows; row++) {
        bool out = n_out < p->f.n_out && p->f.out_rows[n_out] == row;
        bool target = p->f.targets && p->f.targets[row] != KVF_NO_TOKEN;
        if (out) a->out_at[n_out++] = n;
        if (target) a->target_row[p->n_targets] = row, a->target_at[p->n_targets++] = n;
        if (out || target) a->wanted[n++] = row;
    }
    kvf_status st = p->ops->note_not_finite(p);
    return st ? st : p->ops->keep_rows(p, a->wanted, n);
}

static kvf_status run_layer(kvf__pass *p, uint32_t layer) {
    const kvf_model_info *info = &p->m->info;
    const kvf_activations *a = p->a;
    const kvf__forward_ops *ops = p->ops;
    const kvf__layer_weights *w = &p->m->weights->layers[layer];
    size_t n_embd = info->n_embd, n_ff = info->n_ff, qkv = p->q + 2 * (size_t)p->kv;
    kvf_status st;
    p->checked = layer ? layer - 1 : 0; /* the embedding counts as the first one's */
    if ((st = ops->rms_norm(p, w->attn_norm))) return st;
    p->checked = layer;
    if ((st = ops->product(p, &(kvf__product){&w->qkv, a->norm, a->qkv, n_embd, qkv, false}))) return st;
    if ((st = ops->rope(p, w->qkv_bias)) || (st = ops->attention(p, layer))) return st;
    if (p->f.probe && (st = ops->probe(p, layer))) return st;
    if (p->f.hidden && (st = p->f.hidden(p->f.ctx, layer, a->norm))) return st;
    if (layer + 1 == info->n_layers && (st = keep_wanted_rows(p))) return st;
    if (p->n_rows == 0) return KVF_OK;
    if ((st = ops->product(p, &(kvf__product){&w->attn_output, a->attention, a->x, p->q, n_embd, true}))) return st;
    if ((st = ops->rms_norm(p, w->ffn_norm))) return st;
    if ((st = ops->product(p, &(kvf__product){&w->gate_up, a->norm, a->gate_up, n_embd, 2 * n_ff, false}))) return st;
    if ((st = ops->swiglu(p))) return st;
    return ops->product(p, &(kvf__product){&w->ffn_down, a->gate_up, a->x, 2 * n_ff, n_embd, true});
}

/* Logits of n rows of the final norm. They come to stand in place of the residual stream: nobody reads that any more. */
static kvf_status head(kvf__pass *p, const uint32_t *at, uint32_t n, float *logits) {
    const kvf_model_info *info = &p->m->info;
    if (!n) return KVF_OK;
    kvf_status st = p->ops->gather(p, at, n);
    if (st) return st;
    p->n_rows = n;
    return p->ops->product(
        p, &(kvf__product){&p->m->weights->output, p->a->x, logits, info->n_embd, info->n_vocab, false});
}

/* From the last layer's rows to logits and probabilities. Some targets at a time: the logits of all would take rows x
 * vocabulary. */
static kvf_status run_head(kvf__pass *p) {
    const kvf_activations *a = p->a;
    uint32_t n_rows = p->n_rows;
    p->checked = p->m->info.n_layers - 1;
    kvf_status st = p->ops->rms_norm(p, p->m->weights->output_norm);
    if (!st) st = head(p, a->out_at, p->f.n_out, p->f.logits);
    if (!st) st = p->ops->check_logits(p, p->f.logits, a->out_at, p->f.n_out);
    for (uint32_t i = 0, n; i < p->n_targets && !st; i += n) {
        n = KVF__MIN(p->n_targets - i, (uint32_t)KVF__TARGET_ROWS);
        st = head(p, a->target_at + i, n, a->target_logits);
        if (!st) st = p->ops->logprobs(p, a->target_logits, a->target_row + i, n);
        if (!st) st = p->ops->check_logits(p, a->target_logits, a->target_at + i, n);
    }
    p->n_rows = n_rows;
    return st ? st : p->ops->note_not_finite(p);
}

kvf_status kvf_model_forward(const kvf_model *model, kvf_activations *activations, kvf_stream *stream,
                             const kvf_forward *forward, kvf_error *err) {
    if (!model || !activations)
        return kvf__fail(err, KVF_E_INVALID, "kvf_model_forward: %s is NULL", model ? "activations" : "model");
    kvf__pass p = {.m = model, .a = activations, .stream = stream, .err = err};
    kvf_status st = begin(&p, forward);
    if (!st) st = kvf__cpu_begin(&p);
    if (st || p.n_rows == 0) return st;
    st = p.ops->embed(&p);
    for (uint32_t layer = 0; layer < model->info.n_layers && !st; layer++) st = run_layer(&p, layer);
    if (!st && p.n_rows) st = run_head(&p);
    if (st) p.ops->undo(&p);
    return st;
}
