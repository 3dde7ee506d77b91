/* bench/layers.h: layers of Llama-3-8B's shape for one sequence, with pages, scores and a policy, as a model's step leaves
 * them: 8 KV heads of 128, 4 query heads each, fp16, blocks of 16 tokens in random order, every number random. */
#ifndef KVF_BENCH_LAYERS_H
#define KVF_BENCH_LAYERS_H

#include "bench/json.h"
#include "d2o_policy/pages.h"

enum { KVF__BENCH_HEADS = 8, KVF__BENCH_PER_KV = 4, KVF__BENCH_DIM = 128, KVF__BENCH_BLOCK = 16 };
enum {
    KVF__BENCH_Q_HEADS = KVF__BENCH_HEADS * KVF__BENCH_PER_KV,
    KVF__BENCH_WIDTH = KVF__BENCH_Q_HEADS * KVF__BENCH_DIM
};

/* Parts of a policy's work, seconds of each. */
enum { KVF__BENCH_BUDGET, KVF__BENCH_MATCH, KVF__BENCH_GATE, KVF__BENCH_APPLY, KVF__BENCH_N_PARTS };

typedef struct kvf__bench_layers {
    uint32_t n_layers, max_slots, max_tokens; /* of a table; of one call of attention */
    kvf_stream *stream;
    kvf_view view;
    kvf_pages pages;
    kvf_score_pages scores;
    kvf_policy_options options;
    kvf_policy_state *state;
    kvf_plan *plan;
    unsigned char *memory; /* all that the pages point to */
    size_t memory_bytes;
    uint32_t *rows, *n_slots, next_pos, seq_index, last_begin;
    uint64_t *row_offset;
    kvf_event *events;
    float *q, *k, *v, *out, *row, *logprobs;
    /* What a prompt's attention adds up, [n_layers] and then as the mass has it, max_slots wide; NULL without max_tokens. */
    float *sums[1], *last[1], *squares[1];
    void *attention_space, *policy_space;
    size_t attention_bytes, policy_bytes;
    uint64_t random;
} kvf__bench_layers;

/* max_slots a multiple of the block, max_tokens 1 for decoding alone, max_evict the most slots of a table that one event takes. */
kvf__bench_layers *kvf__bench_layers_create(uint32_t n_layers, uint32_t max_slots, uint32_t max_tokens,
                                            uint32_t max_evict, uint32_t n_threads);
void kvf__bench_layers_destroy(kvf__bench_layers *x);

/* Sets the path that attention and policies take, "avx2" or "avx512" (as the CPU has it); dies of another name. NULL only asks.
 * Returns its name, "auto" unless it was set. */
const char *kvf__bench_layers_path(const char *name);

/* All tables hold n_slots tokens, spread over positions below next_pos, the last ones next to each other. */
void kvf__bench_layers_fill(kvf__bench_layers *x, uint32_t n_slots, uint32_t next_pos);

/* The sequence begins anew under the options, with room for k = evict_every more slots than keep; keep 0: without sizes. */
void kvf__bench_layers_open(kvf__bench_layers *x, const kvf_policy_options *options, uint32_t keep);

/* Attention of the last n_tokens of a layer. n_tokens 1: a decode step, mass the row or nothing. Else a prompt's: mass what
 * needs (KVF_NEEDS_*) ask for. Seconds. */
double kvf__bench_layers_attend(kvf__bench_layers *x, uint32_t layer, uint32_t n_tokens, uint32_t needs);

/* One token more in all tables: rows and metadata. */
void kvf__bench_layers_append(kvf__bench_layers *x);

/* The policy sees the row of a layer's step. Seconds. */
double kvf__bench_layers_observe(kvf__bench_layers *x, uint32_t layer);

/* All layers shrink to keep in one batch, as an engine runs them after its pass: match, gate, apply. */
void kvf__bench_layers_event(kvf__bench_layers *x, uint32_t keep, kvf_event_kind kind,
                             double parts[KVF__BENCH_N_PARTS]);

/* The same at a prompt's end, with the layers' sizes before it, to what the options' budget gives. */
void kvf__bench_layers_compact(kvf__bench_layers *x, double parts[KVF__BENCH_N_PARTS]);

#endif
