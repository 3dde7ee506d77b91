/* The variants that the ablation tables of the D2O paper compare. */
#include <string.h>

#include "eval/eval.h"

static const struct {
    const char *table, *spec;
} variants[] = {
    /* 4: how the layers' budgets follow from the density. */
    {"4", "softmax=d2o"},
    {"4", "uniform"},
    {"4", "reciprocal"},
    {"4", "exp_decay"},
    {"4", "softmax raw variance=d2o,metric=raw"},
    {"4", "softmax layer_minmax=d2o,metric=layer_minmax"},
    {"4", "more to high variance=d2o,metric=layer_minmax,layer_sign=-1"},
    {"4", "attention mass=d2o,metric=mass,layer_sign=-1"},
    {"4", "entropy=d2o,metric=entropy,layer_sign=-1"},
    /* 6: the parts of the method, each taken out. */
    {"6", "d2o"},
    {"6", "without layer budgets=uniform"},
    {"6", "without EMA=d2o,beta_new=1,beta_old=0"},
    {"6", "without merging=evict"},
    /* 7: what similarity of an evicted token to a kept one is. */
    {"7", "key=d2o"},
    {"7", "value=d2o,match=value"},
    /* 8: what merged tokens weigh. */
    {"8", "exponential=d2o"},
    {"8", "average=d2o,merge=average"},
    {"8", "authors=d2o,merge=authors"},
    {"8", "mass=d2o,merge=mass"},
    {"8", "mass values only=d2o,merge=mass,merge_keys=0"},
    {"8", "none=d2o,merge=none"},
    /* 9: heavy hitters to recent window, and the EMA's share of the new mean. */
    {"9", "1:1=d2o,nm=1:1"},
    {"9", "2:1=d2o,nm=2:1"},
    {"9", "3:1=d2o,nm=3:1"},
    {"9", "4:1=d2o,nm=4:1"},
    {"9", "1:3=d2o,nm=1:3"},
    {"9", "beta .5=d2o,beta_new=0.5,beta_old=0.5"},
    {"9", "beta .6=d2o,beta_new=0.6,beta_old=0.4"},
    {"9", "beta .7=d2o,beta_new=0.7,beta_old=0.3"},
    {"9", "beta .8=d2o,beta_new=0.8,beta_old=0.2"},
    {"9", "beta .9=d2o,beta_new=0.9,beta_old=0.1"},
};

static bool is_table(const char *name, size_t length) {
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
        if (strlen(variants[i].table) == length && !strncmp(variants[i].table, name, length)) return true;
    return false;
}

static bool is_asked(const char *tables, const char *table) {
    if (!strcmp(tables, "all")) return true;
    for (const char *p = tables;; p++) {
        size_t length = strcspn(p, ",");
        if (strlen(table) == length && !strncmp(p, table, length)) return true;
        p += length;
        if (!*p) return false;
    }
}

bool kvf__eval_ablation(const kvf__cli *cli, const kvf_model_info *info, kvf__eval_policies *policies) {
    const char *tables = cli->tables ? cli->tables : "all";
    for (const char *p = tables; strcmp(tables, "all"); p++) {
        size_t length = strcspn(p, ",");
        if (!is_table(p, length)) {
            kvf__say("--tables %s: must be all, or tables out of 4, 6, 7, 8 and 9 with commas between them",
                     kvf__shown(tables).text);
            return false;
        }
        p += length;
        if (!*p) break;
    }
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++)
        if (is_asked(tables, variants[i].table) &&
            !kvf__eval_policy_add(cli, info, variants[i].spec, variants[i].table, policies))
            return false;
    return true;
}
