/* The option table: names, ranges, presets; reading and writing options as text. */
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "d2o_policy/policy.h"

typedef enum kind { REAL, COUNT, BYTES, CHOICE, FLAG, SIGN, PARTS, LAYERS, GATE, BOUND } kind;

/* X(name, field, kind, least, most, values, summary), in the order of the docs. The words of a CHOICE are its enum in
 * order. A test keeps docs/options.md equal. */
#define OPTIONS(X)                                                                                                  \
    X(rho, rho, REAL, 0, 1, "(0, 1]",                                                                               \
      "Share of the prompt's tokens that a layer keeps, on average over the layers; 1 never evicts.")               \
    X(budget_tokens, budget_tokens, COUNT, 0, KVF__MAX_TOKENS, "0 or [16, 1073741824]",                             \
      "Tokens that a layer keeps on average, in place of rho; 0 means rho.")                                        \
    X(budget_bytes, budget_bytes, BYTES, 0, 0, "bytes, as 0 or 64MiB",                                              \
      "Bytes of K and V that a sequence keeps over all layers, in place of rho; 0 means rho.")                      \
    X(min_tokens, min_tokens, COUNT, 0, KVF__MAX_TOKENS, "[0, 1073741824]",                                         \
      "Smallest budget, on average over the layers: one layer may get less; no effect with redistribute 0.")        \
    X(metric, metric, CHOICE, 0, 0, "head_minmax|raw|layer_minmax|mass|entropy",                                    \
      "How a layer's density follows from its column sums: their variance, scaled over its heads (head_minmax), "   \
      "over the layers (layer_minmax) or not at all (raw; one-hot on long prompts), or a number of tokens "         \
      "(mass, entropy).")                                                                                           \
    X(metric_share, metric_share, REAL, 0, 1, "(0, 1]",                                                             \
      "metric mass: the share of the column sums whose tokens it counts.")                                          \
    X(layer_sign, layer_sign, SIGN, 0, 0, "1|-1",                                                                   \
      "1: layers of high density get smaller budgets, as published; -1: larger ones.")                              \
    X(layer_strength, layer_strength, REAL, 0, 1e6, "[0, 1000000]",                                                 \
      "Factor of the density; 0 makes all layers equal.")                                                           \
    X(redistribute, redistribute, FLAG, 0, 0, "0|1",                                                                \
      "1: layer sizes add up to the budget exactly; 0: the authors' clamped ratios.")                               \
    X(budget, budget, CHOICE, 0, 0, "layer|global",                                                                 \
      "What the slots are divided among: the layers, by their weights (layer); or the tables of all layers and "    \
      "head groups, by one threshold on the scores of all slots (global).")                                         \
    X(threshold, threshold, BOUND, -1e30, 1e30, "none or a number in [-1e30, 1e30]",                                \
      "budget global: the lowest score that is kept, in place of rho; what is held then depends on the prompt.")    \
    X(budget_unit, budget_unit, CHOICE, 0, 0, "token|block", "Unit of the layer sizes; block gives whole blocks.")  \
    X(full_layers, full_layers, LAYERS, 0, 0, "none or a list as 0,1,last",                                         \
      "Layers that are never compressed; the other layers get less for it, except with redistribute 0.")            \
    X(head_budget, head_budget, CHOICE, 0, 0, "equal|adaptive",                                                     \
      "How the head groups of a layer (heads_per_group) share its slots: equally, or by the scores of their "       \
      "slots.")                                                                                                     \
    X(head_floor, head_floor, REAL, 0, 1, "[0, 1]",                                                                 \
      "head_budget adaptive, budget global: share of an equal budget that every table keeps at least.")             \
    X(nm, n_parts, PARTS, 0, 1000000, "N:M, N in [0, 1000000], M in [1, 1000000]",                                  \
      "Ratio of heavy hitters (sinks included) to recent window; streaming ignores it.")                            \
    X(window, window, COUNT, 0, KVF__MAX_TOKENS, "[0, 1073741824]", "Recent window in tokens; 0: by N:M.")          \
    X(sinks, sinks, COUNT, 0, 1u << 20, "[0, 1048576]", "Number of first tokens that are always kept.")             \
    X(sinks_extra, sinks_extra, FLAG, 0, 0, "0|1", "1: N:M divides the slots that remain after the sinks.")         \
    X(score, score, CHOICE, 0, 0, "accumulate|prompt_plus_current|mean|sqrt|window|repeat|probe",                   \
      "Query rows that add to a slot's score: all (accumulate); the prompt's and the newest; all, divided by "      \
      "the number of queries that saw the token (mean) or its root (sqrt); the last ones (window). Or a score "     \
      "that needs no attention of these rows: from a repetition of the prompt (repeat), or from a probe of the "    \
      "token's hidden state (probe).")                                                                              \
    X(repeat_piece, repeat_piece, COUNT, 0, KVF__MAX_TOKENS, "0 or [64, 1073741824]",                               \
      "score repeat: most prompt tokens of one piece of the repetition; 0: the whole prompt, or what fits the "     \
      "context.")                                                                                                   \
    X(score_window, score_window, COUNT, 1, 1u << 20, "[1, 1048576]",                                               \
      "score window: number w of last queries; in decode the last w to 2w - 1.")                                    \
    X(score_norm, score_norm, CHOICE, 0, 0, "none|v|output",                                                        \
      "v: a score by attention is multiplied by the norm of the token's value; output: score repeat is multiplied " \
      "by the norm of the value after the output projection, and divided by that of the query's residual.")         \
    X(score_pool, score_pool, COUNT, 1, KVF__MAX_POOL - 1, "odd, in [1, 63]",                                       \
      "Number of neighbouring slots over which scores are averaged; 1: none.")                                      \
    X(score_decay, score_decay, REAL, 0, 1, "[0, 1]",                                                               \
      "Factor of earlier scores at the end of a later prompt segment.")                                             \
    X(score_mix, score_mix, REAL, 0, 100, "[0, 100]",                                                               \
      "score probe: weight of the attention that a slot got (the logarithm of its sum / root of the number of "     \
      "queries), which is added to the probe's score where slots of one head compete; 0: none.")                    \
    X(gqa, gqa, CHOICE, 0, 0, "sum|max|first", "How the scores of a KV head's query heads are combined.")           \
    X(merge, merge, CHOICE, 0, 0, "paper|authors|average|mass|none|attention",                                      \
      "Weights of a merge; mass and attention need pages with weight and bias.")                                    \
    X(merge_keys, merge_keys, FLAG, 0, 0, "0|1", "0: only values are merged.")                                      \
    X(match, match, CHOICE, 0, 0, "key|value", "Vectors whose cosine matches evicted tokens with kept ones.")       \
    X(scope, scope, CHOICE, 0, 0, "head|layer",                                                                     \
      "Whether each head or the whole layer decides what merges, with one threshold.")                              \
    X(beta_new, beta_new, REAL, 0, 1, "[0, 1]", "Weight of an event's mean cosine in the moving threshold tau.")    \
    X(beta_old, beta_old, REAL, 0, 1, "[0, 1]", "Weight of the previous tau.")                                      \
    X(gate, gate, GATE, -1, 1, "tau or [-1, 1]",                                                                    \
      "Smallest cosine at which a token is merged: the moving tau, or a fixed number.")                             \
    X(cam_tokens, cam_tokens, COUNT, 1, KVF__MAX_CAM_TOKENS, "[1, 128]",                                            \
      "cam: number of following tokens that take in an evicted value.")                                             \
    X(cam_mode, cam_mode, CHOICE, 0, 0, "expected|sample",                                                          \
      "cam: an evicted value is scaled by its probability (expected), or taken in whole with that probability "     \
      "(sample).")                                                                                                  \
    X(cam_seed, cam_seed, COUNT, 0, UINT32_MAX, "[0, 4294967295]", "cam: seed of cam_mode sample.")                 \
    X(evict_every, evict_every, COUNT, 0, 1u << 20, "[0, 1048576]",                                                 \
      "k: a decode event evicts k tokens at once; 0 means half a block.")                                           \
    X(defer_first_decode, defer_first_decode, FLAG, 0, 0, "0|1",                                                    \
      "1: the prompt is compressed after the first decode step, as the authors do.")                                \
    X(budget_may_change, budget_may_change, FLAG, 0, 0, "0|1",                                                      \
      "1: observe attention even with rho 1, so that the budget can be tightened later.")

