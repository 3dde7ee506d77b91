/* The option parser: reads options by the rows of a table and fills the fields of a struct. */
#define _POSIX_C_SOURCE 200809L
#include "tools/args.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/text.h"

enum { NAME_MAX_BYTES = 40 };

static char same(char c) { return c == '_' ? '-' : c; }

bool kvf__name_equal(const char *a, const char *b) {
    while (*a && same(*a) == same(*b)) a++, b++;
    return !*a && !*b;
}

uint32_t kvf__name_distance(const char *typed, const char *name) {
    size_t n = strlen(typed), m = strlen(name);
    if (!n || n > NAME_MAX_BYTES || m > NAME_MAX_BYTES) return UINT32_MAX;
    uint32_t rows[3][NAME_MAX_BYTES + 1];
    uint32_t *before = rows[0], *last = rows[1], *now = rows[2];
    for (size_t j = 0; j <= m; j++) last[j] = (uint32_t)j;
    for (size_t i = 1; i <= n; i++) {
        now[0] = (uint32_t)i;
        for (size_t j = 1; j <= m; j++) {
            uint32_t cost = last[j - 1] + (same(typed[i - 1]) != same(name[j - 1]));
            if (last[j] + 1 < cost) cost = last[j] + 1;
            if (now[j - 1] + 1 < cost) cost = now[j - 1] + 1;
            bool swapped = i > 1 && j > 1 && typed[i - 1] == name[j - 2] && typed[i - 2] == name[j - 1];
            if (swapped && before[j - 2] + 1 < cost) cost = before[j - 2] + 1;
            now[j] = cost;
        }
        uint32_t *free_row = before;
        before = last, last = now, now = free_row;
    }
    uint32_t limit = n < 4 ? 1 : 1 + (uint32_t)n / 4;
    return last[m] <= limit ? last[m] : UINT32_MAX;
}

bool kvf__arg_list_add(kvf__arg_list *list, const char *name, const char *value) {
    if (list->n == list->capacity) {
        uint32_t capacity = list->capacity ? list->capacity * 2 : 8;
        const char **names = realloc(list->names, capacity * sizeof *names);
        if (!names) return false;
        list->names = names;
        const char **values = realloc(list->values, capacity * sizeof *values);
        if (!values) return false;
        list->values = values;
        list->capacity = capacity;
    }
    list->names[list->n] = name;
    list->values[list->n++] = value;
    return true;
}

void kvf__arg_list_free(kvf__arg_list *list) {
    free(list->names);
    free(list->values);
    *list = (kvf__arg_list){NULL, NULL, 0, 0};
}

const kvf__arg *kvf__args_find(const kvf__command *command, const char *name, const char **suggestion) {
    uint32_t best = UINT32_MAX;
    if (suggestion) *suggestion = NULL;
    for (const kvf__arg_group *const *g = command->groups; *g; g++) {
        for (uint32_t i = 0; i < (*g)->n_args; i++) {
            const kvf__arg *a = &(*g)->args[i];
            if (kvf__name_equal(a->name, name)) return a;
            uint32_t distance = kvf__name_distance(name, a->name);
            if (suggestion && distance < best) best = distance, *suggestion = a->name;
        }
    }
    return NULL;
}

/* ---- Values ------------------------------------------------------------------------------------- */

bool kvf__parse_bytes(const char *text, uint64_t *bytes) {
    static const struct {
        const char *suffix;
        double unit;
    } units[] = {{"", 1}, {"B", 1}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}};
    if (!isdigit((unsigned char)*text)) return false;
    size_t digits = strspn(text, "0123456789."), n_units = sizeof units / sizeof units[0];
    for (size_t i = 0; i < n_units; i++) {
        if (strcmp(text + digits, units[i].suffix)) continue;
        char *end;
        double value = strtod(text, &end) * units[i].unit;
        if (end != text + digits || !(value < 9.0e18) || (units[i].unit < 2 && memchr(text, '.', digits))) return false;
        *bytes = (uint64_t)value;
        return true;
    }
    return false;
}

static bool parse_u64(const char *text, uint64_t *out) {
    if (!*text || text[strspn(text, "0123456789")]) return false;
    errno = 0;
    unsigned long long value = strtoull(text, NULL, 10);
    if (errno) return false;
    *out = value;
    return true;
}

static bool parse_number(const char *text, double *out) {
    if (!*text || text[strspn(text, "0123456789.eE+-")]) return false;
    char *end;
    *out = strtod(text, &end);
    return !*end && isfinite(*out);
}

static bool is_choice(const char *choices, const char *value) {
    for (size_t n = strlen(value); *choices;) {
        size_t length = strcspn(choices, "|");
        if (n == length && !strncmp(choices, value, n)) return true;
        choices += length + (choices[length] == '|');
    }
    return false;
}

static bool bad_value(const kvf__arg *a, const char *value, const char *would_do) {
    kvf__say("--%s %s: must be %s", kvf__dashed(a->name).text, kvf__shown(value).text, would_do);
    return false;
}

