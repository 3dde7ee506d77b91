/* Measures paged attention: decode against its roof, prefill against sgemm.
 *
 * kvfold-bench attention [-r REPETITIONS] [-t THREADS] [-T] [-s SHAPE] [-w WHAT] [-m MIB] [-p PATH] [-c]. The floor of
 * a decode is the larger of two times: its bytes at the rate at which they are read, its multiply-adds at their rate with
 * as many conversions among them; that of a prefill is its products at sgemm's rate. What a ratio compares runs in turns,
 * since machines are shared; -c counts processor time over threads instead of the wall clock, for a machine that is
 * busy with others. -m is the working set, by default 4 times the last-level cache where half of the memory holds that;
 * -p names a kvf_cpu_path (avx2, avx512). One case alone: -T with no fewer threads than -t, -s 8x4x128 of that shape
 * (KV heads, query heads of each, head_dim), -w decode or prefill. Each case is checked against the reference first. */
#define _DEFAULT_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 24")
#endif
#endif

#include "bench/json.h"
#include "kvfold/attention.h"

enum { BLOCK = 16, CONTEXT = 4096, CHUNK = 512, CHECKED_TOKENS = 2 };

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

static kvf_cpu_path path;
static bool processor_time;
static size_t working_set, cache_bytes;

#define die kvf__bench_die
#define take kvf__bench_take
#define uniform kvf__bench_uniform
#define sort kvf__bench_sort
#define quantile kvf__bench_quantile
typedef kvf__bench_times times;

static bench make(uint32_t n_kv, uint32_t per_kv, uint32_t d, uint32_t n_seqs, uint32_t n_tokens) {
    bench b = {.n_kv = n_kv, .per_kv = per_kv, .d = d, .n_seqs = n_seqs, .n_tokens = n_tokens};
    uint32_t per_seq = CONTEXT / BLOCK, n_blocks = n_seqs * per_seq;
    uint64_t state = 1;
    size_t half = (size_t)n_kv * BLOCK * d * 2, n_q = (size_t)n_seqs * n_tokens * n_kv * per_kv * d;
    b.kv_bytes = n_blocks * half * 2;
    b.kv = take(b.kv_bytes);
    size_t pattern = KVF__MIN(b.kv_bytes, ((size_t)8 << 20) - 1042 * 2); /* repeats out of step with blocks */
    for (size_t i = 0; i < pattern / 2; i++) ((uint16_t *)(void *)b.kv)[i] = kvf__f16_from_f32(uniform(&state));
    for (size_t i = pattern; i < b.kv_bytes; i += pattern) memcpy(b.kv + i, b.kv, KVF__MIN(pattern, b.kv_bytes - i));
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
                           .out_stride = width,
                           .path = path};
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
    kvf_error err = {.text = ""};
    kvf_status st =
        b->n_tokens == 1 ? kvf_attention_decode(stream, &b->a, &err) : kvf_attention_prefill(stream, &b->a, &err);
    if (st) die("%s", err.text);
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

/* ---- What the machine can do ---------------------------------------------------------------- */

