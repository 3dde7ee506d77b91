/* The baselines beside loops in double precision written from their papers, for tests. */
#ifndef KVF_TESTS_BASELINES_RIG_H
#define KVF_TESTS_BASELINES_RIG_H

#include "test_policy_rig.h"

enum { LAYERS = 5, KV = 2, D = 8, BS = 8, L = 120, STEPS = 50, CAP = 256, HEADS = LAYERS * KV };

/* What a query gives a position, by layer and query head (prompt) or KV head (decode): a hash, skewed, so that nobody depends
 * on an order of slots. */
static inline double hash01(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    uint64_t s = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu + d * 0xd6e8feb86659fd93u;
    return rig_uniform(&s);
}
static inline float attention(uint64_t seed, uint32_t layer, uint32_t head, uint32_t query, uint32_t pos) {
    double x = hash01(seed + layer, head + 1, query + 1, pos + 1);
    return (float)(x * x * x * (0.2 + hash01(seed, layer, head, pos)));
}
static inline float logprob(uint64_t seed, uint32_t pos) { return pos ? (float)(-8 * hash01(seed, 77, 1, pos)) : 0.0f; }

/* One token that a head holds. Sums are floats folded in query order, as the library's are; what is decided from them is double. */
typedef struct token {
    uint32_t pos;
    float a, squares, last;
    double v[D];
} token;

typedef struct head {
    token t[CAP]; /* ascending by position */
    uint32_t n;
} head;

typedef struct world {
    rig *r;
    const char *policy;
    kvf_policy_options o;
    uint64_t seed;
    uint32_t g, k;
    uint32_t size[LAYERS];
    float *sums, *last, *squares;
    float logprobs[L];
    head heads[HEADS];
} world;

static inline bool is(const world *w, const char *name) { return strcmp(w->policy, name) == 0; }

/* ---- The naive model ---------------------------------------------------------------------------------- */

static inline uint32_t window_of(const world *w, uint32_t size) {
    if (is(w, "roco")) return KVF__MIN(10, size);
    if (is(w, "snapkv") || is(w, "pyramidkv")) return KVF__MIN(w->o.window, size);
    if (is(w, "cam") && w->o.sinks) return size - 4;
    return size / 2;
}
static inline uint32_t sinks_of(const world *w) { return w->o.sinks; }

/* Marks what stays: the window, the sinks, then the highest worth; NaN last, ties to the lower position. */
static inline void keep_best(const head *h, const double *worth, uint32_t size, uint32_t window_begin, uint32_t sinks,
                             bool *keep) {
    for (uint32_t i = 0; i < h->n; i++) keep[i] = false;
    for (uint32_t n = 0; n < size; n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t i = 0; i < h->n; i++) {
            if (keep[i]) continue;
            uint32_t p = h->t[i].pos;
            int class = p >= window_begin ? 3 : p < sinks ? 2 : isnan(worth[i]) ? 0 : 1;
            if (best == UINT32_MAX) {
                best = i;
                continue;
            }
            uint32_t q = h->t[best].pos;
            int other = q >= window_begin ? 3 : q < sinks ? 2 : isnan(worth[best]) ? 0 : 1;
            if (class > other || (class == other && class == 1 && worth[i] > worth[best])) best = i;
        }
        keep[best] = true;
    }
}

/* RoCo: all but the floor(0.3 S) + 1 slots of highest deviation are candidates. */
static inline void worth_roco(const world *w, const head *h, uint32_t size, uint32_t next_pos, double *worth) {
    uint32_t window_begin = next_pos - window_of(w, size);
    bool out[CAP] = {false};
    for (uint32_t left = (uint32_t)(0.3 * size) + 1; left; left--) {
        uint32_t most = UINT32_MAX;
        float highest = -1;
        for (uint32_t i = 0; i < h->n; i++) {
            double c = next_pos - h->t[i].pos, mean = (double)h->t[i].a / c;
            float deviation = (float)sqrt((double)h->t[i].squares / c - mean * mean);
            if (!(deviation > 0)) deviation = 0;
            if (h->t[i].pos >= window_begin || h->t[i].pos < sinks_of(w)) deviation = INFINITY;
            if (!out[i] && deviation > highest) most = i, highest = deviation;
        }
        if (most == UINT32_MAX) break;
        out[most] = true;
    }
    for (uint32_t i = 0; i < h->n; i++)
        worth[i] = out[i] ? INFINITY : (double)(float)((double)h->t[i].a / (next_pos - h->t[i].pos));
}

