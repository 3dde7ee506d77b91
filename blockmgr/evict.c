/* The order of eviction: a list for LRU, a heap for the others; the choice of a victim; priorities that end. */
#include "blockmgr/cache.h"

/* ---- Heaps -------------------------------------------------------------------------------------------------- */

static uint32_t *place(kvf__cache *c, const kvf__heap *h, uint32_t node) {
    return h->deadlines ? &c->nodes[node].deadline : &c->nodes[node].order_next;
}

bool kvf__heap_before(const kvf__cache *c, const kvf__heap *h, uint32_t a, uint32_t b) {
    const kvf__node *x = &c->nodes[a], *y = &c->nodes[b];
    if (h->deadlines) return x->until < y->until;
    if (c->eviction == KVF_PREFIX_LFU && x->hits != y->hits) return x->hits < y->hits;
    if (c->eviction == KVF_PREFIX_PRIORITY && x->priority != y->priority) return x->priority < y->priority;
    return x->stamp < y->stamp;
}

static void put(kvf__cache *c, kvf__heap *h, uint32_t at, uint32_t node) {
    h->nodes[at] = node;
    *place(c, h, node) = at;
}

/* Moves the node at a place up or down until it stands right. */
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

static void heap_enter(kvf__cache *c, kvf__heap *h, uint32_t node) {
    h->nodes[h->n] = node;
    settle(c, h, h->n++);
}

static void heap_leave(kvf__cache *c, kvf__heap *h, uint32_t node) {
    uint32_t at = *place(c, h, node);
    *place(c, h, node) = KVF__NO_NODE;
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
    if (c->eviction != KVF_PREFIX_FIFO) c->nodes[node].stamp = ++c->clock;
    if (c->eviction == KVF_PREFIX_LRU) {
        list_enter(c, node);
    } else {
        heap_enter(c, &c->order, node);
    }
}

void kvf__order_leave(kvf__cache *c, uint32_t node) {
    if (c->eviction == KVF_PREFIX_LRU) {
        list_leave(c, node);
    } else {
        heap_leave(c, &c->order, node);
    }
}

void kvf__order_touch(kvf__cache *c, uint32_t node) {
    if (c->eviction == KVF_PREFIX_FIFO) return;
    kvf__order_leave(c, node);
    kvf__order_enter(c, node);
}

/* The first of the order or, as long as something follows on it, a tail of that. A descent goes on from where the last
 * one for the same node has ended. */
void kvf__cache_evict(kvf__cache *c, const kvf__pool *p) {
    uint32_t n_free = p->n_free;
    while (p->n_free == n_free) {
        uint32_t chosen = c->eviction == KVF_PREFIX_LRU ? c->first : c->order.nodes[0];
        uint32_t at = c->chosen == chosen ? c->hint : chosen;
        while (c->nodes[at].child != KVF__NO_NODE) at = c->nodes[c->nodes[at].child].prev; /* the oldest */
        c->chosen = chosen;
        c->hint = at;
        kvf__node_remove(c, at);
        c->stats.evicted++;
    }
}

/* ---- Priorities -------------------------------------------------------------------------------------------------- */

/* What the order is by has changed. */
static void priority_changed(kvf__cache *c, uint32_t node) {
    if (c->nodes[node].n_idle) settle(c, &c->order, c->nodes[node].order_next);
}

void kvf__node_end_priority(kvf__cache *c, uint32_t node) {
    if (c->nodes[node].deadline != KVF__NO_NODE) heap_leave(c, &c->deadlines, node);
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
    if (until != UINT64_MAX) heap_enter(c, &c->deadlines, node);
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
