/* Creating and destroying an engine; its statistics. */
#include <stdlib.h>

#include "engine/internal.h"

/* Enough score arrays for the built-in policies with all their options, except squares together with score window: a few bytes a token
 * and head, which are not touched before a policy needs them. */
enum { DEFAULT_SCORE_ARRAYS = 3 };

void kvf_engine_config_init(kvf_engine_config *config, size_t struct_size) {
    kvf__init(config, struct_size, &(kvf_engine_config){.kv_dtype = KVF_F16}, sizeof *config);
}

/* The config's runner, or the CPU's over its model. */
static kvf_status take_runner(kvf_engine *e, kvf_error *err) {
    const kvf_engine_config *c = &e->config;
    e->runner.struct_size = sizeof e->runner;
    if (!c->runner && !c->model)
        return kvf__fail(err, KVF_E_INVALID,
                         "kvf_engine_config.model: is NULL; open one with kvf_model_open, or give a runner");
    if (c->runner && c->model)
        return kvf__fail(err, KVF_E_INVALID, "kvf_engine_config.runner: there is a model too: give one of them");
    kvf_status st = c->runner ? kvf__config_read(&e->runner, sizeof e->runner, c->runner, "kvf_runner", err)
                              : kvf_runner_create_cpu(c->model, c->device, &e->allocator, &e->runner, err);
    if (st) return st;
    e->own_runner = !c->runner;
    e->tokenizer = c->tokenizer ? c->tokenizer : kvf_model_tokenizer(c->model);
    e->shape = e->runner.shape;
    const kvf_runner *r = &e->runner;
    if (!r->begin || !r->run || !r->clear || !r->snapshot || !r->read || !r->write)
        return kvf__fail(err, KVF_E_INVALID, "runner %.64s: begin, run, clear, snapshot, read and write must be set",
                         r->name ? r->name : "?");
    const struct {
        const char *name;
        uint32_t value;
    } sizes[] = {{"n_layers", e->shape.n_layers},     {"n_q_heads", e->shape.n_q_heads},
                 {"n_kv_heads", e->shape.n_kv_heads}, {"head_dim", e->shape.head_dim},
                 {"n_vocab", e->shape.n_vocab},       {"n_context", e->shape.n_context}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!sizes[i].value)
            return kvf__fail(err, KVF_E_INVALID, "runner %.64s: shape.%s 0: must be at least 1",
                             r->name ? r->name : "?", sizes[i].name);
    if (e->shape.n_q_heads % e->shape.n_kv_heads)
        return kvf__fail(err, KVF_E_INVALID, "runner %.64s: shape.n_q_heads %u: must be a multiple of n_kv_heads %u",
                         r->name ? r->name : "?", e->shape.n_q_heads, e->shape.n_kv_heads);
    if (!r->device && c->host_bytes)
        return kvf__fail_field(err, KVF_E_UNSUPPORTED, "host_bytes", c->host_bytes, 0,
                               "runner %.64s has no memory that could be swapped", r->name ? r->name : "?");
    return kvf__device_resolve(r->device, &e->device, err);
}

/* The probe is this model's, as far as shapes tell. */
static kvf_status check_probe(kvf_engine *e, kvf_error *err) {
    kvf_engine_config *c = &e->config;
    const kvf_model_info *m = c->model && !c->runner ? kvf_model_get_info(c->model) : NULL;
    kvf_probe_data d = {.struct_size = sizeof d};
    if (m && c->want_scores && !c->probe)
        return kvf__fail(err, KVF_E_INVALID, "want_scores: needs a probe, or a runner that writes scores itself");
    if (!c->probe) return KVF_OK;
    kvf_status st = kvf_probe_get(c->probe, &d);
    if (st) return kvf__fail(err, st, "probe: cannot be read");
    if (d.n_layers != e->shape.n_layers || d.n_kv_heads != e->shape.n_kv_heads || (m && d.n_embd != m->n_embd))
        return kvf__fail(err, KVF_E_INVALID,
                         "probe: was fitted to %u layers of %u KV heads, %u wide: the model has %u, %u, %u", d.n_layers,
                         d.n_kv_heads, d.n_embd, e->shape.n_layers, e->shape.n_kv_heads, m ? m->n_embd : d.n_embd);
    c->want_scores = 1;
    return KVF_OK;
}

