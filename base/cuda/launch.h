/* base/cuda/launch.h: included by every kernel source; defines how a kernel is launched.
 * <cuda_runtime.h> is CUDA's own. In the test build it is the substitute in tests/cuda_on_cpu/, which defines its own
 * KVF__LAUNCH. */
#ifndef KVF_BASE_CUDA_LAUNCH_H
#define KVF_BASE_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#ifndef KVF__LAUNCH
#define KVF__LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#endif

#endif
