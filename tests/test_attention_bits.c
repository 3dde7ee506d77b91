/* Given bit-equal inputs, results are bit-equal for any chunking, thread count, batch and path. */
#include "attention_cases.h"

static const shape shapes[] = {
    {1, 3, 3, 64, 16, 3, {470, 0, 100}, {66, 66, 3}, KVF_F16, false, 0, 0},
    {2, 1, 4, 40, 8, 2, {530, 3}, {13, 13}, KVF_F32, true, 0, 0},
    {1, 2, 1, 128, 32, 3, {1020, 40, 505}, {9, 1, 9}, KVF_F16, true, 0, 0},
    {1, 1, 8, 96, 256, 2, {0, 7}, {30, 11}, KVF_F32, false, 0, 0},
    {1, 1, 7, 24, 64, 1, {200}, {5}, KVF_F16, false, 0, 0},
    {1, 2, 5, 88, 16, 2, {519, 31}, {9, 2}, KVF_BF16, true, 0, 0},
    {1, 64, 1, 8, 8, 1, {1030}, {3}, KVF_F16, true, 0, 0}, /* so many heads that an item of decode takes all tiles */
    /* The columns of all 30 tokens are too many for their logits to be kept; of the first 7 alone they are not. */
    {1, 1, 3, 8, 256, 1, {5450}, {30}, KVF_F32, true, 0, 0},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };
static const kvf_cpu_path fast = KVF_CPU_AUTO;

static void same_as(world *w, const results *want, plan p, const char *what) {
    results got = run_plan(w, p);
    expect_same(&got, want, what);
    free_results(&got);
}

Test(attention_bits, any_chunking) {
    static const uint32_t chunks[] = {1, 7, 64};
    for (size_t i = 0; i < N_SHAPES; i++) {
        world *w = make_world(shapes[i], i + 11);
        results whole = run_plan(w, (plan){.path = fast});
        for (size_t c = 0; c < 3; c++) {
            char what[60];
            snprintf(what, sizeof what, "shape %zu, chunk %u", i, chunks[c]);
            same_as(w, &whole, (plan){.path = fast, .chunk = chunks[c]}, what);
        }
        free_results(&whole);
        free_world(w);
    }
}

Test(attention_bits, any_thread_count) {
    for (size_t i = 0; i < N_SHAPES; i++) {
        world *w = make_world(shapes[i], i + 12);
        for (int decode = 0; decode < 2; decode++) {
            results one = run_plan(w, (plan){.path = fast, .decode = decode});
            for (uint32_t n = 2; n <= 3; n++) {
                char what[60];
                snprintf(what, sizeof what, "shape %zu, %u threads, decode %d", i, n, decode);
                same_as(w, &one, (plan){.path = fast, .n_threads = n, .decode = decode}, what);
            }
            free_results(&one);
        }
        free_world(w);
    }
}

/* Each sequence alone, over the batch's outputs: together they are what the batch gives. */
Test(attention_bits, any_batch) {
    for (size_t i = 0; i < N_SHAPES; i++) {
        world *w = make_world(shapes[i], i + 13);
        size_t d = w->s.head_dim, row = (size_t)w->n_kv * w->stride, col = (size_t)w->n_q * w->stride;
        for (int decode = 0; decode < 2; decode++) {
            results all = run_plan(w, (plan){.path = fast, .decode = decode}), parts = make_results(w);
            for (uint32_t seq = 0; seq < w->s.n_seqs; seq++) {
                results r = run_plan(w, (plan){.path = fast, .decode = decode, .seq_begin = seq, .seq_end = seq + 1});
                size_t q = w->q_begin[seq] * (size_t)w->n_q, n = w->s.tokens[seq] * (size_t)w->n_q;
                memcpy(parts.out + q * d, r.out + q * d, n * d * sizeof(float));
                memcpy(parts.lse + q, r.lse + q, n * sizeof(float));
                memcpy(parts.row + seq * row, r.row + seq * row, row * sizeof(float));
                memcpy(parts.squares + seq * row, r.squares + seq * row, row * sizeof(float));
                memcpy(parts.cols + seq * col, r.cols + seq * col, col * sizeof(float));
                memcpy(parts.last + seq * col, r.last + seq * col, col * sizeof(float));
                memcpy(parts.largest + seq * col, r.largest + seq * col, col * sizeof(float));
                free_results(&r);
            }
            expect_same(&parts, &all, decode ? "decode" : "prefill");
            free_results(&all);
            free_results(&parts);
        }
        free_world(w);
    }
}

