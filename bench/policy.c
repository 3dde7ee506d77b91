/* Measures what a policy does to one layer of Llama-3-8B's shape: 8 KV heads of 128, fp16 pages, the policy d2o.
 *
 * kvfold-bench policy [-r REPETITIONS] [-t THREADS]. policy/compact: a prompt of 4,096 tokens becomes 819, by match, gate
 * and apply. policy/evict: one decode event with k tokens too many. The floor is the sgemm of the keys' products alone,
 * evicted times kept, over floats that lie ready, in slices whose results stay in cache; it runs in turns with what it is
 * compared with. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/json.h"
#include "d2o_policy/pages.h"

enum { HEADS = 8, PER_KV = 4, DIM = 128, BLOCK = 16, PROMPT = 4096, KEEP = 819, WINDOW = 205 };
enum { BLOCKS = PROMPT / BLOCK, SLOTS = PROMPT * HEADS, SLICE = 128 };
enum { MATCH, GATE, APPLY, WHOLE, N_PARTS };

typedef struct layer {
    kvf_view view;
    kvf_pages pages;
    kvf_score_pages scores;
    kvf_policy_options options;
    kvf_policy_state *state;
    kvf_plan *plan;
    kvf_stream *stream;
    unsigned char *memory, *saved; /* all that the pages point to, and how it was */
    size_t memory_bytes;
    uint32_t rows[BLOCKS], n_slots, next_pos, seq_index;
    uint64_t row_offset;
    float *sums, *prompt_sums[1];
    void *workspace;
    size_t workspace_bytes;
    float *a, *b, *c; /* of sgemm: [HEADS][PROMPT][DIM] twice, [threads][SLICE][KEEP] */
} layer;

static void must(kvf_status status, const kvf_error *err) {
    if (status) kvf__bench_die("policy: %s: %s", kvf_status_name(status), err->text);
}

/* Blocks in random order; every number random, metadata as an append leaves it. */
static void fill(layer *x) {
    uint64_t state = 3;
    kvf_pages *p = &x->pages;
    uint16_t *k = p->k, *v = p->v;
    for (uint32_t i = 0; i < BLOCKS; i++) x->rows[i] = i;
    for (uint32_t i = BLOCKS - 1; i > 0; i--) {
        uint32_t j = (uint32_t)((double)(kvf__bench_uniform(&state) * 0.5f + 0.5f) * i), t = x->rows[i];
        x->rows[i] = x->rows[j];
        x->rows[j] = t;
    }
    for (size_t i = 0; i < (size_t)SLOTS * DIM; i++) {
        k[i] = kvf__f16_from_f32(kvf__bench_uniform(&state));
        v[i] = kvf__f16_from_f32(kvf__bench_uniform(&state));
        x->a[i] = kvf__bench_uniform(&state);
        x->b[i] = kvf__bench_uniform(&state);
    }
    x->n_slots = PROMPT;
    for (uint32_t h = 0; h < HEADS; h++) {
        kvf__head head = kvf__head_of(&x->view, p, 0, 0, h);
        for (uint32_t slot = 0; slot < PROMPT; slot++) {
            size_t i = kvf__slot_index(&head, slot);
            const uint16_t *row = kvf__k_row(&head, slot);
            double norm = 0;
            for (int e = 0; e < DIM; e++) norm += (double)kvf__f32_from_f16(row[e]) * (double)kvf__f32_from_f16(row[e]);
            p->key_norm[i] = (float)sqrt(norm);
            p->pos[i] = slot;
            p->weight[i] = 1;
            *kvf__score_at(&head, &x->scores, 0, slot) = kvf__bench_uniform(&state) + 1;
        }
    }
    for (size_t i = 0; i < (size_t)HEADS * PER_KV * PROMPT; i++) x->sums[i] = kvf__bench_uniform(&state) + 1;
    memcpy(x->saved, x->memory, x->memory_bytes);
}

