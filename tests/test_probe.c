/* Probes: their numbers, their file, and the scores that a forward pass writes with one. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/model.h"
#include "tests/failing.h"
#include "tests/forward_rig.h"
#include "tests/tiny_models.h"

enum { LAYERS = 2, KV = 2, RHOS = 3, N = 90 };

static float weight[LAYERS * KV * 512], bias[LAYERS * KV], explained[LAYERS * KV], shares[RHOS * LAYERS * KV];
static float rhos[RHOS] = {.1f, .2f, 1}, thresholds[RHOS] = {3, 2, -5};

static kvf_probe_data data_of(uint32_t n_embd) {
    for (size_t i = 0; i < sizeof weight / sizeof *weight; i++) weight[i] = sinf((float)i * 1.7f);
    for (size_t i = 0; i < LAYERS * KV; i++) bias[i] = (float)i - 1.5f, explained[i] = .5f;
    for (size_t i = 0; i < RHOS * LAYERS * KV; i++) shares[i] = .25f;
    return (kvf_probe_data){.struct_size = sizeof(kvf_probe_data),
                            .n_layers = LAYERS,
                            .n_kv_heads = KV,
                            .n_embd = n_embd,
                            .model = "0123456789abcdef",
                            .weight = weight,
                            .bias = bias,
                            .explained = explained,
                            .n_rhos = RHOS,
                            .rhos = rhos,
                            .thresholds = thresholds,
                            .shares = shares,
                            .most = shares};
}

static kvf_probe *probe_of(const kvf_probe_data *d) {
    kvf_probe *p = NULL;
    kvf_error err;
    cr_assert(kvf_probe_create(d, NULL, &p, &err) == KVF_OK, "%s", err.text);
    return p;
}

static void same(const float *a, const float *b, size_t n) {
    cr_assert((a == NULL) == (b == NULL));
    if (a) cr_assert(memcmp(a, b, n * sizeof *a) == 0);
}

static void same_data(const kvf_probe *p, const kvf_probe_data *d) {
    kvf_probe_data x = {.struct_size = sizeof x};
    size_t tables = (size_t)d->n_layers * d->n_kv_heads;
    cr_assert_eq(kvf_probe_get(p, &x), KVF_OK);
    cr_assert(x.n_layers == d->n_layers && x.n_kv_heads == d->n_kv_heads && x.n_embd == d->n_embd);
    cr_assert_eq(x.n_rhos, d->n_rhos);
    cr_assert_str_eq(x.model, d->model ? d->model : "");
    same(x.weight, d->weight, tables * d->n_embd);
    same(x.bias, d->bias, tables);
    same(x.explained, d->explained, tables);
    if (!d->n_rhos) return;
    same(x.rhos, d->rhos, d->n_rhos);
    same(x.thresholds, d->thresholds, d->n_rhos);
    same(x.shares, d->shares, d->n_rhos * tables);
    same(x.most, d->most, d->n_rhos * tables);
}

Test(probe, a_file_holds_what_was_saved) {
    char path[256];
    kvf_error err;
    gw_temp_path(path, sizeof path);
    for (int form = 0; form < 3; form++) {
        kvf_probe_data d = data_of(40);
        if (form == 1) d.explained = NULL, d.model = NULL;
        if (form == 2) d.n_rhos = 0, d.rhos = d.thresholds = d.shares = d.most = NULL;
        kvf_probe *p = probe_of(&d), *q = NULL;
        same_data(p, &d);
        cr_assert(kvf_probe_save(p, path, &err) == KVF_OK, "%s", err.text);
        cr_assert(kvf_probe_open(path, NULL, &q, &err) == KVF_OK, "%s", err.text);
        same_data(q, &d);
        kvf_probe_close(p);
        kvf_probe_close(q);
    }
    unlink(path);
}

static void refused(kvf_probe_data d, const char *text) {
    kvf_probe *p = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_probe_create(&d, NULL, &p, &err), KVF_E_INVALID);
    cr_assert_null(p);
    cr_assert(strstr(err.text, text), "%s: lacks %s", err.text, text);
}

Test(probe, wrong_numbers_are_named) {
    const kvf_probe_data good = data_of(40);
    kvf_probe_data d = good;
    d.n_layers = 0, refused(d, "n_layers 0");
    d = good, d.n_embd = 1u << 21, refused(d, "n_embd 2097152");
    d = good, d.weight = NULL, refused(d, "weight: is NULL");
    d = good, d.n_rhos = 65, refused(d, "n_rhos 65");
    d = good, d.thresholds = NULL, refused(d, "thresholds: is NULL");
    d = good, weight[7] = NAN, refused(d, "weight[7] nan");
    d = data_of(40), bias[3] = INFINITY, refused(d, "bias[3] inf");
    d = data_of(40), explained[1] = 1.5f, refused(d, "explained[1] 1.5");
    d = data_of(40), shares[2] = -1, refused(d, "shares[2] -1");
    d = data_of(40);
    rhos[1] = .1f, refused(d, "rhos[1] 0.1"), rhos[1] = .2f;
    thresholds[2] = 4, refused(d, "thresholds[2] 4 after 2"), thresholds[2] = -5;
    d.model = "0123456789012345678901234567890123456789012345678901234567890123", refused(d, "64 bytes");
}

/* A torn file, and one with any byte changed, is refused or is a probe; it never does harm. */
Test(probe, torn_files_are_refused) {
    char path[256];
    kvf_error err;
    kvf_probe_data d = data_of(8);
    kvf_probe *p = probe_of(&d);
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_probe_save(p, path, &err), KVF_OK);
    kvf_probe_close(p);
    unsigned char bytes[8192];
    FILE *f = fopen(path, "rb");
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    cr_assert(n > 500 && n < sizeof bytes);
    for (size_t cut = 0; cut < n; cut++) {
        f = fopen(path, "wb");
        cr_assert_eq(fwrite(bytes, 1, cut, f), cut);
        fclose(f);
        p = NULL;
        err.text[0] = 0;
        kvf_status st = kvf_probe_open(path, NULL, &p, &err);
        /* The last tensor's padding holds nothing. */
        if (st == KVF_OK && cut + 32 > n)
            kvf_probe_close(p);
        else
            cr_assert(st == KVF_E_FORMAT && err.text[0] && !p, "cut at %zu: %s", cut, kvf_status_name(st));
    }
    for (size_t at = 0; at < n; at++) {
        unsigned char old = bytes[at];
        bytes[at] ^= 0xff;
        f = fopen(path, "wb");
        cr_assert_eq(fwrite(bytes, 1, n, f), n);
        fclose(f);
        bytes[at] = old;
        p = NULL;
        kvf_status st = kvf_probe_open(path, NULL, &p, &err);
        cr_assert((st == KVF_OK) == (p != NULL));
        kvf_probe_close(p);
    }
    unlink(path);
}

