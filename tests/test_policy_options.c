/* Options as text, presets, checks, and docs/options.md against the code's table. */
#include "test_policy_rig.h"

static kvf_policy_options init(const char *policy, const char *preset) {
    kvf_policy_options o;
    OK(kvf_policy_options_init(&o, sizeof o, policy, preset, err));
    return o;
}

static const char *get(const kvf_policy_options *o, const char *name) {
    static char text[8][640];
    static int i;
    i = (i + 1) % 8;
    OK(kvf_policy_option_get(o, name, text[i], sizeof text[i]));
    return text[i];
}

Test(policy_options, every_value_reads_back_as_itself) {
    static const char *const presets[][2] = {{"full", NULL},     {"d2o", "paper"},   {"d2o", "serving"},
                                             {"d2o", "authors"}, {"h2o", "default"}, {"streaming", NULL},
                                             {"d2o", NULL}};
    uint32_t n;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    cr_assert_eq(n, 40);
    for (size_t p = 0; p < sizeof presets / sizeof *presets; p++) {
        kvf_policy_options o = init(presets[p][0], presets[p][1]), copy = init("d2o", "paper");
        copy.ops = o.ops;
        for (uint32_t i = 0; i < n; i++) OK(kvf_policy_option_set(&copy, list[i].name, get(&o, list[i].name), err));
        for (uint32_t i = 0; i < n; i++) cr_assert_str_eq(get(&copy, list[i].name), get(&o, list[i].name));
        cr_assert(memcmp(&o, &copy, offsetof(kvf_policy_options, gate)) == 0);
        cr_assert(o.evict_every == copy.evict_every && o.defer_first_decode == copy.defer_first_decode);
        cr_assert(o.budget_may_change == copy.budget_may_change && !o.budget_may_change);
        cr_assert(memcmp(&o.budget_bytes, &copy.budget_bytes, sizeof o - offsetof(kvf_policy_options, budget_bytes)) ==
                  0);
        OK(kvf_policy_options_check(&o, 32, 16, err));
    }
    kvf_policy_options o = init("d2o", NULL);
    double hard[] = {0.1, 1.0 / 3, 0.30000000000000004, 1e-300, 0.95};
    for (size_t i = 0; i < sizeof hard / sizeof *hard; i++) {
        o.rho = hard[i];
        OK(kvf_policy_option_set(&o, "rho", get(&o, "rho"), err));
        cr_assert_eq(o.rho, hard[i]);
    }
    cr_assert_str_eq((o.rho = 0.2, get(&o, "rho")), "0.2");
    OK(kvf_policy_option_set(&o, "rho", "5.e-1", err));
    cr_assert_eq(o.rho, 0.5);
    char small[4];
    cr_assert_eq(kvf_policy_option_get(&o, "full_layers", small, 4), KVF_E_LIMIT);
    cr_assert_eq(kvf_policy_option_get(&o, "full_layer", small, 4), KVF_E_NOT_FOUND);
}

Test(policy_options, values_and_names) {
    kvf_policy_options o = init("d2o", NULL);
    OK(kvf_policy_option_set(&o, "min-tokens", "7", err));
    cr_assert_eq(o.min_tokens, 7);
    OK(kvf_policy_option_set(&o, "full_layers", "0,1,last,-2", err));
    cr_assert(o.n_full_layers == 4 && o.full_layers[2] == -1 && o.full_layers[3] == -2);
    cr_assert_str_eq(get(&o, "full-layers"), "0,1,last,-2");
    OK(kvf_policy_option_set(&o, "full_layers", "none", err));
    cr_assert_eq(o.n_full_layers, 0);
    OK(kvf_policy_option_set(&o, "nm", "2:5", err));
    cr_assert(o.n_parts == 2 && o.m_parts == 5);
    OK(kvf_policy_option_set(&o, "gate", "-0.5", err));
    cr_assert_eq(o.gate, -0.5);
    OK(kvf_policy_option_set(&o, "gate", "tau", err));
    cr_assert(isnan(o.gate));
    OK(kvf_policy_option_set(&o, "layer_sign", "-1", err));
    cr_assert_eq(o.layer_sign, -1);
    OK(kvf_policy_option_set(&o, "merge_keys", "false", err));
    cr_assert_eq(o.merge_keys, 0);
    OK(kvf_policy_option_set(&o, "score", "prompt_plus_current", err));
    cr_assert_eq(kvf_policy_n_arrays(&o), 2);
    o = init("h2o", NULL);
    cr_assert_eq(kvf_policy_n_arrays(&o), 1);
    o = init("streaming", NULL);
    cr_assert_eq(kvf_policy_n_arrays(&o), 0);
}

