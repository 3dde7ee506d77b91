/* model/gguf.c: maps a GGUF file and checks its index.
 *
 * The index is read twice: first without allocating, so that a false count costs nothing, then to fill the arrays. */
#define _POSIX_C_SOURCE 200809L
#include "model/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF files are read in place: little endian machines only"
#endif

enum {
    HEADER_BYTES = 24,
    MIN_KEY_BYTES = 8 + 1 + 4 + 1,            /* name length, name, type, value */
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8, /* name length, name, n_dims, one dim, type, offset */
    MAX_KEY_NAME = 65535,                     /* both as the format's description says */
    MAX_TENSOR_NAME = 64,
    MIN_ALIGNMENT = 8, /* the format: a multiple of 8; so floats in the map are aligned */
    MAX_ALIGNMENT = 1 << 20
};

/* Where the walk is. Offsets in error texts count from the file's begin. */
typedef struct cursor {
    const kvf__gguf *gguf;
    size_t at;
    kvf_error *err;
} cursor;

static uint32_t load32(const unsigned char *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint64_t load64(const unsigned char *p) {
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

const char *kvf__show(kvf__shown *out, kvf__text text) {
    size_t n = KVF__MIN(text.bytes, 64);
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text.data[i];
        out->text[i] = (char)(c < 32 || c == 127 ? '?' : c);
    }
    memcpy(out->text + n, text.bytes > n ? "..." : "", text.bytes > n ? 4 : 1);
    return out->text;
}

const char *kvf__show_path(kvf__shown *out, const char *path) {
    size_t n = strlen(path);
    if (n <= 64) return kvf__show(out, (kvf__text){path, n});
    kvf__shown tail;
    kvf__show(&tail, (kvf__text){path + n - 61, 61});
    memcpy(out->text, "...", 3);
    memcpy(out->text + 3, tail.text, 62);
    return out->text;
}

bool kvf__text_equal(kvf__text a, const char *b) { return strlen(b) == a.bytes && !memcmp(a.data, b, a.bytes); }

bool kvf__text_contains(kvf__text text, const char *wanted) {
    size_t n = strlen(wanted);
    for (size_t i = 0; text.data && i + n <= text.bytes; i++)
        if (!memcmp(text.data + i, wanted, n)) return true;
    return false;
}

const char *kvf__gguf_type_name(uint32_t type) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return type < sizeof names / sizeof *names ? names[type] : "unknown";
}

static size_t scalar_bytes(uint32_t type) {
    static const unsigned char bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof bytes ? bytes[type] : 0;
}

const char *kvf__tensor_type_name(uint32_t type) {
    static const char *const names[] = {"F32",     "F16",    "Q4_0",    "Q4_1",  "Q4_2",   "Q4_3",  "Q5_0",  "Q5_1",
                                        "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
                                        "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
                                        "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16"};
    return type < sizeof names / sizeof *names ? names[type] : "unknown";
}

bool kvf__tensor_type_geometry(uint32_t type, uint32_t *block_elements, uint32_t *block_bytes) {
    switch (type) {
    case KVF__TENSOR_F32: *block_elements = 1, *block_bytes = 4; return true;
    case KVF__TENSOR_F16:
    case KVF__TENSOR_BF16: *block_elements = 1, *block_bytes = 2; return true;
    case KVF__TENSOR_Q4_0: *block_elements = 32, *block_bytes = 18; return true;
    case KVF__TENSOR_Q4_1: *block_elements = 32, *block_bytes = 20; return true;
    case KVF__TENSOR_Q5_0: *block_elements = 32, *block_bytes = 22; return true;
    case KVF__TENSOR_Q5_1: *block_elements = 32, *block_bytes = 24; return true;
    case KVF__TENSOR_Q8_0: *block_elements = 32, *block_bytes = 34; return true;
    case KVF__TENSOR_Q4_K: *block_elements = 256, *block_bytes = 144; return true;
    case KVF__TENSOR_Q5_K: *block_elements = 256, *block_bytes = 176; return true;
    case KVF__TENSOR_Q6_K: *block_elements = 256, *block_bytes = 210; return true;
    default: return false;
    }
}

