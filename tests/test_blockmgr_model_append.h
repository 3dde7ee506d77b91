/* The naive model of an append (test_blockmgr_random.c): what it takes, drops, copies and writes. */
#ifndef KVF_TEST_BLOCKMGR_MODEL_APPEND_H
#define KVF_TEST_BLOCKMGR_MODEL_APPEND_H

#include "test_blockmgr_model.h"

/* What has been seen, so that the test cannot pass by doing nothing. */
static struct {
    uint64_t appends, cow, last_in_place, no_blocks, forks, fork_no_blocks, fresh, in_place, last_owner,
        begin_no_blocks, cancels, free_cancels, rollbacks, reserves, reserve_no_blocks, scores, scores_no_blocks,
        pinned_free, holds, stale, sure_growth, dropped, drops_served, drops_pinned, drops_shared, too_far_back,
        one_class_lacks, left_alone, too_many_entries;
} seen;

typedef struct wanted {
    uint32_t blocks[CLASSES], pages; /* beyond the promises */
    uint32_t freed[CLASSES];         /* by windows, and not promised again */
    int sure;                        /* all within reservations that are covered */
    uint32_t per_table[SEQS][TABLES_MAX], cow[SEQS][TABLES_MAX];
} wanted;

/* Leading blocks of which every position is at or before next_pos - window. */
static uint32_t n_dropped(const world *w, const seq *s, uint32_t k) {
    uint32_t first = s->next_pos - s->t[k].n_slots, n = 0, window = window_of(w, k);
    if (!window || window == KVF_LAYER_NONE) return 0;
    while ((n + 1) * BS <= s->t[k].n_slots && first + (n + 1) * BS - 1 + window <= s->next_pos) n++;
    return n;
}

/* What falls free of them, and what of that the table is promised again. now: without what others of the batch drop or leave. */
static void count_dropped(const table *t, uint32_t n, const refs *r, const refs *now, uint32_t *freed,
                          uint32_t *promised) {
    uint32_t n_private = 0;
    *freed = 0;
    for (uint32_t b = 0; b < t->n_blocks; b++) {
        n_private += b >= n && r->holders[t->row[b]] == 1;
        *freed += b < n && now->holders[t->row[b]] + now->pins[t->row[b]] == 1;
    }
    *promised = least(over(over(t->r, n_private), t->p), *freed);
}

static void want_append(world *w, refs r, const int *which, const kvf_append_item *items, uint32_t n, wanted *out) {
    memset(out, 0, sizeof *out);
    out->sure = 1;
    const refs before = r;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < w->n_tables; k++) {
            const seq *s = &w->s[which[i]];
            const table *t = &s->t[k];
            if (window_of(w, k) == KVF_LAYER_NONE) continue;
            uint32_t d = n_dropped(w, s, k), freed, promised;
            uint32_t after = ceil_bs(t->n_slots + items[i].n_tokens), blocks = after - t->n_blocks;
            count_dropped(t, d, &before, &r, &freed, &promised);
            out->freed[class_at(w, k)] += freed - promised;
            for (uint32_t b = 0; b < d; b++) {
                out->sure &= before.holders[t->row[b]] != 1 || !before.pins[t->row[b]];
                r.holders[t->row[b]]--;
            }
            if (t->n_slots % BS && r.holders[t->row[t->n_blocks - 1]] > 1) {
                out->cow[i][k] = 1;
                blocks++;
                r.holders[t->row[t->n_blocks - 1]]--;
            }
            uint32_t pages = s->has_scores && !window_of(w, k) ? after - t->n_pages : 0;
            out->per_table[i][k] = blocks;
            out->blocks[class_at(w, k)] += over(blocks, t->p + promised);
            out->pages += over(pages, t->page_p);
            out->sure &= (t->sure && after - d <= t->r && pages <= t->page_p) || blocks + pages == 0;
        }
}

static void appended(world *w, refs *r, refs *pr, seq *s, uint32_t k, uint32_t n_tokens, uint32_t blocks, int cow,
                     int list, uint32_t *copy) {
    table *t = &s->t[k];
    const uint32_t *row;
    uint32_t old = t->n_slots, after = ceil_bs(old + n_tokens);
    uint32_t n_pages = s->has_scores && !window_of(w, k) ? after : t->n_pages;
    if (window_of(w, k) == KVF_LAYER_NONE) return;
    STATUS(w, kvf_seq_table(w->m, s->handle, k / w->n_groups, k % w->n_groups, NULL, NULL, &row), KVF_OK);
    if (cow) {
        uint32_t src = t->row[t->n_blocks - 1], dst = row[t->n_blocks - 1];
        take_block(w, r, k, dst);
        r->holders[src]--;
        expect_copy(w, list, (*copy)++, KVF_COPY_BLOCK, src, dst, old % BS);
        t->row[t->n_blocks - 1] = dst;
        seen.cow++;
    }
    for (; t->n_blocks < after; t->n_blocks++) take_block(w, r, k, t->row[t->n_blocks] = row[t->n_blocks]);
    t->p -= least(t->p, blocks);
    t->page_p -= least(t->page_p, n_pages - t->n_pages);
    kvf_view v = {.struct_size = sizeof v};
    fill_view(w, 0, &s->handle, 1, &v);
    for (; t->n_pages < n_pages; t->n_pages++)
        take(w, pr, w->n_pages, t->score_row[t->n_pages] = v.score_rows[v.row_offset[k] + t->n_pages]);
    t->n_slots += n_tokens;
    for (uint32_t i = old; i < t->n_slots; i++) t->tags[i] = t->scores[i] = ++w->next_tag;
}

/* All windows of the batch give up what none of the new tokens sees. */
static void drop_leading(world *w, const int *which, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < w->n_tables; k++) {
            table *t = &w->s[which[i]].t[k];
            uint32_t d = n_dropped(w, &w->s[which[i]], k), freed, promised;
            refs r, pr;
            if (!d) continue;
            count(w, &r, &pr);
            count_dropped(t, d, &r, &r, &freed, &promised);
            for (uint32_t b = 0; b < d; b++) {
                if (r.holders[t->row[b]] == 1 && r.pins[t->row[b]]) t->sure = 0, seen.drops_pinned++;
                seen.drops_shared += r.holders[t->row[b]] > 1;
            }
            t->p += promised;
            t->n_blocks -= d;
            t->n_slots -= d * BS;
            memmove(t->row, t->row + d, t->n_blocks * sizeof *t->row);
            memmove(t->tags, t->tags + d * BS, t->n_slots * sizeof *t->tags);
            seen.dropped += d;
        }
}

/* A sharer that was rolled back may write, as the last holder, into slots that a copy still has to read. */
static int overtakes_a_copy(const world *w, const table *t, uint32_t from) {
    for (uint32_t i = 0; from % BS && i < w->n_pend; i++)
        if (!w->pend[i].carried_out && w->pend[i].c.kind == KVF_COPY_BLOCK && w->pend[i].c.src == t->row[from / BS] &&
            w->pend[i].c.n_slots > from % BS)
            return 1;
    return 0;
}

/* Pages taken late (the cover was short) get scores for slots that are older than this append. */
static void write_new(world *w, table *t, uint32_t from, uint32_t pages_from) {
    for (uint32_t i = from; i < t->n_slots; i++) w->kv[t->row[i / BS]][i % BS] = t->tags[i];
    for (uint32_t i = 0; i < t->n_slots; i++)
        if (i / BS < t->n_pages && (i >= from || i / BS >= pages_from))
            w->score[t->score_row[i / BS]][i % BS] = t->scores[i];
}

#endif
