/* The summary of a run. */
#define _POSIX_C_SOURCE 200809L
#include "tools/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Adding up ---------------------------------------------------------------------------------------- */

void kvf__policy_label(const kvf_policy_options *options, const char *preset, char *text, size_t capacity) {
    char name[100];
    snprintf(name, sizeof name, "%s%s%s", options->ops ? options->ops->name : "", *preset ? ":" : "", preset);
    if (kvf__policy_keeps_all(options))
        snprintf(text, capacity, "%s", name);
    else if (options->budget_bytes)
        snprintf(text, capacity, "%s, %llu bytes", name, (unsigned long long)options->budget_bytes);
    else if (options->budget_tokens)
        snprintf(text, capacity, "%s, %u tokens", name, options->budget_tokens);
    else
        snprintf(text, capacity, "%s, rho %s", name, kvf__show_number(options->rho).text);
}

bool kvf__tally_init(kvf__tally *t, const kvf__cli *cli, const kvf_model_info *info, const kvf_policy_options *policy,
                     const char *preset) {
    memset(t, 0, sizeof *t);
    t->policy = *policy;
    t->n_layers = info->n_layers;
    t->n_groups = cli->heads_per_group ? info->n_kv_heads / cli->heads_per_group : 1;
    t->block_size = cli->block_size;
    t->blocks = calloc(t->n_layers, sizeof *t->blocks);
    t->blocks_max = calloc(t->n_layers, sizeof *t->blocks_max);
    snprintf(t->preset, sizeof t->preset, "%s", preset);
    kvf__policy_label(policy, preset, t->label, sizeof t->label);
    if (t->blocks && t->blocks_max) return true;
    kvf__say("out of memory");
    kvf__tally_free(t);
    return false;
}

void kvf__tally_free(kvf__tally *t) {
    free(t->blocks);
    free(t->blocks_max);
    t->blocks = NULL;
    t->blocks_max = NULL;
}

void kvf__tally_add(kvf__tally *t, const kvf_result *r) {
    t->n_stop += r->finish == KVF_FINISH_STOP;
    t->n_length += r->finish == KVF_FINISH_LENGTH;
    t->n_error += r->finish == KVF_FINISH_ERROR;
    t->n_unknown += r->full_tokens == 0;
    t->kept += r->kept;
    t->merged += r->merged;
    t->dropped += r->dropped;
    t->held_tokens += r->held_tokens;
    t->full_tokens += r->full_tokens;
    if (r->index == 0) t->prompt_tokens += r->n_prompt; /* once for all answers to it */
    t->completion_tokens += r->n_tokens;
    if (!r->full_tokens || !r->layers) return;
    uint64_t positions = r->full_tokens / ((uint64_t)t->n_layers * t->n_groups);
    t->full_blocks += (positions + t->block_size - 1) / t->block_size * t->n_groups;
    for (uint32_t l = 0; l < t->n_layers; l++) t->blocks[l] += r->layers[l].n_blocks;
    t->n_measured++;
}

uint64_t kvf__tally_answers(const kvf__tally *t) { return t->n_stop + t->n_length + t->n_error; }

void kvf__tally_end(kvf__tally *t, const kvf_engine_stats *stats, double wall_s) {
    t->stats = *stats;
    t->stats.layers = NULL;
    t->wall_s = wall_s;
    for (uint32_t l = 0; l < t->n_layers && stats->layers; l++) t->blocks_max[l] = stats->layers[l].n_blocks_max;
}

/* ---- Text ------------------------------------------------------------------------------------------------ */

enum { LABEL_WIDTH = 27, COLUMN_WIDTH = 24, CELL_BYTES = 128 };

typedef void (*cell_fn)(const kvf__tally *t, char *text, size_t capacity);

static void cell_label(const kvf__tally *t, char *text, size_t capacity) { snprintf(text, capacity, "%s", t->label); }

typedef struct part {
    uint64_t n;
    const char *what;
} part;

/* "12: 10 done, 2 error" */
static void cell_parts(uint64_t total, const part *parts, size_t n_parts, char *text, size_t capacity) {
    int used = snprintf(text, capacity, "%s", kvf__show_count(total).text);
    for (size_t i = 0, n = 0; i < n_parts && used > 0 && (size_t)used < capacity; i++)
        if (parts[i].n)
            used += snprintf(text + used, capacity - (size_t)used, "%s%s %s", n++ ? ", " : ": ",
                             kvf__show_count(parts[i].n).text, parts[i].what);
}

