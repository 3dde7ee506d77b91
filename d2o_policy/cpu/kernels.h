/* d2o_policy/cpu/kernels.h: the inner loops of matching and merging, in plain C, for AVX2 and for AVX-512, bit-equal.
 *
 * Every sum is a fold over the head dimension, ascending, by fmaf; SIMD runs over kept columns (matching) or over
 * elements (merging), so that the paths round alike.
 *
 * A panel is 8 rows side by side, transposed: [head_dim][8] float.
 */
#ifndef KVF_D2O_POLICY_CPU_KERNELS_H
#define KVF_D2O_POLICY_CPU_KERNELS_H

#include <math.h>

#include "base/base.h"
#include "kvfold/attention.h"

#define KVF__PANEL 8u
#define KVF__TILE_PANELS 3u
#define KVF__TILE_COLUMNS (KVF__PANEL * KVF__TILE_PANELS)
#define KVF__CHUNK 256u /* evicted rows held in float at once: 128 KiB at head_dim 128 */

/* Nearest kept key so far. Starts as {-2, UINT32_MAX, UINT32_MAX}. */
typedef struct kvf__best {
    float u;
    uint32_t pos, slot;
} kvf__best;

/* A tile of kept columns: panels of them, their inverse norms, positions and slots. */
typedef struct kvf__tile {
    const float *panels; /* [KVF__TILE_PANELS][head_dim][8] */
    float rnorm[KVF__TILE_COLUMNS];
    uint32_t pos[KVF__TILE_COLUMNS], slot[KVF__TILE_COLUMNS];
    uint32_t n;
} kvf__tile;

/* GCC takes a function that only prefetches for one without effect, and drops its calls; this is an effect. */
#define KVF__PREFETCHES() __asm__ volatile("")

#define KVF__LANES 16u        /* evicted rows side by side */
#define KVF__NEAR_STRIDE 272u /* floats from one widened row to the next: not all in the same sets of the cache */

/* Evicted rows, and what is known of their nearest kept one. */
typedef struct kvf__near {
    const float *x; /* [head_dim][KVF__LANES] */
    float rnorm[KVF__LANES], most[KVF__LANES];
    uint32_t d, lanes; /* bits of the rows that there are */
    float slack;       /* below most by which a cosine may still be the largest */
} kvf__near;

typedef struct kvf__kernels {
    void (*load)(kvf_dtype dtype, const void *row, uint32_t d, float *out);
    void (*store)(kvf_dtype dtype, const float *in, uint32_t d, void *row);
    /* Eight rows into a panel, and 1 / norm of each: 0 for a norm that is zero or out of range. */
    void (*pack)(kvf_dtype dtype, const void *const rows[8], uint32_t d, float *panel, float rnorm[8]);
    /* Rows [r, r + n) of an evicted panel (r + n <= KVF__PANEL) against a tile: raises best[0..n). */
    void (*nearest)(const kvf__tile *tile, const float *panel, uint32_t r, uint32_t n, const float *rnorm, uint32_t d,
                    kvf__best *best);
    /* Cosines of a packed row x (element i stands at x[i * KVF__PANEL]) with 16 rows of the pages that follow one another.
     * The bits are those that pack and nearest give. ahead: as many rows that will be read soon. */
    void (*cosines)(kvf_dtype dtype, const void *rows, const void *ahead, uint32_t d, const float *x, float x_rnorm,
                    float u[16]);
    /* The same within kvf__cosine_slack, for finite fp16 rows, and for others too 0 (as cosines has it) or NaN, where cosines
     * must tell; x here is contiguous. NULL: there is no faster way. ahead: parts of 4 * d bytes that will be read soon. */
    void (*near_cosines)(const void *rows, const void *const ahead[8], uint32_t d, const float *x, float x_rnorm,
                         float u[16]);
    /* 16 fp16 rows that follow one another to floats, and nearly 1 / norm: 0 for no norm, NaN where cosines must tell. With near,
     * or NULL without. */
    void (*widen)(const void *rows, uint32_t d, float *out, float rnorm[16]);
    /* Adds to may[c] the lanes for which row c of 16, if its bit is in valid, may be the nearest of all so far, and raises most. */
    void (*near)(kvf__near *q, const float *rows, const float *rnorm, uint32_t valid, const void *const ahead[8],
                 uint16_t may[16]);
    /* acc[i] = fmaf(w, row[i] - base[i], acc[i]), base NULL: zeros. */
    void (*blend)(float *acc, const float *base, const float *row, float w, uint32_t d);
    float (*norm)(const float *row, uint32_t d);
} kvf__kernels;

extern const kvf__kernels kvf__policy_kernels_scalar;
#if defined(__x86_64__)
extern const kvf__kernels kvf__policy_kernels_avx2;
extern const kvf__kernels kvf__policy_kernels_avx512;

/* Of both tables: these wait for memory, so wider registers gain nothing. */
void kvf__policy_load_avx2(kvf_dtype dtype, const void *row, uint32_t d, float *out);
void kvf__policy_store_avx2(kvf_dtype dtype, const float *in, uint32_t d, void *row);
void kvf__policy_pack_avx2(kvf_dtype dtype, const void *const rows[8], uint32_t d, float *panel, float rnorm[8]);
void kvf__policy_cosines_avx2(kvf_dtype dtype, const void *rows, const void *ahead, uint32_t d, const float *x,
                              float x_rnorm, float u[16]);
void kvf__policy_blend_avx2(float *acc, const float *base, const float *row, float w, uint32_t d);
float kvf__policy_norm_avx2(const float *row, uint32_t d);
#endif

/* 1 / norm from a sum of squares; 0 when the sum is zero, infinite or NaN in fp32, so that norms below about 1e-23 or
 * above 1e19 count as none: such keys have cosine 0 with every other. */
static inline float kvf__rnorm(float sum) { return sum > 0.0f && sum <= 3.402823466e38f ? 1.0f / sqrtf(sum) : 0.0f; }

/* A cosine from a dot product: never NaN, within [-1, 1]. */
static inline float kvf__cosine(float dot, float ri, float rj) {
    float u = dot * ri * rj;
    if (!(u == u)) return 0.0f;
    return u > 1.0f ? 1.0f : u < -1.0f ? -1.0f : u;
}

/* How far two ways of summing a cosine over d elements may lie apart: each of three sums errs by at most d / 2^24 of the sum
 * of magnitudes, half of that for a norm; doubled, and some for the products and roots. */
static inline float kvf__cosine_slack(uint32_t d) { return (float)(4 * d + 64) * 0x1p-24f; }

/* Larger cosine, then lower position: the result does not depend on the order of columns. */
static inline void kvf__raise(kvf__best *b, float u, uint32_t pos, uint32_t slot) {
    if (u > b->u || (u == b->u && pos < b->pos)) *b = (kvf__best){u, pos, slot};
}

#endif
