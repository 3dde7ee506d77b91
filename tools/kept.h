/* tools/kept.h: cached prompts kept in files by name, over runs: --prefix-dir, and `prefix_name` of a line. */
#ifndef KVF_TOOLS_KEPT_H
#define KVF_TOOLS_KEPT_H

#include "tools/request.h"

typedef struct kvf__kept_prompt kvf__kept_prompt;

typedef struct kvf__kept {  /* zero: keeps none */
    const char *dir, *mode; /* mode: part of the files' names */
    char identity[32];      /* of the model's file */
    kvf__kept_prompt *first;
} kvf__kept;

/* false after a message: the model's file cannot be read. */
bool kvf__kept_begin(kvf__kept *kept, const kvf__cli *cli, const char *model_path);

/* Before a line is submitted, outside callbacks: the first time that its name is seen its file is loaded, where there is
 * one. out: to be told when the line has ended, when there was none; NULL otherwise. */
kvf_status kvf__kept_use(kvf__kept *kept, kvf_engine *engine, const kvf__line *line, kvf__kept_prompt **out,
                         kvf_error *err);
/* The prompt is computed: it can be saved after this step. NULL is allowed. */
void kvf__kept_ready(kvf__kept_prompt *prompt);

/* After a step: saves what is ready. false after a message: a file could not be written. */
bool kvf__kept_save(kvf__kept *kept, kvf_engine *engine);

void kvf__kept_end(kvf__kept *kept);

#endif
