/* The weights of the layers: a number per query head, the density of a layer, its weight (README.md, layer level). */
#include <float.h>
#include <math.h>

#include "d2o_policy/policy.h"

#define MAX_NUMBER 1e300

/* ---- One head: the variance of its column sums, or how many tokens count ------------------------- */

double kvf__variance(const float *x, uint32_t n) {
    if (n < 2) return 0.0;
    double mean = 0.0, sum = 0.0;
    for (uint32_t i = 0; i < n; i++) mean += (double)x[i];
    mean /= n;
    for (uint32_t i = 0; i < n; i++) sum += ((double)x[i] - mean) * ((double)x[i] - mean);
    return sum / (n - 1);
}

/* A share of attention, with NaN and negative numbers as 0 and without infinity, so that one broken sum does not spoil the others. */
static double share_of(float x) { return !(x > 0.0f) ? 0.0 : (double)KVF__MIN(x, FLT_MAX); }

static double share_sum(const float *x, uint32_t n) {
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++) sum += share_of(x[i]);
    return sum;
}

/* exp of the entropy of x / sum x: as many tokens with equal shares would have it. */
static double effective_tokens(const float *x, uint32_t n) {
    double sum = share_sum(x, n), entropy = 0.0;
    if (sum <= 0.0) return 0.0;
    for (uint32_t i = 0; i < n; i++) {
        double p = share_of(x[i]) / sum;
        if (p > 0.0) entropy -= p * log(p);
    }
    return exp(entropy);
}

/* Fewest tokens that hold the share of the sum. The least of them is found by halving the range of positive floats, which
 * as integers are in their own order: no copy is sorted. */
static double holding_tokens(const float *x, uint32_t n, double share) {
    double goal = share_sum(x, n) * share * (1 - 1e-9); /* rounding of the sums asks for no token more */
    if (goal <= 0.0) return 0.0;
    uint32_t lo = 1, hi = 0x7f7fffffu; /* the largest number of which those at or above it reach the goal */
    while (lo < hi) {
        uint32_t mid = hi - (hi - lo) / 2;
        float least;
        double sum = 0.0;
        memcpy(&least, &mid, sizeof least);
        for (uint32_t i = 0; i < n; i++) sum += x[i] >= least ? share_of(x[i]) : 0.0;
        if (sum >= goal)
            lo = mid;
        else
            hi = mid - 1;
    }
    float least;
    double above = 0.0, count = 0.0, equal = 0.0;
    memcpy(&least, &lo, sizeof least);
    for (uint32_t i = 0; i < n; i++) {
        float y = (float)share_of(x[i]);
        above += y > least ? (double)y : 0.0;
        count += y > least;
        equal += y == least;
    }
    return count + KVF__MAX(1.0, KVF__MIN(equal, ceil((goal - above) / (double)least)));
}

double kvf__metric_of(const kvf_policy_options *o, const float *x, uint32_t n) {
    switch (o->metric) {
    case KVF_METRIC_MASS: return holding_tokens(x, n, o->metric_share);
    case KVF_METRIC_ENTROPY: return effective_tokens(x, n);
    case KVF_METRIC_HEAD_MINMAX:
    case KVF_METRIC_RAW:
    case KVF_METRIC_LAYER_MINMAX: break;
    }
    return kvf__variance(x, n);
}

/* ---- One layer ----------------------------------------------------------------------------------- */

/* NaN counts as 0 and infinity as a very large number: one broken head must not spoil the others. */
static double finite(double v) { return !(v > 0.0) ? 0.0 : KVF__MIN(v, MAX_NUMBER); }

void kvf__layer_density(kvf_metric metric, const double *variance, uint32_t n_layers, uint32_t n_heads,
                        double *density) {
    for (uint32_t l = 0; l < n_layers; l++) {
        const double *v = variance + (size_t)l * n_heads;
        double sum = 0.0, min = HUGE_VAL, max = 0.0;
        for (uint32_t h = 0; h < n_heads; h++) {
            double x = finite(v[h]);
            sum += x;
            min = KVF__MIN(min, x);
            max = KVF__MAX(max, x);
        }
        density[l] = sum / n_heads;
        if (metric == KVF_METRIC_HEAD_MINMAX) {
            double scaled = 0.0;
            for (uint32_t h = 0; h < n_heads; h++) scaled += (finite(v[h]) - min) / (max - min + 1e-6);
            density[l] = scaled / n_heads;
        }
    }
    if (metric != KVF_METRIC_LAYER_MINMAX) return;
    double min = HUGE_VAL, max = 0.0;
    for (uint32_t l = 0; l < n_layers; l++) {
        min = KVF__MIN(min, density[l]);
        max = KVF__MAX(max, density[l]);
    }
    for (uint32_t l = 0; l < n_layers; l++) density[l] = (density[l] - min) / (max - min + 1e-6);
}