static void make(layer *x, uint32_t n_threads) {
    kvf_error err = {""};
    const size_t half = (size_t)SLOTS * DIM * 2, meta = (size_t)SLOTS * 4;
    must(kvf_stream_create_cpu(NULL, n_threads, &x->stream, &err), &err);
    x->memory_bytes = 2 * half + 5 * meta;
    x->memory = kvf__bench_take(x->memory_bytes);
    x->saved = kvf__bench_take(x->memory_bytes);
    unsigned char *m = x->memory + 2 * half;
    x->pages = (kvf_pages){.struct_size = sizeof x->pages,
                           .dtype = KVF_F16,
                           .n_blocks = BLOCKS,
                           .block_size = BLOCK,
                           .heads_per_group = HEADS,
                           .head_dim = DIM,
                           .k = x->memory,
                           .v = x->memory + half,
                           .k_block_stride = half / BLOCKS,
                           .v_block_stride = half / BLOCKS,
                           .pos = (uint32_t *)(void *)m,
                           .key_norm = (float *)(void *)(m + meta),
                           .weight = (float *)(void *)(m + 2 * meta),
                           .bias = (float *)(void *)(m + 3 * meta)};
    x->scores = (kvf_score_pages){.struct_size = sizeof x->scores,
                                  .base = (float *)(void *)(m + 4 * meta),
                                  .n_pages = BLOCKS,
                                  .n_arrays = 1,
                                  .heads_per_group = HEADS,
                                  .block_size = BLOCK};
    x->view =
        (kvf_view){sizeof x->view, 1, 1, 1, HEADS, BLOCK, x->rows, x->rows, &x->row_offset, &x->n_slots, &x->next_pos,
                   &x->seq_index};
    must(kvf_policy_options_init(&x->options, "d2o", NULL, &err), &err);
    x->options.n_full_layers = 0;
    x->options.gqa = KVF_GQA_SUM;
    if (kvf_policy_n_arrays(&x->options) != 1) kvf__bench_die("policy: d2o has more than one score array");
    kvf_policy_state_config config = {.struct_size = sizeof config,
                                      .n_layers = 1,
                                      .n_kv_heads = HEADS,
                                      .n_q_heads = HEADS * PER_KV,
                                      .head_dim = DIM,
                                      .block_size = BLOCK,
                                      .max_seqs = 1,
                                      .max_slots = PROMPT};
    must(kvf_policy_state_create(&config, &x->state, &err), &err);
    must(kvf_plan_create(NULL, HEADS, 1, (uint64_t)SLOTS, &x->plan, &err), &err);
    must(kvf_policy_workspace_bytes(n_threads, DIM, HEADS, PROMPT, &x->workspace_bytes), &err);
    x->workspace = kvf__bench_take(x->workspace_bytes);
    x->prompt_sums[0] = x->sums = kvf__bench_take((size_t)HEADS * PER_KV * PROMPT * sizeof(float));
    x->a = kvf__bench_take((size_t)SLOTS * DIM * sizeof(float));
    x->b = kvf__bench_take((size_t)SLOTS * DIM * sizeof(float));
    x->c = kvf__bench_take((size_t)n_threads * SLICE * KEEP * sizeof(float));
    fill(x);
}

static void drop(layer *x) {
    void *all[] = {x->memory, x->saved, x->sums, x->workspace, x->a, x->b, x->c};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    kvf_policy_state_destroy(x->state);
    kvf_plan_destroy(x->plan);
    kvf_stream_destroy(x->stream);
}

/* The layer with n slots, as if nothing had happened. */
static void reset(layer *x, uint32_t n) {
    kvf_error err = {""};
    memcpy(x->memory, x->saved, x->memory_bytes);
    x->n_slots = x->next_pos = n;
    must(kvf_policy_open(x->state, 0, &x->options, &err), &err);
    kvf__policy_seq *s = kvf__policy_seq_get(x->state, 0);
    s->sizes[0] = (kvf_layer_size){KEEP, KEEP - WINDOW, WINDOW, KEEP + 1};
    s->budgeted = s->sized = true;
    s->n_prompt = n;
}

/* One event; seconds of its parts. */
static void event(layer *x, bool prompt, double *seconds) {
    kvf_error err = {""};
    kvf_event e = {0, 0, KEEP, prompt ? KVF_EVENT_PROMPT : KVF_EVENT_DECODE, 0, 0};
    kvf_policy_batch b = {.struct_size = sizeof b,
                          .view = &x->view,
                          .pages = &x->pages,
                          .scores = &x->scores,
                          .prompt_sums = prompt ? x->prompt_sums : NULL,
                          .prompt_stride = PROMPT,
                          .events = &e,
                          .n_events = 1,
                          .workspace = x->workspace,
                          .workspace_bytes = x->workspace_bytes};
    double t[] = {kvf__clock(), 0, 0, 0};
    must(x->options.ops->match(x->state, x->stream, &b, x->plan, &err), &err);
    t[1] = kvf__clock();
    must(x->options.ops->gate(x->state, x->stream, &b, x->plan, &err), &err);
    t[2] = kvf__clock();
    must(x->options.ops->apply(x->state, x->stream, &b, x->plan, &err), &err);
    t[3] = kvf__clock();
    for (int i = 0; i < WHOLE; i++) seconds[i] = t[i + 1] - t[i];
    seconds[WHOLE] = t[3] - t[0];
}

