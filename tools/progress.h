/* tools/progress.h: one line on the terminal, rewritten while a run goes on. */
#ifndef KVF_TOOLS_PROGRESS_H
#define KVF_TOOLS_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kvf__progress {
    bool on;
    const char *label;
    uint64_t total; /* requests, 0: not known */
    uint64_t last_tokens;
    double last_time;
} kvf__progress;

/* on: whether it was not switched off; it stays off when stderr is no terminal. */
kvf__progress kvf__progress_begin(bool on, const char *label, uint64_t total);

/* Whether enough time has passed to show something new. */
bool kvf__progress_due(const kvf__progress *progress);

/* tokens: computed so far; used: share of the blocks in use, in [0, 1]. */
void kvf__progress_show(kvf__progress *progress, uint64_t done, uint32_t running, uint64_t tokens, double used);

/* The same line with a text of the caller's. */
void kvf__progress_text(kvf__progress *progress, const char *text);

/* Removes the line, if one is shown, so that something else can be written. */
void kvf__progress_clear(void);

#endif
