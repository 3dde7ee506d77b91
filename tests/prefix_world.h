/* A manager with a prefix cache beside a naive model: tokens as lists, the content of every slot by value. Every operation
 * carries out what an engine would (copies, writes, compactions) on simulated blocks and compares all of it afterwards.
 * A world is one plain struct, so that an enumeration can go back. */
#ifndef KVF_TEST_PREFIX_WORLD_H
#define KVF_TEST_PREFIX_WORLD_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blockmgr/manager.h"
#include "kvfold/profile.h"

enum {
    BS = 8,
    N_BLOCKS_MAX = 32,
    N_HOST_MAX = 32,
    N_NODES_MAX = N_BLOCKS_MAX + N_HOST_MAX,
    N_TABLES_MAX = 4,
    N_SEQS = 4,
    N_SLOTS = 48,
    N_POS = 96,
    N_COPIES = 512,
    N_HOLDS = 4,
    N_PROMPTS = 6,
    N_PAGES = 16,
    N_EXTRAS = 2
};
#define POISON 0xdeadbeefdeadbeefu

typedef struct prompt {
    uint32_t n, tokens[N_POS];
    uint32_t n_extras;
    kvf_prefix_extra extras[N_EXTRAS];
    const char *salt;
} prompt;

typedef struct wseq {
    kvf_seq handle;
    bool alive, compacted, scored, compacting, swapped;
    bool secure, growth; /* growth up to reserve blocks must not fail */
    uint32_t reserve[N_TABLES_MAX];
    uint32_t prompt, n;
    uint32_t tokens[N_POS];
    uint64_t v[N_POS]; /* of all tokens, extras and the salt up to a position */
    uint32_t n_slots[N_TABLES_MAX];
    uint64_t slots[N_TABLES_MAX][N_SLOTS];
} wseq;

typedef struct wnode {
    uint32_t generation;
    uint64_t v[BS];
} wnode;

typedef struct whold {
    kvf_block handle; /* 0: none */
    uint64_t slots[BS];
} whold;

typedef struct world {
    kvf_manager *m;
    uint64_t rng;
    uint32_t n_tables, n_blocks;
    uint32_t windows[N_TABLES_MAX]; /* (layer) 0: none */
    bool extras;                    /* some prompt has extras */
    prompt prompts[N_PROMPTS];
    wseq seqs[N_SEQS];
    uint64_t sim[N_BLOCKS_MAX][BS], host[N_HOST_MAX][BS];
    uint32_t n_host;
    bool deferred; /* copies run when they are flushed, not before */
    bool ran[N_COPIES];
    uint64_t pages[N_PAGES];
    wnode nodes[N_NODES_MAX];
    whold holds[N_HOLDS];
    kvf_copy copies[N_COPIES];
    kvf_copy_list list;
    kvf_compact_item items[4];
    kvf_compaction compaction;
    uint32_t n_items;
    uint64_t n_hits, n_hit_tokens, n_host_tokens, n_checked, n_dropped, n_done[32];
    struct causes *causes; /* what check_causes goes by, or NULL */
    const char *doing;
} world;

static inline void world_fail(const world *w, const char *what, long a, long b) {
    fprintf(stderr, "%s: %s (%ld, %ld): %s\n", w->doing, what, a, b, kvf_manager_error(w->m)->text);
    abort();
}
#define MUST(condition, what, a, b)                                  \
    do {                                                             \
        if (!(condition)) world_fail(w, what, (long)(a), (long)(b)); \
    } while (0)

static inline uint32_t rnd(world *w, uint32_t n) {
    w->rng ^= w->rng << 13, w->rng ^= w->rng >> 7, w->rng ^= w->rng << 17;
    return (uint32_t)((w->rng >> 20) % n);
}
static inline uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 29);
}
static inline uint64_t content(uint64_t v, uint32_t k) { return mix(v, k + 77); }

/* ---- Prompts --------------------------------------------------------------------------------------------- */

