/* What the command shows on a terminal: texts cut to its width. */
#define _POSIX_C_SOURCE 200809L
#include <criterion/criterion.h>
#include <string.h>

#include "tools/text.h"

Test(terminal, r40_texts_fit_a_width_in_any_script) {
    static const struct {
        const char *text;
        int columns;
        const char *fits;
    } cases[] = {
        {"d2o: 3/12 done", 44, "d2o: 3/12 done"},
        {"d2o: 3/12 done", 5, "d2o: "},
        {"d2o", 0, ""},
        {"d2o", -1, ""},
        {"na\u00efve", 4, "na\u00efv"},
        {"\u6f22\u5b57", 4, "\u6f22\u5b57"},
        {"\u6f22\u5b57", 3, "\u6f22"}, /* half a wide character is none */
        {"a\U0001f600b", 3, "a\U0001f600"},
        {"a\u0301b", 2, "a\u0301"}, /* a mark counts as one: shorter, never longer */
        {"\xff\xfe\x1b[2J", 4,
         "??"
         "?["}, /* nothing that moves the cursor */
        {"a\rb\nc\x7f\xc2\x85", 7, "a?b?c??"},
        {"\xe6\xbc", 5, "??"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char out[64];
        kvf__fit(out, sizeof out, cases[i].text, cases[i].columns);
        cr_assert_str_eq(out, cases[i].fits, "case %zu: %s", i, out);
    }
    char small[4];
    kvf__fit(small, sizeof small, "\u6f22\u5b57", 80);
    cr_assert_str_eq(small, "\u6f22");
    kvf__fit(small, sizeof small, "abcdef", 80);
    cr_assert_str_eq(small, "abc");
}
