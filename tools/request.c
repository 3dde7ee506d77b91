/* A line of the input becomes a request: JSON, keys, types, text to tokens, policy options. */
#define _POSIX_C_SOURCE 200809L
#include "tools/request.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "tools/fields.h"

enum { MAX_MESSAGES = 4096, MAX_VALUE = 512 };

static const char *const keys[] = {"id",          "prompt",         "messages",   "token_ids",  "max_tokens",
                                   "temperature", "top_k",          "top_p",      "seed",       "stop",
                                   "policy",      "preset",         "n",          "logprobs",   "best_of",
                                   "beam_width",  "length_penalty", "prefix_end", "cache_salt", "prefix_name",
                                   "ignore_eos",  "priority",       "deadline"};

/* ---- Numbers and stop strings ---------------------------------------------------------------------------- */

void kvf__line_defaults(const kvf__line_rules *rules, kvf__line *line, uint32_t max_tokens, double temperature) {
    const kvf__cli *cli = rules->cli;
    line->max_tokens = cli->max_tokens ? cli->max_tokens : max_tokens;
    line->n_samples = cli->n ? cli->n : 1;
    line->sampling.temperature = (float)(cli->temperature < 0 ? temperature : cli->temperature);
    line->sampling.top_p = (float)cli->top_p;
    line->sampling.top_k = cli->top_k;
    line->sampling.seed = cli->seed + line->number - 1;
}

bool kvf__samples_check(const kvf__cli *cli) {
    uint32_t n = cli->n ? cli->n : 1;
    if (cli->beam_width && cli->best_of > n)
        kvf__say("--best-of %u: beam search has none; leave out --best-of or --beam-width", cli->best_of);
    else if (cli->best_of && cli->best_of < n)
        kvf__say("--best-of %u: must be at least --n, %u", cli->best_of, n);
    else
        return true;
    return false;
}

kvf_status kvf__line_ranked(const kvf__line_rules *rules, kvf__line *line, const json_t *object, kvf_error *err) {
    const kvf__cli *cli = rules->cli;
    uint64_t best_of = 0, beam_width = cli->beam_width;
    kvf_status st;
    line->length_penalty = cli->length_penalty;
    if ((st = kvf__field_count(object, "best_of", 1, KVF__MAX_SAMPLES, &best_of, err)) ||
        (st = kvf__field_count(object, "beam_width", 1, KVF__MAX_SAMPLES, &beam_width, err)) ||
        (st = kvf__field_real(object, "length_penalty", -100, 100, &line->length_penalty, err)))
        return st;
    if (beam_width && best_of > line->n_samples)
        return kvf__field_fail(err, KVF_E_INVALID, "best_of %llu: beam search has none; leave out one of the two",
                               (unsigned long long)best_of);
    if (best_of && best_of < line->n_samples)
        return kvf__field_fail(err, KVF_E_INVALID, "best_of %llu: must be at least n, %u", (unsigned long long)best_of,
                               line->n_samples);
    if (beam_width && beam_width < line->n_samples)
        return kvf__field_fail(err, KVF_E_INVALID, "beam_width %llu: must be at least n, %u",
                               (unsigned long long)beam_width, line->n_samples);
    if (!best_of && !beam_width && cli->best_of > line->n_samples) best_of = cli->best_of;
    line->best_of = (uint32_t)best_of;
    line->beam_width = (uint32_t)beam_width;
    const json_t *temperature = json_object_get(object, "temperature");
    if (beam_width && cli->temperature < 0 && !temperature) line->sampling.temperature = 0;
    if (beam_width && line->sampling.temperature > 0)
        return kvf__field_fail(err, KVF_E_INVALID, "temperature %s: beam search draws nothing; it must be 0",
                               temperature ? kvf__field_shown(temperature).text
                                           : kvf__show_number(cli->temperature).text);
    return KVF_OK;
}

enum { PREFIX_NAME_MAX = 64 };

