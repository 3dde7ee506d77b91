/* One pass of a batch through an engine: submits lines while there is room, runs steps, writes results as they end. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/advice.h"
#include "tools/answer.h"
#include "tools/batch.h"
#include "tools/kept.h"
#include "tools/printer.h"
#include "tools/progress.h"
#include "tools/signals.h"

typedef struct pass { /* the batch, once through, with one policy */
    kvf__batch *run;
    uint32_t index; /* 0: the command's; 1: the one it is compared with, which reports nothing */
    kvf_engine *engine;
    kvf__line_rules rules;
    kvf__ids ids;
    kvf__tally *tally;
    kvf__sink *output;
    kvf__kept kept;    /* prompts in files */
    kvf__watch *watch; /* of the first pass; else one that watches nothing */
    kvf__printer printer;
    kvf__progress progress;
    kvf__advice advice;
    bool ended, stopping;
    uint32_t pending, ahead; /* answers, and beams beside them, that are to come, and how many there may be */
    uint64_t kv_bytes;       /* of the pool */
    uint64_t n_ended, step_prompt_tokens, step_decode_tokens;
    double started;
} pass;

typedef struct job { /* a line that runs */
    pass *pass;
    kvf__answer answer;
    kvf__kept_prompt *kept;  /* to be told when it has ended, or NULL */
    uint32_t n_left;         /* answers that are still to come */
    uint32_t n_beside;       /* samples and beams that are none of the answers */
    bool cut;                /* one was stopped before its end: nothing is written */
    bool early;              /* one ended since the KV memory was full */
    kvf__watched *watched[]; /* [n_samples] */
} job;

/* ---- Results ------------------------------------------------------------------------------------------ */

/* The second pass tells of lines alone that did well in the first. */
static void say_failed(const pass *p, uint64_t line, const char *text) {
    kvf__batch *r = p->run;
    const char *which = p->index ? "--compare: " : "";
    json_t *number = json_integer((json_int_t)line);
    bool told = p->index && number && kvf__ids_has(&r->failed, number);
    if (!p->index && r->n_passes > 1 && number) (void)kvf__ids_add(&r->failed, number, 0);
    json_decref(number);
    r->some_failed = true;
    if (told) return;
    if (r->cli->prompt)
        kvf__say("%s%s%s", which, strncmp(text, "--", 2) ? "--prompt: " : "", text); /* else it names the option */
    else
        kvf__say("%s%s line %llu: %s", which, r->reader.name, (unsigned long long)line, text);
}

static void emit(pass *p, json_t *value) {
    if (p->run->cli->prompt && p->run->cli->json && !p->output->is_open && !p->index && !p->run->result)
        p->run->result = value;
    else
        kvf__sink_write(p->output, value);
}

/* A line that did not become a request. */
static void reject(pass *p, const kvf__line *line, const char *text) {
    say_failed(p, line->number, text);
    p->tally->n_failed++;
    p->n_ended++;
    emit(p, kvf__answer_rejected(line, text));
}

static void on_token(void *user, kvf_request request, uint32_t token, double logprob) {
    pass *p = ((job *)user)->pass;
    char bytes[512], *larger = NULL, *text = bytes;
    (void)request;
    (void)logprob;
    size_t n = kvf_tokenizer_piece(p->rules.tokenizer, token, 0, bytes, sizeof bytes);
    if (n > sizeof bytes && (text = larger = malloc(n))) kvf_tokenizer_piece(p->rules.tokenizer, token, 0, larger, n);
    if (text) kvf__printer_add(&p->printer, text, n);
    free(larger);
}

static void job_free(job *j) {
    kvf__answer_free(&j->answer);
    free(j);
}

/* The last of a line's samples has ended. */
static void job_end(job *j) {
    pass *p = j->pass;
    kvf__kept_ready(j->kept);
    p->tally->n_unfinished += j->cut;
    p->pending -= j->n_beside;
    if (!j->cut) {
        p->tally->n_done += !j->answer.error;
        p->tally->n_failed += j->answer.error != NULL;
        p->tally->n_early += j->early;
        p->n_ended++;
        if (j->answer.error) say_failed(p, j->answer.line, j->answer.error);
        emit(p, kvf__answer_json(&j->answer));
    }
    job_free(j);
}

