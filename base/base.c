/* Status texts, memory, configs, fp16, CPU features, clock. */
#define _DEFAULT_SOURCE
#include "base/base.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

const char *kvf_status_text(kvf_status status) {
    switch (status) {
#define TEXT(name, number, text) \
    case name: return text;
        KVF_STATUS_LIST(TEXT)
#undef TEXT
    }
    return "unknown status";
}

const char *kvf_status_name(kvf_status status) {
    switch (status) {
#define NAME(name, number, text) \
    case name: return #name;
        KVF_STATUS_LIST(NAME)
#undef NAME
    }
    return "KVF_E_?";
}

size_t kvf_dtype_bytes(kvf_dtype dtype) { return dtype == KVF_F32 ? 4 : dtype == KVF_F16 || dtype == KVF_BF16 ? 2 : 0; }

void kvf__log(const kvf_log *log, kvf_log_level level, const char *format, ...) {
    char line[512];
    va_list args;
    if (!log->write) return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    log->write(log->ctx, level, line);
}

/* Large allocations ask for huge pages: the first touch costs one page fault per 2 MiB instead of one per 4 KiB, and kernels
 * that stream the memory have fewer TLB misses. */
enum { HUGE_PAGE = 2 << 20, LAZY_BYTES = 1 << 20 };

static void *default_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    size_t rounded;
    if (bytes >= 2 * HUGE_PAGE && align < HUGE_PAGE) align = HUGE_PAGE;
    if (!kvf__add(bytes, align - 1, &rounded)) return NULL;
    rounded = rounded / align * align;
    void *p = aligned_alloc(align, rounded);
    if (p && align == HUGE_PAGE) (void)madvise(p, rounded, MADV_HUGEPAGE); /* a hint: it may fail */
    return p;
}

static void default_free(void *ctx, void *p, size_t bytes) {
    (void)ctx;
    (void)bytes;
    free(p);
}

kvf_status kvf__allocator_resolve(const kvf_allocator *in, kvf_allocator *out, kvf_error *err) {
    if (in && (in->alloc == NULL) != (in->free == NULL))
        return kvf__fail(err, KVF_E_INVALID, "allocator: alloc and free must both be set, or neither");
    if (in && in->alloc)
        *out = *in;
    else
        *out = (kvf_allocator){default_alloc, default_free, NULL};
    return KVF_OK;
}

/* Finds the whole pages within [p, p + bytes). False if bytes is under two pages or the page size is unknown. */
static bool whole_pages(void *p, size_t bytes, unsigned char **begin, size_t *n) {
    long page = sysconf(_SC_PAGESIZE);
    if (page <= 0 || bytes < 2 * (size_t)page) return false;
    size_t mask = (size_t)page - 1, skip = (size_t) - (uintptr_t)p & mask;
    *begin = (unsigned char *)p + skip;
    *n = (bytes - skip) & ~mask;
    return true;
}

static void *counted_alloc(void *ctx, size_t bytes, size_t align) {
    kvf__counted *c = ctx;
    void *p = c->inner.alloc(c->inner.ctx, bytes, align);
    if (p) *c->bytes += bytes;
    return p;
}

static void counted_free(void *ctx, void *p, size_t bytes) {
    kvf__counted *c = ctx;
    if (p) *c->bytes -= bytes;
    c->inner.free(c->inner.ctx, p, bytes);
}

kvf_allocator kvf__counted_allocator(kvf__counted *c) { return (kvf_allocator){counted_alloc, counted_free, c}; }

static bool is_default(const kvf_allocator *a) {
    if (a->alloc == counted_alloc) a = &((kvf__counted *)a->ctx)->inner;
    return a->alloc == default_alloc;
}

/* Zeroes memory by giving its pages back to the system. They read as zeros and take memory only when they are written, so
 * arrays sized for the largest case cost only what is written. This is valid only for memory of the default allocator. */
static bool zero_lazily(const kvf_allocator *a, void *p, size_t bytes) {
    unsigned char *begin;
    size_t n;
    if (!is_default(a) || bytes < LAZY_BYTES || !whole_pages(p, bytes, &begin, &n)) return false;
    if (madvise(begin, n, MADV_DONTNEED)) return false; /* fails for locked memory, for instance */
    size_t before = (size_t)(begin - (unsigned char *)p);
    memset(p, 0, before);
    memset(begin + n, 0, bytes - before - n);
    return true;
}

void *kvf__alloc(const kvf_allocator *a, size_t bytes) {
    void *p = a->alloc(a->ctx, bytes ? bytes : 1, KVF__CACHE_LINE);
    if (p && !zero_lazily(a, p, bytes)) memset(p, 0, bytes ? bytes : 1);
    return p;
}

void kvf__sparse(void *p, size_t bytes) {
    unsigned char *begin;
    size_t n;
    if (whole_pages(p, bytes, &begin, &n)) (void)madvise(begin, n, MADV_NOHUGEPAGE); /* a hint: it may fail */
}

bool kvf__give_back(const kvf_allocator *a, void *p, size_t bytes) {
    unsigned char *begin;
    size_t n;
    return is_default(a) && bytes >= LAZY_BYTES && whole_pages(p, bytes, &begin, &n) &&
           !madvise(begin, n, MADV_DONTNEED);
}

void kvf__free(const kvf_allocator *a, void *p, size_t bytes) {
    if (p) a->free(a->ctx, p, bytes ? bytes : 1);
}

