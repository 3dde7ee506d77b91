/* kvfold/engine.h: batch generation: schedule -> forward -> policy -> sample, for one rank.
 *
 *     kvf_engine_create(&config, &engine, &err);
 *     kvf_engine_submit(engine, &request, &id, &err);       // any number, at any time
 *     while (kvf_engine_step(engine, &more, &err) == KVF_OK && more) {}
 *
 * Results arrive through the request's callbacks, in the thread of kvf_engine_step.
 *
 * One request may ask for several answers (n, best_of, beam_width). The prompt is then computed once and forked: what the
 * samples or beams have in common they share, until the first eviction of each makes that layer's table its own.
 *   n           sample i draws with the seed + i, and is what a request of its own with that seed would be; it ends when it
 *               ends. With sample_policies each has a policy of its own: the prompt is forked before anything is evicted.
 *   best_of     so many samples, of which the n with the best mean log-probability are the answers, all at the end.
 *   beam_width  W. At each step all continuations of the W hypotheses are ranked by the sum of their log-probabilities
 *               (temperature 1; ties: the earlier hypothesis, the lower id). Those that end (an end token, a stop string)
 *               count as finished when they are among the first W, the others fill the W places. A hypothesis scores sum /
 *               tokens ^ length_penalty, its end token counted. The search stops when W are finished and the best running
 *               one scores no more than the worst of them, or at max_tokens, where the running ones count too. The n
 *               best are the answers, best first.
 * Part of libkvfold_engine.
 */
#ifndef KVFOLD_ENGINE_H
#define KVFOLD_ENGINE_H

#include "kvfold/device.h"
#include "kvfold/model.h"
#include "kvfold/policy.h"
#include "kvfold/profile.h"
#include "kvfold/scheduler.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_engine kvf_engine;

typedef struct kvf_engine_config {
    size_t struct_size;
    const kvf_model *model;
    uint32_t n_threads;          /* 0: the CPUs there are */
    kvf_dtype kv_dtype;          /* of the pages: here 0 is KVF_F32; kvf_engine_config_default has KVF_F16 */
    uint32_t block_size;         /* 0: 16 */
    uint32_t heads_per_group;    /* 0: all KV heads */
    uint32_t chunk;              /* 0: 512 */
    uint64_t kv_bytes;           /* memory for K and V; 0: 512 MiB */
    uint32_t max_running;        /* 0: 64 */
    uint32_t max_context;        /* 0: the model's */
    uint32_t max_prefill_tokens; /* 0: max_context */
    uint32_t n_score_arrays;     /* score arrays a page has; a request that needs more is refused; 0: 3 */
    int want_mass_bias;          /* 1: pages carry weight and bias (merge mass or attention) */
    kvf_cpu_path path;
    /* Lines to a person. KVF_LOG_INFO: what was created. KVF_LOG_WARN: that requests are preempted, at the 1st, 2nd, 4th, 8th...
     * of the engine, with the remedy. */
    kvf_log log;
    kvf_allocator allocator;
    /* 1: what a request gets depends on it, the model, and kv_dtype alone, to the bit: not on what runs beside it, chunk,
     * threads, or whether it was preempted. After a preemption all policies replay what they had generated. */
    int deterministic;
    int fast_activations; /* 1: see kvf_forward */
    /* Of the block manager; copied; NULL: it keeps none. Read it through kvf_engine_manager. */
    const kvf_profile_config *profile;
    int prefix_cache; /* 1: prompts that begin alike share their blocks, and keep them when they end */
    /* Memory for the column sums of cached prompts, beside kv_bytes; 0: a twentieth of kv_bytes, and of host_bytes where
     * cached prompts go there. */
    uint64_t snapshot_bytes;
    /* Where preempted requests go, to go on from there instead of being computed again, and cached prompts that are not in
     * use: memory for K and V beside kv_bytes; what comes back is to the bit what went. Copies to it run beside the step, in
     * a queue of the device. 0: none. */
    uint64_t host_bytes;
    uint32_t preempt; /* kvf_preempt */
    /* 0: with host_bytes and prefix_cache, cached prompts that the KV memory has no room for stay findable there; 1: not. */
    int no_prefix_offload;
    /* Where the pages of K, V and scores lie, on both tiers, and what copies them; NULL: kvf_device_cpu(). It outlives the
     * engine. The forward pass runs on the CPU: the device's memory must be cpu_access. */
    const kvf_device *device;
} kvf_engine_config;

