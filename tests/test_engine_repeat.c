/* Policies that score slots by a repetition of the prompt, under the engine: against forward passes without it, and against themselves
 * under other chunks, batches, caches, pools, failures. */
#define _DEFAULT_SOURCE
#include "tests/forward_rig.h" /* first: its parameters have the name of the model that the next one declares */

#include "tests/engine_rig.h"
#include "tests/failing.h"

TestSuite(engine_repeat, .init = open_model, .fini = close_model);

static const uint32_t instruction[] = {5, 9, 77, 5, 30};
enum {
    N_INSTRUCTION = sizeof instruction / sizeof *instruction,
    T = 152
}; /* whole blocks: a cached prompt is found as a whole */

static kvf_engine_config repeat_config(uint32_t n_blocks) {
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = 16;
    c.deterministic = 1;
    c.instruction = instruction;
    c.n_instruction = N_INSTRUCTION;
    return c;
}

/* ---- Scores, and what is kept by them -------------------------------------------------------------------- */

/* Appends and runs tokens in one pass; max: NULL, or what the pass adds to. */
static void pass(forward_rig *r, const uint32_t *tokens, uint32_t n, float *max, bool plus) {
    const uint32_t begin = 0, end = T;
    const uint8_t by_residual = plus;
    uint32_t out_row;
    kvf_forward f = rig_append(r, &rig_first, &n, 1, 0, tokens, &out_row, NULL);
    f.n_out = 0;
    f.deterministic = 1;
    f.prompt_max = max ? &max : NULL;
    f.max_begin = &begin;
    f.max_end = &end;
    f.prompt_stride = T;
    f.max_by_residual = plus ? &by_residual : NULL;
    cr_assert_eq(kvf_model_forward(r->model, r->activations, r->stream, &f, &r->err), KVF_OK, "%s", r->err.text);
}

/* (layer, query head, T): scores of a prompt without the engine. The caller frees them. */
static float *scores_of(const uint32_t *prompt, uint32_t piece, bool plus) {
    forward_rig r;
    const kvf_model_info *m = kvf_model_get_info(model);
    size_t floats = (size_t)m->n_layers * m->n_q_heads * T;
    float *max = memset(rig_floats(floats), 0, floats * sizeof *max);
    uint32_t joined[N_INSTRUCTION + T];
    rig_open(&r, model, KVF_F32, 1, 0, 256, 2 * T, 400);
    pass(&r, prompt, T, NULL, false);
    for (uint32_t at = 0, n; at < T; at += n) {
        n = piece && piece < T - at ? piece : T - at;
        memcpy(joined, instruction, sizeof instruction);
        memcpy(joined + N_INSTRUCTION, prompt + at, n * sizeof *joined);
        pass(&r, joined, N_INSTRUCTION + n, max, plus);
        cr_assert_eq(kvf_seq_rollback(r.manager, r.seqs[0], N_INSTRUCTION + n), KVF_OK);
    }
    cr_assert_eq(kvf_view_fill(r.manager, 0, &r.seqs[0], 1, &r.view), KVF_OK);
    kvf_repetition x = {.struct_size = sizeof x, .view = &r.view, .pages = &r.pages, .end = T, .prompt_max = max};
    x.prompt_stride = T;
    if (plus) cr_assert_eq(kvf_model_score(model, r.activations, r.stream, &x, &r.err), KVF_OK, "%s", r.err.text);
    rig_close(&r);
    return max;
}

/* A request that is looked at when it draws its first token: its prompt's events are done. */
struct look {
    struct answer answer;
    const float *want; /* its scores */
    uint32_t budget, window;
    bool seen;
};

struct slot {
    float score;
    uint32_t table, pos;
};

static int by_score(const void *a, const void *b) {
    const struct slot *x = a, *y = b;
    if (x->score > y->score || x->score < y->score) return x->score < y->score ? 1 : -1;
    if (x->table != y->table) return x->table < y->table ? -1 : 1;
    return x->pos < y->pos ? -1 : x->pos > y->pos;
}

