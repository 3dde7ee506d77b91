/* budget global: one threshold over all tables (README.md, one threshold), found by the budget, or given (option threshold).
 *
 * Source: KVzip, arXiv 2505.23416, section 3 ("non-uniform head budgets"); the floor of each head is Ada-KV's safeguard, arXiv
 * 2407.11550. The slots that all tables may have together go to the highest scores, wherever they are.
 *
 * A table is given whole units: slots, or with budget_unit block blocks. Beyond its floor each unit competes with the score of the
 * best slot that it adds. Table order is layer, then head group; ranks hold neighbouring groups of each layer. The lowest score that
 * is kept is found by radix select: three passes count scores by their leading bits, and the ranks sum the counts. All they
 * exchange is integers, so all find the same threshold. */
#include <float.h>
#include <math.h>

#include "d2o_policy/pages.h"

typedef struct deal {
    kvf__call call;
    kvf_policy_state *state;
    const kvf__policy_seq *seq;
    const kvf_event *events;        /* one for each table that competes */
    uint32_t n;                     /* their number */
    uint32_t unit, off, floor;      /* c units are c * unit - off slots */
    uint32_t window;                /* of every table */
    uint32_t shift, width, leading; /* of a pass: it counts `width` bits of the scores that begin with `leading` */
    uint32_t threshold;             /* rank of the lowest score that is kept */
} deal;

