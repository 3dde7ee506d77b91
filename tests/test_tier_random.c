/* The host tier under random operations, over a device whose copies run late and in any order that the rules allow. */
#include "tier_world.h"

/* What has been seen, so that the random test cannot pass by doing nothing. */
static struct {
    uint64_t outs, out_no_blocks, out_states, ins, in_no_blocks, in_shared, freed_swapped, freed_pending, compressed,
        back_before_done, refused, cow, scores_out;
} seen;

static int any_seq(world *w) {
    int first = (int)rnd(w, SEQS);
    for (int i = 0; i < SEQS; i++)
        if (w->s[(first + i) % SEQS].alive) return (first + i) % SEQS;
    return NONE;
}

static void op_create(world *w) {
    w->op = "create";
    for (int i = 0; i < SEQS; i++) {
        if (w->s[i].alive) continue;
        memset(&w->s[i], 0, sizeof w->s[i]);
        OK(kvf_seq_create(w->m, &w->s[i].handle));
        w->s[i].alive = 1;
        return;
    }
}

static void op_append(world *w) {
    w->op = "append";
    int i = any_seq(w), l = (int)rnd(w, 2);
    if (i == NONE) return;
    seq *s = &w->s[i];
    uint32_t n = 1 + rnd(w, 12), from = w->lists[l].n, old[TABLES][ROW], old_pages[TABLES];
    for (uint32_t k = 0; k < TABLES; k++) {
        old_pages[k] = s->t[k].n_pages;
        memcpy(old[k], row_of(w, s, k), sizeof old[k]);
    }
    kvf_status status = append(w->m, s->handle, n, &w->lists[l]);
    if (s->swapped) STATUS(w, status, KVF_E_STATE);
    seen.refused += s->swapped != 0;
    if (status) {
        CHECK(w, status == KVF_E_STATE || status == KVF_E_NO_BLOCKS || status == KVF_E_LIMIT, "%s\n",
              kvf_status_name(status));
        return;
    }
    for (uint32_t k = 0; k < TABLES; k++) {
        table *t = &s->t[k];
        const uint32_t *row = row_of(w, s, k), *score_row = score_row_of(w, s, k);
        uint32_t first = t->n_slots;
        for (uint32_t b = 0; b < ceil_bs(first + n); b++)
            if (b >= ceil_bs(first) || row[b] != old[k][b]) /* it is handed out: nobody needs it any more */
                CHECK(w, !is_pending(w, KV, row[b]), "block %u has a copy pending\n", row[b]);
        seen.cow += first % BS && row[first / BS] != old[k][first / BS];
        if (s->has_scores)
            for (t->n_pages = ceil_bs(first + n); old_pages[k] < t->n_pages; old_pages[k]++)
                CHECK(w, !is_pending(w, SCORE, score_row[old_pages[k]]), "a score page has a copy pending\n");
    }
    note_copies(w, l, from);
    /* What is written into a block with a copy comes behind the copy, as on a stream. */
    flush(w);
    for (uint32_t k = 0; k < TABLES; k++) {
        table *t = &s->t[k];
        const uint32_t *row = row_of(w, s, k), *score_row = score_row_of(w, s, k);
        uint32_t first = t->n_slots;
        t->n_slots += n;
        for (uint32_t j = first; j < t->n_slots; j++)
            write_slot(w, KV, row[j / BS], j % BS, t->tags[j] = ++w->next_tag);
        for (uint32_t j = 0; j < t->n_pages * BS && j < t->n_slots; j++)
            write_slot(w, SCORE, score_row[j / BS], j % BS, t->scores[j] = ++w->next_tag);
    }
}

