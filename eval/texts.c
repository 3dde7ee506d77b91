/* Texts: tokenized files, and the places in them that are measured. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "eval/eval.h"
#include "tools/digest.h"

static bool read_text(const kvf__eval_inputs *in, const char *argument, kvf__eval_text *t) {
    const char *path = kvf__text_argument(argument, t->source, t->kind);
    if (!*path || !t->source[0]) {
        kvf__say("--text %s: must be FILE, KIND=FILE or KIND:NAME=FILE; kinds: novel, essay, code, dialogue, problems, "
                 "text",
                 kvf__shown(argument).text);
        return false;
    }
    size_t n_bytes;
    char *text = kvf__read_file(path, "text", &n_bytes);
    if (!text) return false;
    size_t valid = kvf__utf8_valid(text, n_bytes);
    kvf_error err = {.text = ""};
    if (valid < n_bytes)
        kvf__say("--text %s: byte %zu (0x%02x) is not UTF-8", kvf__shown(path).text, valid + 1,
                 (unsigned char)text[valid]);
    else if (!(t->ids = kvf__encode(in->tokenizer, text, n_bytes, 0, &t->n, &err)))
        kvf__say("--text %s: %s", kvf__shown(path).text, err.text);
    t->n_bytes = n_bytes;
    t->digest = kvf__digest(text, n_bytes);
    free(text);
    return t->ids != NULL;
}

bool kvf__eval_texts_read(kvf__eval_inputs *in) {
    kvf__eval_texts *texts = &in->texts;
    uint32_t n = in->cli->texts.n;
    *texts = (kvf__eval_texts){calloc(n ? n : 1, sizeof *texts->list), 0};
    if (!texts->list) {
        kvf__say("--text: out of memory");
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        kvf__eval_text *t = &texts->list[texts->n++];
        if (!read_text(in, in->cli->texts.values[i], t)) return false;
        for (uint32_t j = 0; j < i; j++) {
            if (strcmp(texts->list[j].source, t->source)) continue;
            kvf__say("--text %s: another text is named %s too; name one of them: --text %s:NAME=FILE",
                     kvf__shown(in->cli->texts.values[i]).text, t->source, t->kind);
            return false;
        }
    }
    return true;
}

void kvf__eval_texts_free(kvf__eval_texts *texts) {
    for (uint32_t i = 0; i < texts->n; i++) free(texts->list[i].ids);
    free(texts->list);
    *texts = (kvf__eval_texts){NULL, 0};
}

static bool add_window(const kvf__eval_inputs *in, const kvf__eval_text *t, uint32_t context, uint32_t window,
                       uint64_t offset, kvf__eval_items *items) {
    uint32_t n_scored = in->cli->scored, first = in->bos != KVF_NO_TOKEN;
    kvf__eval_item *item = kvf__eval_item_add(items, context, n_scored, false);
    if (!item) return false;
    snprintf(item->source, sizeof item->source, "%s", t->source);
    snprintf(item->kind, sizeof item->kind, "%s", t->kind);
    item->context = context;
    item->offset = offset;
    item->sample = window;
    if (first) item->tokens[0] = in->bos;
    memcpy(item->tokens + first, t->ids + offset, (context + n_scored - first) * sizeof *item->tokens);
    return true;
}

bool kvf__eval_text_items(const kvf__eval_inputs *in, kvf__eval_items *items) {
    const kvf__cli *cli = in->cli;
    uint32_t n_contexts, first = in->bos != KVF_NO_TOKEN;
    if (!in->texts.n) {
        kvf__say("eval %s: give --text FILE, once for each text", cli->words[0]);
        return false;
    }
    double *contexts = kvf__eval_numbers("contexts", cli->contexts, 2, 1 << 30, true, &n_contexts);
    bool ok = contexts != NULL;
    for (uint32_t i = 0; ok && i < in->texts.n; i++) {
        const kvf__eval_text *t = &in->texts.list[i];
        for (uint32_t c = 0; ok && c < n_contexts; c++) {
            uint32_t context = (uint32_t)contexts[c];
            uint64_t length = (uint64_t)context + cli->scored - first;
            for (uint32_t w = 0; ok && w < cli->windows; w++) {
                uint64_t offset = cli->offset + w * (length + first);
                unsigned long long end = offset + length;
                if (offset + length <= t->n) {
                    ok = add_window(in, t, context, w, offset, items);
                    continue;
                }
                ok = w > 0;
                if (!ok || !cli->quiet)
                    kvf__say("%s--text %s: has %zu tokens; window %u of context %u and %u scored tokens ends at %llu%s",
                             ok ? "warning: " : "", t->source, t->n, w, context, cli->scored, end,
                             ok ? ": it is left out, with those after it"
                                : "; give a longer text, a smaller --offset, or fewer --contexts or --scored");
                break;
            }
        }
    }
    free(contexts);
    return ok;
}
