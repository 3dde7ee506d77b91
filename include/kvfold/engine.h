/* kvfold/engine.h: batch generation with a compressed KV cache, for one rank, on the CPU.
 * Each step schedules requests, runs the forward pass, compresses the cache by the requests' policies, and samples tokens.
 * Results arrive through callbacks. Part of libkvfold_engine.
 *
 * Simple use
 *     #include <stdio.h>
 *     static void print(void *file, const kvf_result *result) { fprintf(file, "%s\n", result->text); }
 *     kvf_status answer(const kvf_model *model, const uint32_t *tokens, uint32_t n_tokens, kvf_error *err) {
 *         kvf_engine *engine = NULL;
 *         kvf_engine_config config;
 *         kvf_engine_config_init(&config, sizeof config);
 *         config.model = model;
 *         kvf_generate g = {.struct_size = sizeof g, .tokens = tokens, .n_tokens = n_tokens, .max_tokens = 64};
 *         g.user = stdout, g.on_finish = print; // g.policy = &options compresses the cache: see policy.h
 *         kvf_status status = kvf_engine_create(&config, &engine, err);
 *         if (!status) status = kvf_engine_submit(engine, &g, NULL, err); // any number, at any time
 *         for (int more = 1; !status && more;) status = kvf_engine_step(engine, &more, err);
 *         kvf_engine_destroy(engine);
 *         return status;
 *     }
 *
 * Rules
 *     Calls on one engine are made one at a time ("as the engine"). Callbacks run in the thread that called kvf_engine_step,
 *     kvf_engine_abort or kvf_engine_destroy. What kvf_generate points to is copied; pointers in kvf_result are valid during
 *     the callback.
 *
 * Several answers to one prompt (n, best_of, beam_width)
 *     The prompt is computed once and then forked. Samples and beams share its blocks; a layer gets blocks of its own at the
 *     first eviction of that sample.
 *     n           n samples. Sample i draws with seed + i, and is the same as a separate request with that seed. It ends on its
 *                 own. With sample_policies each sample has its own policy; the prompt is then forked before anything is
 *                 evicted.
 *     best_of     best_of samples are drawn. The n with the best mean log-probability are the answers, all delivered at the end.
 *     beam_width  Beam search with W = beam_width hypotheses. At each step all continuations of all hypotheses are ranked by
 *                 the sum of their log-probabilities (temperature 1; on ties the earlier hypothesis, then the lower id comes
 *                 first). A continuation that ends (end token, stop string) is finished if it ranks among the first W; the
 *                 best of the others become the next W hypotheses. The score of a hypothesis is its sum / tokens ^
 *                 length_penalty, its end token counted. The search stops when W are finished and the best running one scores
 *                 no more than the worst of them, or at max_tokens, where the running ones count too. The n best are the
 *                 answers, best first.
 */
#ifndef KVFOLD_ENGINE_H
#define KVFOLD_ENGINE_H

#include "kvfold/device.h"
#include "kvfold/model.h"
#include "kvfold/policy.h"
#include "kvfold/profile.h"
#include "kvfold/runner.h"
#include "kvfold/scheduler.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_engine kvf_engine;

