/* Rows that grow, move and slide: what they hold stays, and what they take is in proportion to it. */
#include "blockmgr/manager.h"
#include "meter.h"
#include "seeded.h"
#include "test_blockmgr_util.h"
#include "view_mirror.h"

enum { BS = 8, SEQS = 12, LAYERS = 2, GROUPS = 2, TABLES = LAYERS * GROUPS, BLOCKS = 30000, ROW = 2000 };

/* What the tables of a sequence held after the last call on it. */
typedef struct held {
    kvf_seq seq; /* 0: dead */
    bool has_scores, swapped;
    uint32_t n_slots, n[TABLES], n_pages[TABLES], ids[TABLES][ROW], pages[TABLES][ROW];
} held;

static struct world {
    uint64_t rng, n_slides, n_moves, n_over;
    kvf_manager *m;
    held s[SEQS];
    view_mirror mirror;
    kvf_copy items[4 * TABLES * ROW];
    kvf_copy_list copies;
} w;

static uint32_t rnd(uint32_t n) { return seeded_next(&w.rng, n); }

static uint32_t first_table(const held *h) { return kvf__seq_index(h->seq) * TABLES; }

static void note(held *h) {
    h->n_slots = 0;
    for (uint32_t k = 0; h->seq && k < TABLES; k++) {
        uint32_t t = first_table(h) + k;
        h->n[k] = h->swapped ? kvf__blocks_for(w.m, w.m->host_slots[t]) : kvf__n_blocks(w.m, t);
        h->n_pages[k] = h->swapped ? w.m->n_host_pages[t] : w.m->n_pages[t];
        memcpy(h->ids[k], kvf__row(w.m, t), h->n[k] * sizeof *h->ids[k]);
        memcpy(h->pages[k], kvf__score_row(w.m, t), h->n_pages[k] * sizeof *h->pages[k]);
        h->n_slots = KVF__MAX(h->n_slots, w.m->n_slots[t]);
    }
}

/* All sequences but the one that was changed are as they were. */
static void check_others(const held *changed) {
    for (held *h = w.s; h < w.s + SEQS; h++)
        for (uint32_t k = 0; h->seq && h != changed && k < TABLES; k++) {
            uint32_t t = first_table(h) + k;
            cr_assert(!memcmp(kvf__row(w.m, t), h->ids[k], h->n[k] * sizeof *h->ids[k]), "table %u", t);
            cr_assert(!memcmp(kvf__score_row(w.m, t), h->pages[k], h->n_pages[k] * sizeof *h->pages[k]), "table %u", t);
        }
}

static void finish_copies(void) {
    if (w.copies.n) OK(kvf_copies_done(w.m, &w.copies));
}

static void grow(held *h) {
    static const uint32_t lengths[] = {1, 5, 60, 700, 3000};
    uint32_t n = 1 + rnd(lengths[rnd(5)]);
    uint64_t at = w.m->rows.at[first_table(h)];
    if (h->n_slots + n > ROW * BS) return;
    kvf_status status = append(w.m, h->seq, n, &w.copies);
    cr_assert(!status || status == KVF_E_NO_BLOCKS || status == KVF_E_LIMIT);
    w.n_over += status == KVF_E_LIMIT;
    w.n_moves += w.m->rows.at[first_table(h)] != at;
}

static void shrink(held *h) {
    if (!h->n_slots) return;
    if (rnd(2)) {
        uint32_t least = UINT32_MAX;
        for (uint32_t k = 0; k < TABLES; k++) least = KVF__MIN(least, w.m->n_slots[first_table(h) + k]);
        OK(kvf_seq_rollback(w.m, h->seq, rnd(least + 1)));
        return;
    }
    uint32_t layer = rnd(LAYERS), t = first_table(h) + layer * GROUPS, keep[GROUPS];
    bool any = false;
    for (uint32_t g = 0; g < GROUPS; g++) {
        if (!w.m->n_slots[t + g]) return;
        keep[g] = 1 + rnd(w.m->n_slots[t + g]);
        any |= keep[g] < w.m->n_slots[t + g];
    }
    if (!any) return;
    kvf_compaction c;
    const kvf_compact_item item = {h->seq, layer, 0, keep};
    kvf_status status = kvf_compact_begin(w.m, &item, 1, &c);
    if (!status) status = rnd(4) ? kvf_compact_commit(w.m) : kvf_compact_cancel(w.m);
    cr_assert(!status || status == KVF_E_NO_BLOCKS);
}

