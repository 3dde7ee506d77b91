/* tools/digest.h: XXH3 of bytes and of files: outputs and kept prompts identify their model, texts and lines by it. */
#ifndef KVF_TOOLS_DIGEST_H
#define KVF_TOOLS_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KVF__DIGEST_BYTES = 17 };

uint64_t kvf__digest(const void *bytes, size_t n);

/* Sixteen hexadecimal digits, and back; false where the text is not that. */
void kvf__digest_text(uint64_t digest, char text[KVF__DIGEST_BYTES]);
bool kvf__digest_read(const char *text, uint64_t *digest);

/* Of all of a model: its file, or every part of a split one (then of the parts' digests). A part is read once: its digest
 * is kept in the user's cache (kvfold/digests) until size, times or inode change. While it takes long, a terminal shows
 * how far it is, unless quiet. n_bytes (may be NULL): of all parts. False after a message. */
bool kvf__digest_model(const char *path, bool quiet, uint64_t *digest, uint64_t *n_bytes);

#endif
