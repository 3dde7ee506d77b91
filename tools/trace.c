/* Traces: memory, what all formats share, and kvfold's own text format. */
#define _POSIX_C_SOURCE 200809L
#include "tools/trace.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "tools/occupancy.h"
#include "tools/text.h"

/* ---- Memory -------------------------------------------------------------------------------------- */

void kvf__trace_free(kvf__trace *t) {
    free(t->requests);
    free(t->densities);
    free(t->hash_ids);
    *t = (kvf__trace){0};
}

bool kvf__trace_add(kvf__trace *t, kvf__trace_request request, const double *densities) {
    if (t->n == t->capacity) {
        uint64_t capacity = t->capacity ? t->capacity * 2 : 1024;
        kvf__trace_request *larger = realloc(t->requests, capacity * sizeof *larger);
        if (!larger) return false;
        t->requests = larger;
        t->capacity = capacity;
    }
    request.density = KVF__TRACE_NONE;
    if (densities && t->n_layers && t->n_densities < KVF__TRACE_NONE) {
        if (t->n_densities == t->densities_capacity) {
            uint64_t capacity = t->densities_capacity ? t->densities_capacity * 2 : 64;
            double *larger = realloc(t->densities, capacity * t->n_layers * sizeof *larger);
            if (!larger) return false;
            t->densities = larger;
            t->densities_capacity = capacity;
        }
        memcpy(t->densities + t->n_densities * t->n_layers, densities, t->n_layers * sizeof *densities);
        request.density = (uint32_t)t->n_densities++;
    }
    t->requests[t->n++] = request;
    return true;
}

/* ---- What all forms share -------------------------------------------------------------------------- */

bool kvf__trace_fail(const kvf__trace_input *in, const char *format, ...) {
    char text[400];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    kvf__say("%s line %llu: %s", kvf__shown(in->path).text, (unsigned long long)in->reader.n_lines, text);
    return false;
}

bool kvf__trace_take(kvf__trace_input *in, kvf__trace_request r, const double *densities) {
    if (r.arrival_s < in->last_s)
        return kvf__trace_fail(in, "the clock goes back: arrival %.6f s after %.6f s: sort the lines by arrival",
                               r.arrival_s, in->last_s);
    if (r.n_shared > r.n_prompt)
        return kvf__trace_fail(in, "shared_tokens %u: must be at most prompt_tokens %u", r.n_shared, r.n_prompt);
    in->last_s = r.arrival_s;
    return kvf__trace_add(in->trace, r, densities) || kvf__trace_fail(in, "out of memory");
}

bool kvf__trace_tokens(const kvf__trace_input *in, const char *name, const char *text, uint32_t least, uint32_t *out) {
    const uint32_t most = 1u << 30;
    char *end;
    errno = 0;
    double value = strtod(text, &end); /* public tables have 12 and 12.0 */
    if (end == text || *end || errno || !(value >= least) || value > most || value != floor(value))
        return kvf__trace_fail(in, "%s %s: must be a whole number from %u to %u", name, kvf__shown(text).text, least,
                               most);
    *out = (uint32_t)value;
    return true;
}

bool kvf__trace_seconds(const kvf__trace_input *in, const char *name, const char *text, double unit, double *out) {
    char *end;
    double value = strtod(text, &end) * unit;
    if (end == text || *end || !isfinite(value) || value < 0)
        return kvf__trace_fail(in, "%s %s: must be a time of 0 or more, in %s", name, kvf__shown(text).text,
                               unit < 1 ? "milliseconds" : "seconds");
    *out = value;
    return true;
}

/* ---- The own form ------------------------------------------------------------------------------------ */

static const char *const columns[] = {"arrival_s",    "prompt_tokens", "output_tokens",
                                      "prefix_group", "shared_tokens", "density"};
enum { ARRIVAL, PROMPT, OUTPUT, GROUP, SHARED, DENSITY, N_COLUMNS, N_REQUIRED = DENSITY };

static bool own_head(kvf__trace_input *in, char *line) {
    char *save = NULL;
    int place = 0;
    for (int c = 0; c < N_COLUMNS; c++) in->column[c] = -1;
    for (char *word = strtok_r(line, " \t", &save); word; word = strtok_r(NULL, " \t", &save), place++) {
        int c = 0;
        while (c < N_COLUMNS && strcmp(word, columns[c])) c++;
        if (c == N_COLUMNS)
            return kvf__trace_fail(in,
                                   "column %s: is none of arrival_s, prompt_tokens, output_tokens, prefix_group, "
                                   "shared_tokens, density",
                                   kvf__shown(word).text);
        if (in->column[c] >= 0) return kvf__trace_fail(in, "column %s: stands there twice", columns[c]);
        in->column[c] = place;
    }
    for (int c = 0; c < N_REQUIRED; c++)
        if (in->column[c] < 0)
            return kvf__trace_fail(in, "column %s is missing: the second line names the columns (docs/trace.md)",
                                   columns[c]);
    return true;
}

