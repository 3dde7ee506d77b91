/* model/weights.h: the weights as forward.c uses them, and dequantisation. */
#ifndef KVF_MODEL_WEIGHTS_H
#define KVF_MODEL_WEIGHTS_H

#include "model/gemm.h"
#include "model/model.h"

/* Matrices stay as they are in the file. Matrices that multiply the same input are stored as one, for one product. */
typedef struct kvf__layer_weights {
    const float *attn_norm;  /* (n_embd) */
    kvf__matrix qkv;         /* (q + kv + kv, n_embd): rows of Q, then of K, then of V */
    const float *qkv_bias;   /* (q + kv + kv), or NULL */
    kvf__matrix attn_output; /* (n_embd, q) */
    const float *ffn_norm;   /* (n_embd) */
    kvf__matrix gate_up;     /* (n_ff + n_ff, n_embd): rows of gate, then of up */
    kvf__matrix ffn_down;    /* (n_embd, n_ff) */
} kvf__layer_weights;

/* One slab holds what is not in the file, or not as it is used. */
struct kvf__weights {
    kvf_allocator allocator;
    void *slab;
    size_t slab_bytes;
    kvf__layer_weights *layers; /* [n_layers] */
    const float *output_norm;   /* (n_embd) */
    kvf__matrix output;         /* (n_vocab, n_embd) */
    const double *rope_freqs;   /* (n_rot / 2): angle of pair i a position */
    size_t scratch_floats;      /* of one thread, for products with any of these */
};

/* Dequantises n elements from the start of a block; n is a multiple of the type's block. false: the type is not
 * supported. */
bool kvf__dequantize(uint32_t type, const void *src, size_t n, float *out);

/* The row-th row of a tensor, n_cols floats. */
void kvf__tensor_row(const kvf__tensor *tensor, uint32_t row, float *out);

#endif
