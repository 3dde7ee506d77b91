/* kvfold/scheduler.h: which requests run in the next step, and with how many tokens.
 *
 * Host logic only: it owns the sequences of its requests in the manager and the state of their policies, admits by the
 * size after compression, cuts prompts into chunks, and preempts the latest arrival when a growth finds no block. It
 * does not know tokens, only their numbers; the caller runs the step and the policies' events.
 *
 * A request's life
 *     waiting -> prefill (chunks) -> decode -> gone (finish, abort)
 *        ^------------- preempted -----|      its blocks are free, its tokens are known and computed again
 *
 * Known tokens are the prompt and all that was generated; computed tokens are those whose K and V are in the pages.
 * After a preemption a policy that never evicts prefills all known tokens; one that evicts prefills the prompt only and
 * replays what it had generated one token a step, so that its scores and events are those of the first run. With
 * replay_all every policy does, so that K and V are those of the first run to the bit.
 *
 * Samples. A request with n_samples 2 and more is a group: its first sample computes the prompt, the others are held and
 * have nothing but promises; kvf_sched_prompt_done forks it into n_samples running requests, each with a name, tables
 * and policy state of its own over shared blocks. Until then the group is preempted, ended and put back as one; if its
 * first sample is finished, the next one takes its place. Afterwards each is a request like any other: preempted, it
 * gives up what it shares and computes its own prompt and tokens again. A request that was submitted with `forks` may
 * also be forked at any later step (kvf_sched_fork), as beam search does. A group's requests count as arrived together.
 * Samples with options of their own (sample_options) are forked off before the prompt's events (kvf_sched_fork_prompt), so
 * that each has its own: the prompt is computed once, with the column sums if any of them needs these.
 *
 * Segments. A request whose answer has ended may be paused instead of finished (kvf_sched_pause): it keeps its tables, runs
 * in no step, and is the first to lose them when anybody needs room. kvf_sched_extend gives it the next segment of its prompt
 * (the next turn of a dialogue), which follows the answer: the last token of that is decoded, the segment is computed in
 * chunks like a prompt and ends like one (prompt_ends, kvf_sched_prompt_done), then it decodes on. What has lost its tables
 * computes all of it again: prompt, answer, segment, and so on, in the same order.
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
typedef uint64_t kvf_request; /* rises with each submission; never 0, never used again */

/* What becomes of a request that has to make room. */
typedef enum kvf_preempt {
    KVF_PREEMPT_AUTO = 0,      /* to the host what one chunk would not bring back; the others are computed again */
    KVF_PREEMPT_RECOMPUTE = 1, /* computed again from its tokens */
    KVF_PREEMPT_SWAP = 2       /* to the host, where that has room */
} kvf_preempt;

typedef struct kvf_sched_config {
    size_t struct_size;
    kvf_manager *manager;        /* used by the scheduler alone for creating, growing and freeing sequences */
    kvf_policy_state *policies;  /* max_seqs as the manager's */
    uint32_t max_running;        /* sequences in a step; 0: the manager's max_seqs */
    uint32_t max_waiting;        /* 0: 65536 */
    uint32_t max_batch_tokens;   /* tokens of a step, at least chunk + max_running; 0: that */
    uint32_t chunk;              /* prefill chunks end on multiples of it; a multiple of block_size; 0: 512 */
    uint32_t max_prefill_tokens; /* tokens of all prompts running at once (the accumulators there are); 0: max_slots */
    uint32_t max_context;        /* positions; a request ends with length there; 0: the manager's max_slots */
    kvf_allocator allocator;
    int replay_all;   /* 1: see above */
    uint32_t preempt; /* kvf_preempt; without a host tier of the manager's all are computed again */
} kvf_sched_config;

typedef struct kvf_sched_request {
    size_t struct_size;
    uint32_t n_prompt; /* 1..max_context - 1 */
    uint32_t max_new;  /* 0: the prompt is computed and the request ends */
    const kvf_policy_options *options;
    void *user;                /* handed back in steps */
    uint32_t n_samples;        /* requests over one prompt; 0: 1 */
    int forks;                 /* 1: they will be forked and finished again, never more than n_samples at a time */
    void *const *sample_users; /* [n_samples] in place of user, or NULL; not kept */
    kvf_request *sample_names; /* [n_samples] filled with the names, ascending; or NULL; not kept */
    const kvf_policy_options *const
        *sample_options; /* [n_samples] in place of options, copied; or NULL; not with forks */
} kvf_sched_request;