/* Blocks that are handed out are written at once, before any pending copy has run. */
static void op_append_early(world *w) {
    w->op = "append early";
    int i = NONE;
    for (int k = 0; k < SEQS; k++)
        if (w->s[k].alive && !w->s[k].swapped && !w->s[k].has_scores && w->s[k].t[0].n_slots == 0 &&
            w->s[k].t[TABLES - 1].n_slots == 0)
            i = k;
    if (i == NONE) return;
    seq *s = &w->s[i];
    uint32_t n = 1 + rnd(w, 12);
    if (append(w->m, s->handle, n, NULL)) return;
    for (uint32_t k = 0; k < TABLES; k++) {
        const uint32_t *row = row_of(w, s, k);
        s->t[k].n_slots = n;
        for (uint32_t j = 0; j < n; j++) write_slot(w, KV, row[j / BS], j % BS, s->t[k].tags[j] = ++w->next_tag);
    }
}

static void op_fork(world *w) {
    w->op = "fork";
    int i = any_seq(w), to = NONE, l = (int)rnd(w, 2);
    for (int k = 0; k < SEQS; k++) to = w->s[k].alive ? to : k;
    if (i == NONE || to == NONE) return;
    uint32_t from = w->lists[l].n;
    kvf_seq handle = 0;
    kvf_status status = kvf_seq_fork(w->m, w->s[i].handle, &w->lists[l], &handle);
    if (w->s[i].swapped) STATUS(w, status, KVF_E_STATE);
    if (status) return;
    w->s[to] = w->s[i];
    w->s[to].handle = handle;
    note_copies(w, l, from);
}

static void op_free(world *w) {
    w->op = "free";
    int i = any_seq(w);
    if (i == NONE) return;
    seen.freed_swapped += w->s[i].swapped != 0;
    seen.freed_pending += w->n_pend != 0;
    STATUS(w, kvf_seq_free(w->m, w->s[i].handle), KVF_OK);
    w->s[i].alive = 0;
}

static void op_rollback(world *w) {
    w->op = "rollback";
    int i = any_seq(w);
    if (i == NONE) return;
    seq *s = &w->s[i];
    uint32_t n = rnd(w, 6);
    for (uint32_t k = 0; k < TABLES; k++) n = least(n, s->t[k].n_slots);
    flush(w); /* a later write would overtake what a copy still reads */
    STATUS(w, kvf_seq_rollback(w->m, s->handle, n), s->swapped ? KVF_E_STATE : KVF_OK);
    if (s->swapped) return;
    for (uint32_t k = 0; k < TABLES; k++) {
        s->t[k].n_slots -= n;
        s->t[k].n_pages = least(s->t[k].n_pages, ceil_bs(s->t[k].n_slots));
    }
}

static void op_reserve(world *w) {
    w->op = "reserve";
    int i = any_seq(w);
    if (i == NONE) return;
    seq *s = &w->s[i];
    uint32_t n_slots[TABLES];
    for (uint32_t k = 0; k < TABLES; k++) n_slots[k] = rnd(w, 3) ? rnd(w, 20) : 0;
    kvf_reserve r = {
        .struct_size = sizeof r, .n_slots = n_slots, .with_scores = (int)rnd(w, 2), .growth = (int)rnd(w, 2)};
    kvf_status status = kvf_seq_reserve(w->m, s->handle, &r);
    if (s->swapped) STATUS(w, status, KVF_E_STATE);
    if (status) return;
    s->growth = r.growth;
    for (uint32_t k = 0; k < TABLES; k++) {
        s->t[k].r = ceil_bs(n_slots[k]);
        s->t[k].page_r = r.with_scores ? s->t[k].r : 0;
    }
}

static void op_scores(world *w) {
    w->op = "scores";
    int i = any_seq(w);
    if (i == NONE || w->s[i].swapped) return;
    seq *s = &w->s[i];
    uint32_t n_slots[TABLES];
    for (uint32_t k = 0; k < TABLES; k++) n_slots[k] = s->t[k].n_slots;
    if (!s->has_scores && kvf_seq_take_scores(w->m, s->handle, n_slots) == KVF_OK) {
        s->has_scores = 1;
        for (uint32_t k = 0; k < TABLES; k++) s->t[k].n_pages = ceil_bs(n_slots[k]);
    }
    flush(w);
    for (uint32_t k = 0; k < TABLES; k++) {
        const uint32_t *row = score_row_of(w, s, k);
        for (uint32_t j = 0; j < s->t[k].n_slots && j / BS < s->t[k].n_pages; j++)
            write_slot(w, SCORE, row[j / BS], j % BS, s->t[k].scores[j] = ++w->next_tag);
    }
}

