/* kvfold run: checks the options, opens files and model, runs the batch once or (--compare) twice, prints the summary. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/batch.h"
#include "tools/request.h"
#include "tools/signals.h"

/* ---- Usage ---------------------------------------------------------------------------------------------------- */

/* A name made of the output's. */
static void write_beside(kvf__files *files, const char *output, const char *suffix) {
    char path[KVF__PATH_BYTES];
    if (output && strcmp(output, "-") && (size_t)snprintf(path, sizeof path, "%s%s", output, suffix) < sizeof path)
        kvf__files_write(files, "--output (a file beside)", path);
}

static bool check_files(kvf__batch *r) {
    const kvf__cli *cli = r->cli;
    const struct {
        const char *option, *path;
    } outputs[] = {{"--output", cli->input && !cli->output ? "-" : cli->output},
                   {"--compare-output", cli->compare_output},
                   {"--stats", cli->stats},
                   {"--json", cli->json ? "-" : NULL},
                   {"--report", cli->report},
                   {"--trace", cli->trace},
                   {"--record", cli->record},
                   {"--metrics", cli->metrics},
                   {"--prompt", cli->prompt && !cli->output && !cli->json ? "-" : NULL}};
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++)
        kvf__files_write(&r->files, outputs[i].option, outputs[i].path);
    if (cli->input) {
        write_beside(&r->files, cli->output, KVF__HEADER_SUFFIX);
        write_beside(&r->files, cli->output, KVF__PART_SUFFIX);
    }
    kvf__files_read(&r->files, cli->input, "the input");
    kvf__files_read_model(&r->files, cli);
    return kvf__files_check(&r->files);
}

static bool check_usage(kvf__batch *r) {
    const kvf__cli *cli = r->cli;
    if (!cli->input == !cli->prompt) {
        kvf__say(cli->input ? "--input and --prompt: give one of them"
                            : "nothing to do: give --prompt TEXT or --input FILE (kvfold run --help)");
        return false;
    }
    if (cli->raw && !cli->prompt) {
        kvf__say("--raw: is for --prompt; a line's `prompt` is always taken as it stands");
        return false;
    }
    if (cli->quiet && cli->verbose) {
        kvf__say("--quiet and --verbose: give one of them");
        return false;
    }
    if (cli->special && cli->prompt && !cli->raw) {
        kvf__say("--special: --prompt without --raw is a message, whose control tokens are so much text; add --raw");
        return false;
    }
    if (cli->compare_output && !cli->compare) {
        kvf__say("--compare-output %s: there is no second run; give --compare POLICY",
                 kvf__shown(cli->compare_output).text);
        return false;
    }
    if (cli->resume && (cli->prompt || !cli->output || !strcmp(cli->output, "-") || cli->compare)) {
        kvf__say(cli->compare ? "--resume and --compare: give one of them"
                              : "--resume: needs --input and --output FILE, the output of the run to go on with");
        return false;
    }
    if (cli->force && (!cli->output || !strcmp(cli->output, "-"))) {
        kvf__say("--force: needs --output FILE, to go on with (--resume) or to write over");
        return false;
    }
    struct stat info;
    if (cli->prefix_dir && (stat(cli->prefix_dir, &info) != 0 || !S_ISDIR(info.st_mode))) {
        kvf__say("--prefix-dir %s: is no directory: make it first, or name another", kvf__shown(cli->prefix_dir).text);
        return false;
    }
    return kvf__samples_check(cli) && check_files(r);
}

/* ---- Policies, model, outputs ---------------------------------------------------------------------------------- */

/* The options of --policy and --compare; n_layers 0: before the model is known. */
static bool read_policies(kvf__batch *r, uint32_t n_layers) {
    const kvf__cli *cli = r->cli;
    r->n_passes = cli->compare ? 2 : 1;
    for (uint32_t i = 0; i < r->n_passes; i++) {
        const char *text = i ? cli->compare : kvf__policy_asked(cli);
        kvf_error err = {.text = ""};
        if (!kvf__policy_name_read(text, &r->names[i])) {
            kvf__say("--%s %s: there is no policy of that name", i ? "compare" : "policy", kvf__shown(text).text);
            return false;
        }
        if (!i && cli->preset) snprintf(r->names[i].preset, sizeof r->names[i].preset, "%s", cli->preset);
        if (n_layers) kvf__policy_choose_aloud(r->cli, &r->names[i]);
        kvf_status st = kvf__policy_options(cli, &r->names[i], i == 0, &r->policies[i], &err);
        if (!st && n_layers) st = kvf_policy_options_check(&r->policies[i], n_layers, cli->block_size, &err);
        kvf__setup_groups(r->cli, &r->policies[i]);
        if (!st) continue;
        if (i)
            kvf__say("--compare: %s", err.text[0] ? err.text : kvf_status_text(st));
        else
            kvf__say_failed(st, &err);
        return false;
    }
    return true;
}

