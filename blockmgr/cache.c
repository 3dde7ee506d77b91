/* The nodes of the prefix cache: adding, growing, removing; what happens when a block loses its last reference. */
#include "blockmgr/cache.h"

/* ---- The slab -------------------------------------------------------------------------------------------- */

/* Four or more buckets per node, so that a lookup seldom meets another node in its bucket: that costs a branch misprediction. */
static uint32_t buckets_for(uint32_t n_max) {
    uint32_t n = 4;
    while (n / 4 < n_max && n < 1u << 31) n <<= 1;
    return n;
}

/* How many nodes a tier has blocks for; the class with the fewest blocks per table decides. */
static uint32_t nodes_for(const kvf_manager_config *config, uint32_t n_tables, bool host) {
    uint32_t n_groups = n_tables / config->n_layers, n = UINT32_MAX;
    if (config->n_classes == 1) return (host ? config->n_host_blocks : config->n_blocks) / n_tables;
    for (uint32_t i = 0; i < config->n_classes; i++) {
        uint32_t n_layers = 0;
        for (uint32_t l = 0; l < config->n_layers; l++) n_layers += config->layer_class[l] == i;
        uint32_t n_blocks = host ? config->classes[i].n_host_blocks : config->classes[i].n_blocks;
        n = KVF__MIN(n, n_blocks / (n_layers * n_groups));
    }
    return n;
}

void kvf__cache_carve(kvf__cache *c, kvf__slab *slab, const kvf_manager_config *config, uint32_t n_tables) {
    c->on = config->prefix_cache != 0;
    if (!c->on) return;
    c->n_tables = n_tables;
    c->block_size = config->block_size;
    c->eviction = (kvf_prefix_eviction)config->prefix_eviction;
    c->listed = c->eviction == KVF_PREFIX_LRU && !config->n_host_blocks;
    c->n_max = nodes_for(config, n_tables, false) + nodes_for(config, n_tables, true);
    if (config->n_classes > 1) c->table_class = kvf__slab_take(slab, n_tables, sizeof *c->table_class);
    c->bucket_mask = buckets_for(c->n_max) - 1;
    size_t n = c->n_max, n_blocks = 0;
    if (!kvf__mul(n, n_tables, &n_blocks)) slab->bad = true;
    c->node_of = kvf__slab_take(slab, config->n_blocks, sizeof *c->node_of);
    c->nodes = kvf__slab_take(slab, n, sizeof *c->nodes);
    c->node_blocks = kvf__slab_take(slab, n_blocks, sizeof *c->node_blocks);
    c->node_tokens = kvf__slab_take(slab, n, c->block_size * sizeof *c->node_tokens);
    c->salts = kvf__slab_take(slab, n, KVF_PREFIX_SALT_MAX);
    c->buckets = kvf__slab_take(slab, (size_t)c->bucket_mask + 1, sizeof *c->buckets);
    c->free_nodes = kvf__slab_take(slab, n, sizeof *c->free_nodes);
    c->ids = kvf__slab_take(slab, n_tables, sizeof *c->ids);
    c->chain = kvf__slab_take(slab, kvf__ceil_div(config->max_slots, c->block_size), sizeof *c->chain);
    if (!c->listed) c->order.nodes = kvf__slab_take(slab, n, sizeof *c->order.nodes);
    if (config->n_host_blocks) {
        c->host_node_of = kvf__slab_take(slab, config->n_host_blocks, sizeof *c->host_node_of);
        c->host_blocks = kvf__slab_take(slab, n_blocks, sizeof *c->host_blocks);
        c->host_order.nodes = kvf__slab_take(slab, n, sizeof *c->host_order.nodes);
        c->bare.nodes = kvf__slab_take(slab, n, sizeof *c->bare.nodes);
    }
    if (c->eviction == KVF_PREFIX_PRIORITY) c->deadlines.nodes = kvf__slab_take(slab, n, sizeof *c->deadlines.nodes);
    if (!config->n_snapshot_pages) return;
    kvf__pool_carve(&c->pages, slab, config->n_snapshot_pages);
    c->page_next = kvf__slab_take(slab, config->n_snapshot_pages, sizeof *c->page_next);
}

static void init_host(kvf__cache *c, kvf__pool *host, const kvf_manager_config *config) {
    if (!config->n_host_blocks) return;
    for (uint32_t i = 0; i < config->n_classes; i++) {
        host[i].cache = c;
        host[i].nodes = c->host_node_of;
    }
    c->host = host;
    memset(c->host_node_of, 0xff, config->n_host_blocks * sizeof *c->host_node_of);
}

