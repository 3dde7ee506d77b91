/* kvfold/policy.h: which tokens a layer keeps, how many, and what becomes of the others.
 *
 * A policy is a vtable: what it needs to see, what a slot is worth, what a layer weighs, each left out where the library's own
 * will do. Six calls carry it out, with seams between them, so that no policy knows of ranks:
 *     observe                      after each layer's attention: the mass becomes scores
 *     metric -> [reduce] -> budget at a prompt's end: layer densities, then integer sizes
 *     match  -> [reduce] -> gate -> apply
 *                                  one event: choose victims and nearest kept keys, decide merges, carry out
 * [reduce] is the caller's: over ranks, or nothing. What the host needs (lengths, reservations, blocks that fall
 * free) follows from the sizes alone; a plan's contents are data that only tests and printing read.
 *
 * A policy state keeps, per sequence: options, sizes, layer weights, tau, counters. It is indexed by kvf_seq_index.
 *
 * Nouns: sink (the first tokens), heavy hitter (high score), recent window (pos >= next_pos - M), S slots a layer keeps
 * (hh + M), k = evict_every: a decode event happens when a layer has S + k slots and evicts k.
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

/* ---- Options: one request's ------------------------------------------------------------------ */

typedef enum kvf_metric {
    KVF_METRIC_HEAD_MINMAX, /* variance of a head's column sums, scaled to [0, 1] over the layer's heads, mean over them */
    KVF_METRIC_RAW,         /* mean over the heads of that variance, as it is */
    KVF_METRIC_LAYER_MINMAX, /* that mean, scaled to [0, 1] over the layers */
    KVF_METRIC_MASS,         /* tokens that hold metric_share of a head's column sums, mean over the heads */
    KVF_METRIC_ENTROPY       /* exp of the entropy of a head's column sums, mean over the heads */
} kvf_metric;
typedef enum kvf_budget_unit { KVF_BUDGET_TOKEN, KVF_BUDGET_BLOCK } kvf_budget_unit;
typedef enum kvf_score {
    KVF_SCORE_ACCUMULATE,          /* the prompt's column sums, and every decode row */
    KVF_SCORE_PROMPT_PLUS_CURRENT, /* the prompt's column sums, and the newest row alone */
    KVF_SCORE_MEAN,                /* accumulated, divided by the queries that saw the token */
    KVF_SCORE_SQRT,                /* accumulated, divided by the root of their number */
    KVF_SCORE_WINDOW               /* the rows of the last score_window queries alone */
} kvf_score;
typedef enum kvf_score_norm { KVF_SCORE_NORM_NONE, KVF_SCORE_NORM_V } kvf_score_norm;
typedef enum kvf_cam_mode { KVF_CAM_EXPECTED, KVF_CAM_SAMPLE } kvf_cam_mode;
typedef enum kvf_match { KVF_MATCH_KEY, KVF_MATCH_VALUE } kvf_match;
typedef enum kvf_scope { KVF_SCOPE_HEAD, KVF_SCOPE_LAYER } kvf_scope;
typedef enum kvf_head_budget { KVF_HEAD_BUDGET_EQUAL, KVF_HEAD_BUDGET_ADAPTIVE } kvf_head_budget;
typedef enum kvf_merge {
    KVF_MERGE_PAPER,
    KVF_MERGE_AUTHORS,
    KVF_MERGE_AVERAGE,
    KVF_MERGE_MASS,
    KVF_MERGE_NONE,
    KVF_MERGE_ATTENTION /* by the attention that each slot got from a query, at most as much as the kept one's */
} kvf_merge;

#define KVF_MAX_FULL_LAYERS 64
#define KVF_MIN_BUDGET_TOKENS 16u
#define KVF_MAX_SCORE_ARRAYS 8u

