/* Dialogues: later turns against the library's own calls made by hand, to the bit; chunks, preemption, what is idle, refusals. */
#define _DEFAULT_SOURCE
#include "tests/engine_turns_rig.h"

TestSuite(engine_turns, .init = open_model, .fini = close_model);

static const char *const policies[] = {
    "full",
    "streaming rho=0.3 min_tokens=16",
    "h2o rho=0.3 min_tokens=16",
    "d2o rho=0.3 min_tokens=16",
    "d2o serving rho=0.4 min_tokens=16",
    "d2o authors rho=0.3",
    "d2o rho=0.3 min_tokens=16 score=prompt_plus_current evict_every=5",
    "d2o budget_tokens=90", /* more than the first prompt has */
    "d2o budget_tokens=200",
    "h2o rho=1 budget_may_change=1",
    "h2o rho=0.3 min_tokens=16 score_decay=0.5",
    "roco rho=0.3 min_tokens=16",
    "snapkv rho=0.3 min_tokens=16 window=8 score_window=16",
    "fold rho=0.3 min_tokens=16 merge=average",
    "sirllm rho=0.3 min_tokens=16",
    "h2o rho=0.3 min_tokens=16 score=repeat repeat_piece=64",
    "d2o rho=0.4 min_tokens=16 score=repeat score_norm=output merge=average",
};
enum { N_POLICIES = sizeof policies / sizeof *policies };

/* ---- What a turn is ------------------------------------------------------------------------------------------ */

Test(engine_turns, turns_are_what_the_library_does_by_hand) {
    static struct talk want, got;
    for (uint32_t p = 0; p < N_POLICIES; p++)
        for (uint32_t kind = 0; kind < 4; kind++) {
            static const uint32_t prompts[4][3] = {{70, 41, 30},
                                                   {33, 90, 1},
                                                   {20, 7, 64},
                                                   {79, 30, 20}}; /* 79 and an answer of 11: a budget of 90 is full */
            struct script s = script_of(prompts[kind], 3, 11, 40 + p);
            by_hand(&want, policies[p], &s, kind == 1 ? 16 : 64);
            for (uint32_t chunk = 16; chunk <= 64; chunk *= 2) {
                kvf_engine_config c = config_of(600, chunk);
                talk_alone(&c, &got, policies[p], &s);
                expect_talk(&want, &got, policies[p]);
            }
        }
}

/* The budget of all prompt tokens, the first prompt's weights; what was generated counts in neither. */
Test(engine_turns, a_turn_raises_the_budget_by_its_tokens_alone) {
    struct script s = script_of((const uint32_t[]){80, 40, 60}, 3, 10, 3);
    static struct talk t;
    kvf_engine_config c = config_of(600, 64);
    talk_alone(&c, &t, "d2o rho=0.4 min_tokens=16", &s);
    static const uint32_t total[3] = {32 * N_LAYERS, 48 * N_LAYERS, 72 * N_LAYERS}, n_prompt[3] = {80, 120, 180};
    for (uint32_t turn = 0; turn < 3; turn++) {
        uint32_t n = 0;
        for (uint32_t l = 0; l < N_LAYERS; l++) n += t.turns[turn].keep[l];
        cr_expect_eq(n, total[turn]);
        cr_expect_eq(t.turns[turn].n_prompt, n_prompt[turn]);
        cr_expect_eq(t.turns[turn].n_block_steps, 9u);
    }
}

/* full: a dialogue is the prompt it adds up to, within the rounding between decode and prefill. */
Test(engine_turns, full_is_the_whole_text_at_once) {
    struct script s = script_of((const uint32_t[]){30, 25, 40}, 3, 8, 9);
    static struct talk t, whole;
    kvf_engine_config c = config_of(600, 64);
    talk_alone(&c, &t, "full", &s);
    struct script one = s;
    one.n_turns = 1;
    one.n_tokens[0] = 0;
    for (uint32_t turn = 0; turn < 3; turn++) {
        memcpy(one.tokens[0] + one.n_tokens[0], s.tokens[turn], s.n_tokens[turn] * sizeof(uint32_t));
        one.n_tokens[0] += s.n_tokens[turn];
        if (turn < 2) memcpy(one.tokens[0] + one.n_tokens[0], s.forced[turn], 8 * sizeof(uint32_t));
        if (turn < 2) one.n_tokens[0] += 8;
    }
    memcpy(one.forced[0], s.forced[2], sizeof s.forced[2]);
    talk_alone(&c, &whole, "full", &one);
    for (uint32_t i = 0; i < 8; i++) cr_assert_float_eq(t.turns[2].logprobs[i], whole.turns[0].logprobs[i], 2e-4);
}

/* ---- Others beside it, preemption, the cache ------------------------------------------------------------------- */

