/* A block manager's worth of plain structs for the policy tests: views, pages and score pages built by hand, with block
 * ids in random order and every unwritten number a NaN. */
#ifndef KVF_TESTS_TEST_POLICY_RIG_H
#define KVF_TESTS_TEST_POLICY_RIG_H

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "d2o_policy/pages.h"
#include "kvfold/policy.h"

typedef struct rig_config {
    uint32_t n_seqs, n_layers, n_kv, g, hpg, bs, d, cap, n_arrays, threads;
    kvf_dtype dtype;
    bool mass;
    kvf_cpu_path path;
} rig_config;

typedef struct rig {
    rig_config c;
    uint32_t n_groups, per_table, n_tables, n_blocks, n_spare;
    uint32_t *rows, *score_rows, *n_slots, *next_pos, *seq_index, *spare;
    uint64_t *row_offset;
    float **prompt_sums; /* [n_seqs], NULL or the caller's */
    float **prompt_last; /* the same */
    size_t prompt_stride;
    float *const *prompt_squares; /* [n_seqs], or NULL */
    const float *const *prompt_logprobs;
    const float *logprobs;
    kvf_view view;
    kvf_pages pages;
    kvf_score_pages scores;
    kvf_policy_state *state;
    kvf_plan *plan;
    kvf_stream *stream;
    void *workspace;
    size_t workspace_bytes;
} rig;

