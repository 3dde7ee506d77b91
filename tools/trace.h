/* tools/trace.h: traces of requests: kvfold's own text form (docs/trace.md), public ones, and made ones.
 *
 * Invariants
 *   - Arrivals never fall, are finite and at least 0; the first of a public trace is 0.
 *   - n_prompt is at least 1; n_shared is at most n_prompt, 0 where there is no group.
 *   - A trace that could not be read has printed one line: file, line, value and the remedy.
 */
#ifndef KVF_TOOLS_TRACE_H
#define KVF_TOOLS_TRACE_H

#include <stdio.h>

#include "tools/reader.h"

enum { KVF__TRACE_VERSION = 1, KVF__TRACE_LINE_MAX = 1 << 20, KVF__TRACE_GROUP_MAX = 64, KVF__TRACE_HASH_TOKENS = 512 };
#define KVF__TRACE_NONE UINT32_MAX

typedef struct kvf__trace_request {
    double arrival_s;
    uint32_t n_prompt, n_output;
    uint32_t group;      /* requests of one group begin with the same tokens; KVF__TRACE_NONE: of none */
    uint32_t n_shared;   /* leading tokens that an earlier request of the group has too */
    uint32_t density;    /* index into densities; KVF__TRACE_NONE: not recorded */
    uint32_t n_hash_ids; /* Mooncake: names of its blocks of KVF__TRACE_HASH_TOKENS tokens, from hash_begin on */
    uint64_t hash_begin;
} kvf__trace_request;

typedef struct kvf__trace { /* zero: empty; kvf__trace_free */
    kvf__trace_request *requests;
    uint64_t n, capacity;
    uint32_t n_groups, n_layers; /* n_layers: of the densities; 0: none are recorded */
    double *densities;           /* (density, layer) */
    uint64_t n_densities, densities_capacity;
    uint64_t *hash_ids;
    uint64_t n_hash_ids, hash_capacity;
    uint64_t n_skipped; /* lines that the trace itself marks as failed (BurstGPT: no response) */
    const char *form;   /* "kvfold", "azure", "burstgpt", "mooncake", "made" */
} kvf__trace;

/* Reads a file of any format, recognised by its first line; "-": standard input; gzip and zstd too. limit: at most
 * that many requests. False after a message. */
bool kvf__trace_read(const char *path, uint64_t limit, kvf__trace *trace);
void kvf__trace_free(kvf__trace *trace);

/* For each group: its first request, and the largest number of tokens that a later one shares with it. */
typedef struct kvf__trace_group {
    uint64_t first; /* UINT64_MAX: there is none */
    uint32_t n_shared;
} kvf__trace_group;
void kvf__trace_groups(const kvf__trace *trace, kvf__trace_group *groups); /* [trace->n_groups] */
/* The token ids of a request, prompt and output: ids[n]. They are generated, and equal to those of earlier requests
 * where the trace says so: in the leading n_shared tokens of a group, whose first prompt is shared as a whole, and in
 * blocks with the same hash id. */
void kvf__trace_ids(const kvf__trace *trace, uint64_t number, bool first_of_group, uint32_t n, uint32_t *ids);

/* False when out of memory. densities: [trace->n_layers] or NULL. */
bool kvf__trace_add(kvf__trace *trace, kvf__trace_request request, const double *densities);

/* Writes the own form: the head once, then lines. Errors are the stream's (ferror). group: its name, or NULL. */
void kvf__trace_put_head(FILE *out, bool densities);
void kvf__trace_put(FILE *out, const kvf__trace_request *request, const double *densities, uint32_t n_layers);
/* All of it; false after a message. "-": standard output. */
bool kvf__trace_write(const char *path, const kvf__trace *trace);

/* ---- Made traces (trace_make.c) ------------------------------------------------------------------- */

typedef struct kvf__trace_make {
    uint32_t n_requests;
    uint64_t seed;
    bool bursty;                      /* else Poisson */
    double rate;                      /* requests a second */
    double burst;                     /* bursty: requests of a burst, on average */
    double prompt_mean, prompt_sigma; /* of a log-normal: its mean, and the sigma of its logarithm */
    double output_mean, output_sigma; /* likewise */
    uint32_t n_groups, shared_tokens, prompt_max, output_max;
    double grouped; /* share of the requests that are of a group */
} kvf__trace_make;

bool kvf__trace_generate(const kvf__trace_make *make, kvf__trace *trace); /* false after a message */

/* Random numbers that are the same on every machine. */
typedef struct kvf__random {
    uint64_t state;
} kvf__random;
uint64_t kvf__random_next(kvf__random *random);
double kvf__random_unit(kvf__random *random); /* [0, 1) */

/* ---- The readers (trace.c, trace_public.c) ---------------------------------------------------------- */

/* What a reader of lines works on. */
typedef struct kvf__trace_input {
    kvf__reader reader;
    const char *path;
    kvf__trace *trace;
    double last_s; /* arrival of the last request */
    /* columns of a table, in the order of the wanted ones: their places; -1: not there */
    int column[6];
    bool origin_set;
    double origin_s; /* of public traces: the first arrival */
    int64_t origin_day;
    uint64_t *seen; /* mooncake: set of the ids of blocks seen; 0: free, else id + 1 */
    uint64_t n_seen, n_slots;
    char (*groups)[KVF__TRACE_GROUP_MAX + 1];
    uint32_t groups_capacity;
} kvf__trace_input;

/* "FILE line N: ..." */
bool kvf__trace_fail(const kvf__trace_input *in, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Adds it after the checks that all forms share. */
bool kvf__trace_take(kvf__trace_input *in, kvf__trace_request request, const double *densities);

/* A field of a line as a number of tokens; least: the smallest allowed. */
bool kvf__trace_tokens(const kvf__trace_input *in, const char *name, const char *text, uint32_t least, uint32_t *out);
bool kvf__trace_seconds(const kvf__trace_input *in, const char *name, const char *text, double unit, double *out);

/* One line (its end cut off, NUL terminated, may be changed). */
typedef bool (*kvf__trace_line)(kvf__trace_input *in, char *line, size_t n_bytes);
bool kvf__trace_azure_head(kvf__trace_input *in, char *line);
bool kvf__trace_azure_line(kvf__trace_input *in, char *line, size_t n_bytes);
bool kvf__trace_burst_head(kvf__trace_input *in, char *line);
bool kvf__trace_burst_line(kvf__trace_input *in, char *line, size_t n_bytes);
bool kvf__trace_mooncake_line(kvf__trace_input *in, char *line, size_t n_bytes);

#endif
