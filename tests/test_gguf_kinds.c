/* GGUF files of several parts, of mixed types, of other architectures, with scaled rotation: read, or refused by name. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>

#include "kvfold/engine.h"
#include "tests/gguf_cases.h"

/* ---- Types ---------------------------------------------------------------------------------------------- */

static kvf_model *open_params(const struct tiny_model_params *p, meter *m) {
    gw w = {0};
    size_t n;
    kvf_error err = {.text = ""};
    kvf_status status;
    kvf_test_tiny_model(&w, p);
    unsigned char *data = gw_bytes(&w, &n);
    kvf_model *model = open_bytes(data, n, 0, m, &status, &err);
    cr_assert_not_null(model, "%s", err.text);
    free(data);
    gw_free(&w);
    return model;
}

/* Rows of 256 elements; two types in one file. */
Test(gguf, reads_mixed_types) {
    static const char *const weights[] = {"Q4_K x 11, F32 x 5, Q6_K x 5", "Q6_K x 15, F32 x 5"};
    for (int i = 0; i < 2; i++) {
        const struct tiny_model_params p = {.weight_type = i ? GW_Q6_K : GW_Q4_K,
                                            .wide_type_p1 = GW_Q6_K + 1,
                                            .separate_output = !i,
                                            .head_dim = 64,
                                            .n_ff = 256};
        meter m = {0};
        kvf_model *model = open_params(&p, &m);
        cr_assert_str_eq(kvf_model_get_info(model)->weights, weights[i]);
        cr_assert_eq(model->layers[1].attn_v.type, GW_Q6_K);
        cr_assert_eq(model->layers[1].attn_q.bytes, (size_t)(i ? 210 : 144) * 256);
        kvf_model_close(model);
        cr_assert_eq(m.n_live, 0);
    }
}

static void add_matrices(gw *w, void *ctx) {
    static const struct {
        const char *name;
        uint32_t type, n_rows;
    } t[] = {{"token_embd.weight", GW_F16, TINY_N_VOCAB}, {"blk.0.attn_q.weight", GW_Q4_0, 256},
             {"blk.0.attn_k.weight", GW_Q4_1, 128},       {"blk.0.attn_v.weight", GW_Q5_0, 128},
             {"blk.0.attn_output.weight", GW_Q5_1, 256},  {"blk.0.ffn_gate.weight", GW_Q8_0, 256},
             {"blk.0.ffn_up.weight", GW_Q5_K, 256},       {"blk.0.ffn_down.weight", GW_Q6_K, 256},
             {"output.weight", GW_BF16, TINY_N_VOCAB}};
    uint64_t rng = 3;
    (void)ctx;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        gw_tensor_random(w, t[i].name, t[i].type, t[i].n_rows, 256, 0, 1, &rng);
}

/* The list of types ends where its place does. */
Test(gguf_kinds, reads_all_types_in_one_file) {
    const struct tiny_model_params p = {.weight_type = GW_Q4_K,
                                        .head_dim = 64,
                                        .n_ff = 256,
                                        .extra = add_matrices,
                                        .skip = "token_embd.weight blk.0.attn_q.weight blk.0.attn_k.weight "
                                                "blk.0.attn_v.weight blk.0.attn_output.weight blk.0.ffn_gate.weight "
                                                "blk.0.ffn_up.weight blk.0.ffn_down.weight"};
    meter m = {0};
    kvf_model *model = open_params(&p, &m);
    cr_assert_str_eq(kvf_model_get_info(model)->weights,
                     "Q4_K x 7, F32 x 5, F16 x 1, Q4_0 x 1, Q4_1 x 1, Q5_0 x 1, Q5_1 x 1, Q8_0 x 1, Q5_K x 1");
    kvf_model_close(model);
}

/* ---- Architectures and scaled rotation ------------------------------------------------------------------ */

