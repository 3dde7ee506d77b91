/* The engine on a tiny random model: equal results however the work is cut, exact memory, refusals, aborts, preemption. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"
#include "tests/failing.h"

TestSuite(engine, .init = open_model, .fini = close_model);

static const char *const policies[] = {ENGINE_POLICIES};
enum { N_POLICIES = sizeof policies / sizeof *policies };

/* The tiny model's attention is nearly even, so that rounding may turn which token goes; of what folds by attention, the
 * rest then differs. Those are compared where nothing rounds otherwise. */
static int by_the_bit(const char *policy) { return strstr(policy, "fold") || strstr(policy, "attention"); }

/* ---- Results ------------------------------------------------------------------------------------------------ */

Test(engine, rho_1_is_full_bit_for_bit) {
    kvf_engine_config c = config_of(400);
    struct answer full, other;
    const char *name;
    answer_alone(&c, &full, 150, 1, 40, "full");
    cr_expect_eq(full.held, full.full);
    for (uint32_t i = 1; (name = kvf_policy_name(i)); i++) {
        char policy[64];
        snprintf(policy, sizeof policy, "%s rho=1", name);
        answer_alone(&c, &other, 150, 1, 40, policy);
        expect_same(&full, &other, 0, policy);
        cr_expect_eq(other.held, other.full, "%s", policy);
    }
}

Test(engine, a_request_is_the_same_alone_and_in_a_batch) {
    kvf_engine_config c = config_of(1200);
    for (int p = 0; p < N_POLICIES; p++) {
        struct answer alone[3], together[3];
        memset(together, 0, sizeof together);
        c.deterministic = by_the_bit(policies[p]);
        kvf_engine *e = create(&c);
        for (uint32_t i = 0; i < 3; i++) submit(e, &together[i], 60 + 50 * i, i, 30, policies[p]);
        run(e);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 3; i++) {
            answer_alone(&c, &alone[i], 60 + 50 * i, i, 30, policies[p]);
            expect_same(&alone[i], &together[i], 2e-4, policies[p]);
        }
    }
}

Test(engine, chunks_threads_and_head_groups_do_not_matter) {
    for (int p = 0; p < N_POLICIES; p++) {
        kvf_engine_config c = config_of(1200);
        struct answer base, other;
        c.deterministic = by_the_bit(policies[p]);
        answer_alone(&c, &base, 150, 3, 30, policies[p]);
        c.n_threads = 1;
        answer_alone(&c, &other, 150, 3, 30, policies[p]);
        expect_same(&base, &other, 2e-4, "threads");
        c.chunk = 8;
        answer_alone(&c, &other, 150, 3, 30, policies[p]);
        expect_same(&base, &other, 2e-4, "chunk 8");
        c.chunk = 512;
        answer_alone(&c, &other, 150, 3, 30, policies[p]);
        expect_same(&base, &other, 2e-4, "chunk 512");
        c.heads_per_group = 1;
        answer_alone(&c, &other, 150, 3, 30, policies[p]);
        other.held /= 2; /* twice the tables */
        expect_same(&base, &other, 2e-4, "head groups of one");
    }
}

Test(engine, requests_of_different_policies_share_a_batch) {
    kvf_engine_config c = config_of(2000);
    c.deterministic = 1;
    struct answer alone, together[N_POLICIES];
    memset(together, 0, sizeof together);
    kvf_engine *e = create(&c);
    for (uint32_t i = 0; i < N_POLICIES; i++) submit(e, &together[i], 90, i, 20, policies[i]);
    run(e);
    kvf_engine_destroy(e);
    for (uint32_t i = 0; i < N_POLICIES; i++) {
        answer_alone(&c, &alone, 90, i, 20, policies[i]);
        expect_same(&alone, &together[i], 0, policies[i]);
    }
}

