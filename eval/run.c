/* kvfold eval: plans a run, runs its batches one after another, writes records. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "eval/output.h"
#include "tools/files.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/signals.h"

typedef struct plan { /* of the whole run */
    kvf__cli *cli;
    kvf__measure measure;
    kvf_model *model;
    const kvf_model_info *info;
    uint32_t n_threads, n_groups, k;
    kvf__eval_inputs inputs;
    kvf__eval_policies policies;
    kvf__eval_items items;
    double *rhos, *seeds;
    uint32_t n_rhos, n_seeds;
    uint64_t block_bytes, limit_blocks, most_blocks;  /* of a batch */
    uint32_t most_cells, most_context, piece_context; /* piece_context: with a piece of a repetition */
    kvf__eval_output output;
    kvf_engine *engine;
    kvf_probe *probe;
    kvf__progress progress;
    uint64_t n_cells, n_done, n_tokens, tokens_done, tokens_skipped; /* of the whole run; tokens: work, roughly */
    uint64_t step_tokens;                                            /* of the engine, before this batch */
    double started;
} plan;

/* ---- Batches -------------------------------------------------------------------------------------------------- */

/* Called with every batch of the run, in order: the cells of an item, divided if they are too many or hold too much.
 * False ends the iteration. */
typedef bool (*batch_fn)(plan *p, kvf__eval_batch *batch, uint64_t blocks);

typedef struct walk { /* over the cells of an item: policies that can be together, their rhos, their seeds */
    const kvf__eval_item *item;
    uint32_t share, policy, rho, seed;
} walk;

/* The next cell; false at the end of those that can be together. */
static bool next_cell(const plan *p, walk *w, kvf__eval_cell *out) {
    while (w->policy < p->policies.n && p->policies.list[w->policy].share != w->share) w->policy++;
    if (w->policy == p->policies.n) return false;
    const kvf__eval_policy *e = &p->policies.list[w->policy];
    bool seeded = e->seed_option && !w->item->task;
    *out = (kvf__eval_cell){.policy = e, .rho = p->rhos[w->rho], .seed = w->item->seed};
    if (seeded) out->seed = (uint64_t)p->seeds[w->seed];
    if (seeded && ++w->seed < p->n_seeds) return true;
    w->seed = 0;
    if (++w->rho < p->n_rhos) return true;
    w->rho = 0;
    w->policy++;
    return true;
}

/* Blocks a cell may need at its worst. One that its policy cannot be run for says why, and needs none. */
static uint64_t need_of(const plan *p, const kvf__eval_item *item, kvf__eval_cell *cell) {
    kvf_policy_options options = cell->policy->options;
    kvf_policy_need need;
    kvf_error err = {.text = ""};
    options.rho = kvf__eval_first_rho(cell->rho);
    kvf_status st = kvf_policy_project(&options, p->info->n_layers, p->n_groups, p->cli->block_size, item->n_prompt,
                                       item->n_forced, &need, &err);
    if (st) {
        snprintf(cell->empty, sizeof cell->empty, "%s", err.text[0] ? err.text : kvf_status_text(st));
        return 0;
    }
    /* Slots may stand in blocks that a compaction has not freed yet. */
    return need.steady_blocks + (uint64_t)p->info->n_layers * p->n_groups;
}

/* Tokens beside the prompt while the cell's policy repeats it. */
static uint32_t piece_of(const kvf__eval_item *item, const kvf__eval_cell *cell) {
    const kvf_policy_options *o = &cell->policy->options;
    uint32_t piece = o->repeat_piece && o->repeat_piece < item->n_prompt ? o->repeat_piece : item->n_prompt;
    return kvf_policy_needs(o) & KVF_NEEDS_REPEAT ? KVF_MAX_INSTRUCTION_TOKENS + piece : 0;
}

static uint64_t full_blocks(const plan *p, const kvf__eval_item *item) {
    uint64_t n = (uint64_t)item->n_prompt + item->n_forced;
    return (n / p->cli->block_size + 1) * p->info->n_layers * p->n_groups;
}

