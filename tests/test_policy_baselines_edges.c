/* The baselines where it is narrow: bits that must not depend on how a call is run, exact sizes, numbers that are none. */
#include "baselines_rig.h"

static const char *const policies[] = {"roco", "snapkv", "pyramidkv", "cam", "cam:sample", "sirllm"};
enum { N_POLICIES = sizeof policies / sizeof *policies };

static void open_named(world *w, const char *name, uint64_t seed, uint32_t threads) {
    bool sample = !strcmp(name, "cam:sample");
    open_world(w, sample ? "cam" : name, 3, seed, threads);
    if (sample) w->o.cam_mode = KVF_CAM_SAMPLE;
    if (w->o.score == KVF_SCORE_WINDOW) w->o.window = w->o.score_window = 16;
}

/* The library alone over a whole life. */
static unsigned char *life(const char *name, rig_config change, uint64_t fresh, size_t *n) {
    static world w;
    open_named(&w, name, 4, 1);
    rig_free(w.r);
    change.n_seqs = 1, change.n_layers = LAYERS, change.n_kv = KV, change.g = 3, change.bs = BS, change.d = D;
    change.cap = CAP, change.n_arrays = 2;
    w.r = rig_new(change);
    begin(&w, 48, 3);
    end_prompt(&w, L, fresh);
    for (uint32_t i = 0; i < 30; i++) {
        step(&w, L + i);
        events(&w, KVF_AFTER_STEP, KVF_EVENT_DECODE, false, fresh >> i);
    }
    unsigned char *dump = rig_dump(w.r, 0, n);
    close_world(&w);
    return dump;
}

Test(policy_baselines_edges, no_bit_depends_on_threads_groups_paths_or_blocks) {
    static const kvf_dtype dtypes[] = {KVF_F32, KVF_F16};
    for (size_t p = 0; p < N_POLICIES; p++)
        for (size_t t = 0; t < 2; t++) {
            size_t n, m;
            unsigned char *one = life(policies[p], (rig_config){.hpg = 2, .threads = 1, .dtype = dtypes[t]}, 0, &n);
            for (kvf_cpu_path path = KVF_CPU_SCALAR; path <= KVF_CPU_AVX512; path++) {
                if (!kvf_cpu_has_path(path)) continue;
                rig_config c = {.hpg = 1, .threads = (uint32_t)path, .dtype = dtypes[t], .path = path};
                unsigned char *other = life(policies[p], c, path == KVF_CPU_SCALAR ? ~0ull : 0x5a5a3c3ca5a5c3c3ull, &m);
                cr_assert_eq(n, m, "%s", policies[p]);
                cr_assert_arr_eq(one, other, n, "%s, path %d", policies[p], (int)path);
                free(other);
            }
            free(one);
        }
}

/* ---- Sizes ------------------------------------------------------------------------------------------------ */

/* PyramidKV at the size of a real prompt, in tokens and in blocks: the arithmetic series, and the total to the token. */
Test(policy_baselines_edges, pyramid_sizes_add_up) {
    enum { N = 30, LONG = 2048 };
    static const uint32_t budgets[] = {100, 204, 409, 819, 1638, 2000, 64, 40};
    for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++)
        for (int block = 0; block < 2; block++) {
            rig *r = rig_small(N, 1, 1);
            kvf_policy_options o = rig_policy("pyramidkv", NULL);
            double b = budgets[i], least = (b - 64) / 20, most = 2 * (b - 64) - least, total = 0;
            if (b <= 64) least = most = b - 64;
            if (most > LONG - 64) most = LONG - 64, least = 2 * (b - 64) - most;
            o.budget_tokens = budgets[i];
            o.budget_unit = block ? KVF_BUDGET_BLOCK : KVF_BUDGET_TOKEN;
            OK(kvf_policy_open(r->state, 0, &o, err));
            OK(kvf__policy_ops_resolve(o.ops).budget(r->state, 0, NULL, LONG, err));
            const kvf_layer_size *s = kvf_policy_sizes(r->state, 0);
            for (uint32_t l = 0; l < N; l++) {
                double want = 64 + most - (most - least) * l / (N - 1), bound = block ? 8 : 1 + 1e-6;
                cr_assert(fabs(s[l].keep - want) <= bound, "budget %u, layer %u: %u, not %g", budgets[i], l, s[l].keep,
                          want);
                cr_assert(s[l].reserve == UINT32_MAX && s[l].window == KVF__MIN(64, s[l].keep));
                cr_assert(!block || s[l].keep % 8 == 0);
                total += s[l].keep;
            }
            cr_assert_eq(total, block ? floor(b * N / 8) * 8 : b * N, "budget %u: %g in all", budgets[i], total);
            rig_free(r);
        }
}

