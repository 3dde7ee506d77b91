/* engine/internal.h: the structs and functions that the engine's files share.
 *
 * Glossary
 *   live         (kvf__live) one request, sample or beam, from its submission to its on_finish. All live ones form one list, in the
 *                order of their ids; those that hold a sequence form another, in the same order
 *   row          the index of a sequence in the step's view
 *   accumulators the arrays in which running prompts add up what their policies need:
 *                sums             column sums, [n_layers][n_q_heads][max_prefill_tokens]
 *                last_sums        column sums of a prompt's last queries, same shape
 *                squares          [n_layers][n_kv_heads][max_prefill_tokens]
 *                prompt_logprobs  [max_prefill_tokens]
 *                prompt_max       the largest probabilities that a prompt's repetition gives, shape of sums
 *                Each prompt owns the columns [prefill_offset, prefill_offset + n_prompt) of all five. It writes only those that
 *                its policy needs; pages of memory that no prompt writes are never touched
 *   events       the compactions of one moment, run together: begin, match, gate, apply, commit
 *   group        the samples or beams of one request: members (live), done (ended, waiting to be ranked) and spare (unused
 *                ones). A request with one answer has no group
 *   draw         the sampling of one token from a row of logits. Several samples may draw from one row: the one in which
 *                their common prompt ended
 *   own_policies the samples of a group have policies of their own. They are forked before the prompt's events
 *   turn         a segment of the prompt and its answer; the first turn is the prompt. The tokens of all turns are in one array.
 *                Arrays of generated tokens (logprobs, top_tokens) are indexed from the first prompt's end, and have unused
 *                entries for later segments
 *   idle         kept open, between two turns
 *   other_rows   the second set of rows. While samples with own policies have their prompt events, the step's rows are kept
 *                here; afterwards it holds what is left of the samples' rows
 *   duplicate    a beam that was just forked at the prompt's end and is still equal to the first beam
 *
 * Invariant: seq != 0 exactly while the request was in the last planned step and has neither been preempted nor ended.
 */
#ifndef KVF_ENGINE_INTERNAL_H
#define KVF_ENGINE_INTERNAL_H

#include "base/base.h"
#include "base/page_index.h"
#include "kvfold/engine.h"
#include "kvfold/events.h"
#include "kvfold/runner.h"

typedef struct kvf__group kvf__group;

/* The continuations of a beam at one step, likeliest first. */
typedef struct kvf__choices {
    uint32_t *tokens; /* KVF_NO_TOKEN: the end of the list */
    double *logprobs;
    uint32_t n; /* 0: not computed yet in this step */
} kvf__choices;

