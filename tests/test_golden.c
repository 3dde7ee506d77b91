/* The real model against an independent reader's numbers: greedy answers, and prompts compressed by each policy. */
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>

#include "d2o_policy/policy.h"
#include "kvfold/engine.h"
#include "tests/real_model.h"

static kvf_model *model;
static json_t *golden;

static void open_all(void) {
    json_error_t error;
    golden = json_load_file(KVF_TEST_DATA "/smollm2_compress.json", 0, &error);
    cr_assert(golden, "%s", error.text);
    const char *path = kvf_test_real_model();
    if (!path) return;
    kvf_error err = {.text = ""};
    kvf_model_config config = {.struct_size = sizeof config};
    cr_assert_eq(kvf_model_open(path, &config, &model, &err), KVF_OK, "%s", err.text);
}

static void close_all(void) {
    kvf_model_close(model);
    json_decref(golden);
}

TestSuite(golden, .init = open_all, .fini = close_all);

static uint32_t *ids_of(const json_t *list, uint32_t *n) {
    *n = (uint32_t)json_array_size(list);
    uint32_t *ids = calloc(*n + 1u, sizeof *ids);
    for (uint32_t i = 0; i < *n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return ids;
}

static kvf_engine *engine_of(uint32_t chunk) {
    kvf_engine_config c;
    kvf_engine_config_init(&c, sizeof c);
    kvf_engine *engine = NULL;
    kvf_error err = {.text = ""};
    c.model = model;
    c.kv_dtype = KVF_F32;
    c.chunk = chunk;
    c.kv_bytes = (uint64_t)256 << 20;
    c.max_running = 4;
    c.max_context = 2048;
    cr_assert_eq(kvf_engine_create(&c, &engine, &err), KVF_OK, "%s", err.text);
    return engine;
}

static void run(kvf_engine *engine) {
    kvf_error err = {.text = ""};
    for (int more = 1; more;) {
        cr_assert_eq(kvf_engine_step(engine, &more, &err), KVF_OK, "%s", err.text);
        cr_assert_eq(kvf_audit(kvf_engine_manager(engine, NULL), &err), KVF_OK, "%s", err.text);
    }
}

/* ---- Greedy answers ------------------------------------------------------------------------------------ */

static void greedy_done(void *user, const kvf_result *r) {
    const json_t *want = json_object_get(user, "ids"), *gap = json_object_get(user, "gap");
    const char *question = json_string_value(json_object_get(user, "user"));
    cr_assert_neq(r->finish, KVF_FINISH_ERROR, "%s", r->error);
    uint32_t n = 0;
    for (; n < json_array_size(want) && json_number_value(json_array_get(gap, n)) >= 0.02; n++) {
        cr_assert_lt(n, r->n_tokens, "%s: ends after %u tokens", question, r->n_tokens);
        cr_expect_eq(r->tokens[n], (uint32_t)json_integer_value(json_array_get(want, n)), "%s: token %u", question, n);
    }
    if (n == json_array_size(want)) {
        const char *text = json_string_value(json_object_get(user, "text"));
        cr_expect_eq(strncmp(r->text, text, strlen(text)), 0, "%s: %s", question, r->text);
    }
}

Test(golden, greedy_answers_equal_the_reference_up_to_the_first_near_tie) {
    if (!model) cr_skip_test("the model is not here: scripts/fetch_model.sh");
    kvf_engine *engine = engine_of(512);
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(golden, "greedy"), i, entry) {
        uint32_t n;
        uint32_t *ids = ids_of(json_object_get(entry, "prompt_ids"), &n);
        kvf_message message = {"user", json_string_value(json_object_get(entry, "user")), 0};
        message.content_bytes = strlen(message.content);
        uint32_t own[256];
        size_t n_own = 0;
        kvf_error err = {.text = ""};
        cr_assert_eq(kvf_chat_encode(kvf_model_tokenizer(model), "auto", &message, 1, own, 256, &n_own, &err), KVF_OK,
                     "%s", err.text);
        cr_expect(n_own == n && !memcmp(own, ids, n * sizeof *ids), "%s: the rendered prompt differs", message.content);
        kvf_generate g = {
            .struct_size = sizeof g, .tokens = ids, .n_tokens = n, .user = entry, .on_finish = greedy_done};
        g.max_tokens = (uint32_t)json_array_size(json_object_get(entry, "ids"));
        cr_assert_eq(kvf_engine_submit(engine, &g, NULL, &err), KVF_OK, "%s", err.text);
        free(ids);
    }
    run(engine);
    kvf_engine_destroy(engine);
}

