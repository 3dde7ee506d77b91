/* Several answers to one prompt: samples as separate requests would give them, beam search against a naive one, what is
 * shared, preemption, aborts, refusals. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <math.h>

#include "engine/internal.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/gguf_writer.h"
#include "tests/naive_llama.h"
#include <unistd.h>

enum { MAX_TOKENS = 256, BLOCK = 8, N_LAYERS = 3, MAX_ANSWERS = 16 };

static kvf_model *model;

static void open_model(void) {
    char path[256];
    gw_temp_path(path, sizeof path);
    struct tiny_model_params params = {.n_layers = N_LAYERS, .seed = 7};
    kvf_test_write_tiny_model(path, &params);
    kvf_model_config config = {.struct_size = sizeof config};
    kvf_error err = {""};
    cr_assert_eq(kvf_model_open(path, &config, &model, &err), KVF_OK, "%s", err.text);
    unlink(path);
}

static void close_model(void) { kvf_model_close(model); }

TestSuite(engine_forks, .init = open_model, .fini = close_model);

/* ---- A request and its answers ---------------------------------------------------------------------------- */

struct answer {
    uint32_t tokens[MAX_TOKENS], n_tokens, n_seen, n_preempted;
    double logprobs[MAX_TOKENS], score;
    char text[2048];
    kvf_finish finish;
    uint64_t held, own, shared, merged;
    int ended;
};

struct job {
    kvf_engine *engine;
    kvf_request id;
    struct answer answers[MAX_ANSWERS];
    uint32_t n_results, n_ended, abort_at, abort_index; /* abort_at: tokens of abort_index, 0: never */
};

static void on_finish(void *user, const kvf_result *r) {
    struct job *j = user;
    cr_assert_lt(r->index, (uint32_t)MAX_ANSWERS);
    cr_assert_lt(r->index, r->n_results);
    struct answer *a = &j->answers[r->index];
    cr_assert_eq(a->ended, 0, "answer %u came twice", r->index);
    cr_assert(r->request == j->id && r->error == NULL, "%s", r->error ? r->error : "another request");
    a->ended = 1;
    a->finish = r->finish;
    a->n_tokens = r->n_tokens;
    memcpy(a->tokens, r->tokens, r->n_tokens * sizeof *r->tokens);
    memcpy(a->logprobs, r->logprobs, r->n_tokens * sizeof *r->logprobs);
    snprintf(a->text, sizeof a->text, "%s", r->text);
    a->score = r->score;
    a->held = r->held_tokens;
    a->own = r->own_blocks;
    a->shared = r->shared_blocks;
    a->merged = r->counts.merged;
    a->n_preempted = r->n_preempted;
    uint64_t blocks = 0;
    for (uint32_t l = 0; l < N_LAYERS; l++) blocks += r->layers[l].n_blocks;
    cr_expect(!a->held || blocks == a->own + a->shared);
    j->n_results = r->n_results;
    j->n_ended++;
}

static void on_sample_token(void *user, uint32_t index, kvf_request request, uint32_t token, double logprob) {
    struct job *j = user;
    struct answer *a = &j->answers[index];
    cr_assert(request == j->id || !j->id);
    a->tokens[a->n_seen] = token;
    a->logprobs[a->n_seen++] = logprob;
    if (j->abort_at && index == j->abort_index && a->n_seen == j->abort_at)
        cr_assert_eq(kvf_engine_abort_sample(j->engine, request, index), KVF_OK);
}

static kvf_engine_config config_of(uint32_t n_blocks) {
    kvf_engine_config c = kvf_engine_config_default();
    c.model = model;
    c.kv_dtype = KVF_F32;
    c.n_threads = 2;
    c.block_size = BLOCK;
    c.chunk = 64;
    c.max_running = 16;
    c.n_score_arrays = 2;
    c.want_mass_bias = 1;
    c.kv_bytes = (uint64_t)n_blocks * BLOCK * 2 * 16 * 2 * 4; /* slots, heads, head size, K and V, floats */
    return c;
}

static kvf_engine *create(const kvf_engine_config *c) {
    kvf_engine *e = NULL;
    kvf_error err = {""};
    cr_assert_eq(kvf_engine_create(c, &e, &err), KVF_OK, "%s", err.text);
    return e;
}