Test(gguf_kinds, reads_other_architectures) {
    static const char *const names[] = {"llama", "mistral", "qwen2"};
    for (int i = 0; i < 3; i++) {
        meter m = {0};
        kvf_model *model = open_params(&(struct tiny_model_params){.arch = names[i], .sliding_window = 100}, &m);
        const kvf__layer *l = &model->layers[1];
        cr_assert_str_eq(model->info.architecture, names[i]);
        cr_assert_eq(model->rope_halves, i == 2);
        cr_assert_eq(l->attn_q_bias.data != NULL, i == 2);
        cr_assert(i != 2 ||
                  (l->attn_q_bias.n_cols == 64 && l->attn_k_bias.n_cols == 32 && l->attn_v_bias.n_cols == 32));
        cr_assert_eq(model->info.sliding_window, 100);
        kvf_model_close(model);
        cr_assert_eq(m.n_live, 0);
    }
    meter m = {0};
    kvf_model *model = open_params(&(struct tiny_model_params){.sliding_window = 512}, &m);
    cr_assert_eq(model->info.sliding_window, 0, "a window of the whole context is none");
    kvf_model_close(model);
    model = open_params(&(struct tiny_model_params){.rope_scaling = "none", .rope_factor = 4}, &m);
    cr_assert_eq(model->rope_scaling.kind, KVF__ROPE_PLAIN);
    kvf_model_close(model);
    model = open_params(&(struct tiny_model_params){.rope_factor = 1}, &m);
    cr_assert_eq(model->rope_scaling.kind, KVF__ROPE_PLAIN);
    kvf_model_close(model);
}

