/* Store: adds a sequence's written blocks to the prefix cache, one node per content. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* The state of a store. */
typedef struct storing {
    kvf_manager *m;
    uint32_t first;
    uint32_t n_blocks;  /* blocks of all the sequence's tokens */
    uint32_t n_dropped; /* leading blocks that a window has dropped */
    kvf_prefix_store_options options;
    uint32_t n_stored;
    bool all_rows; /* every block of the tables was in state ROW when it began */
    bool entered;  /* some blocks of the tables became cached */
} storing;

static kvf_status check_store(const kvf_manager *m, uint32_t index, const kvf__walk *w, uint32_t n_tokens) {
    const kvf__seq *s = &m->seqs[index];
    if (s->compacted)
        return kvf__fail(m->error, KVF_E_STATE,
                         "store: a table of the sequence was compacted: its slots are not the "
                         "key's tokens any more");
    if (s->n_compacting) return kvf__fail(m->error, KVF_E_STATE, "store: a compaction of the sequence is under way");
    if (s->swapped) return kvf__fail_swapped(m, "store");
    if (n_tokens > w->key.n_tokens)
        return kvf__fail(m->error, KVF_E_INVALID, "store: n_tokens %u: the key has %u", n_tokens, w->key.n_tokens);
    if (n_tokens > s->next_pos)
        return kvf__fail(m->error, KVF_E_INVALID, "store: n_tokens %u: the tables have %u", n_tokens, s->next_pos);
    return KVF_OK;
}

static kvf_status read_options(const kvf_manager *m, const kvf_prefix_store_options *options,
                               kvf_prefix_store_options *o) {
    *o = (kvf_prefix_store_options){.struct_size = sizeof *o};
    if (!options) return KVF_OK;
    kvf_status s = kvf__config_read(o, sizeof *o, options, "kvf_prefix_store_options", m->error);
    if (s) return s;
    if (o->flags & ~(uint32_t)KVF_PREFIX_PARTIAL)
        return kvf__fail(m->error, KVF_E_INVALID, "store: flags %#x: only KVF_PREFIX_PARTIAL is known", o->flags);
    if (o->priority > 100)
        return kvf__fail(m->error, KVF_E_INVALID, "store: priority %u: must be at most 100", o->priority);
    return KVF_OK;
}

/* Finds the node of these blocks; KVF__NO_NODE if none is cached. False if they are of two nodes. */
static bool node_of_blocks(const kvf__cache *c, const uint32_t *blocks, uint32_t *node) {
    *node = KVF__NO_NODE;
    for (uint32_t k = 0; k < c->n_tables; k++) {
        uint32_t of = c->blocks->nodes[blocks[k]];
        if (of == KVF__NO_NODE || of == *node) continue;
        if (*node != KVF__NO_NODE) return false;
        *node = of;
    }
    return true;
}

/* Whether a node may grow to the content that the walk has hashed. */
static bool may_grow(const kvf__cache *c, uint32_t node, const kvf__walk *w) {
    const kvf__node *n = &c->nodes[node];
    return n->parent == w->node && n->n_tokens < w->n_hashed && !n->n_pages &&
           kvf__walk_agrees(c, w, node, n->n_tokens);
}

/* Stores content that has a node already. The node keeps its blocks. If they are all idle or it has none on the device, it
 * takes over the sequence's blocks, provided that these belong to no other node. */
static void store_again(storing *s, const kvf__walk *w, uint32_t node, const uint32_t *blocks) {
    kvf__cache *c = &s->m->cache;
    uint32_t of;
    bool clear = node_of_blocks(c, blocks, &of), here = kvf__is_here(c, node);
    if (!here && clear && of != KVF__NO_NODE && may_grow(c, of, w)) { /* its grown content is on the host already */
        kvf__node_remove(c, of);
        of = KVF__NO_NODE;
    }
    if (clear && of == KVF__NO_NODE && (!here || c->nodes[node].n_idle == c->n_tables)) {
        if (here)
            kvf__node_rebase(c, node, blocks);
        else
            kvf__node_enter(c, node, blocks);
        c->stats.adopted++;
        s->entered = true;
    } else if (memcmp(blocks, kvf__node_blocks(c, node), c->n_tables * sizeof *blocks)) {
        c->stats.duplicates++;
    }
}

/* The id of the block at `depth` in the k-th table; windows have dropped leading blocks of the row. */
static uint32_t entry_of(const storing *s, uint32_t k, uint32_t depth) {
    uint32_t t = s->first + k;
    return kvf__row(s->m, t)[depth - (s->n_blocks - kvf__n_blocks(s->m, t))];
}

/* Collects the blocks at `depth`. True if all are in state ROW, as new blocks are. A store caches no block of a later
 * position, so all_rows, found at the beginning, stays valid for each position. */
