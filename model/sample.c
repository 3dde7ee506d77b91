/* model/sample.c: draws a token from logits. */
#include <math.h>

#include "base/base.h"
#include "kvfold/model.h"

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

static uint32_t greedy(const float *logits, uint32_t n_vocab) {
    uint32_t best = 0;
    for (uint32_t id = 1; id < n_vocab; id++)
        if (logits[id] > logits[best] || (isnan(logits[best]) && !isnan(logits[id]))) best = id;
    return best;
}

/* Inverse distribution function over the candidates, best first. */
static uint32_t draw(const kvf_sampling *s, uint64_t step, const float *logits, uint32_t n_vocab, item *items) {
    ranking r = {items, 0, 0};
    const double temperature = (double)s->temperature;
    const float best = logits[greedy(logits, n_vocab)];
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
static double log_probability(const float *logits, uint32_t n_vocab, uint32_t token) {
    const float best = logits[greedy(logits, n_vocab)];
    double sum = 0;
    if (isnan(logits[token])) return -INFINITY;
    for (uint32_t id = 0; id < n_vocab; id++)
        if (!isnan(logits[id])) sum += weight(logits[id], best, 1.0);
    return (logits[token] < best ? (double)logits[token] - (double)best : 0.0) - log(sum);
}

uint32_t kvf_sample(const kvf_sampling *sampling, uint64_t step, const float *logits, uint32_t n_vocab, void *scratch,
                    double *logprob) {
    if (!n_vocab) return 0;
    bool is_greedy = !(sampling->temperature > 0) || !scratch;
    uint32_t token = is_greedy ? greedy(logits, n_vocab) : draw(sampling, step, logits, n_vocab, scratch);
    if (logprob) *logprob = log_probability(logits, n_vocab, token);
    return token;
}
