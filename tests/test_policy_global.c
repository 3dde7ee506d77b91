/* budget global with scores from the model: sizes and kept positions against a naive choice of the best slots of all tables, over
 * whole lives, ranks, and the cases of an independent reader. */
#include <float.h>
#define _GNU_SOURCE
#include <jansson.h>
#include <pthread.h>

#include "test_policy_rig.h"
#include "tests/counts.h"

enum { MAX_LAYERS = 4, MAX_KV = 4, G = 2, D = 8, CAP = 256, MAX_TABLES = MAX_LAYERS * MAX_KV };

typedef struct life {
    rig *r;
    kvf_policy_options o;
    uint64_t seed;
    uint32_t n_layers, n_kv, n_groups, n_prompt, keep[MAX_TABLES], n_dealt, n_unequal, n_evicted;
    bool dealt;             /* by the newest due */
    bool repeated[2 * CAP]; /* by position: score repeat has a score for it */
    float *sums;            /* [n_layers][n_kv * G][CAP] */
} life;

/* Few different numbers, so that there are ties; some are NaN, some are not there yet. Tables differ. */
static float number(uint64_t seed, uint32_t l, uint32_t h, uint32_t pos) {
    uint64_t s = ((seed * 131 + l * 17 + h) * 1031 + pos) * 7 + 1;
    double u = rig_uniform(&s);
    if (rig_random(&s) % 61 == 0) return NAN;
    if (rig_random(&s) % 23 == 0) return INFINITY;
    if (rig_random(&s) % 97 == 0) return -INFINITY;
    return (float)(floor(pow(u, 1.0 + 2.0 * ((h * 3 + l) % 5)) * 64) / 16.0 - (seed % 2 ? 2.0 : 0.0));
}

static uint32_t slots_of(const life *x, uint32_t l, uint32_t h) {
    return x->r->n_slots[kvf__table_index(&x->r->view, 0, l, h)];
}

static void append(life *x) {
    rig *r = x->r;
    for (uint32_t l = 0; l < x->n_layers; l++)
        for (uint32_t h = 0; h < x->n_kv; h++) {
            uint64_t s = x->seed * 1009 + r->next_pos[0] * 31 + l * 7 + h;
            float k[D], v[D];
            for (uint32_t e = 0; e < D; e++) k[e] = (float)rig_normal(&s), v[e] = (float)rig_normal(&s);
            rig_put(r, 0, l, h, slots_of(x, l, h), r->next_pos[0], k, v);
            kvf__head head = rig_head(r, 0, l, h);
            r->pages.score[kvf__slot_index(&head, head.n_slots)] = number(x->seed, l, h, r->next_pos[0]);
        }
    for (uint32_t t = 0; t < x->n_layers * x->n_groups; t++) r->n_slots[t]++;
    r->next_pos[0]++;
}

/* ---- The naive choice ------------------------------------------------------------------------------------------- */

typedef struct token {
    int kind; /* 0: window, 1: sink, 2: neither */
    double worth;
    uint32_t pos;
} token;

static int by_rank(const void *pa, const void *pb) {
    const token *a = pa, *b = pb;
    if (a->kind != b->kind) return a->kind - b->kind;
    if (a->kind == 2 && isnan(a->worth) != isnan(b->worth)) return isnan(a->worth) ? 1 : -1;
    if (a->kind == 2 && !isnan(a->worth) && a->worth != b->worth) return a->worth > b->worth ? -1 : 1;
    return a->pos < b->pos ? -1 : 1;
}

/* score_mix: the logarithm of what attention gave a prompt's slot, beside the head's mean of it. */
static double mixed(const life *x, uint32_t l, uint32_t h, uint32_t i) {
    kvf__head head = rig_head(x->r, 0, l, h);
    double mean = 0, own = 0;
    for (uint32_t k = 0; k < head.n_slots; k++) {
        const float *sums = x->sums + (l * x->n_kv + h) * G * CAP;
        double most = fmax(fmax((double)sums[k], (double)sums[CAP + k]), 1e-6);
        double value = log(most / sqrt(x->r->next_pos[0] - rig_pos(x->r, 0, l, h, k)));
        mean += value / head.n_slots;
        if (k == i) own = value;
    }
    return x->o.score_mix * (own - mean);
}

