/* tests/golden_cases.h: the 24 worked cases of tests/data/d2o_golden.json, each by its name.
 *
 * Bounds: what the library computes in double is held to 1e-6 of max(1, |x|); K and V, which pages keep in fp32 and
 * which merge in fp32, to 1e-5; cosines, fp32 too, to 1e-6. Head sizes of 1 and 2 are padded with zeros to 8, which
 * changes no cosine. */
#ifndef KVF_TESTS_GOLDEN_CASES_H
#define KVF_TESTS_GOLDEN_CASES_H

#include <jansson.h>

#include "test_policy_rig.h"

static inline void near(double got, double expected, const char *what) {
    cr_assert(fabs(got - expected) <= 1e-6 * fmax(1.0, fabs(expected)), "%s: %.9g, expected %.9g", what, got, expected);
}
static inline json_t *at(const json_t *o, const char *key) {
    json_t *x = json_object_get(o, key);
    cr_assert(x, "no \"%s\"", key);
    return x;
}
static inline double num(const json_t *o, const char *key) { return json_number_value(at(o, key)); }
static inline double item(const json_t *a, size_t i) {
    json_t *x = json_array_get(a, i);
    cr_assert(x);
    return json_is_boolean(x) ? json_is_true(x) : json_number_value(x);
}
static inline const json_t *sub(const json_t *a, size_t i) { return json_array_get(a, i); }
static inline uint32_t length(const json_t *a) { return (uint32_t)json_array_size(a); }

static inline kvf_policy_options paper(void) {
    kvf_policy_options o;
    OK(kvf_policy_options_init(&o, sizeof o, "d2o", "paper", err));
    return o;
}
static inline void set(kvf_policy_options *o, const char *name, const char *value) {
    OK(kvf_policy_option_set(o, name, value, err));
}

typedef struct golden_case {
    const char *name;
    void (*run)(const json_t *in, const json_t *out);
} golden_case;

/* Runs the cases of the table, which must be all that the file has of that kind. of_layers: how much a layer gets; else which
 * tokens stay, and what becomes of the others. */
static inline void run_golden(const golden_case *runs, size_t n, bool of_layers) {
    static const char *const layers[] = {"layer_metric",       "layer_metric_one_head", "budget_powers_of_two",
                                         "budget_saturated",   "budget_equal_huge",     "budget_unit_range_floor",
                                         "budget_full_layers", "budget_fp16",           "exact_sizes",
                                         "exact_sizes_clamps", "block_sizes",           "split"};
    json_error_t error;
    json_t *cases = json_load_file(KVF_TEST_DATA "/d2o_golden.json", 0, &error);
    cr_assert(cases, "%s", error.text);
    cr_assert_eq(length(cases), 24u);
    size_t n_run = 0;
    for (uint32_t i = 0; i < length(cases); i++) {
        const char *name = json_string_value(at(sub(cases, i), "name"));
        bool here = false, found = false;
        for (size_t k = 0; k < sizeof layers / sizeof *layers; k++) here |= !strcmp(layers[k], name);
        if (here != of_layers) continue;
        for (size_t k = 0; k < n; k++) {
            if (strcmp(runs[k].name, name)) continue;
            cr_log_info("%s", name);
            runs[k].run(at(sub(cases, i), "inputs"), at(sub(cases, i), "expected"));
            found = true;
            n_run++;
        }
        cr_assert(found, "case %s has no test", name);
    }
    cr_assert_eq(n_run, n);
    json_decref(cases);
}

#endif