typedef struct kvf_engine_config {
    size_t struct_size;
    const kvf_model *model;
    uint32_t n_threads;          /* 0: one for each CPU */
    kvf_dtype kv_dtype;          /* of the pages; 0 means KVF_F32, kvf_engine_config_init sets KVF_F16 */
    uint32_t block_size;         /* 0: 16 */
    uint32_t heads_per_group;    /* 0: all KV heads */
    uint32_t chunk;              /* tokens of a prefill chunk; 0: 512 */
    uint64_t kv_bytes;           /* memory for K and V; 0: 512 MiB */
    uint32_t max_running;        /* sequences in a step; 0: 64 */
    uint32_t max_context;        /* positions of a request; 0: the model's */
    uint32_t max_prefill_tokens; /* see kvf_sched_config; 0: max_context */
    uint32_t n_score_arrays;     /* of a score page; a request that needs more (kvf_policy_n_arrays) is refused; 0: 3 */
    int want_mass_bias;          /* 1: pages have weight and bias, for merge mass and attention */
    kvf_cpu_path path;
    /* Messages for a person. KVF_LOG_INFO: what was created. KVF_LOG_WARN: requests are preempted (logged at the 1st, 2nd, 4th,
     * 8th... preemption of the engine), with the remedy. */
    kvf_log log;
    kvf_allocator allocator;
    /* 1: a request's result depends only on the request, the model and kv_dtype, to the bit. Other requests, chunk, threads and
     * preemptions do not change it. After a preemption every policy replays the generated tokens. */
    int deterministic;
    int fast_activations; /* see kvf_forward */
    /* The block manager keeps a profile (profile.h); copied; NULL: none. Read it through kvf_engine_manager. */
    const kvf_profile_config *profile;
    int prefix_cache; /* 1: equal beginnings of prompts share blocks, which stay cached after the requests have ended */
    /* Memory for the column sums and the like of cached prompts (snapshots), in addition to kv_bytes. 0: a twentieth of kv_bytes, plus a
     * twentieth of host_bytes if cached prompts are swapped there. */
    uint64_t snapshot_bytes;
    /* The host tier: memory for K and V, in addition to kv_bytes. Preempted requests are swapped out to it instead of being
     * recomputed, and unused cached prompts are moved there. What is swapped in again has the same bits. Copies to the host
     * run during the step, in a stream of the device. 0: no host tier. */
    uint64_t host_bytes;
    uint32_t preempt; /* kvf_preempt */
    /* With host_bytes and prefix_cache: 0: cached prompts that the KV memory has no room for are kept on the host; 1: they are
     * evicted. */
    int no_prefix_offload;
    /* With model: the device that allocates the pages of K, V and scores, on both tiers, and copies them; NULL: kvf_device_cpu(). It
     * must outlive the engine. The forward pass runs on the CPU: the device's memory must be cpu_access. */
    const kvf_device *device;
    /* What computes, in place of model (runner.h); the table is copied, its ctx must outlive the engine. */
    const kvf_runner *runner;
    const kvf_tokenizer *tokenizer; /* with runner: text, stop strings and end tokens; NULL: answers are tokens alone */
    /* For score probe: the probe of this model, which gives every token a score of its own; pages then keep it. It must outlive
     * the engine. NULL: score probe is refused. */
    const kvf_probe *probe;
    int want_scores;   /* 1: pages keep scores that a runner of your own writes (kvf_pages.score); set by probe */
    uint32_t order;    /* kvf_order: in which order requests are admitted, and whose blocks others take last */
    uint64_t patience; /* see kvf_sched_config; with KVF_ORDER_DEADLINE in nanoseconds */
    /* For score repeat: what stands between a prompt and each piece of its repetition, at most KVF_MAX_INSTRUCTION_TOKENS; copied.
     * NULL: the tokens of KVF_REPEAT_INSTRUCTION, and none without a tokenizer. */
    const uint32_t *instruction;
    uint32_t n_instruction;
} kvf_engine_config;

typedef enum kvf_finish {
    KVF_FINISH_STOP = 0,   /* an end token or a stop string */
    KVF_FINISH_LENGTH = 1, /* max_tokens, the context, or a full pool: see limit */
    KVF_FINISH_ABORTED = 2,
    KVF_FINISH_ERROR = 3 /* see error */
} kvf_finish;

/* What ended an answer with KVF_FINISH_LENGTH. */
typedef enum kvf_limit {
    KVF_LIMIT_NONE = 0, /* it ended in another way */
    KVF_LIMIT_TOKENS = 1,
    KVF_LIMIT_CONTEXT = 2,
    KVF_LIMIT_MEMORY = 3 /* the pool was full although no other request ran: it needs more KV memory */
} kvf_limit;

