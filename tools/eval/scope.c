/* Which options count for which measure: one that was given and would not be looked at is a mistake that is told. */
#include <stdio.h>
#include <string.h>

#include "tools/eval/eval.h"

enum {                                            /* bits: the measures by number, then these */
       SINGLE = 1 << (KVF__MEASURE_ABLATION + 1), /* nll --prompt N */
       REPORT = SINGLE << 1,
       NLL = 1 << KVF__MEASURE_NLL,
       DIVERGENCE = 1 << KVF__MEASURE_DIVERGENCE,
       NEEDLE = 1 << KVF__MEASURE_NEEDLE,
       RECALL = 1 << KVF__MEASURE_RECALL,
       MULTITURN = 1 << KVF__MEASURE_MULTITURN,
       ABLATION = 1 << KVF__MEASURE_ABLATION,
       PLACES = NLL | DIVERGENCE | ABLATION,
       MEASURES = PLACES | NEEDLE | RECALL | MULTITURN
};

typedef struct scope {
    const char *option;
    unsigned counts;     /* where it does */
    const char *instead; /* what counts in a measure in its place, or NULL */
} scope;

static const scope scopes[] = {{"policies", MEASURES & ~(unsigned)ABLATION, NULL},
                               {"rhos", MEASURES, NULL},
                               {"contexts", MEASURES, NULL},
                               {"seeds", MEASURES, NULL},
                               {"text", (MEASURES & ~(unsigned)MULTITURN) | SINGLE, NULL},
                               {"scored", PLACES | MULTITURN, NULL},
                               {"windows", PLACES, NULL},
                               {"offset", PLACES, NULL},
                               {"samples", NEEDLE | RECALL, NULL},
                               {"tasks", RECALL, NULL},
                               {"placement", NEEDLE | RECALL, NULL},
                               {"depths", NEEDLE, NULL},
                               {"dialogue", MULTITURN, NULL},
                               {"tables", ABLATION, NULL},
                               {"output", MEASURES, NULL},
                               {"resume", MEASURES, NULL},
                               {"force", MEASURES, NULL},
                               {"batch", MEASURES, NULL},
                               {"policy", SINGLE, "--policies says what is measured"},
                               {"preset", SINGLE, "--policies says what is measured"},
                               {"prompt", SINGLE, NULL},
                               {"ids", SINGLE, NULL},
                               {"max-tokens", SINGLE, NULL},
                               {"json", SINGLE | REPORT, NULL},
                               {"html", REPORT, NULL},
                               {"markdown", REPORT, NULL},
                               {"baseline", REPORT, NULL},
                               {"only", REPORT, NULL},
                               {"except", REPORT, NULL},
                               {"resample", REPORT, NULL}};

static bool same_text(const char *a, const char *b) { return a == b || (a && b && !strcmp(a, b)); }

/* Whether the option has its default: then it does not matter whether it was given. */
static bool is_default(const kvf__arg *a, const kvf__cli *cli, const kvf__cli *other) {
    const char *x = (const char *)cli + a->offset, *y = (const char *)other + a->offset;
    switch (a->kind) {
    case KVF__ARG_TEXT:
    case KVF__ARG_CHOICE:
        return same_text(*(const char *const *)(const void *)x, *(const char *const *)(const void *)y);
    case KVF__ARG_LIST:
    case KVF__ARG_NAMED: return ((const kvf__arg_list *)(const void *)x)->n == 0;
    case KVF__ARG_FLAG: return memcmp(x, y, sizeof(int)) == 0;
    case KVF__ARG_COUNT: return memcmp(x, y, sizeof(uint32_t)) == 0;
    case KVF__ARG_NUMBER: return memcmp(x, y, sizeof(double)) == 0;
    case KVF__ARG_SEED:
    case KVF__ARG_BYTES: return memcmp(x, y, sizeof(uint64_t)) == 0;
    }
    return true;
}

/* "needle and recall" */
static void name_places(unsigned counts, char *text, size_t capacity) {
    size_t used = 0;
    unsigned left = counts;
    for (unsigned bit = 1; left && bit <= REPORT && used < capacity; bit <<= 1) {
        if (!(left & bit)) continue;
        left &= ~bit;
        const char *name = bit == REPORT ? "report" : bit == SINGLE ? "nll --prompt N" : NULL;
        for (int m = 0; !name; m++)
            if (bit == 1u << m) name = kvf__measure_names[m];
        used += (size_t)snprintf(text + used, capacity - used, "%s%s", !used ? "" : left ? ", " : " and ", name);
    }
}

static bool check(const kvf__cli *cli, const char *word, unsigned here) {
    const kvf__command *command = kvf__commands;
    while (strcmp(command->name, "eval")) command++;
    kvf__cli defaults = kvf__cli_default();
    for (size_t i = 0; i < sizeof scopes / sizeof scopes[0]; i++) {
        const kvf__arg *a = kvf__args_find(command, scopes[i].option, NULL);
        if (!a || scopes[i].counts & here || is_default(a, cli, &defaults)) continue;
        char places[160];
        name_places(scopes[i].counts, places, sizeof places);
        if (scopes[i].instead && here & MEASURES & ~(unsigned)ABLATION)
            kvf__say("--%s: has no say in eval %s: %s", a->name, word, scopes[i].instead);
        else
            kvf__say("--%s: has no say in eval %s: it is for eval %s; leave it out", a->name, word, places);
        return false;
    }
    return true;
}

bool kvf__eval_check_scope(const kvf__cli *cli, const char *word) {
    if (!strcmp(word, "report")) return check(cli, word, REPORT);
    if (!strcmp(word, "nll") && (cli->n_prompt || cli->ids)) return check(cli, "nll --prompt", SINGLE);
    for (int m = 0; m <= KVF__MEASURE_ABLATION; m++)
        if (!strcmp(word, kvf__measure_names[m])) return check(cli, word, 1u << m);
    return true;
}