/* Ranks ascend with scores; NaN is the lowest. */
static uint32_t rank_of(double value) {
    float x = (float)KVF__MIN(KVF__MAX(value, (double)-FLT_MAX), (double)FLT_MAX) + 0.0f; /* -0 and 0 are a tie */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* The ranks of the units that a table may have beyond its floor, descending, into x->slots; returns their number. */
static uint32_t list_units(const deal *d, uint32_t table, const kvf__scratch *x) {
    const kvf__call *c = &d->call;
    const kvf_event *e = &d->events[table];
    kvf__event_part part = kvf__part_of(c->batch->view, e);
    uint32_t n_slots = c->batch->view->n_slots[part.table], n = 0;
    kvf__group_values(c, e, d->window, x, x->weights);
    for (uint64_t unit = d->floor;; unit++) {
        uint64_t slot = unit * d->unit - d->off;
        if (slot >= n_slots) return n;
        x->slots[n++] = rank_of(x->weights[slot]);
    }
}

static void count_bins(void *ctx, uint32_t table, uint32_t thread) {
    const deal *d = ctx;
    kvf__scratch x = kvf__call_scratch(&d->call, thread);
    uint32_t n = list_units(d, table, &x), above = d->shift + d->width;
    for (uint32_t i = 0; i < n; i++)
        if (above == 32 || x.slots[i] >> above == d->leading) x.bins[x.slots[i] >> d->shift & ((1u << d->width) - 1)]++;
}

/* How many units of a table are above the threshold, and how many are equal to it. */
static void count_table(void *ctx, uint32_t table, uint32_t thread) {
    const deal *d = ctx;
    kvf__scratch x = kvf__call_scratch(&d->call, thread);
    uint32_t n = list_units(d, table, &x), above = 0, equal = 0;
    while (above < n && x.slots[above] > d->threshold) above++;
    while (above + equal < n && x.slots[above + equal] == d->threshold) equal++;
    d->state->above[table] = above;
    d->state->equal[table] = equal;
}

static kvf_status reduce(const kvf__ranks *ranks, double *values, uint64_t n, kvf_error *err) {
    return ranks && ranks->reduce ? ranks->reduce(ranks->ctx, values, n, err) : KVF_OK;
}

/* One pass over all tables of all ranks, into state->bins. */
static kvf_status count(deal *d, kvf_stream *stream, const kvf__ranks *ranks, kvf_error *err) {
    uint32_t n_threads = kvf_stream_n_threads(stream);
    double *bins = d->state->bins;
    for (uint32_t t = 0; t < n_threads; t++) memset(kvf__call_scratch(&d->call, t).bins, 0, KVF__BINS * 4);
    kvf__stream_for(stream, d->n, count_bins, d);
    for (uint32_t b = 0; b < KVF__BINS; b++) {
        uint64_t sum = 0;
        for (uint32_t t = 0; t < n_threads; t++) sum += kvf__call_scratch(&d->call, t).bins[b];
        bins[b] = (double)sum;
    }
    return reduce(ranks, bins, KVF__BINS, err);
}

/* The threshold of the `want` highest units. *want becomes the number of those equal to it that are kept, or if there are fewer
 * units the number that is missing. */
static kvf_status select_threshold(deal *d, kvf_stream *stream, const kvf__ranks *ranks, uint64_t *want, bool *fewer,
                                   kvf_error *err) {
    static const uint8_t widths[] = {11, 11, 10};
    d->shift = 32;
    d->leading = 0;
    for (int pass = 0; pass < 3; pass++) {
        d->width = widths[pass];
        d->shift -= d->width;
        kvf_status st = count(d, stream, ranks, err);
        if (st) return st;
        const double *bins = d->state->bins;
        double left = (double)*want;
        uint32_t b = 1u << d->width;
        while (b > 0 && left > bins[b - 1]) left -= bins[--b];
        *want = (uint64_t)left;
        *fewer = b == 0;
        if (*fewer || *want == 0) break;
        d->leading = d->leading << d->width | (b - 1);
    }
    d->threshold = *fewer ? 0 : *want ? d->leading : UINT32_MAX; /* no rank is 0 or UINT32_MAX */
    return KVF_OK;
}

/* Tables of all ranks in a layer, and the first of this one. */
static uint32_t groups_of_all(const kvf_policy_state_config *c) {
    return c->n_q_heads_total / (c->n_q_heads / c->n_groups);
}
static uint32_t group_begin(const kvf_policy_state_config *c) { return c->q_head_begin / (c->n_q_heads / c->n_groups); }

/* Units of each table, into state->above. */
static kvf_status count_units(deal *d, kvf_stream *stream, const kvf__ranks *ranks, uint64_t want, kvf_error *err) {
    kvf_policy_state *state = d->state;
    const kvf_policy_state_config *c = &state->config;
    uint32_t width = groups_of_all(c), begin = group_begin(c), n_layers = d->n / c->n_groups;
    bool fewer = false;
    kvf_status st = KVF_OK;
    if (isnan(d->seq->options.threshold)) {
        if ((st = select_threshold(d, stream, ranks, &want, &fewer, err))) return st;
    } else {
        uint32_t n_heads = c->n_kv_heads / c->n_groups;
        d->threshold = rank_of(d->seq->options.threshold * n_heads) - 1;
        want = 0;
    }
    kvf__stream_for(stream, d->n, count_table, d);
    size_t n_all = (size_t)n_layers * width;
    memset(state->ties, 0, n_all * sizeof *state->ties);
    for (uint32_t i = 0; i < d->n; i++)
        state->ties[(size_t)(i / c->n_groups) * width + begin + i % c->n_groups] = state->equal[i];
    if ((st = reduce(ranks, state->ties, n_all, err))) return st;
    for (size_t at = 0; at < n_all; at++) { /* want: what those before have left of it */
        uint64_t take = fewer ? want / n_all + (at < want % n_all) : KVF__MIN(want, (uint64_t)state->ties[at]);
        uint32_t group = (uint32_t)(at % width) - begin, layer = (uint32_t)(at / width);
        if (group < c->n_groups) state->above[layer * c->n_groups + group] += d->floor + (uint32_t)take;
        if (!fewer) want -= take;
    }
    return KVF_OK;
}

static kvf_layer_size size_of(const deal *d, uint32_t units, bool bounded) {
    uint32_t keep = units * d->unit - d->off, room = kvf__policy_room(&d->seq->options, d->state->config.block_size);
    return (kvf_layer_size){keep, keep - d->window, d->window, bounded ? keep + room : UINT32_MAX};
}

/* Writes the tables' sizes; a layer's is the mean of its tables'. */
static void store(const deal *d, kvf__policy_seq *s) {
    uint32_t n = d->state->config.n_groups;
    for (uint32_t i = 0; i < d->n; i += n) {
        uint32_t layer = d->events[i].layer;
        kvf_layer_size *z = &s->sizes[layer];
        bool bounded = z->reserve != UINT32_MAX;
        uint64_t sum = 0;
        for (uint32_t g = 0; g < n; g++) {
            kvf_layer_size size = size_of(d, d->state->above[i + g], bounded);
            s->group_sizes[(size_t)layer * n + g] = size;
            sum += size.keep;
        }
        uint32_t keep = (uint32_t)(sum / n);
        *z = (kvf_layer_size){keep, keep - d->window, d->window, bounded ? z->reserve - z->keep + keep : UINT32_MAX};
        s->dealt[layer] = KVF__DEALT;
    }
}

/* Whether tables are given sizes now: if one would have an event by the even sizes of before, or if the budget has changed. */
static bool wants_deal(const kvf_policy_state *state, const kvf__policy_seq *s, const uint32_t *n_slots,
                       uint32_t above) {
    uint32_t n = state->config.n_groups;
    for (uint32_t t = 0; t < state->config.n_layers * n; t++) {
        uint32_t keep = s->sizes[t / n].keep;
        if (keep == UINT32_MAX || s->dealt[t / n] == KVF__DEALT) continue;
        if (s->dealt[t / n] == KVF__DEALT_BEFORE || (n_slots[t] > keep && n_slots[t] - keep >= above)) return true;
    }
    return false;
}

/* One event for each table of a layer that is compressed; returns their number. */
static uint32_t list_events(const kvf_policy_state *state, const kvf__policy_seq *s, const uint32_t *n_slots,
                            uint32_t row, uint32_t kind) {
    uint32_t n = state->config.n_groups, n_events = 0;
    for (uint32_t t = 0; t < state->config.n_layers * n; t++) {
        uint32_t keep = s->sizes[t / n].keep;
        if (keep != UINT32_MAX)
            state->group_events[n_events++] = (kvf_event){row, t / n, KVF__MIN(keep, n_slots[t]), kind, t % n, 1};
    }
    return n_events;
}

kvf_status kvf__global_deal(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                            uint32_t above, uint32_t kind, const kvf__ranks *ranks, kvf_error *err) {
    const kvf_policy_state_config *c = &state->config;
    const kvf_view *v = batch->view;
    kvf__policy_seq *s = kvf__policy_seq_get(state, v->seq_index[row]);
    const uint32_t *n_slots = v->n_slots + kvf__table_index(v, row, 0, 0);
    if (!wants_deal(state, s, n_slots, above)) return KVF_OK;
    if (!batch->pages) { /* no scores: the even sizes stay */
        memset(s->dealt, KVF__DEALT, c->n_layers * sizeof *s->dealt);
        return KVF_OK;
    }
    kvf_policy_batch b = *batch;
    b.events = state->group_events;
    b.n_events = list_events(state, s, n_slots, row, kind);
    kvf__share share = kvf__layer_share(&s->options, c->n_layers, c->block_size, s->n_prompt, s->budget, s->lo, false);
    deal d = {.state = state, .seq = s, .events = b.events, .n = b.n_events, .unit = share.unit, .floor = share.lo};
    if (share.unit > 1) d.off = kvf__policy_room(&s->options, c->block_size);
    d.window = kvf__global_window(&s->options, s->budget);
    uint64_t n_all = (uint64_t)share.n * groups_of_all(c), total = kvf__global_units(&share, s->budget, n_all);
    kvf_status st = kvf__batch_check(state, stream, &b, "due", &d.call, err);
    if (!st) st = count_units(&d, stream, ranks, total - n_all * share.lo, err);
    if (!st) store(&d, s);
    return st;
}
