/* Opening GGUF files: what is there is read, and whatever lies is refused by name, fast and without a large
 * allocation. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <math.h>
#include <time.h>
#include <unistd.h>

#include "tests/gguf_cases.h"
#include "tests/real_model.h"

/* ---- What is well formed ------------------------------------------------------------------------------ */

Test(gguf, reads_all_types_and_both_versions) {
    static const uint32_t types[] = {GW_F32, GW_F16, GW_Q8_0, GW_Q4_0, GW_Q4_1, GW_BF16, GW_Q5_0, GW_Q5_1};
    static const char *const weights[] = {"F32 x 20",           "F16 x 15, F32 x 5",  "Q8_0 x 15, F32 x 5",
                                          "Q4_0 x 15, F32 x 5", "Q4_1 x 15, F32 x 5", "BF16 x 15, F32 x 5",
                                          "Q5_0 x 15, F32 x 5", "Q5_1 x 15, F32 x 5"};
    for (size_t i = 0; i < 8; i++) {
        for (uint32_t version = 2; version <= 3; version++) {
            struct tiny_model_params p = {.weight_type = types[i], .version = version, .alignment = i == 2 ? 64 : 0};
            gw w = {0};
            size_t n;
            kvf_test_tiny_model(&w, &p);
            unsigned char *data = gw_bytes(&w, &n);
            meter m = {0};
            kvf_error err = {.text = ""};
            kvf_status status;
            kvf_model *model = open_bytes(data, n, 0, &m, &status, &err);
            cr_assert_not_null(model, "%s", err.text);
            const kvf_model_info *info = kvf_model_get_info(model);
            cr_assert_str_eq(info->weights, weights[i]);
            cr_assert_str_eq(info->architecture, "llama");
            cr_assert_str_eq(info->name, "tiny");
            cr_assert_str_eq(info->tokenizer, "gpt2");
            cr_assert_str_eq(info->pre_tokenizer, "smollm");
            cr_assert(info->gguf_version == version && info->n_layers == 2 && info->n_q_heads == 4 &&
                      info->n_kv_heads == 2);
            cr_assert(info->head_dim == 16 && info->n_embd == 64 && info->n_ff == 128 && info->n_vocab == TINY_N_VOCAB);
            cr_assert(info->n_context == 512 && info->tied_output == 1 && info->n_tensors == 20 &&
                      info->file_bytes == n && info->n_files == 1 && info->sliding_window == 0);
            cr_assert(fabsf(info->rope_base - 10000) < 1e-3f && fabsf(info->norm_epsilon - 1e-5f) < 1e-10f);
            cr_assert_eq(info->n_params, 300 * 64 + 64 + 2 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128));
            cr_assert(model->layers[1].ffn_down.n_rows == 64 && model->layers[1].ffn_down.n_cols == 128);
            cr_assert_str_eq(model->layers[1].attn_k.name, "blk.1.attn_k.weight");
            cr_assert_eq(model->output.data, model->token_embd.data);
            cr_assert_null(model->rope_freqs.data);
            kvf_model_close(model);
            cr_assert_eq(m.n_live, 0);
            free(data);
            gw_free(&w);
        }
    }
}

Test(gguf, reads_optional_parts) {
    struct tiny_model_params p = {
        .separate_output = 1, .rope_freqs = 1, .embd_type_p1 = GW_Q8_0 + 1, .weight_type = GW_Q4_0};
    gw w = {0};
    size_t n;
    meter m = {0};
    kvf_error err = {.text = ""};
    kvf_status status;
    kvf_test_tiny_model(&w, &p);
    unsigned char *data = gw_bytes(&w, &n);
    for (int tokenizer_only = 0; tokenizer_only < 2; tokenizer_only++) {
        kvf_model *model = open_bytes(data, n, tokenizer_only, &m, &status, &err);
        cr_assert_not_null(model, "%s", err.text);
        cr_assert_eq(model->info.tied_output, 0);
        cr_assert_eq(model->output.type, GW_Q4_0);
        cr_assert_eq(model->token_embd.type, GW_Q8_0);
        cr_assert_eq(model->rope_freqs.n_cols, 8);
        cr_assert_eq(model->weights == NULL, tokenizer_only);
        kvf_model_close(model);
    }
    kvf_model_close(NULL);
    free(data);
    gw_free(&w);
    /* Keys and no tensors: enough for a tokenizer alone. */
    gw vocabulary = {0};
    kvf_test_tiny_model(&vocabulary, &(struct tiny_model_params){0});
    vocabulary.infos.n = vocabulary.data.n = 0;
    vocabulary.n_tensors = 0;
    data = gw_bytes(&vocabulary, &n);
    kvf_model *model = open_bytes(data, n, 1, &m, &status, &err);
    cr_assert_not_null(model, "%s", err.text);
    kvf_model_close(model);
    must_refuse("no tensors", data, n, KVF_E_FORMAT, "tensor token_embd.weight: is missing", &err);
    free(data);
    gw_free(&vocabulary);
}

