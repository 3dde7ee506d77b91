/* The forward pass of a model whose layers have a sliding window, beyond it. */
#define _DEFAULT_SOURCE
#include "tests/forward_rig.h"
#include "tests/naive_llama.h"
#include "tests/tiny_models.h"
#include <criterion/criterion.h>
#include <math.h>
#include <unistd.h>

static const uint32_t first = 0; /* the sequence most tests use */

static kvf_model *open_tiny(const struct tiny_model_params *params) {
    char path[256];
    kvf_error err;
    kvf_model *model = NULL;
    gw_temp_path(path, sizeof path);
    cr_assert(kvf_test_write_tiny_model(path, params) == 0);
    kvf_status st = kvf_model_open(path, NULL, &model, &err);
    unlink(path);
    cr_assert(st == KVF_OK, "%s", err.text);
    return model;
}

static float *floats(size_t n) { return rig_memory(n * sizeof(float)); }

static void tiny_tokens(uint32_t *ids, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) ids[i] = tiny_token(i);
}

static double worst_of_naive(const float *a, const double *b) {
    double most = 0;
    for (uint32_t i = 0; i < TINY_N_VOCAB; i++) most = isnan(a[i]) ? INFINITY : fmax(most, fabs((double)a[i] - b[i]));
    return most;
}

/* Beyond its window a sliding attention sees its newest positions alone, whether the tables keep the others or not. */
Test(forward_windows, a_sliding_window_matches_the_naive_decoder) {
    enum { N = 100, WINDOW = 24 };
    static const uint32_t chunks[] = {1, 16, 48, N};
    const struct tiny_model_params params = {.arch = "mistral", .seed = 25, .sliding_window = WINDOW};
    uint32_t ids[N], windows[8];
    float *logits = floats(TINY_N_VOCAB);
    kvf_model *m = open_tiny(&params);
    kvf_model wide = *m;
    wide.info.sliding_window = 0;
    tiny_tokens(ids, N);
    double *want = naive_logits(m, ids, N, NAIVE_PAIRS), *full = naive_logits(&wide, ids, N, NAIVE_PAIRS);
    for (uint32_t i = 0; i < 8; i++) windows[i] = WINDOW;
    for (int drop = 0; drop < 2; drop++)
        for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            forward_rig r;
            rig_open_windows(&r, m, KVF_F32, 2, 0, 64, N, N, drop ? windows : NULL);
            for (uint32_t done = 0, n; done < N; done += n) {
                n = KVF__MIN(chunks[c], N - done);
                rig_run(&r, &first, &n, 1, chunks[c] == 1, ids + done, logits);
                const double *at = want + (size_t)(done + n - 1) * TINY_N_VOCAB;
                double off = worst_of_naive(logits, at);
                cr_assert(off < 5e-5, "chunk %u, %u tokens: off by %g", chunks[c], done + n, off);
                at = full + (size_t)(done + n - 1) * TINY_N_VOCAB;
                cr_assert(done + n <= WINDOW || worst_of_naive(logits, at) > 1e-3, "no window");
            }
            cr_assert(drop && chunks[c] < N ? r.view.n_slots[0] < N : r.view.n_slots[0] == N);
            rig_close(&r);
        }
    free(want);
    free(full);
    kvf_model_close(m);
    free(logits);
}
