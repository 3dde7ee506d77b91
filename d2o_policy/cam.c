/* cam: part of an evicted token's value is added to the next tokens' values; keys stay as they are.
 *
 * Source: CaM, ICML 2024 (Zhang et al., "Cache Merging for Memory-efficient LLMs Inference"), its algorithm 1. Who goes is
 * another policy's choice. With p = min(1, a_i / the mean of a in the window), the values of the next m = 32 tokens by position
 * (cam_tokens) each get V_i / m: with probability p (cam_mode sample), or times p (expected, the default). Of tokens that go at
 * once the one of the lowest position goes first, as in the paper, where they go one at a time: its value reaches tokens that
 * follow it out, and with their values those that stay. Where fewer than m tokens follow, the share of each is the same.
 *
 * a is the attention that a token got, divided by the queries that saw it. The paper takes the sum, of a token that has just come
 * to the end of the window; at a prompt's end all of the prompt's queries have seen it, the sum is nearly always above the mean
 * of the window, and so much of every value would be handed on that the output is lost.
 *
 * Who goes: preset default is streaming's rule (sinks, and all else is window), preset h2o that of h2o. The generator is a hash
 * of cam_seed and the token's position, layer and KV head: a draw depends on nothing else. */
#include <math.h>

#include "d2o_policy/pages.h"

/* Uniform in [0, 1). */
static double draw(uint32_t seed, uint32_t pos, uint32_t layer, uint32_t head) {
    uint64_t parts[2] = {(uint64_t)seed << 32 | pos, (uint64_t)layer << 32 | head}, x = 0;
    for (int i = 0; i < 2; i++) { /* two rounds of splitmix64 */
        x = (x ^ parts[i]) + 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
    }
    return (double)(x >> 11) * 0x1p-53;
}

/* ---- gate: how much of each evicted value stays, as the entry's u -------------------------------------- */

typedef struct gate_job {
    kvf__call call;
    kvf_plan *plan;
} gate_job;

/* Attention per query that saw it, of all slots, into x->worth; returns its mean in the window. */
static double attention_per_query(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__head *h,
                                  const kvf__scratch *x) {
    const kvf__policy_seq *s = kvf__event_seq(c, e);
    kvf__roles r = kvf__score_roles(&s->options);
    uint32_t next_pos = c->batch->view->next_pos[e->row], n = 0;
    uint32_t window_begin =
        next_pos - KVF__MIN(KVF__MIN(kvf__size_of(c->state, s, e->layer, kv_head)->window, e->n_keep), next_pos);
    double sum = 0.0;
    kvf__event_scores(c, e, kv_head, x);
    for (uint32_t slot = 0; slot < h->n_slots; slot++) {
        uint32_t pos = h->pages->pos[kvf__slot_index(h, slot)];
        float a = x->score[r.score][slot] + (r.recent == KVF__NONE ? 0.0f : x->score[r.recent][slot]);
        x->worth[slot] = a / (float)(next_pos - pos);
        if (pos < window_begin) continue;
        sum += (double)x->worth[slot];
        n++;
    }
    return sum / n;
}

static void gate_head(void *ctx, uint32_t item, uint32_t thread) {
    const gate_job *job = ctx;
    const kvf__call *c = &job->call;
    const kvf_policy_state_config *config = &c->state->config;
    uint32_t kv_head = item % config->n_kv_heads;
    const kvf_plan_event *pe = &job->plan->events[item / config->n_kv_heads];
    if (pe->n_evict == 0 || kvf__event_lacks(c->batch->view, &pe->event, kv_head)) return;
    const kvf_policy_options *o = &kvf__event_seq(c, &pe->event)->options;
    kvf_plan_entry *entries = job->plan->entries + kvf__entries_at(c->batch->view, pe, kv_head);
    kvf__scratch x = kvf__call_scratch(c, thread);
    kvf__head h = kvf__head_of(c->batch->view, c->batch->pages, pe->event.row, pe->event.layer, kv_head);
    double mean = attention_per_query(c, &pe->event, kv_head, &h, &x);
    uint32_t head = config->q_head_begin / (config->n_q_heads / config->n_kv_heads) + kv_head;
    for (uint32_t i = 0; i < pe->n_evict; i++) {
        double p = (double)x.worth[entries[i].slot] / mean;
        p = p > 0.0 ? fmin(p, 1.0) : 0.0; /* NaN counts as 0 */
        if (o->cam_mode == KVF_CAM_SAMPLE)
            p = draw(o->cam_seed, h.pages->pos[kvf__slot_index(&h, entries[i].slot)], pe->event.layer, head) < p;
        entries[i].u = (float)p;
        entries[i].merge = p > 0.0;
    }
}

