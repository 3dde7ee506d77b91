/* Decompresses gzip (zlib) and zstd (libzstd) through one function. */
#define _POSIX_C_SOURCE 200809L
#define ZLIB_CONST
#include "tools/unpack.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

struct kvf__unpack {
    kvf__pack kind;
    bool inside;
    z_stream gzip;
    ZSTD_DStream *zstd;
};

kvf__pack kvf__pack_of(const unsigned char *bytes, size_t n) {
    static const unsigned char gzip[] = {0x1f, 0x8b}, zstd[] = {0x28, 0xb5, 0x2f, 0xfd};
    if (!n) return KVF__PACK_UNSURE;
    if (!memcmp(bytes, gzip, n < sizeof gzip ? n : sizeof gzip))
        return n < sizeof gzip ? KVF__PACK_UNSURE : KVF__PACK_GZIP;
    /* A zstd file may also begin with a skippable frame: 5? 2a 4d 18. */
    unsigned char begin[sizeof zstd] = {bytes[0], 0x2a, 0x4d, 0x18};
    const unsigned char *want = (bytes[0] & 0xf0) == 0x50 ? begin : zstd;
    if (memcmp(bytes, want, n < sizeof zstd ? n : sizeof zstd) != 0) return KVF__PACK_NONE;
    return n < sizeof zstd ? KVF__PACK_UNSURE : KVF__PACK_ZSTD;
}

const char *kvf__pack_name(kvf__pack kind) { return kind == KVF__PACK_GZIP ? "gzip" : "zstd"; }

kvf__unpack *kvf__unpack_begin(kvf__pack kind) {
    kvf__unpack *u = calloc(1, sizeof *u);
    if (!u) return NULL;
    u->kind = kind;
    /* 16: a gzip header is required. */
    if (kind == KVF__PACK_GZIP ? inflateInit2(&u->gzip, MAX_WBITS + 16) == Z_OK
                               : (u->zstd = ZSTD_createDStream()) != NULL)
        return u;
    free(u);
    return NULL;
}

void kvf__unpack_end(kvf__unpack *u) {
    if (!u) return;
    if (u->kind == KVF__PACK_GZIP) (void)inflateEnd(&u->gzip);
    ZSTD_freeDStream(u->zstd);
    free(u);
}

bool kvf__unpack_inside(const kvf__unpack *u) { return u->inside; }

static const char *gzip_step(kvf__unpack *u, const unsigned char *in, size_t *n_in, char *out, size_t *n_out) {
    z_stream *z = &u->gzip;
    size_t padding = 0;
    if (!u->inside) {
        while (padding < *n_in && !in[padding]) padding++; /* tapes and some tools fill up with zeros */
        if (padding == *n_in) {
            *n_out = 0;
            return NULL;
        }
        (void)inflateReset(z);
        u->inside = true;
    }
    size_t given = *n_in - padding, room = *n_out;
    given = given < UINT_MAX ? given : UINT_MAX;
    room = room < UINT_MAX ? room : UINT_MAX;
    z->next_in = in + padding;
    z->avail_in = (uInt)given;
    z->next_out = (unsigned char *)out;
    z->avail_out = (uInt)room;
    int got = inflate(z, Z_NO_FLUSH);
    *n_in = padding + given - z->avail_in;
    *n_out = room - z->avail_out;
    if (got == Z_STREAM_END) u->inside = false;
    if (got == Z_OK || got == Z_STREAM_END || got == Z_BUF_ERROR) return NULL;
    return z->msg ? z->msg : got == Z_MEM_ERROR ? "out of memory" : "bad data";
}

const char *kvf__unpack_step(kvf__unpack *u, const unsigned char *in, size_t *n_in, char *out, size_t *n_out) {
    if (u->kind == KVF__PACK_GZIP) return gzip_step(u, in, n_in, out, n_out);
    ZSTD_inBuffer from = {in, *n_in, 0};
    ZSTD_outBuffer to = {out, *n_out, 0};
    size_t got = ZSTD_decompressStream(u->zstd, &to, &from);
    *n_in = from.pos;
    *n_out = to.pos;
    if (ZSTD_isError(got)) return ZSTD_getErrorName(got);
    u->inside = got != 0;
    return NULL;
}
