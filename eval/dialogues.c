/* multiturn: dialogues. The first turns are compressed, later ones follow token by token; the answers are scored. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"
#include "tools/reader.h"

enum { MOST_TURNS = 4096 };

typedef struct answer {        /* of the assistant, in tokens of the dialogue */
    uint32_t begin, end, next; /* its content; next: what follows its turn */
    bool scored;
} answer;

typedef struct dialogue {
    char source[KVF__SOURCE_BYTES];
    uint32_t line;
    kvf_message messages[MOST_TURNS + 1]; /* into root */
    bool scored[MOST_TURNS + 1];
    uint32_t n_messages;
    json_t *root;
    uint32_t *ids;
    size_t n_ids;
    answer *answers;
    uint32_t n_answers;
} dialogue;

/* ---- A line --------------------------------------------------------------------------------------------------- */

static const char *bad_turn(const json_t *turn, const char *role, const char *last) {
    if (!role || !json_is_string(json_object_get(turn, "content")))
        return "must be an object with a role (system, user or assistant) and a content, both texts";
    bool first_system = !last && !strcmp(role, "system");
    if (first_system || (!strcmp(role, "user") && (!last || strcmp(last, "user") != 0)) ||
        (!strcmp(role, "assistant") && last && !strcmp(last, "user")))
        return NULL;
    return "user and assistant must take turns, user first, after at most one turn of system";
}

static bool read_turns(dialogue *d, const char *path, const char *text, size_t n) {
    json_error_t error;
    if (!(d->root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error))) {
        kvf__say("--dialogue %s line %u: not JSON: %s", kvf__shown(path).text, d->line, error.text);
        return false;
    }
    const json_t *turns = json_object_get(d->root, "turns");
    size_t n_turns = json_array_size(turns);
    if (!n_turns || n_turns > MOST_TURNS) {
        kvf__say("--dialogue %s line %u: must be an object with `turns`, a list of 1 to %d", kvf__shown(path).text,
                 d->line, MOST_TURNS);
        return false;
    }
    const char *last = NULL;
    for (size_t i = 0; i < n_turns; i++) {
        const json_t *turn = json_array_get(turns, i), *content = json_object_get(turn, "content");
        const char *role = json_string_value(json_object_get(turn, "role")), *why = bad_turn(turn, role, last);
        if (why) {
            kvf__say("--dialogue %s line %u: turn %zu: %s", kvf__shown(path).text, d->line, i, why);
            return false;
        }
        d->scored[d->n_messages] = !json_is_false(json_object_get(turn, "scored"));
        d->messages[d->n_messages++] = (kvf_message){role, json_string_value(content), json_string_length(content)};
        last = strcmp(role, "system") ? role : NULL;
    }
    return true;
}

/* The ids of the first n messages, with the opening of the answer that follows them. */
static uint32_t *encode(const kvf__eval_inputs *in, const dialogue *d, uint32_t n, size_t *n_ids, kvf_error *err) {
    size_t n_bytes = 0;
    kvf_status st = kvf_chat_render(in->tokenizer, "auto", d->messages, n, NULL, 0, &n_bytes, err);
    if (st && st != KVF_E_LIMIT) return NULL;
    size_t most = kvf_tokenizer_max_ids(in->tokenizer, n_bytes);
    uint32_t *ids = most > SIZE_MAX / sizeof *ids ? NULL : malloc((most ? most : 1) * sizeof *ids);
    if (!ids) {
        snprintf(err->text, sizeof err->text, "out of memory");
        return NULL;
    }
    st = kvf_chat_encode(in->tokenizer, "auto", d->messages, n, ids, most, n_ids, err);
    if (!st) return ids;
    free(ids);
    return NULL;
}

/* Where the answer that follows message `user` stands among all ids. */
static bool find_answer(const kvf__eval_inputs *in, dialogue *d, uint32_t user, kvf_error *err) {
    size_t n = 0, n_content = 0;
    uint32_t *ids = encode(in, d, user + 1, &n, err);
    bool ok = ids != NULL;
    if (ok && (n > d->n_ids || memcmp(ids, d->ids, n * sizeof *ids) != 0)) {
        snprintf(err->text, sizeof err->text, "the model's chat template does not keep turns as they were");
        ok = false;
    }
    free(ids);
    const kvf_message *m = &d->messages[user + 1];
    uint32_t *content = ok ? kvf__encode(in->tokenizer, m->content, m->content_bytes, 0, &n_content, err) : NULL;
    if (!content) return false;
    free(content);
    answer a = {.begin = (uint32_t)n, .scored = d->scored[user + 1]};
    for (a.end = a.begin; a.end < d->n_ids && !kvf_tokenizer_is_end(in->tokenizer, d->ids[a.end]);) a.end++;
    a.next = a.end + 1;
    if (a.end >= d->n_ids) a.next = a.end = (uint32_t)(n + n_content < d->n_ids ? n + n_content : d->n_ids);
    d->answers[d->n_answers++] = a;
    return true;
}

static bool find_answers(const kvf__eval_inputs *in, dialogue *d, const char *path) {
    kvf_error err = {.text = ""};
    /* One more question makes the last answer a turn like the others. */
    uint32_t n = d->n_messages;
    if (!strcmp(d->messages[n - 1].role, "assistant")) d->messages[n++] = (kvf_message){"user", "?", 1};
    d->answers = calloc(d->n_messages, sizeof *d->answers);
    d->ids = encode(in, d, n, &d->n_ids, &err);
    bool ok = d->answers && d->ids;
    for (uint32_t i = 0; ok && i + 1 < d->n_messages; i++)
        if (!strcmp(d->messages[i + 1].role, "assistant")) ok = find_answer(in, d, i, &err);
    if (!ok)
        kvf__say("--dialogue %s line %u: %s", kvf__shown(path).text, d->line, err.text[0] ? err.text : "out of memory");
    return ok;
}

