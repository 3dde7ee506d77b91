/* Operations that a CPU stream is given: a thread runs them one after another. */
#include "base/copy_index.h"
#include "base/cpu/stream.h"

static void copy_block(const kvf_block_copies *c, const kvf_copy *item) {
    int from = kvf__copy_from(item->kind), to = kvf__copy_to(item->kind);
    if (from == to && item->src == item->dst) return;
    for (int i = kvf__copy_first_plane(item->kind); i < kvf__copy_end_plane(item->kind); i++) {
        const kvf_copy_plane *plane = &c->planes[i];
        if (!plane->base[from]) continue;
        unsigned char *dst = kvf__copy_at(plane, to, item->dst);
        const unsigned char *src = kvf__copy_at(plane, from, item->src);
        size_t bytes = (size_t)item->n_slots * plane->slot_bytes, n_rows = plane->n_rows;
        if (bytes == plane->row_bytes) { /* one run */
            bytes *= n_rows;
            n_rows = 1;
        }
        for (size_t row = 0; row < n_rows; row++)
            memcpy(dst + row * plane->row_bytes, src + row * plane->row_bytes, bytes);
    }
}

static void run(const kvf__op *op) {
    switch (op->kind) {
    case KVF__OP_COPY: memcpy(op->dst, op->src, op->bytes); break;
    case KVF__OP_FILL: memset(op->dst, op->byte, op->bytes); break;
    case KVF__OP_BLOCKS:
        for (uint32_t i = 0; i < op->blocks.n_items; i++) copy_block(&op->blocks, &op->blocks.items[i]);
        break;
    case KVF__OP_WAIT: kvf__queue_wait(op->stream->queue, op->ticket); break;
    }
}

static void *work(void *arg) {
    kvf__queue *q = arg;
    pthread_mutex_lock(&q->lock);
    for (uint64_t next = 1;; next++) {
        while (q->n_posted < next && !q->stop) pthread_cond_wait(&q->posted, &q->lock);
        if (q->n_posted < next) break;
        pthread_mutex_unlock(&q->lock);
        run(&q->ops[next % KVF__QUEUE_CAPACITY]); /* its place is taken again only when it is done */
        pthread_mutex_lock(&q->lock);
        q->n_done = next;
        pthread_cond_broadcast(&q->done);
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

kvf_status kvf__queue_create(const kvf_allocator *allocator, kvf__queue **out, kvf_error *err) {
    kvf__queue *q = kvf__alloc(allocator, sizeof *q);
    if (!q) return kvf__fail(err, KVF_E_NO_MEMORY, "stream: a queue of %zu bytes could not be allocated", sizeof *q);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->posted, NULL);
    pthread_cond_init(&q->done, NULL);
    if (pthread_create(&q->thread, NULL, work, q)) {
        pthread_cond_destroy(&q->done);
        pthread_cond_destroy(&q->posted);
        pthread_mutex_destroy(&q->lock);
        kvf__free(allocator, q, sizeof *q);
        return kvf__fail(err, KVF_E_NO_MEMORY, "stream: the thread of its queue could not be started");
    }
    *out = q;
    return KVF_OK;
}

void kvf__queue_destroy(const kvf_allocator *allocator, kvf__queue *q) {
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    q->stop = true;
    pthread_cond_signal(&q->posted);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
    pthread_cond_destroy(&q->posted);
    pthread_cond_destroy(&q->done);
    pthread_mutex_destroy(&q->lock);
    kvf__free(allocator, q, sizeof *q);
}

static void wait_for(kvf__queue *q, uint64_t ticket) {
    while (q->n_done < ticket) pthread_cond_wait(&q->done, &q->lock);
}

void kvf__queue_wait(kvf__queue *q, uint64_t ticket) {
    pthread_mutex_lock(&q->lock);
    wait_for(q, ticket);
    pthread_mutex_unlock(&q->lock);
}

void kvf__queue_post(kvf_stream *stream, const kvf__op *op) {
    kvf__queue *q = stream ? stream->queue : NULL;
    if (!q) {
        run(op);
        return;
    }
    pthread_mutex_lock(&q->lock);
    if (q->n_posted >= KVF__QUEUE_CAPACITY) wait_for(q, q->n_posted - KVF__QUEUE_CAPACITY + 1);
    q->ops[(q->n_posted + 1) % KVF__QUEUE_CAPACITY] = *op;
    q->n_posted++;
    pthread_cond_signal(&q->posted);
    pthread_mutex_unlock(&q->lock);
}
