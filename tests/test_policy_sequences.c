/* Sequences and ranks: ids that are used again, interleaving, forks, tensor parallel halves; the smallest sequence;
 * calls that must be refused. */
#include "test_policy_rig.h"
#include "tests/counts.h"

/* ---- Sequences ---------------------------------------------------------------------------------------------- */

/* A prompt of n tokens and some steps in one row; with d2o's events. Everything follows from seed. */
static void drive(rig *r, uint32_t row, uint32_t n_prompt, uint32_t n_steps, uint64_t seed, bool whole_prompt) {
    kvf_event events[8];
    uint32_t hq = r->c.n_kv * r->c.g, seq = r->seq_index[row];
    const kvf_policy_ops *ops = kvf_policy_get_options(r->state, seq)->ops;
    for (uint32_t i = 0; i < n_prompt + n_steps; i++) {
        if (i >= n_prompt) {
            uint32_t n = rig_due(r, row, KVF_BEFORE_APPEND, KVF_EVENT_PROMPT, false, events);
            if (n) rig_events(r, events, n, 0);
        }
        for (uint32_t l = 0; l < r->c.n_layers; l++) {
            float k[8], v[8];
            uint32_t s = rig_slots(r, row, l);
            for (uint32_t h = 0; h < r->c.n_kv; h++) {
                for (int e = 0; e < 8; e++) k[e] = (float)rig_normal(&seed), v[e] = (float)rig_normal(&seed);
                rig_put(r, row, l, h, s, r->next_pos[row], k, v);
            }
            rig_set_slots(r, row, l, s + 1);
        }
        r->next_pos[row]++;
        if (i + 1 == n_prompt && whole_prompt) {
            float sums[8 * 128];
            double variance[8] = {0};
            for (int q = 0; q < 8 * 128; q++) sums[q] = (float)rig_uniform(&seed);
            r->prompt_sums[row] = sums;
            r->prompt_stride = 128;
            kvf_policy_batch b = rig_batch(r);
            OK(ops->metric(r->state, NULL, &b, row, n_prompt, variance, err));
            OK(ops->budget(r->state, seq, variance, n_prompt, err));
            rig_events(r, events, rig_due(r, row, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, true, events), 0);
            r->prompt_sums[row] = NULL;
        }
        if (i < n_prompt) continue;
        for (uint32_t l = 0; l < r->c.n_layers; l++) {
            float mass_row[4 * 2 * 128];
            uint8_t wanted[4] = {0};
            for (uint32_t k = 0; k < r->c.n_kv * 128; k++)
                mass_row[row * r->c.n_kv * 128 + k] = (float)rig_uniform(&seed);
            wanted[row] = 1;
            kvf_mass mass = {.struct_size = sizeof mass, .row = mass_row, .row_stride = 128, .row_wanted = wanted};
            kvf_policy_batch b = rig_batch(r);
            b.layer = l;
            b.row_end = r->c.n_seqs;
            b.mass = &mass;
            OK(ops->observe(r->state, NULL, &b, err));
        }
        uint32_t n = rig_due(r, row, KVF_AFTER_STEP, KVF_EVENT_DECODE, false, events);
        if (n) rig_events(r, events, n, 0);
    }
    cr_assert(hq <= 8);
}

static rig *seq_rig(uint32_t n_seqs) {
    return rig_new((rig_config){.n_seqs = n_seqs,
                                .n_layers = 2,
                                .n_kv = 2,
                                .g = 2,
                                .hpg = 2,
                                .bs = 8,
                                .d = 8,
                                .cap = 128,
                                .n_arrays = 1,
                                .threads = 1});
}

static void same(const rig *a, uint32_t row_a, const rig *b, uint32_t row_b, const char *what) {
    size_t n, m;
    unsigned char *x = rig_dump(a, row_a, &n), *y = rig_dump(b, row_b, &m);
    cr_assert(n == m && memcmp(x, y, n) == 0, "%s", what);
    kvf_policy_counts p = counts_of(a->state, a->seq_index[row_a]);
    kvf_policy_counts q = counts_of(b->state, b->seq_index[row_b]);
    cr_assert(memcmp(&p, &q, sizeof p) == 0, "%s: counters", what);
    free(x);
    free(y);
}