/* Always filled by kvf_policy_options_init, then changed field by field or with kvf_policy_option_set: here zero is a value. */
typedef struct kvf_policy_options {
    size_t struct_size;
    const kvf_policy_ops *ops;
    double rho;             /* share of the prompt's tokens kept per layer, (0, 1]; 1: nothing is ever evicted */
    uint32_t budget_tokens; /* absolute, per layer, in place of rho * L; 0: rho; else at least KVF_MIN_BUDGET_TOKENS */
    uint32_t min_tokens;    /* floor of the budget per layer; without effect where redistribute is 0 */
    kvf_metric metric;
    int32_t layer_sign;    /* +1 or -1 */
    double layer_strength; /* factor of the density, >= 0 */
    int32_t redistribute;  /* 1: exact totals; 0: the authors' clamped ratios */
    kvf_budget_unit budget_unit;
    int32_t full_layers[KVF_MAX_FULL_LAYERS]; /* never compressed; -1 is the last layer, -2 the one before */
    uint32_t n_full_layers;
    uint32_t n_parts, m_parts; /* heavy hitters : recent window */
    uint32_t sinks;
    int32_t sinks_extra; /* 1: the sinks are beside S instead of inside the heavy hitters */
    kvf_score score;
    kvf_gqa gqa;
    kvf_merge merge;
    int32_t merge_keys; /* 0: only values are merged */
    kvf_scope scope;
    double beta_new, beta_old;
    double gate;          /* fixed threshold in [-1, 1]; NaN: the EMA threshold tau */
    uint32_t evict_every; /* k; 0: block_size / 2 */
    int32_t defer_first_decode;
    int32_t
        budget_may_change; /* 1: with rho 1 attention is observed all the same, so that the budget can be tightened */
    uint64_t budget_bytes; /* of K and V over all layers of all ranks, in place of rho * L; 0: none. See
                            * kvf_policy_options_resolve */
    double metric_share;   /* metric mass: the share of a head's column sums, (0, 1] */
    uint32_t window;       /* M in tokens, in place of N:M; 0: N:M */
    uint32_t score_window; /* w of score window: rows of the last w queries, of the last w to 2w - 1 in decode */
    kvf_score_norm score_norm;
    uint32_t score_pool; /* odd kernel of an average over neighbours by position, before the window; 1: none */
    double score_decay;  /* factor of what was scored before, at the end of a later prompt segment, [0, 1] */
    /* cam alone: see d2o_policy/cam.c. */
    uint32_t cam_tokens; /* m: tokens that take an evicted value in, [1, 128] */
    kvf_cam_mode cam_mode;
    uint32_t cam_seed; /* of the draws of cam_mode sample */
    kvf_match match;   /* whose cosines find the nearest kept token, and are gated and weighed: keys', or values' */
    kvf_head_budget head_budget; /* how the head groups of a layer share its slots */
    double head_floor;           /* head_budget adaptive: share of the equal budget that every group keeps, [0, 1] */
} kvf_policy_options;

typedef struct kvf_policy_option_info {
    const char *name;    /* as in the docs and on the command line, with '_' ("min_tokens") */
    const char *values;  /* "(0, 1]", "head|layer" */
    const char *summary; /* one sentence */
    int per_request;     /* a request may set it */
} kvf_policy_option_info;

