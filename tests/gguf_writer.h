/* tests/gguf_writer.h: writes GGUF files for tests: keys and tensors one by one (gw_*), or a whole tiny random Llama
 * (kvf_test_write_tiny_model). Header only; out of memory aborts the test.
 *
 *     #define _DEFAULT_SOURCE (before any #include)
 *     char path[256];
 *     struct tiny_model_params p = {.weight_type = GW_Q8_0};
 *     gw_temp_path(path, sizeof path); kvf_test_write_tiny_model(path, &p); ... unlink(path);
 */
#ifndef KVF_TESTS_GGUF_WRITER_H
#define KVF_TESTS_GGUF_WRITER_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "kvfold/base.h"
#include "tests/gguf_quants.h"

enum {
    GW_U8 = 0,
    GW_I8,
    GW_U16,
    GW_I16,
    GW_U32,
    GW_I32,
    GW_FLOAT,
    GW_BOOL,
    GW_STRING,
    GW_ARRAY,
    GW_U64,
    GW_I64,
    GW_DOUBLE
};

typedef struct gw_buffer {
    unsigned char *data;
    size_t n, capacity;
} gw_buffer;

#ifdef P_tmpdir /* needs _DEFAULT_SOURCE */
#include <unistd.h>
/* Makes an empty file of a new name. */
static inline void gw_temp_path(char *path, size_t capacity) {
    const char *folder = getenv("TMPDIR");
    snprintf(path, capacity, "%s/kvfold_test_XXXXXX", folder && *folder ? folder : P_tmpdir);
    int fd = mkstemp(path);
    if (fd < 0) abort();
    close(fd);
}
#endif

/* Begin with {.version = 3, .alignment = 32}; end with gw_free. */
typedef struct gw {
    gw_buffer keys, infos, data;
    uint64_t n_keys, n_tensors;
    uint32_t version, alignment; /* alignment is only written as a key by whoever wants it there */
    struct gw *others;           /* tensors go to this file and these by turns: the parts of a split one; or NULL */
    uint32_t n_others, next_file;
    const char *skip; /* keys and tensors of these names (spaces between) are left out: a test puts its own in */
} gw;

static inline int gw_skips(const gw *w, const char *name) {
    size_t n = strlen(name);
    for (const char *at = w->skip; at && (at = strstr(at, name)); at += n)
        if ((at == w->skip || at[-1] == ' ') && (!at[n] || at[n] == ' ')) return 1;
    return 0;
}

static inline void gw_put(gw_buffer *b, const void *p, size_t n) {
    if (b->capacity - b->n < n) {
        b->capacity = (b->capacity + n) * 2;
        b->data = realloc(b->data, b->capacity);
        if (!b->data) abort();
    }
    if (n) memcpy(b->data + b->n, p, n);
    b->n += n;
}
static inline void gw_put32(gw_buffer *b, uint32_t v) { gw_put(b, &v, sizeof v); }
static inline void gw_put64(gw_buffer *b, uint64_t v) { gw_put(b, &v, sizeof v); }
static inline void gw_put_text(gw_buffer *b, const char *s, size_t n) {
    gw_put64(b, n);
    gw_put(b, s, n);
}

/* Name and type of a key; the caller puts the value. 0: the key is to be skipped. */
static inline int gw_key(gw *w, const char *name, uint32_t type) {
    if (gw_skips(w, name)) return 0;
    gw_put_text(&w->keys, name, strlen(name));
    gw_put32(&w->keys, type);
    w->n_keys++;
    return 1;
}
static inline void gw_key_u32(gw *w, const char *name, uint32_t v) {
    if (gw_key(w, name, GW_U32)) gw_put32(&w->keys, v);
}
static inline void gw_key_f32(gw *w, const char *name, float v) {
    if (gw_key(w, name, GW_FLOAT)) gw_put(&w->keys, &v, sizeof v);
}
static inline void gw_key_bool(gw *w, const char *name, uint8_t v) {
    if (gw_key(w, name, GW_BOOL)) gw_put(&w->keys, &v, sizeof v);
}
static inline void gw_key_text(gw *w, const char *name, const char *s) {
    if (gw_key(w, name, GW_STRING)) gw_put_text(&w->keys, s, strlen(s));
}
static inline int gw_key_array(gw *w, const char *name, uint32_t element_type, uint64_t n) {
    if (!gw_key(w, name, GW_ARRAY)) return 0;
    gw_put32(&w->keys, element_type);
    gw_put64(&w->keys, n);
    return 1;
}
static inline void gw_key_texts(gw *w, const char *name, const char *const *texts, size_t n) {
    if (!gw_key_array(w, name, GW_STRING, n)) return;
    for (size_t i = 0; i < n; i++) gw_put_text(&w->keys, texts[i], strlen(texts[i]));
}

