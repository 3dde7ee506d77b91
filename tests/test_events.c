/* The policy driver (kvfold/events.h): retries, swaps, forks and repeated calls change nothing about its results. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "kvfold/kvfold.h"

enum { LAYERS = 3, HEADS = 4, KV = 2, DIM = 8, BS = 8, BLOCKS = 512, SLOTS = 256, SEQS = 4, ROWS = 3, STEPS = 40 };
#define OK(call) cr_assert_eq((call), KVF_OK, "%s: %s: %s", #call, w.err.text, kvf_manager_error(w.m)->text)

static struct world {
    kvf_manager *m;
    kvf_policy_state *state;
    kvf_events *events;
    kvf_policy_options options;
    kvf_view view;
    kvf_pages pages;
    kvf_score_pages scores;
    kvf_copy items[1024];
    kvf_copy_list copies;
    float *sums[ROWS], *last[ROWS], *squares[ROWS];
    const float *logprobs[ROWS];
    kvf_error err;
    uint32_t n_reduced, n_allocations;
    bool observe_twice, fail_pass;
    uint8_t changed[ROWS];
    uint32_t resized; /* hash of the rows that got sizes, of all calls */
} w;
static float k[BLOCKS][KV * BS * DIM], v[BLOCKS][KV * BS * DIM], norm[BLOCKS * KV * BS], score[BLOCKS * 4 * KV * BS];
static float host_k[BLOCKS][KV * BS * DIM], host_v[BLOCKS][KV * BS * DIM], host_norm[BLOCKS * KV * BS],
    host_score[BLOCKS * 4 * KV * BS];
static uint32_t pos[BLOCKS * KV * BS], host_pos[BLOCKS * KV * BS];
static float model[BLOCKS * KV * BS], host_model[BLOCKS * KV * BS]; /* scores of the model */
static float col[LAYERS * HEADS * SLOTS], late[LAYERS * HEADS * SLOTS], sq[LAYERS * KV * SLOTS], lp[SLOTS];

static void *count_alloc(void *ctx, size_t bytes, size_t align) {
    ++*(uint32_t *)ctx;
    return aligned_alloc(align, (bytes + align - 1) / align * align);
}
static void count_free(void *ctx, void *p, size_t bytes) {
    (void)ctx, (void)bytes;
    free(p);
}
static kvf_status reduce(void *ctx, double *values, uint64_t n, kvf_error *err) {
    (void)ctx, (void)values, (void)err;
    w.n_reduced += (uint32_t)n;
    return KVF_OK;
}

/* A number in [0, 1) that depends on its arguments alone, so that a call that is made again gets the same. */
static float number(uint32_t a, uint32_t b, uint32_t c) {
    uint64_t x = ((uint64_t)a << 40) ^ ((uint64_t)b << 20) ^ c;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (float)((x ^ (x >> 31)) >> 40) / (float)(1 << 24);
}

static kvf_pages pages_of(float (*keys)[KV * BS * DIM], float (*values)[KV * BS * DIM], uint32_t *at, float *norms,
                          float *scores, uint32_t hpg) {
    return (kvf_pages){.struct_size = sizeof(kvf_pages),
                       .dtype = KVF_F32,
                       .n_blocks = BLOCKS,
                       .block_size = BS,
                       .heads_per_group = hpg,
                       .head_dim = DIM,
                       .k = keys,
                       .v = values,
                       .k_block_stride = sizeof *keys,
                       .v_block_stride = sizeof *values,
                       .pos = at,
                       .key_norm = norms,
                       .score = scores};
}

typedef enum budgets { EQUAL, ADAPTIVE, GLOBAL, GLOBAL_PROBE, GLOBAL_REPEAT } budgets;

