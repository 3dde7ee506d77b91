/* scheduler/sched.h: the scheduler's own structs, and the functions that its files share.
 *
 * Glossary
 *   slot      a place for one live request in the slab; its number is the low bits of the request's name
 *   arrival   the name of the group's first request; names rise with each submission
 *   rank      the key of the configured order (kvf_order). Lists are sorted by rank, then arrival, then name
 *   known     tokens: the prompt, and all that was generated
 *   computed  known tokens whose K and V are in the pages
 *   prefill   known tokens that are computed in chunks: the prompt; for a policy that never evicts all known tokens
 *   replays   after a preemption the generated tokens are computed again, one per step
 *   extent    the columns [begin, end) of the accumulators, in tokens, that a prompt which needs column sums holds
 *   piece     a part of a prompt or segment that is computed once more behind it, after an instruction, for the scores of its
 *             policy. Its slots are given back when it is complete. The pieces of one prompt are its repetition
 *   segment   a later part of the prompt, behind the tokens generated before it; prefilled like a prompt
 *   paused    its answer has ended, and a segment may follow. paused_preempted: it has also given up its sequence for others
 *   want      scratch: slots to reserve for each table
 *   group     the samples of one prompt. Before the prompt's end only one of them, the leader, is in a list. The others are
 *             held: linked behind the leader; while it runs each has an empty sequence that carries its reservation
 *   part      two prompts part at the first token in which they differ
 *   suspect   it was in a step that failed. Until its next token it runs with no other suspect
 */
#ifndef KVF_SCHEDULER_SCHED_H
#define KVF_SCHEDULER_SCHED_H

#include "base/base.h"
#include "kvfold/scheduler.h"

#define KVF__SLOT_NONE UINT32_MAX

typedef enum kvf__req_state {
    KVF__REQ_NONE = 0, /* no state: what an illegal move leads to */
    KVF__REQ_FREE,
    KVF__REQ_WAITING,          /* in the queue: holds no sequence, no block, no extent */
    KVF__REQ_FORKED,           /* in the queue: a fork that found no room; its next token may be told while it waits */
    KVF__REQ_PREFILL,          /* n_computed < n_prefill */
    KVF__REQ_PROMPT_END,       /* n_computed = n_prefill, the caller's prompt events are not done */
    KVF__REQ_DECODE,           /* n_computed <= n_known, at most one token a step */
    KVF__REQ_SWAPPED,          /* in the queue: its sequence is on the host, n_computed < n_known */
    KVF__REQ_PAUSED,           /* in the running list, without items until it is extended: n_computed + 1 >= n_known */
    KVF__REQ_PAUSED_PREEMPTED, /* in no list: holds nothing, n_computed = 0 */
    KVF__REQ_HELD, /* in no list, behind its leader: n_known = n_prompt; seq: empty, or 0 while the leader waits */
    KVF__N_REQ_STATES
} kvf__req_state;

/* What happens to a request. The table in lists.c says which state each leads to. */
typedef enum kvf__move {
    KVF__MOVE_QUEUE,      /* it is submitted, split from its group, or extended while it holds nothing */
    KVF__MOVE_FORK,       /* it is forked without room, or the admission of such a one is taken back */
    KVF__MOVE_HOLD,       /* it is submitted as a further sample */
    KVF__MOVE_PREFILL,    /* it is admitted, goes on with a segment, or takes the place of a leader that does */
    KVF__MOVE_PROMPT_END, /* its prompt is computed, or it gets the state of a leader whose prompt is */
    KVF__MOVE_DECODE,     /* its events are done, it is forked, or goes on after a pause */
    KVF__MOVE_SWAP_OUT,
    KVF__MOVE_SWAP_IN,
    KVF__MOVE_PREEMPT,
    KVF__MOVE_PAUSE,
    KVF__MOVE_TOKEN, /* one more token of it is known */
    KVF__MOVE_END,
    KVF__N_MOVES
} kvf__move;

/* Whether its tables may grow past its reservation. */
typedef enum kvf__bound {
    KVF__GROWS,    /* a layer never evicts, or it has segments: it grows from the free pool */
    KVF__BOUNDED,  /* every layer evicts, and it has its reservation, which is enough for all of its tokens */
    KVF__TIGHTENED /* every layer evicts; it grows from the free pool until there is room for its reservation */
} kvf__bound;