Test(gguf, refuses_paths) {
    kvf_error err;
    kvf_model *model = NULL;
    cr_assert_eq(kvf_model_open("no/such/file.gguf", NULL, &model, &err), KVF_E_IO);
    cr_assert(strstr(err.text, "no/such/file.gguf"));
    cr_assert_eq(kvf_model_open(".", NULL, &model, &err), KVF_E_IO);
    cr_assert(strstr(err.text, "not a regular file"));
    cr_assert_eq(kvf_model_open("/dev/null", NULL, &model, NULL), KVF_E_IO);
    cr_assert_eq(kvf_model_open(NULL, NULL, &model, &err), KVF_E_INVALID);
    cr_assert_null(model);
}

/* ---- Counts and lengths that lie ------------------------------------------------------------------------ */

/* A file of one key, and what `build` adds. */
static unsigned char *small_file(void (*build)(gw *w), size_t *n) {
    gw w = {.version = 3, .alignment = 32};
    build(&w);
    unsigned char *data = gw_bytes(&w, n);
    gw_free(&w);
    return data;
}

static void wrapping_product(gw *w) { gw_tensor_info(w, "t", 2, (uint64_t[]){1ull << 32, 1ull << 32}, GW_F32, 0); }
static void wrapping_bytes(gw *w) { gw_tensor_info(w, "t", 1, (uint64_t[]){1ull << 62}, GW_F32, 0); }
static void five_dims(gw *w) { gw_tensor_info(w, "t", 5, (uint64_t[]){1, 1, 1, 1, 1}, GW_F32, 0); }
static void zero_dims(gw *w) { gw_tensor_info(w, "t", 0, NULL, GW_F32, 0); }
static void huge_dims(gw *w) {
    gw_tensor_info(w, "t", 1, (uint64_t[]){1}, GW_F32, 0);
    memset(w->infos.data + 9, 0xff, 4);
}
static void wrapping_offset(gw *w) {
    gw_tensor_info(w, "t", 1, (uint64_t[]){16}, GW_F32, 0xffffffffffffffe0u);
    gw_put(&w->data, (unsigned char[64]){0}, 64);
}
static void wrapping_end(gw *w) {
    gw_tensor_info(w, "t", 1, (uint64_t[]){(1ull << 62) - 8}, GW_F32, 32);
    gw_put(&w->data, (unsigned char[64]){0}, 64);
}
static void many_tensors(gw *w) { w->n_tensors = 1ull << 60; }
static void many_keys(gw *w) { w->n_keys = 1ull << 63; }
static void long_key(gw *w) {
    gw_put64(&w->keys, 0xffffffffffffu);
    gw_put64(&w->keys, 0);
    w->n_keys = 1;
}
static void long_array(gw *w) { gw_key_array(w, "a", GW_U64, 1ull << 61); }
static void long_texts(gw *w) { gw_key_array(w, "a", GW_STRING, 1ull << 61); }
static void deep_array(gw *w) {
    gw_key(w, "a", GW_ARRAY);
    for (int i = 0; i < 10000; i++) {
        gw_put32(&w->keys, GW_ARRAY);
        gw_put64(&w->keys, 1);
    }
}
static void empty_key(gw *w) { gw_key_u32(w, "", 1); }
static void long_tensor_name(gw *w) {
    char name[80] = "";
    memset(name, 'n', 65);
    gw_tensor_info(w, name, 1, (uint64_t[]){1}, GW_F32, 0);
}
static void strange_value(gw *w) { gw_key(w, "a", 13); }
static void strange_array(gw *w) { gw_key_array(w, "a", 99, 0); }
static void strange_bool(gw *w) { gw_key_bool(w, "a", 2); }
static void strange_bools(gw *w) {
    gw_key_array(w, "b", GW_BOOL, 2);
    gw_put(&w->keys, (unsigned char[]){1, 7}, 2);
}
static void far_data(gw *w) {
    gw_key_u32(w, "general.alignment", 4096);
    gw_tensor_info(w, "t", 1, (uint64_t[]){1}, GW_F32, 0);
}