static void begin(const char *policy, uint32_t hpg, budgets of) {
    w = (struct world){.view.struct_size = sizeof w.view};
    w.copies = (kvf_copy_list){w.items, 0, 1024};
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = LAYERS, c.n_kv_heads = KV, c.heads_per_group = hpg, c.block_size = BS, c.n_blocks = BLOCKS;
    c.max_seqs = SEQS, c.max_slots = SLOTS, c.n_host_blocks = c.n_host_score_pages = BLOCKS;
    cr_assert_eq(kvf_manager_create(&c, &w.m, &w.err), KVF_OK, "%s", w.err.text);
    kvf_policy_state_config p = {.struct_size = sizeof p, .n_layers = LAYERS, .n_kv_heads = KV, .n_q_heads = HEADS};
    p.head_dim = DIM, p.block_size = BS, p.max_seqs = SEQS, p.max_slots = SLOTS, p.n_groups = KV / hpg;
    OK(kvf_policy_state_create(&p, &w.state, &w.err));
    kvf_events_config e = {.struct_size = sizeof e, .manager = w.m, .policies = w.state, .reduce = reduce};
    e.max_rows = ROWS, e.allocator = (kvf_allocator){count_alloc, count_free, &w.n_allocations};
    OK(kvf_events_create(&e, &w.events, &w.err));
    w.n_allocations = 0;
    OK(kvf_policy_options_init(&w.options, sizeof w.options, policy, NULL, &w.err));
    w.options.rho = 0.3;
    w.options.min_tokens = 0;
    if (of == ADAPTIVE) w.options.head_budget = KVF_HEAD_BUDGET_ADAPTIVE;
    if (!isnan(w.options.threshold)) w.options.threshold = 0.5, w.options.window = 10; /* some are above */
    if (of >= GLOBAL) w.options.budget = KVF_BUDGET_GLOBAL;
    if (kvf_policy_needs_weights(&w.options)) w.options.merge = KVF_MERGE_NONE;
    kvf_policy_options model_score = w.options;
    model_score.score = of == GLOBAL_PROBE ? KVF_SCORE_PROBE : KVF_SCORE_REPEAT;
    model_score.score_norm = KVF_SCORE_NORM_NONE;
    if (of > GLOBAL && kvf_policy_options_check(&model_score, LAYERS, BS, NULL) == KVF_OK) w.options = model_score;
    w.pages = pages_of(k, v, pos, norm, model, hpg);
    w.scores = (kvf_score_pages){sizeof w.scores, score, BLOCKS, 4, hpg, BS};
    memset(k, 0, sizeof k), memset(v, 0, sizeof v), memset(pos, 0, sizeof pos), memset(score, 0, sizeof score);
}

static void end(void) {
    OK(kvf_audit(w.m, &w.err));
    cr_assert_eq(w.n_allocations, 0, "the driver has allocated");
    kvf_events_destroy(w.events);
    kvf_policy_state_destroy(w.state);
    kvf_manager_destroy(w.m);
}

static uint32_t index_of(kvf_seq seq) {
    uint32_t index;
    OK(kvf_seq_index(w.m, seq, &index));
    return index;
}

static void run_copies(void) {
    kvf_pages far = pages_of(host_k, host_v, host_pos, host_norm, host_model, w.pages.heads_per_group);
    kvf_score_pages far_scores = w.scores;
    far_scores.base = host_score;
    OK(kvf_copies_run(&w.pages, &w.scores, &far, &far_scores, &w.copies));
    OK(kvf_copies_done(w.m, &w.copies));
}

/* What a forward pass would write of the newest n tokens. */
static void score_tokens(uint32_t row, uint32_t l, uint32_t n) {
    for (uint32_t h = 0; h < KV; h++) {
        uint32_t hpg = w.view.heads_per_group, t = (row * LAYERS + l) * w.view.n_groups + h / hpg;
        for (uint32_t i = w.view.n_slots[t] - n; i < w.view.n_slots[t]; i++) {
            uint32_t at = (w.view.rows[w.view.row_offset[t] + i / BS] * hpg + h % hpg) * BS + i % BS;
            model[at] = number(400 + l, pos[at], h) * (float)(1 + l);
        }
    }
}

