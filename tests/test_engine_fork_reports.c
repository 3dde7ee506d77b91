/* What others reported of forks, at the level of the engine: stale keys after a split, state that is never reset; and the
 * order in which tables that share blocks are written. */
#define _DEFAULT_SOURCE
#include "d2o_policy/events.h"
#include "tests/engine_forks_rig.h"

TestSuite(engine_fork_reports, .init = open_model, .fini = close_model);

/* ---- C8: a page of positions stands for the keys ------------------------------------------------------------ */

enum { SLOTS = 8, N_BLOCKS = 24 };

typedef struct memory {
    kvf_manager *m;
    kvf_pages pages;
    uint32_t pos[N_BLOCKS * SLOTS];
    float k[N_BLOCKS * SLOTS], v[N_BLOCKS * SLOTS];
    kvf_copy items[64];
    kvf_copy_list copies;
} memory;

static memory *memory_create(void) {
    memory *x = calloc(1, sizeof *x);
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = 2;
    c.n_kv_heads = 1;
    c.block_size = SLOTS;
    c.n_blocks = N_BLOCKS;
    c.max_seqs = 4;
    c.max_slots = 64;
    cr_assert_eq(kvf_manager_create(&c, &x->m, NULL), KVF_OK);
    x->pages = (kvf_pages){.struct_size = sizeof x->pages,
                           .dtype = KVF_F32,
                           .n_blocks = N_BLOCKS,
                           .block_size = SLOTS,
                           .heads_per_group = 1,
                           .head_dim = 1,
                           .k = x->k,
                           .v = x->v,
                           .k_block_stride = SLOTS * 4,
                           .v_block_stride = SLOTS * 4,
                           .pos = x->pos};
    x->copies = (kvf_copy_list){x->items, 0, 64};
    memset(x->pos, 0xff, sizeof x->pos);
    return x;
}

static void audit(memory *x) {
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_audit(x->m, &err), KVF_OK, "%s", err.text);
}

static uint32_t *slot_at(memory *x, kvf_seq seq, uint32_t layer, uint32_t slot) {
    const uint32_t *row;
    cr_assert_eq(kvf_seq_table(x->m, seq, layer, 0, NULL, NULL, &row), KVF_OK);
    return &x->pos[row[slot / SLOTS] * SLOTS + slot % SLOTS];
}

static uint32_t n_slots_of(memory *x, kvf_seq seq, uint32_t layer) {
    uint32_t n = 0;
    cr_assert_eq(kvf_seq_table(x->m, seq, layer, 0, &n, NULL, NULL), KVF_OK);
    return n;
}

/* Appends values from first on; returns how many blocks were copied. */
static uint32_t append(memory *x, kvf_seq seq, uint32_t n, uint32_t first) {
    kvf_append_item item = {seq, n};
    cr_assert_eq(kvf_append(x->m, &item, 1, &x->copies), KVF_OK);
    uint32_t copied = x->copies.n;
    cr_assert_eq(kvf_copies_run(&x->pages, NULL, NULL, NULL, &x->copies), KVF_OK);
    cr_assert_eq(kvf_copies_done(x->m, &x->copies), KVF_OK);
    for (uint32_t l = 0; l < 2; l++) {
        uint32_t n_slots = n_slots_of(x, seq, l);
        for (uint32_t i = 0; i < n; i++) *slot_at(x, seq, l, n_slots - n + i) = first + i;
    }
    audit(x);
    return copied;
}

static kvf_seq fork_of(memory *x, kvf_seq parent) {
    kvf_seq child;
    cr_assert_eq(kvf_seq_fork(x->m, parent, &x->copies, &child), KVF_OK);
    cr_assert_eq(x->copies.n, 0u, "there are no scores to copy");
    return child;
}

static void expect_values(memory *x, kvf_seq seq, uint32_t layer, const uint32_t *values, uint32_t n) {
    cr_assert_eq(n_slots_of(x, seq, layer), n);
    for (uint32_t i = 0; i < n; i++)
        cr_expect_eq(*slot_at(x, seq, layer, i), values[i], "layer %u slot %u holds %u", layer, i,
                     *slot_at(x, seq, layer, i));
}

