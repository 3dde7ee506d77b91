/* The CPU as a device: memory, streams and events; copies of blocks are those of their rows, on any device. */
#include <criterion/criterion.h>
#include <time.h>

#include "base/cpu/stream.h"
#include "kvfold/attention.h"
#include "tests/failing.h"

TestSuite(device);

enum { N_OPS = 100 };

static const kvf_device *cpu(void) { return kvf_device_cpu(); }

static kvf_stream *new_stream(const kvf_allocator *a) {
    kvf_stream *s = NULL;
    cr_assert_eq(cpu()->stream_create(NULL, a, &s, NULL), KVF_OK);
    cr_assert_eq(*(const kvf_device *const *)(const void *)s, cpu(), "a stream says whose it is");
    return s;
}

static kvf_device_event *new_event(kvf_stream *s) {
    kvf_device_event *event = NULL;
    cr_assert_eq(cpu()->event_create(NULL, s, &event, NULL), KVF_OK);
    return event;
}

static int is_done(kvf_device_event *event) {
    int done = -1;
    cr_assert_eq(cpu()->event_query(NULL, event, &done, NULL), KVF_OK);
    return done;
}

static void copy_byte(kvf_stream *s, unsigned char *to, const unsigned char *from) {
    cr_assert_eq(cpu()->copy(NULL, s, to, from, 1, NULL), KVF_OK);
}

static void add_item(void *ctx, uint32_t item, uint32_t thread) {
    (void)thread;
    ((unsigned char *)ctx)[item] += 1;
}

/* A stream that stands still: it waits for an operation of another stream that does not come before open(). */
struct gate {
    kvf_stream *stream;
    struct kvf_device_event event;
};

static struct gate closed(const kvf_allocator *a, kvf_stream *who) {
    struct gate g = {.stream = new_stream(a)};
    g.event = (struct kvf_device_event){g.stream, 1};
    cr_assert_eq(cpu()->stream_wait(NULL, who, &g.event, NULL), KVF_OK);
    return g;
}

static void open_gate(struct gate *g) {
    static unsigned char byte;
    cr_assert_eq(cpu()->fill(NULL, g->stream, &byte, 1, 1, NULL), KVF_OK);
}

Test(device, a_stream_runs_in_order_and_an_event_is_done_with_all_before_it) {
    static unsigned char chain[N_OPS + 1];
    kvf_allocator a;
    cr_assert_eq(kvf__allocator_resolve(NULL, &a, NULL), KVF_OK);
    kvf_stream *s = new_stream(&a);
    kvf_device_event *first = new_event(s), *last = new_event(s);
    cr_assert_eq(is_done(first), 1, "one that was never recorded");
    cr_assert_eq(cpu()->event_record(NULL, first, NULL), KVF_OK);
    cr_assert_eq(is_done(first), 1, "of nothing");
    struct gate gate = closed(&a, s);
    chain[0] = 7;
    copy_byte(s, &chain[1], &chain[0]);
    cr_assert_eq(cpu()->event_record(NULL, first, NULL), KVF_OK);
    cr_assert(!is_done(first) && !chain[1]);
    open_gate(&gate);
    for (uint32_t i = 1; i < N_OPS; i++) copy_byte(s, &chain[i + 1], &chain[i]); /* more than a queue holds */
    cr_assert_eq(cpu()->event_record(NULL, last, NULL), KVF_OK);
    cr_assert_eq(cpu()->event_wait(NULL, last, NULL), KVF_OK);
    for (uint32_t i = 0; i <= N_OPS; i++) cr_assert_eq(chain[i], 7, "%u", i);
    cr_assert(is_done(first) && is_done(last));
    cr_assert_eq(cpu()->fill(NULL, s, chain, 3, N_OPS, NULL), KVF_OK);
    kvf__stream_for(s, N_OPS, add_item, chain); /* a kernel comes after what the stream was given before */
    for (uint32_t i = 0; i < N_OPS; i++) cr_assert_eq(chain[i], 4, "%u", i);
    cr_assert_eq(cpu()->fill(NULL, s, chain, 9, N_OPS, NULL), KVF_OK);
    cpu()->event_destroy(NULL, first);
    cpu()->event_destroy(NULL, last);
    cpu()->stream_destroy(NULL, s);
    cr_assert_eq(chain[N_OPS - 1], 9, "a stream ends with all that it was given");
    cpu()->stream_destroy(NULL, gate.stream);
}