/* D6: nothing of an earlier user of an id is left; sequences do not touch each other; a fork copies. */
Test(policy_edges, d6_ids_are_reused_interleaved_and_forked) {
    kvf_policy_options o = rig_policy("d2o", NULL);
    o.budget_tokens = 24;
    rig *used = seq_rig(4), *fresh = seq_rig(4);
    OK(kvf_policy_open(used->state, 0, &o, err));
    drive(used, 0, 60, 40, 11, true);
    cr_assert(counts_of(used->state, 0).n_events > 40);
    kvf_policy_close(used->state, 0);
    cr_assert(isnan(kvf_policy_tau(used->state, 0, 0, 0)) && counts_of(used->state, 0).n_events == 0);
    cr_assert(kvf_policy_sizes(used->state, 0) == NULL && kvf_policy_get_options(used->state, 0) == NULL);
    rig_set_slots(used, 0, 0, 0);
    rig_set_slots(used, 0, 1, 0);
    used->next_pos[0] = 0;
    OK(kvf_policy_open(used->state, 0, &o, err));
    OK(kvf_policy_open(fresh->state, 0, &o, err));
    cr_assert(isnan(kvf_policy_tau(used->state, 0, 0, 0)) && kvf_policy_density(used->state, 0) == NULL);
    drive(used, 0, 6, 94, 12, true); /* fits, and overflows later */
    drive(fresh, 0, 6, 94, 12, true);
    same(used, 0, fresh, 0, "a re-used id");
    for (uint32_t row = 1; row < 3; row++) { /* two more, in turns, beside the first */
        OK(kvf_policy_open(used->state, row, &o, err));
        OK(kvf_policy_open(fresh->state, row, &o, err));
    }
    drive(used, 1, 50, 0, 20, true);
    drive(used, 2, 40, 0, 21, true);
    for (int i = 0; i < 20; i++) {
        drive(used, 1, 0, 1, 100 + i, false);
        drive(used, 2, 0, 1, 200 + i, false);
    }
    drive(fresh, 2, 40, 0, 21, true);
    for (int i = 0; i < 20; i++) drive(fresh, 2, 0, 1, 200 + i, false);
    drive(fresh, 1, 50, 0, 20, true);
    for (int i = 0; i < 20; i++) drive(fresh, 1, 0, 1, 100 + i, false);
    for (uint32_t row = 0; row < 3; row++) same(used, row, fresh, row, "interleaved");
    /* A fork of row 1 into row 3: state, blocks and score pages; both go on by themselves. */
    OK(kvf_policy_fork(used->state, 1, 3));
    for (uint32_t l = 0; l < 2; l++) /* where the scores of the pages end */
        cr_assert_eq(kvf__policy_seq_get(used->state, 3)->scored[l * used->c.n_kv], rig_slots(used, 1, l));
    for (uint32_t l = 0; l < 2; l++) {
        uint32_t n = rig_slots(used, 1, l);
        rig_set_slots(used, 3, l, n);
        for (uint32_t h = 0; h < 2; h++) {
            kvf__head a = rig_head(used, 1, l, h), b = rig_head(used, 3, l, h);
            for (uint32_t s = 0; s < n; s++) {
                rig_put(used, 3, l, h, s, rig_pos(used, 1, l, h, s), kvf__k_row(&a, s), kvf__v_row(&a, s));
                used->pages.key_norm[kvf__slot_index(&b, s)] = used->pages.key_norm[kvf__slot_index(&a, s)];
                *rig_score(used, 3, l, h, 0, s) = *rig_score(used, 1, l, h, 0, s);
            }
        }
    }
    used->next_pos[3] = used->next_pos[1];
    for (int i = 0; i < 15; i++) {
        drive(used, 1, 0, 1, 300 + i, false);
        drive(used, 3, 0, 1, 400 + i, false);
        drive(fresh, 1, 0, 1, 400 + i, false);
    }
    same(used, 3, fresh, 1, "a fork");
    cr_assert_neq(kvf_policy_tau(used->state, 1, 0, 0), kvf_policy_tau(used->state, 3, 0, 0));
    cr_assert_eq(kvf_policy_fork(used->state, 1, 1), KVF_E_INVALID);
    cr_assert_eq(kvf_policy_fork(used->state, 1, 8), KVF_E_INVALID);
    cr_assert_eq(kvf_policy_fork(used->state, 7, 1), KVF_E_STALE);
    rig_free(used);
    rig_free(fresh);
}

/* Tensor parallel: two ranks of two KV heads, with the variances and the plan's sums added up between them, do what one
 * rank of four does. */