/* The tokens of a head, the last to be evicted first. */
static uint32_t naive_head(const life *x, uint32_t l, uint32_t h, uint32_t window, bool mix, token *out) {
    const rig *r = x->r;
    kvf__head head = rig_head(r, 0, l, h);
    double sum = 0;
    uint32_t n = head.n_slots, n_known = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t pos = rig_pos(r, 0, l, h, i);
        float score = r->pages.score[kvf__slot_index(&head, i)];
        if (mix && x->o.score_mix > 0) score += (float)mixed(x, l, h, i);
        if (x->o.score == KVF_SCORE_REPEAT) score = x->repeated[pos] ? number(x->seed, l, h, pos) : INFINITY;
        out[i] = (token){pos + window >= r->next_pos[0] ? 0 : pos < x->o.sinks ? 1 : 2, score, pos};
        if (isfinite(score)) sum += score, n_known++;
    }
    for (uint32_t i = 0; i < n; i++)
        if (out[i].worth == (double)INFINITY) out[i].worth = n_known ? (float)(sum / n_known) : 0.0f;
    qsort(out, n, sizeof *out, by_rank);
    return n;
}

typedef struct unit {
    double value;
    uint32_t table, rank;
} unit;

static int better(const void *pa, const void *pb) {
    const unit *a = pa, *b = pb;
    if (a->value != b->value) return a->value > b->value ? -1 : 1;
    if (a->table != b->table) return a->table < b->table ? -1 : 1;
    return a->rank < b->rank ? -1 : 1;
}

/* Sizes of all tables, and what the floors add to the budget. */
static uint64_t naive_sizes(const life *x, uint32_t budget, uint32_t *window, uint32_t *want) {
    static unit units[MAX_TABLES * CAP];
    static token t[CAP];
    const kvf_policy_options *o = &x->o;
    uint32_t bs = o->budget_unit == KVF_BUDGET_BLOCK ? x->r->c.bs : 1, n_tables = 0, n = 0;
    uint32_t off = bs == 1 ? 0 : kvf__policy_k(o, x->r->c.bs);
    *window = o->window ? (isnan(o->threshold) ? KVF__MIN(o->window, budget) : o->window)
                        : KVF__MAX(1u, budget * o->m_parts / (o->n_parts + o->m_parts));
    uint32_t least = KVF__MAX((uint32_t)floor(o->head_floor * budget + 1e-6), o->sinks + *window);
    uint32_t first = (least + off + bs - 1) / bs, tables[MAX_TABLES];
    for (uint32_t table = 0; table < x->n_layers * x->n_groups; table++) {
        uint32_t l = table / x->n_groups, g = table % x->n_groups, hpg = x->n_kv / x->n_groups;
        if (kvf__policy_is_full_layer(o, l, x->n_layers)) continue;
        double value[CAP] = {0};
        uint32_t n_slots = 0;
        for (uint32_t h = g * hpg; h < (g + 1) * hpg; h++) {
            n_slots = naive_head(x, l, h, *window, false, t);
            for (uint32_t i = 0; i < n_slots; i++) {
                double w = t[i].kind < 2 ? FLT_MAX : isnan(t[i].worth) ? -FLT_MAX : t[i].worth;
                value[i] += fmin(fmax(w, -FLT_MAX), FLT_MAX);
            }
        }
        for (uint32_t u = first; u * bs - off < n_slots; u++)
            units[n++] = (unit){(float)fmin(fmax(value[u * bs - off], -FLT_MAX), FLT_MAX), table, u};
        want[table] = first;
        tables[n_tables++] = table;
    }
    if (!isnan(o->threshold)) {
        float least_value = (float)(o->threshold * (x->n_kv / x->n_groups));
        for (uint32_t i = 0; i < n; i++) want[units[i].table] += units[i].value >= least_value;
        for (uint32_t i = 0; i < n_tables; i++) want[tables[i]] = want[tables[i]] * bs - off;
        return 0;
    }
    uint64_t all = KVF__MAX((uint64_t)budget * n_tables / bs, (uint64_t)first * n_tables),
             left = all - first * n_tables;
    qsort(units, n, sizeof *units, better);
    for (uint32_t i = 0; i < n && left; i++, left--) want[units[i].table]++;
    for (uint32_t i = 0; i < n_tables; i++)
        want[tables[i]] = (want[tables[i]] + (uint32_t)(left / n_tables) + (i < left % n_tables)) * bs - off;
    return all;
}

/* ---- A life --------------------------------------------------------------------------------------------------- */

