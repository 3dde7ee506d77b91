/* Beam search: against a naive one, replayed, in tight pools. */
#define _DEFAULT_SOURCE
#include "tests/engine_forks_rig.h"

#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/naive_llama.h"

TestSuite(engine_beams, .init = open_model, .fini = close_model);

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

Test(engine_beams, beam_search_finds_what_a_naive_one_finds) {
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
Test(engine_beams, a_hypothesis_is_what_a_request_fed_its_tokens_is) {
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

Test(engine_beams, stop_strings_end_hypotheses_and_cut_their_text) {
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
Test(engine_beams, beams_in_a_tight_pool_wait_for_one_another) {
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
