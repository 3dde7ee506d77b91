/* Budgets, exact sizes, projected needs, and when events are due. */
#include "test_policy_rig.h"
#include "tests/counts.h"

static kvf_policy_options init(const char *policy, const char *preset) {
    kvf_policy_options o;
    OK(kvf_policy_options_init(&o, sizeof o, policy, preset, err));
    return o;
}

static kvf_policy_state *new_state(uint32_t n_layers, uint32_t n_heads, uint32_t bs) {
    kvf_policy_state_config c = {.struct_size = sizeof c,
                                 .n_layers = n_layers,
                                 .n_kv_heads = 1,
                                 .n_q_heads = n_heads,
                                 .head_dim = 8,
                                 .block_size = bs,
                                 .max_seqs = 3,
                                 .max_slots = 65536};
    kvf_policy_state *s;
    OK(kvf_policy_state_create(&c, &s, err));
    return s;
}

/* Opens seq 0 and gives it a prompt of n tokens; variance NULL: random ones. */
static void prompt(kvf_policy_state *s, const kvf_policy_options *o, uint32_t n, const double *variance,
                   uint64_t *seed) {
    double random[64 * 4];
    for (int i = 0; i < 64 * 4; i++) random[i] = exp(3 * rig_normal(seed));
    OK(kvf_policy_open(s, 0, o, err));
    OK(o->ops->budget(s, 0, variance ? variance : random, n, err));
}

/* Which layers are due, as text: "3:100 4:90" (layer:slots). */
static const char *due(kvf_policy_state *s, kvf_moment moment, const uint32_t *n_slots) {
    static char text[512];
    uint32_t keep[64], n = kvf__policy_due_layers(s, 0, moment, n_slots, keep), seen = 0;
    text[0] = '\0';
    for (uint32_t l = 0; l < s->config.n_layers; l++)
        if (keep[l]) {
            snprintf(text + strlen(text), sizeof text - strlen(text), "%s%u:%u", seen ? " " : "", l, keep[l]);
            seen++;
        }
    cr_assert_eq(n, seen);
    return text;
}

/* ---- exact_sizes ------------------------------------------------------------------------------------------- */

static double clamp(double x, double lo, double hi) { return x < lo ? lo : x > hi ? hi : x; }

Test(policy_sizes, totals_are_exact_and_sizes_nearest_to_the_clamped_line) {
    for (uint64_t turn = 0; turn < 3000; turn++) {
        uint64_t s = turn;
        double w[64], x[64], scratch[192];
        uint32_t order[64], out[64], n = 1 + (uint32_t)(rig_random(&s) % 64), lo = (uint32_t)(rig_random(&s) % 20);
        uint32_t hi = turn % 3 ? lo + (uint32_t)(rig_random(&s) % 500) : KVF__NO_UPPER;
        double spread = 20 * rig_uniform(&s);
        for (uint32_t l = 0; l < n; l++) {
            w[l] = turn % 7 == 0 ? 1.0 / n : exp(spread * rig_normal(&s));
            if (turn % 5 == 0 && rig_random(&s) % 4 == 0) w[l] = 0;
        }
        uint64_t room = (uint64_t)(hi - lo) * n,
                 total = (uint64_t)lo * n + rig_random(&s) % (room < 100000 ? room + 1 : 100000);
        kvf__exact_sizes(w, n, total, lo, hi, scratch, order, out);
        uint64_t sum = 0;
        for (uint32_t l = 0; l < n; l++) {
            cr_assert(out[l] >= lo && out[l] <= hi, "turn %llu", (unsigned long long)turn);
            sum += out[l];
        }
        cr_assert_eq(sum, total, "turn %llu: %llu, expected %llu", (unsigned long long)turn, (unsigned long long)sum,
                     (unsigned long long)total);
        double low = -80, high = 120; /* log of lam, by bisection */
        for (int i = 0; i < 200; i++) {
            double mid = (low + high) / 2, at = 0;
            for (uint32_t l = 0; l < n; l++) at += clamp(exp(mid) * fmax(w[l], 1e-30), lo, hi);
            *(at < (double)total ? &low : &high) = mid;
        }
        double least_up = 2, most_down = -1;
        for (uint32_t l = 0; l < n; l++) {
            x[l] = clamp(exp(high) * fmax(w[l], 1e-30), lo, hi);
            cr_assert_lt(fabs(out[l] - x[l]), 1 + 1e-4, "turn %llu layer %u: %u for %.6f", (unsigned long long)turn, l,
                         out[l], x[l]);
            double rest = x[l] - floor(x[l] + 1e-6);
            if (out[l] > floor(x[l] + 1e-6))
                least_up = fmin(least_up, rest);
            else if (out[l] < hi)
                most_down = fmax(most_down, rest);
        }
        cr_assert(least_up >= most_down - 1e-4, "turn %llu: a smaller remainder was raised", (unsigned long long)turn);
    }
}