/* kept[table * T + pos], by one threshold over the tables of all KV heads, without a floor. */
static void keep_best(const struct look *l, uint32_t sinks, bool *kept) {
    static struct slot slots[64 * T];
    const kvf_model_info *m = kvf_model_get_info(model);
    uint32_t n_tables = m->n_layers * m->n_kv_heads, per_kv = m->n_q_heads / m->n_kv_heads, n = 0, held = 0;
    for (uint32_t t = 0; t < n_tables; t++)
        for (uint32_t pos = 0; pos < T; pos++) {
            float score = 0;
            for (uint32_t h = 0; h < per_kv; h++)
                score = fmaxf(
                    score,
                    l->want[((size_t)(t / m->n_kv_heads) * m->n_q_heads + t % m->n_kv_heads * per_kv + h) * T + pos]);
            bool always = pos < sinks || pos >= T - l->window;
            kept[t * T + pos] = always;
            held += always;
            if (!always) slots[n++] = (struct slot){score, t, pos};
        }
    qsort(slots, n, sizeof *slots, by_score);
    for (uint32_t i = 0; held < l->budget * n_tables; i++, held++) kept[slots[i].table * T + slots[i].pos] = true;
}

static void look(void *user, kvf_request request, uint32_t token, double logprob) {
    static bool kept[64 * T];
    struct look *l = user;
    const kvf_engine *e = l->answer.engine;
    const kvf_model_info *m = kvf_model_get_info(model);
    (void)token, (void)logprob;
    if (l->seen) return;
    l->seen = true;
    for (size_t row = 0; row < (size_t)m->n_layers * m->n_q_heads; row++)
        for (uint32_t pos = 0; pos < T; pos++) {
            float got = e->buffer.prompt_max[row * e->config.max_prefill_tokens + pos], want = l->want[row * T + pos];
            cr_assert(!memcmp(&got, &want, sizeof got), "row %zu, position %u: %.9g, %.9g", row, pos, (double)got,
                      (double)want);
        }
    if (!l->budget) return;
    keep_best(l, 4, kept);
    for (uint32_t t = 0; t < m->n_layers * m->n_kv_heads; t++) {
        uint32_t pos[T], n = 0, at = 0;
        cr_assert_eq(kvf_engine_positions(l->answer.engine, request, t / m->n_kv_heads, t % m->n_kv_heads, pos, T, &n),
                     KVF_OK);
        for (uint32_t p = 0; p < T; p++)
            if (kept[t * T + p]) cr_assert(at < n && pos[at++] == p, "table %u: position %u is not kept", t, p);
        cr_assert_eq(at, n, "table %u: %u positions, %u expected", t, n, at);
    }
}

static void submit_look(kvf_engine *e, struct look *l, uint32_t seed, const char *policy) {
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o = options_of(policy);
    l->answer.engine = e;
    kvf_generate g = request_of(prompt, T, seed, 3, &l->answer);
    kvf_error err = {.text = ""};
    g.on_token = look;
    g.policy = &o;
    cr_assert_eq(kvf_engine_submit(e, &g, &l->answer.id, &err), KVF_OK, "%s", err.text);
}

