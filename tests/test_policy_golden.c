/* The worked cases of which tokens stay and what is merged, one by one and as whole events. */
#include "golden_cases.h"

/* Selection by the internal keys: score is [n], in slot and position order. */
static void select_case(const float *score, uint32_t n, uint32_t hh, uint32_t recent, uint32_t sinks,
                        const json_t *kept, const json_t *evicted) {
    uint64_t keys[32] = {0};
    uint32_t heap[32], n_evict = n > hh + recent ? n - hh - recent : 0, n_kept = 0, n_gone = 0;
    bool gone[32] = {false};
    for (uint32_t i = 0; i < n; i++) keys[i] = kvf__select_key(score[i], i, n - recent, sinks);
    kvf__select_evicted(keys, n, n_evict, heap);
    for (uint32_t i = 0; i < n_evict; i++) gone[heap[i]] = true;
    for (uint32_t i = 0; i < n; i++) {
        if (gone[i] && evicted) cr_assert_eq(i, item(evicted, n_gone++));
        if (!gone[i]) cr_assert_eq(i, item(kept, n_kept++));
    }
    cr_assert_eq(n_kept, length(kept));
}

static void select_json(const json_t *in, const json_t *out) {
    float score[32];
    for (uint32_t i = 0; i < length(at(in, "score")); i++) score[i] = (float)item(at(in, "score"), i);
    select_case(score, length(at(in, "score")), (uint32_t)num(in, "hh"), (uint32_t)num(in, "recent"),
                (uint32_t)num(in, "sinks"), at(out, "kept"), at(out, "evicted"));
}

static void select_edges(const json_t *in, const json_t *out) {
    const char *name;
    json_t *one;
    json_object_foreach((json_t *)in, name, one) select_json(one, at(out, name));
}

static void gqa_group_scores(const json_t *in, const json_t *out) {
    static const char *const names[] = {"sum", "max", "first"};
    const json_t *rows = at(in, "score_query_heads");
    uint32_t g = (uint32_t)num(in, "group"), n = length(sub(rows, 0));
    float x[4][4], score[4];
    for (uint32_t h = 0; h < 4; h++)
        for (uint32_t i = 0; i < n; i++) x[h][i] = (float)item(sub(rows, h), i);
    for (int r = 0; r < 3; r++)
        for (uint32_t h = 0; h < 2; h++) {
            const json_t *expected = at(out, names[r]);
            for (uint32_t i = 0; i < n; i++) {
                score[i] = kvf__gqa_reduce((kvf_gqa)r, &x[h * g][i], g, 4);
                near(score[i], item(sub(at(expected, "score_kv_heads"), h), i), names[r]);
            }
            select_case(score, n, (uint32_t)num(in, "hh"), (uint32_t)num(in, "recent"), (uint32_t)num(in, "sinks"),
                        sub(at(expected, "kept"), h), NULL);
        }
}

static const kvf__kernels *const paths[] = {&kvf__policy_kernels_scalar,
#if defined(__x86_64__)
                                            &kvf__policy_kernels_avx2, &kvf__policy_kernels_avx512
#endif
};

/* The nearest of kept keys by the internal kernels, on every path this CPU has. */
static void match_case(const json_t *kept, const json_t *evicted, const json_t *u, const json_t *j) {
    kvf__cpu cpu = kvf__cpu_detect();
    for (size_t p = 0; p < (cpu.avx512 ? 3 : cpu.avx2_fma_f16c ? 2 : 1); p++) {
        float rows[2][8][8] = {{{0}}}, tile_panels[3 * 8 * 8], panel[64], norm[8], unused[8];
        const void *pointers[2][8];
        kvf__tile tile = {.panels = tile_panels, .n = length(kept)};
        for (uint32_t i = 0; i < 8; i++) {
            for (uint32_t e = 0; e < 2; e++) {
                if (i < length(kept)) rows[0][i][e] = (float)item(sub(kept, i), e);
                if (i < length(evicted)) rows[1][i][e] = (float)item(sub(evicted, i), e);
            }
            pointers[0][i] = rows[0][i];
            pointers[1][i] = rows[1][i];
            tile.pos[i] = tile.slot[i] = i;
        }
        for (int k = 1; k < 3; k++) paths[p]->pack(KVF_F32, pointers[0], 8, tile_panels + 64 * k, unused);
        paths[p]->pack(KVF_F32, pointers[0], 8, tile_panels, tile.rnorm);
        paths[p]->pack(KVF_F32, pointers[1], 8, panel, norm);
        for (uint32_t i = 0; i < length(evicted); i++) {
            kvf__best best = {-2, UINT32_MAX, UINT32_MAX};
            paths[p]->nearest(&tile, panel, i, 1, norm + i, 8, &best);
            near(best.u, item(u, i), "u");
            cr_assert_eq(best.slot, item(j, i));
        }
    }
}

