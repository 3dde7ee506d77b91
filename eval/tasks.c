/* needle and recall: facts are hidden in filler text and asked for at the end. The digits of the answer are scored, or its
 * letters where the answer consists of words. */
#define _POSIX_C_SOURCE 200809L
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"

enum { MOST_FACTS = 8, MOST_VALUES = 3, TEXT_BYTES = 200, N_KEYS = 4, N_HOPS = 3, N_WORDS = 3, N_FORMED = 2 };

typedef struct puzzle {
    char facts[MOST_FACTS][TEXT_BYTES];
    uint32_t n_facts, asked; /* asked: the fact whose depth counts */
    char question[2 * TEXT_BYTES];
    char answer[MOST_VALUES][48]; /* texts one after another, of which digits count, or letters */
    uint32_t n_answer;
    bool letters;
} puzzle;

static const char *const colours[] = {"amber", "silver",  "crimson", "violet", "golden", "copper",
                                      "ivory", "scarlet", "emerald", "indigo", "pale",   "marble"};
static const char *const places[] = {"lighthouse", "observatory", "mill",   "chapel", "theatre", "fountain",
                                     "tower",      "museum",      "garden", "bridge", "library", "windmill"};
static const char *const trees[] = {"Alder", "Birch",  "Cedar", "Hazel",  "Juniper", "Larch",
                                    "Maple", "Poplar", "Rowan", "Spruce", "Willow",  "Yew"};
static const char *const plain_words[] = {
    "lantern", "copper", "meadow", "bishop", "cradle",  "donkey", "eagle",  "fabric", "garlic",
    "hotel",   "insect", "jewel",  "kettle", "leather", "magnet", "nephew", "oyster", "palace",
    "quarter", "rocket", "salmon", "tiger",  "uncle",   "valley", "wheat",  "yellow", "acid",
    "beard",   "candy",  "drum",   "elbow",  "fence",   "gold",   "honey",  "iron",   "juice"};
static const char *const first_names[] = {"Walter", "Agnes",  "Martin", "Sophie", "Harold", "Irene",
                                          "Victor", "Louise", "Oscar",  "Hannah", "Edwin",  "Clara"};
static const char *const last_names[] = {"Fletcher", "Barlow", "Winter", "Holmes", "Carver", "Dalton",
                                         "Mercer",   "Pratt",  "Sutton", "Weaver", "Thorne", "Quinn"};
enum {
    N_PLAIN_WORDS = sizeof plain_words / sizeof plain_words[0],
    N_NAMES = sizeof first_names / sizeof first_names[0], /* of each list */
    N_COLOURS = sizeof colours / sizeof colours[0],
    N_PLACES = sizeof places / sizeof places[0],
    N_TREES = sizeof trees / sizeof trees[0]
};

static uint32_t number(kvf__dice *dice) { return 10000 + kvf__dice_below(dice, 90000); }

/* n different places, as numbers. */
static void draw_places(kvf__dice *dice, uint32_t *out, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        bool again = true;
        while (again) {
            out[i] = kvf__dice_below(dice, N_COLOURS * N_PLACES);
            again = false;
            for (uint32_t j = 0; j < i; j++) again |= out[j] == out[i];
        }
    }
}

static const char *colour(uint32_t place) { return colours[place / N_PLACES]; }
static const char *building(uint32_t place) { return places[place % N_PLACES]; }

/* ---- Tasks ------------------------------------------------------------------------------------------------ */

/* One fact of each of n places, one of which is asked for. */
static void make_keys(kvf__dice *dice, uint32_t n, puzzle *p) {
    uint32_t place[N_KEYS], asked = kvf__dice_below(dice, n);
    draw_places(dice, place, n);
    p->n_facts = n;
    p->asked = asked;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t value = number(dice);
        snprintf(p->facts[i], sizeof p->facts[i], " The secret number of the %s %s is %u.", colour(place[i]),
                 building(place[i]), value);
        if (i == asked) snprintf(p->answer[0], sizeof p->answer[0], " %u", value);
    }
    p->n_answer = 1;
    snprintf(p->question, sizeof p->question,
             "\n\nQuestion: What is the secret number of the %s %s?\nAnswer: The secret number of the %s %s is",
             colour(place[asked]), building(place[asked]), colour(place[asked]), building(place[asked]));
}

/* How a fact of a place is written, and asked for. fact: colour, building, value; question: colour and building, twice. The
 * answer begins as the fact does. upper: colour and building in capitals, as in an identifier. */
typedef struct form {
    const char *fact, *question;
    bool upper;
} form;
static const form words_form = {
    " The secret words of the %s %s are%s.",
    "\n\nQuestion: What are the secret words of the %s %s?\nAnswer: The secret words of the "
    "%s %s are",
    false};
