/* The policies to compare, from --policies, and the options that all of them run with. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"

/* What makes memory equal is the command's, not a policy's. */
static const char *const shared_options[] = {"rho",         "budget_tokens", "budget_bytes",     "min_tokens",
                                             "budget_unit", "evict_every",   "budget_may_change"};

static bool is_shared(const char *option) {
    for (size_t i = 0; i < sizeof shared_options / sizeof shared_options[0]; i++)
        if (kvf__name_equal(option, shared_options[i])) return true;
    return false;
}

void kvf__eval_policies_free(kvf__eval_policies *policies) {
    for (uint32_t i = 0; i < policies->n; i++) json_decref(policies->list[i].json);
    free(policies->list);
    *policies = (kvf__eval_policies){.n = 0};
}

/* ---- One policy --------------------------------------------------------------------------------------- */

static bool set_option(kvf__eval_policy *p, const char *spec, const char *option, const char *value) {
    kvf_error err = {.text = ""};
    if (is_shared(option)) {
        kvf__say("--policies %s: %s is the same for all: %s", kvf__shown(spec).text, option,
                 kvf__name_equal(option, "evict_every") ? "give --evict-every" : "--rhos says how much is kept");
        return false;
    }
    kvf_status st = kvf_policy_option_set(&p->options, option, value, &err);
    if (st) kvf__say("--policies %s: %s", kvf__shown(spec).text, err.text[0] ? err.text : kvf_status_text(st));
    return st == KVF_OK;
}

/* ",OPTION=VALUE,OPTION=VALUE": a part without '=' belongs to the value before it ("full_layers=0,1,last"). */
static bool set_options(kvf__eval_policy *p, const char *spec, const char *at) {
    char option[64], value[256];
    while (*at == ',') {
        at++;
        size_t name = strcspn(at, "=,"), length = name + (at[name] == '=');
        if (at[name] != '=' || !name || name >= sizeof option) {
            kvf__say("--policies %s: %s: options are written OPTION=VALUE", kvf__shown(spec).text, kvf__shown(at).text);
            return false;
        }
        for (;;) { /* to the next part that has a '=' */
            length += strcspn(at + length, ",");
            if (!at[length]) break;
            size_t next = strcspn(at + length + 1, ",=");
            if (at[length + 1 + next] == '=') break;
            length++;
        }
        if (length - name - 1 >= sizeof value) {
            kvf__say("--policies %s: %.*s: the value is too long", kvf__shown(spec).text, (int)name, at);
            return false;
        }
        snprintf(option, sizeof option, "%.*s", (int)name, at);
        snprintf(value, sizeof value, "%.*s", (int)(length - name - 1), at + name + 1);
        if (!set_option(p, spec, option, value)) return false;
        at += length;
    }
    return true;
}

/* Options given by themselves hold for every policy, before its own. */
static bool set_common(const kvf__cli *cli, const kvf_model_info *info, kvf__eval_policy *p) {
    char k[24];
    kvf_error err = {.text = ""};
    kvf_status st = KVF_OK;
    snprintf(k, sizeof k, "%u", cli->block_size / 2);
    for (uint32_t i = 0; i < cli->policy_options.n; i++) {
        const char *option = cli->policy_options.names[i], *value = cli->policy_options.values[i];
        if (is_shared(option) && !kvf__name_equal(option, "evict_every")) {
            kvf__say("--%s: has no say here: --rhos says how much is kept, and memory is equal in whole blocks",
                     kvf__dashed(option).text);
            return false;
        }
        if (!st) st = kvf_policy_option_set(&p->options, option, value, &err);
        if (kvf__name_equal(option, "evict_every")) snprintf(k, sizeof k, "%s", value);
    }
    if (!st) st = kvf_policy_option_set(&p->options, "budget_unit", "block", &err);
    if (!st) st = kvf_policy_option_set(&p->options, "evict_every", k, &err);
    if (!st) st = kvf_policy_option_set(&p->options, "min_tokens", "0", &err);
    if (!st) st = kvf_policy_option_set(&p->options, "rho", "0.5", &err);
    if (!st) return true;
    (void)info;
    kvf__say_failed(st, &err);
    return false;
}