/* ---- The walk --------------------------------------------------------------------------------------- */

static kvf_status take(cursor *c, uint64_t bytes, const char *what, const unsigned char **out) {
    size_t left = c->gguf->file_bytes - c->at;
    if (bytes > left) {
        (void)kvf__fail(c->err, KVF_E_FORMAT,
                        "%s: %s at offset %zu needs %" PRIu64 " bytes, the file has %zu more: truncated or damaged",
                        c->gguf->path.text, what, c->at, bytes, left);
        return KVF_E_FORMAT;
    }
    *out = c->gguf->map + c->at;
    c->at += (size_t)bytes;
    return KVF_OK;
}

static kvf_status take32(cursor *c, const char *what, uint32_t *out) {
    const unsigned char *p;
    kvf_status status = take(c, 4, what, &p);
    if (status == KVF_OK) *out = load32(p);
    return status;
}

static kvf_status take64(cursor *c, const char *what, uint64_t *out) {
    const unsigned char *p;
    kvf_status status = take(c, 8, what, &p);
    if (status == KVF_OK) *out = load64(p);
    return status;
}

static kvf_status take_text(cursor *c, const char *what, kvf__text *out) {
    uint64_t n;
    const unsigned char *p;
    kvf_status status = take64(c, what, &n);
    if (status == KVF_OK) status = take(c, n, what, &p);
    if (status == KVF_OK) *out = (kvf__text){(const char *)p, (size_t)n};
    return status;
}

static kvf_status take_name(cursor *c, const char *what, size_t max, kvf__text *out) {
    kvf_status status = take_text(c, what, out);
    if (status != KVF_OK) return status;
    if (out->bytes == 0 || out->bytes > max)
        return kvf__fail(c->err, KVF_E_FORMAT, "%s: %s at offset %zu is %zu bytes long: must be 1 to %zu",
                         c->gguf->path.text, what, c->at - out->bytes, out->bytes, max);
    return KVF_OK;
}

static kvf_status check_bools(cursor *c, const kvf__gguf_key *key, kvf__shown *name) {
    for (uint64_t i = 0; i < key->n; i++)
        if (key->data[i] > 1)
            return kvf__fail(c->err, KVF_E_FORMAT, "%s: key %s: boolean of value %u: must be 0 or 1",
                             c->gguf->path.text, kvf__show(name, key->name), key->data[i]);
    return KVF_OK;
}

/* The elements of a value: one of `type`, or n of them. */
static kvf_status take_values(cursor *c, kvf__gguf_key *key, uint32_t type) {
    kvf__shown name;
    kvf__show(&name, key->name);
    size_t each = scalar_bytes(type), left = c->gguf->file_bytes - c->at;
    if (!each && type != KVF__GGUF_STRING)
        return kvf__fail(c->err, KVF_E_FORMAT, "%s: key %s: %s %" PRIu32 ": not a type of the format",
                         c->gguf->path.text, name.text,
                         key->type == KVF__GGUF_ARRAY ? "array of type" : "value of type", type);
    if (key->n > left / (each ? each : 8))
        return kvf__fail(c->err, KVF_E_FORMAT,
                         "%s: key %s: %" PRIu64
                         " x %s need more bytes than the %zu left in the file: truncated or damaged",
                         c->gguf->path.text, name.text, key->n, kvf__gguf_type_name(type), left);
    key->data = c->gguf->map + c->at;
    size_t begin = c->at;
    if (each) {
        c->at += (size_t)key->n * each;
    } else {
        for (uint64_t i = 0; i < key->n; i++) {
            kvf__text text;
            kvf_status status = take_text(c, name.text, &text);
            if (status != KVF_OK) return status;
        }
    }
    key->bytes = c->at - begin;
    return type == KVF__GGUF_BOOL ? check_bools(c, key, &name) : KVF_OK;
}

