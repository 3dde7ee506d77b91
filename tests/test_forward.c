/* The forward pass: rotation, the same in other batches, chunks and threads, the mass it gives, and what it refuses. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <math.h>

#include "tests/forward_rig.h"
#include "tests/naive_llama.h"
#include "tests/tiny_models.h"

static const struct tiny_model_params standard = {.weight_type = GW_Q4_1, .embd_type_p1 = GW_Q8_0 + 1, .seed = 31};

/* ---- Rotation ------------------------------------------------------------------------------------- */

/* Files hold the rows of Q and K for rotation in pairs. A decoder that rotates halves over the rows put back gives the
 * same; one that rotates halves over the file's rows differs, but not at position 0. Head size 8 is the least pages
 * take. */
Test(forward, f5_rotation_is_in_the_order_of_the_files_rows) {
    static const struct tiny_model_params toys[] = {
        {.weight_type = GW_F32, .n_q_heads = 2, .n_kv_heads = 1, .head_dim = 8, .n_ff = 32, .seed = 21},
        {.weight_type = GW_Q8_0, .n_q_heads = 4, .n_kv_heads = 2, .head_dim = 8, .n_ff = 32, .seed = 22},
        {.weight_type = GW_F32,
         .n_q_heads = 4,
         .n_kv_heads = 2,
         .head_dim = 8,
         .n_ff = 32,
         .seed = 23,
         .rope_freqs = 1}};
    enum { N = 8 };
    uint32_t ids[N];
    float logits[N * TINY_N_VOCAB];
    tiny_tokens(ids, N);
    for (size_t toy = 0; toy < 3; toy++) {
        forward_rig r;
        kvf_model *m = open_tiny(&toys[toy]);
        rig_open(&r, m, KVF_F32, 1, 0, 16, 16, 16);
        rig_run_all(&r, ids, N, N, 0, KVF_CPU_AUTO, logits);
        double *halves = naive_logits(m, ids, N, NAIVE_HALVES), *wrong = naive_logits(m, ids, N, NAIVE_HALVES_WRONG);
        for (uint32_t t = 0; t < N; t++) {
            double off = 0, off_wrong = 0;
            for (size_t v = t * TINY_N_VOCAB; v < (t + 1) * (size_t)TINY_N_VOCAB; v++) {
                off = fmax(off, fabs(halves[v] - logits[v]) / fmax(1, fabs(halves[v])));
                off_wrong = fmax(off_wrong, fabs(wrong[v] - logits[v]));
            }
            cr_assert(off < 1e-5, "toy %zu, position %u: off by %g", toy, t, off);
            cr_assert(t == 0 ? off_wrong < 1e-4 : off_wrong > 1e-2,
                      "toy %zu, position %u: the wrong order is off by %g", toy, t, off_wrong);
        }
        free(halves);
        free(wrong);
        rig_close(&r);
        kvf_model_close(m);
    }
}

/* A "qwen2" file has the rows as they were trained, so one made of the rows of a "llama" put back, with biases of 0, gives
 * the same; were its rows taken for permuted ones, position 0 alone would agree. */
Test(forward, f5_unpermuted_rows_rotate_in_halves) {
    enum { N = 8 };
    uint32_t ids[N];
    float llama[N * TINY_N_VOCAB], qwen2[N * TINY_N_VOCAB], wrong[N * TINY_N_VOCAB], *all[] = {llama, qwen2, wrong};
    tiny_tokens(ids, N);
    for (int quantised = 0; quantised < 2; quantised++) {
        for (int i = 0; i < 3; i++) { /* wrong: the rows put back, read as a "llama" */
            struct tiny_model_params p = {.weight_type = quantised ? GW_Q8_0 : GW_F32, .seed = 24, .rope_freqs = 1};
            forward_rig r;
            p.halves = i != 0;
            if (i == 1) p.arch = "qwen2";
            kvf_model *m = open_tiny(&p);
            rig_open(&r, m, KVF_F32, 1, 0, 16, 16, 16);
            rig_run_all(&r, ids, N, N, 0, KVF_CPU_AUTO, all[i]);
            rig_close(&r);
            kvf_model_close(m);
        }
        for (uint32_t t = 0; t < N; t++) {
            size_t at = t * TINY_N_VOCAB;
            double off = rig_worst_of(llama + at, qwen2 + at, TINY_N_VOCAB);
            double off_wrong = rig_worst_of(llama + at, wrong + at, TINY_N_VOCAB);
            cr_assert(off < 1e-5, "position %u: off by %g", t, off);
            cr_assert(t == 0 ? off_wrong < 1e-5 : off_wrong > 1e-2, "position %u: the wrong order is off by %g", t,
                      off_wrong);
        }
    }
}

