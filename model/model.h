/* model/model.h: struct kvf_model, as the files of this folder share it.
 *
 * kvf_model_open (model.c) maps the file, checks config, tokenizer and every tensor's type and shape, fills the
 * descriptors below and then calls kvf__weights_load (weights.c), which takes memory for what forward.c multiplies
 * with. After open a model is read-only.
 *
 * Invariants after the checks: n_q_heads is a multiple of n_kv_heads; head_dim is a multiple of 8, at most 256; n_rot is
 * even, 2..head_dim; every size below is non-zero, and n_rows * n_cols of every tensor is below 2^40.
 *
 * Rotation: a Llama GGUF stores the rows of Q and K permuted, so that the two elements of a rotated pair are adjacent.
 * The forward pass rotates the pairs (2i, 2i + 1) of a head by position * rope_base^(-2i / n_rot) / rope_freqs[i], scaled
 * as rope_scaling says. It keeps this order in the cache, because dot products and norms of keys do not depend on it. An
 * architecture whose files are not permuted has rope_halves and rotates (i, i + n_rot / 2).
 */
#ifndef KVF_MODEL_MODEL_H
#define KVF_MODEL_MODEL_H

#include "base/base.h"
#include "kvfold/model.h"
#include "model/gguf.h"

/* A tensor of the file: n_rows rows of n_cols elements, row after row, in the file's type (kvf__tensor_type). n_cols
 * is the length of the input and n_rows that of the output. A vector has n_rows 1. data is NULL if the file does not
 * have the tensor. */
typedef struct kvf__tensor {
    char name[48];
    uint32_t type;
    uint32_t n_rows, n_cols;
    const void *data; /* in the map */
    size_t bytes;
} kvf__tensor;

/* Shapes as (n_rows, n_cols); q = n_q_heads * head_dim, kv = n_kv_heads * head_dim. Either all three biases exist or
 * none. */
typedef struct kvf__layer {
    kvf__tensor attn_norm;   /* (1, n_embd), F32 */
    kvf__tensor attn_q;      /* (q, n_embd) */
    kvf__tensor attn_k;      /* (kv, n_embd) */
    kvf__tensor attn_v;      /* (kv, n_embd) */
    kvf__tensor attn_q_bias; /* (1, q), F32, or data NULL */
    kvf__tensor attn_k_bias; /* (1, kv) */
    kvf__tensor attn_v_bias; /* (1, kv) */
    kvf__tensor attn_output; /* (n_embd, q) */
    kvf__tensor ffn_norm;    /* (1, n_embd), F32 */
    kvf__tensor ffn_gate;    /* (n_ff, n_embd) */
    kvf__tensor ffn_up;      /* (n_ff, n_embd) */
    kvf__tensor ffn_down;    /* (n_embd, n_ff) */
} kvf__layer;

/* How the rotation's frequencies are scaled for contexts longer than the original training context. */
typedef enum kvf__rope_kind { KVF__ROPE_PLAIN, KVF__ROPE_LINEAR, KVF__ROPE_LLAMA3 } kvf__rope_kind;

typedef struct kvf__rope_scaling {
    kvf__rope_kind kind;
    float factor;              /* linear: divides every frequency; llama3: those of few turns */
    uint32_t original_context; /* llama3, as what follows: tokens that turns are counted over */
    float low_turns, high_turns;
} kvf__rope_scaling;

/* What weights.c keeps in memory; defined there. */
typedef struct kvf__weights kvf__weights;

enum { KVF__MAX_LAYERS = 1024 }; /* as the block manager has them */

struct kvf_model {
    kvf_allocator allocator; /* resolved */
    kvf_model_info info;
    uint32_t n_rot;   /* dims of a head that rotate */
    bool rope_halves; /* see above */
    kvf__rope_scaling rope_scaling;
    bool full_attention[KVF__MAX_LAYERS]; /* layers that have not the window, where there is one */
    int tokenizer_only;
    kvf__gguf gguf;
    kvf_tokenizer *tokenizer;
    kvf__layer *layers;      /* [n_layers] */
    kvf__tensor token_embd;  /* (n_vocab, n_embd) */
    kvf__tensor output_norm; /* (1, n_embd), F32 */
    kvf__tensor output;      /* (n_vocab, n_embd); the same data as token_embd when tied */
    kvf__tensor
        rope_freqs;        /* (1, n_rot / 2), F32, finite and positive: divisors of the frequencies; data NULL: all 1 */
    kvf__weights *weights; /* NULL until kvf__weights_load, and with tokenizer_only */
};

/* Assigns the file's tensors to their places, once the config is read; fills info's n_tensors, n_params, weights.
 * Tensors that no computation needs are reported to the log; unknown ones that would change the results are refused.
 * (tensors.c) */
kvf_status kvf__model_take_tensors(kvf_model *model, const char *architecture, bool qkv_bias, const kvf_log *log,
                                   kvf_error *err);

/* Prepares the weights: sets model->weights and model->info.weight_bytes. On failure model->weights is NULL again.
 * Not called with tokenizer_only. */
kvf_status kvf__weights_load(kvf_model *model, kvf_error *err);
void kvf__weights_free(kvf_model *model); /* also when weights is NULL */

#endif
