/* d2o_policy/pages.h: where a slot of one KV head lies; the checks and the scratch memory of a call. */
#ifndef KVF_D2O_POLICY_PAGES_H
#define KVF_D2O_POLICY_PAGES_H

#include "d2o_policy/cpu/kernels.h"
#include "d2o_policy/policy.h"

/* One KV head of one (sequence, layer): its block row, and which head of the group it is. */
typedef struct kvf__head {
    const kvf_pages *pages;
    const uint32_t *rows;       /* block ids */
    const uint32_t *score_rows; /* page ids */
    uint32_t n_slots, hg;
    bool by_value; /* what kvf__match_row gives */
} kvf__head;

static inline uint64_t kvf__table_index(const kvf_view *v, uint32_t row, uint32_t layer, uint32_t kv_head) {
    return ((uint64_t)row * v->n_layers + layer) * v->n_groups + kv_head / v->heads_per_group;
}

static inline kvf__head kvf__head_of(const kvf_view *v, const kvf_pages *pages, uint32_t row, uint32_t layer,
                                     uint32_t kv_head) {
    uint64_t t = kvf__table_index(v, row, layer, kv_head);
    return (kvf__head){
        pages,         v->rows + v->row_offset[t],   v->score_rows ? v->score_rows + v->row_offset[t] : NULL,
        v->n_slots[t], kv_head % v->heads_per_group, false};
}

/* The KV heads of an event, and its first table. */
typedef struct kvf__event_part {
    uint32_t head_begin, n_heads;
    uint64_t table;
} kvf__event_part;
static inline kvf__event_part kvf__part_of(const kvf_view *v, const kvf_event *e) {
    uint32_t n = e->n_groups ? e->n_groups : v->n_groups, begin = e->n_groups ? e->group_begin : 0;
    return (kvf__event_part){begin * v->heads_per_group, n * v->heads_per_group,
                             kvf__table_index(v, e->row, e->layer, begin * v->heads_per_group)};
}
/* Whether a KV head has no part in it. */
static inline bool kvf__event_lacks(const kvf_view *v, const kvf_event *e, uint32_t kv_head) {
    kvf__event_part part = kvf__part_of(v, e);
    return kv_head - part.head_begin >= part.n_heads;
}

/* Index of a slot in the metadata arrays, [block][head in group][slot]. */
static inline size_t kvf__slot_index(const kvf__head *h, uint32_t slot) {
    uint32_t bs = h->pages->block_size;
    return ((size_t)h->rows[slot / bs] * h->pages->heads_per_group + h->hg) * bs + slot % bs;
}

static inline void *kvf__row(const kvf__head *h, void *base, uint64_t block_stride, uint32_t slot) {
    const kvf_pages *p = h->pages;
    size_t bs = p->block_size, bytes = p->dtype == KVF_F32 ? 4 : 2;
    size_t in_block = (h->hg * bs + slot % bs) * p->head_dim * bytes;
    return (unsigned char *)base + h->rows[slot / bs] * block_stride + in_block;
}
static inline void *kvf__k_row(const kvf__head *h, uint32_t slot) {
    return kvf__row(h, h->pages->k, h->pages->k_block_stride, slot);
}
static inline void *kvf__v_row(const kvf__head *h, uint32_t slot) {
    return kvf__row(h, h->pages->v, h->pages->v_block_stride, slot);
}

/* The row whose cosines are taken. */
static inline void *kvf__match_row(const kvf__head *h, uint32_t slot) {
    return h->by_value ? kvf__v_row(h, slot) : kvf__k_row(h, slot);
}

/* The float of a slot in one array of its score page, [page][array][head in group][slot]. */
static inline float *kvf__score_at(const kvf__head *h, const kvf_score_pages *s, uint32_t array, uint32_t slot) {
    uint32_t bs = s->block_size;
    size_t page = h->score_rows[slot / bs];
    return s->base + ((page * s->n_arrays + array) * s->heads_per_group + h->hg) * bs + slot % bs;
}

#define KVF__NEAR_SETS 2u /* of evicted rows that are matched in one pass over the pages */

/* ---- Scratch: one per thread, carved from the batch's workspace -------------------------------------- */

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
    uint32_t *pos;                      /* [max_slots] */
    uint64_t *work;                     /* [max_slots] for worth */
    double *weights;                    /* [max_slots] */
    float *u, *mass;                    /* [max_slots] */
    float *panels;                      /* evicted rows of one chunk, KVF__CHUNK / 8 panels */
    float *chunk_norm;                  /* [KVF__CHUNK] */
    kvf__best *best;                    /* [KVF__CHUNK] */
    float *tile;                        /* three panels of kept rows */
    float *rows;                        /* [4][head_dim] */
    float *lanes;                       /* [KVF__NEAR_SETS][head_dim][KVF__LANES] evicted rows */
    float *wide;                        /* [16][KVF__NEAR_STRIDE] kept ones */
    void *temp_row;
} kvf__scratch;

