/* kvfold/policy.h: compression policies: which tokens a layer keeps, and what happens to the evicted ones.
 * It offers the policies' options as names and values, the memory that a request will need, and the calls that compress a
 * sequence. With the engine (engine.h) only the options are needed: it makes all other calls itself.
 *
 * Simple use
 *     kvf_policy_options options;
 *     kvf_policy_need need;
 *     kvf_error err;
 *     kvf_status status = kvf_policy_options_init(&options, sizeof options, "d2o", "serving", &err);
 *     if (!status) status = kvf_policy_option_set(&options, "rho", "0.25", &err); // keep a quarter of the prompt
 *     if (!status) status = kvf_policy_options_check(&options, 32, 16, &err);     // 32 layers, blocks of 16 slots
 *     if (!status) status = kvf_policy_project(&options, 32, 1, 16, 4096, 256, &need, &err); // 4096 + 256 tokens
 *     if (status) return status; // err.text names the option, its value and the remedy
 *     // Blocks: need.prompt_blocks while the prompt runs, need.steady_blocks afterwards. kvf_generate.policy = &options;
 *
 * Words
 *     L: prompt tokens. B: the budget, tokens that a layer keeps on average. S: slots that one layer keeps after an event.
 *     S consists of the heavy hitters (high scores; the sinks, the first tokens, count among them) and the recent window
 *     (the M newest positions, pos >= next_pos - M). k = evict_every: a layer that has S + k slots evicts k of them.
 *
 * In a loop of your own (examples/embed.c)
 *     A policy is a table of functions, kvf_policy_ops. Functions that it leaves NULL are the library's own. They run at
 *     three moments:
 *       observe                            after each layer's attention: attention probabilities become scores
 *       metric -> [reduce] -> budget       at a prompt's end: a density per layer, then the slots that each layer keeps
 *       match -> [reduce] -> gate -> apply at an event: choose victims and their nearest kept keys, decide which of them
 *                                          merge, write the pages
 *     With tensor parallelism the caller sums the numbers of all ranks at [reduce]; with one rank there is nothing to do.
 *     Lengths, reservations and freed blocks follow from the sizes alone, so the host never reads a plan's entries; tests
 *     and printing do.
 *     A kvf_policy_state holds for each sequence its options, sizes, layer weights, tau and counters. It is indexed by
 *     kvf_seq_index.
 *
 * Rules
 *     Calls on one state are made one at a time ("as the state"). The options of a sequence are copied when it is opened.
 *     A failed call changes nothing.
 */
#ifndef KVFOLD_POLICY_H
#define KVFOLD_POLICY_H

#include "kvfold/attention.h"
#include "kvfold/base.h"
#include "kvfold/blockmgr.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_policy_ops kvf_policy_ops;
typedef struct kvf_policy_state kvf_policy_state;

/* ---- Options of one request --------------------------------------------------------------------- */

typedef enum kvf_metric {
    KVF_METRIC_HEAD_MINMAX, /* variance of each head's column sums, scaled to [0, 1] over the layer's heads; their mean */
    KVF_METRIC_RAW,         /* variance of each head's column sums, unscaled; mean over the heads */
    KVF_METRIC_LAYER_MINMAX, /* as raw, then scaled to [0, 1] over the layers */
    KVF_METRIC_MASS,         /* fewest tokens that hold metric_share of a head's column sums; mean over the heads */
    KVF_METRIC_ENTROPY       /* exp of the entropy of a head's column sums; mean over the heads */
} kvf_metric;
/* What the slots of a sequence are divided among: the layers, by their weights; or all tables by one threshold on their scores. */
typedef enum kvf_budget_scope { KVF_BUDGET_LAYER, KVF_BUDGET_GLOBAL } kvf_budget_scope;
typedef enum kvf_budget_unit { KVF_BUDGET_TOKEN, KVF_BUDGET_BLOCK } kvf_budget_unit;
typedef enum kvf_score {
    KVF_SCORE_ACCUMULATE,          /* the prompt's column sums plus every decode row */
    KVF_SCORE_PROMPT_PLUS_CURRENT, /* the prompt's column sums plus the newest decode row only */
    KVF_SCORE_MEAN,                /* accumulate, divided by the number of queries that saw the token */
    KVF_SCORE_SQRT,                /* accumulate, divided by the square root of that number */
    KVF_SCORE_WINDOW,              /* the rows of the last score_window queries only */
    KVF_SCORE_REPEAT,              /* the highest probability that a repetition of the prompt gave the token */
    KVF_SCORE_PROBE                /* kvf_pages.score: a linear probe of the token's hidden state */
} kvf_score;
typedef enum kvf_score_norm {
    KVF_SCORE_NORM_NONE,
    KVF_SCORE_NORM_V, /* scores by attention, times the norm of the token's value */
    KVF_SCORE_NORM_OUTPUT /* score repeat: times the norm of the value after the output projection, divided by the norm of the
                           * querying token's residual */
} kvf_score_norm;
typedef enum kvf_cam_mode { KVF_CAM_EXPECTED, KVF_CAM_SAMPLE } kvf_cam_mode;
typedef enum kvf_match { KVF_MATCH_KEY, KVF_MATCH_VALUE } kvf_match;
typedef enum kvf_scope { KVF_SCOPE_HEAD, KVF_SCOPE_LAYER } kvf_scope; /* what decides which tokens merge */
typedef enum kvf_head_budget { KVF_HEAD_BUDGET_EQUAL, KVF_HEAD_BUDGET_ADAPTIVE } kvf_head_budget;
/* Weights with which n evicted tokens, of cosines u_i, merge into one kept token. */
typedef enum kvf_merge {
    KVF_MERGE_PAPER,    /* exp(u_i) each, e for the kept token, divided by their sum */
    KVF_MERGE_AUTHORS,  /* u_i / (1 + n) each, 1 / (1 + n) for the kept token; they do not add up to 1 */
    KVF_MERGE_AVERAGE,  /* 1 / (1 + n) for all */
    KVF_MERGE_MASS,     /* by the number of tokens that each slot stands for */
    KVF_MERGE_NONE,     /* evicted tokens are dropped */
    KVF_MERGE_ATTENTION /* weighted by attention per query, each token at most as much as the kept one */
} kvf_merge;

