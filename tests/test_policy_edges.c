/* What goes wrong elsewhere in scores, positions, cosines and merge weights (field reports of other projects:
 * precision, ties, NaN, zero keys, rotation, weights that do not add up). */
#include "test_policy_rig.h"
#include "tests/counts.h"

/* ---- Scores -------------------------------------------------------------------------------------------------- */

Test(policy_edges, nan_goes_first_and_infinities_are_numbers) {
    float scores[] = {1, NAN, -INFINITY, INFINITY, 0, -0.0f, INFINITY, -NAN, 2, -1e30f, 0, 0};
    static const char *const kept[] = {"",
                                       "11",
                                       "3 11",
                                       "3 6 11",
                                       "3 6 8 11",
                                       "0 3 6 8 11",
                                       "0 3 4 6 8 11",
                                       "0 3 4 5 6 8 11",
                                       "0 3 4 5 6 8 10 11",
                                       "0 3 4 5 6 8 9 10 11",
                                       "0 2 3 4 5 6 8 9 10 11",
                                       "0 1 2 3 4 5 6 8 9 10 11"};
    for (uint32_t keep = 1; keep < 12; keep++) {
        rig *r = rig_small(1, 1, 1);
        kvf_policy_options o = rig_policy("h2o", NULL);
        rig_open_sized(r, 0, &o, keep - 1, 1);
        for (uint32_t i = 0; i < 12; i++) rig_put2(r, 1, i, i, scores[i]);
        rig_event0(r, keep, KVF_EVENT_PROMPT, 0);
        cr_assert_str_eq(rig_held(r, 0), kept[keep], "keep %u: %s", keep, rig_held(r, 0));
        rig_free(r);
    }
    cr_assert_lt(kvf__select_key(-0.0f, 5, 100, 0), kvf__select_key(0, 6, 100, 0)); /* signed zeros are a tie */
    cr_assert_lt(kvf__select_key(0, 5, 100, 0), kvf__select_key(-0.0f, 6, 100, 0));
}

Test(policy_edges, all_ties_keep_the_lower_positions_and_sinks_come_first) {
    for (int ties = 0; ties < 2; ties++) {
        rig *r = rig_small(1, 2, 1);
        kvf_policy_options o = rig_policy("d2o", NULL);
        o.sinks = 3;
        rig_open_sized(r, 0, &o, 6, 2);
        for (uint32_t i = 0; i < 20; i++) rig_put2(r, 1, 0, i, ties ? 7 : i);
        rig_event0(r, 8, KVF_EVENT_PROMPT, 0);
        for (uint32_t h = 0; h < 2; h++)
            cr_assert_str_eq(rig_held(r, h), ties ? "0 1 2 3 4 5 18 19" : "0 1 2 15 16 17 18 19");
        cr_assert_eq(kvf_policy_tau(r->state, 0, 0, 1), 1.0); /* equal keys: all merge */
        cr_assert_eq(counts_of(r->state, 0).merged, 24);
        rig_free(r);
    }
}

/* D7 (ii): thousands of small additions; (iii): a group's sum beyond what half precision holds. */
Test(policy_edges, d7_scores_of_long_runs_stay_true) {
    rig *r = rig_new((rig_config){.n_seqs = 1,
                                  .n_layers = 1,
                                  .n_kv = 1,
                                  .g = 32,
                                  .hpg = 1,
                                  .bs = 8,
                                  .d = 8,
                                  .cap = 32,
                                  .n_arrays = 1,
                                  .threads = 1,
                                  .dtype = KVF_F16});
    kvf_policy_options o = rig_policy("h2o", NULL);
    rig_open_sized(r, 0, &o, 2, 1);
    for (int i = 0; i < 4; i++) rig_put2(r, 1, 0, 0, 0);
    for (int i = 0; i < 5000; i++) rig_observe(r, 0, (float[]){0.6f, 0.4f, i < 2500 ? 0.0f : 0.9f, 0}, 4);
    double expected[] = {3000, 2000, 2250};
    for (uint32_t s = 0; s < 3; s++) cr_assert_float_eq(*rig_score(r, 0, 0, 0, 0, s), expected[s], 0.01 * expected[s]);
    float sums[32][4];
    for (int q = 0; q < 32; q++)
        for (int s = 0; s < 4; s++) sums[q][s] = 2100.0f - s;
    r->prompt_sums[0] = &sums[0][0];
    r->prompt_stride = 4;
    memset(kvf__policy_seq_get(r->state, 0)->scored, 0, r->c.n_kv * sizeof(uint32_t)); /* a first prompt */
    rig_event0(r, 4, KVF_EVENT_PROMPT, 0);
    for (uint32_t s = 0; s < 4; s++) cr_assert_eq(*rig_score(r, 0, 0, 0, 0, s), 32 * (2100.0f - s));
    rig_free(r);
}

