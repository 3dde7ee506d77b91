/* kvfold/attention.h: attention over paged K and V.
 * It writes K and V of new tokens into the pages, computes prefill and decode attention over them, and can sum up the
 * attention probabilities on the way: eviction policies need these sums. Batches are ragged; CPU only.
 *
 * Simple use
 *     // One prompt through one layer: 32 query heads, 8 KV heads, head_dim 128. kvf_append has added the slots already.
 *     kvf_status attend(kvf_stream *stream, const kvf_view *view, const kvf_pages *pages, uint32_t layer, uint32_t n_tokens,
 *                       const float *q, const float *k, const float *v, float *out, void *workspace, size_t bytes) {
 *         const uint32_t q_begin[2] = {0, n_tokens}; // sequence 0 of the view has the rows [0, n_tokens)
 *         kvf_attention a = {.struct_size = sizeof a, .view = view, .pages = pages, .layer = layer, .seq_end = 1};
 *         a.n_q_heads = 32, a.q_begin = q_begin, a.q = q, a.k = k, a.v = v, a.out = out;
 *         a.q_stride = a.out_stride = 32 * 128, a.kv_stride = 8 * 128;
 *         a.workspace = workspace, a.workspace_bytes = bytes; // kvf_attention_workspace_bytes says how many
 *         kvf_status status = kvf_attention_append(stream, &a, NULL);
 *         return status ? status : kvf_attention_prefill(stream, &a, NULL);
 *     }
 *
 * Memory
 *     A page holds the K and V of one block: block_size slots of one head group, in the layout HND:
 *         k[block][head in group][slot][head_dim], v likewise.
 *     k and v have a base address and a block stride each, so that they may be two tensors, or one tensor with K and V
 *     side by side. Slot metadata are separate arrays, [block][head in group][slot].
 *
 * Queries
 *     The tokens of the i-th sequence of the view are the rows [q_begin[i], q_begin[i + 1]) of q, k, v and out.
 *     Query head h reads KV head h / (n_q_heads / n_kv_heads).
 *
 * Masks
 *     After an eviction the slots of a table are in no order of position. Only the slots of a prefill chunk are: they are
 *     always the newest slots of their table, in order. So the causal mask applies inside the chunk, and every query sees
 *     all earlier slots.
 *     With a sliding window, a query sees the newest `window` slots including its own. The tables of such a layer hold the
 *     newest positions, in order, and begin at a block boundary (kvf_manager_config.layer_windows).
 *
 * Reproducible bits
 *     Equal bits of Q, K and V give equal bits of the result for any chunking, thread count and batch. Softmax tiles begin
 *     at multiples of KVF_TILE slots (with a window: positions), partial results are merged in ascending order, and each
 *     column sum is added up query by query, in order. No slot beyond a table's length is read.
 */
#ifndef KVFOLD_ATTENTION_H
#define KVFOLD_ATTENTION_H

#include "kvfold/base.h"
#include "kvfold/blockmgr.h"
#include "kvfold/device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_TILE 512u /* slots of a softmax tile; a multiple of every block size */

typedef struct kvf_pages {
    size_t struct_size;
    kvf_dtype dtype;                                          /* of k and v */
    uint32_t n_blocks, block_size, heads_per_group, head_dim; /* head_dim: a multiple of 8, at most 256 */
    void *k, *v;
    uint64_t k_block_stride, v_block_stride; /* bytes from one block to the next */
    uint32_t *pos;   /* [n_blocks][heads_per_group][block_size]: position of the token in the slot */
    float *key_norm; /* same shape: norm of the stored key; NULL: not kept */
    float *weight;   /* same shape: tokens merged into the slot, 1 for a new token; NULL: not kept */
    float *bias;     /* same shape: added to the slot's logit, 0 for a new token; NULL: none */
    float *score;    /* same shape: the slot's score from the model itself, +INFINITY: none yet; NULL: not kept */
} kvf_pages;

