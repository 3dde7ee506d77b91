/* The built-in policies and their presets. */
#include <math.h>
#include <stdio.h>

#include "d2o_policy/policy.h"

/* In the order of kvf_policy_name. Each is a file of its own, which has its vtable and its default preset. */
#define POLICIES(X) \
    X(full)         \
    X(d2o)          \
    X(fold)         \
    X(h2o)          \
    X(streaming)    \
    X(uniform) X(evict) X(reciprocal) X(exp_decay) X(roco) X(snapkv) X(pyramidkv) X(cam) X(sirllm) X(kvzip) X(kvzap)

static const struct {
    const kvf_policy_ops *ops;
    const char *preset;
    void (*fill)(kvf_policy_options *o); /* what differs from d2o's paper preset */
} presets[] = {
#define PRESET(name) {&kvf__policy_##name, "default", kvf__preset_##name},
    POLICIES(PRESET)
#undef PRESET
        {&kvf__policy_d2o, "paper", kvf__preset_d2o},
    {&kvf__policy_d2o, "serving", kvf__preset_d2o_serving},
    {&kvf__policy_d2o, "authors", kvf__preset_d2o_authors},
    {&kvf__policy_cam, "h2o", kvf__preset_cam_h2o},
    {&kvf__policy_fold, "probe", kvf__preset_fold_probe}, /* the best first: kvf_policy_preset_for */
    {&kvf__policy_fold, "light", kvf__preset_fold_light},
    {&kvf__policy_fold, "repeat", kvf__preset_fold_repeat},
    {&kvf__policy_fold, "attention", kvf__preset_fold},
};
enum { N_PRESETS = sizeof presets / sizeof *presets };

static const kvf_policy_ops *const policies[] = {
#define OPS(name) &kvf__policy_##name,
    POLICIES(OPS)
#undef OPS
};
enum { N_POLICIES = sizeof policies / sizeof *policies };

static kvf_policy_options defaults(void) {
    return (kvf_policy_options){
        .struct_size = sizeof(kvf_policy_options),
        .ops = &kvf__policy_d2o,
        .rho = 0.2,
        .min_tokens = 64,
        .metric = KVF_METRIC_HEAD_MINMAX,
        .layer_sign = 1,
        .layer_strength = 1.0,
        .redistribute = 1,
        .budget_unit = KVF_BUDGET_TOKEN,
        .n_parts = 3,
        .m_parts = 1,
        .sinks = 4,
        .score = KVF_SCORE_ACCUMULATE,
        .gqa = KVF_GQA_SUM,
        .merge = KVF_MERGE_PAPER,
        .merge_keys = 1,
        .scope = KVF_SCOPE_HEAD,
        .beta_new = 0.7,
        .beta_old = 0.3,
        .gate = NAN,
        .evict_every = 1,
        .metric_share = 0.9,
        .score_window = 64,
        .score_pool = 1,
        .score_decay = 1.0,
        .cam_tokens = 32,
        .head_floor = 0.2, /* arXiv 2407.11550 */
        .threshold = NAN,
    };
}

kvf_status kvf_policy_options_read(kvf_policy_options *out, size_t struct_size, const kvf_policy_options *in,
                                   kvf_error *err) {
    kvf_policy_options read;
    if (!out || struct_size < sizeof struct_size)
        return kvf__fail(err, KVF_E_INVALID, "kvf_policy_options_read: out must be given, with its size");
    kvf_status st = kvf__config_read(&read, sizeof read, in, "kvf_policy_options", err);
    if (st) return st;
    kvf_policy_options all = defaults(); /* a field that the caller's version did not know keeps its default */
    memcpy((void *)&all, &read, KVF__MIN(in->struct_size, sizeof all));
    kvf__init(out, struct_size, &all, sizeof all);
    return KVF_OK;
}

const kvf_policy_options *kvf__options_of(const kvf_policy_options *given, kvf_policy_options *copy) {
    if (given && given->struct_size == sizeof *given) return given->ops ? given : NULL;
    return kvf_policy_options_read(copy, sizeof *copy, given, NULL) || !copy->ops ? NULL : copy;
}

const char *kvf_policy_name(uint32_t i) { return i < N_POLICIES ? policies[i]->name : NULL; }

const char *kvf_policy_preset(const char *policy, uint32_t i) {
    const kvf_policy_ops *ops = kvf_policy_find(policy);
    for (size_t p = 0; ops && p < N_PRESETS; p++)
        if (presets[p].ops == ops && i-- == 0) return presets[p].preset;
    return NULL;
}