/* A file's name, nowhere but in its directory. */
static kvf_status read_prefix_name(kvf__line *line, const json_t *name, kvf_error *err) {
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    if (!json_is_string(name)) return kvf__field_wrong_type(err, "prefix_name", name, "a text");
    const char *text = json_string_value(name);
    size_t n = json_string_length(name);
    if (!n || n > PREFIX_NAME_MAX || text[0] == '.' || strspn(text, letters) != n)
        return kvf__field_fail(err, KVF_E_INVALID,
                               "prefix_name %s: must be 1 to %d letters, digits, - _ and . (not first)",
                               kvf__field_shown(name).text, PREFIX_NAME_MAX);
    line->prefix_name = text;
    return KVF_OK;
}

static kvf_status read_order(kvf__line *line, const json_t *object, kvf_error *err) {
    const json_t *priority = json_object_get(object, "priority");
    json_int_t n = 0;
    if (priority && !json_is_number(priority))
        return kvf__field_wrong_type(err, "priority", priority, "a whole number");
    if (priority && (!kvf__field_whole(priority, &n) || n < -1000 || n > 1000))
        return kvf__field_fail(err, KVF_E_INVALID, "priority %s: must be a whole number from -1000 to 1000",
                               kvf__field_shown(priority).text);
    line->priority = (int32_t)n;
    return kvf__field_real(object, "deadline", 0, 1e9, &line->deadline_s, err);
}

kvf_status kvf__line_queue(kvf__line *line, const json_t *object, kvf_error *err) {
    const json_t *salt = json_object_get(object, "cache_salt");
    uint64_t end = line->prefix_end;
    kvf_status st = kvf__field_count(object, "prefix_end", 0, UINT32_MAX, &end, err);
    if (!st) st = read_order(line, object, err);
    if (st) return st;
    line->prefix_end = (uint32_t)end;
    const json_t *name = json_object_get(object, "prefix_name");
    if (name && (st = read_prefix_name(line, name, err))) return st;
    if (!salt) return KVF_OK;
    if (!json_is_string(salt)) return kvf__field_wrong_type(err, "cache_salt", salt, "a text");
    if (json_string_length(salt) > KVF_PREFIX_SALT_MAX)
        return kvf__field_fail(err, KVF_E_INVALID, "cache_salt: has %zu bytes, must have at most %u; give a hash of it",
                               json_string_length(salt), KVF_PREFIX_SALT_MAX);
    line->cache_salt = json_string_value(salt);
    line->salt_bytes = (uint32_t)json_string_length(salt);
    return KVF_OK;
}

/* false: none; true or 0: of the tokens taken; n: and of n likeliest at each step. */
static kvf_status read_logprobs(kvf__line *line, kvf_error *err) {
    const json_t *value = json_object_get(line->root, "logprobs");
    uint64_t n_top = 0;
    line->logprobs = value && !json_is_false(value);
    if (!value || json_is_boolean(value)) return KVF_OK;
    if (!json_is_number(value)) return kvf__field_wrong_type(err, "logprobs", value, "true, false or a whole number");
    kvf_status st = kvf__field_count(line->root, "logprobs", 0, KVF_TOP_LOGPROBS_MAX, &n_top, err);
    line->n_top = (uint32_t)n_top;
    return st;
}

kvf_status kvf__line_sampling(kvf__line *line, const json_t *object, double hottest, kvf_error *err) {
    uint64_t max_tokens = line->max_tokens, top_k = line->sampling.top_k, n = line->n_samples;
    double temperature = (double)line->sampling.temperature, top_p = (double)line->sampling.top_p;
    kvf_status st;
    if ((st = kvf__field_count(object, "max_tokens", 1, UINT32_MAX, &max_tokens, err)) ||
        (st = kvf__field_count(object, "top_k", 0, UINT32_MAX, &top_k, err)) ||
        (st = kvf__field_count(object, "n", 1, KVF__MAX_SAMPLES, &n, err)) ||
        (st = kvf__field_real(object, "temperature", 0, hottest, &temperature, err)) ||
        (st = kvf__field_real(object, "top_p", 0, 1, &top_p, err)) ||
        (st = kvf__field_flag(object, "ignore_eos", &line->ignore_end, err)))
        return st;
    line->max_tokens = (uint32_t)max_tokens;
    line->n_samples = (uint32_t)n;
    line->sampling.top_k = (uint32_t)top_k;
    line->sampling.temperature = (float)temperature;
    line->sampling.top_p = (float)top_p;
    return KVF_OK;
}

