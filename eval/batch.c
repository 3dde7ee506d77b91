/* One batch: the full cache and the cells of one item. A cell that holds more than its target is run again with a budget
 * by which it holds no more; such cells share a second computation of the prompt. How head groups of different sizes
 * round up to whole blocks is known only when the sizes are assigned, so those may need further runs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"

enum { PASSES = 6 };

typedef struct pass pass;

typedef struct sample {
    pass *pass;
    uint32_t index;
    kvf__eval_cell *cell; /* NULL: the full cache, or a probe */
    double *density;      /* of a probe: where it goes; it ends with its first token */
    bool stopped;         /* by us */
    bool sized;           /* its sizes were seen */
} sample;

struct pass {
    const kvf__eval_machine *machine;
    kvf__eval_batch *batch;
    kvf__eval_shape shape;
    kvf__eval_scorer scorer;
    sample *samples; /* the full cache first */
    kvf_policy_options *policies;
    uint32_t n;
    uint32_t number; /* from 0; in those after the first run cells whose budget was lowered */
    char error[KVF__WORDS_BYTES];
};

bool kvf__eval_probe(uint32_t i, kvf_policy_options *options) {
    static const char *const metrics[KVF__EVAL_PROBES] = {"head_minmax", "raw"};
    return !kvf_policy_options_init(options, sizeof *options, "d2o", NULL, NULL) &&
           !kvf_policy_option_set(options, "metric", metrics[i], NULL) &&
           !kvf_policy_option_set(options, "rho", "0.5", NULL) &&
           !kvf_policy_option_set(options, "min_tokens", "0", NULL);
}

/* ---- Callbacks ---------------------------------------------------------------------------------------------- */

static void stop_sample(sample *s, kvf_request request) {
    s->stopped = kvf_engine_abort_sample(s->pass->machine->engine, request, s->index) == KVF_OK;
}

/* Once a cell's sizes are known (at its first token or the one after), a cell that would hold too much is stopped and
 * scheduled again with a lower budget. */
static void look_for_budget(sample *s, kvf_request request) {
    const pass *p = s->pass;
    kvf__eval_cell *c = s->cell;
    const kvf_policy_state *state = NULL;
    (void)kvf_engine_manager(p->machine->engine, &state);
    uint32_t seq = kvf_engine_seq_index(p->machine->engine, request, s->index);
    const kvf_layer_size *sizes = seq == UINT32_MAX ? NULL : kvf_policy_sizes(state, seq);
    kvf__eval_shape shape = p->shape;
    shape.deferred = c->policy->options.defer_first_decode != 0;
    s->sized = sizes != NULL;
    if (!sizes) return;
    const kvf_layer_size *groups = kvf_policy_group_sizes(state, seq);
    double by_layers = kvf__eval_held(&shape, sizes),
           held = groups ? kvf__eval_held_by_groups(&shape, groups) : by_layers;
    if (kvf__eval_within(held, c->target)) return;
    /* A lower budget is found by the layers' sizes; what the groups' rounding took this time is left for it. */
    double goal = c->target - fmax(held - by_layers, 0);
    c->rho_used = kvf__eval_lower(&shape, &c->policy->options, (kvf_policy_state *)state, seq, c->rho_used, goal);
    c->lowered = c->rho_used > 0;
    if (!c->lowered)
        snprintf(c->empty, sizeof c->empty,
                 "holds %.1f blocks where %.0f are the target, and no lower budget brings it there", held, c->target);
    stop_sample(s, request);
}

static void on_logits(void *user, uint32_t index, kvf_request request, uint32_t step, const float *logits) {
    sample *s = &((pass *)user)->samples[index];
    if (s->stopped) return;
    if (s->density)
        stop_sample(s, request);
    else
        kvf__eval_scorer_take(&s->pass->scorer, s->index, step, logits);
    if (s->cell && !s->sized && s->pass->number + 1 < PASSES) look_for_budget(s, request);
}

static bool copy_layers(kvf__eval_cell *c, const kvf_result *r, uint32_t n_layers) {
    free(c->blocks);
    free(c->sizes);
    json_decref(c->group_sizes);
    c->blocks = malloc(n_layers * sizeof *c->blocks);
    c->sizes = r->sizes ? malloc(n_layers * sizeof *c->sizes) : NULL;
    c->group_sizes = r->group_sizes ? kvf__group_sizes_json(r, n_layers) : NULL;
    if (!c->blocks || (r->sizes && !c->sizes) || (r->group_sizes && !c->group_sizes)) return false;
    for (uint32_t l = 0; l < n_layers; l++) {
        c->blocks[l] = (uint32_t)r->layers[l].n_blocks;
        if (r->sizes) c->sizes[l] = r->sizes[l].keep == UINT32_MAX ? r->n_prompt : r->sizes[l].keep;
    }
    return true;
}

