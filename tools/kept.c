/* Cached prompts in named files: DIRECTORY/NAME.kvfprompt, docs/prompt-file.md. With --deterministic and with
 * --fast-activations K and V have other bits, and with a probe slots have scores, so these modes have files of their own. */
#define _POSIX_C_SOURCE 200809L
#include "tools/kept.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/fields.h"

struct kvf__kept_prompt {
    kvf__kept_prompt *next;
    char *name, *path;
    uint32_t *tokens; /* NULL: nothing is to be saved */
    uint32_t n_tokens, salt_bytes;
    char salt[KVF_PREFIX_SALT_MAX];
    bool ready;
};

void kvf__kept_begin(kvf__kept *kept, const kvf__cli *cli, const kvf_probe *probe, const kvf__files *files,
                     const char *digest) {
    *kept = (kvf__kept){.dir = cli->prefix_dir, .files = files, .identity = digest, .quiet = cli->quiet};
    char of_probe[32] = "";
    if (probe) snprintf(of_probe, sizeof of_probe, ".probe-%016" PRIx64, kvf__probe_digest(probe));
    snprintf(kept->mode, sizeof kept->mode, "%s%s%s", cli->deterministic ? ".deterministic" : "",
             cli->fast_activations ? ".fast" : "", of_probe);
}

static void prompt_free(kvf__kept_prompt *p) {
    if (!p) return;
    free(p->name);
    free(p->path);
    free(p->tokens);
    free(p);
}

void kvf__kept_end(kvf__kept *kept) {
    for (kvf__kept_prompt *p = kept->first, *next; p; p = next) {
        next = p->next;
        prompt_free(p);
    }
    kept->first = NULL;
}

static kvf_prompt_file file_of(const kvf__kept *kept, const kvf__kept_prompt *p) {
    return (kvf_prompt_file){.struct_size = sizeof(kvf_prompt_file),
                             .path = p->path,
                             .identity = kept->identity,
                             .identity_bytes = (uint32_t)strlen(kept->identity),
                             .salt_bytes = p->salt_bytes,
                             .salt = p->salt};
}

static kvf__kept_prompt *prompt_of(const kvf__kept *kept, const kvf__line *line) {
    kvf__kept_prompt *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    size_t room = strlen(kept->dir) + strlen(line->prefix_name) + strlen(kept->mode) + sizeof "/.kvfprompt";
    p->name = strdup(line->prefix_name);
    p->path = malloc(room);
    p->salt_bytes = line->salt_bytes;
    if (p->salt_bytes) memcpy(p->salt, line->cache_salt, p->salt_bytes);
    if (p->name && p->path) {
        snprintf(p->path, room, "%s/%s%s.kvfprompt", kept->dir, line->prefix_name, kept->mode);
        return p;
    }
    prompt_free(p);
    return NULL;
}

/* What is to be saved: up to prefix_end, else the whole prompt. */
static bool note_tokens(kvf__kept_prompt *p, const kvf__line *line) {
    p->n_tokens = line->prefix_end ? line->prefix_end : (uint32_t)line->n_tokens;
    if (p->n_tokens > line->n_tokens) p->n_tokens = (uint32_t)line->n_tokens; /* the engine refuses the line */
    p->tokens = malloc((p->n_tokens ? p->n_tokens : 1) * sizeof *p->tokens);
    if (p->tokens) memcpy(p->tokens, line->tokens, p->n_tokens * sizeof *p->tokens);
    return p->tokens != NULL;
}

/* If a file does not exist, is damaged, or belongs to another model or setting, it is made anew from the line's
 * prompt. A file for which there is no room here is left for runs that have room. */
static kvf_status load(kvf__kept *kept, kvf_engine *engine, kvf__kept_prompt *p, const kvf__line *line,
                       kvf__kept_prompt **out, kvf_error *err) {
    kvf_prompt_file file = file_of(kept, p);
    kvf_status st = kvf_engine_prompt_load(engine, &file, NULL, err);
    bool unfit = st == KVF_E_FORMAT || st == KVF_E_UNSUPPORTED || st == KVF_E_IO;
    bool too_large = st == KVF_E_NEVER_FITS || st == KVF_E_NO_BLOCKS || st == KVF_E_LIMIT;
    if ((unfit || too_large) && !kept->quiet)
        kvf__say("warning: %s; the prompt is computed%s", err->text, unfit ? " and saved there anew" : "");
    if (too_large) return KVF_OK;
    if (!unfit && st != KVF_E_NOT_FOUND) return st;
    if (!note_tokens(p, line)) return kvf__field_fail(err, KVF_E_NO_MEMORY, "prefix_name: out of memory");
    *out = p;
    return KVF_OK;
}

kvf_status kvf__kept_use(kvf__kept *kept, kvf_engine *engine, const kvf__line *line, kvf__kept_prompt **out,
                         kvf_error *err) {
    *out = NULL;
    if (!line->prefix_name) return KVF_OK;
    if (!kept->dir)
        return kvf__field_fail(err, KVF_E_INVALID, "prefix_name %s: needs --prefix-dir, where it is kept",
                               line->prefix_name);
    for (kvf__kept_prompt *p = kept->first; p; p = p->next)
        if (!strcmp(p->name, line->prefix_name)) return KVF_OK; /* loaded, or the line before will save it */
    kvf__kept_prompt *p = prompt_of(kept, line);
    if (!p) return kvf__field_fail(err, KVF_E_NO_MEMORY, "prefix_name: out of memory");
    const char *what = kvf__files_find(kept->files, p->path);
    kvf_status st = what ? kvf__field_fail(err, KVF_E_INVALID, "prefix_name %s: %s is %s: give the prompt another name",
                                           line->prefix_name, kvf__shown(p->path).text, what)
                         : load(kept, engine, p, line, out, err);
    if (st) {
        prompt_free(p);
        return st;
    }
    p->next = kept->first;
    kept->first = p;
    return KVF_OK;
}

void kvf__kept_ready(kvf__kept_prompt *prompt) {
    if (prompt) prompt->ready = true;
}

bool kvf__kept_save(kvf__kept *kept, kvf_engine *engine) {
    bool ok = true;
    for (kvf__kept_prompt *p = kept->first; p; p = p->next) {
        if (!p->ready || !p->tokens) continue;
        kvf_error err = {.text = ""};
        kvf_prompt_file file = file_of(kept, p);
        kvf_status st = kvf_engine_prompt_save(engine, &file, p->tokens, p->n_tokens, NULL, &err);
        if (st && st != KVF_E_NOT_FOUND) { /* its blocks may have been needed meanwhile: then the next run saves it */
            kvf__say("%s", err.text[0] ? err.text : kvf_status_text(st));
            ok = false;
        }
        free(p->tokens);
        p->tokens = NULL;
    }
    return ok;
}