static void nearest_match(const json_t *in, const json_t *out) {
    match_case(at(in, "kept_keys"), at(in, "evicted_keys"), at(out, "u"), at(out, "j"));
    match_case(at(in, "tie_kept"), at(in, "tie_evicted"), at(out, "tie_u"), at(out, "tie_j"));
}

static void tau_ema_sequence(const json_t *in, const json_t *out) {
    const char *name;
    json_t *beta;
    json_object_foreach(at(in, "beta_new_old"), name, beta) {
        const json_t *expected = at(out, name), *m = at(in, "max_similarity");
        double tau = kvf__tau_next(NAN, num(in, "tau0"), item(beta, 0), item(beta, 1));
        near(tau, item(at(expected, "tau"), 0), "first tau");
        for (uint32_t i = 0; i < length(m); i++) {
            tau = kvf__tau_next(tau, item(m, i), item(beta, 0), item(beta, 1));
            near(tau, item(at(expected, "tau"), i + 1), "tau");
            cr_assert_eq(item(m, i) >= tau, item(at(expected, "gate"), i));
        }
    }
}

/* "paper_literal", the formula as printed, sums to more than 1; it stands in the file for the record and is not
 * offered. */
static void merge_weights(const json_t *in, const json_t *out) {
    static const char *const keys[] = {"[1.0]", "[0.0]", "[1.0, 0.0]", "[-1.0]", "[0.8, 0.8, 0.8]"};
    const json_t *lists = at(in, "u_lists");
    cr_assert_eq(length(lists), 5);
    for (uint32_t i = 0; i < 5; i++)
        for (int m = KVF_MERGE_PAPER; m <= KVF_MERGE_AUTHORS; m++) {
            const json_t *expected = at(at(out, keys[i]), m == KVF_MERGE_PAPER ? "paper" : "authors");
            float u[3];
            double we[3];
            uint32_t n = length(sub(lists, i));
            for (uint32_t k = 0; k < n; k++) u[k] = (float)item(sub(lists, i), k);
            near(kvf__merge_weights((kvf_merge)m, u, NULL, n, we), item(expected, 0), "w_c");
            for (uint32_t k = 0; k < n; k++) near(we[k], item(expected, k + 1), "w_e");
        }
}

/* ---- Whole layers, through the vtable ----------------------------------------------------------------------- */

/* A rig of one layer with sizes hh and recent set by hand. */
static rig *layer_rig(uint32_t n_heads, kvf_policy_options o, uint32_t hh, uint32_t recent) {
    rig *r = rig_new((rig_config){.n_seqs = 1,
                                  .n_layers = 1,
                                  .n_kv = n_heads,
                                  .g = 1,
                                  .hpg = n_heads,
                                  .bs = 8,
                                  .d = 8,
                                  .cap = 32,
                                  .n_arrays = 1,
                                  .threads = 1});
    OK(kvf_policy_open(r->state, 0, &o, err));
    kvf__policy_seq *s = kvf__policy_seq_get(r->state, 0);
    s->sizes[0] = (kvf_layer_size){hh + recent, hh, recent, hh + recent + 1};
    s->budgeted = s->sized = true;
    s->n_prompt = 8;
    return r;
}

static void put(rig *r, uint32_t h, uint32_t slot, const json_t *k, const json_t *v) {
    float key[8] = {0}, value[8] = {0};
    for (uint32_t e = 0; e < length(k); e++) key[e] = (float)item(k, e);
    for (uint32_t e = 0; e < length(v); e++) value[e] = (float)item(v, e);
    rig_put(r, 0, 0, h, slot, r->next_pos[0], key, value);
}

