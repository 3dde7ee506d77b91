/* Dequantisation against stored vectors and the formats' definitions, and what weights_load makes of a file. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <jansson.h>
#include <math.h>

#include "model/weights.h"
#include "tests/failing.h"
#include "tests/tiny_models.h"

/* An IEEE half by its definition. */
static double half(unsigned h) {
    unsigned e = (h >> 10) & 31, m = h & 1023;
    double x = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, (int)e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -x : x;
}

/* Element i of a tensor, one at a time. */
static double element(uint32_t type, const unsigned char *src, size_t i) {
    size_t b = i / 32, j = i % 32;
    const unsigned char *p = src + b * (type == GW_Q4_0 ? 18 : type == GW_Q4_1 ? 20 : 34);
    double d = half((unsigned)(p[0] | p[1] << 8));
    unsigned nibble = 0;
    if (type == GW_Q4_0 || type == GW_Q4_1) {
        unsigned byte = p[(type == GW_Q4_1 ? 4 : 2) + j % 16];
        nibble = j < 16 ? byte & 15 : byte >> 4;
    }
    switch (type) {
    case GW_F16: return half((unsigned)(src[2 * i] | src[2 * i + 1] << 8));
    case GW_Q8_0: return d * (signed char)p[2 + j];
    case GW_Q4_0: return d * ((int)nibble - 8);
    case GW_Q4_1: return d * nibble + half((unsigned)(p[2] | p[3] << 8));
    default: abort();
    }
}

static int close_enough(double want, float got) {
    if (isnan(want)) return isnan(got);
    return want == (double)got || fabs(want - (double)got) <= 1e-6 * (fabs(want) + 1e-3);
}

Test(dequant, every_half) {
    for (unsigned h = 0; h < 65536; h++) {
        unsigned char src[2] = {(unsigned char)h, (unsigned char)(h >> 8)};
        float x;
        cr_assert(kvf__dequantize(KVF__TENSOR_F16, src, 1, &x));
        cr_assert(isnan(half(h)) ? isnan(x) : (double)x == half(h), "half %04x: %g", h, (double)x);
    }
}

Test(dequant, random_blocks_at_odd_addresses) {
    static const uint32_t types[] = {GW_F16, GW_Q8_0, GW_Q4_0, GW_Q4_1};
    enum { N = 32 * 50 };
    uint64_t rng = 7;
    for (int t = 0; t < 4; t++) {
        size_t elements, bytes, n = N;
        gw_geometry(types[t], &elements, &bytes);
        size_t total = n / elements * bytes;
        unsigned char *src = malloc(total + 1);
        float *out = malloc((n + 1) * sizeof *out);
        for (size_t i = 0; i < total + 1; i++) src[i] = (unsigned char)gw_random(&rng);
        for (size_t b = 0; types[t] != GW_F16 && b < n / 32; b++)
            for (size_t i = 0; i < 4; i += 2) { /* scales and offsets of a moderate exponent, any sign */
                if (i && types[t] != GW_Q4_1) continue;
                src[1 + b * bytes + i + 1] = (unsigned char)(0x20 | (src[1 + b * bytes + i + 1] & 0x93));
            }
        out[n] = 42;
        cr_assert(kvf__dequantize(types[t], src + 1, n, out));
        for (size_t i = 0; i < n; i++) {
            double want = element(types[t], src + 1, i);
            cr_assert(close_enough(want, out[i]), "type %u, element %zu: %g, not %g", types[t], i, (double)out[i],
                      want);
        }
        cr_assert(out[n] == 42, "type %u writes past its end", types[t]);
        free(src);
        free(out);
    }
    float x = 3;
    cr_assert(!kvf__dequantize(10, &x, 1, &x), "a type that is none of ours");
    cr_assert(x == 3);
}

/* ---- Stored vectors ---------------------------------------------------------------------------------- */

/* The bytes that a text of hexadecimal digits names, at an odd address when `odd` is 1. The caller frees *store. */
static unsigned char *from_hex(const json_t *text, int odd, size_t *n, void **store) {
    const char *s = json_string_value(text);
    unsigned char *out = malloc(strlen(s) / 2 + 2);
    *store = out;
    out += odd;
    *n = strlen(s) / 2;
    for (size_t i = 0; i < *n; i++) {
        char two[3] = {s[2 * i], s[2 * i + 1], 0};
        out[i] = (unsigned char)strtoul(two, NULL, 16);
    }
    return out;
}

