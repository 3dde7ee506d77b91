/* The CPU as a device: copies are memcpy, a queue is a thread that runs the lists in the order they were queued. */
#include <pthread.h>

#include "base/base.h"

enum { CAPACITY = 16 }; /* lists that a queue holds; queue_copy waits while it is full */

/* Invariant, under the lock: n_done <= n_posted <= n_done + CAPACITY; list number t, from 1, is lists[t % CAPACITY]. */
struct kvf_device_queue {
    kvf_allocator allocator;
    pthread_mutex_t lock;
    pthread_cond_t posted, done;
    pthread_t thread;
    bool stop;
    uint64_t n_posted, n_done;
    kvf_device_list lists[CAPACITY];
};

struct kvf_device_event {
    kvf_device_queue *queue;
    uint64_t ticket; /* the event is done when n_done >= ticket */
};

static kvf_status cpu_alloc(void *ctx, const kvf_allocator *allocator, kvf_memory kind, size_t bytes, void **out,
                            kvf_error *err) {
    (void)ctx;
    (void)kind;
    void *p = allocator->alloc(allocator->ctx, bytes ? bytes : 1, KVF__CACHE_LINE);
    if (!p) return kvf__fail(err, KVF_E_NO_MEMORY, "cpu memory: %zu bytes could not be allocated", bytes);
    *out = p;
    return KVF_OK;
}

static void cpu_free(void *ctx, const kvf_allocator *allocator, kvf_memory kind, void *p, size_t bytes) {
    (void)ctx;
    (void)kind;
    kvf__free(allocator, p, bytes);
}

static kvf_status cpu_copy(void *ctx, const kvf_device_list *list, kvf_error *err) {
    (void)ctx;
    (void)err;
    kvf_device_copy copies[KVF_DEVICE_COPIES];
    for (uint32_t n; (n = list->next(list->ctx, copies)) != 0;)
        for (uint32_t i = 0; i < n; i++)
            for (size_t row = 0; row < copies[i].n_rows; row++)
                memcpy((unsigned char *)copies[i].dst + row * copies[i].dst_stride,
                       (const unsigned char *)copies[i].src + row * copies[i].src_stride, copies[i].bytes);
    return KVF_OK;
}

static void *work(void *arg) {
    kvf_device_queue *q = arg;
    pthread_mutex_lock(&q->lock);
    for (uint64_t next = 1;; next++) {
        while (q->n_posted < next && !q->stop) pthread_cond_wait(&q->posted, &q->lock);
        if (q->n_posted < next) break;
        kvf_device_list list = q->lists[next % CAPACITY];
        pthread_mutex_unlock(&q->lock);
        (void)cpu_copy(NULL, &list, NULL);
        pthread_mutex_lock(&q->lock);
        q->n_done = next;
        pthread_cond_broadcast(&q->done);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

static kvf_status cpu_queue_create(void *ctx, const kvf_allocator *allocator, kvf_device_queue **out, kvf_error *err) {
    (void)ctx;
    kvf_device_queue *q = kvf__alloc(allocator, sizeof *q);
    if (!q) return kvf__fail(err, KVF_E_NO_MEMORY, "queue: %zu bytes could not be allocated", sizeof *q);
    q->allocator = *allocator;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->posted, NULL);
    pthread_cond_init(&q->done, NULL);
    if (pthread_create(&q->thread, NULL, work, q)) {
        pthread_cond_destroy(&q->done);
        pthread_cond_destroy(&q->posted);
        pthread_mutex_destroy(&q->lock);
        kvf__free(allocator, q, sizeof *q);
        return kvf__fail(err, KVF_E_NO_MEMORY, "queue: its thread could not be started");
    }
    *out = q;
    return KVF_OK;
}

static void cpu_queue_destroy(void *ctx, kvf_device_queue *q) {
    (void)ctx;
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    q->stop = true;
    pthread_cond_signal(&q->posted);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
    pthread_cond_destroy(&q->posted);
    pthread_cond_destroy(&q->done);
    pthread_mutex_destroy(&q->lock);
    kvf_allocator a = q->allocator;
    kvf__free(&a, q, sizeof *q);
}

static void wait_for(kvf_device_queue *q, uint64_t ticket) {
    while (q->n_done < ticket) pthread_cond_wait(&q->done, &q->lock);
}

static kvf_status cpu_queue_copy(void *ctx, kvf_device_queue *q, const kvf_device_list *list, kvf_error *err) {
    (void)ctx;
    (void)err;
    pthread_mutex_lock(&q->lock);
    if (q->n_posted >= CAPACITY) wait_for(q, q->n_posted - CAPACITY + 1);
    q->lists[++q->n_posted % CAPACITY] = *list;
    pthread_cond_signal(&q->posted);
    pthread_mutex_unlock(&q->lock);
    return KVF_OK;
}

static kvf_status cpu_event_create(void *ctx, kvf_device_queue *q, kvf_device_event **out, kvf_error *err) {
    (void)ctx;
    kvf_device_event *event = kvf__alloc(&q->allocator, sizeof *event);
    if (!event) return kvf__fail(err, KVF_E_NO_MEMORY, "event: %zu bytes could not be allocated", sizeof *event);
    event->queue = q;
    *out = event;
    return KVF_OK;
}

static void cpu_event_destroy(void *ctx, kvf_device_event *event) {
    (void)ctx;
    if (event) kvf__free(&event->queue->allocator, event, sizeof *event);
}

/* Needs no lock: only the caller changes n_posted. */
static kvf_status cpu_event_record(void *ctx, kvf_device_event *event, kvf_error *err) {
    (void)ctx;
    (void)err;
    event->ticket = event->queue->n_posted;
    return KVF_OK;
}

static kvf_status cpu_event_query(void *ctx, kvf_device_event *event, int *done, kvf_error *err) {
    (void)ctx;
    (void)err;
    pthread_mutex_lock(&event->queue->lock);
    *done = event->queue->n_done >= event->ticket;
    pthread_mutex_unlock(&event->queue->lock);
    return KVF_OK;
}

static kvf_status cpu_event_wait(void *ctx, kvf_device_event *event, kvf_error *err) {
    (void)ctx;
    (void)err;
    pthread_mutex_lock(&event->queue->lock);
    wait_for(event->queue, event->ticket);
    pthread_mutex_unlock(&event->queue->lock);
    return KVF_OK;
}

const kvf_device *kvf_device_cpu(void) {
    static const kvf_device cpu = {.struct_size = sizeof cpu,
                                   .name = "cpu",
                                   .cpu_access = 1,
                                   .alloc = cpu_alloc,
                                   .free = cpu_free,
                                   .copy = cpu_copy,
                                   .queue_create = cpu_queue_create,
                                   .queue_destroy = cpu_queue_destroy,
                                   .queue_copy = cpu_queue_copy,
                                   .event_create = cpu_event_create,
                                   .event_destroy = cpu_event_destroy,
                                   .event_record = cpu_event_record,
                                   .event_query = cpu_event_query,
                                   .event_wait = cpu_event_wait};
    return &cpu;
}
