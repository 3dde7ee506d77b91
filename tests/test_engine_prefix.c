/* The prefix cache under the engine: the same results with it on and off, less work, fewer blocks, no trace left. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"

#include "blockmgr/manager.h"

TestSuite(engine_prefix, .init = open_model, .fini = close_model);

/* full and streaming find any block, the others a snapshot. */
static const char *const policies[] = {
    "full",
    "streaming rho=0.3 min_tokens=16",
    "h2o rho=0.3 min_tokens=16",
    "d2o rho=0.3 min_tokens=16",
    "d2o authors rho=0.3",
    "d2o rho=0.3 min_tokens=16 merge=mass merge_keys=0 gate=0.2",
    "h2o rho=0.3 min_tokens=16 merge=attention gate=0.2",
    "fold rho=0.3 min_tokens=16 gate=0.2",
    "d2o budget_tokens=64",
    "d2o rho=1",
};
enum { N_POLICIES = sizeof policies / sizeof *policies };

static kvf_engine_config small_chunks(uint32_t n_blocks, int cache) {
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = 16;
    c.deterministic = 1; /* results are compared to the bit */
    c.prefix_cache = cache;
    c.snapshot_bytes = 1 << 20;
    return c;
}

/* n tokens of which the first n_shared are those of `seed`, the others of their own. */
static void submit_long(kvf_engine *e, struct answer *a, uint32_t n_shared, uint32_t n, uint32_t own, uint32_t end,
                        const char *policy, uint32_t max_tokens) {
    uint32_t prompt[MAX_TOKENS], tail[MAX_TOKENS];
    kvf_policy_options o = options_of(policy);
    (void)request_of(tail, n, 1000 + own, 12, a);
    kvf_generate g = request_of(prompt, n, 1, max_tokens, a);
    memcpy(prompt + n_shared, tail, (n - n_shared) * sizeof *prompt);
    kvf_error err = {.text = ""};
    g.policy = &o;
    g.prefix_end = end;
    memset(a, 0, sizeof *a);
    a->engine = e;
    cr_assert_eq(kvf_engine_submit(e, &g, &a->id, &err), KVF_OK, "%s", err.text);
}

static void submit_shared(kvf_engine *e, struct answer *a, uint32_t n_shared, uint32_t n, uint32_t own, uint32_t end,
                          const char *policy) {
    submit_long(e, a, n_shared, n, own, end, policy, 12);
}

static kvf_prefix_stats prefix_of(kvf_engine *e, uint64_t *computed) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    if (computed) *computed = s.n_prompt_tokens;
    return s.prefix;
}

struct figures {
    struct answer a[5];
    uint64_t computed;
    kvf_prefix_stats prefix;
};

/* Five prompts: three that share 70 tokens, the first of them once more, and its first 48 tokens alone. */
static void run_five(int cache, uint32_t end, const char *policy,
                     struct figures *f) { /* cache: 2: all hashes are equal */
    const uint32_t n[5] = {100, 90, 75, 100, 48}, own[5] = {0, 1, 2, 0, 0};
    kvf_engine_config c = small_chunks(2000, cache != 0);
    kvf_engine *e = create(&c);
    e->manager->cache.zero_hash = cache == 2;
    for (int i = 0; i < 5; i++) {
        submit_shared(e, &f->a[i], KVF__MIN(70, n[i]), n[i], own[i], KVF__MIN(end, n[i]), policy);
        if (i == 0 || i == 2) run(e); /* the others in pairs */
    }
    run(e);
    f->prefix = prefix_of(e, &f->computed);
    kvf_engine_destroy(e);
}