static kvf_policy_options options_of(const char *text) {
    char words[256], *save = NULL;
    snprintf(words, sizeof words, "%s", text);
    char *policy = strtok_r(words, " ", &save), *preset = NULL, *w = strtok_r(NULL, " ", &save);
    if (w && !strchr(w, '=')) preset = w, w = strtok_r(NULL, " ", &save);
    kvf_policy_options o;
    kvf_error err = {""};
    cr_assert_eq(kvf_policy_options_init(&o, policy, preset, &err), KVF_OK, "%s", err.text);
    for (; w; w = strtok_r(NULL, " ", &save)) {
        char *value = strchr(w, '=');
        *value++ = 0;
        cr_assert_eq(kvf_policy_option_set(&o, w, value, &err), KVF_OK, "%s", err.text);
    }
    return o;
}

static kvf_generate request_of(uint32_t *prompt, uint32_t n, uint32_t seed, uint32_t max_tokens) {
    uint64_t rng = seed;
    for (uint32_t i = 0; i < MAX_TOKENS; i++) prompt[i] = TINY_BYTE_0 + (uint32_t)(gw_random(&rng) % 250);
    return (kvf_generate){.struct_size = sizeof(kvf_generate),
                          .tokens = prompt,
                          .n_tokens = n,
                          .max_tokens = max_tokens,
                          .ignore_end = 1,
                          .sampling = {.temperature = 1.2f, .top_k = 50, .seed = 100 + seed},
                          .on_finish = on_finish,
                          .on_sample_token = on_sample_token};
}

static void submit(kvf_engine *e, struct job *j, kvf_generate g, const char *policy) {
    kvf_policy_options o = options_of(policy);
    kvf_error err = {""};
    memset(j, 0, sizeof *j);
    j->engine = e;
    g.policy = &o;
    g.user = j;
    cr_assert_eq(kvf_engine_submit(e, &g, &j->id, &err), KVF_OK, "%s", err.text);
}