/* ---- Compression runs ------------------------------------------------------------------------------------ */

struct compress_run {
    kvf_engine *engine;
    const json_t *golden;
    const char *options;
    double nll;
    uint32_t n;
    uint64_t kept_wanted, kept_equal;
    int done;
};

static uint64_t common(const uint32_t *a, uint32_t n, const json_t *b) {
    uint64_t equal = 0;
    size_t j = 0, m = json_array_size(b);
    for (uint32_t i = 0; i < n; i++) {
        while (j < m && (uint32_t)json_integer_value(json_array_get(b, j)) < a[i]) j++;
        equal += j < m && (uint32_t)json_integer_value(json_array_get(b, j)) == a[i];
    }
    return equal;
}

/* The first token is drawn just after the prompt's events: what is held then is what the prompt kept. */
static void compare_kept(struct compress_run *run, kvf_request request) {
    const json_t *kept = json_object_get(run->golden, "kept_after_prompt");
    const char *layer;
    json_t *heads, *want;
    json_object_foreach((json_t *)kept, layer, heads) {
        size_t h;
        json_array_foreach(heads, h, want) {
            uint32_t pos[2048], n = 0;
            cr_assert_eq(kvf_engine_positions(run->engine, request, (uint32_t)atoi(layer), (uint32_t)h, pos, 2048, &n),
                         KVF_OK);
            cr_expect_eq(n, json_array_size(want), "%s: layer %s head %zu holds %u", run->options, layer, h, n);
            run->kept_wanted += json_array_size(want);
            run->kept_equal += common(pos, n, want);
        }
    }
}

static void compress_token(void *user, kvf_request request, uint32_t token, double logprob) {
    struct compress_run *run = user;
    (void)token;
    if (run->n++ == 0) compare_kept(run, request);
    run->nll -= logprob;
}

static void compress_done(void *user, const kvf_result *r) {
    struct compress_run *run = user;
    const json_t *sizes = json_object_get(run->golden, "sizes"), *density = json_object_get(run->golden, "F");
    cr_assert_neq(r->finish, KVF_FINISH_ERROR, "%s", r->error);
    uint32_t n_layers = kvf_model_get_info(model)->n_layers;
    for (uint32_t l = 0; r->sizes && l < n_layers; l++) {
        uint32_t want = (uint32_t)json_integer_value(json_array_get(sizes, l));
        if (r->sizes[l].keep == UINT32_MAX) /* never compressed: the prompt and the tokens but the last */
            cr_expect_eq(want, r->n_prompt, "%s: layer %u is never compressed", run->options, l);
        else
            cr_expect_eq(r->sizes[l].keep, want, "%s: layer %u keeps %u, not %u", run->options, l, r->sizes[l].keep,
                         want);
    }
    if (density) {
        cr_assert(r->density, "%s: no density", run->options);
        for (uint32_t l = 0; l < n_layers; l++)
            cr_expect_float_eq(r->density[l], json_number_value(json_array_get(density, l)), 1e-4,
                               "%s: F of layer %u is %.6f", run->options, l, r->density[l]);
    }
    run->done = 1;
}

/* "--policy d2o --preset paper --rho 0.2" */
static kvf_policy_options parse_options(const char *text) {
    char words[512], *save = NULL, *name[32], *value[32];
    const char *policy = NULL, *preset = NULL;
    int n = 0;
    snprintf(words, sizeof words, "%s", text);
    for (char *w = strtok_r(words, " ", &save); w; w = strtok_r(NULL, " ", &save)) {
        char *v = strtok_r(NULL, " ", &save);
        cr_assert(v && !strncmp(w, "--", 2) && n < 32, "options: %s", text);
        if (!strcmp(w, "--policy"))
            policy = v;
        else if (!strcmp(w, "--preset"))
            preset = v;
        else
            name[n] = w + 2, value[n++] = v;
    }
    kvf_policy_options o;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_policy_options_init(&o, sizeof o, policy, preset, &err), KVF_OK, "%s", err.text);
    for (int i = 0; i < n; i++)
        cr_assert_eq(kvf_policy_option_set(&o, name[i], value[i], &err), KVF_OK, "%s", err.text);
    return o;
}