/* What is reserved for a request that runs. */
typedef enum kvf__reserved {
    KVF__AS_ADMITTED, /* what admission counted, or a change of its budget; its sizes are not known, or had no room */
    KVF__AS_SIZED,    /* its exact sizes */
    KVF__AS_SHARED,   /* a fork's: set again in each plan, since shared blocks change when others give them up */
    KVF__NOTHING      /* it is alone and short of blocks */
} kvf__reserved;

/* The samples of its prompt. */
typedef enum kvf__samples {
    KVF__ALIKE,      /* one, or several with the same options */
    KVF__FORKS,      /* the caller forks and finishes them as beam search does */
    KVF__OWN_OPTIONS /* each has options of its own: forked before the prompt's events */
} kvf__samples;

/* What its policy needs. */
typedef struct kvf__needs {
    bool extent; /* anything of its prompt: it needs columns of the accumulators while that runs */
    uint32_t
        stats;   /* KVF_SNAPSHOT_SUMS, _SQUARES, _LOGPROBS: after a prefix hit it continues from a snapshot of these */
    bool scores; /* a score page for each block */
    uint32_t n_last; /* so many last queries must run: a prefix hit ends before them */
    uint32_t piece;  /* a repetition in pieces of at most so many tokens; 0: none */
} kvf__needs;

/* How far the repetition of the prompt, or of the segment that is prefilled, has come. Until it is REPEATED the last token counts as
 * not computed, although it has its slot: its query runs again then, for the logits. */
typedef enum kvf__repetition {
    KVF__UNREPEATED, /* it has not begun, or needs none */
    KVF__REPEATING,
    KVF__REPEATED
} kvf__repetition;

/* The tables in lists.c say what a request may be in each state. n_computed <= n_known <= n_prompt + max_new. Both lists are sorted
 * by rank, arrival and name, which do not change while it runs. */
typedef struct kvf__req {
    kvf_request name; /* 0: the slot is free */
    uint32_t prev, next;
    kvf__req_state state;
    kvf__bound bound;
    kvf__reserved reserved;
    kvf__samples samples;
    bool suspect;    /* it was in a step that failed, and has had no token since */
    bool parting;    /* it is in s->parting */
    bool was_forked; /* of one that runs: it was in KVF__REQ_FORKED until its admission */
    bool evicts;     /* its tables may shrink: generated tokens are replayed, and not stored in the prefix cache */
    kvf__needs needs;
    uint32_t n_prompt, max_new;
    uint32_t n_known, n_computed, n_prefill;
    uint32_t max_table_slots; /* no table of it ever holds more */
    uint32_t n_steady;        /* if not KVF__GROWS: blocks after its first event, at most n_blocks */
    uint32_t n_blocks;        /* blocks that admission counts; KVF__GROWS: the most it held when preempted */
    uint32_t n_peak;          /* blocks while the largest piece of its first prompt runs; 0: it needs no repetition */
    kvf__repetition repetition;
    uint32_t n_repeated, n_piece; /* tokens that complete pieces end with; computed tokens of the piece that runs */
    uint32_t budget;              /* tokens that a layer keeps; UINT32_MAX: all */
    uint32_t extent_begin;        /* KVF__SLOT_NONE: holds no extent */
    kvf_request arrival;
    int64_t rank; /* a place in the order of submission, or a time; INT64_MAX: no deadline, until the next plan */
    uint32_t child_blocks; /* what admission counts for each further sample */
    uint32_t n_held, held; /* of a leader: number of held samples, slot of the first */
    uint32_t leader;       /* of a held sample: its leader's slot */
    uint32_t seq_index;
    kvf_seq seq;
    void *user;
    const kvf_sched_segment *segments; /* the caller's */
    uint32_t n_segments, segment;      /* segment: index of the first that is not computed */
    kvf_policy_options options;
    kvf_sched_prefix prefix;
    uint32_t parts_at; /* token at which its prompt parts from a cached one that has no snapshot there; 0: none */
    /* Of the running prompt, or of the last look-up. again: it was preempted, or shares its parent's prompt: the look-up does not
     * count as a first query. */
    kvf_prefix_match match;
} kvf__req;

typedef struct kvf__list {
    uint32_t head, tail, n;
} kvf__list;

/* A prompt that is not computed yet, and how many first tokens it has in common with the next one in the array. */
typedef struct kvf__parting {
    uint32_t slot, common;
} kvf__parting;

typedef struct kvf__extent {
    uint32_t begin, end;
} kvf__extent;

