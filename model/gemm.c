/* Products with a weight matrix. Why: docs/decisions/002-blas.md, 005-quantised-weights.md. */
#include "model/gemm.h"

#include <dnnl.h>
#include <stdatomic.h>

#include "model/fast.h"
#include "model/gemv.h"
#include "model/gguf.h"

/* Slices of rows of w (columns of y) give every thread some work. For few rows of x they are narrow, so that a step
 * does not wait long for the last slice. For oneDNN the fp32 slice must stay in the second-level cache. */
enum {
    SLICE_ROWS = 256,
    SLICE_PARTS = 8,
    SLICE_COLUMNS_MIN = 32,
    SLICE_FLOATS = 1 << 18,
    FEW_PARTS = 16,
    FEW_COLUMNS_MAX = 256,
    FEW_X_FLOATS = 1 << 18, /* of x, which is read once for KVF__GEMV_ROWS rows of w: beyond them it leaves the cache */
    FEW_K = 1024, /* elements of KVF__GEMV_ROWS rows that stay in the first-level cache; whole blocks of all types. */
    LINE = KVF__CACHE_LINE / sizeof(float)
};

struct slices {
    const kvf__gemm *g;
    uint32_t columns, n_column_slices;
    atomic_bool failed;
};

static uint32_t round_up(uint32_t n, uint32_t to) { return kvf__ceil_div(n, to) * to; }

static uint32_t slice_columns(const kvf__matrix *w) {
    uint32_t fitting = KVF__MAX((uint32_t)SLICE_FLOATS / w->k / 32 * 32, (uint32_t)SLICE_COLUMNS_MIN);
    return KVF__MIN(round_up(kvf__ceil_div(w->n, SLICE_PARTS), 32), fitting);
}

size_t kvf__gemm_scratch_floats(const kvf__matrix *w) {
    size_t floats = (size_t)KVF__MIN(slice_columns(w), w->n) * w->k, few = (size_t)KVF__GEMV_ROWS * FEW_K;
    return (KVF__MAX(floats, few) + LINE - 1) / LINE * LINE;
}

/* A run of rows of one part of w. */
typedef struct run {
    uint32_t type, n;
    const unsigned char *data;
    size_t row_bytes;
} run;

/* The longest run from row `begin` on, up to `end`. */
static run run_at(const kvf__matrix *w, uint32_t begin, uint32_t end) {
    uint32_t i = 0, first = 0;
    while (begin - first >= w->parts[i].n_rows) first += w->parts[i++].n_rows;
    uint32_t in_part = begin - first;
    return (run){w->parts[i].type, KVF__MIN(end - begin, w->parts[i].n_rows - in_part),
                 (const unsigned char *)w->parts[i].data + in_part * w->parts[i].row_bytes, w->parts[i].row_bytes};
}

/* ---- Few rows of x ----------------------------------------------------------------------------------- */

/* Rows are multiplied in pieces of FEW_K elements, whatever their number, so that a result's bits are those of the
 * pieces' dot products added in order. */
typedef struct piece {
    const float *w; /* in fp32 */
    size_t stride;
    uint32_t begin, n; /* elements */
    bool accumulate;
} piece;

/* Of r's rows, from element `begin` on: where it lies in the file, when it does, or dequantised into the scratch. */
static piece piece_of(const kvf__gemm *g, const run *r, uint32_t begin, float *scratch) {
    uint32_t elements = 1, bytes = 0, k = g->w->k, n = KVF__MIN(k - begin, (uint32_t)FEW_K);
    (void)kvf__tensor_type_geometry(r->type, &elements, &bytes);
    const unsigned char *from = r->data + (size_t)begin / elements * bytes;
    piece p = {scratch, n, begin, n, begin || g->accumulate};
    if (r->type == KVF__TENSOR_F32) {
        p.w = (const float *)(const void *)from;
        p.stride = r->row_bytes / sizeof(float);
        return p;
    }
    uint32_t n_calls = n == k ? 1 : r->n; /* whole rows follow one another here and there */
    for (uint32_t i = 0; i < n_calls; i++)
        (void)g->ops->dequantize(r->type, from + i * r->row_bytes, n == k ? (size_t)r->n * k : n,
                                 scratch + (size_t)i * n);
    return p;
}

/* A piece of up to KVF__GEMV_ROWS rows of w, the first of which is w's `column`, with m rows of x from `row` on. */
static void dots(const kvf__gemm *g, const piece *p, uint32_t first, uint32_t n_w, uint32_t column, uint32_t row,
                 uint32_t m) {
    kvf__dots d = {.w = p->w + first * p->stride,
                   .x = g->x + row * g->x_stride + p->begin,
                   .y = g->y + row * g->y_stride + column,
                   .w_stride = p->stride,
                   .x_stride = g->x_stride,
                   .y_stride = g->y_stride,
                   .n_w = n_w,
                   .m = m,
                   .n = p->n,
                   .accumulate = p->accumulate};
    g->ops->dots(&d);
}