static void step(kvf_engine *e, int *more) {
    kvf_error err = {""};
    cr_assert_eq(kvf_engine_step(e, more, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(kvf_audit(e->manager, &err), KVF_OK, "%s", err.text);
}

static kvf_engine_stats stats_of(kvf_engine *e) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    return s;
}

static void run(kvf_engine *e) {
    int more = 1;
    for (int n = 0; more; n++) {
        step(e, &more);
        cr_assert_lt(n, 5000, "no end");
    }
    kvf_engine_stats s = stats_of(e);
    cr_expect(s.occupancy.blocks.n_held == 0 && s.occupancy.blocks.n_promised == 0, "blocks are left behind");
    cr_expect(s.occupancy.score_pages.n_held == 0 && s.occupancy.n_seqs == 0);
}

static void answer_alone(const kvf_engine_config *c, struct job *j, kvf_generate g, const char *policy) {
    kvf_engine *e = create(c);
    submit(e, j, g, policy);
    run(e);
    kvf_engine_destroy(e);
    cr_assert(j->n_ended == j->n_results && j->n_ended > 0);
}

static void expect_same(const struct answer *a, const struct answer *b, double bound, const char *what) {
    cr_assert_eq(a->n_tokens, b->n_tokens, "%s: %u and %u tokens", what, a->n_tokens, b->n_tokens);
    for (uint32_t i = 0; i < a->n_tokens; i++) {
        cr_assert_eq(a->tokens[i], b->tokens[i], "%s: token %u", what, i);
        cr_assert_leq(fabs(a->logprobs[i] - b->logprobs[i]), bound, "%s: token %u: %.9f and %.9f", what, i,
                      a->logprobs[i], b->logprobs[i]);
    }
    cr_assert_str_eq(a->text, b->text);
    cr_expect_eq(a->held, b->held, "%s: holds %llu and %llu", what, (unsigned long long)a->held,
                 (unsigned long long)b->held);
}

static const char *const policies[] = {
    "full",
    "streaming rho=0.3 min_tokens=16",
    "h2o rho=0.3 min_tokens=16",
    "d2o rho=0.3 min_tokens=16",
    "d2o serving rho=0.4 min_tokens=16",
    "d2o authors rho=0.3",
    "d2o rho=0.3 min_tokens=16 merge=mass merge_keys=0 gate=0.2",
    "d2o rho=0.3 min_tokens=16 scope=layer gqa=max sinks_extra=1 score=prompt_plus_current evict_every=5",
    "d2o budget_tokens=64",
};
enum { N_POLICIES = sizeof policies / sizeof *policies };

/* ---- Samples ----------------------------------------------------------------------------------------------- */

Test(engine_forks, samples_are_what_requests_of_their_own_are) {
    uint32_t prompt[MAX_TOKENS];
    for (int p = 0; p < N_POLICIES; p++)
        for (uint32_t group = 1; group <= 2; group++) {
            kvf_engine_config c = config_of(2500);
            c.heads_per_group = group;
            struct job together, alone;
            kvf_generate g = request_of(prompt, p == N_POLICIES - 1 ? 40 : 101, 3 + p, 40);
            g.n = 5;
            answer_alone(&c, &together, g, policies[p]);
            cr_assert(together.n_ended == 5);
            for (uint32_t i = 0; i < 5; i++) {
                kvf_generate one = g;
                one.n = 0;
                one.sampling.seed += i;
                answer_alone(&c, &alone, one, policies[p]);
                expect_same(&alone.answers[0], &together.answers[i], 2e-4, policies[p]);
                cr_expect(together.answers[i].n_seen == 40 && together.answers[i].merged == alone.answers[0].merged);
            }
            cr_expect(memcmp(together.answers[0].tokens, together.answers[1].tokens, 160) != 0);
        }
}

Test(engine_forks, a_prompt_is_computed_once_and_its_blocks_are_shared) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(1200);
    for (int p = 0; p < 2; p++) {
        kvf_engine *e = create(&c);
        struct job j;
        kvf_generate g = request_of(prompt, 96, 3, 20);
        g.n = 6;
        submit(e, &j, g, p ? "d2o rho=0.25 min_tokens=16 evict_every=2" : "full");
        int more;
        step(e, &more);
        step(e, &more); /* the prompt's second chunk: compacted, forked, a token for each */
        kvf_engine_stats s = stats_of(e);
        cr_assert_eq(s.n_prompt_tokens, 96u);
        cr_assert_eq(s.occupancy.n_seqs, 6u);
        uint64_t own, shared;
        for (uint32_t i = 0; i < 6; i++) cr_assert_eq(j.answers[i].n_seen, 1u);
        for (kvf__live *r = e->first; r; r = r->next) {
            cr_assert_eq(kvf_seq_sharing(e->manager, r->seq, &own, &shared), KVF_OK);
            cr_assert(own == 0 && shared == s.occupancy.blocks.n_held, "a compacted block was copied at the fork");
            if (r == e->first) continue; /* scores and tau are copies */
            const kvf_policy_state *state;
            (void)kvf_engine_manager(e, &state);
            uint32_t a, b;
            cr_assert(!kvf_seq_index(e->manager, e->first->seq, &a) && !kvf_seq_index(e->manager, r->seq, &b));
            for (uint32_t l = 0; l < N_LAYERS && p; l++)
                cr_assert(kvf_policy_tau(state, a, l, 0) == kvf_policy_tau(state, b, l, 0));
        }
        cr_assert_eq(s.occupancy.score_pages.n_held, p ? 6 * s.occupancy.blocks.n_held : 0u);
        step(e, &more);
        step(e,
             &more); /* two tokens more than the budget: the first eviction of each makes the layer's table its own */
        for (kvf__live *r = e->first; r; r = r->next) {
            cr_assert_eq(kvf_seq_sharing(e->manager, r->seq, &own, &shared), KVF_OK);
            cr_assert(p ? shared == 0 : shared == 12 * N_LAYERS && own == N_LAYERS, "own %llu, shared %llu",
                      (unsigned long long)own, (unsigned long long)shared);
        }
        run(e);
        kvf_engine_destroy(e);
        cr_assert_eq(s.n_prompt_tokens, 96u);
        if (!p)
            cr_expect(j.answers[0].shared == 12 * N_LAYERS && j.answers[5].shared == 0,
                      "the last holder's are its own");
    }
}

