/* d2o_policy/pages.h: addresses of the slots of one KV head; the checks and the scratch memory of a call. */
#ifndef KVF_D2O_POLICY_PAGES_H
#define KVF_D2O_POLICY_PAGES_H

#include "base/page_index.h"
#include "d2o_policy/cpu/kernels.h"
#include "d2o_policy/policy.h"

/* One KV head of one (sequence, layer): its block table, and its index in the head group. */
typedef struct kvf__head {
    const kvf_pages *pages;
    const uint32_t *rows;       /* block ids */
    const uint32_t *score_rows; /* page ids */
    uint32_t n_slots, hg;       /* hg: head in group */
    bool by_value;              /* kvf__match_row gives the value, not the key */
} kvf__head;

static inline uint64_t kvf__table_index(const kvf_view *v, uint32_t row, uint32_t layer, uint32_t kv_head) {
    return kvf__view_table(v, row, layer, kv_head / v->heads_per_group);
}

static inline kvf__head kvf__head_of(const kvf_view *v, const kvf_pages *pages, uint32_t row, uint32_t layer,
                                     uint32_t kv_head) {
    uint64_t t = kvf__table_index(v, row, layer, kv_head);
    return (kvf__head){
        pages,         v->rows + v->row_offset[t],   v->score_rows ? v->score_rows + v->row_offset[t] : NULL,
        v->n_slots[t], kv_head % v->heads_per_group, false};
}

/* The KV heads that an event is for, and the index of its first table. */
typedef struct kvf__event_part {
    uint32_t head_begin, n_heads;
    uint64_t table;
} kvf__event_part;
static inline kvf__event_part kvf__part_of(const kvf_view *v, const kvf_event *e) {
    uint32_t n = e->n_groups ? e->n_groups : v->n_groups, begin = e->n_groups ? e->group_begin : 0;
    return (kvf__event_part){begin * v->heads_per_group, n * v->heads_per_group,
                             kvf__table_index(v, e->row, e->layer, begin * v->heads_per_group)};
}
/* Whether a KV head is not part of the event. */
static inline bool kvf__event_lacks(const kvf_view *v, const kvf_event *e, uint32_t kv_head) {
    kvf__event_part part = kvf__part_of(v, e);
    return kv_head - part.head_begin >= part.n_heads;
}

/* Index of a slot in the metadata arrays. */
static inline size_t kvf__slot_index(const kvf__head *h, uint32_t slot) {
    uint32_t bs = h->pages->block_size;
    return kvf__meta_at(h->pages, h->rows[slot / bs], h->hg, slot % bs);
}

static inline void *kvf__k_row(const kvf__head *h, uint32_t slot) {
    return kvf__k_at(h->pages, h->rows[slot / h->pages->block_size], h->hg, slot % h->pages->block_size);
}
static inline void *kvf__v_row(const kvf__head *h, uint32_t slot) {
    return kvf__v_at(h->pages, h->rows[slot / h->pages->block_size], h->hg, slot % h->pages->block_size);
}

/* The row whose cosines are taken: a key or a value. */
static inline void *kvf__match_row(const kvf__head *h, uint32_t slot) {
    return h->by_value ? kvf__v_row(h, slot) : kvf__k_row(h, slot);
}

/* The float of a slot in one array of its score page. */
static inline float *kvf__score_at(const kvf__head *h, const kvf_score_pages *s, uint32_t array, uint32_t slot) {
    return s->base + kvf__score_index(s, h->score_rows[slot / s->block_size], array, h->hg, slot % s->block_size);
}

#define KVF__NEAR_SETS 2u /* sets of evicted rows that one pass over the pages matches */

/* ---- Scratch memory: one per thread, cut from the batch's workspace -------------------------------------- */