typedef struct kvf__live {
    struct kvf__live *next, *prev; /* of the list; a group's spare ones are linked by next */
    struct kvf__live *next_running, *prev_running;
    kvf__group *group;            /* NULL: a request with one answer */
    uint32_t index;               /* of the sample; for a beam its index in members */
    struct kvf__live *draws_from; /* its first token is drawn from the row where this one's prompt ended; else NULL */
    bool duplicate;
    double sum; /* of the log-probabilities of its tokens */
    kvf__choices choices;
    struct kvf__outcome *outcome; /* ranked groups: its result, kept until all members have ended */
    kvf_request id;
    kvf_seq seq;
    uint32_t room; /* tokens that may follow the prompt before the arrays grow, at most max_tokens */
    /* Known tokens: prompt and generated; capacity n_prompt + room. If forced, those of the answer stand there from the beginning. NULL
     * until give_tokens has been called. */
    uint32_t *tokens;
    kvf_status (*give_tokens)(void *user, uint32_t *tokens, uint32_t n);
    double *logprobs;     /* [room] */
    uint32_t *top_tokens; /* [room][n_top], NULL when n_top is 0 */
    double *top_logprobs; /* likewise */
    uint32_t n_top;
    uint32_t n_prompt, n_known, max_tokens; /* n_prompt: of the first prompt; max_tokens: most tokens after it */
    uint32_t n_begin;                       /* index in tokens where the current answer begins */
    uint32_t n_seen; /* prompt tokens of all turns, to the end of the running prompt or segment */
    bool forced;     /* the tokens of the current answer are given */
    kvf_sched_segment *segments;
    uint32_t n_segments;
    double first_logprob; /* of the first token of a segment, until the segment runs */
    int keep_open, idle;
    kvf_sampling sampling;
    kvf_policy_options policy;
    void *salt;
    uint32_t salt_bytes, n_cached, prefix_end;
    int no_cache_hits;
    char **stop;
    uint32_t n_stop;
    size_t stop_bytes_max;
    const char *stopped_by; /* the string of stop that ended the text, or NULL */
    int ignore_end, in_prompt, abort;
    char *label;         /* its name in log messages, or NULL */
    uint32_t n_failures; /* failed steps that it was in, since its last token */
    bool lost;           /* scratch: it is in the step that is undone */
    bool memory_full;    /* it ended because the pool was too small for it alone */
    int swapped;         /* swapped to the host, and in no step since */
    int changed;         /* its budget was changed: it may have an event before the next step */
    char *text;          /* bytes of the generated tokens */
    size_t text_bytes, text_capacity;
    uint32_t n_preempted;
    uint64_t block_steps, reserved_block_steps; /* see kvf_result */
    uint32_t n_block_steps;
    uint64_t blocks_needed; /* that its exact sizes need, for the error text if they do not fit */
    double submitted, first_token;
    double started;                        /* time of its first step; 0 before */
    uint64_t submitted_step, started_step; /* stats.n_steps at these times */
    uint32_t n_reached;                    /* tokens that were computed at least once */
    void *user;
    void (*on_token)(void *user, kvf_request request, uint32_t token, double logprob);
    void (*on_sample_token)(void *user, uint32_t index, kvf_request request, uint32_t token, double logprob);
    void (*on_logits)(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits);
    void (*on_finish)(void *user, const kvf_result *result);
} kvf__live;

/* The inputs that a prompt's policy needs, or that the policies of all its samples need. */
typedef struct kvf__prompt_needs {
    uint32_t needs, score_window; /* KVF_NEEDS_*; score_window of the policies that need the last queries */
    uint32_t piece;               /* repeat_piece and score_norm of the policies that need a repetition */
    kvf_score_norm norm;
    kvf_gqa gqa; /* of the policies that need squares */
} kvf__prompt_needs;

/* The result of a sample or beam, kept until the group is ranked. It owns the arrays that result points to. */
typedef struct kvf__outcome {
    kvf_result result;
    kvf_error error;
    kvf_layer_occupancy *layers;
    kvf_layer_size *sizes, *group_sizes;
    double *density;
} kvf__outcome;

/* Invariants: members[0..n_left) of beams are in the engine's list. members[i] of samples is sample i, NULL once it has ended.
 * done is sorted by rank: by score, then the earlier end first. Every kvf__live of the group is a member, done or spare. */
struct kvf__group {
    kvf_request id; /* the request's name for the caller: the first sample's */
    uint32_t n;     /* answers */
    uint32_t width; /* samples or beams */
    bool ranked, beams, own_policies, abort;
    bool begun;      /* beams: they have become different */
    bool stuck;      /* beams: the scheduler has ended one */
    uint32_t n_left; /* members that have not ended */
    uint32_t n_choices;
    double length_penalty;
    kvf_error error;             /* why the scheduler ended a beam */
    kvf__live **members, **done; /* [width], [width + 1] */
    uint32_t n_done, n_lives;
    kvf__live *spare;
    struct kvf__pick *picks; /* [width * n_choices], beams */
    size_t bytes;
};

typedef struct kvf__draw {
    kvf__live *live;
    kvf__group *group; /* for a beam, else NULL */
    const float *logits;
    uint32_t token;
    double logprob;
    bool failed; /* no memory for its token */
} kvf__draw;

