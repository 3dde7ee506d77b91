/* Every public function of libkvfold_engine with wrong arguments: tests/calls.h. */
#define _GNU_SOURCE
#include "tests/calls.h"

#include <unistd.h>

#include "tests/forward_rig.h"

#include "tests/engine_model.h"

enum { IDS = 64 };

static struct {
    kvf_error err;
    kvf_engine_config config;
    kvf_engine *engine, *new_engine;
    kvf_generate generate;
    kvf_request open, runs, new_request;
    uint32_t prompt[24], ids[IDS], n, n2;
    kvf_turn turn;
    kvf_engine_stats stats;
    kvf_engine_memory memory;
    const kvf_policy_state *policies;
    kvf_prompt_file file, missing;
    char path[256], model_path[256], text[256];
    kvf_policy_options options;
    int more;
    kvf_model_config model_config;
    kvf_model *new_model;
    kvf_activations *activations, *new_activations;
    const kvf_tokenizer *words;
    size_t bytes;
    kvf_message messages[1];
    kvf_sampling sampling;
    float logits[8];
    double logprob;
    _Alignas(8) unsigned char scratch[64];
    kvf_runner runner;
    kvf_runner_null_config null_config;
    kvf_probe_data probe_data;
    kvf_probe *probe, *new_probe;
} w;

static forward_rig rig;
static float logits[4096];
static uint32_t out_rows[RIG_SEQS];
static kvf_forward forward;

#define NEED(call_) cr_assert_eq((call_), KVF_OK, "%s: %s", #call_, w.err.text)

static void on_finish(void *user, const kvf_result *result) { (void)user, (void)result; }

static void begin(void) {
    memset(&w, 0, sizeof w);
    open_model();
    w.config = model_config(64, 4);
    w.config.n_threads = 1;
    w.config.prefix_cache = 1;
    NEED(kvf_engine_create(&w.config, &w.engine, &w.err));
    random_prompt(w.prompt, 24, 5);
    w.options = options_of("h2o rho=0.5 min_tokens=16");
    w.generate = (kvf_generate){.struct_size = sizeof w.generate,
                                .tokens = w.prompt,
                                .n_tokens = 24,
                                .max_tokens = 1,
                                .policy = &w.options,
                                .on_finish = on_finish,
                                .ignore_end = 1,
                                .keep_open = 1};
    NEED(kvf_engine_submit(w.engine, &w.generate, &w.open, &w.err));
    while (w.more || !w.n++) NEED(kvf_engine_step(w.engine, &w.more, &w.err));
    w.generate.keep_open = 0;
    w.generate.max_tokens = 8;
    NEED(kvf_engine_submit(w.engine, &w.generate, &w.runs, &w.err));
    for (int i = 0; i < 2; i++) NEED(kvf_engine_step(w.engine, &w.more, &w.err));
    w.turn = (kvf_turn){.struct_size = sizeof w.turn, .tokens = w.prompt, .n_tokens = 4, .max_tokens = 2};
    w.stats.struct_size = sizeof w.stats;
    w.memory.struct_size = sizeof w.memory;
    w.runner.struct_size = sizeof w.runner;
    w.null_config.struct_size = sizeof w.null_config;
    gw_temp_path(w.path, sizeof w.path);
    w.file = (kvf_prompt_file){.struct_size = sizeof w.file, .path = w.path, .identity = "m", .identity_bytes = 1};
    w.model_config = (kvf_model_config){.struct_size = sizeof w.model_config};
    NEED(kvf_activations_create(model, 8, 2, 64, 1, &w.activations, &w.err));
    static const float number = 1;
    w.probe_data = (kvf_probe_data){.struct_size = sizeof w.probe_data, .n_layers = 1, .n_kv_heads = 1, .n_embd = 1};
    w.probe_data.weight = w.probe_data.bias = &number;
    NEED(kvf_probe_create(&w.probe_data, NULL, &w.probe, &w.err));
    w.words = kvf_model_tokenizer(model);
    w.messages[0] = (kvf_message){"user", "hi", 2};
    w.sampling.temperature = 1;
    memset(&rig, 0, sizeof rig);
    rig_open(&rig, model, KVF_F32, 1, 2, 16, 8, 64);
    forward = rig_append(&rig, (const uint32_t[]){0}, (const uint32_t[]){4}, 1, 0, w.prompt, out_rows, logits);
}

static void end(void) {
    rig_close(&rig);
    kvf_runner_destroy(&w.runner);
    kvf_engine_destroy(w.engine);
    kvf_engine_destroy(w.new_engine);
    kvf_activations_destroy(w.activations);
    kvf_activations_destroy(w.new_activations);
    kvf_model_close(w.new_model);
    kvf_probe_close(w.probe);
    kvf_probe_close(w.new_probe);
    kvf_model_close(model);
    model = NULL;
    unlink(w.path);
    if (*w.model_path) unlink(w.model_path);
}

static const char *text_of(char of) {
    (void)of;
    return NULL;
}

static kvf_engine *taken_engine(void) {
    kvf_engine *e = w.engine;
    w.engine = NULL;
    return e;
}
static kvf_activations *taken_activations(void) {
    kvf_activations *a = w.activations;
    w.activations = NULL;
    return a;
}
static const kvf_repetition *repeated(void) {
    static float largest[64 * 64];
    static kvf_repetition r;
    r = (kvf_repetition){.struct_size = sizeof r, .view = &rig.view, .pages = &rig.pages, .end = 4, .prompt_stride = 4};
    r.prompt_max = largest;
    return &r;
}
static const char *model_file(void) {
    gw_temp_path(w.model_path, sizeof w.model_path);
    cr_assert_eq(kvf_test_write_tiny_model(w.model_path, &(struct tiny_model_params){.n_layers = 1, .seed = 3}), 0);
    return w.model_path;
}
static kvf_probe *taken_probe(void) {
    kvf_probe *p = w.probe;
    w.probe = NULL;
    return p;
}
static const char *saved_probe(void) {
    NEED(kvf_probe_save(w.probe, w.path, &w.err));
    return w.path;
}
static const kvf_prompt_file *saved(void) {
    NEED(kvf_engine_prompt_save(w.engine, &w.file, w.prompt, 24, &w.n, &w.err));
    return &w.file;
}

