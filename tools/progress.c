/* The progress line. */
#define _POSIX_C_SOURCE 200809L
#include "tools/progress.h"

#include <stdio.h>
#include <unistd.h>

#include "tools/text.h"

static const double interval_s = 0.2, settled_s = 1; /* before that no time is estimated */
static bool shown; /* a line stands on the terminal: there is one terminal, so there is one flag */

kvf__progress kvf__progress_begin(bool on, const char *label, uint64_t total) {
    double now = kvf__now();
    return (kvf__progress){
        .on = on && isatty(STDERR_FILENO), .label = label, .total = total, .started = now, .last_time = now};
}

bool kvf__progress_due(const kvf__progress *progress) {
    return progress->on && kvf__now() - progress->last_time >= interval_s;
}

/* Redrawn from its begin, one column short of the width that the terminal has now: a line that wraps could not be. */
void kvf__progress_text(kvf__progress *progress, const char *text) {
    char line[400];
    kvf__fit(line, sizeof line, text, kvf__terminal_columns(STDERR_FILENO) - 1);
    fprintf(stderr, "\r\033[K%s", line);
    fflush(stderr);
    shown = true;
    progress->last_time = kvf__now();
}

kvf__short kvf__progress_done(const kvf__progress *progress, uint64_t done) {
    kvf__short s;
    double elapsed = kvf__now() - progress->started;
    if (!progress->total) {
        snprintf(s.text, sizeof s.text, "%.30s done", kvf__show_count(done).text);
        return s;
    }
    int n = snprintf(s.text, sizeof s.text, "%.30s/%.30s done", kvf__show_count(done).text,
                     kvf__show_count(progress->total).text);
    if (done <= progress->skipped || done >= progress->total || elapsed < settled_s) return s;
    double left = elapsed * (double)(progress->total - done) / (double)(done - progress->skipped);
    snprintf(s.text + n, sizeof s.text - (size_t)n, ", %.18s left", kvf__show_seconds(left < 1 ? 1 : left).text);
    return s;
}

void kvf__progress_show(kvf__progress *progress, uint64_t requests, uint64_t answers, uint32_t running, uint64_t tokens,
                        double used) {
    double now = kvf__now();
    char text[640];
    snprintf(text, sizeof text, "%.100s: requests %s, answers %.30s, %u running, %.30s, %.0f%% of blocks",
             progress->label, kvf__progress_done(progress, requests).text, kvf__show_count(answers).text, running,
             kvf__show_rate(tokens - progress->last_tokens, now - progress->last_time).text, used * 100);
    kvf__progress_text(progress, text);
    progress->last_tokens = tokens;
}

void kvf__progress_clear(void) {
    if (shown) fputs("\r\033[K", stderr);
    shown = false;
}
