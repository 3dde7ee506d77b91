/* The block manager against a naive model: random operations, everything compared and audited after each. */
#include "test_blockmgr_model_compact.h"

/* ---- Choosing ---------------------------------------------------------------------------------------------- */

static int any_seq(world *w) {
    int first = (int)rnd(w, SEQS);
    for (int i = 0; i < SEQS; i++)
        if (w->s[(first + i) % SEQS].alive) return (first + i) % SEQS;
    return NONE;
}
static int dead_seq(const world *w) {
    for (int i = 0; i < SEQS; i++)
        if (!w->s[i].alive) return i;
    return NONE;
}

/* ---- Blocks in tables --------------------------------------------------------------------------------------- */

static int beyond(const world *w, int64_t more) {
    int64_t n = more;
    for (int i = 0; i < SEQS; i++)
        for (uint32_t k = 0; w->s[i].alive && k < w->n_tables; k++) n += w->s[i].t[k].n_blocks;
    return more > 0 && n > (int64_t)w->table_blocks;
}
static int64_t more_blocks(const world *w, const seq *s, uint32_t k, uint32_t n_tokens) {
    if (window_of(w, k) == KVF_LAYER_NONE) return 0;
    return (int64_t)ceil_bs(s->t[k].n_slots + n_tokens) - s->t[k].n_blocks - n_dropped(w, s, k);
}

/* ---- Append, rollback ------------------------------------------------------------------------------------------ */

static void op_append(world *w) {
    w->op = "append";
    kvf_append_item items[SEQS];
    int which[SEQS];
    uint32_t n = 0, most = 1 + rnd(w, 3);
    kvf_status want = KVF_OK;
    int64_t entered = 0;
    for (int i = 0, first = (int)rnd(w, SEQS); i < SEQS && n < most; i++) {
        int k = (first + i * 5) % SEQS;
        if (!w->s[k].alive || (w->s[k].locked && rnd(w, 8))) continue;
        which[n] = k;
        items[n] = (kvf_append_item){w->s[k].handle, rnd(w, 3) ? 1 : 1 + rnd(w, 14)};
        if (!want && w->s[k].locked) want = KVF_E_STATE;
        for (uint32_t t = 0; !want && t < w->n_tables; t++)
            if (window_of(w, t) != KVF_LAYER_NONE &&
                w->s[k].t[t].n_slots - n_dropped(w, &w->s[k], t) * BS + items[n].n_tokens > SLOTS)
                want = KVF_E_LIMIT;
        for (uint32_t t = 0; t < w->n_tables; t++) entered += more_blocks(w, &w->s[k], t, items[n].n_tokens);
        n++;
    }
    refs r, pr;
    count(w, &r, &pr);
    wanted need;
    want_append(w, r, which, items, n, &need);
    uint32_t lack = 0, lack_pages = over(need.pages, spare(&pr, 0)), lacking = 0;
    for (uint32_t c = 0; c < CLASSES; c++) {
        uint32_t of = over(need.blocks[c], spare(&r, c) + need.freed[c]);
        lack += of;
        lacking += of != 0;
    }
    seen.one_class_lacks += lacking == 1 && w->class_end[0] < w->n_blocks;
    if (!want && (lack || lack_pages)) want = KVF_E_NO_BLOCKS;
    if (!want && beyond(w, entered)) want = KVF_E_LIMIT, seen.too_many_entries++;
    int list = (int)rnd(w, 2);
    uint32_t copy = w->lists[list].n, copies_from = copy, missing = 77;
    STATUS(w, kvf_can_append(w->m, items, n, &missing), want);
    if (!want || want == KVF_E_NO_BLOCKS)
        CHECK(w, missing == (lack > lack_pages ? lack : lack_pages), "missing %u, not %u or %u\n", missing, lack,
              lack_pages);
    STATUS(w, kvf_append(w->m, items, n, &w->lists[list]), want);
    if (want == KVF_E_NO_BLOCKS) {
        CHECK(w, !need.sure, "a growth within its reservation failed\n");
        seen.no_blocks++;
    }
    if (want) return;
    seen.appends++;
    seen.sure_growth += need.sure && need.blocks[0] + need.blocks[1] == 0 && n;
    seen.drops_served += need.blocks[0] > spare(&r, 0) || need.blocks[1] > spare(&r, 1);
    drop_leading(w, which, n);
    count(w, &r, &pr);
    want_append(w, r, which, items, n, &need); /* what is shared no more need not be copied */
    uint32_t from[SEQS][TABLES_MAX], pages_from[SEQS][TABLES_MAX];
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < w->n_tables; k++) {
            table *t = &w->s[which[i]].t[k];
            from[i][k] = t->n_slots;
            pages_from[i][k] = t->n_pages;
            if (t->n_slots % BS && !need.cow[i][k] && r.pins[t->row[t->n_blocks - 1]]) seen.last_in_place++;
            appended(w, &r, &pr, &w->s[which[i]], k, items[i].n_tokens, need.per_table[i][k], (int)need.cow[i][k], list,
                     &copy);
        }
    CHECK(w, copy == w->lists[list].n, "%u copies, not %u\n", w->lists[list].n, copy);
    note_copies(w, list, copies_from);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < w->n_tables; k++)
            if (overtakes_a_copy(w, &w->s[which[i]].t[k], from[i][k])) carry_out(w);
    for (uint32_t i = 0; i < n; i++) {
        w->s[which[i]].next_pos += items[i].n_tokens;
        for (uint32_t k = 0; k < w->n_tables; k++) write_new(w, &w->s[which[i]].t[k], from[i][k], pages_from[i][k]);
    }
}