/* Which layers slide: a number n leaves every n-th out, an array names those that do. */
Test(gguf_kinds, reads_which_layers_slide) {
    static const char *const names[] = {"llama", "mistral", "qwen2"};
    static const struct {
        uint32_t period, layers, n;
        const char *slides;
    } cases[] = {{0, 0, 6, "111111"}, {1, 0, 0, "000000"}, {2, 0, 3, "101010"}, {3, 0, 4, "110110"},
                 {4, 0, 5, "111011"}, {9, 0, 6, "111111"}, {0, 1, 1, "100000"}, {0, 0x2e, 4, "011101"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        meter m = {0};
        kvf_model *model = open_params(&(struct tiny_model_params){.arch = names[i % 3],
                                                                   .n_layers = 6,
                                                                   .sliding_window = 100,
                                                                   .sliding_period = cases[i].period,
                                                                   .sliding_layers = cases[i].layers},
                                       &m);
        const kvf_model_info *info = kvf_model_get_info(model);
        cr_assert_eq(info->n_window_layers, cases[i].n, "case %zu: %u", i, info->n_window_layers);
        cr_assert_eq(info->sliding_window, cases[i].n ? 100 : 0);
        for (uint32_t l = 0; l < 6; l++)
            cr_assert_eq(kvf_model_layer_window(model, l), cases[i].slides[l] == '1' ? 100 : 0, "case %zu, layer %u", i,
                         l);
        cr_assert_eq(kvf_model_layer_window(model, 6), 0);
        kvf_model_close(model);
    }
    meter m = {0};
    kvf_model *model =
        open_params(&(struct tiny_model_params){.n_layers = 2, .sliding_window = 512, .sliding_period = 2}, &m);
    cr_assert(kvf_model_layer_window(model, 0) == 0 && model->info.n_window_layers == 0);
    kvf_model_close(model);
}

/* The context is the model's, whatever its window. */
Test(gguf_kinds, the_engine_goes_beyond_a_sliding_window) {
    meter m = {0};
    kvf_error err = {.text = ""};
    kvf_engine *engine = NULL;
    kvf_model *model = open_params(&(struct tiny_model_params){.arch = "mistral", .sliding_window = 100}, &m);
    uint32_t longest = kvf_model_get_info(model)->n_context;
    kvf_engine_config config = {.struct_size = sizeof config, .model = model, .max_context = longest + 1};
    cr_assert_gt(longest, 100);
    cr_assert_eq(kvf_engine_create(&config, &engine, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "the model's context"), "%s", err.text);
    for (uint32_t context = 0; context <= longest; context += longest) {
        config.max_context = context;
        cr_assert_eq(kvf_engine_create(&config, &engine, &err), KVF_OK, "%s", err.text);
        kvf_engine_destroy(engine);
    }
    kvf_model_close(model);
}

#define QWEN2 "qwen2."
#define SCALING "llama.rope.scaling."

Test(gguf_kinds, refuses_what_qwen2_must_not_lack) {
    static const char bias[] = "blk.1.attn_k.bias";
    static const fault faults[] = {
        {"no bias", bias, NOTHING, bias, NULL, 0, 0, 0, KVF_E_FORMAT, "tensor blk.1.attn_k.bias: is missing"},
        TENSOR_CASE("a long bias", bias, bias, GW_F32, 0, 64, KVF_E_FORMAT,
                    "blk.1.attn_k.bias: dims [64, 1, 1, 1]: must be [32, 1]"),
        TENSOR_CASE("an F16 bias", bias, bias, GW_F16, 0, 32, KVF_E_UNSUPPORTED, "blk.1.attn_k.bias: type F16"),
        TENSOR_CASE("a bias of the output", NULL, "blk.0.attn_output.bias", GW_F32, 0, 64, KVF_E_UNSUPPORTED,
                    "tensor blk.0.attn_output.bias: architecture qwen2"),
        KEY("keys of another architecture", QWEN2 "block_count", NOTHING, 0, 0, KVF_E_FORMAT,
            "key qwen2.block_count: is missing"),
        TEXT_KEY("yarn", QWEN2 "rope.scaling.type", "yarn", KVF_E_UNSUPPORTED, "key qwen2.rope.scaling.type: yarn:"),
    };
    check_faults(&(struct tiny_model_params){.arch = "qwen2"}, faults, sizeof faults / sizeof *faults);
}

Test(gguf_kinds, refuses_scaling_that_lies) {
    static const fault faults[] = {
        KEY("no factor", SCALING "factor", NOTHING, 0, 0, KVF_E_FORMAT, "rope.scaling.factor: is missing"),
        KEY("no context", SCALING "original_context_length", NOTHING, 0, 0, KVF_E_FORMAT,
            "rope.scaling.original_context_length: is missing"),
        KEY("context 0", SCALING "original_context_length", SCALAR, GW_U32, 0, KVF_E_FORMAT,
            "rope.scaling.original_context_length: 0:"),
        KEY("context f32", SCALING "original_context_length", SCALAR, GW_FLOAT, 0x45000000, KVF_E_FORMAT,
            "rope.scaling.original_context_length: type f32"),
        KEY("low 4", SCALING "low_freq_factor", SCALAR, GW_FLOAT, 0x40800000, KVF_E_FORMAT,
            "rope.scaling.high_freq_factor: 4: must exceed low_freq_factor, 4"),
        KEY("high NaN", SCALING "high_freq_factor", SCALAR, GW_FLOAT, 0x7fc00000, KVF_E_FORMAT,
            "rope.scaling.high_freq_factor: nan:"),
        KEY("two factors", "llama.rope.scale_linear", SCALAR, GW_FLOAT, 0x40000000, KVF_E_FORMAT,
            "rope.scale_linear: 2: rope.scaling.factor says 8"),
    };
    struct tiny_model_params p = {.rope_scaling = "llama3", .rope_factor = 8, .rope_original = 64};
    check_faults(&p, faults, sizeof faults / sizeof *faults);
}

/* ---- Parts ---------------------------------------------------------------------------------------------- */

enum { N_PARTS = 3, ALL_PARTS = 99 };

/* A split model, and how it lies. */
typedef struct split_case {
    const char *title;
    uint32_t part;   /* the one at fault */
    const char *key; /* of it, which says `value`; NULL: none */
    uint32_t value;
    enum { PART_SOUND, PART_MISSING, PART_NO_KEYS, PART_CUT, PART_REPEATS } what;
    uint32_t open; /* the part that is named */
    kvf_status status;
    const char *says;
} split_case;

static void split_keys(gw *w, uint32_t no, uint32_t n_tensors, const split_case *c) {
    static const char *const names[] = {"split.no", "split.count", "split.tensors.count"};
    uint32_t values[] = {no, N_PARTS, n_tensors};
    for (int i = 0; i < 3; i++) {
        if (c && c->key && (c->part == no || c->part == ALL_PARTS) && !strcmp(c->key, names[i])) values[i] = c->value;
        if (!gw_key(w, names[i], i < 2 ? GW_U16 : GW_I32)) continue;
        gw_put(&w->keys, &values[i], i < 2 ? 2 : 4);
    }
}

static void part_name(char *out, size_t capacity, const char *folder, uint32_t no) {
    snprintf(out, capacity, "%s/tiny-%05u-of-%05u.gguf", folder, no + 1, (unsigned)N_PARTS);
}

/* Writes the parts into the folder. */
static void write_parts(const char *folder, const struct tiny_model_params *p, const split_case *c) {
    gw parts[N_PARTS] = {0};
    for (uint32_t i = 1; i < N_PARTS; i++) parts[i] = (gw){.version = 3, .alignment = 32};
    parts[0].others = parts + 1;
    parts[0].n_others = N_PARTS - 1;
    kvf_test_tiny_model(&parts[0], p);
    uint64_t n_tensors = 0;
    for (uint32_t i = 0; i < N_PARTS; i++) n_tensors += parts[i].n_tensors;
    for (uint32_t i = 0; i < N_PARTS; i++) {
        char path[512];
        size_t n;
        int faulty = c && c->part == i;
        if (!faulty || c->what != PART_NO_KEYS) split_keys(&parts[i], i, (uint32_t)n_tensors, c);
        unsigned char *data = gw_bytes(&parts[i], &n);
        part_name(path, sizeof path, folder, i);
        if (faulty && c->what == PART_CUT) n -= 40;
        if (!faulty || c->what != PART_MISSING) cr_assert_eq(gw_write_bytes(path, data, n), 0);
        free(data);
    }
    for (uint32_t i = 0; i < N_PARTS; i++) gw_free(&parts[i]);
}

static void remove_parts(const char *folder) {
    char path[512];
    for (uint32_t i = 0; i < N_PARTS; i++) {
        part_name(path, sizeof path, folder, i);
        (void)unlink(path);
    }
    (void)rmdir(folder);
}

static void temp_folder(char *out, size_t capacity) {
    gw_temp_path(out, capacity);
    unlink(out);
    cr_assert_not_null(mkdtemp(strcat(out, "XXXXXX")));
}

static void expect_same(const kvf__tensor *a, const kvf__tensor *b) {
    cr_assert_str_eq(a->name, b->name);
    cr_assert(a->bytes == b->bytes && !memcmp(a->data, b->data, a->bytes), "%s differs", a->name);
}

Test(gguf_kinds, a_split_model_is_the_whole_one) {
    const struct tiny_model_params p = {.arch = "qwen2", .weight_type = GW_Q5_1, .seed = 4, .separate_output = 1};
    char folder[300], path[512];
    kvf_error err = {.text = ""};
    meter m = {0};
    kvf_model *whole = open_params(&p, &m), *split = NULL;
    temp_folder(folder, sizeof folder);
    write_parts(folder, &p, NULL);
    part_name(path, sizeof path, folder, 0);
    meter all = {0};
    kvf_model_config config = config_with(&all, 0);
    cr_assert_eq(kvf_model_open(path, &config, &split, &err), KVF_OK, "%s", err.text);
    cr_assert(split->info.n_files == N_PARTS && split->info.file_bytes > whole->info.file_bytes);
    cr_assert(split->info.n_tensors == whole->info.n_tensors && split->info.n_params == whole->info.n_params);
    cr_assert_str_eq(split->info.weights, whole->info.weights);
    expect_same(&split->output, &whole->output);
    for (uint32_t i = 0; i < 2; i++) {
        expect_same(&split->layers[i].attn_v_bias, &whole->layers[i].attn_v_bias);
        expect_same(&split->layers[i].ffn_down, &whole->layers[i].ffn_down);
        expect_same(&split->layers[i].attn_norm, &whole->layers[i].attn_norm);
    }
    kvf_model_close(split);
    kvf_model_close(whole);
    for (size_t i = 1; i <= all.n_calls; i++) {
        meter failing = {.fail_at = i};
        config = config_with(&failing, 0);
        cr_assert_eq(kvf_model_open(path, &config, &split, &err), KVF_E_NO_MEMORY, "allocation %zu: %s", i, err.text);
        cr_assert_eq(failing.n_live, 0, "allocation %zu leaks", i);
    }
    remove_parts(folder);
}

static void add_repeated(gw *w, void *ctx) {
    (void)ctx;
    while (w->next_file % N_PARTS != 2) w->next_file++;
    gw_tensor(w, "output_norm.weight", GW_F32, 0, 64, (float[64]){0});
}

Test(gguf_kinds, parts_that_are_missing_or_foreign_are_refused) {
    static const split_case cases[] = {
        {"missing", 1, NULL, 0, PART_MISSING, 0, KVF_E_IO, "tiny-00002-of-00003.gguf: No such file"},
        {"the last missing", 2, NULL, 0, PART_MISSING, 0, KVF_E_IO, "tiny-00003-of-00003.gguf: No such file"},
        {"no keys", 2, NULL, 0, PART_NO_KEYS, 0, KVF_E_FORMAT, "tiny-00003-of-00003.gguf: key split.count: is missing"},
        {"of another number", 1, "split.no", 2, PART_SOUND, 0, KVF_E_FORMAT,
         "tiny-00002-of-00003.gguf: key split.no: 2: must be 1 in part 2"},
        {"of another count", 2, "split.count", 4, PART_SOUND, 0, KVF_E_FORMAT,
         "tiny-00003-of-00003.gguf: key split.count: 4: must be 3"},
        {"of another model", 1, "split.tensors.count", 21, PART_SOUND, 0, KVF_E_FORMAT,
         "tiny-00002-of-00003.gguf: key split.tensors.count: 21: must be 20"},
        {"a count that lies", ALL_PARTS, "split.tensors.count", 21, PART_SOUND, 0, KVF_E_FORMAT,
         "key split.tensors.count: 21: its 3 parts have 20 tensors"},
        {"number beyond the count", 1, "split.no", 3, PART_SOUND, 0, KVF_E_FORMAT,
         "tiny-00002-of-00003.gguf: key split.no: 3: must be below"},
        {"truncated", 2, NULL, 0, PART_CUT, 0, KVF_E_FORMAT, "tiny-00003-of-00003.gguf: tensor"},
        {"a tensor twice", 2, NULL, 0, PART_REPEATS, 0, KVF_E_FORMAT, "tensor output_norm.weight: is there twice"},
        {"more parts than named", 0, "split.count", 4, PART_SOUND, 0, KVF_E_INVALID,
         "tiny-00001-of-00003.gguf: key split.count: 4: the name of the file must end in -00001-of-00004.gguf"},
        {"the most parts", 0, "split.count", 65535, PART_SOUND, 0, KVF_E_INVALID, "key split.count: 65535:"},
        {"not the first", 0, NULL, 0, PART_SOUND, 1, KVF_E_INVALID,
         "tiny-00002-of-00003.gguf: key split.no: 1: this is part 2 of 3: name the first"},
    };
    enum { N = sizeof cases / sizeof *cases };
    kvf_error errors[N];
    for (size_t i = 0; i < N; i++) {
        const split_case *c = &cases[i];
        char folder[300], path[512];
        meter m = {0};
        kvf_model_config config = config_with(&m, 0);
        kvf_model *model = NULL;
        struct tiny_model_params p = {.weight_type = GW_Q4_0};
        if (c->what == PART_REPEATS) p.extra = add_repeated;
        temp_folder(folder, sizeof folder);
        write_parts(folder, &p, c);
        part_name(path, sizeof path, folder, c->open);
        kvf_status status = kvf_model_open(path, &config, &model, &errors[i]);
        cr_assert_null(model, "%s: was opened", c->title);
        cr_assert_eq(status, c->status, "%s: %s: %s", c->title, kvf_status_name(status), errors[i].text);
        cr_assert(strstr(errors[i].text, c->says), "%s: the text \"%s\" does not say \"%s\"", c->title, errors[i].text,
                  c->says);
        cr_assert_eq(m.n_live, 0, "%s: leaks", c->title);
        remove_parts(folder);
    }
    must_differ(errors, N);
}

static unsigned char *read_part(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f);
    unsigned char *data = malloc(1 << 20);
    *n = fread(data, 1, 1 << 20, f);
    cr_assert(fclose(f) == 0 && *n > 0 && *n < 1 << 20);
    return data;
}