/* D8: one query head of a group decides for its KV head alone, whichever place in the group it has. */
Test(policy_edges, d8_a_query_head_speaks_for_its_own_group) {
    /* One KV head, two, and as many as query heads. */
    for (uint32_t n_kv = 1; n_kv <= 4; n_kv *= 2)
        for (uint32_t i = 0; i < 12; i++) {
            uint32_t gqa = i / 4, q = i % 4, g = 4 / n_kv;
            rig *r = rig_small(1, n_kv, g);
            kvf_policy_options o = rig_policy("h2o", NULL);
            o.gqa = (kvf_gqa)gqa;
            rig_open_sized(r, 0, &o, 2, 2);
            for (int s = 0; s < 8; s++) rig_put2(r, 1, 0, s, NAN);
            float sums[4][8];
            for (int s = 0; s < 32; s++) sums[s / 8][s % 8] = 0.1f;
            sums[q][2] = 0.9f;
            r->prompt_sums[0] = &sums[0][0];
            r->prompt_stride = 8;
            rig_event0(r, 4, KVF_EVENT_PROMPT, 0);
            bool heard = gqa != KVF_GQA_FIRST || q % g == 0;
            for (uint32_t h = 0; h < n_kv; h++)
                cr_assert_str_eq(rig_held(r, h), heard && h == q / g ? "0 2 6 7" : "0 1 6 7");
            rig_free(r);
        }
}

/* ---- Keys, positions, merging ----------------------------------------------------------------------------------- */

/* D3: a zero key has cosine 0; the threshold lives through an event that merges nothing. */
Test(policy_edges, d3_zero_and_broken_keys_have_cosine_zero) {
    static const kvf_cpu_path paths[] = {KVF_CPU_SCALAR, KVF_CPU_AUTO};
    for (int p = 0; p < 2; p++)
        for (int broken = 0; broken < 3; broken++) {
            rig *r = rig_small(1, 1, 1);
            r->c.path = paths[p];
            kvf_policy_options o = rig_policy("d2o", NULL);
            o.sinks = 0;
            rig_open_sized(r, 0, &o, 2, 1);
            double bad = broken == 0 ? 0 : broken == 1 ? (double)NAN : (double)INFINITY;
            rig_put2(r, 0, 0, 1, 9);
            rig_put2(r, -1, 0, 2, 8);
            rig_put2(r, bad, 0, 3, 1);
            rig_put2(r, 1, 0, 4, 1);
            rig_put2(r, 1, 0, 5, 1);
            rig_event0(r, 3, KVF_EVENT_PROMPT, 0);
            const kvf_plan_entry *e = r->plan->entries;
            cr_assert(e[0].u == 0 && e[0].target == 0, "u %g of slot %u", e[0].u, e[0].target); /* the lowest of ties */
            cr_assert(e[1].u == 1 && e[1].target == 4);
            cr_assert_eq(kvf_policy_tau(r->state, 0, 0, 0), 0.5);
            cr_assert(!e[0].merge && e[1].merge);
            cr_assert_eq(rig_k(r, 0, 2, 0), 1);
            cr_assert_float_eq(rig_v(r, 0, 2), 4.5, 1e-6);
            /* A zero key again: tau is .7 * 0 + .3 * .5, and it is dropped; the threshold lives on. */
            rig_put2(r, 0, 0, 6, 0);
            rig_event0(r, 3, KVF_EVENT_DECODE, 0);
            cr_assert_float_eq(kvf_policy_tau(r->state, 0, 0, 0), 0.15, 1e-12);
            cr_assert_eq(r->plan->entries[0].merge, 0);
            rig_put2(r, -1, 0, 7, 0);
            rig_event0(r, 3, KVF_EVENT_DECODE, 0);
            kvf_policy_counts c = counts_of(r->state, 0);
            cr_assert(c.n_events == 3 && c.merged + c.dropped == 4 && c.dropped >= 2);
            rig_free(r);
        }
}