/* The entry of a tensor in the index, as given: for files that lie. */
static inline void gw_tensor_info(gw *w, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type,
                                  uint64_t offset) {
    gw_put_text(&w->infos, name, strlen(name));
    gw_put32(&w->infos, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) gw_put64(&w->infos, dims[i]);
    gw_put32(&w->infos, type);
    gw_put64(&w->infos, offset);
    w->n_tensors++;
}

/* A tensor of n_rows rows (0: a vector) of n_cols floats, converted. */
static inline void gw_tensor(gw *w, const char *name, uint32_t type, uint64_t n_rows, uint64_t n_cols, const float *x) {
    if (gw_skips(w, name)) return;
    uint32_t file = w->n_others ? w->next_file++ % (w->n_others + 1) : 0;
    if (file) w = &w->others[file - 1];
    size_t elements, bytes, n = n_cols * (n_rows ? n_rows : 1);
    gw_geometry(type, &elements, &bytes);
    while (w->data.n % w->alignment) gw_put(&w->data, "", 1);
    uint64_t dims[2] = {n_cols, n_rows};
    gw_tensor_info(w, name, n_rows ? 2 : 1, dims, type, w->data.n);
    unsigned char *out = malloc(n / elements * bytes + 1);
    if (!out) abort();
    gw_quantize(type, x, n, out);
    gw_put(&w->data, out, n / elements * bytes);
    free(out);
}

/* The whole file as bytes (the caller frees). */
static inline unsigned char *gw_bytes(const gw *w, size_t *n) {
    gw_buffer b = {0};
    gw_put(&b, "GGUF", 4);
    gw_put32(&b, w->version);
    gw_put64(&b, w->n_tensors);
    gw_put64(&b, w->n_keys);
    gw_put(&b, w->keys.data, w->keys.n);
    gw_put(&b, w->infos.data, w->infos.n);
    while (w->alignment && b.n % w->alignment) gw_put(&b, "", 1);
    gw_put(&b, w->data.data, w->data.n);
    *n = b.n;
    return b.data;
}

static inline int gw_write_bytes(const char *path, const void *data, size_t n) {
    FILE *f = fopen(path, "wb");
    if (!f) return -1;
    size_t written = fwrite(data, 1, n, f);
    return fclose(f) == 0 && written == n ? 0 : -1;
}

static inline int gw_write(const gw *w, const char *path) {
    size_t n;
    unsigned char *data = gw_bytes(w, &n);
    int rc = gw_write_bytes(path, data, n);
    free(data);
    return rc;
}

static inline void gw_free(gw *w) {
    free(w->keys.data);
    free(w->infos.data);
    free(w->data.data);
    memset(w, 0, sizeof *w);
}

/* ---- A tiny random Llama ---------------------------------------------------------------------------- */

/* Vocabulary of the tiny model, TINY_N_VOCAB tokens: the control tokens and a user-defined one below, then the 256
 * bytes (byte b is TINY_BYTE_0 + b), then one token for each of the merges. bos and eos are as SmolLM2 has them. */
enum {
    TINY_ENDOFTEXT = 0,
    TINY_IM_START = 1,
    TINY_IM_END = 2,
    TINY_USER_DEFINED = 3,
    TINY_BYTE_0 = 4,
    TINY_N_VOCAB = 300
};
#define TINY_USER_DEFINED_TEXT "<tool>"

/* All zero: a "llama" of F32, 2 layers, 4 query and 2 KV heads of 16, n_ff 128, context 512, tied, pre-tokenizer
 * "smollm". */