static double now(void) { /* of one thread, when all are at work */
    struct timespec t;
    if (!processor_time) return kvf__clock();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static double seconds(kvf_stream *stream, double begin) {
    return (now() - begin) / (processor_time ? kvf_stream_n_threads(stream) : 1);
}

typedef struct machine_work {
    const unsigned char *bytes;
    size_t n;
    float *a, *b, *c; /* of sgemm, GEMM squares; each thread has a c */
} machine_work;
static volatile float sink;
enum { SHARE = 1 << 19, ROUNDS = 1 << 16, TURN = 24, GEMM = 512, GEMM_ITEMS = 8 };

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void read_avx512(const unsigned char *p, size_t n) {
    __m512i x[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = _mm512_setzero_si512();
    for (size_t at = 0; at + 512 <= n; at += 512)
        UNROLL for (size_t i = 0; i < 8; i++) x[i] = _mm512_xor_si512(x[i], _mm512_loadu_si512(p + at + 64 * i));
    UNROLL for (int i = 1; i < 8; i++) x[0] = _mm512_xor_si512(x[0], x[i]);
    sink = (float)_mm512_reduce_add_epi64(x[0]);
}
/* TURN multiply-adds a round, one conversion for each per_kv of them, as an element of K or V costs at least; per_kv is a
 * constant where this is called. */
__attribute__((target("avx512f"), always_inline)) static inline void multiply_avx512(int per_kv) {
    __m512 x[12], z, y = _mm512_set1_ps(sink * 0.0f + 0.5f);
    __m256i half = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 12; i++) x[i] = _mm512_set1_ps((float)i);
    for (int n = 0; n < ROUNDS; n++) UNROLL for (int i = 0; i < TURN; i++) {
            if (i % per_kv == 0) __asm__ volatile("vcvtph2ps %1, %0" : "=v"(z) : "m"(half));
            __asm__ volatile("vfmadd231ps %1, %1, %0" : "+v"(x[i % 12]) : "v"(y));
        }
    UNROLL for (int i = 1; i < 12; i++) x[0] = _mm512_add_ps(x[0], x[i]);
    sink = _mm512_reduce_add_ps(x[0]);
}
__attribute__((target("avx2,fma"))) static void read_avx2(const unsigned char *p, size_t n) {
    __m256i x[8];
    UNROLL for (int i = 0; i < 8; i++) x[i] = _mm256_setzero_si256();
    for (size_t at = 0; at + 256 <= n; at += 256)
        UNROLL for (size_t i = 0; i < 8; i++) x[i] =
            _mm256_xor_si256(x[i], _mm256_loadu_si256((const __m256i *)(const void *)(p + at + 32 * i)));
    UNROLL for (int i = 1; i < 8; i++) x[0] = _mm256_xor_si256(x[0], x[i]);
    sink = (float)_mm256_extract_epi64(x[0], 0);
}
__attribute__((target("avx2,fma,f16c"), always_inline)) static inline void multiply_avx2(int per_kv) {
    __m256 x[12], z, y = _mm256_set1_ps(sink * 0.0f + 0.5f);
    __m128i half = _mm_setzero_si128();
    UNROLL for (int i = 0; i < 12; i++) x[i] = _mm256_set1_ps((float)i);
    for (int n = 0; n < ROUNDS; n++) UNROLL for (int i = 0; i < TURN; i++) {
            if (i % per_kv == 0) __asm__ volatile("vcvtph2ps %1, %0" : "=x"(z) : "m"(half));
            __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(x[i % 12]) : "x"(y));
        }
    UNROLL for (int i = 1; i < 12; i++) x[0] = _mm256_add_ps(x[0], x[i]);
    sink = _mm256_cvtss_f32(x[0]);
}
/* One of each for the groups there are, since how many multiply-adds follow a conversion is in its code. */
#define MULTIPLY(PER_KV)                                                                                         \
    __attribute__((target("avx512f"))) static void multiply_##PER_KV##_avx512(void) { multiply_avx512(PER_KV); } \
    __attribute__((target("avx2,fma,f16c"))) static void multiply_##PER_KV##_avx2(void) { multiply_avx2(PER_KV); }
MULTIPLY(1)
MULTIPLY(2)
MULTIPLY(3)
MULTIPLY(4)
MULTIPLY(6)
MULTIPLY(8)
MULTIPLY(12)
static const struct {
    uint32_t per_kv;
    void (*avx512)(void), (*avx2)(void);
} multiplies_by[] = {{12, multiply_12_avx512, multiply_12_avx2}, {8, multiply_8_avx512, multiply_8_avx2},
                     {6, multiply_6_avx512, multiply_6_avx2},    {4, multiply_4_avx512, multiply_4_avx2},
                     {3, multiply_3_avx512, multiply_3_avx2},    {2, multiply_2_avx512, multiply_2_avx2},
                     {1, multiply_1_avx512, multiply_1_avx2}};
#endif
static void read_plain(const unsigned char *p, size_t n) {
    uint64_t x = 0, y;
    for (size_t at = 0; at + 8 <= n; at += 8) {
        memcpy(&y, p + at, sizeof y);
        x ^= y;
    }
    sink = (float)x;
}
static void multiply_plain(void) {
    float x[16] = {0}, y = sink * 0.0f + 0.5f;
    for (int n = 0; n < ROUNDS; n++)
        for (int i = 0; i < 16; i++) x[i] = x[i] * y + y;
    for (int i = 0; i < 16; i++) sink += x[i];
}

