/* Tensors that a model has no place for: skipped with a warning, or refused where the results would be others. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <unistd.h>

#include "model/model.h"
#include "tests/gguf_writer.h"

typedef struct lines {
    char last[512];
    uint32_t n;
} lines;

static void keep(void *ctx, kvf_log_level level, const char *line) {
    lines *l = ctx;
    if (level < KVF_LOG_WARN) return;
    l->n++;
    snprintf(l->last, sizeof l->last, "%s", line);
}

/* The tensors that a test adds: of one row, or entries of the index alone. */
typedef struct more {
    const char *names[4];
    uint32_t type; /* an entry alone: one that no file of ours has data for */
} more;

static void add_tensors(gw *w, void *ctx) {
    const more *m = ctx;
    static const float row[64] = {1};
    gw_key_text(w, "llama.unknown", "as good as absent"); /* and nothing is said of it */
    gw_key_texts(w, "quantize.unknown", m->names, 1);
    const uint64_t dims[1] = {64};
    for (int i = 0; i < 4 && m->names[i]; i++) {
        if (m->type)
            gw_tensor_info(w, m->names[i], 1, dims, m->type, 0);
        else
            gw_tensor(w, m->names[i], GW_F32, 0, 64, row);
    }
}

static kvf_status open_with(struct tiny_model_params *params, const more *m, lines *l, kvf_model **out,
                            kvf_error *err) {
    char path[256];
    kvf_model_config config = {.struct_size = sizeof config, .log = {keep, l}};
    *l = (lines){.n = 0};
    *err = (kvf_error){.text = ""};
    params->extra = m ? add_tensors : NULL;
    params->ctx = (void *)(uintptr_t)m;
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, params), 0);
    kvf_status status = kvf_model_open(path, &config, out, err);
    unlink(path);
    return status;
}

Test(tensors, r5_unknown_tensors_are_skipped_with_a_warning) {
    static const struct {
        more m;
        const char *says;
    } cases[] = {
        {{{"extra.weight"}, 0}, "tensor extra.weight: architecture llama has no use for it: skipped"},
        {{{"v.blk.0.attn_q.weight", "mm.0.weight", "blk.2.nextn.eh_proj.weight", "x"}, 0},
         "tensor v.blk.0.attn_q.weight and 3 more: architecture llama has no use for them: skipped"},
        {{{"blk.0.attn_rot_embd"}, 0}, "tensor blk.0.attn_rot_embd: "},
        {{{"blk.1.attn.rotary_emb.inv_freq"}, 0}, "inv_freq: "},
        {{{"extra.weight"}, 10}, "tensor extra.weight: "}, /* Q2_K */
        {{{"extra.weight", "blk.0.attn_rot_embd"}, 12345}, "tensor extra.weight and 1 more: "},
        {{{"blk.", "blk.x.attn_q.bias", "blk.99999999999999999999.attn_q.bias", "blk"}, 0}, "tensor blk. and 3 more"},
    };
    struct tiny_model_params params = {.seed = 1};
    kvf_model *plain = NULL;
    lines l;
    kvf_error err;
    cr_assert_eq(open_with(&params, NULL, &l, &plain, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(l.n, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_model *model = NULL;
        cr_assert_eq(open_with(&params, &cases[i].m, &l, &model, &err), KVF_OK, "case %zu: %s", i, err.text);
        cr_assert(l.n == 1 && strstr(l.last, cases[i].says), "case %zu: %u lines, %s", i, l.n, l.last);
        const kvf_model_info *a = kvf_model_get_info(plain), *b = kvf_model_get_info(model);
        cr_assert(a->n_params == b->n_params && a->n_tensors == b->n_tensors && !strcmp(a->weights, b->weights));
        kvf_model_close(model);
    }
    kvf_model_close(plain);
}

Test(tensors, r5_what_changes_the_results_is_refused) {
    static const char *const names[] = {"blk.0.attn_q.bias",
                                        "blk.1.attn_output.bias",
                                        "blk.0.attn_q_norm.weight",
                                        "blk.0.ffn_gate_inp.weight",
                                        "blk.1.foo",
                                        "token_embd_norm.weight",
                                        "output.bias",
                                        "output_norm.bias",
                                        "position_embd.weight",
                                        "blk.2.attn_norm.weight",
                                        "rope_factors_long.weight"};
    struct tiny_model_params params = {.seed = 1};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int read = 0; read < 2; read++) {
            const more m = {.names = {"extra.weight", names[i]}, .type = read ? 0 : 99};
            kvf_model *model = NULL;
            lines l;
            kvf_error err;
            cr_assert_eq(open_with(&params, &m, &l, &model, &err), KVF_E_UNSUPPORTED, "%s", names[i]);
            cr_assert(!model && !l.n && strstr(err.text, names[i]) &&
                          strstr(err.text, "use a file of a model without it"),
                      "%s", err.text);
        }
}

/* The factors of rope_freqs.weight and keys that ask for the same: the factors hold, whatever the keys lack. */
Test(tensors, r5_factors_of_the_file_win) {
    struct tiny_model_params params = {.seed = 1, .rope_freqs = 1};
    kvf_model *model = NULL;
    lines l;
    kvf_error err;
    for (int keys = 0; keys < 3; keys++) {
        if (keys) params.rope_scaling = "llama3";
        if (keys == 2) params.rope_factor = 8, params.rope_original = 64;
        cr_assert_eq(open_with(&params, NULL, &l, &model, &err), KVF_OK, "%s", err.text);
        cr_assert_eq(l.n, keys ? 1u : 0u);
        if (keys) cr_assert(strstr(l.last, "tensor rope_freqs.weight: its factors hold"), "%s", l.last);
        cr_assert(model->rope_freqs.data && model->rope_scaling.kind == KVF__ROPE_PLAIN);
        kvf_model_close(model);
    }
    params.rope_freqs = 0;
    cr_assert_eq(open_with(&params, NULL, &l, &model, &err), KVF_OK, "%s", err.text);
    cr_assert(!l.n && model->rope_scaling.kind == KVF__ROPE_LLAMA3);
    kvf_model_close(model);
}
