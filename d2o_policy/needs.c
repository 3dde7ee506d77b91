/* What follows from a policy and its options: the functions of its vtable, the sums it needs, its score arrays. */
#include <math.h>

#include "d2o_policy/policy.h"

kvf_policy_ops kvf__policy_ops_resolve(const kvf_policy_ops *ops) {
    kvf_policy_ops r = {0};
    if (!ops) return r;
    memcpy(&r, ops, KVF__MIN(ops->struct_size, sizeof r));
    bool sees = r.needs & KVF_NEEDS_COL_SUMS && !(r.flags & (KVF_POLICY_EQUAL_LAYERS | KVF_POLICY_KEEPS_ALL));
    if (!r.observe) r.observe = kvf__policy_observe;
    if (!r.metric && sees) r.metric = kvf__policy_metric;
    if (!r.budget) r.budget = kvf__policy_budget;
    if (!r.match) r.match = kvf__policy_match;
    if (!r.gate) r.gate = kvf__policy_gate;
    if (!r.apply) r.apply = kvf__policy_apply;
    return r;
}

enum {
    FROM_ATTENTION = KVF_NEEDS_COL_SUMS | KVF_NEEDS_LAST_ROWS,
    FROM_MODEL = KVF_NEEDS_REPEAT | KVF_NEEDS_PROBE,
    SUMS = FROM_ATTENTION | KVF_NEEDS_ROW | KVF_NEEDS_SQUARES | KVF_NEEDS_REPEAT
};

bool kvf__policy_asks_model(const kvf_policy_options *o) {
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    return (o->score == KVF_SCORE_REPEAT || o->score == KVF_SCORE_PROBE) && !(ops.flags & KVF_POLICY_KEEPS_ALL) &&
           ops.needs & (SUMS | FROM_MODEL);
}

bool kvf__policy_asks_probe(const kvf_policy_options *o) {
    return o->score == KVF_SCORE_PROBE && kvf__policy_asks_model(o);
}
bool kvf__policy_asks_repeat(const kvf_policy_options *o) {
    return o->score == KVF_SCORE_REPEAT && kvf__policy_asks_model(o);
}

int kvf_policy_has_metric(const kvf_policy_options *options) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    return o && kvf__policy_ops_resolve(o->ops).metric && !kvf__policy_asks_model(o) && o->budget == KVF_BUDGET_LAYER;
}

uint32_t kvf__policy_flags(const kvf_policy_options *o) { return kvf__policy_ops_resolve(o->ops).flags; }

uint32_t kvf__policy_k(const kvf_policy_options *o, uint32_t block_size) {
    return o->evict_every ? o->evict_every : KVF__MAX(block_size / 2, 1u);
}

uint32_t kvf__policy_room(const kvf_policy_options *o, uint32_t block_size) {
    return kvf__policy_flags(o) & KVF_POLICY_PROMPT_ONLY ? 0 : kvf__policy_k(o, block_size);
}

bool kvf__policy_never_evicts(const kvf_policy_options *o) {
    return kvf__policy_flags(o) & KVF_POLICY_KEEPS_ALL ||
           (o->budget_tokens == 0 && o->budget_bytes == 0 && o->rho >= 1.0);
}

int kvf_policy_evicts(const kvf_policy_options *options) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    return o && !kvf__policy_never_evicts(o);
}

uint32_t kvf_policy_needs(const kvf_policy_options *options) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    if (!o || (!o->budget_may_change && kvf__policy_never_evicts(o))) return 0;
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    uint32_t needs = ops.needs & ~(uint32_t)(FROM_ATTENTION | FROM_MODEL);
    if (kvf__policy_asks_model(o)) {
        needs &= ~(uint32_t)KVF_NEEDS_ROW;
        needs |= o->score == KVF_SCORE_REPEAT ? KVF_NEEDS_REPEAT : KVF_NEEDS_PROBE;
        if ((o->merge == KVF_MERGE_ATTENTION || o->score_mix > 0) && o->score == KVF_SCORE_PROBE)
            needs |= KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW;
    } else if (ops.needs & (FROM_ATTENTION | FROM_MODEL)) {
        needs |= o->score == KVF_SCORE_WINDOW ? KVF_NEEDS_LAST_ROWS : KVF_NEEDS_COL_SUMS;
        if (ops.needs & FROM_MODEL) needs |= KVF_NEEDS_ROW;
    }
    if (kvf_policy_has_metric(o)) needs |= KVF_NEEDS_COL_SUMS; /* beside the scores of the last queries */
    if (ops.flags & KVF_POLICY_PROMPT_ONLY) needs &= ~(uint32_t)KVF_NEEDS_ROW;
    return needs;
}

