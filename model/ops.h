/* model/ops.h: the small operations between the matrix products, one row at a time. */
#ifndef KVF_MODEL_OPS_H
#define KVF_MODEL_OPS_H

#include "base/base.h"

/* The same operations in two forms; kvf__ops_for chooses one at run time. */
typedef struct kvf__ops {
    /* out = x / rms(x) * weight; in place is allowed */
    void (*rms_norm)(const float *x, const float *weight, uint32_t n, float epsilon, float *out);
    /* gate = gate * sigmoid(gate) * up */
    void (*swiglu)(float *gate, const float *up, uint32_t n);
} kvf__ops;

const kvf__ops *kvf__ops_for(bool avx2);

/* cos and sin of the angles of one position: rotation[2 * i], rotation[2 * i + 1] for pair i of n_pairs. The angle is a
 * double: at position 8,192 a float's would be wrong in the fourth digit. */
void kvf__rope_angles(uint32_t position, const double *freqs, uint32_t n_pairs, float *rotation);

/* Rotates the pairs (2i, 2i + 1) of each of n_heads heads; dims from 2 * n_pairs on stay. */
void kvf__rope(float *heads, uint32_t n_heads, uint32_t head_dim, const float *rotation, uint32_t n_pairs);
/* The same with the pairs (i, i + n_pairs). */
void kvf__rope_halves(float *heads, uint32_t n_heads, uint32_t head_dim, const float *rotation, uint32_t n_pairs);

/* Natural log of the probability of a token at temperature 1; -inf where its logit is NaN. */
double kvf__token_logprob(const float *logits, uint32_t n_vocab, uint32_t token);

void kvf__rms_norm_avx2(const float *x, const float *weight, uint32_t n, float epsilon, float *out);
void kvf__swiglu_avx2(float *gate, const float *up, uint32_t n);

#endif