/* Every other one of the six runs: so much at a time takes a minute with sanitizers. */
static void compare_runs(size_t first) {
    if (!model) cr_skip_test("the model is not here: scripts/fetch_model.sh");
    const json_t *compress = json_object_get(golden, "compress"), *entry;
    uint32_t n, n_prompt = (uint32_t)json_integer_value(json_object_get(compress, "prompt"));
    uint32_t *ids = ids_of(json_object_get(compress, "ids"), &n);
    size_t i;
    json_array_foreach(json_object_get(compress, "runs"), i, entry) {
        if (i % 2 != first) continue;
        struct compress_run r = {.golden = entry, .options = json_string_value(json_object_get(entry, "options"))};
        kvf_policy_options options = parse_options(r.options);
        kvf_engine *engine = r.engine = engine_of(512);
        kvf_error err = {.text = ""};
        kvf_generate g = {.struct_size = sizeof g,
                          .tokens = ids,
                          .n_tokens = n_prompt,
                          .max_tokens = n - n_prompt,
                          .forced = ids + n_prompt,
                          .policy = &options,
                          .user = &r,
                          .on_token = compress_token,
                          .on_finish = compress_done};
        cr_assert_eq(kvf_engine_submit(engine, &g, NULL, &err), KVF_OK, "%s: %s", r.options, err.text);
        run(engine);
        const json_t *nll = json_object_get(entry, "nll");
        double want = 0;
        for (size_t t = 0; t < json_array_size(nll); t++) want += json_number_value(json_array_get(nll, t));
        cr_assert_eq(r.n, json_array_size(nll));
        cr_expect_float_eq(r.nll / r.n, want / r.n, 0.01, "%s: mean nll %.5f, not %.5f", r.options, r.nll / r.n,
                           want / r.n);
        cr_expect_geq((double)r.kept_equal, 0.99 * (double)r.kept_wanted, "%s: %llu of %llu kept positions equal",
                      r.options, (unsigned long long)r.kept_equal, (unsigned long long)r.kept_wanted);
        cr_log_info("%s: mean nll %.5f (%.5f), kept equal %llu of %llu\n", r.options, r.nll / r.n, want / r.n,
                    (unsigned long long)r.kept_equal, (unsigned long long)r.kept_wanted);
        cr_expect(r.done);
        kvf_engine_destroy(engine);
    }
    cr_expect_eq(i, 6);
    free(ids);
}

Test(golden, compressed_prompts_equal_the_reference) { compare_runs(0); }
Test(golden, compressed_prompts_equal_the_reference_too) { compare_runs(1); }

/* Sizes follow from F exactly; this needs no model. */
Test(golden, sizes_equal_those_of_the_listed_densities) {
    const json_t *compress = json_object_get(golden, "compress"), *entry;
    uint32_t n_prompt = (uint32_t)json_integer_value(json_object_get(compress, "prompt")), n_compared = 0;
    size_t i;
    json_array_foreach(json_object_get(compress, "runs"), i, entry) {
        const char *text = json_string_value(json_object_get(entry, "options"));
        const json_t *sizes = json_object_get(entry, "sizes"), *listed = json_object_get(entry, "F");
        uint32_t n_layers = (uint32_t)json_array_size(sizes);
        kvf_policy_options options = parse_options(text);
        if (kvf__policy_never_evicts(&options)) continue;
        kvf_policy_state_config c = {.struct_size = sizeof c,
                                     .n_layers = n_layers,
                                     .n_kv_heads = 1,
                                     .n_q_heads = 1,
                                     .head_dim = 8,
                                     .block_size = 16,
                                     .max_seqs = 1,
                                     .max_slots = 1024};
        kvf_policy_state *state = NULL;
        kvf_error err = {.text = ""};
        cr_assert_eq(kvf_policy_state_create(&c, &state, &err), KVF_OK, "%s", err.text);
        cr_assert_eq(kvf_policy_open(state, 0, &options, &err), KVF_OK, "%s", err.text);
        kvf__policy_seq *s = kvf__policy_seq_get(state, 0);
        double F[64] = {0};
        for (uint32_t l = 0; l < json_array_size(listed); l++) F[l] = json_number_value(json_array_get(listed, l));
        kvf__layer_weights(&options, F, n_layers, s->weights);
        s->n_prompt = n_prompt;
        s->budget = kvf__budget_tokens(&options, n_prompt);
        s->lo = s->budget < 16 ? s->budget : 16;
        s->budgeted = true;
        kvf__policy_size(state, s, true);
        for (uint32_t l = 0; l < n_layers; l++) {
            uint32_t keep = s->sizes[l].keep == UINT32_MAX ? n_prompt : s->sizes[l].keep;
            cr_expect_eq(keep, (uint32_t)json_integer_value(json_array_get(sizes, l)), "%s: layer %u keeps %u", text, l,
                         keep);
            n_compared++;
        }
        kvf_policy_state_destroy(state);
    }
    cr_expect_eq(n_compared, 5u * 30u);
}
