/* The command's batch input and output: lines of both forms, torn packed input, answers of an earlier run. */
#define _DEFAULT_SOURCE
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include "tests/open_tiny.h"
#include "tools/answer.h"
#include "tools/jsonl.h"
#include "tools/reader.h"

static kvf_model *model;
static kvf__cli cli;
static kvf__line_rules rules;

static void open_model(void) {
    model = open_tiny_words(&(struct tiny_model_params){.seed = 1});
    cli = kvf__cli_default();
    rules = (kvf__line_rules){.cli = &cli,
                              .tokenizer = kvf_model_tokenizer(model),
                              .info = kvf_model_get_info(model),
                              .model_path = "dir/tiny.gguf",
                              .policy = {"d2o", ""},
                              .own = true};
}

static void close_model(void) { kvf_model_close(model); }

TestSuite(batch, .init = open_model, .fini = close_model);

static kvf_status read_line(const char *text, size_t n, kvf__line *line, kvf_error *err) {
    err->text[0] = '\0';
    kvf_status st = kvf__line_open(&rules, text, n, 7, line, err);
    return st ? st : kvf__line_read(&rules, line, err);
}

#define CHAT(more)                                                                                                     \
    "{\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": {\"model\": \"tiny\", " \
    "\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]" more "}}"
#define TEXT(more)                                                                                                \
    "{\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/completions\", \"body\": {\"model\": \"tiny\", " \
    "\"prompt\": \"Hi\"" more "}}"

Test(batch, each_form_has_its_own_defaults) {
    kvf__line line;
    kvf_error err;
    const struct {
        const char *text;
        kvf__form form;
        float temperature;
        uint32_t max_tokens, n, n_top;
        uint64_t seed;
        bool logprobs;
    } cases[] = {
        {"{\"prompt\": \"x\"}", KVF__FORM_OWN, 0, 256, 1, 0, 6, false},
        {"{\"prompt\": \"x\", \"logprobs\": true, \"n\": 3}", KVF__FORM_OWN, 0, 256, 3, 0, 6, true},
        {"{\"prompt\": \"x\", \"logprobs\": 4}", KVF__FORM_OWN, 0, 256, 1, 4, 6, true},
        {CHAT(""), KVF__FORM_CHAT, 1, UINT32_MAX, 1, 0, 6, false},
        {CHAT(", \"max_tokens\": 9, \"max_completion_tokens\": 5, \"seed\": 8"), KVF__FORM_CHAT, 1, 5, 1, 0, 8, false},
        {CHAT(", \"logprobs\": true, \"top_logprobs\": 2, \"n\": 2"), KVF__FORM_CHAT, 1, UINT32_MAX, 2, 2, 6, true},
        {TEXT(", \"temperature\": 0, \"seed\": -1"), KVF__FORM_COMPLETION, 0, 16, 1, 0, UINT64_MAX, false},
        {TEXT(", \"logprobs\": 0"), KVF__FORM_COMPLETION, 1, 16, 1, 0, 6, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(read_line(cases[i].text, strlen(cases[i].text), &line, &err), KVF_OK, "%zu: %s", i, err.text);
        cr_expect_eq(line.openai, cases[i].form != KVF__FORM_OWN);
        cr_expect_eq(line.form, cases[i].form);
        cr_expect_eq(line.sampling.temperature, cases[i].temperature, "%zu", i);
        cr_expect_eq(line.max_tokens, cases[i].max_tokens, "%zu: %u", i, line.max_tokens);
        cr_expect_eq(line.n_samples, cases[i].n);
        cr_expect_eq(line.n_top, cases[i].n_top);
        cr_expect_eq(line.sampling.seed, cases[i].seed, "%zu", i);
        cr_expect_eq(line.logprobs, cases[i].logprobs);
        cr_expect(line.n_tokens > 0);
        kvf__line_free(&line);
    }
    cli.temperature = 0.5;
    cli.max_tokens = 3;
    cr_assert_eq(read_line(CHAT(""), strlen(CHAT("")), &line, &err), KVF_OK, "%s", err.text);
    cr_expect(line.sampling.temperature == 0.5f && line.max_tokens == 3,
              "the command line's count where they are given");
    kvf__line_free(&line);
}

/* Whatever the bytes: a status and a text, an answer that says so in the line's form, and nothing leaks. */
Test(batch, damaged_lines_give_errors_alone) {
    const char *seeds[] = {
        CHAT(", \"n\": 2, \"stop\": [\"a\", \"b\"], \"kvfold\": {\"rho\": 0.5}, \"tools\": null"),
        TEXT(", \"logprobs\": 3, \"best_of\": 1, \"logit_bias\": {}"),
        CHAT(", \"messages2\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"x\"}]}]"),
        "{\"id\": 5, \"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"n\": 2, \"logprobs\": 3}"};
    const char *values[] = {"null", "[]",    "{}",   "-1",          "1e99",         "\"\"",
                            "true", "[[1]]", "[{}]", "99999999999", "{\"type\": 1}"};
    uint64_t seed = (uint64_t)getpid() * 2654435761u, state = seed;
    for (int round = 0; round < 6000; round++) {
        const char *from = seeds[gw_random(&state) % 4];
        char text[1024];
        size_t n = (size_t)snprintf(text, sizeof text, "%s", from);
        if (round % 2) { /* a byte or a few */
            for (uint64_t k = 0; k <= gw_random(&state) % 3; k++) text[gw_random(&state) % n] = (char)gw_random(&state);
            if (round % 5 == 0) n = gw_random(&state) % n;
        } else { /* another value behind a colon */
            size_t at = gw_random(&state) % n;
            while (at < n && text[at] != ':') at++;
            size_t end = at + 1;
            while (end < n && !strchr(",}]", text[end])) end++;
            if (at == n) continue;
            n = (size_t)snprintf(text, sizeof text, "%.*s: %s%s", (int)at, from, values[gw_random(&state) % 11],
                                 from + end);
        }
        kvf__line line;
        kvf_error err;
        kvf_status st = read_line(text, n, &line, &err);
        if (st) {
            bool well = true;
            uint64_t hash;
            cr_assert(err.text[0] || st == KVF_E_NO_MEMORY, "seed %llu: no text for %s", (unsigned long long)seed,
                      text);
            json_t *answer = kvf__answer_rejected(&line, err.text);
            cr_assert(kvf__answer_read(answer, &well, &hash) && !well, "seed %llu: %s", (unsigned long long)seed, text);
            json_decref(answer);
        }
        kvf__line_free(&line);
    }
}

/* ---- Packed input ------------------------------------------------------------------------------------------ */

static size_t pack_gzip(const char *text, size_t n, unsigned char *out, size_t capacity) {
    z_stream z = {0};
    cr_assert_eq(deflateInit2(&z, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    z.next_in = (unsigned char *)text;
    z.avail_in = (uInt)n;
    z.next_out = out;
    z.avail_out = (uInt)capacity;
    cr_assert_eq(deflate(&z, Z_FINISH), Z_STREAM_END);
    size_t used = capacity - z.avail_out;
    deflateEnd(&z);
    return used;
}

static size_t pack_zstd(const char *text, size_t n, unsigned char *out, size_t capacity) {
    size_t used = ZSTD_compress(out, capacity, text, n, 3);
    cr_assert(!ZSTD_isError(used));
    return used;
}

/* Reads bytes as input: how many lines come, all as they should be, and how it ends. */
static kvf__read read_bytes(const unsigned char *bytes, size_t n, const char *text, uint64_t *n_lines) {
    char path[] = "kvfold-batch-XXXXXX";
    int fd = mkstemp(path);
    cr_assert(fd >= 0 && write(fd, bytes, n) == (ssize_t)n);
    close(fd);
    kvf__reader r;
    cr_assert(kvf__reader_open(&r, path, false));
    unlink(path);
    const char *line, *expected = text;
    size_t length;
    kvf__read got;
    while ((got = kvf__reader_next(&r, true, &line, &length)) == KVF__READ_LINE) {
        size_t want = strcspn(expected, "\n");
        cr_assert(length == want && !memcmp(line, expected, want), "line %llu", (unsigned long long)r.n_lines);
        expected += want + (expected[want] == '\n');
    }
    *n_lines = r.n_lines;
    kvf__reader_close(&r);
    return got;
}

Test(batch, packed_input_torn_anywhere_gives_its_whole_lines_and_a_failure) {
    enum { N_LINES = 40 };
    char text[N_LINES * 40];
    size_t n = 0;
    uint64_t state = 5, n_lines;
    for (int i = 0; i < N_LINES; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "{\"id\": %d, \"x\": \"%016llx\"}\n", i,
                              (unsigned long long)gw_random(&state));
    freopen("/dev/null", "w", stderr); /* a message for each cut */
    for (int kind = 0; kind < 2; kind++) {
        size_t (*pack)(const char *, size_t, unsigned char *, size_t) = kind ? pack_zstd : pack_gzip;
        unsigned char packed[8192];
        size_t half = n / 2, first = pack(text, half, packed, sizeof packed);
        size_t all = first + pack(text + half, n - half, packed + first, sizeof packed - first);
        cr_expect_eq(read_bytes(packed, all, text, &n_lines), KVF__READ_END);
        cr_expect_eq(n_lines, N_LINES);
        for (size_t cut = kind ? 4 : 2; cut < all; cut++) {
            if (cut == first) continue; /* whole so far: the first of two streams */
            cr_assert_eq(read_bytes(packed, cut, text, &n_lines), KVF__READ_FAILED, "%d: cut at %zu", kind, cut);
            cr_assert(n_lines < N_LINES || cut + 16 > all, "%d: cut at %zu", kind, cut); /* a sum stands at the end */
        }
        packed[all] = 'x'; /* what follows is no stream */
        cr_expect_eq(read_bytes(packed, all + 1, text, &n_lines), KVF__READ_FAILED);
        cr_expect_eq(n_lines, N_LINES);
    }
}

/* A line of more than max_line bytes comes as its first bytes; what is behind it comes as it is. */
Test(batch, a_line_that_is_too_long_is_skipped) {
    enum { MOST = 10, LONG = 300000 };
    static char text[2 * LONG + 100];
    static unsigned char packed[sizeof text + 1000];
    for (int kind = 0; kind < 3; kind++) {
        for (size_t length = MOST; length <= LONG; length = length == MOST       ? MOST + 1
                                                            : length == MOST + 1 ? LONG
                                                                                 : LONG + 1) {
            size_t n = 0;
            for (int i = 0; i < 2; i++) {
                n += (size_t)sprintf(text + n, "line %d\n", i);
                memset(text + n, 'a' + i, length);
                n += length;
                if (!i) text[n++] = '\n'; /* the last has no end */
            }
            size_t n_packed = kind ? (kind == 1 ? pack_gzip : pack_zstd)(text, n, packed, sizeof packed) : n;
            char path[] = "kvfold-batch-XXXXXX";
            int fd = mkstemp(path);
            cr_assert(fd >= 0 && write(fd, kind ? (void *)packed : text, n_packed) == (ssize_t)n_packed);
            close(fd);
            kvf__reader r;
            cr_assert(kvf__reader_open(&r, path, false));
            unlink(path);
            r.max_line = MOST;
            const char *line;
            size_t n_line;
            for (int again = 0; again < 2; again++) {
                for (int i = 0; i < 4; i++) {
                    kvf__read got = kvf__reader_next(&r, true, &line, &n_line);
                    cr_assert_eq(got, i % 2 && length > MOST ? KVF__READ_LONG : KVF__READ_LINE, "%d %zu: %d", kind,
                                 length, i);
                    cr_assert(r.n_lines == (uint64_t)i + 1 && n_line == (i % 2 ? MOST : strlen("line 0")));
                    cr_assert(i % 2 ? line[0] == 'a' + i / 2 && line[MOST - 1] == line[0] : line[5] == '0' + i / 2);
                }
                cr_assert_eq(kvf__reader_next(&r, true, &line, &n_line), KVF__READ_END);
                cr_assert(r.n_bytes == n && r.capacity < LONG, "%zu", r.capacity);
                cr_assert(kvf__reader_rewind(&r));
            }
            kvf__reader_close(&r);
        }
    }
}

Test(batch, packing_is_told_by_the_first_bytes) {
    const struct {
        const char *bytes;
        size_t n;
        kvf__pack kind;
    } cases[] = {
        {"", 0, KVF__PACK_UNSURE},         {"\x1f", 1, KVF__PACK_UNSURE},     {"\x1f\x8b", 2, KVF__PACK_GZIP},
        {"\x1f\x8c", 2, KVF__PACK_NONE},   {"{\"", 2, KVF__PACK_NONE},        {"(\xb5/", 3, KVF__PACK_UNSURE},
        {"(\xb5/\xfd", 4, KVF__PACK_ZSTD}, {"(\xb5/\xfe", 4, KVF__PACK_NONE}, {"P", 1, KVF__PACK_UNSURE},
        {"P*M\x18", 4, KVF__PACK_ZSTD},    {"[1", 2, KVF__PACK_NONE},         {"\xef\xbb\xbf", 3, KVF__PACK_NONE}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        cr_expect_eq(kvf__pack_of((const unsigned char *)cases[i].bytes, cases[i].n), cases[i].kind, "%zu", i);
}

/* ---- Answers of an earlier run ----------------------------------------------------------------------------------- */

Test(batch, answers_say_whether_they_are_done) {
    const struct {
        const char *text, *id; /* NULL: no answer */
        bool well;
    } cases[] = {
        {"{\"id\": \"a\", \"finish_reason\": \"stop\"}", "\"a\"", true},
        {"{\"id\": 3, \"finish_reason\": \"length\"}", "3", true},
        {"{\"id\": 3, \"finish_reason\": \"error\"}", "3", false},
        {"{\"id\": 3, \"choices\": []}", "3", true},
        {"{\"id\": 3, \"choices\": [], \"finish_reason\": \"error\"}", "3", false},
        {"{\"id\": 3}", NULL, false},
        {"{\"finish_reason\": \"stop\"}", NULL, false},
        {"[]", NULL, false},
        {"{\"id\": \"b\", \"custom_id\": \"c\", \"response\": {\"status_code\": 200}, \"error\": null}", "\"c\"", true},
        {"{\"id\": \"b\", \"custom_id\": \"c\", \"response\": {\"status_code\": 200}}", "\"c\"", true},
        {"{\"id\": \"b\", \"custom_id\": \"c\", \"response\": {\"status_code\": 400}, \"error\": null}", "\"c\"",
         false},
        {"{\"id\": \"b\", \"custom_id\": \"c\", \"response\": null, \"error\": {}}", "\"c\"", false},
        {"{\"id\": 7, \"finish_reason\": \"stop\", \"line_hash\": \"000000000000001f\"}", "7", true},
        {"{\"id\": 7, \"finish_reason\": \"stop\", \"line_hash\": \"1\"}", "7", true},
        {"{\"id\": \"batch_req-kvfold-12-000000000000001f\", \"custom_id\": \"c\", \"response\": {\"status_code\": 200}}",
         "\"c\"", true},
        {"{\"id\": \"batch_req-kvfold-12\", \"custom_id\": \"c\", \"response\": {\"status_code\": 200}}", "\"c\"",
         true},
        {"{\"id\": \"batch_req-kvfold-\", \"custom_id\": \"c\", \"response\": {\"status_code\": 200}}", "\"c\"", true},
        {"{\"id\": \"b\", \"custom_id\": 5, \"response\": {\"status_code\": 200}}", NULL, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool well = false;
        json_t *value = json_loads(cases[i].text, 0, NULL);
        uint64_t hash;
        const json_t *id = kvf__answer_read(value, &well, &hash);
        cr_expect_eq(id != NULL, cases[i].id != NULL, "%zu", i);
        cr_expect_eq(hash, strstr(cases[i].text, "000000000000001f") ? 0x1fu : 0, "%zu", i);
        char *text = id ? json_dumps(id, JSON_ENCODE_ANY) : NULL;
        if (id && cases[i].id) cr_expect(!strcmp(text, cases[i].id) && well == cases[i].well, "%zu", i);
        free(text);
        json_decref(value);
    }
}
