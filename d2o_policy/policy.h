/* d2o_policy/policy.h: what the files of this folder share: a sequence's state, the sizes, the call's geometry.
 *
 * Words: L prompt tokens, B budget per layer in tokens, S slots a layer keeps (hh + M), M recent window, T sinks,
 * k = evict_every. u is a cosine, tau the threshold it is compared with.
 */
#ifndef KVF_D2O_POLICY_POLICY_H
#define KVF_D2O_POLICY_POLICY_H

#include "base/base.h"
#include "kvfold/policy.h"

#define KVF__MAX_TOKENS (1u << 30)    /* budgets and prompts: sums over 1,024 layers stay exact in a double */
#define KVF__MAX_POSITION 0x7fffffffu /* a selection key has 31 bits for it */
#define KVF__NO_UPPER 0x3fffffffu     /* "no upper clamp" of a layer's size */
#define KVF__MAX_LAYERS 1024u
#define KVF__MAX_CAM_TOKENS 128u /* one less than the rows there is scratch for */
#define KVF__NONE UINT32_MAX
#define KVF__MAX_POOL 64u /* above score_pool */

/* Whether the groups of a layer have been dealt sizes of their own; before: by sizes that have changed since. */
typedef enum kvf__dealt { KVF__NOT_DEALT, KVF__DEALT, KVF__DEALT_BEFORE } kvf__dealt;

/* One sequence. Invariants: sized implies budgeted; deferred implies budgeted and not sized;
 * changed implies sized;
 * tau is NaN until the head's first event; scored[l, h] leading slots of a KV head have an entry in the score pages;
 * rows[l] is below score_window. */
