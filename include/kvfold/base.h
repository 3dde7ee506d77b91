/* kvfold/base.h: status codes, error texts, allocator, log, data types, streams.
 * It also states the rules that every public header of kvfold follows.
 * Block management begins in blockmgr.h.
 *
 * Simple use
 *     #include <kvfold/base.h>
 *     #include <stdio.h>
 *     int main(void) {
 *         kvf_error err;
 *         kvf_stream *stream; // threads for the kernels; 0: one for each CPU
 *         kvf_status status = kvf_stream_create_cpu(NULL, 0, &stream, &err);
 *         if (status) return fprintf(stderr, "%s: %s\n", kvf_status_name(status), err.text), 1;
 *         printf("kvfold %s, %u threads\n", kvf_version(), kvf_stream_n_threads(stream));
 *         kvf_stream_destroy(stream);
 *     }
 *
 * Rules of every header
 *  - A call that can fail returns kvf_status: KVF_OK is 0, errors are negative
 *    and their numbers never change. On failure every output is untouched and
 *    the state is as before the call.
 *  - NULL is KVF_E_INVALID for an object, a config or an output, unless its
 *    comment calls it optional. A call that returns no status then returns 0,
 *    NULL or zeros. A number out of its documented range is an error too. The
 *    length of an array is known only to the caller and is not checked.
 *  - A call that creates an object takes an optional kvf_error for the detail.
 *    An object keeps the detail of its last failure (kvf_<noun>_error).
 *  - The library never prints, exits, aborts or reads the environment.
 *  - There is no global state: objects in one process do not affect each other.
 *  - Objects are not thread-safe unless their comment says so.
 *  - A struct that may grow begins with struct_size, and grows only at its end.
 *    The caller sets struct_size to the size that it was compiled with.
 *    kvf_<noun>_init(&x, sizeof x) does so for an input and sets its defaults;
 *    a zero field means its default. An input may be shorter than the library's
 *    struct; a longer one must have zeros in its rest. For an output set
 *    struct_size before the call: no byte beyond it is written.
 *  - An array of structs that may grow has a stride beside it, the bytes from
 *    one element to the next; KVF_AT finds an element. A struct without
 *    struct_size or stride never grows.
 *  - Counts are named n_*, sizes in bytes *_bytes. Ranges are half open.
 */
#ifndef KVFOLD_BASE_H
#define KVFOLD_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_VERSION_MAJOR 0
#define KVF_VERSION_MINOR 1
#define KVF_VERSION_PATCH 0
#define KVF_VERSION_NUMBER (KVF_VERSION_MAJOR * 10000 + KVF_VERSION_MINOR * 100 + KVF_VERSION_PATCH)

/* Address of the i-th element of an array whose elements are `bytes` bytes apart: KVF_AT(kvf_step_item, step.items, i,
 * step.item_bytes). They may be longer than the caller's type. */
#define KVF_AT(type, array, i, bytes) ((const type *)(const void *)((const char *)(array) + (size_t)(i) * (bytes)))

#if defined(KVF_STATIC) || !defined(__GNUC__)
#define KVF_API
#else
#define KVF_API __attribute__((visibility("default")))
#endif
#if defined(__GNUC__)
#define KVF_CHECK __attribute__((warn_unused_result))
#else
#define KVF_CHECK
#endif

/* Name, number (never changes), text. */
#define KVF_STATUS_LIST(X)                           \
    X(KVF_OK, 0, "ok")                               \
    X(KVF_E_INVALID, -1, "invalid argument")         \
    X(KVF_E_NO_MEMORY, -2, "out of host memory")     \
    X(KVF_E_NO_BLOCKS, -3, "not enough free blocks") \
    X(KVF_E_STALE, -4, "stale or foreign handle")    \
    X(KVF_E_LIMIT, -5, "configured limit reached")   \
    X(KVF_E_OVERFLOW, -6, "size out of range")       \
    X(KVF_E_IO, -7, "input or output failed")        \
    X(KVF_E_FORMAT, -8, "malformed data")            \
    X(KVF_E_UNSUPPORTED, -9, "not supported")        \
    X(KVF_E_STATE, -10, "call out of order")         \
    X(KVF_E_CORRUPT, -11, "an invariant is broken")  \
    X(KVF_E_NOT_FOUND, -12, "not found")             \
    X(KVF_E_NEVER_FITS, -13, "can never fit")        \
    X(KVF_E_DEVICE, -14, "a device failed")          \
    X(KVF_E_PEER, -15, "another rank failed")        \
    X(KVF_E_TIME, -16, "time limit reached")