static const form names_form = {" The keeper of the %s %s is%s.",
                                "\n\nQuestion: Who is the keeper of the %s %s?\nAnswer: The keeper of the %s %s is",
                                false};
static const form table_form = {"\n| The %s %s |%s |",
                                "\n\nQuestion: What is in the row of the %s %s?\nAnswer: | The %s %s |", false};
static const form code_form = {"\n#define %s_%s_PORT%s",
                               "\n\nQuestion: What is %s_%s_PORT?\nAnswer: #define %s_%s_PORT", true};

static const char *capitals(const char *word, bool upper, char out[24]) {
    size_t i = 0;
    for (; word[i] && i < 23; i++) out[i] = (char)(upper ? toupper((unsigned char)word[i]) : word[i]);
    out[i] = 0;
    return out;
}

/* A value that begins with a space: three words, a name, or a number. */
static void draw_value(kvf__dice *dice, const form *f, char out[48]) {
    uint32_t at[N_WORDS];
    for (uint32_t i = 0; i < N_WORDS; i++) at[i] = kvf__dice_below(dice, N_PLAIN_WORDS);
    if (f == &words_form)
        snprintf(out, 48, " %s %s %s", plain_words[at[0]], plain_words[at[1]], plain_words[at[2]]);
    else if (f == &names_form)
        snprintf(out, 48, " %s %s", first_names[at[0] % N_NAMES], last_names[at[1] % N_NAMES]);
    else
        snprintf(out, 48, " %u", number(dice));
}

/* A fact of each of several places, in a form of its own; one is asked for. */
static void make_forms(kvf__dice *dice, const form *f, puzzle *p) {
    uint32_t place[N_FORMED], asked = kvf__dice_below(dice, N_FORMED);
    char value[48], a[24], b[24];
    draw_places(dice, place, N_FORMED);
    p->n_facts = N_FORMED;
    p->asked = asked;
    p->letters = f == &words_form || f == &names_form;
    p->n_answer = 1;
    for (uint32_t i = 0; i < N_FORMED; i++) {
        draw_value(dice, f, value);
        snprintf(p->facts[i], sizeof p->facts[i], f->fact, capitals(colour(place[i]), f->upper, a),
                 capitals(building(place[i]), f->upper, b), value);
        if (i == asked) memcpy(p->answer[0], value, sizeof value);
    }
    const char *x = capitals(colour(place[asked]), f->upper, a), *y = capitals(building(place[asked]), f->upper, b);
    snprintf(p->question, sizeof p->question, f->question, x, y, x, y);
}

/* Several facts of one place, all of them asked for in their order. */
static void make_values(kvf__dice *dice, puzzle *p) {
    static const char *const forms[MOST_VALUES] = {" %u", ", %u", " and %u"};
    uint32_t place;
    draw_places(dice, &place, 1);
    p->n_facts = p->n_answer = MOST_VALUES;
    p->asked = 0;
    for (uint32_t i = 0; i < MOST_VALUES; i++) {
        uint32_t value = number(dice);
        snprintf(p->facts[i], sizeof p->facts[i], " One of the secret numbers of the %s %s is %u.", colour(place),
                 building(place), value);
        snprintf(p->answer[i], sizeof p->answer[i], "%.*s%u", (int)strcspn(forms[i], "%"), forms[i], value);
    }
    snprintf(p->question, sizeof p->question,
             "\n\nQuestion: What are the secret numbers of the %s %s?\nAnswer: The secret numbers of the %s %s are",
             colour(place), building(place), colour(place), building(place));
}

/* A number that goes from box to box; the last one is asked for. */
static void make_chain(kvf__dice *dice, puzzle *p) {
    uint32_t order[N_TREES], value = number(dice);
    for (uint32_t i = 0; i < N_TREES; i++) order[i] = i;
    for (uint32_t i = 0; i < N_HOPS; i++) {
        uint32_t j = i + kvf__dice_below(dice, N_TREES - i), held = order[i];
        order[i] = order[j];
        order[j] = held;
    }
    p->n_facts = N_HOPS;
    p->asked = 0;
    p->n_answer = 1;
    snprintf(p->facts[0], sizeof p->facts[0], " Box %s holds the number %u.", trees[order[0]], value);
    for (uint32_t i = 1; i < N_HOPS; i++)
        snprintf(p->facts[i], sizeof p->facts[i], " Box %s holds the same number as box %s.", trees[order[i]],
                 trees[order[i - 1]]);
    const char *last = trees[order[N_HOPS - 1]];
    snprintf(p->question, sizeof p->question,
             "\n\nQuestion: Which number does box %s hold?\nAnswer: Box %s holds the number", last, last);
    snprintf(p->answer[0], sizeof p->answer[0], " %u", value);
}

