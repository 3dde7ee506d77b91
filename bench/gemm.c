/* Measures the products of a forward pass with weights in fp32, through OpenBLAS and oneDNN, and as model/gemm.c computes
 * them from Q4_1: docs/decisions/002-blas.md and 005-quantised-weights.md quote them.
 *
 * kvfold-bench model/gemm [REPETITIONS [MAX_ROWS [WAY...]]]: one JSON line for each way (or those named), number of rows and
 * number of threads. Shapes are those of SmolLM2-135M: the four products of 30 layers, each with weights of its own, and
 * the output head. Both libraries are opened at run time; one that is not installed is left out. The ways run in turns,
 * since machines are shared, and each is checked against a plain loop before it is timed. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench/json.h"
#include "model/fast.h"
#include "model/gemm.h"
#include "model/gemv.h"
#include "model/gguf.h"

enum { LAYERS = 30, N_SHAPES = 4, HEAD_ROWS = 49152, EMBD = 576, MAX_ROWS = 512, MAX_WIDTH = 3072 };
static const uint32_t shapes[N_SHAPES][2] = {{960, EMBD}, {EMBD, EMBD}, {3072, EMBD}, {EMBD, 1536}}; /* n, k */

/* How a product reaches a library: in one call that shares it out itself, or in slices from our threads. */
typedef enum way {
    BLAS_GEMV,
    BLAS_WHOLE,
    BLAS_SLICED,
    DNNL_WHOLE,
    DNNL_SLICED,
    Q_ROWS,
    Q_ROWS_AVX2,
    Q_SLICES,
    Q_TILES,
    Q_TILES_AVX2,
    Q_FAST,
    Q_FAST_AVXVNNI,
    Q_FAST_AVX2,
    READ, /* of the fp32 weights */
    Q_READ,
    N_WAYS
} way;
static const char *const way_names[N_WAYS] = {
    "openblas gemv", "openblas whole",    "openblas sliced", "onednn whole", "onednn sliced",
    "q4_1 rows",     "q4_1 rows avx2",    "q4_1 slices",     "q4_1 tiles",   "q4_1 tiles avx2",
    "q4_1 fast",     "q4_1 fast avxvnni", "q4_1 fast avx2",  "read",         "q4_1 read"};
static bool wanted[N_WAYS];
enum { Q_BLOCK = 32, Q_BYTES = 20 };

/* CBLAS numbers its arguments: 101 row major, 111 as it is, 112 transposed. */
static struct {
    void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
    void (*sgemv)(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
    void (*blas_threads)(int);
    const char *(*blas_config)(void);
    int (*dnnl)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float,
                float *, int64_t);
    void (*omp_threads)(int);
} lib;

static float *weights, *x, *y, *scratch, *quantised_x;
static unsigned char *quantised;             /* the same weights */
enum { SCRATCH = 1 << 19, MAX_THREADS = 2 }; /* floats of a thread */
static size_t layer_floats;                  /* of all layers; the head follows */
static volatile float sink;

#define die kvf__bench_die

static void *symbol(void *library, const char *name) { return library ? dlsym(library, name) : NULL; }

/* Converts a data pointer into one to a function, which ISO C has no cast for. */
#define FIND(to, library, name)          \
    do {                                 \
        void *p = symbol(library, name); \
        memcpy(&(to), &p, sizeof p);     \
    } while (0)

static void open_libraries(void) {
    void *blas = dlopen("libopenblas.so.0", RTLD_NOW), *dnnl = dlopen("libdnnl.so.2", RTLD_NOW);
    if (!dnnl) dnnl = dlopen("libdnnl.so.3", RTLD_NOW);
    FIND(lib.sgemm, blas, "cblas_sgemm");
    FIND(lib.sgemv, blas, "cblas_sgemv");
    FIND(lib.blas_threads, blas, "openblas_set_num_threads");
    FIND(lib.blas_config, blas, "openblas_get_config");
    FIND(lib.dnnl, dnnl, "dnnl_sgemm");
    FIND(lib.omp_threads, dnnl, "omp_set_num_threads"); /* of the OpenMP that it was linked with */
}

static bool have(way w, uint32_t rows) {
    if (w == READ || w == Q_READ) return true;
    if (!wanted[w]) return false;
    if (w == Q_ROWS || w == Q_SLICES || w == Q_TILES) return true;
    if (w == Q_FAST) return true;
    if (w == Q_FAST_AVXVNNI) return kvf__cpu_detect().avx512_vnni && kvf__cpu_detect().avx_vnni;
    if (w == Q_FAST_AVX2) return kvf__cpu_detect().avx512_vnni || kvf__cpu_detect().avx_vnni;
    if (w == Q_ROWS_AVX2 || w == Q_TILES_AVX2) return kvf__cpu_detect().avx512; /* else it is the one before */
    if (w == BLAS_GEMV) return lib.sgemv && lib.blas_threads && rows == 1;
    return w == BLAS_WHOLE || w == BLAS_SLICED ? lib.sgemm && lib.blas_threads : lib.dnnl && lib.omp_threads;
}