static void read_share(void *ctx, uint32_t item, uint32_t thread) {
    const machine_work *w = ctx;
    const unsigned char *p = w->bytes + (size_t)item * SHARE;
    size_t n = KVF__MIN(w->n - (size_t)item * SHARE, (size_t)SHARE);
    (void)thread;
#if defined(__x86_64__)
    if (path == KVF_CPU_AVX512) {
        read_avx512(p, n);
        return;
    }
    if (path == KVF_CPU_AVX2) {
        read_avx2(p, n);
        return;
    }
#endif
    read_plain(p, n);
}

/* Bytes a second over all of the case's pages. */
static double read_rate(kvf_stream *stream, const bench *b) {
    machine_work w = {.bytes = b->kv, .n = b->kv_bytes};
    double t = now();
    kvf__stream_for(stream, (uint32_t)((w.n + SHARE - 1) / SHARE), read_share, &w);
    return (double)b->kv_bytes / seconds(stream, t);
}

/* ctx: the query heads of a KV head; those of the next smaller group that there is, which converts no less, do for others. */
static void multiply_item(void *ctx, uint32_t item, uint32_t thread) {
    (void)item, (void)thread;
#if defined(__x86_64__)
    size_t i = 0;
    while (multiplies_by[i].per_kv > *(const uint32_t *)ctx) i++;
    if (path == KVF_CPU_AVX512) {
        multiplies_by[i].avx512();
        return;
    }
    if (path == KVF_CPU_AVX2) {
        multiplies_by[i].avx2();
        return;
    }
#endif
    (void)ctx;
    multiply_plain();
}

/* Multiply-adds a second, with a conversion for each per_kv of them. */
static double multiply_rate(kvf_stream *stream, uint32_t per_kv) {
    double items = 8.0 * kvf_stream_n_threads(stream);
    double per_round = path == KVF_CPU_AVX512 ? TURN * 16 : path == KVF_CPU_AVX2 ? TURN * 8 : 16, t = now();
    kvf__stream_for(stream, (uint32_t)items, multiply_item, &per_kv);
    return items * ROUNDS * per_round / seconds(stream, t);
}

/* Of OpenBLAS, opened at run time; NULL where it is not installed. CBLAS numbers its arguments: 101 row major, 111 as
 * it is, 112 transposed. */
static void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

static void open_sgemm(void) {
    void (*set_threads)(int) = NULL;
    void *blas = dlopen("libopenblas.so.0", RTLD_NOW), *p = blas ? dlsym(blas, "cblas_sgemm") : NULL;
    memcpy(&sgemm, &p, sizeof p); /* ISO C has no cast from an object pointer */
    p = blas ? dlsym(blas, "openblas_set_num_threads") : NULL;
    memcpy(&set_threads, &p, sizeof p);
    if (set_threads) set_threads(1); /* ours call it */
}

static void gemm_item(void *ctx, uint32_t item, uint32_t thread) {
    const machine_work *w = ctx;
    (void)item;
    sgemm(101, 111, 112, GEMM, GEMM, GEMM, 1, w->a, GEMM, w->b, GEMM, 0, w->c + (size_t)thread * GEMM * GEMM, GEMM);
}

/* Operations a second of matrix products from all threads; 0 without OpenBLAS. */
static double gemm_rate(kvf_stream *stream) {
    static machine_work w;
    uint64_t state = 7;
    if (!sgemm) return 0;
    if (!w.a) {
        w.a = take((size_t)GEMM * GEMM * 4);
        w.b = take((size_t)GEMM * GEMM * 4);
        w.c = take((size_t)GEMM * GEMM * 4 * 64);
        for (int i = 0; i < GEMM * GEMM; i++) w.a[i] = uniform(&state), w.b[i] = uniform(&state);
    }
    double items = GEMM_ITEMS * kvf_stream_n_threads(stream), t = now();
    kvf__stream_for(stream, (uint32_t)items, gemm_item, &w);
    return items * 2 * GEMM * GEMM * GEMM / seconds(stream, t);
}

/* ---- Timing --------------------------------------------------------------------------------- */

static double timed(kvf_stream *stream, bench *b, bool mass) {
    want_mass(b, mass);
    double t = now();
    run_case(stream, b);
    return seconds(stream, t);
}