Test(engine, sampling_depends_on_the_seed_alone) {
    kvf_engine_config c = config_of(400);
    struct answer a[3];
    for (int i = 0; i < 3; i++) {
        uint32_t prompt[MAX_TOKENS];
        kvf_engine *e = create(&c);
        memset(&a[i], 0, sizeof a[i]);
        a[i].engine = e;
        kvf_generate g = request_of(prompt, 20, 5, 30, &a[i]);
        g.sampling = (kvf_sampling){.temperature = 1.5f, .top_k = 50, .top_p = 0.95f, .seed = i == 2 ? 10u : 9u};
        cr_assert_eq(kvf_engine_submit(e, &g, NULL, NULL), KVF_OK);
        run(e);
        kvf_engine_destroy(e);
    }
    expect_same(&a[0], &a[1], 0, "same seed");
    cr_expect_neq(memcmp(a[0].tokens, a[2].tokens, 30 * sizeof(uint32_t)), 0, "another seed, the same tokens");
}

/* ---- Memory --------------------------------------------------------------------------------------------------- */

Test(engine, compaction_holds_exactly_what_it_says) {
    for (uint32_t group = 1; group <= 2; group++)
        for (uint32_t k = 1; k <= 8; k += 7) {
            kvf_engine_config c = config_of(1200);
            c.heads_per_group = group;
            kvf_engine *e = create(&c);
            char policy[128];
            snprintf(policy, sizeof policy, "d2o rho=0.25 min_tokens=16 evict_every=%u", k);
            struct answer a[3];
            memset(a, 0, sizeof a);
            for (uint32_t i = 0; i < 3; i++) {
                a[i].k = k;
                submit(e, &a[i], 100 + 30 * i, i, 60, policy);
            }
            run(e);
            for (uint32_t i = 0; i < 3; i++) cr_expect(a[i].merged > 0 && a[i].dropped > 0);
            kvf_engine_destroy(e);
        }
}

Test(engine, freed_blocks_serve_other_requests_at_once) {
    /* 280 tokens need 35 blocks in each of 3 layers: 110 blocks hold one such request and no second prompt of 200.
     * Compressed to a tenth, several run together. */
    kvf_engine_config c = config_of(110);
    uint32_t running[2];
    for (int compressed = 0; compressed < 2; compressed++) {
        kvf_engine *e = create(&c);
        struct answer a[4];
        memset(a, 0, sizeof a);
        for (uint32_t i = 0; i < 4; i++)
            submit(e, &a[i], 200, i, 80, compressed ? "d2o rho=0.1 min_tokens=16" : "full");
        run(e);
        kvf_engine_stats s = {.struct_size = sizeof s};
        cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
        running[compressed] = s.n_running_max;
        for (uint32_t i = 0; i < 4; i++) cr_expect_eq(a[i].n_tokens, 80u);
        kvf_engine_destroy(e);
    }
    cr_expect_eq(running[0], 1u);
    cr_expect_geq(running[1], 2u);
}

Test(engine, the_first_overflow_of_a_short_prompt_finds_its_sizes) {
    kvf_engine_config c = config_of(400);
    struct answer a;
    answer_alone(&c, &a, 20, 2, 100, "d2o budget_tokens=40 evict_every=1");
    cr_expect_eq(a.n_tokens, 100u);
    cr_expect_leq(a.held, 3u * 41u);
    cr_expect_geq(a.held, 3u * 39u);
    cr_expect_gt(a.merged + a.dropped, 0u);
}

/* Also one whose policy evicts in some layers: its scores, sizes and events are rebuilt by the replay. (No merges here: whether
 * a cosine reaches tau may turn on the last bit, which depends on the batch.) */
Test(engine, preempted_requests_lose_and_change_nothing) {
    static const char *const kinds[] = {"full", "h2o rho=0.9 min_tokens=0 full_layers=1"};
    kvf_engine_config roomy = config_of(1200), tight = config_of(60);
    for (int kind = 0; kind < 2; kind++) {
        struct answer a[4], alone;
        memset(a, 0, sizeof a);
        kvf_engine *e = create(&tight);
        for (uint32_t i = 0; i < 4; i++) submit(e, &a[i], 30 + i, i, 100, kinds[kind]);
        run(e);
        kvf_engine_stats s = {.struct_size = sizeof s};
        cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
        cr_expect_gt(s.n_preempted, 0u, "%s: the pool was not tight", kinds[kind]);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 4; i++) {
            answer_alone(&roomy, &alone, 30 + i, i, 100, kinds[kind]);
            expect_same(&alone, &a[i], 5e-4, kinds[kind]);
        }
    }
}

