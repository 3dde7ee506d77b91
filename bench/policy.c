/* Measures what a policy does to layers of Llama-3-8B's shape: 8 KV heads of 128, fp16 pages, the policy d2o.
 *
 * kvfold-bench policy [-r REPETITIONS] [-t THREADS] [-a PATH] [-k K]. policy/compact: a prompt of 4,096 tokens becomes 819, by match, gate
 * and apply. The floor is the sgemm of the keys' products alone, evicted times kept, over floats that lie ready, in slices
 * whose results stay in cache. policy/evict: layers of 4,096 slots decode, each step with its attention; after k steps
 * one event evicts k from every layer; -k measures this alone, for one k. Its floor is reading the keys once and the products at sgemm's rate. What a ratio
 * compares runs in turns. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/layers.h"

enum { HEADS = KVF__BENCH_HEADS, DIM = KVF__BENCH_DIM, BLOCK = KVF__BENCH_BLOCK, N_PARTS = KVF__BENCH_N_PARTS };
enum { PROMPT = 4096, KEEP = 819, SLICE = 128 };     /* of compact */
enum { LAYERS = 16, SLOTS = 4096, MOST_EVICT = 16 }; /* of evict: 256 MiB of K and V */

typedef kvf__bench_layers layers;

static kvf_policy_options d2o(void) {
    kvf_error err = {.text = ""};
    kvf_policy_options o;
    if (kvf_policy_options_init(&o, sizeof o, "d2o", NULL, &err)) kvf__bench_die("policy: %s", err.text);
    o.n_full_layers = 0;
    if (kvf_policy_n_arrays(&o) != 1) kvf__bench_die("policy: d2o has more than one score array");
    return o;
}

/* ---- The check: by plain loops over the keys as they were ---------------------------------------------- */

typedef struct before {
    layers *x;
    unsigned char *memory; /* the pages as they were */
} before;

static double saved_cosine(const before *b, const kvf__head *h, uint32_t s, uint32_t t) {
    const uint16_t *x = (const void *)(b->memory + ((unsigned char *)kvf__k_row(h, s) - b->x->memory));
    const uint16_t *y = (const void *)(b->memory + ((unsigned char *)kvf__k_row(h, t) - b->x->memory));
    double dot = 0, xx = 0, yy = 0;
    for (int e = 0; e < DIM; e++) {
        double u = (double)kvf__f32_from_f16(x[e]), v = (double)kvf__f32_from_f16(y[e]);
        dot += u * v, xx += u * u, yy += v * v;
    }
    return dot / sqrt(xx * yy);
}

/* What the head's event evicted were the lowest scores outside the window, matched with the nearest kept keys; and the
 * kept positions are what the pages now hold: slots hold the position of their number. scores: [n], before the event. */
static void check_head(const before *b, uint32_t n, uint32_t keep, uint32_t kv_head, const double *scores) {
    static bool gone[SLOTS + MOST_EVICT], held[SLOTS + MOST_EVICT];
    const kvf_plan_event *pe = &b->x->plan->events[0];
    const kvf_plan_entry *entries = b->x->plan->entries + pe->entry_begin + (size_t)kv_head * pe->n_evict;
    uint32_t window_begin = n - kvf__policy_seq_get(b->x->state, 0)->sizes[0].window;
    kvf__head h = kvf__head_of(&b->x->view, &b->x->pages, 0, 0, kv_head);
    double highest_gone = 0, lowest_kept = INFINITY;
    if (pe->n_evict != n - keep) kvf__bench_die("policy: %u evicted, not %u", pe->n_evict, n - keep);
    memset(gone, 0, sizeof gone);
    memset(held, 0, sizeof held);
    for (uint32_t i = 0; i < pe->n_evict; i++) {
        uint32_t slot = entries[i].slot;
        if (slot >= window_begin || gone[slot]) kvf__bench_die("policy: slot %u was not to be evicted", slot);
        gone[slot] = true;
        highest_gone = fmax(highest_gone, scores[slot]);
    }
    for (uint32_t slot = b->x->options.sinks; slot < window_begin; slot++)
        if (!gone[slot]) lowest_kept = fmin(lowest_kept, scores[slot]);
    if (highest_gone > lowest_kept + 1e-5) kvf__bench_die("policy: a higher score was evicted than one that was kept");
    for (uint32_t i = 0; i < pe->n_evict; i += 1 + pe->n_evict / 16) {
        double best = -2;
        for (uint32_t slot = 0; slot < n; slot++)
            if (!gone[slot]) best = fmax(best, saved_cosine(b, &h, entries[i].slot, slot));
        if (entries[i].target >= n || gone[entries[i].target] ||
            !(fabs(saved_cosine(b, &h, entries[i].slot, entries[i].target) - best) < 1e-5) ||
            !(fabs((double)entries[i].u - best) < 1e-5))
            kvf__bench_die("policy: slot %u was not matched with its nearest key", entries[i].slot);
    }
    for (uint32_t slot = 0; slot < keep; slot++) {
        uint32_t pos = b->x->pages.pos[kvf__slot_index(&h, slot)];
        if (pos >= n || gone[pos] || held[pos]) kvf__bench_die("policy: slot %u holds position %u", slot, pos);
        held[pos] = true;
    }
}