/* ---- The check: by plain loops over the keys as they were ---------------------------------------------- */

static double saved_cosine(const layer *x, const kvf__head *h, uint32_t s, uint32_t t) {
    const uint16_t *a = (const void *)(x->saved + ((unsigned char *)kvf__k_row(h, s) - x->memory));
    const uint16_t *b = (const void *)(x->saved + ((unsigned char *)kvf__k_row(h, t) - x->memory));
    double dot = 0, aa = 0, bb = 0;
    for (int e = 0; e < DIM; e++) {
        double u = (double)kvf__f32_from_f16(a[e]), v = (double)kvf__f32_from_f16(b[e]);
        dot += u * v, aa += u * u, bb += v * v;
    }
    return dot / sqrt(aa * bb);
}

/* What the head's event evicted were the lowest scores outside the window, matched with the nearest kept keys; and the
 * kept positions are what the pages now hold. scores: [n], before the event. */
static void check_head(const layer *x, uint32_t n, uint32_t kv_head, const double *scores) {
    static bool gone[PROMPT], held[PROMPT];
    const kvf_plan_event *pe = &x->plan->events[0];
    const kvf_plan_entry *entries = x->plan->entries + pe->entry_begin + (size_t)kv_head * pe->n_evict;
    kvf__head h = kvf__head_of(&x->view, &x->pages, 0, 0, kv_head);
    double highest_gone = 0, lowest_kept = INFINITY;
    if (pe->n_evict != n - KEEP) kvf__bench_die("policy: %u evicted, not %u", pe->n_evict, n - KEEP);
    memset(gone, 0, sizeof gone);
    memset(held, 0, sizeof held);
    for (uint32_t i = 0; i < pe->n_evict; i++) {
        uint32_t slot = entries[i].slot;
        if (slot >= n - WINDOW || gone[slot]) kvf__bench_die("policy: slot %u was not to be evicted", slot);
        gone[slot] = true;
        highest_gone = fmax(highest_gone, scores[slot]);
    }
    for (uint32_t slot = x->options.sinks; slot < n - WINDOW; slot++)
        if (!gone[slot]) lowest_kept = fmin(lowest_kept, scores[slot]);
    if (highest_gone > lowest_kept + 1e-5) kvf__bench_die("policy: a higher score was evicted than one that was kept");
    for (uint32_t i = 0; i < pe->n_evict; i += 1 + pe->n_evict / 16) {
        double best = -2;
        for (uint32_t slot = 0; slot < n; slot++)
            if (!gone[slot]) best = fmax(best, saved_cosine(x, &h, entries[i].slot, slot));
        if (entries[i].target >= n || gone[entries[i].target] ||
            !(fabs(saved_cosine(x, &h, entries[i].slot, entries[i].target) - best) < 1e-5) ||
            !(fabs((double)entries[i].u - best) < 1e-5))
            kvf__bench_die("policy: slot %u was not matched with its nearest key", entries[i].slot);
    }
    for (uint32_t slot = 0; slot < KEEP; slot++) {
        uint32_t pos = x->pages.pos[kvf__slot_index(&h, slot)];
        if (pos >= n || gone[pos] || held[pos]) kvf__bench_die("policy: slot %u holds position %u", slot, pos);
        held[pos] = true;
    }
}

static void check(layer *x, uint32_t n, bool prompt) {
    static double scores[PROMPT];
    double seconds[N_PARTS];
    reset(x, n);
    event(x, prompt, seconds);
    for (uint32_t h = 0; h < HEADS; h++) {
        kvf__head head = kvf__head_of(&x->view, &x->pages, 0, 0, h);
        for (uint32_t slot = 0; slot < n; slot++) {
            scores[slot] = 0;
            for (uint32_t q = 0; prompt && q < PER_KV; q++)
                scores[slot] += (double)x->sums[(size_t)(h * PER_KV + q) * PROMPT + slot];
            size_t at = (size_t)((unsigned char *)kvf__score_at(&head, &x->scores, 0, slot) - x->memory);
            if (!prompt) scores[slot] = (double)*(const float *)(const void *)(x->saved + at);
        }
        check_head(x, n, h, scores);
    }
}

/* ---- The floor ---------------------------------------------------------------------------------------------- */

typedef struct products {
    const layer *x;
    uint32_t n_evict, n_slices;
} products;