Test(policy_edges, ranks_agree_through_the_two_reductions) {
    kvf_policy_options o = rig_policy("d2o", NULL);
    o.scope = KVF_SCOPE_LAYER;
    o.budget_tokens = 20;
    rig *r[3]; /* 0: one rank; 1, 2: halves */
    double variance[3][2 * 8], sum[2 * 8];
    float sums[2][8][64], local[3][2 * 8 * 64];
    uint64_t seed = 6;
    for (int i = 0; i < 2 * 8 * 64; i++) sums[i / 512][i / 64 % 8][i % 64] = (float)exp(rig_normal(&seed));
    kvf_event events[3][2];
    for (int i = 0; i < 3; i++) {
        uint32_t n_kv = i ? 2 : 4, first = i == 2 ? 2 : 0;
        r[i] = rig_new((rig_config){.n_seqs = 1,
                                    .n_layers = 2,
                                    .n_kv = n_kv,
                                    .g = 2,
                                    .hpg = n_kv,
                                    .bs = 8,
                                    .d = 8,
                                    .cap = 64,
                                    .n_arrays = 1,
                                    .threads = 1});
        kvf_policy_state_config c = r[i]->state->config;
        kvf_policy_state_destroy(r[i]->state);
        c.allocator = (kvf_allocator){0};
        c.n_q_heads_total = 8;
        c.q_head_begin = 2 * first;
        OK(kvf_policy_state_create(&c, &r[i]->state, err));
        OK(kvf_policy_open(r[i]->state, 0, &o, err));
        for (uint32_t l = 0; l < 2; l++) {
            for (uint32_t h = 0; h < n_kv; h++)
                for (uint32_t s = 0; s < 60; s++) {
                    float k[8], v[8];
                    uint64_t own = s * 1000 + (first + h) * 10 + l;
                    for (int e = 0; e < 8; e++) k[e] = (float)rig_normal(&own), v[e] = (float)rig_normal(&own);
                    rig_put(r[i], 0, l, h, s, s, k, v);
                }
            rig_set_slots(r[i], 0, l, 60);
            memcpy(local[i] + l * 2 * n_kv * 64, sums[l][2 * first], 2 * n_kv * 64 * sizeof(float));
        }
        r[i]->next_pos[0] = 60;
        r[i]->prompt_sums[0] = local[i];
        r[i]->prompt_stride = 64;
        kvf_policy_batch b = rig_batch(r[i]);
        OK(o.ops->metric(r[i]->state, NULL, &b, 0, 60, variance[i], err));
    }
    for (int k = 0; k < 16; k++) sum[k] = variance[1][k] + variance[2][k];
    cr_assert(memcmp(sum, variance[0], sizeof sum) == 0);
    kvf_policy_batch b[3];
    for (int i = 0; i < 3; i++) {
        OK(o.ops->budget(r[i]->state, 0, sum, 60, err));
        cr_assert_eq(rig_due(r[i], 0, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, false, events[i]), 2);
        cr_assert(memcmp(events[i], events[0], sizeof events[i]) == 0);
        b[i] = rig_batch(r[i]);
        b[i].events = events[i];
        b[i].n_events = 2;
        OK(o.ops->match(r[i]->state, NULL, &b[i], r[i]->plan, err));
    }
    cr_assert_eq(r[1]->plan->n_reduce, r[0]->plan->n_reduce);
    for (uint64_t k = 0; k < r[1]->plan->n_reduce; k++) {
        double both = r[1]->plan->reduce[k] + r[2]->plan->reduce[k];
        cr_assert_float_eq(both, r[0]->plan->reduce[k], 1e-12);
        r[1]->plan->reduce[k] = r[2]->plan->reduce[k] = r[0]->plan->reduce[k] = both;
    }
    for (int i = 0; i < 3; i++) {
        OK(o.ops->gate(r[i]->state, NULL, &b[i], r[i]->plan, err));
        OK(o.ops->apply(r[i]->state, NULL, &b[i], r[i]->plan, err));
    }
    for (uint32_t l = 0; l < 2; l++)
        for (uint32_t h = 0; h < 4; h++) {
            const rig *half = r[1 + h / 2];
            kvf__head x = rig_head(r[0], 0, l, h), y = rig_head(half, 0, l, h % 2);
            cr_assert_eq(kvf_policy_tau(r[0]->state, 0, l, h), kvf_policy_tau(half->state, 0, l, h % 2));
            for (uint32_t s = 0; s < events[0][l].n_keep; s++) {
                cr_assert_eq(r[0]->pages.pos[kvf__slot_index(&x, s)], half->pages.pos[kvf__slot_index(&y, s)]);
                cr_assert(memcmp(kvf__k_row(&x, s), kvf__k_row(&y, s), 32) == 0);
                cr_assert(memcmp(kvf__v_row(&x, s), kvf__v_row(&y, s), 32) == 0);
            }
        }
    for (int i = 0; i < 3; i++) rig_free(r[i]);
}

