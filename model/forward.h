/* model/forward.h: a forward pass, its buffers, and the table of operations that it consists of.
 *
 * forward.c checks the arguments and has the order of operations in a layer. It touches no row itself: every operation
 * works on all rows of the pass, in the buffers below. A device, or a rank that has some of the heads, replaces
 * operations and never the order. cpu.c has the operations of the CPU.
 */
#ifndef KVF_MODEL_FORWARD_H
#define KVF_MODEL_FORWARD_H

#include "model/fast.h"
#include "model/gemv.h"
#include "model/ops.h"
#include "model/weights.h"

enum {
    KVF__TARGET_ROWS = 64, /* whose logits are there at a time, for the probabilities of targets */
    KVF__GRAM_ROWS = 128,  /* of the output projection at a time, and slots whose values meet it: score.c */
    KVF__GRAM_SLOTS = 64
};

/* One slab. Rows are tokens of the step; after the last layer's attention, those of them that something is wanted of. */
struct kvf_activations {
    const kvf_model *model;
    kvf_allocator allocator;
    size_t slab_bytes;
    uint32_t max_tokens, max_seqs, max_slots, n_threads;
    kvf__cpu cpu;
    float *x;                                             /* (max_tokens, n_embd): the residual stream */
    float *norm;                                          /* (max_tokens, n_embd) */
    float *qkv;                                           /* (max_tokens, q + kv + kv) */
    float *attention;                                     /* (max_tokens, q) */
    float *gate_up;                                       /* (max_tokens, n_ff + n_ff) */
    float *rotation;                                      /* (max_tokens, n_rot): cos and sin of every pair */
    uint32_t *position;                                   /* (max_tokens) */
    float **col_sums, **last_sums, **sq_sums, **max_prob; /* (max_seqs): of the layer at hand */
    float *query_scale;                                   /* (max_tokens): 1 / the norm of the residual stream */
    float *gram;                                          /* (n_q_heads, head_dim, head_dim): score.c */
    float *gram_panel;                                    /* (q, KVF__GRAM_ROWS) */
    float *gram_values;                                   /* (n_threads, 2, KVF__GRAM_SLOTS, head_dim) */
    uint32_t *wanted;                          /* (max_tokens): the rows that are left after the last attention */
    uint32_t *out_at, *target_row, *target_at; /* (max_tokens): see keep_wanted_rows */
    float *target_logits;                      /* (KVF__TARGET_ROWS, n_vocab) */
    float *scratch;                            /* (n_threads, scratch_floats of the weights) */
    void *quantised;                           /* (max_tokens, the widest input of a product): activations in 8 bits */
    uint32_t *seq_of, *bad_in; /* (max_tokens): a row's sequence, and where it first had a number that is not finite */
    float *kept;               /* (kept_floats): sums as they were, of the layers so far; grows, apart from the slab */
    size_t kept_floats;
    void *workspace;
    size_t workspace_bytes;
};

typedef struct kvf__pass kvf__pass;

/* y (n_rows, n) = x (n_rows, k) times the transpose of w (n, k), added to y when accumulate is set. */
typedef struct kvf__product {
    const kvf__matrix *w;
    const float *x;
    float *y;
    size_t x_stride, y_stride; /* floats between rows */
    bool accumulate;           /* with ranks: x and w are a rank's part of k, and the sum over all ranks is added */
} kvf__product;

/* The operations, each over the rows [0, n_rows) of the pass; in brackets what it reads and writes of the buffers. */
typedef struct kvf__forward_ops {
    /* [-> x, rotation] The rows of the tokens, and the rotations of their positions. */
    kvf_status (*embed)(kvf__pass *p);
    /* [x -> norm] RMSNorm. Notes rows of x that are not finite, if the caller wants to know. */
    kvf_status (*rms_norm)(kvf__pass *p, const float *weight);
    kvf_status (*product)(kvf__pass *p, const kvf__product *product);
    /* [qkv, rotation -> qkv] Adds the bias (q + kv + kv), or NULL, then rotates the heads of Q and K. */
    kvf_status (*rope)(kvf__pass *p, const float *bias);
    /* [qkv, x -> attention] Appends K and V to the layer's pages, attends, fills the mass. */
    kvf_status (*attention)(kvf__pass *p, uint32_t layer);
    /* [norm -> pages->score] The probe's scores of the new tokens. */
    kvf_status (*probe)(kvf__pass *p, uint32_t layer);
    /* [gate_up -> its first half] */
    kvf_status (*swiglu)(kvf__pass *p);
    /* [x, attention] Row wanted[i] becomes row i, for n ascending rows; n becomes n_rows. */
    kvf_status (*keep_rows)(kvf__pass *p, const uint32_t *wanted, uint32_t n);
    /* [norm -> x] Row at[i] of norm becomes row i of x, for n rows. */
    kvf_status (*gather)(kvf__pass *p, const uint32_t *at, uint32_t n);
    /* Notes which of n rows of logits, those of rows at[i], are not finite. */
    kvf_status (*check_logits)(kvf__pass *p, const float *logits, const uint32_t *at, uint32_t n);
    /* Log-probabilities of targets[rows[i]] from n rows of logits, to logprobs[rows[i]]. */
    kvf_status (*logprobs)(kvf__pass *p, const float *logits, const uint32_t *rows, uint32_t n);
    /* [-> not_finite] Adds up what the rows have noted. */
    kvf_status (*note_not_finite)(kvf__pass *p);
    /* After a failed pass: the prompts' sums are as before it. */
    void (*undo)(kvf__pass *p);
} kvf__forward_ops;

/* A pass under way. */
struct kvf__pass {
    const kvf_model *m;
    kvf_activations *a;
    kvf_stream *stream;
    const kvf__forward_ops *ops;
    kvf_forward f;
    kvf_view view;
    uint32_t n_rows, n_targets;
    uint32_t checked;       /* the layer that a row which is not finite is put down to */
    uint32_t n_layers_kept; /* whose sums are in a->kept */
    uint32_t q, kv;         /* floats of a token's Q; of its K, and of its V */
    kvf_mass mass;
    kvf_attention attention;
    kvf_error *err;
    /* Of the CPU. */
    const kvf__ops *row_ops;
    const kvf__gemv_ops *gemv_ops;
    const kvf__fast_ops *fast_ops;       /* or NULL */
    kvf_probe_data probe;                /* of f.probe, cleared without one */
    const float *norm_weight, *qkv_bias; /* of the operation at hand; qkv_bias may be NULL */
    const float *logits;                 /* likewise, and the next two */
    const uint32_t *at;
    void (*row_fn)(const kvf__pass *p, uint32_t row);
};

/* Sets the pass up for the CPU: its operations, attention, and room for the copy of the sums. Nothing has changed on
 * failure. (cpu.c) */
kvf_status kvf__cpu_begin(kvf__pass *p);

#endif
