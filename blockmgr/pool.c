/* The id pool: free stack, states, reference counts, pins. Every operation is O(1) per id. */
#include "blockmgr/cache.h"

void kvf__pool_carve(kvf__pool *p, kvf__slab *slab, uint32_t n) {
    p->n = n;
    p->free_ids = kvf__slab_take(slab, n, sizeof *p->free_ids);
    p->states = kvf__slab_take(slab, ((size_t)n + KVF__STATE_GROUP - 1) / KVF__STATE_GROUP * KVF__STATE_GROUP,
                               sizeof *p->states);
    p->heads = kvf__slab_take(slab, n, sizeof *p->heads);
    p->entries = kvf__slab_take(slab, n, sizeof *p->entries);
}

void kvf__pool_init(kvf__pool *p, uint32_t generation) {
    p->n_free = p->n_least = p->n;
    p->first_head = generation & ~KVF__ALONE;
    for (uint32_t i = 0; i < p->n; i++) p->free_ids[p->n - 1 - i] = p->first + i;
}

void kvf__pool_make_room(kvf__pool *p, uint32_t n) {
    while (p->n_free < n) kvf__cache_evict(p->cache, p);
}

void kvf__pool_take_run(const uint32_t *restrict top, uint8_t *restrict states, uint32_t *restrict row, uint32_t n) {
    for (; n >= 4; n -= 4, row += 4) {
        uint32_t a = top[-1], b = top[-2], c = top[-3], d = top[-4];
        row[0] = a, row[1] = b, row[2] = c, row[3] = d;
        states[kvf__state_at(a)] = KVF__ROW;
        states[kvf__state_at(b)] = KVF__ROW;
        states[kvf__state_at(c)] = KVF__ROW;
        states[kvf__state_at(d)] = KVF__ROW;
        top -= 4;
    }
    for (; n > 0; n--) {
        *row++ = *--top;
        states[kvf__state_at(*top)] = KVF__ROW;
    }
}

void kvf__pool_take(kvf__pool *p, uint32_t *row, uint32_t n) {
    if (n > p->n_free) kvf__pool_make_room(p, n);
    kvf__pool_take_run(p->free_ids + p->n_free, p->states, row, n);
    p->n_free -= n;
    kvf__pool_note_held(p);
}

static void put_back(kvf__pool *p, uint32_t id) {
    *kvf__state(p, id) = KVF__APART;
    p->free_ids[p->n_free++] = id;
}

static void put_idle(kvf__pool *p, uint32_t id) {
    *kvf__state(p, id) = KVF__IDLE;
    p->n_idle++;
    kvf__cache_idle(p->cache, p, p->nodes[id]);
}

/* Turns an id into a counted one: from here on refs, pins and holds are valid. */
static void count(kvf__pool *p, uint32_t id) {
    if (*kvf__state(p, id) == KVF__COUNTED) return;
    p->entries[id].holds = p->heads[id] & KVF__ALONE;
    p->entries[id].refs = *kvf__state(p, id) != KVF__IDLE;
    p->heads[id] &= ~KVF__ALONE;
    *kvf__state(p, id) = KVF__COUNTED;
}

/* Ends the counting of an id that has at most one reference and no pin, if a simpler state describes it. */
static void uncount(kvf__pool *p, uint32_t id) {
    kvf__entry *e = &p->entries[id];
    bool cached = kvf__pool_node(p, id) != KVF_NO_BLOCK, held = e->holds != 0;
    uint32_t refs = e->refs;
    if (refs && held && cached) return;
    if (held) p->heads[id] |= KVF__ALONE;
    e->refs = e->holds = 0;
    if (refs) {
        *kvf__state(p, id) = cached ? KVF__CACHED : held ? KVF__APART : KVF__ROW;
    } else if (cached) {
        put_idle(p, id);
    } else {
        put_back(p, id);
    }
}

/* Removes a reference of a counted id. True if it was the last. */
static bool unref(kvf__pool *p, uint32_t id) {
    uint32_t refs = --p->entries[id].refs;
    if (refs > 1 || p->entries[id].pins) return false;
    uncount(p, id);
    return !refs;
}

void kvf__pool_cache(kvf__pool *p, const uint32_t *restrict ids, uint32_t n, uint32_t node) {
    uint8_t *restrict states = p->states;
    uint32_t *restrict nodes = p->nodes;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *state = &states[kvf__state_at(ids[i])];
        *state = *state == KVF__ROW ? KVF__CACHED : *state;
        nodes[ids[i]] = node;
    }
}

void kvf__pool_cache_rows(kvf__pool *p, const uint32_t *restrict ids, uint32_t n, uint32_t node) {
    uint8_t *restrict states = p->states;
    uint32_t *restrict nodes = p->nodes;
    for (uint32_t i = 0; i < n; i++) {
        states[kvf__state_at(ids[i])] = KVF__CACHED;
        nodes[ids[i]] = node;
    }
}

