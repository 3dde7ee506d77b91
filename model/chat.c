/* model/chat.c: dialogues in the format the model was trained on.
 *
 * A template is a series of parts: control tokens and text. kvf_chat_encode never makes a control token of a text,
 * whatever it contains. The text between two control tokens is encoded as one piece, as in training. */
#include "model/tokenizer.h"

typedef enum form { FORM_NONE, FORM_CHATML, FORM_LLAMA2, FORM_LLAMA3, FORM_MISTRAL } form;

enum { MAX_CONTROLS = 3 };

static const struct form_info {
    const char *name;
    const char *controls[MAX_CONTROLS]; /* tokens that the vocabulary must have */
    bool begins;                        /* with the beginning-of-sequence token, whatever the vocabulary says */
    bool alternates; /* user and assistant by turns, after at most one message of system; user last */
} forms[] = {
    [FORM_NONE] = {"none", {NULL}, false, false},
    [FORM_CHATML] = {"chatml", {"<|im_start|>", "<|im_end|>"}, false, false},
    [FORM_LLAMA2] = {"llama2", {"<s>", "</s>"}, true, true},
    [FORM_LLAMA3] = {"llama3", {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}, true, false},
    [FORM_MISTRAL] = {"mistral", {"</s>"}, true, true},
};

#define FORM_LIST "chatml, llama2, llama3, mistral, none"

/* Receives the parts in order: token is a control token that text spells, or KVF_NO_TOKEN. */
typedef kvf_status (*part_fn)(void *ctx, const char *text, size_t n, uint32_t token);

typedef struct dialogue {
    const kvf_tokenizer *tokenizer;
    form form;
    const kvf_message *messages;
    uint32_t n_messages;
    uint32_t controls[MAX_CONTROLS];
    uint32_t inst[2]; /* mistral: [INST] and [/INST] where they are control tokens, else KVF_NO_TOKEN */
} dialogue;

/* ---- Which form ---------------------------------------------------------------------------------------- */

/* By the control words that the file's template writes. Those with [SYSTEM_PROMPT] are of a later form. */
static kvf_status recognise(kvf__text text, form *out, kvf_error *err) {
    static const struct {
        const char *word;
        form form;
    } words[] = {{"<|start_header_id|>", FORM_LLAMA3},
                 {"<|im_start|>", FORM_CHATML},
                 {"<<SYS>>", FORM_LLAMA2},
                 {"[INST]", FORM_MISTRAL}};
    if (!text.data || !text.bytes)
        return kvf__fail(
            err, KVF_E_UNSUPPORTED,
            "chat template \"auto\": the model's file has no chat template: choose one of: %s; with none the "
            "contents are joined, without roles",
            FORM_LIST);
    for (size_t i = 0; i < sizeof words / sizeof *words && !kvf__text_contains(text, "[SYSTEM_PROMPT]"); i++)
        if (kvf__text_contains(text, words[i].word)) {
            *out = words[i].form;
            return KVF_OK;
        }
    return kvf__fail(err, KVF_E_UNSUPPORTED,
                     "chat template \"auto\": the file's template is none that we know: choose one of: %s", FORM_LIST);
}

static kvf_status choose_form(const kvf_tokenizer *t, const char *name, form *out, kvf_error *err) {
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (!strcmp(name, forms[i].name)) {
            *out = (form)i;
            return KVF_OK;
        }
    if (strcmp(name, "auto"))
        return kvf__fail(err, KVF_E_NOT_FOUND, "chat template \"%.64s\": must be one of: auto, %s", name, FORM_LIST);
    return recognise(t->chat_template, out, err);
}

/* ---- Checks -------------------------------------------------------------------------------------------- */

static bool is_role(const char *role) {
    return role && (!strcmp(role, "system") || !strcmp(role, "user") || !strcmp(role, "assistant"));
}

static uint32_t control_token(const kvf_tokenizer *t, const char *text) {
    uint32_t id = kvf_tokenizer_find(t, text);
    return id != KVF_NO_TOKEN && t->types[id] == KVF__TOKEN_CONTROL ? id : KVF_NO_TOKEN;
}

