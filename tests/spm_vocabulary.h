/* tests/spm_vocabulary.h: SentencePiece vocabularies made for a test, as models that have a tokenizer alone. */
#ifndef KVF_TESTS_SPM_VOCABULARY_H
#define KVF_TESTS_SPM_VOCABULARY_H

#include <criterion/criterion.h>
#include <unistd.h>

#include "kvfold/model.h"
#include "tests/gguf_writer.h"
#include "tests/tokenize_rig.h"

enum { MAX_TOKENS = 1024, NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };
enum { UNK_ID = 0, BOS_ID = 1, EOS_ID = 2 };

/* ---- Vocabularies ------------------------------------------------------------------------------------------- */

typedef struct vocabulary {
    const char *texts[MAX_TOKENS];
    float scores[MAX_TOKENS];
    int types[MAX_TOKENS];
    size_t n;
    bool no_space;            /* add_space_prefix false; else the key is absent */
    const char *skip;         /* keys to leave out */
    const char *true_key;     /* a boolean key that is set */
    const char *charsmap;     /* NULL: absent */
    const char *chat;         /* template; NULL: absent */
    size_t n_scores, n_types; /* 0: n */
    uint32_t unknown_id;      /* 0: UNK_ID */
} vocabulary;

static inline void write_vocabulary(gw *w, void *ctx) {
    const vocabulary *v = ctx;
    w->skip = v->skip;
    gw_key_text(w, "tokenizer.ggml.model", "llama");
    gw_key_texts(w, "tokenizer.ggml.tokens", v->texts, v->n);
    size_t n_scores = v->n_scores ? v->n_scores : v->n, n_types = v->n_types ? v->n_types : v->n;
    if (gw_key_array(w, "tokenizer.ggml.scores", GW_FLOAT, n_scores)) gw_put(&w->keys, v->scores, n_scores * 4);
    if (gw_key_array(w, "tokenizer.ggml.token_type", GW_I32, n_types)) gw_put(&w->keys, v->types, n_types * 4);
    gw_key_u32(w, "tokenizer.ggml.unknown_token_id", v->unknown_id);
    gw_key_u32(w, "tokenizer.ggml.bos_token_id", BOS_ID);
    gw_key_u32(w, "tokenizer.ggml.eos_token_id", EOS_ID);
    if (v->no_space) gw_key_bool(w, "tokenizer.ggml.add_space_prefix", 0);
    if (v->chat) gw_key_text(w, "tokenizer.chat_template", v->chat);
    if (v->true_key) gw_key_bool(w, v->true_key, 1);
    if (v->charsmap) {
        gw_key_array(w, "tokenizer.ggml.precompiled_charsmap", GW_U8, strlen(v->charsmap));
        gw_put(&w->keys, v->charsmap, strlen(v->charsmap));
    }
    /* Without tensors there is no embedding whose rows would have to agree. */
    w->infos.n = w->data.n = 0;
    w->n_tensors = 0;
}

static inline kvf_status open_status(const vocabulary *v, const kvf_allocator *allocator, kvf_model **model,
                                     kvf_error *err) {
    struct tiny_model_params params = {
        .extra = write_vocabulary,
        .ctx = (void *)(uintptr_t)v,
        .skip = "tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type "
                "tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id "
                "tokenizer.ggml.add_bos_token llama.vocab_size tokenizer.chat_template"};
    kvf_model_config config = {.struct_size = sizeof config, .tokenizer_only = 1};
    char path[256];
    if (allocator) config.allocator = *allocator;
    gw_temp_path(path, sizeof path);
    cr_assert_eq(kvf_test_write_tiny_model(path, &params), 0);
    kvf_status status = kvf_model_open(path, &config, model, err);
    unlink(path);
    return status;
}

static inline kvf_model *open_vocabulary(const vocabulary *v) {
    kvf_model *model = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(open_status(v, NULL, &model, &err), KVF_OK, "%s", err.text);
    return model;
}

static char byte_texts[256][8];

/* <unk>, <s>, </s>, the 256 bytes, then the given tokens, normal, the first with the highest score. */
static inline void begin_vocabulary(vocabulary *v, const char *const *texts, size_t n) {
    static const char *const fixed[] = {"<unk>", "<s>", "</s>"};
    memset(v, 0, sizeof *v);
    for (int i = 0; i < 3; i++) v->texts[i] = fixed[i], v->types[i] = i ? CONTROL : UNKNOWN;
    for (int i = 0; i < 256; i++) {
        snprintf(byte_texts[i], sizeof byte_texts[i], "<0x%02X>", (unsigned)i);
        v->texts[3 + i] = byte_texts[i];
        v->types[3 + i] = BYTE;
    }
    v->n = 259;
    for (size_t i = 0; i < n; i++, v->n++) {
        v->texts[v->n] = texts[i];
        v->types[v->n] = NORMAL;
        v->scores[v->n] = -(float)i;
    }
}
#define BYTE_ID(b) (3u + (unsigned char)(b))

#define MUST_ENCODE(model, text, flags, ...) \
    must_encode(model, text, flags, (uint32_t[]){__VA_ARGS__}, sizeof(uint32_t[]){__VA_ARGS__} / sizeof(uint32_t))

static inline void must_decode(const kvf_model *model, const uint32_t *ids, size_t n_ids, int special,
                               const char *wanted) {
    char text[MAX_IDS];
    size_t n = kvf_tokenizer_decode(kvf_model_tokenizer(model), ids, n_ids, special, text, sizeof text);
    cr_assert(n == strlen(wanted) && !memcmp(text, wanted, n), "\"%.*s\", wanted \"%s\"", (int)n, text, wanted);
}

#endif