static uint64_t n_requests(const kvf__tally *t) { return t->n_done + t->n_failed + t->n_unfinished; }
static uint64_t n_answers(const kvf__tally *t) { return kvf__tally_answers(t) + t->n_cut; }

static void cell_requests(const kvf__tally *t, char *text, size_t capacity) {
    const part parts[] = {
        {t->n_done, "done"}, {t->n_failed, "error"}, {t->n_unfinished, "unfinished"}, {t->n_skipped, "done before"}};
    cell_parts(n_requests(t), parts, sizeof parts / sizeof *parts, text, capacity);
}
static void cell_answers(const kvf__tally *t, char *text, size_t capacity) {
    const part parts[] = {
        {t->n_stop, "stop"}, {t->n_length, "length"}, {t->n_error, "error"}, {t->n_cut, "unfinished"}};
    cell_parts(n_answers(t), parts, sizeof parts / sizeof *parts, text, capacity);
}

static void cell_wall(const kvf__tally *t, char *text, size_t capacity) {
    snprintf(text, capacity, "%s", kvf__show_seconds(t->wall_s).text);
}

static void cell_rate(uint64_t tokens, double seconds, char *text, size_t capacity) {
    snprintf(text, capacity, "%s (%s tokens)", kvf__show_rate(tokens, seconds).text, kvf__show_count(tokens).text);
}
static void cell_prefill(const kvf__tally *t, char *text, size_t capacity) {
    cell_rate(t->stats.n_prompt_tokens, t->stats.prefill_s, text, capacity);
}
static void cell_decode(const kvf__tally *t, char *text, size_t capacity) {
    cell_rate(t->stats.n_decode_tokens, t->stats.decode_s, text, capacity);
}
void kvf__show_repetition(const kvf_engine_stats *s, char *text, size_t capacity) {
    double tokens = s->n_prompt_tokens ? (double)s->n_repeat_tokens / (double)s->n_prompt_tokens : 0;
    double seconds = s->prefill_s > 0 ? s->repeat_s / s->prefill_s : 0;
    snprintf(text, capacity, "%.24s tokens (%.3g%% of the prompts', %.2g times their time)",
             kvf__show_count(s->n_repeat_tokens).text, 100 * tokens, seconds);
}
static void cell_repetition(const kvf__tally *t, char *text, size_t capacity) {
    kvf__show_repetition(&t->stats, text, capacity);
}
static void cell_batch(const kvf__tally *t, char *text, size_t capacity) {
    snprintf(text, capacity, "%s", kvf__show_count(t->stats.n_running_max).text);
}
static void cell_preempted(const kvf__tally *t, char *text, size_t capacity) {
    const kvf_engine_stats *s = &t->stats;
    int n = snprintf(text, capacity, "%s", kvf__show_count(s->n_preempted).text);
    if (s->n_recomputed_tokens)
        n += snprintf(text + n, capacity - (size_t)n, "; %s tokens computed again",
                      kvf__show_count(s->n_recomputed_tokens).text);
    if (s->prefix.again_hit_tokens)
        snprintf(text + n, capacity - (size_t)n, ", %s found", kvf__show_count(s->prefix.again_hit_tokens).text);
}
/* Of the tokens of all prompts. */
static void cell_cached(const kvf__tally *t, char *text, size_t capacity) {
    const kvf_prefix_stats *p = &t->stats.prefix;
    if (p->host_hit_tokens)
        snprintf(text, capacity, "%s of %s tokens, %s on the host", kvf__show_count(p->hit_tokens).text,
                 kvf__show_count(p->query_tokens).text, kvf__show_count(p->host_hit_tokens).text);
    else if (p->query_tokens)
        snprintf(text, capacity, "%s of %s tokens", kvf__show_count(p->hit_tokens).text,
                 kvf__show_count(p->query_tokens).text);
    else
        snprintf(text, capacity, "-");
}
static void cell_held(const kvf__tally *t, char *text, size_t capacity) {
    snprintf(text, capacity, "%s", kvf__show_bytes(t->stats.occupancy.held_bytes_max).text);
}
static void cell_full(const kvf__tally *t, char *text, size_t capacity) {
    snprintf(text, capacity, "%s", kvf__show_bytes(t->stats.full_bytes_max).text);
}
/* Whether the sums over requests say anything: not where none of the requests' figures is known. */
static bool known(const kvf__tally *t) { return !t->n_unknown || t->full_tokens; }

