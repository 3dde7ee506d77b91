/* A budget that changes while its sequence runs: sizes, kept positions against a naive selection, the same as another way
 * there, what is refused. */
#include "test_policy_rig.h"
#include "tests/counts.h"

enum { CAP = 128, N_LAYERS = 2, N_KV = 2 };

static rig *new_rig(void) {
    return rig_new((rig_config){.n_seqs = 1,
                                .n_layers = N_LAYERS,
                                .n_kv = N_KV,
                                .g = 2,
                                .hpg = 2,
                                .bs = 8,
                                .d = 8,
                                .cap = CAP,
                                .n_arrays = 1,
                                .threads = 1});
}

static void append(rig *r, uint64_t *seed) {
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        float k[8], v[8];
        uint32_t s = rig_slots(r, 0, l);
        for (uint32_t h = 0; h < N_KV; h++) {
            for (int e = 0; e < 8; e++) k[e] = (float)rig_normal(seed), v[e] = (float)rig_normal(seed);
            rig_put(r, 0, l, h, s, r->next_pos[0], k, v);
        }
        rig_set_slots(r, 0, l, s + 1);
    }
    r->next_pos[0]++;
}

/* The prompt's tokens and end; its column sums and variances follow from the seed. */
static void prompt(rig *r, uint32_t n, uint64_t *seed) {
    const kvf_policy_options *o = kvf_policy_get_options(r->state, 0);
    float sums[N_LAYERS * 4 * CAP];
    double variance[N_LAYERS * 4];
    kvf_event events[N_LAYERS];
    for (uint32_t i = 0; i < n; i++) append(r, seed);
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) sums[i] = (float)rig_uniform(seed);
    for (int i = 0; i < N_LAYERS * 4; i++) variance[i] = i < 4 ? 0.1 + 0.2 * i : i == 7 ? 2 : 1;
    bool observes = kvf_policy_needs(o) != 0;
    OK(o->ops->budget(r->state, 0, observes && o->ops->metric ? variance : NULL, n, err));
    r->prompt_sums[0] = observes ? sums : NULL;
    r->prompt_stride = CAP;
    uint32_t n_events = rig_due(r, 0, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, observes, events);
    if (n_events) rig_events(r, events, n_events, 0);
    r->prompt_sums[0] = NULL;
}

static uint32_t before_append(rig *r) {
    kvf_event events[N_LAYERS];
    uint32_t n = rig_due(r, 0, KVF_BEFORE_APPEND, KVF_EVENT_PROMPT, false, events);
    if (n) rig_events(r, events, n, 0);
    return n;
}

static void step(rig *r, uint64_t *seed) {
    kvf_event events[N_LAYERS];
    before_append(r);
    append(r, seed);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        float row[N_KV * CAP];
        for (int i = 0; i < N_KV * CAP; i++) row[i] = (float)rig_uniform(seed);
        if (kvf_policy_needs(kvf_policy_get_options(r->state, 0))) rig_observe(r, l, row, CAP);
    }
    uint32_t n = rig_due(r, 0, KVF_AFTER_STEP, KVF_EVENT_DECODE, false, events);
    if (n) rig_events(r, events, n, 0);
}

static kvf_policy_options rho_1(const char *policy, int may_change) {
    kvf_policy_options o = rig_policy(policy, NULL);
    o.rho = 1;
    o.min_tokens = 16;
    o.budget_may_change = may_change;
    return o;
}

static uint64_t held_slots(const rig *r) {
    uint64_t n = 0;
    for (uint32_t l = 0; l < N_LAYERS; l++) n += rig_slots(r, 0, l);
    return n;
}

/* ---- Kept positions against a naive selection ------------------------------------------------------------------ */

typedef struct token {
    uint32_t pos;
    float score;
} token;