static void op_rollback(world *w) {
    w->op = "rollback";
    int i = any_seq(w);
    if (i == NONE) return;
    seq *s = &w->s[i];
    uint32_t shortest = SLOTS, n;
    for (uint32_t k = 0; k < w->n_tables; k++)
        if (window_of(w, k) != KVF_LAYER_NONE) shortest = least(shortest, s->t[k].n_slots);
    n = rnd(w, 3) ? least(shortest, rnd(w, 6)) : rnd(w, shortest + 2);
    int too_far = n > shortest; /* or a window would lack what it had dropped */
    for (uint32_t k = 0; !too_far && k < w->n_tables; k++)
        if (window_of(w, k) && window_of(w, k) != KVF_LAYER_NONE) {
            too_far |= s->t[k].n_slots - n < least(window_of(w, k) - 1, s->next_pos - n);
            seen.too_far_back += (uint64_t)too_far;
        }
    if (!s->locked && !too_far) carry_out(w);
    STATUS(w, kvf_seq_rollback(w->m, s->handle, n), s->locked ? KVF_E_STATE : too_far ? KVF_E_INVALID : KVF_OK);
    if (s->locked || too_far) return;
    seen.rollbacks++;
    s->next_pos -= n;
    for (uint32_t k = 0; k < w->n_tables; k++) {
        table *t = &s->t[k];
        refs r, pr;
        if (window_of(w, k) == KVF_LAYER_NONE) continue;
        count(w, &r, &pr);
        uint32_t blocks = t->n_blocks, pages = t->n_pages;
        t->n_slots -= n;
        t->n_blocks = ceil_bs(t->n_slots);
        t->n_pages = least(t->n_pages, t->n_blocks);
        for (uint32_t b = t->n_blocks; b < blocks; b++)
            if (r.holders[t->row[b]] == 1 && r.pins[t->row[b]]) t->sure = 0;
        count(w, &r, &pr);
        uint32_t owed = least(over(t->r, private_blocks(t, &r)), t->p + blocks - t->n_blocks);
        uint32_t owed_pages = least(over(t->page_r, t->n_pages), t->page_p + pages - t->n_pages);
        t->p += least(over(owed, t->p), spare(&r, class_at(w, k)));
        t->page_p += least(over(owed_pages, t->page_p), spare(&pr, 0));
    }
}

/* ---- Sequences ------------------------------------------------------------------------------------------------------ */

static void op_create(world *w) {
    w->op = "create";
    int i = dead_seq(w);
    kvf_seq handle = 0;
    STATUS(w, kvf_seq_create(w->m, &handle), i == NONE ? KVF_E_LIMIT : KVF_OK);
    if (i == NONE) return;
    memset(&w->s[i], 0, sizeof w->s[i]);
    w->s[i].alive = 1;
    w->s[i].handle = handle;
}

