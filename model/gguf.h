/* model/gguf.h: a GGUF file (v2 or v3, little endian), mapped and checked, with the other parts of a split one.
 *
 * kvf__gguf_open checks the whole index (keys and tensors). After it every pointer and length below lies within a map.
 * Every tensor has 1 to 4 non-zero dims, a size that did not wrap, and aligned data of its own within its file (0 bytes
 * if its type is not supported). model.c checks what the values mean (architecture, config).
 */
#ifndef KVF_MODEL_GGUF_H
#define KVF_MODEL_GGUF_H

#include "base/base.h"

/* Value types as the format numbers them. */
typedef enum kvf__gguf_type {
    KVF__GGUF_U8 = 0,
    KVF__GGUF_I8 = 1,
    KVF__GGUF_U16 = 2,
    KVF__GGUF_I16 = 3,
    KVF__GGUF_U32 = 4,
    KVF__GGUF_I32 = 5,
    KVF__GGUF_F32 = 6,
    KVF__GGUF_BOOL = 7,
    KVF__GGUF_STRING = 8,
    KVF__GGUF_ARRAY = 9,
    KVF__GGUF_U64 = 10,
    KVF__GGUF_I64 = 11,
    KVF__GGUF_F64 = 12
} kvf__gguf_type;

/* Tensor types as the format numbers them: only those we read. Halves and all else are little endian; d and m are
 * halves, "q" is a number of 4, 5, 6 or 8 bits.
 *   F32   float
 *   F16   IEEE half
 *   BF16  the upper half of a float
 *   Q4_0  32 elements in 18 bytes: d; 16 bytes qs.
 *         x[j] = d * ((qs[j] & 15) - 8), x[j + 16] = d * ((qs[j] >> 4) - 8)
 *   Q4_1  32 elements in 20 bytes: d, m; 16 bytes qs.
 *         x[j] = d * (qs[j] & 15) + m,   x[j + 16] = d * (qs[j] >> 4) + m
 *   Q5_0  32 elements in 22 bytes: d; 4 bytes qh, of which bit j is the fifth of element j; 16 bytes qs as in Q4_0.
 *         x[j] = d * (q - 16)
 *   Q5_1  32 elements in 24 bytes: d, m; qh, qs as in Q5_0. x[j] = d * q + m
 *   Q8_0  32 elements in 34 bytes: d; 32 signed bytes. x[j] = d * qs[j]
 *   Q4_K  256 elements in 144 bytes: d, m; 12 bytes of scales s[8] and minima t[8], of 6 bits; 128 bytes qs.
 *         Of the four runs of 64 elements each has 32 bytes of qs: their low halves are the first 32, the high ones
 *         the others. x in the i-th run of 32 = d * s[i] * q - m * t[i]
 *   Q5_K  256 elements in 176 bytes: as Q4_K, with 32 bytes qh before qs: bit i of qh[j] is the fifth of element j of
 *         the i-th run of 32.
 *   Q6_K  256 elements in 210 bytes: 128 bytes ql (low 4 bits), 64 bytes qh (high 2 bits), 16 signed bytes s, d.
 *         x in the i-th run of 16 = d * s[i] * (q - 32) */
typedef enum kvf__tensor_type {
    KVF__TENSOR_F32 = 0,
    KVF__TENSOR_F16 = 1,
    KVF__TENSOR_Q4_0 = 2,
    KVF__TENSOR_Q4_1 = 3,
    KVF__TENSOR_Q5_0 = 6,
    KVF__TENSOR_Q5_1 = 7,
    KVF__TENSOR_Q8_0 = 8,
    KVF__TENSOR_Q4_K = 12,
    KVF__TENSOR_Q5_K = 13,
    KVF__TENSOR_Q6_K = 14,
    KVF__TENSOR_BF16 = 30 /* the largest: arrays over the types are this long */
} kvf__tensor_type;
#define KVF__TENSOR_TYPES "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K" /* for error texts */

/* Bytes in the map; not NUL terminated. */
typedef struct kvf__text {
    const char *data;
    size_t bytes;
} kvf__text;

/* A name or path with arbitrary bytes, made printable and cut to 64 bytes (of a path the last 64). Each call needs
 * its own buffer. */
typedef struct kvf__shown {
    char text[72];
} kvf__shown;