Test(gguf, f1_refuses_counts_and_lengths_that_lie) {
    static const struct {
        const char *title;
        void (*build)(gw *w);
        kvf_status status;
        const char *says;
    } cases[] = {
        {"product wraps", wrapping_product, KVF_E_FORMAT, "tensor t: the product of its dims"},
        {"bytes wrap", wrapping_bytes, KVF_E_FORMAT, "tensor t: 4611686018427387904 elements of F32"},
        {"5 dims", five_dims, KVF_E_FORMAT, "tensor t: 5 dims"},
        {"0 dims", zero_dims, KVF_E_FORMAT, "tensor t: 0 dims"},
        {"2^32 - 1 dims", huge_dims, KVF_E_FORMAT, "tensor t: 4294967295 dims"},
        {"offset + size wraps", wrapping_offset, KVF_E_FORMAT, "tensor t: 64 bytes at offset 18446744073709551584"},
        {"offset + size wraps to 0", wrapping_end, KVF_E_FORMAT, "tensor t: 18446744073709551584 bytes at offset 32"},
        {"2^60 tensors", many_tensors, KVF_E_FORMAT, "tensor count 1152921504606846976"},
        {"2^63 keys", many_keys, KVF_E_FORMAT, "key count 9223372036854775808"},
        {"key length", long_key, KVF_E_FORMAT, "the name of a key at offset 32 needs 281474976710655 bytes"},
        {"2^61 numbers", long_array, KVF_E_FORMAT, "key a: 2305843009213693952 x u64"},
        {"2^61 strings", long_texts, KVF_E_FORMAT, "key a: 2305843009213693952 x string"},
        {"nested arrays", deep_array, KVF_E_UNSUPPORTED, "key a: an array of arrays"},
        {"key without name", empty_key, KVF_E_FORMAT, "the name of a key at offset 32 is 0 bytes long"},
        {"long tensor name", long_tensor_name, KVF_E_FORMAT, "the name of a tensor at offset 32 is 65 bytes long"},
        {"type of value", strange_value, KVF_E_FORMAT, "key a: value of type 13"},
        {"type of array", strange_array, KVF_E_FORMAT, "key a: array of type 99"},
        {"boolean", strange_bool, KVF_E_FORMAT, "key a: boolean of value 2"},
        {"booleans", strange_bools, KVF_E_FORMAT, "key b: boolean of value 7"},
        {"data beyond the end", far_data, KVF_E_FORMAT, "the file ends before its tensor data begins"},
    };
    enum { N = sizeof cases / sizeof *cases };
    kvf_error errors[N];
    for (size_t i = 0; i < N; i++) {
        size_t n;
        unsigned char *data = small_file(cases[i].build, &n);
        must_refuse(cases[i].title, data, n, cases[i].status, cases[i].says, &errors[i]);
        free(data);
    }
    must_differ(errors, N);
}

Test(gguf, refuses_what_is_no_gguf) {
    static const struct {
        const char *says;
        kvf_status status;
        size_t at;
        unsigned char byte;
    } cases[] = {{"not a GGUF file", KVF_E_FORMAT, 0, 'g'},
                 {"GGUF version 1: must be 2 or 3", KVF_E_UNSUPPORTED, 4, 1},
                 {"GGUF version 4", KVF_E_UNSUPPORTED, 4, 4},
                 {"big-endian", KVF_E_UNSUPPORTED, 7, 3}};
    kvf_error errors[4];
    for (size_t i = 0; i < 4; i++) {
        unsigned char header[24] = "GGUF\3";
        header[cases[i].at] = cases[i].byte;
        if (cases[i].at == 7) header[4] = 0;
        must_refuse("header", header, sizeof header, cases[i].status, cases[i].says, &errors[i]);
    }
    must_differ(errors, 4);
    must_refuse("short", "GGUF\3", 5, KVF_E_FORMAT, "5 bytes", &errors[0]);
    must_refuse("empty", "", 0, KVF_E_FORMAT, "0 bytes", &errors[0]);
}

Test(gguf, refuses_every_truncation) {
    gw w = {0};
    size_t n, step;
    kvf_test_tiny_model(&w, &(struct tiny_model_params){.weight_type = GW_Q4_0});
    unsigned char *data = gw_bytes(&w, &n);
    size_t data_begin = n - w.data.n;
    char path[256];
    gw_temp_path(path, sizeof path);
    cr_assert_eq(gw_write_bytes(path, data, n), 0);
    for (size_t length = n; length-- > 0; length -= step - 1) {
        meter m = {0};
        kvf_model_config config = config_with(&m, 0);
        kvf_model *model = NULL;
        kvf_error err = {.text = ""};
        cr_assert_eq(truncate(path, (off_t)length), 0);
        cr_assert_eq(kvf_model_open(path, &config, &model, &err), KVF_E_FORMAT, "cut to %zu of %zu: %s", length, n,
                     err.text);
        cr_assert_eq(m.n_live, 0);
        step = length > data_begin ? 97 : length > 2048 ? 7 : 1;
        if (length < step) break;
    }
    unlink(path);
    free(data);
    gw_free(&w);
}