static kvf_status read_numbers(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    kvf__line_defaults(rules, line, 256, 0);
    uint64_t seed = line->sampling.seed;
    kvf_status st;
    if ((st = kvf__line_sampling(line, line->root, 100, err)) ||
        (st = kvf__field_count(line->root, "seed", 0, INT64_MAX, &seed, err)))
        return st;
    line->sampling.seed = seed;
    kvf_status ranked = kvf__line_ranked(rules, line, line->root, err);
    if (!ranked) ranked = kvf__line_queue(line, line->root, err);
    return ranked ? ranked : read_logprobs(line, err);
}

kvf_status kvf__line_stop(const kvf__line_rules *rules, kvf__line *line, const json_t *object, kvf_error *err) {
    uint32_t n = rules->cli->stop.n;
    if (json_object_get(object, "stop")) return kvf__field_stop(object, &line->stop, &line->n_stop, err);
    if (!n) return KVF_OK;
    if (!(line->stop = calloc(n, sizeof *line->stop)))
        return kvf__field_fail(err, KVF_E_NO_MEMORY, "stop: out of memory");
    memcpy(line->stop, rules->cli->stop.values, n * sizeof *line->stop);
    line->n_stop = n;
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

/* A JSON value as kvf_policy_option_set reads it; false for a type that the option has not. flag: true and false are 1
 * and 0. */
static bool option_text(const json_t *value, bool flag, char *text, size_t capacity) {
    int n = -1;
    if (json_is_string(value) && !kvf__field_has_zero(value))
        n = snprintf(text, capacity, "%s", json_string_value(value));
    if (json_is_number(value)) n = snprintf(text, capacity, "%s", kvf__field_shown(value).text);
    if (json_is_boolean(value) && flag) n = snprintf(text, capacity, "%d", json_is_true(value));
    if (n >= 0) return (size_t)n < capacity;
    if (!json_is_array(value)) return false;
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (i && used + 1 < capacity) text[used++] = ',';
        if (json_is_array(json_array_get(value, i)) ||
            !option_text(json_array_get(value, i), false, text + used, capacity - used))
            return false;
        used += strlen(text + used);
    }
    return true;
}

static kvf_status read_name(const json_t *root, const char *key, char *name, size_t capacity, bool *given,
                            kvf_error *err) {
    const json_t *value = json_object_get(root, key);
    if (!value) return KVF_OK;
    if (!json_is_string(value)) return kvf__field_wrong_type(err, key, value, "a text");
    if (json_string_length(value) >= capacity || kvf__field_has_zero(value))
        return kvf__field_fail(err, KVF_E_INVALID, "%s %s: there is none of that name", key,
                               kvf__field_shown(value).text);
    snprintf(name, capacity, "%s", json_string_value(value));
    *given = true;
    return KVF_OK;
}

static kvf_status set_options(const kvf__line_rules *rules, kvf__line *line, const json_t *object, kvf_error *err) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value) {
        const kvf_policy_option_info *option = find_option(key);
        char text[MAX_VALUE];
        if (!option || (!rules->own && !kvf__policy_is_budget(key))) continue;
        if (!option->per_request)
            return kvf__field_fail(err, KVF_E_INVALID, "%s: holds for a whole run, not for a line; give it as --%s",
                                   key, kvf__dashed(option->name).text);
        bool flag = !strcmp(option->values, "0|1");
        if (kvf__field_has_zero(value))
            return kvf__field_fail(err, KVF_E_INVALID, "%s %s: must be %s", key, kvf__field_shown(value).text,
                                   option->values);
        if (!option_text(value, flag, text, sizeof text))
            return json_array_size(value)
                       ? kvf__field_fail(err, KVF_E_INVALID,
                                         "%s: the list holds what is neither a number nor a text, must be %s", key,
                                         option->values)
                       : kvf__field_wrong_type(err, key, value, option->values);
        kvf_policy_options *target = &line->policy, unused = line->policy;
        if (kvf__policy_keeps_all(target) && kvf__policy_is_budget(key)) target = &unused; /* checked all the same */
        kvf_status st = kvf_policy_option_set(target, key, text, err);
        if (st) return st;
    }
    return KVF_OK;
}

