/* One prompt, samples with policies of their own: each is to the bit what a request of its own is, whatever else happens. */
#define _DEFAULT_SOURCE
#include "tests/engine_variants_rig.h"

TestSuite(engine_variants, .init = open_model, .fini = close_model);

static const char *const all[] = {
    "full",
    "streaming rho=0.3 min_tokens=16",
    "h2o rho=0.3 min_tokens=16",
    "d2o rho=0.3 min_tokens=16",
    "d2o serving rho=0.4 min_tokens=16",
    "d2o authors rho=0.3",
    "d2o rho=0.3 min_tokens=16 merge=mass merge_keys=0 gate=0.2",
    "h2o rho=0.3 min_tokens=16 merge=attention gate=0.2",
    "d2o rho=0.3 min_tokens=16 scope=layer gqa=max sinks_extra=1 score=prompt_plus_current score_norm=v evict_every=5",
    "d2o budget_tokens=64",
    "d2o rho=1",
    "h2o budget_tokens=120", /* more than the prompt has */
    "full",
    "d2o rho=0.3 min_tokens=16", /* once more */
    "h2o rho=1 budget_may_change=1",
};
enum { N_ALL = sizeof all / sizeof *all };

static const char *const others[] = {
    "uniform rho=0.3 min_tokens=16",
    "evict rho=0.3 min_tokens=16",
    "reciprocal rho=0.3 min_tokens=16",
    "exp_decay rho=0.3 min_tokens=16",
    "roco rho=0.3 min_tokens=16",
    "snapkv rho=0.3 min_tokens=16 window=8 score_window=16",
    "pyramidkv rho=0.3 min_tokens=16 window=16 score_window=16",
    "cam rho=0.3 min_tokens=16",
    "sirllm rho=0.3 min_tokens=16",
    "fold rho=0.3 min_tokens=16",
    "h2o rho=0.3 min_tokens=16 score=window score_window=16 score_norm=v score_pool=5",
    "d2o rho=0.3 min_tokens=16 metric=entropy score=sqrt",
    "d2o rho=0.3 min_tokens=16 metric=mass score=mean",
};
enum { N_OTHERS = sizeof others / sizeof *others };

/* ---- What each sample is ----------------------------------------------------------------------------------- */

Test(engine_variants, each_sample_is_what_a_request_of_its_own_is) {
    static struct job together, other;
    uint32_t prompt[MAX_TOKENS];
    for (int kind = 0; kind < 8; kind++) {
        kvf_engine_config c = config_of(4000);
        c.heads_per_group = 1 + (kind & 1);
        c.prefix_cache = kind >> 1 & 1;
        c.chunk = kind & 4 ? 32 : 64;
        kvf_generate g = request_of(prompt, 101, 3 + kind, 24);
        if (kind & 1) g.forced = prompt + 110; /* the prompt's array goes on */
        answer_alone(&c, &together, g, all, N_ALL);
        expect_as_alone(&c, &together, g, all, N_ALL);
        answer_alone(&c, &other, g, others, N_OTHERS);
        expect_as_alone(&c, &other, g, others, N_OTHERS);
        cr_expect(kind & 1 || memcmp(together.answers[0].tokens, together.answers[11].tokens, 24 * 4) != 0);
    }
}

