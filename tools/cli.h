/* tools/cli.h: the commands and their options; how options become a model, an engine and a policy. */
#ifndef KVF_TOOLS_CLI_H
#define KVF_TOOLS_CLI_H

#include <jansson.h>

#include "kvfold/engine.h"
#include "tools/args.h"
#include "tools/text.h"

/* Exit codes; `kvfold help` lists them. */
enum {
    KVF__EXIT_OK = 0,
    KVF__EXIT_SOME_FAILED = 1, /* a line was bad, or a request ended with an error */
    KVF__EXIT_USAGE = 2,       /* nothing was run */
    KVF__EXIT_OUTPUT = 3,      /* an output could not be written */
    KVF__EXIT_ENGINE = 4,      /* the engine failed */
    KVF__EXIT_SIGNAL = 128     /* plus the signal's number */
};

enum { KVF__WORDS_MAX = 256 }; /* arguments that are no options, of any command */

/* The options of all commands: each uses the part its tables name. */
typedef struct kvf__cli {
    const char *words[KVF__WORDS_MAX];
    uint32_t n_words;
    const char *model, *input, *prompt, *output, *system, *chat_template, *compare, *compare_output, *stats;
    const char *probe; /* a file */
    uint32_t provides; /* what the engine has for policies, KVF_NEEDS_*; set when it is made */
    const char *policy, *preset, *kv_dtype, *ids, *file, *decode;
    kvf__arg_list given;          /* names of the options that were, with whatever value */
    kvf__arg_list policy_options; /* names and values as given */
    kvf__arg_list stop, served_names;
    uint32_t block_size, heads_per_group, chunk, threads, max_running, context, max_tokens, top_k, n_prompt;
    uint32_t n, best_of, beam_width; /* 0: not given */
    uint64_t kv_memory, snapshot_memory, host_memory, seed;
    double temperature, top_p; /* temperature below 0: not given */
    double length_penalty;
    const char *sync, *prefix_cache, *prefix_offload, *prefix_dir, *preempt, *order;
    int raw, special, plain, json, quiet, verbose, resume, force, any_model, deterministic, fast_activations;
    const char *report, *trace, *record, *metrics; /* occupancy: page, Chrome trace, request trace, figures */
    const char *densities, *arrivals;              /* kvfold profile, as are those below */
    uint32_t n_blocks, n_layers, n_kv_heads, n_q_heads, head_dim, limit, generate, prefix_groups, shared_tokens;
    kvf__arg_list texts, policies, dialogues; /* kvfold eval, as are those below; texts: one where it was --prompt */
    const char *contexts, *rhos, *seeds, *depths, *tasks, *placement, *tables;
    uint32_t scored, windows, offset, samples, batch;
    uint64_t eval_memory; /* most memory for K and V; 0: not given */
    double rate, burst, prompt_mean, prompt_sigma, output_mean, output_sigma, grouped, speed, step_ms, token_us;
    uint32_t prompts;                                                  /* kvfold calibrate */
    const char *html, *markdown, *baseline, *only, *except, *resample; /* kvfold eval report */
} kvf__cli;

/* options.c: the commands, ended by one without a name, and the defaults. */
extern const kvf__command kvf__commands[];
kvf__cli kvf__cli_default(void);
void kvf__options_init(void); /* takes the policy options from the library; before anything else */

/* The commands; each returns an exit code. */
int kvf__run_command(const void *cli);
int kvf__tokenize_command(const void *cli);
int kvf__info_command(const void *cli);
int kvf__profile_command(const void *cli);
int kvf__calibrate_command(const void *cli);
int kvf__eval_command(const void *cli); /* of eval/ */

/* ---- setup.c ---------------------------------------------------------------------------------------- */

/* Opens the model that the options name, or the default one; NULL after a message.
 * n_threads (may be NULL): how many threads there are. */
kvf_model *kvf__setup_model(const kvf__cli *cli, bool tokenizer_only, uint32_t *n_threads);

enum { KVF__PATH_BYTES = 4096 };

/* NAME in kvfold's folder of the user's cache; false where there is none. */
bool kvf__cache_path(const char *name, char path[KVF__PATH_BYTES]);
/* Makes the folders that a path lies in, where they are missing; what fails shows when the file is made. */
void kvf__cache_folder(const char *path);

/* ---- probe.c */

/* Where the probe of a model is kept; false where there is no cache. */
bool kvf__probe_path(uint64_t digest, char path[KVF__PATH_BYTES]);
/* Opens the model's probe if one of these policies needs it, or --probe names one; *probe NULL: not needed, or opened here.
 * False after a message. */
bool kvf__setup_probe(const kvf__cli *cli, const kvf_policy_options *policies, uint32_t n, kvf_probe **probe);
uint64_t kvf__probe_digest(const kvf_probe *probe); /* of its weights; 0: none */
/* Whether --probe names a probe, or the cache has one of the model. */
bool kvf__probe_exists(const kvf__cli *cli);