/* In a pool where they cannot all stay, samples are computed again by themselves; and at every step one may go. */
Test(engine_forks, preempted_samples_lose_and_change_nothing) {
    static const char *const kinds[] = {"full", "h2o rho=0.9 min_tokens=0 full_layers=1"};
    uint32_t prompt[MAX_TOKENS];
    for (int kind = 0; kind < 2; kind++) {
        kvf_engine_config roomy = config_of(2500), tight = config_of(kind ? 75 : 60);
        struct job together, alone;
        kvf_generate g = request_of(prompt, 30, 2, 90);
        g.n = 4;
        kvf_engine *e = create(&tight);
        submit(e, &together, g, kinds[kind]);
        run(e);
        cr_expect_gt(stats_of(e).n_preempted, 0u, "%s: the pool was not tight", kinds[kind]);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 4; i++) {
            kvf_generate one = g;
            one.n = 1;
            one.sampling.seed += i;
            answer_alone(&roomy, &alone, one, kinds[kind]);
            expect_same(&alone.answers[0], &together.answers[i], 5e-4, kinds[kind]);
        }
    }
}

Test(engine_forks, aborts_of_one_or_all_in_every_state_leave_nothing_behind) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(150);
    for (int kind = 0; kind < 4; kind++) /* samples that evict, samples, the best of some, beams */
        for (int at = 0; at < 14; at++)
            for (uint32_t which = 0; which <= 3; which++) { /* 3: all */
                kvf_engine *e = create(&c);
                struct job a, b;
                kvf_generate g = request_of(prompt, 100, 5, 8);
                g.n = 3;
                g.best_of = kind == 2 ? 5 : 0;
                g.beam_width = kind == 3 ? 4 : 0;
                if (kind == 3) g.sampling.temperature = 0;
                submit(e, &a, g, kind == 0 ? "d2o rho=0.3 min_tokens=16" : "full");
                kvf_generate other = request_of(prompt, 60, 6, 8);
                submit(e, &b, other, "d2o rho=0.4 min_tokens=16");
                int more = 1;
                for (int s = 0; s < at && more; s++) step(e, &more);
                bool live = kvf__live_find(e, a.id) != NULL;
                if (which == 3) {
                    cr_expect_eq(kvf_engine_abort(e, a.id), live ? KVF_OK : KVF_E_NOT_FOUND);
                    cr_expect(a.n_ended == a.n_results && a.n_ended == 3);
                    if (live) cr_expect_eq(a.answers[0].finish, KVF_FINISH_ABORTED);
                } else if (kind >= 2 && live) {
                    cr_expect_eq(kvf_engine_abort_sample(e, a.id, which), KVF_E_STATE);
                } else if (live) {
                    cr_expect_eq(kvf_engine_abort_sample(e, a.id, which), KVF_OK);
                    cr_expect(a.n_ended == 1 && a.answers[which].finish == KVF_FINISH_ABORTED);
                    cr_expect_eq(kvf_engine_abort_sample(e, a.id, which), KVF_E_NOT_FOUND);
                }
                kvf_error err = {""};
                cr_assert_eq(kvf_audit(e->manager, &err), KVF_OK, "%s", err.text);
                run(e);
                cr_expect(b.answers[0].n_tokens == 8, "a neighbour was harmed");
                cr_expect_eq(a.n_ended, 3u);
                for (uint32_t i = 0; i < 3 && which < 3; i++)
                    cr_expect(a.answers[i].n_tokens == 8 || (i == which && kind < 2));
                kvf_engine_destroy(e);
            }
}

Test(engine_forks, an_abort_of_a_sample_from_its_callback_leaves_the_others) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(400);
    for (uint32_t index = 0; index < 3; index++) {
        kvf_engine *e = create(&c);
        struct job j;
        kvf_generate g = request_of(prompt, 50, 5, 12);
        g.n = 3;
        submit(e, &j, g, "d2o rho=0.4 min_tokens=16");
        j.abort_at = 4;
        j.abort_index = index;
        run(e);
        for (uint32_t i = 0; i < 3; i++) cr_expect_eq(j.answers[i].n_tokens, i == index ? 4u : 12u);
        cr_expect_eq(j.answers[index].finish, KVF_FINISH_ABORTED);
        kvf_engine_destroy(e);
    }
}

Test(engine_forks, destroying_ends_every_answer) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(400);
    for (int kind = 0; kind < 3; kind++)
        for (int at = 0; at < 4; at++) {
            kvf_engine *e = create(&c);
            struct job j;
            kvf_generate g = request_of(prompt, 50, 5, 12);
            g.n = 3;
            g.best_of = kind == 1 ? 4 : 0;
            g.beam_width = kind == 2 ? 4 : 0;
            if (kind == 2) g.sampling.temperature = 0;
            submit(e, &j, g, "d2o rho=0.4 min_tokens=16");
            for (int s = 0; s < at; s++) step(e, NULL);
            kvf_engine_destroy(e);
            cr_expect_eq(j.n_ended, 3u);
            for (uint32_t i = 0; i < 3; i++) cr_expect_eq(j.answers[i].finish, KVF_FINISH_ABORTED);
        }
}

