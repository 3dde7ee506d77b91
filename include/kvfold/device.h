/* kvfold/device.h: the interface between kvfold and a device: memory, and streams that copy it.
 * A device is a table of functions (kvf_device). The CPU is built in: kvf_device_cpu().
 * Implement the table to place KV memory elsewhere; callers use it as shown here.
 *
 * Simple use
 *     // The second stream goes on when what the first has copied is there; nobody waits on the CPU.
 *     kvf_status follow(const kvf_device *d, kvf_stream *first, kvf_stream *second, kvf_device_event *of_first,
 *                       const kvf_block_copies *copies, void *to, const void *from, size_t bytes, kvf_error *err) {
 *         kvf_status status = d->copy_blocks(d->ctx, first, copies, err); // runs while the caller goes on
 *         if (!status) status = d->event_record(d->ctx, of_first, err);   // stands for all that `first` was given so far
 *         if (!status) status = d->stream_wait(d->ctx, second, of_first, err);
 *         return status ? status : d->copy(d->ctx, second, to, from, bytes, err);
 *     }
 *
 * Nouns
 *   stream        a queue of operations. They run one after another, in the order in which they were given, while the caller goes
 *                 on. Kernels run in a stream too (kvf_stream of base.h is this type).
 *   event         a mark in a stream. It is done when all that was given to the stream before its event_record is done.
 *
 * Rules for the caller
 *  - Within one kvf_block_copies, no copy reads or writes what another copy of it writes: the device runs them in any order.
 *    kvf_copies_queue (attention.h) divides a manager's copy list so.
 *  - The memory that an operation names, `items` included, stays valid and unchanged until an event recorded after it is done.
 *  - An event and its stream live until the streams that wait for it have gone on.
 */
#ifndef KVFOLD_DEVICE_H
#define KVFOLD_DEVICE_H

#include "kvfold/base.h"
#include "kvfold/blockmgr.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvf_memory {
    KVF_MEMORY_DEVICE = 0, /* where kernels run */
    KVF_MEMORY_HOST = 1    /* CPU memory that the device can copy while kernels run (pinned) */
} kvf_memory;

/* One array of the data of a block (K, V, positions, ...) or of a score page, in both kinds of memory:
 *
 *     base -> | block 0         | block 1         | ...     block_stride bytes apart
 *             | row 0 | row 1 | |                           n_rows rows of row_bytes bytes
 *             | s s s . . . . . |                           slots of slot_bytes bytes
 */
typedef struct kvf_copy_plane {
    unsigned char *base[2];   /* by kvf_memory; NULL: the array does not exist */
    uint64_t block_stride[2]; /* bytes */
    uint32_t n_rows, row_bytes, slot_bytes;
} kvf_copy_plane;

enum { KVF_COPY_PLANES = 8 }; /* the last one is of score pages, the others are of blocks */

/* Copies of blocks and score pages by their ids: of each the first n_slots slots of every row. A device may also copy the rest. */
typedef struct kvf_block_copies {
    const kvf_copy *items; /* [n_items], in CPU memory; kinds and ids are those of planes that exist */
    uint32_t n_items;
    kvf_copy_plane planes[KVF_COPY_PLANES];
} kvf_block_copies;

typedef struct kvf_device_event kvf_device_event; /* each device defines its own */

/* All functions are required. Each takes ctx first. A failed allocation is KVF_E_NO_MEMORY, any other failure KVF_E_DEVICE. The
 * detail text goes to err, which may be NULL; outputs are then untouched. A stream and its events have one caller at a time.
 * Each device defines struct kvf_stream; its first member is the const kvf_device * of the device that made it.
 * copy, fill, copy_blocks with stream NULL: the operation runs at once and the call returns when it is done. */
typedef struct kvf_device {
    size_t struct_size;
    const char *name;
    void *ctx;
    int cpu_access; /* 1: the CPU may read and write device memory in place */
    /* At least 64-byte aligned, not cleared. allocator: for CPU memory that the device cannot get otherwise; both functions set. */
    kvf_status (*alloc)(void *ctx, const kvf_allocator *allocator, kvf_memory kind, size_t bytes, void **out,
                        kvf_error *err);
    void (*free)(void *ctx, const kvf_allocator *allocator, kvf_memory kind, void *p, size_t bytes);
    kvf_status (*stream_create)(void *ctx, const kvf_allocator *allocator, kvf_stream **out, kvf_error *err);
    /* Waits for all that the stream was given. Its events must have been destroyed before. */
    void (*stream_destroy)(void *ctx, kvf_stream *stream);
    /* What the stream is given from now on runs when the event, as it was last recorded, is done. Does not wait on the CPU. */
    kvf_status (*stream_wait)(void *ctx, kvf_stream *stream, kvf_device_event *event, kvf_error *err);
    kvf_status (*copy)(void *ctx, kvf_stream *stream, void *dst, const void *src, size_t bytes, kvf_error *err);
    kvf_status (*fill)(void *ctx, kvf_stream *stream, void *dst, int byte, size_t bytes, kvf_error *err);
    kvf_status (*copy_blocks)(void *ctx, kvf_stream *stream, const kvf_block_copies *copies, kvf_error *err);
    kvf_status (*event_create)(void *ctx, kvf_stream *stream, kvf_device_event **out, kvf_error *err);
    void (*event_destroy)(void *ctx, kvf_device_event *event);
    kvf_status (*event_record)(void *ctx, kvf_device_event *event, kvf_error *err);
    kvf_status (*event_query)(void *ctx, kvf_device_event *event, int *done, kvf_error *err);
    kvf_status (*event_wait)(void *ctx, kvf_device_event *event, kvf_error *err);
} kvf_device;

/** The CPU as a device. Both kinds of memory come from the allocator (the default one asks for huge pages). Its streams have a
 *  thread for what they are given; a stream of kvf_stream_create_cpu has none, and does it at once.
 *  @own static storage. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_device *kvf_device_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