static kvf_status take_key(cursor *c, kvf__gguf_key *key) {
    kvf__shown name;
    *key = (kvf__gguf_key){.n = 1};
    kvf_status status = take_name(c, "the name of a key", MAX_KEY_NAME, &key->name);
    if (status != KVF_OK) return status;
    kvf__show(&name, key->name);
    status = take32(c, name.text, &key->type);
    if (status != KVF_OK) return status;
    if (key->type != KVF__GGUF_ARRAY) return take_values(c, key, key->type);
    status = take32(c, name.text, &key->element_type);
    if (status == KVF_OK) status = take64(c, name.text, &key->n);
    if (status != KVF_OK) return status;
    if (key->element_type == KVF__GGUF_ARRAY)
        return kvf__fail(c->err, KVF_E_UNSUPPORTED,
                         "%s: key %s: an array of arrays: only arrays of plain values are read", c->gguf->path.text,
                         name.text);
    return take_values(c, key, key->element_type);
}

/* The size of a tensor from its dims and type, nothing of which may wrap. */
static kvf_status size_tensor(cursor *c, kvf__gguf_tensor *t, const char *name) {
    const char *path = c->gguf->path.text;
    uint32_t block, block_bytes;
    t->n_elements = 1;
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (t->dims[i] == 0)
            return kvf__fail(c->err, KVF_E_FORMAT, "%s: tensor %s: dim %" PRIu32 " is 0: must be at least 1", path,
                             name, i);
        if (__builtin_mul_overflow(t->n_elements, t->dims[i], &t->n_elements))
            return kvf__fail(c->err, KVF_E_FORMAT,
                             "%s: tensor %s: the product of its dims up to dim %" PRIu32 " (%" PRIu64
                             ") exceeds 64 bits",
                             path, name, i, t->dims[i]);
    }
    if (!kvf__tensor_type_geometry(t->type, &block, &block_bytes)) return KVF_OK; /* of no use, if it is to be used */
    if (t->dims[0] % block)
        return kvf__fail(c->err, KVF_E_FORMAT,
                         "%s: tensor %s: rows of %" PRIu64 " elements: must be a multiple of %" PRIu32 " for %s", path,
                         name, t->dims[0], block, kvf__tensor_type_name(t->type));
    if (!kvf__mul(t->n_elements / block, block_bytes, &t->bytes))
        return kvf__fail(c->err, KVF_E_FORMAT, "%s: tensor %s: %" PRIu64 " elements of %s: their bytes exceed 64 bits",
                         path, name, t->n_elements, kvf__tensor_type_name(t->type));
    return KVF_OK;
}

/* One entry of the tensor index; data is not yet set, *offset is relative to the data section. */
static kvf_status take_tensor(cursor *c, kvf__gguf_tensor *t, uint64_t *offset) {
    kvf__shown name;
    *t = (kvf__gguf_tensor){.dims = {1, 1, 1, 1}};
    kvf_status status = take_name(c, "the name of a tensor", MAX_TENSOR_NAME, &t->name);
    if (status == KVF_OK) status = take32(c, kvf__show(&name, t->name), &t->n_dims);
    if (status != KVF_OK) return status;
    if (t->n_dims < 1 || t->n_dims > 4)
        return kvf__fail(c->err, KVF_E_FORMAT, "%s: tensor %s: %" PRIu32 " dims: must be 1 to 4", c->gguf->path.text,
                         name.text, t->n_dims);
    for (uint32_t i = 0; i < t->n_dims && status == KVF_OK; i++) status = take64(c, name.text, &t->dims[i]);
    if (status == KVF_OK) status = take32(c, name.text, &t->type);
    if (status == KVF_OK) status = take64(c, name.text, offset);
    return status == KVF_OK ? size_tensor(c, t, name.text) : status;
}

static kvf_status place_tensor(cursor *c, kvf__gguf_tensor *t, uint64_t offset, size_t data_begin) {
    kvf__shown name;
    const kvf__gguf *g = c->gguf;
    size_t room = g->file_bytes - data_begin;
    if (offset % g->alignment)
        return kvf__fail(c->err, KVF_E_FORMAT,
                         "%s: tensor %s: offset %" PRIu64 " is no multiple of the alignment %" PRIu32, g->path.text,
                         kvf__show(&name, t->name), offset, g->alignment);
    if (offset > room || t->bytes > room - offset)
        return kvf__fail(c->err, KVF_E_FORMAT,
                         "%s: tensor %s: %zu bytes at offset %" PRIu64
                         " do not lie in the %zu bytes of data: truncated or damaged",
                         g->path.text, kvf__show(&name, t->name), t->bytes, offset, room);
    t->data = g->map + data_begin + offset;
    return KVF_OK;
}

