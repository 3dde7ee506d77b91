/* own_policy.c: a policy of your own. It computes the score of a slot, and the library does the rest.
 *
 * "fading" keeps the tokens with the most attention, weighted by age: a token's score halves every HALF_LIFE positions.
 * It is registered by pointer, takes every policy option, and compresses one generated prompt. */
#include <kvfold/kvfold.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- The policy ------------------------------------------------------------------------------------ */

enum { HALF_LIFE = 24 };

static void fading(const kvf_policy_slots *s, float *worth) {
    kvf_policy_worth(s, worth); /* by the options: accumulated, mean, window, times the norm of V, ... */
    for (uint32_t i = 0; i < s->n_slots; i++) worth[i] *= exp2f(-(float)(s->next_pos - s->pos[i]) / HALF_LIFE);
}

static const kvf_policy_ops ops = {
    .struct_size = sizeof ops,
    .name = "fading",
    .summary = "heavy hitters whose worth fades with their age",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW,
    .flags = KVF_POLICY_EQUAL_LAYERS,
    .worth = fading,
};

/* ---- A prompt of TOKENS tokens, one layer, one head, as a serving loop holds it ---------------------- */

enum { TOKENS = 96, BLOCK = 16, BLOCKS = TOKENS / BLOCK, DIM = 8 };
static float kv[BLOCKS][2][BLOCK][DIM], key_norm[TOKENS], score[TOKENS], sums[TOKENS];
static uint32_t pos[TOKENS], rows[BLOCKS] = {0, 1, 2, 3, 4, 5}, n_slots = TOKENS, next_pos = TOKENS, seq_index = 0;
static uint64_t row_offset = 0;
static const kvf_view view = {.struct_size = sizeof view,
                              .n_seqs = 1,
                              .n_layers = 1,
                              .n_groups = 1,
                              .heads_per_group = 1,
                              .block_size = BLOCK,
                              .rows = rows,
                              .score_rows = rows,
                              .row_offset = &row_offset,
                              .n_slots = &n_slots,
                              .next_pos = &next_pos,
                              .seq_index = &seq_index};
static kvf_pages pages = {.struct_size = sizeof pages, .dtype = KVF_F32, .n_blocks = BLOCKS, .block_size = BLOCK};
static const kvf_score_pages scores = {sizeof scores, score, BLOCKS, 1, 1, BLOCK};

static void make_prompt(void) {
    pages.heads_per_group = 1, pages.head_dim = DIM, pages.k = kv[0][0], pages.v = kv[0][1], pages.pos = pos;
    pages.k_block_stride = pages.v_block_stride = sizeof kv[0], pages.key_norm = key_norm;
    for (int i = 0; i < TOKENS; i++) {
        for (int e = 0; e < DIM; e++)
            kv[i / BLOCK][0][i % BLOCK][e] = kv[i / BLOCK][1][i % BLOCK][e] = sinf((float)(i + e));
        pos[i] = (uint32_t)i, key_norm[i] = 2;
        sums[i] = i % 8 == 0 ? 4.0f : 0.1f; /* every eighth token is looked at */
    }
}

static kvf_status compress(kvf_policy_options *o, kvf_policy_state *state, kvf_plan *plan, kvf_error *err) {
    float *prompt_sums[1] = {sums};
    uint32_t keep = 0;
    kvf_policy_batch b = {.struct_size = sizeof b, .view = &view, .pages = &pages, .scores = &scores};
    kvf_status st = kvf_policy_workspace_bytes(1, DIM, 1, TOKENS, &b.workspace_bytes);
    b.workspace = aligned_alloc(64, (b.workspace_bytes + 63) / 64 * 64);
    b.prompt_sums = prompt_sums, b.prompt_stride = TOKENS;
    uint32_t n_due;
    if (!st) st = kvf_policy_options_check(o, 1, BLOCK, err);
    if (!st) st = kvf_policy_open(state, 0, o, err);
    if (!st) st = kvf_policy_budget(state, 0, NULL, TOKENS, err);
    if (!st) st = kvf_policy_due(state, NULL, &b, 0, KVF_AT_PROMPT_END, &keep, &n_due, err);
    kvf_event event = {0, 0, keep, KVF_EVENT_PROMPT, 0, 0};
    b.events = &event, b.n_events = 1;
    if (!st) st = kvf_policy_match(state, NULL, &b, plan, err);
    if (!st) st = kvf_policy_gate(state, NULL, &b, plan, err);
    if (!st) st = kvf_policy_apply(state, NULL, &b, plan, err);
    free(b.workspace);
    return st ? st : (n_slots = keep, KVF_OK);
}

int main(void) {
    kvf_policy_state_config c = {.struct_size = sizeof c, .n_layers = 1, .n_kv_heads = 1, .n_q_heads = 1};
    c.head_dim = DIM, c.block_size = BLOCK, c.max_seqs = 1, c.max_slots = TOKENS;
    kvf_policy_options o;
    kvf_policy_state *state = NULL;
    kvf_plan *plan = NULL;
    kvf_error err = {.text = ""};
    make_prompt();
    kvf_status st = kvf_policy_options_init_ops(&o, sizeof o, &ops, &err);
    if (!st) st = kvf_policy_option_set(&o, "budget_tokens", "32", &err);
    if (!st) st = kvf_policy_option_set(&o, "nm", "3:1", &err);
    if (!st) st = kvf_policy_state_create(&c, &state, &err);
    if (!st) st = kvf_plan_create(NULL, 1, 1, TOKENS, &plan, &err);
    if (!st) st = compress(&o, state, plan, &err);
    if (st) fprintf(stderr, "own_policy: %s: %s\n", kvf_status_text(st), err.text);
    for (uint32_t i = 0; !st && i < n_slots; i++) printf("%u%s", pos[i], i + 1 < n_slots ? " " : "\n");
    kvf_plan_destroy(plan);
    kvf_policy_state_destroy(state);
    return st || n_slots != 32;
}