Test(engine_repeat, scores_and_kept_positions_are_those_of_the_library) {
    static const struct {
        uint32_t piece;
        bool plus;
        uint32_t budget, window;
        const char *policy;
    } cases[] = {{0, false, 0, 0, "h2o rho=0.3 score=repeat"},
                 {64, false, 45, 1, "kvzip rho=0.3 min_tokens=16 repeat_piece=64"},
                 {0, true, 0, 0, "fold repeat rho=0.3 min_tokens=16"},
                 {100, true, 45, 1, "kvzip rho=0.3 min_tokens=16 repeat_piece=100 score_norm=output"}};
    static const uint32_t chunks[] = {8, 64, 512};
    uint32_t prompt[MAX_TOKENS];
    random_prompt(prompt, MAX_TOKENS, 11);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float *want = scores_of(prompt, cases[i].piece, cases[i].plus);
        for (size_t k = 0; k < 6; k++) {
            kvf_engine_config c = repeat_config(1000);
            c.chunk = chunks[k % 3];
            c.heads_per_group = cases[i].budget ? 1 : k % 2;
            c.prefix_cache = k > 2;
            kvf_engine *e = create(&c);
            for (int again = 0; again < 2; again++) { /* the second finds the prompt, if there is a cache */
                struct look l = {.want = want, .budget = cases[i].budget, .window = cases[i].window};
                submit_look(e, &l, 11, cases[i].policy);
                run(e);
                cr_assert(l.seen && l.answer.ended && l.answer.finish == KVF_FINISH_LENGTH);
                kvf_engine_stats s = stats_of(e);
                uint32_t n_pieces = cases[i].piece ? (T + cases[i].piece - 1) / cases[i].piece : 1;
                cr_assert_eq(s.n_repeat_tokens, (again + 1) * (T + n_pieces * N_INSTRUCTION + 1));
                cr_assert_eq(s.n_recomputed_tokens, 0);
                if (c.prefix_cache && again) cr_assert_eq(s.prefix.hit_tokens, T - 1);
            }
            kvf_engine_destroy(e);
        }
        free(want);
    }
}

/* ---- Batches, caches, pools ------------------------------------------------------------------------------- */

static const char *const policies[] = {
    "kvzip rho=0.3 min_tokens=16 repeat_piece=64",
    "fold repeat rho=0.3 min_tokens=16",
    "h2o rho=0.3 min_tokens=16 score=repeat evict_every=1",
    "d2o rho=0.4 min_tokens=16 score=repeat merge=average nm=1:1 repeat_piece=64",
    "h2o budget_tokens=120 score=repeat", /* some prompts fit, and overflow later */
    "d2o rho=0.3 min_tokens=16",
};
enum { N_POLICIES = sizeof policies / sizeof *policies, N = 8, ANSWER = 24 };

static void submit_nth(kvf_engine *e, struct answer *a, int i) {
    submit(e, a, 70 + 25 * (uint32_t)(i % 4), 1 + (uint32_t)(i % 2), ANSWER, policies[i % N_POLICIES]);
}

static void expect_nth(const struct answer *a, const struct answer *alone, int i, const char *form) {
    char what[96];
    snprintf(what, sizeof what, "%s, request %d", form, i);
    cr_assert(a->ended && a->finish == KVF_FINISH_LENGTH, "%s", what);
    expect_same(a, alone, 0, what);
}

static void answers_alone(struct answer *alone, uint32_t heads_per_group) {
    for (int i = 0; i < N; i++) {
        kvf_engine_config c = repeat_config(2000);
        c.heads_per_group = heads_per_group;
        kvf_engine *e = create(&c);
        memset(&alone[i], 0, sizeof *alone);
        submit_nth(e, &alone[i], i);
        run(e);
        kvf_engine_destroy(e);
    }
}

Test(engine_repeat, a_batch_a_cache_a_swap_and_a_small_pool_change_nothing) {
    static const struct {
        const char *name;
        uint32_t n_blocks, chunk, heads_per_group;
        int cache;
        uint64_t host_bytes;
    } forms[] = {
        {"batch", 2000, 16, 0, 0, 0},
        {"cache", 2000, 64, 0, 1, 0},
        {"heads", 4000, 24, 1, 1, 0},
        {"small pool", 120, 16, 0, 0, 0},
        {"small pool, cache", 120, 16, 0, 1, 0},
        {"host", 120, 16, 0, 1, 1 << 20},
    };
    static struct answer alone[2][N], a[N];
    for (int k = 0; k < 2; k++) answers_alone(alone[k], (uint32_t)k);
    uint64_t n_preempted = 0;
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        kvf_engine_config c = repeat_config(forms[f].n_blocks);
        c.chunk = forms[f].chunk;
        c.heads_per_group = forms[f].heads_per_group;
        c.prefix_cache = forms[f].cache;
        c.host_bytes = forms[f].host_bytes;
        kvf_engine *e = create(&c);
        for (int round = 0; round < 2; round++) {
            memset(a, 0, sizeof a);
            for (int i = 0; i < N; i++) submit_nth(e, &a[i], i);
            run(e);
            for (int i = 0; i < N; i++) expect_nth(&a[i], &alone[c.heads_per_group == 1][i], i, forms[f].name);
        }
        kvf_engine_stats s = stats_of(e);
        if (forms[f].cache) cr_expect_gt(s.prefix.hit_tokens, 300, "%s", forms[f].name);
        n_preempted += s.n_preempted;
        kvf_engine_destroy(e);
    }
    cr_expect_gt(n_preempted, 0);
}

