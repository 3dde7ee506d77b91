/* Several answers to one prompt: samples forked at its end, their ranking, beam search. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/internal.h"

/* A continuation of a beam. */
typedef struct kvf__pick {
    kvf__live *from;
    uint32_t token, order; /* order: among all, for ties */
    double logprob, sum;
} kvf__pick;

/* ---- Lives and their choices: made at the submission -------------------------------------------------- */

kvf__group *kvf__group_create(kvf_engine *e, const kvf_generate *g) {
    uint32_t width = g->beam_width ? g->beam_width : g->best_of, n_choices = 0;
    if (g->beam_width) { /* so many that width of them end nothing */
        const kvf_tokenizer *t = e->tokenizer;
        n_choices = width;
        for (uint32_t id = 0; id < e->shape.n_vocab; id++) n_choices += kvf_tokenizer_is_end(t, id) != 0;
        n_choices = KVF__MIN(n_choices, e->shape.n_vocab);
    }
    kvf__slab slab = {0};
    for (int pass = 0; pass < 2; pass++) {
        slab.used = 0;
        kvf__group *group = kvf__slab_take(&slab, 1, sizeof *group);
        kvf__live **members = kvf__slab_take(&slab, width, sizeof *members);
        kvf__live **done = kvf__slab_take(&slab, (size_t)width + 1, sizeof *done);
        kvf__pick *picks = kvf__slab_take(&slab, (size_t)width * n_choices, sizeof *picks);
        if (!pass) {
            if (slab.bad || !(slab.base = kvf__alloc(&e->allocator, slab.used))) return NULL;
            continue;
        }
        *group = (kvf__group){.n = g->n,
                              .width = width,
                              .ranked = g->beam_width || g->best_of > g->n,
                              .beams = g->beam_width != 0,
                              .own_policies = g->sample_policies && width > 1,
                              .n_left = width,
                              .n_choices = n_choices,
                              .length_penalty = g->length_penalty,
                              .members = members,
                              .done = done,
                              .picks = picks,
                              .n_lives = g->beam_width ? 2 * width + 1 : width,
                              .bytes = slab.used};
        return group;
    }
    return NULL;
}

void kvf__group_free(kvf_engine *e, kvf__group *g) {
    for (uint32_t i = 0; i < g->width; i++)
        if (g->members[i]) kvf__live_free(e, g->members[i]);
    for (uint32_t i = 0; i < g->n_done; i++) kvf__live_free(e, g->done[i]);
    for (kvf__live *r = g->spare, *next; r; r = next) {
        next = r->next;
        kvf__live_free(e, r);
    }
    kvf__free(&e->allocator, g, g->bytes);
}

bool kvf__group_room(kvf_engine *e, kvf__group *g, kvf__live *r) {
    const kvf_allocator *a = &e->allocator;
    size_t n = e->shape.n_layers;
    if (!g->ranked) return true;
    kvf__outcome *o = r->outcome = kvf__alloc(a, sizeof *o);
    if (!o) return false;
    o->layers = kvf__alloc(a, n * sizeof *o->layers);
    o->sizes = kvf__alloc(a, n * sizeof *o->sizes);
    o->group_sizes = kvf__alloc(a, e->n_tables * sizeof *o->group_sizes);
    o->density = kvf__alloc(a, n * sizeof *o->density);
    if (!o->layers || !o->sizes || !o->group_sizes || !o->density) return false;
    if (!g->beams) return true;
    r->choices.tokens = kvf__alloc(a, g->n_choices * sizeof *r->choices.tokens);
    r->choices.logprobs = kvf__alloc(a, g->n_choices * sizeof *r->choices.logprobs);
    return r->choices.tokens && r->choices.logprobs;
}

