/* A forward pass that fails leaves the prompts' sums as they were; numbers that are none are told with their place. */
#define _GNU_SOURCE
#include <criterion/criterion.h>

#include "model/weights.h"
#include "tests/forward_rig.h"
#include "tests/open_tiny.h"

enum { LAYERS = 4, N = 32, MOST = 96, SUMS = 4 };

static uint32_t fails_at; /* LAYERS: never */

static kvf_status after_layer(void *ctx, uint32_t layer, const kvf_mass *mass) {
    (void)ctx, (void)mass;
    return layer == fails_at ? KVF_E_IO : KVF_OK;
}

/* Accumulators of two sequences: sums, those of the last queries, squares, maxima. */
typedef struct sums {
    float *of[SUMS][2];
    size_t n[SUMS];
} sums;

static sums sums_new(const kvf_model_info *info) {
    sums s;
    for (int k = 0; k < SUMS; k++) {
        s.n[k] = (size_t)info->n_layers * (k != 2 ? info->n_q_heads : info->n_kv_heads) * MOST;
        for (int i = 0; i < 2; i++) s.of[k][i] = memset(rig_floats(s.n[k]), 0, s.n[k] * sizeof(float));
    }
    return s;
}
static void sums_free(sums *s) {
    for (int k = 0; k < SUMS; k++)
        for (int i = 0; i < 2; i++) free(s->of[k][i]);
}
static void expect_sums(const sums *a, const sums *b, const char *when) {
    for (int k = 0; k < SUMS; k++)
        for (int i = 0; i < 2; i++)
            cr_assert(!memcmp(a->of[k][i], b->of[k][i], a->n[k] * sizeof(float)), "%s, layer %u: kind %d of %d", when,
                      fails_at, k, i);
}
static void copy_sums(sums *to, const sums *from) {
    for (int k = 0; k < SUMS; k++)
        for (int i = 0; i < 2; i++) memcpy(to->of[k][i], from->of[k][i], from->n[k] * sizeof(float));
}

/* A chunk of each of two prompts; n_last > 0: their last queries count apart. Twice when the first time fails. */
static void chunk(forward_rig *r, sums *s, uint32_t n, uint32_t begin, uint32_t fail) {
    uint32_t which[2] = {0, 1}, n_new[2] = {n, n / 2}, out_rows[2], tokens[2 * N], last[2] = {20, 10};
    uint32_t max_begin[2] = {0, 3}, max_end[2] = {n, n / 2};
    const uint8_t by_residual[2] = {1, 0};
    float *logits = rig_floats(2 * (size_t)r->info->n_vocab);
    sums before = sums_new(r->info);
    copy_sums(&before, s);
    for (uint32_t i = 0; i < 2 * N; i++) tokens[i] = (i * 37 + begin) % r->info->n_vocab;
    for (int attempt = fail == LAYERS; attempt < 2; attempt++) {
        kvf_forward f = rig_append(r, which, n_new, 2, 0, tokens, out_rows, logits);
        f.prompt_sums = s->of[0];
        f.prompt_last = s->of[1];
        f.last_begin = last;
        f.prompt_squares = s->of[2];
        f.prompt_max = s->of[3];
        f.max_begin = max_begin;
        f.max_end = max_end;
        f.max_by_residual = by_residual;
        f.prompt_stride = MOST;
        f.after_layer = after_layer;
        fails_at = attempt ? LAYERS : fail;
        kvf_status st = kvf_model_forward(r->model, r->activations, r->stream, &f, &r->err);
        cr_assert_eq(st, attempt ? KVF_OK : KVF_E_IO);
        if (attempt) break;
        expect_sums(&before, s, "failed");
        for (uint32_t i = 0; i < 2; i++) cr_assert_eq(kvf_seq_rollback(r->manager, r->seqs[i], n_new[i]), KVF_OK);
    }
    sums_free(&before);
    free(logits);
}

Test(forward_failures, r2_sums_are_as_before_a_pass_that_failed) {
    kvf_model *model = open_tiny(&(struct tiny_model_params){.n_layers = LAYERS, .n_kv_heads = 2, .seed = 9});
    for (uint32_t per_group = 1; per_group <= 2; per_group++) {
        for (uint32_t fail = 0; fail <= LAYERS; fail++) {
            sums clean = sums_new(kvf_model_get_info(model)), s = sums_new(kvf_model_get_info(model));
            for (int pass = 0; pass < 2; pass++) {
                forward_rig r;
                rig_open(&r, model, KVF_F32, 2, per_group, 200, 2 * N, MOST);
                chunk(&r, pass ? &s : &clean, N, 0, pass ? fail : LAYERS);
                chunk(&r, pass ? &s : &clean, N, 11, pass ? fail : LAYERS);
                rig_close(&r);
            }
            fails_at = fail;
            expect_sums(&clean, &s, "went on");
            sums_free(&clean);
            sums_free(&s);
        }
    }
    kvf_model_close(model);
}

/* Rows of every kind: decode, a prompt whose last row has logits, one of which nothing is wanted but a target. */
Test(forward_failures, r18_a_sequence_is_told_where_it_is_not_finite) {
    kvf_model *model = open_tiny(&(struct tiny_model_params){.n_layers = LAYERS, .separate_output = 1, .seed = 9});
    const kvf_model_info *info = kvf_model_get_info(model);
    size_t n_embedding = (size_t)info->n_vocab * info->n_embd;
    float *embedding = rig_floats(n_embedding);
    const void *was = model->token_embd.data;
    memcpy(embedding, was, n_embedding * sizeof *embedding);
    embedding[7 * (size_t)info->n_embd + 3] = NAN;
    embedding[8 * (size_t)info->n_embd + 3] = INFINITY;
    model->token_embd.data = (const void *)embedding;
    forward_rig r;
    rig_open(&r, model, KVF_F16, 2, 0, 200, 64, MOST);
    for (uint32_t bad = 6; bad <= 9; bad++) {
        for (uint32_t at = 0; at < 12; at++) {
            uint32_t which[3] = {0, 1, 2}, n_new[3] = {1, 6, 5}, out_rows[3], tokens[12], found[3], targets[12];
            double logprobs[12];
            float *logits = rig_floats(3 * (size_t)info->n_vocab);
            for (uint32_t i = 0; i < 12; i++) tokens[i] = 20 + i, targets[i] = i == 9 ? 3 : KVF_NO_TOKEN;
            tokens[at] = bad;
            kvf_forward f = rig_append(&r, which, n_new, 3, 1, tokens, out_rows, logits);
            f.n_out = 2;
            f.targets = targets;
            f.logprobs = logprobs;
            f.not_finite = found;
            cr_assert_eq(kvf_model_forward(model, r.activations, r.stream, &f, &r.err), KVF_OK);
            for (uint32_t i = 0, begin = 0; i < 3; begin += n_new[i++]) {
                bool hit = (bad == 7 || bad == 8) && at >= begin && at < begin + n_new[i];
                cr_assert_eq(found[i], hit ? 0 : KVF_FINITE, "token %u at %u: sequence %u: %u", bad, at, i, found[i]);
            }
            free(logits);
            rig_reset(&r);
        }
    }
    rig_close(&r);
    model->token_embd.data = was;
    free(embedding);
    kvf_model_close(model);
}