static void load(rig *r, const json_t *K, const json_t *V, const json_t *score) {
    uint32_t n = length(sub(K, 0));
    for (uint32_t s = 0; s < n; s++, r->next_pos[0]++)
        for (uint32_t h = 0; h < r->c.n_kv; h++) {
            put(r, h, s, sub(sub(K, h), s), sub(sub(V, h), s));
            *rig_score(r, 0, 0, h, 0, s) = (float)item(sub(score, h), s);
        }
    rig_set_slots(r, 0, 0, n);
}

static void event(rig *r, uint32_t keep, uint32_t kind) {
    kvf_event e = {0, 0, keep, kind, 0, 0};
    rig_events(r, &e, 1, 0);
}

static void step(rig *r, const json_t *s, uint32_t keep) {
    uint32_t n = rig_slots(r, 0, 0);
    float row[2 * 32];
    for (uint32_t h = 0; h < r->c.n_kv; h++) {
        put(r, h, n, sub(at(s, "k"), h), sub(at(s, "v"), h));
        /* The rows of the file are in position order; slots need not be. */
        for (uint32_t i = 0; i <= n; i++) {
            uint32_t order = 0, pos = i == n ? r->next_pos[0] : rig_pos(r, 0, 0, h, i);
            for (uint32_t k = 0; k < n; k++) order += rig_pos(r, 0, 0, h, k) < pos;
            row[h * 32 + i] = (float)item(sub(at(s, "row"), h), order);
        }
    }
    r->next_pos[0]++;
    rig_set_slots(r, 0, 0, n + 1);
    rig_observe(r, 0, row, 32);
    if (n + 1 > keep) event(r, keep, KVF_EVENT_DECODE);
}

/* The layer as the reference's view() lists it: by ascending position. */
static void expect(rig *r, const json_t *x, bool evicted) {
    uint32_t n = rig_slots(r, 0, 0);
    const json_t *tau = at(x, "tau"), *u = json_object_get(x, "u");
    for (uint32_t h = 0; h < r->c.n_kv; h++) {
        kvf__head head = rig_head(r, 0, 0, h);
        near(kvf_policy_tau(r->state, 0, 0, h), json_is_array(tau) ? item(tau, h) : json_number_value(tau), "tau");
        cr_assert_eq(n, length(sub(at(x, "pos"), h)));
        for (uint32_t i = 0; i < n; i++) {
            uint32_t slot = 0;
            while (slot < n && rig_pos(r, 0, 0, h, slot) != item(sub(at(x, "pos"), h), i)) slot++;
            cr_assert(slot < n, "position %g is not kept", item(sub(at(x, "pos"), h), i));
            near(*rig_score(r, 0, 0, h, 0, slot), item(sub(at(x, "score"), h), i), "score");
            const json_t *k = sub(sub(at(x, "K"), h), i), *v = sub(sub(at(x, "V"), h), i);
            for (uint32_t e = 0; e < 8; e++) {
                double ke = e < length(k) ? item(k, e) : 0, ve = e < length(v) ? item(v, e) : 0;
                cr_assert_float_eq(rig_get(r, kvf__k_row(&head, slot), e), ke, 1e-5 * fmax(1, fabs(ke)));
                cr_assert_float_eq(rig_get(r, kvf__v_row(&head, slot), e), ve, 1e-5 * fmax(1, fabs(ve)));
            }
        }
        const kvf_plan_event *pe = &r->plan->events[0];
        for (uint32_t i = 0; evicted && i < pe->n_evict; i++) {
            const kvf_plan_entry *e = &r->plan->entries[pe->entry_begin + h * pe->n_evict + i];
            near(e->u, item(sub(u, h), i), "u");
            cr_assert_eq(e->merge, item(sub(at(x, "gate"), h), i));
        }
    }
}

static kvf_policy_options layer_options(const json_t *in, const char *merge, const char *scope) {
    kvf_policy_options o = paper();
    o.beta_new = num(in, "beta_new");
    o.beta_old = num(in, "beta_old");
    o.sinks = (uint32_t)num(in, "sinks");
    set(&o, "merge", merge);
    set(&o, "scope", scope);
    return o;
}