/* Many dialogues in a small pool: idle ones lose what they hold, running ones are preempted; each says what it says alone. */
Test(engine_turns, many_in_a_small_pool_say_what_each_says_alone) {
    enum { N = 5 };
    static struct talk alone[N], t[N];
    static const char *const words[N] = {"d2o rho=0.3 min_tokens=16", "full", "h2o rho=0.5 min_tokens=16",
                                         "h2o rho=0.4 min_tokens=16 score=repeat repeat_piece=64",
                                         "snapkv rho=0.4 min_tokens=16 window=8 score_window=16"};
    struct script s[N];
    for (uint32_t i = 0; i < N; i++) s[i] = script_of((const uint32_t[]){60 - 7 * i, 20 + 9 * i, 33}, 3, 12, 70 + i);
    uint64_t n_preempted = 0, n_idle_lost = 0;
    for (uint32_t n_blocks = 40; n_blocks <= 100; n_blocks += 6)
        for (uint32_t kind = 0; kind < 4; kind++) { /* the cache on; a host tier */
            kvf_engine_config c = config_of(600, 32);
            for (uint32_t i = 0; i < N && n_blocks == 40 && !kind; i++) talk_alone(&c, &alone[i], words[i], &s[i]);
            c = config_of(n_blocks, 32);
            c.prefix_cache = kind & 1;
            c.host_bytes = kind & 2 ? c.kv_bytes * 2 : 0;
            kvf_engine *e = create(&c);
            for (uint32_t i = 0; i < N; i++) begin_talk(e, &t[i], words[i], &s[i], true);
            run_talks(e, t, N);
            n_preempted += stats_of(e).n_preempted;
            for (uint32_t i = 0; i < N; i++) n_idle_lost += t[i].n_idle_lost;
            kvf_engine_destroy(e);
            for (uint32_t i = 0; i < N; i++) expect_talk(&alone[i], &t[i], words[i]);
        }
    cr_expect(n_preempted > 50 && n_idle_lost > 10, "%llu preempted, %llu of them idle",
              (unsigned long long)n_preempted, (unsigned long long)n_idle_lost);
}

Test(engine_turns, from_within_a_callback) {
    static struct talk alone, t;
    struct script s = script_of((const uint32_t[]){50, 20, 30}, 3, 12, 5);
    kvf_engine_config c = config_of(600, 32);
    talk_alone(&c, &alone, "d2o rho=0.3 min_tokens=16", &s);
    kvf_engine *e = create(&c);
    begin_talk(e, &t, "d2o rho=0.3 min_tokens=16", &s, false);
    t.at_once = true;
    run_talks(e, &t, 1);
    kvf_engine_destroy(e);
    expect_talk(&alone, &t, "at once");
}

/* A budget that changes between turns, and within one. */
Test(engine_turns, budgets_change_between_turns) {
    static struct talk t[2];
    struct script s = script_of((const uint32_t[]){80, 40, 30}, 3, 12, 5);
    for (int preempted = 0; preempted < 2; preempted++) {
        kvf_engine_config c = config_of(600, 32);
        kvf_engine *e = create(&c);
        begin_talk(e, &t[preempted], "d2o rho=0.5 min_tokens=16", &s, false);
        run_to_idle(e);
        cr_assert_eq(kvf_engine_set_budget(e, t[preempted].id, 0.25, 0, NULL), KVF_OK);
        (void)one_step(e);
        kvf_occupancy o = stats_of(e).occupancy;
        cr_expect_leq(o.slots_used, (uint64_t)20 * N_LAYERS, "%llu", (unsigned long long)o.slots_used);
        run_talks(e, &t[preempted], 1);
        uint32_t n = 0;
        for (uint32_t l = 0; l < N_LAYERS; l++) n += t[preempted].turns[2].keep[l];
        cr_expect_eq(n, (150 / 4) * N_LAYERS);
        kvf_engine_destroy(e);
    }
    expect_talk(&t[0], &t[1], "again");
}

/* ---- Aborts, refusals -------------------------------------------------------------------------------------------- */

Test(engine_turns, aborts_in_every_state_leave_nothing) {
    static struct talk t, other;
    struct script s = script_of((const uint32_t[]){50, 40, 30}, 3, 5, 5);
    for (int at = 0; at < 30; at++)
        for (int kind = 0; kind < 2; kind++) {
            kvf_engine_config c = config_of(600, 16);
            kvf_engine *e = create(&c);
            begin_talk(e, &t, "d2o rho=0.3 min_tokens=16", &s, false);
            begin_talk(e, &other, "h2o rho=0.3 min_tokens=16", &s, false);
            for (int i = 0; i < at; i++) {
                (void)one_step(e);
                next_turn(&t);
            }
            uint32_t n = t.n_ended;
            bool idle = t.idle, live = kvf__live_find(e, t.id) != NULL;
            if (kind)
                cr_assert_eq(kvf_engine_abort(e, t.id), live ? KVF_OK : KVF_E_NOT_FOUND);
            else
                kvf_engine_destroy(e);
            cr_expect_eq(t.n_ended, n + (live && !idle), "an idle one has told its answer");
            if (!kind) continue;
            run_talks(e, &other, 1);
            cr_expect_eq(other.n_ended, 3u);
            kvf_engine_destroy(e);
        }
}