static const kvf_policy_option_info infos[] = {
#define INFO(name, field, kind, least, most, values, summary) {#name, values, summary, 1},
    OPTIONS(INFO)
#undef INFO
};

static const struct detail {
    kind kind;
    size_t offset;
    double least, most;
} details[] = {
#define DETAIL(name, field, kind, least, most, values, summary) \
    {kind, offsetof(kvf_policy_options, field), least, most},
    OPTIONS(DETAIL)
#undef DETAIL
};
enum { N_OPTIONS = sizeof infos / sizeof *infos, TEXT_MAX = 640 };

const kvf_policy_option_info *kvf_policy_option_list(uint32_t *n) {
    if (n) *n = N_OPTIONS;
    return infos;
}

/* ---- Text to values ----------------------------------------------------------------------------------- */

static const char *skip_digits(const char *p) {
    while (*p >= '0' && *p <= '9') p++;
    return p;
}

/* A decimal number and nothing else: no blanks, hexadecimals, infinities; '.' whatever the locale says. */
static bool parse_real(const char *text, double *out) {
    const char *p = text + (*text == '-' || *text == '+'), *digits = p;
    p = skip_digits(p);
    bool any = p > digits;
    const char *dot = *p == '.' ? p : NULL;
    if (dot) {
        p = skip_digits(dot + 1);
        any = any || p > dot + 1;
    }
    if (any && (*p == 'e' || *p == 'E')) {
        const char *e = p + 1 + (p[1] == '-' || p[1] == '+');
        p = skip_digits(e);
        any = p > e;
    }
    char copy[64], *end;
    size_t n = strlen(text);
    if (!any || *p || n >= sizeof copy) return false;
    memcpy(copy, text, n + 1);
    if (dot) copy[dot - text] = localeconv()->decimal_point[0];
    double x = strtod(copy, &end);
    if (*end || !isfinite(x)) return false;
    *out = x;
    return true;
}