/* Carves one thread's scratch; with slab->base NULL it only counts. */
void kvf__scratch_carve(kvf__slab *slab, uint32_t head_dim, uint32_t max_slots, kvf__scratch *out);

/* A checked call: the batch agrees with the state, ids and slots are in range, the workspace is large enough. */
typedef struct kvf__call {
    kvf_policy_state *state;
    const kvf_policy_batch *batch;
    const kvf__kernels *kernels;
    uint32_t max_slots; /* most slots of an event's table */
    size_t thread_bytes;
} kvf__call;

kvf_status kvf__batch_check(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                            const char *what, kvf__call *call, kvf_error *err);
/* The plan belongs to this batch. */
kvf_status kvf__plan_check(const kvf_policy_batch *batch, const kvf_plan *plan, const char *what, kvf_error *err);
kvf_status kvf__view_check(const kvf_policy_state *state, const kvf_policy_batch *batch, const char *what,
                           kvf_error *err);
kvf_status kvf__pages_check(const kvf_policy_state *state, const kvf_policy_batch *batch, const char *what,
                            kvf_error *err);
/* Of the tables [group_begin, group_begin + n_groups) of a layer. */
kvf_status kvf__score_pages_check(const kvf_policy_batch *batch, uint32_t n_arrays, const kvf_event *event,
                                  uint32_t n_slots, kvf_error *err);
kvf_status kvf__kernels_choose(kvf_cpu_path path, const kvf__kernels **out, kvf_error *err);
kvf__scratch kvf__call_scratch(const kvf__call *call, uint32_t thread);

/* The sequence of an event. */
static inline kvf__policy_seq *kvf__event_seq(const kvf__call *c, const kvf_event *e) {
    return kvf__policy_seq_get(c->state, c->batch->view->seq_index[e->row]);
}

/* Whether the event's scores are the running prompt's, and not the pages'. */
static inline bool kvf__of_prompt(const kvf_policy_batch *b, const kvf_event *e) {
    return e->kind == KVF_EVENT_PROMPT &&
           ((b->prompt_sums && b->prompt_sums[e->row]) || (b->prompt_last && b->prompt_last[e->row]) ||
            (b->prompt_logprobs && b->prompt_logprobs[e->row]));
}

/* The scores an event goes by, array by array, as they are before it, into x->score. */
void kvf__event_scores(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__scratch *x);

/* ---- worth.c --------------------------------------------------------------------------------------- */

/* The slots of one head for a policy's calls, from x->score. */
void kvf__slots_fill(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__scratch *x,
                     const kvf__roles *r, kvf_policy_slots *out);
/* What the slots of one head are worth before an event; the scores are then in x->score. */
const float *kvf__event_worth(const kvf__call *c, const kvf_event *e, uint32_t kv_head, const kvf__scratch *x);

/* ---- apply.c: one head of one event under way ------------------------------------------------------- */

/* What a policy's fold sees. It reads rows of old, and writes rows of receivers: row target_slot(old slot) of to. */
typedef struct kvf__fold {
    const kvf__kernels *kernels;
    const kvf_policy_options *options;
    const kvf__call *call;
    const kvf_event *event;
    uint32_t kv_head;
    kvf__roles roles;
    const kvf_plan_entry *entries; /* [n_evict], ascending by position */
    uint32_t n_evict, n_keep;
    kvf__head old, to; /* equal when in place */
    bool fresh;
    bool gathered; /* the scores are in x.score and are written back from there */
    kvf__scratch x;
} kvf__fold;

/* Where the row of a receiver is written: its old slot, or its place in the fresh blocks. */
static inline uint32_t kvf__fold_slot(const kvf__fold *f, uint32_t slot) { return f->fresh ? f->x.slots[slot] : slot; }
/* Notes that the receiver's value has changed: row is what is stored now. */
void kvf__fold_norm(const kvf__fold *f, uint32_t slot, const float *row);

/* Where a KV head's entries of an event begin. */
static inline uint64_t kvf__entries_at(const kvf_view *v, const kvf_plan_event *pe, uint32_t kv_head) {
    return pe->entry_begin + (uint64_t)(kv_head - kvf__part_of(v, &pe->event).head_begin) * pe->n_evict;
}

/* Ascending sort, in place. */
void kvf__sort_u64(uint64_t *a, uint32_t n);

#endif
