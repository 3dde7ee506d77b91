/* kvfold/scheduler.h: continuous batching: which requests run in the next step, and with how many tokens.
 * It creates and frees the sequences of its requests and their policy states, admits requests by their size after
 * compression, cuts prompts into chunks, and preempts the latest request when a growing one finds no free block. It counts
 * tokens, and reads their ids only for the prefix cache. The caller runs the forward pass and the policy's events (policy.h).
 *
 * Simple use
 *     // One step for requests of policy "full", submitted with kvf_sched_submit; repeat while any waits or runs.
 *     kvf_status run_step(kvf_manager *manager, kvf_sched *sched, uint64_t now) {
 *         kvf_step step = {.struct_size = sizeof step};
 *         kvf_status status = kvf_sched_plan(sched, now, &step);
 *         if (!status) status = kvf_copies_done(manager, &step.copies); // after kvf_copies_run has carried them out
 *         // here the forward pass runs over step.items: their slots are appended already
 *         if (!status) status = kvf_sched_done(sched);
 *         for (uint32_t i = 0; !status && i < step.n_items; i++) {
 *             int ended = 0;
 *             if (step.items[i].prompt_ends) status = kvf_sched_prompt_done(sched, step.items[i].request);
 *             if (!status && step.items[i].samples) status = kvf_sched_token(sched, step.items[i].request, &ended);
 *             if (!status && ended) status = kvf_sched_finish(sched, step.items[i].request);
 *         }
 *         return status;
 *     }
 *
 * A request's states
 *     waiting -> prefill (chunks) -> decode -> gone (finish, abort)
 *        ^------------- preempted -----|      its blocks are freed, its known tokens are computed again
 *     Known tokens are the prompt and the tokens generated so far. Computed tokens are those whose K and V are in the pages.
 *     After a preemption a policy that never evicts prefills all known tokens. A policy that evicts prefills only the prompt
 *     and then replays the generated tokens, one per step, so that its scores and events are those of the first run. With
 *     replay_all every policy replays, and K and V are those of the first run to the bit.
 *
 * Samples
 *     A request with n_samples of 2 or more is a group. Its first sample, the leader, computes the prompt. The others are
 *     held: they have reservations but no blocks. kvf_sched_prompt_done forks the leader into n_samples running requests that
 *     share its blocks; each has its own name, tables and policy state. Until then the group is preempted, ended and queued
 *     again as one; when its leader is finished, the next sample takes over. After the fork each sample is a request like
 *     any other: once preempted, it shares nothing any more and computes its own prompt and tokens again.
 *     A request submitted with `forks` may also be forked at any later step (kvf_sched_fork), as beam search needs it. All
 *     requests of a group count as having arrived together.
 *     Samples with options of their own (sample_options) are forked before the prompt's events (kvf_sched_fork_prompt),
 *     since each has its own events. Their prompt is computed once, with column sums if any of them needs these.
 *
 * Segments
 *     A request whose answer has ended may be paused instead of finished (kvf_sched_pause). It keeps its tables, runs in no
 *     step, and is the first to be preempted when another needs room. kvf_sched_extend gives it the next segment of its
 *     prompt, for example the next user turn of a dialogue. First the answer's last token is decoded; then the segment is
 *     computed in chunks and ends like a prompt (prompt_ends, kvf_sched_prompt_done); then decoding goes on. A paused request
 *     that was preempted computes everything again in the same order: prompt, answer, segment, and so on.
 */
#ifndef KVFOLD_SCHEDULER_H
#define KVFOLD_SCHEDULER_H

#include "kvfold/blockmgr.h"
#include "kvfold/policy.h"
#include "kvfold/prefix.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvf_sched kvf_sched;
typedef uint64_t kvf_request; /* a request's name: rises with each submission; never 0, never used again */

