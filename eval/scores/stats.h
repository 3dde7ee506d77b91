/* eval/scores/stats.h: means and ratios of paired figures with bootstrap intervals.
 *
 * Invariants
 *   - Equal figures give equal intervals: the resamples depend only on the seed and the number of units, so policies that
 *     are compared over the same units use the same resamples.
 *   - Fewer than two units give no interval: low and high are NAN.
 */
#ifndef KVF_EVAL_SCORES_STATS_H
#define KVF_EVAL_SCORES_STATS_H

#include <stdbool.h>
#include <stdint.h>

enum { KVF__RESAMPLES = 10000 };
#define KVF__NO_COLUMN UINT32_MAX

typedef struct kvf__interval { /* of 95%: the 2.5th and the 97.5th percentile of the resamples */
    double value, low, high;   /* value NAN: there is nothing to say */
    uint32_t n;                /* units it is drawn from */
} kvf__interval;

typedef struct kvf__sample { /* finite figures */
    const double *figures;   /* (row, column) */
    uint32_t n_rows, n_columns;
    const uint32_t *unit; /* [n_rows] which rows are drawn together, from 0 on; NULL: each row by itself */
} kvf__sample;

typedef struct kvf__statistic {
    uint32_t over;  /* the mean of this column; or, with ... */
    uint32_t under; /* ... another here, the ratio of the two columns' sums; KVF__NO_COLUMN: none */
} kvf__statistic;

/* out[n_statistics]; a ratio to nothing is NAN. n_resamples 0: no intervals. False when out of memory. */
bool kvf__bootstrap(const kvf__sample *sample, const kvf__statistic *statistics, uint32_t n_statistics,
                    uint32_t n_resamples, uint64_t seed, kvf__interval *out);

/* The quantile of values[n], n at least 1, between the two nearest; reorders them. */
double kvf__quantile(double *values, uint32_t n, double share);

#endif