static bool set_number(const kvf__arg *a, const char *value, void *field) {
    char would_do[120];
    if (a->kind == KVF__ARG_BYTES) {
        uint64_t bytes;
        if (!kvf__parse_bytes(value, &bytes) || !bytes)
            return bad_value(a, value, "a size of at least 1 byte, plain or with KiB, MiB or GiB (512MiB)");
        *(uint64_t *)field = bytes;
    } else if (a->kind == KVF__ARG_SEED) {
        uint64_t seed;
        if (!parse_u64(value, &seed)) return bad_value(a, value, "a whole number from 0 to 18446744073709551615");
        *(uint64_t *)field = seed;
    } else if (a->kind == KVF__ARG_NUMBER) {
        double number;
        snprintf(would_do, sizeof would_do, "a number from %g to %g", a->min, a->max);
        if (!parse_number(value, &number) || number < a->min || number > a->max) return bad_value(a, value, would_do);
        *(double *)field = number;
    } else {
        uint64_t count;
        snprintf(would_do, sizeof would_do, "a whole number from %.0f to %.0f", a->min, a->max);
        if (!parse_u64(value, &count) || (double)count < a->min || (double)count > a->max)
            return bad_value(a, value, would_do);
        *(uint32_t *)field = (uint32_t)count;
    }
    return true;
}

static bool out_of_memory(const kvf__arg *a) {
    kvf__say("--%s: out of memory", a->name);
    return false;
}

static bool set_value(const kvf__arg *a, const char *value, void *options) {
    void *field = (char *)options + a->offset;
    if (a->choices && !is_choice(a->choices, value)) {
        char would_do[160];
        snprintf(would_do, sizeof would_do, "one of %s", a->choices);
        return bad_value(a, value, would_do);
    }
    switch (a->kind) {
    case KVF__ARG_FLAG: *(int *)field = 1; return true;
    case KVF__ARG_TEXT:
    case KVF__ARG_CHOICE: *(const char **)field = value; return true;
    case KVF__ARG_LIST:
        if (!*value) return bad_value(a, value, "a text of at least one byte");
        /* fall through */
    case KVF__ARG_NAMED:
        if (kvf__arg_list_add(field, a->kind == KVF__ARG_NAMED ? a->name : NULL, value)) return true;
        return out_of_memory(a);
    default: return set_number(a, value, field);
    }
}

/* ---- Parsing ------------------------------------------------------------------------------------ */

bool kvf__args_asks(const char *text, const char **topic) {
    bool some = !strcmp(text, "--help") || !strcmp(text, "-h"),
         more = !strncmp(text, "--", 2) &&
                (kvf__name_equal(text + 2, "help-all") || kvf__name_equal(text + 2, "help-policies"));
    *topic = more ? text + 2 : NULL;
    return some || more;
}

static bool unknown_option(const kvf__command *command, const char *text, const char *suggestion) {
    if (suggestion)
        kvf__say("unknown option %s: did you mean --%s? See kvfold %s --help", kvf__shown(text).text,
                 kvf__dashed(suggestion).text, command->name);
    else
        kvf__say("unknown option %s: kvfold %s --help-all lists what there is", kvf__shown(text).text, command->name);
    return false;
}

/* One option at argv[*i]; moves *i to the last argument it used. */
static bool parse_option(const kvf__command *command, int argc, char **argv, int *i, void *options,
                         kvf__arg_list *given) {
    const char *text = argv[*i] + 2, *equals = strchr(text, '='), *suggestion = NULL;
    size_t length = equals ? (size_t)(equals - text) : strlen(text);
    char name[NAME_MAX_BYTES + 1];
    if (length > NAME_MAX_BYTES) return unknown_option(command, argv[*i], NULL);
    memcpy(name, text, length);
    name[length] = '\0';
    const kvf__arg *a = kvf__args_find(command, name, &suggestion);
    if (!a) {
        char dashed[NAME_MAX_BYTES + 3];
        snprintf(dashed, sizeof dashed, "--%s", name);
        return unknown_option(command, dashed, suggestion);
    }
    if (!kvf__arg_list_add(given, a->name, NULL)) return out_of_memory(a);
    if (a->kind == KVF__ARG_FLAG) {
        if (!equals) return set_value(a, "", options);
        kvf__say("--%s=%s: takes no value", name, kvf__shown(equals + 1).text);
        return false;
    }
    if (equals) return set_value(a, equals + 1, options);
    if (*i + 1 >= argc || !strncmp(argv[*i + 1], "--", 2)) {
        kvf__say("--%s: needs a value: --%s %s (one that begins with -- is written --%s=...)", name,
                 kvf__dashed(a->name).text, a->value, name);
        return false;
    }
    return set_value(a, argv[++*i], options);
}

kvf__args_result kvf__args_parse(const kvf__command *command, int argc, char **argv, void *options, const char **words,
                                 uint32_t *n_words, kvf__arg_list *given) {
    const char *topic;
    bool only_words = false;
    *n_words = 0;
    for (int i = 0; i < argc; i++) {
        const char *text = argv[i];
        if (!only_words && !strcmp(text, "--")) {
            only_words = true;
        } else if (!only_words && kvf__args_asks(text, &topic)) {
            return KVF__ARGS_HELP;
        } else if (!only_words && !strncmp(text, "--", 2)) {
            if (!parse_option(command, argc, argv, &i, options, given)) return KVF__ARGS_BAD;
        } else if (!only_words && text[0] == '-' && isalpha((unsigned char)text[1])) {
            unknown_option(command, text, kvf__args_find(command, text + 1, NULL) ? text + 1 : NULL);
            return KVF__ARGS_BAD;
        } else if (*n_words == command->max_words) {
            kvf__say("%s: one argument too many for kvfold %s%s%s; quote a text with spaces", kvf__shown(text).text,
                     command->name, command->words ? " " : "", command->words ? command->words : "");
            return KVF__ARGS_BAD;
        } else {
            words[(*n_words)++] = text;
        }
    }
    return KVF__ARGS_OK;
}