Test(policy_sizes, remainders_equal_but_for_rounding_are_ties) {
    double w[] = {0.1, 0.1, 0.7}, scratch[9]; /* 3 by .1 : .1 : .7 leaves .33, .33 and .33 in three roundings */
    uint32_t order[3], out[3];
    kvf__exact_sizes(w, 3, 3, 0, 1000, scratch, order, out);
    cr_assert(out[0] == 1 && out[1] == 0 && out[2] == 2);
    kvf__exact_sizes(w, 3, 21, 0, 1000, scratch, order, out);
    cr_assert(out[0] == 3 && out[1] == 2 && out[2] == 16);
}

Test(policy_sizes, budgets_add_up_for_random_densities) {
    for (uint64_t turn = 0; turn < 1500; turn++) {
        uint64_t s = turn;
        uint32_t n = 1 + (uint32_t)(rig_random(&s) % 48), bs = 8u << rig_random(&s) % 4;
        uint32_t L = 1 + (uint32_t)(rig_random(&s) % 3000);
        kvf_policy_options o = init("d2o", turn % 2 ? "paper" : "serving");
        o.rho = 0.01 + 0.98 * rig_uniform(&s);
        o.metric = (kvf_metric)(turn % 3);
        o.layer_sign = turn % 4 < 2 ? 1 : -1;
        o.min_tokens = (uint32_t)(rig_random(&s) % 80);
        kvf_policy_state *state = new_state(n, 4, bs);
        prompt(state, &o, L, NULL, &s);
        const kvf_layer_size *z = kvf_policy_sizes(state, 0);
        uint32_t B = kvf__budget_tokens(&o, L), k = kvf__policy_k(&o, bs);
        cr_assert_eq(z == NULL, B >= L);
        uint64_t sum = 0, blocks = 0, raised = counts_of(state, 0).raised_tokens;
        for (uint32_t l = 0; l < n && z; l++) {
            sum += z[l].keep;
            blocks += (z[l].reserve + bs - 1) / bs;
            cr_assert(z[l].keep >= 1 && z[l].window >= 1 && z[l].hh + z[l].window == z[l].keep);
            cr_assert_eq(z[l].reserve, z[l].keep + k);
            if (o.budget_unit == KVF_BUDGET_BLOCK) cr_assert_eq((z[l].keep + k) % bs, 0);
            if (o.budget_unit == KVF_BUDGET_TOKEN) cr_assert(z[l].keep <= L);
        }
        if (z && o.budget_unit == KVF_BUDGET_TOKEN) cr_assert(sum == (uint64_t)B * n && raised == 0);
        if (z && o.budget_unit == KVF_BUDGET_BLOCK && !raised) cr_assert_leq(blocks * bs, (uint64_t)B * n);
        if (z && raised) cr_assert_eq(blocks * bs, (uint64_t)B * n + raised);
        kvf_policy_need need; /* the projection holds what the sizes will ask for */
        OK(kvf_policy_project(&o, n, 2, bs, L, 100000, &need, err));
        cr_assert(need.bounded && need.budget_tokens == B);
        if (z) cr_assert_leq(2 * blocks, need.steady_blocks);
        kvf_policy_state_destroy(state);
    }
}

