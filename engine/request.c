/* A request's life outside the step: submit, text and stop strings, finish, abort. Its result is in result.c. */
#include <stdio.h>

#include "engine/internal.h"

void kvf__live_free(kvf_engine *e, kvf__live *r) {
    const kvf_allocator *a = &e->allocator;
    for (uint32_t i = 0; r->stop && i < r->n_stop; i++)
        if (r->stop[i]) kvf__free(a, r->stop[i], strlen(r->stop[i]) + 1);
    kvf__free(a, r->stop, r->n_stop * sizeof *r->stop);
    kvf__live_free_arrays(e, r);
    kvf__free(a, r->segments, r->n_segments * sizeof *r->segments);
    kvf__free(a, r->text, r->text_capacity);
    kvf__free(a, r->salt, r->salt_bytes);
    if (r->label) kvf__free(a, r->label, strlen(r->label) + 1);
    if (r->group) kvf__group_room_free(e, r);
    kvf__free(a, r, sizeof *r);
}

/* The copies of everything the caller may free after the submission; false when out of memory. */
static bool live_copy(kvf_engine *e, kvf__live *r, const kvf_generate *g) {
    const kvf_allocator *a = &e->allocator;
    if (g->tokens && !kvf__live_take_arrays(e, r, g->forced ? r->max_tokens : 0)) return false;
    if (g->n_stop && !(r->stop = kvf__alloc(a, g->n_stop * sizeof *r->stop))) return false;
    size_t label_bytes = g->label ? strlen(g->label) + 1 : 0;
    if (label_bytes && !(r->label = kvf__alloc(a, label_bytes))) return false;
    if (r->label) memcpy(r->label, g->label, label_bytes);
    if (r->salt_bytes && !(r->salt = kvf__alloc(a, r->salt_bytes))) return false;
    if (r->salt) memcpy(r->salt, g->cache_salt, r->salt_bytes);
    if (g->tokens) memcpy(r->tokens, g->tokens, r->n_prompt * sizeof *r->tokens);
    if (g->forced && r->max_tokens) memcpy(r->tokens + r->n_prompt, g->forced, r->max_tokens * sizeof *r->tokens);
    for (uint32_t i = 0; i < g->n_stop; i++) {
        size_t bytes = strlen(g->stop[i]);
        if (!(r->stop[i] = kvf__alloc(a, bytes + 1))) return false;
        memcpy(r->stop[i], g->stop[i], bytes + 1);
        r->stop_bytes_max = KVF__MAX(r->stop_bytes_max, bytes);
    }
    return true;
}

static kvf_status check_sampling(const kvf_sampling *s, kvf_error *err) {
    if (!(s->temperature >= 0 && s->temperature <= 100))
        return kvf__fail_real(err, KVF_E_INVALID, "temperature", s->temperature, "must be in [0, 100]; 0 is greedy");
    if (!(s->top_p >= 0 && s->top_p <= 1))
        return kvf__fail_real(err, KVF_E_INVALID, "top_p", s->top_p, "must be in (0, 1], or 0 for all tokens");
    return KVF_OK;
}

