/* Changing the budget of a sequence (README.md, when). */
#include "d2o_policy/policy.h"

/* The options after the change. Refuses options that need scores which were not observed so far. */
static kvf_status change_options(const kvf_policy_state *state, const kvf__policy_seq *s, double rho,
                                 uint32_t budget_tokens, kvf_policy_options *o, kvf_error *err) {
    *o = s->options;
    uint32_t flags = kvf__policy_flags(o);
    if (flags & KVF_POLICY_KEEPS_ALL)
        return kvf__fail_value(err, KVF_E_INVALID, "policy", o->ops->name,
                               "has no budget to change, it keeps every token");
    if (flags & KVF_POLICY_PROMPT_ONLY && s->budgeted)
        return kvf__fail_value(err, KVF_E_INVALID, "policy", o->ops->name,
                               "compresses its prompt alone, and the prompt has ended");
    bool observes = kvf_policy_needs(o) != 0;
    o->rho = rho;
    o->budget_tokens = budget_tokens;
    kvf_status st = kvf_policy_options_check(o, state->config.n_layers, state->config.block_size, err);
    if (st) return st;
    if (observes) o->budget_may_change = 1; /* it goes on observing, whatever the budget */
    if (kvf_policy_needs(o) && !observes)
        return kvf__fail_real(err, KVF_E_STATE, budget_tokens ? "budget_tokens" : "rho",
                              budget_tokens ? (double)budget_tokens : rho,
                              "the request has rho 1 and takes no attention mass, which policy %s would need by now: "
                              "submit it with budget_may_change 1",
                              o->ops->name);
    kvf_policy_need need; /* refuses full layers that leave nothing to the others */
    return s->budgeted
               ? kvf_policy_project(o, state->config.n_layers, 1, state->config.block_size, s->n_prompt, 0, &need, err)
               : KVF_OK;
}

/* to: the sequence after the change, with its sizes in `sizes`. The weights stay. No layer is clamped to the prompt's length, because
 * tokens have been generated since, as at an overflow. If there are no sizes yet, they are computed at the append that would
 * exceed the budget, or at the next one if it is exceeded already. */
static kvf_status change(kvf_policy_state *state, uint32_t seq, double rho, uint32_t budget_tokens, kvf__policy_seq *to,
                         kvf_layer_size *sizes, kvf_error *err) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    if (!s) return kvf__fail(err, KVF_E_STALE, "budget: seq %u is not open", seq);
    *to = *s;
    to->sizes = sizes;
    kvf_status st = change_options(state, s, rho, budget_tokens, &to->options, err);
    if (st || !s->budgeted) return st;
    to->budget = kvf__budget_tokens(&to->options, s->n_prompt);
    to->lo = KVF__MIN(to->budget, KVF_MIN_BUDGET_TOKENS);
    to->changed = false;
    if (kvf__policy_never_evicts(&to->options)) {
        to->sized = to->deferred = false;
    } else if (s->sized) {
        kvf__policy_size(state, to, false);
        to->changed = true;
    } else {
        to->deferred = s->deferred && to->budget < s->n_prompt;
    }
    return KVF_OK;
}

kvf_status kvf_policy_preview_budget(kvf_policy_state *state, uint32_t seq, double rho, uint32_t budget_tokens,
                                     kvf_layer_size *sizes, int *sized, kvf_error *err) {
    kvf__policy_seq to;
    if (!state || !sizes || !sized)
        return kvf__fail(err, KVF_E_INVALID, "kvf_policy_preview_budget: state, sizes and sized must be set");
    kvf_status st = change(state, seq, rho, budget_tokens, &to, sizes, err);
    if (!st) *sized = to.sized;
    return st;
}

kvf_status kvf_policy_set_budget(kvf_policy_state *state, uint32_t seq, double rho, uint32_t budget_tokens,
                                 kvf_error *err) {
    kvf__policy_seq to;
    if (!state) return kvf__fail(err, KVF_E_INVALID, "kvf_policy_set_budget: state is NULL");
    kvf_status st = change(state, seq, rho, budget_tokens, &to, state->sizes, err);
    if (st) return st;
    kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    if (to.sized) memcpy(s->sizes, to.sizes, state->config.n_layers * sizeof *s->sizes);
    to.sizes = s->sizes;
    *s = to;
    if (s->sized) kvf__groups_reset(state, s);
    return KVF_OK;
}
