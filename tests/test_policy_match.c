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
    OK(kvf__policy_ops_resolve(o.ops).match(r->state, r->stream, &b, r->plan, err));
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

/* Keys of one kind a turn: at random, nearly the same, one of four exactly, growing towards one, of far smaller and larger
 * norms; with zeros, NaN and infinity among them. */
static void draw_key(uint32_t kind, uint32_t slot, uint32_t d, uint64_t *seed, float *k) {
    uint64_t direction = kind == 2 ? 1 + slot % 4 : 1;
    for (uint32_t i = 0; i < d; i++) {
        float fixed = (float)rig_normal(&direction), noise = (float)rig_normal(seed);
        k[i] = kind == 1   ? fixed + 1e-3f * noise
               : kind == 2 ? fixed
               : kind == 3 ? fixed * (float)slot * 0.01f + noise
               : kind == 4 ? noise * (slot % 3 == 0   ? 1e-6f
                                      : slot % 3 == 1 ? 1.0f
                                                      : 200.0f)
                           : noise;
    }
    if (slot % 29 == 11) memset(k, 0, d * sizeof *k);
    if (kind == 0 && slot % 41 == 17) k[slot % d] = slot % 2 ? NAN : INFINITY;
}

/* An event that evicts a few slots, in all forms: the same plan, with the bits of plain C, in which every kept row is compared
 * by folds. */
Test(policy_match, a_few_victims_find_the_same_keys_on_every_path) {
    static const kvf_cpu_path paths[] = {KVF_CPU_SCALAR, KVF_CPU_AVX2, KVF_CPU_AVX512};
    static const uint32_t dims[] = {8, 24, 64, 128, 256}, counts[] = {1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33};
    enum { N_COUNTS = sizeof counts / sizeof *counts };
    for (uint32_t turn = 0; turn < 3 * N_COUNTS; turn++) {
        uint32_t d = dims[turn % 5], n_evict = counts[turn % N_COUNTS], n = 60 + n_evict + turn * 7 % 150;
        static kvf_plan_entry want[64];
        for (int p = 0; p < 3; p++) {
            if (!kvf_cpu_has_path(paths[p])) continue;
            rig *r = rig_new((rig_config){.n_seqs = 1,
                                          .n_layers = 1,
                                          .n_kv = 1,
                                          .g = 1,
                                          .hpg = 1,
                                          .bs = 8u << turn % 4,
                                          .d = d,
                                          .cap = 256,
                                          .n_arrays = 1,
                                          .threads = 1,
                                          .dtype = turn % 7 == 6 ? KVF_BF16 : KVF_F16,
                                          .path = paths[p]});
            kvf_policy_options o = rig_policy("d2o", NULL);
            OK(kvf_policy_option_set(&o, "match", turn % 2 ? "key" : "value", err));
            uint64_t seed = 5 + turn;
            for (uint32_t slot = 0; slot < n;
                 slot++) { /* positions descend, so that ties do not go to the first slot */
                float k[256];
                draw_key(turn % 5, slot, d, &seed, k);
                rig_put(r, 0, 0, 0, slot, n - 1 - slot, k, k);
                *rig_score(r, 0, 0, 0, 0, slot) = (float)rig_uniform(&seed);
            }
            rig_set_slots(r, 0, 0, n);
            r->next_pos[0] = n;
            rig_open_sized(r, 0, &o, n - n_evict - 5, 5);
            kvf_event e = {0, 0, n - n_evict, KVF_EVENT_DECODE, 0, 0};
            kvf_policy_batch b = rig_batch(r);
            b.events = &e;
            b.n_events = 1;
            OK(kvf__policy_ops_resolve(o.ops).match(r->state, r->stream, &b, r->plan, err));
            cr_assert_eq(r->plan->n_entries, n_evict);
            for (uint32_t i = 0; i < n_evict; i++) {
                const kvf_plan_entry *x = &r->plan->entries[i];
                if (p == 0) want[i] = *x;
                cr_assert(x->target < n && x->slot == want[i].slot && x->target == want[i].target &&
                              memcmp(&x->u, &want[i].u, sizeof x->u) == 0,
                          "turn %u, path %d: slot %u to %u (%.9g), not %u to %u (%.9g)", turn, p, x->slot, x->target,
                          (double)x->u, want[i].slot, want[i].target, (double)want[i].u);
            }
            rig_free(r);
        }
    }
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
