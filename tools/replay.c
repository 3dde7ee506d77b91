/* The replay: arrivals in simulated time, steps by the scheduler, compactions by the policy's sizes. */
#define _POSIX_C_SOURCE 200809L
#include "tools/replay.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "kvfold/events.h"
#include "tools/text.h"

typedef struct request { /* one that is live */
    struct request *next, *prev;
    const kvf__trace_request *of;
    kvf_request id;
    kvf_seq seq; /* 0 while it waits */
    bool in_prompt;
    uint32_t *tokens; /* NULL until it may be admitted, and without a prefix cache */
    uint32_t n_output;
    uint32_t n_reached; /* tokens that were computed once */
    uint64_t submitted_step;
    kvf__occ_request figures;
} request;

typedef struct replay {
    const kvf__replay_config *config;
    kvf__occ *occ;
    kvf__chrome *chrome;
    kvf__replay_result *result;
    kvf_manager *manager;
    kvf_policy_state *policies;
    kvf_sched *sched;
    kvf_policy_options options;
    kvf__random random;
    double now_s;
    uint32_t n_tables;
    uint64_t step, next; /* next: request of the trace to come */
    request *first, *last;
    kvf_events *events;
    request *at;                                      /* whose moment it is */
    double *base;                                     /* [n_layers] */
    uint32_t n_preempted, n_new_prompt, n_new_decode; /* n_new: tokens of the step computed for the first time */
    uint64_t full;                                    /* blocks that a full cache would hold */
    kvf__trace_group *groups;                         /* [trace->n_groups] */
    uint32_t *page_ids;                               /* [blocks of max_context] */
} replay;

static uint64_t clock_ns(void *ctx) { return (uint64_t)(((const replay *)ctx)->now_s * 1e9); }

static bool fail(const char *what, const char *text) {
    kvf__say("replay: %s: %s", what, text);
    return false;
}

/* ---- Densities ------------------------------------------------------------------------------------- */

/* Made ones: a level for each layer, and a little of its own for each request. */
static void make_base(replay *r) {
    kvf__random random = {r->config->seed ^ 0x6b76666f6c64u};
    for (uint32_t l = 0; l < r->config->n_layers; l++)
        r->base[l] = r->config->densities ? r->config->densities[l] : 0.15 + 0.5 * kvf__random_unit(&random);
}

/* The metric is raw here, so that a density is what is given: each head's variance is the density. */
static void density_of(replay *r, const kvf__trace_request *q, double *values) {
    uint32_t n_heads = r->config->n_kv_heads;
    const kvf__trace *t = r->config->trace;
    const double *own = q->density == KVF__TRACE_NONE ? NULL : t->densities + (size_t)q->density * t->n_layers;
    for (uint32_t l = 0; l < r->config->n_layers; l++) {
        double f = own ? own[l] : r->base[l];
        if (!own && !r->config->densities) f += 0.1 * (kvf__random_unit(&r->random) - 0.5);
        for (uint32_t h = 0; h < n_heads; h++) values[l * n_heads + h] = f;
    }
}

/* ---- Requests ---------------------------------------------------------------------------------------- */

static void gone(replay *r, request *q, const char *end) {
    q->figures.end = end;
    q->figures.end_s = r->now_s;
    q->figures.n_output = q->n_output;
    kvf__occ_add_request(r->occ, &q->figures);
    kvf__chrome_request(r->chrome, &q->figures);
    *(q->prev ? &q->prev->next : &r->first) = q->next;
    *(q->next ? &q->next->prev : &r->last) = q->prev;
    free(q->tokens);
    free(q);
}

static bool submit(replay *r, const kvf__trace_request *of, uint64_t number) {
    request *q = calloc(1, sizeof *q);
    if (!q) return fail("request", "out of memory");
    q->of = of;
    q->figures = (kvf__occ_request){.id = number + 1,
                                    .arrival_s = of->arrival_s / r->config->speed,
                                    .start_s = NAN,
                                    .first_token_s = NAN,
                                    .queue_steps = UINT64_MAX,
                                    .n_prompt = of->n_prompt};
    q->submitted_step = r->step;
    kvf_sched_request s = {
        .struct_size = sizeof s, .n_prompt = of->n_prompt, .max_new = of->n_output, .options = &r->options, .user = q};
    kvf_status st = kvf_sched_submit(r->sched, &s, &q->id);
    if (!st) {
        q->prev = r->last;
        *(r->last ? &r->last->next : &r->first) = q;
        r->last = q;
        r->occ->shared_tokens += of->n_shared;
        return true;
    }
    free(q);
    if (st != KVF_E_NEVER_FITS && st != KVF_E_INVALID) return fail("submit", kvf_sched_error(r->sched)->text);
    if (!r->result->n_refused++)
        snprintf(r->result->refused, sizeof r->result->refused, "%s", kvf_sched_error(r->sched)->text);
    return true;
}