/* Blocks reserved in a decode step; without one, those of the prompt. */
static double held_of(const kvf_result *r, uint32_t n_layers) {
    double held = 0;
    for (uint32_t l = 0; l < n_layers; l++) held += r->layers[l].n_blocks;
    return r->n_block_steps ? (double)r->reserved_block_steps / r->n_block_steps : held;
}

static void on_finish(void *user, const kvf_result *r) {
    pass *p = user;
    sample *s = &p->samples[r->index];
    if (s->density && r->density) memcpy(s->density, r->density, p->shape.n_layers * sizeof *s->density);
    if (s->stopped || p->error[0]) return;
    if (r->finish == KVF_FINISH_ERROR || r->n_tokens < p->shape.n_steps) {
        if (r->detail)
            (void)kvf__words(KVF_OK, r->detail, KVF__NAMES_OPTIONS, p->error);
        else
            snprintf(p->error, sizeof p->error, "ended early: more --kv-memory is needed");
        return;
    }
    if (!s->cell) return;
    s->cell->held = held_of(r, p->shape.n_layers);
    if (!copy_layers(s->cell, r, p->shape.n_layers)) snprintf(p->error, sizeof p->error, "out of memory");
    if (!kvf__eval_within(s->cell->held, s->cell->target))
        snprintf(s->cell->empty, sizeof s->cell->empty, "held %.1f blocks where %.0f are the target", s->cell->held,
                 s->cell->target);
}

/* ---- A pass ------------------------------------------------------------------------------------------------- */

static bool add_sample(pass *p, const kvf_policy_options *policy, kvf__eval_cell *cell, double *density) {
    p->policies[p->n] = *policy;
    p->samples[p->n] = (sample){.pass = p, .index = p->n, .cell = cell, .density = density};
    p->n++;
    if (!cell) return true;
    char text[40];
    snprintf(text, sizeof text, "%.17g", cell->rho_used);
    kvf_error err = {.text = ""};
    kvf_status st = kvf_policy_option_set(&p->policies[p->n - 1], "rho", text, &err);
    if (!st && cell->policy->seed_option) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)cell->seed);
        st = kvf_policy_option_set(&p->policies[p->n - 1], cell->policy->seed_option, text, &err);
    }
    if (st) kvf__say("%s: %s", cell->policy->label, err.text[0] ? err.text : kvf_status_text(st));
    return st == KVF_OK;
}

/* Who runs in this pass: all, or those whose budget had to be lowered. */
static bool list_samples(pass *p) {
    kvf__eval_batch *b = p->batch;
    kvf_policy_options options;
    bool ok =
        !kvf_policy_options_init(&options, sizeof options, "full", NULL, NULL) && add_sample(p, &options, NULL, NULL);
    bool late = p->number > 0, probes = !late && b->first && b->density_head_minmax && b->variance;
    for (uint32_t i = 0; ok && probes && i < KVF__EVAL_PROBES; i++)
        ok = kvf__eval_probe(i, &options) && add_sample(p, &options, NULL, i ? b->variance : b->density_head_minmax);
    for (uint32_t i = 0; ok && i < b->n_cells; i++) {
        kvf__eval_cell *c = &b->cells[i];
        if (c->empty[0]) continue;
        if (!late) c->rho_used = kvf__eval_first_rho(c->rho);
        if (!late || c->lowered) ok = add_sample(p, &c->policy->options, c, NULL);
        c->lowered = false;
    }
    return ok;
}

static kvf_status submit(pass *p, kvf_request *request, kvf_error *err) {
    const kvf__eval_item *item = p->batch->item;
    kvf_generate g = {.struct_size = sizeof g, .tokens = item->tokens, .n_tokens = item->n_prompt};
    g.max_tokens = item->n_forced;
    g.forced = item->tokens + item->n_prompt;
    g.ignore_end = 1;
    g.n = p->n;
    g.sample_policies = p->policies;
    g.user = p;
    g.on_logits = on_logits;
    g.on_finish = on_finish;
    return kvf_engine_submit(p->machine->engine, &g, request, err);
}

