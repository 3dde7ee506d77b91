/* own_runner.c: a model of one's own under the engine. The runner is a table of functions: here a toy of two layers of attention
 * over random embeddings, in plain loops. The engine does the rest: batches, blocks, compression, sampling. */
#include <kvfold/engine.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HEADS = 2, DIM = 16, WIDTH = HEADS * DIM, VOCAB = 64, CONTEXT = 256 };

typedef struct toy {
    kvf_stream *stream;
    float embedding[VOCAB][WIDTH];
    kvf_runner_buffers buffers;
    float *memory;        /* all of it, one after another */
    float *x, *qkv, *out; /* of a step's tokens: WIDTH, 3 * WIDTH, WIDTH floats each */
    void *workspace;
    size_t workspace_bytes;
} toy;

static kvf_status begin(void *ctx, const kvf_runner_limits *limits, kvf_runner_buffers *buffers, kvf_error *err) {
    toy *t = ctx;
    size_t rows = LAYERS * HEADS, prompts = rows * limits->max_prompt_tokens, n = limits->max_tokens;
    size_t row = (size_t)limits->max_seqs * HEADS * limits->max_slots, logits = (size_t)limits->max_seqs * VOCAB;
    t->stream = limits->stream;
    kvf_status st = kvf_attention_workspace_bytes(kvf_stream_n_threads(t->stream), DIM, HEADS, HEADS, limits->max_slots,
                                                  limits->max_seqs, limits->max_tokens, &t->workspace_bytes);
    if (st) return st;
    t->workspace_bytes = (t->workspace_bytes + 63) / 64 * 64;
    t->workspace = aligned_alloc(64, t->workspace_bytes);
    t->memory = calloc(3 * prompts + limits->max_prompt_tokens + row + logits + n * 5 * WIDTH, sizeof(float));
    (void)err;
    if (!t->workspace || !t->memory) return KVF_E_NO_MEMORY;
    float *at = t->memory;
    kvf_runner_buffers *b = &t->buffers;
    b->sums = at, b->last_sums = b->sums + prompts, b->squares = b->last_sums + prompts;
    b->prompt_logprobs = b->squares + prompts, b->row = b->prompt_logprobs + limits->max_prompt_tokens;
    b->logits = b->row + row;
    t->x = b->logits + logits, t->qkv = t->x + n * WIDTH, t->out = t->qkv + n * 3 * WIDTH;
    b->struct_size = buffers->struct_size;
    memcpy(buffers, b, b->struct_size < sizeof *b ? b->struct_size : sizeof *b);
    return KVF_OK;
}

/* One layer: queries, keys and values are the residual stream, shifted; then attention over the pages. */
static kvf_status run_layer(toy *t, const kvf_forward *f, uint32_t layer, uint32_t n, kvf_error *err) {
    uint32_t n_seqs = f->view->n_seqs;
    float *sums[64] = {0}; /* of the layer; max_running is at most 64 here */
    kvf_mass mass = {
        .struct_size = sizeof mass, .col_stride = f->prompt_stride, .row = f->row, .row_stride = f->row_stride};
    mass.row_wanted = f->row_wanted, mass.row_gqa = f->row_gqa, mass.col_sums = f->prompt_sums ? sums : NULL;
    for (uint32_t i = 0; i < n_seqs && f->prompt_sums; i++)
        sums[i] = f->prompt_sums[i] ? f->prompt_sums[i] + layer * HEADS * f->prompt_stride : NULL;
    for (uint32_t i = 0; i < n * 3 * WIDTH; i++) {
        uint32_t token = i / (3 * WIDTH), part = i / WIDTH % 3, e = i % WIDTH;
        t->qkv[i] = 4 * t->x[token * WIDTH + (e + part * 5 + layer * 3) % WIDTH];
    }
    kvf_attention a = {.struct_size = sizeof a, .view = f->view, .pages = f->pages, .layer = layer, .seq_end = n_seqs};
    a.n_q_heads = HEADS, a.q_begin = f->q_begin, a.q = t->qkv, a.k = t->qkv + WIDTH, a.v = t->qkv + 2 * WIDTH;
    a.q_stride = a.kv_stride = 3 * WIDTH, a.out = t->out, a.out_stride = WIDTH, a.mass = &mass;
    a.workspace = t->workspace, a.workspace_bytes = t->workspace_bytes;
    kvf_status st = kvf_attention_append(t->stream, &a, err);
    a.seq_end = f->n_decode;
    if (!st && f->n_decode) st = kvf_attention_decode(t->stream, &a, err);
    a.seq_begin = f->n_decode, a.seq_end = n_seqs;
    if (!st && f->n_decode < n_seqs) st = kvf_attention_prefill(t->stream, &a, err);
    for (uint32_t i = 0; i < n * WIDTH && !st; i++) t->x[i] += t->out[i];
    return st || !f->after_layer ? st : f->after_layer(f->ctx, layer, &mass); /* the policies observe */
}

