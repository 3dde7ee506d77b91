/* Policies of the caller's own: calls that are left out, worth of any kind, arrays of their own, and what is refused. */
#include "test_policy_rig.h"

static rig *one_head(uint32_t cap, bool mass) {
    return rig_new((rig_config){.n_seqs = 1,
                                .n_layers = 1,
                                .n_kv = 1,
                                .g = 1,
                                .hpg = 1,
                                .bs = 8,
                                .d = 8,
                                .cap = cap,
                                .n_arrays = 3,
                                .threads = 1,
                                .mass = mass});
}

static const kvf_policy_ops bare = {
    .struct_size = sizeof bare, .name = "bare", .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW};

static kvf_policy_options options_for(const kvf_policy_ops *ops) {
    kvf_policy_options o;
    OK(kvf_policy_options_init_ops(&o, sizeof o, ops, err));
    return o;
}

/* ---- Calls that are left out -------------------------------------------------------------------------------- */

Test(policy_hooks, what_is_left_out_is_the_librarys) {
    const kvf_policy_ops *d2o = kvf_policy_find("d2o");
    kvf_policy_ops r = kvf__policy_ops_resolve(&bare), none = kvf__policy_ops_resolve(NULL);
    cr_assert(r.observe == d2o->observe && r.metric == d2o->metric && r.budget == d2o->budget);
    cr_assert(r.match == d2o->match && r.gate == d2o->gate && r.apply == d2o->apply && !r.worth && !r.weights);
    cr_assert(!none.name && !none.match);
    kvf_policy_ops equal = bare;
    equal.flags = KVF_POLICY_EQUAL_LAYERS;
    cr_assert(!kvf__policy_ops_resolve(&equal).metric);
    equal = bare;
    equal.needs = KVF_NEEDS_ROW; /* a metric has nothing to see */
    cr_assert(!kvf__policy_ops_resolve(&equal).metric);
    cr_assert(!kvf__policy_ops_resolve(kvf_policy_find("h2o")).metric);
    const char *name;
    for (uint32_t i = 0; (name = kvf_policy_name(i)); i++) {
        r = kvf__policy_ops_resolve(kvf_policy_find(name));
        cr_assert(r.observe && r.budget && r.match && r.gate && r.apply && r.summary, "%s", name);
    }
    /* A vtable of an earlier version ends before the flags: what lies behind it is not looked at. */
    kvf_policy_ops old = bare;
    old.struct_size = offsetof(kvf_policy_ops, flags);
    old.flags = KVF_POLICY_KEEPS_ALL | 0x100;
    old.worth = (void (*)(const kvf_policy_slots *, float *))(uintptr_t)1;
    kvf_policy_options o = options_for(&old);
    cr_assert(kvf_policy_evicts(&o) && !kvf__policy_ops_resolve(&old).worth);
}

/* Options of an earlier version end before the new fields, which keep their defaults. */
Test(policy_hooks, options_of_an_earlier_version_keep_the_defaults) {
    kvf_policy_options o = rig_policy("d2o", NULL), read;
    o.rho = 0.3;
    o.struct_size = offsetof(kvf_policy_options, budget_bytes);
    o.score_window = 0, o.score_pool = 0, o.metric_share = NAN, o.budget_bytes = 99;
    OK(kvf_policy_options_read(&read, sizeof read, &o, err));
    cr_assert(read.rho == 0.3 && read.score_window == 64 && read.score_pool == 1 && read.metric_share == 0.9);
    cr_assert(read.budget_bytes == 0 && read.score_decay == 1 && read.struct_size == sizeof read);
    rig *r = rig_small(1, 1, 1);
    OK(kvf_policy_open(r->state, 0, &o, err));
    rig_free(r);
}

Test(policy_hooks, misuse_is_refused) {
    kvf_policy_options o;
    kvf_policy_ops bad = bare;
#define REFUSED(change, word)                                                             \
    do {                                                                                  \
        bad = bare;                                                                       \
        change;                                                                           \
        FAILS(kvf_policy_options_init_ops(&o, sizeof o, &bad, err), KVF_E_INVALID, word); \
        o = options_for(&bare);                                                           \
        o.ops = &bad;                                                                     \
        FAILS(kvf_policy_options_check(&o, 2, 16, err), KVF_E_INVALID, word);             \
    } while (0)
    REFUSED(bad.struct_size = 0, "struct_size 0");
    REFUSED(bad.name = NULL, "name must be set");
    REFUSED(bad.name = "", "name must be set");
    REFUSED(bad.needs = 0x80, "policy bare: needs 0x80");
    REFUSED(bad.flags = 0x10, "flags 0x10");
    FAILS(kvf_policy_options_init_ops(&o, sizeof o, NULL, err), KVF_E_INVALID, "ops must be set");
    FAILS(kvf_policy_options_init_ops(NULL, sizeof o, &bare, err), KVF_E_INVALID, "must be set");
    bad = bare;
    bad.flags = KVF_POLICY_PROMPT_ONLY;
    o = options_for(&bad);
    o.defer_first_decode = 1;
    FAILS(kvf_policy_options_check(&o, 2, 16, err), KVF_E_INVALID, "defer_first_decode 1: policy bare");
}

