/* Writes the recorded occupancy as JSON, CSV and Prometheus text. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/cli.h"
#include "tools/occupancy.h"

/* ---- JSON ------------------------------------------------------------------------------------------ */

static json_t *whole(uint64_t n) { return json_integer((json_int_t)n); }
static void put(json_t *o, const char *key, uint64_t n) { json_object_set_new(o, key, whole(n)); }
static void put_real(json_t *o, const char *key, double x) { json_object_set_new(o, key, kvf__json_number(x)); }
static void put_text(json_t *o, const char *key, const char *text) {
    json_object_set_new(o, key, kvf__json_text(text, strlen(text)));
}

/* Seconds to the microsecond: doubles are written with all their digits otherwise. */
static json_t *seconds(double s) { return isfinite(s) ? json_real(round(s * 1e6) / 1e6) : json_null(); }

static json_t *histogram_json(const kvf_histogram *h) {
    json_t *o = json_object(), *buckets = json_array();
    put(o, "n", h->n);
    put(o, "sum", h->sum);
    put(o, "max", h->max);
    uint32_t last = 0;
    for (uint32_t b = 0; b < KVF_HISTOGRAM_BUCKETS; b++)
        if (h->buckets[b]) last = b + 1;
    for (uint32_t b = 0; b < last; b++) json_array_append_new(buckets, whole(h->buckets[b]));
    json_object_set_new(o, "buckets", buckets); /* bucket b: values in [2^(b-1), 2^b), bucket 0: 0 */
    return o;
}

/* Means over the requests whose head groups have sizes of their own; null where there is none. */
static double group_mean(const kvf__occ *o, uint32_t l, uint32_t g) {
    uint64_t n = o->layers[l].n_groups_keep;
    return n ? (double)o->group_keep[(size_t)l * o->n_groups + g] / (double)n : NAN;
}

static json_t *groups_json(const kvf__occ *o, uint32_t l) {
    if (!o->layers[l].n_groups_keep) return json_null();
    json_t *list = json_array();
    for (uint32_t g = 0; g < o->n_groups; g++) json_array_append_new(list, json_real(group_mean(o, l, g)));
    return list;
}

static json_t *layer_json(const kvf__occ *o, uint32_t l) {
    const kvf__occ_layer *layer = &o->layers[l];
    const kvf_profile_layer *p = &o->profile_layers[l];
    json_t *x = json_object();
    put(x, "layer", l);
    put_real(x, "density", layer->n_density ? layer->density_sum / (double)layer->n_density : NAN);
    put_real(x, "keep_mean", layer->n_keep ? (double)layer->keep_sum / (double)layer->n_keep : NAN);
    json_object_set_new(x, "keep_min", layer->n_keep ? whole(layer->keep_min) : json_null());
    json_object_set_new(x, "keep_max", layer->n_keep ? whole(layer->keep_max) : json_null());
    json_object_set_new(x, "group_keep_mean", groups_json(o, l));
    put(x, "held", p->held);
    put(x, "held_max", p->held_max);
    put(x, "entries_max", p->entries_max);
    put(x, "shared_max", p->shared_max);
    put(x, "cached", p->cached);
    put(x, "slots_used", p->slots_used);
    put(x, "slots_idle", p->slots_idle);
    put(x, "slots_idle_max", p->slots_idle_max);
    put(x, "taken_blocks", p->taken_blocks);
    put(x, "freed_blocks", p->freed_blocks);
    put(x, "evicted_slots", p->evicted_slots);
    return x;
}

