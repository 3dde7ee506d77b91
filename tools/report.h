/* tools/report.h: the summary of a run, as text for people and as JSON. */
#ifndef KVF_TOOLS_REPORT_H
#define KVF_TOOLS_REPORT_H

#include "tools/cli.h"
#include "tools/same.h"

typedef struct kvf__tally { /* of one run of the batch */
    kvf_policy_options policy;
    char label[112], preset[48];
    uint32_t n_layers, n_groups, block_size;
    /* Requests, each a line or --prompt. */
    uint64_t n_done, n_failed,
        n_unfinished;   /* all answers ended well; one or all ended with an error; one was cut off */
    uint64_t n_skipped; /* an earlier run had done them */
    /* Answers, of which a request has one or several (n): how they ended. cut: by a signal, or with the run. */
    uint64_t n_stop, n_length, n_error, n_cut;
    uint64_t kept, merged, dropped, held_tokens, full_tokens, prompt_tokens, completion_tokens;
    uint64_t n_early;       /* requests of which an answer ended with length since the KV memory was full */
    uint64_t n_unknown;     /* answers whose KV figures are not known */
    uint64_t n_measured;    /* answers in the next two */
    uint64_t *blocks;       /* [n_layers] at the answers' ends, added up */
    uint64_t full_blocks;   /* of a layer with a full cache, likewise */
    uint32_t *blocks_max;   /* [n_layers] of all requests together, at one time */
    kvf_engine_stats stats; /* at the end; its layers are gone */
    double wall_s;
    kvf__same_sum same; /* of the second run: its answers beside those of the first */
} kvf__tally;

bool kvf__tally_init(kvf__tally *tally, const kvf__cli *cli, const kvf_model_info *info,
                     const kvf_policy_options *policy, const char *preset);
/* An answer that has ended. */
void kvf__tally_add(kvf__tally *tally, const kvf_result *result);
uint64_t kvf__tally_answers(const kvf__tally *tally); /* that have ended */
void kvf__tally_end(kvf__tally *tally, const kvf_engine_stats *stats, double wall_s);
void kvf__tally_free(kvf__tally *tally);

/* "d2o, rho 0.2", or with a preset (else "") "d2o:serving, rho 0.2" */
void kvf__policy_label(const kvf_policy_options *options, const char *preset, char *text, size_t capacity);

/* One line of figures on stderr, for one prompt. */
void kvf__report_line(const kvf__tally *tally);

/* The summary on stderr: one column per tally, and the chart of the first. */
void kvf__report_text(const kvf__cli *cli, const kvf_model_info *info, uint32_t n_threads, const kvf__tally *tallies,
                      uint32_t n);

/* The summary as an object: the first tally's figures, and those of the second under "compare". */
json_t *kvf__report_json(const kvf__cli *cli, const kvf_model_info *info, uint32_t n_threads, const kvf__tally *tallies,
                         uint32_t n);

/* Prints the chart of values per layer on stderr, unless all are the same; full: what a full cache would take. */
void kvf__chart(const double *values, uint32_t n_layers, double full);

/* What repetitions of prompts took, beside the prompts. */
void kvf__show_repetition(const kvf_engine_stats *stats, char *text, size_t capacity);

#endif