typedef enum kvf_step_kind {
    KVF_STEP_DECODE = 0, /* one token */
    KVF_STEP_PREFILL = 1 /* a chunk of the prompt */
} kvf_step_kind;

typedef struct kvf_step_item {
    kvf_request request;
    kvf_seq seq;
    void *user;
    uint32_t kind;        /* kvf_step_kind */
    uint32_t token_begin; /* first known token to compute: its position too */
    uint32_t n_tokens;
    int prompt_ends;         /* the last chunk of what is prefilled: the policy's prompt events follow */
    int samples;             /* after the step all known tokens are computed: the next one can be sampled */
    uint32_t prefill_offset; /* of this request in the accumulators, in tokens; UINT32_MAX: needs none */
    uint32_t n_held;         /* samples that kvf_sched_prompt_done will fork off */
    /* The prefix cache. match: set in a request's first item when its first match->n_tokens tokens were found; it begins
     * there. The accumulators of match->n_snapshot_tokens are to be read (kvf_prefix_snapshot_get) before the item runs.
     * logits_only: the snapshot has the sums of this item's query already; they must not be added again. take_snapshot:
     * after the step the sums of the first token_begin + n_tokens tokens are worth keeping, with snapshot_flags
     * (kvf_prefix_snapshot_put). */
    int logits_only, take_snapshot;
    uint32_t snapshot_flags;
    const kvf_prefix_match *match; /* NULL without a hit */
    int swapped;                   /* of a preempted one: it lies on the host and will go on where it was */
    /* Of a prompt or segment: how many columns of the accumulators are its own, and whether they are to be cleared first. */
    uint32_t n_columns;
    int begins;
} kvf_step_item;

typedef enum kvf_end_reason {
    KVF_END_NONE = 0,
    KVF_END_LENGTH = 1,    /* max_new, the context, or alone in the pool and no block left */
    KVF_END_NO_BLOCKS = 2, /* a bounded request whose exact sizes do not fit the pool, alone */
    KVF_END_REFUSED = 3    /* the policy state refuses its options: it was made for other sizes than the manager */
} kvf_end_reason;

typedef struct kvf_step_end {
    kvf_request request;
    void *user;
    uint32_t reason; /* kvf_end_reason */
} kvf_step_end;

/* One step. Decode items come first, then prefill items, each in order of arrival. The slots are appended. A running
 * request that was told no token since its last item has none: it is left out until it is. */
typedef struct kvf_step {
    const kvf_step_item *items;
    uint32_t n_items, n_decode;
    const kvf_step_end *ends; /* requests the scheduler had to end (already gone) */
    uint32_t n_ends;
    const kvf_step_item *preempted; /* request, user and swapped only */
    uint32_t n_preempted;           /* also paused ones that lost their tables */
    /* To run before the step; then kvf_copies_done. Those to the host alone may run beside it, if they are done before the next
     * plan: what lacks the room that a swap makes waits for that. So a step without items may have some. */
    kvf_copy_list copies;
    uint32_t n_tokens;
    uint32_t n_running, n_waiting;
} kvf_step;

/** A config with struct_size set.
 *  @own a plain value. @threads any. @errors none. @cost O(1). */
KVF_API kvf_sched_config kvf_sched_config_default(void);

/** Creates a scheduler over a manager and a policy state, which must outlive it.
 *  @param config see above. @param out the scheduler. @param err detail, or NULL.
 *  @own the caller, kvf_sched_destroy. @threads one at a time, with its manager.
 *  @errors KVF_E_INVALID, KVF_E_NO_MEMORY, KVF_E_OVERFLOW. @cost O(max_running + max_waiting); allocates once. */
KVF_API KVF_CHECK kvf_status kvf_sched_create(const kvf_sched_config *config, kvf_sched **out, kvf_error *err);

