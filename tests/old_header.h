/* old_header.h: declarations as a program has them that was compiled before some structs grew. The structs end early; the
 * functions are those of today. Nothing of include/ is read beside it. */
#ifndef KVF_TESTS_OLD_HEADER_H
#define KVF_TESTS_OLD_HEADER_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvf_manager kvf_manager;
typedef uint64_t kvf_seq;

typedef struct kvf_allocator {
    void *(*alloc)(void *ctx, size_t bytes, size_t alignment);
    void (*free)(void *ctx, void *p, size_t bytes);
    void *ctx;
} kvf_allocator;

typedef struct kvf_manager_config { /* before view_copies and classes */
    size_t struct_size;
    uint32_t n_layers, n_kv_heads, heads_per_group, block_size, n_blocks, n_score_pages, max_seqs, max_slots;
    uint64_t block_bytes;
    kvf_allocator allocator;
    uint32_t prefix_cache, prefix_eviction, n_snapshot_pages, reserved;
    uint64_t snapshot_page_bytes;
    const void *profile;
    uint32_t n_host_blocks, n_host_score_pages;
    const uint32_t *layer_windows;
} kvf_manager_config;

typedef struct kvf_profile_config { /* before clock */
    size_t struct_size;
    uint32_t n_events;
} kvf_profile_config;

typedef struct kvf_append_item {
    kvf_seq seq;
    uint32_t n_tokens;
} kvf_append_item;

typedef struct kvf_view { /* before next_pos and seq_index */
    size_t struct_size;
    uint32_t n_seqs, n_layers, n_groups, heads_per_group, block_size;
    const uint32_t *rows, *score_rows;
    const uint64_t *row_offset;
    const uint32_t *n_slots;
} kvf_view;

typedef struct kvf_pool_occupancy {
    uint32_t n_total, n_free, n_held, n_promised, n_held_max, n_shared;
} kvf_pool_occupancy;

typedef struct kvf_occupancy { /* before the host tier */
    size_t struct_size;
    kvf_pool_occupancy blocks, score_pages;
    uint32_t n_seqs, n_seqs_max;
    uint64_t slots_used, slots_idle;
} kvf_occupancy;

typedef struct kvf_layer_occupancy { /* before slots_idle */
    uint32_t n_blocks, n_blocks_max;
    uint64_t slots_used;
} kvf_layer_occupancy;

typedef struct kvf_profile_layer { /* before the maxima */
    uint64_t entries, held;
} kvf_profile_layer;

typedef struct kvf_profile { /* before all but the pool */
    size_t struct_size;
    uint64_t now, n_calls, n_clock_back, block_bytes, total, free, held;
} kvf_profile;

typedef struct kvf_prefix_key { /* before extras */
    size_t struct_size;
    const uint32_t *tokens;
    uint32_t n_tokens, salt_bytes;
    const void *salt;
} kvf_prefix_key;

typedef struct kvf_prefix_match { /* before snapshots */
    size_t struct_size;
    uint32_t n_tokens, n_blocks;
} kvf_prefix_match;

typedef struct kvf_prefix_stats { /* before all but these */
    size_t struct_size;
    uint64_t queries;
} kvf_prefix_stats;

typedef struct kvf_policy_options { /* before all options */
    size_t struct_size;
    const void *ops;
} kvf_policy_options;

typedef struct kvf_policy_state kvf_policy_state;
typedef struct kvf_policy_state_config { /* before the allocator and n_groups */
    size_t struct_size;
    uint32_t n_layers, n_kv_heads, n_q_heads, n_q_heads_total, q_head_begin, head_dim, block_size, max_seqs, max_slots;
} kvf_policy_state_config;

typedef struct kvf_policy_batch { /* before the sums of prompts */
    size_t struct_size;
    const void *view, *pages, *scores;
    uint32_t layer, row_begin, row_end;
    const void *mass;
} kvf_policy_batch;

typedef struct kvf_prefix_options { /* before partial */
    size_t struct_size;
    uint32_t max_tokens;
    int need_snapshot;
} kvf_prefix_options;

typedef struct kvf_sched kvf_sched;
typedef struct kvf_sched_config { /* before max_prefill_tokens */
    size_t struct_size;
    kvf_manager *manager;
    kvf_policy_state *policies;
    uint32_t max_running, max_waiting, max_batch_tokens, chunk;
} kvf_sched_config;