/* ---- One product ----------------------------------------------------------------------------- */

typedef struct product {
    way w;
    uint32_t m, n, k, columns, rows, n_column_slices;
    const float *weight;
} product;

static void call(const product *p, uint32_t row, uint32_t m, uint32_t column, uint32_t n) {
    const float *a = x + (size_t)row * p->k, *b = p->weight + (size_t)column * p->k;
    float *c = y + (size_t)row * p->n + column;
    int k = (int)p->k;
    if (p->w == BLAS_GEMV) {
        lib.sgemv(101, 111, (int)n, k, 1, b, k, a, 1, 0, c, 1);
    } else if (p->w == BLAS_WHOLE || p->w == BLAS_SLICED) {
        lib.sgemm(101, 111, 112, (int)m, (int)n, k, 1, a, k, b, k, 0, c, (int)p->n);
    } else if (p->w != READ) {
        if (p->w == DNNL_SLICED) lib.omp_threads(1); /* the thread's own */
        if (lib.dnnl('N', 'T', m, n, k, 1, a, k, b, k, 0, c, p->n)) die("dnnl_sgemm failed");
    } else {
        float s[16] = {0};
        for (size_t i = 0; i < (size_t)n * p->k; i += 16)
            for (size_t j = 0; j < 16; j++) s[j] += b[i + j];
        for (int j = 0; j < 16; j++) c[0] += s[j];
    }
}

/* Sums of words, as fast as memory gives them. */
static void read_quantised(void *ctx, uint32_t item, uint32_t thread) {
    const product *p = ctx;
    uint64_t sum[8] = {0}, word;
    (void)thread;
    uint32_t begin = item * p->columns, end = KVF__MIN(begin + p->columns, p->n);
    size_t row = p->k / Q_BLOCK * Q_BYTES;
    const unsigned char *from = quantised + (size_t)(p->weight - weights) / Q_BLOCK * Q_BYTES;
    for (size_t i = begin * row; i + 64 <= end * row; i += 64)
        for (size_t j = 0; j < 8; j++) memcpy(&word, from + i + 8 * j, 8), sum[j] += word;
    y[begin] = (float)(sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7]);
}

static void run_quantised(kvf_stream *stream, const product *p) {
    size_t row = p->k / Q_BLOCK * Q_BYTES;
    kvf__matrix w = {.n_parts = 1, .n = p->n, .k = p->k};
    w.parts[0].type = KVF__TENSOR_Q4_1;
    w.parts[0].n_rows = p->n;
    w.parts[0].data = quantised + (size_t)(p->weight - weights) / Q_BLOCK * Q_BYTES;
    w.parts[0].row_bytes = row;
    kvf__cpu cpu = kvf__cpu_detect();
    if (p->w == Q_ROWS_AVX2 || p->w == Q_TILES_AVX2 || p->w > Q_FAST) cpu.avx512 = false;
    if (p->w == Q_FAST_AVX2) cpu.avx_vnni = false;
    kvf__gemm g = {.m = p->m,
                   .w = &w,
                   .x = x,
                   .y = y,
                   .x_stride = p->k,
                   .y_stride = p->n,
                   .way = p->w == Q_SLICES                          ? KVF__GEMM_SLICES
                          : p->w == Q_TILES || p->w == Q_TILES_AVX2 ? KVF__GEMM_TILES
                                                                    : KVF__GEMM_ROWS,
                   .ops = kvf__gemv_ops_for(cpu),
                   .fast = p->w >= Q_FAST ? kvf__fast_ops_for(cpu) : NULL,
                   .quantised = quantised_x,
                   .scratch = scratch,
                   .scratch_floats = SCRATCH};
    if (kvf__gemm_scratch_floats(&w) > SCRATCH || kvf__gemm_run(stream, &g)) die("kvf__gemm_run failed");
}

static void slice(void *ctx, uint32_t item, uint32_t thread) {
    const product *p = ctx;
    (void)thread;
    uint32_t column = item % p->n_column_slices * p->columns, row = item / p->n_column_slices * p->rows;
    call(p, row, KVF__MIN(p->rows, p->m - row), column, KVF__MIN(p->columns, p->n - column));
}

