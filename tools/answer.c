/* Answers as JSON: kvfold's own form, and that of the OpenAI batch files. */
#define _POSIX_C_SOURCE 200809L
#include "tools/answer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/base.h"
#include "tools/digest.h"
#include "tools/fields.h"

static const char *const reasons[] = {"stop", "length", "aborted", "error"};

static json_t *count(uint64_t n) { return json_integer((json_int_t)n); }
static json_t *count_if(bool known, uint64_t n) { return known ? count(n) : json_null(); }

/* ---- Tokens and their log-probabilities --------------------------------------------------------------------- */

typedef struct piece { /* the bytes of a token */
    char bytes[512], *larger;
    const char *text;
    size_t n;
} piece;

static void piece_of(piece *p, const kvf_tokenizer *tokenizer, uint32_t token, int special) {
    p->larger = NULL;
    p->text = p->bytes;
    p->n = kvf_tokenizer_piece(tokenizer, token, special, p->bytes, sizeof p->bytes);
    if (p->n <= sizeof p->bytes) return;
    p->text = p->larger = malloc(p->n);
    if (p->larger)
        kvf_tokenizer_piece(tokenizer, token, special, p->larger, p->n);
    else
        p->text = p->bytes, p->n = sizeof p->bytes;
}

/* One token: {"token", "logprob"} with its id, or in the OpenAI form with its bytes. */
static json_t *token_json(bool openai, const kvf_tokenizer *tokenizer, uint32_t token, double logprob) {
    piece p;
    piece_of(&p, tokenizer, token, 1);
    json_t *o = json_object();
    if (!openai) json_object_set_new(o, "token_id", json_integer(token));
    json_object_set_new(o, "token", kvf__json_text(p.text, p.n));
    json_object_set_new(o, "logprob", kvf__json_number(logprob));
    if (openai) {
        json_t *bytes = json_array();
        for (size_t i = 0; i < p.n; i++) json_array_append_new(bytes, json_integer((unsigned char)p.text[i]));
        json_object_set_new(o, "bytes", bytes);
    }
    free(p.larger);
    return o;
}

/* All tokens of a sample, each with its alternatives. */
static json_t *tokens_json(bool openai, const kvf_tokenizer *tokenizer, const kvf_result *r) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        json_t *o = token_json(openai, tokenizer, r->tokens[i], r->logprobs[i]), *top = json_array();
        for (uint32_t k = 0; k < r->n_top_logprobs; k++) {
            size_t at = (size_t)i * r->n_top_logprobs + k;
            if (r->top_tokens[at] == KVF_NO_TOKEN) continue;
            json_array_append_new(top, token_json(openai, tokenizer, r->top_tokens[at], r->top_logprobs[at]));
        }
        json_object_set_new(o, "top_logprobs", top);
        json_array_append_new(list, o);
    }
    return list;
}

/* ---- Log-probabilities of /v1/completions ------------------------------------------------------------------- */

static bool begins_with(const piece *p, const char *text) {
    return p->n >= strlen(text) && !memcmp(p->text, text, strlen(text));
}

static const char bytes_mark[] = "bytes:", id_mark[] = "token_id:";

/* The name of a token that has no other in the list, since none is named so by its text. */
static json_t *id_label(uint32_t token) { return json_sprintf("%s%u", id_mark, token); }

/* The name of a token: its text, or "bytes:\xf0\x9f" where that is no text of its own. Tokens of equal bytes have one name. */
static json_t *label_of(const kvf_tokenizer *tokenizer, uint32_t token) {
    piece p;
    json_t *label = NULL;
    piece_of(&p, tokenizer, token, 1);
    bool is_text = kvf__utf8_valid(p.text, p.n) == p.n && !memchr(p.text, 0, p.n);
    if (!p.n || begins_with(&p, bytes_mark) || begins_with(&p, id_mark)) {
        label = id_label(token);
    } else if (is_text) {
        label = json_stringn(p.text, p.n);
    } else {
        char *text = malloc(sizeof bytes_mark + p.n * 4);
        size_t used = text ? (size_t)sprintf(text, "%s", bytes_mark) : 0;
        for (size_t i = 0; i < p.n && text; i++) {
            unsigned char byte = (unsigned char)p.text[i];
            bool plain = byte >= 0x20 && byte < 0x7f && byte != '\\';
            used += (size_t)sprintf(text + used, plain ? "%c" : "\\x%02x", byte);
        }
        label = text ? json_stringn(text, used) : NULL;
        free(text);
    }
    free(p.larger);
    return label;
}

