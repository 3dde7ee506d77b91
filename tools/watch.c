/* Feeds the steps and requests of a run into the report, the traces and the recorded trace. */
#define _POSIX_C_SOURCE 200809L
#include "tools/watch.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/files.h"

enum { PREFIX_TOKENS = 16, PREFIX_KEPT = 4096, PREFIXES_MAX = 1024 };

struct kvf__watched {
    kvf__watched *next;
    kvf__trace_request request;
    uint64_t number; /* of the request */
    uint32_t answer;
    bool ended, dropped;
    double *densities; /* [n_layers] or NULL */
};

struct kvf__watch_prefix {
    uint32_t n;
    uint32_t *tokens; /* of the group's first prompt, at most PREFIX_KEPT */
};

static uint64_t clock_ns(void *ctx) {
    (void)ctx;
    return (uint64_t)(kvf__now() * 1e9);
}

const kvf_profile_config *kvf__watch_profile(const kvf__cli *cli) {
    static const kvf_profile_config config = {.struct_size = sizeof config, .n_events = 1 << 16, .clock = clock_ns};
    return cli->report || cli->trace || cli->metrics ? &config : NULL;
}

/* ---- Begin ----------------------------------------------------------------------------------------- */

bool kvf__watch_check(const kvf__cli *cli) {
    const char *const paths[] = {cli->report, cli->trace, cli->record, cli->metrics};
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        if (!paths[i] || !strcmp(paths[i], "-")) continue;
        struct stat info; /* a named pipe is opened once, at the end: a reader takes the first close for the end */
        if (stat(paths[i], &info) == 0 && S_ISFIFO(info.st_mode)) continue;
        bool made;
        int fd = kvf__open_locked(paths[i], true, &made);
        if (fd < 0) return false;
        if (made) (void)unlink(paths[i]);
        close(fd);
    }
    return true;
}

bool kvf__watch_begin(kvf__watch *w, const kvf__cli *cli, const kvf_model_info *info, kvf_engine *engine,
                      const char *label) {
    *w = (kvf__watch){.cli = cli, .n_layers = info->n_layers, .zero_s = kvf__now()};
    w->profiles = kvf__watch_profile(cli) != NULL;
    if (!w->profiles && !cli->record) return true;
    w->going = true;
    const kvf_manager_config *m = kvf_manager_get_config(kvf_engine_manager(engine, NULL));
    w->prefixes = cli->record ? calloc(PREFIXES_MAX, sizeof *w->prefixes) : NULL;
    w->failed = cli->record && !w->prefixes;
    if (w->failed) kvf__say("out of memory");
    if (w->failed || !kvf__occ_begin(&w->occ, w->n_layers, m->block_size, m->n_blocks, m->block_bytes)) return false;
    snprintf(w->source, sizeof w->source, "%s", cli->input ? cli->input : "a prompt");
    snprintf(w->title, sizeof w->title, "Run with %.100s", info->name[0] ? info->name : info->architecture);
    snprintf(w->policy, sizeof w->policy, "%s", label);
    w->occ.title = w->title;
    w->occ.source = w->source;
    w->occ.policy = w->policy;
    w->failed = !kvf__chrome_open(&w->chrome, cli->trace, "kvfold run", w->n_layers);
    if (!w->failed && cli->record) {
        w->failed = !kvf__out_open(&w->record, cli->record);
        if (!w->failed) kvf__trace_put_head(w->record.file, true);
    }
    return !w->failed;
}

/* ---- Requests ---------------------------------------------------------------------------------------- */

/* The group whose first prompt begins with the same tokens, and how many of these; a new group where there is none. */
static void find_prefix(kvf__watch *w, const uint32_t *tokens, size_t n, kvf__trace_request *r) {
    if (n < PREFIX_TOKENS) return;
    for (uint32_t i = 0; i < w->n_prefixes; i++) {
        const kvf__watch_prefix *p = &w->prefixes[i];
        if (memcmp(p->tokens, tokens, PREFIX_TOKENS * sizeof *tokens) != 0) continue;
        uint32_t same = PREFIX_TOKENS;
        while (same < p->n && same < n && p->tokens[same] == tokens[same]) same++;
        r->group = i;
        r->n_shared = same;
        return;
    }
    if (w->n_prefixes == PREFIXES_MAX) return;
    kvf__watch_prefix p = {.n = (uint32_t)(n < PREFIX_KEPT ? n : PREFIX_KEPT)};
    p.tokens = malloc(p.n * sizeof *p.tokens);
    if (!p.tokens) return; /* then it is of no group */
    memcpy(p.tokens, tokens, p.n * sizeof *p.tokens);
    r->group = w->n_prefixes;
    w->prefixes[w->n_prefixes++] = p;
}

kvf__watched *kvf__watch_submit(kvf__watch *w, const uint32_t *tokens, size_t n_tokens, uint32_t answer) {
    if (!w->going) return NULL;
    kvf__watched *q = calloc(1, sizeof *q);
    if (!q) return NULL; /* it is not watched */
    q->request = (kvf__trace_request){.arrival_s = kvf__now() - w->zero_s,
                                      .n_prompt = (uint32_t)n_tokens,
                                      .group = KVF__TRACE_NONE,
                                      .density = KVF__TRACE_NONE};
    q->number = w->n_submitted += !answer;
    q->answer = answer;
    if (w->record.file) find_prefix(w, tokens, n_tokens, &q->request);
    *(w->last ? &w->last->next : &w->first) = q;
    w->last = q;
    return q;
}

