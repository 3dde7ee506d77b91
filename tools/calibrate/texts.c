/* What a probe is fitted to: texts, and made-up facts whose words nobody could guess. Later questions ask for such things, so
 * the model must look them up, and the scores show where. */
#include "tools/calibrate/texts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/pieces.h"

extern const unsigned char kvf__calibrate_prose[], kvf__calibrate_code[];
extern const size_t kvf__calibrate_prose_bytes, kvf__calibrate_code_bytes;

enum { FACT_BYTES = 240, FACT_EVERY = 160 /* tokens, on average */, LIST_EVERY = 4 /* prompts */ };

#define COUNT(list) ((uint32_t)(sizeof(list) / sizeof(list)[0]))
#define PICK(dice, list) (list)[kvf__dice_below(dice, COUNT(list))]

static const char *const syllables[] = {"ba",  "ne",  "ri",  "to",  "lu",  "ka",  "mi",  "so",  "ve",  "da",
                                        "el",  "or",  "an",  "is",  "um",  "tha", "bre", "gor", "lin", "mar",
                                        "pel", "ran", "sta", "tov", "wen", "yar", "zel", "kin", "hol", "dri"};
static const char *const words[] = {
    "apple",  "anchor", "basket", "blanket", "button", "candle",  "carpet", "cherry",  "clock",  "cotton", "curtain",
    "desert", "dragon", "engine", "feather", "fiddle", "flour",   "forest", "ginger",  "glove",  "hammer", "harvest",
    "island", "jacket", "jungle", "kitten",  "ladder", "lemon",   "marble", "mirror",  "needle", "ocean",  "olive",
    "orange", "paper",  "parrot", "pencil",  "pepper", "pillow",  "planet", "pocket",  "rabbit", "ribbon", "river",
    "saddle", "silk",   "spoon",  "stone",   "summer", "sugar",   "table",  "thunder", "ticket", "timber", "trumpet",
    "tulip",  "velvet", "violin", "wagon",   "walnut", "whistle", "window", "winter",  "wool"};
static const char *const months[] = {"January", "March", "April", "June", "August", "October", "December"};
static const char *const things[] = {"account", "parcel",   "ticket", "licence",
                                     "order",   "contract", "sample", "booking"};

/* A name of two or three syllables, as nobody has it. */
static void make_name(kvf__dice *dice, char out[32]) {
    size_t n = 0;
    for (uint32_t i = 0, parts = 2 + kvf__dice_below(dice, 2); i < parts; i++)
        n += (size_t)snprintf(out + n, 32 - n, "%s", PICK(dice, syllables));
    out[0] = (char)(out[0] - 'a' + 'A');
}

/* One fact, without a space or a line's end around it. */
static void make_fact(kvf__dice *dice, char out[FACT_BYTES]) {
    char who[32], family[32], place[32];
    const char *a = PICK(dice, words), *b = PICK(dice, words), *c = PICK(dice, words), *thing = PICK(dice, things);
    uint32_t number = 100 + kvf__dice_below(dice, 99900), day = 1 + kvf__dice_below(dice, 28);
    make_name(dice, who);
    make_name(dice, family);
    make_name(dice, place);
    switch (kvf__dice_below(dice, 10)) {
    case 0:
        snprintf(out, FACT_BYTES, "%s %s lives at %u %s Street in %s.", who, family, number % 300, place, who);
        break;
    case 1: snprintf(out, FACT_BYTES, "The password of %s is %s %s %s.", who, a, b, c); break;
    case 2:
        snprintf(out, FACT_BYTES, "%s %u was signed on %u %s by %s %s.", thing, number, day, PICK(dice, months), who,
                 family);
        break;
    case 3: snprintf(out, FACT_BYTES, "#define %s_%s_LIMIT %u", a, b, number); break;
    case 4: snprintf(out, FACT_BYTES, "| %s %s | %s | %u | %s |", who, family, place, number, a); break;
    case 5:
        snprintf(out, FACT_BYTES, "%s %s, %s: telephone %03u %04u", who, family, place, number % 1000, number % 9973);
        break;
    case 6: snprintf(out, FACT_BYTES, "{\"id\": %u, \"name\": \"%s\", \"key\": \"%s-%s\"}", number, who, a, b); break;
    case 7:
        snprintf(out, FACT_BYTES, "In %s they keep the %s behind the %s, and %s has the %s.", place, a, b, who, c);
        break;
    case 8: snprintf(out, FACT_BYTES, "%s = \"%s-%u\"; // of %s", a, b, number, who); break;
    default: snprintf(out, FACT_BYTES, "%s's favourite words are %s, %s and %s.", who, a, b, c);
    }
}