/** Frees it and every sequence it holds; NULL is allowed.
 *  @param sched a scheduler. @own takes it. @threads none may use it. @errors none. @cost O(sequences). */
KVF_API void kvf_sched_destroy(kvf_sched *sched);

/** Detail of the last failed call, "" when none has failed.
 *  @param sched a scheduler. @own the scheduler's. @threads as the scheduler. @errors none. @cost O(1). */
KVF_API const char *kvf_sched_error(const kvf_sched *sched);

/** Queues a request.
 *  @param sched a scheduler. @param request see above; options are copied. @param out its number.
 *  @own nothing is kept but user. @threads as the scheduler.
 *  Samples that the pool can never hold together, or that are more than max_running, become several groups, each with
 *  a prompt of its own; with `forks` they are refused.
 *  @errors KVF_E_INVALID (options, no token, more samples with `forks` than max_running), KVF_E_NEVER_FITS (the text has the
 *  blocks it needs and the blocks there are, or the tokens and the context), KVF_E_LIMIT (max_waiting).
 *  @cost O(n_layers + n_samples), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_submit(kvf_sched *sched, const kvf_sched_request *request, kvf_request *out);

/** Plans the next step: admits in order of arrival, appends the slots, preempts where it must.
 *  @param sched a scheduler. @param step filled; its arrays are the scheduler's until the next call. n_items 0 with
 *  n_waiting 0 means that there is nothing to do; it is never 0 while something could run.
 *  @own the scheduler's. @threads as the scheduler.
 *  @errors KVF_E_STATE (the last step was not ended with kvf_sched_done). @cost O(running * tables), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_plan(kvf_sched *sched, kvf_step *step);

/** Says that the planned step has run: its tokens are computed.
 *  @param sched a scheduler with a step planned. @own nothing. @threads as the scheduler. @errors KVF_E_STATE. @cost O(items). */
KVF_API KVF_CHECK kvf_status kvf_sched_done(kvf_sched *sched);

/** Takes back what failed, at any moment from the plan to the last token of its step: every request that runs goes back to the
 *  queue and computes again what it had, with the same result. The answered ones that are paused give up what they hold. No step is planned
 *  afterwards. So that a step which fails again names one request, those that were in this one come back one after the other: each
 *  waits until the one before has a token.
 *  @param sched a scheduler. @own nothing; no step will list them, and the copies of a plan that was handed out stay the caller's.
 *  @threads as the scheduler. @errors none beyond KVF_E_INVALID (NULL). @cost O(the blocks of what runs), no allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_undo(kvf_sched *sched);

/** How many requests there are now, without those that are paused.
 *  @param sched a scheduler, or NULL: 0 of each. @param n_running those that hold a sequence. @param n_waiting those in the queue (on the host
 *  too), and samples that are held for their prompt's end. Each may be NULL. @own nothing. @threads as the scheduler.
 *  @errors none. @cost O(running requests). */
KVF_API void kvf_sched_counts(const kvf_sched *sched, uint32_t *n_running, uint32_t *n_waiting);

/** Says that one more token of a request is known (sampled).
 *  @param sched a scheduler. @param request a running one all of whose known tokens are computed, and whose samples have
 *  been forked off; or one with `forks` that waits since there was no room for its fork.
 *  @param ended set to 1 when that was its last (max_new or context reached): the caller then finishes it. Or NULL.
 *  @own nothing. @threads as the scheduler. @errors KVF_E_NOT_FOUND, KVF_E_STATE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_sched_token(kvf_sched *sched, kvf_request request, int *ended);

/* Tokens [begin, end) of a request, a later part of its prompt. */
typedef struct kvf_sched_segment {
    uint32_t begin, end;
} kvf_sched_segment;

