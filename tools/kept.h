/* tools/kept.h: cached prompts in named files, kept across runs: --prefix-dir, and `prefix_name` of a line. */
#ifndef KVF_TOOLS_KEPT_H
#define KVF_TOOLS_KEPT_H

#include "tools/files.h"
#include "tools/request.h"

typedef struct kvf__kept_prompt kvf__kept_prompt;

typedef struct kvf__kept { /* zero: keeps none */
    const char *dir;
    char mode[64];        /* part of the files' names */
    const char *identity; /* of the model */
    const kvf__files *files;
    bool quiet;
    kvf__kept_prompt *first;
} kvf__kept;

/* files: all files that the command reads and writes; no cached prompt overwrites them. digest: of the model, in
 * letters. Both outlive kept. */
void kvf__kept_begin(kvf__kept *kept, const kvf__cli *cli, const kvf_probe *probe, const kvf__files *files,
                     const char *digest);

/* Call before a line is submitted, outside callbacks. When a name is seen for the first time its file is loaded, if
 * it exists. A file that is damaged, or belongs to another model or setting, causes a warning and counts as missing.
 * out: set if the prompt is to be saved when the line has ended, else NULL. */
kvf_status kvf__kept_use(kvf__kept *kept, kvf_engine *engine, const kvf__line *line, kvf__kept_prompt **out,
                         kvf_error *err);
/* The prompt is computed: it can be saved after this step. NULL is allowed. */
void kvf__kept_ready(kvf__kept_prompt *prompt);

/* After a step: saves what is ready. false after a message: a file could not be written. */
bool kvf__kept_save(kvf__kept *kept, kvf_engine *engine);

void kvf__kept_end(kvf__kept *kept);

#endif