typedef struct kvf__scratch {
    uint64_t *keys;                     /* [max_slots] */
    uint64_t *sorted;                   /* [max_slots] position in the high half, slot in the low */
    uint32_t *slots;                    /* [max_slots] */
    uint32_t *order;                    /* [max_slots] */
    uint32_t *first;                    /* [max_slots] */
    uint32_t *next;                     /* [max_slots] */
    uint32_t *moves;                    /* [4 * max_slots] pairs of source and target */
    uint8_t *evicted;                   /* [max_slots] */
    uint8_t *done;                      /* [max_slots] */
    float *score[KVF_MAX_SCORE_ARRAYS]; /* [max_slots] */
    float *worth;                       /* [max_slots] */
    float *model;                       /* [max_slots] scores from the model */
    uint32_t *pos;                      /* [max_slots] */
    uint64_t *work;                     /* [max_slots] scratch of a policy's worth */
    double *weights;                    /* [max_slots] */
    float *u, *mass;                    /* [max_slots] */
    float *panels;                      /* KVF__CHUNK / 8 panels: evicted rows of one chunk */
    float *chunk_norm;                  /* [KVF__CHUNK] */
    kvf__best *best;                    /* [KVF__CHUNK] */
    float *tile;                        /* 3 panels of kept rows */
    float *rows;                        /* [4][head_dim] */
    float *lanes;                       /* [KVF__NEAR_SETS][head_dim][KVF__LANES] evicted rows */
    float *wide;                        /* [16][KVF__NEAR_STRIDE] kept rows */
    uint32_t *bins;                     /* [KVF__BINS] */
    void *temp_row;
} kvf__scratch;

/* Cuts one thread's scratch memory from the slab; with slab->base NULL it only counts the bytes. */
void kvf__scratch_carve(kvf__slab *slab, uint32_t head_dim, uint32_t max_slots, kvf__scratch *out);

/* A call whose inputs are checked: the batch agrees with the state, ids and slots are in range, the workspace is large enough. */
typedef struct kvf__call {
    kvf_policy_state *state;
    const kvf_policy_batch *batch;
    const kvf__kernels *kernels;
    uint32_t max_slots; /* slots of the longest table of an event */
    size_t thread_bytes;
} kvf__call;

/* A caller's batch and what it points to, in this version's form. */
typedef struct kvf__batch {
    kvf_policy_batch b; /* its pointers are to the copies below, where the caller's were set */
    kvf_view view;
    kvf_pages pages;
    kvf_score_pages scores;
    kvf_mass mass;
} kvf__batch;
kvf_status kvf__batch_read(kvf__batch *to, const kvf_policy_batch *given, const char *what, kvf_error *err);

kvf_status kvf__batch_check(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                            const char *what, kvf__call *call, kvf_error *err);
/* Checks that the plan belongs to this batch. */
kvf_status kvf__plan_check(const kvf_policy_batch *batch, const kvf_plan *plan, const char *what, kvf_error *err);
kvf_status kvf__view_check(const kvf_policy_state *state, const kvf_policy_batch *batch, const char *what,
                           kvf_error *err);
kvf_status kvf__pages_check(const kvf_policy_state *state, const kvf_policy_batch *batch, const char *what,
                            kvf_error *err);
/* For the tables of an event: groups [group_begin, group_begin + n_groups) of its layer. */
kvf_status kvf__score_pages_check(const kvf_policy_batch *batch, uint32_t n_arrays, const kvf_event *event,
                                  uint32_t n_slots, kvf_error *err);
kvf_status kvf__kernels_choose(kvf_cpu_path path, const kvf__kernels **out, kvf_error *err);
kvf__scratch kvf__call_scratch(const kvf__call *call, uint32_t thread);

/* The sequence of an event. */
static inline kvf__policy_seq *kvf__event_seq(const kvf__call *c, const kvf_event *e) {
    return kvf__policy_seq_get(c->state, c->batch->view->seq_index[e->row]);
}