/* While one prompt is repeated, those that answer have a token in every step, and another prompt its chunks. */
Test(engine_repeat, others_go_on_beside_a_repetition) {
    static struct answer first, repeats;
    kvf_engine_config c = repeat_config(2000);
    kvf_engine *e = create(&c);
    int more = 1;
    submit(e, &first, 20, 3, 100, "full");
    for (int i = 0; i < 4; i++) step(e, &more);
    submit(e, &repeats, 150, 1, 4, policies[0]);
    uint64_t before = stats_of(e).n_steps;
    uint32_t n = first.n_tokens;
    while (!repeats.n_tokens) step(e, &more);
    uint64_t n_steps = stats_of(e).n_steps - before;
    cr_expect_geq(n_steps, (150 + 150 + 3 * N_INSTRUCTION) / 16);
    cr_expect_eq(first.n_tokens - n, n_steps);
    run(e);
    kvf_engine_destroy(e);
}

/* Blocks of a piece are the prompt's peak, and free afterwards. */
Test(engine_repeat, a_piece_counts_in_the_peak_and_is_given_back) {
    static struct answer a;
    uint32_t prompt[MAX_TOKENS];
    for (int piece = 0; piece < 2; piece++) {
        uint32_t n = piece ? 64 : 150, peak = (150 + N_INSTRUCTION + n + BLOCK - 1) / BLOCK * N_LAYERS;
        char policy[96];
        snprintf(policy, sizeof policy, "h2o rho=0.3 score=repeat repeat_piece=%u", piece ? n : 0);
        for (uint32_t less = 0; less < 2; less++) {
            kvf_engine_config c = repeat_config(peak - less);
            kvf_engine *e = create(&c);
            kvf_policy_options o = options_of(policy);
            memset(&a, 0, sizeof a);
            kvf_generate g = request_of(prompt, 150, 1, 4, &a);
            kvf_error err = {.text = ""};
            g.policy = &o;
            g.on_token = NULL;
            kvf_status st = kvf_engine_submit(e, &g, &a.id, &err);
            cr_assert_eq(st, less ? KVF_E_NEVER_FITS : KVF_OK, "%s", err.text);
            if (less) cr_expect(strstr(err.text, "while policy h2o repeats it"), "%s", err.text);
            if (!less) {
                run(e);
                kvf_engine_stats s = stats_of(e);
                cr_expect_eq(s.occupancy.blocks.n_held_max, peak);
                cr_expect(a.ended && a.finish == KVF_FINISH_LENGTH);
            }
            kvf_engine_destroy(e);
        }
    }
}

/* ---- Samples ------------------------------------------------------------------------------------------------ */

struct sampled {
    uint32_t tokens[4][ANSWER], n_tokens[4];
    double logprobs[4][ANSWER];
    uint32_t n_ended;
};

static void on_sampled(void *user, const kvf_result *r) {
    struct sampled *s = user;
    cr_assert(r->index < 4 && r->n_tokens <= ANSWER && r->finish == KVF_FINISH_LENGTH, "%s", r->error ? r->error : "");
    s->n_tokens[r->index] = r->n_tokens;
    memcpy(s->tokens[r->index], r->tokens, r->n_tokens * sizeof *r->tokens);
    memcpy(s->logprobs[r->index], r->logprobs, r->n_tokens * sizeof *r->logprobs);
    s->n_ended++;
}

