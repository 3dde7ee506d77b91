/* A line of the OpenAI batch-file form becomes a request: {"custom_id", "method", "url", "body"}. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/fields.h"
#include "tools/request.h"

/* What becomes of a field of the body. The ones that are not computed are allowed where they ask for nothing. */
typedef enum rule {
    TAKEN,
    IGNORED, /* says nothing about the answer */
    ZERO,    /* must be 0 */
    ONE,     /* must be 1 */
    FALSE_,  /* must be false */
    EMPTY,   /* must be an empty text, list or object */
    NO_TOOL, /* must be "none" or "auto" */
    TEXT,    /* must be {"type": "text"} or ["text"] */
    NEVER    /* must be null */
} rule;

enum { CHAT = 1, COMPLETION = 2, BOTH = 3 };

static const struct field {
    const char *name;
    int endpoints;
    rule rule;
} fields[] = {
    {"model", BOTH, TAKEN},
    {"messages", CHAT, TAKEN},
    {"prompt", COMPLETION, TAKEN},
    {"max_tokens", BOTH, TAKEN},
    {"max_completion_tokens", CHAT, TAKEN},
    {"temperature", BOTH, TAKEN},
    {"top_p", BOTH, TAKEN},
    {"top_k", BOTH, TAKEN},
    {"seed", BOTH, TAKEN},
    {"stop", BOTH, TAKEN},
    {"n", BOTH, TAKEN},
    {"logprobs", BOTH, TAKEN},
    {"top_logprobs", CHAT, TAKEN},
    {"ignore_eos", BOTH, TAKEN},
    {"kvfold", BOTH, TAKEN},
    {"best_of", COMPLETION, TAKEN},
    {"cache_salt", BOTH, TAKEN},
    {"user", BOTH, IGNORED},
    {"metadata", BOTH, IGNORED},
    {"store", BOTH, IGNORED},
    {"service_tier", BOTH, IGNORED},
    {"safety_identifier", BOTH, IGNORED},
    {"prompt_cache_key", BOTH, IGNORED},
    {"prompt_cache_retention", BOTH, IGNORED},
    {"stream_options", BOTH, IGNORED},
    {"parallel_tool_calls", CHAT, IGNORED},
    {"stream", BOTH, FALSE_},
    {"echo", COMPLETION, FALSE_},
    {"frequency_penalty", BOTH, ZERO},
    {"presence_penalty", BOTH, ZERO},
    {"repetition_penalty", BOTH, ONE},
    {"min_p", BOTH, ZERO},
    {"min_tokens", BOTH, ZERO},
    {"logit_bias", BOTH, EMPTY},
    {"tools", CHAT, EMPTY},
    {"functions", CHAT, EMPTY},
    {"tool_choice", CHAT, NO_TOOL},
    {"function_call", CHAT, NO_TOOL},
    {"suffix", COMPLETION, EMPTY},
    {"response_format", BOTH, TEXT},
    {"modalities", CHAT, TEXT},
    {"audio", CHAT, NEVER},
    {"prediction", CHAT, NEVER},
    {"reasoning_effort", CHAT, NEVER},
    {"verbosity", CHAT, NEVER},
    {"web_search_options", CHAT, NEVER},
};

bool kvf__openai_is(const json_t *root) {
    return json_object_get(root, "custom_id") || json_object_get(root, "body") || json_object_get(root, "url") ||
           json_object_get(root, "method");
}

static kvf_status refuse(kvf__line *line, const char *code, kvf_status st) {
    line->code = code;
    return st;
}

/* ---- The line ----------------------------------------------------------------------------------------- */