/* SnapKV: rows of the last queries, averaged over 5 neighbours among those before the window. */
static inline void worth_snapkv(const world *w, const head *h, uint32_t size, uint32_t next_pos, double *worth) {
    uint32_t end = next_pos - window_of(w, size);
    for (int32_t i = 0; i < (int32_t)h->n; i++) {
        double sum = 0;
        for (int32_t j = i - 2; j <= i + 2; j++)
            if (j >= 0 && j < (int32_t)end) sum += (double)h->t[j].last;
        worth[i] = (double)(float)(sum / 5);
    }
}

/* CaM: in order of position each token that goes gives its value, times p / m, to the m that follow. */
static inline void spread(const world *w, head *h, const bool *keep, const double *a, uint32_t window_begin) {
    double sum = 0, n = 0;
    for (uint32_t i = 0; i < h->n; i++)
        if (h->t[i].pos >= window_begin) sum += a[i], n++;
    for (uint32_t i = 0; i < h->n; i++) {
        if (keep[i]) continue;
        double p = fmin(1, a[i] / (sum / n));
        for (uint32_t j = i + 1; j < h->n && j <= i + w->o.cam_tokens; j++)
            for (uint32_t e = 0; e < D; e++) h->t[j].v[e] += p / w->o.cam_tokens * h->t[i].v[e];
    }
}

static inline void evict(const world *w, head *h, uint32_t layer, uint32_t next_pos) {
    uint32_t size = w->size[layer], window_begin = next_pos - window_of(w, size), n = 0;
    double worth[CAP];
    bool keep[CAP];
    for (uint32_t i = 0; i < h->n; i++)
        worth[i] = is(w, "sirllm") ? (double)-logprob(w->seed, h->t[i].pos) : (double)h->t[i].a;
    if (is(w, "roco")) worth_roco(w, h, size, next_pos, worth);
    if (is(w, "snapkv") || is(w, "pyramidkv")) worth_snapkv(w, h, size, next_pos, worth);
    keep_best(h, worth, size, window_begin, sinks_of(w), keep);
    for (uint32_t i = 0; i < h->n; i++)
        worth[i] = (double)(h->t[i].a / (float)(next_pos - h->t[i].pos)); /* per query */
    if (is(w, "cam")) spread(w, h, keep, worth, window_begin);
    for (uint32_t i = 0; i < h->n; i++)
        if (keep[i]) h->t[n++] = h->t[i];
    h->n = n;
}

/* Sizes: all B, or PyramidKV's arithmetic, rounded so that they add up. */
static inline void naive_sizes(world *w, uint32_t budget) {
    for (uint32_t l = 0; l < LAYERS; l++) w->size[l] = budget;
    if (!is(w, "pyramidkv")) return;
    double x[LAYERS], win = w->o.window, least = (budget - win) / 20, most = 2 * (budget - win) - least;
    uint32_t total = 0;
    if (most > L - win) most = L - win, least = 2 * (budget - win) - most;
    for (uint32_t l = 0; l < LAYERS; l++) {
        x[l] = win + most - (most - least) * l / (LAYERS - 1);
        total += w->size[l] = (uint32_t)(x[l] + 1e-6);
    }
    for (; total < budget * LAYERS; total++) {
        uint32_t best = 0;
        for (uint32_t l = 1; l < LAYERS; l++)
            if (x[l] - w->size[l] > x[best] - w->size[best] + 1e-9) best = l;
        w->size[best]++;
    }
}

/* ---- The library beside it --------------------------------------------------------------------------- */

