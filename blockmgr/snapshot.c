/* Snapshots: pages of a pool of their own. A snapshot belongs to a node and is dropped with it or before it. */
#include "blockmgr/manager.h"

static void list_enter(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    kvf__snapshot_list *l = &c->snapshots[n->keep_long];
    n->snapshot_prev = l->last;
    n->snapshot_next = KVF__NO_NODE;
    *(l->last == KVF__NO_NODE ? &l->first : &c->nodes[l->last].snapshot_next) = node;
    l->last = node;
    l->n_pages += n->n_pages;
}

static void list_leave(kvf__cache *c, uint32_t node) {
    const kvf__node *n = &c->nodes[node];
    kvf__snapshot_list *l = &c->snapshots[n->keep_long];
    *(n->snapshot_prev == KVF__NO_NODE ? &l->first : &c->nodes[n->snapshot_prev].snapshot_next) = n->snapshot_next;
    *(n->snapshot_next == KVF__NO_NODE ? &l->last : &c->nodes[n->snapshot_next].snapshot_prev) = n->snapshot_prev;
    l->n_pages -= n->n_pages;
}

static bool has_snapshot(const kvf__cache *c, uint32_t node) { return c->nodes[node].n_pages != 0; }

void kvf__snapshot_drop(kvf__cache *c, uint32_t node) {
    if (!has_snapshot(c, node)) return;
    kvf__node *n = &c->nodes[node];
    list_leave(c, node);
    for (uint32_t page = n->page; page != KVF_NO_BLOCK; page = c->page_next[page])
        (void)kvf__pool_drop(&c->pages, page);
    n->page = KVF_NO_BLOCK;
    n->n_pages = 0;
    c->stats.n_snapshots--;
    c->stats.snapshots_evicted++;
}

/* Moves a snapshot to the newest end of its list, or of the list with keep_long. */
static void touch(kvf__cache *c, uint32_t node, bool keep_long) {
    list_leave(c, node);
    c->nodes[node].keep_long |= keep_long;
    list_enter(c, node);
}

static bool whole_only(const kvf__cache *c, uint32_t node, uint32_t flags) {
    return (flags & KVF_SNAPSHOT_WHOLE) || c->nodes[node].n_tokens < c->block_size;
}

static void take_pages(kvf__cache *c, uint32_t node, uint32_t n_pages, uint32_t *ids) {
    kvf__node *n = &c->nodes[node];
    kvf__pool_take(&c->pages, ids, n_pages);
    for (uint32_t i = 0; i < n_pages; i++) c->page_next[ids[i]] = i + 1 < n_pages ? ids[i + 1] : KVF_NO_BLOCK;
    n->page = ids[0];
    n->n_pages = n_pages;
    list_enter(c, node);
    c->stats.n_snapshots++;
    c->stats.snapshots_put++;
}

/* Finds the node that ends at n_tokens of the key. */
static kvf_status find_end(const kvf_manager *m, uint32_t index, kvf__walk *w, uint32_t n_tokens, uint32_t *node) {
    const kvf__cache *c = &m->cache;
    *node = KVF__NO_NODE;
    if (!n_tokens || n_tokens > w->key.n_tokens)
        return kvf__fail(m->error, KVF_E_INVALID, "snapshot: n_tokens %u: must be in [1, %u], the key's", n_tokens,
                         w->key.n_tokens);
    if (!kvf__walk_resume(c, w, kvf__node_of(c, m->seqs[index].node), n_tokens))
        return kvf__fail(m->error, KVF_E_INVALID, "snapshot: the key is not that of the sequence");
    if (w->depth * c->block_size == n_tokens) *node = w->node;
    while (w->depth * c->block_size < n_tokens) {
        kvf__walk_hash(c, w, KVF__MIN(c->block_size, n_tokens - w->depth * c->block_size));
        *node = kvf__walk_find(c, w);
        if (*node == KVF__NO_NODE) break;
        kvf__walk_step(c, w, *node);
    }
    if (*node == KVF__NO_NODE)
        return kvf__fail(m->error, KVF_E_NOT_FOUND, "snapshot: no stored block ends at token %u of the key", n_tokens);
    return KVF_OK;
}

static kvf_status check_snapshots(const kvf_manager *m, const void *ids, const void *n_pages) {
    kvf_status s = kvf__prefix_check(m);
    if (s) return s;
    if (!m->cache.pages.n)
        return kvf__fail(m->error, KVF_E_UNSUPPORTED, "n_snapshot_pages 0: this manager keeps no snapshots");
    if (!ids || !n_pages) return kvf__fail(m->error, KVF_E_INVALID, "ids, n_pages: is NULL");
    return KVF_OK;
}

