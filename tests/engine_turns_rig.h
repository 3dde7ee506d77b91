/* tests/engine_turns_rig.h: dialogues through the engine, and the same by the library's calls alone, on a tiny random model. */
#ifndef KVF_TESTS_ENGINE_TURNS_RIG_H
#define KVF_TESTS_ENGINE_TURNS_RIG_H

#include "d2o_policy/policy.h"
#include "tests/forward_rig.h" /* first: its parameters have the name of the model that the next one declares */

#include "tests/engine_model.h"
#include "tests/failing.h"

enum {
    MAX_TURNS = 3,
    MAX_ANSWER = 12,
    MAX_PROMPT = 256,
    MAX_VOCAB = 300,
    SLOTS = 512,
    N_ARRAYS = 5,
    N_INSTRUCTION = 3,
    MAX_Q = 8,
    MAX_KV = 4,
    MAX_TABLES = N_LAYERS * MAX_KV
};

struct script { /* what is said, and what is answered */
    uint32_t n_turns, n_tokens[MAX_TURNS], n_answer;
    uint32_t tokens[MAX_TURNS][MAX_PROMPT], forced[MAX_TURNS][MAX_ANSWER];
};

struct turn {
    float logits[MAX_ANSWER][MAX_VOCAB];
    double logprobs[MAX_ANSWER];
    uint64_t kept; /* digest of the positions held when the last token came */
    uint32_t keep[N_LAYERS], n_prompt, n_block_steps;
    uint32_t groups[MAX_TABLES]; /* slots that the head groups keep, where they have sizes of their own */
};

struct talk {
    kvf_engine *engine;
    kvf_request id;
    const struct script *script;
    uint32_t turn, n_ended, n_steps, n_idle_lost;
    bool idle, at_once, slow; /* slow: idle for some steps */
    struct turn turns[MAX_TURNS];
};

static inline struct script script_of(const uint32_t *n_tokens, uint32_t n_turns, uint32_t n_answer, uint32_t seed) {
    struct script s = {.n_turns = n_turns, .n_answer = n_answer};
    uint64_t rng = seed;
    for (uint32_t t = 0; t < n_turns; t++) {
        s.n_tokens[t] = n_tokens[t];
        for (uint32_t i = 0; i < MAX_PROMPT; i++) s.tokens[t][i] = TINY_BYTE_0 + (uint32_t)(gw_random(&rng) % 250);
        for (uint32_t i = 0; i < MAX_ANSWER; i++) s.forced[t][i] = TINY_BYTE_0 + (uint32_t)(gw_random(&rng) % 250);
    }
    return s;
}

static inline void expect_talk(const struct talk *a, const struct talk *b, const char *what) {
    for (uint32_t t = 0; t < a->script->n_turns; t++) {
        const struct turn *x = &a->turns[t], *y = &b->turns[t];
        for (uint32_t i = 0; i < a->script->n_answer; i++)
            cr_assert(!memcmp(x->logits[i], y->logits[i], sizeof x->logits[i]), "%s: turn %u, token %u: %.9g, %.9g",
                      what, t, i, (double)x->logits[i][0], (double)y->logits[i][0]);
        cr_assert(x->kept == y->kept && !memcmp(x->keep, y->keep, sizeof x->keep), "%s: turn %u", what, t);
        cr_assert(!memcmp(x->groups, y->groups, sizeof x->groups), "%s: turn %u: groups", what, t);
        cr_assert_eq(x->n_prompt, y->n_prompt);
    }
}

/* ---- Through the engine ---------------------------------------------------------------------------------------- */

static const uint32_t instruction[N_INSTRUCTION] = {9, 70, 9};

static inline kvf_engine_config config_of(uint32_t n_blocks, uint32_t chunk) {
    kvf_engine_config c = model_config(n_blocks * 16 / BLOCK, 8);
    c.instruction = instruction;
    c.n_instruction = N_INSTRUCTION;
    c.want_mass_bias = 0;
    c.block_size = 16;
    c.chunk = chunk;
    c.max_context = SLOTS;
    c.n_score_arrays = N_ARRAYS;
    c.deterministic = 1;
    return c;
}