/* ---- Values and types that lie --------------------------------------------------------------------------- */

Test(gguf, f2_refuses_values_and_types_that_lie) {
    enum { NAN_BITS = 0x7fc00000, INFINITY_BITS = 0x7f800000, MINUS_ONE_BITS = (int)0xbf800000 };
    static const fault faults[] = {
        KEY("alignment 0", "general.alignment", SCALAR, GW_U32, 0, KVF_E_FORMAT, "key general.alignment: 0:"),
        KEY("alignment 3", "general.alignment", SCALAR, GW_U32, 3, KVF_E_FORMAT, "key general.alignment: 3:"),
        KEY("alignment 48", "general.alignment", SCALAR, GW_U32, 48, KVF_E_FORMAT, "key general.alignment: 48:"),
        KEY("alignment 2^31", "general.alignment", SCALAR, GW_U32, 1u << 31, KVF_E_FORMAT,
            "key general.alignment: 2147483648:"),
        KEY("alignment i32", "general.alignment", SCALAR, GW_I32, 32, KVF_E_FORMAT, "key general.alignment: type i32"),
        KEY("no architecture", "general.architecture", NOTHING, 0, 0, KVF_E_FORMAT,
            "key general.architecture: is missing"),
        KEY("architecture u32", "general.architecture", SCALAR, GW_U32, 1, KVF_E_FORMAT,
            "key general.architecture: type u32"),
        TEXT_KEY("architecture mamba", "general.architecture", "mamba", KVF_E_UNSUPPORTED,
                 "\"mamba\": must be one of: llama, mistral, qwen2"),
        KEY("head_count 0", ATTENTION "head_count", SCALAR, GW_U32, 0, KVF_E_FORMAT, "head_count: 0:"),
        KEY("head_count -1", ATTENTION "head_count", SCALAR, GW_I32, 0xffffffff, KVF_E_FORMAT,
            "head_count: is negative"),
        KEY("head_count 2^32", ATTENTION "head_count", SCALAR, GW_U64, 1ull << 32, KVF_E_FORMAT,
            "head_count: 4294967296:"),
        KEY("head_count missing", ATTENTION "head_count", NOTHING, 0, 0, KVF_E_FORMAT, "head_count: is missing"),
        KEY("head_count_kv 0", ATTENTION "head_count_kv", SCALAR, GW_U32, 0, KVF_E_FORMAT, "head_count_kv: 0:"),
        KEY("head_count_kv 3", ATTENTION "head_count_kv", SCALAR, GW_U32, 3, KVF_E_FORMAT,
            "head_count_kv: 3: must divide the 4"),
        KEY("head_count_kv array", ATTENTION "head_count_kv", ARRAY, GW_U32, 2, KVF_E_FORMAT,
            "head_count_kv: type array of u32"),
        KEY("block_count 0", LLAMA "block_count", SCALAR, GW_U32, 0, KVF_E_FORMAT, "block_count: 0:"),
        KEY("block_count 1,000,000", LLAMA "block_count", SCALAR, GW_U32, 1000000, KVF_E_FORMAT,
            "block_count: 1000000:"),
        KEY("block_count f32", LLAMA "block_count", SCALAR, GW_FLOAT, 0x40000000, KVF_E_FORMAT,
            "block_count: type f32"),
        KEY("block_count 3", LLAMA "block_count", SCALAR, GW_U32, 3, KVF_E_FORMAT,
            "tensor blk.2.attn_norm.weight: is missing"),
        KEY("block_count 1", LLAMA "block_count", SCALAR, GW_U32, 1, KVF_E_UNSUPPORTED,
            "tensor blk.1.attn_norm.weight: architecture llama"),
        KEY("embedding_length 66", LLAMA "embedding_length", SCALAR, GW_U32, 66, KVF_E_FORMAT,
            "embedding_length: 66: must be a multiple"),
        KEY("head of 12", LLAMA "embedding_length", SCALAR, GW_U32, 48, KVF_E_UNSUPPORTED,
            "embedding_length: 48 over 4 heads"),
        KEY("head of 512", LLAMA "embedding_length", SCALAR, GW_U32, 2048, KVF_E_UNSUPPORTED,
            "embedding_length: 2048 over 4 heads"),
        KEY("feed_forward 0", LLAMA "feed_forward_length", SCALAR, GW_U32, 0, KVF_E_FORMAT, "feed_forward_length: 0:"),
        KEY("context 0", LLAMA "context_length", SCALAR, GW_U32, 0, KVF_E_FORMAT, "context_length: 0:"),
        KEY("key_length 32", ATTENTION "key_length", SCALAR, GW_U32, 32, KVF_E_UNSUPPORTED,
            "key_length: 32: the heads of K and V"),
        KEY("key_length 0", ATTENTION "key_length", SCALAR, GW_U32, 0, KVF_E_FORMAT, "key_length: 0:"),
        KEY("value_length 12", ATTENTION "value_length", SCALAR, GW_U32, 12, KVF_E_UNSUPPORTED,
            "value_length: 12: must be a multiple of 8"),
        KEY("value_length 512", ATTENTION "value_length", SCALAR, GW_U32, 512, KVF_E_UNSUPPORTED, "value_length: 512:"),
        KEY("scores u8", TOKENIZER "scores", ARRAY, GW_U8, TINY_N_VOCAB, KVF_E_FORMAT, "scores: type array of u8"),
        KEY("scores short", TOKENIZER "scores", ARRAY, GW_FLOAT, TINY_N_VOCAB - 1, KVF_E_FORMAT,
            "scores: 299 elements"),
        KEY("types short", TOKENIZER "token_type", ARRAY, GW_I32, TINY_N_VOCAB - 2, KVF_E_FORMAT,
            "token_type: 298 elements"),
        KEY("types 0", TOKENIZER "token_type", ARRAY, GW_I32, TINY_N_VOCAB, KVF_E_FORMAT, "token 0 has type 0"),
        KEY("merges missing", TOKENIZER "merges", NOTHING, 0, 0, KVF_E_FORMAT, "merges: is missing"),
        KEY("merges u32", TOKENIZER "merges", ARRAY, GW_U32, 3, KVF_E_FORMAT, "merges: type array of u32"),
        KEY("tokens missing", TOKENIZER "tokens", NOTHING, 0, 0, KVF_E_FORMAT, "tokens: is missing"),
        KEY("no tokens", TOKENIZER "tokens", ARRAY, GW_STRING, 0, KVF_E_FORMAT, "tokens: 0 tokens"),
        KEY("bos 300", TOKENIZER "bos_token_id", SCALAR, GW_U32, 300, KVF_E_FORMAT, "bos_token_id: 300:"),
        KEY("eos 2^32 - 1", TOKENIZER "eos_token_id", SCALAR, GW_U32, 0xffffffff, KVF_E_FORMAT,
            "eos_token_id: 4294967295:"),
        KEY("padding 301", TOKENIZER "padding_token_id", SCALAR, GW_U32, 301, KVF_E_FORMAT, "padding_token_id: 301:"),
        KEY("add_bos u8", TOKENIZER "add_bos_token", SCALAR, GW_U8, 1, KVF_E_FORMAT, "add_bos_token: type u8"),
        TEXT_KEY("tokenizer bert", TOKENIZER "model", "bert", KVF_E_UNSUPPORTED, "tokenizer.ggml.model: \"bert\""),
        TEXT_KEY("pre unknown", TOKENIZER "pre", "tekken", KVF_E_UNSUPPORTED,
                 "pre-tokenizer \"tekken\": must be one of smollm, gpt-2, default, llama-bpe, qwen2"),
        KEY("vocab_size 299", LLAMA "vocab_size", SCALAR, GW_U32, 299, KVF_E_FORMAT,
            "vocab_size: 299: must be the 300 tokens"),
        KEY("epsilon NaN", ATTENTION "layer_norm_rms_epsilon", SCALAR, GW_FLOAT, NAN_BITS, KVF_E_FORMAT,
            "layer_norm_rms_epsilon: nan"),
        KEY("epsilon double", ATTENTION "layer_norm_rms_epsilon", SCALAR, GW_DOUBLE, 0, KVF_E_FORMAT,
            "rms_epsilon: type f64"),
        KEY("epsilon missing", ATTENTION "layer_norm_rms_epsilon", NOTHING, 0, 0, KVF_E_FORMAT,
            "rms_epsilon: is missing"),
        KEY("base inf", LLAMA "rope.freq_base", SCALAR, GW_FLOAT, INFINITY_BITS, KVF_E_FORMAT, "rope.freq_base: inf"),
        KEY("base -1", LLAMA "rope.freq_base", SCALAR, GW_FLOAT, (uint32_t)MINUS_ONE_BITS, KVF_E_FORMAT,
            "rope.freq_base: -1"),
        KEY("rotation 18", LLAMA "rope.dimension_count", SCALAR, GW_U32, 18, KVF_E_FORMAT, "rope.dimension_count: 18:"),
        KEY("rotation 15", LLAMA "rope.dimension_count", SCALAR, GW_U32, 15, KVF_E_FORMAT,
            "rope.dimension_count: 15: must be even"),
        TEXT_KEY("scaling yarn", LLAMA "rope.scaling.type", "yarn", KVF_E_UNSUPPORTED,
                 "rope.scaling.type: yarn: must be one of none, linear, llama3"),
        KEY("scaling u32", LLAMA "rope.scaling.type", SCALAR, GW_U32, 1, KVF_E_FORMAT, "rope.scaling.type: type u32"),
        KEY("scaling 0", LLAMA "rope.scaling.factor", SCALAR, GW_FLOAT, 0, KVF_E_FORMAT, "rope.scaling.factor: 0:"),
        KEY("scaling inf", LLAMA "rope.scaling.factor", SCALAR, GW_FLOAT, INFINITY_BITS, KVF_E_FORMAT,
            "rope.scaling.factor: inf:"),
        KEY("scaling u32", LLAMA "rope.scaling.factor", SCALAR, GW_U32, 4, KVF_E_FORMAT,
            "rope.scaling.factor: type u32"),
        KEY("linear NaN", LLAMA "rope.scale_linear", SCALAR, GW_FLOAT, NAN_BITS, KVF_E_FORMAT,
            "rope.scale_linear: nan:"),
        KEY("attn_factor 2", LLAMA "rope.scaling.attn_factor", SCALAR, GW_FLOAT, 0x40000000, KVF_E_UNSUPPORTED,
            "rope.scaling.attn_factor: 2:"),
        TEXT_KEY("linear alone", LLAMA "rope.scaling.type", "linear", KVF_E_FORMAT, "rope.scaling.factor: is missing"),
        KEY("experts", LLAMA "expert_count", SCALAR, GW_U32, 8, KVF_E_UNSUPPORTED, "expert_count: 8:"),
        KEY("window f32", ATTENTION "sliding_window", SCALAR, GW_FLOAT, 0, KVF_E_FORMAT, "sliding_window: type f32"),
        KEY("windows", ATTENTION "sliding_window", ARRAY, GW_U32, 2, KVF_E_FORMAT, "sliding_window: type array of u32"),
        KEY("pattern f32", ATTENTION "sliding_window_pattern", SCALAR, GW_FLOAT, 0, KVF_E_FORMAT,
            "sliding_window_pattern: type f32"),
        KEY("pattern of f32", ATTENTION "sliding_window_pattern", ARRAY, GW_FLOAT, 2, KVF_E_FORMAT,
            "sliding_window_pattern: type array of f32: must be a number or an array of bool"),
        KEY("pattern of 3 layers", ATTENTION "sliding_window_pattern", ARRAY, GW_BOOL, 3, KVF_E_FORMAT,
            "sliding_window_pattern: 3 elements: must be the 2 layers"),
        KEY("pattern without window", ATTENTION "sliding_window_pattern", SCALAR, GW_U32, 2, KVF_E_FORMAT,
            "sliding_window_pattern: 1 layers slide, but attention.sliding_window is missing or 0"),
        KEY("split 0", "split.count", SCALAR, GW_U16, 0, KVF_E_FORMAT, "split.count: 0:"),
        KEY("split 65536", "split.count", SCALAR, GW_U32, 65536, KVF_E_FORMAT, "split.count: 65536:"),
        KEY("split u8 array", "split.count", ARRAY, GW_U8, 2, KVF_E_FORMAT, "split.count: type array of u8"),
        KEY("split without number", "split.count", SCALAR, GW_U16, 3, KVF_E_FORMAT, "split.no: is missing"),
        KEY("old quantisation", "general.quantization_version", SCALAR, GW_U32, 1, KVF_E_UNSUPPORTED,
            "quantization_version: 1:"),
        {"a key twice", NULL, TEXT, "general.name", "again", 0, 0, 0, KVF_E_FORMAT, "key general.name: is there twice"},
    };
    check_faults(&(struct tiny_model_params){0}, faults, sizeof faults / sizeof *faults);
}