static uint32_t two(const kvf_policy_options *o) { return o ? 2 : 0; }
static uint32_t nine(const kvf_policy_options *o) { return o ? 9 : 0; }

Test(policy_hooks, score_arrays_follow_from_needs_and_options) {
    kvf_policy_ops ops = bare;
    kvf_policy_options o = options_for(&ops);
    cr_assert_eq(kvf_policy_n_arrays(&o), 1);
    o.score = KVF_SCORE_WINDOW;
    cr_assert_eq(kvf_policy_n_arrays(&o), 2);
    cr_assert_eq(kvf_policy_needs(&o), KVF_NEEDS_COL_SUMS | KVF_NEEDS_LAST_ROWS | KVF_NEEDS_ROW);
    ops.flags = KVF_POLICY_EQUAL_LAYERS; /* no metric looks at the sums */
    cr_assert_eq(kvf_policy_needs(&o), KVF_NEEDS_LAST_ROWS | KVF_NEEDS_ROW);
    o.score_norm = KVF_SCORE_NORM_V;
    ops.needs |= KVF_NEEDS_SQUARES | KVF_NEEDS_LOGPROBS;
    cr_assert_eq(kvf_policy_n_arrays(&o), 5);
    kvf__roles r = kvf__score_roles(&o);
    cr_assert(r.score == 0 && r.recent == 1 && r.squares == 2 && r.surprise == 3 && r.v_norm == 4 && r.n == 5);
    ops.n_arrays = two;
    FAILS(kvf_policy_options_check(&o, 2, 16, err), KVF_E_INVALID, "policy bare: n_arrays is 2");
    ops.n_arrays = nine;
    FAILS(kvf_policy_options_check(&o, 2, 16, err), KVF_E_INVALID, "n_arrays is 9");
    o.rho = 1;
    cr_assert(kvf_policy_needs(&o) == 0 && kvf_policy_n_arrays(&o) == 0 && !kvf_policy_observes(&o));
    FAILS(kvf_policy_options_check(&o, 2, 16, err), KVF_E_INVALID, "n_arrays is 9"); /* whatever rho is */
    o.budget_may_change = 1;
    cr_assert(kvf_policy_observes(&o));
    ops = bare;
    ops.flags = KVF_POLICY_PROMPT_ONLY;
    cr_assert(!kvf_policy_observes(&o) && !(kvf_policy_needs(&o) & KVF_NEEDS_ROW));
    ops.needs = KVF_NEEDS_LAST_ROWS; /* a policy of the last rows whose score is told to be another */
    o.score = KVF_SCORE_ACCUMULATE;
    cr_assert_eq(kvf_policy_needs(&o), KVF_NEEDS_COL_SUMS);
    ops.needs = KVF_NEEDS_LOGPROBS;
    ops.flags = 0;
    o.score_norm = KVF_SCORE_NORM_NONE;
    cr_assert(kvf_policy_n_arrays(&o) == 1 && kvf__score_roles(&o).surprise == 0 && kvf_policy_observes(&o));
}

/* ---- Worth ------------------------------------------------------------------------------------------------------ */

static float worth_of[32]; /* by position */
static kvf_policy_slots seen;
static void told(const kvf_policy_slots *s, float *worth) {
    seen = *s;
    memset(s->scratch, 0xff, 2 * s->n_slots * sizeof(float)); /* the policy's own, all of it */
    for (uint32_t i = 0; i < s->n_slots; i++) worth[i] = worth_of[s->pos[i]];
}