static inline uint64_t digest_of(const uint32_t *pos, uint32_t n, uint64_t digest) {
    for (uint32_t i = 0; i < n; i++) digest = (digest ^ pos[i]) * 1099511628211u;
    return (digest ^ 0xffffffffu) * 1099511628211u;
}

static inline void note_groups(struct turn *turn, const kvf_policy_state *state, uint32_t seq, uint32_t n_groups) {
    const kvf_layer_size *groups = kvf_policy_group_sizes(state, seq);
    for (uint32_t i = 0; groups && i < N_LAYERS * n_groups; i++) turn->groups[i] = groups[i].keep;
}

static inline void next_turn(struct talk *t) {
    const struct script *s = t->script;
    if (!t->idle || t->turn + 1 >= s->n_turns || (t->slow && t->n_steps++ % 7)) return;
    t->n_idle_lost += !kvf__live_find(t->engine, t->id)->seq;
    t->idle = false;
    t->turn++;
    kvf_turn turn = {.struct_size = sizeof turn,
                     .tokens = s->tokens[t->turn],
                     .n_tokens = s->n_tokens[t->turn],
                     .max_tokens = s->n_answer,
                     .forced = s->forced[t->turn]};
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_engine_extend(t->engine, t->id, &turn, &err), KVF_OK, "%s", err.text);
}

static inline void on_finish(void *user, const kvf_result *r) {
    struct talk *t = user;
    struct turn *turn = &t->turns[t->turn];
    cr_assert(!t->idle && !r->error, "%s", r->error ? r->error : "twice");
    t->n_ended++;
    if (r->finish == KVF_FINISH_ABORTED) return;
    cr_assert(r->finish == KVF_FINISH_LENGTH && r->n_tokens == t->script->n_answer);
    cr_assert(!memcmp(r->tokens, t->script->forced[t->turn], r->n_tokens * sizeof *r->tokens));
    memcpy(turn->logprobs, r->logprobs, r->n_tokens * sizeof *r->logprobs);
    turn->n_prompt = r->n_prompt;
    turn->n_block_steps = r->n_block_steps;
    for (uint32_t l = 0; l < N_LAYERS; l++) turn->keep[l] = r->sizes ? r->sizes[l].keep : 0;
    const kvf_policy_state *state;
    (void)kvf_engine_manager(t->engine, &state);
    note_groups(turn, state, kvf_engine_seq_index(t->engine, t->id, 0), t->engine->n_groups);
    uint32_t pos[SLOTS], n;
    turn->kept = 14695981039346656037u;
    for (uint32_t l = 0; l < N_LAYERS; l++)
        for (uint32_t h = 0; h < kvf_model_get_info(model)->n_kv_heads; h++) {
            cr_assert_eq(kvf_engine_positions(t->engine, t->id, l, h, pos, SLOTS, &n), KVF_OK);
            turn->kept = digest_of(pos, n, turn->kept);
        }
    t->idle = true;
    if (t->at_once) next_turn(t);
}

static inline void on_logits(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits) {
    struct talk *t = user;
    cr_assert(index == 0 && request == t->id && step < MAX_ANSWER);
    memcpy(t->turns[t->turn].logits[step], logits, kvf_model_get_info(model)->n_vocab * sizeof *logits);
}

static inline void begin_talk(kvf_engine *e, struct talk *t, const char *policy, const struct script *s, bool slow) {
    kvf_policy_options o = options_of(policy);
    kvf_generate g = {.struct_size = sizeof g,
                      .tokens = s->tokens[0],
                      .n_tokens = s->n_tokens[0],
                      .max_tokens = s->n_answer,
                      .forced = s->forced[0],
                      .policy = &o,
                      .keep_open = 1,
                      .user = t,
                      .on_finish = on_finish,
                      .on_logits = on_logits};
    kvf_error err = {.text = ""};
    memset(t, 0, sizeof *t);
    t->engine = e;
    t->script = s;
    t->slow = slow;
    cr_assert_eq(kvf_engine_submit(e, &g, &t->id, &err), KVF_OK, "%s", err.text);
}