/* kvf_policy_due, checked where it gives the tables new sizes. */
static void due(life *x, kvf_moment moment) {
    rig *r = x->r;
    kvf_policy_batch b = rig_batch(r);
    kvf__policy_seq *s = kvf__policy_seq_get(r->state, 0);
    uint8_t before[MAX_LAYERS];
    uint32_t n_due = 0, want[MAX_TABLES], window, first = x->n_layers;
    memcpy(before, s->dealt, x->n_layers);
    OK(kvf_policy_due(r->state, r->stream, &b, 0, moment, x->keep, &n_due, err));
    const kvf_layer_size *of = kvf_policy_group_sizes(r->state, 0), *sizes = kvf_policy_sizes(r->state, 0);
    cr_assert_eq(of != NULL, sizes != NULL);
    for (uint32_t l = 0; of && l < x->n_layers; l++)
        if (s->dealt[l] == KVF__DEALT && before[l] != KVF__DEALT && sizes[l].keep != UINT32_MAX)
            first = KVF__MIN(first, l);
    x->dealt = first < x->n_layers;
    if (!x->dealt) return;
    (void)naive_sizes(x, s->budget, &window, want);
    x->n_dealt++;
    for (uint32_t l = 0; l < x->n_layers; l++) {
        uint64_t sum = 0;
        for (uint32_t g = 0; g < x->n_groups; g++) {
            uint32_t t = l * x->n_groups + g;
            if (kvf__policy_is_full_layer(&x->o, l, x->n_layers)) {
                cr_assert(of[t].keep == UINT32_MAX && x->keep[t] == 0);
                continue;
            }
            cr_assert(s->dealt[l] == KVF__DEALT);
            cr_assert_eq(of[t].keep, want[t], "seed %llu, table %u of %u: %u, not %u", (unsigned long long)x->seed, t,
                         x->n_layers * x->n_groups, of[t].keep, want[t]);
            cr_assert(of[t].window == window && of[t].hh + window == of[t].keep);
            cr_assert_eq(of[t].reserve - of[t].keep, kvf__policy_k(&x->o, r->c.bs));
            sum += of[t].keep;
            x->n_unequal += of[t].keep != of[l * x->n_groups].keep || want[t] != want[0];
        }
        if (sizes[l].keep != UINT32_MAX) cr_assert_eq(sizes[l].keep, sum / x->n_groups);
    }
}

/* Carries out what is due; each head keeps the tokens that a naive choice keeps. */
static void carry_out(life *x, uint32_t kind, uint64_t fresh) {
    static token t[MAX_TABLES * MAX_KV][CAP];
    kvf_event events[MAX_TABLES];
    uint32_t n = 0, hpg = x->n_kv / x->n_groups;
    const kvf_layer_size *of = kvf_policy_group_sizes(x->r->state, 0);
    for (uint32_t i = 0; i < x->n_layers * x->n_groups; i++) {
        uint32_t l = i / x->n_groups, g = i % x->n_groups;
        if (!x->keep[i] && x->r->prompt_sums[0]) x->keep[i] = x->r->n_slots[i]; /* its scores are stored */
        if (!x->keep[i]) continue;
        events[n++] = (kvf_event){0, l, x->keep[i], kind, g, 1};
        for (uint32_t h = g * hpg; h < (g + 1) * hpg; h++) {
            uint32_t n_slots = naive_head(x, l, h, of ? of[i].window : 0, true, t[l * x->n_kv + h]);
            if (kind == KVF_EVENT_DECODE && !x->dealt)
                cr_assert_eq(n_slots - x->keep[i], kvf__policy_k(&x->o, x->r->c.bs));
        }
    }
    if (!n) return;
    rig_events(x->r, events, n, fresh);
    for (uint32_t e = 0; e < n; e++)
        for (uint32_t h = events[e].group_begin * hpg; h < (events[e].group_begin + 1) * hpg; h++) {
            bool kept[CAP] = {false};
            for (uint32_t i = 0; i < events[e].n_keep; i++) kept[rig_pos(x->r, 0, events[e].layer, h, i)] = true;
            for (uint32_t i = 0; i < events[e].n_keep; i++)
                cr_assert(kept[t[events[e].layer * x->n_kv + h][i].pos], "seed %llu, layer %u, head %u: %u was evicted",
                          (unsigned long long)x->seed, events[e].layer, h, t[events[e].layer * x->n_kv + h][i].pos);
            x->n_evicted++;
        }
}

static void open_rig(life *x, const kvf_policy_options *o, rig_config c, uint64_t seed) {
    *x = (life){.o = *o, .seed = seed, .n_layers = c.n_layers, .n_kv = c.n_kv, .n_groups = c.n_kv / c.hpg};
    c.n_seqs = 1, c.g = G, c.d = D, c.cap = CAP, c.n_arrays = 1, c.mass = true;
    x->r = rig_new(c);
    x->sums = calloc(c.n_layers * c.n_kv * G * CAP, sizeof *x->sums);
    OK(kvf_policy_open(x->r->state, 0, o, err));
}

static void life_free(life *x) {
    free(x->sums);
    rig_free(x->r);
}