/* ---- CaM's draws -------------------------------------------------------------------------------------------- */

/* Sampled, the mean over seeds is what expected gives; the same seed gives the same; other seeds differ. */
Test(policy_baselines_edges, cam_samples_what_is_expected) {
    enum { SEEDS = 400 };
    static world w;
    static double mean[CAP], first[CAP];
    uint32_t n_different = 0, n_keep = 40;
    for (uint32_t i = 0; i < SEEDS + 1; i++) {
        open_named(&w, "cam:sample", 2, 1);
        w.o.cam_seed = i == SEEDS ? 0 : i;
        begin(&w, n_keep, 1);
        end_prompt(&w, L, i % 2 ? ~0ull : 0);
        kvf__head x = rig_head(w.r, 0, 1, 1);
        bool same = true;
        for (uint32_t slot = 0; slot < n_keep; slot++) {
            double v = (double)rig_get(w.r, kvf__v_row(&x, slot), 3);
            if (i == 0) first[slot] = v;
            if (i < SEEDS) mean[slot] += v / SEEDS;
            same = same && v == first[slot];
        }
        n_different += !same;
        cr_assert(i != SEEDS || same, "seed 0 again");
        if (i == SEEDS)
            for (uint32_t slot = 0; slot < n_keep; slot++) {
                const token *t = &w.heads[KV + 1].t[slot];
                cr_assert(fabs(mean[slot] - t->v[3]) < 0.05, "slot %u: mean %g, expected %g", slot, mean[slot],
                          t->v[3]);
            }
        close_world(&w);
    }
    cr_assert(n_different > SEEDS / 2, "%u seeds differ from seed 0", n_different);
}

/* ---- A later turn ------------------------------------------------------------------------------------------- */

/* What a turn finds is worth less by the decay; tokens of the turn compete with it. */
Test(policy_baselines_edges, sirllm_decays_at_each_turn) {
    enum { TURN = 30 };
    static world w;
    open_named(&w, "sirllm", 6, 1);
    w.o.score_decay = 0.5;
    begin(&w, 40, 1);
    end_prompt(&w, L, 0);
    check(&w, "first turn");
    float logprobs[L + TURN];
    for (uint32_t pos = L; pos < L + TURN; pos++) append(&w, pos);
    for (uint32_t pos = 0; pos < L + TURN; pos++) logprobs[pos] = logprob(w.seed, pos);
    const float *rows[1] = {logprobs};
    w.r->prompt_logprobs = rows;
    w.r->prompt_stride = L + TURN;
    kvf_policy_ops ops = kvf__policy_ops_resolve(w.o.ops);
    OK(ops.budget(w.r->state, 0, NULL, L + TURN, err));
    kvf_event list[LAYERS];
    uint32_t n = rig_due(w.r, 0, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, true, list);
    cr_assert_eq(n, LAYERS);
    rig_events(w.r, list, n, 0);
    for (uint32_t i = 0; i < HEADS; i++) {
        head *h = &w.heads[i];
        double worth[CAP];
        bool keep[CAP];
        uint32_t left = 0;
        for (uint32_t k = 0; k < h->n; k++)
            worth[k] = -(double)logprob(w.seed, h->t[k].pos) * (h->t[k].pos < L ? 0.5 : 1.0);
        keep_best(h, worth, 40, L + TURN - 20, 4, keep);
        for (uint32_t k = 0; k < h->n; k++)
            if (keep[k]) h->t[left++] = h->t[k];
        h->n = left;
    }
    check(&w, "second turn");
    close_world(&w);
}

/* ---- Numbers that are none ------------------------------------------------------------------------------------ */

/* mode 0: all the same; 1: NaN on two tokens; 2: infinity on two. */
static void spoil(world *w, int mode) {
    size_t n = (size_t)LAYERS * KV * 3 * L;
    float bad = mode == 1 ? NAN : INFINITY;
    for (size_t i = 0; i < n; i++) {
        bool here = mode && (i % L == 30 || i % L == 31);
        w->sums[i] = w->last[i] = here ? bad : 1.0f;
        if (i < n / 3) w->squares[i] = here ? bad : 1.0f;
    }
    for (uint32_t pos = 0; pos < L; pos++) w->logprobs[pos] = mode && (pos == 30 || pos == 31) ? -bad : -1.0f;
}

