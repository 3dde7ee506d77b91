/* What layers weigh: the metrics that count tokens, the policies' own weights, exact totals for all of them, budgets in bytes,
 * and an absolute budget over a growing context. */
#include "test_policy_rig.h"
#include "tests/counts.h"

/* ---- Metrics ------------------------------------------------------------------------------------------------ */

static int falling(const void *pa, const void *pb) {
    double a = *(const double *)pa, b = *(const double *)pb;
    return a > b ? -1 : a < b;
}

static double naive_metric(const kvf_policy_options *o, const float *x, uint32_t n) {
    double y[512], sum = 0, entropy = 0, held = 0;
    for (uint32_t i = 0; i < n; i++) sum += y[i] = x[i] > 0 ? fmin(x[i], 3.4028234663852886e38) : 0;
    if (sum == 0) return 0;
    for (uint32_t i = 0; i < n; i++) entropy -= y[i] > 0 ? y[i] / sum * log(y[i] / sum) : 0;
    if (o->metric == KVF_METRIC_ENTROPY) return exp(entropy);
    qsort(y, n, sizeof *y, falling);
    for (uint32_t i = 0; i < n; i++)
        if ((held += y[i]) >= sum * o->metric_share * (1 - 1e-9)) return i + 1;
    return n;
}

Test(policy_layers, metrics_that_count_tokens_are_those_of_a_sorted_list) {
    kvf_policy_options o = rig_policy("d2o", NULL);
    uint32_t most = 0;
    for (uint64_t turn = 0; turn < 2000; turn++) {
        uint64_t s = turn;
        float x[512];
        uint32_t n = turn % 5 ? 1 + (uint32_t)(rig_random(&s) % 512) : 1 + (uint32_t)(turn / 5 % 4);
        o.metric = turn % 2 ? KVF_METRIC_MASS : KVF_METRIC_ENTROPY;
        o.metric_share = turn % 7 ? 0.05 + 0.95 * rig_uniform(&s) : 1.0;
        for (uint32_t i = 0; i < n; i++) {
            x[i] = (float)exp((double)(turn % 4) * rig_normal(&s));
            if (turn % 3 == 0) x[i] = (float)(rig_random(&s) % 4); /* many ties, and zeros */
            if (turn % 9 == 0 && rig_random(&s) % 8 == 0) x[i] = rig_random(&s) % 2 ? NAN : -1.0f;
            if (turn % 11 == 0 && rig_random(&s) % 64 == 0) x[i] = INFINITY;
        }
        double got = kvf__metric_of(&o, x, n), expected = naive_metric(&o, x, n);
        cr_assert_float_eq(got, expected, 1e-9 * fmax(1, expected), "turn %llu, n %u, share %.17g: %.12g, not %.12g",
                           (unsigned long long)turn, n, o.metric_share, got, expected);
        if (got > most) most = (uint32_t)got;
    }
    cr_assert_gt(most, 400);
    float equal[10] = {0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f, 0.3f}, one = 5;
    o.metric_share = 0.9;
    o.metric = KVF_METRIC_MASS;
    cr_assert(kvf__metric_of(&o, equal, 10) == 9 && kvf__metric_of(&o, &one, 1) == 1);
    o.metric = KVF_METRIC_ENTROPY;
    cr_assert_float_eq(kvf__metric_of(&o, equal, 10), 10, 1e-9);
}

/* A state of n layers with a prompt of length L in seq 0; its weights. v: [n_layers][4] numbers of the query heads. */
static kvf_policy_state *prompted(const kvf_policy_options *o, uint32_t n, uint32_t bs, uint32_t L, const double *v) {
    kvf_policy_state_config c = {.struct_size = sizeof c,
                                 .n_layers = n,
                                 .n_kv_heads = 1,
                                 .n_q_heads = 4,
                                 .head_dim = 8,
                                 .block_size = bs,
                                 .max_seqs = 2,
                                 .max_slots = 65536};
    kvf_policy_state *s;
    OK(kvf_policy_state_create(&c, &s, err));
    OK(kvf_policy_open(s, 0, o, err));
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    OK(ops.budget(s, 0, ops.metric ? v : NULL, L, err));
    return s;
}