static bool has_system(const dialogue *d) { return !strcmp(d->messages[0].role, "system"); }

static kvf_status check_turns(const dialogue *d, kvf_error *err) {
    const char *name = forms[d->form].name;
    uint32_t first = has_system(d);
    for (uint32_t i = first; i < d->n_messages; i++) {
        const char *wanted = (i - first) % 2 ? "assistant" : "user";
        if (strcmp(d->messages[i].role, wanted))
            return kvf__fail(err, KVF_E_INVALID,
                             "message %u: role \"%s\": must be %s: chat template %s takes user and assistant by turns, "
                             "after at most one message of system",
                             i, d->messages[i].role, wanted, name);
    }
    if ((d->n_messages - first) % 2 == 1) return KVF_OK;
    return kvf__fail(err, KVF_E_INVALID, "message %u: role \"%s\": chat template %s needs a message of user after it",
                     d->n_messages - 1, d->messages[d->n_messages - 1].role, name);
}

/* Checks everything, so that what follows can fail for want of memory or room only. */
static kvf_status read_dialogue(const kvf_tokenizer *t, const char *name, const kvf_message *messages, uint32_t n,
                                dialogue *d, kvf_error *err) {
    *d = (dialogue){.tokenizer = t, .messages = messages, .n_messages = n};
    kvf_status status = choose_form(t, name ? name : "auto", &d->form, err);
    if (status != KVF_OK) return status;
    if (!n) return kvf__fail(err, KVF_E_INVALID, "messages: there are none: at least one is needed");
    for (uint32_t i = 0; i < n; i++) {
        if (!is_role(messages[i].role))
            return kvf__fail(err, KVF_E_INVALID, "message %u: role \"%.32s\": must be system, user or assistant", i,
                             messages[i].role ? messages[i].role : "");
        if (!messages[i].content && messages[i].content_bytes)
            return kvf__fail(err, KVF_E_INVALID, "message %u: content is NULL", i);
    }
    const struct form_info *info = &forms[d->form];
    for (int i = 0; i < MAX_CONTROLS && info->controls[i]; i++) {
        d->controls[i] = kvf_tokenizer_find(t, info->controls[i]);
        if (d->controls[i] == KVF_NO_TOKEN)
            return kvf__fail(err, KVF_E_UNSUPPORTED, "chat template %s: the vocabulary has no token %s: use \"none\"",
                             info->name, info->controls[i]);
    }
    d->inst[0] = control_token(t, "[INST]");
    d->inst[1] = control_token(t, "[/INST]");
    return info->alternates ? check_turns(d, err) : KVF_OK;
}

/* ---- The forms ----------------------------------------------------------------------------------------- */

/* Hands parts on until one fails. */
typedef struct writer {
    part_fn fn;
    void *ctx;
    kvf_status status;
} writer;

static void put(writer *w, const char *text, size_t n) {
    if (w->status == KVF_OK) w->status = w->fn(w->ctx, text, n, KVF_NO_TOKEN);
}

static void put_text(writer *w, const char *text) { put(w, text, strlen(text)); }

static void put_token(writer *w, const char *text, uint32_t token) {
    if (w->status == KVF_OK) w->status = w->fn(w->ctx, text, strlen(text), token);
}

static void put_control(writer *w, const dialogue *d, int i) {
    put_token(w, forms[d->form].controls[i], d->controls[i]);
}

static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

/* The content without white space at its ends, as training had it. */
static void put_stripped(writer *w, const kvf_message *m, bool begin, bool end) {
    size_t first = 0, last = m->content_bytes;
    while (begin && first < last && is_blank(m->content[first])) first++;
    while (end && last > first && is_blank(m->content[last - 1])) last--;
    put(w, last > first ? m->content + first : "", last - first);
}

static bool all_blank(const kvf_message *m) {
    size_t n = 0;
    while (n < m->content_bytes && is_blank(m->content[n])) n++;
    return n == m->content_bytes;
}

