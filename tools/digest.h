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

/* Digest of a whole model: of its file, or of the digests of all parts of a split one. A part is read once; its
 * digest is kept in the user's cache (kvfold/digests) until size, times or inode change. If reading takes long a
 * terminal shows progress, unless quiet. n_bytes (may be NULL): of all parts. False after a message. */
bool kvf__digest_model(const char *path, bool quiet, uint64_t *digest, uint64_t *n_bytes);

#endif
