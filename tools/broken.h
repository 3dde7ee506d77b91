/* tools/broken.h: the id of a line that is not valid JSON, if it can be read. */
#ifndef KVF_TOOLS_BROKEN_H
#define KVF_TOOLS_BROKEN_H

#include <jansson.h>

/* The first value of `key` in the object at the start of a text, as far as the text can be parsed: other values may
 * be invalid, and the end may be missing or followed by anything. Returns a complete text or number, which the caller
 * frees; NULL if there is none. */
json_t *kvf__broken_value(const char *text, size_t n_bytes, const char *key);

#endif