static inline int one_step(kvf_engine *e) {
    int more;
    step(e, &more);
    return more;
}

static inline void run_to_idle(kvf_engine *e) {
    for (int n = 0; one_step(e); n++) cr_assert_lt(n, 2000, "no end");
}

/* To the end of all, and nothing is left. */
static inline void run_talks(kvf_engine *e, struct talk *t, uint32_t n) {
    for (uint32_t i = 0, n_steps = 0; i < n; n_steps++) {
        cr_assert_lt(n_steps, 5000, "no end");
        (void)one_step(e);
        for (uint32_t k = 0; k < n; k++) next_turn(&t[k]);
        for (; i < n && t[i].idle && t[i].turn + 1 == t[i].script->n_turns; i++)
            cr_assert_eq(kvf_engine_abort(e, t[i].id), KVF_OK);
    }
    kvf_engine_stats s = stats_of(e);
    cr_expect(s.occupancy.blocks.n_held == 0 && s.occupancy.blocks.n_promised == 0 && s.occupancy.n_seqs == 0);
}

static inline void talk_alone(const kvf_engine_config *c, struct talk *t, const char *policy, const struct script *s) {
    kvf_engine *e = create(c);
    begin_talk(e, t, policy, s, false);
    run_talks(e, t, 1);
    cr_assert_eq(t->n_ended, s->n_turns);
    kvf_engine_destroy(e);
}

/* ---- By hand ---------------------------------------------------------------------------------------------------- */

struct hand {
    forward_rig r;
    kvf_policy_state *state;
    kvf_policy_options o;
    kvf_policy_ops ops;
    kvf_score_pages scores;
    kvf_plan *plan;
    void *workspace;
    size_t workspace_bytes;
    float *sums, *last, *squares, *row, *max;
    float logprobs[SLOTS], logprob; /* by position; of the newest token */
    float logits[MAX_VOCAB];
    bool prompt;
    uint32_t n_groups;
};

static inline void hand_ok(struct hand *h, kvf_status st) {
    cr_assert_eq(st, KVF_OK, "%s; %s", h->r.err.text, kvf_manager_error(h->r.manager)->text);
}

static inline kvf_policy_batch hand_batch(struct hand *h, float **sums, float **last, float **squares,
                                          const float **p) {
    uint32_t needs = kvf_policy_needs(&h->o);
    sums[0] = !h->prompt ? NULL : needs & KVF_NEEDS_COL_SUMS ? h->sums : needs & KVF_NEEDS_REPEAT ? h->max : NULL;
    last[0] = h->prompt && needs & KVF_NEEDS_LAST_ROWS ? h->last : NULL;
    squares[0] = h->prompt && needs & KVF_NEEDS_SQUARES ? h->squares : NULL;
    p[0] = h->prompt && needs & KVF_NEEDS_LOGPROBS ? h->logprobs : NULL;
    return (kvf_policy_batch){.struct_size = sizeof(kvf_policy_batch),
                              .view = &h->r.view,
                              .pages = &h->r.pages,
                              .scores = &h->scores,
                              .prompt_sums = h->prompt ? sums : NULL,
                              .prompt_last = h->prompt ? last : NULL,
                              .prompt_squares = h->prompt ? squares : NULL,
                              .prompt_logprobs = h->prompt ? p : NULL,
                              .prompt_stride = SLOTS,
                              .logprobs = &h->logprob,
                              .workspace = h->workspace,
                              .workspace_bytes = h->workspace_bytes};
}

