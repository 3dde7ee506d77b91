/* Opens a line: its limits, JSON, form and id, and the hash that its answer carries. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "tools/broken.h"
#include "tools/digest.h"
#include "tools/fields.h"
#include "tools/request.h"

#define EXACT 0x1p53 /* below it a number with a point or an exponent has all its digits */

/* ---- Lengths ---------------------------------------------------------------------------------------------- */

enum { OTHER_BYTES = 1 << 20, OTHER_VALUES = 1 << 16, ESCAPED_BYTES = 6 }; /* "\\u0041" is one byte of text */

uint32_t kvf__line_context(const kvf__cli *cli, const kvf_model_info *info) {
    return cli->context ? cli->context : info->n_context;
}

size_t kvf__line_max_bytes(const kvf__cli *cli, const kvf_tokenizer *tokenizer, const kvf_model_info *info) {
    size_t longest = 1;
    for (uint32_t id = 0; id < kvf_tokenizer_n_vocab(tokenizer); id++) {
        size_t n = kvf_tokenizer_piece(tokenizer, id, 1, NULL, 0);
        longest = n > longest ? n : longest;
    }
    size_t most = SIZE_MAX / ESCAPED_BYTES / longest, context = kvf__line_context(cli, info);
    return (context < most ? context : most) * longest * ESCAPED_BYTES + OTHER_BYTES;
}

size_t kvf__line_max_values(const kvf__cli *cli, const kvf_model_info *info) {
    return (size_t)kvf__line_context(cli, info) + OTHER_VALUES;
}

/* The values of a JSON text, nearly: its commas. */
static size_t count_values(const char *text, size_t n) {
    size_t n_values = 1;
    for (size_t i = 0; i < n; i++) {
        if (text[i] == '"')
            for (i++; i < n && text[i] != '"'; i++) i += text[i] == '\\';
        else
            n_values += text[i] == ',';
    }
    return n_values;
}

/* ---- JSON, form and id ------------------------------------------------------------------------------------ */

static kvf_status read_object(const kvf__line_rules *rules, const char *text, size_t n_bytes, kvf__line *line,
                              kvf_error *err) {
    size_t valid = kvf__utf8_valid(text, n_bytes);
    if (valid < n_bytes)
        return kvf__field_fail(err, KVF_E_FORMAT, "byte %zu (0x%02x) is not UTF-8; convert the file to UTF-8",
                               valid + 1, (unsigned char)text[valid]);
    size_t n_values = rules->max_values ? count_values(text, n_bytes) : 0;
    if (n_values > rules->max_values)
        return kvf__field_fail(err, KVF_E_LIMIT, "has %zu values, must have at most %zu; shorten it", n_values,
                               rules->max_values);
    json_error_t error;
    line->root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    if (!line->root) return kvf__field_fail(err, KVF_E_FORMAT, "not JSON: %s (column %d)", error.text, error.column);
    if (!json_is_object(line->root))
        return kvf__field_fail(err, KVF_E_FORMAT, "is %s, must be an object: {\"prompt\": \"...\"}",
                               kvf__field_type(line->root));
    return KVF_OK;
}

/* False for a value that no id can be. 7.0 counts as 7; a larger number so written may have lost digits. */
static bool take_id(kvf__line *line, const json_t *value) {
    json_int_t number = 0;
    bool whole = !line->openai && kvf__field_whole(value, &number);
    if (json_is_real(value) && fabs(json_real_value(value)) >= EXACT) return false;
    if (!whole && !json_is_string(value)) return false;
    json_t *id = whole ? json_integer(number) : json_incref((json_t *)value);
    if (!id) return false;
    json_decref(line->id);
    line->id = id;
    line->named = true;
    return true;
}