static kvf_status read_envelope(kvf__line *line, kvf_error *err) {
    static const char *const keys[] = {"custom_id", "method", "url", "body"};
    const char *key;
    json_t *value;
    line->code = "invalid_line";
    json_object_foreach(line->root, key, value) {
        bool known = false;
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) known |= !strcmp(key, keys[i]);
        if (!known)
            return kvf__field_fail(err, KVF_E_INVALID, "%s: unknown field; a line has custom_id, method, url and body",
                                   kvf__shown(key).text);
    }
    kvf__fields_drop_null(line->root);
    const json_t *method = json_object_get(line->root, "method"), *url = json_object_get(line->root, "url");
    if (!method) return kvf__field_fail(err, KVF_E_INVALID, "method: is missing; it must be POST");
    if (!kvf__field_is(method, "POST"))
        return kvf__field_fail(err, KVF_E_INVALID, "method %s: must be POST", kvf__field_shown(method).text);
    line->form = kvf__field_is(url, "/v1/completions") ? KVF__FORM_COMPLETION : KVF__FORM_CHAT;
    if (!kvf__field_is(url, "/v1/completions") && !kvf__field_is(url, "/v1/chat/completions")) {
        static const char would_do[] = "must be /v1/chat/completions or /v1/completions";
        line->code = "invalid_url";
        return url ? kvf__field_fail(err, KVF_E_INVALID, "url %s: %s", kvf__field_shown(url).text, would_do)
                   : kvf__field_fail(err, KVF_E_INVALID, "url: is missing; it %s", would_do);
    }
    const json_t *body = json_object_get(line->root, "body");
    if (!json_is_object(body)) {
        return body ? kvf__field_wrong_type(err, "body", body, "an object")
                    : kvf__field_fail(err, KVF_E_INVALID, "body: is missing");
    }
    line->code = NULL;
    return KVF_OK;
}

/* ---- Fields that are not computed --------------------------------------------------------------------------- */

static bool is_nothing(const json_t *value, rule r) {
    switch (r) {
    case ZERO: return json_is_number(value) && !(fabs(json_number_value(value)) > 0);
    case ONE: return json_is_number(value) && !(fabs(json_number_value(value) - 1) > 0);
    case FALSE_: return json_is_false(value);
    case EMPTY:
        return kvf__field_is(value, "") || (json_is_array(value) && !json_array_size(value)) ||
               (json_is_object(value) && !json_object_size(value));
    case NO_TOOL: return kvf__field_is(value, "none") || kvf__field_is(value, "auto");
    case TEXT:
        return kvf__field_is(json_object_get(value, "type"), "text") ||
               (json_array_size(value) == 1 && kvf__field_is(json_array_get(value, 0), "text"));
    case NEVER: return false;
    default: return true;
    }
}

static kvf_status check_field(kvf__line *line, const char *key, const json_t *value, kvf_error *err) {
    static const char *const would_do[] = {"", "", "0", "1", "false", "nothing", "\"none\"", "text alone", "left out"};
    int endpoint = line->form == KVF__FORM_CHAT ? CHAT : COMPLETION;
    uint32_t best = UINT32_MAX;
    const char *nearest = NULL;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const struct field *f = &fields[i];
        if (!(f->endpoints & endpoint)) continue;
        if (!strcmp(f->name, key)) {
            if (is_nothing(value, f->rule)) return KVF_OK;
            line->code = "unsupported_parameter";
            return kvf__field_fail(err, KVF_E_UNSUPPORTED, "%s: is not supported by kvfold; it must be %s", key,
                                   would_do[f->rule]);
        }
        uint32_t distance = kvf__name_distance(key, f->name);
        if (distance < best) best = distance, nearest = f->name;
    }
    line->code = "unknown_parameter";
    if (nearest)
        return kvf__field_fail(err, KVF_E_INVALID, "%s: unknown field of this endpoint; did you mean %s?",
                               kvf__shown(key).text, nearest);
    return kvf__field_fail(err, KVF_E_INVALID, "%s: unknown field of this endpoint", kvf__shown(key).text);
}

/* A field that is null counts as left out. */
static kvf_status check_fields(kvf__line *line, json_t *body, kvf_error *err) {
    const char *key;
    json_t *value;
    kvf__fields_drop_null(body);
    json_object_foreach(body, key, value) {
        kvf_status st = check_field(line, key, value, err);
        if (st) return st;
    }
    return KVF_OK;
}

/* ---- The model's name ----------------------------------------------------------------------------------------- */

/* The file's name without folder and .gguf. */
static void file_name(const char *path, char *name, size_t capacity) {
    const char *slash = strrchr(path, '/');
    snprintf(name, capacity, "%s", slash ? slash + 1 : path);
    size_t n = strlen(name);
    if (n > 5 && !strcmp(name + n - 5, ".gguf")) name[n - 5] = '\0';
}