static void put_fact(kvf__dice *dice, const kvf_tokenizer *tokenizer, const char *before, kvf__pieces *out) {
    char fact[FACT_BYTES], text[FACT_BYTES + 8];
    make_fact(dice, fact);
    snprintf(text, sizeof text, "%s%s", before, fact);
    kvf__pieces_text(out, tokenizer, text);
}

/* ---- Prompts -------------------------------------------------------------------------------------------------- */

typedef struct source {
    uint32_t *ids;
    size_t n;
} source;

static bool read_source(const kvf__cli *cli, uint32_t i, const kvf_tokenizer *tokenizer, source *out) {
    size_t n_bytes = i ? kvf__calibrate_code_bytes : kvf__calibrate_prose_bytes;
    const char *own = (const char *)(i ? kvf__calibrate_code : kvf__calibrate_prose), *path = NULL;
    char *text = NULL;
    kvf_error err = {.text = ""};
    if (cli->texts.n) {
        path = kvf__text_argument(cli->texts.values[i], NULL, NULL);
        if (!(text = kvf__read_file(path, "text", &n_bytes))) return false;
    }
    out->ids = kvf__encode(tokenizer, text ? text : own, n_bytes, 0, &out->n, &err);
    free(text);
    if (out->ids && out->n >= 2) return true;
    kvf__say("--text %s: %s", path ? kvf__shown(path).text : "", out->ids ? "is empty" : err.text);
    return false;
}

/* One prompt. In every LIST_EVERY-th nothing but facts; of the others half have facts between their sentences. */
static bool make_prompt(const source *from, uint32_t sample, uint32_t context, const kvf_tokenizer *tokenizer,
                        uint32_t bos, uint64_t seed, uint32_t *to) {
    kvf__dice dice = kvf__dice_of(seed, sample, 0x63616c);
    kvf__pieces p = {0}, filler = {0};
    bool list = sample % LIST_EVERY == LIST_EVERY - 1, facts = sample % 2 == 1;
    size_t begin = kvf__dice_below(&dice, (uint32_t)from->n), at = 0;
    if (bos != KVF_NO_TOKEN) kvf__pieces_ids(&p, &bos, 1);
    /* A text that is too short begins again. */
    for (size_t n = 0; !list && n < context; n += from->n - begin, begin = 0)
        kvf__pieces_ids(&filler, from->ids + begin, from->n - begin);
    while (p.n < context && !p.failed && !filler.failed) {
        size_t gap = kvf__dice_below(&dice, 2 * FACT_EVERY);
        size_t end = list ? 0 : facts ? kvf__sentence_end(tokenizer, &filler, at + gap) : filler.n;
        if (end > at) kvf__pieces_ids(&p, filler.ids + at, end - at);
        if (end > at) at = end;
        if (list || facts) put_fact(&dice, tokenizer, list ? "\n" : " ", &p);
    }
    bool ok = !p.failed && !filler.failed;
    if (ok) memcpy(to, p.ids, context * sizeof *to);
    kvf__pieces_free(&p);
    kvf__pieces_free(&filler);
    if (!ok) kvf__say("calibrate: out of memory for a prompt of %u tokens", context);
    return ok;
}

bool kvf__calibration_make(const kvf__cli *cli, const kvf_tokenizer *tokenizer, uint32_t n, uint32_t context,
                           kvf__calibration *out) {
    uint32_t n_sources = cli->texts.n ? cli->texts.n : 2, bos[4];
    size_t n_bos = 0;
    if (kvf_tokenizer_encode(tokenizer, "", 0, KVF_ENCODE_BOS, bos, 4, &n_bos, NULL) || !n_bos) bos[0] = KVF_NO_TOKEN;
    source *sources = calloc(n_sources, sizeof *sources);
    *out = (kvf__calibration){.tokens = malloc((size_t)n * context * sizeof *out->tokens), .n = n, .context = context};
    bool ok = sources && out->tokens;
    if (!ok) kvf__say("calibrate: out of memory for %u prompts of %u tokens", n, context);
    for (uint32_t i = 0; ok && i < n_sources; i++) ok = read_source(cli, i, tokenizer, &sources[i]);
    for (uint32_t i = 0; ok && i < n; i++)
        ok = make_prompt(&sources[i / 2 % n_sources], i, context, tokenizer, bos[0], cli->seed,
                         out->tokens + (size_t)i * context);
    for (uint32_t i = 0; sources && i < n_sources; i++) free(sources[i].ids);
    free(sources);
    if (!ok) kvf__calibration_free(out);
    return ok;
}

void kvf__calibration_free(kvf__calibration *prompts) {
    free(prompts->tokens);
    *prompts = (kvf__calibration){0};
}