/* own: NULL, or the samples' policies, in place of one for all. */
static void sample(const kvf_engine_config *c, struct sampled *s, uint32_t n, uint32_t seed, const char *const *words,
                   bool own) {
    kvf_engine *e = create(c);
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o[4];
    kvf_error err = {.text = ""};
    for (uint32_t i = 0; i < (own ? n : 1); i++) o[i] = options_of(words[i]);
    memset(s, 0, sizeof *s);
    random_prompt(prompt, MAX_TOKENS, 5);
    kvf_generate g = {
        .struct_size = sizeof g, .tokens = prompt, .n_tokens = 120, .max_tokens = ANSWER, .ignore_end = 1};
    g.n = n;
    g.policy = own ? NULL : o;
    g.sample_policies = own ? o : NULL;
    g.sampling = (kvf_sampling){.temperature = 1, .seed = seed};
    g.user = s;
    g.on_finish = on_sampled;
    for (int round = 0; round < 1 + c->prefix_cache; round++) { /* then it finds the prompt */
        s->n_ended = 0;
        cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_OK, "%s", err.text);
        run(e);
        cr_assert_eq(s->n_ended, n);
    }
    if (n > 1 && c->kv_bytes > repeat_config(1000).kv_bytes) {
        uint64_t n_repeat = stats_of(e).n_repeat_tokens / (1 + (uint64_t)c->prefix_cache);
        cr_expect(n_repeat >= 120 && n_repeat < 240, "%llu: once for all samples", (unsigned long long)n_repeat);
    }
    kvf_engine_destroy(e);
}

static void expect_sample(const struct sampled *all, uint32_t i, const struct sampled *one, const char *what) {
    expect_tokens(all->tokens[i], all->logprobs[i], all->n_tokens[i], one->tokens[0], one->logprobs[0],
                  one->n_tokens[0], 0, what);
}

Test(engine_repeat, samples_share_one_repetition) {
    static const char *const own[][3] = {
        {"kvzip rho=0.3 min_tokens=16", "h2o rho=0.3 min_tokens=16", "kvzip rho=0.5 min_tokens=16"},
        {"h2o rho=0.3 min_tokens=16", "fold repeat rho=0.3 min_tokens=16", "snapkv rho=0.3 min_tokens=16"},
        {"full", "roco rho=0.3 min_tokens=16", "fold repeat rho=0.3 min_tokens=16"},
    };
    static struct sampled all, one;
    for (int cache = 0; cache < 2; cache++)
        for (uint32_t n_blocks = 100; n_blocks <= 3000; n_blocks *= 4) {
            kvf_engine_config c = repeat_config(n_blocks), alone = repeat_config(2000);
            c.prefix_cache = cache;
            for (size_t p = 0; p < 3; p++) {
                sample(&c, &all, 3, 40, &policies[p], false);
                for (uint32_t i = 0; i < 3; i++) {
                    sample(&alone, &one, 1, 40 + i, &policies[p], false);
                    expect_sample(&all, i, &one, policies[p]);
                }
            }
            for (size_t p = 0; p < sizeof own / sizeof *own; p++) {
                sample(&c, &all, 3, 40, own[p], true);
                for (uint32_t i = 0; i < 3; i++) {
                    sample(&alone, &one, 1, 40 + i, &own[p][i], false);
                    expect_sample(&all, i, &one, own[p][i]);
                }
            }
        }
}

/* ---- Ends, failures, refusals ------------------------------------------------------------------------------ */

