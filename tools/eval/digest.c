/* XXH3 of bytes and of files. */
#define _POSIX_C_SOURCE 200809L
#include "tools/eval/digest.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tools/text.h"

uint64_t kvf__eval_digest(const void *bytes, size_t n) { return XXH3_64bits(bytes, n); }

bool kvf__eval_digest_file(const char *path, uint64_t *digest, uint64_t *n_bytes) {
    enum { CHUNK = 1 << 20 };
    char *chunk = malloc(CHUNK);
    FILE *f = fopen(path, "rb");
    XXH3_state_t *state = XXH3_createState();
    bool ok = chunk && f && state && XXH3_64bits_reset(state) == XXH_OK;
    *n_bytes = 0;
    while (ok) {
        size_t n = fread(chunk, 1, CHUNK, f);
        if (!n) break;
        *n_bytes += n;
        ok = XXH3_64bits_update(state, chunk, n) == XXH_OK;
    }
    ok = ok && !ferror(f);
    if (ok)
        *digest = XXH3_64bits_digest(state);
    else
        kvf__say("%s: %s", kvf__shown(path).text, errno ? strerror(errno) : "could not be read");
    XXH3_freeState(state);
    if (f) fclose(f);
    free(chunk);
    return ok;
}