/* Answers of an earlier run are hours of work: only --resume and --force touch them. */
static bool check_earlier(const kvf__cli *cli) {
    struct stat s;
    if (!cli->output || !strcmp(cli->output, "-") || cli->force || cli->resume) return true;
    if (stat(cli->output, &s) != 0 || !S_ISREG(s.st_mode) || !s.st_size) return true;
    kvf__say("--output %s: has answers already; %s--force writes over them, or name another file",
             kvf__shown(cli->output).text, cli->input ? "--resume goes on with them, " : "");
    return false;
}

static bool open_sink(kvf__batch *r, kvf__sink *sink, const char *path, kvf__sync sync) {
    const kvf__cli *cli = r->cli;
    bool output = sink == &r->outputs[0], resumes = output && cli->resume;
    if (!kvf__sink_open(sink, path, resumes, sync)) return false;
    if (output && !check_earlier(cli)) return false; /* again: a run may have ended there since this one began */
    r->resume.output = cli->output;
    r->resume.input = r->reader.name;
    r->resume.force = cli->force;
    r->resume.kv_bytes = kvf__setup_kv_bytes(r->engine);
    r->resume.max_values = kvf__line_max_values(cli, r->info);
    return !resumes || kvf__resume_read(&r->resume, sink, &r->reader, r->header, cli->quiet);
}

/* The contents of files stay until all of them are open. The output comes last, because opening it with --resume
 * changes it. */
static bool open_sinks(kvf__batch *r, const char *const *paths, kvf__sink *const *sinks, size_t n) {
    const kvf__cli *cli = r->cli;
    kvf__sync sync = !strcmp(cli->sync, "line")    ? KVF__SYNC_LINE
                     : !strcmp(cli->sync, "never") ? KVF__SYNC_NEVER
                                                   : KVF__SYNC_SECOND;
    bool good = true, prints = cli->json || r->streams;
    for (size_t i = n; i-- > 0 && good;) {
        for (size_t k = i + 1; k < n && good && paths[i]; k++)
            good = !sinks[k]->is_open || !kvf__file_is(sinks[k]->fd, paths[i]);
        if (paths[i] && prints) good = good && !kvf__file_is(STDOUT_FILENO, paths[i]);
        if (!good)
            kvf__say("%s: would be written twice: give each output a file of its own", kvf__shown(paths[i]).text);
        good = good && open_sink(r, sinks[i], paths[i], i == 2 ? KVF__SYNC_NEVER : sync);
    }
    for (size_t i = 0; i < n && good; i++) good = kvf__sink_begin(sinks[i]);
    for (size_t i = 0; i < n && !good; i++) kvf__sink_cancel(sinks[i]);
    return good;
}

/* Whether a file will be there that says which model wrote it. */
static bool needs_digest(const kvf__cli *cli) {
    struct stat s;
    bool file = cli->input && cli->output && strcmp(cli->output, "-") != 0;
    if (file && stat(cli->output, &s) == 0 && !S_ISREG(s.st_mode)) file = false;
    return file || (cli->input && cli->prefix_dir);
}

static bool open_outputs(kvf__batch *r) {
    const kvf__cli *cli = r->cli;
    const char *paths[] = {cli->input && !cli->output ? "-" : cli->output, cli->compare_output, cli->stats};
    kvf__sink *sinks[] = {&r->outputs[0], &r->outputs[1], &r->stats};
    bool named = cli->input && cli->output && strcmp(cli->output, "-") != 0;
    uint64_t digest = 0;
    if (needs_digest(cli) && !kvf__digest_model(r->model_path, cli->quiet, &digest, NULL)) return false;
    kvf__digest_text(digest, r->digest);
    if (named && !(r->header = kvf__header_make(cli, r->digest, r->probe, r->info, &r->policies[0]))) return false;
    if (!kvf__watch_check(cli) || !open_sinks(r, paths, sinks, 3)) return false;
    r->resumable = named && r->outputs[0].regular;
    if (r->header && (!r->resumable || r->resume.has_header)) {
        json_decref(r->header);
        r->header = NULL;
    }
    return true;
}

/* Before anything is used of it: what is never used costs only addresses. */
static void say_memory(const kvf_engine *engine) {
    kvf__memory_part parts[KVF__MEMORY_PARTS];
    char text[400] = "";
    kvf__setup_memory(engine, parts);
    for (uint32_t i = 1, used = 0; i < KVF__MEMORY_PARTS; i++)
        if (parts[i].bytes)
            used += (uint32_t)snprintf(text + used, sizeof text - used, "%s%s %s", used ? ", " : "", parts[i].label,
                                       kvf__show_bytes(parts[i].bytes).text);
    kvf__say("reserves up to %s: %s", kvf__show_bytes(parts[0].bytes).text, text);
}

