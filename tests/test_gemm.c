/* Products and the small operations of the forward pass against plain loops in double. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "model/fast.h"
#include "model/gemm.h"
#include "model/gemv.h"
#include "model/ops.h"
#include "model/weights.h"
#include "tests/gguf_writer.h"

static float *random_floats(size_t n, uint64_t *rng) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = gw_normal(rng);
    return x;
}

static const uint32_t types[] = {GW_F32,  GW_F16,  GW_BF16, GW_Q8_0, GW_Q4_0, GW_Q4_1,
                                 GW_Q5_0, GW_Q5_1, GW_Q4_K, GW_Q5_K, GW_Q6_K};
enum { N_TYPES = sizeof types / sizeof *types, MAX_FORMS = 3 };

/* The forms that this CPU has; returns their number. */
static int forms_of(const kvf__gemv_ops **out) {
    kvf__cpu cpu = kvf__cpu_detect();
    int n = 0;
    out[n++] = kvf__gemv_ops_for((kvf__cpu){.avx2_fma_f16c = false});
    if (cpu.avx2_fma_f16c) out[n++] = kvf__gemv_ops_for((kvf__cpu){.avx2_fma_f16c = true});
    if (cpu.avx512) out[n++] = kvf__gemv_ops_for(cpu);
    return n;
}

/* A random matrix of parts of the given types, at odd addresses but for F32, and the same in fp32. */
typedef struct matrix {
    kvf__matrix m;
    void *stores[KVF__MATRIX_PARTS];
    float *floats;
} matrix;

static matrix random_matrix(uint32_t n_parts, const uint32_t *part_types, const uint32_t *n_rows, uint32_t k,
                            uint64_t *rng) {
    matrix a = {.m = {.n_parts = n_parts, .k = k}};
    for (uint32_t p = 0; p < n_parts; p++) a.m.n += n_rows[p];
    a.floats = random_floats((size_t)a.m.n * k, rng);
    float *at = a.floats;
    for (uint32_t p = 0; p < n_parts; p++) {
        size_t elements, bytes, n = (size_t)n_rows[p] * k;
        gw_geometry(part_types[p], &elements, &bytes);
        unsigned char *data = malloc(n / elements * bytes + 1);
        a.stores[p] = data;
        data += part_types[p] != GW_F32;
        gw_quantize(part_types[p], at, n, data);
        cr_assert(kvf__dequantize(part_types[p], data, n, at));
        a.m.parts[p].type = part_types[p];
        a.m.parts[p].n_rows = n_rows[p];
        a.m.parts[p].data = data;
        a.m.parts[p].row_bytes = k / elements * bytes;
        at += n;
    }
    return a;
}

static void free_matrix(matrix *a) {
    for (int p = 0; p < KVF__MATRIX_PARTS; p++) free(a->stores[p]);
    free(a->floats);
}

static struct {
    kvf_stream *one, *three;
    const kvf__gemv_ops *forms[MAX_FORMS];
    int n_forms;
} rig;

static void open_rig(void) {
    cr_assert(kvf_stream_create_cpu(NULL, 1, &rig.one, NULL) == KVF_OK &&
              kvf_stream_create_cpu(NULL, 3, &rig.three, NULL) == KVF_OK);
    rig.n_forms = forms_of(rig.forms);
}

static void close_rig(void) {
    kvf_stream_destroy(rig.one);
    kvf_stream_destroy(rig.three);
}

static void compare(const kvf__gemm *g, const matrix *a, const float *before, const float *y, int form) {
    uint32_t n = a->m.n, k = a->m.k;
    for (uint32_t i = 0; i < g->m; i++)
        for (uint32_t j = 0; j < g->y_stride; j++) {
            double want = j < n && !g->accumulate ? 0 : before[i * g->y_stride + j], scale = 1;
            for (uint32_t e = 0; j < n && e < k; e++) {
                double v = (double)g->x[i * g->x_stride + e] * a->floats[(size_t)j * k + e];
                want += v;
                scale += fabs(v);
            }
            double bound = j < n ? 1e-6 * scale : 0, have = y[i * g->y_stride + j];
            cr_assert(fabs(want - have) <= bound,
                      "type %u, form %d, way %d, %u x %u x %u, accumulate %d: element %u, %u is %g, not %g",
                      a->m.parts[0].type, form, (int)g->way, g->m, n, k, g->accumulate, i, j, have, want);
        }
}