/** Bytes of K and V of one block, heads_per_group * block_size * head_dim * 2 elements; 0 when a field is 0 or sizes wrap.
 *  @param pages dtype, block_size, heads_per_group and head_dim are read.
 *  @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint64_t kvf_pages_block_bytes(const kvf_pages *pages);

/* Score pages: [page][array][head in group][slot] float, addressed through view.score_rows. */
typedef struct kvf_score_pages {
    size_t struct_size;
    float *base;
    uint32_t n_pages, n_arrays, heads_per_group, block_size;
} kvf_score_pages;

/* How the numbers of a KV head's query heads become one: their sum, the largest, or the first query head's. */
typedef enum kvf_gqa { KVF_GQA_SUM = 0, KVF_GQA_MAX = 1, KVF_GQA_FIRST = 2 } kvf_gqa;

/* Attention probabilities that the kernels sum up and store. Every output is optional. */
typedef struct kvf_mass {
    size_t struct_size;
    /* Prefill: column sums. col_sums[i] (NULL: not wanted) belongs to the i-th sequence of the view and this layer, and is
     * [n_q_heads][col_stride]. The probability that each query gives to slot j is added to [h][j], queries in order. */
    float *const *col_sums;
    size_t col_stride; /* floats, at least the slots of the longest table */
    /* Decode: the row of probabilities, [n_seqs][n_kv_heads][row_stride], the query heads of a KV head reduced to one number
     * by row_gqa; NULL: not wanted. row_wanted[i] = 0 leaves the i-th sequence out. */
    float *row;
    size_t row_stride;
    const uint8_t *row_wanted; /* [view.n_seqs] or NULL: all */
    const uint8_t *row_gqa;    /* [view.n_seqs] kvf_gqa, or NULL: sum. Used for row and for sq_sums */
    /* Both: [n_tokens][n_q_heads], natural log of the softmax denominator of the scaled logits. */
    float *lse;
    /* Prefill: column sums of the last queries. last_sums[i] (NULL: not wanted) has the shape of col_sums[i], and only the
     * queries from position last_begin[i] on are added to it. Needs view.next_pos. */
    float *const *last_sums;
    const uint32_t *last_begin; /* [view.n_seqs]; required with last_sums */
    /* Prefill: sums of squares. sq_sums[i] (NULL: not wanted) is [n_kv_heads][col_stride]. For each query, its probabilities
     * for slot j are reduced over the query heads of the KV head by row_gqa[i]; the square is added to [kv_head][j], queries
     * in order. */
    float *const *sq_sums;
    /* Prefill: the largest probability of each slot. max_prob[i] (NULL: not wanted) belongs to the i-th sequence and is
     * [n_q_heads][col_stride], like col_sums. [h][j] becomes the largest of itself and of probability * query_scale of each
     * query, if slot j has a position in [max_begin[i], max_end[i]); other columns stay as they were, and need not exist. From
     * max_begin[i] on a table must hold its positions in order and without gaps. Needs view.next_pos. */
    float *const *max_prob;
    const uint32_t *max_begin, *max_end; /* [view.n_seqs]; required with max_prob */
    const float *query_scale;            /* [n_tokens], by query row; NULL: 1 */
} kvf_mass;

typedef enum kvf_cpu_path {
    KVF_CPU_AUTO = 0,   /* the fastest that this CPU supports */
    KVF_CPU_REF = 1,    /* plain C in double precision, one thread */
    KVF_CPU_SCALAR = 2, /* the tiled algorithm in plain C */
    KVF_CPU_AVX2 = 3,   /* AVX2, FMA, F16C */
    KVF_CPU_AVX512 = 4  /* AVX-512 F, BW, VL, DQ */
} kvf_cpu_path;

