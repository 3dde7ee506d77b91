/* tools/fields.h: checked reading of fields of a JSON object, for both forms of a line. A failure names the field. */
#ifndef KVF_TOOLS_FIELDS_H
#define KVF_TOOLS_FIELDS_H

#include <jansson.h>

#include "kvfold/base.h"
#include "tools/text.h"

kvf_status kvf__field_fail(kvf_error *err, kvf_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* "an object", "a text", ... */
const char *kvf__field_type(const json_t *value);
kvf_status kvf__field_wrong_type(kvf_error *err, const char *key, const json_t *value, const char *would_do);

/* Texts are compared and shown with all their bytes: a zero byte ("\\u0000" in JSON) ends no text. */
bool kvf__field_is(const json_t *value, const char *text);
bool kvf__field_has_zero(const json_t *value); /* a text with a zero byte */
/* The value of a field for a message: texts escaped, numbers by kvf__show_number, else its type. */
kvf__short kvf__field_shown(const json_t *value);

/* If a message begins with a field and its number ("top_p 100: must be ..."), that number is replaced by its spelling
 * in the line ("1e2"), which a parsed number does not keep. */
void kvf__field_spell(const char *line, size_t n_bytes, kvf_error *err);

/* A whole number, also when it is written as 2.0 or 2e0; false for any other value. */
bool kvf__field_whole(const json_t *value, json_int_t *out);

/* Takes out the fields that are null: they count as left out. */
void kvf__fields_drop_null(json_t *object);

/* The value of a key that is there; *out stays as it is where it is not. */
kvf_status kvf__field_count(const json_t *object, const char *key, uint64_t min, uint64_t max, uint64_t *out,
                            kvf_error *err);
kvf_status kvf__field_real(const json_t *object, const char *key, double min, double max, double *out, kvf_error *err);

kvf_status kvf__field_flag(const json_t *object, const char *key, bool *out, kvf_error *err);

/* "stop", a text or a list of texts: pointers into the object, which the caller frees. NULL where there are none. */
kvf_status kvf__field_stop(const json_t *object, const char ***stop, uint32_t *n_stop, kvf_error *err);

/* A list of token ids below n_vocab; the caller frees. */
kvf_status kvf__field_tokens(const json_t *list, const char *key, uint32_t n_vocab, uint32_t **tokens, size_t *n_tokens,
                             kvf_error *err);

#endif
