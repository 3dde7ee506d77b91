/* The policy calls for any policy: the function of its vtable, or the library's own. */
#include "d2o_policy/pages.h"

static kvf_policy_ops ops_of(const kvf__policy_seq *s) { return kvf__policy_ops_resolve(s->options.ops); }

/* The caller's batch, checked against the state. */
static kvf_status begin(const kvf_policy_state *state, const kvf_policy_batch *given, kvf__batch *to, const char *what,
                        kvf_error *err) {
    kvf_status st = kvf__batch_read(to, given, what, err);
    return st ? st : kvf__view_check(state, &to->b, what, err);
}

uint32_t kvf_policy_flags(const kvf_policy_options *options) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    return o ? kvf__policy_flags(o) : 0;
}

/* The sequence of a row that is observed, or NULL. */
static kvf__policy_seq *observed(const kvf_policy_state *state, const kvf_policy_batch *b, uint32_t row) {
    kvf__policy_seq *s = kvf__policy_seq_get(state, b->view->seq_index[row]);
    return s && kvf_policy_observes(&s->options) ? s : NULL;
}

/* Rows [b->row_begin, b->row_end) of one policy, all new in this layer or none. What a policy's own observe has written stays. */
static kvf_status observe_rows(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *b, bool is_new,
                               kvf_error *err) {
    kvf_policy_ops ops = ops_of(observed(state, b, b->row_begin));
    if (!is_new) return ops.observe == kvf__policy_observe ? kvf__policy_observe_again(state, b, err) : KVF_OK;
    kvf_status st = ops.observe(state, stream, b, err);
    for (uint32_t row = b->row_begin; row < b->row_end && !st; row++)
        observed(state, b, row)->seen[b->layer] = b->view->next_pos[row];
    return st;
}

kvf_status kvf_policy_observe(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *given,
                              kvf_error *err) {
    kvf__batch copy;
    kvf_status st = begin(state, given, &copy, "observe", err);
    if (st) return st;
    const kvf_policy_batch *batch = &copy.b;
    const kvf_view *v = batch->view;
    if (batch->layer >= v->n_layers || batch->row_begin > batch->row_end || batch->row_end > v->n_seqs)
        return kvf__fail(err, KVF_E_INVALID, "observe: layer %u, rows [%u, %u): the view has %u layers and %u rows",
                         batch->layer, batch->row_begin, batch->row_end, v->n_layers, v->n_seqs);
    kvf_policy_batch b = *batch;
    copy.mass.row_wanted = NULL; /* the policy says which rows it observes */
    for (uint32_t row = batch->row_begin; row < batch->row_end; row = b.row_end) {
        b.row_begin = row;
        b.row_end = row + 1;
        const kvf__policy_seq *first = observed(state, batch, row), *next;
        if (!first) continue;
        bool is_new = first->seen[b.layer] != v->next_pos[row];
        while (b.row_end < batch->row_end && (next = observed(state, batch, b.row_end)) &&
               next->options.ops == first->options.ops && (next->seen[b.layer] != v->next_pos[b.row_end]) == is_new)
            b.row_end++;
        if ((st = observe_rows(state, stream, &b, is_new, err))) return st;
    }
    return KVF_OK;
}

kvf_status kvf_policy_metric(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *given, uint32_t row,
                             uint32_t n_tokens, double *values, kvf_error *err) {
    kvf__batch copy;
    kvf_status st = begin(state, given, &copy, "metric", err);
    if (st) return st;
    const kvf_policy_batch *batch = &copy.b;
    if (row >= batch->view->n_seqs || !values)
        return kvf__fail(err, KVF_E_INVALID, "metric: row %u of %u; values must be set", row, batch->view->n_seqs);
    const kvf__policy_seq *s = kvf__policy_seq_get(state, batch->view->seq_index[row]);
    if (!s) return kvf__fail(err, KVF_E_STALE, "metric: seq %u is not open", batch->view->seq_index[row]);
    if (kvf_policy_has_metric(&s->options) && kvf_policy_needs(&s->options))
        return ops_of(s).metric(state, stream, batch, row, n_tokens, values, err);
    memset(values, 0, (size_t)state->config.n_layers * state->config.n_q_heads_total * sizeof *values);
    return KVF_OK;
}

kvf_status kvf_policy_budget(kvf_policy_state *state, uint32_t seq, const double *values, uint32_t n_tokens,
                             kvf_error *err) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    if (!state) return kvf__fail(err, KVF_E_INVALID, "budget: state is NULL");
    if (!s) return kvf__fail(err, KVF_E_STALE, "budget: seq %u is not open", seq);
    return ops_of(s).budget(state, seq, kvf_policy_has_metric(&s->options) ? values : NULL, n_tokens, err);
}

/* The functions for a batch's events, which all have one policy. Library's own ones check the batch. */
static kvf_status ops_of_batch(const kvf_policy_state *state, const kvf_policy_batch *given, const kvf_plan *plan,
                               const char *what, kvf__batch *copy, kvf_policy_ops *ops, kvf_error *err) {
    kvf_status st = begin(state, given, copy, what, err);
    if (st) return st;
    const kvf_policy_batch *b = &copy->b;
    if (!plan || !b->events || !b->n_events || b->events[0].row >= b->view->n_seqs)
        return kvf__fail(err, KVF_E_INVALID, "%s: a plan and at least one event of a row of the view must be given",
                         what);
    if (b->n_events > plan->event_capacity)
        return kvf__fail(err, KVF_E_LIMIT, "%s: %u events: the plan has room for %u", what, b->n_events,
                         plan->event_capacity);
    const kvf__policy_seq *first = kvf__policy_seq_get(state, b->view->seq_index[b->events[0].row]);
    for (uint32_t i = 0; i < b->n_events; i++) {
        uint32_t row = b->events[i].row;
        const kvf__policy_seq *s = row < b->view->n_seqs ? kvf__policy_seq_get(state, b->view->seq_index[row]) : NULL;
        if (!s || !first) return kvf__fail(err, KVF_E_STALE, "%s: the sequence of event %u is not open", what, i);
        if (s->options.ops != first->options.ops)
            return kvf__fail(err, KVF_E_INVALID,
                             "%s: event %u has policy %s, event 0 has %s: give each a batch of its own", what, i,
                             s->options.ops->name, first->options.ops->name);
    }
    *ops = ops_of(first);
    return KVF_OK;
}

kvf_status kvf_policy_match(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                            kvf_error *err) {
    kvf_policy_ops ops = {0};
    kvf__batch copy;
    kvf_status st = ops_of_batch(state, batch, plan, "match", &copy, &ops, err);
    return st ? st : ops.match(state, stream, &copy.b, plan, err);
}

kvf_status kvf_policy_gate(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, kvf_plan *plan,
                           kvf_error *err) {
    kvf_policy_ops ops = {0};
    kvf__batch copy;
    kvf_status st = ops_of_batch(state, batch, plan, "gate", &copy, &ops, err);
    return st ? st : ops.gate(state, stream, &copy.b, plan, err);
}

kvf_status kvf_policy_apply(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                            const kvf_plan *plan, kvf_error *err) {
    kvf_policy_ops ops = {0};
    kvf__batch copy;
    kvf_status st = ops_of_batch(state, batch, plan, "apply", &copy, &ops, err);
    return st ? st : ops.apply(state, stream, &copy.b, plan, err);
}