/* Logits depend on differences of positions alone, so this looks at the keys themselves, of layer 0. */
Test(forward, keys_are_cached_at_their_true_positions) {
    enum { N = 21 };
    uint32_t ids[N], n_slots, n_blocks;
    const uint32_t *row;
    float *logits = rig_floats(N * TINY_N_VOCAB), x[64];
    double h[64], k[32];
    forward_rig r;
    kvf_model *m = open_tiny(&standard);
    tiny_tokens(ids, N);
    rig_open(&r, m, KVF_F32, 1, 0, 16, N, 32);
    rig_run_all(&r, ids, N, 13, 3, KVF_CPU_AUTO, logits);
    cr_assert_eq(kvf_seq_table(r.manager, r.seqs[0], 0, 0, &n_slots, &n_blocks, &row), KVF_OK);
    for (uint32_t t = 0; t < N; t++) {
        kvf__tensor_row(&m->token_embd, ids[t], x);
        for (int i = 0; i < 64; i++) h[i] = x[i];
        naive_norm(&m->layers[0].attn_norm, h, m->info.norm_epsilon, h);
        naive_multiply(&m->layers[0].attn_k, h, k, 0, 0);
        naive_rotate(m, k, 2, t, NAIVE_PAIRS);
        const float *page = (const float *)((const char *)r.pages.k + row[t / 16] * r.pages.k_block_stride);
        for (uint32_t i = 0; i < 32; i++) { /* [head][slot][dim] */
            float have = page[(i / 16 * 16 + t % 16) * 16 + i % 16];
            cr_assert(fabs(k[i] - have) < 1e-5, "position %u, dim %u: %g, not %g", t, i, (double)have, k[i]);
        }
    }
    rig_close(&r);
    kvf_model_close(m);
    free(logits);
}

/* ---- The same in other batches ---------------------------------------------------------------------- */

Test(forward, chunks_and_decode_give_what_one_prefill_gives) {
    enum { N = 70 };
    uint32_t ids[N];
    size_t n = (size_t)N * TINY_N_VOCAB;
    float *whole = rig_floats(n), *parts = rig_floats(n);
    tiny_tokens(ids, N);
    kvf_model *m = open_tiny(&standard);
    for (uint32_t heads_per_group = 1; heads_per_group <= 2; heads_per_group++) {
        forward_rig r;
        rig_open(&r, m, KVF_F32, 2, heads_per_group, 64, N, 128);
        rig_run_all(&r, ids, N, N, 0, KVF_CPU_AUTO, whole);
        static const uint32_t splits[][2] = {{1, 0}, {7, 0}, {16, 0}, {64, 0}, {N, N}, {33, 20}}; /* chunk, decoded */
        for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
            memset(parts, 0xff, n * sizeof *parts);
            rig_run_all(&r, ids, N, splits[i][0], splits[i][1], KVF_CPU_AUTO, parts);
            double worst = rig_worst_of(whole, parts, n);
            cr_assert(worst < 1e-4, "chunk %u, %u decoded: off by %g", splits[i][0], splits[i][1], worst);
        }
        rig_close(&r);
    }
    kvf_model_close(m);
    free(whole);
    free(parts);
}