/* load() of the reference, then its steps; expected: after the prompt, or one for each step. */
static void run_layer(const json_t *in, const char *merge, const char *scope, const json_t *after_prompt,
                      const json_t *after_steps) {
    uint32_t hh = (uint32_t)num(in, "hh"), recent = (uint32_t)num(in, "recent");
    rig *r = layer_rig(length(at(in, "K")), layer_options(in, merge, scope), hh, recent);
    load(r, at(in, "K"), at(in, "V"), at(in, "score"));
    if (rig_slots(r, 0, 0) > hh + recent) event(r, hh + recent, KVF_EVENT_PROMPT);
    if (after_prompt) {
        expect(r, after_prompt, true);
        for (uint32_t h = 0; h < r->c.n_kv; h++) { /* which tokens went where, by position; slots were positions */
            const kvf_plan_event *pe = &r->plan->events[0];
            for (uint32_t i = 0; i < pe->n_evict; i++) {
                const kvf_plan_entry *e = &r->plan->entries[pe->entry_begin + h * pe->n_evict + i];
                cr_assert_eq(e->slot, item(sub(at(after_prompt, "evicted_pos"), h), i));
                cr_assert_eq(e->target, item(sub(at(after_prompt, "target_pos"), h), i));
                cr_assert_eq(rig_pos(r, 0, 0, h, 0), 0);
            }
        }
    }
    for (uint32_t i = 0; after_steps && i < length(at(in, "steps")); i++) {
        step(r, sub(at(in, "steps"), i), hh + recent);
        expect(r, sub(after_steps, i), true);
    }
    rig_free(r);
}

static void prompt_compress(const json_t *in, const json_t *out) {
    run_layer(in, "paper", "head", at(out, "paper"), NULL);
    run_layer(in, "authors", "head", at(out, "authors"), NULL);
}
static void two_step_decode(const json_t *in, const json_t *out) {
    run_layer(in, "paper", "head", NULL, at(out, "paper"));
    run_layer(in, "authors", "head", NULL, at(out, "authors"));
}
static void two_heads_scope(const json_t *in, const json_t *out) {
    run_layer(in, "authors", "head", at(out, "head"), NULL);
    run_layer(in, "authors", "layer", at(out, "layer"), NULL);
}
static void first_eviction_in_decode(const json_t *in, const json_t *out) {
    rig *r = layer_rig(1, layer_options(in, "paper", "head"), (uint32_t)num(in, "hh"), (uint32_t)num(in, "recent"));
    load(r, at(in, "K"), at(in, "V"), at(in, "score"));
    uint32_t slots = rig_slots(r, 0, 0), keep;
    cr_assert_eq(kvf__policy_due_layers(r->state, 0, KVF_AT_PROMPT_END, &slots, &keep), 0);
    cr_assert(json_is_null(at(at(out, "after_prompt"), "tau")) && isnan(kvf_policy_tau(r->state, 0, 0, 0)));
    step(r, sub(at(in, "steps"), 0), 8);
    expect(r, at(out, "after_step"), true);
    rig_free(r);
}

/* Cosines given by hand: a plan is made by match, its u replaced, then gated. */
static void tau_first_and_gate(const json_t *in, const json_t *out) {
    static const char *const scopes[] = {"head", "layer"};
    for (int s = 0; s < 2; s++) {
        kvf_policy_options o = paper();
        o.sinks = 0;
        set(&o, "scope", scopes[s]);
        rig *r = layer_rig(2, o, 1, 1);
        float k[8] = {1}, v[8] = {0};
        for (uint32_t i = 0; i < 5; i++, r->next_pos[0]++)
            for (uint32_t h = 0; h < 2; h++) {
                rig_put(r, 0, 0, h, i, i, k, v);
                *rig_score(r, 0, 0, h, 0, i) = 1;
            }
        rig_set_slots(r, 0, 0, 5);
        kvf_event e = {0, 0, 2, KVF_EVENT_PROMPT, 0, 0};
        kvf_policy_batch b = rig_batch(r);
        b.events = &e;
        b.n_events = 1;
        OK(o.ops->match(r->state, NULL, &b, r->plan, err));
        cr_assert_eq(r->plan->n_reduce, s ? 4 : 0);
        for (uint32_t h = 0; h < 2; h++)
            for (uint32_t i = 0; i < 3; i++) {
                r->plan->entries[h * 3 + i].u = (float)item(sub(at(in, "u"), h), i);
                if (s) r->plan->reduce[i] = item(sub(at(in, "u"), 0), i) + item(sub(at(in, "u"), 1), i);
            }
        OK(o.ops->gate(r->state, NULL, &b, r->plan, err));
        const json_t *x = at(out, scopes[s]);
        for (uint32_t h = 0; h < 2; h++) {
            near(r->plan->tau[h], s ? num(x, "tau") : item(at(x, "tau"), h), "tau");
            for (uint32_t i = 0; i < 3; i++) {
                const json_t *gate = s ? at(x, "gate") : sub(at(x, "gate"), h);
                cr_assert_eq(r->plan->entries[h * 3 + i].merge, item(gate, i));
                if (s) near(r->plan->reduce[i] / r->plan->reduce[3], item(at(x, "rank_mean"), i), "mean of a rank");
            }
        }
        rig_free(r);
    }
}

