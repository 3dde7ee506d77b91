/* Copies between the tiers, made by the device. Copies to the host run in a stream during the forward pass; copies from the host
 * are done before it. Cached blocks are copied to the host ahead of their eviction.
 *
 * A transfer is a copy list that the device is working on. Its blocks stay pinned until it is waited for, after the forward
 * pass and before the events, so that the events find the same free blocks as if the copies had run at once.
 *
 * A failed copy cannot be undone, since the manager relies on it. The engine is then broken: each later step fails with the same
 * error, and the blocks of a transfer stay pinned. */
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
    const kvf_device *d = &e->device;
    kvf_status st = d->stream_create(d->ctx, &e->allocator, &e->copier, err);
    for (int i = 0; i < KVF__TRANSFERS && !st; i++) {
        kvf__transfer *t = &e->transfers[i];
        t->list.capacity = (uint32_t)KVF__MIN(n_copies[i], UINT32_MAX);
        t->list.items = kvf__engine_take(e, t->list.capacity, sizeof *t->list.items, 0);
        if (!t->list.items)
            return kvf__fail(err, KVF_E_NO_MEMORY, "copy lists of %zu copies could not be allocated", n_copies[i]);
        st = d->event_create(d->ctx, e->copier, &t->event, err);
    }
    return st;
}

void kvf__engine_destroy_transfers(kvf_engine *e) {
    const kvf_device *d = &e->device;
    for (int i = 0; i < KVF__TRANSFERS; i++)
        if (e->transfers[i].event) d->event_destroy(d->ctx, e->transfers[i].event);
    if (e->copier) d->stream_destroy(d->ctx, e->copier);
}

/* ---- The device ------------------------------------------------------------------------------------------ */

static kvf_status broken(const kvf_engine *e, kvf_error *err) {
    return kvf__fail(err, e->broken, "%.400s; destroy the engine", e->broken_text.text);
}

static kvf_status breaks(kvf_engine *e, kvf_status st, const kvf_error *why) {
    e->broken = st;
    (void)kvf__fail(&e->broken_text, st, "device %.80s: copies: %.300s", e->device.name,
                    why->text[0] ? why->text : kvf_status_text(st));
    return st;
}

kvf_status kvf__engine_check_device(const kvf_engine *e, kvf_error *err) { return e->broken ? broken(e, err) : KVF_OK; }

static kvf_status give(const kvf_engine *e, kvf_stream *stream, const kvf_copy_list *list, kvf_error *why) {
    return kvf_copies_queue(&e->device, stream, &e->pages, &e->scores, &e->host_pages, &e->host_scores, list, why);
}

static kvf_status carry_out(kvf_engine *e, const kvf_copy_list *list, kvf_error *why) {
    kvf_status st = e->runner.device ? give(e, NULL, list, why) : KVF_OK; /* else there is nothing to copy */
    return st ? breaks(e, st, why) : KVF_OK;
}

static kvf_status post(kvf_engine *e, kvf__transfer *t, kvf_error *why) {
    const kvf_device *d = &e->device;
    kvf_status st = give(e, e->copier, &t->list, why);
    if (!st) st = d->event_record(d->ctx, t->event, why);
    if (st) return breaks(e, st, why);
    t->posted = true;
    return KVF_OK;
}

static kvf_status wait_for(kvf_engine *e, const kvf__transfer *t, kvf_error *why) {
    const kvf_device *d = &e->device;
    int done = 0;
    kvf_status st = d->event_query(d->ctx, t->event, &done, why);
    if (!st && !done) {
        e->stats.n_copy_waits++;
        st = d->event_wait(d->ctx, t->event, why);
    }
    return st ? breaks(e, st, why) : KVF_OK;
}