static inline void hand_open(struct hand *h, const char *policy, uint32_t heads_per_group) {
    enum { BLOCKS = 800 };
    const kvf_model_info *info = kvf_model_get_info(model);
    uint32_t n_kv = info->n_kv_heads, n_q = info->n_q_heads;
    memset(h, 0, sizeof *h);
    heads_per_group = heads_per_group ? heads_per_group : n_kv;
    h->n_groups = n_kv / heads_per_group;
    rig_open(&h->r, model, KVF_F32, 2, heads_per_group, BLOCKS, SLOTS, SLOTS);
    h->o = options_of(policy);
    h->ops = kvf__policy_ops_resolve(h->o.ops);
    kvf_policy_state_config c = {.struct_size = sizeof c,
                                 .n_layers = N_LAYERS,
                                 .n_kv_heads = info->n_kv_heads,
                                 .n_q_heads = info->n_q_heads,
                                 .head_dim = info->head_dim,
                                 .block_size = 16,
                                 .max_seqs = RIG_SEQS,
                                 .max_slots = SLOTS,
                                 .n_groups = h->n_groups};
    cr_assert(n_kv <= MAX_KV && n_q <= MAX_Q && info->n_vocab <= MAX_VOCAB);
    hand_ok(h, kvf_policy_state_create(&c, &h->state, &h->r.err));
    hand_ok(h, kvf_policy_open(h->state, 0, &h->o, &h->r.err));
    hand_ok(h, kvf_policy_workspace_bytes(2, info->head_dim, n_kv, SLOTS, &h->workspace_bytes));
    hand_ok(h, kvf_plan_create(NULL, n_kv, MAX_TABLES, SLOTS * MAX_TABLES, &h->plan, &h->r.err));
    h->workspace = aligned_alloc(64, (h->workspace_bytes + 63) / 64 * 64);
    h->scores = (kvf_score_pages){.struct_size = sizeof h->scores,
                                  .base = rig_memory((size_t)BLOCKS * N_ARRAYS * heads_per_group * 16 * sizeof(float)),
                                  .n_pages = BLOCKS,
                                  .n_arrays = N_ARRAYS,
                                  .heads_per_group = heads_per_group,
                                  .block_size = 16};
    h->sums = rig_memory((size_t)N_LAYERS * n_q * SLOTS * sizeof(float));
    h->max = rig_memory((size_t)N_LAYERS * n_q * SLOTS * sizeof(float));
    h->last = rig_memory((size_t)N_LAYERS * n_q * SLOTS * sizeof(float));
    h->squares = rig_memory((size_t)N_LAYERS * n_kv * SLOTS * sizeof(float));
    h->row = rig_memory((size_t)n_kv * SLOTS * sizeof(float));
}

static inline void hand_close(struct hand *h) {
    kvf_plan_destroy(h->plan);
    kvf_policy_state_destroy(h->state);
    rig_close(&h->r);
    free(h->workspace);
    free(h->scores.base);
    free(h->sums);
    free(h->max);
    free(h->last);
    free(h->squares);
    free(h->row);
}

/* Equal groups by their layers, the others by their tables. */
static inline void hand_due(struct hand *h, kvf_moment moment, uint32_t *keep) {
    uint32_t slots[N_LAYERS], by_layer[N_LAYERS], n_due = 0;
    float *sums[1], *last[1], *squares[1];
    const float *p[1];
    kvf_policy_batch b = hand_batch(h, sums, last, squares, p);
    if (h->o.head_budget == KVF_HEAD_BUDGET_ADAPTIVE && h->n_groups > 1) {
        hand_ok(h, kvf_policy_due(h->state, h->r.stream, &b, 0, moment, keep, &n_due, &h->r.err));
        return;
    }
    for (uint32_t l = 0; l < N_LAYERS; l++) slots[l] = h->r.view.n_slots[l * h->n_groups];
    (void)kvf__policy_due_layers(h->state, 0, moment, slots, by_layer);
    for (uint32_t t = 0; t < N_LAYERS * h->n_groups; t++) keep[t] = by_layer[t / h->n_groups];
}