/* Rows are further apart than they are long; what lies between them must stay. */
static void check_product(const matrix *a, uint32_t m, kvf__gemm_way way, int form, bool accumulate, uint64_t *rng) {
    size_t xs = a->m.k + 5, ys = a->m.n + 3, y_bytes = m * ys * sizeof(float);
    float *x = random_floats(m * xs, rng), *before = random_floats(m * ys, rng);
    float *y = malloc(y_bytes), *again = malloc(y_bytes);
    kvf__gemm g = {.m = m,
                   .w = &a->m,
                   .x = x,
                   .y = y,
                   .x_stride = xs,
                   .y_stride = ys,
                   .accumulate = accumulate,
                   .way = way,
                   .ops = rig.forms[form],
                   .scratch_floats = kvf__gemm_scratch_floats(&a->m)};
    g.scratch = random_floats(3 * g.scratch_floats, rng);
    memcpy(y, before, y_bytes);
    memcpy(again, before, y_bytes);
    cr_assert_eq(kvf__gemm_run(rig.one, &g), KVF_OK);
    compare(&g, a, before, y, form);
    g.y = again;
    cr_assert_eq(kvf__gemm_run(rig.three, &g), KVF_OK);
    cr_assert(!memcmp(y, again, y_bytes), "%u x %u x %u: three threads give other bits", m, a->m.n, a->m.k);
    free(g.scratch);
    free(x);
    free(before);
    free(y);
    free(again);
}

TestSuite(gemm, .init = open_rig, .fini = close_rig);

/* Also the check that the BLAS of this machine computes what it should: old ones have wrong kernels for some CPUs. */
Test(gemm, agrees_with_a_naive_product) {
    static const uint32_t rows[] = {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 257};
    static const uint32_t shapes[][2] = {{1, 1},    {3, 8},    {33, 40},   {64, 64},
                                         {100, 96}, {300, 24}, {192, 576}, {257, 130}}; /* n, k */
    uint64_t rng = 1;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        matrix a = random_matrix(1, types, &shapes[s][0], shapes[s][1], &rng);
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
            check_product(&a, rows[i], KVF__GEMM_AUTO, rig.n_forms - 1, (i + s) % 2, &rng);
        free_matrix(&a);
    }
    static const uint32_t large[][3] = {{1536, 576, 16}, {576, 1536, 130}, {9000, 64, 1}};
    for (size_t s = 0; s < 3; s++) {
        matrix a = random_matrix(1, types, &large[s][0], large[s][1], &rng);
        check_product(&a, large[s][2], KVF__GEMM_AUTO, rig.n_forms - 1, s % 2, &rng);
        free_matrix(&a);
    }
}

/* Every type in every form and way: rows from 1 to 40, odd numbers of columns, rows longer than the piece that is
 * dequantised at once. */
Test(gemm, every_type_form_and_way) {
    uint64_t rng = 4;
    for (int t = 0; t < N_TYPES; t++) {
        size_t elements, bytes;
        gw_geometry(types[t], &elements, &bytes);
        const uint32_t shapes[][2] = {
            {13, elements == 1 ? 75 : (uint32_t)elements}, {41, elements == 256 ? 768 : 544}, {9, 1280}}; /* n, k */
        for (int s = 0; s < 3; s++) {
            matrix a = random_matrix(1, &types[t], &shapes[s][0], shapes[s][1], &rng);
            for (uint32_t m = 1; m <= 40; m += s == 0 ? 1 : 13)
                for (int form = 0; form < rig.n_forms; form++)
                    for (int way = KVF__GEMM_ROWS; way <= KVF__GEMM_TILES; way++)
                        check_product(&a, m, (kvf__gemm_way)way, form, m % 2, &rng);
            free_matrix(&a);
        }
    }
}

/* Parts of different types and sizes that no slice keeps to. */
Test(gemm, stacked_parts) {
    static const uint32_t n_rows[][3] = {{37, 5, 11}, {1, 1, 1}, {64, 300, 7}};
    uint64_t rng = 5;
    for (int t = 0; t < N_TYPES; t++)
        for (int s = 0; s < 3; s++) {
            uint32_t three[3] = {types[t], types[(t + 1) % N_TYPES], types[(t + 4) % N_TYPES]};
            matrix a = random_matrix(2 + (uint32_t)s % 2, three, n_rows[s], 256, &rng);
            for (int form = 0; form < rig.n_forms; form++)
                for (int way = KVF__GEMM_ROWS; way <= KVF__GEMM_TILES; way++)
                    check_product(&a, 5, (kvf__gemm_way)way, form, s % 2, &rng);
            free_matrix(&a);
        }
}