/* One batch from `next` on, which there is; more is set to whether there is another. */
static bool one_batch(plan *p, walk *w, kvf__eval_cell *next, bool first, bool *more, batch_fn call) {
    kvf__eval_batch b = {.item = w->item, .first = first, .n_layers = p->info->n_layers};
    b.want_kl = p->measure == KVF__MEASURE_DIVERGENCE || p->measure == KVF__MEASURE_ABLATION ||
                p->measure == KVF__MEASURE_MULTITURN;
    b.cells = calloc(p->cli->batch, sizeof *b.cells);
    if (!b.cells) {
        kvf__say("eval: out of memory");
        return false;
    }
    uint64_t blocks = 2 * full_blocks(p, w->item); /* the full cache, and the prompt while it is shared */
    while (*more && b.n_cells < p->cli->batch) {
        uint64_t need = need_of(p, w->item, next);
        uint32_t piece = piece_of(w->item, next);
        if (piece > b.piece)
            need += (uint64_t)((piece - b.piece) / p->cli->block_size + 1) * p->info->n_layers * p->n_groups;
        if (b.n_cells && blocks + need > p->limit_blocks) break;
        blocks += need;
        if (piece > b.piece) b.piece = piece;
        b.cells[b.n_cells++] = *next;
        *more = next_cell(p, w, next);
    }
    bool ok = call(p, &b, blocks);
    kvf__eval_batch_free(&b);
    return ok;
}

static bool each_batch(plan *p, batch_fn call) {
    for (uint32_t i = 0; i < p->items.n; i++) {
        walk w = {.item = &p->items.list[i]};
        bool first = true;
        for (; w.share < p->policies.n_shares; w.share++) {
            kvf__eval_cell next;
            w.policy = 0;
            bool more = next_cell(p, &w, &next);
            while (more) {
                if (!one_batch(p, &w, &next, first, &more, call)) return false;
                first = false;
            }
        }
    }
    return true;
}

static uint64_t tokens_of(const kvf__eval_batch *b) {
    return b->item->n_prompt + (uint64_t)(b->n_cells + 1) * b->item->n_forced;
}

static bool measure_batch(plan *p, kvf__eval_batch *b, uint64_t blocks) {
    if (blocks > p->limit_blocks) {
        kvf__say("--kv-memory: a prompt of %u tokens with one policy beside the full cache needs %s; there is %s",
                 b->item->n_prompt, kvf__show_bytes(blocks * p->block_bytes).text,
                 kvf__show_bytes(p->limit_blocks * p->block_bytes).text);
        return false;
    }
    if (blocks > p->most_blocks) p->most_blocks = blocks;
    if (b->n_cells > p->most_cells) p->most_cells = b->n_cells;
    uint32_t context = b->item->n_prompt + b->item->n_forced;
    if (context > p->most_context) p->most_context = context;
    context += b->piece;
    if (context > p->piece_context) p->piece_context = context;
    p->n_cells += b->n_cells;
    p->n_tokens += tokens_of(b);
    return true;
}

static bool is_done(const plan *p, const kvf__eval_batch *b) {
    if (b->first && !kvf__eval_output_has(&p->output, kvf__eval_text_key(b->item, p->measure))) return false;
    for (uint32_t i = 0; i < b->n_cells; i++)
        if (!kvf__eval_output_has(&p->output, kvf__eval_cell_key(b->item, &b->cells[i], p->measure, p->k)))
            return false;
    return true;
}

static void write_batch(plan *p, const kvf__eval_batch *b) {
    if (b->first && !kvf__eval_output_has(&p->output, kvf__eval_text_key(b->item, p->measure)))
        kvf__eval_output_write(&p->output, kvf__eval_text_record(b, p->measure));
    for (uint32_t i = 0; i < b->n_cells; i++)
        if (!kvf__eval_output_has(&p->output, kvf__eval_cell_key(b->item, &b->cells[i], p->measure, p->k)))
            kvf__eval_output_write(&p->output, kvf__eval_cell_record(b, i, p->measure, p->k));
}

/* ---- Running ---------------------------------------------------------------------------------------------------- */

static bool asked_to_stop(void *user) {
    (void)user;
    return kvf__signal_caught() != 0;
}

static void show(void *user, uint64_t n_tokens) {
    plan *p = user;
    if (!kvf__progress_due(&p->progress)) return;
    uint64_t now = p->tokens_done + (n_tokens - p->step_tokens), work = p->n_tokens - p->tokens_skipped;
    double elapsed = kvf__now() - p->started, left = now ? elapsed * ((double)work - (double)now) / (double)now : 0;
    char text[320];
    kvf__short total = kvf__show_count(p->n_cells);
    snprintf(text, sizeof text, "%s: %s/%s cells, %.0f%%, %s left", kvf__measure_names[p->measure],
             kvf__show_count(p->n_done).text, total.text, work ? 100 * fmin((double)now / (double)work, 1) : 100,
             left > 0 ? kvf__show_seconds(left).text : "little");
    kvf__progress_text(&p->progress, text);
}

