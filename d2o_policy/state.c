/* The state of sequences: one slab for max_seqs of them, indexed by kvf_seq_index. */
#include <math.h>

#include "d2o_policy/policy.h"

static kvf_status check_config(const kvf_policy_state_config *c, kvf_error *err) {
    struct {
        const char *name;
        uint32_t value, max;
    } fields[] = {{"n_layers", c->n_layers, KVF__MAX_LAYERS}, {"n_kv_heads", c->n_kv_heads, 1024},
                  {"n_q_heads", c->n_q_heads, 65536},         {"n_q_heads_total", c->n_q_heads_total, 1u << 24},
                  {"max_seqs", c->max_seqs, 1u << 20},        {"max_slots", c->max_slots, KVF__MAX_TOKENS}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value == 0 || fields[i].value > fields[i].max)
            return kvf__fail(err, KVF_E_INVALID, "%s %u: must be in [1, %u]", fields[i].name, fields[i].value,
                             fields[i].max);
    if (c->n_q_heads % c->n_kv_heads)
        return kvf__fail_field(err, KVF_E_INVALID, "n_q_heads", c->n_q_heads, 0, "must be a multiple of n_kv_heads %u",
                               c->n_kv_heads);
    if (c->q_head_begin > c->n_q_heads_total || c->n_q_heads > c->n_q_heads_total - c->q_head_begin)
        return kvf__fail_field(err, KVF_E_INVALID, "q_head_begin", c->q_head_begin, 0,
                               "with n_q_heads %u it must end within n_q_heads_total %u", c->n_q_heads,
                               c->n_q_heads_total);
    if (c->head_dim == 0 || c->head_dim % 8 || c->head_dim > 256)
        return kvf__fail_field(err, KVF_E_INVALID, "head_dim", c->head_dim, 0, "must be a multiple of 8, at most 256");
    if (c->block_size < 8 || c->block_size > 256 || (c->block_size & (c->block_size - 1)))
        return kvf__fail_field(err, KVF_E_INVALID, "block_size", c->block_size, 0,
                               "must be a power of two in [8, 256]");
    if (c->n_groups > c->n_kv_heads || c->n_kv_heads % c->n_groups)
        return kvf__fail_field(err, KVF_E_INVALID, "n_groups", c->n_groups, 0, "must divide n_kv_heads %u",
                               c->n_kv_heads);
    return KVF_OK;
}

/* Lays the state out; with slab->base NULL only its size is learnt. */
static void lay_out(kvf__slab *slab, const kvf_policy_state_config *c) {
    size_t n = c->n_layers, heads = n * c->n_kv_heads, seqs = c->max_seqs;
    kvf_policy_state *state = kvf__slab_take(slab, 1, sizeof *state);
    kvf__policy_seq *list = kvf__slab_take(slab, seqs, sizeof *list);
    double *scratch = kvf__slab_take(slab, 4 * n, sizeof *scratch);
    uint32_t *integers = kvf__slab_take(slab, 2 * n, sizeof *integers);
    kvf_layer_size *changed = kvf__slab_take(slab, n, sizeof *changed);
    double *weights = kvf__slab_take(slab, seqs * n, sizeof *weights);
    double *density = kvf__slab_take(slab, seqs * n, sizeof *density);
    kvf_layer_size *sizes = kvf__slab_take(slab, seqs * n, sizeof *sizes);
    double *tau = kvf__slab_take(slab, seqs * heads, sizeof *tau);
    uint32_t *scored = kvf__slab_take(slab, seqs * heads, sizeof *scored);
    uint32_t *rows = kvf__slab_take(slab, seqs * n, sizeof *rows);
    uint32_t *seen = kvf__slab_take(slab, seqs * n, sizeof *seen);
    kvf_layer_size *group_sizes = kvf__slab_take(slab, seqs * n * c->n_groups, sizeof *group_sizes);
    uint8_t *dealt = kvf__slab_take(slab, seqs * n, sizeof *dealt);
    uint32_t *layer_slots = kvf__slab_take(slab, n, sizeof *layer_slots);
    uint32_t *group_counts = kvf__slab_take(slab, c->n_groups, sizeof *group_counts);
    double *group_next = kvf__slab_take(slab, c->n_groups, sizeof *group_next);
    kvf_event *group_events = kvf__slab_take(slab, n * c->n_groups, sizeof *group_events);
    double *bins = kvf__slab_take(slab, KVF__BINS, sizeof *bins);
    double *ties = kvf__slab_take(slab, n * c->n_q_heads_total, sizeof *ties);
    uint32_t *above = kvf__slab_take(slab, n * c->n_groups, sizeof *above);
    uint32_t *equal = kvf__slab_take(slab, n * c->n_groups, sizeof *equal);
    size_t n_values = c->n_groups > 1 ? (size_t)c->n_groups * c->max_slots : 0;
    double *values = n_values ? kvf__slab_take(slab, n_values, sizeof *values) : NULL;
    if (!slab->base || slab->bad) return;
    state->config = *c;
    state->seqs = list;
    state->scratch = scratch;
    state->integers = integers;
    state->sizes = changed;
    state->layer_slots = layer_slots;
    state->group_counts = group_counts;
    state->group_next = group_next;
    state->group_events = group_events;
    state->values = values;
    state->bins = bins;
    state->ties = ties;
    state->above = above;
    state->equal = equal;
    state->arrays = (kvf__policy_seq){.weights = weights,
                                      .density = density,
                                      .sizes = sizes,
                                      .tau = tau,
                                      .scored = scored,
                                      .rows = rows,
                                      .seen = seen,
                                      .group_sizes = group_sizes,
                                      .dealt = dealt};
}