/* n tokens of each sequence: keys and values made from layer, position and head. */
static void append(const kvf_seq *seqs, uint32_t n_seqs, uint32_t n) {
    kvf_append_item items[ROWS];
    for (uint32_t i = 0; i < n_seqs; i++) items[i] = (kvf_append_item){seqs[i], n};
    OK(kvf_append(w.m, items, n_seqs, &w.copies));
    run_copies();
    OK(kvf_view_fill(w.m, 0, seqs, n_seqs, &w.view));
    static float q[SLOTS * HEADS * DIM], kv[SLOTS * KV * DIM];
    uint32_t begin_at[ROWS + 1] = {0};
    for (uint32_t i = 0; i < n_seqs; i++) begin_at[i + 1] = (i + 1) * n;
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t i = 0; i < n_seqs * n; i++)
            for (uint32_t d = 0; d < KV * DIM; d++)
                kv[i * KV * DIM + d] = number(l, w.view.next_pos[i / n] - n + i % n, d) * 2 - 1;
        kvf_attention a = {.struct_size = sizeof a, .view = &w.view, .pages = &w.pages, .layer = l, .seq_end = n_seqs};
        a.n_q_heads = HEADS, a.q_begin = begin_at, a.q = q, a.k = kv, a.v = kv;
        a.q_stride = HEADS * DIM, a.kv_stride = KV * DIM;
        OK(kvf_attention_append(NULL, &a, &w.err));
        for (uint32_t i = 0; i < n_seqs; i++) score_tokens(i, l, n);
    }
}

static kvf_moment_rows rows_of(kvf_moment moment, const kvf_seq *seqs, const uint32_t *n_prompt) {
    kvf_moment_rows r = {.struct_size = sizeof r, .moment = moment, .view = &w.view, .seqs = seqs};
    r.row_end = w.view.n_seqs, r.pages = &w.pages, r.scores = &w.scores, r.n_prompt = n_prompt, r.prompt_stride = SLOTS;
    r.changed = w.changed, r.prompt_sums = w.sums, r.prompt_last = w.last, r.prompt_squares = w.squares,
    r.prompt_logprobs = w.logprobs;
    return r;
}

/* A prompt, and what a forward pass would have summed up of it; not its end. */
static kvf_seq prompt(uint32_t n) {
    kvf_seq seq;
    uint32_t needs = kvf_policy_needs(&w.options);
    OK(kvf_seq_create(w.m, &seq));
    OK(kvf_policy_open(w.state, index_of(seq), &w.options, &w.err));
    append(&seq, 1, n);
    for (uint32_t i = 0; i < LAYERS * HEADS * SLOTS; i++) {
        col[i] = number(100, i / SLOTS, i % SLOTS) * (1 + (float)(i / SLOTS / HEADS));
        late[i] = col[i] / 2;
    }
    for (uint32_t i = 0; i < LAYERS * KV * SLOTS; i++) sq[i] = number(101, i / SLOTS, i % SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) lp[i] = -5 * number(102, i, 0);
    for (uint32_t i = 0; i < ROWS; i++) {
        w.sums[i] = needs & (KVF_NEEDS_COL_SUMS | KVF_NEEDS_REPEAT) ? col : NULL;
        w.last[i] = needs & KVF_NEEDS_LAST_ROWS ? late : NULL;
        w.squares[i] = needs & KVF_NEEDS_SQUARES ? sq : NULL;
        w.logprobs[i] = needs & KVF_NEEDS_LOGPROBS ? lp : NULL;
    }
    return seq;
}

/* A moment that first finds too few blocks: nothing has changed, and with the blocks back it goes on. */
static void run_short(const kvf_moment_rows *r, bool expect_short) {
    kvf_block held[BLOCKS];
    uint32_t n = 0, n_slots[ROWS * LAYERS * KV];
    bool sized[ROWS];
    uint32_t n_tables = w.view.n_seqs * w.view.n_layers * w.view.n_groups;
    memcpy(n_slots, w.view.n_slots, n_tables * sizeof *n_slots);
    for (uint32_t i = 0; i < w.view.n_seqs; i++) sized[i] = kvf_policy_sizes(w.state, w.view.seq_index[i]) != NULL;
    while (kvf_block_take(w.m, 0, &held[n]) == KVF_OK) n++;
    kvf_status st = kvf_events_run(w.events, r, &w.err);
    if (expect_short) cr_assert_eq(st, KVF_E_NO_BLOCKS, "%s", kvf_status_name(st));
    for (uint32_t i = 0; i < n; i++) OK(kvf_block_release(w.m, held[i]));
    OK(kvf_audit(w.m, &w.err));
    if (!st) return;
    kvf_view now = {.struct_size = sizeof now};
    OK(kvf_view_fill(w.m, 1, r->seqs, w.view.n_seqs, &now));
    cr_assert(!memcmp(n_slots, now.n_slots, n_tables * sizeof *n_slots), "a table has changed");
    for (uint32_t i = 0; i < w.view.n_seqs; i++)
        cr_assert_eq(sized[i], kvf_policy_sizes(w.state, w.view.seq_index[i]) != NULL, "row %u has sizes", i);
    OK(kvf_events_run(w.events, r, &w.err));
}

