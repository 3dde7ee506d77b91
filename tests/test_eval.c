/* kvfold eval against plain computation: scores of logits, equal memory, and batches against runs of their own. */
#define _GNU_SOURCE
#include "eval/eval.h"
#include "tests/engine_model.h"

enum { STEPS = 24, PROMPT = 120 };

/* ---- Scores ---------------------------------------------------------------------------------------------- */

static long double naive_log_sum(const float *x, uint32_t n) {
    long double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        if (x[i] > max) max = x[i];
    for (uint32_t i = 0; i < n; i++) sum += expl(x[i] - max);
    return max + logl(sum);
}

static long double naive_kl(const float *full, const float *other, uint32_t n) {
    long double a = naive_log_sum(full, n), b = naive_log_sum(other, n), kl = 0;
    for (uint32_t i = 0; i < n; i++) kl += expl(full[i] - a) * ((full[i] - a) - (other[i] - b));
    return kl;
}

static uint32_t naive_best(const float *x, uint32_t n) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

static void fill(float *x, uint32_t n, uint64_t *rng) {
    for (uint32_t i = 0; i < n; i++) x[i] = 4 * gw_normal(rng);
}

static void expect_close(double got, long double wanted, const char *what) {
    cr_assert(fabsl(got - wanted) <= 1e-10L * (1 + fabsl(wanted)), "%s: %.17g, not %.17Lg", what, got, wanted);
}

Test(eval, scores_are_those_of_a_plain_computation) {
    enum { VOCAB = 1000, SAMPLES = 3 };
    static float logits[SAMPLES][STEPS][VOCAB];
    uint32_t truth[STEPS];
    uint64_t rng = 5;
    fill(&logits[0][0][0], SAMPLES * STEPS * VOCAB, &rng);
    for (uint32_t t = 0; t < STEPS; t++)
        truth[t] = t % 3 ? (uint32_t)(gw_random(&rng) % VOCAB) : naive_best(logits[1][t], VOCAB);
    memcpy(logits[2][3], logits[0][3], sizeof logits[2][3]);
    for (int order = 0; order < 3; order++) { /* the full cache first, last, and a step behind */
        kvf__eval_scorer s;
        cr_assert(kvf__eval_scorer_begin(&s, VOCAB, SAMPLES, truth, STEPS, true));
        for (uint32_t t = 0; t < STEPS + 1; t++)
            for (uint32_t k = 0; k < SAMPLES; k++) {
                uint32_t sample = order == 1 ? SAMPLES - 1 - k : k, step = order == 2 && !sample ? t - 1 : t;
                if (step < STEPS) kvf__eval_scorer_take(&s, sample, step, logits[sample][step]);
            }
        cr_assert(!s.failed && !s.held);
        for (uint32_t k = 0; k < SAMPLES; k++) {
            const kvf__eval_figures *f = &s.figures[k];
            cr_assert_eq(f->n_done, (uint32_t)STEPS);
            for (uint32_t t = 0; t < STEPS; t++) {
                const float *x = logits[k][t];
                expect_close(f->nll[t], naive_log_sum(x, VOCAB) - x[truth[t]], "nll");
                if (k) expect_close(f->kl[t], naive_kl(logits[0][t], x, VOCAB), "kl");
                cr_assert_eq(f->hit[t], naive_best(x, VOCAB) == truth[t]);
                cr_assert_eq(f->agree[t], naive_best(x, VOCAB) == naive_best(logits[0][t], VOCAB));
            }
        }
        cr_assert(fabs(s.figures[2].kl[3]) < 1e-12 && s.figures[1].hit[0] == 1);
        kvf__eval_scorer_end(&s);
    }
}