/* D3: an event whose tokens are all below the threshold, and one that evicts nothing, leave one to go by. A key of
 * (u, sqrt(1 - u^2)) has cosine u with the one that is kept. */
Test(policy_edges, d3_events_that_merge_nothing_leave_the_threshold) {
    static const double rounds[4][4] = {{0.9, 0.8, -0.2, -0.3}, {0}, {-0.5, -0.6, -0.7, -0.8}, {0.9}};
    static const uint32_t n[4] = {4, 0, 4, 1}, merged[4] = {2, 2, 2, 3}, evicted[4] = {4, 4, 8, 9};
    static const double taus[4] = {0.3, 0.3, -0.365, 0.5205}; /* .7 of the mean and .3 of the one before */
    for (int fixed = 0; fixed < 2; fixed++) {
        rig *r = rig_small(1, 1, 1);
        kvf_policy_options o = rig_policy("d2o", NULL);
        o.sinks = 0;
        o.merge_keys = 0; /* the kept key stays where it points */
        if (fixed) o.gate = 0;
        rig_open_sized(r, 0, &o, 1, 0);
        rig_put2(r, 1, 0, 0, 100);
        for (int i = 0; i < 4; i++) {
            for (uint32_t k = 0; k < n[i]; k++) rig_put2(r, rounds[i][k], sqrt(1 - rounds[i][k] * rounds[i][k]), 0, 0);
            rig_event0(r, 1, i ? KVF_EVENT_DECODE : KVF_EVENT_PROMPT, 0);
            kvf_policy_counts c = counts_of(r->state, 0);
            double tau = kvf_policy_tau(r->state, 0, 0, 0);
            cr_assert_str_eq(rig_held(r, 0), "0");
            cr_assert(c.merged == merged[i] && c.merged + c.dropped == evicted[i], "round %d: %llu merged", i,
                      (unsigned long long)c.merged);
            if (fixed)
                cr_assert(isnan(tau), "a fixed gate keeps no threshold");
            else
                cr_assert_float_eq(tau, taus[i], 1e-6, "round %d: %.9g", i, tau);
        }
        rig_free(r);
    }
}

/* Those that this CPU has, the scalar ones in place of the others. */
static void kernels_of(const kvf__kernels *paths[3]) {
    for (int p = 0; p < 3; p++) paths[p] = &kvf__policy_kernels_scalar;
#if defined(__x86_64__)
    if (kvf__cpu_detect().avx2_fma_f16c) paths[1] = &kvf__policy_kernels_avx2;
    if (kvf__cpu_detect().avx512) paths[2] = &kvf__policy_kernels_avx512;
#endif
}

