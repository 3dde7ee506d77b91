/* UTF-8: a character; valid text from any bytes. */
#include "base/base.h"

size_t kvf__utf8_length(const char *text, size_t n, bool *cut) {
    const unsigned char *p = (const unsigned char *)text;
    if (!n) return 0;
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4) return 0;
    size_t length = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    unsigned char low = p[0] == 0xe0   ? 0xa0
                        : p[0] == 0xf0 ? 0x90
                                       : 0x80,
                  high = p[0] == 0xed   ? 0x9f
                         : p[0] == 0xf4 ? 0x8f
                                        : 0xbf;
    for (size_t i = 1; i < length; i++) {
        if (i == n) {
            if (cut) *cut = true;
            return 0;
        }
        if (p[i] < (i == 1 ? low : 0x80) || p[i] > (i == 1 ? high : 0xbf)) return 0;
    }
    return length;
}

size_t kvf__utf8_valid(const char *text, size_t n) {
    size_t i = 0;
    while (i < n) {
        size_t length = kvf__utf8_length(text + i, n - i, NULL);
        if (!length) return i;
        i += length;
    }
    return n;
}

size_t kvf__utf8_clean(const char *text, size_t n, char *out) {
    size_t written = 0;
    for (size_t i = 0; i < n;) {
        size_t length = kvf__utf8_length(text + i, n - i, NULL), bytes = length ? length : 3;
        if (out) memcpy(out + written, length ? text + i : "\xef\xbf\xbd", bytes);
        written += bytes;
        i += length ? length : 1;
    }
    return written;
}