Test(engine_prefix, results_are_those_without) {
    for (int p = 0; p < N_POLICIES; p++)
        for (uint32_t end = 0; end <= 64; end += 64) {
            struct figures *off = calloc(1, sizeof *off), *on = calloc(1, sizeof *on);
            run_five(0, end, policies[p], off);
            run_five(1, end, policies[p], on);
            for (int i = 0; i < 5; i++) expect_same(&off->a[i], &on->a[i], 0, policies[p]);
            cr_expect_eq(off->prefix.queries, 0u);
            cr_expect_eq(on->prefix.queries, 5u, "%s: %llu", policies[p], (unsigned long long)on->prefix.queries);
            cr_expect_eq(on->prefix.hits, 4u, "%s: %llu", policies[p], (unsigned long long)on->prefix.hits);
            cr_expect_eq(off->computed, 100u + 90 + 75 + 100 + 48);
            cr_expect_eq(on->computed + on->prefix.hit_tokens, off->computed);
            free(off);
            free(on);
        }
}

/* B6: tokens tell blocks apart, not their hashes. */
Test(engine_prefix, b6_equal_hashes_change_no_result) {
    for (int p = 0; p < 4; p++) {
        struct figures *off = calloc(1, sizeof *off), *on = calloc(1, sizeof *on), *equal = calloc(1, sizeof *equal);
        run_five(0, 0, policies[p], off);
        run_five(1, 0, policies[p], on);
        run_five(2, 0, policies[p], equal);
        for (int i = 0; i < 5; i++) expect_same(&off->a[i], &equal->a[i], 0, policies[p]);
        cr_expect(equal->prefix.hits == 4 && equal->prefix.hit_tokens == on->prefix.hit_tokens, "%s: %llu hits",
                  policies[p], (unsigned long long)equal->prefix.hits);
        free(off);
        free(on);
        free(equal);
    }
}

/* The second finds no sums and computes the prompt anew: of its blocks the cache takes the partly filled last one alone, and
 * its merges change the rows in there. The third finds that block. */
Test(engine_prefix, a_merge_leaves_what_is_cached) {
    static const char *const three[] = {"full", "d2o rho=0.4 min_tokens=16", "d2o rho=0.6 min_tokens=16"};
    struct answer *a = calloc(6, sizeof *a);
    for (int cache = 0; cache < 2; cache++)
        for (uint32_t n_blocks = 60; n_blocks <= 400; n_blocks += 340) {
            kvf_engine_config c = config_of(n_blocks);
            c.deterministic = 1;
            c.prefix_cache = cache;
            kvf_engine *e = create(&c);
            for (int i = 0; i < 3; i++) submit_long(e, &a[cache * 3 + i], 45, 45, 0, 0, three[i], 20);
            run(e);
            kvf_engine_destroy(e);
            for (int i = 0; i < 3 && cache; i++) expect_same(&a[i], &a[3 + i], 0, three[i]);
        }
    free(a);
}

/* By hand: what each prompt finds. A policy that sums columns goes on from a chunk's end, prefix_end or the whole prompt. */
Test(engine_prefix, finds_what_it_may) {
    struct figures *f = calloc(1, sizeof *f);
    run_five(1, 0, "full", f);
    cr_expect_eq(f->prefix.hit_tokens, 70u + 70 + 96 + 47, "%llu", (unsigned long long)f->prefix.hit_tokens);
    run_five(1, 0, "d2o rho=0.3 min_tokens=16", f);
    cr_expect_eq(f->prefix.hit_tokens, 64u + 64 + 99 + 47, "%llu", (unsigned long long)f->prefix.hit_tokens);
    run_five(1, 56, "d2o rho=0.3 min_tokens=16", f); /* ends at 56, 64 is still on the grid */
    cr_expect_eq(f->prefix.hit_tokens, 64u + 64 + 99 + 47, "%llu", (unsigned long long)f->prefix.hit_tokens);
    free(f);
}

/* Requests that run together and share: fewer blocks are held at once than without. */
Test(engine_prefix, what_is_shared_is_held_once) {
    for (int p = 0; p < 4; p++) {
        uint32_t held[2];
        struct answer *a = calloc(14, sizeof *a);
        for (int cache = 0; cache < 2; cache++) {
            kvf_engine_config c = small_chunks(2000, cache);
            kvf_engine *e = create(&c);
            for (uint32_t i = 0; i < 7; i++) submit_long(e, &a[cache * 7 + i], 192, 200, i, 192, policies[p], 90);
            run(e);
            kvf_engine_stats s = {.struct_size = sizeof s};
            cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
            held[cache] = s.occupancy.blocks.n_held_max;
            kvf_engine_destroy(e);
        }
        for (int i = 0; i < 7; i++) expect_same(&a[i], &a[7 + i], 0, policies[p]);
        if (p == 0) cr_expect_lt(held[1] * 2, held[0], "%u and %u blocks", held[1], held[0]);
        cr_expect_lt(held[1], 6u * 25 * 7 / 2, "%s: %u blocks", policies[p], held[1]);
        free(a);
    }
}