static double share(const kvf__tally *t) { return (double)t->held_tokens / (double)t->full_tokens; }
static void cell_share(const kvf__tally *t, char *text, size_t capacity) {
    if (t->full_tokens)
        snprintf(text, capacity, "%.1f%%", share(t) * 100);
    else
        snprintf(text, capacity, "-");
}
static void cell_sum(const kvf__tally *t, uint64_t n, char *text, size_t capacity) {
    snprintf(text, capacity, "%s", known(t) ? kvf__show_count(n).text : "-");
}
static void cell_kept(const kvf__tally *t, char *text, size_t capacity) { cell_sum(t, t->kept, text, capacity); }
static void cell_merged(const kvf__tally *t, char *text, size_t capacity) { cell_sum(t, t->merged, text, capacity); }
static void cell_dropped(const kvf__tally *t, char *text, size_t capacity) { cell_sum(t, t->dropped, text, capacity); }

static void say_early(const kvf__tally *t, bool labelled) {
    if (t->n_early)
        fprintf(stderr, "%s%s%s request%s ended early: the KV memory was full (--kv-memory)\n",
                labelled ? t->label : "", labelled ? ": " : "", kvf__show_count(t->n_early).text,
                t->n_early == 1 ? "" : "s");
}

static void say_same(const kvf__same_sum *s) {
    uint64_t n = s->n_compared - s->n_same;
    kvf__short all = kvf__show_count(s->n_compared), same = kvf__show_count(s->n_same);
    if (!s->n_compared) return;
    if (!n)
        fprintf(stderr, "%s of %s answers are the same with both\n", same.text, all.text);
    else if (n == 1)
        fprintf(stderr, "%s of %s answers are the same with both; the other parts at token %u\n", same.text, all.text,
                s->latest);
    else
        fprintf(stderr,
                "%s of %s answers are the same with both; the others part at token %u in the median (%u to %u)\n",
                same.text, all.text, s->median, s->earliest, s->latest);
}

void kvf__report_line(const kvf__tally *t) {
    const kvf_engine_stats *s = &t->stats;
    char held[CELL_BYTES];
    if (!s->n_steps) return; /* it was refused */
    cell_share(t, held, sizeof held);
    fprintf(stderr, "%s + %s tokens in %s: prefill %s, decode %s; KV %s", kvf__show_count(t->prompt_tokens).text,
            kvf__show_count(t->completion_tokens).text, kvf__show_seconds(t->wall_s).text,
            kvf__show_rate(s->n_prompt_tokens, s->prefill_s).text, kvf__show_rate(s->n_decode_tokens, s->decode_s).text,
            kvf__show_bytes(s->occupancy.held_bytes_max).text);
    char repetition[CELL_BYTES];
    kvf__show_repetition(s, repetition, sizeof repetition);
    if (s->n_repeat_tokens) fprintf(stderr, ", repetition %s", repetition);
    if (!kvf__policy_keeps_all(&t->policy)) fprintf(stderr, ", %s of the tokens held at the end (%s)", held, t->label);
    fputc('\n', stderr);
    say_early(t, false);
}

