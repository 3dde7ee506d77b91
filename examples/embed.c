/* embed.c: kvfold inside a serving loop. The caller owns the memory, the tensors and the loop.
 *
 * Two prompts run. D2O compresses the first at its end; it is then forked, and one batch decodes a few tokens for all
 * three sequences. Random numbers stand in for a model's projections. */
#include <kvfold/kvfold.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, Q_HEADS = 4, KV_HEADS = 2, DIM = 32, BLOCK = 16, BLOCKS = 160, SLOTS = 512, SEQS = 4 };
#define TRY(call) /* a failed call has changed nothing: going back is all there is to do */ \
    for (kvf_status status_ = (call); status_; status_ = KVF_OK) return status_

static float qkv[SLOTS * (Q_HEADS + 2 * KV_HEADS) * DIM], out[SLOTS * Q_HEADS * DIM];
static float sums[LAYERS * Q_HEADS * SLOTS], row[SEQS * KV_HEADS * SLOTS], *prompt_sums[1] = {sums};
static kvf_manager *manager;
static kvf_policy_state *policies;
static kvf_plan *plan;
static kvf_stream *stream;
static kvf_policy_options options;
static kvf_view view = {.struct_size = sizeof view};
static uint16_t kv[BLOCKS][2][KV_HEADS][BLOCK][DIM]; /* K and V of a block side by side */
static uint32_t pos[BLOCKS][KV_HEADS][BLOCK];
static float key_norm[BLOCKS][KV_HEADS][BLOCK], score[BLOCKS][KV_HEADS][BLOCK];
static kvf_pages pages = {.struct_size = sizeof pages, .dtype = KVF_F16, .n_blocks = BLOCKS, .block_size = BLOCK};
static kvf_score_pages scores = {sizeof scores, score[0][0], BLOCKS, 1, KV_HEADS, BLOCK};
static kvf_attention attention = {.struct_size = sizeof attention, .view = &view, .pages = &pages};
static kvf_policy_batch batch = {.struct_size = sizeof batch, .view = &view, .pages = &pages, .scores = &scores};
static kvf_copy copy_items[SEQS * LAYERS * SLOTS / BLOCK];
static kvf_copy_list copies = {copy_items, 0, sizeof copy_items / sizeof *copy_items};
static kvf_error err;

static kvf_status create(void) {
    size_t a, b;
    TRY(kvf_attention_workspace_bytes(2, DIM, Q_HEADS, KV_HEADS, SLOTS, SEQS, SLOTS, &a));
    TRY(kvf_policy_workspace_bytes(2, DIM, KV_HEADS, SLOTS, &b));
    attention.workspace_bytes = batch.workspace_bytes = (a > b ? a : b) / 64 * 64 + 64;
    attention.workspace = batch.workspace = aligned_alloc(64, batch.workspace_bytes);
    if (!batch.workspace) return KVF_E_NO_MEMORY;
    pages.heads_per_group = KV_HEADS, pages.head_dim = DIM, pages.k = kv[0][0], pages.v = kv[0][1];
    pages.k_block_stride = pages.v_block_stride = sizeof kv[0];
    pages.pos = pos[0][0], pages.key_norm = key_norm[0][0];
    attention.n_q_heads = Q_HEADS, attention.q = qkv, attention.k = qkv + Q_HEADS * DIM;
    attention.v = attention.k + KV_HEADS * DIM, attention.out = out;
    attention.q_stride = attention.kv_stride = (Q_HEADS + 2 * KV_HEADS) * DIM, attention.out_stride = Q_HEADS * DIM;
    batch.prompt_stride = SLOTS;

    kvf_manager_config m;
    kvf_manager_config_init(&m, sizeof m);
    m.n_layers = LAYERS, m.n_kv_heads = KV_HEADS, m.block_size = BLOCK, m.n_blocks = BLOCKS;
    m.max_seqs = SEQS, m.max_slots = SLOTS, m.block_bytes = sizeof kv[0];
    TRY(kvf_manager_create(&m, &manager, &err));
    kvf_policy_state_config p = {.struct_size = sizeof p, .n_layers = LAYERS, .n_kv_heads = KV_HEADS};
    p.n_q_heads = Q_HEADS, p.head_dim = DIM, p.block_size = BLOCK, p.max_seqs = SEQS, p.max_slots = SLOTS;
    TRY(kvf_policy_state_create(&p, &policies, &err));
    TRY(kvf_policy_options_init(&options, sizeof options, "d2o", "paper", &err));
    TRY(kvf_policy_option_set(&options, "rho", "0.25", &err));
    TRY(kvf_policy_options_check(&options, LAYERS, BLOCK, &err));
    TRY(kvf_plan_create(NULL, KV_HEADS, SEQS * LAYERS, LAYERS * KV_HEADS * SLOTS, &plan, &err));
    return kvf_stream_create_cpu(NULL, 2, &stream, &err);
}