/* To the bit, and nothing is read or written beyond the elements: the allocation ends there. */
Test(gemm, forms_dequantise_alike) {
    uint64_t rng = 6;
    for (int t = 0; t < N_TYPES; t++)
        for (uint32_t blocks = 1; blocks < 70; blocks++) {
            size_t elements, bytes, n;
            gw_geometry(types[t], &elements, &bytes);
            n = blocks * elements;
            float *x = random_floats(n, &rng), *want = malloc(n * sizeof *want), *have = malloc(n * sizeof *have);
            unsigned char *src = malloc(blocks * bytes);
            gw_quantize(types[t], x, n, src);
            cr_assert(kvf__dequantize(types[t], src, n, want));
            for (int form = 0; form < rig.n_forms; form++) {
                cr_assert(rig.forms[form]->dequantize(types[t], src, n, have));
                cr_assert(!memcmp(want, have, n * sizeof *have), "type %u, form %d, %zu elements", types[t], form, n);
            }
            free(x);
            free(want);
            free(have);
            free(src);
        }
    float x = 3;
    for (int form = 0; form < rig.n_forms; form++) cr_assert(!rig.forms[form]->dequantize(10, &x, 1, &x));
}

/* Rows [begin, begin + m) of a product, into y's first rows. */
static void rows_product(kvf__gemm g, uint32_t begin, uint32_t m, float *y, kvf_stream *stream) {
    g.m = m;
    g.x += begin * g.x_stride;
    g.y = y;
    cr_assert_eq(kvf__gemm_run(stream, &g), KVF_OK);
}

/* One row's product has the same bits whatever it is computed beside, where it stands, and how many threads there are:
 * through few rows, many, and what chooses between them. */
Test(gemm, rows_do_not_depend_on_one_another) {
    enum { M = 263 };
    static const uint32_t n_rows[2] = {37, 21}, ks[] = {1120, 2304};
    static const uint32_t some[] = {1, 2, 3, 5, 6, 7, 8, 13, 16, 31, 63, 64, 65, 66, 67, 100, 255, 256, 257, M};
    uint64_t rng = 7;
    for (int t = 0; t < N_TYPES; t++) {
        const uint32_t two[2] = {types[t], types[(t + 3) % N_TYPES]};
        size_t elements[2], bytes;
        for (int i = 0; i < 2; i++) gw_geometry(two[i], &elements[i], &bytes);
        const uint32_t k = ks[elements[0] == 256 || elements[1] == 256];
        matrix a = random_matrix(2, two, n_rows, k, &rng);
        const uint32_t n = a.m.n;
        float *x = random_floats((size_t)M * k, &rng), *all = random_floats((size_t)M * n, &rng);
        float *start = malloc(M * n * sizeof *all), *y = malloc(M * n * sizeof *y);
        memcpy(start, all, M * n * sizeof *all);
        for (int form = 0; form < rig.n_forms; form++) {
            kvf__gemm g = {.w = &a.m,
                           .x = x,
                           .x_stride = k,
                           .y_stride = n,
                           .accumulate = form % 2,
                           .way = KVF__GEMM_ROWS,
                           .ops = rig.forms[form],
                           .scratch_floats = kvf__gemm_scratch_floats(&a.m)};
            g.scratch = random_floats(3 * g.scratch_floats, &rng);
            memcpy(all, start, M * n * sizeof *all);
            rows_product(g, 0, M, all, rig.one);
            for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
                uint32_t m = some[i], begin = (M - m) / 2;
                for (int way = 0; way < 3; way++) {
                    static const kvf__gemm_way ways[] = {KVF__GEMM_AUTO, KVF__GEMM_TILES, KVF__GEMM_ROWS};
                    g.way = ways[way];
                    g.deterministic = true;
                    memcpy(y, start + begin * n, m * n * sizeof *y);
                    rows_product(g, begin, m, y, i % 2 ? rig.one : rig.three);
                    cr_assert(!memcmp(y, all + begin * n, m * n * sizeof *y),
                              "types %u and %u, form %d, way %d: %u rows have other bits than %u", two[0], two[1], form,
                              (int)g.way, m, M);
                }
            }
            free(g.scratch);
        }
        free(x);
        free(all);
        free(start);
        free(y);
        free_matrix(&a);
    }
}

