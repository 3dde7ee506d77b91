/* model/weights.h: the weights as forward.c multiplies with them, and dequantisation. */
#ifndef KVF_MODEL_WEIGHTS_H
#define KVF_MODEL_WEIGHTS_H

#include "model/model.h"

/* Matrices are fp32, row major, one row an output. What reads the same input stands in one matrix: one product. */
typedef struct kvf__layer_weights {
    const float *attn_norm;   /* (n_embd) */
    const float *qkv;         /* (q + kv + kv, n_embd): rows of Q, then of K, then of V */
    const float *qkv_bias;    /* (q + kv + kv), or NULL */
    const float *attn_output; /* (n_embd, q) */
    const float *ffn_norm;    /* (n_embd) */
    const float *gate_up;     /* (n_ff + n_ff, n_embd): rows of gate, then of up */
    const float *ffn_down;    /* (n_embd, n_ff) */
} kvf__layer_weights;

/* One slab holds it all. The embedding is looked up in the file itself: only as an output head has it an fp32 form. */
struct kvf__weights {
    kvf_allocator allocator;
    void *slab;
    size_t slab_bytes;
    kvf__layer_weights *layers; /* [n_layers] */
    const float *output_norm;   /* (n_embd) */
    const float *output;        /* (n_vocab, n_embd) */
    const double *rope_freqs;   /* (n_rot / 2): angle of pair i a position */
};

/* n elements from the start of a block; n is a multiple of the type's block. false: no type that we read. */
bool kvf__dequantize(uint32_t type, const void *src, size_t n, float *out);

/* The row-th row of a tensor, n_cols floats. */
void kvf__tensor_row(const kvf__tensor *tensor, uint32_t row, float *out);

#endif
