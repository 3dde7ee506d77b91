/* The life of a sequence under d2o, two ways: through the library, and naively in double precision from the rules alone.
 * Keys, values and attention are functions of (seed, layer, head, position, step), so that neither way needs the other's
 * order of slots. Attention is a multiple of 2^-10: scores are exact in fp32, and equal ones are equal in both ways. */
#ifndef KVF_TESTS_POLICY_LIFE_H
#define KVF_TESTS_POLICY_LIFE_H

#include "test_policy_rig.h"

enum { LIFE_LAYERS = 5, LIFE_TOKENS = 200, LIFE_D = 128, LIFE_KV = 3, LIFE_G = 8 };

typedef struct life_case {
    kvf_policy_options o;
    uint64_t seed;
    uint32_t n_layers, n_kv, g, d, bs, n_prompt, n_steps;
} life_case;

static inline uint64_t life_hash(const life_case *c, uint64_t what, uint32_t l, uint32_t h, uint32_t pos) {
    uint64_t s = c->seed * 0x9e3779b97f4a7c15ull + what;
    s = rig_random(&s) + l;
    s = rig_random(&s) + h;
    s = rig_random(&s) + pos;
    return s;
}

/* K (what 0) and V (what 1) of a token, as the pages hold them. Keys lie around a few directions. */
static inline void life_row(const life_case *c, uint64_t what, uint32_t l, uint32_t h, uint32_t pos, float *out) {
    uint64_t s = life_hash(c, what, l, h, pos), direction = c->seed * 131 + h * 17 + rig_random(&s) % 5;
    for (uint32_t e = 0; e < c->d; e++) out[e] = (float)((what ? 0.0 : rig_normal(&direction)) + rig_normal(&s));
}
static inline float life_share(const life_case *c, uint64_t what, uint32_t l, uint32_t h, uint32_t pos, double most) {
    uint64_t s = life_hash(c, what, l, h, pos);
    double u = rig_uniform(&s);
    return (float)floor(u * u * u * most * 1024) / 1024.0f;
}
/* The column sum of query head q; the row of a decode step, reduced over the group. */
static inline float life_sum(const life_case *c, uint32_t l, uint32_t q, uint32_t pos) {
    return life_share(c, 2 + l % 3, l, q, pos, 2.0 + l + 3.0 * (q % 2)); /* layers and heads differ in density */
}
static inline float life_mass(const life_case *c, uint32_t l, uint32_t h, uint32_t step, uint32_t pos) {
    return life_share(c, 100 + step, l, h, pos, 0.5);
}

static inline life_case life_draw(uint64_t seed) {
    static const uint32_t gs[] = {1, 3, 4, 8}, ds[] = {64, 96, 128};
    static const kvf_merge merges[] = {KVF_MERGE_PAPER, KVF_MERGE_AUTHORS, KVF_MERGE_AVERAGE, KVF_MERGE_MASS,
                                       KVF_MERGE_NONE};
    uint64_t s = seed;
    life_case c = {.seed = seed, .g = gs[seed % 4], .d = ds[seed / 4 % 3], .bs = 16, .n_steps = 50};
    bool authors = seed % 10 == 7;
    c.o = rig_policy("d2o", authors ? "authors" : NULL);
    c.n_layers = authors ? 4 + (uint32_t)(rig_random(&s) % 2) : 1 + (uint32_t)(rig_random(&s) % 4);
    c.n_kv = seed % 5 == 0 ? 1 : 1 + (uint32_t)(rig_random(&s) % LIFE_KV);
    c.n_prompt = 40 + (uint32_t)(rig_random(&s) % 60);
    if (authors) {
        c.o.rho = 0.3 + 0.4 * rig_uniform(&s);
        return c;
    }
    c.o.merge = merges[seed % 5];
    c.o.scope = seed / 2 % 2 ? KVF_SCOPE_HEAD : KVF_SCOPE_LAYER;
    c.o.rho = 0.25 + 0.5 * rig_uniform(&s);
    c.o.min_tokens = 0;
    c.o.merge_keys = seed % 7 != 0;
    c.o.evict_every = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 4 : 0;
    if (seed % 6 == 1) c.o.budget_unit = KVF_BUDGET_BLOCK;
    if (seed % 8 == 3) c.o.budget_tokens = c.n_prompt + 10; /* fits, and overflows in decode */
    if (seed % 9 == 4) c.o.gqa = KVF_GQA_MAX;
    if (seed % 11 == 5) c.o.sinks = 0;
    if (seed % 13 == 6) c.o.gate = 0.6;
    return c;
}

