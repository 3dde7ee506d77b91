/* The CPU's runner, and the null runner (kvfold/runner.h). */
#include "kvfold/runner.h"

#include "model/model.h"

void kvf_runner_destroy(kvf_runner *runner) {
    kvf_runner r;
    if (kvf__config_read(&r, sizeof r, runner, "kvf_runner", NULL)) return;
    if (r.destroy) r.destroy(r.ctx);
    kvf__output(runner, &(kvf_runner){0}, sizeof r);
}

/* ---- The CPU --------------------------------------------------------------------------------------------- */

enum { BUFFERS = 8 };

typedef struct cpu_runner {
    kvf_allocator allocator;
    const kvf_model *model;
    kvf_stream *stream;
    kvf_activations *activations;
    kvf_runner_limits limits;
    kvf_runner_buffers buffers;
    uint32_t *windows; /* [n_layers] or NULL */
    size_t bytes[BUFFERS];
    void *memory[BUFFERS];
} cpu_runner;

/* Not cleared: its pages are not touched, and cost nothing until they are used. */
static bool take(cpu_runner *c, int i, size_t n, size_t more, float **out) {
    if (!kvf__mul(n, more, &n) || !kvf__mul(n, sizeof(float), &n)) return false;
    void *p = c->allocator.alloc(c->allocator.ctx, n ? n : 1, KVF__CACHE_LINE);
    c->memory[i] = p;
    c->bytes[i] = n ? n : 1;
    *out = p;
    return p != NULL;
}

static void free_buffers(cpu_runner *c) {
    for (int i = 0; i < BUFFERS; i++)
        if (c->memory[i]) c->allocator.free(c->allocator.ctx, c->memory[i], c->bytes[i]);
    memset(c->memory, 0, sizeof c->memory);
    kvf_activations_destroy(c->activations);
    c->activations = NULL;
}

static kvf_status cpu_begin(void *ctx, const kvf_runner_limits *limits, kvf_runner_buffers *buffers, kvf_error *err) {
    cpu_runner *c = ctx;
    kvf_runner_limits l;
    kvf_status st = kvf__config_read(&l, sizeof l, limits, "kvf_runner_limits", err);
    if (st) return st;
    const kvf_model_info *m = &c->model->info;
    size_t q_rows = (size_t)m->n_layers * m->n_q_heads, kv_rows = (size_t)m->n_layers * m->n_kv_heads;
    kvf_runner_buffers b = {0};
    free_buffers(c);
    c->limits = l;
    c->stream = l.stream;
    bool ok = take(c, 0, q_rows, l.max_prompt_tokens, &b.sums) &&
              take(c, 1, q_rows, l.max_prompt_tokens, &b.last_sums) &&
              take(c, 2, kv_rows, l.max_prompt_tokens, &b.squares) &&
              take(c, 3, l.max_prompt_tokens, 1, &b.prompt_logprobs) &&
              take(c, 4, (size_t)l.max_seqs * m->n_kv_heads, l.max_slots, &b.row) &&
              take(c, 5, l.max_seqs, m->n_vocab, &b.logits) && take(c, 7, q_rows, l.max_prompt_tokens, &b.prompt_max);
    if (!ok) {
        free_buffers(c);
        return kvf__fail(
            err, KVF_E_NO_MEMORY,
            "engine: buffers could not be allocated; lower max_running, max_prefill_tokens or max_context");
    }
    if (!take(c, 6, q_rows * l.block_size, l.n_snapshot_pages, &b.snapshots)) {
        free_buffers(c);
        return kvf__fail(
            err, KVF_E_NO_MEMORY,
            "prefix cache: %u pages of snapshots of %zu bytes could not be allocated; lower snapshot_bytes",
            l.n_snapshot_pages, q_rows * l.block_size * sizeof(float));
    }
    for (int i = 0; i < 3; i++)
        kvf__sparse(c->memory[i], c->bytes[i]); /* a prompt writes its columns of each layer and head */
    kvf__sparse(c->memory[7], c->bytes[7]);
    st = kvf_activations_create(c->model, l.max_tokens, l.max_seqs, l.max_slots, kvf_stream_n_threads(l.stream),
                                &c->activations, err);
    if (st) {
        free_buffers(c);
        return st;
    }
    c->buffers = b;
    kvf__output(buffers, &b, sizeof b);
    return KVF_OK;
}

static kvf_status cpu_run(void *ctx, const kvf_forward *batch, kvf_error *err) {
    cpu_runner *c = ctx;
    return kvf_model_forward(c->model, c->activations, c->stream, batch, err);
}