static bool run_batch(plan *p, kvf__eval_batch *b, uint64_t blocks) {
    (void)blocks;
    if (kvf__signal_caught() || p->output.sink.failed) return false;
    if (is_done(p, b)) {
        p->n_done += b->n_cells;
        p->tokens_skipped += tokens_of(b);
        return true;
    }
    if (b->first && !b->item->task) {
        b->density_head_minmax = calloc(p->info->n_layers, sizeof *b->density_head_minmax);
        b->variance = calloc(p->info->n_layers, sizeof *b->variance);
    }
    kvf_engine_stats stats = {.struct_size = sizeof stats};
    if (kvf_engine_get_stats(p->engine, &stats)) return false;
    p->step_tokens = stats.n_prompt_tokens + stats.n_decode_tokens;
    for (uint32_t i = 0; i < b->n_cells; i++) {
        kvf__eval_shape shape = {.n_prompt = b->item->n_prompt,
                                 .n_layers = p->info->n_layers,
                                 .n_groups = p->n_groups,
                                 .block_size = p->cli->block_size};
        b->cells[i].target = kvf__eval_target(&shape, b->cells[i].rho);
    }
    kvf__eval_machine machine = {p->engine, p->info, p->n_groups, p->cli->block_size, asked_to_stop, show, p};
    if (kvf__eval_batch_run(&machine, b) != KVF__EVAL_DONE) return false;
    write_batch(p, b);
    p->n_done += b->n_cells;
    p->tokens_done += tokens_of(b);
    return !p->output.sink.failed;
}

static uint64_t half_of_memory(void) {
    long pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    return pages > 0 && bytes > 0 ? (uint64_t)pages * (uint64_t)bytes / 2 : (uint64_t)1 << 30;
}

/* Room for the largest batch; page memory costs nothing before it is used. */
static bool open_engine(plan *p) {
    kvf_engine_config config = kvf__engine_config(p->cli, p->model);
    config.kv_bytes = p->most_blocks * p->block_bytes;
    config.max_running = p->most_cells + 1 + KVF__EVAL_PROBES;
    config.max_context = p->most_context;      /* the last token scored is not computed */
    if (p->piece_context > config.max_context) /* pieces that have no room are shorter */
        config.max_context = p->piece_context < p->info->n_context ? p->piece_context : p->info->n_context;
    config.prefix_cache = 0;
    for (uint32_t i = 0; i < p->policies.n + KVF__EVAL_PROBES; i++) {
        kvf_policy_options options;
        if (i < p->policies.n)
            options = p->policies.list[i].options;
        else if (!kvf__eval_probe(i - p->policies.n, &options))
            continue;
        uint32_t n = kvf_policy_n_arrays(&options);
        if (n > config.n_score_arrays) config.n_score_arrays = n;
        if (kvf_policy_needs_weights(&options)) config.want_mass_bias = 1;
        if (!kvf__setup_probe(p->cli, &options, 1, &p->probe)) return false;
    }
    config.probe = p->probe;
    p->engine = kvf__engine_open(&config);
    return p->engine != NULL;
}

/* ---- The plan ------------------------------------------------------------------------------------------------- */

static bool make_items(plan *p) {
    switch (p->measure) {
    case KVF__MEASURE_NEEDLE: return kvf__eval_task_items(&p->inputs, true, &p->items);
    case KVF__MEASURE_RECALL: return kvf__eval_task_items(&p->inputs, false, &p->items);
    case KVF__MEASURE_MULTITURN: return kvf__eval_dialogue_items(&p->inputs, &p->items);
    default: return kvf__eval_text_items(&p->inputs, &p->items);
    }
}

static bool check_context(const plan *p) {
    uint32_t most = p->cli->context ? p->cli->context : p->info->n_context;
    if (p->most_context <= most) return true;
    kvf__say("--contexts: a prompt and what follows it have %u tokens, the model's context %u; give shorter ones",
             p->most_context, most);
    return false;
}

