/* kvfold eval nll --prompt N: one text and one policy, reported at once. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "eval/eval.h"
#include "tools/fields.h"
#include "tools/report.h"

typedef struct score { /* what on_finish leaves */
    const kvf__cli *cli;
    const kvf_policy_options *policy;
    const char *preset;
    uint32_t n_layers;
    bool done;
    json_t *json; /* the answer */
    char error[KVF__WORDS_BYTES];
    double mean, full_mean; /* full: with the full cache, where that found room */
    bool has_full;
    uint32_t n_tokens, n_prompt;
    uint64_t held_tokens, full_tokens;
    double *blocks; /* [n_layers] */
    double full_blocks;
    uint64_t merged, dropped;
} score;

/* ---- Tokens ------------------------------------------------------------------------------------------------ */

static uint32_t *ids_from_json(const char *text, size_t n_bytes, uint32_t n_vocab, size_t *n) {
    json_error_t error;
    json_t *root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        kvf__say("--ids: not JSON: %s (line %d, column %d)", error.text, error.line, error.column);
        return NULL;
    }
    const json_t *list = json_is_object(root) ? json_object_get(root, "token_ids") : root;
    if (!list) list = json_object_get(root, "ids");
    *n = json_array_size(list);
    uint32_t *ids = *n ? malloc(*n * sizeof *ids) : NULL;
    if (!ids)
        kvf__say("--ids: must be a list of ids, or an object with a list `token_ids` or `ids`, of at least one id");
    for (size_t i = 0; ids && i < *n; i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = -1;
        if (kvf__field_whole(id, &value) && value >= 0 && value < (json_int_t)n_vocab) {
            ids[i] = (uint32_t)value;
            continue;
        }
        char *shown = json_dumps(id, JSON_ENCODE_ANY | JSON_COMPACT);
        kvf__say("--ids: entry %zu, %s: must be a whole number from 0 to %u", i, kvf__shown(shown ? shown : "").text,
                 n_vocab - 1);
        free(shown);
        free(ids);
        ids = NULL;
    }
    json_decref(root);
    return ids;
}

static const char *one_text(const kvf__cli *cli) { return cli->texts.n ? cli->texts.values[0] : NULL; }

static uint32_t *read_tokens(const kvf__cli *cli, const kvf_tokenizer *tokenizer, size_t *n) {
    size_t n_bytes;
    const char *option = cli->ids ? "ids" : "text";
    char *text = kvf__read_file(cli->ids ? cli->ids : one_text(cli), option, &n_bytes);
    if (!text) return NULL;
    uint32_t *ids = NULL;
    size_t valid = kvf__utf8_valid(text, n_bytes);
    kvf_error err = {.text = ""};
    if (valid < n_bytes) {
        kvf__say("--%s %s: byte %zu (0x%02x) is not UTF-8", option,
                 kvf__shown(cli->ids ? cli->ids : one_text(cli)).text, valid + 1, (unsigned char)text[valid]);
    } else if (cli->ids) {
        ids = ids_from_json(text, n_bytes, kvf_tokenizer_n_vocab(tokenizer), n);
    } else if (!(ids = kvf__encode(tokenizer, text, n_bytes, KVF_ENCODE_BOS, n, &err))) {
        kvf__say("--text: %s", err.text);
    }
    free(text);
    return ids;
}

/* ---- Scores ------------------------------------------------------------------------------------------------- */

static bool never_evicts(const kvf_policy_options *o) { return !kvf_policy_evicts(o); }

/* sizes: slots a layer keeps when it is compressed, the prompt's in one that never is; null while that is not known. */
static void add_layers(score *s, const kvf_result *r) {
    json_t *sizes = json_array(), *density = json_array(), *blocks = json_array();
    for (uint32_t l = 0; l < s->n_layers; l++) {
        s->blocks[l] = r->layers[l].n_blocks;
        json_array_append_new(blocks, json_integer(r->layers[l].n_blocks));
        bool whole = !r->sizes || r->sizes[l].keep == UINT32_MAX;
        json_array_append_new(sizes, json_integer(whole ? r->n_prompt : r->sizes[l].keep));
        if (r->density) json_array_append_new(density, kvf__json_number(r->density[l]));
    }
    bool known = r->sizes || never_evicts(s->policy);
    json_object_set_new(s->json, "sizes", known ? sizes : json_null());
    if (r->group_sizes) json_object_set_new(s->json, "group_sizes", kvf__group_sizes_json(r, s->n_layers));
    json_object_set_new(s->json, "density", r->density ? density : json_null());
    if (!known) json_decref(sizes);
    if (!r->density) json_decref(density);
    json_object_set_new(s->json, "blocks", blocks);
}

