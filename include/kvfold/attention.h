/* kvfold/attention.h: attention over pages, and the attention mass it emits in passing.
 *
 * Memory. A page (block) holds block_size slots of one head group, HND:
 *     k[block][head in group][slot][head_dim], v likewise, at two base addresses, each with its
 *     own block stride: two tensors, or one with K and V side by side, both fit.
 * Slot metadata lies beside them, [block][head in group][slot].
 *
 * Queries are ragged: the tokens of the i-th sequence of the view are rows
 * [q_begin[i], q_begin[i + 1]) of q, k, v and out. Query head h belongs to KV head h / (n_q_heads / n_kv_heads).
 *
 * Slots are unordered once a policy has evicted: masks go by position. The tokens of a prefill
 * chunk are always the newest slots of their tables, in order.
 *
 * Window. With one, a query sees the newest `window` slots alone, itself included. Such tables hold the newest positions, in
 * order, from a block's begin on (kvf_manager_config.layer_windows).
 *
 * Bits. Given bit-equal Q, K, V the results are bit-equal for any chunking, thread count and batch:
 * tiles lie at multiples of KVF_TILE slots, or positions where there is a window, partial results merge in ascending order, and each
 * column sum is a left fold over the queries in order. No slot beyond a table's length is read.
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
    float *weight;   /* same shape: tokens merged into the slot, 1 at birth; NULL: not kept */
    float *bias;     /* same shape: added to the slot's logit, 0 at birth; NULL: none */
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

/* How the query heads of one KV head become one number. */
typedef enum kvf_gqa { KVF_GQA_SUM = 0, KVF_GQA_MAX = 1, KVF_GQA_FIRST = 2 } kvf_gqa;

/* What the kernels emit in passing; every output is optional. */
typedef struct kvf_mass {
    size_t struct_size;
    /* Prefill: col_sums[i] (NULL: not wanted) is [n_q_heads][col_stride] of this layer and of the i-th sequence of
     * the view; the probability that each query gives to slot j is added to [h][j], queries in order. */
    float *const *col_sums;
    size_t col_stride; /* floats, at least the slots of the longest table */
    /* Decode: [n_seqs][n_kv_heads][row_stride], reduced over the group; NULL: not wanted. row_wanted[i] = 0 skips one. */
    float *row;
    size_t row_stride;
    const uint8_t *row_wanted; /* [view.n_seqs] or NULL: all */
    const uint8_t *row_gqa;    /* [view.n_seqs] kvf_gqa, or NULL: sum; sq_sums too */
    /* Both: [n_tokens][n_q_heads], natural log of the softmax denominator of the scaled logits. */
    float *lse;
    /* Prefill, by sequence of the view as col_sums; NULL, or an entry that is: not wanted. view.next_pos is read with last_sums.
     * last_sums[i] is as col_sums[i], of the queries from position last_begin[i] on alone. */
    float *const *last_sums;
    const uint32_t *last_begin; /* [view.n_seqs]; required with last_sums */
    /* sq_sums[i] is [n_kv_heads][col_stride]: of each query the square of what its probabilities for slot j come to over the
     * query heads of the KV head, by row_gqa[i], is added to [kv_head][j], queries in order. */
    float *const *sq_sums;
} kvf_mass;

typedef enum kvf_cpu_path {
    KVF_CPU_AUTO = 0,   /* the fastest this CPU has */
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
    uint32_t seq_begin, seq_end; /* the sequences of the view this call is for */
    uint32_t n_q_heads;          /* of this rank; a multiple of the KV heads, at most 64 a KV head */
    float scale;                 /* of the logits; 0: 1 / sqrt(head_dim) */
    const uint32_t *q_begin;     /* [view.n_seqs + 1] */
    const float *q;              /* [n_tokens][n_q_heads][head_dim], rows q_stride floats apart */
    const float *k, *v;          /* append: [n_tokens][n_kv_heads][head_dim], rows kv_stride floats apart */
    size_t q_stride, kv_stride;
    float *out; /* [n_tokens][n_q_heads][head_dim], rows out_stride floats apart */
    size_t out_stride;
    kvf_mass *mass;  /* or NULL */
    void *workspace; /* kvf_attention_workspace_bytes of it, 64-byte aligned */
    size_t workspace_bytes;
    kvf_cpu_path path;
    uint32_t window; /* slots that a query sees at most; 0: all. view.next_pos is read then */
} kvf_attention;