static kvf_status cpu_clear(void *ctx, float *columns, uint32_t n_rows, size_t stride, uint32_t n, kvf_error *err) {
    (void)ctx, (void)err;
    for (size_t row = 0; row < n_rows; row++) memset(columns + row * stride, 0, n * sizeof *columns);
    return KVF_OK;
}

typedef struct move {
    const cpu_runner *c;
    float *columns;
    const uint32_t *ids;
    uint32_t n_tokens, page_rows;
    bool to_pages;
} move;

/* The columns of one row. */
static void move_row(void *ctx, uint32_t item, uint32_t thread) {
    const move *m = ctx;
    (void)thread;
    uint32_t bs = m->c->limits.block_size;
    float *columns = m->columns + (size_t)item * m->c->limits.max_prompt_tokens;
    for (uint32_t begin = 0; begin < m->n_tokens; begin += bs) {
        float *page = m->c->buffers.snapshots + ((size_t)m->ids[begin / bs] * m->page_rows + item) * bs;
        size_t bytes = KVF__MIN(bs, m->n_tokens - begin) * sizeof(float);
        memcpy(m->to_pages ? page : columns + begin, m->to_pages ? columns + begin : page, bytes);
    }
}

static kvf_status cpu_snapshot(void *ctx, float *columns, uint32_t n_rows, const uint32_t *ids, uint32_t n_tokens,
                               int to_pages, kvf_error *err) {
    cpu_runner *c = ctx;
    (void)err;
    move m = {c, columns, ids, n_tokens, c->model->info.n_layers * c->model->info.n_q_heads, to_pages != 0};
    kvf__stream_for(c->stream, n_rows, move_row, &m);
    return KVF_OK;
}

static kvf_status cpu_copy(void *ctx, void *to, const void *from, size_t bytes, kvf_error *err) {
    (void)ctx, (void)err;
    memcpy(to, from, bytes);
    return KVF_OK;
}

static kvf_status cpu_score(void *ctx, const kvf_repetition *repetition, kvf_error *err) {
    cpu_runner *c = ctx;
    return kvf_model_score(c->model, c->activations, c->stream, repetition, err);
}

static void cpu_destroy(void *ctx) {
    cpu_runner *c = ctx;
    kvf_allocator a = c->allocator;
    free_buffers(c);
    kvf__free(&a, c->windows, c->model->info.n_layers * sizeof *c->windows);
    kvf__free(&a, c, sizeof *c);
}

kvf_status kvf_runner_create_cpu(const kvf_model *model, const kvf_device *device, const kvf_allocator *allocator,
                                 kvf_runner *runner, kvf_error *err) {
    kvf_allocator given = allocator ? *allocator : (kvf_allocator){0}, a;
    if (!model) return kvf__fail(err, KVF_E_INVALID, "model: is NULL; open one with kvf_model_open");
    if (!kvf__output_is_valid(runner))
        return kvf__fail(err, KVF_E_INVALID, "runner: must be given, its struct_size set to sizeof(kvf_runner)");
    kvf_status st = kvf__allocator_resolve(&given, &a, err);
    kvf_device checked;
    if (!st) st = kvf__device_resolve(device, &checked, err);
    if (st) return st;
    if (!checked.cpu_access)
        return kvf__fail(err, KVF_E_UNSUPPORTED,
                         "device %s: cpu_access is 0: the forward pass runs on the CPU and must reach its memory",
                         checked.name);
    const kvf_model_info *m = &model->info;
    cpu_runner *c = kvf__alloc(&a, sizeof *c);
    uint32_t *windows = c && m->sliding_window ? kvf__alloc(&a, m->n_layers * sizeof *windows) : NULL;
    if (!c || (m->sliding_window && !windows)) {
        kvf__free(&a, c, sizeof *c);
        return kvf__fail(err, KVF_E_NO_MEMORY, "runner: %zu bytes could not be allocated", sizeof *c);
    }
    for (uint32_t l = 0; windows && l < m->n_layers; l++) windows[l] = kvf_model_layer_window(model, l);
    *c = (cpu_runner){.allocator = a, .model = model, .windows = windows};
    const kvf_runner table = {
        .name = "cpu",
        .ctx = c,
        .shape = {m->n_layers, m->n_q_heads, m->n_kv_heads, m->head_dim, m->n_vocab, m->n_context, 0, 0, windows},
        .device = device ? device : kvf_device_cpu(),
        .observes = UINT32_MAX,
        .begin = cpu_begin,
        .run = cpu_run,
        .clear = cpu_clear,
        .snapshot = cpu_snapshot,
        .read = cpu_copy,
        .write = cpu_copy,
        .destroy = cpu_destroy,
        .score = cpu_score};
    kvf__output(runner, &table, sizeof table);
    return KVF_OK;
}

