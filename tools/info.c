/* kvfold info: the contents of a model file, and the size of its KV cache. */
#define _POSIX_C_SOURCE 200809L
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tools/cli.h"

static uint64_t kv_bytes_per_token(const kvf_model_info *m, kvf_dtype dtype) {
    return (uint64_t)2 * m->n_layers * m->n_kv_heads * m->head_dim * kvf_dtype_bytes(dtype);
}

static json_t *text_json(const char *text) { return kvf__json_text(text, strlen(text)); }
static json_t *count_json(uint64_t n) { return json_integer((json_int_t)n); }

static json_t *info_json(const kvf_model_info *m) {
    const struct {
        const char *name;
        json_t *value;
    } fields[] = {
        {"name", text_json(m->name)},
        {"architecture", text_json(m->architecture)},
        {"gguf_version", count_json(m->gguf_version)},
        {"file_bytes", count_json(m->file_bytes)},
        {"n_files", count_json(m->n_files)},
        {"n_params", count_json(m->n_params)},
        {"n_tensors", count_json(m->n_tensors)},
        {"weights", text_json(m->weights)},
        {"weight_bytes", m->weight_bytes ? count_json(m->weight_bytes) : json_null()},
        {"tied_output", json_boolean(m->tied_output)},
        {"n_layers", count_json(m->n_layers)},
        {"n_q_heads", count_json(m->n_q_heads)},
        {"n_kv_heads", count_json(m->n_kv_heads)},
        {"head_dim", count_json(m->head_dim)},
        {"n_embd", count_json(m->n_embd)},
        {"n_ff", count_json(m->n_ff)},
        {"n_context", count_json(m->n_context)},
        {"sliding_window", count_json(m->sliding_window)},
        {"n_window_layers", count_json(m->n_window_layers)},
        {"rope_base", kvf__json_number((double)m->rope_base)},
        {"norm_epsilon", kvf__json_number((double)m->norm_epsilon)},
        {"tokenizer", text_json(m->tokenizer)},
        {"pre_tokenizer", text_json(m->pre_tokenizer)},
        {"n_vocab", count_json(m->n_vocab)},
        {"kv_bytes_per_token_fp16", count_json(kv_bytes_per_token(m, KVF_F16))},
        {"kv_bytes_per_token_fp32", count_json(kv_bytes_per_token(m, KVF_F32))},
    };
    json_t *o = json_object();
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        json_object_set_new(o, fields[i].name, fields[i].value);
    return o;
}

static void row(const char *label, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void row(const char *label, const char *format, ...) {
    va_list list;
    va_start(list, format);
    printf("%-24s", label);
    vprintf(format, list);
    putchar('\n');
    va_end(list);
}

static void print_text(const kvf_model_info *m) {
    row("name", "%s", m->name[0] ? m->name : "-");
    row("architecture", "%s (GGUF version %u)", m->architecture, m->gguf_version);
    row("file", "%s, %u tensors: %s", kvf__show_bytes(m->file_bytes).text, m->n_tensors, m->weights);
    if (m->n_files > 1) row("parts", "%u", m->n_files);
    row("parameters", "%s", kvf__show_count(m->n_params).text);
    if (m->weight_bytes) row("beside the file", "%s", kvf__show_bytes(m->weight_bytes).text);
    row("layers", "%u, %u wide, feed-forward %u", m->n_layers, m->n_embd, m->n_ff);
    row("heads", "%u query and %u KV heads of %u", m->n_q_heads, m->n_kv_heads, m->head_dim);
    row("output head", "%s", m->tied_output ? "the embedding" : "its own");
    row("context", "%s tokens, RoPE base %g", kvf__show_count(m->n_context).text, (double)m->rope_base);
    if (m->sliding_window)
        row("sliding window", "%s tokens, in %u of %u layers", kvf__show_count(m->sliding_window).text,
            m->n_window_layers, m->n_layers);
    row("norm epsilon", "%g", (double)m->norm_epsilon);
    row("tokenizer", "%s, pre-tokenizer %s, %s tokens", m->tokenizer, m->pre_tokenizer[0] ? m->pre_tokenizer : "-",
        kvf__show_count(m->n_vocab).text);
    const kvf_dtype types[] = {KVF_F16, KVF_F32};
    for (int i = 0; i < 2; i++) {
        uint64_t bytes = kv_bytes_per_token(m, types[i]);
        row(i ? "KV cache, fp32" : "KV cache, fp16 or bf16", "%s a token, %s a full context",
            kvf__show_bytes(bytes).text, kvf__show_bytes(bytes * m->n_context).text);
    }
}

/* What kvfold run reserves of memory with these options; false where it could not run. */
static bool run_memory(const kvf__cli *cli, kvf__memory_part parts[KVF__MEMORY_PARTS]) {
    kvf__cli quiet = *cli;
    quiet.quiet = true;
    kvf_model *model = kvf__setup_model(&quiet, false, NULL);
    kvf_policy_options full;
    kvf_engine *engine = NULL;
    if (model && !kvf_policy_options_init(&full, sizeof full, "full", NULL, NULL))
        engine = kvf__setup_engine(&quiet, model, NULL, &full, true);
    if (engine) kvf__setup_memory(engine, parts);
    kvf_engine_destroy(engine);
    kvf_model_close(model);
    return engine != NULL;
}

int kvf__info_command(const void *options) {
    kvf__cli cli = *(const kvf__cli *)options;
    if (cli.n_words && cli.model) {
        kvf__say("info: give the model once: %s, or --model %s", kvf__shown(cli.words[0]).text,
                 kvf__shown(cli.model).text);
        return KVF__EXIT_USAGE;
    }
    if (cli.n_words) cli.model = cli.words[0];
    kvf_model *model = kvf__setup_model(&cli, true, NULL);
    if (!model) return KVF__EXIT_USAGE;
    const kvf_model_info *info = kvf_model_get_info(model);
    kvf__memory_part parts[KVF__MEMORY_PARTS];
    bool written, runs = run_memory(&cli, parts); /* else after a message */
    if (cli.json) {
        json_t *o = info_json(info), *memory = json_object();
        for (int i = 0; i < KVF__MEMORY_PARTS && runs; i++)
            json_object_set_new(memory, parts[i].key, count_json(parts[i].bytes));
        json_object_set_new(o, "run_memory_bytes", runs ? memory : json_null());
        if (!runs) json_decref(memory);
        written = kvf__json_print(o);
    } else {
        print_text(info);
        if (runs) row("a run reserves up to", "%s", kvf__show_bytes(parts[0].bytes).text);
        for (int i = 1; i < KVF__MEMORY_PARTS && runs; i++)
            if (parts[i].bytes) printf("  %-22s%s\n", parts[i].label, kvf__show_bytes(parts[i].bytes).text);
        written = kvf__stdout_done();
    }
    kvf_model_close(model);
    return written ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
}
