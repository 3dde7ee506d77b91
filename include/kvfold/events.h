/* kvfold/events.h: the policy driver. It does all that a policy does to sequences at one moment: it computes the layers'
 * sizes, finds the tables that must shrink, compacts them, and gives their blocks back.
 * A serving loop calls it at three moments: before it appends tokens, at the end of a prompt, and after each decode step.
 *
 * Simple use
 *     kvf_status decode_step(kvf_events *events, kvf_moment_rows *rows, kvf_error *err) {
 *         rows->moment = KVF_BEFORE_APPEND; // of the sequences that get a token now
 *         kvf_status status = kvf_events_run(events, rows, err);
 *         // ... kvf_append, kvf_view_fill, the forward pass with kvf_policy_observe after each layer's attention ...
 *         rows->moment = KVF_AFTER_STEP;
 *         if (!status) status = kvf_events_run(events, rows, err);
 *         return status;
 *     }
 *
 * Rules
 *  - The calls of one moment, in this order: metric, reduce, budget, due, reserve, score pages, kvf_compact_begin, match,
 *    reduce, gate, apply, kvf_compact_commit.
 *  - Running out of blocks is the ordinary status KVF_E_NO_BLOCKS. Then nothing has been evicted and no size has changed. Free
 *    blocks, or swap a sequence out, and call again with the same rows; a row that is no longer wanted gets the handle 0.
 *    (Score pages that a prompt's end took stay with their sequence.)
 *  - A sequence that is swapped out takes no part: give its row the handle 0. After it is swapped in it goes on as it was.
 *  - After any other failure the contents of the rows' tables may be lost. Free these sequences and compute them again.
 *  - After a call that compacted something the view's n_slots are old: fill the view again.
 *  - Ranks of a tensor-parallel group call with the same rows and give `reduce`. Then all make the same decisions.
 */
#ifndef KVFOLD_EVENTS_H
#define KVFOLD_EVENTS_H

#include "kvfold/policy.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_events kvf_events;

typedef struct kvf_events_config {
    size_t struct_size;
    kvf_manager *manager;       /* it and the policies must outlive the driver */
    kvf_policy_state *policies; /* made for the manager's layers, heads and sizes */
    kvf_stream *stream;         /* where match, gate and apply run; NULL: in the caller's thread */
    kvf_cpu_path path;
    uint32_t max_rows; /* most rows of one call; 0: the manager's max_seqs */
    uint64_t
        plan_entries; /* evicted slots, counted once for each KV head, that are matched together; 0: 2^20, or more if one
                            * table may have more. A larger call is cut into several */
    kvf_allocator allocator;
    /* Called in the caller's thread, within kvf_events_run. Each may be NULL. A status other than KVF_OK ends the call. */
    void *ctx;
    /* Sums n numbers over the ranks, in place: the layers' metric of a prompt, cosines with scope layer, and counts of slots with
     * budget global. */
    kvf_status (*reduce)(void *ctx, double *values, uint64_t n, kvf_error *err);
    /* A row is about to have its first events, which may need fresh blocks in place of shared ones: the time to reserve them. */
    kvf_status (*reserve)(void *ctx, uint32_t row, kvf_error *err);
    /* Blocks are missing: frees or swaps out at least one sequence, and sets dropped[row] to 1 for each row that this ends.
     * Called until the blocks suffice. NULL: the call ends with KVF_E_NO_BLOCKS. */
    kvf_status (*make_room)(void *ctx, uint8_t *dropped, kvf_error *err);
    /* Without pages: the metric of a prompt, [n_layers][n_q_heads_total], before it is reduced. NULL: all layers are equal. */
    kvf_status (*metric)(void *ctx, uint32_t row, double *values, kvf_error *err);
} kvf_events_config;

/** Creates a driver. Nothing is allocated afterwards.
 *  @param config manager and policies are required. @param out the driver. @param err detail, or NULL.
 *  @own the caller, kvf_events_destroy. @threads one at a time, with its manager.
 *  @errors KVF_E_INVALID (NULL, sizes that differ between manager and policies), KVF_E_NO_MEMORY, KVF_E_OVERFLOW.
 *  @cost O(max_rows * tables) bytes; touched as used. */
KVF_API KVF_CHECK kvf_status kvf_events_create(const kvf_events_config *config, kvf_events **out, kvf_error *err);

/** Frees it; NULL is allowed.
 *  @param events a driver. @own takes it. @threads none may use it. @errors none. @cost frees. */
KVF_API void kvf_events_destroy(kvf_events *events);

enum {                      /* kvf_moment_rows.changed */
       KVF_ROW_RESIZED = 1, /* its sizes were computed, or have changed: reserve by them now (kvf_seq_reserve) */
       KVF_ROW_DROPPED = 2  /* make_room ended it */
};

/* The rows of one moment. */
typedef struct kvf_moment_rows {
    size_t struct_size;
    kvf_moment moment;
    /* KVF_BEFORE_APPEND: filled before the append; else as the step's kernels saw it. */
    const kvf_view *view;
    const kvf_seq *seqs;         /* [n_seqs] the view's sequences; 0: the row takes no part */
    uint32_t row_begin, row_end; /* rows of the view. KVF_AT_PROMPT_END: those whose prompt or segment has just ended */
    const kvf_pages *pages;      /* NULL: sizes alone count; match, gate and apply are left out */
    const kvf_score_pages *scores; /* NULL for policies that do not observe */
    /* KVF_AT_PROMPT_END: by row of the view, as in kvf_policy_batch; NULL where a row, or all rows, need none. */
    const uint32_t *n_prompt; /* [n_seqs] prompt tokens so far, those of earlier segments included */
    float *const *prompt_sums;
    size_t prompt_stride;
    float *const *prompt_last;
    float *const *prompt_squares;
    const float *const *prompt_logprobs;
    uint8_t *changed; /* [n_seqs] or NULL: KVF_ROW_*, set for the rows [row_begin, row_end) */
} kvf_moment_rows;

/** Does what the policies of these rows do at this moment. Rows may have different policies.
 *  @param events a driver. @param rows see above. @param err detail, or NULL.
 *  @own nothing is kept. @threads as the manager; on failure see the rules above.
 *  @errors KVF_E_NO_BLOCKS (nothing has changed), KVF_E_INVALID (more rows than max_rows, a view or an array that is missing),
 *  KVF_E_STALE (a sequence that is not open in the policies), those of the callbacks and of a policy's own functions.
 *  @cost O(rows * tables) if nothing is due; else that of the events. No allocation.
 *  @source arXiv 2406.13035; d2o_policy/README.md. */
KVF_API KVF_CHECK kvf_status kvf_events_run(kvf_events *events, const kvf_moment_rows *rows, kvf_error *err);

#ifdef __cplusplus
}
#endif
#endif