/* ---- The null runner --------------------------------------------------------------------------------------- */

typedef struct null_runner {
    kvf_runner_null_config config;
    double now;
} null_runner;

static kvf_status null_begin(void *ctx, const kvf_runner_limits *limits, kvf_runner_buffers *buffers, kvf_error *err) {
    (void)ctx, (void)limits, (void)err;
    kvf__output(buffers, &(kvf_runner_buffers){0}, sizeof *buffers);
    return KVF_OK;
}

static kvf_status null_run(void *ctx, const kvf_forward *batch, kvf_error *err) {
    null_runner *n = ctx;
    (void)err;
    n->now += n->config.step_s + n->config.token_s * batch->q_begin[batch->view->n_seqs];
    for (uint32_t i = 0; batch->not_finite && i < batch->view->n_seqs; i++) batch->not_finite[i] = KVF_FINITE;
    return KVF_OK;
}

static kvf_status null_clear(void *ctx, float *columns, uint32_t n_rows, size_t stride, uint32_t n, kvf_error *err) {
    (void)ctx, (void)columns, (void)n_rows, (void)stride, (void)n, (void)err;
    return KVF_OK;
}

static kvf_status null_snapshot(void *ctx, float *columns, uint32_t n_rows, const uint32_t *ids, uint32_t n_tokens,
                                int to_pages, kvf_error *err) {
    (void)ctx, (void)columns, (void)n_rows, (void)ids, (void)n_tokens, (void)to_pages, (void)err;
    return KVF_OK;
}

static kvf_status null_copy(void *ctx, void *to, const void *from, size_t bytes, kvf_error *err) {
    (void)ctx, (void)to, (void)from, (void)bytes;
    return kvf__fail(err, KVF_E_UNSUPPORTED, "null runner: it has no memory that could be read or written");
}

static kvf_status null_metric(void *ctx, void *user, double *values, kvf_error *err) {
    const null_runner *n = ctx;
    return n->config.metric ? n->config.metric(n->config.ctx, user, values, err) : KVF_OK;
}

static double null_clock(void *ctx) { return ((const null_runner *)ctx)->now; }

static void null_destroy(void *ctx) {
    null_runner *n = ctx;
    kvf_allocator a = n->config.allocator;
    kvf__free(&a, n, sizeof *n);
}

kvf_status kvf_runner_create_null(const kvf_runner_null_config *config, kvf_runner *runner, kvf_error *err) {
    kvf_runner_null_config c;
    kvf_status st = kvf__config_read(&c, sizeof c, config, "kvf_runner_null_config", err);
    if (st) return st;
    if (!kvf__output_is_valid(runner))
        return kvf__fail(err, KVF_E_INVALID, "runner: must be given, its struct_size set to sizeof(kvf_runner)");
    if (!(c.step_s >= 0) || !(c.token_s >= 0))
        return kvf__fail(err, KVF_E_INVALID, "step_s %g, token_s %g: must be 0 or more", c.step_s, c.token_s);
    kvf_allocator a;
    if ((st = kvf__allocator_resolve(&c.allocator, &a, err))) return st;
    null_runner *n = kvf__alloc(&a, sizeof *n);
    if (!n) return kvf__fail(err, KVF_E_NO_MEMORY, "runner: %zu bytes could not be allocated", sizeof *n);
    n->config = c;
    n->config.allocator = a;
    const kvf_runner table = {.name = "null",
                              .ctx = n,
                              .shape = c.shape,
                              .observes = UINT32_MAX,
                              .begin = null_begin,
                              .run = null_run,
                              .clear = null_clear,
                              .snapshot = null_snapshot,
                              .read = null_copy,
                              .write = null_copy,
                              .metric = null_metric,
                              .clock = null_clock,
                              .destroy = null_destroy};
    kvf__output(runner, &table, sizeof table);
    return KVF_OK;
}

void kvf_runner_null_wait(const kvf_runner *runner, double seconds) {
    kvf_runner r;
    if (kvf__config_read(&r, sizeof r, runner, "kvf_runner", NULL) || r.destroy != null_destroy) return;
    null_runner *n = r.ctx;
    if (seconds > n->now) n->now = seconds;
}