/* Several answers are printed as they end, each below its index. */
static void print_answer(pass *p, const kvf_result *r) {
    char head[160];
    int n = snprintf(head, sizeof head, "%s[%u] score %.4f, %llu blocks of its own, %llu shared\n",
                     p->printer.used ? "\n" : "", r->index, r->score, (unsigned long long)r->own_blocks,
                     (unsigned long long)r->shared_blocks);
    kvf__printer_add(&p->printer, head, (size_t)n);
    kvf__printer_add(&p->printer, r->text, r->text_bytes);
}

/* --compare: an answer is kept in the first run, and says in the second where it parts from that. */
static void compare(const job *j, const kvf_result *result) {
    kvf__batch *r = j->pass->run;
    uint32_t at;
    if (r->n_passes < 2 || result->finish == KVF_FINISH_ERROR) return;
    if (!j->pass->index)
        kvf__same_keep(&r->same, j->answer.line, result->index, result->tokens, result->n_tokens);
    else if (kvf__same_compare(&r->same, j->answer.line, result->index, result->tokens, result->n_tokens, &at))
        kvf__answer_differs(&j->answer, result->index, at);
}

static void on_finish(void *user, const kvf_result *result) {
    job *j = user;
    pass *p = j->pass;
    p->pending--;
    kvf__watch_finish(p->watch, j->watched[result->index], result);
    j->n_left--;
    if (result->index + 1 == result->n_results && result->n_results < j->answer.n_samples) { /* there are no more */
        for (uint32_t i = result->n_results; i < j->answer.n_samples; i++) kvf__watch_refused(p->watch, j->watched[i]);
        p->pending -= j->n_left;
        j->n_left = 0;
    }
    if (p->stopping || result->finish == KVF_FINISH_ABORTED) {
        p->tally->n_cut++;
        j->cut = true;
    } else {
        kvf__tally_add(p->tally, result);
        j->early |= result->limit == KVF_LIMIT_MEMORY;
        kvf__answer_add(&j->answer, p->rules.tokenizer, result->index, result);
        compare(j, result);
        if (p->run->streams && !p->index && j->answer.several) print_answer(p, result);
    }
    if (j->n_left == 0) job_end(j);
}

/* ---- Requests ------------------------------------------------------------------------------------------- */

/* What a warning calls it. */
static void label_of(const pass *p, const kvf__line *line, char *text, size_t capacity) {
    char *id = line->named ? json_dumps(line->id, JSON_ENCODE_ANY) : NULL;
    if (p->run->cli->prompt)
        snprintf(text, capacity, "--prompt");
    else
        snprintf(text, capacity, "%.64s line %llu%s%.64s", p->run->reader.name, (unsigned long long)line->number,
                 id ? ", id " : "", id ? kvf__shown(id).text : "");
    free(id);
}

static kvf_status submit_job(pass *p, const kvf__line *line, job *j, kvf_error *err) {
    char label[192];
    label_of(p, line, label, sizeof label);
    kvf_generate g = {.struct_size = sizeof g, .tokens = line->tokens, .n_tokens = (uint32_t)line->n_tokens};
    g.max_tokens = line->max_tokens;
    g.sampling = line->sampling;
    g.stop = line->stop;
    g.n_stop = line->n_stop;
    g.ignore_end = line->ignore_end;
    g.n_top_logprobs = line->n_top;
    g.policy = &line->policy;
    g.n = line->n_samples;
    g.best_of = line->best_of;
    g.beam_width = line->beam_width;
    g.length_penalty = line->length_penalty;
    g.prefix_end = line->prefix_end;
    g.cache_salt = line->cache_salt;
    g.cache_salt_bytes = line->salt_bytes;
    g.priority = line->priority;
    g.deadline_s = line->deadline_s;
    g.user = j;
    g.label = label;
    g.on_token = p->run->streams && !p->index && !j->answer.several ? on_token : NULL;
    g.on_finish = on_finish;
    for (uint32_t i = 0; i < line->n_samples; i++)
        j->watched[i] = kvf__watch_submit(p->watch, line->tokens, line->n_tokens, i);
    kvf_status st = kvf_engine_submit(p->engine, &g, NULL, err);
    for (uint32_t i = 0; i < line->n_samples && st; i++) kvf__watch_refused(p->watch, j->watched[i]);
    return st;
}