typedef struct kvf__buffer { /* one allocation of the engine */
    void *p;
    size_t bytes;
    bool of_device;
    kvf_memory kind; /* if of_device */
} kvf__buffer;

/* The rows that events work on. */
typedef struct kvf__rows {
    kvf__live **rows; /* request of each row of the view; NULL: it was preempted */
    kvf_seq *seqs;
    float **prompt_sums;
    kvf_view view;
} kvf__rows;

enum { KVF__ENGINE_BUFFERS = 64, KVF__TRANSFERS = 2 };

typedef struct kvf__transfer {
    kvf_copy_list list;
    kvf_device_event *event;
    bool posted; /* the device has it, and has not been waited for */
} kvf__transfer;

struct kvf_engine {
    kvf_engine_config config;
    kvf_allocator allocator;
    kvf_runner runner;
    bool own_runner; /* made here, from a model */
    kvf_runner_shape shape;
    const kvf_tokenizer *tokenizer; /* or NULL: there is no text, and no end token */
    kvf_stream *stream;
    kvf_manager *manager;
    kvf_policy_state *policies;
    kvf_sched *sched;
    kvf_events *events; /* the policy driver */
    kvf_pages pages;
    kvf_score_pages scores;
    kvf_pages host_pages; /* with 0 blocks if there is no host tier; host_scores likewise */
    kvf_score_pages host_scores;
    kvf_device device;
    kvf_stream *copier; /* of the device; NULL without a host tier */
    kvf_status broken;  /* not KVF_OK: the device has failed */
    kvf_error broken_text;
    kvf__transfer transfers[KVF__TRANSFERS];
    bool offloads; /* cached blocks are copied to the host before they are evicted */
    uint32_t n_groups, n_tables, max_batch_tokens, max_running;
    uint32_t window; /* the model's sliding window if max_context is larger; else 0 */

    kvf__live *first, *last;
    kvf__live *first_running, *last_running; /* with seq != 0; a step walks these, not those that wait */
    uint32_t n_live, n_idle;
    int in_step, destroying;
    bool aborts; /* one was aborted from within a callback of the step */
    bool gives;  /* a request with give_tokens was submitted */

    /* Per step, [max_running] unless said otherwise. */
    kvf__live **rows; /* request of each row of the step's view */
    void **ahead;     /* requests that the plan may admit */
    kvf_seq *seqs;
    uint32_t *tokens;                       /* [max_batch_tokens] */
    uint32_t *q_begin, *out_rows, *sampled; /* [max_running + 1] */
    kvf__draw *draws;
    uint32_t n_draws;
    uint32_t n_decode; /* rows of the step that decode */
    uint8_t *row_wanted, *row_gqa, *observed;
    uint8_t *changed;                                  /* kvf_moment_rows.changed */
    uint32_t *batch_prompts;                           /* kvf_moment_rows.n_prompt */
    float **prompt_sums;                               /* first column of a row's prompt in sums; NULL: it has none */
    float **added_sums, **added_last, **added_squares; /* accumulators that this step's queries are added to, or NULL */
    float **added_max;                                 /* likewise, of rows that repeat their prompt */
    uint32_t *max_begin, *max_end;                     /* positions of that prompt */
    uint8_t *max_by_residual;
    uint32_t *not_finite;                /* from kvf_forward; KVF_FINITE: the row goes on */
    uint32_t *last_begin;                /* position of the first query that last_sums counts */
    float *logprobs;                     /* of the token that a decode row appends */
    uint32_t n_new_prompt, n_new_decode; /* tokens of the step that are computed for the first time */
    uint32_t n_repeat;                   /* tokens of repetitions in the step */
    uint32_t instruction[KVF_MAX_INSTRUCTION_TOKENS],
        n_instruction; /* n_instruction above that: there is none that fits */
    uint32_t n_targets;
    uint32_t *targets;       /* [max_batch_tokens] tokens whose probabilities prompts need */
    double *target_logprobs; /* [max_batch_tokens] */
    float **batch_sums, **batch_last,
        **batch_squares; /* accumulators of the rows in a batch of events; NULL where a row needs none */
    const float **batch_logprobs;
    uint32_t n_snapshot_pages, n_page_ids;
    uint32_t *page_ids;        /* [n_page_ids] pages of the longest snapshot */
    kvf_runner_buffers buffer; /* the runner's: see the glossary */
    void *sample_scratch;      /* [n_threads][n_vocab] of 8 bytes; NULL without logits */
    kvf_layer_occupancy *layers, *result_layers;
    /* The KV part of the result of the single request in the pool, taken before a plan that may end it and free its sequence. */
    kvf_result single;
    kvf_layer_occupancy *single_layers;
    kvf_layer_size *single_sizes, *single_groups;
    double *single_density;
    kvf_view view;            /* of the step */
    kvf__rows other_rows;     /* see the glossary */
    kvf_error *observe_error; /* detail of a failure within the forward pass; or NULL */

