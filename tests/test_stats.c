/* Statistics of the report: against numbers of numpy, against every resample there is, and at the edges. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>

#include "eval/scores/stats.h"
#include "tools/trace.h"

enum { N = 24 };
/* Gamma-distributed figures of a policy, and of a worse one over the same units. */
static const double a[N] = {0.3337, 0.2674, 0.2292, 0.3491, 0.2217, 0.4765, 0.3613, 0.3258,
                            0.0928, 0.0481, 0.1015, 0.3755, 0.321,  0.0738, 0.3727, 0.1651,
                            0.1653, 0.6178, 0.3053, 0.3501, 0.3534, 0.0722, 0.3651, 1.1625};
static const double b[N] = {0.3829, 0.3771, 0.3114, 0.426,  0.3887, 0.6688, 0.6803, 0.5122,
                            0.147,  0.0775, 0.1666, 0.4583, 0.4662, 0.0953, 0.53,   0.1944,
                            0.3098, 0.7858, 0.4999, 0.4693, 0.6359, 0.1177, 0.4401, 2.0647};

static const kvf__statistic statistics[] = {{0, KVF__NO_COLUMN}, {0, 1}, {2, KVF__NO_COLUMN}};
enum { N_STATISTICS = 3 };

static void fill(double *rows) {
    for (int i = 0; i < N; i++) rows[3 * i] = a[i], rows[3 * i + 1] = b[i], rows[3 * i + 2] = a[i] - b[i];
}

/* numpy: means, and the percentiles of a million resamples. Those of 10,000 are within 0.11 standard errors (4 sigma). */
Test(stats, intervals_are_those_of_numpy) {
    static const double value[] = {0.3127875, 0.6699060316440446, -0.15412499999999998};
    static const double low[] = {0.2336792, 0.6217648, -0.2337792}, high[] = {0.4113333, 0.7293270, -0.0987208};
    static const double error[] = {0.0455613, 0.0278812, 0.0353883};
    double rows[3 * N];
    fill(rows);
    for (uint64_t seed = 1; seed <= 5; seed++) {
        kvf__interval x[N_STATISTICS];
        cr_assert(kvf__bootstrap(&(kvf__sample){rows, N, 3, NULL}, statistics, N_STATISTICS, 10000, seed, x));
        for (int s = 0; s < N_STATISTICS; s++) {
            cr_assert_float_eq(x[s].value, value[s], 1e-12, "statistic %d: %.17g", s, x[s].value);
            cr_assert_float_eq(x[s].low, low[s], 0.11 * error[s], "statistic %d, seed %d: low %g", s, (int)seed,
                               x[s].low);
            cr_assert_float_eq(x[s].high, high[s], 0.11 * error[s], "statistic %d, seed %d: high %g", s, (int)seed,
                               x[s].high);
        }
    }
}

/* Four units have 256 resamples, all equally likely: the interval is the percentiles of these. */
Test(stats, intervals_are_those_of_all_resamples) {
    static const double rows[] = {1, 2, 1.5, 7, 4, 5, 9, 11};
    double means[256], ratios[256];
    for (int r = 0; r < 256; r++) {
        double over = 0, under = 0;
        for (int i = 0, k = r; i < 4; i++, k /= 4) over += rows[2 * (k % 4)], under += rows[2 * (k % 4) + 1];
        means[r] = over / 4;
        ratios[r] = over / under;
    }
    const kvf__statistic both[] = {{0, KVF__NO_COLUMN}, {0, 1}};
    kvf__interval x[2];
    cr_assert(kvf__bootstrap(&(kvf__sample){rows, 4, 2, NULL}, both, 2, 10000, 3, x));
    double expected[] = {kvf__quantile(means, 256, 0.025), kvf__quantile(means, 256, 0.975),
                         kvf__quantile(ratios, 256, 0.025), kvf__quantile(ratios, 256, 0.975)};
    const double found[] = {x[0].low, x[0].high, x[1].low, x[1].high};
    for (int i = 0; i < 4; i++)
        cr_assert_float_eq(found[i], expected[i], 1e-2, "%d: %g, not %g", i, found[i], expected[i]);
}

/* Two sources are drawn as AA, AB or BB: the interval's ends are the two sources' means, whatever their numbers of rows. */
Test(stats, rows_of_a_unit_are_drawn_together) {
    static const double rows[] = {1, 2, 3, 10, 12};
    static const uint32_t unit[] = {0, 0, 0, 1, 1};
    kvf__interval x, alone;
    cr_assert(kvf__bootstrap(&(kvf__sample){rows, 5, 1, unit}, statistics, 1, 10000, 1, &x));
    cr_assert_float_eq(x.value, 5.6, 1e-12);
    cr_assert_float_eq(x.low, 2, 1e-12);
    cr_assert_float_eq(x.high, 11, 1e-12);
    static const uint32_t each[] = {0, 1, 2, 3, 4};
    cr_assert(kvf__bootstrap(&(kvf__sample){rows, 5, 1, each}, statistics, 1, 10000, 1, &x));
    cr_assert(kvf__bootstrap(&(kvf__sample){rows, 5, 1, NULL}, statistics, 1, 10000, 1, &alone));
    cr_assert(x.low == alone.low && x.high == alone.high);
}