static kvf_status run(void *ctx, const kvf_forward *f, kvf_error *err) {
    toy *t = ctx;
    uint32_t n = f->q_begin[f->view->n_seqs];
    for (uint32_t i = 0; i < n; i++) memcpy(t->x + i * WIDTH, t->embedding[f->tokens[i]], sizeof *t->embedding);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        kvf_status st = run_layer(t, f, layer, n, err);
        if (st) return st;
    }
    for (uint32_t i = 0; i < f->n_out * VOCAB; i++) {
        f->logits[i] = 0;
        for (uint32_t e = 0; e < WIDTH; e++)
            f->logits[i] += t->x[f->out_rows[i / VOCAB] * WIDTH + e] * t->embedding[i % VOCAB][e];
    }
    for (uint32_t i = 0; i < f->view->n_seqs && f->not_finite; i++) f->not_finite[i] = KVF_FINITE;
    return KVF_OK;
}

static kvf_status clear(void *ctx, float *columns, uint32_t n_rows, size_t stride, uint32_t n, kvf_error *err) {
    (void)ctx, (void)err;
    for (uint32_t row = 0; row < n_rows; row++) memset(columns + row * stride, 0, n * sizeof *columns);
    return KVF_OK;
}

static kvf_status snapshot(void *ctx, float *columns, uint32_t n_rows, const uint32_t *ids, uint32_t n, int to_pages,
                           kvf_error *err) {
    (void)ctx, (void)columns, (void)n_rows, (void)ids, (void)n, (void)to_pages, (void)err;
    return KVF_E_UNSUPPORTED; /* for a prefix cache, which this engine has not */
}

static kvf_status copy(void *ctx, void *to, const void *from, size_t bytes, kvf_error *err) {
    (void)ctx, (void)err;
    memcpy(to, from, bytes);
    return KVF_OK;
}

static void print(void *user, const kvf_result *r) {
    printf("%s:", (const char *)user);
    for (uint32_t i = 0; i < r->n_tokens; i++) printf(" %u", r->tokens[i]);
    printf("; %.0f%% of the cache held\n", 100.0 * (double)r->held_tokens / (double)r->full_tokens);
}

int main(void) {
    static toy t;
    for (int i = 0; i < VOCAB; i++)
        for (int e = 0; e < WIDTH; e++) t.embedding[i][e] = (float)(rand() % 2001 - 1000) / 4000;
    const kvf_runner runner = {.struct_size = sizeof runner,
                               .name = "toy",
                               .ctx = &t,
                               .shape = {LAYERS, HEADS, HEADS, DIM, VOCAB, CONTEXT, 0, 0, NULL},
                               .device = kvf_device_cpu(),
                               .observes = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
                               .begin = begin,
                               .run = run,
                               .clear = clear,
                               .snapshot = snapshot,
                               .read = copy,
                               .write = copy};
    kvf_engine_config config;
    kvf_engine_config_init(&config, sizeof config);
    config.runner = &runner, config.kv_bytes = 1 << 20, config.n_threads = 1;
    kvf_engine *engine = NULL;
    uint32_t prompt[120];
    kvf_error err = {.text = ""};
    kvf_status st = kvf_engine_create(&config, &engine, &err);
    for (uint32_t i = 0; i < 120; i++) prompt[i] = i * i % VOCAB;
    char names[2][8] = {"full", "d2o"};
    for (int i = 0; i < 2 && !st; i++) {
        kvf_policy_options o;
        kvf_request id;
        st = kvf_policy_options_init(&o, sizeof o, names[i], NULL, &err);
        if (!st && i) st = kvf_policy_option_set(&o, "budget_tokens", "64", &err);
        kvf_generate g = {.struct_size = sizeof g, .tokens = prompt, .n_tokens = 120, .max_tokens = 12, .policy = &o};
        g.user = names[i], g.on_finish = print, g.sampling.temperature = 0.5f;
        if (!st) st = kvf_engine_submit(engine, &g, &id, &err);
    }
    for (int more = 1; more && !st;) st = kvf_engine_step(engine, &more, &err);
    if (st) fprintf(stderr, "own_runner: %s: %s\n", kvf_status_text(st), err.text);
    kvf_engine_destroy(engine);
    free(t.memory), free(t.workspace);
    return st != KVF_OK;
}