static kvf_status resolve(kvf_engine *e, kvf_error *err) {
    kvf_engine_config *c = &e->config;
    const kvf_runner_shape *info = &e->shape;
    if (kvf_dtype_bytes(c->kv_dtype) == 0)
        return kvf__fail(err, KVF_E_INVALID, "kv_dtype %d: must be KVF_F16, KVF_BF16 or KVF_F32", (int)c->kv_dtype);
    if (!c->block_size) c->block_size = 16;
    if (c->block_size < 8 || c->block_size > 256 || (c->block_size & (c->block_size - 1)))
        return kvf__fail_field(err, KVF_E_INVALID, "block_size", c->block_size, 0,
                               "must be a power of two in [8, 256]");
    if (!c->heads_per_group) c->heads_per_group = info->n_kv_heads;
    if (info->n_kv_heads % c->heads_per_group)
        return kvf__fail_field(err, KVF_E_INVALID, "heads_per_group", c->heads_per_group, 0,
                               "must divide the model's %u KV heads", info->n_kv_heads);
    if (!c->chunk) c->chunk = 512;
    if (c->chunk % c->block_size)
        return kvf__fail_field(err, KVF_E_INVALID, "chunk", c->chunk, 0, "must be a multiple of the block size %u",
                               c->block_size);
    if (!c->kv_bytes) c->kv_bytes = (uint64_t)512 << 20;
    if (!c->max_running) c->max_running = 64;
    if (c->max_running > 65536)
        return kvf__fail_field(err, KVF_E_INVALID, "max_running", c->max_running, 0, "must be at most 65536");
    if (!c->max_context) c->max_context = info->n_context;
    if (c->max_context < 2 || c->max_context > info->n_context)
        return kvf__fail_field(err, KVF_E_INVALID, "max_context", c->max_context, 0,
                               "must be in [2, %u], the model's context", info->n_context);
    e->window = 0;
    for (uint32_t l = 0; info->layer_windows && l < info->n_layers; l++)
        if (info->layer_windows[l] < c->max_context) e->window = KVF__MAX(e->window, info->layer_windows[l]);
    if (!c->max_prefill_tokens) c->max_prefill_tokens = c->max_context;
    if (!c->n_score_arrays) c->n_score_arrays = DEFAULT_SCORE_ARRAYS;
    if (c->n_score_arrays > KVF_MAX_SCORE_ARRAYS)
        return kvf__fail_field(err, KVF_E_INVALID, "n_score_arrays", c->n_score_arrays, 0, "must be at most %u",
                               KVF_MAX_SCORE_ARRAYS);
    e->max_running = c->max_running;
    e->n_groups = info->n_kv_heads / c->heads_per_group;
    e->n_tables = info->n_layers * e->n_groups;
    e->max_batch_tokens = c->chunk + c->max_running;
    return KVF_OK;
}

/* Memory for the blocks of p and as many score pages; false: out of memory. */
static bool take_pages(kvf_engine *e, kvf_memory kind, kvf_pages *p, kvf_score_pages *scores) {
    size_t slots = (size_t)p->n_blocks * p->heads_per_group * p->block_size;
    size_t half = (size_t)kvf_pages_block_bytes(p) / 2;
    p->k_block_stride = p->v_block_stride = half;
    p->k = kvf__engine_take_of_device(e, kind, p->n_blocks, half);
    p->v = kvf__engine_take_of_device(e, kind, p->n_blocks, half);
    p->pos = kvf__engine_take_of_device(e, kind, slots, sizeof *p->pos);
    p->key_norm = kvf__engine_take_of_device(e, kind, slots, sizeof *p->key_norm);
    if (e->config.want_mass_bias) {
        p->weight = kvf__engine_take_of_device(e, kind, slots, sizeof *p->weight);
        p->bias = kvf__engine_take_of_device(e, kind, slots, sizeof *p->bias);
    }
    if (e->config.want_scores) p->score = kvf__engine_take_of_device(e, kind, slots, sizeof *p->score);
    *scores = (kvf_score_pages){.struct_size = sizeof *scores,
                                .n_pages = p->n_blocks,
                                .n_arrays = e->config.n_score_arrays,
                                .heads_per_group = p->heads_per_group,
                                .block_size = p->block_size};
    scores->base = kvf__engine_take_of_device(e, kind, slots, e->config.n_score_arrays * sizeof(float));
    return p->k && p->v && p->pos && p->key_norm && scores->base &&
           (!e->config.want_mass_bias || (p->weight && p->bias)) && (!e->config.want_scores || p->score);
}

