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
} kvf__head;

static inline uint64_t kvf__table_index(const kvf_view *v, uint32_t row, uint32_t layer, uint32_t kv_head) {
    return ((uint64_t)row * v->n_layers + layer) * v->n_groups + kv_head / v->heads_per_group;
}

static inline kvf__head kvf__head_of(const kvf_view *v, const kvf_pages *pages, uint32_t row, uint32_t layer,
                                     uint32_t kv_head) {
    uint64_t t = kvf__table_index(v, row, layer, kv_head);
    return (kvf__head){pages, v->rows + v->row_offset[t], v->score_rows ? v->score_rows + v->row_offset[t] : NULL,
                       v->n_slots[t], kv_head % v->heads_per_group};
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

/* The float of a slot in one array of its score page, [page][array][head in group][slot]. */
static inline float *kvf__score_at(const kvf__head *h, const kvf_score_pages *s, uint32_t array, uint32_t slot) {
    uint32_t bs = s->block_size;
    size_t page = h->score_rows[slot / bs];
    return s->base + ((page * s->n_arrays + array) * s->heads_per_group + h->hg) * bs + slot % bs;
}

/* ---- Scratch: one per thread, carved from the batch's workspace -------------------------------------- */

typedef struct kvf__scratch {
    uint64_t *keys;    /* [max_slots] */
    uint64_t *sorted;  /* [max_slots] position in the high half, slot in the low */
    uint32_t *slots;   /* [max_slots] */
    uint32_t *order;   /* [max_slots] */
    uint32_t *first;   /* [max_slots] */
    uint32_t *next;    /* [max_slots] */
    uint32_t *moves;   /* [4 * max_slots] pairs of source and target */
    uint8_t *evicted;  /* [max_slots] */
    uint8_t *done;     /* [max_slots] */
    float *score[2];   /* [max_slots] */
    double *weights;   /* [max_slots] */
    float *u, *mass;   /* [max_slots] */
    float *panels;     /* evicted rows of one chunk, KVF__CHUNK / 8 panels */
    float *chunk_norm; /* [KVF__CHUNK] */
    kvf__best *best;   /* [KVF__CHUNK] */
    float *tile;       /* three panels of kept rows */
    float *rows;       /* [4][head_dim] */
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
kvf_status kvf__score_pages_check(const kvf_policy_batch *batch, uint32_t n_arrays, uint32_t row, uint32_t layer,
                                  uint32_t n_slots, kvf_error *err);
kvf__scratch kvf__call_scratch(const kvf__call *call, uint32_t thread);

/* The sequence of an event. */
static inline kvf__policy_seq *kvf__event_seq(const kvf__call *c, const kvf_event *e) {
    return kvf__policy_seq_get(c->state, c->batch->view->seq_index[e->row]);
}

/* Whether the event's scores are the running prompt's, and not the pages'. */
static inline const float *kvf__prompt_sums(const kvf_policy_batch *b, const kvf_event *e) {
    return e->kind == KVF_EVENT_PROMPT && b->prompt_sums ? b->prompt_sums[e->row] : NULL;
}

/* The scores an event goes by, array by array, as they are before it: out[0..1][n_slots]; out[1] is zero without a
 * second array. */
void kvf__event_scores(const kvf__call *c, const kvf_event *e, uint32_t kv_head, float *const out[2]);

/* Ascending sort, in place. */
void kvf__sort_u64(uint64_t *a, uint32_t n);

#endif
