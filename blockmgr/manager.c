/* The manager: config, memory, blocks held outside a table, occupancy. */
#include "blockmgr/manager.h"
#include "blockmgr/profile.h"

/* ---- Config --------------------------------------------------------------------------------- */

enum { BLOCK_SIZE = 16, MAX_SEQS = 256, MAX_SLOTS = 8192 }; /* defaults */

void kvf_manager_config_init(kvf_manager_config *config, size_t struct_size) {
    const kvf_manager_config c = {.block_size = BLOCK_SIZE, .max_seqs = MAX_SEQS, .max_slots = MAX_SLOTS};
    kvf__init(config, struct_size, &c, sizeof c);
}

static kvf_status check_range(const char *name, uint32_t value, uint32_t most, kvf_error *err) {
    if (value >= 1 && value <= most) return KVF_OK;
    return kvf__fail(err, KVF_E_INVALID, "%s %u: must be in [1, %u]", name, value, most);
}

static kvf_status check_fields(const kvf_manager_config *c, kvf_error *err) {
    const struct {
        const char *name;
        uint32_t value, most;
    } fields[] = {
        {"n_layers", c->n_layers, 1024},     {"n_kv_heads", c->n_kv_heads, 1024},
        {"n_blocks", c->n_blocks, 1u << 31}, {"n_score_pages", c->n_score_pages, 1u << 31},
        {"max_seqs", c->max_seqs, 1u << 20}, {"max_slots", c->max_slots, 1u << 31},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        kvf_status s = check_range(fields[i].name, fields[i].value, fields[i].most, err);
        if (s) return s;
    }
    if (c->heads_per_group > c->n_kv_heads || c->n_kv_heads % c->heads_per_group)
        return kvf__fail_field(err, KVF_E_INVALID, "heads_per_group", c->heads_per_group, 0,
                               "must divide n_kv_heads %u", c->n_kv_heads);
    uint32_t bs = c->block_size;
    if (bs < 8 || bs > 256 || (bs & (bs - 1)))
        return kvf__fail_field(err, KVF_E_INVALID, "block_size", bs, 0, "must be a power of two in [8, 256]");
    if ((c->n_host_blocks | c->n_host_score_pages) >> 31)
        return kvf__fail(err, KVF_E_INVALID, "n_host_blocks %u, n_host_score_pages %u: must be under 2^31",
                         c->n_host_blocks, c->n_host_score_pages);
    if (c->n_host_score_pages && !c->n_host_blocks)
        return kvf__fail_field(err, KVF_E_INVALID, "n_host_score_pages", c->n_host_score_pages, 0,
                               "of no use with n_host_blocks 0");
    if (c->n_host_blocks && (c->n_blocks | c->n_score_pages) >> 31)
        return kvf__fail(err, KVF_E_INVALID, "n_blocks %u, n_score_pages %u: with n_host_blocks, must be under 2^31",
                         c->n_blocks, c->n_score_pages);
    if (c->prefix_cache > 1 || c->reserved)
        return kvf__fail(err, KVF_E_INVALID, "prefix_cache %u, reserved %u: must be 0 or 1, and 0", c->prefix_cache,
                         c->reserved);
    if (c->view_copies > 1)
        return kvf__fail_field(err, KVF_E_INVALID, "view_copies", c->view_copies, 0, "must be 0 or 1");
    kvf_status s = kvf__windows_check(c, err);
    if (!s) s = kvf__classes_check(c, err);
    if (s) return s;
    if (c->prefix_eviction > KVF_PREFIX_PRIORITY)
        return kvf__fail_field(err, KVF_E_INVALID, "prefix_eviction", c->prefix_eviction, 0, "must be at most %d",
                               KVF_PREFIX_PRIORITY);
    if (c->n_snapshot_pages > 1u << 31)
        return kvf__fail_field(err, KVF_E_INVALID, "n_snapshot_pages", c->n_snapshot_pages, 0, "must be at most 2^31");
    if (c->n_snapshot_pages && c->snapshot_page_bytes > UINT64_MAX / c->n_snapshot_pages)
        return kvf__fail(err, KVF_E_OVERFLOW, "snapshot_page_bytes %llu times n_snapshot_pages %u: must be under 2^64",
                         (unsigned long long)c->snapshot_page_bytes, c->n_snapshot_pages);
    if (c->block_bytes > UINT64_MAX / c->n_blocks)
        return kvf__fail(err, KVF_E_OVERFLOW, "block_bytes %llu times n_blocks %u: must be under 2^64 bytes",
                         (unsigned long long)c->block_bytes, c->n_blocks);
    return KVF_OK;
}

