/* Runs copies of blocks: K, V, slot metadata and score pages, within the device's memory or to and from pinned CPU memory. */
#include "base/copy_index.h"
#include "base/cuda/launch.h"

enum { THREADS = 256, SLICES = 4 }; /* SLICES thread blocks divide the vectors of one copy */

/* No copy reads or writes what another one writes (kvf_block_copies). p.items: in memory that the device can read. */
static __global__ void __launch_bounds__(THREADS) copy_blocks(const kvf_block_copies p) {
    const kvf_copy item = p.items[blockIdx.x];
    const int from = kvf__copy_from(item.kind), to = kvf__copy_to(item.kind);
    for (int i = kvf__copy_first_plane(item.kind); i < kvf__copy_end_plane(item.kind); i++) {
        const kvf_copy_plane plane = p.planes[i];
        if (!plane.base[from]) continue;
        const unsigned char *src = kvf__copy_at(&plane, from, item.src);
        unsigned char *dst = kvf__copy_at(&plane, to, item.dst);
        const uint32_t row_vectors = kvf__copy_row_vectors(&plane, item.n_slots), n = plane.n_rows * row_vectors;
        for (uint32_t j = blockIdx.y * blockDim.x + threadIdx.x; j < n; j += gridDim.y * blockDim.x) {
            const uint64_t at = kvf__copy_offset(&plane, row_vectors, j);
            *(uint4 *)(dst + at) = *(const uint4 *)(src + at);
        }
    }
}

/* One launch for all. Reads and writes 2 * n_slots * heads * head_dim elements and the metadata of each block once. */
extern "C" cudaError_t kvf__cuda_copy_blocks(const kvf_block_copies *copies, cudaStream_t stream) {
    KVF__LAUNCH(copy_blocks, dim3(copies->n_items, SLICES), dim3(THREADS), 0, stream, *copies);
    return cudaGetLastError();
}