typedef enum kvf_finish {
    KVF_FINISH_STOP = 0,   /* an end token or a stop string */
    KVF_FINISH_LENGTH = 1, /* max_tokens, the context, or the pool alone */
    KVF_FINISH_ABORTED = 2,
    KVF_FINISH_ERROR = 3 /* see error */
} kvf_finish;

/* What ended an answer with KVF_FINISH_LENGTH. */
typedef enum kvf_limit {
    KVF_LIMIT_NONE = 0, /* it ended otherwise */
    KVF_LIMIT_TOKENS = 1,
    KVF_LIMIT_CONTEXT = 2,
    KVF_LIMIT_MEMORY = 3 /* it had the pool to itself, and that was full: with more KV memory it goes on */
} kvf_limit;

/* What became of a request. Arrays live as long as the callback. */
typedef struct kvf_result {
    size_t struct_size;
    kvf_request request;
    void *user;
    kvf_finish finish;
    const char *error;      /* for KVF_FINISH_ERROR, else NULL */
    const uint32_t *tokens; /* generated, an end token included */
    const double *logprobs; /* [n_tokens] natural log of each token's probability */
    uint32_t n_tokens, n_prompt;
    const char *text; /* UTF-8 (broken bytes as U+FFFD), cut before a stop string; NUL terminated */
    size_t text_bytes;
    /* KV at the end */
    const kvf_layer_occupancy *layers; /* [n_layers] */
    const kvf_layer_size *sizes;       /* [n_layers] or NULL while unknown */
    const double *density;             /* [n_layers] or NULL */
    uint64_t held_tokens, full_tokens; /* slots over layers and groups; and with the full cache */
    kvf_policy_counts counts;
    uint64_t kept; /* slots held, over layers and KV heads */
    uint32_t n_preempted;
    double first_token_s, total_s; /* seconds since the submission, or the turn */
    /* The likeliest tokens at each step, at temperature 1, as the request asked for; else 0 and NULL. */
    uint32_t n_top_logprobs;
    const uint32_t *top_tokens; /* [n_tokens][n_top_logprobs] likeliest first, ties to the lower id; KVF_NO_TOKEN where
                                 * logits are NaN */
    const double *top_logprobs; /* [n_tokens][n_top_logprobs] natural logs */
    /* Of several answers: on_finish is called once for each. */
    uint32_t index, n_results;          /* which (best_of above n, beams: its rank), of how many */
    double score;                       /* mean log-probability; beams: sum / tokens ^ length_penalty */
    uint64_t own_blocks, shared_blocks; /* blocks at its end that nobody else holds; that a sibling holds too */
    uint32_t n_cached;                  /* prompt tokens that were found in the prefix cache */
    /* Summed over n_block_steps decode steps (what is computed again after a preemption counts once): blocks its tables held
     * while they attended, and blocks reserved for them: ceil((S + k) / block_size) a table, what it holds where it never evicts or
     * its size is not known yet. Of samples each counts what it shares. */
    uint64_t block_steps, reserved_block_steps;
    uint32_t n_block_steps;
    /* Where the head groups of a layer have sizes of their own (head_budget adaptive): [n_layers][n_groups]; else NULL. */
    const kvf_layer_size *group_sizes;
    uint32_t n_groups; /* head groups, block tables, of a layer */
    /* KVF_FINISH_STOP: the stop string of the request that ended it, NULL: an end token did. Of several that begin at the same
     * place the one given first. */
    const char *stop_string;
    uint64_t
        queue_steps; /* steps that ran between its submission, or the turn's, and its first; UINT64_MAX: no step was its */
    double start_s; /* seconds from then to its first step; NaN likewise */
    kvf_limit limit;
} kvf_result;

enum { KVF_TOP_LOGPROBS_MAX = 20, KVF_SAMPLES_MAX = 128 };

