/* tools/calibrate/ridge.h: ridge regression from hidden states to scores, for all layers and KV heads of a model. */
#ifndef KVF_TOOLS_CALIBRATE_RIDGE_H
#define KVF_TOOLS_CALIBRATE_RIDGE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kvf__ridge kvf__ridge;

/* NULL after a message: out of memory, or neither OpenBLAS nor LAPACK is installed. */
kvf__ridge *kvf__ridge_begin(uint32_t n_layers, uint32_t n_heads, uint32_t n_embd);
void kvf__ridge_end(kvf__ridge *fit); /* NULL is allowed */

/* Bytes that kvf__ridge_begin takes. */
uint64_t kvf__ridge_bytes(uint32_t n_layers, uint32_t n_heads, uint32_t n_embd);

/* n tokens of one layer: states[n][n_embd], and for each head targets[head * stride + i]. */
void kvf__ridge_add(kvf__ridge *fit, uint32_t layer, const float *states, uint32_t n, const float *targets,
                    uint32_t stride);

/* weight[n_layers][n_heads][n_embd] and bias[n_layers][n_heads] with the least squared error, plus ridge times the mean
 * square of a state's element, times the number of tokens, times the square of the weights. False after a message. */
bool kvf__ridge_solve(kvf__ridge *fit, double ridge, float *weight, float *bias);

#endif
