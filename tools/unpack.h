/* tools/unpack.h: gzip and zstd streams, recognised by their first bytes. */
#ifndef KVF_TOOLS_UNPACK_H
#define KVF_TOOLS_UNPACK_H

#include <stdbool.h>
#include <stddef.h>

typedef enum kvf__pack {
    KVF__PACK_UNSURE, /* too few bytes to tell */
    KVF__PACK_NONE,
    KVF__PACK_GZIP,
    KVF__PACK_ZSTD
} kvf__pack;

/* What begins with these bytes. */
kvf__pack kvf__pack_of(const unsigned char *bytes, size_t n);
const char *kvf__pack_name(kvf__pack kind);

typedef struct kvf__unpack kvf__unpack;

/* NULL when out of memory. kind: GZIP or ZSTD. */
kvf__unpack *kvf__unpack_begin(kvf__pack kind);
void kvf__unpack_end(kvf__unpack *unpack); /* NULL is allowed */

/* Consumes up to *n_in bytes and produces up to *n_out; both become the numbers consumed and produced. Concatenated
 * streams count as one. Returns NULL, or what is wrong with the input (bytes produced before are good). */
const char *kvf__unpack_step(kvf__unpack *unpack, const unsigned char *in, size_t *n_in, char *out, size_t *n_out);

/* Whether a stream has begun and not ended: the input must go on. */
bool kvf__unpack_inside(const kvf__unpack *unpack);

#endif