/* What a repetition of the newest n tokens leaves: the first query head of each KV head gave most. */
static void repeat(life *x, uint32_t n) {
    rig *r = x->r;
    r->prompt_sums[0] = x->sums;
    r->prompt_stride = CAP;
    for (uint32_t i = 0; i < n; i++) x->repeated[r->next_pos[0] - 1 - i] = true;
    for (uint32_t q = 0; q < x->n_layers * x->n_kv * G; q++)
        for (uint32_t i = 0; i < CAP; i++) {
            uint32_t l = q / (x->n_kv * G), h = q / G % x->n_kv, n_slots = slots_of(x, l, h);
            x->sums[q * CAP + i] = 1e6f; /* not read */
            if (i < n_slots && i >= n_slots - n)
                x->sums[q * CAP + i] = number(x->seed, l, h, rig_pos(r, 0, l, h, i)) - (float)(q % G * (i * 7 % 5));
        }
}

static void prompt(life *x, uint32_t n, uint64_t fresh) {
    for (uint32_t i = 0; i < n; i++) append(x);
    x->n_prompt += n;
    if (x->o.score == KVF_SCORE_REPEAT) repeat(x, n);
    OK(kvf_policy_budget(x->r->state, 0, NULL, x->n_prompt, err));
    due(x, KVF_AT_PROMPT_END);
    carry_out(x, KVF_EVENT_PROMPT, fresh);
    x->r->prompt_sums[0] = NULL;
}

static void step(life *x, uint64_t fresh) {
    due(x, KVF_BEFORE_APPEND);
    carry_out(x, KVF_EVENT_PROMPT, fresh);
    append(x);
    bool deferred = x->o.defer_first_decode && !kvf_policy_sizes(x->r->state, 0);
    due(x, KVF_AFTER_STEP);
    carry_out(x, deferred ? KVF_EVENT_PROMPT : KVF_EVENT_DECODE, fresh);
    const kvf_layer_size *of = kvf_policy_group_sizes(x->r->state, 0);
    for (uint32_t t = 0; of && t < x->n_layers * x->n_groups; t++)
        cr_assert(of[t].keep == UINT32_MAX || x->r->n_slots[t] < of[t].reserve,
                  "seed %llu, table %u: %u slots, keep %u", (unsigned long long)x->seed, t, x->r->n_slots[t],
                  of[t].keep);
}

/* Entries of the score pages that nobody reads. */
static void clear_unscored(life *x) {
    const kvf__policy_seq *s = kvf__policy_seq_get(x->r->state, 0);
    for (uint32_t l = 0; l < x->n_layers; l++)
        for (uint32_t h = 0; h < x->n_kv; h++)
            for (uint32_t i = s->scored[l * x->n_kv + h]; i < slots_of(x, l, h); i++)
                *rig_score(x->r, 0, l, h, 0, i) = 0;
}

static rig_config draw(uint64_t seed, kvf_policy_options *o, uint32_t *n_prompt) {
    static const double floors[] = {0.25, 0.0, 0.5, 1.0, 0.9};
    uint64_t s = seed;
    *o = rig_policy("h2o", NULL);
    rig_config c = {.n_layers = 1 + (uint32_t)(rig_random(&s) % MAX_LAYERS),
                    .n_kv = 1 + (uint32_t)(rig_random(&s) % MAX_KV),
                    .bs = seed % 3 ? 8 : 16,
                    .threads = 1};
    c.hpg = seed % 4 == 1 ? c.n_kv : 1;
    *n_prompt = 60 + (uint32_t)(rig_random(&s) % 60);
    o->budget = KVF_BUDGET_GLOBAL;
    o->score = seed % 2 ? KVF_SCORE_PROBE : KVF_SCORE_REPEAT;
    o->merge = seed % 10 == 9 ? KVF_MERGE_AVERAGE : KVF_MERGE_NONE;
    o->head_floor = floors[seed % 5];
    o->rho = 0.15 + 0.5 * rig_uniform(&s);
    o->min_tokens = 0;
    o->sinks = (uint32_t)(rig_random(&s) % 6);
    o->window = seed % 3 == 2 ? 8 : 0;
    o->evict_every = seed % 4;
    if (seed % 7 == 3) o->budget_unit = KVF_BUDGET_BLOCK;
    if (seed % 8 == 5) o->budget_tokens = *n_prompt + 5; /* fits, and overflows in decode */
    if (seed % 9 == 4 && !o->budget_tokens) o->defer_first_decode = 1;
    if (seed % 11 == 6) o->threshold = 0.75;
    if (seed % 6 == 2 && c.n_layers > 1) o->full_layers[o->n_full_layers++] = -1;
    return c;
}