static bool gather(const storing *s, uint32_t depth, uint32_t *restrict blocks) {
    const kvf_manager *m = s->m;
    const uint32_t *restrict row = m->rows.ids + depth, *restrict nodes = m->blocks->nodes;
    const uint64_t *restrict at = m->rows.at + s->first;
    const uint8_t *restrict states = m->blocks->states;
    uint32_t not_new = 0, n = m->seq_tables;
    if (s->n_dropped) {
        for (uint32_t k = 0; k < n; k++) {
            blocks[k] = entry_of(s, k, depth);
            not_new |= states[kvf__state_at(blocks[k])] ^ KVF__ROW;
        }
        return !not_new;
    }
    for (uint32_t k = 0; k < n; k++) {
        blocks[k] = row[at[k]];
        __builtin_prefetch(&nodes[blocks[k]], 1); /* will be written if the block is new */
    }
    for (uint32_t k = 0; k < n && !s->all_rows; k++) not_new |= states[kvf__state_at(blocks[k])] ^ KVF__ROW;
    return !not_new;
}

/* Stores the block that the walk has hashed. Returns its node, or KVF__NO_NODE if it cannot be stored. */
static uint32_t store_block(storing *s, const kvf__walk *w) {
    kvf_manager *m = s->m;
    kvf__cache *c = &m->cache;
    uint32_t *blocks = c->ids, node = kvf__walk_find(c, w), of = KVF__NO_NODE;
    if (w->depth < s->n_dropped) /* the tables no longer have it; its node may exist */
        return node != KVF__NO_NODE && kvf__is_here(c, node) ? node : KVF__NO_NODE;
    bool is_new = gather(s, w->depth, blocks);
    if (node != KVF__NO_NODE) {
        store_again(s, w, node, blocks);
        if (!kvf__is_here(c, node)) return KVF__NO_NODE; /* a child on the device needs its parent there */
    } else if (!is_new && (!node_of_blocks(c, blocks, &of) || (of != KVF__NO_NODE && !may_grow(c, of, w)))) {
        c->stats.duplicates++;
        return KVF__NO_NODE;
    } else {
        node = of;
        if (node == KVF__NO_NODE) {
            node = kvf__node_add(c, w, blocks, is_new);
        } else {
            kvf__node_grow(c, node, w, blocks);
        }
        s->n_stored++;
        s->entered = true;
    }
    kvf__node_set_priority(c, node, s->options.priority, s->options.duration);
    return node;
}

kvf_status kvf_prefix_store(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key, uint32_t n_tokens,
                            const kvf_prefix_store_options *options, uint32_t *n_stored) {
    kvf_status status = kvf__prefix_check(manager);
    if (status) return status;
    storing s = {.m = manager};
    kvf__cache *c = &manager->cache;
    kvf__walk w;
    uint32_t index = 0, bs = c->block_size, node = KVF__NO_NODE;
    status = kvf__seq_find(manager, seq, &index);
    if (!status) status = read_options(manager, options, &s.options);
    if (!status) status = kvf__walk_begin(c, key, &w, manager->error);
    if (!status) status = check_store(manager, index, &w, n_tokens);
    if (status) return status;
    uint32_t last = kvf__node_of(c, manager->seqs[index].node);
    while (last != KVF__NO_NODE && !kvf__is_here(c, last)) last = c->nodes[last].parent;
    if (!kvf__walk_resume(c, &w, last, n_tokens))
        return kvf__fail(manager->error, KVF_E_INVALID,
                         "store: the key is not what the sequence was attached or stored with");
    s.first = index * manager->seq_tables;
    s.n_blocks = kvf__blocks_for(manager, manager->seqs[index].next_pos);
    for (uint32_t t = s.first; manager->windowed && t < s.first + manager->seq_tables; t++)
        s.n_dropped = KVF__MAX(s.n_dropped, s.n_blocks - kvf__n_blocks(manager, t));
    s.all_rows = true;
    for (uint32_t t = s.first; t < s.first + manager->seq_tables; t++) s.all_rows &= kvf__is_private(manager, t);
    bool stopped = false;
    while (!stopped && w.depth < n_tokens / bs) {
        kvf__walk_hash(c, &w, bs);
        node = store_block(&s, &w);
        stopped = node == KVF__NO_NODE;
        if (!stopped) kvf__walk_step(c, &w, node);
    }
    if (w.node != KVF__NO_NODE && (last == KVF__NO_NODE || c->nodes[w.node].depth > c->nodes[last].depth))
        manager->seqs[index].node = kvf__node_handle(c, w.node);
    if (!stopped && (s.options.flags & KVF_PREFIX_PARTIAL) && n_tokens % bs && w.depth == n_tokens / bs) {
        kvf__walk_hash(c, &w, n_tokens % bs);
        (void)store_block(&s, &w);
    }
    for (uint32_t t = s.first; s.entered && t < s.first + manager->seq_tables; t++)
        manager->private_at[t] = manager->tail_at[t] = 0;
    if (s.entered) manager->seqs[index].known_at = 0;
    if (n_stored) *n_stored = s.n_stored;
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}