Test(engine_forks, the_best_of_many_are_the_best_by_mean_log_probability) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(2500);
    struct job all, best;
    kvf_generate g = request_of(prompt, 50, 8, 15);
    g.n = 8;
    answer_alone(&c, &all, g, "d2o rho=0.4 min_tokens=16");
    g.n = 3;
    g.best_of = 8;
    answer_alone(&c, &best, g, "d2o rho=0.4 min_tokens=16");
    cr_assert(best.n_results == 3 && best.n_ended == 3);
    bool used[8] = {false};
    for (uint32_t rank = 0; rank < 3; rank++) {
        uint32_t top = UINT32_MAX;
        for (uint32_t i = 0; i < 8; i++)
            if (!used[i] && (top == UINT32_MAX || all.answers[i].score > all.answers[top].score)) top = i;
        used[top] = true;
        expect_same(&all.answers[top], &best.answers[rank], 1e-9, "best");
        double sum = 0;
        for (uint32_t i = 0; i < 15; i++) sum += best.answers[rank].logprobs[i];
        cr_expect(fabs(best.answers[rank].score - sum / 15) < 1e-12 && best.answers[rank].n_seen == 0);
    }
}

Test(engine_forks, prompts_alone_have_as_many_empty_answers) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(400);
    for (int kind = 0; kind < 3; kind++) {
        struct job j;
        kvf_generate g = request_of(prompt, 50, 8, 0);
        g.n = 3;
        g.best_of = kind == 1 ? 5 : 0;
        g.beam_width = kind == 2 ? 5 : 0;
        if (kind == 2) g.sampling.temperature = 0;
        answer_alone(&c, &j, g, "full");
        cr_expect_eq(j.n_ended, 3u);
        for (uint32_t i = 0; i < 3; i++)
            cr_expect(j.answers[i].n_tokens == 0 && j.answers[i].finish == KVF_FINISH_LENGTH);
    }
}

/* ---- Beams against a naive search ---------------------------------------------------------------------------- */

typedef struct naive_beam {
    uint32_t tokens[MAX_TOKENS], n;
    double sum, score;
} naive_beam;

typedef struct naive_step {
    uint32_t from, token;
    double sum;
} naive_step;

static int by_sum(const void *a, const void *b) {
    const naive_step *x = a, *y = b;
    return (x->sum < y->sum) - (x->sum > y->sum);
}

static int by_score(const void *a, const void *b) {
    const naive_beam *x = a, *y = b;
    return (x->score < y->score) - (x->score > y->score);
}

/* Every hypothesis from scratch at every step, with the full cache, in double precision. Returns how many are in out. */
static uint32_t naive_search(const uint32_t *prompt, uint32_t n_prompt, uint32_t width, uint32_t max_tokens,
                             double penalty, bool (*is_end)(uint32_t), naive_beam *out) {
    naive_beam running[MAX_ANSWERS] = {{.n = 0}}, next[MAX_ANSWERS];
    uint32_t n_running = 1, n_out = 0, n_vocab = model->info.n_vocab;
    naive_step *all = malloc((size_t)MAX_ANSWERS * n_vocab * sizeof *all);
    for (uint32_t length = 1; length <= max_tokens; length++) {
        uint32_t n_all = 0, n_next = 0;
        for (uint32_t b = 0; b < n_running; b++) {
            uint32_t ids[MAX_TOKENS], n = n_prompt + running[b].n;
            memcpy(ids, prompt, n_prompt * sizeof *ids);
            memcpy(ids + n_prompt, running[b].tokens, running[b].n * sizeof *ids);
            double *logits = naive_logits(model, ids, n, NAIVE_PAIRS), *last = logits + (size_t)(n - 1) * n_vocab;
            double total = 0;
            for (uint32_t t = 0; t < n_vocab; t++) total += exp(last[t]);
            for (uint32_t t = 0; t < n_vocab; t++)
                all[n_all++] = (naive_step){b, t, running[b].sum + last[t] - log(total)};
            free(logits);
        }
        qsort(all, n_all, sizeof *all, by_sum);
        for (uint32_t i = 0; i < n_all && n_next < width; i++) {
            naive_beam longer = running[all[i].from];
            longer.tokens[longer.n++] = all[i].token;
            longer.sum = all[i].sum;
            longer.score = longer.sum / pow(longer.n, penalty);
            if (!is_end(all[i].token)) {
                next[n_next++] = longer;
            } else if (i < width) {
                out[n_out++] = longer;
                qsort(out, n_out, sizeof *out, by_score);
                if (n_out > width) n_out = width;
            }
        }
        memcpy(running, next, sizeof next);
        n_running = n_next;
        if (n_out == width && running[0].score <= out[width - 1].score) break;
        if (length < max_tokens) continue;
        for (uint32_t i = 0; i < n_running; i++) out[n_out++] = running[i];
        qsort(out, n_out, sizeof *out, by_score);
        if (n_out > width) n_out = width;
    }
    free(all);
    return n_out;
}

