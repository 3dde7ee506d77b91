// tests/cuda_on_cpu/fibers.cpp: runs the threads of a kernel as fibers, one block of threads at a time.
//
// A thread runs until it waits (barrier, warp call) or ends. Then the next ready thread runs, in the order set. If none is
// ready the launch fails, and the message says which thread waits where.
#include <pthread.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "cuda_on_cpu.h"
#include "cuda_runtime.h"

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64"
#endif
#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#ifndef WITH_ASAN
#define WITH_ASAN 0
#endif
#if WITH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" {
// Where the linker puts __shared__ variables; absent in a program that has none.
extern unsigned char __start_cuda_on_cpu_shared[] __attribute__((weak));
extern unsigned char __stop_cuda_on_cpu_shared[] __attribute__((weak));
// Saves the callee-saved registers on this stack, its pointer in *save, and goes on on the other.
void cuda_on_cpu_switch(void **save, void *to);
}
__asm__(".text\n"
        ".globl cuda_on_cpu_switch\n"
        ".type cuda_on_cpu_switch,@function\n"
        "cuda_on_cpu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
        "ret\n"
        ".size cuda_on_cpu_switch,.-cuda_on_cpu_switch\n"
        ".section .note.GNU-stack,\"\",@progbits\n"
        ".text\n");