/* The report's scenario with blocks twice as large: a parent of 12, of which layer 0 keeps 12 and layer 1 keeps 6. */
Test(engine_fork_reports, c8_beams_that_split_read_their_own_entries) {
    memory *x = memory_create();
    kvf_seq parent, child, middle, third;
    uint64_t own, shared;
    cr_assert_eq(kvf_seq_create(x->m, &parent), KVF_OK);
    append(x, parent, 12, 0);
    kvf_compact_item item = {parent, 1, 6, NULL};
    kvf_compaction c;
    cr_assert_eq(kvf_compact_begin(x->m, &item, 1, &c), KVF_OK);
    cr_assert_eq(kvf_compact_commit(x->m), KVF_OK);
    child = fork_of(x, parent);
    cr_assert_eq(kvf_seq_sharing(x->m, child, &own, &shared), KVF_OK);
    cr_expect(own == 0 && shared == 3);
    cr_expect_eq(append(x, child, 1, 100), 2u, "the last block of each layer is copied, once");
    cr_expect_eq(append(x, parent, 1, 200), 0u, "the last holder writes in place");
    cr_assert_eq(kvf_seq_sharing(x->m, child, &own, &shared), KVF_OK);
    cr_expect(own == 2 && shared == 1, "the full block of layer 0 stays shared");
    cr_assert_eq(kvf_seq_free(x->m, parent), KVF_OK);
    const uint32_t layer0[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 100}, layer1[] = {0, 1, 2, 3, 4, 5, 100};
    expect_values(x, child, 0, layer0, 13);
    expect_values(x, child, 1, layer1, 7);

    middle = fork_of(x, child);
    third = fork_of(x, child);
    cr_assert_eq(kvf_seq_free(x->m, middle), KVF_OK);
    cr_expect_eq(append(x, third, 1, 300), 2u);
    cr_expect_eq(append(x, child, 1, 400), 0u);
    cr_expect(*slot_at(x, third, 1, 7) == 300 && *slot_at(x, child, 1, 7) == 400);
    /* Layer 1 has a full block now: a new one, and no copy. */
    cr_assert_eq(kvf_seq_free(x->m, third), KVF_OK);
    third = fork_of(x, child);
    cr_expect_eq(append(x, third, 1, 500), 1u, "layer 0 alone is partly filled");
    expect_values(x, child, 1, (const uint32_t[]){0, 1, 2, 3, 4, 5, 100, 400}, 8);

    /* The index is used again: nothing of the former one is left, and no copy is pending. */
    cr_assert_eq(kvf_seq_free(x->m, third), KVF_OK);
    cr_assert_eq(kvf_seq_free(x->m, child), KVF_OK);
    cr_assert_eq(kvf_seq_create(x->m, &child), KVF_OK);
    cr_expect_eq(append(x, child, 3, 600), 0u);
    expect_values(x, child, 0, (const uint32_t[]){600, 601, 602}, 3);
    cr_assert_eq(kvf_seq_free(x->m, child), KVF_OK);
    kvf_occupancy o = {.struct_size = sizeof o};
    cr_assert_eq(kvf_occupancy_read(x->m, &o, NULL, 0), KVF_OK);
    cr_expect(o.blocks.n_held == 0 && o.blocks.n_shared == 0);
    kvf_manager_destroy(x->m);
    free(x);
}

/* ---- D6 --------------------------------------------------------------------------------------------------------- */

/* One engine with room for few sequences, whose indices are used again and again, forks included: each request is bit for
 * bit what a fresh engine gives. */
