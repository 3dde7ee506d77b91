/* kvfold-bench engine: tokens a second of a prompt's prefill, and of decoding with a context, through the engine.
 *
 * For each policy one prompt is computed, over and over; then as many sequences as the largest -s run side by side, their
 * prompts cut so that all reach the context together; each smaller -s goes on with the first of them. With -i a case says
 * {"turn": NAME} before each repetition and waits for a line on standard input, so that a peer can run in turns with it. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/json.h"
#include "kvfold/engine.h"

#define die kvf__bench_die

enum { MAX_CASES = 8, MAX_SEQS = 256, CHUNK = 512, BLOCK_SIZE = 16 };

typedef struct settings {
    const char *model_path;
    char *policies[MAX_CASES];
    uint32_t n_seqs[MAX_CASES]; /* descending */
    uint32_t n_policies, n_counts, context, n_steps, n_threads;
    int repetitions;
    bool turns, fast_activations;
} settings;

/* One request, as its callbacks see it. */
typedef struct request {
    kvf_request id;
    uint32_t n_tokens; /* generated */
    double first;      /* log-probability of the first one */
    bool ended;
} request;

typedef struct bench {
    const settings *s;
    const kvf_model *model;
    const kvf_model_info *info;
    kvf_engine *engine;
    kvf_policy_options policy;
    const char *policy_name;
    uint32_t *prompt; /* (context) */
    request requests[MAX_SEQS];
} bench;

static void on_token(void *user, kvf_request id, uint32_t token, double logprob) {
    request *r = user;
    (void)id;
    (void)token;
    if (!(logprob <= 0) || !isfinite(logprob)) die("engine: a token of log-probability %g", logprob);
    if (!r->n_tokens++) r->first = logprob;
}

static void on_finish(void *user, const kvf_result *result) {
    request *r = user;
    if (result->finish == KVF_FINISH_ERROR) die("engine: %s", result->error);
    r->ended = true;
}

static void submit(bench *b, request *r, uint32_t n_prompt, uint32_t max_tokens) {
    *r = (request){0};
    kvf_error err = {.text = ""};
    kvf_generate g = {.struct_size = sizeof g,
                      .tokens = b->prompt,
                      .n_tokens = n_prompt,
                      .max_tokens = max_tokens,
                      .ignore_end = 1,
                      .policy = &b->policy,
                      .user = r,
                      .on_token = on_token,
                      .on_finish = on_finish};
    if (kvf_engine_submit(b->engine, &g, &r->id, &err)) die("engine: %s", err.text);
}

static void step(bench *b) {
    kvf_error err = {.text = ""};
    if (kvf_engine_step(b->engine, NULL, &err)) die("engine: %s", err.text);
}

static kvf_engine_stats stats_of(bench *b) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    if (kvf_engine_get_stats(b->engine, &s)) die("engine: no figures");
    return s;
}

/* Waits until the peer has had its turn. */
static void take_turn(const bench *b, const char *what, uint32_t n_seqs) {
    char line[256];
    if (!b->s->turns) return;
    printf("{\"turn\": \"%s\", \"sequences\": %u}\n", what, n_seqs);
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) die("-i: standard input has ended");
}

/* The largest -s sequences over the whole context, and what is decoded while they are measured. */
static uint64_t kv_bytes(const bench *b) {
    const settings *s = b->s;
    uint64_t slots = s->context + (uint64_t)s->n_steps * ((uint32_t)s->repetitions + 1) * s->n_counts + 2 * BLOCK_SIZE;
    return slots * s->n_seqs[0] * b->info->n_layers * b->info->n_kv_heads * b->info->head_dim * 4;
}

static void open_engine(bench *b, const char *policy) {
    kvf_error err = {.text = ""};
    kvf_engine_config c;
    kvf_engine_config_init(&c, sizeof c);
    b->policy_name = policy;
    char name[64];
    snprintf(name, sizeof name, "%s", policy);
    char *preset = strchr(name, ':');
    if (preset) *preset++ = '\0';
    if (kvf_policy_options_init(&b->policy, sizeof b->policy, name, preset, &err)) die("-p %s: %s", policy, err.text);
    if (strcmp(name, "full") != 0 && kvf_policy_option_set(&b->policy, "rho", "0.2", &err)) die("%s", err.text);
    c.model = b->model;
    c.n_threads = b->s->n_threads;
    c.block_size = BLOCK_SIZE;
    c.chunk = CHUNK;
    c.kv_bytes = kv_bytes(b);
    c.max_running = b->s->n_seqs[0];
    c.n_score_arrays = KVF__MAX(kvf_policy_n_arrays(&b->policy), 1u);
    c.fast_activations = b->s->fast_activations;
    c.want_mass_bias = kvf_policy_needs_weights(&b->policy);
    if (kvf_engine_create(&c, &b->engine, &err)) die("engine: %s", err.text);
}