/* How a preempted request gets its K and V back. */
typedef enum kvf_preempt {
    KVF_PREEMPT_AUTO = 0,      /* as SWAP, but recomputes what takes a single step to recompute */
    KVF_PREEMPT_RECOMPUTE = 1, /* every request recomputes its tokens */
    KVF_PREEMPT_SWAP = 2       /* a decoding request is swapped to the host if there is room; all others recompute */
} kvf_preempt;

/* The order of the queue, and of the requests that run: who needs room takes it from the last one. A request that waits takes no blocks
 * from one that runs. The place of a request is fixed when it is submitted (DEADLINE: at the first plan; PREFIX: when its tokens are
 * given), so that only so many later requests ever come before it; `patience` is that of kvf_sched_config. Equal ones come as they
 * arrived. */
typedef enum kvf_order {
    KVF_ORDER_ARRIVAL = 0, /* first come, first served */
    KVF_ORDER_PRIORITY =
        1, /* by priority: a step of it is worth `patience` places. With a priority higher by d a request comes before
                             * the fewer than d * patience that were submitted last */
    KVF_ORDER_DEADLINE =
        2, /* the earliest deadline first. Without one it is `patience` after the first plan. No later request comes
                             * before one whose deadline is past. A deadline that is missed ends nothing */
    KVF_ORDER_SHORTEST = 3, /* the shortest prompt first: a chunk is worth `patience` places */
    KVF_ORDER_PREFIX =
        4 /* prompts that begin alike one after another: a request comes right behind one that waits, or whose prompt
                             * runs, but at most `patience` places up. Needs kvf_sched_set_prefix and the prefix cache */
} kvf_order;

typedef struct kvf_sched_config {
    size_t struct_size;
    /* Only the scheduler may create, grow and free its sequences. Where samples or forks share blocks, the manager's n_table_blocks
     * should be UINT64_MAX: the scheduler makes room for blocks, not for entries in tables. */
    kvf_manager *manager;
    kvf_policy_state *policies;  /* with the manager's max_seqs */
    uint32_t max_running;        /* most sequences in a step; 0: the manager's max_seqs */
    uint32_t max_waiting;        /* most requests in the queue, or paused without blocks; 0: 65536 */
    uint32_t max_batch_tokens;   /* most tokens of a step, at least chunk + max_running; 0: chunk + max_running */
    uint32_t chunk;              /* prefill chunks end on multiples of it; a multiple of block_size; 0: 512 */
    uint32_t max_prefill_tokens; /* accumulator columns: most prompt tokens at once that need sums; 0: max_slots */
    uint32_t max_context;        /* positions; a request that reaches it ends (length); 0: the manager's max_slots */
    kvf_allocator allocator;
    int replay_all;   /* 1: every policy replays after a preemption, see above */
    uint32_t preempt; /* kvf_preempt; if the manager has no host tier, all are recomputed */
    uint32_t order;   /* kvf_order */
    /* See kvf_order. Places, at most 2^24; 0: 256. With KVF_ORDER_DEADLINE a time in the unit of kvf_sched_plan's now; 0: 60e9, which
     * is a minute of nanoseconds. */
    uint64_t patience;
    uint32_t n_instruction; /* tokens before each piece of a repetition, at most KVF_MAX_INSTRUCTION_TOKENS */
} kvf_sched_config;

typedef struct kvf_sched_request {
    size_t struct_size;
    uint32_t n_prompt; /* 1..max_context - 1 */
    uint32_t max_new;  /* most tokens to generate; 0: the caller finishes the request when its prompt is computed */
    const kvf_policy_options *options;
    void *user;                /* handed back in steps */
    uint32_t n_samples;        /* samples of the prompt, each a request; 0: 1 */
    int forks;                 /* 1: the caller will fork and finish them (beam search), at most n_samples at a time */
    void *const *sample_users; /* [n_samples] in place of user, or NULL; not kept */
    kvf_request *sample_names; /* [n_samples] filled with the names, ascending; or NULL; not kept */
    const kvf_policy_options *const
        *sample_options; /* [n_samples] options of each sample, in place of options, copied; or NULL; not with forks */
    int32_t priority;    /* -1000 to 1000, for KVF_ORDER_PRIORITY */
    uint64_t deadline; /* a time of kvf_sched_plan's now, for KVF_ORDER_DEADLINE; 0: none; what is past counts as now */
} kvf_sched_request;

