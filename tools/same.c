/* Compares the answers of two runs. */
#include "tools/same.h"

#include <stdlib.h>
#include <string.h>

typedef struct kvf__same_answer {
    struct kvf__same_answer *next; /* another of the same line */
    uint32_t index, n;
    uint32_t tokens[]; /* [n] */
} kvf__same_answer;

static bool grow(kvf__same *s, uint64_t line) {
    uint64_t n = s->n_lines ? s->n_lines : 64;
    while (n < line) n *= 2;
    if (n == s->n_lines) return true;
    kvf__same_answer **lines = realloc(s->lines, n * sizeof *lines);
    if (!lines) return false;
    memset(lines + s->n_lines, 0, (n - s->n_lines) * sizeof *lines);
    s->lines = lines;
    s->n_lines = n;
    return true;
}

void kvf__same_keep(kvf__same *s, uint64_t line, uint32_t index, const uint32_t *tokens, uint32_t n) {
    kvf__same_answer *a = grow(s, line) ? malloc(sizeof *a + n * sizeof *tokens) : NULL;
    if (!a) return;
    *a = (kvf__same_answer){.next = s->lines[line - 1], .index = index, .n = n};
    if (n) memcpy(a->tokens, tokens, n * sizeof *tokens);
    s->lines[line - 1] = a;
}

static void add_part(kvf__same *s, uint32_t at) {
    uint64_t n = s->sum.n_compared - s->sum.n_same;
    if (n == s->capacity) {
        uint64_t capacity = n ? n * 2 : 64;
        uint32_t *parts = realloc(s->parts, capacity * sizeof *parts);
        if (!parts) return;
        s->parts = parts;
        s->capacity = capacity;
    }
    s->parts[n] = at;
    s->sum.n_compared++;
}

bool kvf__same_compare(kvf__same *s, uint64_t line, uint32_t index, const uint32_t *tokens, uint32_t n, uint32_t *at) {
    const kvf__same_answer *a = line <= s->n_lines ? s->lines[line - 1] : NULL;
    while (a && a->index != index) a = a->next;
    if (!a) return false;
    uint32_t i = 0;
    while (i < n && i < a->n && tokens[i] == a->tokens[i]) i++;
    *at = i == n && i == a->n ? 0 : i + 1;
    if (*at) {
        add_part(s, *at);
    } else {
        s->sum.n_compared++;
        s->sum.n_same++;
    }
    return true;
}

static int ascending(const void *a, const void *b) {
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

kvf__same_sum kvf__same_end(kvf__same *s) {
    uint64_t n = s->sum.n_compared - s->sum.n_same;
    if (!n) return s->sum;
    qsort(s->parts, n, sizeof *s->parts, ascending);
    s->sum.earliest = s->parts[0];
    s->sum.median = s->parts[(n - 1) / 2];
    s->sum.latest = s->parts[n - 1];
    return s->sum;
}

void kvf__same_free(kvf__same *s) {
    for (uint64_t i = 0; i < s->n_lines; i++) {
        for (kvf__same_answer *a = s->lines[i], *next; a; a = next) {
            next = a->next;
            free(a);
        }
    }
    free(s->lines);
    free(s->parts);
    memset(s, 0, sizeof *s);
}
