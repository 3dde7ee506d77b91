/* The forward pass against logits that were computed elsewhere; how far activations in 8 bits move them. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>

#include "tests/forward_rig.h"
#include "tests/real_model.h"
#include "tests/tiny_models.h"

static json_t *load_json(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", KVF_TEST_DATA, name);
    json_error_t err;
    json_t *j = json_load_file(path, 0, &err);
    cr_assert(j != NULL, "%s: line %d: %s", path, err.line, err.text);
    return j;
}

/* ---- Stored logits -------------------------------------------------------------------------------- */

static void check_tiny_file(const struct tiny_case *c, const char *want) {
    gw w = {0};
    size_t n;
    uint64_t h = 0xcbf29ce484222325u;
    char have[17];
    kvf_test_tiny_model(&w, &c->params);
    unsigned char *bytes = gw_bytes(&w, &n);
    for (size_t i = 0; i < n; i++) h = (h ^ bytes[i]) * 0x100000001b3u;
    snprintf(have, sizeof have, "%016llx", (unsigned long long)h);
    cr_assert_str_eq(have, want, "tiny model %s is another file than the stored logits are of: see tests/tiny_models.h",
                     c->name);
    free(bytes);
    gw_free(&w);
}

static void check_tiny_case(const struct tiny_case *c, const json_t *want, uint32_t step) {
    static const struct {
        kvf_cpu_path path;
        kvf_dtype dtype;
        double bound; /* logits are up to 10 */
    } runs[] = {{KVF_CPU_AUTO, KVF_F32, 1e-3},
                {KVF_CPU_SCALAR, KVF_F32, 1e-3},
                {KVF_CPU_REF, KVF_F32, 1e-3},
                {KVF_CPU_AUTO, KVF_F16, 5e-2},
                {KVF_CPU_AUTO, KVF_BF16, 2e-1}};
    uint32_t ids[TINY_TOKENS];
    float *logits = rig_floats(TINY_TOKENS * TINY_N_VOCAB);
    kvf_model *m = open_tiny(&c->params);
    tiny_tokens(ids, TINY_TOKENS);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        double worst = 0;
        forward_rig r;
        rig_open(&r, m, runs[i].dtype, 2, 0, 64, 64, 64);
        rig_run_all(&r, ids, TINY_TOKENS, TINY_TOKENS, 0, runs[i].path, logits);
        for (uint32_t t = 0; t < TINY_TOKENS; t++)
            for (uint32_t v = 0; v < TINY_N_VOCAB; v += step) {
                double x = json_number_value(json_array_get(json_array_get(want, t), v / step));
                double d = fabs(x - logits[t * TINY_N_VOCAB + v]);
                worst = isnan(d) ? INFINITY : fmax(worst, d);
            }
        cr_assert(worst <= runs[i].bound, "%s, run %zu: off by %g", c->name, i, worst);
        rig_close(&r);
    }
    kvf_model_close(m);
    free(logits);
}

Test(forward_logits, tiny_models_of_every_type_have_the_stored_logits) {
    json_t *j = load_json("tiny_logits.json"), *cases = json_object_get(j, "cases");
    uint32_t step = (uint32_t)json_integer_value(json_object_get(j, "step"));
    cr_assert_eq(json_array_size(cases), (size_t)TINY_CASES);
    for (size_t i = 0; i < TINY_CASES; i++) {
        json_t *c = json_array_get(cases, i);
        cr_assert_str_eq(json_string_value(json_object_get(c, "name")), tiny_cases[i].name);
        check_tiny_file(&tiny_cases[i], json_string_value(json_object_get(c, "fnv1a")));
        check_tiny_case(&tiny_cases[i], json_object_get(c, "logits"), step);
    }
    json_decref(j);
}

static void check_nll(const json_t *want, const uint32_t *ids, const float *logits, size_t n_vocab) {
    for (size_t i = 0; i < json_array_size(want); i++) {
        const float *x = logits + i * n_vocab;
        double max = x[0], sum = 0;
        for (size_t v = 0; v < n_vocab; v++) max = fmax(max, x[v]);
        for (size_t v = 0; v < n_vocab; v++) sum += exp(x[v] - max);
        double nll = max + log(sum) - x[ids[i + 1]], listed = json_number_value(json_array_get(want, i));
        cr_assert(fabs(nll - listed) < 1e-2, "position %zu: nll %g, listed %g", i, nll, listed);
    }
}

