/* The naive model of a compaction (test_blockmgr_random.c): what it begins with, what is written, what it leaves. */
#ifndef KVF_TEST_BLOCKMGR_MODEL_COMPACT_H
#define KVF_TEST_BLOCKMGR_MODEL_COMPACT_H

#include "test_blockmgr_model_append.h"

/* Cancels the compaction in the model. */
static inline void dropped(world *w) {
    for (int i = 0; i < SEQS; i++)
        for (uint32_t k = 0; k < w->n_tables; k++) {
            table *t = &w->s[i].t[k];
            t->p += t->fresh_used;
            t->n_fresh = t->fresh_used = 0;
            w->s[i].locked = 0;
        }
    w->compacting = 0;
}

/* Slots of a (sequence, layer) to keep, a number for all groups or one for each; 0: none of its tables can shrink. */
static inline int choose_keep(world *w, const seq *s, uint32_t l, uint32_t *keep, int *alike) {
    const table *t = s->t + l * w->n_groups;
    uint32_t least_slots = SLOTS + BS, shrinks = 0;
    for (uint32_t g = 0; g < w->n_groups; g++) least_slots = least(least_slots, t[g].n_slots);
    *alike = (int)rnd(w, 2);
    if (*alike && least_slots < 2) return 0;
    uint32_t n = *alike ? 1 + rnd(w, least_slots - 1) : 0;
    for (uint32_t g = 0; g < w->n_groups; g++) {
        if (t[g].n_slots == 0) return 0;
        keep[g] = *alike ? n : rnd(w, 3) ? 1 + rnd(w, t[g].n_slots) : t[g].n_slots;
        shrinks += keep[g] < t[g].n_slots;
    }
    seen.left_alone += shrinks && shrinks < w->n_groups;
    return shrinks > 0;
}

static inline void choose_items(world *w) {
    w->n_items = 0;
    uint32_t density = 1 + rnd(w, 6), start = rnd(w, SEQS);
    for (uint32_t j = 0; j < SEQS * LAYERS; j++) {
        uint32_t i = (start + j / LAYERS) % SEQS, l = j % LAYERS;
        uint32_t *keep = w->ci_keep[w->n_items];
        int alike = 0;
        if (!w->s[i].alive || w->windows[l] || rnd(w, density) || !choose_keep(w, &w->s[i], l, keep, &alike)) continue;
        w->ci_seq[w->n_items] = i;
        w->ci[w->n_items++] = (kvf_compact_item){w->s[i].handle, l, alike ? keep[0] : 0, alike ? NULL : keep};
    }
}

static inline uint32_t keep_of(const world *w, uint32_t e) { return w->ci_keep[e / w->n_groups][e % w->n_groups]; }

static inline void op_begin(world *w) {
    w->op = "compact_begin";
    kvf_compaction c;
    if (w->compacting) {
        STATUS(w, kvf_compact_begin(w->m, w->ci, w->n_items, &c), KVF_E_STATE);
        return;
    }
    choose_items(w);
    refs r, pr, left;
    count(w, &r, &pr);
    left = r; /* owners that go to fresh blocks count as gone */
    uint32_t fresh[SEQS * LAYERS * GROUPS_MAX], wanted_blocks[CLASSES] = {0, 0};
    for (uint32_t e = 0; e < w->n_items * w->n_groups; e++) {
        const table *t =
            &w->s[w->ci_seq[e / w->n_groups]].t[w->ci[e / w->n_groups].layer * w->n_groups + e % w->n_groups];
        int shared = 0, was_shared = 0;
        fresh[e] = 0;
        if (keep_of(w, e) == t->n_slots) continue; /* stays, and still holds what it holds */
        for (uint32_t b = 0; b < t->n_blocks; b++) {
            shared |= left.holders[t->row[b]] + r.pins[t->row[b]] > 1;
            was_shared |= r.holders[t->row[b]] > 1;
        }
        for (uint32_t b = 0; shared && b < t->n_blocks; b++) left.holders[t->row[b]]--;
        fresh[e] = shared ? ceil_bs(keep_of(w, e)) : 0;
        wanted_blocks[w->layer_class[w->ci[e / w->n_groups].layer]] += over(fresh[e], t->p);
        seen.last_owner += was_shared && !shared;
    }
    int lack = wanted_blocks[0] > spare(&r, 0) || wanted_blocks[1] > spare(&r, 1);
    kvf_status want = lack ? KVF_E_NO_BLOCKS : KVF_OK;
    STATUS(w, kvf_compact_begin(w->m, w->ci, w->n_items, &c), want);
    seen.begin_no_blocks += want == KVF_E_NO_BLOCKS;
    if (want) return;
    w->compacting = 1;
    for (uint32_t e = 0; e < w->n_items * w->n_groups; e++) {
        seq *s = &w->s[w->ci_seq[e / w->n_groups]];
        table *t = &s->t[w->ci[e / w->n_groups].layer * w->n_groups + e % w->n_groups];
        s->locked = 1;
        CHECK(w, (c.dst_row[e] != NULL) == (fresh[e] > 0), "table %u: fresh or not\n", e);
        t->n_fresh = fresh[e];
        t->fresh_used = least(t->p, fresh[e]);
        t->p -= t->fresh_used;
        for (uint32_t b = 0; b < fresh[e]; b++)
            take_block(w, &r, w->ci[e / w->n_groups].layer * w->n_groups, t->fresh[b] = c.dst_row[e][b]);
        w->ci_left[e] = keep_of(w, e) == t->n_slots;
        if (!w->ci_left[e]) *(fresh[e] ? &seen.fresh : &seen.in_place) += 1;
    }
}

