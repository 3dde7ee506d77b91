/* Budgets of requests whose head groups have sizes of their own: exact totals, rho 1, bytes, changes while they run. */
#define _DEFAULT_SOURCE
#include "tests/engine_variants_rig.h"

TestSuite(engine_head_budget, .init = open_wide_model, .fini = close_model);

enum { HEADS = 4, K = 4 };

static kvf_engine_config config_heads(uint32_t per_group) {
    kvf_engine_config c = config_of(4000);
    c.heads_per_group = per_group;
    return c;
}

static kvf_engine *begin(const kvf_engine_config *c, struct job *j, uint32_t n_prompt, uint32_t max_tokens,
                         const char *policy) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine *e = create(c);
    submit(e, j, request_of(prompt, n_prompt, n_prompt, max_tokens), &policy, 1);
    return e;
}

static void step_to(kvf_engine *e, const struct job *j, uint32_t n_tokens) {
    for (int more = 1; more && j->answers[0].n_seen < n_tokens;) step(e, &more);
}

/* ---- What a request's tables hold and may hold -------------------------------------------------------------------- */

struct held {
    uint32_t slots[N_LAYERS * HEADS], keep[N_LAYERS * HEADS];
    uint64_t n_slots, n_keep;
    bool unequal;
};

static struct held look(kvf_engine *e, const struct job *j) {
    struct held h = {.n_slots = 0};
    const kvf__live *r = kvf__live_find(e, j->id);
    uint32_t index;
    cr_assert(r && !kvf_seq_index(e->manager, r->seq, &index));
    const kvf_layer_size *sizes = kvf_policy_sizes(e->policies, index),
                         *groups = kvf_policy_group_sizes(e->policies, index);
    for (uint32_t t = 0; t < e->n_tables; t++) {
        cr_assert_eq(kvf_seq_table(e->manager, r->seq, t / e->n_groups, t % e->n_groups, &h.slots[t], NULL, NULL),
                     KVF_OK);
        h.n_slots += h.slots[t];
        if (!groups) continue;
        h.keep[t] = groups[t].keep;
        h.n_keep += h.keep[t];
        h.unequal |= groups[t].keep != sizes[t / e->n_groups].keep;
    }
    return h;
}

/* In tokens, or in blocks that k slots more fill. */
static uint64_t total_of(uint32_t budget, uint32_t n_groups, bool by_block) {
    uint64_t slots = (uint64_t)budget * N_LAYERS;
    return n_groups * (by_block ? slots / BLOCK * BLOCK - (uint64_t)K * N_LAYERS : slots);
}

Test(engine_head_budget, totals_are_exact_from_the_prompt_on) {
    static const char *const kinds[] = {"h2o",
                                        "d2o",
                                        "evict",
                                        "roco",
                                        "fold gate=0.3",
                                        "cam h2o",
                                        "sirllm",
                                        "snapkv window=8 score_window=16",
                                        "pyramidkv window=8 score_window=16"};
    static struct job j;
    uint32_t n_unequal = 0, n = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (uint32_t kind = 0; kind < 8; kind++) {
            char policy[160];
            uint32_t per_group = 1 + kind % 2, n_groups = HEADS / per_group, n_prompt = 70 + 13 * kind,
                     by_block = kind / 2 % 2;
            double rho = 0.3 + 0.05 * kind;
            uint32_t budget = (uint32_t)floor(rho * n_prompt + 1e-6);
            bool grows = strstr(kinds[k], "kv") != NULL;
            snprintf(policy, sizeof policy,
                     "%s rho=%g min_tokens=0 evict_every=%d head_budget=adaptive head_floor=%g budget_unit=%s",
                     kinds[k], rho, K, kind % 3 * 0.2, by_block ? "block" : "token");
            kvf_engine_config c = config_heads(per_group);
            kvf_engine *e = begin(&c, &j, n_prompt, 40, policy);
            uint64_t total = total_of(budget, n_groups, by_block);
            if (grows && by_block) total = (uint64_t)budget * N_LAYERS / BLOCK * BLOCK * n_groups;
            step_to(e, &j, 1);
            struct held h = look(e, &j);
            uint64_t within = 0; /* whole blocks may be more than the prompt */
            for (uint32_t t = 0; t < N_LAYERS * n_groups; t++) within += KVF__MIN(h.keep[t], n_prompt);
            cr_assert(h.n_slots == within && h.n_keep == total, "%s: holds %llu of %llu, not %llu", policy,
                      (unsigned long long)h.n_slots, (unsigned long long)h.n_keep, (unsigned long long)total);
            n_unequal += h.unequal;
            n++;
            for (uint32_t at = 2; at < 30; at += 9) {
                step_to(e, &j, at);
                h = look(e, &j);
                cr_assert_eq(h.n_keep, total, "%s", policy);
                for (uint32_t t = 0; t < N_LAYERS * n_groups && !grows; t++)
                    cr_assert(h.slots[t] >= h.keep[t] && h.slots[t] < h.keep[t] + K, "%s: table %u", policy, t);
            }
            run(e);
            kvf_engine_destroy(e);
        }
    cr_expect_gt(n_unequal, n / 2, "%u of %u", n_unequal, n);
}