/* With `deterministic` all that differs is how long it takes: to the bit, and merges included. */
Test(engine, deterministic_is_bit_for_bit_in_any_batch) {
    enum { N = 6 };
    static const uint32_t chunks[] = {64, 8, 256}, threads[] = {2, 1, 3};
    for (int p = 0; p < N_POLICIES; p++) {
        kvf_engine_config c = config_of(1200);
        c.deterministic = 1;
        c.kv_dtype = p % 2 ? KVF_F16 : KVF_F32;
        struct answer alone[N], together[N];
        for (uint32_t i = 0; i < N; i++) answer_alone(&c, &alone[i], 20 + 50 * i, i, 60, policies[p]);
        for (int cut = 0; cut < 3; cut++) {
            c.chunk = chunks[cut];
            c.n_threads = threads[cut];
            memset(together, 0, sizeof together);
            kvf_engine *e = create(&c);
            for (uint32_t i = N; i-- > 0;) submit(e, &together[i], 20 + 50 * i, i, 60, policies[p]);
            run(e);
            kvf_engine_destroy(e);
            for (uint32_t i = 0; i < N; i++) expect_same(&alone[i], &together[i], 0, policies[p]);
        }
    }
}

Test(engine, deterministic_is_bit_for_bit_after_a_preemption) {
    static const char *const kinds[] = {"full", "d2o rho=1", "streaming rho=1",
                                        "h2o rho=0.9 min_tokens=0 full_layers=1",
                                        "d2o rho=0.9 min_tokens=0 full_layers=1"};
    kvf_engine_config roomy = config_of(1200), tight = config_of(60);
    roomy.deterministic = tight.deterministic = 1;
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        struct answer a[4], alone;
        memset(a, 0, sizeof a);
        kvf_engine *e = create(&tight);
        for (uint32_t i = 0; i < 4; i++) submit(e, &a[i], 30 + i, i, 100, kinds[kind]);
        run(e);
        kvf_engine_stats s = {.struct_size = sizeof s};
        cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
        cr_expect_gt(s.n_preempted, 0u, "%s: the pool was not tight", kinds[kind]);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 4; i++) {
            answer_alone(&roomy, &alone, 30 + i, i, 100, kinds[kind]);
            expect_same(&alone, &a[i], 0, kinds[kind]);
        }
    }
}

Test(engine, a_short_prompt_overflows_under_a_deferred_policy_too) {
    static const char *const kinds[] = {"d2o authors full_layers=none budget_tokens=40",
                                        "h2o budget_tokens=40 defer_first_decode=1"};
    kvf_engine_config c = config_of(400);
    for (int kind = 0; kind < 2; kind++) {
        struct answer a;
        answer_alone(&c, &a, 20, 2, 100, kinds[kind]);
        cr_expect_eq(a.n_tokens, 100u);
        cr_expect_leq(a.held, 3u * 41u, "%s holds %llu", kinds[kind], (unsigned long long)a.held);
        cr_expect_gt(a.merged + a.dropped, 0u, "%s never evicts", kinds[kind]);
    }
}

Test(engine, alone_in_a_full_pool_a_request_ends_with_length) {
    kvf_engine_config c = config_of(18); /* 6 blocks of 8 in each of 3 layers: 48 tokens */
    struct answer a;
    answer_alone(&c, &a, 40, 1, 100, "full");
    cr_expect_eq(a.finish, KVF_FINISH_LENGTH);
    cr_expect(a.held == a.full && a.held == 3u * 48u && a.blocks[2] == 6, "its figures went with its sequence");
    cr_expect_geq(a.n_tokens, 8u);
    cr_expect_leq(a.n_tokens, 9u);
}

Test(engine, the_context_ends_a_request_with_length) {
    kvf_engine_config c = config_of(400);
    c.max_context = 64;
    struct answer a;
    answer_alone(&c, &a, 50, 1, 100, "d2o rho=0.5 min_tokens=16");
    cr_expect_eq(a.finish, KVF_FINISH_LENGTH);
    cr_expect_eq(a.n_prompt + a.n_tokens, 64u);
}

