/* A device whose copies run only when it is told to, in random order as far as the rules allow, under a manager with a host
 * tier; and the naive model of what sequences hold that test_tier_random.c compares with.
 *
 * Every slot has a number. A write or a copy moves numbers through simulated memory, so that a block that is handed out while a
 * copy still needs it shows as a wrong number. */
#ifndef KVF_TEST_TIER_WORLD_H
#define KVF_TEST_TIER_WORLD_H

#include "kvfold/profile.h"
#include "seeded.h"
#include "test_blockmgr_util.h"
#include "view_mirror.h"

enum { SEQS = 6, LAYERS = 2, GROUPS = 2, TABLES = LAYERS * GROUPS, BS = 8, SLOTS = 44, ROW = 6 };
enum { BLOCKS_MAX = 64, COPIES_MAX = 1024, NONE = -1, KV = 0, SCORE = 1 };
#define POISON 0xdeadbeefu

typedef struct table {
    uint32_t n_slots, n_pages, r, page_r;
    uint32_t tags[SLOTS], scores[SLOTS];
    uint32_t cells[ROW]; /* swapped: which copy on the host each block is; equal ones are one */
} table;

typedef struct seq {
    int alive, swapped, has_scores, growth;
    kvf_seq handle;
    table t[TABLES];
} seq;

typedef struct pending {
    kvf_copy c;
    int list, ran;
} pending;

typedef struct world {
    kvf_manager *m;
    uint64_t seed, rng;
    uint32_t step, next_tag, next_cell;
    uint32_t n_host, n_host_pages;
    uint32_t n_classes, layer_class[LAYERS];
    const char *op;
    seq s[SEQS];
    kvf_copy items[2][COPIES_MAX];
    kvf_copy_list lists[2];
    pending pend[2 * COPIES_MAX];
    uint32_t n_pend;
    uint32_t mem[2][2][BLOCKS_MAX][BS]; /* (device or host, KV or SCORE, id, slot) */
    view_mirror mirror;
} world;

static inline uint32_t rnd(world *w, uint32_t n) { return seeded_next(&w->rng, n); }
static inline uint32_t class_at(const world *w, uint32_t k) { return w->layer_class[k / GROUPS]; }
static inline uint32_t ceil_bs(uint32_t n) { return (n + BS - 1) / BS; }
static inline uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* ---- The device ------------------------------------------------------------------------------------- */

static inline int what_of(uint32_t kind) {
    return kind == KVF_COPY_BLOCK || kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_BLOCK_IN ? KV : SCORE;
}
static inline int src_tier(uint32_t kind) { return kind == KVF_COPY_BLOCK_IN || kind == KVF_COPY_SCORE_IN; }
static inline int dst_tier(uint32_t kind) { return kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_SCORE_OUT; }

/* Whether one copy has to run before a later one. */
static inline int goes_before(const kvf_copy *a, const kvf_copy *b) {
    if (what_of(a->kind) != what_of(b->kind)) return 0;
    int same_src = dst_tier(a->kind) == src_tier(b->kind) && a->dst == b->src;
    int same_dst = dst_tier(a->kind) == dst_tier(b->kind) && a->dst == b->dst;
    int over_src = src_tier(a->kind) == dst_tier(b->kind) && a->src == b->dst;
    return same_src || same_dst || over_src;
}

static inline int may_run(const world *w, uint32_t i) {
    for (uint32_t j = 0; j < i; j++)
        if (!w->pend[j].ran && goes_before(&w->pend[j].c, &w->pend[i].c)) return 0;
    return 1;
}

static inline void flush(world *w) {
    uint32_t left = 0;
    for (uint32_t i = 0; i < w->n_pend; i++) left += !w->pend[i].ran;
    while (left) {
        uint32_t i = rnd(w, w->n_pend);
        while (w->pend[i].ran || !may_run(w, i)) i = (i + 1) % w->n_pend;
        const kvf_copy *c = &w->pend[i].c;
        memcpy(w->mem[dst_tier(c->kind)][what_of(c->kind)][c->dst], w->mem[src_tier(c->kind)][what_of(c->kind)][c->src],
               c->n_slots * sizeof(uint32_t));
        w->pend[i].ran = 1;
        left--;
    }
}

static inline void note_copies(world *w, int which, uint32_t from) {
    for (uint32_t i = from; i < w->lists[which].n; i++) w->pend[w->n_pend++] = (pending){w->items[which][i], which, 0};
}

/* Whether a pending copy has this block of the device at one end. */
static inline int is_pending(const world *w, int what, uint32_t id) {
    for (uint32_t i = 0; i < w->n_pend; i++) {
        const kvf_copy *c = &w->pend[i].c;
        if (what_of(c->kind) != what) continue;
        if ((!src_tier(c->kind) && c->src == id) || (!dst_tier(c->kind) && c->dst == id)) return 1;
    }
    return 0;
}

static inline void done(world *w, int which) {
    flush(w);
    STATUS(w, kvf_copies_done(w->m, &w->lists[which]), KVF_OK);
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->n_pend; i++)
        if (w->pend[i].list != which) w->pend[n++] = w->pend[i];
    w->n_pend = n;
}

/* As the stream will see it: through copies that have not run. */
static inline uint32_t read_slot(const world *w, int what, uint32_t id, uint32_t slot) {
    int tier = 0;
    for (uint32_t i = w->n_pend; i-- > 0;) {
        const pending *p = &w->pend[i];
        if (p->ran || what_of(p->c.kind) != what || dst_tier(p->c.kind) != tier || p->c.dst != id ||
            slot >= p->c.n_slots)
            continue;
        tier = src_tier(p->c.kind);
        id = p->c.src;
    }
    return w->mem[tier][what][id][slot];
}

