/* tools/calibrate/machine.h: one sequence of a model, with pages of its own: states, scores of a repetition, scores of a probe. */
#ifndef KVF_TOOLS_CALIBRATE_MACHINE_H
#define KVF_TOOLS_CALIBRATE_MACHINE_H

#include <stdbool.h>

#include "kvfold/model.h"

typedef struct kvf__machine kvf__machine;

/* For prompts of n tokens; NULL after a message. instruction: between a prompt and its repetition. */
kvf__machine *kvf__machine_begin(const kvf_model *model, uint32_t n_threads, uint32_t n, const uint32_t *instruction,
                                 uint32_t n_instruction);
void kvf__machine_end(kvf__machine *machine); /* NULL is allowed */

/* Runs a prompt and its repetition. states: [n_layers][n][n_embd]; scores: [n_layers][n_kv_heads][n], KVzip+'s. False after a
 * message. */
bool kvf__machine_repeat(kvf__machine *machine, const uint32_t *tokens, float *states, float *scores);

/* Runs a prompt with a probe; scores as above, the probe's. */
bool kvf__machine_probe(kvf__machine *machine, const uint32_t *tokens, const kvf_probe *probe, float *scores);

#endif
