/* tools/eval/pieces.h: prompts composed of tokenized pieces of text; random choices; the filler text that hides facts. */
#ifndef KVF_TOOLS_EVAL_PIECES_H
#define KVF_TOOLS_EVAL_PIECES_H

#include "tools/eval/eval.h"

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

/* n tokens of filler text that does not contain the answer: of the sample's text, or generated. False after a
 * message. source and kind are the item's. */
bool kvf__filler(const kvf__eval_inputs *inputs, kvf__dice *dice, uint32_t sample, uint32_t n, kvf__pieces *out,
                 const char **source, const char **kind, uint64_t *offset);

/* The place nearest to `wanted` at which a sentence ends. */
size_t kvf__sentence_end(const kvf_tokenizer *tokenizer, const kvf__pieces *text, size_t wanted);

#endif