/* Its arrays, when it is first used: those of sequences that never run cost no memory. */
static kvf__policy_seq *place(kvf_policy_state *state, uint32_t seq) {
    kvf__policy_seq *s = &state->seqs[seq];
    const kvf__policy_seq *all = &state->arrays;
    size_t n = state->config.n_layers, heads = n * state->config.n_kv_heads;
    s->weights = all->weights + seq * n;
    s->density = all->density + seq * n;
    s->sizes = all->sizes + seq * n;
    s->tau = all->tau + seq * heads;
    s->scored = all->scored + seq * heads;
    s->rows = all->rows + seq * n;
    s->seen = all->seen + seq * n;
    s->group_sizes = all->group_sizes + seq * n * state->config.n_groups;
    s->dealt = all->dealt + seq * n;
    return s;
}

kvf_status kvf_policy_state_create(const kvf_policy_state_config *config, kvf_policy_state **out, kvf_error *err) {
    kvf_policy_state_config c;
    kvf_status st = kvf__config_read(&c, sizeof c, config, "kvf_policy_state_config", err);
    if (st) return st;
    if (!out) return kvf__fail(err, KVF_E_INVALID, "kvf_policy_state_create: out is NULL");
    c.struct_size = sizeof c;
    if (c.n_q_heads_total == 0) c.n_q_heads_total = c.n_q_heads;
    if (c.n_groups == 0) c.n_groups = 1;
    st = check_config(&c, err);
    if (!st) st = kvf__allocator_resolve(&c.allocator, &c.allocator, err);
    if (st) return st;
    kvf__slab slab = {NULL, 0, false};
    lay_out(&slab, &c);
    if (slab.bad)
        return kvf__fail(err, KVF_E_OVERFLOW, "policy state: max_seqs %u x n_layers %u x n_kv_heads %u is too large",
                         c.max_seqs, c.n_layers, c.n_kv_heads);
    size_t bytes = slab.used;
    slab = (kvf__slab){kvf__alloc(&c.allocator, bytes), 0, false};
    if (!slab.base) return kvf__fail(err, KVF_E_NO_MEMORY, "policy state: %zu bytes could not be allocated", bytes);
    lay_out(&slab, &c);
    *out = (kvf_policy_state *)(void *)slab.base;
    (*out)->bytes = bytes;
    return KVF_OK;
}

void kvf_policy_state_destroy(kvf_policy_state *state) {
    if (!state) return;
    kvf_allocator a = state->config.allocator;
    kvf__free(&a, state, state->bytes);
}

kvf__policy_seq *kvf__policy_seq_get(const kvf_policy_state *state, uint32_t seq) {
    if (!state || seq >= state->config.max_seqs || !state->seqs[seq].open) return NULL;
    return &state->seqs[seq];
}

kvf_status kvf_policy_open(kvf_policy_state *state, uint32_t seq, const kvf_policy_options *options, kvf_error *err) {
    kvf_policy_options o;
    if (!state) return kvf__fail(err, KVF_E_INVALID, "kvf_policy_open: state is NULL");
    if (seq >= state->config.max_seqs)
        return kvf__fail_field(err, KVF_E_INVALID, "seq", seq, 0, "must be below max_seqs %u", state->config.max_seqs);
    kvf_status st = kvf_policy_options_read(&o, sizeof o, options, err);
    if (!st) st = kvf_policy_options_check(&o, state->config.n_layers, state->config.block_size, err);
    if (!st) st = kvf__policy_resolved(&o, err);
    if (st) return st;
    kvf__policy_seq *s = place(state, seq);
    s->open = true;
    s->budgeted = s->sized = s->deferred = s->changed = s->has_density = s->resized = s->has_pages = false;
    s->options = o;
    s->n_prompt = s->segment = s->budget = s->lo = 0;
    s->counts = (kvf_policy_counts){0};
    size_t heads = (size_t)state->config.n_layers * state->config.n_kv_heads;
    for (size_t i = 0; i < heads; i++) s->tau[i] = NAN;
    memset(s->dealt, 0, state->config.n_layers * sizeof *s->dealt);
    memset(s->scored, 0, heads * sizeof *s->scored);
    memset(s->rows, 0, state->config.n_layers * sizeof *s->rows);
    memset(s->seen, 0, state->config.n_layers * sizeof *s->seen);
    return KVF_OK;
}