struct tiny_model_params {
    const char *arch; /* NULL: "llama"; "qwen2" has biases */
    uint32_t n_layers, n_q_heads, n_kv_heads, head_dim, n_ff, n_context;
    uint32_t n_embd;          /* 0: n_q_heads * head_dim; else the length of heads is a key */
    uint32_t weight_type;     /* GW_*; of all matrices */
    uint32_t wide_type_p1;    /* GW_* + 1 of attn_v, ffn_down and the output head; 0: as weight_type */
    uint32_t embd_type_p1;    /* GW_* + 1 of the embedding; 0: as weight_type */
    int separate_output;      /* 1: its own output head */
    int rope_freqs;           /* 1: with rope_freqs.weight */
    float rope_base;          /* 0: 10000 */
    const char *rope_scaling; /* rope.scaling.type */
    float rope_factor;        /* rope.scaling.factor */
    float rope_linear;        /* rope.scale_linear */
    uint32_t rope_original;   /* rope.scaling.original_context_length */
    uint32_t sliding_window;
    uint32_t sliding_period; /* attention.sliding_window_pattern as a number; 0: no such key */
    uint32_t sliding_layers; /* the key as an array, a bit a layer that slides; 0: none */
    int halves; /* 1: rows of Q and K in the other order, biases 0: of a "qwen2", what a "llama" of the same seed is */
    uint64_t seed;
    uint32_t version;          /* 0: 3 */
    uint32_t alignment;        /* 0: 32 and no key */
    const char *pre;           /* tokenizer.ggml.pre */
    const char *chat_template; /* NULL: chatml; "": none */
    int add_bos;
    const char *skip;                /* keys and tensors to leave out, spaces between */
    void (*extra)(gw *w, void *ctx); /* adds keys and tensors, called with skip cleared */
    void *ctx;
};

static inline uint64_t gw_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* About normal, standard deviation 1. */
static inline float gw_normal(uint64_t *state) {
    float s = 0;
    for (int i = 0; i < 12; i++) s += (float)(gw_random(state) >> 40) / 16777216.0f;
    return s - 6;
}

/* mean 0 for matrices, 1 for norms. The caller frees. */
static inline float *gw_random_floats(uint64_t n_rows, uint64_t n_cols, float mean, float deviation, uint64_t *state) {
    size_t n = n_cols * (n_rows ? n_rows : 1);
    float *x = malloc(n * sizeof *x);
    if (!x) abort();
    for (size_t i = 0; i < n; i++) x[i] = mean + deviation * gw_normal(state);
    return x;
}

static inline void gw_tensor_random(gw *w, const char *name, uint32_t type, uint64_t n_rows, uint64_t n_cols,
                                    float mean, float deviation, uint64_t *state) {
    float *x = gw_random_floats(n_rows, n_cols, mean, deviation, state);
    gw_tensor(w, name, type, n_rows, n_cols, x);
    free(x);
}

/* A byte as the byte-level alphabet writes it, NUL terminated UTF-8. */
static inline void gw_byte_text(unsigned byte, char out[3]) {
    unsigned c = byte, extra = 0;
    for (unsigned b = 0; b < 256; b++) {
        int plain = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (b == byte && !plain) c = 256 + extra;
        extra += !plain;
    }
    out[0] = (char)(c < 128 ? c : 0xc0 | c >> 6);
    out[1] = (char)(c < 128 ? 0 : 0x80 | (c & 63));
    out[2] = 0;
}

#define GW_G "\xc4\xa0" /* the alphabet's space */
static const char *const gw_tiny_merges[40] = {
    GW_G " t",
    GW_G " a",
    "h e",
    "i n",
    "r e",
    "o n",
    GW_G "t he",
    "e r",
    GW_G " s",
    "a t",
    GW_G " w",
    "o u",
    "n d",
    "i s",
    "e n",
    "in g",
    "o r",
    GW_G " " GW_G,
    GW_G GW_G " " GW_G GW_G,
    "a n",
    "an d",
    GW_G " and",
    "l l",
    "v e",
    "i t",
    "s t",
    "e s",
    "u s",
    "us er",
    "a a",
    "aa aa",
    "aaaa aaaa",
    "\xc3\x83 \xc2\xa9",
    "l e",
    GW_G " c",
    GW_G " m",
    "q u",
    "h a",
    "ha t",
    "o f",
};

static inline void gw_tiny_tokenizer(gw *w, const struct tiny_model_params *p) {
    static const char *const fixed[4] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", TINY_USER_DEFINED_TEXT};
    char store[TINY_N_VOCAB][32];
    const char *tokens[TINY_N_VOCAB];
    for (unsigned i = 0; i < TINY_N_VOCAB; i++) {
        tokens[i] = store[i];
        if (i < 4) {
            strcpy(store[i], fixed[i]);
        } else if (i < 260) {
            gw_byte_text(i - TINY_BYTE_0, store[i]);
        } else {
            const char *merge = gw_tiny_merges[i - 260], *space = strchr(merge, ' ');
            snprintf(store[i], sizeof store[i], "%.*s%s", (int)(space - merge), merge, space + 1);
        }
    }
    gw_key_text(w, "tokenizer.ggml.model", "gpt2");
    gw_key_text(w, "tokenizer.ggml.pre", p->pre ? p->pre : "smollm");
    gw_key_texts(w, "tokenizer.ggml.tokens", tokens, TINY_N_VOCAB);
    if (gw_key_array(w, "tokenizer.ggml.token_type", GW_I32, TINY_N_VOCAB))
        for (unsigned i = 0; i < TINY_N_VOCAB; i++) gw_put32(&w->keys, i < 3 ? 3 : i == 3 ? 4 : 1);
    gw_key_texts(w, "tokenizer.ggml.merges", gw_tiny_merges, 40);
    gw_key_u32(w, "tokenizer.ggml.bos_token_id", TINY_IM_START);
    gw_key_u32(w, "tokenizer.ggml.eos_token_id", TINY_IM_END);
    gw_key_bool(w, "tokenizer.ggml.add_bos_token", p->add_bos != 0);
    const char *chat =
        p->chat_template ? p->chat_template : "{{'<|im_start|>' + role + '\\n' + content + '<|im_end|>'}}";
    if (*chat) gw_key_text(w, "tokenizer.chat_template", chat);
}