static bool give_prefix(replay *r, request *q) {
    const kvf__trace *t = r->config->trace;
    uint64_t number = q->figures.id - 1;
    const kvf__trace_group *g = q->of->group < t->n_groups ? &r->groups[q->of->group] : NULL;
    bool first = g && g->first == number;
    uint32_t n = q->of->n_prompt + q->of->n_output, end = !g ? 0 : first ? g->n_shared : q->of->n_shared;
    end = end < q->of->n_prompt ? end : q->of->n_prompt;
    kvf_sched_prefix p = {.struct_size = sizeof p, .prefix_end = end - end % r->config->block_size};
    if (!(q->tokens = malloc((size_t)n * sizeof *q->tokens))) return fail("request", "out of memory");
    kvf__trace_ids(t, number, first, n, q->tokens);
    p.key = (kvf_prefix_key){.struct_size = sizeof p.key, .tokens = q->tokens, .n_tokens = n};
    return !kvf_sched_set_prefix(r->sched, q->id, &p) || fail("prefix", kvf_sched_error(r->sched)->text);
}

/* Those that the next step may run get their tokens: the first that live, since they are admitted in order. */
static bool give_prefixes(replay *r) {
    request *q = r->first;
    for (uint32_t i = 0; q && i < r->config->max_running && r->config->prefix_cache; i++, q = q->next)
        if (!q->tokens && !give_prefix(r, q)) return false;
    return true;
}

enum { INSTRUCTION = 10 }; /* tokens before a piece of a repetition: about what KVF_REPEAT_INSTRUCTION has */
enum { AHEAD = 60000 };    /* requests that wait, at most: the scheduler has room for 65,536 */

static bool arrivals(replay *r, uint32_t n_waiting) {
    const kvf__trace *t = r->config->trace;
    for (; r->next < t->n && n_waiting < AHEAD; r->next++, n_waiting++) {
        const kvf__trace_request *of = &t->requests[r->next];
        if (of->arrival_s / r->config->speed > r->now_s) break;
        if (!submit(r, of, r->next)) return false;
    }
    return true;
}

/* ---- Compactions --------------------------------------------------------------------------------------- */

static void preempted(replay *r, request *q) {
    q->seq = 0;
    q->figures.n_preempted++;
    r->n_preempted++;
}

static kvf_status reserve(void *ctx, uint32_t row, kvf_error *err) {
    const replay *r = ctx;
    (void)row;
    kvf_status st = kvf_sched_event_room(r->sched, r->at->id);
    return st ? kvf__fail_as(err, st, kvf_sched_error(r->sched)) : KVF_OK;
}

/* Tables that share blocks need fresh ones. If there are too few the latest arrival is preempted, which may be the request itself. */
static kvf_status make_room(void *ctx, uint8_t *dropped, kvf_error *err) {
    replay *r = ctx;
    kvf_step_item shed;
    kvf_status st = kvf_sched_shed(r->sched, &shed);
    if (st) return kvf__fail_as(err, st, kvf_sched_error(r->sched));
    preempted(r, shed.user);
    dropped[0] = !r->at->seq;
    return KVF_OK;
}

static kvf_status metric(void *ctx, uint32_t row, double *values, kvf_error *err) {
    replay *r = ctx;
    (void)row, (void)err;
    density_of(r, r->at->of, values);
    return KVF_OK;
}

/* What the policy does to a request at this moment. Its seq is 0 if it was preempted for its own events. resized: it has other sizes
 * than before. */
static bool run_moment(replay *r, request *q, kvf_moment moment, bool *resized) {
    kvf_view view = {.struct_size = sizeof view};
    uint8_t changed = 0;
    kvf_error err = {.text = ""};
    if (kvf_view_fill(r->manager, 0, &q->seq, 1, &view)) return fail("view", kvf_manager_error(r->manager)->text);
    const kvf_moment_rows rows = {.struct_size = sizeof rows,
                                  .moment = moment,
                                  .view = &view,
                                  .seqs = &q->seq,
                                  .row_end = 1,
                                  .n_prompt = &q->of->n_prompt,
                                  .changed = &changed};
    r->at = q;
    if (kvf_events_run(r->events, &rows, &err)) return fail("compaction", err.text);
    *resized = q->seq && changed & KVF_ROW_RESIZED;
    return true;
}