/* Slices as model/gemm.c cuts them. */
static void run(kvf_stream *stream, way w, uint32_t m, uint32_t n, uint32_t k, const float *weight) {
    uint32_t part = kvf__ceil_div(n, 8);
    product p = {.w = w, .m = m, .n = n, .k = k, .rows = w == READ ? m : 256, .weight = weight};
    p.columns = KVF__MIN(kvf__ceil_div(part, 32) * 32, 1024u);
    p.n_column_slices = kvf__ceil_div(n, p.columns);
    if (w == BLAS_GEMV || w == BLAS_WHOLE || w == DNNL_WHOLE)
        call(&p, 0, m, 0, n);
    else if (w == Q_READ)
        kvf__stream_for(stream, p.n_column_slices, read_quantised, &p);
    else if (w >= Q_ROWS && w < READ)
        run_quantised(stream, &p);
    else
        kvf__stream_for(stream, p.n_column_slices * kvf__ceil_div(m, p.rows), slice, &p);
    sink = y[0];
}

/* Seconds that the process has run: beside the wall's, since machines are shared. Of more than one thread they count the
 * waiting for one another too. */
static double cpu_clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double timed(kvf_stream *stream, way w, uint32_t m, bool head, double *cpu) {
    /* The libraries' own threads spin for a while after a call, at the cost of the next way. */
    nanosleep(&(struct timespec){.tv_nsec = 60000000}, NULL);
    uint32_t n_threads = kvf_stream_n_threads(stream);
    if (lib.blas_threads) lib.blas_threads(w == BLAS_SLICED ? 1 : (int)n_threads);
    if (lib.omp_threads) lib.omp_threads((int)n_threads);
    double t = kvf__clock(), c = cpu_clock();
    const float *weight = weights;
    for (int layer = 0; !head && layer < LAYERS; layer++)
        for (int s = 0; s < N_SHAPES; s++) {
            run(stream, w, m, shapes[s][0], shapes[s][1], weight);
            weight += (size_t)shapes[s][0] * shapes[s][1];
        }
    if (head) run(stream, w, m, HEAD_ROWS, EMBD, weights + layer_floats);
    *cpu = cpu_clock() - c;
    return kvf__clock() - t;
}

static void check(kvf_stream *stream, way w, uint32_t m) {
    for (int s = 0; s < N_SHAPES; s++) {
        uint32_t n = shapes[s][0], k = shapes[s][1];
        run(stream, w, m, n, k, weights);
        for (uint32_t i = 0; i < m; i += 1 + m / 7)
            for (uint32_t j = 0; j < n; j += 13) {
                double want = 0;
                for (uint32_t e = 0; e < k; e++) want += (double)x[i * k + e] * (double)weights[(size_t)j * k + e];
                double bound =
                    w >= Q_FAST && w < READ ? 0.1 : 1e-3; /* of what 8 bits of x cost, 6e-4 an element at random */
                if (!(fabs(want - (double)y[(size_t)i * n + j]) < bound)) die("%s: a product is wrong", way_names[w]);
            }
    }
}

/* ---- Timing ---------------------------------------------------------------------------------- */

/* The floor of a way is reading the weights that it reads. */
static void report(way w, uint32_t rows, uint32_t n_threads, bool head, const kvf__bench_times *t,
                   const kvf__bench_times *cpu, const kvf__bench_times *read) {
    double floats = head ? (double)HEAD_ROWS * EMBD : (double)layer_floats;
    double bytes = floats * (w >= Q_ROWS ? (double)Q_BYTES / Q_BLOCK : 4);
    kvf__bench_times sorted = *t, ratios = *t, other = *read;
    for (int i = 0; i < t->n; i++) ratios.s[i] = t->s[i] / read->s[i];
    kvf__bench_sort(&sorted), kvf__bench_sort(&ratios);
    double median = kvf__bench_quantile(&sorted, .5);
    kvf__bench_begin("model/gemm", &sorted, 1e3, "ms", n_threads, bytes);
    kvf__bench_sort(&other);
    kvf__bench_floor(1e3 * kvf__bench_quantile(&other, .5), &ratios);
    other = *cpu;
    kvf__bench_sort(&other);
    kvf__bench_text("way", way_names[w]);
    kvf__bench_text("what", head ? "head" : "layers");
    kvf__bench_number("rows", rows);
    kvf__bench_text("blas", lib.blas_config ? lib.blas_config() : "none");
    kvf__bench_number("cpu_ms_median", 1e3 * kvf__bench_quantile(&other, .5));
    kvf__bench_number("gflop_per_s", 2 * floats * rows / median / 1e9);
    kvf__bench_number("gb_per_s", bytes / median / 1e9);
    kvf__bench_end();
}

