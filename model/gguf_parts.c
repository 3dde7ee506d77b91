/* model/gguf_parts.c: the other parts of a split GGUF file.
 *
 * Part i of n is the file PREFIX-0000i-of-0000n.gguf. Each is a GGUF file of its own with the keys split.no (from 0),
 * split.count and split.tensors.count (of all parts); the first has the model's keys as well. */
#include "model/gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PARTS = 65535, /* the keys are u16 */ SUFFIX_BYTES = 20 /* of "-00001-of-00003.gguf" */ };

typedef struct split {
    uint32_t no, count, n_tensors;
    bool found;
} split;

static kvf_status read_split(const kvf__gguf *g, split *out, kvf_error *err) {
    *out = (split){.count = 1};
    kvf_status status = kvf__gguf_u32(g, "split.count", 0, &out->count, &out->found, err);
    if (status != KVF_OK || !out->found) return status;
    if (out->count < 1 || out->count > MAX_PARTS)
        return kvf__fail(err, KVF_E_FORMAT, "%s: key split.count: %" PRIu32 ": must be in [1, %d]", g->path.text,
                         out->count, MAX_PARTS);
    status = kvf__gguf_u32(g, "split.no", 1, &out->no, NULL, err);
    if (status == KVF_OK && out->no >= out->count)
        return kvf__fail(err, KVF_E_FORMAT, "%s: key split.no: %" PRIu32 ": must be below split.count, %" PRIu32,
                         g->path.text, out->no, out->count);
    return status == KVF_OK ? kvf__gguf_u32(g, "split.tensors.count", 1, &out->n_tensors, NULL, err) : status;
}

/* The first part must be given, under the name from which those of the others follow. */
static kvf_status check_first(const kvf__gguf *g, const char *path, const split *s, kvf_error *err) {
    char suffix[SUFFIX_BYTES + 1];
    size_t n = strlen(path);
    if (s->no != 0)
        return kvf__fail(err, KVF_E_INVALID,
                         "%s: key split.no: %" PRIu32 ": this is part %" PRIu32 " of %" PRIu32
                         ": name the first, whose name ends in -00001-of-%05" PRIu32 ".gguf",
                         g->path.text, s->no, s->no + 1, s->count, s->count);
    snprintf(suffix, sizeof suffix, "-00001-of-%05u.gguf", (unsigned)s->count % 100000);
    if (n < SUFFIX_BYTES || strcmp(path + n - SUFFIX_BYTES, suffix) != 0)
        return kvf__fail(err, KVF_E_INVALID,
                         "%s: key split.count: %" PRIu32
                         ": the name of the file must end in %s, and the other parts be named like it",
                         g->path.text, s->count, suffix);
    return KVF_OK;
}

static kvf_status check_part(const kvf__gguf *first, const split *s, const kvf__gguf *part, uint32_t no,
                             kvf_error *err) {
    split p;
    kvf_status status = read_split(part, &p, err);
    if (status != KVF_OK) return status;
    if (!p.found)
        return kvf__fail(err, KVF_E_FORMAT, "%s: key split.count: is missing: not a part of %s", part->path.text,
                         first->path.text);
    const struct {
        const char *key;
        uint32_t have, want;
    } same[] = {
        {"split.count", p.count, s->count}, {"split.no", p.no, no}, {"split.tensors.count", p.n_tensors, s->n_tensors}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (same[i].have != same[i].want)
            return kvf__fail(err, KVF_E_FORMAT,
                             "%s: key %s: %" PRIu32 ": must be %" PRIu32 " in part %" PRIu32 " of %s", part->path.text,
                             same[i].key, same[i].have, same[i].want, no + 1, first->path.text);
    return KVF_OK;
}

/* The parts after the first, into first->next_part. path: of the first. */
static kvf_status open_parts(kvf__gguf *first, const split *s, const char *path, kvf_error *err) {
    const kvf_allocator *a = &first->allocator;
    size_t n = strlen(path) + 1;
    kvf__gguf **link = &first->next_part;
    kvf_status status = KVF_OK;
    char *name = kvf__alloc(a, n);
    if (!name) return kvf__fail(err, KVF_E_NO_MEMORY, "%s: no memory for the names of its parts", first->path.text);
    memcpy(name, path, n);
    for (uint32_t no = 1; no < s->count && status == KVF_OK; no++) {
        char number[8];
        snprintf(number, sizeof number, "%05u", (unsigned)(no + 1) % 100000);
        memcpy(name + n - SUFFIX_BYTES, number, 5);
        kvf_error detail = {.text = ""};
        kvf__gguf *part = kvf__alloc(a, sizeof *part);
        status = part ? kvf__gguf_open_file(name, a, part, &detail) : KVF_E_NO_MEMORY;
        if (status != KVF_OK) {
            kvf__free(a, part, sizeof *part);
            (void)kvf__fail(err, status, "%s (part %" PRIu32 " of %" PRIu32 ")", part ? detail.text : "no memory",
                            no + 1, s->count);
            break;
        }
        *link = part; /* from here on the first part's to close */
        link = &part->next_part;
        status = check_part(first, s, part, no, err);
    }
    kvf__free(a, name, n);
    return status;
}

/* The index of all parts takes the place of that of the first. */
static kvf_status join_tensors(kvf__gguf *first, const split *s, kvf_error *err) {
    const kvf_allocator *a = &first->allocator;
    size_t total = 0, at = 0;
    for (const kvf__gguf *part = first; part; part = part->next_part) total += part->n_tensors; /* each below 2^32 */
    if (total != s->n_tensors)
        return kvf__fail(err, KVF_E_FORMAT,
                         "%s: key split.tensors.count: %" PRIu32 ": its %" PRIu32 " parts have %zu tensors",
                         first->path.text, s->n_tensors, s->count, total);
    kvf__gguf_tensor *tensors = kvf__alloc(a, total * sizeof *tensors);
    const kvf__gguf_tensor **by_name = kvf__alloc(a, total * sizeof *by_name);
    if (!tensors || !by_name) {
        kvf__free(a, tensors, total * sizeof *tensors);
        kvf__free(a, by_name, total * sizeof *by_name);
        return kvf__fail(err, KVF_E_NO_MEMORY, "%s: no memory for an index of %zu tensors", first->path.text, total);
    }
    for (const kvf__gguf *part = first; part; part = part->next_part)
        for (size_t i = 0; i < part->n_tensors; i++, at++) {
            tensors[at] = part->tensors[i];
            by_name[at] = &tensors[at];
        }
    kvf__free(a, first->tensors, first->n_tensors * sizeof *first->tensors);
    kvf__free(a, first->tensors_by_name, first->n_tensors * sizeof *first->tensors_by_name);
    first->tensors = tensors;
    first->tensors_by_name = by_name;
    first->n_tensors = total;
    return kvf__gguf_sort_tensors(first, err);
}

kvf_status kvf__gguf_open(const char *path, const kvf_allocator *allocator, kvf__gguf *out, kvf_error *err) {
    split s;
    kvf_status status = kvf__gguf_open_file(path, allocator, out, err);
    if (status != KVF_OK) return status;
    status = read_split(out, &s, err);
    if (status == KVF_OK && s.count > 1) {
        status = check_first(out, path, &s, err);
        if (status == KVF_OK) status = open_parts(out, &s, path, err);
        if (status == KVF_OK) status = join_tensors(out, &s, err);
    }
    if (status != KVF_OK) kvf__gguf_close(out);
    return status;
}