/** The table of all options, in the order of the docs.
 *  @param n how many. @own static. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_policy_option_info *kvf_policy_option_list(uint32_t *n);

/** Fills options with a policy's preset.
 *  @param options filled. @param policy a built-in one (kvf_policy_name).
 *  @param preset of the policy (kvf_policy_preset): "paper", "serving" and "authors" of d2o, "h2o" of cam; NULL or "default" for
 *  its default.
 *  @param err names what is unknown and lists what there is, or NULL.
 *  @own plain values. @threads any. @errors KVF_E_NOT_FOUND. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_init(kvf_policy_options *options, const char *policy,
                                                     const char *preset, kvf_error *err);

/** Fills options for a policy of the caller's own: the defaults of d2o's paper preset, with ops in its place.
 *  @param options filled. @param ops kept by pointer: it outlives every sequence that goes by it. @param err detail, or NULL.
 *  @own ops stays the caller's. @threads any.
 *  @errors KVF_E_INVALID (struct_size, no name, unknown needs or flags). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_init_ops(kvf_policy_options *options, const kvf_policy_ops *ops,
                                                         kvf_error *err);

/** Copies options that a caller of an earlier version may have filled: a field beyond their struct_size keeps its default.
 *  @param out filled. @param in initialised, of any version. @param err detail, or NULL.
 *  @own plain values. @threads any. @errors KVF_E_INVALID (NULL, struct_size), KVF_E_UNSUPPORTED (a later version's field is
 *  set). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_read(kvf_policy_options *out, const kvf_policy_options *in,
                                                     kvf_error *err);

/** Turns budget_bytes into budget_tokens, for a model of so many layers; without budget_bytes nothing changes.
 *  @param options initialised; budget_tokens set and budget_bytes cleared. @param n_layers of the model.
 *  @param token_bytes of K and V of one token in one layer, over all ranks. @param err detail, or NULL.
 *  @own plain values. @threads any.
 *  @errors KVF_E_INVALID (less than KVF_MIN_BUDGET_TOKENS a layer; budget_tokens is set too). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_policy_options_resolve(kvf_policy_options *options, uint32_t n_layers,
                                                        uint64_t token_bytes, kvf_error *err);

/** Sets one option from text ("0.2", "3:1", "0,1,last", "none"); '-' and '_' in the name are the same.
 *  @param options initialised. @param name see kvf_policy_option_list. @param value text.
 *  @param err names the option, the value and what would do, or NULL.
 *  @own nothing is kept. @threads any. @errors KVF_E_NOT_FOUND (name), KVF_E_INVALID (value). @cost O(options). */
KVF_API KVF_CHECK kvf_status kvf_policy_option_set(kvf_policy_options *options, const char *name, const char *value,
                                                   kvf_error *err);

/** Writes one option's value as text, as kvf_policy_option_set reads it.
 *  @param options initialised. @param name see above. @param text buffer. @param capacity bytes of it.
 *  @own the caller's buffer. @threads any. @errors KVF_E_NOT_FOUND, KVF_E_LIMIT, KVF_E_INVALID. @cost O(options). */
KVF_API KVF_CHECK kvf_status kvf_policy_option_get(const kvf_policy_options *options, const char *name, char *text,
                                                   size_t capacity);

/** Checks the options by themselves: ranges and combinations.
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

/** Whether options can ever evict: not those of "full", nor with rho 1.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns 0 or 1. */
KVF_API int kvf_policy_evicts(const kvf_policy_options *options);

/** A policy's calls, the library's own where its vtable has none, so that each can be called: metric alone stays NULL where
 *  layers are equal (KVF_POLICY_EQUAL_LAYERS, or no KVF_NEEDS_COL_SUMS).
 *  @param ops a vtable. @own plain values. @threads any. @errors none: zeros for NULL. @cost O(1). */
KVF_API kvf_policy_ops kvf_policy_ops_resolve(const kvf_policy_ops *ops);

/** What options need of the attention's mass and of the caller, KVF_NEEDS_*: what the policy needs and what its options ask;
 *  nothing where nothing is ever evicted, unless budget_may_change.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_policy_needs(const kvf_policy_options *options);

/** Score arrays a page must have for these options (0: the policy does not observe).
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_policy_n_arrays(const kvf_policy_options *options);

/** Whether each decode step is to be observed: needs a row or log-probabilities, and has decode events.
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns 0 or 1. */
KVF_API int kvf_policy_observes(const kvf_policy_options *options);

/** Whether merges leave weights: pages must then have weight and bias, and attention must add the bias (merge mass, attention).
 *  @param options initialised. @own nothing. @threads any. @errors none. @cost O(1). Returns 0 or 1. */
KVF_API int kvf_policy_needs_weights(const kvf_policy_options *options);

/* ---- Sizes ------------------------------------------------------------------------------------ */

typedef struct kvf_layer_size {
    uint32_t keep;   /* S: slots kept after an event; UINT32_MAX: never evicts */
    uint32_t hh;     /* of them heavy hitters, sinks included */
    uint32_t window; /* M */
    uint32_t
        reserve; /* slots that admission counts: S + k; UINT32_MAX: grows (it never evicts, or its prompt alone is) */
} kvf_layer_size;