static void op_compact(world *w) {
    w->op = "compact";
    int i = any_seq(w);
    uint32_t layer = rnd(w, LAYERS), first = layer * GROUPS;
    if (i == NONE || w->s[i].t[first].n_slots < 2) return;
    seq *s = &w->s[i];
    uint32_t n_keep = 1 + rnd(w, s->t[first].n_slots - 1);
    kvf_compact_item item = {s->handle, layer, n_keep, NULL};
    kvf_compaction c;
    kvf_status status = kvf_compact_begin(w->m, &item, 1, &c);
    if (s->swapped) STATUS(w, status, KVF_E_STATE);
    if (status) return;
    flush(w);
    for (uint32_t g = 0; g < GROUPS; g++) { /* the newest are kept */
        table *t = &s->t[first + g];
        const uint32_t *dst = c.dst_row[g] ? c.dst_row[g] : row_of(w, s, first + g);
        const uint32_t *score_row = score_row_of(w, s, first + g);
        for (uint32_t b = 0; b < ceil_bs(n_keep); b++)
            CHECK(w, !is_pending(w, KV, dst[b]), "block %u is written, but has a copy pending\n", dst[b]);
        for (uint32_t j = 0; j < n_keep; j++) {
            write_slot(w, KV, dst[j / BS], j % BS, t->tags[j] = t->tags[t->n_slots - n_keep + j]);
            t->scores[j] = ++w->next_tag;
            if (j / BS < t->n_pages) write_slot(w, SCORE, score_row[j / BS], j % BS, t->scores[j]);
        }
        t->n_slots = n_keep;
        t->n_pages = least(t->n_pages, ceil_bs(n_keep));
    }
    STATUS(w, kvf_compact_commit(w->m), KVF_OK);
}

/* Up to three sequences; most of the time all of one kind. */
static uint32_t choose(world *w, int swapped, int *which, kvf_seq *seqs) {
    uint32_t n = 0, most_n = 1 + rnd(w, 3);
    for (int i = 0, first = (int)rnd(w, SEQS); i < SEQS && n < most_n; i++) {
        int k = (first + i) % SEQS;
        if (!w->s[k].alive || (w->s[k].swapped != swapped && rnd(w, 16))) continue;
        which[n] = k;
        seqs[n++] = w->s[k].handle;
    }
    return n;
}

/* Whether some class has too few blocks to be had: on the host, and here. */
static int lacks_on_host(const world *w, const uint32_t *n) {
    for (uint32_t c = 0; c < w->n_classes; c++) {
        kvf_pool_occupancy here, host;
        STATUS(w, kvf_class_occupancy(w->m, c, &here, &host, NULL), KVF_OK);
        if (n[c] > host.n_free) return 1;
    }
    return 0;
}
static int lacks_here(const world *w, const uint32_t *n) {
    for (uint32_t c = 0; c < w->n_classes; c++) {
        kvf_pool_occupancy here;
        STATUS(w, kvf_class_occupancy(w->m, c, &here, NULL, NULL), KVF_OK);
        if (n[c] > here.n_free - here.n_promised) return 1;
    }
    return 0;
}