/* ---- Activations in 8 bits ------------------------------------------------------------------------------ */

/* The forms that this CPU has; returns their number. */
static int fast_forms(const kvf__fast_ops *out[4]) {
    kvf__cpu cpu = kvf__cpu_detect();
    int n = 0;
    out[n++] = kvf__fast_ops_for((kvf__cpu){.avx512 = false});
    if (cpu.avx2_fma_f16c) out[n++] = kvf__fast_ops_for((kvf__cpu){.avx2_fma_f16c = true});
    if (cpu.avx_vnni) out[n++] = kvf__fast_ops_for((kvf__cpu){.avx2_fma_f16c = true, .avx_vnni = true});
    if (cpu.avx512_vnni) out[n++] = kvf__fast_ops_for(cpu);
    return n;
}

static const uint32_t fast_types[] = {GW_Q4_0, GW_Q4_1, GW_Q8_0};

Test(gemm, forms_quantise_alike) {
    enum { N = 256 };
    const kvf__fast_ops *forms[4];
    int n_forms = fast_forms(forms);
    uint64_t rng = 11;
    for (int trial = 0; trial < 200; trial++) {
        float *x = random_floats(N, &rng), size = ldexpf(1, trial % 60 - 30);
        for (int i = 0; i < N; i++) x[i] *= size;
        for (int i = 64; i < 96; i++) x[i] = 0;
        x[100] = trial % 4 == 0 ? NAN : trial % 4 == 1 ? -INFINITY : FLT_MAX;
        x[130] = 1e-38f * (float)trial;
        for (int i = 160; i < 192; i++) x[i] = (float)(i - 176) * 127 / 16 + 0.5f; /* ties */
        int8_t want[N], have[N];
        kvf__fast_block blocks[N / 32], others[N / 32];
        forms[0]->quantise(x, N, want, blocks);
        for (int b = 0; b < N / 32; b++) {
            if (b == 3 && trial % 4 < 2) {
                cr_assert(isnan(blocks[b].d) && isnan(blocks[b].d_sum) && blocks[b].sum == 0);
                continue;
            }
            double most = 0, sum = 0;
            for (int i = 32 * b; i < 32 * b + 32; i++) most = fmax(most, fabs(x[i])), sum += want[i];
            cr_assert(blocks[b].sum == (float)sum && blocks[b].d_sum == blocks[b].d * (float)sum);
            for (int i = 32 * b; i < 32 * b + 32; i++)
                cr_assert(fabs(want[i] * (double)blocks[b].d - x[i]) <= most / 253 + 1e-30, "element %d: %g as %d", i,
                          (double)x[i], want[i]);
        }
        for (int form = 1; form < n_forms; form++) {
            forms[form]->quantise(x, N, have, others);
            cr_assert(!memcmp(want, have, N), "form %d", form);
            for (int b = 0; b < N / 32; b++)
                if (isnan(blocks[b].d))
                    cr_assert(isnan(others[b].d) && others[b].sum == 0 && isnan(others[b].d_sum));
                else
                    cr_assert(!memcmp(&blocks[b], &others[b], sizeof *blocks), "form %d, block %d", form, b);
        }
        free(x);
    }
}

/* The product of what was quantised, in double; the last part may be of a type that takes x as it is. */
static void compare_fast(const kvf__gemm *g, const matrix *a, const float *before, const float *y, int form) {
    uint32_t n = a->m.n, k = a->m.k;
    uint32_t n_fast = kvf__fast_can(a->m.parts[2].type, 1) ? n : n - a->m.parts[2].n_rows;
    int8_t *q = malloc(k);
    kvf__fast_block *blocks = malloc(k / 32 * sizeof *blocks);
    for (uint32_t i = 0; i < g->m; i++) {
        g->fast->quantise(g->x + i * g->x_stride, k, q, blocks);
        for (uint32_t j = 0; j < g->y_stride; j++) {
            double want = j < n && !g->accumulate ? 0 : before[i * g->y_stride + j], scale = 1, lost = 0;
            for (uint32_t e = 0; j < n && e < k; e++) {
                double w = a->floats[(size_t)j * k + e], x = (double)blocks[e / 32].d * q[e];
                if (j >= n_fast) x = g->x[i * g->x_stride + e];
                want += w * x;
                scale += fabs(w * x);
                lost += w * (g->x[i * g->x_stride + e] - x);
            }
            double have = y[i * g->y_stride + j];
            cr_assert(fabs(want - have) <= (j < n ? 2e-6 * scale : 0),
                      "type %u, form %d, %u rows: %u, %u is %g, not %g", a->m.parts[0].type, form, g->m, i, j, have,
                      want);
            cr_assert(fabs(lost) < 0.02 * scale, "8 bits cost %g of %g", lost, scale);
        }
    }
    free(q);
    free(blocks);
}