struct kvf_sched {
    kvf_sched_config config; /* resolved */
    size_t bytes;
    uint32_t n_layers, n_groups, n_tables, block_size, n_blocks, n_score_pages, max_slots;
    const uint32_t *windows;                   /* [n_layers] sliding windows, the manager's; NULL: none */
    kvf__req *slots;                           /* [n_slots]; slots from n_slots_used on were never touched */
    uint32_t n_slots, n_slots_used, free_slot; /* free slots are linked by next */
    uint32_t slot_bits;
    uint64_t serial, now; /* now: of the last plan */
    kvf__list queue, running;
    uint32_t n_in[KVF__N_REQ_STATES]; /* slots in each state, of the n_slots_used */
    uint32_t n_reserved;              /* held samples whose leader runs */
    kvf__extent *extents;             /* [max_running], ascending and disjoint */
    uint32_t n_extents;
    kvf__parting *parting; /* [n_slots], sorted by salt, extra keys, tokens */
    uint32_t n_parting;
    uint32_t *want;        /* [n_layers][n_groups] */
    kvf_layer_size *sizes; /* scratch: [n_layers], for a change of the budget */
    /* The step */
    kvf_step_item *items;     /* [max_running], decode items first, each kind by arrival */
    kvf_append_item *appends; /* [max_running] */
    kvf_step_item
        *preempted;     /* [3 * max_running]: one plan may admit a request and preempt it again; paused ones too */
    kvf_step_end *ends; /* [n_slots + max_running] */
    kvf_copy_list copies;
    bool copies_given; /* the caller has the list: the next copy begins a new one */
    uint32_t n_items, n_decode, n_tokens, n_preempted, n_ends;
    bool reported; /* ends and preempted have been handed to the caller */
    bool tiers;    /* there is a host tier */
    bool swaps;    /* preempted requests may be swapped to it */
    bool swapping; /* this plan swapped a request out: its blocks are not free yet */
    bool planned;
    bool corrupt;           /* an illegal move was asked for and not made: no step is planned any more */
    bool lacks_extent;      /* a segment waits for an extent: no other request gets one */
    bool snapshot_unpinned; /* a request of the plan reads a snapshot whose block it does not hold */
    kvf_error error;
};

/* Its last token is known: the caller finishes it. */
static inline bool kvf__req_is_complete(const kvf_sched *s, const kvf__req *r) {
    return r->n_known - r->n_prompt >= r->max_new || r->n_known == s->config.max_context;
}

/* After a preemption its generated tokens are computed one per step. */
static inline bool kvf__req_replays(const kvf_sched *s, const kvf__req *r) { return r->evicts || s->config.replay_all; }

/* Looks for its prompt in the prefix cache, and stores it. */
static inline bool kvf__req_caches(const kvf_sched *s, const kvf__req *r) {
    return r->prefix.key.tokens && kvf_manager_get_config(s->config.manager)->prefix_cache;
}

static inline bool kvf__sched_before(const kvf__req *a, const kvf__req *b) {
    if (a->rank != b->rank) return a->rank < b->rank;
    return a->arrival != b->arrival ? a->arrival < b->arrival : a->name < b->name;
}

/* Each file calls only those that stand before it here. */

/* lists.c: the states, the queue, the running list, the slots, the extents */
kvf__req *kvf__sched_find(kvf_sched *s, kvf_request name); /* NULL: not live */
kvf_status kvf__sched_live(kvf_sched *s, kvf_request name, kvf__req **out);
kvf__req *kvf__sched_at(kvf_sched *s, uint32_t slot); /* NULL for KVF__SLOT_NONE */
uint32_t kvf__sched_slot(const kvf_sched *s, const kvf__req *r);
kvf__req *kvf__sched_take_slot(kvf_sched *s, const kvf__req *request); /* a free slot's copy with a name */
void kvf__sched_give_slot(kvf_sched *s, kvf__req *r);
bool kvf__sched_may(const kvf__req *r, kvf__move move);            /* whether its state has this move */
void kvf__sched_move(kvf_sched *s, kvf__req *r, kvf__move move);   /* with its list and the counts */
bool kvf__req_is_valid(const kvf_sched *s, const kvf__req *r);     /* what it has is legal in its state */
void kvf__sched_set_rank(kvf_sched *s, kvf__req *r, int64_t rank); /* of one in the queue, or in no list */
bool kvf__sched_take_extent(kvf_sched *s, kvf__req *r, uint32_t n_columns);
uint32_t kvf__sched_n_columns(const kvf_sched *s, const kvf__req *r); /* of its extent */
void kvf__sched_give_extent(kvf_sched *s, kvf__req *r);
kvf__needs kvf__sched_needs(const kvf_sched *s, const kvf__req *leader); /* of the leader and its held samples */

