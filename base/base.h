/* base/base.h: helpers that every folder may use: errors, memory, checked sizes, threads, fp16 and bf16, clock.
 * Internal: exported from libkvfold only so that libkvfold_engine can use it. */
#ifndef KVF_BASE_BASE_H
#define KVF_BASE_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

#include "kvfold/base.h"
#include "kvfold/device.h"

#define KVF__CACHE_LINE 64u
#define KVF__MIN(a, b) ((a) < (b) ? (a) : (b))
#define KVF__MAX(a, b) ((a) > (b) ? (a) : (b))

/* error.c. */
extern const kvf_error kvf__no_error;
/* Each writes the detail and returns the status, so that a check is one line. err may be NULL. */
kvf_status kvf__fail(kvf_error *err, kvf_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* One field, option or size is at fault: the text is "FIELD VALUE: " and the format, which names in C's words no field that
 * the command has another name for. have: the value; need: the nearest that would do, 0 where it is not one number. */
kvf_status kvf__fail_field(kvf_error *err, kvf_status status, const char *field, uint64_t have, uint64_t need,
                           const char *format, ...) __attribute__((format(printf, 6, 7)));
/* The same, and " give at least NEED" behind it. */
kvf_status kvf__fail_size(kvf_error *err, kvf_status status, const char *field, uint64_t have, uint64_t need,
                          const char *format, ...) __attribute__((format(printf, 6, 7)));
/* The same with a value that is no count; "" for none. */
kvf_status kvf__fail_value(kvf_error *err, kvf_status status, const char *field, const char *value, const char *format,
                           ...) __attribute__((format(printf, 5, 6)));
kvf_status kvf__fail_real(kvf_error *err, kvf_status status, const char *field, double value, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* The same failure, of a call below. */
kvf_status kvf__fail_as(kvf_error *err, kvf_status status, const kvf_error *why);

/* Writes one line, cut at 511 bytes, to the log. Does nothing if the log has no `write`. */
void kvf__log(const kvf_log *log, kvf_log_level level, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The caller's allocator, or the default one. An allocator with only one of its functions is an error. */
kvf_status kvf__allocator_resolve(const kvf_allocator *in, kvf_allocator *out, kvf_error *err);
/* KVF__CACHE_LINE aligned, zeroed. With the default allocator, pages of large memory are allocated only when written. */
void *kvf__alloc(const kvf_allocator *a, size_t bytes);
/* An allocator that counts into *bytes what `inner` has given out. */
typedef struct kvf__counted {
    kvf_allocator inner;
    uint64_t *bytes;
} kvf__counted;
kvf_allocator kvf__counted_allocator(kvf__counted *counted); /* which must outlive what it gives out */
/* Asks for small pages in [p, p + bytes), of which only a little will be written, in scattered places. */
void kvf__sparse(void *p, size_t bytes);
/* Gives the system back what [p, p + bytes) takes, if it is large and comes from the default allocator. Then its contents are lost. */
bool kvf__give_back(const kvf_allocator *a, void *p, size_t bytes);
void kvf__free(const kvf_allocator *a, void *p, size_t bytes);

/* Reads a config struct that may come from an older or newer version: copies struct_size bytes into dst (full_size
 * bytes) and fills the rest with zeros. A longer struct is refused unless its rest is zero. what: the struct's name. */
kvf_status kvf__config_read(void *dst, size_t full_size, const void *src, const char *what, kvf_error *err);
/* Fills a caller's input struct with defaults, in at most struct_size bytes. */
void kvf__init(void *dst, size_t struct_size, const void *defaults, size_t full_size);
/* A caller's output struct: whether it is there and its struct_size is set; its fields, in at most struct_size bytes. */
bool kvf__output_is_valid(const void *out);
void kvf__output(void *out, const void *value, size_t full_size);
/* The i-th element of a caller's array whose elements have `bytes` bytes there, full_size here. */
static inline void kvf__element(void *array, size_t i, size_t bytes, const void *value, size_t full_size) {
    memcpy((char *)array + i * bytes, value, KVF__MIN(bytes, full_size));
}

/* Bytes of the well-formed UTF-8 sequence at text (RFC 3629: no surrogates, no overlong forms); 0 if it is broken, n is 0, or n cuts it
 * off. In the last case *cut (may be NULL) is set to true. */
size_t kvf__utf8_length(const char *text, size_t n, bool *cut);
/* The offset of the first byte that is not UTF-8, n when all is. */
size_t kvf__utf8_valid(const char *text, size_t n);
/* Writes text to out (3 n bytes) with every invalid byte as U+FFFD. Returns the bytes written, or with out NULL the bytes needed. */
size_t kvf__utf8_clean(const char *text, size_t n, char *out);

/* Checked arithmetic: false if the result would wrap (out is then untouched). */
static inline bool kvf__mul(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_mul_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}
static inline bool kvf__add(size_t a, size_t b, size_t *out) {
    size_t r;
    if (__builtin_add_overflow(a, b, &r)) return false;
    *out = r;
    return true;
}
static inline uint32_t kvf__ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

/* Lays several arrays out in one allocation. Run it twice: with base NULL to learn the size, then with the memory.
 * Every array starts on a cache line. bad is set if a size wraps; check it at the end. */
typedef struct kvf__slab {
    unsigned char *base;
    size_t used;
    bool bad;
} kvf__slab;
void *kvf__slab_take(kvf__slab *s, size_t n, size_t element_bytes);

/* Runs fn(ctx, item, thread) for every item in [0, n); thread < kvf_stream_n_threads. Items start in ascending order,
 * one at a time per thread. Returns when all are done. stream NULL: all run in the calling thread. */
typedef void (*kvf__item_fn)(void *ctx, uint32_t item, uint32_t thread);
void kvf__stream_for(kvf_stream *stream, uint32_t n, kvf__item_fn fn, void *ctx);

/* The caller's device, or the CPU if there is none. A device that lacks a function is an error. */
kvf_status kvf__device_resolve(const kvf_device *in, kvf_device *out, kvf_error *err);

/* IEEE half. Rounds to nearest even; overflow gives infinity; NaN stays NaN. */
uint16_t kvf__f16_from_f32(float x);
float kvf__f32_from_f16(uint16_t h);

/* bfloat16: the upper half of an fp32. Rounds to nearest even; NaN stays NaN. */
static inline uint16_t kvf__bf16_from_f32(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
static inline float kvf__f32_from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Conversion from and to a 2-byte dtype. */
static inline float kvf__widen(kvf_dtype dtype, uint16_t h) {
    return dtype == KVF_F16 ? kvf__f32_from_f16(h) : kvf__f32_from_bf16(h);
}
static inline uint16_t kvf__narrow(kvf_dtype dtype, float x) {
    return dtype == KVF_F16 ? kvf__f16_from_f32(x) : kvf__bf16_from_f32(x);
}

/* Instruction sets that the CPU has and whose registers the operating system saves. */
typedef struct kvf__cpu {
    bool avx2_fma_f16c;
    bool avx512;      /* F, BW, VL, DQ */
    bool avx512_vnni; /* and avx512 */
    bool avx_vnni;    /* and avx2_fma_f16c */
} kvf__cpu;
kvf__cpu kvf__cpu_detect(void);

/* Monotonic seconds. */
double kvf__clock(void);

#endif