static void expect_refused(kvf_engine *e, kvf_request id, const kvf_turn *turn, kvf_status want, const char *words) {
    kvf_error err = {.text = ""};
    kvf_status st = kvf_engine_extend(e, id, turn, &err);
    cr_expect_eq(st, want, "%s: %s", kvf_status_name(st), err.text);
    cr_expect(strstr(err.text, words) != NULL, "'%s' lacks '%s'", err.text, words);
}

Test(engine_turns, what_cannot_be_is_refused_by_name) {
    static struct talk t;
    struct script s = script_of((const uint32_t[]){50, 40}, 2, 5, 5);
    kvf_engine_config c = config_of(600, 16);
    c.max_context = 120;
    kvf_engine *e = create(&c);
    kvf_turn turn = {.struct_size = sizeof turn, .tokens = s.tokens[1], .n_tokens = 40, .max_tokens = 5}, bad = turn;
    begin_talk(e, &t, "d2o rho=0.3 min_tokens=16", &s, false);
    expect_refused(e, t.id, &turn, KVF_E_STATE, "its answer has not ended");
    expect_refused(e, t.id + 1, &turn, KVF_E_NOT_FOUND, "not live");
    run_to_idle(e);
    bad.n_tokens = 0;
    expect_refused(e, t.id, &bad, KVF_E_INVALID, "turn: has no token");
    bad = turn, bad.max_tokens = 0;
    expect_refused(e, t.id, &bad, KVF_E_INVALID, "max_tokens 0");
    bad = turn, bad.n_tokens = 65;
    expect_refused(e, t.id, &bad, KVF_E_NEVER_FITS,
                   "max_context 120: a turn of 65 tokens behind 55, and one must follow; shorten it");
    bad = turn, bad.tokens = (const uint32_t[]){1u << 30}, bad.n_tokens = 1;
    expect_refused(e, t.id, &bad, KVF_E_INVALID, "token id 1073741824");
    bad = turn, bad.struct_size = 0;
    expect_refused(e, t.id, &bad, KVF_E_INVALID, "struct_size");
    run_talks(e, &t, 1);
    cr_expect_eq(t.n_ended, 2u);
    expect_refused(e, t.id, &turn, KVF_E_NOT_FOUND, "not live"); /* closed by run_talks */
    kvf_generate g = {.struct_size = sizeof g,
                      .tokens = s.tokens[0],
                      .n_tokens = 5,
                      .max_tokens = 2,
                      .n = 2,
                      .keep_open = 1,
                      .on_finish = on_finish};
    kvf_error err = {.text = ""};
    cr_expect_eq(kvf_engine_submit(e, &g, NULL, &err), KVF_E_INVALID);
    cr_expect(strstr(err.text, "keep_open") != NULL);
    kvf_engine_destroy(e);
    struct failing f = {INT64_MAX, 0};
    c.allocator = (kvf_allocator){failing_alloc, failing_free, &f};
    e = create(&c);
    begin_talk(e, &t, "d2o rho=0.3 min_tokens=16", &s, false);
    run_to_idle(e);
    int64_t n = 0, before = f.alive;
    turn.forced = s.forced[1];
    kvf_status st;
    do {
        f.left = n++;
        st = kvf_engine_extend(e, t.id, &turn, NULL);
        f.left = INT64_MAX;
        cr_assert(st == KVF_OK || (st == KVF_E_NO_MEMORY && f.alive == before));
    } while (st);
    cr_expect_gt(n, 3);
    t.turn = 1;
    t.idle = false;
    run_talks(e, &t, 1);
    kvf_engine_destroy(e);
    cr_expect_eq(f.alive, 0);
}

/* ---- What they hold ------------------------------------------------------------------------------------------------ */

static void no_end(void *user, const kvf_result *result) { (void)user, (void)result; }

/* An idle dialogue keeps its tables: they count in the full cache as they do in what is held. */
Test(engine_turns, r30_the_full_cache_counts_all_that_hold_tables) {
    kvf_engine_config c = config_of(600, 32);
    c.n_threads = 1;
    kvf_engine *e = create(&c);
    uint32_t tokens[100];
    random_prompt(tokens, 100, 3);
    kvf_policy_options o = options_of("full");
    kvf_generate g = {.struct_size = sizeof g,
                      .tokens = tokens,
                      .n_tokens = 90,
                      .max_tokens = 2,
                      .ignore_end = 1,
                      .keep_open = 1,
                      .policy = &o,
                      .on_finish = no_end};
    kvf_request idle, second;
    kvf_error err = {.text = ""};
    int more = 1;
    cr_assert_eq(kvf_engine_submit(e, &g, &idle, &err), KVF_OK, "%s", err.text);
    while (more) step(e, &more);
    g.n_tokens = 20;
    g.max_tokens = 8;
    g.keep_open = 0;
    cr_assert_eq(kvf_engine_submit(e, &g, &second, &err), KVF_OK, "%s", err.text);
    for (int i = 0; i < 4; i++) step(e, &more);
    kvf_engine_stats s = stats_of(e);
    cr_expect_eq(s.full_bytes, s.occupancy.held_bytes, "%llu with a full cache, %llu held",
                 (unsigned long long)s.full_bytes, (unsigned long long)s.occupancy.held_bytes);
    kvf_engine_destroy(e);
}