kvf_status kvf__engine_transfers_end(kvf_engine *e, kvf_error *err) {
    kvf_error why = {.text = ""};
    for (int i = 0; i < KVF__TRANSFERS && !e->broken; i++) {
        kvf__transfer *t = &e->transfers[i];
        if (!t->posted || wait_for(e, t, &why)) continue;
        t->posted = false;
        kvf_status st = kvf_copies_done(e->manager, &t->list);
        if (st) return kvf__fail(err, st, "copies to the host: %s", kvf_manager_error(e->manager)->text);
    }
    return kvf__engine_check_device(e, err);
}

/* ---- Lists of calls ----------------------------------------------------------------------------------------- */

static bool is_out(const kvf_copy *c) { return c->kind == KVF_COPY_BLOCK_OUT || c->kind == KVF_COPY_SCORE_OUT; }
static bool is_in(const kvf_copy *c) { return c->kind == KVF_COPY_BLOCK_IN || c->kind == KVF_COPY_SCORE_IN; }

/* If a list has no copies from the host, moves its copies to the host to a transfer, which runs after the others. A block that another
 * copy of the list writes may be copied to the host, but no other copy depends on a copy to the host. */
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
    kvf_error why = {.text = ""};
    kvf_status st = kvf__engine_check_device(e, err);
    if (st) return st;
    kvf__transfer *out = e->copier ? part_out(e, copies) : NULL;
    bool in = false;
    for (uint32_t i = 0; i < copies->n; i++) in |= is_in(&copies->items[i]);
    if (in && (st = kvf__engine_transfers_end(e, err))) return st; /* it may have to be there first */
    if (copies->n && carry_out(e, copies, &why)) return broken(e, err);
    if (copies->n && (st = kvf_copies_done(e->manager, copies)))
        return kvf__fail(err, st, "copies: %s", kvf_manager_error(e->manager)->text);
    return out && post(e, out, &why) ? broken(e, err) : KVF_OK;
}

kvf_copy_list *kvf__engine_spare_list(kvf_engine *e, kvf_error *err) {
    if (!e->copier || kvf__engine_transfers_end(e, err)) return NULL;
    return &e->transfers[OF_PREEMPTED].list;
}

/* ---- Offload -------------------------------------------------------------------------------------------------- */

/* Over all tables. */
static uint64_t step_blocks(const kvf_engine *e) { return (uint64_t)step_nodes(e, e->stats.n_running) * e->n_tables; }

/* If the free blocks may not last for two steps, every idle block is copied: a hit that is swapped in takes many blocks at once. */
static uint32_t wanted_nodes(const kvf_engine *e) {
    kvf_occupancy now = {.struct_size = sizeof now};
    if (kvf_occupancy_read(e->manager, &now, NULL, 0) || now.blocks.n_free >= 2 * step_blocks(e)) return 0;
    return AHEAD * step_nodes(e, e->max_running);
}

kvf_status kvf__engine_offload(kvf_engine *e, kvf_error *err) {
    kvf__transfer *t = &e->transfers[OF_CACHED];
    uint32_t n_nodes = e->offloads ? wanted_nodes(e) : 0;
    kvf_status st = n_nodes ? kvf_prefix_offload(e->manager, n_nodes, &t->list, NULL) : KVF_OK;
    if (st) return kvf__fail(err, st, "offload: %s", kvf_manager_error(e->manager)->text);
    kvf_error why = {.text = ""};
    return t->list.n && post(e, t, &why) ? broken(e, err) : KVF_OK;
}

/* A waiting request may take many blocks at once, and those of a request that has just ended have no copy yet. The copies are waited
 * for, since a plan ends requests that find no room and so must find nothing pinned. */
kvf_status kvf__engine_offload_first(kvf_engine *e, kvf_error *err) {
    uint32_t n_waiting;
    kvf_sched_counts(e->sched, NULL, &n_waiting);
    kvf_status st = n_waiting ? kvf__engine_offload(e, err) : KVF_OK;
    return st ? st : kvf__engine_transfers_end(e, err);
}
