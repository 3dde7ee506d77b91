/* Copies between the tiers: those to the host run beside the forward pass, on a thread of their own; what comes from there is
 * there before it. Cached blocks go to the host ahead of their eviction.
 *
 * A transfer is a copy list under way: its ends stay pinned until it is ended, after the forward pass, before the events: so
 * what needs blocks finds them as if the copies had run at once. */
#include "engine/internal.h"

enum {
    OF_PREEMPTED, /* the transfer of a request that makes room: its list takes all that it may hold */
    OF_CACHED,    /* of nodes of the prefix cache: as many as so many steps may need at most */
    AHEAD = 4
};

/* Blocks of a table that a step with so many requests takes at most. */
static uint32_t step_nodes(const kvf_engine *e, uint32_t n_running) {
    return kvf__ceil_div(e->config.chunk, e->config.block_size) + 1 + n_running;
}

/* ---- The lists ------------------------------------------------------------------------------------------ */

kvf_status kvf__engine_create_transfers(kvf_engine *e, kvf_error *err) {
    if (!e->host_pages.n_blocks) return KVF_OK;
    const size_t n_copies[KVF__TRANSFERS] = {(size_t)e->pages.n_blocks + e->scores.n_pages,
                                             (size_t)AHEAD * step_nodes(e, e->max_running) * e->n_tables};
    for (int i = 0; i < KVF__TRANSFERS; i++) {
        kvf__transfer *t = &e->transfers[i];
        t->engine = e;
        t->list.capacity = (uint32_t)KVF__MIN(n_copies[i], UINT32_MAX);
        t->list.items = kvf__engine_take(e, t->list.capacity, sizeof *t->list.items);
        if (!t->list.items)
            return kvf__fail(err, KVF_E_NO_MEMORY, "copy lists of %zu copies could not be allocated", n_copies[i]);
    }
    return kvf__queue_create(&e->allocator, KVF__TRANSFERS, &e->copier, err);
}

static kvf_status carry_out(const kvf_engine *e, const kvf_copy_list *list) {
    return kvf_copies_run_tiers(&e->pages, &e->scores, &e->host_pages, &e->host_scores, list);
}

static void run_transfer(void *ctx) {
    kvf__transfer *t = ctx;
    t->status = carry_out(t->engine, &t->list);
}

static void post(kvf_engine *e, kvf__transfer *t) {
    t->ticket = kvf__queue_post(e->copier, run_transfer, t);
    t->posted = true;
}

kvf_status kvf__engine_transfers_end(kvf_engine *e, kvf_error *err) {
    for (int i = 0; i < KVF__TRANSFERS; i++) {
        kvf__transfer *t = &e->transfers[i];
        if (!t->posted) continue;
        kvf__queue_wait(e->copier, t->ticket);
        t->posted = false;
        kvf_status st = t->status ? t->status : kvf_copies_done(e->manager, &t->list);
        if (st) return kvf__fail(err, st, "copies to the host: %s", kvf_manager_error(e->manager));
    }
    return KVF_OK;
}

/* ---- Lists of calls ----------------------------------------------------------------------------------------- */

static bool is_out(const kvf_copy *c) { return c->kind == KVF_COPY_BLOCK_OUT || c->kind == KVF_COPY_SCORE_OUT; }
static bool is_in(const kvf_copy *c) { return c->kind == KVF_COPY_BLOCK_IN || c->kind == KVF_COPY_SCORE_IN; }

/* Moves what goes to the host from a list that brings nothing back to a transfer, to run behind what stays. What a copy
 * that stays writes may go out in the same list, but nothing that stays depends on what goes out. */
static kvf__transfer *part_out(kvf_engine *e, kvf_copy_list *copies) {
    kvf__transfer *t = &e->transfers[OF_PREEMPTED];
    uint32_t n_out = 0, n = 0;
    for (uint32_t i = 0; i < copies->n; i++) {
        if (is_in(&copies->items[i])) return NULL;
        n_out += is_out(&copies->items[i]);
    }
    if (!n_out || t->posted || n_out > t->list.capacity) return NULL;
    t->list.n = 0;
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy c = copies->items[i];
        if (is_out(&c))
            t->list.items[t->list.n++] = c;
        else
            copies->items[n++] = c;
    }
    copies->n = n;
    return t;
}

kvf_status kvf__engine_copies(kvf_engine *e, kvf_copy_list *copies, kvf_error *err) {
    kvf_status st = KVF_OK;
    kvf__transfer *out = e->copier ? part_out(e, copies) : NULL;
    bool in = false;
    for (uint32_t i = 0; i < copies->n; i++) in |= is_in(&copies->items[i]);
    if (in && (st = kvf__engine_transfers_end(e, err))) return st; /* it may have to be there first */
    if (copies->n) st = carry_out(e, copies);
    if (copies->n && !st) st = kvf_copies_done(e->manager, copies);
    if (!st && out) post(e, out);
    return st ? kvf__fail(err, st, "copies: %s", kvf_manager_error(e->manager)) : KVF_OK;
}

kvf_copy_list *kvf__engine_spare_list(kvf_engine *e, kvf_error *err) {
    if (!e->copier || kvf__engine_transfers_end(e, err)) return NULL;
    return &e->transfers[OF_PREEMPTED].list;
}

/* ---- Offload -------------------------------------------------------------------------------------------------- */

/* Over all tables. */
static uint64_t step_blocks(const kvf_engine *e) { return (uint64_t)step_nodes(e, e->stats.n_running) * e->n_tables; }

/* As soon as what is free may not last for two steps, whatever is idle has its copy: a hit that comes back from the host
 * takes many blocks at once. */
static uint32_t wanted_nodes(const kvf_engine *e) {
    kvf_occupancy now = {.struct_size = sizeof now};
    if (kvf_occupancy_read(e->manager, &now, NULL) || now.blocks.n_free >= 2 * step_blocks(e)) return 0;
    return AHEAD * step_nodes(e, e->max_running);
}

kvf_status kvf__engine_offload(kvf_engine *e, kvf_error *err) {
    kvf__transfer *t = &e->transfers[OF_CACHED];
    uint32_t n_nodes = e->offloads ? wanted_nodes(e) : 0;
    kvf_status st = n_nodes ? kvf_prefix_offload(e->manager, n_nodes, &t->list, NULL) : KVF_OK;
    if (st) return kvf__fail(err, st, "offload: %s", kvf_manager_error(e->manager));
    if (t->list.n) post(e, t);
    return KVF_OK;
}

/* What waits may take much at once, and what has just ended has no copy yet. A plan finds nothing pinned: it ends requests
 * that find no room. */
kvf_status kvf__engine_offload_first(kvf_engine *e, kvf_error *err) {
    const kvf__live *r = e->first;
    while (r && (r->seq || r->idle)) r = r->next;
    kvf_status st = r ? kvf__engine_offload(e, err) : KVF_OK;
    return st ? st : kvf__engine_transfers_end(e, err);
}