static bool never(uint32_t token) { return token == UINT32_MAX; }
static bool every_fifth(uint32_t token) { return token % 5 == 0; }

/* A tokenizer with a lot of end tokens, so that hypotheses end at any step. */
static void end_at(bool (*is_end)(uint32_t)) {
    kvf_tokenizer *t = (kvf_tokenizer *)kvf_model_tokenizer(model);
    for (uint32_t id = 0; id < t->n_vocab; id++) t->is_end[id] = is_end(id);
}

Test(engine_forks, beam_search_finds_what_a_naive_one_finds) {
    static const struct {
        uint32_t width, n, max_tokens;
        double penalty;
        bool ends;
    } cases[] = {{1, 1, 10, 1, false}, {4, 4, 12, 1, false}, {3, 2, 12, 0, true},   {4, 4, 12, 1, true},
                 {4, 3, 12, 2, true},  {6, 6, 8, -1, true},  {8, 1, 10, 0.6, true}, {2, 2, 1, 1, true}};
    uint32_t prompt[MAX_TOKENS], n_stopped = 0;
    kvf_engine_config c = config_of(1200);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (uint32_t seed = 1; seed <= 4; seed++) {
            end_at(cases[i].ends ? every_fifth : never);
            naive_beam want[2 * MAX_ANSWERS];
            struct job j;
            kvf_generate g = request_of(prompt, 9 + 4 * seed, seed, cases[i].max_tokens);
            uint32_t n = naive_search(prompt, g.n_tokens, cases[i].width, cases[i].max_tokens, cases[i].penalty,
                                      cases[i].ends ? every_fifth : never, want);
            cr_assert_geq(n, cases[i].n);
            g.n = cases[i].n;
            g.beam_width = cases[i].width;
            g.length_penalty = cases[i].penalty;
            g.sampling.temperature = 0;
            g.ignore_end = 0;
            answer_alone(&c, &j, g, "full");
            cr_assert_eq(j.n_ended, cases[i].n);
            for (uint32_t k = 0; k < j.n_ended; k++) {
                const struct answer *a = &j.answers[k];
                cr_assert_eq(a->n_tokens, want[k].n, "case %zu, seed %u, rank %u: %u and %u tokens", i, seed, k,
                             a->n_tokens, want[k].n);
                for (uint32_t t = 0; t < a->n_tokens; t++)
                    cr_assert_eq(a->tokens[t], want[k].tokens[t], "case %zu, seed %u, rank %u: token %u", i, seed, k,
                                 t);
                cr_assert_leq(fabs(a->score - want[k].score), 1e-4 * (1 + fabs(want[k].score)));
                bool stopped = cases[i].ends && every_fifth(a->tokens[a->n_tokens - 1]);
                cr_assert_eq(a->finish, stopped ? KVF_FINISH_STOP : KVF_FINISH_LENGTH);
                n_stopped += stopped;
            }
        }
    cr_assert_gt(n_stopped, 20u, "hardly any hypothesis ended");
}

/* Whatever has been forked, dropped and evicted on the way: the tokens of a hypothesis, fed to a request of its own, give
 * its log-probabilities. */
