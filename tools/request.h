/* tools/request.h: checks one line of the input and turns it into a request for the engine.
 *
 * A line has one of two forms: kvfold's own (request.c), or that of the OpenAI batch files (openai.c). An object that has
 * custom_id, method, url or body is of the second form, every other one of the first; both may stand in one file. Each
 * is answered in its own form (answer.c). A line that is no object counts as the second form when the text "custom_id"
 * is in it, as kvfold's when an id can be read in it, else as the line before it, and in the first line as kvfold's.
 */
#ifndef KVF_TOOLS_REQUEST_H
#define KVF_TOOLS_REQUEST_H

#include "tools/cli.h"

enum { KVF__MAX_SAMPLES = KVF_SAMPLES_MAX, KVF__MAX_STOP_OPENAI = 16 };

/* What the lines of one run have in common. */
typedef struct kvf__line_rules {
    const kvf__cli *cli;
    const kvf_tokenizer *tokenizer;
    const kvf_model_info *info;
    const char *model_path;
    kvf__policy_name policy; /* of lines that name none */
    size_t max_values;       /* of one line: kvf__line_max_values; 0: any number */
    bool own;    /* the command line's; false in the run of --compare, where lines may set only the budget */
    bool openai; /* the form of the line before */
} kvf__line_rules;

typedef enum kvf__form { KVF__FORM_OWN, KVF__FORM_CHAT, KVF__FORM_COMPLETION } kvf__form;

typedef struct kvf__line {
    uint64_t number;
    const char *text; /* the caller's, until kvf__line_read is done */
    size_t n_bytes;
    json_t *root, *id; /* id: the line's number where it names none */
    bool openai;       /* the form; which of the two endpoints is in `form`, once that is known */
    bool named;        /* id stands in the line */
    uint64_t hash;     /* kvf__line_hash, where the answer is to tell it; 0: it is not */
    kvf__form form;
    const json_t *model; /* in root: the name that the answer repeats, or NULL */
    uint32_t *tokens;
    size_t n_tokens;
    const char **stop; /* into root or the command line */
    uint32_t n_stop, max_tokens;
    uint32_t n_samples, n_top;    /* answers; n_top: alternatives of each token, with logprobs */
    uint32_t best_of, beam_width; /* 0: n_samples, no beams */
    double length_penalty;
    bool logprobs, ignore_end;
    const char *cache_salt, *prefix_name; /* in root, or NULL */
    uint32_t salt_bytes, prefix_end;      /* prefix_end 0: not given */
    int32_t priority;
    double deadline_s; /* 0: none */
    kvf_sampling sampling;
    kvf_policy_options policy;
    /* Of a failure, in the OpenAI form. */
    int status;       /* as of HTTP */
    const char *code; /* for programs */
    char param[64];   /* the field, "": none */
} kvf__line;

/* What a line may have, by the model's or --context tokens: bytes (with each character escaped as JSON allows, the longest prompt
 * that could fit, and room for other fields) and values. A line that has more is refused before memory is spent on it. */
size_t kvf__line_max_bytes(const kvf__cli *cli, const kvf_tokenizer *tokenizer, const kvf_model_info *info);
size_t kvf__line_max_values(const kvf__cli *cli, const kvf_model_info *info);
uint32_t kvf__line_context(const kvf__cli *cli, const kvf_model_info *info);

/* Reads a line as JSON, and its form and id. On failure err says why, and line has its number, form and id (the number
 * where none could be read, also by kvf__broken_value). In both cases kvf__line_free follows. */
kvf_status kvf__line_open(const kvf__line_rules *rules, const char *text, size_t n_bytes, uint64_t number,
                          kvf__line *line, kvf_error *err);
/* As kvf__line_open for a line of which only the first n_bytes are there, as it is too long: fails, with its form and id. */
kvf_status kvf__line_too_long(const kvf__line_rules *rules, const char *text, size_t n_bytes, uint64_t number,
                              kvf__line *line, kvf_error *err);
/* The hash of a line that its answer carries: of all fields and values, whatever their order and spelling (2.0 is 2, and a
 * field that is null is left out); never 0. */
uint64_t kvf__line_hash(const kvf__line *line);
/* The rest of it, after kvf__line_open, whose text is still there. */
kvf_status kvf__line_read(const kvf__line_rules *rules, kvf__line *line, kvf_error *err);

/* Whether --n, --best-of and --beam-width go together; false after a message. */
bool kvf__samples_check(const kvf__cli *cli);

/* --prompt as a line. */
kvf_status kvf__line_from_prompt(const kvf__line_rules *rules, kvf__line *line, kvf_error *err);

void kvf__line_free(kvf__line *line);

/* ---- What both forms share: request.c ------------------------------------------------------------------- */

/* Reads best_of, beam_width and length_penalty of an object, after n; missing ones come from the command line. With
 * beams the temperature is 0 if neither sets it. */
kvf_status kvf__line_ranked(const kvf__line_rules *rules, kvf__line *line, const json_t *object, kvf_error *err);
/* Reads max_tokens, top_k, n, temperature (up to `hottest`), top_p and ignore_eos of an object; missing ones stay as
 * they are. */
kvf_status kvf__line_sampling(kvf__line *line, const json_t *object, double hottest, kvf_error *err);
/* Reads prefix_end, prefix_name, cache_salt, priority and deadline of an object. */
kvf_status kvf__line_queue(kvf__line *line, const json_t *object, kvf_error *err);
/* Sampling and stop strings of the command line; max_tokens and temperature are the given defaults if the command
 * line does not set them. */
void kvf__line_defaults(const kvf__line_rules *rules, kvf__line *line, uint32_t max_tokens, double temperature);
kvf_status kvf__line_stop(const kvf__line_rules *rules, kvf__line *line, const json_t *object, kvf_error *err);
/* Reads policy, preset and policy options of an object that may have other keys; NULL: the command line's. */
kvf_status kvf__line_policy(const kvf__line_rules *rules, kvf__line *line, const json_t *object, kvf_error *err);
/* A text, a dialogue (--system goes in front of one without a system message; n >= 1) and ids become tokens. */
kvf_status kvf__line_text(const kvf__line_rules *rules, kvf__line *line, const json_t *text, kvf_error *err);
kvf_status kvf__line_dialogue(const kvf__line_rules *rules, kvf__line *line, const kvf_message *messages, uint32_t n,
                              kvf_error *err);
kvf_status kvf__line_token_ids(const kvf__line_rules *rules, kvf__line *line, const char *key, const json_t *list,
                               kvf_error *err);
/* The number of messages of a list, 0 when it is none or has too few or too many. */
uint32_t kvf__line_count_messages(const json_t *list, kvf_error *err);

/* ---- The OpenAI form: openai.c ---------------------------------------------------------------------------- */

bool kvf__openai_is(const json_t *root);
kvf_status kvf__openai_read(const kvf__line_rules *rules, kvf__line *line, kvf_error *err);

#endif
