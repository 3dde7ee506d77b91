/* head_budget adaptive: what the groups of a layer get, against a naive choice of the best slots of all of them, and a
 * sequence's life with tables of different sizes. */
#include "test_policy_rig.h"

enum { LAYERS = 2, N_KV = 4, G = 2, D = 16, CAP = 256, BS = 8, TABLES = LAYERS * N_KV };

typedef struct life {
    rig *r;
    kvf_policy_options o;
    uint64_t seed;
    float sums[LAYERS * N_KV * G * CAP];
    uint32_t keep[TABLES], n_due;
    uint32_t n_dealt, n_unequal; /* what has been seen */
} life;

static uint32_t n_slots_of(const life *x, uint32_t l, uint32_t g) { return x->r->n_slots[l * x->r->n_groups + g]; }

/* Numbers are multiples of 2^-10: their sums are exact. Heads differ in how even they are. */
static float number(uint64_t seed, uint32_t what, uint32_t l, uint32_t h, uint32_t pos) {
    uint64_t s = ((seed * 31 + what) * 131 + l * 17 + h) * 1031 + pos;
    double u = rig_uniform(&s);
    return (float)floor(pow(u, 1.0 + 2.0 * ((h + l) % N_KV)) * 4096) / 1024.0f;
}

static void append(life *x) {
    rig *r = x->r;
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t h = 0; h < N_KV; h++) {
            uint64_t s = x->seed * 1009 + r->next_pos[0] * 31 + l * 7 + h;
            float k[D], v[D];
            for (uint32_t e = 0; e < D; e++) {
                k[e] = (float)rig_normal(&s);
                v[e] = (float)rig_normal(&s);
            }
            rig_put(r, 0, l, h, n_slots_of(x, l, h / r->c.hpg), r->next_pos[0], k, v);
        }
    for (uint32_t t = 0; t < LAYERS * r->n_groups; t++) r->n_slots[t]++;
    r->next_pos[0]++;
}

static void observe(life *x) {
    rig *r = x->r;
    for (uint32_t l = 0; l < LAYERS; l++) {
        float row[N_KV * CAP] = {0};
        for (uint32_t h = 0; h < N_KV; h++)
            for (uint32_t i = 0; i < n_slots_of(x, l, h / r->c.hpg); i++)
                row[h * CAP + i] = number(x->seed, 1 + r->next_pos[0], l, h, rig_pos(r, 0, l, h, i));
        rig_observe(r, l, row, CAP);
    }
}

/* ---- The naive choice ----------------------------------------------------------------------------------------- */

typedef struct candidate {
    double value;
    uint32_t group, rank;
} candidate;

static int falling(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}
static int better(const void *pa, const void *pb) {
    const candidate *a = pa, *b = pb;
    if (a->value != b->value) return a->value > b->value ? -1 : 1;
    if (a->group != b->group) return a->group < b->group ? -1 : 1;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

/* What the slots of a head are worth, the best first, without those that stay in any case. */
static uint32_t worths(const life *x, uint32_t l, uint32_t h, uint32_t window, double *out) {
    const rig *r = x->r;
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_slots_of(x, l, h / r->c.hpg); i++) {
        uint32_t pos = rig_pos(r, 0, l, h, i);
        if (pos < x->o.sinks || pos + window >= r->next_pos[0]) continue;
        double w = 0;
        if (r->prompt_sums[0])
            for (uint32_t q = 0; q < G; q++) w += x->sums[((l * N_KV + h) * G + q) * CAP + i];
        else
            w = rig_score(r, 0, l, h, 0, i)[0];
        out[n++] = w;
    }
    qsort(out, n, sizeof *out, falling);
    return n;
}

