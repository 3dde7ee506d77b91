/* Measures paged attention: decode against a read bandwidth of the same minute, prefill in GFLOP/s.
 *
 * kvfold-bench-attention [REPETITIONS [THREADS [HUGE]]]: one JSON line a case; HUGE 1 asks for huge pages. What a
 * ratio compares runs in turns, since machines are shared. Each case is checked against the reference first. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/base.h"
#include "kvfold/attention.h"

#ifndef KVF_BENCH_COMMIT
#define KVF_BENCH_COMMIT "unknown"
#endif
#ifndef KVF_BENCH_FLAGS
#define KVF_BENCH_FLAGS __VERSION__
#endif

enum { BLOCK = 16, CONTEXT = 4096, CHUNK = 512, CHECKED_TOKENS = 2, MAX_REPETITIONS = 101 };
static const size_t WORKING_SET = (size_t)256 << 20;

/* A model's shape with its pages, as many sequences as fill the working set, and one call over them. */
typedef struct bench {
    uint32_t n_kv, per_kv, d, n_seqs, n_tokens; /* n_tokens: query rows of a sequence */
    size_t kv_bytes;                            /* K and V of all sequences */
    unsigned char *kv;
    uint32_t *rows, *n_slots, *q_begin;
    uint64_t *row_offset;
    float *q, *out, *row, *cols, **col_sums;
    kvf_pages pages;
    kvf_view view;
    kvf_mass mass;
    kvf_attention a;
} bench;

static char cpu_name[128] = "unknown";
static bool huge_pages;

static void die(const char *what) {
    fprintf(stderr, "kvfold-bench-attention: %s\n", what);
    exit(1);
}
static void *take(size_t bytes) {
    const size_t huge = (size_t)2 << 20, align = bytes >= huge ? huge : 64;
    void *p = aligned_alloc(align, (bytes + align - 1) / align * align);
    if (!p) die("out of memory");
    if (huge_pages && align == huge && madvise(p, bytes, MADV_HUGEPAGE)) die("this system has no huge pages");
    memset(p, 0, bytes); /* touched before anything is timed */
    return p;
}
static float uniform(uint64_t *state) { /* [-1, 1) */
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 40) * 0x1p-23 - 1);
}

static bench make(uint32_t n_kv, uint32_t per_kv, uint32_t d, uint32_t n_seqs, uint32_t n_tokens) {
    bench b = {.n_kv = n_kv, .per_kv = per_kv, .d = d, .n_seqs = n_seqs, .n_tokens = n_tokens};
    uint32_t per_seq = CONTEXT / BLOCK, n_blocks = n_seqs * per_seq;
    uint64_t state = 1;
    size_t half = (size_t)n_kv * BLOCK * d * 2, n_q = (size_t)n_seqs * n_tokens * n_kv * per_kv * d;
    b.kv_bytes = n_blocks * half * 2;
    b.kv = take(b.kv_bytes);
    for (size_t i = 0; i < b.kv_bytes / 2; i++) ((uint16_t *)(void *)b.kv)[i] = kvf__f16_from_f32(uniform(&state));
    b.rows = take(n_blocks * sizeof *b.rows);
    b.n_slots = take(n_seqs * sizeof *b.n_slots);
    b.q_begin = take((n_seqs + 1) * sizeof *b.q_begin);
    b.row_offset = take(n_seqs * sizeof *b.row_offset);
    for (uint32_t i = 0; i < n_blocks; i++) b.rows[i] = i;
    for (uint32_t i = n_blocks - 1; i > 0; i--) { /* tables are not in the order of memory */
        uint32_t j = (uint32_t)((double)(uniform(&state) * 0.5f + 0.5f) * i), t = b.rows[i];
        b.rows[i] = b.rows[j];
        b.rows[j] = t;
    }
    for (uint32_t i = 0; i < n_seqs; i++) {
        b.n_slots[i] = CONTEXT;
        b.row_offset[i] = (uint64_t)i * per_seq;
        b.q_begin[i + 1] = b.q_begin[i] + n_tokens;
    }
    b.q = take(n_q * sizeof *b.q);
    b.out = take(n_q * sizeof *b.out);
    for (size_t i = 0; i < n_q; i++) b.q[i] = uniform(&state);
    b.row = take((size_t)n_seqs * n_kv * CONTEXT * sizeof *b.row);
    b.cols = take((size_t)n_kv * per_kv * CONTEXT * sizeof *b.cols);
    b.col_sums = take(n_seqs * sizeof *b.col_sums);
    for (uint32_t i = 0; i < n_seqs; i++) b.col_sums[i] = b.cols;
    return b;
}