/* Rounding must not take a cosine above 1 (a gate of 1 would turn on it), nor a norm out of range to infinity. */
Test(policy_edges, cosines_stay_within_one) {
    const kvf__kernels *paths[3];
    kernels_of(paths);
    uint64_t seed = 3;
    for (int turn = 0; turn < 200; turn++)
        for (int p = 0; p < 3; p++) {
            float row[64], key[64], panels[3 * 64 * 8], panel[64 * 8], norm[8];
            double scale = turn % 4 ? 1 : turn % 8 ? 1e-30 : 1e30;
            for (int i = 0; i < 64; i++) {
                key[i] = (float)rig_normal(&seed);
                row[i] = (float)(key[i] * scale); /* the same direction */
            }
            const void *keys[8] = {key, key, key, key, key, key, key, key};
            const void *rows[8] = {row, row, row, row, row, row, row, row};
            kvf__tile tile = {.panels = panels, .n = 8, .pos = {0, 1, 2, 3, 4, 5, 6, 7}};
            for (int k = 2; k >= 0; k--) paths[p]->pack(KVF_F32, keys, 64, panels + k * 512, tile.rnorm);
            paths[p]->pack(KVF_F32, rows, 64, panel, norm);
            kvf__best best = {-2, UINT32_MAX, UINT32_MAX};
            paths[p]->nearest(&tile, panel, 0, 1, norm, 64, &best);
            cr_assert(scale == 1 ? best.u <= 1 && best.u > 0.999999f : best.u == 0, "%.9g at scale %g", best.u, scale);
        }
}

/* What one evicted row meets straight from the pages is what it would meet packed, bit for bit, in every form. */
Test(policy_edges, cosines_from_pages_are_those_of_panels) {
    static const kvf_dtype dtypes[] = {KVF_F16, KVF_BF16, KVF_F32};
    const kvf__kernels *paths[3];
    kernels_of(paths);
    enum { D = 64, ROWS = 16 };
    uint64_t seed = 11;
    for (int turn = 0; turn < 60; turn++)
        for (int p = 0; p < 3; p++) {
            const kvf__kernels *k = paths[p];
            kvf_dtype dtype = dtypes[turn % 3];
            static unsigned char pages[ROWS * D * 4];
            float row[D], panels[ROWS / 8][D * 8], norms[ROWS], x[D * 8], x_norms[8], u[ROWS];
            const void *at[ROWS];
            for (int r = 0; r < ROWS; r++) {
                at[r] = pages + (size_t)r * D * kvf_dtype_bytes(dtype);
                for (int i = 0; i < D; i++) row[i] = (float)(rig_normal(&seed) * (r == 5 ? 0 : 1));
                if (r == 7) row[3] = NAN;
                k->store(dtype, row, D, pages + (size_t)r * D * kvf_dtype_bytes(dtype));
            }
            for (int half = 0; half < ROWS / 8; half++)
                k->pack(dtype, at + 8 * half, D, panels[half], norms + 8 * half);
            k->pack(dtype, at + 8, D, x, x_norms);
            k->cosines(dtype, pages, pages, D, x + 2, x_norms[2], u); /* row 10 */
            for (int r = 0; r < ROWS; r++) {
                kvf__tile tile = {.panels = panels[r / 8], .rnorm = {norms[r]}, .n = 1};
                float one[3 * D * 8] = {0};
                for (int i = 0; i < D; i++) one[i * 8] = panels[r / 8][i * 8 + r % 8];
                tile.panels = one;
                kvf__best best = {-2, UINT32_MAX, UINT32_MAX};
                k->nearest(&tile, x, 2, 1, x_norms + 2, D, &best);
                cr_assert(memcmp(&best.u, &u[r], sizeof u[r]) == 0 || best.u == u[r], "row %d: %.9g and %.9g", r,
                          best.u, u[r]);
            }
            cr_assert(u[5] == 0 && u[7] == 0 && u[10] > 0.999999f);
        }
}

