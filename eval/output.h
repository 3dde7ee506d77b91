/* eval/output.h: the file of records: its first record, the records of an earlier run, resuming.
 *
 * Invariants
 *   - A record is one line and one write(). An incomplete last line is dropped; every other line must be a record.
 *   - A file is continued only with the same model, texts and options that change results, or with --force.
 */
#ifndef KVF_EVAL_OUTPUT_H
#define KVF_EVAL_OUTPUT_H

#include "eval/eval.h"
#include "tools/jsonl.h"

typedef struct kvf__eval_output {
    kvf__sink sink;
    kvf__ids done; /* keys of the records that are there */
    bool has_run;  /* a run record that says the same is there */
    uint64_t n_done;
} kvf__eval_output;

/* What a run is, as the first line of its output; NULL after a message. */
json_t *kvf__eval_run_record(const kvf__cli *cli, kvf__measure measure, const kvf__eval_inputs *inputs,
                             const kvf__eval_policies *policies, uint32_t k, uint32_t n_threads);

/* Opens --output. With --resume the records that are there are kept and read. False after a message; then the file is
 * unchanged. */
bool kvf__eval_output_open(kvf__eval_output *output, const kvf__cli *cli, const json_t *run);
bool kvf__eval_output_has(const kvf__eval_output *output, json_t *key); /* takes key */
void kvf__eval_output_write(kvf__eval_output *output, json_t *record);  /* takes record */
bool kvf__eval_output_close(kvf__eval_output *output);

#endif
