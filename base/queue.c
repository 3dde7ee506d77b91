/* Jobs beside the caller: one thread that runs them in the order in which they were posted. */
#include <pthread.h>

#include "base/base.h"

typedef struct job {
    kvf__job_fn fn;
    void *ctx;
} job;

/* Invariant, under the lock: n_done <= n_posted <= n_done + capacity; job number t, from 1, is jobs[t % capacity]. */
struct kvf__queue {
    kvf_allocator allocator;
    size_t bytes;
    pthread_mutex_t lock;
    pthread_cond_t posted, done;
    pthread_t thread;
    bool stop;
    uint64_t n_posted, n_done;
    uint32_t capacity;
    job jobs[];
};

static void *work(void *arg) {
    kvf__queue *q = arg;
    pthread_mutex_lock(&q->lock);
    for (uint64_t next = 1;; next++) {
        while (q->n_posted < next && !q->stop) pthread_cond_wait(&q->posted, &q->lock);
        if (q->n_posted < next) break;
        job j = q->jobs[next % q->capacity];
        pthread_mutex_unlock(&q->lock);
        j.fn(j.ctx);
        pthread_mutex_lock(&q->lock);
        q->n_done = next;
        pthread_cond_broadcast(&q->done);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

kvf_status kvf__queue_create(const kvf_allocator *allocator, uint32_t capacity, kvf__queue **out, kvf_error *err) {
    size_t bytes = sizeof(kvf__queue) + capacity * sizeof(job);
    kvf__queue *q = kvf__alloc(allocator, bytes);
    if (!q) return kvf__fail(err, KVF_E_NO_MEMORY, "queue: %zu bytes could not be allocated", bytes);
    q->allocator = *allocator;
    q->bytes = bytes;
    q->capacity = capacity;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->posted, NULL);
    pthread_cond_init(&q->done, NULL);
    if (pthread_create(&q->thread, NULL, work, q)) {
        kvf__free(allocator, q, bytes);
        return kvf__fail(err, KVF_E_NO_MEMORY, "queue: its thread could not be started");
    }
    *out = q;
    return KVF_OK;
}

void kvf__queue_destroy(kvf__queue *q) {
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
    kvf__free(&a, q, q->bytes);
}

static void wait_for(kvf__queue *q, uint64_t ticket) {
    while (q->n_done < ticket) pthread_cond_wait(&q->done, &q->lock);
}

void kvf__queue_wait(kvf__queue *q, uint64_t ticket) {
    pthread_mutex_lock(&q->lock);
    wait_for(q, ticket);
    pthread_mutex_unlock(&q->lock);
}

uint64_t kvf__queue_post(kvf__queue *q, kvf__job_fn fn, void *ctx) {
    pthread_mutex_lock(&q->lock);
    if (q->n_posted >= q->capacity) wait_for(q, q->n_posted - q->capacity + 1);
    uint64_t ticket = ++q->n_posted;
    q->jobs[ticket % q->capacity] = (job){fn, ctx};
    pthread_cond_signal(&q->posted);
    pthread_mutex_unlock(&q->lock);
    return ticket;
}
