/* The naive model of the block manager that test_blockmgr_random.c compares with.
 *
 * It keeps, for every table, the tag of the token in each slot, and knows the documented rules; reference counts it
 * counts anew each time. What blocks hold is simulated too: a write puts a token's tag into (block, slot), so a block
 * that is shared, copied, compacted or handed out wrongly shows as a wrong tag. Ids are the manager's choice: the model
 * takes them over once it has seen that they were free. Copies are carried out as late as the rules allow. */
#ifndef KVF_TEST_BLOCKMGR_MODEL_H
#define KVF_TEST_BLOCKMGR_MODEL_H

#include <stdlib.h>
#include <string.h>

#include "kvfold/profile.h"
#include "seeded.h"
#include "view_mirror.h"

enum { SEQS = 6, LAYERS = 3, GROUPS_MAX = 2, TABLES_MAX = LAYERS * GROUPS_MAX, BS = 8, ROW = 6, SLOTS = ROW * BS - 3 };
enum { BLOCKS_MAX = 48, CLASSES = 2, HOLDS = 6, PENDING_MAX = 512, NONE = -1 };
#define POISON 0xdeadbeefu

typedef struct table {
    uint32_t n_slots, n_blocks, n_pages;
    uint32_t row[ROW], score_row[ROW];
    uint32_t tags[SLOTS], scores[SLOTS]; /* expected contents */
    uint32_t r, p, page_r, page_p;       /* reservation and promise */
    uint32_t n_fresh, fresh_used, fresh[ROW];
    int sure; /* p + private >= r is promised, see manager.h */
} table;

typedef struct seq {
    int alive, has_scores, locked;
    kvf_seq handle;
    uint32_t next_pos;
    table t[TABLES_MAX];
} seq;

typedef struct hold {
    int used;
    kvf_block handle;
    uint32_t id, content[BS];
} hold;

typedef struct pending {
    kvf_copy c;
    int list, carried_out;
} pending;

typedef struct refs { /* counted, never kept */
    uint32_t holders[BLOCKS_MAX], pins[BLOCKS_MAX];
    uint32_t n_free[CLASSES], n_promised[CLASSES], n_shared; /* of pages: in the first */
} refs;

typedef struct world {
    kvf_manager *m;
    uint64_t seed, rng;
    uint32_t windows[LAYERS];                         /* 0: none */
    uint32_t layer_class[LAYERS], class_end[CLASSES]; /* of ids */
    uint32_t step, n_groups, n_tables, n_blocks, n_pages, next_tag;
    uint64_t table_blocks; /* the most in all tables */
    const char *op;
    seq s[SEQS];
    hold h[HOLDS];
    kvf_copy items[2][PENDING_MAX];
    kvf_copy_list lists[2];
    pending pend[2 * PENDING_MAX];
    uint32_t n_pend;
    uint32_t kv[BLOCKS_MAX][BS], score[BLOCKS_MAX][BS]; /* the simulated memory */
    /* compaction under way */
    int compacting;
    uint32_t n_items;
    kvf_compact_item ci[SEQS * LAYERS];
    uint32_t ci_seq[SEQS * LAYERS], ci_keep[SEQS * LAYERS][GROUPS_MAX]; /* of each group */
    int ci_left[SEQS * LAYERS * GROUPS_MAX];                            /* the table stays as it is */
    uint32_t held_max, class_held_max[CLASSES], pages_held_max, layer_max[LAYERS];
    /* where the manager keeps a profile */
    int profiled;
    uint32_t layer_of[BLOCKS_MAX]; /* LAYERS: in no layer */
    uint64_t n_events[KVF_PROFILE_KINDS], taken, freed;
    /* where its views have copies */
    int mirrored;
    view_mirror mirror;
} world;

static inline uint32_t rnd(world *w, uint32_t n) { return seeded_next(&w->rng, n); }
static inline uint32_t window_of(const world *w, uint32_t k) { return w->windows[k / w->n_groups]; }
static inline uint32_t class_at(const world *w, uint32_t k) { return w->layer_class[k / w->n_groups]; }
static inline uint32_t class_of_id(const world *w, uint32_t id) { return id >= w->class_end[0]; }
static inline uint32_t spare(const refs *r, uint32_t c) { return r->n_free[c] - r->n_promised[c]; }
static inline uint32_t ceil_bs(uint32_t n) { return (n + BS - 1) / BS; }