typedef struct kvf__gguf_key {
    kvf__text name;
    uint32_t type;             /* kvf__gguf_type */
    uint32_t element_type;     /* of an array; never KVF__GGUF_ARRAY */
    uint64_t n;                /* elements of an array, else 1 */
    const unsigned char *data; /* the value, or the array's first element; unaligned */
    size_t bytes;              /* of it all; a string counts its 8 byte length */
} kvf__gguf_key;

typedef struct kvf__gguf_tensor {
    kvf__text name;
    uint32_t type; /* kvf__tensor_type, or any other that the file gives: its bytes are 0 then */
    bool used;     /* has its place in the model */
    uint32_t n_dims;
    uint64_t dims[4]; /* the first runs fastest (a row); those beyond n_dims are 1 */
    uint64_t n_elements;
    const void *data; /* aligned to the file's alignment, at least 8 */
    size_t bytes;
} kvf__gguf_tensor;

typedef struct kvf__gguf {
    kvf_allocator allocator;
    kvf__shown path;          /* for error texts */
    const unsigned char *map; /* whole file, read only */
    size_t file_bytes;        /* of this file, without its other parts */
    uint32_t version, alignment;
    size_t n_keys, n_tensors;
    kvf__gguf_key *keys;       /* in file order */
    kvf__gguf_tensor *tensors; /* in file order */
    const kvf__gguf_key **keys_by_name;
    const kvf__gguf_tensor **tensors_by_name;
    struct kvf__gguf *next_part; /* of a split file; its tensors stand in the first part's arrays as well */
} kvf__gguf;

/* Maps and checks a file. If it is the first of several parts (PREFIX-00001-of-00003.gguf, key split.count 3) the
 * others are opened too: the tensors are those of all parts in order, the keys those of the first. On failure *out is
 * all zero. allocator: resolved. */
kvf_status kvf__gguf_open(const char *path, const kvf_allocator *allocator, kvf__gguf *out, kvf_error *err);
void kvf__gguf_close(kvf__gguf *gguf); /* a zeroed one is allowed */

/* The two steps of kvf__gguf_open: one file, ignoring other parts; and tensors_by_name sorted, refusing tensors that
 * occur twice or overlap. */
kvf_status kvf__gguf_open_file(const char *path, const kvf_allocator *allocator, kvf__gguf *out, kvf_error *err);
kvf_status kvf__gguf_sort_tensors(kvf__gguf *gguf, kvf_error *err);

const kvf__gguf_key *kvf__gguf_find(const kvf__gguf *gguf, const char *name);
const kvf__gguf_tensor *kvf__gguf_find_tensor(const kvf__gguf *gguf, const char *name);

/* Typed reads of a key. If a key is missing and `required` is 0, *out stays as it is (an array: becomes NULL) and
 * *found (may be NULL) becomes false. A wrong type is KVF_E_FORMAT; the message names key, type and the type wanted.
 * Unsigned accepts any integer type if the value fits. */
kvf_status kvf__gguf_u32(const kvf__gguf *gguf, const char *name, int required, uint32_t *out, bool *found,
                         kvf_error *err);
kvf_status kvf__gguf_f32(const kvf__gguf *gguf, const char *name, int required, float *out, bool *found,
                         kvf_error *err);
kvf_status kvf__gguf_bool(const kvf__gguf *gguf, const char *name, int required, bool *out, bool *found,
                          kvf_error *err);
kvf_status kvf__gguf_text(const kvf__gguf *gguf, const char *name, int required, kvf__text *out, bool *found,
                          kvf_error *err);
kvf_status kvf__gguf_array(const kvf__gguf *gguf, const char *name, uint32_t element_type, int required,
                           const kvf__gguf_key **out, kvf_error *err);

/* The string at *cursor of a string array's data; moves the cursor past it. */
kvf__text kvf__gguf_next_text(const unsigned char **cursor);

bool kvf__text_equal(kvf__text a, const char *b);
bool kvf__text_contains(kvf__text text, const char *wanted); /* false for text without data */

const char *kvf__show(kvf__shown *out, kvf__text text);
const char *kvf__show_path(kvf__shown *out, const char *path);
const char *kvf__gguf_type_name(uint32_t type);

/* Geometry of a tensor type; false when it is none that we read. */
bool kvf__tensor_type_geometry(uint32_t type, uint32_t *block_elements, uint32_t *block_bytes);
const char *kvf__tensor_type_name(uint32_t type); /* also of types that we do not read; "type 99" has none: "unknown" */

#endif