Test(policy_sizes, metrics) {
    /* Two layers of two heads: variances 1, 3 and 10, 10. */
    double v[] = {1, 3, 10, 10}, f[2], w[2];
    kvf__layer_density(KVF_METRIC_RAW, v, 2, 2, f);
    cr_assert(f[0] == 2 && f[1] == 10);
    kvf__layer_density(KVF_METRIC_HEAD_MINMAX, v, 2, 2, f);
    cr_assert_float_eq(f[0], 0.5 * 2 / (2 + 1e-6), 1e-12);
    cr_assert_eq(f[1], 0);
    kvf__layer_density(KVF_METRIC_LAYER_MINMAX, v, 2, 2, f);
    cr_assert_eq(f[0], 0);
    cr_assert_float_eq(f[1], 8 / (8 + 1e-6), 1e-12);
    kvf_policy_options o = init("d2o", NULL);
    o.layer_strength = 2;
    f[1] = 1;
    kvf__layer_weights(&o, f, 2, w);
    cr_assert_float_eq(w[1] / w[0], exp(-2), 1e-12);
    o.layer_sign = -1;
    kvf__layer_weights(&o, f, 2, w);
    cr_assert_float_eq(w[1] / w[0], exp(2), 1e-12);
    /* A broken head is neither contagious nor fatal, and the largest factor overflows nothing. */
    double broken[] = {NAN, 3, INFINITY, 1};
    o.layer_strength = 1e6;
    for (int m = 0; m < 3; m++) {
        kvf__layer_density((kvf_metric)m, broken, 2, 2, f);
        kvf__layer_weights(&o, f, 2, w);
        cr_assert(isfinite(f[0]) && isfinite(f[1]) && fabs(w[0] + w[1] - 1) < 1e-12, "metric %d", m);
    }
    kvf__layer_density(KVF_METRIC_RAW, broken, 2, 2, f);
    cr_assert_eq(f[0], 1.5); /* NaN counts as 0 */
    cr_assert_eq(kvf__variance((float[]){7}, 1), 0);
}

/* ---- When ------------------------------------------------------------------------------------------------------ */

Test(policy_sizes, prompt_over_budget_is_due_at_its_end_and_then_every_k) {
    kvf_policy_state *s = new_state(3, 1, 16);
    kvf_policy_options o = init("h2o", NULL);
    o.rho = 0.25;
    o.evict_every = 4;
    uint64_t seed = 1;
    prompt(s, &o, 400, NULL, &seed);
    const kvf_layer_size *z = kvf_policy_sizes(s, 0);
    cr_assert(z && z[2].keep == 100 && z[2].hh == 50 && z[2].window == 50 && z[2].reserve == 104);
    cr_assert(kvf_policy_density(s, 0) == NULL);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){400, 400, 100}), "0:100 1:100");
    cr_assert_str_eq(due(s, KVF_BEFORE_APPEND, (uint32_t[]){100, 100, 103}), "");
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){103, 104, 105}), "1:100 2:100");
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){99, 1, 0}), "");
    /* A later segment: 2,000 prompt tokens in all, so 500 a layer, and layers below that only grow. */
    OK(o.ops->budget(s, 0, NULL, 2000, err));
    cr_assert_eq(kvf_policy_sizes(s, 0)[0].keep, 500);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){500, 501, 1700}), "1:500 2:500");
    FAILS(o.ops->budget(s, 0, NULL, 1999, err), KVF_E_INVALID, "n_tokens 1999");
    kvf_policy_state_destroy(s);
}