#define KVF_MAX_FULL_LAYERS 64
#define KVF_MIN_BUDGET_TOKENS 16u
#define KVF_MAX_SCORE_ARRAYS 8u
#define KVF_MIN_PIECE_TOKENS 64u       /* of the prompt, in a piece of its repetition */
#define KVF_MAX_INSTRUCTION_TOKENS 32u /* before each piece */
#define KVF_REPEAT_INSTRUCTION "\n\nRepeat the previous context exactly.\n\n"

/* Fill it with kvf_policy_options_init, then change single fields, or use kvf_policy_option_set. Unlike in a config, zero does
 * not mean a default here. docs/options.md explains each option. */
typedef struct kvf_policy_options {
    size_t struct_size;
    const kvf_policy_ops *ops;
    double rho;             /* share of the prompt's tokens that a layer keeps on average, (0, 1]; 1: never evicts */
    uint32_t budget_tokens; /* tokens per layer in place of rho * L, at least KVF_MIN_BUDGET_TOKENS; 0: rho counts */
    uint32_t min_tokens;    /* least B (average per layer); no effect with redistribute 0 */
    kvf_metric metric;
    int32_t layer_sign;    /* +1 or -1 */
    double layer_strength; /* factor of the density, >= 0; 0: all layers are equal */
    int32_t redistribute;  /* 1: sizes add up to the budget exactly; 0: the authors' clamped ratios */
    kvf_budget_unit budget_unit;
    int32_t full_layers[KVF_MAX_FULL_LAYERS]; /* never compressed; -1 is the last layer, -2 the one before */
    uint32_t n_full_layers;
    uint32_t n_parts, m_parts; /* N:M, the ratio of heavy hitters to recent window */
    uint32_t sinks;            /* first tokens that are always kept */
    int32_t sinks_extra;       /* 1: N:M divides what is left of S after the sinks; 0: sinks count as heavy hitters */
    kvf_score score;
    kvf_gqa gqa; /* how the scores of a KV head's query heads are combined */
    kvf_merge merge;
    int32_t merge_keys; /* 0: only values are merged */
    kvf_scope scope; /* head: each KV head decides which tokens merge; layer: all heads together, with one threshold */
    double beta_new, beta_old;  /* tau = beta_new * mean cosine of the event + beta_old * former tau */
    double gate;                /* least cosine that merges, in [-1, 1]; NaN: the moving threshold tau */
    uint32_t evict_every;       /* k; 0: block_size / 2 */
    int32_t defer_first_decode; /* 1: the prompt is compressed after the first decode step, not at its end */
    int32_t budget_may_change;  /* 1: attention is observed even with rho 1, so that the budget can be lowered later */
    uint64_t budget_bytes;      /* bytes of K and V over all layers of all ranks, in place of rho * L; 0: unused. See
                                 * kvf_policy_options_resolve */
    double metric_share;        /* for metric mass: share of a head's column sums, (0, 1] */
    uint32_t window;            /* M, the recent window in tokens; 0: N:M decides */
    uint32_t score_window;      /* w, for score window: rows of the last w queries; in decode of the last w to 2w - 1 */
    kvf_score_norm score_norm;
    uint32_t score_pool; /* odd kernel: scores outside the window are averaged over neighbouring positions; 1: not */
    double score_decay;  /* [0, 1]: factor of the former scores at the end of each later prompt segment */
    /* For policy cam only: see d2o_policy/cam.c. */
    uint32_t cam_tokens; /* m: an evicted value is added to the next m tokens, [1, 128] */
    kvf_cam_mode cam_mode;
    uint32_t cam_seed; /* seed of the random draws of cam_mode sample */
    kvf_match match;   /* which cosines find the nearest kept token, and are gated and weighed: of keys, or of values */
    kvf_head_budget head_budget; /* how the head groups of a layer share its slots */
    double
        head_floor; /* head_budget adaptive, budget global: each table keeps at least this share of an equal one, [0, 1] */
    uint32_t
        repeat_piece; /* score repeat: most prompt tokens of one piece, at least KVF_MIN_PIECE_TOKENS; 0: the whole prompt, or
                            * what fits the context */
    kvf_budget_scope budget;
    double
        threshold; /* budget global: slots of at least this score are kept, however many; NaN: as many as the budget has */
    double
        score_mix; /* score probe: weight of the logarithm of what attention gave the slot, added to its score; 0: none */
} kvf_policy_options;

typedef struct kvf_policy_option_info {
    const char *name;    /* as in docs/options.md, with '_' ("min_tokens") */
    const char *values;  /* "(0, 1]", "head|layer" */
    const char *summary; /* one sentence */
    int per_request;     /* a request may set it */
} kvf_policy_option_info;