static void write_chatml(writer *w, const dialogue *d) {
    for (uint32_t i = 0; i < d->n_messages; i++) {
        put_control(w, d, 0);
        put_text(w, d->messages[i].role);
        put_text(w, "\n");
        put(w, d->messages[i].content, d->messages[i].content_bytes);
        put_control(w, d, 1);
        put_text(w, "\n");
    }
    put_control(w, d, 0);
    put_text(w, "assistant\n");
}

static void write_llama3(writer *w, const dialogue *d) {
    for (uint32_t i = 0; i <= d->n_messages; i++) {
        const kvf_message *m = i < d->n_messages ? &d->messages[i] : NULL;
        put_control(w, d, 0);
        put_text(w, m ? m->role : "assistant");
        put_control(w, d, 1);
        put_text(w, "\n\n");
        if (!m) return;
        put_stripped(w, m, true, true);
        put_control(w, d, 2);
    }
}

/* Each question with its answer is a sequence of its own. The encoder adds the begin token of the first one. The
 * system message is part of the first question, and white space is stripped from both together. */
static void write_llama2(writer *w, const dialogue *d) {
    const kvf_message *system = has_system(d) ? &d->messages[0] : NULL;
    for (uint32_t i = system != NULL; i < d->n_messages; i += 2) {
        bool with_system = i == 1 && system;
        if (i > 1) put_control(w, d, 0);
        put_text(w, "[INST] ");
        if (with_system) {
            put_text(w, "<<SYS>>\n");
            put(w, system->content, system->content_bytes);
            put_text(w, "\n<</SYS>>");
            put_text(w, all_blank(&d->messages[i]) ? "" : "\n\n");
        }
        put_stripped(w, &d->messages[i], !with_system, true);
        put_text(w, " [/INST]");
        if (i + 1 == d->n_messages) return;
        put_text(w, " ");
        put_stripped(w, &d->messages[i + 1], true, true);
        put_text(w, " ");
        put_control(w, d, 1);
    }
}

/* If [INST] is a control token, a space follows it if in this vocabulary a space follows control tokens: some
 * tokenizers add it (add_space); for a SentencePiece vocabulary without that we add it; byte-level vocabularies have
 * none. The system message is then part of the last question; in the older plain-text form it is part of the first.
 * */
static void write_mistral(writer *w, const dialogue *d) {
    const kvf_tokenizer *t = d->tokenizer;
    const kvf_message *system = has_system(d) ? &d->messages[0] : NULL;
    bool control = d->inst[0] != KVF_NO_TOKEN && d->inst[1] != KVF_NO_TOKEN;
    const char *gap = !control || (t->scores && !t->add_space) ? " " : "";
    uint32_t first = system != NULL, carrier = control ? d->n_messages - 1 : first;
    for (uint32_t i = first; i < d->n_messages; i += 2) {
        put_token(w, "[INST]", control ? d->inst[0] : KVF_NO_TOKEN);
        put_text(w, gap);
        if (system && i == carrier) {
            put(w, system->content, system->content_bytes);
            put_text(w, "\n\n");
        }
        put(w, d->messages[i].content, d->messages[i].content_bytes);
        put_text(w, control ? "" : " ");
        put_token(w, "[/INST]", control ? d->inst[1] : KVF_NO_TOKEN);
        if (i + 1 == d->n_messages) return;
        put_text(w, gap);
        put(w, d->messages[i + 1].content, d->messages[i + 1].content_bytes);
        put_control(w, d, 0);
    }
}

static void write_none(writer *w, const dialogue *d) {
    for (uint32_t i = 0; i < d->n_messages; i++) put(w, d->messages[i].content, d->messages[i].content_bytes);
}

static kvf_status each_part(const dialogue *d, part_fn fn, void *ctx) {
    static void (*const writers[])(writer *, const dialogue *) = {[FORM_NONE] = write_none,
                                                                  [FORM_CHATML] = write_chatml,
                                                                  [FORM_LLAMA2] = write_llama2,
                                                                  [FORM_LLAMA3] = write_llama3,
                                                                  [FORM_MISTRAL] = write_mistral};
    writer w = {fn, ctx, KVF_OK};
    writers[d->form](&w, d);
    return w.status;
}

