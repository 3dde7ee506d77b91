/* kvfold/runner.h: what computes for the engine. A runner is a table of functions: the model's shape, where memory lies, a
 * forward pass over a batch of rows, and a few copies. The engine schedules, manages blocks and samples; it reads or writes no
 * tensor itself. Part of libkvfold_engine.
 *
 * Simple use
 *     kvf_status replay(kvf_runner *runner, kvf_error *err) { // the engine's decisions about blocks, with no arithmetic
 *         kvf_runner_null_config null = {.struct_size = sizeof null, .step_s = 0.02, .token_s = 0.0001};
 *         null.shape = (kvf_runner_shape){.n_layers = 32, .n_q_heads = 32, .n_kv_heads = 8, .head_dim = 128};
 *         null.shape.n_vocab = 32000, null.shape.n_context = 8192;
 *         return kvf_runner_create_null(&null, runner, err); // then kvf_engine_config.runner = runner
 *     }
 *
 * A runner serves one engine at a time.
 * Runners here: the CPU's, over a kvf_model (the engine makes it from kvf_engine_config.model), and the null runner, which computes
 * nothing and has a clock of its own. examples/own_runner.c has one of a program's own.
 */
#ifndef KVFOLD_RUNNER_H
#define KVFOLD_RUNNER_H

#include "kvfold/device.h"
#include "kvfold/model.h"
#include "kvfold/policy.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What it computes. With tensor parallelism heads are those of this rank. This struct never grows. */
typedef struct kvf_runner_shape {
    uint32_t n_layers, n_q_heads, n_kv_heads, head_dim, n_vocab, n_context;
    uint32_t n_q_heads_total, q_head_begin; /* over all ranks, and this rank's first; n_q_heads_total 0: n_q_heads */
    const uint32_t *layer_windows; /* [n_layers] sliding window of each layer, 0: none; or NULL; read until destroy */
} kvf_runner_shape;

/* The largest step. Given once, before the first run. */
typedef struct kvf_runner_limits {
    size_t struct_size;
    kvf_stream *stream; /* where policies run, too */
    uint32_t max_tokens, max_seqs, max_slots;
    uint32_t max_prompt_tokens; /* columns of the accumulators */
    uint32_t block_size, n_snapshot_pages;
} kvf_runner_limits;

/* Memory of the runner, which the engine hands on: to run, and to the policies. All but logits lies where pages lie; NULL where the
 * runner computes nothing. */
typedef struct kvf_runner_buffers {
    size_t struct_size;
    float *sums, *last_sums; /* [n_layers][n_q_heads][max_prompt_tokens] accumulators of running prompts */
    float *squares;          /* [n_layers][n_kv_heads][max_prompt_tokens] */
    float *prompt_logprobs;  /* [max_prompt_tokens] */
    float *row;              /* [max_seqs][n_kv_heads][max_slots] */
    float *snapshots;        /* [n_snapshot_pages][n_layers * n_q_heads rows][block_size] */
    float *logits; /* [max_seqs][n_vocab] in CPU memory, valid after a run; NULL: none, requests give their tokens */
    float *prompt_max; /* as sums: what repetitions of prompts give. NULL: prompts are not repeated, see observes */
} kvf_runner_buffers;

/* All functions get ctx first and are called in the engine's thread, one at a time. Those marked optional may be NULL. A status other than
 * KVF_OK fails the step, which the engine undoes (engine.h); err then has a text. */