/* ---- rho 1, bytes ------------------------------------------------------------------------------------------------- */

Test(engine_head_budget, rho_1_is_full_to_the_bit) {
    static const char *const kinds[] = {"h2o",    "d2o",       "d2o serving", "roco",
                                        "snapkv", "pyramidkv", "cam",         "cam h2o",
                                        "sirllm", "fold",      "streaming",   "h2o budget_may_change=1"};
    static struct job full, j;
    for (uint32_t per_group = 1; per_group <= 2; per_group++) {
        kvf_engine_config c = config_heads(per_group);
        uint32_t prompt[MAX_TOKENS];
        kvf_generate g = request_of(prompt, 90, 4, 30);
        answer_alone(&c, &full, g, (const char *const[]){"full"}, 1);
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            char text[96];
            const char *policy = text;
            snprintf(text, sizeof text, "%s rho=1 head_budget=adaptive", kinds[k]);
            answer_alone(&c, &j, g, &policy, 1);
            expect_bits(&full.answers[0], &j.answers[0], text);
            cr_expect_eq(j.answers[0].held, (90u + 29) * N_LAYERS * HEADS / per_group);
        }
    }
}

/* K and V of four heads of 16 floats in three layers: 1,536 bytes a token. */
Test(engine_head_budget, bytes_are_so_many_tokens) {
    static struct job by_tokens, by_bytes;
    for (uint32_t per_group = 1; per_group <= 2; per_group++) {
        kvf_engine_config c = config_heads(per_group);
        uint32_t prompt[MAX_TOKENS];
        kvf_generate g = request_of(prompt, 100, 3, 30);
        const char *tokens = "h2o budget_tokens=30 head_budget=adaptive",
                   *bytes = "h2o budget_bytes=47615 head_budget=adaptive"; /* 31 tokens lack a byte */
        answer_alone(&c, &by_tokens, g, &tokens, 1);
        answer_alone(&c, &by_bytes, g, &bytes, 1);
        expect_bits(&by_tokens.answers[0], &by_bytes.answers[0], "submitted");
        kvf_engine *e[2];
        struct job *j[2] = {&by_tokens, &by_bytes};
        for (int i = 0; i < 2; i++) {
            e[i] = begin(&c, j[i], 100, 30, "h2o rho=0.5 min_tokens=16 head_budget=adaptive");
            step_to(e[i], j[i], 5);
            cr_assert_eq(i ? kvf_engine_set_budget_bytes(e[i], j[i]->id, 47615, NULL)
                           : kvf_engine_set_budget(e[i], j[i]->id, 0.5, 30, NULL),
                         KVF_OK);
            step_to(e[i], j[i], 6);
            cr_expect_eq(look(e[i], j[i]).n_keep, total_of(30, HEADS / per_group, false));
            run(e[i]);
            kvf_engine_destroy(e[i]);
        }
        expect_bits(&by_tokens.answers[0], &by_bytes.answers[0], "changed");
    }
}

/* ---- Changes ------------------------------------------------------------------------------------------------------- */

/* A changed budget is shared out anew before the next token, by what the slots are worth then: groups above their new size
 * shrink to it, the others keep what they have and grow into theirs. The total is that of the new budget to the slot. */
Test(engine_head_budget, a_change_is_shared_out_before_the_next_token) {
    static const char *const kinds[] = {"h2o rho=0.5 nm=7:1", "d2o rho=0.5", "h2o rho=0.5 budget_unit=block nm=7:1"};
    static struct job j;
    uint32_t n_unequal = 0, n_moved = 0;
    for (uint32_t kind = 0; kind < 12; kind++) {
        char policy[160];
        uint32_t per_group = 1 + kind % 2, n_groups = HEADS / per_group;
        bool by_block = strstr(kinds[kind % 3], "block") != NULL;
        snprintf(policy, sizeof policy, "%s min_tokens=16 evict_every=%d head_budget=adaptive", kinds[kind % 3], K);
        kvf_engine_config c = config_heads(per_group);
        kvf_engine *e = begin(&c, &j, 100, 60, policy);
        uint32_t budgets[] = {50, 30, 30, 70, 28 + kind};
        for (uint32_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
            kvf_error err = {.text = ""};
            struct held before = {.n_slots = 0}, h;
            if (i) before = look(e, &j);
            if (i) cr_assert_eq(kvf_engine_set_budget(e, j.id, 1, budgets[i], &err), KVF_OK, "%s", err.text);
            step_to(e, &j, 1 + i * 7);
            if (i) step(e, NULL);
            h = look(e, &j);
            cr_assert_eq(h.n_keep, total_of(budgets[i], n_groups, by_block), "%s, change %u: %llu", policy, i,
                         (unsigned long long)h.n_keep);
            n_unequal += h.unequal;
            for (uint32_t t = 0; t < N_LAYERS * n_groups; t++) {
                cr_assert_lt(h.slots[t], h.keep[t] + K);
                n_moved += i && h.keep[t] != before.keep[t];
            }
            step_to(e, &j, 7 + i * 7);
        }
        run(e);
        kvf_engine_destroy(e);
    }
    cr_expect(n_unequal > 30 && n_moved > 200, "%u, %u", n_unequal, n_moved);
}

