/* Prompts that come together and begin alike: one computes what they have in common, the others go on from there, with every
 * policy that can, and nobody had to say where they part. The answers are those without a cache. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"

TestSuite(engine_parting, .init = open_model, .fini = close_model);

/* snapkv and pyramidkv go by the prompt's last queries: what they find ends before these. sirllm runs the last one of a hit again. */
static const char *const policies[] = {
    "full",
    "streaming rho=0.3 min_tokens=16",
    "d2o rho=0.3 min_tokens=16",
    "d2o authors rho=0.3",
    "h2o rho=0.3 min_tokens=16",
    "fold rho=0.3 min_tokens=16 gate=0.2",
    "cam rho=0.3 min_tokens=16",
    "snapkv rho=0.3 min_tokens=16",
    "pyramidkv rho=0.3 min_tokens=16",
    "roco rho=0.3 min_tokens=16",
    "sirllm rho=0.3 min_tokens=16",
};
enum { N_POLICIES = sizeof policies / sizeof *policies, SNAPKV = 7, SIRLLM = 10 };

static kvf_engine_config cache_config(uint32_t n_blocks, uint32_t chunk, int cache) {
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = chunk;
    c.deterministic = 1; /* results are compared to the bit */
    c.prefix_cache = cache;
    c.snapshot_bytes = 1 << 20;
    return c;
}

/* A prompt of n tokens in pieces: up to each end those of a seed. */
struct piece {
    uint32_t end, seed;
};

static void submit_pieces(kvf_engine *e, struct answer *a, const struct piece *pieces, uint32_t n_pieces,
                          const char *policy, uint32_t max_tokens) {
    uint32_t prompt[MAX_TOKENS], part[MAX_TOKENS];
    kvf_policy_options o = options_of(policy);
    kvf_generate g = request_of(prompt, pieces[n_pieces - 1].end, 1, max_tokens, a);
    for (uint32_t i = 0, begin = 0; i < n_pieces; begin = pieces[i++].end) {
        random_prompt(part, MAX_TOKENS, pieces[i].seed);
        memcpy(prompt + begin, part, (pieces[i].end - begin) * sizeof *prompt);
    }
    kvf_error err = {.text = ""};
    g.policy = &o;
    memset(a, 0, sizeof *a);
    a->engine = e;
    cr_assert_eq(kvf_engine_submit(e, &g, &a->id, &err), KVF_OK, "%s", err.text);
}

/* Six prompts: all begin with the same 150 tokens, two of them go on alike up to 260, and two are equal. */
static const struct piece six[6][3] = {{{150, 1}, {260, 2}, {300, 10}}, {{150, 1}, {200, 3}, {200, 3}},
                                       {{150, 1}, {260, 2}, {280, 11}}, {{150, 1}, {190, 4}, {190, 4}},
                                       {{150, 1}, {200, 3}, {200, 3}},  {{150, 1}, {220, 5}, {220, 5}}};

static uint64_t run_six(int cache, uint32_t chunk, const char *policy, struct answer *a, uint64_t *computed) {
    kvf_engine_config c = cache_config(4000, chunk, cache);
    kvf_engine *e = create(&c);
    for (int i = 0; i < 6; i++) submit_pieces(e, &a[i], six[i], 3, policy, 12);
    run(e);
    kvf_engine_stats s = stats_of(e);
    *computed = s.n_prompt_tokens;
    kvf_engine_destroy(e);
    return s.prefix.hit_tokens;
}

