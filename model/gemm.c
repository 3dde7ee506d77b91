/* Products with a weight matrix, through oneDNN (KVF_ONEDNN defined) or OpenBLAS: docs/decisions/002-blas.md. */
#include "model/gemm.h"

#include <stdatomic.h>

/* Slices of columns keep the part of w that a call packs within the second-level cache and give every thread some. */
#ifndef SLICE_PARTS
enum { SLICE_ROWS = 256, SLICE_PARTS = 8, SLICE_COLUMNS_MAX = 1024 };
#endif

struct slices {
    const kvf__gemm *g;
    uint32_t columns, n_column_slices;
    atomic_bool failed;
};

#ifdef KVF_ONEDNN
#include <dnnl.h>

/* oneDNN runs on OpenMP, whose number of threads is the calling thread's own: one for the time of a call, since our
 * stream says how many work. Declared here because omp.h comes with a compiler, but the runtime with oneDNN. */
extern int omp_get_max_threads(void);
extern void omp_set_num_threads(int n_threads);

const char *kvf__gemm_library(void) { return "oneDNN"; }

static bool sliced(void) { return true; }

static bool multiply(const kvf__gemm *g, uint32_t row, uint32_t m, uint32_t column, uint32_t n) {
    int n_threads = omp_get_max_threads();
    omp_set_num_threads(1);
    dnnl_status_t status = dnnl_sgemm('N', 'T', m, n, g->k, 1, g->x + row * g->x_stride, (dnnl_dim_t)g->x_stride,
                                      g->w + (size_t)column * g->k, g->k, g->accumulate ? 1 : 0,
                                      g->y + row * g->y_stride + column, (dnnl_dim_t)g->y_stride);
    omp_set_num_threads(n_threads);
    return status == dnnl_success;
}
#else
#include <cblas.h>

const char *kvf__gemm_library(void) { return "OpenBLAS"; }

/* The number of OpenBLAS's threads belongs to the process and is not ours to change: with one the slices go to our
 * threads, with more it gets the whole product and shares it out itself. */
static bool sliced(void) { return openblas_get_num_threads() == 1; }

static bool multiply(const kvf__gemm *g, uint32_t row, uint32_t m, uint32_t column, uint32_t n) {
    const float *x = g->x + row * g->x_stride, *w = g->w + (size_t)column * g->k;
    float *y = g->y + row * g->y_stride + column, beta = g->accumulate ? 1 : 0;
    if (m <= 2) /* its product packs w first, which takes longer than two passes over it */
        for (uint32_t i = 0; i < m; i++)
            cblas_sgemv(CblasRowMajor, CblasNoTrans, (int)n, (int)g->k, 1, w, (int)g->k, x + i * g->x_stride, 1, beta,
                        y + i * g->y_stride, 1);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)m, (int)n, (int)g->k, 1, x, (int)g->x_stride, w,
                    (int)g->k, beta, y, (int)g->y_stride);
    return true;
}
#endif

static void one_slice(void *ctx, uint32_t item, uint32_t thread) {
    struct slices *s = ctx;
    const kvf__gemm *g = s->g;
    (void)thread;
    uint32_t column = item % s->n_column_slices * s->columns, row = item / s->n_column_slices * SLICE_ROWS;
    uint32_t m = KVF__MIN((uint32_t)SLICE_ROWS, g->m - row), n = KVF__MIN(s->columns, g->n - column);
    if (!multiply(g, row, m, column, n)) atomic_store_explicit(&s->failed, true, memory_order_relaxed);
}

kvf_status kvf__gemm_run(kvf_stream *stream, const kvf__gemm *g) {
    if (!sliced()) return multiply(g, 0, g->m, 0, g->n) ? KVF_OK : KVF_E_NO_MEMORY;
    uint32_t part = kvf__ceil_div(g->n, SLICE_PARTS);
    struct slices s = {.g = g, .columns = KVF__MIN(kvf__ceil_div(part, 32) * 32, (uint32_t)SLICE_COLUMNS_MAX)};
    s.n_column_slices = kvf__ceil_div(g->n, s.columns);
    kvf__stream_for(stream, s.n_column_slices * kvf__ceil_div(g->m, SLICE_ROWS), one_slice, &s);
    return atomic_load_explicit(&s.failed, memory_order_relaxed) ? KVF_E_NO_MEMORY : KVF_OK;
}