static bool group_number(kvf__trace_input *in, const char *name, uint32_t *out) {
    if (!strcmp(name, "-")) return *out = KVF__TRACE_NONE, true;
    size_t n = strlen(name);
    if (n > KVF__TRACE_GROUP_MAX)
        return kvf__trace_fail(in, "prefix_group %s: must be at most %d bytes", kvf__shown(name).text,
                               KVF__TRACE_GROUP_MAX);
    for (uint32_t i = in->trace->n_groups; i-- > 0;) /* the latest first: groups come in spells */
        if (!strcmp(in->groups[i], name)) return *out = i, true;
    if (in->trace->n_groups == in->groups_capacity) {
        uint32_t capacity = in->groups_capacity ? in->groups_capacity * 2 : 16;
        void *larger = realloc(in->groups, capacity * sizeof *in->groups);
        if (!larger) return kvf__trace_fail(in, "out of memory");
        in->groups = larger;
        in->groups_capacity = capacity;
    }
    memcpy(in->groups[in->trace->n_groups], name, n + 1);
    *out = in->trace->n_groups++;
    return true;
}

/* "0.1,0.2,..." or "-" */
static bool read_densities(kvf__trace_input *in, char *text, double **out) {
    *out = NULL;
    if (!strcmp(text, "-")) return true;
    uint32_t n = 1;
    for (const char *p = text; *p; p++) n += *p == ',';
    if (in->trace->n_layers && n != in->trace->n_layers)
        return kvf__trace_fail(in, "density: has %u values, earlier lines have %u: one for each layer", n,
                               in->trace->n_layers);
    if (n > 1024) return kvf__trace_fail(in, "density: has %u values: must be at most 1024", n);
    double *values = malloc(n * sizeof *values);
    if (!values) return kvf__trace_fail(in, "out of memory");
    char *p = text;
    for (uint32_t l = 0; l < n; l++) {
        char *end;
        values[l] = strtod(p, &end);
        if (end == p || (l + 1 < n ? *end != ',' : *end != '\0') || !isfinite(values[l]) || values[l] < 0) {
            p[strcspn(p, ",")] = '\0';
            free(values);
            return kvf__trace_fail(in, "density of layer %u, %s: must be a number of 0 or more", l, kvf__shown(p).text);
        }
        p = end + 1;
    }
    in->trace->n_layers = n;
    *out = values;
    return true;
}

static bool own_line(kvf__trace_input *in, char *line, size_t n_bytes) {
    if (!in->reader.line_ended)
        return kvf__trace_fail(in, "has no line end: the file was cut off here; take the line out, or record again");
    if (strlen(line) != n_bytes) return kvf__trace_fail(in, "holds a zero byte");
    if (line[0] == '#' || !line[strspn(line, " \t")]) return true;
    char *save = NULL, *fields[N_COLUMNS] = {NULL};
    int n = 0, wanted = 0;
    for (int c = 0; c < N_COLUMNS; c++) wanted += in->column[c] >= 0;
    for (char *word = strtok_r(line, " \t", &save); word; word = strtok_r(NULL, " \t", &save), n++)
        for (int c = 0; c < N_COLUMNS; c++)
            if (in->column[c] == n) fields[c] = word;
    if (n != wanted) return kvf__trace_fail(in, "has %d columns, the second line names %d", n, wanted);
    kvf__trace_request r = {0};
    if (!kvf__trace_seconds(in, "arrival_s", fields[ARRIVAL], 1, &r.arrival_s) ||
        !kvf__trace_tokens(in, "prompt_tokens", fields[PROMPT], 1, &r.n_prompt) ||
        !kvf__trace_tokens(in, "output_tokens", fields[OUTPUT], 0, &r.n_output) ||
        !group_number(in, fields[GROUP], &r.group) ||
        !kvf__trace_tokens(in, "shared_tokens", fields[SHARED], 0, &r.n_shared))
        return false;
    if (r.group == KVF__TRACE_NONE && r.n_shared)
        return kvf__trace_fail(in, "shared_tokens %u: there is no prefix_group: name one, or say 0", r.n_shared);
    double *densities = NULL;
    if (fields[DENSITY] && !read_densities(in, fields[DENSITY], &densities)) return false;
    bool good = kvf__trace_take(in, r, densities);
    free(densities);
    return good;
}

/* ---- Reading -------------------------------------------------------------------------------------------- */

