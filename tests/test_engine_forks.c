/* Several answers to one prompt: samples as separate requests would give them, what is shared, preemption, aborts,
 * refusals. */
#define _DEFAULT_SOURCE
#include "tests/engine_forks_rig.h"
#include "tests/failing.h"

TestSuite(engine_forks, .init = open_model, .fini = close_model);

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
                kvf_error err = {.text = ""};
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

Test(engine_forks, samples_beyond_max_running_run_in_parts) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config roomy = config_of(2500), narrow = config_of(2500);
    narrow.max_running = 3;
    narrow.chunk = 8; /* prompts of two parts may end in one step */
    for (int ranked = 0; ranked < 2; ranked++) {
        struct job want, got;
        kvf_generate g = request_of(prompt, 30, 8, 12);
        g.n = ranked ? 2 : 8;
        g.best_of = ranked ? 8 : 0;
        answer_alone(&roomy, &want, g, "d2o rho=0.6 min_tokens=16");
        kvf_engine *e = create(&narrow);
        submit(e, &got, g, "d2o rho=0.6 min_tokens=16");
        run(e);
        cr_expect_eq(stats_of(e).n_prompt_tokens, 3u * 30u);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < g.n; i++) expect_same(&want.answers[i], &got.answers[i], 2e-4, "in parts");
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

/* ---- Refusals, memory ------------------------------------------------------------------------------------------- */

static void expect_refused(kvf_engine *e, const kvf_generate *g, kvf_status want, const char *words) {
    kvf_error err = {.text = ""};
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
    expect_refused(e, &g, KVF_E_INVALID, "beam_width 4: must be from n 5 to 128");
    g.n = 1;
    g.beam_width = 17;
    expect_refused(e, &g, KVF_E_INVALID, "max_running 16: the 17 hypotheses of beam_width");
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

Test(engine_forks, every_allocation_of_a_submission_may_fail) {
    struct failing f = {INT64_MAX, 0};
    kvf_engine_config c = config_of(300);
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    for (int kind = 0; kind < 3; kind++) {
        struct job j;
        kvf_error err = {.text = ""};
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
