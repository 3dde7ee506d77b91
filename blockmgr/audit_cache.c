/* kvf_audit for the prefix cache: nodes and blocks name each other, contents are unique, every list and figure is right. */
#include "blockmgr/manager.h"

#define BROKEN(...) kvf__fail(err, KVF_E_CORRUPT, __VA_ARGS__)

/* Checks the blocks of a node in one tier; n_idle of them must have no reference. */
static kvf_status check_blocks(const kvf__cache *c, kvf__pool *pools, uint32_t node, const uint32_t *blocks,
                               uint32_t n_idle, kvf_error *err) {
    uint32_t counted = 0;
    for (uint32_t k = 0; k < c->n_tables; k++) {
        if (!kvf__pool_has(kvf__pool_at_table(c, pools, k), blocks[k]) || pools->nodes[blocks[k]] != node)
            return BROKEN("node %u: its block %u is none, or of another class, or names another node", node, blocks[k]);
        counted += !kvf__pool_refs(pools, blocks[k]);
    }
    if (counted != n_idle) return BROKEN("node %u: n_idle %u, counted %u", node, n_idle, counted);
    return KVF_OK;
}

static kvf_status check_tiers(const kvf__cache *c, uint32_t node, kvf_error *err) {
    const kvf__node *n = &c->nodes[node];
    bool here = kvf__is_here(c, node), on_host = kvf__is_on_host(c, node);
    if (!n->tiers || n->tiers > 3 || (on_host && !c->host)) return BROKEN("node %u: tiers %u", node, n->tiers);
    if (here && n->parent != KVF__NO_NODE && !kvf__is_here(c, n->parent))
        return BROKEN("node %u: here, but its parent %u is not", node, n->parent);
    if ((!here && (n->n_idle || n->keeps_place)) || (!on_host && n->n_host_idle) ||
        (n->keeps_place && n->n_idle == c->n_tables))
        return BROKEN("node %u: tiers %u, but n_idle %u and %u, keeps_place %d", node, n->tiers, n->n_idle,
                      n->n_host_idle, n->keeps_place);
    bool bare = c->host && n->tiers == KVF__HERE && n->n_idle == c->n_tables;
    if (bare != (n->place[KVF__BARE] != KVF__NO_NODE)) return BROKEN("node %u: bare %d, but not so noted", node, bare);
    if ((n->n_host_idle != 0) != (n->place[KVF__HOST_ORDER] != KVF__NO_NODE))
        return BROKEN("node %u: %u blocks idle on the host, but its place is %u", node, n->n_host_idle,
                      n->place[KVF__HOST_ORDER]);
    kvf_status s = KVF_OK;
    if (here) s = check_blocks(c, c->blocks, node, kvf__node_blocks(c, node), n->n_idle, err);
    if (!s && on_host) s = check_blocks(c, c->host, node, kvf__node_host_blocks(c, node), n->n_host_idle, err);
    return s;
}

static bool same_content(const kvf__cache *c, uint32_t a, uint32_t b) {
    const kvf__node *x = &c->nodes[a], *y = &c->nodes[b];
    return x->parent == y->parent && x->n_tokens == y->n_tokens && x->extras.low == y->extras.low &&
           x->extras.high == y->extras.high && x->salt_bytes == y->salt_bytes &&
           !memcmp(c->salts + (size_t)a * KVF_PREFIX_SALT_MAX, c->salts + (size_t)b * KVF_PREFIX_SALT_MAX,
                   x->salt_bytes) &&
           !memcmp(kvf__node_tokens(c, a), kvf__node_tokens(c, b), x->n_tokens * sizeof(uint32_t));
}

static kvf_status check_links(const kvf__cache *c, uint32_t node, kvf_error *err) {
    const kvf__node *n = &c->nodes[node], *parent = n->parent == KVF__NO_NODE ? NULL : &c->nodes[n->parent];
    if (n->n_tokens > c->block_size || (n->n_tokens < c->block_size && (n->child[0] & n->child[1]) != KVF__NO_NODE))
        return BROKEN("node %u: %u tokens of %u, first children %u and %u", node, n->n_tokens, c->block_size,
                      n->child[0], n->child[1]);
    if (parent && (n->parent >= c->n_max || parent->n_tokens != c->block_size))
        return BROKEN("node %u: its parent %u is no whole node", node, n->parent);
    if (n->depth != (parent ? parent->depth + 1 : 0)) return BROKEN("node %u: depth %u", node, n->depth);
    if (parent && n->salt_bytes) return BROKEN("node %u: a salt, but no root", node);
    if (c->nodes[n->next].prev != node || c->nodes[n->prev].next != node || c->nodes[n->next].parent != n->parent ||
        kvf__is_here(c, n->next) != kvf__is_here(c, node))
        return BROKEN("node %u: its ring of siblings is broken", node);
    uint32_t at = c->buckets[n->hash.low & c->bucket_mask];
    while (at != KVF__NO_NODE && at != node) at = c->nodes[at].bucket_next;
    if (at != node) return BROKEN("node %u: not in its bucket", node);
    for (at = n->bucket_next; at != KVF__NO_NODE; at = c->nodes[at].bucket_next)
        if (same_content(c, at, node)) return BROKEN("nodes %u and %u: equal content", node, at);
    return KVF_OK;
}

