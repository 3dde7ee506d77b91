/* Prefill and decode on every path against a naive model over dense arrays. */
#include "attention_cases.h"

/* groups, heads per group, query heads per KV head, head size, block size, sequences, contexts, tokens. */
static const shape shapes[] = {
    {1, 1, 1, 64, 16, 1, {0}, {37}, KVF_F32, false, 0, 0},
    {1, 3, 3, 64, 16, 2, {70, 0}, {9, 30}, KVF_F16, false, 0, 0},        /* SmolLM2's heads */
    {1, 2, 4, 128, 32, 3, {5, 520, 33}, {9, 8, 1}, KVF_F16, true, 0, 0}, /* over a tile */
    {2, 1, 8, 80, 8, 2, {40, 515}, {3, 3}, KVF_F32, true, 0, 0},         /* head groups of one head, lengths differ */
    {1, 1, 16, 96, 64, 2, {17, 2}, {7, 7}, KVF_F32, false, 0, 0},        /* multi-query */
    {1, 1, 64, 8, 256, 1, {1030}, {2}, KVF_F32, false, 0, 0},            /* most heads, least head size */
    {2, 2, 1, 256, 128, 2, {130, 1}, {8, 14}, KVF_F16, true, 0, 0},
    {1, 2, 1, 72, 16, 1, {505}, {20}, KVF_F16, false, 0, 0}, /* a chunk over a tile's edge */
    {1, 2, 4, 72, 16, 2, {505, 3}, {20, 4}, KVF_BF16, true, 0, 0},
    {2, 1, 9, 128, 32, 1, {540}, {11}, KVF_BF16, false, 0, 0},
    {1, 1, 5, 40, 16, 2, {0, 511}, {1, 2}, KVF_F32, false, 0, 0},
    {1, 2, 7, 16, 8, 1, {1}, {60}, KVF_F32, true, 0, 0},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

Test(attention, prefill_matches_the_naive_model) {
    for (size_t i = 0; i < N_SHAPES; i++) against_naive(&shapes[i], i, false, 1e-5);
}

Test(attention, decode_matches_the_naive_model) {
    for (size_t i = 0; i < N_SHAPES; i++) against_naive(&shapes[i], i, true, 1e-5);
}

Test(attention, random_shapes_match_the_naive_model) {
    static const uint32_t dims[] = {8, 24, 64, 80, 96, 128}, sizes[] = {8, 16, 32, 64, 128, 256};
    for (uint64_t seed = 1; seed <= 20; seed++) {
        uint64_t state = seed * 77;
        shape s = {.n_groups = 1 + next_random(&state) % 2,
                   .heads_per_group = 1 + next_random(&state) % 3,
                   .per_kv = 1 + next_random(&state) % 6,
                   .head_dim = dims[next_random(&state) % 6],
                   .block_size = sizes[next_random(&state) % 6],
                   .n_seqs = 1 + next_random(&state) % 3,
                   .dtype = (kvf_dtype)(next_random(&state) % 3),
                   .bias = next_random(&state) % 2};
        for (uint32_t i = 0; i < s.n_seqs; i++) {
            s.context[i] = next_random(&state) % 4 ? next_random(&state) % 90 : 480 + next_random(&state) % 90;
            s.tokens[i] = 1 + next_random(&state) % 18;
        }
        random_against_naive(&s, seed, &state, 1e-5);
    }
}

/* The mass adds up: a query gives 1 in all, so column sums give the number of queries, and a row that of its heads. */
Test(attention, mass_adds_up) {
    world *w = make_world((shape){1, 2, 3, 64, 16, 2, {700, 10}, {5, 5}, KVF_F16, true, 0, 0}, 5);
    for (kvf_cpu_path path = KVF_CPU_REF; path <= KVF_CPU_AVX512; path++) {
        if (!kvf_cpu_has_path(path)) continue;
        results pre = run_plan(w, (plan){.path = path, .chunk = 2}),
                dec = run_plan(w, (plan){.path = path, .decode = true});
        for (uint32_t i = 0; i < 2; i++) {
            for (uint32_t h = 0; h < w->n_q; h++) {
                double sum = 0;
                for (uint32_t j = 0; j < w->stride; j++)
                    sum += (double)pre.cols[((size_t)i * w->n_q + h) * w->stride + j];
                cr_assert_float_eq(sum, 5.0, 1e-4, "%s: %g", path_name(path), sum);
            }
            for (uint32_t h = 0; h < w->n_kv; h++) {
                double sum = 0;
                for (uint32_t j = 0; j < w->stride; j++)
                    sum += (double)dec.row[((size_t)i * w->n_kv + h) * w->stride + j];
                cr_assert_float_eq(sum, 3.0, 1e-4, "%s: %g", path_name(path), sum);
            }
        }
        free_results(&pre);
        free_results(&dec);
    }
    free_world(w);
}

/* Rows that nobody wants stay as they were; so do all other places than those of the call's sequences. */
Test(attention, outputs_that_are_not_wanted_stay) {
    static const uint8_t wanted[MAX_SEQS] = {1, 0, 1};
    world *w = make_world((shape){1, 2, 2, 32, 16, 3, {20, 30, 1}, {2, 2, 2}, KVF_F32, false, 0, 0}, 6);
    for (kvf_cpu_path path = KVF_CPU_REF; path <= KVF_CPU_AVX512; path++) {
        if (!kvf_cpu_has_path(path)) continue;
        results r = run_plan(w, (plan){.path = path, .decode = true, .row_wanted = wanted, .seq_end = 2});
        size_t per_seq = (size_t)w->n_kv * w->stride;
        cr_assert(r.row[0] > 0);
        for (size_t i = per_seq; i < 3 * per_seq; i++) cr_assert_eq(r.row[i], 0.0f);
        for (uint32_t kv = 0; kv < w->n_kv; kv++)
            for (uint32_t j = 22; j < w->stride; j++) cr_assert_eq(r.row[dense_at(w, 0, kv, j)], 0.0f);
        for (size_t i = w->q_begin[2] * (size_t)w->n_q; i < r.n_lse; i++) cr_assert_eq(r.lse[i], 0.0f);
        free_results(&r);
    }
    free_world(w);
}

/* exp of the tiled paths: very unlike logits, all of a tile's mass on one slot, and tiles that a bias of -inf hides. */
Test(attention, far_apart_logits) {
    world *w = make_world((shape){1, 1, 2, 64, 16, 1, {1500}, {3}, KVF_F32, true, 0, 0}, 8);
    for (int hidden = 0; hidden < 2; hidden++) {
        for (uint32_t j = 0; j < 1500; j++) w->bias[j] = j == 700 ? 150.0f : j % 7 ? -200.0f : 40.0f;
        for (uint32_t j = 0; hidden && j < 1024; j++) w->bias[j] = -INFINITY;
        results want = run_naive(w, NULL);
        for (kvf_cpu_path path = KVF_CPU_REF; path <= KVF_CPU_AVX512; path++) {
            if (!kvf_cpu_has_path(path)) continue;
            results pre = run_plan(w, (plan){.path = path}), dec = run_plan(w, (plan){.path = path, .decode = true});
            expect_near(&pre, &want, 1e-5, path_name(path), true, false);
            expect_near(&dec, &want, 1e-5, path_name(path), false, true);
            free_results(&pre);
            free_results(&dec);
        }
        free_results(&want);
    }
    free_world(w);
}