static void op_fork(world *w) {
    w->op = "fork";
    int from = any_seq(w), to = dead_seq(w);
    if (from == NONE) return;
    seq *a = &w->s[from], *b;
    refs r, pr;
    count(w, &r, &pr);
    uint32_t blocks[CLASSES] = {0, 0}, pages = 0;
    int64_t entered = 0;
    for (uint32_t k = 0; k < w->n_tables; k++) {
        entered += a->t[k].n_blocks;
        blocks[class_at(w, k)] += a->t[k].r;
        pages += a->t[k].n_pages + over(a->t[k].page_r, a->t[k].n_pages);
    }
    int list = (int)rnd(w, 2);
    uint32_t copy = w->lists[list].n, copies_from = copy;
    int lack = blocks[0] > spare(&r, 0) || blocks[1] > spare(&r, 1) || pages > spare(&pr, 0);
    kvf_status want = a->locked ? KVF_E_STATE : to == NONE ? KVF_E_LIMIT : lack ? KVF_E_NO_BLOCKS : KVF_OK;
    if (!want && beyond(w, entered)) want = KVF_E_LIMIT, seen.too_many_entries++;
    kvf_seq handle = 0;
    STATUS(w, kvf_seq_fork(w->m, a->handle, &w->lists[list], &handle), want);
    seen.fork_no_blocks += want == KVF_E_NO_BLOCKS;
    if (want) return;
    seen.forks++;
    b = &w->s[to];
    *b = *a;
    b->handle = handle;
    kvf_view v = {.struct_size = sizeof v};
    fill_view(w, 0, &handle, 1, &v);
    for (uint32_t k = 0; k < w->n_tables; k++) {
        table *t = &b->t[k];
        if (private_blocks(&a->t[k], &r)) a->t[k].sure = 0;
        t->p = t->r;
        t->page_p = over(t->page_r, t->n_pages);
        t->sure = 1;
        for (uint32_t i = 0; i < t->n_pages; i++) {
            uint32_t src = t->score_row[i];
            take(w, &pr, w->n_pages, t->score_row[i] = v.score_rows[v.row_offset[k] + i]);
            expect_copy(w, list, copy++, KVF_COPY_SCORE_PAGE, src, t->score_row[i], least(BS, t->n_slots - i * BS));
        }
    }
    CHECK(w, copy == w->lists[list].n, "%u copies, not %u\n", w->lists[list].n, copy);
    note_copies(w, list, copies_from);
}

static void op_free(world *w) {
    w->op = "free";
    int i = any_seq(w);
    if (i == NONE) return;
    seen.free_cancels += w->s[i].locked != 0;
    if (w->s[i].locked) dropped(w);
    refs r, pr;
    count(w, &r, &pr);
    for (uint32_t k = 0; k < w->n_tables; k++)
        for (uint32_t b = 0; b < w->s[i].t[k].n_blocks; b++)
            seen.pinned_free += r.holders[w->s[i].t[k].row[b]] == 1 && r.pins[w->s[i].t[k].row[b]];
    kvf_seq handle = w->s[i].handle;
    STATUS(w, kvf_seq_free(w->m, handle), KVF_OK);
    w->s[i].alive = 0;
    STATUS(w, kvf_seq_free(w->m, handle), KVF_E_STALE);
}

/* ---- Reservations, scores ---------------------------------------------------------------------------------------------- */

