/* Scores of a repeated prompt from the model: tiny random models against a naive decoder, the real one against another reader's
 * values. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <jansson.h>

#include "tests/forward_rig.h"
#include "tests/naive_llama.h"
#include "tests/open_tiny.h"
#include "tests/real_model.h"

/* A prompt of n tokens, then an instruction and the prompt again: n_all in all. */
typedef struct repeated {
    uint32_t ids[1024], n, n_all;
} repeated;

static repeated repeat_prompt(const uint32_t *prompt, uint32_t n, const uint32_t *instruction, uint32_t n_instruction) {
    repeated r = {.n = n, .n_all = 2 * n + n_instruction};
    cr_assert(r.n_all <= sizeof r.ids / sizeof *r.ids);
    memcpy(r.ids, prompt, n * sizeof *prompt);
    memcpy(r.ids + n, instruction, n_instruction * sizeof *instruction);
    memcpy(r.ids + n + n_instruction, prompt, n * sizeof *prompt);
    return r;
}

/* ---- The naive decoder ---------------------------------------------------------------------------------- */

/* |W_o,h v| */
static double output_norm(const kvf_model *m, uint32_t layer, uint32_t h, const double *v) {
    const kvf__tensor *w = &m->layers[layer].attn_output;
    uint32_t d = m->info.head_dim;
    float *row = malloc(w->n_cols * sizeof *row);
    double square = 0;
    for (uint32_t i = 0; i < w->n_rows; i++) {
        double y = 0;
        kvf__tensor_row(w, i, row);
        for (uint32_t e = 0; e < d; e++) y += (double)row[h * d + e] * v[e];
        square += y * y;
    }
    free(row);
    return sqrt(square);
}

/* Adds what one query of one head gives the prompt's slots; factor: of its probabilities. */
static void add_query(const double *q, const double *k, size_t stride, uint32_t d, uint32_t pos, uint32_t n,
                      double factor, double *largest) {
    double *p = malloc((pos + 1) * sizeof *p), sum = 0;
    for (uint32_t j = 0; j <= pos; j++) {
        p[j] = 0;
        for (uint32_t e = 0; e < d; e++) p[j] += q[e] * k[j * stride + e];
        p[j] = exp(p[j] / sqrt(d));
        sum += p[j];
    }
    for (uint32_t j = 0; j < n; j++) largest[j] = fmax(largest[j], p[j] / sum * factor);
    free(p);
}

/* (layer, query head, slot): as the passes leave it, or with plus divided by the residual's norm and times that of the output. */
static double *naive_scores(const kvf_model *m, const repeated *r, bool plus) {
    const kvf_model_info *info = &m->info;
    uint32_t d = info->head_dim, n_q = info->n_q_heads, per_kv = n_q / info->n_kv_heads;
    size_t stride = (size_t)info->n_kv_heads * d, layer_kv = r->n_all * stride;
    double *k = malloc(info->n_layers * layer_kv * sizeof *k), *v = malloc(info->n_layers * layer_kv * sizeof *v);
    double *x = malloc(2 * info->n_embd * sizeof *x), *norm = x + info->n_embd, *q = malloc(n_q * d * sizeof *q);
    double *largest = calloc((size_t)info->n_layers * n_q * r->n, sizeof *largest);
    float *row = malloc(info->n_embd * sizeof *row);
    for (uint32_t pos = 0; pos < r->n_all; pos++) {
        kvf__tensor_row(&m->token_embd, r->ids[pos], row);
        for (uint32_t i = 0; i < info->n_embd; i++) x[i] = (double)row[i];
        for (uint32_t l = 0; l < info->n_layers; l++) {
            double square = 0;
            for (uint32_t i = 0; i < info->n_embd; i++) square += x[i] * x[i];
            naive_norm(&m->layers[l].attn_norm, x, (double)info->norm_epsilon, norm);
            naive_multiply(&m->layers[l].attn_q, norm, q, 0, 0);
            naive_rotate(m, q, n_q, pos, NAIVE_PAIRS);
            naive_layer(m, l, pos, NAIVE_PAIRS, x, k + l * layer_kv, v + l * layer_kv);
            for (uint32_t h = 0; h < n_q && pos >= r->n; h++)
                add_query(q + h * d, k + l * layer_kv + h / per_kv * d, stride, d, pos, r->n,
                          plus ? 1 / sqrt(square) : 1, largest + ((size_t)l * n_q + h) * r->n);
        }
    }
    for (uint32_t l = 0; l < info->n_layers && plus; l++)
        for (uint32_t h = 0; h < n_q; h++)
            for (uint32_t i = 0; i < r->n; i++)
                largest[((size_t)l * n_q + h) * r->n + i] *=
                    output_norm(m, l, h, v + l * layer_kv + i * stride + h / per_kv * d);
    void *all[] = {k, v, x, q, row};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return largest;
}

