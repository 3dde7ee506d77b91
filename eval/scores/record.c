/* Reads one record of kvfold eval: a line's object becomes a unit and a cell, or a text. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/scores/records.h"
#include "tools/fields.h"

typedef struct input { /* what the helpers share */
    kvf__records *records;
    const json_t *object;
    char *err;
    size_t capacity;
    bool failed;
} input;

static void fail(input *in, const char *what, const char *key, const char *why) {
    if (!in->failed) snprintf(in->err, in->capacity, "%s%s%s", what, key, why);
    in->failed = true;
}
static void no_memory(input *in) { fail(in, "", "", "out of memory"); }

/* Sums and shares of what is no larger are finite, and whole numbers up to it are exact. */
#define MOST 1e15

/* ---- Fields ------------------------------------------------------------------------------------------- */

/* The field, or NULL where it is not there or null, or a text that would not be taken whole. */
static const json_t *field(input *in, const char *key) {
    const json_t *value = json_object_get(in->object, key);
    if (!kvf__field_has_zero(value)) return json_is_null(value) ? NULL : value;
    fail(in, key, ": holds a zero byte: ", kvf__field_shown(value).text);
    return NULL;
}

static uint32_t add_name(input *in, const char *text) {
    uint32_t number = KVF__NO_NAME;
    if (!kvf__names_add(&in->records->names, text, &number)) no_memory(in);
    return number;
}

static uint32_t name(input *in, const char *key, bool required) {
    const json_t *value = field(in, key);
    if (json_is_string(value)) return add_name(in, json_string_value(value));
    if (json_is_integer(value)) { /* a table's number */
        char digits[24];
        snprintf(digits, sizeof digits, "%lld", (long long)json_integer_value(value));
        return add_name(in, digits);
    }
    if (value)
        fail(in, key, ": must be a text, is ", kvf__field_type(value));
    else if (required)
        fail(in, "", key, " is missing");
    return KVF__NO_NAME;
}

static double number(input *in, const char *key, double missing) {
    const json_t *value = field(in, key);
    if (value && !json_is_number(value) && !json_is_boolean(value))
        fail(in, key, ": must be a number, is ", kvf__field_type(value));
    if (json_is_boolean(value)) return json_is_true(value);
    if (!json_is_number(value)) return missing;
    double x = json_number_value(value);
    if (!(fabs(x) <= MOST)) fail(in, "", key, ": is beyond what a figure can be, 1e15");
    return x;
}

static uint64_t count(input *in, const char *key) {
    const json_t *value = field(in, key);
    if (!value) return 0;
    if (json_is_integer(value) && json_integer_value(value) >= 0) return (uint64_t)json_integer_value(value);
    fail(in, "", key, ": must be a whole number from 0 on");
    return 0;
}

/* A list of numbers, as many as *n says or, where that is 0, any number of them; null in it is NAN. */
static float *list(input *in, const char *key, uint32_t *n) {
    const json_t *value = field(in, key);
    size_t length = json_array_size(value);
    if (value && !json_is_array(value)) fail(in, key, ": must be a list, is ", kvf__field_type(value));
    if (!length || length > UINT32_MAX) return NULL;
    if (*n && length != *n) {
        fail(in, "", key, ": is not as long as the other lists of the line");
        return NULL;
    }
    float *out = malloc(length * sizeof *out);
    if (!out) return no_memory(in), NULL;
    for (size_t i = 0; i < length; i++) {
        const json_t *x = json_array_get(value, i);
        out[i] = json_is_number(x) ? (float)json_number_value(x) : NAN;
        if (json_is_number(x) ? !(fabs(json_number_value(x)) <= MOST) : !json_is_null(x))
            fail(in, "", key, ": holds what is no number of at most 1e15");
    }
    *n = (uint32_t)length;
    return out;
}