/* What a request will need, before its sizes are known. Blocks over all layers and groups of this rank. */
typedef struct kvf_policy_need {
    uint64_t prompt_blocks; /* while its prompt runs */
    uint64_t steady_blocks; /* afterwards; for a policy that never evicts: with all of max_new */
    uint32_t budget_tokens; /* B */
    int bounded;            /* its tables never grow past their reservation */
} kvf_policy_need;

/** The projected need of a request (the rule of admission).
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
    uint32_t n_q_heads_total;                 /* of all ranks; 0: n_q_heads */
    uint32_t q_head_begin;                    /* first query head of this rank in the whole model */
    uint32_t head_dim, block_size, max_seqs, max_slots;
    kvf_allocator allocator;
    uint32_t
        n_groups; /* head groups of a layer, each with tables of its own; 0: 1. Only head_budget adaptive goes by it */
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

/** Starts a sequence: everything an earlier user of the index left is gone.
 *  @param state a state. @param seq kvf_seq_index. @param options checked against the state's sizes; copied.
 *  @param err detail, or NULL. @own nothing is kept. @threads as the state. @errors KVF_E_INVALID. @cost O(layers * heads). */
KVF_API KVF_CHECK kvf_status kvf_policy_open(kvf_policy_state *state, uint32_t seq, const kvf_policy_options *options,
                                             kvf_error *err);

/** Changes the budget of a sequence, at any time. Layers that hold more than their new size have an event before the next
 *  append (kvf_policy_due, KVF_BEFORE_APPEND; kept slots end in ascending position), others grow. The layers' weights stay, and no
 *  size is clamped to the prompt's length. While the prompt runs it is as if the sequence had been opened so.
 *  @param state a state. @param seq open. @param rho, budget_tokens as the options of that name. @param err detail, or NULL.
 *  @own nothing. @threads as the state.
 *  @errors KVF_E_STALE, KVF_E_INVALID (range; policy full; full layers that leave nothing), KVF_E_STATE (the sequence took no
 *  attention mass so far, having rho 1 without budget_may_change, and would need it). Nothing changes on failure.
 *  @cost O(n_layers log n_layers). @source d2o_policy/README.md, "When". */
KVF_API KVF_CHECK kvf_status kvf_policy_set_budget(kvf_policy_state *state, uint32_t seq, double rho,
                                                   uint32_t budget_tokens, kvf_error *err);

/** The sizes that kvf_policy_set_budget would give; changes nothing.
 *  @param state a state. @param seq open. @param rho, budget_tokens see above.
 *  @param sizes [n_layers]: filled where sized is set to 1; else they are not known then, as kvf_policy_sizes has it.
 *  @param sized result. @param err detail, or NULL.
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

/** Ends a sequence.
 *  @param state a state. @param seq open or not. @own nothing. @threads as the state. @errors none. @cost O(1). */
KVF_API void kvf_policy_close(kvf_policy_state *state, uint32_t seq);

/** The options a sequence runs with, NULL when it is not open.
 *  @param state a state. @param seq index. @own the state's. @threads as the state. @errors none. @cost O(1). */
KVF_API const kvf_policy_options *kvf_policy_get_options(const kvf_policy_state *state, uint32_t seq);

/** The sizes, [n_layers], NULL while they are not known (before the prompt's end; with B >= L until the overflow).
 *  @param state a state. @param seq index. @own the state's, until the next call that changes seq.
 *  @threads as the state. @errors none. @cost O(1). */
KVF_API const kvf_layer_size *kvf_policy_sizes(const kvf_policy_state *state, uint32_t seq);

/** The sizes of each table, [n_layers][n_groups], where head_budget adaptive gives the groups of a layer different ones. Until a
 *  layer is compacted first its groups have the layer's size.
 *  @param state a state. @param seq index. @own the state's, until the next call that changes seq. @threads as the state.
 *  @errors none: NULL while the sizes are not known, with head_budget equal, and with one group a layer. @cost O(1). */
KVF_API const kvf_layer_size *kvf_policy_group_sizes(const kvf_policy_state *state, uint32_t seq);

