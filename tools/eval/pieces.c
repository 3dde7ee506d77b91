/* Pieces of prompts, random choices, filler text. */
#define _POSIX_C_SOURCE 200809L
#include "tools/eval/pieces.h"

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

/* ---- Filler --------------------------------------------------------------------------------------------------- */

static const char *const who[] = {"The baker",     "A gardener",    "The ferryman", "Her cousin",
                                  "The old clerk", "A painter",     "The miller",   "A student",
                                  "The watchman",  "His neighbour", "The tailor",   "A sailor"};
static const char *const does[] = {"walked slowly past",   "was looking for",   "had often spoken of",
                                   "wrote a letter about", "sat down beside",   "could not find",
                                   "kept thinking of",     "made a drawing of", "came back to",
                                   "told a story of",      "asked the way to",  "stopped in front of"};
static const char *const what[] = {"the wooden bridge",   "the empty market",  "a row of poplars",  "the harbour wall",
                                   "a broken fence",      "the school garden", "the narrow street", "a field of barley",
                                   "the railway station", "an apple orchard",  "the village hall",  "a pile of bricks"};
static const char *const when[] = {
    "before sunrise", "in the rain",       "on a quiet afternoon", "after the fair",
    "without a word", "as the bells rang", "late in the autumn",   "while the kettle boiled"};

#define PICK(dice, list) (list)[kvf__dice_below(dice, (uint32_t)(sizeof(list) / sizeof(list)[0]))]

static void generate(const kvf__eval_inputs *in, kvf__dice *dice, uint32_t n, kvf__pieces *out) {
    while (out->n < n && !out->failed) {
        char sentence[200];
        const char *a = PICK(dice, who), *b = PICK(dice, does), *c = PICK(dice, what), *d = PICK(dice, when);
        snprintf(sentence, sizeof sentence, " %s %s %s %s.", a, b, c, d);
        kvf__pieces_text(out, in->tokenizer, sentence);
    }
    if (!out->failed) out->n = n;
}

static bool ends_sentence(const kvf_tokenizer *tokenizer, uint32_t id) {
    char piece[64];
    size_t n = kvf_tokenizer_piece(tokenizer, id, 0, piece, sizeof piece);
    return n && n <= sizeof piece && strchr(".!?\n", piece[n - 1]) != NULL && piece[n - 1];
}

bool kvf__filler(const kvf__eval_inputs *in, kvf__dice *dice, uint32_t sample, uint32_t n, kvf__pieces *out,
                 const char **source, const char **kind, uint64_t *offset) {
    *source = "generated";
    *kind = "synthetic";
    *offset = 0;
    if (!in->texts.n) {
        generate(in, dice, n, out);
    } else {
        const kvf__eval_text *t = &in->texts.list[sample % in->texts.n];
        if (t->n < n) {
            kvf__say("--text %s: has %zu tokens, %u are needed; give a longer text or shorter --contexts", t->source,
                     t->n, n);
            return false;
        }
        *source = t->source;
        *kind = t->kind;
        *offset = kvf__dice_below(dice, (uint32_t)(t->n - n + 1));
        kvf__pieces_ids(out, t->ids + *offset, n);
    }
    if (out->failed) kvf__say("eval: out of memory for a prompt of %u tokens", n);
    return !out->failed;
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