/* Slots of each group of a layer that is dealt now. */
static void naive(const life *x, uint32_t l, const kvf_layer_size *size, uint32_t lo, uint32_t *want) {
    static candidate c[N_KV * CAP];
    static double w[CAP];
    const rig *r = x->r;
    uint32_t unit = x->o.budget_unit == KVF_BUDGET_BLOCK ? BS : 1, off = unit == 1 ? 0 : size->reserve - size->keep;
    uint32_t least = (uint32_t)floor(x->o.head_floor * size->keep + 1e-6), n = 0;
    if (least < lo) least = lo;
    if (least < x->o.sinks + size->window + 1) least = x->o.sinks + size->window + 1;
    if (least > size->keep) least = size->keep;
    uint32_t all = (size->keep + off) / unit, first = (least + off + unit - 1) / unit;
    if (first > all) first = all;
    for (uint32_t g = 0; g < r->n_groups; g++) {
        double value[CAP] = {0};
        uint32_t slots = n_slots_of(x, l, g), n_worths = 0;
        for (uint32_t h = g * r->c.hpg; h < (g + 1) * r->c.hpg; h++) {
            n_worths = worths(x, l, h, size->window, w);
            for (uint32_t i = 0; i < n_worths; i++) value[slots - n_worths + i] += w[i];
        }
        for (uint32_t u = first; u * unit - off < slots; u++) {
            double sum = 0;
            for (uint32_t i = u * unit - off; i < (u + 1) * unit - off && i < slots; i++) sum += value[i];
            c[n++] = (candidate){sum, g, u};
        }
        want[g] = first;
    }
    uint32_t left = (all - first) * r->n_groups;
    qsort(c, n, sizeof *c, better);
    for (uint32_t i = 0; i < n && left; i++, left--) want[c[i].group]++;
    for (uint32_t g = 0; g < r->n_groups; g++)
        want[g] = (want[g] + left / r->n_groups + (g < left % r->n_groups)) * unit - off;
}

/* ---- A life --------------------------------------------------------------------------------------------------------- */

/* kvf_policy_due, checked: dealt layers are the naive ones', totals exact, no table above its size goes on. */
static void due(life *x, kvf_moment moment) {
    rig *r = x->r;
    kvf_policy_batch b = rig_batch(r);
    kvf__policy_seq *s = kvf__policy_seq_get(r->state, 0);
    uint8_t before[LAYERS];
    memcpy(before, s->dealt, sizeof before);
    OK(kvf_policy_due(r->state, r->stream, &b, 0, moment, x->keep, &x->n_due, err));
    const kvf_layer_size *sizes = kvf_policy_sizes(r->state, 0), *of = kvf_policy_group_sizes(r->state, 0);
    uint32_t n_due = 0;
    for (uint32_t t = 0; t < LAYERS * r->n_groups; t++) n_due += x->keep[t] != 0;
    cr_assert_eq(n_due, x->n_due);
    cr_assert_eq(of != NULL, sizes != NULL);
    for (uint32_t l = 0; sizes && l < LAYERS; l++) {
        uint32_t want[N_KV], sum = 0, unequal = 0;
        bool dealt = s->dealt[l] == KVF__DEALT && before[l] != KVF__DEALT;
        if (dealt) naive(x, l, &sizes[l], s->lo, want);
        for (uint32_t g = 0; g < r->n_groups; g++) {
            const kvf_layer_size *z = &of[l * r->n_groups + g];
            if (dealt)
                cr_assert_eq(z->keep, want[g], "seed %llu, layer %u, group %u: %u, not %u", (unsigned long long)x->seed,
                             l, g, z->keep, want[g]);
            cr_assert(z->window == sizes[l].window && z->hh + z->window == z->keep);
            cr_assert_eq(z->reserve - z->keep, sizes[l].reserve - sizes[l].keep);
            sum += z->keep;
            unequal += z->keep != sizes[l].keep;
        }
        cr_assert_eq(sum, sizes[l].keep * r->n_groups, "seed %llu: the total is exact", (unsigned long long)x->seed);
        x->n_dealt += dealt;
        x->n_unequal += dealt && unequal;
    }
}

static void carry_out(life *x, uint32_t kind, bool all, uint64_t fresh) {
    kvf_event events[TABLES];
    uint32_t n = 0, n_groups = x->r->n_groups;
    for (uint32_t t = 0; t < LAYERS * n_groups; t++)
        if (x->keep[t] || all)
            events[n++] =
                (kvf_event){0, t / n_groups, x->keep[t] ? x->keep[t] : x->r->n_slots[t], kind, t % n_groups, 1};
    if (n) rig_events(x->r, events, n, fresh);
}