Test(engine_parting, r45_prompts_that_come_together_share_with_every_policy) {
    struct answer *off = calloc(6, sizeof *off), *on = calloc(6, sizeof *on);
    for (int p = 0; p < N_POLICIES; p++)
        for (uint32_t chunk = 64; chunk <= 512; chunk += 448) {
            uint64_t computed[2];
            run_six(0, chunk, policies[p], off, &computed[0]);
            uint64_t found = run_six(1, chunk, policies[p], on, &computed[1]);
            for (int i = 0; i < 6; i++) expect_same(&off[i], &on[i], 0, policies[p]);
            /* In whole blocks of 8: 144 tokens four times, 256 once; with a window of 64 at the prompt's end at most what is
             * before it. An equal prompt may find more. */
            bool last = p == SNAPKV || p == SNAPKV + 1;
            uint64_t least = last ? 136 + 216 + 126 + 136 + 150 : 4 * 144 + 256 - (p == SIRLLM) * 5;
            cr_expect_geq(found, least, "%s, chunk %u: %llu of %llu tokens are found", policies[p], chunk,
                          (unsigned long long)found, (unsigned long long)computed[0]);
            cr_expect_eq(computed[1] + found, computed[0]);
        }
    free(off);
    free(on);
}

/* Where a prompt parts from one that is cached already the next one goes on: the second leaves what the third finds. */
Test(engine_parting, r45_prompts_that_come_later_share) {
    const struct piece three[3][2] = {{{150, 1}, {300, 2}}, {{150, 1}, {290, 3}}, {{150, 1}, {310, 4}}};
    struct answer *a = calloc(6, sizeof *a);
    for (int cache = 0; cache < 2; cache++) {
        kvf_engine_config c = cache_config(1000, 512, cache);
        kvf_engine *e = create(&c);
        uint64_t found[3];
        for (int i = 0; i < 3; i++) {
            submit_pieces(e, &a[cache * 3 + i], three[i], 2, "d2o rho=0.3 min_tokens=16", 8);
            run(e);
            found[i] = stats_of(e).prefix.hit_tokens;
        }
        if (cache) cr_expect(found[1] == 0 && found[2] == 144, "%d and %d", (int)found[1], (int)found[2]);
        kvf_engine_destroy(e);
    }
    for (int i = 0; i < 3; i++) expect_same(&a[i], &a[3 + i], 0, "later");
    free(a);
}

/* Few tokens are not worth a step: prompts that share one block run side by side as before. */
Test(engine_parting, what_shares_little_does_not_wait) {
    kvf_engine_config c = cache_config(1000, 128, 1);
    struct answer *a = calloc(2, sizeof *a);
    kvf_engine *e = create(&c);
    for (uint32_t i = 0; i < 2; i++)
        submit_pieces(e, &a[i], (struct piece[2]){{12, 1}, {40, 5 + i}}, 2, "d2o rho=0.3 min_tokens=16", 4);
    int more;
    step(e, &more);
    cr_expect(a[0].n_tokens == 1 && a[1].n_tokens == 1);
    run(e);
    kvf_engine_destroy(e);
    free(a);
}

/* Where the memory for snapshots holds none of that length, waiting and shorter chunks would gain nothing: all is as without a
 * cache. With room for one, the others find it. */
Test(engine_parting, r45_nobody_waits_for_a_snapshot_that_is_not_kept) {
    static const uint64_t bytes[] = {1, 4096, 1 << 15};
    enum { N = 16 };
    struct answer *a = calloc(N, sizeof *a);
    for (int equal = 0; equal < 2; equal++)
        for (int i = 0; i < 3; i++) {
            uint64_t n_steps[2], found = 0;
            for (int cache = 0; cache < 2; cache++) {
                kvf_engine_config c = cache_config(1000, 512, cache);
                c.max_running = N;
                c.snapshot_bytes = bytes[i];
                kvf_engine *e = create(&c);
                for (uint32_t k = 0; k < N; k++)
                    submit_pieces(e, &a[k], (struct piece[2]){{96, 1}, {104, equal ? 2 : 100 + k}}, 2,
                                  "d2o rho=0.3 min_tokens=16", 2);
                run(e);
                n_steps[cache] = stats_of(e).n_steps;
                found = stats_of(e).prefix.hit_tokens;
                kvf_engine_destroy(e);
            }
            if (i < 2)
                cr_expect(n_steps[0] == n_steps[1] && !found, "%d bytes: %d steps, without a cache %d", (int)bytes[i],
                          (int)n_steps[1], (int)n_steps[0]);
            else
                cr_expect_geq(found, 15u * 96);
        }
    free(a);
}