void kvf__group_room_free(kvf_engine *e, kvf__live *r) {
    const kvf_allocator *a = &e->allocator;
    size_t n = e->shape.n_layers;
    kvf__free(a, r->choices.tokens, r->group->n_choices * sizeof *r->choices.tokens);
    kvf__free(a, r->choices.logprobs, r->group->n_choices * sizeof *r->choices.logprobs);
    if (!r->outcome) return;
    kvf__free(a, r->outcome->layers, n * sizeof *r->outcome->layers);
    kvf__free(a, r->outcome->sizes, n * sizeof *r->outcome->sizes);
    kvf__free(a, r->outcome->group_sizes, e->n_tables * sizeof *r->outcome->group_sizes);
    kvf__free(a, r->outcome->density, n * sizeof *r->outcome->density);
    kvf__free(a, r->outcome, sizeof *r->outcome);
}

/* ---- The prompt's end ------------------------------------------------------------------------------------ */

kvf_status kvf__group_forked(kvf_engine *e, kvf__live *leader, kvf_error *err) {
    kvf__group *g = leader->group;
    for (uint32_t i = 0; i < g->width; i++) {
        kvf__live *r = g->members[i];
        if (!r || r->seq) continue;
        kvf__live_set_seq(e, r, kvf_sched_seq(e->sched, r->id)); /* 0: of another group, or preempted */
        r->draws_from = r->seq && !g->beams ? leader : NULL;
        r->duplicate = r->seq && g->beams;
        if (r->seq) {
            r->n_cached = leader->n_cached;
            r->n_reached = leader->n_reached;
            r->started = leader->started;
            r->started_step = leader->started_step;
            if (!g->own_policies) r->policy = leader->policy; /* its budget may have changed */
        }
        r->in_prompt = 0;
    }
    return kvf__engine_copies(e, kvf_sched_copies(e->sched), err);
}

/* ---- Ranking ------------------------------------------------------------------------------------------------ */

/* Stores its result, with the KV that it holds now. */
static void note_outcome(kvf_engine *e, const kvf__live *holder, kvf__live *r, kvf_finish finish,
                         const kvf_error *error) {
    kvf__outcome *o = r->outcome;
    const kvf__group *g = r->group;
    uint32_t n_layers = e->shape.n_layers, n = r->n_known - r->n_prompt;
    if (error) o->error = *error;
    o->result = kvf__live_result(e, r, finish, error ? &o->error : NULL);
    kvf__live_take_kv(e, holder, o->layers, &o->result);
    if (o->result.layers != o->layers)
        o->result.layers = memcpy(o->layers, o->result.layers, n_layers * sizeof *o->layers);
    if (o->result.sizes) o->result.sizes = memcpy(o->sizes, o->result.sizes, n_layers * sizeof *o->sizes);
    if (o->result.group_sizes)
        o->result.group_sizes = memcpy(o->group_sizes, o->result.group_sizes, e->n_tables * sizeof *o->group_sizes);
    if (o->result.density) o->result.density = memcpy(o->density, o->result.density, n_layers * sizeof *o->density);
    if (g->beams) o->result.score = n ? r->sum / pow(n, g->length_penalty) : 0;
}

/* Inserts it into done, by rank. If there are more than width, the last becomes spare. */
static void enter_done(kvf__group *g, kvf__live *r) {
    bool failed = r->outcome->result.finish == KVF_FINISH_ERROR;
    double score = r->outcome->result.score;
    uint32_t at = g->n_done++;
    for (; at; at--) {
        const kvf_result *before = &g->done[at - 1]->outcome->result;
        bool before_failed = before->finish == KVF_FINISH_ERROR;
        if (before_failed == failed ? !(score > before->score) : !before_failed) break;
        g->done[at] = g->done[at - 1];
    }
    g->done[at] = r;
    if (g->n_done <= g->width) return;
    kvf__live *worst = g->done[--g->n_done];
    worst->next = g->spare;
    g->spare = worst;
}