static json_t *pool_json(const kvf_profile *p) {
    json_t *o = json_object();
#define PUT(field) put(o, #field, p->field)
    PUT(total), PUT(free), PUT(held), PUT(cached), PUT(outside), PUT(promised), PUT(shared);
    PUT(held_max), PUT(shared_max), PUT(cached_max), PUT(promised_max), PUT(pages_held), PUT(pages_held_max);
    PUT(seqs), PUT(seqs_max), PUT(slots_used), PUT(slots_idle), PUT(slots_idle_max), PUT(fragmentation_ppm);
    PUT(taken_blocks), PUT(shared_blocks), PUT(freed_blocks), PUT(freed_by_end), PUT(freed_by_compaction);
    PUT(freed_by_rollback), PUT(freed_by_release), PUT(freed_by_eviction), PUT(freed_by_swap), PUT(freed_by_window);
    PUT(freed_by_adoption), PUT(freed_by_removal), PUT(copied_blocks);
    PUT(copied_pages), PUT(compactions), PUT(swapped_out_blocks), PUT(swapped_in_blocks);
    PUT(host_held), PUT(host_held_max), PUT(host_cached), PUT(host_cached_max), PUT(offloaded_blocks),
        PUT(loaded_blocks);
    PUT(evicted_slots), PUT(evicted_bytes), PUT(freed_bytes), PUT(events), PUT(events_dropped), PUT(n_clock_back);
#undef PUT
    json_object_set_new(o, "lifetime_ns", histogram_json(&p->lifetime));
    json_object_set_new(o, "idle_time_ns", histogram_json(&p->idle_time));
    json_object_set_new(o, "reuse_gap_ns", histogram_json(&p->reuse_gap));
    json_object_set_new(o, "free_gap_ns", histogram_json(&p->free_gap));
    return o;
}

static json_t *prefix_json(const kvf_prefix_stats *p) {
    if (!p->struct_size) return json_null();
    json_t *o = json_object();
#define PUT(field) put(o, #field, p->field)
    PUT(queries), PUT(hits), PUT(query_tokens), PUT(hit_tokens), PUT(stored), PUT(evicted), PUT(removed), PUT(adopted);
    PUT(duplicates), PUT(snapshots_put), PUT(snapshots_evicted), PUT(n_nodes_max), PUT(host_hit_tokens);
    PUT(offloaded), PUT(left_device), PUT(left_host), PUT(loaded), PUT(evicted_blocks);
    PUT(again_queries), PUT(again_tokens), PUT(again_hit_tokens);
#undef PUT
    put_real(o, "hit_ratio", p->query_tokens ? (double)p->hit_tokens / (double)p->query_tokens : NAN);
    return o;
}

static json_t *step_json(const kvf__occ_step *s) {
    json_t *o = json_object();
    put(o, "step", s->step);
    json_object_set_new(o, "begin_s", seconds(s->begin_s));
    json_object_set_new(o, "end_s", seconds(s->end_s));
    json_object_set_new(o, "compaction_s", seconds(s->compaction_s));
    put(o, "running", s->n_running);
    put(o, "waiting", s->n_waiting);
    put(o, "prefill_tokens", s->n_prefill_tokens);
    put(o, "decode_tokens", s->n_decode_tokens);
    put(o, "recomputed_tokens", s->n_again_tokens);
    put(o, "preempted", s->n_preempted);
    put(o, "compactions", s->n_compactions);
    put(o, "held", s->held);
    put(o, "full", s->full);
    return o;
}

static json_t *request_json(const kvf__occ_request *r) {
    json_t *o = json_object();
    put(o, "id", r->id);
    json_object_set_new(o, "arrival_s", seconds(r->arrival_s));
    json_object_set_new(o, "start_s", seconds(r->start_s));
    json_object_set_new(o, "first_token_s", seconds(r->first_token_s));
    json_object_set_new(o, "end_s", seconds(r->end_s));
    put(o, "prompt_tokens", r->n_prompt);
    put(o, "output_tokens", r->n_output);
    put(o, "preempted", r->n_preempted);
    json_object_set_new(o, "queue_steps", r->queue_steps == UINT64_MAX ? json_null() : whole(r->queue_steps));
    put_text(o, "end", r->end ? r->end : "");
    return o;
}