/* Makes room for n tokens of each sequence, in every layer: all or nothing. */
static kvf_status append(const kvf_seq *seqs, uint32_t n_seqs, uint32_t n) {
    kvf_append_item items[SEQS];
    for (uint32_t i = 0; i < n_seqs; i++) items[i] = (kvf_append_item){seqs[i], n};
    TRY(kvf_append(manager, items, n_seqs, &copies));
    TRY(kvf_copies_run(&pages, &scores, &copies)); /* those of a fork too */
    TRY(kvf_copies_done(manager, &copies));
    return kvf_view_fill(manager, 0, seqs, n_seqs, &view);
}

/* All layers of a step: a prompt of one sequence with its column sums, or one token of each with its row. A row of
 * qkv is a token's queries, keys and values. */
static kvf_status forward(uint32_t n, int prompt) {
    uint32_t q_begin[SEQS + 1];
    for (uint32_t i = 0; i <= view.n_seqs; i++) q_begin[i] = i * n;
    attention.q_begin = q_begin, attention.seq_end = batch.row_end = view.n_seqs;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        float *layer_sums[1] = {sums + layer * Q_HEADS * SLOTS};
        kvf_mass mass = {.struct_size = sizeof mass, .col_stride = SLOTS, .row_stride = SLOTS};
        mass.col_sums = prompt ? layer_sums : NULL, mass.row = prompt ? NULL : row;
        for (size_t i = 0; i < sizeof qkv / sizeof *qkv; i++) qkv[i] = (float)rand() / (float)RAND_MAX * 4 - 2;
        attention.mass = &mass, batch.mass = &mass, attention.layer = batch.layer = layer;
        TRY(kvf_attention_append(stream, &attention, &err));
        TRY(prompt ? kvf_attention_prefill(stream, &attention, &err) : kvf_attention_decode(stream, &attention, &err));
        if (!prompt) TRY(options.ops->observe(policies, stream, &batch, &err));
    }
    return KVF_OK;
}

/* A moment of the policy, after a prompt of n tokens or (n 0) a decode step: what is due is decided (match, gate),
 * written (apply), and the blocks fall free (commit). Between the calls tensor-parallel ranks would reduce. */
