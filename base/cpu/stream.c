/* The CPU stream: a pool of threads that divide the items of one call among themselves.
 *
 * The stream runs one call at a time. The caller publishes the job under the lock and then works on it too.
 * All threads take items from one atomic counter. Workers spin for a short time before they sleep, so that
 * the many small calls of a decode step do not each pay for a wake-up. */
#define _GNU_SOURCE
#include "base/cpu/stream.h"

#include <sched.h>

enum { SPIN = 2000 };

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_items(kvf_stream *s, uint32_t thread) {
    for (;;) {
        uint32_t i = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
        if (i >= s->n) return;
        s->fn(s->ctx, i, thread);
    }
}

static void *work(void *arg) {
    struct kvf__worker *w = arg;
    kvf_stream *s = w->stream;
    for (unsigned seen = 0;;) {
        for (int spin = 0; spin < SPIN && atomic_load_explicit(&s->job, memory_order_acquire) == seen; spin++) relax();
        if (atomic_load_explicit(&s->job, memory_order_acquire) == seen) {
            pthread_mutex_lock(&s->lock);
            while (atomic_load_explicit(&s->job, memory_order_acquire) == seen) pthread_cond_wait(&s->wake, &s->lock);
            pthread_mutex_unlock(&s->lock);
        }
        seen = atomic_load_explicit(&s->job, memory_order_acquire);
        if (s->stop) return NULL;
        take_items(s, w->id);
        atomic_fetch_sub_explicit(&s->busy, 1, memory_order_release);
    }
}

static void publish(kvf_stream *s) {
    pthread_mutex_lock(&s->lock);
    atomic_fetch_add_explicit(&s->job, 1, memory_order_release);
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

kvf_status kvf_stream_create_cpu(const kvf_allocator *allocator, uint32_t n_threads, kvf_stream **out, kvf_error *err) {
    kvf_allocator a;
    kvf_status st = kvf__allocator_resolve(allocator, &a, err);
    if (st) return st;
    if (!out) return kvf__fail(err, KVF_E_INVALID, "kvf_stream_create_cpu: out is NULL");
    if (n_threads == 0) {
        cpu_set_t set;
        n_threads = sched_getaffinity(0, sizeof set, &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;
    }
    if (n_threads > 1024) return kvf__fail_field(err, KVF_E_INVALID, "n_threads", n_threads, 0, "must be at most 1024");
    size_t bytes = sizeof(kvf_stream) + n_threads * sizeof(struct kvf__worker);
    kvf_stream *s = kvf__alloc(&a, bytes);
    if (!s) return kvf__fail(err, KVF_E_NO_MEMORY, "stream: %zu bytes could not be allocated", bytes);
    s->device = kvf_device_cpu();
    s->allocator = a;
    s->bytes = bytes;
    s->n_threads = n_threads;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    for (uint32_t i = 1; i < n_threads; i++) {
        struct kvf__worker *w = &s->workers[i];
        w->stream = s;
        w->id = i;
        if (pthread_create(&w->thread, NULL, work, w)) {
            kvf_stream_destroy(s);
            return kvf__fail(err, KVF_E_NO_MEMORY, "stream: thread %u of %u could not be started", i, n_threads);
        }
        s->n_started++;
    }
    *out = s;
    return KVF_OK;
}

void kvf_stream_destroy(kvf_stream *s) {
    if (!s) return;
    kvf__queue_destroy(&s->allocator, s->queue);
    s->stop = true;
    publish(s);
    for (uint32_t i = 1; i <= s->n_started; i++) pthread_join(s->workers[i].thread, NULL);
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    kvf_allocator a = s->allocator;
    kvf__free(&a, s, s->bytes);
}

uint32_t kvf_stream_n_threads(const kvf_stream *s) { return s ? s->n_threads : 1; }

void kvf__stream_for(kvf_stream *s, uint32_t n, kvf__item_fn fn, void *ctx) {
    if (s && s->queue) kvf__queue_wait(s->queue, s->queue->n_posted);
    if (!s || s->n_threads == 1 || n < 2) {
        for (uint32_t i = 0; i < n; i++) fn(ctx, i, 0);
        return;
    }
    s->fn = fn;
    s->ctx = ctx;
    s->n = n;
    atomic_store_explicit(&s->next, 0, memory_order_relaxed);
    atomic_store_explicit(&s->busy, s->n_threads - 1, memory_order_relaxed);
    publish(s);
    take_items(s, 0);
    for (int spin = 0; atomic_load_explicit(&s->busy, memory_order_acquire); spin++) {
        if (spin > SPIN)
            sched_yield();
        else
            relax();
    }
}