typedef enum kvf_step_kind {
    KVF_STEP_DECODE = 0,  /* one token */
    KVF_STEP_PREFILL = 1, /* a chunk of the prompt */
    KVF_STEP_REPEAT =
        2 /* a chunk of a piece of the prompt's repetition, for policies that need one (KVF_NEEDS_REPEAT) */
} kvf_step_kind;

typedef struct kvf_step_item {
    kvf_request request;
    kvf_seq seq;
    void *user;
    uint32_t kind;        /* kvf_step_kind */
    uint32_t token_begin; /* first known token to compute; also its position. KVF_STEP_REPEAT: the position alone */
    uint32_t n_tokens;
    int prompt_ends;         /* 1: the last chunk of a prompt or segment; the policy's prompt events follow */
    int samples;             /* 1: after the step all known tokens are computed, and the next one can be sampled */
    uint32_t prefill_offset; /* first column of this request in the accumulators, in tokens; UINT32_MAX: needs none */
    uint32_t n_held; /* samples that kvf_sched_prompt_done (or kvf_sched_fork_prompt) will fork from this request */
    /* The prefix cache. match is set in a request's first item if the cache had its first match->n_tokens tokens; the item
     * begins behind them. Before it runs, load the column sums, squares and log-probabilities of match->n_snapshot_tokens tokens
     * (kvf_prefix_snapshot_get). logits_only: the snapshot already contains the sums of this item's query; do not add them
     * again. take_snapshot: after the step store those of the first token_begin + n_tokens tokens with snapshot_flags
     * (kvf_prefix_snapshot_put). */
    int logits_only, take_snapshot;
    uint32_t snapshot_flags;
    const kvf_prefix_match *match; /* NULL without a hit */
    int swapped; /* in `preempted`: 1: swapped to the host, it will go on where it was; 0: recomputed */
    /* In a chunk of a prompt or segment: n_columns: columns that it has in the accumulators. begins: 1: clear them first. In a
     * repetition these are the columns of its own accumulator, the largest probabilities. */
    uint32_t n_columns;
    int begins;
    /* KVF_STEP_REPEAT: the piece is the instruction and the known tokens [piece_begin, piece_end); the item computes n_tokens of it
     * from its token piece_at on. The piece stands at the positions behind the prompt or segment, and kvf_sched_done takes it away
     * when it is complete. When all pieces are, a last item computes the prompt's last token again, for its logits only
     * (logits_only, prompt_ends). */
    uint32_t piece_begin, piece_end, piece_at;
} kvf_step_item;

typedef enum kvf_end_reason {
    KVF_END_NONE = 0,
    KVF_END_LENGTH = 1,    /* max_new or max_context reached, or no block left although nothing else runs */
    KVF_END_NO_BLOCKS = 2, /* every layer evicts, but its exact sizes exceed the pool although nothing else runs */
    KVF_END_REFUSED = 3    /* the policy state refuses its options: it was created for other sizes than the manager */
} kvf_end_reason;

typedef struct kvf_step_end {
    kvf_request request;
    void *user;
    uint32_t reason; /* kvf_end_reason */
} kvf_step_end;

/* One step. Decode items come first, then those of prompts and their repetitions, each in the scheduler's order. Their slots are appended already. A running
 * request without a new token (kvf_sched_token) since its last item has no item in the step. */