static const char *const tasks[] = {"single", "multikey", "multivalue", "tracking", "words", "names", "table", "code"};
enum { N_TASKS = sizeof tasks / sizeof tasks[0] };

static void make_puzzle(uint32_t task, kvf__dice *dice, puzzle *p) {
    switch (task) {
    case 0: make_keys(dice, 1, p); break;
    case 1: make_keys(dice, N_KEYS, p); break;
    case 2: make_values(dice, p); break;
    case 3: make_chain(dice, p); break;
    case 4: make_forms(dice, &words_form, p); break;
    case 5: make_forms(dice, &names_form, p); break;
    case 6: make_forms(dice, &table_form, p); break;
    default: make_forms(dice, &code_form, p);
    }
}

/* ---- Prompts -------------------------------------------------------------------------------------------------- */

typedef struct place { /* what one item is */
    uint32_t context, task, sample;
    bool after;
    double depth; /* of the needle; NAN: drawn */
    uint64_t seed;
} place;

static int by_size(const void *a, const void *b) {
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    return (x > y) - (x < y);
}

/* Filler with the facts in it, each after a sentence; depth of the one asked for, as it came out. */
static bool hide(const kvf__eval_inputs *in, const puzzle *p, kvf__dice *dice, const place *at, uint32_t n,
                 kvf__pieces *out, kvf__eval_item *names, double *depth) {
    kvf__pieces filler = {0}, facts[MOST_FACTS] = {{0}};
    size_t where[MOST_FACTS], n_facts = 0;
    const char *source, *kind;
    for (uint32_t i = 0; i < p->n_facts; i++) {
        kvf__pieces_text(&facts[i], in->tokenizer, p->facts[i]);
        n_facts += facts[i].n;
        out->failed |= facts[i].failed;
    }
    bool ok = !out->failed && n > n_facts;
    if (!ok) kvf__say("--contexts %u: the facts alone have %zu tokens; give longer ones", at->context, n_facts);
    ok = ok && kvf__filler(in, dice, at->sample, n - (uint32_t)n_facts, &filler, &source, &kind, &names->offset);
    if (ok) {
        snprintf(names->source, sizeof names->source, "%s", source);
        snprintf(names->kind, sizeof names->kind, "%s", kind);
        for (uint32_t i = 0; i < p->n_facts; i++)
            where[i] =
                isnan(at->depth) ? kvf__dice_below(dice, (uint32_t)filler.n) : (size_t)(at->depth * (double)filler.n);
        qsort(where, p->n_facts, sizeof where[0], by_size);
        size_t begin = 0;
        for (uint32_t i = 0; i < p->n_facts; i++) {
            size_t end = kvf__sentence_end(in->tokenizer, &filler, where[i]);
            if (end < begin) end = begin;
            kvf__pieces_ids(out, filler.ids + begin, end - begin);
            if (i == p->asked) *depth = (double)out->n / n;
            kvf__pieces_ids(out, facts[i].ids, facts[i].n);
            begin = end;
        }
        kvf__pieces_ids(out, filler.ids + begin, filler.n - begin);
    }
    for (uint32_t i = 0; i < p->n_facts; i++) kvf__pieces_free(&facts[i]);
    kvf__pieces_free(&filler);
    return ok && !out->failed;
}

/* Whether a token has a digit, or a letter. */
static bool counts(const kvf_tokenizer *tokenizer, uint32_t id, bool letters) {
    char piece[64];
    size_t n = kvf_tokenizer_piece(tokenizer, id, 0, piece, sizeof piece);
    for (size_t i = 0; i < n && i < sizeof piece; i++)
        if (letters ? isalpha((unsigned char)piece[i]) : isdigit((unsigned char)piece[i])) return true;
    return false;
}

static bool put_item(const kvf__eval_inputs *in, const place *at, const kvf__pieces *prompt, const kvf__pieces *forced,
                     size_t n_unscored, bool letters, const kvf__eval_item *names, kvf__eval_items *items) {
    kvf__eval_item *item = kvf__eval_item_add(items, (uint32_t)prompt->n, (uint32_t)forced->n, true);
    if (!item) return false;
    memcpy(item->source, names->source, sizeof item->source);
    memcpy(item->kind, names->kind, sizeof item->kind);
    item->offset = names->offset;
    item->context = at->context;
    item->sample = at->sample;
    item->task = isnan(at->depth) ? tasks[at->task] : "needle";
    item->placement = at->after ? "after" : "inside";
    item->depth = names->depth;
    item->seed = at->seed;
    memcpy(item->tokens, prompt->ids, prompt->n * sizeof *item->tokens);
    memcpy(item->tokens + prompt->n, forced->ids, forced->n * sizeof *item->tokens);
    for (size_t i = n_unscored; i < forced->n; i++) {
        item->counts[i] = counts(in->tokenizer, forced->ids[i], letters);
        item->n_scored += item->counts[i];
    }
    if (item->n_scored) return true;
    kvf__say("eval: the model's vocabulary has no token for a %s, which the answers of %s are made of",
             letters ? "letter" : "digit", item->task);
    return false;
}