/* clang-format off */
#define CALLS(S, V) \
    S('n', kvf_runner_create_cpu, "iooie", model, NULL, NULL, &w.runner, &w.err) \
    S('n', kvf_runner_create_null, "iie", &w.null_config, &w.runner, &w.err) \
    V(kvf_runner_null_wait, "aa", &w.runner, 1.0) \
    V(kvf_runner_destroy, "a", &w.runner) \
    V(kvf_engine_config_init, "a-", &w.config, sizeof w.config) \
    S('n', kvf_engine_create, "iie", &w.config, &w.new_engine, &w.err) \
    V(kvf_engine_destroy, "a", taken_engine()) \
    S('n', kvf_engine_submit, "iioe", w.engine, &w.generate, &w.new_request, &w.err) \
    S('n', kvf_engine_extend, "ifie", w.engine, w.open, &w.turn, &w.err) \
    S('n', kvf_engine_step, "ioe", w.engine, &w.more, &w.err) \
    S('n', kvf_engine_set_budget, "ifffe", w.engine, w.runs, 0.4, 0u, &w.err) \
    S('n', kvf_engine_set_budget_bytes, "ifae", w.engine, w.runs, UINT64_C(65536), &w.err) \
    S('n', kvf_engine_abort, "if", w.engine, w.runs) \
    S('n', kvf_engine_abort_sample, "iff", w.engine, w.runs, 0u) \
    S('n', kvf_engine_get_stats, "ii", w.engine, &w.stats) \
    S('n', kvf_engine_get_memory, "ii", w.engine, &w.memory) \
    S('n', kvf_engine_positions, "iffff-i", w.engine, w.runs, 0u, 0u, w.ids, (uint32_t)IDS, &w.n) \
    V(kvf_engine_manager, "aa", w.engine, &w.policies) \
    V(kvf_engine_seq_index, "aaa", w.engine, w.runs, 0u) \
    S('n', kvf_engine_prompt_save, "iii-oe", w.engine, &w.file, w.prompt, 24u, &w.n, &w.err) \
    S('n', kvf_engine_prompt_load, "iioe", w.engine, saved(), &w.n, &w.err) \
    S('n', kvf_model_open, "ioie", model_file(), &w.model_config, &w.new_model, &w.err) \
    S('n', kvf_probe_create, "ioie", &w.probe_data, NULL, &w.new_probe, &w.err) \
    S('n', kvf_probe_save, "iie", w.probe, (const char *)w.path, &w.err) \
    S('n', kvf_probe_open, "ioie", saved_probe(), NULL, &w.new_probe, &w.err) \
    S('n', kvf_probe_get, "ii", w.probe, &w.probe_data) \
    V(kvf_probe_close, "a", taken_probe()) \
    V(kvf_model_close, "a", w.new_model) \
    V(kvf_model_get_info, "a", model) \
    V(kvf_model_layer_window, "aa", model, 0u) \
    V(kvf_model_tokenizer, "a", model) \
    S('n', kvf_activations_create, "iffffie", model, 8u, 2u, 64u, 1u, &w.new_activations, &w.err) \
    V(kvf_activations_destroy, "a", taken_activations()) \
    S('n', kvf_model_forward, "iioie", model, rig.activations, rig.stream, &forward, &w.err) \
    S('n', kvf_model_score, "iioie", model, rig.activations, rig.stream, repeated(), &w.err) \
    S('n', kvf_tokenizer_encode, "iifoioie", w.words, (const char *)w.text, (size_t)3, 0u, w.ids, (size_t)IDS, &w.bytes, &w.err) \
    V(kvf_tokenizer_max_ids, "aa", w.words, (size_t)3) \
    V(kvf_tokenizer_min_ids, "aa-", w.words, (const char *)w.text, (size_t)3) \
    V(kvf_tokenizer_piece, "aaaa-", w.words, 40u, 0, w.text, sizeof w.text) \
    V(kvf_tokenizer_decode, "aa-aa-", w.words, w.prompt, (size_t)24, 0, w.text, sizeof w.text) \
    V(kvf_tokenizer_find, "aa", w.words, "a") \
    V(kvf_tokenizer_is_end, "aa", w.words, 3u) \
    V(kvf_tokenizer_n_vocab, "a", w.words) \
    S('n', kvf_chat_render, "ioi-i-ie", w.words, "none", w.messages, 1u, w.text, sizeof w.text, &w.bytes, &w.err) \
    S('n', kvf_chat_encode, "ioi-i-ie", w.words, "none", w.messages, 1u, w.ids, (size_t)IDS, &w.bytes, &w.err) \
    V(kvf_sample, "aaa-aa", &w.sampling, UINT64_C(1), w.logits, 8u, (void *)w.scratch, &w.logprob)
/* clang-format on */
CALLS(S_RUN, V_RUN)
static const call calls[] = {CALLS(S_CALL, V_CALL)};

static const world_of_calls the_world = {begin, end, text_of, &w.err};

Test(calls_engine, r12_every_function_takes_wrong_arguments) {
    uint32_t n = try_calls(&the_world, calls, sizeof calls / sizeof *calls);
    cr_expect_gt(n, 90);
}
