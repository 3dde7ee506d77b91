/* The public traces: Azure LLM inference (2023, 2024) and BurstGPT, as CSV; Mooncake, as JSON lines. */
#define _POSIX_C_SOURCE 200809L
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/fields.h"
#include "tools/trace.h"

/* ---- Tables of commas ------------------------------------------------------------------------------ */

/* The next field of a line: without blanks and quotes around it; NULL past the last. */
static char *next_field(char **line) {
    char *field = *line;
    if (!field) return NULL;
    field += strspn(field, " \t");
    char *end;
    if (*field == '"') {
        field++;
        end = field + strcspn(field, "\"");
        char *comma = strchr(end, ',');
        *line = comma ? comma + 1 : NULL;
    } else {
        end = field + strcspn(field, ",");
        *line = *end ? end + 1 : NULL;
        while (end > field && (end[-1] == ' ' || end[-1] == '\t')) end--;
    }
    *end = '\0';
    return field;
}

static bool read_head(kvf__trace_input *in, char *line, const char *const *names, int n) {
    char *rest = line, *field;
    for (int c = 0; c < n; c++) in->column[c] = -1;
    for (int place = 0; (field = next_field(&rest)); place++)
        for (int c = 0; c < n; c++)
            if (!strcmp(field, names[c])) in->column[c] = place;
    for (int c = 0; c < n; c++)
        if (in->column[c] < 0)
            return kvf__trace_fail(in, "column %s is missing: a table of this kind has %s, %s and %s", names[c],
                                   names[0], names[1], names[2]);
    return true;
}

/* The wanted fields of a line; false after a message when one is missing. */
static bool read_fields(kvf__trace_input *in, char *line, size_t n_bytes, const char *const *names, char **fields,
                        int n) {
    if (strlen(line) != n_bytes) return kvf__trace_fail(in, "holds a zero byte");
    char *rest = line, *field;
    for (int c = 0; c < n; c++) fields[c] = NULL;
    for (int place = 0; (field = next_field(&rest)); place++)
        for (int c = 0; c < n; c++)
            if (in->column[c] == place) fields[c] = field;
    for (int c = 0; c < n; c++)
        if (!fields[c] || !*fields[c])
            return kvf__trace_fail(in, "%s is missing: the line was cut off, or has fewer columns than the first",
                                   names[c]);
    return true;
}

/* ---- Azure ------------------------------------------------------------------------------------------- */

static const char *const azure_columns[] = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"};

