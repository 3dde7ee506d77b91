/* The file of records. */
#define _POSIX_C_SOURCE 200809L
#include "eval/output.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/digest.h"
#include "tools/reader.h"

#ifndef KVF_COMMIT
#define KVF_COMMIT "unknown"
#endif

enum { DUMP = JSON_COMPACT | JSON_REAL_PRECISION(10) };

/* ---- The run record --------------------------------------------------------------------------------------- */

static json_t *hex(uint64_t digest) {
    char text[KVF__DIGEST_BYTES];
    kvf__digest_text(digest, text);
    return json_string(text);
}

static json_t *model_json(const kvf__cli *cli, const kvf_model_info *info) {
    char path[KVF__PATH_BYTES];
    uint64_t digest = 0, n_bytes = 0;
    if (!kvf__model_path(cli, path) || !kvf__digest_model(path, cli->quiet, &digest, &n_bytes)) return NULL;
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    json_t *model = json_object();
    json_object_set_new(model, "name", kvf__json_text(info->name, strlen(info->name)));
    json_object_set_new(model, "file", kvf__json_text(file, strlen(file)));
    json_object_set_new(model, "bytes", json_integer((json_int_t)n_bytes));
    json_object_set_new(model, "xxh3", hex(digest));
    json_object_set_new(model, "layers", json_integer(info->n_layers));
    return model;
}

/* What changes the figures of a cell and is in no cell's key. */
static json_t *options_json(const kvf__cli *cli, const kvf__eval_inputs *inputs) {
    json_t *o = json_object(), *texts = json_object();
    json_object_set_new(o, "block_size", json_integer(cli->block_size));
    json_object_set_new(o, "heads_per_group", json_integer(cli->heads_per_group));
    json_object_set_new(o, "kv_dtype", json_string(cli->kv_dtype));
    json_object_set_new(o, "chunk", json_integer(cli->chunk));
    json_object_set_new(o, "batch", json_integer(cli->batch));
    json_object_set_new(o, "deterministic", json_boolean(cli->deterministic));
    json_object_set_new(o, "fast_activations", json_boolean(cli->fast_activations));
    for (uint32_t i = 0; i < inputs->texts.n; i++) {
        const kvf__eval_text *t = &inputs->texts.list[i];
        json_t *text = json_object();
        json_object_set_new(text, "kind", json_string(t->kind));
        json_object_set_new(text, "bytes", json_integer((json_int_t)t->n_bytes));
        json_object_set_new(text, "tokens", json_integer((json_int_t)t->n));
        json_object_set_new(text, "xxh3", hex(t->digest));
        json_object_set_new(texts, t->source, text);
    }
    json_object_set_new(o, "texts", texts);
    return o;
}

json_t *kvf__eval_run_record(const kvf__cli *cli, kvf__measure measure, const kvf__eval_inputs *inputs,
                             const kvf__eval_policies *policies, uint32_t k, uint32_t n_threads) {
    json_t *model = model_json(cli, inputs->info), *o = json_object(), *labels = json_array();
    if (!model) {
        json_decref(o);
        json_decref(labels);
        return NULL;
    }
    for (uint32_t i = 0; i < policies->n; i++)
        json_array_append_new(labels, kvf__json_text(policies->list[i].label, strlen(policies->list[i].label)));
    json_object_set_new(o, "record", json_string("run"));
    json_object_set_new(o, "measure", json_string(kvf__measure_names[measure]));
    json_object_set_new(o, "model", model);
    json_object_set_new(o, "version", json_string(kvf_version()));
    json_object_set_new(o, "commit", json_string(KVF_COMMIT));
    json_object_set_new(o, "threads", json_integer(n_threads));
    json_object_set_new(o, "kv_type", json_string(cli->kv_dtype));
    json_object_set_new(o, "block_size", json_integer(cli->block_size));
    json_object_set_new(o, "k", json_integer(k));
    json_object_set_new(o, "options", options_json(cli, inputs));
    json_object_set_new(o, "policies", labels);
    /* Through text, so that it is what a line of a file is. */
    char *flat = json_dumps(o, DUMP);
    json_decref(o);
    o = flat ? json_loads(flat, 0, NULL) : NULL;
    free(flat);
    if (!o) kvf__say("eval: out of memory");
    return o;
}

/* ---- An earlier run ---------------------------------------------------------------------------------------- */

/* Adds "chunk 512 (now 256)" for each option in which two runs differ; of texts those alone that both have. */
static void add_differences(const json_t *was, const json_t *now, const char *what, char *text, size_t capacity) {
    const char *key;
    json_t *b;
    json_object_foreach((json_t *)now, key, b) {
        const json_t *a = json_object_get(was, key);
        if (!strcmp(key, "texts")) {
            add_differences(a, b, "text ", text, capacity);
            continue;
        }
        if (json_equal(a, b) || (!a && !strcmp(what, "text "))) continue;
        char *was_text = a ? json_dumps(a, DUMP | JSON_ENCODE_ANY) : NULL,
             *now_text = json_dumps(b, DUMP | JSON_ENCODE_ANY);
        size_t used = strlen(text);
        snprintf(text + used, capacity - used, "%s%s%s %.80s (now %.80s)", used ? ", " : "", what,
                 kvf__dashed(key).text, was_text ? was_text : "none", now_text ? now_text : "none");
        free(was_text);
        free(now_text);
    }
}