Test(policy_global, tables_get_the_best_slots_of_all_and_the_total_is_exact) {
    life x, y;
    uint32_t n_dealt = 0, n_unequal = 0, n_evicted = 0;
    for (uint64_t seed = 0; seed < 120; seed++) {
        kvf_policy_options o;
        uint32_t n_prompt, wider;
        rig_config c = draw(seed, &o, &n_prompt);
        uint64_t fresh = seed * 0x9e3779b97f4a7c15ull;
        open_rig(&x, &o, c, seed);
        c.threads = 3; /* threads and fresh blocks: the same bits */
        open_rig(&y, &o, c, seed);
        wider = seed % 2 ? 24 : n_prompt * 3 / 4;
        prompt(&x, n_prompt, 0);
        prompt(&y, n_prompt, fresh);
        for (uint32_t i = 0; i < 40; i++) {
            if (i == 15 && seed % 3 == 0) prompt(&x, 20, 0), prompt(&y, 20, fresh);
            if (i == 25 && seed % 2 == 0) { /* tighter, or wider */
                OK(kvf_policy_set_budget(x.r->state, 0, 1, wider, err));
                OK(kvf_policy_set_budget(y.r->state, 0, 1, wider, err));
            }
            step(&x, 0);
            step(&y, fresh);
        }
        size_t n, m;
        clear_unscored(&x);
        clear_unscored(&y);
        unsigned char *a = rig_dump(x.r, 0, &n), *b = rig_dump(y.r, 0, &m);
        cr_assert(n == m && !memcmp(a, b, n), "seed %llu: threads or fresh blocks differ", (unsigned long long)seed);
        free(a);
        free(b);
        n_dealt += x.n_dealt, n_unequal += x.n_unequal, n_evicted += x.n_evicted;
        life_free(&x);
        life_free(&y);
    }
    cr_assert(n_dealt > 150 && n_unequal > 400 && n_evicted > 5000, "%u, %u, %u", n_dealt, n_unequal, n_evicted);
}

/* ---- Edges ------------------------------------------------------------------------------------------------------- */

static kvf_policy_options plain(uint32_t budget, uint32_t window, uint32_t sinks, double head_floor) {
    kvf_policy_options o = rig_policy("h2o", NULL);
    o.budget = KVF_BUDGET_GLOBAL;
    o.score = KVF_SCORE_PROBE;
    o.budget_tokens = budget;
    o.window = window;
    o.sinks = sinks;
    o.head_floor = head_floor;
    return o;
}

static void sizes_are(const kvf_policy_options *o, rig_config c, uint32_t n_prompt, const uint32_t *want,
                      uint64_t raised) {
    life x;
    c.bs = 8, c.threads = 1, c.hpg = c.hpg ? c.hpg : 1;
    open_rig(&x, o, c, 4);
    prompt(&x, n_prompt, 0);
    const kvf_layer_size *of = kvf_policy_group_sizes(x.r->state, 0);
    cr_assert(of);
    for (uint32_t t = 0; t < x.n_layers * x.n_groups; t++) cr_expect_eq(of[t].keep, want[t], "%u: %u", t, of[t].keep);
    cr_expect_eq(counts_of(x.r->state, 0).raised_tokens, raised);
    life_free(&x);
}

Test(policy_global, a_mix_adds_what_attention_gave) {
    uint32_t n_unequal = 0;
    for (uint64_t seed = 0; seed < 12; seed++) {
        kvf_policy_options o = plain(30, 6, 2, 0.25);
        o.score_mix = seed % 4 * 0.4;
        o.gqa = KVF_GQA_MAX;
        life x;
        open_rig(&x, &o, (rig_config){.n_layers = 3, .n_kv = 2, .bs = 8, .hpg = 1, .threads = 1 + (uint32_t)seed % 2},
                 seed);
        for (uint32_t i = 0; i < 3 * 2 * G * CAP; i++) {
            uint64_t s = seed * 1013 + i;
            x.sums[i] = i % 37 ? (float)pow(rig_uniform(&s), 4) * 9 : 0;
        }
        for (uint32_t i = 0; i < 90; i++) append(&x);
        x.n_prompt = 90;
        x.r->prompt_sums[0] = x.sums;
        x.r->prompt_stride = CAP;
        OK(kvf_policy_budget(x.r->state, 0, NULL, x.n_prompt, err));
        due(&x, KVF_AT_PROMPT_END);
        carry_out(&x, KVF_EVENT_PROMPT, seed);
        n_unequal += x.n_unequal;
        life_free(&x);
    }
    cr_assert_gt(n_unequal, 0);
}

Test(policy_global, one_table_keeps_the_budget) {
    kvf_policy_options o = plain(20, 4, 4, 0.25);
    sizes_are(&o, (rig_config){.n_layers = 1, .n_kv = 1}, 50, (uint32_t[]){20}, 0);
    sizes_are(&o, (rig_config){.n_layers = 1, .n_kv = 3, .hpg = 3}, 50, (uint32_t[]){20}, 0);
}

