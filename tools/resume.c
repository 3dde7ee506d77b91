/* The header of an output, reading an earlier output, and the input's lines against it. */
#define _DEFAULT_SOURCE
#include "tools/resume.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/answer.h"
#include "tools/digest.h"
#include "tools/files.h"

enum { FORMAT = 2, DUMP = JSON_COMPACT | JSON_REAL_PRECISION(10) };

/* ---- The header ------------------------------------------------------------------------------------------ */

static json_t *options_json(const kvf__cli *cli, const kvf_policy_options *policy) {
    json_t *o = json_object(), *stop = json_array();
    for (uint32_t i = 0; i < cli->stop.n; i++) {
        const char *text = cli->stop.values[i];
        json_array_append_new(stop, kvf__json_text(text, strlen(text)));
    }
    json_object_set_new(o, "policy", json_string(policy->ops->name));
    uint32_t n = 0;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    for (uint32_t i = 0; i < n; i++) {
        char value[512];
        if (!kvf_policy_option_get(policy, list[i].name, value, sizeof value))
            json_object_set_new(o, list[i].name, json_string(value));
    }
    json_object_set_new(o, "max_tokens", cli->max_tokens ? json_integer(cli->max_tokens) : json_null());
    json_object_set_new(o, "temperature", cli->temperature < 0 ? json_null() : json_real(cli->temperature));
    json_object_set_new(o, "top_k", json_integer(cli->top_k));
    json_object_set_new(o, "top_p", json_real(cli->top_p));
    json_object_set_new(o, "seed", json_integer((json_int_t)cli->seed));
    json_object_set_new(o, "stop", stop);
    if (cli->n || cli->best_of || cli->beam_width) { /* left out as they are in headers from before there were such */
        json_object_set_new(o, "n", json_integer(cli->n));
        json_object_set_new(o, "best_of", json_integer(cli->best_of));
        json_object_set_new(o, "beam_width", json_integer(cli->beam_width));
        json_object_set_new(o, "length_penalty", json_real(cli->length_penalty));
    }
    json_object_set_new(o, "system", cli->system ? kvf__json_text(cli->system, strlen(cli->system)) : json_null());
    json_object_set_new(o, "chat_template", json_string(cli->chat_template));
    json_object_set_new(o, "special", json_boolean(cli->special));
    json_object_set_new(o, "kv_dtype", json_string(cli->kv_dtype));
    json_object_set_new(o, "block_size", json_integer(cli->block_size));
    json_object_set_new(o, "heads_per_group", json_integer(cli->heads_per_group));
    json_object_set_new(o, "chunk", json_integer(cli->chunk));
    json_object_set_new(o, "context", json_integer(cli->context));
    json_object_set_new(o, "deterministic", json_boolean(cli->deterministic));
    json_object_set_new(o, "fast_activations", json_boolean(cli->fast_activations));
    return o;
}

json_t *kvf__header_make(const kvf__cli *cli, const char *digest, const kvf_probe *probe, const kvf_model_info *info,
                         const kvf_policy_options *policy) {
    json_t *model = json_object(), *inner = json_object(), *header = json_object();
    json_object_set_new(model, "name", kvf__json_text(info->name, strlen(info->name)));
    json_object_set_new(model, "architecture", kvf__json_text(info->architecture, strlen(info->architecture)));
    json_object_set_new(model, "file_bytes", json_integer((json_int_t)info->file_bytes));
    json_object_set_new(model, "digest", json_string(digest));
    json_object_set_new(inner, "format", json_integer(FORMAT));
    json_object_set_new(inner, "version", json_string(kvf_version()));
    json_object_set_new(inner, "model", model);
    json_object_set_new(inner, "options", options_json(cli, policy));
    if (probe) {
        char text[KVF__DIGEST_BYTES];
        kvf__digest_text(kvf__probe_digest(probe), text);
        json_object_set_new(json_object_get(inner, "options"), "probe", json_string(text));
    }
    json_object_set_new(header, "kvfold", inner);
    /* Through text, so that numbers are those that a header read from a file has. */
    char *text = json_dumps(header, DUMP);
    json_decref(header);
    header = text ? json_loads(text, 0, NULL) : NULL;
    free(text);
    if (!header) kvf__say("out of memory");
    return header;
}

