/* Public calls of the prefix cache: lookup, attach, drop, figures. Store and snapshots are in files of their own. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

enum { PARTIAL_SCAN_MAX = 64 }; /* children that a lookup compares for part of a block */

void kvf_prefix_options_init(kvf_prefix_options *options, size_t struct_size) {
    kvf__init(options, struct_size, &(kvf_prefix_options){0}, sizeof *options);
}

/* ---- Lookup ------------------------------------------------------------------------------------------------ */

/* The state of a lookup. */
typedef struct found {
    uint32_t limit, reach;  /* most tokens of a hit; where the search ends */
    uint32_t n_known, node; /* tokens found so far; the node of the last one */
    uint32_t snapshot;      /* the deepest node with a suitable snapshot */
    uint32_t stats;         /* what it must have */
} found;

static void note_snapshot(const kvf__cache *c, const kvf__walk *w, uint32_t node, found *f) {
    const kvf__node *n = &c->nodes[node];
    uint32_t end = kvf__node_end(c, node);
    if (n->n_pages && !(f->stats & ~n->stats) &&
        (end <= f->limit ? !n->whole_only || end == w->key.n_tokens : end == f->reach))
        f->snapshot = node;
}

static uint32_t common_tokens(const uint32_t *a, const uint32_t *b, uint32_t n) {
    uint32_t i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* Finds the child in a ring that agrees with most of the next tokens; among equals the newest. */
static void find_partial(const kvf__cache *c, const kvf__walk *w, int ring, found *f) {
    uint32_t newest = w->node == KVF__NO_NODE ? c->root[ring] : c->nodes[w->node].child[ring], at = newest;
    uint32_t begin = w->depth * c->block_size, n_left = w->key.n_tokens - begin;
    for (int i = 0; at != KVF__NO_NODE && i < PARTIAL_SCAN_MAX; i++) {
        uint32_t n =
            common_tokens(kvf__node_tokens(c, at), w->key.tokens + begin, KVF__MIN(n_left, c->nodes[at].n_tokens));
        if (begin + n > f->n_known && kvf__walk_agrees(c, w, at, n)) {
            f->n_known = begin + n;
            f->node = at;
        }
        at = c->nodes[at].next;
        if (at == newest) break;
    }
}

static bool may_use(const kvf__cache *c, uint32_t node, const kvf_prefix_options *o) {
    return o->host || kvf__is_here(c, node);
}

static void find(const kvf__cache *c, kvf__walk *w, const kvf_prefix_options *o, found *f) {
    uint32_t bs = c->block_size, n_tokens = w->key.n_tokens, node = KVF__NO_NODE;
    while (w->depth < n_tokens / bs && w->depth * bs < f->reach) {
        kvf__walk_hash(c, w, bs);
        node = kvf__walk_find(c, w);
        if (node == KVF__NO_NODE || !may_use(c, node, o)) break;
        kvf__walk_step(c, w, node);
        note_snapshot(c, w, node, f);
    }
    f->n_known = w->depth * bs;
    f->node = w->node;
    if (f->n_known >= f->reach) return;
    if (w->depth == n_tokens / bs) {
        kvf__walk_hash(c, w, n_tokens % bs);
        node = kvf__walk_find(c, w);
        if (node != KVF__NO_NODE && may_use(c, node, o)) {
            note_snapshot(c, w, node, f);
            f->n_known = n_tokens;
            f->node = node;
            return;
        }
    }
    for (int ring = 0; o->partial && !o->need_snapshot && ring <= (o->host != 0); ring++) find_partial(c, w, ring, f);
}

/* The node with token number n_tokens - 1: `node` or one of its ancestors. */
static uint32_t node_at(const kvf__cache *c, uint32_t node, uint32_t n_tokens) {
    while (node != KVF__NO_NODE && c->nodes[node].depth * c->block_size >= n_tokens) node = c->nodes[node].parent;
    return node;
}

static kvf_prefix_match match_of(const kvf__cache *c, const kvf__walk *w, const kvf_prefix_options *o, const found *f) {
    kvf_prefix_match match = {
        .struct_size = sizeof match, .whole = f->n_known == w->key.n_tokens, .again = o->again != 0};
    uint32_t n = KVF__MIN(f->n_known, f->limit), node = f->node;
    if (o->need_snapshot) {
        node = f->snapshot;
        n = node == KVF__NO_NODE ? 0 : KVF__MIN(kvf__node_end(c, node) - (o->repeat_last != 0), f->limit);
    } else if (!o->partial) {
        n -= n % c->block_size;
    }
    if (!n) return match;
    if (o->need_snapshot) {
        match.snapshot = kvf__node_handle(c, node);
        match.n_snapshot_tokens = kvf__node_end(c, node);
        match.n_snapshot_pages = c->nodes[node].n_pages;
        match.snapshot_stats = c->nodes[node].stats;
    }
    node = node_at(c, node, n);
    match.node = kvf__node_handle(c, node);
    match.n_tokens = n;
    match.n_blocks = n / c->block_size;
    match.n_partial = n % c->block_size;
    for (; node != KVF__NO_NODE; node = c->nodes[node].parent) {
        match.n_idle += c->nodes[node].n_idle;
        if (!kvf__is_here(c, node)) match.n_host_blocks += c->n_tables;
    }
    return match;
}

kvf_status kvf_prefix_lookup(const kvf_manager *manager, const kvf_prefix_key *key, const kvf_prefix_options *options,
                             kvf_prefix_match *match) {
    kvf_status s = kvf__prefix_check(manager);
    if (s) return s;
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    kvf__walk w;
    if (!kvf__output_is_valid(match))
        return kvf__fail(manager->error, KVF_E_INVALID,
                         "match: must be given, its struct_size set to sizeof(kvf_prefix_match)");
    if (options) s = kvf__config_read(&o, sizeof o, options, "kvf_prefix_options", manager->error);
    if (!s) s = kvf__walk_begin(&manager->cache, key, &w, manager->error);
    if (s) return s;
    uint32_t n_tokens = w.key.n_tokens;
    found f = {.node = KVF__NO_NODE, .snapshot = KVF__NO_NODE, .stats = kvf__snapshot_stats(o.snapshot_stats)};
    f.limit = o.max_tokens ? KVF__MIN(o.max_tokens, n_tokens) : n_tokens - 1;
    f.limit = KVF__MIN(f.limit, manager->config.max_slots);
    f.reach = f.limit >= n_tokens - 1 ? n_tokens : f.limit; /* a hit on the whole prompt */
    find(&manager->cache, &w, &o, &f);
    const kvf_prefix_match result = match_of(&manager->cache, &w, &o, &f);
    kvf__output(match, &result, sizeof result);
    return KVF_OK;
}

/* ---- Attach --------------------------------------------------------------------------------------------------- */

/* Fills the cache's chain with the nodes of the match, the root first, and compares them with the key. */
static kvf_status check_match(kvf_manager *m, const kvf__walk *w, const kvf_prefix_match *match, uint32_t *n_chain) {
    kvf__cache *c = &m->cache;
    uint32_t n = match->n_tokens, bs = c->block_size;
    *n_chain = 0;
    if (n > w->key.n_tokens || n > m->config.max_slots)
        return kvf__fail(m->error, KVF_E_INVALID, "match: n_tokens %u: more than the key's %u or max_slots %u", n,
                         w->key.n_tokens, m->config.max_slots);
    if (!n) return KVF_OK;
    uint32_t node = kvf__node_of(c, match->node);
    if (node == KVF__NO_NODE) return kvf__fail(m->error, KVF_E_STALE, "match: its blocks have gone; look up again");
    if (c->nodes[node].depth != (n - 1) / bs)
        return kvf__fail(m->error, KVF_E_INVALID, "match: n_tokens %u: its node is the %u-th block", n,
                         c->nodes[node].depth);
    *n_chain = c->nodes[node].depth + 1;
    for (uint32_t d = *n_chain; d-- > 0; node = c->nodes[node].parent) {
        if (!kvf__walk_agrees(c, w, node, KVF__MIN(bs, n - d * bs)))
            return kvf__fail(m->error, KVF_E_INVALID, "match: it is not of this key, which differs in block %u", d);
        c->chain[d] = node;
    }
    return KVF_OK;
}

/* The chain of a hit. Its nodes on the device come first, those only on the host after them. */
typedef struct chain {
    uint32_t n, n_tokens;
    uint32_t n_here; /* nodes on the device */
    uint32_t n_own;  /* nodes whose blocks are all idle, or will be new */
    kvf__counts idle_blocks, new_blocks;
    uint64_t n_new_blocks;
    bool covered; /* the last node covers slots beyond n_tokens */
} chain;

static chain look_at_chain(const kvf__cache *c, uint32_t n_tokens, uint32_t n_chain) {
    chain h = {.n = n_chain, .n_tokens = n_tokens};
    for (uint32_t d = 0; d < n_chain; d++) {
        uint32_t n = c->nodes[c->chain[d]].n_idle;
        bool here = kvf__is_here(c, c->chain[d]);
        h.n_here += here;
        h.n_own += n == c->n_tables || !here;
        if (!c->table_class) h.idle_blocks.of[0] += n;
        for (uint32_t k = 0; c->table_class && n && k < c->n_tables; k++)
            h.idle_blocks.of[c->table_class[k]] += !kvf__pool_refs(c->blocks, kvf__node_blocks(c, c->chain[d])[k]);
    }
    h.n_new_blocks = (uint64_t)(n_chain - h.n_here) * c->n_tables;
    for (uint32_t i = 0; i < KVF_BLOCK_CLASSES_MAX; i++)
        h.new_blocks.of[i] = (uint64_t)(n_chain - h.n_here) * c->class_tables[i];
    uint32_t filled = n_tokens % c->block_size;
    h.covered = filled && c->nodes[c->chain[n_chain - 1]].n_tokens > filled;
    return h;
}

/* How many blocks of the k-th table will count against a reservation: the private ones or, with growth, all but a last one
 * that an append would copy. */
static uint32_t count_table(const kvf_manager *m, uint32_t k, const chain *h, bool growth) {
    const kvf__cache *c = &m->cache;
    bool last_held = false;
    if (h->n_tokens % c->block_size && h->n == h->n_here)
        last_held = kvf__pool_holders(m->blocks, kvf__node_blocks(c, c->chain[h->n - 1])[k]) != 0;
    if (growth) return h->n - (h->covered || last_held);
    uint32_t n_private = h->n_own;
    for (uint32_t d = 0; d < h->n_here && h->n_own < h->n; d++) {
        uint32_t n = c->nodes[c->chain[d]].n_idle;
        if (n < c->n_tables) n_private += !kvf__pool_holders(m->blocks, kvf__node_blocks(c, c->chain[d])[k]);
    }
    return n_private - (h->covered && !last_held);
}

/* Enters the chain's device blocks in the rows, node by node. */
static void attach_rows(kvf_manager *m, uint32_t first, const chain *h) {
    const kvf__cache *c = &m->cache;
    uint32_t n_tables = c->n_tables;
    for (uint32_t k = 0; k < n_tables; k++) kvf__row_need(m, first + k, h->n);
    const uint64_t *restrict at = m->rows.at + first;
    for (uint32_t d = 0; d < h->n_here; d++) {
        const uint32_t *restrict blocks = kvf__node_blocks(c, c->chain[d]);
        uint32_t *restrict row = m->rows.ids + d;
        bool all_idle = c->nodes[c->chain[d]].n_idle == n_tables;
        if (all_idle) kvf__pool_attach_idle(c->blocks, blocks, n_tables);
        for (uint32_t k = 0; !all_idle && k < n_tables; k++) kvf__pool_attach(kvf__cache_pool(c, k), blocks[k]);
        for (uint32_t k = 0; k < n_tables; k++) row[at[k]] = blocks[k];
    }
}

/* Updates the figures of the tables, which were empty and now have the chain's blocks. */
static void count_attached(kvf_manager *m, uint32_t first, const chain *h) {
    uint32_t n_groups = m->n_groups, n_blocks = h->n * n_groups, *most = m->seq_blocks_max + first / n_groups;
    for (uint32_t t = first; t < first + m->seq_tables; t++) {
        m->n_slots[t] = h->n_tokens;
        m->private_at[t] = m->tail_at[t] = 0;
    }
    for (uint32_t l = 0; l < m->config.n_layers; l++) {
        m->layer_slots[l] += (uint64_t)h->n_tokens * n_groups;
        m->layer_blocks[l] += n_blocks;
        m->layer_blocks_max[l] = KVF__MAX(m->layer_blocks_max[l], m->layer_blocks[l]);
        most[l] = KVF__MAX(most[l], n_blocks);
    }
}

/* The reservation of a table after the attach: the one given, or its own. */
static kvf__reservation reservation_of(const kvf_manager *m, uint32_t t, const kvf_reserve *reserve, uint32_t k) {
    return reserve ? kvf__reservation_of(m, reserve, k) : kvf__table_reservation(m, t);
}

/* Checks that there are enough blocks, and leaves in the cache's ids the promise that each table will get. */
static kvf_status check_promises(const kvf_manager *m, uint32_t first, const kvf_reserve *reserve, const chain *h) {
    kvf__owed owed = {.pages = 0};
    for (uint32_t k = 0; k < m->seq_tables; k++) {
        kvf__reservation r = reservation_of(m, first + k, reserve, k);
        m->cache.ids[k] = r.blocks ? kvf__promise_owed(r.blocks, count_table(m, k, h, r.growth)) : 0;
        owed.blocks.of[kvf__class_of(m, k)] += m->cache.ids[k];
        owed.pages += r.pages;
        owed.blocks_before.of[kvf__class_of(m, k)] += m->promise[first + k];
        owed.pages_before += m->page_promise[first + k];
    }
    kvf__counts taken = h->idle_blocks;
    for (uint32_t i = 0; i < m->config.n_classes; i++) taken.of[i] += h->new_blocks.of[i];
    return kvf__check_owed(m, &owed, taken);
}

static kvf_status check_empty(const kvf_manager *m, uint32_t index) {
    if (m->seqs[index].swapped) return kvf__fail_swapped(m, "attach");
    uint32_t n_slots = m->seqs[index].next_pos;
    for (uint32_t k = 0; k < m->seq_tables; k++) n_slots |= m->n_slots[index * m->seq_tables + k];
    if (!n_slots) return KVF_OK;
    return kvf__fail(m->error, KVF_E_STATE, "attach: the sequence holds tokens already");
}

static void count_query(kvf__cache *c, const kvf__walk *w, const chain *h, bool again) {
    uint32_t n_tokens = h->n_tokens;
    if (again) {
        c->stats.again_queries++;
        c->stats.again_tokens += w->key.n_tokens;
        c->stats.again_hit_tokens += n_tokens;
        return;
    }
    c->stats.queries++;
    c->stats.hits += n_tokens != 0;
    c->stats.query_tokens += w->key.n_tokens;
    c->stats.hit_tokens += n_tokens;
    if (h->n_new_blocks) c->stats.host_hit_tokens += n_tokens - h->n_here * c->block_size;
}

/* Starts a new epoch if another table may have the last node's blocks as its last blocks: it may have written slots after the
 * end of a partial node. */
static void share_tail(kvf_manager *m, uint32_t node) {
    const kvf__cache *c = &m->cache;
    if (c->nodes[node].n_tokens < c->block_size && c->nodes[node].n_idle < c->n_tables) kvf__epoch_begin(m);
}

static void attach(kvf_manager *m, uint32_t index, const kvf_reserve *reserve, const chain *h, kvf_copy_list *copies) {
    kvf__cache *c = &m->cache;
    uint32_t first = index * m->seq_tables, n_tokens = h->n_tokens;
    if (h->n) share_tail(m, c->chain[h->n - 1]);
    for (uint32_t k = 0; k < m->seq_tables; k++)
        kvf__table_reserve(m, first + k, reservation_of(m, first + k, reserve, k), c->ids[k]);
    if (h->n) {
        attach_rows(m, first, h);
        count_attached(m, first, h);
    }
    for (uint32_t d = 0; d < h->n_here; d++) kvf__node_attached(c, c->chain[d]);
    for (uint32_t i = 0; i < m->config.n_classes; i++) m->blocks[i].n_idle -= (uint32_t)h->idle_blocks.of[i];
    for (uint32_t d = h->n_here; d < h->n; d++) kvf__node_load(m, index, d, copies);
    for (uint32_t i = 0; i < m->config.n_classes; i++) kvf__pool_note_held(&m->blocks[i]);
    m->seqs[index].next_pos = n_tokens;
    m->seqs[index].known_at = 0;
    uint32_t n_whole = n_tokens / c->block_size;
    m->seqs[index].node = n_whole ? kvf__node_handle(c, c->chain[n_whole - 1]) : 0;
}

static kvf_status check_copies(const kvf_manager *m, const chain *h, const kvf_copy_list *copies) {
    if (h->n_new_blocks <= kvf__copies_room(copies)) return KVF_OK;
    return kvf__fail(m->error, KVF_E_LIMIT, "attach: %llu blocks of the match lie on the host: copies has room for %u",
                     (unsigned long long)h->n_new_blocks, kvf__copies_room(copies));
}

kvf_status kvf_prefix_attach(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key,
                             const kvf_prefix_match *match, const kvf_reserve *reserve, kvf_copy_list *copies) {
    kvf_status s = kvf__prefix_check(manager);
    if (s) return s;
    kvf__walk w;
    kvf_prefix_match given = {.struct_size = sizeof given};
    kvf_reserve wanted;
    uint32_t index = 0, n_chain = 0;
    s = kvf__seq_find(manager, seq, &index);
    if (!s) s = check_empty(manager, index);
    if (!s) s = kvf__config_read(&given, sizeof given, match, "kvf_prefix_match", manager->error);
    if (!s) s = kvf__walk_begin(&manager->cache, key, &w, manager->error);
    if (!s && reserve) s = kvf__reserve_read(manager, reserve, &wanted);
    if (!s) s = check_match(manager, &w, &given, &n_chain);
    if (s) return s;
    reserve = reserve ? &wanted : NULL;
    chain hit = {0};
    if (n_chain) hit = look_at_chain(&manager->cache, given.n_tokens, n_chain);
    s = check_copies(manager, &hit, copies);
    if (!s) s = check_promises(manager, index * manager->seq_tables, reserve, &hit);
    if (!s) s = kvf__check_table_blocks(manager, "attach", (uint64_t)hit.n * manager->seq_tables);
    if (s) return s;
    uint32_t first_copy = copies ? copies->n : 0;
    attach(manager, index, reserve, &hit, copies);
    count_query(&manager->cache, &w, &hit, given.again != 0);
    if (manager->profile) kvf__profile_attached(manager, index, copies, first_copy);
    return KVF_OK;
}

/* ---- Drop, clock, figures -------------------------------------------------------------------------------------- */

/* Removes the roots of one salt in a ring, with their descendants. */
static void drop_roots(kvf__cache *c, int ring, const void *salt, uint32_t salt_bytes) {
    uint32_t n_roots = 0, at = c->root[ring];
    if (at != KVF__NO_NODE) do { /* count first, because removing changes the ring */
            n_roots++;
            at = c->nodes[at].next;
        } while (at != c->root[ring]);
    for (at = c->root[ring]; n_roots-- > 0;) {
        uint32_t next = c->nodes[at].next;
        if (c->nodes[at].salt_bytes == salt_bytes &&
            (!salt_bytes || !memcmp(c->salts + (size_t)at * KVF_PREFIX_SALT_MAX, salt, salt_bytes)))
            c->stats.removed += kvf__node_remove_all(c, at);
        at = next;
    }
}

kvf_status kvf_prefix_drop(kvf_manager *manager, const void *salt, uint32_t salt_bytes) {
    kvf_status s = kvf__prefix_check(manager);
    if (s) return s;
    if (salt_bytes > KVF_PREFIX_SALT_MAX)
        return kvf__fail(manager->error, KVF_E_LIMIT, "salt_bytes %u: must be at most %u", salt_bytes,
                         KVF_PREFIX_SALT_MAX);
    if (salt_bytes && !salt) return kvf__fail(manager->error, KVF_E_INVALID, "salt: is NULL");
    kvf__cache *c = &manager->cache;
    for (int ring = 0; ring < 2; ring++) drop_roots(c, ring, salt, salt_bytes);
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}

kvf_status kvf_prefix_clear(kvf_manager *manager) {
    kvf_status s = kvf__prefix_check(manager);
    if (s) return s;
    kvf__cache *c = &manager->cache;
    for (int ring = 0; ring < 2; ring++)
        while (c->root[ring] != KVF__NO_NODE) c->stats.removed += kvf__node_remove_all(c, c->root[ring]);
    if (manager->profile) kvf__profile_figures(manager);
    return KVF_OK;
}

kvf_status kvf_prefix_tick(kvf_manager *manager, uint64_t now) {
    kvf_status s = kvf__prefix_check(manager);
    if (s) return s;
    if (now < manager->cache.now)
        return kvf__fail(manager->error, KVF_E_INVALID, "now %llu: the clock stood at %llu already",
                         (unsigned long long)now, (unsigned long long)manager->cache.now);
    kvf__cache_tick(&manager->cache, now);
    return KVF_OK;
}

kvf_status kvf_prefix_stats_read(const kvf_manager *manager, kvf_prefix_stats *out) {
    if (!manager) return KVF_E_INVALID;
    if (!kvf__output_is_valid(out))
        return kvf__fail(manager->error, KVF_E_INVALID,
                         "out: must be given, its struct_size set to sizeof(kvf_prefix_stats)");
    const kvf__cache *c = &manager->cache;
    kvf_prefix_stats now = c->stats;
    now.n_nodes = c->n_nodes;
    now.n_cached = c->n_here * c->n_tables;
    now.n_idle = 0;
    for (uint32_t i = 0; i < manager->config.n_classes; i++) now.n_idle += manager->blocks[i].n_idle;
    now.n_snapshot_pages = c->snapshots[0].n_pages + c->snapshots[1].n_pages;
    now.n_host_nodes = c->n_on_host;
    now.n_host_only = c->n_nodes - c->n_here;
    now.n_bare = c->bare.n;
    now.snapshot_bytes = now.n_snapshot_pages * manager->config.snapshot_page_bytes;
    kvf__output(out, &now, sizeof now);
    return KVF_OK;
}
