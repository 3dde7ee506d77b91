/* bfloat16: rounding, and that every path of the policies converts alike. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "d2o_policy/cpu/kernels.h"

static float of_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

Test(bf16, every_value_comes_back) {
    for (uint32_t h = 0; h < 65536; h++) {
        float x = kvf__f32_from_bf16((uint16_t)h);
        if (isnan(x))
            cr_assert(isnan(kvf__f32_from_bf16(kvf__bf16_from_f32(x))), "%04x", h);
        else
            cr_assert_eq(kvf__bf16_from_f32(x), h, "%04x", h);
    }
    cr_assert_eq(kvf_dtype_bytes(KVF_BF16), 2);
}

/* Halfway between two neighbours goes to the even one, of both signs, subnormal ones and the step to infinity too. */
Test(bf16, rounds_to_nearest_even) {
    for (uint32_t h = 0; h < 0xff80; h++) {
        if ((h & 0x7fff) >= 0x7f80) continue;
        uint32_t half = h << 16 | 0x8000;
        cr_assert_eq(kvf__bf16_from_f32(of_bits(half - 1)), h, "%04x", h);
        cr_assert_eq(kvf__bf16_from_f32(of_bits(half)), h + (h & 1), "%04x", h);
        cr_assert_eq(kvf__bf16_from_f32(of_bits(half + 1)), h + 1, "%04x", h);
    }
}

Test(bf16, nan_stays_nan) {
    for (uint32_t m = 1; m < 0x800000; m += 0x101) {
        cr_assert(isnan(kvf__f32_from_bf16(kvf__bf16_from_f32(of_bits(0x7f800000u | m)))), "%x", m);
        cr_assert(isnan(kvf__f32_from_bf16(kvf__bf16_from_f32(of_bits(0xff800000u | m)))), "%x", m);
    }
}

#if defined(__x86_64__)
Test(bf16, policy_paths_store_and_load_alike) {
    const kvf__kernels *paths[] = {&kvf__policy_kernels_scalar, &kvf__policy_kernels_avx2};
    if (!kvf__cpu_detect().avx2_fma_f16c) cr_skip_test("this CPU has no AVX2");
    uint32_t state = 1;
    for (int turn = 0; turn < 20000; turn++) {
        float in[24], out[2][24];
        uint16_t row[2][24];
        for (int i = 0; i < 24; i++) {
            state = state * 1664525u + 1013904223u;
            in[i] = of_bits(i % 3 ? state : (state & 0xffff0000u) | 0x8000u); /* any bits; halves */
        }
        for (int p = 0; p < 2; p++) {
            paths[p]->store(KVF_BF16, in, 24, row[p]);
            paths[p]->load(KVF_BF16, row[p], 24, out[p]);
        }
        cr_assert_arr_eq(row[0], row[1], sizeof row[0], "turn %d", turn);
        cr_assert_arr_eq(out[0], out[1], sizeof out[0], "turn %d", turn);
    }
}
#endif