/* One layer of n slots, compacted to keep. */
static void check(layers *x, uint32_t n, uint32_t keep, kvf_event_kind kind) {
    static double scores[SLOTS + MOST_EVICT];
    double parts[N_PARTS];
    kvf_policy_options o = d2o();
    kvf__bench_layers_fill(x, n, n);
    kvf__bench_layers_open(x, &o, keep);
    before b = {x, kvf__bench_take(x->memory_bytes)};
    memcpy(b.memory, x->memory, x->memory_bytes);
    kvf__bench_layers_event(x, keep, kind, parts);
    for (uint32_t h = 0; h < HEADS; h++) {
        kvf__head head = kvf__head_of(&x->view, &x->pages, 0, 0, h);
        for (uint32_t slot = 0; slot < n; slot++) {
            scores[slot] = 0;
            for (uint32_t q = 0; kind == KVF_EVENT_PROMPT && q < KVF__BENCH_PER_KV; q++)
                scores[slot] += (double)x->sums[0][(size_t)(h * KVF__BENCH_PER_KV + q) * x->max_slots + slot];
            size_t at = (size_t)((unsigned char *)kvf__score_at(&head, &x->scores, 0, slot) - x->memory);
            if (kind == KVF_EVENT_DECODE) scores[slot] = (double)*(const float *)(const void *)(b.memory + at);
        }
        check_head(&b, n, keep, h, scores);
    }
    free(b.memory);
}

/* ---- The floors --------------------------------------------------------------------------------------------- */

static struct {
    const char *library;
    float *a, *b, *c; /* [HEADS][PROMPT][DIM] twice, [threads][SLICE][KEEP] */
} gemm;
enum { EVICTED = PROMPT - KEEP, N_SLICES = (EVICTED + SLICE - 1) / SLICE };

static void product(void *ctx, uint32_t item, uint32_t thread) {
    uint32_t row = item % N_SLICES * SLICE, m = KVF__MIN((uint32_t)EVICTED - row, (uint32_t)SLICE);
    size_t head = (size_t)(item / N_SLICES) * PROMPT * DIM;
    (void)ctx;
    kvf__bench_sgemm((int)m, KEEP, DIM, gemm.a + head + (size_t)row * DIM, gemm.b + head,
                     gemm.c + (size_t)thread * SLICE * KEEP);
}

/* Seconds of a compaction's products, NaN without a library. */
static double gemm_seconds(kvf_stream *stream) {
    if (!gemm.library) return NAN;
    double t = kvf__clock();
    kvf__stream_for(stream, HEADS * N_SLICES, product, NULL);
    return kvf__clock() - t;
}
static double gemm_rate(kvf_stream *stream) { return 2.0 * HEADS * EVICTED * KEEP * DIM / gemm_seconds(stream); }

static void open_gemm(int n_threads) {
    const size_t n = (size_t)HEADS * PROMPT * DIM;
    uint64_t random = 5;
    gemm.library = kvf__bench_sgemm_open();
    gemm.a = kvf__bench_take(n * sizeof(float));
    gemm.b = kvf__bench_take(n * sizeof(float));
    gemm.c = kvf__bench_take((size_t)n_threads * SLICE * KEEP * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        gemm.a[i] = kvf__bench_uniform(&random);
        gemm.b[i] = kvf__bench_uniform(&random);
    }
    if (!gemm.library) return;
    const float *a = gemm.a + (HEADS - 1) * (size_t)PROMPT * DIM, *b = gemm.b + (HEADS - 1) * (size_t)PROMPT * DIM;
    product(NULL, (HEADS - 1) * N_SLICES, 0);
    for (size_t j = 0; j < KEEP; j++) {
        double want = 0;
        for (size_t e = 0; e < DIM; e++) want += (double)a[e] * (double)b[j * DIM + e];
        if (!(fabs(want - (double)gemm.c[j]) < 1e-4)) kvf__bench_die("policy: sgemm's product is wrong");
    }
}

enum { SHARE = 1 << 18, WORDS = 4, SUMS = 8 };
static volatile uint64_t sink;

