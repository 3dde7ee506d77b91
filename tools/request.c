/* A line of the input becomes a request: JSON, keys, types, text to tokens, policy options. */
#define _POSIX_C_SOURCE 200809L
#include "tools/request.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_MESSAGES = 4096, MAX_VALUE = 512 };

static const char *const keys[] = {"id",    "prompt", "messages", "token_ids", "max_tokens", "temperature",
                                   "top_k", "top_p",  "seed",     "stop",      "policy",     "preset"};

static kvf_status fail(kvf_error *err, kvf_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static kvf_status fail(kvf_error *err, kvf_status status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(err->text, sizeof err->text, format, list);
    va_end(list);
    return status;
}

static const char *type_name(const json_t *value) {
    static const char *const names[] = {"an object", "a list", "a text", "a whole number",
                                        "a number",  "true",   "false",  "null"};
    return names[json_typeof(value)];
}

static kvf_status wrong_type(kvf_error *err, const char *key, const json_t *value, const char *would_do) {
    return fail(err, KVF_E_INVALID, "%s: is %s, must be %s", key, type_name(value), would_do);
}

/* ---- Numbers ------------------------------------------------------------------------------------------ */

static kvf_status read_count(const json_t *root, const char *key, uint64_t min, uint64_t max, uint64_t *out,
                             kvf_error *err) {
    const json_t *value = json_object_get(root, key);
    if (!value) return KVF_OK;
    if (!json_is_integer(value)) return wrong_type(err, key, value, "a whole number");
    json_int_t n = json_integer_value(value);
    if (n < 0 || (uint64_t)n < min || (uint64_t)n > max)
        return fail(err, KVF_E_INVALID, "%s %lld: must be from %llu to %llu", key, (long long)n,
                    (unsigned long long)min, (unsigned long long)max);
    *out = (uint64_t)n;
    return KVF_OK;
}

static kvf_status read_real(const json_t *root, const char *key, double max, float *out, kvf_error *err) {
    const json_t *value = json_object_get(root, key);
    if (!value) return KVF_OK;
    if (!json_is_number(value)) return wrong_type(err, key, value, "a number");
    double x = json_number_value(value);
    if (!(x >= 0 && x <= max)) return fail(err, KVF_E_INVALID, "%s %g: must be from 0 to %g", key, x, max);
    *out = (float)x;
    return KVF_OK;
}

static kvf_status read_numbers(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    uint64_t max_tokens = rules->cli->max_tokens ? rules->cli->max_tokens : 256;
    uint64_t top_k = rules->cli->top_k, seed = rules->cli->seed + line->number - 1;
    line->sampling.temperature = (float)rules->cli->temperature;
    line->sampling.top_p = (float)rules->cli->top_p;
    kvf_status st;
    if ((st = read_count(line->root, "max_tokens", 1, UINT32_MAX, &max_tokens, err)) ||
        (st = read_count(line->root, "top_k", 0, UINT32_MAX, &top_k, err)) ||
        (st = read_count(line->root, "seed", 0, INT64_MAX, &seed, err)) ||
        (st = read_real(line->root, "temperature", 100, &line->sampling.temperature, err)) ||
        (st = read_real(line->root, "top_p", 1, &line->sampling.top_p, err)))
        return st;
    line->max_tokens = (uint32_t)max_tokens;
    line->sampling.top_k = (uint32_t)top_k;
    line->sampling.seed = seed;
    return KVF_OK;
}

static kvf_status add_stop(kvf__line *line, const json_t *text, kvf_error *err) {
    if (!json_is_string(text)) return wrong_type(err, "stop", text, "a text or a list of texts");
    size_t n = json_string_length(text);
    if (!n) return fail(err, KVF_E_INVALID, "stop: an empty text would end every answer; leave it out");
    if (strlen(json_string_value(text)) != n)
        return fail(err, KVF_E_INVALID, "stop: holds a zero byte, which no text of the model has");
    line->stop[line->n_stop++] = json_string_value(text);
    return KVF_OK;
}

static kvf_status read_stop(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    const json_t *value = json_object_get(line->root, "stop");
    size_t n = !value ? rules->cli->stop.n : json_is_array(value) ? json_array_size(value) : 1;
    if (!n) return KVF_OK;
    if (!(line->stop = calloc(n, sizeof *line->stop))) return fail(err, KVF_E_NO_MEMORY, "stop: out of memory");
    if (!value) {
        memcpy(line->stop, rules->cli->stop.values, n * sizeof *line->stop);
        line->n_stop = (uint32_t)n;
        return KVF_OK;
    }
    if (!json_is_array(value)) return add_stop(line, value, err);
    for (size_t i = 0; i < n; i++) {
        kvf_status st = add_stop(line, json_array_get(value, i), err);
        if (st) return st;
    }
    return KVF_OK;
}

/* ---- Policy ------------------------------------------------------------------------------------------- */

static const kvf_policy_option_info *find_option(const char *key) {
    uint32_t n = 0;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    for (uint32_t i = 0; i < n; i++)
        if (kvf__name_equal(list[i].name, key)) return &list[i];
    return NULL;
}

/* A JSON value as kvf_policy_option_set reads it; false for a type that no option has. */
static bool option_text(const json_t *value, char *text, size_t capacity) {
    int n = -1;
    if (json_is_string(value)) n = snprintf(text, capacity, "%s", json_string_value(value));
    if (json_is_integer(value)) n = snprintf(text, capacity, "%lld", (long long)json_integer_value(value));
    if (json_is_real(value)) n = snprintf(text, capacity, "%.17g", json_real_value(value));
    if (json_is_boolean(value)) n = snprintf(text, capacity, "%d", json_is_true(value));
    if (n >= 0) return (size_t)n < capacity;
    if (!json_is_array(value)) return false;
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (i && used + 1 < capacity) text[used++] = ',';
        if (json_is_array(json_array_get(value, i)) ||
            !option_text(json_array_get(value, i), text + used, capacity - used))
            return false;
        used += strlen(text + used);
    }
    return true;
}