static kvf_status read_id(kvf__line *line, kvf_error *err) {
    const char *key = line->openai ? "custom_id" : "id";
    const json_t *id = json_object_get(line->root, key);
    if (json_is_null(id)) id = NULL;
    if (!id && !line->openai) return KVF_OK;
    line->code = "invalid_custom_id";
    if (!id) return kvf__field_fail(err, KVF_E_INVALID, "custom_id: is missing; give each line one of its own");
    if (take_id(line, id)) {
        line->code = NULL;
        return KVF_OK;
    }
    if (!line->openai && json_is_real(id) && fabs(json_real_value(id)) >= EXACT)
        return kvf__field_fail(err, KVF_E_INVALID,
                               "id %s: a number of this size must be written with all its digits, without point and "
                               "exponent; or give a text",
                               kvf__field_shown(id).text);
    return kvf__field_wrong_type(err, key, id, line->openai ? "a text" : "a text or a whole number");
}

static bool mentions_custom_id(const char *text, size_t n_bytes) {
    static const char key[] = "\"custom_id\"";
    const size_t length = sizeof key - 1;
    for (const char *p = text; (size_t)(p - text) + length <= n_bytes; p++) {
        p = memchr(p, '"', n_bytes - (size_t)(p - text) - length + 1);
        if (!p) return false;
        if (!memcmp(p, key, length)) return true;
    }
    return false;
}

static kvf_status begin_line(kvf__line *line, const char *text, size_t n_bytes, uint64_t number, kvf_error *err) {
    memset(line, 0, sizeof *line);
    line->number = number;
    line->text = text;
    line->n_bytes = n_bytes;
    line->id = json_integer((json_int_t)number);
    return line->id ? KVF_OK : kvf__field_fail(err, KVF_E_NO_MEMORY, "out of memory");
}

/* The form and the id of a line that is no object, or too long to be read. */
static void guess(const kvf__line_rules *rules, kvf__line *line) {
    line->openai = mentions_custom_id(line->text, line->n_bytes);
    json_t *id = line->root ? NULL : kvf__broken_value(line->text, line->n_bytes, line->openai ? "custom_id" : "id");
    if (!id && !line->openai) line->openai = rules->openai;
    if (id) (void)take_id(line, id);
    json_decref(id);
}

kvf_status kvf__line_open(const kvf__line_rules *rules, const char *text, size_t n_bytes, uint64_t number,
                          kvf__line *line, kvf_error *err) {
    kvf_status st = begin_line(line, text, n_bytes, number, err);
    if (st) return st;
    if (!(st = read_object(rules, text, n_bytes, line, err))) {
        line->openai = kvf__openai_is(line->root);
        return read_id(line, err);
    }
    line->code = "invalid_json";
    guess(rules, line);
    return st;
}

kvf_status kvf__line_too_long(const kvf__line_rules *rules, const char *text, size_t n_bytes, uint64_t number,
                              kvf__line *line, kvf_error *err) {
    kvf_status st = begin_line(line, text, n_bytes, number, err);
    if (st) return st;
    line->code = "line_too_long";
    guess(rules, line);
    return kvf__field_fail(err, KVF_E_LIMIT,
                           "is longer than %zu bytes: no prompt of the context of %u tokens needs as many; shorten it",
                           n_bytes, kvf__line_context(rules->cli, rules->info));
}

/* A copy without spelling: whole numbers as such, no field that is null. NULL: out of memory. */
static json_t *plain(const json_t *value) {
    json_int_t number;
    if (json_is_real(value) && kvf__field_whole(value, &number)) return json_integer(number);
    if (!json_is_object(value) && !json_is_array(value)) return json_incref((json_t *)value);
    json_t *copy = json_is_object(value) ? json_object() : json_array(), *part;
    const char *key;
    size_t i;
    bool good = copy != NULL;
    json_array_foreach(value, i, part) good = good && !json_array_append_new(copy, plain(part));
    json_object_foreach((json_t *)value, key, part) good =
        good && (json_is_null(part) || !json_object_set_new(copy, key, plain(part)));
    if (good) return copy;
    json_decref(copy);
    return NULL;
}

uint64_t kvf__line_hash(const kvf__line *line) {
    json_t *meaning = plain(line->root);
    char *text = meaning ? json_dumps(meaning, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(meaning);
    uint64_t hash = text ? kvf__digest(text, strlen(text)) : 0; /* out of memory: 1, which fits no line */
    free(text);
    return hash ? hash : 1;
}
