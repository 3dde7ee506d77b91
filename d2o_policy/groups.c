/* Budgets per head group inside a layer: the layer's slots go to the groups with the highest scores (README.md, groups).
 *
 * Source: Ada-KV, arXiv 2407.11550, algorithm 1 and its safeguard: the best slots of all heads together, and at least a share
 * of the equal budget for each (head_floor, its alpha, 0.2). A table here holds all heads of a group. So groups compete with the
 * sum of their heads' i-th best slots, and with budget_unit block with whole blocks of such slots. */
#include <float.h>
#include <math.h>

#include "d2o_policy/pages.h"

#define FLOOR_SLACK 1e-6 /* 0.2 of 100 is 20 */

typedef struct deal_job {
    kvf__call call;
    kvf_policy_state *state;
    const kvf__policy_seq *seq;
    const kvf_event *events; /* of the layer, one a group */
} deal_job;

void kvf__groups_reset(const kvf_policy_state *state, kvf__policy_seq *s) {
    uint32_t n = state->config.n_groups;
    for (uint32_t l = 0; l < state->config.n_layers; l++) {
        for (uint32_t g = 0; g < n; g++) s->group_sizes[(size_t)l * n + g] = s->sizes[l];
        if (s->dealt[l]) s->dealt[l] = KVF__DEALT_BEFORE;
    }
}

/* The score of a key; NaN, and what is protected whatever its score, are the ends of the range. */
static double score_of(uint64_t key) {
    uint32_t rank = ~(uint32_t)(key >> 31), bits = rank >> 31 ? rank & 0x7fffffffu : ~rank;
    float score;
    if (!(key >> 63)) return (double)FLT_MAX;
    if (rank == 0) return (double)-FLT_MAX;
    memcpy(&score, &bits, sizeof score);
    return (double)KVF__MIN(KVF__MAX(score, -FLT_MAX), FLT_MAX);
}

void kvf__group_values(const kvf__call *c, const kvf_event *e, uint32_t window, const kvf__scratch *x, double *values) {
    const kvf_view *v = c->batch->view;
    kvf__event_part part = kvf__part_of(v, e);
    uint32_t next_pos = v->next_pos[e->row], sinks = kvf__event_seq(c, e)->options.sinks;
    window = KVF__MIN(window, next_pos);
    for (uint32_t kv_head = part.head_begin; kv_head < part.head_begin + part.n_heads; kv_head++) {
        kvf__head h = kvf__head_of(v, c->batch->pages, e->row, e->layer, kv_head);
        const float *worth = kvf__event_worth(c, e, kv_head, false, x);
        for (uint32_t slot = 0; slot < h.n_slots; slot++)
            x->keys[slot] = kvf__select_key(worth[slot], h.pages->pos[kvf__slot_index(&h, slot)] & KVF__MAX_POSITION,
                                            next_pos - window, sinks);
        kvf__sort_u64(x->keys, h.n_slots);
        for (uint32_t i = 0; i < h.n_slots; i++)
            values[i] = (kv_head == part.head_begin ? 0.0 : values[i]) + score_of(x->keys[i]);
    }
}

static void value_group(void *ctx, uint32_t group, uint32_t thread) {
    const deal_job *job = ctx;
    const kvf_event *e = &job->events[group];
    kvf__scratch x = kvf__call_scratch(&job->call, thread);
    kvf__group_values(&job->call, e, job->seq->sizes[e->layer].window, &x,
                      job->state->values + (size_t)group * job->state->config.max_slots);
}

/* Units (slots, or blocks) of a layer: size(c) = c * unit - off slots. */
typedef struct units {
    uint32_t unit, off, floor, all; /* of an equal group */
} units;

static units units_of(const kvf_policy_state *state, const kvf__policy_seq *s, uint32_t layer) {
    const kvf_policy_options *o = &s->options;
    kvf_layer_size z = s->sizes[layer];
    units u = {.unit = 1};
    if (o->budget_unit == KVF_BUDGET_BLOCK) {
        u.unit = state->config.block_size;
        u.off = kvf__policy_room(o, u.unit);
    }
    uint64_t least = KVF__MAX((uint64_t)floor(o->head_floor * z.keep + FLOOR_SLACK), s->lo);
    least = KVF__MAX(least, (uint64_t)o->sinks + z.window + 1);
    least = KVF__MIN(least, z.keep);
    u.all = (z.keep + u.off) / u.unit;
    u.floor = (uint32_t)KVF__MIN((least + u.off + u.unit - 1) / u.unit, u.all);
    return u;
}

/* The scores that one more unit would add to a group that has c units; -infinity if it has no slot for it. */
static double marginal(const double *values, uint32_t n_slots, const units *u, uint32_t c) {
    uint64_t begin = (uint64_t)c * u->unit - KVF__MIN(u->off, (uint64_t)c * u->unit), end = begin + u->unit;
    if (begin >= n_slots) return -HUGE_VAL;
    double sum = 0.0;
    for (uint64_t i = begin; i < KVF__MIN(end, n_slots); i++) sum += values[i];
    return sum;
}

/* Units of each group: first the floor, then one by one to the group whose next unit has the highest scores, on ties to the lower
 * group. Units for which the groups have no slots are divided evenly, the remainder over the first groups. */
