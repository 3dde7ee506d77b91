/* The forms of a line, whose faults users reported: log-probabilities by a token's text, zero bytes, broken JSON, numbers. */
#define _DEFAULT_SOURCE
#include <stdlib.h>

#include "tests/spm_vocabulary.h"
#include "tools/answer.h"
#include "tools/broken.h"
#include "tools/fields.h"
#include "tools/reader.h"

static kvf_model *model;
static kvf__cli cli;
static kvf__line_rules rules;

/* Bytes as tokens behind three control tokens, then "A" once more, words, and texts that look like made names. */
enum { FIRST_BYTE = 3, AFTER_BYTES = FIRST_BYTE + 256, A_WORD = AFTER_BYTES, HELLO, LIKE_ID, LIKE_BYTES, SPACE };

static void open_model(void) {
    const char *words[] = {"A", "hello", "token_id:68", "bytes:\\xf0", "\xe2\x96\x81"};
    vocabulary v;
    begin_vocabulary(&v, words, sizeof words / sizeof *words);
    model = open_vocabulary(&v);
    cli = kvf__cli_default();
    cli.chat_template = "none"; /* the vocabulary has none */
    rules = (kvf__line_rules){.cli = &cli,
                              .tokenizer = kvf_model_tokenizer(model),
                              .info = kvf_model_get_info(model),
                              .model_path = "dir/tiny.gguf",
                              .policy = {"d2o", ""},
                              .own = true};
}

static void close_model(void) { kvf_model_close(model); }

TestSuite(forms, .init = open_model, .fini = close_model);

/* ---- Log-probabilities ----------------------------------------------------------------------------------- */

/* `logprobs` of the answer to a completion; the caller frees. */
static json_t *completion(const kvf_result *r) {
    kvf__line line = {.openai = true, .form = KVF__FORM_COMPLETION, .logprobs = true, .n_samples = 1, .number = 1};
    kvf__answer answer;
    cr_assert(kvf__answer_begin(&answer, &line, 0));
    kvf__answer_add(&answer, rules.tokenizer, 0, r);
    json_t *logprobs = json_object_get(json_array_get(answer.choices, 0), "logprobs");
    json_incref(logprobs);
    kvf__answer_free(&answer);
    return logprobs;
}

static double number_at(const json_t *object, const char *key) {
    cr_assert(json_object_get(object, key), "%s in %s", key, json_dumps(object, 0));
    return json_number_value(json_object_get(object, key));
}

Test(forms, r19_tokens_keep_their_entries) {
    enum { N_TOP = 5 };
    const uint32_t tokens[] = {FIRST_BYTE + 0xf0, FIRST_BYTE + 'A'};
    const double logprobs[] = {-1, -7};
    const uint32_t top[] = {FIRST_BYTE + 0xf0,
                            FIRST_BYTE + 0x9f,
                            FIRST_BYTE + 0xf1,
                            LIKE_BYTES,
                            FIRST_BYTE,
                            A_WORD,
                            FIRST_BYTE + 'B',
                            LIKE_ID,
                            5000,
                            5001};
    const double top_logprobs[] = {-1, -2, -3, -4, -5, -6, -6.5, -6.6, -6.7, -6.8};
    kvf_result r = {.tokens = tokens, .logprobs = logprobs, .n_tokens = 2, .n_top_logprobs = N_TOP};
    r.top_tokens = top;
    r.top_logprobs = top_logprobs;
    r.text = "\xef\xbf\xbd"
             "A";
    r.text_bytes = 4;
    r.n_results = 1;
    json_t *o = completion(&r), *tops = json_object_get(o, "top_logprobs");
    const struct {
        const char *name;
        double value;
    } wanted[2][6] = {
        {{"bytes:\\xf0", -1}, {"bytes:\\x9f", -2}, {"bytes:\\xf1", -3}, {"token_id:262", -4}, {"bytes:\\x00", -5}},
        {{"token_id:259", -6},
         {"B", -6.5},
         {"token_id:261", -6.6},
         {"token_id:5000", -6.7},
         {"token_id:5001", -6.8},
         {"A", -7}}};
    for (size_t i = 0; i < 2; i++) {
        const json_t *list = json_array_get(tops, i);
        size_t n = N_TOP + i; /* the one taken is not of the likeliest the second time */
        cr_assert_eq(json_object_size(list), n, "%zu: %zu", i, json_object_size(list));
        for (size_t k = 0; k < n; k++)
            cr_expect(fabs(number_at(list, wanted[i][k].name) - wanted[i][k].value) < 1e-9, "%zu %zu", i, k);
    }
    cr_expect_str_eq(json_string_value(json_array_get(json_object_get(o, "tokens"), 0)), "bytes:\\xf0");
    cr_expect_str_eq(json_string_value(json_array_get(json_object_get(o, "tokens"), 1)), "A");
    json_decref(o);
}

