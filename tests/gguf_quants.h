/* tests/gguf_quants.h: floats into the tensor types of GGUF files, for gguf_writer.h. Plain rounding: good enough for
 * random models. */
#ifndef KVF_TESTS_GGUF_QUANTS_H
#define KVF_TESTS_GGUF_QUANTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/base.h"

enum {
    GW_F32 = 0,
    GW_F16 = 1,
    GW_Q4_0 = 2,
    GW_Q4_1 = 3,
    GW_Q5_0 = 6,
    GW_Q5_1 = 7,
    GW_Q8_0 = 8,
    GW_Q4_K = 12,
    GW_Q5_K = 13,
    GW_Q6_K = 14,
    GW_BF16 = 30
};

/* Elements and bytes of a block of a tensor type; those that the writer does not know count as F32. */
static inline void gw_geometry(uint32_t type, size_t *elements, size_t *bytes) {
    static const struct {
        uint32_t type, elements, bytes;
    } t[] = {{GW_F16, 1, 2},    {GW_BF16, 1, 2},   {GW_Q4_0, 32, 18},   {GW_Q4_1, 32, 20},   {GW_Q5_0, 32, 22},
             {GW_Q5_1, 32, 24}, {GW_Q8_0, 32, 34}, {GW_Q4_K, 256, 144}, {GW_Q5_K, 256, 176}, {GW_Q6_K, 256, 210}};
    *elements = 1;
    *bytes = 4;
    for (size_t i = 0; i < sizeof t / sizeof *t; i++)
        if (t[i].type == type) *elements = t[i].elements, *bytes = t[i].bytes;
}

static inline unsigned gw_round_to(float x, float max) { return (unsigned)fmaxf(0, fminf(max, roundf(x))); }

static inline float gw_put_half(unsigned char *out, float x) {
    uint16_t h = kvf__f16_from_f32(x);
    memcpy(out, &h, 2);
    return kvf__f32_from_f16(h);
}

/* A block of 32 floats: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. */
static inline void gw_quantize_block(uint32_t type, const float *x, unsigned char *out) {
    int five = type == GW_Q5_0 || type == GW_Q5_1, has_min = type == GW_Q4_1 || type == GW_Q5_1;
    float min = x[0], max = x[0], absmax = 0, top = five ? 31 : 15;
    for (int i = 0; i < 32; i++) {
        min = fminf(min, x[i]);
        max = fmaxf(max, x[i]);
        absmax = fmaxf(absmax, fabsf(x[i]));
    }
    float step = type == GW_Q8_0 ? absmax / 127 : has_min ? (max - min) / top : absmax / (five ? 15 : 7);
    float offset = has_min ? min : type == GW_Q8_0 ? 0 : -(five ? 16 : 8) * step;
    gw_put_half(out, step);
    out += 2;
    if (has_min) {
        gw_put_half(out, offset);
        out += 2;
    }
    uint32_t high = 0;
    unsigned char *q_out = out + (five ? 4 : 0);
    for (int i = 0; i < 32; i++) {
        float v = step > 0 ? (x[i] - offset) / step : 0;
        unsigned q = type == GW_Q8_0 ? 0 : gw_round_to(v, top);
        if (type == GW_Q8_0)
            out[i] = (unsigned char)(signed char)fmaxf(-127, fminf(127, roundf(v)));
        else if (i < 16)
            q_out[i] = (unsigned char)(q & 15);
        else
            q_out[i - 16] |= (unsigned char)((q & 15) << 4);
        high |= (q >> 4) << i;
    }
    if (five) memcpy(out, &high, 4);
}