namespace cuda_on_cpu {

dim3 grid_dim, block_dim;
uint3 block_index, thread_index;
unsigned char *dynamic_shared;

namespace {

enum State { READY, AT_BARRIER, IN_WARP_CALL, DONE };
enum { STACK_BYTES = 256 << 10, GUARD_BYTES = 4096, MAX_SHARED_BYTES = 227 << 10 };

struct Fiber {
    void *sp, *stack; // the stack belongs to this fiber for the life of the program
    void *asan;       // what ASan keeps of it while another one runs
    unsigned id;
    State state;
    Where where;
    uint32_t mask;
    Exchange *exchange;
};

Fiber fibers[MAX_THREADS], main_fiber, *current;
#if WITH_ASAN
size_t main_stack_bytes;
#endif
unsigned n_threads, n_alive, n_at_barrier;
Where barrier_where;
uint32_t warp_here[MAX_THREADS / WARP], warp_gone[MAX_THREADS / WARP];
void (*kernel)(void *);
void *kernel_context;
char error_text[600];
cudaError_t last_error;
cuda_on_cpu_order order;
uint64_t seed = 1, random_state;
uint64_t threads_run;
std::mutex launch_lock; // programs with several ranks in threads launch one after the other

bool same(const Where &a, const Where &b) { return a.line == b.line && !strcmp(a.file, b.file); }

Fiber *pick() {
    unsigned from = 0;
    if (order == CUDA_ON_CPU_RANDOM) {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        from = static_cast<unsigned>(random_state % n_threads);
    } else if (current != &main_fiber) {
        from = order == CUDA_ON_CPU_ASCENDING ? current->id + 1 : current->id + n_threads - 1;
    } else if (order == CUDA_ON_CPU_DESCENDING) {
        from = n_threads - 1;
    }
    const unsigned step = order == CUDA_ON_CPU_DESCENDING ? n_threads - 1 : 1;
    for (unsigned i = 0; i < n_threads; i++) {
        Fiber *fiber = &fibers[(from + i * step) % n_threads];
        if (fiber->state == READY) return fiber;
    }
    return nullptr;
}

void go(Fiber *to) {
    Fiber *from = current;
    current = to;
    if (to != &main_fiber) {
        const unsigned id = to->id;
        thread_index = {id % block_dim.x, id / block_dim.x % block_dim.y, id / (block_dim.x * block_dim.y)};
    }
#if WITH_ASAN
    const size_t bytes = to == &main_fiber ? main_stack_bytes : static_cast<size_t>(STACK_BYTES);
    __sanitizer_start_switch_fiber(from->state == DONE && from != &main_fiber ? nullptr : &from->asan, to->stack,
                                   bytes);
#endif
    cuda_on_cpu_switch(&from->sp, to->sp);
#if WITH_ASAN
    __sanitizer_finish_switch_fiber(from->asan, nullptr, nullptr);
#endif
}

// Nobody can run: who waits where, runs of equal threads together.
[[noreturn]] void deadlock() {
    char *out = error_text, *end = error_text + sizeof error_text;
    out += snprintf(out, 100, "deadlock in block (%u,%u,%u):", block_index.x, block_index.y, block_index.z);
    for (unsigned i = 0, j; i < n_threads && end - out > 200; i = j) {
        const Fiber &f = fibers[i];
        for (j = i + 1; j < n_threads; j++)
            if (fibers[j].state != f.state || (f.state != DONE && !same(fibers[j].where, f.where))) break;
        if (f.state == DONE)
            out += snprintf(out, 150, " [%u..%u have ended]", i, j - 1);
        else
            out += snprintf(out, 150, " [%u..%u wait in %s at line %d]", i, j - 1, f.where.what, f.where.line);
    }
    go(&main_fiber);
    abort();
}

void wait() {
    Fiber *next = pick();
    if (!next) deadlock();
    if (next != current) go(next);
}

void release_barrier() {
    n_at_barrier = 0;
    for (unsigned i = 0; i < n_threads; i++)
        if (fibers[i].state == AT_BARRIER) fibers[i].state = READY;
}

[[noreturn]] void fiber_main() {
#if WITH_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    kernel(kernel_context);
    Fiber *me = current;
    me->state = DONE;
    n_alive--;
    warp_gone[me->id / WARP] |= 1u << me->id % WARP;
    if (n_at_barrier && n_at_barrier == n_alive) release_barrier(); // a thread that has ended is not waited for
    Fiber *next = n_alive ? pick() : &main_fiber;
    if (!next) deadlock();
    go(next);
    abort();
}

void prepare(Fiber *fiber, unsigned id) {
    if (!fiber->stack) {
        void *p = mmap(nullptr, STACK_BYTES + GUARD_BYTES, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, GUARD_BYTES, PROT_NONE)) abort();
        fiber->stack = static_cast<unsigned char *>(p) + GUARD_BYTES;
    }
    void **top = reinterpret_cast<void **>(static_cast<unsigned char *>(fiber->stack) + STACK_BYTES);
#if WITH_ASAN // the last thread that had this stack left it in go, and go's red zones with it
    __asan_unpoison_memory_region(static_cast<unsigned char *>(fiber->stack) + STACK_BYTES - GUARD_BYTES, GUARD_BYTES);
#endif
    *--top = nullptr; // fiber_main's return address, so that it begins as after a call
    *--top = reinterpret_cast<void *>(fiber_main);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber->sp = top;
    fiber->asan = nullptr;
    fiber->id = id;
    fiber->state = READY;
}

#if WITH_ASAN
__attribute__((no_sanitize("address"))) // variables in the section have red zones between them
#endif
void poison_static_shared() {
    for (unsigned char *p = __start_cuda_on_cpu_shared; p && p < __stop_cuda_on_cpu_shared; p++) {
        *p = 0xff;
        __asm__ volatile("" ::: "memory"); // no memset, which ASan would check
    }
}

void run_block(size_t shared_bytes) {
    n_alive = n_threads;
    n_at_barrier = 0;
    memset(warp_here, 0, sizeof warp_here);
    memset(warp_gone, 0, sizeof warp_gone);
    memset(dynamic_shared, 0xff, shared_bytes);
    poison_static_shared();
    for (unsigned i = 0; i < n_threads; i++) prepare(&fibers[i], i);
    threads_run += n_threads;
    go(pick());
}

} // namespace

unsigned lane() { return current->id % WARP; }

void fail(const char *format, ...) {
    const Where &w = current->where;
    int n = snprintf(error_text, 200, "block (%u,%u,%u) thread %u, %s at line %d: ", block_index.x, block_index.y,
                     block_index.z, current->id, w.what, w.line);
    va_list args;
    va_start(args, format);
    vsnprintf(error_text + n, sizeof error_text - static_cast<size_t>(n), format, args);
    va_end(args);
    go(&main_fiber);
    abort();
}

void barrier(Where where) {
    current->where = where;
    current->state = AT_BARRIER;
    if (!n_at_barrier++)
        barrier_where = where;
    else if (!same(where, barrier_where))
        fail("others wait at the barrier of line %d", barrier_where.line);
    if (n_at_barrier == n_alive) release_barrier();
    wait();
}