/* A pool that is too small for all: preemptions, evictions, events in place; the same answers still. */
Test(engine_prefix, a_small_pool_gives_the_same) {
    for (int p = 0; p < N_POLICIES; p++) {
        struct answer *a = calloc(16, sizeof *a);
        for (int cache = 0; cache < 2; cache++) {
            kvf_engine_config c = small_chunks(3 * 2 * 16, cache);
            kvf_engine *e = create(&c);
            for (uint32_t i = 0; i < 8; i++)
                submit_shared(e, &a[cache * 8 + i], i % 3 * 28, 60 + 8 * i, i, i % 2 * 40, policies[p]);
            run(e);
            kvf_engine_destroy(e);
        }
        for (int i = 0; i < 8; i++) expect_same(&a[i], &a[8 + i], 2e-4, policies[p]);
        free(a);
    }
}

Test(engine_prefix, salts_and_refusals_keep_apart) {
    kvf_engine_config c = small_chunks(400, 1);
    kvf_engine *e = create(&c);
    struct answer a = {0};
    uint32_t prompt[MAX_TOKENS];
    kvf_generate g = request_of(prompt, 64, 1, 4, &a);
    kvf_error err = {.text = ""};
    const char *salts[] = {NULL, "one", "two", "one"};
    for (int i = 0; i < 4; i++) {
        memset(&a, 0, sizeof a);
        g.cache_salt = salts[i];
        g.cache_salt_bytes = salts[i] ? 3 : 0;
        cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_OK);
        run(e);
        cr_expect_eq(prefix_of(e, NULL).hits, i == 3 ? 1u : 0u);
    }
    memset(&a, 0, sizeof a);
    g.no_cache_hits = 1;
    cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_OK);
    run(e);
    cr_expect_eq(prefix_of(e, NULL).hits, 1u, "was told not to look");
    char *long_salt = calloc(1, 1 << 21);
    g.cache_salt = long_salt;
    g.cache_salt_bytes = 1 << 21;
    cr_expect_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "2097152"), "%s", err.text);
    g.cache_salt_bytes = 0;
    g.prefix_end = 12;
    cr_expect_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "prefix_end 12"), "%s", err.text);
    g.prefix_end = 72;
    cr_expect_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID);
    free(long_salt);
    kvf_engine_destroy(e);
}

/* A prompt whose last token begins a block: nothing holds that block between admission and step, nor its snapshot. */
Test(engine_prefix, a_last_token_alone_in_its_block_goes_on_from_the_grid) {
    kvf_engine_config c = small_chunks(600, 1);
    c.chunk = 64;
    struct figures *f = calloc(1, sizeof *f);
    kvf_engine *e = create(&c);
    for (int i = 0; i < 2; i++) {
        submit_shared(e, &f->a[i], 0, 97, 0, 0, "d2o rho=0.3 min_tokens=16");
        run(e);
    }
    f->prefix = prefix_of(e, NULL);
    cr_expect_eq(f->prefix.hit_tokens, 64u, "%llu", (unsigned long long)f->prefix.hit_tokens);
    expect_same(&f->a[0], &f->a[1], 0, "again");
    kvf_engine_destroy(e);
    free(f);
}

/* The next turn of a dialogue: the prompt before, its answer, and more. Bits of decode and prefill differ, so that answers are
 * found only where they need not be equal. */