static void begin(life *x, const kvf_policy_options *o, uint32_t hpg, uint32_t threads, uint32_t n_prompt,
                  uint64_t seed) {
    memset(x, 0, sizeof *x);
    x->o = *o;
    x->seed = seed;
    x->r = rig_new((rig_config){.n_seqs = 1,
                                .n_layers = LAYERS,
                                .n_kv = N_KV,
                                .g = G,
                                .hpg = hpg,
                                .bs = BS,
                                .d = D,
                                .cap = CAP,
                                .n_arrays = 1,
                                .threads = threads,
                                .mass = true});
    OK(kvf_policy_open(x->r->state, 0, o, err));
    for (uint32_t i = 0; i < n_prompt; i++) append(x);
    for (uint32_t q = 0; q < LAYERS * N_KV * G; q++)
        for (uint32_t i = 0; i < n_prompt; i++)
            x->sums[q * CAP + i] = number(seed, 0, q / (N_KV * G), q / G % N_KV, i * G + q % G);
    x->r->prompt_sums[0] = x->sums;
    x->r->prompt_stride = CAP;
    kvf_policy_batch b = rig_batch(x->r);
    double variance[LAYERS * N_KV * G];
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    if (ops.metric) OK(ops.metric(x->r->state, NULL, &b, 0, n_prompt, variance, err));
    OK(ops.budget(x->r->state, 0, ops.metric ? variance : NULL, n_prompt, err));
    due(x, KVF_AT_PROMPT_END);
    carry_out(x, KVF_EVENT_PROMPT, true, threads > 1 ? seed * 0x9e3779b97f4a7c15ull : 0);
    x->r->prompt_sums[0] = NULL;
}

static void step(life *x) {
    uint64_t fresh = x->r->c.threads > 1 ? x->seed * 0x12345671ull : 0;
    due(x, KVF_BEFORE_APPEND);
    carry_out(x, KVF_EVENT_PROMPT, false, fresh);
    append(x);
    observe(x);
    bool deferred = x->o.defer_first_decode && !kvf_policy_sizes(x->r->state, 0);
    due(x, KVF_AFTER_STEP);
    carry_out(x, deferred ? KVF_EVENT_PROMPT : KVF_EVENT_DECODE, false, fresh);
    const kvf_layer_size *of = kvf_policy_group_sizes(x->r->state, 0);
    kvf__policy_seq *s = kvf__policy_seq_get(x->r->state, 0);
    for (uint32_t t = 0; of && t < LAYERS * x->r->n_groups; t++)
        cr_assert(x->r->n_slots[t] < of[t].reserve, "seed %llu, table %u: %u slots (dealt %u)",
                  (unsigned long long)x->seed, t, x->r->n_slots[t], s->dealt[t / x->r->n_groups]);
}

static kvf_policy_options draw(uint64_t seed, uint32_t *n_prompt) {
    static const double floors[] = {0.2, 0.0, 0.5, 1.0, 0.9};
    kvf_policy_options o = rig_policy(seed % 2 ? "h2o" : "d2o", NULL);
    uint64_t s = seed;
    *n_prompt = 90 + (uint32_t)(rig_random(&s) % 60);
    o.scope = KVF_SCOPE_HEAD;
    o.merge = seed % 3 ? KVF_MERGE_NONE : KVF_MERGE_AVERAGE;
    o.head_budget = KVF_HEAD_BUDGET_ADAPTIVE;
    o.head_floor = floors[seed % 5];
    o.rho = 0.3 + 0.4 * rig_uniform(&s);
    o.min_tokens = 0;
    o.n_parts = 3;
    o.evict_every = seed % 4;
    if (seed % 4 == 2) o.window = 8;
    if (seed % 7 == 3) o.budget_unit = KVF_BUDGET_BLOCK;
    if (seed % 8 == 5) o.budget_tokens = *n_prompt + 5; /* fits, and overflows in decode */
    if (seed % 9 == 4 && !o.budget_tokens) o.defer_first_decode = 1;
    return o;
}

Test(policy_heads, groups_get_the_best_slots_of_all_and_the_total_is_exact) {
    static life x, y;
    uint32_t n_dealt = 0, n_unequal = 0, n_decode = 0;
    for (uint64_t seed = 0; seed < 80; seed++) {
        uint32_t n_prompt, hpg = seed % 6 == 5 ? 2 : 1;
        kvf_policy_options o = draw(seed, &n_prompt);
        begin(&x, &o, hpg, 1, n_prompt, seed);
        begin(&y, &o, hpg, 3, n_prompt, seed); /* threads and fresh blocks: the same bits */
        for (uint32_t i = 0; i < 40; i++) {
            if (i == 20 && seed % 3 == 0) { /* tighter, then wider */
                OK(kvf_policy_set_budget(x.r->state, 0, 1, seed % 2 ? 24 : n_prompt * 3 / 4, err));
                OK(kvf_policy_set_budget(y.r->state, 0, 1, seed % 2 ? 24 : n_prompt * 3 / 4, err));
            }
            step(&x);
            step(&y);
            n_decode += x.n_due;
        }
        size_t n, m;
        unsigned char *a = rig_dump(x.r, 0, &n), *b = rig_dump(y.r, 0, &m);
        cr_assert(n == m && !memcmp(a, b, n), "seed %llu: threads or fresh blocks differ", (unsigned long long)seed);
        free(a);
        free(b);
        n_dealt += x.n_dealt;
        n_unequal += x.n_unequal;
        rig_free(x.r);
        rig_free(y.r);
    }
    cr_assert(n_dealt > 150 && n_unequal > 80 && n_decode > 500, "%u, %u, %u", n_dealt, n_unequal, n_decode);
}