/* A list of *n lists of numbers, all equally long: [*n][*width]. */
static float *lists(input *in, const char *key, uint32_t *n, uint32_t *width) {
    const json_t *value = field(in, key);
    size_t rows = json_array_size(value), columns = json_array_size(json_array_get(value, 0));
    if (!value || json_is_null(value)) return NULL;
    bool whole = rows > 0 && columns > 0 && columns <= 1024 && (!*n || rows == *n) && rows <= UINT32_MAX / columns;
    float *out = whole ? malloc(rows * columns * sizeof *out) : NULL;
    for (size_t i = 0; out && whole && i < rows * columns; i++) {
        const json_t *row = json_array_get(value, i / columns), *x = json_array_get(row, i % columns);
        whole = json_array_size(row) == columns && json_is_number(x) && fabs(json_number_value(x)) <= MOST;
        out[i] = (float)json_number_value(x);
    }
    if (!whole)
        fail(in, "", key, ": must be a list of a list of numbers for each layer, all equally long");
    else if (!out)
        no_memory(in);
    if (out && whole) {
        *n = (uint32_t)rows;
        *width = (uint32_t)columns;
        return out;
    }
    free(out);
    return NULL;
}

static double mean(const float *values, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += (double)values[i];
    return n ? sum / n : NAN;
}

/* ---- Units and policies ----------------------------------------------------------------------------------- */

static bool same(double a, double b) { return isnan(a) ? isnan(b) : fabs(a - b) <= 1e-9; }

static bool same_unit(const kvf__unit *a, const kvf__unit *b) {
    return a->measure == b->measure && a->source == b->source && a->context == b->context && a->offset == b->offset &&
           a->sample == b->sample && a->seed == b->seed && a->n_scored == b->n_scored && a->task == b->task &&
           a->placement == b->placement && same(a->depth, b->depth);
}

/* Lines of one unit, or in the same order of units, follow one another: the search begins where the last one ended. */
static uint32_t find_unit(input *in, const kvf__unit *unit) {
    kvf__records *r = in->records;
    for (uint32_t i = 0, at = r->last_unit; i < r->n_units; i++, at = at + 1 < r->n_units ? at + 1 : 0)
        if (same_unit(&r->units[at], unit)) return r->last_unit = at;
    kvf__unit *units = kvf__grown(r->units, r->n_units, &r->units_capacity, sizeof *units);
    if (!units) return no_memory(in), 0;
    r->units = units;
    units[r->n_units] = *unit;
    return r->last_unit = r->n_units++;
}

static uint32_t find_rho(input *in, double rho) {
    kvf__records *r = in->records;
    for (uint32_t i = 0; i < r->n_rhos; i++)
        if (same(r->rhos[i], rho)) return i;
    double *rhos = kvf__grown(r->rhos, r->n_rhos, &r->rhos_capacity, sizeof *rhos);
    if (!rhos) return no_memory(in), 0;
    r->rhos = rhos;
    rhos[r->n_rhos] = rho;
    return r->n_rhos++;
}

/* The place of a record; a text is the same for every seed. */
static kvf__unit read_unit(input *in) {
    kvf__unit unit = {.measure = name(in, "measure", true), .source = name(in, "source", true)};
    unit.kind = name(in, "kind", false);
    unit.task = name(in, "task", false);
    unit.placement = name(in, "placement", false);
    unit.context = count(in, "context");
    unit.offset = count(in, "offset");
    unit.sample = count(in, "sample");
    unit.seed = unit.task == KVF__NO_NAME ? 0 : count(in, "seed");
    unit.n_scored = count(in, "n_scored");
    unit.depth = number(in, "depth", NAN);
    unit.full_exact = unit.full_hits = unit.full_nll = NAN;
    return unit;
}

/* The budget is the cell's own, chosen so that the memory equals the target. A policy that makes random choices, over
 * a text, counts as a different policy for each seed. */
