/* tools/pieces.h: prompts composed of tokenized pieces of text; random choices; the argument of --text. */
#ifndef KVF_TOOLS_PIECES_H
#define KVF_TOOLS_PIECES_H

#include "tools/cli.h"

typedef struct kvf__pieces { /* zero: empty; kvf__pieces_free */
    uint32_t *ids;
    size_t n, capacity;
    bool failed; /* a text could not be added: said once, by who asks */
} kvf__pieces;

void kvf__pieces_ids(kvf__pieces *pieces, const uint32_t *ids, size_t n);
void kvf__pieces_text(kvf__pieces *pieces, const kvf_tokenizer *tokenizer, const char *text);
void kvf__pieces_free(kvf__pieces *pieces);

/* Random numbers of a seed: the same on every machine. */
typedef struct kvf__dice {
    uint64_t state;
} kvf__dice;
kvf__dice kvf__dice_of(uint64_t seed, uint64_t sample, uint64_t salt);
uint32_t kvf__dice_below(kvf__dice *dice, uint32_t n); /* 0..n-1 */

/* The place nearest to `wanted` at which a sentence ends. */
size_t kvf__sentence_end(const kvf_tokenizer *tokenizer, const kvf__pieces *text, size_t wanted);

enum { KVF__SOURCE_BYTES = 96, KVF__KIND_BYTES = 24 };

/* "[KIND[:NAME]=]FILE": what stands before a '=' counts when it begins with a kind. Returns the file. Each may be NULL.
 * source: NAME, or the file's name; kind: KIND, or "text". */
const char *kvf__text_argument(const char *text, char source[KVF__SOURCE_BYTES], char kind[KVF__KIND_BYTES]);

#endif