static inline uint64_t v_next(const prompt *p, uint64_t before, uint32_t position, uint32_t token) {
    uint64_t v = mix(before, token);
    for (uint32_t i = 0; i < p->n_extras; i++)
        if (p->extras[i].position == position) v = mix(v, p->extras[i].key[0] + 1000);
    return v;
}
static inline uint64_t v_start(const prompt *p) { return mix(p->salt ? (uint64_t)p->salt[0] : 0, 5); }
static inline void v_fill(const prompt *p, const uint32_t *tokens, uint32_t from, uint32_t n, uint64_t *v) {
    for (uint32_t i = from; i < n; i++) v[i] = v_next(p, i ? v[i - 1] : v_start(p), i, tokens[i]);
}

static inline kvf_prefix_key key_of(const prompt *p, const uint32_t *tokens, uint32_t n) {
    kvf_prefix_key key = {.struct_size = sizeof key, .tokens = tokens, .n_tokens = n, .extras = p->extras};
    if (p->salt) {
        key.salt = p->salt;
        key.salt_bytes = (uint32_t)strlen(p->salt);
    }
    while (key.n_extras < p->n_extras && p->extras[key.n_extras].position < n) key.n_extras++;
    return key;
}

static inline void make_prompts(world *w) {
    for (uint32_t i = 0; i < N_PROMPTS; i++) {
        prompt *p = &w->prompts[i];
        const prompt *of = &w->prompts[i ? rnd(w, i) : 0];
        uint32_t n_same = i ? rnd(w, 4 * BS) : 0;
        if (i) *p = *of;
        p->n = 1 + rnd(w, 5 * BS);
        for (uint32_t j = n_same; j < N_POS; j++) p->tokens[j] = rnd(w, 3);
        if (i > 2 && rnd(w, 4) == 0) p->salt = rnd(w, 2) ? "a" : "b";
        if (i > 1 && rnd(w, 4) == 0) {
            p->n_extras = 1 + rnd(w, N_EXTRAS);
            uint32_t position = rnd(w, 2 * BS);
            for (uint32_t e = 0; e < p->n_extras; e++, position += rnd(w, BS))
                p->extras[e] = (kvf_prefix_extra){.key = {1 + rnd(w, 2), 7}, .position = position};
            w->extras = true;
        }
    }
}

static inline void world_open(world *w, kvf_manager_config config, uint64_t seed) {
    kvf_error err = {.text = ""};
    memset(w, 0, sizeof *w);
    w->doing = "create";
    w->rng = seed * 0x9e3779b97f4a7c15u | 1;
    config.max_slots = N_SLOTS;
    config.max_seqs = N_SEQS;
    config.block_size = BS;
    config.prefix_cache = 1;
    config.n_snapshot_pages = config.n_snapshot_pages ? config.n_snapshot_pages : N_PAGES;
    config.n_score_pages = 256;
    if (config.n_classes <= 1) config.block_bytes = 64;
    kvf_profile_config profile;
    kvf_profile_config_init(&profile, sizeof profile); /* the audit then compares it too */
    if (seed & 1) config.profile = &profile;
    if (kvf_manager_create(&config, &w->m, &err)) {
        fprintf(stderr, "create: %s\n", err.text);
        abort();
    }
    w->n_tables = w->m->seq_tables;
    for (uint32_t l = 0; config.layer_windows && l < config.n_layers; l++) w->windows[l] = config.layer_windows[l];
    w->n_blocks = config.n_blocks;
    w->n_host = config.n_host_blocks;
    for (uint32_t b = 0; b < N_HOST_MAX; b++)
        for (uint32_t s = 0; s < BS; s++) w->host[b][s] = POISON;
    w->list = (kvf_copy_list){w->copies, 0, N_COPIES};
    for (uint32_t b = 0; b < w->n_blocks; b++)
        for (uint32_t s = 0; s < BS; s++) w->sim[b][s] = POISON;
    make_prompts(w);
}

/* ---- The device: what its stream will have done ---------------------------------------------------------------- */

enum { DEVICE, HOST };
static inline int src_tier(const kvf_copy *c) { return c->kind == KVF_COPY_BLOCK_IN ? HOST : DEVICE; }
static inline int dst_tier(const kvf_copy *c) { return c->kind == KVF_COPY_BLOCK_OUT ? HOST : DEVICE; }
static inline bool of_block(const kvf_copy *c) {
    return c->kind == KVF_COPY_BLOCK || c->kind == KVF_COPY_BLOCK_OUT || c->kind == KVF_COPY_BLOCK_IN;
}
static inline uint64_t *memory(world *w, int tier, uint32_t id) { return tier == HOST ? w->host[id] : w->sim[id]; }