void kvf__cache_init(kvf__cache *c, kvf__pool *blocks, kvf__pool *host, const kvf_manager_config *config,
                     uint64_t seed) {
    if (!c->on) return;
    init_host(c, host, config);
    for (uint32_t i = 0; i < config->n_classes; i++) {
        blocks[i].cache = c;
        blocks[i].nodes = c->node_of;
    }
    c->blocks = blocks;
    for (uint32_t k = 0; c->table_class && k < c->n_tables; k++)
        c->table_class[k] = config->layer_class[k / (c->n_tables / config->n_layers)];
    for (uint32_t k = 0; k < c->n_tables; k++) c->class_tables[c->table_class ? c->table_class[k] : 0]++;
    memset(c->node_of, 0xff, config->n_blocks * sizeof *c->node_of); /* KVF_NO_BLOCK */
    c->seed = seed;
    for (uint32_t i = 0; i < c->n_max; i++) {
        c->free_nodes[i] = c->n_max - 1 - i;
        c->nodes[i].generation = 1;
        c->nodes[i].page = KVF_NO_BLOCK;
        memset(c->nodes[i].place, 0xff, sizeof c->nodes[i].place); /* KVF__NO_NODE */
    }
    memset(c->buckets, 0xff, ((size_t)c->bucket_mask + 1) * sizeof *c->buckets); /* KVF__NO_NODE */
    c->root[0] = c->root[1] = c->first = c->last = KVF__NO_NODE;
    c->descent = c->host_descent = (kvf__descent){KVF__NO_NODE, KVF__NO_NODE};
    c->order.kind = KVF__ORDER;
    c->deadlines.kind = KVF__DEADLINES;
    c->host_order.kind = KVF__HOST_ORDER;
    c->bare.kind = KVF__BARE;
    for (int i = 0; i < 2; i++) c->snapshots[i] = (kvf__snapshot_list){KVF__NO_NODE, KVF__NO_NODE, 0};
    if (config->n_snapshot_pages) kvf__pool_init(&c->pages, 0);
}

/* ---- Links ------------------------------------------------------------------------------------------------- */

/* The ring of siblings for a node on these tiers. */
static uint32_t *ring(kvf__cache *c, uint32_t parent, uint32_t tiers) {
    int which = !(tiers & KVF__HERE);
    return parent == KVF__NO_NODE ? &c->root[which] : &c->nodes[parent].child[which];
}

static void link_sibling(kvf__cache *c, uint32_t node, uint32_t parent) {
    kvf__node *n = &c->nodes[node];
    uint32_t *newest = ring(c, parent, n->tiers);
    n->parent = parent;
    n->next = n->prev = node;
    if (*newest != KVF__NO_NODE) {
        n->next = *newest;
        n->prev = c->nodes[*newest].prev;
        c->nodes[n->prev].next = node;
        c->nodes[n->next].prev = node;
    }
    *newest = node;
}

static void unlink_sibling(kvf__cache *c, uint32_t node) {
    const kvf__node *n = &c->nodes[node];
    uint32_t *newest = ring(c, n->parent, n->tiers);
    c->nodes[n->prev].next = n->next;
    c->nodes[n->next].prev = n->prev;
    if (*newest == node) *newest = n->next == node ? KVF__NO_NODE : n->next;
}

static void enter_bucket(kvf__cache *c, uint32_t node) {
    uint32_t *bucket = &c->buckets[c->nodes[node].hash.low & c->bucket_mask];
    c->nodes[node].bucket_next = *bucket;
    *bucket = node;
}

static void leave_bucket(kvf__cache *c, uint32_t node) {
    uint32_t *at = &c->buckets[c->nodes[node].hash.low & c->bucket_mask];
    while (*at != node) at = &c->nodes[*at].bucket_next;
    *at = c->nodes[node].bucket_next;
}

/* ---- Adding and removing nodes -------------------------------------------------------------------------------- */

/* Sets a node's content to the block that the walk has hashed. */
static void set_content(kvf__cache *c, uint32_t node, const kvf__walk *w) {
    kvf__node *n = &c->nodes[node];
    n->hash = kvf__walk_hashed(w);
    n->extras = w->extras;
    n->n_tokens = w->n_hashed;
    memcpy(kvf__node_tokens(c, node), w->key.tokens + (size_t)w->depth * c->block_size,
           w->n_hashed * sizeof *w->key.tokens);
    enter_bucket(c, node);
}