/* The options as texts; what differs from cell to cell left out. */
static bool is_of_cell(const char *option) {
    return !strcmp(option, "rho") || !strcmp(option, "budget_tokens") || !strcmp(option, "budget_bytes") ||
           !strcmp(option, "cam_seed");
}

static json_t *options_json(const kvf_policy_options *options) {
    json_t *json = json_object();
    uint32_t n = 0;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    json_object_set_new(json, "policy", json_string(options->ops->name));
    for (uint32_t i = 0; i < n; i++) {
        char value[512];
        if (!is_of_cell(list[i].name) && !kvf_policy_option_get(options, list[i].name, value, sizeof value))
            json_object_set_new(json, list[i].name, json_string(value));
    }
    return json;
}

/* The option that seeds a policy's draws, NULL where it draws nothing: cam alone does, in its mode sample. */
static const char *seed_option(const kvf_policy_options *options) {
    char mode[64];
    bool draws = !strcmp(options->ops->name, "cam") && !kvf_policy_option_get(options, "cam_mode", mode, sizeof mode) &&
                 !strcmp(mode, "sample");
    return draws ? "cam_seed" : NULL;
}

/* The samples of one request have one window of last queries, one way to make a group's squares, and one repetition. */
static bool clash(const kvf_policy_options *a, const kvf_policy_options *b) {
    uint32_t both = kvf_policy_needs(a) & kvf_policy_needs(b);
    return (both & KVF_NEEDS_LAST_ROWS && a->score_window != b->score_window) ||
           (both & KVF_NEEDS_SQUARES && a->gqa != b->gqa) ||
           (both & KVF_NEEDS_REPEAT && (a->repeat_piece != b->repeat_piece || a->score_norm != b->score_norm));
}

static void find_share(kvf__eval_policies *policies, kvf__eval_policy *p) {
    bool fits = false;
    for (p->share = 0; !fits; p->share += !fits) {
        fits = true;
        for (uint32_t i = 0; i < policies->n; i++)
            fits = fits && (policies->list[i].share != p->share || !clash(&policies->list[i].options, &p->options));
    }
    if (p->share >= policies->n_shares) policies->n_shares = p->share + 1;
}

/* What stands behind the label, where there is one. */
static const char *unlabelled(const char *spec) {
    size_t equals = strcspn(spec, "=,");
    return spec[equals] == '=' ? spec + equals + 1 : spec;
}

static bool add(kvf__eval_policy *p, const char *spec, kvf__eval_policies *policies) {
    for (uint32_t i = 0; i < policies->n; i++) {
        bool same_table =
            !p->table == !policies->list[i].table && (!p->table || !strcmp(p->table, policies->list[i].table));
        if (!same_table || strcmp(policies->list[i].label, p->label)) continue;
        kvf__say("--policies %s: %s stands there already; give one of the two another label: LABEL=%s",
                 kvf__shown(spec).text, kvf__shown(p->label).text, unlabelled(spec));
        return false;
    }
    if (policies->n == policies->capacity) {
        uint32_t capacity = policies->capacity ? policies->capacity * 2 : 16;
        kvf__eval_policy *list = realloc(policies->list, capacity * sizeof *list);
        if (!list) {
            kvf__say("--policies: out of memory");
            return false;
        }
        policies->list = list;
        policies->capacity = capacity;
    }
    find_share(policies, p);
    policies->list[policies->n++] = *p;
    return true;
}