/** Bytes of workspace that any call needs whose tables have at most max_slots slots.
 *  @param n_threads of the stream. @param head_dim, n_q_heads, n_kv_heads of the model (this rank).
 *  @param max_slots most slots of a table. @param max_seqs most sequences of a batch.
 *  @param max_tokens most query rows of one call.
 *  @param bytes result. @own nothing. @threads any. @errors KVF_E_INVALID, KVF_E_OVERFLOW. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_attention_workspace_bytes(uint32_t n_threads, uint32_t head_dim, uint32_t n_q_heads,
                                                           uint32_t n_kv_heads, uint32_t max_slots, uint32_t max_seqs,
                                                           uint32_t max_tokens, size_t *bytes);

/** Writes K and V of the sequences' new tokens into the newest slots of their tables (kvf_append has made them), with
 *  positions next_pos - n .. next_pos - 1, key norms, weight 1 and bias 0.
 *  @param stream where it runs. @param a k, v, kv_stride, q_begin, view, pages, layer, range are read.
 *  @param err detail, or NULL.
 *  @own nothing is kept. @threads one call on a stream at a time; different streams may not share pages being written.
 *  @errors KVF_E_INVALID (what is NULL, out of range, or no block of the pages). @cost O(tokens * heads * head_dim); no
 *  allocation; returns when done. */
KVF_API KVF_CHECK kvf_status kvf_attention_append(kvf_stream *stream, const kvf_attention *a, kvf_error *err);

/** Causal attention of a chunk's queries over everything their tables hold: the n tokens of a sequence are its newest n
 *  slots, and query t sees all earlier slots and those of the chunk up to itself.
 *  @param stream where it runs. @param a all fields but k, v. @param err detail, or NULL.
 *  @own nothing is kept. @threads as kvf_attention_append.
 *  @errors KVF_E_INVALID (a shape, a stride, a workspace too small: the text says how much). KVF_E_UNSUPPORTED (path).
 *  @cost O(tokens * slots * heads * head_dim), twice the key products when column sums are wanted; no allocation.
 *  @source online softmax: Milakov and Gimelshein, arXiv 1805.02867; tiles: FlashAttention, arXiv 2205.14135. */
KVF_API KVF_CHECK kvf_status kvf_attention_prefill(kvf_stream *stream, const kvf_attention *a, kvf_error *err);

/** Attention of one query a sequence (its newest slot) over all slots of its tables.
 *  @param stream where it runs. @param a all fields but k, v; q_begin has one row a sequence of the range.
 *  @param err detail, or NULL.
 *  @own nothing is kept. @threads as kvf_attention_append.
 *  @errors as kvf_attention_prefill.
 *  @cost reads K and V once: bound by memory; no allocation.
 *  @source split over the length: Flash-Decoding; paged: vLLM, arXiv 2309.06180. */
KVF_API KVF_CHECK kvf_status kvf_attention_decode(kvf_stream *stream, const kvf_attention *a, kvf_error *err);

/** Carries a copy list out on host memory: blocks with their slot metadata, and score pages.
 *  @param pages where blocks live. @param scores where score pages live, or NULL when the list has none.
 *  @param copies see kvf_append; the caller then calls kvf_copies_done.
 *  @own nothing. @threads as kvf_attention_append. @errors KVF_E_INVALID (an id out of range).
 *  @cost bytes copied; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_copies_run(const kvf_pages *pages, const kvf_score_pages *scores,
                                            const kvf_copy_list *copies);

/* One layer and group of a view in compressed rows, as FlashInfer's paged kernels take it: the pages of sequence i are
 * indices[indptr[i] .. indptr[i + 1]), the last of which holds last_page_len[i] slots. */
