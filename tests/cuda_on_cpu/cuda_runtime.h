// tests/cuda_on_cpu/cuda_runtime.h: CUDA's C++ extensions as a kernel uses them, implemented with one fiber per thread.
#ifndef KVF_TESTS_CUDA_RUNTIME_H
#define KVF_TESTS_CUDA_RUNTIME_H

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __restrict__ __restrict
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// All static shared memory in one section, so that every block of threads starts on poisoned memory.
#define __shared__ static __attribute__((section("cuda_on_cpu_shared")))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

namespace cuda_on_cpu {

enum { MAX_THREADS = 1024, WARP = 32 };

struct Where { // a call in a kernel, by its place
    const char *what, *file;
    int line;
};

// The lane's part of a warp call; combine sees those of all lanes and runs once, when the last lane has come.
struct Exchange {
    void *value;
    int source;
};
using Combine = void (*)(Exchange *const *lanes, uint32_t mask);

extern dim3 grid_dim, block_dim;
extern uint3 block_index, thread_index;
extern unsigned char *dynamic_shared;

unsigned lane();
void barrier(Where where);
void warp_call(uint32_t mask, Where where, Exchange *mine, Combine combine);
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
void run(dim3 grid, dim3 block, size_t shared_bytes, void (*kernel)(void *), void *context);

template <class Kernel> void launch(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, Kernel kernel) {
    run(
        grid, block, shared_bytes, [](void *context) { (*static_cast<Kernel *>(context))(); }, &kernel);
}

template <class T> struct ShuffleValue { T in, out; };

template <class T> T shuffle(uint32_t mask, T value, int source, Where where) {
    ShuffleValue<T> both{value, value};
    Exchange mine{&both, source};
    warp_call(mask, where, &mine, [](Exchange *const *lanes, uint32_t all) {
        for (int i = 0; i < WARP; i++) {
            if (!(all >> i & 1)) continue;
            const int from = lanes[i]->source;
            if (!(all >> from & 1)) fail("shuffle reads lane %d, which is not in mask 0x%08x", from, all);
            static_cast<ShuffleValue<T> *>(lanes[i]->value)->out =
                static_cast<ShuffleValue<T> *>(lanes[from]->value)->in;
        }
    });
    return both.out;
}

} // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::thread_index)
#define blockIdx (cuda_on_cpu::block_index)
#define blockDim (cuda_on_cpu::block_dim)
#define gridDim (cuda_on_cpu::grid_dim)
#define warpSize 32
#define __syncthreads() cuda_on_cpu::barrier({"__syncthreads", __FILE__, __LINE__})
#define KVF__LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    cuda_on_cpu::launch(grid, block, shared_bytes, stream, [=] { kernel(__VA_ARGS__); })
#define KVF__DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(cuda_on_cpu::dynamic_shared)

static inline void __syncwarp(unsigned mask = ~0u, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    cuda_on_cpu::warp_call(mask, {"__syncwarp", file, line}, nullptr, nullptr);
}
template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, const char *file = __builtin_FILE(),
                            int line = __builtin_LINE()) {
    const int base = static_cast<int>(cuda_on_cpu::lane()) & ~(width - 1);
    return cuda_on_cpu::shuffle(mask, value, base | (source & (width - 1)), {"__shfl_sync", file, line});
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, const char *file = __builtin_FILE(),
                                int line = __builtin_LINE()) {
    const int lane = static_cast<int>(cuda_on_cpu::lane()), source = lane ^ bits, end = (lane & ~(width - 1)) + width;
    return cuda_on_cpu::shuffle(mask, value, source >= end ? lane : source, {"__shfl_xor_sync", file, line});
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                                 const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    const int lane = static_cast<int>(cuda_on_cpu::lane()), source = lane + static_cast<int>(delta);
    const int end = (lane & ~(width - 1)) + width;
    return cuda_on_cpu::shuffle(mask, value, source >= end ? lane : source, {"__shfl_down_sync", file, line});
}
template <class T> static inline T atomicAdd(T *p, T value) {
    const T old = *p; // fibers of one thread: nothing runs in between
    *p = old + value;
    return old;
}

#endif