/* {name: log-probability}: the likeliest tokens of step i, and the one taken, named `taken`, where it is not of these. */
static json_t *top_json(const kvf_tokenizer *tokenizer, const kvf_result *r, uint32_t i, const json_t *taken) {
    json_t *top = json_object();
    for (uint32_t k = 0; k < r->n_top_logprobs; k++) {
        size_t at = (size_t)i * r->n_top_logprobs + k;
        uint32_t token = r->top_tokens[at];
        if (token == KVF_NO_TOKEN) continue;
        json_t *label = token == r->tokens[i] ? json_incref((json_t *)taken) : label_of(tokenizer, token);
        const char *name = json_string_value(label);
        if (name && token != r->tokens[i] && (json_object_get(top, name) || json_equal(label, taken))) {
            json_decref(label); /* another token of the same bytes has it */
            name = json_string_value(label = id_label(token));
        }
        if (name) json_object_set_new(top, name, kvf__json_number(r->top_logprobs[at]));
        json_decref(label);
    }
    const char *name = json_string_value(taken);
    if (name && !json_object_get(top, name)) json_object_set_new(top, name, kvf__json_number(r->logprobs[i]));
    return top;
}

/* For each token the index of the character of the text in which its first byte lies, or the text's length if the
 * text ends before it. Several tokens may share a character and then have the same index. */
static json_t *offsets_json(const kvf_tokenizer *tokenizer, const kvf_result *r) {
    json_t *list = json_array();
    size_t n_text = kvf__n_characters(r->text, r->text_bytes), capacity = 0, used = 0, at = 0, character = 0;
    char *bytes = NULL;
    size_t *begins = calloc((size_t)r->n_tokens + 1, sizeof *begins);
    for (uint32_t i = 0; i < r->n_tokens && begins; i++) {
        piece p;
        piece_of(&p, tokenizer, r->tokens[i], 0);
        begins[i] = used;
        if (capacity - used < p.n) {
            char *larger = realloc(bytes, capacity = capacity * 2 + p.n + 256);
            if (larger)
                bytes = larger;
            else
                free(begins), begins = NULL;
        }
        if (begins && p.n) memcpy(bytes + used, p.text, p.n);
        used += p.n;
        free(p.larger);
    }
    for (uint32_t i = 0; i < r->n_tokens && begins; i++) {
        while (at < begins[i]) { /* `at` is where `character` begins */
            size_t length = kvf__utf8_length(bytes + at, used - at, NULL);
            if (at + (length ? length : 1) > begins[i]) break;
            at += length ? length : 1;
            character++;
        }
        json_array_append_new(list, count(character < n_text ? character : n_text));
    }
    free(begins);
    free(bytes);
    return list;
}

static json_t *completion_logprobs(const kvf_tokenizer *tokenizer, const kvf_result *r) {
    json_t *tokens = json_array(), *logprobs = json_array(), *tops = r->n_top_logprobs ? json_array() : json_null();
    for (uint32_t i = 0; i < r->n_tokens; i++) {
        json_t *taken = label_of(tokenizer, r->tokens[i]);
        if (r->n_top_logprobs) json_array_append_new(tops, top_json(tokenizer, r, i, taken));
        json_array_append_new(tokens, taken);
        json_array_append_new(logprobs, kvf__json_number(r->logprobs[i]));
    }
    json_t *o = json_object();
    json_object_set_new(o, "tokens", tokens);
    json_object_set_new(o, "token_logprobs", logprobs);
    json_object_set_new(o, "top_logprobs", tops);
    json_object_set_new(o, "text_offset", offsets_json(tokenizer, r));
    return o;
}

/* ---- One sample ------------------------------------------------------------------------------------------------ */

/* Without tokens that a full cache would hold, the request's state was gone before its end: nothing is known. */
static json_t *kv_json(const kvf__answer *a, const kvf_result *r) {
    bool known = r->full_tokens != 0;
    json_t *kv = json_object(), *blocks = known && r->layers ? json_array() : json_null();
    kvf__policy_put(kv, &a->policy);
    json_object_set_new(kv, "held_tokens", count_if(known, r->held_tokens));
    json_object_set_new(kv, "full_tokens", count_if(known, r->full_tokens));
    for (uint32_t l = 0; l < a->n_layers && json_is_array(blocks); l++)
        json_array_append_new(blocks, json_integer(r->layers[l].n_blocks));
    json_object_set_new(kv, "blocks", blocks);
    if (known && r->group_sizes) json_object_set_new(kv, "group_sizes", kvf__group_sizes_json(r, a->n_layers));
    json_object_set_new(kv, "kept", count_if(known, r->kept));
    json_object_set_new(kv, "merged", count_if(known, r->merged));
    json_object_set_new(kv, "dropped", count_if(known, r->dropped));
    if (a->several && !a->undated) { /* they depend on what runs beside it */
        json_object_set_new(kv, "own_blocks", count_if(known, r->own_blocks));
        json_object_set_new(kv, "shared_blocks", count_if(known, r->shared_blocks));
    }
    return kv;
}

