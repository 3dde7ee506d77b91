/* --help: prints the tables of args.h. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>

#include "tools/args.h"
#include "tools/text.h"

enum { HELP_COLUMN = 30, HELP_WIDTH = 100 };

/* Text from HELP_COLUMN on, broken at spaces; `used` is the column the line has reached. */
static void print_wrapped(const char *text, int used) {
    int column = HELP_COLUMN;
    if (used >= HELP_COLUMN) {
        putchar('\n');
        used = 0;
    }
    printf("%*s", HELP_COLUMN - used, "");
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column > HELP_COLUMN && column + 1 + length > HELP_WIDTH) {
            printf("\n%*s", HELP_COLUMN, "");
            column = HELP_COLUMN;
        } else if (column > HELP_COLUMN) {
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

static void print_arg(const kvf__arg *a) {
    char text[600];
    int used = printf("  --%s%s%s", kvf__dashed(a->name).text, a->value ? " " : "", a->value ? a->value : "");
    if (a->fallback)
        snprintf(text, sizeof text, "%s [%s]", a->help, a->fallback);
    else
        snprintf(text, sizeof text, "%s", a->help);
    print_wrapped(text, used);
}

bool kvf__args_help(const kvf__command *command, const char *name) {
    if (name) {
        while (*name == '-') name++;
        const kvf__arg *a = kvf__args_find(command, name, NULL);
        if (a) print_arg(a);
        return a != NULL;
    }
    printf("%s\n\nUsage:\n%s\n", command->summary, command->usage);
    for (const kvf__arg_group *const *g = command->groups; *g; g++) {
        printf("\n%s:\n", (*g)->title);
        for (uint32_t i = 0; i < (*g)->n_args; i++) print_arg(&(*g)->args[i]);
        if ((*g)->note) printf("%s\n", (*g)->note);
    }
    if (command->notes) printf("\n%s\n", command->notes);
    return true;
}