    kvf_engine_stats stats;
    uint64_t done_merged, done_dropped, done_kept;
    kvf__buffer buffers[KVF__ENGINE_BUFFERS];
    uint32_t n_buffers;
    kvf__counted counted; /* behind `allocator`: into the part of `memory` whose turn it is */
    kvf_engine_memory memory;
};

/* events.c */
kvf_status kvf__engine_read_policy(const kvf_engine *e, const kvf_policy_options *given, kvf_policy_options *out,
                                   kvf_error *err);
kvf_status kvf__engine_create_events(kvf_engine *e, kvf_error *err);
kvf_status kvf__engine_overflow(kvf_engine *e, kvf_error *err);
kvf_status kvf__engine_prompt_end(kvf_engine *e, uint32_t row_begin, uint32_t row_end, kvf_error *err);
kvf_status kvf__engine_decode_events(kvf_engine *e, uint32_t n_decode, kvf_error *err);
kvf_status kvf__engine_observe(void *ctx, uint32_t layer, const kvf_mass *mass);

/* fault.c */
typedef struct kvf__name {
    char text[160];
} kvf__name;
kvf__name kvf__live_name(const kvf__live *r); /* text.c; for the log: its label, else its number */
/* Undoes a failed step: running requests go back to the queue; one that keeps failing ends. */
void kvf__engine_take_back(kvf_engine *e, const kvf_error *why);
/* After the forward pass: ends the requests that have NaN or infinity. */
void kvf__engine_end_not_finite(kvf_engine *e, const kvf_step *step);

static inline double kvf__engine_clock(const kvf_engine *e) {
    return e->runner.clock ? e->runner.clock(e->runner.ctx) : kvf__clock();
}

/* memory.c: n elements, freed with the engine; cleared if zero is set, else not touched. NULL: out of memory. */
void *kvf__engine_take(kvf_engine *e, size_t n, size_t element_bytes, int zero);
/* The same in the device's memory; the text of a failure is kept in broken_text. */
void *kvf__engine_take_of_device(kvf_engine *e, kvf_memory kind, size_t n, size_t element_bytes);
void kvf__engine_give_back(kvf_engine *e, const kvf__buffer *b);

/* prefix.c */
kvf_prefix_key kvf__live_key(const kvf__live *r, uint32_t n_tokens);
uint64_t kvf__engine_snapshot_page_bytes(const kvf_engine *e);
enum { KVF__STATISTICS = 3 }; /* KVF_SNAPSHOT_SUMS, _SQUARES, _LOGPROBS */
typedef struct kvf__statistic {
    uint32_t n_rows;
    float *columns; /* [n_rows][max_prefill_tokens] its accumulators; NULL: the runner has none */
} kvf__statistic;
kvf__statistic kvf__engine_statistic(const kvf_engine *e, uint32_t stat);
kvf_status kvf__engine_restore(kvf_engine *e, const kvf_step_item *item, uint32_t wanted, kvf_error *err);
kvf_status kvf__engine_keep_sums(kvf_engine *e, const kvf_step *step, kvf_error *err);
kvf_status kvf__engine_set_prefix(kvf_engine *e, const kvf__live *r);

