/* Valid UTF-8 from any bytes; the name of a request in messages. */
#include <stdio.h>

#include "engine/internal.h"

size_t kvf__utf8_clean(const char *in, size_t n, char *out) {
    size_t written = 0;
    for (size_t i = 0; i < n;) {
        size_t length = kvf__utf8_length(in + i, n - i, NULL);
        const void *from = length ? (const void *)(in + i) : (const void *)"\xef\xbf\xbd";
        size_t bytes = length ? length : 3;
        if (out) memcpy(out + written, from, bytes);
        written += bytes;
        i += length ? length : 1;
    }
    return written;
}

kvf__name kvf__live_name(const kvf__live *r) {
    kvf__name name;
    if (r->label)
        snprintf(name.text, sizeof name.text, "%s", r->label);
    else
        snprintf(name.text, sizeof name.text, "request %llu", (unsigned long long)(r->group ? r->group->id : r->id));
    return name;
}