void kvf__report_text(const kvf__cli *cli, const kvf_model_info *info, uint32_t n_threads, const kvf__tally *tallies,
                      uint32_t n) {
    static const struct {
        const char *label;
        cell_fn cell;
    } rows[] = {{"policy", cell_label},
                {"requests", cell_requests},
                {"answers", cell_answers},
                {"wall time", cell_wall},
                {"prefill", cell_prefill},
                {"repetition", cell_repetition},
                {"decode", cell_decode},
                {"batch size reached", cell_batch},
                {"preemptions", cell_preempted},
                {"found in the prefix cache", cell_cached},
                {"KV held, at most", cell_held},
                {"  with a full cache", cell_full},
                {"tokens held at the end", cell_share},
                {"tokens kept*", cell_kept},
                {"tokens merged*", cell_merged},
                {"tokens dropped*", cell_dropped}};
    fprintf(stderr, "\n%s, %u layers; %s of %s KV in blocks of %u; %u thread%s\n\n",
            info->name[0] ? info->name : info->architecture, info->n_layers, kvf__show_bytes(cli->kv_memory).text,
            cli->kv_dtype, cli->block_size, n_threads, n_threads == 1 ? "" : "s");
    enum { N_ROWS = sizeof rows / sizeof rows[0] };
    size_t width = COLUMN_WIDTH; /* of all columns but the last */
    for (size_t i = 0; i < N_ROWS && n > 1; i++) {
        char text[CELL_BYTES] = "";
        rows[i].cell(&tallies[0], text, sizeof text);
        if (strlen(text) + 2 > width) width = strlen(text) + 2;
    }
    uint64_t n_repeat = 0;
    for (uint32_t c = 0; c < n; c++) n_repeat += tallies[c].stats.n_repeat_tokens;
    for (size_t i = 0; i < N_ROWS; i++) {
        if (rows[i].cell == cell_repetition && !n_repeat) continue;
        fprintf(stderr, "%-*s", LABEL_WIDTH, rows[i].label);
        for (uint32_t c = 0; c < n; c++) {
            char text[CELL_BYTES] = "";
            rows[i].cell(&tallies[c], text, sizeof text);
            fprintf(stderr, "%-*s", c + 1 < n ? (int)width : 0, text);
        }
        fputc('\n', stderr);
    }
    fputs("* over all layers and KV heads\n", stderr);
    if (n > 1) say_same(&tallies[1].same);
    for (uint32_t c = 0; c < n; c++) say_early(&tallies[c], n > 1);
    const kvf__tally *t = &tallies[0];
    double *mean = t->n_measured ? calloc(t->n_layers, sizeof *mean) : NULL;
    if (!mean) return;
    for (uint32_t l = 0; l < t->n_layers; l++) mean[l] = (double)t->blocks[l] / (double)t->n_measured;
    kvf__chart(mean, t->n_layers, (double)t->full_blocks / (double)t->n_measured);
    free(mean);
}

/* ---- JSON ------------------------------------------------------------------------------------------------- */

static json_t *count(uint64_t n) { return json_integer((json_int_t)n); }

static json_t *sum_json(const kvf__tally *t, uint64_t n) { return known(t) ? count(n) : json_null(); }

static json_t *phase(uint64_t tokens, double seconds) {
    return json_pack("{s:o, s:o, s:o}", "tokens", count(tokens), "seconds", kvf__json_number(seconds),
                     "tokens_per_second", seconds > 0 ? kvf__json_number((double)tokens / seconds) : json_null());
}

static json_t *prefix_json(const kvf_prefix_stats *p) {
    const struct {
        const char *name;
        uint64_t n;
    } figures[] = {{"queries", p->queries},
                   {"hits", p->hits},
                   {"query_tokens", p->query_tokens},
                   {"hit_tokens", p->hit_tokens},
                   {"recompute_queries", p->again_queries},
                   {"recompute_tokens", p->again_tokens},
                   {"recompute_saved_tokens", p->again_hit_tokens},
                   {"evicted", p->evicted},
                   {"nodes", p->n_nodes},
                   {"blocks", p->n_cached},
                   {"snapshots", p->n_snapshots},
                   {"snapshot_bytes", p->snapshot_bytes},
                   {"snapshots_evicted", p->snapshots_evicted},
                   {"host_hit_tokens", p->host_hit_tokens},
                   {"offloaded", p->offloaded},
                   {"loaded", p->loaded},
                   {"host_nodes", p->n_host_nodes}};
    json_t *o = json_object();
    for (size_t i = 0; i < sizeof figures / sizeof figures[0]; i++)
        json_object_set_new(o, figures[i].name, count(figures[i].n));
    return o;
}