static inline void append(world *w, uint32_t pos) {
    for (uint32_t l = 0; l < LAYERS; l++) {
        uint32_t slot = rig_slots(w->r, 0, l);
        for (uint32_t kv = 0; kv < KV; kv++) {
            head *h = &w->heads[l * KV + kv];
            token *t = &h->t[h->n++];
            float k[D], v[D];
            *t = (token){.pos = pos};
            for (uint32_t e = 0; e < D; e++) {
                k[e] = (float)hash01(w->seed + 5, l * KV + kv, pos, e) - 0.5f;
                v[e] = (float)hash01(w->seed + 6, l * KV + kv, pos, e) - 0.5f;
                t->v[e] = (double)v[e];
            }
            rig_put(w->r, 0, l, kv, slot, pos, k, v);
        }
        rig_set_slots(w->r, 0, l, slot + 1);
    }
    w->r->next_pos[0] = pos + 1;
}

static inline void run_prompt(world *w) {
    uint32_t n_q = KV * w->g;
    for (uint32_t pos = 0; pos < L; pos++) append(w, pos);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t q = 0; q < L; q++)
            for (uint32_t pos = 0; pos <= q; pos++)
                for (uint32_t kv = 0; kv < KV; kv++) {
                    token *t = &w->heads[l * KV + kv].t[pos];
                    float together = 0;
                    for (uint32_t i = 0; i < w->g; i++) {
                        float a = attention(w->seed, l, kv * w->g + i, q, pos);
                        size_t at = ((size_t)l * n_q + kv * w->g + i) * L + pos;
                        w->sums[at] += a;
                        if (q + w->o.score_window >= L) w->last[at] += a;
                        together = i ? together + a : a;
                    }
                    w->squares[((size_t)l * KV + kv) * L + pos] += together * together;
                    t->squares = w->squares[((size_t)l * KV + kv) * L + pos];
                }
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t kv = 0; kv < KV; kv++)
            for (uint32_t pos = 0; pos < L; pos++) {
                token *t = &w->heads[l * KV + kv].t[pos];
                size_t at = ((size_t)l * n_q + kv * w->g) * L + pos;
                t->a = kvf__gqa_reduce(KVF_GQA_SUM, w->sums + at, w->g, L);
                t->last = kvf__gqa_reduce(KVF_GQA_SUM, w->last + at, w->g, L);
            }
    for (uint32_t pos = 0; pos < L; pos++) w->logprobs[pos] = logprob(w->seed, pos);
}

static inline void step(world *w, uint32_t pos) {
    append(w, pos);
    if (!kvf_policy_observes(&w->o)) return;
    for (uint32_t l = 0; l < LAYERS; l++) {
        static float row[KV * CAP];
        for (uint32_t kv = 0; kv < KV; kv++) {
            for (uint32_t slot = 0; slot < rig_slots(w->r, 0, l); slot++)
                row[kv * CAP + slot] = attention(w->seed, l, kv, pos, rig_pos(w->r, 0, l, kv, slot));
            head *h = &w->heads[l * KV + kv];
            for (uint32_t i = 0; i < h->n; i++) {
                float a = attention(w->seed, l, kv, pos, h->t[i].pos);
                h->t[i].a += a;
                h->t[i].squares += a * a;
            }
        }
        float p = logprob(w->seed, pos);
        w->r->logprobs = &p;
        rig_observe(w->r, l, row, CAP);
    }
}

static inline void check(const world *w, const char *when) {
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t kv = 0; kv < KV; kv++) {
            const head *h = &w->heads[l * KV + kv];
            cr_assert_eq(rig_slots(w->r, 0, l), h->n, "%s, %s: layer %u holds %u, not %u", w->policy, when, l,
                         rig_slots(w->r, 0, l), h->n);
            for (uint32_t i = 0; i < h->n; i++) {
                uint32_t slot = 0;
                while (slot < h->n && rig_pos(w->r, 0, l, kv, slot) != h->t[i].pos) slot++;
                cr_assert(slot < h->n, "%s, seed %llu, %s: layer %u, head %u lacks position %u", w->policy,
                          (unsigned long long)w->seed, when, l, kv, h->t[i].pos);
                kvf__head x = rig_head(w->r, 0, l, kv);
                for (uint32_t e = 0; e < D; e++) {
                    double v = (double)rig_get(w->r, kvf__v_row(&x, slot), e);
                    cr_assert(fabs(v - h->t[i].v[e]) < 1e-5, "%s, %s: layer %u, head %u, position %u: value %g, not %g",
                              w->policy, when, l, kv, h->t[i].pos, v, h->t[i].v[e]);
                }
            }
        }
}

