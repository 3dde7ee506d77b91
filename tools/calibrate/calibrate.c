/* kvfold calibrate: fits a probe to a model, says how much it explains, and writes it where `kvfold run` finds it. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/calibrate/machine.h"
#include "tools/calibrate/ridge.h"
#include "tools/calibrate/texts.h"
#include "tools/digest.h"
#include "tools/progress.h"

enum { HELD_OUT = 5 /* every fifth prompt */ };
static const double RIDGE = 1e-3;
static const float LEAST_SCORE = 1e-6f;
static const char INSTRUCTION[] = KVF_REPEAT_INSTRUCTION;
static const float rhos[] = {.02f, .05f, .1f, .15f, .2f, .25f, .3f, .4f, .5f, .6f, .7f, .8f, .9f, 1};
enum { N_RHOS = sizeof rhos / sizeof *rhos };

typedef struct job {
    const kvf__cli *cli;
    const kvf_model_info *info;
    kvf__calibration prompts;
    kvf__machine *machine;
    kvf__ridge *fit;
    kvf__progress progress;
    uint32_t n_tables;
    size_t n_scores;       /* of a prompt */
    float *states, *truth; /* truth: [prompts][n_tables][context] logarithms of the repetition's scores */
    float *guess;          /* same shape: the probe's */
    float *weight, *bias;
    float *explained, *shares, *most, *sorted;
    float thresholds[N_RHOS];
    double mean_explained;
    kvf_probe *probe;
} job;

static bool is_held_out(uint32_t prompt) { return prompt % HELD_OUT == HELD_OUT - 1; }

static void show(job *j, const char *what, uint32_t prompt) {
    char text[96];
    if (!kvf__progress_due(&j->progress)) return;
    snprintf(text, sizeof text, "%s: %u of %u prompts", what, prompt, j->prompts.n);
    kvf__progress_text(&j->progress, text);
}

/* ---- Memory ------------------------------------------------------------------------------------------- */

static bool take(job *j) {
    const kvf_model_info *m = j->info;
    uint32_t n = j->prompts.n, context = j->prompts.context;
    j->n_tables = m->n_layers * m->n_kv_heads;
    j->n_scores = (size_t)j->n_tables * context;
    j->states = malloc((size_t)m->n_layers * context * m->n_embd * sizeof *j->states);
    j->truth = malloc(n * j->n_scores * sizeof *j->truth);
    j->guess = malloc(n * j->n_scores * sizeof *j->guess);
    j->sorted = malloc(n * j->n_scores * sizeof *j->sorted);
    j->weight = malloc((size_t)j->n_tables * m->n_embd * sizeof *j->weight);
    j->bias = malloc(j->n_tables * sizeof *j->bias);
    j->explained = malloc(j->n_tables * sizeof *j->explained);
    j->shares = calloc((size_t)j->n_tables * N_RHOS, sizeof *j->shares);
    j->most = calloc((size_t)j->n_tables * N_RHOS, sizeof *j->most);
    if (j->states && j->truth && j->guess && j->sorted && j->weight && j->bias && j->explained && j->shares && j->most)
        return true;
    kvf__say("calibrate: out of memory for %u prompts of %u tokens", n, context);
    return false;
}

static void give_back(job *j) {
    void *all[] = {j->states, j->truth, j->guess, j->sorted, j->weight, j->bias, j->explained, j->shares, j->most};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    kvf__calibration_free(&j->prompts);
    kvf__machine_end(j->machine);
    kvf__ridge_end(j->fit);
    kvf_probe_close(j->probe);
}

static bool begin(job *j, const kvf_model *model, uint32_t n_threads) {
    uint32_t ids[32];
    size_t n_ids = 0;
    kvf_error err = {.text = ""};
    const kvf_tokenizer *tokenizer = kvf_model_tokenizer(model);
    j->info = kvf_model_get_info(model);
    if (kvf_tokenizer_encode(tokenizer, INSTRUCTION, strlen(INSTRUCTION), 0, ids, 32, &n_ids, &err)) {
        kvf__say("calibrate: %s", err.text);
        return false;
    }
    if (!kvf__calibration_make(j->cli, tokenizer, j->cli->prompts, j->cli->context ? j->cli->context : 1024,
                               &j->prompts))
        return false;
    if (!take(j)) return false;
    j->machine = kvf__machine_begin(model, n_threads, j->prompts.context, ids, (uint32_t)n_ids);
    j->fit = j->machine ? kvf__ridge_begin(j->info->n_layers, j->info->n_kv_heads, j->info->n_embd) : NULL;
    return j->fit != NULL;
}

