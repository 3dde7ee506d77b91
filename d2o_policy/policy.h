/* d2o_policy/policy.h: the state of a sequence, and the functions that the files of this folder share.
 *
 * Words
 *   L    prompt tokens
 *   B    budget: tokens that a layer keeps on average
 *   S    slots that a layer keeps after an event: heavy hitters (hh) + M
 *   M    recent window
 *   T    sinks
 *   k    evict_every
 *   u    cosine of an evicted token and its nearest kept one; it merges if u is at least tau
 *   unit a slot, or with budget_unit block a block: layers and head groups are given whole units
 */
#ifndef KVF_D2O_POLICY_POLICY_H
#define KVF_D2O_POLICY_POLICY_H

#include "base/base.h"
#include "kvfold/policy.h"

#define KVF__MAX_TOKENS (1u << 30)    /* of a budget or prompt: sums over 1,024 layers are then exact in a double */
#define KVF__MAX_POSITION 0x7fffffffu /* a selection key has 31 bits for the position */
#define KVF__NO_UPPER 0x3fffffffu     /* of a layer's size: no upper limit */
#define KVF__MAX_LAYERS 1024u
#define KVF__MAX_CAM_TOKENS 128u /* one less than the rows of the scratch memory */
#define KVF__NONE UINT32_MAX
#define KVF__BINS 2048u   /* of a pass of radix select */
#define KVF__MAX_POOL 64u /* score_pool is less */

/* Whether the head groups of a layer have been given their sizes. BEFORE: they have, but the layer's size has changed since. */
typedef enum kvf__dealt { KVF__NOT_DEALT, KVF__DEALT, KVF__DEALT_BEFORE } kvf__dealt;

/* One sequence. Invariants: sized implies budgeted; deferred implies budgeted and not sized; changed implies sized;
 * tau is NaN until the head's first event; the first scored[l, h] slots of a KV head have an entry in the score pages;
 * rows[l] < score_window. */
typedef struct kvf__policy_seq {
    bool open;
    bool budgeted; /* weights, n_prompt, budget and lo are known */
    bool sized;    /* sizes are known */
    bool deferred; /* sizes wait for the first decode step */
    bool changed;  /* the budget changed and the sizes with it: layers above their size shrink before the next append */
    bool has_density;
    bool resized;   /* its sizes are new, and the driver has not said so: that call failed */
    bool has_pages; /* the driver has taken its score pages */
    kvf_policy_options options;
    uint32_t n_prompt; /* L: of all segments */
    uint32_t segment;  /* tokens of the newest of them */
    uint32_t budget;   /* B */
    uint32_t lo;       /* min(first B, 16) */
    kvf_policy_counts counts;
    double *weights;             /* [n_layers] */
    double *density;             /* [n_layers] */
    kvf_layer_size *sizes;       /* [n_layers] */
    double *tau;                 /* [n_layers][n_kv_heads] */
    uint32_t *scored;            /* [n_layers][n_kv_heads] */
    kvf_layer_size *group_sizes; /* [n_layers][n_groups]: the layer's size until its groups are given their own */
    uint8_t *dealt;              /* [n_layers]: kvf__dealt */
    uint32_t *seen;              /* [n_layers]: next_pos when the layer was observed last */
    uint32_t *rows;              /* [n_layers]: with score window: rows collected since the last whole window */
} kvf__policy_seq;

struct kvf_policy_state {
    kvf_policy_state_config config;
    size_t bytes;
    kvf_error error;
    kvf__policy_seq *seqs;  /* [max_seqs]; one that was never opened has not been touched */
    kvf__policy_seq arrays; /* the arrays of all of them, each [max_seqs] of what a sequence has */
    double *scratch;        /* [4 * n_layers], for budgets */
    uint32_t *integers;     /* [2 * n_layers] */
    kvf_layer_size *sizes;  /* [n_layers], for a change of the budget */
    uint32_t *layer_slots;  /* [n_layers] */
    /* Scratch of groups.c; values is NULL if layers have one group. */
    double *values, *group_next; /* [n_groups][max_slots]; [n_groups] */
    uint32_t *group_counts;      /* [n_groups] */
    kvf_event *group_events;     /* [n_layers * n_groups] */
    /* Scratch of global.c. */
    double *bins;            /* [KVF__BINS] */
    double *ties;            /* [n_layers][groups of all ranks] */
    uint32_t *above, *equal; /* [n_layers * n_groups] units of a table above the threshold, and equal to it */
};

/* The sequence if it is open, else NULL. */
kvf__policy_seq *kvf__policy_seq_get(const kvf_policy_state *state, uint32_t seq);

/* ---- presets.c ------------------------------------------------------------------------------- */

#define KVF__POLICY_DECLARE(name)                   \
    extern const kvf_policy_ops kvf__policy_##name; \
    void kvf__preset_##name(kvf_policy_options *o); /* what differs from d2o's paper preset */
