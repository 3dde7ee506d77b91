/* A field of an object that no JSON parser takes: NaN among its values, half a surrogate, no end, anything behind it. */
#include "tools/broken.h"

#include <stdbool.h>
#include <string.h>

static size_t skip_blanks(const char *text, size_t n, size_t at) {
    while (at < n && (text[at] == ' ' || text[at] == '\t')) at++;
    return at;
}

/* Behind the closing quote of the string that begins at `at`; 0: it has none. */
static size_t string_end(const char *text, size_t n, size_t at) {
    for (at++; at < n; at++) {
        if (text[at] == '"') return at + 1;
        if (text[at] == '\\') at++;
    }
    return 0;
}

/* A text or a number. The line's end may have cut a number short, so that one counts that something follows. */
static json_t *value_at(const char *text, size_t n, size_t at) {
    static const char in_number[] = "+-.0123456789Ee";
    size_t end = at;
    if (at < n && text[at] == '"')
        end = string_end(text, n, at);
    else
        while (end < n && text[end] && strchr(in_number, text[end])) end++;
    if (end <= at || (end == n && text[at] != '"')) return NULL;
    return json_loadb(text + at, end - at, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
}

json_t *kvf__broken_value(const char *text, size_t n, const char *key) {
    size_t depth = 0, length = strlen(key);
    const char *begin = memchr(text, '{', n);
    bool is_key = true; /* not what stands behind a colon */
    for (size_t i = begin ? (size_t)(begin - text) : n; i < n; i++) {
        if (text[i] == '"') {
            size_t end = string_end(text, n, i);
            if (!end) return NULL;
            size_t colon = skip_blanks(text, n, end);
            bool found = depth == 1 && is_key && end - i == length + 2 && !memcmp(text + i + 1, key, length);
            json_t *value =
                found && colon < n && text[colon] == ':' ? value_at(text, n, skip_blanks(text, n, colon + 1)) : NULL;
            if (value) return value;
            i = end - 1;
            is_key = true;
        } else if (text[i] == '{' || text[i] == '[') {
            depth++;
            is_key = true;
        } else if ((text[i] == '}' || text[i] == ']') && --depth == 0) {
            return NULL;
        } else if (text[i] != ' ' && text[i] != '\t') {
            is_key = text[i] != ':';
        }
    }
    return NULL;
}
