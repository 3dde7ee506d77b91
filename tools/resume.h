/* tools/resume.h: what an output file says of the run that wrote it, and going on where that run ended.
 *
 * The header records the model and every option that can change an answer. In kvfold's own form it is the first line of
 * the output, {"kvfold": ...}; readers of the OpenAI form know no such line, so there it is a file beside the output,
 * OUTPUT.kvfold-header.json.
 */
#ifndef KVF_TOOLS_RESUME_H
#define KVF_TOOLS_RESUME_H

#include "tools/cli.h"
#include "tools/jsonl.h"

/* A digest of the ends of a model's file, in letters; false after a message. */
bool kvf__model_digest(const char *path, char *text, size_t capacity);

/* NULL after a message. */
json_t *kvf__header_make(const kvf__cli *cli, const char *model_path, const kvf_model_info *info,
                         const kvf_policy_options *policy);
/* Puts the header beside the output, in one step; false after a message. */
bool kvf__header_write_beside(const char *output, const json_t *header);

typedef struct kvf__resume { /* zero: nothing was there */
    kvf__ids done;           /* what ended well */
    uint64_t n_done;
    bool has_header; /* the output, or the file beside it, has one that fits */
} kvf__resume;

/* Reads the output of an earlier run. Answers that ended well stay; errors, a torn last line and what is no answer go, in
 * one step, so that an end at any moment loses nothing. False after a message: the header does not fit (force: goes on
 * all the same), or there is none, or the file could not be read or written. A file that is not there is an empty one. */
bool kvf__resume_read(kvf__resume *resume, const char *output, const json_t *header, bool force, bool quiet);

#endif
