/* The real model under the engine, with policies that repeat the prompt: what is kept, against another reader's values. */
#define _DEFAULT_SOURCE
#include <jansson.h>

#include "tests/engine_rig.h"
#include "tests/real_model.h"

struct kept {
    const json_t *sizes, *kept; /* [layer][KV head]; {layer: [KV head][slot]} */
    kvf_engine *engine;
    uint32_t n_moved, n_all; /* slots of sizes that differ, of all tables */
    uint32_t n_other, n_positions;
    bool seen, ended;
};

static uint32_t number(const json_t *list, size_t i) { return (uint32_t)json_integer_value(json_array_get(list, i)); }

static uint32_t n_common(const uint32_t *pos, uint32_t n, const json_t *want) {
    uint32_t common = 0;
    for (size_t k = 0; k < json_array_size(want); k++)
        for (uint32_t i = 0; i < n; i++) common += pos[i] == number(want, k);
    return common;
}

static void look(void *user, kvf_request request, uint32_t token, double logprob) {
    struct kept *k = user;
    const kvf_model_info *m = kvf_model_get_info(model);
    (void)token, (void)logprob;
    if (k->seen) return;
    k->seen = true;
    for (uint32_t l = 0; l < m->n_layers; l++)
        for (uint32_t h = 0; h < m->n_kv_heads; h++) {
            uint32_t pos[MAX_TOKENS], n = 0, size = number(json_array_get(k->sizes, l), h);
            char name[12];
            cr_assert_eq(kvf_engine_positions(k->engine, request, l, h, pos, MAX_TOKENS, &n), KVF_OK);
            k->n_moved += n > size ? n - size : size - n;
            k->n_all += size;
            snprintf(name, sizeof name, "%u", l);
            const json_t *want = json_array_get(json_object_get(k->kept, name), h);
            if (!want) continue;
            k->n_positions += (uint32_t)json_array_size(want);
            k->n_other += (uint32_t)json_array_size(want) - n_common(pos, n, want);
        }
}

static void on_end(void *user, const kvf_result *r) {
    struct kept *k = user;
    cr_assert(r->finish == KVF_FINISH_LENGTH, "%s", r->error ? r->error : "");
    k->ended = true;
}

/* KVFOLD_SCORES_GOLDEN names the file. Sizes within 1%, and 99% of the kept positions: scores are equal within rounding only. */
Test(engine_repeat_golden, sizes_and_kept_positions_are_those_of_another_reader) {
    const char *path = kvf_test_real_model(), *golden = getenv("KVFOLD_SCORES_GOLDEN");
    if (!path || !golden) cr_skip_test("no real model here, or KVFOLD_SCORES_GOLDEN is not set");
    json_error_t error;
    kvf_error err = {.text = ""};
    json_t *o = json_load_file(golden, 0, &error), *list = json_object_get(o, "threshold");
    cr_assert(json_array_size(list) > 0, "%s", error.text);
    cr_assert_eq(kvf_model_open(path, NULL, &model, &err), KVF_OK, "%s", err.text);
    uint32_t prompt[MAX_TOKENS], n = (uint32_t)json_array_size(json_object_get(o, "prompt"));
    for (uint32_t i = 0; i < n; i++) prompt[i] = number(json_object_get(o, "prompt"), i);
    kvf_engine_config c;
    kvf_engine_config_init(&c, sizeof c);
    c.model = model;
    c.kv_dtype = KVF_F32;
    c.heads_per_group = 1;
    c.max_context = 1024;
    c.kv_bytes = (uint64_t)128 << 20;
    kvf_engine *e = create(&c);
    const json_t *instruction = json_object_get(o, "repeat_instruction");
    cr_assert_eq(e->n_instruction, json_array_size(instruction));
    for (uint32_t i = 0; i < e->n_instruction; i++) cr_expect_eq(e->instruction[i], number(instruction, i));
    for (size_t t = 0; t < json_array_size(list); t++) {
        const json_t *of = json_array_get(list, t);
        bool plus = !strcmp(json_string_value(json_object_get(of, "score")), "zip_plus");
        char words[200];
        snprintf(words, sizeof words,
                 "d2o score=repeat score_norm=%s budget=global merge=none min_tokens=0 rho=%g sinks=%lld window=%lld "
                 "head_floor=%g",
                 plus ? "output" : "none", json_number_value(json_object_get(of, "rho")),
                 json_integer_value(json_object_get(of, "sinks")), json_integer_value(json_object_get(of, "window")),
                 json_number_value(json_object_get(of, "floor")));
        struct kept k = {.sizes = json_object_get(of, "sizes"), .kept = json_object_get(of, "kept"), .engine = e};
        kvf_policy_options policy = options_of(words);
        kvf_generate g = {.struct_size = sizeof g, .tokens = prompt, .n_tokens = n, .max_tokens = 1, .ignore_end = 1};
        g.policy = &policy;
        g.user = &k;
        g.on_token = look;
        g.on_finish = on_end;
        cr_assert_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_OK, "%s", err.text);
        run(e);
        cr_assert(k.seen && k.ended && k.n_positions > 0);
        cr_expect(k.n_moved * 100 <= k.n_all && k.n_other * 100 <= k.n_positions,
                  "%s: %u of %u slots are in other tables, %u of %u positions are not kept", words, k.n_moved, k.n_all,
                  k.n_other, k.n_positions);
        fprintf(stderr, "%s: %u of %u slots in other tables, %u of %u positions not kept\n", words, k.n_moved, k.n_all,
                k.n_other, k.n_positions);
    }
    kvf_engine_destroy(e);
    kvf_model_close(model);
    json_decref(o);
}
