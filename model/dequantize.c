/* model/dequantize.c: the tensor types of GGUF files to fp32; gguf.h describes their blocks.
 *
 * Every element is computed in fp32 and in the order that the format's description gives, so results equal those of other
 * readers to the bit. */
#include "model/weights.h"

enum { BLOCK = 32, K_BLOCK = 256, K_SCALE_BYTES = 12 };

/* A little-endian half at any address. */
static float half_at(const unsigned char *p) { return kvf__f32_from_f16((uint16_t)(p[0] | p[1] << 8)); }

static void dequantize_f16(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i++) out[i] = half_at(src + 2 * i);
}

static void dequantize_bf16(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)src[2 * i] << 16 | (uint32_t)src[2 * i + 1] << 24;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

static void dequantize_q8_0(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += BLOCK, src += 34) {
        float d = half_at(src);
        const signed char *q = (const signed char *)src + 2;
        for (int j = 0; j < BLOCK; j++) out[i + (size_t)j] = d * (float)q[j];
    }
}

static void dequantize_q4_0(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += BLOCK, src += 18) {
        float d = half_at(src), *x = out + i;
        const unsigned char *q = src + 2;
        for (int j = 0; j < BLOCK / 2; j++) {
            x[j] = d * (float)((q[j] & 15) - 8);
            x[j + BLOCK / 2] = d * (float)((q[j] >> 4) - 8);
        }
    }
}

static void dequantize_q4_1(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += BLOCK, src += 20) {
        float d = half_at(src), m = half_at(src + 2), *x = out + i;
        const unsigned char *q = src + 4;
        for (int j = 0; j < BLOCK / 2; j++) {
            x[j] = d * (float)(q[j] & 15) + m;
            x[j + BLOCK / 2] = d * (float)(q[j] >> 4) + m;
        }
    }
}

/* The fifth bits of elements 0..31, bit by bit. */
static uint32_t fifth_bits(const unsigned char *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void dequantize_q5_0(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += BLOCK, src += 22) {
        float d = half_at(src), *x = out + i;
        uint32_t high = fifth_bits(src + 2);
        const unsigned char *q = src + 6;
        for (int j = 0; j < BLOCK / 2; j++) {
            x[j] = d * (float)((int)((q[j] & 15u) | (high >> j & 1) << 4) - 16);
            x[j + BLOCK / 2] = d * (float)((int)((uint32_t)q[j] >> 4 | (high >> (j + BLOCK / 2) & 1) << 4) - 16);
        }
    }
}

static void dequantize_q5_1(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += BLOCK, src += 24) {
        float d = half_at(src), m = half_at(src + 2), *x = out + i;
        uint32_t high = fifth_bits(src + 4);
        const unsigned char *q = src + 8;
        for (int j = 0; j < BLOCK / 2; j++) {
            x[j] = d * (float)((q[j] & 15u) | (high >> j & 1) << 4) + m;
            x[j + BLOCK / 2] = d * (float)((uint32_t)q[j] >> 4 | (high >> (j + BLOCK / 2) & 1) << 4) + m;
        }
    }
}

/* The i-th scale and minimum, of 6 bits: of the first four the low bits of the bytes i and 4 + i; of the others 4 bits
 * in byte 4 + i, and above them the 2 that those bytes have left. */
static void k_scale(const unsigned char *p, int i, uint32_t *scale, uint32_t *min) {
    uint32_t low = p[i], mid = p[i + 4];
    if (i < 4) {
        *scale = low & 63;
        *min = mid & 63;
    } else {
        *scale = (mid & 15) | (uint32_t)p[i - 4] >> 6 << 4;
        *min = mid >> 4 | low >> 6 << 4;
    }
}

/* Q4_K and, with the fifth bits of its elements in high, Q5_K. */
static void dequantize_k_block(const unsigned char *head, const unsigned char *high, const unsigned char *q, float *x) {
    float d = half_at(head), m = half_at(head + 2);
    for (int i = 0; i < K_BLOCK / BLOCK; i++, x += BLOCK) { /* two runs share the bytes of q */
        uint32_t scale, min;
        k_scale(head + 4, i, &scale, &min);
        float step = d * (float)scale, offset = m * (float)min;
        const unsigned char *bytes = q + i / 2 * BLOCK;
        for (int j = 0; j < BLOCK; j++) {
            uint32_t v = (uint32_t)bytes[j] >> (i % 2 * 4) & 15;
            if (high) v |= ((uint32_t)high[j] >> i & 1) << 4;
            x[j] = step * (float)v - offset;
        }
    }
}

static void dequantize_q4_k(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += K_BLOCK, src += 144) dequantize_k_block(src, NULL, src + 4 + K_SCALE_BYTES, out + i);
}

static void dequantize_q5_k(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += K_BLOCK, src += 176) {
        const unsigned char *high = src + 4 + K_SCALE_BYTES;
        dequantize_k_block(src, high, high + K_BLOCK / 8, out + i);
    }
}

/* Each half of a block, 128 elements, has 64 bytes of low and 32 of high bits: in the low halves of the former the
 * runs 0 and 1 of 32 elements, in their high halves the runs 2 and 3; the latter have 2 bits for each of the four. */
static void dequantize_q6_k(const unsigned char *src, size_t n, float *out) {
    for (size_t i = 0; i < n; i += K_BLOCK, src += 210) {
        const signed char *scales = (const signed char *)src + 192;
        float d = half_at(src + 208), *x = out + i;
        for (int run = 0; run < K_BLOCK / BLOCK; run++, x += BLOCK, scales += 2) {
            int half = run / 4, k = run % 4;
            const unsigned char *low = src + half * 64 + k % 2 * BLOCK, *high = src + 128 + half * BLOCK;
            float step[2] = {d * (float)scales[0], d * (float)scales[1]};
            for (int j = 0; j < BLOCK; j++) {
                uint32_t q = ((uint32_t)low[j] >> (k / 2 * 4) & 15) | ((uint32_t)high[j] >> (2 * k) & 3) << 4;
                x[j] = step[j / 16] * (float)((int)q - 32);
            }
        }
    }
}

bool kvf__dequantize(uint32_t type, const void *src, size_t n, float *out) {
    switch (type) {
    case KVF__TENSOR_F32: memcpy(out, src, n * sizeof *out); return true;
    case KVF__TENSOR_F16: dequantize_f16(src, n, out); return true;
    case KVF__TENSOR_BF16: dequantize_bf16(src, n, out); return true;
    case KVF__TENSOR_Q8_0: dequantize_q8_0(src, n, out); return true;
    case KVF__TENSOR_Q4_0: dequantize_q4_0(src, n, out); return true;
    case KVF__TENSOR_Q4_1: dequantize_q4_1(src, n, out); return true;
    case KVF__TENSOR_Q5_0: dequantize_q5_0(src, n, out); return true;
    case KVF__TENSOR_Q5_1: dequantize_q5_1(src, n, out); return true;
    case KVF__TENSOR_Q4_K: dequantize_q4_k(src, n, out); return true;
    case KVF__TENSOR_Q5_K: dequantize_q5_k(src, n, out); return true;
    case KVF__TENSOR_Q6_K: dequantize_q6_k(src, n, out); return true;
    default: return false;
    }
}

void kvf__tensor_row(const kvf__tensor *t, uint32_t row, float *out) {
    size_t row_bytes = t->bytes / t->n_rows;
    (void)kvf__dequantize(t->type, (const unsigned char *)t->data + row_bytes * row, t->n_cols, out);
}
