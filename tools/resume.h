/* tools/resume.h: the header of an output file, and --resume, which continues where the run that wrote it ended.
 *
 * The header records the model and every option that can change an answer. In kvfold's own form it is the first line of
 * the output, {"kvfold": ...}; readers of the OpenAI form know no such line, so there it is a file beside the output,
 * OUTPUT.kvfold-header.json. Every answer tells a hash of its line: `line_hash`, in the OpenAI form the end of `id`.
 */
#ifndef KVF_TOOLS_RESUME_H
#define KVF_TOOLS_RESUME_H

#include "tools/jsonl.h"
#include "tools/reader.h"
#include "tools/request.h"

/* Suffixes to the output's name: of the header's file, and of the file that replaces one of the two when it is
 * complete. */
#define KVF__HEADER_SUFFIX ".kvfold-header.json"
#define KVF__PART_SUFFIX ".kvfold-part"

/* digest: of the model, in letters. NULL after a message. */
json_t *kvf__header_make(const kvf__cli *cli, const char *digest, const kvf_probe *probe, const kvf_model_info *info,
                         const kvf_policy_options *policy);
/* Puts the header beside the output, in one step; false after a message. */
bool kvf__header_write_beside(const char *output, const json_t *header);

typedef struct kvf__resume {    /* zero: nothing was there */
    const char *output, *input; /* names; set before kvf__resume_read */
    bool force;                 /* another header, and other lines, are no reason to stop */
    kvf__ids done;              /* what ended well, with the hashes of the lines */
    uint64_t n_done;
    uint64_t kv_bytes; /* of this run; set before kvf__resume_read */
    size_t max_values; /* of a line of the input; likewise */
    uint64_t n_short;  /* answers that the KV memory of an earlier run cut short, and this one has more */
    bool has_header;   /* the output, or the file beside it, has one that fits */
    bool failed;       /* a file could not be written */
} kvf__resume;

/* Whether there is a file to go on with, or none; false after a message. */
bool kvf__resume_can(const char *output);

/* Reads the output of an earlier run, which the sink has opened and locked. Answers that ended well stay. Errors, an
 * incomplete last line, lines that are not answers and second answers to one line are removed in one step, so that stopping at any moment loses
 * nothing. False after a message, with the file unchanged: the header is missing or does not match; a line of the
 * input is not the line that was answered; the file could not be read or written. */
bool kvf__resume_read(kvf__resume *resume, kvf__sink *sink, kvf__reader *input, const json_t *header, bool quiet);

typedef enum kvf__resume_line { KVF__RESUME_NEW, KVF__RESUME_DONE, KVF__RESUME_OTHER } kvf__resume_line;
/* Whether a line of the input, the first with its id, has been answered; OTHER, after a message, if a different line
 * with this id has. */
kvf__resume_line kvf__resume_look(const kvf__resume *resume, const kvf__line *line);

#endif
