/* What the forward pass gives a policy beside the column sums: probabilities of targets, sums of the last queries, squares. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <math.h>

#include "tests/forward_rig.h"
#include "tests/tiny_models.h"

enum { N = 150, STRIDE = 160, LAYERS = 2, HEADS = 4, KV = 2 };

static kvf_model *open_typed(uint32_t weight_type) {
    return open_tiny(&(struct tiny_model_params){.weight_type = weight_type, .embd_type_p1 = GW_Q8_0 + 1, .seed = 31});
}

/* One sequence in chunks: the log-probability of each token's successor but every 13th, and logits of each chunk's last
 * row, or of all rows without targets. */
typedef struct outputs {
    double logprobs[N];
    float *logits; /* (N, vocabulary) */
} outputs;

static void run(forward_rig *r, const uint32_t *ids, uint32_t chunk, bool targets, int deterministic, int fast,
                outputs *o) {
    uint32_t wanted[N], rows[N];
    rig_reset(r);
    for (uint32_t i = 0; i < N; i++) {
        wanted[i] = i % 13 == 5 || i + 1 == N ? KVF_NO_TOKEN : ids[i + 1];
        o->logprobs[i] = 7;
    }
    for (uint32_t at = 0, step; at < N; at += step) {
        step = KVF__MIN(chunk, N - at);
        kvf_forward f = rig_append(r, &rig_first, &step, 1, 0, ids + at, rows,
                                   o->logits + (size_t)(targets ? at + step - 1 : at) * TINY_N_VOCAB);
        f.deterministic = deterministic;
        f.fast_activations = fast;
        if (targets) {
            f.targets = wanted + at;
            f.logprobs = o->logprobs + at;
        } else {
            for (uint32_t i = 0; i < step; i++) rows[i] = i;
            f.n_out = step;
        }
        cr_assert(kvf_model_forward(r->model, r->activations, r->stream, &f, &r->err) == KVF_OK, "%s", r->err.text);
    }
}

static double naive_logprob(const float *logits, uint32_t token) {
    double most = -INFINITY, sum = 0;
    for (uint32_t v = 0; v < TINY_N_VOCAB; v++) most = fmax(most, (double)logits[v]);
    for (uint32_t v = 0; v < TINY_N_VOCAB; v++) sum += exp((double)logits[v] - most);
    return (double)logits[token] - most - log(sum);
}

/* Any chunk, within rounding; with deterministic any chunk gives the same bits, and the logits are those of a pass without
 * targets. */
Test(forward_targets, log_probabilities_are_those_of_the_logits) {
    static const uint32_t chunks[] = {N, 64, 37, 1}, types[] = {GW_Q4_1, GW_F32};
    uint32_t ids[N];
    outputs all = {.logits = rig_memory((size_t)N * TINY_N_VOCAB * sizeof(float))}, one = all, some = all;
    some.logits = rig_memory((size_t)N * TINY_N_VOCAB * sizeof(float));
    for (uint32_t i = 0; i < N; i++) ids[i] = tiny_token(i);
    for (int mode = 0; mode < 6; mode++) {
        int deterministic = mode % 2, fast = mode / 2 == 1;
        kvf_model *m = open_typed(types[mode / 4]);
        forward_rig r;
        rig_open(&r, m, KVF_F16, 2, 0, 64, N, STRIDE);
        run(&r, ids, N, false, deterministic, fast, &all);
        for (size_t c = 0; c < 4; c++) {
            run(&r, ids, chunks[c], true, deterministic, fast, &some);
            for (uint32_t i = 0; i < N; i++) {
                const float *logits = all.logits + (size_t)i * TINY_N_VOCAB;
                bool skipped = i % 13 == 5 || i + 1 == N;
                double want = skipped ? 7 : naive_logprob(logits, ids[i + 1]);
                cr_assert(fabs(some.logprobs[i] - want) <= (deterministic ? 1e-9 : 2e-3),
                          "mode %d, chunk %u, row %u: %.9g, not %.9g", mode, chunks[c], i, some.logprobs[i], want);
            }
            const float *last = some.logits + (size_t)(N - 1) * TINY_N_VOCAB;
            if (deterministic)
                cr_assert(!memcmp(last, all.logits + (size_t)(N - 1) * TINY_N_VOCAB, TINY_N_VOCAB * sizeof(float)),
                          "mode %d, chunk %u: the logits differ", mode, chunks[c]);
            if (c == 0) memcpy(one.logprobs, some.logprobs, sizeof one.logprobs);
            if (deterministic) cr_assert_arr_eq(one.logprobs, some.logprobs, sizeof one.logprobs);
        }
        rig_close(&r);
        kvf_model_close(m);
    }
    free(all.logits);
    free(some.logits);
}