kvf_status kvf__config_read(void *dst, size_t full_size, const void *src, const char *what, kvf_error *err) {
    size_t given;
    if (!src) return kvf__fail(err, KVF_E_INVALID, "%s: is NULL", what);
    if (!dst) return kvf__fail(err, KVF_E_INVALID, "%s: the copy to be filled is NULL", what);
    memcpy(&given, src, sizeof given);
    if (given < sizeof given)
        return kvf__fail(err, KVF_E_INVALID, "%s: struct_size %zu: set it to sizeof(%s), or call its init function",
                         what, given, what);
    const unsigned char *bytes = src;
    for (size_t i = full_size; i < given; i++)
        if (bytes[i])
            return kvf__fail(err, KVF_E_UNSUPPORTED,
                             "%s: struct_size %zu: a field past byte %zu is set that this version does not know", what,
                             given, full_size);
    memset(dst, 0, full_size);
    memcpy(dst, src, KVF__MIN(given, full_size));
    return KVF_OK;
}

void kvf__init(void *dst, size_t struct_size, const void *defaults, size_t full_size) {
    if (!dst || struct_size < sizeof struct_size) return;
    memset(dst, 0, struct_size);
    memcpy(dst, defaults, KVF__MIN(struct_size, full_size));
    memcpy(dst, &struct_size, sizeof struct_size);
}

bool kvf__output_is_valid(const void *out) {
    size_t given = 0;
    if (out) memcpy(&given, out, sizeof given);
    return given >= sizeof given;
}

void kvf__output(void *out, const void *value, size_t full_size) {
    size_t given;
    memcpy(&given, out, sizeof given);
    memcpy((char *)out + sizeof given, (const char *)value + sizeof given, KVF__MIN(given, full_size) - sizeof given);
}

void *kvf__slab_take(kvf__slab *s, size_t n, size_t element_bytes) {
    size_t bytes, end;
    if (s->bad || !kvf__mul(n, element_bytes, &bytes) || !kvf__add(bytes, KVF__CACHE_LINE - 1, &bytes) ||
        !kvf__add(s->used, bytes / KVF__CACHE_LINE * KVF__CACHE_LINE, &end)) {
        s->bad = true;
        return NULL;
    }
    void *p = s->base ? s->base + s->used : NULL;
    s->used = end;
    return p;
}

uint16_t kvf__f16_from_f32(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t sign = (u >> 16) & 0x8000u;
    uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more */
    if (a < 0x33000001u) return (uint16_t)sign;              /* at most half the smallest subnormal */
    uint32_t e = a >> 23, m = (a & 0x7fffffu) | 0x800000u;
    uint32_t shift = e < 113 ? 126 - e : 13; /* subnormal results shift further */
    uint32_t h = m >> shift, rest = m & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (h & 1))) h++;
    if (e >= 113) h += (e - 113) << 10; /* the hidden bit adds the first exponent step */
    return (uint16_t)(sign | h);
}

float kvf__f32_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu, u;
    if (e == 31) {
        u = sign | 0x7f800000u | (m << 13);
    } else if (e) {
        u = sign | ((e + 112) << 23) | (m << 13);
    } else if (m) {
        uint32_t shift = (uint32_t)__builtin_clz(m) - 21;
        u = sign | ((113 - shift) << 23) | ((m << (13 + shift)) & 0x7fffffu);
    } else {
        u = sign;
    }
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static kvf__cpu ask_cpu(void) {
    kvf__cpu c = {.avx2_fma_f16c = false};
#if defined(__x86_64__)
    unsigned a, b, ecx = 0, d;
    __builtin_cpu_init(); /* also checks that the operating system saves the wide registers */
    bool f16c = __get_cpuid(1, &a, &b, &ecx, &d) && (ecx & bit_F16C); /* clang has no builtin for it */
    c.avx2_fma_f16c = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    c.avx512 = c.avx2_fma_f16c && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    c.avx512_vnni = c.avx512 && __builtin_cpu_supports("avx512vnni");
    unsigned eax = 0;
    c.avx_vnni = c.avx2_fma_f16c && __get_cpuid_count(7, 1, &eax, &b, &ecx, &d) && (eax >> 4 & 1);
#endif
    return c;
}

/* CPUID runs once and its answer is kept: under a hypervisor each CPUID traps and takes microseconds, and every kernel call
 * needs the answer. The answer is the same for all callers, so this is no global state that one could observe. */
kvf__cpu kvf__cpu_detect(void) {
    static atomic_uint known; /* 0: not asked yet; else bit 0 is set and the answers are in the bits above */
    unsigned bits = atomic_load_explicit(&known, memory_order_relaxed);
    if (!bits) {
        kvf__cpu c = ask_cpu();
        bits = 1u | (c.avx2_fma_f16c ? 2u : 0u) | (c.avx512 ? 4u : 0u) | (c.avx512_vnni ? 8u : 0u) |
               (c.avx_vnni ? 16u : 0u);
        atomic_store_explicit(&known, bits, memory_order_relaxed);
    }
    return (kvf__cpu){.avx2_fma_f16c = (bits & 2u) != 0,
                      .avx512 = (bits & 4u) != 0,
                      .avx512_vnni = (bits & 8u) != 0,
                      .avx_vnni = (bits & 16u) != 0};
}

double kvf__clock(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
