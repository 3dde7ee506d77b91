/* Drawing tokens: against plain arithmetic, over many seeds and steps. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_writer.h"
#include "kvfold/model.h"

enum { MAX_VOCAB = 512 };

static uint64_t scratch[MAX_VOCAB];

static void random_logits(uint64_t *rng, float *logits, uint32_t n, float deviation) {
    for (uint32_t i = 0; i < n; i++) logits[i] = deviation * gw_normal(rng);
}

/* Probability of every token by the definition: order, top_k, nucleus, temperature. Infinite and NaN logits apart. */
static void probabilities(const kvf_sampling *s, const float *logits, uint32_t n, double *p) {
    uint32_t order[MAX_VOCAB];
    double weights[MAX_VOCAB], total = 0, sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at && logits[order[at - 1]] < logits[i]; at--) order[at] = order[at - 1];
        order[at] = i;
        p[i] = 0;
    }
    uint32_t k = s->top_k && s->top_k < n ? s->top_k : n, m = 0;
    for (uint32_t i = 0; i < k; i++)
        total += weights[i] = exp(((double)logits[order[i]] - (double)logits[order[0]]) / (double)s->temperature);
    double top_p = s->top_p > 0 ? (double)s->top_p : 1;
    while (m < k && (m == 0 || sum < top_p * total)) sum += weights[m++];
    for (uint32_t i = 0; i < m; i++) p[order[i]] = weights[i] / sum;
}

Test(sample, greedy_takes_the_lower_of_equals) {
    const kvf_sampling s = {0};
    const float tie[] = {1, 3, 2, 3, 3}, nan_first[] = {NAN, 1, NAN, 2, 2}, all_nan[] = {NAN, NAN},
                low[] = {-INFINITY, -INFINITY}, high[] = {1, INFINITY, INFINITY};
    double logprob;
    cr_assert_eq(kvf_sample(&s, 0, tie, 5, NULL, &logprob), 1);
    cr_assert_float_eq(logprob, -log(3 + exp(-1) + exp(-2)), 1e-12);
    cr_assert_eq(kvf_sample(&s, 9, nan_first, 5, NULL, &logprob), 3);
    cr_assert_float_eq(logprob, -log(2 + exp(-1)), 1e-12);
    cr_assert_eq(kvf_sample(&s, 0, all_nan, 2, NULL, &logprob), 0);
    cr_assert(isinf(logprob) && logprob < 0);
    cr_assert_eq(kvf_sample(&s, 0, low, 2, NULL, &logprob), 0);
    cr_assert_float_eq(logprob, -log(2), 1e-12);
    cr_assert_eq(kvf_sample(&s, 0, high, 3, NULL, NULL), 1);
    const kvf_sampling nan_temperature = {.temperature = NAN};
    cr_assert_eq(kvf_sample(&nan_temperature, 0, tie, 5, scratch, NULL), 1);
}

Test(sample, narrow_settings_are_greedy) {
    uint64_t rng = 3;
    float logits[MAX_VOCAB];
    for (uint64_t i = 0; i < 500; i++) {
        uint32_t n = (uint32_t)(gw_random(&rng) % MAX_VOCAB) + 1;
        random_logits(&rng, logits, n, 2);
        if (i % 3 == 0)
            for (uint32_t j = 0; j < n; j++) logits[j] = roundf(logits[j]); /* ties */
        if (i % 5 == 0 && n > 1) logits[gw_random(&rng) % n] = NAN;
        uint32_t best = kvf_sample(&(kvf_sampling){0}, i, logits, n, NULL, NULL);
        const kvf_sampling narrow[] = {{.temperature = 1, .top_k = 1, .seed = i},
                                       {.temperature = 2, .top_p = 1e-6f, .seed = i},
                                       {.temperature = 5, .top_k = 1, .top_p = 0.5f, .seed = i}};
        for (int k = 0; k < 3; k++)
            cr_assert_eq(kvf_sample(&narrow[k], i, logits, n, scratch, NULL), best, "vector %llu, setting %d",
                         (unsigned long long)i, k);
        /* A temperature near 0 leaves only the best and its equals. */
        uint32_t cold = kvf_sample(&(kvf_sampling){.temperature = 1e-30f, .seed = i}, i, logits, n, scratch, NULL);
        cr_assert(!(logits[cold] < logits[best]) && !(logits[cold] > logits[best]));
    }
}

/* Over 20,000 steps each token comes up as often as its probability says: chi-square over tokens of 5 or more
 * expected. */