static void op_reserve(world *w) {
    w->op = "reserve";
    int i = any_seq(w);
    if (i == NONE) return;
    seq *s = &w->s[i];
    refs r, pr;
    count(w, &r, &pr);
    uint32_t n_slots[TABLES_MAX], n_reserve[TABLES_MAX], p[TABLES_MAX], used[TABLES_MAX];
    uint32_t blocks[CLASSES] = {r.n_promised[0], r.n_promised[1]}, pages = pr.n_promised[0];
    int with_scores = (int)rnd(w, 2), drop = !rnd(w, 4);
    for (uint32_t k = 0; k < w->n_tables; k++) {
        table *t = &s->t[k];
        n_slots[k] = drop ? 0 : rnd(w, rnd(w, 3) ? 20 : SLOTS + 1);
        uint32_t reserve = window_of(w, k) == KVF_LAYER_NONE ? 0 : ceil_bs(n_slots[k]);
        uint32_t owed = over(reserve, private_blocks(t, &r));
        n_reserve[k] = reserve;
        used[k] = least(owed, t->n_fresh);
        p[k] = owed - used[k];
        blocks[class_at(w, k)] += p[k] - t->p;
        pages += (with_scores && !window_of(w, k) ? over(reserve, t->n_pages) : 0) - t->page_p;
    }
    int lack = blocks[0] > r.n_free[0] || blocks[1] > r.n_free[1] || pages > pr.n_free[0];
    kvf_status want = lack ? KVF_E_NO_BLOCKS : KVF_OK;
    STATUS(w,
           kvf_seq_reserve(
               w->m, s->handle,
               &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = n_slots, .with_scores = with_scores}),
           want);
    seen.reserve_no_blocks += want == KVF_E_NO_BLOCKS;
    if (want) return;
    seen.reserves++;
    for (uint32_t k = 0; k < w->n_tables; k++) {
        table *t = &s->t[k];
        t->r = n_reserve[k];
        t->page_r = with_scores && !window_of(w, k) ? t->r : 0;
        t->p = p[k];
        t->fresh_used = used[k];
        t->page_p = over(t->page_r, t->n_pages);
        t->sure = 1;
    }
}

static void op_scores(world *w) {
    w->op = "take_scores";
    int i = any_seq(w);
    if (i == NONE) return;
    seq *s = &w->s[i];
    refs r, pr;
    count(w, &r, &pr);
    uint32_t n_slots[TABLES_MAX], pages = 0;
    for (uint32_t k = 0; k < w->n_tables; k++) {
        n_slots[k] = rnd(w, s->t[k].n_slots + 1);
        if (!window_of(w, k)) pages += over(ceil_bs(n_slots[k]), s->t[k].page_p);
    }
    kvf_status want = s->has_scores ? KVF_E_STATE : pages > spare(&pr, 0) ? KVF_E_NO_BLOCKS : KVF_OK;
    STATUS(w, kvf_seq_take_scores(w->m, s->handle, n_slots), want);
    seen.scores_no_blocks += want == KVF_E_NO_BLOCKS;
    if (want) return;
    seen.scores++;
    s->has_scores = 1;
    kvf_view v = {.struct_size = sizeof v};
    fill_view(w, 0, &s->handle, 1, &v);
    for (uint32_t k = 0; k < w->n_tables; k++) {
        table *t = &s->t[k];
        for (; !window_of(w, k) && t->n_pages < ceil_bs(n_slots[k]); t->n_pages++)
            take(w, &pr, w->n_pages, t->score_row[t->n_pages] = v.score_rows[v.row_offset[k] + t->n_pages]);
        t->page_p -= least(t->page_p, t->n_pages);
        write_new(w, t, t->n_slots, 0);
    }
}

/* A step adds to the scores, in place. */
static void op_observe(world *w) {
    w->op = "observe";
    int i = any_seq(w);
    if (i == NONE || !w->s[i].has_scores) return;
    carry_out(w);
    for (uint32_t k = 0; k < w->n_tables; k++) {
        table *t = &w->s[i].t[k];
        for (uint32_t s = 0; s < t->n_slots; s++) t->scores[s] = ++w->next_tag;
        write_new(w, t, t->n_slots, 0);
    }
}

/* ---- Copies, holds ------------------------------------------------------------------------------------------------------------------ */

static void op_done(world *w) {
    w->op = "copies_done";
    int list = (int)rnd(w, 2);
    if (w->lists[list].n && !rnd(w, 4)) { /* one item is not pending: nothing is unpinned */
        uint32_t i = rnd(w, w->lists[list].n);
        kvf_copy right = w->items[list][i];
        w->items[list][i].src = right.src ? right.src - 1 : right.src + 1;
        STATUS(w, kvf_copies_done(w->m, &w->lists[list]), KVF_E_STALE);
        w->items[list][i] = right;
        seen.stale++;
        return;
    }
    carry_out(w);
    STATUS(w, kvf_copies_done(w->m, &w->lists[list]), KVF_OK);
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_pend; i++)
        if (w->pend[i].list != list) w->pend[n++] = w->pend[i];
    w->n_pend = n;
}