/* ---- Opening ---------------------------------------------------------------------------------------- */

static kvf_status map_file(const char *path, kvf__gguf *g, kvf_error *err) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not hang */
    if (fd < 0) return kvf__fail(err, KVF_E_IO, "%s: %s", g->path.text, strerror(errno));
    kvf_status status = KVF_OK;
    if (fstat(fd, &info) != 0) {
        status = kvf__fail(err, KVF_E_IO, "%s: %s", g->path.text, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        status = kvf__fail(err, KVF_E_IO, "%s: not a regular file", g->path.text);
    } else if (info.st_size < HEADER_BYTES) {
        status = kvf__fail(err, KVF_E_FORMAT, "%s: %lld bytes: a GGUF file has at least %d", g->path.text,
                           (long long)info.st_size, HEADER_BYTES);
    } else {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED)
            status = kvf__fail(err, KVF_E_IO, "%s: cannot be mapped: %s", g->path.text, strerror(errno));
        else
            g->map = map, g->file_bytes = (size_t)info.st_size;
    }
    close(fd);
    return status;
}

/* Magic, version and counts; the counts are bounded by the file's size here already. */
static kvf_status read_header(cursor *c, kvf__gguf *g) {
    const unsigned char *p;
    kvf_status status = take(c, HEADER_BYTES, "the header", &p);
    if (status != KVF_OK) return status;
    if (memcmp(p, "GGUF", 4))
        return kvf__fail(c->err, KVF_E_FORMAT, "%s: does not begin with \"GGUF\": not a GGUF file", g->path.text);
    g->version = load32(p + 4);
    uint64_t n_tensors = load64(p + 8), n_keys = load64(p + 16);
    if (g->version == 0x02000000u || g->version == 0x03000000u)
        return kvf__fail(c->err, KVF_E_UNSUPPORTED, "%s: a big-endian GGUF file: convert it", g->path.text);
    if (g->version != 2 && g->version != 3)
        return kvf__fail(c->err, KVF_E_UNSUPPORTED, "%s: GGUF version %" PRIu32 ": must be 2 or 3: convert the file",
                         g->path.text, g->version);
    size_t room = g->file_bytes - HEADER_BYTES;
    if (n_keys > room / MIN_KEY_BYTES)
        return kvf__fail(c->err, KVF_E_FORMAT, "%s: key count %" PRIu64 ": the file's %zu bytes cannot hold so many",
                         g->path.text, n_keys, g->file_bytes);
    if (n_tensors > room / MIN_TENSOR_BYTES || n_tensors > UINT32_MAX)
        return kvf__fail(c->err, KVF_E_FORMAT, "%s: tensor count %" PRIu64 ": the file's %zu bytes cannot hold so many",
                         g->path.text, n_tensors, g->file_bytes);
    g->n_keys = (size_t)n_keys;
    g->n_tensors = (size_t)n_tensors;
    return KVF_OK;
}

static kvf_status check_alignment(kvf__gguf *g, const kvf__gguf_key *key, kvf_error *err) {
    if (key->type != KVF__GGUF_U32)
        return kvf__fail(err, KVF_E_FORMAT, "%s: key general.alignment: type %s: must be u32", g->path.text,
                         kvf__gguf_type_name(key->type));
    uint32_t v = load32(key->data);
    if (v < MIN_ALIGNMENT || v > MAX_ALIGNMENT || (v & (v - 1)))
        return kvf__fail(err, KVF_E_FORMAT,
                         "%s: key general.alignment: %" PRIu32 ": must be a power of two in [%d, %d]", g->path.text, v,
                         MIN_ALIGNMENT, MAX_ALIGNMENT);
    g->alignment = v;
    return KVF_OK;
}

