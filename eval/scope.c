/* Which options apply to which measure. An option that was given but has no effect is reported as an error. */
#include <stdio.h>
#include <string.h>

#include "eval/eval.h"

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
                               {"quiet", MEASURES | SINGLE | REPORT, NULL},
                               {"html", REPORT, NULL},
                               {"markdown", REPORT, NULL},
                               {"baseline", REPORT, NULL},
                               {"only", REPORT, NULL},
                               {"except", REPORT, NULL},
                               {"resample", REPORT, NULL}};

/* Options without a row are those of the run: they count wherever something is computed. */
static scope scope_of(const char *option) {
    for (size_t i = 0; i < sizeof scopes / sizeof scopes[0]; i++)
        if (kvf__name_equal(scopes[i].option, option)) return scopes[i];
    return (scope){option, MEASURES | SINGLE, NULL};
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
    for (uint32_t i = 0; i < cli->given.n; i++) {
        const char *option = cli->given.names[i];
        scope s = scope_of(option);
        if (s.counts & here) continue;
        char places[160];
        name_places(s.counts, places, sizeof places);
        if (s.instead && here & MEASURES & ~(unsigned)ABLATION)
            kvf__say("--%s: has no say in eval %s: %s", kvf__dashed(option).text, word, s.instead);
        else
            kvf__say("--%s: has no say in eval %s: it is for eval %s; leave it out", kvf__dashed(option).text, word,
                     places);
        return false;
    }
    return true;
}

static bool check_word(const kvf__cli *cli, const char *word) {
    if (!strcmp(word, "report")) return check(cli, word, REPORT);
    if (!strcmp(word, "nll") && (cli->n_prompt || cli->ids)) return check(cli, "nll --prompt", SINGLE);
    for (int m = 0; m <= KVF__MEASURE_ABLATION; m++)
        if (!strcmp(word, kvf__measure_names[m])) return check(cli, word, 1u << m);
    return true;
}

bool kvf__eval_check_scope(const kvf__cli *cli, const char *word) {
    if (!check_word(cli, word)) return false;
    if ((!cli->resume && !cli->force) || (cli->output && strcmp(cli->output, "-"))) return true;
    kvf__say("--%s: needs --output FILE, the output of the run to go on with", cli->resume ? "resume" : "force");
    return false;
}