kvf_status kvf_policy_fork(kvf_policy_state *state, uint32_t src, uint32_t dst) {
    kvf__policy_seq *a = kvf__policy_seq_get(state, src);
    if (!state) return KVF_E_INVALID;
    if (!a)
        return kvf__fail(&state->error, KVF_E_STALE, "fork: seq %u is not open (max_seqs is %u)", src,
                         state->config.max_seqs);
    if (dst >= state->config.max_seqs || dst == src)
        return kvf__fail(&state->error, KVF_E_INVALID, "fork: dst %u: must be below max_seqs %u, and not src %u", dst,
                         state->config.max_seqs, src);
    kvf__policy_seq *b = place(state, dst), own = *b;
    *b = *a;
    b->weights = own.weights;
    b->density = own.density;
    b->sizes = own.sizes;
    b->tau = own.tau;
    b->scored = own.scored;
    b->rows = own.rows;
    b->seen = own.seen;
    b->group_sizes = own.group_sizes;
    b->dealt = own.dealt;
    size_t n = state->config.n_layers;
    memcpy(b->weights, a->weights, n * sizeof *b->weights);
    memcpy(b->density, a->density, n * sizeof *b->density);
    memcpy(b->sizes, a->sizes, n * sizeof *b->sizes);
    memcpy(b->tau, a->tau, n * state->config.n_kv_heads * sizeof *b->tau);
    memcpy(b->scored, a->scored, n * state->config.n_kv_heads * sizeof *b->scored);
    memcpy(b->rows, a->rows, n * sizeof *b->rows);
    memcpy(b->seen, a->seen, n * sizeof *b->seen);
    memcpy(b->group_sizes, a->group_sizes, n * state->config.n_groups * sizeof *b->group_sizes);
    memcpy(b->dealt, a->dealt, n * sizeof *b->dealt);
    return KVF_OK;
}

const char *kvf_policy_state_error(const kvf_policy_state *state) { return state ? state->error.text : ""; }

void kvf_policy_close(kvf_policy_state *state, uint32_t seq) {
    kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    if (s) s->open = false;
}

const kvf_policy_options *kvf_policy_get_options(const kvf_policy_state *state, uint32_t seq) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    return s ? &s->options : NULL;
}

const kvf_layer_size *kvf_policy_sizes(const kvf_policy_state *state, uint32_t seq) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    return s && s->sized ? s->sizes : NULL;
}

const double *kvf_policy_density(const kvf_policy_state *state, uint32_t seq) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    return s && s->has_density ? s->density : NULL;
}

double kvf_policy_tau(const kvf_policy_state *state, uint32_t seq, uint32_t layer, uint32_t kv_head) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    if (!s || layer >= state->config.n_layers || kv_head >= state->config.n_kv_heads) return NAN;
    return s->tau[(size_t)layer * state->config.n_kv_heads + kv_head];
}

kvf_status kvf_policy_get_counts(const kvf_policy_state *state, uint32_t seq, kvf_policy_counts *counts) {
    const kvf__policy_seq *s = kvf__policy_seq_get(state, seq);
    if (!state || !kvf__output_is_valid(counts)) return KVF_E_INVALID;
    kvf__output(counts, s ? &s->counts : &(kvf_policy_counts){0}, sizeof *counts);
    return KVF_OK;
}

bool kvf__groups_adapt(const kvf_policy_state *state, const kvf__policy_seq *s) {
    return s->options.budget == KVF_BUDGET_GLOBAL ||
           (s->options.head_budget == KVF_HEAD_BUDGET_ADAPTIVE && state->config.n_groups > 1);
}

const kvf_layer_size *kvf__size_of(const kvf_policy_state *state, const kvf__policy_seq *s, uint32_t layer,
                                   uint32_t kv_head) {
    uint32_t n = state->config.n_groups;
    if (!kvf__groups_adapt(state, s)) return &s->sizes[layer];
    return &s->group_sizes[(size_t)layer * n + kv_head / (state->config.n_kv_heads / n)];
}