Test(eval, logits_that_are_no_numbers_give_none) {
    float full[4] = {1, 2, 3, 4}, other[4] = {NAN, 1, NAN, 0}, cut[4] = {-INFINITY, 0, 1, 2};
    uint32_t truth[2] = {1, 1};
    kvf__eval_scorer s;
    cr_assert(kvf__eval_scorer_begin(&s, 4, 2, truth, 2, true));
    kvf__eval_scorer_take(&s, 0, 0, full);
    kvf__eval_scorer_take(&s, 1, 0, other);
    kvf__eval_scorer_take(&s, 0, 1, cut);
    kvf__eval_scorer_take(&s, 1, 1, full);
    cr_assert(isnan(s.figures[1].kl[0]) && isnan(s.figures[1].nll[0]) && s.figures[1].hit[0]);
    cr_assert(s.figures[1].kl[1] > 0 && isfinite(s.figures[1].kl[1]));
    kvf__eval_scorer_end(&s);
}

/* ---- Equal memory ------------------------------------------------------------------------------------------- */

/* Token by token: blocks that are reserved at each decode step. */
static double walk(const kvf__eval_shape *s, const kvf_layer_size *sizes) {
    double sum = 0;
    uint32_t n = s->n_steps > 1 ? s->n_steps - 1 : 1;
    for (uint32_t t = 1; t <= n; t++)
        for (uint32_t l = 0; l < s->n_layers; l++) {
            uint32_t kept = sizes[l].keep < s->n_prompt ? sizes[l].keep : s->n_prompt;
            uint32_t slots = sizes[l].reserve != UINT32_MAX ? sizes[l].reserve : kept + (s->n_steps > 1 ? t : 0);
            if (s->deferred && t == 1 && slots < s->n_prompt + 1) slots = s->n_prompt + 1;
            sum += (slots + s->block_size - 1) / s->block_size * s->n_groups;
        }
    return sum / n;
}

Test(eval, memory_is_counted_step_by_step) {
    uint64_t rng = 3;
    for (uint32_t i = 0; i < 500; i++) {
        kvf_layer_size sizes[6];
        kvf__eval_shape s = {.n_prompt = 50 + (uint32_t)(gw_random(&rng) % 500),
                             .n_steps = 1 + (uint32_t)(gw_random(&rng) % 80),
                             .n_layers = 6,
                             .n_groups = 1 + (uint32_t)(gw_random(&rng) % 3),
                             .block_size = 8u << gw_random(&rng) % 3,
                             .deferred = i % 3 == 0};
        if (s.deferred) s.n_steps++; /* it has a decode step */
        for (uint32_t l = 0; l < 6; l++) {
            uint32_t keep = 1 + (uint32_t)(gw_random(&rng) % s.n_prompt), kind = (uint32_t)(gw_random(&rng) % 3);
            sizes[l].keep = kind ? keep : UINT32_MAX;
            sizes[l].reserve = kind == 2 ? keep + s.block_size / 2 : UINT32_MAX;
        }
        double held = kvf__eval_held(&s, sizes), wanted = walk(&s, sizes);
        cr_assert(fabs(held - wanted) < 1e-9 * wanted, "case %u: %.9f, not %.9f", i, held, wanted);
        s.n_layers /= s.n_groups; /* the same sizes, as those of groups */
        held = kvf__eval_held_by_groups(&s, sizes);
        s.n_layers *= s.n_groups;
        wanted /= s.n_groups;
        cr_assert(fabs(held - wanted) < 1e-9 * wanted, "case %u: %.9f by groups, not %.9f", i, held, wanted);
    }
    kvf__eval_shape s = {.n_prompt = 1000, .n_layers = 30, .n_groups = 3, .block_size = 16};
    cr_assert_eq(kvf__eval_target(&s, .1), 3 * 187.0);
    s.n_prompt = 1024;
    cr_assert_eq(kvf__eval_target(&s, .2), 3 * 384.0);
    cr_assert(kvf__eval_within(101, 100) && !kvf__eval_within(101.1, 100));
}

/* ---- Batches ------------------------------------------------------------------------------------------------ */

typedef struct alone { /* a request of its own */
    float *logits;     /* [STEPS][n_vocab] */
    uint32_t n_vocab;
    double held;
} alone;

