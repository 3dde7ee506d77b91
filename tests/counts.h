/* counts.h: a sequence's counters as a value. */
#ifndef KVF_TESTS_COUNTS_H
#define KVF_TESTS_COUNTS_H

#include "kvfold/policy.h"

static inline kvf_policy_counts counts_of(const kvf_policy_state *state, uint32_t seq) {
    kvf_policy_counts c = {.struct_size = sizeof c};
    return kvf_policy_get_counts(state, seq, &c) ? (kvf_policy_counts){0} : c;
}

#endif