/* What goes by the last queries, squares or probabilities too: one prompt takes what any of them needs. */
Test(engine_variants, figures_of_all_kinds_over_one_prompt) {
    static struct job together;
    static const char *const policies[] = {"full",
                                           "roco rho=0.4 min_tokens=16 evict_every=3",
                                           "snapkv rho=0.3 min_tokens=16 window=8 score_window=16",
                                           "d2o rho=0.3 min_tokens=16",
                                           "pyramidkv rho=0.3 min_tokens=16 window=16 score_window=16",
                                           "sirllm rho=0.3 min_tokens=16",
                                           "cam rho=0.3 min_tokens=16",
                                           "d2o rho=0.3 min_tokens=16 score=window score_window=16",
                                           "streaming rho=0.3 min_tokens=16"};
    enum { N = sizeof policies / sizeof *policies };
    uint32_t prompt[MAX_TOKENS];
    for (int kind = 0; kind < 4; kind++)
        for (uint32_t from = 0; from < N; from += 4) { /* others come first, or some are left out */
            kvf_engine_config c = config_of(4000);
            c.prefix_cache = kind & 1;
            c.chunk = kind & 2 ? 32 : 64;
            kvf_generate g = request_of(prompt, 101, 3 + kind, 24);
            answer_alone(&c, &together, g, policies + from, N - from);
            expect_as_alone(&c, &together, g, policies + from, N - from);
            cr_expect_eq(together.n_prompt_tokens, 101u);
        }
    kvf_engine_config c = config_of(400);
    kvf_engine *e = create(&c);
    kvf_generate g = request_of(prompt, 50, 3, 4);
    kvf_policy_options own[2] = {options_of("snapkv rho=0.3"), options_of("snapkv rho=0.3 score_window=32")};
    kvf_error err = {.text = ""};
    g.n = 2;
    g.sample_policies = own;
    cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "sample_policies[1]: score_window 32: must be that of the others, 64"), "%s", err.text);
    own[0] = options_of("roco rho=0.3"), own[1] = options_of("roco rho=0.3 gqa=max");
    cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "sample_policies[1]: gqa 1"), "%s", err.text);
    kvf_engine_destroy(e);
}

/* Behind one another in one engine, so that the later ones find the prompt, with or without a snapshot of its sums. */
Test(engine_variants, a_prompt_that_is_found_changes_nothing) {
    static struct job first, jobs[2];
    uint32_t prompt[MAX_TOKENS];
    for (uint32_t n_prompt = 63; n_prompt <= 101; n_prompt += n_prompt == 63 ? 1 : n_prompt == 64 ? 1 : 36) {
        kvf_engine_config c = config_of(3000);
        kvf_generate g = request_of(prompt, n_prompt, 9, 12);
        answer_alone(&c, &first, g, all, N_ALL);
        c.prefix_cache = 1;
        for (uint32_t from = 0; from < 4; from++) { /* one whose first sample sums nothing */
            kvf_engine *e = create(&c);
            submit(e, &jobs[0], g, all + from, 1);
            run(e);
            submit(e, &jobs[1], g, all, N_ALL);
            run(e);
            for (uint32_t i = 0; i < N_ALL; i++)
                if (!(i & 1)) expect_bits(&first.answers[i], &jobs[1].answers[i], all[i]);
            cr_expect(jobs[1].answers[0].n_cached > 0 || from < 2 || n_prompt == 63, "%u of %u: nothing was found",
                      from, n_prompt);
            submit(e, &jobs[0], g, all, N_ALL);
            submit(e, &jobs[1], g, all, N_ALL);
            run(e);
            for (uint32_t i = 0; i < N_ALL; i++) {
                expect_bits(&first.answers[i], &jobs[0].answers[i], all[i]);
                expect_bits(&first.answers[i], &jobs[1].answers[i], all[i]);
            }
            cr_expect_eq(jobs[0].answers[0].n_cached, n_prompt - 1);
            kvf_engine_destroy(e);
        }
    }
}

Test(engine_variants, sixty_four_at_once) {
    static struct job together;
    static char words[64][64];
    const char *policies[64];
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(6000);
    c.max_running = 64;
    for (uint32_t i = 0; i < 64; i++) {
        static const char *const names[] = {"d2o", "h2o", "streaming", "d2o serving"};
        snprintf(words[i], sizeof words[i], "%s rho=0.%u min_tokens=16", names[i % 4], 15 + i);
        policies[i] = words[i];
    }
    policies[40] = "full";
    kvf_generate g = request_of(prompt, 90, 4, 6);
    answer_alone(&c, &together, g, policies, 64);
    cr_expect_eq(together.n_prompt_tokens, 90u, "the prompt ran more than once");
    expect_as_alone(&c, &together, g, policies, 64);
}

/* ---- Memory ---------------------------------------------------------------------------------------------------- */

static uint64_t blocks_of_sizes(const kvf_engine *e, const kvf__live *r) {
    uint32_t index;
    uint64_t n = 0;
    cr_assert_eq(kvf_seq_index(e->manager, r->seq, &index), KVF_OK);
    const kvf_layer_size *sizes = kvf_policy_sizes(e->policies, index);
    cr_assert(sizes != NULL);
    for (uint32_t l = 0; l < N_LAYERS; l++) n += kvf__ceil_div(sizes[l].keep, BLOCK) * e->n_groups;
    return n;
}