typedef struct kvf_generate {
    size_t struct_size;
    const uint32_t *tokens; /* the prompt; copied */
    uint32_t n_tokens;
    uint32_t
        max_tokens; /* most tokens to generate, within max_context; 0: the prompt is computed and the request ends */
    kvf_sampling sampling;
    const char *const *stop; /* stop strings; copied */
    uint32_t n_stop;
    int ignore_end; /* 1: end tokens do not end it */
    const uint32_t
        *forced; /* teacher forcing: the tokens to take instead of sampling; max_tokens of them; or NULL; copied */
    const kvf_policy_options *policy; /* copied; NULL: full */
    void *user;
    void (*on_token)(void *user, kvf_request request, uint32_t token, double logprob); /* or NULL */
    void (*on_finish)(void *user, const kvf_result *result);                           /* required */
    uint32_t
        n_top_logprobs; /* likeliest tokens of each step to report, at most KVF_TOP_LOGPROBS_MAX and the vocabulary */
    uint32_t n;         /* answers, at most KVF_SAMPLES_MAX; 0: 1 */
    uint32_t best_of;   /* samples they are the best of, n to KVF_SAMPLES_MAX; 0: n. No callback for tokens above n */
    uint32_t
        beam_width; /* n to max_running: beam search in place of sampling (temperature 0, no callback for tokens) */
    double length_penalty; /* with beam_width; 0 compares sums, 1 means */
    /* In place of on_token: index says which of n. Or NULL. */
    void (*on_sample_token)(void *user, uint32_t index, kvf_request request, uint32_t token, double logprob);
    const void *cache_salt; /* prompts of different salts never share: a tenant's name, an adapter's; copied; or NULL */
    uint32_t cache_salt_bytes;
    uint32_t
        prefix_end; /* tokens of the prompt that later ones will share, a multiple of block_size; 0: unknown. What waits
                          * together is compared in any case */
    int no_cache_hits; /* 1: the prompt is computed anew, and can be found afterwards */
    /* [n], each with its struct_size, copied; or NULL. Sample i goes by the i-th in place of policy: the prompt is computed once,
     * with what all of them need of the attention's mass, and forked before it is compressed. Each sample is then what a
     * request of its own with that policy would be; forced tokens are all samples'. Its budgets cannot be changed. Not with
     * best_of above n, nor beams. */
    const kvf_policy_options *sample_policies;
    /* 1: a dialogue. When its answer has ended (stop, length) the request stays open, with what it holds, for the next turn
     * (kvf_engine_extend); kvf_engine_abort closes it then, without a callback. on_finish is called for each answer. What it holds
     * is the first that others get who need it, and is then computed again with the next turn. For one answer only. */
    int keep_open;
    /* The logits of each step [n_vocab], before its token is drawn or forced; step counts from 0. Not for best_of above n, nor
     * beams. Or NULL. */
    void (*on_logits)(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits);
    const char *label; /* what the log calls the request, in place of its number; copied; or NULL */
} kvf_generate;

typedef struct kvf_engine_stats {
    size_t struct_size;
    uint64_t n_steps, n_prompt_tokens, n_decode_tokens; /* tokens: computed for the first time */
    uint64_t n_preempted, n_finished;
    double forward_s, prefill_s, decode_s, policy_s; /* seconds; a mixed step's time is split by tokens */
    /* n_running: hold a sequence now, open ones between turns not counted; n_waiting: in the queue, on the host too. Samples count
     * each. */
    uint32_t n_running, n_waiting, n_running_max;
    kvf_occupancy occupancy;
    uint64_t full_bytes; /* what all that held tables in the last step would hold with the full cache */
    uint64_t full_bytes_max;
    uint64_t block_bytes;
    uint32_t n_layers;
    const kvf_layer_occupancy *layers;    /* [n_layers], of now */
    uint64_t merged, dropped, kept;       /* of finished and running requests */
    kvf_prefix_stats prefix;              /* zeros without a prefix cache */
    uint64_t n_swapped_out, n_swapped_in; /* requests that went to the host (of n_preempted), and that came back */
    uint64_t host_bytes_max;              /* most bytes of K and V that requests had on the host at once */
    uint64_t n_copy_waits;                /* copies to the host that were not done when the step needed them to be */
    uint64_t n_recomputed_tokens; /* computed before, and again after a preemption: not in n_prompt_, n_decode_tokens */
    double recompute_s;           /* their share of the time: not in prefill_s, decode_s */
    uint64_t n_failed_steps;      /* steps that failed and were taken back */
} kvf_engine_stats;