Test(policy_sizes, a_prompt_that_fits_is_sized_before_the_token_too_many) {
    kvf_policy_state *s = new_state(2, 2, 16);
    kvf_policy_options o = init("d2o", NULL);
    o.min_tokens = 64;
    o.evict_every = 7;
    uint64_t seed = 1;
    double v[] = {0, 0, 0, 9}; /* F 0 and .5: 79.66 and 48.34 of 128 tokens */
    prompt(s, &o, 60, v, &seed);
    cr_assert(kvf_policy_sizes(s, 0) == NULL && kvf_policy_density(s, 0)[0] == 0);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){60, 60}), "");
    cr_assert_str_eq(due(s, KVF_BEFORE_APPEND, (uint32_t[]){63, 63}), "");
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){64, 64}), "");
    cr_assert(kvf_policy_sizes(s, 0) == NULL);
    cr_assert_str_eq(due(s, KVF_BEFORE_APPEND, (uint32_t[]){64, 64}), "1:48");
    cr_assert_eq(kvf_policy_sizes(s, 0)[0].keep, 80); /* above the prompt: no upper clamp */
    cr_assert_str_eq(due(s, KVF_BEFORE_APPEND, (uint32_t[]){64, 48}), "");
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){86, 55}), "1:48");
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){87, 54}), "0:80");
    /* A segment instead: many tokens at once take it over its budget. */
    prompt(s, &o, 60, v, &seed);
    OK(o.ops->budget(s, 0, NULL, 90, err));
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){64, 64}), ""); /* just fits */
    cr_assert(kvf_policy_sizes(s, 0) == NULL);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){95, 95}), "0:80 1:48");
    kvf_policy_state_destroy(s);
}

Test(policy_sizes, deferred_full_and_rho_1) {
    kvf_policy_state *s = new_state(4, 2, 16);
    kvf_policy_options o = init("d2o", "authors");
    uint64_t seed = 3;
    double v[8] = {0};
    o.rho = 0.5;
    prompt(s, &o, 100, v, &seed);
    cr_assert(kvf_policy_sizes(s, 0) == NULL);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){100, 100, 100, 100}), "");
    cr_assert_str_eq(due(s, KVF_BEFORE_APPEND, (uint32_t[]){100, 100, 100, 100}), "");
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){101, 101, 101, 101}), "2:50");
    cr_assert_eq(kvf_policy_sizes(s, 0)[3].keep, UINT32_MAX);
    cr_assert_eq(kvf_policy_sizes(s, 0)[3].reserve, UINT32_MAX);
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){102, 102, 51, 102}), "2:50");
    kvf_policy_options never[] = {init("d2o", NULL), init("full", NULL), init("full", NULL)};
    never[0].rho = 1;
    never[2].budget_tokens = 16;
    for (int i = 0; i < 3; i++) {
        prompt(s, &never[i], 100, NULL, &seed);
        for (int m = 0; m < 3; m++) cr_assert_str_eq(due(s, (kvf_moment)m, (uint32_t[]){100, 100, 100, 9000}), "");
        cr_assert(kvf_policy_sizes(s, 0) == NULL);
    }
    never[0].budget_tokens = 16; /* in place of rho, 1 or not */
    prompt(s, &never[0], 100, v, &seed);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){100, 100, 100, 16}), "0:16 1:16 2:16");
    OK(kvf_policy_open(s, 0, &o, err)); /* before any prompt, and for a sequence that is not open */
    cr_assert_str_eq(due(s, KVF_AFTER_STEP, (uint32_t[]){100, 100, 100, 100}), "");
    kvf_policy_close(s, 0);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){100, 100, 100, 100}), "");
    cr_assert_eq(kvf__policy_due_layers(s, 99, KVF_AFTER_STEP, (uint32_t[]){1, 1, 1, 1}, (uint32_t[4]){0}), 0);
    FAILS(o.ops->budget(s, 0, v, 5, err), KVF_E_STALE, "seq 0");
    kvf_policy_state_destroy(s);
}

