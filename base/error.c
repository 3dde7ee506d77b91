/* The detail of a failure. libkvfold_cuda, which links nothing of base/, has a copy. */
#include <stdio.h>

#include "base/base.h"

const kvf_error kvf__no_error = {.rank = -1};

/* value: "" for none. The arguments may lie in what *err held before. */
static kvf_status fail(kvf_error *err, kvf_status status, const char *field, const char *value, const char *format,
                       va_list args) {
    kvf_error e = kvf__no_error;
    if (!err) return status;
    if (field) {
        snprintf(e.field, sizeof e.field, "%s", field);
        snprintf(e.text, sizeof e.text / 2, "%s%s%s: ", field, *value ? " " : "", value);
        e.why = (uint16_t)strlen(e.text);
    }
    vsnprintf(e.text + e.why, sizeof e.text - e.why, format, args);
    if (field) e.why_bytes = (uint16_t)strlen(e.text + e.why);
    *err = e;
    return status;
}

static kvf_status fail_number(kvf_error *err, kvf_status status, const char *field, uint64_t have, uint64_t need,
                              const char *format, va_list args) {
    char shown[32];
    snprintf(shown, sizeof shown, "%llu", (unsigned long long)have);
    status = fail(err, status, field, shown, format, args);
    if (err) err->have = have, err->need = need;
    return status;
}

#define FAIL(call)          \
    va_list args;           \
    va_start(args, format); \
    status = call;          \
    va_end(args);           \
    return status

kvf_status kvf__fail(kvf_error *err, kvf_status status, const char *format, ...) {
    FAIL(fail(err, status, NULL, "", format, args));
}

kvf_status kvf__fail_value(kvf_error *err, kvf_status status, const char *field, const char *value, const char *format,
                           ...) {
    FAIL(fail(err, status, field, value, format, args));
}

kvf_status kvf__fail_real(kvf_error *err, kvf_status status, const char *field, double value, const char *format, ...) {
    char shown[32];
    snprintf(shown, sizeof shown, "%g", value);
    FAIL(fail(err, status, field, shown, format, args));
}

kvf_status kvf__fail_field(kvf_error *err, kvf_status status, const char *field, uint64_t have, uint64_t need,
                           const char *format, ...) {
    FAIL(fail_number(err, status, field, have, need, format, args));
}

kvf_status kvf__fail_size(kvf_error *err, kvf_status status, const char *field, uint64_t have, uint64_t need,
                          const char *format, ...) {
    va_list args;
    va_start(args, format);
    status = fail_number(err, status, field, have, need, format, args);
    va_end(args);
    if (!err) return status;
    size_t n = strlen(err->text);
    snprintf(err->text + n, sizeof err->text - n, " give at least %llu", (unsigned long long)need);
    return status;
}

kvf_status kvf__fail_as(kvf_error *err, kvf_status status, const kvf_error *why) {
    if (err && err != why) *err = *why;
    return status;
}
