/* Dialogues whose head groups have sizes of their own, against the library's calls made by hand, to the bit: groups of one and
 * of two KV heads, every kind of policy, any chunks and threads, pools that are too small, the prefix cache. */
#define _DEFAULT_SOURCE
#include "tests/engine_turns_rig.h"

TestSuite(engine_head_turns, .init = open_wide_model, .fini = close_model);

enum { HEADS = 4 };

/* unequal: groups must be seen to differ. Those whose window is all but the sinks have nothing to give, one that goes by
 * probabilities finds the same in every head, and these heads are too alike for blocks of 16. */
static const struct kind {
    const char *policy;
    int unequal;
} kinds[] = {
    {"h2o rho=0.4 min_tokens=16 head_budget=adaptive", 1},
    {"h2o rho=0.3 min_tokens=16 head_budget=adaptive head_floor=0 nm=7:1 evict_every=3", 1},
    {"d2o rho=0.3 min_tokens=16 head_budget=adaptive", 1},
    {"h2o rho=0.6 min_tokens=0 budget_unit=block evict_every=4 sinks=0 head_budget=adaptive head_floor=0 nm=15:1", 0},
    {"d2o rho=0.3 redistribute=0 head_budget=adaptive", 1},
    {"d2o rho=0.4 min_tokens=16 score=prompt_plus_current evict_every=5 head_budget=adaptive", 1},
    {"d2o budget_tokens=90 head_budget=adaptive", 1}, /* more than the first prompt has */
    {"d2o rho=0.4 min_tokens=16 defer_first_decode=1 head_budget=adaptive", 1},
    {"d2o rho=0.4 min_tokens=16 full_layers=0 head_budget=adaptive nm=7:1", 1},
    {"h2o rho=0.4 min_tokens=16 score_decay=0.5 head_budget=adaptive", 1},
    {"h2o rho=0.3 min_tokens=16 score=window score_window=12 evict_every=2 head_budget=adaptive", 1},
    {"d2o rho=0.3 min_tokens=16 score=sqrt score_norm=v score_pool=3 gqa=max head_budget=adaptive", 1},
    {"h2o rho=1 budget_may_change=1 head_budget=adaptive", 0},
    {"roco rho=0.4 min_tokens=16 head_budget=adaptive", 1},
    {"snapkv rho=0.4 min_tokens=16 window=8 score_window=16 head_budget=adaptive", 1},
    {"pyramidkv rho=0.5 min_tokens=16 window=8 score_window=16 budget_unit=block head_budget=adaptive head_floor=0", 0},
    {"fold rho=0.4 min_tokens=16 merge=average gate=0.2 head_budget=adaptive", 1},
    {"cam h2o rho=0.4 min_tokens=16 cam_mode=sample cam_seed=5 evict_every=4 head_budget=adaptive", 1},
    {"cam rho=0.4 min_tokens=16 head_budget=adaptive", 0},
    {"streaming rho=0.4 min_tokens=16 head_budget=adaptive", 0},
    {"sirllm rho=0.4 min_tokens=16 head_budget=adaptive", 0},
    {"full", 0},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

/* Whether the groups of a layer differ by more than what is left over where they are equal; their totals are exact. */
static int unequal(const struct talk *t, uint32_t n_groups, const char *policy) {
    int differ = 0;
    for (uint32_t turn = 0; turn < t->script->n_turns; turn++)
        for (uint32_t l = 0; l < N_LAYERS; l++) {
            const uint32_t *keep = t->turns[turn].groups + l * n_groups;
            uint64_t sum = 0, total = (uint64_t)t->turns[turn].keep[l] * n_groups;
            for (uint32_t g = 0; g < n_groups; g++) {
                sum += keep[g];
                differ |= keep[g] > keep[0] + 1 || keep[0] > keep[g] + 1;
            }
            cr_assert(sum == 0 || sum == total || t->turns[turn].keep[l] == UINT32_MAX,
                      "%s: turn %u, layer %u: %llu slots, not %llu", policy, turn, l, (unsigned long long)sum,
                      (unsigned long long)total);
        }
    return differ;
}

Test(engine_head_turns, turns_are_what_the_library_does_by_hand) {
    static struct talk want, got;
    for (uint32_t k = 0; k < N_KINDS; k++) {
        int seen = 0;
        for (uint32_t script = k % 2; script < 4; script += 2) {
            static const uint32_t prompts[4][3] = {{70, 41, 30},
                                                   {33, 90, 1},
                                                   {20, 7, 64},
                                                   {79, 30, 20}}; /* 79 and an answer of 11: a budget of 90 is full */
            struct script s = script_of(prompts[script], 3, 11, 40 + k);
            uint32_t per_group = 1 + (script / 2 + k / 2) % 2;
            by_hand_groups(&want, kinds[k].policy, &s, script % 3 ? 16 : 64, per_group);
            seen |= unequal(&want, HEADS / per_group, kinds[k].policy);
            for (uint32_t chunk = 16; chunk <= 64; chunk *= 4) {
                kvf_engine_config c = config_of(1200, chunk);
                c.heads_per_group = per_group;
                c.n_threads = chunk == 16 ? 1 : 2;
                c.prefix_cache = script % 2;
                talk_alone(&c, &got, kinds[k].policy, &s);
                expect_talk(&want, &got, kinds[k].policy);
            }
        }
        cr_expect(seen || !kinds[k].unequal, "%s", kinds[k].policy);
    }
}

/* Each says what it says alone, whoever is preempted, swapped, or loses what it holds between its turns. */
Test(engine_head_turns, many_in_a_small_pool_say_what_each_says_alone) {
    enum { N = 6 };
    static struct talk alone[N], t[N];
    static const uint32_t which[N] = {0, 3, 6, 14, 17, 20};
    struct script s[N];
    uint64_t n_preempted = 0, n_idle_lost = 0, n_swapped = 0;
    for (uint32_t i = 0; i < N; i++) s[i] = script_of((const uint32_t[]){60 - 7 * i, 20 + 9 * i, 33}, 3, 12, 70 + i);
    for (uint32_t per_group = 1; per_group <= 2; per_group++)
        for (uint32_t n_blocks = 40; n_blocks <= 100; n_blocks += 20)
            for (uint32_t kind = 0; kind < 4; kind++) { /* the cache on; a host tier */
                kvf_engine_config c = config_of(1200, 32);
                c.heads_per_group = per_group;
                for (uint32_t i = 0; i < N && n_blocks == 40 && !kind; i++)
                    talk_alone(&c, &alone[i], kinds[which[i]].policy, &s[i]);
                c.kv_bytes = config_of(2 * n_blocks, 32).kv_bytes;
                c.prefix_cache = kind & 1;
                c.host_bytes = kind & 2 ? c.kv_bytes * 2 : 0;
                c.n_threads = 1 + kind % 2;
                kvf_engine *e = create(&c);
                for (uint32_t i = 0; i < N; i++) begin_talk(e, &t[i], kinds[which[i]].policy, &s[i], true);
                run_talks(e, t, N);
                n_preempted += stats_of(e).n_preempted;
                n_swapped += stats_of(e).n_swapped_in;
                for (uint32_t i = 0; i < N; i++) n_idle_lost += t[i].n_idle_lost;
                kvf_engine_destroy(e);
                for (uint32_t i = 0; i < N; i++) expect_talk(&alone[i], &t[i], kinds[which[i]].policy);
            }
    cr_expect(n_preempted > 50 && n_idle_lost > 10 && n_swapped > 10, "%llu preempted, %llu idle, %llu back",
              (unsigned long long)n_preempted, (unsigned long long)n_idle_lost, (unsigned long long)n_swapped);
}

/* A budget that changes between turns counts at once, is shared out anew, and again at the next turn's end. */
Test(engine_head_turns, budgets_change_between_turns) {
    static struct talk t[2];
    struct script s = script_of((const uint32_t[]){80, 40, 30}, 3, 12, 5);
    for (uint32_t per_group = 1; per_group <= 2; per_group++) {
        uint32_t n_groups = HEADS / per_group;
        for (uint32_t again = 0; again < 2; again++) {
            kvf_engine_config c = config_of(1200, 16 << again);
            c.heads_per_group = per_group;
            c.n_threads = 1 + again;
            kvf_engine *e = create(&c);
            begin_talk(e, &t[again], "d2o rho=0.5 min_tokens=16 head_budget=adaptive", &s, false);
            run_to_idle(e);
            cr_assert_eq(kvf_engine_set_budget(e, t[again].id, 0.25, 0, NULL), KVF_OK);
            (void)one_step(e);
            kvf_occupancy o = stats_of(e).occupancy;
            cr_expect_eq(o.slots_used, (uint64_t)20 * N_LAYERS * n_groups, "%llu", (unsigned long long)o.slots_used);
            run_talks(e, &t[again], 1);
            kvf_engine_destroy(e);
            uint32_t n = 0;
            for (uint32_t i = 0; i < N_LAYERS * n_groups; i++) n += t[again].turns[2].groups[i];
            cr_expect_eq(n, (150 / 4) * N_LAYERS * n_groups);
            cr_expect(unequal(&t[again], n_groups, "changed"));
        }
        expect_talk(&t[0], &t[1], "again");
    }
}

/* Out of memory at any allocation of a turn: nothing has changed, and the next try says what is said without. */
Test(engine_head_turns, every_allocation_may_fail) {
    static struct talk want, t;
    struct failing f = {INT64_MAX, 0};
    struct script s = script_of((const uint32_t[]){50, 40}, 2, 5, 5);
    kvf_engine_config c = config_of(1200, 16);
    c.heads_per_group = 1;
    talk_alone(&c, &want, kinds[0].policy, &s);
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    kvf_engine *e = NULL;
    kvf_status st;
    int64_t n = 0;
    do {
        f.left = n++;
        st = kvf_engine_create(&c, &e, NULL);
        cr_assert(st == KVF_OK || (st == KVF_E_NO_MEMORY && f.alive == 0), "%s", kvf_status_name(st));
    } while (st);
    cr_expect_gt(n, 30);
    f.left = INT64_MAX;
    begin_talk(e, &t, kinds[0].policy, &s, false);
    run_to_idle(e);
    kvf_turn turn = {.struct_size = sizeof turn,
                     .tokens = s.tokens[1],
                     .n_tokens = 40,
                     .max_tokens = s.n_answer,
                     .forced = s.forced[1]};
    int64_t before = f.alive;
    n = 0;
    do {
        f.left = n++;
        st = kvf_engine_extend(e, t.id, &turn, NULL);
        cr_assert(st == KVF_OK || (st == KVF_E_NO_MEMORY && f.alive == before));
    } while (st);
    f.left = 0; /* steps take no memory but for text */
    t.turn = 1;
    t.idle = false;
    (void)one_step(e);
    f.left = INT64_MAX;
    run_talks(e, &t, 1);
    kvf_engine_destroy(e);
    cr_expect_eq(f.alive, 0);
    expect_talk(&want, &t, "after failures");
}