/* How many answers, out of how many samples or beams. */
static kvf_status check_samples(const kvf_engine *e, kvf_generate *g, kvf_error *err) {
    if (g->n == 0) g->n = 1;
    if (g->n > KVF_SAMPLES_MAX)
        return kvf__fail_field(err, KVF_E_INVALID, "n", g->n, 0, "must be at most %d", KVF_SAMPLES_MAX);
    if (g->best_of == 0) g->best_of = g->n;
    if (g->best_of < g->n || g->best_of > KVF_SAMPLES_MAX)
        return kvf__fail_field(err, KVF_E_INVALID, "best_of", g->best_of, 0, "must be from n %u to %d", g->n,
                               KVF_SAMPLES_MAX);
    if (g->sample_policies && (g->best_of > g->n || g->beam_width))
        return kvf__fail(err, KVF_E_INVALID, "sample_policies: are for n samples; leave best_of and beam_width out");
    if (!e->buffer.logits &&
        ((!g->forced && !g->given_answer && g->max_tokens) || g->n_top_logprobs || g->on_logits || g->beam_width))
        return kvf__fail(
            err, KVF_E_UNSUPPORTED,
            "forced: runner %.64s has no logits: give all tokens of the answer, and no top_logprobs or beams",
            e->runner.name ? e->runner.name : "?");
    if (g->n_stop && !e->tokenizer)
        return kvf__fail(err, KVF_E_UNSUPPORTED,
                         "stop: the engine has no tokenizer, and so no text to find a string in");
    if (g->forced && (g->best_of > 1 || g->beam_width) && !g->sample_policies)
        return kvf__fail(err, KVF_E_INVALID,
                         "forced: is for one answer, or for sample_policies; leave n, best_of and beam_width out");
    if (g->keep_open && (g->best_of > 1 || g->beam_width))
        return kvf__fail(err, KVF_E_INVALID, "keep_open: is for one answer; leave n, best_of and beam_width out");
    if (!g->beam_width) return KVF_OK;
    if (g->beam_width < g->n || g->beam_width > KVF_SAMPLES_MAX)
        return kvf__fail_field(err, KVF_E_INVALID, "beam_width", g->beam_width, 0, "must be from n %u to %d", g->n,
                               KVF_SAMPLES_MAX);
    if (g->beam_width > e->max_running)
        return kvf__fail_size(err, KVF_E_INVALID, "max_running", e->max_running, g->beam_width,
                              "the %u hypotheses of beam_width run together;", g->beam_width);
    if (g->best_of > g->n)
        return kvf__fail_field(err, KVF_E_INVALID, "best_of", g->best_of, 0,
                               "beam search has none; beam_width %u takes its place", g->beam_width);
    if (g->sampling.temperature > 0)
        return kvf__fail_real(err, KVF_E_INVALID, "temperature", g->sampling.temperature,
                              "beam search draws nothing; leave it 0");
    if (!(g->length_penalty >= -100 && g->length_penalty <= 100))
        return kvf__fail_real(err, KVF_E_INVALID, "length_penalty", g->length_penalty, "must be in [-100, 100]");
    return KVF_OK;
}

/* Who gives the tokens. */
static kvf_status check_tokens(const kvf_generate *g, kvf_error *err) {
    bool alone = g->n <= 1 && g->best_of <= 1 && !g->beam_width;
    if ((!g->tokens && !g->give_tokens) || !g->n_tokens)
        return kvf__fail(err, KVF_E_INVALID, "prompt: has no token; give at least one");
    if (g->give_tokens && (g->tokens || g->forced || !alone))
        return kvf__fail(
            err, KVF_E_INVALID,
            "give_tokens: is in place of tokens and forced, and for one answer; leave these, n, best_of and "
            "beam_width out");
    if (g->given_answer && !g->give_tokens)
        return kvf__fail(err, KVF_E_INVALID, "given_answer: give_tokens gives the answer; set it, or use forced");
    return KVF_OK;
}

kvf_status kvf__engine_no_context(const kvf_engine *e, uint32_t n_before, uint32_t n_tokens, kvf_error *err) {
    uint64_t have = e->config.max_context, need = (uint64_t)n_before + n_tokens + 1;
    char what[80];
    snprintf(what, sizeof what, n_before ? "a turn of %u tokens behind %u" : "a prompt of %u tokens", n_tokens,
             n_before);
    if (need <= e->shape.n_context)
        return kvf__fail_size(err, KVF_E_NEVER_FITS, "max_context", have, need,
                              "%s, and one must follow; shorten it, or", what);
    return kvf__fail_field(err, KVF_E_NEVER_FITS, "max_context", have, 0, "%s, and one must follow; shorten it", what);
}

kvf_status kvf__engine_refused(const kvf_engine *e, kvf_status st, kvf_error *err) {
    const kvf_error *why = kvf_sched_error(e->sched);
    uint64_t need;
    if (strcmp(why->field, "n_blocks") != 0 || __builtin_mul_overflow(why->need, e->stats.block_bytes, &need))
        return kvf__fail_as(err, st, why);
    return kvf__fail_size(err, st, "kv_bytes", e->config.kv_bytes, need, "%.*s", (int)why->why_bytes,
                          why->text + why->why);
}