/** The layers' densities F, [n_layers], NULL before kvf_policy_budget or for a policy without a metric.
 *  @param state a state. @param seq index. @own the state's. @threads as the state. @errors none. @cost O(1). */
KVF_API const double *kvf_policy_density(const kvf_policy_state *state, uint32_t seq);

/** tau of one KV head.
 *  @param state a state. @param seq index. @param layer layer. @param kv_head KV head of this rank.
 *  @own nothing. @threads as the state. @errors none: NaN while unset or not open. @cost O(1). */
KVF_API double kvf_policy_tau(const kvf_policy_state *state, uint32_t seq, uint32_t layer, uint32_t kv_head);

typedef struct kvf_policy_counts {
    uint64_t merged, dropped; /* evicted tokens, per KV head and layer */
    uint64_t n_events;        /* (layer, event) pairs that evicted; events of a layer's groups count each */
    uint64_t raised_tokens;   /* slots over all layers by which the layers' minima lift the total above the budget */
} kvf_policy_counts;

/** Counters since kvf_policy_open, added up over layers and KV heads.
 *  @param state a state. @param seq index. @own plain values. @threads as the state.
 *  @errors none: zeros when not open. @cost O(1). */
KVF_API kvf_policy_counts kvf_policy_get_counts(const kvf_policy_state *state, uint32_t seq);

typedef enum kvf_moment {
    KVF_AT_PROMPT_END, /* also a later segment's end */
    KVF_BEFORE_APPEND, /* of one token: the overflow of a request that fitted (B >= L) computes its sizes here; a budget
                        * that was changed takes effect */
    KVF_AFTER_STEP     /* the step attended, its row is observed */
} kvf_moment;

/** Which layers of a sequence have an event now, and to how many slots they shrink. Computes the sizes where the rule says so.
 *  @param state a state. @param seq open. @param moment when. @param n_slots [n_layers], slots of the layer's tables now.
 *  @param keep [n_layers]: slots to shrink to, 0 for a layer without an event. For head_budget adaptive with several groups see
 *  kvf_policy_due_tables; here it has none.
 *  @own nothing is kept. @threads as the state. @errors none: 0 when not open. @cost O(n_layers).
 *  Returns how many layers have an event. @source d2o_policy/README.md, "When". */
KVF_API uint32_t kvf_policy_due(kvf_policy_state *state, uint32_t seq, kvf_moment moment, const uint32_t *n_slots,
                                uint32_t *keep);

/* ---- Batches, events, plans ---------------------------------------------------------------------- */

typedef enum kvf_event_kind {
    KVF_EVENT_PROMPT = 0, /* prompt, segment, overflow, budget: kept slots end in ascending position */
    KVF_EVENT_DECODE = 1  /* survivors of slots >= S fill the victims' slots < S, both ascending */
} kvf_event_kind;

typedef struct kvf_event {
    uint32_t row; /* the sequence's place in the view */
    uint32_t layer;
    uint32_t n_keep; /* may equal the table's slots: then nothing is evicted and only scores move (prompt) */
    uint32_t kind;   /* kvf_event_kind */
    /* Head groups whose tables take part, all of equally many slots; n_groups 0: all of the layer's. Groups of a layer may
     * have events of their own in one batch, each group one. */
    uint32_t group_begin, n_groups;
} kvf_event;