/* ---- Ends -------------------------------------------------------------------------------------------------------- */

Test(engine, stop_strings_cut_the_text_wherever_they_begin) {
    kvf_engine_config c = config_of(400);
    struct answer whole, a;
    answer_alone(&c, &whole, 20, 5, 40, "full");
    /* A stop string of the text itself, across tokens: find one of plain bytes. */
    size_t n = strlen(whole.text), at = 4;
    cr_assert_gt(n, 12u);
    char stop[8];
    memcpy(stop, whole.text + at, 7);
    stop[7] = 0;
    size_t first = (size_t)(strstr(whole.text, stop) - whole.text);
    uint32_t prompt[MAX_TOKENS];
    const char *stops[] = {"never said", stop};
    memset(&a, 0, sizeof a);
    kvf_engine *e = create(&c);
    a.engine = e;
    kvf_generate g = request_of(prompt, 20, 5, 40, &a);
    g.stop = stops;
    g.n_stop = 2;
    cr_assert_eq(kvf_engine_submit(e, &g, NULL, NULL), KVF_OK);
    run(e);
    kvf_engine_destroy(e);
    if (strstr(stop, "\xef\xbf\xbd") == NULL) { /* broken bytes are no stop string of the raw text */
        cr_expect_eq(a.finish, KVF_FINISH_STOP);
        cr_expect_eq(strlen(a.text), first, "%s", a.text);
        cr_expect_eq(strncmp(a.text, whole.text, first), 0);
    }
}

Test(engine, a_prompt_alone_generates_nothing) {
    kvf_engine_config c = config_of(400);
    struct answer a;
    answer_alone(&c, &a, 100, 1, 0, "d2o rho=0.3 min_tokens=16");
    cr_expect_eq(a.finish, KVF_FINISH_LENGTH);
    cr_expect_eq(a.n_tokens, 0u);
    cr_expect_eq(a.held, 3u * 30u);
}

Test(engine, forced_tokens_give_the_same_log_probabilities_as_drawn_ones) {
    kvf_engine_config c = config_of(400);
    struct answer drawn, forced;
    answer_alone(&c, &drawn, 60, 4, 20, "d2o rho=0.4 min_tokens=16");
    memset(&forced, 0, sizeof forced);
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o = options_of("d2o rho=0.4 min_tokens=16");
    kvf_engine *e = create(&c);
    forced.engine = e;
    kvf_generate g = request_of(prompt, 60, 4, 20, &forced);
    g.policy = &o;
    g.forced = drawn.tokens;
    cr_assert_eq(kvf_engine_submit(e, &g, NULL, NULL), KVF_OK);
    run(e);
    kvf_engine_destroy(e);
    expect_same(&drawn, &forced, 1e-6, "forced");
}

Test(engine, aborts_in_every_state_leave_nothing_behind) {
    kvf_engine_config c = config_of(60);
    for (int at = 0; at < 40; at++) {
        kvf_engine *e = create(&c);
        struct answer a[4];
        memset(a, 0, sizeof a);
        for (uint32_t i = 0; i < 4; i++)
            submit(e, &a[i], 100, i, 30, policies[(uint32_t)(at + 1) % N_POLICIES == 5 ? 1 : (at + (int)i) % 5]);
        kvf_error err = {.text = ""};
        int more = 1;
        for (int s = 0; s < at && more; s++) cr_assert_eq(kvf_engine_step(e, &more, &err), KVF_OK, "%s", err.text);
        for (uint32_t i = 0; i < 4; i += 2)
            if (!a[i].ended) {
                cr_assert_eq(kvf_engine_abort(e, a[i].id), KVF_OK);
                cr_expect(a[i].ended && a[i].finish == KVF_FINISH_ABORTED);
            }
        cr_assert_eq(kvf_audit(e->manager, &err), KVF_OK, "%s", err.text);
        cr_expect_eq(kvf_engine_abort(e, a[0].id), KVF_E_NOT_FOUND);
        run(e);
        for (uint32_t i = 1; i < 4; i += 2) cr_expect(a[i].ended && a[i].n_tokens == 30, "a neighbour was harmed");
        kvf_engine_destroy(e);
    }
}