/* A slot as it will be when the copies that have not run have. */
static inline uint64_t slot_of(const world *w, int tier, uint32_t id, uint32_t slot) {
    for (uint32_t i = w->list.n; i-- > 0;) {
        const kvf_copy *c = &w->copies[i];
        if (w->ran[i] || !of_block(c) || dst_tier(c) != tier || c->dst != id || slot >= c->n_slots) continue;
        tier = src_tier(c);
        id = c->src;
    }
    return tier == HOST ? w->host[id][slot] : w->sim[id][slot];
}

/* ---- Comparing all ------------------------------------------------------------------------------------------ */

/* A node that this operation has entered or grown holds what the sequence holds. */
static inline void note_nodes(world *w, const wseq *s) {
    const kvf__cache *c = &w->m->cache;
    for (uint32_t i = 0; i < c->n_max; i++) {
        const kvf__node *n = &c->nodes[i];
        if (!n->n_tokens || n->generation == w->nodes[i].generation) continue;
        MUST(s && n->depth * BS + n->n_tokens <= s->n, "a node that nobody stored", i, n->depth);
        MUST(!memcmp(kvf__node_tokens(c, i), s->tokens + n->depth * BS, n->n_tokens * sizeof(uint32_t)),
             "a node of other tokens", i, n->depth);
        w->nodes[i].generation = n->generation;
        memcpy(w->nodes[i].v, s->v + n->depth * BS, n->n_tokens * sizeof(uint64_t));
    }
}

static inline void check_nodes(const world *w) {
    const kvf__cache *c = &w->m->cache;
    for (uint32_t i = 0; i < c->n_max; i++)
        for (uint32_t k = 0; k < w->n_tables; k++)
            for (uint32_t s = 0; s < c->nodes[i].n_tokens; s++) {
                uint64_t wanted = content(w->nodes[i].v[s], k);
                if (kvf__is_here(c, i))
                    MUST(slot_of(w, DEVICE, kvf__node_blocks(c, i)[k], s) == wanted,
                         "a cached block does not hold its tokens", i, s);
                if (kvf__is_on_host(c, i))
                    MUST(slot_of(w, HOST, kvf__node_host_blocks(c, i)[k], s) == wanted,
                         "a copy on the host does not hold its tokens", i, s);
            }
}

static inline void check_seqs(const world *w) {
    for (uint32_t q = 0; q < N_SEQS; q++) {
        const wseq *s = &w->seqs[q];
        if (!s->alive) continue;
        uint32_t next_pos = 0;
        MUST(!kvf_seq_next_pos(w->m, s->handle, &next_pos) && next_pos == s->n, "next_pos", next_pos, s->n);
        uint32_t index = kvf__seq_index(s->handle);
        for (uint32_t k = 0; k < w->n_tables; k++) {
            uint32_t t = index * w->n_tables + k, n = s->swapped ? w->m->host_slots[t] : w->m->n_slots[t];
            MUST(n == s->n_slots[k], "n_slots", n, s->n_slots[k]);
            for (uint32_t i = 0; i < s->n_slots[k]; i++)
                MUST(slot_of(w, s->swapped ? HOST : DEVICE, kvf__row(w->m, t)[i / BS], i % BS) == s->slots[k][i],
                     "a slot has changed", k, i);
        }
    }
    for (uint32_t h = 0; h < N_HOLDS; h++)
        if (w->holds[h].handle)
            for (uint32_t s = 0; s < BS; s++)
                MUST(slot_of(w, DEVICE, kvf_block_id(w->holds[h].handle), s) == w->holds[h].slots[s],
                     "a held block has changed", h, s);
}