/* ---- Counting ------------------------------------------------------------------------------------ */

static inline void count(const world *w, refs *blocks, refs *pages) {
    memset(blocks, 0, sizeof *blocks);
    memset(pages, 0, sizeof *pages);
    for (int i = 0; i < SEQS; i++)
        for (uint32_t k = 0; w->s[i].alive && k < w->n_tables; k++) {
            const table *t = &w->s[i].t[k];
            for (uint32_t b = 0; b < t->n_blocks; b++) blocks->holders[t->row[b]]++;
            for (uint32_t b = 0; b < t->n_fresh; b++) blocks->holders[t->fresh[b]]++;
            for (uint32_t b = 0; b < t->n_pages; b++) pages->holders[t->score_row[b]]++;
            blocks->n_promised[class_at(w, k)] += t->p;
            pages->n_promised[0] += t->page_p;
        }
    for (int i = 0; i < HOLDS; i++) blocks->holders[w->h[i].id] += w->h[i].used != 0;
    for (uint32_t i = 0; i < w->n_pend; i++) {
        refs *r = w->pend[i].c.kind == KVF_COPY_BLOCK ? blocks : pages;
        r->pins[w->pend[i].c.src]++;
        r->pins[w->pend[i].c.dst]++;
    }
    for (uint32_t b = 0; b < w->n_blocks; b++) {
        blocks->n_free[class_of_id(w, b)] += !blocks->holders[b] && !blocks->pins[b];
        blocks->n_shared += blocks->holders[b] > 1;
    }
    for (uint32_t b = 0; b < w->n_pages; b++) pages->n_free[0] += !pages->holders[b] && !pages->pins[b];
}

static inline uint32_t private_blocks(const table *t, const refs *r) {
    uint32_t n = 0;
    for (uint32_t b = 0; b < t->n_blocks; b++) n += r->holders[t->row[b]] == 1;
    return n;
}

/* An id the manager handed out must have been free; it is then taken. */
static inline void take(world *w, refs *r, uint32_t n, uint32_t id) {
    CHECK(w, id < n && !r->holders[id] && !r->pins[id], "id %u was handed out, but it is held or pinned\n", id);
    r->holders[id] = 1;
}

/* Likewise a block for table k. */
static inline void take_block(world *w, refs *r, uint32_t k, uint32_t id) {
    take(w, r, w->n_blocks, id);
    CHECK(w, class_of_id(w, id) == class_at(w, k), "block %u of another class was handed out to table %u\n", id, k);
}

/* ---- Simulated memory ------------------------------------------------------------------------------- */

/* Follows copies that are not carried out yet. */
static inline uint32_t read_slot(const world *w, uint32_t kind, uint32_t id, uint32_t slot) {
    for (uint32_t i = w->n_pend; i-- > 0;) {
        const pending *p = &w->pend[i];
        if (!p->carried_out && p->c.kind == kind && p->c.dst == id && slot < p->c.n_slots) {
            id = p->c.src;
            i = w->n_pend;
        }
    }
    return kind == KVF_COPY_BLOCK ? w->kv[id][slot] : w->score[id][slot];
}

static inline void carry_out(world *w) {
    for (uint32_t i = 0; i < w->n_pend; i++) {
        pending *p = &w->pend[i];
        if (p->carried_out) continue;
        uint32_t(*mem)[BS] = p->c.kind == KVF_COPY_BLOCK ? w->kv : w->score;
        memcpy(mem[p->c.dst], mem[p->c.src], p->c.n_slots * sizeof(uint32_t));
        p->carried_out = 1;
    }
}

/* The items a call has added to a list. */
static inline void note_copies(world *w, int list, uint32_t from) {
    for (uint32_t i = from; i < w->lists[list].n; i++) w->pend[w->n_pend++] = (pending){w->items[list][i], list, 0};
    if (rnd(w, 2)) carry_out(w);
}