static kvf_status check_model(const kvf__line_rules *rules, kvf__line *line, const json_t *body, kvf_error *err) {
    const kvf__cli *cli = rules->cli;
    const json_t *model = json_object_get(body, "model");
    char own[256], asked[256];
    line->code = "missing_required_parameter";
    if (!model) return kvf__field_fail(err, KVF_E_INVALID, "model: is missing");
    line->code = NULL;
    if (!json_is_string(model)) return kvf__field_wrong_type(err, "model", model, "a text");
    line->model = model;
    if (cli->any_model) return KVF_OK;
    file_name(rules->model_path, own, sizeof own);
    file_name(json_string_value(model), asked, sizeof asked); /* "org/name" is taken for "name" */
    bool served = kvf__field_is(model, rules->info->name) || (!kvf__field_has_zero(model) && !strcmp(asked, own));
    for (uint32_t i = 0; i < cli->served_names.n; i++) served |= kvf__field_is(model, cli->served_names.values[i]);
    if (served) return KVF_OK;
    line->status = 404;
    line->code = "model_not_found";
    const char *name = cli->served_names.n ? cli->served_names.values[0] : own;
    return kvf__field_fail(err, KVF_E_NOT_FOUND,
                           "model %s: the model that runs here is %s; name that, or give --served-model-name %s or "
                           "--any-model",
                           kvf__field_shown(model).text, kvf__shown(name).text, kvf__field_shown(model).text);
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

static kvf_status read_logprobs(kvf__line *line, const json_t *body, kvf_error *err) {
    uint64_t n_top = 0;
    kvf_status st;
    if (line->form == KVF__FORM_COMPLETION) {
        st = kvf__field_count(body, "logprobs", 0, KVF_TOP_LOGPROBS_MAX, &n_top, err);
        line->logprobs = json_object_get(body, "logprobs") != NULL;
    } else {
        st = kvf__field_flag(body, "logprobs", &line->logprobs, err);
        if (!st) st = kvf__field_count(body, "top_logprobs", 0, KVF_TOP_LOGPROBS_MAX, &n_top, err);
        if (!st && n_top && !line->logprobs)
            return kvf__field_fail(err, KVF_E_INVALID, "top_logprobs %llu: needs logprobs true",
                                   (unsigned long long)n_top);
    }
    line->n_top = (uint32_t)n_top;
    return st;
}

static kvf_status read_numbers(const kvf__line_rules *rules, kvf__line *line, const json_t *body, kvf_error *err) {
    /* What the form itself says where the body and the command line say nothing. */
    kvf__line_defaults(rules, line, line->form == KVF__FORM_CHAT ? UINT32_MAX : 16, 1);
    kvf_status st = kvf__line_sampling(line, body, 2, err);
    uint64_t max_tokens = line->max_tokens;
    if (st || (st = kvf__field_count(body, "max_completion_tokens", 1, UINT32_MAX, &max_tokens, err)) ||
        (st = read_logprobs(line, body, err)) || (st = kvf__line_ranked(rules, line, body, err)) ||
        (st = kvf__line_queue(line, body, err)))
        return st;
    line->max_tokens = (uint32_t)max_tokens;
    const json_t *seed = json_object_get(body, "seed");
    json_int_t number = 0;
    if (seed && !json_is_number(seed)) return kvf__field_wrong_type(err, "seed", seed, "a whole number");
    if (seed && !kvf__field_whole(seed, &number))
        return kvf__field_fail(err, KVF_E_INVALID, "seed %s: must be a whole number", kvf__field_shown(seed).text);
    if (seed) line->sampling.seed = (uint64_t)number;
    return KVF_OK;
}

static kvf_status read_stop(const kvf__line_rules *rules, kvf__line *line, const json_t *body, kvf_error *err) {
    size_t n = json_array_size(json_object_get(body, "stop"));
    if (n > KVF__MAX_STOP_OPENAI)
        return kvf__field_fail(err, KVF_E_LIMIT, "stop: %zu texts, must be at most %d", n, KVF__MAX_STOP_OPENAI);
    return kvf__line_stop(rules, line, body, err);
}

/* The policy of a line stands in an object of its own, which other engines' files do not have. */
static kvf_status read_policy(const kvf__line_rules *rules, kvf__line *line, const json_t *body, kvf_error *err) {
    json_t *own = json_object_get(body, "kvfold");
    if (own && !json_is_object(own)) return kvf__field_wrong_type(err, "kvfold", own, "an object of policy options");
    uint32_t n_options = 0;
    const kvf_policy_option_info *options = kvf_policy_option_list(&n_options);
    const char *key;
    json_t *value;
    kvf__fields_drop_null(own);
    json_object_foreach(own, key, value) {
        static const char *const others[] = {"policy", "preset", "prefix_end", "prefix_name", "priority", "deadline"};
        bool known = false;
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) known |= !strcmp(key, others[i]);
        for (uint32_t i = 0; i < n_options && !known; i++) known = kvf__name_equal(key, options[i].name);
        if (!known)
            return refuse(line, "unknown_parameter",
                          kvf__field_fail(err, KVF_E_INVALID, "kvfold.%s: there is no policy option of that name",
                                          kvf__shown(key).text));
    }
    kvf_status st = kvf__line_queue(line, own, err);
    return st ? st : kvf__line_policy(rules, line, own, err);
}

