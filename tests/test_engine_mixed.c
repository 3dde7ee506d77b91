/* A model some of whose layers have a sliding window: chunks, preemption, several answers, the prefix cache against the decoder
 * in double; what each layer holds; what a request is promised. */
#define _DEFAULT_SOURCE
#include "tests/engine_windows_rig.h"

static void open_mixed(void) {
    open_windows(9, 2); /* the layers at both ends slide */
    cr_assert_eq(kvf_model_get_info(model)->n_window_layers, 2u);
}

TestSuite(engine_mixed, .init = open_mixed, .fini = close_model);

static uint32_t ceil_block(uint32_t n) { return (n + BLOCK - 1) / BLOCK; }
/* What the tables of a request hold of so many tokens: two of a window, one of them all. */
static uint32_t blocks_of(uint32_t n, uint32_t chunk) {
    uint32_t most = WINDOW + chunk + BLOCK - 2;
    return ceil_block(n) + 2 * ceil_block(n < most ? n : most);
}

Test(engine_mixed, every_chunk_size_gives_the_naive_answer_in_the_least_pool) {
    static const uint32_t chunks[] = {8, 16, 64, 128};
    uint32_t prompt[MAX_TOKENS];
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        struct job j;
        char what[40];
        kvf_engine_config c = config_of(blocks_of(N_ALL - 1, chunks[i]));
        c.chunk = chunks[i];
        snprintf(what, sizeof what, "chunk %u", chunks[i]);
        answer_alone(&c, &j, greedy(prompt, N_PROMPT, 3, N_NEW), "full");
        cr_assert(j.answers[0].finish == KVF_FINISH_LENGTH && j.answers[0].n_tokens == N_NEW);
        cr_assert_leq(j.answers[0].held, (uint64_t)N_ALL + 2 * (WINDOW + BLOCK - 1), "%s: holds %llu", what,
                      (unsigned long long)j.answers[0].held);
        cr_assert_geq(j.answers[0].held, (uint64_t)N_ALL - 1 + 2 * (WINDOW - 1));
        expect_naive(prompt, N_PROMPT, &j.answers[0], what);
    }
}

Test(engine_mixed, preempted_requests_give_the_same_answers) { expect_preempted_naive(2 * blocks_of(N_ALL, 16) + 2); }

Test(engine_mixed, samples_and_the_prefix_cache_change_no_answer) {
    expect_samples_alone(3);
    expect_cached_naive(400, true);
}

Test(engine_mixed, policies_that_evict_are_refused) { expect_evicting_refused("sliding window"); }

/* A pool for a long prompt and a short request beside it, to the block. What the long one is promised goes to the layer that
 * keeps all; promised to the windows, which cannot hold it, it would be missing there, and the other would have to go. */
Test(engine_mixed, a_window_is_promised_no_more_than_it_holds) {
    uint32_t prompts[2][MAX_TOKENS];
    static struct job jobs[2];
    for (uint32_t chunk = 8; chunk <= 32; chunk *= 2) {
        uint32_t n = blocks_of(N_PROMPT + 1, chunk) + 3;
        kvf_engine_config c = config_of(n);
        c.chunk = chunk;
        kvf_engine *e = create(&c);
        submit(e, &jobs[0], greedy(prompts[0], N_PROMPT, 20, 3), "full"); /* 13 blocks of the layer that keeps all */
        submit(e, &jobs[1], greedy(prompts[1], 1, 21, 7), "full");        /* a block in each layer, for many steps */
        int more = 1;
        uint32_t promised_most = 0;
        while (more) {
            step(e, &more);
            kvf_pool_occupancy o = stats_of(e).occupancy.blocks;
            promised_most = o.n_promised > promised_most ? o.n_promised : promised_most;
            cr_assert_leq(o.n_held + o.n_promised, n);
        }
        cr_assert_gt(promised_most, ceil_block(N_PROMPT) / 2);
        cr_assert(jobs[0].answers[0].n_preempted == 0 && jobs[1].answers[0].n_preempted == 0,
                  "chunk %u: somebody had to go", chunk);
        expect_naive(prompts[0], N_PROMPT, &jobs[0].answers[0], "long");
        expect_naive(prompts[1], 1, &jobs[1].answers[0], "short");
        kvf_engine_destroy(e);
    }
}

/* What would fit is named by what the layers hold. */
Test(engine_mixed, a_prompt_that_never_fits_is_told_what_would) {
    uint32_t prompt[MAX_TOKENS], n_tokens = 0;
    kvf_engine_config c = config_of(20);
    c.chunk = 16;
    kvf_engine *e = create(&c);
    kvf_policy_options o = options_of("full");
    kvf_error err = {.text = ""};
    kvf_request id;
    kvf_generate g = greedy(prompt, 200, 3, 3);
    g.policy = &o;
    cr_assert_eq(kvf_engine_submit(e, &g, &id, &err), KVF_E_NEVER_FITS, "%s", err.text);
    const char *at = strstr(err.text, "at most ");
    cr_assert(at && sscanf(at, "at most %u tokens", &n_tokens) == 1, "%s", err.text);
    cr_assert(blocks_of(n_tokens, 16) <= 20 && blocks_of(n_tokens + 1, 16) > 20, "%u tokens", n_tokens);
    kvf_engine_destroy(e);
}
