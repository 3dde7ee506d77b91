/* The order of eviction: a list for LRU without a host tier, otherwise a heap; the choice of a victim; priorities with a
 * duration. */
#include "blockmgr/cache.h"

/* ---- Heaps -------------------------------------------------------------------------------------------------- */

/* Whether a node on the host is in use on the device, so that its host copy is not needed now. */
static bool is_double(const kvf__node *n) { return (n->tiers & KVF__HERE) && !n->n_idle; }

bool kvf__heap_before(const kvf__cache *c, const kvf__heap *h, uint32_t a, uint32_t b) {
    const kvf__node *x = &c->nodes[a], *y = &c->nodes[b];
    if (h->kind == KVF__DEADLINES) return x->until < y->until;
    if (h->kind == KVF__HOST_ORDER && is_double(x) != is_double(y)) return is_double(x);
    if (c->eviction == KVF_PREFIX_LFU && x->hits != y->hits) return x->hits < y->hits;
    if (c->eviction == KVF_PREFIX_PRIORITY && x->priority != y->priority) return x->priority < y->priority;
    return x->stamp < y->stamp;
}

static void put(kvf__cache *c, kvf__heap *h, uint32_t at, uint32_t node) {
    h->nodes[at] = node;
    c->nodes[node].place[h->kind] = at;
}