/* ---- Messages -------------------------------------------------------------------------------------------------- */

/* A content: a text, or a list of parts that are texts, which are joined; what had to be joined goes into `joined`. */
static kvf_status read_content(kvf__line *line, const char *name, const json_t *content, json_t *joined,
                               kvf_message *message, kvf_error *err) {
    size_t n_bytes = 0, n = json_array_size(content);
    if (json_is_string(content)) {
        message->content = json_string_value(content);
        message->content_bytes = json_string_length(content);
        return KVF_OK;
    }
    if (!json_is_array(content))
        return kvf__field_fail(err, KVF_E_INVALID, "%s.content: is %s, must be a text or a list of texts", name,
                               content ? kvf__field_type(content) : "missing");
    for (size_t i = 0; i < n; i++) {
        const json_t *part = json_array_get(content, i), *type = json_object_get(part, "type");
        const json_t *text = json_object_get(part, "text");
        if (!kvf__field_is(type, "text")) {
            line->code = "unsupported_content";
            return kvf__field_fail(err, KVF_E_UNSUPPORTED, "%s.content[%zu]: is %s; the model reads text alone", name,
                                   i, json_is_string(type) ? kvf__field_shown(type).text : "of no type that is known");
        }
        if (!json_is_string(text))
            return kvf__field_fail(err, KVF_E_INVALID, "%s.content[%zu].text: must be a text", name, i);
        n_bytes += json_string_length(text);
    }
    char *whole = malloc(n_bytes + 1);
    json_t *value = NULL;
    size_t used = 0;
    for (size_t i = 0; i < n && whole; i++) {
        const json_t *text = json_object_get(json_array_get(content, i), "text");
        memcpy(whole + used, json_string_value(text), json_string_length(text));
        used += json_string_length(text);
    }
    if (whole) value = json_stringn(whole, used);
    free(whole);
    if (!value || json_array_append_new(joined, value))
        return kvf__field_fail(err, KVF_E_NO_MEMORY, "messages: out of memory");
    message->content = json_string_value(value);
    message->content_bytes = used;
    return KVF_OK;
}