/* Rows of a head from the order of pairs (2i, 2i + 1) to that of halves (i, i + d/2). */
static inline void gw_pairs_to_halves(float *x, uint64_t n_rows, uint64_t n_cols, uint32_t head_dim) {
    float *copy = malloc(n_rows * n_cols * sizeof *x);
    if (!copy) abort();
    memcpy(copy, x, n_rows * n_cols * sizeof *x);
    for (uint64_t i = 0; i < n_rows; i++) {
        uint64_t k = i % head_dim, half = head_dim / 2, to = i - k + (k % 2 ? half + k / 2 : k / 2);
        memcpy(x + to * n_cols, copy + i * n_cols, n_cols * sizeof *x);
    }
    free(copy);
}

static inline void gw_tiny_layer(gw *w, const struct tiny_model_params *p, uint32_t layer, uint64_t *rng) {
    uint64_t n_embd = p->n_embd, q = (uint64_t)p->n_q_heads * p->head_dim, kv = (uint64_t)p->n_kv_heads * p->head_dim;
    uint32_t wide = p->wide_type_p1 ? p->wide_type_p1 - 1 : p->weight_type;
    const struct {
        const char *name;
        uint64_t n_rows, n_cols;
    } t[9] = {{"attn_norm", 0, n_embd},      {"attn_q", q, n_embd},       {"attn_k", kv, n_embd},
              {"attn_v", kv, n_embd},        {"attn_output", n_embd, q},  {"ffn_norm", 0, n_embd},
              {"ffn_gate", p->n_ff, n_embd}, {"ffn_up", p->n_ff, n_embd}, {"ffn_down", n_embd, p->n_ff}};
    for (int i = 0; i < 9; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, t[i].name);
        float deviation = t[i].n_rows ? (i == 1 || i == 2 ? 2.0f : 1.0f) / sqrtf((float)t[i].n_cols) : 0.1f;
        uint32_t type = !t[i].n_rows ? (uint32_t)GW_F32 : i == 3 || i == 8 ? wide : p->weight_type;
        float *x = gw_random_floats(t[i].n_rows, t[i].n_cols, t[i].n_rows ? 0 : 1, deviation, rng);
        if (p->halves && (i == 1 || i == 2)) gw_pairs_to_halves(x, t[i].n_rows, t[i].n_cols, p->head_dim);
        gw_tensor(w, name, type, t[i].n_rows, t[i].n_cols, x);
        free(x);
    }
    for (int i = 1; !strcmp(p->arch, "qwen2") && i < 4; i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.bias", layer, t[i].name);
        uint64_t seed = layer * 4u + (uint64_t)i; /* of its own: the other tensors are those of a "llama" */
        gw_tensor_random(w, name, GW_F32, 0, t[i].n_rows, 0, p->halves ? 0 : 0.5f, &seed);
    }
}

/* A key that begins with the architecture. */
static inline const char *gw_arch_key(const struct tiny_model_params *p, const char *suffix, char out[128]) {
    snprintf(out, 128, "%s.%s", p->arch, suffix);
    return out;
}
static inline void gw_arch_u32(gw *w, const struct tiny_model_params *p, const char *suffix, uint32_t v) {
    char name[128];
    gw_key_u32(w, gw_arch_key(p, suffix, name), v);
}
static inline void gw_arch_f32(gw *w, const struct tiny_model_params *p, const char *suffix, float v) {
    char name[128];
    gw_key_f32(w, gw_arch_key(p, suffix, name), v);
}

