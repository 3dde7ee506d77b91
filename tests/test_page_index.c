/* Addresses in pools beyond 2^32 slots and bytes (base/page_index.h), against plain 128-bit arithmetic. No memory is touched. */
#include <criterion/criterion.h>

#include "base/page_index.h"

__extension__ typedef unsigned __int128 wide;

Test(page_index, offsets_are_of_64_bits) {
    const uint32_t heads[] = {1, 8, 64}, sizes[] = {8, 16, 256}, dims[] = {8, 128, 256};
    const uint64_t blocks[] = {0, 1, (1u << 24) + 3, (1u << 31) - 1, UINT32_MAX - 1};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 5; j++)
            for (int f32 = 0; f32 < 2; f32++) {
                uint32_t hpg = heads[i], bs = sizes[i], d = dims[i], head = hpg - 1, slot = bs - 1, bytes = f32 ? 4 : 2;
                kvf_pages p = {.struct_size = sizeof p,
                               .dtype = f32 ? KVF_F32 : KVF_F16,
                               .block_size = bs,
                               .heads_per_group = hpg,
                               .head_dim = d,
                               .k_block_stride = (uint64_t)hpg * bs * d * bytes,
                               .v_block_stride = (uint64_t)hpg * bs * d * bytes + 64};
                wide meta = ((wide)blocks[j] * hpg + head) * bs + slot;
                wide row = ((wide)head * bs + slot) * d * bytes;
                cr_assert_eq(kvf__meta_at(&p, blocks[j], head, slot), (uint64_t)meta);
                cr_assert_eq(kvf__row_at(&p, p.k_block_stride, blocks[j], head, slot),
                             (uint64_t)((wide)blocks[j] * p.k_block_stride + row));
                cr_assert_eq(kvf__row_at(&p, p.v_block_stride, blocks[j], head, slot),
                             (uint64_t)((wide)blocks[j] * p.v_block_stride + row));
                kvf_score_pages s = {.struct_size = sizeof s, .n_arrays = 8, .heads_per_group = hpg, .block_size = bs};
                wide score = (((wide)blocks[j] * 8 + 7) * hpg + head) * bs + slot;
                cr_assert_eq(kvf__score_index(&s, blocks[j], 7, head, slot), (uint64_t)score);
            }
    const kvf_view v = {.n_layers = 1024, .n_groups = 1024};
    cr_assert_eq(kvf__view_table(&v, 65535, 1023, 1023), (uint64_t)65536 * 1024 * 1024 - 1);
}