Test(forward, a_mixed_batch_gives_what_each_sequence_gives_alone) {
    enum { SEQS = 12, MAX = 40 };
    uint32_t ids[SEQS][MAX], done[SEQS] = {0};
    float *alone = rig_floats(SEQS * MAX * TINY_N_VOCAB), logits[SEQS * TINY_N_VOCAB];
    uint64_t rng = 5;
    forward_rig r;
    kvf_model *m = open_tiny(&standard);
    rig_open(&r, m, KVF_F32, 2, 1, 400, 200, 64);
    for (uint32_t s = 0; s < SEQS; s++) {
        for (uint32_t i = 0; i < MAX; i++) ids[s][i] = (uint32_t)(gw_random(&rng) % TINY_N_VOCAB);
        rig_run_all(&r, ids[s], MAX, MAX, 0, KVF_CPU_AUTO, alone + (size_t)s * MAX * TINY_N_VOCAB);
    }
    rig_reset(&r);
    for (int step = 0; step < 30; step++) { /* some decode, some prefill a few, some rest; in any order */
        uint32_t which[SEQS], n_new[SEQS], tokens[SEQS * MAX], n = 0, n_decode = 0, n_tokens = 0;
        for (int decode = 1; decode >= 0; decode--)
            for (uint32_t k = 0; k < SEQS; k++) {
                uint32_t s = (k * 5 + (uint32_t)step) % SEQS, choice = (s * 7 + (uint32_t)step * 3) % 4;
                uint32_t take = choice == 0 ? 0 : choice == 1 ? 2 + s % 5 : 1;
                if ((take == 1) != decode || take == 0 || done[s] + take > MAX) continue;
                which[n] = s;
                n_new[n++] = take;
                n_decode += decode;
                for (uint32_t i = 0; i < take; i++) tokens[n_tokens++] = ids[s][done[s] + i];
                done[s] += take;
            }
        if (n == 0) continue;
        rig_run(&r, which, n_new, n, n_decode, tokens, logits);
        for (uint32_t i = 0; i < n; i++) {
            const float *want = alone + ((size_t)which[i] * MAX + done[which[i]] - 1) * TINY_N_VOCAB;
            double worst = rig_worst_of(want, logits + i * TINY_N_VOCAB, TINY_N_VOCAB);
            cr_assert(worst < 1e-4, "step %d, sequence %u at %u: off by %g", step, which[i], done[which[i]], worst);
        }
    }
    rig_close(&r);
    kvf_model_close(m);
    free(alone);
}

Test(forward, rows_that_are_not_asked_for_change_nothing) {
    enum { N = 30 };
    uint32_t ids[N], rows[RIG_SEQS];
    static const uint32_t some[] = {0, 3, 4, 17, 29};
    float *whole = rig_floats(N * TINY_N_VOCAB), *part = rig_floats(6 * TINY_N_VOCAB), *next[3];
    forward_rig r;
    kvf_model *m = open_tiny(&standard);
    tiny_tokens(ids, N);
    rig_open(&r, m, KVF_F32, 1, 0, 64, N, 64);
    for (uint32_t n_out = 0; n_out < 3; n_out++) { /* all rows, some, none; then one token more */
        rig_reset(&r);
        uint32_t n = N, one = 1;
        kvf_forward f = rig_append(&r, &rig_first, &n, 1, 0, ids, rows, n_out == 0 ? whole : part);
        uint32_t all[N];
        for (uint32_t i = 0; i < N; i++) all[i] = i;
        f.out_rows = n_out == 0 ? all : some;
        f.n_out = n_out == 0 ? N : n_out == 1 ? 5 : 0;
        if (n_out == 2) f.logits = NULL;
        cr_assert(kvf_model_forward(m, r.activations, r.stream, &f, &r.err) == KVF_OK, "%s", r.err.text);
        next[n_out] = rig_floats(TINY_N_VOCAB);
        rig_run(&r, &rig_first, &one, 1, 1, ids, next[n_out]);
        cr_assert(!memcmp(next[0], next[n_out], TINY_N_VOCAB * sizeof(float)), "the pages differ");
    }
    for (int i = 0; i < 5; i++) {
        double worst = rig_worst_of(whole + some[i] * TINY_N_VOCAB, part + i * TINY_N_VOCAB, TINY_N_VOCAB);
        cr_assert(worst < 1e-4, "row %u: off by %g", some[i], worst);
    }
    cr_assert(isnan(part[5 * TINY_N_VOCAB]), "a sixth row was written");
    for (int i = 0; i < 3; i++) free(next[i]);
    rig_close(&r);
    kvf_model_close(m);
    free(whole);
    free(part);
}