static kvf_status no_pages(const kvf_engine *e, const char *field, uint64_t bytes, kvf_error *err) {
    const char *why = e->broken_text.text;
    return kvf__fail_field(err, e->broken ? e->broken : KVF_E_NO_MEMORY, field, bytes, 0,
                           "so much could not be allocated%s%.200s; lower it", why[0] ? ": " : "", why);
}

/* The host tier: pages of the same shape. */
static kvf_status create_host(kvf_engine *e, kvf_error *err) {
    uint64_t bytes = e->config.host_bytes, n_blocks = bytes / e->stats.block_bytes;
    e->host_pages = e->pages;
    e->host_scores = e->scores;
    e->host_pages.n_blocks = e->host_scores.n_pages = 0;
    e->offloads = bytes && e->config.prefix_cache && !e->config.no_prefix_offload;
    if (!bytes) return KVF_OK;
    if (!n_blocks)
        return kvf__fail_size(err, KVF_E_INVALID, "host_bytes", bytes, e->stats.block_bytes,
                              "one block of %u tokens takes more;", e->config.block_size);
    e->host_pages.n_blocks = (uint32_t)KVF__MIN(n_blocks, UINT32_C(0x7fffffff));
    if (take_pages(e, KVF_MEMORY_HOST, &e->host_pages, &e->host_scores)) return KVF_OK;
    return no_pages(e, "host_bytes", bytes, err);
}

static kvf_status create_pages(kvf_engine *e, kvf_error *err) {
    const kvf_engine_config *c = &e->config;
    kvf_pages *p = &e->pages;
    *p = (kvf_pages){.struct_size = sizeof *p,
                     .dtype = c->kv_dtype,
                     .block_size = c->block_size,
                     .heads_per_group = c->heads_per_group,
                     .head_dim = e->shape.head_dim};
    uint64_t block_bytes = kvf_pages_block_bytes(p), n_blocks = block_bytes ? c->kv_bytes / block_bytes : 0;
    uint64_t least = block_bytes * e->n_tables;
    if (n_blocks < e->n_tables)
        return kvf__fail_size(err, KVF_E_INVALID, "kv_bytes", c->kv_bytes, least,
                              "one block of %u tokens in each of %u tables takes more;", c->block_size, e->n_tables);
    p->n_blocks = (uint32_t)KVF__MIN(n_blocks, (uint64_t)1 << 31);
    if (c->host_bytes) p->n_blocks = KVF__MIN(p->n_blocks, UINT32_C(0x7fffffff));
    if (!e->runner.device)
        e->scores = (kvf_score_pages){sizeof e->scores,   NULL,         p->n_blocks, c->n_score_arrays,
                                      c->heads_per_group, c->block_size};
    else if (!take_pages(e, KVF_MEMORY_DEVICE, p, &e->scores))
        return no_pages(e, "kv_bytes", c->kv_bytes, err);
    e->stats.block_bytes = block_bytes;
    return KVF_OK;
}

/* Memory for the sums of cached prompts: by default a twentieth of the KV memory that the prompts may be in. */
static kvf_status create_snapshots(kvf_engine *e, kvf_error *err) {
    if (!e->config.prefix_cache) return KVF_OK;
    uint64_t n_blocks = (uint64_t)e->pages.n_blocks + (e->offloads ? e->host_pages.n_blocks : 0);
    uint64_t bytes = e->config.snapshot_bytes ? e->config.snapshot_bytes : n_blocks * e->stats.block_bytes / 20;
    uint64_t page = kvf__engine_snapshot_page_bytes(e), n_pages = KVF__MIN(bytes / page, n_blocks);
    n_pages = KVF__MIN(n_pages, (uint64_t)1 << 31);
    e->n_snapshot_pages = (uint32_t)KVF__MAX(n_pages, 1);
    e->n_page_ids = KVF__STATISTICS * kvf__ceil_div(e->config.max_context, e->config.block_size);
    e->page_ids = kvf__engine_take(e, e->n_page_ids, sizeof *e->page_ids, 0);
    if (!e->page_ids)
        return kvf__fail_field(err, KVF_E_NO_MEMORY, "snapshot_bytes", page * e->n_snapshot_pages, 0,
                               "so much could not be allocated; lower it");
    return KVF_OK;
}