static inline void expect_copy(world *w, int list, uint32_t i, uint32_t kind, uint32_t src, uint32_t dst,
                               uint32_t n_slots) {
    CHECK(w, i < w->lists[list].n, "copy %u is missing\n", i);
    const kvf_copy *c = &w->items[list][i];
    CHECK(w, c->kind == kind && c->src == src && c->dst == dst && c->n_slots == n_slots,
          "copy %u: %u %u %u %u, not %u %u %u %u\n", i, c->kind, c->src, c->dst, c->n_slots, kind, src, dst, n_slots);
}

/* ---- Comparison ---------------------------------------------------------------------------------------- */

static inline void compare_table(world *w, const kvf_view *v, uint32_t vt, const table *t) {
    const uint32_t *row = v->rows + v->row_offset[vt], *score_row = v->score_rows + v->row_offset[vt];
    CHECK(w, v->n_slots[vt] == t->n_slots, "n_slots %u, not %u\n", v->n_slots[vt], t->n_slots);
    for (uint32_t b = 0; b < t->n_blocks; b++) {
        uint32_t id = b < t->n_blocks ? t->row[b] : KVF_NO_BLOCK,
                 page = b < t->n_pages ? t->score_row[b] : KVF_NO_BLOCK;
        CHECK(w, row[b] == id, "table %u, block %u: %u, not %u\n", vt, b, row[b], id);
        CHECK(w, score_row[b] == page, "table %u, page %u: %u, not %u\n", vt, b, score_row[b], page);
    }
    for (uint32_t s = 0; s < t->n_slots; s++) {
        uint32_t got = read_slot(w, KVF_COPY_BLOCK, row[s / BS], s % BS);
        CHECK(w, got == t->tags[s], "table %u, slot %u holds %x, not %x\n", vt, s, got, t->tags[s]);
        if (s / BS >= t->n_pages) continue;
        got = read_slot(w, KVF_COPY_SCORE_PAGE, score_row[s / BS], s % BS);
        CHECK(w, got == t->scores[s], "table %u, score %u is %x, not %x\n", vt, s, got, t->scores[s]);
    }
}

static inline void compare_figures(world *w, const refs *r, const refs *pr) {
    kvf_occupancy o = {.struct_size = sizeof o};
    kvf_layer_occupancy layers[LAYERS];
    uint64_t used[LAYERS] = {0};
    uint32_t blocks[LAYERS] = {0}, n_seqs = 0;
    STATUS(w, kvf_occupancy_read(w->m, &o, layers, sizeof *layers), KVF_OK);
    for (int i = 0; i < SEQS; i++) {
        n_seqs += (uint32_t)w->s[i].alive;
        for (uint32_t k = 0; w->s[i].alive && k < w->n_tables; k++) {
            used[k / w->n_groups] += w->s[i].t[k].n_slots;
            blocks[k / w->n_groups] += w->s[i].t[k].n_blocks;
        }
    }
    uint32_t held = 0, promised = 0, n_free = 0, held_max = 0, pages_held = w->n_pages - pr->n_free[0];
    for (uint32_t c = 0, first = 0; c < CLASSES; first = w->class_end[c++]) {
        uint32_t of = w->class_end[c] - first - r->n_free[c];
        held += of;
        n_free += r->n_free[c];
        promised += r->n_promised[c];
        w->class_held_max[c] = of > w->class_held_max[c] ? of : w->class_held_max[c];
        held_max += w->class_held_max[c];
    }
    for (uint32_t c = 0, first = 0; c < kvf_manager_get_config(w->m)->n_classes; first = w->class_end[c++]) {
        kvf_pool_occupancy p, host;
        uint32_t n_idle = 77;
        STATUS(w, kvf_class_occupancy(w->m, c, &p, &host, &n_idle), KVF_OK);
        CHECK(w,
              p.n_total == w->class_end[c] - first && p.n_free == r->n_free[c] && p.n_promised == r->n_promised[c] &&
                  p.n_held_max == w->class_held_max[c] && !n_idle && !host.n_total,
              "class %u: %u free, not %u, %u promised, not %u\n", c, p.n_free, r->n_free[c], p.n_promised,
              r->n_promised[c]);
    }
    w->held_max = held > w->held_max ? held : w->held_max;
    w->pages_held_max = pages_held > w->pages_held_max ? pages_held : w->pages_held_max;
    CHECK(w, o.blocks.n_free == n_free && o.blocks.n_held == held && o.blocks.n_held_max == held_max,
          "free %u, not %u\n", o.blocks.n_free, n_free);
    CHECK(w, o.blocks.n_promised == promised, "promised %u, not %u\n", o.blocks.n_promised, promised);
    CHECK(w, o.blocks.n_shared == r->n_shared, "shared %u, not %u\n", o.blocks.n_shared, r->n_shared);
    CHECK(w, o.score_pages.n_free == pr->n_free[0] && o.score_pages.n_held_max == w->pages_held_max,
          "free pages %u, not %u\n", o.score_pages.n_free, pr->n_free[0]);
    CHECK(w, o.score_pages.n_promised == pr->n_promised[0] && !o.score_pages.n_shared, "promised pages %u, not %u\n",
          o.score_pages.n_promised, pr->n_promised[0]);
    CHECK(w, o.n_seqs == n_seqs, "n_seqs %u, not %u\n", o.n_seqs, n_seqs);
    for (int l = 0; l < LAYERS; l++) {
        w->layer_max[l] = blocks[l] > w->layer_max[l] ? blocks[l] : w->layer_max[l];
        CHECK(w, layers[l].n_blocks == blocks[l] && layers[l].n_blocks_max == w->layer_max[l], "layer %d: %u blocks\n",
              l, layers[l].n_blocks);
        CHECK(w, layers[l].slots_used == used[l] && layers[l].slots_idle == (uint64_t)blocks[l] * BS - used[l],
              "layer %d\n", l);
    }
}