static void run_maybe_short(const kvf_moment_rows *r, bool is_short, bool expect_short) {
    if (is_short)
        run_short(r, expect_short);
    else
        OK(kvf_events_run(w.events, r, &w.err));
    for (uint32_t i = 0; i < w.view.n_seqs; i++) w.resized = w.resized * 31 + (w.changed[i] & KVF_ROW_RESIZED) + 1;
}

static void decode(const kvf_seq *seqs, uint32_t n_seqs, uint32_t step, bool is_short) {
    static float row[ROWS * KV * SLOTS];
    float logs[ROWS];
    OK(kvf_view_fill(w.m, 0, seqs, n_seqs, &w.view));
    kvf_moment_rows r = rows_of(KVF_BEFORE_APPEND, seqs, NULL);
    run_maybe_short(&r, is_short, false);
    append(seqs, n_seqs, 1);
    for (uint32_t pass = !w.fail_pass, l = 0; l < LAYERS; l++) {
        if (!pass && l == LAYERS - 1) { /* the pass fails here: taken back, and made again */
            for (uint32_t i = 0; i < n_seqs; i++) OK(kvf_seq_rollback(w.m, seqs[i], 1));
            append(seqs, n_seqs, 1);
            pass = 1, l = 0;
        }
        for (uint32_t i = 0; i < n_seqs * KV * SLOTS; i++) row[i] = number(200 + l, step, i);
        for (uint32_t i = 0; i < n_seqs; i++) logs[i] = -5 * number(300, step, i);
        kvf_mass mass = {.struct_size = sizeof mass, .row = row, .row_stride = SLOTS};
        kvf_policy_batch b = {.struct_size = sizeof b, .view = &w.view, .pages = &w.pages, .scores = &w.scores};
        b.layer = l, b.row_end = n_seqs, b.mass = &mass, b.logprobs = logs;
        OK(kvf_policy_observe(w.state, NULL, &b, &w.err));
        if (w.observe_twice) OK(kvf_policy_observe(w.state, NULL, &b, &w.err));
    }
    r = rows_of(KVF_AFTER_STEP, seqs, NULL);
    run_maybe_short(&r, is_short, false);
}

/* Of all that a sequence keeps: slots, positions, keys, values, scores. */
static uint64_t digest(kvf_seq seq) {
    kvf_view now = {.struct_size = sizeof now};
    uint64_t h = 14695981039346656037u;
    OK(kvf_view_fill(w.m, 1, &seq, 1, &now));
    for (uint32_t t = 0; t < now.n_layers * now.n_groups; t++)
        for (uint32_t s = 0; s < now.n_slots[t]; s++)
            for (uint32_t g = 0; g < now.heads_per_group; g++) {
                uint32_t block = now.rows[now.row_offset[t] + s / BS], at = g * BS + s % BS, hpg = now.heads_per_group;
                uint32_t page = now.score_rows[now.row_offset[t] + s / BS];
                const void *parts[] = {&pos[block * hpg * BS + at], &model[block * hpg * BS + at], &k[block][at * DIM],
                                       &v[block][at * DIM]};
                const size_t bytes[] = {4, 4, DIM * 4, DIM * 4};
                for (size_t i = 0; i < 4; i++)
                    for (size_t j = 0; j < bytes[i]; j++)
                        h = (h ^ ((const unsigned char *)parts[i])[j]) * 1099511628211u;
                uint32_t bits = 0;
                if (page != KVF_NO_BLOCK && kvf_policy_observes(&w.options))
                    memcpy(&bits, &score[page * 4 * hpg * BS + at], 4);
                h = (h ^ bits) * 1099511628211u;
            }
    return h;
}

typedef struct variant {
    bool is_short, observe_twice, fail_pass, swap;
} variant;

