/* Cached prompts on the host under the engine: the same results with and without, found again instead of computed. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"

TestSuite(engine_offload, .init = open_model, .fini = close_model);

enum { N_PROMPTS = 6, N_REQUESTS = 24 };

/* full and streaming find any block, the others a snapshot. */
static const char *const policies[] = {"full", "streaming rho=0.3 min_tokens=16", "h2o rho=0.3 min_tokens=16",
                                       "d2o rho=0.3 min_tokens=16",
                                       "d2o rho=0.3 min_tokens=16 merge=mass merge_keys=0 gate=0.2"};
enum { N_POLICIES = sizeof policies / sizeof *policies };

struct figures {
    struct answer a[N_REQUESTS];
    kvf_engine_stats stats;
};

static kvf_engine_config config_tiers(uint32_t n_blocks, uint32_t host_blocks, int cache, int offload) {
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = 16;
    c.deterministic = 1; /* results are compared to the bit */
    c.prefix_cache = cache;
    c.snapshot_bytes = 1 << 20;
    c.host_bytes = host_blocks ? config_of(host_blocks).kv_bytes : 0;
    c.no_prefix_offload = !offload;
    return c;
}

/* One of six prompts, of which the odd ones begin like the one before. */
static void submit_prompt(kvf_engine *e, struct answer *a, uint32_t which, const char *policy) {
    uint32_t prompt[MAX_TOKENS], tail[MAX_TOKENS], n = 90 + 7 * which;
    kvf_policy_options o = options_of(policy);
    kvf_error err = {.text = ""};
    (void)request_of(tail, n, 100 + which, 12, a);
    kvf_generate g = request_of(prompt, n, 1 + which / 2, 12, a);
    memcpy(prompt + 48, tail + 48, (n - 48) * sizeof *prompt);
    g.policy = &o;
    a->engine = e;
    cr_assert_eq(kvf_engine_submit(e, &g, &a->id, &err), KVF_OK, "%s", err.text);
}

/* In waves of one to three, so that each prompt comes back after others had its blocks. */
static void run_all(const kvf_engine_config *c, const char *policy, struct figures *f) {
    kvf_engine *e = create(c);
    uint64_t rng = 3;
    memset(f, 0, sizeof *f);
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        submit_prompt(e, &f->a[i], (uint32_t)(gw_random(&rng) % N_PROMPTS), policy);
        if (i % 3 != 1) run(e);
    }
    run(e);
    f->stats.struct_size = sizeof f->stats;
    cr_assert_eq(kvf_engine_get_stats(e, &f->stats), KVF_OK);
    cr_assert_eq(f->stats.occupancy.host_blocks.n_held, 0);
    kvf_engine_destroy(e);
}

static void expect_equal(const struct figures *a, const struct figures *b, const char *what) {
    for (uint32_t i = 0; i < N_REQUESTS; i++) expect_same(&a->a[i], &b->a[i], 0, what);
}

Test(engine_offload, results_are_those_without) {
    struct figures *plain = malloc(sizeof *plain), *off = malloc(sizeof *off), *on = malloc(sizeof *on);
    cr_assert(plain && off && on);
    for (int p = 0; p < N_POLICIES; p++) {
        kvf_engine_config c = config_tiers(2000, 0, 0, 0);
        run_all(&c, policies[p], plain);
        c = config_tiers(150, 400, 1, 0);
        run_all(&c, policies[p], off);
        c = config_tiers(150, 400, 1, 1);
        run_all(&c, policies[p], on);
        expect_equal(plain, off, policies[p]);
        expect_equal(plain, on, policies[p]);
        const kvf_prefix_stats *s = &on->stats.prefix;
        cr_assert_eq(off->stats.prefix.offloaded, 0);
        cr_assert_eq(off->stats.prefix.n_host_nodes, 0);
        cr_assert(s->offloaded > 10 && s->left_device > 10 && s->loaded > 10, "%s: %llu copied, %llu left, %llu back",
                  policies[p], (unsigned long long)s->offloaded, (unsigned long long)s->left_device,
                  (unsigned long long)s->loaded);
        cr_assert_eq(s->queries, N_REQUESTS);
        cr_assert_gt(s->host_hit_tokens, 100, "%s: %llu", policies[p], (unsigned long long)s->host_hit_tokens);
        cr_assert_eq(on->stats.n_prompt_tokens + s->hit_tokens, plain->stats.n_prompt_tokens, "each token once");
        cr_assert_lt(on->stats.n_prompt_tokens + 100, off->stats.n_prompt_tokens, "%s: nothing is saved", policies[p]);
    }
    free(plain);
    free(off);
    free(on);
}

