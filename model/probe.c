/* A probe: its numbers, checked, in one slab; and its file, a GGUF of a few tensors (kvfold/probe.h). */
#define _POSIX_C_SOURCE 200809L
#include "kvfold/probe.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "model/gguf.h"

enum { VERSION = 1, MAX_LAYERS = 1024, MAX_RHOS = 64, NAME_BYTES = 64, ALIGNMENT = 32, N_FIELDS = 7 };

struct kvf_probe {
    kvf_allocator allocator;
    size_t bytes;
    kvf_probe_data data;
};

/* ---- Fields ------------------------------------------------------------------------------------------- */

/* The arrays of a probe, in the file's order, with the tensors' names. */
typedef struct field {
    const char *name;
    const float **values;
    uint32_t n_dims;
    uint64_t dims[3]; /* the first runs fastest */
    bool required;
} field;

static void list_fields(kvf_probe_data *d, field out[N_FIELDS]) {
    const uint64_t embd = d->n_embd, heads = d->n_kv_heads, layers = d->n_layers, rhos = d->n_rhos;
    bool quantiles = rhos > 0;
    const field fields[N_FIELDS] = {{"weight", &d->weight, 3, {embd, heads, layers}, true},
                                    {"bias", &d->bias, 2, {heads, layers, 1}, true},
                                    {"explained", &d->explained, 2, {heads, layers, 1}, false},
                                    {"rhos", &d->rhos, 1, {rhos, 1, 1}, quantiles},
                                    {"thresholds", &d->thresholds, 1, {rhos, 1, 1}, quantiles},
                                    {"shares", &d->shares, 3, {heads, layers, rhos}, quantiles},
                                    {"most", &d->most, 3, {heads, layers, rhos}, quantiles}};
    memcpy(out, fields, sizeof fields);
}

static size_t n_values(const field *f) { return (size_t)(f->dims[0] * f->dims[1] * f->dims[2]); }

/* ---- Checks ------------------------------------------------------------------------------------------- */

