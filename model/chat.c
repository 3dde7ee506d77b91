/* model/chat.c: dialogues in the form the model was trained on.
 *
 * A template is a series of parts: control tokens, and text. Text, whatever it writes, never becomes a control token:
 * that is what kvf_chat_encode is for. What lies between two control tokens is encoded as one text, as in
 * training. */
#include "model/tokenizer.h"

typedef enum form { FORM_NONE, FORM_CHATML } form;

static const struct form_name {
    const char *name;
    form form;
} forms[] = {{"chatml", FORM_CHATML}, {"none", FORM_NONE}};

#define FORM_LIST "auto, chatml, none"

/* Receives the parts in order: token is a control token that text spells, or KVF_NO_TOKEN. */
typedef kvf_status (*part_fn)(void *ctx, const char *text, size_t n, uint32_t token);

typedef struct dialogue {
    form form;
    const kvf_message *messages;
    uint32_t n_messages;
    uint32_t begin, end; /* the control tokens of chatml */
} dialogue;

static const char begin_text[] = "<|im_start|>", end_text[] = "<|im_end|>";

static bool text_contains(kvf__text text, const char *wanted) {
    size_t n = strlen(wanted);
    for (size_t i = 0; i + n <= text.bytes; i++)
        if (!memcmp(text.data + i, wanted, n)) return true;
    return false;
}

static kvf_status choose_form(const kvf_tokenizer *t, const char *name, form *out, kvf_error *err) {
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (!strcmp(name, forms[i].name)) {
            *out = forms[i].form;
            return KVF_OK;
        }
    if (strcmp(name, "auto"))
        return kvf__fail(err, KVF_E_NOT_FOUND, "chat template \"%.64s\": must be one of: %s", name, FORM_LIST);
    *out = t->chat_template.data && t->chat_template.bytes ? FORM_CHATML : FORM_NONE;
    if (*out == FORM_CHATML && !text_contains(t->chat_template, begin_text))
        return kvf__fail(err, KVF_E_UNSUPPORTED,
                         "chat template \"auto\": the file's template is not chatml: choose one of: %s", FORM_LIST);
    return KVF_OK;
}

static bool is_role(const char *role) {
    return role && (!strcmp(role, "system") || !strcmp(role, "user") || !strcmp(role, "assistant"));
}

static kvf_status control_token(const kvf_tokenizer *t, const char *text, uint32_t *out, kvf_error *err) {
    *out = kvf_tokenizer_find(t, text);
    if (*out == KVF_NO_TOKEN)
        return kvf__fail(err, KVF_E_UNSUPPORTED, "chat template chatml: the vocabulary has no token %s: use \"none\"",
                         text);
    return KVF_OK;
}

/* Checks everything, so that what follows can fail for want of memory or room only. */
static kvf_status read_dialogue(const kvf_tokenizer *t, const char *name, const kvf_message *messages, uint32_t n,
                                dialogue *d, kvf_error *err) {
    *d = (dialogue){.messages = messages, .n_messages = n, .begin = KVF_NO_TOKEN, .end = KVF_NO_TOKEN};
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
    if (d->form != FORM_CHATML) return KVF_OK;
    status = control_token(t, begin_text, &d->begin, err);
    return status == KVF_OK ? control_token(t, end_text, &d->end, err) : status;
}

static kvf_status chatml_message(const dialogue *d, const kvf_message *m, part_fn fn, void *ctx) {
    kvf_status status = fn(ctx, begin_text, sizeof begin_text - 1, d->begin);
    if (status == KVF_OK) status = fn(ctx, m->role, strlen(m->role), KVF_NO_TOKEN);
    if (status == KVF_OK) status = fn(ctx, "\n", 1, KVF_NO_TOKEN);
    if (status == KVF_OK) status = fn(ctx, m->content, m->content_bytes, KVF_NO_TOKEN);
    if (status == KVF_OK) status = fn(ctx, end_text, sizeof end_text - 1, d->end);
    return status == KVF_OK ? fn(ctx, "\n", 1, KVF_NO_TOKEN) : status;
}

static kvf_status each_part(const dialogue *d, part_fn fn, void *ctx) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < d->n_messages && status == KVF_OK; i++) {
        const kvf_message *m = &d->messages[i];
        status = d->form == FORM_CHATML ? chatml_message(d, m, fn, ctx)
                                        : fn(ctx, m->content, m->content_bytes, KVF_NO_TOKEN);
    }
    if (status != KVF_OK || d->form != FORM_CHATML) return status;
    status = fn(ctx, begin_text, sizeof begin_text - 1, d->begin);
    return status == KVF_OK ? fn(ctx, "assistant\n", 10, KVF_NO_TOKEN) : status;
}

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
    return status == KVF_OK ? kvf__encoder_id(j->encoder, token) : status;
}

kvf_status kvf_chat_render(const kvf_tokenizer *tokenizer, const char *template_name, const kvf_message *messages,
                           uint32_t n_messages, char *buffer, size_t capacity, size_t *n_bytes, kvf_error *err) {
    dialogue d;
    joined measured = {.err = err}, written = {.text = buffer, .err = err};
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
    kvf_status status = read_dialogue(tokenizer, template_name, messages, n_messages, &d, err);
    if (status == KVF_OK) status = each_part(&d, join, &measured);
    if (status != KVF_OK) return status;
    status = kvf__encoder_open(&e, tokenizer, err);
    if (status == KVF_OK) {
        j.text =
            kvf__alloc(&tokenizer->allocator, measured.n); /* no text between two control tokens is longer than all */
        if (!j.text) status = kvf__fail(err, KVF_E_NO_MEMORY, "messages: no memory for %zu bytes", measured.n);
    }
    if (status == KVF_OK && tokenizer->add_bos) status = kvf__encoder_id(&e, tokenizer->bos_id);
    if (status == KVF_OK) status = each_part(&d, encode_part, &j);
    if (status == KVF_OK) status = flush(&j);
    if (status == KVF_OK) status = kvf__encoder_result(&e, ids, capacity, n_ids);
    kvf__free(&tokenizer->allocator, j.text, measured.n);
    kvf__encoder_close(&e);
    return status;
}