KVF__POLICY_DECLARE(full)
KVF__POLICY_DECLARE(d2o)
KVF__POLICY_DECLARE(h2o)
KVF__POLICY_DECLARE(streaming)
KVF__POLICY_DECLARE(fold)
KVF__POLICY_DECLARE(uniform)
KVF__POLICY_DECLARE(evict)
KVF__POLICY_DECLARE(reciprocal)
KVF__POLICY_DECLARE(exp_decay)
KVF__POLICY_DECLARE(roco)
KVF__POLICY_DECLARE(snapkv)
KVF__POLICY_DECLARE(pyramidkv)
KVF__POLICY_DECLARE(cam)
KVF__POLICY_DECLARE(sirllm)
KVF__POLICY_DECLARE(kvzip)
KVF__POLICY_DECLARE(kvzap)
void kvf__preset_fold_probe(kvf_policy_options *o);
void kvf__preset_fold_light(kvf_policy_options *o);
void kvf__preset_fold_repeat(kvf_policy_options *o);
void kvf__preset_d2o_serving(kvf_policy_options *o);
void kvf__preset_d2o_authors(kvf_policy_options *o);
void kvf__preset_cam_h2o(kvf_policy_options *o);

/* A caller's options in this version's form: the caller's own if they have it, else copied. NULL: none, or a wrong
 * struct_size. */
const kvf_policy_options *kvf__options_of(const kvf_policy_options *given, kvf_policy_options *copy);
kvf_status kvf__policy_ops_check(const kvf_policy_ops *ops, kvf_error *err);

/* ---- needs.c --------------------------------------------------------------------------------- */

uint32_t kvf__policy_flags(const kvf_policy_options *o);
/* Whether slots are ranked by scores from the model: score repeat or probe, in a policy that ranks by scores. */
bool kvf__policy_asks_model(const kvf_policy_options *o);
bool kvf__policy_asks_probe(const kvf_policy_options *o); /* the scores are in kvf_pages.score */
bool kvf__policy_asks_repeat(
    const kvf_policy_options *o); /* the scores are in score pages; slots of generated tokens have none */
uint32_t kvf__policy_k(const kvf_policy_options *o, uint32_t block_size);
/* Slots above S that a layer gains before it evicts: k, or 0 if only the prompt is compressed. */
uint32_t kvf__policy_room(const kvf_policy_options *o, uint32_t block_size);
bool kvf__policy_never_evicts(const kvf_policy_options *o);
bool kvf__policy_is_full_layer(const kvf_policy_options *o, uint32_t layer, uint32_t n_layers);
uint32_t kvf__policy_n_full(const kvf_policy_options *o, uint32_t n_layers);
int64_t kvf__policy_layer(int32_t layer, uint32_t n_layers); /* -1 is the last */
/* Refuses budget_bytes that kvf_policy_options_resolve has not converted. */
kvf_status kvf__policy_resolved(const kvf_policy_options *o, kvf_error *err);
/* Whether evicted values reach kept ones by cam's rule (kvf__cam_fold), which goes with its gate. */
bool kvf__policy_folds(const kvf_policy_ops *ops);
/* Whether merging uses tau: there is a merge and no fixed gate. */
bool kvf__policy_has_tau(const kvf_policy_options *o);

/* Index of each array in a score page, KVF__NONE if there is none. Arrays [known, n) are the policy's own. */
typedef struct kvf__roles {
    uint32_t n, score, recent, squares, surprise, v_norm, known;
} kvf__roles;
kvf__roles kvf__score_roles(const kvf_policy_options *o);

/* ---- layers.c: README.md, layer level ---------------------------------------------------------------- */

/* Unbiased variance in double precision, 0 for fewer than two values. */
double kvf__variance(const float *x, uint32_t n);
/* The metric of a query head's column sums x[n]: their variance, or the number of tokens that count. */
double kvf__metric_of(const kvf_policy_options *o, const float *x, uint32_t n);
/* F per layer from the numbers of the query heads, [n_layers][n_heads]. */
void kvf__layer_density(kvf_metric metric, const double *variance, uint32_t n_layers, uint32_t n_heads,
                        double *density);
/* softmax(-sign * strength * F) over the layers that are not full layers; for the metrics that count tokens of ln F instead of F. Full
 * layers get 0 if the others pay for them. */
void kvf__layer_weights(const kvf_policy_options *o, const double *density, uint32_t n_layers, double *weights);

/* ---- budget.c: README.md, layer level ---------------------------------------------------------------- */

/* Integers in [lo, hi] that add up to total exactly and are as close as possible to clamp(lam * w, lo, hi). Requires
 * n * lo <= total <= n * hi. scratch: [3 * n]; order: [n]. */
void kvf__exact_sizes(const double *w, uint32_t n, uint64_t total, uint32_t lo, uint32_t hi, double *scratch,
                      uint32_t *order, uint32_t *out);
/* Divides S into hh and window. */
void kvf__split(const kvf_policy_options *o, uint32_t keep, kvf_layer_size *size);
uint32_t kvf__budget_tokens(const kvf_policy_options *o, uint32_t n_prompt);