static kvf_status resolve(const kvf_manager_config *in, kvf_manager_config *c, kvf_error *err) {
    kvf_status s = kvf__config_read(c, sizeof *c, in, "kvf_manager_config", err);
    if (!s) s = kvf__classes_resolve(c, err);
    if (s) return s;
    c->struct_size = sizeof *c;
    if (!c->heads_per_group) c->heads_per_group = KVF__MAX(c->n_kv_heads, 1);
    if (!c->block_size) c->block_size = BLOCK_SIZE;
    if (!c->n_score_pages) c->n_score_pages = c->n_blocks;
    if (!c->max_seqs) c->max_seqs = MAX_SEQS;
    if (!c->max_slots) c->max_slots = MAX_SLOTS;
    s = check_fields(c, err);
    if (s) return s;
    kvf_profile_config unused;
    if (c->profile && (s = kvf__profile_resolve(c->profile, &unused, err))) return s;
    kvf_allocator given = c->allocator;
    return kvf__allocator_resolve(&given, &c->allocator, err);
}

/* ---- The slab -------------------------------------------------------------------------------- */

/* The config's bound, or the default one. all: what the tables can hold. */
static uint64_t most_table_blocks(const kvf_manager_config *c, uint64_t all) {
    uint64_t twice = 2 * ((uint64_t)c->n_blocks + c->n_host_blocks), n = c->n_table_blocks;
    return KVF__MIN(n ? n : c->prefix_cache ? all : twice, all);
}

/* Lays out all arrays in one slab. Run twice: with base NULL for the size, then with the memory. The manager is first. */
static kvf_status lay_out(kvf_manager *m, kvf__slab *slab, kvf_error *err) {
    const kvf_manager_config *c = &m->config;
    m->n_groups = c->n_kv_heads / c->heads_per_group;
    m->seq_tables = c->n_layers * m->n_groups;
    m->block_shift = (uint32_t)__builtin_ctz(c->block_size);
    m->row_capacity = kvf__blocks_for(m, c->max_slots);
    m->row_capacity = KVF__MIN(m->row_capacity, c->n_blocks);
    uint64_t tables = (uint64_t)c->max_seqs * m->seq_tables; /* at most 2^40 */
    if (tables >= UINT32_MAX)
        return kvf__fail(err, KVF_E_OVERFLOW, "max_seqs %u, n_layers %u, %u groups: must make under 2^32 - 1 tables",
                         c->max_seqs, c->n_layers, m->n_groups);
    size_t n_tables = (size_t)tables, n_seq_layers = n_tables / m->n_groups;
    m->config.n_table_blocks = most_table_blocks(c, tables * m->row_capacity);
    uint64_t rows_size = kvf__rows_size(m, c->n_blocks);
    m->view_rows_size = c->view_copies ? kvf__rows_size(m, 0) : rows_size;
    (void)kvf__slab_take(slab, 1, sizeof *m);
    m->error = kvf__slab_take(slab, 1, sizeof *m->error);
    kvf__classes_carve(m, slab);
    kvf__pool_carve(&m->pages, slab, c->n_score_pages);
    kvf__pool_carve(&m->host_pages, slab, c->n_host_score_pages);
    m->seqs = kvf__slab_take(slab, c->max_seqs, sizeof *m->seqs);
    m->free_seqs = kvf__slab_take(slab, c->max_seqs, sizeof *m->free_seqs);
    m->tables = kvf__slab_take(slab, n_tables, sizeof *m->tables);
    uint32_t **of_tables[] = {&m->n_slots, &m->n_pages, &m->promise, &m->page_promise, &m->private_at, &m->tail_at};
    for (size_t i = 0; i < sizeof of_tables / sizeof *of_tables; i++)
        *of_tables[i] = kvf__slab_take(slab, n_tables, sizeof(uint32_t));
    if (c->n_host_blocks) {
        m->host_slots = kvf__slab_take(slab, n_tables, sizeof *m->host_slots);
        m->n_host_pages = kvf__slab_take(slab, n_tables, sizeof *m->n_host_pages);
    }
    m->seq_blocks_max = kvf__slab_take(slab, n_seq_layers, sizeof *m->seq_blocks_max);
    m->layer_blocks = kvf__slab_take(slab, c->n_layers, sizeof *m->layer_blocks);
    m->layer_blocks_max = kvf__slab_take(slab, c->n_layers, sizeof *m->layer_blocks_max);
    m->layer_slots = kvf__slab_take(slab, c->n_layers, sizeof *m->layer_slots);
    kvf__rows_carve(&m->rows, slab, n_tables, rows_size);
    m->entries = kvf__slab_take(slab, n_seq_layers, sizeof *m->entries);
    m->dst_row = kvf__slab_take(slab, n_tables, sizeof *m->dst_row);
    m->fresh = kvf__slab_take(slab, c->n_blocks, sizeof *m->fresh);
    if (c->layer_windows) m->windows = kvf__slab_take(slab, c->n_layers, sizeof *m->windows);
    m->runs = kvf__slab_take(slab, c->layer_windows || c->n_classes > 1 ? c->n_layers : 1, sizeof *m->runs);
    kvf__views_carve(m, slab, n_tables);
    kvf__cache_carve(&m->cache, slab, c, m->seq_tables);
    if (c->profile) {
        kvf_profile_config profile;
        kvf_status s = kvf__profile_resolve(c->profile, &profile, err);
        if (s) return s;
        kvf__profile_lay_out(m, slab, &profile);
    }
    if (slab->bad)
        return kvf__fail(err, KVF_E_OVERFLOW,
                         "manager of %u blocks, %u sequences, %u layers, max_slots %u: its size wraps", c->n_blocks,
                         c->max_seqs, c->n_layers, c->max_slots);
    return KVF_OK;
}