uint32_t kvf__node_add(kvf__cache *c, const kvf__walk *w, const uint32_t *blocks, bool rows) {
    uint32_t node = c->free_nodes[c->n_max - 1 - c->n_nodes++];
    kvf__node *n = &c->nodes[node];
    *n = (kvf__node){.generation = n->generation,
                     .child = {KVF__NO_NODE, KVF__NO_NODE},
                     .tiers = KVF__HERE,
                     .depth = w->depth,
                     .stamp = ++c->clock,
                     .page = KVF_NO_BLOCK};
    memset(n->place, 0xff, sizeof n->place); /* KVF__NO_NODE */
    c->n_here++;
    if (w->node == KVF__NO_NODE) {
        n->salt_bytes = w->key.salt_bytes;
        if (n->salt_bytes) memcpy(c->salts + (size_t)node * KVF_PREFIX_SALT_MAX, w->key.salt, n->salt_bytes);
    }
    set_content(c, node, w);
    link_sibling(c, node, w->node);
    memcpy(kvf__node_blocks(c, node), blocks, c->n_tables * sizeof *blocks);
    (rows ? kvf__pool_cache_rows : kvf__pool_cache)(c->blocks, blocks, c->n_tables, node);
    c->stats.stored++;
    c->stats.n_nodes_max = KVF__MAX(c->stats.n_nodes_max, c->n_nodes);
    return node;
}

void kvf__node_rebase(kvf__cache *c, uint32_t node, const uint32_t *blocks) {
    uint32_t *own = kvf__node_blocks(c, node), was_idle = c->nodes[node].n_idle;
    for (uint32_t t = 0; t < c->n_tables; t++) {
        if (own[t] == blocks[t]) continue;
        uint32_t fell_free = kvf__pool_uncache(kvf__cache_pool(c, t), own[t]);
        c->nodes[node].n_idle -= fell_free;
        if (c->gone) c->gone(c->gone_ctx, own[t], KVF__GONE_ADOPTED, fell_free != 0);
        own[t] = blocks[t];
        kvf__pool_cache(c->blocks, &own[t], 1, node);
    }
    if (was_idle && !c->nodes[node].n_idle) kvf__order_leave(c, node);
    kvf__order_settle(c, node);
}

void kvf__node_grow(kvf__cache *c, uint32_t node, const kvf__walk *w, const uint32_t *blocks) {
    kvf__node_uncopied(c, node); /* the host copy has the shorter content */
    leave_bucket(c, node);
    set_content(c, node, w);
    c->nodes[node].generation++;
    kvf__node_rebase(c, node, blocks);
    c->stats.stored++;
}

/* ---- The two tiers ------------------------------------------------------------------------------------------- */

/* Ends the caching of a block and reports it. A block that a copy still pins becomes free only when the copy is done, so it
 * does not count as evicted. */
static void uncache_told(kvf__cache *c, uint32_t k, uint32_t id) {
    bool fell_free = kvf__pool_uncache(kvf__cache_pool(c, k), id) != 0;
    c->gone(c->gone_ctx, id, c->evicting && fell_free ? KVF__GONE_EVICTED : KVF__GONE_REMOVED, fell_free);
}

static void descent_leave(const kvf__cache *c, kvf__descent *d, uint32_t node) {
    if (d->hint == node) d->hint = c->nodes[node].parent;
    if (d->chosen == node) d->chosen = d->hint = KVF__NO_NODE;
}

/* Takes the device blocks from a node, which is in no ring. */
static void give_here(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    const uint32_t *blocks = kvf__node_blocks(c, node);
    if (n->n_idle) kvf__order_leave(c, node);
    if (c->evicting) c->stats.evicted_blocks += n->n_idle;
    if (c->gone)
        for (uint32_t t = c->n_tables; t-- > 0;) uncache_told(c, t, blocks[t]);
    else
        for (uint32_t t = c->n_tables; t-- > 0;) (void)kvf__pool_uncache(kvf__cache_pool(c, t), blocks[t]);
    descent_leave(c, &c->descent, node);
    n->n_idle = 0;
    n->keeps_place = false;
    n->tiers &= ~(uint32_t)KVF__HERE;
    c->n_here--;
}