/* The result of a request, or of one of its answers. Arrays are valid during the callback. */
typedef struct kvf_result {
    size_t struct_size;
    kvf_request request;
    void *user;
    kvf_finish finish;
    const char *error;      /* with KVF_FINISH_ERROR, else NULL */
    const uint32_t *tokens; /* [n_tokens] generated, including the end token; never NULL */
    const double *logprobs; /* [n_tokens] natural log of each token's probability */
    uint32_t n_tokens, n_prompt;
    const char *text; /* UTF-8 (broken bytes as U+FFFD), cut before a stop string; NUL terminated */
    size_t text_bytes;
    /* The cache when the answer ended. */
    const kvf_layer_occupancy *layers; /* [n_layers], layer_bytes apart (KVF_AT) */
    const kvf_layer_size *sizes;       /* [n_layers] or NULL while unknown */
    const double *density;             /* [n_layers] or NULL */
    uint64_t held_tokens, full_tokens; /* slots held, over layers and groups; the same with the full cache */
    uint64_t merged, dropped;          /* see kvf_policy_counts */
    uint64_t kept;                     /* slots held, over layers and KV heads */
    uint32_t n_preempted;
    double first_token_s, total_s; /* seconds since kvf_engine_submit or kvf_engine_extend */
    /* The likeliest tokens of each step, at temperature 1, if the request asked for them; else 0 and NULL. */
    uint32_t n_top_logprobs;
    const uint32_t *top_tokens; /* [n_tokens][n_top_logprobs] likeliest first, ties to the lower id; KVF_NO_TOKEN where
                                 * logits are NaN */
    const double *top_logprobs; /* [n_tokens][n_top_logprobs] natural logs */
    /* Several answers: on_finish is called once for each. */
    uint32_t index, n_results;          /* which answer (best_of above n, beams: its rank), of how many */
    double score;                       /* mean log-probability; beams: sum / tokens ^ length_penalty */
    uint64_t own_blocks, shared_blocks; /* blocks at its end that only it holds; that other answers hold too */
    uint32_t n_cached;                  /* prompt tokens found in the prefix cache */
    /* Sums over n_block_steps decode steps; a step that is recomputed after a preemption counts once. block_steps: blocks that the
     * tables held during attention. reserved_block_steps: blocks reserved for them, ceil((S + k) / block_size) a table; a table that
     * never evicts, or whose size is not known yet, counts the blocks it holds. A shared block counts for every sample. */
    uint64_t block_steps, reserved_block_steps;
    uint32_t n_block_steps;
    /* Sizes of the head groups, [n_layers][n_groups], with head_budget adaptive; else NULL. */
    const kvf_layer_size *group_sizes;
    uint32_t n_groups; /* head groups, and so block tables, of a layer */
    /* With KVF_FINISH_STOP: the stop string that ended the answer; NULL: an end token did. If several begin at the same place, the
     * first in kvf_generate.stop. */
    const char *stop_string;
    /* Steps, and seconds, from kvf_engine_submit or kvf_engine_extend to its first step; it never ran: UINT64_MAX, NaN. */
    uint64_t queue_steps;
    double start_s;
    kvf_limit limit;
    size_t layer_bytes;      /* stride of layers */
    const kvf_error *detail; /* of error, with its fields; else NULL */
} kvf_result;

enum { KVF_TOP_LOGPROBS_MAX = 20, KVF_SAMPLES_MAX = 128 };

