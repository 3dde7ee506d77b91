/* tools/args.h: options of a command as a table: parsing, checking, --help.
 *
 * Invariants
 *   - Every option is a row of a table, so --help prints exactly what the parser accepts.
 *   - '-' and '_' are the same in a name. The last use of an option wins, except a list, which grows.
 *   - A failed parse has printed one line that names the option, the value and the values that are allowed.
 */
#ifndef KVF_TOOLS_ARGS_H
#define KVF_TOOLS_ARGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The type of an option's value; the field at `offset` of the command's struct has the type named here. */
typedef enum kvf__arg_kind {
    KVF__ARG_FLAG,   /* int: 1; takes no value */
    KVF__ARG_TEXT,   /* const char *: points into argv */
    KVF__ARG_CHOICE, /* const char *: one of `choices` ("a|b|c") */
    KVF__ARG_LIST,   /* kvf__arg_list: the value is added; text of at least one byte */
    KVF__ARG_COUNT,  /* uint32_t in [min, max]; with `choices` one of those numbers */
    KVF__ARG_SEED,   /* uint64_t */
    KVF__ARG_NUMBER, /* double in [min, max] */
    KVF__ARG_BYTES,  /* uint64_t: plain bytes, or with KiB, MiB or GiB */
    KVF__ARG_NAMED   /* kvf__arg_list: the option's name and the value are added, checked later by the library */
} kvf__arg_kind;

typedef struct kvf__arg {
    const char *name;  /* without dashes */
    const char *value; /* what stands for the value in --help, NULL for a flag */
    const char *help;
    const char *fallback; /* the default as --help shows it, or NULL */
    kvf__arg_kind kind;
    size_t offset;
    double min, max;
    const char *choices;
} kvf__arg;

typedef struct kvf__arg_group {
    const char *title;
    const kvf__arg *args;
    uint32_t n_args;
    const char *note; /* printed below the options, or NULL */
} kvf__arg_group;

typedef struct kvf__arg_list { /* zero: empty; kvf__arg_list_free */
    const char **names;        /* NULL entries in a KVF__ARG_LIST */
    const char **values;
    uint32_t n, capacity;
} kvf__arg_list;

typedef struct kvf__brief { /* an option of the first screen of help, in fewer words than its row's */
    const char *name, *help;
} kvf__brief;

typedef struct kvf__command {
    const char *name, *summary;
    const char *usage;                   /* one or more lines */
    const char *notes;                   /* printed after the options, or NULL */
    const kvf__arg_group *const *groups; /* ends with NULL */
    uint32_t min_words, max_words;       /* arguments that are no options */
    const char *words;                   /* what they are: "MODEL" */
    int (*run)(const void *options);
    const kvf__brief *brief; /* what --help shows, ended by one without a name; NULL: all of it, as --help-all */
    const struct kvf__command
        *sub; /* its help is another's when this one's name ends its own ("eval report"), or NULL */
} kvf__command;

typedef enum kvf__args_result { KVF__ARGS_OK, KVF__ARGS_HELP, KVF__ARGS_BAD } kvf__args_result;

/* Whether an argument asks for help: --help, -h, --help-all or --help-policies. *topic is what kvf__args_help takes. */
bool kvf__args_asks(const char *text, const char **topic);

/* Reads argv[0..argc) into the struct at `options`. Other words go to words[max_words], their number to n_words; the
 * options that were given, whatever their values, to `given`. */
kvf__args_result kvf__args_parse(const kvf__command *command, int argc, char **argv, void *options, const char **words,
                                 uint32_t *n_words, kvf__arg_list *given);

/* Prints the first screen of a command's help, or a topic ("help-all", "help-policies", an option); false if the
 * topic does not exist. Wraps at the terminal's width, or at 80 columns without a terminal. */
bool kvf__args_help(const kvf__command *command, const char *topic);

/* The row of that name, or NULL. Then *suggestion (if not NULL) is the most similar name, or NULL. */
const kvf__arg *kvf__args_find(const kvf__command *command, const char *name, const char **suggestion);

bool kvf__arg_list_add(kvf__arg_list *list, const char *name, const char *value);
void kvf__arg_list_free(kvf__arg_list *list);

/* Whether two names are equal, '-' and '_' being the same. */
bool kvf__name_equal(const char *a, const char *b);

/* The number of edits between two names, when at most about a third of the typed one's letters; else UINT32_MAX. */
uint32_t kvf__name_distance(const char *typed, const char *name);

/* The first n bytes of text that are a size ("512MiB"); false when it is none. */
bool kvf__parse_bytes(const char *text, uint64_t *bytes);

#endif