static void weights_are(const kvf_policy_options *o, uint32_t n, const double *v, const double *expected) {
    double sum = 0;
    kvf_policy_state *s = prompted(o, n, 16, 1000, v);
    const double *w = kvf__policy_seq_get(s, 0)->weights;
    for (uint32_t l = 0; l < n; l++) sum += expected[l];
    for (uint32_t l = 0; l < n; l++)
        cr_assert_float_eq(w[l], expected[l] / sum, 1e-12, "%s layer %u: %.15g, expected %.15g", o->ops->name, l, w[l],
                           expected[l] / sum);
    kvf_policy_state_destroy(s);
}

Test(policy_layers, weights_are_those_of_the_formulas) {
    double v[20], F[5], expected[5];
    for (uint64_t turn = 0; turn < 200; turn++) {
        uint64_t s = turn;
        kvf_policy_options o = rig_policy(turn % 2 ? "d2o" : "reciprocal", NULL);
        o.metric = turn % 2 ? turn % 4 == 1 ? KVF_METRIC_MASS : KVF_METRIC_ENTROPY : KVF_METRIC_RAW;
        o.layer_sign = turn % 8 < 4 ? 1 : -1;
        o.layer_strength = 2 * rig_uniform(&s);
        for (int l = 0; l < 5; l++) {
            F[l] = 0;
            for (int h = 0; h < 4; h++) F[l] += v[4 * l + h] = 1 + 99 * rig_uniform(&s);
            F[l] /= 4;
            expected[l] = turn % 2 ? pow(F[l], -o.layer_sign * o.layer_strength)
                                   : pow(1 + o.layer_strength * F[l], -o.layer_sign);
        }
        weights_are(&o, 5, v, expected);
        o = rig_policy("exp_decay", NULL);
        o.layer_sign = turn % 8 < 4 ? 1 : -1;
        o.layer_strength = turn * 10; /* up to where exp alone would overflow */
        for (int l = 0; l < 5; l++)
            expected[l] = exp(-o.layer_sign * o.layer_strength * (l / 4.0 - (o.layer_sign < 0)));
        weights_are(&o, 5, NULL, expected);
    }
    kvf_policy_options one = rig_policy("exp_decay", NULL), uniform = rig_policy("uniform", NULL);
    weights_are(&one, 1, NULL, (double[]){1});
    weights_are(&uniform, 3, NULL, (double[]){1, 1, 1});
    one = rig_policy("d2o", NULL);
    one.metric = KVF_METRIC_ENTROPY; /* broken heads count as nothing, and a layer as one token at least */
    double broken[] = {NAN, -1, 0, 0, 4, 4, 4, 4};
    weights_are(&one, 2, broken, (double[]){1, 0.25});
}

/* ---- Exact totals ------------------------------------------------------------------------------------------- */