/* A request is aborted after each number of steps, or one of its samples. */
Test(engine_repeat, an_abort_at_any_step_leaves_nothing) {
    static struct answer other, alone, victim;
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = repeat_config(2000);
    c.prefix_cache = 1;
    answer_alone(&c, &alone, 90, 9, ANSWER, policies[1]);
    for (int samples = 0; samples < 2; samples++)
        for (int at = 0; at < 24; at += 1 + samples) {
            kvf_engine *e = create(&c);
            int more = 1;
            kvf_policy_options o[2] = {options_of(policies[0]), options_of("h2o rho=0.3 min_tokens=16")};
            memset(&other, 0, sizeof other);
            memset(&victim, 0, sizeof victim);
            kvf_generate g = request_of(prompt, 120, 1, ANSWER, &victim);
            kvf_error err = {.text = ""};
            g.policy = o;
            if (samples) g.n = 2, g.sample_policies = o, g.policy = NULL, g.on_finish = NULL;
            static struct sampled s;
            memset(&s, 0, sizeof s);
            if (samples) g.user = &s, g.on_finish = on_sampled, g.on_token = NULL;
            victim.engine = e;
            kvf_request id;
            cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_OK, "%s", err.text);
            submit(e, &other, 90, 9, ANSWER, policies[1]);
            for (int i = 0; i < at; i++) step(e, &more);
            if (!samples) {
                cr_assert_eq(kvf_engine_abort(e, id), KVF_OK);
                cr_assert(victim.ended && victim.finish == KVF_FINISH_ABORTED);
            } else { /* the first, whose prompt it is, with a repetition that the other does not need */
                kvf__live *r = kvf__live_find(e, id);
                r->on_finish = NULL;
                cr_assert_eq(kvf_engine_abort_sample(e, id, 0), KVF_OK);
            }
            run(e);
            expect_same(&other, &alone, 0, "the other");
            kvf_engine_destroy(e);
        }
}

static kvf_runner inner;
static long calls, fail_at;
static kvf_status failing(kvf_status st, kvf_error *err) {
    return !st && calls++ == fail_at ? kvf__fail(err, KVF_E_IO, "the runner is out of order") : st;
}
static kvf_status failing_run(void *ctx, const kvf_forward *batch, kvf_error *err) {
    return failing(inner.run(ctx, batch, err), err);
}
static kvf_status failing_clear(void *ctx, float *columns, uint32_t n_rows, size_t stride, uint32_t n, kvf_error *err) {
    return failing(inner.clear(ctx, columns, n_rows, stride, n, err), err);
}
static kvf_status failing_score(void *ctx, const kvf_repetition *r, kvf_error *err) {
    return failing(inner.score(ctx, r, err), err);
}

Test(engine_repeat, a_call_that_fails_changes_nothing) {
    static struct answer alone[3], a[3];
    kvf_engine_config c = repeat_config(2000);
    for (int i = 0; i < 3; i++) answer_alone(&c, &alone[i], 100, 1 + (uint32_t)i, 4, policies[i]);
    long n_failed = 0;
    for (fail_at = 0; fail_at < 100; fail_at++) {
        inner = (kvf_runner){.struct_size = sizeof inner};
        cr_assert_eq(kvf_runner_create_cpu(model, NULL, NULL, &inner, NULL), KVF_OK);
        kvf_runner outer = inner;
        outer.run = failing_run;
        outer.clear = failing_clear;
        outer.score = failing_score;
        outer.destroy = NULL;
        c = repeat_config(2000);
        c.chunk = 64;
        c.model = NULL;
        c.runner = &outer;
        c.tokenizer = kvf_model_tokenizer(model);
        kvf_engine *e = create(&c);
        calls = 0;
        memset(a, 0, sizeof a);
        for (int i = 0; i < 3; i++) submit(e, &a[i], 100, 1 + (uint32_t)i, 4, policies[i]);
        for (int more = 1; more;) {
            kvf_error err = {.text = ""};
            kvf_status st = kvf_engine_step(e, &more, &err);
            cr_assert(!st || st == KVF_E_IO, "%s", err.text);
            n_failed += st != KVF_OK;
            cr_assert_eq(kvf_audit(kvf_engine_manager(e, NULL), &err), KVF_OK, "%s", err.text);
        }
        for (int i = 0; i < 3; i++) expect_nth(&a[i], &alone[i], i, "failed");
        kvf_engine_destroy(e);
        kvf_runner_destroy(&inner);
        if (calls <= fail_at) break;
    }
    cr_expect(n_failed > 15 && n_failed == fail_at, "%ld of %ld", n_failed, fail_at);
}