typedef struct kvf_step {
    size_t struct_size;           /* set by the caller */
    size_t item_bytes, end_bytes; /* strides of items and preempted, and of ends (KVF_AT) */
    const kvf_step_item *items;
    uint32_t n_items, n_decode;
    const kvf_step_end *ends; /* requests that the scheduler had to end; their names are no longer valid */
    uint32_t n_ends;
    const kvf_step_item *preempted; /* preempted requests, paused ones included: request, user and swapped are set */
    uint32_t n_preempted;
    /* Carry these out before the step, then call kvf_copies_done. Only copies to the host may run during the step; they must be
     * done before the next plan. Blocks of swapped requests are free when their copies are done, so that a step may have copies
     * and no items. */
    kvf_copy_list copies;
    uint32_t n_tokens;
    uint32_t n_running, n_waiting;
} kvf_step;

/** Sets struct_size; everything else becomes 0.
 *  @param config filled; NULL does nothing. @param struct_size sizeof *config: no byte beyond it is written.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API void kvf_sched_config_init(kvf_sched_config *config, size_t struct_size);

/** Creates a scheduler over a manager and a policy state, which must outlive it.
 *  @param config see kvf_sched_config. @param out the scheduler. @param err detail, or NULL.
 *  @own the caller, kvf_sched_destroy. @threads one at a time, with its manager.
 *  @errors KVF_E_INVALID, KVF_E_NO_MEMORY, KVF_E_OVERFLOW. @cost O(max_running + max_waiting); allocates once. */
KVF_API KVF_CHECK kvf_status kvf_sched_create(const kvf_sched_config *config, kvf_sched **out, kvf_error *err);

/** Frees it and every sequence it holds; NULL is allowed.
 *  @param sched a scheduler. @own takes it. @threads none may use it. @errors none. @cost O(sequences). */
KVF_API void kvf_sched_destroy(kvf_sched *sched);

/** Detail of the last failed call; its text is "" if none has failed.
 *  @param sched a scheduler. @own the scheduler's. @threads as the scheduler. @errors none. @cost O(1). */
KVF_API const kvf_error *kvf_sched_error(const kvf_sched *sched);

/** Queues a request. Samples that the pool can never hold together, or of which there are more than max_running, become several
 *  groups, each of which computes the prompt for itself; with `forks` they are refused.
 *  @param sched a scheduler. @param request see kvf_sched_request; options are copied. @param out its name.
 *  @own nothing is kept but user. @threads as the scheduler.
 *  @errors KVF_E_INVALID (options, priority, no token, more samples with `forks` than max_running), KVF_E_NEVER_FITS (the text names the
 *  blocks needed and the blocks of the pool, or the tokens and the context), KVF_E_LIMIT (max_waiting).
 *  @cost O(n_layers + n_samples), no allocation; not in the order of arrival also O(requests that wait). */
KVF_API KVF_CHECK kvf_status kvf_sched_submit(kvf_sched *sched, const kvf_sched_request *request, kvf_request *out);

/** Plans the next step: admits requests in the scheduler's order, appends their slots, preempts if a growing request finds no block.
 *  @param sched a scheduler. @param now the time, in any unit; the scheduler reads no clock, and only KVF_ORDER_DEADLINE uses it. Less
 *  than before counts as before. @param step struct_size set by the caller; its arrays are valid until the next call. n_items 0 together with n_waiting 0
 *  means that there is nothing to do; n_items is never 0 while something could run.
 *  @own the scheduler's. @threads as the scheduler.
 *  @errors KVF_E_STATE (the last step was not ended with kvf_sched_done), KVF_E_CORRUPT (a fault of the scheduler: destroy it).
 *  @cost O(running * tables), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_plan(kvf_sched *sched, uint64_t now, kvf_step *step);

/** Tells the scheduler that the planned step has run: its tokens are computed.
 *  @param sched a scheduler with a step planned. @own nothing. @threads as the scheduler. @errors KVF_E_STATE. @cost O(items). */
KVF_API KVF_CHECK kvf_status kvf_sched_done(kvf_sched *sched);