Test(forward, the_number_of_threads_changes_no_bit) {
    enum { N = 50 };
    uint32_t ids[N];
    float *one = rig_floats(N * TINY_N_VOCAB), *more = rig_floats(N * TINY_N_VOCAB);
    kvf_model *m = open_tiny(&standard);
    tiny_tokens(ids, N);
    for (uint32_t threads = 1; threads <= 4; threads++) {
        forward_rig r;
        rig_open(&r, m, KVF_F16, threads, 1, 64, N, 64);
        rig_run_all(&r, ids, N, 37, 5, KVF_CPU_AUTO, threads == 1 ? one : more);
        cr_assert(threads == 1 || !memcmp(one, more, N * TINY_N_VOCAB * sizeof(float)), "%u threads", threads);
        rig_close(&r);
    }
    kvf_model_close(m);
    free(one);
    free(more);
}

/* ---- Mass ------------------------------------------------------------------------------------------- */

enum { MASS_STRIDE = 64, MASS_HEADS = 4, MASS_KV = 2, MASS_LAYERS = 2 };

struct observer {
    uint32_t next_layer, fail_at;
    float *const *sums;
    const float *row;
    double row_total[MASS_LAYERS];
};

static kvf_status observe(void *ctx, uint32_t layer, const kvf_mass *mass) {
    struct observer *o = ctx;
    cr_assert_eq(layer, o->next_layer++);
    cr_assert_eq(mass->struct_size, sizeof *mass);
    cr_assert(mass->col_sums[0] == NULL, "the decoding sequence has no sums");
    cr_assert(mass->col_sums[1] == o->sums[1] + layer * MASS_HEADS * MASS_STRIDE && mass->col_stride == MASS_STRIDE);
    cr_assert(mass->row == o->row && mass->row_stride == MASS_STRIDE);
    for (int i = 0; i < MASS_KV * MASS_STRIDE; i++)
        if (i % MASS_STRIDE < 11) o->row_total[layer] += mass->row[i];
    return layer == o->fail_at ? KVF_E_LIMIT : KVF_OK;
}

/* One sequence decodes its 11th token, another has its prompt in two chunks. */
Test(forward, mass_is_filled_layer_by_layer) {
    enum { PROMPT = 20 };
    uint32_t ids[40], rows[RIG_SEQS], n = 10;
    float logits[2 * TINY_N_VOCAB], *row = rig_floats(MASS_KV * MASS_STRIDE);
    float *sums = calloc(MASS_LAYERS * MASS_HEADS * MASS_STRIDE, sizeof *sums), *prompt_sums[2] = {NULL, sums};
    forward_rig r;
    kvf_model *m = open_tiny(&standard);
    tiny_tokens(ids, 40);
    rig_open(&r, m, KVF_F32, 2, 0, 64, 32, 64);
    rig_run(&r, &rig_first, &n, 1, 0, ids, logits);
    for (int chunk = 0; chunk < 2; chunk++) {
        const uint32_t which[2] = {0, 1}, n_new[2] = {1, PROMPT / 2};
        struct observer o = {.fail_at = UINT32_MAX, .sums = prompt_sums, .row = row};
        kvf_forward f = rig_append(&r, which, n_new, 2, 1, ids, rows, logits);
        f.prompt_sums = prompt_sums;
        f.prompt_stride = MASS_STRIDE;
        f.row = row;
        f.row_stride = MASS_STRIDE;
        f.after_layer = observe;
        f.ctx = &o;
        cr_assert(kvf_model_forward(m, r.activations, r.stream, &f, &r.err) == KVF_OK, "%s", r.err.text);
        cr_assert_eq(o.next_layer, MASS_LAYERS);
        for (int l = 0; chunk == 0 && l < MASS_LAYERS; l++) /* every query head hands out 1 */
            cr_assert(fabs(o.row_total[l] - MASS_HEADS) < 1e-4, "layer %d: decode row sums to %g", l, o.row_total[l]);
    }
    for (int h = 0; h < MASS_LAYERS * MASS_HEADS; h++) {
        double total = 0;
        for (int j = 0; j < PROMPT; j++) total += sums[h * MASS_STRIDE + j];
        cr_assert(fabs(total - PROMPT) < 1e-3, "layer %d, head %d: columns sum to %g", h / MASS_HEADS, h % MASS_HEADS,
                  total);
        cr_assert(sums[h * MASS_STRIDE + PROMPT] == 0, "a column beyond the prompt");
    }
    rig_close(&r);
    kvf_model_close(m);
    free(sums);
    free(row);
}