Test(engine_forks, a_hypothesis_is_what_a_request_fed_its_tokens_is) {
    uint32_t prompt[MAX_TOKENS];
    for (int p = 0; p < N_POLICIES; p++) {
        kvf_engine_config c = config_of(2500);
        c.heads_per_group = 1 + p % 2;
        struct job beams, alone;
        kvf_generate g = request_of(prompt, p == N_POLICIES - 1 ? 40 : 90, 3 + p, 40);
        g.sampling.temperature = 0;
        g.beam_width = g.n = 5;
        g.length_penalty = 1;
        answer_alone(&c, &beams, g, policies[p]);
        for (uint32_t i = 0; i < 5; i++) {
            kvf_generate one = g;
            one.beam_width = one.n = 0;
            one.forced = beams.answers[i].tokens;
            answer_alone(&c, &alone, one, policies[p]);
            expect_same(&alone.answers[0], &beams.answers[i], 5e-4, policies[p]);
            cr_expect_eq(alone.answers[0].merged, beams.answers[i].merged);
        }
    }
}

Test(engine_forks, stop_strings_end_hypotheses_and_cut_their_text) {
    uint32_t prompt[MAX_TOKENS], n_stopped = 0;
    kvf_engine_config c = config_of(1200);
    for (uint32_t seed = 1; seed < 8; seed++) {
        struct job j;
        char stop[2] = "";
        const char *stops[] = {"never said", stop};
        kvf_generate g = request_of(prompt, 20, seed, 30);
        g.sampling.temperature = 0;
        g.beam_width = g.n = 4;
        g.length_penalty = 1;
        answer_alone(&c, &j, g, "full");
        for (const char *t = j.answers[0].text; *t && !stop[0]; t++)
            if (*t > 0 && t > j.answers[0].text + 3) stop[0] = *t;
        if (!stop[0]) continue;
        g.stop = stops;
        g.n_stop = 2;
        answer_alone(&c, &j, g, "full");
        for (uint32_t i = 0; i < 4; i++) {
            cr_expect_null(strchr(j.answers[i].text, stop[0]), "%s", j.answers[i].text);
            n_stopped += j.answers[i].finish == KVF_FINISH_STOP;
        }
    }
    cr_expect_gt(n_stopped, 2u);
}

/* Beside other requests, in pools from roomy to hopeless: the search either gives the same or, alone and without room,
 * ends with length; and the others are not harmed. */
Test(engine_forks, beams_in_a_tight_pool_wait_for_one_another) {
    static const char *const kinds[] = {"full", "h2o rho=0.5 min_tokens=16", "h2o budget_tokens=40"};
    uint32_t prompt[MAX_TOKENS], n_preempted = 0, n_short = 0;
    for (int kind = 0; kind < 3; kind++) {
        kvf_engine_config roomy = config_of(2500);
        struct job want, other_want;
        kvf_generate g = request_of(prompt, 30, 4, 60), other = request_of(prompt, 30, 4, 60);
        g.sampling.temperature = 0;
        g.beam_width = g.n = 4;
        g.length_penalty = 1;
        answer_alone(&roomy, &want, g, kinds[kind]);
        answer_alone(&roomy, &other_want, other, "full");
        for (uint32_t n_blocks = 36; n_blocks < 160; n_blocks += 7) {
            kvf_engine_config tight = config_of(n_blocks);
            kvf_engine *e = create(&tight);
            struct job before, beams, after, twice;
            submit(e, &before, other, "full");
            kvf_policy_options o = options_of(kinds[kind]);
            kvf_generate policy = g;
            policy.policy = &o;
            memset(&beams, 0, sizeof beams);
            memset(&twice, 0, sizeof twice);
            beams.engine = twice.engine = e;
            policy.user = &beams;
            bool fits = kvf_engine_submit(e, &policy, &beams.id, NULL) == KVF_OK;
            policy.user = &twice;
            fits &= kvf_engine_submit(e, &policy, &twice.id, NULL) == KVF_OK;
            submit(e, &after, other, "full");
            run(e);
            n_preempted += (uint32_t)stats_of(e).n_preempted;
            kvf_engine_destroy(e);
            expect_same(&other_want.answers[0], &before.answers[0], 5e-4, "before");
            expect_same(&other_want.answers[0], &after.answers[0], 5e-4, "after");
            for (int k = 0; k < 2 && fits; k++) {
                const struct job *j = k ? &twice : &beams;
                cr_assert_eq(j->n_ended, 4u);
                if (j->answers[0].n_tokens < 60) n_short++;
                for (uint32_t i = 0; i < 4 && j->answers[0].n_tokens == 60; i++)
                    expect_same(&want.answers[i], &j->answers[i], 5e-4, kinds[kind]);
            }
        }
    }
    cr_expect(n_preempted > 20 && n_short > 0, "%u preempted, %u cut short", n_preempted, n_short);
}

