/* Decode under rho 1 beside `full`: d2o that observes nothing, and d2o that may be tightened later (budget_may_change).
 *
 * One engine for each way, over one model, all with the same prompts. They take turns of a few steps, in an order that
 * rotates; each turn of d2o is a pair with the turn of full in its round. All ways give the same tokens, or it dies. */
#define _DEFAULT_SOURCE
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/json.h"
#include "kvfold/engine.h"

enum { N_WAYS = 3, MAX_SEQS = 64, RESAMPLES = 2000 };
static const char *const way_names[N_WAYS] = {"full", "rho1/d2o", "rho1/d2o_may_change"};

typedef struct setup {
    const kvf_model *model;
    uint32_t n_seqs, n_context, n_steps, n_rounds, n_threads;
} setup;

typedef struct way {
    kvf_engine *engine;
    uint32_t n_tokens[MAX_SEQS]; /* generated so far */
    uint64_t digest[MAX_SEQS];   /* of them */
} way;

typedef struct sequence {
    way *way;
    uint32_t i;
} sequence;

static void on_token(void *user, kvf_request request, uint32_t token, double logprob) {
    const sequence *s = user;
    uint64_t bits;
    (void)request;
    memcpy(&bits, &logprob, sizeof bits);
    s->way->n_tokens[s->i]++;
    s->way->digest[s->i] = (s->way->digest[s->i] ^ token ^ bits) * 0x100000001b3u;
}

static void on_finish(void *user, const kvf_result *result) {
    (void)user;
    if (result->finish == KVF_FINISH_ERROR) kvf__bench_die("rho1: %s", result->error);
}

static void step(way *w) {
    kvf_error err = {.text = ""};
    if (kvf_engine_step(w->engine, NULL, &err)) kvf__bench_die("rho1: %s", err.text);
}

static void begin(way *w, const setup *s, int kind, sequence *sequences) {
    const kvf_model_info *info = kvf_model_get_info(s->model);
    kvf_error err = {.text = ""};
    kvf_policy_options o;
    uint32_t most = s->n_context + (s->n_rounds + 2) * s->n_steps + 16, *prompt = kvf__bench_take(s->n_context * 4);
    uint64_t random = 1;
    kvf_engine_config c;
    kvf_engine_config_init(&c, sizeof c);
    c.model = s->model;
    c.n_threads = s->n_threads;
    c.max_running = s->n_seqs;
    c.max_context = most;
    c.max_prefill_tokens = most * s->n_seqs;
    c.kv_bytes = (uint64_t)(most + 16) * s->n_seqs * info->n_layers * info->n_kv_heads * info->head_dim * 2 * 2;
    if (kvf_engine_create(&c, &w->engine, &err)) kvf__bench_die("rho1: %s", err.text);
    if (kvf_policy_options_init(&o, sizeof o, kind ? "d2o" : "full", NULL, &err)) kvf__bench_die("rho1: %s", err.text);
    o.rho = 1;
    o.budget_may_change = kind == 2;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        for (uint32_t k = 0; k < s->n_context; k++)
            prompt[k] = (uint32_t)((double)(kvf__bench_uniform(&random) + 1) / 2 * info->n_vocab);
        sequences[i] = (sequence){w, i};
        kvf_generate g = {.struct_size = sizeof g,
                          .tokens = prompt,
                          .n_tokens = s->n_context,
                          .max_tokens = most - s->n_context,
                          .ignore_end = 1,
                          .policy = &o,
                          .user = &sequences[i],
                          .on_token = on_token,
                          .on_finish = on_finish};
        if (kvf_engine_submit(w->engine, &g, NULL, &err)) kvf__bench_die("rho1: %s", err.text);
    }
    for (uint32_t i = 0; i < s->n_seqs; i++)
        while (!w->n_tokens[i]) step(w); /* the prompts */
    free(prompt);
}

static double turn(way *w, uint32_t n_steps) {
    double t = kvf__clock();
    for (uint32_t i = 0; i < n_steps; i++) step(w);
    return kvf__clock() - t;
}

/* A round of prompts may end some steps earlier in one way: never, since all ways plan alike. */
static void must_agree(const way *a, const way *b, uint32_t n_seqs) {
    for (uint32_t i = 0; i < n_seqs; i++)
        if (a->n_tokens[i] != b->n_tokens[i] || a->digest[i] != b->digest[i])
            kvf__bench_die("rho1: sequence %u: d2o at rho 1 gives other tokens than full", i);
}

