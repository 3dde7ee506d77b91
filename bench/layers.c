/* Layers of Llama-3-8B's shape that benchmarks of the policies work on. */
#include "bench/layers.h"

#include <math.h>
#include <stdlib.h>

enum { HEADS = KVF__BENCH_HEADS, DIM = KVF__BENCH_DIM, BLOCK = KVF__BENCH_BLOCK, Q_HEADS = KVF__BENCH_Q_HEADS };
enum { WIDTH = KVF__BENCH_WIDTH, KV_WIDTH = HEADS * DIM };

static void must(kvf_status status, const kvf_error *err) {
    if (status) kvf__bench_die("policy: %s: %s", kvf_status_name(status), err->text);
}

static const struct {
    const char *name;
    kvf_cpu_path path;
} paths[] = {{"auto", KVF_CPU_AUTO}, {"avx2", KVF_CPU_AVX2}, {"avx512", KVF_CPU_AVX512}};
static size_t path; /* index of paths */

const char *kvf__bench_layers_path(const char *name) {
    for (size_t i = 0; name && i < sizeof paths / sizeof *paths; i++) {
        if (strcmp(name, paths[i].name) != 0 || !(i == 0 || kvf_cpu_has_path(paths[i].path))) continue;
        path = i;
        name = NULL;
    }
    if (name) kvf__bench_die("-a %s: must be auto, avx2 or avx512, one that this CPU has", name);
    return paths[path].name;
}

static float *floats(size_t n) { return kvf__bench_take(n * sizeof(float)); }

static void make_pages(kvf__bench_layers *x) {
    uint32_t n_blocks = x->n_layers * x->max_slots / BLOCK;
    size_t half = (size_t)n_blocks * HEADS * BLOCK * DIM * 2, meta = (size_t)n_blocks * HEADS * BLOCK * 4;
    x->memory_bytes = 2 * half + (4 + KVF_MAX_SCORE_ARRAYS) * meta;
    x->memory = kvf__bench_take(x->memory_bytes);
    unsigned char *m = x->memory + 2 * half;
    x->pages = (kvf_pages){.struct_size = sizeof x->pages,
                           .dtype = KVF_F16,
                           .n_blocks = n_blocks,
                           .block_size = BLOCK,
                           .heads_per_group = HEADS,
                           .head_dim = DIM,
                           .k = x->memory,
                           .v = x->memory + half,
                           .k_block_stride = half / n_blocks,
                           .v_block_stride = half / n_blocks,
                           .pos = (uint32_t *)(void *)m,
                           .key_norm = (float *)(void *)(m + meta),
                           .weight = (float *)(void *)(m + 2 * meta),
                           .bias = (float *)(void *)(m + 3 * meta)};
    x->scores = (kvf_score_pages){.struct_size = sizeof x->scores,
                                  .base = (float *)(void *)(m + 4 * meta),
                                  .n_pages = n_blocks,
                                  .heads_per_group = HEADS,
                                  .block_size = BLOCK};
    x->rows = kvf__bench_take(n_blocks * sizeof *x->rows);
    for (uint32_t i = 0; i < n_blocks; i++) x->rows[i] = i;
    for (uint32_t i = n_blocks - 1; i > 0; i--) { /* tables are not in the order of memory */
        uint32_t j = (uint32_t)((double)(kvf__bench_uniform(&x->random) * 0.5f + 0.5f) * i), t = x->rows[i];
        x->rows[i] = x->rows[j];
        x->rows[j] = t;
    }
}