static void change(held *h) {
    uint32_t slots[TABLES] = {0}, op = rnd(16);
    if (!h->seq) {
        held *from = &w.s[rnd(SEQS)];
        if (rnd(3) || !from->seq || from->swapped) {
            OK(kvf_seq_create(w.m, &h->seq));
            h->has_scores = false;
        } else if (kvf_seq_fork(w.m, from->seq, &w.copies, &h->seq)) {
            h->seq = 0;
        } else {
            h->has_scores = from->has_scores;
        }
        h->swapped = false;
    } else if (op == 0) {
        OK(kvf_seq_free(w.m, h->seq));
        h->seq = 0;
    } else if (op == 1) {
        kvf_status status =
            h->swapped ? kvf_swap_in(w.m, &h->seq, 1, 0, &w.copies) : kvf_swap_out(w.m, &h->seq, 1, &w.copies);
        cr_assert(!status || status == KVF_E_NO_BLOCKS);
        h->swapped ^= !status;
    } else if (op == 2 && !h->swapped) {
        for (uint32_t k = 0; k < TABLES; k++) slots[k] = rnd(ROW * BS);
        const kvf_reserve r = {.struct_size = sizeof r, .n_slots = slots, .growth = (int)rnd(2)};
        kvf_status status = kvf_seq_reserve(w.m, h->seq, &r);
        cr_assert(!status || status == KVF_E_NO_BLOCKS);
    } else if (op == 3 && !h->swapped && !h->has_scores) {
        for (uint32_t k = 0; k < TABLES; k++) slots[k] = w.m->n_slots[first_table(h) + k];
        h->has_scores = !kvf_seq_take_scores(w.m, h->seq, slots);
    } else if (op < 8 && !h->swapped) {
        shrink(h);
    } else if (!h->swapped) {
        grow(h);
    }
}

static void look(uint32_t which) {
    kvf_seq seqs[SEQS];
    uint32_t n = 0;
    kvf_view v = {.struct_size = sizeof v};
    for (held *h = w.s; h < w.s + SEQS; h++)
        if (h->seq && !h->swapped && rnd(4)) seqs[n++] = h->seq;
    OK(kvf_view_fill(w.m, which, seqs, n, &v));
    const char *wrong = mirror_send(&w.mirror, w.m, which, seqs, &v);
    cr_assert_null(wrong, "%s", wrong);
}

static void run(uint64_t seed, uint32_t n_steps) {
    meter bytes = {0};
    kvf_manager_config c = config_of((shape){LAYERS, GROUPS, 1, BS, BLOCKS, BLOCKS / 2, SEQS, ROW * BS});
    memset(&w, 0, sizeof w);
    w.copies = (kvf_copy_list){w.items, 0, sizeof w.items / sizeof *w.items};
    w.rng = seed * 0x9e3779b97f4a7c15u | 1;
    c.n_host_blocks = c.n_host_score_pages = BLOCKS / 4;
    c.view_copies = seed & 1;
    c.n_table_blocks = seed & 2 ? BLOCKS / 3 : UINT64_MAX;
    if (seed & 4) c.allocator = (kvf_allocator){meter_alloc, meter_free, &bytes};
    OK(kvf_manager_create(&c, &w.m, NULL));
    if (c.view_copies) mirror_open(&w.mirror, w.m);
    for (uint32_t i = 0; i < n_steps; i++) {
        held *h = &w.s[rnd(SEQS)];
        uint64_t end = w.m->rows.end;
        change(h);
        w.n_slides += w.m->rows.end < end;
        check_others(h);
        note(h);
        finish_copies();
        if (i % 16 == 0) AUDIT(w.m);
        if (c.view_copies && rnd(3) == 0) look(rnd(2));
        uint64_t n_tables = (uint64_t)SEQS * TABLES, n = kvf__table_blocks(w.m);
        cr_assert_leq(w.m->rows.live, n + n / 4 + n_tables * 24 + w.m->blocks->n_promised);
        for (int k = 0; c.view_copies && k < 2; k++) cr_assert_leq(w.m->views[k].rows.end, w.m->view_rows_size);
    }
    cr_assert(!(seed & 4) || bytes.n_calls == 1);
    if (c.view_copies) mirror_close(&w.mirror);
    kvf_manager_destroy(w.m);
}