static void begin(const bench *b, const char *name, uint32_t n_threads, bool mass, const times *t) {
    static const char *const paths[] = {"auto", "ref", "scalar", "avx2", "avx512"};
    kvf__bench_begin(name, t, 1e3, "ms", n_threads, (double)b->kv_bytes);
    kvf__bench_text("path", paths[path]);
    kvf__bench_text("clock", processor_time ? "processor" : "wall");
    kvf__bench_number("kv_heads", b->n_kv);
    kvf__bench_number("per_kv", b->per_kv);
    kvf__bench_number("head_dim", b->d);
    kvf__bench_text("dtype", "fp16");
    kvf__bench_number("block_size", BLOCK);
    kvf__bench_number("seqs", b->n_seqs);
    kvf__bench_number("queries", b->n_tokens);
    kvf__bench_number("slots", CONTEXT);
    kvf__bench_text("mass", mass ? "yes" : "no");
    kvf__bench_number("cache_bytes", (double)cache_bytes);
}

/* share: of the floor's rate, the ratio's inverse. */
static void print_floor(double floor, times *ratios) {
    sort(ratios);
    kvf__bench_floor(floor, ratios);
    kvf__bench_number("share", 1 / quantile(ratios, .5));
}

static void decode_case(kvf_stream *stream, bench *b, int repetitions) {
    times runs[2] = {{.n = repetitions}, {.n = repetitions}}, reads = runs[0], multiplies = reads,
          ratios[2] = {reads, reads};
    double bytes = (double)b->kv_bytes, work = bytes / 2 * b->per_kv; /* an element is converted, then multiplied */
    uint32_t n_threads = kvf_stream_n_threads(stream);
    wire(b, n_threads);
    check(stream, b);
    for (int i = 0; i < repetitions; i++) {
        reads.s[i] = read_rate(stream, b);
        multiplies.s[i] = multiply_rate(stream, b->per_kv);
        for (int k = 0; k < 2; k++) { /* in turns: the first pays for what the multiply-adds left */
            int m = (i + k) % 2;
            runs[m].s[i] = timed(stream, b, m);
            ratios[m].s[i] = runs[m].s[i] / fmax(bytes / reads.s[i], work / multiplies.s[i]);
        }
    }
    sort(&reads), sort(&multiplies);
    for (int m = 0; m < 2; m++) {
        sort(&runs[m]);
        double read = quantile(&reads, .5), multiply = quantile(&multiplies, .5);
        begin(b, "attention/decode", n_threads, m, &runs[m]);
        print_floor(1e3 * fmax(bytes / read, work / multiply), &ratios[m]);
        kvf__bench_text("bound", bytes / read > work / multiply ? "memory" : "arithmetic");
        kvf__bench_number("gb_per_s", bytes / quantile(&runs[m], .5) / 1e9);
        kvf__bench_number("read_gb_per_s", read / 1e9);
        kvf__bench_number("multiply_adds_per_ns", multiply / 1e9);
        kvf__bench_end();
    }
    free(b->a.workspace);
}

static void prefill_case(kvf_stream *stream, bench *b, int repetitions) {
    times runs[2] = {{.n = repetitions}, {.n = repetitions}}, gemms = runs[0], ratios[2] = {gemms, gemms};
    uint32_t n_threads = kvf_stream_n_threads(stream);
    double pairs = 0;
    for (int t = 0; t < CHUNK; t++) pairs += CONTEXT - CHUNK + t + 1;
    pairs *= (double)b->n_seqs * b->n_kv * b->per_kv;
    wire(b, n_threads);
    check(stream, b);
    for (int i = 0; i < repetitions; i++) {
        gemms.s[i] = gemm_rate(stream);
        for (int m = 0; m < 2; m++) { /* products with K and V, and with K again for the column sums */
            runs[m].s[i] = timed(stream, b, m);
            ratios[m].s[i] = runs[m].s[i] * gemms.s[i] / (pairs * b->d * (m ? 6 : 4));
        }
    }
    sort(&gemms);
    for (int m = 0; m < 2; m++) {
        sort(&runs[m]);
        double flop = pairs * b->d * (m ? 6 : 4);
        begin(b, "attention/prefill", n_threads, m, &runs[m]);
        if (sgemm) print_floor(1e3 * flop / quantile(&gemms, .5), &ratios[m]);
        kvf__bench_number("gflop", flop / 1e9);
        kvf__bench_number("gflop_per_s", flop / 1e9 / quantile(&runs[m], .5));
        if (sgemm) kvf__bench_number("sgemm_gflop_per_s", quantile(&gemms, .5) / 1e9);
        kvf__bench_end();
    }
    free(b->a.workspace);
}