typedef struct kvf_generate {
    size_t struct_size;
    const uint32_t *tokens; /* the prompt; copied; or NULL, and give_tokens */
    uint32_t n_tokens;
    uint32_t max_tokens; /* most tokens to generate, within max_context; 0: it ends when its prompt is computed */
    kvf_sampling sampling;
    const char *const *stop; /* stop strings; copied */
    uint32_t n_stop;
    int ignore_end;         /* 1: end tokens do not end it */
    const uint32_t *forced; /* teacher forcing: [max_tokens] tokens to take instead of sampling; copied; or NULL */
    const kvf_policy_options *policy; /* compression; copied; NULL: policy full */
    void *user;
    void (*on_token)(void *user, kvf_request request, uint32_t token, double logprob); /* or NULL */
    void (*on_finish)(void *user, const kvf_result *result);                           /* required */
    uint32_t n_top_logprobs; /* likeliest tokens to report for each step, at most KVF_TOP_LOGPROBS_MAX and n_vocab */
    uint32_t n;              /* answers, at most KVF_SAMPLES_MAX; 0: 1 */
    uint32_t best_of;        /* samples to draw, n to KVF_SAMPLES_MAX; 0: n. Above n: no callback for tokens */
    uint32_t beam_width; /* n to max_running: beam search, temperature must be 0, no callback for tokens; 0: sampling */
    double length_penalty; /* for beam_width: 0 ranks by the sum of log-probabilities, 1 by their mean */
    /* Called instead of on_token; index says which of the n answers the token belongs to. Or NULL. */
    void (*on_sample_token)(void *user, uint32_t index, kvf_request request, uint32_t token, double logprob);
    const void *cache_salt; /* prompts with different salts share no blocks (a tenant's name); copied; or NULL */
    uint32_t cache_salt_bytes;
    /* The first tokens that later prompts will share, a multiple of block_size; 0: unknown. Prompts that wait at the same time are
     * compared with each other in any case. */
    uint32_t prefix_end;
    int no_cache_hits; /* 1: do not use the prefix cache for this prompt; it is stored there all the same */
    /* [n] or NULL: sample i uses the i-th instead of policy; each has its struct_size; copied. The prompt is computed once, with the
     * sums of attention that all of them need, and forked before it is compressed. Each sample is then the same as a separate
     * request with that policy. All samples take the same forced tokens. Budgets cannot be changed later. Not with best_of above
     * n, nor with beams. */
    const kvf_policy_options *sample_policies;
    /* 1: a dialogue. When an answer has ended (stop, length), the request stays open with its blocks, and kvf_engine_extend gives it
     * the next turn. on_finish is called for each answer. Between turns kvf_engine_abort closes it without a callback. Other requests
     * that need room take an open request's blocks first; its next turn then recomputes them. For one answer only. */
    int keep_open;
    /* Called with the logits of each step, [n_vocab], before its token is drawn or forced; step counts from 0. Not with best_of
     * above n, nor with beams. Or NULL. */
    void (*on_logits)(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits);
    const char *label; /* the request's name in log messages, instead of its number; copied; or NULL */
    int32_t priority;  /* see kvf_sched_request */
    double deadline_s; /* for KVF_ORDER_DEADLINE: seconds from the submission; 0: none */
    /* In place of tokens and forced, so that a request in the queue holds none: called once, in a step that may be the request's first,
     * to write n tokens. These are the n_tokens of the prompt, and with given_answer 1 behind them the answer, which are then
     * forced: max_tokens, or as many as the context has room for. A status other than KVF_OK, or an id outside the vocabulary, ends
     * the request with an error. For one answer only. Or NULL. */
    kvf_status (*give_tokens)(void *user, uint32_t *tokens, uint32_t n);
    int given_answer;
} kvf_generate;

typedef struct kvf_engine_stats {
    size_t struct_size;
    uint64_t n_steps, n_prompt_tokens, n_decode_tokens; /* tokens that were computed for the first time */
    uint64_t n_preempted, n_finished;
    double forward_s, prefill_s, decode_s, policy_s; /* seconds; a mixed step's time is split by tokens */
    /* n_running: requests that hold a sequence now, without open ones between turns. n_waiting: requests in the queue, swapped ones
     * included. Each sample counts. */
    uint32_t n_running, n_waiting, n_running_max;
    union { /* the room lets kvf_occupancy grow in its place */
        kvf_occupancy occupancy;
        uint64_t occupancy_room[64];
    };
    uint64_t full_bytes; /* bytes that the requests with tables in the last step would need with the full cache */
    uint64_t full_bytes_max;
    uint64_t block_bytes;
    uint32_t n_layers;
    const kvf_layer_occupancy *layers; /* [n_layers] layer_bytes apart (KVF_AT), now */
    uint64_t merged, dropped, kept;    /* over finished and running requests */
    union {
        kvf_prefix_stats prefix; /* zeros without a prefix cache */
        uint64_t prefix_room[64];
    };
    uint64_t n_swapped_out, n_swapped_in; /* requests swapped to the host (counted in n_preempted too), and back */
    uint64_t host_bytes_max;              /* most bytes of K and V that requests had on the host at once */
    uint64_t n_copy_waits;                /* copies to the host that a step had to wait for */
    uint64_t n_recomputed_tokens; /* tokens recomputed after a preemption: not in n_prompt_tokens, n_decode_tokens */
    double recompute_s;           /* their share of the time: not in prefill_s, decode_s */
    uint64_t n_failed_steps;      /* steps that failed and were undone */
    size_t layer_bytes;           /* stride of layers */
    /* Tokens of the repetitions of prompts, with their instructions, each time that they are computed: in none of the other counts. Their
     * share of the time, likewise. */
    uint64_t n_repeat_tokens;
    double repeat_s;
} kvf_engine_stats;

/* Memory of an engine, in bytes. All but request_bytes is reserved at creation and stays the same. With the default allocator memory
 * becomes resident when it is first written, so what is never used costs only addresses. */
