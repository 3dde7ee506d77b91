/* The profile's config and memory, and the calls for any thread: reading figures and events. */
#define _POSIX_C_SOURCE 200809L
#include <sched.h>
#include <stddef.h>

#include "blockmgr/profile.h"

enum { EVENTS_DEFAULT = 4096, EVENTS_MAX = 1 << 24, TRIES = 64 };

static size_t figure_words(void) { return (sizeof(kvf_profile) - offsetof(kvf_profile, now)) / sizeof(uint64_t); }
static size_t layer_words(void) { return sizeof(kvf_profile_layer) / sizeof(uint64_t); }

/* ---- Config and memory ------------------------------------------------------------------------- */

void kvf_profile_config_init(kvf_profile_config *config, size_t struct_size) {
    kvf__init(config, struct_size, &(kvf_profile_config){.n_events = EVENTS_DEFAULT}, sizeof *config);
}

kvf_status kvf__profile_resolve(const kvf_profile_config *in, kvf_profile_config *out, kvf_error *err) {
    kvf_status s = kvf__config_read(out, sizeof *out, in, "kvf_profile_config", err);
    if (s) return s;
    out->struct_size = sizeof *out;
    if (!out->n_events) out->n_events = EVENTS_DEFAULT;
    if (out->n_events > EVENTS_MAX)
        return kvf__fail(err, KVF_E_INVALID, "profile: n_events %u: must be at most %d", out->n_events, EVENTS_MAX);
    while (out->n_events & (out->n_events - 1)) out->n_events += out->n_events & -out->n_events; /* to a power of two */
    return KVF_OK;
}

void kvf__profile_lay_out(kvf_manager *m, kvf__slab *slab, const kvf_profile_config *config) {
    const kvf_manager_config *c = &m->config;
    size_t n_tables = (size_t)c->max_seqs * m->seq_tables, n_rows = 0;
    if (!kvf__mul(n_tables, m->row_capacity, &n_rows)) slab->bad = true;
    kvf__profile *p = kvf__slab_take(slab, 1, sizeof *p), shape;
    if (!slab->base) p = &shape; /* only for the size */
    p->words = kvf__slab_take(slab, figure_words() + c->n_layers * layer_words(), sizeof *p->words);
    p->blocks = kvf__slab_take(slab, c->n_blocks, sizeof *p->blocks);
    p->tables = kvf__slab_take(slab, n_tables, sizeof *p->tables);
    p->rows = kvf__slab_take(slab, n_rows, sizeof *p->rows);
    p->counts = kvf__slab_take(slab, (size_t)c->n_layers + 1, sizeof *p->counts);
    p->touched = kvf__slab_take(slab, c->n_blocks, sizeof *p->touched);
    p->gone = kvf__slab_take(slab, c->n_blocks, sizeof *p->gone);
    p->events = kvf__slab_take(slab, config->n_events, sizeof *p->events);
    p->head = kvf__slab_take(slab, 1, sizeof *p->head); /* each on a cache line of its own */
    p->tail = kvf__slab_take(slab, 1, sizeof *p->tail);
    m->profile = slab->base ? p : NULL;
}

void kvf__profile_start(kvf_manager *m, const kvf_profile_config *config) {
    kvf__profile *p = m->profile;
    p->config = *config;
    m->config.profile = &p->config;
    atomic_init(&p->version, 0);
    atomic_init(p->head, 0);
    atomic_init(p->tail, 0);
    for (size_t i = 0; i < figure_words() + m->config.n_layers * layer_words(); i++) atomic_init(&p->words[i], 0);
    kvf_profile shape = {.block_bytes = m->config.block_bytes, .total = m->config.n_blocks, .free = m->config.n_blocks};
    const size_t constants[] = {offsetof(kvf_profile, block_bytes), offsetof(kvf_profile, total),
                                offsetof(kvf_profile, free)};
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        uint64_t value;
        memcpy(&value, (const char *)&shape + constants[i], sizeof value);
        atomic_init(&p->words[(constants[i] - offsetof(kvf_profile, now)) / sizeof value], value);
    }
    for (uint32_t i = 0; i < m->config.n_blocks; i++) p->blocks[i].layer = m->config.n_layers;
    m->cache.gone = kvf__profile_gone;
    m->cache.gone_ctx = p;
}