Test(probe, a_model_is_no_probe_and_a_folder_no_file) {
    char path[256];
    kvf_error err;
    kvf_probe *p = NULL;
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, &(struct tiny_model_params){.seed = 3}), 0);
    cr_assert_eq(kvf_probe_open(path, NULL, &p, &err), KVF_E_FORMAT);
    cr_assert(strstr(err.text, "is no probe"), "%s", err.text);
    unlink(path);
    cr_assert_eq(kvf_probe_open(path, NULL, &p, &err), KVF_E_IO);
    kvf_probe_data d = data_of(8);
    p = probe_of(&d);
    cr_assert_eq(kvf_probe_save(p, "/nowhere/at/all", &err), KVF_E_IO);
    cr_assert(strstr(err.text, "/nowhere/at/all"), "%s", err.text);
    kvf_probe_close(p);
}

Test(probe, a_failing_allocation_leaves_nothing) {
    char path[256];
    kvf_error err;
    struct failing f = {0, 0};
    kvf_allocator a = {failing_alloc, failing_free, &f};
    kvf_probe_data d = data_of(8);
    kvf_probe *p = probe_of(&d);
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_probe_save(p, path, &err), KVF_OK);
    kvf_probe_close(p);
    for (int64_t n = 0;; n++) {
        f.left = n;
        kvf_status st = kvf_probe_open(path, &a, &p, &err);
        if (st == KVF_OK) break;
        cr_assert(st == KVF_E_NO_MEMORY && f.alive == 0, "%lld", (long long)n);
    }
    kvf_probe_close(p);
    cr_assert_eq(f.alive, 0);
    unlink(path);
}

/* ---- Scores --------------------------------------------------------------------------------------------- */

typedef struct seen {
    float *states; /* [LAYERS][N][n_embd] */
    uint32_t at, n, n_embd;
} seen;

static kvf_status note(void *ctx, uint32_t layer, const float *state) {
    const seen *s = ctx;
    memcpy(s->states + ((size_t)layer * N + s->at) * s->n_embd, state, (size_t)s->n * s->n_embd * sizeof *state);
    return KVF_OK;
}

