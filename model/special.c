/* model/special.c: tokens that are recognised in a text by their spelling: control tokens, if the caller asks for them,
 * and user-defined tokens, in any text.
 *
 * They are sorted by their bytes. A search narrows, byte by byte, the range of tokens that match the text so far:
 * O(bytes of the longest match * log of the number of tokens). */
#include "model/tokenizer.h"

#include <stdlib.h>

static kvf__text bytes_of(const kvf_tokenizer *t, uint32_t id) {
    return (kvf__text){t->bytes + t->begins[id], t->begins[id + 1] - t->begins[id]};
}

/* ---- Loading ------------------------------------------------------------------------------------------- */

typedef struct entry {
    kvf__text text;
    uint32_t id;
} entry;

static int compare_entries(const void *a, const void *b) {
    const entry *x = a, *y = b;
    int c = memcmp(x->text.data, y->text.data, KVF__MIN(x->text.bytes, y->text.bytes));
    if (c) return c;
    if (x->text.bytes != y->text.bytes) return x->text.bytes < y->text.bytes ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static bool is_of(const kvf_tokenizer *t, uint32_t id, bool user_defined) {
    uint8_t type = t->types[id];
    bool found =
        user_defined ? type == KVF__TOKEN_USER_DEFINED : type == KVF__TOKEN_CONTROL || type == KVF__TOKEN_UNKNOWN;
    return found && t->begins[id + 1] > t->begins[id];
}

static bool sort(const kvf_tokenizer *t, bool user_defined, kvf__specials *out) {
    size_t n = 0;
    for (uint32_t id = 0; id < t->n_vocab; id++) n += is_of(t, id, user_defined);
    entry *entries = kvf__alloc(&t->allocator, n * sizeof *entries);
    out->ids = kvf__alloc(&t->allocator, n * sizeof *out->ids);
    out->n = n;
    n = 0;
    for (uint32_t id = 0; entries && out->ids && id < t->n_vocab; id++)
        if (is_of(t, id, user_defined)) entries[n++] = (entry){bytes_of(t, id), id};
    if (n) qsort(entries, n, sizeof *entries, compare_entries);
    for (size_t i = 0; i < n; i++) {
        out->ids[i] = entries[i].id;
        out->first[(unsigned char)entries[i].text.data[0]] = true;
    }
    bool done = entries && out->ids;
    kvf__free(&t->allocator, entries, out->n * sizeof *entries);
    return done;
}

bool kvf__specials_create(kvf_tokenizer *t) { return sort(t, false, &t->controls) && sort(t, true, &t->user_defined); }

void kvf__specials_destroy(kvf_tokenizer *t) {
    kvf__free(&t->allocator, t->controls.ids, t->controls.n * sizeof *t->controls.ids);
    kvf__free(&t->allocator, t->user_defined.ids, t->user_defined.n * sizeof *t->user_defined.ids);
}

/* ---- Searching ----------------------------------------------------------------------------------------- */

/* The first of [begin, end) whose byte `depth` is at least `byte`; one that ends there comes before all bytes. */
static size_t lower_bound(const kvf_tokenizer *t, const kvf__specials *s, size_t begin, size_t end, size_t depth,
                          int byte) {
    while (begin < end) {
        size_t middle = begin + (end - begin) / 2;
        kvf__text text = bytes_of(t, s->ids[middle]);
        int has = text.bytes > depth ? (unsigned char)text.data[depth] : -1;
        if (has < byte)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* The longest token that the text begins with: its bytes in the text, 0 for none. spaces: U+2581 is a space there. */
static size_t longest(const kvf_tokenizer *t, const kvf__specials *s, const char *text, size_t n, bool spaces,
                      uint32_t *id) {
    size_t begin = 0, end = s->n, found = 0;
    for (size_t at = 0, depth = 0; begin < end && at < n; depth++) {
        bool space = spaces && n - at >= 3 && !memcmp(text + at, KVF__SPM_SPACE, 3);
        int byte = space ? ' ' : (unsigned char)text[at];
        if (!depth && !s->first[byte]) return 0;
        at += space ? 3 : 1;
        begin = lower_bound(t, s, begin, end, depth, byte);
        end = lower_bound(t, s, begin, end, depth, byte + 1);
        if (begin == end || bytes_of(t, s->ids[begin]).bytes != depth + 1) continue;
        found = at;
        *id = s->ids[begin];
    }
    return found;
}

size_t kvf__user_defined_at(const kvf_tokenizer *t, const char *text, size_t n, uint32_t *id) {
    return longest(t, &t->user_defined, text, n, t->scores != NULL, id);
}

size_t kvf__control_at(const kvf_tokenizer *t, const char *text, size_t n, uint32_t *id) {
    return longest(t, &t->controls, text, n, false, id);
}