/* With a sample that keeps all, its own blocks are the prompt's and nothing is copied; else the last one takes them. */
Test(engine_variants, no_block_is_held_or_copied_that_need_not_be) {
    static struct job j;
    uint32_t prompt[MAX_TOKENS];
    static const char *const kinds[2][4] = {
        {"d2o rho=0.3 min_tokens=16", "full", "h2o rho=0.5 min_tokens=16", "streaming rho=0.4 min_tokens=16"},
        {"d2o rho=0.3 min_tokens=16", "d2o rho=0.4 min_tokens=16", "h2o rho=0.5 min_tokens=16", "h2o rho=0.2"}};
    for (int kind = 0; kind < 2; kind++) {
        kvf_engine_config c = config_of(1200);
        kvf_engine *e = create(&c);
        kvf_generate g = request_of(prompt, 93, 3, 20);
        submit(e, &j, g, kinds[kind], 4);
        int more;
        step(e, &more);
        kvf_engine_stats s = stats_of(e);
        cr_assert_eq(s.occupancy.n_seqs, 4u); /* three of them promises */
        uint64_t want = kind ? 0 : 12 * N_LAYERS * e->n_groups;
        step(e, &more);
        s = stats_of(e);
        cr_assert_eq(s.n_prompt_tokens, 93u);
        for (kvf__live *r = e->first; r; r = r->next) {
            uint64_t own, shared;
            if (r->policy.ops != kvf_policy_find("full")) want += blocks_of_sizes(e, r);
            cr_assert_eq(kvf_seq_sharing(e->manager, r->seq, &own, &shared), KVF_OK);
            cr_expect(shared == 0, "each has its own");
        }
        cr_expect_eq(s.occupancy.blocks.n_held, want);
        cr_expect_eq(j.n_copies, 0u);
        run(e);
        cr_expect_eq(stats_of(e).n_preempted, 0u);
        kvf_engine_destroy(e);
    }
}

/* In a pool where they cannot all stay each is computed again by itself, under its own policy. */
Test(engine_variants, preempted_samples_lose_and_change_nothing) {
    static struct job roomy, tight;
    static const char *const policies[] = {"full",
                                           "h2o rho=0.9 min_tokens=0 full_layers=1",
                                           "d2o rho=0.4 min_tokens=16",
                                           "full",
                                           "d2o rho=0.6 min_tokens=16",
                                           "streaming rho=0.5 min_tokens=16",
                                           "snapkv rho=0.4 min_tokens=16 window=8 score_window=16",
                                           "roco rho=0.5 min_tokens=16"};
    uint32_t prompt[MAX_TOKENS];
    uint64_t n_preempted = 0, n_prompts = 0;
    for (uint32_t n_blocks = 54; n_blocks < 120; n_blocks += 3) {
        kvf_engine_config c = config_of(2500);
        kvf_generate g = request_of(prompt, 45, 2, 60);
        if (n_blocks == 54) answer_alone(&c, &roomy, g, policies, 8);
        c = config_of(n_blocks);
        c.prefix_cache = n_blocks & 1;
        kvf_engine *e = create(&c);
        submit(e, &tight, g, policies, 8);
        run(e);
        n_preempted += stats_of(e).n_preempted;
        n_prompts += stats_of(e).n_prompt_tokens > 45;
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 8; i++) expect_bits(&roomy.answers[i], &tight.answers[i], policies[i]);
    }
    cr_expect(n_preempted > 20 && n_prompts > 5, "%llu preempted", (unsigned long long)n_preempted);
}

/* Blocks that others take away at a prompt's end: the group goes back as one, or its events make room. */
Test(engine_variants, without_room_at_the_prompts_end_all_begin_again) {
    static struct job roomy, tight;
    static const char *const policies[] = {"d2o rho=0.4 min_tokens=16", "h2o rho=0.6 min_tokens=16", "full",
                                           "d2o authors rho=0.5"};
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(2500);
    kvf_generate g = request_of(prompt, 90, 2, 10);
    answer_alone(&c, &roomy, g, policies, 4);
    c = config_of(200);
    for (uint32_t n_left = 0; n_left < 100; n_left += 3) {
        kvf_block held[200];
        uint32_t n = 0;
        kvf_engine *e = create(&c);
        submit(e, &tight, g, policies, 4);
        step(e, NULL); /* the first of two chunks: what is free now is not promised */
        for (kvf_occupancy o = stats_of(e).occupancy; n + o.blocks.n_promised + n_left < o.blocks.n_free; n++)
            cr_assert_eq(kvf_block_take(e->manager, 0, &held[n]), KVF_OK);
        step(e, NULL);
        step(e, NULL);
        for (uint32_t i = 0; i < n; i++) cr_assert_eq(kvf_block_release(e->manager, held[i]), KVF_OK);
        run(e);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 4; i++) expect_bits(&roomy.answers[i], &tight.answers[i], policies[i]);
    }
}