/* A node's hash follows from its parent's hash and its content. */
static kvf_status check_hash(const kvf__cache *c, uint32_t node, kvf_error *err) {
    const kvf__node *n = &c->nodes[node];
    kvf__hash hash = kvf__node_hash(c, node);
    if (hash.low != n->hash.low || hash.high != n->hash.high)
        return BROKEN("node %u: its hash is not that of its content", node);
    return KVF_OK;
}

static kvf_status check_heap(const kvf__cache *c, const kvf__heap *h, uint32_t at, kvf_error *err) {
    uint32_t node = h->nodes[at];
    if (node >= c->n_max || c->nodes[node].place[h->kind] != at)
        return BROKEN("node %u: not at its place %u of a heap", node, at);
    if (at && kvf__heap_before(c, h, node, h->nodes[(at - 1) / 2]))
        return BROKEN("node %u: under node %u of a heap, but goes first", node, h->nodes[(at - 1) / 2]);
    return KVF_OK;
}

/* The order contains exactly the nodes with an idle block. */
static kvf_status check_order(const kvf__cache *c, uint32_t n_wanted, kvf_error *err) {
    uint32_t n = 0, before = KVF__NO_NODE;
    kvf_status s = KVF_OK;
    if (c->listed) {
        for (uint32_t at = c->first; at != KVF__NO_NODE && n <= n_wanted; at = c->nodes[at].order_next, n++) {
            if (!c->nodes[at].n_tokens || !c->nodes[at].n_idle)
                return BROKEN("node %u: in the order, but not idle", at);
            if (c->nodes[at].order_prev != before) return BROKEN("node %u: its link back is broken", at);
            if (before != KVF__NO_NODE && c->nodes[before].stamp >= c->nodes[at].stamp)
                return BROKEN("node %u: idle for longer than node %u, but goes later", at, before);
            before = at;
        }
        if (c->last != before) return BROKEN("order: last %u, found %u", c->last, before);
    } else {
        for (n = 0; !s && n < c->order.n; n++) {
            if (!c->nodes[c->order.nodes[n]].n_idle)
                return BROKEN("node %u: in the order, but not idle", c->order.nodes[n]);
            s = check_heap(c, &c->order, n, err);
        }
    }
    if (!s && n != n_wanted) return BROKEN("order: %u nodes, %u have idle blocks", n, n_wanted);
    const kvf__heap *others[] = {&c->deadlines, &c->host_order, &c->bare};
    for (int h = 0; h < 3; h++)
        for (uint32_t i = 0; !s && i < others[h]->n; i++) s = check_heap(c, others[h], i, err);
    return s;
}

static kvf_status check_descent(const kvf__cache *c, const kvf__descent *d, kvf_error *err) {
    if (d->chosen == KVF__NO_NODE) return KVF_OK;
    uint32_t at = d->hint;
    while (at != KVF__NO_NODE && at != d->chosen) at = c->nodes[at].parent;
    if (at == KVF__NO_NODE || !c->nodes[d->chosen].n_tokens || !c->nodes[d->hint].n_tokens)
        return BROKEN("eviction: node %u is chosen, %u is not under it", d->chosen, d->hint);
    return KVF_OK;
}

static kvf_status check_snapshots(const kvf__cache *c, kvf_error *err) {
    uint32_t n_snapshots = 0;
    const kvf__pool *p = &c->pages;
    for (int k = 0; k < 2; k++) {
        uint32_t n_pages = 0, before = KVF__NO_NODE;
        for (uint32_t at = c->snapshots[k].first; at != KVF__NO_NODE; at = c->nodes[at].snapshot_next, n_snapshots++) {
            const kvf__node *n = &c->nodes[at];
            if (n_snapshots > c->n_nodes || !n->n_tokens || n->keep_long != (k == 1) || n->snapshot_prev != before)
                return BROKEN("node %u: wrongly in list %d of the snapshots", at, k);
            if (n->n_pages != kvf__snapshot_pages(n->stats, kvf__node_end(c, at), c->block_size))
                return BROKEN("node %u: a snapshot of %u pages at token %u", at, n->n_pages, kvf__node_end(c, at));
            uint32_t page = n->page;
            for (uint32_t i = 0; i < n->n_pages; i++, page = c->page_next[page])
                if (page >= p->n || *kvf__state(p, page) != KVF__ROW || p->entries[page].scratch++)
                    return BROKEN("node %u: page %u is free, or of another snapshot too", at, page);
            if (page != KVF_NO_BLOCK) return BROKEN("node %u: more than %u pages", at, n->n_pages);
            n_pages += n->n_pages;
            before = at;
        }
        if (n_pages != c->snapshots[k].n_pages || before != c->snapshots[k].last)
            return BROKEN("snapshots: list %d of %u pages ends at %u, counted %u and %u", k, c->snapshots[k].n_pages,
                          c->snapshots[k].last, n_pages, before);
    }
    uint32_t n_pages = c->snapshots[0].n_pages + c->snapshots[1].n_pages;
    if (p->n_free + n_pages != p->n || n_snapshots != c->stats.n_snapshots)
        return BROKEN("snapshots: %u pages free, %u in use of %u; n_snapshots %u, counted %u", p->n_free, n_pages, p->n,
                      c->stats.n_snapshots, n_snapshots);
    return KVF_OK;
}