void kvf__layer_weights(const kvf_policy_options *o, const double *density, uint32_t n_layers, double *weights) {
    double factor = o->layer_sign * o->layer_strength, min = HUGE_VAL, sum = 0.0;
    bool counts_tokens = o->metric == KVF_METRIC_MASS || o->metric == KVF_METRIC_ENTROPY;
    for (uint32_t l = 0; l < n_layers; l++) {
        double f = counts_tokens ? log(KVF__MAX(density[l], 1.0)) : density[l];
        /* Parity (redistribute = 0): the authors' softmax runs over all layers. */
        bool counts = !o->redistribute || !kvf__policy_is_full_layer(o, l, n_layers);
        weights[l] = counts ? factor * f : HUGE_VAL;
        min = KVF__MIN(min, weights[l]);
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        weights[l] = weights[l] < HUGE_VAL ? exp(-(weights[l] - min)) : 0.0;
        sum += weights[l];
    }
    for (uint32_t l = 0; l < n_layers && sum > 0.0; l++) weights[l] /= sum;
}

/* A policy's own weights, made such as the softmax's: none below 0, the sum 1, and full layers as above. */
static void own_weights(const kvf_policy_options *o, const kvf_policy_ops *ops, uint32_t n_prompt, uint32_t budget,
                        const double *density, uint32_t n_layers, double *weights) {
    double most = 0.0, sum = 0.0;
    for (uint32_t l = 0; l < n_layers; l++) weights[l] = 0.0;
    ops->weights(o, n_prompt, budget, density, n_layers, weights);
    for (uint32_t l = 0; l < n_layers; l++) {
        if (o->redistribute && kvf__policy_is_full_layer(o, l, n_layers)) weights[l] = 0.0;
        weights[l] = finite(weights[l]);
        most = KVF__MAX(most, weights[l]);
    }
    for (uint32_t l = 0; l < n_layers; l++) sum += weights[l] = most > 0.0 ? weights[l] / most : 1.0;
    for (uint32_t l = 0; l < n_layers; l++) weights[l] /= sum;
}

/* The weights come from the first prompt alone; a later segment changes the number of tokens and with it the sizes. */
static void weigh(const kvf_policy_state *state, kvf__policy_seq *s, const kvf_policy_ops *ops,
                  const double *variance) {
    uint32_t n = state->config.n_layers;
    s->has_density = kvf_policy_has_metric(&s->options) && variance;
    if (s->has_density)
        kvf__layer_density(s->options.metric, variance, n, state->config.n_q_heads_total, s->density);
    else
        for (uint32_t l = 0; l < n; l++) s->density[l] = 0.0; /* equal weights */
    if (ops->weights && s->options.budget == KVF_BUDGET_LAYER)
        own_weights(&s->options, ops, s->n_prompt, s->budget, s->density, n, s->weights);
    else
        kvf__layer_weights(&s->options, s->density, n, s->weights);
}

kvf_status kvf__policy_budget(kvf_policy_state *state, uint32_t seq, const double *variance, uint32_t n_tokens,
                              kvf_error *err) {
    kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    if (!s) return kvf__fail(err, KVF_E_STALE, "budget: seq %u is not open", seq);
    if (n_tokens == 0 || n_tokens > KVF__MAX_TOKENS || n_tokens < s->n_prompt)
        return kvf__fail_field(err, KVF_E_INVALID, "n_tokens", n_tokens, 0,
                               "must be in [1, %u] and not less than the %u of before", KVF__MAX_TOKENS, s->n_prompt);
    kvf_policy_ops ops = kvf__policy_ops_resolve(s->options.ops);
    bool first = !s->budgeted;
    if (first && kvf_policy_has_metric(&s->options) && !variance && kvf_policy_needs(&s->options))
        return kvf__fail(err, KVF_E_INVALID, "variance: is NULL, but policy %s has a metric", s->options.ops->name);
    if (n_tokens > s->n_prompt) s->segment = n_tokens - s->n_prompt;
    s->n_prompt = n_tokens;
    s->budget = kvf__budget_tokens(&s->options, n_tokens);
    if (first) {
        weigh(state, s, &ops, variance);
        s->lo = KVF__MIN(s->budget, KVF_MIN_BUDGET_TOKENS);
        s->budgeted = true;
    }
    if (kvf__policy_never_evicts(&s->options)) return KVF_OK;
    bool over = first && s->budget < n_tokens;
    if (s->sized)
        kvf__policy_size(state, s, false);
    else if (over && s->options.defer_first_decode)
        s->deferred = true;
    else if (over)
        kvf__policy_size(state, s, true);
    if (s->sized) kvf__groups_reset(state, s);
    return KVF_OK;
}
