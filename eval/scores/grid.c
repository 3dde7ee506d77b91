/* Tables of texts. */
#define _POSIX_C_SOURCE 200809L
#include "eval/scores/grid.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "eval/scores/records.h"
#include "tools/text.h"

void kvf__grid_begin(kvf__grid *g, uint32_t n_columns) { *g = (kvf__grid){.n_columns = n_columns}; }

void kvf__grid_add(kvf__grid *g, const char *format, ...) {
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    char **cells = kvf__grown(g->cells, g->n, &g->capacity, sizeof *cells), *copy = cells ? strdup(text) : NULL;
    if (cells) g->cells = cells;
    if (copy)
        cells[g->n++] = copy;
    else
        g->failed = true;
}

static int width_of(const char *text) { return (int)kvf__n_characters(text, strlen(text)); }

static void print_markdown(const kvf__grid *g, uint64_t row, FILE *out) {
    for (uint32_t c = 0; c < g->n_columns; c++) {
        fputs(c ? " | " : "| ", out);
        for (const char *p = g->cells[row * g->n_columns + c]; *p; p++) {
            if (*p == '|') fputc('\\', out);
            fputc(*p, out);
        }
    }
    fputs(" |\n", out);
    for (uint32_t c = 0; !row && c < g->n_columns; c++) fputs(c ? "---:|" : "|---|", out);
    if (!row) fputc('\n', out);
}

static void print_columns(const kvf__grid *g, uint64_t row, const int *widths, FILE *out) {
    for (uint32_t c = 0; c < g->n_columns; c++) {
        const char *text = g->cells[row * g->n_columns + c];
        int pad = widths[c] - width_of(text);
        if (c) fprintf(out, "  %*s%s", pad, "", text);
        if (!c) fprintf(out, "%s%*s", text, pad, "");
    }
    fputc('\n', out);
}

bool kvf__grid_print(const kvf__grid *g, FILE *out, bool markdown) {
    int *widths = calloc(g->n_columns, sizeof *widths);
    bool whole = widths && !g->failed && g->n % g->n_columns == 0;
    for (uint64_t i = 0; whole && i < g->n; i++) {
        int w = width_of(g->cells[i]);
        if (w > widths[i % g->n_columns]) widths[i % g->n_columns] = w;
    }
    for (uint64_t row = 0; whole && row < g->n / g->n_columns; row++) {
        if (markdown)
            print_markdown(g, row, out);
        else
            print_columns(g, row, widths, out);
    }
    free(widths);
    return whole;
}

void kvf__grid_free(kvf__grid *g) {
    for (uint64_t i = 0; i < g->n; i++) free(g->cells[i]);
    free(g->cells);
    g->cells = NULL;
    g->n = g->capacity = 0;
}