kvf__bench_layers *kvf__bench_layers_create(uint32_t n_layers, uint32_t max_slots, uint32_t max_tokens,
                                            uint32_t max_evict, uint32_t n_threads) {
    kvf_error err = {.text = ""};
    kvf__bench_layers *x = kvf__bench_take(sizeof *x);
    *x = (kvf__bench_layers){.n_layers = n_layers, .max_slots = max_slots, .max_tokens = max_tokens, .random = 3};
    must(kvf_stream_create_cpu(NULL, n_threads, &x->stream, &err), &err);
    make_pages(x);
    x->n_slots = kvf__bench_take(n_layers * sizeof *x->n_slots);
    x->row_offset = kvf__bench_take(n_layers * sizeof *x->row_offset);
    x->events = kvf__bench_take(n_layers * sizeof *x->events);
    for (uint32_t l = 0; l < n_layers; l++) x->row_offset[l] = (uint64_t)l * max_slots / BLOCK;
    x->view = (kvf_view){.struct_size = sizeof x->view,
                         .n_seqs = 1,
                         .n_layers = n_layers,
                         .n_groups = 1,
                         .heads_per_group = HEADS,
                         .block_size = BLOCK,
                         .rows = x->rows,
                         .score_rows = x->rows,
                         .row_offset = x->row_offset,
                         .n_slots = x->n_slots,
                         .next_pos = &x->next_pos,
                         .seq_index = &x->seq_index};
    kvf_policy_state_config config = {.struct_size = sizeof config,
                                      .n_layers = n_layers,
                                      .n_kv_heads = HEADS,
                                      .n_q_heads = Q_HEADS,
                                      .head_dim = DIM,
                                      .block_size = BLOCK,
                                      .max_seqs = 1,
                                      .max_slots = max_slots};
    must(kvf_policy_state_create(&config, &x->state, &err), &err);
    must(kvf_plan_create(NULL, HEADS, n_layers, (uint64_t)n_layers * HEADS * max_evict, &x->plan, &err), &err);
    must(kvf_policy_workspace_bytes(n_threads, DIM, HEADS, max_slots, &x->policy_bytes), &err);
    must(kvf_attention_workspace_bytes(n_threads, DIM, Q_HEADS, HEADS, max_slots, 1, max_tokens, &x->attention_bytes),
         &err);
    x->policy_space = kvf__bench_take(x->policy_bytes);
    x->attention_space = kvf__bench_take(x->attention_bytes);
    x->q = floats((size_t)max_tokens * WIDTH);
    x->out = floats((size_t)max_tokens * WIDTH);
    x->k = floats(KV_WIDTH);
    x->v = floats(KV_WIDTH);
    x->row = floats((size_t)HEADS * max_slots);
    x->logprobs = floats(max_slots + 1);
    for (uint32_t i = 0; i <= max_slots; i++) x->logprobs[i] = kvf__bench_uniform(&x->random) - 2;
    for (size_t i = 0; i < (size_t)max_tokens * WIDTH; i++) x->q[i] = kvf__bench_uniform(&x->random);
    if (max_tokens > 1) {
        x->sums[0] = floats((size_t)n_layers * Q_HEADS * max_slots);
        x->last[0] = floats((size_t)n_layers * Q_HEADS * max_slots);
        x->squares[0] = floats((size_t)n_layers * HEADS * max_slots);
        for (size_t i = 0; i < (size_t)n_layers * Q_HEADS * max_slots; i++)
            x->sums[0][i] = kvf__bench_uniform(&x->random) + 1;
    }
    return x;
}

void kvf__bench_layers_destroy(kvf__bench_layers *x) {
    void *all[] = {x->memory,      x->rows,    x->n_slots, x->row_offset, x->events,
                   x->q,           x->k,       x->v,       x->out,        x->row,
                   x->logprobs,    x->sums[0], x->last[0], x->squares[0], x->attention_space,
                   x->policy_space};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    kvf_policy_state_destroy(x->state);
    kvf_plan_destroy(x->plan);
    kvf_stream_destroy(x->stream);
    free(x);
}

/* Keys repeat out of step with the rows: conversions of all of them would take longer than what is measured. */
static void fill_rows(kvf__bench_layers *x) {
    enum { PATTERN = (1 << 22) - 521 };
    static uint16_t pattern[PATTERN];
    size_t bytes = x->pages.k_block_stride * x->pages.n_blocks * 2;
    for (size_t i = 0; i < PATTERN; i++) pattern[i] = kvf__f16_from_f32(kvf__bench_uniform(&x->random));
    for (size_t at = 0; at < bytes; at += sizeof pattern)
        memcpy(x->memory + at, pattern, KVF__MIN(sizeof pattern, bytes - at));
}

void kvf__bench_layers_fill(kvf__bench_layers *x, uint32_t n_slots, uint32_t next_pos) {
    kvf_pages *p = &x->pages;
    const uint32_t recent = n_slots / 2, spread = (next_pos - recent) / (n_slots - recent);
    fill_rows(x);
    x->next_pos = next_pos;
    for (uint32_t l = 0; l < x->n_layers; l++) {
        x->n_slots[l] = n_slots;
        for (uint32_t h = 0; h < HEADS; h++) {
            kvf__head head = kvf__head_of(&x->view, p, 0, l, h);
            for (uint32_t slot = 0; slot < n_slots; slot++) {
                size_t i = kvf__slot_index(&head, slot);
                const uint16_t *row = kvf__k_row(&head, slot);
                double norm = 0;
                for (int e = 0; e < DIM; e++) norm += pow((double)kvf__f32_from_f16(row[e]), 2);
                p->key_norm[i] = (float)sqrt(norm);
                p->pos[i] = slot < n_slots - recent ? slot * spread : next_pos - (n_slots - slot);
                p->weight[i] = 1;
                p->bias[i] = 0;
            }
        }
    }
    for (size_t i = 0; i < (size_t)p->n_blocks * HEADS * BLOCK * KVF_MAX_SCORE_ARRAYS; i++)
        x->scores.base[i] = kvf__bench_uniform(&x->random) + 2;
}