static kvf_status check_generate(const kvf_engine *e, kvf_generate *g, kvf_error *err) {
    kvf_status st;
    if ((st = check_tokens(g, err))) return st;
    if (!g->on_finish) return kvf__fail(err, KVF_E_INVALID, "on_finish: is NULL; it receives the result");
    if (!(g->deadline_s >= 0))
        return kvf__fail_real(err, KVF_E_INVALID, "deadline_s", g->deadline_s, "must be 0 or more");
    /* The length before the ids, so that a huge prompt is not walked for nothing. */
    if (g->n_tokens >= e->config.max_context) return kvf__engine_no_context(e, 0, g->n_tokens, err);
    if (g->tokens && (st = kvf__engine_check_ids(e, g->tokens, g->n_tokens, "token id", err))) return st;
    if (g->forced && (st = kvf__engine_check_ids(e, g->forced, g->max_tokens, "forced token id", err))) return st;
    if ((st = check_sampling(&g->sampling, err))) return st;
    uint32_t most = KVF__MIN((uint32_t)KVF_TOP_LOGPROBS_MAX, e->shape.n_vocab);
    if (g->n_top_logprobs > most)
        return kvf__fail_field(err, KVF_E_INVALID, "n_top_logprobs", g->n_top_logprobs, 0, "must be at most %u", most);
    if (g->cache_salt_bytes > KVF_PREFIX_SALT_MAX || (g->cache_salt_bytes && !g->cache_salt))
        return kvf__fail(err, KVF_E_INVALID, "cache_salt of %u bytes: must have at most %u; give a hash of it",
                         g->cache_salt_bytes, KVF_PREFIX_SALT_MAX);
    for (uint32_t i = 0; i < g->n_stop; i++)
        if (!g->stop || !g->stop[i] || !g->stop[i][0])
            return kvf__fail(err, KVF_E_INVALID, "stop string %u: has no bytes; it would end every answer", i);
    if (g->prefix_end % e->config.block_size || g->prefix_end > g->n_tokens)
        return kvf__fail_field(err, KVF_E_INVALID, "prefix_end", g->prefix_end, 0,
                               "must be a multiple of the block size %u, at most the prompt's %u tokens; 0: unknown",
                               e->config.block_size, g->n_tokens);
    return check_samples(e, g, err);
}

/* K and V of a token in one layer. */
static uint64_t token_bytes(const kvf_engine *e) {
    return 2 * (uint64_t)e->shape.n_kv_heads * e->shape.head_dim * kvf_dtype_bytes(e->pages.dtype);
}

static kvf_status check_policy(const kvf_engine *e, kvf_policy_options *o, kvf_error *err) {
    const kvf_runner_shape *info = &e->shape;
    kvf_status st = kvf_policy_options_check(o, info->n_layers, e->pages.block_size, err);
    if (!st) st = kvf_policy_options_resolve(o, info->n_layers, token_bytes(e), err);
    if (st) return st;
    if ((st = kvf__engine_check_repeats(e, o, err))) return st;
    if (kvf_policy_needs(o) & ~e->runner.observes)
        return kvf__fail_value(err, KVF_E_UNSUPPORTED, "policy", o->ops->name,
                               "needs %#x (KVF_NEEDS_*), runner %.64s observes %#x", kvf_policy_needs(o),
                               e->runner.name ? e->runner.name : "?", e->runner.observes);
    if (kvf_policy_n_arrays(o) > e->scores.n_arrays)
        return kvf__fail_size(err, KVF_E_INVALID, "n_score_arrays", e->scores.n_arrays, kvf_policy_n_arrays(o),
                              "policy %s with its options takes more;", o->ops->name);
    if (e->window && (kvf_policy_evicts(o) || kvf_policy_n_arrays(o) || kvf_policy_needs(o)))
        return kvf__fail_field(err, KVF_E_UNSUPPORTED, "max_context", e->config.max_context, e->window,
                               "policy %s cannot choose where the model's layers have a sliding window of %u, which "
                               "lets go of all beyond it: use policy full, or at most %u",
                               o->ops->name, e->window, e->window);
    if (kvf_policy_needs(o) & KVF_NEEDS_PROBE && e->runner.device && !e->pages.score)
        return kvf__fail_field(err, KVF_E_INVALID, "want_scores", 0, 1,
                               "score probe needs a probe of the model: create the engine with one");
    if (kvf_policy_needs_weights(o) && !e->pages.bias)
        return kvf__fail_field(err, KVF_E_INVALID, "want_mass_bias", 0, 1,
                               "merge mass and merge attention need weights and biases beside the pages");
    return KVF_OK;
}

