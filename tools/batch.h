/* tools/batch.h: the job of kvfold run, and one pass of it through an engine. */
#ifndef KVF_TOOLS_BATCH_H
#define KVF_TOOLS_BATCH_H

#include "tools/digest.h"
#include "tools/files.h"
#include "tools/jsonl.h"
#include "tools/reader.h"
#include "tools/report.h"
#include "tools/resume.h"
#include "tools/same.h"
#include "tools/watch.h"

typedef struct kvf__batch { /* all of the command, with --input or --prompt */
    kvf__cli *cli;
    char model_path[KVF__PATH_BYTES];
    kvf_model *model;
    kvf_probe *probe; /* where a policy needs one */
    const kvf_model_info *info;
    uint32_t n_threads;
    kvf__policy_name names[2]; /* of --policy and of --compare */
    kvf_policy_options policies[2];
    kvf__tally tallies[2];
    uint32_t n_passes, n_done;
    kvf_engine *engine; /* of the first pass, from before the outputs are opened; NULL once it runs */
    kvf__ids failed;    /* numbers of lines that failed in the first pass, where there is a second */
    kvf__same same;     /* answers, where there is a second */
    kvf__reader reader;
    kvf__sink outputs[2], stats;
    kvf__files files;               /* all that is read and written */
    char digest[KVF__DIGEST_BYTES]; /* of the model, where an output or a kept prompt needs it */
    json_t *header;                 /* of an output that can be resumed; NULL once it is written */
    kvf__resume resume;
    bool resumable; /* the output is a file with a header */
    bool streams, some_failed, engine_failed, kept_failed;
    bool other_line; /* a line of the input is not the one that the output answers: nothing is read any more */
    json_t *result;  /* of --prompt with --json */
    kvf__watch watch;
    bool watch_failed;
} kvf__batch;

/* pass.c: runs all requests once, with the first policy or (index 1) that of --compare. False if the command must
 * end. */
bool kvf__batch_pass(kvf__batch *batch, uint32_t index);

#endif