static kvf__eval_outcome run_steps(pass *p) {
    const kvf__eval_machine *m = p->machine;
    kvf_error err = {.text = ""};
    kvf_request request = 0;
    kvf_status st = submit(p, &request, &err);
    int more = st == KVF_OK;
    bool stop = false;
    while (!st && more && !stop && !p->error[0] && !p->scorer.failed) {
        kvf_engine_stats stats = {.struct_size = sizeof stats};
        st = kvf_engine_step(m->engine, &more, &err);
        if (!st && !kvf_engine_get_stats(m->engine, &stats))
            m->stepped(m->user, stats.n_prompt_tokens + stats.n_decode_tokens);
        stop = more && m->stop(m->user);
    }
    char words[KVF__WORDS_BYTES];
    const char *text = st ? kvf__words(st, &err, KVF__NAMES_OPTIONS, words) : p->error;
    if (p->scorer.failed) text = "out of memory for logits";
    if (text[0]) kvf__say("eval: %s", text);
    /* What is left of it tells this pass of its end, now. */
    for (uint32_t i = 0; more && i < p->n; i++) p->samples[i].stopped = true;
    if (more) (void)!kvf_engine_abort(m->engine, request);
    return text[0] ? KVF__EVAL_FAILED : stop ? KVF__EVAL_STOPPED : KVF__EVAL_DONE;
}

static void keep_figures(pass *p) {
    for (uint32_t i = 0; i < p->n; i++) {
        sample *s = &p->samples[i];
        kvf__eval_figures *to = s->cell ? &s->cell->figures : i ? NULL : &p->batch->full;
        if (s->stopped || !to || to->nll) continue; /* a second pass's full cache is the first's */
        *to = p->scorer.figures[i];
        p->scorer.figures[i] = (kvf__eval_figures){0};
    }
}

static kvf__eval_outcome run_pass(const kvf__eval_machine *machine, kvf__eval_batch *batch, uint32_t number) {
    const kvf__eval_item *item = batch->item;
    pass p = {.machine = machine, .batch = batch, .number = number};
    p.shape = (kvf__eval_shape){.n_prompt = item->n_prompt,
                                .n_steps = item->n_forced,
                                .n_layers = machine->info->n_layers,
                                .n_groups = machine->n_groups,
                                .block_size = machine->block_size};
    uint32_t most = batch->n_cells + 1 + KVF__EVAL_PROBES;
    p.samples = calloc(most, sizeof *p.samples);
    p.policies = calloc(most, sizeof *p.policies);
    kvf__eval_outcome outcome = KVF__EVAL_FAILED;
    if (!p.samples || !p.policies)
        kvf__say("eval: out of memory");
    else if (list_samples(&p) && kvf__eval_scorer_begin(&p.scorer, machine->info->n_vocab, p.n,
                                                        item->tokens + item->n_prompt, item->n_forced, batch->want_kl))
        outcome = run_steps(&p);
    if (outcome == KVF__EVAL_DONE) keep_figures(&p);
    kvf__eval_scorer_end(&p.scorer);
    free(p.samples);
    free(p.policies);
    return outcome;
}

kvf__eval_outcome kvf__eval_batch_run(const kvf__eval_machine *machine, kvf__eval_batch *batch) {
    kvf__eval_outcome outcome = KVF__EVAL_DONE;
    bool more = true;
    for (uint32_t number = 0; more && outcome == KVF__EVAL_DONE; number++) {
        outcome = run_pass(machine, batch, number);
        more = false;
        for (uint32_t i = 0; i < batch->n_cells; i++) more |= batch->cells[i].lowered;
    }
    return outcome;
}

static void free_figures(kvf__eval_figures *f) {
    free(f->nll);
    free(f->kl);
    free(f->hit);
    free(f->agree);
}

void kvf__eval_batch_free(kvf__eval_batch *batch) {
    for (uint32_t i = 0; i < batch->n_cells; i++) {
        free_figures(&batch->cells[i].figures);
        free(batch->cells[i].blocks);
        free(batch->cells[i].sizes);
        json_decref(batch->cells[i].group_sizes);
    }
    free_figures(&batch->full);
    free(batch->density_head_minmax);
    free(batch->variance);
    free(batch->cells);
    *batch = (kvf__eval_batch){0};
}