Test(stats, policies_meet_the_same_resamples) {
    double rows[3 * N], doubled[3 * N];
    kvf__interval x[N_STATISTICS], y[N_STATISTICS];
    fill(rows);
    for (int i = 0; i < 3 * N; i++) doubled[i] = 2 * rows[i];
    cr_assert(kvf__bootstrap(&(kvf__sample){rows, N, 3, NULL}, statistics, N_STATISTICS, 1000, 9, x));
    cr_assert(kvf__bootstrap(&(kvf__sample){doubled, N, 3, NULL}, statistics, N_STATISTICS, 1000, 9, y));
    cr_assert(y[0].low == 2 * x[0].low && y[0].high == 2 * x[0].high, "%g %g", y[0].low, x[0].low);
    cr_assert(y[1].low == x[1].low && y[1].high == x[1].high);
    cr_assert(kvf__bootstrap(&(kvf__sample){rows, N, 3, NULL}, statistics, N_STATISTICS, 1000, 10, y));
    cr_assert(y[0].low != x[0].low, "another seed draws otherwise");
}

Test(stats, too_little_has_no_interval) {
    static const double one[] = {3, 0};
    static const uint32_t together[] = {0, 0};
    const kvf__statistic both[] = {{0, KVF__NO_COLUMN}, {0, 1}};
    kvf__interval x[2];
    cr_assert(kvf__bootstrap(&(kvf__sample){one, 1, 2, NULL}, both, 2, 100, 1, x));
    cr_assert(x[0].value == 3 && isnan(x[0].low) && isnan(x[0].high));
    cr_assert(isnan(x[1].value), "a ratio to nothing");
    cr_assert(kvf__bootstrap(&(kvf__sample){one, 0, 2, NULL}, both, 2, 100, 1, x));
    cr_assert(isnan(x[0].value) && isnan(x[0].low));
    cr_assert(kvf__bootstrap(&(kvf__sample){one, 2, 1, together}, both, 1, 100, 1, x));
    cr_assert(x[0].value == 1.5 && isnan(x[0].low), "one unit of two rows");
    cr_assert(kvf__bootstrap(&(kvf__sample){one, 2, 1, NULL}, both, 1, 0, 1, x));
    cr_assert(x[0].value == 1.5 && isnan(x[0].low), "no resamples");
    /* resamples without a ratio are left out of it */
    static const double rows[] = {1, 0, 1, 0, 1, 0, 2, 4};
    cr_assert(kvf__bootstrap(&(kvf__sample){rows, 4, 2, NULL}, both, 2, 10000, 1, x));
    cr_assert(x[1].value == 1.25 && isfinite(x[1].low) && isfinite(x[1].high), "%g %g", x[1].low, x[1].high);
}

static int by_value(const void *x, const void *y) {
    double d = *(const double *)x - *(const double *)y;
    return (d > 0) - (d < 0);
}

/* Against sorting, with ties; and numbers of numpy.quantile. */
Test(stats, quantiles) {
    static const double given[] = {-0.498, -0.837, -0.963, -1.0,   -0.961, 0.353,  -2.102, -0.42,  -1.828, 0.187,
                                   -0.55,  0.075,  -4.232, 0.931,  0.984,  0.238,  0.214,  1.092,  0.605,  -0.054,
                                   -0.077, 0.33,   -0.452, 0.141,  -0.612, 0.51,   -0.372, -1.118, -0.929, -1.947,
                                   -0.645, 1.755,  0.912,  -0.642, 0.073,  -0.835, -0.841};
    static const double shares[] = {0, .025, .3, .5, .975, 1},
                        expected[] = {-4.232, -2.315, -.8354, -.42, 1.1583, 1.755};
    for (int i = 0; i < 6; i++) {
        double v[37];
        for (int k = 0; k < 37; k++) v[k] = given[k];
        cr_assert_float_eq(kvf__quantile(v, 37, shares[i]), expected[i], 1e-12, "share %g", shares[i]);
    }
    kvf__random random = {20};
    for (uint32_t round = 0; round < 2000; round++) {
        double v[64], sorted[64], share = kvf__random_unit(&random);
        uint32_t n = 1 + (uint32_t)(kvf__random_next(&random) % 64),
                 kinds = 1 + (uint32_t)(kvf__random_next(&random) % 64);
        for (uint32_t i = 0; i < n; i++) sorted[i] = v[i] = (double)(kvf__random_next(&random) % kinds);
        qsort(sorted, n, sizeof *sorted, by_value);
        double at = share * (n - 1), part = at - floor(at);
        uint32_t k = (uint32_t)at;
        double naive = sorted[k] + (k + 1 < n ? (sorted[k + 1] - sorted[k]) * part : 0);
        cr_assert_float_eq(kvf__quantile(v, n, share), naive, 1e-9, "round %u of seed 20: n %u", round, n);
    }
}
