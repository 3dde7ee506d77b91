/* RMSNorm, SwiGLU and rotary positions in plain C. */
#include "model/ops.h"

#include <math.h>

static void rms_norm(const float *x, const float *weight, uint32_t n, float epsilon, float *out) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += (double)x[i] * x[i];
    float scale = (float)(1 / sqrt(sum / n + (double)epsilon));
    for (uint32_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void swiglu(float *gate, const float *up, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

const kvf__ops *kvf__ops_for(bool avx2) {
    static const kvf__ops plain = {rms_norm, swiglu};
#if defined(__x86_64__)
    static const kvf__ops fast = {kvf__rms_norm_avx2, kvf__swiglu_avx2};
    if (avx2) return &fast;
#endif
    (void)avx2;
    return &plain;
}

void kvf__rope_angles(uint32_t position, const double *freqs, uint32_t n_pairs, float *rotation) {
    for (uint32_t i = 0; i < n_pairs; i++) {
        double angle = (double)position * freqs[i];
        rotation[2 * i] = (float)cos(angle);
        rotation[2 * i + 1] = (float)sin(angle);
    }
}

void kvf__rope(float *heads, uint32_t n_heads, uint32_t head_dim, const float *rotation, uint32_t n_pairs) {
    for (uint32_t h = 0; h < n_heads; h++, heads += head_dim)
        for (uint32_t i = 0; i < n_pairs; i++) {
            float a = heads[2 * i], b = heads[2 * i + 1], c = rotation[2 * i], s = rotation[2 * i + 1];
            heads[2 * i] = a * c - b * s;
            heads[2 * i + 1] = a * s + b * c;
        }
}

void kvf__rope_halves(float *heads, uint32_t n_heads, uint32_t head_dim, const float *rotation, uint32_t n_pairs) {
    for (uint32_t h = 0; h < n_heads; h++, heads += head_dim)
        for (uint32_t i = 0; i < n_pairs; i++) {
            float a = heads[i], b = heads[i + n_pairs], c = rotation[2 * i], s = rotation[2 * i + 1];
            heads[i] = a * c - b * s;
            heads[i + n_pairs] = a * s + b * c;
        }
}
