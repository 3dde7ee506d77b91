/* tools/answer.h: the answer to a line, or its error, as JSON in the line's own form. */
#ifndef KVF_TOOLS_ANSWER_H
#define KVF_TOOLS_ANSWER_H

#include "tools/request.h"

/* A line that runs, and what its samples gave. */
typedef struct kvf__answer {
    uint64_t line, line_hash; /* hash 0: it is not told */
    bool openai, logprobs;
    uint32_t cached_tokens; /* the most that a sample found */
    bool undated; /* the OpenAI form's `created` is 0, so that answers of two runs can be equal; false after begin */
    bool several; /* samples or beams over one prompt */
    kvf__form form;
    json_t *id, *model;
    kvf_policy_options policy;
    uint32_t n_layers, n_samples;
    json_t *choices; /* null until that sample has ended; fewer where there were no more hypotheses */
    char *error;     /* of the first sample that failed, or NULL */
    uint64_t prompt_tokens, completion_tokens;
    uint64_t kv_bytes; /* KV memory of the run; 0 after begin */
} kvf__answer;

/* False when out of memory; kvf__answer_free follows in both cases. */
bool kvf__answer_begin(kvf__answer *answer, const kvf__line *line, uint32_t n_layers);
void kvf__answer_free(kvf__answer *answer);

/* One sample has ended. */
void kvf__answer_add(kvf__answer *answer, const kvf_tokenizer *tokenizer, uint32_t index, const kvf_result *result);
/* With --compare: the number, from 1, of that sample's first token that differs from the first run's; 0 if none does.
 * */
void kvf__answer_differs(const kvf__answer *answer, uint32_t index, uint32_t at);
/* All have. */
json_t *kvf__answer_json(const kvf__answer *answer);

/* The answer to a line that did not run. */
json_t *kvf__answer_rejected(const kvf__line *line, const char *text);

/* Reads a line of an earlier output: its id (inside the value, which must outlive it), whether it ended well, and the
 * hash of the line it answers, 0 if it has none. NULL if it is not an answer. */
const json_t *kvf__answer_read(const json_t *value, bool *well, uint64_t *line_hash);
/* The KV memory that an answer, or one of its choices, was too long for: with more it goes on. 0: it is whole. */
uint64_t kvf__answer_memory(const json_t *value);

#endif