void kvf__bench_layers_open(kvf__bench_layers *x, const kvf_policy_options *options, uint32_t keep) {
    kvf_error err = {.text = ""};
    x->options = *options;
    x->scores.n_arrays = KVF__MAX(kvf_policy_n_arrays(options), 1u);
    must(kvf_policy_open(x->state, 0, options, &err), &err);
    kvf__policy_seq *s = kvf__policy_seq_get(x->state, 0);
    s->n_prompt = x->next_pos;
    if (!keep) return;
    for (uint32_t l = 0; l < x->n_layers; l++) {
        s->sizes[l].keep = keep;
        kvf__split(options, keep, &s->sizes[l]);
        s->sizes[l].reserve = keep + kvf__policy_room(options, BLOCK);
    }
    s->budgeted = s->sized = true;
}

double kvf__bench_layers_attend(kvf__bench_layers *x, uint32_t layer, uint32_t n_tokens, uint32_t needs) {
    kvf_error err = {.text = ""};
    const uint32_t q_begin[] = {0, n_tokens};
    const uint8_t gqa = (uint8_t)x->options.gqa;
    float *sums = x->sums[0] ? x->sums[0] + (size_t)layer * Q_HEADS * x->max_slots : NULL;
    float *last = x->last[0] ? x->last[0] + (size_t)layer * Q_HEADS * x->max_slots : NULL;
    float *squares = x->squares[0] ? x->squares[0] + (size_t)layer * HEADS * x->max_slots : NULL;
    kvf_mass mass = {.struct_size = sizeof mass, .row_gqa = &gqa, .col_stride = x->max_slots};
    if (n_tokens == 1) {
        mass.row = x->row;
        mass.row_stride = x->max_slots;
    } else {
        x->last_begin = x->next_pos - KVF__MIN(x->options.score_window, n_tokens);
        if (needs & KVF_NEEDS_COL_SUMS) mass.col_sums = &sums;
        if (needs & KVF_NEEDS_LAST_ROWS) mass.last_sums = &last, mass.last_begin = &x->last_begin;
        if (needs & KVF_NEEDS_SQUARES) mass.sq_sums = &squares;
    }
    bool wanted =
        needs & (n_tokens == 1 ? KVF_NEEDS_ROW : KVF_NEEDS_COL_SUMS | KVF_NEEDS_LAST_ROWS | KVF_NEEDS_SQUARES);
    kvf_attention a = {.struct_size = sizeof a,
                       .view = &x->view,
                       .pages = &x->pages,
                       .layer = layer,
                       .seq_end = 1,
                       .n_q_heads = Q_HEADS,
                       .q_begin = q_begin,
                       .q = x->q,
                       .q_stride = WIDTH,
                       .out = x->out,
                       .out_stride = WIDTH,
                       .mass = wanted ? &mass : NULL,
                       .path = paths[path].path,
                       .workspace = x->attention_space,
                       .workspace_bytes = x->attention_bytes};
    double begin = kvf__clock();
    must(n_tokens == 1 ? kvf_attention_decode(x->stream, &a, &err) : kvf_attention_prefill(x->stream, &a, &err), &err);
    return kvf__clock() - begin;
}

void kvf__bench_layers_append(kvf__bench_layers *x) {
    kvf_error err = {.text = ""};
    const uint32_t q_begin[] = {0, 1};
    x->next_pos++;
    for (uint32_t l = 0; l < x->n_layers; l++) {
        for (uint32_t i = 0; i < KV_WIDTH; i++) {
            x->k[i] = kvf__bench_uniform(&x->random);
            x->v[i] = kvf__bench_uniform(&x->random);
        }
        if (++x->n_slots[l] > x->max_slots) kvf__bench_die("policy: a table is full");
        kvf_attention a = {.struct_size = sizeof a,
                           .view = &x->view,
                           .pages = &x->pages,
                           .layer = l,
                           .seq_end = 1,
                           .n_q_heads = Q_HEADS,
                           .q_begin = q_begin,
                           .k = x->k,
                           .v = x->v,
                           .kv_stride = KV_WIDTH};
        must(kvf_attention_append(x->stream, &a, &err), &err);
    }
}