/* The profile's gauges against what the model counts, and the sums over all events against the gauges. */
static inline void compare_profile(world *w, const refs *r) {
    kvf_profile p = {.struct_size = sizeof p};
    kvf_profile_layer layers[LAYERS];
    uint64_t held[LAYERS + 1] = {0}, shared[LAYERS + 1] = {0};
    for (uint32_t b = 0; b < w->n_blocks; b++)
        if (!r->holders[b] && !r->pins[b]) w->layer_of[b] = LAYERS;
    for (int i = 0; i < SEQS; i++)
        for (uint32_t k = 0; w->s[i].alive && k < w->n_tables; k++) {
            const table *t = &w->s[i].t[k];
            for (uint32_t b = 0; b < t->n_blocks; b++) w->layer_of[t->row[b]] = k / w->n_groups;
            for (uint32_t b = 0; b < t->n_fresh; b++) w->layer_of[t->fresh[b]] = k / w->n_groups;
        }
    for (uint32_t b = 0; b < w->n_blocks; b++) {
        held[w->layer_of[b]] += r->holders[b] || r->pins[b];
        shared[w->layer_of[b]] += r->holders[b] > 1;
    }
    STATUS(w, kvf_profile_read(w->m, &p, layers, sizeof *layers, LAYERS), KVF_OK);
    CHECK(w, p.total == w->n_blocks && p.free == r->n_free[0] + r->n_free[1] && p.held + p.cached + p.free == p.total,
          "free %llu\n", (unsigned long long)p.free);
    CHECK(w, p.shared == r->n_shared && p.promised == r->n_promised[0] + r->n_promised[1] && p.outside == held[LAYERS],
          "shared %llu\n", (unsigned long long)p.shared);
    CHECK(w, p.held_max == w->held_max, "held_max %llu, not %u\n", (unsigned long long)p.held_max, w->held_max);
    for (int l = 0; l < LAYERS; l++)
        CHECK(w, layers[l].held == held[l] && layers[l].shared == shared[l], "layer %d: %llu held, not %llu\n", l,
              (unsigned long long)layers[l].held, (unsigned long long)held[l]);
    kvf_profile_event e[32];
    for (uint32_t n = 32; n == 32;) {
        STATUS(w, kvf_profile_drain(w->m, e, 32, &n), KVF_OK);
        for (uint32_t i = 0; i < n; i++) {
            CHECK(w, e[i].kind && e[i].kind < KVF_PROFILE_KINDS && e[i].time <= p.now, "event of kind %u\n", e[i].kind);
            w->n_events[e[i].kind]++;
            w->taken += e[i].kind == KVF_PROFILE_ALLOC ? e[i].n_blocks : 0;
            w->freed += e[i].kind == KVF_PROFILE_FREE ? e[i].n_blocks : 0;
        }
    }
    CHECK(w,
          p.events_dropped == 0 && w->taken == p.taken_blocks && w->freed == p.freed_blocks && //
              w->taken - w->freed == p.held,
          "events: %llu taken, %llu freed, %llu held\n", (unsigned long long)w->taken, (unsigned long long)w->freed,
          (unsigned long long)p.held);
    CHECK(w, p.lifetime.n == p.freed_blocks && p.idle_time.n == p.freed_blocks && p.idle_time.sum <= p.lifetime.sum,
          "histograms\n");
    CHECK(w, p.reuse_gap.n == p.shared_blocks && w->n_events[KVF_PROFILE_COPY] == p.copied_blocks, "copies\n");
    CHECK(w,
          p.freed_by_end + p.freed_by_compaction + p.freed_by_rollback + p.freed_by_release + p.freed_by_eviction +
                  p.freed_by_swap + p.freed_by_window ==
              p.freed_blocks,
          "causes\n");
}