/* A block of 256 floats: Q4_K, Q5_K. */
static inline void gw_quantize_k(uint32_t type, const float *x, unsigned char *out) {
    float step[8], offset[8], max_step = 0, max_offset = 0, top = type == GW_Q5_K ? 31 : 15;
    unsigned char *scales = out + 4, *high = out + 16, *low = out + (type == GW_Q5_K ? 48 : 16);
    for (int i = 0; i < 8; i++) {
        float min = 0, max = 0;
        for (int j = 0; j < 32; j++) {
            min = fminf(min, x[32 * i + j]);
            max = fmaxf(max, x[32 * i + j]);
        }
        step[i] = (max - min) / top;
        offset[i] = -min;
        max_step = fmaxf(max_step, step[i]);
        max_offset = fmaxf(max_offset, offset[i]);
    }
    float d = gw_put_half(out, max_step / 63), m = gw_put_half(out + 2, max_offset / 63);
    memset(scales, 0, (size_t)(low - scales));
    memset(low, 0, 128);
    for (int i = 0; i < 8; i++) {
        unsigned s = d > 0 ? gw_round_to(step[i] / d, 63) : 0, t = m > 0 ? gw_round_to(offset[i] / m, 63) : 0;
        if (i < 4) {
            scales[i] |= (unsigned char)s;
            scales[i + 4] |= (unsigned char)t;
        } else {
            scales[i + 4] = (unsigned char)((s & 15) | (t & 15) << 4);
            scales[i - 4] |= (unsigned char)(s >> 4 << 6);
            scales[i] |= (unsigned char)(t >> 4 << 6);
        }
        for (int j = 0; j < 32; j++) {
            float v = d * (float)s > 0 ? (x[32 * i + j] + m * (float)t) / (d * (float)s) : 0;
            unsigned q = gw_round_to(v, top);
            low[i / 2 * 32 + j] |= (unsigned char)((q & 15) << (i % 2 * 4));
            if (type == GW_Q5_K) high[j] |= (unsigned char)((q >> 4) << i);
        }
    }
}

/* A block of 256 floats: Q6_K. */
static inline void gw_quantize_q6_k(const float *x, unsigned char *out) {
    float step[16], max_step = 0;
    memset(out, 0, 192);
    for (int i = 0; i < 16; i++) {
        step[i] = 0;
        for (int j = 0; j < 16; j++) step[i] = fmaxf(step[i], fabsf(x[16 * i + j]) / 31);
        max_step = fmaxf(max_step, step[i]);
    }
    float d = gw_put_half(out + 208, max_step / 127);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, run = i / 32 % 4, j = i % 32, s = d > 0 ? (int)gw_round_to(step[i / 16] / d, 127) : 0;
        if (i / 16 % 2) s = -s; /* scales have a sign */
        unsigned q = s ? gw_round_to(x[i] / (d * (float)s) + 32, 63) : 32;
        out[192 + i / 16] = (unsigned char)(signed char)s;
        out[half * 64 + run % 2 * 32 + j] |= (unsigned char)((q & 15) << (run / 2 * 4));
        out[128 + half * 32 + j] |= (unsigned char)((q >> 4) << (2 * run));
    }
}

/* Floats in a tensor type; out has room, n is a multiple of the block. */
static inline void gw_quantize(uint32_t type, const float *x, size_t n, unsigned char *out) {
    size_t elements, bytes;
    gw_geometry(type, &elements, &bytes);
    for (size_t i = 0; i < n; i += elements, out += bytes) switch (type) {
        case GW_F16: (void)gw_put_half(out, x[i]); break;
        case GW_BF16: memcpy(out, (const unsigned char *)(x + i) + 2, 2); break; /* cut, not rounded */
        case GW_Q4_0:
        case GW_Q4_1:
        case GW_Q5_0:
        case GW_Q5_1:
        case GW_Q8_0: gw_quantize_block(type, x + i, out); break;
        case GW_Q4_K:
        case GW_Q5_K: gw_quantize_k(type, x + i, out); break;
        case GW_Q6_K: gw_quantize_q6_k(x + i, out); break;
        default: memcpy(out, x + i, 4); break;
        }
}

#endif