/* The submission takes all that it needs; what a step then lacks ends that request alone. */
Test(engine_repeat, memory_that_runs_out_ends_one_request) {
    static struct answer alone, a;
    kvf_engine_config c = repeat_config(2000);
    c.chunk = 64;
    answer_alone(&c, &alone, 100, 1, 4, policies[1]);
    uint32_t n_refused = 0, n_ended = 0;
    for (int64_t left = 0;; left++) {
        struct failing f = {.left = INT64_MAX};
        uint32_t prompt[MAX_TOKENS];
        kvf_policy_options o = options_of(policies[1]);
        kvf_error err = {.text = ""};
        c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
        kvf_engine *e = create(&c);
        memset(&a, 0, sizeof a);
        kvf_generate g = request_of(prompt, 100, 1, 4, &a);
        g.policy = &o;
        f.left = left;
        kvf_status st = kvf_engine_submit(e, &g, &a.id, &err);
        cr_assert(!st || st == KVF_E_NO_MEMORY, "%s", err.text);
        n_refused += st != KVF_OK;
        for (int more = !st; more;) cr_assert(!kvf_engine_step(e, &more, &err), "%s", err.text);
        bool all = f.left > 0;
        n_ended += !st && a.finish == KVF_FINISH_ERROR;
        if (!st && a.finish != KVF_FINISH_ERROR) expect_same(&a, &alone, 0, "memory");
        kvf_engine_destroy(e);
        cr_assert_eq(f.alive, 0);
        if (all) break;
    }
    cr_expect(n_refused > 1 && n_ended > 0, "%u refused, %u ended", n_refused, n_ended);
}

static void expect_refused(const kvf_engine_config *c, uint32_t n, const char *policy, kvf_status want,
                           const char *text) {
    struct answer a = {0};
    uint32_t prompt[MAX_TOKENS];
    kvf_engine *e = create(c);
    kvf_policy_options o = options_of(policy);
    kvf_generate g = request_of(prompt, n, 1, 4, &a);
    kvf_error err = {.text = ""};
    g.policy = &o;
    cr_expect_eq(kvf_engine_submit(e, &g, &a.id, &err), want, "%s: %s", text, err.text);
    cr_expect(strstr(err.text, text), "%s: %s", text, err.text);
    kvf_engine_destroy(e);
}

Test(engine_repeat, what_cannot_be_repeated_is_named) {
    kvf_engine_config c = repeat_config(2000);
    c.max_context = 200;
    expect_refused(&c, 132, policies[0], KVF_E_NEVER_FITS, "leaves 63 of the context's 200 positions");
    inner = (kvf_runner){.struct_size = sizeof inner};
    cr_assert_eq(kvf_runner_create_cpu(model, NULL, NULL, &inner, NULL), KVF_OK);
    kvf_runner outer = inner;
    c = repeat_config(2000);
    c.model = NULL;
    c.runner = &outer;
    outer.destroy = NULL;
    outer.score = NULL;
    expect_refused(&c, 50, policies[1], KVF_E_UNSUPPORTED, "runner cpu has no function score");
    outer.observes &= ~(uint32_t)KVF_NEEDS_REPEAT;
    expect_refused(&c, 50, policies[0], KVF_E_UNSUPPORTED, "runner cpu does not repeat prompts");
    kvf_runner_destroy(&inner);
    c = repeat_config(2000);
    c.n_instruction = 33;
    kvf_engine *e = NULL;
    kvf_error err = {.text = ""};
    cr_expect_eq(kvf_engine_create(&c, &e, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "n_instruction 33: must be at most 32"), "%s", err.text);
}