Test(engine_offload, any_room_on_the_host_will_do) {
    struct figures *plain = malloc(sizeof *plain), *on = malloc(sizeof *on);
    cr_assert(plain && on);
    kvf_engine_config c = config_tiers(2000, 0, 0, 0);
    uint64_t n_left = 0;
    run_all(&c, policies[3], plain);
    for (uint32_t host = 1; host < 130; host = host * 2 + 1)
        for (uint32_t n_blocks = 60; n_blocks <= 140; n_blocks += 40) {
            c = config_tiers(n_blocks, host, 1, 1);
            run_all(&c, policies[3], on);
            expect_equal(plain, on, "a small host");
            n_left += on->stats.prefix.left_host;
        }
    cr_assert_gt(n_left, 20, "the host was never full");
    free(plain);
    free(on);
}

Test(engine_offload, a_prompt_is_saved_from_where_it_lies) {
    char path[256];
    struct answer a[4];
    kvf_error err = {.text = ""};
    uint32_t prompt[MAX_TOKENS], tail[MAX_TOKENS], n_saved = 0, n_loaded = 0;
    kvf_engine_config c = config_tiers(100, 400, 1, 1);
    kvf_engine *e = create(&c);
    memset(a, 0, sizeof a);
    gw_temp_path(path, sizeof path);
    for (uint32_t i = 0; i < 4; i++) {
        submit_prompt(e, &a[i], i + i / 2, "full");
        run(e);
    }
    (void)request_of(tail, 90, 100, 12, a);
    (void)request_of(prompt, 90, 1, 12, a);
    memcpy(prompt + 48, tail + 48, 42 * sizeof *prompt);
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = prompt, .n_tokens = 90};
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf_prefix_match match = {.struct_size = sizeof match};
    o.host = 1;
    cr_assert_eq(kvf_prefix_lookup(e->manager, &key, &o, &match), KVF_OK);
    cr_assert(match.n_tokens == 88 && match.n_host_blocks > 0, "%u tokens, %u blocks there", match.n_tokens,
              match.n_host_blocks);
    kvf_prompt_file file = {.struct_size = sizeof file, .path = path, .identity = "x", .identity_bytes = 1};
    cr_assert_eq(kvf_engine_prompt_save(e, &file, prompt, 90, &n_saved, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(n_saved, 88, "%u", n_saved);
    cr_assert_eq(kvf_audit(e->manager, &err), KVF_OK, "%s", err.text);
    kvf_engine_destroy(e);
    c = config_tiers(2000, 0, 1, 0);
    e = create(&c);
    cr_assert_eq(kvf_engine_prompt_load(e, &file, &n_loaded, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(n_loaded, n_saved);
    memset(&a[1], 0, sizeof a[1]);
    submit_prompt(e, &a[1], 0, "full");
    run(e);
    expect_same(&a[0], &a[1], 0, "loaded");
    kvf_engine_stats s = {.struct_size = sizeof s};
    cr_assert_eq(kvf_engine_get_stats(e, &s), KVF_OK);
    cr_assert_geq(s.prefix.hit_tokens, 88);
    kvf_engine_destroy(e);
    unlink(path);
}
