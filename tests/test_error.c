/* Statuses, and the fields of an error. */
#include <criterion/criterion.h>

#include "base/base.h"

Test(error, statuses_are_pinned) {
    static const struct {
        kvf_status status;
        int number;
        const char *name;
    } all[] = {{KVF_OK, 0, "KVF_OK"},
               {KVF_E_INVALID, -1, "KVF_E_INVALID"},
               {KVF_E_NO_MEMORY, -2, "KVF_E_NO_MEMORY"},
               {KVF_E_DEVICE, -14, "KVF_E_DEVICE"},
               {KVF_E_PEER, -15, "KVF_E_PEER"},
               {KVF_E_TIME, -16, "KVF_E_TIME"}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        cr_assert_eq((int)all[i].status, all[i].number);
        cr_assert_str_eq(kvf_status_name(all[i].status), all[i].name);
    }
    for (int n = 0; n >= KVF_E_TIME; n--) {
        cr_assert_str_neq(kvf_status_text((kvf_status)n), kvf_status_text((kvf_status)1), "%d", n);
        for (int m = 0; m > n; m--) cr_assert_str_neq(kvf_status_text((kvf_status)n), kvf_status_text((kvf_status)m));
    }
}

/* The text is "FIELD VALUE: WHY", and behind it what would do. */
static void expect(const kvf_error *e, const char *text, const char *field, uint64_t have, uint64_t need,
                   const char *why) {
    cr_assert_str_eq(e->text, text);
    cr_assert_str_eq(e->field, field);
    cr_assert(e->have == have && e->need == need && e->rank == -1, "%s", text);
    cr_assert(strlen(why) == e->why_bytes && !strncmp(e->text + e->why, why, e->why_bytes), "%s", text);
}

Test(error, has_its_field_its_value_and_what_would_do) {
    kvf_error e;
    memset(&e, 0x5a, sizeof e);
    cr_assert_eq(kvf__fail(&e, KVF_E_STATE, "plain %d", 1), KVF_E_STATE);
    expect(&e, "plain 1", "", 0, 0, "");
    cr_assert_eq(kvf__fail_field(&e, KVF_E_INVALID, "chunk", 17, 0, "must be a multiple of %d", 16), KVF_E_INVALID);
    expect(&e, "chunk 17: must be a multiple of 16", "chunk", 17, 0, "must be a multiple of 16");
    cr_assert_eq(kvf__fail_size(&e, KVF_E_LIMIT, "kv_bytes", 5, 9, "is small;"), KVF_E_LIMIT);
    expect(&e, "kv_bytes 5: is small; give at least 9", "kv_bytes", 5, 9, "is small;");
    cr_assert_eq(kvf__fail_value(&e, KVF_E_INVALID, "policy", "d3o", "is %s", "unknown"), KVF_E_INVALID);
    expect(&e, "policy d3o: is unknown", "policy", 0, 0, "is unknown");
    cr_assert_eq(kvf__fail_real(&e, KVF_E_INVALID, "rho", 1.5, "is large"), KVF_E_INVALID);
    expect(&e, "rho 1.5: is large", "rho", 0, 0, "is large");
    /* of a call below, from its own text, and cut where it is too long */
    kvf_error above;
    cr_assert_eq(kvf__fail_as(&above, KVF_E_INVALID, &e), KVF_E_INVALID);
    expect(&above, "rho 1.5: is large", "rho", 0, 0, "is large");
    kvf__fail_value(&e, KVF_E_INVALID, "text", "", "%s", e.text);
    expect(&e, "text: rho 1.5: is large", "text", 0, 0, "rho 1.5: is large");
    char large[2000];
    memset(large, 'x', sizeof large - 1);
    large[sizeof large - 1] = '\0';
    kvf__fail_value(&e, KVF_E_INVALID, large, large, "%s", large);
    cr_assert(strlen(e.text) == sizeof e.text - 1 && strlen(e.field) == sizeof e.field - 1);
    cr_assert_eq(e.why + e.why_bytes, sizeof e.text - 1);
    kvf__fail_size(&e, KVF_E_INVALID, "f", 1, 2, "%s", large);
    cr_assert(strlen(e.text) == sizeof e.text - 1 && e.why_bytes <= sizeof e.text);
    cr_assert_eq(kvf__fail_field(NULL, KVF_E_LIMIT, "f", 1, 2, "nobody asks"), KVF_E_LIMIT);
}