static bool parse_count(const char *text, size_t n, int64_t *out) {
    int64_t x = 0;
    if (n == 0 || n > 18) return false;
    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        x = x * 10 + (text[i] - '0');
    }
    *out = x;
    return true;
}

static bool parse_bytes(const char *text, int64_t *out) {
    static const char *const units[] = {"", "KiB", "MiB", "GiB"};
    size_t digits = (size_t)(skip_digits(text) - text);
    for (int i = 0; i < 4; i++)
        if (!strcmp(text + digits, units[i]))
            return parse_count(text, digits, out) && !__builtin_mul_overflow(*out, INT64_C(1) << (10 * i), out);
    return false;
}

/* The number of a word in "a|b|c", -1 when it is none of them. */
static int find_word(const char *words, const char *text) {
    size_t n = strlen(text);
    for (int i = 0;; i++) {
        const char *end = strchr(words, '|');
        size_t len = end ? (size_t)(end - words) : strlen(words);
        if (len == n && memcmp(words, text, n) == 0) return i;
        if (!end) return -1;
        words = end + 1;
    }
}

static bool parse_parts(const char *text, kvf_policy_options *o) {
    const char *colon = strchr(text, ':');
    int64_t n, m;
    if (!colon || !parse_count(text, (size_t)(colon - text), &n) || !parse_count(colon + 1, strlen(colon + 1), &m))
        return false;
    if (n > UINT32_MAX || m > UINT32_MAX) return false;
    o->n_parts = (uint32_t)n;
    o->m_parts = (uint32_t)m;
    return true;
}