/* All have ended: delivers the best as the answers. If the group was aborted, each answer is aborted. */
static void end_group(kvf_engine *e, kvf__group *g, const kvf_error *error) {
    uint32_t n = KVF__MIN(g->n, g->n_done);
    for (uint32_t i = 0; i < n; i++) {
        kvf__live *r = g->done[i];
        kvf_result *result = &r->outcome->result;
        result->index = i;
        result->n_results = n;
        result->total_s = kvf__engine_clock(e) - r->submitted;
        if (g->abort) result->finish = KVF_FINISH_ABORTED;
        if (error) {
            result->finish = KVF_FINISH_ERROR;
            result->detail = error;
            result->error = error->text;
        }
        kvf__live_deliver(e, r, result);
    }
    kvf__group_free(e, g);
}

static void give_back(kvf_engine *e, kvf__live *r) {
    kvf_status st = kvf_sched_finish(e->sched, r->id); /* NOT_FOUND when the scheduler ended it itself */
    (void)st;
    kvf__live_unlink(e, r);
}

void kvf__group_finish(kvf_engine *e, kvf__live *r, kvf_finish finish, const kvf_error *error) {
    kvf__group *g = r->group;
    if (finish == KVF_FINISH_ABORTED) g->abort = true;
    if (g->beams) {
        kvf__beams_stop(e, g, finish, error);
        return;
    }
    note_outcome(e, r, r, finish, error);
    give_back(e, r);
    g->members[r->index] = NULL;
    enter_done(g, r);
    if (--g->n_left == 0) end_group(e, g, NULL);
}

/* ---- Beams ------------------------------------------------------------------------------------------------------ */

bool kvf__beams_ready(const kvf__group *g) {
    for (uint32_t i = 0; i < g->n_left; i++)
        if (!g->members[i]->choices.n && !g->members[i]->duplicate) return false;
    return true;
}

/* Stops the search: the running hypotheses count with their present tokens. */
void kvf__beams_stop(kvf_engine *e, kvf__group *g, kvf_finish finish, const kvf_error *error) {
    uint32_t n = g->begun ? g->n_left : KVF__MIN(g->n_left, g->n); /* before its first step they are all the same */
    for (uint32_t i = 0; i < n; i++) note_outcome(e, g->members[i], g->members[i], finish, error);
    for (uint32_t i = 0; i < g->n_left; i++) {
        kvf__live *r = g->members[i];
        g->members[i] = NULL;
        give_back(e, r);
        if (i < n) {
            enter_done(g, r);
        } else {
            r->next = g->spare;
            g->spare = r;
        }
    }
    g->n_left = 0;
    kvf_error why = error ? *error : kvf__no_error; /* which may be the group's own */
    end_group(e, g, error ? &why : NULL);
}

/* Copies the state that follows from a beam's tokens, and its choices for this step. */
static bool copy_beam(kvf_engine *e, const kvf__live *from, kvf__live *to) {
    size_t n = from->n_known - from->n_prompt, n_top = KVF__MIN(n + 1, from->max_tokens) * from->n_top;
    to->text_bytes = 0;
    if (!kvf__live_make_room(e, to, KVF__MIN((uint32_t)n + 1, from->max_tokens)) ||
        !kvf__live_grow_text(e, to, from->text_bytes))
        return false;
    if (from->text_bytes) memcpy(to->text, from->text, from->text_bytes);
    memcpy(to->tokens + to->n_prompt, from->tokens + from->n_prompt, n * sizeof *to->tokens);
    memcpy(to->logprobs, from->logprobs, n * sizeof *to->logprobs);
    if (n_top) {
        memcpy(to->top_tokens, from->top_tokens, n_top * sizeof *to->top_tokens);
        memcpy(to->top_logprobs, from->top_logprobs, n_top * sizeof *to->top_logprobs);
    }
    to->n_known = from->n_known;
    to->text_bytes = from->text_bytes;
    to->sum = from->sum;
    to->first_token = from->first_token;
    to->started = from->started;
    to->started_step = from->started_step;
    to->n_reached = from->n_reached;
    to->n_preempted = from->n_preempted;
    to->n_cached = from->n_cached;
    to->block_steps = from->block_steps;
    to->reserved_block_steps = from->reserved_block_steps;
    to->n_block_steps = from->n_block_steps;
    to->policy = from->policy;
    to->changed = from->changed;
    to->in_prompt = 0;
    return true;
}

