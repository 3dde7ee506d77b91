/* attention/call.h: an attention call after its checks, in the form that all paths take. */
#ifndef KVF_ATTENTION_CALL_H
#define KVF_ATTENTION_CALL_H

#include "base/base.h"
#include "base/page_index.h"
#include "kvfold/attention.h"

/* A call after its checks: copies of the caller's structs in this version's form, and values derived from them. */
typedef struct kvf__call {
    kvf_attention a; /* a.view, a.pages and a.mass point at the caller's; use the copies below */
    kvf_view view;
    kvf_pages pages;
    kvf_mass mass; /* zeros when there is none */
    uint32_t n_threads;
    uint32_t n_kv_heads;  /* n_groups * heads_per_group */
    uint32_t n_per_kv;    /* query heads of one KV head */
    uint32_t max_slots;   /* longest table of the range */
    uint32_t token_begin; /* query rows [token_begin, token_end) */
    uint32_t token_end;
    float scale;
} kvf__call;

/* What a call is going to do: decides which fields are read. */
typedef enum kvf__call_kind { KVF__APPEND, KVF__PREFILL, KVF__DECODE } kvf__call_kind;

/* Checks every argument and fills call. Nothing is written on failure. */
kvf_status kvf__call_check(kvf__call *call, kvf_stream *stream, const kvf_attention *a, kvf__call_kind kind,
                           kvf_error *err);

/* The workspace: a scratch area for each thread, an index of work items, and the rest, which each path divides
 * itself. */
typedef struct kvf__workspace {
    float *scratch;        /* [n_threads][scratch_floats] */
    size_t scratch_floats; /* a multiple of 16 */
    uint64_t *index;       /* [max_seqs * n_kv_heads + 1] */
    uint32_t *turns;       /* [max_seqs * n_kv_heads], atomic while items run */
    size_t kept_floats;    /* of a thread's scratch: logits that prefill keeps for the column sums */
    unsigned char *rest;
    size_t rest_bytes;
    size_t bytes; /* of all */
} kvf__workspace;

/* Query rows in prefill: of one work item, of one softmax. */
enum { KVF__ROWS = 192, KVF__SUB_ROWS = 24, KVF__KEPT_FLOATS = 1 << 17 };
static inline size_t kvf__pad16(size_t n) { return (n + 15) / 16 * 16; }

/* Lays a workspace out over base (NULL: sizes only). False when a size wraps. */
bool kvf__workspace_layout(kvf__workspace *w, void *base, uint32_t n_threads, uint32_t head_dim, uint32_t n_q_heads,
                           uint32_t n_kv_heads, uint32_t max_slots, uint32_t max_seqs, uint32_t max_tokens);

/* Bytes that decode keeps for one tile of one sequence: per query head the probabilities and a partial result. */
static inline size_t kvf__decode_tile_floats(uint32_t n_q_heads, uint32_t head_dim) {
    return (size_t)n_q_heads * (KVF_TILE + kvf__pad16(head_dim) + 16);
}

static inline size_t kvf__table(const kvf__call *c, uint32_t seq, uint32_t group) {
    return kvf__view_table(&c->view, seq, c->a.layer, group);
}

/* The position of a table in the grid of tiles, counted in columns. Without a window slot j is column j. With a
 * window the slots move, so a column is a position modulo KVF_TILE: tiles then begin at the same positions, however
 * many slots before the window are left. */
typedef struct kvf__columns {
    uint32_t shift;      /* column of slot 0; a multiple of the block size */
    uint32_t begin, end; /* what the newest query sees */
} kvf__columns;

/* Of the first n slots of a table, the first that their last one sees. */
static inline uint32_t kvf__first_seen(const kvf__call *c, uint32_t n) {
    return c->a.window && n > c->a.window ? n - c->a.window : 0;
}
static inline kvf__columns kvf__columns_of(const kvf__call *c, uint32_t seq, uint32_t group) {
    uint32_t n = c->view.n_slots[kvf__table(c, seq, group)];
    uint32_t shift = c->a.window ? (c->view.next_pos[seq] - n) % KVF_TILE : 0;
    return (kvf__columns){shift, shift + kvf__first_seen(c, n), shift + n};
}
static inline uint32_t kvf__n_tiles(kvf__columns x) {
    return x.begin == x.end ? 0 : kvf__ceil_div(x.end, KVF_TILE) - x.begin / KVF_TILE;
}

/* What of a sequence's prefill is added up by column. */
static inline bool kvf__wants_cols(const kvf__call *c, uint32_t seq) {
    const kvf_mass *m = &c->mass;
    return (m->col_sums && m->col_sums[seq]) || (m->last_sums && m->last_sums[seq]) ||
           (m->sq_sums && m->sq_sums[seq]) || (m->max_prob && m->max_prob[seq]);
}
/* The slots [begin, end) of a table of n_slots whose largest probabilities are wanted. */
typedef struct kvf__max_slots {
    uint32_t begin, end;
} kvf__max_slots;
static inline kvf__max_slots kvf__max_slots_of(const kvf__call *c, uint32_t seq, uint32_t n_slots) {
    const kvf_mass *m = &c->mass;
    if (!m->max_prob || !m->max_prob[seq]) return (kvf__max_slots){0, 0};
    uint32_t next = c->view.next_pos[seq], n_before = next - m->max_begin[seq], n_after = next - m->max_end[seq];
    return (kvf__max_slots){n_slots - KVF__MIN(n_slots, n_before), n_slots - KVF__MIN(n_slots, n_after)};
}
/* Whether a query row is one of its sequence's last queries, whose column sums are wanted separately. */
static inline bool kvf__counts_last(const kvf__call *c, uint32_t seq, uint32_t token) {
    const kvf_mass *m = &c->mass;
    if (!m->last_sums || !m->last_sums[seq]) return false;
    return c->view.next_pos[seq] - (c->a.q_begin[seq + 1] - token) >= m->last_begin[seq];
}
static inline kvf_gqa kvf__gqa_of(const kvf__call *c, uint32_t seq) {
    return c->mass.row_gqa ? (kvf_gqa)c->mass.row_gqa[seq] : KVF_GQA_SUM;
}

/* The paths. Arguments are checked and the workspace is large enough. */
kvf_status kvf__ref_prefill(const kvf__call *c, const kvf__workspace *w, kvf_error *err);
kvf_status kvf__ref_decode(const kvf__call *c, const kvf__workspace *w, kvf_error *err);
kvf_status kvf__cpu_prefill(kvf_stream *stream, const kvf__call *c, const kvf__workspace *w, kvf_cpu_path path,
                            kvf_error *err);
kvf_status kvf__cpu_decode(kvf_stream *stream, const kvf__call *c, const kvf__workspace *w, kvf_cpu_path path,
                           kvf_error *err);

#endif