/* What a call works on. All sequences of one batch share ops. */
typedef struct kvf_policy_batch {
    size_t struct_size;
    const kvf_view *view;
    const kvf_pages *pages;
    const kvf_score_pages *scores; /* NULL for policies that do not observe */
    /* observe: rows [row_begin, row_end) of the view, one layer, mass as the attention left it. */
    uint32_t layer, row_begin, row_end;
    const kvf_mass *mass;
    /* Prompt sums: prompt_sums[row] (NULL: none) is [n_layers][n_q_heads][prompt_stride], as the mass's col_sums. */
    float *const *prompt_sums;
    size_t prompt_stride;
    /* match, gate, apply. */
    const kvf_event *events;
    uint32_t n_events;
    const kvf_compaction *compaction; /* begun for the events that evict; NULL: all in place */
    /* [n_events]: item of compaction, which events of one layer's groups may share; UINT32_MAX: none (nothing is evicted) */
    const uint32_t *compaction_item;
    void *workspace; /* kvf_policy_workspace_bytes, 64-byte aligned */
    size_t workspace_bytes;
    kvf_cpu_path path;
    /* What needs ask beside the sums, by row; NULL: none. */
    float *const *prompt_last;           /* as prompt_sums, of the last score_window queries (KVF_NEEDS_LAST_ROWS) */
    float *const *prompt_squares;        /* [n_layers][n_kv_heads][prompt_stride] (KVF_NEEDS_SQUARES) */
    const float *const *prompt_logprobs; /* by position: log p of each prompt token (KVF_NEEDS_LOGPROBS) */
    const float *logprobs;               /* observe: [n_seqs], log p of the token just appended */
} kvf_policy_batch;

/** Which tables of a sequence have an event now: kvf_policy_due for every head group. With head_budget adaptive it shares the
 *  slots of a layer out among its groups, when it is compacted first and whenever its size has changed: its total is n_groups
 *  times the layer's size, and by what the slots are worth that the view, pages and scores hold (with the running prompt's sums
 *  at its end, as the event itself). Groups with different sizes have an event each.
 *  @param state a state. @param stream or NULL. @param batch view, pages, scores, sums, workspace, path. @param row of the view.
 *  @param moment when. @param keep [n_layers][n_groups]: slots to shrink to, 0 for a table without an event.
 *  @param n_due how many tables have one. @param err detail, or NULL.
 *  @own nothing is kept. @threads as the state.
 *  @errors KVF_E_INVALID, KVF_E_STATE (score pages): as match. None when the sequence is not open: 0. Nothing changes on failure.
 *  @cost O(n_tables), with head_budget adaptive O(slots log slots) where it shares out.
 *  @source arXiv 2407.11550; d2o_policy/README.md, "Groups". */
KVF_API KVF_CHECK kvf_status kvf_policy_due_tables(kvf_policy_state *state, kvf_stream *stream,
                                                   const kvf_policy_batch *batch, uint32_t row, kvf_moment moment,
                                                   uint32_t *keep, uint32_t *n_due, kvf_error *err);

typedef struct kvf_plan_entry {
    uint32_t slot;   /* evicted, before the event; entries of a head ascend by position */
    uint32_t target; /* nearest kept slot, before the event; UINT32_MAX with merge none */
    float u;         /* cosine of the two keys, with match value of the two values */
    uint32_t merge;  /* 1: merged into target, 0: dropped; set by gate */
} kvf_plan_entry;

typedef struct kvf_plan_event {
    kvf_event event;
    uint32_t n_before, n_evict;
    uint64_t entry_begin;  /* entries [KV heads of the event][n_evict] */
    uint64_t reduce_begin; /* scope layer: n_evict sums of u over this rank's heads, then their number */
} kvf_plan_event;

/* What match decides and gate completes. Fixed capacity, from kvf_plan_create. */
typedef struct kvf_plan {
    size_t struct_size;
    kvf_plan_event *events;
    uint32_t n_events, event_capacity;
    kvf_plan_entry *entries;
    uint64_t n_entries, entry_capacity;
    /* [n_events][n_kv_heads]: the threshold each head used, NaN where none and for heads of no part in the event; the state takes
     * it in apply. */
    double *tau;
    double *reduce;
    uint64_t n_reduce, reduce_capacity; /* n_reduce 0: nothing to reduce */
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
    KVF_NEEDS_ROW = 2,       /* the decode row of every step */
    KVF_NEEDS_SQUARES = 4,   /* prompt: sums over the queries of the squared row, the query heads of a group as one */
    KVF_NEEDS_LAST_ROWS = 8, /* prompt: column sums of its last score_window queries alone (asked by score window) */
    KVF_NEEDS_LOGPROBS = 16  /* log p of each token given those before it */
};

