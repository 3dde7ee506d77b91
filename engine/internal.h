/* engine/internal.h: what the engine's files share.
 *
 * Glossary
 *   live     a request from submission to its on_finish; all live requests form one list
 *   row      a sequence's place in the step's view
 *   sums     column sums of running prompts: [n_layers][n_q_heads][max_prefill_tokens]; a prompt owns the token
 *            columns [prefill_offset, prefill_offset + n_prompt), also of the other accumulators: last_sums (of its last queries
 *            alone), squares ([n_layers][n_kv_heads][max_prefill_tokens]), prompt_logprobs ([max_prefill_tokens]). Which of them
 *            it writes follows from its policy's needs; memory that nobody writes is not touched
 *   events   compactions of one moment, run together: begin, match, gate, apply, commit
 *   group    the samples or beams of one request: live ones (members), those that have ended and wait to be ranked (done),
 *            and room for more (spare). A plain request has none
 *   draw     a sample to take from a row of logits: several live ones draw from the row in which their prompt ended
 *   own_policies   of a group: its samples have policies of their own, and are forked off before the prompt's events
 *   idle     kept open, between two turns
 *   turn     a segment of the prompt and its answer; the first turn is the prompt. Tokens of all turns stand in one array, and
 *            what is kept per generated token (logprobs, top) counts from the first prompt's end, with gaps for segments
 *   other_rows    the rows that stand back while others have their events: those of the step while the samples of a prompt do,
 *            else those of the last such samples
 *   duplicate     a beam that was just forked off at the prompt's end and knows nothing that the first one does not
 *
 * Invariant: a request has seq != 0 exactly while it was in the last planned step and was neither preempted nor ended.
 */
#ifndef KVF_ENGINE_INTERNAL_H
#define KVF_ENGINE_INTERNAL_H

#include "base/base.h"
#include "kvfold/engine.h"

typedef struct kvf__group kvf__group;

/* A beam's continuations at one step, likeliest first. */
typedef struct kvf__choices {
    uint32_t *tokens; /* KVF_NO_TOKEN: there are no more */
    double *logprobs;
    uint32_t n; /* 0: not known for this step */
} kvf__choices;

typedef struct kvf__live {
    struct kvf__live *next, *prev; /* spare ones are linked by next */
    kvf__group *group;             /* NULL: one request, one answer */
    uint32_t index;                /* of the sample; of a beam: its place among the members */
    struct kvf__live *draws_from;  /* its first draw is from the row in which that one's prompt ended; else NULL */
    bool duplicate;
    double sum; /* of its log-probabilities */
    kvf__choices choices;
    struct kvf__outcome *outcome; /* ranked: what became of it, for when all have ended */
    kvf_request id;
    kvf_seq seq;
    uint32_t room;        /* tokens that may follow the prompt before the arrays grow, at most max_tokens */
    uint32_t *tokens;     /* known: the prompt, then what was generated; capacity n_prompt + room */
    uint32_t *forced;     /* [n_forced] or NULL */
    double *logprobs;     /* [room] */
    uint32_t *top_tokens; /* [room][n_top], NULL when n_top is 0 */
    double *top_logprobs; /* likewise */
    uint32_t n_top;
    uint32_t n_prompt, n_known, max_tokens; /* of the first prompt; max_tokens: of all that may follow it */
    uint32_t n_begin;                       /* where the present answer begins */
    uint32_t n_seen;                        /* prompt tokens up to the end of the prompt or segment that runs */
    uint32_t n_forced;                      /* of forced, from n_begin on */
    kvf_sched_segment *segments;
    uint32_t n_segments;
    double first_logprob; /* of the token a segment begins with; until that runs */
    int keep_open, idle;
    kvf_sampling sampling;
    kvf_policy_options policy;
    void *salt;
    uint32_t salt_bytes, n_cached, prefix_end;
    int no_cache_hits;
    char **stop;
    uint32_t n_stop;
    size_t stop_bytes_max;
    const char *stopped_by; /* of stop: the one that the text was cut before, or NULL */
    int ignore_end, in_prompt, abort;
    char *label;         /* what the log calls it, or NULL */
    uint32_t n_failures; /* steps it was in that failed, since its last token */
    bool lost;           /* scratch: it is in the step that is taken back */
    bool memory_full;    /* the pool was too small for it alone: it ended with what it had */
    int swapped;         /* to the host, and has not been in a step since */
    int changed;         /* its budget: due before the next step */
    char *text;          /* bytes of the generated tokens */
    size_t text_bytes, text_capacity;
    uint32_t n_preempted;
    uint64_t block_steps, reserved_block_steps; /* see kvf_result */
    uint32_t n_block_steps;
    uint64_t blocks_needed; /* of its exact sizes, once they found no room */
    double submitted, first_token;
    double started;                        /* its first step; 0 before */
    uint64_t submitted_step, started_step; /* stats.n_steps then */
    uint32_t n_reached;                    /* tokens that were computed once */
    void *user;
    void (*on_token)(void *user, kvf_request request, uint32_t token, double logprob);
    void (*on_sample_token)(void *user, uint32_t index, kvf_request request, uint32_t token, double logprob);
    void (*on_logits)(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits);
    void (*on_finish)(void *user, const kvf_result *result);
} kvf__live;