static kvf_status create_manager(kvf_engine *e, kvf_error *err) {
    const kvf_engine_config *c = &e->config;
    kvf_manager_config m;
    kvf_manager_config_init(&m, sizeof m);
    m.n_layers = e->shape.n_layers;
    m.n_kv_heads = e->shape.n_kv_heads;
    m.heads_per_group = c->heads_per_group;
    m.block_size = c->block_size;
    m.n_blocks = e->pages.n_blocks;
    m.max_seqs = c->max_running;
    m.max_slots = c->max_context;
    m.n_table_blocks = UINT64_MAX; /* any number of requests may share blocks; only what is used takes memory */
    m.block_bytes = e->stats.block_bytes;
    m.prefix_cache = c->prefix_cache != 0;
    m.n_snapshot_pages = e->n_snapshot_pages;
    m.snapshot_page_bytes = kvf__engine_snapshot_page_bytes(e);
    m.n_host_blocks = m.n_host_score_pages = e->host_pages.n_blocks;
    m.allocator = e->allocator;
    m.profile = c->profile;
    if (e->window) m.layer_windows = e->shape.layer_windows;
    return kvf_manager_create(&m, &e->manager, err);
}

static kvf_status create_parts(kvf_engine *e, kvf_error *err) {
    const kvf_engine_config *c = &e->config;
    const kvf_runner_shape *info = &e->shape;
    kvf_status st;
    if ((st = kvf_stream_create_cpu(&e->allocator, c->n_threads, &e->stream, err))) return st;
    e->counted.bytes = &e->memory.manager_bytes;
    if ((st = create_manager(e, err))) return st;
    kvf_policy_state_config p = {.struct_size = sizeof p,
                                 .n_layers = info->n_layers,
                                 .n_kv_heads = info->n_kv_heads,
                                 .n_q_heads = info->n_q_heads,
                                 .n_q_heads_total = info->n_q_heads_total,
                                 .q_head_begin = info->q_head_begin,
                                 .head_dim = info->head_dim,
                                 .block_size = c->block_size,
                                 .max_seqs = c->max_running,
                                 .max_slots = c->max_context,
                                 .allocator = e->allocator,
                                 .n_groups = e->n_groups};
    e->counted.bytes = &e->memory.policy_bytes;
    if ((st = kvf_policy_state_create(&p, &e->policies, err))) return st;
    kvf_sched_config s;
    kvf_sched_config_init(&s, sizeof s);
    s.manager = e->manager;
    s.policies = e->policies;
    s.max_running = c->max_running;
    s.max_batch_tokens = e->max_batch_tokens;
    s.chunk = c->chunk;
    s.max_prefill_tokens = c->max_prefill_tokens;
    s.max_context = c->max_context;
    s.replay_all = c->deterministic;
    s.preempt = c->preempt;
    s.order = c->order;
    s.patience = c->patience;
    s.n_instruction = KVF__MIN(e->n_instruction, KVF_MAX_INSTRUCTION_TOKENS);
    s.allocator = e->allocator;
    e->counted.bytes = &e->memory.scheduler_bytes;
    if ((st = kvf_sched_create(&s, &e->sched, err))) return st;
    e->counted.bytes = &e->memory.policy_bytes;
    if ((st = kvf__engine_create_events(e, err))) return st;
    const kvf_runner_limits limits = {.struct_size = sizeof limits,
                                      .stream = e->stream,
                                      .max_tokens = e->max_batch_tokens,
                                      .max_seqs = c->max_running,
                                      .max_slots = c->max_context,
                                      .max_prompt_tokens = c->max_prefill_tokens,
                                      .block_size = c->block_size,
                                      .n_snapshot_pages = e->n_snapshot_pages};
    e->buffer.struct_size = sizeof e->buffer;
    e->counted.bytes = &e->memory.runner_bytes;
    st = e->runner.begin(e->runner.ctx, &limits, &e->buffer, err);
    e->counted.bytes = &e->memory.engine_bytes;
    return st;
}