static kvf_status count_and_fail(void *ctx, uint32_t layer, const kvf_mass *mass) {
    (void)mass;
    ++*(uint32_t *)ctx;
    return layer == 0 ? KVF_E_LIMIT : KVF_OK;
}

Test(forward, a_failing_observer_ends_the_pass_with_its_status) {
    uint32_t ids[8], rows[RIG_SEQS], n = 8, calls = 0;
    float *logits = rig_floats(TINY_N_VOCAB);
    forward_rig r;
    kvf_model *m = open_tiny(&standard);
    tiny_tokens(ids, 8);
    rig_open(&r, m, KVF_F32, 1, 0, 16, 8, 16);
    kvf_forward f = rig_append(&r, &rig_first, &n, 1, 0, ids, rows, logits);
    f.after_layer = count_and_fail;
    f.ctx = &calls;
    cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_E_LIMIT);
    cr_assert_eq(calls, 1u);
    cr_assert(isnan(logits[0]));
    rig_close(&r);
    kvf_model_close(m);
    free(logits);
}

/* ---- Bad input -------------------------------------------------------------------------------------- */

enum {
    BAD_ID,
    BAD_ID_HUGE,
    BAD_OUT_ROW,
    BAD_OUT_ORDER,
    BAD_DECODE,
    BAD_N_DECODE,
    BAD_Q_BEGIN,
    BAD_LOGITS,
    BAD_PAGES,
    BAD_VIEW_LAYERS,
    BAD_HEAD_DIM,
    BAD_MANY_TOKENS,
    BAD_MANY_SLOTS,
    BAD_NEXT_POS,
    BAD_MODEL,
    BAD_STREAM,
    BAD_SIZE,
    BADS
};

