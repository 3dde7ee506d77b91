/* gate: the threshold, and which evicted tokens merge (README.md, merging). The state's tau follows in apply. */
#include <math.h>

#include "d2o_policy/pages.h"

double kvf__tau_next(double tau, double mean, double beta_new, double beta_old) {
    return isnan(tau) ? mean : beta_old * tau + beta_new * mean;
}

/* The threshold of n cosines that add up to sum, over count of them. */
static double threshold(const kvf_policy_options *o, double tau, double sum, double count) {
    return kvf__policy_has_tau(o) ? kvf__tau_next(tau, sum / count, o->beta_new, o->beta_old) : o->gate;
}

static void gate_by_head(const kvf_policy_options *o, const double *state_tau, uint32_t n_heads, uint32_t n_evict,
                         kvf_plan_entry *entries, double *tau) {
    for (uint32_t h = 0; h < n_heads; h++, entries += n_evict) {
        double sum = 0.0;
        for (uint32_t i = 0; i < n_evict; i++) sum += (double)entries[i].u;
        tau[h] = threshold(o, state_tau[h], sum, n_evict);
        for (uint32_t i = 0; i < n_evict; i++) entries[i].merge = (double)entries[i].u >= tau[h];
    }
}

/* scope layer: entry i of every head is decided by the mean cosine over the heads of all ranks. */
static void gate_by_layer(const kvf_policy_options *o, const double *state_tau, uint32_t n_heads, uint32_t n_evict,
                          kvf_plan_entry *entries, const double *sums, double *tau) {
    double sum = 0.0, heads = sums[n_evict];
    for (uint32_t i = 0; i < n_evict; i++) sum += sums[i];
    double t = threshold(o, state_tau[0], sum, heads * n_evict);
    for (uint32_t h = 0; h < n_heads; h++) {
        tau[h] = t;
        for (uint32_t i = 0; i < n_evict; i++) entries[(uint64_t)h * n_evict + i].merge = sums[i] / heads >= t;
    }
}

kvf_status kvf__policy_gate(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                            kvf_error *err) {
    kvf__call call;
    kvf_status st = kvf__batch_check(state, stream, batch, "gate", &call, err);
    if (!st) st = kvf__plan_check(batch, plan, "gate", err);
    if (st) return st;
    uint32_t n_heads = state->config.n_kv_heads;
    for (uint32_t i = 0; i < plan->n_events; i++) {
        const kvf_plan_event *pe = &plan->events[i];
        const kvf__policy_seq *s = kvf__event_seq(&call, &pe->event);
        if (pe->n_evict == 0 || s->options.merge == KVF_MERGE_NONE) continue;
        kvf__event_part part = kvf__part_of(batch->view, &pe->event);
        const double *state_tau = s->tau + (size_t)pe->event.layer * n_heads + part.head_begin;
        kvf_plan_entry *entries = plan->entries + pe->entry_begin;
        double *tau = plan->tau + (size_t)i * n_heads + part.head_begin;
        if (s->options.scope == KVF_SCOPE_LAYER)
            gate_by_layer(&s->options, state_tau, part.n_heads, pe->n_evict, entries, plan->reduce + pe->reduce_begin,
                          tau);
        else
            gate_by_head(&s->options, state_tau, part.n_heads, pe->n_evict, entries, tau);
    }
    return KVF_OK;
}