/* 4 times the last-level cache, or what half of the memory that is free holds. */
static size_t default_working_set(void) {
    long llc = sysconf(_SC_LEVEL3_CACHE_SIZE), pages = sysconf(_SC_AVPHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    cache_bytes = llc > 0 ? (size_t)llc : 0;
    size_t want = KVF__MAX(4 * cache_bytes, (size_t)256 << 20), spare = (size_t)pages / 2 * (size_t)page;
    return KVF__MIN(want, spare);
}

static void parse_shape(const char *text, uint32_t shape[3]) {
    int end = 0;
    if (sscanf(text, "%ux%ux%u%n", &shape[0], &shape[1], &shape[2], &end) != 3 || text[end] || shape[0] == 0 ||
        shape[0] > 1024 || shape[1] == 0 || shape[1] > 64 || shape[2] == 0 || shape[2] > 256 || shape[2] % 8)
        die("-s %s: KV heads up to 1024, query heads of each up to 64, head_dim a multiple of 8 up to 256: 8x4x128",
            text);
}

/* One shape's cases. */
static void run_shape(kvf_stream *stream, const uint32_t s[3], int repetitions, const char *what) {
    size_t per_seq = (size_t)s[0] * s[2] * 4 * CONTEXT;
    if (strcmp(what, "prefill") != 0) {
        bench b = make(s[0], s[1], s[2], (uint32_t)((working_set + per_seq - 1) / per_seq), 1);
        decode_case(stream, &b, repetitions);
        drop(&b);
    }
    if (strcmp(what, "decode") != 0) {
        bench b = make(s[0], s[1], s[2], 1, CHUNK);
        prefill_case(stream, &b, repetitions);
        drop(&b);
    }
}

static kvf_cpu_path parse_path(const char *name) {
    kvf_cpu_path p = !strcmp(name, "scalar")   ? KVF_CPU_SCALAR
                     : !strcmp(name, "avx2")   ? KVF_CPU_AVX2
                     : !strcmp(name, "avx512") ? KVF_CPU_AVX512
                                               : KVF_CPU_AUTO;
    if (p == KVF_CPU_AUTO || !kvf_cpu_has_path(p)) die("-p: scalar, avx2 or avx512, as far as this CPU has it");
    return p;
}

int kvf__bench_attention(int argc, char **argv) {
    static const uint32_t shapes[][3] = {{8, 1, 128}, {8, 4, 128}, {8, 8, 128}, {3, 3, 64}}; /* the last is SmolLM2's */
    uint32_t shape[3] = {0};
    const char *what = "all";
    bool all_threads = true;
    int repetitions = 9, threads = 2, option;
    working_set = default_working_set();
    path = kvf_cpu_has_path(KVF_CPU_AVX512) ? KVF_CPU_AVX512
           : kvf_cpu_has_path(KVF_CPU_AVX2) ? KVF_CPU_AVX2
                                            : KVF_CPU_SCALAR;
    while ((option = getopt(argc, argv, "r:t:Ts:w:m:p:c")) != -1) switch (option) {
        case 'r': repetitions = (int)kvf__bench_int("-r", optarg, 1, KVF__BENCH_MAX_REPETITIONS); break;
        case 't': threads = (int)kvf__bench_int("-t", optarg, 1, KVF__BENCH_MAX_THREADS); break;
        case 'T': all_threads = false; break;
        case 's': parse_shape(optarg, shape); break;
        case 'w':
            what = optarg;
            if (strcmp(what, "decode") != 0 && strcmp(what, "prefill") != 0) die("-w %s: decode or prefill", what);
            break;
        case 'm': working_set = (size_t)kvf__bench_int("-m", optarg, 1, 1 << 20) << 20; break;
        case 'p': path = parse_path(optarg); break;
        case 'c': processor_time = true; break;
        default: die("attention [-r REPETITIONS] [-t THREADS] [-T] [-s SHAPE] [-w WHAT] [-m MIB] [-p PATH] [-c]");
        }
    open_sgemm();
    for (int n = all_threads ? 1 : threads; n <= threads; n++) {
        kvf_stream *stream;
        if (kvf_stream_create_cpu(NULL, (uint32_t)n, &stream, NULL)) die("threads cannot be started");
        if (shape[0]) run_shape(stream, shape, repetitions, what);
        for (size_t i = 0; !shape[0] && i < sizeof shapes / sizeof *shapes; i++)
            run_shape(stream, shapes[i], repetitions, what);
        kvf_stream_destroy(stream);
    }
    return 0;
}
