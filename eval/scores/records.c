/* The records of several files: reads lines, replaces cells, looks cells up. */
#define _POSIX_C_SOURCE 200809L
#include "eval/scores/records.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/reader.h"
#include "tools/text.h"

/* ---- Lists ------------------------------------------------------------------------------------------------ */

void *kvf__grown(void *list, uint64_t n, uint64_t *capacity, size_t bytes) {
    if (n < *capacity) return list;
    uint64_t more = *capacity ? *capacity * 2 : 64;
    void *larger = more < SIZE_MAX / bytes ? realloc(list, (size_t)more * bytes) : NULL;
    if (larger) *capacity = more;
    return larger;
}

static uint32_t find_name(const kvf__names *names, const char *text) {
    for (uint32_t i = 0; i < names->n; i++)
        if (!strcmp(names->texts[i], text)) return i;
    return KVF__NO_NAME;
}

bool kvf__names_add(kvf__names *names, const char *text, uint32_t *number) {
    *number = find_name(names, text);
    if (*number != KVF__NO_NAME) return true;
    uint64_t capacity = names->capacity;
    char **texts = kvf__grown(names->texts, names->n, &capacity, sizeof *texts), *copy = texts ? strdup(text) : NULL;
    if (texts) names->texts = texts, names->capacity = (uint32_t)capacity;
    if (!copy) return false;
    texts[names->n] = copy;
    *number = names->n++;
    return true;
}

bool kvf__listed(const char *names, const char *name) {
    size_t n = strlen(name);
    for (const char *p = names; *p;) {
        size_t length = strcspn(p, ",");
        if (length == n && !memcmp(p, name, n)) return true;
        p += length + (p[length] == ',');
    }
    return false;
}

const char *kvf__records_name(const kvf__records *r, uint32_t name) {
    return name < r->names.n ? r->names.texts[name] : "";
}

uint32_t kvf__records_find(const kvf__records *r, const char *text) { return find_name(&r->names, text); }

/* ---- Reading ------------------------------------------------------------------------------------------------ */

enum { BAD_SHOWN = 10 };

static void say_bad(kvf__records *r, const kvf__reader *in, uint64_t *n_bad, const char *what) {
    r->n_bad++;
    if (++*n_bad <= BAD_SHOWN) kvf__say("%s:%llu: %s", in->name, (unsigned long long)in->n_lines, what);
}

static bool is_blank(const char *line, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (!strchr(" \t\r", line[i]) || !line[i]) return false;
    return true;
}

/* One line; false when memory ran out. */
static bool read_line(kvf__records *r, const kvf__reader *in, const char *line, size_t n,
                      const kvf__source_filter *filter, uint64_t *n_bad) {
    if (is_blank(line, n)) return true;
    r->n_lines++;
    json_error_t error;
    char err[300] = "";
    json_t *object = json_loadb(line, n, JSON_ALLOW_NUL, &error);
    if (!object) {
        snprintf(err, sizeof err, "%s: %s (column %d)", in->line_ended ? "not JSON" : "a torn line, without its end",
                 error.text, error.column);
        say_bad(r, in, n_bad, err);
    } else if (!kvf__record_add(r, object, filter, err, sizeof err)) {
        say_bad(r, in, n_bad, err);
    }
    json_decref(object);
    return strcmp(err, "out of memory") != 0;
}

bool kvf__records_read(kvf__records *r, const char *path, const kvf__source_filter *filter) {
    if (!r->runs) r->runs = json_array();
    if (!r->sources) r->sources = json_object();
    if (!r->runs || !r->sources) return kvf__say("out of memory"), false;
    kvf__reader in;
    if (!kvf__reader_open(&in, path, false)) return false;
    const char *line;
    size_t n;
    uint64_t n_bad = 0;
    bool whole = true;
    kvf__read got = KVF__READ_LATER;
    while (whole && (got == KVF__READ_LATER || got == KVF__READ_LINE)) {
        got = kvf__reader_next(&in, true, &line, &n);
        if (got == KVF__READ_LINE) kvf__line_skip_mark(&line, &n);
        if (got == KVF__READ_LINE) whole = read_line(r, &in, line, n, filter, &n_bad);
    }
    if (n_bad > BAD_SHOWN) kvf__say("%s: %llu more such lines", in.name, (unsigned long long)(n_bad - BAD_SHOWN));
    kvf__reader_close(&in);
    return whole && got != KVF__READ_FAILED;
}

/* ---- Order -------------------------------------------------------------------------------------------------- */

static int compare(uint64_t a, uint64_t b) { return (a > b) - (a < b); }

static int compare_place(const kvf__cell *a, const kvf__cell *b) {
    int d = compare(a->table, b->table);
    if (!d) d = compare(a->policy, b->policy);
    if (!d) d = compare(a->rho, b->rho);
    return d ? d : compare(a->unit, b->unit);
}

static int compare_cells(const void *a, const void *b) {
    const kvf__cell *x = a, *y = b;
    int d = compare_place(x, y);
    return d ? d : compare(x->order, y->order);
}