/* One walk over the whole index; stores into the arrays when they are there. */
static kvf_status walk(kvf__gguf *g, kvf_error *err) {
    cursor c = {g, HEADER_BYTES, err};
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < g->n_keys; i++) {
        kvf__gguf_key key;
        status = take_key(&c, &key);
        if (status == KVF_OK && kvf__text_equal(key.name, "general.alignment")) status = check_alignment(g, &key, err);
        if (status != KVF_OK) return status;
        if (g->keys) {
            g->keys[i] = key;
            g->keys_by_name[i] = &g->keys[i];
        }
    }
    size_t index_begin = c.at;
    for (int placing = 0; placing < 2; placing++) { /* offsets have a meaning once the index's end is known */
        size_t data_begin = 0;
        if (placing && (!kvf__add(c.at, g->alignment - 1, &data_begin) ||
                        (data_begin = data_begin / g->alignment * g->alignment) > g->file_bytes)) {
            if (g->n_tensors == 0) return KVF_OK;
            return kvf__fail(err, KVF_E_FORMAT, "%s: the file ends before its tensor data begins: truncated",
                             g->path.text);
        }
        c.at = index_begin;
        for (size_t i = 0; i < g->n_tensors; i++) {
            kvf__gguf_tensor tensor;
            uint64_t offset = 0;
            status = take_tensor(&c, &tensor, &offset);
            if (status == KVF_OK && placing) status = place_tensor(&c, &tensor, offset, data_begin);
            if (status != KVF_OK) return status;
            if (placing && g->tensors) {
                g->tensors[i] = tensor;
                g->tensors_by_name[i] = &g->tensors[i];
            }
        }
    }
    return KVF_OK;
}

static int compare_text(kvf__text a, kvf__text b) {
    int r = memcmp(a.data, b.data, KVF__MIN(a.bytes, b.bytes));
    return r ? r : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}

static int compare_keys(const void *a, const void *b) {
    return compare_text((*(const kvf__gguf_key *const *)a)->name, (*(const kvf__gguf_key *const *)b)->name);
}

static int compare_tensors(const void *a, const void *b) {
    return compare_text((*(const kvf__gguf_tensor *const *)a)->name, (*(const kvf__gguf_tensor *const *)b)->name);
}

static int compare_places(const void *a, const void *b) {
    const kvf__gguf_tensor *x = *(const kvf__gguf_tensor *const *)a, *y = *(const kvf__gguf_tensor *const *)b;
    if (x->data == y->data) return (x->bytes > y->bytes) - (x->bytes < y->bytes); /* one of 0 bytes lies over none */
    return x->data > y->data ? 1 : -1;
}

static kvf_status sort_keys(kvf__gguf *g, kvf_error *err) {
    kvf__shown shown;
    if (g->n_keys) qsort(g->keys_by_name, g->n_keys, sizeof *g->keys_by_name, compare_keys);
    for (size_t i = 1; i < g->n_keys; i++)
        if (!compare_keys(&g->keys_by_name[i - 1], &g->keys_by_name[i]))
            return kvf__fail(err, KVF_E_FORMAT, "%s: key %s: is there twice", g->path.text,
                             kvf__show(&shown, g->keys_by_name[i]->name));
    return KVF_OK;
}

/* Refuses what is there twice or lies over one another. */
kvf_status kvf__gguf_sort_tensors(kvf__gguf *g, kvf_error *err) {
    kvf__shown a, b;
    if (g->n_tensors) qsort(g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, compare_places);
    for (size_t i = 1; i < g->n_tensors; i++) {
        const kvf__gguf_tensor *x = g->tensors_by_name[i - 1], *y = g->tensors_by_name[i];
        if ((const unsigned char *)x->data + x->bytes > (const unsigned char *)y->data)
            return kvf__fail(err, KVF_E_FORMAT, "%s: tensors %s and %s: their data overlap", g->path.text,
                             kvf__show(&a, x->name), kvf__show(&b, y->name));
    }
    if (g->n_tensors) qsort(g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, compare_tensors);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (!compare_tensors(&g->tensors_by_name[i - 1], &g->tensors_by_name[i]))
            return kvf__fail(err, KVF_E_FORMAT, "%s: tensor %s: is there twice: convert or fetch the file again",
                             g->path.text, kvf__show(&a, g->tensors_by_name[i]->name));
    return KVF_OK;
}

