/* The forward pass of a model whose layers have a sliding window, beyond it. */
#define _DEFAULT_SOURCE
#include "tests/forward_rig.h"
#include "tests/naive_llama.h"
#include "tests/tiny_models.h"
#include <criterion/criterion.h>
#include <math.h>

static double worst_of_naive(const float *a, const double *b) {
    double most = 0;
    for (uint32_t i = 0; i < TINY_N_VOCAB; i++) most = isnan(a[i]) ? INFINITY : fmax(most, fabs((double)a[i] - b[i]));
    return most;
}

/* Layers that slide and layers that do not, in one model. */
Test(forward_windows, layers_that_slide_among_others_match_the_naive_decoder) {
    enum { N = 100, WINDOW = 24, LAYERS = 5 };
    static const uint32_t chunks[] = {1, 16, N};
    for (uint32_t p = 0; p < 3; p++) {
        const struct tiny_model_params params = {.arch = p ? "mistral" : "llama",
                                                 .n_layers = LAYERS,
                                                 .seed = 26 + p,
                                                 .sliding_window = WINDOW,
                                                 .sliding_period = p == 1   ? 2
                                                                   : p == 2 ? 4
                                                                            : 0,
                                                 .sliding_layers = p ? 0 : 0x13};
        uint32_t ids[N], windows[LAYERS];
        float *logits = rig_floats(TINY_N_VOCAB);
        kvf_model *m = open_tiny(&params);
        kvf_model uniform = *m;
        memset(uniform.full_attention, 0, sizeof uniform.full_attention);
        tiny_tokens(ids, N);
        double *want = naive_logits(m, ids, N, NAIVE_PAIRS), *other = naive_logits(&uniform, ids, N, NAIVE_PAIRS);
        for (uint32_t l = 0; l < LAYERS; l++) windows[l] = kvf_model_layer_window(m, l);
        for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++) {
            forward_rig r;
            rig_open_windows(&r, m, KVF_F32, 2, 0, 128, N, N, windows);
            for (uint32_t done = 0, n; done < N; done += n) {
                n = KVF__MIN(chunks[c], N - done);
                rig_run(&r, &rig_first, &n, 1, chunks[c] == 1, ids + done, logits);
                double off = worst_of_naive(logits, want + (size_t)(done + n - 1) * TINY_N_VOCAB);
                cr_assert(off < 2e-4, "pattern %u, chunk %u, %u tokens: off by %g", p, chunks[c], done + n, off);
            }
            cr_assert_gt(worst_of_naive(logits, other + (size_t)(N - 1) * TINY_N_VOCAB), 1e-3, "all layers slide");
            for (uint32_t l = 0; l < LAYERS; l++)
                cr_assert_eq(r.view.n_slots[l] < N, windows[l] && chunks[c] < N, "pattern %u, layer %u", p, l);
            rig_close(&r);
        }
        free(want);
        free(other);
        kvf_model_close(m);
        free(logits);
    }
}

/* Beyond its window a sliding attention sees its newest positions alone, whether the tables keep the others or not. */
Test(forward_windows, a_sliding_window_matches_the_naive_decoder) {
    enum { N = 100, WINDOW = 24 };
    static const uint32_t chunks[] = {1, 16, 48, N};
    const struct tiny_model_params params = {.arch = "mistral", .seed = 25, .sliding_window = WINDOW};
    uint32_t ids[N], windows[8];
    float *logits = rig_floats(TINY_N_VOCAB);
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
                rig_run(&r, &rig_first, &n, 1, chunks[c] == 1, ids + done, logits);
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