static void measure(uint32_t n_threads, uint32_t rows, int repetitions) {
    static kvf__bench_times t[2][N_WAYS], c[2][N_WAYS];
    kvf_stream *stream;
    if (kvf_stream_create_cpu(NULL, n_threads, &stream, NULL)) die("no stream");
    for (int w = 0; w < READ; w++)
        if (have((way)w, rows)) check(stream, (way)w, rows);
    for (int i = -1; i < repetitions; i++) /* the first warms up */
        for (int head = 0; head < 2; head++)
            for (int w = 0; w < N_WAYS; w++) {
                double cpu = 0, s = 0;
                if (have((way)w, rows) && (!head || rows <= 32)) s = timed(stream, (way)w, rows, head, &cpu);
                t[head][w].n = c[head][w].n = repetitions;
                if (i >= 0) t[head][w].s[i] = s, c[head][w].s[i] = cpu;
            }
    for (int head = 0; head < (rows <= 32 ? 2 : 1); head++)
        for (int w = 0; w < READ; w++)
            if (have((way)w, rows))
                report((way)w, rows, n_threads, head, &t[head][w], &c[head][w], &t[head][w < Q_ROWS ? READ : Q_READ]);
    kvf_stream_destroy(stream);
}

static float *random_floats(size_t n) {
    float *p = aligned_alloc(64, (n * sizeof *p + 63) / 64 * 64);
    if (!p) die("out of memory");
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        p[i] = (float)(state >> 8) / 16777216.0f - 0.5f;
    }
    return p;
}

/* Random blocks of Q4_1, and the weights that they stand for. */
static void make_weights(size_t n) {
    weights = random_floats(n);
    quantised = malloc(n / Q_BLOCK * Q_BYTES);
    if (!quantised) die("out of memory");
    const uint16_t d = kvf__f16_from_f32(1.0f / 15), m = kvf__f16_from_f32(-0.5f);
    for (size_t i = 0; i < n / Q_BLOCK; i++) {
        unsigned char *block = quantised + i * Q_BYTES;
        memcpy(block, &d, 2);
        memcpy(block + 2, &m, 2);
        for (size_t j = 0; j < 16; j++) {
            const float *pair = weights + i * Q_BLOCK + 2 * j;
            block[4 + j] = (unsigned char)((unsigned)((pair[0] + 0.5f) * 16) | (unsigned)((pair[1] + 0.5f) * 16) << 4);
        }
        (void)kvf__gemv_ops_for((kvf__cpu){.avx512 = false})
            ->dequantize(KVF__TENSOR_Q4_1, block, Q_BLOCK, weights + i * Q_BLOCK);
    }
}

int kvf__bench_gemm(int argc, char **argv) {
    static const uint32_t rows[] = {1, 2, 4, 8, 16, 32, 64, 128, 512};
    int repetitions = argc > 1 ? (int)kvf__bench_int("REPETITIONS", argv[1], 1, KVF__BENCH_MAX_REPETITIONS) : 5;
    int max_rows = argc > 2 ? (int)kvf__bench_int("MAX_ROWS", argv[2], 1, MAX_ROWS) : MAX_ROWS;
    for (int w = 0; w < N_WAYS; w++) {
        wanted[w] = argc <= 3;
        for (int i = 3; i < argc; i++) wanted[w] |= !strcmp(argv[i], way_names[w]);
    }
    open_libraries();
    for (int s = 0; s < N_SHAPES; s++) layer_floats += (size_t)LAYERS * shapes[s][0] * shapes[s][1];
    make_weights(layer_floats + (size_t)HEAD_ROWS * EMBD);
    scratch = random_floats((size_t)SCRATCH * MAX_THREADS);
    x = random_floats((size_t)MAX_ROWS * MAX_WIDTH);
    quantised_x = random_floats((size_t)MAX_ROWS * MAX_WIDTH);
    y = random_floats((size_t)MAX_ROWS * MAX_WIDTH > (size_t)32 * HEAD_ROWS ? (size_t)MAX_ROWS * MAX_WIDTH
                                                                            : (size_t)32 * HEAD_ROWS);
    for (uint32_t n_threads = 1; n_threads <= MAX_THREADS; n_threads++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows && rows[i] <= (uint32_t)max_rows; i++)
            measure(n_threads, rows[i], repetitions);
    free(weights);
    free(quantised);
    free(scratch);
    free(x);
    free(quantised_x);
    free(y);
    return 0;
}