/** The table of all options, in the order of docs/options.md.
 *  @param n how many. @own static. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_policy_option_info *kvf_policy_option_list(uint32_t *n);

/** Fills options with a policy's preset.
 *  @param options filled. @param struct_size sizeof *options: no byte beyond it is written.
 *  @param policy a built-in one (kvf_policy_name).
 *  @param preset of the policy (kvf_policy_preset): "paper", "serving" and "authors" of d2o, "h2o" of cam; NULL or "default" for
 *  its default.
 *  @param err names the unknown policy or preset and lists the known ones, or NULL.
 *  @own plain values. @threads any. @errors KVF_E_NOT_FOUND. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_init(kvf_policy_options *options, size_t struct_size,
                                                     const char *policy, const char *preset, kvf_error *err);

/** Fills options for a policy that the caller wrote: the values of d2o's preset paper, with the caller's ops.
 *  @param options filled. @param struct_size sizeof *options. @param ops the pointer is kept: it must outlive every sequence that uses it. @param err detail, or NULL.
 *  @own ops stays the caller's. @threads any.
 *  @errors KVF_E_INVALID (struct_size, no name, unknown needs or flags). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_init_ops(kvf_policy_options *options, size_t struct_size,
                                                         const kvf_policy_ops *ops, kvf_error *err);

/** Copies options from a caller that may be compiled against another version: fields beyond its struct_size get their default.
 *  @param out filled. @param struct_size sizeof *out: no byte beyond it is written.
 *  @param in initialised, of any version. @param err detail, or NULL.
 *  @own plain values. @threads any. @errors KVF_E_INVALID (NULL, struct_size), KVF_E_UNSUPPORTED (a field of a later version
 *  is set). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_read(kvf_policy_options *out, size_t struct_size,
                                                     const kvf_policy_options *in, kvf_error *err);

/** Converts budget_bytes into budget_tokens for a model; does nothing when budget_bytes is 0.
 *  @param options initialised; budget_tokens set and budget_bytes cleared. @param n_layers of the model.
 *  @param token_bytes of K and V of one token in one layer, over all ranks. @param err detail, or NULL.
 *  @own plain values. @threads any.
 *  @errors KVF_E_INVALID (fewer than KVF_MIN_BUDGET_TOKENS a layer; budget_tokens is set too). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_resolve(kvf_policy_options *options, uint32_t n_layers,
                                                        uint64_t token_bytes, kvf_error *err);

/** Sets one option from text ("0.2", "3:1", "0,1,last", "none"); '-' and '_' in the name are the same.
 *  @param options initialised. @param name see kvf_policy_option_list. @param value text.
 *  @param err names the option, the value and what is allowed, or NULL.
 *  @own nothing is kept. @threads any. @errors KVF_E_NOT_FOUND (name), KVF_E_INVALID (value). @cost O(options). */
KVF_API KVF_CHECK kvf_status kvf_policy_option_set(kvf_policy_options *options, const char *name, const char *value,
                                                   kvf_error *err);

/** Writes one option's value as text, as kvf_policy_option_set reads it.
 *  @param options initialised. @param name see above. @param text buffer. @param capacity bytes of it.
 *  @own the caller's buffer. @threads any. @errors KVF_E_NOT_FOUND, KVF_E_LIMIT, KVF_E_INVALID. @cost O(options). */
KVF_API KVF_CHECK kvf_status kvf_policy_option_get(const kvf_policy_options *options, const char *name, char *text,
                                                   size_t capacity);

/** Checks options against a model and a pool: ranges and combinations.
 *  @param options initialised. @param n_layers of the model. @param block_size of the pool. @param err detail, or NULL.
 *  @own nothing. @threads any. @errors KVF_E_INVALID. @cost O(options). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_check(const kvf_policy_options *options, uint32_t n_layers,
                                                      uint32_t block_size, kvf_error *err);

/** The vtable of a built-in policy, NULL when there is none of that name.
 *  @param name one of kvf_policy_name. @own static. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_policy_ops *kvf_policy_find(const char *name);

/** The i-th built-in policy's name, NULL past the last.
 *  @param i from 0. @own static. @threads any. @errors none. @cost O(1). */
KVF_API const char *kvf_policy_name(uint32_t i);

/** The i-th preset of a built-in policy, "default" first, NULL past the last and for an unknown policy.
 *  @param policy one of kvf_policy_name. @param i from 0. @own static. @threads any. @errors none. @cost O(1). */
KVF_API const char *kvf_policy_preset(const char *policy, uint32_t i);

/** The preset of a policy that makes the most of what the caller can provide: the first that ranks by scores from the model, if the
 *  caller provides them, else "default". For "fold": "probe", then "repeat", then "default" (attention).
 *  @param policy one of kvf_policy_name. @param provided KVF_NEEDS_PROBE if there is a probe of the model, KVF_NEEDS_REPEAT if the
 *  prompt may be repeated; other bits have no effect.
 *  @own static; NULL for an unknown policy. @threads any. @errors none. @cost O(presets). */
KVF_API const char *kvf_policy_preset_for(const char *policy, uint32_t provided);

/** Whether a sequence with these options can ever evict: never with policy "full" or rho 1.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns 0 or 1. */
KVF_API int kvf_policy_evicts(const kvf_policy_options *options);

/** The flags of the policy.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns KVF_POLICY_*. */
KVF_API uint32_t kvf_policy_flags(const kvf_policy_options *options);

/** Whether the layers' sizes depend on a metric, which the ranks must sum up: not where all layers weigh the same
 *  (KVF_POLICY_EQUAL_LAYERS, no KVF_NEEDS_COL_SUMS, budget global, or score repeat and probe, which need no attention).
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns 0 or 1. */
KVF_API int kvf_policy_has_metric(const kvf_policy_options *options);

