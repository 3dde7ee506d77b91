/* tools/broken.h: the id of a line that is not valid JSON, if it can be read. */
#ifndef KVF_TOOLS_BROKEN_H
#define KVF_TOOLS_BROKEN_H

#include <jansson.h>

/* The first value of `key` in the object that a text begins with, as far as the text can be followed: behind its end may be
 * anything, its other values may be no JSON, and its end may be missing. A text or a number that is whole, which the caller
 * frees; NULL: there is none. */
json_t *kvf__broken_value(const char *text, size_t n_bytes, const char *key);

#endif
