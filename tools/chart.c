/* A bar chart of blocks per layer, in two columns. */
#define _POSIX_C_SOURCE 200809L
#include <langinfo.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/report.h"

enum { BAR_CELLS = 24 };

/* A bar of up to BAR_CELLS cells: eighths of a cell where the terminal can show them. */
static void print_bar(double share, bool fine) {
    static const char *const eighths[] = {"", "\u258f", "\u258e", "\u258d", "\u258c", "\u258b", "\u258a", "\u2589"};
    int steps = (int)(share * BAR_CELLS * 8 + 0.5), cells = steps / 8, used = cells;
    if (!fine) used = cells = (steps + 4) / 8;
    for (int i = 0; i < cells; i++) fputs(fine ? "\u2588" : "#", stderr);
    if (fine && steps % 8) {
        fputs(eighths[steps % 8], stderr);
        used++;
    }
    fprintf(stderr, "%*s", BAR_CELLS - used, "");
}

void kvf__chart(const double *values, uint32_t n_layers, double full) {
    bool fine = isatty(STDERR_FILENO) && !strcmp(nl_langinfo(CODESET), "UTF-8");
    double top = 0;
    bool equal = true;
    for (uint32_t l = 0; l < n_layers; l++) {
        if (values[l] > top) top = values[l];
        equal &= values[l] == values[0];
    }
    if (equal) return;
    fprintf(stderr, "\nBlocks per layer at a request's end, mean (a full cache: %.1f)\n", full);
    uint32_t n_rows = n_layers > 8 ? (n_layers + 1) / 2 : n_layers;
    for (uint32_t row = 0; row < n_rows; row++) {
        for (uint32_t l = row; l < n_layers; l += n_rows) {
            fprintf(stderr, "%s%4u ", l > row ? "   " : "", l);
            print_bar(top > 0 ? values[l] / top : 0, fine);
            fprintf(stderr, "%7.1f", values[l]);
        }
        fputc('\n', stderr);
    }
}