static bool set_up(kvf__batch *r) {
    const kvf__cli *cli = r->cli;
    r->reader.fd = -1;
    if (!check_usage(r) || !read_policies(r, 0)) return false;
    if (!check_earlier(cli) || (cli->resume && !kvf__resume_can(cli->output))) return false;
    if (cli->input && !kvf__reader_open(&r->reader, cli->input, cli->compare != NULL)) return false;
    if (!kvf__model_path(cli, r->model_path) || !(r->model = kvf__setup_model(cli, false, &r->n_threads))) return false;
    r->info = kvf_model_get_info(r->model);
    r->reader.max_line = kvf__line_max_bytes(cli, kvf_model_tokenizer(r->model), r->info);
    r->streams = cli->prompt && !cli->output && !cli->json;
    return read_policies(r, r->info->n_layers) && kvf__setup_probe(cli, r->policies, cli->compare ? 2 : 1, &r->probe) &&
           (r->cli->provides = KVF_NEEDS_REPEAT | (r->probe ? KVF_NEEDS_PROBE : 0), true) &&
           (r->engine = kvf__setup_engine(cli, r->model, r->probe, &r->policies[0], !cli->prompt)) && open_outputs(r) &&
           (cli->quiet || (cli->prompt && !cli->verbose) || (say_memory(r->engine), true));
}

/* ---- The command ---------------------------------------------------------------------------------------------- */

static bool summarize(kvf__batch *r) {
    const kvf__cli *cli = r->cli;
    if (cli->json) {
        json_t *summary = kvf__report_json(cli, r->info, r->n_threads, r->tallies, r->n_done);
        if (r->result) json_object_set(summary, "result", r->result);
        return kvf__json_print(summary);
    }
    if (!cli->quiet && cli->prompt && !cli->compare && !cli->verbose)
        kvf__report_line(&r->tallies[0]);
    else if (!cli->quiet)
        kvf__report_text(cli, r->info, r->n_threads, r->tallies, r->n_done);
    return true;
}

static void say_interrupted(const kvf__batch *r) {
    const char *text = "interrupted: requests that had not ended are not written";
    if (r->resumable && !r->cli->compare)
        kvf__say("%s; the same command with --resume goes on from here", text);
    else if (r->cli->input)
        kvf__say("%s; a run with --output FILE (and no --compare) can be gone on with", text);
    else
        kvf__say("%s", text);
}

int kvf__run_command(const void *options) {
    kvf__batch r;
    kvf__cli cli = *(const kvf__cli *)options;
    memset(&r, 0, sizeof r);
    r.cli = &cli;
    int code = KVF__EXIT_USAGE;
    if (set_up(&r)) {
        kvf__signals_catch();
        bool going = kvf__batch_pass(&r, 0);
        if (going && r.n_passes > 1 && (r.cli->prompt || kvf__reader_rewind(&r.reader))) going = kvf__batch_pass(&r, 1);
        bool started = r.tallies[0].stats.struct_size != 0;
        if (kvf__signal_caught()) say_interrupted(&r);
        bool written = !started || summarize(&r);
        written &= !r.watch_failed && !r.kept_failed;
        for (int i = 0; i < 2; i++) written &= kvf__sink_close(&r.outputs[i]);
        written &= kvf__sink_close(&r.stats);
        code = !written               ? KVF__EXIT_OUTPUT
               : !started             ? KVF__EXIT_USAGE
               : r.other_line         ? KVF__EXIT_USAGE
               : r.engine_failed      ? KVF__EXIT_ENGINE
               : kvf__signal_caught() ? KVF__EXIT_SIGNAL + kvf__signal_caught()
               : !going               ? KVF__EXIT_ENGINE
               : r.some_failed        ? KVF__EXIT_SOME_FAILED
                                      : KVF__EXIT_OK;
    } else if (r.resume.failed) {
        code = KVF__EXIT_OUTPUT;
    }
    kvf__tally_free(&r.tallies[0]);
    kvf__tally_free(&r.tallies[1]);
    json_decref(r.result);
    json_decref(r.header);
    kvf__ids_free(&r.resume.done);
    kvf__ids_free(&r.failed);
    kvf__same_free(&r.same);
    kvf__files_free(&r.files);
    kvf_engine_destroy(r.engine);
    kvf__reader_close(&r.reader);
    kvf_probe_close(r.probe);
    kvf_model_close(r.model);
    return code;
}
