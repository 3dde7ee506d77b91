/* model/sample.c: draws a token from logits. */
#include <math.h>

#include "base/base.h"
#include "kvfold/model.h"
#include "model/ops.h"

typedef struct item {
    float logit;
    uint32_t id;
} item;

/* A max-heap whose popped items stand behind it, so that items[n - 1 - i] is the i-th best. */
typedef struct ranking {
    item *items;
    uint32_t n, n_heap;
} ranking;

static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* In [0, 1), from seed and step alone. */
static double uniform(uint64_t seed, uint64_t step) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    return (double)(mix(mix(seed + golden) + (step + 1) * golden) >> 11) * 0x1p-53;
}

static bool better(item a, item b) { return a.logit > b.logit || (!(a.logit < b.logit) && a.id < b.id); }

static void sift(ranking *r, uint32_t i) {
    const item moving = r->items[i];
    for (uint32_t child; i < r->n_heap / 2; i = child) {
        child = 2 * i + 1;
        if (child + 1 < r->n_heap && better(r->items[child + 1], r->items[child])) child++;
        if (!better(r->items[child], moving)) break;
        r->items[i] = r->items[child];
    }
    r->items[i] = moving;
}

static item ranked(ranking *r, uint32_t i) {
    while (r->n - r->n_heap <= i) {
        const item top = r->items[0];
        r->items[0] = r->items[--r->n_heap];
        sift(r, 0);
        r->items[r->n_heap] = top;
    }
    return r->items[r->n - 1 - i];
}

/* Relative to the best; equal infinities count as equal. */
static double weight(float logit, float best, double temperature) {
    return logit < best ? exp(((double)logit - (double)best) / temperature) : 1.0;
}

enum { LANES = 8 };

/* The largest logit, minus infinity when all are NaN: lanes as a vector unit has them. */
static float largest(const float *logits, uint32_t n) {
    float lane[2 * LANES], best = -INFINITY;
    uint32_t i = 0;
    for (int j = 0; j < 2 * LANES; j++) lane[j] = -INFINITY;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int j = 0; j < 2 * LANES; j++)
            lane[j] = logits[i + (uint32_t)j] > lane[j] ? logits[i + (uint32_t)j] : lane[j];
    for (; i < n; i++) lane[0] = logits[i] > lane[0] ? logits[i] : lane[0];
    for (int j = 0; j < 2 * LANES; j++) best = lane[j] > best ? lane[j] : best;
    return best;
}

/* The lowest id with the largest logit. */
static uint32_t greedy(const float *logits, uint32_t n_vocab, float best) {
    for (uint32_t id = 0; id < n_vocab; id++)
        if (logits[id] == best) return id;
    return 0;
}

/* ---- The sum of the weights at temperature 1 ------------------------------------------------------------
 *
 * e^x of doubles in [-708, 0] within two units in the last place: x = k ln 2 + r, the Taylor series of r (at most 0.35),
 * and k added to the exponent. Rounding to k is by adding a number whose last bit is worth 1, so that k stands in the low
 * bits of the sum. Products and sums are not contracted, so that every vector unit gives the same bits. */
typedef double doubles __attribute__((vector_size(LANES * sizeof(double))));
typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int64_t longs __attribute__((vector_size(LANES * sizeof(int64_t))));