/** Takes back the planned step, of which nothing has run but its copies. Its requests are as they were before the plan: their slots are
 *  given back, and those that it admitted wait again. If nothing else changes, the next plan has the same items. What the step reports
 *  stands (requests that ended, or were preempted), and so do swaps.
 *  @param sched a scheduler with a step planned. @own nothing; the copies of the step stay the caller's, who must carry them out.
 *  @threads as the scheduler. @errors KVF_E_STATE. @cost O(items * tables), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_cancel(kvf_sched *sched);

/** Undoes a step that failed. May be called at any moment from kvf_sched_plan to the last kvf_sched_token of the step. Every
 *  running request goes back to the queue and computes everything again, with the same result; paused requests give up their
 *  blocks. No step is planned afterwards. The requests of the failed step come back one at a time, each only when the one
 *  before it has got a token, so that a step that fails again contains just one of them.
 *  @param sched a scheduler. @own nothing; no step will list them, and the copies of a plan that was handed out stay the caller's.
 *  @threads as the scheduler. @errors only KVF_E_INVALID (NULL). @cost O(blocks of the running requests), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_undo(kvf_sched *sched);

/** How many requests there are now, without the paused ones.
 *  @param sched a scheduler, or NULL: 0 of each. @param n_running those that hold a sequence. @param n_waiting those in the queue
 *  (swapped ones too), and held samples. Each may be NULL. @own nothing. @threads as the scheduler.
 *  @errors none. @cost O(1). */
KVF_API void kvf_sched_counts(const kvf_sched *sched, uint32_t *n_running, uint32_t *n_waiting);

/** The requests at the head of the queue, which the next plan may admit.
 *  @param sched a scheduler, or NULL. @param users filled with their user pointers, in the order of the queue. @param capacity of users.
 *  @own the pointers are the caller's own. @threads as the scheduler. @errors none: returns how many there are, 0 to capacity.
 *  @cost O(capacity). */
KVF_API uint32_t kvf_sched_ahead(const kvf_sched *sched, void **users, uint32_t capacity);

/** Tells the scheduler that one more token of a request is known (sampled).
 *  @param sched a scheduler. @param request a running one whose known tokens are all computed and that holds no samples any
 *  more; or one made by kvf_sched_fork that waits because there was no room for it.
 *  @param ended set to 1 when that was its last token (max_new or context reached): the caller then finishes it. Or NULL.
 *  @own nothing. @threads as the scheduler. @errors KVF_E_NOT_FOUND, KVF_E_STATE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_sched_token(kvf_sched *sched, kvf_request request, int *ended);

/* Tokens [begin, end) of a request: a later part of its prompt. */
typedef struct kvf_sched_segment {
    uint32_t begin, end;
} kvf_sched_segment;

/** Pauses a request instead of finishing it.
 *  @param sched a scheduler with no step planned. @param request one that decodes and whose last token is known, or that has no
 *  further token to get; not one with samples. @own nothing. @threads as the scheduler. @errors KVF_E_NOT_FOUND, KVF_E_STATE.
 *  @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_sched_pause(kvf_sched *sched, kvf_request request);

/** Gives a paused request the next segment of its prompt.
 *  @param sched a scheduler with no step planned. @param request a paused one. @param segments all segments so far, ascending, the
 *  new one last: it begins where the known tokens end. @param n_segments how many. @param max_new most tokens to generate after it, 1 or
 *  more. @own the array must live as long as the request, or until the next kvf_sched_extend. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE (not paused), KVF_E_INVALID, KVF_E_NEVER_FITS (the context, or the accumulators). Nothing
 *  changes on failure. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_sched_extend(kvf_sched *sched, kvf_request request, const kvf_sched_segment *segments,
                                              uint32_t n_segments, uint32_t max_new);

/** Tells the scheduler that a request's prompt events are done. Its columns of the accumulators become free, its reservation is
 *  set to its exact sizes, and its held samples are forked, all or none; the forks' copies are in kvf_sched_copies.
 *  @param sched a scheduler. @param request one whose prompt has ended.
 *  @own nothing. @threads as the scheduler. @errors KVF_E_NOT_FOUND, KVF_E_STATE, KVF_E_NO_BLOCKS (the exact sizes, or the forks,
 *  need more blocks than are free: the request has been preempted with its samples and is in the queue again).
 *  @cost O(n_layers), and O(its blocks) for each fork. */