Test(engine_fork_reports, d6_nothing_of_an_earlier_sequence_or_a_sibling_is_left) {
    static const char *const kinds[] = {"d2o rho=0.3 min_tokens=16",
                                        "d2o rho=0.3 min_tokens=16 scope=layer gqa=max evict_every=3",
                                        "h2o rho=0.3 min_tokens=16", "d2o budget_tokens=24"};
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(600);
    c.max_running = 3;
    for (int kind = 0; kind < 4; kind++) {
        kvf_engine *used = create(&c);
        struct job first, fresh, again;
        kvf_generate g = request_of(prompt, 100, 3, 40);
        g.n = 3; /* all three indices have evicted, and shared */
        submit(used, &first, g, kinds[kind]);
        run(used);
        cr_assert(first.n_ended == 3 && (kind == 2 || first.answers[2].merged));
        for (uint32_t n_prompt = 6; n_prompt <= 100; n_prompt += 94)
            for (uint32_t n = 1; n <= 3; n += 2) {
                kvf_generate next = request_of(prompt, n_prompt, 9, 60);
                next.n = n;
                answer_alone(&c, &fresh, next, kinds[kind]);
                submit(used, &again, next, kinds[kind]);
                run(used);
                for (uint32_t i = 0; i < n; i++) {
                    expect_same(&fresh.answers[i], &again.answers[i], 0, kinds[kind]);
                    cr_expect_eq(fresh.answers[i].merged, again.answers[i].merged);
                }
            }
        kvf_engine_destroy(used);
    }
}

/* A fork copies the state: whatever a sibling's events do, and when it goes, another's stays what it is alone. */
Test(engine_fork_reports, d6_forks_that_both_evict_do_not_touch_each_other) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(900);
    struct job all, some;
    kvf_generate g = request_of(prompt, 100, 3, 40);
    g.n = 3;
    answer_alone(&c, &all, g, "d2o rho=0.3 min_tokens=16");
    for (uint32_t gone = 0; gone < 3; gone++) {
        kvf_engine *e = create(&c);
        submit(e, &some, g, "d2o rho=0.3 min_tokens=16");
        some.abort_at = 7;
        some.abort_index = gone;
        run(e);
        kvf_engine_destroy(e);
        for (uint32_t i = 0; i < 3; i++)
            if (i != gone) expect_same(&all.answers[i], &some.answers[i], 2e-4, "sibling");
    }
}

/* ---- The order of writing ----------------------------------------------------------------------------------------- */

/* However the events of a moment are cut into batches, and where one table of a layer has fresh blocks and the other is
 * written in place (a block of the first is held from outside): the bits are those of one batch. */
Test(engine_fork_reports, batches_of_events_do_not_change_what_shared_tables_become) {
    uint32_t prompt[MAX_TOKENS];
    kvf_engine_config c = config_of(2500);
    c.heads_per_group = 1;
    struct job want, got;
    kvf_generate g = request_of(prompt, 100, 3, 30);
    g.n = 5;
    static const char *const kinds[] = {"d2o rho=0.3 min_tokens=16",
                                        "d2o rho=0.3 min_tokens=16 evict_every=4 scope=layer"};
    for (int kind = 0; kind < 2; kind++)
        for (uint32_t capacity = 1; capacity <= 4; capacity++)
            for (int held = 0; held < 2; held++) {
                answer_alone(&c, &want, g, kinds[kind]);
                kvf_engine *e = create(&c);
                e->events->plan->event_capacity = capacity == 4 ? e->events->plan->event_capacity : capacity * N_LAYERS;
                submit(e, &got, g, kinds[kind]);
                int more;
                step(e, &more);
                step(e, &more);
                kvf_block blocks[N_LAYERS];
                for (uint32_t l = 0; held && l < N_LAYERS; l++) {
                    const uint32_t *row;
                    cr_assert_eq(kvf_seq_table(e->manager, e->last->seq, l, l % 2, NULL, NULL, &row), KVF_OK);
                    cr_assert_eq(kvf_block_hold(e->manager, row[0], &blocks[l]), KVF_OK);
                }
                for (int i = 0; i < 6; i++) step(e, &more);
                for (uint32_t l = 0; held && l < N_LAYERS; l++)
                    cr_assert_eq(kvf_block_release(e->manager, blocks[l]), KVF_OK);
                run(e);
                kvf_engine_destroy(e);
                for (uint32_t i = 0; i < 5; i++) expect_same(&want.answers[i], &got.answers[i], 0, kinds[kind]);
            }
}