/* ---- Refusals, memory ------------------------------------------------------------------------------------------- */

static void expect_refused(kvf_engine *e, const kvf_generate *g, kvf_status want, const char *words) {
    kvf_error err = {""};
    kvf_status st = kvf_engine_submit(e, g, NULL, &err);
    cr_expect_eq(st, want, "%s: %s", kvf_status_name(st), err.text);
    cr_expect(strstr(err.text, words) != NULL, "'%s' lacks '%s'", err.text, words);
}

Test(engine_forks, what_cannot_be_is_refused_by_name) {
    kvf_engine_config c = config_of(60);
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    struct job j = {.engine = e};
    kvf_generate base = request_of(prompt, 30, 2, 20), g = base;
    base.user = g.user = &j;
    g.n = 129;
    expect_refused(e, &g, KVF_E_INVALID, "n 129: must be at most 128");
    g.n = 3;
    g.best_of = 2;
    expect_refused(e, &g, KVF_E_INVALID, "best_of 2: must be from n 3");
    g.best_of = 200;
    expect_refused(e, &g, KVF_E_INVALID, "best_of 200");
    g.best_of = 0;
    g.forced = prompt;
    expect_refused(e, &g, KVF_E_INVALID, "forced");
    g = base;
    g.beam_width = 4;
    expect_refused(e, &g, KVF_E_INVALID, "temperature 1.2");
    g.sampling.temperature = 0;
    g.n = 5;
    expect_refused(e, &g, KVF_E_INVALID, "beam_width 4: must be from n 5 to 16");
    g.n = 1;
    g.beam_width = 17;
    expect_refused(e, &g, KVF_E_INVALID, "beam_width 17");
    g.beam_width = 4;
    g.best_of = 2;
    expect_refused(e, &g, KVF_E_INVALID, "best_of 2");
    g.best_of = 0;
    g.length_penalty = NAN;
    expect_refused(e, &g, KVF_E_INVALID, "length_penalty");
    g.length_penalty = 1;
    g.beam_width = 16; /* 30 tokens take 12 blocks, each further beam 3 to grow by */
    g.n_tokens = 100;
    expect_refused(e, &g, KVF_E_NEVER_FITS, "at most 8");
    g.beam_width = 8;
    j.id = 0;
    cr_assert_eq(kvf_engine_submit(e, &g, &j.id, NULL), KVF_OK);
    run(e);
    cr_expect_eq(j.n_ended, 1u);
    kvf_engine_destroy(e);
}

struct failing {
    int64_t left, alive;
};

static void *failing_alloc(void *ctx, size_t bytes, size_t align) {
    struct failing *f = ctx;
    if (f->left-- <= 0) return NULL;
    f->alive++;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}

static void failing_free(void *ctx, void *p, size_t bytes) {
    (void)bytes;
    ((struct failing *)ctx)->alive--;
    free(p);
}

Test(engine_forks, every_allocation_of_a_submission_may_fail) {
    struct failing f = {INT64_MAX, 0};
    kvf_engine_config c = config_of(300);
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    for (int kind = 0; kind < 3; kind++) {
        struct job j;
        kvf_error err = {""};
        int64_t n = 0;
        for (;; n++) {
            int64_t before = f.alive;
            memset(&j, 0, sizeof j);
            j.engine = e;
            kvf_generate g = request_of(prompt, 30, 2, 6);
            g.n = 2;
            g.n_top_logprobs = 2;
            g.best_of = kind == 1 ? 3 : 0;
            g.beam_width = kind == 2 ? 3 : 0;
            if (kind == 2) g.sampling.temperature = 0;
            g.user = &j;
            f.left = n;
            kvf_status st = kvf_engine_submit(e, &g, &j.id, &err);
            f.left = INT64_MAX;
            if (!st) break;
            cr_assert_eq(st, KVF_E_NO_MEMORY, "%s", err.text);
            cr_assert_eq(f.alive, before);
        }
        cr_expect_gt(n, 8);
        run(e);
        cr_expect_eq(j.n_ended, 2u);
    }
    kvf_engine_destroy(e);
    cr_expect_eq(f.alive, 0);
}
