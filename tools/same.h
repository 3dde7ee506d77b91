/* tools/same.h: which answers of two runs are the same, and at which token the others differ (--compare).
 *
 * The tokens of the first run's answers are kept until the end, 4 bytes each.
 */
#ifndef KVF_TOOLS_SAME_H
#define KVF_TOOLS_SAME_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kvf__same_sum {
    uint64_t n_compared, n_same;
    uint32_t earliest, median, latest; /* of the others: numbers, from 1, of their first token that differs */
} kvf__same_sum;

typedef struct kvf__same {           /* zero: empty; kvf__same_free */
    struct kvf__same_answer **lines; /* [n_lines] by number less 1: the answers to each */
    uint64_t n_lines;
    uint32_t *parts; /* [sum.n_compared - sum.n_same] */
    uint64_t capacity;
    kvf__same_sum sum; /* but for the last three, until kvf__same_end */
} kvf__same;

/* An answer of the first run; where memory is short it is not compared. */
void kvf__same_keep(kvf__same *same, uint64_t line, uint32_t index, const uint32_t *tokens, uint32_t n);

/* Compares an answer of the second run. False if the first run has none; else *at is 0 if both are the same, or the
 * number, from 1, of the first token that differs. */
bool kvf__same_compare(kvf__same *same, uint64_t line, uint32_t index, const uint32_t *tokens, uint32_t n,
                       uint32_t *at);

kvf__same_sum kvf__same_end(kvf__same *same);
void kvf__same_free(kvf__same *same);

#endif