typedef struct earlier { /* one walk over the lines that are there */
    const kvf__cli *cli;
    const json_t *run;
    kvf__eval_output *output;
    uint64_t keep_bytes;
    uint64_t n_torn;
} earlier;

static bool run_fits(earlier *e, const json_t *was) {
    char text[800] = "";
    add_differences(json_object_get(was, "model"), json_object_get(e->run, "model"), "model ", text, sizeof text);
    add_differences(json_object_get(was, "options"), json_object_get(e->run, "options"), "", text, sizeof text);
    e->output->has_run |= json_equal(was, e->run);
    if (!text[0]) return true;
    if (e->cli->force)
        kvf__say("--force: %s was written with %s", kvf__shown(e->cli->output).text, text);
    else
        kvf__say("--resume: %s was written with %s; give the same, another --output, or --force to go on all the same",
                 kvf__shown(e->cli->output).text, text);
    return e->cli->force;
}

static bool take_line(earlier *e, const kvf__reader *r, const char *line, size_t n) {
    if (!r->line_ended) {
        e->n_torn++;
        return true;
    }
    json_t *record = json_loadb(line, n, 0, NULL);
    const char *kind = json_string_value(json_object_get(record, "record"));
    bool first = r->n_lines == 1, ok = kind && (!first || !strcmp(kind, "run"));
    if (!ok) {
        kvf__say("--resume: %s line %llu: is no record of kvfold eval%s; give another --output",
                 kvf__shown(e->cli->output).text, (unsigned long long)r->n_lines,
                 first ? ", which begins with a run" : "");
    } else if (!strcmp(kind, "run")) {
        ok = run_fits(e, record);
    } else {
        json_t *key = kvf__eval_key(record);
        ok = key && kvf__ids_add(&e->output->done, key, 0) != KVF__IDS_NO_MEMORY;
        if (!ok) kvf__say("--resume: out of memory");
        e->output->n_done += !strcmp(kind, "cell");
        json_decref(key);
    }
    if (ok) e->keep_bytes = r->n_bytes;
    json_decref(record);
    return ok;
}

static bool read_earlier(earlier *e) {
    kvf__reader r;
    const char *line;
    size_t n;
    if (!kvf__reader_open(&r, e->cli->output, false)) return false;
    bool ok = true;
    kvf__read got;
    while (ok && (got = kvf__reader_next(&r, true, &line, &n)) != KVF__READ_END) {
        if (got == KVF__READ_LATER) continue;
        ok = got == KVF__READ_LINE && r.pack == KVF__PACK_NONE;
        if (r.pack > KVF__PACK_NONE)
            kvf__say("--resume: %s is packed; unpack it first", kvf__shown(e->cli->output).text);
        ok = ok && take_line(e, &r, line, n);
    }
    kvf__reader_close(&r);
    if (!ok || !e->n_torn) return ok;
    if (truncate(e->cli->output, (off_t)e->keep_bytes) == 0) return true;
    kvf__say("%s: %s", kvf__shown(e->cli->output).text, strerror(errno));
    return false;
}

/* ---- The file ----------------------------------------------------------------------------------------------- */

static bool begin_output(kvf__eval_output *o, const kvf__cli *cli, const json_t *run) {
    const char *path = cli->output ? cli->output : "-";
    struct stat status;
    if (!kvf__sink_open(&o->sink, path, cli->resume, KVF__SYNC_SECOND)) return false; /* locked from here on */
    bool there = strcmp(path, "-") && o->sink.regular && fstat(o->sink.fd, &status) == 0 && status.st_size > 0;
    if (there && !cli->resume && !cli->force) {
        kvf__say("--output %s: has records; --resume goes on with them, --force writes over them",
                 kvf__shown(path).text);
        return false;
    }
    if (there && cli->resume) {
        earlier e = {.cli = cli, .run = run, .output = o};
        if (!read_earlier(&e)) return false;
        if (!cli->quiet)
            kvf__say("--resume: %llu cells are done%s", (unsigned long long)o->n_done,
                     e.n_torn ? ", a torn last line is dropped" : "");
    }
    return kvf__sink_begin(&o->sink);
}

bool kvf__eval_output_open(kvf__eval_output *o, const kvf__cli *cli, const json_t *run) {
    *o = (kvf__eval_output){.n_done = 0};
    if (!begin_output(o, cli, run)) return kvf__sink_cancel(&o->sink), false;
    if (!o->has_run) kvf__sink_write(&o->sink, json_incref((json_t *)run));
    return !o->sink.failed;
}

bool kvf__eval_output_has(const kvf__eval_output *o, json_t *key) {
    bool has = key && kvf__ids_has(&o->done, key);
    json_decref(key);
    return has;
}

void kvf__eval_output_write(kvf__eval_output *o, json_t *record) {
    kvf__sink_write(&o->sink, record);
    kvf__sink_tick(&o->sink);
}

bool kvf__eval_output_close(kvf__eval_output *o) {
    kvf__ids_free(&o->done);
    return !o->sink.is_open || kvf__sink_close(&o->sink);
}