/* A block whose table a compaction may be writing in place is not there to be held. */
static int being_written(const world *w, uint32_t id) {
    for (int i = 0; i < SEQS; i++)
        for (uint32_t k = 0; w->s[i].alive && w->s[i].locked && k < w->n_tables; k++)
            for (uint32_t b = 0; b < w->s[i].t[k].n_blocks + w->s[i].t[k].n_fresh; b++) {
                const table *t = &w->s[i].t[k];
                if ((b < t->n_blocks ? t->row[b] : t->fresh[b - t->n_blocks]) == id) return 1;
            }
    return 0;
}

static void op_hold(world *w) {
    w->op = "hold";
    hold *h = NULL;
    for (int i = 0; i < HOLDS; i++)
        if (!w->h[i].used) h = &w->h[i];
    if (!h) return;
    refs r, pr;
    count(w, &r, &pr);
    if (!rnd(w, 4)) {
        uint32_t of = w->class_end[0] < w->n_blocks ? rnd(w, CLASSES) : 0;
        kvf_status want = spare(&r, of) ? KVF_OK : KVF_E_NO_BLOCKS;
        STATUS(w, of ? kvf_block_take(w->m, of, &h->handle) : kvf_block_take(w->m, 0, &h->handle), want);
        if (want) return;
        h->id = kvf_block_id(h->handle);
        take(w, &r, w->n_blocks, h->id);
        CHECK(w, class_of_id(w, h->id) == of, "block %u is of another class\n", h->id);
        for (uint32_t s = 0; s < BS; s++) w->kv[h->id][s] = ++w->next_tag;
    } else {
        uint32_t id = rnd(w, w->n_blocks + 1);
        if (id < w->n_blocks && being_written(w, id)) return;
        kvf_status want = id < w->n_blocks && r.holders[id] ? KVF_OK : KVF_E_STALE;
        STATUS(w, kvf_block_hold(w->m, id, &h->handle), want);
        if (want) return;
        h->id = id;
        for (int i = 0; i < SEQS; i++)
            for (uint32_t k = 0; w->s[i].alive && k < w->n_tables; k++)
                for (uint32_t b = 0; b < w->s[i].t[k].n_blocks; b++)
                    if (w->s[i].t[k].row[b] == id && r.holders[id] == 1) w->s[i].t[k].sure = 0;
    }
    seen.holds++;
    h->used = 1;
    for (uint32_t s = 0; s < BS; s++) h->content[s] = read_slot(w, KVF_COPY_BLOCK, h->id, s);
}

static void op_release(world *w) {
    w->op = "release";
    hold *h = &w->h[rnd(w, HOLDS)];
    int others = 0; /* equal handles of one block: any of them may be released */
    for (int i = 0; i < HOLDS; i++) others += w->h[i].used && &w->h[i] != h && w->h[i].handle == h->handle;
    if (!h->used && others) return;
    STATUS(w, kvf_block_release(w->m, h->handle), h->used ? KVF_OK : KVF_E_STALE);
    seen.stale += !h->used;
    h->used = 0;
}

/* ---- The runs --------------------------------------------------------------------------------------------------------------------------- */

static void one_step(world *w) {
    static const struct {
        void (*op)(world *);
        uint32_t weight;
    } ops[] = {{op_append, 36}, {op_create, 8},  {op_fork, 7},    {op_free, 7},    {op_reserve, 7},
               {op_scores, 4},  {op_observe, 2}, {op_begin, 7},   {op_commit, 7},  {op_cancel, 1},
               {op_done, 6},    {op_hold, 3},    {op_release, 4}, {op_rollback, 5}};
    uint32_t total = 0, i = 0;
    for (size_t k = 0; k < sizeof ops / sizeof ops[0]; k++) total += ops[k].weight;
    for (uint32_t pick = rnd(w, total); pick >= ops[i].weight; i++) pick -= ops[i].weight;
    if (w->lists[0].n > PENDING_MAX / 2 || w->lists[1].n > PENDING_MAX / 2)
        op_done(w);
    else
        ops[i].op(w);
    compare(w);
}