static bool parse_layers(const char *text, kvf_policy_options *o) {
    memset(o->full_layers, 0, sizeof o->full_layers);
    o->n_full_layers = 0;
    if (strcmp(text, "none") == 0) return true;
    for (;;) {
        const char *end = strchr(text, ',');
        size_t n = end ? (size_t)(end - text) : strlen(text), minus = *text == '-';
        int64_t layer = 1;
        if (n == 4 && memcmp(text, "last", 4) == 0)
            minus = 1;
        else if (!parse_count(text + minus, n - minus, &layer) || layer >= KVF__MAX_LAYERS || (minus && layer == 0))
            return false;
        if (o->n_full_layers == KVF_MAX_FULL_LAYERS) return false;
        o->full_layers[o->n_full_layers++] = (int32_t)(minus ? -layer : layer);
        if (!end) return true;
        text = end + 1;
    }
}

static bool parse_into(kvf_policy_options *o, uint32_t i, const char *text) {
    void *field = (unsigned char *)o + details[i].offset;
    double real = NAN;
    int64_t count = 0;
    int word = -1;
    switch (details[i].kind) {
    case PARTS: return parse_parts(text, o);
    case LAYERS: return parse_layers(text, o);
    case REAL:
        if (!parse_real(text, &real)) return false;
        memcpy(field, &real, sizeof real);
        return true;
    case GATE:
    case BOUND:
        if (strcmp(text, details[i].kind == GATE ? "tau" : "none") && !parse_real(text, &real)) return false;
        memcpy(field, &real, sizeof real);
        return true;
    case BYTES:
        if (!parse_bytes(text, &count)) return false;
        memcpy(field, &count, sizeof count);
        return true;
    case COUNT:
        if (!parse_count(text, strlen(text), &count) || count > UINT32_MAX) return false;
        break;
    case SIGN:
        if (strcmp(text, "1") && strcmp(text, "+1") && strcmp(text, "-1")) return false;
        count = *text == '-' ? -1 : 1;
        break;
    case FLAG:
        word = find_word("0|1|false|true", text);
        if (word < 0) return false;
        count = word % 2;
        break;
    case CHOICE:
        word = find_word(infos[i].values, text);
        if (word < 0) return false;
        count = word;
        break;
    }
    uint32_t bits = (uint32_t)(int32_t)count;
    if (details[i].kind == COUNT) bits = (uint32_t)count;
    memcpy(field, &bits, sizeof bits);
    return true;
}

/* ---- Checks ---------------------------------------------------------------------------------------------- */

static uint32_t count_words(const char *words) {
    uint32_t n = 1;
    for (; *words; words++) n += *words == '|';
    return n;
}

static bool in_range(const kvf_policy_options *o, uint32_t i) {
    const struct detail *d = &details[i];
    const void *field = (const unsigned char *)o + d->offset;
    double real;
    uint32_t count;
    memcpy(&count, field, sizeof count);
    switch (d->kind) {
    case PARTS: return o->n_parts <= d->most && o->m_parts >= 1 && o->m_parts <= d->most;
    case LAYERS: return o->n_full_layers <= KVF_MAX_FULL_LAYERS;
    case BYTES: return true;
    case COUNT: return count >= d->least && count <= d->most;
    case CHOICE: return count < count_words(infos[i].values);
    case FLAG: return count <= 1;
    case SIGN: return count == 1 || count == UINT32_MAX;
    case REAL:
    case GATE:
    case BOUND: break;
    }
    memcpy(&real, field, sizeof real);
    if (d->kind != REAL && isnan(real)) return true;
    return real >= d->least && real <= d->most; /* false for NaN */
}

static kvf_status bad_value(uint32_t i, const char *value, kvf_error *err) {
    const char *values = infos[i].values;
    bool range = *values == '(' || *values == '[';
    char shown[132];
    snprintf(shown, sizeof shown, "%.128s", value);
    return kvf__fail_value(err, KVF_E_INVALID, infos[i].name, shown, "must be %s%s", range ? "in " : "", values);
}