static inline void events(world *w, kvf_moment moment, uint32_t kind, bool all, uint64_t fresh) {
    kvf_event list[LAYERS];
    uint32_t n = rig_due(w->r, 0, moment, kind, all, list), next_pos = w->r->next_pos[0];
    for (uint32_t l = 0; l < LAYERS; l++) {
        bool due = moment == KVF_AT_PROMPT_END ? rig_slots(w->r, 0, l) > w->size[l]
                                               : rig_slots(w->r, 0, l) == w->size[l] + w->k;
        for (uint32_t kv = 0; due && kv < KV; kv++) evict(w, &w->heads[l * KV + kv], l, next_pos);
    }
    if (n) rig_events(w->r, list, n, fresh);
}

static inline void open_world(world *w, const char *policy, uint32_t g, uint64_t seed, uint32_t threads) {
    *w = (world){.policy = policy, .g = g, .seed = seed};
    w->o = rig_policy(policy, NULL);
    w->r = rig_new((rig_config){.n_seqs = 1,
                                .n_layers = LAYERS,
                                .n_kv = KV,
                                .g = g,
                                .hpg = seed % 2 + 1,
                                .bs = BS,
                                .d = D,
                                .cap = CAP,
                                .n_arrays = 2,
                                .threads = threads,
                                .dtype = KVF_F32});
    size_t n = (size_t)LAYERS * KV * g * L;
    w->sums = calloc(n, sizeof(float));
    w->last = calloc(n, sizeof(float));
    w->squares = calloc(n, sizeof(float));
}

static inline void close_world(world *w) {
    rig_free(w->r);
    free(w->sums);
    free(w->last);
    free(w->squares);
}

/* The library's part of a prompt's end: sizes and events, over the accumulators as they are. */
static inline void end_prompt(world *w, uint32_t n_tokens, uint64_t fresh) {
    const float *logprobs[1] = {w->logprobs};
    float *squares[1] = {w->squares};
    uint32_t needs = kvf_policy_needs(&w->o);
    w->r->prompt_stride = L;
    w->r->prompt_sums[0] = needs & KVF_NEEDS_COL_SUMS ? w->sums : NULL;
    if (needs & KVF_NEEDS_LAST_ROWS) w->r->prompt_last[0] = w->last;
    if (needs & KVF_NEEDS_SQUARES) w->r->prompt_squares = squares;
    if (needs & KVF_NEEDS_LOGPROBS) w->r->prompt_logprobs = logprobs;
    kvf_policy_ops ops = kvf__policy_ops_resolve(w->o.ops);
    cr_assert(ops.metric == NULL);
    OK(ops.budget(w->r->state, 0, NULL, n_tokens, err));
    events(w, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, kvf_policy_n_arrays(&w->o) > 0, fresh);
    w->r->prompt_sums[0] = NULL;
    w->r->prompt_last[0] = NULL;
    w->r->prompt_squares = NULL;
    w->r->prompt_logprobs = NULL;
}

static inline void begin(world *w, uint32_t budget, uint32_t k) {
    w->o.budget_tokens = budget;
    w->o.evict_every = w->k = k;
    naive_sizes(w, budget);
    OK(kvf_policy_open(w->r->state, 0, &w->o, err));
    run_prompt(w);
}

/* A prompt, its event, 50 steps; k tokens go at a time. */
static inline void live(world *w, uint32_t budget, uint32_t k) {
    char when[40];
    begin(w, budget, k);
    end_prompt(w, L, w->seed * 0x9e3779b97f4a7c15u);
    check(w, "prompt");
    for (uint32_t i = 0; i < STEPS; i++) {
        step(w, L + i);
        if (kvf_policy_sizes(w->r->state, 0)[0].reserve != UINT32_MAX)
            events(w, KVF_AFTER_STEP, KVF_EVENT_DECODE, false, i % 3 == 0 ? ~0ull : 0);
        snprintf(when, sizeof when, "budget %u, k %u, step %u", budget, k, i);
        check(w, when);
    }
}

#endif
