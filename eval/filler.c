/* Filler: the text in which a task hides its facts. */
#include <stdio.h>

#include "eval/eval.h"

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