static kvf_status take_arrays(kvf__gguf *g, kvf_error *err) {
    g->keys = kvf__alloc(&g->allocator, g->n_keys * sizeof *g->keys);
    g->tensors = kvf__alloc(&g->allocator, g->n_tensors * sizeof *g->tensors);
    g->keys_by_name = kvf__alloc(&g->allocator, g->n_keys * sizeof *g->keys_by_name);
    g->tensors_by_name = kvf__alloc(&g->allocator, g->n_tensors * sizeof *g->tensors_by_name);
    if (!g->keys || !g->tensors || !g->keys_by_name || !g->tensors_by_name)
        return kvf__fail(err, KVF_E_NO_MEMORY, "%s: no memory for an index of %zu keys and %zu tensors", g->path.text,
                         g->n_keys, g->n_tensors);
    return KVF_OK;
}

kvf_status kvf__gguf_open_file(const char *path, const kvf_allocator *allocator, kvf__gguf *out, kvf_error *err) {
    memset(out, 0, sizeof *out);
    kvf__gguf g = {.allocator = *allocator, .alignment = 32};
    kvf__show_path(&g.path, path);
    kvf_status status = map_file(path, &g, err);
    if (status != KVF_OK) return status;
    cursor c = {&g, 0, err};
    status = read_header(&c, &g);
    if (status == KVF_OK) status = walk(&g, err);
    if (status == KVF_OK) status = take_arrays(&g, err);
    if (status == KVF_OK) status = walk(&g, err);
    if (status == KVF_OK) status = sort_keys(&g, err);
    if (status == KVF_OK) status = kvf__gguf_sort_tensors(&g, err);
    if (status != KVF_OK) {
        kvf__gguf_close(&g);
        return status;
    }
    *out = g;
    return KVF_OK;
}

void kvf__gguf_close(kvf__gguf *g) {
    if (!g->map) return;
    for (kvf__gguf *part = g->next_part, *next; part; part = next) {
        next = part->next_part;
        part->next_part = NULL;
        kvf__gguf_close(part);
        kvf__free(&g->allocator, part, sizeof *part);
    }
    kvf__free(&g->allocator, g->keys, g->n_keys * sizeof *g->keys);
    kvf__free(&g->allocator, g->tensors, g->n_tensors * sizeof *g->tensors);
    kvf__free(&g->allocator, g->keys_by_name, g->n_keys * sizeof *g->keys_by_name);
    kvf__free(&g->allocator, g->tensors_by_name, g->n_tensors * sizeof *g->tensors_by_name);
    munmap((void *)(uintptr_t)g->map, g->file_bytes);
    memset(g, 0, sizeof *g);
}

/* ---- Reading ---------------------------------------------------------------------------------------- */

const kvf__gguf_key *kvf__gguf_find(const kvf__gguf *g, const char *name) {
    const kvf__gguf_key wanted = {.name = {name, strlen(name)}}, *key = &wanted;
    if (!g->n_keys) return NULL;
    const kvf__gguf_key **hit = bsearch(&key, g->keys_by_name, g->n_keys, sizeof *g->keys_by_name, compare_keys);
    return hit ? *hit : NULL;
}

const kvf__gguf_tensor *kvf__gguf_find_tensor(const kvf__gguf *g, const char *name) {
    const kvf__gguf_tensor wanted = {.name = {name, strlen(name)}}, *key = &wanted;
    if (!g->n_tensors) return NULL;
    const kvf__gguf_tensor **hit =
        bsearch(&key, g->tensors_by_name, g->n_tensors, sizeof *g->tensors_by_name, compare_tensors);
    return hit ? *hit : NULL;
}

/* The key, or NULL when it is absent and need not be there. */
static kvf_status lookup(const kvf__gguf *g, const char *name, int required, bool *found, const kvf__gguf_key **out,
                         kvf_error *err) {
    *out = kvf__gguf_find(g, name);
    if (found) *found = *out != NULL;
    if (!*out && required) return kvf__fail(err, KVF_E_FORMAT, "%s: key %s: is missing", g->path.text, name);
    return KVF_OK;
}

