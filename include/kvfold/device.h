/* kvfold/device.h: the interface between kvfold and a device: it allocates KV memory and copies it.
 * A device is a table of functions (kvf_device). The CPU is built in: kvf_device_cpu().
 * Implement the table to place KV memory elsewhere; callers use it as shown here.
 *
 * Simple use
 *     kvf_status copy(const kvf_device *device, kvf_device_queue *queue, kvf_device_event *event, kvf_device_list *list) {
 *         kvf_status status = device->queue_copy(device->ctx, queue, list, NULL); // the copies run while the caller goes on
 *         if (!status) status = device->event_record(device->ctx, event, NULL);   // stands for all copies queued so far
 *         // ... other work ...
 *         if (!status) status = device->event_wait(device->ctx, event, NULL); // from here on their results may be read
 *         return status;
 *     }
 *
 * Nouns
 *   queue         copies that run while the caller goes on.
 *   event         a mark in a queue. It is done when all copies queued before its event_record are done.
 *   list          a source of copies. The device calls next() for up to 64 copies at a time, until it returns 0. The whole
 *                 list never exists in memory.
 *
 * Rules for the caller
 *  - Within a list given to queue_copy, no copy reads or writes what another copy of it writes.
 *  - The same holds between lists of one queue, unless the caller waited for an event between them. So the device may run
 *    copies in any order and in parallel.
 *  - The memory that a list names, and the list's ctx, stay valid and unchanged until an event recorded after it is done.
 */
#ifndef KVFOLD_DEVICE_H
#define KVFOLD_DEVICE_H

#include "kvfold/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvf_memory {
    KVF_MEMORY_DEVICE = 0, /* where kernels run */
    KVF_MEMORY_HOST = 1    /* CPU memory that can be copied to and from the device while kernels run (pinned) */
} kvf_memory;

/* n_rows runs of `bytes` bytes each, dst_stride and src_stride bytes apart. */
typedef struct kvf_device_copy {
    void *dst;
    const void *src;
    size_t bytes, dst_stride, src_stride;
    uint32_t n_rows;
} kvf_device_copy;

enum { KVF_DEVICE_COPIES = 64 }; /* most copies that one call of next() returns */

typedef struct kvf_device_list {
    /* Writes the next copies to out [KVF_DEVICE_COPIES] and returns their number; 0: there are no more. Called in any
     * thread, one call at a time. */
    uint32_t (*next)(void *ctx, kvf_device_copy *out);
    void *ctx;
} kvf_device_list;

typedef struct kvf_device_queue kvf_device_queue; /* each device defines its own */
typedef struct kvf_device_event kvf_device_event;

/* All functions are required. Each takes ctx first. A failed allocation is KVF_E_NO_MEMORY, any other failure KVF_E_IO. The
 * detail text goes to err, which may be NULL; outputs are then untouched. A queue and its events have one caller at a time. */
typedef struct kvf_device {
    size_t struct_size;
    const char *name;
    void *ctx;
    int cpu_access; /* 1: the CPU may read and write device memory in place */
    /* At least 64-byte aligned, not cleared. allocator: for CPU memory that the device cannot get otherwise. */
    kvf_status (*alloc)(void *ctx, const kvf_allocator *allocator, kvf_memory kind, size_t bytes, void **out,
                        kvf_error *err);
    void (*free)(void *ctx, const kvf_allocator *allocator, kvf_memory kind, void *p, size_t bytes);
    /* Runs the copies one after another in the list's order, so that a copy may read what an earlier one wrote. Returns
     * when all are done. */
    kvf_status (*copy)(void *ctx, const kvf_device_list *list, kvf_error *err);
    kvf_status (*queue_create)(void *ctx, const kvf_allocator *allocator, kvf_device_queue **out, kvf_error *err);
    /* Waits for all copies of the queue. Its events must have been destroyed before. */
    void (*queue_destroy)(void *ctx, kvf_device_queue *queue);
    kvf_status (*queue_copy)(void *ctx, kvf_device_queue *queue, const kvf_device_list *list, kvf_error *err);
    kvf_status (*event_create)(void *ctx, kvf_device_queue *queue, kvf_device_event **out, kvf_error *err);
    void (*event_destroy)(void *ctx, kvf_device_event *event);
    kvf_status (*event_record)(void *ctx, kvf_device_event *event, kvf_error *err);
    kvf_status (*event_query)(void *ctx, kvf_device_event *event, int *done, kvf_error *err);
    kvf_status (*event_wait)(void *ctx, kvf_device_event *event, kvf_error *err);
} kvf_device;

/** The CPU as a device. Both kinds of memory come from the allocator (the default one asks for huge pages); a queue is a
 *  thread.
 *  @own static storage. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_device *kvf_device_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