static uint32_t options_name(input *in) {
    static const char *const budget[] = {"rho", "budget_tokens", "budget_bytes", "budget_unit", "min_tokens"};
    const json_t *value = field(in, "policy_options");
    if (!value) return KVF__NO_NAME;
    if (!json_is_object(value)) {
        fail(in, "policy_options: must be an object, is ", kvf__field_type(value), "");
        return KVF__NO_NAME;
    }
    json_t *kept = json_copy((json_t *)value);
    for (size_t i = 0; i < sizeof budget / sizeof budget[0]; i++) json_object_del(kept, budget[i]);
    if (!field(in, "task") && count(in, "seed")) json_object_set(kept, "seed", json_object_get(in->object, "seed"));
    char *text = kept ? json_dumps(kept, JSON_SORT_KEYS | JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    uint32_t out = KVF__NO_NAME;
    if (text)
        out = add_name(in, text);
    else
        no_memory(in);
    json_decref(kept);
    free(text);
    return out;
}

static uint32_t find_policy(input *in) {
    kvf__records *r = in->records;
    kvf__policy_entry entry = {name(in, "policy", true), name(in, "table", false), options_name(in), NULL};
    for (uint32_t i = 0; i < r->n_policies; i++) {
        const kvf__policy_entry *p = &r->policies[i];
        if (p->label == entry.label && p->table == entry.table && p->options == entry.options) return i;
    }
    kvf__policy_entry *policies = kvf__grown(r->policies, r->n_policies, &r->policies_capacity, sizeof *policies);
    if (!policies) return no_memory(in), 0;
    r->policies = policies;
    if (in->failed) return 0;
    policies[r->n_policies] = entry;
    return r->n_policies++;
}

/* ---- The kinds of records ------------------------------------------------------------------------------------ */

static bool wanted(const kvf__source_filter *filter, const char *source) {
    return (!filter->only || kvf__listed(filter->only, source)) &&
           (!filter->except || !kvf__listed(filter->except, source));
}

/* The source of a record, counted; false when it is not asked for. */
static bool take_source(input *in, const kvf__source_filter *filter) {
    const char *source = json_string_value(field(in, "source"));
    if (!source) return fail(in, "source is missing", "", ""), false;
    json_int_t n = json_integer_value(json_object_get(in->records->sources, source));
    bool is_cell = !strcmp(json_string_value(field(in, "record")), "cell");
    if (json_object_set_new(in->records->sources, source, json_integer(n + is_cell))) no_memory(in);
    if (wanted(filter, source)) return true;
    in->records->n_left_out += is_cell;
    return false;
}

/* What a cell says of a task; the full cache's answer belongs to the unit. */
static void read_task(input *in, kvf__cell *cell, kvf__unit *unit) {
    double n = number(in, "n_answer", NAN), full_hits = number(in, "full_hits", NAN);
    cell->exact = number(in, "exact", NAN);
    cell->hits = number(in, "hits", NAN) / n;
    unit->full_exact = number(in, "full_exact", NAN);
    unit->full_hits = full_hits / n;
    if (!(n > 0)) cell->hits = unit->full_hits = NAN;
}

static void read_figures(input *in, kvf__cell *cell) {
    cell->nll_by_token = list(in, "nll_by_token", &cell->n_tokens);
    cell->kl_by_token = list(in, "kl_by_token", &cell->n_tokens);
    cell->sizes = list(in, "sizes", &cell->n_layers);
    cell->blocks = list(in, "blocks_by_layer", &cell->n_layers);
    cell->group_sizes = lists(in, "group_sizes", &cell->n_layers, &cell->n_groups);
    cell->nll = number(in, "nll", cell->nll_by_token ? mean(cell->nll_by_token, cell->n_tokens) : NAN);
    cell->kl = number(in, "kl", cell->kl_by_token ? mean(cell->kl_by_token, cell->n_tokens) : NAN);
    cell->agree = number(in, "agree", NAN);
    cell->target_blocks = number(in, "target_blocks", NAN);
    cell->held_blocks = number(in, "held_blocks", NAN);
}

/* A cell has figures or says why not; one whose figures are no numbers (null) is empty too. */
static void check_figures(input *in, kvf__cell *cell) {
    static const char *const figures[] = {"nll", "kl", "exact", "hits", "nll_by_token", "kl_by_token"};
    bool any = !isnan(cell->nll) || !isnan(cell->kl) || !isnan(cell->exact) || !isnan(cell->hits);
    for (size_t i = 0; i < sizeof figures / sizeof figures[0] && !any; i++)
        if (json_object_get(in->object, figures[i]) && cell->why == KVF__NO_NAME)
            cell->why = add_name(in, "its figures are not finite");
    if (!any && cell->why == KVF__NO_NAME)
        fail(in, "the cell has no figures (nll, kl, exact, hits), and no `empty` that says why", "", "");
}

static void free_cell(kvf__cell *cell) {
    free(cell->nll_by_token);
    free(cell->kl_by_token);
    free(cell->sizes);
    free(cell->blocks);
    free(cell->group_sizes);
}

static void add_cell(input *in) {
    kvf__records *r = in->records;
    kvf__cell cell = {.order = r->n_lines, .table = name(in, "table", false), .why = name(in, "empty", false)};
    kvf__unit unit = read_unit(in);
    double rho = number(in, "rho", NAN);
    if (isnan(rho)) fail(in, "", "rho", " is missing");
    read_task(in, &cell, &unit);
    read_figures(in, &cell);
    check_figures(in, &cell);
    cell.policy = in->failed ? 0 : find_policy(in);
    cell.rho = in->failed ? 0 : find_rho(in, rho);
    cell.unit = in->failed ? 0 : find_unit(in, &unit);
    kvf__cell *cells = in->failed ? NULL : kvf__grown(r->cells, r->n_cells, &r->cells_capacity, sizeof *cells);
    if (!cells) {
        free_cell(&cell);
        no_memory(in);
        return;
    }
    r->cells = cells;
    cells[r->n_cells++] = cell;
    kvf__unit *known = &r->units[cell.unit];
    if (isnan(known->full_exact)) known->full_exact = unit.full_exact;
    if (isnan(known->full_hits)) known->full_hits = unit.full_hits;
}

/* What the full cache does at a unit. */
static void add_text(input *in) {
    kvf__unit unit = read_unit(in);
    input full = *in, layers = *in;
    full.object = field(in, "full");
    layers.object = field(in, "layers");
    unit.full_nll_by_token = list(&full, "nll_by_token", &unit.n_tokens);
    unit.full_nll = number(&full, "nll", unit.full_nll_by_token ? mean(unit.full_nll_by_token, unit.n_tokens) : NAN);
    unit.density = list(&layers, "density_head_minmax", &unit.n_layers);
    unit.variance = list(&layers, "variance", &unit.n_layers);
    in->failed = in->failed || full.failed || layers.failed;
    uint32_t number = in->failed ? 0 : find_unit(in, &unit);
    if (in->failed) {
        free(unit.full_nll_by_token);
        free(unit.density);
        free(unit.variance);
        return;
    }
    kvf__unit *known = &in->records->units[number];
    if (known->full_nll_by_token != unit.full_nll_by_token) free(known->full_nll_by_token);
    if (known->density != unit.density) free(known->density);
    if (known->variance != unit.variance) free(known->variance);
    unit.full_exact = known->full_exact;
    unit.full_hits = known->full_hits;
    *known = unit;
}

static void add_run(input *in) {
    size_t i;
    json_t *run;
    json_array_foreach(in->records->runs, i, run) if (json_equal(run, in->object)) return;
    if (json_array_append(in->records->runs, (json_t *)in->object)) no_memory(in);
}

bool kvf__record_add(kvf__records *records, const json_t *object, const kvf__source_filter *filter, char *err,
                     size_t capacity) {
    input in = {records, object, err, capacity, false};
    const char *kind = json_string_value(field(&in, "record"));
    if (!json_is_object(object)) {
        fail(&in, "is ", kvf__field_type(object), ", no record of kvfold eval");
    } else if (!kind) {
        fail(&in, "has no `record`: it is no record of kvfold eval", "", "");
    } else if (!strcmp(kind, "run")) {
        add_run(&in);
    } else if (!strcmp(kind, "cell")) {
        if (take_source(&in, filter)) add_cell(&in);
    } else if (!strcmp(kind, "text") || !strcmp(kind, "sample")) {
        if (take_source(&in, filter)) add_text(&in);
    } else {
        fail(&in, "record ", kind, ": this version does not know it");
    }
    return !in.failed;
}
