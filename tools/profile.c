/* kvfold profile: replays a trace that was read or generated; writes summary, page, traces and figures. */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/files.h"
#include "tools/replay.h"
#include "tools/report.h"

typedef struct profile {
    const kvf__cli *cli;
    kvf__trace trace;
    kvf_policy_options policy;
    char label[112];
    double *densities;
    kvf__replay_config config;
    kvf__replay_result result;
    kvf__occ occ;
    kvf__chrome chrome;
    kvf__progress progress;
} profile;

static volatile int caught;

static void catch_signal(int number) { caught = number; }

/* ---- Set-up -------------------------------------------------------------------------------------- */

static bool check_usage(const kvf__cli *cli) {
    const char *const outputs[] = {cli->report, cli->trace, cli->record, cli->metrics, cli->json ? "-" : NULL};
    static const char *const names[] = {"--report", "--trace", "--record", "--metrics", "--json"};
    if (!cli->generate == !cli->n_words) {
        kvf__say(cli->n_words ? "%s and --generate: give one of them"
                              : "%snothing to replay: give a TRACE, or --generate N (kvfold profile --help)",
                 cli->n_words ? cli->words[0] : "");
        return false;
    }
    kvf__files files = {0};
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) kvf__files_write(&files, names[i], outputs[i]);
    if (cli->n_words) kvf__files_read(&files, cli->words[0], "the trace that is read");
    kvf__files_read(&files, cli->densities, "the densities");
    bool good = kvf__files_check(&files);
    kvf__files_free(&files);
    return good;
}

static bool get_trace(profile *p) {
    const kvf__cli *c = p->cli;
    if (!c->generate) return kvf__trace_read(c->words[0], c->limit, &p->trace);
    const kvf__trace_make make = {.n_requests = c->limit && c->limit < c->generate ? c->limit : c->generate,
                                  .seed = c->seed,
                                  .bursty = !strcmp(c->arrivals, "bursty"),
                                  .rate = c->rate,
                                  .burst = c->burst,
                                  .prompt_mean = c->prompt_mean,
                                  .prompt_sigma = c->prompt_sigma,
                                  .output_mean = c->output_mean,
                                  .output_sigma = c->output_sigma,
                                  .n_groups = c->prefix_groups,
                                  .shared_tokens = c->shared_tokens,
                                  .grouped = c->grouped,
                                  .prompt_max = c->context ? c->context - 1 : 1u << 20,
                                  .output_max = 1u << 20};
    return kvf__trace_generate(&make, &p->trace);
}

/* Numbers between blanks or commas, one for each layer; n_layers 0: as many as there are. */
static bool read_densities(profile *p, uint32_t *n_layers) {
    size_t n_bytes;
    char *text = kvf__read_file(p->cli->densities, "densities", &n_bytes), *save = NULL;
    uint32_t n = 0;
    if (!text || !(p->densities = calloc(1024, sizeof *p->densities))) return free(text), false;
    for (char *word = strtok_r(text, " \t\r\n,", &save); word; word = strtok_r(NULL, " \t\r\n,", &save)) {
        char *end;
        double value = strtod(word, &end);
        if (*end || !(value >= 0 && value < 1e30) || n == 1024) {
            kvf__say("--densities %s: number %u, %s: must be %s", kvf__shown(p->cli->densities).text, n + 1,
                     kvf__shown(word).text, n == 1024 ? "the last: there are at most 1024 layers" : "0 or more");
            return free(text), false;
        }
        p->densities[n++] = value;
    }
    free(text);
    if (!*n_layers) *n_layers = n;
    if (n && n == *n_layers) return true;
    kvf__say("--densities %s: has %u numbers: must be one for each of the %u layers",
             kvf__shown(p->cli->densities).text, n, *n_layers);
    return false;
}