/** A config with struct_size set and fp16 pages.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API kvf_engine_config kvf_engine_config_default(void);

/** Creates an engine: takes the KV memory, starts its threads.
 *  @param config model is required and must outlive the engine. @param out the engine. @param err detail, or NULL.
 *  @own the caller, kvf_engine_destroy. @threads one at a time.
 *  @errors KVF_E_INVALID (the text says what kv_bytes would do when it is too small; a device without a function), KVF_E_NO_MEMORY,
 *  KVF_E_UNSUPPORTED (a device whose memory the CPU cannot reach), what the device fails with. @cost allocates kv_bytes and buffers. */
KVF_API KVF_CHECK kvf_status kvf_engine_create(const kvf_engine_config *config, kvf_engine **out, kvf_error *err);

/** Frees it; requests still there end as aborted, with their callbacks. NULL is allowed.
 *  @param engine an engine. @own takes it. @threads none may use it. @errors none. @cost joins the threads, frees. */
KVF_API void kvf_engine_destroy(kvf_engine *engine);

/** Queues a request.
 *  @param engine an engine. @param generate see above. @param out its number, or NULL. @param err names the thing, the value and the remedy, or NULL.
 *  @own nothing is kept but user. @threads as the engine; also from within a callback.
 *  @errors KVF_E_INVALID (no token, an id outside the vocabulary, options, a stop string of no bytes, n_top_logprobs, n, best_of,
 *  beam_width, sample_policies), KVF_E_NEVER_FITS, KVF_E_LIMIT, KVF_E_NO_MEMORY, what the device has failed with in a step. on_finish is
 *  not called on failure.
 *  @cost O(tokens * samples); allocates. */
KVF_API KVF_CHECK kvf_status kvf_engine_submit(kvf_engine *engine, const kvf_generate *generate, kvf_request *out,
                                               kvf_error *err);

/* A later part of a prompt, and the answer to it. */
typedef struct kvf_turn {
    size_t struct_size;
    const uint32_t *tokens; /* what follows the answer before; copied */
    uint32_t n_tokens;
    uint32_t max_tokens;    /* 1 or more */
    const uint32_t *forced; /* as kvf_generate.forced; max_tokens of them; or NULL; copied */
} kvf_turn;

/** Gives an open request its next turn: behind the last token of its answer, which is decoded first, tokens are appended in
 *  chunks over what the tables keep, at the positions that follow; at their end the policy compacts to the budget of all
 *  prompt tokens so far, under the layers' weights of the first prompt. Then it answers as before: the result's tokens and
 *  text are this answer's, n_prompt counts all prompt tokens, times begin here. A request that lost what it held computes
 *  all of it again in the same order, with the same result (to the bit with `deterministic`).
 *  @param engine an engine. @param request an open one whose answer has ended. @param turn see above.
 *  @param err names the thing, the value and the remedy, or NULL. @own nothing is kept. @threads as the engine; also from within
 *  on_token and on_finish. @errors KVF_E_NOT_FOUND, KVF_E_STATE (its answer has not ended, or it was not kept open), KVF_E_INVALID,
 *  KVF_E_NEVER_FITS (the context, max_prefill_tokens), KVF_E_NO_MEMORY. Nothing changes on failure.
 *  @cost O(all its tokens); allocates. */
KVF_API KVF_CHECK kvf_status kvf_engine_extend(kvf_engine *engine, kvf_request request, const kvf_turn *turn,
                                               kvf_error *err);