static void product(void *ctx, uint32_t item, uint32_t thread) {
    const products *p = ctx;
    uint32_t row = item % p->n_slices * SLICE, m = KVF__MIN(p->n_evict - row, (uint32_t)SLICE);
    size_t head = (size_t)(item / p->n_slices) * PROMPT * DIM;
    kvf__bench_sgemm((int)m, KEEP, DIM, p->x->a + head + (size_t)row * DIM, p->x->b + head,
                     p->x->c + (size_t)thread * SLICE * KEEP);
}

static double floor_seconds(const layer *x, uint32_t n_evict) {
    products p = {x, n_evict, kvf__ceil_div(n_evict, SLICE)};
    double t = kvf__clock();
    kvf__stream_for(x->stream, HEADS * p.n_slices, product, &p);
    return kvf__clock() - t;
}

static void check_floor(const layer *x) {
    products p = {x, 1, 1};
    product(&p, HEADS - 1, 0);
    size_t head = (size_t)(HEADS - 1) * PROMPT * DIM;
    for (size_t j = 0; j < KEEP; j++) {
        double want = 0;
        for (size_t e = 0; e < DIM; e++) want += (double)x->a[head + e] * (double)x->b[head + j * DIM + e];
        if (!(fabs(want - (double)x->c[j]) < 1e-4)) kvf__bench_die("policy: sgemm's product is wrong");
    }
}

/* ---- Cases ---------------------------------------------------------------------------------------------------- */

static void measure(layer *x, const char *library, uint32_t n, bool prompt, int repetitions) {
    static kvf__bench_times parts[N_PARTS], floors, ratios;
    double s[N_PARTS], scale = prompt ? 1e3 : 1e6, row = HEADS * DIM * 2, n_evict = n - KEEP;
    check(x, n, prompt);
    floors.n = ratios.n = repetitions;
    for (int r = -1; r < repetitions; r++) { /* the first warms up */
        reset(x, n);
        event(x, prompt, s);
        double floor = library ? floor_seconds(x, n - KEEP) : NAN;
        for (int i = 0; i < N_PARTS && r >= 0; i++) {
            parts[i].n = repetitions;
            parts[i].s[r] = s[i];
        }
        if (r >= 0) floors.s[r] = floor, ratios.s[r] = s[WHOLE] / floor;
    }
    for (int i = 0; i < N_PARTS; i++) kvf__bench_sort(&parts[i]);
    kvf__bench_sort(&floors), kvf__bench_sort(&ratios);
    /* All keys, the evicted values, and both written where they are kept: what has to move at least. */
    double bytes = row * (n + n_evict + (prompt ? 4 * KEEP : 4 * n_evict));
    kvf__bench_begin(prompt ? "policy/compact" : "policy/evict", &parts[WHOLE], scale, prompt ? "ms" : "us",
                     kvf_stream_n_threads(x->stream), bytes);
    if (library) {
        kvf__bench_floor(scale * kvf__bench_quantile(&floors, .5), &ratios);
        kvf__bench_text("floor_by", library);
    }
    kvf__bench_text("policy", "d2o");
    kvf__bench_number("kv_heads", HEADS);
    kvf__bench_number("head_dim", DIM);
    kvf__bench_number("slots", n);
    kvf__bench_number("keep", KEEP);
    if (!prompt) kvf__bench_number("k", n_evict);
    kvf__bench_number("match", scale * kvf__bench_quantile(&parts[MATCH], .5));
    kvf__bench_number("gate", scale * kvf__bench_quantile(&parts[GATE], .5));
    kvf__bench_number("apply", scale * kvf__bench_quantile(&parts[APPLY], .5));
    kvf__bench_number("gflop_per_s", 2e-9 * HEADS * DIM * KEEP * n_evict / kvf__bench_quantile(&parts[WHOLE], .5));
    kvf__bench_end();
}

int kvf__bench_policy(int argc, char **argv) {
    int repetitions = 15, threads = 2, option;
    while ((option = getopt(argc, argv, "r:t:")) != -1) switch (option) {
        case 'r': repetitions = (int)kvf__bench_int("-r", optarg, 1, KVF__BENCH_MAX_REPETITIONS); break;
        case 't': threads = (int)kvf__bench_int("-t", optarg, 1, KVF__BENCH_MAX_THREADS); break;
        default: kvf__bench_die("policy [-r REPETITIONS] [-t THREADS]");
        }
    const char *library = kvf__bench_sgemm_open();
    for (int n = 1; n <= threads; n++) {
        layer *x = kvf__bench_take(sizeof *x);
        make(x, (uint32_t)n);
        if (library) check_floor(x);
        measure(x, library, PROMPT, true, repetitions);
        measure(x, library, KEEP + 1, false, repetitions);
        measure(x, library, KEEP + 16, false, repetitions);
        drop(x);
        free(x);
    }
    return 0;
}
