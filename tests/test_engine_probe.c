/* Scores from a probe under the engine: they stand beside the slots, and go where the slots go. */
#define _DEFAULT_SOURCE
#include "tests/engine_rig.h"

TestSuite(engine_probe, .init = open_model, .fini = close_model);

static const char *const policies[] = {
    "d2o rho=0.3 min_tokens=16 score=probe",
    "h2o rho=0.3 min_tokens=16 score=probe evict_every=1",
    "d2o rho=0.4 min_tokens=16 score=probe merge=average nm=1:1",
};
enum { N_POLICIES = sizeof policies / sizeof *policies };

static kvf_engine_config probe_config(uint32_t n_blocks, const kvf_probe *probe) {
    kvf_engine_config c = config_of(n_blocks);
    c.chunk = 16;
    c.deterministic = 1;
    c.probe = probe;
    return c;
}

Test(engine_probe, a_batch_a_cache_and_a_swap_change_nothing) {
    enum { N = 5 };
    static struct answer alone[N], a[N];
    kvf_probe *probe = random_probe(kvf_model_get_info(model)->n_embd);
    for (int i = 0; i < N; i++) {
        kvf_engine_config c = probe_config(2000, probe);
        answer_alone(&c, &alone[i], 60 + 15 * (uint32_t)(i % 3), 1 + (uint32_t)(i % 2), 24, policies[i % N_POLICIES]);
    }
    for (int form = 0; form < 4; form++) {
        kvf_engine_config c = probe_config(form == 3 ? 110 : 2000, probe);
        c.prefix_cache = form > 0;
        if (form == 3) c.host_bytes = 1 << 20;
        if (form == 2) c.heads_per_group = 1;
        kvf_engine *e = create(&c);
        memset(a, 0, sizeof a);
        for (int round = 0; round < 2; round++) {
            memset(a, 0, sizeof a);
            for (int i = 0; i < N; i++)
                submit(e, &a[i], 60 + 15 * (uint32_t)(i % 3), 1 + (uint32_t)(i % 2), 24, policies[i % N_POLICIES]);
            run(e);
            for (int i = 0; i < N; i++) {
                char what[64];
                snprintf(what, sizeof what, "form %d round %d request %d", form, round, i);
                cr_assert(a[i].ended && a[i].finish == KVF_FINISH_LENGTH, "%s", what);
                expect_tokens(a[i].tokens, a[i].logprobs, a[i].n_tokens, alone[i].tokens, alone[i].logprobs,
                              alone[i].n_tokens, 0, what);
            }
        }
        kvf_engine_stats s = stats_of(e);
        if (form == 1) cr_expect_gt(s.prefix.hit_tokens, 300); /* at any block, without a snapshot */
        if (form == 3) cr_expect_gt(s.prefix.host_hit_tokens, 0, "%llu loaded", (unsigned long long)s.prefix.loaded);
        kvf_engine_destroy(e);
    }
    kvf_probe_close(probe);
}

/* The scores decide: with another probe other tokens are kept. */
Test(engine_probe, the_probe_decides_what_is_kept) {
    static struct answer with[2];
    const kvf_model_info *m = kvf_model_get_info(model);
    kvf_probe *probe = random_probe(m->n_embd), *other = NULL;
    kvf_probe_data d = {.struct_size = sizeof d};
    cr_assert_eq(kvf_probe_get(probe, &d), KVF_OK);
    size_t n = (size_t)m->n_layers * m->n_kv_heads * m->n_embd;
    float *turned = malloc(n * sizeof *turned);
    for (size_t i = 0; i < n; i++) turned[i] = -d.weight[i];
    d.weight = turned;
    cr_assert_eq(kvf_probe_create(&d, NULL, &other, NULL), KVF_OK);
    for (int i = 0; i < 2; i++) {
        kvf_engine_config c = probe_config(2000, i ? other : probe);
        answer_alone(&c, &with[i], 90, 3, 30, policies[0]);
    }
    cr_expect(memcmp(with[0].logprobs, with[1].logprobs, 30 * sizeof(double)) != 0);
    kvf_probe_close(probe);
    kvf_probe_close(other);
    free(turned);
}

Test(engine_probe, what_lacks_or_does_not_fit_is_named) {
    kvf_engine_config c = probe_config(2000, NULL);
    kvf_engine *e = create(&c);
    uint32_t prompt[MAX_TOKENS];
    struct answer a = {0};
    kvf_policy_options o = options_of(policies[0]);
    kvf_generate g = request_of(prompt, 40, 1, 4, &a);
    kvf_error err = {.text = ""};
    g.policy = &o;
    cr_expect_eq(kvf_engine_submit(e, &g, &a.id, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "score probe needs a probe"), "%s", err.text);
    kvf_engine_destroy(e);
    e = NULL;
    c.want_scores = 1;
    cr_expect_eq(kvf_engine_create(&c, &e, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "want_scores"), "%s", err.text);
    kvf_probe *wrong = random_probe(kvf_model_get_info(model)->n_embd + 8);
    c.probe = wrong;
    cr_expect_eq(kvf_engine_create(&c, &e, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "the model has"), "%s", err.text);
    kvf_probe_close(wrong);
}
