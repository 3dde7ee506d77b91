/* What calls need, where the sequences of one call share blocks: no more than carrying them out takes. */
#include "seeded.h"
#include "test_blockmgr_util.h"

enum { BS = 8, SEQS = 4, LAYERS = 2, POOL = 96 };

typedef struct needs {
    kvf_manager *m;
    kvf_seq seqs[SEQS];
    uint32_t n_seqs, n_tokens[SEQS];
    list l;
    kvf_copy_list *copies;
} needs;

/* Forks of one sequence, at random, that have grown, gone back and reserved at random; all of one seed are alike. */
static void begin(needs *x, uint64_t seed, bool swaps) {
    static uint32_t windows[LAYERS];
    kvf_manager_config c = config_of((shape){LAYERS, 2, 1, BS, POOL, POOL, SEQS, 128});
    uint64_t rng = seed;
    windows[1] = seed % 3 || swaps ? 0 : 8 + seeded_next(&rng, 20);
    c.layer_windows = windows;
    c.n_host_blocks = c.n_host_score_pages = POOL;
    OK(kvf_manager_create(&c, &x->m, NULL));
    x->copies = list_of(&x->l);
    x->n_seqs = 2 + seeded_next(&rng, SEQS - 1);
    x->seqs[0] = new_seq(x->m);
    OK(append(x->m, x->seqs[0], 1 + seeded_next(&rng, 40), x->copies));
    for (uint32_t i = 1; i < x->n_seqs; i++) {
        kvf_seq from = x->seqs[seeded_next(&rng, i)];
        OK(kvf_seq_fork(x->m, from, x->copies, &x->seqs[i]));
        if (seeded_next(&rng, 3) == 0) OK(append(x->m, x->seqs[i], 1 + seeded_next(&rng, 10), x->copies));
        if (!windows[1] && seeded_next(&rng, 4) == 0) OK(kvf_seq_rollback(x->m, x->seqs[i], 1));
    }
    for (uint32_t i = 0; i < x->n_seqs; i++) {
        uint32_t n_slots[LAYERS * 2];
        for (uint32_t k = 0; k < LAYERS * 2; k++) n_slots[k] = 8 * seeded_next(&rng, 9);
        kvf_reserve r = {.struct_size = sizeof r, .n_slots = n_slots, .growth = seeded_next(&rng, 2) != 0};
        if (seeded_next(&rng, 3) == 0 && !windows[1]) {
            kvf_status s = kvf_seq_reserve(x->m, x->seqs[i], &r);
            cr_assert(s == KVF_OK || s == KVF_E_NO_BLOCKS);
        }
        x->n_tokens[i] = 1 + seeded_next(&rng, 12);
    }
    OK(kvf_copies_done(x->m, x->copies));
}

/* Leaves so many blocks to be had. */
static void leave(needs *x, uint32_t n) {
    kvf_occupancy o = occupancy(x->m);
    kvf_block taken;
    for (uint32_t i = o.blocks.n_free - o.blocks.n_promised; i > n; i--) OK(kvf_block_take(x->m, 0, &taken));
}

static void end(needs *x) {
    AUDIT(x->m);
    kvf_manager_destroy(x->m);
}

/* Coming back with room for n tokens is coming back, and appending them. */
Test(needs, r14_swap_in_needs_what_the_appends_take) {
    static needs x;
    uint32_t n_refused = 0, n_done = 0;
    for (uint64_t seed = 1; seed <= 150; seed++) {
        uint32_t n_tokens = (uint32_t)(seed % 11);
        bool before = false;
        for (uint32_t room = 0; !before; room++) {
            bool able[2];
            for (int two = 0; two < 2; two++) {
                begin(&x, seed, true);
                OK(kvf_swap_out(x.m, x.seqs, x.n_seqs, x.copies));
                OK(kvf_copies_done(x.m, x.copies));
                leave(&x, room);
                kvf_status s = kvf_swap_in(x.m, x.seqs, x.n_seqs, two ? 0 : n_tokens, x.copies);
                kvf_append_item items[SEQS];
                for (uint32_t i = 0; i < x.n_seqs; i++) items[i] = (kvf_append_item){x.seqs[i], n_tokens};
                if (!s && two && n_tokens) s = kvf_can_append(x.m, items, x.n_seqs, NULL);
                able[two] = s == KVF_OK;
                if (!two && !s && n_tokens) OK(kvf_append(x.m, items, x.n_seqs, x.copies));
                end(&x);
            }
            cr_assert_eq(able[0], able[1], "seed %llu, %u to be had, %u tokens: %d, in two calls %d",
                         (unsigned long long)seed, room, n_tokens, able[0], able[1]);
            before = able[0];
            n_refused += !able[0];
            n_done += able[0];
        }
    }
    cr_expect(n_refused > 500 && n_done == 150);
}

/* Where sequences could append one after another, they can at once. */
Test(needs, r14_a_batch_needs_no_more_than_its_sequences_in_turn) {
    static needs x;
    uint32_t n_refused = 0;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        bool in_turn = false;
        for (uint32_t room = 0; !in_turn; room++) {
            begin(&x, seed, false);
            leave(&x, room);
            in_turn = true;
            for (uint32_t i = 0; i < x.n_seqs; i++) {
                in_turn = in_turn && append(x.m, x.seqs[i], x.n_tokens[i], x.copies) == KVF_OK;
                OK(kvf_copies_done(x.m, x.copies));
            }
            end(&x);
            begin(&x, seed, false);
            leave(&x, room);
            kvf_append_item items[SEQS];
            for (uint32_t i = 0; i < x.n_seqs; i++) items[i] = (kvf_append_item){x.seqs[i], x.n_tokens[i]};
            kvf_status s = kvf_append(x.m, items, x.n_seqs, x.copies);
            cr_assert(s == KVF_OK || (s == KVF_E_NO_BLOCKS && !in_turn), "seed %llu, %u to be had: %s",
                      (unsigned long long)seed, room, kvf_manager_error(x.m)->text);
            n_refused += s != KVF_OK;
            end(&x);
        }
    }
    cr_expect_gt(n_refused, 300);
}

/* The case as it was reported. */
Test(needs, r14_two_forks_with_a_half_full_last_block_come_in) {
    kvf_manager_config c = config_of((shape){1, 1, 1, BS, 7, 7, 4, 64});
    kvf_manager *m = NULL;
    list l;
    kvf_copy_list *copies = list_of(&l);
    c.n_host_blocks = 7;
    OK(kvf_manager_create(&c, &m, NULL));
    kvf_seq both[2] = {new_seq(m), 0};
    OK(append(m, both[0], 44, copies)); /* 6 blocks */
    OK(kvf_seq_fork(m, both[0], copies, &both[1]));
    OK(kvf_swap_out(m, both, 2, copies));
    OK(kvf_copies_done(m, copies));
    cr_assert_eq(n_free(m), 7);
    OK(kvf_swap_in(m, both, 2, 1, copies));
    OK(kvf_copies_done(m, copies));
    kvf_append_item items[] = {{both[0], 1}, {both[1], 1}};
    OK(kvf_append(m, items, 2, copies));
    cr_assert_eq(n_free(m), 0);
    AUDIT(m);
    kvf_manager_destroy(m);
}