/* The fast form finds the same nearest key: it is within the slack, 0 for a zero row, NaN where the exact one must tell. */
Test(policy_edges, near_cosines_are_within_their_slack) {
    const kvf__kernels *paths[3];
    kernels_of(paths);
    enum { MOST = 256, ROWS = 16 };
    uint64_t seed = 12;
    for (int turn = 0; turn < 200; turn++)
        for (int p = 0; p < 3; p++) {
            const kvf__kernels *k = paths[p];
            const uint32_t dims[] = {8, 24, 64, 256}, d = dims[turn % 4];
            static uint16_t pages[ROWS * MOST];
            static float x[MOST * 8];
            float row[MOST], x_norms[8], exact[ROWS], near[ROWS];
            if (!k->near_cosines) continue;
            for (uint32_t r = 0; r < ROWS; r++) {
                for (uint32_t i = 0; i < d; i++) row[i] = (float)(rig_normal(&seed) * (r == 5 ? 0 : r == 6 ? 1e-4 : 1));
                if (r == 7) row[3] = NAN;
                if (r == 8) row[d - 1] = INFINITY;
                k->store(KVF_F16, row, d, pages + (size_t)r * d);
            }
            const void *at[8];
            for (int i = 0; i < 8; i++) at[i] = pages + (size_t)(turn % 5) * d;
            k->pack(KVF_F16, at, d, x, x_norms);
            for (uint32_t i = 0; i < d; i++) row[i] = x[i * 8];
            k->cosines(KVF_F16, pages, pages, d, x, x_norms[0], exact);
            const void *ahead[8] = {pages, pages, pages, pages, pages, pages, pages, pages};
            k->near_cosines(pages, ahead, d, row, x_norms[0], near);
            for (int r = 0; r < ROWS; r++) {
                if (r == 7 || r == 8)
                    cr_assert(isnan(near[r]), "row %d: %g", r, near[r]);
                else
                    cr_assert(fabsf(near[r] - exact[r]) <= kvf__cosine_slack(d), "row %d of %u: %.9g and %.9g", r, d,
                              near[r], exact[r]);
            }
            cr_assert(near[5] == 0 && near[turn % 5] > 0.9999f);
        }
}

/* An event that evicts one slot, in all forms: the same plan, among keys of which many are nearly the same. */
Test(policy_edges, one_victim_finds_the_same_key_on_every_path) {
    static const kvf_cpu_path paths[] = {KVF_CPU_SCALAR, KVF_CPU_AVX2, KVF_CPU_AVX512};
    for (uint32_t turn = 0; turn < 30; turn++) {
        kvf_plan_entry first = {0};
        for (int p = 0; p < 3; p++) {
            if (!kvf_cpu_has_path(paths[p])) continue;
            rig *r = rig_new((rig_config){.n_seqs = 1,
                                          .n_layers = 1,
                                          .n_kv = 1,
                                          .g = 1,
                                          .hpg = 1,
                                          .dtype = turn % 3 ? KVF_F16 : KVF_F32,
                                          .bs = turn % 4 < 2 ? 8 : 32,
                                          .d = 8,
                                          .cap = 128,
                                          .n_arrays = 1,
                                          .threads = 1,
                                          .mass = true});
            r->c.path = paths[p];
            kvf_policy_options o = rig_policy("d2o", NULL);
            o.sinks = turn % 3;
            rig_open_sized(r, 0, &o, 40, 5);
            uint64_t seed = 77 + turn;
            for (int i = 0; i < 46; i++) {
                double angle = turn % 2 ? rig_uniform(&seed) * 1e-3 : rig_normal(&seed);
                rig_put2(r, cos(angle), sin(angle), i, rig_uniform(&seed));
            }
            rig_event0(r, 45, KVF_EVENT_DECODE, 0);
            const kvf_plan_entry *e = r->plan->entries;
            cr_assert(e->target != UINT32_MAX && e->target != e->slot);
            if (paths[p] == KVF_CPU_SCALAR) first = *e;
            cr_assert(e->slot == first.slot && e->target == first.target && e->u == first.u,
                      "turn %u: slot %u to %u (%.9g), not %u to %u (%.9g)", turn, e->slot, e->target, e->u, first.slot,
                      first.target, first.u);
            rig_free(r);
        }
    }
}