/* The path of the model that the options name, or the default one; false, without a message, if the default does not
 * exist. */
bool kvf__model_find(const kvf__cli *cli, char path[KVF__PATH_BYTES]);
/* The same, with a message. */
bool kvf__model_path(const kvf__cli *cli, char path[KVF__PATH_BYTES]);

/* Creates an engine for the model. any: lines may bring policy options of their own, so pages get room for whatever
 * any of them needs. NULL after a message. */
kvf_engine *kvf__setup_engine(const kvf__cli *cli, const kvf_model *model, const kvf_probe *probe,
                              const kvf_policy_options *policy, bool any);
/* One KV head to a table where the policy's budget is global, unless the options say how many. */
void kvf__setup_groups(kvf__cli *cli, const kvf_policy_options *policy);
/* The two halves of that, for who knows better how large it has to be. */
kvf_engine_config kvf__engine_config(const kvf__cli *cli, const kvf_model *model);
kvf_engine *kvf__engine_open(const kvf_engine_config *config);
/* What an engine has reserved, by part; the first is the sum. */
enum { KVF__MEMORY_PARTS = 9 };
typedef struct kvf__memory_part {
    const char *key, *label;
    uint64_t bytes;
} kvf__memory_part;
void kvf__setup_memory(const kvf_engine *engine, kvf__memory_part parts[KVF__MEMORY_PARTS]);
uint64_t kvf__setup_kv_bytes(kvf_engine *engine); /* of its pool, 0 for NULL */

/* "d2o" or "d2o:serving" in two; false when a part is too long. */
typedef struct kvf__policy_name {
    char policy[48], preset[48]; /* preset "": the policy's default */
} kvf__policy_name;
bool kvf__policy_name_read(const char *text, kvf__policy_name *name);

/* Gives a name without a preset the one that makes the most of what there is: fold's depends on whether the model has a probe. Looks
 * for the probe only if that matters; false if it has none, and would matter. */
bool kvf__policy_choose(const kvf__cli *cli, kvf__policy_name *name);
/* The same, and says what follows without a probe. */
void kvf__policy_choose_aloud(const kvf__cli *cli, kvf__policy_name *name);

/* The value of --policy, or its default: d2o if a policy option is given or if --compare full stands alone, else
 * full. Budgets (rho, ...) do not count if --compare names a policy that takes them. */
const char *kvf__policy_asked(const kvf__cli *cli);

/* The options of a policy. own: it is the policy of the command line, so all of its options apply. Otherwise only
 * those that say how much is kept (rho, budget_tokens, min_tokens), since the others were meant for another policy.
 * */
kvf_status kvf__policy_options(const kvf__cli *cli, const kvf__policy_name *name, bool own, kvf_policy_options *out,
                               kvf_error *err);

/* Whether an option says how much is kept. `full` keeps everything and takes none of these. */
bool kvf__policy_is_budget(const char *option);
bool kvf__policy_keeps_all(const kvf_policy_options *options);

/* Adds "rho" (null when budget_tokens stands in its place) and "budget_tokens" to an object. */
void kvf__policy_put(json_t *object, const kvf_policy_options *options);

/* Slots that each head group of each layer keeps, [layers][groups]; the prompt's in a layer that is never compressed. */
json_t *kvf__group_sizes_json(const kvf_result *result, uint32_t n_layers);

/* All of a file, NUL terminated; "-" is standard input. NULL after a message that names `option`. */
char *kvf__read_file(const char *path, const char *option, size_t *n_bytes);

/* Text to ids; NULL with err set. The caller frees. */
uint32_t *kvf__encode(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes, uint32_t flags, size_t *n_ids,
                      kvf_error *err);

/* A number for JSON: null when it is not finite. */
json_t *kvf__json_number(double value);

/* Text as JSON, broken bytes as U+FFFD. */
json_t *kvf__json_text(const char *text, size_t n_bytes);

/* Prints an object on stdout and frees it; false after a message when that failed. */
bool kvf__json_print(json_t *value);

/* Flushes stdout; false after a message when it could not be written. */
bool kvf__stdout_done(void);

/* ---- words.c: failures of the library in the command's words ----------------------------------------------- */

enum { KVF__WORDS_BYTES = 720 };

typedef enum kvf__naming {
    KVF__NAMES_OPTIONS, /* of the command line */
    KVF__NAMES_LINE     /* of a line of the input; what only options say is named by these */
} kvf__naming;

/* The message for a failure: it names the option or field as people know it, its value and what would do: "kv_bytes 1: ..." is
 * "--kv-memory 1: ... give at least --kv-memory 4MiB". Returns out. */
const char *kvf__words(kvf_status status, const kvf_error *err, kvf__naming names, char out[KVF__WORDS_BYTES]);

/* Prints it, with the names of options. */
void kvf__say_failed(kvf_status status, const kvf_error *err);

#endif