static bool holds(const world *w, uint32_t layer, uint32_t kv, uint32_t pos) {
    for (uint32_t slot = 0; slot < rig_slots(w->r, 0, layer); slot++)
        if (rig_pos(w->r, 0, layer, kv, slot) == pos) return true;
    return false;
}

/* Ties keep lower positions, NaN goes first, infinity stays; values stay finite; decode goes on over what was spoilt. */
Test(policy_baselines_edges, ties_and_numbers_that_are_none) {
    static world w;
    for (size_t p = 0; p < N_POLICIES; p++)
        for (int mode = 0; mode < 3; mode++) {
            open_named(&w, policies[p], 3, 1);
            begin(&w, 60, 2);
            spoil(&w, mode);
            end_prompt(&w, L, 0);
            uint32_t spread = w.o.score == KVF_SCORE_WINDOW ? 2 : 0; /* of an average */
            for (uint32_t l = 0; l < LAYERS; l++) {
                uint32_t size = kvf_policy_sizes(w.r->state, 0)[l].keep;
                cr_assert_eq(rig_slots(w.r, 0, l), size);
                for (uint32_t pos = 30 - spread; pos <= 31 + spread && !is(&w, "cam"); pos++) {
                    if (mode == 1) cr_assert_not(holds(&w, l, 0, pos), "%s keeps NaN", policies[p]);
                    if (mode == 2 && size >= 30) cr_assert(holds(&w, l, 0, pos), "%s drops %u", policies[p], pos);
                }
                for (uint32_t pos = 0; pos < L && !mode && is(&w, "sirllm"); pos++)
                    cr_assert_eq(holds(&w, l, 0, pos), pos < size / 2 || pos >= L - size / 2, "tie at %u", pos);
            }
            for (uint32_t i = 0; i < 12; i++) {
                step(&w, L + i);
                kvf_event list[LAYERS];
                uint32_t n = rig_due(w.r, 0, KVF_AFTER_STEP, KVF_EVENT_DECODE, false, list);
                if (n) rig_events(w.r, list, n, 0);
            }
            for (uint32_t l = 0; l < LAYERS; l++)
                for (uint32_t slot = 0; slot < rig_slots(w.r, 0, l); slot++) {
                    kvf__head x = rig_head(w.r, 0, l, 1);
                    for (uint32_t e = 0; e < D; e++) cr_assert(isfinite(rig_get(w.r, kvf__v_row(&x, slot), e)));
                }
            close_world(&w);
        }
}

/* One layer, one head, one token; a budget that nothing exceeds; what a batch lacks is named. */
Test(policy_baselines_edges, least_of_everything) {
    for (size_t p = 0; p < N_POLICIES; p++) {
        static world w;
        open_named(&w, policies[p], 1, 1);
        rig *r = rig_small(1, 1, 1);
        kvf_policy_options o = w.o;
        o.rho = 0.5;
        o.min_tokens = 0;
        OK(kvf_policy_open(r->state, 0, &o, err));
        rig_put2(r, 1, 0, 1, 1);
        OK(kvf__policy_ops_resolve(o.ops).budget(r->state, 0, NULL, 1, err));
        uint32_t one = 1, keep = 7;
        cr_assert_eq(kvf__policy_due_layers(r->state, 0, KVF_AT_PROMPT_END, &one, &keep), 0, "%s", policies[p]);
        rig_free(r);
        begin(&w, 40, 1);
        kvf_event e = {0, 0, 40, KVF_EVENT_PROMPT, 0, 0};
        kvf_policy_batch b = rig_batch(w.r);
        float *none[1] = {NULL}, *some[1] = {w.last};
        OK(kvf__policy_ops_resolve(w.o.ops).budget(w.r->state, 0, NULL, L, err));
        b.events = &e, b.n_events = 1, b.prompt_stride = L;
        b.prompt_sums = is(&w, "roco") ? some : none; /* without any, the scores are in pages */
        b.prompt_last = none;
        for (uint32_t i = 0; i < w.r->n_tables * w.r->per_table; i++) w.r->score_rows[i] = UINT32_MAX;
        const char *lacks = is(&w, "roco") ? "prompt_squares" : "score pages";
        kvf_status st = is(&w, "roco") ? KVF_E_INVALID : KVF_E_STATE;
        FAILS(kvf__policy_ops_resolve(w.o.ops).match(w.r->state, NULL, &b, w.r->plan, err), st, lacks);
        close_world(&w);
    }
}
