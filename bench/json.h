/* bench/json.h: what the benchmarks share: memory, times, options, and the JSON line that each case prints. */
#ifndef KVF_BENCH_JSON_H
#define KVF_BENCH_JSON_H

#include "base/base.h"

enum { KVF__BENCH_MAX_REPETITIONS = 101, KVF__BENCH_MAX_THREADS = 64 };

/* One benchmark: NAME and its options, argv[0] being NAME. Returns the exit code. */
int kvf__bench_pool(int argc, char **argv);
int kvf__bench_prefix(int argc, char **argv);
int kvf__bench_attention(int argc, char **argv);
int kvf__bench_policy(int argc, char **argv);
int kvf__bench_share(int argc, char **argv);
int kvf__bench_gemm(int argc, char **argv);
int kvf__bench_engine(int argc, char **argv);
int kvf__bench_rho1(int argc, char **argv);

/* Says what went wrong and exits: a benchmark has nothing to clean up. */
void kvf__bench_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* A whole number from min to max, or dies naming the option. */
long kvf__bench_int(const char *option, const char *text, long min, long max);

/* Zeroed memory that has been touched, so that no timing pays for its pages; free() frees it. */
void *kvf__bench_take(size_t bytes);

float kvf__bench_uniform(uint64_t *state); /* [-1, 1) */

/* Seconds of n repetitions; quantiles are right once sorted. */
typedef struct kvf__bench_times {
    double s[KVF__BENCH_MAX_REPETITIONS];
    int n;
} kvf__bench_times;
void kvf__bench_sort(kvf__bench_times *t);
double kvf__bench_quantile(const kvf__bench_times *t, double q);

/* A line: begin, what else there is, end. value is the median of t times scale; so are p5 and p95. bytes: moved by one
 * repetition. floor is in the same unit; ratio, value over floor, has a figure for each repetition. */
void kvf__bench_begin(const char *name, const kvf__bench_times *t, double scale, const char *unit, uint32_t n_threads,
                      double bytes);
void kvf__bench_floor(double floor, const kvf__bench_times *ratios);
void kvf__bench_text(const char *key, const char *value);
void kvf__bench_number(const char *key, double value);
void kvf__bench_end(void);

/* sgemm of oneDNN or OpenBLAS, whichever is installed, opened at run time; on the calling thread alone. c (m, n) = a (m, k)
 * times the transpose of b (n, k), all contiguous. The name of the library, NULL when there is none. */
const char *kvf__bench_sgemm_open(void);
void kvf__bench_sgemm(int m, int n, int k, const float *a, const float *b, float *c);

#endif
