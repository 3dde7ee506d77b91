/* engine/internal.h: what the engine's files share.
 *
 * Glossary
 *   live     a request from submission to its on_finish; all live requests form one list
 *   row      a sequence's place in the step's view
 *   sums     column sums of running prompts: [n_layers][n_q_heads][max_prefill_tokens]; a prompt owns the token
 *            columns [prefill_offset, prefill_offset + n_prompt)
 *   events   compactions of one moment, run together: begin, match, gate, apply, commit
 *
 * Invariant: a request has seq != 0 exactly while it was in the last planned step and was neither preempted nor ended.
 */
#ifndef KVF_ENGINE_INTERNAL_H
#define KVF_ENGINE_INTERNAL_H

#include "base/base.h"
#include "kvfold/engine.h"

typedef struct kvf__live {
    struct kvf__live *next, *prev;
    kvf_request id;
    kvf_seq seq;
    uint32_t *tokens;     /* known: the prompt, then what was generated; capacity n_prompt + max_tokens */
    uint32_t *forced;     /* [max_tokens] or NULL */
    double *logprobs;     /* [max_tokens] */
    uint32_t *top_tokens; /* [max_tokens][n_top], NULL when n_top is 0 */
    double *top_logprobs; /* likewise */
    uint32_t n_top;
    uint32_t n_prompt, n_known, max_tokens;
    kvf_sampling sampling;
    kvf_policy_options policy;
    char **stop;
    uint32_t n_stop;
    size_t stop_bytes_max;
    int ignore_end, in_prompt, abort;
    int changed; /* its budget: due before the next step */
    char *text;  /* bytes of the generated tokens */
    size_t text_bytes, text_capacity;
    uint32_t n_preempted;
    uint64_t blocks_needed; /* of its exact sizes, once they found no room */
    double submitted, first_token;
    void *user;
    void (*on_token)(void *user, kvf_request request, uint32_t token, double logprob);
    void (*on_finish)(void *user, const kvf_result *result);
} kvf__live;

typedef struct kvf__buffer { /* one allocation of the engine */
    void *p;
    size_t bytes;
} kvf__buffer;

enum { KVF__ENGINE_BUFFERS = 32 };

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
    uint32_t n_groups, n_tables, max_batch_tokens, max_running;

    kvf__live *first, *last;
    uint32_t n_live;
    int in_step, destroying;

    /* Per step, [max_running] unless said otherwise. */
    kvf__live **rows; /* request of each row of the step's view */
    kvf_seq *seqs;
    uint32_t *tokens;                       /* [max_batch_tokens] */
    uint32_t *q_begin, *out_rows, *sampled; /* [max_running + 1] */
    double *sampled_logprob;
    uint8_t *row_wanted, *row_gqa;
    float **prompt_sums;
    float *sums;          /* see the glossary */
    float *row;           /* [max_running][n_kv_heads][max_slots] */
    float *logits;        /* [max_running][n_vocab] */
    void *sample_scratch; /* [n_threads][n_vocab] of 8 bytes */
    void *workspace;      /* for match, gate and apply */
    size_t workspace_bytes;
    kvf_event *events; /* [max_running * n_layers], as are the next three */
    kvf_event *batch_events;
    kvf_compact_item *items;
    uint32_t *item_of_event, *batch_items;
    uint32_t *slots, *keep; /* [n_layers] */
    uint32_t *table_slots;  /* [n_tables] */
    kvf_layer_occupancy *layers, *result_layers;
    /* Figures of the only request in the pool before a plan that may end it: afterwards its sequence is gone. */
    kvf_result lone;
    kvf_layer_occupancy *lone_layers;
    kvf_layer_size *lone_sizes;
    double *lone_density;
    kvf_view view; /* of the step */
    const kvf_policy_batch *observing;

    kvf_engine_stats stats;
    uint64_t done_merged, done_dropped, done_kept;
    kvf__buffer buffers[KVF__ENGINE_BUFFERS];
    uint32_t n_buffers;
};

/* events.c */
kvf_status kvf__engine_overflow(kvf_engine *e, kvf_error *err);
kvf_status kvf__engine_prompt_end(kvf_engine *e, uint32_t row, kvf_error *err);
kvf_status kvf__engine_decode_events(kvf_engine *e, uint32_t n_decode, kvf_error *err);
kvf_status kvf__engine_observe(void *ctx, uint32_t layer, const kvf_mass *mass);

/* request.c */
void kvf__live_note_lone(kvf_engine *e);
kvf__live *kvf__live_find(const kvf_engine *e, kvf_request request);
void kvf__live_finish(kvf_engine *e, kvf__live *r, kvf_finish finish, const char *error);
/* Appends the token's bytes to the text; 1 when a stop string is complete (the text is then cut before it), -1 when out of memory. */
int kvf__live_text(kvf_engine *e, kvf__live *r, uint32_t token);

/* text.c: bytes to valid UTF-8, every broken byte as U+FFFD; returns the bytes written (out NULL: needed). */
size_t kvf__utf8_clean(const char *in, size_t n, char *out);

#endif
