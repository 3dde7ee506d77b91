/* Plans: the choices of match and gate, in one slab of fixed capacity. */
#include "d2o_policy/pages.h"

static kvf_plan *lay_out(kvf__slab *slab, uint32_t n_kv_heads, uint32_t events, uint64_t entries) {
    kvf_plan *plan = kvf__slab_take(slab, 1, sizeof *plan);
    size_t n_reduce = (size_t)(entries / n_kv_heads + events), n_tau;
    if (!kvf__mul(events, n_kv_heads, &n_tau)) slab->bad = true;
    kvf_plan_event *event = kvf__slab_take(slab, events, sizeof *event);
    kvf_plan_entry *entry = kvf__slab_take(slab, (size_t)entries, sizeof *entry);
    double *tau = kvf__slab_take(slab, n_tau, sizeof *tau), *reduce = kvf__slab_take(slab, n_reduce, sizeof *reduce);
    if (!slab->base || slab->bad) return NULL;
    *plan = (kvf_plan){.struct_size = sizeof *plan,
                       .events = event,
                       .event_capacity = events,
                       .entries = entry,
                       .entry_capacity = entries,
                       .tau = tau,
                       .reduce = reduce,
                       .reduce_capacity = n_reduce,
                       .n_kv_heads = n_kv_heads};
    return plan;
}

kvf_status kvf_plan_create(const kvf_allocator *allocator, uint32_t n_kv_heads, uint32_t event_capacity,
                           uint64_t entry_capacity, kvf_plan **out, kvf_error *err) {
    kvf_allocator a;
    kvf_status st = kvf__allocator_resolve(allocator, &a, err);
    if (st) return st;
    if (!out || n_kv_heads == 0 || event_capacity == 0 || entry_capacity == 0)
        return kvf__fail(err, KVF_E_INVALID,
                         "plan: n_kv_heads %u, event_capacity %u, entry_capacity %llu: must be positive, and out set",
                         n_kv_heads, event_capacity, (unsigned long long)entry_capacity);
    kvf__slab slab = {NULL, 0, entry_capacity > SIZE_MAX / sizeof(kvf_plan_entry)};
    lay_out(&slab, n_kv_heads, event_capacity, entry_capacity);
    if (slab.bad)
        return kvf__fail(err, KVF_E_OVERFLOW, "plan: event_capacity %u and entry_capacity %llu are too large",
                         event_capacity, (unsigned long long)entry_capacity);
    size_t bytes = slab.used;
    slab = (kvf__slab){kvf__alloc(&a, bytes), 0, false};
    if (!slab.base) return kvf__fail(err, KVF_E_NO_MEMORY, "plan: %zu bytes could not be allocated", bytes);
    kvf_plan *plan = lay_out(&slab, n_kv_heads, event_capacity, entry_capacity);
    plan->bytes = bytes;
    plan->allocator = a;
    *out = plan;
    return KVF_OK;
}

void kvf_plan_destroy(kvf_plan *plan) {
    if (!plan) return;
    kvf_allocator a = plan->allocator;
    kvf__free(&a, plan, plan->bytes);
}

void kvf__scratch_carve(kvf__slab *slab, uint32_t head_dim, uint32_t max_slots, kvf__scratch *out) {
    size_t n = max_slots, d = head_dim;
    *out = (kvf__scratch){
        .keys = kvf__slab_take(slab, n, sizeof *out->keys),
        .sorted = kvf__slab_take(slab, n, sizeof *out->sorted),
        .slots = kvf__slab_take(slab, n, sizeof *out->slots),
        .order = kvf__slab_take(slab, n, sizeof *out->order),
        .first = kvf__slab_take(slab, n, sizeof *out->first),
        .next = kvf__slab_take(slab, n, sizeof *out->next),
        .moves = kvf__slab_take(slab, n, 4 * sizeof *out->moves),
        .evicted = kvf__slab_take(slab, n, 1),
        .done = kvf__slab_take(slab, n, 1),
        .worth = kvf__slab_take(slab, n, sizeof *out->worth),
        .model = kvf__slab_take(slab, n, sizeof *out->model),
        .pos = kvf__slab_take(slab, n, sizeof *out->pos),
        .work = kvf__slab_take(slab, n, sizeof *out->work),
        .weights = kvf__slab_take(slab, n, sizeof *out->weights),
        .u = kvf__slab_take(slab, n, sizeof *out->u),
        .mass = kvf__slab_take(slab, n + 1, sizeof *out->mass),
        .panels = kvf__slab_take(slab, KVF__CHUNK * d, sizeof(float)),
        .chunk_norm = kvf__slab_take(slab, KVF__CHUNK, sizeof(float)),
        .best = kvf__slab_take(slab, KVF__CHUNK, sizeof *out->best),
        .tile = kvf__slab_take(slab, KVF__TILE_COLUMNS * d, sizeof(float)),
        .rows = kvf__slab_take(slab, 4 * d, sizeof(float)),
        .lanes = kvf__slab_take(slab, KVF__NEAR_SETS * KVF__LANES * d, sizeof(float)),
        .wide = kvf__slab_take(slab, KVF__LANES * KVF__NEAR_STRIDE, sizeof(float)),
        .bins = kvf__slab_take(slab, KVF__BINS, sizeof *out->bins),
        .temp_row = kvf__slab_take(slab, d, sizeof(float)),
    };
    for (uint32_t a = 0; a < KVF_MAX_SCORE_ARRAYS; a++) out->score[a] = kvf__slab_take(slab, n, sizeof(float));
}

kvf_status kvf_policy_workspace_bytes(uint32_t n_threads, uint32_t head_dim, uint32_t n_kv_heads, uint32_t max_slots,
                                      size_t *bytes) {
    if (!bytes || n_threads == 0 || head_dim == 0 || n_kv_heads == 0 || max_slots == 0) return KVF_E_INVALID;
    kvf__slab slab = {NULL, 0, false};
    kvf__scratch scratch;
    kvf__scratch_carve(&slab, head_dim, max_slots, &scratch);
    size_t all;
    if (slab.bad || !kvf__mul(slab.used, n_threads, &all)) return KVF_E_OVERFLOW;
    *bytes = all;
    return KVF_OK;
}