/* ---- The probe ---------------------------------------------------------------------------------------- */

static bool measure(job *j) {
    uint32_t context = j->prompts.context, heads = j->info->n_kv_heads;
    for (uint32_t i = 0; i < j->prompts.n; i++) {
        float *scores = j->truth + i * j->n_scores;
        show(j, "repeating", i);
        if (!kvf__machine_repeat(j->machine, j->prompts.tokens + (size_t)i * context, j->states, scores)) return false;
        for (size_t s = 0; s < j->n_scores; s++) scores[s] = logf(scores[s] + LEAST_SCORE);
        for (uint32_t l = 0; l < j->info->n_layers && !is_held_out(i); l++)
            kvf__ridge_add(j->fit, l, j->states + (size_t)l * context * j->info->n_embd, context,
                           scores + (size_t)l * heads * context, context);
    }
    return true;
}

static kvf_probe_data data_of(const job *j, const char *model) {
    return (kvf_probe_data){.struct_size = sizeof(kvf_probe_data),
                            .n_layers = j->info->n_layers,
                            .n_kv_heads = j->info->n_kv_heads,
                            .n_embd = j->info->n_embd,
                            .model = model,
                            .weight = j->weight,
                            .bias = j->bias};
}

static bool make_probe(job *j, const kvf_probe_data *data) {
    kvf_error err = {.text = ""};
    kvf_probe_close(j->probe);
    j->probe = NULL;
    if (!kvf_probe_create(data, NULL, &j->probe, &err)) return true;
    kvf__say("calibrate: %s", err.text);
    return false;
}

/* What the probe gives each token, by the forward pass that will use it. */
static bool guess(job *j) {
    for (uint32_t i = 0; i < j->prompts.n; i++) {
        show(j, "measuring", i);
        if (!kvf__machine_probe(j->machine, j->prompts.tokens + (size_t)i * j->prompts.context, j->probe,
                                j->guess + i * j->n_scores))
            return false;
    }
    return true;
}

/* The share of the variance that the probe explains, table by table, over the prompts that it was not fitted to. */
static void explain(job *j) {
    uint32_t context = j->prompts.context;
    for (uint32_t t = 0; t < j->n_tables; t++) {
        double sum = 0, squares = 0, errors = 0, n = 0;
        for (uint32_t i = 0; i < j->prompts.n; i++) {
            size_t at = i * j->n_scores + (size_t)t * context;
            for (uint32_t s = 0; s < context && is_held_out(i); s++, n++) {
                double y = (double)j->truth[at + s], e = y - (double)j->guess[at + s];
                sum += y, squares += y * y, errors += e * e;
            }
        }
        double variance = squares - sum * sum / n;
        j->explained[t] = variance > 0 ? (float)(1 - errors / variance) : 0;
        j->mean_explained += (double)j->explained[t] / j->n_tables;
    }
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* Thresholds: quantiles of the probe's scores over all prompts and tables; and what each table then keeps. */
static void quantiles(job *j) {
    uint32_t n = j->prompts.n, context = j->prompts.context;
    size_t all = n * j->n_scores;
    memcpy(j->sorted, j->guess, all * sizeof *j->sorted);
    qsort(j->sorted, all, sizeof *j->sorted, descending);
    for (uint32_t r = 0; r < N_RHOS; r++) {
        size_t rank = (size_t)((double)rhos[r] * (double)all);
        j->thresholds[r] = j->sorted[rank ? rank - 1 : 0];
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t t = 0; t < j->n_tables; t++) {
                const float *scores = j->guess + i * j->n_scores + (size_t)t * context;
                uint32_t kept = 0;
                for (uint32_t s = 0; s < context; s++) kept += scores[s] >= j->thresholds[r];
                float share = (float)kept / (float)context;
                size_t at = (size_t)r * j->n_tables + t;
                j->shares[at] += share / (float)n;
                if (share > j->most[at]) j->most[at] = share;
            }
    }
    for (size_t i = 0; i < (size_t)j->n_tables * N_RHOS; i++) /* rounding of a sum */
        if (j->shares[i] > 1) j->shares[i] = 1;
}