/** Which sums of attention probabilities, and which other inputs, a sequence with these options needs: KVF_NEEDS_* of the
 *  policy and of its options. With score repeat or probe no attention, but with merge attention (for the merge alone). 0 when nothing is
 *  ever evicted, unless budget_may_change is set.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_policy_needs(const kvf_policy_options *options);

/** Score arrays that a score page must have for these options (0: the policy does not observe).
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_policy_n_arrays(const kvf_policy_options *options);

/** Whether observe must be called after each decode step: the policy needs rows or log-probabilities, and has decode events.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns 0 or 1. */
KVF_API int kvf_policy_observes(const kvf_policy_options *options);

/** Whether merges give slots a weight (merge mass, attention): pages must then have weight and bias, and attention must add the bias.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns 0 or 1. */
KVF_API int kvf_policy_needs_weights(const kvf_policy_options *options);

/* ---- Sizes ------------------------------------------------------------------------------------ */

typedef struct kvf_layer_size {
    uint32_t keep;    /* S: slots kept after an event; UINT32_MAX: the layer never evicts */
    uint32_t hh;      /* heavy hitters among them, sinks included */
    uint32_t window;  /* M */
    uint32_t reserve; /* slots to reserve: S + k; UINT32_MAX: no bound (it never evicts, or only at its prompt's end) */
} kvf_layer_size;

/* The memory that a request will need, estimated before its sizes are known. Blocks over all layers and groups of this rank. */
typedef struct kvf_policy_need {
    uint64_t prompt_blocks; /* while its prompt runs; with score repeat also a piece of its repetition */
    uint64_t steady_blocks; /* afterwards; for a policy that never evicts: with all max_new tokens */
    uint32_t budget_tokens; /* B */
    int bounded;            /* 1: every layer evicts, so its tables never outgrow these blocks */
} kvf_policy_need;

/** The memory that a request will need. The scheduler admits requests by it.
 *  @param options checked here. @param n_layers, n_groups, block_size of the pool. @param n_prompt, max_new tokens.
 *  @param need result. @param err detail, or NULL.
 *  @own plain values. @threads any.
 *  @errors those of kvf_policy_options_check; KVF_E_INVALID (full_layers leave nothing for the others: B * n_layers <= n_full * L). @cost O(n_layers).
 *  @source arXiv 2406.13035 (layer level); d2o_policy/README.md. */
KVF_API KVF_CHECK kvf_status kvf_policy_project(const kvf_policy_options *options, uint32_t n_layers, uint32_t n_groups,
                                                uint32_t block_size, uint32_t n_prompt, uint32_t max_new,
                                                kvf_policy_need *need, kvf_error *err);

/* ---- State ------------------------------------------------------------------------------------- */

typedef struct kvf_policy_state_config {
    size_t struct_size;
    uint32_t n_layers, n_kv_heads, n_q_heads; /* of this rank */
    uint32_t n_q_heads_total;                 /* over all ranks; 0: n_q_heads */
    uint32_t q_head_begin;                    /* index of this rank's first query head in the whole model */
    uint32_t head_dim, block_size, max_seqs, max_slots;
    kvf_allocator allocator;
    uint32_t
        n_groups; /* head groups of a layer, each with its own table; 0: 1. For head_budget adaptive and budget global */
} kvf_policy_state_config;

/** Creates the state for max_seqs sequences.
 *  @param config all sizes. @param out the state. @param err detail, or NULL.
 *  @own the caller, kvf_policy_state_destroy. @threads one at a time.
 *  @errors KVF_E_INVALID, KVF_E_NO_MEMORY, KVF_E_OVERFLOW. @cost O(max_seqs * n_layers * n_kv_heads); allocates once. */
KVF_API KVF_CHECK kvf_status kvf_policy_state_create(const kvf_policy_state_config *config, kvf_policy_state **out,
                                                     kvf_error *err);

/** Frees it; NULL is allowed.
 *  @param state a state. @own takes it. @threads none may use it. @errors none. @cost one free. */
KVF_API void kvf_policy_state_destroy(kvf_policy_state *state);

/** Starts a sequence with these options. State that an earlier sequence left at the index is discarded.
 *  @param state a state. @param seq kvf_seq_index. @param options checked against the state's sizes; copied.
 *  @param err detail, or NULL. @own nothing is kept. @threads as the state. @errors KVF_E_INVALID. @cost O(layers * heads). */
KVF_API KVF_CHECK kvf_status kvf_policy_open(kvf_policy_state *state, uint32_t seq, const kvf_policy_options *options,
                                             kvf_error *err);

/** Changes the budget of a sequence, at any time. Layers above their new size have an event before the next append
 *  (kvf_policy_due with KVF_BEFORE_APPEND; the kept slots are then in ascending position); the other layers grow into
 *  theirs. The layers' weights stay the same, and sizes are not clamped to the prompt's length. While the prompt still
 *  runs, the effect is as if the sequence had been opened with the new budget.
 *  @param state a state. @param seq open. @param rho, budget_tokens as the options of that name. @param err detail, or NULL.
 *  @own nothing. @threads as the state.
 *  @errors KVF_E_STALE, KVF_E_INVALID (range; policy full; full_layers leave nothing to the others; a policy that compresses
 *  only its prompt, once that has ended), KVF_E_STATE (the sequence was not observed, because it had rho 1 without
 *  budget_may_change, and the new budget needs its scores). Nothing changes on failure.
 *  @cost O(n_layers log n_layers). @source d2o_policy/README.md, "When". */