static json_t *tally_json(const kvf__tally *t) {
    json_t *o = json_object(), *mean = json_array(), *max = json_array();
    const kvf_engine_stats *s = &t->stats;
    kvf__policy_put(o, &t->policy);
    json_object_set_new(o, "preset", t->preset[0] ? json_string(t->preset) : json_null());
    json_object_set_new(o, "requests",
                        json_pack("{s:o, s:o, s:o, s:o, s:o}", "total", count(n_requests(t)), "done", count(t->n_done),
                                  "error", count(t->n_failed), "unfinished", count(t->n_unfinished), "done_before",
                                  count(t->n_skipped)));
    json_object_set_new(o, "answers",
                        json_pack("{s:o, s:o, s:o, s:o, s:o}", "total", count(n_answers(t)), "stop", count(t->n_stop),
                                  "length", count(t->n_length), "error", count(t->n_error), "unfinished",
                                  count(t->n_cut)));
    json_object_set_new(o, "ended_early", count(t->n_early));
    json_object_set_new(o, "wall_seconds", kvf__json_number(t->wall_s));
    json_object_set_new(o, "prefill", phase(s->n_prompt_tokens, s->prefill_s));
    json_object_set_new(o, "decode", phase(s->n_decode_tokens, s->decode_s));
    json_object_set_new(o, "recomputed", phase(s->n_recomputed_tokens, s->recompute_s));
    json_object_set_new(o, "repeated", phase(s->n_repeat_tokens, s->repeat_s));
    json_object_set_new(o, "forward_seconds", kvf__json_number(s->forward_s));
    json_object_set_new(o, "policy_seconds", kvf__json_number(s->policy_s));
    json_object_set_new(o, "steps", count(s->n_steps));
    json_object_set_new(o, "batch_size_reached", count(s->n_running_max));
    json_object_set_new(o, "preemptions", count(s->n_preempted));
    json_object_set_new(o, "swapped_out", count(s->n_swapped_out));
    json_object_set_new(o, "swapped_in", count(s->n_swapped_in));
    json_object_set_new(o, "host_bytes_max", count(s->host_bytes_max));
    json_object_set_new(o, "prefix_cache", prefix_json(&s->prefix));
    json_object_set_new(o, "prompt_tokens", count(t->prompt_tokens));
    json_object_set_new(o, "completion_tokens", count(t->completion_tokens));
    json_object_set_new(o, "kv_bytes_held_max", count(s->occupancy.held_bytes_max));
    json_object_set_new(o, "kv_bytes_full_max", count(s->full_bytes_max));
    json_object_set_new(o, "blocks_total", count(s->occupancy.blocks.n_total));
    json_object_set_new(o, "blocks_held_max", count(s->occupancy.blocks.n_held_max));
    json_object_set_new(o, "block_bytes", count(s->block_bytes));
    json_object_set_new(o, "held_tokens", sum_json(t, t->held_tokens));
    json_object_set_new(o, "full_tokens", sum_json(t, t->full_tokens));
    json_object_set_new(o, "effective_ratio", t->full_tokens ? kvf__json_number(share(t)) : json_null());
    json_object_set_new(o, "kept", sum_json(t, t->kept));
    json_object_set_new(o, "merged", sum_json(t, t->merged));
    json_object_set_new(o, "dropped", sum_json(t, t->dropped));
    double n = t->n_measured ? (double)t->n_measured : 1;
    for (uint32_t l = 0; l < t->n_layers; l++) {
        json_array_append_new(mean, kvf__json_number((double)t->blocks[l] / n));
        json_array_append_new(max, count(t->blocks_max[l]));
    }
    json_object_set_new(o, "blocks_per_layer", mean);
    json_object_set_new(o, "blocks_per_layer_full", kvf__json_number((double)t->full_blocks / n));
    json_object_set_new(o, "blocks_per_layer_max", max);
    return o;
}

static json_t *same_json(const kvf__same_sum *s) {
    bool parts = s->n_same < s->n_compared;
    return json_pack("{s:o, s:o, s:o, s:o, s:o}", "compared", count(s->n_compared), "same", count(s->n_same),
                     "differ_at_median", parts ? count(s->median) : json_null(), "differ_at_earliest",
                     parts ? count(s->earliest) : json_null(), "differ_at_latest",
                     parts ? count(s->latest) : json_null());
}

json_t *kvf__report_json(const kvf__cli *cli, const kvf_model_info *info, uint32_t n_threads, const kvf__tally *tallies,
                         uint32_t n) {
    json_t *o = json_object();
    json_object_set_new(o, "version", json_string(kvf_version()));
    json_object_set_new(o, "model", kvf__json_text(info->name, strlen(info->name)));
    json_object_set_new(o, "n_layers", count(info->n_layers));
    json_object_set_new(o, "threads", count(n_threads));
    json_object_set_new(o, "kv_memory_bytes", count(cli->kv_memory));
    json_object_set_new(o, "kv_dtype", json_string(cli->kv_dtype));
    json_object_set_new(o, "block_size", count(cli->block_size));
    json_t *figures = tally_json(&tallies[0]);
    json_object_update(o, figures);
    json_decref(figures);
    if (n < 2) return o;
    json_t *compare = tally_json(&tallies[1]), *same = same_json(&tallies[1].same);
    json_object_update(json_object_get(compare, "answers"), same);
    json_decref(same);
    json_object_set_new(o, "compare", compare);
    return o;
}