Test(policy_options, bad_values_name_option_value_and_remedy) {
    static const char *const bad[][3] = {
        {"rho", "0", "rho 0: must be in (0, 1]"},
        {"rho", "1.1", "rho 1.1: must be in (0, 1]"},
        {"rho", "-0.1", "must be"},
        {"rho", "nan", "must be"},
        {"rho", "inf", "must be"},
        {"rho", "0x1p-2", "must be"},
        {"rho", "", "must be"},
        {"rho", ".", "must be"},
        {"rho", "1e", "must be"},
        {"rho", "0.2 ", "must be"},
        {"rho", "0,2", "must be"},
        {"rho", "0.2e999", "must be"},
        {"budget_tokens", "15", "budget_tokens 15: must be 0 or [16, 1073741824]"},
        {"budget_tokens", "99999999999", "must be"},
        {"budget_bytes", "-1", "budget_bytes -1: must be bytes, as 0 or 64MiB"},
        {"budget_bytes", "64MB", "must be"},
        {"budget_bytes", "999999999999GiB", "must be"},
        {"metric_share", "0", "metric_share 0: must be in (0, 1]"},
        {"score_pool", "4", "score_pool 4: must be odd, in [1, 63]"},
        {"score_pool", "65", "must be"},
        {"score_window", "0", "score_window 0: must be in [1, 1048576]"},
        {"score_norm", "k", "must be none|v|output"},
        {"score_decay", "1.5", "must be in [0, 1]"},
        {"min_tokens", "-1", "must be"},
        {"min_tokens", "4294967296", "must be"},
        {"metric", "head", "metric head: must be head_minmax|raw|layer_minmax|mass|entropy"},
        {"metric", "raw|layer_minmax", "must be"},
        {"layer_sign", "0", "layer_sign 0: must be 1|-1"},
        {"layer_strength", "-1", "must be"},
        {"redistribute", "2", "redistribute 2: must be 0|1"},
        {"nm", "3", "nm 3: must be N:M"},
        {"nm", "3:0", "must be N:M"},
        {"nm", "3:1:1", "must be N:M"},
        {"nm", ":", "must be N:M"},
        {"full_layers", "0,,1", "full_layers 0,,1: must be"},
        {"full_layers", "first", "must be"},
        {"full_layers", "0,", "must be"},
        {"full_layers", "-0", "must be"},
        {"full_layers", "99999", "must be"},
        {"gate", "1.5", "gate 1.5: must be tau or [-1, 1]"},
        {"threshold", "tau", "threshold tau: must be none or a number in [-1e30, 1e30]"},
        {"merge", "", "must be"},
        {"sinks", "9999999", "must be"},
        {"evict_every", "1.5", "must be"},
        {"beta_new", "2", "must be"},
    };
    kvf_policy_options o = init("d2o", "authors"), before = o;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        FAILS(kvf_policy_option_set(&o, bad[i][0], bad[i][1], err), KVF_E_INVALID, bad[i][2]);
        cr_assert(memcmp(&o, &before, sizeof o) == 0, "%s %s changed something", bad[i][0], bad[i][1]);
    }
    char many[400] = "0";
    for (int i = 0; i < 64; i++) strcat(many, ",1");
    FAILS(kvf_policy_option_set(&o, "full_layers", many, err), KVF_E_INVALID, "full_layers");
    many[2 * 63 + 1] = '\0';
    OK(kvf_policy_option_set(&o, "full_layers", many, err));
    FAILS(kvf_policy_option_set(&o, "rhoo", "1", err), KVF_E_NOT_FOUND, "rhoo");
    FAILS(kvf_policy_option_set(&o, "rh", "1", err), KVF_E_NOT_FOUND, "rh");
    FAILS(kvf_policy_option_set(&o, NULL, "1", err), KVF_E_NOT_FOUND, "NULL");
    FAILS(kvf_policy_options_init(&o, sizeof o, "lru", NULL, err), KVF_E_NOT_FOUND, "full, d2o, fold, ");
    FAILS(kvf_policy_options_init(&o, sizeof o, "d2o", "fast", err), KVF_E_NOT_FOUND,
          "default, paper, serving, authors");
    FAILS(kvf_policy_options_init(&o, sizeof o, "h2o", "paper", err), KVF_E_NOT_FOUND, "policy h2o has default");
}