static void keep_logits(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits) {
    alone *a = user;
    (void)index;
    (void)request;
    memcpy(a->logits + (size_t)step * a->n_vocab, logits, a->n_vocab * sizeof *logits);
}

static void keep_blocks(void *user, const kvf_result *r) {
    cr_assert(!r->error && r->n_tokens == STEPS);
    ((alone *)user)->held = (double)r->reserved_block_steps / r->n_block_steps;
}

static alone run_alone(kvf_engine *engine, const uint32_t *tokens, const kvf_policy_options *policy) {
    alone a = {.n_vocab = kvf_model_get_info(model)->n_vocab};
    a.logits = malloc((size_t)STEPS * a.n_vocab * sizeof *a.logits);
    kvf_generate g = {.struct_size = sizeof g, .tokens = tokens, .n_tokens = PROMPT, .max_tokens = STEPS};
    g.forced = tokens + PROMPT;
    g.policy = policy;
    g.user = &a;
    g.on_logits = keep_logits;
    g.on_finish = keep_blocks;
    kvf_error err = {.text = ""};
    int more = 1;
    cr_assert_eq(kvf_engine_submit(engine, &g, NULL, &err), KVF_OK, "%s", err.text);
    while (more) cr_assert_eq(kvf_engine_step(engine, &more, &err), KVF_OK, "%s", err.text);
    return a;
}

static bool never(void *user) { return user != NULL; }
static void unseen(void *user, uint64_t n_tokens) {
    cr_assert(!user);
    (void)n_tokens;
}

static kvf_engine *open_engine(uint32_t heads_per_group) {
    kvf_engine_config c;
    kvf_engine_config_init(&c, sizeof c);
    c.model = model;
    c.kv_dtype = KVF_F32;
    c.n_threads = 2;
    c.block_size = 16;
    c.heads_per_group = heads_per_group;
    c.max_running = 40;
    c.n_score_arrays = KVF_MAX_SCORE_ARRAYS;
    c.want_mass_bias = 1;
    c.deterministic = 1;
    c.kv_bytes = (uint64_t)64 << 20;
    return create(&c);
}

static void expect_cell(kvf_engine *engine, const kvf__eval_item *item, const kvf__eval_cell *c, const alone *full) {
    kvf_policy_options options = c->policy->options;
    options.rho = c->rho_used;
    alone own = run_alone(engine, item->tokens, &options);
    expect_close(c->held, own.held, c->policy->label);
    cr_assert(kvf__eval_within(c->held, c->target), "%s: %f of %f", c->policy->label, c->held, c->target);
    for (uint32_t t = 0; t < STEPS; t++) {
        const float *a = full->logits + (size_t)t * own.n_vocab, *b = own.logits + (size_t)t * own.n_vocab;
        expect_close(c->figures.kl[t], naive_kl(a, b, own.n_vocab), c->policy->label);
        expect_close(c->figures.nll[t], naive_log_sum(b, own.n_vocab) - b[item->tokens[PROMPT + t]], c->policy->label);
    }
    free(own.logits);
}

typedef struct tally {
    uint32_t n_cells, n_lowered, n_empty;
} tally;