static kvf_status gate(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                       kvf_error *err) {
    gate_job job = {.plan = plan};
    kvf_status st = kvf__batch_check(state, stream, batch, "gate", &job.call, err);
    if (!st) st = kvf__plan_check(batch, plan, "gate", err);
    if (!st) kvf__stream_for(stream, plan->n_events * state->config.n_kv_heads, gate_head, &job);
    return st;
}

/* ---- fold: values of kept tokens that follow evicted ones ---------------------------------------------------- */

/* The slots from the first evicted one on, ascending by position, into x.sorted; returns how many. One evicted token reaches
 * the next m alone, which is less than an order of all. */
static uint32_t order(const kvf__fold *f, uint32_t m) {
    const kvf__scratch *x = &f->x;
    uint32_t first = f->old.pages->pos[kvf__slot_index(&f->old, f->entries[0].slot)], n = 0;
    bool ascending = true;
    for (uint32_t slot = 0; slot < f->old.n_slots; slot++) {
        uint32_t pos = f->old.pages->pos[kvf__slot_index(&f->old, slot)];
        if (pos < first) continue;
        x->sorted[n] = (uint64_t)pos << 32 | slot;
        ascending = ascending && (n == 0 || x->sorted[n - 1] < x->sorted[n]);
        n++;
    }
    if (f->n_evict == 1 && n > m + 1) {
        for (uint32_t i = 0; i < n; i++) x->keys[i] = ~x->sorted[i];
        kvf__select_evicted(x->keys, n, m + 1, x->next);
        for (uint32_t i = 0; i <= m; i++) x->sorted[i] = ~x->keys[x->next[i]];
        n = m + 1;
        ascending = false;
    }
    if (!ascending) kvf__sort_u64(x->sorted, n);
    return n;
}

_Static_assert(KVF__MAX_CAM_TOKENS < KVF__CHUNK, "the ring takes the rows of a chunk");

/* Evicted values that still reach what comes next, each with what came before it: a ring of m + 1 rows, [begin, end). */
typedef struct ring {
    float *rows;    /* (m + 1, d) */
    float *u;       /* share, by row */
    uint32_t *rank; /* among the slots in order, by row */
    uint32_t begin, end, n;
} ring;

static void add_ring(const kvf__fold *f, const ring *r, float *acc) {
    uint32_t d = f->old.pages->head_dim;
    for (uint32_t i = r->begin; i < r->end; i++)
        f->kernels->blend(acc, NULL, r->rows + (size_t)(i % r->n) * d, r->u[i % r->n], d);
}

/* A kept slot takes in what reaches it. */
static void receive(const kvf__fold *f, const ring *r, uint32_t slot) {
    const kvf_pages *p = f->old.pages;
    uint32_t d = p->head_dim;
    float *acc = f->x.rows, *row = acc + d;
    f->kernels->load(p->dtype, kvf__v_row(&f->old, slot), d, acc);
    add_ring(f, r, acc);
    void *out = kvf__v_row(&f->to, kvf__fold_slot(f, slot));
    f->kernels->store(p->dtype, acc, d, out);
    f->kernels->load(p->dtype, out, d, row);
    kvf__fold_norm(f, slot, row);
}

void kvf__cam_fold(const kvf__fold *f) {
    uint32_t m = f->options->cam_tokens, n = order(f, m), d = f->old.pages->head_dim, entry = 0;
    ring r = {.rows = f->x.panels, .u = f->x.u, .rank = f->x.first, .n = m + 1};
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = (uint32_t)f->x.sorted[i];
        while (r.begin < r.end && i - r.rank[r.begin % r.n] > m) r.begin++;
        if (!f->x.evicted[slot]) {
            if (r.begin < r.end) receive(f, &r, slot);
            continue;
        }
        const kvf_plan_entry *e = &f->entries[entry++];
        if (!e->merge) continue;
        float *row = r.rows + (size_t)(r.end % r.n) * d;
        f->kernels->load(f->old.pages->dtype, kvf__v_row(&f->old, slot), d, row);
        add_ring(f, &r, row);
        r.u[r.end % r.n] = e->u / (float)m;
        r.rank[r.end % r.n] = i;
        r.end++;
    }
}

const kvf_policy_ops kvf__policy_cam = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "cam",
    .summary = "leaves part of an evicted token's value in the next tokens",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
    .flags = KVF_POLICY_EQUAL_LAYERS,
    .gate = gate,
};

void kvf__preset_cam(kvf_policy_options *o) {
    o->merge = KVF_MERGE_NONE;
    o->n_parts = 0;
    o->sinks_extra = 1;
}

void kvf__preset_cam_h2o(kvf_policy_options *o) {
    o->merge = KVF_MERGE_NONE;
    o->n_parts = 1;
    o->sinks = 0;
}