/* A sequence and its fork, from a prompt of n tokens on. What differs between variants is in the way, not in the result. */
static void live(const char *policy, uint32_t hpg, budgets of, uint32_t n, variant a, uint64_t out[2]) {
    begin(policy, hpg, of);
    w.observe_twice = a.observe_twice;
    w.fail_pass = a.fail_pass;
    if (n < 40) w.options.budget_tokens = 40;
    kvf_seq seqs[2] = {prompt(n)};
    uint32_t n_prompt[2] = {n, n};
    OK(kvf_seq_fork(w.m, seqs[0], &w.copies, &seqs[1])); /* before its end: both have their events in shared blocks */
    OK(kvf_policy_fork(w.state, index_of(seqs[0]), index_of(seqs[1])));
    OK(kvf_view_fill(w.m, 0, seqs, 2, &w.view));
    kvf_moment_rows r = rows_of(KVF_AT_PROMPT_END, seqs, n_prompt);
    bool evicts = kvf_policy_evicts(&w.options) && n > 60;
    run_maybe_short(&r, a.is_short, evicts);
    for (uint32_t i = 0; i < STEPS; i++) {
        if (i == STEPS / 2 && !(kvf_policy_flags(&w.options) & (KVF_POLICY_PROMPT_ONLY | KVF_POLICY_KEEPS_ALL)))
            OK(kvf_policy_set_budget(w.state, index_of(seqs[0]), 0.2, 0, &w.err));
        if (a.swap && i % 7 == 3) {
            OK(kvf_swap_out(w.m, &seqs[1], 1, &w.copies));
            run_copies();
            OK(kvf_swap_in(w.m, &seqs[1], 1, 0, &w.copies));
            run_copies();
        }
        decode(seqs, 2, i, a.is_short);
    }
    if (kvf_policy_has_metric(&w.options) && kvf_policy_evicts(&w.options)) cr_assert_gt(w.n_reduced, 0);
    for (int i = 0; i < 2; i++) out[i] = digest(seqs[i]) ^ w.resized;
    end();
}

/* Each policy, with a prompt beyond its budget and one within it that outgrows it, one or several head groups. */
static void same_as_plain(variant a) {
    const char *policy;
    for (uint32_t i = 0; (policy = kvf_policy_name(i)); i++)
        for (uint32_t c = 0; c < 12; c++) {
            static const struct {
                uint32_t hpg;
                budgets of;
            } cases[] = {{KV, EQUAL}, {1, EQUAL}, {1, ADAPTIVE}, {1, GLOBAL}, {1, GLOBAL_PROBE}, {1, GLOBAL_REPEAT}};
            uint64_t want[2], got[2];
            uint32_t n = c % 2 ? 24 : 100;
            live(policy, cases[c / 2].hpg, cases[c / 2].of, n, (variant){false}, want);
            live(policy, cases[c / 2].hpg, cases[c / 2].of, n, a, got);
            cr_expect(want[0] == got[0] && want[1] == got[1], "%s, case %u: another result", policy, c);
        }
}

Test(events, too_few_blocks_then_again) { same_as_plain((variant){.is_short = true}); }
Test(events, r2_a_token_is_observed_once) { same_as_plain((variant){.observe_twice = true}); }
Test(events, r2_a_pass_that_fails_and_is_made_again) { same_as_plain((variant){.fail_pass = true}); }
Test(events, a_swap_between_steps_changes_nothing) { same_as_plain((variant){.swap = true}); }

/* 24 prompt tokens: the budget is 16, the least, or for rho 1 none. 120 tokens follow. */
Test(events, r7_a_short_prompt_grows_into_its_budget_and_not_beyond) {
    const char *policy;
    for (uint32_t i = 0; (policy = kvf_policy_name(i)); i++) {
        begin(policy, KV, EQUAL);
        w.options.budget_tokens = 40;
        bool bounded = !(kvf_policy_flags(&w.options) & (KVF_POLICY_PROMPT_ONLY | KVF_POLICY_KEEPS_ALL));
        kvf_seq seq = prompt(24);
        uint32_t n_prompt = 24;
        kvf_moment_rows r = rows_of(KVF_AT_PROMPT_END, &seq, &n_prompt);
        OK(kvf_events_run(w.events, &r, &w.err));
        for (uint32_t step = 0; step < 120; step++) {
            uint32_t sum = 0;
            decode(&seq, 1, step, false);
            OK(kvf_view_fill(w.m, 0, &seq, 1, &w.view));
            for (uint32_t l = 0; l < LAYERS; l++) sum += w.view.n_slots[l];
            cr_assert(!bounded || sum <= LAYERS * (40 + BS / 2), "%s: step %u: %u slots", policy, step, sum);
            cr_assert(bounded || sum == LAYERS * (24 + step + 1), "%s: step %u: %u slots", policy, step, sum);
        }
        end();
    }
}