/* A policy at work on one table: a random choice of slots in random order, through the simulated memory. */
static inline void write_kept(world *w, seq *s, table *t, uint32_t n_keep) {
    uint32_t kv[SLOTS], score[SLOTS], pick[SLOTS];
    const uint32_t *dst = t->n_fresh ? t->fresh : t->row;
    for (uint32_t i = 0; i < t->n_slots; i++) pick[i] = i;
    for (uint32_t i = 0; i < n_keep; i++) {
        uint32_t j = i + rnd(w, t->n_slots - i), swap = pick[i];
        pick[i] = pick[j];
        pick[j] = swap;
        kv[i] = read_slot(w, KVF_COPY_BLOCK, t->row[pick[i] / BS], pick[i] % BS);
        CHECK(w, kv[i] == t->tags[pick[i]], "slot %u was overwritten before it was read\n", pick[i]);
        score[i] = ++w->next_tag;
    }
    for (uint32_t i = 0; i < n_keep; i++) {
        w->kv[dst[i / BS]][i % BS] = t->tags[i] = kv[i];
        if (s->has_scores && i / BS < t->n_pages) w->score[t->score_row[i / BS]][i % BS] = score[i];
        t->scores[i] = score[i];
    }
}

static inline void committed(world *w, uint32_t e, int pass) {
    uint32_t k = w->ci[e / w->n_groups].layer * w->n_groups + e % w->n_groups, n_keep = keep_of(w, e);
    uint32_t c = class_at(w, k);
    table *t = &w->s[w->ci_seq[e / w->n_groups]].t[k];
    if (w->ci_left[e]) return;
    refs r, pr;
    count(w, &r, &pr);
    uint32_t free_before = r.n_free[c], pages_before = pr.n_free[0];
    if (pass == 0) {
        uint32_t old = t->n_blocks, keep = t->n_fresh ? 0 : ceil_bs(n_keep);
        for (uint32_t b = keep; b < old; b++)
            if (r.holders[t->row[b]] == 1 && r.pins[t->row[b]]) t->sure = 0;
        if (t->n_fresh) memcpy(t->row, t->fresh, sizeof t->row);
        t->n_blocks = ceil_bs(n_keep);
        t->n_fresh = t->fresh_used = 0;
        t->n_slots = n_keep;
        t->n_pages = least(t->n_pages, t->n_blocks);
        count(w, &r, &pr);
    }
    uint32_t limit = pass == 0 ? r.n_free[c] - free_before : spare(&r, c);
    uint32_t page_limit = pass == 0 ? pr.n_free[0] - pages_before : spare(&pr, 0);
    uint32_t owed = over(t->r, t->n_blocks), owed_pages = over(t->page_r, t->n_pages);
    t->p = least(owed, t->p);
    t->page_p = least(owed_pages, t->page_p);
    t->p += least(owed - t->p, limit);
    t->page_p += least(owed_pages - t->page_p, page_limit);
}

static inline void op_commit(world *w) {
    w->op = "compact_commit";
    if (!w->compacting) {
        STATUS(w, kvf_compact_commit(w->m), KVF_E_STATE);
        return;
    }
    carry_out(w);
    for (int in_place = 0; in_place < 2; in_place++) /* the documented order of writes */
        for (uint32_t e = 0; e < w->n_items * w->n_groups; e++) {
            seq *s = &w->s[w->ci_seq[e / w->n_groups]];
            table *t = &s->t[w->ci[e / w->n_groups].layer * w->n_groups + e % w->n_groups];
            if ((t->n_fresh == 0) == in_place && !w->ci_left[e]) write_kept(w, s, t, keep_of(w, e));
        }
    STATUS(w, kvf_compact_commit(w->m), KVF_OK);
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t e = 0; e < w->n_items * w->n_groups; e++) committed(w, e, pass);
    dropped(w);
}

static inline void op_cancel(world *w) {
    w->op = "compact_cancel";
    STATUS(w, kvf_compact_cancel(w->m), w->compacting ? KVF_OK : KVF_E_STATE);
    seen.cancels += w->compacting != 0;
    if (w->compacting) dropped(w);
}

#endif