static kvf_status read_message(kvf__line *line, const json_t *json, size_t i, json_t *joined, kvf_message *message,
                               kvf_error *err) {
    static const char *const empty[] = {"refusal", "audio", "tool_calls", "function_call", "annotations"};
    char name[48];
    const char *key;
    json_t *value;
    snprintf(name, sizeof name, "messages[%zu]", i);
    if (!json_is_object(json)) return kvf__field_wrong_type(err, name, json, "an object with role and content");
    json_object_foreach((json_t *)json, key, value) {
        bool known = !strcmp(key, "role") || !strcmp(key, "content") || !strcmp(key, "name");
        for (size_t k = 0; k < sizeof empty / sizeof empty[0] && !known; k++) {
            if (strcmp(key, empty[k])) continue;
            known = true;
            if (!json_is_null(value) && !is_nothing(value, EMPTY))
                return refuse(line, "unsupported_parameter",
                              kvf__field_fail(err, KVF_E_UNSUPPORTED, "%s.%s: is not supported by kvfold", name, key));
        }
        if (!known)
            return refuse(line, "unknown_parameter",
                          kvf__field_fail(err, KVF_E_INVALID, "%s.%s: unknown field; there are role and content", name,
                                          kvf__shown(key).text));
    }
    const json_t *role = json_object_get(json, "role");
    message->role = kvf__field_is(role, "developer")   ? "system"
                    : kvf__field_is(role, "system")    ? "system"
                    : kvf__field_is(role, "user")      ? "user"
                    : kvf__field_is(role, "assistant") ? "assistant"
                                                       : NULL;
    if (message->role) return read_content(line, name, json_object_get(json, "content"), joined, message, err);
    line->code = kvf__field_is(role, "tool") || kvf__field_is(role, "function") ? "unsupported_parameter" : NULL;
    if (!role) return kvf__field_fail(err, KVF_E_INVALID, "%s.role: is missing", name);
    return kvf__field_fail(err, KVF_E_INVALID, "%s.role %s: must be system, developer, user or assistant", name,
                           kvf__field_shown(role).text);
}

static kvf_status read_messages(const kvf__line_rules *rules, kvf__line *line, const json_t *list, kvf_error *err) {
    kvf_status st = KVF_OK;
    uint32_t n = kvf__line_count_messages(list, err);
    if (!n) return KVF_E_INVALID;
    kvf_message *messages = calloc(n, sizeof *messages);
    json_t *joined = json_array();
    if (!messages || !joined) st = kvf__field_fail(err, KVF_E_NO_MEMORY, "messages: out of memory");
    for (uint32_t i = 0; i < n && !st; i++)
        st = read_message(line, json_array_get(list, i), i, joined, &messages[i], err);
    if (!st) st = kvf__line_dialogue(rules, line, messages, n, err);
    json_decref(joined);
    free(messages);
    return st;
}

/* A text, ids, or a list of one text or one list of ids. */
static kvf_status read_prompt(const kvf__line_rules *rules, kvf__line *line, const json_t *prompt, kvf_error *err) {
    const json_t *first = json_array_get(prompt, 0);
    if (json_is_array(prompt) && (json_is_string(first) || json_is_array(first))) {
        if (json_array_size(prompt) > 1)
            return refuse(line, "unsupported_parameter",
                          kvf__field_fail(err, KVF_E_UNSUPPORTED, "prompt: holds %zu; give each a line of its own",
                                          json_array_size(prompt)));
        prompt = first;
    }
    if (json_is_array(prompt)) return kvf__line_token_ids(rules, line, "prompt", prompt, err);
    return kvf__line_text(rules, line, prompt, err);
}

static kvf_status read_tokens(const kvf__line_rules *rules, kvf__line *line, const json_t *body, kvf_error *err) {
    const char *key = line->form == KVF__FORM_CHAT ? "messages" : "prompt";
    const json_t *value = json_object_get(body, key);
    if (!value)
        return refuse(line, "missing_required_parameter", kvf__field_fail(err, KVF_E_INVALID, "%s: is missing", key));
    return line->form == KVF__FORM_CHAT ? read_messages(rules, line, value, err) : read_prompt(rules, line, value, err);
}

/* The field that a message begins with, where the body has it. */
static void find_param(kvf__line *line, const json_t *body, const char *text) {
    size_t whole = strcspn(text, ": "), n = strcspn(text, ":. [");
    char name[sizeof line->param];
    if (whole >= sizeof name) return;
    memcpy(name, text, n);
    name[n] = '\0';
    if (json_object_get(body, name)) snprintf(line->param, sizeof line->param, "%.*s", (int)whole, text);
}

kvf_status kvf__openai_read(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    kvf_status st = read_envelope(line, err);
    if (st) return st;
    json_t *body = json_object_get(line->root, "body");
    if ((st = check_model(rules, line, body, err)) || (st = check_fields(line, body, err)) ||
        (st = read_numbers(rules, line, body, err)) || (st = read_stop(rules, line, body, err)) ||
        (st = read_policy(rules, line, body, err)) || (st = read_tokens(rules, line, body, err)))
        find_param(line, body, err->text);
    return st;
}
