/* Fields of a JSON object, checked. */
#define _POSIX_C_SOURCE 200809L
#include "tools/fields.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

kvf_status kvf__field_fail(kvf_error *err, kvf_status status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(err->text, sizeof err->text, format, list);
    va_end(list);
    return status;
}

const char *kvf__field_type(const json_t *value) {
    static const char *const names[] = {"an object", "a list", "a text", "a whole number",
                                        "a number",  "true",   "false",  "null"};
    return names[json_typeof(value)];
}

kvf_status kvf__field_wrong_type(kvf_error *err, const char *key, const json_t *value, const char *would_do) {
    return kvf__field_fail(err, KVF_E_INVALID, "%s: is %s, must be %s", key, kvf__field_type(value), would_do);
}

/* ---- Texts -------------------------------------------------------------------------------------------- */

bool kvf__field_is(const json_t *value, const char *text) {
    return json_is_string(value) && json_string_length(value) == strlen(text) &&
           !memcmp(json_string_value(value), text, strlen(text));
}

bool kvf__field_has_zero(const json_t *value) {
    return json_is_string(value) && memchr(json_string_value(value), 0, json_string_length(value));
}

kvf__short kvf__field_shown(const json_t *value) {
    kvf__short s;
    if (json_is_string(value)) return kvf__shown_bytes(json_string_value(value), json_string_length(value));
    if (json_is_real(value)) return kvf__show_number(json_real_value(value));
    if (json_is_integer(value))
        snprintf(s.text, sizeof s.text, "%lld", (long long)json_integer_value(value));
    else
        snprintf(s.text, sizeof s.text, "(%s)", kvf__field_type(value));
    return s;
}

void kvf__fields_drop_null(json_t *object) {
    const char *key;
    json_t *value;
    void *next;
    json_object_foreach_safe(object, next, key, value) {
        if (json_is_null(value)) json_object_del(object, key);
    }
}

/* ---- Numbers ------------------------------------------------------------------------------------------ */

/* Whether n bytes are a number with a point or an exponent that messages show as `shown`. */
static bool is_spelling(const char *text, size_t n, const char *shown) {
    char copy[320];
    if (n >= sizeof copy) return false;
    snprintf(copy, sizeof copy, "%.*s", (int)n, text);
    return strpbrk(copy, ".eE") && !strcmp(kvf__show_number(strtod(copy, NULL)).text, shown);
}

void kvf__field_spell(const char *line, size_t n, kvf_error *err) {
    char name[48], shown[48];
    int end = 0;
    if (sscanf(err->text, "%47[^] :[]%*[][0-9] %47[^: ]%n", name, shown, &end) != 2 &&
        sscanf(err->text, "%47[^] :[] %47[^: ]%n", name, shown, &end) != 2)
        return;
    bool named = false; /* the last text was the field's name */
    for (size_t i = 0, next; i < n; i = next) {
        next = i + 1;
        if (line[i] == '"') {
            while (next < n && line[next] != '"') next += line[next] == '\\' ? 2 : 1;
            named = next < n && next - i - 1 == strlen(name) && !memcmp(line + i + 1, name, strlen(name));
            next++;
        } else if (strchr("-0123456789", line[i]) && line[i]) {
            while (next < n && line[next] && strchr("+-.0123456789eE", line[next])) next++;
            if (!named || !is_spelling(line + i, next - i, shown)) continue;
            char rest[sizeof err->text];
            snprintf(rest, sizeof rest, "%s", err->text + end);
            snprintf(err->text + (end - (int)strlen(shown)), sizeof err->text - (size_t)end + strlen(shown), "%s%s",
                     kvf__shown_bytes(line + i, next - i).text, rest);
            return;
        }
    }
}

bool kvf__field_whole(const json_t *value, json_int_t *out) {
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
        return true;
    }
    double x = json_is_real(value) ? json_real_value(value) : 0.5;
    if (!(x >= -0x1p63 && x < 0x1p63) || floor(x) < x) return false;
    *out = (json_int_t)x;
    return true;
}

