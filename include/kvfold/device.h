/* kvfold/device.h: where KV memory lies and what copies it: a table of functions for memory, copies, queues and events.
 *
 *     queue                one line of copies beside the caller; the caller goes on at once
 *     event                a mark in a queue: done when all that was given to the queue before its record is done
 *     list of copies       what next() gives out, piece by piece: so no list is ever held whole, and addresses are computed
 *                          where the copies are issued
 *
 *     queue_copy(queue, list);  event_record(queue, event);  ...  event_wait(event);   // then what it wrote may be read
 *
 * Rules for who calls: no copy of a list reads or writes what another one of it writes, and the same holds for lists of a queue between
 * which no event was waited for; so a device may carry them out in any order and side by side. Whatever a list names, and
 * the list's ctx, stays as it is until an event behind it is done.
 */
#ifndef KVFOLD_DEVICE_H
#define KVFOLD_DEVICE_H

#include "kvfold/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvf_memory {
    KVF_MEMORY_DEVICE = 0, /* where kernels run */
    KVF_MEMORY_HOST = 1    /* the CPU's, fit to be copied from and to the device beside kernels (pinned) */
} kvf_memory;

/* n_rows runs of bytes, strides apart. */
typedef struct kvf_device_copy {
    void *dst;
    const void *src;
    size_t bytes, dst_stride, src_stride;
    uint32_t n_rows;
} kvf_device_copy;

enum { KVF_DEVICE_COPIES = 64 }; /* that a list gives out at once at most */

typedef struct kvf_device_list {
    /* Writes the next copies to out [KVF_DEVICE_COPIES] and returns how many; 0: there are no more. Called in any thread,
     * one call at a time. */
    uint32_t (*next)(void *ctx, kvf_device_copy *out);
    void *ctx;
} kvf_device_list;

typedef struct kvf_device_queue kvf_device_queue; /* a device's own */
typedef struct kvf_device_event kvf_device_event;

/* All functions are required, and take ctx first. A failure is KVF_E_NO_MEMORY for what could not be allocated, else KVF_E_IO, with
 * its text in err (which may be NULL); outputs are untouched then. One caller at a time for each queue and its events. */
typedef struct kvf_device {
    size_t struct_size;
    const char *name;
    void *ctx;
    int cpu_access; /* 1: the CPU may read and write device memory in place */
    /* 64-byte aligned, or more; not cleared. allocator: for memory of the CPU's that the device has no other way to get. */
    kvf_status (*alloc)(void *ctx, const kvf_allocator *allocator, kvf_memory kind, size_t bytes, void **out,
                        kvf_error *err);
    void (*free)(void *ctx, const kvf_allocator *allocator, kvf_memory kind, void *p, size_t bytes);
    /* One after another, in the list's order (here a copy may read what an earlier one wrote); returns when done. */
    kvf_status (*copy)(void *ctx, const kvf_device_list *list, kvf_error *err);
    kvf_status (*queue_create)(void *ctx, const kvf_allocator *allocator, kvf_device_queue **out, kvf_error *err);
    /* Returns when all that was given to it is done; its events are destroyed before. */
    void (*queue_destroy)(void *ctx, kvf_device_queue *queue);
    kvf_status (*queue_copy)(void *ctx, kvf_device_queue *queue, const kvf_device_list *list, kvf_error *err);
    kvf_status (*event_create)(void *ctx, kvf_device_queue *queue, kvf_device_event **out, kvf_error *err);
    void (*event_destroy)(void *ctx, kvf_device_event *event);
    kvf_status (*event_record)(void *ctx, kvf_device_event *event, kvf_error *err); /* behind all of its queue so far */
    kvf_status (*event_query)(void *ctx, kvf_device_event *event, int *done, kvf_error *err);
    kvf_status (*event_wait)(void *ctx, kvf_device_event *event, kvf_error *err);
} kvf_device;

/** The CPU: both kinds of memory are the allocator's (the default one asks for huge pages), a queue is a thread.
 *  @own static storage. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_device *kvf_device_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