/* ---- Results ------------------------------------------------------------------------------------------ */

static double layer_explained(const job *j, uint32_t layer) {
    double sum = 0;
    for (uint32_t h = 0; h < j->info->n_kv_heads; h++) sum += (double)j->explained[layer * j->info->n_kv_heads + h];
    return sum / j->info->n_kv_heads;
}

static bool report(const job *j, const char *path, double seconds) {
    uint32_t n_held = j->prompts.n / HELD_OUT;
    if (j->cli->json) {
        json_t *layers = json_array();
        for (uint32_t t = 0; t < j->n_tables; t++) {
            if (t % j->info->n_kv_heads == 0) json_array_append_new(layers, json_array());
            json_array_append_new(json_array_get(layers, t / j->info->n_kv_heads),
                                  kvf__json_number((double)j->explained[t]));
        }
        return kvf__json_print(json_pack("{s:s, s:I, s:I, s:I, s:f, s:f, s:o}", "file", path, "prompts",
                                         (json_int_t)j->prompts.n, "held_out", (json_int_t)n_held, "context",
                                         (json_int_t)j->prompts.context, "seconds", seconds, "explained",
                                         j->mean_explained, "explained_by_head", layers));
    }
    printf("layer  explained\n");
    for (uint32_t l = 0; l < j->info->n_layers; l++) printf("%5u  %8.0f%%\n", l, 100 * layer_explained(j, l));
    printf(
        "\nThe probe explains %.0f%% of the scores' variance on %u prompts of %u tokens that it was not fitted to (%u fitted, "
        "%.0f s).\nWritten: %s\n",
        100 * j->mean_explained, n_held, j->prompts.context, j->prompts.n - n_held, seconds, path);
    return kvf__stdout_done();
}

static int run(job *j, const char *path, const char *name) {
    double started = kvf__now();
    kvf_probe_data data = data_of(j, name);
    bool ok = measure(j) && kvf__ridge_solve(j->fit, RIDGE, j->weight, j->bias) && make_probe(j, &data) && guess(j);
    if (ok) {
        explain(j);
        quantiles(j);
        data.explained = j->explained;
        data.n_rhos = N_RHOS;
        data.rhos = rhos;
        data.thresholds = j->thresholds;
        data.shares = j->shares;
        data.most = j->most;
        ok = make_probe(j, &data);
    }
    kvf__progress_clear();
    if (!ok) return KVF__EXIT_ENGINE;
    kvf_error err = {.text = ""};
    if (!j->cli->output) kvf__cache_folder(path);
    if (kvf_probe_save(j->probe, path, &err)) {
        kvf__say("%s", err.text);
        return KVF__EXIT_OUTPUT;
    }
    return report(j, path, kvf__now() - started) ? KVF__EXIT_OK : KVF__EXIT_OUTPUT;
}

int kvf__calibrate_command(const void *options) {
    const kvf__cli *cli = options;
    uint32_t n_threads;
    char model_path[KVF__PATH_BYTES], path[KVF__PATH_BYTES], name[KVF__DIGEST_BYTES];
    uint64_t digest;
    if (!kvf__model_path(cli, model_path) || !kvf__digest_model(model_path, cli->quiet, &digest, NULL))
        return KVF__EXIT_USAGE;
    kvf__digest_text(digest, name);
    if (cli->output) snprintf(path, sizeof path, "%s", cli->output);
    if (!cli->output && !kvf__probe_path(digest, path)) {
        kvf__say("calibrate: there is no home folder to keep the probe in; give --output FILE");
        return KVF__EXIT_USAGE;
    }
    kvf_model *model = kvf__setup_model(cli, false, &n_threads);
    if (!model) return KVF__EXIT_USAGE;
    job j = {.cli = cli, .progress = kvf__progress_begin(!cli->quiet, "calibrate", 0)};
    int code = begin(&j, model, n_threads) ? run(&j, path, name) : KVF__EXIT_USAGE;
    give_back(&j);
    kvf_model_close(model);
    return code;
}