/* Points the structs at one another: after b has its final address. */
static void wire(bench *b, uint32_t n_threads) {
    size_t half = b->kv_bytes / 2, width = (size_t)b->n_kv * b->per_kv * b->d;
    b->pages = (kvf_pages){.struct_size = sizeof b->pages,
                           .dtype = KVF_F16,
                           .n_blocks = b->n_seqs * (CONTEXT / BLOCK),
                           .block_size = BLOCK,
                           .heads_per_group = b->n_kv,
                           .head_dim = b->d,
                           .k = b->kv,
                           .v = b->kv + half};
    b->pages.k_block_stride = b->pages.v_block_stride = half / b->pages.n_blocks;
    b->view = (kvf_view){.struct_size = sizeof b->view,
                         .n_seqs = b->n_seqs,
                         .n_layers = 1,
                         .n_groups = 1,
                         .heads_per_group = b->n_kv,
                         .block_size = BLOCK,
                         .rows = b->rows,
                         .row_offset = b->row_offset,
                         .n_slots = b->n_slots};
    b->a = (kvf_attention){.struct_size = sizeof b->a,
                           .view = &b->view,
                           .pages = &b->pages,
                           .seq_end = b->n_seqs,
                           .n_q_heads = b->n_kv * b->per_kv,
                           .q_begin = b->q_begin,
                           .q = b->q,
                           .q_stride = width,
                           .out = b->out,
                           .out_stride = width};
    if (kvf_attention_workspace_bytes(n_threads, b->d, b->a.n_q_heads, b->n_kv, CONTEXT, b->n_seqs,
                                      b->n_seqs * b->n_tokens, &b->a.workspace_bytes))
        die("workspace size");
    b->a.workspace = take(b->a.workspace_bytes);
}

