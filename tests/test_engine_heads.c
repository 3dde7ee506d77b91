/* head_budget adaptive through the engine: tables of different sizes in a layer, and the same bits whatever the threads, chunks,
 * cached prompts, forks and preemptions. */
#define _DEFAULT_SOURCE
#include "tests/engine_forks_rig.h"

#include "engine/internal.h"

TestSuite(engine_heads, .init = open_model, .fini = close_model);

enum { N_JOBS = 5 };

static const char *const adaptive[] = {
    "d2o rho=0.4 min_tokens=16 evict_every=3 head_budget=adaptive",
    "h2o rho=0.5 min_tokens=16 evict_every=1 head_budget=adaptive head_floor=0",
    "d2o rho=0.4 min_tokens=16 budget_unit=block head_budget=adaptive",
    "snapkv rho=0.4 min_tokens=16 window=8 head_budget=adaptive",
    "h2o budget_tokens=64 head_budget=adaptive nm=3:1",
    "d2o rho=0.4 min_tokens=16 defer_first_decode=1 head_budget=adaptive",
};
enum { N_ADAPTIVE = sizeof adaptive / sizeof *adaptive };

typedef struct outcome {
    struct job jobs[N_JOBS];
    kvf_engine_stats stats;
    uint32_t n_unequal, n_sized; /* layers seen with groups of different sizes; with sizes */
} outcome;

/* No table above what its group is counted with; the groups of a layer have its total. */
static void look_at(const kvf_engine *e, outcome *out) {
    for (const kvf__live *r = e->first; r; r = r->next) {
        uint32_t index, in_layer = 0, n_groups = e->n_groups;
        if (!r->seq || kvf_seq_index(e->manager, r->seq, &index)) continue;
        const kvf_layer_size *sizes = kvf_policy_sizes(e->policies, index),
                             *groups = kvf_policy_group_sizes(e->policies, index);
        for (uint32_t t = 0; groups && t < e->n_tables; t++) {
            uint32_t n_slots, l = t / n_groups;
            in_layer = t % n_groups ? in_layer + groups[t].keep : groups[t].keep;
            if (kvf_seq_table(e->manager, r->seq, l, t % n_groups, &n_slots, NULL, NULL)) continue; /* on the host */
            cr_assert(n_slots <= groups[t].reserve, "table %u: %u slots, %u are counted", t, n_slots,
                      groups[t].reserve);
            if (t % n_groups + 1 < n_groups) continue;
            cr_assert_eq(in_layer, sizes[l].keep * n_groups, "layer %u: %u slots", l, in_layer);
            out->n_unequal += groups[t].keep != sizes[l].keep;
            out->n_sized++;
        }
    }
}

/* change: tokens of an answer at which the first request's budget becomes that many slots a layer; 0: never. */
static void run_changed(const kvf_engine_config *c, const char *policy, uint32_t change, uint32_t budget,
                        outcome *out) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine *e = create(c);
    kvf_error err = {.text = ""};
    int more = 1;
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < N_JOBS; i++) {
        kvf_generate g =
            request_of(prompt, 60 + 17 * (i % 4), 11 + i % 4, 50 + 8 * i); /* the last has the first's prompt */
        g.n = i == 3 ? 3 : 1;
        submit(e, &out->jobs[i], g, policy);
    }
    for (uint32_t steps = 0; more; steps++) {
        cr_assert_lt(steps, 3000, "no end");
        cr_assert_eq(kvf_engine_step(e, &more, &err), KVF_OK, "%s", err.text);
        cr_assert_eq(kvf_audit(e->manager, &err), KVF_OK, "%s", err.text);
        look_at(e, out);
        struct job *first = &out->jobs[0];
        if (!change || first->answers[0].n_seen < change) continue;
        cr_assert_eq(kvf_engine_set_budget(e, first->id, 1, budget, &err), KVF_OK, "%s", err.text);
        change = 0;
    }
    out->stats.struct_size = sizeof out->stats;
    cr_assert_eq(kvf_engine_get_stats(e, &out->stats), KVF_OK);
    cr_assert_eq(out->stats.occupancy.blocks.n_promised, 0);
    kvf_engine_destroy(e);
}