/* What a prompt is computed with: for its policy, or for those of all its samples. */
typedef struct kvf__prompt_needs {
    uint32_t needs, score_window; /* KVF_NEEDS_*; of those that go by the last queries */
    kvf_gqa gqa;                  /* of those that go by squares */
} kvf__prompt_needs;

/* How a live one ended, kept for the ranking. The arrays of result's KV figures are its own. */
typedef struct kvf__outcome {
    kvf_result result;
    kvf_error error;
    kvf_layer_occupancy *layers;
    kvf_layer_size *sizes, *group_sizes;
    double *density;
} kvf__outcome;

/* Invariants: members[0..n_members) are in the engine's list (samples: NULL once ended, at their index); done ascends by
 * rank: score, then who ended first; all lives are members, done or spare. */
struct kvf__group {
    kvf_request id; /* what the caller knows: the first sample's */
    uint32_t n;     /* answers */
    uint32_t width; /* samples or beams */
    bool ranked, beams, own_policies, abort;
    bool begun;      /* beams: they differ */
    bool stuck;      /* beams: the scheduler ended one */
    uint32_t n_left; /* members that live */
    uint32_t n_choices;
    double length_penalty;
    kvf_error error;             /* of the scheduler's end */
    kvf__live **members, **done; /* [width], [width + 1] */
    uint32_t n_done, n_lives;
    kvf__live *spare;
    struct kvf__pick *picks; /* [width * n_choices], beams */
    size_t bytes;
};

typedef struct kvf__draw {
    kvf__live *live;
    kvf__group *group; /* of a beam, else NULL */
    const float *logits;
    uint32_t token;
    double logprob;
    bool failed; /* there is no memory for its token */
} kvf__draw;

typedef struct kvf__buffer { /* one allocation of the engine */
    void *p;
    size_t bytes;
    bool of_device;
    kvf_memory kind; /* then */
} kvf__buffer;

/* What events run on. */
typedef struct kvf__rows {
    kvf__live **rows; /* request of each row of the view; NULL: it was preempted */
    kvf_seq *seqs;
    float **prompt_sums;
    kvf_view view;
} kvf__rows;

enum { KVF__ENGINE_BUFFERS = 64, KVF__TRANSFERS = 2 };

typedef struct kvf__transfer {
    kvf_copy_list list;
    kvf_copies_source source; /* of the list, while it is posted */
    kvf_device_event *event;
    bool posted; /* and not yet ended */
} kvf__transfer;

struct kvf_engine {
    kvf_engine_config config;
    kvf_allocator allocator;
    const kvf_model *model;
    const kvf_model_info *info;
    kvf_stream *stream;
    kvf_manager *manager;
    kvf_policy_state *policies;
    kvf_sched *sched;
    kvf_activations *activations;
    kvf_plan *plan;
    kvf_pages pages;
    kvf_score_pages scores;
    kvf_pages host_pages; /* of no blocks without a host tier, as the next */
    kvf_score_pages host_scores;
    kvf_device device;
    kvf_device_queue *copier; /* NULL without a host tier */
    kvf_status broken;        /* not KVF_OK: the device has failed */
    kvf_error broken_text;
    kvf__transfer transfers[KVF__TRANSFERS];
    bool offloads; /* cached blocks go to the host before they are evicted */
    uint32_t n_groups, n_tables, max_batch_tokens, max_running;
    uint32_t window; /* the model's, where max_context is beyond it; else 0 */

    kvf__live *first, *last;
    uint32_t n_live, n_idle;
    int in_step, destroying;