static void share_units(const deal_job *job, const units *u, uint32_t *counts, double *next) {
    const kvf_policy_state *state = job->state;
    const uint32_t *n_slots = job->call.batch->view->n_slots + kvf__part_of(job->call.batch->view, job->events).table;
    uint32_t n = state->config.n_groups, max = state->config.max_slots;
    uint64_t left = (uint64_t)n * (u->all - u->floor);
    for (uint32_t g = 0; g < n; g++) {
        counts[g] = u->floor;
        next[g] = marginal(state->values + (size_t)g * max, n_slots[g], u, counts[g]);
    }
    for (; left; left--) {
        uint32_t best = 0;
        for (uint32_t g = 1; g < n; g++)
            if (next[g] > next[best]) best = g;
        if (next[best] == -HUGE_VAL) break;
        counts[best]++;
        next[best] = marginal(state->values + (size_t)best * max, n_slots[best], u, counts[best]);
    }
    for (uint32_t g = 0; g < n; g++) counts[g] += (uint32_t)(left / n) + (g < left % n);
}

static void deal(const deal_job *job, kvf_stream *stream, kvf__policy_seq *s) {
    kvf_policy_state *state = job->state;
    uint32_t n = state->config.n_groups, layer = job->events->layer;
    kvf_layer_size z = s->sizes[layer];
    units u = units_of(state, s, layer);
    kvf__stream_for(stream, n, value_group, (void *)(uintptr_t)job);
    share_units(job, &u, state->group_counts, state->group_next);
    for (uint32_t g = 0; g < n; g++) {
        kvf_layer_size *to = &s->group_sizes[(size_t)layer * n + g];
        uint32_t keep = state->group_counts[g] * u.unit - u.off;
        *to = (kvf_layer_size){keep, keep - z.window, z.window,
                               z.reserve == UINT32_MAX ? UINT32_MAX : z.reserve - z.keep + keep};
    }
    s->dealt[layer] = KVF__DEALT;
}

/* The events of a layer, one a group, that its slots are valued by. */
static void list_events(const kvf_policy_state *state, const kvf_policy_batch *b, uint32_t row, uint32_t layer,
                        uint32_t keep, uint32_t kind) {
    for (uint32_t g = 0; g < state->config.n_groups; g++) {
        kvf_event e = {row, layer, 1, kind, g, 1};
        e.n_keep = KVF__MIN(keep, b->view->n_slots[kvf__part_of(b->view, &e).table]);
        state->group_events[g] = e;
    }
}

/* Whether a layer's groups are given sizes now: if the layer holds more slots than all of them may together, or if they have sizes
 * from before a change of the layer's size. */
static bool wants_deal(const kvf_policy_state *state, const kvf__policy_seq *s, const uint32_t *n_slots, uint32_t layer,
                       uint32_t above) {
    uint64_t n = state->config.n_groups, total = (uint64_t)s->sizes[layer].keep * n, sum = 0;
    if (s->sizes[layer].keep == UINT32_MAX || s->dealt[layer] == KVF__DEALT) return false;
    for (uint32_t g = 0; g < n; g++) sum += n_slots[(size_t)layer * n + g];
    return s->dealt[layer] == KVF__DEALT_BEFORE || (sum > total && sum - total >= above * n);
}

/* Without pages there are no scores: all groups get the layer's size. */
static void deal_evenly(const kvf_policy_state *state, kvf__policy_seq *s, uint32_t layer) {
    uint32_t n = state->config.n_groups;
    for (uint32_t g = 0; g < n; g++) s->group_sizes[(size_t)layer * n + g] = s->sizes[layer];
    s->dealt[layer] = KVF__DEALT;
}

/* Gives the groups their sizes; with check it only checks the inputs that this needs. */
kvf_status kvf__groups_deal(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                            uint32_t above, uint32_t kind, bool check, kvf_error *err) {
    const kvf_view *v = batch->view;
    kvf__policy_seq *s = kvf__policy_seq_get(state, v->seq_index[row]);
    const uint32_t *n_slots = v->n_slots + kvf__table_index(v, row, 0, 0);
    kvf_policy_batch b = *batch;
    b.events = state->group_events;
    b.n_events = state->config.n_groups;
    for (uint32_t l = 0; l < state->config.n_layers; l++) {
        if (!wants_deal(state, s, n_slots, l, above)) continue;
        if (!batch->pages) {
            if (!check) deal_evenly(state, s, l);
            continue;
        }
        list_events(state, &b, row, l, s->sizes[l].keep, kind);
        deal_job job = {.state = state, .seq = s, .events = state->group_events};
        kvf_status st = kvf__batch_check(state, stream, &b, "due", &job.call, err);
        if (st) return st;
        if (!check) deal(&job, stream, s);
    }
    return KVF_OK;
}

/* Tables above their groups' sizes. */
uint32_t kvf__groups_due(const kvf_policy_state *state, const kvf__policy_seq *s, const uint32_t *n_slots,
                         uint32_t above, uint32_t *keep) {
    uint32_t n = state->config.n_groups, n_due = 0;
    for (uint32_t t = 0; t < state->config.n_layers * n; t++) {
        uint32_t to = s->group_sizes[t].keep;
        if (s->dealt[t / n] != KVF__DEALT || n_slots[t] <= to || n_slots[t] - to < above) continue;
        keep[t] = to;
        n_due++;
    }
    return n_due;
}

const kvf_layer_size *kvf_policy_group_sizes(const kvf_policy_state *state, uint32_t seq) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    return s && s->sized && kvf__groups_adapt(state, s) ? s->group_sizes : NULL;
}