/* At the end everything is given back and the pools are full again. */
static void wind_up(world *w) {
    for (int i = 0; i < SEQS; i++) {
        if (!w->s[i].alive) continue;
        if (w->s[i].locked) dropped(w);
        STATUS(w, kvf_seq_free(w->m, w->s[i].handle), KVF_OK);
        w->s[i].alive = 0;
    }
    for (int i = 0; i < HOLDS; i++)
        if (w->h[i].used) STATUS(w, kvf_block_release(w->m, w->h[i].handle), KVF_OK);
    for (int i = 0; i < 2; i++) STATUS(w, kvf_copies_done(w->m, &w->lists[i]), KVF_OK);
    kvf_occupancy o = {.struct_size = sizeof o};
    STATUS(w, kvf_occupancy_read(w->m, &o, NULL, 0), KVF_OK);
    CHECK(w, o.blocks.n_free == w->n_blocks && o.score_pages.n_free == w->n_pages && !o.blocks.n_promised,
          "something leaked\n");
    kvf_error err = {.text = ""};
    CHECK(w, kvf_audit(w->m, &err) == KVF_OK, "audit: %s\n", err.text);
}

enum { WINDOWS = 1, TWO_CLASSES = 2 }; /* kinds of runs */

static uint64_t ticks(void *ctx) { return ((const world *)ctx)->step; }

/* Layers of a window, small and so wide that it drops late; full ones; ones that keep nothing. */
static const uint32_t all_windows[][LAYERS] = {
    {0, 9, 0}, {12, 0, 12}, {1, 0, 20}, {8, 8, 8}, {17, 30, 3}, {KVF_LAYER_NONE, 0, 10}, {0, KVF_LAYER_NONE, 0},
};

/* Layers of two classes, whose pools are of different size. */
static void set_classes(world *w, kvf_manager_config *c, kvf_block_class *classes, int on) {
    static const uint32_t all[][LAYERS] = {{0, 1, 0}, {1, 0, 0}, {0, 1, 1}, {1, 0, 1}};
    w->class_end[0] = w->class_end[1] = w->n_blocks;
    if (!on) return;
    memcpy(w->layer_class, all[rnd(w, 4)], sizeof w->layer_class);
    uint32_t n_layers = w->layer_class[0] + w->layer_class[1] + w->layer_class[2]; /* of the second */
    w->class_end[0] = w->n_blocks * (LAYERS - n_layers) / LAYERS + rnd(w, 5) - 2;
    classes[0] = (kvf_block_class){w->class_end[0], 0, 100};
    classes[1] = (kvf_block_class){w->n_blocks - w->class_end[0], 0, 7};
    c->n_classes = CLASSES;
    c->classes = classes;
    c->layer_class = w->layer_class;
}

static void run(uint64_t seed, int kind, uint32_t n_groups, uint32_t n_blocks, uint32_t n_pages, uint32_t n_steps) {
    static world w;
    int windows = kind & WINDOWS;
    memset(&w, 0, sizeof w);
    w.seed = seed;
    w.rng = seed * 0x9e3779b97f4a7c15u | 1;
    w.n_groups = n_groups;
    w.n_tables = LAYERS * n_groups;
    w.n_blocks = n_blocks;
    w.n_pages = n_pages;
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = LAYERS;
    c.n_kv_heads = n_groups;
    c.heads_per_group = 1;
    c.block_size = BS;
    c.n_blocks = n_blocks;
    c.n_score_pages = n_pages;
    c.max_seqs = SEQS;
    c.max_slots = SLOTS;
    /* Every third seed the tables may hold hardly more than all blocks. */
    w.table_blocks = c.n_table_blocks = seed % 3 ? 1u << 20 : n_blocks + (windows ? 0 : n_blocks / 4);
    w.profiled = seed & 1;
    c.view_copies = seed / 2 & 1;
    const uint32_t *layer_windows = all_windows[seed / 2 % (sizeof all_windows / sizeof all_windows[0])];
    if (windows) {
        memcpy(w.windows, layer_windows, sizeof w.windows);
        c.layer_windows = w.windows;
    }
    for (uint32_t b = 0; b < BLOCKS_MAX; b++) w.layer_of[b] = LAYERS;
    kvf_profile_config pc = {.struct_size = sizeof pc, .clock = ticks, .clock_ctx = &w};
    if (w.profiled) c.profile = &pc;
    kvf_error err = {.text = ""};
    kvf_block_class classes[CLASSES];
    set_classes(&w, &c, classes, kind & TWO_CLASSES);
    cr_assert_eq(kvf_manager_create(&c, &w.m, &err), KVF_OK, "%s", err.text);
    w.mirrored = c.view_copies != 0;
    if (w.mirrored) mirror_open(&w.mirror, w.m);
    for (int i = 0; i < 2; i++) w.lists[i] = (kvf_copy_list){w.items[i], 0, PENDING_MAX};
    for (uint32_t b = 0; b < n_blocks; b++)
        for (uint32_t s = 0; s < BS; s++) w.kv[b][s] = POISON;
    for (; w.step < n_steps; w.step++) one_step(&w);
    w.op = "wind_up";
    wind_up(&w);
    kvf_manager_destroy(w.m);
    if (w.mirrored) mirror_close(&w.mirror);
}

