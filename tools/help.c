/* --help: prints the tables of args.h, at the terminal's width. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/cli.h"

enum { LIST_COLUMN = 28, BRIEF_COLUMN = 23, PLAIN_WIDTH = 80, LEAST_WIDTH = 40 };

static int width(void) {
    int columns = kvf__terminal_columns(STDOUT_FILENO);
    return !columns ? PLAIN_WIDTH : columns > LEAST_WIDTH ? columns : LEAST_WIDTH;
}

/* Words of text from the column that was reached; lines after the first begin at `hang`. A list of choices that no line
 * holds (a|b|c) is broken between two of them. */
static void print_words(const char *text, int reached, int hang) {
    int column = reached, most = width(), begin = reached;
    while (*text) {
        int length = (int)strcspn(text, " "), room = most - hang;
        for (int i = room; i > 0 && length > room; i--)
            if (text[i - 1] == '|') length = i;
        if (column > begin && column + 1 + length > most) {
            printf("\n%*s", hang, "");
            column = begin = hang;
        } else if (column > begin) {
            putchar(' ');
            column++;
        }
        printf("%.*s", length, text);
        column += length;
        text += length;
        text += strspn(text, " ");
    }
    putchar('\n');
}

/* The second column of a list; `used` is the column the line has reached. */
static void print_second(const char *text, int used, int column) {
    if (column > width() / 2) column = 8;
    if (used + 2 > column) {
        putchar('\n');
        used = 0;
    }
    printf("%*s", column - used, "");
    print_words(text, column, column);
}

static int indent_of(const char *line) { return (int)strspn(line, " "); }

/* Where the second column of a line begins, which two blanks separate from the first; 0 where it has none. */
static int second_of(const char *line) {
    int length = (int)strcspn(line, "\n");
    const char *two = strstr(line + indent_of(line), "  ");
    return two && two < line + length ? (int)(two - line) + indent_of(two) : 0;
}

/* Whether a line goes on in the next: under its own second column, or because it was broken for its length. */
static bool goes_on(const char *line, const char *next) {
    int length = (int)strcspn(line, "\n"), second = second_of(line), indent = indent_of(next);
    if (!next[indent] || next[indent] == '\n' || second_of(next)) return false;
    if (second) return indent == second;
    return length >= PLAIN_WIDTH && line[length - 1] != ':' && indent >= indent_of(line);
}

/* Lines of a table's text, joined where they were broken and broken where the terminal ends. */
static void print_note(const char *text) {
    while (*text) {
        char line[1600];
        size_t n = 0;
        int second = second_of(text), indent = indent_of(text);
        for (bool more = true; more && n < sizeof line;) {
            int length = (int)strcspn(text, "\n"), skip = n ? indent_of(text) : 0;
            const char *next = text + length + (text[length] == '\n');
            more = *next && goes_on(text, next) && (!second || !n || indent_of(text) == second);
            n += (size_t)snprintf(line + n, sizeof line - n, "%s%.*s", n ? " " : "", length - skip, text + skip);
            text = next;
        }
        if (second) {
            int first = second;
            while (first && line[first - 1] == ' ') first--;
            printf("%.*s", first, line);
            print_second(line + second, first, second);
        } else {
            printf("%*s", line[0] ? indent : 0, "");
            print_words(line[0] ? line + indent : line, indent, indent);
        }
    }
}

static int print_name(const kvf__arg *a) {
    return printf("  --%s%s%s", kvf__dashed(a->name).text, a->value ? " " : "", a->value ? a->value : "");
}

static void print_arg(const kvf__arg *a, const char *help, int column) {
    char text[700];
    int used = print_name(a);
    snprintf(text, sizeof text, a->fallback ? "%s [%s]" : "%s", help, a->fallback);
    print_second(text, used, column);
}

static void print_usage(const kvf__command *command) {
    print_words(command->summary, 0, 0);
    putchar('\n');
    for (const char *line = command->usage; *line;) {
        int length = (int)strcspn(line, "\n"), indent = indent_of(line);
        char text[160];
        snprintf(text, sizeof text, "%.*s", length - indent, line + indent);
        fputs(line == command->usage ? "Usage: " : "       ", stdout);
        print_words(text, 7, 9);
        line += length + (line[length] == '\n');
    }
}

static void print_brief(const kvf__command *command) {
    print_usage(command);
    putchar('\n');
    for (const kvf__brief *b = command->brief; b->name; b++) {
        kvf__arg row = *kvf__args_find(command, b->name, NULL);
        if (row.fallback && strlen(row.fallback) > 8) row.fallback = NULL; /* told by --help-all */
        print_arg(&row, b->help, BRIEF_COLUMN);
    }
    printf("\n");
    char text[160];
    snprintf(text, sizeof text, "More: --help-all, --help-policies, kvfold help %s OPTION", command->name);
    print_note(text);
}

static void print_all(const kvf__command *command) {
    print_usage(command);
    for (const kvf__arg_group *const *g = command->groups; *g; g++) {
        char title[160];
        snprintf(title, sizeof title, "%s:", (*g)->title);
        putchar('\n');
        print_note(title);
        for (uint32_t i = 0; i < (*g)->n_args; i++) print_arg(&(*g)->args[i], (*g)->args[i].help, LIST_COLUMN);
        if ((*g)->note) print_note((*g)->note);
    }
    if (command->notes) {
        putchar('\n');
        print_note(command->notes);
    }
}

static void print_policies(void) {
    const char *name, *preset;
    char presets[240];
    size_t n = 0;
    print_note("Policies (--policy NAME, or NAME:PRESET):");
    for (uint32_t i = 0; (name = kvf_policy_name(i)); i++) {
        print_second(kvf_policy_find(name)->summary, printf("  %s", name), 14);
        for (uint32_t k = 1; (preset = kvf_policy_preset(name, k)) && n < sizeof presets; k++)
            n += (size_t)snprintf(presets + n, sizeof presets - n, "%s %s:%s", n ? "," : "Presets:", name, preset);
    }
    putchar('\n');
    print_note(presets);
    print_note("Their options: --help-all. What each costs on a real model: docs/results.md.");
}

bool kvf__args_help(const kvf__command *command, const char *topic) {
    if (!topic) {
        (command->brief ? print_brief : print_all)(command);
        return true;
    }
    while (*topic == '-') topic++;
    bool has_policies = kvf__args_find(command, "policy", NULL) != NULL;
    const kvf__arg *a = kvf__args_find(command, topic, NULL);
    if (a)
        print_arg(a, a->help, LIST_COLUMN);
    else if (kvf__name_equal(topic, "help-all"))
        print_all(command);
    else if (has_policies && kvf__name_equal(topic, "help-policies"))
        print_policies();
    else
        return false;
    return true;
}
