/* tools/request.h: one line of the input, checked, as what the engine takes. */
#ifndef KVF_TOOLS_REQUEST_H
#define KVF_TOOLS_REQUEST_H

#include "tools/cli.h"

/* What the lines of one run have in common. */
typedef struct kvf__line_rules {
    const kvf__cli *cli;
    const kvf_tokenizer *tokenizer;
    kvf__policy_name policy; /* of lines that name none */
    bool own; /* the command line's; false in the run of --compare, where lines have no say but in the budget */
} kvf__line_rules;

typedef struct kvf__line {
    uint64_t number;
    json_t *root, *id;
    uint32_t *tokens;
    size_t n_tokens;
    const char **stop; /* into root or the command line */
    uint32_t n_stop, max_tokens;
    kvf_sampling sampling;
    kvf_policy_options policy;
} kvf__line;

/* Reads a line. On failure err says why, and line has its number and id (the number where none could be read). In both
 * cases kvf__line_free follows. */
kvf_status kvf__line_read(const kvf__line_rules *rules, const char *text, size_t n_bytes, uint64_t number,
                          kvf__line *line, kvf_error *err);

/* --prompt as a line. */
kvf_status kvf__line_from_prompt(const kvf__line_rules *rules, kvf__line *line, kvf_error *err);

void kvf__line_free(kvf__line *line);

#endif