static kvf_status read_name(const json_t *root, const char *key, char *name, size_t capacity, bool *given,
                            kvf_error *err) {
    const json_t *value = json_object_get(root, key);
    if (!value) return KVF_OK;
    if (!json_is_string(value)) return wrong_type(err, key, value, "a text");
    if (json_string_length(value) >= capacity)
        return fail(err, KVF_E_INVALID, "%s %s: there is none of that name", key,
                    kvf__shown(json_string_value(value)).text);
    snprintf(name, capacity, "%s", json_string_value(value));
    *given = true;
    return KVF_OK;
}

static kvf_status set_options(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    const char *key;
    json_t *value;
    json_object_foreach(line->root, key, value) {
        const kvf_policy_option_info *option = find_option(key);
        char text[MAX_VALUE];
        if (!option || (!rules->own && !kvf__policy_is_budget(key))) continue;
        if (!option->per_request)
            return fail(err, KVF_E_INVALID, "%s: holds for a whole run, not for a line; give it as --%s", key,
                        kvf__dashed(option->name).text);
        if (!option_text(value, text, sizeof text)) return wrong_type(err, key, value, option->values);
        kvf_policy_options *target = &line->policy, unused = line->policy;
        if (kvf__policy_keeps_all(target) && kvf__policy_is_budget(key)) target = &unused; /* checked all the same */
        kvf_status st = kvf_policy_option_set(target, key, text, err);
        if (st) return st;
    }
    return KVF_OK;
}

static kvf_status read_policy(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    kvf__policy_name name = rules->policy, asked = {"", ""};
    bool has_policy = false, has_preset = false;
    kvf_status st;
    if ((st = read_name(line->root, "policy", asked.policy, sizeof asked.policy, &has_policy, err)) ||
        (st = read_name(line->root, "preset", asked.preset, sizeof asked.preset, &has_preset, err)))
        return st;
    bool own = rules->own;
    if (own && (has_policy || has_preset)) {
        bool other = has_policy && strcmp(asked.policy, name.policy) != 0;
        if (other) name.preset[0] = '\0';
        if (has_policy) memcpy(name.policy, asked.policy, sizeof name.policy);
        if (has_preset) memcpy(name.preset, asked.preset, sizeof name.preset);
        own = !other && !strcmp(name.preset, rules->policy.preset);
    }
    if ((st = kvf__policy_options(rules->cli, &name, own, &line->policy, err))) return st;
    return set_options(rules, line, err);
}

/* ---- Text to tokens ------------------------------------------------------------------------------------- */

static kvf_status encode(const kvf__line_rules *rules, kvf__line *line, const char *text, size_t n_bytes,
                         uint32_t flags, kvf_error *err) {
    err->text[0] = '\0';
    line->tokens = kvf__encode(rules->tokenizer, text, n_bytes, flags, &line->n_tokens, err);
    return line->tokens ? KVF_OK : KVF_E_INVALID;
}

static kvf_status render(const kvf__line_rules *rules, kvf__line *line, const kvf_message *messages, uint32_t n,
                         kvf_error *err) {
    const char *name = rules->cli->chat_template;
    size_t needed = 0;
    err->text[0] = '\0';
    kvf_status st = kvf_chat_render(rules->tokenizer, name, messages, n, NULL, 0, &needed, err);
    if (st && st != KVF_E_LIMIT) return st;
    size_t capacity = needed + 2;
    line->tokens = capacity > needed && capacity < SIZE_MAX / sizeof *line->tokens
                       ? malloc(capacity * sizeof *line->tokens)
                       : NULL;
    if (!line->tokens) return fail(err, KVF_E_NO_MEMORY, "messages: out of memory");
    return kvf_chat_encode(rules->tokenizer, name, messages, n, line->tokens, capacity, &line->n_tokens, err);
}