/* All of its fills go through here: a copy is right only when it gets every list. */
static inline void fill_view(world *w, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs, kvf_view *v) {
    v->struct_size = sizeof *v;
    STATUS(w, kvf_view_fill(w->m, which, seqs, n_seqs, v), KVF_OK);
    const char *wrong = w->mirrored ? mirror_send(&w->mirror, w->m, which, seqs, v) : NULL;
    CHECK(w, !wrong, "view %u: %s\n", which, wrong);
}

static inline void compare(world *w) {
    kvf_error err = {.text = ""};
    CHECK(w, kvf_audit(w->m, &err) == KVF_OK, "audit: %s\n", err.text);
    refs r, pr;
    count(w, &r, &pr);
    compare_figures(w, &r, &pr);
    if (w->profiled) compare_profile(w, &r);
    kvf_seq handles[SEQS];
    int order[SEQS];
    uint32_t n = 0;
    for (int i = 0; i < SEQS; i++) {
        if (!w->s[i].alive) continue;
        uint32_t at = rnd(w, 3) ? n : rnd(w, n + 1); /* mostly the order of the last fill */
        order[n] = order[at], handles[n] = handles[at];
        order[at] = i, handles[at] = w->s[i].handle;
        n++;
    }
    kvf_view v = {.struct_size = sizeof v};
    fill_view(w, rnd(w, 4) ? w->step & 1 : 0, handles, n, &v);
    for (uint32_t at = 0; at < n; at++) {
        int i = order[at];
        CHECK(w, v.next_pos[at] == w->s[i].next_pos, "next_pos %u, not %u\n", v.next_pos[at], w->s[i].next_pos);
        for (uint32_t k = 0; k < w->n_tables; k++) {
            const table *t = &w->s[i].t[k];
            compare_table(w, &v, at * w->n_tables + k, t);
            CHECK(w, !t->sure || t->p + t->fresh_used + private_blocks(t, &r) >= t->r,
                  "a reservation is not covered\n");
        }
    }
    for (int i = 0; i < HOLDS; i++)
        for (uint32_t s = 0; w->h[i].used && s < BS; s++)
            CHECK(w, read_slot(w, KVF_COPY_BLOCK, w->h[i].id, s) == w->h[i].content[s], "a held block was written\n");
    for (uint32_t b = 0; b < w->n_blocks; b++)
        if (!r.holders[b] && !r.pins[b] && w->kv[b][0] != POISON)
            for (uint32_t s = 0; s < BS; s++) w->kv[b][s] = POISON;
}

#endif