/* 12 tokens with the worth given, of which keep stay: 2 sinks and a window of 2 among them. */
static const char *kept_by(const float *worth, uint32_t keep, uint32_t kind) {
    static const kvf_policy_ops ops = {
        .struct_size = sizeof ops, .name = "told", .needs = KVF_NEEDS_ROW, .worth = told};
    static char text[128];
    kvf_policy_options o = options_for(&ops);
    o.merge = KVF_MERGE_NONE;
    o.sinks = 2;
    rig *r = rig_small(1, 1, 1);
    rig_open_sized(r, 0, &o, keep - 2, 2);
    for (uint32_t i = 0; i < 12; i++) {
        rig_put2(r, 1, i, i, 1);
        worth_of[i] = worth[i];
    }
    rig_event0(r, keep, kind, 0);
    cr_assert(seen.n_slots == 12 && seen.n_keep == keep && seen.next_pos == 12 && seen.kind == kind && seen.layer == 0);
    cr_assert(seen.size->window == 2 && seen.options->sinks == 2 && seen.n_arrays == 1 && seen.score && !seen.recent);
    snprintf(text, sizeof text, "%s", rig_held(r, 0));
    rig_free(r);
    return text;
}

Test(policy_hooks, worth_of_any_kind_keeps_sinks_and_window) {
    const float nan = NAN, inf = INFINITY;
    const float all_nan[12] = {nan, nan, nan, nan, nan, nan, nan, nan, nan, nan, nan, nan};
    const float all_inf[12] = {inf, inf, inf, inf, inf, inf, inf, inf, inf, inf, inf, inf};
    const float ties[12] = {0}, mixed[12] = {-inf, nan, 3, inf, nan, 1, inf, -inf, 2, inf, -9, nan};
    const float *same[] = {all_nan, all_inf, ties};
    for (int i = 0; i < 3; i++) {
        cr_assert_str_eq(kept_by(same[i], 7, KVF_EVENT_PROMPT), "0 1 2 3 4 10 11");
        cr_assert_str_eq(kept_by(same[i], 11, KVF_EVENT_PROMPT), "0 1 2 3 4 5 6 7 8 10 11");
        cr_assert_str_eq(kept_by(same[i], 11, KVF_EVENT_DECODE), "0 1 2 3 4 5 6 7 8 11 10");
        cr_assert_str_eq(kept_by(same[i], 3, KVF_EVENT_PROMPT), "0 10 11"); /* the window, then the lower sink */
    }
    cr_assert_str_eq(kept_by(mixed, 11, KVF_EVENT_PROMPT), "0 1 2 3 5 6 7 8 9 10 11"); /* NaN goes first */
    cr_assert_str_eq(kept_by(mixed, 8, KVF_EVENT_PROMPT), "0 1 2 3 6 9 10 11");
    cr_assert_str_eq(kept_by(mixed, 7, KVF_EVENT_PROMPT), "0 1 3 6 9 10 11"); /* infinity stays */
    cr_assert_str_eq(kept_by(mixed, 6, KVF_EVENT_PROMPT), "0 1 3 6 10 11");   /* while anything else can go */
}

/* Broken numbers in each score: no NaN leaves the event, and the budget is kept. */
Test(policy_hooks, broken_scores_stay_scores) {
    static const double broken[] = {NAN, INFINITY, -INFINITY, 0, 1e38};
    for (uint32_t turn = 0; turn < 5 * 4 * 5; turn++) {
        kvf_policy_options o = rig_policy(turn % 2 ? "fold" : "h2o", NULL);
        o.score = (kvf_score)(turn % 5);
        bool sums_up = o.score != KVF_SCORE_PROMPT_PLUS_CURRENT && o.score != KVF_SCORE_WINDOW;
        if (!sums_up) o.merge = KVF_MERGE_MASS;
        o.gate = -1;
        o.score_norm = turn / 5 % 2 ? KVF_SCORE_NORM_V : KVF_SCORE_NORM_NONE;
        o.score_pool = turn / 10 % 2 ? 5 : 1;
        double bad = broken[turn / 20];
        rig *r = one_head(32, true);
        rig_open_sized(r, 0, &o, 6, 2);
        float sums[20];
        for (uint32_t i = 0; i < 20; i++) {
            rig_put2(r, 1, i, i, 1);
            sums[i] = i % 3 == 0 ? (float)bad : 0.1f * (float)i;
        }
        r->prompt_sums[0] = r->prompt_last[0] = sums;
        r->prompt_stride = 20;
        rig_event0(r, 8, KVF_EVENT_PROMPT, 0);
        r->prompt_sums[0] = r->prompt_last[0] = NULL;
        uint32_t held = 0;
        for (uint32_t s = 0; s < 8; s++) held |= 1u << rig_pos(r, 0, 0, 0, s);
        cr_assert(rig_slots(r, 0, 0) == 8 && held >> 18 == 3, "turn %u: %s", turn, rig_held(r, 0));
        for (int step = 0; step < 3; step++) {
            float row[9] = {0.1f, (float)bad, 0.1f, 0.2f, 0.1f, 0.1f, 0.1f, 0.1f, 0.1f};
            rig_put2(r, 1, 0, 1, 0);
            rig_observe(r, 0, row, 9);
            rig_event0(r, 8, KVF_EVENT_DECODE, 0);
            for (uint32_t s = 0; s < 8; s++) {
                kvf__head h = rig_head(r, 0, 0, 0);
                float weight = r->pages.weight[kvf__slot_index(&h, s)];
                float most = o.merge == KVF_MERGE_ATTENTION ? 1000 : 23; /* where each event may double it, and a sum */
                cr_assert(isfinite(rig_v(r, 0, s)) && isfinite(rig_k(r, 0, s, 1)) && weight >= 1 && weight <= most);
            }
        }
        rig_free(r);
    }
}