Test(policy_heads, one_group_a_layer_is_equal) {
    static life x, y;
    uint32_t n_prompt;
    kvf_policy_options o = draw(1, &n_prompt);
    begin(&y, &o, 1, 1, n_prompt, 1);
    cr_assert(kvf_policy_group_sizes(y.r->state, 0) != NULL);
    rig_free(y.r);
    memset(&x, 0, sizeof x);
    x.r = rig_new((rig_config){1, LAYERS, N_KV, G, N_KV, BS, D, CAP, 1, 1, KVF_F32, true, KVF_CPU_AUTO});
    OK(kvf_policy_open(x.r->state, 0, &o, err));
    for (uint32_t i = 0; i < n_prompt; i++) append(&x);
    kvf_policy_ops ops = kvf__policy_ops_resolve(o.ops);
    double variance[LAYERS * N_KV * G] = {0};
    OK(ops.budget(x.r->state, 0, variance, n_prompt, err));
    kvf_policy_batch b = rig_batch(x.r);
    uint32_t keep[LAYERS], n_due;
    OK(kvf_policy_due(x.r->state, NULL, &b, 0, KVF_AT_PROMPT_END, keep, &n_due, err));
    const kvf_layer_size *z = kvf_policy_sizes(x.r->state, 0);
    cr_assert(n_due == LAYERS && keep[0] == z[0].keep && keep[1] == z[1].keep);
    cr_assert_null(kvf_policy_group_sizes(x.r->state, 0));
    rig_free(x.r);
}

/* Of equal groups all have what kvf_policy_due says of their layer, also in the call that finds the sizes. */
Test(policy_heads, equal_groups_are_due_as_their_layer) {
    uint32_t n_found = 0, n_left_out = 0;
    for (uint64_t seed = 0; seed < 60; seed++) {
        enum { L = 4 };
        uint32_t hpg = 1u << seed % 3, n_prompt = 40 + (uint32_t)(seed % 17), slots[L], want[L], keep[L * N_KV], n_due;
        rig *r[2]; /* by layers, by tables */
        kvf_policy_options o = rig_policy(seed % 2 ? "d2o" : "evict", NULL);
        uint64_t s = seed;
        double variance[L * N_KV * G];
        for (uint32_t i = 0; i < L * N_KV * G; i++) variance[i] = rig_uniform(&s) * (double)(i / (N_KV * G) % 3);
        o.budget_tokens = n_prompt + (seed % 5 ? 3 : 0); /* fits */
        o.min_tokens = 0;
        if (seed % 2 && seed % 7 == 0) o.rho = 0.5, o.budget_tokens = 0, o.defer_first_decode = 1;
        o.layer_strength = 2;
        for (int i = 0; i < 2; i++) {
            rig_config c = {.n_seqs = 1,
                            .n_layers = L,
                            .n_kv = N_KV,
                            .g = G,
                            .hpg = hpg,
                            .bs = BS,
                            .d = D,
                            .cap = CAP,
                            .n_arrays = 2,
                            .threads = 1,
                            .mass = true};
            r[i] = rig_new(c);
            OK(kvf_policy_open(r[i]->state, 0, &o, err));
            kvf_policy_ops ops = kvf__policy_ops_resolve(o.ops);
            OK(ops.budget(r[i]->state, 0, ops.metric ? variance : NULL, n_prompt, err));
        }
        for (uint32_t n = n_prompt; n < n_prompt + 12; n++)
            for (kvf_moment moment = n == n_prompt ? KVF_AT_PROMPT_END : KVF_BEFORE_APPEND; moment <= KVF_AFTER_STEP;
                 moment++) {
                bool sized = kvf_policy_sizes(r[0]->state, 0) != NULL;
                uint32_t now = n + (moment == KVF_AFTER_STEP);
                for (uint32_t l = 0; l < L; l++) slots[l] = now;
                for (uint32_t t = 0; t < L * r[1]->n_groups; t++) r[1]->n_slots[t] = now;
                kvf_policy_batch b = rig_batch(r[1]);
                uint32_t n_layers_due = kvf__policy_due_layers(r[0]->state, 0, moment, slots, want);
                OK(kvf_policy_due(r[1]->state, NULL, &b, 0, moment, keep, &n_due, err));
                cr_assert_eq(n_due, n_layers_due * r[1]->n_groups);
                for (uint32_t t = 0; t < L * r[1]->n_groups; t++)
                    cr_assert_eq(keep[t], want[t / r[1]->n_groups], "seed %llu, moment %d, table %u: %u, not %u",
                                 (unsigned long long)seed, (int)moment, t, keep[t], want[t / r[1]->n_groups]);
                if (sized || !kvf_policy_sizes(r[0]->state, 0)) continue;
                n_found++;
                n_left_out += n_layers_due < L;
            }
        rig_free(r[0]);
        rig_free(r[1]);
    }
    cr_assert(n_found >= 25 && n_left_out > 20, "%u, %u", n_found, n_left_out);
}