/* Whether the event's scores come from the running prompt's sums, not from the score pages. */
static inline bool kvf__of_prompt(const kvf_policy_batch *b, const kvf_event *e) {
    return e->kind == KVF_EVENT_PROMPT &&
           ((b->prompt_sums && b->prompt_sums[e->row]) || (b->prompt_last && b->prompt_last[e->row]) ||
            (b->prompt_logprobs && b->prompt_logprobs[e->row]));
}

/* Gathers the scores that an event uses, array by array, into x->score. */
void kvf__event_scores(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__scratch *x);

/* ---- groups.c -------------------------------------------------------------------------------------- */

/* values[i]: the sum of the scores of the i-th best slots of the event's heads, descending. The recent window and the sinks come first.
 * values: [slots of the table]. */
void kvf__group_values(const kvf__call *c, const kvf_event *e, uint32_t window, const kvf__scratch *x, double *values);
/* Gives the groups of the layers that want them sizes; with check it only checks the inputs that this needs. */
kvf_status kvf__groups_deal(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                            uint32_t above, uint32_t kind, bool check, kvf_error *err);
/* Tables above their groups' sizes; keep: [n_layers][n_groups]. Returns their number. */
uint32_t kvf__groups_due(const kvf_policy_state *state, const kvf__policy_seq *s, const uint32_t *n_slots,
                         uint32_t above, uint32_t *keep);

/* ---- global.c -------------------------------------------------------------------------------------- */

/* budget global: gives all tables their sizes, if this is the moment to. On failure nothing has changed. */
kvf_status kvf__global_deal(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch, uint32_t row,
                            uint32_t above, uint32_t kind, const kvf__ranks *ranks, kvf_error *err);

/* ---- worth.c --------------------------------------------------------------------------------------- */

/* Fills the argument of a policy's worth for one KV head, from x->score. */
void kvf__slots_fill(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__scratch *x,
                     const kvf__roles *r, kvf_policy_slots *out);
/* The scores by which an event ranks the slots of one KV head (the policy's worth). x->score is filled, too. mixed: with score_mix;
 * without, for the sizes of tables. */
const float *kvf__event_worth(const kvf__call *c, const kvf_event *e, uint32_t kv_head, bool mixed,
                              const kvf__scratch *x);

/* ---- apply.c: one KV head of one event ------------------------------------------------------------- */

/* The argument of a policy's fold. It reads rows of old, and writes rows of the kept slots that receive a merge, to row
 * kvf__fold_slot(old slot) of to. */
typedef struct kvf__fold {
    const kvf__kernels *kernels;
    const kvf_policy_options *options;
    const kvf__call *call;
    const kvf_event *event;
    uint32_t kv_head;
    kvf__roles roles;
    const kvf_plan_entry *entries; /* [n_evict], ascending by position */
    uint32_t n_evict, n_keep;
    kvf__head old, to; /* equal if the event is in place */
    bool fresh;        /* to is in fresh blocks */
    bool gathered;     /* the scores are in x.score, and are written back from there */
    kvf__scratch x;
} kvf__fold;

/* The slot of `to` in which a receiver's row is written: its old slot, or its slot in the fresh blocks. */
static inline uint32_t kvf__fold_slot(const kvf__fold *f, uint32_t slot) { return f->fresh ? f->x.slots[slot] : slot; }
/* Replaces the merge of evicted rows into kept ones (cam.c). */
void kvf__cam_fold(const kvf__fold *fold);
/* Updates the stored norm of a receiver's value, which is now row. */
void kvf__fold_norm(const kvf__fold *f, uint32_t slot, const float *row);

/* Index of a KV head's first entry of an event. */
static inline uint64_t kvf__entries_at(const kvf_view *v, const kvf_plan_event *pe, uint32_t kv_head) {
    return pe->entry_begin + (uint64_t)(kv_head - kvf__part_of(v, &pe->event).head_begin) * pe->n_evict;
}

/* Ascending sort, in place. */
void kvf__sort_u64(uint64_t *a, uint32_t n);

#endif