/** Pauses a request in place of finishing it.
 *  @param sched a scheduler. @param request one that decodes and has been told its last token, or one with no token to come;
 *  not one with samples. @own nothing. @threads as the scheduler. @errors KVF_E_NOT_FOUND, KVF_E_STATE. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_sched_pause(kvf_sched *sched, kvf_request request);

/** Gives a paused request the next segment of its prompt.
 *  @param sched a scheduler with no step planned. @param request a paused one. @param segments all segments so far, ascending, the
 *  new one last: it begins where the known tokens end. @param n_segments how many. @param max_new tokens that may follow it, 1 or more.
 *  @own the array must live as long as the request, or until the next kvf_sched_extend. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE (not paused), KVF_E_INVALID, KVF_E_NEVER_FITS (the context, or the accumulators). Nothing
 *  changes on failure. @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_sched_extend(kvf_sched *sched, kvf_request request, const kvf_sched_segment *segments,
                                              uint32_t n_segments, uint32_t max_new);

/** Says that a request's prompt events are done: its accumulators are free, its reservation becomes the exact one, and
 *  the samples held for it are forked off, all or none: kvf_sched_copies follows.
 *  @param sched a scheduler. @param request one whose prompt has ended.
 *  @own nothing. @threads as the scheduler. @errors KVF_E_NOT_FOUND, KVF_E_STATE, KVF_E_NO_BLOCKS (the exact sizes, or the forks,
 *  need more than what is free: the request is put back in the queue, preempted, and its samples with it).
 *  @cost O(n_layers), and O(its blocks) for each fork. */
KVF_API KVF_CHECK kvf_status kvf_sched_prompt_done(kvf_sched *sched, kvf_request request);

/** Forks the samples off that are held for a prompt and have options of their own, before its events: all or none. Each then
 *  has its own events over the shared prompt (kvf_sched_event_room promises the room) and its own kvf_sched_prompt_done, like
 *  the request itself, whose accumulators hold the sums for all until then. kvf_sched_copies follows. Alone in the pool and
 *  without room the samples wait in the queue, each for a prompt of its own.
 *  @param sched a scheduler. @param request one whose prompt has ended. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE, KVF_E_NO_BLOCKS (the request is put back in the queue, preempted, and its samples
 *  with it). @cost O(its blocks) for each sample. */
KVF_API KVF_CHECK kvf_status kvf_sched_fork_prompt(kvf_sched *sched, kvf_request request);

/** Forks a running request: the child knows the same tokens, shares every block, and has a policy state and score pages
 *  of its own (kvf_sched_copies). It is promised the parent's reservation. Where the pool or max_running has no room the
 *  child waits in the queue and computes its tokens again, as if it had been preempted: kvf_sched_seq tells.
 *  @param sched a scheduler with no step planned. @param parent submitted with `forks`, all of whose known tokens are
 *  computed; admission counted n_samples of them at a time. @param user handed back in the child's steps.
 *  @param out the child's name. @own nothing is kept but user. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE, KVF_E_LIMIT (no place for one more request). @cost O(the parent's blocks), no
 *  allocation. */
KVF_API KVF_CHECK kvf_status kvf_sched_fork(kvf_sched *sched, kvf_request parent, void *user, kvf_request *out);

/** The copies that forks since the last plan have left to do: to be run at once, before anything else is written, and then
 *  given to kvf_copies_done. What is not taken here heads the next step's copies.
 *  @param sched a scheduler with no step planned. @own the scheduler's, until the next call. @threads as the scheduler.
 *  @errors none: NULL without a scheduler. @cost O(1). */
KVF_API kvf_copy_list *kvf_sched_copies(kvf_sched *sched);

/** The sequence of a request.
 *  @param sched a scheduler. @param request any. @own the scheduler's. @threads as the scheduler.
 *  @errors none: 0 for one that waits, is held, or does not live. @cost O(1). */
KVF_API kvf_seq kvf_sched_seq(const kvf_sched *sched, kvf_request request);

/** Makes room for an event that found too few blocks: the latest arrival that runs is preempted at once.
 *  @param sched a scheduler with no step planned. @param preempted its request and user, which no step will list.
 *  @own nothing. @threads as the scheduler. @errors KVF_E_STATE, KVF_E_NO_BLOCKS (fewer than two run). @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_sched_shed(kvf_sched *sched, kvf_step_item *preempted);

/** Promises a request the fresh blocks that its first event writes to where another sequence holds blocks of its tables too:
 *  once its sizes are known, before kvf_compact_begin. Without room the former promise stands, and kvf_compact_begin may say
 *  KVF_E_NO_BLOCKS: kvf_sched_shed is for that.
 *  @param sched a scheduler. @param request one whose prompt is computed. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE. @cost O(blocks of its tables). */