/* Columns rather than rows: a tenth of the bytes. */
static json_t *series_json(const kvf__occ *o) {
    static const char *const names[] = {"begin_s",    "end_s",      "held",       "full",   "cached",    "promised",
                                        "running",    "waiting",    "prefill",    "decode", "preempted", "compactions",
                                        "slots_used", "slots_idle", "held_after", "shared", "recomputed"};
    enum { N = sizeof names / sizeof *names };
    json_t *x = json_object(), *columns[N], *blocks = json_array();
    for (int c = 0; c < N; c++) columns[c] = json_array();
    for (uint32_t i = 0; i < o->n_points; i++) {
        const kvf__occ_step *p = &o->points[i];
        const uint64_t values[N] = {0,
                                    0,
                                    p->held,
                                    p->full,
                                    p->cached,
                                    p->promised,
                                    p->n_running,
                                    p->n_waiting,
                                    p->n_prefill_tokens,
                                    p->n_decode_tokens,
                                    p->n_preempted,
                                    p->n_compactions,
                                    p->slots_used,
                                    p->slots_idle,
                                    p->held_after,
                                    p->shared,
                                    p->n_again_tokens};
        json_array_append_new(columns[0], seconds(p->begin_s));
        json_array_append_new(columns[1], seconds(p->end_s));
        for (int c = 2; c < N; c++) json_array_append_new(columns[c], whole(values[c]));
        json_t *row = json_array();
        for (uint32_t l = 0; l < o->n_layers; l++)
            json_array_append_new(row, whole(o->point_blocks[(size_t)i * o->n_layers + l]));
        json_array_append_new(blocks, row);
    }
    put(x, "steps_per_point", o->stride);
    for (int c = 0; c < N; c++) json_object_set_new(x, names[c], columns[c]);
    json_object_set_new(x, "blocks", blocks);
    return x;
}

json_t *kvf__occ_json(const kvf__occ *o) {
    json_t *x = json_object(), *layers = json_array(), *slowest = json_array(), *longest = json_array();
    put_text(x, "version", kvf_version());
    put_text(x, "title", o->title);
    put_text(x, "source", o->source);
    put_text(x, "policy_label", o->policy);
    put_text(x, "clock", o->clock);
    put(x, "n_layers", o->n_layers);
    put(x, "block_size", o->block_size);
    put(x, "n_blocks", o->n_blocks);
    put(x, "block_bytes", o->block_bytes);
    put(x, "steps", o->n_steps);
    json_object_set_new(x, "seconds", seconds(o->end_s));
    put(x, "requests", o->n_requests);
    put(x, "answers", o->n_answers);
    put(x, "prompt_tokens", o->prompt_tokens);
    put(x, "output_tokens", o->output_tokens);
    put(x, "shared_tokens", o->shared_tokens);
    put(x, "preemptions", o->n_preempted);
    put(x, "recomputed_tokens", o->n_again_tokens);
    put(x, "peak_blocks", o->profile.held_max);
    put(x, "peak_blocks_full", o->full_max);
    put(x, "running_max", o->running_max);
    put(x, "waiting_max", o->waiting_max);
    json_object_set_new(x, "wait_mean_s", seconds(o->n_started ? o->wait_sum_s / (double)o->n_started : NAN));
    json_object_set_new(x, "wait_max_s", seconds(o->wait_max_s));
    put_real(x, "queue_steps_mean",
             o->queue_histogram.n ? (double)o->queue_steps_sum / (double)o->queue_histogram.n : NAN);
    put(x, "queue_steps_max", o->queue_steps_max);
    json_object_set_new(x, "queue_steps", histogram_json(&o->queue_histogram));
    json_object_set_new(x, "pool", pool_json(&o->profile));
    json_object_set_new(x, "prefix_cache", prefix_json(&o->prefix));
    for (uint32_t l = 0; l < o->n_layers; l++) json_array_append_new(layers, layer_json(o, l));
    for (uint32_t i = 0; i < o->n_slowest; i++) json_array_append_new(slowest, step_json(&o->slowest[i]));
    for (uint32_t i = 0; i < o->n_longest; i++) json_array_append_new(longest, request_json(&o->longest[i]));
    json_object_set_new(x, "layers", layers);
    json_object_set_new(x, "slowest_steps", slowest);
    json_object_set_new(x, "longest_waits", longest);
    json_object_set_new(x, "series", series_json(o));
    return x;
}

/* ---- CSV: a row per moment ----------------------------------------------------------------------------- */

