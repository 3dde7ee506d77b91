/* The worked cases of what a layer weighs, and how many tokens it gets. */
#include "golden_cases.h"

/* F of one layer from its column sums, [heads][n]. */
static double density(const json_t *sums, kvf_metric metric, double *variance) {
    double f;
    for (uint32_t h = 0; h < length(sums); h++) {
        float x[16];
        for (uint32_t i = 0; i < length(sub(sums, h)); i++) x[i] = (float)item(sub(sums, h), i);
        variance[h] = kvf__variance(x, length(sub(sums, h)));
    }
    kvf__layer_density(metric, variance, 1, length(sums), &f);
    return f;
}

static void layer_metric(const json_t *in, const json_t *out) {
    const json_t *attn = at(in, "attn"), *sums = at(out, "column_sums");
    for (uint32_t h = 0; h < length(attn); h++) /* the case's own sums; the attention kernels have tests of their own */
        for (uint32_t j = 0; j < length(sub(sums, h)); j++) {
            double c = 0;
            for (uint32_t i = 0; i < length(sub(attn, h)); i++) c += item(sub(sub(attn, h), i), j);
            near(c, item(sub(sums, h), j), "column sum");
        }
    double v[2];
    near(density(sums, KVF_METRIC_RAW, v), num(out, "F_raw"), "F_raw");
    near(density(sums, KVF_METRIC_HEAD_MINMAX, v), num(out, "F_head_minmax"), "F_head_minmax");
    for (uint32_t h = 0; h < 2; h++) near(v[h], item(at(out, "head_variance"), h), "variance");
}

static void layer_metric_one_head(const json_t *in, const json_t *out) {
    double v[1];
    near(density(at(in, "column_sums"), KVF_METRIC_RAW, v), num(out, "F_raw"), "F_raw");
    near(density(at(in, "column_sums"), KVF_METRIC_HEAD_MINMAX, v), num(out, "F_head_minmax"), "F_head_minmax");
}

/* A state whose sequence 0 has been given densities: sizes as budget would compute them. */
static kvf_policy_state *sized(const kvf_policy_options *o, const json_t *F, uint32_t n_layers, uint32_t n_tokens,
                               uint32_t block_size) {
    kvf_policy_state_config c = {.struct_size = sizeof c,
                                 .n_layers = n_layers,
                                 .n_kv_heads = 1,
                                 .n_q_heads = 1,
                                 .head_dim = 8,
                                 .block_size = block_size,
                                 .max_seqs = 1,
                                 .max_slots = 65536};
    kvf_policy_state *s;
    OK(kvf_policy_state_create(&c, &s, err));
    OK(kvf_policy_open(s, 0, o, err));
    kvf__policy_seq *q = kvf__policy_seq_get(s, 0);
    for (uint32_t l = 0; l < n_layers; l++) q->density[l] = F ? item(F, l) : 0.0;
    kvf__layer_weights(o, q->density, n_layers, q->weights);
    q->budgeted = true;
    q->n_prompt = n_tokens;
    q->budget = kvf__budget_tokens(o, n_tokens);
    q->lo = q->budget < 16 ? q->budget : 16;
    kvf__policy_size(s, q, true);
    return s;
}

static void ratio_sizes(const json_t *in, const json_t *out) {
    const json_t *F = at(in, "F");
    uint32_t n = length(F), n_tokens = (uint32_t)num(in, "n_tokens");
    kvf_policy_options o = paper();
    set(&o, "redistribute", "0");
    o.rho = num(in, "rho");
    o.n_parts = (uint32_t)item(at(in, "hh_to_recent"), 0);
    o.m_parts = (uint32_t)item(at(in, "hh_to_recent"), 1);
    kvf_policy_state *s = sized(&o, F, n, n_tokens, 16);
    const kvf_layer_size *z = kvf_policy_sizes(s, 0);
    uint64_t sum = 0;
    for (uint32_t l = 0; l < n; l++) {
        double ratio = kvf__policy_seq_get(s, 0)->weights[l] * n * o.rho;
        near(fmin(fmax(ratio, num(in, "lo")), num(in, "hi")), item(at(out, "ratio"), l), "ratio");
        cr_assert_eq(z[l].hh, item(at(out, "hh"), l));
        cr_assert_eq(z[l].window, item(at(out, "recent"), l));
        cr_assert_eq(z[l].keep, item(at(out, "S"), l));
        sum += z[l].keep;
    }
    if (json_object_get(out, "sum_S")) cr_assert_eq(sum, num(out, "sum_S"));
    kvf_policy_state_destroy(s);
}

static void budget_equal_huge(const json_t *in, const json_t *out) {
    kvf_policy_options o = paper();
    double F[3], w[3];
    for (uint32_t l = 0; l < 3; l++) F[l] = item(at(in, "F"), l);
    kvf__layer_weights(&o, F, 3, w);
    for (uint32_t l = 0; l < 3; l++) near(w[l] * 3 * num(in, "rho"), item(at(out, "ratio"), l), "ratio");
}

static void budget_full_layers(const json_t *in, const json_t *out) {
    kvf_policy_options o;
    OK(kvf_policy_options_init(&o, sizeof o, "d2o", "authors",
                               err)); /* full layers 0, 1 and the last, 1:1, redistribute 0 */
    o.rho = num(in, "rho");
    uint32_t n = (uint32_t)num(in, "layers"), n_tokens = (uint32_t)num(in, "n_tokens"), n_full = 0;
    kvf_policy_state *s = sized(&o, NULL, n, n_tokens, 16);
    double sum = 0;
    for (uint32_t l = 0; l < n; l++) {
        bool full = kvf_policy_sizes(s, 0)[l].keep == UINT32_MAX;
        if (full) cr_assert_eq(l, item(at(in, "full_layers"), n_full++));
        sum += full ? n_tokens : kvf_policy_sizes(s, 0)[l].keep;
    }
    cr_assert_eq(sum, num(out, "sum_S"));
    near(sum / n / n_tokens, num(out, "effective_rho"), "effective rho");
    kvf_policy_state_destroy(s);
}