/* Writes those at the front that have ended. */
static void flush(kvf__watch *w) {
    while (w->first && w->first->ended) {
        kvf__watched *q = w->first;
        w->first = q->next;
        if (!w->first) w->last = NULL;
        if (w->record.file && !q->dropped) kvf__trace_put(w->record.file, &q->request, q->densities, w->n_layers);
        free(q->densities);
        free(q);
    }
}

void kvf__watch_refused(kvf__watch *w, kvf__watched *q) {
    if (!q) return;
    q->ended = q->dropped = true;
    flush(w);
}

void kvf__watch_finish(kvf__watch *w, kvf__watched *q, const kvf_result *result) {
    if (!q) return;
    static const char *const ends[] = {"stop", "length", "aborted", "error"};
    q->request.n_output = result->n_tokens;
    q->ended = true;
    q->dropped = result->finish == KVF_FINISH_ABORTED;
    if (result->density && w->record.file && (q->densities = malloc(w->n_layers * sizeof *q->densities)))
        memcpy(q->densities, result->density, w->n_layers * sizeof *q->densities);
    if (w->profiles && !q->dropped) {
        double arrival = q->request.arrival_s;
        const kvf__occ_request figures = {.id = q->number,
                                          .answer = q->answer,
                                          .arrival_s = arrival,
                                          .start_s = arrival + result->start_s,
                                          .first_token_s = result->n_tokens ? arrival + result->first_token_s : NAN,
                                          .end_s = arrival + result->total_s,
                                          .n_prompt = result->n_prompt,
                                          .n_output = result->n_tokens,
                                          .n_preempted = result->n_preempted,
                                          .queue_steps = result->queue_steps,
                                          .end = ends[result->finish & 3]};
        kvf__occ_add_request(&w->occ, &figures);
        kvf__occ_add_budget(&w->occ, result->sizes, result->density);
        if (result->group_sizes) kvf__occ_add_groups(&w->occ, result->group_sizes, result->n_groups);
        kvf__chrome_request(&w->chrome, &figures);
    }
    flush(w);
}

/* ---- Steps ---------------------------------------------------------------------------------------------- */

void kvf__watch_stepping(kvf__watch *w) {
    if (w->profiles) w->step_s = kvf__now();
}

void kvf__watch_step(kvf__watch *w, kvf_engine *engine, const kvf_engine_stats *s) {
    if (!w->profiles || !w->going || s->n_steps == w->n_steps) return;
    kvf__occ_step step = {.step = s->n_steps,
                          .begin_s = w->step_s - w->zero_s,
                          .end_s = kvf__now() - w->zero_s,
                          .n_running = s->n_running,
                          .n_waiting = s->n_waiting,
                          .n_prefill_tokens = (uint32_t)(s->n_prompt_tokens - w->n_prompt_tokens),
                          .n_decode_tokens = (uint32_t)(s->n_decode_tokens - w->n_decode_tokens),
                          .n_again_tokens = (uint32_t)(s->n_recomputed_tokens + s->n_repeat_tokens - w->n_again_tokens),
                          .n_preempted = (uint32_t)(s->n_preempted - w->n_preempted),
                          .full = s->block_bytes ? s->full_bytes / s->block_bytes : 0};
    if (!kvf__occ_note(&w->occ, &w->chrome, kvf_engine_manager(engine, NULL), w->zero_s, &step)) return;
    kvf__occ_add_step(&w->occ, &step, w->occ.peak);
    kvf__chrome_step(&w->chrome, &w->occ, &step);
    w->n_steps = s->n_steps;
    w->n_prompt_tokens = s->n_prompt_tokens;
    w->n_decode_tokens = s->n_decode_tokens;
    w->n_again_tokens = s->n_recomputed_tokens + s->n_repeat_tokens;
    w->n_preempted = s->n_preempted;
}

/* ---- End --------------------------------------------------------------------------------------------------- */

bool kvf__watch_end(kvf__watch *w, kvf_engine *engine) {
    const kvf__cli *cli = w->cli;
    bool going = w->going && !w->failed, good = !w->failed;
    w->going = false;
    if (going && w->profiles && engine) kvf__occ_end(&w->occ, kvf_engine_manager(engine, NULL));
    for (kvf__watched *q = w->first; q; q = q->next) q->ended = q->dropped = true; /* those that never ended */
    flush(w);
    good &= kvf__chrome_close(&w->chrome);
    if (w->record.file) good &= kvf__out_close(&w->record);
    if (going && cli->report) good &= kvf__occ_write_page(&w->occ, cli->report);
    if (going && cli->metrics) good &= kvf__occ_write_metrics(&w->occ, cli->metrics);
    for (uint32_t i = 0; i < w->n_prefixes; i++) free(w->prefixes[i].tokens);
    free(w->prefixes);
    w->prefixes = NULL;
    w->n_prefixes = 0;
    kvf__occ_free(&w->occ);
    return good;
}
