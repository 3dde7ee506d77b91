/* calls_world.h: one of each object, for the calls that test_calls.c tries; and what a call needs to have happened. */
#ifndef KVF_TESTS_CALLS_WORLD_H
#define KVF_TESTS_CALLS_WORLD_H

#include <stdlib.h>

#include "tests/calls.h"

enum { BS = 8, N_BLOCKS = 64, HEADS = 2, DIM = 8, TOKENS = 12, FLOATS = N_BLOCKS * HEADS * BS };

static _Alignas(64) unsigned char workspace[1 << 20];
static float keys[FLOATS * DIM], values[FLOATS * DIM], host_keys[FLOATS * DIM], host_values[FLOATS * DIM];
static float prompt_sums[2 * HEADS * TOKENS];
static float norms[FLOATS], host_norms[FLOATS], rows[TOKENS * HEADS * DIM], score_floats[4096], host_scores[4096];
static uint32_t pos[FLOATS], host_pos[FLOATS];

static struct world {
    kvf_error err;
    kvf_manager *m, *new_m, *sm;
    kvf_manager_config mc;
    kvf_profile_config pc;
    kvf_copy items[64];
    kvf_copy_list copies;
    kvf_seq seq, empty, new_seq;
    kvf_append_item append[2];
    uint32_t slots[8], n, n2, ids[16], q_begin[3];
    uint64_t wide, wide2;
    int flag;
    size_t bytes;
    const uint32_t *row;
    kvf_reserve reserve;
    kvf_compact_item compact;
    kvf_compaction compaction;
    kvf_view view;
    kvf_view_changes changes;
    kvf_policy_counts counts;
    kvf_block block;
    kvf_occupancy occupancy;
    kvf_layer_occupancy layers[2];
    kvf_pool_occupancy pool, pool2;
    kvf_prefix_key key;
    uint32_t tokens[TOKENS];
    kvf_prefix_extra extras[2];
    kvf_prefix_options prefix;
    kvf_prefix_match match, found;
    kvf_prefix_store_options store;
    kvf_prefix_stats stats;
    kvf_profile profile;
    kvf_profile_layer profile_layers[2];
    kvf_profile_event events[8];
    kvf_stream *stream, *new_stream;
    kvf_pages pages, host_pages;
    kvf_score_pages scores, host_scores;
    kvf_attention a;
    kvf_mass mass;
    kvf_csr csr;
    int32_t indptr[3], indices[64], last[2];
    kvf_policy_options options, new_options;
    kvf_policy_need need;
    kvf_policy_state_config sc;
    kvf_policy_state *state, *new_state, *sp;
    kvf_layer_size sizes[2];
    kvf_policy_batch batch;
    kvf_plan *plan, *new_plan;
    kvf_event event;
    float *sums[1];
    double values[2 * HEADS];
    kvf_events_config ec;
    kvf_events *driver, *new_events;
    kvf_moment_rows moment;
    uint32_t n_prompt[1];
    kvf_policy_slots policy_slots;
    float worth[BS];
    char text[64];
    kvf_sched_config schedc;
    kvf_sched *sched, *new_sched;
    kvf_sched_request request;
    kvf_request name, new_name, names[2];
    void *users[2];
    kvf_step step;
    kvf_step_item item;
    kvf_sched_segment segment;
    kvf_sched_prefix sched_prefix;
} w;