/* D2: ratios and budgets that come to nothing keep one token, and a budget above the length evicts nothing. */
Test(policy_sizes, d2_nothing_is_ever_left_with_no_token) {
    uint64_t seed = 5;
    for (uint32_t L = 1; L <= 40; L++)
        for (int p = 0; p < 7; p++) {
            static const char *const names[][2] = {{"d2o", "paper"}, {"d2o", "serving"},  {"d2o", "authors"},
                                                   {"h2o", NULL},    {"streaming", NULL}, {"d2o", "paper"},
                                                   {"d2o", "paper"}};
            kvf_policy_options o = init(names[p][0], names[p][1]);
            o.rho = L % 4 ? 0.4 : 0.01;
            o.min_tokens = 0;
            o.n_full_layers = 0;
            o.defer_first_decode = 0;
            if (p == 5) o.redistribute = 0;
            if (p == 6) o.window = 2, o.sinks = 1; /* more than budgets of 1 and 2 hold */
            kvf_policy_state *s = new_state(3, 4, 8);
            prompt(s, &o, L, NULL, &seed);
            const kvf_layer_size *z = kvf_policy_sizes(s, 0);
            cr_assert_eq(z == NULL, kvf__budget_tokens(&o, L) >= L);
            for (uint32_t l = 0; l < 3 && z; l++) cr_assert(z[l].keep >= 1 && z[l].hh + z[l].window == z[l].keep);
            if (p == 4 && z) cr_assert(z[0].hh == (z[0].keep > 4 ? 4 : z[0].keep - 1));
            if (p == 6 && z) cr_assert(z[0].window == KVF__MIN(2, z[0].keep));
            kvf_policy_state_destroy(s);
        }
    kvf_policy_options o = init("d2o", NULL);
    kvf_policy_state *s = new_state(1, 1, 8);
    o.budget_tokens = 5000;
    prompt(s, &o, 100, NULL, &seed);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){100}), "");
    kvf_policy_state_destroy(s);
}

Test(policy_sizes, full_layers_are_paid_for_by_the_others) {
    kvf_policy_state *s = new_state(4, 2, 16);
    kvf_policy_options o = init("d2o", NULL);
    uint64_t seed = 1;
    double v[8] = {0};
    OK(kvf_policy_option_set(&o, "full_layers", "0,last,0", err)); /* a layer named twice is one layer */
    o.rho = 0.75;
    prompt(s, &o, 1000, v, &seed);
    const kvf_layer_size *z = kvf_policy_sizes(s, 0);
    cr_assert(z[0].keep == UINT32_MAX && z[1].keep == 500 && z[2].keep == 500 && z[3].keep == UINT32_MAX);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){1000, 1000, 1000, 1000}), "1:500 2:500");
    kvf_policy_need need;
    OK(kvf_policy_project(&o, 4, 1, 16, 1000, 24, &need, err));
    cr_assert(!need.bounded);
    cr_assert_eq(need.steady_blocks, 2 * 64 + (1000 + 2 * (1 + 15)) / 16);
    o.rho = 0.5;
    FAILS(kvf_policy_project(&o, 4, 1, 16, 1000, 24, &need, err), KVF_E_INVALID,
          "full_layers: 2 full layers of 1000 tokens");
    o.budget_tokens = 1200; /* above the prompt: at the overflow the full layers hold as much as the others */
    prompt(s, &o, 1000, v, &seed);
    cr_assert_str_eq(due(s, KVF_BEFORE_APPEND, (uint32_t[]){1200, 1200, 1200, 1200}), "");
    cr_assert_eq(kvf_policy_sizes(s, 0)[1].keep, 1200);
    o.budget_tokens = 0;
    o.rho = 0.501; /* 4 tokens are left for two layers: their minima lift the total, and that is reported */
    OK(kvf_policy_project(&o, 4, 1, 16, 1000, 24, &need, err));
    prompt(s, &o, 1000, v, &seed);
    cr_assert(kvf_policy_sizes(s, 0)[1].keep == 16 && counts_of(s, 0).raised_tokens == 28);
    OK(kvf_policy_option_set(&o, "full_layers", "0,1,2,3,last,-2,-4", err)); /* more names than layers */
    FAILS(kvf_policy_project(&o, 4, 1, 16, 1000, 24, &need, err), KVF_E_INVALID, "full_layers: 4 full layers");
    o.redistribute = 0; /* parity: nobody pays, everything is kept */
    OK(kvf_policy_project(&o, 4, 1, 16, 1000, 24, &need, err));
    cr_assert_eq(need.steady_blocks, 4 * 64);
    prompt(s, &o, 1000, v, &seed);
    cr_assert_str_eq(due(s, KVF_AT_PROMPT_END, (uint32_t[]){1000, 1000, 1000, 1000}), "");
    kvf_policy_state_destroy(s);
}