typedef struct kvf_engine_memory {
    size_t struct_size;
    uint64_t reserved_bytes;             /* the sum of all but request_bytes */
    uint64_t kv_bytes;                   /* pages: K, V, and what slots have beside them, and the score pages */
    uint64_t host_bytes, snapshot_bytes; /* the host tier; column sums of cached prompts */
    uint64_t manager_bytes, scheduler_bytes;
    uint64_t policy_bytes;  /* policies' state of max_running sequences of max_context tokens, and their work space */
    uint64_t runner_bytes;  /* activations, accumulators, logits; 0 for a runner of the caller's own */
    uint64_t engine_bytes;  /* its own buffers */
    uint64_t request_bytes; /* now: requests that wait or run, with their prompts and answers */
} kvf_engine_memory;

/** Sets struct_size, and fp16 pages; everything else becomes 0.
 *  @param config filled; NULL does nothing. @param struct_size sizeof *config: no byte beyond it is written.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API void kvf_engine_config_init(kvf_engine_config *config, size_t struct_size);

/** Creates an engine: allocates the KV memory and starts its threads.
 *  @param config model is required and must outlive the engine. @param out the engine. @param err detail, or NULL.
 *  @own the caller, kvf_engine_destroy. @threads one at a time.
 *  @errors KVF_E_INVALID (kv_bytes too small: the text says how much is enough; a device that lacks a function), KVF_E_NO_MEMORY,
 *  KVF_E_UNSUPPORTED (a device whose memory the CPU cannot reach), the device's own errors. @cost allocates kv_bytes and buffers. */
KVF_API KVF_CHECK kvf_status kvf_engine_create(const kvf_engine_config *config, kvf_engine **out, kvf_error *err);

/** Frees it. Requests that have not ended are aborted, with their callbacks. NULL is allowed.
 *  @param engine an engine. @own takes it. @threads none may use it. @errors none. @cost joins the threads, frees. */
KVF_API void kvf_engine_destroy(kvf_engine *engine);

/** Queues a request.
 *  @param engine an engine. @param generate see kvf_generate. @param out the request's handle, or NULL. @param err names the thing, the value and the
 *  remedy, or NULL.
 *  @own nothing is kept but user. @threads as the engine; also from within a callback.
 *  @errors KVF_E_INVALID (no token, an id outside the vocabulary, options, a stop string of no bytes, n_top_logprobs, n, best_of,
 *  beam_width, sample_policies, priority, deadline_s), KVF_E_NEVER_FITS, KVF_E_LIMIT, KVF_E_NO_MEMORY, the device's error if it has failed in a step.
 *  on_finish is not called on failure.
 *  @cost O(tokens * samples); allocates. */
KVF_API KVF_CHECK kvf_status kvf_engine_submit(kvf_engine *engine, const kvf_generate *generate, kvf_request *out,
                                               kvf_error *err);

/* The next turn of a dialogue: more prompt tokens, and the answer to them. */
typedef struct kvf_turn {
    size_t struct_size;
    const uint32_t *tokens; /* prompt tokens that follow the previous answer; copied */
    uint32_t n_tokens;
    uint32_t max_tokens;    /* 1 or more */
    const uint32_t *forced; /* [max_tokens] as kvf_generate.forced; copied; or NULL */
} kvf_turn;

/** Gives an open request its next turn. First the last token of the previous answer is decoded. Then the turn's tokens are computed
 *  in chunks, at the next positions, with attention to the slots that the tables have kept. At their end the policy compacts the
 *  tables to the budget of all prompt tokens so far, with the layers' weights of the first prompt. Then the next answer is generated.
 *  In its result tokens and text are of this answer only, n_prompt counts all prompt tokens, and times count from here. If the
 *  request's blocks were taken by others meanwhile, everything is recomputed in the same order, with the same result (to the bit with
 *  `deterministic`).
 *  @param engine an engine. @param request an open one whose answer has ended. @param turn see kvf_turn.
 *  @param err names the thing, the value and the remedy, or NULL. @own nothing is kept. @threads as the engine; also from within
 *  on_token and on_finish. @errors KVF_E_NOT_FOUND, KVF_E_STATE (its answer has not ended, or it was not kept open), KVF_E_INVALID,
 *  KVF_E_NEVER_FITS (the context, max_prefill_tokens), KVF_E_NO_MEMORY. Nothing changes on failure.
 *  @cost O(all its tokens); allocates. */
KVF_API KVF_CHECK kvf_status kvf_engine_extend(kvf_engine *engine, kvf_request request, const kvf_turn *turn,
                                               kvf_error *err);