Test(engine_prefix, an_answer_is_found_in_the_next_turn) {
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        kvf_engine_config c = small_chunks(600, 1);
        c.deterministic = deterministic;
        struct answer *a = calloc(2, sizeof *a);
        uint32_t prompt[MAX_TOKENS], n = 50;
        kvf_error err = {.text = ""};
        kvf_engine *e = create(&c);
        submit_long(e, &a[0], 0, n, 0, 0, "full", 40);
        run(e);
        kvf_generate g = request_of(prompt, n, 1000, 4, &a[1]);
        memcpy(prompt + n, a[0].tokens, 40 * sizeof *prompt);
        g.n_tokens = n + 40 + 5;
        a[1].engine = e;
        cr_assert_eq(kvf_engine_submit(e, &g, &a[1].id, &err), KVF_OK, "%s", err.text);
        run(e);
        /* The last token that was generated was never computed. */
        uint64_t found = prefix_of(e, NULL).hit_tokens, expected = deterministic ? 48 : (n + 39) / BLOCK * BLOCK;
        cr_expect_eq(found, expected, "%llu", (unsigned long long)found);
        kvf_engine_destroy(e);
        free(a);
    }
}

/* Many questions over one context whose end nobody names: each finds it up to the last end of a chunk. By hand: so many tokens
 * less are computed for it, and so many blocks of each layer less are taken; with the cache on a policy's first event goes
 * to fresh blocks, since what it has stored stays findable. */
Test(engine_prefix, questions_over_one_context_whose_end_is_not_named) {
    enum { QUESTIONS = 32, CONTEXT = 150, FOUND = 144, CHUNK = 16 };
    struct answer *a = calloc(2 * QUESTIONS, sizeof *a);
    uint64_t computed[2], taken[2], by_hand = 0, n_tokens = 0;
    for (int cache = 0; cache < 2; cache++) {
        kvf_profile_config profile;
        kvf_profile_config_init(&profile, sizeof profile);
        kvf_profile p = {.struct_size = sizeof p};
        kvf_engine_config c = small_chunks(6000, cache);
        c.profile = &profile;
        kvf_engine *e = create(&c);
        for (uint32_t i = 0; i < QUESTIONS; i++) {
            submit_long(e, &a[cache * QUESTIONS + i], CONTEXT, CONTEXT + 4 + i % 13, 50 + i, 0,
                        "d2o rho=0.3 min_tokens=16", 1);
            if (i == 0) run(e); /* the context is computed once */
        }
        run(e);
        kvf_prefix_stats s = prefix_of(e, &computed[cache]);
        cr_expect_eq(s.hit_tokens, cache ? (QUESTIONS - 1) * (uint64_t)FOUND : 0);
        cr_assert_eq(kvf_profile_read(e->manager, &p, NULL, 0, 0), KVF_OK);
        taken[cache] = p.taken_blocks;
        kvf_engine_destroy(e);
    }
    for (uint32_t i = 0; i < QUESTIONS; i++) {
        const struct answer *off = &a[i], *on = &a[QUESTIONS + i];
        expect_same(off, on, 0, "question");
        n_tokens += off->n_prompt;
        by_hand += 3 * (uint64_t)kvf__ceil_div(off->n_prompt, BLOCK);
        taken[1] -= on->blocks[0] + on->blocks[1] + on->blocks[2];
    }
    cr_expect_eq(computed[0], n_tokens);
    cr_expect_eq(computed[1], n_tokens - (QUESTIONS - 1) * (uint64_t)FOUND);
    cr_expect_eq(taken[0], by_hand, "%llu blocks taken, not %llu", (unsigned long long)taken[0],
                 (unsigned long long)by_hand);
    cr_expect_eq(taken[1], by_hand - (QUESTIONS - 1) * 3 * (uint64_t)FOUND / BLOCK, "%llu blocks taken, %llu without",
                 (unsigned long long)taken[1], (unsigned long long)by_hand);
    free(a);
}

/* ---- Requests that are computed again -------------------------------------------------------------------------- */

enum { N_UNRELATED = 24 };

/* Prompts that share nothing, in a pool that preempts: each is one query and no hit, and each token counts once, whatever is
 * computed again and whatever of that is found. */
