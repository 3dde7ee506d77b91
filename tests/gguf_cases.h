/* tests/gguf_cases.h: opening files that lie, for test_gguf*.c. Include after <criterion/criterion.h>. */
#ifndef KVF_TESTS_GGUF_CASES_H
#define KVF_TESTS_GGUF_CASES_H

#include <time.h>
#include <unistd.h>

#include "model/model.h"
#include "tests/gguf_writer.h"
#include "tests/meter.h"

static inline kvf_model_config config_with(meter *m, int tokenizer_only) {
    return (kvf_model_config){.struct_size = sizeof(kvf_model_config),
                              .tokenizer_only = tokenizer_only,
                              .allocator = {meter_alloc, meter_free, m}};
}

/* Opens bytes as a file; *m says what that took. The model, or NULL with the error. */
static inline kvf_model *open_bytes(const void *data, size_t n, int tokenizer_only, meter *m, kvf_status *status,
                                    kvf_error *err) {
    char path[256];
    kvf_model *model = NULL;
    kvf_model_config config = config_with(m, tokenizer_only);
    gw_temp_path(path, sizeof path);
    cr_assert_eq(gw_write_bytes(path, data, n), 0);
    *status = kvf_model_open(path, &config, &model, err);
    unlink(path);
    return model;
}

static inline void must_refuse(const char *title, const void *data, size_t n, kvf_status wanted, const char *says,
                               kvf_error *err) {
    meter m = {0};
    kvf_status status;
    clock_t begin = clock();
    kvf_model *model = open_bytes(data, n, 0, &m, &status, err);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC; /* of this process, whatever else runs */
    cr_assert_null(model, "%s: was opened", title);
    cr_assert_eq(status, wanted, "%s: %s, wanted %s: %s", title, kvf_status_name(status), kvf_status_name(wanted),
                 err->text);
    cr_assert(strstr(err->text, says), "%s: the text \"%s\" does not say \"%s\"", title, err->text, says);
    cr_assert_eq(m.n_live, 0, "%s: leaks", title);
    cr_assert_lt(seconds, 0.1, "%s: took %.3f s", title, seconds);
    cr_assert(m.largest <= KVF__MAX(n, sizeof(kvf_model)), "%s: asked for %zu bytes, the file has %zu", title,
              m.largest, n);
}

static inline void must_differ(kvf_error *errors, size_t n) {
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            cr_assert_str_neq(strchr(errors[i].text, ':'), strchr(errors[j].text, ':'),
                              "cases %zu and %zu say the same", i, j);
}

/* ---- Whole models with one fault ------------------------------------------------------------------------ */

typedef struct fault {
    const char *title, *skip;                                 /* what is left out of a whole model */
    enum { NOTHING, SCALAR, ARRAY, TEXT, TENSOR, INFO } kind; /* and what comes in: see add_fault */
    const char *name, *text;
    uint32_t type;
    uint64_t n, rows; /* the value, the length of an array, or the columns of a tensor */
    kvf_status status;
    const char *says;
} fault;

static inline void add_fault(gw *w, void *ctx) {
    static const size_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    const fault *f = ctx;
    static float zeros[TINY_N_VOCAB * 64];
    switch (f->kind) {
    case NOTHING: break;
    case SCALAR:
        gw_key(w, f->name, f->type);
        gw_put(&w->keys, &f->n, bytes[f->type]);
        break;
    case ARRAY:
        gw_key_array(w, f->name, f->type, f->n);
        gw_put(&w->keys, zeros, f->n * bytes[f->type]);
        break;
    case TEXT: gw_key_text(w, f->name, f->text); break;
    case TENSOR: gw_tensor(w, f->name, f->type, f->rows, f->n, zeros); break;
    case INFO: gw_tensor_info(w, f->name, 1, (uint64_t[]){f->n}, f->type, f->rows); break;
    }
}

/* Each fault in a model of these parameters. */
static inline void check_faults(const struct tiny_model_params *base, const fault *faults, size_t n_faults) {
    kvf_error *errors = calloc(n_faults, sizeof *errors);
    for (size_t i = 0; i < n_faults; i++) {
        const fault *f = &faults[i];
        gw w = {0};
        size_t n;
        struct tiny_model_params p = *base;
        p.skip = f->skip;
        p.extra = add_fault;
        p.ctx = (void *)(uintptr_t)f;
        kvf_test_tiny_model(&w, &p);
        unsigned char *data = gw_bytes(&w, &n);
        must_refuse(f->title, data, n, f->status, f->says, &errors[i]);
        free(data);
        gw_free(&w);
    }
    must_differ(errors, n_faults);
    free(errors);
}

#define KEY(title, key, kind, type, value, status, says) \
    { title, key, kind, key, NULL, type, value, 0, status, says }
#define TEXT_KEY(title, key, value, status, says) \
    { title, key, TEXT, key, value, 0, 0, 0, status, says }
#define LLAMA "llama."
#define ATTENTION "llama.attention."
#define TOKENIZER "tokenizer.ggml."

#define TENSOR_CASE(title, skip, name, type, rows, cols, status, says) \
    { title, skip, TENSOR, name, NULL, type, cols, rows, status, says }
#define INFO_CASE(title, name, type, offset, n, status, says) \
    { title, NULL, INFO, name, NULL, type, n, offset, status, says }

#endif