/* Takes the host blocks from a node. */
static void give_host(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    const uint32_t *blocks = kvf__node_host_blocks(c, node);
    if (n->n_host_idle) kvf__heap_leave(c, &c->host_order, node);
    for (uint32_t t = c->n_tables; t-- > 0;) (void)kvf__pool_uncache(kvf__pool_at_table(c, c->host, t), blocks[t]);
    descent_leave(c, &c->host_descent, node);
    n->n_host_idle = 0;
    n->tiers &= ~(uint32_t)KVF__ON_HOST;
    c->n_on_host--;
}

void kvf__node_enter(kvf__cache *c, uint32_t node, const uint32_t *blocks) {
    kvf__node *n = &c->nodes[node];
    unlink_sibling(c, node);
    n->tiers |= KVF__HERE;
    c->n_here++;
    link_sibling(c, node, n->parent);
    memcpy(kvf__node_blocks(c, node), blocks, c->n_tables * sizeof *blocks);
    kvf__pool_cache(c->blocks, blocks, c->n_tables, node);
    kvf__order_settle(c, node);
}

void kvf__node_leave(kvf__cache *c, uint32_t node) {
    unlink_sibling(c, node);
    give_here(c, node);
    link_sibling(c, node, c->nodes[node].parent);
    kvf__order_settle(c, node);
}

void kvf__node_copied(kvf__cache *c, uint32_t node, const uint32_t *host_blocks) {
    c->nodes[node].tiers |= KVF__ON_HOST;
    c->n_on_host++;
    memcpy(kvf__node_host_blocks(c, node), host_blocks, c->n_tables * sizeof *host_blocks);
    kvf__pool_cache(c->host, host_blocks, c->n_tables, node);
    kvf__order_settle(c, node);
}

void kvf__node_uncopied(kvf__cache *c, uint32_t node) {
    if (!kvf__is_on_host(c, node)) return;
    give_host(c, node);
    kvf__order_settle(c, node);
}

void kvf__node_host_pinned(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    if (n->n_host_idle) kvf__heap_leave(c, &c->host_order, node);
    for (uint32_t k = 0; k < c->n_tables; k++) {
        kvf__pool *p = kvf__pool_at_table(c, c->host, k);
        p->n_idle -= *kvf__state(p, kvf__node_host_blocks(c, node)[k]) == KVF__IDLE;
        kvf__pool_note_held(p);
    }
    n->n_host_idle = 0;
}

void kvf__node_remove(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    kvf__snapshot_drop(c, node);
    kvf__node_end_priority(c, node);
    unlink_sibling(c, node);
    if (n->tiers & KVF__HERE) give_here(c, node);
    if (n->tiers & KVF__ON_HOST) give_host(c, node);
    kvf__order_settle(c, node);
    leave_bucket(c, node);
    descent_leave(c, &c->host_descent, node);
    n->n_tokens = 0;
    n->generation++;
    c->free_nodes[c->n_max - c->n_nodes--] = node;
}

uint32_t kvf__node_remove_all(kvf__cache *c, uint32_t node) {
    uint32_t n_removed = 0, at = node;
    for (;;) {
        const kvf__node *n = &c->nodes[at];
        for (; n->child[0] != KVF__NO_NODE || n->child[1] != KVF__NO_NODE; n = &c->nodes[at])
            at = n->child[n->child[0] == KVF__NO_NODE];
        uint32_t parent = n->parent;
        kvf__node_remove(c, at);
        n_removed++;
        if (at == node) return n_removed;
        at = parent;
    }
}

/* ---- References come and go ------------------------------------------------------------------------------------ */

static void idle_here(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    n->n_idle++;
    if (n->n_idle == 1) {
        kvf__order_enter(c, node);
    } else if (n->n_idle == c->n_tables && !n->keeps_place) {
        kvf__order_touch(c, node);
    }
    if (n->n_idle == c->n_tables) n->keeps_place = false;
    if (c->host) kvf__order_settle(c, node);
}

void kvf__cache_idle(kvf__cache *c, const kvf__pool *p, uint32_t node) {
    if (p->nodes == c->node_of)
        idle_here(c, node);
    else if (!c->nodes[node].n_host_idle++)
        kvf__heap_enter(c, &c->host_order, node);
}

void kvf__node_attached(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    n->hits += n->hits != UINT32_MAX;
    if (n->n_idle) kvf__order_leave(c, node);
    n->n_idle = 0;
    n->keeps_place = false;
    if (c->host) kvf__order_settle(c, node);
}