static kvf_status create_buffers(kvf_engine *e, kvf_error *err) {
    size_t n = e->max_running;
#define TAKE(field, count) ((e->field = kvf__engine_take(e, (count), sizeof *e->field, 0)) != NULL)
    bool ok = (e->rows = kvf__engine_take(e, n, sizeof *e->rows, 1)) &&
              (e->other_rows.rows = kvf__engine_take(e, n, sizeof *e->rows, 1)) && TAKE(other_rows.seqs, n) &&
              TAKE(other_rows.prompt_sums, n) && TAKE(ahead, n) && TAKE(seqs, n) && TAKE(tokens, e->max_batch_tokens) &&
              TAKE(q_begin, n + 1) && TAKE(out_rows, n + 1) && TAKE(sampled, n + 1) && TAKE(draws, n) &&
              TAKE(changed, n) && TAKE(batch_prompts, n) && TAKE(row_wanted, n) && TAKE(row_gqa, n) &&
              TAKE(prompt_sums, n) && TAKE(added_sums, n) && TAKE(observed, n) && TAKE(added_last, n) &&
              TAKE(added_squares, n) && TAKE(added_max, n) && TAKE(max_begin, n) && TAKE(max_end, n) &&
              TAKE(max_by_residual, n) && TAKE(last_begin, n) && TAKE(not_finite, n) && TAKE(logprobs, n) &&
              TAKE(targets, e->max_batch_tokens) && TAKE(target_logprobs, e->max_batch_tokens) && TAKE(batch_sums, n) &&
              TAKE(batch_last, n) && TAKE(batch_squares, n) && TAKE(batch_logprobs, n);
#undef TAKE
    if (!ok)
        return kvf__fail(err, KVF_E_NO_MEMORY,
                         "engine: buffers could not be allocated; lower max_running or max_context");
    return KVF_OK;
}

static kvf_status create_small(kvf_engine *e, kvf_error *err) {
    uint32_t n_layers = e->shape.n_layers;
    kvf__slab slab = {0};
    for (int pass = 0; pass < 2; pass++) {
        slab.used = 0;
        e->layers = kvf__slab_take(&slab, n_layers, sizeof *e->layers);
        e->result_layers = kvf__slab_take(&slab, n_layers, sizeof *e->result_layers);
        e->single_layers = kvf__slab_take(&slab, n_layers, sizeof *e->single_layers);
        e->single_sizes = kvf__slab_take(&slab, n_layers, sizeof *e->single_sizes);
        e->single_groups = kvf__slab_take(&slab, e->n_tables, sizeof *e->single_groups);
        e->single_density = kvf__slab_take(&slab, n_layers, sizeof *e->single_density);
        if (e->buffer.logits)
            e->sample_scratch = kvf__slab_take(&slab, (size_t)kvf_stream_n_threads(e->stream) * e->shape.n_vocab, 8);
        if (!pass && (slab.bad || !(slab.base = kvf__engine_take(e, slab.used, 1, 0))))
            return kvf__fail(err, KVF_E_NO_MEMORY, "engine: %zu bytes of buffers could not be allocated", slab.used);
    }
    return KVF_OK;
}

kvf_status kvf_engine_create(const kvf_engine_config *config, kvf_engine **out, kvf_error *err) {
    kvf_engine_config c;
    kvf_allocator a;
    kvf_status st = kvf__config_read(&c, sizeof c, config, "kvf_engine_config", err);
    if (st || (st = kvf__allocator_resolve(&c.allocator, &a, err))) return st;
    if (!out) return kvf__fail(err, KVF_E_INVALID, "kvf_engine_create: out is NULL");
    kvf_engine *e = kvf__alloc(&a, sizeof *e);
    if (!e) return kvf__fail(err, KVF_E_NO_MEMORY, "engine: %zu bytes could not be allocated", sizeof *e);
    e->config = c;
    e->counted = (kvf__counted){a, &e->memory.runner_bytes};
    e->allocator = kvf__counted_allocator(&e->counted);
    e->stats.struct_size = sizeof e->stats;
    e->view.struct_size = e->other_rows.view.struct_size = sizeof e->view;
    if ((st = take_runner(e, err)) || (st = check_probe(e, err)) || (st = resolve(e, err)) ||
        (st = kvf__engine_create_instruction(e, err)) ||
        (e->counted.bytes = &e->memory.engine_bytes, st = create_pages(e, err)) || (st = create_host(e, err)) ||
        (st = create_snapshots(e, err)) || (st = create_parts(e, err)) || (st = create_buffers(e, err)) ||
        (st = create_small(e, err)) || (st = kvf__engine_create_transfers(e, err))) {
        kvf_engine_destroy(e);
        return st;
    }
    e->config.profile = NULL; /* the manager has its copy */
    e->counted.bytes = &e->memory.request_bytes;
    kvf__log(&c.log, KVF_LOG_INFO,
             "engine: %u layers, %u blocks of %u tokens x %u KV heads (%llu bytes of K and V), %u threads",
             e->shape.n_layers, e->pages.n_blocks, e->pages.block_size, e->pages.heads_per_group,
             (unsigned long long)e->stats.block_bytes * e->pages.n_blocks, kvf_stream_n_threads(e->stream));
    *out = e;
    return KVF_OK;
}

