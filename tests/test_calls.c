/* Every public function of libkvfold with wrong arguments: tests/calls.h. */
#include "tests/calls_world.h"

/* clang-format off */
#define CALLS(S, V) \
    V(kvf_status_text, "a", KVF_OK) \
    V(kvf_manager_config_init, "a-", &w.mc, sizeof w.mc) \
    V(kvf_profile_config_init, "a-", &w.pc, sizeof w.pc) \
    V(kvf_prefix_options_init, "a-", &w.prefix, sizeof w.prefix) \
    V(kvf_sched_config_init, "a-", &w.schedc, sizeof w.schedc) \
    V(kvf_status_name, "a", KVF_OK) \
    V(kvf_dtype_bytes, "a", KVF_F32) \
    S('n', kvf_stream_create_cpu, "ofie", &small, 1u, &w.new_stream, &w.err) \
    V(kvf_stream_destroy, "a", taken_stream()) \
    V(kvf_stream_n_threads, "a", w.stream) \
    S('n', kvf_manager_bytes, "iie", &w.mc, &w.bytes, &w.err) \
    S('n', kvf_manager_create, "iie", &w.mc, &w.new_m, &w.err) \
    V(kvf_manager_destroy, "a", taken_m()) \
    V(kvf_manager_error, "a", w.m) \
    V(kvf_manager_get_config, "a", w.m) \
    S('m', kvf_copies_done, "ii", w.m, &w.copies) \
    S('m', kvf_seq_create, "ii", w.m, &w.new_seq) \
    S('m', kvf_seq_fork, "ifoi", w.m, w.seq, &w.copies, &w.new_seq) \
    S('m', kvf_seq_free, "if", w.m, w.seq) \
    S('m', kvf_seq_index, "ifi", w.m, w.seq, &w.n) \
    S('m', kvf_seq_table, "ifiiooo", w.m, w.seq, 0u, 0u, &w.n, &w.n2, &w.row) \
    S('m', kvf_seq_next_pos, "ifi", w.m, w.seq, &w.n) \
    S('m', kvf_seq_reserve, "ifi", w.m, w.seq, &w.reserve) \
    S('m', kvf_seq_take_scores, "ifi", w.m, w.seq, w.slots) \
    S('m', kvf_append, "iifo", w.m, w.append, 2u, &w.copies) \
    S('m', kvf_can_append, "iifo", w.m, w.append, 2u, &w.n) \
    S('m', kvf_seq_rollback, "ifi", w.m, w.empty, 0u) \
    S('m', kvf_swap_out, "iifo", w.m, &w.empty, 1u, &w.copies) \
    S('m', kvf_swap_in, "iifof", w.m, swapped_list(), 1u, 0u, &w.copies) \
    S('m', kvf_seq_is_swapped, "ifi", w.m, swapped(), &w.flag) \
    S('m', kvf_compact_begin, "iiii", w.m, &w.compact, 1u, &w.compaction) \
    S('m', kvf_compact_commit, "i", compacting()) \
    S('m', kvf_compact_cancel, "i", compacting()) \
    S('m', kvf_view_fill, "iiifi", w.m, 0u, &w.seq, 1u, &w.view) \
    V(kvf_view_row_entries, "a", w.m) \
    S('m', kvf_view_read_changes, "iii", w.m, 0u, &w.changes) \
    S('m', kvf_view_forget, "ii", w.m, 0u) \
    S('m', kvf_block_take, "iii", w.m, 0u, &w.block) \
    S('m', kvf_block_hold, "ifi", w.m, kvf_block_id(taken_block()), &w.block) \
    S('m', kvf_block_release, "if", w.m, taken_block()) \
    V(kvf_block_id, "a", w.block) \
    S('m', kvf_occupancy_read, "iio-", w.m, &w.occupancy, w.layers, sizeof *w.layers) \
    S('m', kvf_class_occupancy, "iiioo", w.m, 0u, &w.pool, &w.pool2, &w.n) \
    S('m', kvf_seq_occupancy, "ifi-", w.m, w.seq, w.layers, sizeof *w.layers) \
    S('m', kvf_seq_sharing, "ifoo", w.m, w.seq, &w.wide, &w.wide2) \
    S('m', kvf_audit, "ie", w.m, &w.err) \
    S('m', kvf_prefix_lookup, "iioi", w.m, &w.key, &w.prefix, &w.found) \
    S('m', kvf_prefix_attach, "ifiioo", w.m, w.empty, &w.key, &w.match, &w.reserve, &w.copies) \
    S('m', kvf_prefix_offload, "iooo", w.m, 1u, &w.copies, &w.n) \
    S('m', kvf_prefix_store, "ifiioo", w.m, w.seq, &w.key, 8u, &w.store, &w.n) \
    S('m', kvf_prefix_tick, "io", w.m, UINT64_C(7)) \
    S('m', kvf_prefix_snapshot_put, "ifififoi", w.m, w.seq, &w.key, 8u, 0u, w.ids, 16u, &w.n) \
    S('m', kvf_prefix_snapshot_get, "iii-i", w.m, &w.match, w.ids, 16u, &w.n) \
    S('m', kvf_prefix_drop, "iif", w.m, w.text, 1u) \
    S('m', kvf_prefix_clear, "i", w.m) \
    S('m', kvf_prefix_stats_read, "ii", w.m, &w.stats) \
    S('m', kvf_profile_tick, "io", w.m, UINT64_C(7)) \
    S('n', kvf_profile_read, "iio-i", w.m, &w.profile, w.profile_layers, sizeof *w.profile_layers, 2u) \
    V(kvf_histogram_floor, "a", 1u) \
    V(kvf_profile_kind_name, "a", 1u) \
    S('n', kvf_profile_drain, "ii-i", w.m, w.events, 8u, &w.n) \
    V(kvf_pages_block_bytes, "a", &w.pages) \
    S('n', kvf_attention_workspace_bytes, "aaaaaaai", 1u, 8u, 2u, 2u, 64u, 1u, 16u, &w.bytes) \
    S('n', kvf_attention_append, "oie", w.stream, &w.a, &w.err) \
    S('n', kvf_attention_prefill, "oie", w.stream, &w.a, &w.err) \
    S('n', kvf_attention_decode, "oie", w.stream, &w.a, &w.err) \
    S('n', kvf_view_csr, "ioiiie", &w.view, &w.pages, 0u, 0u, &w.csr, &w.err) \
    S('n', kvf_copies_run, "ioooi", &w.pages, &w.scores, &w.host_pages, &w.host_scores, &w.copies) \
    S('n', kvf_copies_queue, "ooioooie", kvf_device_cpu(), w.stream, &w.pages, &w.scores, &w.host_pages, &w.host_scores, \
      &w.copies, &w.err) \
    V(kvf_cpu_has_path, "a", KVF_CPU_AUTO) \
    V(kvf_policy_option_list, "a", &w.n) \
    S('n', kvf_policy_options_init, "i-foe", &w.new_options, sizeof w.new_options, "h2o", "default", &w.err) \
    S('n', kvf_policy_options_init_ops, "i-ie", &w.new_options, sizeof w.new_options, w.options.ops, &w.err) \
    S('n', kvf_policy_options_read, "i-ie", &w.new_options, sizeof w.new_options, &w.options, &w.err) \
    S('n', kvf_policy_options_resolve, "iooe", &w.options, 2u, UINT64_C(128), &w.err) \
    S('n', kvf_policy_option_set, "ifie", &w.options, "rho", "0.5", &w.err) \
    S('n', kvf_policy_option_get, "ifi-", &w.options, "rho", w.text, sizeof w.text) \
    S('n', kvf_policy_options_check, "iioe", &w.options, 2u, 8u, &w.err) \
    V(kvf_policy_find, "a", "h2o") \
    V(kvf_policy_name, "a", 0u) \
    V(kvf_policy_preset, "aa", "d2o", 0u) \
    V(kvf_policy_preset_for, "aa", "fold", 0u) \
    V(kvf_policy_evicts, "a", &w.options) \
    V(kvf_policy_flags, "a", &w.options) \
    V(kvf_policy_has_metric, "a", &w.options) \
    V(kvf_policy_needs, "a", &w.options) \
    V(kvf_policy_n_arrays, "a", &w.options) \
    V(kvf_policy_observes, "a", &w.options) \
    V(kvf_policy_needs_weights, "a", &w.options) \
    S('n', kvf_policy_project, "iaaaaaie", &w.options, 2u, 1u, 8u, 64u, 16u, &w.need, &w.err) \
    S('n', kvf_policy_state_create, "iie", &w.sc, &w.new_state, &w.err) \
    V(kvf_policy_state_destroy, "a", taken_state()) \
    S('n', kvf_policy_open, "iiie", w.state, 1u, &w.options, &w.err) \
    S('n', kvf_policy_set_budget, "fffie", w.state, 0u, 0.25, 0u, &w.err) \
    S('n', kvf_policy_preview_budget, "fffiiie", w.state, 0u, 0.25, 0u, w.sizes, &w.flag, &w.err) \
    S('p', kvf_policy_fork, "iff", w.state, 0u, 1u) \
    V(kvf_policy_state_error, "a", w.state) \
    V(kvf_policy_close, "aa", w.state, 0u) \
    V(kvf_policy_get_options, "aa", w.state, 0u) \
    V(kvf_policy_sizes, "aa", w.state, 0u) \
    V(kvf_policy_group_sizes, "aa", w.state, 0u) \
    V(kvf_policy_density, "aa", w.state, 0u) \
    V(kvf_policy_tau, "aaaa", w.state, 0u, 0u, 0u) \
    S('n', kvf_policy_get_counts, "iai", w.state, 0u, &w.counts) \
    S('n', kvf_policy_observe, "ioie", w.state, w.stream, &w.batch, &w.err) \
    S('n', kvf_policy_metric, "ioifoie", w.state, w.stream, &w.batch, 0u, TOKENS, w.values, &w.err) \
    S('n', kvf_policy_budget, "ifofe", w.state, 0u, w.values, TOKENS, &w.err) \
    S('n', kvf_policy_match, "ioiie", w.state, w.stream, ready(), w.plan, &w.err) \
    S('n', kvf_policy_gate, "ioiie", w.state, w.stream, matched(), w.plan, &w.err) \
    S('n', kvf_policy_apply, "ioiie", w.state, w.stream, gated(), w.plan, &w.err) \
    S('n', kvf_events_create, "iie", &w.ec, &w.new_events, &w.err) \
    V(kvf_events_destroy, "a", taken_driver()) \
    S('n', kvf_events_run, "iie", w.driver, &w.moment, &w.err) \
    S('n', kvf_policy_due, "ioifaiie", w.state, w.stream, &w.batch, 0u, KVF_AFTER_STEP, w.ids, &w.n, &w.err) \
    S('n', kvf_plan_create, "oaffie", &small, HEADS, 1u, UINT64_C(8), &w.new_plan, &w.err) \
    V(kvf_plan_destroy, "a", taken_plan()) \
    S('n', kvf_policy_workspace_bytes, "aaaai", 1u, 8u, 2u, 64u, &w.bytes) \
    V(kvf_policy_worth, "aa", &w.policy_slots, w.worth) \
    S('n', kvf_sched_create, "iie", &w.schedc, &w.new_sched, &w.err) \
    V(kvf_sched_destroy, "a", taken_sched()) \
    V(kvf_sched_error, "a", w.sched) \
    S('s', kvf_sched_submit, "iii", w.sched, &w.request, &w.new_name) \
    S('s', kvf_sched_plan, "ioi", w.sched, UINT64_C(1), &w.step) \
    S('s', kvf_sched_done, "i", (planned(), w.sched)) \
    S('s', kvf_sched_cancel, "i", (planned(), w.sched)) \
    S('s', kvf_sched_undo, "i", (planned(), w.sched)) \
    V(kvf_sched_counts, "aaa", w.sched, &w.n, &w.n2) \
    V(kvf_sched_ahead, "aaa", w.sched, w.users, 2u) \
    S('s', kvf_sched_token, "ifo", w.sched, running(), &w.flag) \
    S('s', kvf_sched_pause, "if", w.sched, answered()) \
    S('s', kvf_sched_extend, "ifiio", w.sched, paused(), &w.segment, 1u, 2u) \
    S('s', kvf_sched_prompt_done, "if", w.sched, prompt_run()) \
    S('s', kvf_sched_fork_prompt, "if", w.sched, forked_prompt()) \
    S('s', kvf_sched_fork, "ifoi", w.sched, running(), (void *)&w, &w.new_name) \
    V(kvf_sched_copies, "a", w.sched) \
    V(kvf_sched_seq, "aa", w.sched, w.name) \
    S('s', kvf_sched_shed, "ii", (two_run(), w.sched), &w.item) \
    S('s', kvf_sched_event_room, "if", w.sched, running()) \
    S('s', kvf_sched_set_prefix, "ifi", w.sched, w.name, &w.sched_prefix) \
    S('s', kvf_sched_resize, "if", w.sched, running()) \
    S('s', kvf_sched_set_budgets, "iifff", w.sched, w.names, 1u, 0.5, 0u) \
    S('s', kvf_sched_set_budget, "ifff", w.sched, w.name, 0.5, 0u) \
    S('s', kvf_sched_finish, "if", w.sched, w.name)
