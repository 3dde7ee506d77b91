/* UTF-8: one character at a time. */
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