Test(device, a_stream_waits_for_the_event_of_another) {
    kvf_allocator a;
    cr_assert_eq(kvf__allocator_resolve(NULL, &a, NULL), KVF_OK);
    kvf_stream *one = new_stream(&a), *two = new_stream(&a), *at_once = NULL;
    cr_assert_eq(kvf_stream_create_cpu(&a, 1, &at_once, NULL), KVF_OK);
    kvf_device_event *of_one = new_event(one), *of_two = new_event(two), *of_now = new_event(at_once);
    unsigned char x = 1, y = 0, z = 0, later = 0;
    cr_assert_eq(cpu()->stream_wait(NULL, two, of_one, NULL), KVF_OK, "of nothing");
    cr_assert_eq(cpu()->stream_wait(NULL, two, of_now, NULL), KVF_OK);
    struct gate gate = closed(&a, one);
    copy_byte(one, &y, &x);
    cr_assert_eq(cpu()->event_record(NULL, of_one, NULL), KVF_OK);
    cr_assert_eq(cpu()->stream_wait(NULL, two, of_one, NULL), KVF_OK, "does not wait here");
    copy_byte(two, &z, &y);
    cr_assert_eq(cpu()->event_record(NULL, of_two, NULL), KVF_OK);
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* time to go wrong */
    cr_assert(!is_done(of_two) && !is_done(of_one));
    open_gate(&gate);
    cr_assert_eq(cpu()->stream_wait(NULL, at_once, of_two, NULL), KVF_OK, "this one has no thread to wait in");
    copy_byte(at_once, &later, &z);
    cr_assert(x == 1 && y == 1 && z == 1 && later == 1);
    cr_assert_eq(cpu()->event_record(NULL, of_now, NULL), KVF_OK);
    cr_assert_eq(is_done(of_now), 1);
    kvf_device_event *events[] = {of_one, of_two, of_now};
    kvf_stream *streams[] = {two, one, at_once, gate.stream};
    for (size_t i = 0; i < 3; i++) cpu()->event_destroy(NULL, events[i]);
    for (size_t i = 0; i < 4; i++) cpu()->stream_destroy(NULL, streams[i]);
}

Test(device, memory_is_the_allocators) {
    struct failing f = {3, 0}; /* a page of memory, a stream, its queue */
    kvf_allocator a = {failing_alloc, failing_free, &f};
    kvf_error err = {.text = ""};
    void *p = NULL, *none = NULL;
    kvf_stream *s = NULL, *no_stream = NULL;
    kvf_device_event *event = NULL;
    cr_assert_eq(cpu()->alloc(NULL, &a, KVF_MEMORY_HOST, 100, &p, &err), KVF_OK);
    cr_assert_eq((uintptr_t)p % 64, 0);
    cr_assert_eq(cpu()->stream_create(NULL, &a, &s, &err), KVF_OK);
    cr_assert_eq(cpu()->alloc(NULL, &a, KVF_MEMORY_DEVICE, 12345, &none, &err), KVF_E_NO_MEMORY);
    cr_assert(!none && strstr(err.text, "12345"), "%s", err.text);
    cr_assert_eq(cpu()->event_create(NULL, s, &event, &err), KVF_E_NO_MEMORY);
    for (int more = 0; more < 2; more++) {
        f.left = more;
        cr_assert_eq(cpu()->stream_create(NULL, &a, &no_stream, &err), KVF_E_NO_MEMORY);
    }
    cr_assert(!event && !no_stream);
    cpu()->stream_destroy(NULL, s);
    cpu()->free(NULL, &a, KVF_MEMORY_HOST, p, 100);
    cr_assert_eq(f.alive, 0);
}