static kvf_engine_stats run_unrelated(int deterministic) {
    struct answer *answers = calloc(N_UNRELATED, sizeof *answers);
    kvf_engine_config c = small_chunks(54, 1);
    c.deterministic = deterministic;
    c.n_threads = 1;
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    kvf_policy_options o = options_of("full");
    kvf_error err = {.text = ""};
    uint64_t n_prompt = 0, n_decode = 0;
    for (uint32_t i = 0; i < N_UNRELATED; i++) {
        kvf_generate g = request_of(prompt, 16 + i % 8, 50 + i, 26, &answers[i]);
        prompt[0] = 10 + i; /* nothing in common */
        g.policy = &o;
        answers[i].engine = e;
        cr_assert_eq(kvf_engine_submit(e, &g, &answers[i].id, &err), KVF_OK, "%s", err.text);
    }
    run(e);
    for (uint32_t i = 0; i < N_UNRELATED; i++) {
        cr_assert_eq(answers[i].finish, KVF_FINISH_LENGTH);
        n_prompt += answers[i].n_prompt;
        n_decode += answers[i].n_tokens - 1; /* the last one is not computed */
    }
    kvf_engine_stats s = stats_of(e);
    cr_assert_gt(s.n_preempted, 3u);
    cr_expect_eq(s.prefix.queries, N_UNRELATED, "%llu queries", (unsigned long long)s.prefix.queries);
    cr_expect_eq(s.prefix.query_tokens, n_prompt, "%llu tokens", (unsigned long long)s.prefix.query_tokens);
    cr_expect(s.prefix.hits == 0 && s.prefix.hit_tokens == 0, "%llu found", (unsigned long long)s.prefix.hit_tokens);
    cr_expect_eq(s.n_prompt_tokens, n_prompt, "%llu of %llu prompt tokens", (unsigned long long)s.n_prompt_tokens,
                 (unsigned long long)n_prompt);
    cr_expect_eq(s.n_decode_tokens, n_decode, "%llu of %llu decoded", (unsigned long long)s.n_decode_tokens,
                 (unsigned long long)n_decode);
    cr_expect_eq(s.prefix.again_queries, s.n_preempted, "%llu again, %llu preempted",
                 (unsigned long long)s.prefix.again_queries, (unsigned long long)s.n_preempted);
    cr_expect_gt(s.n_recomputed_tokens, 0u);
    cr_expect_gt(s.recompute_s, 0);
    kvf_engine_destroy(e);
    free(answers);
    return s;
}

Test(engine_prefix, r21_what_is_computed_again_counts_apart) {
    kvf_engine_stats s = run_unrelated(0);
    cr_expect_gt(s.prefix.again_hit_tokens, 0u); /* its own blocks */
    (void)run_unrelated(1);                      /* answers are replayed token by token */
}

/* Three of one prompt come to their budgets while they share its blocks: each then needs blocks of its own, which a small pool
 * does not have. The earlier reservation stays, and no step fails. */
Test(engine_prefix, a_budget_reached_in_shared_blocks_fails_no_step) {
    static const char *const words[] = {"streaming budget_tokens=%u", "d2o budget_tokens=%u"};
    struct answer *a = calloc(3, sizeof *a);
    for (int p = 0; p < 2; p++)
        for (uint32_t budget = 50; budget <= 54; budget += 4)
            for (uint32_t n_blocks = 40; n_blocks <= 52; n_blocks += 3) {
                char policy[64];
                snprintf(policy, sizeof policy, words[p], budget);
                kvf_engine_config c = config_of(n_blocks);
                c.prefix_cache = 1;
                c.snapshot_bytes = 1 << 20;
                kvf_engine *e = create(&c);
                memset(a, 0, 3 * sizeof *a);
                for (uint32_t i = 0; i < 3; i++) submit(e, &a[i], 48, 1, 14 - i, policy);
                run(e);
                for (uint32_t i = 0; i < 3; i++) cr_expect_eq(a[i].n_tokens, 14 - i);
                kvf_engine_destroy(e);
            }
    free(a);
}