KVF_API KVF_CHECK kvf_status kvf_sched_prompt_done(kvf_sched *sched, kvf_request request);

/** Forks the held samples that have options of their own, before the prompt's events, all or none. Then the request and each
 *  sample have their own events over the shared prompt (kvf_sched_event_room reserves the blocks) and their own
 *  kvf_sched_prompt_done. The request's accumulators hold the sums for all of them. The forks' copies are in kvf_sched_copies.
 *  If there is no room although nothing else runs, the samples go to the queue, and each computes the prompt for itself.
 *  @param sched a scheduler. @param request one whose prompt has ended. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE, KVF_E_NO_BLOCKS (the request has been preempted with its samples and is in the queue
 *  again). @cost O(its blocks) for each sample. */
KVF_API KVF_CHECK kvf_status kvf_sched_fork_prompt(kvf_sched *sched, kvf_request request);

/** Forks a running request. The child has the same known tokens, shares every block, and gets a policy state, score pages
 *  (kvf_sched_copies) and a reservation like its parent's. If the pool or max_running has no room for it, the child waits in
 *  the queue and computes its tokens again, like a preempted request; kvf_sched_seq is then 0.
 *  @param sched a scheduler with no step planned. @param parent one submitted with `forks`, whose known tokens are all
 *  computed; admission counted n_samples of them at a time. @param user handed back in the child's steps.
 *  @param out the child's name. @own nothing is kept but user. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE, KVF_E_LIMIT (no place for one more request). @cost O(the parent's blocks), no
 *  allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_fork(kvf_sched *sched, kvf_request parent, void *user, kvf_request *out);

/** The copies of the forks made since the last plan. Carry them out at once, before anything else is written, then call
 *  kvf_copies_done. Copies that are not taken here come first in the next step's copies.
 *  @param sched a scheduler with no step planned. @own the scheduler's, until the next call. @threads as the scheduler.
 *  @errors none: NULL without a scheduler. @cost O(1). */
KVF_API kvf_copy_list *kvf_sched_copies(kvf_sched *sched);

/** The sequence of a request.
 *  @param sched a scheduler. @param request any. @own the scheduler's. @threads as the scheduler.
 *  @errors none: 0 for one that waits, is held, or is gone. @cost O(1). */
KVF_API kvf_seq kvf_sched_seq(const kvf_sched *sched, kvf_request request);

/** Makes room for an event that found too few blocks: preempts the running request that arrived last, at once.
 *  @param sched a scheduler with no step planned. @param preempted the request and its user; no step will list it.
 *  @own nothing. @threads as the scheduler. @errors KVF_E_STATE, KVF_E_NO_BLOCKS (fewer than two run). @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_sched_shed(kvf_sched *sched, kvf_step_item *preempted);

/** Reserves the fresh blocks that a request's first event needs for tables whose blocks other sequences share. Call it when the
 *  sizes are known, before kvf_compact_begin. If there is no room the earlier reservation stays, and kvf_compact_begin may
 *  return KVF_E_NO_BLOCKS; then call kvf_sched_shed and try again.
 *  @param sched a scheduler. @param request one whose prompt is computed. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE. @cost O(blocks of its tables). */
KVF_API KVF_CHECK kvf_status kvf_sched_event_room(kvf_sched *sched, kvf_request request);