/** Runs one step. A step that fails is taken back: all that ran goes back to the queue and computes again what it had, so that the
 *  next step goes on as if this one had not been. A failing request that is alone to blame ends with the error after its third failing
 *  step in a row. Go on calling it while *more is 1.
 *  @param engine an engine. @param more 1 while requests are waiting or running (open ones between turns do neither), set in any case; or NULL.
 *  @param err detail, or NULL. @own nothing. @threads as the engine. @errors KVF_E_INVALID, KVF_E_NO_MEMORY (the BLAS), what a policy's
 *  function fails with, KVF_E_CORRUPT; what the device fails with: then all requests have ended with that error, and each later step and
 *  submission fails alike (the engine can only be destroyed). A request's own fault (a NaN among its logits or hidden states too) ends
 *  that request alone. @cost one forward pass. */
KVF_API KVF_CHECK kvf_status kvf_engine_step(kvf_engine *engine, int *more, kvf_error *err);

/** Changes the budget of a request, waiting or running, for all of its samples or beams that live. A tighter one compacts the request before its next token; a looser one
 *  lets it grow, if the blocks can be promised. Waiting, or in its prompt, it goes on as if submitted so. A request whose policy took
 *  no attention mass so far (rho 1 without budget_may_change) cannot be tightened once it runs. Sizes are computed anew even when the
 *  budget is the same, and may then differ from those of the prompt's end.
 *  @param engine an engine. @param request a live one. @param rho, budget_tokens as the policy's options of that name.
 *  @param err names the thing, the value and the remedy, or NULL. @own nothing. @threads as the engine; also from within a callback.
 *  @errors KVF_E_NOT_FOUND, KVF_E_INVALID (range; policy full), KVF_E_STATE (no mass; sample_policies), KVF_E_NEVER_FITS, KVF_E_NO_BLOCKS (a looser
 *  budget for which there is no room now). Nothing changes on failure. @cost O(tables), and the compaction in the next step. */
KVF_API KVF_CHECK kvf_status kvf_engine_set_budget(kvf_engine *engine, kvf_request request, double rho,
                                                   uint32_t budget_tokens, kvf_error *err);

/** kvf_engine_set_budget by memory, as the policy's option budget_bytes: K and V of a sequence, over all layers.
 *  @param engine an engine. @param request a live one. @param budget_bytes as many tokens as fit, the same budget in each layer.
 *  @param err names the thing, the value and the remedy, or NULL. @own nothing. @threads as kvf_engine_set_budget.
 *  @errors those of kvf_engine_set_budget; KVF_E_INVALID too when that is less than KVF_MIN_BUDGET_TOKENS a layer.
 *  @cost as kvf_engine_set_budget. */
KVF_API KVF_CHECK kvf_status kvf_engine_set_budget_bytes(kvf_engine *engine, kvf_request request, uint64_t budget_bytes,
                                                         kvf_error *err);

/** Ends a request now, all of its samples; on_finish is called with KVF_FINISH_ABORTED for each that had not ended, before
 *  this returns. An open one between two turns is closed.
 *  @param engine an engine. @param request a live one. @own nothing. @threads as the engine; also from within a callback
 *  (then at the end of the step). @errors KVF_E_NOT_FOUND. @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_engine_abort(kvf_engine *engine, kvf_request request);

/** Ends one sample of a request whose answers are its samples (no best_of above n, no beams); the others go on.
 *  @param engine an engine. @param request a live one. @param index of the sample. @own nothing. @threads as the engine; also
 *  from within a callback (then at the end of the step). @errors KVF_E_NOT_FOUND (it has ended), KVF_E_STATE (its samples are
 *  ranked). @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_engine_abort_sample(kvf_engine *engine, kvf_request request, uint32_t index);

/** Figures of now.
 *  @param engine an engine. @param out struct_size set by the caller. @own layers is the engine's. @threads as the engine.
 *  @errors KVF_E_INVALID. @cost O(sequences * n_layers). */
KVF_API KVF_CHECK kvf_status kvf_engine_get_stats(kvf_engine *engine, kvf_engine_stats *out);

/** The positions one KV head of a running request holds, ascending.
 *  @param engine an engine. @param request running. @param layer layer. @param kv_head head. @param pos result. @param capacity of it.
 *  @param n how many there are. @own the caller's buffer. @threads as the engine, also from within on_token.
 *  @errors KVF_E_NOT_FOUND, KVF_E_INVALID, KVF_E_LIMIT. @cost O(slots log slots). */
