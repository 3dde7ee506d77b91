/* embed.c: kvfold inside a serving loop. The caller owns the memory, the tensors and the loop. Usage: embed [POLICY [PRESET]]
 *
 * Two prompts run. The policy compresses the first at its end; it is then forked, and one batch decodes 150 tokens for all
 * three sequences. The second prompt fits its budget, and is compressed once it has outgrown it. Random numbers stand in for a
 * model's projections. */
#include <kvfold/kvfold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, Q_HEADS = 4, KV_HEADS = 2, DIM = 32, BLOCK = 16, BLOCKS = 384, SLOTS = 512, SEQS = 4, STEPS = 150 };
#define TRY(call) /* a failed call has changed nothing: going back is all there is to do */ \
    for (kvf_status status_ = (call); status_; status_ = KVF_OK) return status_

static float qkv[SLOTS * (Q_HEADS + 2 * KV_HEADS) * DIM], out[SLOTS * Q_HEADS * DIM];
static kvf_manager *manager;
static kvf_policy_state *policies;
static kvf_events *events;
static kvf_stream *stream;
static kvf_policy_options options;
static kvf_view view = {.struct_size = sizeof view};
static uint16_t kv[BLOCKS][2][KV_HEADS][BLOCK][DIM]; /* K and V of a block side by side */
static uint32_t pos[BLOCKS][KV_HEADS][BLOCK];
static float key_norm[BLOCKS][KV_HEADS][BLOCK], weight[BLOCKS][KV_HEADS][BLOCK], bias[BLOCKS][KV_HEADS][BLOCK];
static float score[BLOCKS][KVF_MAX_SCORE_ARRAYS][KV_HEADS][BLOCK];
static kvf_pages pages = {.struct_size = sizeof pages, .dtype = KVF_F16, .n_blocks = BLOCKS, .block_size = BLOCK};
static kvf_score_pages scores = {sizeof scores, score[0][0][0], BLOCKS, 0, KV_HEADS, BLOCK};
static kvf_attention attention = {.struct_size = sizeof attention, .view = &view, .pages = &pages};
static kvf_copy copy_items[SEQS * LAYERS * SLOTS / BLOCK];
static kvf_copy_list copies = {copy_items, 0, sizeof copy_items / sizeof *copy_items};
static kvf_error err;

/* What policies may need of a prompt, and of a decode step (kvf_policy_needs). */
static float sums[LAYERS * Q_HEADS * SLOTS], last[LAYERS * Q_HEADS * SLOTS], squares[LAYERS * KV_HEADS * SLOTS];
static float row[SEQS * KV_HEADS * SLOTS], logprobs[SLOTS], *all_sums[1], *all_last[1], *all_squares[1];
static const float *all_logprobs[1];

static kvf_status create(const char *policy, const char *preset) {
    TRY(kvf_policy_options_init(&options, sizeof options, policy, preset, &err));
    TRY(kvf_policy_option_set(&options, "rho", "0.25", &err));
    TRY(kvf_policy_options_check(&options, LAYERS, BLOCK, &err));
    TRY(kvf_attention_workspace_bytes(2, DIM, Q_HEADS, KV_HEADS, SLOTS, SEQS, SLOTS, &attention.workspace_bytes));
    attention.workspace_bytes = attention.workspace_bytes / 64 * 64 + 64;
    attention.workspace = aligned_alloc(64, attention.workspace_bytes);
    if (!attention.workspace) return KVF_E_NO_MEMORY;
    pages.heads_per_group = KV_HEADS, pages.head_dim = DIM, pages.k = kv[0][0], pages.v = kv[0][1];
    pages.k_block_stride = pages.v_block_stride = sizeof kv[0];
    pages.pos = pos[0][0], pages.key_norm = key_norm[0][0];
    if (kvf_policy_needs_weights(&options)) pages.weight = weight[0][0], pages.bias = bias[0][0];
    scores.n_arrays = kvf_policy_n_arrays(&options) ? kvf_policy_n_arrays(&options) : 1;
    attention.n_q_heads = Q_HEADS, attention.q = qkv, attention.k = qkv + Q_HEADS * DIM;
    attention.v = attention.k + KV_HEADS * DIM, attention.out = out;
    attention.q_stride = attention.kv_stride = (Q_HEADS + 2 * KV_HEADS) * DIM, attention.out_stride = Q_HEADS * DIM;

    kvf_manager_config m;
    kvf_manager_config_init(&m, sizeof m);
    m.n_layers = LAYERS, m.n_kv_heads = KV_HEADS, m.block_size = BLOCK, m.n_blocks = BLOCKS;
    m.max_seqs = SEQS, m.max_slots = SLOTS, m.block_bytes = sizeof kv[0];
    TRY(kvf_manager_create(&m, &manager, &err));
    kvf_policy_state_config p = {.struct_size = sizeof p, .n_layers = LAYERS, .n_kv_heads = KV_HEADS};
    p.n_q_heads = Q_HEADS, p.head_dim = DIM, p.block_size = BLOCK, p.max_seqs = SEQS, p.max_slots = SLOTS;
    TRY(kvf_policy_state_create(&p, &policies, &err));
    TRY(kvf_stream_create_cpu(NULL, 2, &stream, &err));
    kvf_events_config e = {.struct_size = sizeof e, .manager = manager, .policies = policies, .stream = stream};
    return kvf_events_create(&e, &events, &err);
}