static void on_finish(void *user, const kvf_result *r) {
    score *s = user;
    s->done = true;
    if (r->finish == KVF_FINISH_ERROR || r->finish == KVF_FINISH_ABORTED) {
        if (r->detail)
            (void)kvf__words(KVF_OK, r->detail, KVF__NAMES_OPTIONS, s->error);
        else
            snprintf(s->error, sizeof s->error, "ended early");
        return;
    }
    json_t *nll = json_array();
    double sum = 0;
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        sum -= r->logprobs[i];
        json_array_append_new(nll, kvf__json_number(-r->logprobs[i]));
    }
    s->n_tokens = r->n_tokens;
    s->n_prompt = r->n_prompt;
    s->mean = r->n_tokens ? sum / r->n_tokens : 0;
    s->held_tokens = r->held_tokens;
    s->full_tokens = r->full_tokens;
    s->merged = r->merged;
    s->dropped = r->dropped;
    uint32_t groups =
        s->cli->heads_per_group ? (uint32_t)(r->full_tokens / s->n_layers / (r->n_prompt + r->n_tokens - 1)) : 1;
    s->full_blocks = ceil((double)r->full_tokens / s->n_layers / groups / s->cli->block_size) * groups;
    kvf__policy_put(s->json, s->policy);
    json_object_set_new(s->json, "prompt_tokens", json_integer(r->n_prompt));
    json_object_set_new(s->json, "scored_tokens", json_integer(r->n_tokens));
    json_object_set_new(s->json, "mean_nll", kvf__json_number(s->mean));
    json_object_set_new(s->json, "perplexity", kvf__json_number(exp(s->mean)));
    json_object_set_new(s->json, "held_tokens", json_integer((json_int_t)r->held_tokens));
    json_object_set_new(s->json, "full_tokens", json_integer((json_int_t)r->full_tokens));
    json_object_set_new(s->json, "kept", json_integer((json_int_t)r->kept));
    json_object_set_new(s->json, "merged", json_integer((json_int_t)r->merged));
    json_object_set_new(s->json, "dropped", json_integer((json_int_t)r->dropped));
    add_layers(s, r);
    json_object_set_new(s->json, "nll", nll);
}

/* Runs it to its end; `why` says what went wrong in the engine, and is "" where nothing did. */
static void run_request(kvf_engine *engine, kvf_generate *g, char why[KVF__WORDS_BYTES]) {
    kvf_error err = {.text = ""};
    int more = 1;
    kvf_status st = kvf_engine_submit(engine, g, NULL, &err);
    while (!st && more) st = kvf_engine_step(engine, &more, &err);
    if (st) (void)kvf__words(st, &err, KVF__NAMES_OPTIONS, why);
}

static void on_full_finish(void *user, const kvf_result *r) {
    score *s = user;
    double sum = 0;
    for (uint32_t i = 0; i < r->n_tokens; i++) sum -= r->logprobs[i];
    s->has_full = r->finish != KVF_FINISH_ERROR && r->n_tokens == s->n_tokens;
    s->full_mean = r->n_tokens ? sum / r->n_tokens : 0;
}

/* The same tokens with the full cache, which may find no room; what never evicts is that itself. */
static void run_full(kvf_engine *engine, kvf_generate g, score *s) {
    kvf_policy_options full;
    char why[KVF__WORDS_BYTES] = "";
    s->full_mean = s->mean;
    s->has_full = never_evicts(s->policy);
    if (s->has_full || kvf_policy_options_init(&full, sizeof full, "full", NULL, NULL)) return;
    g.policy = &full;
    g.on_finish = on_full_finish;
    run_request(engine, &g, why);
}

static bool run_engine(const kvf__cli *cli, const kvf_model *model, const uint32_t *ids, uint32_t n_scored, score *s) {
    kvf_probe *probe = NULL;
    kvf_engine *engine =
        kvf__setup_probe(cli, s->policy, 1, &probe) ? kvf__setup_engine(cli, model, probe, s->policy, false) : NULL;
    if (!engine) {
        kvf_probe_close(probe);
        return false;
    }
    kvf_generate g = {.struct_size = sizeof g, .tokens = ids, .n_tokens = cli->n_prompt, .max_tokens = n_scored};
    g.forced = ids + cli->n_prompt;
    g.ignore_end = 1;
    g.policy = s->policy;
    g.user = s;
    g.on_finish = on_finish;
    char words[KVF__WORDS_BYTES] = "";
    run_request(engine, &g, words);
    if (!words[0]) snprintf(words, sizeof words, "%s", s->error);
    bool good = !words[0] && s->n_tokens == n_scored;
    if (good) run_full(engine, g, s);
    kvf_engine_destroy(engine);
    kvf_probe_close(probe);
    if (words[0])
        kvf__say("eval: %s", words);
    else if (!good)
        kvf__say("eval: only %u of %u tokens fit the context and the KV memory; score fewer with --max-tokens",
                 s->n_tokens, n_scored);
    return good;
}