/* repeat.c */
kvf_status kvf__engine_create_instruction(kvf_engine *e, kvf_error *err);
kvf_status kvf__engine_check_repeats(const kvf_engine *e, const kvf_policy_options *o, kvf_error *err);
/* Row i of the step computes a part of a piece: its tokens, and where its probabilities go. */
kvf_status kvf__engine_lay_out_piece(kvf_engine *e, const kvf_step_item *item, uint32_t i, uint32_t *tokens,
                                     kvf_error *err);
/* After the forward pass, while the view is as it was filled: completes the scores of the rows whose prompt ends. */
kvf_status kvf__engine_score(kvf_engine *e, const kvf_step *step, kvf_error *err);

/* segment.c */
kvf__prompt_needs kvf__live_needs(const kvf__live *r); /* of its policies, over all samples of a prompt */
typedef struct kvf__token_range {
    uint32_t begin, end;
} kvf__token_range;

kvf__token_range kvf__live_segment_at(const kvf__live *r,
                                      uint32_t at);             /* the prompt or segment that contains token `at` */
bool kvf__live_segment_begins(const kvf__live *r, uint32_t at); /* whether a segment begins at token `at` */
uint32_t kvf__live_seen(const kvf__live *r, uint32_t end);      /* prompt tokens before `end` */
/* turn.c */
/* Delivers the answer that has ended. The request stays open if it is a dialogue and the scheduler can pause it. */
void kvf__live_answered(kvf_engine *e, kvf__live *r, kvf_finish finish);

/* transfer.c: copies that are waited for, and copies to the host that run during the step */
kvf_status kvf__engine_create_transfers(kvf_engine *e, kvf_error *err);
void kvf__engine_destroy_transfers(kvf_engine *e);
kvf_status kvf__engine_check_device(const kvf_engine *e, kvf_error *err); /* its error if it has failed */
kvf_status kvf__engine_copies(kvf_engine *e, kvf_copy_list *copies, kvf_error *err);
/* Copies cached blocks that may be evicted soon to the host. kvf__engine_offload does so during the forward pass;
 * kvf__engine_offload_first does so at once, before a plan if a request waits for blocks. */
kvf_status kvf__engine_offload(kvf_engine *e, kvf_error *err);
kvf_status kvf__engine_offload_first(kvf_engine *e, kvf_error *err);
/* Waits for the posted transfers. */
kvf_status kvf__engine_transfers_end(kvf_engine *e, kvf_error *err);
/* Waits for the posted transfers and gives an empty list for kvf__engine_copies. NULL: no host tier, or a transfer failed. */
kvf_copy_list *kvf__engine_spare_list(kvf_engine *e, kvf_error *err);

/* step.c */
/* The likeliest k tokens, ties to the lower id; KVF_NO_TOKEN where logits are NaN. */
void kvf__engine_top(const float *logits, uint32_t n_vocab, uint32_t k, uint32_t *tokens, double *logprobs);

/* group.c */
kvf__group *kvf__group_create(kvf_engine *e,
                              const kvf_generate *g); /* NULL: out of memory. The caller creates its members */
void kvf__group_free(kvf_engine *e,
                     kvf__group *g); /* with all its members, none of which may be in the engine's list */
bool kvf__group_room(kvf_engine *e, kvf__group *g,
                     kvf__live *r); /* allocates what a member needs besides kvf__live; false: out of memory */