/* Changes bytes in the index of one part: the model opens or is refused, nothing else. */
Test(gguf_kinds, parts_survive_random_mutations) {
    const uint64_t seed = 20240612;
    const struct tiny_model_params p = {.arch = "qwen2",
                                        .weight_type = GW_Q5_1,
                                        .rope_scaling = "llama3",
                                        .rope_factor = 8,
                                        .rope_original = 64,
                                        .sliding_window = 100};
    static const unsigned char values[] = {0, 1, 2, 6, 8, 12, 14, 30, 0x7f, 0x80, 0xff};
    char folder[300], path[512];
    uint64_t rng = seed;
    uint32_t n_opened = 0;
    temp_folder(folder, sizeof folder);
    write_parts(folder, &p, NULL);
    for (uint32_t i = 0; i < 900; i++) {
        size_t n;
        part_name(path, sizeof path, folder, i % N_PARTS);
        unsigned char *data = read_part(path, &n), *changed = malloc(n);
        memcpy(changed, data, n);
        for (uint64_t k = gw_random(&rng) % 3 + 1; k-- > 0;) {
            size_t at = gw_random(&rng) % (i % N_PARTS ? 700 : 2000);
            changed[at] = values[gw_random(&rng) % sizeof values];
        }
        cr_assert_eq(gw_write_bytes(path, changed, n), 0);
        char first[512];
        part_name(first, sizeof first, folder, 0);
        meter m = {0};
        kvf_model_config config = config_with(&m, i % 2);
        kvf_model *model = NULL;
        kvf_error err = {.text = ""};
        kvf_status status = kvf_model_open(first, &config, &model, &err);
        cr_assert_eq(model != NULL, status == KVF_OK);
        cr_assert(model || err.text[0]);
        n_opened += model != NULL;
        kvf_model_close(model);
        cr_assert_eq(m.n_live, 0, "seed %llu, mutation %u leaks", (unsigned long long)seed, i);
        cr_assert_eq(gw_write_bytes(path, data, n), 0);
        free(data);
        free(changed);
    }
    cr_assert(n_opened > 50 && n_opened < 850, "%u of 900 opened: the mutations miss what they are for", n_opened);
    remove_parts(folder);
}