/* Reads and checks a caller's policy (NULL: full), and converts budget_bytes to tokens. */
kvf_status kvf__engine_read_policy(const kvf_engine *e, const kvf_policy_options *given, kvf_policy_options *out,
                                   kvf_error *err) {
    kvf_status st = given ? kvf_policy_options_read(out, sizeof *out, given, err)
                          : kvf_policy_options_init(out, sizeof *out, "full", NULL, err);
    return st ? st : check_policy(e, out, err);
}

/* The policy of sample i, checked. */
static kvf_status policy_of(const kvf_engine *e, const kvf_generate *g, uint32_t i, kvf_policy_options *policy,
                            kvf_error *err) {
    const kvf_policy_options *given = g->policy;
    if (g->sample_policies) /* its size is the caller's */
        given = (const void *)((const char *)g->sample_policies + i * g->sample_policies->struct_size);
    kvf_status st = kvf__engine_read_policy(e, given, policy, err);
    if (!st || !g->sample_policies || !err) return st;
    kvf_error why = *err;
    return kvf__fail(err, st, "sample_policies[%u]: %s", i, why.text);
}

/* There is one accumulator of each kind for all samples of a prompt. */
static kvf_status check_alike(const kvf_policy_options *o, uint32_t i, kvf__prompt_needs *all, kvf_error *err) {
    uint32_t needs = kvf_policy_needs(o);
    if (needs & all->needs & KVF_NEEDS_LAST_ROWS && o->score_window != all->score_window)
        return kvf__fail(err, KVF_E_INVALID, "sample_policies[%u]: score_window %u: must be that of the others, %u", i,
                         o->score_window, all->score_window);
    if (needs & all->needs & KVF_NEEDS_SQUARES && o->gqa != all->gqa)
        return kvf__fail(err, KVF_E_INVALID,
                         "sample_policies[%u]: gqa %d: must be that of the others that take squares, %d", i,
                         (int)o->gqa, (int)all->gqa);
    if (needs & all->needs & KVF_NEEDS_REPEAT && (o->repeat_piece != all->piece || o->score_norm != all->norm))
        return kvf__fail(err, KVF_E_INVALID,
                         "sample_policies[%u]: repeat_piece %u with score_norm %d: must be those of the others that "
                         "repeat the prompt, %u and %d",
                         i, o->repeat_piece, (int)o->score_norm, all->piece, (int)all->norm);
    all->needs |= needs;
    if (needs & KVF_NEEDS_LAST_ROWS) all->score_window = o->score_window;
    if (needs & KVF_NEEDS_SQUARES) all->gqa = o->gqa;
    if (needs & KVF_NEEDS_REPEAT) all->piece = o->repeat_piece, all->norm = o->score_norm;
    return KVF_OK;
}