Test(forms, r19_offsets_index_the_text) {
    /* U+1F600 in four tokens, an end token, a word, half a character, U+4E2D in three; what is cut off stands at the end. */
    const uint32_t tokens[] = {HELLO,
                               FIRST_BYTE + 0xf0,
                               FIRST_BYTE + 0x9f,
                               FIRST_BYTE + 0x98,
                               EOS_ID,
                               FIRST_BYTE + 0x80,
                               A_WORD,
                               FIRST_BYTE + 0xe4,
                               FIRST_BYTE + 0xb8,
                               A_WORD,
                               FIRST_BYTE + 0xe4,
                               FIRST_BYTE + 0xb8,
                               FIRST_BYTE + 0xad,
                               SPACE};
    enum { N = sizeof tokens / sizeof *tokens };
    const uint32_t offsets[N] = {0, 5, 5, 5, 5, 5, 6, 7, 8, 9, 10, 10, 10, 11};
    const double logprobs[N] = {0};
    static const char whole[] = "hello\xf0\x9f\x98\x80"
                                "A\xef\xbf\xbd\xef\xbf\xbd"
                                "A\xe4\xb8\xad ";
    for (size_t cut = 0; cut < sizeof whole; cut++) { /* as a stop string cuts it, between characters */
        if ((whole[cut] & 0xc0) == 0x80) continue;
        uint64_t n_text = 0;
        for (size_t i = 0; i < cut; i++) n_text += (whole[i] & 0xc0) != 0x80;
        kvf_result r = {.tokens = tokens, .logprobs = logprobs, .n_tokens = N, .text = whole, .text_bytes = cut};
        r.n_results = 1;
        json_t *o = completion(&r), *list = json_object_get(o, "text_offset");
        cr_expect(json_is_null(json_object_get(o, "top_logprobs")));
        cr_assert_eq(json_array_size(list), N);
        for (size_t i = 0; i < N; i++) {
            uint64_t at = (uint64_t)json_integer_value(json_array_get(list, i));
            cr_expect_eq(at, offsets[i] < n_text ? offsets[i] : n_text, "cut %zu: token %zu at %llu", cut, i,
                         (unsigned long long)at);
        }
        json_decref(o);
    }
}

/* ---- Lines that are refused ------------------------------------------------------------------------------------ */

/* From memory that ends with the line. */
static kvf_status read_line(const char *text, kvf__line *line, kvf_error *err) {
    size_t n = strlen(text);
    char *copy = malloc(n);
    cr_assert(copy);
    memcpy(copy, text, n);
    err->text[0] = '\0';
    kvf_status st = kvf__line_open(&rules, copy, n, 7, line, err);
    if (!st) st = kvf__line_read(&rules, line, err);
    free(copy);
    return st;
}

/* Each text is refused with words that hold the other. */
static void must_refuse(const char *const cases[][2], size_t n) {
    for (size_t i = 0; i < n; i++) {
        kvf__line line;
        kvf_error err;
        cr_expect_neq(read_line(cases[i][0], &line, &err), KVF_OK, "%s", cases[i][0]);
        cr_expect(strstr(err.text, cases[i][1]), "%s: %s; wanted %s", cases[i][0], err.text, cases[i][1]);
        kvf__line_free(&line);
    }
}