/* ---- Figures -------------------------------------------------------------------------------------- */

kvf_status kvf_profile_tick(kvf_manager *manager, uint64_t now) {
    if (!manager) return KVF_E_INVALID;
    kvf__profile *p = manager->profile;
    if (!p) return kvf__fail(manager->error, KVF_E_STATE, "profile: this manager keeps none (its config's profile)");
    if (now >= p->now) {
        p->now = now;
        return KVF_OK;
    }
    size_t word = (offsetof(kvf_profile, n_clock_back) - offsetof(kvf_profile, now)) / sizeof(uint64_t);
    atomic_fetch_add_explicit(&p->words[word], 1, memory_order_relaxed);
    return KVF_OK;
}

/* One attempt to copy the figures. False if a call changed them meanwhile. */
static bool copy_words(const kvf__profile *p, uint64_t *figures, kvf_profile_layer *layers, size_t layer_bytes,
                       uint32_t n_layers) {
    uint64_t version = atomic_load_explicit(&p->version, memory_order_acquire);
    if (version & 1) return false;
    size_t n = figure_words();
    for (size_t i = 0; i < n; i++) figures[i] = atomic_load_explicit(&p->words[i], memory_order_acquire);
    size_t words = KVF__MIN(layer_bytes / sizeof(uint64_t), layer_words());
    for (size_t l = 0; l < n_layers; l++) {
        uint64_t *layer = (uint64_t *)(void *)((char *)layers + l * layer_bytes);
        for (size_t i = 0; i < words; i++)
            layer[i] = atomic_load_explicit(&p->words[n + l * layer_words() + i], memory_order_acquire);
    }
    return atomic_load_explicit(&p->version, memory_order_relaxed) == version;
}

kvf_status kvf_profile_read(const kvf_manager *manager, kvf_profile *out, kvf_profile_layer *layers, size_t layer_bytes,
                            uint32_t n_layers) {
    if (!manager || !kvf__output_is_valid(out)) return KVF_E_INVALID;
    if (!layers) n_layers = 0;
    if (n_layers > manager->config.n_layers || (n_layers && layer_bytes % sizeof(uint64_t))) return KVF_E_INVALID;
    const kvf__profile *p = manager->profile;
    if (!p) return KVF_E_STATE;
    kvf_profile copy = {0};
    uint64_t *figures = (uint64_t *)(void *)((char *)&copy + offsetof(kvf_profile, now));
    for (unsigned tries = 1; !copy_words(p, figures, layers, layer_bytes, n_layers); tries++)
        if (tries % TRIES == 0) (void)sched_yield(); /* the manager's thread may be waiting for this CPU */
    kvf__output(out, &copy, sizeof copy);
    return KVF_OK;
}

uint64_t kvf_histogram_floor(uint32_t bucket) {
    return bucket == 0 ? 0 : bucket < KVF_HISTOGRAM_BUCKETS ? UINT64_C(1) << (bucket - 1) : UINT64_MAX;
}

/* ---- Events ----------------------------------------------------------------------------------------- */

const char *kvf_profile_kind_name(uint32_t kind) {
    static const char *const names[] = {"?", "alloc", "free", "share", "copy", "store", "evict", "swap", "compact"};
    return kind < KVF_PROFILE_KINDS ? names[kind] : names[0];
}

kvf_status kvf_profile_drain(const kvf_manager *manager, kvf_profile_event *events, uint32_t capacity, uint32_t *n) {
    if (!manager || !n || (capacity && !events)) return KVF_E_INVALID;
    kvf__profile *p = manager->profile;
    if (!p) return KVF_E_STATE;
    uint64_t tail = atomic_load_explicit(p->tail, memory_order_relaxed);
    uint64_t there = atomic_load_explicit(p->head, memory_order_acquire) - tail;
    uint32_t taken = (uint32_t)KVF__MIN(there, capacity);
    for (uint32_t i = 0; i < taken; i++) events[i] = p->events[(tail + i) & (p->config.n_events - 1)];
    atomic_store_explicit(p->tail, tail + taken, memory_order_release);
    *n = taken;
    return KVF_OK;
}