/* One layer of one batch. */
typedef struct kvf_attention {
    size_t struct_size;
    const kvf_view *view;
    const kvf_pages *pages;
    uint32_t layer;
    uint32_t seq_begin, seq_end; /* the call works on the sequences [seq_begin, seq_end) of the view */
    uint32_t n_q_heads;          /* of this rank; a multiple of the KV heads, at most 64 a KV head */
    float scale;                 /* of the logits; 0: 1 / sqrt(head_dim) */
    const uint32_t *q_begin;     /* [view.n_seqs + 1] */
    const float *q;              /* [n_tokens][n_q_heads][head_dim], rows q_stride floats apart */
    const float *k, *v;          /* append: [n_tokens][n_kv_heads][head_dim], rows kv_stride floats apart */
    size_t q_stride, kv_stride;
    float *out; /* [n_tokens][n_q_heads][head_dim], rows out_stride floats apart */
    size_t out_stride;
    kvf_mass *mass;  /* or NULL */
    void *workspace; /* 64-byte aligned, at least kvf_attention_workspace_bytes */
    size_t workspace_bytes;
    kvf_cpu_path path;
    uint32_t window; /* sliding window: most slots that a query sees; 0: all. Needs view.next_pos */
} kvf_attention;

/** Workspace that is enough for every call on tables of at most max_slots slots.
 *  @param n_threads of the stream. @param head_dim, n_q_heads, n_kv_heads of the model (this rank).
 *  @param max_slots most slots of a table. @param max_seqs most sequences of a batch.
 *  @param max_tokens most query rows of one call.
 *  @param bytes result. @own nothing. @threads any. @errors KVF_E_INVALID, KVF_E_OVERFLOW. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_attention_workspace_bytes(uint32_t n_threads, uint32_t head_dim, uint32_t n_q_heads,
                                                           uint32_t n_kv_heads, uint32_t max_slots, uint32_t max_seqs,
                                                           uint32_t max_tokens, size_t *bytes);

/** Writes K and V of the sequences' new tokens into the newest slots of their tables, with positions next_pos - n ..
 *  next_pos - 1, key norms, weight 1, bias 0 and score +INFINITY. kvf_append has added these slots before.
 *  @param stream where it runs. @param a k, v, kv_stride, q_begin, view, pages, layer and the range of sequences are read.
 *  @param err detail, or NULL.
 *  @own nothing is kept. @threads one call on a stream at a time; two streams must not use pages that one of them writes.
 *  @errors KVF_E_INVALID (what is NULL, out of range, or no block of the pages). KVF_E_STALE (the view's buffer has been filled
 *  again). @cost O(tokens * heads * head_dim); block ids are read only of a view that kvf_view_fill did not make; no allocation;
 *  returns when done. */
KVF_API KVF_CHECK kvf_status kvf_attention_append(kvf_stream *stream, const kvf_attention *a, kvf_error *err);

/** Causal attention of a chunk's queries over all slots of their tables. The n tokens of a sequence are its newest n
 *  slots; a query sees all earlier slots, and those of the chunk up to and including its own.
 *  @param stream where it runs. @param a all fields but k, v. @param err detail, or NULL.
 *  @own nothing is kept. @threads as kvf_attention_append.
 *  @errors KVF_E_INVALID (a shape, a stride, a workspace too small: the text says how much). KVF_E_STALE as kvf_attention_append.
 *  KVF_E_UNSUPPORTED (path).
 *  @cost O(tokens * slots * heads * head_dim), twice the key products when column sums are wanted; no allocation.
 *  @source online softmax: Milakov and Gimelshein, arXiv 1805.02867; tiles: FlashAttention, arXiv 2205.14135. */
KVF_API KVF_CHECK kvf_status kvf_attention_prefill(kvf_stream *stream, const kvf_attention *a, kvf_error *err);

/** Attention of one query per sequence (its newest slot) over all slots of its tables.
 *  @param stream where it runs. @param a all fields but k, v; q_begin has one row a sequence of the range.
 *  @param err detail, or NULL.
 *  @own nothing is kept. @threads as kvf_attention_append.
 *  @errors as kvf_attention_prefill.
 *  @cost reads K and V once: bound by memory; no allocation.
 *  @source split over the length: Flash-Decoding; paged: vLLM, arXiv 2309.06180. */