typedef enum kvf_status {
#define KVF_STATUS_ENUM(name, number, text) name = number,
    KVF_STATUS_LIST(KVF_STATUS_ENUM)
#undef KVF_STATUS_ENUM
} kvf_status;

/* Detail of a failure: names the thing, its value and the remedy. A call that fails sets all of it, so it need not be
 * initialised. If one field, option or size is at fault, the text is "FIELD VALUE: WHY" ("FIELD: WHY" without a value), and
 * where `need` would do, "FIELD VALUE: WHY give at least NEED". A program that has names and units of its own puts them
 * around WHY: printf("--kv-memory %llu: %.*s", err.have, err.why_bytes, err.text + err.why). */
typedef struct kvf_error {
    char text[480];
    char field[40];          /* "kv_bytes"; "" if it is not one field */
    uint64_t have;           /* the field's value, if it is a count or a size */
    uint64_t need;           /* the nearest value that would do; 0 if it is not one number */
    int32_t rank;            /* of the peer that failed, -1 if none did */
    uint16_t why, why_bytes; /* where WHY lies in text; 0 and 0 without a field */
    uint64_t reserved[4];    /* 0: it does not grow */
} kvf_error;

/** The fixed text of a status; "unknown status" for any other number.
 *  @param status any value.
 *  @own static storage. @threads any. @errors none. @cost O(1), no allocation. */
KVF_API const char *kvf_status_text(kvf_status status);

/** The symbolic name of a status ("KVF_E_NO_BLOCKS"); "KVF_E_?" for any other number.
 *  @param status any value.
 *  @own static storage. @threads any. @errors none. @cost O(1), no allocation. */
KVF_API const char *kvf_status_name(kvf_status status);

/** The version of the linked library, "0.1.0".
 *  @own static storage. @threads any. @errors none. @cost O(1), no allocation. */
KVF_API const char *kvf_version(void);

/** The library's version as a number, to compare with KVF_VERSION_NUMBER of the header: 102 is 0.1.2.
 *  @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_version_number(void);

/* Where an object gets its memory. Set both functions or neither: all zero means
 * aligned_alloc and free. `alloc` returns NULL on failure. `align` is a power of two. */
typedef struct kvf_allocator {
    void *(*alloc)(void *ctx, size_t bytes, size_t align);
    void (*free)(void *ctx, void *p, size_t bytes);
    void *ctx;
} kvf_allocator;

typedef enum kvf_log_level { KVF_LOG_DEBUG = 0, KVF_LOG_INFO = 1, KVF_LOG_WARN = 2 } kvf_log_level;

/* `write` receives one line without its newline. The line is valid only during the call. `write` runs in the thread of the
 * call that logs. It must not call into the object that logs. */
typedef struct kvf_log {
    void (*write)(void *ctx, kvf_log_level level, const char *line);
    void *ctx;
} kvf_log;

typedef enum kvf_dtype { KVF_F32 = 0, KVF_F16 = 1, KVF_BF16 = 2 } kvf_dtype;

/** Bytes of one element; 0 for a value that is not a kvf_dtype.
 *  @param dtype element type.
 *  @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API size_t kvf_dtype_bytes(kvf_dtype dtype);

/* A stream runs kernels, and what a device is given to do while the caller goes on (device.h). On the CPU a kernel is divided among a
 * pool of threads, and the call returns when all its work is done. Results never depend on the number of threads. Every call that
 * takes a stream also accepts NULL: it then runs in the calling thread. */
typedef struct kvf_stream kvf_stream;

/** Creates a CPU stream of the calling thread and n_threads - 1 workers.
 *  @param allocator memory for the stream, NULL for the default.
 *  @param n_threads 1..1024; 0: as many as this process has CPUs to run on.
 *  @param out the stream. @param err detail of a failure, or NULL.
 *  @own the caller, kvf_stream_destroy. @threads one call on a stream at a time.
 *  @errors KVF_E_INVALID, KVF_E_NO_MEMORY (also when a thread cannot be started).
 *  @cost allocates once; starts the threads. */
KVF_API KVF_CHECK kvf_status kvf_stream_create_cpu(const kvf_allocator *allocator, uint32_t n_threads, kvf_stream **out,
                                                   kvf_error *err);

/** Stops the workers and frees the stream; NULL is allowed.
 *  @param stream a stream with no call running.
 *  @own takes the stream. @threads none may use it. @errors none. @cost joins the workers. */
KVF_API void kvf_stream_destroy(kvf_stream *stream);

/** The number of threads, the caller's included; 1 for NULL.
 *  @param stream a stream, or NULL.
 *  @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_stream_n_threads(const kvf_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
