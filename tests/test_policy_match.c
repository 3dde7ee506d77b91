/* match value: what it finds among values is what match key finds among keys that are the same rows. */
#include "tests/test_policy_rig.h"

enum { SLOTS = 90, DIM = 64 };

/* A rig whose keys and values are two sets of rows; swapped: the other way round. */
static rig *filled(kvf_dtype dtype, uint32_t bs, bool swapped, uint64_t seed) {
    rig_config c = {.n_seqs = 1,
                    .n_layers = 1,
                    .n_kv = 2,
                    .g = 1,
                    .hpg = 2,
                    .bs = bs,
                    .d = DIM,
                    .cap = 128,
                    .n_arrays = 1,
                    .threads = 1,
                    .dtype = dtype};
    rig *r = rig_new(c);
    for (uint32_t slot = 0; slot < SLOTS; slot++)
        for (uint32_t h = 0; h < 2; h++) {
            float k[DIM], v[DIM];
            for (uint32_t i = 0; i < DIM; i++) k[i] = (float)rig_normal(&seed), v[i] = (float)rig_normal(&seed);
            rig_put(r, 0, 0, h, slot, slot, swapped ? v : k, swapped ? k : v);
            *rig_score(r, 0, 0, h, 0, slot) = (float)rig_uniform(&seed);
        }
    rig_set_slots(r, 0, 0, SLOTS);
    r->next_pos[0] = SLOTS;
    return r;
}

static void match(rig *r, const char *value, uint32_t keep) {
    kvf_policy_options o = rig_policy("d2o", NULL);
    OK(kvf_policy_option_set(&o, "match", value, err));
    rig_open_sized(r, 0, &o, keep / 2, keep - keep / 2);
    kvf_event e = {0, 0, keep, KVF_EVENT_PROMPT, 0, 0};
    kvf_policy_batch b = rig_batch(r);
    b.events = &e;
    b.n_events = 1;
    OK(kvf_policy_ops_resolve(o.ops).match(r->state, r->stream, &b, r->plan, err));
}

Test(policy_match, values_are_matched_as_keys_are) {
    static const kvf_dtype types[] = {KVF_F32, KVF_F16, KVF_BF16};
    uint32_t n_moved = 0;
    for (uint32_t i = 0; i < 24; i++) { /* one and two evicted rows, and many; blocks of half a group, of one, of two */
        uint32_t keep = i % 4 == 0 ? SLOTS - 1 : i % 4 == 1 ? SLOTS - 2 : SLOTS - 10 * (i % 4), bs = 8u << i % 3;
        rig *a = filled(types[i % 3], bs, false, 7 + i), *b = filled(types[i % 3], bs, true, 7 + i);
        rig *keys = filled(types[i % 3], bs, false, 7 + i);
        match(a, "value", keep);
        match(b, "key", keep);
        match(keys, "key", keep);
        cr_assert_eq(a->plan->n_entries, 2ull * (SLOTS - keep));
        for (uint64_t k = 0; k < a->plan->n_entries; k++) {
            const kvf_plan_entry *x = &a->plan->entries[k], *y = &b->plan->entries[k];
            cr_assert(x->slot == y->slot && x->target == y->target && x->u == y->u, "case %u, entry %llu", i,
                      (unsigned long long)k);
            n_moved += x->target != keys->plan->entries[k].target;
        }
        rig_free(a);
        rig_free(b);
        rig_free(keys);
    }
    cr_assert_gt(n_moved, 100u, "values and keys agree");
}

Test(policy_match, the_option_is_read_and_refused) {
    kvf_policy_options o = rig_policy("d2o", NULL);
    char text[16];
    cr_assert_eq(o.match, KVF_MATCH_KEY);
    OK(kvf_policy_option_set(&o, "match", "value", err));
    OK(kvf_policy_option_get(&o, "match", text, sizeof text));
    cr_assert(o.match == KVF_MATCH_VALUE && !strcmp(text, "value"));
    cr_assert_eq(kvf_policy_option_set(&o, "match", "both", NULL), KVF_E_INVALID);
}