Test(engine, an_abort_from_a_callback_takes_effect_after_the_step) {
    kvf_engine_config c = config_of(400);
    kvf_engine *e = create(&c);
    struct answer a[2];
    memset(a, 0, sizeof a);
    a[0].abort_at = 5;
    submit(e, &a[0], 30, 1, 20, "full");
    submit(e, &a[1], 30, 2, 20, "full");
    run(e);
    cr_expect(a[0].finish == KVF_FINISH_ABORTED && a[0].n_tokens == 5);
    cr_expect(a[1].finish == KVF_FINISH_LENGTH && a[1].n_tokens == 20);
    kvf_engine_destroy(e);
}

Test(engine, destroying_ends_what_still_runs) {
    kvf_engine_config c = config_of(400);
    kvf_engine *e = create(&c);
    struct answer a[3];
    memset(a, 0, sizeof a);
    for (uint32_t i = 0; i < 3; i++) submit(e, &a[i], 30, i, 20, "full");
    cr_assert_eq(kvf_engine_step(e, NULL, NULL), KVF_OK);
    kvf_engine_destroy(e);
    for (uint32_t i = 0; i < 3; i++) cr_expect(a[i].ended && a[i].finish == KVF_FINISH_ABORTED);
}

static void resubmit(void *user, const kvf_result *r) {
    struct answer *a = user;
    uint32_t token = TINY_BYTE_0;
    kvf_generate g = {.struct_size = sizeof g, .tokens = &token, .n_tokens = 1, .user = a, .on_finish = resubmit};
    kvf_error err = {.text = ""};
    a->ended++;
    cr_expect_eq(r->finish, KVF_FINISH_ABORTED);
    cr_expect_eq(kvf_engine_submit(a->engine, &g, NULL, &err), KVF_E_STATE, "%s", err.text);
}

Test(engine, a_callback_cannot_submit_to_an_engine_being_destroyed) {
    kvf_engine_config c = config_of(400);
    struct answer a = {.engine = create(&c)};
    uint32_t prompt[MAX_TOKENS];
    kvf_generate g = request_of(prompt, 30, 1, 20, &a);
    g.on_finish = resubmit;
    cr_assert_eq(kvf_engine_submit(a.engine, &g, NULL, NULL), KVF_OK);
    kvf_engine_destroy(a.engine);
    cr_expect_eq(a.ended, 1);
}

/* ---- Refusals ------------------------------------------------------------------------------------------------------ */

static void expect_refused(kvf_engine *e, const kvf_generate *g, kvf_status want, const char *words) {
    kvf_error err = {.text = ""};
    kvf_status st = kvf_engine_submit(e, g, NULL, &err);
    cr_expect_eq(st, want, "%s: %s", kvf_status_name(st), err.text);
    cr_expect(strstr(err.text, words) != NULL, "'%s' lacks '%s'", err.text, words);
}