#define LINE(envelope, body) "{\"custom_id\": \"a\", " envelope ", \"body\": {\"model\": \"tiny\", " body "}}"
#define CHAT "\"method\": \"POST\", \"url\": \"/v1/chat/completions\""
#define TEXT "\"method\": \"POST\", \"url\": \"/v1/completions\""
#define HI "\"messages\": [{\"role\": \"user\", \"content\": \"hello\"}]"
#define REFUSE(cases) must_refuse(cases, sizeof cases / sizeof *cases)

Test(forms, r23_a_zero_byte_ends_no_text) {
    const char *const cases[][2] = {
        {LINE("\"method\": \"POST\\u0000\", \"url\": \"/v1/completions\"", "\"prompt\": \"x\""), "method POST\\x00"},
        {LINE("\"method\": \"POST\", \"url\": \"/v1/completions\\u0000x\"", "\"prompt\": \"x\""),
         "url /v1/completions\\x00x"},
        {"{\"custom_id\": \"a\", " TEXT ", \"body\": {\"model\": \"tiny\\u0000\", \"prompt\": \"x\"}}",
         "model tiny\\x00"},
        {"{\"custom_id\": \"a\", " TEXT ", \"body\": {\"model\": \"\\u0000tiny\", \"prompt\": \"x\"}}",
         "model \\x00tiny"},
        {LINE(CHAT, "\"messages\": [{\"role\": \"user\\u0000\", \"content\": \"x\"}]"), "messages[0].role user\\x00"},
        {LINE(CHAT,
              "\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\\u0000\", \"text\": \"x\"}]}]"),
         "text\\x00"},
        {LINE(CHAT, HI ", \"response_format\": {\"type\": \"text\\u0000\"}"), "response_format"},
        {LINE(CHAT, HI ", \"modalities\": [\"text\\u0000\"]"), "modalities"},
        {LINE(CHAT, HI ", \"tool_choice\": \"none\\u0000\""), "tool_choice"},
        {LINE(TEXT, "\"prompt\": \"x\", \"suffix\": \"\\u0000\""), "suffix"},
        {LINE(TEXT, "\"prompt\": \"x\", \"stop\": \"a\\u0000\""), "stop: holds a zero byte"},
        {LINE(TEXT, "\"prompt\": \"x\", \"stop\": [\"a\", \"\\u0000\"]"), "stop: holds a zero byte"},
        {LINE(TEXT, "\"prompt\": \"x\", \"kvfold\": {\"policy\": \"d2o\\u0000\"}"), "policy d2o\\x00"},
        {LINE(TEXT, "\"prompt\": \"x\", \"kvfold\": {\"preset\": \"paper\\u0000\"}"), "preset paper\\x00"},
        {LINE(TEXT, "\"prompt\": \"x\", \"kvfold\": {\"rho\": \"0.5\\u0000\"}"), "rho 0.5\\x00"},
        {LINE(TEXT, "\"prompt\": \"x\", \"kvfold\": {\"prefix_name\": \"a\\u0000\"}"), "prefix_name a\\x00"},
        {LINE(TEXT, "\"prompt\": \"x\", \"seed\\u0000\": 1"), "NUL"},
        {"{\"prompt\": \"x\", \"policy\": \"full\\u0000\"}", "policy full\\x00"},
        {"{\"prompt\": \"x\", \"merge\": \"paper\\u0000\"}", "merge paper\\x00"},
        {"{\"prompt\": \"x\", \"full_layers\": [\"1\\u0000\"]}", "full_layers"},
        {"{\"messages\": [{\"role\": \"user\\u0000\", \"content\": \"x\"}]}", "messages[0].role user\\x00"}};
    REFUSE(cases);
    /* Where any byte may stand, all count. */
    const char *const different[][2] = {{"\"a\\u0000b\"", "\"a\\u0000c\""}, {"\"a\"", "\"a\\u0000\""}};
    for (size_t i = 0; i < 2; i++) {
        kvf__line lines[2];
        for (size_t k = 0; k < 2; k++) {
            char text[200];
            kvf_error err;
            snprintf(text, sizeof text, "{\"id\": %s, \"prompt\": %s, \"cache_salt\": %s}", different[i][k],
                     different[i][k], different[i][k]);
            cr_assert_eq(read_line(text, &lines[k], &err), KVF_OK, "%s: %s", text, err.text);
        }
        const kvf__line *a = &lines[0], *b = &lines[1];
        cr_expect(!json_equal(a->id, b->id));
        cr_expect(a->n_tokens != b->n_tokens || memcmp(a->tokens, b->tokens, a->n_tokens * sizeof *a->tokens) != 0);
        cr_expect(a->salt_bytes != b->salt_bytes || memcmp(a->cache_salt, b->cache_salt, a->salt_bytes) != 0);
        kvf__line_free(&lines[0]);
        kvf__line_free(&lines[1]);
    }
}