enum {
    KVF_POLICY_PROMPT_ONLY = 1,  /* no decode events: after its prompt's event a layer grows */
    KVF_POLICY_EQUAL_LAYERS = 2, /* no metric: all layers weigh the same, unless there are weights */
    KVF_POLICY_RECENT = 4,       /* S is sinks and window alone: no heavy hitters */
    KVF_POLICY_KEEPS_ALL = 8     /* nothing is ever evicted */
};

/* The slots of one KV head in one event, in no order; all arrays by slot. */
typedef struct kvf_policy_slots {
    size_t struct_size;
    const kvf_policy_options *options;
    const kvf_layer_size *size;
    uint32_t layer, kv_head; /* of this rank */
    uint32_t n_slots, n_keep, next_pos;
    uint32_t kind;              /* kvf_event_kind */
    const uint32_t *pos;        /* [n_slots] */
    const float *score;         /* as accumulated, or of the last whole window of rows; NULL: none */
    const float *recent;        /* prompt_plus_current: the newest row; window: rows since then; else NULL */
    const float *squares;       /* sums of squares; NULL without KVF_NEEDS_SQUARES */
    const float *surprise;      /* -log p; NULL without KVF_NEEDS_LOGPROBS */
    const float *v_norm;        /* norm of V; NULL without score_norm v */
    const float *const *arrays; /* [n_arrays]: those above in their order, then the policy's own */
    uint32_t n_arrays;
    float *scratch; /* [2 * n_slots], the call's own */
} kvf_policy_slots;

struct kvf__fold; /* the library's own: d2o_policy/pages.h */

/* Zero is the library's own for every call: a policy sets only what differs. */
struct kvf_policy_ops {
    size_t struct_size;
    const char *name, *summary;
    uint32_t needs; /* KVF_NEEDS_* */
    /* Adds a decode step's rows to the score pages. */
    kvf_status (*observe)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_error *err);
    /* A number per query head from the column sums, [n_layers][n_q_heads_total], 0 for other ranks' heads; the caller adds
     * the ranks up. The library's own: the variance, or what options.metric says. */
    kvf_status (*metric)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                         uint32_t n_tokens, double *variance, kvf_error *err);
    /* Layer weights from the reduced numbers (NULL without metric), kept in the state; with B < L the sizes too. */
    kvf_status (*budget)(kvf_policy_state *state, uint32_t seq, const double *variance, uint32_t n_tokens,
                         kvf_error *err);
    kvf_status (*match)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                        kvf_error *err);
    kvf_status (*gate)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                       kvf_error *err);
    kvf_status (*apply)(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                        const kvf_plan *plan, kvf_error *err);
    uint32_t flags; /* KVF_POLICY_* */
    /* Score arrays of a page, at least those that needs and options ask for (what is beyond them starts at 0 and moves with
     * the slots), at most KVF_MAX_SCORE_ARRAYS. */
    uint32_t (*n_arrays)(const kvf_policy_options *options);
    /* What each slot is worth, [n_slots]: the lowest go. Ties keep the lower position, NaN goes first, +INFINITY stays as
     * long as anything else can go. Sinks and window are protected by the library and need no number. */
    void (*worth)(const kvf_policy_slots *slots, float *worth);
    /* What each layer weighs, [n_layers]: sizes are made proportional to it, with the exact total. density: F, or zeros
     * without a metric. NaN and negative numbers count as 0. */
    void (*weights)(const kvf_policy_options *options, uint32_t n_prompt, uint32_t budget, const double *density,
                    uint32_t n_layers, double *weights);
    /* How evicted rows enter kept ones, in place of merging (policies of the library alone). */
    void (*fold)(const struct kvf__fold *head);
};

/** The library's own worth of slots, as options say: score (mean, sqrt, window), score_norm, score_pool.
 *  @param slots of one KV head. @param worth [n_slots] result.
 *  @own the caller's array. @threads any. @errors none. @cost O(n_slots), with score_pool O(n_slots log n_slots). */
KVF_API void kvf_policy_worth(const kvf_policy_slots *slots, float *worth);

#ifdef __cplusplus
}
#endif
#endif
