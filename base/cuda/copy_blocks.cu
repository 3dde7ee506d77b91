/* Runs a copy list on the device: K, V, slot metadata and score pages. */
#include "base/copy_index.h"
#include "base/cuda/launch.h"

enum { THREADS = 256, SLICES = 4 }; /* SLICES thread blocks divide the vectors of one copy */

/* No copy reads what another one writes: the manager pins both ends until the list is done. */
static __global__ void __launch_bounds__(THREADS) copy_blocks(const kvf__copy_params p) {
    const kvf_copy item = p.items[blockIdx.x];
    const int is_block = item.kind == KVF_COPY_BLOCK;
    const int end = is_block ? KVF__PLANE_SCORES : KVF__N_PLANES;
    for (int i = is_block ? 0 : KVF__PLANE_SCORES; i < end; i++) {
        const kvf__copy_plane plane = p.planes[i];
        if (!plane.base) continue;
        const unsigned char *src = plane.base + kvf__block_at(item.src, plane.block_stride);
        unsigned char *dst = plane.base + kvf__block_at(item.dst, plane.block_stride);
        const uint32_t n = kvf__copy_n_vectors(&plane, item.n_slots);
        for (uint32_t j = blockIdx.y * blockDim.x + threadIdx.x; j < n; j += gridDim.y * blockDim.x) {
            const uint64_t at = kvf__copy_offset(&plane, item.n_slots, j);
            *(uint4 *)(dst + at) = *(const uint4 *)(src + at);
        }
    }
}

/* Reads and writes 2 * n_slots * heads * head_dim elements and the metadata of each block once. */
extern "C" cudaError_t kvf__cuda_copy_blocks(const kvf__copy_params *params, cudaStream_t stream) {
    KVF__LAUNCH(copy_blocks, dim3(params->n_items, SLICES), dim3(THREADS), 0, stream, *params);
    return cudaGetLastError();
}
