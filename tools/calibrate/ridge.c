/* Ridge regression by the normal equations, in double: BLAS adds them up, LAPACK solves them. */
#include "tools/calibrate/ridge.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "tools/text.h"

enum { ROWS = 256 }; /* states that are widened at a time */

/* Fortran's calling convention: all by address, lengths of texts at the end. */
typedef void syrk_fn(const char *uplo, const char *trans, const int *n, const int *k, const double *alpha,
                     const double *a, const int *lda, const double *beta, double *c, const int *ldc, size_t, size_t);
typedef void posv_fn(const char *uplo, const int *n, const int *n_rhs, double *a, const int *lda, double *b,
                     const int *ldb, int *info, size_t);

struct kvf__ridge {
    uint32_t n_layers, n_heads, n_embd;
    void *library;
    syrk_fn *syrk;
    posv_fn *posv;
    uint64_t *n;      /* [n_layers] tokens */
    double *gram;     /* [n_layers][n_embd][n_embd] sums of x x', the upper triangle by columns */
    double *cross;    /* [n_layers][n_heads][n_embd] sums of y x */
    double *mean_x;   /* [n_layers][n_embd] sums of x */
    double *mean_y;   /* [n_layers][n_heads] sums of y */
    double *wide;     /* [ROWS][n_embd] */
    double *centered; /* [n_embd][n_embd] */
};

/* OpenBLAS has both; else the reference LAPACK, which brings the BLAS it was linked with. Opened here alone, so that no other
 * command waits for its threads. */
