/* Records occupancy step by step. When the series is full it halves its resolution, so its memory stays constant. */
#define _POSIX_C_SOURCE 200809L
#include "tools/occupancy.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/files.h"

bool kvf__occ_begin(kvf__occ *o, uint32_t n_layers, uint32_t block_size, uint64_t n_blocks, uint64_t block_bytes) {
    memset(o, 0, sizeof *o);
    o->title = o->source = o->policy = "";
    o->clock = "seconds";
    o->n_layers = n_layers;
    o->block_size = block_size;
    o->n_blocks = n_blocks;
    o->block_bytes = block_bytes;
    o->stride = 1;
    o->points = calloc(KVF__OCC_POINTS, sizeof *o->points);
    o->point_blocks = calloc((size_t)KVF__OCC_POINTS * n_layers, sizeof *o->point_blocks);
    o->layers = calloc(n_layers, sizeof *o->layers);
    o->profile_layers = calloc(n_layers, sizeof *o->profile_layers);
    o->now = calloc(n_layers, sizeof *o->now);
    o->peak = calloc(n_layers, sizeof *o->peak);
    o->held_max = calloc(n_layers, sizeof *o->held_max);
    if (o->points && o->point_blocks && o->layers && o->profile_layers && o->now && o->peak && o->held_max) return true;
    kvf__say("out of memory");
    kvf__occ_free(o);
    return false;
}

void kvf__occ_free(kvf__occ *o) {
    free(o->points);
    free(o->point_blocks);
    free(o->layers);
    free(o->profile_layers);
    free(o->now);
    free(o->peak);
    free(o->held_max);
    free(o->group_keep);
    o->group_keep = NULL;
    o->points = NULL;
    o->point_blocks = NULL;
    o->layers = NULL;
    o->profile_layers = NULL;
    o->now = o->peak = NULL;
    o->held_max = NULL;
}

#define MOST(field) a->field = a->field > b->field ? a->field : b->field

/* Point a takes in what comes right after it. */
static void merge(kvf__occ_step *a, const kvf__occ_step *b) {
    a->end_s = b->end_s;
    a->compaction_s += b->compaction_s;
    a->n_preempted += b->n_preempted;
    a->n_compactions += b->n_compactions;
    MOST(n_running);
    MOST(n_waiting);
    MOST(n_prefill_tokens);
    MOST(n_decode_tokens);
    MOST(n_again_tokens);
    MOST(held);
    MOST(full);
    a->held_after = b->held_after; /* of one moment, so that they add up to the pool */
    a->cached = b->cached;
    a->promised = b->promised;
    a->shared = b->shared;
    a->slots_used = b->slots_used;
    a->slots_idle = b->slots_idle;
}

static void merge_blocks(uint32_t *a, const uint32_t *b, uint32_t n_layers) {
    for (uint32_t l = 0; l < n_layers; l++) a[l] = a[l] > b[l] ? a[l] : b[l];
}

static void halve(kvf__occ *o) {
    for (uint32_t i = 0; i < KVF__OCC_POINTS / 2; i++) {
        uint32_t *to = o->point_blocks + (size_t)i * o->n_layers;
        const uint32_t *from = o->point_blocks + (size_t)(2 * i) * o->n_layers;
        memmove(to, from, o->n_layers * sizeof *to);
        merge_blocks(to, from + o->n_layers, o->n_layers);
        o->points[i] = o->points[2 * i];
        merge(&o->points[i], &o->points[2 * i + 1]);
    }
    o->n_points = KVF__OCC_POINTS / 2;
    o->stride *= 2;
}

void kvf__occ_add_step(kvf__occ *o, const kvf__occ_step *step, const uint32_t *blocks) {
    bool joins = o->n_steps % o->stride != 0;
    if (!joins && o->n_points == KVF__OCC_POINTS) {
        halve(o);
        joins = o->n_steps % o->stride != 0;
    }
    uint32_t at = joins ? o->n_points - 1 : o->n_points++;
    uint32_t *to = o->point_blocks + (size_t)at * o->n_layers;
    if (joins) {
        merge(&o->points[at], step);
        merge_blocks(to, blocks, o->n_layers);
    } else {
        o->points[at] = *step;
        memcpy(to, blocks, o->n_layers * sizeof *to);
    }
    o->n_steps++;
    o->end_s = step->end_s;
    o->n_preempted += step->n_preempted;
    o->n_again_tokens += step->n_again_tokens;
    o->full_max = step->full > o->full_max ? step->full : o->full_max;
    o->waiting_max = step->n_waiting > o->waiting_max ? step->n_waiting : o->waiting_max;
    o->running_max = step->n_running > o->running_max ? step->n_running : o->running_max;
    double took = step->end_s - step->begin_s;
    uint32_t i = o->n_slowest;
    if (i == KVF__OCC_SLOWEST && o->slowest[i - 1].end_s - o->slowest[i - 1].begin_s >= took) return;
    if (i == KVF__OCC_SLOWEST)
        i--;
    else
        o->n_slowest++;
    for (; i && o->slowest[i - 1].end_s - o->slowest[i - 1].begin_s < took; i--) o->slowest[i] = o->slowest[i - 1];
    o->slowest[i] = *step;
}