Test(blockmgr_rows, what_other_tables_hold_stays) {
    uint64_t slides = 0, moves = 0, over = 0;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        run(seed, 4000);
        slides += w.n_slides;
        moves += w.n_moves;
        over += w.n_over;
    }
    cr_assert(slides > 50 && moves > 500 && over > 50, "%llu slides, %llu moves, %llu over", (unsigned long long)slides,
              (unsigned long long)moves, (unsigned long long)over);
}

/* ---- What they take ------------------------------------------------------------------------------------------- */

static kvf_manager *open_large(uint32_t n_groups, uint32_t view_copies) {
    kvf_manager_config c;
    kvf_manager *m = NULL;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = 80;
    c.n_kv_heads = 8;
    c.heads_per_group = 8 / n_groups;
    c.n_blocks = 1 << 20;
    c.max_seqs = 256;
    c.max_slots = 131072;
    c.view_copies = view_copies;
    size_t bytes = 0;
    OK(kvf_manager_bytes(&c, &bytes, NULL));
    cr_assert_leq(bytes, (size_t)400 << 20, "%zu bytes", bytes); /* dense rows: 1.3 and 10.3 GiB, with copies 31 GiB */
    OK(kvf_manager_create(&c, &m, NULL));
    return m;
}

/* Bytes of an array of rows, and of its score rows, that have been written. */
static double written(const kvf__row_array *r) { return (double)r->high * 2 * sizeof *r->ids; }

static double most_written(uint64_t n_blocks, uint64_t n_tables) {
    return 16.0 * (double)n_blocks + 288.0 * (double)n_tables + (5 << 19);
}

/* 80 layers, 256 sequences, 128k context: a step at a time, all at once, and one long sequence that ends. */
Test(blockmgr_rows, they_take_16_bytes_a_block) {
    for (uint32_t n_groups = 1; n_groups <= 8; n_groups *= 8)
        for (uint32_t steps = 1; steps <= 64; steps *= 64) {
            kvf_manager *m = open_large(n_groups, 1);
            kvf_seq s[16];
            uint32_t n_tables = 80 * n_groups, n_tokens = n_groups == 1 ? 8192 : 1024;
            kvf_view v = {.struct_size = sizeof v};
            for (int i = 0; i < 16; i++) s[i] = new_seq(m);
            for (uint32_t k = 0; k < steps; k++) {
                for (int i = 0; i < 16; i++) OK(append(m, s[i], n_tokens / steps, NULL));
                OK(kvf_view_fill(m, k & 1, s, 16, &v));
                uint64_t n = kvf__table_blocks(m);
                cr_assert_leq(written(&m->rows), most_written(n, 16 * n_tables), "%u groups, step %u", n_groups, k);
                cr_assert_leq(written(&m->views[k & 1].rows), most_written(n, 16 * n_tables));
            }
            for (int i = 0; i < 16; i++) OK(kvf_seq_free(m, s[i]));
            s[0] = new_seq(m);
            OK(append(m, s[0], 1, NULL)); /* what long ones leave is given back when rows are needed */
            cr_assert_leq(written(&m->rows), most_written(n_tables, n_tables));
            kvf_manager_destroy(m);
        }
}

Test(blockmgr_rows, the_bound_is_kept_and_changes_nothing) {
    static list l;
    static dump before, after;
    kvf_manager *m = NULL;
    kvf_manager_config c = config_of((shape){2, 1, 1, BS, 32, 32, 4, 128});
    c.n_table_blocks = 10;
    OK(kvf_manager_create(&c, &m, NULL));
    kvf_seq s = new_seq(m), child = 0;
    FAILS(KVF_E_LIMIT, append(m, s, 6 * BS, NULL));
    const kvf_error *e = kvf_manager_error(m);
    cr_assert(!strcmp(e->field, "n_table_blocks") && e->have == 10 && e->need == 12, "%s", e->text);
    OK(append(m, s, 3 * BS - 1, NULL));
    dump_take(&before, m, &s, 1);
    FAILS(KVF_E_LIMIT, kvf_seq_fork(m, s, list_of(&l), &child));
    FAILS(KVF_E_LIMIT, append(m, s, 2 * BS + 2, NULL));
    dump_take(&after, m, &s, 1);
    dump_same(&before, &after);
    OK(append(m, s, 2 * BS + 1, NULL));
    OK(kvf_seq_rollback(m, s, 4 * BS));
    OK(kvf_seq_fork(m, s, list_of(&l), &child));
    AUDIT(m);
    kvf_manager_destroy(m);
}