Test(policy_heads, a_fork_takes_the_sizes_and_rho_1_keeps_all) {
    static life x;
    uint32_t n_prompt;
    kvf_policy_options o = draw(1, &n_prompt);
    begin(&x, &o, 1, 1, n_prompt, 1);
    OK(kvf_policy_fork(x.r->state, 0, 2));
    const kvf_layer_size *a = kvf_policy_group_sizes(x.r->state, 0), *b = kvf_policy_group_sizes(x.r->state, 2);
    cr_assert(a != b && !memcmp(a, b, LAYERS * N_KV * sizeof *a));
    cr_assert(a[0].keep != a[1].keep || a[1].keep != a[2].keep);
    OK(kvf_policy_open(x.r->state, 2, &o, err)); /* nothing of it is left */
    cr_assert(!kvf_policy_group_sizes(x.r->state, 2) && !kvf__policy_seq_get(x.r->state, 2)->dealt[0]);
    rig_free(x.r);
    o.rho = 1;
    begin(&x, &o, 1, 1, n_prompt, 1);
    for (uint32_t i = 0; i < 20; i++) {
        due(&x, KVF_BEFORE_APPEND);
        append(&x);
        due(&x, KVF_AFTER_STEP);
        cr_assert_eq(x.n_due, 0);
    }
    rig_free(x.r);
}

Test(policy_heads, failures_leave_everything_as_it_was) {
    static life x;
    uint32_t n_prompt, keep[TABLES], n_due = 7;
    kvf_policy_options o = draw(1, &n_prompt);
    o.scope = KVF_SCOPE_LAYER;
    FAILS(kvf_policy_options_check(&o, LAYERS, BS, err), KVF_E_INVALID, "needs scope head");
    o.scope = KVF_SCOPE_HEAD;
    OK(kvf_policy_options_check(&o, LAYERS, BS, err));
    begin(&x, &o, 1, 1, n_prompt, 1);
    OK(kvf_policy_set_budget(x.r->state, 0, 1, 24, err));
    uint32_t dealt = x.n_dealt;
    kvf_policy_batch b = rig_batch(x.r);
    b.workspace_bytes = 64;
    FAILS(kvf_policy_due(x.r->state, NULL, &b, 0, KVF_BEFORE_APPEND, keep, &n_due, err), KVF_E_INVALID,
          "workspace_bytes");
    cr_assert(kvf__policy_seq_get(x.r->state, 0)->changed);
    FAILS(kvf_policy_due(x.r->state, NULL, &b, 1, KVF_BEFORE_APPEND, keep, &n_due, err), KVF_E_INVALID, "row 1");
    uint32_t layer_keep[LAYERS], slots[LAYERS] = {n_prompt, n_prompt};
    cr_assert_eq(kvf__policy_due_layers(x.r->state, 0, KVF_BEFORE_APPEND, slots, layer_keep), 0);
    step(&x);
    cr_assert_eq(x.n_dealt, dealt + LAYERS);
    rig_free(x.r);
    kvf_policy_state *state = NULL;
    kvf_policy_state_config c = {.struct_size = sizeof c,
                                 .n_layers = 1,
                                 .n_kv_heads = 4,
                                 .n_q_heads = 4,
                                 .head_dim = 8,
                                 .block_size = 8,
                                 .max_seqs = 1,
                                 .max_slots = 8,
                                 .n_groups = 3};
    FAILS(kvf_policy_state_create(&c, &state, err), KVF_E_INVALID, "n_groups 3: must divide n_kv_heads 4");
}
