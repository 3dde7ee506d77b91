/* Memory that lives as long as the engine. */
#include "engine/internal.h"

/* Allocates a buffer that is freed with the engine. zero 0: its pages are not touched and cost nothing until used. */
void *kvf__engine_take(kvf_engine *e, size_t n, size_t element_bytes, int zero) {
    size_t bytes;
    if (e->n_buffers == KVF__ENGINE_BUFFERS || !kvf__mul(n, element_bytes, &bytes)) return NULL;
    void *p = zero ? kvf__alloc(&e->allocator, bytes)
                   : e->allocator.alloc(e->allocator.ctx, bytes ? bytes : 1, KVF__CACHE_LINE);
    if (p) e->buffers[e->n_buffers++] = (kvf__buffer){.p = p, .bytes = bytes};
    return p;
}

/* The same in the device's memory; a failure's text is kept. */
void *kvf__engine_take_of_device(kvf_engine *e, kvf_memory kind, size_t n, size_t element_bytes) {
    size_t bytes;
    void *p = NULL;
    if (e->n_buffers == KVF__ENGINE_BUFFERS || !kvf__mul(n, element_bytes, &bytes)) return NULL;
    kvf_error why = {.text = ""};
    kvf_status st = e->device.alloc(e->device.ctx, &e->counted.inner, kind, bytes, &p, &why);
    if (st || !p) {
        if (!e->broken) e->broken_text = why;
        if (!e->broken) e->broken = st ? st : KVF_E_NO_MEMORY;
        return NULL;
    }
    e->buffers[e->n_buffers++] = (kvf__buffer){p, bytes, true, kind};
    *(kind == KVF_MEMORY_HOST ? &e->memory.host_bytes : &e->memory.kv_bytes) += bytes;
    return p;
}

void kvf__engine_give_back(kvf_engine *e, const kvf__buffer *b) {
    if (b->of_device)
        e->device.free(e->device.ctx, &e->counted.inner, b->kind, b->p, b->bytes);
    else
        kvf__free(&e->allocator, b->p, b->bytes);
}

kvf_status kvf_engine_get_memory(const kvf_engine *e, kvf_engine_memory *out) {
    if (!e || !kvf__output_is_valid(out)) return KVF_E_INVALID;
    kvf_engine_memory m = e->memory;
    if (e->own_runner) { /* its memory has the snapshots too */
        m.snapshot_bytes = e->n_snapshot_pages * kvf__engine_snapshot_page_bytes(e);
        m.runner_bytes -= m.snapshot_bytes;
    }
    m.reserved_bytes = m.kv_bytes + m.host_bytes + m.snapshot_bytes + m.manager_bytes + m.policy_bytes +
                       m.scheduler_bytes + m.runner_bytes + m.engine_bytes;
    kvf__output(out, &m, sizeof m);
    return KVF_OK;
}