static void op_out(world *w) {
    w->op = "swap out";
    int which[SEQS], l = (int)rnd(w, 2);
    kvf_seq seqs[SEQS];
    uint32_t n = choose(w, 0, which, seqs), from = w->lists[l].n, ids[512], n_ids = 0, n_blocks = 0, n_pages = 0;
    uint32_t cells[512], of_class[2] = {0, 0};
    kvf_status want = KVF_OK;
    for (uint32_t i = 0; i < n; i++) {
        seq *s = &w->s[which[i]];
        if (s->swapped) want = KVF_E_STATE;
        for (uint32_t k = 0; !s->swapped && k < TABLES; k++) {
            const uint32_t *row = row_of(w, s, k);
            n_pages += s->t[k].n_pages;
            n_blocks += ceil_bs(s->t[k].n_slots);
            for (uint32_t b = 0; b < ceil_bs(s->t[k].n_slots); b++) {
                uint32_t at = 0;
                while (at < n_ids && ids[at] != row[b]) at++;
                if (at == n_ids) {
                    cells[n_ids] = ++w->next_cell;
                    ids[n_ids++] = row[b];
                    of_class[class_at(w, k)]++;
                }
                s->t[k].cells[b] = cells[at];
            }
        }
    }
    kvf_occupancy o = occupancy(w->m);
    if (!want && (lacks_on_host(w, of_class) || n_pages > o.host_score_pages.n_free)) want = KVF_E_NO_BLOCKS;
    STATUS(w, kvf_swap_out(w->m, seqs, n, &w->lists[l]), want);
    seen.out_no_blocks += want == KVF_E_NO_BLOCKS;
    seen.out_states += want == KVF_E_STATE;
    if (want) {
        CHECK(w, w->lists[l].n == from, "copies of a call that failed\n");
        return;
    }
    CHECK(w, w->lists[l].n - from == n_ids + n_pages, "%u copies, not %u\n", w->lists[l].n - from, n_ids + n_pages);
    for (uint32_t i = 0; i < n; i++) {
        seen.compressed += w->s[which[i]].t[0].n_slots != w->s[which[i]].t[TABLES - 1].n_slots;
        w->s[which[i]].swapped = 1;
    }
    seen.outs += n_blocks != 0;
    seen.scores_out += n_pages != 0;
    note_copies(w, l, from);
}

/* Blocks that a batch takes, the shared ones once, and what its reservations or its growth want besides. An append makes every
 * table but the last that shares a partly filled last block copy it (left: how many have not yet). */
static void want_in(const world *w, const int *which, uint32_t n, uint32_t n_tokens, uint32_t *blocks, uint32_t *pages,
                    uint32_t *n_copies) {
    uint32_t cells[512], counts[512], left[512], n_cells = 0;
    blocks[0] = blocks[1] = *pages = 0;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < TABLES; k++)
            for (uint32_t b = 0; b < ceil_bs(w->s[which[i]].t[k].n_slots); b++) {
                uint32_t at = 0;
                while (at < n_cells && cells[at] != w->s[which[i]].t[k].cells[b]) at++;
                if (at == n_cells) {
                    counts[n_cells] = 0, cells[n_cells++] = w->s[which[i]].t[k].cells[b];
                    blocks[class_at(w, k)]++;
                }
                counts[at]++;
            }
    *n_copies = n_cells;
    memcpy(left, counts, n_cells * sizeof *left);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < TABLES; k++) {
            const seq *s = &w->s[which[i]];
            const table *t = &s->t[k];
            uint32_t held = ceil_bs(t->n_slots), own = 0, last = 0;
            for (uint32_t b = 0; b < held; b++)
                for (uint32_t at = 0; at < n_cells; at++)
                    if (cells[at] == t->cells[b]) own += counts[at] == 1, last = at;
            uint32_t shared = t->n_slots % BS && counts[last] > 1, copies = n_tokens && shared && left[last] > 1;
            uint32_t after = ceil_bs(least(SLOTS, t->n_slots + n_tokens));
            if (copies) left[last]--;
            blocks[class_at(w, k)] +=
                most(over(t->r, s->growth ? held - shared : own), n_tokens ? after - held + copies : 0);
            *pages +=
                t->n_pages + most(over(t->page_r, t->n_pages), s->has_scores && n_tokens ? after - t->n_pages : 0);
            *n_copies += t->n_pages;
        }
}