/* Creates a live request with copies of all it needs; NULL when out of memory. */
static kvf__live *live_create(kvf_engine *e, const kvf_generate *g, const kvf_policy_options *policy) {
    kvf__live *r = kvf__alloc(&e->allocator, sizeof *r);
    if (!r) return NULL;
    r->n_prompt = r->n_known = r->n_begin = r->n_seen = g->n_tokens;
    /* No more than the context can hold will ever be generated. */
    r->max_tokens = KVF__MIN(g->max_tokens, e->config.max_context - g->n_tokens);
    r->sampling = g->sampling;
    r->forced = g->forced || g->given_answer;
    r->give_tokens = g->give_tokens;
    e->gives |= g->give_tokens != NULL;
    r->keep_open = g->keep_open;
    r->policy = *policy;
    r->n_stop = g->n_stop;
    r->n_top = g->n_top_logprobs;
    r->ignore_end = g->ignore_end || r->forced;
    r->salt_bytes = g->cache_salt_bytes;
    r->prefix_end = g->prefix_end;
    r->no_cache_hits = g->no_cache_hits;
    r->user = g->user;
    r->on_token = g->on_token;
    r->on_sample_token = g->on_sample_token;
    r->on_logits = g->on_logits;
    r->on_finish = g->on_finish;
    r->submitted = kvf__engine_clock(e);
    r->submitted_step = e->stats.n_steps;
    if (live_copy(e, r, g)) return r;
    kvf__live_free(e, r);
    return NULL;
}

/* Creates all samples of a request, or all beams with as many spare ones for those that end, and one more. Its policies are checked. */
static kvf__group *group_of(kvf_engine *e, const kvf_generate *g) {
    kvf__group *group = kvf__group_create(e, g);
    for (uint32_t i = 0; group && i < group->n_lives; i++) {
        kvf_policy_options policy;
        kvf__live *r = policy_of(e, g, i, &policy, NULL) ? NULL : live_create(e, g, &policy);
        if (r) {
            r->group = group;
            r->index = i;
            r->sampling.seed += i;
            r->next = group->spare;
            group->spare = r;
        }
        if (r && kvf__group_room(e, group, r)) continue;
        kvf__group_free(e, group);
        return NULL;
    }
    kvf__live *rest = NULL;
    for (uint32_t i = group ? group->n_lives : 0; i-- > 0;) { /* they stand last to first */
        kvf__live *r = group->spare;
        group->spare = r->next;
        r->next = NULL;
        if (i < group->width) {
            group->members[i] = r;
        } else {
            r->next = rest;
            rest = r;
        }
    }
    if (group) group->spare = rest;
    return group;
}

static kvf_status submit(kvf_engine *e, const kvf_generate *g, const kvf_policy_options *policy, kvf_request *out,
                         kvf_error *err) {
    bool grouped = g->best_of > 1 || g->beam_width;
    kvf__group *group = grouped ? group_of(e, g) : NULL;
    kvf__live *r = grouped ? group ? group->members[0] : NULL : live_create(e, g, policy);
    if (!r) return kvf__fail(err, KVF_E_NO_MEMORY, "request: %u tokens could not be allocated", g->n_tokens);
    kvf_request names[KVF_SAMPLES_MAX];
    const kvf_policy_options *options[KVF_SAMPLES_MAX];
    for (uint32_t i = 0; group && i < group->width; i++) options[i] = &group->members[i]->policy;
    double due = 1e9 * (r->submitted + g->deadline_s);
    kvf_sched_request s = {.struct_size = sizeof s,
                           .n_prompt = r->n_prompt,
                           .max_new = r->max_tokens,
                           .options = &r->policy,
                           .n_samples = group ? group->width : 1,
                           .forks = group && group->beams,
                           .user = r,
                           .sample_users = group ? (void *const *)group->members : NULL,
                           .sample_names = group ? names : NULL,
                           .sample_options = group && group->own_policies ? options : NULL,
                           .priority = g->priority,
                           .deadline = g->deadline_s > 0 ? (uint64_t)KVF__MIN(due, 0x1p62) : 0};
    kvf_status st = kvf_sched_submit(e->sched, &s, &r->id);
    if (st) {
        if (group)
            kvf__group_free(e, group);
        else
            kvf__live_free(e, r);
        return kvf__engine_refused(e, st, err);
    }
    if (out) *out = r->id;
    if (group) group->id = r->id;
    for (uint32_t i = 0; i < (group ? group->width : 1); i++) {
        kvf__live *member = group ? group->members[i] : r;
        if (group) member->id = names[i];
        kvf__live_link(e, member);
        if ((st = kvf__engine_set_prefix(e, member))) return kvf__engine_refused(e, st, err);
    }
    return KVF_OK;
}