/* By the first line: which form it is, and what reads the others. own_form: its columns are in the next line. */
static bool recognise(kvf__trace_input *in, char *line, kvf__trace_line *reads, bool *own_form) {
    char *text = line;
    *own_form = false;
    unsigned version = 0;
    int used = 0;
    if (sscanf(text, "kvfold-trace %u%n", &version, &used) == 1 && !text[used]) {
        if (version != KVF__TRACE_VERSION)
            return kvf__trace_fail(in, "kvfold-trace %u: this kvfold reads version %d", version, KVF__TRACE_VERSION);
        *own_form = true;
        *reads = own_line;
        in->trace->form = "kvfold";
        return true;
    }
    if (*text == '{') {
        *reads = kvf__trace_mooncake_line;
        in->trace->form = "mooncake";
        return kvf__trace_mooncake_line(in, text, strlen(text));
    }
    if (strstr(text, "ContextTokens") || strstr(text, "GeneratedTokens") || strstr(text, "TIMESTAMP")) {
        *reads = kvf__trace_azure_line;
        in->trace->form = "azure";
        return kvf__trace_azure_head(in, text);
    }
    if (strstr(text, "Request tokens") || strstr(text, "Response tokens") || !strncmp(text, "Timestamp", 9)) {
        *reads = kvf__trace_burst_line;
        in->trace->form = "burstgpt";
        return kvf__trace_burst_head(in, text);
    }
    return kvf__trace_fail(in,
                           "%s: is no trace: it begins with \"kvfold-trace 1\", the columns of the Azure LLM inference "
                           "or BurstGPT tables, or a JSON object of a Mooncake trace (docs/trace.md)",
                           kvf__shown(text).text);
}

static bool read_lines(kvf__trace_input *in, uint64_t limit) {
    kvf__trace_line reads = NULL;
    bool own_form = false;
    char *copy = NULL;
    size_t capacity = 0;
    bool good = true;
    while (good && (!limit || in->trace->n < limit)) {
        const char *line;
        size_t n;
        kvf__read got = kvf__reader_next(&in->reader, true, &line, &n);
        if (got == KVF__READ_LATER) continue;
        if (got == KVF__READ_END) break;
        if (got == KVF__READ_FAILED) good = false;
        if (got == KVF__READ_LONG) good = kvf__trace_fail(in, "is longer than %d bytes", KVF__TRACE_LINE_MAX);
        if (!good) break;
        kvf__line_skip_mark(&line, &n);
        if (n && line[n - 1] == '\r') n--;
        if (n + 1 > capacity) {
            char *larger = realloc(copy, n * 2 + 256);
            if (!larger) {
                good = kvf__trace_fail(in, "out of memory");
                break;
            }
            copy = larger;
            capacity = n * 2 + 256;
        }
        memcpy(copy, line, n);
        copy[n] = '\0';
        if (!reads)
            good = recognise(in, copy, &reads, &own_form);
        else if (own_form)
            own_form = false, good = own_head(in, copy);
        else
            good = reads(in, copy, n);
    }
    free(copy);
    if (good && (!reads || own_form))
        return kvf__trace_fail(in, reads ? "ends before the line of the columns (docs/trace.md)" : "the file is empty");
    if (good && !in->trace->n) return kvf__trace_fail(in, "there is no request in the file");
    return good;
}

bool kvf__trace_read(const char *path, uint64_t limit, kvf__trace *trace) {
    kvf__trace_input in = {.path = path, .trace = trace};
    *trace = (kvf__trace){0};
    in.reader.fd = -1;
    if (!kvf__reader_open(&in.reader, path, false)) return false;
    in.reader.max_line = KVF__TRACE_LINE_MAX;
    bool good = read_lines(&in, limit);
    kvf__reader_close(&in.reader);
    free(in.seen);
    free(in.groups);
    if (!good) kvf__trace_free(trace);
    return good;
}

/* ---- Writing --------------------------------------------------------------------------------------------- */

void kvf__trace_put_head(FILE *out, bool densities) {
    fprintf(out, "kvfold-trace %d\n", KVF__TRACE_VERSION);
    for (int c = 0; c < N_COLUMNS - !densities; c++) fprintf(out, "%s%s", c ? " " : "", columns[c]);
    fputc('\n', out);
}

void kvf__trace_put(FILE *out, const kvf__trace_request *r, const double *densities, uint32_t n_layers) {
    fprintf(out, "%.6f %u %u ", r->arrival_s, r->n_prompt, r->n_output);
    if (r->group == KVF__TRACE_NONE)
        fputs("- 0", out);
    else
        fprintf(out, "g%u %u", r->group, r->n_shared);
    for (uint32_t l = 0; l < n_layers && densities; l++) fprintf(out, "%s%.6g", l ? "," : " ", densities[l]);
    if (n_layers && !densities) fputs(" -", out);
    fputc('\n', out);
}

bool kvf__trace_write(const char *path, const kvf__trace *t) {
    kvf__out_file out;
    if (!kvf__out_open(&out, path)) return false;
    kvf__trace_put_head(out.file, t->n_layers != 0);
    for (uint64_t i = 0; i < t->n && !ferror(out.file); i++) {
        const kvf__trace_request *r = &t->requests[i];
        const double *own = r->density == KVF__TRACE_NONE ? NULL : t->densities + (size_t)r->density * t->n_layers;
        kvf__trace_put(out.file, r, own, t->n_layers);
    }
    return kvf__out_close(&out);
}