static kvf_status check_seq(const kvf_manager *m, uint32_t index, kvf_error *err) {
    const kvf__cache *c = &m->cache;
    const kvf__seq *s = &m->seqs[index];
    uint32_t node = kvf__node_of(c, s->node);
    if (!s->alive && s->node) return BROKEN("sequence %u: freed, but has stored", index);
    if (node == KVF__NO_NODE) return KVF_OK;
    if (c->nodes[node].n_tokens != c->block_size || kvf__node_end(c, node) > s->next_pos || s->compacted)
        return BROKEN("sequence %u: stored up to token %u of %u, compacted %d", index, kvf__node_end(c, node),
                      s->next_pos, s->compacted);
    return KVF_OK;
}

static uint32_t n_cached(const kvf__pool *pools, uint32_t n_blocks) {
    uint32_t n = 0;
    for (uint32_t id = 0; pools && id < n_blocks; id++) n += pools->nodes[id] != KVF_NO_BLOCK;
    return n;
}

static kvf_status check_counts(const kvf_manager *m, uint32_t n_nodes, uint32_t n_here, uint32_t n_on_host,
                               kvf_error *err) {
    const kvf__cache *c = &m->cache;
    uint32_t cached = n_cached(c->blocks, m->config.n_blocks), there = n_cached(c->host, m->config.n_host_blocks);
    if (n_nodes != c->n_nodes || n_here != c->n_here || n_on_host != c->n_on_host)
        return BROKEN("nodes: n_nodes %u, %u here, %u on the host, counted %u, %u, %u", c->n_nodes, c->n_here,
                      c->n_on_host, n_nodes, n_here, n_on_host);
    if (cached != n_here * c->n_tables || there != n_on_host * c->n_tables)
        return BROKEN("nodes: %u here, %u on the host, but %u and %u blocks are cached", n_here, n_on_host, cached,
                      there);
    if (c->stats.stored < c->stats.evicted + c->stats.removed + n_nodes)
        return BROKEN("nodes: %llu stored, %llu evicted, %llu removed, %u here", (unsigned long long)c->stats.stored,
                      (unsigned long long)c->stats.evicted, (unsigned long long)c->stats.removed, n_nodes);
    if (c->stats.snapshots_put != c->stats.snapshots_evicted + c->stats.n_snapshots)
        return BROKEN("snapshots: %llu put, %llu evicted, %u here", (unsigned long long)c->stats.snapshots_put,
                      (unsigned long long)c->stats.snapshots_evicted, c->stats.n_snapshots);
    for (uint32_t i = 0; i < c->n_max - c->n_nodes; i++)
        if (c->free_nodes[i] >= c->n_max || c->nodes[c->free_nodes[i]].n_tokens)
            return BROKEN("node %u: live, but on the free list", c->free_nodes[i]);
    return KVF_OK;
}

kvf_status kvf__cache_audit(const kvf_manager *m, kvf_error *err) {
    const kvf__cache *c = &m->cache;
    uint32_t n_nodes = 0, n_here = 0, n_on_host = 0, n_idle = 0, n_snapshots = 0;
    kvf_status s = KVF_OK;
    for (uint32_t i = 0; !s && i < c->n_max; i++) {
        const kvf__node *n = &c->nodes[i];
        if (!n->n_tokens) continue;
        n_nodes++;
        n_here += kvf__is_here(c, i);
        n_on_host += kvf__is_on_host(c, i);
        n_idle += n->n_idle != 0;
        n_snapshots += n->n_pages != 0;
        s = check_links(c, i, err);
        if (!s) s = check_tiers(c, i, err);
        if (!s) s = check_hash(c, i, err);
    }
    if (!s) s = check_counts(m, n_nodes, n_here, n_on_host, err);
    if (!s) s = check_order(c, n_idle, err);
    if (!s) s = check_descent(c, &c->descent, err);
    if (!s) s = check_descent(c, &c->host_descent, err);
    if (!s && n_snapshots != c->stats.n_snapshots)
        return BROKEN("snapshots: n_snapshots %u, %u nodes have one", c->stats.n_snapshots, n_snapshots);
    if (!s) s = check_snapshots(c, err);
    for (uint32_t i = 0; i < c->pages.n; i++) c->pages.entries[i].scratch = 0;
    for (uint32_t i = 0; !s && i < m->config.max_seqs; i++) s = check_seq(m, i, err);
    return s;
}