typedef struct kvf_sched_prefix {
    size_t struct_size;
    /* The known tokens, at least n_prompt of them: the prompt, and room for the generated tokens, each of which the caller
     * writes before it calls kvf_sched_token. All that the key points to must live as long as the request. tokens NULL: the
     * request neither looks its prompt up nor stores it. */
    kvf_prefix_key key;
    /* How many of the first tokens later prompts will share: a multiple of block_size, at most n_prompt; 0: unknown. A chunk
     * ends there, with the cache on and off. Waiting prompts are compared with each other in any case, and a chunk also ends
     * where enough of them stop being equal. */
    uint32_t prefix_end;
    int no_hits; /* 1: the prompt is stored, but always computed */
    /* 1: generated tokens are not stored. Decode and prefill compute slightly different bits for a token, so that the result
     * for a prompt that repeats an answer would depend on whether the answer was found in the cache. */
    int prompt_only;
} kvf_sched_prefix;

/** Sets the key under which the manager's prefix cache stores and finds a request's tokens. Call it right after its submission,
 *  or its fork.
 *  @param sched a scheduler. @param request a live one. @param prefix see kvf_sched_prefix; copied.
 *  @own what the key points to stays the caller's. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_INVALID (prefix_end, too few tokens, NULL salt or extras), KVF_E_LIMIT (salt).
 *  @cost O(log n) comparisons of two prompts and O(n), where n prompts are not computed yet. */
KVF_API KVF_CHECK kvf_status kvf_sched_set_prefix(kvf_sched *sched, kvf_request request,
                                                  const kvf_sched_prefix *prefix);

/** Sets a request's reservation to its policy's sizes, after an overflow event or a change of the budget. Without this call the
 *  next kvf_sched_plan does it.
 *  @param sched a scheduler. @param request running. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE (its prompt is not computed). If there is no room, for example because the tables are not
 *  compacted yet or share blocks with another prompt, the earlier reservation stays, and each kvf_sched_plan tries again.
 *  @cost O(n_layers). */
KVF_API KVF_CHECK kvf_status kvf_sched_resize(kvf_sched *sched, kvf_request request);

/** kvf_sched_set_budget for several requests, all or none; for the samples of one prompt.
 *  @param sched a scheduler. @param requests live ones. @param n_requests how many.
 *  @param rho, budget_tokens as the policy's options. @own nothing is kept. @threads as the scheduler.
 *  @errors those of kvf_sched_set_budget. Nothing changes on failure. @cost O(n_requests * tables). */
KVF_API KVF_CHECK kvf_status kvf_sched_set_budgets(kvf_sched *sched, const kvf_request *requests, uint32_t n_requests,
                                                   double rho, uint32_t budget_tokens);

/** Changes the budget of a request in any state, and of the samples held for its prompt. A running request gets the reservation
 *  of the new budget at once. If the new budget is lower and there is no room for that, it grows from the free pool until it is
 *  compacted (kvf_policy_due with KVF_BEFORE_APPEND, then kvf_sched_resize). A waiting or preempted request begins with the new
 *  budget.
 *  @param sched a scheduler. @param request any live request. @param rho, budget_tokens as the policy's options.
 *  @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, those of kvf_policy_set_budget, KVF_E_NEVER_FITS (as at the submission), KVF_E_NO_BLOCKS (a higher
 *  budget whose blocks are not available). Nothing changes on failure. @cost O(tables). */
KVF_API KVF_CHECK kvf_status kvf_sched_set_budget(kvf_sched *sched, kvf_request request, double rho,
                                                  uint32_t budget_tokens);

/** Ends a request in any state: its blocks, score pages and policy state become free at once.
 *  @param sched a scheduler, best with no step planned. If a step is planned, do not run the request's items; if samples are
 *  held for it, do run them: they are now the next sample's. @param request any live request. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND. @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_sched_finish(kvf_sched *sched, kvf_request request);

#ifdef __cplusplus
}
#endif
#endif