Test(forward_logits, the_real_model_has_the_listed_logits) {
    const char *path = kvf_test_real_model();
    if (!path) cr_skip_test("SmolLM2-135M-Instruct is not in the cache (scripts/fetch_model.sh fetches it)");
    json_t *j = load_json("smollm2_logits.json"), *list = json_object_get(j, "ids"), *top = json_object_get(j, "top"),
           *t;
    uint32_t n = (uint32_t)json_array_size(list), ids[1024];
    kvf_error err;
    kvf_stream *stream;
    kvf_model *m;
    forward_rig r;
    for (uint32_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    cr_assert(kvf_stream_create_cpu(NULL, 0, &stream, &err) == KVF_OK);
    kvf_model_config config = {.struct_size = sizeof config};
    cr_assert(kvf_model_open(path, &config, &m, &err) == KVF_OK, "%s", err.text);
    rig_open(&r, m, KVF_F32, 2, 0, 30 * 10, 128, 160);
    float *logits = rig_floats((size_t)n * r.info->n_vocab);
    rig_run_all(&r, ids, n, 100, 4, KVF_CPU_AUTO, logits);
    size_t at, k, n_checked = 0;
    json_array_foreach(top, at, t) {
        size_t position = (size_t)json_integer_value(json_object_get(t, "position"));
        json_t *top_ids = json_object_get(t, "ids"), *values = json_object_get(t, "logits");
        for (k = 0; k < json_array_size(top_ids); k++, n_checked++) {
            size_t id = (size_t)json_integer_value(json_array_get(top_ids, k));
            double have = logits[position * r.info->n_vocab + id], want = json_number_value(json_array_get(values, k));
            cr_assert(fabs(have - want) < 2e-2, "position %zu, id %zu: %g, listed %g", position, id, have, want);
        }
    }
    cr_assert_eq(n_checked, 48u);
    cr_assert_eq(json_array_size(json_object_get(j, "nll")), n - 1);
    check_nll(json_object_get(j, "nll"), ids, logits, r.info->n_vocab);
    rig_close(&r);
    kvf_model_close(m);
    kvf_stream_destroy(stream);
    json_decref(j);
    free(logits);
}

/* ---- Activations in 8 bits ------------------------------------------------------------------------- */

/* As run_all: n tokens, in a chunk of n_first and single ones, and the logits of all. */
static void run_fast(const kvf_model *m, const uint32_t *ids, uint32_t n, uint32_t n_first, int fast, kvf_cpu_path path,
                     float *logits) {
    forward_rig r;
    size_t n_vocab = kvf_model_get_info(m)->n_vocab, n_layers = kvf_model_get_info(m)->n_layers;
    rig_open(&r, m, KVF_F32, 2, 0, (uint32_t)n_layers * ((n + 15) / 16), n, n + 16);
    for (uint32_t at = 0, now = n_first; at < n; at += now, now = 1) {
        uint32_t row, which = 0, *rows = malloc(now * sizeof *rows);
        kvf_forward f = rig_append(&r, &which, &now, 1, at > 0, ids + at, &row, logits + at * n_vocab);
        for (uint32_t i = 0; i < now; i++) rows[i] = i;
        f.out_rows = rows;
        f.n_out = now;
        f.path = path;
        f.fast_activations = fast;
        f.deterministic = 1;
        cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_OK, "%s", r.err.text);
        free(rows);
    }
    rig_close(&r);
}

/* Off by something, by no more than what is said, and for weights of other types by nothing. */
Test(forward_logits, activations_in_8_bits_move_logits_of_tiny_models_within_a_bound) {
    static const struct {
        uint32_t type;
        double bound; /* logits are up to 10 */
    } kinds[] = {{GW_Q4_0, 0.8}, {GW_Q4_1, 0.8}, {GW_Q8_0, 0.8}, {GW_F32, 0}, {GW_Q5_0, 0}};
    uint32_t ids[TINY_TOKENS];
    size_t n = TINY_TOKENS * TINY_N_VOCAB;
    tiny_tokens(ids, TINY_TOKENS);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        struct tiny_model_params params = {.weight_type = kinds[i].type, .seed = 20 + (uint32_t)i};
        kvf_model *m = open_tiny(&params);
        float *want = rig_floats(n), *have = rig_floats(n);
        run_fast(m, ids, TINY_TOKENS, 20, 0, KVF_CPU_AUTO, want);
        run_fast(m, ids, TINY_TOKENS, 20, 1, KVF_CPU_AUTO, have);
        double worst = rig_worst_of(want, have, n);
        printf("type %u: 8 bits move logits by %g\n", kinds[i].type, worst);
        cr_assert(worst <= kinds[i].bound && (worst > 0) == (kinds[i].bound > 0), "type %u: %g", kinds[i].type, worst);
        run_fast(m, ids, TINY_TOKENS, 20, 1, KVF_CPU_SCALAR, want);
        cr_assert(rig_worst_of(want, have, n) <= kinds[i].bound + 1e-3, "in plain C");
        free(want);
        free(have);
        kvf_model_close(m);
    }
}

/* The bound that the option's help states. */
Test(forward_logits, activations_in_8_bits_move_logits_of_the_real_model_within_the_stated_bound) {
    const char *path = kvf_test_real_model();
    if (!path) cr_skip_test("SmolLM2-135M-Instruct is not in the cache (scripts/fetch_model.sh fetches it)");
    json_t *j = load_json("smollm2_logits.json"), *list = json_object_get(j, "ids");
    uint32_t n = (uint32_t)json_array_size(list), ids[1024];
    kvf_error err;
    kvf_model *m;
    for (uint32_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    kvf_model_config config = {.struct_size = sizeof config};
    cr_assert(kvf_model_open(path, &config, &m, &err) == KVF_OK, "%s", err.text);
    size_t n_vocab = kvf_model_get_info(m)->n_vocab;
    float *want = rig_floats(n * n_vocab), *have = rig_floats(n * n_vocab);
    run_fast(m, ids, n, n - 8, 0, KVF_CPU_AUTO, want);
    run_fast(m, ids, n, n - 8, 1, KVF_CPU_AUTO, have);
    double worst = rig_worst_of(want, have, n * n_vocab), squares = 0;
    for (size_t i = 0; i < n * n_vocab; i++) squares += pow((double)want[i] - (double)have[i], 2);
    squares = sqrt(squares / (double)(n * n_vocab));
    printf("8 bits move logits of %u tokens by up to %g, %g in the mean square\n", n, worst, squares);
    cr_assert(worst > 0 && worst <= 2.5 && squares <= 0.3, "off by %g, %g in the mean square", worst, squares);
    free(want);
    free(have);
    json_decref(j);
    kvf_model_close(m);
}