/* Every path that the CPU has against plain C. */
Test(attention_bits, tiled_paths_agree) {
    static const uint8_t gqa[MAX_SEQS] = {KVF_GQA_MAX, KVF_GQA_SUM, KVF_GQA_FIRST};
    if (!kvf_cpu_has_path(KVF_CPU_AVX2)) cr_skip_test("this CPU has no AVX2");
    for (size_t i = 0; i < N_SHAPES; i++) {
        shape s = shapes[i];
        for (uint32_t seq = 0; seq < s.n_seqs; seq++) s.tokens[seq] = KVF__MIN(s.tokens[seq], 7);
        world *w = make_world(s, i + 14);
        for (int decode = 0; decode < 2; decode++) {
            results scalar = run_plan(w, (plan){.path = KVF_CPU_SCALAR, .decode = decode, .gqa = gqa});
            for (kvf_cpu_path path = KVF_CPU_AVX2; path <= KVF_CPU_AVX512; path++) {
                char what[60];
                if (!kvf_cpu_has_path(path)) continue;
                snprintf(what, sizeof what, "shape %zu, %s, %s", i, path_name(path), decode ? "decode" : "prefill");
                same_as(w, &scalar, (plan){.path = path, .decode = decode, .gqa = gqa}, what);
            }
            free_results(&scalar);
        }
        free_world(w);
    }
}

/* The sums that go by column, each alone, are what they are together; the others stay as they were. */
Test(attention_bits, each_sum_alone) {
    static const uint8_t gqa[MAX_SEQS] = {KVF_GQA_SUM, KVF_GQA_MAX, KVF_GQA_FIRST};
    for (size_t i = 0; i < N_SHAPES; i++) {
        shape s = shapes[i];
        for (uint32_t seq = 0; seq < s.n_seqs; seq++) s.tokens[seq] = KVF__MIN(s.tokens[seq], 7);
        world *w = make_world(s, i + 16);
        for (kvf_cpu_path path = KVF_CPU_AUTO; path <= KVF_CPU_REF; path++) {
            results none = make_results(w), all = run_plan(w, (plan){.path = path, .chunk = 5, .gqa = gqa});
            for (uint32_t k = 0; k < 4; k++) {
                char what[60];
                snprintf(what, sizeof what, "shape %zu, %s, sum %u", i, path_name(path), k);
                results want = all;
                if (k != 0) want.cols = none.cols;
                if (k != 1) want.last = none.last;
                if (k != 2) want.squares = none.squares;
                if (k != 3) want.largest = none.largest;
                same_as(w, &want,
                        (plan){.path = path,
                               .n_threads = 2,
                               .gqa = gqa,
                               .no_cols = k != 0,
                               .no_last = k != 1,
                               .no_squares = k != 2,
                               .no_largest = k != 3},
                        what);
            }
            free_results(&none);
            free_results(&all);
        }
        free_world(w);
    }
}

/* reset_pages fills a bias with NaN outside the context; here the dense bias is zero, and append writes zeros. */
static results run_with_bias(world *w, float *bias, bool decode) {
    w->pages.bias = bias;
    results r = run_plan(w, (plan){.path = fast, .decode = decode});
    w->pages.bias = NULL;
    return r;
}