/* ---- Arrays of a policy's own ---------------------------------------------------------------------------------- */

static uint32_t three(const kvf_policy_options *o) { return o ? 3 : 0; }

/* Notes in the third array how often a slot was observed; the rest is the library's. */
static kvf_status counting(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *b, kvf_error *err) {
    kvf_status st = kvf__policy_ops_resolve(&bare).observe(state, stream, b, err);
    kvf__head h = kvf__head_of(b->view, b->pages, 0, b->layer, 0);
    for (uint32_t s = 0; s < h.n_slots; s++) *kvf__score_at(&h, b->scores, 2, s) += 1.0f;
    return st;
}
static void least_seen(const kvf_policy_slots *s, float *worth) {
    cr_assert(s->n_arrays == 3 && s->score == s->arrays[0] && s->v_norm == s->arrays[1]);
    for (uint32_t i = 0; i < s->n_slots; i++) worth[i] = s->arrays[2][i];
}

Test(policy_hooks, own_arrays_start_at_zero_and_move_with_the_slots) {
    static const kvf_policy_ops ops = {.struct_size = sizeof ops,
                                       .name = "counting",
                                       .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
                                       .flags = KVF_POLICY_EQUAL_LAYERS,
                                       .observe = counting,
                                       .n_arrays = three,
                                       .worth = least_seen};
    kvf_policy_options o = options_for(&ops);
    o.score_norm = KVF_SCORE_NORM_V;
    o.sinks = 0;
    cr_assert_eq(kvf_policy_n_arrays(&o), 3);
    for (uint64_t fresh = 0; fresh < 2; fresh++) {
        rig *r = one_head(64, true);
        rig_open_sized(r, 0, &o, 7, 1);
        uint32_t born[64];
        for (uint32_t i = 0; i < 10; i++) rig_put2(r, 1, i, i, NAN);
        for (uint32_t i = 0; i < 10; i++) *rig_score(r, 0, 0, 0, 2, i) = NAN;
        float sums[10], row[64];
        for (uint32_t i = 0; i < 64; i++) row[i] = 0.1f, born[i] = i < 10 ? 0 : i - 9;
        for (uint32_t i = 0; i < 10; i++) sums[i] = 1;
        r->prompt_sums[0] = sums;
        r->prompt_stride = 10;
        rig_event0(r, 8, KVF_EVENT_PROMPT, fresh);
        r->prompt_sums[0] = NULL;
        for (uint32_t step = 1; step <= 30; step++) {
            rig_put2(r, 1, 0, 1, 0);
            *rig_score(r, 0, 0, 0, 2, 8) = NAN; /* nothing is there before it is observed */
            rig_observe(r, 0, row, 64);
            for (uint32_t s = 0; s < 9; s++) {
                float age = (float)(step + 1 - KVF__MAX(born[rig_pos(r, 0, 0, 0, s)], 1u));
                cr_assert_eq(*rig_score(r, 0, 0, 0, 2, s), age, "step %u slot %u", step, s);
            }
            rig_event0(r, 8, KVF_EVENT_DECODE, fresh);
        }
        /* The youngest outside the window always went: the seven oldest and the newest are left. */
        cr_assert_eq(rig_pos(r, 0, 0, 0, 0), 0);
        rig_free(r);
    }
}

/* ---- What is missing ----------------------------------------------------------------------------------------------- */

