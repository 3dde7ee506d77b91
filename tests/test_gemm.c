/* Products and the small operations of the forward pass against plain loops in double. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "model/gemm.h"
#include "model/ops.h"
#include "tests/gguf_writer.h"

static float *random_floats(size_t n, uint64_t *rng) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = gw_normal(rng);
    return x;
}

/* Rows are further apart than they are long; what lies between them must stay. */
static void check_product(kvf_stream *one, kvf_stream *three, uint32_t m, uint32_t n, uint32_t k, bool accumulate,
                          uint64_t *rng) {
    size_t xs = k + 5, ys = n + 3;
    float *x = random_floats(m * xs, rng), *w = random_floats((size_t)n * k, rng), *before = random_floats(m * ys, rng);
    float *y = malloc(m * ys * sizeof *y), *again = malloc(m * ys * sizeof *y);
    memcpy(y, before, m * ys * sizeof *y);
    memcpy(again, before, m * ys * sizeof *y);
    cr_assert_eq(kvf__gemm_run(one, &(kvf__gemm){m, n, k, x, w, y, xs, ys, accumulate}), KVF_OK);
    cr_assert_eq(kvf__gemm_run(three, &(kvf__gemm){m, n, k, x, w, again, xs, ys, accumulate}), KVF_OK);
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < ys; j++) {
            double want = j < n && !accumulate ? 0 : before[i * ys + j], scale = 1;
            for (uint32_t e = 0; j < n && e < k; e++) {
                want += (double)x[i * xs + e] * w[(size_t)j * k + e];
                scale += fabs((double)x[i * xs + e] * w[(size_t)j * k + e]);
            }
            double bound = j < n ? 1e-6 * scale : 0;
            cr_assert(fabs(want - y[i * ys + j]) <= bound, "%u x %u x %u, accumulate %d: element %u, %u is %g, not %g",
                      m, n, k, accumulate, i, j, (double)y[i * ys + j], want);
        }
    cr_assert(!memcmp(y, again, m * ys * sizeof *y), "%u x %u x %u: three threads give other bits", m, n, k);
    free(x);
    free(w);
    free(before);
    free(y);
    free(again);
}

/* Also the check that the BLAS of this machine computes what it should: old ones have wrong kernels for some CPUs. */
Test(gemm, agrees_with_a_naive_product) {
    static const uint32_t rows[] = {1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 257};
    static const uint32_t shapes[][2] = {{1, 1},    {3, 8},    {33, 40},   {64, 64},
                                         {100, 96}, {300, 24}, {192, 576}, {257, 130}}; /* n, k */
    uint64_t rng = 1;
    kvf_stream *one, *three;
    cr_assert(kvf_stream_create_cpu(NULL, 1, &one, NULL) == KVF_OK &&
              kvf_stream_create_cpu(NULL, 3, &three, NULL) == KVF_OK);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            check_product(one, three, rows[i], shapes[s][0], shapes[s][1], (i + s) % 2, &rng);
    check_product(one, three, 16, 1536, 576, false, &rng);
    check_product(one, three, 130, 576, 1536, true, &rng);
    check_product(one, three, 1, 9000, 64, false, &rng);
    kvf_stream_destroy(one);
    kvf_stream_destroy(three);
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