/* What the n compressed layers have together: total units (tokens or blocks), each layer within [lo, hi]. */
typedef struct kvf__share {
    uint32_t n, n_full, lo, hi, unit; /* unit: tokens in one unit */
    uint64_t total, raised_tokens;
} kvf__share;
kvf__share kvf__layer_share(const kvf_policy_options *o, uint32_t n_layers, uint32_t block_size, uint32_t n_prompt,
                            uint32_t budget, uint32_t lo, bool clamp);
/* budget global: the recent window of every table, with a budget of `budget` tokens each. */
uint32_t kvf__global_window(const kvf_policy_options *o, uint32_t budget);
/* budget global: the units of n tables together. */
uint64_t kvf__global_units(const kvf__share *share, uint32_t budget, uint64_t n);
/* Computes the layers' sizes of a budgeted sequence, not its groups'. clamp: no layer above the prompt's length. */
void kvf__policy_size(kvf_policy_state *state, kvf__policy_seq *s, bool clamp);

/* A copy of a vtable in which NULL functions are replaced by the library's own. Only metric stays NULL, where all layers weigh the
 * same. */
kvf_policy_ops kvf__policy_ops_resolve(const kvf_policy_ops *ops);

/* ---- due.c, groups.c --------------------------------------------------------------------------------- */

/* Computes the sizes if this is the moment to. most: slots of the longest table. Returns how many slots above its size a table must
 * have for an event now; 0: no table has one. */
uint32_t kvf__policy_due_above(kvf_policy_state *state, kvf__policy_seq *s, kvf_moment moment, uint32_t most);
/* kvf_policy_due by layers, for sequences whose groups are equal; others have no event here. n_slots, keep: [n_layers]. Returns how
 * many layers have an event. */
uint32_t kvf__policy_due_layers(kvf_policy_state *state, uint32_t seq, kvf_moment moment, const uint32_t *n_slots,
                                uint32_t *keep);
/* The sum of numbers over the ranks (kvf_events_config.reduce). */
typedef struct kvf__ranks {
    kvf_status (*reduce)(void *ctx, double *values, uint64_t n, kvf_error *err);
    void *ctx;
} kvf__ranks;
/* kvf_policy_due; ranks: NULL with one. */
kvf_status kvf__policy_due(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *given, uint32_t row,
                           kvf_moment moment, uint32_t *keep, uint32_t *n_due, const kvf__ranks *ranks, kvf_error *err);
/* Whether the tables of a layer may have different sizes. */
bool kvf__groups_adapt(const kvf_policy_state *state, const kvf__policy_seq *s);
/* After a change of the layers' sizes: the groups will be given new sizes. */
void kvf__groups_reset(const kvf_policy_state *state, kvf__policy_seq *s);
const kvf_layer_size *kvf__size_of(const kvf_policy_state *state, const kvf__policy_seq *s, uint32_t layer,
                                   uint32_t kv_head);

/* ---- The calls of the vtables -------------------------------------------------------------------- */

kvf_status kvf__policy_observe(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                               kvf_error *err);
/* For rows that this layer has observed: only the newest slot. If the step was taken back, that slot may have come to another page. */
kvf_status kvf__policy_observe_again(kvf_policy_state *state, const kvf_policy_batch *batch, kvf_error *err);
kvf_status kvf__policy_metric(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                              uint32_t n_tokens, double *variance, kvf_error *err);
kvf_status kvf__policy_budget(kvf_policy_state *state, uint32_t seq, const double *variance, uint32_t n_tokens,
                              kvf_error *err);
kvf_status kvf__policy_match(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                             kvf_error *err);
kvf_status kvf__policy_gate(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                            kvf_error *err);
kvf_status kvf__policy_apply(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                             const kvf_plan *plan, kvf_error *err);

/* ---- match.c, gate.c, apply.c: the parts that golden cases test by themselves ------------------------ */

/* A key by which slots are evicted: the highest first. Keys ascend from the window to the sinks (lower position first) to the other
 * slots by falling score (NaN last), on ties by position. */
uint64_t kvf__select_key(float score, uint32_t pos, uint32_t window_begin, uint32_t sinks);
/* The slots with the n_evict highest keys, in no particular order. heap: [n_evict]. */
void kvf__select_evicted(const uint64_t *keys, uint32_t n, uint32_t n_evict, uint32_t *heap);
/* Reduces the numbers of one slot's g query heads, stride floats apart, to one. */
float kvf__gqa_reduce(kvf_gqa gqa, const float *x, uint32_t g, size_t stride);
/* tau after an event; mean: of the cosines of its targets. tau NaN: the first event. */
double kvf__tau_next(double tau, double mean, double beta_new, double beta_old);
/* Weights of a merge of n evicted tokens into one kept one: we[n]; returns the kept one's weight. mass: weights of the slots, the
 * kept one's last; only for KVF_MERGE_MASS. */
double kvf__merge_weights(kvf_merge merge, const float *u, const float *mass, uint32_t n, double *we);

#endif