KVF_API KVF_CHECK kvf_status kvf_policy_set_budget(kvf_policy_state *state, uint32_t seq, double rho,
                                                   uint32_t budget_tokens, kvf_error *err);

/** The sizes that kvf_policy_set_budget would give, without changing anything.
 *  @param state a state. @param seq open. @param rho, budget_tokens see above.
 *  @param sizes [n_layers]: filled when sized is set to 1; otherwise the sizes would not be known yet.
 *  @param sized result: 1 when the sizes are known. @param err detail, or NULL.
 *  @own the caller's array. @threads as the state. @errors as kvf_policy_set_budget. @cost O(n_layers log n_layers). */
KVF_API KVF_CHECK kvf_status kvf_policy_preview_budget(kvf_policy_state *state, uint32_t seq, double rho,
                                                       uint32_t budget_tokens, kvf_layer_size *sizes, int *sized,
                                                       kvf_error *err);

/** Copies all of a sequence's state (options, sizes, tau, counters) to another index.
 *  @param state a state. @param src open. @param dst any other index.
 *  @own nothing. @threads as the state. @errors KVF_E_STALE (src not open), KVF_E_INVALID; kvf_policy_state_error has the text.
 *  @cost O(layers * heads). */
KVF_API KVF_CHECK kvf_status kvf_policy_fork(kvf_policy_state *state, uint32_t src, uint32_t dst);

/** Detail of the last failed call that takes no kvf_error, "" when none has failed.
 *  @param state a state. @own the state's, until its next failing call. @threads as the state. @errors none. @cost O(1). */
KVF_API const char *kvf_policy_state_error(const kvf_policy_state *state);

/** Ends a sequence; its index may be opened again.
 *  @param state a state. @param seq open or not. @own nothing. @threads as the state. @errors none. @cost O(1). */
KVF_API void kvf_policy_close(kvf_policy_state *state, uint32_t seq);

/** The options a sequence runs with, NULL when it is not open.
 *  @param state a state. @param seq index. @own the state's. @threads as the state. @errors none. @cost O(1). */
KVF_API const kvf_policy_options *kvf_policy_get_options(const kvf_policy_state *state, uint32_t seq);

/** The sizes of the layers, [n_layers]. NULL while they are unknown: before the prompt's end, and with B >= L until the
 *  generated tokens exceed the budget.
 *  @param state a state. @param seq index. @own the state's, until the next call that changes seq.
 *  @threads as the state. @errors none. @cost O(1). */
KVF_API const kvf_layer_size *kvf_policy_sizes(const kvf_policy_state *state, uint32_t seq);

/** The sizes of the tables, [n_layers][n_groups], with head_budget adaptive or budget global. Before its first event, each group of a
 *  layer has the layer's size. With budget global, a layer's own size is then the mean of its tables'.
 *  @param state a state. @param seq index. @own the state's, until the next call that changes seq. @threads as the state.
 *  @errors none: NULL while the sizes are unknown, and with budget layer if head_budget is equal or a layer has one group.
 *  @cost O(1). */
KVF_API const kvf_layer_size *kvf_policy_group_sizes(const kvf_policy_state *state, uint32_t seq);

/** The layers' densities F, [n_layers], NULL before kvf_policy_budget or for a policy without a metric.
 *  @param state a state. @param seq index. @own the state's. @threads as the state. @errors none. @cost O(1). */
KVF_API const double *kvf_policy_density(const kvf_policy_state *state, uint32_t seq);

/** tau, the moving threshold of merging, of one KV head.
 *  @param state a state. @param seq index. @param layer layer. @param kv_head KV head of this rank.
 *  @own nothing. @threads as the state. @errors none: NaN before the head's first event, and when seq is not open. @cost O(1). */
KVF_API double kvf_policy_tau(const kvf_policy_state *state, uint32_t seq, uint32_t layer, uint32_t kv_head);

typedef struct kvf_policy_counts {
    size_t struct_size;
    uint64_t merged, dropped; /* evicted tokens, counted once for each layer and KV head */
    uint64_t n_events;        /* events that evicted, counted once for each layer; a layer's groups each count */
    uint64_t raised_tokens;   /* slots over all layers that exceed the budget because of the layers' least sizes */
} kvf_policy_counts;

/** Counters since kvf_policy_open, summed over layers and KV heads.
 *  @param state a state. @param seq index. @param counts struct_size set by the caller; zeros when seq is not open.
 *  @own plain values. @threads as the state. @errors KVF_E_INVALID (NULL, struct_size). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_get_counts(const kvf_policy_state *state, uint32_t seq,
                                                   kvf_policy_counts *counts);

typedef enum kvf_moment {
    KVF_AT_PROMPT_END, /* also at the end of a later segment */
    KVF_BEFORE_APPEND, /* of one token. A request whose prompt fitted its budget (B >= L) gets its sizes here once it would
                        * exceed the budget; a changed budget takes effect here */
    KVF_AFTER_STEP     /* after the attention of a decode step, its rows observed */
} kvf_moment;

/* ---- Batches, events, plans ---------------------------------------------------------------------- */

typedef enum kvf_event_kind {
    KVF_EVENT_PROMPT =
        0, /* end of a prompt or segment, overflow, changed budget: kept slots end in ascending position */
    KVF_EVENT_DECODE = 1 /* kept tokens in slots >= S move to the evicted slots < S, both in ascending order */
} kvf_event_kind;