/* What a reader of finish_reason length asks next; nothing where it was max_tokens or the context, as the request has it. */
static void put_limit(json_t *choice, const kvf__answer *a, const kvf_result *r) {
    if (r->limit != KVF_LIMIT_MEMORY) return;
    json_object_set_new(choice, "limited_by", json_string("kv_memory"));
    json_object_set_new(choice, "kv_memory_bytes", count(a->kv_bytes));
}

/* How it ended; stop_reason, as in vLLM: the stop string, null for an end token. */
static void set_end(json_t *o, const kvf__answer *a, const kvf_result *r) {
    const char *stop = r->stop_string;
    json_object_set_new(o, "finish_reason", json_string(reasons[r->finish]));
    put_limit(o, a, r);
    json_object_set_new(o, "stop_reason", stop ? kvf__json_text(stop, strlen(stop)) : json_null());
}

static json_t *own_choice(const kvf__answer *a, const kvf_tokenizer *tokenizer, uint32_t index, const kvf_result *r) {
    json_t *o = json_object(), *ids = json_array();
    json_object_set_new(o, "index", json_integer(index));
    json_object_set_new(o, "text", kvf__json_text(r->text, r->text_bytes));
    for (uint32_t i = 0; i < r->n_tokens; i++) json_array_append_new(ids, json_integer(r->tokens[i]));
    json_object_set_new(o, "token_ids", ids);
    if (a->logprobs) json_object_set_new(o, "logprobs", tokens_json(false, tokenizer, r));
    set_end(o, a, r);
    json_object_set_new(o, "completion_tokens", json_integer(r->n_tokens));
    if (a->several) json_object_set_new(o, "score", kvf__json_number(r->score));
    json_object_set_new(o, "kv", kv_json(a, r));
    return o;
}

static json_t *openai_choice(const kvf__answer *a, const kvf_tokenizer *tokenizer, uint32_t index,
                             const kvf_result *r) {
    json_t *o = json_object(), *text = kvf__json_text(r->text, r->text_bytes), *logprobs = json_null();
    json_object_set_new(o, "index", json_integer(index));
    if (a->form == KVF__FORM_CHAT) {
        json_t *message = json_object();
        json_object_set_new(message, "role", json_string("assistant"));
        json_object_set_new(message, "content", text);
        json_object_set_new(message, "refusal", json_null());
        json_object_set_new(o, "message", message);
        if (a->logprobs) {
            logprobs = json_object();
            json_object_set_new(logprobs, "content", tokens_json(true, tokenizer, r));
            json_object_set_new(logprobs, "refusal", json_null());
        }
    } else {
        json_object_set_new(o, "text", text);
        if (a->logprobs) logprobs = completion_logprobs(tokenizer, r);
    }
    json_object_set_new(o, "logprobs", logprobs);
    set_end(o, a, r);
    return o;
}

bool kvf__answer_begin(kvf__answer *a, const kvf__line *line, uint32_t n_layers) {
    *a = (kvf__answer){.line = line->number,
                       .line_hash = line->hash,
                       .openai = line->openai,
                       .logprobs = line->logprobs,
                       .several = line->n_samples > 1 || line->best_of > 1 || line->beam_width,
                       .form = line->form,
                       .id = json_incref(line->id),
                       .model = json_incref((json_t *)line->model),
                       .policy = line->policy,
                       .n_layers = n_layers,
                       .n_samples = line->n_samples,
                       .choices = json_array()};
    for (uint32_t i = 0; i < a->n_samples; i++)
        if (json_array_append_new(a->choices, json_null())) return false;
    return true;
}

void kvf__answer_free(kvf__answer *a) {
    json_decref(a->id);
    json_decref(a->model);
    json_decref(a->choices);
    free(a->error);
    a->id = a->model = a->choices = NULL;
    a->error = NULL;
}

void kvf__answer_add(kvf__answer *a, const kvf_tokenizer *tokenizer, uint32_t index, const kvf_result *r) {
    json_t *choice = a->openai ? openai_choice(a, tokenizer, index, r) : own_choice(a, tokenizer, index, r);
    json_array_set_new(a->choices, index, choice);
    while (json_array_size(a->choices) > r->n_results) json_array_remove(a->choices, json_array_size(a->choices) - 1);
    a->prompt_tokens = r->n_prompt;
    a->completion_tokens += r->n_tokens;
    if (r->n_cached > a->cached_tokens) a->cached_tokens = r->n_cached;
    if (r->finish != KVF_FINISH_ERROR) return;
    char words[KVF__WORDS_BYTES];
    if (!a->error) a->error = strdup(kvf__words(KVF_E_STATE, r->detail, KVF__NAMES_LINE, words));
}