static float score_at(const forward_rig *r, uint32_t layer, uint32_t head, uint32_t slot) {
    const kvf_pages *p = &r->pages;
    size_t table = (size_t)layer * r->view.n_groups + head / p->heads_per_group;
    uint32_t block = r->view.rows[r->view.row_offset[table] + slot / p->block_size];
    return p->score[((size_t)block * p->heads_per_group + head % p->heads_per_group) * p->block_size +
                    slot % p->block_size];
}

/* All chunkings write W x + b of the states that the pass hands out; with deterministic always the same bits. */
Test(probe, a_forward_pass_writes_the_scores_of_new_tokens) {
    static const uint32_t chunks[] = {N, 37, 1};
    kvf_model *m = open_tiny(&(struct tiny_model_params){.weight_type = GW_Q8_0, .seed = 31});
    uint32_t d = kvf_model_get_info(m)->n_embd, ids[N], rows[N];
    float first[LAYERS * KV * N], *logits = rig_floats(TINY_N_VOCAB);
    seen s = {.states = rig_floats((size_t)LAYERS * N * d), .n_embd = d};
    kvf_probe_data data = data_of(d);
    kvf_probe *probe = probe_of(&data);
    for (uint32_t i = 0; i < N; i++) ids[i] = tiny_token(i);
    for (size_t form = 0; form < 6; form++) {
        forward_rig r;
        uint32_t chunk = chunks[form % 3];
        rig_open(&r, m, KVF_F16, 2, form / 3 ? 1 : 0, 64, N, N + 10);
        r.pages.score = rig_floats((size_t)r.pages.n_blocks * r.pages.heads_per_group * r.pages.block_size);
        for (s.at = 0; s.at < N; s.at += s.n) {
            s.n = KVF__MIN(chunk, N - s.at);
            kvf_forward f = rig_append(&r, &rig_first, &s.n, 1, 0, ids + s.at, rows, logits);
            f.deterministic = 1;
            f.probe = probe;
            f.hidden = note;
            f.ctx = &s;
            cr_assert(kvf_model_forward(m, r.activations, r.stream, &f, &r.err) == KVF_OK, "%s", r.err.text);
        }
        for (uint32_t t = 0; t < LAYERS * KV; t++)
            for (uint32_t i = 0; i < N; i++) {
                const float *x = s.states + ((size_t)(t / KV) * N + i) * d;
                double y = (double)bias[t];
                for (uint32_t j = 0; j < d; j++) y += (double)weight[t * d + j] * (double)x[j];
                float got = score_at(&r, t / KV, t % KV, i);
                cr_assert(fabs((double)got - y) < 1e-3, "table %u slot %u: %g, not %g", t, i, (double)got, y);
                if (!form) first[t * N + i] = got;
                cr_assert(memcmp(&first[t * N + i], &got, sizeof got) == 0, "form %zu: table %u slot %u", form, t, i);
            }
        free(r.pages.score);
        rig_close(&r);
    }
    kvf_probe_close(probe);
    free(s.states);
    free(logits);
    kvf_model_close(m);
}

Test(probe, a_probe_of_another_shape_is_refused) {
    kvf_model *m = open_tiny(&(struct tiny_model_params){.weight_type = GW_Q8_0, .seed = 31});
    uint32_t one = 1, row, id = 5;
    float *logits = rig_floats(TINY_N_VOCAB);
    forward_rig r;
    rig_open(&r, m, KVF_F16, 1, 0, 16, 8, 64);
    kvf_probe_data d = data_of(kvf_model_get_info(m)->n_embd);
    kvf_probe *right = probe_of(&d);
    d.n_embd--;
    kvf_probe *wrong = probe_of(&d);
    kvf_forward f = rig_append(&r, &rig_first, &one, 1, 1, &id, &row, logits);
    f.probe = right;
    cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_E_INVALID);
    cr_assert(strstr(r.err.text, "pages.score"), "%s", r.err.text);
    r.pages.score = rig_floats((size_t)r.pages.n_blocks * r.pages.heads_per_group * r.pages.block_size);
    f.probe = wrong;
    cr_assert_eq(kvf_model_forward(m, r.activations, r.stream, &f, &r.err), KVF_E_INVALID);
    cr_assert(strstr(r.err.text, "the model has"), "%s", r.err.text);
    f.probe = right;
    cr_assert(kvf_model_forward(m, r.activations, r.stream, &f, &r.err) == KVF_OK, "%s", r.err.text);
    free(r.pages.score);
    kvf_probe_close(right);
    kvf_probe_close(wrong);
    rig_close(&r);
    free(logits);
    kvf_model_close(m);
}