static void drop(bench *b) {
    void *all[] = {b->kv, b->rows, b->n_slots, b->q_begin, b->row_offset, b->q, b->out, b->row, b->cols, b->col_sums};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void want_mass(bench *b, bool wanted) {
    b->mass = (kvf_mass){.struct_size = sizeof b->mass,
                         .row = b->row,
                         .row_stride = CONTEXT,
                         .col_sums = b->col_sums,
                         .col_stride = CONTEXT};
    b->a.mass = wanted ? &b->mass : NULL;
}

static void run_case(kvf_stream *stream, bench *b) {
    kvf_error err = {""};
    kvf_status st =
        b->n_tokens == 1 ? kvf_attention_decode(stream, &b->a, &err) : kvf_attention_prefill(stream, &b->a, &err);
    if (st) die(err.text);
}

/* The newest tokens of the first sequence against the reference, outputs and (decode) mass. */
static void check(kvf_stream *stream, bench *b) {
    uint32_t n = KVF__MIN(b->n_tokens, (uint32_t)CHECKED_TOKENS);
    size_t width = b->a.out_stride, skip = (b->n_tokens - n) * width, n_row = (size_t)b->n_kv * CONTEXT;
    want_mass(b, true);
    run_case(stream, b);
    float *want = take(n * width * sizeof *want), *want_row = take(n_row * sizeof *want_row);
    bench ref = *b;
    uint32_t q_begin[] = {0, n};
    ref.n_tokens = n;
    ref.mass = (kvf_mass){.struct_size = sizeof ref.mass, .row = want_row, .row_stride = CONTEXT};
    ref.a.mass = &ref.mass;
    ref.a.q = b->q + skip;
    ref.a.out = want;
    ref.a.q_begin = q_begin;
    ref.a.seq_end = 1;
    ref.a.path = KVF_CPU_REF;
    run_case(NULL, &ref);
    for (size_t i = 0; i < n * width; i++)
        if (!(fabsf(want[i] - b->out[skip + i]) <= 1e-5f)) die("the output is not that of the reference");
    for (size_t i = 0; b->n_tokens == 1 && i < n_row; i++)
        if (!(fabsf(want_row[i] - b->row[i]) <= 1e-5f)) die("the mass is not that of the reference");
    if (b->n_tokens > 1) { /* every query gives each head 1 */
        double sum = 0;
        for (size_t i = 0; i < CONTEXT; i++) sum += (double)b->cols[i];
        if (!(fabs(sum - CHUNK) < 1e-2)) die("the column sums do not add up");
    }
    free(want);
    free(want_row);
}

/* ---- Read bandwidth ------------------------------------------------------------------------- */

typedef struct reader {
    const uint64_t *words;
    size_t n, share;
    uint64_t sums[1024];
} reader;
static volatile uint64_t sink;

static void read_share(void *ctx, uint32_t item, uint32_t thread) {
    reader *r = ctx;
    uint64_t s[8] = {0};
    size_t begin = item * r->share, end = KVF__MIN(begin + r->share, r->n);
    for (size_t i = begin; i + 8 <= end; i += 8)
        for (int j = 0; j < 8; j++) s[j] += r->words[i + (size_t)j];
    for (int j = 0; j < 8; j++) r->sums[thread] += s[j];
}

static double read_seconds(kvf_stream *stream, const bench *b) {
    reader r = {(const uint64_t *)(const void *)b->kv, b->kv_bytes / 8, 1 << 16, {0}};
    double t = kvf__clock();
    kvf__stream_for(stream, (uint32_t)((r.n + r.share - 1) / r.share), read_share, &r);
    t = kvf__clock() - t;
    for (int i = 0; i < 1024; i++) sink += r.sums[i];
    return t;
}

/* ---- Timing --------------------------------------------------------------------------------- */

typedef struct times {
    double s[MAX_REPETITIONS];
    int n;
} times;

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double quantile(const times *t, double q) { return t->s[(int)(q * (t->n - 1) + 0.5)]; }

static double timed(kvf_stream *stream, bench *b, bool mass) {
    want_mass(b, mass);
    double t = kvf__clock();
    run_case(stream, b);
    return kvf__clock() - t;
}

static void print_head(const bench *b, const char *name, uint32_t n_threads, bool mass, const times *t) {
    printf("{\"bench\": \"attention\", \"case\": \"%s\", \"commit\": \"%s\", \"cpu\": \"%s\", \"flags\": \"%s\", ",
           name, KVF_BENCH_COMMIT, cpu_name, KVF_BENCH_FLAGS);
    printf(
        "\"path\": \"%s\", \"threads\": %u, \"huge_pages\": %s, \"kv_heads\": %u, \"per_kv\": %u, \"head_dim\": %u, ",
        kvf_cpu_has_path(KVF_CPU_AVX2) ? "avx2" : "scalar", n_threads, huge_pages ? "true" : "false", b->n_kv,
        b->per_kv, b->d);
    printf("\"dtype\": \"fp16\", \"block_size\": %d, \"seqs\": %u, \"queries\": %u, \"slots\": %d, \"mass\": %s, ",
           BLOCK, b->n_seqs, b->n_tokens, CONTEXT, mass ? "true" : "false");
    printf("\"repetitions\": %d, \"ms_median\": %.3f, \"ms_p5\": %.3f, \"ms_p95\": %.3f, ", t->n, 1e3 * quantile(t, .5),
           1e3 * quantile(t, .05), 1e3 * quantile(t, .95));
}

static void decode_case(kvf_stream *stream, bench *b, int repetitions) {
    times plain = {.n = repetitions}, mass = plain, reads = plain;
    uint32_t n_threads = kvf_stream_n_threads(stream);
    wire(b, n_threads);
    check(stream, b);
    for (int i = 0; i < repetitions; i++) {
        reads.s[i] = read_seconds(stream, b);
        plain.s[i] = timed(stream, b, false);
        mass.s[i] = timed(stream, b, true);
    }
    times *all[] = {&reads, &plain, &mass};
    for (int i = 0; i < 3; i++) qsort(all[i]->s, (size_t)repetitions, sizeof(double), ascending);
    double bytes = (double)b->kv_bytes, read_rate = bytes / quantile(&reads, .5) / 1e9;
    for (int m = 0; m < 2; m++) {
        double rate = bytes / quantile(m ? &mass : &plain, .5) / 1e9;
        print_head(b, "decode", n_threads, m, m ? &mass : &plain);
        printf("\"bytes\": %.0f, \"gb_per_s\": %.2f, \"read_gb_per_s\": %.2f, \"share\": %.3f}\n", bytes, rate,
               read_rate, rate / read_rate);
    }
    fflush(stdout);
    free(b->a.workspace);
}

static void prefill_case(kvf_stream *stream, bench *b, int repetitions) {
    times plain = {.n = repetitions}, mass = plain;
    uint32_t n_threads = kvf_stream_n_threads(stream);
    wire(b, n_threads);
    check(stream, b);
    for (int i = 0; i < repetitions; i++) {
        plain.s[i] = timed(stream, b, false);
        mass.s[i] = timed(stream, b, true);
    }
    qsort(plain.s, (size_t)repetitions, sizeof(double), ascending);
    qsort(mass.s, (size_t)repetitions, sizeof(double), ascending);
    double pairs = 0;
    for (int t = 0; t < CHUNK; t++) pairs += CONTEXT - CHUNK + t + 1;
    pairs *= (double)b->n_seqs * b->n_kv * b->per_kv;
    for (int m = 0; m < 2; m++) { /* products with K and V, and with K again for the column sums */
        double flop = pairs * b->d * (m ? 6 : 4);
        print_head(b, "prefill", n_threads, m, m ? &mass : &plain);
        printf("\"bytes\": %.0f, \"gflop\": %.3f, \"gflop_per_s\": %.2f}\n", (double)b->kv_bytes, flop / 1e9,
               flop / 1e9 / quantile(m ? &mass : &plain, .5));
    }
    fflush(stdout);
    free(b->a.workspace);
}

static void read_cpu_name(void) {
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %127[^\n\"\\]", cpu_name) == 1) break;
    if (f) fclose(f);
}

