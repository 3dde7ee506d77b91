/* Events of some head groups of a layer: each gives the bits that an event of the whole layer gives its heads. */
#include "test_policy_rig.h"
#include "tests/counts.h"

enum { N_KV = 4, G = 2, D = 16, PROMPT = 70, CAP = 128, STEPS = 9 };

static float sums[N_KV * G * CAP];

static rig *start(const kvf_policy_options *o, uint32_t hpg, uint32_t threads) {
    rig *r = rig_new((rig_config){.n_seqs = 1,
                                  .n_layers = 1,
                                  .n_kv = N_KV,
                                  .g = G,
                                  .hpg = hpg,
                                  .bs = 8,
                                  .d = D,
                                  .cap = CAP,
                                  .n_arrays = kvf_policy_n_arrays(o),
                                  .threads = threads,
                                  .mass = true});
    rig_open_sized(r, 0, o, 20, 10);
    return r;
}

/* A token in all tables, at the end of each. */
static void append(rig *r, uint64_t seed) {
    for (uint32_t h = 0; h < N_KV; h++) {
        uint64_t s = seed * 1009 + r->next_pos[0] * 31 + h;
        float k[D], v[D];
        for (uint32_t e = 0; e < D; e++) {
            k[e] = (float)rig_normal(&s);
            v[e] = (float)rig_normal(&s);
        }
        rig_put(r, 0, 0, h, r->n_slots[kvf__table_index(&r->view, 0, 0, h)], r->next_pos[0], k, v);
    }
    for (uint32_t g = 0; g < r->n_groups; g++) r->n_slots[g]++;
    r->next_pos[0]++;
}

static void step(rig *r, uint64_t seed) {
    append(r, seed);
    float row[N_KV * CAP] = {0};
    for (uint32_t h = 0; h < N_KV; h++)
        for (uint32_t i = 0; i < r->n_slots[h / r->c.hpg]; i++) {
            uint64_t s = seed * 77 + r->next_pos[0] * 13 + rig_pos(r, 0, 0, h, i) * 3 + h;
            row[h * CAP + i] = (float)rig_uniform(&s);
        }
    rig_observe(r, 0, row, CAP);
}

/* A prompt's event and decode events to keep[g] slots, in the given order of the groups; n_first of them in a batch of
 * their own. */
static void live(rig *r, const uint32_t *keep, const uint32_t *order, uint32_t n_first, uint64_t fresh, uint64_t seed) {
    uint64_t s = seed;
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) sums[i] = (float)rig_uniform(&s);
    for (uint32_t i = 0; i < PROMPT; i++) append(r, seed);
    r->prompt_sums[0] = sums;
    r->prompt_stride = CAP;
    for (uint32_t kind = 0; kind < 2; kind++) {
        kvf_event events[N_KV];
        uint32_t n = keep ? r->n_groups : 1;
        for (uint32_t i = 0; i < n && keep; i++) events[i] = (kvf_event){0, 0, keep[order[i]], kind, order[i], 1};
        if (!keep) events[0] = (kvf_event){0, 0, order[0], kind, 0, 0};
        if (n_first) rig_events(r, events, n_first, fresh);
        if (n_first < n) rig_events(r, events + n_first, n - n_first, fresh >> 7);
        r->prompt_sums[0] = NULL;
        for (uint32_t i = 0; i < STEPS && !kind; i++) step(r, seed);
    }
}

/* What one head holds, as bytes. */
static size_t head_bytes(const rig *r, uint32_t h, unsigned char *out) {
    kvf__head x = rig_head(r, 0, 0, h);
    size_t n = 0, row_bytes = D * kvf_dtype_bytes(r->c.dtype);
    double tau = kvf_policy_tau(r->state, 0, 0, h);
    memcpy(out, &tau, sizeof tau);
    n += sizeof tau;
    for (uint32_t i = 0; i < x.n_slots; i++) {
        memcpy(out + n, kvf__k_row(&x, i), row_bytes);
        memcpy(out + n + row_bytes, kvf__v_row(&x, i), row_bytes);
        memcpy(out + n + 2 * row_bytes, &r->pages.pos[kvf__slot_index(&x, i)], 4);
        n += 2 * row_bytes + 4;
        for (uint32_t a = 0; a < r->c.n_arrays; a++, n += 4) memcpy(out + n, kvf__score_at(&x, &r->scores, a, i), 4);
    }
    return n;
}