static bool make_plan(plan *p) {
    const kvf__cli *cli = p->cli;
    bool listed = p->measure == KVF__MEASURE_ABLATION ? kvf__eval_ablation(cli, p->info, &p->policies)
                                                      : kvf__eval_policies_read(cli, p->info, &p->policies);
    for (uint32_t i = 0; i < p->policies.n; i++) kvf__setup_groups(p->cli, &p->policies.list[i].options);
    uint32_t per_group = cli->heads_per_group ? cli->heads_per_group : p->info->n_kv_heads;
    if (p->info->n_kv_heads % per_group) {
        kvf__say("--heads-per-group %u: must divide the model's %u KV heads", per_group, p->info->n_kv_heads);
        return false;
    }
    p->n_groups = p->info->n_kv_heads / per_group;
    p->block_bytes =
        (uint64_t)cli->block_size * per_group * p->info->head_dim * 2 * (strcmp(cli->kv_dtype, "fp32") ? 2 : 4);
    p->limit_blocks = (cli->eval_memory ? cli->eval_memory : half_of_memory()) / p->block_bytes;
    p->rhos = kvf__eval_numbers("rhos", cli->rhos, 1e-6, 1, false, &p->n_rhos);
    p->seeds = p->rhos ? kvf__eval_numbers("seeds", cli->seeds, 0, 1e9, true, &p->n_seeds) : NULL;
    if (!p->seeds) return false;
    size_t n_bos = 0;
    uint32_t bos[4];
    kvf_error err = {.text = ""};
    p->inputs = (kvf__eval_inputs){.cli = cli, .tokenizer = kvf_model_tokenizer(p->model), .info = p->info};
    kvf_status st = kvf_tokenizer_encode(p->inputs.tokenizer, "", 0, KVF_ENCODE_BOS, bos, 4, &n_bos, &err);
    p->inputs.bos = !st && n_bos ? bos[0] : KVF_NO_TOKEN;
    if (!listed || !kvf__eval_texts_read(&p->inputs) || !make_items(p)) return false;
    p->k = p->policies.list[0].options.evict_every;
    return each_batch(p, measure_batch) && check_context(p);
}

static void say_repetition(const plan *p) {
    kvf_engine_stats s = {.struct_size = sizeof s};
    char text[128];
    if (kvf_engine_get_stats(p->engine, &s) || !s.n_repeat_tokens || p->cli->quiet) return;
    kvf__show_repetition(&s, text, sizeof text);
    kvf__say("repetition: %s", text);
}

static int run_plan(plan *p) {
    json_t *run = NULL;
    int code = KVF__EXIT_USAGE;
    bool open = make_plan(p) && open_engine(p);
    if (open) run = kvf__eval_run_record(p->cli, p->measure, &p->inputs, &p->policies, p->k, p->n_threads);
    if (run && kvf__eval_output_open(&p->output, p->cli, run)) {
        kvf__signals_catch();
        p->progress = kvf__progress_begin(!p->cli->quiet, "eval", p->n_cells);
        p->started = kvf__now();
        bool whole = each_batch(p, run_batch);
        kvf__progress_clear();
        say_repetition(p);
        code = whole ? KVF__EXIT_OK : kvf__signal_caught() ? KVF__EXIT_SIGNAL + kvf__signal_caught() : KVF__EXIT_ENGINE;
        if (kvf__signal_caught())
            kvf__say("interrupted: %llu of %llu cells are written%s", (unsigned long long)p->n_done,
                     (unsigned long long)p->n_cells, p->cli->output ? "; the same with --resume goes on" : "");
    }
    if (run && !kvf__eval_output_close(&p->output)) code = KVF__EXIT_OUTPUT;
    json_decref(run);
    return code;
}

static bool check_files(const kvf__cli *cli) {
    kvf__files files = {0};
    kvf__files_write(&files, "--output", cli->output ? cli->output : "-");
    kvf__files_read_model(&files, cli);
    for (uint32_t i = 0; i < cli->texts.n; i++)
        kvf__files_read(&files, kvf__text_argument(cli->texts.values[i], NULL, NULL), "a text");
    for (uint32_t i = 0; i < cli->dialogues.n; i++) kvf__files_read(&files, cli->dialogues.values[i], "the dialogues");
    bool good = kvf__files_check(&files);
    kvf__files_free(&files);
    return good;
}

int kvf__eval_measure(const kvf__cli *given, kvf__measure measure) {
    kvf__cli own = *given, *cli = &own;
    plan p = {.cli = cli, .measure = measure};
    if (!check_files(cli)) return KVF__EXIT_USAGE;
    if (!(p.model = kvf__setup_model(cli, false, &p.n_threads))) return KVF__EXIT_USAGE;
    p.info = kvf_model_get_info(p.model);
    int code = run_plan(&p);
    kvf_engine_destroy(p.engine);
    kvf_probe_close(p.probe);
    kvf__eval_items_free(&p.items);
    kvf__eval_texts_free(&p.inputs.texts);
    kvf__eval_policies_free(&p.policies);
    free(p.rhos);
    free(p.seeds);
    kvf_model_close(p.model);
    return code;
}
