/* The list of items; reads lists of numbers on the command line. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"

kvf__eval_item *kvf__eval_item_add(kvf__eval_items *items, uint32_t n_prompt, uint32_t n_forced, bool counts) {
    if (items->n == items->capacity) {
        uint32_t capacity = items->capacity ? items->capacity * 2 : 32;
        kvf__eval_item *list = realloc(items->list, capacity * sizeof *list);
        if (list) items->list = list, items->capacity = capacity;
    }
    kvf__eval_item item = {.n_prompt = n_prompt, .n_forced = n_forced, .n_scored = n_forced, .depth = NAN};
    item.tokens = malloc(((size_t)n_prompt + n_forced) * sizeof *item.tokens);
    item.counts = counts ? calloc(n_forced, 1) : NULL;
    if (items->n == items->capacity || !item.tokens || (counts && !item.counts)) {
        kvf__say("eval: out of memory for %u items", items->n + 1);
        free(item.tokens);
        free(item.counts);
        return NULL;
    }
    if (counts) item.n_scored = 0;
    items->list[items->n] = item;
    return &items->list[items->n++];
}

void kvf__eval_items_free(kvf__eval_items *items) {
    for (uint32_t i = 0; i < items->n; i++) {
        free(items->list[i].tokens);
        free(items->list[i].counts);
    }
    free(items->list);
    *items = (kvf__eval_items){NULL, 0, 0};
}

static bool one_number(const char *text, size_t length, double min, double max, bool whole, double *out) {
    char copy[40], *end;
    if (!length || length >= sizeof copy) return false;
    memcpy(copy, text, length);
    copy[length] = '\0';
    if (copy[strspn(copy, whole ? "0123456789" : "0123456789.eE-")]) return false;
    *out = strtod(copy, &end);
    return !*end && *out >= min && *out <= max;
}

double *kvf__eval_numbers(const char *option, const char *text, double min, double max, bool whole, uint32_t *n) {
    size_t most = strlen(text) / 2 + 1;
    double *list = malloc(most * sizeof *list);
    *n = 0;
    if (!list) {
        kvf__say("--%s: out of memory", option);
        return NULL;
    }
    for (const char *p = text;; p++) {
        size_t length = strcspn(p, ",");
        if (*n == most || !one_number(p, length, min, max, whole, &list[*n])) {
            kvf__say("--%s %s: must be %snumbers from %.10g to %.10g with commas between them", option,
                     kvf__shown(text).text, whole ? "whole " : "", min, max);
            *n = 0;
            free(list);
            return NULL;
        }
        for (uint32_t i = 0; i < *n; i++) {
            if (list[i] != list[*n]) continue;
            kvf__say("--%s %s: has %g twice", option, kvf__shown(text).text, list[i]);
            *n = 0;
            free(list);
            return NULL;
        }
        ++*n;
        p += length;
        if (!*p) return list;
    }
}
