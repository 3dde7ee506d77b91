/* Failures of the library in the command's words, made of the fields of kvf_error: where the library names a field of its own, the
 * command names its option. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <string.h>

#include "tools/cli.h"

/* Fields of a config or of a policy that options set. line: a line of the input has the field too. */
static const struct {
    const char *field, *option;
    bool size, line; /* size: in bytes */
} options[] = {{"kv_bytes", "kv-memory", true, false},
               {"host_bytes", "host-memory", true, false},
               {"snapshot_bytes", "snapshot-memory", true, false},
               {"max_context", "context", false, false},
               {"n_threads", "threads", false, false},
               {"max_running", "max-running", false, false},
               {"block_size", "block-size", false, false},
               {"heads_per_group", "heads-per-group", false, false},
               {"chunk", "chunk", false, false},
               {"policy", "policy", false, true},
               {"preset", "preset", false, true}};

/* Fields that the command sets by itself. */
static const struct {
    const char *field, *words;
} others[] = {
    {"want_scores", "score probe needs a probe of this model: give --probe FILE, which kvfold calibrate makes"},
    {"n_score_arrays", "this policy keeps more figures of a token than the run has room for: give it with --policy"}};

/* The option of a field, without its dashes; false: it has none, or a line names it. */
static bool option_of(const char *field, kvf__naming names, kvf__short *option, bool *size) {
    bool in_line = names == KVF__NAMES_LINE;
    *size = false;
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        if (strcmp(options[i].field, field) != 0) continue;
        snprintf(option->text, sizeof option->text, "%s", options[i].option);
        *size = options[i].size;
        return !(in_line && options[i].line);
    }
    uint32_t n = 0;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    for (uint32_t i = 0; !in_line && i < n; i++) {
        if (strcmp(list[i].name, field) != 0) continue;
        *option = kvf__dashed(field);
        return true;
    }
    return false;
}

/* A size as options take it; in whole KiB or MiB if that is exact, or rounded up to it. */
static kvf__short size_of(uint64_t bytes, bool round) {
    kvf__short s;
    uint32_t shift = bytes >= (uint64_t)1 << 20 ? 20 : 10;
    if (!round && bytes & (((uint64_t)1 << shift) - 1)) shift = bytes % 1024 ? 0 : 10;
    uint64_t n = (bytes >> shift) + (bytes & (((uint64_t)1 << shift) - 1) ? 1 : 0);
    snprintf(s.text, sizeof s.text, "%llu%s", (unsigned long long)n, shift == 20 ? "MiB" : shift == 10 ? "KiB" : "");
    return s;
}

const char *kvf__words(kvf_status status, const kvf_error *err, kvf__naming names, char out[KVF__WORDS_BYTES]) {
    kvf__short option;
    bool size;
    const char *text = err->text[0] ? err->text : kvf_status_text(status);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(others[i].field, err->field)) text = others[i].words;
    snprintf(out, KVF__WORDS_BYTES, "%s", text);
    if (!err->field[0] || !option_of(err->field, names, &option, &size)) return out;
    /* The text is "FIELD VALUE: WHY", and behind WHY what would do, where that is one number. */
    size_t field = strlen(err->field);
    char value[160], least[240] = "";
    snprintf(value, sizeof value, " %s: ", size_of(err->have, false).text);
    if (!size) snprintf(value, sizeof value, "%.*s", (int)(err->why - field), err->text + field);
    kvf__short need = size_of(err->need, true);
    if (!size) snprintf(need.text, sizeof need.text, "%llu", (unsigned long long)err->need);
    if (err->text[err->why + err->why_bytes])
        snprintf(least, sizeof least, " give at least --%s %s", option.text, need.text);
    snprintf(out, KVF__WORDS_BYTES, "--%s%s%.*s%s", option.text, value, (int)err->why_bytes, err->text + err->why,
             least);
    return out;
}

void kvf__say_failed(kvf_status status, const kvf_error *err) {
    char words[KVF__WORDS_BYTES];
    kvf__say("%s", kvf__words(status, err, KVF__NAMES_OPTIONS, words));
}