static kvf_status check_one(const kvf_policy_options *o, uint32_t i, const char *value, kvf_error *err) {
    char text[TEXT_MAX] = "?";
    bool ok = in_range(o, i);
    if (ok && details[i].offset == offsetof(kvf_policy_options, rho)) ok = o->rho > 0.0;
    if (ok && details[i].offset == offsetof(kvf_policy_options, metric_share)) ok = o->metric_share > 0.0;
    if (ok && details[i].offset == offsetof(kvf_policy_options, score_pool)) ok = o->score_pool % 2;
    if (ok && details[i].offset == offsetof(kvf_policy_options, repeat_piece))
        ok = o->repeat_piece == 0 || o->repeat_piece >= KVF_MIN_PIECE_TOKENS;
    if (ok && details[i].offset == offsetof(kvf_policy_options, budget_tokens))
        ok = o->budget_tokens == 0 || o->budget_tokens >= KVF_MIN_BUDGET_TOKENS;
    if (ok) return KVF_OK;
    if (!value && kvf_policy_option_get(o, infos[i].name, text, sizeof text) == KVF_OK) value = text;
    return bad_value(i, value ? value : text, err);
}

static int find_option(const char *name) {
    for (int i = 0; name && i < N_OPTIONS; i++) {
        const char *a = infos[i].name, *b = name;
        while (*a && (*a == *b || (*a == '_' && *b == '-'))) {
            a++;
            b++;
        }
        if (!*a && !*b) return i;
    }
    return -1;
}

kvf_status kvf_policy_option_set(kvf_policy_options *options, const char *name, const char *value, kvf_error *err) {
    int i = find_option(name);
    if (i < 0)
        return kvf__fail_value(err, KVF_E_NOT_FOUND, "option", name ? name : "NULL",
                               "there is none of that name; see docs/options.md");
    kvf_policy_options o;
    if (!value) return kvf__fail(err, KVF_E_INVALID, "%s: options and value must be set", infos[i].name);
    kvf_status st = kvf_policy_options_read(&o, sizeof o, options, err);
    if (st) return st;
    if (details[i].offset + sizeof(uint64_t) > options->struct_size && options->struct_size < sizeof o)
        return kvf__fail(err, KVF_E_UNSUPPORTED, "%s: the caller's kvf_policy_options of %zu bytes does not have it",
                         infos[i].name, options->struct_size);
    if (!parse_into(&o, (uint32_t)i, value)) return bad_value((uint32_t)i, value, err);
    st = check_one(&o, (uint32_t)i, value, err);
    /* Of a budget in tokens and one in bytes the later counts. */
    if (details[i].kind == BYTES && o.budget_bytes) o.budget_tokens = 0;
    if (details[i].offset == offsetof(kvf_policy_options, budget_tokens) && o.budget_tokens) o.budget_bytes = 0;
    if (!st) kvf__output(options, &o, sizeof o);
    return st;
}

/* A policy that counts its own score arrays has room for those that its options ask for. */
static kvf_status check_arrays(const kvf_policy_options *o, kvf_error *err) {
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    kvf_policy_options all = *o;
    all.budget_may_change = 1; /* as if it observed */
    kvf__roles r = kvf__score_roles(&all);
    uint32_t own = ops.n_arrays ? ops.n_arrays(&all) : r.known;
    if (own >= r.known && own <= KVF_MAX_SCORE_ARRAYS) return KVF_OK;
    return kvf__fail_value(err, KVF_E_INVALID, "policy", ops.name,
                           "n_arrays is %u: its needs and options take %u, a page has at most %u", own, r.known,
                           KVF_MAX_SCORE_ARRAYS);
}

/* merge attention goes by what a query gave each slot on average, so the score has to be a sum over queries. */
static kvf_status check_attention(const kvf_policy_options *o, kvf_error *err) {
    uint32_t sums = KVF_NEEDS_COL_SUMS | KVF_NEEDS_LAST_ROWS | KVF_NEEDS_ROW | KVF_NEEDS_SQUARES | KVF_NEEDS_REPEAT |
                    KVF_NEEDS_PROBE;
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    if (o->merge != KVF_MERGE_ATTENTION || ops.flags & KVF_POLICY_KEEPS_ALL) return KVF_OK;
    if (!(ops.needs & sums))
        return kvf__fail_value(err, KVF_E_INVALID, "merge", "attention",
                               "policy %s sees no attention: use another merge", o->ops->name);
    if (o->score == KVF_SCORE_PROMPT_PLUS_CURRENT || o->score == KVF_SCORE_WINDOW || o->score == KVF_SCORE_REPEAT)
        return kvf__fail_value(err, KVF_E_INVALID, "merge", "attention",
                               "score must be accumulate, mean, sqrt or probe: it goes by sums of all queries");
    return KVF_OK;
}