kvf_status kvf_engine_submit(kvf_engine *e, const kvf_generate *generate, kvf_request *out, kvf_error *err) {
    if (!e) return kvf__fail(err, KVF_E_INVALID, "engine: is NULL");
    if (e->destroying) return kvf__fail(err, KVF_E_STATE, "engine: is being destroyed and takes no more requests");
    kvf_generate g;
    kvf_status st = kvf__config_read(&g, sizeof g, generate, "kvf_generate", err);
    if (st || (st = kvf__engine_check_device(e, err)) || (st = check_generate(e, &g, err))) return st;
    kvf_policy_options policy;
    kvf__prompt_needs all = {0};
    for (uint32_t i = 0; i < (g.sample_policies ? g.n : 1); i++) {
        st = policy_of(e, &g, i, &policy, err);
        if (!st) st = check_alike(&policy, i, &all, err);
        if (st) return st;
    }
    if ((st = policy_of(e, &g, 0, &policy, err))) return st; /* of a single answer */
    return submit(e, &g, &policy, out, err);
}

/* The scheduler has changed it. */
static void note_budget(kvf_engine *e, kvf__live *r, double rho, uint32_t budget_tokens) {
    uint32_t index;
    bool runs = r->seq && !kvf_seq_index(e->manager, r->seq, &index);
    const kvf_policy_options *now = runs ? kvf_policy_get_options(e->policies, index) : NULL;
    if (now) r->policy = *now;
    r->policy.rho = rho;
    r->policy.budget_tokens = budget_tokens;
    r->changed = r->seq && !r->in_prompt;
}

kvf_status kvf_engine_set_budget(kvf_engine *e, kvf_request request, double rho, uint32_t budget_tokens,
                                 kvf_error *err) {
    if (!e) return kvf__fail(err, KVF_E_INVALID, "engine: is NULL");
    kvf__live *first = kvf__live_find(e, request);
    if (!first)
        return kvf__fail(err, KVF_E_NOT_FOUND, "request %llu: is not live: it was never given out, or has ended",
                         (unsigned long long)request);
    if (first->group && first->group->own_policies)
        return kvf__fail(err, KVF_E_STATE,
                         "request %llu: its samples have policies of their own, and keep their budgets",
                         (unsigned long long)request);
    kvf_policy_options policy = first->policy;
    policy.rho = rho;
    policy.budget_tokens = budget_tokens;
    kvf_status st = check_policy(e, &policy, err);
    if (st) return st;
    kvf_request names[KVF_SAMPLES_MAX];
    uint32_t n = 0;
    for (kvf__live *r = first; r; r = r->next)
        if (r == first || (r->group && r->group == first->group)) names[n++] = r->id;
    if ((st = kvf_sched_set_budgets(e->sched, names, n, rho, budget_tokens))) return kvf__engine_refused(e, st, err);
    for (kvf__live *r = first; r; r = r->next)
        if (r == first || (r->group && r->group == first->group)) note_budget(e, r, rho, budget_tokens);
    return KVF_OK;
}

kvf_status kvf_engine_set_budget_bytes(kvf_engine *e, kvf_request request, uint64_t budget_bytes, kvf_error *err) {
    if (!e) return kvf__fail(err, KVF_E_INVALID, "engine: is NULL");
    const kvf__live *r = kvf__live_find(e, request);
    if (!r) return kvf_engine_set_budget(e, request, 1, 0, err); /* which says so */
    if (!budget_bytes)
        return kvf__fail_field(err, KVF_E_INVALID, "budget_bytes", 0, 0, "must hold %u tokens", KVF_MIN_BUDGET_TOKENS);
    kvf_policy_options policy = r->policy;
    policy.budget_tokens = 0;
    policy.budget_bytes = budget_bytes;
    kvf_status st = kvf_policy_options_resolve(&policy, e->shape.n_layers, token_bytes(e), err);
    return st ? st : kvf_engine_set_budget(e, request, policy.rho, policy.budget_tokens, err);
}