/* KVF_TEST_SEED=n runs that seed alone. */
static void run_seeds(uint64_t first, uint32_t n_seeds, int kind, uint32_t n_groups, uint32_t n_blocks,
                      uint32_t n_pages, uint32_t n_steps) {
    const char *only = getenv("KVF_TEST_SEED");
    if (only) {
        run(strtoull(only, NULL, 10), kind, n_groups, n_blocks, n_pages, n_steps);
        return;
    }
    for (uint32_t i = 0; i < n_seeds; i++) run(first + i, kind, n_groups, n_blocks, n_pages, n_steps);
    const uint64_t often[] = {seen.appends,        seen.cow,       seen.no_blocks, seen.forks,
                              seen.fork_no_blocks, seen.fresh,     seen.in_place,  seen.cancels,
                              seen.free_cancels,   seen.rollbacks, seen.reserves,  seen.reserve_no_blocks,
                              seen.scores,         seen.holds,     seen.stale,     seen.sure_growth};
    for (size_t i = 0; i < sizeof often / sizeof often[0]; i++)
        cr_assert_gt(often[i], n_seeds * (uint64_t)n_steps / 1000, "the %zu-th kind of event was seen %llu times only",
                     i, (unsigned long long)often[i]);
    const uint64_t rare[] = {seen.last_in_place,    seen.last_owner,  seen.begin_no_blocks,
                             seen.scores_no_blocks, seen.pinned_free, seen.too_many_entries};
    const uint64_t of_windows[] = {seen.dropped, seen.drops_served, seen.drops_pinned, seen.drops_shared,
                                   seen.too_far_back};
    for (size_t i = 0; kind & WINDOWS && i < sizeof of_windows / sizeof of_windows[0]; i++)
        cr_assert_gt(of_windows[i], 30, "windows: the %zu-th kind of event was seen %llu times only", i,
                     (unsigned long long)of_windows[i]);
    if (n_groups > 1) cr_assert_gt(seen.left_alone, n_seeds * (uint64_t)n_steps / 1000);
    if (kind & TWO_CLASSES) cr_assert_gt(seen.one_class_lacks, 300);
    for (size_t i = 0; i < sizeof rare / sizeof rare[0]; i++)
        cr_assert_gt(rare[i], 30, "the %zu-th rare kind of event was seen %llu times only", i,
                     (unsigned long long)rare[i]);
}

/* A million steps in all. */
Test(blockmgr_random, one_group_small_pool) { run_seeds(1000, 40, 0, 1, 40, 24, 10000); }
Test(blockmgr_random, one_group_roomy_pool) { run_seeds(2000, 20, 0, 1, 48, 48, 10000); }
Test(blockmgr_random, two_groups) { run_seeds(3000, 15, 0, 2, 48, 40, 10000); }
Test(blockmgr_random, many_short_lives) { run_seeds(4000, 250, 0, 1, 32, 20, 1000); }
/* 700,000 more where layers have windows. */
Test(blockmgr_random, windows) { run_seeds(5000, 42, WINDOWS, 1, 40, 24, 10000); }
Test(blockmgr_random, windows_of_two_groups) { run_seeds(6000, 28, WINDOWS, 2, 48, 40, 10000); }
/* 600,000 where layers are of two classes. */
Test(blockmgr_random, two_classes) { run_seeds(7000, 20, TWO_CLASSES, 1, 40, 24, 10000); }
Test(blockmgr_random, two_classes_of_two_groups) { run_seeds(8000, 16, TWO_CLASSES, 2, 48, 40, 10000); }
Test(blockmgr_random, two_classes_and_windows) { run_seeds(9000, 24, WINDOWS | TWO_CLASSES, 1, 40, 24, 10000); }