Test(engine, g3_bad_requests_are_refused_by_name_and_harm_nobody) {
    kvf_engine_config c = config_of(60);
    kvf_engine *e = create(&c);
    struct answer good, bad;
    memset(&good, 0, sizeof good);
    memset(&bad, 0, sizeof bad);
    submit(e, &good, 30, 1, 20, "d2o rho=0.5 min_tokens=16");
    uint32_t prompt[MAX_TOKENS];
    const char *empty[] = {""};
    kvf_generate base = request_of(prompt, 30, 2, 20, &bad), g = base;
    g.n_tokens = 0;
    expect_refused(e, &g, KVF_E_INVALID, "no token");
    g = base;
    g.on_finish = NULL;
    expect_refused(e, &g, KVF_E_INVALID, "on_finish");
    g = base;
    g.n_tokens = 512;
    expect_refused(e, &g, KVF_E_NEVER_FITS, "512");
    g.n_tokens = 300; /* 38 blocks in 3 layers, of 60 */
    expect_refused(e, &g, KVF_E_NEVER_FITS, "60");
    const uint32_t ids[] = {TINY_N_VOCAB, INT32_MAX, UINT32_MAX};
    for (int i = 0; i < 3; i++) {
        g = base;
        prompt[7] = ids[i];
        expect_refused(e, &g, KVF_E_INVALID, "index 7");
        prompt[7] = 9;
        g.forced = ids + i;
        g.max_tokens = 1;
        expect_refused(e, &g, KVF_E_INVALID, "forced");
    }
    g = base;
    g.stop = empty;
    g.n_stop = 1;
    expect_refused(e, &g, KVF_E_INVALID, "stop string 0");
    g = base;
    g.sampling.temperature = NAN;
    expect_refused(e, &g, KVF_E_INVALID, "temperature");
    g.sampling.temperature = -1;
    expect_refused(e, &g, KVF_E_INVALID, "temperature");
    g.sampling = (kvf_sampling){.top_p = 1.5f};
    expect_refused(e, &g, KVF_E_INVALID, "top_p");
    const struct {
        double rho;
        uint32_t tokens;
        const char *words;
    } budgets[] = {{0, 0, "rho"}, {-0.1, 0, "rho"}, {1.1, 0, "rho"}, {NAN, 0, "rho"}, {0.5, 15, "budget_tokens"}};
    for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
        kvf_policy_options o = options_of("d2o");
        o.rho = budgets[i].rho;
        o.budget_tokens = budgets[i].tokens;
        g = base;
        g.policy = &o;
        expect_refused(e, &g, KVF_E_INVALID, budgets[i].words);
    }
    kvf_policy_options o = options_of("d2o rho=0.3 min_tokens=0 full_layers=0,1");
    g = base;
    g.policy = &o;
    expect_refused(e, &g, KVF_E_INVALID, "full_layers");
    run(e);
    cr_expect(!bad.ended && good.n_tokens == 20);
    kvf_engine_destroy(e);
}

/* Three layers of 40 tokens, each of 2 heads of 16, K and V, in floats. */
Test(engine, a_budget_in_bytes_is_that_many_tokens) {
    kvf_engine_config c = config_of(400);
    struct answer tokens, bytes;
    answer_alone(&c, &tokens, 150, 1, 40, "d2o budget_tokens=40");
    answer_alone(&c, &bytes, 150, 1, 40, "d2o rho=1 budget_bytes=30720");
    expect_same(&tokens, &bytes, 0, "bytes");
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    struct answer a;
    kvf_policy_options o = options_of("d2o budget_bytes=12000");
    kvf_generate g = request_of(prompt, 100, 1, 20, &a);
    g.policy = &o;
    expect_refused(e, &g, KVF_E_INVALID, "take more; give at least 12288");
    kvf_engine_destroy(e);
}

Test(engine, an_engine_that_lacks_what_a_policy_needs_says_so) {
    kvf_engine_config c = config_of(400);
    c.n_score_arrays = 1;
    c.want_mass_bias = 0;
    kvf_engine *e = create(&c);
    struct answer a;
    uint32_t prompt[MAX_TOKENS];
    kvf_generate g = request_of(prompt, 30, 2, 20, &a);
    kvf_policy_options o = options_of("d2o score=prompt_plus_current");
    g.policy = &o;
    expect_refused(e, &g, KVF_E_INVALID, "n_score_arrays 1: policy d2o with its options takes more; give at least 2");
    o = options_of("d2o merge=mass");
    expect_refused(e, &g, KVF_E_INVALID, "want_mass_bias");
    o = options_of("d2o merge=attention");
    expect_refused(e, &g, KVF_E_INVALID, "want_mass_bias");
    kvf_engine_destroy(e);
}