kvf__live *kvf__live_find(const kvf_engine *e, kvf_request request) {
    kvf__live *r = e->first;
    while (r && r->id != request && !(r->group && r->group->id == request)) r = r->next;
    return r;
}

void kvf__live_link(kvf_engine *e, kvf__live *r) {
    r->prev = e->last;
    r->next = NULL;
    *(e->last ? &e->last->next : &e->first) = r;
    e->last = r;
    e->n_live++;
}

/* Searched from the end: the last to begin is nearly always the last to have been submitted. */
void kvf__live_set_seq(kvf_engine *e, kvf__live *r, kvf_seq seq) {
    bool was = r->seq != 0, is = seq != 0;
    r->seq = seq;
    if (is && !was) {
        r->prev_running = e->last_running;
        while (r->prev_running && r->prev_running->id > r->id) r->prev_running = r->prev_running->prev_running;
        r->next_running = r->prev_running ? r->prev_running->next_running : e->first_running;
    }
    if (is == was) return;
    *(r->prev_running ? &r->prev_running->next_running : &e->first_running) = is ? r : r->next_running;
    *(r->next_running ? &r->next_running->prev_running : &e->last_running) = is ? r : r->prev_running;
}

static void leave_rows(kvf_engine *e, const kvf__live *r) {
    for (uint32_t i = 0; i < e->max_running; i++) {
        if (e->rows[i] == r) e->rows[i] = NULL;
        if (e->other_rows.rows[i] == r) e->other_rows.rows[i] = NULL;
    }
}

void kvf__live_unlink(kvf_engine *e, kvf__live *r) {
    kvf__live_set_seq(e, r, 0);
    *(r->prev ? &r->prev->next : &e->first) = r->next;
    *(r->next ? &r->next->prev : &e->last) = r->prev;
    r->next = r->prev = NULL;
    e->n_live--;
    e->n_idle -= r->idle != 0;
    leave_rows(e, r);
}

void kvf__live_lost(kvf_engine *e, kvf__live *r) {
    kvf__live_set_seq(e, r, 0);
    r->n_preempted++;
    r->draws_from = NULL;
    r->duplicate = false;
    r->choices.n = 0;
    leave_rows(e, r);
}

void kvf__live_preempted(kvf_engine *e, kvf__live *r, int swapped) {
    uint64_t n = ++e->stats.n_preempted;
    kvf__live_lost(e, r);
    r->swapped = swapped;
    e->stats.n_swapped_out += swapped != 0;
    if ((n & (n - 1)) != 0) return; /* a pool that is too small preempts without end */
    kvf__log(&e->config.log, KVF_LOG_WARN,
             "%s is preempted and %s: the pool's %u blocks do not hold all that run (%llu so far): raise "
             "the KV memory, run fewer at once, or give a smaller budget",
             kvf__live_name(r).text, swapped ? "waits on the host" : "will be computed again", e->pages.n_blocks,
             (unsigned long long)n);
}

bool kvf__live_grow_text(kvf_engine *e, kvf__live *r, size_t more) {
    if (more <= r->text_capacity - r->text_bytes) return true;
    size_t capacity = KVF__MAX(r->text_capacity * 2, r->text_bytes + more + 256);
    char *text = kvf__alloc(&e->allocator, capacity);
    if (!text) return false;
    if (r->text_bytes) memcpy(text, r->text, r->text_bytes);
    kvf__free(&e->allocator, r->text, r->text_capacity);
    r->text = text;
    r->text_capacity = capacity;
    return true;
}

/* Where the first stop string begins in text[from..n), and which it is (of several there the one given first); SIZE_MAX:
 * there is none. */
static size_t stop_at(const kvf__live *r, const char *text, size_t from, size_t n, const char **which) {
    size_t cut = SIZE_MAX;
    for (uint32_t s = 0; s < r->n_stop; s++) {
        size_t length = strlen(r->stop[s]);
        for (size_t i = from; i + length <= n && i < cut; i++)
            if (!memcmp(text + i, r->stop[s], length)) cut = i, *which = r->stop[s];
    }
    return cut;
}

