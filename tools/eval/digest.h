/* tools/eval/digest.h: XXH3 of bytes and of files, by which an output knows its model and texts again. */
#ifndef KVF_TOOLS_EVAL_DIGEST_H
#define KVF_TOOLS_EVAL_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

uint64_t kvf__eval_digest(const void *bytes, size_t n);
/* Of a whole file; false after a message. */
bool kvf__eval_digest_file(const char *path, uint64_t *digest, uint64_t *n_bytes);

#endif