static kvf_status read_message(const json_t *json, size_t i, kvf_message *message, kvf_error *err) {
    char name[48];
    snprintf(name, sizeof name, "messages[%zu]", i);
    if (!json_is_object(json)) return wrong_type(err, name, json, "an object with role and content");
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)json, key, value) {
        if (strcmp(key, "role") && strcmp(key, "content"))
            return fail(err, KVF_E_INVALID, "%s: unknown key %s; there are role and content", name,
                        kvf__shown(key).text);
        if (!json_is_string(value))
            return fail(err, KVF_E_INVALID, "%s.%s: is %s, must be a text", name, key, type_name(value));
    }
    const json_t *role = json_object_get(json, "role"), *content = json_object_get(json, "content");
    if (!role || !content) return fail(err, KVF_E_INVALID, "%s: has no %s", name, role ? "content" : "role");
    *message = (kvf_message){json_string_value(role), json_string_value(content), json_string_length(content)};
    if (strlen(message->role) != json_string_length(role))
        return fail(err, KVF_E_INVALID, "%s.role: must be system, user or assistant", name);
    return KVF_OK;
}

static kvf_status read_messages(const kvf__line_rules *rules, kvf__line *line, const json_t *list, kvf_error *err) {
    if (!json_is_array(list)) return wrong_type(err, "messages", list, "a list of objects with role and content");
    size_t n = json_array_size(list);
    if (!n || n > MAX_MESSAGES)
        return fail(err, KVF_E_INVALID, "messages: has %zu, must have from 1 to %d", n, MAX_MESSAGES);
    kvf_message *messages = calloc(n + 1, sizeof *messages);
    if (!messages) return fail(err, KVF_E_NO_MEMORY, "messages: out of memory");
    const char *system = rules->cli->system;
    messages[0] = (kvf_message){"system", system ? system : "", system ? strlen(system) : 0};
    kvf_status st = KVF_OK;
    for (size_t i = 0; i < n && !st; i++) st = read_message(json_array_get(list, i), i, &messages[i + 1], err);
    if (!st) {
        bool prepend = system && strcmp(messages[1].role, "system") != 0;
        st = render(rules, line, messages + !prepend, (uint32_t)n + prepend, err);
    }
    free(messages);
    return st;
}

static kvf_status read_token_ids(const kvf__line_rules *rules, kvf__line *line, const json_t *list, kvf_error *err) {
    if (!json_is_array(list)) return wrong_type(err, "token_ids", list, "a list of whole numbers");
    uint32_t n_vocab = kvf_tokenizer_n_vocab(rules->tokenizer);
    size_t n = json_array_size(list);
    line->tokens = malloc((n ? n : 1) * sizeof *line->tokens);
    if (!line->tokens) return fail(err, KVF_E_NO_MEMORY, "token_ids: out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(list, i);
        if (!json_is_integer(id))
            return fail(err, KVF_E_INVALID, "token_ids[%zu]: is %s, must be a whole number from 0 to %u", i,
                        type_name(id), n_vocab - 1);
        json_int_t value = json_integer_value(id);
        if (value < 0 || value >= (json_int_t)n_vocab)
            return fail(err, KVF_E_INVALID, "token_ids[%zu] %lld: must be from 0 to %u, the vocabulary has %u tokens",
                        i, (long long)value, n_vocab - 1, n_vocab);
        line->tokens[i] = (uint32_t)value;
    }
    line->n_tokens = n;
    return KVF_OK;
}

static kvf_status read_tokens(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    const json_t *prompt = json_object_get(line->root, "prompt"), *messages = json_object_get(line->root, "messages");
    const json_t *ids = json_object_get(line->root, "token_ids");
    int n = (prompt != NULL) + (messages != NULL) + (ids != NULL);
    if (n != 1)
        return fail(err, KVF_E_INVALID, "%s; give one of prompt, messages and token_ids",
                    n ? "more than one text" : "no text");
    const char *what = prompt ? "prompt" : messages ? "messages" : "token_ids";
    kvf_status st;
    if (messages) {
        st = read_messages(rules, line, messages, err);
    } else if (ids) {
        st = read_token_ids(rules, line, ids, err);
    } else if (!json_is_string(prompt)) {
        st = wrong_type(err, "prompt", prompt, "a text");
    } else {
        uint32_t flags = KVF_ENCODE_BOS | (rules->cli->special ? KVF_ENCODE_SPECIAL : 0);
        st = encode(rules, line, json_string_value(prompt), json_string_length(prompt), flags, err);
    }
    if (!st && !line->n_tokens) st = fail(err, KVF_E_INVALID, "%s: has no token; give at least one", what);
    if (!st && line->n_tokens > UINT32_MAX)
        st = fail(err, KVF_E_OVERFLOW, "%s: %zu tokens are too many", what, line->n_tokens);
    return st;
}

