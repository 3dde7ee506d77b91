/* Checks a caller's device. */
#include "base/base.h"

kvf_status kvf__device_resolve(const kvf_device *in, kvf_device *out, kvf_error *err) {
    kvf_device d;
    kvf_status st = kvf__config_read(&d, sizeof d, in ? in : kvf_device_cpu(), "kvf_device", err);
    if (st) return st;
    const char *lacks = NULL;
#define NEED(function) \
    if (!d.function && !lacks) lacks = #function
    NEED(alloc);
    NEED(free);
    NEED(stream_create);
    NEED(stream_destroy);
    NEED(stream_wait);
    NEED(copy);
    NEED(fill);
    NEED(copy_blocks);
    NEED(event_create);
    NEED(event_destroy);
    NEED(event_record);
    NEED(event_query);
    NEED(event_wait);
#undef NEED
    if (!d.name) d.name = "unnamed";
    if (lacks) return kvf__fail(err, KVF_E_INVALID, "kvf_device %s: %s is NULL; set all functions", d.name, lacks);
    *out = d;
    return KVF_OK;
}