/* ---- The product ------------------------------------------------------------------------------------------ */

/* One sequence in chunks: its prompt, then the repetition. The caller frees (layer, query head, slot). */
static float *product_scores(forward_rig *r, const repeated *of, uint32_t chunk, bool plus) {
    const kvf_model_info *info = r->info;
    size_t floats = (size_t)info->n_layers * info->n_q_heads * of->n;
    float *largest = memset(rig_floats(floats), 0, floats * sizeof *largest);
    float *logits = rig_floats(info->n_vocab), *all[1] = {largest};
    uint32_t out_row, begin = 0, end = of->n;
    const uint8_t by_residual = plus;
    rig_reset(r);
    for (uint32_t at = 0, n; at < of->n_all; at += n) {
        n = KVF__MIN(chunk, (at < of->n ? of->n : of->n_all) - at);
        kvf_forward f = rig_append(r, &rig_first, &n, 1, 0, of->ids + at, &out_row, logits);
        f.n_out = 0;
        f.deterministic = 1;
        f.prompt_max = at < of->n ? NULL : all;
        f.max_begin = &begin;
        f.max_end = &end;
        f.prompt_stride = of->n;
        f.max_by_residual = &by_residual;
        cr_assert(kvf_model_forward(r->model, r->activations, r->stream, &f, &r->err) == KVF_OK, "%s", r->err.text);
    }
    cr_assert_eq(kvf_seq_rollback(r->manager, r->seqs[0], of->n_all - of->n), KVF_OK);
    cr_assert_eq(kvf_view_fill(r->manager, 0, &r->seqs[0], 1, &r->view), KVF_OK);
    kvf_repetition x = {.struct_size = sizeof x, .view = &r->view, .pages = &r->pages, .end = end};
    x.prompt_max = largest;
    x.prompt_stride = of->n;
    kvf_status st = plus ? kvf_model_score(r->model, r->activations, r->stream, &x, &r->err) : KVF_OK;
    cr_assert(st == KVF_OK, "%s", r->err.text);
    free(logits);
    return largest;
}

static const struct tiny_model_params tiny[] = {
    {.weight_type = GW_F32, .n_layers = 3, .seed = 41},
    {.weight_type = GW_Q4_1, .n_layers = 2, .n_q_heads = 8, .n_kv_heads = 2, .head_dim = 8, .n_embd = 160, .seed = 42},
    {.weight_type = GW_Q8_0, .n_layers = 2, .n_q_heads = 3, .n_kv_heads = 3, .head_dim = 32, .n_embd = 96, .seed = 43},
};

Test(repetition, scores_match_the_naive_model) {
    static const uint32_t instruction[] = {5, 9, 5};
    uint32_t prompt[70];
    for (uint32_t i = 0; i < 70; i++) prompt[i] = (i * 37 + 11) % TINY_N_VOCAB;
    repeated of = repeat_prompt(prompt, 70, instruction, 3);
    for (size_t t = 0; t < sizeof tiny / sizeof *tiny; t++) {
        forward_rig r;
        kvf_model *m = open_tiny(&tiny[t]);
        size_t n = (size_t)m->info.n_layers * m->info.n_q_heads * of.n;
        rig_open(&r, m, KVF_F32, 1 + t % 2, t == 1 ? 1 : 0, 128, 80, 160);
        for (int plus = 0; plus < 2; plus++) {
            double *want = naive_scores(m, &of, plus);
            float *got = product_scores(&r, &of, 80, plus), *chunks = product_scores(&r, &of, 17, plus);
            for (size_t i = 0; i < n; i++)
                cr_assert(fabs((double)got[i] - want[i]) <= 1e-4 * fabs(want[i]) + 1e-7,
                          "model %zu, plus %d, entry %zu: %g, naive %g", t, plus, i, (double)got[i], want[i]);
            cr_assert(!memcmp(got, chunks, n * sizeof *got), "model %zu, plus %d: chunks change bits", t, plus);
            free(want);
            free(got);
            free(chunks);
        }
        rig_close(&r);
        kvf_model_close(m);
    }
}