/* Beside the policy's own figures in JSON: null where the full cache found no room. */
static void add_full(const score *s) {
    json_t *full = json_null();
    if (s->has_full)
        full = json_pack("{s:o, s:o}", "mean_nll", kvf__json_number(s->full_mean), "perplexity",
                         kvf__json_number(exp(s->full_mean)));
    json_object_set_new(s->json, "full", full);
    json_object_set_new(s->json, "nll_difference",
                        s->has_full ? kvf__json_number(s->mean - s->full_mean) : json_null());
}

static bool print_score(const kvf__cli *cli, score *s) {
    if (cli->json) {
        add_full(s);
        json_t *json = s->json;
        s->json = NULL;
        return kvf__json_print(json);
    }
    char label[112];
    kvf__policy_label(s->policy, s->preset, label, sizeof label);
    printf("policy            %s\n", label);
    printf("prompt            %s tokens\n", kvf__show_count(s->n_prompt).text);
    printf("scored            %s tokens\n", kvf__show_count(s->n_tokens).text);
    printf("mean NLL          %.4f nats a token\n", s->mean);
    bool other = !never_evicts(s->policy);
    if (other && s->has_full)
        printf("  full cache      %.4f (the difference is %+.4f)\n", s->full_mean, s->mean - s->full_mean);
    else if (other)
        printf("  full cache      -: it finds no room in --kv-memory\n");
    printf("perplexity        %.3f\n", exp(s->mean));
    if (other && s->has_full) printf("  full cache      %.3f\n", exp(s->full_mean));
    double share = s->full_tokens ? (double)s->held_tokens / (double)s->full_tokens : 1;
    printf("tokens held       %s of %s (%.1f%%), over the layers\n", kvf__show_count(s->held_tokens).text,
           kvf__show_count(s->full_tokens).text, share * 100);
    printf("merged, dropped   %s, %s over layers and KV heads\n", kvf__show_count(s->merged).text,
           kvf__show_count(s->dropped).text);
    bool written = kvf__stdout_done();
    if (!cli->quiet) kvf__chart(s->blocks, s->n_layers, s->full_blocks);
    return written;
}

/* ---- The command ---------------------------------------------------------------------------------------------- */

static bool check_usage(const kvf__cli *cli, kvf__policy_name *name, kvf_policy_options *policy) {
    kvf_error err = {.text = ""};
    if (!cli->ids == !one_text(cli) || cli->texts.n > 1) {
        kvf__say("eval nll --prompt: give one of --ids FILE and --text FILE");
    } else if (!cli->n_prompt) {
        kvf__say("eval nll: give --prompt N with --ids: how many tokens are the prompt; those after it are scored");
    } else if (!kvf__policy_name_read(cli->policy ? cli->policy : "d2o", name)) {
        kvf__say("--policy %s: there is no policy of that name", kvf__shown(cli->policy).text);
    } else {
        if (cli->preset) snprintf(name->preset, sizeof name->preset, "%s", cli->preset);
        kvf__policy_choose_aloud(cli, name);
        kvf_status st = kvf__policy_options(cli, name, true, policy, &err);
        if (!st) return true;
        kvf__say_failed(st, &err);
    }
    return false;
}

static int score_tokens(const kvf__cli *cli, kvf_model *model, const kvf_policy_options *policy, const char *preset) {
    size_t n;
    uint32_t *ids = read_tokens(cli, kvf_model_tokenizer(model), &n);
    if (!ids) return KVF__EXIT_USAGE;
    int code = KVF__EXIT_USAGE;
    score s = {.cli = cli, .policy = policy, .preset = preset, .json = json_object()};
    s.n_layers = kvf_model_get_info(model)->n_layers;
    s.blocks = calloc(s.n_layers, sizeof *s.blocks);
    if (n <= cli->n_prompt || n > UINT32_MAX) {
        kvf__say("--prompt %u: there are %zu tokens, so at most %zu can be the prompt", cli->n_prompt, n,
                 n ? n - 1 : 0);
    } else if (s.blocks && s.json) {
        uint32_t n_scored = (uint32_t)n - cli->n_prompt;
        if (cli->max_tokens && cli->max_tokens < n_scored) n_scored = cli->max_tokens;
        code = KVF__EXIT_SOME_FAILED;
        if (run_engine(cli, model, ids, n_scored, &s)) code = print_score(cli, &s) ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
    }
    json_decref(s.json);
    free(s.blocks);
    free(ids);
    return code;
}

int kvf__eval_single(const kvf__cli *given) {
    kvf__cli sized = *given;
    const kvf__cli *cli = &sized;
    if (given->eval_memory) sized.kv_memory = given->eval_memory;
    kvf__policy_name name;
    kvf_policy_options policy;
    if (!check_usage(cli, &name, &policy)) return KVF__EXIT_USAGE;
    kvf__setup_groups(&sized, &policy);
    kvf_model *model = kvf__setup_model(cli, false, NULL);
    if (!model) return KVF__EXIT_USAGE;
    int code = score_tokens(cli, model, &policy, name.preset);
    kvf_model_close(model);
    return code;
}