/* D4: keys keep their rotation and the next position never follows from what is held. */
Test(policy_edges, d4_positions_outlive_eviction) {
    rig *r = rig_small(2, 1, 1);
    kvf_policy_options o = rig_policy("h2o", NULL);
    rig_open_sized(r, 0, &o, 7, 1);
    for (int i = 0; i < 10; i++) rig_put2(r, cos(i), sin(i), i, i == 3 || i == 4 ? 0 : 5 - 0.1 * (i == 5));
    rig_event0(r, 8, KVF_EVENT_PROMPT, 0);
    cr_assert_str_eq(rig_held(r, 0), "0 1 2 5 6 7 8 9");
    rig_set_slots(r, 0, 1, 8); /* the other layer evicts elsewhere: it has no say */
    kvf__policy_seq_get(r->state, 0)->sizes[0] = (kvf_layer_size){7, 6, 1, 8};
    rig_event0(r, 7, KVF_EVENT_PROMPT, 0);
    cr_assert_str_eq(rig_held(r, 0), "0 1 2 6 7 8 9");
    for (int round = 0; round < 3; round++) {
        uint32_t newest = r->next_pos[0] - 1, n = rig_slots(r, 0, 0), slot = 0;
        while (slot < n && rig_pos(r, 0, 0, 0, slot) != newest) slot++;
        cr_assert(slot < n);
        double q = r->next_pos[0]; /* the new query, rotated for its true position, against the newest key */
        cr_assert_float_eq(cos(q) * rig_k(r, 0, slot, 0) + sin(q) * rig_k(r, 0, slot, 1), 0.5403, 1e-4);
        rig_put2(r, cos(q), sin(q), q, 9);
        rig_set_slots(r, 0, 1, rig_slots(r, 0, 0));
        rig_event0(r, 7, KVF_EVENT_DECODE, 0);
    }
    cr_assert_eq(r->next_pos[0], 13);
    rig_free(r);
}

/* merge attention by hand: v, weight and score of the one kept token that evicted ones go to, and numbers that leave nothing
 * to divide by. */
Test(policy_edges, attention_is_taken_over) {
    static const struct {
        double evicted, kept, share;
    } cases[] = {{1, 4, 0.25}, {4, 4, 1}, {5, 4, 1}, {0, 4, 0}, {0, 0, 1}, {INFINITY, INFINITY, 1}};
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig *r = rig_small(1, 1, 1);
        kvf_policy_options o = rig_policy("d2o", NULL);
        o.merge = KVF_MERGE_ATTENTION;
        o.merge_keys = 0;
        o.gate = -1;
        o.sinks = 1;
        rig_open_sized(r, 0, &o, 2, 1);
        /* Seen by 4, 3, 2 and 1 queries: the sink, the kept one, the one that goes, the window. */
        rig_put2(r, 0, 1, 5, 0.5);
        rig_put2(r, 1, 0, 6, cases[i].kept * 3);
        rig_put2(r, 1, 0.01, 2, cases[i].evicted * 2);
        rig_put2(r, 0, -1, 7, 1);
        rig_event0(r, 3, KVF_EVENT_DECODE, 0);
        kvf__head x = rig_head(r, 0, 0, 0);
        uint32_t slot = 0;
        while (slot < 3 && rig_pos(r, 0, 0, 0, slot) != 1) slot++;
        cr_assert(slot < 3, "case %u: position 1 is not kept", i);
        double share = cases[i].share, weight = (double)r->pages.weight[kvf__slot_index(&x, slot)];
        cr_expect_float_eq(rig_v(r, 0, slot), (6 + share * 2) / (1 + share), 1e-5, "case %u", i);
        cr_expect_float_eq(weight, 1 + share, 1e-6, "case %u", i);
        double score = (double)*rig_score(r, 0, 0, 0, 0, slot), grown = cases[i].kept * 3 * (1 + share);
        cr_expect(score == grown || fabs(score - grown) < 1e-5, "case %u: %g, not %g", i, score, grown);
        rig_free(r);
    }
}