/* All of x with up to KVF__GEMV_ROWS rows of w. */
static void few_columns(const kvf__gemm *g, const run *r, uint32_t column, float *scratch) {
    for (uint32_t e = 0; e < g->w->k; e += FEW_K) {
        piece p = piece_of(g, r, e, scratch);
        dots(g, &p, 0, r->n, column, 0, g->m);
    }
}

static void few_rows(void *ctx, uint32_t item, uint32_t thread) {
    const struct slices *s = ctx;
    const kvf__gemm *g = s->g;
    uint32_t column = item * s->columns, end = KVF__MIN(column + s->columns, g->w->n);
    for (; column < end;) {
        run r = run_at(g->w, column, KVF__MIN(column + KVF__GEMV_ROWS, end));
        few_columns(g, &r, column, g->scratch + thread * g->scratch_floats);
        column += r.n;
    }
}

/* ---- Many rows of x, with the same bits ----------------------------------------------------------------- */

/* As many rows of x as the registers take stay in the first-level cache while a slice of w comes from the second. */
static void one_tile(void *ctx, uint32_t item, uint32_t thread) {
    const struct slices *s = ctx;
    const kvf__gemm *g = s->g;
    uint32_t column = item % s->n_column_slices * s->columns, end = KVF__MIN(column + s->columns, g->w->n);
    uint32_t begin = item / s->n_column_slices * SLICE_ROWS, m = KVF__MIN((uint32_t)SLICE_ROWS, g->m - begin);
    for (; column < end;) {
        run r = run_at(g->w, column, end);
        for (uint32_t e = 0; e < g->w->k; e += FEW_K) {
            piece p = piece_of(g, &r, e, g->scratch + thread * g->scratch_floats);
            for (uint32_t j = 0, groups = kvf__ceil_div(m, g->ops->rows), now; j < m; j += now, groups--) {
                now = kvf__ceil_div(m - j, groups);
                for (uint32_t i = 0; i < r.n; i += KVF__GEMV_ROWS)
                    dots(g, &p, i, KVF__MIN(r.n - i, (uint32_t)KVF__GEMV_ROWS), column + i, begin + j, now);
            }
        }
        column += r.n;
    }
}

/* ---- Many rows of x ---------------------------------------------------------------------------------- */

/* oneDNN runs on OpenMP, whose number of threads belongs to the calling thread. It is one during a call, since our
 * stream provides the threads. Declared here because omp.h comes with a compiler, but the runtime with oneDNN. */
extern int omp_get_max_threads(void);
extern void omp_set_num_threads(int n_threads);

static bool multiply(const kvf__gemm *g, const float *w, uint32_t row, uint32_t m, uint32_t column, uint32_t n) {
    int n_threads = omp_get_max_threads();
    omp_set_num_threads(1);
    dnnl_status_t status =
        dnnl_sgemm('N', 'T', m, n, g->w->k, 1, g->x + row * g->x_stride, (dnnl_dim_t)g->x_stride, w, g->w->k,
                   g->accumulate ? 1 : 0, g->y + row * g->y_stride + column, (dnnl_dim_t)g->y_stride);
    omp_set_num_threads(n_threads);
    return status == dnnl_success;
}

/* A slice in fp32: where it lies in the file, when it does, or dequantised into the scratch. */
static const float *slice_of(const kvf__gemm *g, uint32_t column, uint32_t n, float *scratch) {
    for (uint32_t done = 0; done < n;) {
        run r = run_at(g->w, column + done, column + n);
        if (r.n == n && r.type == KVF__TENSOR_F32) return (const float *)(const void *)r.data;
        (void)g->ops->dequantize(r.type, r.data, (size_t)r.n * g->w->k, scratch + (size_t)done * g->w->k);
        done += r.n;
    }
    return scratch;
}

static void one_slice(void *ctx, uint32_t item, uint32_t thread) {
    struct slices *s = ctx;
    const kvf__gemm *g = s->g;
    uint32_t column = item % s->n_column_slices * s->columns, row = item / s->n_column_slices * SLICE_ROWS;
    uint32_t m = KVF__MIN((uint32_t)SLICE_ROWS, g->m - row), n = KVF__MIN(s->columns, g->w->n - column);
    const float *w = slice_of(g, column, n, g->scratch + thread * g->scratch_floats);
    if (!multiply(g, w, row, m, column, n)) atomic_store_explicit(&s->failed, true, memory_order_relaxed);
}

/* ---- Rows of x in 8 bits ------------------------------------------------------------------------------ */

enum { FAST_ROWS_AN_ITEM = 8 };

/* All rows' bytes, then all rows' blocks. */
static int8_t *fast_bytes(const kvf__gemm *g, uint32_t row) { return (int8_t *)g->quantised + (size_t)row * g->w->k; }
static kvf__fast_block *fast_blocks(const kvf__gemm *g, uint32_t row) {
    size_t n = g->w->k / KVF__FAST_BLOCK;
    return (kvf__fast_block *)(void *)fast_bytes(g, g->m) + row * n;
}

size_t kvf__gemm_quantised_bytes(uint32_t m, uint32_t k) {
    size_t bytes, block = KVF__FAST_BLOCK + sizeof(kvf__fast_block);
    return kvf__mul(m, kvf__ceil_div(k, KVF__FAST_BLOCK), &bytes) && kvf__mul(bytes, block, &bytes) ? bytes : 0;
}