static void op_in(world *w) {
    w->op = "swap in";
    int which[SEQS], l = (int)rnd(w, 2);
    kvf_seq seqs[SEQS];
    uint32_t n = choose(w, 1, which, seqs), n_tokens = rnd(w, 4), from = w->lists[l].n, blocks[2], pages, n_copies = 0;
    kvf_status want = KVF_OK;
    for (uint32_t i = 0; i < n; i++)
        if (!w->s[which[i]].swapped) want = KVF_E_STATE;
    kvf_occupancy o = occupancy(w->m);
    if (!want) {
        want_in(w, which, n, n_tokens, blocks, &pages, &n_copies);
        if (lacks_here(w, blocks) || pages > o.score_pages.n_free - o.score_pages.n_promised) want = KVF_E_NO_BLOCKS;
    }
    int pending_out = 0;
    for (uint32_t i = 0; i < w->n_pend; i++) pending_out |= dst_tier(w->pend[i].c.kind) && !w->pend[i].ran;
    STATUS(w, kvf_swap_in(w->m, seqs, n, n_tokens, &w->lists[l]), want);
    seen.in_no_blocks += want == KVF_E_NO_BLOCKS;
    if (want) {
        CHECK(w, w->lists[l].n == from, "copies of a call that failed\n");
        return;
    }
    CHECK(w, w->lists[l].n - from == n_copies, "%u copies, not %u\n", w->lists[l].n - from, n_copies);
    note_copies(w, l, from);
    seen.back_before_done += pending_out && n_copies;
    seen.ins += n_copies != 0;
    uint32_t promised = 0;
    for (uint32_t i = 0; i < n; i++) {
        seq *s = &w->s[which[i]];
        s->swapped = 0;
        for (uint32_t k = 0; k < TABLES; k++) {
            const uint32_t *row = row_of(w, s, k);
            uint32_t own = 0, held = ceil_bs(s->t[k].n_slots), leaves = 0;
            for (uint32_t b = 0; b < held; b++) {
                uint32_t h = 0;
                for (uint32_t j = 0; j < n; j++) /* those that are back already in the model, or will be */
                    for (uint32_t q = 0; q < TABLES; q++)
                        for (uint32_t d = 0; d < ceil_bs(w->s[which[j]].t[q].n_slots); d++)
                            h += row_of(w, &w->s[which[j]], q)[d] == row[b];
                own += h == 1;
                seen.in_shared += h > 1;
                leaves = h > 1 && s->t[k].n_slots % BS;
            }
            promised += over(s->t[k].r, s->growth ? held - leaves : own);
        }
    }
    if (n_tokens) { /* so there is room for them */
        kvf_append_item items[SEQS];
        int fits = 1;
        for (uint32_t i = 0; i < n; i++) {
            items[i] = (kvf_append_item){seqs[i], n_tokens};
            for (uint32_t k = 0; k < TABLES; k++) fits &= w->s[which[i]].t[k].n_slots + n_tokens <= SLOTS;
        }
        if (fits) STATUS(w, kvf_can_append(w->m, items, n, NULL), KVF_OK);
    }
    kvf_occupancy after = occupancy(w->m);
    CHECK(w, after.blocks.n_promised == o.blocks.n_promised + promised, "promised %u, not %u + %u\n",
          after.blocks.n_promised, o.blocks.n_promised, promised);
}

static void op_flush(world *w) {
    w->op = "flush";
    flush(w);
}

static void op_done(world *w) {
    w->op = "done";
    done(w, (int)rnd(w, 2));
}