typedef struct kvf_event {
    uint32_t row; /* index of the sequence in the view */
    uint32_t layer;
    uint32_t n_keep; /* may equal the table's slots: nothing is evicted, a prompt event then only stores the scores */
    uint32_t kind;   /* kvf_event_kind */
    /* The head groups that the event is for; their tables have equally many slots. n_groups 0: all groups of the layer. One
     * batch may have several events of a layer, each for other groups. */
    uint32_t group_begin, n_groups;
} kvf_event;

/* The inputs of the vtable's calls. All sequences of a batch have the same ops. */
typedef struct kvf_policy_batch {
    size_t struct_size;
    const kvf_view *view;
    const kvf_pages *pages;
    const kvf_score_pages *scores; /* NULL for policies that do not observe */
    /* For observe: the sequences [row_begin, row_end) of the view, one layer, and mass as attention filled it. */
    uint32_t layer, row_begin, row_end;
    const kvf_mass *mass;
    /* Column sums of prompts: prompt_sums[row] (NULL: none) is [n_layers][n_q_heads][prompt_stride], as kvf_mass.col_sums. With score
     * repeat what the repetition gave the newest segment's slots; other columns are not read. */
    float *const *prompt_sums;
    size_t prompt_stride;
    /* For match, gate and apply. */
    const kvf_event *events;
    uint32_t n_events;
    const kvf_compaction
        *compaction; /* from kvf_compact_begin, for the events that evict; NULL: every table in place */
    /* [n_events]: index of the event's compaction item; events of one layer's groups may share one. UINT32_MAX: none, nothing is
     * evicted. */
    const uint32_t *compaction_item;
    void *workspace; /* kvf_policy_workspace_bytes, 64-byte aligned */
    size_t workspace_bytes;
    kvf_cpu_path path;
    /* What kvf_policy_needs asks for besides column sums, by row of the view; NULL: none. */
    float *const *prompt_last;    /* as prompt_sums, of the last score_window queries only (KVF_NEEDS_LAST_ROWS) */
    float *const *prompt_squares; /* [n_layers][n_kv_heads][prompt_stride] (KVF_NEEDS_SQUARES) */
    const float *const *prompt_logprobs; /* log p of each prompt token, by position (KVF_NEEDS_LOGPROBS) */
    const float *logprobs;               /* for observe: [n_seqs], log p of the token just appended */
} kvf_policy_batch;

/** Which tables of a sequence have an event now, and to how many slots they shrink. Computes the sizes if this is the moment
 *  to. kvf_events_run (events.h) calls it; a loop of its own must then run the events. With head_budget adaptive it divides
 *  the slots of a layer (n_groups times the layer's size) among its groups, with budget global those of all layers among all tables, by the scores of the slots in the view's tables
 *  (evenly if batch->pages is NULL). It does so at the layer's first event, and again whenever the layer's size has changed. At
 *  a prompt's end the scores come from the prompt's sums, as in the event itself. Groups of different sizes need an event each.
 *  @param state a state. @param stream or NULL. @param batch view, pages, scores, sums, workspace, path. @param row of the view.
 *  @param moment when. @param keep [n_layers][n_groups]: slots to shrink to, 0 for a table without an event.
 *  @param n_due how many tables have one. @param err detail, or NULL.
 *  @own nothing is kept. @threads as the state.
 *  @errors KVF_E_INVALID, KVF_E_STATE (score pages): as match. A sequence that is not open is no error: n_due is 0. Nothing changes on
 *  failure. @cost O(n_tables), with head_budget adaptive or budget global O(slots log slots) when it divides slots.
 *  With budget global on several ranks use kvf_events_run, which sums what the threshold needs.
 *  @source arXiv 2407.11550, 2505.23416; d2o_policy/README.md, "When", "Groups". */
KVF_API KVF_CHECK kvf_status kvf_policy_due(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                                            uint32_t row, kvf_moment moment, uint32_t *keep, uint32_t *n_due,
                                            kvf_error *err);

typedef struct kvf_plan_entry {
    uint32_t slot;   /* the evicted slot; entries of a head ascend by position */
    uint32_t target; /* the nearest kept slot, numbered as before the event; UINT32_MAX with merge none */
    float u;         /* cosine of the two keys, or with match value of the two values */
    uint32_t merge;  /* 1: merged into target, 0: dropped; set by gate */
} kvf_plan_entry;

typedef struct kvf_plan_event {
    kvf_event event;
    uint32_t n_before, n_evict;
    uint64_t entry_begin;  /* entries [KV heads of the event][n_evict] */
    uint64_t reduce_begin; /* scope layer: n_evict sums of u over this rank's heads, then the number of heads */
} kvf_plan_event;

/* The victims and targets of a batch of events, chosen by match; gate adds which of them merge. Fixed capacity, from
 * kvf_plan_create. */
typedef struct kvf_plan {
    size_t struct_size;
    kvf_plan_event *events;
    uint32_t n_events, event_capacity;
    kvf_plan_entry *entries;
    uint64_t n_entries, entry_capacity;
    /* [n_events][n_kv_heads]: the threshold that each head used; NaN without one, and for heads outside the event. apply stores it
     * in the state. */
    double *tau;
    double *reduce;
    uint64_t n_reduce, reduce_capacity; /* the ranks sum reduce[0..n_reduce) up; n_reduce 0: nothing to sum */
    size_t bytes;
    kvf_allocator allocator;
    uint32_t n_kv_heads; /* as created */
} kvf_plan;

/** Creates a plan buffer.
 *  @param allocator or NULL. @param n_kv_heads of this rank. @param event_capacity events of one batch.
 *  @param entry_capacity evicted slots, over events and KV heads. @param out the plan. @param err detail, or NULL.
 *  @own the caller, kvf_plan_destroy. @threads one at a time. @errors KVF_E_INVALID, KVF_E_NO_MEMORY, KVF_E_OVERFLOW.
 *  @cost allocates once. */