KVF_API KVF_CHECK kvf_status kvf_attention_decode(kvf_stream *stream, const kvf_attention *a, kvf_error *err);

/** Carries out a copy list in host memory: blocks with their slot metadata, and score pages.
 *  @param pages where blocks live. @param scores where score pages live, or NULL when the list has none.
 *  @param host_pages where the host's blocks live: of the same shape, with every array that pages has; NULL without a tier.
 *  @param host_scores likewise. @param copies the list; the caller then calls kvf_copies_done.
 *  @own nothing. @threads as kvf_attention_append. @errors KVF_E_INVALID (an id out of range, shapes that differ).
 *  @cost bytes copied; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_copies_run(const kvf_pages *pages, const kvf_score_pages *scores,
                                            const kvf_pages *host_pages, const kvf_score_pages *host_scores,
                                            const kvf_copy_list *copies);

/** Gives a copy list to a device's stream, and goes on: a list in which no copy reads what another one writes is one operation
 *  (kvf_device.copy_blocks), otherwise as many as it takes.
 *  @param device the device; NULL: kvf_device_cpu(). @param stream of the device; NULL: returns when all copies are done.
 *  @param pages, scores, host_pages, host_scores as in kvf_copies_run. @param copies the list: items stays unchanged until an
 *  event that is recorded after this call is done; the caller then calls kvf_copies_done. @param err detail, or NULL.
 *  @own nothing but items until then. @threads one call on a stream at a time.
 *  @errors KVF_E_INVALID as kvf_copies_run, nothing is copied then; those of the device, some copies may run then.
 *  @cost O(copies); no allocation. */
KVF_API KVF_CHECK kvf_status kvf_copies_queue(const kvf_device *device, kvf_stream *stream, const kvf_pages *pages,
                                              const kvf_score_pages *scores, const kvf_pages *host_pages,
                                              const kvf_score_pages *host_scores, const kvf_copy_list *copies,
                                              kvf_error *err);

/* The block tables of one layer and group in compressed sparse rows, as FlashInfer's paged kernels take them. The pages of
 * sequence i are indices[indptr[i] .. indptr[i + 1]); the last of them holds last_page_len[i] slots. */
typedef struct kvf_csr {
    size_t struct_size;
    int32_t *indptr;        /* [n_seqs + 1] */
    int32_t *indices;       /* [capacity] */
    int32_t *last_page_len; /* [n_seqs]; 0 for an empty table */
    uint32_t capacity;      /* of indices */
    uint32_t n_indices;     /* result: entries of indices; with KVF_E_LIMIT the capacity that is needed */
} kvf_csr;

/** Fills the compressed rows of one layer and group, so that a framework can run its own attention over these pages.
 *  @param view of the batch. @param pages the pages that the view's blocks lie in, or NULL: then only the view is read, and
 *  the caller makes sure that slots have no bias. @param layer layer. @param group head group.
 *  @param csr buffers and capacity set by the caller, n_indices filled. @param err detail, or NULL.
 *  @own the caller's buffers. @threads as the view's manager.
 *  @errors KVF_E_INVALID; KVF_E_LIMIT (capacity: n_indices says what is needed, nothing else is written); KVF_E_STALE (the
 *  view's buffer has been filled again); KVF_E_UNSUPPORTED (the pages have a bias per slot, which other kernels would leave out). @cost O(blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_view_csr(const kvf_view *view, const kvf_pages *pages, uint32_t layer, uint32_t group,
                                          kvf_csr *csr, kvf_error *err);

/** Whether this CPU supports a path (KVF_CPU_REF and KVF_CPU_SCALAR always).
 *  @param path a path. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API int kvf_cpu_has_path(kvf_cpu_path path);

#ifdef __cplusplus
}
#endif
#endif