Test(policy_global, floors_beyond_the_budget_raise_it) {
    kvf_policy_options o = plain(20, 18, 10, 0.25); /* sinks and window alone are 28 */
    sizes_are(&o, (rig_config){.n_layers = 2, .n_kv = 2}, 100, (uint32_t[]){28, 28, 28, 28}, 16);
    o = plain(20, 0, 4, 1.0); /* a whole share each */
    sizes_are(&o, (rig_config){.n_layers = 2, .n_kv = 2}, 100, (uint32_t[]){20, 20, 20, 20}, 0);
    o = plain(20, 64, 4, 0.25); /* of a window beyond the budget as much counts as the budget */
    sizes_are(&o, (rig_config){.n_layers = 2, .n_kv = 1}, 100, (uint32_t[]){24, 24}, 8);
    sizes_are(&o, (rig_config){.n_layers = 2, .n_kv = 1}, 22, (uint32_t[]){24, 24}, 8); /* sinks and window cover it */
}

/* A table of NaN is the last to get a slot; one without any score counts as 0. */
Test(policy_global, what_has_no_number_gets_least) {
    for (int which = 0; which < 3; which++) {
        life x;
        kvf_policy_options o = plain(20, 4, 4, 0.5);
        open_rig(&x, &o, (rig_config){.n_layers = 3, .n_kv = 1, .hpg = 1, .bs = 8, .threads = 1}, 4);
        for (uint32_t i = 0; i < 60; i++) append(&x);
        for (uint32_t l = 0; l < 3; l++)
            for (uint32_t i = 0; i < 60; i++) {
                kvf__head head = rig_head(x.r, 0, l, 0);
                x.r->pages.score[kvf__slot_index(&head, i)] = l != 1 ? 0.5f + (float)i : which ? INFINITY : NAN;
            }
        x.n_prompt = 60;
        OK(kvf_policy_budget(x.r->state, 0, NULL, 60, err));
        due(&x, KVF_AT_PROMPT_END);
        const kvf_layer_size *of = kvf_policy_group_sizes(x.r->state, 0);
        cr_assert(of[0].keep == 25 && of[1].keep == 10 && of[2].keep == 25, "%u %u %u", of[0].keep, of[1].keep,
                  of[2].keep);
        carry_out(&x, KVF_EVENT_PROMPT, 0);
        life_free(&x);
    }
}

Test(policy_global, blocks_are_dealt_whole) {
    static life x;
    uint32_t sum = 0;
    kvf_policy_options o = plain(50, 8, 4, 0.25);
    o.budget_unit = KVF_BUDGET_BLOCK;
    o.evict_every = 4;
    open_rig(&x, &o, (rig_config){.n_layers = 3, .n_kv = 3, .hpg = 1, .bs = 16, .threads = 1}, 9);
    prompt(&x, 200, 0);
    for (uint32_t t = 0; t < 9; t++) {
        uint32_t reserve = kvf_policy_group_sizes(x.r->state, 0)[t].reserve;
        cr_expect_eq(reserve % 16, 0);
        sum += reserve / 16;
    }
    cr_expect_eq(sum, 50 * 9 / 16);
    kvf_policy_need need;
    OK(kvf_policy_project(&o, 3, 3, 16, 200, 10, &need, err));
    cr_expect_eq(need.steady_blocks, sum);
    life_free(&x);
}

Test(policy_global, misuse_is_refused) {
    life x;
    kvf_policy_options o = plain(20, 4, 4, 0.25), bad = o;
    bad.redistribute = 0;
    FAILS(kvf_policy_options_check(&bad, 2, 16, err), KVF_E_INVALID, "budget global: needs redistribute 1");
    bad = o;
    bad.scope = KVF_SCOPE_LAYER;
    FAILS(kvf_policy_options_check(&bad, 2, 16, err), KVF_E_INVALID, "budget global: needs scope head");
    open_rig(&x, &o, (rig_config){.n_layers = 2, .n_kv = 2, .hpg = 1, .bs = 8, .threads = 1}, 4);
    for (uint32_t i = 0; i < 60; i++) append(&x);
    OK(kvf_policy_budget(x.r->state, 0, NULL, 60, err));
    kvf_policy_batch b = rig_batch(x.r);
    kvf_pages without = x.r->pages;
    uint32_t n_due = 0;
    without.score = NULL;
    b.pages = &without;
    FAILS(kvf_policy_due(x.r->state, NULL, &b, 0, KVF_AT_PROMPT_END, x.keep, &n_due, err), KVF_E_INVALID,
          "pages.score must be set");
    cr_assert_eq(kvf_policy_group_sizes(x.r->state, 0)[0].keep, 20); /* as before */
    due(&x, KVF_AT_PROMPT_END);
    carry_out(&x, KVF_EVENT_PROMPT, 0);
    b.pages = NULL; /* sizes alone: there are no scores, so all are equal */
    OK(kvf_policy_open(x.r->state, 1, &o, err));
    OK(kvf_policy_budget(x.r->state, 1, NULL, 60, err));
    x.r->seq_index[0] = 1;
    OK(kvf_policy_due(x.r->state, NULL, &b, 0, KVF_AT_PROMPT_END, x.keep, &n_due, err));
    for (uint32_t t = 0; t < 4; t++) cr_assert_eq(kvf_policy_group_sizes(x.r->state, 1)[t].keep, 20);
    life_free(&x);
}