void kvf__occ_csv(const kvf__occ *o, FILE *out) {
    fputs(
        "step,begin_s,end_s,running,waiting,prefill_tokens,decode_tokens,recomputed_tokens,preempted,compactions,held_blocks,"
        "full_blocks,cached_blocks,promised_blocks,shared_blocks,slots_used,slots_idle,held_after_blocks,free_blocks",
        out);
    for (uint32_t l = 0; l < o->n_layers; l++) fprintf(out, ",layer_%u_blocks", l);
    fputc('\n', out);
    for (uint32_t i = 0; i < o->n_points; i++) {
        const kvf__occ_step *p = &o->points[i];
        fprintf(out, "%llu,%.6f,%.6f,%u,%u,%u,%u,%u,%u,%u", (unsigned long long)p->step, p->begin_s, p->end_s,
                p->n_running, p->n_waiting, p->n_prefill_tokens, p->n_decode_tokens, p->n_again_tokens, p->n_preempted,
                p->n_compactions);
        const uint64_t values[] = {p->held,       p->full,       p->cached,
                                   p->promised,   p->shared,     p->slots_used,
                                   p->slots_idle, p->held_after, o->n_blocks - p->held_after - p->cached};
        for (size_t k = 0; k < sizeof values / sizeof *values; k++)
            fprintf(out, ",%llu", (unsigned long long)values[k]);
        for (uint32_t l = 0; l < o->n_layers; l++) fprintf(out, ",%u", o->point_blocks[(size_t)i * o->n_layers + l]);
        fputc('\n', out);
    }
}

/* ---- Prometheus text -------------------------------------------------------------------------------------- */

static void head(FILE *out, const char *name, const char *type, const char *help) {
    fprintf(out, "# HELP kvfold_%s %s\n# TYPE kvfold_%s %s\n", name, help, name, type);
}

static void sample(FILE *out, const char *name, const char *type, const char *help, uint64_t value) {
    head(out, name, type, help);
    fprintf(out, "kvfold_%s %llu\n", name, (unsigned long long)value);
}

/* Values below 2^b nanoseconds count in the bucket of that bound, so le is just under it; empty ends are left out. */
static void histogram(FILE *out, const char *name, const char *help, const kvf_histogram *h, double unit) {
    uint64_t below = 0;
    uint32_t first = KVF_HISTOGRAM_BUCKETS, last = 0;
    for (uint32_t b = 0; b < KVF_HISTOGRAM_BUCKETS; b++)
        if (h->buckets[b]) first = b < first ? b : first, last = b;
    head(out, name, "histogram", help);
    for (uint32_t b = first; b <= last && h->n; b++) {
        below += h->buckets[b];
        double bound = b ? ldexp(1, (int)b) - 1 : 0; /* the largest whole number of the bucket */
        fprintf(out, "kvfold_%s_bucket{le=\"%.10g\"} %llu\n", name, bound * unit, (unsigned long long)below);
    }
    fprintf(out, "kvfold_%s_bucket{le=\"+Inf\"} %llu\n", name, (unsigned long long)h->n);
    fprintf(out, "kvfold_%s_sum %.10g\n", name, (double)h->sum * unit);
    fprintf(out, "kvfold_%s_count %llu\n", name, (unsigned long long)h->n);
}

static void layer_samples(const kvf__occ *o, FILE *out) {
    static const struct {
        const char *name, *type, *help;
        size_t offset;
    } rows[] = {
#define ROW(field, name, type, help) {name, type, help, offsetof(kvf_profile_layer, field)}
        ROW(held, "layer_blocks_held", "gauge", "Distinct blocks that tables of the layer hold."),
        ROW(held_max, "layer_blocks_held_max", "gauge", "High-water mark of layer_blocks_held."),
        ROW(shared, "layer_blocks_shared", "gauge", "Of them, those with more than one holder."),
        ROW(cached, "layer_blocks_cached", "gauge", "Blocks of the layer kept for the prefix cache alone."),
        ROW(slots_used, "layer_slots_used", "gauge", "Token slots in use, over the layer's tables."),
        ROW(slots_idle, "layer_slots_idle", "gauge", "Token slots of held blocks beyond those in use."),
        ROW(taken_blocks, "layer_blocks_taken_total", "counter", "Blocks taken for the layer."),
        ROW(freed_blocks, "layer_blocks_freed_total", "counter", "Blocks of the layer that fell free."),
        ROW(evicted_slots, "layer_slots_evicted_total", "counter", "Token slots that compactions evicted."),
#undef ROW
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        head(out, rows[i].name, rows[i].type, rows[i].help);
        for (uint32_t l = 0; l < o->n_layers; l++) {
            uint64_t value;
            memcpy(&value, (const char *)&o->profile_layers[l] + rows[i].offset, sizeof value);
            fprintf(out, "kvfold_%s{layer=\"%u\"} %llu\n", rows[i].name, l, (unsigned long long)value);
        }
    }
    head(out, "layer_density_mean", "gauge", "Mean density F of the layer over requests.");
    for (uint32_t l = 0; l < o->n_layers; l++)
        if (o->layers[l].n_density)
            fprintf(out, "kvfold_layer_density_mean{layer=\"%u\"} %.10g\n", l,
                    o->layers[l].density_sum / (double)o->layers[l].n_density);
    head(out, "layer_budget_tokens_mean", "gauge", "Mean budget of the layer over requests, in tokens.");
    for (uint32_t l = 0; l < o->n_layers; l++)
        if (o->layers[l].n_keep)
            fprintf(out, "kvfold_layer_budget_tokens_mean{layer=\"%u\"} %.10g\n", l,
                    (double)o->layers[l].keep_sum / (double)o->layers[l].n_keep);
    if (!o->n_groups) return;
    head(out, "group_budget_tokens_mean", "gauge",
         "Mean budget of a head group over the requests whose groups have budgets of their own, in tokens.");
    for (uint32_t l = 0; l < o->n_layers; l++)
        for (uint32_t g = 0; g < o->n_groups && o->layers[l].n_groups_keep; g++)
            fprintf(out, "kvfold_group_budget_tokens_mean{layer=\"%u\",group=\"%u\"} %.10g\n", l, g,
                    group_mean(o, l, g));
}