/* All cells beside one another: the same figures as each alone. */
static tally expect_cells(const kvf__eval_policies *policies, uint32_t heads_per_group, const double *rhos,
                          uint32_t n_rhos) {
    const kvf_model_info *info = kvf_model_get_info(model);
    uint32_t n_groups = info->n_kv_heads / heads_per_group;
    kvf__eval_items items = {NULL, 0, 0};
    kvf__eval_item *item = kvf__eval_item_add(&items, PROMPT, STEPS, false);
    uint64_t rng = 11;
    for (uint32_t i = 0; i < PROMPT + STEPS; i++) item->tokens[i] = TINY_BYTE_0 + (uint32_t)(gw_random(&rng) % 250);
    kvf_engine *engine = open_engine(heads_per_group);
    kvf__eval_machine machine = {engine, info, n_groups, 16, never, unseen, NULL};
    kvf__eval_shape shape = {.n_prompt = PROMPT, .n_layers = info->n_layers, .n_groups = n_groups, .block_size = 16};
    alone full = run_alone(engine, item->tokens, NULL);
    tally seen = {0, 0, 0};
    kvf__eval_batch b = {.item = item, .first = true, .want_kl = true, .n_layers = info->n_layers};
    b.cells = calloc(policies->n * n_rhos, sizeof *b.cells);
    b.density_head_minmax = calloc(info->n_layers, sizeof *b.density_head_minmax);
    b.variance = calloc(info->n_layers, sizeof *b.variance);
    for (uint32_t i = 0; i < policies->n * n_rhos; i++) {
        double rho = rhos[i % n_rhos];
        b.cells[b.n_cells++] = (kvf__eval_cell){
            .policy = &policies->list[i / n_rhos], .rho = rho, .target = kvf__eval_target(&shape, rho)};
    }
    cr_assert_eq(kvf__eval_batch_run(&machine, &b), KVF__EVAL_DONE);
    for (uint32_t i = 0; i < b.n_cells; i++) {
        const kvf__eval_cell *c = &b.cells[i];
        seen.n_lowered += c->rho_used < c->rho;
        seen.n_empty += c->empty[0] != 0;
        if (!c->empty[0]) expect_cell(engine, item, c, &full);
    }
    seen.n_cells = b.n_cells;
    for (uint32_t l = 0; l < info->n_layers; l++)
        cr_assert(b.variance[l] > 0 && b.density_head_minmax[l] >= 0 && b.density_head_minmax[l] <= 1);
    free(full.logits);
    kvf__eval_batch_free(&b);
    kvf__eval_items_free(&items);
    kvf_engine_destroy(engine);
    return seen;
}

Test(eval, cells_are_what_separate_runs_give, .init = open_model, .fini = close_model) {
    kvf__cli cli = kvf__cli_default();
    kvf__eval_policies policies = {.n = 0}; /* every policy there is, in every preset */
    const kvf_model_info *info = kvf_model_get_info(model);
    cr_assert(kvf__eval_policies_read(&cli, info, &policies));
    cr_assert(kvf__eval_policy_add(&cli, info, "full layer=d2o,full_layers=0,nm=1:1", NULL, &policies));
    cr_assert_geq(policies.n, 9u);
    tally s = expect_cells(&policies, info->n_kv_heads, (const double[]){.6}, 1);
    cr_assert(s.n_lowered > 0 && s.n_empty < s.n_cells / 2, "%u lowered, %u empty of %u", s.n_lowered, s.n_empty,
              s.n_cells);
    kvf__eval_policies_free(&policies);
}

/* Where sizes are no whole blocks, groups of different sizes round up to more than equal ones do: no cell may be lost by it. */
Test(eval, head_groups_of_their_own_sizes_hold_no_more, .init = open_model, .fini = close_model) {
    static const char *const specs[] = {"h2o,head_budget=adaptive", "ratios=d2o,redistribute=0,head_budget=adaptive",
                                        "floor 0=d2o,redistribute=0,head_budget=adaptive,head_floor=0",
                                        "late=d2o,redistribute=0,head_budget=adaptive,defer_first_decode=1",
                                        "snapkv,score_window=16,window=16,head_budget=adaptive"};
    kvf__cli cli = kvf__cli_default();
    kvf__eval_policies policies = {.n = 0};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; i++)
        cr_assert(kvf__eval_policy_add(&cli, kvf_model_get_info(model), specs[i], NULL, &policies));
    double rhos[] = {.5, .55, .6, .65, .7, .75};
    tally s = expect_cells(&policies, 1, rhos, 6);
    cr_assert(s.n_lowered >= 12 && s.n_empty == 0, "%u lowered, %u empty of %u", s.n_lowered, s.n_empty, s.n_cells);
    kvf__eval_policies_free(&policies);
}