Test(engine, bad_configs_are_refused_by_name) {
    kvf_engine *e = NULL;
    kvf_error err;
    struct {
        kvf_engine_config c;
        const char *words;
    } cases[8];
    for (int i = 0; i < 8; i++) cases[i].c = config_of(400);
    cases[0].c.model = NULL, cases[0].words = "model";
    cases[1].c.block_size = 12, cases[1].words = "block_size 12";
    cases[2].c.chunk = 20, cases[2].words = "chunk 20";
    cases[3].c.heads_per_group = 3, cases[3].words = "heads_per_group 3";
    cases[4].c.kv_bytes = 100, cases[4].words = "kv_bytes 100";
    cases[5].c.max_context = 100000, cases[5].words = "max_context 100000";
    cases[6].c.kv_dtype = (kvf_dtype)9, cases[6].words = "kv_dtype";
    cases[7].c.struct_size = 3, cases[7].words = "struct_size";
    for (int i = 0; i < 8; i++) {
        cr_expect_neq(kvf_engine_create(&cases[i].c, &e, &err), KVF_OK);
        cr_expect(strstr(err.text, cases[i].words) != NULL, "'%s' lacks '%s'", err.text, cases[i].words);
    }
    cr_expect_null(e);
}

/* D2: whatever is left of a prompt of few tokens, there is something to attend to. */
Test(engine, d2_short_prompts_leave_something_to_attend_to) {
    kvf_engine_config c = config_of(400);
    c.n_score_arrays = 4;
    const char *name;
    for (uint32_t p = 1; (name = kvf_policy_name(p)); p++)
        for (uint32_t n = 1; n <= 3; n++) {
            struct answer a;
            char policy[64];
            snprintf(policy, sizeof policy, "%s rho=0.4 min_tokens=0", name);
            kvf_policy_options o = options_of(policy);
            if (kvf_policy_needs(&o) & (KVF_NEEDS_REPEAT | KVF_NEEDS_PROBE)) continue; /* this engine has neither */
            answer_alone(&c, &a, n, p, 20, policy);
            cr_assert_eq(a.n_tokens, 20u, "%s: %u tokens", policy, a.n_tokens);
            for (uint32_t i = 0; i < 20; i++)
                cr_assert(isfinite(a.logprobs[i]), "%s of %u tokens: token %u: %g", policy, n, i, a.logprobs[i]);
            cr_assert_geq(a.held, 3u, "%s of %u tokens: holds %llu", policy, n, (unsigned long long)a.held);
        }
}

/* D8: blocks hold the heads of keys and values, however many query heads share one. */
Test(engine, d8_blocks_hold_kv_heads) {
    kvf_engine_config c = config_of(10);
    const kvf_model_info *info = kvf_model_get_info(model);
    kvf_engine *e = create(&c);
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    cr_assert(info->n_q_heads == 4 && info->n_kv_heads == 2);
    cr_expect_eq(s.block_bytes, (uint64_t)2 * BLOCK * 2 * 16 * 4, "%llu bytes", (unsigned long long)s.block_bytes);
    kvf_engine_destroy(e);
}

/* ---- Failing allocations --------------------------------------------------------------------------------------------- */

Test(engine, every_allocation_may_fail_once) {
    struct failing f = {0, 0};
    kvf_engine_config c = config_of(100);
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    kvf_engine *e = NULL;
    kvf_error err = {.text = ""};
    int64_t n = 0;
    for (;; n++) {
        f.left = n;
        kvf_status st = kvf_engine_create(&c, &e, &err);
        if (!st) break;
        cr_assert_eq(st, KVF_E_NO_MEMORY, "allocation %lld: %s", (long long)n, err.text);
        cr_assert_eq(f.alive, 0, "allocation %lld leaks", (long long)n);
    }
    cr_expect_gt(n, 10);
    struct answer a;
    const char *stops[] = {"never said"};
    uint32_t prompt[MAX_TOKENS];
    for (n = 0;; n++) {
        int64_t before = f.alive;
        f.left = n;
        memset(&a, 0, sizeof a);
        a.engine = e;
        kvf_generate g = request_of(prompt, 30, 2, 3, &a);
        g.stop = stops;
        g.n_stop = 1;
        g.forced = prompt;
        kvf_status st = kvf_engine_submit(e, &g, &a.id, &err);
        if (!st) break;
        cr_assert_eq(st, KVF_E_NO_MEMORY, "%s", err.text);
        cr_assert_eq(f.alive, before);
    }
    f.left = INT64_MAX;
    run(e);
    cr_expect(a.ended && a.n_tokens == 3);
    kvf_engine_destroy(e);
    cr_expect_eq(f.alive, 0);
}