Test(forms, r28_values_stand_in_messages_as_written) {
    const char *const cases[][2] = {
        {LINE(TEXT, "\"prompt\": \"x\", \"temperature\": 2.0000001"), "temperature 2.0000001: must be from 0 to 2"},
        {LINE(TEXT, "\"prompt\": \"x\", \"top_p\": 1.00000001"), "top_p 1.00000001: must be from 0 to 1"},
        {LINE(TEXT, "\"prompt\": \"x\", \"seed\": 1.5"), "seed 1.5: must be a whole number"},
        {LINE(TEXT, "\"prompt\": \"x\", \"kvfold\": {\"rho\": 1.0000001}"), "rho 1.0000001: must be"},
        {"{\"prompt\": \"x\", \"temperature\": 100.00000000001}", "temperature 100.00000000001: must be from 0 to 100"},
        {"{\"prompt\": \"x\", \"temperature\": -1e-7}", "temperature -1e-7: must be"},
        {"{\"prompt\": \"x\", \"length_penalty\": -100.0000001}",
         "length_penalty -100.0000001: must be from -100 to 100"},
        {"{\"prompt\": \"x\", \"beam_width\": 2, \"temperature\": 0.10000001}", "temperature 0.10000001: beam search"},
        {"{\"prompt\": \"x\", \"max_tokens\": 4294967296}", "max_tokens 4294967296: must be from 1 to 4294967295"},
        {"{\"prompt\": \"x\", \"max_tokens\": 1e30}", "max_tokens 1e30: must be a whole number from 1"},
        {"{\"prompt\": \"x\", \"n\": 129}", "n 129: must be from 1 to 128"},
        {"{\"prompt\": \"x\", \"max_tokens\": 1E+30}", "max_tokens 1E+30: must be"},
        {"{\"prompt\": \"1e2\", \"seed\": 100.0, \"top_p\": 1e2, \"n\": 100}", "top_p 1e2: must be from 0 to 1"},
        {"{\"prompt\": \"x\", \"temperature\": 100.50}", "temperature 100.50: must be from 0 to 100"},
        {"{\"prompt\": \"top_p\", \"rho\": 2.50}", "rho 2.50: must be"},
        {LINE(TEXT, "\"prompt\": \"x\", \"kvfold\": {\"rho\": 20e-1}"), "rho 20e-1: must be"},
        {"{\"prompt\": \"x\", \"budget_tokens\": 1.50e1}", "budget_tokens 1.50e1: must be"},
        {"{\"token_ids\": [5.0, 1e9]}", "token_ids[1] 1e9: must be a whole number"},
        {"{\"prompt\": \"x\", \"top_k\": 0.1}", "top_k 0.1: must be a whole number from 0"},
        {"{\"prompt\": \"x\", \"min_tokens\": 12345678.5}", "min_tokens 12345678.5: must be"},
        {"{\"token_ids\": [5, 6.25]}", "token_ids[1] 6.25: must be a whole number"}};
    REFUSE(cases);
    const struct {
        double value;
        const char *text;
    } shown[] = {{0, "0"},         {-2, "-2"},
                 {100, "100"},     {1e6, "1000000"},
                 {0.3, "0.3"},     {0.1 + 0.2, "0.30000000000000004"},
                 {1e-5, "1e-5"},   {123456789012.5, "123456789012.5"},
                 {1e300, "1e300"}, {5e-324, "5e-324"}};
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
        cr_expect_str_eq(kvf__show_number(shown[i].value).text, shown[i].text);
}

/* ---- Lines that are taken --------------------------------------------------------------------------------------- */

