/* A model whose layers have a sliding window through the engine, against the decoder in double: chunks, preemption, several
 * answers, the prefix cache; what it holds; what is refused. */
#define _DEFAULT_SOURCE
#include "tests/engine_windows_rig.h"

static void open_sliding(void) { open_windows(8, 0); }

TestSuite(engine_windows, .init = open_sliding, .fini = close_model);

/* The most blocks that its tables hold, which is what the pool must have for it. */
static uint32_t most_blocks(uint32_t chunk) { return (WINDOW + chunk + BLOCK - 2 + BLOCK - 1) / BLOCK * N_LAYERS; }

Test(engine_windows, every_chunk_size_gives_the_naive_answer_in_a_bounded_pool) {
    static const uint32_t chunks[] = {8, 16, 64, 128};
    uint32_t prompt[MAX_TOKENS];
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        struct job j;
        char what[40];
        uint32_t n_blocks = most_blocks(chunks[i]), all = (N_PROMPT + BLOCK) / BLOCK * N_LAYERS;
        kvf_engine_config c = config_of(n_blocks < all ? n_blocks : all);
        c.chunk = chunks[i];
        snprintf(what, sizeof what, "chunk %u", chunks[i]);
        answer_alone(&c, &j, greedy(prompt, N_PROMPT, 3, N_NEW), "full");
        cr_assert(j.answers[0].finish == KVF_FINISH_LENGTH && j.answers[0].n_tokens == N_NEW);
        cr_assert_leq(j.answers[0].held, (uint64_t)N_LAYERS * (WINDOW + BLOCK - 1), "%s: holds %llu", what,
                      (unsigned long long)j.answers[0].held);
        expect_naive(prompt, N_PROMPT, &j.answers[0], what);
    }
}

Test(engine_windows, preempted_requests_give_the_same_answers) { expect_preempted_naive(2 * most_blocks(16) + 2); }

Test(engine_windows, several_answers_are_what_requests_of_their_own_are) {
    uint32_t prompt[MAX_TOKENS];
    struct job together, alone;
    kvf_engine_config c = config_of(400);
    expect_samples_alone(4);
    kvf_generate g = greedy(prompt, N_PROMPT, 5, N_NEW);
    g.n = g.beam_width = 3;
    c.chunk = 16;
    answer_alone(&c, &together, g, "full");
    c.chunk = 128;
    answer_alone(&c, &alone, g, "full");
    cr_assert_eq(together.n_ended, 3);
    for (uint32_t i = 0; i < 3; i++) expect_same(&alone.answers[i], &together.answers[i], 2e-4, "beams");
}

Test(engine_windows, the_prefix_cache_changes_no_answer) {
    expect_cached_naive(2 * most_blocks(16), false);
    expect_cached_naive(400, true);
}

Test(engine_windows, policies_that_evict_are_refused_beyond_the_window) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(200);
    expect_evicting_refused("or at most 24");
    c.max_context = WINDOW; /* within it, it is full attention */
    kvf_engine *e = create(&c);
    struct job j;
    submit(e, &j, greedy(prompt, 18, 3, 6), "d2o rho=0.5 min_tokens=8");
    run(e);
    cr_assert_eq(j.answers[0].n_tokens, 6u);
    kvf_engine_destroy(e);
}