KVF_API KVF_CHECK kvf_status kvf_plan_create(const kvf_allocator *allocator, uint32_t n_kv_heads,
                                             uint32_t event_capacity, uint64_t entry_capacity, kvf_plan **out,
                                             kvf_error *err);

/** Frees it; NULL is allowed.
 *  @param plan a plan. @own takes it. @threads none may use it. @errors none. @cost one free. */
KVF_API void kvf_plan_destroy(kvf_plan *plan);

/** Bytes of workspace for match, gate and apply of tables with at most max_slots slots.
 *  @param n_threads of the stream. @param head_dim, n_kv_heads of the model. @param max_slots most slots of a table.
 *  @param bytes result. @own nothing. @threads any. @errors KVF_E_INVALID, KVF_E_OVERFLOW. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_workspace_bytes(uint32_t n_threads, uint32_t head_dim, uint32_t n_kv_heads,
                                                        uint32_t max_slots, size_t *bytes);

/* ---- The vtable ------------------------------------------------------------------------------------ */

enum {
    KVF_NEEDS_COL_SUMS = 1,  /* column sums of the prompt */
    KVF_NEEDS_ROW = 2,       /* the row of probabilities of every decode step */
    KVF_NEEDS_SQUARES = 4,   /* prompt: sums of squares (kvf_mass.sq_sums) */
    KVF_NEEDS_LAST_ROWS = 8, /* prompt: column sums of its last score_window queries only (with score window) */
    KVF_NEEDS_LOGPROBS = 16, /* log p of each token given those before it */
    KVF_NEEDS_REPEAT =
        32,              /* prompt: the highest probabilities that a repetition of it gives, in place of column sums */
    KVF_NEEDS_PROBE = 64 /* kvf_pages.score, from a probe in each forward pass */
};

enum {
    KVF_POLICY_PROMPT_ONLY = 1,  /* no decode events: after the prompt's event a layer keeps every token */
    KVF_POLICY_EQUAL_LAYERS = 2, /* no metric: all layers weigh the same, unless the policy has a function weights */
    KVF_POLICY_RECENT = 4,       /* S consists of sinks and recent window: no other heavy hitters */
    KVF_POLICY_KEEPS_ALL = 8     /* nothing is ever evicted */
};

/* The slots of one KV head in one event, in no particular order. All arrays are indexed by slot. */
typedef struct kvf_policy_slots {
    size_t struct_size;
    const kvf_policy_options *options;
    const kvf_layer_size *size;
    uint32_t layer, kv_head; /* of this rank */
    uint32_t n_slots, n_keep, next_pos;
    uint32_t kind;         /* kvf_event_kind */
    const uint32_t *pos;   /* [n_slots] */
    const float *score;    /* the accumulated score; with score window of the last whole window of rows; NULL: none */
    const float *recent;   /* score prompt_plus_current: the newest row; score window: rows since then; else NULL */
    const float *squares;  /* sums of squares; NULL without KVF_NEEDS_SQUARES */
    const float *surprise; /* -log p; NULL without KVF_NEEDS_LOGPROBS */
    const float *v_norm;   /* norm of V; NULL without score_norm v */
    const float *const
        *arrays; /* [n_arrays]: the arrays above that are not NULL, in their order, then the policy's own */
    uint32_t n_arrays;
    float *scratch; /* [2 * n_slots], free to use during the call */
    const float *
        model; /* the score from the model, with the mean of the others for slots that have none yet; NULL without score
                         * repeat or probe */
} kvf_policy_slots;

/* A policy. It sets only the functions in which it differs: NULL means the library's own. observe to apply, n_arrays and weights
 * are called in the thread that calls the library, one call at a time for a state. worth is called in the stream's threads, for
 * several KV heads at once: it may write only to its arguments. */
struct kvf_policy_ops {
    size_t struct_size;
    const char *name, *summary;
    uint32_t needs; /* KVF_NEEDS_* */
    /* Adds the rows of a decode step to the score pages. */
    kvf_status (*observe)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_error *err);
    /* One number per query head from its column sums, [n_layers][n_q_heads_total], 0 for the heads of other ranks; the caller
     * sums it over the ranks. The library's own computes the variance, or what options.metric asks for. */
    kvf_status (*metric)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                         uint32_t n_tokens, double *variance, kvf_error *err);
    /* Computes the layers' weights from the reduced numbers (NULL without metric), and with B < L the sizes; the state keeps
     * both. */
    kvf_status (*budget)(kvf_policy_state *state, uint32_t seq, const double *variance, uint32_t n_tokens,
                         kvf_error *err);
    kvf_status (*match)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                        kvf_error *err);
    kvf_status (*gate)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                       kvf_error *err);
    kvf_status (*apply)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                        const kvf_plan *plan, kvf_error *err);
    uint32_t flags; /* KVF_POLICY_* */
    /* How many score arrays a page has: at least those that needs and options ask for, at most KVF_MAX_SCORE_ARRAYS. Arrays
     * beyond them are the policy's own: they start at 0, and their values move with the slots. */
    uint32_t (*n_arrays)(const kvf_policy_options *options);
    /* A score for each slot, [n_slots]: the slots with the lowest are evicted. On ties the lower position stays, NaN is evicted
     * first, and +INFINITY last. Sinks and recent window are always kept, whatever their score. */
    void (*worth)(const kvf_policy_slots *slots, float *worth);
    /* A weight for each layer, [n_layers]: sizes are proportional to it and add up to the budget exactly. density: F, or zeros
     * without a metric. NaN and negative weights count as 0. */
    void (*weights)(const kvf_policy_options *options, uint32_t n_prompt, uint32_t budget, const double *density,
                    uint32_t n_layers, double *weights);
};