typedef struct kvf_runner {
    size_t struct_size;
    const char *name;
    void *ctx;
    kvf_runner_shape shape;
    const kvf_device *device; /* allocates and copies pages; NULL: there is no KV memory, and only sizes are managed */
    /* KVF_NEEDS_* that it can give to policies; a policy that needs more is refused. KVF_NEEDS_REPEAT: with kvf_forward.prompt_max. */
    uint32_t observes;
    kvf_status (*begin)(void *ctx, const kvf_runner_limits *limits, kvf_runner_buffers *buffers, kvf_error *err);
    /* A step. batch->view is filled, the new slots are appended, copies are done. Writes K and V of the new tokens into the pages, adds
     * to the accumulators, calls after_layer, and leaves the logits of out_rows in batch->logits. */
    kvf_status (*run)(void *ctx, const kvf_forward *batch, kvf_error *err);
    /* Sets n columns of each of n_rows rows to 0, rows `stride` floats apart. */
    kvf_status (*clear)(void *ctx, float *columns, uint32_t n_rows, size_t stride, uint32_t n, kvf_error *err);
    /* Copies the first n_tokens columns of n_rows rows, max_prompt_tokens floats apart, from (to_pages 0) or to (1) the snapshot pages
     * ids[n_tokens / block_size, up]: a prompt's sums, squares or log-probabilities. A page's rows are block_size floats apart. */
    kvf_status (*snapshot)(void *ctx, float *columns, uint32_t n_rows, const uint32_t *ids, uint32_t n_tokens,
                           int to_pages, kvf_error *err);
    /* Copies between the memory where pages lie and the CPU's: prompt files, positions. */
    kvf_status (*read)(void *ctx, void *to, const void *from, size_t bytes, kvf_error *err);
    kvf_status (*write)(void *ctx, void *to, const void *from, size_t bytes, kvf_error *err);
    /* Optional: the metric of a request's prompt, [n_layers][n_q_heads_total], where nothing is computed. user: kvf_generate.user. */
    kvf_status (*metric)(void *ctx, void *user, double *values, kvf_error *err);
    double (*clock)(void *ctx); /* optional: seconds; NULL: the monotonic clock */
    void (*destroy)(void *ctx); /* optional */
    /* Optional: kvf_model_score over prompt_max, after a prompt's repetition. NULL: policies with score_norm output are refused. */
    kvf_status (*score)(void *ctx, const kvf_repetition *repetition, kvf_error *err);
} kvf_runner;

/** The CPU's runner over a model.
 *  @param model must outlive the runner. @param device where pages lie, with cpu_access; NULL: kvf_device_cpu().
 *  @param allocator or NULL. @param runner filled, its struct_size set by the caller. @param err detail, or NULL.
 *  @own the caller, kvf_runner_destroy after the engine. @threads as the engine.
 *  @errors KVF_E_INVALID, KVF_E_STATE (a model without weights), KVF_E_UNSUPPORTED (device), KVF_E_NO_MEMORY. @cost small. */
KVF_API KVF_CHECK kvf_status kvf_runner_create_cpu(const kvf_model *model, const kvf_device *device,
                                                   const kvf_allocator *allocator, kvf_runner *runner, kvf_error *err);

typedef struct kvf_runner_null_config {
    size_t struct_size;
    kvf_runner_shape shape;
    double step_s, token_s; /* seconds of a step, and of each token in it */
    /* Optional, as in kvf_runner: the layers' metric of a prompt. NULL: all layers are equal. */
    kvf_status (*metric)(void *ctx, void *user, double *values, kvf_error *err);
    void *ctx;
    kvf_allocator allocator;
} kvf_runner_null_config;

/** The null runner: no arithmetic and no KV memory. Requests must give all their tokens (kvf_generate.forced). Every policy is
 *  accepted; what follows from attention is left out, so tables have the right sizes and no contents.
 *  @param config see above. @param runner filled, its struct_size set by the caller. @param err detail, or NULL.
 *  @own the caller, kvf_runner_destroy after the engine. @threads as the engine.
 *  @errors KVF_E_INVALID, KVF_E_NO_MEMORY. @cost small. */
KVF_API KVF_CHECK kvf_status kvf_runner_create_null(const kvf_runner_null_config *config, kvf_runner *runner,
                                                    kvf_error *err);

/** Sets the null runner's clock forward, as to the arrival of the next request.
 *  @param runner a null runner. @param seconds the new time; an earlier one changes nothing.
 *  @own nothing. @threads as the engine. @errors none. @cost O(1). */
KVF_API void kvf_runner_null_wait(const kvf_runner *runner, double seconds);

/** Calls the runner's destroy and clears the table; NULL is allowed.
 *  @param runner a runner that no engine uses. @own takes its ctx. @threads none may use it. @errors none. @cost frees. */
KVF_API void kvf_runner_destroy(kvf_runner *runner);

#ifdef __cplusplus
}
#endif
#endif