/* parting.c: prompts with equal beginnings, and where they part */
void kvf__parting_enter(kvf_sched *s, kvf__req *r); /* after each move to the queue, and when its tokens become known */
void kvf__parting_leave(kvf_sched *s, kvf__req *r);
void kvf__parting_rank(kvf_sched *s, kvf__req *r); /* its place with KVF_ORDER_PREFIX, when its tokens become known */
/* The first token after `begin` at which a chunk must end so that other prompts can continue from there; UINT32_MAX: none. */
uint32_t kvf__parting_end(kvf_sched *s, const kvf__req *r, uint32_t begin);
uint32_t kvf__sched_chunk_end(kvf_sched *s, const kvf__req *r, uint32_t begin);
void kvf__parting_note_cached(kvf_sched *s, kvf__req *r); /* when it is admitted */
/* Whether the head of the queue should wait, because a prompt of this step computes a beginning that both have. */
bool kvf__parting_waits(kvf_sched *s, const kvf__req *r);
bool kvf__parting_is_valid(const kvf_sched *s);

/* valid.c */
bool kvf__sched_is_valid(const kvf_sched *s); /* O(requests); asserted in debug builds */

/* prefix.c: the prefix cache */
void kvf__sched_look_up(kvf_sched *s, kvf__req *r,
                        bool whole); /* sets n_prefill and match; whole: also the prompt's end */
void kvf__sched_forget_match(kvf__req *r);
bool kvf__sched_snapshot_unpinned(const kvf_sched *s, const kvf__req *r);
bool kvf__sched_hit_again(const kvf_sched *s, const kvf__req *r, uint32_t begin);
bool kvf__sched_snapshot_stands(const kvf_sched *s, const kvf__req *r);
bool kvf__sched_takes_free(const kvf_sched *s, const kvf__req *r, uint32_t n);
uint64_t kvf__sched_shared_blocks(const kvf_sched *s, const kvf__req *r);
kvf_status kvf__sched_attach(kvf_sched *s, kvf__req *r,
                             const kvf_reserve *reserve); /* the new sequence takes the blocks of its match */
void kvf__sched_mark_item(kvf_sched *s, const kvf__req *r, kvf_step_item *item);
void kvf__sched_store(kvf_sched *s, kvf__req *r, bool prefill);

/* reserve.c: the blocks that a request needs, and its reservations */
kvf_status kvf__sched_size_request(kvf_sched *s, kvf__req *r);
kvf_status kvf__sched_reserve_sized(kvf_sched *s, kvf__req *r);
kvf_status kvf__sched_take_admission(kvf_sched *s, kvf__req *r, uint64_t blocks);
kvf_status kvf__sched_reserve_change(kvf_sched *s, kvf__req *r, const kvf__req *to, bool sized);
void kvf__sched_reserve_back(kvf_sched *s, kvf__req *r); /* undoes kvf__sched_reserve_change */
kvf_status kvf__sched_reserve_event(kvf_sched *s, kvf__req *r);
kvf_status kvf__sched_reserve_nothing(kvf_sched *s, kvf__req *r);
kvf_status kvf__sched_reserve_blocks(kvf_sched *s, const kvf__req *r, kvf_seq seq,
                                     uint64_t n_blocks);                     /* spread evenly */
uint64_t kvf__sched_admission_blocks(const kvf_sched *s, const kvf__req *r); /* of one request, without its group */
uint64_t kvf__sched_begin_blocks(const kvf_sched *s, const kvf__req *r);     /* of what it prefills, and no more */
uint64_t kvf__sched_prompt_blocks(const kvf_sched *s, const kvf__req *r); /* of its whole prompt, before any eviction */
uint32_t kvf__sched_present_blocks(kvf_sched *s, const kvf__req *r);      /* that its tables need to continue */

/* group.c: samples of one prompt, forks */
uint32_t kvf__group_fit(const kvf_sched *s, const kvf__req *r, uint32_t n, uint64_t *needed); /* the largest, <= n */
/* Samples with options of their own: the blocks of a leader, and whether one more sample can be held by it. *needed: the blocks of
 * the leader and its held samples so far. */