/* The events of one moment. pages: before the first of a prompt's, the score pages. */
static inline void hand_events(struct hand *h, kvf_moment moment, uint32_t kind, bool pages) {
    uint32_t slots[MAX_TABLES], keep[MAX_TABLES], n_events = 0, n_items = 0, item_of[MAX_TABLES];
    kvf_event events[MAX_TABLES];
    kvf_compact_item items[N_LAYERS];
    float *sums[1], *last[1], *squares[1];
    const float *p[1];
    h->r.view.struct_size = sizeof h->r.view;
    hand_ok(h, kvf_view_fill(h->r.manager, 0, h->r.seqs, 1, &h->r.view));
    memcpy(slots, h->r.view.n_slots, N_LAYERS * h->n_groups * sizeof *slots);
    hand_due(h, moment, keep);
    uint32_t step = kvf_policy_group_sizes(h->state, 0) ? 1 : h->n_groups; /* tables of an event */
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        uint32_t *of = slots + l * h->n_groups, *to = keep + l * h->n_groups, n_in_layer = 0;
        for (uint32_t g = 0; g < h->n_groups; g += step) {
            if (!to[g] && !(h->prompt && kvf_policy_n_arrays(&h->o))) continue;
            item_of[n_events] = to[g] ? n_items : UINT32_MAX;
            n_in_layer += to[g] != 0;
            for (uint32_t i = g; i < g + step && to[g]; i++) of[i] = to[g];
            events[n_events++] = (kvf_event){0, l, of[g], kind, step < h->n_groups ? g : 0, step < h->n_groups};
        }
        if (n_in_layer) items[n_items++] = (kvf_compact_item){h->r.seqs[0], l, of[0], step < h->n_groups ? of : NULL};
    }
    if (!n_events) return;
    if (pages) hand_ok(h, kvf_seq_take_scores(h->r.manager, h->r.seqs[0], slots));
    h->r.view.struct_size = sizeof h->r.view;
    hand_ok(h, kvf_view_fill(h->r.manager, 0, h->r.seqs, 1, &h->r.view));
    kvf_compaction compaction = {0};
    if (n_items) hand_ok(h, kvf_compact_begin(h->r.manager, items, n_items, &compaction));
    kvf_policy_batch b = hand_batch(h, sums, last, squares, p);
    b.events = events;
    b.n_events = n_events;
    b.compaction = &compaction;
    b.compaction_item = item_of;
    hand_ok(h, h->ops.match(h->state, h->r.stream, &b, h->plan, &h->r.err));
    hand_ok(h, h->ops.gate(h->state, h->r.stream, &b, h->plan, &h->r.err));
    hand_ok(h, h->ops.apply(h->state, h->r.stream, &b, h->plan, &h->r.err));
    if (n_items) hand_ok(h, kvf_compact_commit(h->r.manager));
}

static inline kvf_status hand_observe(void *ctx, uint32_t layer, const kvf_mass *mass) {
    struct hand *h = ctx;
    float *sums[1], *last[1], *squares[1];
    const float *p[1];
    kvf_policy_batch b = hand_batch(h, sums, last, squares, p);
    kvf_mass m = *mass;
    static const uint8_t wanted = 1;
    m.row_wanted = &wanted;
    b.layer = layer;
    b.row_end = 1;
    b.mass = &m;
    return h->ops.observe(h->state, h->r.stream, &b, &h->r.err);
}

/* n tokens at position `at`; next: what follows them, for its probability. */
static inline void hand_forward(struct hand *h, const uint32_t *tokens, uint32_t n, uint32_t at, uint32_t last_begin,
                                const uint32_t *next) {
    uint32_t out, zero = 0, targets[SLOTS], needs = kvf_policy_needs(&h->o);
    double logprobs[SLOTS];
    float *sums = h->sums, *last = h->last, *squares = h->squares;
    uint8_t wanted = (needs & KVF_NEEDS_ROW) != 0, gqa = (uint8_t)h->o.gqa;
    bool decode = !h->prompt;
    kvf_forward f = rig_append(&h->r, &zero, &n, 1, decode, tokens, &out, h->logits);
    f.deterministic = 1;
    f.prompt_stride = SLOTS;
    f.prompt_sums = !decode && needs & KVF_NEEDS_COL_SUMS ? &sums : NULL;
    f.prompt_last = !decode && needs & KVF_NEEDS_LAST_ROWS ? &last : NULL;
    f.prompt_squares = !decode && needs & KVF_NEEDS_SQUARES ? &squares : NULL;
    f.last_begin = &last_begin;
    f.row = decode && wanted ? h->row : NULL;
    f.row_stride = SLOTS;
    f.row_wanted = &wanted;
    f.row_gqa = &gqa;
    f.after_layer = decode && kvf_policy_observes(&h->o) ? hand_observe : NULL;
    f.ctx = h;
    for (uint32_t i = 1; i < n; i++) targets[i - 1] = tokens[i];
    targets[n - 1] = next ? *next : KVF_NO_TOKEN;
    f.targets = needs & KVF_NEEDS_LOGPROBS ? targets : NULL;
    f.logprobs = logprobs;
    hand_ok(h, kvf_model_forward(model, h->r.activations, h->r.stream, &f, &h->r.err));
    for (uint32_t i = 0; f.targets && i < n; i++)
        if (targets[i] != KVF_NO_TOKEN) h->logprobs[at + i + 1] = (float)logprobs[i];
}