static kvf_status compress(const kvf_seq *seqs, uint32_t n) {
    kvf_event events[SEQS * LAYERS];
    kvf_compact_item items[SEQS * LAYERS];
    uint32_t item_of[SEQS * LAYERS], n_items = 0, keep[LAYERS];
    kvf_compaction compaction = {0};
    batch.events = events, batch.n_events = 0, batch.compaction = &compaction, batch.compaction_item = item_of;
    batch.prompt_sums = n ? prompt_sums : NULL;
    if (n) {
        double variance[LAYERS * Q_HEADS];
        TRY(options.ops->metric(policies, stream, &batch, 0, n, variance, &err));
        TRY(options.ops->budget(policies, view.seq_index[0], variance, n, &err));
    }
    for (uint32_t i = 0; i < view.n_seqs; i++) {
        const uint32_t *n_slots = view.n_slots + i * LAYERS;
        kvf_policy_due(policies, view.seq_index[i], n ? KVF_AT_PROMPT_END : KVF_AFTER_STEP, n_slots, keep);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            if (!keep[layer] && !n) continue;
            if (!keep[layer]) keep[layer] = n_slots[layer]; /* nothing to evict, but the sums become scores */
            int evicts = keep[layer] < n_slots[layer];
            item_of[batch.n_events] = evicts ? n_items : UINT32_MAX;
            if (evicts) items[n_items++] = (kvf_compact_item){seqs[i], layer, keep[layer], NULL};
            events[batch.n_events++] =
                (kvf_event){i, layer, keep[layer], n ? KVF_EVENT_PROMPT : KVF_EVENT_DECODE, 0, 0};
        }
    }
    if (!batch.n_events) return KVF_OK;
    if (n) TRY(kvf_seq_take_scores(manager, seqs[0], keep));
    if (n_items) TRY(kvf_compact_begin(manager, items, n_items, &compaction));
    kvf_status status = options.ops->match(policies, stream, &batch, plan, &err);
    if (!status) status = options.ops->gate(policies, stream, &batch, plan, &err);
    if (!status) status = options.ops->apply(policies, stream, &batch, plan, &err);
    if (!n_items) return status;
    if (!status) return kvf_compact_commit(manager);
    return kvf_compact_cancel(manager) ? KVF_E_CORRUPT : status;
}

static kvf_status serve(void) {
    static const uint32_t n_prompt[2] = {
        320, 48}; /* budgets: 80 tokens a layer; 64, the least, so that nothing is evicted */
    kvf_seq seqs[3];
    uint32_t index[3];
    for (int i = 0; i < 2; i++) {
        TRY(kvf_seq_create(manager, &seqs[i]));
        TRY(kvf_seq_index(manager, seqs[i], &index[i]));
        TRY(kvf_policy_open(policies, index[i], &options, &err));
        TRY(append(&seqs[i], 1, n_prompt[i]));
        memset(sums, 0, sizeof sums);
        TRY(forward(n_prompt[i], 1));
        TRY(compress(&seqs[i], n_prompt[i]));
    }
    TRY(kvf_seq_fork(manager, seqs[0], &copies, &seqs[2])); /* shares every block of the first */
    TRY(kvf_seq_index(manager, seqs[2], &index[2]));
    TRY(kvf_policy_fork(policies, index[0], index[2]));
    for (int step = 0; step < 8; step++) {
        TRY(append(seqs, 3, 1));
        TRY(forward(1, 0));
        TRY(compress(seqs, 0));
    }
    kvf_occupancy o = {.struct_size = sizeof o};
    kvf_layer_occupancy layers[LAYERS];
    TRY(kvf_occupancy_read(manager, &o, layers, sizeof *layers));
    printf("%u of %u blocks held, at most %u\n", o.blocks.n_held, BLOCKS, o.blocks.n_held_max);
    for (int i = 0; i < LAYERS; i++)
        printf("layer %d: %u blocks; the first sequence keeps %u of its 328 tokens\n", i, layers[i].n_blocks,
               kvf_policy_sizes(policies, index[0])[i].keep);
    return kvf_audit(manager, &err);
}

int main(void) {
    kvf_status status = create();
    if (!status) status = serve();
    const char *detail = *err.text || !manager ? err.text : kvf_manager_error(manager);
    if (status) fprintf(stderr, "embed: %s: %s\n", kvf_status_text(status), detail);
    kvf_plan_destroy(plan);
    kvf_policy_state_destroy(policies);
    kvf_manager_destroy(manager); /* with the sequences in it */
    kvf_stream_destroy(stream);
    free(batch.workspace);
    return status ? 1 : 0;
}