static kvf_status check_room(const kvf_manager *m, uint32_t capacity, uint32_t n_pages) {
    if (capacity >= n_pages) return KVF_OK;
    return kvf__fail(m->error, KVF_E_LIMIT, "ids: room for %u, %u are needed", capacity, n_pages);
}

kvf_status kvf_prefix_snapshot_put(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key, uint32_t n_tokens,
                                   uint32_t flags, uint32_t *ids, uint32_t capacity, uint32_t *n_pages) {
    kvf_status s = check_snapshots(manager, ids, n_pages);
    if (s) return s;
    kvf__cache *c = &manager->cache;
    kvf__walk w;
    uint32_t index = 0, node = KVF__NO_NODE;
    bool keep_long = flags & KVF_SNAPSHOT_KEEP_LONG;
    uint32_t stats = kvf__snapshot_stats(flags);
    if (flags & ~(uint32_t)(KVF_SNAPSHOT_KEEP_LONG | KVF_SNAPSHOT_WHOLE | KVF_SNAPSHOT_SUMS | KVF_SNAPSHOT_SQUARES |
                            KVF_SNAPSHOT_LOGPROBS))
        return kvf__fail(manager->error, KVF_E_INVALID, "snapshot: flags %#x: only KVF_SNAPSHOT_* are known", flags);
    s = kvf__seq_find(manager, seq, &index);
    if (!s) s = kvf__walk_begin(c, key, &w, manager->error);
    if (!s) s = find_end(manager, index, &w, n_tokens, &node);
    if (s) return s;
    bool replaces = has_snapshot(c, node) && stats & ~(uint32_t)c->nodes[node].stats;
    if (has_snapshot(c, node) && !replaces) {
        touch(c, node, keep_long);
        c->nodes[node].whole_only &= whole_only(c, node, flags);
        *n_pages = 0;
        return KVF_OK;
    }
    keep_long |= replaces && c->nodes[node].keep_long;
    uint32_t n = kvf__snapshot_pages(stats, n_tokens, c->block_size);
    uint64_t n_available =
        (uint64_t)c->pages.n_free + c->snapshots[0].n_pages + (keep_long ? c->snapshots[1].n_pages : 0);
    s = check_room(manager, capacity, n);
    if (s) return s;
    if (n > n_available)
        return kvf__fail(manager->error, KVF_E_NO_BLOCKS, "snapshot: %u pages are needed, %llu of %u are available", n,
                         (unsigned long long)n_available, c->pages.n);
    kvf__snapshot_drop(c, node);
    while (c->pages.n_free < n)
        kvf__snapshot_drop(c, c->snapshots[0].first != KVF__NO_NODE ? c->snapshots[0].first : c->snapshots[1].first);
    c->nodes[node].keep_long = keep_long;
    c->nodes[node].whole_only = whole_only(c, node, flags);
    c->nodes[node].stats = (uint8_t)stats;
    take_pages(c, node, n, ids);
    *n_pages = n;
    return KVF_OK;
}

kvf_status kvf_prefix_snapshot_get(kvf_manager *manager, const kvf_prefix_match *match, uint32_t *ids,
                                   uint32_t capacity, uint32_t *n_pages) {
    kvf_status s = check_snapshots(manager, ids, n_pages);
    if (s) return s;
    kvf__cache *c = &manager->cache;
    kvf_prefix_match given = {.struct_size = sizeof given};
    s = kvf__config_read(&given, sizeof given, match, "kvf_prefix_match", manager->error);
    if (s) return s;
    uint32_t node = kvf__node_of(c, given.snapshot), n = 0;
    if (node == KVF__NO_NODE || !has_snapshot(c, node) || kvf__node_end(c, node) != given.n_snapshot_tokens ||
        c->nodes[node].stats != kvf__snapshot_stats(given.snapshot_stats))
        return kvf__fail(manager->error, KVF_E_STALE, "match: its snapshot has gone; look up again");
    s = check_room(manager, capacity, c->nodes[node].n_pages);
    if (s) return s;
    for (uint32_t page = c->nodes[node].page; page != KVF_NO_BLOCK; page = c->page_next[page]) ids[n++] = page;
    touch(c, node, false);
    *n_pages = n;
    return KVF_OK;
}