/* Layers that slide must be like the others but for the window. */
Test(gguf, refuses_sliding_layers_that_are_other_layers) {
    static const fault faults[] = {
        KEY("base", LLAMA "rope.freq_base_swa", SCALAR, GW_FLOAT, 0x41200000, KVF_E_UNSUPPORTED,
            "rope.freq_base_swa: 10: layers that slide must have the base of the others"),
        KEY("base 0", LLAMA "rope.freq_base_swa", SCALAR, GW_FLOAT, 0, KVF_E_FORMAT, "rope.freq_base_swa: 0:"),
        KEY("keys", ATTENTION "key_length_swa", SCALAR, GW_U32, 32, KVF_E_UNSUPPORTED,
            "key_length_swa: 32: layers that slide must have heads as long"),
        KEY("values", ATTENTION "value_length_swa", SCALAR, GW_U32, 8, KVF_E_UNSUPPORTED,
            "value_length_swa: 8: layers that slide must have heads as long"),
    };
    check_faults(&(struct tiny_model_params){.sliding_window = 100}, faults, sizeof faults / sizeof *faults);
    check_faults(&(struct tiny_model_params){.sliding_window = 100, .sliding_period = 2}, faults,
                 sizeof faults / sizeof *faults);
}

Test(gguf, refuses_tensors_that_do_not_fit) {
    static const char embd[] = "token_embd.weight", norm[] = "output_norm.weight", k[] = "blk.1.attn_k.weight",
                      freqs[] = "rope_freqs.weight";
    static const fault faults[] = {
        INFO_CASE("a dim of 0", "t", GW_F32, 0, 0, KVF_E_FORMAT, "tensor t: dim 0 is 0"),
        {"Q3_K", k, INFO, k, NULL, 11, 256, 0, KVF_E_UNSUPPORTED, "tensor blk.1.attn_k.weight: type 11 (Q3_K)"},
        INFO_CASE("part of a Q5_0", "t", GW_Q5_0, 0, 48, KVF_E_FORMAT, "multiple of 32 for Q5_0"),
        INFO_CASE("part of a Q4_K", "t", GW_Q4_K, 0, 128, KVF_E_FORMAT, "multiple of 256 for Q4_K"),
        INFO_CASE("part of a Q6_K", "t", GW_Q6_K, 0, 384, KVF_E_FORMAT, "multiple of 256 for Q6_K"),
        INFO_CASE("Q5_K beyond the file", "t", GW_Q5_K, 0, 1 << 24, KVF_E_FORMAT, "tensor t: 11534336 bytes"),
        INFO_CASE("bytes of Q6_K wrap", "t", GW_Q6_K, 0, 0xffffffffffffff00u, KVF_E_FORMAT, "tensor t: 151"),
        {"type 99", k, INFO, k, NULL, 99, 32, 0, KVF_E_UNSUPPORTED, "tensor blk.1.attn_k.weight: type 99 (unknown)"},
        INFO_CASE("part of a block", "t", GW_Q8_0, 0, 40, KVF_E_FORMAT, "tensor t: rows of 40 elements"),
        INFO_CASE("unaligned", "t", GW_F32, 33, 1, KVF_E_FORMAT, "tensor t: offset 33"),
        INFO_CASE("beyond the file", "t", GW_F32, 1 << 20, 1, KVF_E_FORMAT, "tensor t: 4 bytes at offset 1048576"),
        INFO_CASE("larger than the file", "t", GW_F32, 0, 1 << 20, KVF_E_FORMAT, "tensor t: 4194304 bytes at offset 0"),
        INFO_CASE("overlap", "t", GW_F32, 64, 8, KVF_E_FORMAT, "tensors token_embd.weight and t: their data overlap"),
        TENSOR_CASE("a name twice", NULL, norm, GW_F32, 0, 64, KVF_E_FORMAT,
                    "tensor output_norm.weight: is there twice"),
        TENSOR_CASE("30 rows for 32 tokens", embd, embd, GW_F32, 298, 64, KVF_E_FORMAT,
                    "token_embd.weight: dims [64, 298, 1, 1]: must be [64, 300]"),
        TENSOR_CASE("K with all heads", k, k, GW_F32, 64, 64, KVF_E_FORMAT,
                    "blk.1.attn_k.weight: dims [64, 64, 1, 1]: must be [64, 32]"),
        TENSOR_CASE("F16 norm", norm, norm, GW_F16, 0, 64, KVF_E_UNSUPPORTED, "output_norm.weight: type F16"),
        TENSOR_CASE("rope_freqs of 0", NULL, freqs, GW_F32, 0, 8, KVF_E_FORMAT, "rope_freqs.weight: element 0 is 0"),
        TENSOR_CASE("rope_freqs of 16", NULL, freqs, GW_F32, 0, 16, KVF_E_FORMAT,
                    "rope_freqs.weight: dims [16, 1, 1, 1]"),
        {"no embedding", embd, NOTHING, embd, NULL, 0, 0, 0, KVF_E_FORMAT, "tensor token_embd.weight: is missing"},
        {"no K", k, NOTHING, k, NULL, 0, 0, 0, KVF_E_FORMAT, "tensor blk.1.attn_k.weight: is missing"},
    };
    check_faults(&(struct tiny_model_params){0}, faults, sizeof faults / sizeof *faults);
}