static void free_dialogue(dialogue *d) {
    if (!d) return;
    json_decref(d->root);
    free(d->ids);
    free(d->answers);
    free(d);
}

/* ---- Items ---------------------------------------------------------------------------------------------------- */

/* The turns that fit in the context are the prompt. The answers after them are scored as long as they have at most
 * --scored tokens together; the first of them always is. */
static bool add_item(const kvf__eval_inputs *in, const dialogue *d, uint32_t context, kvf__eval_items *items,
                     uint32_t *n_added) {
    uint32_t first = 0, last = 0, n_scored = 0;
    while (first < d->n_answers && d->answers[first].next <= context) first++;
    if (!first || first == d->n_answers) return true;
    for (uint32_t i = first; i < d->n_answers; i++) {
        const answer *a = &d->answers[i];
        uint32_t n = a->scored ? a->end - a->begin : 0;
        if (n_scored && n_scored + n > in->cli->scored) break;
        n_scored += n;
        if (n) last = i;
    }
    if (!n_scored) return true;
    uint32_t n_prompt = d->answers[first - 1].next, end = d->answers[last].end;
    kvf__eval_item *item = kvf__eval_item_add(items, n_prompt, end - n_prompt, true);
    if (!item) return false;
    snprintf(item->source, sizeof item->source, "%s", d->source);
    snprintf(item->kind, sizeof item->kind, "dialogue");
    item->context = context;
    item->sample = d->line - 1;
    item->task = "dialogue";
    item->placement = "after";
    memcpy(item->tokens, d->ids, end * sizeof *item->tokens);
    for (uint32_t i = first; i <= last; i++)
        for (uint32_t t = d->answers[i].begin; d->answers[i].scored && t < d->answers[i].end; t++)
            item->counts[t - n_prompt] = 1, item->n_scored++;
    ++*n_added;
    return true;
}

static void name_of(const char *path, char *name, size_t capacity) {
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path, *dot = strrchr(base, '.');
    size_t length = dot && dot != base ? (size_t)(dot - base) : strlen(base);
    snprintf(name, capacity, "%.*s", (int)(length < capacity ? length : capacity - 1), base);
}

/* Records tell files by their names. */
static bool check_names(const kvf__arg_list *files) {
    for (uint32_t i = 1; i < files->n; i++)
        for (uint32_t j = 0; j < i; j++) {
            char a[KVF__SOURCE_BYTES], b[KVF__SOURCE_BYTES];
            name_of(files->values[i], a, sizeof a);
            name_of(files->values[j], b, sizeof b);
            if (strcmp(a, b) != 0) continue;
            kvf__say("--dialogue %s: another file is named %s too; rename one of them",
                     kvf__shown(files->values[i]).text, a);
            return false;
        }
    return true;
}

static bool take_line(const kvf__eval_inputs *in, const char *path, uint32_t number, const char *text, size_t n,
                      const double *contexts, uint32_t n_contexts, kvf__eval_items *items, uint32_t *n_added) {
    dialogue *d = calloc(1, sizeof *d);
    if (!d) {
        kvf__say("--dialogue: out of memory");
        return false;
    }
    d->line = number;
    name_of(path, d->source, sizeof d->source);
    bool ok = read_turns(d, path, text, n) && find_answers(in, d, path);
    for (uint32_t c = 0; ok && c < n_contexts; c++) {
        uint32_t before = *n_added;
        ok = add_item(in, d, (uint32_t)contexts[c], items, n_added);
        if (ok && *n_added == before && !in->cli->quiet)
            kvf__say("warning: --dialogue %s line %u: no answer follows its first %g tokens; left out",
                     kvf__shown(path).text, number, contexts[c]);
    }
    free_dialogue(d);
    return ok;
}

static bool read_file(const kvf__eval_inputs *in, const char *path, const double *contexts, uint32_t n_contexts,
                      kvf__eval_items *items, uint32_t *n_added) {
    kvf__reader r;
    const char *line;
    size_t n;
    if (!kvf__reader_open(&r, path, false)) return false;
    bool ok = true;
    kvf__read got;
    while (ok && (got = kvf__reader_next(&r, true, &line, &n)) != KVF__READ_END) {
        if (got == KVF__READ_LATER) continue;
        ok = got == KVF__READ_LINE;
        if (ok) kvf__line_skip_mark(&line, &n);
        if (ok && n) ok = take_line(in, path, (uint32_t)r.n_lines, line, n, contexts, n_contexts, items, n_added);
    }
    kvf__reader_close(&r);
    return ok;
}

bool kvf__eval_dialogue_items(const kvf__eval_inputs *in, kvf__eval_items *items) {
    const kvf__cli *cli = in->cli;
    uint32_t n_contexts, n_added = 0;
    if (!cli->dialogues.n) {
        kvf__say("eval multiturn: give --dialogue FILE");
        return false;
    }
    if (!check_names(&cli->dialogues)) return false;
    double *contexts = kvf__eval_numbers("contexts", cli->contexts, 2, 1 << 30, true, &n_contexts);
    bool ok = contexts != NULL;
    for (uint32_t i = 0; ok && i < cli->dialogues.n; i++)
        ok = read_file(in, cli->dialogues.values[i], contexts, n_contexts, items, &n_added);
    if (ok && !n_added)
        kvf__say("--dialogue: no dialogue has an answer after its first --contexts %s tokens; give longer dialogues or "
                 "shorter --contexts",
                 kvf__shown(cli->contexts).text);
    free(contexts);
    return ok && n_added;
}