Test(policy_options, check_finds_what_was_set_by_field) {
    kvf_policy_options o = init("d2o", NULL), bad;
#define BAD(change, word)                                                       \
    do {                                                                        \
        bad = o;                                                                \
        change;                                                                 \
        FAILS(kvf_policy_options_check(&bad, 4, 16, err), KVF_E_INVALID, word); \
    } while (0)
    BAD(bad.rho = NAN, "rho nan: must be in (0, 1]");
    BAD(bad.rho = 0, "rho 0: must be");
    BAD(bad.budget_tokens = 3, "budget_tokens 3");
    BAD(bad.layer_sign = 0, "layer_sign 0");
    BAD(bad.layer_strength = INFINITY, "layer_strength inf");
    BAD(bad.metric = (kvf_metric)5, "metric");
    BAD(bad.gqa = (kvf_gqa)9, "gqa");
    BAD(bad.m_parts = 0, "nm 3:0");
    BAD(bad.n_full_layers = 65, "full_layers");
    BAD(bad.sinks = UINT32_MAX, "sinks 4294967295");
    BAD(bad.merge_keys = 7, "merge_keys 7");
    BAD((bad.n_full_layers = 1, bad.full_layers[0] = 4),
        "full_layers 4: the model has 4 layers: must be in [0, 3], last");
    BAD((bad.n_full_layers = 1, bad.full_layers[0] = -5), "full_layers -5");
    BAD((bad.budget_unit = KVF_BUDGET_BLOCK, bad.redistribute = 0), "budget_unit block: needs redistribute 1");
    BAD(bad.ops = kvf_policy_find("cam"),
        "merge paper: policy cam hands values on by a rule of its own: use merge none");
    BAD((bad.merge = KVF_MERGE_ATTENTION, bad.score = KVF_SCORE_WINDOW), "merge attention: score must be accumulate");
    BAD((bad.merge = KVF_MERGE_ATTENTION, bad.score = KVF_SCORE_PROMPT_PLUS_CURRENT), "merge attention: score must be");
    BAD((bad.merge = KVF_MERGE_ATTENTION, bad.ops = kvf_policy_find("streaming")),
        "merge attention: policy streaming sees no attention");
    BAD(bad.threshold = 0.5, "threshold 0.5: needs budget global");
    BAD(bad.repeat_piece = 63, "repeat_piece 63: must be 0 or [64, 1073741824]");
    BAD(bad.score_norm = KVF_SCORE_NORM_OUTPUT, "score_norm output: needs score repeat");
    BAD((bad.score = KVF_SCORE_REPEAT, bad.score_norm = KVF_SCORE_NORM_V),
        "score repeat: score_norm must be none or output");
    BAD((bad.score = KVF_SCORE_PROBE, bad.score_norm = KVF_SCORE_NORM_OUTPUT), "score probe: score_norm must be none");
    BAD((bad.score = KVF_SCORE_PROBE, bad.merge = KVF_MERGE_NONE, bad.ops = kvf_policy_find("roco")),
        "score probe: policy roco goes by attention alone");
    BAD((bad.score = KVF_SCORE_REPEAT, bad.merge = KVF_MERGE_NONE, bad.ops = kvf_policy_find("cam")),
        "score repeat: policy cam goes by attention alone");
    BAD(bad.ops = NULL, "kvf_policy_options_init");
    FAILS(kvf_policy_options_check(&o, 0, 16, err), KVF_E_INVALID, "n_layers 0");
    OK(kvf_policy_options_check(&o, 1, 16, err));
}