static uint32_t window_begin, n_sinks;
static int better(const void *a,
                  const void *b) { /* the window, the sinks, then scores falling; ties to the lower position */
    const token *x = a, *y = b;
    int kx = x->pos >= window_begin ? 0
             : x->pos < n_sinks     ? 1
                                    : 2,
        ky = y->pos >= window_begin ? 0
             : y->pos < n_sinks     ? 1
                                    : 2;
    if (kx != ky) return kx - ky;
    if (kx == 2 && (x->score < y->score || x->score > y->score)) return x->score > y->score ? -1 : 1;
    return (x->pos > y->pos) - (x->pos < y->pos);
}
static int by_position(const void *a, const void *b) {
    const token *x = a, *y = b;
    return (x->pos > y->pos) - (x->pos < y->pos);
}

static uint32_t take_tokens(const rig *r, uint32_t layer, uint32_t head, token *out) {
    uint32_t n = rig_slots(r, 0, layer);
    for (uint32_t s = 0; s < n; s++)
        out[s] = (token){rig_pos(r, 0, layer, head, s), *rig_score(r, 0, layer, head, 0, s)};
    return n;
}

/* At the next append every layer above its size holds the naive selection, positions ascending, scores with them. */
static void must_compact_as_naive(rig *r) {
    token tokens[N_LAYERS][N_KV][CAP], now[CAP];
    uint32_t n[N_LAYERS];
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t h = 0; h < N_KV; h++) n[l] = take_tokens(r, l, h, tokens[l][h]);
    cr_assert(before_append(r) > 0);
    const kvf_layer_size *z = kvf_policy_sizes(r->state, 0);
    n_sinks = kvf_policy_get_options(r->state, 0)->sinks;
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        if (n[l] <= z[l].keep) {
            cr_assert_eq(rig_slots(r, 0, l), n[l]);
            continue;
        }
        cr_assert_eq(rig_slots(r, 0, l), z[l].keep);
        for (uint32_t h = 0; h < N_KV; h++) {
            window_begin = r->next_pos[0] - z[l].window;
            qsort(tokens[l][h], n[l], sizeof(token), better);
            qsort(tokens[l][h], z[l].keep, sizeof(token), by_position);
            take_tokens(r, l, h, now);
            for (uint32_t s = 0; s < z[l].keep; s++)
                cr_assert(now[s].pos == tokens[l][h][s].pos && now[s].score == tokens[l][h][s].score,
                          "layer %u, head %u, slot %u: position %u, should be %u", l, h, s, now[s].pos,
                          tokens[l][h][s].pos);
        }
    }
}

Test(policy_change, keeps_what_a_naive_selection_keeps) {
    static const struct {
        const char *policy;
        double rho[3]; /* at the submission, after 10 steps, after 20 */
        uint32_t tokens[3];
    } cases[] = {
        {"d2o", {1, 0.5, 0.3}, {0}},       {"h2o", {1, 0.5, 0.4}, {0}}, {"d2o", {0.8, 0.5, 0.4}, {0}},
        {"d2o", {1, 1, 1}, {0, 40, 20}},   {"d2o", {0.6, 1, 0.4}, {0}}, {"h2o", {1, 1, 1}, {100, 50, 16}},
        {"streaming", {1, 0.6, 0.3}, {0}},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        rig *r = new_rig();
        uint64_t seed = 40 + c;
        kvf_policy_options o = rho_1(cases[c].policy, 1);
        o.rho = cases[c].rho[0];
        o.budget_tokens = cases[c].tokens[0];
        o.merge = KVF_MERGE_NONE;
        OK(kvf_policy_open(r->state, 0, &o, err));
        prompt(r, 60, &seed);
        for (int change = 1; change < 3; change++) {
            for (int i = 0; i < 10; i++) step(r, &seed);
            uint64_t before = held_slots(r);
            OK(kvf_policy_set_budget(r->state, 0, cases[c].rho[change], cases[c].tokens[change], err));
            cr_assert_eq(held_slots(r), before);
            if (cases[c].rho[change] < 1 || cases[c].tokens[change]) {
                if (o.ops->needs)
                    must_compact_as_naive(r);
                else
                    cr_assert(before_append(r) > 0);
                const kvf_layer_size *z = kvf_policy_sizes(r->state, 0);
                uint32_t b =
                    cases[c].tokens[change] ? cases[c].tokens[change] : (uint32_t)(60 * cases[c].rho[change] + 1e-6);
                cr_assert_eq(z[0].keep + z[1].keep, 2 * b, "case %zu: %u + %u slots", c, z[0].keep, z[1].keep);
                cr_assert(held_slots(r) < before && held_slots(r) <= 2 * b);
            } else {
                cr_assert(before_append(r) == 0 && !kvf_policy_sizes(r->state, 0));
            }
        }
        for (int i = 0; i < 20; i++) step(r, &seed); /* and goes on as any other */
        const kvf_layer_size *z = kvf_policy_sizes(r->state, 0);
        for (uint32_t l = 0; l < N_LAYERS; l++) cr_assert(rig_slots(r, 0, l) <= z[l].keep);
        rig_free(r);
    }
}

