/* The bootstrap: draws as many units as there are, with replacement, and computes each statistic again. */
#define _POSIX_C_SOURCE 200809L
#include "eval/scores/stats.h"

#include <math.h>
#include <stdlib.h>

#include "tools/trace.h"

/* ---- Quantiles ------------------------------------------------------------------------------------------ */

/* Brings the k-th smallest to its place, with none larger before it and none smaller behind. */
static void select_nth(double *v, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        double pivot = v[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (v[i] < pivot) i++;
            while (v[j] > pivot) j--;
            if (i > j) break;
            double kept = v[i];
            v[i++] = v[j];
            v[j--] = kept;
        }
        if (k <= j)
            high = j;
        else if (k >= i)
            low = i;
        else
            return;
    }
}

double kvf__quantile(double *values, uint32_t n, double share) {
    double at = share * (n - 1);
    uint32_t k = (uint32_t)at;
    select_nth(values, n, k);
    double low = values[k], part = at - k;
    if (k + 1 >= n || part <= 0) return low;
    double next = values[k + 1];
    for (uint32_t i = k + 2; i < n; i++)
        if (values[i] < next) next = values[i];
    return low + (next - low) * part;
}

/* ---- The bootstrap --------------------------------------------------------------------------------------- */

static double statistic(const kvf__statistic *s, const double *sums, double n_rows) {
    if (s->under == KVF__NO_COLUMN) return n_rows > 0 ? sums[s->over] / n_rows : NAN;
    return sums[s->under] != 0 ? sums[s->over] / sums[s->under] : NAN;
}

/* Sums of each unit: [columns of the sample, then its number of rows] */
static double *sum_units(const kvf__sample *s, uint32_t *n_units) {
    uint32_t n = s->n_rows, width = s->n_columns + 1;
    if (s->unit) {
        n = 0;
        for (uint32_t r = 0; r < s->n_rows; r++)
            if (s->unit[r] >= n) n = s->unit[r] + 1;
    }
    *n_units = n;
    double *sums = calloc((size_t)n * width + 1, sizeof *sums);
    for (uint32_t r = 0; sums && r < s->n_rows; r++) {
        double *to = sums + (size_t)(s->unit ? s->unit[r] : r) * width;
        for (uint32_t c = 0; c < s->n_columns; c++) to[c] += s->figures[(size_t)r * s->n_columns + c];
        to[s->n_columns]++;
    }
    return sums;
}

typedef struct resampling {
    const double *units; /* (unit, column) */
    uint32_t n_units, width, n;
    const kvf__statistic *statistics;
    uint32_t n_statistics;
} resampling;

/* values: (statistic, resample) */
static void resample(const resampling *x, uint64_t seed, double *sums, double *values) {
    kvf__random random = {seed};
    for (uint32_t b = 0; b < x->n; b++) {
        for (uint32_t c = 0; c < x->width; c++) sums[c] = 0;
        for (uint32_t i = 0; i < x->n_units; i++) {
            const double *from = x->units + ((kvf__random_next(&random) >> 32) * x->n_units >> 32) * x->width;
            for (uint32_t c = 0; c < x->width; c++) sums[c] += from[c];
        }
        for (uint32_t s = 0; s < x->n_statistics; s++)
            values[(size_t)s * x->n + b] = statistic(&x->statistics[s], sums, sums[x->width - 1]);
    }
}

/* The interval of what is known; a resample that has no ratio is left out. */
static void percentiles(double *values, uint32_t n_values, kvf__interval *out) {
    uint32_t n = 0;
    for (uint32_t b = 0; b < n_values; b++)
        if (!isnan(values[b])) values[n++] = values[b];
    if (!n) return;
    out->low = kvf__quantile(values, n, 0.025);
    out->high = kvf__quantile(values, n, 0.975);
}

bool kvf__bootstrap(const kvf__sample *sample, const kvf__statistic *statistics, uint32_t n_statistics,
                    uint32_t n_resamples, uint64_t seed, kvf__interval *out) {
    uint32_t width = sample->n_columns + 1, n_units = 0;
    double *units = sum_units(sample, &n_units), *sums = calloc(width, sizeof *sums);
    bool intervals = n_units > 1 && n_resamples;
    double *values = intervals ? malloc((size_t)n_statistics * n_resamples * sizeof *values) : NULL;
    bool whole = units && sums && (values || !intervals);
    if (whole) {
        for (uint32_t u = 0; u < n_units; u++)
            for (uint32_t c = 0; c < width; c++) sums[c] += units[(size_t)u * width + c];
        for (uint32_t s = 0; s < n_statistics; s++)
            out[s] = (kvf__interval){statistic(&statistics[s], sums, sums[width - 1]), NAN, NAN, n_units};
    }
    if (whole && intervals) {
        resampling x = {units, n_units, width, n_resamples, statistics, n_statistics};
        resample(&x, seed, sums, values);
        for (uint32_t s = 0; s < n_statistics; s++)
            if (!isnan(out[s].value)) percentiles(values + (size_t)s * n_resamples, n_resamples, &out[s]);
    }
    free(units);
    free(sums);
    free(values);
    return whole;
}