/* A bias of zeros is no bias, and column sums that nobody wants change nothing else. */
Test(attention_bits, options_do_not_leak_into_results) {
    shape s = shapes[0];
    world *w = make_world(s, 15);
    float *bias = zeros((size_t)w->pages.n_blocks * s.heads_per_group * s.block_size, sizeof *bias);
    for (int decode = 0; decode < 2; decode++) {
        results a = run_plan(w, (plan){.path = fast, .decode = decode});
        results b = run_plan(w, (plan){.path = fast, .decode = decode, .no_cols = true});
        cr_assert_arr_eq(a.out, b.out, a.n_out * sizeof(float));
        cr_assert_arr_eq(a.lse, b.lse, a.n_lse * sizeof(float));
        results c = run_with_bias(w, bias, decode);
        expect_same(&c, &a, "bias of zeros");
        free_results(&a);
        free_results(&b);
        free_results(&c);
    }
    free(bias);
    free_world(w);
}

/* Unused slots, blocks that nobody lists and padding entries of a table may hold anything. */
Test(attention_bits, e1_rubbish_beyond_the_length_does_not_matter) {
    static const float fills[] = {0.0f, NAN, INFINITY, 6e4f};
    static const uint32_t lengths[] = {1, 8, 9, 16, 521};
    for (size_t l = 0; l < 5; l++)
        for (int decode = 0; decode < 2; decode++) {
            uint32_t n = decode ? 1 : KVF__MIN(lengths[l], 6);
            shape s = {1, 2, 3, 24, 8, 2, {lengths[l] - n, 0}, {n, 1}, (kvf_dtype)(l % 3), l > 2, 0, 0};
            world *w = make_world(s, l);
            results first = {0};
            for (size_t f = 0; f < 4; f++) {
                kvf_stream *stream;
                cr_assert_eq(kvf_stream_create_cpu(NULL, 2, &stream, NULL), KVF_OK);
                plan p = {.path = fast, .n_threads = 2, .chunk = n, .seq_end = 2, .decode = decode};
                results r = make_results(w);
                reset_pages(w);
                for (uint32_t b = 0; b < w->pages.n_blocks; b++) {
                    uint32_t used = 0; /* slots of this block that hold context */
                    for (uint32_t seq = 0; seq < 2; seq++)
                        for (uint32_t i = 0, t = table_of(w, seq, 0); i * 8 < w->n_slots[t]; i++)
                            if (w->rows[w->row_offset[t] + i] == b) used = KVF__MIN(w->n_slots[t] - i * 8, 8);
                    fill_block(w, b, used, fills[f]);
                }
                run_step(w, &p, stream, 0, &r);
                kvf_stream_destroy(stream);
                for (size_t i = 0; i < r.n_out; i++) cr_assert(isfinite(r.out[i]));
                if (f == 0) {
                    first = r;
                } else {
                    expect_same(&r, &first, "fill");
                    free_results(&r);
                }
            }
            free_results(&first);
            free_world(w);
        }
}

/* Later tokens of a chunk are unseen even when they hold NaN or infinity. */
Test(attention_bits, later_tokens_of_a_chunk_do_not_matter) {
    world *w = make_world((shape){1, 2, 2, 32, 16, 1, {500}, {20}, KVF_F32, false, 0, 0}, 3);
    results clean = run_plan(w, (plan){.path = fast});
    for (uint32_t i = 0; i < w->n_kv * 32; i++) {
        w->k[12 * w->kv_stride + i] = i % 2 ? NAN : INFINITY;
        w->v[12 * w->kv_stride + i] = i % 2 ? -INFINITY : NAN;
    }
    results rubbish = run_plan(w, (plan){.path = fast});
    cr_assert_arr_eq(clean.out, rubbish.out, 12 * (size_t)w->n_q * 32 * sizeof(float));
    cr_assert_arr_eq(clean.lse, rubbish.lse, 12 * (size_t)w->n_q * sizeof(float));
    cr_assert(isnan(rubbish.out[12 * (size_t)w->n_q * 32]));
    free_results(&clean);
    free_results(&rubbish);
    free_world(w);
}