/* D10: equal values stay exactly what they are, joint folding has no order, the last slot can receive, and a shared
 * block is only read. */
Test(policy_edges, d10_weights_add_up) {
    static const kvf_merge merges[] = {KVF_MERGE_PAPER, KVF_MERGE_AVERAGE, KVF_MERGE_MASS, KVF_MERGE_ATTENTION};
    for (int m = 0; m < 4; m++) {
        rig *r = rig_small(1, 1, 1);
        kvf_policy_options o = rig_policy("d2o", NULL);
        o.merge = merges[m];
        o.gate = -1; /* everything merges */
        rig_open_sized(r, 0, &o, 6, 2);
        uint64_t seed = 4;
        for (int i = 0; i < 40; i++) rig_put2(r, rig_normal(&seed), rig_normal(&seed), 0.1, rig_uniform(&seed));
        rig_event0(r, 8, KVF_EVENT_PROMPT, 0);
        for (int round = 0; round < 50; round++) {
            rig_put2(r, rig_normal(&seed), rig_normal(&seed), 0.1, rig_uniform(&seed));
            rig_event0(r, 8, KVF_EVENT_DECODE, round % 2 ? ~0ull : 0);
        }
        double mass = 0;
        kvf__head x = rig_head(r, 0, 0, 0);
        for (uint32_t s = 0; s < 8; s++) {
            cr_assert_eq(rig_v(r, 0, s), 0.1f, "merge %d: %.9g", m, rig_v(r, 0, s));
            mass += r->pages.weight[kvf__slot_index(&x, s)];
            cr_assert_float_eq(r->pages.bias[kvf__slot_index(&x, s)], log(r->pages.weight[kvf__slot_index(&x, s)]),
                               1e-6);
        }
        if (merges[m] == KVF_MERGE_ATTENTION)
            cr_assert(mass > 8 && mass <= 0x1p103);
        else
            cr_assert_eq(mass, merges[m] == KVF_MERGE_MASS ? 90 : 8); /* tokens are neither lost nor counted twice */
        cr_assert(isnan(kvf_policy_tau(r->state, 0, 0, 0)));          /* a fixed gate keeps no threshold */
        cr_assert_eq(counts_of(r->state, 0).merged, 82);
        rig_free(r);
    }
    for (int order = 0; order < 2; order++)
        for (int fresh = 0; fresh < 2; fresh++) {
            rig *r = rig_small(1, 1, 1);
            kvf_policy_options o = rig_policy("d2o", NULL);
            o.merge = KVF_MERGE_AVERAGE;
            o.sinks = 0;
            rig_open_sized(r, 0, &o, 1, 1);
            rig_put2(r, 0, 1, 7, 9);
            rig_put2(r, 2, 0, order ? 9 : 3, 0);
            rig_put2(r, 3, 0, order ? 3 : 9, 0);
            rig_put2(r, 1, 0, 0, 0); /* the window, and the last slot */
            kvf__head old = rig_head(r, 0, 0, 0);
            uint32_t block = old.rows[0];
            rig_event0(r, 2, KVF_EVENT_PROMPT, (uint64_t)fresh);
            cr_assert_eq(rig_v(r, 0, 1), 4);
            cr_assert_eq(rig_k(r, 0, 1, 0), 2);
            cr_assert_eq(rig_v(r, 0, 0), 7);
            old.rows = &block;
            if (fresh) cr_assert_eq(rig_get(r, kvf__v_row(&old, 3), 0), 0, "a shared block was written");
            if (fresh) cr_assert_eq(r->pages.pos[kvf__slot_index(&old, 1)], 1);
            rig_free(r);
        }
}

/* Equal keys in slots that descend in position, over several tiles: the lowest position is nearest, not the first
 * slot. */