void kvf__pool_attach_idle(kvf__pool *p, const uint32_t *restrict ids, uint32_t n) {
    uint8_t *restrict states = p->states;
    for (uint32_t i = 0; i < n; i++) states[kvf__state_at(ids[i])] = KVF__CACHED;
}

uint32_t kvf__pool_uncache(kvf__pool *p, uint32_t id) {
    uint8_t *state = kvf__state(p, id);
    p->nodes[id] = KVF_NO_BLOCK;
    if (*state == KVF__IDLE) {
        p->n_idle--;
        put_back(p, id);
        return 1;
    }
    if (*state == KVF__CACHED) *state = KVF__ROW;
    if (*state == KVF__COUNTED && p->entries[id].refs == 1 && !p->entries[id].pins) uncount(p, id);
    return 0;
}

void kvf__pool_share(kvf__pool *p, uint32_t id) {
    count(p, id);
    p->n_shared += kvf__pool_holders(p, id) == 1;
    p->entries[id].refs++;
}

static bool drop_counted(kvf__pool *p, uint32_t id) {
    p->n_shared -= kvf__pool_holders(p, id) == 2;
    return unref(p, id);
}

bool kvf__pool_drop(kvf__pool *p, uint32_t id) {
    uint32_t state = *kvf__state(p, id);
    if (state == KVF__COUNTED) return drop_counted(p, id);
    if (state == KVF__CACHED) {
        put_idle(p, id);
    } else {
        put_back(p, id);
    }
    return true;
}

/* Frees the tail first, so that a row of the same ids, taken again, has the same order. */
uint32_t kvf__pool_trim(kvf__pool *p, uint32_t *restrict row, uint32_t n, uint32_t n_new, bool is_private) {
    uint32_t *restrict top = p->free_ids + p->n_free, n_before = p->n_free + p->n_idle;
    uint8_t *restrict states = p->states;
    if (n <= n_new) return 0;
    if (is_private) {
        uint32_t i = n;
        for (; i >= n_new + 4; i -= 4) {
            uint32_t a = row[i - 1], b = row[i - 2], c = row[i - 3], d = row[i - 4];
            top[0] = a, top[1] = b, top[2] = c, top[3] = d;
            top += 4;
            states[kvf__state_at(a)] = KVF__APART;
            states[kvf__state_at(b)] = KVF__APART;
            states[kvf__state_at(c)] = KVF__APART;
            states[kvf__state_at(d)] = KVF__APART;
        }
        while (i-- > n_new) {
            *top++ = row[i];
            states[kvf__state_at(row[i])] = KVF__APART;
        }
        p->n_free += n - n_new;
    } else {
        for (uint32_t i = n; i-- > n_new;) (void)kvf__pool_drop(p, row[i]);
    }
    memset(row + n_new, 0xff, (n - n_new) * sizeof *row); /* KVF_NO_BLOCK */
    return p->n_free + p->n_idle - n_before;
}

void kvf__pool_hold(kvf__pool *p, uint32_t id) {
    kvf__pool_share(p, id);
    p->entries[id].holds++;
}

void kvf__pool_release(kvf__pool *p, uint32_t id) {
    if (!--p->entries[id].holds) p->heads[id] += 2;
    (void)drop_counted(p, id);
}

static uint32_t copy_src(const kvf__pool *from, uint32_t src, const kvf__pool *to) {
    return 1 + (from == to ? src : src | KVF__OTHER_TIER);
}

static void pin(kvf__pool *p, uint32_t id) {
    count(p, id);
    p->entries[id].refs++;
    p->entries[id].pins++;
}

void kvf__pool_pin(kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst) {
    pin(from, src);
    pin(to, dst);
    kvf__pool_copy_set(from, src, to, dst);
}

bool kvf__pool_copy_pending(const kvf__pool *from, uint32_t src, const kvf__pool *to, uint32_t dst) {
    return kvf__pool_has(from, src) && kvf__pool_has(to, dst) && to->entries[dst].copy_src == copy_src(from, src, to);
}

void kvf__pool_copy_unset(kvf__pool *to, uint32_t dst) { to->entries[dst].copy_src = 0; }

void kvf__pool_copy_set(const kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst) {
    to->entries[dst].copy_src = copy_src(from, src, to);
}

void kvf__pool_unpin(kvf__pool *from, uint32_t src, kvf__pool *to, uint32_t dst) {
    kvf__pool_copy_unset(to, dst);
    from->entries[src].pins--;
    to->entries[dst].pins--;
    (void)unref(from, src);
    (void)unref(to, dst);
}