Test(engine_variants, what_cannot_run_together_runs_in_parts) {
    static struct job want, got;
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config roomy = config_of(4000), narrow = config_of(2500);
    narrow.max_running = 3;
    narrow.chunk = roomy.chunk = 8;
    kvf_generate g = request_of(prompt, 50, 8, 12);
    answer_alone(&roomy, &want, g, all, N_ALL);
    answer_alone(&narrow, &got, g, all, N_ALL);
    cr_expect_eq(got.n_prompt_tokens, (N_ALL + 2) / 3 * 50);
    for (uint32_t i = 0; i < N_ALL; i++) expect_bits(&want.answers[i], &got.answers[i], all[i]);
    narrow = config_of(70); /* 21 blocks are the prompt's */
    narrow.chunk = 8;
    answer_alone(&narrow, &got, g, all, N_ALL);
    cr_expect_gt(got.n_prompt_tokens, 50u);
    for (uint32_t i = 0; i < N_ALL; i++) expect_bits(&want.answers[i], &got.answers[i], all[i]);
}

/* ---- Aborts ------------------------------------------------------------------------------------------------------ */

Test(engine_variants, aborts_in_every_state_leave_the_others_as_they_were) {
    static struct job whole, j;
    uint32_t prompt[MAX_TOKENS];
    static const char *const policies[] = {"streaming rho=0.3 min_tokens=16", "d2o rho=0.3 min_tokens=16", "full",
                                           "h2o rho=0.3 min_tokens=16"};
    for (int prefix = 0; prefix < 2; prefix++) {
        kvf_engine_config c = config_of(400);
        c.prefix_cache = prefix;
        kvf_generate g = request_of(prompt, 150, 5, 8);
        answer_alone(&c, &whole, g, policies, 4);
        for (int at = 0; at < 11; at++)
            for (uint32_t which = 0; which <= 5; which++) { /* 4: the first two; 5: all */
                kvf_engine *e = create(&c);
                int more = 1;
                submit(e, &j, g, policies, 4);
                for (int s = 0; s < at && more; s++) step(e, &more);
                bool live = kvf__live_find(e, j.id) != NULL;
                if (which == 5)
                    cr_expect_eq(kvf_engine_abort(e, j.id), live ? KVF_OK : KVF_E_NOT_FOUND);
                else
                    for (uint32_t i = which % 4; i < (which == 4 ? 2 : which + 1); i++)
                        cr_expect_eq(kvf_engine_abort_sample(e, j.id, i), live ? KVF_OK : KVF_E_NOT_FOUND);
                run(e);
                cr_assert_eq(j.n_ended, 4u);
                for (uint32_t i = 0; i < 4; i++) {
                    bool gone = live && (which == 5 || i == which || (which == 4 && i < 2));
                    cr_expect_eq(j.answers[i].finish, gone ? KVF_FINISH_ABORTED : KVF_FINISH_LENGTH);
                    if (!gone) expect_bits(&whole.answers[i], &j.answers[i], policies[i]);
                }
                kvf_engine_destroy(e);
            }
    }
}

Test(engine_variants, aborts_from_callbacks_and_destroying) {
    static struct job j;
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(600);
    for (uint32_t index = 0; index < 4; index++) {
        kvf_engine *e = create(&c);
        kvf_generate g = request_of(prompt, 70, 5, 12);
        submit(e, &j, g, all, 4);
        j.abort_at = 1 + index * 3;
        j.abort_index = index;
        run(e);
        for (uint32_t i = 0; i < 4; i++) cr_expect_eq(j.answers[i].n_tokens, i == index ? j.abort_at : 12u);
        submit(e, &j, g, all, 4);
        for (uint32_t s = 0; s < index; s++) step(e, NULL);
        kvf_engine_destroy(e);
        cr_expect_eq(j.n_ended, 4u);
    }
}