static bool open_library(kvf__ridge *f) {
    static const char *const names[] = {"libopenblas.so.0", "liblapack.so.3", "libopenblas.so", "liblapack.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names && !f->library; i++)
        f->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    void *syrk = f->library ? dlsym(f->library, "dsyrk_") : NULL,
         *posv = f->library ? dlsym(f->library, "dposv_") : NULL;
    memcpy(&f->syrk, &syrk, sizeof syrk);
    memcpy(&f->posv, &posv, sizeof posv);
    if (syrk && posv) return true;
    kvf__say("calibrate: neither OpenBLAS nor LAPACK was found; install libopenblas0 (Debian, Ubuntu) or openblas");
    return false;
}

uint64_t kvf__ridge_bytes(uint32_t n_layers, uint32_t n_heads, uint32_t n_embd) {
    uint64_t d = n_embd;
    return sizeof(double) * (n_layers * (d * d + d * n_heads + d + n_heads) + ROWS * d + d * d);
}

kvf__ridge *kvf__ridge_begin(uint32_t n_layers, uint32_t n_heads, uint32_t n_embd) {
    kvf__ridge *f = calloc(1, sizeof *f);
    size_t d = n_embd;
    if (f) {
        *f = (kvf__ridge){.n_layers = n_layers, .n_heads = n_heads, .n_embd = n_embd};
        f->n = calloc(n_layers, sizeof *f->n);
        f->gram = calloc(n_layers * d, d * sizeof *f->gram);
        f->cross = calloc(n_layers * d, n_heads * sizeof *f->cross);
        f->mean_x = calloc(n_layers, d * sizeof *f->mean_x);
        f->mean_y = calloc(n_layers, n_heads * sizeof *f->mean_y);
        f->wide = malloc(ROWS * d * sizeof *f->wide);
        f->centered = malloc(d * d * sizeof *f->centered);
    }
    bool whole = f && f->n && f->gram && f->cross && f->mean_x && f->mean_y && f->wide && f->centered;
    if (!whole)
        kvf__say("calibrate: out of memory: %s are needed for %u layers, %u wide",
                 kvf__show_bytes(kvf__ridge_bytes(n_layers, n_heads, n_embd)).text, n_layers, n_embd);
    if (whole && open_library(f)) return f;
    kvf__ridge_end(f);
    return NULL;
}

void kvf__ridge_end(kvf__ridge *f) {
    if (!f) return;
    void *all[] = {f->n, f->gram, f->cross, f->mean_x, f->mean_y, f->wide, f->centered};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    if (f->library) dlclose(f->library);
    free(f);
}

void kvf__ridge_add(kvf__ridge *f, uint32_t layer, const float *states, uint32_t n, const float *targets,
                    uint32_t stride) {
    const double one = 1;
    const int d = (int)f->n_embd;
    double *sum_x = f->mean_x + (size_t)layer * f->n_embd;
    for (uint32_t begin = 0; begin < n; begin += ROWS) {
        const uint32_t rows = n - begin < ROWS ? n - begin : ROWS;
        const int k = (int)rows;
        for (uint32_t i = 0; i < rows; i++) {
            const float *x = states + (size_t)(begin + i) * f->n_embd;
            double *wide = f->wide + (size_t)i * f->n_embd;
            for (uint32_t j = 0; j < f->n_embd; j++) wide[j] = (double)x[j], sum_x[j] += wide[j];
            for (uint32_t h = 0; h < f->n_heads; h++) {
                double y = (double)targets[(size_t)h * stride + begin + i];
                double *cross = f->cross + ((size_t)layer * f->n_heads + h) * f->n_embd;
                for (uint32_t j = 0; j < f->n_embd; j++) cross[j] += y * wide[j];
                f->mean_y[(size_t)layer * f->n_heads + h] += y;
            }
        }
        f->syrk("U", "N", &d, &k, &one, f->wide, &d, &one, f->gram + (size_t)layer * f->n_embd * f->n_embd, &d, 1, 1);
    }
    f->n[layer] += n;
}

/* One layer: weights [n_heads][n_embd] in place of the sums of y x, centered. */
static bool solve_layer(kvf__ridge *f, uint32_t layer, double ridge, double *weights) {
    size_t d = f->n_embd;
    const double *gram = f->gram + layer * d * d, *sum_x = f->mean_x + layer * d;
    double n = (double)f->n[layer], trace = 0;
    for (size_t j = 0; j < d; j++)
        for (size_t i = 0; i <= j; i++) f->centered[j * d + i] = gram[j * d + i] - sum_x[i] * sum_x[j] / n;
    for (size_t j = 0; j < d; j++) trace += f->centered[j * d + j];
    for (size_t j = 0; j < d; j++) f->centered[j * d + j] += ridge * trace / (double)d;
    for (uint32_t h = 0; h < f->n_heads; h++) {
        const double *cross = f->cross + ((size_t)layer * f->n_heads + h) * d;
        double sum_y = f->mean_y[(size_t)layer * f->n_heads + h];
        for (size_t j = 0; j < d; j++) weights[h * d + j] = cross[j] - sum_x[j] * sum_y / n;
    }
    const int order = (int)d, n_rhs = (int)f->n_heads;
    int info = 0;
    f->posv("U", &order, &n_rhs, f->centered, &order, weights, &order, &info, 1);
    if (!info) return true;
    kvf__say("calibrate: layer %u: the equations cannot be solved (%llu tokens for %zu weights): give more texts",
             layer, (unsigned long long)f->n[layer], d);
    return false;
}

bool kvf__ridge_solve(kvf__ridge *f, double ridge, float *weight, float *bias) {
    size_t d = f->n_embd;
    double *weights = malloc(f->n_heads * d * sizeof *weights);
    bool ok = weights != NULL;
    if (!ok) kvf__say("calibrate: out of memory");
    for (uint32_t l = 0; l < f->n_layers && ok; l++) {
        ok = solve_layer(f, l, ridge, weights);
        for (uint32_t h = 0; h < f->n_heads && ok; h++) {
            size_t table = (size_t)l * f->n_heads + h;
            double offset = f->mean_y[table];
            for (size_t j = 0; j < d; j++) {
                weight[table * d + j] = (float)weights[h * d + j];
                offset -= weights[h * d + j] * f->mean_x[l * d + j];
            }
            bias[table] = (float)(offset / (double)f->n[l]);
        }
    }
    free(weights);
    return ok;
}