static kvf_status wrong_type(const kvf__gguf *g, const kvf__gguf_key *key, const char *wanted, kvf_error *err) {
    kvf__shown name;
    bool array = key->type == KVF__GGUF_ARRAY;
    return kvf__fail(err, KVF_E_FORMAT, "%s: key %s: type %s%s: must be %s", g->path.text, kvf__show(&name, key->name),
                     array ? "array of " : "", kvf__gguf_type_name(array ? key->element_type : key->type), wanted);
}

kvf_status kvf__gguf_u32(const kvf__gguf *g, const char *name, int required, uint32_t *out, bool *found,
                         kvf_error *err) {
    const kvf__gguf_key *key;
    kvf_status status = lookup(g, name, required, found, &key, err);
    if (!key) return status;
    uint64_t v = 0;
    size_t bytes = scalar_bytes(key->type);
    bool is_signed = key->type == KVF__GGUF_I8 || key->type == KVF__GGUF_I16 || key->type == KVF__GGUF_I32 ||
                     key->type == KVF__GGUF_I64;
    bool is_unsigned = key->type == KVF__GGUF_U8 || key->type == KVF__GGUF_U16 || key->type == KVF__GGUF_U32 ||
                       key->type == KVF__GGUF_U64;
    if (!is_signed && !is_unsigned) return wrong_type(g, key, "an integer", err);
    memcpy(&v, key->data, bytes);
    if (is_signed && (key->data[bytes - 1] & 0x80))
        return kvf__fail(err, KVF_E_FORMAT, "%s: key %s: is negative: must be in [0, 2^32)", g->path.text, name);
    if (v > UINT32_MAX)
        return kvf__fail(err, KVF_E_FORMAT, "%s: key %s: %" PRIu64 ": must be in [0, 2^32)", g->path.text, name, v);
    *out = (uint32_t)v;
    return KVF_OK;
}

kvf_status kvf__gguf_f32(const kvf__gguf *g, const char *name, int required, float *out, bool *found, kvf_error *err) {
    const kvf__gguf_key *key;
    kvf_status status = lookup(g, name, required, found, &key, err);
    if (!key) return status;
    if (key->type != KVF__GGUF_F32) return wrong_type(g, key, "f32", err);
    memcpy(out, key->data, sizeof *out);
    return KVF_OK;
}

kvf_status kvf__gguf_bool(const kvf__gguf *g, const char *name, int required, bool *out, bool *found, kvf_error *err) {
    const kvf__gguf_key *key;
    kvf_status status = lookup(g, name, required, found, &key, err);
    if (!key) return status;
    if (key->type != KVF__GGUF_BOOL) return wrong_type(g, key, "bool", err);
    *out = key->data[0] != 0;
    return KVF_OK;
}

kvf_status kvf__gguf_text(const kvf__gguf *g, const char *name, int required, kvf__text *out, bool *found,
                          kvf_error *err) {
    const kvf__gguf_key *key;
    kvf_status status = lookup(g, name, required, found, &key, err);
    if (!key) return status;
    if (key->type != KVF__GGUF_STRING) return wrong_type(g, key, "a string", err);
    *out = (kvf__text){(const char *)key->data + 8, key->bytes - 8};
    return KVF_OK;
}

kvf_status kvf__gguf_array(const kvf__gguf *g, const char *name, uint32_t element_type, int required,
                           const kvf__gguf_key **out, kvf_error *err) {
    const kvf__gguf_key *key;
    kvf_status status = lookup(g, name, required, NULL, &key, err);
    if (!key) {
        if (status == KVF_OK) *out = NULL;
        return status;
    }
    if (key->type != KVF__GGUF_ARRAY || key->element_type != element_type) {
        char wanted[32] = "array of ";
        strcat(wanted, kvf__gguf_type_name(element_type));
        return wrong_type(g, key, wanted, err);
    }
    *out = key;
    return KVF_OK;
}

kvf__text kvf__gguf_next_text(const unsigned char **at) {
    kvf__text text = {(const char *)*at + 8, (size_t)load64(*at)};
    *at += 8 + text.bytes;
    return text;
}