/* What the policy does at this moment to all sequences of the view: it may evict, and free blocks. n: prompt tokens. */
static kvf_status moment(kvf_moment when, const kvf_seq *seqs, uint32_t n) {
    kvf_moment_rows rows = {
        .struct_size = sizeof rows, .moment = when, .view = &view, .seqs = seqs, .row_end = view.n_seqs};
    rows.pages = &pages, rows.scores = &scores, rows.n_prompt = &n;
    rows.prompt_sums = all_sums, rows.prompt_last = all_last, rows.prompt_squares = all_squares;
    rows.prompt_logprobs = all_logprobs, rows.prompt_stride = SLOTS;
    return kvf_events_run(events, &rows, &err);
}

/* Makes room for n tokens of each sequence, in every layer: all or nothing. */
static kvf_status append(const kvf_seq *seqs, uint32_t n_seqs, uint32_t n) {
    kvf_append_item items[SEQS];
    for (uint32_t i = 0; i < n_seqs; i++) items[i] = (kvf_append_item){seqs[i], n};
    TRY(kvf_append(manager, items, n_seqs, &copies));
    TRY(kvf_copies_run(&pages, &scores, NULL, NULL, &copies)); /* those of a fork too */
    TRY(kvf_copies_done(manager, &copies));
    return kvf_view_fill(manager, 0, seqs, n_seqs, &view);
}

/* All layers of a step: a prompt of one sequence, or one token of each. A row of qkv is a token's queries, keys and values. */
static kvf_status forward(uint32_t n, int prompt) {
    uint32_t q_begin[SEQS + 1], needs = kvf_policy_needs(&options), last_begin = n > 64 ? n - 64 : 0;
    uint8_t gqa[SEQS];
    memset(gqa, (int)options.gqa, sizeof gqa);
    for (uint32_t i = 0; i <= view.n_seqs; i++) q_begin[i] = i * n;
    attention.q_begin = q_begin, attention.seq_end = view.n_seqs;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        float *layer_sums[1] = {sums + layer * Q_HEADS * SLOTS}, *layer_last[1] = {last + layer * Q_HEADS * SLOTS};
        float *layer_squares[1] = {squares + layer * KV_HEADS * SLOTS};
        kvf_mass mass = {.struct_size = sizeof mass, .col_stride = SLOTS, .row_stride = SLOTS};
        if (prompt && needs & KVF_NEEDS_COL_SUMS) mass.col_sums = layer_sums;
        if (prompt && needs & KVF_NEEDS_LAST_ROWS) mass.last_sums = layer_last, mass.last_begin = &last_begin;
        if (prompt && needs & KVF_NEEDS_SQUARES) mass.sq_sums = layer_squares;
        if (!prompt && needs & KVF_NEEDS_ROW) mass.row = row;
        mass.row_gqa = gqa;
        for (size_t i = 0; i < sizeof qkv / sizeof *qkv; i++) qkv[i] = (float)rand() / (float)RAND_MAX * 4 - 2;
        attention.mass = &mass, attention.layer = layer;
        TRY(kvf_attention_append(stream, &attention, &err));
        TRY(prompt ? kvf_attention_prefill(stream, &attention, &err) : kvf_attention_decode(stream, &attention, &err));
        kvf_policy_batch b = {
            .struct_size = sizeof b, .view = &view, .pages = &pages, .scores = &scores, .mass = &mass};
        b.layer = layer, b.row_end = view.n_seqs, b.logprobs = logprobs;
        if (!prompt) TRY(kvf_policy_observe(policies, stream, &b, &err));
    }
    return KVF_OK;
}