static void free_cell(kvf__cell *c) {
    free(c->nll_by_token);
    free(c->kl_by_token);
    free(c->sizes);
    free(c->blocks);
    free(c->group_sizes);
}

static void drop_replaced(kvf__records *r) {
    uint64_t n = 0;
    for (uint64_t i = 0; i < r->n_cells; i++) {
        if (i + 1 < r->n_cells && !compare_place(&r->cells[i], &r->cells[i + 1])) {
            free_cell(&r->cells[i]);
            r->n_replaced++;
        } else {
            r->cells[n++] = r->cells[i];
        }
    }
    r->n_cells = n;
}

/* Rising rhos; the cells' numbers follow. */
static void sort_rhos(kvf__records *r) {
    for (uint32_t done = 0; done < r->n_rhos; done++) {
        uint32_t least = done;
        for (uint32_t i = done; i < r->n_rhos; i++)
            if (r->rhos[i] < r->rhos[least]) least = i;
        double rho = r->rhos[done];
        r->rhos[done] = r->rhos[least];
        r->rhos[least] = rho;
        for (uint64_t i = 0; i < r->n_cells; i++) {
            if (r->cells[i].rho == done)
                r->cells[i].rho = least;
            else if (r->cells[i].rho == least)
                r->cells[i].rho = done;
        }
    }
}

/* ---- Names of policies ---------------------------------------------------------------------------------------- */

/* Whether another policy of that label (and table) has another value of an option. */
static bool option_differs(const kvf__records *r, json_t *const *options, uint32_t policy, const char *key) {
    const kvf__policy_entry *p = &r->policies[policy];
    for (uint32_t i = 0; i < r->n_policies; i++)
        if (r->policies[i].label == p->label && r->policies[i].table == p->table &&
            !json_equal(json_object_get(options[i], key), json_object_get(options[policy], key)))
            return true;
    return false;
}

static char *shown_policy(const kvf__records *r, json_t *const *options, uint32_t policy) {
    char text[400];
    int used = snprintf(text, sizeof text, "%s", kvf__records_name(r, r->policies[policy].label));
    const char *key;
    json_t *value;
    json_object_foreach(options[policy], key, value) {
        if (used < 0 || (size_t)used + 1 >= sizeof text || !option_differs(r, options, policy, key)) continue;
        char *shown = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(6));
        size_t n = shown ? strlen(shown) : 0;
        bool quoted = n > 1 && shown[0] == '"';
        if (shown)
            used += snprintf(text + used, sizeof text - (size_t)used, " %s=%.*s", key, (int)(quoted ? n - 2 : n),
                             shown + quoted);
        free(shown);
    }
    return strdup(text);
}

static bool name_policies(kvf__records *r) {
    json_t **options = calloc(r->n_policies + 1, sizeof *options);
    bool whole = options != NULL;
    for (uint32_t i = 0; whole && i < r->n_policies; i++)
        options[i] = json_loads(kvf__records_name(r, r->policies[i].options), 0, NULL);
    for (uint32_t i = 0; whole && i < r->n_policies; i++)
        whole = (r->policies[i].shown = shown_policy(r, options, i)) != NULL;
    for (uint32_t i = 0; options && i < r->n_policies; i++) json_decref(options[i]);
    free(options);
    return whole;
}

bool kvf__records_end(kvf__records *r) {
    sort_rhos(r);
    if (r->n_cells) qsort(r->cells, r->n_cells, sizeof *r->cells, compare_cells);
    drop_replaced(r);
    if (name_policies(r)) return true;
    kvf__say("out of memory");
    return false;
}

void kvf__records_free(kvf__records *r) {
    for (uint64_t i = 0; i < r->n_cells; i++) free_cell(&r->cells[i]);
    for (uint32_t i = 0; i < r->n_units; i++) {
        free(r->units[i].full_nll_by_token);
        free(r->units[i].density);
        free(r->units[i].variance);
    }
    for (uint32_t i = 0; i < r->n_policies; i++) free(r->policies[i].shown);
    for (uint32_t i = 0; i < r->names.n; i++) free(r->names.texts[i]);
    free(r->names.texts);
    free(r->units);
    free(r->cells);
    free(r->policies);
    free(r->rhos);
    json_decref(r->runs);
    json_decref(r->sources);
    memset(r, 0, sizeof *r);
}

/* ---- Looking up ----------------------------------------------------------------------------------------------- */

const kvf__cell *kvf__records_cell(const kvf__records *r, uint32_t table, uint32_t policy, uint32_t rho,
                                   uint32_t unit) {
    kvf__cell key = {.table = table, .policy = policy, .rho = rho, .unit = unit};
    uint64_t low = 0, high = r->n_cells;
    while (low < high) {
        uint64_t at = low + (high - low) / 2;
        int d = compare_place(&r->cells[at], &key);
        if (!d) return &r->cells[at];
        if (d < 0)
            low = at + 1;
        else
            high = at;
    }
    return NULL;
}