Test(forms, r38_null_is_as_left_out_and_whole_numbers_have_many_spellings) {
    kvf__line plain, line;
    kvf_error err;
    cr_assert_eq(read_line("{\"token_ids\": [260, 261]}", &plain, &err), KVF_OK, "%s", err.text);
    const char *const keys[] = {
        "id",          "prompt",     "messages",   "max_tokens",     "temperature", "top_k",
        "top_p",       "seed",       "stop",       "policy",         "preset",      "n",
        "logprobs",    "best_of",    "beam_width", "length_penalty", "prefix_end",  "cache_salt",
        "prefix_name", "ignore_eos", "rho",        "budget_tokens",  "full_layers", "merge"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char text[200];
        snprintf(text, sizeof text, "{\"token_ids\": [260, 261], \"%s\": null}", keys[i]);
        cr_assert_eq(read_line(text, &line, &err), KVF_OK, "%s: %s", text, err.text);
        cr_expect(json_equal(line.id, plain.id) && !line.named && line.n_tokens == 2, "%s", text);
        cr_expect(!memcmp(&line.sampling, &plain.sampling, sizeof line.sampling), "%s", text);
        cr_expect(line.max_tokens == plain.max_tokens && line.n_samples == 1 && !line.n_stop && !line.logprobs, "%s",
                  text);
        kvf__line_free(&line);
    }
    kvf__line_free(&plain);
    const char *const spelled[][2] = {{"1.0", "3.0"}, {"1e0", "3e0"}, {"10e-1", "0.3e1"}, {"1", "3"}};
    for (size_t i = 0; i < 4; i++) {
        const char *one = spelled[i][0], *three = spelled[i][1];
        char text[600];
        snprintf(
            text, sizeof text,
            "{\"id\": %s, \"token_ids\": [%s, %s], \"max_tokens\": %s, \"top_k\": %s, \"seed\": %s, \"n\": %s, \"best_of\": %s, "
            "\"logprobs\": %s, \"prefix_end\": %s, \"sinks\": %s, \"full_layers\": [%s, %s], \"min_tokens\": 16.0}",
            three, one, three, three, three, three, one, three, three, three, three, one, three);
        cr_assert_eq(read_line(text, &line, &err), KVF_OK, "%s: %s", text, err.text);
        cr_expect(json_is_integer(line.id) && json_integer_value(line.id) == 3 && line.named);
        cr_expect(line.tokens[0] == 1 && line.tokens[1] == 3 && line.max_tokens == 3 && line.sampling.top_k == 3);
        cr_expect(line.sampling.seed == 3 && line.n_samples == 1 && line.best_of == 3 && line.n_top == 3);
        cr_expect(line.prefix_end == 3 && line.policy.min_tokens == 16);
        kvf__line_free(&line);
        snprintf(
            text, sizeof text,
            LINE(CHAT, HI
                 ", \"max_completion_tokens\": %s, \"seed\": -%s, \"logprobs\": true, \"top_logprobs\": %s, \"n\": %s, "
                 "\"kvfold\": {\"rho\": null, \"prefix_end\": %s}"),
            three, three, three, three, three);
        cr_assert_eq(read_line(text, &line, &err), KVF_OK, "%s: %s", text, err.text);
        cr_expect(line.max_tokens == 3 && line.sampling.seed == (uint64_t)-3 && line.n_top == 3 && line.n_samples == 3);
        kvf__line_free(&line);
    }
    const char *const missing[][2] = {
        {"{\"custom_id\": \"a\", \"url\": \"/v1/completions\", \"body\": {}}", "method: is missing"},
        {"{\"custom_id\": \"a\", \"method\": null, \"url\": \"/v1/completions\", \"body\": {}}", "method: is missing"},
        {"{\"custom_id\": \"a\", \"method\": \"POST\", \"body\": {}}", "url: is missing"},
        {"{\"custom_id\": \"a\", " TEXT "}", "body: is missing"},
        {"{\"custom_id\": \"a\", " TEXT ", \"body\": null}", "body: is missing"},
        {"{\"custom_id\": \"a\", " TEXT ", \"body\": {\"prompt\": \"x\"}}", "model: is missing"},
        {"{\"custom_id\": null, " TEXT ", \"body\": {}}", "custom_id: is missing"},
        {LINE(TEXT, "\"prompt\": null"), "prompt: is missing"},
        {LINE(CHAT, "\"messages\": [{\"content\": \"x\"}]"), "messages[0].role: is missing"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": null}]}", "messages[0]: has no content"},
        {"{\"prompt\": null}", "no text"}};
    REFUSE(missing);
}

