/* Products with a weight matrix, through oneDNN: docs/decisions/002-blas.md. */
#include "model/gemm.h"

#include <dnnl.h>
#include <stdatomic.h>

/* Slices of columns keep the part of w that a call packs within the second-level cache and give every thread some. */
enum { SLICE_ROWS = 256, SLICE_PARTS = 8, SLICE_COLUMNS_MAX = 1024 };

struct slices {
    const kvf__gemm *g;
    uint32_t columns, n_column_slices;
    atomic_bool failed;
};

/* oneDNN runs on OpenMP, whose number of threads is the calling thread's own: one for the time of a call, since our
 * stream says how many work. Declared here because omp.h comes with a compiler, but the runtime with oneDNN. */
extern int omp_get_max_threads(void);
extern void omp_set_num_threads(int n_threads);

static bool multiply(const kvf__gemm *g, uint32_t row, uint32_t m, uint32_t column, uint32_t n) {
    int n_threads = omp_get_max_threads();
    omp_set_num_threads(1);
    dnnl_status_t status = dnnl_sgemm('N', 'T', m, n, g->k, 1, g->x + row * g->x_stride, (dnnl_dim_t)g->x_stride,
                                      g->w + (size_t)column * g->k, g->k, g->accumulate ? 1 : 0,
                                      g->y + row * g->y_stride + column, (dnnl_dim_t)g->y_stride);
    omp_set_num_threads(n_threads);
    return status == dnnl_success;
}

static void one_slice(void *ctx, uint32_t item, uint32_t thread) {
    struct slices *s = ctx;
    const kvf__gemm *g = s->g;
    (void)thread;
    uint32_t column = item % s->n_column_slices * s->columns, row = item / s->n_column_slices * SLICE_ROWS;
    uint32_t m = KVF__MIN((uint32_t)SLICE_ROWS, g->m - row), n = KVF__MIN(s->columns, g->n - column);
    if (!multiply(g, row, m, column, n)) atomic_store_explicit(&s->failed, true, memory_order_relaxed);
}

kvf_status kvf__gemm_run(kvf_stream *stream, const kvf__gemm *g) {
    uint32_t part = kvf__ceil_div(g->n, SLICE_PARTS);
    struct slices s = {.g = g, .columns = KVF__MIN(kvf__ceil_div(part, 32) * 32, (uint32_t)SLICE_COLUMNS_MAX)};
    s.n_column_slices = kvf__ceil_div(g->n, s.columns);
    kvf__stream_for(stream, s.n_column_slices * kvf__ceil_div(g->m, SLICE_ROWS), one_slice, &s);
    return atomic_load_explicit(&s.failed, memory_order_relaxed) ? KVF_E_NO_MEMORY : KVF_OK;
}
