/* Products of floats by a library that is opened at run time: the floor that kernels are held against. */
#include <dlfcn.h>
#include <stdio.h>

#include "bench/json.h"

/* CBLAS numbers its arguments: 101 row major, 111 as it is, 112 transposed. */
static struct {
    int (*dnnl)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float,
                float *, int64_t);
    void (*omp_threads)(int);
    void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
    void (*blas_threads)(int);
} lib;

/* Converts a data pointer into one to a function, which ISO C has no cast for. */
#define FIND(to, library, name)                            \
    do {                                                   \
        void *p = (library) ? dlsym(library, name) : NULL; \
        memcpy(&(to), &p, sizeof p);                       \
    } while (0)

const char *kvf__bench_sgemm_open(void) {
    void *dnnl = dlopen("libdnnl.so.2", RTLD_NOW);
    if (!dnnl) dnnl = dlopen("libdnnl.so.3", RTLD_NOW);
    FIND(lib.dnnl, dnnl, "dnnl_sgemm");
    FIND(lib.omp_threads, dnnl, "omp_set_num_threads"); /* of the OpenMP that it was linked with */
    if (lib.dnnl && lib.omp_threads) return "oneDNN";
    void *blas = dlopen("libopenblas.so.0", RTLD_NOW);
    FIND(lib.sgemm, blas, "cblas_sgemm");
    FIND(lib.blas_threads, blas, "openblas_set_num_threads");
    if (!lib.sgemm || !lib.blas_threads) return NULL;
    lib.blas_threads(1);
    return "OpenBLAS";
}

void kvf__bench_sgemm(int m, int n, int k, const float *a, const float *b, float *c) {
    if (lib.dnnl && lib.omp_threads) {
        lib.omp_threads(1); /* the thread's own */
        if (lib.dnnl('N', 'T', m, n, k, 1, a, k, b, k, 0, c, n)) kvf__bench_die("dnnl_sgemm failed");
    } else {
        lib.sgemm(101, 111, 112, m, n, k, 1, a, k, b, k, 0, c, n);
    }
}