/* ---- Edges ---------------------------------------------------------------------------------------------------------- */

Test(engine_variants, prompts_alone_and_single_samples) {
    static struct job j, alone;
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(600);
    kvf_generate g = request_of(prompt, 70, 5, 0);
    answer_alone(&c, &j, g, all, 6);
    cr_expect(j.n_ended == 6 && j.answers[0].finish == KVF_FINISH_LENGTH && j.answers[5].n_tokens == 0);
    cr_expect(j.answers[0].held == 70 * N_LAYERS && j.answers[2].held < j.answers[0].held);
    g.max_tokens = 9;
    answer_alone(&c, &alone, g, &all[3], 1);
    kvf_policy_options o = options_of(all[3]);
    g.policy = &o;
    answer_alone(&c, &j, g, NULL, 0);
    expect_bits(&alone.answers[0], &j.answers[0], "as policy");
}

static void expect_refused(kvf_engine *e, const kvf_generate *g, kvf_status want, const char *words) {
    kvf_error err = {.text = ""};
    kvf_status st = kvf_engine_submit(e, g, NULL, &err);
    cr_expect_eq(st, want, "%s: %s", kvf_status_name(st), err.text);
    cr_expect(strstr(err.text, words) != NULL, "'%s' lacks '%s'", err.text, words);
    cr_expect(e->first == NULL);
}

Test(engine_variants, what_cannot_be_is_refused_by_name) {
    static struct job j;
    kvf_engine_config c = config_of(60);
    c.n_score_arrays = 1;
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o[3] = {options_of("full"), options_of("d2o"), options_of("h2o")};
    kvf_generate g = request_of(prompt, 30, 2, 20);
    g.n = 3;
    g.user = &j;
    g.sample_policies = o;
    o[1].rho = 1.5;
    expect_refused(e, &g, KVF_E_INVALID, "sample_policies[1]: rho 1.5");
    o[1] = options_of("d2o score=prompt_plus_current");
    expect_refused(e, &g, KVF_E_INVALID,
                   "sample_policies[1]: n_score_arrays 1: policy d2o with its options takes more; give at least 2");
    o[1] = options_of("h2o");
    o[2].struct_size = 0;
    expect_refused(e, &g, KVF_E_INVALID, "sample_policies[2]");
    o[2].struct_size = sizeof o[2];
    g.best_of = 4;
    expect_refused(e, &g, KVF_E_INVALID, "sample_policies");
    g.best_of = 0;
    g.beam_width = 3;
    expect_refused(e, &g, KVF_E_INVALID, "sample_policies");
    g.beam_width = 0;
    g.n_tokens = 170; /* 22 blocks a table, three tables */
    expect_refused(e, &g, KVF_E_NEVER_FITS, "needs 66 blocks");
    g.n_tokens = 30;
    submit(e, &j, g, all, 3);
    kvf_error err = {.text = ""};
    for (int at = 0; at < 3; at++) {
        cr_expect_eq(kvf_engine_set_budget(e, j.id, 0.2, 0, &err), KVF_E_STATE);
        cr_expect(strstr(err.text, "policies of their own") != NULL);
        step(e, NULL);
    }
    run(e);
    kvf_engine_destroy(e);
}

Test(engine_variants, every_allocation_of_a_submission_may_fail) {
    struct failing f = {INT64_MAX, 0};
    static struct job j;
    kvf_engine_config c = config_of(300);
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o[3] = {options_of("full"), options_of("d2o"), options_of("h2o")};
    kvf_generate g = request_of(prompt, 30, 2, 6);
    kvf_status st;
    int64_t n = 0;
    g.n = 3;
    g.sample_policies = o;
    g.user = &j;
    memset(&j, 0, sizeof j);
    j.engine = e;
    do {
        int64_t before = f.alive;
        f.left = n++;
        st = kvf_engine_submit(e, &g, &j.id, NULL);
        f.left = INT64_MAX;
        cr_assert(st == KVF_OK || (st == KVF_E_NO_MEMORY && f.alive == before));
    } while (st);
    cr_expect_gt(n, 8);
    run(e);
    cr_expect_eq(j.n_ended, 3u);
    kvf_engine_destroy(e);
    cr_expect_eq(f.alive, 0);
}