/* ---- Ranks --------------------------------------------------------------------------------------------------------- */

enum { RANKS = 2 };
static pthread_barrier_t together;
static double shared[RANKS][4096];
static uint32_t n_sums;

static kvf_status sum_ranks(void *ctx, double *values, uint64_t n, kvf_error *e) {
    (void)e;
    uintptr_t rank = (uintptr_t)ctx;
    memcpy(shared[rank], values, n * sizeof *values);
    (void)pthread_barrier_wait(&together);
    for (uint64_t i = 0; i < n; i++) values[i] = shared[0][i] + shared[1][i];
    if (!rank) n_sums++;
    (void)pthread_barrier_wait(&together);
    return KVF_OK;
}

typedef struct rank_job {
    life *x;
    uintptr_t rank;
    uint32_t keep[MAX_TABLES], n_due;
    kvf_status status;
} rank_job;

static void *run_rank(void *ctx) {
    rank_job *job = ctx;
    rig *r = job->x->r;
    const kvf__ranks ranks = {sum_ranks, (void *)job->rank};
    kvf_policy_batch b = rig_batch(r);
    job->status = kvf__policy_due(r->state, NULL, &b, 0, KVF_AT_PROMPT_END, job->keep, &job->n_due, &ranks, NULL);
    return NULL;
}

/* Two ranks of two KV heads each agree on the sizes that one rank of four computes. */
Test(policy_global, ranks_find_the_same_threshold) {
    cr_assert_eq(pthread_barrier_init(&together, NULL, RANKS), 0);
    for (uint64_t seed = 0; seed < 20; seed++) {
        life whole, part[RANKS];
        rank_job jobs[RANKS];
        pthread_t threads[RANKS];
        kvf_policy_options o = plain(seed % 4 == 3 ? 16 : 24, 4, 4, seed % 3 ? 0.5 : 0.0);
        if (seed % 4 == 2) o.budget_unit = KVF_BUDGET_BLOCK;
        uint32_t hpg = seed % 5 == 4 ? 2 : 1, n_prompt = seed % 4 == 3 ? 17 : 60, n = 4 / hpg;
        rig_config c = {.n_layers = 3, .n_kv = 4, .hpg = hpg, .bs = 8, .threads = 1};
        open_rig(&whole, &o, c, seed);
        prompt(&whole, n_prompt, 0);
        for (uintptr_t k = 0; k < RANKS; k++) {
            c.n_kv = 2;
            open_rig(&part[k], &o, c, seed);
            kvf_policy_state_config *config = &part[k].r->state->config;
            for (uint32_t i = 0; i < n_prompt; i++) append(&part[k]);
            kvf_policy_state *old = part[k].r->state;
            kvf_policy_state_config own = *config;
            own.n_q_heads_total = 4 * G, own.q_head_begin = (uint32_t)k * 2 * G;
            OK(kvf_policy_state_create(&own, &part[k].r->state, err));
            kvf_policy_state_destroy(old);
            OK(kvf_policy_open(part[k].r->state, 0, &o, err));
            OK(kvf_policy_budget(part[k].r->state, 0, NULL, n_prompt, err));
            for (uint32_t l = 0; l < 3; l++)
                for (uint32_t h = 0; h < 2; h++) {
                    kvf__head head = rig_head(part[k].r, 0, l, h);
                    for (uint32_t i = 0; i < n_prompt; i++)
                        part[k].r->pages.score[kvf__slot_index(&head, i)] = number(seed, l, (uint32_t)k * 2 + h, i);
                }
            jobs[k] = (rank_job){.x = &part[k], .rank = k};
        }
        n_sums = 0;
        for (uint32_t k = 0; k < RANKS; k++) cr_assert_eq(pthread_create(&threads[k], NULL, run_rank, &jobs[k]), 0);
        for (uint32_t k = 0; k < RANKS; k++) cr_assert_eq(pthread_join(threads[k], NULL), 0);
        cr_assert_leq(n_sums, 4);
        const kvf_layer_size *want = kvf_policy_group_sizes(whole.r->state, 0);
        for (uint32_t k = 0; k < RANKS; k++) {
            OK(jobs[k].status);
            const kvf_layer_size *got = kvf_policy_group_sizes(part[k].r->state, 0);
            for (uint32_t l = 0; l < 3; l++)
                for (uint32_t g = 0; g < n / 2; g++)
                    cr_assert_eq(got[l * n / 2 + g].keep, want[l * n + k * n / 2 + g].keep,
                                 "seed %llu, rank %u, layer %u, group %u", (unsigned long long)seed, k, l, g);
            life_free(&part[k]);
        }
        life_free(&whole);
    }
    (void)pthread_barrier_destroy(&together);
}

