/* kvfold/probe.h: a linear probe, which says how much a token's K and V will matter to later queries.
 * For each layer and KV head it has one row of weights over the hidden state that enters attention. So a token's score is known
 * as soon as the token is computed, without a look at anybody's attention. `kvfold calibrate` fits a probe to a model. Part of
 * libkvfold_engine.
 *
 * Simple use
 *     kvf_status threshold_of(const char *path, float rho, float *threshold, kvf_error *err) {
 *         kvf_probe *probe = NULL;
 *         kvf_status status = kvf_probe_open(path, NULL, &probe, err); // a file of `kvfold calibrate`
 *         if (status) return status;
 *         kvf_probe_data data = {.struct_size = sizeof data};
 *         status = kvf_probe_get(probe, &data);
 *         for (uint32_t i = 0; i < data.n_rhos && data.rhos[i] <= rho; i++) *threshold = data.thresholds[i];
 *         kvf_probe_close(probe); // with an engine: kvf_engine_config.probe, and close it after the engine
 *         return status;
 *     }
 *
 * Words
 *     score      y = w . x + b, with x the state after the layer's first RMSNorm. Only the order of scores counts.
 *     threshold  the score that a given share (rho) of all slots of all layers and heads reaches, over the texts of calibration.
 *
 * Source: KVzap, arXiv 2601.07891. docs/fold.md says what is fitted, and how well.
 */
#ifndef KVFOLD_PROBE_H
#define KVFOLD_PROBE_H

#include "kvfold/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_probe kvf_probe;

/* What a probe consists of. Numbers are finite. */
typedef struct kvf_probe_data {
    size_t struct_size;
    uint32_t n_layers, n_kv_heads, n_embd; /* of the whole model; at most 1,024 layers */
    const char *
        model; /* which model it was fitted to, as `kvfold info --digest` names it; at most 63 bytes; "" or NULL: not known */
    const float *weight; /* [n_layers][n_kv_heads][n_embd] */
    const float *bias;   /* [n_layers][n_kv_heads] */
    const float
        *explained;    /* [n_layers][n_kv_heads] share of the score's variance that it explains, on text that it was not
                             * fitted to; at most 1, below 0 if it is worse than the mean; NULL: not known */
    uint32_t n_rhos;   /* of what follows; 0: not known, at most 64 */
    const float *rhos; /* [n_rhos] shares of all slots, ascending, in (0, 1] */
    const float *thresholds; /* [n_rhos] the score that this share reaches, descending */
    const float
        *shares; /* [n_rhos][n_layers][n_kv_heads] share of its own slots that each table then keeps, on average */
    const float *most; /* same shape: the largest such share of any text */
} kvf_probe_data;

/** A probe from numbers.
 *  @param data copied. @param allocator or NULL. @param out the probe. @param err names the field and its value, or NULL.
 *  @own the caller, kvf_probe_close. @threads any; a probe is read-only afterwards and may be shared.
 *  @errors KVF_E_INVALID (sizes, numbers that are not finite, an order), KVF_E_NO_MEMORY, KVF_E_OVERFLOW. @cost copies; allocates once. */
KVF_API KVF_CHECK kvf_status kvf_probe_create(const kvf_probe_data *data, const kvf_allocator *allocator,
                                              kvf_probe **out, kvf_error *err);

/** Opens a file of kvf_probe_save. It is a GGUF file with the architecture "kvfold-probe".
 *  @param path the file. @param allocator or NULL. @param out the probe. @param err names the file, the tensor and the value, or NULL.
 *  @own the caller, kvf_probe_close. @threads any.
 *  @errors KVF_E_IO, KVF_E_FORMAT (torn, no probe, numbers as kvf_probe_create refuses them), KVF_E_UNSUPPORTED (a later version),
 *  KVF_E_NO_MEMORY. @cost reads the file. */
KVF_API KVF_CHECK kvf_status kvf_probe_open(const char *path, const kvf_allocator *allocator, kvf_probe **out,
                                            kvf_error *err);

/** Writes a probe to a file, which appears under its name only when it is complete.
 *  @param probe a probe. @param path where to; a file of that name is replaced. @param err names the file, or NULL.
 *  @own nothing. @threads any. @errors KVF_E_INVALID, KVF_E_IO, KVF_E_NO_MEMORY. @cost writes it once. */
KVF_API KVF_CHECK kvf_status kvf_probe_save(const kvf_probe *probe, const char *path, kvf_error *err);

/** What a probe consists of.
 *  @param probe a probe. @param data filled; struct_size set by the caller. Pointers are the probe's.
 *  @own the probe's. @threads any. @errors KVF_E_INVALID. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_probe_get(const kvf_probe *probe, kvf_probe_data *data);

/** Frees it; NULL is allowed.
 *  @param probe a probe that no engine and no forward pass uses. @own takes it. @threads none may use it. @errors none. @cost one free. */
KVF_API void kvf_probe_close(kvf_probe *probe);

#ifdef __cplusplus
}
#endif
#endif
