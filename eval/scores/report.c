/* kvfold eval report: reports on the records of the other measures. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/scores/scores.h"
#include "tools/files.h"

/* ---- Checks -------------------------------------------------------------------------------------------------- */

static bool check_outputs(const kvf__cli *cli) {
    const char *const outputs[] = {cli->html, cli->markdown}, *const names[] = {"--html", "--markdown"};
    kvf__files files = {0};
    kvf__files_write(&files, cli->json ? "--json" : "the table", "-");
    for (size_t o = 0; o < 2; o++) kvf__files_write(&files, names[o], outputs[o]);
    for (uint32_t i = 1; i < cli->n_words; i++)
        kvf__files_read(&files, cli->words[i], "a file of records that is read");
    bool good = true;
    for (size_t o = 0; o < 2 && good; o++) {
        good = !outputs[o] || strcmp(outputs[o], "-") != 0;
        if (!good) kvf__say("%s -: standard output has the table; name a file", names[o]);
    }
    good = good && kvf__files_check(&files);
    kvf__files_free(&files);
    return good;
}

/* A source that is asked for or left out by a name that no record has is a mistake in the name. */
static bool check_sources(const kvf__records *r, const char *option, const char *names) {
    char name[200];
    for (const char *p = names; p && *p;) {
        size_t n = strcspn(p, ",");
        snprintf(name, sizeof name, "%.*s", (int)n, p);
        if (n && !json_object_get(r->sources, name)) {
            char known[600] = "";
            size_t used = 0;
            const char *key;
            json_t *value;
            json_object_foreach(r->sources, key, value) if (used < sizeof known) used +=
                (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", key);
            kvf__say("--%s %s: no record is of that source; there are %s", option, kvf__shown(name).text, known);
            return false;
        }
        p += n + (p[n] == ',');
    }
    return true;
}

static bool say_apart(const char *what, const char *name, const json_t *a, const json_t *b) {
    char *x = json_dumps(a, JSON_ENCODE_ANY | JSON_COMPACT), *y = json_dumps(b, JSON_ENCODE_ANY | JSON_COMPACT);
    kvf__say("the records are of runs with %s%s %s and %s: report them apart", what, name, kvf__shown(x ? x : "").text,
             kvf__shown(y ? y : "").text);
    free(x);
    free(y);
    return false;
}

/* Texts of one name are one text. */
static bool check_texts(const json_t *a, const json_t *b) {
    const char *source;
    json_t *text;
    const json_t *others = json_object_get(json_object_get(b, "options"), "texts");
    json_object_foreach(json_object_get(json_object_get(a, "options"), "texts"), source, text) {
        const json_t *x = json_object_get(text, "xxh3"), *y = json_object_get(json_object_get(others, source), "xxh3");
        if (x && y && !json_equal(x, y)) return say_apart("text ", source, x, y);
    }
    return true;
}

/* What all records must share, so that their means are of one thing. */
static bool check_runs(const kvf__records *r) {
    static const char *const keys[] = {"model", "kv_type", "block_size", "k"};
    size_t n = json_array_size(r->runs);
    for (size_t i = 1; i < n; i++) {
        const json_t *run = json_array_get(r->runs, i);
        for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
            const json_t *a = json_object_get(json_array_get(r->runs, 0), keys[k]), *b = json_object_get(run, keys[k]);
            if (json_is_object(a) && json_is_object(b)) /* the file may have moved: its hash says what it is */
                a = json_object_get(a, "xxh3"), b = json_object_get(b, "xxh3");
            if (a && b && !json_equal(a, b)) return say_apart("", keys[k], a, b);
        }
        for (size_t before = 0; before < i; before++)
            if (!check_texts(json_array_get(r->runs, before), run)) return false;
    }
    return true;
}

static bool has_label(const kvf__records *r, const char *label) {
    for (uint32_t p = 0; p < r->n_policies; p++)
        if (!strcmp(kvf__records_name(r, r->policies[p].label), label) || !strcmp(r->policies[p].shown, label))
            return true;
    return false;
}

/* The baseline asked for; without one h2o, or the best where there is no h2o. NULL after a message. */
static const char *choose_baseline(const kvf__cli *cli, const kvf__records *r) {
    if (!cli->baseline) return has_label(r, "h2o") ? "h2o" : "best";
    if (!strcmp(cli->baseline, "best") || has_label(r, cli->baseline)) return cli->baseline;
    char known[600] = "";
    size_t used = 0;
    for (uint32_t p = 0; p < r->n_policies && used < sizeof known; p++)
        used += (size_t)snprintf(known + used, sizeof known - used, ", %s", r->policies[p].shown);
    kvf__say("--baseline %s: no record is of that policy; there are best%s", kvf__shown(cli->baseline).text, known);
    return NULL;
}

/* ---- The command ---------------------------------------------------------------------------------------------- */

static bool write_all(const kvf__cli *cli, const kvf__scores *scores) {
    bool whole = true;
    if (cli->markdown) whole = kvf__scores_markdown(scores, cli->markdown);
    if (cli->html) whole = kvf__scores_page(scores, cli->html) && whole;
    if (cli->json) return kvf__json_print(kvf__scores_json(scores, false)) && whole;
    return kvf__scores_text(scores) && kvf__stdout_done() && whole;
}

static int report(const kvf__cli *cli, const kvf__records *r) {
    if (!check_sources(r, "only", cli->only) || !check_sources(r, "except", cli->except) || !check_runs(r))
        return KVF__EXIT_USAGE;
    if (!r->n_cells) {
        if (r->n_left_out)
            kvf__say("no records are left: --only and --except leave out all %llu cells",
                     (unsigned long long)r->n_left_out);
        else
            kvf__say("there are no cells in the records; kvfold eval MEASURE writes them");
        return KVF__EXIT_USAGE;
    }
    const char *baseline = choose_baseline(cli, r);
    kvf__scores scores;
    if (!baseline || !kvf__scores_make(&scores, r, baseline, !strcmp(cli->resample, "sources"))) return KVF__EXIT_USAGE;
    bool written = write_all(cli, &scores);
    kvf__scores_free(&scores);
    if (r->n_replaced)
        kvf__say("%s cells were there more than once: the last counts", kvf__show_count(r->n_replaced).text);
    return !written ? KVF__EXIT_OUTPUT : r->n_bad ? KVF__EXIT_SOME_FAILED : KVF__EXIT_OK;
}

int kvf__eval_report(const kvf__cli *cli) {
    if (cli->n_words < 2) {
        kvf__say("eval report: name the files of records: kvfold eval report FILE...");
        return KVF__EXIT_USAGE;
    }
    if (!check_outputs(cli)) return KVF__EXIT_USAGE;
    kvf__records records = {.n_cells = 0};
    kvf__source_filter filter = {cli->only, cli->except};
    bool whole = true;
    for (uint32_t i = 1; i < cli->n_words && whole; i++) whole = kvf__records_read(&records, cli->words[i], &filter);
    int code = whole && kvf__records_end(&records) ? report(cli, &records) : KVF__EXIT_USAGE;
    kvf__records_free(&records);
    return code;
}