/* The n tokens of a prompt or segment up to position end, repeated. */
static inline void hand_repeat(struct hand *h, const uint32_t *tokens, uint32_t n, uint32_t end) {
    uint32_t joined[N_INSTRUCTION + MAX_PROMPT], out, zero = 0, begin = end - n;
    uint32_t piece = KVF__MIN(h->o.repeat_piece ? h->o.repeat_piece : n, SLOTS - end - N_INSTRUCTION);
    const uint8_t by_residual = h->o.score_norm == KVF_SCORE_NORM_OUTPUT;
    float *max = h->max;
    memset(max, 0, (size_t)N_LAYERS * kvf_model_get_info(model)->n_q_heads * SLOTS * sizeof *max);
    memcpy(joined, instruction, sizeof instruction);
    for (uint32_t i = 0, m; i < n; i += m) {
        m = KVF__MIN(piece, n - i);
        memcpy(joined + N_INSTRUCTION, tokens + i, m * sizeof *joined);
        uint32_t n_all = N_INSTRUCTION + m;
        kvf_forward f = rig_append(&h->r, &zero, &n_all, 1, 0, joined, &out, h->logits);
        f.n_out = 0;
        f.deterministic = 1;
        f.prompt_stride = SLOTS;
        f.prompt_max = &max;
        f.max_begin = &begin;
        f.max_end = &end;
        f.max_by_residual = &by_residual;
        hand_ok(h, kvf_model_forward(model, h->r.activations, h->r.stream, &f, &h->r.err));
        hand_ok(h, kvf_seq_rollback(h->r.manager, h->r.seqs[0], n_all));
    }
    h->r.view.struct_size = sizeof h->r.view;
    hand_ok(h, kvf_view_fill(h->r.manager, 0, h->r.seqs, 1, &h->r.view));
    kvf_repetition r = {.struct_size = sizeof r, .view = &h->r.view, .pages = &h->r.pages, .begin = begin, .end = end};
    r.prompt_max = max;
    r.prompt_stride = SLOTS;
    if (by_residual) hand_ok(h, kvf_model_score(model, h->r.activations, h->r.stream, &r, &h->r.err));
}

/* A prompt, or a segment of it, in chunks; total: of all prompt tokens. */
static inline void hand_prompt(struct hand *h, const uint32_t *tokens, uint32_t n, uint32_t at, uint32_t total,
                               uint32_t chunk) {
    bool first = at == 0;
    const kvf_model_info *info = kvf_model_get_info(model);
    double variance[N_LAYERS * MAX_Q];
    float *sums[1], *last[1], *squares[1];
    const float *p[1];
    h->prompt = true;
    memset(h->sums, 0, (size_t)N_LAYERS * info->n_q_heads * SLOTS * sizeof(float));
    memset(h->last, 0, (size_t)N_LAYERS * info->n_q_heads * SLOTS * sizeof(float));
    memset(h->squares, 0, (size_t)N_LAYERS * info->n_kv_heads * SLOTS * sizeof(float));
    if (first) h->logprobs[0] = 0;
    for (uint32_t i = 0, m; i < n; i += m) {
        m = KVF__MIN(chunk - (at + i) % chunk, n - i);
        hand_forward(h, tokens + i, m, at + i, at + n - KVF__MIN(n, h->o.score_window),
                     i + m < n ? &tokens[i + m] : NULL);
    }
    if (kvf_policy_needs(&h->o) & KVF_NEEDS_REPEAT) hand_repeat(h, tokens, n, at + n);
    kvf_policy_batch b = hand_batch(h, sums, last, squares, p);
    bool metric = first && h->ops.metric && sums[0];
    if (metric) hand_ok(h, h->ops.metric(h->state, h->r.stream, &b, 0, n, variance, &h->r.err));
    hand_ok(h, h->ops.budget(h->state, 0, metric ? variance : NULL, total, &h->r.err));
    hand_events(h, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, first && kvf_policy_n_arrays(&h->o));
    h->prompt = false;
}