bool kvf__eval_policy_add(const kvf__cli *cli, const kvf_model_info *info, const char *spec, const char *table,
                          kvf__eval_policies *policies) {
    kvf__eval_policy p = {.table = table};
    kvf__policy_name name;
    char text[128];
    kvf_error err = {.text = ""};
    size_t head = strcspn(spec, ","), equals = strcspn(spec, "=");
    const char *named = equals < head ? spec + equals + 1 : spec;
    int label = (int)(equals < head ? equals : strlen(spec));
    size_t length = head - (size_t)(named - spec);
    snprintf(text, sizeof text, "%.*s", (int)(length < sizeof text ? length : sizeof text - 1), named);
    if (!label || (size_t)label >= sizeof p.label || !length) {
        kvf__say("--policies %s: must be [LABEL=]POLICY[:PRESET][,OPTION=VALUE]..., a label of at most %zu bytes",
                 kvf__shown(spec).text, sizeof p.label - 1);
        return false;
    }
    snprintf(p.label, sizeof p.label, "%.*s", label, spec);
    if (length >= sizeof text || !kvf__policy_name_read(text, &name)) {
        kvf__say("--policies %s: there is no policy of that name", kvf__shown(spec).text);
        return false;
    }
    kvf__policy_choose_aloud(cli, &name);
    kvf_status st =
        kvf_policy_options_init(&p.options, sizeof p.options, name.policy, name.preset[0] ? name.preset : NULL, &err);
    if (st) {
        kvf__say("--policies %s: %s", kvf__shown(spec).text, err.text[0] ? err.text : kvf_status_text(st));
        return false;
    }
    if (kvf__policy_keeps_all(&p.options)) {
        kvf__say("--policies %s: the full cache is what all are measured against; leave it out", kvf__shown(spec).text);
        return false;
    }
    if (!set_common(cli, info, &p) || !set_options(&p, spec, spec + head)) return false;
    /* The authors' ratios give no whole blocks: what they reserve is rounded up, layer by layer. */
    if (!p.options.redistribute) p.options.budget_unit = KVF_BUDGET_TOKEN;
    if ((st = kvf_policy_options_check(&p.options, info->n_layers, cli->block_size, &err)) != KVF_OK) {
        kvf__say("--policies %s: %s", kvf__shown(spec).text, err.text[0] ? err.text : kvf_status_text(st));
        return false;
    }
    p.seed_option = seed_option(&p.options);
    p.json = options_json(&p.options);
    if (p.json && add(&p, spec, policies)) return true;
    json_decref(p.json);
    return false;
}

/* ---- The list ----------------------------------------------------------------------------------------- */

/* Whether the list has the same options under another name: presets that differ in what is equal here anyway. */
static bool is_twin(const kvf__eval_policies *policies) {
    for (uint32_t i = 0; i + 1 < policies->n; i++)
        if (json_equal(policies->list[i].json, policies->list[policies->n - 1].json)) return true;
    return false;
}

/* Every policy in each of its presets, but those that ask the model itself, which not every engine can: they are measured by name. */
static bool add_all(const kvf__cli *cli, const kvf_model_info *info, kvf__eval_policies *policies) {
    const char *name, *preset;
    for (uint32_t i = 0; (name = kvf_policy_name(i)); i++) {
        kvf_policy_options options;
        if (kvf_policy_options_init(&options, sizeof options, name, NULL, NULL) || kvf__policy_keeps_all(&options))
            continue;
        for (uint32_t k = 0; (preset = kvf_policy_preset(name, k)); k++) {
            char spec[128];
            if (k)
                snprintf(spec, sizeof spec, "%s:%s", name, preset);
            else /* its own default, whether or not there is a probe */
                snprintf(spec, sizeof spec, "%s=%s:%s", name, name, preset);
            if (kvf_policy_options_init(&options, sizeof options, name, preset, NULL) ||
                kvf_policy_needs(&options) & (KVF_NEEDS_REPEAT | KVF_NEEDS_PROBE))
                continue;
            if (!kvf__eval_policy_add(cli, info, spec, NULL, policies)) return false;
            if (k && is_twin(policies)) json_decref(policies->list[--policies->n].json);
        }
    }
    return true;
}

bool kvf__eval_policies_read(const kvf__cli *cli, const kvf_model_info *info, kvf__eval_policies *policies) {
    static const char *const all[] = {"all"};
    const char *const *values = cli->policies.n ? cli->policies.values : all;
    uint32_t n = cli->policies.n ? cli->policies.n : 1;
    for (uint32_t i = 0; i < n; i++) {
        for (const char *p = values[i];; p++) {
            char spec[512];
            size_t length = strcspn(p, ";");
            if (length >= sizeof spec) {
                kvf__say("--policies %s: is too long", kvf__shown(p).text);
                return false;
            }
            snprintf(spec, sizeof spec, "%.*s", (int)length, p);
            if (!strcmp(spec, "all") ? !add_all(cli, info, policies)
                                     : !kvf__eval_policy_add(cli, info, spec, NULL, policies))
                return false;
            p += length;
            if (!*p) break;
        }
    }
    return true;
}