/* ---- The ends of the ranges, and what is refused ------------------------------------------------------------ */

Test(policy_edges, one_token_one_head_one_layer) {
    rig *r = rig_small(1, 1, 1);
    kvf_policy_options o = rig_policy("d2o", NULL);
    o.min_tokens = 0;
    o.rho = 0.01;
    OK(kvf_policy_open(r->state, 0, &o, err));
    rig_put2(r, 1, 2, 3, NAN);
    float sums[1] = {1};
    double variance = 5;
    r->prompt_sums[0] = sums;
    r->prompt_stride = 1;
    kvf_policy_batch b = rig_batch(r);
    OK(o.ops->metric(r->state, NULL, &b, 0, 1, &variance, err));
    cr_assert_eq(variance, 0);
    OK(o.ops->budget(r->state, 0, &variance, 1, err));
    kvf_event e;
    cr_assert_eq(rig_due(r, 0, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, true, &e), 1);
    rig_events(r, &e, 1, 0); /* nothing is evicted: the score moves into its page, tau stays unset */
    cr_assert(*rig_score(r, 0, 0, 0, 0, 0) == 1 && isnan(kvf_policy_tau(r->state, 0, 0, 0)));
    r->prompt_sums[0] = NULL;
    cr_assert_eq(rig_due(r, 0, KVF_BEFORE_APPEND, KVF_EVENT_PROMPT, false, &e), 0); /* sized now; one slot is S */
    cr_assert_eq(kvf_policy_sizes(r->state, 0)[0].keep, 1);
    rig_put2(r, 2, 4, 5, 0.5);
    cr_assert_eq(rig_due(r, 0, KVF_AFTER_STEP, KVF_EVENT_DECODE, false, &e), 1);
    rig_events(r, &e, 1, 0);
    cr_assert_str_eq(rig_held(r, 0), "1");
    cr_assert_float_eq(rig_v(r, 0, 0), 4, 1e-5); /* parallel keys: half and half */
    rig_free(r);
}

