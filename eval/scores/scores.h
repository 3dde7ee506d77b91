/* eval/scores/scores.h: means and comparisons of the records of kvfold eval, with intervals, group by group.
 *
 * Invariants
 *   - Policies are compared over the units at which both have figures. A mean covers all units that have some.
 *   - Units of a task count if the full cache answers at least KVF__FULL_LEAST of those of the same task, context and
 *     placement. The others form groups that say so, and are in no other group.
 */
#ifndef KVF_EVAL_SCORES_SCORES_H
#define KVF_EVAL_SCORES_SCORES_H

#include "eval/scores/records.h"
#include "eval/scores/stats.h"
#include "tools/cli.h"

#define KVF__FULL_LEAST 0.6
enum { KVF__FEW = 20 };     /* an interval drawn from fewer units, or sources, is called one of few: it is too narrow */
#define KVF__HELD_MOST 1.01 /* of the target: a cell over it breaks the rule of equal memory */
enum { KVF__BOOTSTRAP_SEED = 1 };

typedef enum kvf__figure {
    KVF__FIGURE_KL,       /* nats a token, against the full cache */
    KVF__FIGURE_NLL,      /* nats a token */
    KVF__FIGURE_NLL_MORE, /* ... above the full cache's */
    KVF__FIGURE_AGREE,    /* share of tokens at which both caches have the same likeliest token */
    KVF__FIGURE_EXACT,    /* share of answers that are right */
    KVF__FIGURE_HITS,     /* share of the answers' tokens that are */
    KVF__N_FIGURES
} kvf__figure;

typedef struct kvf__score {
    uint32_t n;         /* units with figures */
    uint32_t n_empty;   /* ... whose cell is empty */
    uint32_t n_missing; /* ... without a cell: not run yet */
    uint32_t why;       /* name: of the first empty cell */
    uint32_t n_paired;  /* units at which the baseline has figures too */
    uint32_t n_over;    /* cells that held more than KVF__HELD_MOST of their target */
    kvf__interval figures[KVF__N_FIGURES];
    kvf__interval ratio, more; /* of the section's main figure to the baseline's: quotient and difference */
    double held, held_most;    /* blocks held over the target: mean, largest; NAN: not recorded */
} kvf__score;

typedef struct kvf__group { /* units that a score is over */
    const char *by;         /* "all", "context", "kind", "context and kind", "task", "task and placement", "cell" */
    uint64_t context;       /* 0: all */
    uint32_t kind, task, placement; /* names; KVF__NO_NAME: all */
    uint32_t *units;
    uint32_t n_units;
    double full, full_hits; /* what the full cache answers, as a whole and of the tokens; NAN: not known */
    bool counts;            /* by "cell": full is at least KVF__FULL_LEAST */
    kvf__score *scores;     /* (policy, rho): of the section */
} kvf__group;

typedef struct kvf__section {
    uint32_t measure, table; /* names; table: KVF__NO_NAME outside ablations */
    bool is_task;
    kvf__figure figure; /* the main one: KL, else NLL above the full cache's, else NLL; of tasks the exact answers */
    uint32_t *policies, *rhos, *base; /* numbers in the records; base: [n_rhos] the baseline, KVF__NO_NAME: none */
    uint32_t n_policies, n_rhos;
    uint64_t *contexts; /* rising */
    uint32_t n_contexts, n_groups;
    kvf__group *groups; /* the first is "all" */
} kvf__section;

typedef struct kvf__scores { /* kvf__scores_make, kvf__scores_free */
    const kvf__records *records;
    const char *baseline; /* "best", or a policy's label */
    bool by_source;       /* sources are drawn whole */
    kvf__section *sections;
    uint32_t n_sections;
} kvf__scores;

/* records must outlive it. False after a message. */
bool kvf__scores_make(kvf__scores *scores, const kvf__records *records, const char *baseline, bool by_source);
void kvf__scores_free(kvf__scores *scores);

/* The group of a section, NULL when there is none; context 0 and KVF__NO_NAME: all. */
const kvf__group *kvf__section_group(const kvf__section *section, const char *by, uint64_t context, uint32_t task,
                                     uint32_t placement);
const kvf__score *kvf__group_score(const kvf__section *section, const kvf__group *group, uint32_t policy, uint32_t rho);

/* A figure of a cell; NAN: not there. */
double kvf__cell_figure(const kvf__records *records, const kvf__cell *cell, kvf__figure figure);
const char *kvf__figure_name(kvf__figure figure); /* "kl", "nll", "nll_more", ... */

/* ---- Writers ------------------------------------------------------------------------------------------------ */

bool kvf__scores_text(const kvf__scores *scores);                       /* for people, on standard output */
bool kvf__scores_markdown(const kvf__scores *scores, const char *path); /* false after a message, as below */
bool kvf__scores_page(const kvf__scores *scores, const char *path);     /* one HTML page that needs nothing else */
json_t *kvf__scores_json(const kvf__scores *scores, bool curves);       /* NULL when out of memory */

int kvf__eval_report(const kvf__cli *cli); /* the command; an exit code */

#endif