/* ---- Text and ids -------------------------------------------------------------------------------------- */

/* Text that is being joined; without a buffer it is only measured. */
typedef struct joined {
    char *text;
    size_t n;
    kvf__encoder *encoder; /* when encoding */
    kvf_error *err;
} joined;

static kvf_status join(void *ctx, const char *text, size_t n, uint32_t token) {
    joined *j = ctx;
    (void)token;
    size_t end;
    if (!kvf__add(j->n, n, &end))
        return kvf__fail(j->err, KVF_E_OVERFLOW, "messages: their bytes exceed the address space");
    if (j->text && n) memcpy(j->text + j->n, text, n);
    j->n = end;
    return KVF_OK;
}

static kvf_status flush(joined *j) {
    size_t n = j->n;
    j->n = 0;
    return kvf__encoder_text(j->encoder, j->text, n, false);
}

static kvf_status encode_part(void *ctx, const char *text, size_t n, uint32_t token) {
    joined *j = ctx;
    if (token == KVF_NO_TOKEN) return join(j, text, n, token);
    kvf_status status = flush(j);
    return status == KVF_OK ? kvf__encoder_control(j->encoder, token) : status;
}

kvf_status kvf_chat_render(const kvf_tokenizer *tokenizer, const char *template_name, const kvf_message *messages,
                           uint32_t n_messages, char *buffer, size_t capacity, size_t *n_bytes, kvf_error *err) {
    dialogue d;
    joined measured = {.err = err}, written = {.text = buffer, .err = err};
    if (!tokenizer || !messages || (capacity && !buffer) || !n_bytes)
        return kvf__fail(err, KVF_E_INVALID, "kvf_chat_render: tokenizer, messages, buffer and n_bytes must be given");
    kvf_status status = read_dialogue(tokenizer, template_name, messages, n_messages, &d, err);
    if (status == KVF_OK) status = each_part(&d, join, &measured);
    if (status != KVF_OK) return status;
    *n_bytes = measured.n;
    if (measured.n > capacity)
        return kvf__fail(err, KVF_E_LIMIT, "capacity of %zu bytes: the dialogue has %zu", capacity, measured.n);
    return each_part(&d, join, &written);
}

kvf_status kvf_chat_encode(const kvf_tokenizer *tokenizer, const char *template_name, const kvf_message *messages,
                           uint32_t n_messages, uint32_t *ids, size_t capacity, size_t *n_ids, kvf_error *err) {
    dialogue d;
    kvf__encoder e;
    joined measured = {.err = err}, j = {.encoder = &e, .err = err};
    if (!tokenizer || !messages || (capacity && !ids) || !n_ids)
        return kvf__fail(err, KVF_E_INVALID, "kvf_chat_encode: tokenizer, messages, ids and n_ids must be given");
    kvf_status status = read_dialogue(tokenizer, template_name, messages, n_messages, &d, err);
    if (status == KVF_OK) status = each_part(&d, join, &measured);
    if (status != KVF_OK) return status;
    status = kvf__encoder_open(&e, tokenizer, err);
    if (status == KVF_OK) {
        j.text =
            kvf__alloc(&tokenizer->allocator, measured.n); /* no text between two control tokens is longer than all */
        if (!j.text) status = kvf__fail(err, KVF_E_NO_MEMORY, "messages: no memory for %zu bytes", measured.n);
    }
    bool begins = tokenizer->add_bos || forms[d.form].begins;
    if (status == KVF_OK && begins) status = kvf__encoder_begin(&e);
    if (status == KVF_OK) status = each_part(&d, encode_part, &j);
    if (status == KVF_OK) status = flush(&j);
    if (status == KVF_OK) status = kvf__encoder_result(&e, ids, capacity, n_ids);
    kvf__free(&tokenizer->allocator, j.text, measured.n);
    kvf__encoder_close(&e);
    return status;
}
