/* Prints an answer while it is generated. */
#define _POSIX_C_SOURCE 200809L
#include "tools/printer.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "tools/text.h"

/* Where a stop string begins in the held bytes, whole or cut off by their end; n_held when none does. */
static size_t stop_begin(const kvf__printer *p, bool whole) {
    for (size_t i = 0; i < p->n_held; i++) {
        size_t rest = p->n_held - i;
        for (size_t s = 0; s < p->n_stop; s++) {
            size_t length = strlen(p->stop[s]);
            if (length > rest && whole) continue;
            if (!memcmp(p->held + i, p->stop[s], length < rest ? length : rest)) return i;
        }
    }
    return p->n_held;
}

static void print(kvf__printer *p, size_t n) {
    if (p->failed || !n) return;
    char *clean = malloc(n * 3);
    size_t bytes = clean ? kvf__utf8_clean(p->held, n, clean) : 0;
    errno = clean ? 0 : ENOMEM;
    if (!clean || fwrite(clean, 1, bytes, stdout) != bytes || fflush(stdout) != 0) {
        kvf__say("standard output: %s; the run stops here", strerror(errno));
        p->failed = true;
    }
    free(clean);
    memmove(p->held, p->held + n, p->n_held - n);
    p->n_held -= n;
}

void kvf__printer_add(kvf__printer *p, const char *bytes, size_t n) {
    p->used = true;
    if (p->capacity - p->n_held < n) {
        size_t capacity = p->capacity * 2 + n + 64;
        char *larger = realloc(p->held, capacity);
        if (!larger) {
            p->failed = true;
            return;
        }
        p->held = larger;
        p->capacity = capacity;
    }
    if (n) memcpy(p->held + p->n_held, bytes, n);
    p->n_held += n;
    size_t limit = stop_begin(p, false), whole = 0;
    while (whole < limit) {
        bool cut = false;
        size_t length = kvf__utf8_length(p->held + whole, p->n_held - whole, &cut);
        if (cut) break;
        whole += length ? length : 1;
    }
    print(p, whole < limit ? whole : limit);
}

bool kvf__printer_end(kvf__printer *p) {
    print(p, stop_begin(p, true));
    p->n_held = 0;
    if (p->used && !p->failed && (fputc('\n', stdout) < 0 || fflush(stdout) != 0)) {
        kvf__say("standard output: %s", strerror(errno));
        p->failed = true;
    }
    free(p->held);
    p->held = NULL;
    p->capacity = 0;
    return !p->failed;
}