typedef struct kvf_csr {
    size_t struct_size;
    int32_t *indptr;        /* [n_seqs + 1] */
    int32_t *indices;       /* [capacity] */
    int32_t *last_page_len; /* [n_seqs]; 0 for an empty table */
    uint32_t capacity;      /* of indices */
    uint32_t n_indices;     /* filled in; with KVF_E_LIMIT: what it takes */
} kvf_csr;

/** Fills the compressed rows of one layer and group, so that a framework can run its own attention over our pages.
 *  @param view of the batch. @param pages the memory that it is about, or NULL: only the
 *  view is read, and the caller sees to it that slots have no biases. @param layer layer. @param group head group.
 *  @param csr buffers and capacity set by the caller, n_indices filled. @param err detail, or NULL.
 *  @own the caller's buffers. @threads as the view's manager.
 *  @errors KVF_E_INVALID; KVF_E_LIMIT (capacity: n_indices says what it takes, nothing else is written); KVF_E_UNSUPPORTED (the pages carry
 *  biases: slots have weights, which other kernels would leave out). @cost O(blocks), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_view_csr(const kvf_view *view, const kvf_pages *pages, uint32_t layer, uint32_t group,
                                          kvf_csr *csr, kvf_error *err);

/** kvf_copies_run with a host tier: also the copies between the tiers that kvf_swap_out and kvf_swap_in list.
 *  @param pages where blocks live. @param scores where score pages live, or NULL when the list has none.
 *  @param host_pages where the host's blocks live: of the same shape, with every array that pages has; NULL without a tier.
 *  @param host_scores likewise. @param copies the list; the caller then calls kvf_copies_done.
 *  @own nothing. @threads as kvf_attention_append. @errors KVF_E_INVALID (an id out of range, shapes that differ).
 *  @cost bytes copied; no allocation. */
KVF_API KVF_CHECK kvf_status kvf_copies_run_tiers(const kvf_pages *pages, const kvf_score_pages *scores,
                                                  const kvf_pages *host_pages, const kvf_score_pages *host_scores,
                                                  const kvf_copy_list *copies);

/* A copy list on its way to a device: where both tiers lie, and how far it has come. To be read by kvf_copies_next alone. */
typedef struct kvf_copies_source {
    kvf_pages pages[2]; /* the device's, the host's */
    kvf_score_pages scores[2];
    const kvf_copy_list *copies;
    uint32_t n_given;
} kvf_copies_source;

/** Checks a copy list, as kvf_copies_run_tiers does, for kvf_copies_next to give out as copies of a device.
 *  @param pages, scores, host_pages, host_scores, copies as there; the list stays as it is while out is used. @param out filled in.
 *  @own the caller's; copies is kept. @threads any. @errors KVF_E_INVALID as kvf_copies_run_tiers. @cost O(copies); no allocation. */
KVF_API KVF_CHECK kvf_status kvf_copies_begin(const kvf_pages *pages, const kvf_score_pages *scores,
                                              const kvf_pages *host_pages, const kvf_score_pages *host_scores,
                                              const kvf_copy_list *copies, kvf_copies_source *out);

/** The list's next copies: kvf_device_list.next, whose ctx is the kvf_copies_source.
 *  @param source from kvf_copies_begin. @param out [KVF_DEVICE_COPIES].
 *  @own the caller's buffer. @threads one call at a time. @errors none: how many, 0: no more. @cost O(copies given out); no allocation. */
KVF_API uint32_t kvf_copies_next(void *source, kvf_device_copy *out);

/** Whether this CPU has a path (KVF_CPU_REF and KVF_CPU_SCALAR always).
 *  @param path a path. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API int kvf_cpu_has_path(kvf_cpu_path path);

#ifdef __cplusplus
}
#endif
#endif
