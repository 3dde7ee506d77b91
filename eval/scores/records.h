/* eval/scores/records.h: the records of kvfold eval, read from files of JSON lines.
 *
 * Glossary
 *   - unit: one place of a text or one sample of a task, with the full cache's figures there. Policies are compared over
 *     units.
 *   - cell: the figures of one policy at one unit and one rho; or the reason why it could not run.
 *
 * Invariants
 *   - No two cells have the same table, policy, rho and unit: of several the last read counts, in the order of the files.
 *   - A line that is not a record is reported with its file and line; only that line is lost. Unknown fields are ignored.
 *   - Unknown values are NAN or KVF__NO_NAME, never 0.
 */
#ifndef KVF_EVAL_SCORES_RECORDS_H
#define KVF_EVAL_SCORES_RECORDS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define KVF__NO_NAME UINT32_MAX

typedef struct kvf__names { /* texts by number; zero: empty */
    char **texts;
    uint32_t n, capacity;
} kvf__names;

typedef struct kvf__unit {
    uint32_t measure, source, kind, task, placement; /* names */
    uint64_t context, offset, sample, seed, n_scored;
    double depth;
    double full_exact, full_hits; /* of a task: whether the full cache answers, and the share of the answer's tokens */
    double full_nll;
    uint32_t n_tokens, n_layers;
    float *full_nll_by_token;  /* [n_tokens], or NULL */
    float *density, *variance; /* [n_layers] density_head_minmax and variance of the prompt's sums, or NULL */
} kvf__unit;

typedef struct kvf__cell {
    uint32_t unit, policy, rho; /* numbers in kvf__records */
    uint32_t table;             /* name: of an ablation */
    uint32_t why;               /* name: why the cell is empty; KVF__NO_NAME: it is not */
    uint64_t order;             /* lines read before it */
    double target_blocks, held_blocks;
    double nll, kl, agree;             /* means over the tokens scored */
    double exact, hits;                /* of a task: 0 or 1, and the share of the answer's tokens */
    uint32_t n_tokens, n_layers;       /* lengths; 0: not recorded */
    float *nll_by_token, *kl_by_token; /* [n_tokens], or NULL */
    float *sizes, *blocks;             /* [n_layers], or NULL */
    float *group_sizes;                /* [n_layers][n_groups], or NULL */
    uint32_t n_groups;
} kvf__cell;

typedef struct kvf__policy_entry {
    uint32_t label;   /* name: as the run calls it */
    uint32_t table;   /* name: of the ablation that it is a variant in */
    uint32_t options; /* name: JSON of its options, those of the budget left out */
    char *shown;      /* the label, and the options by which it differs from others of that label */
} kvf__policy_entry;

typedef struct kvf__records { /* zero: empty; kvf__records_free */
    kvf__names names;
    kvf__unit *units;
    kvf__cell *cells; /* after kvf__records_end: by table, policy, rho, unit */
    kvf__policy_entry *policies;
    double *rhos; /* rising */
    uint32_t n_units, n_policies, n_rhos;
    uint64_t n_cells, n_lines, n_bad, n_replaced, n_left_out; /* left out: of sources not asked for */
    uint64_t units_capacity, cells_capacity, policies_capacity, rhos_capacity;
    json_t *runs;    /* list of the run records, each once */
    json_t *sources; /* every source read, also those left out: name to the number of its cells */
    uint32_t last_unit;
} kvf__records;

typedef struct kvf__source_filter { /* names with commas between them, or NULL */
    const char *only, *except;
} kvf__source_filter;

/* Adds the records of a file. False after a message when it could not be read at all, or memory ran out. */
bool kvf__records_read(kvf__records *records, const char *path, const kvf__source_filter *filter);
/* Call after the last file: sorts, drops replaced cells, names the policies. False after a message. */
bool kvf__records_end(kvf__records *records);
void kvf__records_free(kvf__records *records);

/* The cell of a place, NULL when there is none. */
const kvf__cell *kvf__records_cell(const kvf__records *records, uint32_t table, uint32_t policy, uint32_t rho,
                                   uint32_t unit);
/* The text of a name; "" for KVF__NO_NAME. */
const char *kvf__records_name(const kvf__records *records, uint32_t name);
/* The number of a text, KVF__NO_NAME when it is not there. */
uint32_t kvf__records_find(const kvf__records *records, const char *text);

/* ---- record.c: what is in one line --------------------------------------------------------------------- */

/* Adds one record. False with err filled if the object is not a record, or with "out of memory". */
bool kvf__record_add(kvf__records *records, const json_t *object, const kvf__source_filter *filter, char *err,
                     size_t capacity);

/* ---- Shared by the two --------------------------------------------------------------------------------- */

bool kvf__names_add(kvf__names *names, const char *text, uint32_t *number); /* finds it or adds it */
/* The list with room for one more than n; NULL when out of memory, the list as it was. */
void *kvf__grown(void *list, uint64_t n, uint64_t *capacity, size_t bytes);
bool kvf__listed(const char *names, const char *name); /* among names with commas between them */

#endif
