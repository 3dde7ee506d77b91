/* tests/calls.h: public functions with arguments that are wrong, one at a time: NULL for each pointer, the largest number for
 * each number, NaN for each real. A header promises that this ends with an error, or does no harm.
 *
 * A test file lists the functions of its library; tests/check_docs.py sees to it that none is missing.
 *     #define CALLS(S, V) S(text, name, "expectations", arguments) V(name, "expectations", arguments) ...
 * S: it returns a kvf_status, and with the arguments as they stand KVF_OK. V: it returns something else. An expectation is
 * what comes of the argument at that place:
 *     i  KVF_E_INVALID            f  some failure
 *     o  it is optional or there is no number too large: KVF_OK
 *     e  as o, a kvf_error: where the call fails it has a text
 *     a  no harm is done          -  not tried: an array is as long as the caller says, a name as long as its NUL
 * text says where else the text of a failure is: m the manager, s the scheduler, p the policy state, n nowhere.
 *     #define FIELDS(F) F(id, text, 'i', assignment, call) ...
 * tries one wrong field of a struct likewise. */
#ifndef KVF_TESTS_CALLS_H
#define KVF_TESTS_CALLS_H

#include <criterion/criterion.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvfold/kvfold.h"

/* The argument, or the wrong one of its type at its turn. */
#define WRONG(a)                              \
    _Generic((a), int                         \
             : INT_MAX, uint32_t              \
             : UINT32_MAX, uint64_t           \
             : UINT64_MAX, unsigned long long \
             : UINT64_MAX, float              \
             : NAN, double                    \
             : NAN, default                   \
             : (void *)0)
#define ARG(i, a) (at == (i) ? WRONG(a) : (a))
#define ARGS1(a) ARG(0, a)
#define ARGS2(a, b) ARG(0, a), ARG(1, b)
#define ARGS3(a, b, c) ARGS2(a, b), ARG(2, c)
#define ARGS4(a, b, c, d) ARGS3(a, b, c), ARG(3, d)
#define ARGS5(a, b, c, d, e) ARGS4(a, b, c, d), ARG(4, e)
#define ARGS6(a, b, c, d, e, f) ARGS5(a, b, c, d, e), ARG(5, f)
#define ARGS7(a, b, c, d, e, f, g) ARGS6(a, b, c, d, e, f), ARG(6, g)
#define ARGS8(a, b, c, d, e, f, g, h) ARGS7(a, b, c, d, e, f, g), ARG(7, h)
#define PICK(a, b, c, d, e, f, g, h, name, ...) name
#define ARGS(...) PICK(__VA_ARGS__, ARGS8, ARGS7, ARGS6, ARGS5, ARGS4, ARGS3, ARGS2, ARGS1, none)(__VA_ARGS__)

typedef struct call {
    const char *name, *expect;
    long (*run)(int at);
    char text;
    bool fallible;
} call;

#define S_RUN(text, name, expect, ...) \
    static long run_##name(int at) { return (long)name(ARGS(__VA_ARGS__)); }
#define V_RUN(name, expect, ...)       \
    static long run_##name(int at) {   \
        (void)name(ARGS(__VA_ARGS__)); \
        return 0;                      \
    }
#define F_RUN(id, text, expect, assign, ...) \
    static long run_field_##id(int at) {     \
        (void)at;                            \
        assign;                              \
        return (long)(__VA_ARGS__);          \
    }
#define S_CALL(text, name, expect, ...) {#name, expect, run_##name, text, true},
#define V_CALL(name, expect, ...) {#name, expect, run_##name, 'n', false},
#define F_CALL(id, text, expect, assign, ...) {#id ": " #assign, expect, run_field_##id, text, true},

/* Of a test file: a world for each call, and the texts of its objects. */
typedef struct world_of_calls {
    void (*begin)(void);
    void (*end)(void);
    const char *(*text)(char of);
    kvf_error *err;
} world_of_calls;

static inline void expect_of(const world_of_calls *w, const call *c, int at, char expect, const char *with) {
    long status = c->run(at);
    const char *name = kvf_status_name((kvf_status)status);
    if (!c->fallible) return;
    if (expect == 'i') cr_expect(status == KVF_E_INVALID, "%s, %s: %s", c->name, with, name);
    if (expect == 'f') cr_expect(status < 0, "%s, %s: %s", c->name, with, name);
    if (expect == 'o' || expect == 'e') cr_expect(status == KVF_OK, "%s, %s: %s", c->name, with, name);
    if (status == KVF_OK || expect == 'e') return;
    const char *text = strchr(c->expect, 'e') || c->text == 'e' ? w->err->text : at == 0 ? NULL : w->text(c->text);
    cr_expect(!text || *text, "%s, %s: %s without a text", c->name, with, name);
}

static inline uint32_t try_calls(const world_of_calls *w, const call *calls, size_t n) {
    uint32_t n_tried = 0;
    for (size_t i = 0; i < n; i++) {
        char with[64];
        for (int at = -1; at < (int)strlen(calls[i].expect); at++) {
            if (at >= 0 && calls[i].expect[at] == '-') continue;
            snprintf(with, sizeof with, at < 0 ? "as it stands" : "argument %d wrong", at + 1);
            if (getenv("KVF_SHOW_CALLS")) fprintf(stderr, "%s, %s\n", calls[i].name, with); /* which one crashes */
            w->begin();
            expect_of(w, &calls[i], at, at < 0 ? 'o' : calls[i].expect[at], with);
            w->end();
            n_tried++;
        }
    }
    return n_tried;
}

static inline void try_fields(const world_of_calls *w, const call *fields, size_t n) {
    for (size_t i = 0; i < n; i++) {
        w->begin();
        expect_of(w, &fields[i], 1, fields[i].expect[0], "a field wrong");
        w->end();
    }
}

#endif