    /* Per step, [max_running] unless said otherwise. */
    kvf__live **rows; /* request of each row of the step's view */
    kvf_seq *seqs;
    uint32_t *tokens;                       /* [max_batch_tokens] */
    uint32_t *q_begin, *out_rows, *sampled; /* [max_running + 1] */
    kvf__draw *draws;
    uint32_t n_draws;
    double *variance; /* [n_layers][n_q_heads] */
    uint8_t *row_wanted, *row_gqa, *observed;
    float **prompt_sums;                               /* where its columns begin in sums; NULL: it has none */
    float **added_sums, **added_last, **added_squares; /* what this step's queries are added to, or NULL */
    uint32_t *not_finite;                /* as kvf_forward has it; then KVF_FINITE: its row has not ended */
    uint32_t *last_begin;                /* position of the first query that last_sums counts */
    float *logprobs;                     /* of the token that a decode row appends */
    uint32_t n_new_prompt, n_new_decode; /* tokens of the step that are computed for the first time */
    uint32_t n_targets;
    uint32_t *targets;       /* [max_batch_tokens] whose probability a prompt's row is asked for */
    double *target_logprobs; /* [max_batch_tokens] */
    float **batch_sums, **batch_last,
        **batch_squares; /* accumulators of the rows of a batch of events, as it needs them */
    const float **batch_logprobs;
    float *snapshots; /* [n_snapshot_pages][n_layers][n_q_heads][block_size]; NULL without a prefix cache */
    uint32_t n_snapshot_pages;
    uint32_t *page_ids;                                  /* [blocks of max_context] */
    float *sums, *last_sums, *squares, *prompt_logprobs; /* see the glossary */
    float *row;                                          /* [max_running][n_kv_heads][max_slots] */
    float *logits;                                       /* [max_running][n_vocab] */
    void *sample_scratch;                                /* [n_threads][n_vocab] of 8 bytes */
    void *workspace;                                     /* for match, gate and apply */
    size_t workspace_bytes;
    kvf_event *events; /* [max_running * n_tables], as are the next five */
    kvf_event *batch_events;
    kvf_compact_item *items;
    uint32_t *item_of_event, *batch_items, *group_keep; /* group_keep: of items whose head groups differ */
    uint32_t *keep, *table_slots;                       /* [n_tables] */
    kvf_layer_occupancy *layers, *result_layers;
    /* Figures of the only request in the pool before a plan that may end it: afterwards its sequence is gone. */
    kvf_result single;
    kvf_layer_occupancy *single_layers;
    kvf_layer_size *single_sizes, *single_groups;
    double *single_density;
    kvf_view view;            /* of the step */
    kvf__rows other_rows;     /* see the glossary */
    kvf_error *observe_error; /* of the step, for what fails within the forward pass; or NULL */

    kvf_engine_stats stats;
    uint64_t done_merged, done_dropped, done_kept;
    kvf__buffer buffers[KVF__ENGINE_BUFFERS];
    uint32_t n_buffers;
};

/* events.c */
kvf_status kvf__engine_read_policy(const kvf_engine *e, const kvf_policy_options *given, kvf_policy_options *out,
                                   kvf_error *err);
kvf_status kvf__engine_overflow(kvf_engine *e, kvf_error *err);
kvf_status kvf__engine_prompt_end(kvf_engine *e, uint32_t row_begin, uint32_t row_end, kvf_error *err);
kvf_status kvf__engine_decode_events(kvf_engine *e, uint32_t n_decode, kvf_error *err);
kvf_status kvf__engine_observe(void *ctx, uint32_t layer, const kvf_mass *mass);

/* fault.c */
typedef struct kvf__name {
    char text[160];
} kvf__name;
kvf__name kvf__live_name(const kvf__live *r); /* for the log: its label, else its number */
/* A step failed: what ran goes back to the queue, and who fails again and again ends. */
void kvf__engine_take_back(kvf_engine *e, const kvf_error *why);
/* After the forward pass: ends what is not made of numbers any more. */
void kvf__engine_end_not_finite(kvf_engine *e, const kvf_step *step);

/* create.c: n elements, freed with the engine; not cleared. NULL: there is no memory. */
void *kvf__engine_take(kvf_engine *e, size_t n, size_t element_bytes);

/* prefix.c */
kvf_prefix_key kvf__live_key(const kvf__live *r, uint32_t n_tokens);
uint64_t kvf__engine_snapshot_page_bytes(const kvf_engine *e);
kvf_status kvf__engine_restore_sums(kvf_engine *e, const kvf_step_item *item, float *sums, kvf_error *err);
void kvf__engine_keep_sums(kvf_engine *e, const kvf_step *step);
kvf_status kvf__engine_set_prefix(kvf_engine *e, const kvf__live *r);

/* turn.c */
typedef struct kvf__token_range {
    uint32_t begin, end;
} kvf__token_range;

kvf__token_range kvf__live_segment_at(const kvf__live *r,
                                      uint32_t at);             /* the prompt, or the segment, that has that token */
bool kvf__live_segment_begins(const kvf__live *r, uint32_t at); /* a segment begins there */
uint32_t kvf__live_seen(const kvf__live *r, uint32_t end);      /* prompt tokens before that one */
/* Its answer has ended: it is delivered, and the request stays open if it is to and can. */
void kvf__live_answered(kvf_engine *e, kvf__live *r, kvf_finish finish);

