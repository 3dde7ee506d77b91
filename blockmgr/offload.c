/* The prefix cache over two tiers: idle nodes are copied to the host, and copied back by hits. As with swaps, a call only
 * fills a copy list, whose items pin src and dst until they are done. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- Out ------------------------------------------------------------------------------------------- */

/* The first node below `node`, or `node` itself, in a walk of the nodes on the device: leaves first, the oldest first. */
static uint32_t first_leaf(const kvf__cache *c, uint32_t node) {
    while (c->nodes[node].child[0] != KVF__NO_NODE) node = c->nodes[c->nodes[node].child[0]].prev;
    return node;
}

/* The next node in that walk. */
static uint32_t next_leaf(const kvf__cache *c, uint32_t node) {
    uint32_t parent = c->nodes[node].parent;
    uint32_t newest = parent == KVF__NO_NODE ? c->root[0] : c->nodes[parent].child[0];
    return node == newest ? parent : first_leaf(c, c->nodes[node].prev);
}

static bool is_bare(const kvf__cache *c, uint32_t node) { return c->nodes[node].place[KVF__BARE] != KVF__NO_NODE; }

static bool in_use(const kvf__cache *c, uint32_t node) { return kvf__is_here(c, node) && !c->nodes[node].n_idle; }

/* Whether a node on the host alone is evicted before a node on the device: it or one of its ancestors is that node, or comes
 * before it in the order and is not in use. */
static bool goes_before(const kvf__cache *c, uint32_t at, uint32_t node) {
    for (; at != KVF__NO_NODE; at = c->nodes[at].parent)
        if (at == node || (!in_use(c, at) && kvf__heap_before(c, &c->bare, at, node))) return true;
    return false;
}

/* Makes room on the host for one more node. False if it cannot. */
static bool make_room(kvf__cache *c, uint32_t n_classes, uint32_t node) {
    for (uint32_t i = 0; i < n_classes; i++)
        while (c->host[i].n_free < c->class_tables[i]) {
            uint32_t first = kvf__host_first(c);
            if (first == KVF__NO_NODE || !c->host[i].n_idle) return false;
            if (!in_use(c, first) && (kvf__is_here(c, first) || !goes_before(c, first, node))) return false;
            kvf__cache_evict(c, &c->host[i]);
        }
    return true;
}

/* Takes blocks for a node from the pools of a tier, into the cache's ids. */
static void take_ids(kvf__cache *c, kvf__pool *pools) {
    if (!c->table_class)
        kvf__pool_take(pools, c->ids, c->n_tables);
    else
        for (uint32_t k = 0; k < c->n_tables; k++) kvf__pool_take(kvf__pool_at_table(c, pools, k), &c->ids[k], 1);
}

/* Copies a node to the host. Its device blocks become pinned and are no longer idle; its host blocks are pinned too. */
static void copy_out(kvf_manager *m, uint32_t node, kvf_copy_list *copies) {
    kvf__cache *c = &m->cache;
    kvf__node *n = &c->nodes[node];
    take_ids(c, c->host);
    kvf__order_leave(c, node);
    for (uint32_t i = 0; i < m->config.n_classes; i++) m->blocks[i].n_idle -= c->class_tables[i];
    n->n_idle = 0;
    n->keeps_place = true;
    kvf__node_copied(c, node, c->ids);
    for (uint32_t k = 0; k < c->n_tables; k++) {
        kvf__copies_add(m, copies, KVF_COPY_BLOCK_OUT, kvf__node_blocks(c, node)[k], c->ids[k], n->n_tokens);
        (void)kvf__pool_drop(kvf__pool_at_table(c, c->host, k), c->ids[k]); /* the pin stays */
    }
    for (uint32_t i = 0; i < m->config.n_classes; i++) kvf__pool_note_held(&m->blocks[i]);
    c->stats.offloaded++;
}

static bool has_room(const kvf_manager *m, const kvf_copy_list *copies) {
    for (uint32_t i = 0; i < m->config.n_classes; i++)
        if (kvf__pool_spare(&m->blocks[i]) < m->cache.class_tables[i]) return false;
    return kvf__copies_room(copies) >= m->seq_tables;
}

kvf_status kvf_prefix_offload(kvf_manager *manager, uint32_t max_nodes, kvf_copy_list *copies, uint32_t *n_nodes) {
    kvf_status s = kvf__prefix_check(manager);
    if (s) return s;
    kvf__cache *c = &manager->cache;
    if (!c->host) return kvf__fail(manager->error, KVF_E_UNSUPPORTED, "n_host_blocks 0: this manager has no host tier");
    kvf_copy_list none = {NULL, 0, 0};
    if (!copies) copies = &none;
    uint32_t n = 0, first_copy = copies->n;
    for (bool room = true; room && n < max_nodes && c->bare.n;) {
        uint32_t chosen = c->bare.nodes[0], at = first_leaf(c, chosen);
        while (room && n < max_nodes) {
            if (is_bare(c, at)) {
                room = has_room(manager, copies) && make_room(c, manager->config.n_classes, at);
                if (!room) break;
                copy_out(manager, at, copies);
                n++;
            }
            if (at == chosen) break;
            at = next_leaf(c, at);
        }
    }
    if (n_nodes) *n_nodes = n;
    if (manager->profile) kvf__profile_offloaded(manager, copies, first_copy);
    return KVF_OK;
}

/* ---- In ------------------------------------------------------------------------------------------------ */

void kvf__node_load(kvf_manager *m, uint32_t index, uint32_t d, kvf_copy_list *copies) {
    kvf__cache *c = &m->cache;
    uint32_t node = c->chain[d], first = index * m->seq_tables;
    kvf__node *n = &c->nodes[node];
    const uint32_t *host = kvf__node_host_blocks(c, node);
    take_ids(c, c->blocks);
    kvf__node_enter(c, node, c->ids);
    kvf__node_attached(c, node);
    kvf__node_host_pinned(c, node);
    for (uint32_t k = 0; k < c->n_tables; k++) {
        kvf__row(m, first + k)[d] = c->ids[k];
        kvf__copies_add(m, copies, KVF_COPY_BLOCK_IN, host[k], c->ids[k], n->n_tokens);
    }
    c->stats.loaded++;
}