static char *joined(const char *path, const char *end) {
    size_t n = strlen(path) + strlen(end) + 1;
    char *text = malloc(n);
    if (text) snprintf(text, n, "%s%s", path, end);
    if (!text) kvf__say("out of memory");
    return text;
}

/* A file that becomes `path` when all of it is on the disk. */
typedef struct staged {
    char *part;
    FILE *file;
    int fd; /* beside the file, for who goes on writing there: it keeps the lock; -1: none */
} staged;

static bool staged_begin(staged *s, const char *path) {
    *s = (staged){.part = joined(path, KVF__PART_SUFFIX), .fd = -1};
    bool made;
    int fd = s->part ? kvf__open_locked(s->part, true, &made) : -1;
    if (fd < 0) return false;
    s->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    s->file = s->fd >= 0 && ftruncate(fd, 0) == 0 ? fdopen(fd, "a") : NULL;
    if (s->file) return true;
    kvf__say("%s: could not be opened for writing: %s", kvf__shown(s->part).text, strerror(errno));
    close(fd);
    return false;
}

/* A new name is on the disk when its folder is; what can be done here is done, and nothing depends on it. */
static void sync_folder(const char *path) {
    char *folder = strdup(path), *slash = folder ? strrchr(folder, '/') : NULL;
    if (slash) slash[slash == folder] = '\0';
    int fd = folder ? open(slash ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
    free(folder);
}

/* fd: takes the open file where it took its place, NULL: nobody does. */
static bool staged_end(staged *s, const char *path, bool good, int *fd) {
    int error = 0;
    if (s->file) {
        struct stat old;
        if (stat(path, &old) == 0) (void)fchmod(fileno(s->file), old.st_mode & 07777);
        if (fflush(s->file) != 0 || fsync(fileno(s->file)) != 0) error = errno;
        if (fclose(s->file) != 0 && !error) error = errno;
        if (good && !error && rename(s->part, path) != 0) error = errno;
        if (good && !error)
            sync_folder(path);
        else
            (void)unlink(s->part);
        if (error) kvf__say("%s: %s", kvf__shown(path).text, strerror(error));
    } else {
        good = false;
    }
    free(s->part);
    good = good && !error;
    if (good && fd)
        *fd = s->fd;
    else if (s->fd >= 0)
        close(s->fd);
    return good;
}

static bool put_line(FILE *f, const json_t *value) { return json_dumpf(value, f, DUMP) == 0 && fputc('\n', f) != EOF; }

bool kvf__header_write_beside(const char *output, const json_t *header) {
    char *path = joined(output, KVF__HEADER_SUFFIX);
    staged s;
    if (!path) return false;
    bool good = staged_begin(&s, path) && put_line(s.file, header);
    good = staged_end(&s, path, good, NULL);
    free(path);
    return good;
}

/* ---- Comparing ----------------------------------------------------------------------------------------------- */

/* Adds "seed 3 (now 0)" for each field in which two objects differ. */
static void add_differences(const json_t *was, const json_t *now, const char *what, char *text, size_t capacity) {
    const json_t *sides[] = {now, was};
    for (int side = 0; side < 2; side++) {
        const char *key;
        json_t *unused;
        json_object_foreach((json_t *)sides[side], key, unused) {
            json_t *a = json_object_get(was, key), *b = json_object_get(now, key);
            if ((side && b) || (a && b && json_equal(a, b))) continue;
            if (!a && json_is_false(b)) continue; /* an option that is younger than the output */
            char *was_text = a ? json_dumps(a, DUMP | JSON_ENCODE_ANY) : NULL;
            char *now_text = b ? json_dumps(b, DUMP | JSON_ENCODE_ANY) : NULL;
            size_t used = strlen(text);
            snprintf(text + used, capacity - used, "%s%s%s %.60s (now %.60s)", used ? ", " : "", what,
                     kvf__dashed(key).text, was_text ? was_text : "none", now_text ? now_text : "none");
            free(was_text);
            free(now_text);
        }
    }
}

static bool header_fits(const char *output, const json_t *was, const json_t *now, bool force) {
    const json_t *a = json_object_get(was, "kvfold"), *b = json_object_get(now, "kvfold");
    char text[600] = "";
    if (json_equal(json_object_get(a, "format"), json_object_get(b, "format"))) {
        add_differences(json_object_get(a, "model"), json_object_get(b, "model"), "model ", text, sizeof text);
        add_differences(json_object_get(a, "options"), json_object_get(b, "options"), "", text, sizeof text);
    } else {
        long long was_format = json_integer_value(json_object_get(a, "format"));
        snprintf(text, sizeof text, "header format %lld (now %d%s)", was_format, FORMAT,
                 was_format == 1 ? ": the digest is of all of the model, and answers tell a hash of their lines" : "");
    }
    if (!text[0]) return true;
    if (force)
        kvf__say("--force: %s was written with %s", kvf__shown(output).text, text);
    else
        kvf__say("--resume: %s was written with %s; give the same, another --output, or --force to go on all the same",
                 kvf__shown(output).text, text);
    return force;
}

/* ---- Reading what is there --------------------------------------------------------------------------------------- */

typedef struct scan { /* one walk over the lines of an output */
    const char *output;
    uint64_t n_lines, n_errors, n_torn, n_odd, n_unsure; /* unsure: answers that tell no hash of their lines */
    uint64_t n_again;                                    /* further answers to one line */
    uint64_t kv_bytes;                                   /* of this run */
    uint64_t keep_bytes;                                 /* where the last line that stays ends */
    bool header_first, gap;                              /* gap: a line that goes stands before one that stays */
    json_t *header;
} scan;

typedef enum line_kind { LINE_GOOD, LINE_ERROR, LINE_SHORT, LINE_TORN, LINE_ODD, LINE_HEADER } line_kind;

/* SHORT: an answer that less memory than kv_bytes was too small for. */
static line_kind classify(const char *text, size_t n, bool ended, uint64_t kv_bytes, json_t **value, const json_t **id,
                          uint64_t *hash) {
    bool well = false;
    *value = ended ? json_loadb(text, n, JSON_ALLOW_NUL, NULL) : NULL;
    *id = NULL;
    if (!ended) return LINE_TORN;
    if (json_object_get(*value, "kvfold") && !json_object_get(*value, "id")) return LINE_HEADER;
    *id = *value ? kvf__answer_read(*value, &well, hash) : NULL;
    uint64_t had = well ? kvf__answer_memory(*value) : 0;
    return !*id ? LINE_ODD : !well ? LINE_ERROR : had && had < kv_bytes ? LINE_SHORT : LINE_GOOD;
}

static bool scan_line(scan *s, kvf__resume *resume, const kvf__reader *r, const char *text, size_t n) {
    json_t *value;
    const json_t *id;
    uint64_t hash = 0;
    line_kind kind = classify(text, n, r->line_ended, s->kv_bytes, &value, &id, &hash);
    bool first = s->n_lines++ == 0;
    if (kind == LINE_HEADER && first) {
        s->header = json_incref(value);
        s->header_first = true;
    }
    s->n_errors += kind == LINE_ERROR;
    resume->n_short += kind == LINE_SHORT;
    s->n_torn += kind == LINE_TORN;
    s->n_odd += kind == LINE_ODD || (kind == LINE_HEADER && !first);
    kvf__ids_result known = kind == LINE_GOOD ? kvf__ids_add(&resume->done, id, hash) : KVF__IDS_NEW;
    bool new = kind == LINE_GOOD &&known == KVF__IDS_NEW, stays = new || (kind == LINE_HEADER && first);
    uint64_t begin = r->n_bytes - n - r->line_ended;
    if (stays) {
        s->gap |= s->keep_bytes != begin;
        s->keep_bytes = r->n_bytes;
    }
    resume->n_done += new;
    s->n_unsure += new &&hash == 0;
    s->n_again += known == KVF__IDS_SEEN;
    if (known == KVF__IDS_NO_MEMORY) kvf__say("--resume: out of memory");
    json_decref(value);
    return known != KVF__IDS_NO_MEMORY;
}

/* Calls scan_line, or with a file copies the lines that stay. */
static bool walk(scan *s, kvf__resume *resume, FILE *copy) {
    kvf__reader r;
    kvf__ids copied = {0};
    const char *text;
    size_t n;
    if (!kvf__reader_open(&r, s->output, false)) return false;
    bool good = true;
    kvf__read got;
    while (good && (got = kvf__reader_next(&r, true, &text, &n)) != KVF__READ_END) {
        if (got == KVF__READ_LATER) continue;
        good = got == KVF__READ_LINE && r.pack == KVF__PACK_NONE;
        if (r.pack > KVF__PACK_NONE) kvf__say("--resume: %s is packed; unpack it first", kvf__shown(s->output).text);
        if (!good) break;
        if (!copy) {
            good = scan_line(s, resume, &r, text, n);
            continue;
        }
        json_t *value;
        const json_t *id;
        uint64_t hash;
        if (classify(text, n, r.line_ended, s->kv_bytes, &value, &id, &hash) == LINE_GOOD &&
            kvf__ids_add(&copied, id, 0) != KVF__IDS_SEEN)
            good = fwrite(text, 1, n, copy) == n && fputc('\n', copy) != EOF;
        if (!good) kvf__say("%s: %s", kvf__shown(s->output).text, strerror(errno));
        json_decref(value);
    }
    kvf__ids_free(&copied);
    kvf__reader_close(&r);
    return good;
}

static json_t *read_beside(const char *output) {
    char *path = joined(output, KVF__HEADER_SUFFIX);
    json_t *header = path ? json_load_file(path, 0, NULL) : NULL;
    free(path);
    if (json_object_get(header, "kvfold")) return header;
    json_decref(header);
    return NULL;
}

/* Takes out what does not stay: by cutting the end off where that does, else by a new file, in which the sink goes on. */
static bool clean(scan *s, const char *output, const json_t *header, bool new_header, kvf__sink *sink) {
    if (!s->gap && !new_header) {
        if (ftruncate(sink->fd, (off_t)s->keep_bytes) == 0) return true;
        kvf__say("%s: %s", kvf__shown(output).text, strerror(errno));
        return false;
    }
    staged file;
    int fd = -1;
    bool good =
        staged_begin(&file, output) && (!s->header_first || put_line(file.file, header)) && walk(s, NULL, file.file);
    if (!staged_end(&file, output, good, &fd)) return false;
    kvf__sink_replace(sink, fd);
    return true;
}

static void say_what(const scan *s, const kvf__resume *resume) {
    char cut[96] = "";
    if (resume->n_short)
        snprintf(cut, sizeof cut, ", %llu that less KV memory cut short are done again",
                 (unsigned long long)resume->n_short);
    kvf__say("--resume: %llu lines are done, %llu errors are tried again%s%s%s", (unsigned long long)resume->n_done,
             (unsigned long long)s->n_errors, cut, s->n_torn ? ", a torn last line is dropped" : "",
             s->n_odd ? ", lines that are no answers are dropped" : "");
    if (s->n_again)
        kvf__say("--resume: %llu further answers to lines that have one are dropped: the first of each stays",
                 (unsigned long long)s->n_again);
    if (s->n_unsure)
        kvf__say("warning: --resume: %llu answers tell no hash of their lines: these are taken to be unchanged",
                 (unsigned long long)s->n_unsure);
}

/* ---- The input's lines --------------------------------------------------------------------------------------------- */

kvf__resume_line kvf__resume_look(const kvf__resume *resume, const kvf__line *line) {
    uint64_t hash;
    if (!kvf__ids_get(&resume->done, line->id, &hash)) return KVF__RESUME_NEW;
    if (resume->force || !hash || hash == kvf__line_hash(line)) return KVF__RESUME_DONE;
    char *id = json_dumps(line->id, JSON_ENCODE_ANY);
    kvf__say(
        "--resume: %s line %llu: %s has the answer to another line under %s %s%s; give the input as it was, another "
        "--output, or --force to keep that answer",
        resume->input, (unsigned long long)line->number, kvf__shown(resume->output).text,
        line->named ? line->openai ? "custom_id" : "id" : "this line's number,", id ? kvf__shown(id).text : "",
        line->named ? ": the line was changed"
                    : ": lines without an id are known by their number, and this one was "
                      "changed, or lines before it were added or taken out");
    free(id);
    return KVF__RESUME_OTHER;
}

/* Checks that every input line with an answer is the line that was answered. An input that can be read only once is
 * checked line by line as it arrives (pass.c). */
static bool check_input(const kvf__resume *resume, kvf__reader *r) {
    const kvf__line_rules rules = {.max_values = resume->max_values};
    kvf__ids seen = {0};
    kvf_error unused;
    const char *text;
    size_t n;
    bool good = true;
    kvf__read got = KVF__READ_LATER;
    while (good && (got = kvf__reader_next(r, true, &text, &n)) != KVF__READ_END && got != KVF__READ_FAILED) {
        if (got != KVF__READ_LINE) continue;
        kvf__line line;
        kvf__line_skip_mark(&text, &n);
        kvf_status st = kvf__line_open(&rules, text, n, r->n_lines, &line, &unused);
        bool first = (!st || line.named) && kvf__ids_add(&seen, line.id, 0) == KVF__IDS_NEW;
        good = st || !first || kvf__resume_look(resume, &line) != KVF__RESUME_OTHER;
        kvf__line_free(&line);
    }
    kvf__ids_free(&seen);
    return good && kvf__reader_rewind(r);
}

/* ---- All of it ------------------------------------------------------------------------------------------------------- */

bool kvf__resume_can(const char *output) {
    struct stat s;
    if (stat(output, &s) != 0 && errno == ENOENT) return true;
    if (S_ISREG(s.st_mode) && access(output, R_OK | W_OK) == 0) return true;
    kvf__say("--resume: %s: is no file that can be read and written", kvf__shown(output).text);
    return false;
}

/* What is to go goes, and the header is what it is now. */
static bool rewrite(scan *s, kvf__resume *resume, const json_t *header, kvf__sink *sink) {
    bool same = s->header && json_equal(s->header, header);
    bool good = s->header_first || same || kvf__header_write_beside(resume->output, header);
    good = good && clean(s, s->output, header, s->header_first && !same, sink);
    resume->failed = !good;
    return good;
}

bool kvf__resume_read(kvf__resume *resume, kvf__sink *sink, kvf__reader *input, const json_t *header, bool quiet) {
    const char *output = resume->output;
    char *path = realpath(output, NULL); /* a link stays one */
    scan s = {.output = path, .kv_bytes = resume->kv_bytes};
    bool good = path && walk(&s, resume, NULL);
    if (!path) kvf__say("%s: %s", kvf__shown(output).text, strerror(errno));
    if (good && s.keep_bytes == 0 && !s.n_errors && !s.n_odd && !resume->n_short) { /* nothing, or a torn first line */
        good = clean(&s, path, header, false, sink);
        resume->failed = !good;
    } else if (good) {
        if (!s.header) s.header = read_beside(output);
        if (!s.header && !resume->force)
            kvf__say("--resume: %s has no header, nor is there %s%s, so nothing says which model and options wrote it; "
                     "give another --output, or --force to go on all the same",
                     kvf__shown(output).text, kvf__shown(output).text, KVF__HEADER_SUFFIX);
        good = s.header ? header_fits(output, s.header, header, resume->force) : resume->force;
        if (good && resume->n_done && !resume->force && kvf__reader_can_rewind(input))
            good = check_input(resume, input);
        if (good) good = rewrite(&s, resume, header, sink);
        resume->has_header = good;
        if (good && !quiet) say_what(&s, resume);
    }
    json_decref(s.header);
    free(path);
    return good;
}
