/* Input lines of the command, in both forms: each gives a request or an error, and an answer that is read back. The first
 * bit of an input is the form of the line before. */
#define _GNU_SOURCE
#include "fuzz/fuzz.h"
#include "tools/answer.h"
#include "tools/jsonl.h"

static kvf__cli cli;
static kvf__line_rules rules;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    kvf_model *model = fuzz_open_tiny(&(struct tiny_model_params){0});
    cli = kvf__cli_default();
    rules = (kvf__line_rules){.cli = &cli,
                              .tokenizer = kvf_model_tokenizer(model),
                              .info = kvf_model_get_info(model),
                              .model_path = "dir/tiny.gguf",
                              .policy = {"d2o", ""},
                              .own = true};
    return 0;
}

/* An answer of four tokens, with alternatives: each token has an entry of its own, and its place is in the text. */
static void must_keep_entries(const kvf__line *line, uint64_t seed) {
    enum { N = 4 };
    uint32_t tokens[N], top[N * KVF_TOP_LOGPROBS_MAX], n_vocab = rules.info->n_vocab;
    double logprobs[N] = {0}, top_logprobs[N * KVF_TOP_LOGPROBS_MAX] = {0};
    for (uint32_t i = 0; i < N; i++) {
        tokens[i] = (uint32_t)((seed + i * 97) % n_vocab);
        for (uint32_t k = 0; k < line->n_top; k++)
            top[i * line->n_top + k] = (uint32_t)((seed / 7 + i * 31 + k) % n_vocab);
    }
    const kvf_result r = {.tokens = tokens,
                          .logprobs = logprobs,
                          .n_tokens = N,
                          .text = "\xc3\xa4",
                          .text_bytes = 2,
                          .n_results = 1,
                          .n_top_logprobs = line->n_top,
                          .top_tokens = top,
                          .top_logprobs = top_logprobs};
    kvf__answer answer;
    FUZZ_MUST(kvf__answer_begin(&answer, line, 0), "an answer");
    kvf__answer_add(&answer, rules.tokenizer, 0, &r);
    const json_t *o = json_object_get(json_array_get(answer.choices, 0), "logprobs");
    for (size_t i = 0; i < N; i++) {
        const json_t *list = json_array_get(json_object_get(o, "top_logprobs"), i);
        bool among = false;
        for (uint32_t k = 0; k < line->n_top; k++) among |= top[i * line->n_top + k] == tokens[i];
        FUZZ_MUST(!line->n_top || json_object_size(list) == line->n_top + !among, "an entry for each token");
        json_int_t at = json_integer_value(json_array_get(json_object_get(o, "text_offset"), i));
        FUZZ_MUST(at >= 0 && at <= 1, "a place in the text");
    }
    kvf__answer_free(&answer);
}

static void must_have_read(const kvf__line *line) {
    FUZZ_MUST(line->id && line->root && line->n_tokens && line->n_samples, "a request");
    FUZZ_MUST(line->n_samples <= KVF__MAX_SAMPLES && line->n_stop <= KVF__MAX_STOP_OPENAI, "limits");
    FUZZ_MUST(line->sampling.temperature >= 0 && line->sampling.top_p >= 0 && line->sampling.top_p <= 1, "sampling");
    for (size_t i = 0; i < line->n_tokens; i++) FUZZ_MUST(line->tokens[i] < rules.info->n_vocab, "a token");
    kvf__answer answer;
    bool well = false;
    uint64_t hash;
    FUZZ_MUST(kvf__answer_begin(&answer, line, rules.info->n_layers), "an answer");
    const kvf_error why = {.text = "failed", .rank = -1};
    const kvf_result failed = {
        .finish = KVF_FINISH_ERROR, .error = why.text, .detail = &why, .text = "", .n_results = line->n_samples};
    kvf__answer_add(&answer, rules.tokenizer, 0, &failed);
    json_t *json = kvf__answer_json(&answer);
    FUZZ_MUST(json && kvf__answer_read(json, &well, &hash) && !well, "an answer");
    json_decref(json);
    kvf__answer_free(&answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    kvf__line line;
    kvf_error err = {.text = ""};
    rules.openai = data[0] & 1;
    kvf_status st = kvf__line_open(&rules, (const char *)data + 1, size - 1, 7, &line, &err);
    if (!st) st = kvf__line_read(&rules, &line, &err);
    FUZZ_MUST(line.id, "an id");
    if (st) {
        bool well = true;
        uint64_t hash;
        FUZZ_MUST(err.text[0], kvf_status_name(st));
        json_t *answer = kvf__answer_rejected(&line, err.text);
        FUZZ_MUST(answer && kvf__answer_read(answer, &well, &hash) && !well, "an answer");
        json_decref(answer);
    } else {
        must_have_read(&line);
        uint64_t seed = size;
        for (size_t i = 0; i < size; i++) seed = seed * 31 + data[i];
        if (line.form == KVF__FORM_COMPLETION && line.logprobs) must_keep_entries(&line, seed);
    }
    kvf__ids ids = {0};
    FUZZ_MUST(kvf__ids_add(&ids, line.id, 7) == KVF__IDS_NEW && kvf__ids_has(&ids, line.id), "an id is seen once");
    FUZZ_MUST(kvf__ids_add(&ids, line.id, 7) == KVF__IDS_SEEN, "an id is seen once");
    kvf__ids_free(&ids);
    kvf__line_free(&line);
    return 0;
}