static bool set_layers(profile *p) {
    uint32_t n = p->cli->n_layers ? p->cli->n_layers : p->trace.n_layers;
    if (p->trace.n_layers && p->trace.n_layers != n) {
        kvf__say("--layers %u: the trace's densities are of %u layers; leave --layers out", n, p->trace.n_layers);
        return false;
    }
    if (p->cli->densities && !read_densities(p, &n)) return false;
    p->config.n_layers = n ? n : 30;
    return true;
}

static bool set_pool(profile *p) {
    const kvf__cli *c = p->cli;
    kvf__replay_config *r = &p->config;
    uint64_t element = strcmp(c->kv_dtype, "fp32") ? 2 : 4;
    r->block_bytes =
        2 * element * c->block_size * (c->heads_per_group ? c->heads_per_group : c->n_kv_heads) * c->head_dim;
    r->n_blocks = c->n_blocks ? c->n_blocks : c->kv_memory / r->block_bytes;
    if (r->n_blocks < 1 || r->n_blocks > 1u << 31) {
        kvf__say("--kv-memory %llu: makes %llu blocks of %llu bytes: must be 1 to 2147483648 of them",
                 (unsigned long long)c->kv_memory, (unsigned long long)r->n_blocks, (unsigned long long)r->block_bytes);
        return false;
    }
    if (c->chunk % c->block_size) {
        kvf__say("--chunk %u: must be a multiple of --block-size %u", c->chunk, c->block_size);
        return false;
    }
    if (c->heads_per_group && (c->heads_per_group > c->n_kv_heads || c->n_kv_heads % c->heads_per_group)) {
        kvf__say("--heads-per-group %u: must divide --kv-heads %u", c->heads_per_group, c->n_kv_heads);
        return false;
    }
    uint64_t context = c->context;
    for (uint64_t i = 0; i < p->trace.n && !c->context; i++) {
        uint64_t length = (uint64_t)p->trace.requests[i].n_prompt + p->trace.requests[i].n_output + 1;
        context = length > context ? length : context;
    }
    if (context > 1u << 30) context = 1u << 30;
    if (context < c->block_size) context = c->block_size;
    r->max_context = (uint32_t)context;
    r->n_kv_heads = c->n_kv_heads;
    r->heads_per_group = c->heads_per_group;
    r->block_size = c->block_size;
    r->chunk = c->chunk;
    r->max_running = c->max_running;
    r->prefix_cache = !strcmp(c->prefix_cache, "on");
    uint64_t n_q_heads = c->n_q_heads ? c->n_q_heads : 3 * (uint64_t)c->n_kv_heads;
    uint64_t page_bytes = r->n_layers * n_q_heads * c->block_size * sizeof(float);
    uint64_t bytes = c->snapshot_memory ? c->snapshot_memory : r->n_blocks * r->block_bytes / 20;
    uint64_t n_pages = bytes / page_bytes;
    r->n_snapshot_pages = (uint32_t)(n_pages < 1 ? 1 : n_pages < r->n_blocks ? n_pages : r->n_blocks);
    return true;
}

/* Without --context there is room for each request, with the longest piece if the policy repeats its prompt. */
static void add_pieces(profile *p) {
    const kvf_policy_options *o = &p->policy;
    uint64_t context = p->config.max_context, most = o->repeat_piece ? o->repeat_piece : UINT32_MAX;
    if (p->cli->context || !(kvf_policy_needs(o) & KVF_NEEDS_REPEAT)) return;
    for (uint64_t i = 0; i < p->trace.n; i++) {
        uint64_t n = p->trace.requests[i].n_prompt, end = n + KVF_MAX_INSTRUCTION_TOKENS + (n < most ? n : most);
        if (end > context) context = end;
    }
    p->config.max_context = (uint32_t)(context < 1u << 30 ? context : 1u << 30);
}