static kvf_status check_sizes(const kvf_probe_data *d, kvf_error *err) {
    const struct {
        const char *name;
        uint32_t value, most;
    } sizes[] = {{"n_layers", d->n_layers, MAX_LAYERS},
                 {"n_kv_heads", d->n_kv_heads, 1u << 16},
                 {"n_embd", d->n_embd, 1u << 20}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (!sizes[i].value || sizes[i].value > sizes[i].most)
            return kvf__fail(err, KVF_E_INVALID, "probe: %s %u: must be in [1, %u]", sizes[i].name, sizes[i].value,
                             sizes[i].most);
    if (d->n_rhos > MAX_RHOS)
        return kvf__fail(err, KVF_E_INVALID, "probe: n_rhos %u: must be at most %d", d->n_rhos, MAX_RHOS);
    if (d->model && strlen(d->model) >= NAME_BYTES)
        return kvf__fail(err, KVF_E_INVALID, "probe: model: its name has %zu bytes: must have less than %d",
                         strlen(d->model), NAME_BYTES);
    return KVF_OK;
}

static kvf_status check_field(const field *f, float least, float most, kvf_error *err) {
    const float *x = *f->values;
    if (!x && f->required) return kvf__fail(err, KVF_E_INVALID, "probe: %s: is NULL", f->name);
    for (size_t i = 0; x && i < n_values(f); i++)
        if (!isfinite(x[i]) || x[i] < least || x[i] > most)
            return kvf__fail(err, KVF_E_INVALID, "probe: %s[%zu] %g: must be finite, in [%g, %g]", f->name, i,
                             (double)x[i], (double)least, (double)most);
    return KVF_OK;
}

static kvf_status check_numbers(kvf_probe_data *d, kvf_error *err) {
    field fields[N_FIELDS];
    list_fields(d, fields);
    for (size_t i = 0; i < N_FIELDS; i++) {
        bool share = fields[i].values == &d->rhos || fields[i].values == &d->shares || fields[i].values == &d->most;
        const float limit = 3e38f, most = share || fields[i].values == &d->explained ? 1.0f : limit;
        kvf_status st = check_field(&fields[i], share ? 0.0f : -limit, most, err);
        if (st) return st;
    }
    for (uint32_t i = 0; i < d->n_rhos; i++) {
        if (!(d->rhos[i] > (i ? d->rhos[i - 1] : 0.0f)))
            return kvf__fail(err, KVF_E_INVALID, "probe: rhos[%u] %g: must ascend, from above 0", i,
                             (double)d->rhos[i]);
        if (i && d->thresholds[i] > d->thresholds[i - 1])
            return kvf__fail(err, KVF_E_INVALID, "probe: thresholds[%u] %g after %g: must descend", i,
                             (double)d->thresholds[i], (double)d->thresholds[i - 1]);
    }
    return KVF_OK;
}

/* ---- Create -------------------------------------------------------------------------------------------- */

/* Copies the arrays into the slab and sets d's pointers to the copies; without a base it only counts. */
static void carve(kvf__slab *s, kvf_probe_data *d) {
    field fields[N_FIELDS];
    char *name = kvf__slab_take(s, NAME_BYTES, 1);
    list_fields(d, fields);
    if (name) snprintf(name, NAME_BYTES, "%s", d->model ? d->model : "");
    if (name) d->model = name;
    for (size_t i = 0; i < N_FIELDS; i++) {
        if (!*fields[i].values || !n_values(&fields[i])) continue;
        float *to = kvf__slab_take(s, n_values(&fields[i]), sizeof *to);
        if (!to) continue;
        memcpy(to, *fields[i].values, n_values(&fields[i]) * sizeof *to);
        *fields[i].values = to;
    }
}

kvf_status kvf_probe_create(const kvf_probe_data *data, const kvf_allocator *allocator, kvf_probe **out,
                            kvf_error *err) {
    kvf_allocator given = allocator ? *allocator : (kvf_allocator){0}, a;
    kvf_probe_data d;
    if (!out) return kvf__fail(err, KVF_E_INVALID, "kvf_probe_create: out is NULL");
    kvf_status st = kvf__config_read(&d, sizeof d, data, "kvf_probe_data", err);
    if (st || (st = kvf__allocator_resolve(&given, &a, err))) return st;
    if ((st = check_sizes(&d, err)) || (st = check_numbers(&d, err))) return st;
    if (!d.n_rhos) d.rhos = d.thresholds = d.shares = d.most = NULL;
    kvf__slab s = {0};
    (void)kvf__slab_take(&s, 1, sizeof(kvf_probe));
    carve(&s, &d);
    if (s.bad)
        return kvf__fail(err, KVF_E_OVERFLOW, "probe: %u layers of %u heads: sizes wrap", d.n_layers, d.n_kv_heads);
    size_t bytes = s.used;
    s = (kvf__slab){.base = kvf__alloc(&a, bytes)};
    if (!s.base) return kvf__fail(err, KVF_E_NO_MEMORY, "probe: %zu bytes could not be allocated", bytes);
    kvf_probe *p = kvf__slab_take(&s, 1, sizeof *p);
    carve(&s, &d);
    d.struct_size = sizeof d;
    *p = (kvf_probe){a, bytes, d};
    *out = p;
    return KVF_OK;
}

void kvf_probe_close(kvf_probe *probe) {
    if (!probe) return;
    kvf_allocator a = probe->allocator;
    kvf__free(&a, probe, probe->bytes);
}

kvf_status kvf_probe_get(const kvf_probe *probe, kvf_probe_data *data) {
    if (!probe || !kvf__output_is_valid(data)) return KVF_E_INVALID;
    kvf__output(data, &probe->data, sizeof probe->data);
    return KVF_OK;
}

/* ---- Read ---------------------------------------------------------------------------------------------- */

static kvf_status read_key(const kvf__gguf *g, const char *name, uint32_t *out, kvf_error *err) {
    char key[48];
    snprintf(key, sizeof key, "kvfold-probe.%s", name);
    return kvf__gguf_u32(g, key, 1, out, NULL, err);
}

static kvf_status read_field(const kvf__gguf *g, const field *f, const char *path, kvf_error *err) {
    const kvf__gguf_tensor *t = kvf__gguf_find_tensor(g, f->name);
    if (!t && !f->required) return KVF_OK;
    if (!t) return kvf__fail(err, KVF_E_FORMAT, "%s: has no tensor %s", path, f->name);
    bool same = t->type == KVF__TENSOR_F32;
    for (uint32_t i = 0; i < 3; i++) same = same && t->dims[i] == f->dims[i];
    if (!same || t->dims[3] != 1)
        return kvf__fail(err, KVF_E_FORMAT, "%s: tensor %s: must be F32, %llu by %llu by %llu", path, f->name,
                         (unsigned long long)f->dims[0], (unsigned long long)f->dims[1],
                         (unsigned long long)f->dims[2]);
    *f->values = t->data;
    return KVF_OK;
}

static kvf_status read_all(const kvf__gguf *g, const char *path, kvf_probe_data *d, char name[NAME_BYTES],
                           kvf_error *err) {
    kvf__text architecture = {0}, model = {0};
    uint32_t version = 0;
    kvf_status st = kvf__gguf_text(g, "general.architecture", 1, &architecture, NULL, err);
    if (!st && !kvf__text_equal(architecture, "kvfold-probe"))
        return kvf__fail(err, KVF_E_FORMAT, "%s: is no probe; make one with kvfold calibrate", path);
    if (st || (st = read_key(g, "version", &version, err))) return st;
    if (version != VERSION)
        return kvf__fail(err, KVF_E_UNSUPPORTED,
                         "%s: version %u: this library reads version %d; make it again with "
                         "kvfold calibrate",
                         path, version, VERSION);
    if ((st = read_key(g, "n_layers", &d->n_layers, err)) || (st = read_key(g, "n_kv_heads", &d->n_kv_heads, err)) ||
        (st = read_key(g, "n_embd", &d->n_embd, err)) || (st = read_key(g, "n_rhos", &d->n_rhos, err)) ||
        (st = check_sizes(d, err)) || (st = kvf__gguf_text(g, "kvfold-probe.model", 0, &model, NULL, err)))
        return st;
    if (model.bytes >= NAME_BYTES)
        return kvf__fail(err, KVF_E_FORMAT, "%s: the model's name has %zu bytes: must have less than %d", path,
                         model.bytes, NAME_BYTES);
    if (model.bytes) memcpy(name, model.data, model.bytes);
    d->model = name;
    field fields[N_FIELDS];
    list_fields(d, fields);
    for (size_t i = 0; i < N_FIELDS && !st; i++)
        if (n_values(&fields[i])) st = read_field(g, &fields[i], path, err);
    return st;
}

kvf_status kvf_probe_open(const char *path, const kvf_allocator *allocator, kvf_probe **out, kvf_error *err) {
    kvf_allocator given = allocator ? *allocator : (kvf_allocator){0}, a;
    if (!path || !out) return kvf__fail(err, KVF_E_INVALID, "kvf_probe_open: %s is NULL", path ? "out" : "path");
    kvf_status st = kvf__allocator_resolve(&given, &a, err);
    kvf__gguf g;
    if (st || (st = kvf__gguf_open(path, &a, &g, err))) return st;
    kvf_probe_data d = {.struct_size = sizeof d};
    char name[NAME_BYTES] = "";
    kvf_error why = {.text = ""};
    st = read_all(&g, g.path.text, &d, name, &why);
    if (!st) st = kvf_probe_create(&d, &a, out, &why);
    if (st == KVF_E_INVALID)
        st = kvf__fail(err, KVF_E_FORMAT, "%s: %s", g.path.text, why.text);
    else if (st && err)
        *err = why;
    kvf__gguf_close(&g);
    return st;
}

/* ---- Write --------------------------------------------------------------------------------------------- */

static void put(FILE *f, const void *data, size_t bytes) { (void)fwrite(data, 1, bytes, f); } /* ferror tells */
static void put_u32(FILE *f, uint32_t x) { put(f, &x, sizeof x); }
static void put_u64(FILE *f, uint64_t x) { put(f, &x, sizeof x); }
static void put_text(FILE *f, const char *text) {
    put_u64(f, strlen(text));
    put(f, text, strlen(text));
}
static void put_key(FILE *f, const char *name, const char *text, uint32_t number) {
    put_text(f, name);
    put_u32(f, text ? KVF__GGUF_STRING : KVF__GGUF_U32);
    if (text)
        put_text(f, text);
    else
        put_u32(f, number);
}
static uint64_t aligned(uint64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
static void pad(FILE *f, uint64_t bytes) {
    static const char zeros[ALIGNMENT];
    put(f, zeros, (size_t)(aligned(bytes) - bytes));
}

static void write_all(FILE *f, const kvf_probe_data *d, const field *fields) {
    uint64_t n_tensors = 0, offset = 0;
    for (size_t i = 0; i < N_FIELDS; i++) n_tensors += *fields[i].values != NULL;
    put(f, "GGUF", 4);
    put_u32(f, 3);
    put_u64(f, n_tensors);
    put_u64(f, 7);
    put_key(f, "general.architecture", "kvfold-probe", 0);
    put_key(f, "kvfold-probe.version", NULL, VERSION);
    put_key(f, "kvfold-probe.n_layers", NULL, d->n_layers);
    put_key(f, "kvfold-probe.n_kv_heads", NULL, d->n_kv_heads);
    put_key(f, "kvfold-probe.n_embd", NULL, d->n_embd);
    put_key(f, "kvfold-probe.n_rhos", NULL, d->n_rhos);
    put_key(f, "kvfold-probe.model", d->model, 0);
    for (size_t i = 0; i < N_FIELDS; i++) {
        if (!*fields[i].values) continue;
        put_text(f, fields[i].name);
        put_u32(f, fields[i].n_dims);
        for (uint32_t j = 0; j < fields[i].n_dims; j++) put_u64(f, fields[i].dims[j]);
        put_u32(f, KVF__TENSOR_F32);
        put_u64(f, offset);
        offset += aligned(n_values(&fields[i]) * sizeof(float));
    }
    pad(f, (uint64_t)ftell(f));
    for (size_t i = 0; i < N_FIELDS; i++) {
        size_t bytes = n_values(&fields[i]) * sizeof(float);
        if (!*fields[i].values) continue;
        put(f, *fields[i].values, bytes);
        pad(f, bytes);
    }
}

kvf_status kvf_probe_save(const kvf_probe *probe, const char *path, kvf_error *err) {
    if (!probe || !path) return kvf__fail(err, KVF_E_INVALID, "kvf_probe_save: %s is NULL", probe ? "path" : "probe");
    kvf_allocator a = probe->allocator;
    size_t n = strlen(path) + 6;
    char *part = kvf__alloc(&a, n);
    if (!part) return kvf__fail(err, KVF_E_NO_MEMORY, "probe: %zu bytes could not be allocated", n);
    snprintf(part, n, "%s.part", path);
    kvf__shown shown;
    kvf_probe_data d = probe->data;
    field fields[N_FIELDS];
    list_fields(&d, fields);
    FILE *f = fopen(part, "wb");
    if (f) write_all(f, &d, fields);
    bool whole = f && !ferror(f) && !fflush(f) && !fsync(fileno(f));
    if (f && fclose(f)) whole = false;
    if (whole && rename(part, path)) whole = false;
    int why = errno;
    if (f && !whole) (void)unlink(part);
    kvf__free(&a, part, n);
    return whole ? KVF_OK
                 : kvf__fail(err, KVF_E_IO, "%s: cannot be written: %s", kvf__show_path(&shown, path), strerror(why));
}