static inline void hand_decode(struct hand *h, const uint32_t *token, uint32_t at, double logprob,
                               const uint32_t *next) {
    h->logprob = (float)logprob;
    hand_events(h, KVF_BEFORE_APPEND, KVF_EVENT_PROMPT, false);
    hand_forward(h, token, 1, at, 0, next);
    bool deferred = h->o.defer_first_decode && !kvf_policy_sizes(h->state, 0);
    hand_events(h, KVF_AFTER_STEP, deferred ? KVF_EVENT_PROMPT : KVF_EVENT_DECODE, false);
}

static inline double logprob_by_hand(const float *logits, uint32_t token) {
    double best;
    uint32_t n_vocab = kvf_model_get_info(model)->n_vocab;
    uint32_t at = kvf_sample(&(kvf_sampling){.temperature = 0}, 0, logits, n_vocab, NULL, &best);
    return (double)logits[token] - (double)logits[at] - -best;
}

static inline int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static inline void hand_note(struct hand *h, struct turn *turn, uint32_t n_prompt) {
    const kvf_layer_size *sizes = kvf_policy_sizes(h->state, 0);
    uint32_t pos[SLOTS], n, per_group = h->r.pages.heads_per_group;
    const uint32_t *row;
    note_groups(turn, h->state, 0, h->n_groups);
    turn->n_prompt = n_prompt;
    turn->kept = 14695981039346656037u;
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        turn->keep[l] = sizes ? sizes[l].keep : 0;
        for (uint32_t head = 0; head < kvf_model_get_info(model)->n_kv_heads; head++) {
            hand_ok(h, kvf_seq_table(h->r.manager, h->r.seqs[0], l, head / per_group, &n, NULL, &row));
            for (uint32_t s = 0; s < n; s++)
                pos[s] = h->r.pages.pos[((size_t)row[s / 16] * per_group + head % per_group) * 16 + s % 16];
            qsort(pos, n, sizeof *pos, ascending);
            turn->kept = digest_of(pos, n, turn->kept);
        }
    }
}

/* The last token of an answer is decoded when a turn follows it. */
static inline void by_hand_groups(struct talk *t, const char *policy, const struct script *s, uint32_t chunk,
                                  uint32_t heads_per_group) {
    struct hand h;
    uint32_t at = 0, total = 0;
    memset(t, 0, sizeof *t);
    t->script = s;
    hand_open(&h, policy, heads_per_group);
    for (uint32_t i = 0; i < s->n_turns; i++) {
        struct turn *turn = &t->turns[i];
        total += s->n_tokens[i];
        hand_prompt(&h, s->tokens[i], s->n_tokens[i], at, total, chunk);
        at += s->n_tokens[i];
        for (uint32_t k = 0; k < s->n_answer; k++, at++) {
            memcpy(turn->logits[k], h.logits, kvf_model_get_info(model)->n_vocab * sizeof(float));
            double logprob = logprob_by_hand(h.logits, s->forced[i][k]);
            bool last = k + 1 == s->n_answer;
            if (last) hand_note(&h, turn, total);
            if (last && i + 1 == s->n_turns) break;
            hand_decode(&h, &s->forced[i][k], at, logprob, last ? &s->tokens[i + 1][0] : NULL);
        }
    }
    hand_close(&h);
}
static inline void by_hand(struct talk *t, const char *policy, const struct script *s, uint32_t chunk) {
    by_hand_groups(t, policy, s, chunk, 0);
}

#endif