static bool has_option(const json_t *object) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value) if (!json_is_null(value) && find_option(key)) return true;
    return false;
}

kvf_status kvf__line_policy(const kvf__line_rules *rules, kvf__line *line, const json_t *object, kvf_error *err) {
    kvf__policy_name name = rules->policy, asked = {"", ""};
    bool has_policy = false, has_preset = false;
    kvf_status st;
    if ((st = read_name(object, "policy", asked.policy, sizeof asked.policy, &has_policy, err)) ||
        (st = read_name(object, "preset", asked.preset, sizeof asked.preset, &has_preset, err)))
        return st;
    bool own = rules->own;
    if (own && !has_policy && !rules->cli->policy && !strcmp(name.policy, "full") &&
        (has_preset || has_option(object))) {
        snprintf(asked.policy, sizeof asked.policy, "d2o"); /* as on the command line: kvf__policy_asked */
        has_policy = true;
    }
    if (own && (has_policy || has_preset)) {
        bool other = has_policy && strcmp(asked.policy, name.policy) != 0;
        if (other) name.preset[0] = '\0';
        if (has_policy) memcpy(name.policy, asked.policy, sizeof name.policy);
        if (has_preset) memcpy(name.preset, asked.preset, sizeof name.preset);
        own = !other && !strcmp(name.preset, rules->policy.preset);
    }
    if (rules->cli->provides) (void)kvf__policy_choose(rules->cli, &name);
    if ((st = kvf__policy_options(rules->cli, &name, own, &line->policy, err))) return st;
    return set_options(rules, line, object, err);
}

/* ---- Text to tokens ------------------------------------------------------------------------------------- */

/* A prompt that cannot fit is refused by its bytes: encoding it takes many times their memory. */
static kvf_status check_bytes(const kvf__line_rules *rules, kvf__line *line, const char *what, size_t n_bytes,
                              size_t min_ids, kvf_error *err) {
    uint32_t context = kvf__line_context(rules->cli, rules->info);
    if (min_ids < context) return KVF_OK;
    line->code = "context_length_exceeded";
    return kvf__field_fail(err, KVF_E_NEVER_FITS,
                           "%s of %zu bytes: has at least %zu tokens; the context is %u tokens and must hold one more; "
                           "shorten it",
                           what, n_bytes, min_ids, context);
}

static kvf_status check_tokens(const kvf__line *line, const char *what, kvf_error *err) {
    if (!line->n_tokens) return kvf__field_fail(err, KVF_E_INVALID, "%s: has no token; give at least one", what);
    if (line->n_tokens <= UINT32_MAX) return KVF_OK;
    return kvf__field_fail(err, KVF_E_OVERFLOW, "%s: %zu tokens are too many", what, line->n_tokens);
}

kvf_status kvf__line_text(const kvf__line_rules *rules, kvf__line *line, const json_t *text, kvf_error *err) {
    if (!json_is_string(text)) return kvf__field_wrong_type(err, "prompt", text, "a text");
    uint32_t flags = KVF_ENCODE_BOS | (rules->cli->special ? KVF_ENCODE_SPECIAL : 0);
    const char *bytes = json_string_value(text);
    size_t n = json_string_length(text);
    kvf_status st = check_bytes(rules, line, "prompt", n, kvf_tokenizer_min_ids(rules->tokenizer, bytes, n), err);
    if (st) return st;
    err->text[0] = '\0';
    line->tokens = kvf__encode(rules->tokenizer, bytes, n, flags, &line->n_tokens, err);
    return line->tokens ? check_tokens(line, "prompt", err) : KVF_E_INVALID;
}

kvf_status kvf__line_token_ids(const kvf__line_rules *rules, kvf__line *line, const char *key, const json_t *list,
                               kvf_error *err) {
    uint32_t n_vocab = kvf_tokenizer_n_vocab(rules->tokenizer);
    kvf_status st = kvf__field_tokens(list, key, n_vocab, &line->tokens, &line->n_tokens, err);
    return st ? st : check_tokens(line, key, err);
}