int kvf__live_text(kvf_engine *e, kvf__live *r, uint32_t token) {
    const kvf_tokenizer *t = e->tokenizer;
    size_t room = r->text_capacity - r->text_bytes;
    size_t n = kvf_tokenizer_piece(t, token, 0, r->text ? r->text + r->text_bytes : NULL, room);
    if (n > room) {
        if (!kvf__live_grow_text(e, r, n)) return -1;
        kvf_tokenizer_piece(t, token, 0, r->text + r->text_bytes, r->text_capacity - r->text_bytes);
    }
    /* A stop string may begin in an earlier token: look back as far as the longest could reach. */
    size_t from = r->text_bytes > r->stop_bytes_max ? r->text_bytes - r->stop_bytes_max : 0;
    r->text_bytes += n;
    r->stopped_by = NULL;
    size_t cut = stop_at(r, r->text, from, r->text_bytes, &r->stopped_by);
    if (cut == SIZE_MAX) return 0;
    r->text_bytes = cut;
    return 1;
}

void kvf__live_finish(kvf_engine *e, kvf__live *r, kvf_finish finish, const kvf_error *error) {
    kvf__group *g = r->group;
    if (g && g->ranked) {
        kvf__group_finish(e, r, finish, error);
        return;
    }
    kvf_result result = kvf__live_result(e, r, finish, error);
    kvf__live_take_kv(e, r, e->result_layers, &result);
    kvf__live_unlink(e, r);
    if (g) g->members[r->index] = NULL;
    if (r->idle) r->on_finish = NULL; /* its last answer has been told */
    kvf__live_deliver(e, r, &result);
    /* NOT_FOUND only when the scheduler ended it itself. */
    kvf_status st = kvf_sched_finish(e->sched, r->id);
    (void)st;
    kvf__live_free(e, r);
    if (g && --g->n_left == 0) kvf__group_free(e, g);
}

kvf_status kvf_engine_abort(kvf_engine *e, kvf_request request) {
    if (!e) return KVF_E_INVALID;
    kvf__live *r = kvf__live_find(e, request);
    if (!r) return KVF_E_NOT_FOUND;
    if (e->in_step) {
        e->aborts = true;
        if (r->group)
            r->group->abort = true;
        else
            r->abort = 1;
        return KVF_OK;
    }
    /* A ranked group ends with its first; a callback may end the others of one that is not. */
    for (; r; r = kvf__live_find(e, request)) kvf__live_finish(e, r, KVF_FINISH_ABORTED, NULL);
    return KVF_OK;
}

kvf_status kvf_engine_abort_sample(kvf_engine *e, kvf_request request, uint32_t index) {
    if (!e) return KVF_E_INVALID;
    kvf__live *r = e->first;
    for (; r; r = r->next) {
        if (r->group && r->group->id == request && r->group->ranked) return KVF_E_STATE;
        if ((r->group ? r->group->id : r->id) == request && r->index == index) break;
    }
    if (!r) return KVF_E_NOT_FOUND;
    if (!e->in_step)
        kvf__live_finish(e, r, KVF_FINISH_ABORTED, NULL);
    else
        r->abort = 1, e->aborts = true;
    return KVF_OK;
}

/* Before a plan, which looks their prompts up, and compares them with each other. */
void kvf__engine_ask(kvf_engine *e) {
    uint32_t n_running;
    kvf_sched_counts(e->sched, &n_running, NULL);
    uint32_t n = e->gives ? kvf_sched_ahead(e->sched, e->ahead, e->max_running - n_running) : 0;
    for (uint32_t i = 0; i < n; i++) {
        kvf_error why = {.text = ""};
        kvf__live *r = e->ahead[i];
        if (kvf__live_ask(e, r, &why)) kvf__live_finish(e, r, KVF_FINISH_ERROR, &why);
    }
}
