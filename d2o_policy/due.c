/* When a layer has an event: README.md, when. */
#include "d2o_policy/policy.h"

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