/* ---- Through the library -------------------------------------------------------------------------------------- */

typedef struct life_lib {
    const life_case *c;
    rig *r;
    kvf_event events[LIFE_LAYERS]; /* the events of the last call, and the plan as gated */
    uint32_t n_events;
} life_lib;

static inline void life_append(life_lib *x) {
    const life_case *c = x->c;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        uint32_t n = rig_slots(x->r, 0, l);
        for (uint32_t h = 0; h < c->n_kv; h++) {
            float k[LIFE_D], v[LIFE_D];
            life_row(c, 0, l, h, x->r->next_pos[0], k);
            life_row(c, 1, l, h, x->r->next_pos[0], v);
            rig_put(x->r, 0, l, h, n, x->r->next_pos[0], k, v);
        }
        rig_set_slots(x->r, 0, l, n + 1);
    }
    x->r->next_pos[0]++;
}

static inline void life_events(life_lib *x, kvf_moment moment, uint32_t kind, bool all) {
    x->n_events = rig_due(x->r, 0, moment, kind, all, x->events);
    if (x->n_events) rig_events(x->r, x->events, x->n_events, x->c->seed % 2 ? ~0ull : 0);
}

static inline void life_begin(life_lib *x, const life_case *c) {
    *x = (life_lib){.c = c};
    x->r = rig_new((rig_config){.n_seqs = 1,
                                .n_layers = c->n_layers,
                                .n_kv = c->n_kv,
                                .g = c->g,
                                .hpg = c->n_kv,
                                .bs = c->bs,
                                .d = c->d,
                                .cap = LIFE_TOKENS,
                                .n_arrays = 1,
                                .threads = 1,
                                .mass = true});
    OK(kvf_policy_open(x->r->state, 0, &c->o, err));
    for (uint32_t i = 0; i < c->n_prompt; i++) life_append(x);
    static float sums[LIFE_LAYERS * LIFE_KV * LIFE_G * LIFE_TOKENS];
    uint32_t hq = c->n_kv * c->g;
    double variance[LIFE_LAYERS * LIFE_KV * LIFE_G];
    for (uint32_t l = 0; l < c->n_layers; l++)
        for (uint32_t q = 0; q < hq; q++)
            for (uint32_t p = 0; p < c->n_prompt; p++) sums[(l * hq + q) * LIFE_TOKENS + p] = life_sum(c, l, q, p);
    x->r->prompt_sums[0] = sums;
    x->r->prompt_stride = LIFE_TOKENS;
    kvf_policy_batch b = rig_batch(x->r);
    OK(c->o.ops->metric(x->r->state, NULL, &b, 0, c->n_prompt, variance, err));
    OK(c->o.ops->budget(x->r->state, 0, variance, c->n_prompt, err));
    life_events(x, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, true);
    x->r->prompt_sums[0] = NULL;
}

/* Events before the append are over when the step's own are planned: both are called apart. */
static inline void life_overflow(life_lib *x) { life_events(x, KVF_BEFORE_APPEND, KVF_EVENT_PROMPT, false); }
static inline void life_step(life_lib *x, uint32_t step) {
    const life_case *c = x->c;
    life_append(x);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        float row[LIFE_KV * LIFE_TOKENS] = {0};
        for (uint32_t h = 0; h < c->n_kv; h++)
            for (uint32_t s = 0; s < rig_slots(x->r, 0, l); s++)
                row[h * LIFE_TOKENS + s] = life_mass(c, l, h, step, rig_pos(x->r, 0, l, h, s));
        rig_observe(x->r, l, row, LIFE_TOKENS);
    }
    bool deferred = c->o.defer_first_decode && !kvf_policy_sizes(x->r->state, 0);
    life_events(x, KVF_AFTER_STEP, deferred ? KVF_EVENT_PROMPT : KVF_EVENT_DECODE, false);
}

#endif
