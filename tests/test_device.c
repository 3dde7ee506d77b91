/* The CPU as a device: memory, copies of rows, queues and their events. */
#include <criterion/criterion.h>
#include <pthread.h>

#include "base/base.h"
#include "tests/failing.h"

TestSuite(device);

enum { N_LISTS = 100, ROWS = 3, STRIDE_FROM = 16, STRIDE_TO = 24, BYTES = 9 };

static const kvf_device *cpu(void) { return kvf_device_cpu(); }

/* Gives out n copies, each in a call of its own; the first waits for the gate. */
struct source {
    pthread_mutex_t *gate;
    kvf_device_copy copies[4];
    uint32_t n, at;
};

static uint32_t next(void *ctx, kvf_device_copy *out) {
    struct source *s = ctx;
    if (s->gate) {
        pthread_mutex_lock(s->gate);
        pthread_mutex_unlock(s->gate);
    }
    if (s->at == s->n) return 0;
    *out = s->copies[s->at++];
    return 1;
}

Test(device, copies_rows_in_order) {
    unsigned char from[ROWS * STRIDE_FROM], to[ROWS * STRIDE_TO], again[BYTES];
    for (size_t i = 0; i < sizeof from; i++) from[i] = (unsigned char)i;
    memset(to, 0xff, sizeof to);
    struct source s = {
        .copies = {{to, from, BYTES, STRIDE_TO, STRIDE_FROM, ROWS}, {again, to + STRIDE_TO, BYTES, 0, 0, 1}}, .n = 2};
    cr_assert_eq(cpu()->copy(NULL, &(kvf_device_list){next, &s}, NULL), KVF_OK);
    for (size_t i = 0; i < sizeof to; i++) {
        size_t row = i / STRIDE_TO, at = i % STRIDE_TO;
        cr_assert_eq(to[i], at < BYTES ? row * STRIDE_FROM + at : 0xff, "byte %zu", i);
    }
    cr_assert(!memcmp(again, from + STRIDE_FROM, BYTES), "what the first copy wrote");
}

Test(device, an_event_is_done_with_all_before_it) {
    static unsigned char from[N_LISTS], to[N_LISTS];
    static struct source sources[N_LISTS];
    kvf_allocator a;
    kvf_device_queue *q = NULL;
    kvf_device_event *first = NULL, *last = NULL;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    int done = 1;
    cr_assert_eq(kvf__allocator_resolve(NULL, &a, NULL), KVF_OK);
    cr_assert_eq(cpu()->queue_create(NULL, &a, &q, NULL), KVF_OK);
    cr_assert_eq(cpu()->event_create(NULL, q, &first, NULL), KVF_OK);
    cr_assert_eq(cpu()->event_create(NULL, q, &last, NULL), KVF_OK);
    cr_assert_eq(cpu()->event_record(NULL, first, NULL), KVF_OK);
    cr_assert_eq(cpu()->event_query(NULL, first, &done, NULL), KVF_OK);
    cr_assert_eq(done, 1, "of nothing");
    pthread_mutex_lock(&gate);
    for (uint32_t i = 0; i < N_LISTS; i++) {
        from[i] = (unsigned char)(i + 1);
        sources[i] = (struct source){.gate = &gate, .copies = {{&to[i], &from[i], 1, 0, 0, 1}}, .n = 1};
        cr_assert_eq(cpu()->queue_copy(NULL, q, &(kvf_device_list){next, &sources[i]}, NULL), KVF_OK);
        if (i) continue;
        cr_assert_eq(cpu()->event_record(NULL, first, NULL), KVF_OK);
        cr_assert_eq(cpu()->event_query(NULL, first, &done, NULL), KVF_OK);
        cr_assert(!done && !to[0]);
        pthread_mutex_unlock(&gate); /* more than a queue holds follow */
    }
    cr_assert_eq(cpu()->event_record(NULL, last, NULL), KVF_OK);
    cr_assert_eq(cpu()->event_wait(NULL, last, NULL), KVF_OK);
    cr_assert(!memcmp(from, to, sizeof to));
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(cpu()->event_query(NULL, i ? first : last, &done, NULL), KVF_OK);
        cr_assert_eq(done, 1);
    }
    memset(to, 0, sizeof to);
    for (uint32_t i = 0; i < 8; i++) {
        sources[i].at = 0;
        cr_assert_eq(cpu()->queue_copy(NULL, q, &(kvf_device_list){next, &sources[i]}, NULL), KVF_OK);
    }
    cpu()->event_destroy(NULL, first);
    cpu()->event_destroy(NULL, last);
    cpu()->queue_destroy(NULL, q);
    cr_assert(!memcmp(from, to, 8), "a queue ends with all that it was given");
}

Test(device, memory_is_the_allocators) {
    struct failing f = {2, 0};
    kvf_allocator a = {failing_alloc, failing_free, &f};
    kvf_error err = {.text = ""};
    void *p = NULL, *none = NULL;
    kvf_device_queue *q = NULL, *no_queue = NULL;
    kvf_device_event *event = NULL;
    cr_assert_eq(cpu()->alloc(NULL, &a, KVF_MEMORY_HOST, 100, &p, &err), KVF_OK);
    cr_assert_eq((uintptr_t)p % 64, 0);
    cr_assert_eq(cpu()->queue_create(NULL, &a, &q, &err), KVF_OK);
    cr_assert_eq(cpu()->alloc(NULL, &a, KVF_MEMORY_DEVICE, 12345, &none, &err), KVF_E_NO_MEMORY);
    cr_assert(!none && strstr(err.text, "12345"), "%s", err.text);
    cr_assert_eq(cpu()->event_create(NULL, q, &event, &err), KVF_E_NO_MEMORY);
    cr_assert_eq(cpu()->queue_create(NULL, &a, &no_queue, &err), KVF_E_NO_MEMORY);
    cr_assert(!event && !no_queue);
    cpu()->queue_destroy(NULL, q);
    cpu()->free(NULL, &a, KVF_MEMORY_HOST, p, 100);
    cr_assert_eq(f.alive, 0);
}