Test(policy_sizes, sinks_extra_and_absolute_budgets) {
    kvf_policy_options o = init("d2o", NULL);
    kvf_layer_size z;
    o.sinks_extra = 1;
    kvf__split(&o, 104, &z); /* 4 sinks beside 75:25 */
    cr_assert(z.keep == 104 && z.hh == 79 && z.window == 25);
    kvf__split(&o, 3, &z);
    cr_assert(z.hh == 2 && z.window == 1);
    uint64_t seed = 1;
    kvf_policy_state *s = new_state(2, 1, 8);
    o = init("d2o", NULL);
    o.redistribute = 0;
    o.budget_tokens = 40;
    double v[2] = {0};
    prompt(s, &o, 100, v, &seed);
    cr_assert(kvf_policy_sizes(s, 0)[0].hh == 30 && kvf_policy_sizes(s, 0)[0].window == 10);
    o.budget_tokens = 0;
    o.min_tokens = 200; /* without effect: the prompt is compressed */
    prompt(s, &o, 100, v, &seed);
    cr_assert_eq(kvf_policy_sizes(s, 0)[0].keep, 20);
    o.budget_tokens = 400; /* above the prompt: the ratio is of the budget */
    prompt(s, &o, 100, v, &seed);
    cr_assert(kvf_policy_sizes(s, 0) == NULL);
    cr_assert_str_eq(due(s, KVF_BEFORE_APPEND, (uint32_t[]){400, 400}), "");
    cr_assert_eq(kvf_policy_sizes(s, 0)[1].keep, 400);
    kvf_policy_state_destroy(s);
}

Test(policy_sizes, projected_need) {
    kvf_policy_need n;
    kvf_policy_options o = init("d2o", NULL); /* k 1 */
    OK(kvf_policy_project(&o, 30, 3, 16, 1000, 500, &n, err));
    cr_assert(n.budget_tokens == 200 && n.bounded && n.prompt_blocks == 30 * 3 * 63);
    cr_assert_eq(n.steady_blocks, 3 * (30 * (200 + 1 + 15) / 16));
    OK(kvf_policy_project(&o, 30, 3, 16, 50, 6, &n, err)); /* B 64: never more than all tokens take */
    cr_assert(n.bounded && n.prompt_blocks == 30 * 3 * 4 && n.steady_blocks == 30 * 3 * 4);
    OK(kvf_policy_project(&o, 30, 3, 16, 50, 600, &n, err));
    cr_assert_eq(n.steady_blocks, 3 * (30 * (64 + 1 + 15) / 16));
    o = init("d2o", "serving"); /* whole blocks, k 8 */
    OK(kvf_policy_project(&o, 30, 1, 16, 1000, 500, &n, err));
    cr_assert_eq(n.steady_blocks, 30 * 200 / 16);
    o.budget_tokens = 65; /* the blocks of 4 x 65 tokens are 16, but until the overflow each layer holds 5 */
    OK(kvf_policy_project(&o, 4, 1, 16, 10, 1000, &n, err));
    cr_assert(n.bounded && n.steady_blocks == 20);
    o = init("d2o", "authors");
    OK(kvf_policy_project(&o, 30, 1, 16, 1008, 500, &n, err));
    cr_assert(!n.bounded && n.prompt_blocks == 30 * 64 && n.steady_blocks == 27 * 64 + 3 * 95);
    o = init("d2o", NULL);
    o.rho = 1;
    OK(kvf_policy_project(&o, 30, 1, 16, 1000, 500, &n, err));
    cr_assert(!n.bounded && n.steady_blocks == 30 * 94 && n.prompt_blocks == 30 * 63);
    o = init("full", NULL);
    OK(kvf_policy_project(&o, 1024, 1, 8, 1u << 30, UINT32_MAX, &n, err));
    cr_assert_eq(n.steady_blocks, 1024ull * (((1ull << 30) + UINT32_MAX + 7) / 8));
    FAILS(kvf_policy_project(&o, 30, 1, 16, 0, 500, &n, err), KVF_E_INVALID, "n_prompt 0");
    FAILS(kvf_policy_project(&o, 0, 1, 16, 1, 500, &n, err), KVF_E_INVALID, "n_layers 0");
}