Test(sample, draws_by_the_distribution) {
    static const kvf_sampling settings[] = {
        {.temperature = 1, .seed = 1},
        {.temperature = 0.5f, .seed = 2},
        {.temperature = 2, .top_k = 10, .seed = 3},
        {.temperature = 1, .top_p = 0.8f, .seed = 4},
        {.temperature = 1.5f, .top_k = 20, .top_p = 0.6f, .seed = UINT64_MAX},
        {.temperature = 1, .top_k = 1000, .top_p = 1, .seed = 0},
    };
    enum { N_VOCAB = 40, N_DRAWS = 20000 };
    uint64_t rng = 17;
    float logits[N_VOCAB];
    random_logits(&rng, logits, N_VOCAB, 1);
    logits[7] = logits[3];
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        double p[N_VOCAB], chi = 0, log_total = 0;
        uint32_t counts[N_VOCAB] = {0}, n_cells = 0;
        probabilities(&settings[i], logits, N_VOCAB, p);
        for (uint32_t j = 0; j < N_VOCAB; j++) log_total += exp((double)logits[j]);
        for (uint64_t step = 0; step < N_DRAWS; step++) {
            double logprob;
            uint32_t id = kvf_sample(&settings[i], step, logits, N_VOCAB, scratch, &logprob);
            cr_assert_lt(id, N_VOCAB);
            cr_assert_float_eq(logprob, (double)logits[id] - log(log_total), 1e-9);
            counts[id]++;
        }
        for (uint32_t j = 0; j < N_VOCAB; j++) {
            double expected = p[j] * N_DRAWS;
            if (!(p[j] > 0)) cr_assert_eq(counts[j], 0, "setting %zu: token %u is outside and was drawn", i, j);
            if (expected < 5) continue;
            chi += (counts[j] - expected) * (counts[j] - expected) / expected;
            n_cells++;
        }
        /* Mean n_cells - 1, deviation sqrt(2 n_cells): five deviations. */
        cr_assert_lt(chi, n_cells + 5 * sqrt(2.0 * n_cells), "setting %zu: chi-square %.1f over %u tokens", i, chi,
                     n_cells);
    }
}

Test(sample, depends_on_seed_and_step_alone) {
    uint64_t rng = 5;
    float logits[MAX_VOCAB], others[MAX_VOCAB];
    random_logits(&rng, logits, MAX_VOCAB, 0.1f);
    random_logits(&rng, others, MAX_VOCAB, 1);
    const kvf_sampling s = {.temperature = 1, .seed = 42}, t = {.temperature = 1, .seed = 43};
    uint32_t n_same_seed = 0, n_same_step = 0;
    for (uint64_t step = 0; step < 1000; step++) {
        uint32_t id = kvf_sample(&s, step, logits, MAX_VOCAB, scratch, NULL);
        memset(scratch, 0xff, sizeof scratch);
        (void)kvf_sample(&t, step * 3, others, 100, scratch, NULL);
        cr_assert_eq(kvf_sample(&s, step, logits, MAX_VOCAB, scratch, NULL), id);
        n_same_seed += kvf_sample(&t, step, logits, MAX_VOCAB, scratch, NULL) == id;
        n_same_step += kvf_sample(&s, step + 1, logits, MAX_VOCAB, scratch, NULL) == id;
    }
    cr_assert(n_same_seed < 20 && n_same_step < 20, "%u and %u of 1000 draws agree", n_same_seed, n_same_step);
}

Test(sample, never_draws_what_cannot_be) {
    float logits[64];
    uint64_t rng = 9;
    random_logits(&rng, logits, 64, 1);
    for (uint32_t i = 0; i < 64; i += 2) logits[i] = i % 4 ? NAN : -INFINITY;
    for (uint64_t step = 0; step < 2000; step++) {
        const kvf_sampling s = {
            .temperature = 3, .top_k = step % 3 ? 0 : 50, .top_p = step % 2 ? 0.95f : 0, .seed = step};
        double logprob;
        cr_assert_eq(kvf_sample(&s, step, logits, 64, scratch, &logprob) % 2, 1);
        cr_assert(logprob < 0 && isfinite(logprob));
    }
    const float all_nan[] = {NAN, NAN, NAN}, infinite[] = {0, INFINITY, 5, INFINITY};
    const kvf_sampling s = {.temperature = 1};
    uint32_t counts[4] = {0};
    cr_assert_eq(kvf_sample(&s, 0, all_nan, 3, scratch, NULL), 0);
    for (uint64_t step = 0; step < 1000; step++) counts[kvf_sample(&s, step, infinite, 4, scratch, NULL)]++;
    cr_assert(counts[0] == 0 && counts[2] == 0 && counts[1] > 400 && counts[3] > 400);
    cr_assert_eq(kvf_sample(&s, 0, infinite, 1, scratch, NULL), 0);
}