/* Right after the change, before a token: the step that comes shrinks what is above and nothing else. */
Test(engine_head_budget, only_groups_above_their_size_shrink) {
    static struct job j;
    kvf_engine_config c = config_heads(1);
    kvf_engine *e = begin(&c, &j, 100, 60, "h2o rho=0.5 min_tokens=16 nm=7:1 head_budget=adaptive head_floor=0");
    uint32_t n_kept = 0, n_shrunk = 0;
    for (uint32_t at = 4; at < 50; at += 5) {
        step_to(e, &j, at);
        struct held before = look(e, &j);
        cr_assert_eq(kvf_engine_set_budget(e, j.id, 1, at % 2 ? 40 : 46, NULL), KVF_OK);
        struct held told = look(e, &j);
        cr_expect(!told.unequal && told.n_slots == before.n_slots, "until the event groups count as equal");
        step(e, NULL);
        struct held h = look(e, &j);
        for (uint32_t t = 0; t < N_LAYERS * HEADS; t++) {
            uint32_t kept = KVF__MIN(before.slots[t], h.keep[t]);
            cr_assert(h.slots[t] == kept + 1 || (h.slots[t] == kept && kept == h.keep[t]),
                      "table %u: %u of %u, %u before", t, h.slots[t], h.keep[t],
                      before.slots[t]); /* and the token, or it has evicted one again */
            n_kept += before.slots[t] < h.keep[t];
            n_shrunk += before.slots[t] > h.keep[t];
        }
    }
    cr_expect(n_kept > 20 && n_shrunk > 20, "%u, %u", n_kept, n_shrunk);
    run(e);
    kvf_engine_destroy(e);
}

/* Groups that are dealt their sizes in decode round up to more blocks than equal ones, which are all that was promised: where
 * there are no more the step goes on, and somebody makes room. */
Test(engine_head_budget, sizes_that_round_up_find_no_block_and_go_on) {
    static struct job j, other;
    uint32_t prompt[MAX_TOKENS], n_tight = 0;
    static const char *const kinds[] = {"h2o rho=0.3 min_tokens=16 nm=7:1 head_budget=adaptive head_floor=0",
                                        "d2o budget_tokens=70 nm=7:1 head_budget=adaptive head_floor=0"};
    for (uint32_t kind = 0; kind < 2; kind++)
        for (uint32_t budget = 30; budget < 70; budget += 3) {
            kvf_engine_config c = config_heads(1);
            c.kv_bytes = config_of(150).kv_bytes; /* 300 blocks */
            kvf_block held[300];
            uint32_t n = 0;
            kvf_engine *e = create(&c);
            const char *full = "full";
            submit(e, &j, request_of(prompt, 60, budget, 90), &kinds[kind], 1);
            submit(e, &other, request_of(prompt, 20, 2, 60), &full, 1);
            step_to(e, &j, kind ? 8 : 5);
            if (!kind) cr_assert_eq(kvf_engine_set_budget(e, j.id, 1, budget, NULL), KVF_OK);
            /* Nothing is free but what is promised. */
            for (kvf_occupancy o = stats_of(e).occupancy; n + o.blocks.n_promised < o.blocks.n_free; n++)
                cr_assert_eq(kvf_block_take(e->manager, 0, &held[n]), KVF_OK);
            for (int i = 0; i < 30; i++) step(e, NULL);
            n_tight += stats_of(e).n_preempted > 0;
            for (uint32_t i = 0; i < n; i++) cr_assert_eq(kvf_block_release(e->manager, held[i]), KVF_OK);
            run(e);
            cr_assert(j.answers[0].n_tokens == 90 && other.answers[0].n_tokens == 60);
            kvf_engine_destroy(e);
        }
    cr_expect_gt(n_tight, 5u, "%u", n_tight);
}