/** Runs one step. Call it while *more is 1, also after a failure. A step that fails is undone: its requests go back to the queue
 *  and are recomputed, and the next step continues as if this one had not been run. If the failure can be traced to one request,
 *  that request ends with the error after its third failing step in a row.
 *  @param engine an engine. @param more 1 while requests are waiting or running (open ones between turns do not count); set on failure
 *  too; or NULL. @param err detail, or NULL. @own nothing. @threads as the engine.
 *  @errors KVF_E_INVALID, KVF_E_NO_MEMORY (the BLAS), KVF_E_CORRUPT, the errors of a policy's functions and of the device. After an error
 *  of the device all requests have ended with it, and every later step and submission fails with it too: the engine can only be
 *  destroyed. A fault of one request (also NaN in its logits or hidden states) ends only that request, and is no error of the step.
 *  @cost one forward pass. */
KVF_API KVF_CHECK kvf_status kvf_engine_step(kvf_engine *engine, int *more, kvf_error *err);

/** Changes the budget of a request that waits or runs, with all of its samples or beams that have not ended. With a lower budget the
 *  request is compacted before its next token; with a higher one it may grow, if the blocks can be reserved. A request that waits or
 *  is in its prompt continues as if it had been submitted with the new budget. A running request that was not observed (rho 1 without
 *  budget_may_change) cannot get a lower budget. Sizes are computed again even if the budget is the same, and may then differ
 *  from those at the prompt's end.
 *  @param engine an engine. @param request a live one. @param rho, budget_tokens as the policy's options of that name.
 *  @param err names the thing, the value and the remedy, or NULL. @own nothing. @threads as the engine; also from within a callback.
 *  @errors KVF_E_NOT_FOUND, KVF_E_INVALID (range; policy full), KVF_E_STATE (not observed; sample_policies), KVF_E_NEVER_FITS,
 *  KVF_E_NO_BLOCKS (a higher budget for which there is no room now). Nothing changes on failure.
 *  @cost O(tables), and the compaction in the next step. */
KVF_API KVF_CHECK kvf_status kvf_engine_set_budget(kvf_engine *engine, kvf_request request, double rho,
                                                   uint32_t budget_tokens, kvf_error *err);

/** kvf_engine_set_budget in bytes, as the policy's option budget_bytes.
 *  @param engine an engine. @param request a live one. @param budget_bytes K and V of a sequence over all layers; every layer has the
 *  same budget.
 *  @param err names the thing, the value and the remedy, or NULL. @own nothing. @threads as kvf_engine_set_budget.
 *  @errors those of kvf_engine_set_budget; KVF_E_INVALID also when the bytes hold fewer than KVF_MIN_BUDGET_TOKENS a layer.
 *  @cost as kvf_engine_set_budget. */
KVF_API KVF_CHECK kvf_status kvf_engine_set_budget_bytes(kvf_engine *engine, kvf_request request, uint64_t budget_bytes,
                                                         kvf_error *err);

/** Ends a request now, with all of its samples. on_finish is called with KVF_FINISH_ABORTED for each that had not ended, before
 *  this returns. An open request between two turns is closed.
 *  @param engine an engine. @param request a live one. @own nothing. @threads as the engine; also from within a callback
 *  (then at the end of the step). @errors KVF_E_NOT_FOUND. @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_engine_abort(kvf_engine *engine, kvf_request request);

/** Ends one sample of a request; the others go on. Not with best_of above n, nor with beams.
 *  @param engine an engine. @param request a live one. @param index of the sample. @own nothing. @threads as the engine; also
 *  from within a callback (then at the end of the step). @errors KVF_E_NOT_FOUND (it has ended), KVF_E_STATE (best_of
 *  above n, beams). @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_engine_abort_sample(kvf_engine *engine, kvf_request request, uint32_t index);

/** Reads the engine's counters and memory.
 *  @param engine an engine. @param out struct_size set by the caller. @own layers is the engine's. @threads as the engine.
 *  @errors KVF_E_INVALID. @cost O(sequences * n_layers). */
KVF_API KVF_CHECK kvf_status kvf_engine_get_stats(kvf_engine *engine, kvf_engine_stats *out);

