/* Pieces of prompts, random choices, ends of sentences, arguments of --text. */
#define _POSIX_C_SOURCE 200809L
#include "tools/pieces.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Pieces ----------------------------------------------------------------------------------------------- */

void kvf__pieces_ids(kvf__pieces *p, const uint32_t *ids, size_t n) {
    if (p->failed) return;
    if (p->n + n > p->capacity) {
        size_t capacity = p->capacity + p->capacity / 2 + n + 64;
        uint32_t *larger = realloc(p->ids, capacity * sizeof *larger);
        if (!larger) {
            p->failed = true;
            return;
        }
        p->ids = larger;
        p->capacity = capacity;
    }
    if (n) memcpy(p->ids + p->n, ids, n * sizeof *ids);
    p->n += n;
}

void kvf__pieces_text(kvf__pieces *p, const kvf_tokenizer *tokenizer, const char *text) {
    size_t n = 0;
    kvf_error err = {.text = ""};
    uint32_t *ids = p->failed ? NULL : kvf__encode(tokenizer, text, strlen(text), 0, &n, &err);
    if (ids)
        kvf__pieces_ids(p, ids, n);
    else
        p->failed = true;
    free(ids);
}

void kvf__pieces_free(kvf__pieces *p) {
    free(p->ids);
    *p = (kvf__pieces){NULL, 0, 0, false};
}

/* ---- Dice --------------------------------------------------------------------------------------------------- */

/* splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t roll(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

kvf__dice kvf__dice_of(uint64_t seed, uint64_t sample, uint64_t salt) {
    kvf__dice d = {seed};
    d.state = roll(&d.state) ^ sample;
    d.state = roll(&d.state) ^ salt;
    return d;
}

uint32_t kvf__dice_below(kvf__dice *dice, uint32_t n) { return (uint32_t)(((roll(&dice->state) >> 32) * n) >> 32); }

/* ---- Sentences ------------------------------------------------------------------------------------------ */

static bool ends_sentence(const kvf_tokenizer *tokenizer, uint32_t id) {
    char piece[64];
    size_t n = kvf_tokenizer_piece(tokenizer, id, 0, piece, sizeof piece);
    return n && n <= sizeof piece && strchr(".!?\n", piece[n - 1]) != NULL && piece[n - 1];
}

size_t kvf__sentence_end(const kvf_tokenizer *tokenizer, const kvf__pieces *text, size_t wanted) {
    for (size_t step = 0; step <= text->n; step++) {
        size_t after = wanted + step;
        if (after <= text->n && (after == 0 || after == text->n || ends_sentence(tokenizer, text->ids[after - 1])))
            return after;
        if (step > wanted) continue;
        size_t before = wanted - step;
        if (before == 0 || ends_sentence(tokenizer, text->ids[before - 1])) return before;
    }
    return wanted < text->n ? wanted : text->n;
}

/* ---- The argument of --text -------------------------------------------------------------------------------- */

static const char *const kinds[] = {"novel", "essay", "code", "dialogue", "problems", "text"};

static const char *kind_of(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strlen(kinds[i]) == length && !strncmp(kinds[i], name, length)) return kinds[i];
    return NULL;
}

/* The file's name without folders and what follows its last dot. */
static void name_of(const char *path, char *name, size_t capacity) {
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path, *dot = strrchr(base, '.');
    size_t length = dot && dot != base ? (size_t)(dot - base) : strlen(base);
    if (!strcmp(path, "-")) base = "stdin", length = 5;
    snprintf(name, capacity, "%.*s", (int)(length < capacity ? length : capacity - 1), base);
}

const char *kvf__text_argument(const char *text, char source[KVF__SOURCE_BYTES], char text_kind[KVF__KIND_BYTES]) {
    const char *equals = strchr(text, '=');
    size_t head = equals ? (size_t)(equals - text) : 0, length = strcspn(text, ":=");
    const char *kind = equals ? kind_of(text, length < head ? length : head) : NULL;
    const char *path = kind ? equals + 1 : text;
    if (text_kind) snprintf(text_kind, KVF__KIND_BYTES, "%s", kind ? kind : "text");
    if (source && kind && length < head)
        snprintf(source, KVF__SOURCE_BYTES, "%.*s", (int)(head - length - 1), text + length + 1);
    else if (source)
        name_of(path, source, KVF__SOURCE_BYTES);
    return path;
}