Test(policy_hooks, a_prompt_without_what_is_needed_is_refused) {
    static const kvf_policy_ops ops = {.struct_size = sizeof ops,
                                       .name = "all",
                                       .needs =
                                           KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW | KVF_NEEDS_SQUARES | KVF_NEEDS_LOGPROBS};
    kvf_policy_options o = options_for(&ops);
    rig *r = one_head(64, false);
    rig_open_sized(r, 0, &o, 6, 2);
    for (uint32_t i = 0; i < 10; i++) rig_put2(r, 1, i, i, 1);
    float sums[10] = {0}, squares[10] = {1, 2}, *of_squares[1] = {squares};
    const float logprobs[10] = {0, -1, -2}, *of_logprobs[1] = {logprobs};
    kvf_event e = {0, 0, 8, KVF_EVENT_PROMPT, 0, 0};
    kvf_policy_batch b = rig_batch(r);
    kvf_policy_ops call = kvf__policy_ops_resolve(&ops);
    b.events = &e, b.n_events = 1, b.prompt_stride = 10;
    r->prompt_sums[0] = sums;
    FAILS(call.match(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "prompt_sums prompt_squares prompt_logprobs");
    b.prompt_squares = of_squares;
    FAILS(call.match(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "policy all needs");
    b.prompt_logprobs = of_logprobs;
    OK(call.match(r->state, NULL, &b, r->plan, err));
    OK(call.gate(r->state, NULL, &b, r->plan, err));
    OK(call.apply(r->state, NULL, &b, r->plan, err));
    cr_assert(*rig_score(r, 0, 0, 0, 1, 1) == 2 && *rig_score(r, 0, 0, 0, 2, 2) == 2); /* -log p */
    r->prompt_sums[0] = NULL;
    rig_set_slots(r, 0, 0, 8);
    rig_put2(r, 1, 0, 1, 0);
    float row[9] = {0.5f, 0.5f};
    kvf_mass mass = {.struct_size = sizeof mass, .row = row, .row_stride = 9};
    b = rig_batch(r);
    b.row_end = 1, b.mass = &mass;
    FAILS(call.observe(r->state, NULL, &b, err), KVF_E_INVALID, "needs logprobs");
    b.logprobs = (float[]){-3};
    OK(call.observe(r->state, NULL, &b, err));
    cr_assert(*rig_score(r, 0, 0, 0, 2, 8) == 3 && *rig_score(r, 0, 0, 0, 1, 0) == 1.25f);
    cr_assert(*rig_score(r, 0, 0, 0, 1, 8) == 0);
    rig_free(r);
}

Test(policy_hooks, a_prompt_only_policy_has_no_budget_to_change_afterwards) {
    static const kvf_policy_ops ops = {.struct_size = sizeof ops,
                                       .name = "once",
                                       .needs = KVF_NEEDS_COL_SUMS,
                                       .flags = KVF_POLICY_PROMPT_ONLY | KVF_POLICY_EQUAL_LAYERS};
    kvf_policy_options o = options_for(&ops);
    o.min_tokens = 16;
    rig *r = rig_small(2, 1, 1);
    OK(kvf_policy_open(r->state, 0, &o, err));
    OK(kvf_policy_set_budget(r->state, 0, 0.3, 0, err)); /* while the prompt runs */
    OK(kvf__policy_ops_resolve(&ops).budget(r->state, 0, NULL, 100, err));
    cr_assert_eq(kvf_policy_sizes(r->state, 0)[1].keep, 30);
    FAILS(kvf_policy_set_budget(r->state, 0, 0.2, 0, err), KVF_E_INVALID, "policy once: compresses its prompt alone");
    uint32_t n_slots[2] = {100, 100}, keep[2];
    cr_assert(kvf__policy_due_layers(r->state, 0, KVF_AT_PROMPT_END, n_slots, keep) == 2 && keep[0] == 30);
    n_slots[0] = n_slots[1] = 31;
    for (int m = KVF_BEFORE_APPEND; m <= KVF_AFTER_STEP; m++)
        for (; n_slots[0] < 90; n_slots[0]++)
            cr_assert_eq(kvf__policy_due_layers(r->state, 0, (kvf_moment)m, n_slots, keep), 0);
    kvf_policy_need need; /* 2 layers of 30 and 50 more, in blocks of 8 */
    OK(kvf_policy_project(kvf_policy_get_options(r->state, 0), 2, 1, 8, 100, 50, &need, err));
    cr_assert(!need.bounded && need.steady_blocks >= 2 * 10 && need.steady_blocks <= 2 * 11);
    rig_free(r);
}
