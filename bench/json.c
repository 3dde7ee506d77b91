/* What the benchmarks share. */
#define _DEFAULT_SOURCE
#include "bench/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifndef KVF_BENCH_COMMIT
#define KVF_BENCH_COMMIT "unknown"
#endif
#ifndef KVF_BENCH_FLAGS
#define KVF_BENCH_FLAGS __VERSION__
#endif

void kvf__bench_die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("kvfold-bench: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

long kvf__bench_int(const char *option, const char *text, long min, long max) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || end == text || *end || value < min || value > max)
        kvf__bench_die("%s %s: must be in [%ld, %ld]", option, text, min, max);
    return value;
}

void *kvf__bench_take(size_t bytes) {
    const size_t huge = (size_t)2 << 20, align = bytes >= huge ? huge : 64;
    void *p = aligned_alloc(align, (KVF__MAX(bytes, (size_t)1) + align - 1) / align * align);
    if (!p) kvf__bench_die("out of memory: %zu bytes", bytes);
    if (align == huge) (void)madvise(p, bytes, MADV_HUGEPAGE); /* as the library's own memory */
    memset(p, 0, bytes);
    return p;
}

float kvf__bench_uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 40) * 0x1p-23 - 1);
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
void kvf__bench_sort(kvf__bench_times *t) { qsort(t->s, (size_t)t->n, sizeof *t->s, ascending); }
double kvf__bench_quantile(const kvf__bench_times *t, double q) { return t->s[(int)(q * (t->n - 1) + 0.5)]; }

static const char *cpu_name(void) {
    static char name[128];
    if (name[0]) return name;
    memcpy(name, "unknown", sizeof "unknown");
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %127[^\n]", name) == 1) break;
    if (f) fclose(f);
    return name;
}

static void quote(const char *text) {
    putchar('"');
    for (const char *c = text; *c; c++) {
        if (*c == '"' || *c == '\\') putchar('\\');
        putchar((unsigned char)*c < ' ' ? ' ' : *c);
    }
    putchar('"');
}
void kvf__bench_text(const char *key, const char *value) {
    printf(", \"%s\": ", key);
    quote(value);
}
void kvf__bench_number(const char *key, double value) {
    if (isfinite(value))
        printf(", \"%s\": %.*g", key, fabs(value) >= 1e5 ? 12 : 5, value);
    else
        printf(", \"%s\": null", key);
}

void kvf__bench_begin(const char *name, const kvf__bench_times *t, double scale, const char *unit, uint32_t n_threads,
                      double bytes) {
    fputs("{\"name\": ", stdout);
    quote(name);
    kvf__bench_number("value", scale * kvf__bench_quantile(t, .5));
    kvf__bench_text("unit", unit);
    kvf__bench_number("median", scale * kvf__bench_quantile(t, .5));
    kvf__bench_number("p5", scale * kvf__bench_quantile(t, .05));
    kvf__bench_number("p95", scale * kvf__bench_quantile(t, .95));
    kvf__bench_number("repetitions", t->n);
    kvf__bench_number("bytes", bytes);
    kvf__bench_number("threads", n_threads);
    double load = 0;
    if (getloadavg(&load, 1) == 1) kvf__bench_number("load", load); /* ours included */
    kvf__bench_text("commit", KVF_BENCH_COMMIT);
    kvf__bench_text("cpu", cpu_name());
    kvf__bench_text("flags", KVF_BENCH_FLAGS);
}

void kvf__bench_floor(double floor, const kvf__bench_times *ratios) {
    kvf__bench_number("floor", floor);
    kvf__bench_number("ratio", kvf__bench_quantile(ratios, .5));
    kvf__bench_number("ratio_p5", kvf__bench_quantile(ratios, .05));
    kvf__bench_number("ratio_p95", kvf__bench_quantile(ratios, .95));
}

void kvf__bench_end(void) {
    puts("}");
    fflush(stdout);
}