/* ---- Lines ---------------------------------------------------------------------------------------------- */

static kvf_status check_keys(const kvf__line *line, kvf_error *err) {
    const char *key;
    json_t *value;
    size_t n_keys = sizeof keys / sizeof keys[0];
    uint32_t n_options = 0;
    const kvf_policy_option_info *options = kvf_policy_option_list(&n_options);
    json_object_foreach(line->root, key, value) {
        uint32_t best = UINT32_MAX;
        const char *nearest = NULL;
        for (size_t i = 0; i < n_keys + n_options; i++) {
            const char *name = i < n_keys ? keys[i] : options[i - n_keys].name;
            uint32_t distance = i < n_keys ? (strcmp(name, key) ? kvf__name_distance(key, name) : 0)
                                           : (kvf__name_equal(name, key) ? 0 : kvf__name_distance(key, name));
            if (distance < best) best = distance, nearest = name;
        }
        if (best)
            return nearest ? fail(err, KVF_E_INVALID, "unknown key %s: did you mean %s?", kvf__shown(key).text, nearest)
                           : fail(err, KVF_E_INVALID, "unknown key %s: kvfold run --help lists the keys",
                                  kvf__shown(key).text);
    }
    return KVF_OK;
}

static kvf_status read_object(const char *text, size_t n_bytes, kvf__line *line, kvf_error *err) {
    size_t valid = kvf__cli_utf8_valid(text, n_bytes);
    if (valid < n_bytes)
        return fail(err, KVF_E_FORMAT, "byte %zu (0x%02x) is not UTF-8; convert the file to UTF-8", valid + 1,
                    (unsigned char)text[valid]);
    json_error_t error;
    line->root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | JSON_DECODE_ANY, &error);
    if (!line->root) return fail(err, KVF_E_FORMAT, "not JSON: %s (column %d)", error.text, error.column);
    if (!json_is_object(line->root))
        return fail(err, KVF_E_FORMAT, "is %s, must be an object: {\"prompt\": \"...\"}", type_name(line->root));
    return KVF_OK;
}

static kvf_status read_id(kvf__line *line, kvf_error *err) {
    json_t *id = json_object_get(line->root, "id");
    if (!id) return KVF_OK;
    if (!json_is_string(id) && !json_is_integer(id)) return wrong_type(err, "id", id, "a text or a whole number");
    json_decref(line->id);
    line->id = json_incref(id);
    return KVF_OK;
}

kvf_status kvf__line_read(const kvf__line_rules *rules, const char *text, size_t n_bytes, uint64_t number,
                          kvf__line *line, kvf_error *err) {
    memset(line, 0, sizeof *line);
    line->number = number;
    if (!(line->id = json_integer((json_int_t)number))) return fail(err, KVF_E_NO_MEMORY, "out of memory");
    kvf_status st;
    if ((st = read_object(text, n_bytes, line, err)) || (st = read_id(line, err)) || (st = check_keys(line, err)) ||
        (st = read_numbers(rules, line, err)) || (st = read_stop(rules, line, err)) ||
        (st = read_policy(rules, line, err)))
        return st;
    return read_tokens(rules, line, err);
}

kvf_status kvf__line_from_prompt(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    const kvf__cli *cli = rules->cli;
    memset(line, 0, sizeof *line);
    line->number = 1;
    line->id = json_integer(1);
    line->root = json_object();
    if (!line->id || !line->root) return fail(err, KVF_E_NO_MEMORY, "out of memory");
    json_t *prompt = json_string(cli->prompt);
    if (!prompt)
        return fail(err, KVF_E_INVALID, "--prompt: byte %zu is not UTF-8",
                    kvf__cli_utf8_valid(cli->prompt, strlen(cli->prompt)) + 1);
    json_object_set_new(line->root, "prompt", prompt);
    kvf_status st;
    if ((st = read_numbers(rules, line, err)) || (st = read_stop(rules, line, err)) ||
        (st = read_policy(rules, line, err)))
        return st;
    if (cli->raw) return read_tokens(rules, line, err);
    kvf_message messages[2] = {{"system", cli->system ? cli->system : "", cli->system ? strlen(cli->system) : 0},
                               {"user", cli->prompt, strlen(cli->prompt)}};
    return render(rules, line, messages + !cli->system, 1 + (cli->system != NULL), err);
}

void kvf__line_free(kvf__line *line) {
    json_decref(line->id);
    json_decref(line->root);
    free(line->tokens);
    free(line->stop);
    line->id = line->root = NULL;
    line->tokens = NULL;
    line->stop = NULL;
}