/* Many keys whose names fill the file are as good as a lying count: sorting them must not take long. */
Test(gguf, sorts_many_keys_fast) {
    gw w = {.version = 3, .alignment = 32};
    size_t n;
    kvf_error err;
    for (uint32_t i = 0; i < 20000; i++) {
        char name[16];
        snprintf(name, sizeof name, "k%05u", i * 7919 % 20000);
        gw_key_u32(&w, name, i);
    }
    unsigned char *data = gw_bytes(&w, &n);
    meter m = {0};
    kvf_status status;
    clock_t begin = clock();
    cr_assert_null(open_bytes(data, n, 0, &m, &status, &err));
    cr_assert_lt((double)(clock() - begin) / CLOCKS_PER_SEC, 1.0);
    cr_assert(strstr(err.text, "general.architecture: is missing"), "%s", err.text);
    free(data);
    gw_free(&w);
}

/* ---- Failure ---------------------------------------------------------------------------------------------- */

Test(gguf, survives_every_failed_allocation) {
    char path[256];
    kvf_model *model = NULL;
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, &(struct tiny_model_params){.weight_type = GW_Q4_1}), 0);
    for (int tokenizer_only = 0; tokenizer_only < 2; tokenizer_only++) {
        meter all = {0};
        kvf_model_config config = config_with(&all, tokenizer_only);
        cr_assert_eq(kvf_model_open(path, &config, &model, NULL), KVF_OK);
        kvf_model_close(model);
        cr_assert_gt(all.n_calls, 10);
        for (size_t i = 1; i <= all.n_calls; i++) {
            meter m = {.fail_at = i};
            kvf_error err = {.text = ""};
            model = NULL;
            config = config_with(&m, tokenizer_only);
            cr_assert_eq(kvf_model_open(path, &config, &model, &err), KVF_E_NO_MEMORY, "allocation %zu: %s", i,
                         err.text);
            cr_assert_null(model);
            cr_assert_neq(err.text[0], 0);
            cr_assert_eq(m.n_live, 0, "allocation %zu leaks", i);
        }
    }
    unlink(path);
}