/* ---- Cases --------------------------------------------------------------------------------------------- */

static void report(bench *b, const char *name, kvf__bench_times *rates, uint32_t n_seqs, const kvf_engine_stats *before,
                   double seconds) {
    kvf_engine_stats now = stats_of(b);
    uint64_t n_steps = now.n_steps - before->n_steps;
    kvf__bench_sort(rates);
    uint64_t slots = 0;
    for (uint32_t l = 0; l < now.n_layers; l++) slots += (uint64_t)now.layers[l].n_blocks * BLOCK_SIZE;
    double bytes = (double)slots * b->info->n_kv_heads * b->info->head_dim * 4 + (double)b->info->file_bytes;
    kvf__bench_begin(name, rates, 1, "tokens/s", b->s->n_threads, n_seqs ? bytes : (double)b->info->file_bytes);
    kvf__bench_text("policy", b->policy_name);
    if (n_seqs) kvf__bench_number("sequences", n_seqs);
    kvf__bench_number("context", b->s->context);
    kvf__bench_text("model", b->info->name);
    kvf__bench_number("step_ms", 1e3 * seconds / (double)n_steps);
    kvf__bench_number("forward_ms", 1e3 * (now.forward_s - before->forward_s) / (double)n_steps);
    kvf__bench_number("policy_ms", 1e3 * (now.policy_s - before->policy_s) / (double)n_steps);
    kvf__bench_end();
}

static void prefill_case(bench *b) {
    kvf__bench_times rates = {.n = b->s->repetitions};
    kvf_engine_stats before = stats_of(b);
    double total = 0;
    for (int i = -1; i < rates.n; i++) { /* the first brings the weights in */
        request *r = &b->requests[0];
        take_turn(b, "prefill", 0);
        submit(b, r, b->s->context, 0);
        if (i == 0) before = stats_of(b), total = 0;
        double begin = kvf__clock();
        while (!r->ended) step(b);
        double seconds = kvf__clock() - begin;
        total += seconds;
        if (i >= 0) rates.s[i] = b->s->context / seconds;
    }
    report(b, "engine/prefill", &rates, 0, &before, total);
}

/* All of them computed and decoding, each with the whole context. Prompts are computed one after another, and who is done
 * decodes meanwhile, a token a step. */
static void fill(bench *b, uint32_t n) {
    uint32_t later = 0, n_prompt[MAX_SEQS];
    for (uint32_t i = n; i-- > 0;) {
        if (later + 1 >= b->s->context) die("-c %u: too short for %u sequences", b->s->context, n);
        n_prompt[i] = b->s->context - later;
        later += kvf__ceil_div(n_prompt[i], CHUNK);
    }
    for (uint32_t i = 0; i < n; i++) submit(b, &b->requests[i], n_prompt[i], b->info->n_context - b->s->context);
    while (!b->requests[n - 1].n_tokens) step(b);
    if (stats_of(b).n_running != n) die("engine: only %u of %u sequences run", stats_of(b).n_running, n);
}

/* The same prompts alone and beside others: the first token's probability agrees within rounding, where the prompts are equal. */
static void check(bench *b) {
    request *alone = &b->requests[0], *beside = &b->requests[1];
    for (int i = 0; i < 2; i++) {
        submit(b, alone, 200, 4);
        if (i) submit(b, beside, 200, 4);
        double first = alone->first;
        while (!alone->ended || (i && !beside->ended)) step(b);
        if (i && !(fabs(beside->first - alone->first) < 0.05)) die("engine: equal prompts, other probabilities");
        if (alone->n_tokens != 4 || (first < 0 && first != alone->first)) die("engine: a request ended early");
    }
}

static void decode_cases(bench *b) {
    const settings *s = b->s;
    fill(b, s->n_seqs[0]);
    for (uint32_t c = 0; c < s->n_counts; c++) {
        uint32_t n = s->n_seqs[c];
        kvf__bench_times rates = {.n = s->repetitions};
        for (uint32_t i = n; c && i < s->n_seqs[c - 1]; i++)
            if (kvf_engine_abort(b->engine, b->requests[i].id)) die("engine: a request ended early");
        kvf_engine_stats before = stats_of(b);
        double total = 0;
        for (int i = -1; i < rates.n; i++) {
            take_turn(b, "decode", n);
            if (i == 0) before = stats_of(b), total = 0;
            uint64_t tokens = stats_of(b).n_decode_tokens;
            double begin = kvf__clock();
            for (uint32_t j = 0; j < s->n_steps; j++) step(b);
            double seconds = kvf__clock() - begin;
            tokens = stats_of(b).n_decode_tokens - tokens;
            if (tokens != (uint64_t)n * s->n_steps) die("engine: %u sequences did not all decode", n);
            total += seconds;
            if (i >= 0) rates.s[i] = (double)tokens / seconds;
        }
        report(b, "engine/decode", &rates, n, &before, total);
    }
    for (uint32_t i = 0; i < s->n_seqs[s->n_counts - 1]; i++) (void)!kvf_engine_abort(b->engine, b->requests[i].id);
}