/* submit_job never calls back, so the job lives until its last answer has come in a step. */
static void submit(pass *p, kvf__line *line) {
    kvf_error err = {.text = ""};
    job *j = calloc(1, sizeof *j + line->n_samples * sizeof *j->watched);
    if (!j || !kvf__answer_begin(&j->answer, line, p->tally->n_layers)) {
        reject(p, line, "out of memory");
        if (j) job_free(j);
        return;
    }
    j->pass = p;
    j->answer.undated = p->run->cli->deterministic;
    j->answer.kv_bytes = p->kv_bytes;
    j->n_left = line->n_samples;
    uint32_t n_all = line->best_of > line->beam_width ? line->best_of : line->beam_width;
    j->n_beside = n_all > line->n_samples ? n_all - line->n_samples : 0;
    kvf_status st = kvf__kept_use(&p->kept, p->engine, line, &j->kept, &err);
    if (!st) st = submit_job(p, line, j, &err);
    if (!st) {
        p->pending += line->n_samples + j->n_beside;
        kvf__advice_add(&p->advice, line);
        return;
    }
    char words[KVF__WORDS_BYTES];
    const char *text = kvf__words(st, &err, p->run->cli->prompt ? KVF__NAMES_OPTIONS : KVF__NAMES_LINE, words);
    line->code = st == KVF_E_NEVER_FITS ? "context_length_exceeded" : line->code;
    line->status = st == KVF_E_NO_MEMORY ? 500 : line->status;
    reject(p, line, text);
    job_free(j);
}

/* The first line says which form the output has, and so where its header goes. */
static void write_header(pass *p, bool openai) {
    kvf__batch *r = p->run;
    if (!r->header) return;
    if (!openai)
        kvf__sink_write(p->output, json_incref(r->header));
    else
        p->output->failed |= !kvf__header_write_beside(r->cli->output, r->header);
    json_decref(r->header);
    r->header = NULL;
}

static void reject_duplicate(pass *p, kvf__line *line, kvf__ids_result used) {
    char *id = json_dumps(line->id, JSON_ENCODE_ANY), text[200];
    snprintf(text, sizeof text,
             used == KVF__IDS_SEEN ? "%s %s: an earlier line has it; give each its own" : "%s %s: out of memory",
             line->openai ? "custom_id" : "id", id ? kvf__shown(id).text : "");
    free(id);
    line->code = "duplicate_custom_id";
    reject(p, line, text);
}

/* whole: false where these are but the first bytes of a line that is too long. */
static void take_line(pass *p, const char *text, size_t n_bytes, uint64_t number, bool whole) {
    kvf__line_skip_mark(&text, &n_bytes);
    size_t blank = 0;
    while (blank < n_bytes && strchr(" \t\r", text[blank]) && text[blank]) blank++;
    if (blank == n_bytes && whole) return;
    kvf__line line;
    kvf_error err = {.text = ""};
    kvf_status st = whole ? kvf__line_open(&p->rules, text, n_bytes, number, &line, &err)
                          : kvf__line_too_long(&p->rules, text, n_bytes, number, &line, &err);
    p->rules.openai = line.openai;
    write_header(p, line.openai);
    /* A bad line uses up the id it names; the default id of a line that could not be read is used by nobody. */
    kvf__ids_result used = st && !line.named ? KVF__IDS_NEW : kvf__ids_add(&p->ids, line.id, 0);
    kvf__resume_line known = !st && used == KVF__IDS_NEW ? kvf__resume_look(&p->run->resume, &line) : KVF__RESUME_NEW;
    if (known != KVF__RESUME_NEW) {
        p->tally->n_skipped += known == KVF__RESUME_DONE;
        p->n_ended += known == KVF__RESUME_DONE;
        p->run->other_line |= known == KVF__RESUME_OTHER;
        p->ended |= p->run->other_line;
        kvf__line_free(&line);
        return;
    }
    if (!st && p->run->resumable && !p->index) line.hash = kvf__line_hash(&line);
    if (!st && used == KVF__IDS_NEW) st = kvf__line_read(&p->rules, &line, &err);
    if (st)
        reject(p, &line, err.text[0] ? err.text : kvf_status_text(st));
    else if (used != KVF__IDS_NEW)
        reject_duplicate(p, &line, used);
    else
        submit(p, &line);
    kvf__line_free(&line);
}