/* ---- An independent reader's cases ------------------------------------------------------------------------------ */

static double num(const json_t *o, const char *key) { return json_number_value(json_object_get(o, key)); }

static void golden_case(const json_t *all, const json_t *c) {
    const json_t *scores = json_object_get(all, json_string_value(json_object_get(c, "score")));
    const json_t *sizes = json_object_get(c, "sizes"), *kept = json_object_get(c, "kept"), *list;
    uint32_t n_layers = (uint32_t)json_array_size(sizes), n_kv = (uint32_t)json_array_size(json_array_get(sizes, 0));
    uint32_t n = (uint32_t)json_array_size(json_object_get(all, "prompt")), n_due;
    kvf_policy_options o = plain(0, (uint32_t)num(c, "window"), (uint32_t)num(c, "sinks"), num(c, "floor"));
    o.rho = num(c, "rho");
    o.min_tokens = 0;
    rig *r = rig_new((rig_config){.n_seqs = 1,
                                  .n_layers = n_layers,
                                  .n_kv = n_kv,
                                  .g = G,
                                  .hpg = 1,
                                  .bs = 16,
                                  .d = D,
                                  .cap = n,
                                  .n_arrays = 1,
                                  .threads = 1});
    const float zero[D] = {0};
    char name[16];
    for (uint32_t l = 0; l < n_layers; l++)
        for (uint32_t h = 0; h < n_kv; h++) {
            snprintf(name, sizeof name, "%u", l);
            list = json_array_get(json_object_get(scores, name), h);
            for (uint32_t i = 0; i < n; i++) {
                rig_put(r, 0, l, h, i, i, zero, zero);
                kvf__head head = rig_head(r, 0, l, h);
                r->pages.score[kvf__slot_index(&head, i)] = (float)json_number_value(json_array_get(list, i));
            }
            r->n_slots[l * n_kv + h] = n;
        }
    r->next_pos[0] = n;
    uint32_t *keep = calloc(n_layers * n_kv, sizeof *keep), n_events = 0;
    kvf_event *events = calloc(n_layers * n_kv, sizeof *events);
    kvf_policy_batch b = rig_batch(r);
    OK(kvf_policy_open(r->state, 0, &o, err));
    OK(kvf_policy_budget(r->state, 0, NULL, n, err));
    OK(kvf_policy_due(r->state, NULL, &b, 0, KVF_AT_PROMPT_END, keep, &n_due, err));
    for (uint32_t t = 0; t < n_layers * n_kv; t++) {
        double want = json_number_value(json_array_get(json_array_get(sizes, t / n_kv), t % n_kv));
        cr_assert_eq(kvf_policy_group_sizes(r->state, 0)[t].keep, (uint32_t)want, "layer %u, head %u", t / n_kv,
                     t % n_kv);
        if (keep[t]) events[n_events++] = (kvf_event){0, t / n_kv, keep[t], KVF_EVENT_PROMPT, t % n_kv, 1};
    }
    rig_events(r, events, n_events, 0);
    const char *layer;
    json_t *heads;
    json_object_foreach((json_t *)(uintptr_t)kept, layer, heads) for (uint32_t h = 0; h < n_kv; h++) {
        list = json_array_get(heads, h);
        uint32_t l = (uint32_t)strtoul(layer, NULL, 10);
        cr_assert_eq(json_array_size(list), r->n_slots[l * n_kv + h]);
        for (uint32_t i = 0; i < r->n_slots[l * n_kv + h]; i++)
            cr_assert_eq(rig_pos(r, 0, l, h, i), (uint32_t)json_integer_value(json_array_get(list, i)));
    }
    free(keep);
    free(events);
    rig_free(r);
}

/* KVFOLD_SCORES names a file of scores of a real model, with the sizes and positions that six settings keep. */
Test(policy_global, independent_readers_sizes_and_positions) {
    const char *path = getenv("KVFOLD_SCORES");
    if (!path) cr_skip_test("KVFOLD_SCORES names no file of an independent reader's scores");
    json_error_t error;
    json_t *all = json_load_file(path, 0, &error);
    cr_assert(all, "%s: %s", path, error.text);
    const json_t *cases = json_object_get(all, "threshold");
    cr_assert_eq(json_array_size(cases), 6);
    for (size_t i = 0; i < 6; i++) golden_case(all, json_array_get(cases, i));
    json_decref(all);
}
