/* Generated token ids for a trace's requests: equal where the trace says that two prompts begin alike. */
#define _POSIX_C_SOURCE 200809L
#include "tools/trace.h"

static uint32_t id_of(uint64_t of, uint64_t position) {
    kvf__random r = {of ^ position * 0x9e3779b97f4a7c15u};
    return (uint32_t)(kvf__random_next(&r) >> 32);
}

/* Streams of tokens: of a block that the trace names, of a group, of a request alone. */
static uint64_t stream(uint64_t kind, uint64_t number) {
    kvf__random r = {number * 3 + kind};
    return kvf__random_next(&r);
}

void kvf__trace_ids(const kvf__trace *t, uint64_t number, bool first_of_group, uint32_t n, uint32_t *ids) {
    const kvf__trace_request *q = &t->requests[number];
    uint64_t hashed = (uint64_t)q->n_hash_ids * KVF__TRACE_HASH_TOKENS;
    uint32_t n_group = q->group == KVF__TRACE_NONE || q->n_hash_ids ? 0 : first_of_group ? q->n_prompt : q->n_shared;
    uint64_t group = stream(1, q->group), own = stream(2, number);
    for (uint32_t i = 0; i < n; i++) {
        if (i < q->n_prompt && i < hashed)
            ids[i] =
                id_of(stream(0, t->hash_ids[q->hash_begin + i / KVF__TRACE_HASH_TOKENS]), i % KVF__TRACE_HASH_TOKENS);
        else
            ids[i] = id_of(i < n_group ? group : own, i);
    }
}

void kvf__trace_groups(const kvf__trace *t, kvf__trace_group *groups) {
    for (uint32_t g = 0; g < t->n_groups; g++) groups[g] = (kvf__trace_group){.first = UINT64_MAX};
    for (uint64_t i = 0; i < t->n; i++) {
        const kvf__trace_request *q = &t->requests[i];
        if (q->group >= t->n_groups || q->n_hash_ids) continue;
        kvf__trace_group *g = &groups[q->group];
        if (g->first == UINT64_MAX) g->first = i;
        g->n_shared = q->n_shared > g->n_shared ? q->n_shared : g->n_shared;
    }
}