void kvf__group_room_free(kvf_engine *e, kvf__live *r);
/* After kvf_sched_prompt_done, or kvf_sched_fork_prompt, has forked the held samples. */
kvf_status kvf__group_forked(kvf_engine *e, kvf__live *leader, kvf_error *err);
void kvf__group_finish(kvf_engine *e, kvf__live *r, kvf_finish finish,
                       const kvf_error *error); /* of a ranked group's member */
/* ready: every beam has its choices, or is a duplicate of one that has. advance: one step of the search; may end the group. */
bool kvf__beams_ready(const kvf__group *g);
kvf_status kvf__beams_advance(kvf_engine *e, kvf__group *g, kvf_error *err);
void kvf__beams_stop(kvf_engine *e, kvf__group *g, kvf_finish finish, const kvf_error *error);

/* result.c. A result is built in three steps: without its KV part, the KV part, the callback. */
kvf_result kvf__live_result(const kvf_engine *e, const kvf__live *r, kvf_finish finish, const kvf_error *error);
void kvf__live_take_kv(kvf_engine *e, const kvf__live *r, kvf_layer_occupancy *layers, kvf_result *result);
void kvf__live_deliver(kvf_engine *e, kvf__live *r, kvf_result *result);
void kvf__live_tell(kvf_engine *e, kvf__live *r, kvf_result *result); /* only the callback */
extern const kvf_error kvf__no_text;                                  /* out of host memory */
/* Before a step: keeps what the only running request holds, for the case that the scheduler ends it in this step. */
void kvf__live_note_single(kvf_engine *e);

/* tokens.c */
kvf_status kvf__engine_check_ids(const kvf_engine *e, const uint32_t *ids, uint32_t n, const char *what,
                                 kvf_error *err);
/* Makes room for n tokens after the prompt. false: out of memory, and nothing has changed. */
bool kvf__live_make_room(kvf_engine *e, kvf__live *r, uint32_t n);
bool kvf__live_take_arrays(kvf_engine *e, kvf__live *r,
                           uint32_t room); /* all four, for r's sizes; false: out of memory, none is allocated */
void kvf__live_free_arrays(kvf_engine *e, kvf__live *r);
kvf_status kvf__live_ask(kvf_engine *e, kvf__live *r, kvf_error *err); /* for its tokens, if it has none yet */

/* request.c */
void kvf__engine_ask(kvf_engine *e);              /* for the tokens of requests that may be admitted */
void kvf__live_lost(kvf_engine *e, kvf__live *r); /* the scheduler has taken its blocks: resets it */
void kvf__live_preempted(kvf_engine *e, kvf__live *r, int swapped); /* the same, counted and logged */
void kvf__live_link(kvf_engine *e, kvf__live *r);
void kvf__live_set_seq(kvf_engine *e, kvf__live *r,
                       kvf_seq seq); /* 0: it holds none; the list of running ones follows */
void kvf__live_unlink(kvf_engine *e, kvf__live *r);
void kvf__live_free(kvf_engine *e, kvf__live *r);
bool kvf__live_grow_text(kvf_engine *e, kvf__live *r, size_t more); /* false: out of memory */
kvf__live *kvf__live_find(const kvf_engine *e, kvf_request request);
/* error: with KVF_FINISH_ERROR, copied where it is kept; else NULL. */
void kvf__live_finish(kvf_engine *e, kvf__live *r, kvf_finish finish, const kvf_error *error);
/* Why the scheduler refused a request, in fields of the engine's config. */
kvf_status kvf__engine_refused(const kvf_engine *e, kvf_status status, kvf_error *err);
/* n_tokens more behind n_before do not fit max_context. */
kvf_status kvf__engine_no_context(const kvf_engine *e, uint32_t n_before, uint32_t n_tokens, kvf_error *err);
/* Appends the token's bytes to the text. Returns 1 when a stop string is complete (the text is then cut before it), -1 when out of
 * memory, else 0. */
int kvf__live_text(kvf_engine *e, kvf__live *r, uint32_t token);

#endif