/* All forms, any number and place of rows, and threads give the same bits; parts of other types are as few rows are. */
Test(gemm, products_in_8_bits) {
    enum { M = 70 };
    static const uint32_t n_rows[][3] = {{37, 5, 11}, {1, 1, 1}, {64, 300, 7}}, ks[] = {32, 1120, 576};
    static const uint32_t some[] = {1, 2, 3, 4, 5, 7, 8, 9, 33, M};
    const kvf__fast_ops *forms[4];
    int n_forms = fast_forms(forms);
    uint64_t rng = 12;
    for (int t = 0; t < 3; t++)
        for (int s = 0; s < 3; s++) {
            const uint32_t three[3] = {fast_types[t], fast_types[(t + 1) % 3],
                                       s == 2 ? GW_Q5_0 : fast_types[(t + 2) % 3]};
            matrix a = random_matrix(3, three, n_rows[s], ks[s], &rng);
            size_t k = ks[s], xs = k + 3, ys = a.m.n + 2, bytes = M * ys * sizeof(float);
            float *x = random_floats(M * xs, &rng), *before = random_floats(M * ys, &rng);
            float *all = malloc(bytes), *y = malloc(bytes);
            kvf__gemm g = {.m = M,
                           .w = &a.m,
                           .x = x,
                           .y = all,
                           .x_stride = xs,
                           .y_stride = ys,
                           .accumulate = s % 2,
                           .ops = rig.forms[0],
                           .scratch_floats = kvf__gemm_scratch_floats(&a.m)};
            g.scratch = aligned_alloc(64, 3 * g.scratch_floats * sizeof(float));
            g.quantised = malloc(kvf__gemm_quantised_bytes(M, (uint32_t)k));
            for (int form = 0; form < n_forms; form++) {
                g.fast = forms[form];
                memcpy(y, before, bytes);
                rows_product(g, 0, M, y, rig.one);
                if (form)
                    cr_assert(!memcmp(y, all, bytes), "form %d has other bits", form);
                else
                    memcpy(all, y, bytes);
                if (!form) compare_fast(&g, &a, before, all, form);
                for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
                    uint32_t m = some[i], begin = (M - m) / 2;
                    memcpy(y, before + begin * ys, m * ys * sizeof *y);
                    rows_product(g, begin, m, y, i % 2 ? rig.one : rig.three);
                    cr_assert(!memcmp(y, all + begin * ys, m * ys * sizeof *y), "form %d: %u rows", form, m);
                }
            }
            free(g.scratch);
            free(g.quantised);
            free(x);
            free(before);
            free(all);
            free(y);
            free_matrix(&a);
        }
    cr_assert_eq(kvf__gemm_quantised_bytes(UINT32_MAX, 32), (size_t)UINT32_MAX * (32 + sizeof(kvf__fast_block)));
}

/* To the byte, for every number of rows: and nothing is read beyond them, where the allocation ends. */
Test(gemm, forms_unpack_alike) {
    enum { BLOCKS = 3 };
    const kvf__fast_ops *forms[4];
    int n_forms = fast_forms(forms);
    uint64_t rng = 13;
    kvf__fast_panel *want = aligned_alloc(64, BLOCKS * sizeof *want), *have = aligned_alloc(64, BLOCKS * sizeof *have);
    for (int t = 0; t < 3; t++)
        for (uint32_t n = 1; n <= KVF__FAST_ROWS; n++) {
            size_t row = BLOCKS * kvf__fast_block_bytes(fast_types[t]);
            float *x = random_floats(n * BLOCKS * 32, &rng);
            unsigned char *rows = malloc(n * row);
            gw_quantize(fast_types[t], x, n * BLOCKS * 32, rows);
            memset(want, 0, BLOCKS * sizeof *want);
            memset(have, 0, BLOCKS * sizeof *have);
            forms[0]->unpack(fast_types[t], rows, row, n, BLOCKS, want);
            for (int form = 1; form < n_forms; form++) {
                forms[form]->unpack(fast_types[t], rows, row, n, BLOCKS, have);
                cr_assert(!memcmp(want, have, BLOCKS * sizeof *want), "type %u, form %d, %u rows", fast_types[t], form,
                          n);
            }
            free(x);
            free(rows);
        }
    free(want);
    free(have);
}

