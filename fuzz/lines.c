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

static void must_have_read(const kvf__line *line) {
    FUZZ_MUST(line->id && line->root && line->n_tokens && line->n_samples, "a request");
    FUZZ_MUST(line->n_samples <= KVF__MAX_SAMPLES && line->n_stop <= KVF__MAX_STOP_OPENAI, "limits");
    FUZZ_MUST(line->sampling.temperature >= 0 && line->sampling.top_p >= 0 && line->sampling.top_p <= 1, "sampling");
    for (size_t i = 0; i < line->n_tokens; i++) FUZZ_MUST(line->tokens[i] < rules.info->n_vocab, "a token");
    kvf__answer answer;
    bool well = false;
    uint64_t hash;
    FUZZ_MUST(kvf__answer_begin(&answer, line, rules.info->n_layers), "an answer");
    const kvf_result failed = {.finish = KVF_FINISH_ERROR, .error = "failed", .text = "", .n_results = line->n_samples};
    kvf__answer_add(&answer, rules.tokenizer, 0, &failed);
    json_t *json = kvf__answer_json(&answer);
    FUZZ_MUST(json && kvf__answer_read(json, &well, &hash) && !well, "an answer");
    json_decref(json);
    kvf__answer_free(&answer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size) return 0;
    kvf__line line;
    kvf_error err = {""};
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
    }
    kvf__ids ids = {0};
    FUZZ_MUST(kvf__ids_add(&ids, line.id, 7) == KVF__IDS_NEW && kvf__ids_has(&ids, line.id), "an id is seen once");
    FUZZ_MUST(kvf__ids_add(&ids, line.id, 7) == KVF__IDS_SEEN, "an id is seen once");
    kvf__ids_free(&ids);
    kvf__line_free(&line);
    return 0;
}