/* ---- The state ---------------------------------------------------------------------------------------------- */

typedef struct counter {
    int live, n, fail_at;
} counter;
static void *count_alloc(void *ctx, size_t bytes, size_t align) {
    counter *c = ctx;
    if (++c->n == c->fail_at) return NULL;
    c->live++;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void count_free(void *ctx, void *p, size_t bytes) {
    (void)bytes;
    ((counter *)ctx)->live--;
    free(p);
}

Test(policy_sizes, creating_fails_cleanly_and_frees_everything) {
    kvf_policy_state_config good = {.struct_size = sizeof good,
                                    .n_layers = 2,
                                    .n_kv_heads = 2,
                                    .n_q_heads = 4,
                                    .head_dim = 64,
                                    .block_size = 16,
                                    .max_seqs = 2,
                                    .max_slots = 100},
                            c;
    kvf_policy_state *s = NULL;
    kvf_plan *p = NULL;
#define BAD(change, status, word)                                  \
    do {                                                           \
        c = good;                                                  \
        change;                                                    \
        FAILS(kvf_policy_state_create(&c, &s, err), status, word); \
        cr_assert(s == NULL);                                      \
    } while (0)
    BAD(c.n_layers = 0, KVF_E_INVALID, "n_layers 0");
    BAD(c.n_kv_heads = 3, KVF_E_INVALID, "n_q_heads 4");
    BAD(c.head_dim = 12, KVF_E_INVALID, "head_dim 12: must be a multiple of 8");
    BAD(c.block_size = 12, KVF_E_INVALID, "block_size 12: must be a power of two in [8, 256]");
    BAD(c.max_seqs = 0, KVF_E_INVALID, "max_seqs 0");
    BAD((c.n_q_heads_total = 6, c.q_head_begin = 4), KVF_E_INVALID, "q_head_begin 4");
    BAD(c.struct_size = 0, KVF_E_INVALID, "struct_size 0");
    counter n = {0, 0, 0};
    for (n.fail_at = 1; n.fail_at <= 2; n.fail_at++) {
        n.n = 0;
        good.allocator = (kvf_allocator){count_alloc, count_free, &n};
        kvf_status st = kvf_policy_state_create(&good, &s, NULL);
        if (n.fail_at == 1) cr_assert(st == KVF_E_NO_MEMORY && s == NULL && n.live == 0);
        if (n.fail_at == 2) cr_assert(st == KVF_OK && n.live == 1);
        if (st == KVF_OK) kvf_policy_state_destroy(s);
        n.n = 0;
        st = kvf_plan_create(&good.allocator, 2, 4, 100, &p, NULL);
        if (n.fail_at == 1) cr_assert(st == KVF_E_NO_MEMORY && p == NULL && n.live == 0);
        if (st == KVF_OK) kvf_plan_destroy(p);
        cr_assert_eq(n.live, 0);
    }
    FAILS(kvf_plan_create(NULL, 1, 4, UINT64_MAX / 2, &p, err), KVF_E_OVERFLOW, "entry_capacity");
    FAILS(kvf_plan_create(NULL, 0, 4, 8, &p, err), KVF_E_INVALID, "n_kv_heads 0");
    size_t bytes = 7;
    cr_assert_eq(kvf_policy_workspace_bytes(0, 64, 1, 100, &bytes), KVF_E_INVALID);
    cr_assert_eq(kvf_policy_workspace_bytes(UINT32_MAX, 1u << 31, 1, UINT32_MAX, &bytes), KVF_E_OVERFLOW);
    cr_assert_eq(bytes, 7);
    kvf_policy_state_destroy(NULL);
    kvf_plan_destroy(NULL);
}