/* Bounds of the median by resampling, 95%. */
static void interval(const kvf__bench_times *t, double *low, double *high) {
    static double medians[RESAMPLES];
    kvf__bench_times again = {.n = t->n};
    uint64_t random = 7;
    for (int i = 0; i < RESAMPLES; i++) {
        for (int k = 0; k < t->n; k++) {
            int at = (int)((double)(kvf__bench_uniform(&random) + 1) / 2 * t->n);
            again.s[k] = t->s[KVF__MIN(at, t->n - 1)];
        }
        kvf__bench_sort(&again);
        medians[i] = kvf__bench_quantile(&again, .5);
        for (int k = i; k > 0 && medians[k - 1] > medians[k]; k--) { /* kept sorted */
            double x = medians[k];
            medians[k] = medians[k - 1];
            medians[k - 1] = x;
        }
    }
    *low = medians[RESAMPLES / 40];
    *high = medians[RESAMPLES - 1 - RESAMPLES / 40];
}

static void report(const setup *s, int kind, kvf__bench_times *ratios, double floor_ms) {
    double low, high;
    kvf__bench_sort(ratios);
    interval(ratios, &low, &high);
    kvf__bench_begin(way_names[kind], ratios, 1, "time / time of full", s->n_threads, 0);
    kvf__bench_number("low", low);
    kvf__bench_number("high", high);
    kvf__bench_number("full_ms_per_step", floor_ms);
    kvf__bench_number("sequences", s->n_seqs);
    kvf__bench_number("context", s->n_context);
    kvf__bench_number("steps_per_turn", s->n_steps);
    kvf__bench_end();
}

static void measure(const setup *s) {
    static way ways[N_WAYS];
    static sequence sequences[N_WAYS][MAX_SEQS];
    static kvf__bench_times ratios[N_WAYS], full;
    memset(ways, 0, sizeof ways);
    for (int k = 0; k < N_WAYS; k++) begin(&ways[k], s, k, sequences[k]);
    for (int r = -1; r < (int)s->n_rounds; r++) { /* the first warms up */
        double t[N_WAYS];
        for (int k = 0; k < N_WAYS; k++) {
            int turns = (k + r + 1) % N_WAYS;
            t[turns] = turn(&ways[turns], s->n_steps);
        }
        for (int k = 0; k < N_WAYS && r >= 0; k++) ratios[k].s[r] = t[k] / t[0];
        if (r >= 0) full.s[r] = t[0];
    }
    full.n = (int)s->n_rounds;
    kvf__bench_sort(&full);
    for (int k = 1; k < N_WAYS; k++) {
        must_agree(&ways[0], &ways[k], s->n_seqs);
        ratios[k].n = (int)s->n_rounds;
        report(s, k, &ratios[k], 1e3 * kvf__bench_quantile(&full, .5) / s->n_steps);
    }
    for (int k = 0; k < N_WAYS; k++) kvf_engine_destroy(ways[k].engine);
}

int kvf__bench_rho1(int argc, char **argv) {
    static const struct option options[] = {{"model", required_argument, NULL, 'm'}, {NULL, 0, NULL, 0}};
    setup s = {.n_seqs = 1, .n_context = 1024, .n_steps = 4, .n_rounds = 45, .n_threads = 2};
    const char *path = NULL;
    int option;
    while ((option = getopt_long(argc, argv, "m:r:t:n:l:s:", options, NULL)) != -1) switch (option) {
        case 'm': path = optarg; break;
        case 'r': s.n_rounds = (uint32_t)kvf__bench_int("-r", optarg, 15, KVF__BENCH_MAX_REPETITIONS); break;
        case 't': s.n_threads = (uint32_t)kvf__bench_int("-t", optarg, 1, KVF__BENCH_MAX_THREADS); break;
        case 'n': s.n_seqs = (uint32_t)kvf__bench_int("-n", optarg, 1, MAX_SEQS); break;
        case 'l': s.n_context = (uint32_t)kvf__bench_int("-l", optarg, 16, 1 << 20); break;
        case 's': s.n_steps = (uint32_t)kvf__bench_int("-s", optarg, 1, 1000); break;
        default: kvf__bench_die("rho1 --model FILE [-r PAIRS] [-t THREADS] [-n SEQUENCES] [-l CONTEXT] [-s STEPS]");
        }
    if (!path) {
        fputs("kvfold-bench: rho1: left out: it takes --model FILE\n", stderr);
        return 0;
    }
    kvf_model *model = NULL;
    kvf_error err = {.text = ""};
    if (kvf_model_open(path, NULL, &model, &err)) kvf__bench_die("rho1: %s", err.text);
    s.model = model;
    measure(&s);
    kvf_model_close(model);
    return 0;
}