/* Of NaN nothing is added. */
static inline __attribute__((always_inline)) double sum_of_weights_in(const float *logits, uint32_t n, double best) {
    static const double terms[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                   1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
    const double round = 0x1.8p52, per_ln2 = 0x1.71547652b82fep0, ln2_high = 0x1.62e42fefa0000p-1,
                 ln2_low = 0x1.cf79abc9e3b3ap-40;
    const doubles least = (doubles){0} - 708;
    doubles sum = {0};
    for (uint32_t i = 0; i < n; i += LANES) {
        floats f;
        if (i + LANES <= n)
            memcpy(&f, logits + i, sizeof f);
        else
            for (uint32_t j = 0; j < LANES; j++) f[j] = i + j < n ? logits[i + j] : NAN;
        doubles x = __builtin_convertvector(f, doubles) - best, y;
        longs above = x > least, number = x == x; /* NOLINT(misc-redundant-expression): not where it is NaN */
        y = (doubles)(((longs)x & above) | ((longs)least & ~above));
        doubles k = y * per_ln2 + round, turns = k - round;
        y = (y - turns * ln2_high) - turns * ln2_low;
        doubles p = (doubles){0} + 1.0 / 479001600;
        for (size_t t = 0; t < sizeof terms / sizeof *terms; t++) p = p * y + terms[t];
        p *= (doubles)(((longs)k + 1023) << 52);
        sum += (doubles)((longs)p & number);
    }
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

static double sum_plain(const float *logits, uint32_t n, double best) { return sum_of_weights_in(logits, n, best); }

#if defined(__x86_64__)
static __attribute__((target("avx2"))) double sum_avx2(const float *logits, uint32_t n, double best) {
    return sum_of_weights_in(logits, n, best);
}
static __attribute__((target("avx512f,avx512dq,avx512vl"))) double sum_avx512(const float *logits, uint32_t n,
                                                                              double best) {
    return sum_of_weights_in(logits, n, best);
}
#endif

static double sum_of_weights(const float *logits, uint32_t n, float best) {
    if (!isfinite(best)) { /* equal infinities count as equal */
        double sum = 0;
        for (uint32_t id = 0; id < n; id++)
            if (!isnan(logits[id])) sum += weight(logits[id], best, 1.0);
        return sum;
    }
#if defined(__x86_64__)
    kvf__cpu cpu = kvf__cpu_detect();
    if (cpu.avx512) return sum_avx512(logits, n, (double)best);
    if (cpu.avx2_fma_f16c) return sum_avx2(logits, n, (double)best);
#endif
    return sum_plain(logits, n, (double)best);
}

/* Inverse distribution function over the candidates, best first. */
static uint32_t draw(const kvf_sampling *s, uint64_t step, const float *logits, uint32_t n_vocab, float best,
                     item *items) {
    ranking r = {items, 0, 0};
    const double temperature = (double)s->temperature;
    double total = 0;
    for (uint32_t id = 0; id < n_vocab; id++) {
        if (isnan(logits[id])) continue;
        items[r.n++] = (item){logits[id], id};
        total += weight(logits[id], best, temperature);
    }
    if (!r.n) return 0;
    r.n_heap = r.n;
    for (uint32_t i = r.n / 2; i-- > 0;) sift(&r, i);
    uint32_t n = r.n;
    if (s->top_k && s->top_k < n) {
        n = s->top_k;
        total = 0;
        for (uint32_t i = 0; i < n; i++) total += weight(ranked(&r, i).logit, best, temperature);
    }
    if (s->top_p > 0 && s->top_p < 1) {
        double wanted = (double)s->top_p * total;
        uint32_t n_nucleus = 0;
        total = 0;
        while (n_nucleus < n && (total < wanted || !n_nucleus))
            total += weight(ranked(&r, n_nucleus++).logit, best, temperature);
        n = n_nucleus;
    }
    const double target = uniform(s->seed, step) * total;
    double sum = 0;
    uint32_t last = ranked(&r, 0).id; /* of the last with any weight: rounding may leave the sum below the target */
    for (uint32_t i = 0; i < n; i++) {
        const item candidate = ranked(&r, i);
        const double w = weight(candidate.logit, best, temperature);
        if (!(w > 0)) break;
        last = candidate.id;
        sum += w;
        if (sum > target) break;
    }
    return last;
}

/* Natural log of the probability at temperature 1. */
static double log_probability(const float *logits, uint32_t n_vocab, uint32_t token, float best) {
    if (isnan(logits[token])) return -INFINITY;
    return (logits[token] < best ? (double)logits[token] - (double)best : 0.0) -
           log(sum_of_weights(logits, n_vocab, best));
}

double kvf__token_logprob(const float *logits, uint32_t n_vocab, uint32_t token) {
    return log_probability(logits, n_vocab, token, largest(logits, n_vocab));
}

uint32_t kvf_sample(const kvf_sampling *sampling, uint64_t step, const float *logits, uint32_t n_vocab, void *scratch,
                    double *logprob) {
    if (!sampling || !logits || !n_vocab) return 0;
    const float best = largest(logits, n_vocab);
    bool is_greedy = !(sampling->temperature > 0) || !scratch;
    uint32_t token = is_greedy ? greedy(logits, n_vocab, best) : draw(sampling, step, logits, n_vocab, best, scratch);
    if (logprob) *logprob = log_probability(logits, n_vocab, token, best);
    return token;
}