Test(policy_layers, totals_are_exact_for_every_policy_metric_and_unit) {
    const char *name;
    uint32_t n_exact = 0;
    for (uint32_t p = 0; (name = kvf_policy_name(p)); p++)
        for (uint64_t turn = 0; turn < 200 && strcmp(name, "full"); turn++) {
            uint64_t s = turn;
            double v[32 * 4];
            kvf_policy_options o = rig_policy(name, NULL);
            if (o.budget == KVF_BUDGET_GLOBAL) break; /* test_policy_global.c */
            uint32_t n = 1 + (uint32_t)(rig_random(&s) % 32), bs = 8u << rig_random(&s) % 3;
            uint32_t L = 40 + (uint32_t)(rig_random(&s) % 4000);
            o.metric = (kvf_metric)(turn % 5);
            o.layer_sign = turn % 3 ? 1 : -1;
            o.layer_strength = turn % 4 ? 1 : 5 * rig_uniform(&s);
            o.rho = 0.05 + 0.9 * rig_uniform(&s);
            o.min_tokens = 0;
            o.budget_unit = turn % 2 ? KVF_BUDGET_BLOCK : KVF_BUDGET_TOKEN;
            o.evict_every = (uint32_t)(rig_random(&s) % 3);
            bool counts = o.metric == KVF_METRIC_MASS || o.metric == KVF_METRIC_ENTROPY;
            for (uint32_t i = 0; i < 4 * n; i++) v[i] = exp(3 * rig_normal(&s)) + counts;
            kvf_policy_state *state = prompted(&o, n, bs, L, v);
            const kvf_layer_size *z = kvf_policy_sizes(state, 0);
            cr_assert(z, "%s: not sized", name);
            bool grows = kvf__policy_ops_resolve(o.ops).flags & KVF_POLICY_PROMPT_ONLY;
            uint64_t sum = 0, total = (uint64_t)floor(o.rho * L + 1e-6) * n;
            uint32_t k = grows ? 0 : o.evict_every ? o.evict_every : bs / 2;
            for (uint32_t l = 0; l < n; l++) {
                cr_assert(z[l].hh + z[l].window == z[l].keep && z[l].window >= 1);
                cr_assert(z[l].reserve == (grows ? UINT32_MAX : z[l].keep + k));
                sum += o.budget_unit == KVF_BUDGET_BLOCK ? z[l].keep + k : z[l].keep;
                if (o.budget_unit == KVF_BUDGET_BLOCK) cr_assert_eq((z[l].keep + k) % bs, 0);
            }
            if (counts_of(state, 0).raised_tokens == 0) {
                if (o.budget_unit == KVF_BUDGET_BLOCK)
                    total = KVF__MIN(total / bs, (uint64_t)n * ((L + k + bs - 1) / bs)) * bs;
                cr_assert_eq(sum, total, "%s turn %llu: %llu, expected %llu", name, (unsigned long long)turn,
                             (unsigned long long)sum, (unsigned long long)total);
                n_exact++;
            }
            kvf_policy_state_destroy(state);
        }
    cr_assert_gt(n_exact, 1000);
}

Test(policy_layers, one_token_and_more_full_layers_than_layers) {
    const char *name;
    for (uint32_t p = 0; (name = kvf_policy_name(p)); p++) {
        kvf_policy_options o = rig_policy(name, NULL);
        if (o.budget == KVF_BUDGET_GLOBAL) continue;
        o.min_tokens = 0;
        kvf_policy_need need;
        OK(kvf_policy_project(&o, 1, 1, 16, 1, 0, &need, err));
        cr_assert_eq(need.prompt_blocks, 1);
        kvf_policy_state *s = prompted(&o, 1, 16, 1, (double[]){NAN, INFINITY, 0, 1});
        bool grows = kvf__policy_ops_resolve(o.ops).flags & (KVF_POLICY_PROMPT_ONLY | KVF_POLICY_KEEPS_ALL);
        uint32_t n_slots = 1, keep;
        cr_assert(!kvf__policy_due_layers(s, 0, KVF_AT_PROMPT_END, &n_slots, &keep) && !kvf_policy_sizes(s, 0), "%s",
                  name);
        kvf__policy_due_layers(s, 0, KVF_BEFORE_APPEND, &n_slots, &keep); /* one token is the budget */
        n_slots = 2;
        cr_assert(kvf__policy_due_layers(s, 0, KVF_AFTER_STEP, &n_slots, &keep) == !grows && keep == !grows, "%s",
                  name);
        kvf_policy_state_destroy(s);
        o.full_layers[0] = 0, o.full_layers[1] = 1, o.full_layers[2] = 2; /* three of two */
        o.n_full_layers = 3;
        FAILS(kvf_policy_options_check(&o, 2, 16, err), KVF_E_INVALID, "full_layers 2: the model has 2 layers");
        o.full_layers[2] = -1;
        OK(kvf_policy_options_check(&o, 2, 16, err)); /* both, one of them by two names */
        cr_assert_eq(kvf__policy_n_full(&o, 2), 2);
        if (kvf_policy_evicts(&o))
            FAILS(kvf_policy_project(&o, 2, 1, 16, 100, 9, &need, err), KVF_E_INVALID, "leave nothing of the budget");
    }
}