static kvf_policy_batch batch_of(kvf__bench_layers *x) {
    return (kvf_policy_batch){.struct_size = sizeof(kvf_policy_batch),
                              .view = &x->view,
                              .pages = &x->pages,
                              .scores = &x->scores,
                              .row_end = 1,
                              .prompt_stride = x->max_slots,
                              .events = x->events,
                              .workspace = x->policy_space,
                              .workspace_bytes = x->policy_bytes,
                              .path = paths[path].path,
                              .logprobs = x->logprobs};
}

double kvf__bench_layers_observe(kvf__bench_layers *x, uint32_t layer) {
    kvf_error err = {.text = ""};
    if (!kvf_policy_observes(&x->options)) return 0;
    kvf_mass mass = {.struct_size = sizeof mass, .row = x->row, .row_stride = x->max_slots};
    kvf_policy_batch b = batch_of(x);
    b.layer = layer;
    b.mass = &mass;
    double begin = kvf__clock();
    must(kvf_policy_observe(x->state, x->stream, &b, &err), &err);
    return kvf__clock() - begin;
}

static void carry_out(kvf__bench_layers *x, kvf_policy_batch *b, kvf_event_kind kind, const uint32_t *keep,
                      double parts[KVF__BENCH_N_PARTS]) {
    kvf_error err = {.text = ""};
    for (uint32_t l = 0; l < x->n_layers; l++)
        if (keep[l]) x->events[b->n_events++] = (kvf_event){0, l, keep[l], kind, 0, 0};
    double t[4] = {kvf__clock()};
    must(kvf_policy_match(x->state, x->stream, b, x->plan, &err), &err);
    t[1] = kvf__clock();
    must(kvf_policy_gate(x->state, x->stream, b, x->plan, &err), &err);
    t[2] = kvf__clock();
    must(kvf_policy_apply(x->state, x->stream, b, x->plan, &err), &err);
    t[3] = kvf__clock();
    for (int i = 0; i < 3; i++) parts[KVF__BENCH_MATCH + i] = t[i + 1] - t[i];
    for (uint32_t l = 0; l < x->n_layers; l++)
        if (keep[l]) x->n_slots[l] = keep[l];
}

void kvf__bench_layers_event(kvf__bench_layers *x, uint32_t keep, kvf_event_kind kind,
                             double parts[KVF__BENCH_N_PARTS]) {
    uint32_t keeps[KVF__MAX_LAYERS];
    kvf_policy_batch b = batch_of(x);
    for (uint32_t l = 0; l < x->n_layers; l++) keeps[l] = keep;
    if (kind == KVF_EVENT_PROMPT) b.prompt_sums = x->sums;
    parts[KVF__BENCH_BUDGET] = 0;
    carry_out(x, &b, kind, keeps, parts);
}

void kvf__bench_layers_compact(kvf__bench_layers *x, double parts[KVF__BENCH_N_PARTS]) {
    kvf_error err = {.text = ""};
    double variance[KVF__MAX_LAYERS * Q_HEADS], begin = kvf__clock();
    uint32_t keep[KVF__MAX_LAYERS], n_due, needs = kvf_policy_needs(&x->options);
    const float *logprobs = x->logprobs;
    kvf_policy_batch b = batch_of(x);
    if (needs & KVF_NEEDS_COL_SUMS) b.prompt_sums = x->sums;
    if (needs & KVF_NEEDS_LAST_ROWS) b.prompt_last = x->last;
    if (needs & KVF_NEEDS_SQUARES) b.prompt_squares = x->squares;
    if (needs & KVF_NEEDS_LOGPROBS) b.prompt_logprobs = &logprobs;
    must(kvf_policy_metric(x->state, x->stream, &b, 0, x->next_pos, variance, &err), &err);
    must(kvf_policy_budget(x->state, 0, variance, x->next_pos, &err), &err);
    must(kvf_policy_due(x->state, x->stream, &b, 0, KVF_AT_PROMPT_END, keep, &n_due, &err), &err);
    parts[KVF__BENCH_BUDGET] = kvf__clock() - begin;
    carry_out(x, &b, KVF_EVENT_PROMPT, keep, parts);
}