/* What is free holds nothing: who has it still shows. */
static inline void poison(world *w, const kvf__pool *p, uint32_t n, int tier) {
    for (uint32_t b = 0; b < n; b++)
        if (*kvf__state(p, b) == KVF__APART && !kvf__pool_refs(p, b))
            for (uint32_t s = 0; s < BS; s++) memory(w, tier, b)[s] = POISON;
}

#include "tests/prefix_causes.h"

static inline void check_all(world *w, const wseq *stored) {
    kvf_error err = {.text = ""};
    w->n_checked++;
    if (kvf_audit(w->m, &err)) {
        fprintf(stderr, "%s: audit: %s\n", w->doing, err.text);
        abort();
    }
    note_nodes(w, stored);
    poison(w, w->m->blocks, w->n_blocks, DEVICE);
    poison(w, w->m->host_blocks, w->n_host, HOST);
    check_nodes(w);
    check_seqs(w);
    kvf_occupancy o = {.struct_size = sizeof o};
    MUST(!kvf_occupancy_read(w->m, &o, NULL, 0), "occupancy", 0, 0);
    MUST(o.blocks.n_free + o.blocks.n_held + o.n_cached_idle == o.blocks.n_total, "free + held + idle", o.blocks.n_free,
         o.blocks.n_held);
    MUST(o.blocks.n_promised <= o.blocks.n_free + o.n_cached_idle, "promised", o.blocks.n_promised, o.blocks.n_free);
    MUST(o.host_blocks.n_free + o.host_blocks.n_held + o.n_host_cached_idle == w->n_host, "free + held + idle there",
         o.host_blocks.n_free, o.host_blocks.n_held);
    if (w->causes) check_causes(w, w->causes);
}

/* The fewest free blocks of a class. */
static inline uint32_t fewest_free(const world *w) {
    uint32_t n = UINT32_MAX;
    for (uint32_t i = 0; i < w->m->config.n_classes; i++) n = KVF__MIN(n, w->m->blocks[i].n_free);
    return n;
}

/* Everything that a failed call must leave alone. */
static inline uint64_t fingerprint(const world *w) {
    const kvf_manager *m = w->m;
    const kvf__cache *c = &m->cache;
    uint64_t h = 1;
    uint32_t figures[] = {
        m->pages.n_free, m->pages.n_promised, m->n_seqs,      c->n_nodes,   c->pages.n_free, c->first,
        c->last,         c->order.n,          m->compacting,  m->n_swapped, c->n_here,       m->host_pages.n_free,
        c->n_on_host,    c->bare.n,           c->host_order.n};
    for (uint32_t i = 0; i < 2 * m->config.n_classes; i++) {
        const kvf__pool *p = i % 2 ? &m->host_blocks[i / 2] : &m->blocks[i / 2];
        h = mix(mix(mix(mix(mix(h, p->n_free), p->n_idle), p->n_promised), p->n_least), p->n_shared);
    }
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) h = mix(h, figures[i]);
    const uint64_t *stats = (const uint64_t *)(const void *)&c->stats;
    for (size_t i = 1; i < offsetof(kvf_prefix_stats, n_nodes) / 8; i++) h = mix(h, stats[i]);
    for (size_t i = offsetof(kvf_prefix_stats, offloaded) / 8; i < offsetof(kvf_prefix_stats, n_host_nodes) / 8; i++)
        h = mix(h, stats[i]);
    for (uint32_t t = 0; t < N_SEQS * w->n_tables; t++) {
        h = mix(mix(mix(h, m->n_slots[t]), m->promise[t]), m->tables[t].reserve);
        for (uint32_t i = 0; i < m->rows.capacity[t]; i++) h = mix(h, kvf__row(m, t)[i]);
    }
    for (uint32_t i = 0; i < c->n_max; i++) {
        const kvf__node *n = &c->nodes[i];
        h = mix(mix(mix(mix(h, n->n_tokens), n->generation), n->n_idle), n->hits + n->n_pages);
        h = mix(mix(h, n->tiers), n->n_host_idle);
    }
    return h;
}

/* A status that may be: ok or not enough blocks, with nothing changed; anything else is a failure. */
static inline bool went(const world *w, kvf_status s, uint64_t before) {
    if (s == KVF_OK) return true;
    MUST(s == KVF_E_NO_BLOCKS, kvf_status_name(s), s, 0);
    MUST(fingerprint(w) == before, "a failed call has changed something", 0, 0);
    return false;
}