static kvf_status render(const kvf__line_rules *rules, kvf__line *line, const kvf_message *messages, uint32_t n,
                         kvf_error *err) {
    const char *name = rules->cli->chat_template;
    size_t needed = 0, n_bytes = 0, min_ids = 0;
    for (uint32_t i = 0; i < n; i++) { /* templates leave out blanks at the ends of a content */
        size_t at = 0, left = messages[i].content_bytes;
        while (left && isspace((unsigned char)messages[i].content[at])) at++, left--;
        while (left && isspace((unsigned char)messages[i].content[at + left - 1])) left--;
        size_t ids = kvf_tokenizer_min_ids(rules->tokenizer, messages[i].content + at, left);
        min_ids += ids ? ids - 1 : 0; /* a token may reach into the next message */
        n_bytes += messages[i].content_bytes;
    }
    kvf_status st = check_bytes(rules, line, "messages", n_bytes, min_ids, err);
    if (st) return st;
    err->text[0] = '\0';
    st = kvf_chat_render(rules->tokenizer, name, messages, n, NULL, 0, &needed, err);
    if (st && st != KVF_E_LIMIT) return st;
    size_t most = kvf_tokenizer_max_ids(rules->tokenizer, needed);
    if (most > SIZE_MAX / sizeof *line->tokens || !(line->tokens = malloc(most ? most * sizeof *line->tokens : 1)))
        return kvf__field_fail(err, KVF_E_NO_MEMORY, "messages: out of memory");
    err->text[0] = '\0';
    st = kvf_chat_encode(rules->tokenizer, name, messages, n, line->tokens, most, &line->n_tokens, err);
    return st ? st : check_tokens(line, "messages", err);
}

kvf_status kvf__line_dialogue(const kvf__line_rules *rules, kvf__line *line, const kvf_message *messages, uint32_t n,
                              kvf_error *err) {
    const char *system = rules->cli->system;
    if (!system || !strcmp(messages[0].role, "system")) return render(rules, line, messages, n, err);
    kvf_message *more = malloc(((size_t)n + 1) * sizeof *more);
    if (!more) return kvf__field_fail(err, KVF_E_NO_MEMORY, "messages: out of memory");
    more[0] = (kvf_message){"system", system, strlen(system)};
    memcpy(more + 1, messages, n * sizeof *more);
    kvf_status st = render(rules, line, more, n + 1, err);
    free(more);
    return st;
}

uint32_t kvf__line_count_messages(const json_t *list, kvf_error *err) {
    size_t n = json_array_size(list);
    if (!json_is_array(list))
        (void)kvf__field_wrong_type(err, "messages", list, "a list of objects with role and content");
    else if (!n || n > MAX_MESSAGES)
        (void)kvf__field_fail(err, KVF_E_INVALID, "messages: has %zu, must have from 1 to %d", n, MAX_MESSAGES);
    return n > MAX_MESSAGES ? 0 : (uint32_t)n;
}

static kvf_status read_message(json_t *json, size_t i, kvf_message *message, kvf_error *err) {
    char name[48];
    snprintf(name, sizeof name, "messages[%zu]", i);
    if (!json_is_object(json)) return kvf__field_wrong_type(err, name, json, "an object with role and content");
    const char *key;
    json_t *value;
    kvf__fields_drop_null(json);
    json_object_foreach(json, key, value) {
        if (strcmp(key, "role") && strcmp(key, "content"))
            return kvf__field_fail(err, KVF_E_INVALID, "%s: unknown key %s; there are role and content", name,
                                   kvf__shown(key).text);
        if (!json_is_string(value))
            return kvf__field_fail(err, KVF_E_INVALID, "%s.%s: is %s, must be a text", name, key,
                                   kvf__field_type(value));
    }
    const json_t *role = json_object_get(json, "role"), *content = json_object_get(json, "content");
    if (!role || !content) return kvf__field_fail(err, KVF_E_INVALID, "%s: has no %s", name, role ? "content" : "role");
    *message = (kvf_message){json_string_value(role), json_string_value(content), json_string_length(content)};
    if (!kvf__field_has_zero(role)) return KVF_OK;
    return kvf__field_fail(err, KVF_E_INVALID, "%s.role %s: must be system, user or assistant", name,
                           kvf__field_shown(role).text);
}