static bool set_policy(profile *p) {
    kvf__policy_name name;
    kvf_error err = {.text = ""};
    const char *text = kvf__policy_asked(p->cli);
    if (!kvf__policy_name_read(text, &name)) {
        kvf__say("--policy %s: there is no policy of that name", kvf__shown(text).text);
        return false;
    }
    if (p->cli->preset) snprintf(name.preset, sizeof name.preset, "%s", p->cli->preset);
    kvf_status st = kvf__policy_options(p->cli, &name, true, &p->policy, &err);
    if (!st) st = kvf_policy_options_check(&p->policy, p->config.n_layers, p->cli->block_size, &err);
    uint64_t element = strcmp(p->cli->kv_dtype, "fp32") ? 2 : 4;
    uint64_t token_bytes = 2 * element * p->cli->n_kv_heads * p->cli->head_dim;
    if (!st) st = kvf_policy_options_resolve(&p->policy, p->config.n_layers, token_bytes, &err);
    if (st) kvf__say_failed(st, &err);
    kvf__policy_label(&p->policy, name.preset, p->label, sizeof p->label);
    add_pieces(p);
    return !st;
}

static bool set_up(profile *p) {
    const kvf__cli *c = p->cli;
    if (!check_usage(c) || !get_trace(p) || !set_layers(p) || !set_pool(p) || !set_policy(p)) return false;
    p->config.trace = &p->trace;
    p->config.policy = &p->policy;
    p->config.densities = p->densities;
    p->config.seed = c->seed;
    p->config.step_s = c->step_ms * 1e-3;
    p->config.token_s = c->token_us * 1e-6;
    p->config.speed = c->speed;
    p->config.stop = &caught;
    if (!kvf__occ_begin(&p->occ, p->config.n_layers, c->block_size, p->config.n_blocks, p->config.block_bytes))
        return false;
    p->occ.title = "Replay";
    p->occ.source = c->generate ? "a made trace" : c->words[0];
    p->occ.policy = p->label;
    p->occ.clock = "replayed seconds";
    return kvf__chrome_open(&p->chrome, c->trace, "kvfold profile", p->config.n_layers);
}

/* ---- Summary -------------------------------------------------------------------------------------------- */

static json_t *summary_json(const profile *p) {
    const kvf__replay_result *r = &p->result;
    json_t *o = kvf__occ_json(&p->occ);
    if (!o) return NULL;
    json_object_del(o, "series"); /* --metrics FILE.json has it */
    kvf__policy_put(o, &p->policy);
    json_object_set_new(o, "trace_form", json_string(p->trace.form));
    json_object_set_new(o, "trace_requests", json_integer((json_int_t)p->trace.n));
    json_object_set_new(o, "trace_failed", json_integer((json_int_t)p->trace.n_skipped));
    json_object_set_new(o, "done", json_integer((json_int_t)r->n_done));
    json_object_set_new(o, "ended_early", json_integer((json_int_t)r->n_early));
    json_object_set_new(o, "refused", json_integer((json_int_t)r->n_refused));
    json_object_set_new(o, "interrupted", json_boolean(r->stopped));
    return o;
}

static void row(const char *label, const char *text) { fprintf(stderr, "%-26s%s\n", label, text); }