/* ---- What an engine does ------------------------------------------------------------------------------------- */

static inline void run_copy(world *w, uint32_t i) {
    const kvf_copy *c = &w->copies[i];
    if (of_block(c))
        memcpy(memory(w, dst_tier(c), c->dst), memory(w, src_tier(c), c->src), c->n_slots * sizeof(uint64_t));
    w->ran[i] = true;
}

/* Those that a call has listed. Whoever writes overtakes what is deferred. */
static inline void run_copies(world *w, uint32_t from) {
    for (uint32_t i = from; i < w->list.n; i++) {
        w->ran[i] = false;
        if (!w->deferred) run_copy(w, i);
    }
}

/* Whether copy i has to run before a later one, j. */
static inline bool goes_before(const world *w, uint32_t i, uint32_t j) {
    const kvf_copy *a = &w->copies[i], *b = &w->copies[j];
    if (!of_block(a) || !of_block(b)) return false;
    return (dst_tier(a) == src_tier(b) && a->dst == b->src) || (dst_tier(a) == dst_tier(b) && a->dst == b->dst) ||
           (src_tier(a) == dst_tier(b) && a->src == b->dst);
}

/* Runs up to n of the copies that have not run, in an order of its own as far as they may. */
static inline void flush(world *w, uint32_t n) {
    uint32_t n_left = 0;
    for (uint32_t i = 0; i < w->list.n; i++) n_left += !w->ran[i];
    for (n = KVF__MIN(n, n_left); n-- > 0;) {
        uint32_t i = rnd(w, w->list.n);
        for (bool may = false; !may; i = may ? i : (i + 1) % w->list.n) {
            may = !w->ran[i];
            for (uint32_t j = 0; may && j < i; j++) may = w->ran[j] || !goes_before(w, j, i);
        }
        run_copy(w, i);
    }
}

/* Into a block that the table had before: what reads or writes that slot comes first, as on one stream. */
static inline void await(world *w, uint32_t id, uint32_t slot) {
    for (uint32_t i = 0; i < w->list.n; i++) {
        const kvf_copy *c = &w->copies[i];
        bool end = (src_tier(c) == DEVICE && c->src == id) || (dst_tier(c) == DEVICE && c->dst == id);
        if (!w->ran[i] && of_block(c) && end && slot < c->n_slots) flush(w, N_COPIES);
    }
}

static inline void write_slots(world *w, wseq *s, uint32_t n_tokens) {
    uint32_t index = kvf__seq_index(s->handle);
    for (uint32_t k = 0; k < w->n_tables; k++)
        for (uint32_t i = 0, before = s->n_slots[k]; i < n_tokens; i++) {
            uint32_t at = s->n_slots[k]++, id = kvf__row(w->m, index * w->n_tables + k)[at / BS];
            if (at / BS * BS < before) await(w, id, at % BS);
            s->slots[k][at] = content(s->v[s->n + i], k);
            w->sim[id][at % BS] = s->slots[k][at];
        }
    s->n += n_tokens;
}

/* Slots of block id that a sequence other than one holds: it is not secure any more when the block was its own. */
static inline void now_shared(world *w, uint32_t id, const wseq *except) {
    for (uint32_t q = 0; q < N_SEQS; q++) {
        wseq *s = &w->seqs[q];
        if (!s->alive || s->swapped || s == except) continue;
        for (uint32_t k = 0; k < w->n_tables; k++)
            for (uint32_t i = 0; i * BS < s->n_slots[k]; i++)
                if (kvf__row(w->m, kvf__seq_index(s->handle) * w->n_tables + k)[i] == id) s->secure = false;
    }
}

static inline uint32_t pick(world *w, bool alive) { /* N_SEQS: none */
    uint32_t first = rnd(w, N_SEQS);
    for (uint32_t i = 0; i < N_SEQS; i++)
        if (w->seqs[(first + i) % N_SEQS].alive == alive) return (first + i) % N_SEQS;
    return N_SEQS;
}

#include "tests/prefix_world_ops.h"

#endif