uint64_t kvf__group_own_options_blocks(const kvf_sched *s, const kvf__req *leader);
bool kvf__group_takes(const kvf_sched *s, const kvf__req *leader, const kvf__req *r, uint64_t *needed);
kvf_status kvf__group_fork_prompt(kvf_sched *s, kvf__req *leader);        /* all or none */
void kvf__group_hold(kvf_sched *s, kvf__req *leader, kvf__req *r);        /* a free one becomes the last held one */
kvf_status kvf__group_check(kvf_sched *s, const kvf__req *r, uint32_t n); /* whether n of it can be held together */
/* Sets the held samples' reservations for another budget; all: KVF_E_NO_BLOCKS if one of them finds no room. And undoes it. */
kvf_status kvf__group_reserve_change(kvf_sched *s, const kvf__req *leader, const kvf__req *to, bool all);
void kvf__group_reserve_back(kvf_sched *s, const kvf__req *leader);
void kvf__group_take_budget(kvf__req *r, const kvf__req *to);  /* all that follows from the options */
kvf_status kvf__group_reserve(kvf_sched *s, kvf__req *leader); /* the leader's reservation and the held samples' */
void kvf__group_unreserve(kvf_sched *s, kvf__req *leader);     /* drops the held samples' reservations */
kvf_status kvf__group_fork(kvf_sched *s, kvf__req *leader);    /* all or none */
void kvf__group_dissolve(kvf_sched *s, kvf__req *leader);      /* each held one becomes a waiting request */
bool kvf__group_promote(kvf_sched *s, kvf__req *leader);       /* the first held one takes over; false: there is none */
void kvf__group_leave(kvf_sched *s, kvf__req *held);           /* drops its reservation; a move follows */

/* repeat.c: repetitions */
kvf_status kvf__repeat_check(kvf_sched *s, const kvf__req *r, uint32_t n_tokens,
                             uint32_t end); /* whether a piece fits */
uint32_t kvf__repeat_piece(const kvf_sched *s, uint32_t piece, uint32_t n_tokens,
                           uint32_t end);                     /* of n_tokens up to end */
bool kvf__repeat_due(const kvf_sched *s, const kvf__req *r);  /* the next tokens are those of a piece */
bool kvf__repeat_owed(const kvf_sched *s, const kvf__req *r); /* a chunk that ends the prompt does not end it yet */
uint32_t kvf__repeat_chunk(const kvf_sched *s, const kvf__req *r); /* tokens of the next item */
void kvf__repeat_mark_item(const kvf_sched *s, const kvf__req *r, kvf_step_item *item);
void kvf__repeat_begin(kvf__req *r); /* its prompt is computed */
/* So many more tokens of the piece are computed. False: its sequence cannot go on, and the request is to be put back. */
bool kvf__repeat_done(kvf_sched *s, kvf__req *r, uint32_t n_tokens);
void kvf__repeat_forget(kvf__req *r);

/* admit.c: admission and release */
typedef enum kvf__admission {
    KVF__ADMITTED,
    KVF__ADMIT_LATER,
    KVF__ADMIT_NO_BLOCKS,
    KVF__ADMIT_REFUSED
} kvf__admission;
kvf__admission kvf__sched_admit(kvf_sched *s, kvf__req *r);            /* the queue's head becomes running */
void kvf__sched_put_back(kvf_sched *s, kvf__req *r, kvf__move move);   /* it gives up all that it holds */
void kvf__sched_requeue(kvf_sched *s, kvf__req *r);                    /* preempts a running one; not reported */
void kvf__sched_end(kvf_sched *s, kvf__req *r, kvf_end_reason reason); /* in any state; reported in the next step */
void kvf__sched_drop(kvf_sched *s, kvf__req *r);                       /* in any state; not reported */

/* segment.c: paused requests and later segments */
/* Its planned tokens are computed and its events done: next it decodes, or prefills a segment. */
void kvf__sched_go_on(kvf_sched *s, kvf__req *r);
bool kvf__sched_lend_extent(kvf_sched *s, kvf__req *r); /* whether a segment has its extent, now or already */
bool kvf__sched_preempt_paused(kvf_sched *s);           /* the paused one that arrived last; reported. false: none */

/* swap.c: preemption to the host */
bool kvf__sched_swap_out(kvf_sched *s, kvf__req *r);      /* a running request; false: it cannot be swapped */
kvf_status kvf__sched_swap_in(kvf_sched *s, kvf__req *r); /* it becomes running; KVF_E_NO_BLOCKS: no room */
void kvf__sched_swap_forget(kvf_sched *s, kvf__req *r);   /* a swapped one then waits and is recomputed */
bool kvf__sched_swap_forget_last(kvf_sched *s);           /* the last one in the queue; false: none is swapped */

#endif