typedef struct kvf__policy_seq {
    bool open;
    bool budgeted; /* weights, n_prompt, budget and lo are known */
    bool sized;    /* sizes are known */
    bool deferred; /* sizes wait for the first decode step */
    bool changed;  /* sized anew by a change of the budget: layers above their size shrink before the next append */
    bool has_density;
    kvf_policy_options options;
    uint32_t n_prompt; /* L: of all segments */
    uint32_t budget;   /* B */
    uint32_t lo;       /* min(first B, 16) */
    kvf_policy_counts counts;
    double *weights;             /* [n_layers] */
    double *density;             /* [n_layers] */
    kvf_layer_size *sizes;       /* [n_layers] */
    double *tau;                 /* [n_layers][n_kv_heads] */
    uint32_t *scored;            /* [n_layers][n_kv_heads] */
    kvf_layer_size *group_sizes; /* [n_layers][n_groups]: the layers', until they are dealt */
    uint8_t *dealt;              /* [n_layers]: kvf__dealt */
    uint32_t *rows;              /* [n_layers]: score window: rows collected since the last whole window */
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
    /* For groups.c; values: with one group there are none. */
    double *values, *group_next; /* [n_groups][max_slots]; [n_groups] */
    uint32_t *group_counts;      /* [n_groups] */
    kvf_event *group_events;     /* [n_groups] */
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
void kvf__preset_d2o_serving(kvf_policy_options *o);
void kvf__preset_d2o_authors(kvf_policy_options *o);
void kvf__preset_cam_h2o(kvf_policy_options *o);

kvf_status kvf__policy_ops_check(const kvf_policy_ops *ops, kvf_error *err);

/* ---- needs.c --------------------------------------------------------------------------------- */

uint32_t kvf__policy_flags(const kvf_policy_options *o);
uint32_t kvf__policy_k(const kvf_policy_options *o, uint32_t block_size);
/* Slots above S that a layer grows by before it evicts: k, none where only a prompt is compressed. */
uint32_t kvf__policy_room(const kvf_policy_options *o, uint32_t block_size);
bool kvf__policy_never_evicts(const kvf_policy_options *o);
bool kvf__policy_is_full_layer(const kvf_policy_options *o, uint32_t layer, uint32_t n_layers);
uint32_t kvf__policy_n_full(const kvf_policy_options *o, uint32_t n_layers);
int64_t kvf__policy_layer(int32_t layer, uint32_t n_layers); /* -1 is the last */
/* Refuses a budget in bytes that kvf_policy_options_resolve has not seen. */
kvf_status kvf__policy_resolved(const kvf_policy_options *o, kvf_error *err);
/* Whether merging goes by tau: there is a merge and no fixed gate. */
bool kvf__policy_has_tau(const kvf_policy_options *o);

/* Which array of a score page holds what, KVF__NONE where none does. Arrays [known, n) are the policy's own. */
typedef struct kvf__roles {
    uint32_t n, score, recent, squares, surprise, v_norm, known;
} kvf__roles;
kvf__roles kvf__score_roles(const kvf_policy_options *o);

/* ---- layers.c: README.md, layer level ---------------------------------------------------------------- */

/* Unbiased variance in double precision, 0 for fewer than two values. */
double kvf__variance(const float *x, uint32_t n);
/* What a query head's column sums x[n] say to the metric: the variance, or how many tokens count. */
double kvf__metric_of(const kvf_policy_options *o, const float *x, uint32_t n);
/* F per layer from the numbers of the query heads, [n_layers][n_heads]. */
void kvf__layer_density(kvf_metric metric, const double *variance, uint32_t n_layers, uint32_t n_heads,
                        double *density);
/* softmax(-sign * strength * F), of ln F for the metrics that count tokens, over the layers that pay; full layers get 0
 * where others pay for them. */
void kvf__layer_weights(const kvf_policy_options *o, const double *density, uint32_t n_layers, double *weights);

/* ---- budget.c: README.md, layer level ---------------------------------------------------------------- */

/* Integers in [lo, hi] that add up to total exactly, as near as can be to clamp(lam * w, lo, hi). Requires
 * n * lo <= total <= n * hi. scratch: [3 * n]; order: [n]. */
void kvf__exact_sizes(const double *w, uint32_t n, uint64_t total, uint32_t lo, uint32_t hi, double *scratch,
                      uint32_t *order, uint32_t *out);
/* S into hh and window. */
void kvf__split(const kvf_policy_options *o, uint32_t keep, kvf_layer_size *size);
uint32_t kvf__budget_tokens(const kvf_policy_options *o, uint32_t n_prompt);

/* What the layers that are compressed share: n of them, total in units (tokens or blocks), each in [lo, hi]. */
typedef struct kvf__share {
    uint32_t n, n_full, lo, hi, unit; /* unit: tokens of one unit */
    uint64_t total, raised_tokens;
} kvf__share;
kvf__share kvf__layer_share(const kvf_policy_options *o, uint32_t n_layers, uint32_t block_size, uint32_t n_prompt,
                            uint32_t budget, uint32_t lo, bool clamp);
/* Fills the layers' sizes of a budgeted sequence, and not the groups'. clamp: no layer above the prompt's length. */
void kvf__policy_size(kvf_policy_state *state, kvf__policy_seq *s, bool clamp);

/* ---- due.c, groups.c --------------------------------------------------------------------------------- */

/* Computes the sizes where this moment is the one to do so. most: slots of the longest table. Returns how far above its size a
 * table must be to have an event now, 0 for none. */
uint32_t kvf__policy_due_above(kvf_policy_state *state, kvf__policy_seq *s, kvf_moment moment, uint32_t most);
/* Whether the groups of a layer have sizes of their own. */
bool kvf__groups_adapt(const kvf_policy_state *state, const kvf__policy_seq *s);
/* The layers' sizes have changed: the groups are to be dealt theirs anew. */
void kvf__groups_reset(const kvf_policy_state *state, kvf__policy_seq *s);
const kvf_layer_size *kvf__size_of(const kvf_policy_state *state, const kvf__policy_seq *s, uint32_t layer,
                                   uint32_t kv_head);

/* ---- The calls of the vtables -------------------------------------------------------------------- */

kvf_status kvf__policy_observe(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                               kvf_error *err);
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

/* Orders slots from worth keeping (low) to first to go (high): the window, then the sinks, lower position first, then
 * the score descending (NaN last), ties to the lower position. */
uint64_t kvf__select_key(float score, uint32_t pos, uint32_t window_begin, uint32_t sinks);
/* The slots with the n_evict highest keys, in no order. heap: [n_evict]. */
void kvf__select_evicted(const uint64_t *keys, uint32_t n, uint32_t n_evict, uint32_t *heap);
/* The g numbers of one slot, stride floats apart, as one. */
float kvf__gqa_reduce(kvf_gqa gqa, const float *x, uint32_t g, size_t stride);
/* The threshold after an event whose mean of the nearest cosines is mean; tau NaN: its first. */
double kvf__tau_next(double tau, double mean, double beta_new, double beta_old);
/* Weights of a merge of n evicted tokens into one kept: we[n]; returns the kept one's. mass: weights of the slots,
 * the kept one's last, read for KVF_MERGE_MASS alone. */
double kvf__merge_weights(kvf_merge merge, const float *u, const float *mass, uint32_t n, double *we);

#endif