const char *kvf_policy_preset_for(const char *policy, uint32_t provided) {
    const uint32_t by_model = KVF_NEEDS_PROBE | KVF_NEEDS_REPEAT;
    const kvf_policy_ops *ops = kvf_policy_find(policy);
    for (size_t p = 0; ops && p < N_PRESETS; p++) {
        kvf_policy_options o = defaults();
        o.ops = ops;
        presets[p].fill(&o);
        uint32_t needs = presets[p].ops == ops ? kvf_policy_needs(&o) & by_model : 0;
        if (needs && !(needs & ~provided)) return presets[p].preset;
    }
    return kvf_policy_preset(policy, 0);
}

const kvf_policy_ops *kvf_policy_find(const char *name) {
    for (size_t i = 0; name && i < N_POLICIES; i++)
        if (strcmp(policies[i]->name, name) == 0) return policies[i];
    return NULL;
}

static kvf_status unknown_policy(const char *policy, kvf_error *err) {
    char known[256] = "";
    for (size_t i = 0, used = 0; i < N_POLICIES; i++) {
        const char *comma = i == 0 ? "" : i + 1 == N_POLICIES ? " and " : ", ";
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", comma, policies[i]->name);
        if (used >= sizeof known) break;
    }
    return kvf__fail_value(err, KVF_E_NOT_FOUND, "policy", policy ? policy : "NULL", "there is %s", known);
}

kvf_status kvf_policy_options_init(kvf_policy_options *options, size_t struct_size, const char *policy,
                                   const char *preset, kvf_error *err) {
    const kvf_policy_ops *ops = kvf_policy_find(policy);
    if (!options || struct_size < sizeof struct_size)
        return kvf__fail(err, KVF_E_INVALID, "kvf_policy_options_init: options must be given, with its size");
    if (!ops) return unknown_policy(policy, err);
    char known[128] = "";
    for (size_t i = 0; i < N_PRESETS; i++) {
        if (presets[i].ops != ops) continue;
        if (strcmp(presets[i].preset, preset ? preset : "default") == 0) {
            kvf_policy_options filled = defaults();
            filled.ops = ops;
            presets[i].fill(&filled);
            kvf__init(options, struct_size, &filled, sizeof filled);
            return KVF_OK;
        }
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", presets[i].preset);
    }
    return kvf__fail_value(err, KVF_E_NOT_FOUND, "preset", preset ? preset : "default", "policy %s has %s", ops->name,
                           known);
}

kvf_status kvf__policy_ops_check(const kvf_policy_ops *ops, kvf_error *err) {
    const uint32_t needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW | KVF_NEEDS_SQUARES | KVF_NEEDS_LAST_ROWS |
                           KVF_NEEDS_LOGPROBS | KVF_NEEDS_REPEAT | KVF_NEEDS_PROBE,
                   flags = KVF_POLICY_PROMPT_ONLY | KVF_POLICY_EQUAL_LAYERS | KVF_POLICY_RECENT | KVF_POLICY_KEEPS_ALL;
    kvf_policy_ops copy;
    kvf_status st = kvf__config_read(&copy, sizeof copy, ops, "kvf_policy_ops", err);
    if (st) return st;
    if (!copy.name || !copy.name[0]) return kvf__fail(err, KVF_E_INVALID, "kvf_policy_ops: name must be set");
    if (copy.needs & ~needs || copy.flags & ~flags)
        return kvf__fail_value(err, KVF_E_INVALID, "policy", copy.name,
                               "needs %#x, flags %#x: must be of KVF_NEEDS_* and KVF_POLICY_*", copy.needs, copy.flags);
    return KVF_OK;
}

kvf_status kvf_policy_options_init_ops(kvf_policy_options *options, size_t struct_size, const kvf_policy_ops *ops,
                                       kvf_error *err) {
    if (!options || struct_size < sizeof struct_size || !ops)
        return kvf__fail(err, KVF_E_INVALID, "kvf_policy_options_init_ops: options and ops must be set");
    kvf_status st = kvf__policy_ops_check(ops, err);
    if (st) return st;
    kvf_policy_options filled = defaults();
    filled.ops = ops;
    kvf__init(options, struct_size, &filled, sizeof filled);
    return KVF_OK;
}