/* A score from the model takes the place of all that attention would give, but for what a merge weighs by. */
Test(policy_options, scores_from_the_model_need_no_attention) {
    for (uint32_t i = 0; kvf_policy_name(i); i++)
        for (int probe = 0; probe < 2; probe++) {
            kvf_policy_options o = init(kvf_policy_name(i), NULL), before = o;
            uint32_t own = before.ops->needs & (KVF_NEEDS_SQUARES | KVF_NEEDS_LOGPROBS),
                     want = probe ? KVF_NEEDS_PROBE : KVF_NEEDS_REPEAT;
            o.score = probe ? KVF_SCORE_PROBE : KVF_SCORE_REPEAT;
            o.score_norm = KVF_SCORE_NORM_NONE;
            o.merge = KVF_MERGE_NONE;
            if (kvf_policy_options_check(&o, 4, 16, NULL)) continue;
            if (!kvf__policy_asks_model(&o)) { /* it ranks by no score */
                cr_assert_eq(kvf_policy_needs(&o), kvf_policy_needs(&before), "%s", o.ops->name);
                continue;
            }
            cr_assert_eq(kvf_policy_needs(&o), want | own, "%s", o.ops->name);
            cr_assert(!kvf_policy_has_metric(&o) && !kvf_policy_observes(&o) && kvf_policy_n_arrays(&o) == !probe);
            o.merge = KVF_MERGE_ATTENTION;
            if (!probe) {
                FAILS(kvf_policy_options_check(&o, 4, 16, err), KVF_E_INVALID, "score must be accumulate");
                continue;
            }
            OK(kvf_policy_options_check(&o, 4, 16, err));
            bool rows = !(kvf__policy_flags(&o) & KVF_POLICY_PROMPT_ONLY);
            cr_assert_eq(kvf_policy_needs(&o), want | own | KVF_NEEDS_COL_SUMS | (rows ? KVF_NEEDS_ROW : 0u));
            cr_assert_eq(kvf_policy_n_arrays(&o), 1);
            o.rho = 1;
            cr_assert_eq(kvf_policy_needs(&o), 0);
        }
}

/* A piece of the repetition is held beside the prompt. */
Test(policy_options, a_repetition_counts_with_the_prompt) {
    static const struct {
        uint32_t piece, n_prompt, tokens;
    } cases[] = {{0, 1000, 2032}, {64, 1000, 1096}, {2000, 1000, 2032}, {100, 30, 92}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_policy_options o = init("h2o", NULL);
        kvf_policy_need without, need;
        OK(kvf_policy_project(&o, 5, 3, 16, cases[i].n_prompt, 10, &without, err));
        o.score = KVF_SCORE_REPEAT;
        o.repeat_piece = cases[i].piece;
        OK(kvf_policy_project(&o, 5, 3, 16, cases[i].n_prompt, 10, &need, err));
        cr_assert_eq(need.prompt_blocks, 15u * ((cases[i].tokens + 15) / 16), "case %zu", i);
        cr_assert_eq(need.steady_blocks, without.steady_blocks);
        o.score = KVF_SCORE_PROBE;
        OK(kvf_policy_project(&o, 5, 3, 16, cases[i].n_prompt, 10, &need, err));
        cr_assert_eq(need.prompt_blocks, without.prompt_blocks);
    }
}

Test(policy_options, presets_are_those_of_the_papers) {
    kvf_policy_options p = init("d2o", NULL), s = init("d2o", "serving"), a = init("d2o", "authors"),
                       h = init("h2o", NULL);
    cr_assert(p.metric == KVF_METRIC_HEAD_MINMAX && p.redistribute && p.n_parts == 3 && p.m_parts == 1 && p.sinks == 4);
    cr_assert(p.beta_new == 0.7 && p.beta_old == 0.3 && p.scope == KVF_SCOPE_HEAD && p.merge == KVF_MERGE_PAPER);
    cr_assert(p.evict_every == 1 && !p.defer_first_decode && p.min_tokens == 64 && p.budget_unit == KVF_BUDGET_TOKEN);
    cr_assert(s.budget_unit == KVF_BUDGET_BLOCK && kvf__policy_k(&s, 32) == 16 && kvf__policy_k(&s, 8) == 4);
    cr_assert(!a.redistribute && a.n_full_layers == 3 && a.n_parts == 1 && a.m_parts == 1 && a.beta_new == 0.5);
    cr_assert(a.beta_old == 0.5 && a.scope == KVF_SCOPE_LAYER && a.merge == KVF_MERGE_AUTHORS && a.defer_first_decode);
    cr_assert(a.min_tokens == 0);
    cr_assert(h.sinks == 0 && h.n_parts == 1 && h.m_parts == 1 && h.merge == KVF_MERGE_NONE && h.evict_every == 1);
    cr_assert(h.ops->metric == NULL && h.min_tokens == 64 && h.score == KVF_SCORE_ACCUMULATE);
    for (uint32_t i = 0; kvf_policy_name(i); i++)
        cr_assert_str_eq(kvf_policy_find(kvf_policy_name(i))->name, kvf_policy_name(i));
    cr_assert(kvf_policy_find("d2") == NULL && kvf_policy_find(NULL) == NULL && kvf_policy_name(99) == NULL);
}

/* The words of a table cell: '|' would end it. */
static void cell(char *out, const char *text) {
    for (; *text; text++) {
        if (*text == '|') *out++ = '\\';
        *out++ = *text;
    }
    *out = '\0';
}