/* ---- Broken lines ------------------------------------------------------------------------------------------------- */

Test(forms, r25_a_broken_line_keeps_its_id) {
    char deep[5000] = "{\"id\": \"a\", \"x\": ";
    memset(deep + strlen(deep), '[', 4000);
    const struct {
        const char *text, *id; /* NULL: the line's number, or null in the OpenAI form */
        bool openai;
    } cases[] = {{"{\"id\": \"a\", \"top_p\": NaN}", "\"a\"", false},
                 {"{\"top_p\": -Infinity, \"id\": \"a\"}", "\"a\"", false},
                 {"{\"prompt\": \"x\", \"prompt\": \"y\", \"id\": 12}", "12", false},
                 {"{\"id\":5.0,\"prompt\":\"\\ud800\"}", "5", false},
                 {"{\"id\": \"a\\u00e9\\\"b\", \"prompt\": \"x\"} tail", "\"a\\u00e9\\\"b\"", false},
                 {"{\"id\": \"a\", \"prompt\": \"torn", "\"a\"", false},
                 {"{\"id\": \"a", NULL, false},
                 {"{\"id\": 12", NULL, false}, /* may have been 123 */
                 {"{\"id\": \"\\ud800\", \"x\": NaN}", NULL, false},
                 {"{\"x\": {\"id\": \"b\"}, \"y\": NaN, \"id\": \"a\"}", "\"a\"", false},
                 {"{\"x\": \"id\", \"y\": [\"id\", NaN]}", NULL, false},
                 {"{\"x\": \"\\\"id\\\": 5\", \"y\": NaN}", NULL, false},
                 {"{\"x\": NaN} {\"id\": \"b\"}", NULL, false},
                 {"[{\"id\": \"b\"}]", NULL, false},
                 {"{\"id\" : \"a\", \"n\": 99999999999999999999}", "\"a\"", false},
                 {"{\"id\": \"a\", \"prompt\": \"\xc3(\"}", "\"a\"", false},
                 {"{\"id\": \"a\", 'prompt': 'x'}", "\"a\"", false},
                 {deep, "\"a\"", false},
                 {"{\"custom_id\": \"c\", \"body\": {\"custom_id\": \"d\", \"x\": NaN}}", "\"c\"", true},
                 {"{\"body\": {\"custom_id\": \"d\"}, \"n\": 1e999, \"custom_id\": \"c\"}", "\"c\"", true},
                 {"{\"custom_id\": 5, \"body\": {\"x\": NaN}}", NULL, true},
                 {"{\"custom_id\": \"c\", \"custom_id\": \"e\"}", "\"c\"", true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int before = 0; before < 2; before++) { /* the form of the line before decides where nothing else does */
            kvf__line line;
            kvf_error err = {.text = ""};
            rules.openai = before;
            cr_assert_neq(kvf__line_open(&rules, cases[i].text, strlen(cases[i].text), 7, &line, &err), KVF_OK, "%zu",
                          i);
            cr_expect_eq(line.openai, cases[i].openai || (before && !cases[i].id), "%zu", i);
            cr_expect_eq(line.named, cases[i].id != NULL, "%zu", i);
            char *id = json_dumps(line.id, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
            char *wanted = NULL;
            json_t *value = cases[i].id ? json_loads(cases[i].id, JSON_DECODE_ANY, NULL) : json_integer(7);
            wanted = json_dumps(value, JSON_ENCODE_ANY | JSON_ENSURE_ASCII);
            cr_expect_str_eq(id, wanted, "%zu: %s", i, cases[i].text);
            json_decref(value);
            free(wanted);
            free(id);
            kvf__line_free(&line);
        }
    }
}
