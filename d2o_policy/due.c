/* When a layer has an event: README.md, when. */
#include "d2o_policy/pages.h"

static void size_now(kvf_policy_state *state, kvf__policy_seq *s, bool clamp) {
    kvf__policy_size(state, s, clamp);
    kvf__groups_reset(state, s);
}

static uint32_t threshold(kvf_policy_state *state, kvf__policy_seq *s, kvf_moment moment, uint32_t most) {
    switch (moment) {
    case KVF_AT_PROMPT_END:
        s->changed = false;
        if (!s->sized) {
            /* A later segment took a sequence that fitted beyond its budget, several tokens at once. */
            if (s->deferred || most <= s->budget) return 0;
            size_now(state, s, false);
        }
        return 1;
    case KVF_BEFORE_APPEND:
        if (s->changed) {
            s->changed = false;
            return 1;
        }
        /* Layers have equally many slots until they are sized. */
        if (s->sized || s->deferred || most < s->budget) return 0;
        size_now(state, s, false);
        return 1; /* whatever k: the sizes were never held to before */
    case KVF_AFTER_STEP:
        if (s->changed) return 0;
        if (s->sized) return kvf__policy_k(&s->options, state->config.block_size);
        if (!s->deferred) return 0;
        size_now(state, s, true);
        return 1;
    }
    return 0;
}

uint32_t kvf__policy_due_above(kvf_policy_state *state, kvf__policy_seq *s, kvf_moment moment, uint32_t most) {
    if (!s->budgeted || kvf__policy_never_evicts(&s->options)) return 0;
    if (moment != KVF_AT_PROMPT_END && kvf__policy_flags(&s->options) & KVF_POLICY_PROMPT_ONLY) return 0;
    return threshold(state, s, moment, most);
}

uint32_t kvf__policy_due_layers(kvf_policy_state *state, uint32_t seq, kvf_moment moment, const uint32_t *n_slots,
                                uint32_t *keep) {
    kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    uint32_t n_due = 0, most = 0;
    if (!state || !n_slots || !keep) return 0;
    memset(keep, 0, state->config.n_layers * sizeof *keep);
    if (!s || kvf__groups_adapt(state, s)) return 0;
    for (uint32_t l = 0; l < state->config.n_layers; l++) most = KVF__MAX(most, n_slots[l]);
    uint32_t above = kvf__policy_due_above(state, s, moment, most);
    for (uint32_t l = 0; l < state->config.n_layers && above; l++) {
        uint32_t to = s->sizes[l].keep;
        if (n_slots[l] <= to || n_slots[l] - to < above) continue;
        keep[l] = to;
        n_due++;
    }
    return n_due;
}

/* As kvf_policy_due, spread over the groups. */
static uint32_t due_layers(kvf_policy_state *state, const kvf_view *v, uint32_t row, kvf_moment moment,
                           uint32_t *keep) {
    uint32_t n_layers = state->config.n_layers, n_due = 0, *layer_slots = state->layer_slots;
    for (uint32_t l = 0; l < n_layers; l++) layer_slots[l] = v->n_slots[kvf__table_index(v, row, l, 0)];
    (void)kvf__policy_due_layers(state, v->seq_index[row], moment, layer_slots, keep);
    for (uint32_t t = n_layers * v->n_groups; t-- > 0;) { /* from behind: a layer's number is before its tables */
        keep[t] = keep[t / v->n_groups];
        n_due += keep[t] != 0;
    }
    return n_due;
}

kvf_status kvf_policy_due(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *given, uint32_t row,
                          kvf_moment moment, uint32_t *keep, uint32_t *n_due, kvf_error *err) {
    return kvf__policy_due(state, stream, given, row, moment, keep, n_due, NULL, err);
}

kvf_status kvf__policy_due(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *given, uint32_t row,
                           kvf_moment moment, uint32_t *keep, uint32_t *n_due, const kvf__ranks *ranks,
                           kvf_error *err) {
    kvf__batch copy;
    kvf_status st = kvf__batch_read(&copy, given, "due", err);
    if (!st) st = kvf__view_check(state, &copy.b, "due", err);
    if (st) return st;
    const kvf_policy_batch *batch = &copy.b;
    const kvf_view *v = batch->view;
    if (row >= v->n_seqs || !keep || !n_due)
        return kvf__fail(err, KVF_E_INVALID, "due: row %u of %u; keep and n_due must be set", row, v->n_seqs);
    kvf__policy_seq *s = kvf__policy_seq_get(state, v->seq_index[row]);
    *n_due = 0;
    memset(keep, 0, (size_t)v->n_layers * v->n_groups * sizeof *keep);
    if (!s || !kvf__groups_adapt(state, s)) {
        *n_due = due_layers(state, v, row, moment, keep);
        return KVF_OK;
    }
    if (v->n_groups != state->config.n_groups)
        return kvf__fail(err, KVF_E_INVALID, "due: the view has %u groups, the state %u", v->n_groups,
                         state->config.n_groups);
    const uint32_t *n_slots = v->n_slots + kvf__table_index(v, row, 0, 0);
    uint32_t most = 0;
    for (uint32_t t = 0; t < v->n_layers * v->n_groups; t++) most = KVF__MAX(most, n_slots[t]);
    kvf__policy_seq before = *s;
    uint32_t kind = moment == KVF_AFTER_STEP && s->sized ? KVF_EVENT_DECODE : KVF_EVENT_PROMPT;
    uint32_t above = kvf__policy_due_above(state, s, moment, most);
    if (!above) return KVF_OK;
    if (s->options.budget == KVF_BUDGET_GLOBAL) {
        st = kvf__global_deal(state, stream, batch, row, above, kind, ranks, err);
    } else {
        st = kvf__groups_deal(state, stream, batch, row, above, kind, true, err);
        if (!st) st = kvf__groups_deal(state, stream, batch, row, above, kind, false, err);
    }
    if (st)
        *s = before;
    else
        *n_due = kvf__groups_due(state, s, n_slots, above, keep);
    return st;
}
