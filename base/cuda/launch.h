/* base/cuda/launch.h: what every kernel source includes; the one place that knows how a kernel is launched.
 * <cuda_runtime.h> is CUDA's, or in the test build the stand-in of tests/cuda_on_cpu/, which brings its own launch. */
#ifndef KVF_BASE_CUDA_LAUNCH_H
#define KVF_BASE_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#ifndef KVF__LAUNCH
#define KVF__LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#endif

#endif
