/* eval/scores/grid.h: a table of texts, printed in columns or as Markdown. The first row is its head. */
#ifndef KVF_EVAL_SCORES_GRID_H
#define KVF_EVAL_SCORES_GRID_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct kvf__grid { /* kvf__grid_begin, kvf__grid_free */
    char **cells;          /* (row, column) */
    uint64_t n, capacity;
    uint32_t n_columns;
    bool failed; /* out of memory */
} kvf__grid;

void kvf__grid_begin(kvf__grid *grid, uint32_t n_columns);
/* The next cell, row by row. */
void kvf__grid_add(kvf__grid *grid, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The first column is left-aligned, the others right; false when the grid is not whole. */
bool kvf__grid_print(const kvf__grid *grid, FILE *out, bool markdown);
void kvf__grid_free(kvf__grid *grid);

#endif