static kvf_seq victim;
static kvf_status drop_row_one(void *ctx, uint8_t *dropped, kvf_error *err) {
    (void)ctx, (void)err;
    if (!victim) return KVF_E_LIMIT;
    OK(kvf_seq_free(w.m, victim));
    kvf_policy_close(w.state, 1);
    victim = 0;
    dropped[1] = 1;
    return KVF_OK;
}

/* make_room ends a row; the other goes on. A row with the handle 0 takes no part. */
Test(events, make_room_drops_a_row) {
    begin("h2o", KV, EQUAL);
    kvf_events_destroy(w.events);
    kvf_events_config e = {.struct_size = sizeof e, .manager = w.m, .policies = w.state, .make_room = drop_row_one};
    OK(kvf_events_create(&e, &w.events, &w.err));
    kvf_seq seqs[2] = {prompt(100)}, third;
    uint32_t n_prompt[3] = {100, 100, 0};
    uint8_t changed[2];
    OK(kvf_seq_fork(w.m, seqs[0], &w.copies, &seqs[1]));
    OK(kvf_policy_fork(w.state, index_of(seqs[0]), index_of(seqs[1])));
    OK(kvf_seq_fork(w.m, seqs[0], &w.copies, &third)); /* so that both need fresh blocks */
    OK(kvf_view_fill(w.m, 0, seqs, 2, &w.view));
    kvf_moment_rows r = rows_of(KVF_AT_PROMPT_END, seqs, n_prompt);
    r.changed = changed;
    victim = seqs[1];
    kvf_block held[BLOCKS];
    uint32_t n = 0, fresh = 0;
    for (uint32_t i = 0; i < LAYERS; i++) fresh += (30 + 1 + BS) / BS;
    while (kvf_block_take(w.m, 0, &held[n]) == KVF_OK) n++;
    for (uint32_t i = 0; i < fresh; i++) OK(kvf_block_release(w.m, held[--n]));
    OK(kvf_events_run(w.events, &r, &w.err));
    cr_assert(changed[0] == KVF_ROW_RESIZED && changed[1] & KVF_ROW_DROPPED, "%d %d", changed[0], changed[1]);
    for (uint32_t i = 0; i < n; i++) OK(kvf_block_release(w.m, held[i]));
    seqs[1] = 0;
    OK(kvf_view_fill(w.m, 0, seqs, 1, &w.view));
    w.view.n_seqs = 1;
    r = rows_of(KVF_AFTER_STEP, (kvf_seq[]){0}, NULL);
    OK(kvf_events_run(w.events, &r, &w.err));
    end();
}

Test(events, bad_input) {
    begin("d2o", KV, EQUAL);
    kvf_events_config e = {.struct_size = sizeof e, .manager = w.m, .policies = w.state, .max_rows = SEQS + 1};
    kvf_events *none = NULL;
    kvf_seq seq = prompt(50);
    kvf_moment_rows good = rows_of(KVF_AT_PROMPT_END, &seq, NULL), r = good;
#define REFUSES(status, call, word) \
    cr_assert((call) == (status) && strstr(w.err.text, word), "%s: %s", #call, w.err.text)
    REFUSES(KVF_E_INVALID, kvf_events_create(&e, &none, &w.err), "max_rows 5");
    e.manager = NULL;
    REFUSES(KVF_E_INVALID, kvf_events_create(&e, &none, &w.err), "manager: is NULL");
    REFUSES(KVF_E_INVALID, kvf_events_run(w.events, &r, &w.err), "n_prompt is NULL");
    r.seqs = NULL;
    REFUSES(KVF_E_INVALID, kvf_events_run(w.events, &r, &w.err), "seqs is NULL");
    r = good, r.row_end = 2;
    REFUSES(KVF_E_INVALID, kvf_events_run(w.events, &r, &w.err), "rows [0, 2)");
    r = good, r.moment = (kvf_moment)7;
    REFUSES(KVF_E_INVALID, kvf_events_run(w.events, &r, &w.err), "moment 7");
    kvf_policy_close(w.state, index_of(seq));
    r = good, r.moment = KVF_AFTER_STEP;
    REFUSES(KVF_E_STALE, kvf_events_run(w.events, &r, &w.err), "not open");
    end();
}
