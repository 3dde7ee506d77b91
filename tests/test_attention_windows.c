/* Attention of layers with a window: what is seen, in which bits, and that nothing before it is read. */
#include "attention_cases.h"

static const shape shapes[] = {
    {1, 2, 3, 64, 16, 3, {70, 0, 23}, {9, 30, 2}, KVF_F16, false, 24, 0},
    {2, 1, 4, 40, 8, 2, {530, 3}, {13, 13}, KVF_F32, true, 100, 8},
    {1, 2, 1, 128, 32, 2, {620, 505}, {5, 9}, KVF_F16, true, 600, 480},
    {1, 1, 8, 40, 256, 2, {0, 700}, {10, 6}, KVF_F32, false, 1, 256},
    {1, 1, 7, 24, 64, 1, {200}, {5}, KVF_F16, false, 4000, 64}, /* wider than what there is */
    {1, 2, 5, 24, 16, 2, {1103, 31}, {5, 12}, KVF_BF16, true, 512, 16},
    {1, 64, 1, 8, 8, 1, {530}, {3}, KVF_F16, false, 513, 504},  /* an item of decode takes all tiles */
    {1, 1, 2, 16, 8, 1, {500}, {130}, KVF_F32, false, 40, 104}, /* rows of an item that share no column */
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

Test(attention_windows, every_path_matches_the_naive_model) {
    for (size_t i = 0; i < N_SHAPES; i++)
        for (int decode = 0; decode < 2; decode++) against_naive(&shapes[i], i, decode, 2e-5);
}

Test(attention_windows, random_windows_match_the_naive_model) {
    static const uint32_t dims[] = {8, 24, 64, 128}, sizes[] = {8, 16, 64, 256};
    for (uint64_t seed = 1; seed <= 30; seed++) {
        uint64_t state = seed * 77;
        shape s = {.n_groups = 1 + next_random(&state) % 2,
                   .heads_per_group = 1 + next_random(&state) % 3,
                   .per_kv = 1 + next_random(&state) % 6,
                   .head_dim = dims[next_random(&state) % 4],
                   .block_size = sizes[next_random(&state) % 4],
                   .n_seqs = 1 + next_random(&state) % 3,
                   .dtype = (kvf_dtype)(next_random(&state) % 3),
                   .bias = next_random(&state) % 2,
                   .window = 1 + (uint32_t)(next_random(&state) % (next_random(&state) % 2 ? 40 : 700))};
        s.dropped = (uint32_t)(next_random(&state) % 5) * s.block_size;
        for (uint32_t i = 0; i < s.n_seqs; i++) {
            s.context[i] = next_random(&state) % 2 ? next_random(&state) % 90 : 480 + next_random(&state) % 290;
            s.tokens[i] = 1 + next_random(&state) % 18;
        }
        random_against_naive(&s, seed, &state, 2e-5);
    }
}

/* Chunks, threads and paths give the same bits. */
Test(attention_windows, bits_do_not_depend_on_how_it_is_run) {
    for (size_t i = 0; i < N_SHAPES; i++) {
        for (int decode = 0; decode < 2; decode++) {
            shape s = shapes[i];
            for (uint32_t seq = 0; seq < s.n_seqs && decode; seq++) s.tokens[seq] = KVF__MIN(s.tokens[seq], 4);
            world *w = make_world(s, i + 11);
            results want = run_plan(w, (plan){.path = KVF_CPU_SCALAR, .decode = decode});
            for (kvf_cpu_path path = KVF_CPU_SCALAR; path <= KVF_CPU_AVX512; path++)
                for (uint32_t threads = 1; threads <= 3; threads += 2) {
                    if (!kvf_cpu_has_path(path)) continue;
                    char what[100];
                    uint32_t chunk = decode ? 0 : 4 + 13 * threads;
                    snprintf(what, sizeof what, "shape %zu, %s, %u threads, decode %d", i, path_name(path), threads,
                             decode);
                    results got =
                        run_plan(w, (plan){.path = path, .n_threads = threads, .chunk = chunk, .decode = decode});
                    expect_same(&got, &want, what);
                    free_results(&got);
                }
            free_results(&want);
            free_world(w);
        }
    }
}

/* The same positions without their first ones, which no query sees. */
static world *without_first(const world *w, uint32_t n, uint64_t seed) {
    shape s = w->s;
    s.dropped += n;
    for (uint32_t i = 0; i < s.n_seqs; i++) s.context[i] -= n;
    world *cut = make_world(s, seed);
    memcpy(cut->q, w->q, w->n_total * w->q_stride * sizeof *w->q);
    memcpy(cut->k, w->k, w->n_total * w->kv_stride * sizeof *w->k);
    memcpy(cut->v, w->v, w->n_total * w->kv_stride * sizeof *w->v);
    for (uint32_t seq = 0; seq < s.n_seqs; seq++)
        for (uint32_t kv = 0; kv < w->n_kv; kv++)
            for (uint32_t j = 0; j < s.context[seq] + s.tokens[seq]; j++) {
                size_t to = dense_at(cut, seq, kv, j), from = dense_at(w, seq, kv, j + n), d = s.head_dim;
                memcpy(cut->dense_k + to * d, w->dense_k + from * d, d * sizeof(float));
                memcpy(cut->dense_v + to * d, w->dense_v + from * d, d * sizeof(float));
                cut->bias[to] = w->bias[from];
            }
    return cut;
}

/* Mass of n slots fewer, the first of which had none. */
static void same_mass(const float *cut, const float *all, uint32_t n_rows, uint32_t cut_stride, uint32_t stride,
                      const char *what) {
    uint32_t n = stride - cut_stride;
    for (uint32_t r = 0; r < n_rows; r++) {
        for (uint32_t j = 0; j < n; j++) cr_assert_eq(all[(size_t)r * stride + j], 0.0f, "%s: slot %u", what, j);
        cr_assert_arr_eq(cut + (size_t)r * cut_stride, all + (size_t)r * stride + n, cut_stride * sizeof(float), "%s",
                         what);
    }
}

/* However many blocks are left before the window, or were dropped, the bits are the same; what those hold is not read. */
Test(attention_windows, what_is_dropped_does_not_change_a_bit) {
    static const struct {
        shape s;
        uint32_t n[2];
    } cases[] = {
        {{1, 1, 3, 24, 16, 2, {1300, 900}, {9, 5}, KVF_F16, false, 200, 0}, {16, 688}},
        {{1, 1, 2, 16, 8, 1, {1500}, {12}, KVF_F32, true, 700, 24}, {504, 792}},
        {{1, 2, 1, 24, 64, 2, {1000, 1024}, {3, 9}, KVF_BF16, false, 30, 64}, {448, 896}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int decode = 0; decode < 2; decode++)
            for (kvf_cpu_path path = KVF_CPU_SCALAR; path <= KVF_CPU_AVX512; path++) {
                if (!kvf_cpu_has_path(path)) continue;
                world *w = make_world(cases[i].s, i + 31);
                results all = run_plan(w, (plan){.path = path, .n_threads = 2, .decode = decode});
                for (size_t k = 0; k < 2; k++) {
                    char what[100];
                    snprintf(what, sizeof what, "case %zu, %u dropped, %s, decode %d", i, cases[i].n[k],
                             path_name(path), decode);
                    world *cut = without_first(w, cases[i].n[k], i + 77);
                    results got = run_plan(cut, (plan){.path = path, .n_threads = 1, .decode = decode});
                    cr_assert_arr_eq(got.out, all.out, all.n_out * sizeof(float), "%s: out", what);
                    cr_assert_arr_eq(got.lse, all.lse, all.n_lse * sizeof(float), "%s: lse", what);
                    uint32_t n_seqs = w->s.n_seqs;
                    same_mass(got.row, all.row, n_seqs * w->n_kv, cut->stride, w->stride, what);
                    same_mass(got.cols, all.cols, n_seqs * w->n_q, cut->stride, w->stride, what);
                    same_mass(got.last, all.last, n_seqs * w->n_q, cut->stride, w->stride, what);
                    same_mass(got.squares, all.squares, n_seqs * w->n_kv, cut->stride, w->stride, what);
                    free_results(&got);
                    free_world(cut);
                }
                for (uint32_t seq = 0; seq < w->s.n_seqs; seq++) /* up to the first that its first token sees */
                    for (uint32_t kv = 0; kv < w->n_kv; kv++)
                        for (uint32_t j = 0; j + w->s.window <= w->s.context[seq]; j++)
                            for (uint32_t e = 0; e < w->s.head_dim; e++) {
                                size_t at = dense_at(w, seq, kv, j) * w->s.head_dim + e;
                                w->dense_k[at] = w->dense_v[at] = e % 2 ? NAN : INFINITY;
                            }
                results rubbish = run_plan(w, (plan){.path = path, .n_threads = 2, .decode = decode});
                expect_same(&rubbish, &all, "rubbish before the window");
                free_results(&rubbish);
                free_results(&all);
                free_world(w);
            }
}

/* A window as wide as the table, or none, is the same; a table that does not begin with a block is refused. */
Test(attention_windows, edges) {
    shape s = {1, 2, 2, 32, 16, 1, {40}, {6}, KVF_F32, false, 0, 0};
    world *w = make_world(s, 3);
    for (int decode = 0; decode < 2; decode++) {
        results none = run_plan(w, (plan){.decode = decode});
        for (uint32_t window = 46; window < 50; window++) {
            w->s.window = window;
            results wide = run_plan(w, (plan){.decode = decode});
            expect_same(&wide, &none, "wide");
            free_results(&wide);
        }
        w->s.window = 0;
        free_results(&none);
    }
    w->s.window = 45;
    results narrow = run_plan(w, (plan){.path = KVF_CPU_AUTO}), naive = run_naive(w, NULL);
    expect_near(&narrow, &naive, 1e-5, "narrow", true, false);
    kvf_attention a = make_call(w);
    float *out = zeros(w->n_total * w->q_stride, sizeof *out);
    kvf_error err = {.text = ""};
    a.out = out;
    give_workspace(w, &a, 1);
    w->next_pos[0] += 8;
    kvf_stream *stream;
    cr_assert_eq(kvf_stream_create_cpu(NULL, 1, &stream, NULL), KVF_OK);
    cr_assert_eq(kvf_attention_prefill(stream, &a, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "must begin where a block"), "%s", err.text);
    w->view.next_pos = NULL;
    cr_assert_eq(kvf_attention_prefill(stream, &a, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "next_pos is NULL"), "%s", err.text);
    kvf_stream_destroy(stream);
    free(out);
    free(a.workspace);
    free_results(&narrow);
    free_results(&naive);
    free_world(w);
}