/* The presets whose value is another than d2o's paper preset's, by value: "0 (serving); 1:1 (authors, h2o)". */
static void differences(char *out, size_t capacity, const char *name) {
    kvf_policy_options paper = init("d2o", NULL);
    const char *policy;
    char seen[32][64];
    size_t used = 0, n_seen = 0;
    struct {
        const char *label, *policy, *preset;
    } all[32] = {{"serving", "d2o", "serving"},   {"authors", "d2o", "authors"},   {"cam:h2o", "cam", "h2o"},
                 {"fold:probe", "fold", "probe"}, {"fold:light", "fold", "light"}, {"fold:repeat", "fold", "repeat"}};
    uint32_t n = 6;
    for (uint32_t i = 0; (policy = kvf_policy_name(i)); i++)
        if (strcmp(policy, "full") && strcmp(policy, "d2o"))
            all[n].label = all[n].policy = policy, all[n++].preset = NULL;
    out[0] = '\0';
    for (uint32_t i = 0; i < n; i++) {
        kvf_policy_options o = init(all[i].policy, all[i].preset);
        char value[64], other[64];
        OK(kvf_policy_option_get(&o, name, value, sizeof value));
        OK(kvf_policy_option_get(&paper, name, other, sizeof other));
        bool known = !strcmp(value, other);
        for (size_t k = 0; k < n_seen; k++) known = known || !strcmp(seen[k], value);
        if (known) continue;
        used += (size_t)snprintf(out + used, capacity - used, "%s%s (%s", n_seen ? "; " : "", value, all[i].label);
        for (uint32_t j = i + 1; j < n; j++) {
            kvf_policy_options p = init(all[j].policy, all[j].preset);
            OK(kvf_policy_option_get(&p, name, other, sizeof other));
            if (!strcmp(other, value)) used += (size_t)snprintf(out + used, capacity - used, ", %s", all[j].label);
        }
        used += (size_t)snprintf(out + used, capacity - used, ")");
        memcpy(seen[n_seen++], value, sizeof value);
    }
}

static void row_of(char *row, size_t capacity, const kvf_policy_option_info *info) {
    kvf_policy_options paper = init("d2o", NULL);
    char values[256], differ[512];
    cell(values, info->values);
    differences(differ, sizeof differ, info->name);
    snprintf(row, capacity, "| `%s` | %s | %s | %s | %s | %s |\n", info->name, values, get(&paper, info->name), differ,
             info->per_request ? "yes" : "no", info->summary);
}

Test(policy_options, docs_have_the_same_table) {
    FILE *f = fopen(KVF_SOURCE_DIR "/docs/options.md", "r");
    cr_assert(f, "docs/options.md is missing");
    uint32_t n, i = 0;
    const kvf_policy_option_info *list = kvf_policy_option_list(&n);
    char line[1024], row[1024];
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "| `", 3)) continue;
        cr_assert(i < n, "one row too many: %s", line);
        row_of(row, sizeof row, &list[i++]);
        cr_assert_str_eq(line, row);
    }
    fclose(f);
    cr_assert_eq(i, n, "%u rows for %u options", i, n);
}

Test(policy_options, the_preset_that_makes_the_most_of_what_there_is) {
    const uint32_t probe = KVF_NEEDS_PROBE, repeat = KVF_NEEDS_REPEAT;
    cr_expect_str_eq(kvf_policy_preset_for("fold", probe | repeat), "probe");
    cr_expect_str_eq(kvf_policy_preset_for("fold", probe | KVF_NEEDS_ROW), "probe");
    cr_expect_str_eq(kvf_policy_preset_for("fold", repeat), "repeat");
    cr_expect_str_eq(kvf_policy_preset_for("fold", KVF_NEEDS_COL_SUMS), "default");
    cr_expect_str_eq(kvf_policy_preset_for("d2o", UINT32_MAX), "default");
    kvf_policy_options best = init("fold", "probe"), light = init("fold", "light"), mixed = init("h2o", NULL);
    cr_expect_eq(kvf_policy_needs(&best), probe | KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW);
    cr_expect_eq(kvf_policy_needs(&light), probe);
    mixed.score_mix = 0.3;
    FAILS(kvf_policy_options_check(&mixed, 2, 8, err), KVF_E_INVALID, "score_mix 0.3: needs score probe");
    cr_expect_null(kvf_policy_preset_for("no such policy", UINT32_MAX));
    cr_expect_null(kvf_policy_preset_for(NULL, 0));
}