/* What does not go with a score from the model, or only with one. */
static kvf_status check_model_score(const kvf_policy_options *o, kvf_error *err) {
    kvf_policy_ops ops = kvf__policy_ops_resolve(o->ops);
    const char *score = o->score == KVF_SCORE_REPEAT ? "repeat" : "probe";
    if (o->score_mix > 0 && o->score != KVF_SCORE_PROBE)
        return kvf__fail_real(err, KVF_E_INVALID, "score_mix", o->score_mix, "needs score probe");
    if (!kvf__policy_asks_model(o))
        return o->score_norm != KVF_SCORE_NORM_OUTPUT || ops.flags & KVF_POLICY_KEEPS_ALL
                   ? KVF_OK
                   : kvf__fail_value(err, KVF_E_INVALID, "score_norm", "output",
                                     "needs score repeat; a score by attention takes v");
    if ((ops.worth && !(ops.needs & (KVF_NEEDS_REPEAT | KVF_NEEDS_PROBE))) || kvf__policy_folds(o->ops))
        return kvf__fail_value(err, KVF_E_INVALID, "score", score,
                               "policy %s goes by attention alone: use a score by attention", ops.name);
    if (o->score_norm == KVF_SCORE_NORM_V || (o->score_norm == KVF_SCORE_NORM_OUTPUT && o->score == KVF_SCORE_PROBE))
        return kvf__fail_value(err, KVF_E_INVALID, "score", score, "score_norm must be none%s",
                               o->score == KVF_SCORE_REPEAT ? " or output" : "");
    return KVF_OK;
}

kvf_status kvf_policy_options_check(const kvf_policy_options *options, uint32_t n_layers, uint32_t block_size,
                                    kvf_error *err) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    if (!o) return kvf__fail(err, KVF_E_INVALID, "policy options: start from kvf_policy_options_init");
    if (n_layers == 0 || n_layers > KVF__MAX_LAYERS || block_size == 0)
        return kvf__fail(err, KVF_E_INVALID, "n_layers %u, block_size %u: must be positive, and at most %u layers",
                         n_layers, block_size, KVF__MAX_LAYERS);
    for (uint32_t i = 0; i < N_OPTIONS; i++) {
        kvf_status st = check_one(o, i, NULL, err);
        if (st) return st;
    }
    for (uint32_t i = 0; i < o->n_full_layers; i++) {
        int64_t layer = kvf__policy_layer(o->full_layers[i], n_layers);
        if (layer < 0 || layer >= n_layers)
            return kvf__fail_real(err, KVF_E_INVALID, "full_layers", o->full_layers[i],
                                  "the model has %u layers: must be in [0, %u], last, or in [-%u, -1]", n_layers,
                                  n_layers - 1, n_layers);
    }
    kvf_status st = kvf__policy_ops_check(o->ops, err);
    if (!st) st = check_arrays(o, err);
    if (st) return st;
    if (o->budget_bytes && o->budget_tokens)
        return kvf__fail_field(err, KVF_E_INVALID, "budget_bytes", o->budget_bytes, 0,
                               "budget_tokens is %u: set one of them", o->budget_tokens);
    if (o->defer_first_decode && kvf__policy_flags(o) & KVF_POLICY_PROMPT_ONLY)
        return kvf__fail_field(err, KVF_E_INVALID, "defer_first_decode", 1, 0,
                               "policy %s compresses at its prompt's end alone", o->ops->name);
    char merge[16];
    if (o->merge != KVF_MERGE_NONE && kvf__policy_folds(o->ops) &&
        kvf_policy_option_get(o, "merge", merge, sizeof merge) == KVF_OK)
        return kvf__fail_value(err, KVF_E_INVALID, "merge", merge,
                               "policy %s hands values on by a rule of its own: use merge none", o->ops->name);
    st = check_attention(o, err);
    if (!st) st = check_model_score(o, err);
    if (st) return st;
    bool global = o->budget == KVF_BUDGET_GLOBAL;
    if ((global || o->head_budget == KVF_HEAD_BUDGET_ADAPTIVE) && o->scope == KVF_SCOPE_LAYER)
        return kvf__fail_value(err, KVF_E_INVALID, global ? "budget" : "head_budget", global ? "global" : "adaptive",
                               "needs scope head, since heads evict at different times");
    if (!global && !isnan(o->threshold))
        return kvf__fail_real(err, KVF_E_INVALID, "threshold", o->threshold, "needs budget global");
    if (global && !o->redistribute)
        return kvf__fail_value(err, KVF_E_INVALID, "budget", "global", "needs redistribute 1");
    if (o->budget_unit == KVF_BUDGET_BLOCK && !o->redistribute)
        return kvf__fail_value(err, KVF_E_INVALID, "budget_unit", "block",
                               "needs redistribute 1, or use budget_unit token");
    return KVF_OK;
}

