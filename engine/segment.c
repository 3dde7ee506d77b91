/* Where the prompts of a dialogue lie among its tokens, and what policies want of them. */
#include "engine/internal.h"

kvf__token_range kvf__live_segment_at(const kvf__live *r, uint32_t at) {
    for (uint32_t i = 0; i < r->n_segments && at >= r->n_prompt; i++)
        if (at < r->segments[i].end) return (kvf__token_range){r->segments[i].begin, r->segments[i].end};
    return (kvf__token_range){0, r->n_prompt};
}

bool kvf__live_segment_begins(const kvf__live *r, uint32_t at) {
    for (uint32_t i = 0; i < r->n_segments; i++)
        if (at == r->segments[i].begin) return true;
    return false;
}

uint32_t kvf__live_seen(const kvf__live *r, uint32_t end) {
    uint32_t n = KVF__MIN(end, r->n_prompt);
    for (uint32_t i = 0; i < r->n_segments && r->segments[i].begin < end; i++)
        n += KVF__MIN(end, r->segments[i].end) - r->segments[i].begin;
    return n;
}

kvf__prompt_needs kvf__live_needs(const kvf__live *r) {
    bool own_policies = r->group && r->group->own_policies;
    kvf__prompt_needs all = {.gqa = r->policy.gqa};
    for (uint32_t k = 0; k < (own_policies ? r->group->width : 1); k++) {
        const kvf__live *sample = own_policies ? r->group->members[k] : r;
        uint32_t needs = sample ? kvf_policy_needs(&sample->policy) : 0;
        all.needs |= needs;
        if (needs & KVF_NEEDS_LAST_ROWS) all.score_window = sample->policy.score_window;
        if (needs & KVF_NEEDS_SQUARES) all.gqa = sample->policy.gqa;
        if (needs & KVF_NEEDS_REPEAT) all.norm = sample->policy.score_norm;
    }
    return all;
}