/* Changes bytes of a good file, most of them in the index: it opens or is refused, nothing else. */
Test(gguf, survives_random_mutations) {
    const uint64_t seed = 20240607;
    uint64_t rng = seed;
    uint32_t n_opened = 0;
    gw w = {0};
    size_t n;
    kvf_test_tiny_model(&w, &(struct tiny_model_params){.weight_type = GW_Q8_0, .rope_freqs = 1});
    unsigned char *data = gw_bytes(&w, &n), *changed = malloc(n);
    size_t data_begin = n - w.data.n;
    for (uint32_t i = 0; i < 2000; i++) {
        memcpy(changed, data, n);
        for (uint64_t k = gw_random(&rng) % 4 + 1; k-- > 0;) {
            size_t at = gw_random(&rng) % (gw_random(&rng) % 8 ? data_begin : n);
            static const unsigned char values[] = {0, 1, 8, 9, 0x7f, 0x80, 0xff};
            uint64_t r = gw_random(&rng);
            changed[at] = r % 3   ? values[r / 3 % sizeof values]
                          : r % 2 ? changed[at] ^ (1u << (r >> 8) % 8)
                                  : (unsigned char)(r >> 16);
        }
        meter m = {0};
        kvf_error err = {.text = ""};
        kvf_status status;
        kvf_model *model = open_bytes(changed, n, i % 2, &m, &status, &err);
        cr_assert_eq(model != NULL, status == KVF_OK);
        if (model) {
            uint32_t ids[64];
            size_t n_ids;
            n_opened++;
            cr_assert_eq(kvf_tokenizer_encode(kvf_model_tokenizer(model), "the <tool> sea 42", 17, KVF_ENCODE_SPECIAL,
                                              ids, 64, &n_ids, &err),
                         KVF_OK);
            kvf_model_close(model);
        } else {
            cr_assert_neq(err.text[0], 0);
        }
        cr_assert_eq(m.n_live, 0, "seed %llu, mutation %u leaks", (unsigned long long)seed, i);
    }
    cr_assert(n_opened > 100 && n_opened < 1900, "%u of 2000 opened: the mutations miss what they are for", n_opened);
    free(changed);
    free(data);
    gw_free(&w);
}

Test(gguf, reads_the_real_model) {
    const char *path = kvf_test_real_model();
    if (!path) cr_skip("the real model is not here");
    kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = 1};
    kvf_model *model;
    kvf_error err;
    cr_assert_eq(kvf_model_open(path, &config, &model, &err), KVF_OK, "%s", err.text);
    const kvf_model_info *info = kvf_model_get_info(model);
    cr_assert_str_eq(info->weights, "Q4_1 x 210, F32 x 61, Q8_0 x 1");
    cr_assert(info->n_layers == 30 && info->n_q_heads == 9 && info->n_kv_heads == 3 && info->head_dim == 64);
    cr_assert(info->n_context == 8192 && info->n_vocab == 49152 && info->tied_output == 1 &&
              info->n_params == 134515008);
    kvf_model_close(model);
}