/* ---- Values to text ------------------------------------------------------------------------------------------ */

/* The shortest decimal that reads back as x. */
static void print_real(double x, char text[40]) {
    for (int digits = 1; digits <= 17; digits++) {
        snprintf(text, 40, "%.*g", digits, x);
        double back;
        char *comma = strchr(text, localeconv()->decimal_point[0]);
        if (comma) *comma = '.';
        if (parse_real(text, &back) && memcmp(&back, &x, sizeof x) == 0) return;
    }
}

static void print_word(const char *words, uint32_t i, char *text, size_t capacity) {
    while (i > 0 && (words = strchr(words, '|'))) {
        words++;
        i--;
    }
    snprintf(text, capacity, "%.*s", words ? (int)strcspn(words, "|") : 1, words ? words : "?");
}

static void print_layers(const kvf_policy_options *o, char text[TEXT_MAX]) {
    snprintf(text, TEXT_MAX, "none");
    size_t used = 0;
    for (uint32_t i = 0; i < KVF__MIN(o->n_full_layers, KVF_MAX_FULL_LAYERS); i++) {
        const char *comma = i ? "," : "";
        int n = o->full_layers[i] == -1 ? snprintf(text + used, TEXT_MAX - used, "%slast", comma)
                                        : snprintf(text + used, TEXT_MAX - used, "%s%d", comma, o->full_layers[i]);
        if (n < 0 || (size_t)n >= TEXT_MAX - used) return;
        used += (size_t)n;
    }
}

kvf_status kvf_policy_option_get(const kvf_policy_options *given, const char *name, char *text, size_t capacity) {
    int i = find_option(name);
    kvf_policy_options copy;
    if (!text || kvf_policy_options_read(&copy, sizeof copy, given, NULL)) return KVF_E_INVALID;
    const kvf_policy_options *options = &copy;
    if (i < 0) return KVF_E_NOT_FOUND;
    char out[TEXT_MAX];
    const void *field = (const unsigned char *)options + details[i].offset;
    double real = 0.0;
    uint32_t count;
    memcpy(&count, field, sizeof count);
    if (details[i].kind == REAL || details[i].kind == GATE || details[i].kind == BOUND)
        memcpy(&real, field, sizeof real);
    switch (details[i].kind) {
    case REAL: print_real(real, out); break;
    case GATE:
    case BOUND:
        if (isnan(real))
            snprintf(out, sizeof out, "%s", details[i].kind == GATE ? "tau" : "none");
        else
            print_real(real, out);
        break;
    case COUNT: snprintf(out, sizeof out, "%u", count); break;
    case BYTES: snprintf(out, sizeof out, "%llu", (unsigned long long)options->budget_bytes); break;
    case FLAG:
    case SIGN: snprintf(out, sizeof out, "%d", (int)(int32_t)count); break;
    case CHOICE: print_word(infos[i].values, count, out, sizeof out); break;
    case PARTS: snprintf(out, sizeof out, "%u:%u", options->n_parts, options->m_parts); break;
    case LAYERS: print_layers(options, out); break;
    }
    size_t n = strlen(out) + 1;
    if (n > capacity) return KVF_E_LIMIT;
    memcpy(text, out, n);
    return KVF_OK;
}