Test(gemm, norm_and_swiglu_in_both_forms) {
    uint64_t rng = 2;
    for (int avx2 = 0; avx2 <= kvf__cpu_detect().avx2_fma_f16c; avx2++) {
        const kvf__ops *ops = kvf__ops_for(avx2);
        for (uint32_t n = 1; n < 80; n++) {
            float *x = random_floats(n, &rng), *w = random_floats(n, &rng), *out = random_floats(n + 1, &rng),
                  end = out[n];
            double sum = 0;
            for (uint32_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
            ops->rms_norm(x, w, n, 1e-5f, out);
            for (uint32_t i = 0; i < n; i++) {
                double want = x[i] / sqrt(sum / n + (double)1e-5f) * w[i];
                cr_assert(fabs(want - out[i]) <= 1e-6 * fabs(want), "form %d, n %u: %g, not %g", avx2, n,
                          (double)out[i], want);
                x[i] *= n % 4 == 0 ? 60.0f : 3.0f; /* also where a sigmoid is 0 or 1 */
                out[i] = x[i];
            }
            ops->swiglu(out, w, n);
            for (uint32_t i = 0; i < n; i++) {
                double want = x[i] / (1 + exp(-(double)x[i])) * w[i];
                cr_assert(fabs(want - out[i]) <= 1e-6 * fabs(want) + 1e-30, "form %d: silu(%g) * %g is %g, not %g",
                          avx2, (double)x[i], (double)w[i], (double)out[i], want);
            }
            cr_assert(out[n] == end, "form %d writes past %u elements", avx2, n);
            free(x);
            free(w);
            free(out);
        }
        float odd[8] = {NAN, INFINITY, -INFINITY, 0, -0.0f, 1e30f, -1e30f, -100}, ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        ops->swiglu(odd, ones, 8);
        cr_assert(isnan(odd[0]) && isinf(odd[1]) && odd[3] == 0 && odd[4] == 0 && odd[5] == 1e30f, "form %d", avx2);
        cr_assert(fabsf(odd[7]) < 1e-30f, "form %d: silu(-100) is %g", avx2, (double)odd[7]);
    }
}

/* Angles of far positions keep their digits, dims beyond the rotated ones stay, and a rotation keeps lengths. */
Test(gemm, rotation) {
    enum { D = 16, PAIRS = 6 };
    double freqs[PAIRS];
    float r[2 * PAIRS], x[2 * D], before[2 * D];
    uint64_t rng = 3;
    for (int i = 0; i < PAIRS; i++) freqs[i] = pow(10000, -i / (double)PAIRS);
    static const uint32_t positions[] = {0, 1, 8191, 131071};
    for (int p = 0; p < 4; p++) {
        kvf__rope_angles(positions[p], freqs, PAIRS, r);
        for (int i = 0; i < 2 * D; i++) before[i] = x[i] = gw_normal(&rng);
        kvf__rope(x, 2, D, r, PAIRS);
        for (int i = 0; i < 2 * D; i++) {
            int pair = i % D / 2;
            double a = before[i & ~1], b = before[i | 1], angle = positions[p] * freqs[pair % PAIRS];
            double want = pair >= PAIRS ? before[i]
                          : i & 1       ? a * sin(angle) + b * cos(angle)
                                        : a * cos(angle) - b * sin(angle);
            cr_assert(fabs(want - x[i]) < 1e-6, "position %u, dim %d: %g, not %g", positions[p], i, (double)x[i], want);
        }
        for (int i = 0; i < 2 * D; i++) x[i] = before[i];
        kvf__rope_halves(x, 2, D, r, PAIRS);
        for (int i = 0; i < 2 * D; i++) { /* dims 0..5 with 6..11 */
            int k = i % D, pair = k % PAIRS, first = i - k + pair;
            double a = before[first], b = before[first + PAIRS], angle = positions[p] * freqs[pair];
            double want = k >= 2 * PAIRS ? before[i]
                          : k >= PAIRS   ? a * sin(angle) + b * cos(angle)
                                         : a * cos(angle) - b * sin(angle);
            cr_assert(fabs(want - x[i]) < 1e-6, "position %u, dim %d: %g, not %g", positions[p], i, (double)x[i], want);
        }
    }
}