/* Moves the node at a place up or down until the heap is in order. */
static void settle(kvf__cache *c, kvf__heap *h, uint32_t at) {
    uint32_t node = h->nodes[at];
    while (at && kvf__heap_before(c, h, node, h->nodes[(at - 1) / 2])) {
        put(c, h, at, h->nodes[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= h->n) break;
        if (child + 1 < h->n && kvf__heap_before(c, h, h->nodes[child + 1], h->nodes[child])) child++;
        if (!kvf__heap_before(c, h, h->nodes[child], node)) break;
        put(c, h, at, h->nodes[child]);
        at = child;
    }
    put(c, h, at, node);
}

void kvf__heap_enter(kvf__cache *c, kvf__heap *h, uint32_t node) {
    h->nodes[h->n] = node;
    settle(c, h, h->n++);
}

void kvf__heap_leave(kvf__cache *c, kvf__heap *h, uint32_t node) {
    uint32_t at = c->nodes[node].place[h->kind];
    c->nodes[node].place[h->kind] = KVF__NO_NODE;
    if (at == --h->n) return;
    h->nodes[at] = h->nodes[h->n];
    settle(c, h, at);
}

/* ---- The order ------------------------------------------------------------------------------------------------ */

static void list_enter(kvf__cache *c, uint32_t node) {
    kvf__node *n = &c->nodes[node];
    n->order_prev = c->last;
    n->order_next = KVF__NO_NODE;
    if (c->last == KVF__NO_NODE) {
        c->first = node;
    } else {
        c->nodes[c->last].order_next = node;
    }
    c->last = node;
}

static void list_leave(kvf__cache *c, uint32_t node) {
    const kvf__node *n = &c->nodes[node];
    *(n->order_prev == KVF__NO_NODE ? &c->first : &c->nodes[n->order_prev].order_next) = n->order_next;
    *(n->order_next == KVF__NO_NODE ? &c->last : &c->nodes[n->order_next].order_prev) = n->order_prev;
}

void kvf__order_enter(kvf__cache *c, uint32_t node) {
    if (c->eviction != KVF_PREFIX_FIFO && !c->nodes[node].keeps_place) c->nodes[node].stamp = ++c->clock;
    if (c->listed) {
        list_enter(c, node);
    } else {
        kvf__heap_enter(c, &c->order, node);
    }
}

void kvf__order_leave(kvf__cache *c, uint32_t node) {
    if (c->listed) {
        list_leave(c, node);
    } else {
        kvf__heap_leave(c, &c->order, node);
    }
}

void kvf__order_touch(kvf__cache *c, uint32_t node) {
    if (c->eviction == KVF_PREFIX_FIFO) return;
    kvf__order_leave(c, node);
    kvf__order_enter(c, node);
}

static void heap_settle(kvf__cache *c, kvf__heap *h, uint32_t node) {
    if (c->nodes[node].place[h->kind] != KVF__NO_NODE) settle(c, h, c->nodes[node].place[h->kind]);
}

void kvf__order_settle(kvf__cache *c, uint32_t node) {
    const kvf__node *n = &c->nodes[node];
    if (!c->host) return;
    bool bare = n->tiers == KVF__HERE && n->n_idle == c->n_tables, was_bare = n->place[KVF__BARE] != KVF__NO_NODE;
    if (bare && !was_bare) kvf__heap_enter(c, &c->bare, node);
    if (!bare && was_bare) kvf__heap_leave(c, &c->bare, node);
    heap_settle(c, &c->bare, node);
    heap_settle(c, &c->host_order, node);
}

/* ---- Victims ---------------------------------------------------------------------------------------------------- */

static uint32_t oldest_child(const kvf__cache *c, uint32_t node, int ring) {
    return c->nodes[c->nodes[node].child[ring]].prev;
}

/* Evicts the first node of the order or, if it has descendants on the device, a leaf below it. The search continues where the
 * last one for the same node ended. A node with a host copy stays on the host. Without a copy, its descendants on the host
 * are removed with it. */
static void evict_here(kvf__cache *c) {
    uint32_t chosen = c->listed ? c->first : c->order.nodes[0];
    uint32_t at = c->descent.chosen == chosen ? c->descent.hint : chosen;
    while (c->nodes[at].child[0] != KVF__NO_NODE) at = oldest_child(c, at, 0);
    c->descent = (kvf__descent){chosen, at};
    if (kvf__is_on_host(c, at)) {
        kvf__node_leave(c, at);
        c->stats.left_device++;
    } else {
        c->stats.evicted += kvf__node_remove_all(c, at);
    }
}

/* The first node of the host order. If it is not in use on the device and has descendants that are only on the host, a leaf
 * below it. */
static uint32_t host_victim(const kvf__cache *c, uint32_t chosen) {
    uint32_t at = chosen;
    if (c->host_descent.chosen == chosen && !kvf__is_here(c, c->host_descent.hint)) at = c->host_descent.hint;
    if (is_double(&c->nodes[chosen])) return chosen;
    while (c->nodes[at].child[1] != KVF__NO_NODE) at = oldest_child(c, at, 1);
    return at;
}

static void evict_on_host(kvf__cache *c) {
    uint32_t chosen = c->host_order.nodes[0], at = host_victim(c, chosen);
    c->host_descent = (kvf__descent){chosen, at};
    c->stats.left_host++;
    if (kvf__is_here(c, at)) {
        kvf__node_uncopied(c, at);
    } else {
        kvf__node_remove(c, at);
        c->stats.evicted++;
    }
}

void kvf__cache_evict(kvf__cache *c, const kvf__pool *p) {
    uint32_t n_free = p->n_free;
    c->evicting = true;
    while (p->n_free == n_free) {
        if (p->nodes == c->node_of)
            evict_here(c);
        else
            evict_on_host(c);
    }
    c->evicting = false;
}

uint32_t kvf__host_first(const kvf__cache *c) { return c->host_order.n ? c->host_order.nodes[0] : KVF__NO_NODE; }

/* ---- Priorities -------------------------------------------------------------------------------------------------- */

/* Restores a node's places in the heaps after its priority has changed. */
static void priority_changed(kvf__cache *c, uint32_t node) {
    heap_settle(c, &c->order, node);
    kvf__order_settle(c, node);
}

void kvf__node_end_priority(kvf__cache *c, uint32_t node) {
    if (c->nodes[node].place[KVF__DEADLINES] != KVF__NO_NODE) kvf__heap_leave(c, &c->deadlines, node);
    c->nodes[node].priority = 0;
}

void kvf__node_set_priority(kvf__cache *c, uint32_t node, uint32_t priority, uint64_t duration) {
    kvf__node *n = &c->nodes[node];
    uint64_t until = duration && duration <= UINT64_MAX - c->now ? c->now + duration : UINT64_MAX;
    if (c->eviction != KVF_PREFIX_PRIORITY || !priority || priority < n->priority) return;
    if (priority == n->priority) until = KVF__MAX(until, n->until);
    kvf__node_end_priority(c, node);
    n->priority = priority;
    n->until = until;
    if (until != UINT64_MAX) kvf__heap_enter(c, &c->deadlines, node);
    priority_changed(c, node);
}

void kvf__cache_tick(kvf__cache *c, uint64_t now) {
    c->now = now;
    while (c->deadlines.n && c->nodes[c->deadlines.nodes[0]].until <= now) {
        uint32_t node = c->deadlines.nodes[0];
        kvf__node_end_priority(c, node);
        priority_changed(c, node);
    }
}