/* Two kept tokens, three evicted; the gate is given, so plan entries are set between gate and apply. */
static void merge_apply(const json_t *in, const json_t *out) {
    static const char *const merges[] = {"paper", "authors"};
    match_case(at(in, "kept_keys"), at(in, "evicted_keys"), at(out, "u"), at(out, "j"));
    for (int m = 0; m < 2; m++) {
        kvf_policy_options o = paper();
        set(&o, "merge", merges[m]);
        o.sinks = 2;
        rig *r = layer_rig(1, o, 2, 0);
        for (uint32_t i = 0; i < 5; i++, r->next_pos[0]++) {
            const json_t *K = at(in, i < 2 ? "kept_keys" : "evicted_keys"),
                         *V = at(in, i < 2 ? "kept_values" : "evicted_values");
            put(r, 0, i, sub(K, i < 2 ? i : i - 2), sub(V, i < 2 ? i : i - 2));
            *rig_score(r, 0, 0, 0, 0, i) = 1;
        }
        rig_set_slots(r, 0, 0, 5);
        kvf_event e = {0, 0, 2, KVF_EVENT_PROMPT, 0, 0};
        kvf_policy_batch b = rig_batch(r);
        b.events = &e;
        b.n_events = 1;
        OK(o.ops->match(r->state, NULL, &b, r->plan, err));
        OK(o.ops->gate(r->state, NULL, &b, r->plan, err));
        for (uint32_t i = 0; i < 3; i++) {
            near(r->plan->entries[i].u, item(at(out, "u"), i), "u");
            cr_assert_eq(r->plan->entries[i].target, item(at(out, "j"), i));
            r->plan->entries[i].merge = item(at(in, "gate"), i) != 0;
        }
        OK(o.ops->apply(r->state, NULL, &b, r->plan, err));
        kvf__head head = rig_head(r, 0, 0, 0);
        const json_t *x = at(out, merges[m]);
        for (uint32_t i = 0; i < 2; i++) { /* fp32 fold: 1e-6 of the value is met here */
            for (uint32_t k = 0; k < 2; k++)
                near(rig_get(r, kvf__k_row(&head, i), k), item(sub(at(x, "K"), i), k), "K");
            near(rig_get(r, kvf__v_row(&head, i), 0), item(sub(at(x, "V"), i), 0), "V");
        }
        rig_free(r);
    }
}

Test(policy_golden, all_cases_of_tokens) {
    static const golden_case runs[] = {
        {"select_sinks_window", select_json},       {"select_edges", select_edges},
        {"gqa_group_scores", gqa_group_scores},     {"nearest_match", nearest_match},
        {"tau_first_and_gate", tau_first_and_gate}, {"tau_ema_sequence", tau_ema_sequence},
        {"merge_weights", merge_weights},           {"merge_apply", merge_apply},
        {"prompt_compress", prompt_compress},       {"two_step_decode", two_step_decode},
        {"two_heads_scope", two_heads_scope},       {"first_eviction_in_decode", first_eviction_in_decode}};
    run_golden(runs, sizeof runs / sizeof *runs, false);
}