static void quantise_rows(void *ctx, uint32_t item, uint32_t thread) {
    const struct slices *s = ctx;
    const kvf__gemm *g = s->g;
    uint32_t begin = item * FAST_ROWS_AN_ITEM, end = KVF__MIN(begin + FAST_ROWS_AN_ITEM, g->m);
    (void)thread;
    for (uint32_t row = begin; row < end; row++)
        g->fast->quantise(g->x + row * g->x_stride, g->w->k, fast_bytes(g, row), fast_blocks(g, row));
}

/* Up to KVF__FAST_ROWS rows of w by all of x. */
static void fast_columns(const kvf__gemm *g, const run *r, uint32_t column, float *scratch) {
    kvf__fast_panel *panels = (kvf__fast_panel *)(void *)scratch;
    uint32_t n_blocks = g->w->k / KVF__FAST_BLOCK, most = FEW_K / KVF__FAST_BLOCK;
    for (uint32_t b = 0, n; b < n_blocks; b += n) {
        n = KVF__MIN(n_blocks - b, most);
        g->fast->unpack(r->type, r->data + b * kvf__fast_block_bytes(r->type), r->row_bytes, r->n, n, panels);
        g->fast->dots(&(kvf__fast_dots){.panels = panels,
                                        .q = fast_bytes(g, 0) + (size_t)b * KVF__FAST_BLOCK,
                                        .blocks = fast_blocks(g, 0) + b,
                                        .y = g->y + column,
                                        .q_stride = g->w->k,
                                        .block_stride = n_blocks,
                                        .y_stride = g->y_stride,
                                        .type = r->type,
                                        .n_w = r->n,
                                        .m = g->m,
                                        .n_blocks = n,
                                        .accumulate = b || g->accumulate});
    }
}

/* Parts of other types, beside which one is in 8 bits, as few rows are. */
static void fast_rows(void *ctx, uint32_t item, uint32_t thread) {
    const struct slices *s = ctx;
    const kvf__gemm *g = s->g;
    float *scratch = g->scratch + thread * g->scratch_floats;
    uint32_t column = item * s->columns, end = KVF__MIN(column + s->columns, g->w->n);
    for (; column < end;) {
        run r = run_at(g->w, column, KVF__MIN(column + KVF__FAST_ROWS, end));
        if (kvf__fast_can(r.type, r.row_bytes)) {
            fast_columns(g, &r, column, scratch);
        } else {
            r.n = KVF__MIN(r.n, (uint32_t)KVF__GEMV_ROWS);
            few_columns(g, &r, column, scratch);
        }
        column += r.n;
    }
}

static bool is_fast(const kvf__gemm *g) {
    bool any = false;
    for (uint32_t i = 0; g->fast && i < g->w->n_parts; i++)
        any |= kvf__fast_can(g->w->parts[i].type, g->w->parts[i].row_bytes);
    return any;
}

static void run_fast(kvf_stream *stream, struct slices *s) {
    const kvf__gemm *g = s->g;
    uint32_t part = round_up(kvf__ceil_div(g->w->n, FEW_PARTS), KVF__FAST_ROWS);
    s->columns = KVF__MIN(part, (uint32_t)FEW_COLUMNS_MAX);
    kvf__stream_for(stream, kvf__ceil_div(g->m, FAST_ROWS_AN_ITEM), quantise_rows, s);
    kvf__stream_for(stream, kvf__ceil_div(g->w->n, s->columns), fast_rows, s);
}

static kvf__gemm_way way_of(const kvf__gemm *g) {
    if (g->way != KVF__GEMM_AUTO) return g->way;
    if (g->m <= g->ops->few && (g->m <= KVF__GEMV_ROWS || (size_t)g->m * g->w->k <= FEW_X_FLOATS))
        return KVF__GEMM_ROWS;
    return g->deterministic ? KVF__GEMM_TILES : KVF__GEMM_SLICES;
}

kvf_status kvf__gemm_run(kvf_stream *stream, const kvf__gemm *g) {
    struct slices s = {.g = g};
    kvf__gemm_way way = way_of(g);
    if (is_fast(g)) {
        run_fast(stream, &s);
        return KVF_OK;
    }
    if (way == KVF__GEMM_ROWS) {
        uint32_t part = round_up(kvf__ceil_div(g->w->n, FEW_PARTS), KVF__GEMV_ROWS);
        s.columns = KVF__MIN(part, (uint32_t)FEW_COLUMNS_MAX);
        kvf__stream_for(stream, kvf__ceil_div(g->w->n, s.columns), few_rows, &s);
        return KVF_OK;
    }
    s.columns = slice_columns(g->w);
    s.n_column_slices = kvf__ceil_div(g->w->n, s.columns);
    kvf__stream_for(stream, s.n_column_slices * kvf__ceil_div(g->m, SLICE_ROWS),
                    way == KVF__GEMM_TILES ? one_tile : one_slice, &s);
    return atomic_load_explicit(&s.failed, memory_order_relaxed) ? KVF_E_NO_MEMORY : KVF_OK;
}