/* The authors' ratio in half precision is for parity runs that we do not offer: ours equals the case's hh_float64. */
static void budget_fp16(const json_t *in, const json_t *out) {
    kvf_policy_options o = paper();
    set(&o, "redistribute", "0");
    o.rho = num(in, "ratio");
    for (uint32_t i = 0; i < length(at(in, "n_tokens")); i++) {
        kvf_policy_state *s = sized(&o, NULL, 3, (uint32_t)item(at(in, "n_tokens"), i), 16);
        cr_assert_eq(kvf_policy_sizes(s, 0)[1].hh, item(at(out, "hh_float64"), i));
        kvf_policy_state_destroy(s);
    }
}

static void exact(const json_t *w, uint64_t total, uint32_t lo, uint32_t hi, const json_t *expected) {
    double weights[16], scratch[48];
    uint32_t order[16], out[16], n = length(w);
    for (uint32_t l = 0; l < n; l++) weights[l] = item(w, l);
    kvf__exact_sizes(weights, n, total, lo, hi, scratch, order, out);
    for (uint32_t l = 0; l < n; l++) cr_assert_eq(out[l], item(expected, l), "layer %u: %u", l, out[l]);
}

static void exact_sizes(const json_t *in, const json_t *out) {
    uint32_t L = (uint32_t)num(in, "n_tokens"), n = length(at(in, "F"));
    exact(at(in, "w"), (uint64_t)num(out, "total"), (uint32_t)num(in, "lo"), L, at(out, "S"));
    for (int sign = 1; sign >= -1; sign -= 2) { /* and from F, through the options */
        kvf_policy_options o = paper();
        o.rho = num(in, "rho");
        o.layer_sign = sign;
        kvf_policy_state *s = sized(&o, at(in, "F"), n, L, 16);
        const json_t *S = at(out, sign == 1 ? "S" : "S_sign_minus");
        for (uint32_t l = 0; l < n; l++) {
            cr_assert_eq(kvf_policy_sizes(s, 0)[l].keep, item(S, l));
            if (sign == 1) near(kvf__policy_seq_get(s, 0)->weights[l], item(at(in, "w"), l), "weight");
        }
        kvf_policy_state_destroy(s);
    }
}

static void exact_sizes_clamps(const json_t *in, const json_t *out) {
    const json_t *cases = at(in, "cases");
    for (uint32_t i = 0; i < length(cases); i++) {
        const json_t *c = sub(cases, i);
        exact(at(c, "w"), (uint64_t)num(c, "total"), (uint32_t)num(c, "lo"), (uint32_t)num(c, "hi"),
              sub(at(out, "S"), i));
    }
}

static void block_sizes(const json_t *in, const json_t *out) {
    kvf_policy_options o;
    OK(kvf_policy_options_init(&o, sizeof o, "d2o", "serving", err));
    uint32_t bs = (uint32_t)num(in, "block_size"), n = length(at(in, "w"));
    cr_assert_eq(kvf__policy_k(&o, bs), num(in, "k"));
    kvf__share s = kvf__layer_share(&o, n, bs, (uint32_t)num(in, "hi"), (uint32_t)num(in, "total_tokens") / n,
                                    (uint32_t)num(in, "lo"), true);
    cr_assert_eq(s.raised_tokens, 0);
    exact(at(in, "w"), s.total, s.lo, s.hi, at(out, "blocks"));
    for (uint32_t l = 0; l < n; l++)
        cr_assert_eq(s.unit * item(at(out, "blocks"), l) - num(in, "k"), item(at(out, "S"), l));
}

static void split(const json_t *in, const json_t *out) {
    const json_t *cases = at(in, "cases");
    for (uint32_t i = 0; i < length(cases); i++) {
        kvf_policy_options o = paper();
        kvf_layer_size z = {0};
        o.n_parts = (uint32_t)item(sub(cases, i), 1);
        o.m_parts = (uint32_t)item(sub(cases, i), 2);
        kvf__split(&o, (uint32_t)item(sub(cases, i), 0), &z);
        cr_assert_eq(z.hh, item(sub(at(out, "hh_M"), i), 0));
        cr_assert_eq(z.window, item(sub(at(out, "hh_M"), i), 1));
    }
}

Test(policy_golden_layers, all_cases_of_layers) {
    static const golden_case runs[] = {{"layer_metric", layer_metric},
                                       {"layer_metric_one_head", layer_metric_one_head},
                                       {"budget_powers_of_two", ratio_sizes},
                                       {"budget_saturated", ratio_sizes},
                                       {"budget_equal_huge", budget_equal_huge},
                                       {"budget_unit_range_floor", ratio_sizes},
                                       {"budget_full_layers", budget_full_layers},
                                       {"budget_fp16", budget_fp16},
                                       {"exact_sizes", exact_sizes},
                                       {"exact_sizes_clamps", exact_sizes_clamps},
                                       {"block_sizes", block_sizes},
                                       {"split", split}};
    run_golden(runs, sizeof runs / sizeof *runs, true);
}