static int by_sum(const void *a, const void *b) {
    const kvf__pick *x = a, *y = b;
    if (x->sum > y->sum || x->sum < y->sum) return x->sum > y->sum ? -1 : 1;
    return (x->order > y->order) - (x->order < y->order);
}

/* Ranks all continuations, best first. Before the first step all beams are equal, and only the first one's count. */
static uint32_t rank_choices(kvf__group *g) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < (g->begun ? g->n_left : 1u); i++) {
        kvf__live *r = g->members[i];
        for (uint32_t k = 0; k < r->choices.n && r->choices.tokens[k] != KVF_NO_TOKEN; k++, n++)
            g->picks[n] =
                (kvf__pick){r, r->choices.tokens[k], n, r->choices.logprobs[k], r->sum + r->choices.logprobs[k]};
    }
    qsort(g->picks, n, sizeof *g->picks, by_sum);
    return n;
}

/* Whether it would end there: an end token, or a stop string that the token completes. */
static int ends(kvf_engine *e, kvf__live *r, uint32_t token) {
    const kvf_tokenizer *t = e->tokenizer;
    if (!r->ignore_end && kvf_tokenizer_is_end(t, token)) return 1;
    if (!r->n_stop) return 0;
    size_t before = r->text_bytes;
    int stopped = kvf__live_text(e, r, token);
    r->text_bytes = before; /* cutting leaves the bytes */
    return stopped;
}

static bool take_pick(kvf_engine *e, kvf__live *r, const kvf__pick *p) {
    uint32_t step = r->n_known - r->n_prompt;
    if (!step && !(r->first_token > 0)) r->first_token = kvf__engine_clock(e);
    r->tokens[r->n_known++] = p->token;
    r->logprobs[step] = p->logprob;
    r->sum = p->sum;
    r->choices.n = 0;
    r->n_failures = 0;
    r->duplicate = false;
    return kvf__live_text(e, r, p->token) >= 0;
}

/* Stores a hypothesis that ends here. The beam itself goes on with other tokens, or is dropped. */
static bool add_finished(kvf_engine *e, kvf__group *g, const kvf__pick *p) {
    kvf__live *r = g->spare;
    g->spare = r->next;
    r->next = NULL;
    bool good = copy_beam(e, p->from, r) && take_pick(e, r, p);
    note_outcome(e, p->from, r, KVF_FINISH_STOP, NULL);
    enter_done(g, r);
    return good;
}

/* Walks the ranking: a continuation that ends among the first width is finished; the others become the next beams. picks[0..n) are
 * then those that go on. */
static bool choose(kvf_engine *e, kvf__group *g, uint32_t *n) {
    uint32_t n_all = rank_choices(g), n_kept = 0;
    bool good = true;
    for (uint32_t i = 0; i < n_all && n_kept < g->width && good; i++) {
        int end = ends(e, g->picks[i].from, g->picks[i].token);
        good = end >= 0;
        if (end > 0 && i < g->width) good = add_finished(e, g, &g->picks[i]);
        if (!end) g->picks[n_kept++] = g->picks[i];
    }
    *n = n_kept;
    return good;
}

static bool is_done(const kvf__group *g, uint32_t n_picks) {
    if (!n_picks) return true;
    if (g->n_done < g->width) return false;
    uint32_t n = g->picks[0].from->n_known - g->picks[0].from->n_prompt + 1;
    return g->picks[0].sum / pow(n, g->length_penalty) <= g->done[g->n_done - 1]->outcome->result.score;
}