/* Nor for one whose policy leaves no sums. */
Test(engine_parting, r45_nobody_waits_for_a_policy_that_leaves_no_snapshot) {
    struct answer *a = calloc(2, sizeof *a);
    kvf_engine_config c = cache_config(1000, 256, 1);
    kvf_engine *e = create(&c);
    for (int i = 0; i < 2; i++) submit_pieces(e, &a[i], (struct piece[1]){{120, 1}}, 1, policies[2 * i], 2);
    int more;
    step(e, &more);
    cr_expect(a[0].n_tokens == 1 && a[1].n_tokens == 1);
    run(e);
    kvf_engine_destroy(e);
    free(a);
}

/* The one that the others wait for goes, at every step it can. */
Test(engine_parting, nobody_waits_for_what_has_gone) {
    for (int steps = 0; steps < 4; steps++) {
        kvf_engine_config c = cache_config(1000, 64, 1);
        struct answer *a = calloc(3, sizeof *a);
        kvf_engine *e = create(&c);
        for (uint32_t i = 0; i < 3; i++)
            submit_pieces(e, &a[i], (struct piece[2]){{200, 1}, {240, 5 + i}}, 2, "d2o rho=0.3 min_tokens=16", 4);
        int more = 1;
        for (int i = 0; i < steps; i++) step(e, &more);
        cr_assert_eq(kvf_engine_abort(e, a[0].id), KVF_OK);
        run(e);
        cr_expect(a[1].ended && a[2].ended && a[1].n_tokens == 4 && a[2].n_tokens == 4);
        kvf_engine_destroy(e);
        free(a);
    }
}

/* Random trees of prompts, policies, salts, samples, aborts, in pools that preempt: the answers are those without a cache. */
Test(engine_parting, random_trees_of_prompts) {
    enum { PROMPTS = 14 };
    struct answer *a = calloc(2 * PROMPTS, sizeof *a);
    for (uint64_t seed = 1; seed <= 12; seed++) {
        uint64_t found = 0;
        for (int cache = 0; cache < 2; cache++) {
            uint64_t random = seed * 977;
            uint32_t chunk = 16u << gw_random(&random) % 4;
            kvf_engine_config c = cache_config(gw_random(&random) % 2 ? 4000 : 3 * 2 * 30, chunk, cache);
            if (gw_random(&random) % 2) c.snapshot_bytes = 1 << 15;
            kvf_engine *e = create(&c);
            for (uint32_t i = 0; i < PROMPTS; i++) {
                struct piece p[3];
                uint32_t end = 0;
                for (int k = 0; k < 3; k++) {
                    end += 1 + (uint32_t)(gw_random(&random) % 70);
                    p[k].seed = k == 2 && gw_random(&random) % 3 ? 100 + i : (uint32_t)(gw_random(&random) % 2);
                    p[k].end = end;
                }
                if (gw_random(&random) % 2) p[0].end = 40, p[1].end = KVF__MAX(p[1].end, 41);
                if (gw_random(&random) % 2) p[1].end = 90;
                p[1].end = KVF__MAX(p[1].end, p[0].end);
                p[2].end = KVF__MAX(p[2].end, p[1].end + 1);
                const char *policy = policies[seed % 3 ? gw_random(&random) % N_POLICIES : 2];
                submit_pieces(e, &a[cache * PROMPTS + i], p, 3, policy, 1 + (uint32_t)(gw_random(&random) % 12));
                int more = 1;
                for (uint64_t n = gw_random(&random) % 3; n && i % 4 == 3; n--) step(e, &more);
            }
            run(e);
            found = stats_of(e).prefix.hit_tokens;
            kvf_engine_destroy(e);
        }
        cr_expect_gt(found, 0u, "seed %llu", (unsigned long long)seed);
        for (int i = 0; i < PROMPTS; i++) expect_same(&a[i], &a[PROMPTS + i], 2e-4, "random");
    }
    free(a);
}