/* clang-format on */
CALLS(S_RUN, V_RUN)
static const call calls[] = {CALLS(S_CALL, V_CALL)};

/* clang-format off */
#define LOOKUP kvf_prefix_lookup(w.m, &w.key, &w.prefix, &w.found)
#define CREATE kvf_manager_create(&w.mc, &w.new_m, &w.err)
#define SUBMIT kvf_sched_submit(w.sched, &w.request, &w.new_name)
#define APPEND kvf_attention_append(w.stream, &w.a, &w.err)
#define PREFILL kvf_attention_prefill(w.stream, &w.a, &w.err)
#define CSR kvf_view_csr(&w.view, NULL, 0, 0, &w.csr, &w.err)
#define RUN kvf_copies_run(&w.pages, NULL, NULL, NULL, &w.copies)
#define STATE kvf_policy_state_create(&w.sc, &w.new_state, &w.err)
#define CHECK kvf_policy_options_check(&w.options, 2, BS, &w.err)
#define MATCH kvf_policy_match(w.state, w.stream, &w.batch, w.plan, &w.err)
#define SCHED kvf_sched_create(&w.schedc, &w.new_sched, &w.err)
#define FIELDS(F) \
    F(append_tokens, 'm', "f", w.append[0].n_tokens = UINT32_MAX, kvf_append(w.m, w.append, 1, &w.copies)) \
    F(append_seq, 'm', "f", w.append[0].seq = 0, kvf_append(w.m, w.append, 1, &w.copies)) \
    F(fork_items, 'm', "o", w.copies.items = NULL, kvf_seq_fork(w.m, w.seq, &w.copies, &w.new_seq)) \
    F(out_items, 'm', "f", w.copies.items = NULL, kvf_swap_out(w.m, &w.seq, 1, &w.copies)) \
    F(out_n, 'm', "f", w.copies.n = UINT32_MAX, kvf_swap_out(w.m, &w.seq, 1, &w.copies)) \
    F(done_n, 'm', "i", w.copies.n = UINT32_MAX, kvf_copies_done(w.m, &w.copies)) \
    F(done_kind, 'm', "f", (w.copies.n = 1, w.items[0].kind = UINT32_MAX), kvf_copies_done(w.m, &w.copies)) \
    F(done_src, 'm', "f", (w.copies.n = 1, w.items[0].src = UINT32_MAX), kvf_copies_done(w.m, &w.copies)) \
    F(offload_n, 'm', "o", w.copies.n = UINT32_MAX, kvf_prefix_offload(w.m, 1, &w.copies, &w.n)) \
    F(reserve_null, 'm', "i", w.reserve.n_slots = NULL, kvf_seq_reserve(w.m, w.seq, &w.reserve)) \
    F(reserve_slots, 'm', "i", w.slots[1] = UINT32_MAX, kvf_seq_reserve(w.m, w.seq, &w.reserve)) \
    F(reserve_size, 'm', "i", w.reserve.struct_size = 0, kvf_seq_reserve(w.m, w.seq, &w.reserve)) \
    F(reserve_huge, 'm', "f", w.reserve.struct_size = SIZE_MAX, kvf_seq_reserve(w.m, w.seq, &w.reserve)) \
    F(scores_slots, 'm', "i", w.slots[0] = UINT32_MAX, kvf_seq_take_scores(w.m, w.seq, w.slots)) \
    F(compact_keep, 'm', "i", w.compact.n_keep = UINT32_MAX, kvf_compact_begin(w.m, &w.compact, 1, &w.compaction)) \
    F(compact_layer, 'm', "i", w.compact.layer = UINT32_MAX, kvf_compact_begin(w.m, &w.compact, 1, &w.compaction)) \
    F(compact_group, 'm', "i", w.compact.n_keep_group = &(uint32_t){UINT32_MAX}, \
      kvf_compact_begin(w.m, &w.compact, 1, &w.compaction)) \
    F(key_tokens, 'm', "i", w.key.tokens = NULL, LOOKUP) \
    F(key_n, 'm', "i", w.key.n_tokens = 0, LOOKUP) \
    F(key_extras, 'm', "i", w.key.n_extras = UINT32_MAX, LOOKUP) \
    F(key_many_extras, 'm', "i", (w.key.extras = w.extras, w.key.n_extras = UINT32_MAX), LOOKUP) \
    F(key_salt, 'm', "i", w.key.salt_bytes = 1, LOOKUP) \
    F(key_long_salt, 'm', "f", (w.key.salt = w.text, w.key.salt_bytes = UINT32_MAX), LOOKUP) \
    F(key_size, 'm', "i", w.key.struct_size = 0, LOOKUP) \
    F(match_node, 'm', "f", w.match.node = UINT64_MAX, \
      kvf_prefix_attach(w.m, w.empty, &w.key, &w.match, NULL, NULL)) \
    F(match_tokens, 'm', "f", w.match.n_tokens = UINT32_MAX, \
      kvf_prefix_attach(w.m, w.empty, &w.key, &w.match, NULL, NULL)) \
    F(match_blocks, 'm', "o", w.match.n_blocks = UINT32_MAX, \
      kvf_prefix_attach(w.m, w.empty, &w.key, &w.match, NULL, NULL)) \
    F(match_partial, 'm', "o", w.match.n_partial = UINT32_MAX, \
      kvf_prefix_attach(w.m, w.empty, &w.key, &w.match, NULL, NULL)) \
    F(snapshot, 'm', "f", w.match.snapshot = UINT64_MAX, kvf_prefix_snapshot_get(w.m, &w.match, w.ids, 16, &w.n)) \
    F(store_priority, 'm', "i", w.store.priority = UINT32_MAX, \
      kvf_prefix_store(w.m, w.seq, &w.key, 8, &w.store, &w.n)) \
    F(store_flags, 'm', "i", w.store.flags = UINT32_MAX, kvf_prefix_store(w.m, w.seq, &w.key, 8, &w.store, &w.n)) \
    F(layers, 'e', "f", w.mc.n_layers = UINT32_MAX, CREATE) \
    F(heads, 'e', "f", w.mc.n_kv_heads = UINT32_MAX, CREATE) \
    F(block_size, 'e', "f", w.mc.block_size = UINT32_MAX, CREATE) \
    F(blocks, 'e', "f", w.mc.n_blocks = UINT32_MAX, CREATE) \
    F(score_pages, 'e', "f", w.mc.n_score_pages = UINT32_MAX, CREATE) \
    F(seqs, 'e', "f", w.mc.max_seqs = UINT32_MAX, CREATE) \
    F(max_slots, 'e', "f", (w.mc.max_slots = UINT32_MAX, w.mc.allocator = small), CREATE) \
    F(host_blocks, 'e', "f", w.mc.n_host_blocks = UINT32_MAX, CREATE) \
    F(snapshots, 'e', "f", (w.mc.n_snapshot_pages = UINT32_MAX, w.mc.allocator = small), CREATE) \
    F(classes, 'e', "f", w.mc.n_classes = UINT32_MAX, CREATE) \
    F(no_classes, 'e', "f", w.mc.n_classes = 2, CREATE) \
    F(events, 'e', "f", w.pc.n_events = UINT32_MAX, CREATE) \
    F(allocator, 'e', "f", w.mc.allocator.alloc = small_alloc, CREATE) \
    F(config_size, 'e', "f", w.mc.struct_size = SIZE_MAX, CREATE) \
    F(occupancy_size, 'm', "i", w.occupancy.struct_size = 0, kvf_occupancy_read(w.m, &w.occupancy, NULL, 0)) \
    F(stats_size, 'm', "i", w.stats.struct_size = 0, kvf_prefix_stats_read(w.m, &w.stats)) \
    F(profile_size, 'n', "i", w.profile.struct_size = 0, kvf_profile_read(w.m, &w.profile, NULL, 0, 0)) \
    F(append_k, 'e', "i", w.a.k = NULL, APPEND) \
    F(append_v, 'e', "i", w.a.v = NULL, APPEND) \
    F(append_pos, 'e', "i", w.pages.pos = NULL, APPEND) \
    F(append_next, 'e', "i", w.view.next_pos = NULL, APPEND) \
    F(view, 'e', "i", w.a.view = NULL, PREFILL) \
    F(pages, 'e', "i", w.a.pages = NULL, PREFILL) \
    F(q, 'e', "i", w.a.q = NULL, PREFILL) \
    F(q_begin, 'e', "i", w.a.q_begin = NULL, PREFILL) \
    F(out, 'e', "i", w.a.out = NULL, PREFILL) \
    F(no_workspace, 'e', "i", w.a.workspace = NULL, PREFILL) \
    F(mass, 'e', "o", w.a.mass = NULL, PREFILL) \
    F(layer, 'e', "i", w.a.layer = UINT32_MAX, PREFILL) \
    F(seq_end, 'e', "i", w.a.seq_end = UINT32_MAX, PREFILL) \
    F(q_heads, 'e', "f", w.a.n_q_heads = UINT32_MAX, PREFILL) \
    F(q_stride, 'e', "i", w.a.q_stride = 0, PREFILL) \
    F(attention_size, 'e', "i", w.a.struct_size = 0, PREFILL) \
    F(window, 'e', "i", (w.a.window = 8, w.view.next_pos = NULL), PREFILL) \
    F(rows, 'e', "i", w.view.rows = NULL, PREFILL) \
    F(row_offset, 'e', "i", w.view.row_offset = NULL, PREFILL) \
    F(n_slots, 'e', "i", w.view.n_slots = NULL, PREFILL) \
    F(k, 'e', "i", w.pages.k = NULL, PREFILL) \
    F(n_blocks, 'e', "i", w.pages.n_blocks = UINT32_MAX, (w.pages.k_block_stride = UINT64_MAX - 31, PREFILL)) \
    F(csr_indptr, 'e', "i", w.csr.indptr = NULL, CSR) \
    F(csr_indices, 'e', "i", w.csr.indices = NULL, CSR) \
    F(csr_last, 'e', "i", w.csr.last_page_len = NULL, CSR) \
    F(csr_size, 'e', "i", w.csr.struct_size = 0, CSR) \
    F(csr_rows, 'e', "i", w.view.rows = NULL, CSR) \
    F(csr_offset, 'e', "i", w.view.row_offset = NULL, CSR) \
    F(csr_slots, 'e', "i", w.view.n_slots = NULL, CSR) \
    F(csr_block_size, 'e', "i", w.view.block_size = 0, CSR) \
    F(run_n, 'n', "i", w.copies.n = UINT32_MAX, RUN) \
    F(run_kind, 'n', "i", (w.copies.n = 1, w.items[0].kind = UINT32_MAX), RUN) \
    F(run_dst, 'n', "i", (w.copies.n = 1, w.items[0].dst = UINT32_MAX), RUN) \
    F(run_slots, 'n', "i", (w.copies.n = 1, w.items[0].n_slots = UINT32_MAX), RUN) \
    F(run_scores, 'n', "i", (w.copies.n = 1, w.items[0].kind = KVF_COPY_SCORE_PAGE), RUN) \
    F(run_host, 'n', "i", (w.copies.n = 1, w.items[0].kind = KVF_COPY_BLOCK_OUT), RUN) \
    F(run_pos, 'n', "i", w.host_pages.pos = NULL, kvf_copies_run(&w.pages, NULL, &w.host_pages, NULL, &w.copies)) \
    F(state_layers, 'e', "f", w.sc.n_layers = UINT32_MAX, STATE) \
    F(state_seqs, 'e', "f", w.sc.max_seqs = UINT32_MAX, STATE) \
    F(state_slots, 'e', "f", w.sc.max_slots = UINT32_MAX, STATE) \
    F(state_groups, 'e', "f", w.sc.n_groups = UINT32_MAX, STATE) \
    F(state_begin, 'e', "f", w.sc.q_head_begin = UINT32_MAX, STATE) \
    F(options_ops, 'e', "i", w.options.ops = NULL, CHECK) \
    F(options_full, 'e', "i", w.options.n_full_layers = UINT32_MAX, CHECK) \
    F(options_budget, 'e', "i", w.options.budget_tokens = UINT32_MAX, CHECK) \
    F(options_size, 'e', "f", w.options.struct_size = 0, kvf_policy_options_read(&w.new_options, sizeof w.new_options, &w.options, &w.err)) \
    F(options_huge, 'e', "f", w.options.struct_size = SIZE_MAX, kvf_policy_open(w.state, 1, &w.options, &w.err)) \
    F(project_ops, 'e', "i", w.options.ops = NULL, \
      kvf_policy_project(&w.options, 2, 1, BS, 64, 16, &w.need, &w.err)) \
    F(project_full, 'e', "f", w.options.n_full_layers = UINT32_MAX, \
      kvf_policy_project(&w.options, 2, 1, BS, 64, 16, &w.need, &w.err)) \
    F(match_view, 'e', "i", w.batch.view = NULL, MATCH) \
    F(match_pages, 'e', "i", w.batch.pages = NULL, MATCH) \
    F(match_events, 'e', "i", w.batch.n_events = 1, MATCH) \
    F(match_many, 'e', "f", (w.batch.n_events = UINT32_MAX, w.batch.events = &(const kvf_event){.n_keep = TOKENS}), MATCH) \
    F(request_prompt, 's', "f", w.request.n_prompt = UINT32_MAX, SUBMIT) \
    F(request_empty, 's', "i", w.request.n_prompt = 0, SUBMIT) \
    F(request_new, 's', "o", w.request.max_new = UINT32_MAX, SUBMIT) \
    F(request_options, 's', "i", w.request.options = NULL, SUBMIT) \
    F(request_samples, 's', "f", w.request.n_samples = UINT32_MAX, SUBMIT) \
    F(request_size, 's', "i", w.request.struct_size = 0, SUBMIT) \
    F(request_priority, 's', "i", w.request.priority = INT32_MAX, SUBMIT) \
    F(request_deadline, 's', "o", w.request.deadline = UINT64_MAX, SUBMIT) \
    F(budgets, 's', "i", w.names[1] = w.names[0], kvf_sched_set_budgets(w.sched, w.names, UINT32_MAX, 0.5, 0)) \
    F(sched_manager, 'e', "i", w.schedc.manager = NULL, SCHED) \
    F(sched_policies, 'e', "i", w.schedc.policies = NULL, SCHED) \
    F(sched_running, 'e', "f", w.schedc.max_running = UINT32_MAX, SCHED) \
    F(sched_waiting, 'e', "f", (w.schedc.max_waiting = UINT32_MAX, w.schedc.allocator = small), SCHED) \
    F(sched_batch, 'e', "o", w.schedc.max_batch_tokens = UINT32_MAX, SCHED) \
    F(sched_chunk, 'e', "f", w.schedc.chunk = UINT32_MAX, SCHED) \
    F(sched_context, 'e', "f", w.schedc.max_context = UINT32_MAX, SCHED) \
    F(sched_order, 'e', "i", w.schedc.order = UINT32_MAX, SCHED) \
    F(sched_patience, 'e', "i", w.schedc.patience = UINT64_MAX, SCHED) \
    F(prefix_end, 's', "i", w.sched_prefix.prefix_end = UINT32_MAX, \
      kvf_sched_set_prefix(w.sched, w.name, &w.sched_prefix)) \
    F(prefix_tokens, 's', "i", w.sched_prefix.key.n_tokens = 0, \
      kvf_sched_set_prefix(w.sched, w.name, &w.sched_prefix)) \
    F(prefix_salt, 's', "f", w.sched_prefix.key.salt_bytes = UINT32_MAX, \
      kvf_sched_set_prefix(w.sched, w.name, &w.sched_prefix)) \
    F(segment_end, 's', "f", (paused(), w.segment.end = UINT32_MAX), \
      kvf_sched_extend(w.sched, w.name, &w.segment, 1, 2)) \
    F(segment_begin, 's', "i", (paused(), w.segment.begin = UINT32_MAX), \
      kvf_sched_extend(w.sched, w.name, &w.segment, 1, 2))
/* clang-format on */
FIELDS(F_RUN)
static const call fields[] = {FIELDS(F_CALL)};

static const world_of_calls the_world = {begin, end, text_of, &w.err};

Test(calls, r12_every_function_takes_wrong_arguments) {
    uint32_t n = try_calls(&the_world, calls, sizeof calls / sizeof *calls);
    cr_expect_gt(n, 300);
}

Test(calls, r12_every_field_takes_a_wrong_value) { try_fields(&the_world, fields, sizeof fields / sizeof *fields); }
