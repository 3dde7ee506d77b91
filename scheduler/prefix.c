/* The scheduler's use of the prefix cache: looking prompts up, reserving the rest, storing computed tokens. */
#include "scheduler/sched.h"

static kvf_prefix_key key_of(const kvf__req *r, uint32_t n_tokens) {
    kvf_prefix_key key = r->prefix.key;
    key.n_tokens = n_tokens;
    return key;
}

void kvf__sched_forget_match(kvf__req *r) {
    r->match = (kvf_prefix_match){.struct_size = sizeof r->match, .again = r->match.again};
}

/* A policy that needs sums, squares or log-probabilities continues only from a snapshot of them; one that needs the last queries, before
 * these. If a whole prompt is found, its last query runs again. So does the last query of a hit if log-probabilities are needed: its
 * logits give that of the token behind the hit. */
void kvf__sched_look_up(kvf_sched *s, kvf__req *r, bool whole) {
    kvf__sched_forget_match(r);
    r->n_prefill = kvf__req_replays(s, r) ? r->n_prompt : r->n_known;
    kvf__needs needs = kvf__sched_needs(s, r);
    if (!kvf__req_caches(s, r) || r->prefix.no_hits || (needs.n_last && r->n_prompt <= needs.n_last)) return;
    kvf_prefix_key key = key_of(r, r->n_prefill);
    kvf_prefix_options options;
    kvf_prefix_options_init(&options, sizeof options);
    options.need_snapshot = needs.stats != 0;
    options.snapshot_stats = needs.stats;
    options.repeat_last = (needs.stats & KVF_SNAPSHOT_LOGPROBS) != 0;
    options.partial = !options.need_snapshot;
    options.host = s->tiers;
    options.again = r->match.again != 0;
    if (!whole && r->n_prefill > 2) options.max_tokens = r->n_prefill - 2;
    if (needs.n_last) options.max_tokens = r->n_prompt - needs.n_last;
    r->match.struct_size = sizeof r->match;
    kvf_status status = kvf_prefix_lookup(s->config.manager, &key, &options, &r->match);
    if (status == KVF_OK && r->match.n_snapshot_tokens > r->match.n_tokens && r->match.n_tokens % s->block_size == 0) {
        /* The last token is alone in its block, and an attach does not hold that block: it could be evicted with the snapshot
         * before that is read. */
        options.max_tokens = --key.n_tokens;
        status = kvf_prefix_lookup(s->config.manager, &key, &options, &r->match);
    }
    if (status != KVF_OK) kvf__sched_forget_match(r);
}

/* Blocks of the match that others hold, over all tables. */
uint64_t kvf__sched_shared_blocks(const kvf_sched *s, const kvf__req *r) {
    return (uint64_t)kvf__ceil_div(r->match.n_tokens, s->block_size) * s->n_tables - r->match.n_idle -
           r->match.n_host_blocks;
}

/* Whether its snapshot belongs to a block that it does not hold: the snapshot of a whole prompt whose last token is the first of a
 * block. Any block that is taken before the snapshot is read may be that one. */
bool kvf__sched_snapshot_unpinned(const kvf_sched *s, const kvf__req *r) {
    return r->match.n_snapshot_tokens > r->match.n_tokens && r->match.n_tokens % s->block_size == 0;
}

bool kvf__sched_snapshot_stands(const kvf_sched *s, const kvf__req *r) {
    uint32_t id = 0, n = 0;
    return kvf_prefix_snapshot_get(s->config.manager, &r->match, &id, 0, &n) == KVF_E_LIMIT; /* not one page of room */
}

/* Whether free blocks are enough for n tokens behind the match and for its blocks on the host, so that nothing is evicted. */
bool kvf__sched_takes_free(const kvf_sched *s, const kvf__req *r, uint32_t n) {
    kvf_occupancy now = {.struct_size = sizeof now};
    uint64_t blocks = (uint64_t)(kvf__ceil_div(n, s->block_size) + 1) * s->n_tables + r->match.n_host_blocks;
    return kvf_occupancy_read(s->config.manager, &now, NULL, 0) == KVF_OK && blocks <= now.blocks.n_free;
}

/* Whether the query at `begin` runs again for its logits only, in an item of its own: its part of the sums is in the snapshot. */
bool kvf__sched_hit_again(const kvf_sched *s, const kvf__req *r, uint32_t begin) {
    uint32_t sums = KVF_SNAPSHOT_SUMS | KVF_SNAPSHOT_SQUARES;
    return r->match.n_tokens && begin == r->match.n_tokens && r->match.n_snapshot_tokens > begin &&
           kvf__sched_needs(s, r).stats & sums;
}

/* The reservation is s->want. A miss is counted too. */
kvf_status kvf__sched_attach(kvf_sched *s, kvf__req *r, const kvf_reserve *reserve) {
    if (!kvf__req_caches(s, r)) return kvf_seq_reserve(s->config.manager, r->seq, reserve);
    kvf_prefix_key key = key_of(r, r->n_prefill);
    return kvf_prefix_attach(s->config.manager, r->seq, &key, &r->match, reserve, &s->copies);
}

/* What an item has to do with the cache. */
void kvf__sched_mark_item(kvf_sched *s, const kvf__req *r, kvf_step_item *item) {
    if (item->kind != KVF_STEP_PREFILL || !kvf__req_caches(s, r)) return;
    uint32_t end = item->token_begin + item->n_tokens;
    bool again = item->logits_only != 0; /* behind its repetition */
    bool first = !again && r->match.n_tokens && item->token_begin == r->match.n_tokens;
    if (first) {
        item->match = &r->match;
        item->logits_only = kvf__sched_hit_again(s, r, item->token_begin);
    }
    uint32_t stats = kvf__sched_needs(s, r).stats;
    if (item->token_begin >= r->n_prompt || !stats || (item->logits_only && !again)) return;
    if (end == r->n_prefill && !item->prompt_ends) return; /* its last block is stored when the prompt ends */
    bool parts = end == r->prefix.prefix_end || end == kvf__parting_end(s, r, item->token_begin);
    item->take_snapshot = parts || end == r->n_prefill || end % s->config.chunk == 0;
    if (parts)
        item->snapshot_flags = KVF_SNAPSHOT_KEEP_LONG;
    else if (end % s->config.chunk)
        item->snapshot_flags = KVF_SNAPSHOT_WHOLE;
    if (item->take_snapshot) item->snapshot_flags |= stats;
}

/* K and V of the computed tokens are written: they can be found from now on. What cannot be stored is not: the cache
 * costs hits at worst. */
void kvf__sched_store(kvf_sched *s, kvf__req *r, bool prefill) {
    if (!kvf__req_caches(s, r)) return;
    if (r->n_computed > r->n_prompt && (r->evicts || r->prefix.prompt_only)) return;
    if (!prefill && r->n_computed % s->block_size) return;
    kvf_prefix_key key = key_of(r, r->n_computed);
    bool partial = r->n_computed == r->n_prefill && kvf__sched_needs(s, r).stats;
    kvf_prefix_store_options options = {.struct_size = sizeof options, .flags = partial ? KVF_PREFIX_PARTIAL : 0};
    kvf_status status = kvf_prefix_store(s->config.manager, r->seq, &key, r->n_computed, &options, NULL);
    (void)status;
}