void kvf_engine_destroy(kvf_engine *e) {
    if (!e) return;
    e->destroying = 1; /* a callback may try to submit */
    while (e->first) kvf__live_finish(e, e->first, KVF_FINISH_ABORTED, NULL);
    kvf__engine_destroy_transfers(e);
    kvf_events_destroy(e->events);
    kvf_sched_destroy(e->sched);
    kvf_policy_state_destroy(e->policies);
    kvf_manager_destroy(e->manager);
    if (e->own_runner) kvf_runner_destroy(&e->runner);
    kvf_stream_destroy(e->stream);
    for (uint32_t i = 0; i < e->n_buffers; i++) kvf__engine_give_back(e, &e->buffers[i]);
    kvf_allocator a = e->counted.inner;
    kvf__free(&a, e, sizeof *e);
}

kvf_status kvf_engine_get_stats(kvf_engine *e, kvf_engine_stats *out) {
    if (!e || !kvf__output_is_valid(out)) return KVF_E_INVALID;
    kvf_engine_stats s = e->stats;
    kvf_sched_counts(e->sched, &s.n_running, &s.n_waiting);
    s.occupancy.struct_size = sizeof s.occupancy;
    kvf_status st = kvf_occupancy_read(e->manager, &s.occupancy, e->layers, sizeof *e->layers);
    if (st) return st;
    s.host_bytes_max = s.occupancy.host_blocks.n_held_max * s.block_bytes;
    s.n_layers = e->shape.n_layers;
    s.layers = e->layers;
    s.layer_bytes = sizeof *e->layers;
    s.merged = e->done_merged;
    s.dropped = e->done_dropped;
    s.kept = e->done_kept + s.occupancy.slots_used * e->pages.heads_per_group;
    for (const kvf__live *r = e->first_running; r; r = r->next_running) {
        uint32_t index;
        if (kvf_seq_index(e->manager, r->seq, &index)) continue;
        kvf_policy_counts counts = {.struct_size = sizeof counts};
        if (kvf_policy_get_counts(e->policies, index, &counts)) continue;
        s.merged += counts.merged;
        s.dropped += counts.dropped;
    }
    s.prefix.struct_size = sizeof s.prefix;
    if (e->config.prefix_cache && (st = kvf_prefix_stats_read(e->manager, &s.prefix))) return st;
    kvf__output(out, &s, sizeof s);
    return KVF_OK;
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

kvf_status kvf_engine_positions(kvf_engine *e, kvf_request request, uint32_t layer, uint32_t kv_head, uint32_t *pos,
                                uint32_t capacity, uint32_t *n) {
    if (!e || !pos) return KVF_E_INVALID;
    const kvf__live *r = kvf__live_find(e, request);
    if (!r || !r->seq) return KVF_E_NOT_FOUND;
    if (layer >= e->shape.n_layers || kv_head >= e->shape.n_kv_heads || !n) return KVF_E_INVALID;
    const kvf_pages *p = &e->pages;
    uint32_t n_slots, head = kv_head % p->heads_per_group;
    const uint32_t *blocks;
    kvf_status st = kvf_seq_table(e->manager, r->seq, layer, kv_head / p->heads_per_group, &n_slots, NULL, &blocks);
    if (st) return st;
    if (n_slots > capacity) return KVF_E_LIMIT;
    for (uint32_t s = 0; s < n_slots; s++)
        if ((st = e->runner.read(e->runner.ctx, &pos[s],
                                 p->pos + kvf__meta_at(p, blocks[s / p->block_size], head, s % p->block_size),
                                 sizeof *pos, NULL)))
            return st;
    qsort(pos, n_slots, sizeof *pos, ascending);
    *n = n_slots;
    return KVF_OK;
}

const kvf_manager *kvf_engine_manager(const kvf_engine *e, const kvf_policy_state **policies) {
    if (policies) *policies = e ? e->policies : NULL;
    return e ? e->manager : NULL;
}

uint32_t kvf_engine_seq_index(const kvf_engine *e, kvf_request request, uint32_t sample) {
    uint32_t index;
    for (const kvf__live *r = e ? e->first_running : NULL; r; r = r->next_running) {
        if ((r->group ? r->group->id : r->id) != request || r->index != sample || (r->group && r->group->beams))
            continue;
        return kvf_seq_index(e->manager, r->seq, &index) ? UINT32_MAX : index;
    }
    return UINT32_MAX;
}