void warp_call(uint32_t mask, Where where, Exchange *mine, Combine combine) {
    Fiber *me = current;
    const unsigned warp = me->id / WARP, first = warp * WARP, n_lanes = n_threads - first;
    if (n_lanes < WARP) mask &= (1u << n_lanes) - 1;
    me->where = where;
    me->mask = mask;
    me->exchange = mine;
    me->state = IN_WARP_CALL;
    if (!(mask >> lane() & 1)) fail("the calling lane is not in mask 0x%08x", mask);
    if (mask & warp_gone[warp]) fail("lanes 0x%08x of its mask have ended", mask & warp_gone[warp]);
    warp_here[warp] |= 1u << lane();
    if ((warp_here[warp] & mask) == mask) {
        Exchange *lanes[WARP] = {};
        for (unsigned i = 0; i < WARP; i++) {
            if (!(mask >> i & 1)) continue;
            const Fiber &other = fibers[first + i];
            if (other.mask != mask) fail("mask 0x%08x, but lane %u came with 0x%08x", mask, i, other.mask);
            if (!same(other.where, where)) fail("lane %u is in %s at line %d", i, other.where.what, other.where.line);
            lanes[i] = other.exchange;
        }
        if (combine) combine(lanes, mask);
        warp_here[warp] &= ~mask;
        for (unsigned i = 0; i < WARP; i++)
            if (mask >> i & 1) fibers[first + i].state = READY;
    }
    wait();
}

void run(dim3 grid, dim3 block, size_t shared_bytes, void (*function)(void *), void *context) {
    std::lock_guard<std::mutex> guard(launch_lock);
    error_text[0] = 0;
    const uint64_t n_blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
    const uint64_t per_block = static_cast<uint64_t>(block.x) * block.y * block.z;
    if (!n_blocks || !per_block || per_block > MAX_THREADS || shared_bytes > MAX_SHARED_BYTES) {
        snprintf(error_text, sizeof error_text, "invalid configuration");
        last_error = cudaErrorInvalidConfiguration;
        return;
    }
    n_threads = static_cast<unsigned>(per_block);
    grid_dim = grid;
    block_dim = block;
    kernel = function;
    kernel_context = context;
    random_state = seed * 0x9e3779b97f4a7c15u | 1;
    dynamic_shared = static_cast<unsigned char *>(malloc(shared_bytes ? shared_bytes : 1));
    if (!dynamic_shared) abort();
#if WITH_ASAN
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &main_fiber.stack, &main_stack_bytes);
    pthread_attr_destroy(&attributes);
#endif
    current = &main_fiber;
    for (uint64_t i = 0; i < n_blocks && !error_text[0]; i++) {
        const uint64_t at = order == CUDA_ON_CPU_DESCENDING ? n_blocks - 1 - i : i;
        block_index = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                       static_cast<unsigned>(at / grid.x / grid.y)};
        run_block(shared_bytes);
    }
    free(dynamic_shared);
    dynamic_shared = nullptr;
    if (!error_text[0]) return;
    last_error = cudaErrorLaunchFailure;
#if WITH_ASAN // the fibers that were given up have left red zones on their stacks
    for (unsigned i = 0; i < n_threads; i++) __asan_unpoison_memory_region(fibers[i].stack, STACK_BYTES);
#endif
}

} // namespace cuda_on_cpu

extern "C" {

void cuda_on_cpu_set_order(cuda_on_cpu_order new_order, uint64_t new_seed) {
    cuda_on_cpu::order = new_order;
    cuda_on_cpu::seed = new_seed;
}
const char *cuda_on_cpu_error(void) { return cuda_on_cpu::error_text; }
uint64_t cuda_on_cpu_n_threads(void) { return cuda_on_cpu::threads_run; }

cudaError_t cudaGetDeviceCount(int *n) {
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaMalloc(void **p, size_t bytes) {
    *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *p) {
    free(p);
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidConfiguration; }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    return cudaMalloc(reinterpret_cast<void **>(stream), 1);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaFree(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    memcpy(dst, src, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *dst, int byte, size_t bytes, cudaStream_t) {
    memset(dst, byte, bytes);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    return cudaMalloc(reinterpret_cast<void **>(event), 1);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaFree(event); }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaGetLastError(void) {
    const cudaError_t e = cuda_on_cpu::last_error;
    cuda_on_cpu::last_error = cudaSuccess;
    return e;
}
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess                 ? "no error"
           : error == cudaErrorMemoryAllocation ? "out of memory"
                                                : cuda_on_cpu::error_text;
}

} // extern "C"