static inline uint64_t rig_random(uint64_t *s) { /* splitmix64 */
    uint64_t z = (*s += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
static inline double rig_uniform(uint64_t *s) { return (double)(rig_random(s) >> 11) * 0x1p-53; }
static inline double rig_normal(uint64_t *s) {
    return sqrt(-2.0 * log(1.0 - rig_uniform(s))) * cos(6.283185307179586 * rig_uniform(s));
}

#define OK(call)                                                                               \
    do {                                                                                       \
        kvf_error ok_err = {.text = ""};                                                       \
        kvf_error *err = &ok_err;                                                              \
        kvf_status ok_st = (call);                                                             \
        (void)err;                                                                             \
        cr_assert_eq(ok_st, KVF_OK, "%s: %s: %s", #call, kvf_status_name(ok_st), ok_err.text); \
    } while (0)

/* The call fails with status and a text that has all of word in it. */
#define FAILS(call, status, word)                                                                               \
    do {                                                                                                        \
        kvf_error fails_err = {.text = ""};                                                                     \
        kvf_error *err = &fails_err;                                                                            \
        kvf_status fails_st = (call);                                                                           \
        (void)err;                                                                                              \
        cr_assert_eq(fails_st, status, "%s: %s: %s", #call, kvf_status_name(fails_st), fails_err.text);         \
        cr_assert(strstr(fails_err.text, word), "%s: \"%s\" does not say \"%s\"", #call, fails_err.text, word); \
    } while (0)

static inline void *rig_nan(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    cr_assert(p);
    memset(p, 0xff, bytes);
    return p;
}

static inline void rig_shuffle(uint32_t *a, uint32_t n, uint64_t *seed) {
    for (uint32_t i = 0; i < n; i++) a[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = (uint32_t)(rig_random(seed) % i), t = a[i - 1];
        a[i - 1] = a[j];
        a[j] = t;
    }
}

static inline void rig_memory(rig *r) {
    rig_config c = r->c;
    size_t slots = (size_t)r->n_blocks * c.hpg * c.bs, row = c.d * kvf_dtype_bytes(c.dtype);
    size_t block = (size_t)c.hpg * c.bs * row;
    unsigned char *kv = rig_nan(2 * block * r->n_blocks); /* K and V of a block side by side */
    r->pages = (kvf_pages){.struct_size = sizeof r->pages,
                           .dtype = c.dtype,
                           .n_blocks = r->n_blocks,
                           .block_size = c.bs,
                           .heads_per_group = c.hpg,
                           .head_dim = c.d,
                           .k = kv,
                           .v = kv + block,
                           .k_block_stride = 2 * block,
                           .v_block_stride = 2 * block,
                           .pos = rig_nan(slots * 4),
                           .key_norm = rig_nan(slots * 4),
                           .score = rig_nan(slots * 4)};
    if (c.mass) {
        r->pages.weight = rig_nan(slots * 4);
        r->pages.bias = rig_nan(slots * 4);
    }
    uint32_t n_pages = r->n_tables * r->per_table;
    r->scores = (kvf_score_pages){.struct_size = sizeof r->scores,
                                  .n_pages = n_pages,
                                  .n_arrays = c.n_arrays,
                                  .heads_per_group = c.hpg,
                                  .block_size = c.bs,
                                  .base = rig_nan((size_t)n_pages * c.n_arrays * c.hpg * c.bs * 4)};
}

static inline rig *rig_new(rig_config c) {
    rig *r = calloc(1, sizeof *r);
    uint64_t seed = 99;
    r->c = c;
    r->n_groups = c.n_kv / c.hpg;
    r->per_table = (c.cap + c.bs - 1) / c.bs;
    r->n_tables = c.n_seqs * c.n_layers * r->n_groups;
    r->n_blocks = 2 * r->n_tables * r->per_table;
    uint32_t held = r->n_tables * r->per_table;
    uint32_t *ids = malloc(r->n_blocks * sizeof *ids);
    rig_shuffle(ids, r->n_blocks, &seed);
    r->rows = malloc(held * sizeof *r->rows);
    memcpy(r->rows, ids, held * sizeof *ids);
    r->spare = ids;
    r->n_spare = r->n_blocks - held;
    memmove(ids, ids + held, r->n_spare * sizeof *ids);
    r->score_rows = malloc(held * sizeof *r->score_rows);
    rig_shuffle(r->score_rows, held, &seed);
    r->n_slots = calloc(r->n_tables, sizeof *r->n_slots);
    r->next_pos = calloc(c.n_seqs, sizeof *r->next_pos);
    r->seq_index = calloc(c.n_seqs, sizeof *r->seq_index);
    r->prompt_sums = calloc(c.n_seqs, sizeof *r->prompt_sums);
    r->prompt_last = calloc(c.n_seqs, sizeof *r->prompt_last);
    r->row_offset = malloc(r->n_tables * sizeof *r->row_offset);
    for (uint32_t t = 0; t < r->n_tables; t++) r->row_offset[t] = (uint64_t)t * r->per_table;
    for (uint32_t i = 0; i < c.n_seqs; i++) r->seq_index[i] = i;
    r->view = (kvf_view){sizeof r->view, c.n_seqs,      c.n_layers, r->n_groups, c.hpg,        c.bs, r->rows,
                         r->score_rows,  r->row_offset, r->n_slots, r->next_pos, r->seq_index, NULL, 0};
    rig_memory(r);
    kvf_policy_state_config sc = {.struct_size = sizeof sc,
                                  .n_layers = c.n_layers,
                                  .n_kv_heads = c.n_kv,
                                  .n_q_heads = c.n_kv * c.g,
                                  .head_dim = c.d,
                                  .block_size = c.bs,
                                  .max_seqs = c.n_seqs + 4,
                                  .max_slots = c.cap,
                                  .n_groups = r->n_groups};
    OK(kvf_policy_state_create(&sc, &r->state, err));
    uint32_t events = r->n_tables;
    OK(kvf_plan_create(NULL, c.n_kv, events, (uint64_t)events * c.n_kv * c.cap, &r->plan, err));
    if (c.threads > 1) OK(kvf_stream_create_cpu(NULL, c.threads, &r->stream, err));
    OK(kvf_policy_workspace_bytes(c.threads ? c.threads : 1, c.d, c.n_kv, c.cap, &r->workspace_bytes));
    r->workspace = aligned_alloc(64, r->workspace_bytes);
    memset(r->workspace, 0xff, r->workspace_bytes);
    return r;
}

static inline void rig_free(rig *r) {
    void *all[] = {r->rows,       r->score_rows,  r->n_slots,   r->next_pos,    r->seq_index,      r->spare,
                   r->row_offset, r->prompt_sums, r->pages.k,   r->pages.pos,   r->pages.key_norm, r->pages.weight,
                   r->pages.bias, r->scores.base, r->workspace, r->prompt_last, r->pages.score};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    kvf_policy_state_destroy(r->state);
    kvf_plan_destroy(r->plan);
    kvf_stream_destroy(r->stream);
    free(r);
}

static inline kvf__head rig_head(const rig *r, uint32_t row, uint32_t layer, uint32_t h) {
    return kvf__head_of(&r->view, &r->pages, row, layer, h);
}
static inline uint32_t rig_slots(const rig *r, uint32_t row, uint32_t layer) {
    return r->n_slots[kvf__table_index(&r->view, row, layer, 0)];
}
static inline void rig_set_slots(rig *r, uint32_t row, uint32_t layer, uint32_t n) {
    for (uint32_t h = 0; h < r->c.n_kv; h++) r->n_slots[kvf__table_index(&r->view, row, layer, h)] = n;
}
static inline float rig_get(const rig *r, const void *row, uint32_t i) {
    return r->c.dtype == KVF_F32 ? ((const float *)row)[i] : kvf__widen(r->c.dtype, ((const uint16_t *)row)[i]);
}
static inline void rig_set(const rig *r, void *row, uint32_t i, float x) {
    if (r->c.dtype == KVF_F32)
        ((float *)row)[i] = x;
    else
        ((uint16_t *)row)[i] = kvf__narrow(r->c.dtype, x);
}
static inline uint32_t rig_pos(const rig *r, uint32_t row, uint32_t layer, uint32_t h, uint32_t slot) {
    kvf__head x = rig_head(r, row, layer, h);
    return r->pages.pos[kvf__slot_index(&x, slot)];
}
static inline float *rig_score(const rig *r, uint32_t row, uint32_t layer, uint32_t h, uint32_t array, uint32_t slot) {
    kvf__head x = rig_head(r, row, layer, h);
    return kvf__score_at(&x, &r->scores, array, slot);
}

/* Writes one slot as an append does. k and v: [d]. */
static inline void rig_put(rig *r, uint32_t row, uint32_t layer, uint32_t h, uint32_t slot, uint32_t pos,
                           const float *k, const float *v) {
    kvf__head x = rig_head(r, row, layer, h);
    size_t i = kvf__slot_index(&x, slot);
    double norm = 0.0;
    for (uint32_t e = 0; e < r->c.d; e++) {
        rig_set(r, kvf__k_row(&x, slot), e, k[e]);
        rig_set(r, kvf__v_row(&x, slot), e, v[e]);
        double stored = rig_get(r, kvf__k_row(&x, slot), e);
        norm += stored * stored;
    }
    r->pages.pos[i] = pos;
    r->pages.key_norm[i] = (float)sqrt(norm);
    r->pages.score[i] = INFINITY;
    if (r->c.mass) {
        r->pages.weight[i] = 1.0f;
        r->pages.bias[i] = 0.0f;
    }
}

static inline kvf_policy_batch rig_batch(rig *r) {
    return (kvf_policy_batch){.struct_size = sizeof(kvf_policy_batch),
                              .view = &r->view,
                              .pages = &r->pages,
                              .scores = &r->scores,
                              .prompt_sums = r->prompt_sums,
                              .prompt_last = r->prompt_last,
                              .prompt_stride = r->prompt_stride,
                              .prompt_squares = r->prompt_squares,
                              .prompt_logprobs = r->prompt_logprobs,
                              .logprobs = r->logprobs,
                              .workspace = r->workspace,
                              .workspace_bytes = r->workspace_bytes,
                              .path = r->c.path};
}

/* The decode row of one layer, [n_seqs][n_kv][stride]. */
static inline void rig_observe(rig *r, uint32_t layer, float *row, size_t stride) {
    kvf_mass mass = {.struct_size = sizeof mass, .row = row, .row_stride = stride};
    kvf_policy_batch b = rig_batch(r);
    b.layer = layer;
    b.row_end = r->c.n_seqs;
    b.mass = &mass;
    const kvf_policy_options *o = kvf_policy_get_options(r->state, r->seq_index[0]);
    if (kvf_policy_observes(o)) OK(kvf__policy_ops_resolve(o->ops).observe(r->state, r->stream, &b, err));
}

/* The tables [begin, end) of an event, as groups of its layer. */
static inline uint32_t rig_group_begin(const kvf_event *e) { return e->n_groups ? e->group_begin : 0; }
static inline uint32_t rig_group_end(const rig *r, const kvf_event *e) {
    return e->n_groups ? e->group_begin + e->n_groups : r->n_groups;
}

/* match, gate, apply and what commit would do. fresh: a bit per event and group (modulo 64) says that the table moves
 * to fresh blocks; all others are in place. */
static inline void rig_events(rig *r, const kvf_event *events, uint32_t n, uint64_t fresh) {
    uint32_t n_groups = r->n_groups, n_spare = r->n_spare;
    kvf_compact_item *items = calloc(n, sizeof *items);
    uint32_t *item_of = calloc(n, sizeof *item_of), n_items = 0;
    const uint32_t **dst = calloc((size_t)n * n_groups, sizeof *dst);
    for (uint32_t i = 0; i < n; i++) {
        item_of[i] = UINT32_MAX;
        if (events[i].n_keep == r->n_slots[kvf__part_of(&r->view, &events[i]).table]) continue;
        for (uint32_t g = rig_group_begin(&events[i]); g < rig_group_end(r, &events[i]); g++) {
            if (!(fresh >> ((i * n_groups + g) % 64) & 1)) continue;
            n_spare -= (events[i].n_keep + r->c.bs - 1) / r->c.bs;
            dst[n_items * n_groups + g] = r->spare + n_spare;
        }
        items[n_items] = (kvf_compact_item){1, events[i].layer, events[i].n_keep, NULL};
        item_of[i] = n_items++;
    }
    kvf_compaction compaction = {items, n_items, n_groups, dst};
    kvf_policy_batch b = rig_batch(r);
    b.events = events;
    b.n_events = n;
    if (fresh) {
        b.compaction = &compaction;
        b.compaction_item = item_of;
    }
    kvf_policy_ops ops = kvf__policy_ops_resolve(kvf_policy_get_options(r->state, r->seq_index[events[0].row])->ops);
    OK(ops.match(r->state, r->stream, &b, r->plan, err));
    OK(ops.gate(r->state, r->stream, &b, r->plan, err));
    OK(ops.apply(r->state, r->stream, &b, r->plan, err));
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t g = rig_group_begin(&events[i]); g < rig_group_end(r, &events[i]); g++) {
            if (item_of[i] == UINT32_MAX) continue;
            const uint32_t *from = dst[item_of[i] * n_groups + g];
            uint64_t t = kvf__table_index(&r->view, events[i].row, events[i].layer, g * r->c.hpg);
            for (uint32_t k = 0; from && k < (events[i].n_keep + r->c.bs - 1) / r->c.bs; k++) {
                uint32_t *to = &r->rows[r->row_offset[t] + k], old = *to, at = (uint32_t)(from - r->spare) + k;
                *to = from[k];
                r->spare[at] = old; /* the old block is free again */
            }
        }
        for (uint32_t g = rig_group_begin(&events[i]); g < rig_group_end(r, &events[i]); g++)
            r->n_slots[kvf__table_index(&r->view, events[i].row, events[i].layer, g * r->c.hpg)] = events[i].n_keep;
    }
    free(items);
    free(item_of);
    free(dst);
}

/* kvf_policy_due for one row, made into events. all: also the layers that are not due (a prompt's scores move). */
static inline uint32_t rig_due(rig *r, uint32_t row, kvf_moment moment, uint32_t kind, bool all, kvf_event *events) {
    uint32_t slots[64], keep[64], n = 0;
    cr_assert(r->c.n_layers <= 64);
    for (uint32_t l = 0; l < r->c.n_layers; l++) slots[l] = rig_slots(r, row, l);
    uint32_t n_due = kvf__policy_due_layers(r->state, r->seq_index[row], moment, slots, keep), seen = 0;
    for (uint32_t l = 0; l < r->c.n_layers; l++) {
        seen += keep[l] != 0;
        if (keep[l] || all) events[n++] = (kvf_event){row, l, keep[l] ? keep[l] : slots[l], kind, 0, 0};
    }
    cr_assert_eq(seen, n_due);
    return n;
}

/* All that a sequence holds, in slot order, as bytes: equal over paths, threads, groups and fresh blocks. */
static inline unsigned char *rig_dump(const rig *r, uint32_t row, size_t *n) {
    size_t row_bytes = r->c.d * kvf_dtype_bytes(r->c.dtype), cap = 0;
    for (uint32_t l = 0; l < r->c.n_layers; l++)
        for (uint32_t h = 0; h < r->c.n_kv; h++)
            cap += 16 + r->n_slots[kvf__table_index(&r->view, row, l, h)] * (2 * row_bytes + 20 + 4 * r->c.n_arrays);
    unsigned char *out = malloc(cap), *p = out;
    for (uint32_t l = 0; l < r->c.n_layers; l++)
        for (uint32_t h = 0; h < r->c.n_kv; h++) {
            kvf__head x = rig_head(r, row, l, h);
            double tau = kvf_policy_tau(r->state, r->seq_index[row], l, h);
            if (isnan(tau)) tau = -9.0;
            memcpy(p, &tau, 8);
            memcpy(p + 8, &x.n_slots, 4);
            p += 12;
            for (uint32_t s = 0; s < x.n_slots; s++) {
                size_t i = kvf__slot_index(&x, s);
                const void *parts[7] = {kvf__k_row(&x, s),
                                        kvf__v_row(&x, s),
                                        &r->pages.pos[i],
                                        &r->pages.key_norm[i],
                                        &r->pages.score[i],
                                        r->c.mass ? &r->pages.weight[i] : NULL,
                                        r->c.mass ? &r->pages.bias[i] : NULL};
                for (int k = 0; k < 7; k++)
                    if (parts[k]) {
                        memcpy(p, parts[k], k < 2 ? row_bytes : 4);
                        p += k < 2 ? row_bytes : 4;
                    }
                for (uint32_t a = 0; a < r->c.n_arrays; a++, p += 4) memcpy(p, kvf__score_at(&x, &r->scores, a, s), 4);
            }
        }
    *n = (size_t)(p - out);
    cr_assert(*n <= cap);
    return out;
}

/* ---- Small layers written by hand --------------------------------------------------------------------------- */

static inline kvf_policy_options rig_policy(const char *policy, const char *preset) {
    kvf_policy_options o;
    OK(kvf_policy_options_init(&o, sizeof o, policy, preset, err));
    return o;
}

static inline rig *rig_small(uint32_t n_layers, uint32_t n_kv, uint32_t g) {
    return rig_new((rig_config){.n_seqs = 1,
                                .n_layers = n_layers,
                                .n_kv = n_kv,
                                .g = g,
                                .hpg = n_kv,
                                .bs = 8,
                                .d = 8,
                                .cap = 128,
                                .n_arrays = 1,
                                .threads = 1,
                                .mass = true});
}

/* Opens the row's sequence with sizes set by hand, the same in every layer. */
static inline void rig_open_sized(rig *r, uint32_t row, const kvf_policy_options *o, uint32_t hh, uint32_t window) {
    OK(kvf_policy_open(r->state, r->seq_index[row], o, err));
    kvf__policy_seq *s = kvf__policy_seq_get(r->state, r->seq_index[row]);
    for (uint32_t l = 0; l < r->c.n_layers; l++)
        s->sizes[l] = (kvf_layer_size){hh + window, hh, window, hh + window + 1};
    s->budgeted = s->sized = true;
    s->n_prompt = 1;
}

/* Appends a token to every layer and head of row 0: key and value filled with one number each in their first places. */
static inline void rig_put2(rig *r, double k0, double k1, double v0, double score) {
    float k[256] = {(float)k0, (float)k1}, v[256] = {(float)v0};
    uint32_t n = rig_slots(r, 0, 0);
    for (uint32_t l = 0; l < r->c.n_layers; l++)
        for (uint32_t h = 0; h < r->c.n_kv; h++) {
            rig_put(r, 0, l, h, n, r->next_pos[0], k, v);
            for (uint32_t a = 0; a < r->c.n_arrays; a++) *rig_score(r, 0, l, h, a, n) = a ? 0.0f : (float)score;
        }
    for (uint32_t l = 0; l < r->c.n_layers; l++) rig_set_slots(r, 0, l, n + 1);
    r->next_pos[0]++;
}

static inline void rig_event0(rig *r, uint32_t keep, uint32_t kind, uint64_t fresh) {
    kvf_event e = {0, 0, keep, kind, 0, 0};
    rig_events(r, &e, 1, fresh);
}

/* The positions that head h of layer 0 holds, by slot: "0 1 4". */
static inline const char *rig_held(const rig *r, uint32_t h) {
    static char text[4][512];
    static int i;
    char *t = text[i = (i + 1) % 4];
    t[0] = '\0';
    for (uint32_t s = 0; s < rig_slots(r, 0, 0); s++)
        snprintf(t + strlen(t), 512 - strlen(t), "%s%u", s ? " " : "", rig_pos(r, 0, 0, h, s));
    return t;
}

static inline float rig_k(const rig *r, uint32_t h, uint32_t slot, uint32_t i) {
    kvf__head x = rig_head(r, 0, 0, h);
    return rig_get(r, kvf__k_row(&x, slot), i);
}
static inline float rig_v(const rig *r, uint32_t h, uint32_t slot) {
    kvf__head x = rig_head(r, 0, 0, h);
    return rig_get(r, kvf__v_row(&x, slot), 0);
}

#endif