/** What the engine has reserved, by part. To know it before a run, create the engine with its config and ask.
 *  @param engine an engine. @param out filled up to its struct_size, which the caller sets.
 *  @own a plain value. @threads as the engine. @errors KVF_E_INVALID. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_engine_get_memory(const kvf_engine *engine, kvf_engine_memory *out);

/** The positions of the tokens that one KV head of a running request holds, ascending.
 *  @param engine an engine. @param request running. @param layer layer. @param kv_head head. @param pos result. @param capacity of it.
 *  @param n how many there are. @own the caller's buffer. @threads as the engine, also from within on_token.
 *  @errors KVF_E_NOT_FOUND, KVF_E_INVALID, KVF_E_LIMIT. @cost O(slots log slots). */
KVF_API KVF_CHECK kvf_status kvf_engine_positions(kvf_engine *engine, kvf_request request, uint32_t layer,
                                                  uint32_t kv_head, uint32_t *pos, uint32_t capacity, uint32_t *n);

/** The engine's block manager (for audits) and policy state (for tau and sizes).
 *  @param engine an engine. @param policies set to the policy state, or NULL. @own the engine's; read only. @threads as the engine.
 *  @errors none. @cost O(1). */
KVF_API const kvf_manager *kvf_engine_manager(const kvf_engine *engine, const kvf_policy_state **policies);

/** The index of a running request's sequence in the manager and the policy state. Within on_logits it is the index of the sample
 *  that the logits belong to.
 *  @param engine an engine. @param request a request. @param sample its sample's index; 0 for a single answer.
 *  @own nothing. @threads as the engine, also from within a callback. @errors none: UINT32_MAX when it is not running, and for
 *  beams. @cost O(requests). */
KVF_API uint32_t kvf_engine_seq_index(const kvf_engine *engine, kvf_request request, uint32_t sample);

/* ---- Cached prompts in files ---------------------------------------------------------------- */

typedef struct kvf_prompt_file {
    size_t struct_size;
    const char *path;
    const void *identity; /* up to 64 bytes that identify the model's weights; they must be equal at save and load */
    uint32_t identity_bytes;
    uint32_t salt_bytes;
    const void *salt; /* kvf_generate.cache_salt */
} kvf_prompt_file;

/** Saves the part of a prompt that the prefix cache holds: K and V, and column sums and the like if there is a snapshot. With snapshots it saves
 *  up to the longest one, so that any policy can continue from the file. The file is written under a temporary name and renamed
 *  when it is complete.
 *  @param engine an engine with a prefix cache. @param file where to. @param tokens the prompt. @param n_tokens its length.
 *  @param n_saved tokens in the file, or NULL. @param err names file, value and remedy, or NULL.
 *  @own nothing is kept. @threads as the engine, outside callbacks.
 *  @errors KVF_E_NOT_FOUND (no block of it is cached), KVF_E_IO (also a full disk; an older file of that name stays), KVF_E_STATE (no
 *  prefix cache), KVF_E_INVALID, KVF_E_LIMIT, KVF_E_NO_MEMORY. @cost writes the bytes. Counts as a query of the cache. */
KVF_API KVF_CHECK kvf_status kvf_engine_prompt_save(kvf_engine *engine, const kvf_prompt_file *file,
                                                    const uint32_t *tokens, uint32_t n_tokens, uint32_t *n_saved,
                                                    kvf_error *err);

/** Loads a saved prompt into the prefix cache.
 *  @param engine an engine with a prefix cache. @param file which. @param n_loaded its tokens, or NULL.
 *  @param err names file, value and remedy, or NULL. @own nothing is kept. @threads as the engine, outside callbacks.
 *  @errors KVF_E_NOT_FOUND (no such file), KVF_E_FORMAT (no prompt file, truncated, damaged, of another model, page type or salt, made
 *  with other fast_activations, or without deterministic for an engine that has it),
 *  KVF_E_UNSUPPORTED (version), KVF_E_NEVER_FITS (the context), KVF_E_NO_BLOCKS, KVF_E_LIMIT, KVF_E_IO, KVF_E_STATE, KVF_E_INVALID,
 *  KVF_E_NO_MEMORY. Nothing changes on failure. @cost reads the file twice, from memory the second time. */
KVF_API KVF_CHECK kvf_status kvf_engine_prompt_load(kvf_engine *engine, const kvf_prompt_file *file, uint32_t *n_loaded,
                                                    kvf_error *err);

#ifdef __cplusplus
}
#endif
#endif
