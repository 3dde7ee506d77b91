/* tests/cuda_on_cpu/selftest.cu: kernels with and without faults; the stand-in must find the faults. */
#include "base/cuda/launch.h"

enum { N = 96 };

/* Sum of the block through shared memory; with_barrier 0 leaves the one out that it needs. */
static __global__ void block_sum(const int *in, int *out, int with_barrier) {
    __shared__ int partial[N];
    partial[threadIdx.x] = in[blockIdx.x * N + threadIdx.x];
    if (with_barrier) __syncthreads();
    if (threadIdx.x == N / 2) {
        int sum = 0;
        for (int i = 0; i < N; i++) sum += partial[i];
        out[blockIdx.x] = sum;
    }
}

/* Sum of each warp by shuffles, into dynamic shared memory, then of the warps. */
static __global__ void warp_sum(const int *in, int *out) {
    KVF__DYNAMIC_SHARED(int, sums);
    int x = in[blockIdx.x * N + threadIdx.x];
    for (int bits = 16; bits; bits /= 2) x += __shfl_xor_sync(~0u, x, bits);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int i = 0; i < N / 32; i++) atomicAdd(&out[blockIdx.x], sums[i]);
}

/* Half of the threads wait at another barrier. */
static __global__ void divergent_barrier(unsigned first) {
    if (threadIdx.x < first)
        __syncthreads();
    else
        __syncthreads();
}

/* One lane never comes to the shuffle. */
static __global__ void missing_lane(unsigned missing) {
    if (threadIdx.x != missing) (void)__shfl_sync(~0u, 1, 0);
    __syncthreads();
}

extern "C" cudaError_t selftest_block_sum(const int *in, int *out, unsigned n_blocks, int with_barrier) {
    KVF__LAUNCH(block_sum, dim3(n_blocks), dim3(N), 0, nullptr, in, out, with_barrier);
    return cudaGetLastError();
}

extern "C" cudaError_t selftest_warp_sum(const int *in, int *out, unsigned n_blocks) {
    KVF__LAUNCH(warp_sum, dim3(n_blocks), dim3(N), N / 32 * sizeof(int), nullptr, in, out);
    return cudaGetLastError();
}

extern "C" cudaError_t selftest_fault(int which) {
    if (which == 0) KVF__LAUNCH(divergent_barrier, dim3(1), dim3(N), 0, nullptr, N / 2);
    if (which == 1) KVF__LAUNCH(missing_lane, dim3(1), dim3(N), 0, nullptr, 7);
    if (which == 2) KVF__LAUNCH(missing_lane, dim3(1), dim3(2000), 0, nullptr, 7);
    return cudaGetLastError();
}
