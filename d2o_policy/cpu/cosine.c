/* The inner loops of matching and merging in plain C: the meaning of the SIMD files, bit for bit. */
#include "d2o_policy/cpu/kernels.h"

static void load(kvf_dtype dtype, const void *row, uint32_t d, float *out) {
    if (dtype == KVF_F32) {
        memcpy(out, row, d * sizeof *out);
        return;
    }
    const uint16_t *h = row;
    for (uint32_t i = 0; i < d; i++) out[i] = kvf__widen(dtype, h[i]);
}

static void store(kvf_dtype dtype, const float *in, uint32_t d, void *row) {
    if (dtype == KVF_F32) {
        memcpy(row, in, d * sizeof *in);
        return;
    }
    uint16_t *h = row;
    for (uint32_t i = 0; i < d; i++) h[i] = kvf__narrow(dtype, in[i]);
}

static void pack(kvf_dtype dtype, const void *const rows[8], uint32_t d, float *panel, float rnorm[8]) {
    for (uint32_t c = 0; c < KVF__PANEL; c++) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < d; i++) {
            float x =
                dtype == KVF_F32 ? ((const float *)rows[c])[i] : kvf__widen(dtype, ((const uint16_t *)rows[c])[i]);
            panel[i * KVF__PANEL + c] = x;
            sum = fmaf(x, x, sum);
        }
        rnorm[c] = kvf__rnorm(sum);
    }
}

static void nearest(const kvf__tile *tile, const float *panel, uint32_t r, uint32_t n, const float *rnorm, uint32_t d,
                    kvf__best *best) {
    for (uint32_t e = 0; e < n; e++)
        for (uint32_t c = 0; c < tile->n; c++) {
            const float *column = tile->panels + (size_t)(c / KVF__PANEL) * d * KVF__PANEL + c % KVF__PANEL;
            float dot = 0.0f;
            for (uint32_t i = 0; i < d; i++) dot = fmaf(panel[i * KVF__PANEL + r + e], column[i * KVF__PANEL], dot);
            kvf__raise(&best[e], kvf__cosine(dot, rnorm[e], tile->rnorm[c]), tile->pos[c], tile->slot[c]);
        }
}

static void cosines(kvf_dtype dtype, const void *rows, const void *ahead, uint32_t d, const float *x, float x_rnorm,
                    float u[16]) {
    (void)ahead;
    size_t row_bytes = d * kvf_dtype_bytes(dtype);
    for (uint32_t c = 0; c < 16; c++) {
        const void *row = (const unsigned char *)rows + c * row_bytes;
        float dot = 0.0f, sum = 0.0f;
        for (uint32_t i = 0; i < d; i++) {
            float y = dtype == KVF_F32 ? ((const float *)row)[i] : kvf__widen(dtype, ((const uint16_t *)row)[i]);
            dot = fmaf(x[i * KVF__PANEL], y, dot);
            sum = fmaf(y, y, sum);
        }
        u[c] = kvf__cosine(dot, x_rnorm, kvf__rnorm(sum));
    }
}

static void blend(float *acc, const float *base, const float *row, float w, uint32_t d) {
    for (uint32_t i = 0; i < d; i++) acc[i] = fmaf(w, base ? row[i] - base[i] : row[i], acc[i]);
}

static float norm(const float *row, uint32_t d) {
    float sum = 0.0f;
    for (uint32_t i = 0; i < d; i++) sum = fmaf(row[i], row[i], sum);
    return sqrtf(sum);
}

const kvf__kernels kvf__policy_kernels_scalar = {load, store, pack, nearest, cosines, NULL, NULL, NULL, blend, norm};