static void check_vector(const json_t *c) {
    const char *name = json_string_value(json_object_get(c, "type"));
    uint32_t type = (uint32_t)json_integer_value(json_object_get(c, "number")), elements, bytes;
    size_t n_src, n_want;
    void *src_store, *want_store;
    cr_assert(kvf__tensor_type_geometry(type, &elements, &bytes), "%s", name);
    cr_assert_str_eq(kvf__tensor_type_name(type), name);
    const unsigned char *src = from_hex(json_object_get(c, "blocks"), 1, &n_src, &src_store);
    const unsigned char *want = from_hex(json_object_get(c, "floats"), 0, &n_want, &want_store);
    size_t n = n_src / bytes * elements;
    cr_assert(n_src % bytes == 0 && n_want == n * 4 && n >= 32, "%s: %zu bytes make %zu", name, n_src, n_want / 4);
    float *out = malloc((n + 1) * sizeof *out);
    out[n] = 42;
    cr_assert(kvf__dequantize(type, src, n, out), "%s", name);
    for (size_t i = 0; i < n; i++) {
        float x;
        memcpy(&x, want + 4 * i, sizeof x);
        cr_assert(isnan(x) ? isnan(out[i]) : !memcmp(&x, &out[i], sizeof x), "%s, element %zu: %a, not %a", name, i,
                  (double)out[i], (double)x);
    }
    cr_assert(out[n] == 42, "%s writes past its end", name);
    free(src_store);
    free(want_store);
    free(out);
}

/* The arithmetic is the same, so every bit is. */
Test(dequant, every_type_has_the_stored_floats) {
    json_error_t err;
    json_t *j = json_load_file(KVF_TEST_DATA "/quant_vectors.json", 0, &err), *cases = json_object_get(j, "cases"), *c;
    size_t i, n = 0;
    cr_assert(j != NULL, "line %d: %s", err.line, err.text);
    json_array_foreach(cases, i, c) check_vector(c);
    for (uint32_t type = 1, elements, bytes; type < 64; type++) n += kvf__tensor_type_geometry(type, &elements, &bytes);
    cr_assert_eq(n, json_array_size(cases), "%zu types, %zu vectors", n, json_array_size(cases));
    json_decref(j);
}

static const struct tiny_model_params mixed = {.weight_type = GW_Q4_1, .embd_type_p1 = GW_Q8_0 + 1, .seed = 9};

/* A part of a matrix is a tensor where it lies in the file; returns its rows. */
static uint32_t expect_part(const char *what, const kvf__matrix *m, uint32_t part, const kvf__tensor *t) {
    cr_assert(part < m->n_parts && m->k == t->n_cols, "%s: part %u of %u, k %u", what, part, m->n_parts, m->k);
    cr_assert(m->parts[part].data == t->data && m->parts[part].type == t->type && m->parts[part].n_rows == t->n_rows,
              "%s: part %u is another tensor", what, part);
    cr_assert(m->parts[part].row_bytes * t->n_rows == t->bytes, "%s: rows of %zu bytes", what,
              m->parts[part].row_bytes);
    return t->n_rows;
}

Test(dequant, matrices_of_one_input_stand_together) {
    kvf_model *m = open_tiny(&mixed);
    float norm[1024];
    for (uint32_t i = 0; i < m->info.n_layers; i++) {
        const kvf__layer *l = &m->layers[i];
        const kvf__layer_weights *w = &m->weights->layers[i];
        uint32_t n = expect_part("qkv", &w->qkv, 0, &l->attn_q);
        n += expect_part("qkv", &w->qkv, 1, &l->attn_k) + expect_part("qkv", &w->qkv, 2, &l->attn_v);
        cr_assert_eq(w->qkv.n, n);
        cr_assert_eq(w->attn_output.n, expect_part("output", &w->attn_output, 0, &l->attn_output));
        n = expect_part("gate_up", &w->gate_up, 0, &l->ffn_gate);
        cr_assert_eq(w->gate_up.n, n + expect_part("gate_up", &w->gate_up, 1, &l->ffn_up));
        cr_assert_eq(w->ffn_down.n, expect_part("down", &w->ffn_down, 0, &l->ffn_down));
        kvf__tensor_row(&l->ffn_norm, 0, norm);
        cr_assert(!memcmp(norm, w->ffn_norm, m->info.n_embd * sizeof *norm));
    }
    cr_assert_eq(m->weights->output.n, expect_part("head", &m->weights->output, 0, &m->token_embd));
    cr_assert(m->info.weight_bytes > 0 && m->info.weight_bytes < m->info.n_params, "%llu bytes for %llu parameters",
              (unsigned long long)m->info.weight_bytes, (unsigned long long)m->info.n_params);
    kvf_model_close(m);
}

Test(dequant, every_allocation_may_fail) {
    int n = 0;
    for (;; n++) {
        struct failing f = {n, 0};
        kvf_model_config config = {.struct_size = sizeof config, .allocator = {failing_alloc, failing_free, &f}};
        kvf_model *m = open_tiny_as(&mixed, &config);
        bool opened = m != NULL;
        kvf_activations *activations = NULL;
        if (m) {
            f.left = 0;
            kvf_error err;
            cr_assert(kvf_activations_create(m, 8, 2, 64, 1, &activations, &err) == KVF_E_NO_MEMORY);
            cr_assert(activations == NULL);
        }
        kvf_model_close(m);
        cr_assert(f.alive == 0, "allocation %d failed: %lld are left", n, (long long)f.alive);
        if (opened) break;
    }
    cr_assert(n >= 3, "only %d allocations", n);
}