static void take_prompt(pass *p) {
    const kvf__cli *cli = p->run->cli;
    kvf__line line;
    kvf_error err = {.text = ""};
    kvf_status st = kvf__line_from_prompt(&p->rules, &line, &err);
    if (st)
        reject(p, &line, err.text[0] ? err.text : kvf_status_text(st));
    else
        submit(p, &line);
    p->ended = true;
    kvf__line_free(&line);
    if (cli->n > 1 || cli->best_of > 1 || cli->beam_width) return; /* printed when they have ended, and cut by then */
    p->printer.stop = (const char *const *)cli->stop.values;
    p->printer.n_stop = cli->stop.n;
}

/* Submits lines while there is room for more ahead of those that run. */
static void feed(pass *p) {
    while (!p->ended && p->pending < p->ahead && !kvf__signal_caught() && !p->output->failed) {
        const char *text;
        size_t n_bytes;
        if (p->run->cli->prompt) {
            take_prompt(p);
            return;
        }
        kvf__read got = kvf__reader_next(&p->run->reader, p->pending == 0, &text, &n_bytes);
        if (got == KVF__READ_LATER) return;
        if (got == KVF__READ_LINE || got == KVF__READ_LONG) {
            take_line(p, text, n_bytes, p->run->reader.n_lines, got == KVF__READ_LINE);
            continue;
        }
        p->ended = true;
        p->run->some_failed |= got == KVF__READ_FAILED;
    }
}

/* ---- Steps ------------------------------------------------------------------------------------------------ */

static void write_step(pass *p, const kvf_engine_stats *s) {
    json_t *blocks = json_array();
    for (uint32_t l = 0; l < s->n_layers && s->layers; l++)
        json_array_append_new(blocks, json_integer(s->layers[l].n_blocks));
    json_t *o = json_object();
    json_object_set_new(o, "step", json_integer((json_int_t)s->n_steps));
    const char *preset = p->run->names[p->index].preset;
    json_object_set_new(o, "policy", json_string(p->run->policies[p->index].ops->name));
    json_object_set_new(o, "preset", *preset ? json_string(preset) : json_null());
    json_object_set_new(o, "time", kvf__json_number(kvf__now() - p->started));
    json_object_set_new(o, "running", json_integer(s->n_running));
    json_object_set_new(o, "waiting", json_integer(s->n_waiting));
    json_object_set_new(o, "prefill_tokens", json_integer((json_int_t)(s->n_prompt_tokens - p->step_prompt_tokens)));
    json_object_set_new(o, "decode_tokens", json_integer((json_int_t)(s->n_decode_tokens - p->step_decode_tokens)));
    json_object_set_new(o, "free_blocks", json_integer(s->occupancy.blocks.n_free));
    json_object_set_new(o, "blocks", blocks);
    p->step_prompt_tokens = s->n_prompt_tokens;
    p->step_decode_tokens = s->n_decode_tokens;
    kvf__sink_write(&p->run->stats, o);
}

static void after_step(pass *p) {
    kvf__sink_tick(p->output);
    kvf_engine_stats s = {.struct_size = sizeof s};
    if (kvf_engine_get_stats(p->engine, &s)) return;
    kvf__watch_step(p->watch, p->engine, &s);
    kvf__advice_step(&p->advice, p->run->cli, p->run->info, &s);
    if (p->run->stats.is_open) write_step(p, &s);
    const kvf_pool_occupancy *blocks = &s.occupancy.blocks;
    p->progress.skipped = p->tally->n_skipped;
    if (kvf__progress_due(&p->progress))
        kvf__progress_show(&p->progress, p->n_ended, kvf__tally_answers(p->tally), s.n_running,
                           s.n_prompt_tokens + s.n_decode_tokens,
                           blocks->n_total ? (double)blocks->n_held / blocks->n_total : 0);
}