/* A pass with targets alone, and one of a mixed batch: a decoding sequence may have a target too. */
Test(forward_targets, rows_without_logits_and_decode_rows) {
    uint32_t ids[N], rows[2], n[2] = {20, 9}, which[2] = {0, 1};
    double logprobs[30], again[30];
    float logits[2 * TINY_N_VOCAB];
    kvf_model *m = open_typed(GW_Q4_1);
    forward_rig r;
    for (uint32_t i = 0; i < N; i++) ids[i] = tiny_token(i);
    rig_open(&r, m, KVF_F32, 1, 0, 64, 40, 64);
    for (int mixed = 0; mixed < 2; mixed++) {
        uint32_t targets[30], batch[10];
        rig_reset(&r);
        for (uint32_t i = 0; i < 30; i++) targets[i] = ids[i + 1];
        kvf_forward f = rig_append(&r, which, n, 1, 0, ids, rows, NULL);
        f.n_out = 0;
        f.deterministic = 1;
        f.targets = targets;
        f.logprobs = mixed ? again : logprobs;
        cr_assert(kvf_model_forward(m, r.activations, r.stream, &f, &r.err) == KVF_OK, "%s", r.err.text);
        batch[0] = ids[20];
        for (uint32_t i = 0; i < 9; i++) batch[1 + i] = ids[i]; /* the second begins like the first */
        f = rig_append(&r, which, (uint32_t[]){1, 9}, mixed ? 2 : 1, 1, batch, rows, logits);
        f.deterministic = 1;
        targets[0] = ids[21];
        for (uint32_t i = 0; i < 9; i++) targets[1 + i] = ids[i + 1];
        f.targets = targets;
        f.logprobs = (mixed ? again : logprobs) + 20;
        cr_assert(kvf_model_forward(m, r.activations, r.stream, &f, &r.err) == KVF_OK, "%s", r.err.text);
    }
    cr_assert_arr_eq(logprobs, again, 21 * sizeof *again, "beside another, the decoding one");
    cr_assert_arr_eq(logprobs, again + 21, 9 * sizeof *again, "the other, whose tokens are the same");
    rig_close(&r);
    kvf_model_close(m);
}

/* The last query of a prompt, run as a chunk of its own: what it adds to each sum. */
Test(forward_targets, last_queries_and_squares_of_every_layer) {
    enum { P = 40 };
    uint32_t ids[P], rows[1];
    float logits[TINY_N_VOCAB];
    static float cols[LAYERS * HEADS * STRIDE], last[LAYERS * HEADS * STRIDE], squares[LAYERS * KV * STRIDE];
    static float before[LAYERS * HEADS * STRIDE], squares_before[LAYERS * KV * STRIDE];
    for (uint32_t i = 0; i < P; i++) ids[i] = tiny_token(i);
    kvf_model *m = open_typed(GW_F32);
    for (uint8_t gqa = KVF_GQA_SUM; gqa <= KVF_GQA_FIRST; gqa++) {
        forward_rig r;
        rig_open(&r, m, KVF_F32, 2, 1, 64, P, STRIDE);
        memset(cols, 0, sizeof cols);
        memset(last, 0, sizeof last);
        memset(squares, 0, sizeof squares);
        for (uint32_t step = P - 1, at = 0; at < P; at += step, step = 1) {
            kvf_forward f = rig_append(&r, &rig_first, &step, 1, 0, ids + at, rows, logits);
            f.prompt_sums = (float *const[]){cols};
            f.prompt_last = (float *const[]){last};
            f.prompt_squares = (float *const[]){squares};
            f.last_begin = (const uint32_t[]){P - 1};
            f.prompt_stride = STRIDE;
            f.row_gqa = &gqa;
            memcpy(before, cols, sizeof cols);
            memcpy(squares_before, squares, sizeof squares);
            cr_assert(kvf_model_forward(m, r.activations, r.stream, &f, &r.err) == KVF_OK, "%s", r.err.text);
        }
        for (uint32_t l = 0; l < LAYERS; l++)
            for (uint32_t kv = 0; kv < KV; kv++)
                for (uint32_t j = 0; j < P; j++) {
                    const float *p = last + ((size_t)l * HEADS + kv * 2) * STRIDE + j;
                    size_t at = (size_t)(p - last), sq = ((size_t)l * KV + kv) * STRIDE + j;
                    double x = p[0], y = p[STRIDE],
                           z = gqa == KVF_GQA_SUM   ? x + y
                               : gqa == KVF_GQA_MAX ? fmax(x, y)
                                                    : x;
                    cr_assert(x > 0 && fabs((double)cols[at] - (double)before[at] - x) < 1e-5);
                    cr_assert(fabs((double)cols[at + STRIDE] - (double)before[at + STRIDE] - y) < 1e-5);
                    cr_assert(fabs((double)squares[sq] - (double)squares_before[sq] - z * z) < 1e-5,
                              "gqa %u, layer %u, head %u, slot %u", gqa, l, kv, j);
                }
        for (size_t i = 0; i < LAYERS * KV * STRIDE; i++) cr_assert(i % STRIDE < P || squares[i] == 0);
        rig_close(&r);
    }
    kvf_model_close(m);
}

Test(forward_targets, bad_input_is_named) {
    uint32_t ids[4] = {1, 2, 3, 4}, rows[1], n = 4, targets[4] = {2, 3, TINY_N_VOCAB, KVF_NO_TOKEN};
    double logprobs[4];
    float logits[TINY_N_VOCAB], sums[1];
    kvf_model *m = open_typed(GW_F32);
    forward_rig r;
    rig_open(&r, m, KVF_F32, 1, 0, 64, 40, 64);
    kvf_forward f = rig_append(&r, &rig_first, &n, 1, 0, ids, rows, logits);
    f.targets = targets;
    cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_E_INVALID);
    cr_assert(strstr(r.err.text, "logprobs is NULL"), "%s", r.err.text);
    f.logprobs = logprobs;
    cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_E_INVALID);
    cr_assert(strstr(r.err.text, "targets[2] 300: must be below"), "%s", r.err.text);
    f.targets = NULL;
    f.prompt_last = (float *const[]){sums};
    cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_E_INVALID);
    cr_assert(strstr(r.err.text, "last_begin is NULL"), "%s", r.err.text);
    rig_close(&r);
    kvf_model_close(m);
}