kvf_status kvf_manager_bytes(const kvf_manager_config *config, size_t *bytes, kvf_error *err) {
    if (!bytes) return kvf__fail(err, KVF_E_INVALID, "bytes: is NULL");
    kvf_manager shape;
    memset(&shape, 0, sizeof shape);
    kvf_status s = resolve(config, &shape.config, err);
    if (s) return s;
    kvf__slab slab = {0};
    s = lay_out(&shape, &slab, err);
    if (s) return s;
    *bytes = slab.used;
    return KVF_OK;
}

static uint64_t hash_address(const void *p) {
    uint64_t x = (uint64_t)(uintptr_t)p + 0x9e3779b97f4a7c15u; /* splitmix64 */
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static void start(kvf_manager *m) {
    const kvf_manager_config *c = &m->config;
    m->tag = hash_address(m);
    m->epoch = 1;
    if (m->windows) memcpy(m->windows, c->layer_windows, c->n_layers * sizeof *m->windows);
    m->config.layer_windows = m->windows;
    kvf__classes_init(m);
    kvf__runs_fill(m);
    kvf__pool_init(&m->pages, 0);
    kvf__pool_init(&m->host_pages, 0);
    kvf__cache_init(&m->cache, m->blocks, m->host_blocks, c, m->tag);
    for (uint32_t i = 0; i < c->max_seqs; i++) {
        m->free_seqs[i] = c->max_seqs - 1 - i;
        m->seqs[i].generation = (uint32_t)(m->tag >> 36) | 1; /* 1..2^28 - 1 */
    }
    kvf__rows_init(&m->rows);
    if (c->view_copies) kvf__views_init(m);
}

kvf_status kvf_manager_create(const kvf_manager_config *config, kvf_manager **out, kvf_error *err) {
    if (!out) return kvf__fail(err, KVF_E_INVALID, "out: is NULL");
    kvf_manager shape;
    memset(&shape, 0, sizeof shape);
    kvf_status s = resolve(config, &shape.config, err);
    if (s) return s;
    kvf__slab slab = {0};
    s = lay_out(&shape, &slab, err);
    if (s) return s;
    shape.slab_bytes = slab.used;
    kvf_manager *m = kvf__alloc(&shape.config.allocator, shape.slab_bytes);
    if (!m)
        return kvf__fail(err, KVF_E_NO_MEMORY, "manager: %zu bytes of metadata could not be allocated",
                         shape.slab_bytes);
    *m = shape;
    slab = (kvf__slab){.base = (unsigned char *)m};
    s = lay_out(m, &slab, err);
    if (s) { /* cannot happen: the first pass has succeeded */
        kvf__free(&shape.config.allocator, m, shape.slab_bytes);
        return s;
    }
    start(m);
    if (m->profile) {
        kvf_profile_config profile;
        s = kvf__profile_resolve(config->profile, &profile, err);
        if (s) {
            kvf_manager_destroy(m);
            return s;
        }
        kvf__profile_start(m, &profile);
    }
    *out = m;
    return KVF_OK;
}

void kvf_manager_destroy(kvf_manager *manager) {
    if (!manager) return;
    kvf_allocator a = manager->config.allocator;
    kvf__free(&a, manager, manager->slab_bytes);
}

const kvf_error *kvf_manager_error(const kvf_manager *manager) { return manager ? manager->error : &kvf__no_error; }

const kvf_manager_config *kvf_manager_get_config(const kvf_manager *manager) {
    return manager ? &manager->config : NULL;
}

/* ---- Blocks held outside a table --------------------------------------------------------------- */

uint32_t kvf_block_id(kvf_block block) { return (uint32_t)block; }

/* In the calls for one block, rare cases are tail calls, so that the common path needs no stack frame. */
static kvf_status take_held(kvf_manager *m, kvf_block *out) {
    *out = kvf__pool_take_held(m->blocks);
    return m->profile ? kvf__profile_taken(m, (uint32_t)*out) : KVF_OK;
}

/* Of any class, also when it must evict or fails. */
__attribute__((noinline)) static kvf_status block_take(kvf_manager *manager, uint32_t block_class, kvf_block *out) {
    kvf_status s = kvf__class_check(manager, block_class);
    if (s) return s;
    if (!out) return kvf__fail(manager->error, KVF_E_INVALID, "out: is NULL");
    kvf__pool *p = &manager->blocks[block_class];
    if (!kvf__pool_spare(p))
        return kvf__fail(manager->error, KVF_E_NO_BLOCKS,
                         "a block is missing: %u of %u are free, %u cached and idle, %u of these are promised",
                         p->n_free, p->n, p->n_idle, p->n_promised);
    kvf__pool_make_room(p, 1);
    *out = kvf__pool_take_held(p);
    return manager->profile ? kvf__profile_taken(manager, (uint32_t)*out) : KVF_OK;
}

kvf_status kvf_block_take(kvf_manager *manager, uint32_t block_class, kvf_block *out) {
    if (!manager) return KVF_E_INVALID;
    if (block_class || !out || manager->blocks->n_free <= manager->blocks->n_promised)
        return block_take(manager, block_class, out);
    return take_held(manager, out);
}

kvf_status kvf_block_hold(kvf_manager *manager, uint32_t id, kvf_block *out) {
    if (!manager) return KVF_E_INVALID;
    if (!out) return kvf__fail(manager->error, KVF_E_INVALID, "out: is NULL");
    if (id >= manager->config.n_blocks)
        return kvf__fail(manager->error, KVF_E_STALE, "block %u: there are %u", id, manager->config.n_blocks);
    kvf__pool *p = kvf__pool_of(manager->blocks, id);
    uint32_t n_holders = kvf__pool_holders(p, id);
    if (!n_holders) return kvf__fail(manager->error, KVF_E_STALE, "block %u: nobody holds it", id);
    if (kvf__pool_refs(p, id) == UINT32_MAX)
        return kvf__fail(manager->error, KVF_E_LIMIT, "block %u: has %u holders", id, n_holders);
    if (n_holders == 1 && !kvf__pool_holds(p, id)) kvf__epoch_begin(manager);
    kvf__pool_hold(p, id);
    *out = kvf__pool_handle(p, id);
    return manager->profile ? kvf__profile_held(manager, id) : KVF_OK;
}

__attribute__((noinline)) static kvf_status release_counted(kvf_manager *m, kvf_block block) {
    uint32_t id = (uint32_t)block;
    bool known = id < m->config.n_blocks && kvf__pool_handle(m->blocks, id) == block;
    kvf__pool *p = known ? kvf__pool_of(m->blocks, id) : NULL;
    if (!p || !kvf__pool_holds(p, id))
        return kvf__fail(m->error, KVF_E_STALE, "block handle %#llx: released before, or of another manager",
                         (unsigned long long)block);
    if (!kvf__pool_release_held(p, block)) kvf__pool_release(p, id);
    return m->profile ? kvf__profile_released(m, id) : KVF_OK;
}

kvf_status kvf_block_release(kvf_manager *manager, kvf_block block) {
    if (!manager) return KVF_E_INVALID;
    if (!kvf__pool_release_held(manager->blocks, block)) return release_counted(manager, block);
    return manager->profile ? kvf__profile_released(manager, (uint32_t)block) : KVF_OK;
}

/* ---- Occupancy ----------------------------------------------------------------------------------- */

kvf_status kvf_occupancy_read(const kvf_manager *manager, kvf_occupancy *out, kvf_layer_occupancy *layers,
                              size_t layer_bytes) {
    if (!manager) return KVF_E_INVALID;
    if (!kvf__output_is_valid(out))
        return kvf__fail(manager->error, KVF_E_INVALID,
                         "out: must be given, its struct_size set to sizeof(kvf_occupancy)");
    const kvf_manager_config *c = &manager->config;
    kvf_occupancy o = {.blocks = kvf__pools_occupancy(manager, manager->blocks),
                       .score_pages = kvf__pool_occupancy(&manager->pages),
                       .n_seqs = manager->n_seqs,
                       .n_seqs_max = manager->n_seqs_max,
                       .host_blocks = kvf__pools_occupancy(manager, manager->host_blocks),
                       .host_score_pages = kvf__pool_occupancy(&manager->host_pages),
                       .n_swapped = manager->n_swapped};
    for (uint32_t l = 0; l < c->n_layers; l++) {
        uint32_t n_blocks = manager->layer_blocks[l];
        uint64_t used = manager->layer_slots[l], idle = (uint64_t)n_blocks * c->block_size - used;
        o.slots_used += used;
        o.slots_idle += idle;
        const kvf_layer_occupancy layer = {n_blocks, manager->layer_blocks_max[l], used, idle};
        if (layers) kvf__element(layers, l, layer_bytes, &layer, sizeof layer);
    }
    o.n_cached = manager->cache.n_here * manager->seq_tables;
    o.n_host_cached = manager->cache.n_on_host * manager->seq_tables;
    for (uint32_t i = 0; i < c->n_classes; i++) {
        const kvf__pool *p = &manager->blocks[i];
        o.n_cached_idle += p->n_idle;
        o.n_host_cached_idle += manager->host_blocks[i].n_idle;
        o.held_bytes += kvf__pool_n_held(p) * manager->classes[i].block_bytes;
        o.held_bytes_max += (p->n - p->n_least) * manager->classes[i].block_bytes;
    }
    kvf__output(out, &o, sizeof o);
    return KVF_OK;
}

kvf_status kvf_seq_occupancy(const kvf_manager *manager, kvf_seq seq, kvf_layer_occupancy *layers, size_t layer_bytes) {
    uint32_t index = 0;
    kvf_status s = kvf__seq_find(manager, seq, &index);
    if (s) return s;
    if (!layers) return kvf__fail(manager->error, KVF_E_INVALID, "layers: is NULL");
    for (uint32_t l = 0; l < manager->config.n_layers; l++) {
        uint32_t sl = index * manager->config.n_layers + l;
        uint64_t used = 0;
        for (uint32_t g = 0; g < manager->n_groups; g++) used += manager->n_slots[sl * manager->n_groups + g];
        uint32_t n_blocks = kvf__seq_layer_blocks(manager, sl);
        const kvf_layer_occupancy layer = {n_blocks, manager->seq_blocks_max[sl], used,
                                           (uint64_t)n_blocks * manager->config.block_size - used};
        kvf__element(layers, l, layer_bytes, &layer, sizeof layer);
    }
    return KVF_OK;
}