static bool add_item(const kvf__eval_inputs *in, const place *at, kvf__eval_items *items) {
    kvf__dice dice = kvf__dice_of(at->seed, at->sample, at->task);
    puzzle p = {.n_facts = 0};
    kvf__pieces prompt = {0}, question = {0}, forced = {0};
    kvf__eval_item names = {.depth = NAN};
    make_puzzle(at->task, &dice, &p);
    if (in->bos != KVF_NO_TOKEN) kvf__pieces_ids(&prompt, &in->bos, 1);
    kvf__pieces_text(&question, in->tokenizer, p.question);
    size_t n_head = prompt.n + (at->after ? 0 : question.n), n_unscored = at->after ? question.n : 0;
    bool ok = !question.failed && !prompt.failed && at->context > n_head;
    if (!ok) kvf__say("--contexts %u: the question alone has %zu tokens; give longer ones", at->context, question.n);
    ok = ok && hide(in, &p, &dice, at, at->context - (uint32_t)n_head, &prompt, &names, &names.depth);
    if (ok) {
        if (!isnan(at->depth)) names.depth = at->depth;
        kvf__pieces_ids(at->after ? &forced : &prompt, question.ids, question.n);
        for (uint32_t i = 0; i < p.n_answer; i++) kvf__pieces_text(&forced, in->tokenizer, p.answer[i]);
        ok = !prompt.failed && !forced.failed &&
             put_item(in, at, &prompt, &forced, n_unscored, p.letters, &names, items);
    }
    kvf__pieces_free(&prompt);
    kvf__pieces_free(&question);
    kvf__pieces_free(&forced);
    return ok;
}

/* ---- All of them ------------------------------------------------------------------------------------------------ */

typedef struct lists {
    double *contexts, *seeds, *depths;
    uint32_t n_contexts, n_seeds, n_depths;
    bool asked[N_TASKS];
} lists;

static bool read_tasks(const char *text, bool *asked) {
    for (const char *p = text;; p++) {
        size_t length = strcspn(p, ",");
        uint32_t i = 0;
        while (i < N_TASKS && (strlen(tasks[i]) != length || strncmp(tasks[i], p, length) != 0)) i++;
        if (i == N_TASKS) {
            kvf__say(
                "--tasks %s: must be single, multikey, multivalue, tracking, words, names, table or code, or several of them "
                "with commas between",
                kvf__shown(text).text);
            return false;
        }
        asked[i] = true;
        p += length;
        if (!*p) return true;
    }
}

static bool add_samples(const kvf__eval_inputs *in, place at, kvf__eval_items *items) {
    bool inside = strcmp(in->cli->placement, "after") != 0, after = strcmp(in->cli->placement, "inside") != 0;
    for (uint32_t i = 0; i < in->cli->samples; i++) {
        at.sample = i;
        at.after = false;
        if (inside && !add_item(in, &at, items)) return false;
        at.after = true;
        if (after && !add_item(in, &at, items)) return false;
    }
    return true;
}

static bool add_items(const kvf__eval_inputs *in, const lists *l, bool needle, kvf__eval_items *items) {
    for (uint32_t c = 0; c < l->n_contexts; c++) {
        for (uint32_t s = 0; s < l->n_seeds; s++) {
            place at = {.context = (uint32_t)l->contexts[c], .seed = (uint64_t)l->seeds[s], .depth = NAN};
            for (uint32_t d = 0; needle && d < l->n_depths; d++) {
                at.depth = l->depths[d];
                if (!add_samples(in, at, items)) return false;
            }
            for (at.task = 0; !needle && at.task < N_TASKS; at.task++)
                if (l->asked[at.task] && !add_samples(in, at, items)) return false;
        }
    }
    return true;
}

bool kvf__eval_task_items(const kvf__eval_inputs *in, bool needle, kvf__eval_items *items) {
    const kvf__cli *cli = in->cli;
    lists l = {.n_contexts = 0};
    l.contexts = kvf__eval_numbers("contexts", cli->contexts, 2, 1 << 30, true, &l.n_contexts);
    l.seeds = l.contexts ? kvf__eval_numbers("seeds", cli->seeds, 0, 1e9, true, &l.n_seeds) : NULL;
    l.depths = l.seeds ? kvf__eval_numbers("depths", cli->depths, 0, 1, false, &l.n_depths) : NULL;
    bool ok = l.depths && (needle || read_tasks(cli->tasks, l.asked)) && add_items(in, &l, needle, items);
    free(l.contexts);
    free(l.seeds);
    free(l.depths);
    return ok;
}
