/* Where the prompts of a dialogue lie among its tokens. */
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