void kvf__answer_differs(const kvf__answer *a, uint32_t index, uint32_t at) {
    json_t *choice = json_array_get(a->choices, index), *own = a->openai ? json_object() : choice;
    json_object_set_new(own, "differs_at", at ? count(at) : json_null());
    if (a->openai) json_object_set_new(choice, "kvfold", own);
}

/* ---- A line's answer: kvfold's form ---------------------------------------------------------------------------- */

static json_t *own_json(const kvf__answer *a) {
    json_t *o = json_object();
    json_object_set(o, "id", a->id);
    if (a->n_samples == 1) { /* the choice's fields stand in the line itself */
        static const char *const before[] = {"text",        "token_ids",  "logprobs",        "finish_reason",
                                             "stop_reason", "limited_by", "kv_memory_bytes", "score"};
        const json_t *choice = json_array_get(a->choices, 0);
        for (size_t i = 0; i < sizeof before / sizeof before[0]; i++)
            if (json_object_get(choice, before[i])) json_object_set(o, before[i], json_object_get(choice, before[i]));
        json_object_set_new(o, "prompt_tokens", count(a->prompt_tokens));
        json_object_set_new(o, "completion_tokens", count(a->completion_tokens));
        if (!a->undated) json_object_set_new(o, "cached_tokens", count(a->cached_tokens));
        json_object_set(o, "kv", json_object_get(choice, "kv"));
        if (json_object_get(choice, "differs_at"))
            json_object_set(o, "differs_at", json_object_get(choice, "differs_at"));
    } else {
        json_object_set(o, "choices", a->choices);
        json_object_set_new(o, "prompt_tokens", count(a->prompt_tokens));
        json_object_set_new(o, "completion_tokens", count(a->completion_tokens));
        if (!a->undated) json_object_set_new(o, "cached_tokens", count(a->cached_tokens));
    }
    if (a->line_hash && !a->error) {
        char text[KVF__DIGEST_BYTES];
        kvf__digest_text(a->line_hash, text);
        json_object_set_new(o, "line_hash", json_string(text));
    }
    if (a->error) {
        json_object_set_new(o, "finish_reason", json_string("error"));
        json_object_set_new(o, "error", kvf__json_text(a->error, strlen(a->error)));
        json_object_set_new(o, "line", count(a->line));
    }
    return o;
}

/* ---- A line's answer: the OpenAI form ---------------------------------------------------------------------------- */

/* Ids out of the line's number: the same in every run, and each once in a file. */
static json_t *made_id(const char *prefix, uint64_t line) {
    char text[64];
    snprintf(text, sizeof text, "%s-kvfold-%llu", prefix, (unsigned long long)line);
    return json_string(text);
}

/* The answer's id ends with the hash of its line. Readers accept any id, and the hash is written together with the
 * answer or not at all, which a separate file could not guarantee. */
static const char answer_prefix[] = "batch_req-kvfold-";

static json_t *answer_id(uint64_t line, uint64_t hash) {
    char text[64], digits[KVF__DIGEST_BYTES];
    if (!hash) return made_id("batch_req", line);
    kvf__digest_text(hash, digits);
    snprintf(text, sizeof text, "%s%llu-%s", answer_prefix, (unsigned long long)line, digits);
    return json_string(text);
}

static json_t *envelope(uint64_t line, uint64_t hash, json_t *id, int status, json_t *body, json_t *error) {
    json_t *response = json_object(), *o = json_object();
    json_object_set_new(response, "status_code", json_integer(status));
    json_object_set_new(response, "request_id", made_id("req", line));
    json_object_set_new(response, "body", body);
    json_object_set_new(o, "id", answer_id(line, hash));
    json_object_set(o, "custom_id", json_is_string(id) ? id : json_null());
    json_object_set_new(o, "response", response);
    json_object_set_new(o, "error", error);
    return o;
}

/* The error is in both places where readers of such files look: in the body that a server would have sent, and in the
 * line's own field. */
