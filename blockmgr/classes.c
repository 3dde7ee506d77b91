/* Classes of layers whose blocks have equal bytes: their config, their pools over one range of ids, their figures. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- Config ------------------------------------------------------------------------------------------- */

static kvf_status check_sum(const char *name, uint32_t given, uint64_t sum, kvf_error *err) {
    if (sum > 1u << 31)
        return kvf__fail(err, KVF_E_OVERFLOW, "classes: %s: %llu in all: must be at most 2^31", name,
                         (unsigned long long)sum);
    if (given && given != sum)
        return kvf__fail(err, KVF_E_INVALID, "%s %u: with classes, must be 0 or their sum %llu", name, given,
                         (unsigned long long)sum);
    return KVF_OK;
}

kvf_status kvf__classes_resolve(kvf_manager_config *c, kvf_error *err) {
    uint64_t n_blocks = 0, n_host_blocks = 0;
    if (c->n_classes > KVF_BLOCK_CLASSES_MAX || (c->n_classes > 1 && (!c->classes || !c->layer_class)) ||
        (!c->n_classes && (c->classes || c->layer_class)))
        return kvf__fail_field(err, KVF_E_INVALID, "n_classes", c->n_classes, 0,
                               "must be at most %u, and classes and layer_class be given", KVF_BLOCK_CLASSES_MAX);
    c->n_classes = KVF__MAX(c->n_classes, 1);
    if (!c->classes) return KVF_OK;
    for (uint32_t i = 0; i < c->n_classes; i++) {
        const kvf_block_class *one = &c->classes[i];
        n_blocks += one->n_blocks;
        n_host_blocks += one->n_host_blocks;
        if (!one->n_blocks) return kvf__fail(err, KVF_E_INVALID, "classes[%u]: n_blocks 0: must be 1 or more", i);
        if (one->block_bytes > UINT64_MAX / KVF_BLOCK_CLASSES_MAX / one->n_blocks)
            return kvf__fail(err, KVF_E_OVERFLOW, "classes[%u]: block_bytes %llu times n_blocks %u: its size wraps", i,
                             (unsigned long long)one->block_bytes, one->n_blocks);
    }
    kvf_status s = check_sum("n_blocks", c->n_blocks, n_blocks, err);
    if (!s) s = check_sum("n_host_blocks", c->n_host_blocks, n_host_blocks, err);
    if (s) return s;
    if (c->block_bytes && (c->n_classes > 1 || c->block_bytes != c->classes[0].block_bytes))
        return kvf__fail_field(err, KVF_E_INVALID, "block_bytes", c->block_bytes, 0,
                               "the classes have theirs; leave it 0");
    c->n_blocks = (uint32_t)n_blocks;
    c->n_host_blocks = (uint32_t)n_host_blocks;
    if (c->n_classes == 1) c->block_bytes = c->classes[0].block_bytes;
    return KVF_OK;
}

kvf_status kvf__classes_check(const kvf_manager_config *c, kvf_error *err) {
    for (uint32_t l = 0; c->layer_class && l < c->n_layers; l++)
        if (c->layer_class[l] >= c->n_classes)
            return kvf__fail(err, KVF_E_INVALID, "layer_class[%u] %u: must be under n_classes %u", l, c->layer_class[l],
                             c->n_classes);
    for (uint32_t i = 0, l; c->layer_class && i < c->n_classes; i++) {
        for (l = 0; l < c->n_layers && c->layer_class[l] != i; l++) {}
        if (l == c->n_layers) return kvf__fail(err, KVF_E_INVALID, "classes[%u]: no layer is of it; leave it out", i);
    }
    return KVF_OK;
}

/* ---- Pools ---------------------------------------------------------------------------------------------- */

/* The first pool was laid out with all ids; the other pools get their part of its free stack. */
static void split(const kvf_manager *m, kvf__pool *pools, bool host) {
    kvf__pool all = pools[0];
    uint32_t first = 0;
    for (uint32_t i = 0; i < m->config.n_classes; i++) {
        pools[i] = all;
        pools[i].first = first;
        pools[i].n = host ? m->classes[i].n_host_blocks : m->classes[i].n_blocks;
        if (all.free_ids) pools[i].free_ids = all.free_ids + first;
        first += pools[i].n;
    }
}

void kvf__classes_carve(kvf_manager *m, kvf__slab *slab) {
    const kvf_manager_config *c = &m->config;
    m->classes[0] = (kvf_block_class){c->n_blocks, c->n_host_blocks, c->block_bytes};
    for (uint32_t i = 0; c->classes && i < c->n_classes; i++) m->classes[i] = c->classes[i];
    kvf__pool_carve(&m->blocks[0], slab, c->n_blocks);
    kvf__pool_carve(&m->host_blocks[0], slab, c->n_host_blocks);
    split(m, m->blocks, false);
    split(m, m->host_blocks, true);
    if (c->n_classes > 1) m->layer_class = kvf__slab_take(slab, c->n_layers, sizeof *m->layer_class);
}

void kvf__classes_init(kvf_manager *m) {
    if (m->layer_class) memcpy(m->layer_class, m->config.layer_class, m->config.n_layers * sizeof *m->layer_class);
    m->config.layer_class = m->layer_class;
    if (m->config.classes) m->config.classes = m->classes;
    for (uint32_t i = 0; i < m->config.n_classes; i++) {
        kvf__pool_init(&m->blocks[i], (uint32_t)(m->tag >> 32));
        kvf__pool_init(&m->host_blocks[i], 0);
    }
}

kvf_status kvf__class_check(const kvf_manager *m, uint32_t block_class) {
    if (!m) return KVF_E_INVALID;
    if (block_class < m->config.n_classes) return KVF_OK;
    return kvf__fail_field(m->error, KVF_E_INVALID, "block_class", block_class, 0, "must be under n_classes %u",
                           m->config.n_classes);
}

/* ---- Figures ----------------------------------------------------------------------------------------------- */

kvf_pool_occupancy kvf__pool_occupancy(const kvf__pool *p) {
    return (kvf_pool_occupancy){p->n, p->n_free, kvf__pool_n_held(p), p->n_promised, p->n - p->n_least, p->n_shared};
}

kvf_pool_occupancy kvf__pools_occupancy(const kvf_manager *m, const kvf__pool *pools) {
    kvf_pool_occupancy all = kvf__pool_occupancy(&pools[0]);
    for (uint32_t i = 1; i < m->config.n_classes; i++) {
        kvf_pool_occupancy one = kvf__pool_occupancy(&pools[i]);
        all.n_total += one.n_total;
        all.n_free += one.n_free;
        all.n_held += one.n_held;
        all.n_promised += one.n_promised;
        all.n_held_max += one.n_held_max;
        all.n_shared += one.n_shared;
    }
    return all;
}

kvf_status kvf_class_occupancy(const kvf_manager *manager, uint32_t block_class, kvf_pool_occupancy *blocks,
                               kvf_pool_occupancy *host_blocks, uint32_t *n_cached_idle) {
    kvf_status s = kvf__class_check(manager, block_class);
    if (s) return s;
    if (!blocks) return kvf__fail(manager->error, KVF_E_INVALID, "blocks: is NULL");
    *blocks = kvf__pool_occupancy(&manager->blocks[block_class]);
    if (host_blocks) *host_blocks = kvf__pool_occupancy(&manager->host_blocks[block_class]);
    if (n_cached_idle) *n_cached_idle = manager->blocks[block_class].n_idle;
    return KVF_OK;
}