/* ---- Logits and averages -------------------------------------------------------------------------------------------- */

struct seen {
    struct job job;
    uint32_t n[4];
    float logits[4][16][300];
    uint32_t n_vocab;
};

static void on_logits(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits) {
    struct seen *s = user;
    cr_assert(index < 4 && step == s->n[index] && request == s->job.id && s->job.answers[index].n_seen == step);
    memcpy(s->logits[index][s->n[index]++], logits, s->n_vocab * sizeof *logits);
}

Test(engine_variants, logits_come_before_their_token) {
    static struct seen s[2];
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(600);
    for (int forced = 0; forced < 2; forced++) {
        kvf_generate g = request_of(prompt, 70, 5, 9);
        if (forced) g.forced = prompt + 100;
        g.on_logits = on_logits;
        memset(&s[0], 0, sizeof s[0]);
        s[0].n_vocab = kvf_model_get_info(model)->n_vocab;
        cr_assert_leq(s[0].n_vocab, 300u);
        answer_alone(&c, &s[0].job, g, all, 4);
        for (uint32_t i = 0; i < 4; i++) {
            cr_assert_eq(s[0].n[i], 9u);
            kvf_generate one = g;
            one.sampling.seed += i;
            memset(&s[1], 0, sizeof s[1]);
            s[1].n_vocab = s[0].n_vocab;
            kvf_policy_options o = options_of(all[i]);
            one.policy = &o;
            answer_alone(&c, &s[1].job, one, NULL, 0);
            cr_assert_eq(s[1].n[0], 9u);
            for (uint32_t at = 0; at < 9; at++) {
                const float *logits = s[0].logits[i][at];
                cr_assert(!memcmp(logits, s[1].logits[0][at], s[0].n_vocab * sizeof *logits), "sample %u, step %u", i,
                          at);
                double max = -INFINITY, sum = 0;
                for (uint32_t v = 0; v < s[0].n_vocab; v++) max = KVF__MAX(max, (double)logits[v]);
                for (uint32_t v = 0; v < s[0].n_vocab; v++) sum += exp((double)logits[v] - max);
                double logprob = (double)logits[s[0].job.answers[i].tokens[at]] - max - log(sum);
                if (forced) cr_expect_float_eq(logprob, s[0].job.answers[i].logprobs[at], 1e-9);
            }
        }
    }
}

/* Of full: what it holds at each step. Of a policy with sizes: their reserve. Preemption changes neither. */
Test(engine_variants, blocks_are_averaged_over_the_decode_steps) {
    static struct job j, tight;
    uint32_t prompt[MAX_TOKENS];
    static const char *const policies[] = {"full", "d2o rho=0.4 min_tokens=16 evict_every=5",
                                           "d2o serving rho=0.5 min_tokens=16", "full"};
    kvf_engine_config c = config_of(2500);
    kvf_generate g = request_of(prompt, 45, 2, 60);
    answer_alone(&c, &j, g, policies, 4);
    uint64_t want = 0;
    for (uint32_t n = 46; n < 45 + 60; n++) want += kvf__ceil_div(n, BLOCK) * N_LAYERS;
    for (uint32_t i = 0; i < 4; i++) {
        const struct answer *a = &j.answers[i];
        cr_expect_eq(a->n_block_steps, 59u);
        cr_expect_eq(a->reserved_block_steps, i % 3 ? 59 * a->reserve_blocks : want);
        cr_expect(i % 3 ? a->block_steps <= a->reserved_block_steps : a->block_steps == want);
    }
    cr_expect_lt(j.answers[1].block_steps, j.answers[1].reserved_block_steps);
    for (int replays = 0; replays < 2; replays++) {
        c = config_of(60);
        c.deterministic = replays;
        kvf_engine *e = create(&c);
        submit(e, &tight, g, policies, 4);
        run(e);
        cr_expect_gt(stats_of(e).n_preempted, 0u);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 4; i++) {
            const struct answer *a = &tight.answers[i];
            cr_expect_eq(a->n_block_steps, 59u, "%u", a->n_block_steps);
            cr_expect_eq(a->reserved_block_steps, j.answers[i].reserved_block_steps);
            cr_expect_eq(a->block_steps, j.answers[i].block_steps);
        }
    }
}