/* One event: what is held then, and the most so far. */
static void follow(kvf__occ *o, const kvf_profile_event *e, uint64_t *most) {
    if (e->kind != KVF_PROFILE_ALLOC && e->kind != KVF_PROFILE_FREE) return;
    bool taken = e->kind == KVF_PROFILE_ALLOC;
    uint64_t n = e->n_blocks; /* a block that lay idle was not counted */
    o->now_held = taken ? o->now_held + n : o->now_held > n ? o->now_held - n : 0;
    *most = o->now_held > *most ? o->now_held : *most;
    if (e->layer >= o->n_layers) return;
    uint32_t *now = &o->now[e->layer];
    *now = taken ? *now + e->n_blocks : *now > e->n_blocks ? *now - e->n_blocks : 0;
    if (o->now[e->layer] > o->peak[e->layer]) o->peak[e->layer] = o->now[e->layer];
}

/* The maximum within a step, by its events. With a prefix cache the events do not say when a block becomes idle or is
 * used again; then the high-water mark gives it if it rose, and an upper bound if it did not. */
static uint64_t most_of(uint64_t most, uint64_t held, uint64_t max_before, uint64_t max) {
    if (max > max_before || most > max) return max;
    return most > held ? most : held;
}

bool kvf__occ_note(kvf__occ *o, kvf__chrome *chrome, const kvf_manager *manager, double zero_s, kvf__occ_step *step) {
    kvf_profile before = o->profile, p = {.struct_size = sizeof p};
    kvf_profile_event events[64];
    uint64_t most = o->now_held;
    if (kvf_profile_read(manager, &p, o->profile_layers, sizeof *o->profile_layers, o->n_layers)) return false;
    memcpy(o->peak, o->now, o->n_layers * sizeof *o->peak);
    for (uint32_t n = 64; n == 64 && !kvf_profile_drain(manager, events, 64, &n);)
        for (uint32_t i = 0; i < n; i++) {
            follow(o, &events[i], &most);
            if (events[i].kind != KVF_PROFILE_COMPACT) continue;
            double end_s = (double)events[i].time * 1e-9 - zero_s;
            kvf__chrome_compaction(chrome, end_s - (double)events[i].duration * 1e-9, end_s, &events[i]);
        }
    kvf__chrome_flush(chrome);
    bool lost = p.events_dropped != before.events_dropped; /* then the gauges alone are right */
    if (lost) most = 0, memset(o->peak, 0, o->n_layers * sizeof *o->peak);
    for (uint32_t l = 0; l < o->n_layers; l++) {
        o->now[l] = (uint32_t)o->profile_layers[l].held;
        uint64_t max = o->profile_layers[l].held_max;
        o->peak[l] = (uint32_t)most_of(o->peak[l], o->now[l], o->held_max[l], max);
        o->held_max[l] = max;
    }
    o->now_held = p.held;
    o->profile = p;
    step->held = most_of(most, p.held, before.held_max, p.held_max);
    step->held_after = p.held;
    step->cached = p.cached;
    step->promised = p.promised;
    step->shared = p.shared;
    step->slots_used = p.slots_used;
    step->slots_idle = p.slots_idle;
    step->n_compactions = (uint32_t)(p.compactions - before.compactions);
    step->compaction_s = chrome->batches_s;
    chrome->batches_s = 0;
    return true;
}

static void count(kvf_histogram *h, uint64_t value) {
    h->n++;
    h->sum += value;
    h->max = value > h->max ? value : h->max;
    h->buckets[value ? 64 - __builtin_clzll(value) : 0]++;
}

uint64_t kvf__histogram_quantile(const kvf_histogram *h, double share) {
    uint64_t below = 0, wanted = (uint64_t)ceil(share * (double)h->n);
    for (uint32_t b = 0; b < KVF_HISTOGRAM_BUCKETS; b++) {
        below += h->buckets[b];
        if (below && below >= wanted) return kvf_histogram_floor(b + 1);
    }
    return 0;
}