static kvf_status read_messages(const kvf__line_rules *rules, kvf__line *line, const json_t *list, kvf_error *err) {
    kvf_status st = KVF_OK;
    uint32_t n = kvf__line_count_messages(list, err);
    if (!n) return KVF_E_INVALID;
    kvf_message *messages = calloc(n, sizeof *messages);
    if (!messages) return kvf__field_fail(err, KVF_E_NO_MEMORY, "messages: out of memory");
    for (uint32_t i = 0; i < n && !st; i++) st = read_message(json_array_get(list, i), i, &messages[i], err);
    if (!st) st = kvf__line_dialogue(rules, line, messages, n, err);
    free(messages);
    return st;
}

static kvf_status read_tokens(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    const json_t *prompt = json_object_get(line->root, "prompt"), *messages = json_object_get(line->root, "messages");
    const json_t *ids = json_object_get(line->root, "token_ids");
    int n = (prompt != NULL) + (messages != NULL) + (ids != NULL);
    if (n != 1)
        return kvf__field_fail(err, KVF_E_INVALID, "%s; give one of prompt, messages and token_ids",
                               n ? "more than one text" : "no text");
    if (messages) return read_messages(rules, line, messages, err);
    if (ids) return kvf__line_token_ids(rules, line, "token_ids", ids, err);
    return kvf__line_text(rules, line, prompt, err);
}

/* ---- Lines ---------------------------------------------------------------------------------------------- */

static kvf_status check_keys(kvf__line *line, kvf_error *err) {
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
            return nearest ? kvf__field_fail(err, KVF_E_INVALID, "unknown key %s: did you mean %s?",
                                             kvf__shown(key).text, nearest)
                           : kvf__field_fail(err, KVF_E_INVALID, "unknown key %s: kvfold run --help-all lists the keys",
                                             kvf__shown(key).text);
    }
    kvf__fields_drop_null(line->root);
    return KVF_OK;
}

static kvf_status read_own(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    kvf_status st;
    if ((st = check_keys(line, err)) || (st = read_numbers(rules, line, err)) ||
        (st = kvf__line_stop(rules, line, line->root, err)) || (st = kvf__line_policy(rules, line, line->root, err)))
        return st;
    return read_tokens(rules, line, err);
}

kvf_status kvf__line_read(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    kvf_status st = line->openai ? kvf__openai_read(rules, line, err) : read_own(rules, line, err);
    if (st) kvf__field_spell(line->text, line->n_bytes, err);
    return st;
}

kvf_status kvf__line_from_prompt(const kvf__line_rules *rules, kvf__line *line, kvf_error *err) {
    const kvf__cli *cli = rules->cli;
    memset(line, 0, sizeof *line);
    line->number = 1;
    line->id = json_integer(1);
    line->root = json_object();
    if (!line->id || !line->root) return kvf__field_fail(err, KVF_E_NO_MEMORY, "out of memory");
    json_t *prompt = json_string(cli->prompt);
    if (!prompt)
        return kvf__field_fail(err, KVF_E_INVALID, "byte %zu (0x%02x) is not UTF-8",
                               kvf__utf8_valid(cli->prompt, strlen(cli->prompt)) + 1,
                               (unsigned char)cli->prompt[kvf__utf8_valid(cli->prompt, strlen(cli->prompt))]);
    json_object_set_new(line->root, "prompt", prompt);
    kvf_status st;
    if ((st = read_numbers(rules, line, err)) || (st = kvf__line_stop(rules, line, line->root, err)) ||
        (st = kvf__line_policy(rules, line, line->root, err)))
        return st;
    if (cli->raw) return read_tokens(rules, line, err);
    return kvf__line_dialogue(rules, line, &(kvf_message){"user", cli->prompt, strlen(cli->prompt)}, 1, err);
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