/* ---- The same as another way there --------------------------------------------------------------------------- */

/* Rho 1, tightened to B when there are B tokens, is a request of B that overflows. */
Test(policy_change, is_an_overflow_where_the_budget_is_reached) {
    for (uint32_t budget = 60; budget <= 80; budget += 10) {
        rig *a = new_rig(), *b = new_rig();
        uint64_t seed_a = 7, seed_b = 7;
        kvf_policy_options changes = rho_1("d2o", 1), fixed = changes;
        fixed.budget_tokens = budget;
        OK(kvf_policy_open(a->state, 0, &changes, err));
        OK(kvf_policy_open(b->state, 0, &fixed, err));
        prompt(a, 60, &seed_a);
        prompt(b, 60, &seed_b);
        for (uint32_t i = 0; i < 40; i++) {
            if (60 + i == budget) OK(kvf_policy_set_budget(a->state, 0, 1, budget, err));
            step(a, &seed_a);
            step(b, &seed_b);
        }
        size_t n, m;
        unsigned char *x = rig_dump(a, 0, &n), *y = rig_dump(b, 0, &m);
        cr_assert(counts_of(a->state, 0).n_events > 0);
        cr_assert(n == m && !memcmp(x, y, n), "budget %u", budget);
        free(x);
        free(y);
        rig_free(a);
        rig_free(b);
    }
}

/* A looser budget lets layers grow, and the weights stay. */
Test(policy_change, grows_and_shrinks) {
    rig *r = new_rig();
    uint64_t seed = 3;
    kvf_policy_options o = rho_1("d2o", 0);
    o.rho = 0.3;
    OK(kvf_policy_open(r->state, 0, &o, err));
    prompt(r, 60, &seed);
    for (int i = 0; i < 5; i++) step(r, &seed);
    cr_assert_eq(held_slots(r), 2 * 18);
    OK(kvf_policy_set_budget(r->state, 0, 0.6, 0, err));
    for (int i = 0; i < 30; i++) {
        step(r, &seed);
        for (uint32_t l = 0; l < N_LAYERS; l++) cr_assert(rig_slots(r, 0, l) <= kvf_policy_sizes(r->state, 0)[l].keep);
    }
    cr_assert_eq(held_slots(r), 2 * 36);
    cr_assert(kvf_policy_sizes(r->state, 0)[0].keep != kvf_policy_sizes(r->state, 0)[1].keep, "layers differ");
    OK(kvf_policy_set_budget(r->state, 0, 0.3, 0, err)); /* it has observed all along, rho 1 never was */
    must_compact_as_naive(r);
    cr_assert_eq(held_slots(r), 2 * 18);
    rig_free(r);
}

/* ---- Refusals ------------------------------------------------------------------------------------------------- */

#define REFUSED(call, want, words)                                                                   \
    do {                                                                                             \
        kvf_error e_ = {.text = ""};                                                                 \
        kvf_error *err = &e_;                                                                        \
        kvf_status st_ = (call);                                                                     \
        cr_assert(st_ == (want) && strstr(e_.text, words), "%s: %s", kvf_status_name(st_), e_.text); \
    } while (0)