static const kvf_layer_size *sizes_of(const replay *r, const request *q, uint32_t *index) {
    return kvf_seq_index(r->manager, q->seq, index) ? NULL : kvf_policy_sizes(r->policies, *index);
}

/* The sizes that a request got after its prompt. */
static bool note_sizes(replay *r, const request *q) {
    uint32_t index;
    const kvf_layer_size *sizes = sizes_of(r, q, &index);
    kvf__occ_add_budget(r->occ, sizes, kvf_policy_density(r->policies, index));
    return !kvf_sched_resize(r->sched, q->id) || fail("resize", kvf_sched_error(r->sched)->text);
}

/* Requests whose prompt fitted the budget, before the token that would exceed it. */
static bool overflows(replay *r) {
    for (request *q = r->first; q; q = q->next) {
        uint32_t index;
        bool resized = false;
        if (!q->seq || q->in_prompt || !kvf_policy_evicts(&r->options) || sizes_of(r, q, &index)) continue;
        if (!run_moment(r, q, KVF_BEFORE_APPEND, &resized) || (resized && !note_sizes(r, q))) return false;
    }
    return true;
}

/* Sizes, compaction, score pages, the exact reservation. */
static bool prompt_ends(replay *r, request *q) {
    uint32_t index;
    bool resized = false;
    if (!run_moment(r, q, KVF_AT_PROMPT_END, &resized)) return false;
    if (!q->seq) return true;
    const kvf_layer_size *sizes = sizes_of(r, q, &index);
    if (sizes || !kvf_policy_evicts(&r->options))
        kvf__occ_add_budget(r->occ, sizes, kvf_policy_density(r->policies, index));
    q->in_prompt = false;
    kvf_status st = kvf_sched_prompt_done(r->sched, q->id);
    if (st == KVF_E_NO_BLOCKS) { /* its exact sizes found no room: it waits and begins again */
        preempted(r, q);
        return true;
    }
    return !st || fail("prompt", kvf_sched_error(r->sched)->text);
}

/* ---- Steps ------------------------------------------------------------------------------------------------ */

static void preempted_and_ended(replay *r, const kvf_step *step) {
    for (uint32_t i = 0; i < step->n_preempted; i++) preempted(r, step->preempted[i].user);
    for (uint32_t i = 0; i < step->n_ends; i++) {
        r->result->n_early++;
        gone(r, step->ends[i].user, "pool full");
    }
}

/* A token of a request whose known tokens are all computed; it may have been the last. */
static bool take_token(replay *r, request *q) {
    int ended = 0;
    if (kvf_sched_token(r->sched, q->id, &ended)) return fail("token", kvf_sched_error(r->sched)->text);
    q->n_output++;
    if (isnan(q->figures.first_token_s)) q->figures.first_token_s = r->now_s;
    if (!ended) return true;
    if (kvf_sched_finish(r->sched, q->id)) return fail("finish", kvf_sched_error(r->sched)->text);
    r->result->n_done++;
    gone(r, q, "done");
    return true;
}

static bool after_items(replay *r, const kvf_step *step) {
    for (uint32_t i = 0; i < step->n_decode; i++) {
        request *q = step->items[i].user;
        bool resized = false;
        if (!q->seq || !kvf_policy_evicts(&r->options)) continue;
        if (!run_moment(r, q, KVF_AFTER_STEP, &resized) || (resized && !note_sizes(r, q))) return false;
    }
    for (uint32_t i = 0; i < step->n_items; i++) {
        const kvf_step_item item = step->items[i];
        request *q = item.user;
        if (!q->seq) continue;
        if (item.prompt_ends && !prompt_ends(r, q)) return false;
        if (!q->seq) continue;
        if (item.samples) {
            if (!take_token(r, q)) return false;
        } else if (item.prompt_ends && q->of->n_output == 0) {
            if (kvf_sched_finish(r->sched, q->id)) return fail("finish", kvf_sched_error(r->sched)->text);
            r->result->n_done++;
            gone(r, q, "done");
        }
    }
    return true;
}