int main(int argc, char **argv) {
    static const uint32_t shapes[][3] = {{8, 1, 128}, {8, 4, 128}, {8, 8, 128}, {3, 3, 64}}; /* the last is SmolLM2's */
    int repetitions = argc > 1 ? atoi(argv[1]) : 9, threads = argc > 2 ? atoi(argv[2]) : 2;
    if (repetitions < 1 || repetitions > MAX_REPETITIONS || threads < 1) die("REPETITIONS: 1..101, THREADS: 1 or more");
    huge_pages = argc > 3 && atoi(argv[3]);
    read_cpu_name();
    for (int n = 1; n <= threads; n++) {
        kvf_stream *stream;
        if (kvf_stream_create_cpu(NULL, (uint32_t)n, &stream, NULL)) die("threads cannot be started");
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            const uint32_t *s = shapes[i];
            size_t per_seq = (size_t)s[0] * s[2] * 4 * CONTEXT;
            bench b = make(s[0], s[1], s[2], (uint32_t)((WORKING_SET + per_seq - 1) / per_seq), 1);
            decode_case(stream, &b, repetitions);
            drop(&b);
            b = make(s[0], s[1], s[2], 1, CHUNK);
            prefill_case(stream, &b, repetitions);
            drop(&b);
        }
        kvf_stream_destroy(stream);
    }
    return 0;
}