Test(policy_change, refuses_what_cannot_be) {
    rig *r = new_rig();
    uint64_t seed = 5;
    kvf_layer_size sizes[N_LAYERS] = {{7, 7, 7, 7}};
    int sized = 7;
    REFUSED(kvf_policy_set_budget(r->state, 0, 0.5, 0, err), KVF_E_STALE, "not open");
    kvf_policy_options o = rho_1("d2o", 0);
    cr_assert(kvf_policy_needs(&o) == 0 && kvf_policy_n_arrays(&o) == 0 && !kvf_policy_evicts(&o));
    OK(kvf_policy_open(r->state, 0, &o, err));
    prompt(r, 40, &seed);
    step(r, &seed);
    REFUSED(kvf_policy_set_budget(r->state, 0, 0.5, 0, err), KVF_E_STATE, "rho 0.5: the request has rho 1");
    REFUSED(kvf_policy_set_budget(r->state, 0, 1, 20, err), KVF_E_STATE, "budget_may_change");
    REFUSED(kvf_policy_preview_budget(r->state, 0, 0.5, 0, sizes, &sized, err), KVF_E_STATE, "budget_may_change");
    REFUSED(kvf_policy_set_budget(r->state, 0, 1.5, 0, err), KVF_E_INVALID, "rho 1.5");
    REFUSED(kvf_policy_set_budget(r->state, 0, 0.5, 15, err), KVF_E_INVALID, "budget_tokens 15");
    cr_assert(sized == 7 && sizes[0].keep == 7 && kvf_policy_get_options(r->state, 0)->rho == 1);
    OK(kvf_policy_set_budget(r->state, 0, 1, 0, err)); /* it is that already */
    kvf_policy_options full = rig_policy("full", NULL);
    OK(kvf_policy_open(r->state, 0, &full, err));
    REFUSED(kvf_policy_set_budget(r->state, 0, 0.5, 0, err), KVF_E_INVALID, "policy full");
    kvf_policy_options streaming = rho_1("streaming", 0); /* which never needs any mass */
    OK(kvf_policy_open(r->state, 0, &streaming, err));
    OK(kvf_policy_set_budget(r->state, 0, 0.5, 0, err));
    o.budget_may_change = 1;
    cr_assert(kvf_policy_needs(&o) == o.ops->needs && kvf_policy_n_arrays(&o) == 1 && !kvf_policy_evicts(&o));
    o.full_layers[0] = 0;
    o.n_full_layers = 1;
    OK(kvf_policy_open(r->state, 0, &o, err));
    REFUSED(o.ops->budget(r->state, 0, NULL, 40, err), KVF_E_INVALID, "variance");
    double variance[N_LAYERS * 4] = {1};
    OK(o.ops->budget(r->state, 0, variance, 40, err));
    REFUSED(kvf_policy_set_budget(r->state, 0, 0.4, 0, err), KVF_E_INVALID, "full_layers");
    cr_assert(kvf_policy_get_options(r->state, 0)->rho == 1);
    rig_free(r);
}

/* A preview says what the change then gives, and is none. */
Test(policy_change, previews_its_sizes) {
    rig *r = new_rig();
    uint64_t seed = 6;
    kvf_policy_options o = rho_1("d2o", 0);
    kvf_layer_size sizes[N_LAYERS];
    int sized = 7;
    o.rho = 0.5;
    OK(kvf_policy_open(r->state, 0, &o, err));
    OK(kvf_policy_preview_budget(r->state, 0, 0.4, 0, sizes, &sized, err));
    cr_assert_eq(sized, 0); /* the prompt still runs */
    prompt(r, 60, &seed);
    kvf_layer_size before[N_LAYERS];
    memcpy(before, kvf_policy_sizes(r->state, 0), sizeof before);
    OK(kvf_policy_preview_budget(r->state, 0, 0.3, 0, sizes, &sized, err));
    cr_assert(sized == 1 && !memcmp(before, kvf_policy_sizes(r->state, 0), sizeof before) && before_append(r) == 0);
    OK(kvf_policy_set_budget(r->state, 0, 0.3, 0, err));
    cr_assert(!memcmp(sizes, kvf_policy_sizes(r->state, 0), sizeof sizes));
    cr_assert(memcmp(sizes, before, sizeof sizes));
    OK(kvf_policy_preview_budget(r->state, 0, 1, 0, sizes, &sized, err));
    cr_assert_eq(sized, 0);
    rig_free(r);
}