/* ---- The calls of a policy ---------------------------------------------------------------------------- */

/* These are right for every policy. kvf_events_run (events.h) makes all of them but kvf_policy_observe, in the right order. */

/** Adds the attention rows of a decode step, of one layer, to the score pages. Rows whose policy does not observe are left out.
 *  A token is observed once for each layer: calling again for the same next_pos, as after a failed step that was rolled back
 *  and is run again, adds nothing. It only writes the newest slot's scores, since that slot may have come to another page (not
 *  if the policy has an observe of its own). A call after the step's events is no such retry.
 *  @param state a state. @param stream or NULL. @param batch view, scores, layer, rows [row_begin, row_end) of decode, mass with
 *  row, logprobs where a policy needs them; pages with score_norm v. @param err detail, or NULL.
 *  @own nothing is kept. @threads as the state.
 *  @errors KVF_E_INVALID, KVF_E_STATE (no score pages). On failure earlier rows of the batch may have been observed.
 *  @cost O(slots of the rows). */
KVF_API KVF_CHECK kvf_status kvf_policy_observe(kvf_policy_state *state, kvf_stream *stream,
                                                const kvf_policy_batch *batch, kvf_error *err);

/** One number for each query head from the column sums of a prompt that has ended. The ranks sum them up.
 *  @param state a state. @param stream or NULL. @param batch view and prompt_sums. @param row of the view.
 *  @param n_tokens of the prompt. @param values [n_layers][n_q_heads_total] result: 0 for the heads of other ranks, and all 0
 *  for a policy without a metric. @param err detail, or NULL.
 *  @own the caller's array. @threads as the state. @errors KVF_E_INVALID, KVF_E_STALE. @cost O(n_tokens * layers * heads).
 *  @source arXiv 2406.13035, equation 3. */
KVF_API KVF_CHECK kvf_status kvf_policy_metric(kvf_policy_state *state, kvf_stream *stream,
                                               const kvf_policy_batch *batch, uint32_t row, uint32_t n_tokens,
                                               double *values, kvf_error *err);

/** Computes the layers' weights, and with B < L their sizes; the state keeps both. Called at the end of each segment; the
 *  weights are those of the first.
 *  @param state a state. @param seq open. @param values of kvf_policy_metric, summed over the ranks; not read for a policy
 *  without a metric. @param n_tokens prompt tokens so far, of all segments. @param err detail, or NULL.
 *  @own nothing is kept. @threads as the state. @errors KVF_E_STALE, KVF_E_INVALID. @cost O(n_layers log n_layers).
 *  @source arXiv 2406.13035, equations 4 to 6; d2o_policy/README.md. */
KVF_API KVF_CHECK kvf_status kvf_policy_budget(kvf_policy_state *state, uint32_t seq, const double *values,
                                               uint32_t n_tokens, kvf_error *err);

/** Chooses the slots that the events evict, and for each its nearest kept slot.
 *  @param state a state. @param stream or NULL. @param batch events of sequences with one policy, and all that they need.
 *  @param plan result; the ranks then sum up plan->reduce[0..n_reduce). @param err detail, or NULL.
 *  @own nothing is kept. @threads as the state. @errors KVF_E_INVALID, KVF_E_STALE, KVF_E_STATE (no scores), KVF_E_LIMIT (the
 *  plan's capacity). @cost O(slots * evicted slots * head_dim). @source arXiv 2406.13035, equation 8. */
KVF_API KVF_CHECK kvf_status kvf_policy_match(kvf_policy_state *state, kvf_stream *stream,
                                              const kvf_policy_batch *batch, kvf_plan *plan, kvf_error *err);

/** Decides which evicted slots merge and which are dropped.
 *  @param state a state. @param stream or NULL. @param batch as for match. @param plan of kvf_policy_match, reduced.
 *  @param err detail, or NULL. @own nothing is kept. @threads as the state. @errors as match; KVF_E_STATE (not this batch's plan).
 *  @cost O(evicted slots). @source arXiv 2406.13035, equation 9. */
KVF_API KVF_CHECK kvf_status kvf_policy_gate(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                                             kvf_plan *plan, kvf_error *err);

/** Writes the plan: merges, and moves the kept slots together, in place or to the compaction's fresh blocks.
 *  @param state a state. @param stream or NULL. @param batch as for match, with its compaction. @param plan of kvf_policy_gate.
 *  @param err detail, or NULL. @own nothing is kept. @threads as the state.
 *  @errors as gate; the arguments are checked before anything is written. @cost O(slots * head_dim) of what changes.
 *  @source arXiv 2406.13035, equation 10. */
KVF_API KVF_CHECK kvf_status kvf_policy_apply(kvf_policy_state *state, kvf_stream *stream,
                                              const kvf_policy_batch *batch, const kvf_plan *plan, kvf_error *err);

/** The library's own scores of slots, by the options score, score_norm and score_pool. A policy's worth may start from them.
 *  @param slots of one KV head. @param worth [n_slots] result: a score for each slot.
 *  @own the caller's array. @threads any. @errors none. @cost O(n_slots), with score_pool O(n_slots log n_slots). */
KVF_API void kvf_policy_worth(const kvf_policy_slots *slots, float *worth);

#ifdef __cplusplus
}
#endif
#endif