/* As wide as the CPU's registers are, so that nothing but memory is measured. */
static inline __attribute__((always_inline)) void read_wide(const unsigned char *from) {
    typedef uint64_t wide __attribute__((vector_size(WORDS * 8), aligned(8), may_alias));
    wide sum[SUMS] = {{0}};
    for (size_t at = 0; at < SHARE; at += sizeof sum)
        for (size_t i = 0; i < SUMS; i++) sum[i] ^= *(const wide *)(const void *)(from + at + i * sizeof *sum);
    for (size_t i = 1; i < SUMS; i++) sum[0] ^= sum[i];
    for (size_t i = 0; i < WORDS; i++) sink = sum[0][i];
}
#if defined(__x86_64__)
__attribute__((target("avx2"))) static void read_avx2(const unsigned char *from) { read_wide(from); }
#endif

static void read_share(void *ctx, uint32_t item, uint32_t thread) {
    const unsigned char *from = (const unsigned char *)ctx + (size_t)item * SHARE;
    (void)thread;
#if defined(__x86_64__)
    if (kvf__cpu_detect().avx2_fma_f16c) {
        read_avx2(from);
        return;
    }
#endif
    read_wide(from);
}

/* Bytes a second over all keys. */
static double read_rate(layers *x) {
    uint32_t n = (uint32_t)((size_t)x->pages.k_block_stride * x->pages.n_blocks / SHARE);
    double t = kvf__clock();
    kvf__stream_for(x->stream, n, read_share, x->pages.k);
    return (double)n * SHARE / (kvf__clock() - t);
}

/* ---- Cases ---------------------------------------------------------------------------------------------------- */

static kvf__bench_times parts[N_PARTS], whole, floors, ratios;

static void note(int r, const double p[N_PARTS], double scale, double floor) {
    double sum = 0;
    for (int i = 0; i < N_PARTS; i++) {
        sum += p[i] * scale;
        if (r >= 0) parts[i].s[r] = p[i] * scale;
    }
    if (r >= 0) whole.s[r] = sum, floors.s[r] = floor, ratios.s[r] = sum / floor;
}

static void begin(const char *name, layers *x, double scale, const char *unit, double bytes) {
    for (int i = 0; i < N_PARTS; i++) kvf__bench_sort(&parts[i]);
    kvf__bench_sort(&whole), kvf__bench_sort(&floors), kvf__bench_sort(&ratios);
    kvf__bench_begin(name, &whole, scale, unit, kvf_stream_n_threads(x->stream), bytes);
    if (gemm.library) {
        kvf__bench_floor(scale * kvf__bench_quantile(&floors, .5), &ratios);
        kvf__bench_text("floor_by", gemm.library);
    }
    kvf__bench_text("policy", "d2o");
    kvf__bench_text("path", kvf__bench_layers_path(NULL));
    kvf__bench_number("kv_heads", HEADS);
    kvf__bench_number("head_dim", DIM);
    kvf__bench_number("match", scale * kvf__bench_quantile(&parts[KVF__BENCH_MATCH], .5));
    kvf__bench_number("gate", scale * kvf__bench_quantile(&parts[KVF__BENCH_GATE], .5));
    kvf__bench_number("apply", scale * kvf__bench_quantile(&parts[KVF__BENCH_APPLY], .5));
}

static void set_repetitions(int n) {
    for (int i = 0; i < N_PARTS; i++) parts[i].n = n;
    whole.n = floors.n = ratios.n = n;
}

static void compact_case(layers *x, int repetitions) {
    const double row = HEADS * DIM * 2;
    double p[N_PARTS];
    kvf_policy_options o = d2o();
    check(x, PROMPT, KEEP, KVF_EVENT_PROMPT);
    kvf__bench_layers_fill(x, PROMPT, PROMPT);
    unsigned char *saved = kvf__bench_take(x->memory_bytes);
    memcpy(saved, x->memory, x->memory_bytes);
    set_repetitions(repetitions);
    for (int r = -1; r < repetitions; r++) { /* the first warms up */
        memcpy(x->memory, saved, x->memory_bytes);
        x->n_slots[0] = PROMPT;
        kvf__bench_layers_open(x, &o, KEEP);
        kvf__bench_layers_event(x, KEEP, KVF_EVENT_PROMPT, p);
        note(r, p, 1, gemm_seconds(x->stream));
    }
    free(saved);
    /* All keys, the evicted values, and both written where they are kept: what has to move at least. */
    begin("policy/compact", x, 1e3, "ms", row * (PROMPT + EVICTED + 4 * KEEP));
    kvf__bench_number("slots", PROMPT);
    kvf__bench_number("keep", KEEP);
    kvf__bench_number("gflop_per_s", 2e-9 * HEADS * DIM * KEEP * EVICTED / kvf__bench_quantile(&whole, .5));
    kvf__bench_end();
}

