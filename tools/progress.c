/* The progress line. */
#define _POSIX_C_SOURCE 200809L
#include "tools/progress.h"

#include <stdio.h>
#include <unistd.h>

#include "tools/text.h"

static const double interval_s = 0.2;
static bool shown; /* a line stands on the terminal: there is one terminal, so there is one flag */

kvf__progress kvf__progress_begin(bool on, const char *label, uint64_t total) {
    return (kvf__progress){.on = on && isatty(STDERR_FILENO), .label = label, .total = total, .last_time = kvf__now()};
}

bool kvf__progress_due(const kvf__progress *progress) {
    return progress->on && kvf__now() - progress->last_time >= interval_s;
}

void kvf__progress_text(kvf__progress *progress, const char *text) {
    fprintf(stderr, "\r\033[K%.78s", text);
    fflush(stderr);
    shown = true;
    progress->last_time = kvf__now();
}

void kvf__progress_show(kvf__progress *progress, uint64_t done, uint32_t running, uint64_t tokens, double used) {
    double now = kvf__now();
    kvf__short rate = kvf__show_rate(tokens - progress->last_tokens, now - progress->last_time);
    kvf__short total = kvf__show_count(progress->total);
    /* Under 80 columns: a line that wraps could not be rewritten. */
    fprintf(stderr, "\r\033[K%.24s: %s%s%s done, %u running, %s, %.0f%% of blocks", progress->label,
            kvf__show_count(done).text, progress->total ? "/" : "", progress->total ? total.text : "", running,
            rate.text, used * 100);
    fflush(stderr);
    shown = true;
    progress->last_time = now;
    progress->last_tokens = tokens;
}

void kvf__progress_clear(void) {
    if (shown) fputs("\r\033[K", stderr);
    shown = false;
}