/* The sums of prompts that came to a place where others may go on; one that finds no room is not kept. */
static void keep_sums(replay *r, const kvf_step *step) {
    for (uint32_t i = step->n_decode; i < step->n_items && r->config->n_snapshot_pages; i++) {
        const kvf_step_item *item = &step->items[i];
        const request *q = item->user;
        if (!item->take_snapshot || !q->tokens) continue;
        uint32_t n, n_tokens = item->token_begin + item->n_tokens;
        const kvf_prefix_key key = {.struct_size = sizeof key, .tokens = q->tokens, .n_tokens = n_tokens};
        kvf_status st = kvf_prefix_snapshot_put(r->manager, item->seq, &key, n_tokens, item->snapshot_flags,
                                                r->page_ids, r->config->max_context / r->config->block_size + 1, &n);
        (void)st;
    }
}

static bool note_step(replay *r, const kvf_step *step, double begin_s) {
    kvf__occ_step s = {.step = r->step,
                       .begin_s = begin_s,
                       .end_s = r->now_s,
                       .n_running = step->n_running,
                       .n_waiting = step->n_waiting,
                       .n_prefill_tokens = r->n_new_prompt,
                       .n_decode_tokens = r->n_new_decode,
                       .n_again_tokens = step->n_tokens - r->n_new_prompt - r->n_new_decode,
                       .n_preempted = r->n_preempted,
                       .full = r->full};
    if (!kvf__occ_note(r->occ, r->chrome, r->manager, 0, &s)) return fail("profile", "could not be read");
    kvf__occ_add_step(r->occ, &s, r->occ->peak);
    kvf__chrome_step(r->chrome, r->occ, &s);
    r->n_preempted = 0;
    return true;
}

/* Of tokens [begin, end) those that are computed for the first time. */
static void note_new(replay *r, request *q, uint32_t begin, uint32_t end) {
    if (begin < q->n_reached) begin = q->n_reached;
    if (begin >= end) return;
    uint32_t n_prompt = q->of->n_prompt;
    uint32_t n = (end < n_prompt ? end : n_prompt) - (begin < n_prompt ? begin : n_prompt);
    r->n_new_prompt += n;
    r->n_new_decode += end - begin - n;
    q->n_reached = end;
}

/* Plans and runs one step; *idle: there was nothing to run. */
static bool run_step(replay *r, uint32_t *n_waiting, bool *idle) {
    kvf_step step = {.struct_size = sizeof step};
    double begin_s = r->now_s;
    if (!overflows(r) || !give_prefixes(r)) return false;
    if (kvf_sched_plan(r->sched, (uint64_t)(1e9 * r->now_s), &step))
        return fail("plan", kvf_sched_error(r->sched)->text);
    preempted_and_ended(r, &step);
    if (step.copies.n && kvf_copies_done(r->manager, &step.copies))
        return fail("copies", kvf_manager_error(r->manager)->text);
    *n_waiting = step.n_waiting;
    *idle = step.n_items == 0;
    if (!step.n_items) return true;
    r->step++;
    r->full = r->n_new_prompt = r->n_new_decode = 0;
    for (uint32_t i = 0; i < step.n_items; i++) {
        const kvf_step_item *item = &step.items[i];
        request *q = item->user;
        q->seq = item->seq;
        q->in_prompt = item->kind != KVF_STEP_DECODE;
        if (isnan(q->figures.start_s)) {
            q->figures.start_s = begin_s;
            q->figures.queue_steps = r->step - 1 - q->submitted_step;
        }
        bool repeats = item->kind == KVF_STEP_REPEAT;
        uint32_t positions = repeats ? q->of->n_prompt : item->token_begin + item->n_tokens;
        if (!repeats) note_new(r, q, item->token_begin, positions);
        r->full += (positions + r->config->block_size - 1) / r->config->block_size * r->n_tables;
    }
    r->now_s += r->config->step_s + r->config->token_s * step.n_tokens;
    if (kvf_sched_done(r->sched)) return fail("step", kvf_sched_error(r->sched)->text);
    keep_sums(r, &step);
    return after_items(r, &step) && note_step(r, &step, begin_s);
}

static void show(const replay *r, uint32_t n_waiting) {
    const kvf__replay_result *done = r->result;
    kvf__progress *progress = r->config->progress;
    if (!progress || !kvf__progress_due(progress)) return;
    char text[320];
    snprintf(text, sizeof text, "profile: %s, %s waiting, step %s",
             kvf__progress_done(progress, done->n_done + done->n_early + done->n_refused).text,
             kvf__show_count(n_waiting).text, kvf__show_count(r->step).text);
    kvf__progress_text(progress, text);
}