static json_t *openai_error(uint64_t line, json_t *id, int status, const char *code, const char *param,
                            const char *text) {
    json_t *body = json_object(), *inner = json_object(), *error = json_object();
    json_object_set_new(inner, "message", kvf__json_text(text, strlen(text)));
    json_object_set_new(inner, "type", json_string(status >= 500 ? "server_error" : "invalid_request_error"));
    json_object_set_new(inner, "param", *param ? kvf__json_text(param, strlen(param)) : json_null());
    json_object_set_new(inner, "code", json_string(code));
    json_object_set_new(body, "error", inner);
    json_object_set_new(error, "code", json_string(code));
    json_object_set_new(error, "message", kvf__json_text(text, strlen(text)));
    json_object_set_new(error, "param", *param ? kvf__json_text(param, strlen(param)) : json_null());
    json_object_set_new(error, "line", count(line));
    return envelope(line, 0, id, status, body, error);
}

static json_t *openai_json(const kvf__answer *a) {
    if (a->error) return openai_error(a->line, a->id, 500, "server_error", "", a->error);
    bool chat = a->form == KVF__FORM_CHAT;
    json_t *body = json_object(), *usage = json_object();
    json_object_set_new(usage, "prompt_tokens", count(a->prompt_tokens));
    json_object_set_new(usage, "completion_tokens", count(a->completion_tokens));
    json_object_set_new(usage, "total_tokens", count(a->prompt_tokens + a->completion_tokens));
    if (!a->undated)
        json_object_set_new(usage, "prompt_tokens_details",
                            json_pack("{s:o}", "cached_tokens", count(a->cached_tokens)));
    json_object_set_new(body, "id", made_id(chat ? "chatcmpl" : "cmpl", a->line));
    json_object_set_new(body, "object", json_string(chat ? "chat.completion" : "text_completion"));
    json_object_set_new(body, "created", json_integer(a->undated ? 0 : (json_int_t)time(NULL)));
    json_object_set(body, "model", a->model);
    json_object_set(body, "choices", a->choices);
    json_object_set_new(body, "usage", usage);
    return envelope(a->line, a->line_hash, a->id, 200, body, json_null());
}

json_t *kvf__answer_json(const kvf__answer *a) { return a->openai ? openai_json(a) : own_json(a); }

json_t *kvf__answer_rejected(const kvf__line *line, const char *text) {
    if (line->openai)
        return openai_error(line->number, line->id, line->status ? line->status : 400,
                            line->code ? line->code : "invalid_value", line->param, text);
    json_t *o = json_pack("{s:O?, s:s, s:[], s:s, s:i, s:i, s:n}", "id", line->id, "text", "", "token_ids",
                          "finish_reason", "error", "prompt_tokens", 0, "completion_tokens", 0, "kv");
    json_object_set_new(o, "error", kvf__json_text(text, strlen(text)));
    json_object_set_new(o, "line", count(line->number));
    return o;
}

const json_t *kvf__answer_read(const json_t *value, bool *well, uint64_t *line_hash) {
    const json_t *id = json_object_get(value, "id"), *response = json_object_get(value, "response");
    *line_hash = 0;
    if (json_object_get(value, "custom_id")) {
        const json_t *error = json_object_get(value, "error");
        const char *text = json_string_value(id);
        size_t n = sizeof answer_prefix - 1;
        if (text && !strncmp(text, answer_prefix, n)) {
            const char *dash = strchr(text + n, '-');
            if (dash) (void)kvf__digest_read(dash + 1, line_hash);
        }
        id = json_object_get(value, "custom_id");
        *well = (!error || json_is_null(error)) && json_integer_value(json_object_get(response, "status_code")) == 200;
        return json_is_string(id) || json_is_null(id) ? id : NULL;
    }
    const json_t *finish = json_object_get(value, "finish_reason");
    (void)kvf__digest_read(json_string_value(json_object_get(value, "line_hash")), line_hash);
    bool ended = json_is_string(finish);
    *well = ended ? !kvf__field_is(finish, "error") : json_is_array(json_object_get(value, "choices"));
    return (json_is_string(id) || json_is_integer(id)) && (ended || *well) ? id : NULL;
}

static uint64_t choice_memory(const json_t *choice) {
    json_int_t bytes = json_integer_value(json_object_get(choice, "kv_memory_bytes"));
    return json_object_get(choice, "limited_by") && bytes > 0 ? (uint64_t)bytes : 0;
}

uint64_t kvf__answer_memory(const json_t *value) {
    const json_t *choices = json_object_get(value, "choices"), *choice;
    uint64_t bytes = choice_memory(value);
    size_t i;
    if (!choices) choices = json_object_get(json_object_get(json_object_get(value, "response"), "body"), "choices");
    json_array_foreach((json_t *)choices, i, choice) if (!bytes) bytes = choice_memory(choice);
    return bytes;
}