KVF_API KVF_CHECK kvf_status kvf_engine_positions(kvf_engine *engine, kvf_request request, uint32_t layer,
                                                  uint32_t kv_head, uint32_t *pos, uint32_t capacity, uint32_t *n);

/** The engine's block manager (for audits) and policy state (for tau and sizes).
 *  @param engine an engine. @param policies set to the policy state, or NULL. @own the engine's; read only. @threads as the engine.
 *  @errors none. @cost O(1). */
KVF_API const kvf_manager *kvf_engine_manager(const kvf_engine *engine, const kvf_policy_state **policies);

/** The sequence index a running request has in both, UINT32_MAX when it is not running.
 *  @param engine an engine. @param request a request. @own nothing. @threads as the engine. @errors none. @cost O(1). */
KVF_API uint32_t kvf_engine_seq_index(const kvf_engine *engine, kvf_request request);

/** The same for one sample of a request: in on_logits that of the policy which gave the logits.
 *  @param engine an engine. @param request a request. @param sample its index. @own nothing. @threads as the engine, also from
 *  within a callback. @errors none: UINT32_MAX when it is not running, and for beams. @cost O(requests). */
KVF_API uint32_t kvf_engine_sample_seq_index(const kvf_engine *engine, kvf_request request, uint32_t sample);

/* ---- Cached prompts in files ---------------------------------------------------------------- */

typedef struct kvf_prompt_file {
    size_t struct_size;
    const char *path;
    const void
        *identity; /* of the model: up to 64 bytes that differ whenever the weights do; a file is read with those only
                           * that it was written with */
    uint32_t identity_bytes;
    uint32_t salt_bytes;
    const void *salt; /* kvf_generate.cache_salt */
} kvf_prompt_file;

/** Saves what the prefix cache has of a prompt: K and V, and the column sums where there is a snapshot (then up to the deepest
 *  one, so that any policy can go on from it). The file is written beside its name and takes its place when it is whole.
 *  @param engine an engine with a prefix cache. @param file where to. @param tokens the prompt. @param n_tokens its length.
 *  @param n_saved tokens in the file, or NULL. @param err names file, value and remedy, or NULL.
 *  @own nothing is kept. @threads as the engine, outside callbacks.
 *  @errors KVF_E_NOT_FOUND (no block of it is cached), KVF_E_IO (a full disk too: what was there before stays), KVF_E_STATE (no
 *  prefix cache), KVF_E_INVALID, KVF_E_LIMIT, KVF_E_NO_MEMORY. @cost writes the bytes. Counts as a query of the cache. */
KVF_API KVF_CHECK kvf_status kvf_engine_prompt_save(kvf_engine *engine, const kvf_prompt_file *file,
                                                    const uint32_t *tokens, uint32_t n_tokens, uint32_t *n_saved,
                                                    kvf_error *err);

/** Puts a saved prompt into the prefix cache.
 *  @param engine an engine with a prefix cache. @param file which. @param n_loaded its tokens, or NULL.
 *  @param err names file, value and remedy, or NULL. @own nothing is kept. @threads as the engine, outside callbacks.
 *  @errors KVF_E_NOT_FOUND (no such file), KVF_E_FORMAT (foreign, torn, damaged, of another model, page type or salt, made
 *  with other fast_activations, or without deterministic where the engine has it),
 *  KVF_E_UNSUPPORTED (version), KVF_E_NEVER_FITS (the context), KVF_E_NO_BLOCKS, KVF_E_LIMIT, KVF_E_IO, KVF_E_STATE, KVF_E_INVALID,
 *  KVF_E_NO_MEMORY; nothing has changed then. @cost reads the file twice, from memory the second time. */
KVF_API KVF_CHECK kvf_status kvf_engine_prompt_load(kvf_engine *engine, const kvf_prompt_file *file, uint32_t *n_loaded,
                                                    kvf_error *err);

#ifdef __cplusplus
}
#endif
#endif