static inline void gw_tiny_keys(gw *w, const struct tiny_model_params *p, int own_heads) {
    char name[128];
    gw_key_text(w, "general.architecture", p->arch);
    gw_key_text(w, "general.name", "tiny");
    if (p->alignment) gw_key_u32(w, "general.alignment", p->alignment);
    gw_arch_u32(w, p, "block_count", p->n_layers);
    gw_arch_u32(w, p, "context_length", p->n_context ? p->n_context : 512);
    gw_arch_u32(w, p, "embedding_length", p->n_embd);
    gw_arch_u32(w, p, "feed_forward_length", p->n_ff);
    gw_arch_u32(w, p, "attention.head_count", p->n_q_heads);
    gw_arch_u32(w, p, "attention.head_count_kv", p->n_kv_heads);
    gw_arch_f32(w, p, "attention.layer_norm_rms_epsilon", 1e-5f);
    if (own_heads) gw_arch_u32(w, p, "attention.key_length", p->head_dim);
    if (own_heads) gw_arch_u32(w, p, "attention.value_length", p->head_dim);
    if (p->sliding_window) gw_arch_u32(w, p, "attention.sliding_window", p->sliding_window);
    if (p->sliding_period) gw_arch_u32(w, p, "attention.sliding_window_pattern", p->sliding_period);
    if (p->sliding_layers &&
        gw_key_array(w, gw_arch_key(p, "attention.sliding_window_pattern", name), GW_BOOL, p->n_layers))
        for (uint32_t l = 0; l < p->n_layers; l++) gw_put(&w->keys, p->sliding_layers >> l & 1 ? "\1" : "", 1);
    gw_arch_u32(w, p, "rope.dimension_count", p->head_dim);
    gw_arch_f32(w, p, "rope.freq_base", p->rope_base > 0 ? p->rope_base : 10000);
    if (p->rope_scaling) gw_key_text(w, gw_arch_key(p, "rope.scaling.type", name), p->rope_scaling);
    if (p->rope_factor > 0) gw_arch_f32(w, p, "rope.scaling.factor", p->rope_factor);
    if (p->rope_linear > 0) gw_arch_f32(w, p, "rope.scale_linear", p->rope_linear);
    if (p->rope_original) gw_arch_u32(w, p, "rope.scaling.original_context_length", p->rope_original);
    gw_arch_u32(w, p, "vocab_size", TINY_N_VOCAB);
}

/* Fills w (all zero before; the caller frees it with gw_free). */
static inline void kvf_test_tiny_model(gw *w, const struct tiny_model_params *params) {
    struct tiny_model_params p = *params;
    if (!p.n_layers) p.n_layers = 2;
    if (!p.n_q_heads) p.n_q_heads = 4;
    if (!p.n_kv_heads) p.n_kv_heads = 2;
    if (!p.head_dim) p.head_dim = 16;
    if (!p.n_ff) p.n_ff = 128;
    if (!p.arch) p.arch = "llama";
    int own_heads = p.n_embd != 0;
    if (!own_heads) p.n_embd = p.n_q_heads * p.head_dim;
    uint32_t n_embd = p.n_embd, embd_type = p.embd_type_p1 ? p.embd_type_p1 - 1 : p.weight_type;
    uint32_t wide = p.wide_type_p1 ? p.wide_type_p1 - 1 : p.weight_type;
    uint64_t rng = p.seed;
    w->version = p.version ? p.version : 3;
    w->alignment = p.alignment ? p.alignment : 32;
    w->skip = p.skip;
    gw_tiny_keys(w, &p, own_heads);
    gw_tiny_tokenizer(w, &p);
    gw_tensor_random(w, "token_embd.weight", embd_type, TINY_N_VOCAB, n_embd, 0, 0.3f, &rng);
    for (uint32_t i = 0; i < p.n_layers; i++) gw_tiny_layer(w, &p, i, &rng);
    gw_tensor_random(w, "output_norm.weight", GW_F32, 0, n_embd, 1, 0.1f, &rng);
    if (p.separate_output)
        gw_tensor_random(w, "output.weight", wide, TINY_N_VOCAB, n_embd, 0, 1 / sqrtf((float)n_embd), &rng);
    if (p.rope_freqs) {
        float freqs[128];
        for (uint32_t i = 0; i < p.head_dim / 2; i++) freqs[i] = 1 + (float)i * 0.5f;
        gw_tensor(w, "rope_freqs.weight", GW_F32, 0, p.head_dim / 2, freqs);
    }
    w->skip = NULL;
    if (p.extra) p.extra(w, p.ctx);
}

/* Writes it to path; 0, or -1 when that failed. */
static inline int kvf_test_write_tiny_model(const char *path, const struct tiny_model_params *params) {
    gw w = {0};
    kvf_test_tiny_model(&w, params);
    int rc = gw_write(&w, path);
    gw_free(&w);
    return rc;
}

#endif