/* Has no gigabyte to give. */
static void *small_alloc(void *ctx, size_t bytes, size_t align) {
    (void)ctx;
    return bytes >> 30 ? NULL : aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void small_free(void *ctx, void *p, size_t bytes) {
    (void)ctx, (void)bytes;
    free(p);
}
static const kvf_allocator small = {small_alloc, small_free, NULL};

#define NEED(call_) cr_assert_eq((call_), KVF_OK, "%s: %s", #call_, kvf_sched_error(w.sched)->text)

/* ---- The world --------------------------------------------------------------------------------------- */

static void begin_manager(void) {
    kvf_profile_config_init(&w.pc, sizeof w.pc);
    w.pc.n_events = 16;
    kvf_manager_config_init(&w.mc, sizeof w.mc);
    w.mc.n_layers = 2;
    w.mc.n_kv_heads = HEADS;
    w.mc.block_size = BS;
    w.mc.n_blocks = N_BLOCKS;
    w.mc.n_score_pages = 16;
    w.mc.max_seqs = 4;
    w.mc.max_slots = 64;
    w.mc.n_host_blocks = 32;
    w.mc.n_host_score_pages = 8;
    w.mc.view_copies = 1;
    w.mc.prefix_cache = 1;
    w.mc.n_snapshot_pages = 8;
    w.mc.profile = &w.pc;
    NEED(kvf_manager_create(&w.mc, &w.m, NULL));
    w.copies = (kvf_copy_list){w.items, 0, 64};
    NEED(kvf_seq_create(w.m, &w.seq));
    NEED(kvf_seq_create(w.m, &w.empty));
    w.append[0] = (kvf_append_item){w.seq, TOKENS};
    NEED(kvf_append(w.m, w.append, 1, &w.copies));
    w.append[0].n_tokens = 1;
    w.append[1] = (kvf_append_item){w.empty, 1};
    for (uint32_t i = 0; i < 8; i++) w.slots[i] = 8;
    w.reserve = (kvf_reserve){.struct_size = sizeof w.reserve, .n_slots = w.slots};
    w.compact = (kvf_compact_item){.seq = w.seq, .layer = 0, .n_keep = 8};
}

static void begin_prefix(void) {
    for (uint32_t i = 0; i < TOKENS; i++) w.tokens[i] = i;
    w.key = (kvf_prefix_key){.struct_size = sizeof w.key, .tokens = w.tokens, .n_tokens = TOKENS};
    kvf_prefix_options_init(&w.prefix, sizeof w.prefix);
    w.prefix.need_snapshot = 1;
    w.store = (kvf_prefix_store_options){.struct_size = sizeof w.store};
    NEED(kvf_prefix_store(w.m, w.seq, &w.key, 8, NULL, NULL));
    NEED(kvf_prefix_snapshot_put(w.m, w.seq, &w.key, 8, 0, w.ids, 16, &w.n));
    w.match.struct_size = sizeof w.match;
    w.found.struct_size = sizeof w.found;
    w.counts.struct_size = sizeof w.counts;
    w.changes.struct_size = sizeof w.changes;
    NEED(kvf_prefix_lookup(w.m, &w.key, &w.prefix, &w.match));
    cr_assert_eq(w.match.n_tokens, 8);
    w.stats.struct_size = sizeof w.stats;
    w.profile.struct_size = sizeof w.profile;
    w.occupancy.struct_size = sizeof w.occupancy;
}

static kvf_pages pages_of(float *k, float *v, uint32_t *at, float *norm, uint32_t n_blocks) {
    return (kvf_pages){.struct_size = sizeof(kvf_pages),
                       .dtype = KVF_F32,
                       .n_blocks = n_blocks,
                       .block_size = BS,
                       .heads_per_group = HEADS,
                       .head_dim = DIM,
                       .k = k,
                       .v = v,
                       .k_block_stride = HEADS * BS * DIM * sizeof(float),
                       .v_block_stride = HEADS * BS * DIM * sizeof(float),
                       .pos = at,
                       .key_norm = norm};
}

static void begin_attention(void) {
    NEED(kvf_stream_create_cpu(NULL, 1, &w.stream, NULL));
    w.view.struct_size = sizeof w.view;
    NEED(kvf_view_fill(w.m, 0, &w.seq, 1, &w.view));
    w.pages = pages_of(keys, values, pos, norms, N_BLOCKS);
    w.host_pages = pages_of(host_keys, host_values, host_pos, host_norms, 32);
    w.scores = (kvf_score_pages){sizeof w.scores, score_floats, 16, 1, HEADS, BS};
    w.host_scores = (kvf_score_pages){sizeof w.scores, host_scores, 8, 1, HEADS, BS};
    w.q_begin[1] = 1;
    w.mass.struct_size = sizeof w.mass;
    w.a = (kvf_attention){.struct_size = sizeof w.a,
                          .view = &w.view,
                          .pages = &w.pages,
                          .seq_end = 1,
                          .n_q_heads = HEADS,
                          .q_begin = w.q_begin,
                          .q = rows,
                          .k = rows,
                          .v = rows,
                          .q_stride = HEADS * DIM,
                          .kv_stride = HEADS * DIM,
                          .out = norms,
                          .out_stride = HEADS * DIM,
                          .mass = &w.mass,
                          .workspace = workspace,
                          .workspace_bytes = sizeof workspace};
    w.csr = (kvf_csr){sizeof w.csr, w.indptr, w.indices, w.last, 64, 0};
}

static void begin_policy(void) {
    NEED(kvf_policy_options_init(&w.options, sizeof w.options, "h2o", NULL, NULL));
    w.options.rho = 0.5;
    w.sc = (kvf_policy_state_config){.struct_size = sizeof w.sc,
                                     .n_layers = 2,
                                     .n_kv_heads = HEADS,
                                     .n_q_heads = HEADS,
                                     .head_dim = DIM,
                                     .block_size = BS,
                                     .max_seqs = 4,
                                     .max_slots = 64};
    NEED(kvf_policy_state_create(&w.sc, &w.state, NULL));
    NEED(kvf_policy_open(w.state, 0, &w.options, NULL));
    w.batch = (kvf_policy_batch){.struct_size = sizeof w.batch,
                                 .view = &w.view,
                                 .pages = &w.pages,
                                 .scores = &w.scores,
                                 .workspace = workspace,
                                 .workspace_bytes = sizeof workspace};
    NEED(kvf_plan_create(NULL, HEADS, 4, 64, &w.plan, NULL));
    w.policy_slots = (kvf_policy_slots){.struct_size = sizeof w.policy_slots,
                                        .options = &w.options,
                                        .size = w.sizes,
                                        .n_slots = BS,
                                        .n_keep = 4,
                                        .next_pos = BS,
                                        .pos = pos,
                                        .score = norms,
                                        .scratch = rows};
}

static void begin_events(void) {
    w.n_prompt[0] = TOKENS;
    w.sums[0] = prompt_sums;
    w.ec = (kvf_events_config){.struct_size = sizeof w.ec, .manager = w.m, .policies = w.state};
    NEED(kvf_events_create(&w.ec, &w.driver, NULL));
    w.moment = (kvf_moment_rows){.struct_size = sizeof w.moment,
                                 .moment = KVF_AFTER_STEP,
                                 .view = &w.view,
                                 .seqs = &w.seq,
                                 .row_end = 1,
                                 .pages = &w.pages,
                                 .scores = &w.scores,
                                 .n_prompt = w.n_prompt};
}

static void begin_sched(void) {
    kvf_manager_config c = w.mc;
    c.max_slots = 64;
    NEED(kvf_manager_create(&c, &w.sm, NULL));
    NEED(kvf_policy_state_create(&w.sc, &w.sp, NULL));
    w.step.struct_size = sizeof w.step;
    kvf_sched_config_init(&w.schedc, sizeof w.schedc);
    w.schedc.manager = w.sm;
    w.schedc.policies = w.sp;
    w.schedc.chunk = 16;
    w.schedc.max_waiting = 8;
    NEED(kvf_sched_create(&w.schedc, &w.sched, NULL));
    NEED(kvf_policy_options_init(&w.new_options, sizeof w.new_options, "h2o", NULL, NULL));
    w.request = (kvf_sched_request){.struct_size = sizeof w.request,
                                    .n_prompt = TOKENS,
                                    .max_new = 4,
                                    .options = &w.new_options,
                                    .n_samples = 2,
                                    .forks = 1,
                                    .sample_names = w.names};
    NEED(kvf_sched_submit(w.sched, &w.request, &w.name));
    w.request.sample_names = NULL;
    w.request.n_samples = 0;
    w.request.forks = 0;
    w.sched_prefix = (kvf_sched_prefix){.struct_size = sizeof w.sched_prefix, .key = w.key};
}

static void begin(void) {
    w = (struct world){.flag = 0};
    begin_manager();
    begin_prefix();
    begin_attention();
    begin_policy();
    begin_events();
    begin_sched();
}

static void end(void) {
    kvf_sched_destroy(w.sched);
    kvf_sched_destroy(w.new_sched);
    kvf_manager_destroy(w.sm);
    kvf_policy_state_destroy(w.sp);
    kvf_events_destroy(w.driver);
    kvf_events_destroy(w.new_events);
    kvf_plan_destroy(w.plan);
    kvf_plan_destroy(w.new_plan);
    kvf_policy_state_destroy(w.state);
    kvf_policy_state_destroy(w.new_state);
    kvf_stream_destroy(w.stream);
    kvf_stream_destroy(w.new_stream);
    if (w.m) NEED(kvf_audit(w.m, NULL));
    kvf_manager_destroy(w.m);
    kvf_manager_destroy(w.new_m);
}

static const char *text_of(char of) {
    return of == 'm'   ? kvf_manager_error(w.m)->text
           : of == 's' ? kvf_sched_error(w.sched)->text
           : of == 'p' ? kvf_policy_state_error(w.state)
                       : NULL;
}

/* ---- What a call needs to have happened ------------------------------------------------------------------ */

/* Given away, so that end() does not destroy it again. */
#define TAKEN(type, name)             \
    static type *taken_##name(void) { \
        type *p = w.name;             \
        w.name = NULL;                \
        return p;                     \
    }