/* Steps of all layers, as an engine runs them: the attention of each, then what the policy sees; after k of them the
 * events of all in one batch. All times are a layer's. */
static void evict_case(layers *x, uint32_t k, int repetitions) {
    static kvf__bench_times attention, observe;
    const double key_bytes = (double)SLOTS * HEADS * DIM * 2, flop = 2.0 * k * SLOTS * HEADS * DIM;
    double p[N_PARTS];
    kvf_policy_options o = d2o();
    o.evict_every = k;
    kvf__bench_layers_fill(x, SLOTS, SLOTS);
    kvf__bench_layers_open(x, &o, SLOTS);
    set_repetitions(repetitions);
    attention.n = observe.n = repetitions;
    for (int r = -1; r < repetitions; r++) {
        double attended = 0, observed = 0;
        for (uint32_t step = 0; step < k; step++) {
            kvf__bench_layers_append(x);
            for (uint32_t l = 0; l < LAYERS; l++) {
                attended += kvf__bench_layers_attend(x, l, 1, kvf_policy_needs(&o));
                observed += kvf__bench_layers_observe(x, l);
            }
        }
        kvf__bench_layers_event(x, SLOTS, KVF_EVENT_DECODE, p);
        note(r, p, 1.0 / LAYERS, key_bytes / read_rate(x) + flop / gemm_rate(x->stream));
        if (r >= 0) attention.s[r] = attended / (LAYERS * k), observe.s[r] = observed / (LAYERS * k);
    }
    kvf__bench_times shares = whole;
    for (int r = 0; r < repetitions; r++) shares.s[r] = whole.s[r] / k / attention.s[r];
    kvf__bench_sort(&shares), kvf__bench_sort(&attention), kvf__bench_sort(&observe);
    begin("policy/evict", x, 1e6, "us", key_bytes + 6.0 * k * HEADS * DIM * 2);
    kvf__bench_number("slots", SLOTS);
    kvf__bench_number("layers", LAYERS);
    kvf__bench_number("k", k);
    kvf__bench_number("per_step", 1e6 * kvf__bench_quantile(&whole, .5) / k);
    kvf__bench_number("attention", 1e6 * kvf__bench_quantile(&attention, .5));
    kvf__bench_number("of_attention", kvf__bench_quantile(&shares, .5));
    kvf__bench_number("observe", 1e6 * kvf__bench_quantile(&observe, .5));
    kvf__bench_number("gflop_per_s", 1e-9 * flop / kvf__bench_quantile(&whole, .5));
    kvf__bench_end();
}

int kvf__bench_policy(int argc, char **argv) {
    int repetitions = 15, threads = 2, only = 0, option;
    while ((option = getopt(argc, argv, "r:t:a:k:p:")) != -1) switch (option) {
        case 'r': repetitions = (int)kvf__bench_int("-r", optarg, 1, KVF__BENCH_MAX_REPETITIONS); break;
        case 't': threads = (int)kvf__bench_int("-t", optarg, 1, KVF__BENCH_MAX_THREADS); break;
        case 'a': kvf__bench_layers_path(optarg); break;
        case 'k': only = (int)kvf__bench_int("-k", optarg, 1, MOST_EVICT); break;
        case 'p': return 0; /* the shares of some policies alone */
        default: kvf__bench_die("policy [-r REPETITIONS] [-t THREADS] [-a PATH] [-k K] [-p POLICY[:PRESET],...]");
        }
    open_gemm(threads);
    for (int n = 1; n <= threads; n++) {
        layers *x = kvf__bench_layers_create(1, SLOTS + BLOCK, 2, EVICTED, (uint32_t)n);
        if (!only) compact_case(x, repetitions);
        for (uint32_t k = 1; k <= MOST_EVICT; k += MOST_EVICT - 1)
            check(x, SLOTS + (only ? (uint32_t)only : k), SLOTS, KVF_EVENT_DECODE);
        kvf__bench_layers_destroy(x);
        x = kvf__bench_layers_create(LAYERS, SLOTS + BLOCK, 1, MOST_EVICT, (uint32_t)n);
        for (uint32_t k = 1; k <= MOST_EVICT; k += MOST_EVICT - 1)
            if (!only || k == 1) evict_case(x, only ? (uint32_t)only : k, repetitions);
        kvf__bench_layers_destroy(x);
    }
    free(gemm.a);
    free(gemm.b);
    free(gemm.c);
    return 0;
}