/* A sound forward of 8 tokens with one thing wrong must name it and write nothing. */
static void try_bad(forward_rig *r, const kvf_model *other, kvf_stream *wide, int bad) {
    static const char *const texts[BADS] = {"token 300 at row 5: must be below the vocabulary's size, 300",
                                            "token 4294967295 at row 7",
                                            "out_rows[1] 8",
                                            "out_rows[1] 2",
                                            "q_begin[1] 8",
                                            "n_decode 2",
                                            "q_begin[0] 1",
                                            "logits",
                                            "pages",
                                            "3 layers",
                                            "head_dim 24",
                                            "9 tokens",
                                            "table of 33 slots",
                                            "only 7 were appended",
                                            "another model",
                                            "stream of 2 threads",
                                            "struct_size"};
    uint32_t ids[9] = {5, 6, 7, 8, 9, 10, 11, 12, 13}, out[2] = {2, 7}, rows[RIG_SEQS], n = 8, next_pos = 7;
    float *logits = rig_floats(2 * TINY_N_VOCAB);
    rig_reset(r);
    if (bad == BAD_MANY_TOKENS) n = 9;
    uint32_t n_slots = bad == BAD_MANY_SLOTS ? 33 - 8 : 0;
    kvf_copy_list copies = {r->copies, 0, 64};
    if (n_slots) cr_assert(kvf_append(r->manager, &(kvf_append_item){r->seqs[0], n_slots}, 1, &copies) == KVF_OK);
    kvf_forward f = rig_append(r, &rig_first, &n, 1, 0, ids, rows, logits);
    kvf_pages pages = r->pages;
    kvf_view view = r->view;
    uint32_t q_begin[2] = {0, 8};
    f.out_rows = out;
    f.n_out = 2;
    switch (bad) {
    case BAD_ID: ids[5] = TINY_N_VOCAB; break;
    case BAD_ID_HUGE: ids[7] = UINT32_MAX; break;
    case BAD_OUT_ROW: out[1] = 8; break;
    case BAD_OUT_ORDER: out[1] = 2; break;
    case BAD_DECODE: f.n_decode = 1; break;
    case BAD_N_DECODE: f.n_decode = 2; break;
    case BAD_Q_BEGIN: q_begin[0] = 1, f.q_begin = q_begin; break;
    case BAD_LOGITS: f.logits = NULL; break;
    case BAD_PAGES: f.pages = NULL; break;
    case BAD_VIEW_LAYERS: view.n_layers = 3, f.view = &view; break;
    case BAD_HEAD_DIM: pages.head_dim = 24, f.pages = &pages; break;
    case BAD_NEXT_POS: view.next_pos = &next_pos, f.view = &view; break;
    case BAD_SIZE: f.struct_size = 1; break;
    default: break;
    }
    kvf_status st = kvf_model_forward(bad == BAD_MODEL ? other : r->model, r->activations,
                                      bad == BAD_STREAM ? wide : r->stream, &f, &r->err);
    cr_assert_eq(st, KVF_E_INVALID, "case %d: %s", bad, kvf_status_name(st));
    cr_assert(strstr(r->err.text, texts[bad]) != NULL, "case %d: '%s' lacks '%s'", bad, r->err.text, texts[bad]);
    for (int i = 0; i < 2 * TINY_N_VOCAB; i++) cr_assert(isnan(logits[i]), "case %d: logits were written", bad);
    free(logits);
}

Test(forward, bad_input_is_named_and_nothing_is_written) {
    forward_rig r;
    kvf_model *m = open_tiny(&standard), *other = open_tiny(&standard);
    kvf_stream *wide;
    cr_assert(kvf_stream_create_cpu(NULL, 2, &wide, NULL) == KVF_OK);
    rig_open(&r, m, KVF_F32, 1, 0, 64, 8, 64);
    kvf_activations_destroy(r.activations);
    r.activations = NULL;
    cr_assert(kvf_activations_create(m, 8, 1, 32, 1, &r.activations, &r.err) == KVF_OK);
    for (int bad = 0; bad < BADS; bad++) try_bad(&r, other, wide, bad);
    size_t n = r.pages.k_block_stride / 4 * r.pages.n_blocks;
    for (size_t i = 0; i < n; i++) cr_assert(isnan(((float *)r.pages.k)[i]) && isnan(((float *)r.pages.v)[i]));
    rig_close(&r);
    kvf_stream_destroy(wide);
    kvf_model_close(other);
    kvf_model_close(m);
}

Test(forward, activations_of_no_size_are_refused) {
    static const uint32_t bad[][4] = {{0, 1, 1, 1}, {1, 0, 1, 1},    {1, 1, 0, 1},
                                      {1, 1, 1, 0}, {1, 1, 1, 1025}, {1u << 25, 1, 1, 1}};
    kvf_model *m = open_tiny(&standard);
    kvf_error err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvf_activations *a = NULL;
        cr_assert(kvf_activations_create(m, bad[i][0], bad[i][1], bad[i][2], bad[i][3], &a, &err) == KVF_E_INVALID,
                  "case %zu", i);
        cr_assert(a == NULL && strstr(err.text, "must be"), "%s", err.text);
    }
    kvf_model_close(m);
}