Test(policy_edges, wrong_calls_are_refused_and_change_nothing) {
    rig *r = rig_small(2, 2, 1);
    kvf_policy_options o = rig_policy("d2o", NULL);
    const kvf_policy_ops *ops = o.ops;
    rig_open_sized(r, 0, &o, 6, 2);
    uint64_t seed = 1;
    for (int i = 0; i < 20; i++) rig_put2(r, rig_normal(&seed), rig_normal(&seed), i, rig_uniform(&seed));
    size_t n_before, n_after;
    unsigned char *before = rig_dump(r, 0, &n_before);
    kvf_event e = {0, 1, 8, KVF_EVENT_PROMPT, 0, 0};
    kvf_policy_batch good = rig_batch(r), b;
    good.events = &e;
    good.n_events = 1;
#define BAD(change, undo, status, word)                                    \
    do {                                                                   \
        b = good;                                                          \
        change;                                                            \
        FAILS(ops->match(r->state, NULL, &b, r->plan, err), status, word); \
        undo;                                                              \
    } while (0)
    BAD(e.n_keep = 0, e.n_keep = 8, KVF_E_INVALID, "n_keep 0: must be in [1, 20]");
    BAD(e.n_keep = 21, e.n_keep = 8, KVF_E_INVALID, "n_keep 21");
    BAD(e.row = 1, e.row = 0, KVF_E_INVALID, "row 1");
    BAD(e.layer = 2, e.layer = 1, KVF_E_INVALID, "layer 2");
    BAD(e.kind = 2, e.kind = 0, KVF_E_INVALID, "kind 2");
    BAD(r->seq_index[0] = 3, r->seq_index[0] = 0, KVF_E_STALE, "seq 3 is not open");
    BAD(r->next_pos[0] = 1u << 31, r->next_pos[0] = 20, KVF_E_INVALID, "next_pos 2147483648");
    BAD(b.workspace_bytes = 100, (void)0, KVF_E_INVALID, "workspace_bytes 100: must be at least");
    BAD(b.workspace = (char *)b.workspace + 4, (void)0, KVF_E_INVALID, "64-byte aligned");
    BAD(b.scores = NULL, (void)0, KVF_E_INVALID, "score pages");
    BAD(b.pages = NULL, (void)0, KVF_E_INVALID, "pages");
    BAD(b.view = NULL, (void)0, KVF_E_INVALID, "view");
    BAD(b.events = NULL, (void)0, KVF_E_INVALID, "events is NULL");
    BAD(b.path = (kvf_cpu_path)9, (void)0, KVF_E_UNSUPPORTED, "path 9");
    BAD(r->pages.head_dim = 16, r->pages.head_dim = 8, KVF_E_INVALID, "head_dim 16");
    BAD(r->pages.n_blocks = 1, r->pages.n_blocks = r->n_blocks, KVF_E_INVALID, "the pages have 1");
    BAD(r->view.n_layers = 3, r->view.n_layers = 2, KVF_E_INVALID, "view of 3 layers");
    BAD(r->scores.n_pages = 0, r->scores.n_pages = r->n_tables * r->per_table, KVF_E_STATE, "take them first");
    BAD(r->plan->entry_capacity = 23, r->plan->entry_capacity = 99999, KVF_E_LIMIT, "24 entries");
    BAD(r->plan->n_kv_heads = 1, r->plan->n_kv_heads = 2, KVF_E_INVALID, "plan for 1 KV heads");
    BAD(kvf__policy_seq_get(r->state, 0)->sized = false, kvf__policy_seq_get(r->state, 0)->sized = true, KVF_E_STATE,
        "sizes of seq 0 are not known");
    float *sums[1] = {(float[1]){0}};
    BAD((b.prompt_sums = sums, b.prompt_stride = 19), (void)0, KVF_E_INVALID, "prompt_stride 19: must be at least");
    b = good;
    r->plan->n_events = 0;
    FAILS(ops->gate(r->state, NULL, &b, r->plan, err), KVF_E_STATE, "match this batch first");
    OK(ops->match(r->state, NULL, &b, r->plan, err));
    FAILS(ops->apply(r->state, NULL, &b, r->plan, err), KVF_E_STATE, "gate the plan first");
    OK(ops->gate(r->state, NULL, &b, r->plan, err));
    e.n_keep = 9;
    FAILS(ops->apply(r->state, NULL, &b, r->plan, err), KVF_E_STATE, "event 0 is not the one");
    e.n_keep = 8;
    kvf_compact_item item = {1, 0, 8, NULL};
    const uint32_t *dst[1] = {NULL};
    kvf_compaction compaction = {&item, 1, 1, dst};
    b.compaction = &compaction;
    FAILS(ops->apply(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "item 0 of the compaction");
    item = (kvf_compact_item){1, 1, 9, NULL};
    FAILS(ops->apply(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "item 0 of the compaction");
    item.n_keep = 8;
    dst[0] = (uint32_t[]){r->n_blocks};
    FAILS(ops->apply(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "the pages have");
    b = good;
    o.merge = KVF_MERGE_MASS;
    rig_open_sized(r, 0, &o, 6, 2);
    OK(ops->match(r->state, NULL, &b, r->plan, err));
    OK(ops->gate(r->state, NULL, &b, r->plan, err));
    float *weight = r->pages.weight;
    r->pages.weight = NULL;
    FAILS(ops->apply(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "pages.weight and pages.bias");
    r->pages.weight = weight;
    kvf_mass mass = {.struct_size = sizeof mass, .row = (float[40]){0}, .row_stride = 19};
    b.layer = 0;
    b.row_end = 1;
    FAILS(ops->observe(r->state, NULL, &b, err), KVF_E_INVALID, "mass with row");
    b.mass = &mass;
    FAILS(ops->observe(r->state, NULL, &b, err), KVF_E_INVALID, "row_stride 19");
    b.row_end = 2;
    FAILS(ops->observe(r->state, NULL, &b, err), KVF_E_INVALID, "rows [0, 2)");
    FAILS(ops->metric(r->state, NULL, &b, 0, 20, (double[4]){0}, err), KVF_E_INVALID, "prompt_sums must be set");
    FAILS(ops->budget(r->state, 0, NULL, 0, err), KVF_E_INVALID, "n_tokens 0");
    OK(kvf_policy_open(r->state, 0, &o, err));
    FAILS(ops->budget(r->state, 0, NULL, 20, err), KVF_E_INVALID, "variance: is NULL");
    FAILS(kvf_policy_open(r->state, 9, &o, err), KVF_E_INVALID, "seq 9");
    o.rho = 2;
    FAILS(kvf_policy_open(r->state, 0, &o, err), KVF_E_INVALID, "rho 2");
    unsigned char *after = rig_dump(r, 0, &n_after);
    cr_assert(n_before == n_after && memcmp(before, after, n_before) == 0);
    free(before);
    free(after);
    rig_free(r);
}