/* A beam of its own for a further continuation of p->from: a duplicate, or a fork. NULL: the scheduler has no place. */
static kvf__live *branch(kvf_engine *e, kvf__group *g, const kvf__pick *p, uint32_t *next_duplicate) {
    for (; !g->begun && *next_duplicate < g->n_left; (*next_duplicate)++)
        if (g->members[*next_duplicate] != p->from) return g->members[(*next_duplicate)++];
    kvf__live *r = g->spare;
    if (!r || kvf_sched_fork(e->sched, p->from->id, r, &r->id)) return NULL;
    g->spare = r->next;
    kvf__live_link(e, r);
    kvf__live_set_seq(e, r, kvf_sched_seq(e->sched, r->id));
    return kvf__engine_set_prefix(e, r) ? NULL : r;
}

/* The picks become the members, in the order of their rank. Beams without a pick are finished before any is forked, so that the forks
 * can use their blocks. Duplicates are used before forks. */
static bool move_on(kvf_engine *e, kvf__group *g, uint32_t n_picks) {
    kvf__live *next[KVF_SAMPLES_MAX] = {NULL};
    bool good = true, used[KVF_SAMPLES_MAX] = {false};
    for (uint32_t i = 0; i < n_picks; i++) { /* a beam's first continuation stays where it is */
        for (uint32_t m = 0; m < g->n_left; m++) {
            if (g->members[m] != g->picks[i].from || used[m]) continue;
            used[m] = true;
            next[i] = g->members[m];
        }
    }
    for (uint32_t m = 0; m < g->n_left && g->begun; m++) {
        if (used[m]) continue;
        give_back(e, g->members[m]);
        g->members[m]->next = g->spare;
        g->spare = g->members[m];
    }
    uint32_t next_duplicate = 1, n = 0;
    for (uint32_t i = 0; i < n_picks; i++) {
        if (next[i]) continue;
        next[i] = branch(e, g, &g->picks[i], &next_duplicate);
        if (next[i]) good = copy_beam(e, g->picks[i].from, next[i]) && good;
    }
    for (; !g->begun && next_duplicate < g->n_left; next_duplicate++) { /* fewer continuations than beams */
        give_back(e, g->members[next_duplicate]);
        g->members[next_duplicate]->next = g->spare;
        g->spare = g->members[next_duplicate];
    }
    for (uint32_t i = 0; i < g->width; i++) g->members[i] = NULL;
    for (uint32_t i = 0; i < n_picks; i++) {
        if (!next[i]) continue;
        g->picks[n] = g->picks[i];
        g->members[n] = next[i];
        next[i]->index = n++;
    }
    g->n_left = n;
    g->begun = true;
    return good;
}

static kvf_status tell_tokens(kvf_engine *e, kvf__group *g, bool *good, int *ended, kvf_error *err) {
    for (uint32_t i = 0; i < g->n_left; i++) {
        kvf__live *r = g->members[i];
        kvf_status st = kvf_sched_token(e->sched, r->id, ended);
        if (st) return kvf__fail_as(err, st, kvf_sched_error(e->sched));
        *good = take_pick(e, r, &g->picks[i]) && *good;
    }
    return KVF_OK;
}

static const kvf_error no_tokens = {.text = "out of host memory for its tokens", .rank = -1};

kvf_status kvf__beams_advance(kvf_engine *e, kvf__group *g, kvf_error *err) {
    uint32_t n_picks = 0;
    int ended = 0;
    bool good = choose(e, g, &n_picks);
    if (good && is_done(g, n_picks)) {
        for (uint32_t i = 0; i < g->n_left; i++) { /* what runs cannot win any more */
            give_back(e, g->members[i]);
            g->members[i]->next = g->spare;
            g->spare = g->members[i];
            g->members[i] = NULL;
        }
        g->n_left = 0;
        end_group(e, g, NULL);
        return KVF_OK;
    }
    if (good) good = move_on(e, g, n_picks);
    kvf_status st = kvf__engine_copies(e, kvf_sched_copies(e->sched), err);
    if (!st && good) st = tell_tokens(e, g, &good, &ended, err);
    if (st) return st;
    if (!good)
        kvf__beams_stop(e, g, KVF_FINISH_ERROR, &no_tokens);
    else if (ended)
        kvf__beams_stop(e, g, KVF_FINISH_LENGTH, NULL);
    return KVF_OK;
}