typedef struct kvf_sched_request { /* before user and samples */
    size_t struct_size;
    uint32_t n_prompt, max_new;
    const kvf_policy_options *options;
} kvf_sched_request;

typedef struct kvf_step_item { /* before prefill_offset */
    uint64_t request;
    kvf_seq seq;
    void *user;
    uint32_t kind, token_begin, n_tokens;
    int prompt_ends, samples;
} kvf_step_item;

#define KVF_AT(type, array, i, bytes) ((const type *)(const void *)((const char *)(array) + (size_t)(i) * (bytes)))
typedef struct kvf_step { /* before ends */
    size_t struct_size, item_bytes, end_bytes;
    const kvf_step_item *items;
    uint32_t n_items, n_decode;
} kvf_step;

typedef struct whole_view { /* before the stamp */
    kvf_view old;
    const uint32_t *next_pos, *seq_index;
} whole_view;

const char *kvf_version(void);
uint32_t kvf_version_number(void);
void kvf_manager_config_init(kvf_manager_config *config, size_t struct_size);
void kvf_profile_config_init(kvf_profile_config *config, size_t struct_size);
int kvf_manager_create(const kvf_manager_config *config, kvf_manager **out, void *err);
void kvf_manager_destroy(kvf_manager *manager);
int kvf_seq_create(kvf_manager *manager, kvf_seq *out);
int kvf_append(kvf_manager *manager, const kvf_append_item *items, uint32_t n_items, void *copies);
int kvf_view_fill(kvf_manager *manager, uint32_t which, const kvf_seq *seqs, uint32_t n_seqs, kvf_view *out);
int kvf_occupancy_read(const kvf_manager *manager, kvf_occupancy *out, kvf_layer_occupancy *layers, size_t layer_bytes);
int kvf_seq_occupancy(const kvf_manager *manager, kvf_seq seq, kvf_layer_occupancy *layers, size_t layer_bytes);
int kvf_profile_read(const kvf_manager *manager, kvf_profile *out, kvf_profile_layer *layers, size_t layer_bytes,
                     uint32_t n_layers);
int kvf_prefix_store(kvf_manager *manager, kvf_seq seq, const kvf_prefix_key *key, uint32_t n_tokens,
                     const void *options, uint32_t *n_stored);
int kvf_prefix_lookup(const kvf_manager *manager, const kvf_prefix_key *key, const void *options,
                      kvf_prefix_match *match);
void kvf_prefix_options_init(kvf_prefix_options *options, size_t struct_size);
int kvf_prefix_stats_read(const kvf_manager *manager, kvf_prefix_stats *out);
int kvf_policy_options_init(kvf_policy_options *options, size_t struct_size, const char *policy, const char *preset,
                            void *err);
int kvf_policy_option_set(kvf_policy_options *options, const char *name, const char *value, void *err);
int kvf_policy_options_check(const kvf_policy_options *options, uint32_t n_layers, uint32_t block_size, void *err);
int kvf_policy_evicts(const kvf_policy_options *options);
uint32_t kvf_policy_needs(const kvf_policy_options *options);
int kvf_policy_state_create(const kvf_policy_state_config *config, kvf_policy_state **out, void *err);
void kvf_policy_state_destroy(kvf_policy_state *state);
int kvf_policy_open(kvf_policy_state *state, uint32_t seq, const kvf_policy_options *options, void *err);
int kvf_policy_metric(kvf_policy_state *state, void *stream, const kvf_policy_batch *batch, uint32_t row,
                      uint32_t n_tokens, double *values, void *err);
void kvf_sched_config_init(kvf_sched_config *config, size_t struct_size);
int kvf_sched_create(const kvf_sched_config *config, kvf_sched **out, void *err);
void kvf_sched_destroy(kvf_sched *sched);
int kvf_sched_submit(kvf_sched *sched, const kvf_sched_request *request, uint64_t *out);
int kvf_sched_plan(kvf_sched *sched, uint64_t now, kvf_step *step);
int kvf_sched_done(kvf_sched *sched);
int kvf_sched_prompt_done(kvf_sched *sched, uint64_t request);

#endif