kvf_status kvf__field_count(const json_t *root, const char *key, uint64_t min, uint64_t max, uint64_t *out,
                            kvf_error *err) {
    const json_t *value = json_object_get(root, key);
    json_int_t n = 0;
    if (!value) return KVF_OK;
    if (!json_is_number(value)) return kvf__field_wrong_type(err, key, value, "a whole number");
    bool whole = kvf__field_whole(value, &n);
    if (!whole || n < 0 || (uint64_t)n < min || (uint64_t)n > max)
        return kvf__field_fail(err, KVF_E_INVALID, "%s %s: must be %sfrom %llu to %llu", key,
                               kvf__field_shown(value).text, whole ? "" : "a whole number ", (unsigned long long)min,
                               (unsigned long long)max);
    *out = (uint64_t)n;
    return KVF_OK;
}

kvf_status kvf__field_real(const json_t *root, const char *key, double min, double max, double *out, kvf_error *err) {
    const json_t *value = json_object_get(root, key);
    if (!value) return KVF_OK;
    if (!json_is_number(value)) return kvf__field_wrong_type(err, key, value, "a number");
    double x = json_number_value(value);
    if (!(x >= min && x <= max))
        return kvf__field_fail(err, KVF_E_INVALID, "%s %s: must be from %g to %g", key, kvf__field_shown(value).text,
                               min, max);
    *out = x;
    return KVF_OK;
}

kvf_status kvf__field_flag(const json_t *root, const char *key, bool *out, kvf_error *err) {
    const json_t *value = json_object_get(root, key);
    if (value && !json_is_boolean(value)) return kvf__field_wrong_type(err, key, value, "true or false");
    if (value) *out = json_is_true(value);
    return KVF_OK;
}

static kvf_status add_stop(const char **stop, uint32_t *n_stop, const json_t *text, kvf_error *err) {
    if (!json_is_string(text)) return kvf__field_wrong_type(err, "stop", text, "a text or a list of texts");
    size_t n = json_string_length(text);
    if (!n) return kvf__field_fail(err, KVF_E_INVALID, "stop: an empty text would end every answer; leave it out");
    if (kvf__field_has_zero(text))
        return kvf__field_fail(err, KVF_E_INVALID, "stop: holds a zero byte, which no text of the model has");
    stop[(*n_stop)++] = json_string_value(text);
    return KVF_OK;
}

kvf_status kvf__field_stop(const json_t *object, const char ***stop, uint32_t *n_stop, kvf_error *err) {
    const json_t *value = json_object_get(object, "stop");
    size_t n = json_is_array(value) ? json_array_size(value) : value != NULL;
    if (!n) return KVF_OK;
    if (!(*stop = calloc(n, sizeof **stop))) return kvf__field_fail(err, KVF_E_NO_MEMORY, "stop: out of memory");
    if (!json_is_array(value)) return add_stop(*stop, n_stop, value, err);
    for (size_t i = 0; i < n; i++) {
        kvf_status st = add_stop(*stop, n_stop, json_array_get(value, i), err);
        if (st) return st;
    }
    return KVF_OK;
}

kvf_status kvf__field_tokens(const json_t *list, const char *key, uint32_t n_vocab, uint32_t **tokens, size_t *n_tokens,
                             kvf_error *err) {
    if (!json_is_array(list)) return kvf__field_wrong_type(err, key, list, "a list of whole numbers");
    size_t n = json_array_size(list);
    *tokens = malloc((n ? n : 1) * sizeof **tokens);
    if (!*tokens) return kvf__field_fail(err, KVF_E_NO_MEMORY, "%s: out of memory", key);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(list, i);
        json_int_t value = 0;
        if (!json_is_number(id))
            return kvf__field_fail(err, KVF_E_INVALID, "%s[%zu]: is %s, must be a whole number from 0 to %u", key, i,
                                   kvf__field_type(id), n_vocab - 1);
        if (!kvf__field_whole(id, &value) || value < 0 || value >= (json_int_t)n_vocab)
            return kvf__field_fail(err, KVF_E_INVALID,
                                   "%s[%zu] %s: must be a whole number from 0 to %u, the vocabulary has %u tokens", key,
                                   i, kvf__field_shown(id).text, n_vocab - 1, n_vocab);
        (*tokens)[i] = (uint32_t)value;
    }
    *n_tokens = n;
    return KVF_OK;
}