/* From arrival to the first step, where that is known, else to the first token. */
static double wait_of(const kvf__occ_request *r) {
    return (isnan(r->start_s) ? r->first_token_s : r->start_s) - r->arrival_s;
}

void kvf__occ_add_request(kvf__occ *o, const kvf__occ_request *r) {
    o->n_answers++;
    o->output_tokens += r->n_output;
    if (r->answer) return;
    o->n_requests++;
    o->prompt_tokens += r->n_prompt;
    if (r->queue_steps != UINT64_MAX) {
        count(&o->queue_histogram, r->queue_steps);
        o->queue_steps_sum += r->queue_steps;
        o->queue_steps_max = r->queue_steps > o->queue_steps_max ? r->queue_steps : o->queue_steps_max;
    }
    double wait = wait_of(r);
    if (isnan(wait)) return;
    o->n_started++;
    o->wait_sum_s += wait;
    o->wait_max_s = wait > o->wait_max_s ? wait : o->wait_max_s;
    uint32_t i = o->n_longest;
    if (i == KVF__OCC_SLOWEST && wait_of(&o->longest[i - 1]) >= wait) return;
    if (i == KVF__OCC_SLOWEST)
        i--;
    else
        o->n_longest++;
    for (; i && wait_of(&o->longest[i - 1]) < wait; i--) o->longest[i] = o->longest[i - 1];
    o->longest[i] = *r;
}

void kvf__occ_add_budget(kvf__occ *o, const kvf_layer_size *sizes, const double *densities) {
    for (uint32_t l = 0; l < o->n_layers; l++) {
        kvf__occ_layer *layer = &o->layers[l];
        if (densities && isfinite(densities[l])) {
            layer->density_sum += densities[l];
            layer->n_density++;
        }
        if (!sizes || sizes[l].keep == UINT32_MAX) continue;
        layer->keep_min = layer->n_keep && layer->keep_min < sizes[l].keep ? layer->keep_min : sizes[l].keep;
        layer->keep_max = layer->keep_max > sizes[l].keep ? layer->keep_max : sizes[l].keep;
        layer->keep_sum += sizes[l].keep;
        layer->n_keep++;
    }
}

void kvf__occ_add_groups(kvf__occ *o, const kvf_layer_size *sizes, uint32_t n_groups) {
    if (!o->group_keep) o->group_keep = calloc((size_t)o->n_layers * n_groups, sizeof *o->group_keep);
    if (!o->group_keep) return; /* the report does without */
    o->n_groups = n_groups;
    for (uint32_t l = 0; l < o->n_layers; l++) {
        if (sizes[l * n_groups].keep == UINT32_MAX) continue;
        for (uint32_t g = 0; g < n_groups; g++) o->group_keep[l * n_groups + g] += sizes[l * n_groups + g].keep;
        o->layers[l].n_groups_keep++;
    }
}

void kvf__occ_end(kvf__occ *o, const kvf_manager *manager) {
    kvf_profile p = {.struct_size = sizeof p};
    if (kvf_profile_read(manager, &p, o->profile_layers, sizeof *o->profile_layers, o->n_layers) == KVF_OK)
        o->profile = p;
    kvf_prefix_stats prefix = {.struct_size = sizeof prefix};
    const kvf_manager_config *config = kvf_manager_get_config(manager);
    if (config && config->prefix_cache && kvf_prefix_stats_read(manager, &prefix) == KVF_OK) o->prefix = prefix;
}

/* ---- Files ------------------------------------------------------------------------------------------- */

bool kvf__out_open(kvf__out_file *out, const char *path) {
    *out = (kvf__out_file){.path = path, .file = stdout};
    if (!strcmp(path, "-")) return true;
    bool made;
    int fd = kvf__open_locked(path, false, &made);
    struct stat s;
    if (fd >= 0 && fstat(fd, &s) == 0 && S_ISREG(s.st_mode)) (void)ftruncate(fd, 0);
    out->file = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (out->file || fd < 0) return out->file != NULL;
    kvf__say("%s: could not be opened for writing: %s", kvf__shown(path).text, strerror(errno));
    close(fd);
    return false;
}

bool kvf__out_close(kvf__out_file *out) {
    errno = 0;
    bool bad = fflush(out->file) != 0 || ferror(out->file);
    int error = errno;
    if (out->file != stdout && fclose(out->file) != 0) bad = true;
    if (bad && !error) error = errno;
    out->file = NULL;
    if (bad)
        kvf__say("%s: could not be written whole: %s: free some room, or name another place",
                 kvf__shown(out->path).text, error ? strerror(error) : "an earlier write failed");
    return !bad;
}
