/* base/cpu/stream.h: a stream of the CPU: threads that divide the items of a call, and a thread for operations that are queued. */
#ifndef KVF_BASE_CPU_STREAM_H
#define KVF_BASE_CPU_STREAM_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

enum { KVF__QUEUE_CAPACITY = 16 }; /* operations that a queue holds; giving it more waits */

typedef enum kvf__op_kind { KVF__OP_COPY, KVF__OP_FILL, KVF__OP_BLOCKS, KVF__OP_WAIT } kvf__op_kind;

typedef struct kvf__op {
    kvf__op_kind kind;
    void *dst;
    const void *src;
    size_t bytes;
    int byte;
    kvf_block_copies blocks;
    kvf_stream *stream; /* KVF__OP_WAIT: until its n_done is ticket */
    uint64_t ticket;
} kvf__op;

/* Invariant, under the lock: n_done <= n_posted <= n_done + KVF__QUEUE_CAPACITY; operation number t, from 1, is
 * ops[t % KVF__QUEUE_CAPACITY]. */
typedef struct kvf__queue {
    pthread_mutex_t lock;
    pthread_cond_t posted, done;
    pthread_t thread;
    bool stop;
    uint64_t n_posted, n_done; /* only the stream's caller changes n_posted */
    kvf__op ops[KVF__QUEUE_CAPACITY];
} kvf__queue;

struct kvf_stream {
    const kvf_device *device; /* first, as in every stream */
    kvf_allocator allocator;
    size_t bytes;
    kvf__queue *queue; /* NULL: operations run at once, in the calling thread */
    uint32_t n_threads, n_started;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    kvf__item_fn fn;
    void *ctx;
    uint32_t n;
    bool stop;
    _Alignas(KVF__CACHE_LINE) atomic_uint job;  /* number of jobs published so far */
    _Alignas(KVF__CACHE_LINE) atomic_uint next; /* next item */
    _Alignas(KVF__CACHE_LINE) atomic_uint busy; /* workers not yet done with this job */
    struct kvf__worker {
        kvf_stream *stream;
        pthread_t thread;
        uint32_t id;
    } workers[];
};

struct kvf_device_event {
    kvf_stream *stream;
    uint64_t ticket; /* the event is done when the queue's n_done >= ticket */
};

/* Starts the queue's thread. */
kvf_status kvf__queue_create(const kvf_allocator *allocator, kvf__queue **out, kvf_error *err);
/* Runs all that it holds first. */
void kvf__queue_destroy(const kvf_allocator *allocator, kvf__queue *queue);
/* Gives an operation to a stream; stream NULL, or without a queue: runs it. */
void kvf__queue_post(kvf_stream *stream, const kvf__op *op);
/* Waits until n_done >= ticket. */
void kvf__queue_wait(kvf__queue *queue, uint64_t ticket);

#endif