KVF_API KVF_CHECK kvf_status kvf_sched_event_room(kvf_sched *sched, kvf_request request);

typedef struct kvf_sched_prefix {
    size_t struct_size;
    kvf_prefix_key
        key; /* of its known tokens, n_prompt of them at least: the prompt, and room in which the caller writes each
                         * generated token before kvf_sched_token tells of it. All that it points to must live as long as the
                         * request. tokens NULL: the request neither looks for its prompt nor stores it */
    uint32_t prefix_end; /* a multiple of block_size up to n_prompt: what later prompts will share; a chunk ends there
                          * with the cache on and off; 0: unknown. Prompts that wait together are compared with one
                          * another in any case: a chunk ends where enough of them part */
    int no_hits;         /* 1: it is stored, but computed anew */
    int prompt_only; /* 1: what is generated is not stored. Decode and prefill give other bits for the same token, so that a
                          * prompt which repeats an answer would depend on whether that was found */
} kvf_sched_prefix;

/** What a request is found by in the manager's prefix cache: right after its submission, or its fork.
 *  @param sched a scheduler. @param request a live one. @param prefix see there; copied.
 *  @own what the key points to stays the caller's. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_INVALID (prefix_end, too few tokens, NULL salt or extras), KVF_E_LIMIT (salt). @cost O(1). */
KVF_API KVF_CHECK kvf_status kvf_sched_set_prefix(kvf_sched *sched, kvf_request request,
                                                  const kvf_sched_prefix *prefix);

/** Sets the reservation anew from the policy's sizes (after an overflow).
 *  @param sched a scheduler. @param request running. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, KVF_E_STATE (its prompt is not computed), KVF_E_NO_BLOCKS (a bounded request whose tables are not compacted
 *  yet: the former reservation stands; for others, and where head groups have sizes of their own, no room is no error). kvf_sched_plan settles what stands open. @cost O(n_layers). */
KVF_API KVF_CHECK kvf_status kvf_sched_resize(kvf_sched *sched, kvf_request request);

/** kvf_sched_set_budget for several requests, all or none: the samples of one prompt.
 *  @param sched a scheduler. @param requests live ones. @param n_requests how many.
 *  @param rho, budget_tokens as the policy's options. @own nothing is kept. @threads as the scheduler.
 *  @errors those of kvf_sched_set_budget. Nothing changes on failure. @cost O(n_requests * tables). */
KVF_API KVF_CHECK kvf_status kvf_sched_set_budgets(kvf_sched *sched, const kvf_request *requests, uint32_t n_requests,
                                                   double rho, uint32_t budget_tokens);

/** Changes the budget of a request in any state, with the samples that are held for its prompt. A running one has the promise of the new budget at once, or, when it is a
 *  tighter one, after its compaction (kvf_policy_due, KVF_BEFORE_APPEND, then kvf_sched_resize) at the latest: until then it grows
 *  from the free pool. One that waits, preempted ones too, will begin with the new budget.
 *  @param sched a scheduler. @param request any live request. @param rho, budget_tokens as the policy's options.
 *  @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND, those of kvf_policy_set_budget, KVF_E_NEVER_FITS (as at the submission), KVF_E_NO_BLOCKS (a looser
 *  budget whose promise cannot be had). Nothing changes on failure. @cost O(tables). */
KVF_API KVF_CHECK kvf_status kvf_sched_set_budget(kvf_sched *sched, kvf_request request, double rho,
                                                  uint32_t budget_tokens);

/** Ends a request in any state: its blocks, score pages and policy state are free at once.
 *  @param sched a scheduler with no step planned, or between kvf_sched_done and the next plan; with a step planned its items
 *  must not be run, unless samples are held for it: then they are the next sample's. @param request any live request. @own nothing. @threads as the scheduler.
 *  @errors KVF_E_NOT_FOUND. @cost O(its blocks). */
KVF_API KVF_CHECK kvf_status kvf_sched_finish(kvf_sched *sched, kvf_request request);

#ifdef __cplusplus
}
#endif
#endif