void kvf__occ_prometheus(const kvf__occ *o, FILE *out) {
    const kvf_profile *p = &o->profile;
    sample(out, "blocks", "gauge", "Blocks of the pool.", p->total);
    sample(out, "block_bytes", "gauge", "Bytes of one block's K and V.", p->block_bytes);
    sample(out, "blocks_free", "gauge", "Blocks that are free.", p->free);
    sample(out, "blocks_held", "gauge", "Blocks that a table, a handle or a pending copy holds.", p->held);
    sample(out, "blocks_cached", "gauge", "Blocks kept for the prefix cache alone.", p->cached);
    sample(out, "host_blocks_held", "gauge", "Blocks of the host that swapped sequences or copies hold.", p->host_held);
    sample(out, "host_blocks_cached", "gauge", "Blocks of the host kept for the prefix cache.", p->host_cached);
    sample(out, "blocks_promised", "gauge", "Free blocks that are promised to tables.", p->promised);
    sample(out, "blocks_shared", "gauge", "Blocks with more than one holder.", p->shared);
    sample(out, "blocks_held_max", "gauge", "High-water mark of blocks_held.", p->held_max);
    sample(out, "blocks_full_cache_max", "gauge", "What a full cache would have held at most.", o->full_max);
    sample(out, "score_pages_held", "gauge", "Score pages in use.", p->pages_held);
    sample(out, "sequences", "gauge", "Sequences alive.", p->seqs);
    sample(out, "slots_used", "gauge", "Token slots in use, over all tables.", p->slots_used);
    sample(out, "slots_idle", "gauge", "Token slots of held blocks beyond those in use.", p->slots_idle);
    head(out, "fragmentation_ratio", "gauge", "Share of slots_idle in the slots of all tables.");
    fprintf(out, "kvfold_fragmentation_ratio %.6f\n", (double)p->fragmentation_ppm * 1e-6);
    sample(out, "blocks_taken_total", "counter", "Blocks taken.", p->taken_blocks);
    head(out, "blocks_freed_total", "counter", "Blocks that fell free, by cause.");
    fprintf(out, "kvfold_blocks_freed_total{cause=\"end\"} %llu\n", (unsigned long long)p->freed_by_end);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"compaction\"} %llu\n", (unsigned long long)p->freed_by_compaction);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"rollback\"} %llu\n", (unsigned long long)p->freed_by_rollback);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"release\"} %llu\n", (unsigned long long)p->freed_by_release);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"eviction\"} %llu\n", (unsigned long long)p->freed_by_eviction);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"swap\"} %llu\n", (unsigned long long)p->freed_by_swap);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"window\"} %llu\n", (unsigned long long)p->freed_by_window);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"adoption\"} %llu\n", (unsigned long long)p->freed_by_adoption);
    fprintf(out, "kvfold_blocks_freed_total{cause=\"removal\"} %llu\n", (unsigned long long)p->freed_by_removal);
    head(out, "blocks_swapped_total", "counter", "Blocks that moved to the host and back.");
    fprintf(out, "kvfold_blocks_swapped_total{direction=\"out\"} %llu\n", (unsigned long long)p->swapped_out_blocks);
    fprintf(out, "kvfold_blocks_swapped_total{direction=\"in\"} %llu\n", (unsigned long long)p->swapped_in_blocks);
    sample(out, "blocks_copied_total", "counter", "Blocks copied on write.", p->copied_blocks);
    sample(out, "compactions_total", "counter", "Compactions of one layer of one sequence.", p->compactions);
    sample(out, "evicted_bytes_total", "counter", "Bytes of the slots that compactions evicted.", p->evicted_bytes);
    sample(out, "compaction_freed_bytes_total", "counter",
           "Bytes that compactions gave back, as whole blocks, to the pool or to the prefix cache.", p->freed_bytes);
    sample(out, "profile_events_dropped_total", "counter", "Events that found the ring full.", p->events_dropped);
    if (o->prefix.struct_size) {
        const kvf_prefix_stats *c = &o->prefix;
        sample(out, "prefix_queries_total", "counter", "Prompts looked for in the prefix cache, each once.",
               c->queries);
        sample(out, "prefix_hits_total", "counter", "Of them, those of which tokens were found.", c->hits);
        sample(out, "prefix_query_tokens_total", "counter", "Tokens of those prompts.", c->query_tokens);
        sample(out, "prefix_hit_tokens_total", "counter", "Of them, those that were found.", c->hit_tokens);
        sample(out, "prefix_host_hit_tokens_total", "counter", "Of them, those that lay on the host alone.",
               c->host_hit_tokens);
        sample(out, "prefix_evictions_total", "counter",
               "Block positions that left the prefix cache, or the device, for room.", c->evicted + c->left_device);
        sample(out, "prefix_evicted_blocks_total", "counter",
               "Blocks that fell free by that: those of blocks_freed_total with cause eviction.", c->evicted_blocks);
        sample(out, "prefix_recompute_queries_total", "counter",
               "Look-ups of requests that are computed again after a preemption; not among prefix_queries_total.",
               c->again_queries);
        sample(out, "prefix_recompute_saved_tokens_total", "counter",
               "Tokens of those requests that were found and not computed again; not among prefix_hit_tokens_total.",
               c->again_hit_tokens);
    }
    sample(out, "steps_total", "counter", "Steps.", o->n_steps);
    sample(out, "preemptions_total", "counter", "Requests put back into the queue.", o->n_preempted);
    sample(out, "recomputed_tokens_total", "counter", "Tokens computed again after a preemption.", o->n_again_tokens);
    sample(out, "requests_total", "counter", "Requests that have ended.", o->n_requests);
    sample(out, "answers_total", "counter", "Their answers: a request with n has several.", o->n_answers);
    layer_samples(o, out);
    histogram(out, "block_lifetime_seconds", "From the taking of a block to its falling free.", &p->lifetime, 1e-9);
    histogram(out, "block_idle_seconds", "From a block's last use to its falling free.", &p->idle_time, 1e-9);
    histogram(out, "block_reuse_gap_seconds", "From a block's last use to its next holder.", &p->reuse_gap, 1e-9);
    histogram(out, "block_free_gap_seconds", "From a block's falling free to its next taking.", &p->free_gap, 1e-9);
    histogram(out, "queue_steps", "Steps between a request's arrival and its first.", &o->queue_histogram, 1);
}

/* ---- Files ---------------------------------------------------------------------------------------------------- */

static bool ends_with(const char *path, const char *end) {
    size_t n = strlen(path), m = strlen(end);
    return n >= m && !strcmp(path + n - m, end);
}

bool kvf__occ_write_metrics(const kvf__occ *o, const char *path) {
    kvf__out_file out;
    if (!kvf__out_open(&out, path)) return false;
    bool good = true;
    if (ends_with(path, ".csv")) {
        kvf__occ_csv(o, out.file);
    } else if (ends_with(path, ".json")) {
        json_t *x = kvf__occ_json(o);
        good =
            x && json_dumpf(x, out.file, JSON_COMPACT | JSON_REAL_PRECISION(10)) == 0 && fputc('\n', out.file) != EOF;
        json_decref(x);
    } else {
        kvf__occ_prometheus(o, out.file);
    }
    return kvf__out_close(&out) && good;
}