/* ---- Options ------------------------------------------------------------------------------------------- */

static const char *default_model(void) {
    static char path[4096];
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    bool own = cache && *cache == '/';
    snprintf(path, sizeof path, "%s%s/kvfold/SmolLM2-135M-Instruct.Q4_1.gguf",
             own    ? cache
             : home ? home
                    : "",
             own ? "" : "/.cache");
    return path;
}

static int descending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x < y) - (x > y);
}

static void read_counts(settings *s, char *text) {
    s->n_counts = 0;
    for (char *rest, *t = strtok_r(text, ",", &rest); t; t = strtok_r(NULL, ",", &rest)) {
        if (s->n_counts == MAX_CASES) die("-s: at most %d numbers", MAX_CASES);
        s->n_seqs[s->n_counts++] = (uint32_t)kvf__bench_int("-s", t, 1, MAX_SEQS);
    }
    if (!s->n_counts) die("-s: numbers of sequences, as 1,8,32");
    qsort(s->n_seqs, s->n_counts, sizeof *s->n_seqs, descending);
}

static void read_policies(settings *s, char *text) {
    s->n_policies = 0;
    for (char *rest, *t = strtok_r(text, ",", &rest); t; t = strtok_r(NULL, ",", &rest)) {
        if (s->n_policies == MAX_CASES) die("-p: at most %d policies", MAX_CASES);
        s->policies[s->n_policies++] = t;
    }
}

int kvf__bench_engine(int argc, char **argv) {
    settings s = {.model_path = default_model(),
                  .policies = {(char[]){"full"}, (char[]){"d2o"}},
                  .n_seqs = {32, 8, 1},
                  .n_policies = 2,
                  .n_counts = 3,
                  .context = 2048,
                  .n_steps = 8,
                  .n_threads = 2,
                  .repetitions = 5};
    int option;
    while ((option = getopt(argc, argv, "r:t:m:c:s:p:g:ix")) != -1) switch (option) {
        case 'r': s.repetitions = (int)kvf__bench_int("-r", optarg, 1, KVF__BENCH_MAX_REPETITIONS); break;
        case 't': s.n_threads = (uint32_t)kvf__bench_int("-t", optarg, 1, KVF__BENCH_MAX_THREADS); break;
        case 'm': s.model_path = optarg; break;
        case 'c': s.context = (uint32_t)kvf__bench_int("-c", optarg, 256, 1 << 20); break;
        case 's': read_counts(&s, optarg); break;
        case 'p': read_policies(&s, optarg); break;
        case 'g': s.n_steps = (uint32_t)kvf__bench_int("-g", optarg, 1, 1 << 16); break;
        case 'i': s.turns = true; break;
        case 'x': s.fast_activations = true; break;
        default:
            die("engine [-r REPETITIONS] [-t THREADS] [-m MODEL] [-c CONTEXT] [-s SEQUENCES] [-p POLICIES] [-g STEPS] [-i] [-x]");
        }
    static bench b;
    kvf_error err = {.text = ""};
    kvf_model *model;
    b.s = &s;
    if (kvf_model_open(s.model_path, NULL, &model, &err)) die("-m: %s", err.text);
    b.model = model;
    b.info = kvf_model_get_info(model);
    uint64_t longest = s.context + (uint64_t)s.n_steps * ((uint32_t)s.repetitions + 1) * s.n_counts;
    if (longest >= b.info->n_context)
        die("-c, -g: %llu tokens, the model takes %u", (unsigned long long)longest, b.info->n_context);
    b.prompt = kvf__bench_take(s.context * sizeof *b.prompt);
    uint64_t state = 1;
    for (uint32_t i = 0; i < s.context; i++)
        b.prompt[i] = (uint32_t)((double)(kvf__bench_uniform(&state) + 1) * 0.5 * (b.info->n_vocab - 1));
    for (uint32_t p = 0; p < s.n_policies; p++) {
        open_engine(&b, s.policies[p]);
        check(&b);
        prefill_case(&b);
        decode_cases(&b);
        kvf_engine_destroy(b.engine);
    }
    free(b.prompt);
    kvf_model_close(model);
    return 0;
}