static void run_all(const kvf_engine_config *c, const char *policy, outcome *out) { run_changed(c, policy, 0, 0, out); }

static void expect_equal(const outcome *a, const outcome *b, const char *policy, const char *what) {
    for (uint32_t j = 0; j < N_JOBS; j++) {
        cr_assert_eq(a->jobs[j].n_ended, b->jobs[j].n_ended);
        for (uint32_t i = 0; i < a->jobs[j].n_ended; i++) {
            const struct answer *x = &a->jobs[j].answers[i], *y = &b->jobs[j].answers[i];
            cr_assert_eq(x->n_tokens, y->n_tokens, "%s, %s, %u.%u", policy, what, j, i);
            cr_assert(!memcmp(x->tokens, y->tokens, x->n_tokens * sizeof *x->tokens), "%s, %s, %u.%u", policy, what, j,
                      i);
            cr_assert(!memcmp(x->logprobs, y->logprobs, x->n_tokens * sizeof *x->logprobs), "%s, %s, %u.%u: a bit",
                      policy, what, j, i);
            cr_assert(x->held == y->held && x->merged == y->merged, "%s, %s, %u.%u: held or merged", policy, what, j,
                      i);
        }
    }
}

static kvf_engine_config config_heads(uint32_t n_blocks) {
    kvf_engine_config c = config_of(n_blocks);
    c.heads_per_group = 1;
    c.deterministic = 1;
    return c;
}

Test(engine_heads, tables_differ_and_nothing_else_matters) {
    outcome *base = malloc(sizeof *base), *other = malloc(sizeof *other);
    uint64_t n_preempted = 0;
    for (uint32_t p = 0; p < N_ADAPTIVE; p++) {
        kvf_engine_config c = config_heads(3000);
        run_all(&c, adaptive[p], base);
        cr_assert(base->n_sized > 100 && base->n_unequal > base->n_sized / 10, "%s: %u of %u", adaptive[p],
                  base->n_unequal, base->n_sized);
        c.n_threads = 3;
        c.chunk = 24;
        run_all(&c, adaptive[p], other);
        expect_equal(base, other, adaptive[p], "threads, chunk");
        c.prefix_cache = 1;
        run_all(&c, adaptive[p], other);
        expect_equal(base, other, adaptive[p], "prefix cache");
        for (uint32_t preempt = KVF_PREEMPT_AUTO; preempt <= KVF_PREEMPT_SWAP; preempt++) {
            c = config_heads(140);
            c.preempt = preempt;
            c.host_bytes = config_of(600).kv_bytes;
            run_all(&c, adaptive[p], other);
            expect_equal(base, other, adaptive[p], "preempted");
            n_preempted += other->stats.n_preempted;
        }
    }
    cr_assert_gt(n_preempted, 10);
    free(base);
    free(other);
}

Test(engine_heads, a_changed_budget_is_shared_out_anew) {
    outcome *base = malloc(sizeof *base), *other = malloc(sizeof *other), *never = malloc(sizeof *never);
    for (uint32_t p = 0; p < 3; p++)
        for (uint32_t budget = 20; budget <= 50; budget += 30) { /* tighter and looser */
            kvf_engine_config c = config_heads(3000);
            run_all(&c, adaptive[p], never);
            run_changed(&c, adaptive[p], 20, budget, base);
            c.n_threads = 1;
            c.chunk = 16;
            run_changed(&c, adaptive[p], 20, budget, other);
            expect_equal(base, other, adaptive[p], "changed");
            if (p == 2 && budget == 20) continue; /* as many blocks as before */
            cr_assert_neq(base->jobs[0].answers[0].held, never->jobs[0].answers[0].held);
        }
    free(base);
    free(other);
    free(never);
}

Test(engine_heads, a_group_of_all_heads_is_equal) {
    outcome *a = malloc(sizeof *a), *b = malloc(sizeof *b);
    kvf_engine_config c = config_heads(3000);
    c.heads_per_group = 0;
    run_all(&c, "d2o rho=0.4 min_tokens=16 head_budget=adaptive", a);
    run_all(&c, "d2o rho=0.4 min_tokens=16", b);
    expect_equal(a, b, "d2o", "one group");
    cr_assert_eq(a->n_sized, 0);
    free(a);
    free(b);
}