static void run(uint64_t seed, uint32_t n_steps, int profiled) {
    static void (*const ops[])(world *) = {op_create, op_append,   op_append,  op_append, op_append_early, op_fork,
                                           op_free,   op_rollback, op_reserve, op_scores, op_compact,      op_out,
                                           op_out,    op_in,       op_in,      op_flush,  op_done,         op_done};
    world *w = calloc(1, sizeof *w);
    cr_assert_not_null(w);
    w->seed = seed;
    w->rng = seed * 0x9e3779b97f4a7c15u | 1;
    w->op = "make";
    w->n_host = 4 + rnd(w, 60);
    w->n_host_pages = 4 + rnd(w, 60);
    kvf_manager_config c = config_of((shape){LAYERS, GROUPS, 1, BS, 16 + rnd(w, 48), 16 + rnd(w, 48), SEQS, SLOTS});
    c.n_host_blocks = w->n_host;
    c.n_host_score_pages = w->n_host_pages;
    kvf_profile_config profile;
    kvf_profile_config_init(&profile, sizeof profile);
    if (profiled) c.profile = &profile;
    c.view_copies = 1;
    w->n_classes = 1;
    kvf_block_class classes[2] = {{c.n_blocks / 2 - 4 + rnd(w, 8), w->n_host / 2 - 1 + rnd(w, 3), 10}};
    classes[1] = (kvf_block_class){c.n_blocks - classes[0].n_blocks, w->n_host - classes[0].n_host_blocks, 30};
    if (seed % 3 == 0) {
        w->n_classes = c.n_classes = 2;
        w->layer_class[1] = 1;
        c.classes = classes;
        c.layer_class = w->layer_class;
        c.block_bytes = 0;
    }
    OK(kvf_manager_create(&c, &w->m, NULL));
    mirror_open(&w->mirror, w->m);
    memset(w->mem, 0xff, sizeof w->mem);
    for (int i = 0; i < 2; i++) w->lists[i] = (kvf_copy_list){w->items[i], 0, COPIES_MAX};
    for (w->step = 0; w->step < n_steps; w->step++) {
        if (w->lists[0].n > COPIES_MAX / 2) done(w, 0);
        if (w->lists[1].n > COPIES_MAX / 2) done(w, 1);
        ops[rnd(w, sizeof ops / sizeof *ops)](w);
        compare(w);
    }
    w->op = "end";
    for (int i = 0; i < 2; i++) done(w, i);
    for (int i = 0; i < SEQS; i++)
        if (w->s[i].alive) OK(kvf_seq_free(w->m, w->s[i].handle));
    expect_tiers(w->m, 0, 0);
    if (profiled) {
        kvf_profile p = {.struct_size = sizeof p};
        OK(kvf_profile_read(w->m, &p, NULL, 0, 0));
        cr_assert_eq(p.freed_by_end + p.freed_by_compaction + p.freed_by_rollback + p.freed_by_release +
                         p.freed_by_eviction + p.freed_by_swap + p.freed_by_adoption + p.freed_by_removal,
                     p.freed_blocks);
        cr_assert_eq(p.taken_blocks, p.freed_blocks);
        cr_assert_eq(p.host_held, 0);
        cr_assert_gt(p.swapped_in_blocks, 0);
        cr_assert_geq(p.swapped_out_blocks, p.swapped_in_blocks / 2);
        cr_assert_gt(p.freed_by_swap, 0);
        cr_assert_gt(p.host_held_max, 0);
    }
    kvf_manager_destroy(w->m);
    mirror_close(&w->mirror);
    free(w);
}

Test(tier_random, random_operations_keep_every_number) {
    uint64_t base = 1;
    const char *given = getenv("KVF_TEST_SEED");
    if (given) base = strtoull(given, NULL, 10);
    for (uint64_t i = 0; i < 24; i++) run(base + i, 1500, i % 2);
    cr_assert(seen.outs > 500 && seen.ins > 500 && seen.out_no_blocks > 50 && seen.in_no_blocks > 50);
    cr_assert(seen.out_states > 50 && seen.in_shared > 100 && seen.freed_swapped > 50 && seen.freed_pending > 50);
    cr_assert(seen.compressed > 50 && seen.back_before_done > 50 && seen.refused > 50 && seen.cow > 50);
    cr_assert(seen.scores_out > 50);
}