Test(policy_edges, ties_of_cosines_go_to_the_lowest_position) {
    for (int p = 0; p < 2; p++) {
        rig *r = rig_small(1, 1, 1);
        r->c.path = p ? KVF_CPU_SCALAR : KVF_CPU_AUTO;
        kvf_policy_options o = rig_policy("d2o", NULL);
        rig_open_sized(r, 0, &o, 60, 10);
        for (uint32_t i = 0; i < 80; i++) {
            float k[8] = {i % 2 ? 3.0f : 1.0f}, v[8] = {0};
            rig_put(r, 0, 0, 0, i, 79 - i, k, v);
            *rig_score(r, 0, 0, 0, 0, i) = i % 8 == 4 || i > 77 ? 0.0f : 1.0f;
        }
        r->next_pos[0] = 80;
        rig_set_slots(r, 0, 0, 80);
        rig_event0(r, 70, KVF_EVENT_PROMPT, 0);
        cr_assert_eq(r->plan->events[0].n_evict, 10);
        for (int i = 0; i < 10; i++) {
            cr_assert_eq(r->plan->entries[i].target, 79); /* position 0, a sink */
            cr_assert_eq(r->plan->entries[i].u, 1);
        }
        cr_assert(strncmp(rig_held(r, 0), "0 1 2 3 ", 8) == 0, "%s", rig_held(r, 0));
        rig_free(r);
    }
}

/* More evicted than one chunk holds, kept keys in many tiles, d 128 in fp16: against a search in double. */
Test(policy_edges, large_events_find_the_nearest_key) {
    for (int p = 0; p < 2; p++) {
        rig *r = rig_new((rig_config){.n_seqs = 1,
                                      .n_layers = 1,
                                      .n_kv = 1,
                                      .g = 1,
                                      .hpg = 1,
                                      .bs = 16,
                                      .d = 128,
                                      .cap = 800,
                                      .n_arrays = 1,
                                      .threads = 1,
                                      .dtype = KVF_F16,
                                      .path = p ? KVF_CPU_SCALAR : KVF_CPU_AUTO});
        kvf_policy_options o = rig_policy("d2o", NULL);
        rig_open_sized(r, 0, &o, 80, 21);
        uint64_t seed = 8;
        for (uint32_t i = 0; i < 800; i++) {
            float k[128];
            for (int e = 0; e < 128; e++) k[e] = (float)rig_normal(&seed);
            rig_put(r, 0, 0, 0, i, i, k, k);
            *rig_score(r, 0, 0, 0, 0, i) = (float)rig_uniform(&seed);
        }
        r->next_pos[0] = 800;
        rig_set_slots(r, 0, 0, 800);
        kvf_event e = {0, 0, 101, KVF_EVENT_PROMPT, 0, 0};
        kvf_policy_batch b = rig_batch(r);
        b.events = &e;
        b.n_events = 1;
        OK(o.ops->match(r->state, NULL, &b, r->plan, err));
        bool gone[800] = {false};
        kvf__head x = rig_head(r, 0, 0, 0);
        cr_assert_eq(r->plan->n_entries, 699);
        for (int i = 0; i < 699; i++) gone[r->plan->entries[i].slot] = true;
        for (int i = 0; i < 699; i++) {
            const kvf_plan_entry *t = &r->plan->entries[i];
            double best = -2, theirs = -2;
            for (uint32_t s = 0; s < 800; s++) {
                double dot = 0;
                if (gone[s]) continue;
                for (uint32_t k = 0; k < 128; k++)
                    dot += (double)rig_get(r, kvf__k_row(&x, t->slot), k) * rig_get(r, kvf__k_row(&x, s), k);
                double u =
                    dot / r->pages.key_norm[kvf__slot_index(&x, t->slot)] / r->pages.key_norm[kvf__slot_index(&x, s)];
                best = fmax(best, u);
                if (s == t->target) theirs = u;
            }
            cr_assert(fabs(theirs - best) < 1e-6 && fabs(t->u - best) < 1e-6, "entry %d: %.8f, %.8f", i, theirs, best);
        }
        rig_free(r);
    }
}