/* transfer.c: copies of calls, and those that run beside the step */
kvf_status kvf__engine_create_transfers(kvf_engine *e, kvf_error *err);
void kvf__engine_destroy_transfers(kvf_engine *e);
kvf_status kvf__engine_check_device(const kvf_engine *e, kvf_error *err); /* it has not failed so far */
kvf_status kvf__engine_copies(kvf_engine *e, kvf_copy_list *copies, kvf_error *err);
/* Cached blocks that may be needed soon go to the host: beside the forward pass, and, before a plan that something waits for,
 * at once. */
kvf_status kvf__engine_offload(kvf_engine *e, kvf_error *err);
kvf_status kvf__engine_offload_first(kvf_engine *e, kvf_error *err);
/* Waits for what is under way. */
kvf_status kvf__engine_transfers_end(kvf_engine *e, kvf_error *err);
/* An empty list for kvf__engine_copies, with nothing under way; NULL: without a host tier, or that failed. */
kvf_copy_list *kvf__engine_spare_list(kvf_engine *e, kvf_error *err);

/* step.c */
/* The likeliest k tokens, ties to the lower id; KVF_NO_TOKEN where logits are NaN. */
void kvf__engine_top(const float *logits, uint32_t n_vocab, uint32_t k, uint32_t *tokens, double *logprobs);

/* group.c */
kvf__group *kvf__group_create(kvf_engine *e,
                              const kvf_generate *g); /* NULL: out of memory. Its lives are the caller's to make */
void kvf__group_free(kvf_engine *e, kvf__group *g);   /* with all of its lives; none is in the engine's list */
bool kvf__group_room(kvf_engine *e, kvf__group *g,
                     kvf__live *r); /* what a live one needs beside; false: out of memory */
void kvf__group_room_free(kvf_engine *e, kvf__live *r);
/* After kvf_sched_prompt_done of a prompt that others were held for. */
kvf_status kvf__group_forked(kvf_engine *e, kvf__live *leader, kvf_error *err);
void kvf__group_finish(kvf_engine *e, kvf__live *r, kvf_finish finish, const char *error); /* of a ranked one */
/* All beams know their choices, or are duplicates of one that does: one step of the search. May end the group. */
bool kvf__beams_ready(const kvf__group *g);
kvf_status kvf__beams_advance(kvf_engine *e, kvf__group *g, kvf_error *err);
void kvf__beams_stop(kvf_engine *e, kvf__group *g, kvf_finish finish, const char *error);

/* request.c */
void kvf__live_lost(kvf_engine *e, kvf__live *r); /* the scheduler took its blocks: it begins again, or goes on */
void kvf__live_preempted(kvf_engine *e, kvf__live *r, int swapped); /* for others' sake; counted, and told to the log */
void kvf__live_link(kvf_engine *e, kvf__live *r);
void kvf__live_unlink(kvf_engine *e, kvf__live *r);
void kvf__live_free(kvf_engine *e, kvf__live *r);
/* A result without KV figures, then these, then the callback. */
kvf_result kvf__live_result(const kvf_engine *e, const kvf__live *r, kvf_finish finish, const char *error);
void kvf__live_take_kv(kvf_engine *e, const kvf__live *r, kvf_layer_occupancy *layers, kvf_result *result);
void kvf__live_deliver(kvf_engine *e, kvf__live *r, kvf_result *result);
void kvf__live_tell(kvf_engine *e, kvf__live *r, kvf_result *result); /* the callback alone */
kvf_status kvf__engine_check_ids(const kvf_engine *e, const uint32_t *ids, uint32_t n, const char *what,
                                 kvf_error *err);
/* Room for n tokens behind the prompt; false: out of memory, and nothing has changed. */
bool kvf__live_make_room(kvf_engine *e, kvf__live *r, uint32_t n);
bool kvf__live_take_arrays(kvf_engine *e, kvf__live *r,
                           uint32_t room); /* all four, of r's sizes; false: none is taken */
void kvf__live_free_arrays(kvf_engine *e, kvf__live *r);
bool kvf__live_grow_text(kvf_engine *e, kvf__live *r, size_t more); /* false: out of memory */
kvf__prompt_needs kvf__live_needs(const kvf__live *r);
void kvf__live_note_single(kvf_engine *e);
kvf__live *kvf__live_find(const kvf_engine *e, kvf_request request);
void kvf__live_finish(kvf_engine *e, kvf__live *r, kvf_finish finish, const char *error);
/* Appends the token's bytes to the text; 1 when a stop string is complete (the text is then cut before it), -1 when out of memory. */
int kvf__live_text(kvf_engine *e, kvf__live *r, uint32_t token);

/* text.c: bytes to valid UTF-8, every broken byte as U+FFFD; returns the bytes written (out NULL: needed). */
size_t kvf__utf8_clean(const char *in, size_t n, char *out);

#endif