Test(policy_groups, an_event_of_a_group_is_the_layers_event_of_its_heads) {
    static const char *const policies[] = {"d2o", "h2o", "cam"};
    static unsigned char a[1 << 16], b[1 << 16];
    uint64_t different = 0;
    for (uint64_t seed = 0; seed < 24; seed++) {
        kvf_policy_options o = rig_policy(policies[seed % 3], NULL);
        if (seed % 12 == 3) o.merge = KVF_MERGE_MASS;
        o.scope = KVF_SCOPE_HEAD;
        uint32_t hpg = seed / 6 % 2 ? 2 : 1, n_groups = N_KV / hpg, order[N_KV], keep[N_KV];
        uint64_t s = seed;
        rig_shuffle(order, n_groups, &s);
        for (uint32_t g = 0; g < n_groups; g++) keep[g] = 30 + (uint32_t)(rig_random(&s) % 6);
        rig *r = start(&o, hpg, 1 + seed % 3);
        live(r, keep, order, (uint32_t)(seed % (n_groups + 1)), rig_random(&s), seed);
        uint64_t counted = 0;
        for (uint32_t g = 0; g < n_groups; g++) {
            rig *whole = start(&o, N_KV, 1);
            live(whole, NULL, &keep[g], 1, 0, seed);
            for (uint32_t h = g * hpg; h < (g + 1) * hpg; h++) {
                size_t n = head_bytes(r, h, a), m = head_bytes(whole, h, b);
                cr_assert(n == m && !memcmp(a, b, n), "seed %llu: head %u differs", (unsigned long long)seed, h);
            }
            kvf_policy_counts counts = counts_of(whole->state, 0);
            counted += (counts.merged + counts.dropped) * hpg;
            different += keep[g] != keep[0];
            rig_free(whole);
        }
        kvf_policy_counts counts = counts_of(r->state, 0);
        cr_assert_eq((counts.merged + counts.dropped) * N_KV, counted);
        rig_free(r);
    }
    cr_assert_gt(different, 8);
}

Test(policy_groups, an_event_names_groups_that_there_are) {
    kvf_policy_options o = rig_policy("h2o", NULL);
    rig *r = start(&o, 1, 1);
    for (uint32_t i = 0; i < 40; i++) append(r, 1);
    r->n_slots[2] = 39;
    const kvf_compact_item item = {1, 0, 0, (const uint32_t[]){30, 31, 39, 30}};
    const uint32_t *const dst[N_KV] = {NULL};
    const kvf_compaction compaction = {&item, 1, N_KV, dst};
    r->prompt_sums[0] = sums;
    r->prompt_stride = CAP;
    kvf_policy_batch b = rig_batch(r);
    b.compaction = &compaction;
    b.n_events = 1;
    kvf_policy_ops ops = kvf__policy_ops_resolve(o.ops);
    kvf_event e = {0, 0, 30, KVF_EVENT_PROMPT, 4, 1};
    b.events = &e;
    FAILS(ops.match(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "groups [4, 4 + 1): the view has 4");
    e.group_begin = 3;
    e.n_groups = UINT32_MAX;
    FAILS(ops.match(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "the view has 4");
    e.group_begin = 1;
    e.n_groups = 2;
    FAILS(ops.match(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "group 2 has 39 slots, group 1 40");
    e.n_groups = 1;
    OK(ops.match(r->state, NULL, &b, r->plan, err));
    cr_assert(r->plan->n_entries == 10 && r->plan->events[0].n_before == 40);
    e.group_begin = 0;
    FAILS(ops.gate(r->state, NULL, &b, r->plan, err), KVF_E_STATE, "not the one the plan was made for");
    e.group_begin = 1; /* keeps 30, the item 31 of this group */
    OK(ops.gate(r->state, NULL, &b, r->plan, err));
    FAILS(ops.apply(r->state, NULL, &b, r->plan, err), KVF_E_INVALID, "is not this event's");
    e.group_begin = 0;
    OK(ops.match(r->state, NULL, &b, r->plan, err));
    OK(ops.gate(r->state, NULL, &b, r->plan, err));
    OK(ops.apply(r->state, NULL, &b, r->plan, err));
    kvf__policy_seq *s = kvf__policy_seq_get(r->state, 0);
    cr_assert(s->scored[0] == 30 && s->scored[1] == 0 && counts_of(r->state, 0).dropped == 10);
    rig_free(r);
}