static bool output_failed(const pass *p) { return p->output->failed || p->run->stats.failed || p->printer.failed; }

static void steps(pass *p) {
    while (!kvf__signal_caught() && !output_failed(p)) {
        feed(p);
        if (kvf__signal_caught() || output_failed(p) || (p->ended && !p->pending)) break;
        if (!p->pending) continue;
        int more = 0;
        kvf_error err = {.text = ""};
        kvf__watch_stepping(p->watch);
        kvf_status st = kvf_engine_step(p->engine, &more, &err);
        if (st) kvf__say("a step failed: %s", err.text[0] ? err.text : kvf_status_text(st));
        if (st && !more && kvf_engine_step(p->engine, NULL, NULL)) { /* it takes no more */
            p->run->engine_failed = true;
            break;
        }
        after_step(p);
        p->run->kept_failed |= !kvf__kept_save(&p->kept, p->engine);
    }
}

bool kvf__batch_pass(kvf__batch *r, uint32_t index) {
    const kvf__cli *cli = r->cli;
    pass p = {.run = r, .index = index, .tally = &r->tallies[index], .output = &r->outputs[index]};
    p.rules = (kvf__line_rules){.cli = cli,
                                .tokenizer = kvf_model_tokenizer(r->model),
                                .info = r->info,
                                .model_path = r->model_path,
                                .policy = r->names[index],
                                .max_values = kvf__line_max_values(cli, r->info),
                                .own = index == 0};
    bool sorts = strcmp(cli->order, "arrival") != 0; /* the more lines wait, the more of them are in order */
    p.ahead = sorts || cli->max_running > 16384 ? 65536 : cli->max_running * 4;
    if (!kvf__tally_init(p.tally, cli, r->info, &r->policies[index], r->names[index].preset)) return false;
    r->n_done = index + 1;
    if (!index) p.advice = kvf__advice_begin(cli, r->info, &r->policies[0]);
    p.engine = r->engine ? r->engine : kvf__setup_engine(cli, r->model, r->probe, &r->policies[index], !cli->prompt);
    r->engine = NULL;
    if (!p.engine) return false;
    kvf__watch none = {0};
    p.watch = index ? &none : &r->watch;
    if (!index && !kvf__watch_begin(p.watch, cli, r->info, p.engine, p.tally->label)) {
        r->watch_failed = !kvf__watch_end(p.watch, p.engine);
        kvf_engine_destroy(p.engine);
        return false;
    }
    kvf__kept_begin(&p.kept, cli, r->probe, &r->files, r->digest);
    bool shows = !cli->quiet && !(r->streams && isatty(STDOUT_FILENO));
    p.progress = kvf__progress_begin(
        shows, p.tally->label, shows && !cli->prompt && isatty(STDERR_FILENO) ? kvf__reader_count(&r->reader) : 0);
    p.started = kvf__now();
    p.kv_bytes = kvf__setup_kv_bytes(p.engine);
    steps(&p);
    double wall = kvf__now() - p.started;
    kvf__progress_clear();
    if (r->streams && !index) (void)kvf__printer_end(&p.printer);
    r->outputs[0].failed |= p.printer.failed;
    kvf_engine_stats s = {.struct_size = sizeof s};
    p.stopping = true;
    if (!kvf_engine_get_stats(p.engine, &s)) kvf__tally_end(p.tally, &s, wall);
    if (index) p.tally->same = kvf__same_end(&r->same);
    if (!index) r->watch_failed = !kvf__watch_end(p.watch, p.engine);
    kvf_engine_destroy(p.engine);
    kvf__kept_end(&p.kept);
    kvf__ids_free(&p.ids);
    return !r->engine_failed && !output_failed(&p) && !kvf__signal_caught();
}