/* A new sequence; the sums of its prompt begin at 0. */
static kvf_status prefill(kvf_seq *seq, uint32_t *index, uint32_t n) {
    uint32_t needs = kvf_policy_needs(&options);
    all_sums[0] = needs & KVF_NEEDS_COL_SUMS ? sums : NULL, all_last[0] = needs & KVF_NEEDS_LAST_ROWS ? last : NULL;
    all_squares[0] = needs & KVF_NEEDS_SQUARES ? squares : NULL;
    all_logprobs[0] = needs & KVF_NEEDS_LOGPROBS ? logprobs : NULL;
    memset(sums, 0, sizeof sums), memset(last, 0, sizeof last), memset(squares, 0, sizeof squares);
    for (uint32_t i = 0; i < SLOTS; i++) logprobs[i] = -(float)(rand() % 1000) / 100;
    TRY(kvf_seq_create(manager, seq));
    TRY(kvf_seq_index(manager, *seq, index));
    TRY(kvf_policy_open(policies, *index, &options, &err));
    TRY(append(seq, 1, n));
    TRY(forward(n, 1));
    return moment(KVF_AT_PROMPT_END, seq, n);
}

/* Blocks of a sequence, over all layers, and whether they are within what its budget needs. */
static kvf_status report(kvf_seq seq, uint32_t n_prompt) {
    kvf_layer_occupancy layers[LAYERS];
    kvf_policy_need need;
    uint32_t n_blocks = 0;
    TRY(kvf_seq_occupancy(manager, seq, layers, sizeof *layers));
    TRY(kvf_policy_project(&options, LAYERS, 1, BLOCK, n_prompt, STEPS, &need, &err));
    printf("%u + %u tokens, a budget of %u:", n_prompt, STEPS, need.budget_tokens);
    for (int i = 0; i < LAYERS; i++) n_blocks += layers[i].n_blocks, printf(" %u", (unsigned)layers[i].slots_used);
    printf(" slots in the layers, %u blocks\n", n_blocks);
    if (n_blocks <= need.steady_blocks) return KVF_OK;
    snprintf(err.text, sizeof err.text, "%u blocks, where the budget needs %u", n_blocks, (unsigned)need.steady_blocks);
    return KVF_E_CORRUPT;
}

static kvf_status serve(void) {
    static const uint32_t n_prompt[2] = {
        320, 48}; /* budgets: 80 tokens a layer; 64, the least, so that nothing is evicted */
    kvf_seq seqs[3];
    uint32_t index[3];
    for (int i = 0; i < 2; i++) TRY(prefill(&seqs[i], &index[i], n_prompt[i]));
    TRY(kvf_seq_fork(manager, seqs[0], &copies, &seqs[2])); /* shares every block of the first */
    TRY(kvf_seq_index(manager, seqs[2], &index[2]));
    TRY(kvf_policy_fork(policies, index[0], index[2]));
    for (int step = 0; step < STEPS; step++) {
        TRY(kvf_view_fill(manager, 0, seqs, 3, &view));
        TRY(moment(KVF_BEFORE_APPEND, seqs, 0));
        TRY(append(seqs, 3, 1));
        TRY(forward(1, 0));
        TRY(moment(KVF_AFTER_STEP, seqs, 0));
    }
    kvf_occupancy o = {.struct_size = sizeof o};
    TRY(kvf_occupancy_read(manager, &o, NULL, 0));
    printf("%s: %u of %u blocks held, at most %u\n", options.ops->name, o.blocks.n_held, BLOCKS, o.blocks.n_held_max);
    for (int i = 0; i < 3; i++) TRY(report(seqs[i], n_prompt[i % 2]));
    return kvf_audit(manager, &err);
}

int main(int argc, char **argv) {
    kvf_status status = create(argc > 1 ? argv[1] : "d2o", argc > 2 ? argv[2] : NULL);
    if (!status) status = serve();
    const char *detail = *err.text || !manager ? err.text : kvf_manager_error(manager)->text;
    if (status) fprintf(stderr, "embed: %s: %s\n", kvf_status_text(status), detail);
    kvf_events_destroy(events);
    kvf_policy_state_destroy(policies);
    kvf_manager_destroy(manager); /* with the sequences in it */
    kvf_stream_destroy(stream);
    free(attention.workspace);
    return status ? 1 : 0;
}
