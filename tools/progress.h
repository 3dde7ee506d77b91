/* tools/progress.h: one line on the terminal, rewritten while a run goes on.
 *
 * Invariant: nothing is written if stderr is not a terminal, and never more than one line at the terminal's current width.
 */
#ifndef KVF_TOOLS_PROGRESS_H
#define KVF_TOOLS_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

#include "tools/text.h"

typedef struct kvf__progress {
    bool on;
    const char *label;
    uint64_t total;   /* requests, 0: not known */
    uint64_t skipped; /* of those that are done: an earlier run's, which say nothing of the time that is left */
    uint64_t last_tokens;
    double started, last_time;
} kvf__progress;

/* on: whether it was not switched off; it stays off when stderr is no terminal. */
kvf__progress kvf__progress_begin(bool on, const char *label, uint64_t total);

/* Whether enough time has passed to show something new. */
bool kvf__progress_due(const kvf__progress *progress);

/* requests, answers: ended so far; running: sequences; tokens: computed so far; used: share of the blocks in use, in
 * [0, 1]. */
void kvf__progress_show(kvf__progress *progress, uint64_t requests, uint64_t answers, uint32_t running, uint64_t tokens,
                        double used);

/* "12/200 done, 1 min 20 s left"; the time once it can be told. */
kvf__short kvf__progress_done(const kvf__progress *progress, uint64_t done);

/* The same line with a text of the caller's. */
void kvf__progress_text(kvf__progress *progress, const char *text);

/* Removes the line, if one is shown, so that something else can be written. */
void kvf__progress_clear(void);

#endif