static void summary_text(const profile *p) {
    const kvf__occ *o = &p->occ;
    const kvf__replay_result *r = &p->result;
    char text[900];
    fprintf(stderr, "\n%s (%s), %s, %u layers; %s blocks of %u tokens, %s\n\n", o->source, p->trace.form, o->policy,
            o->n_layers, kvf__show_count(o->n_blocks).text, o->block_size,
            kvf__show_bytes(o->n_blocks * o->block_bytes).text);
    snprintf(text, sizeof text, "%s: %s done, %s ended early, %s refused", kvf__show_count(p->trace.n).text,
             kvf__show_count(r->n_done).text, kvf__show_count(r->n_early).text, kvf__show_count(r->n_refused).text);
    row("requests", text);
    snprintf(text, sizeof text, "%s in %s of the replay's clock", kvf__show_count(o->n_steps).text,
             kvf__show_seconds(o->end_s).text);
    row("steps", text);
    snprintf(text, sizeof text, "%s at most, %.1f%% of the pool (%s)", kvf__show_count(o->profile.held_max).text,
             100.0 * (double)o->profile.held_max / (double)o->n_blocks,
             kvf__show_bytes(o->profile.held_max * o->block_bytes).text);
    row("blocks held", text);
    snprintf(text, sizeof text, "%s at most (%s)", kvf__show_count(o->full_max).text,
             kvf__show_bytes(o->full_max * o->block_bytes).text);
    row("  with a full cache", text);
    row("batch size reached", kvf__show_count(o->running_max).text);
    row("waiting, at most", kvf__show_count(o->waiting_max).text);
    row("preemptions", kvf__show_count(o->n_preempted).text);
    row("compactions", kvf__show_count(r->n_compactions).text);
    snprintf(text, sizeof text, "mean %.1f, half under %llu, 99%% under %llu, at most %s",
             o->queue_histogram.n ? (double)o->queue_steps_sum / (double)o->queue_histogram.n : 0.0,
             (unsigned long long)kvf__histogram_quantile(&o->queue_histogram, 0.5),
             (unsigned long long)kvf__histogram_quantile(&o->queue_histogram, 0.99),
             kvf__show_count(o->queue_steps_max).text);
    row("steps in the queue", text);
    if (o->shared_tokens) {
        snprintf(text, sizeof text, "%s of %s prompt tokens, in the trace", kvf__show_count(o->shared_tokens).text,
                 kvf__show_count(o->prompt_tokens).text);
        row("shared prefixes", text);
    }
    if (o->prefix.struct_size) {
        const kvf_prefix_stats *c = &o->prefix;
        snprintf(text, sizeof text, "%s of %s prompts, %s of %s tokens (%.1f%%); %s evicted",
                 kvf__show_count(c->hits).text, kvf__show_count(c->queries).text, kvf__show_count(c->hit_tokens).text,
                 kvf__show_count(c->query_tokens).text,
                 c->query_tokens ? 100.0 * (double)c->hit_tokens / (double)c->query_tokens : 0.0,
                 kvf__show_count(c->evicted).text);
        row("found in the prefix cache", text);
    }
    if (p->trace.n_skipped) {
        snprintf(text, sizeof text, "%s lines that the trace marks as failed",
                 kvf__show_count(p->trace.n_skipped).text);
        row("left out", text);
    }
    if (r->n_refused) kvf__say("warning: the first that was refused: %s", r->refused);
}

static bool write_outputs(profile *p) {
    const kvf__cli *c = p->cli;
    bool good = kvf__chrome_close(&p->chrome);
    if (c->report && !kvf__occ_write_page(&p->occ, c->report)) good = false;
    if (c->metrics && !kvf__occ_write_metrics(&p->occ, c->metrics)) good = false;
    if (c->record && !kvf__trace_write(c->record, &p->trace)) good = false;
    if (c->json && !kvf__json_print(summary_json(p))) good = false;
    if (!c->json && !c->quiet) summary_text(p);
    return good;
}

int kvf__profile_command(const void *options) {
    profile p;
    memset(&p, 0, sizeof p);
    p.cli = options;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = catch_signal;
    action.sa_flags = (int)SA_RESETHAND;
    sigemptyset(&action.sa_mask);
    int code = KVF__EXIT_USAGE;
    if (set_up(&p)) {
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        p.progress = kvf__progress_begin(!p.cli->quiet, "profile", p.trace.n);
        p.config.progress = &p.progress;
        bool ran = kvf__replay(&p.config, &p.occ, &p.chrome, &p.result);
        kvf__progress_clear();
        if (!ran) (void)kvf__chrome_close(&p.chrome);
        bool written = !ran || write_outputs(&p);
        code = !ran                                     ? KVF__EXIT_USAGE
               : !written                               ? KVF__EXIT_OUTPUT
               : caught                                 ? KVF__EXIT_SIGNAL + caught
               : p.result.n_refused || p.result.n_early ? KVF__EXIT_SOME_FAILED
                                                        : KVF__EXIT_OK;
    } else {
        (void)kvf__chrome_close(&p.chrome);
    }
    kvf__occ_free(&p.occ);
    kvf__trace_free(&p.trace);
    free(p.densities);
    return code;
}