static bool run(replay *r) {
    const kvf__trace *t = r->config->trace;
    uint32_t n_waiting = 0;
    bool idle = true;
    while (!(r->config->stop && *r->config->stop)) {
        if (!arrivals(r, n_waiting)) return false;
        if (!r->first && r->next == t->n) return true;
        if (!r->first) { /* nothing to do before the next arrival */
            double then = t->requests[r->next].arrival_s / r->config->speed;
            r->now_s = then > r->now_s ? then : r->now_s;
            continue;
        }
        if (!run_step(r, &n_waiting, &idle)) return false;
        show(r, n_waiting);
        if (idle && r->first && r->next == t->n) return fail("scheduler", "requests wait, and none can run");
    }
    r->result->stopped = true;
    return true;
}

/* ---- Begin and end ------------------------------------------------------------------------------------------ */

static bool create(replay *r) {
    const kvf__replay_config *c = r->config;
    kvf_error err = {.text = ""};
    kvf_profile_config pc;
    kvf_profile_config_init(&pc, sizeof pc);
    pc.n_events = 1 << 16;
    pc.clock = clock_ns;
    pc.clock_ctx = r;
    kvf_manager_config m;
    kvf_manager_config_init(&m, sizeof m);
    m.n_layers = c->n_layers;
    m.n_kv_heads = c->n_kv_heads;
    m.heads_per_group = c->heads_per_group;
    m.block_size = c->block_size;
    m.n_blocks = (uint32_t)c->n_blocks;
    m.max_seqs = c->max_running;
    m.max_slots = c->max_context;
    m.block_bytes = c->block_bytes;
    m.profile = &pc;
    m.prefix_cache = c->prefix_cache;
    m.n_snapshot_pages = c->prefix_cache ? c->n_snapshot_pages : 0;
    kvf_status st = kvf_manager_create(&m, &r->manager, &err);
    if (st) return fail("pool", err.text);
    kvf_policy_state_config p = {.struct_size = sizeof p,
                                 .n_layers = c->n_layers,
                                 .n_kv_heads = c->n_kv_heads,
                                 .n_q_heads = c->n_kv_heads,
                                 .head_dim = 8,
                                 .block_size = c->block_size,
                                 .max_seqs = c->max_running,
                                 .max_slots = c->max_context,
                                 .n_groups = c->heads_per_group ? c->n_kv_heads / c->heads_per_group : 1};
    if (kvf_policy_state_create(&p, &r->policies, &err)) return fail("policy", err.text);
    const kvf_events_config e = {.struct_size = sizeof e,
                                 .manager = r->manager,
                                 .policies = r->policies,
                                 .max_rows = 1,
                                 .ctx = r,
                                 .reserve = reserve,
                                 .make_room = make_room,
                                 .metric = metric};
    if (kvf_events_create(&e, &r->events, &err)) return fail("policy driver", err.text);
    kvf_sched_config s;
    kvf_sched_config_init(&s, sizeof s);
    s.manager = r->manager;
    s.policies = r->policies;
    s.max_running = c->max_running;
    s.chunk = c->chunk;
    s.max_context = c->max_context;
    s.n_instruction = INSTRUCTION;
    if (kvf_sched_create(&s, &r->sched, &err)) return fail("scheduler", err.text);
    r->n_tables = c->n_layers * (c->heads_per_group ? c->n_kv_heads / c->heads_per_group : 1);
    r->base = calloc(c->n_layers, sizeof *r->base);
    r->groups = calloc((size_t)c->trace->n_groups + 1, sizeof *r->groups);
    r->page_ids = calloc((size_t)c->max_context / c->block_size + 1, sizeof *r->page_ids);
    if (!r->base || !r->groups || !r->page_ids) return fail("buffers", "out of memory");
    kvf__trace_groups(c->trace, r->groups);
    return true;
}

bool kvf__replay(const kvf__replay_config *config, kvf__occ *occ, kvf__chrome *chrome, kvf__replay_result *result) {
    replay r = {.config = config, .occ = occ, .chrome = chrome, .result = result, .options = *config->policy};
    *result = (kvf__replay_result){0};
    r.random.state = config->seed;
    r.options.metric = KVF_METRIC_RAW;
    bool good = create(&r);
    if (good) {
        make_base(&r);
        good = run(&r);
        kvf__occ_end(occ, r.manager);
        result->n_compactions = occ->profile.compactions;
    }
    for (request *q = r.first, *next; q; q = next) {
        next = q->next;
        free(q->tokens);
        free(q);
    }
    kvf_sched_destroy(r.sched);
    kvf_events_destroy(r.events);
    kvf_policy_state_destroy(r.policies);
    kvf_manager_destroy(r.manager);
    free(r.base);
    free(r.groups);
    free(r.page_ids);
    return good;
}