/* Half precision reads the values as they are stored; a range of positions leaves all other columns alone. */
Test(repetition, a_part_of_the_slots_is_scaled_alone) {
    kvf_model *m = open_tiny(&tiny[0]);
    const kvf_model_info *info = &m->info;
    enum { T = 70 };
    uint32_t out_row, tokens[T], n = T;
    size_t floats = (size_t)info->n_layers * info->n_q_heads * T;
    float *whole = rig_floats(floats), *part = rig_floats(floats);
    for (uint32_t i = 0; i < T; i++) tokens[i] = (i * 31 + 3) % TINY_N_VOCAB;
    forward_rig r;
    rig_open(&r, m, KVF_BF16, 2, 0, 64, T, T);
    kvf_forward f = rig_append(&r, &rig_first, &n, 1, 0, tokens, &out_row, whole);
    f.n_out = 0;
    cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_OK);
    for (size_t i = 0; i < floats; i++) whole[i] = part[i] = 1;
    kvf_repetition x = {.struct_size = sizeof x, .view = &r.view, .pages = &r.pages, .end = T, .prompt_stride = T};
    x.prompt_max = whole;
    cr_assert_eq(kvf_model_score(m, r.activations, r.stream, &x, &r.err), KVF_OK);
    x.prompt_max = part;
    x.begin = 3;
    x.end = 68;
    cr_assert_eq(kvf_model_score(m, r.activations, NULL, &x, &r.err), KVF_OK);
    for (size_t i = 0; i < floats; i++)
        cr_assert_eq(part[i], i % T >= 3 && i % T < 68 ? whole[i] : 1.0f, "entry %zu: %g", i, (double)part[i]);
    x.end = T + 1;
    cr_assert_eq(kvf_model_score(m, r.activations, r.stream, &x, &r.err), KVF_E_INVALID);
    x.end = T;
    x.prompt_stride = T - 1;
    cr_assert_eq(kvf_model_score(m, r.activations, r.stream, &x, &r.err), KVF_E_INVALID);
    cr_assert(strstr(r.err.text, "prompt_stride 69: a table has 70 slots"), "%s", r.err.text);
    free(whole);
    free(part);
    rig_close(&r);
    kvf_model_close(m);
}

/* ---- The real model --------------------------------------------------------------------------------------- */

static uint32_t ids_of(const json_t *o, const char *key, uint32_t *ids, uint32_t capacity) {
    const json_t *list = json_object_get(o, key);
    uint32_t n = (uint32_t)json_array_size(list);
    cr_assert(n && n <= capacity, "\"%s\": %u ids", key, n);
    for (uint32_t i = 0; i < n; i++) ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    return n;
}

/* The largest over the query heads of each KV head, against (KV head, slot). */
static void expect_layer(const kvf_model_info *info, const float *scores, uint32_t n, const json_t *want,
                         const char *key, uint32_t layer) {
    uint32_t per_kv = info->n_q_heads / info->n_kv_heads;
    cr_assert_eq(json_array_size(want), info->n_kv_heads);
    for (uint32_t g = 0; g < info->n_kv_heads; g++)
        for (uint32_t i = 0; i < n; i++) {
            double got = 0, expected = json_number_value(json_array_get(json_array_get(want, g), i));
            for (uint32_t h = g * per_kv; h < (g + 1) * per_kv; h++)
                got = fmax(got, (double)scores[((size_t)layer * info->n_q_heads + h) * n + i]);
            cr_assert(fabs(got - expected) <= 1e-3 * fmax(expected, 1e-4),
                      "%s, layer %u, KV head %u, position %u: %g, expected %g", key, layer, g, i, got, expected);
        }
}

/* KVFOLD_SCORES_GOLDEN names the file: the real model's scores of one prompt in one piece, fp32 throughout. */
Test(repetition, the_real_model_has_the_scores_of_another_reader) {
    static const char *const keys[] = {"zip", "zip_plus"};
    const char *path = kvf_test_real_model(), *golden = getenv("KVFOLD_SCORES_GOLDEN");
    if (!path || !golden) cr_skip_test("no real model here, or KVFOLD_SCORES_GOLDEN is not set");
    json_error_t error;
    kvf_error err;
    json_t *o = json_load_file(golden, 0, &error);
    cr_assert(o, "%s", error.text);
    kvf_model *m = NULL;
    cr_assert_eq(kvf_model_open(path, NULL, &m, &err), KVF_OK, "%s", err.text);
    uint32_t prompt[512], instruction[32], n = ids_of(o, "prompt", prompt, 500);
    repeated of = repeat_prompt(prompt, n, instruction, ids_of(o, "repeat_instruction", instruction, 32));
    forward_rig r;
    rig_open(&r, m, KVF_F32, 2, 0, kvf__ceil_div(of.n_all, 16) * m->info.n_layers, 512, of.n_all);
    for (int plus = 0; plus < 2; plus++) {
        float *got = product_scores(&r, &of, 512, plus);
        for (uint32_t l = 0; l < m->info.n_layers; l++) {
            char name[12];
            snprintf(name, sizeof name, "%u", l);
            expect_layer(&m->info, got, of.n, json_object_get(json_object_get(o, keys[plus]), name), keys[plus], l);
        }
        free(got);
    }
    json_decref(o);
    rig_close(&r);
    kvf_model_close(m);
}