int kvf_policy_observes(const kvf_policy_options *options) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    return o && (kvf_policy_needs(o) & (KVF_NEEDS_ROW | KVF_NEEDS_LOGPROBS)) &&
           !(kvf__policy_flags(o) & KVF_POLICY_PROMPT_ONLY);
}

kvf__roles kvf__score_roles(const kvf_policy_options *o) {
    uint32_t needs = kvf_policy_needs(o), n = 0;
    kvf__roles r = {0, KVF__NONE, KVF__NONE, KVF__NONE, KVF__NONE, KVF__NONE, 0};
    if (!needs) return r;
    if (needs & SUMS) {
        r.score = n++;
        if (o->score == KVF_SCORE_PROMPT_PLUS_CURRENT || o->score == KVF_SCORE_WINDOW) r.recent = n++;
    }
    if (needs & KVF_NEEDS_SQUARES) r.squares = n++;
    if (needs & KVF_NEEDS_LOGPROBS) r.surprise = n++;
    if (o->score_norm == KVF_SCORE_NORM_V) r.v_norm = n++;
    r.n = r.known = n;
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    if (ops.n_arrays) r.n = KVF__MAX(n, KVF__MIN(ops.n_arrays(o), KVF_MAX_SCORE_ARRAYS));
    return r;
}

uint32_t kvf_policy_n_arrays(const kvf_policy_options *options) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    return o ? kvf__score_roles(o).n : 0;
}

int64_t kvf__policy_layer(int32_t layer, uint32_t n_layers) { return layer >= 0 ? layer : (int64_t)n_layers + layer; }

bool kvf__policy_is_full_layer(const kvf_policy_options *o, uint32_t layer, uint32_t n_layers) {
    for (uint32_t i = 0; i < o->n_full_layers; i++)
        if (kvf__policy_layer(o->full_layers[i], n_layers) == layer) return true;
    return false;
}

uint32_t kvf__policy_n_full(const kvf_policy_options *o, uint32_t n_layers) {
    uint32_t n = 0;
    for (uint32_t l = 0; l < n_layers && o->n_full_layers; l++) n += kvf__policy_is_full_layer(o, l, n_layers);
    return n;
}

int kvf_policy_needs_weights(const kvf_policy_options *options) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    return o && (o->merge == KVF_MERGE_MASS || o->merge == KVF_MERGE_ATTENTION);
}

bool kvf__policy_folds(const kvf_policy_ops *ops) { return kvf__policy_ops_resolve(ops).gate == kvf__policy_cam.gate; }

bool kvf__policy_has_tau(const kvf_policy_options *o) { return o->merge != KVF_MERGE_NONE && isnan(o->gate); }

kvf_status kvf_policy_options_resolve(kvf_policy_options *options, uint32_t n_layers, uint64_t token_bytes,
                                      kvf_error *err) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    if (!o || n_layers == 0 || token_bytes == 0)
        return kvf__fail(err, KVF_E_INVALID,
                         "kvf_policy_options_resolve: options, n_layers and token_bytes must be set");
    if (o->budget_bytes == 0) return KVF_OK;
    if (o->budget_tokens)
        return kvf__fail_field(err, KVF_E_INVALID, "budget_bytes", o->budget_bytes, 0,
                               "budget_tokens is %u: set one of them", o->budget_tokens);
    uint64_t layer = o->budget_bytes / n_layers, tokens = layer / token_bytes, least;
    if (tokens < KVF_MIN_BUDGET_TOKENS) {
        if (__builtin_mul_overflow((uint64_t)KVF_MIN_BUDGET_TOKENS * n_layers, token_bytes, &least)) least = UINT64_MAX;
        return kvf__fail_size(err, KVF_E_INVALID, "budget_bytes", o->budget_bytes, least,
                              "%u layers of %u tokens take more;", n_layers, KVF_MIN_BUDGET_TOKENS);
    }
    kvf_policy_options resolved = *o;
    resolved.budget_tokens = (uint32_t)KVF__MIN(tokens, KVF__MAX_TOKENS);
    resolved.budget_bytes = 0;
    kvf__output(options, &resolved, sizeof resolved);
    return KVF_OK;
}

kvf_status kvf__policy_resolved(const kvf_policy_options *o, kvf_error *err) {
    if (o->budget_bytes == 0) return KVF_OK;
    return kvf__fail_field(err, KVF_E_INVALID, "budget_bytes", o->budget_bytes, 0,
                           "is not in tokens yet: call kvf_policy_options_resolve");
}
