/* Valid UTF-8 from any bytes. */
#include "engine/internal.h"

/* Length of the well-formed sequence at p (RFC 3629: no surrogates, no overlong forms), 0 when there is none. */
static size_t sequence_length(const unsigned char *p, size_t n) {
    if (p[0] < 0x80) return 1;
    size_t length = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || length > n) return 0;
    for (size_t i = 1; i < length; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    if (p[0] == 0xe0 && p[1] < 0xa0) return 0;
    if (p[0] == 0xed && p[1] > 0x9f) return 0;
    if (p[0] == 0xf0 && p[1] < 0x90) return 0;
    if (p[0] == 0xf4 && p[1] > 0x8f) return 0;
    return length;
}

size_t kvf__utf8_clean(const char *in, size_t n, char *out) {
    const unsigned char *p = (const unsigned char *)in;
    size_t written = 0;
    for (size_t i = 0; i < n;) {
        size_t length = sequence_length(p + i, n - i);
        const void *from = length ? (const void *)(p + i) : (const void *)"\xef\xbf\xbd";
        size_t bytes = length ? length : 3;
        if (out) memcpy(out + written, from, bytes);
        written += bytes;
        i += length ? length : 1;
    }
    return written;
}