TAKEN(kvf_manager, m)
TAKEN(kvf_stream, stream)
TAKEN(kvf_policy_state, state)
TAKEN(kvf_plan, plan)
TAKEN(kvf_events, driver)
TAKEN(kvf_sched, sched)

/* A batch with one event, of a prompt whose budget it fits: nothing is evicted, its sums become scores. */
static const kvf_policy_batch *ready(void) {
    NEED(kvf_policy_budget(w.state, 0, NULL, TOKENS, NULL));
    NEED(kvf_seq_take_scores(w.m, w.seq, (uint32_t[2]){TOKENS, TOKENS}));
    NEED(kvf_view_fill(w.m, 0, &w.seq, 1, &w.view));
    w.event = (kvf_event){.n_keep = TOKENS};
    w.batch.events = &w.event;
    w.batch.n_events = 1;
    w.batch.prompt_sums = w.sums;
    w.batch.prompt_stride = TOKENS;
    return &w.batch;
}
static const kvf_policy_batch *matched(void) {
    NEED(kvf_policy_match(w.state, NULL, ready(), w.plan, NULL));
    return &w.batch;
}
static const kvf_policy_batch *gated(void) {
    NEED(kvf_policy_gate(w.state, NULL, matched(), w.plan, NULL));
    return &w.batch;
}
static kvf_manager *compacting(void) {
    NEED(kvf_compact_begin(w.m, &w.compact, 1, &w.compaction));
    return w.m;
}
static kvf_seq swapped(void) {
    NEED(kvf_swap_out(w.m, &w.seq, 1, &w.copies));
    NEED(kvf_copies_done(w.m, &w.copies));
    return w.seq;
}
static const kvf_seq *swapped_list(void) {
    swapped();
    return &w.seq;
}
static kvf_block taken_block(void) {
    NEED(kvf_block_take(w.m, 0, &w.block));
    return w.block;
}
static kvf_request planned(void) {
    NEED(kvf_sched_plan(w.sched, 0, &w.step));
    return w.name;
}
static kvf_request prompt_run(void) {
    planned();
    NEED(kvf_sched_done(w.sched));
    return w.name;
}
/* Of two samples with options of their own. */
static kvf_request forked_prompt(void) {
    const kvf_policy_options *const own[] = {&w.new_options, &w.new_options};
    for (int i = 0; i < 2; i++) NEED(kvf_sched_finish(w.sched, w.names[i]));
    w.request.n_samples = 2;
    w.request.sample_options = own;
    NEED(kvf_sched_submit(w.sched, &w.request, &w.name));
    return prompt_run();
}
static kvf_request running(void) {
    prompt_run();
    NEED(kvf_sched_prompt_done(w.sched, w.name));
    w.names[0] = w.name;
    return w.name;
}
/* One without samples, told all that it may generate. */
static kvf_request answered(void) {
    for (int i = 0; i < 2; i++) NEED(kvf_sched_finish(w.sched, w.names[i]));
    w.request.max_new = 1;
    NEED(kvf_sched_submit(w.sched, &w.request, &w.name));
    running();
    NEED(kvf_sched_token(w.sched, w.name, &w.flag));
    return w.name;
}
static kvf_request paused(void) {
    answered();
    NEED(kvf_sched_pause(w.sched, w.name));
    w.segment = (kvf_sched_segment){TOKENS + 1, TOKENS + 5};
    return w.name;
}
static kvf_request two_run(void) {
    NEED(kvf_sched_submit(w.sched, &w.request, &w.names[1]));
    NEED(kvf_sched_submit(w.sched, &w.request, &w.names[1]));
    return running();
}

#endif