/* Weights that a policy of the caller's gets wrong still give sizes with the exact total, and lower bounds hold. */
static double wrong[4];
static void wrong_weights(const kvf_policy_options *o, uint32_t n_prompt, uint32_t budget, const double *density,
                          uint32_t n, double *weights) {
    cr_assert(o && n_prompt == 1000 && budget == 200 && density[0] == 0 && n == 4);
    memcpy(weights, wrong, sizeof wrong);
}

Test(policy_layers, weights_of_any_kind_give_exact_totals) {
    const kvf_policy_ops ops = {.struct_size = sizeof ops,
                                .name = "wrong",
                                .needs = KVF_NEEDS_COL_SUMS,
                                .flags = KVF_POLICY_EQUAL_LAYERS,
                                .weights = wrong_weights};
    static const struct {
        double weights[4];
        uint32_t sizes[4];
    } cases[] = {{{NAN, NAN, NAN, NAN}, {200, 200, 200, 200}},
                 {{0, 0, 0, 0}, {200, 200, 200, 200}},
                 {{-1, -5, 1, 1}, {16, 16, 384, 384}},
                 {{INFINITY, 1, 1, 1}, {752, 16, 16, 16}},
                 {{INFINITY, INFINITY, NAN, -INFINITY}, {384, 384, 16, 16}},
                 {{1e-320, 1e-320, 0, 0}, {384, 384, 16, 16}},
                 {{1e308, 1e308, 1e308, 1e308}, {200, 200, 200, 200}},
                 {{1, 2, 3, 4}, {80, 160, 240, 320}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_policy_options o;
        OK(kvf_policy_options_init_ops(&o, sizeof o, &ops, err));
        memcpy(wrong, cases[i].weights, sizeof wrong);
        kvf_policy_state *s = prompted(&o, 4, 16, 1000, NULL);
        const kvf_layer_size *z = kvf_policy_sizes(s, 0);
        for (int l = 0; l < 4; l++)
            cr_assert_eq(z[l].keep, cases[i].sizes[l], "case %zu layer %d: %u", i, l, z[l].keep);
        kvf_policy_state_destroy(s);
    }
}

Test(policy_layers, windows_in_tokens_take_the_place_of_parts) {
    kvf_layer_size z;
    kvf_policy_options o = rig_policy("d2o", NULL);
    o.window = 40;
    kvf__split(&o, 100, &z);
    cr_assert(z.keep == 100 && z.window == 40 && z.hh == 60);
    kvf__split(&o, 30, &z);
    cr_assert(z.keep == 30 && z.window == 30 && z.hh == 0);
    o = rig_policy("streaming", NULL);
    o.window = 40; /* it has sinks and window alone */
    kvf__split(&o, 100, &z);
    cr_assert(z.window == 96 && z.hh == 4);
}

/* ---- Budgets in bytes --------------------------------------------------------------------------------------- */

Test(policy_layers, bytes_become_tokens_and_never_more_than_they_hold) {
    for (uint64_t turn = 0; turn < 500; turn++) {
        uint64_t s = turn, token = 2 * (1 + rig_random(&s) % 8) * 64 * 2;
        uint32_t n = 1 + (uint32_t)(rig_random(&s) % 48);
        kvf_policy_options o = rig_policy("h2o", NULL);
        o.budget_bytes = (16 + rig_random(&s) % 5000) * n * token + rig_random(&s) % (n * token);
        uint64_t bytes = o.budget_bytes;
        OK(kvf_policy_options_resolve(&o, n, token, err));
        cr_assert(o.budget_bytes == 0 && o.budget_tokens >= 16);
        cr_assert((uint64_t)o.budget_tokens * n * token <= bytes &&
                  ((uint64_t)o.budget_tokens + 1) * n * token > bytes);
        kvf_policy_options again = o;
        OK(kvf_policy_options_resolve(&again, n, token, err));
        cr_assert_eq(again.budget_tokens, o.budget_tokens);
    }
    kvf_policy_options o = rig_policy("d2o", NULL), before;
    OK(kvf_policy_option_set(&o, "budget_bytes", "1MiB", err));
    cr_assert_eq(o.budget_bytes, 1048576);
    OK(kvf_policy_options_check(&o, 30, 16, err));
    cr_assert(kvf_policy_evicts(&o));
    o.rho = 1;
    cr_assert(kvf_policy_evicts(&o) && kvf_policy_needs(&o), "a budget in bytes counts before rho");
    kvf_policy_state_config c = {.struct_size = sizeof c, .n_layers = 30, .n_kv_heads = 1, .n_q_heads = 1};
    c.head_dim = 8, c.block_size = 16, c.max_seqs = 1, c.max_slots = 64;
    kvf_policy_state *state;
    kvf_policy_need need;
    OK(kvf_policy_state_create(&c, &state, err));
    FAILS(kvf_policy_open(state, 0, &o, err), KVF_E_INVALID, "budget_bytes 1048576: is not in tokens yet");
    FAILS(kvf_policy_project(&o, 30, 1, 16, 100, 10, &need, err), KVF_E_INVALID, "kvf_policy_options_resolve");
    before = o;
    FAILS(kvf_policy_options_resolve(&o, 30, 4096, err), KVF_E_INVALID,
          "budget_bytes 1048576: 30 layers of 16 tokens take more; give at least 1966080");
    FAILS(kvf_policy_options_resolve(&o, 0, 4096, err), KVF_E_INVALID, "n_layers");
    o.budget_tokens = 20;
    FAILS(kvf_policy_options_check(&o, 30, 16, err), KVF_E_INVALID, "budget_tokens is 20: set one of them");
    FAILS(kvf_policy_options_resolve(&o, 30, 16, err), KVF_E_INVALID, "set one of them");
    o = before;
    OK(kvf_policy_option_set(&o, "budget_tokens", "32", err)); /* of the two the later counts */
    cr_assert(o.budget_bytes == 0 && o.budget_tokens == 32);
    OK(kvf_policy_option_set(&o, "budget_bytes", "7340032", err));
    cr_assert(o.budget_tokens == 0);
    OK(kvf_policy_options_resolve(&o, 30, 512, err));
    cr_assert_eq(o.budget_tokens, 477);
    OK(kvf_policy_open(state, 0, &o, err));
    kvf_policy_state_destroy(state);
}

/* ---- A growing context ---------------------------------------------------------------------------------------- */

Test(policy_layers, an_absolute_budget_is_dealt_out_at_the_first_overflow) {
    const char *name;
    for (uint32_t p = 0; (name = kvf_policy_name(p)); p++) {
        kvf_policy_options o = rig_policy(name, NULL);
        if (!strcmp(name, "full") || o.budget == KVF_BUDGET_GLOBAL) continue;
        o.budget_tokens = 128;
        o.evict_every = 4;
        enum { N = 6 };
        double v[4 * N];
        uint64_t seed = 12;
        for (int i = 0; i < 4 * N; i++) v[i] = 5 * exp(rig_normal(&seed));
        kvf_policy_state *s = prompted(&o, N, 16, 64, v);
        bool grows = kvf__policy_ops_resolve(o.ops).flags & KVF_POLICY_PROMPT_ONLY;
        uint32_t n_slots[N], keep[N], sum = 0, first = 0;
        for (int l = 0; l < N; l++) n_slots[l] = 64;
        cr_assert(!kvf__policy_due_layers(s, 0, KVF_AT_PROMPT_END, n_slots, keep) && !kvf_policy_sizes(s, 0));
        for (uint32_t n = 64; n < 300; n++) { /* the append of token n */
            uint32_t due = kvf__policy_due_layers(s, 0, KVF_BEFORE_APPEND, n_slots, keep);
            if (due || (!first && kvf_policy_sizes(s, 0))) first = first ? UINT32_MAX : n; /* once */
            for (int l = 0; l < N; l++) n_slots[l] = (keep[l] ? keep[l] : n_slots[l]) + 1;
            kvf__policy_due_layers(s, 0, KVF_AFTER_STEP, n_slots, keep);
            for (int l = 0; l < N; l++) n_slots[l] = keep[l] ? keep[l] : n_slots[l];
        }
        const kvf_layer_size *z = kvf_policy_sizes(s, 0);
        cr_assert(first == (grows ? 0 : 128), "%s: first overflow at %u", name, first);
        for (int l = 0; l < N; l++) {
            if (grows)
                cr_assert_eq(n_slots[l], 300, "%s compresses its prompt alone, which fitted", name);
            else
                cr_assert(n_slots[l] >= z[l].keep && n_slots[l] < z[l].keep + 4);
            sum += grows ? 128 : z[l].keep;
        }
        cr_assert_eq(sum, 128 * N);
        kvf_policy_state_destroy(s);
    }
}

/* Two sequences alike: what one is told by layer the other is told by table, also in the step in which its sizes are found. */
Test(policy_layers, tables_are_due_as_their_layers_are) {
    enum { N = 6, GROUPS = 2 };
    rig *r = rig_new((rig_config){.n_seqs = 2,
                                  .n_layers = N,
                                  .n_kv = GROUPS,
                                  .g = 1,
                                  .hpg = 1,
                                  .bs = 16,
                                  .d = 8,
                                  .cap = 160,
                                  .n_arrays = 1,
                                  .threads = 1,
                                  .dtype = KVF_F32});
    kvf_policy_options o = rig_policy("d2o", NULL);
    uint64_t seed = 21;
    double v[N * GROUPS];
    uint32_t slots[N], by_layer[N], by_table[N * GROUPS], n_partly = 0;
    o.budget_tokens = 64;
    o.metric = KVF_METRIC_RAW;
    for (int i = 0; i < N * GROUPS; i++) v[i] = rig_uniform(&seed);
    for (uint32_t row = 0; row < 2; row++) {
        OK(kvf_policy_open(r->state, row, &o, err));
        OK(kvf__policy_ops_resolve(o.ops).budget(r->state, row, v, 40, err));
    }
    for (uint32_t l = 0; l < N; l++) rig_set_slots(r, 1, l, 40);
    for (uint32_t step = 0; step < 100; step++)
        for (uint32_t moment = 0; moment < 2; moment++) {
            kvf_policy_batch b = rig_batch(r);
            uint32_t n = 0;
            for (uint32_t l = 0; l < N; l++) slots[l] = rig_slots(r, 1, l);
            uint32_t want =
                kvf__policy_due_layers(r->state, 0, moment ? KVF_AFTER_STEP : KVF_BEFORE_APPEND, slots, by_layer);
            OK(kvf_policy_due(r->state, NULL, &b, 1, moment ? KVF_AFTER_STEP : KVF_BEFORE_APPEND, by_table, &n, err));
            cr_assert_eq(n, want * GROUPS, "step %u: %u tables are due, not %u", step, n, want * GROUPS);
            for (uint32_t t = 0; t < N * GROUPS; t++)
                cr_assert_eq(by_table[t], by_layer[t / GROUPS], "step %u, layer %u: %u, not %u", step, t / GROUPS,
                             by_table[t], by_layer[t / GROUPS]);
            n_partly += want > 0 && want < N;
            for (uint32_t l = 0; l < N; l++)
                rig_set_slots(r, 1, l, (by_layer[l] ? by_layer[l] : slots[l]) + (moment == 0));
        }
    cr_assert_gt(n_partly, 1, "all layers were due at once");
    rig_free(r);
}