/* ---- The tables ---------------------------------------------------------------------------------------- */

static inline const uint32_t *row_of(const world *w, const seq *s, uint32_t k) {
    const uint32_t *row = NULL;
    OK(kvf_seq_table(w->m, s->handle, k / GROUPS, k % GROUPS, NULL, NULL, &row));
    return row;
}
/* All fills go through here: a copy is right only when it gets every list. */
static inline void fill_view(world *w, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs, kvf_view *v) {
    v->struct_size = sizeof *v;
    OK(kvf_view_fill(w->m, which, seqs, n_seqs, v));
    const char *wrong = mirror_send(&w->mirror, w->m, which, seqs, v);
    CHECK(w, !wrong, "view %u: %s\n", which, wrong);
}

static inline const uint32_t *score_row_of(world *w, const seq *s, uint32_t k) {
    kvf_view v = {.struct_size = sizeof v};
    fill_view(w, 0, &s->handle, 1, &v);
    return v.score_rows + v.row_offset[k];
}

static inline uint32_t holders(const world *w, uint32_t id) {
    uint32_t n = 0;
    for (int i = 0; i < SEQS; i++)
        for (uint32_t k = 0; w->s[i].alive && !w->s[i].swapped && k < TABLES; k++) {
            const uint32_t *row = row_of(w, &w->s[i], k);
            for (uint32_t b = 0; b < ceil_bs(w->s[i].t[k].n_slots); b++) n += row[b] == id;
        }
    return n;
}

/* A block that was not in the table before is nobody's, and no copy needs it: a write that overtakes all copies is safe. */
static inline void write_slot(world *w, int what, uint32_t id, uint32_t slot, uint32_t value) {
    w->mem[0][what][id][slot] = value;
}

static inline void compare(world *w) {
    kvf_error err = {.text = ""};
    CHECK(w, kvf_audit(w->m, &err) == KVF_OK, "audit: %s\n", err.text);
    uint32_t n_swapped = 0, n_here = 0;
    kvf_seq here[SEQS];
    kvf_view v = {.struct_size = sizeof v};
    for (int i = 0; i < SEQS; i++)
        if (w->s[i].alive && !w->s[i].swapped) here[n_here++] = w->s[i].handle;
    fill_view(w, 1, here, n_here, &v);
    for (int i = 0; i < SEQS; i++) {
        const seq *s = &w->s[i];
        int swapped = 77;
        if (!s->alive) continue;
        STATUS(w, kvf_seq_is_swapped(w->m, s->handle, &swapped), KVF_OK);
        CHECK(w, swapped == s->swapped, "swapped %d\n", swapped);
        n_swapped += (uint32_t)swapped;
        for (uint32_t k = 0; k < TABLES; k++) {
            const table *t = &s->t[k];
            uint32_t n = 77, n_blocks = 77;
            STATUS(w, kvf_seq_table(w->m, s->handle, k / GROUPS, k % GROUPS, &n, &n_blocks, NULL), KVF_OK);
            CHECK(w, n == (swapped ? 0 : t->n_slots) && n_blocks == ceil_bs(n), "table %u: %u slots\n", k, n);
            if (swapped) continue;
            const uint32_t *row = row_of(w, s, k), *score_row = score_row_of(w, s, k);
            for (uint32_t j = 0; j < n; j++) {
                uint32_t got = read_slot(w, KV, row[j / BS], j % BS);
                CHECK(w, got == t->tags[j], "sequence %d, table %u, slot %u holds %x, not %x\n", i, k, j, got,
                      t->tags[j]);
                if (j / BS >= t->n_pages) continue;
                got = read_slot(w, SCORE, score_row[j / BS], j % BS);
                CHECK(w, got == t->scores[j], "sequence %d, table %u, score %u is %x, not %x\n", i, k, j, got,
                      t->scores[j]);
            }
        }
    }
    kvf_occupancy o = occupancy(w->m);
    CHECK(w, o.n_swapped == n_swapped, "n_swapped %u, not %u\n", o.n_swapped, n_swapped);
    CHECK(w, o.host_blocks.n_free + o.host_blocks.n_held == w->n_host && o.host_blocks.n_promised == 0,
          "host blocks: %u free, %u held\n", o.host_blocks.n_free, o.host_blocks.n_held);
    CHECK(w, o.host_score_pages.n_free + o.host_score_pages.n_held == w->n_host_pages, "host pages\n");
}

/* ---- Managers with two tiers ------------------------------------------------------------------------ */

static inline kvf_manager *make_tiers(shape s, uint32_t host, uint32_t host_pages) {
    kvf_manager_config c = config_of(s);
    c.n_host_blocks = host;
    c.n_host_score_pages = host_pages;
    kvf_manager *m = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_manager_create(&c, &m, &err), KVF_OK, "%s", err.text);
    return m;
}

/* Figures within each pool's size, and the pools as they should be. */
static inline void expect_tiers(kvf_manager *m, uint32_t held, uint32_t host_held) {
    kvf_occupancy o = occupancy(m);
    AUDIT(m);
    cr_assert_eq(o.blocks.n_free + o.blocks.n_held + o.n_cached_idle, o.blocks.n_total);
    cr_assert_eq(o.host_blocks.n_free + o.host_blocks.n_held, o.host_blocks.n_total);
    cr_assert_eq(o.blocks.n_held, held, "%u blocks held, not %u", o.blocks.n_held, held);
    cr_assert_eq(o.host_blocks.n_held, host_held, "%u host blocks held, not %u", o.host_blocks.n_held, host_held);
}

#endif