/* Days since 1970-01-01 of a date of the Gregorian calendar. */
static int64_t days_of(int year, int month, int day) {
    int64_t y = year - (month <= 2), era = (y >= 0 ? y : y - 399) / 400, of_era = y - era * 400;
    int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

/* "2023-11-16 18:17:03.9799600", also with T, and with an offset (+00:00, Z). Days and seconds are separate: a double
 * holds the seconds of a day to a tenth of a nanosecond. */
static bool read_date(const char *text, int64_t *day, double *second) {
    int year, month, date, hour, minute, used = 0;
    double seconds;
    if (sscanf(text, "%4d-%2d-%2d%*1[ T]%2d:%2d:%lf%n", &year, &month, &date, &hour, &minute, &seconds, &used) != 6)
        return false;
    if (month < 1 || month > 12 || date < 1 || date > 31 || hour < 0 || hour > 23 || minute < 0 || minute > 59 ||
        !(seconds >= 0 && seconds < 61))
        return false;
    int away_hours = 0, away_minutes = 0, more = 0;
    const char *zone = text + used;
    if (*zone == '+' || *zone == '-') {
        if (sscanf(zone + 1, "%2d:%2d%n", &away_hours, &away_minutes, &more) != 2 || zone[1 + more]) return false;
        if (*zone == '-') away_hours = -away_hours, away_minutes = -away_minutes;
    } else if (*zone && strcmp(zone, "Z")) {
        return false;
    }
    *day = days_of(year, month, date);
    *second = (hour - away_hours) * 3600.0 + (minute - away_minutes) * 60.0 + seconds;
    return true;
}

bool kvf__trace_azure_head(kvf__trace_input *in, char *line) { return read_head(in, line, azure_columns, 3); }

bool kvf__trace_azure_line(kvf__trace_input *in, char *line, size_t n_bytes) {
    if (!*line) return true;
    char *fields[3];
    if (!read_fields(in, line, n_bytes, azure_columns, fields, 3)) return false;
    int64_t day;
    double second;
    if (!read_date(fields[0], &day, &second))
        return kvf__trace_fail(in, "TIMESTAMP %s: must be a date and time as 2023-11-16 18:17:03.9799600",
                               kvf__shown(fields[0]).text);
    if (!in->origin_set) in->origin_set = true, in->origin_day = day, in->origin_s = second;
    double since = (double)(day - in->origin_day) * 86400.0 + (second - in->origin_s);
    kvf__trace_request r = {.arrival_s = since, .group = KVF__TRACE_NONE};
    return kvf__trace_tokens(in, "ContextTokens", fields[1], 1, &r.n_prompt) &&
           kvf__trace_tokens(in, "GeneratedTokens", fields[2], 0, &r.n_output) && kvf__trace_take(in, r, NULL);
}

/* ---- BurstGPT ------------------------------------------------------------------------------------------ */

static const char *const burst_columns[] = {"Timestamp", "Request tokens", "Response tokens"};

bool kvf__trace_burst_head(kvf__trace_input *in, char *line) { return read_head(in, line, burst_columns, 3); }

/* Its failed requests have no response, some not even a prompt: they held no cache and are left out. */
bool kvf__trace_burst_line(kvf__trace_input *in, char *line, size_t n_bytes) {
    if (!*line) return true;
    char *fields[3];
    kvf__trace_request r = {.group = KVF__TRACE_NONE};
    if (!read_fields(in, line, n_bytes, burst_columns, fields, 3) ||
        !kvf__trace_seconds(in, "Timestamp", fields[0], 1, &r.arrival_s) ||
        !kvf__trace_tokens(in, "Request tokens", fields[1], 0, &r.n_prompt) ||
        !kvf__trace_tokens(in, "Response tokens", fields[2], 0, &r.n_output))
        return false;
    if (!in->origin_set) in->origin_set = true, in->origin_s = r.arrival_s;
    r.arrival_s -= in->origin_s;
    if (r.n_prompt && r.n_output) return kvf__trace_take(in, r, NULL);
    in->trace->n_skipped++;
    return true;
}

/* ---- Mooncake -------------------------------------------------------------------------------------------- */

static uint64_t hash_id(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Puts an id into the set; 1 when it was there, 0 when not, -1 when out of memory. */
static int see(kvf__trace_input *in, uint64_t id) {
    if (in->n_seen * 4 >= in->n_slots * 3) {
        uint64_t n = in->n_slots ? in->n_slots * 2 : 1024, *slots = calloc(n, sizeof *slots);
        if (!slots) return -1;
        for (uint64_t i = 0; i < in->n_slots; i++) {
            if (!in->seen[i]) continue;
            uint64_t at = hash_id(in->seen[i]) & (n - 1);
            while (slots[at]) at = (at + 1) & (n - 1);
            slots[at] = in->seen[i];
        }
        free(in->seen);
        in->seen = slots;
        in->n_slots = n;
    }
    uint64_t at = hash_id(id + 1) & (in->n_slots - 1);
    for (; in->seen[at]; at = (at + 1) & (in->n_slots - 1))
        if (in->seen[at] == id + 1) return 1;
    in->seen[at] = id + 1;
    in->n_seen++;
    return 0;
}

static bool member_tokens(kvf__trace_input *in, const json_t *o, const char *key, uint32_t least, uint32_t *out) {
    const json_t *value = json_object_get(o, key);
    if (!value) return kvf__trace_fail(in, "%s is missing: a line has timestamp, input_length and output_length", key);
    return kvf__trace_tokens(in, key, json_is_number(value) ? kvf__field_shown(value).text : "of another type", least,
                             out);
}

static bool keep_hash_id(kvf__trace *t, uint64_t id) {
    if (t->n_hash_ids == t->hash_capacity) {
        uint64_t capacity = t->hash_capacity ? t->hash_capacity * 2 : 1024;
        uint64_t *larger = realloc(t->hash_ids, capacity * sizeof *larger);
        if (!larger) return false;
        t->hash_ids = larger;
        t->hash_capacity = capacity;
    }
    t->hash_ids[t->n_hash_ids++] = id;
    return true;
}

/* Leading blocks that an earlier request had: an id stands for a block and all before it. */
static bool shared_blocks(kvf__trace_input *in, const json_t *ids, kvf__trace_request *r) {
    size_t i, n_shared = 0;
    const json_t *id;
    if (!json_is_array(ids)) return kvf__trace_fail(in, "hash_ids: must be a list of numbers");
    r->hash_begin = in->trace->n_hash_ids;
    json_array_foreach(ids, i, id) {
        json_int_t number = 0;
        if (!kvf__field_whole(id, &number) || number < 0)
            return kvf__trace_fail(in, "hash_ids[%zu]: must be a whole number of 0 or more", i);
        int seen = see(in, (uint64_t)number);
        if (seen < 0 || !keep_hash_id(in->trace, (uint64_t)number)) return kvf__trace_fail(in, "out of memory");
        if (seen && n_shared == i) n_shared++;
    }
    if (!json_array_size(ids)) return true;
    r->n_hash_ids = (uint32_t)json_array_size(ids);
    uint64_t shared = (uint64_t)n_shared * KVF__TRACE_HASH_TOKENS, first = in->trace->hash_ids[r->hash_begin];
    r->group = (uint32_t)(first % KVF__TRACE_NONE);
    r->n_shared = (uint32_t)(shared < r->n_prompt ? shared : r->n_prompt);
    return true;
}

static bool mooncake_object(kvf__trace_input *in, const json_t *o) {
    kvf__trace_request r = {.group = KVF__TRACE_NONE};
    const json_t *time = json_object_get(o, "timestamp"), *ids = json_object_get(o, "hash_ids");
    if (!time) return kvf__trace_fail(in, "timestamp is missing: a line has timestamp, input_length and output_length");
    r.arrival_s = json_number_value(time) / 1000; /* milliseconds */
    if (!json_is_number(time) || !isfinite(r.arrival_s) || r.arrival_s < 0)
        return kvf__trace_fail(in, "timestamp: must be a time of 0 or more, in milliseconds");
    if (!in->origin_set) in->origin_set = true, in->origin_s = r.arrival_s;
    r.arrival_s -= in->origin_s;
    return member_tokens(in, o, "input_length", 1, &r.n_prompt) &&
           member_tokens(in, o, "output_length", 0, &r.n_output) && (!ids || shared_blocks(in, ids, &r)) &&
           kvf__trace_take(in, r, NULL);
}

bool kvf__trace_mooncake_line(kvf__trace_input *in, char *line, size_t n_bytes) {
    if (!line[strspn(line, " \t")]) return true;
    json_error_t error;
    json_t *o = json_loadb(line, n_bytes, 0, &error);
    if (!json_is_object(o)) {
        json_decref(o);
        return kvf__trace_fail(in, "is no JSON object (%s at column %d): the line was cut off, or is of another form",
                               o ? "another value" : error.text, o ? 1 : error.column);
    }
    bool good = mooncake_object(in, o);
    json_decref(o);
    return good;
}
