/* Scores: sections, their groups of units, and the statistics of each group, policy and rho. */
#define _POSIX_C_SOURCE 200809L
#include "eval/scores/scores.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/text.h"

/* ---- Figures ---------------------------------------------------------------------------------------------- */

const char *kvf__figure_name(kvf__figure figure) {
    static const char *const names[KVF__N_FIGURES] = {"kl", "nll", "nll_more", "agree", "exact", "hits"};
    return names[figure];
}

double kvf__cell_figure(const kvf__records *r, const kvf__cell *c, kvf__figure figure) {
    if (!c || c->why != KVF__NO_NAME) return NAN;
    switch (figure) {
    case KVF__FIGURE_KL: return c->kl;
    case KVF__FIGURE_NLL: return c->nll;
    case KVF__FIGURE_NLL_MORE: return c->nll - r->units[c->unit].full_nll;
    case KVF__FIGURE_AGREE: return c->agree;
    case KVF__FIGURE_EXACT: return c->exact;
    case KVF__FIGURE_HITS: return c->hits;
    case KVF__N_FIGURES: break;
    }
    return NAN;
}

/* ---- Sections ---------------------------------------------------------------------------------------------- */

static bool add_number(uint32_t **list, uint32_t *n, uint32_t number) {
    for (uint32_t i = 0; i < *n; i++)
        if ((*list)[i] == number) return true;
    uint32_t *larger = realloc(*list, (*n + 1) * sizeof **list);
    if (!larger) return false;
    *list = larger;
    larger[(*n)++] = number;
    return true;
}

static bool add_context(kvf__section *s, uint64_t context) {
    uint32_t at = 0;
    while (at < s->n_contexts && s->contexts[at] < context) at++;
    if (at < s->n_contexts && s->contexts[at] == context) return true;
    uint64_t *larger = realloc(s->contexts, (s->n_contexts + 1) * sizeof *larger);
    if (!larger) return false;
    s->contexts = larger;
    memmove(larger + at + 1, larger + at, (s->n_contexts++ - at) * sizeof *larger);
    larger[at] = context;
    return true;
}

static kvf__section *find_section(kvf__scores *scores, uint32_t measure, uint32_t table) {
    for (uint32_t i = 0; i < scores->n_sections; i++)
        if (scores->sections[i].measure == measure && scores->sections[i].table == table) return &scores->sections[i];
    kvf__section *larger = realloc(scores->sections, (scores->n_sections + 1) * sizeof *larger);
    if (!larger) return NULL;
    scores->sections = larger;
    larger[scores->n_sections] = (kvf__section){.measure = measure, .table = table, .figure = KVF__N_FIGURES};
    return &larger[scores->n_sections++];
}

static int compare_numbers(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Measures in the order in which they are asked about, then ablations. */
static int compare_sections(const kvf__records *r, const kvf__section *a, const kvf__section *b) {
    static const char *const order[] = {"divergence", "nll", "recall", "needle", "multiturn"};
    enum { N_MEASURES = sizeof order / sizeof order[0] };
    const kvf__section *const both[2] = {a, b};
    size_t at[2];
    for (int i = 0; i < 2; i++) {
        at[i] = 0;
        while (at[i] < N_MEASURES && strcmp(order[at[i]], kvf__records_name(r, both[i]->measure))) at[i]++;
        if (both[i]->table != KVF__NO_NAME) at[i] += N_MEASURES + 1;
    }
    if (at[0] != at[1]) return at[0] < at[1] ? -1 : 1;
    return strcmp(kvf__records_name(r, a->table), kvf__records_name(r, b->table));
}

static void sort_sections(kvf__scores *scores) {
    for (uint32_t i = 1; i < scores->n_sections; i++)
        for (uint32_t k = i; k > 0; k--) {
            kvf__section *s = &scores->sections[k], kept = *s;
            if (compare_sections(scores->records, s - 1, s) <= 0) break;
            s[0] = s[-1];
            s[-1] = kept;
        }
}

/* The main figure of a section, once it has this cell too: the NLL alone where nothing says what the full cache's is. */
static kvf__figure better_figure(kvf__figure now, const kvf__records *r, const kvf__cell *c) {
    if (now == KVF__FIGURE_KL || !isnan(c->kl)) return KVF__FIGURE_KL;
    if (now == KVF__FIGURE_NLL_MORE || !isnan(kvf__cell_figure(r, c, KVF__FIGURE_NLL_MORE)))
        return KVF__FIGURE_NLL_MORE;
    return KVF__FIGURE_NLL;
}

/* The cells are by table, policy, rho and unit; what a section has of each follows from one pass. */
static bool make_sections(kvf__scores *scores) {
    const kvf__records *r = scores->records;
    for (uint64_t i = 0; i < r->n_cells; i++) {
        const kvf__cell *c = &r->cells[i];
        const kvf__unit *u = &r->units[c->unit];
        kvf__section *s = find_section(scores, u->measure, c->table);
        if (!s || !add_number(&s->policies, &s->n_policies, c->policy) || !add_number(&s->rhos, &s->n_rhos, c->rho) ||
            !add_context(s, u->context))
            return false;
        /* a dialogue's answers are right token by token, and diverge, but are never right as a whole */
        s->is_task = s->is_task || (u->task != KVF__NO_NAME && c->why == KVF__NO_NAME && isnan(c->kl));
        if (c->why == KVF__NO_NAME) s->figure = better_figure(s->figure, r, c);
    }
    for (uint32_t i = 0; i < scores->n_sections; i++) {
        kvf__section *s = &scores->sections[i];
        qsort(s->rhos, s->n_rhos, sizeof *s->rhos, compare_numbers);
        qsort(s->policies, s->n_policies, sizeof *s->policies, compare_numbers); /* as the records have them */
        if (s->is_task) s->figure = KVF__FIGURE_EXACT;
        if (s->figure == KVF__N_FIGURES) s->figure = KVF__FIGURE_KL; /* all cells are empty */
        s->base = malloc(s->n_rhos * sizeof *s->base);
        if (!s->base) return false;
    }
    sort_sections(scores);
    return true;
}

/* ---- Groups ------------------------------------------------------------------------------------------------- */

/* The units of a section; a unit of a measure may have cells in some tables alone. [n_units] flags */
static bool *section_units(const kvf__records *r, const kvf__section *s) {
    bool *has = calloc(r->n_units + 1, sizeof *has);
    for (uint64_t i = 0; has && i < r->n_cells; i++)
        if (r->cells[i].table == s->table && r->units[r->cells[i].unit].measure == s->measure)
            has[r->cells[i].unit] = true;
    return has;
}

/* A "cell" is what has exactly that task, placement and context, none of them too, so that no unit is in two. */
static bool in_group(const kvf__group *g, const kvf__unit *u) {
    bool exact = !strcmp(g->by, "cell");
    return ((!g->context && !exact) || g->context == u->context) && (g->kind == KVF__NO_NAME || g->kind == u->kind) &&
           ((g->task == KVF__NO_NAME && !exact) || g->task == u->task) &&
           ((g->placement == KVF__NO_NAME && !exact) || g->placement == u->placement);
}

/* Adds the group of the units that has[] names and the wanted one describes; none when there are none. */
static bool add_group(const kvf__records *r, kvf__section *s, const bool *has, kvf__group wanted) {
    kvf__group *larger = realloc(s->groups, (s->n_groups + 1) * sizeof *larger);
    if (!larger) return false;
    s->groups = larger;
    wanted.units = malloc((r->n_units + 1) * sizeof *wanted.units);
    wanted.scores = calloc((size_t)s->n_policies * s->n_rhos, sizeof *wanted.scores);
    double right = 0, hits = 0;
    uint32_t known = 0, n_hits = 0;
    for (uint32_t u = 0; wanted.units && u < r->n_units; u++) {
        if (!has[u] || !in_group(&wanted, &r->units[u])) continue;
        wanted.units[wanted.n_units++] = u;
        if (!isnan(r->units[u].full_hits)) hits += r->units[u].full_hits, n_hits++;
        if (isnan(r->units[u].full_exact)) continue;
        right += r->units[u].full_exact;
        known++;
    }
    wanted.full = known ? right / known : NAN;
    wanted.full_hits = n_hits ? hits / n_hits : NAN;
    wanted.counts = !known || wanted.full >= KVF__FULL_LEAST - 1e-9;
    if (wanted.units && wanted.scores && (wanted.n_units || !s->n_groups)) {
        larger[s->n_groups++] = wanted;
        return true;
    }
    bool whole = wanted.units && wanted.scores;
    free(wanted.units);
    free(wanted.scores);
    return whole;
}

typedef struct values { /* what the units of a section have */
    uint32_t *kinds, *tasks, *placements;
    uint32_t n_kinds, n_tasks, n_placements;
} values;

static bool find_values(const kvf__records *r, const bool *has, values *v) {
    bool whole = true;
    for (uint32_t u = 0; whole && u < r->n_units; u++) {
        if (!has[u]) continue;
        whole = add_number(&v->kinds, &v->n_kinds, r->units[u].kind) &&
                add_number(&v->tasks, &v->n_tasks, r->units[u].task) &&
                add_number(&v->placements, &v->n_placements, r->units[u].placement);
    }
    return whole;
}

static bool text_groups(const kvf__records *r, kvf__section *s, const bool *has, const values *v) {
    kvf__group all = {.by = "all", .kind = KVF__NO_NAME, .task = KVF__NO_NAME, .placement = KVF__NO_NAME};
    bool whole = add_group(r, s, has, all);
    kvf__group g;
    for (uint32_t c = 0; whole && c < s->n_contexts; c++) {
        g = all, g.by = "context", g.context = s->contexts[c];
        whole = add_group(r, s, has, g);
    }
    for (uint32_t k = 0; whole && k < v->n_kinds; k++) {
        if (v->kinds[k] == KVF__NO_NAME) continue;
        g = all, g.by = "kind", g.kind = v->kinds[k];
        whole = add_group(r, s, has, g);
        for (uint32_t c = 0; whole && c < s->n_contexts; c++) {
            g.by = "context and kind", g.context = s->contexts[c];
            whole = add_group(r, s, has, g);
        }
    }
    return whole;
}

/* First the cells (task, context, placement): units of those that do not count are in no other group. */
static bool task_groups(const kvf__records *r, kvf__section *s, bool *has, const values *v) {
    kvf__group all = {.by = "all", .kind = KVF__NO_NAME, .task = KVF__NO_NAME, .placement = KVF__NO_NAME}, g;
    bool whole = add_group(r, s, has, all);
    for (uint32_t t = 0; whole && t < v->n_tasks; t++)
        for (uint32_t p = 0; whole && p < v->n_placements; p++)
            for (uint32_t c = 0; whole && c < s->n_contexts; c++) {
                g = all, g.by = "cell", g.task = v->tasks[t], g.placement = v->placements[p];
                g.context = s->contexts[c];
                whole = add_group(r, s, has, g);
            }
    for (uint32_t i = 1; whole && i < s->n_groups; i++)
        for (uint32_t u = 0; u < s->groups[i].n_units && !s->groups[i].counts; u++) has[s->groups[i].units[u]] = false;
    if (!whole) return false;
    /* again, of what counts; it stays even where nothing does */
    free(s->groups[0].units);
    free(s->groups[0].scores);
    kvf__section part = *s;
    part.groups = NULL, part.n_groups = 0;
    whole = add_group(r, &part, has, all);
    s->groups[0] = whole ? part.groups[0] : (kvf__group){.by = "all"};
    free(part.groups);
    for (uint32_t c = 0; whole && c < s->n_contexts; c++) {
        g = all, g.by = "context", g.context = s->contexts[c];
        whole = add_group(r, s, has, g);
    }
    for (uint32_t t = 0; whole && t < v->n_tasks; t++) {
        g = all, g.by = "task", g.task = v->tasks[t];
        if (g.task == KVF__NO_NAME) continue;
        whole = add_group(r, s, has, g);
        for (uint32_t p = 0; whole && p < v->n_placements; p++) {
            g.by = "task and placement", g.placement = v->placements[p];
            if (g.placement != KVF__NO_NAME) whole = add_group(r, s, has, g);
        }
    }
    return whole;
}

static bool make_groups(const kvf__records *r, kvf__section *s) {
    values v = {NULL, NULL, NULL, 0, 0, 0};
    bool *has = section_units(r, s);
    bool whole =
        has && find_values(r, has, &v) && (s->is_task ? task_groups(r, s, has, &v) : text_groups(r, s, has, &v));
    free(has);
    free(v.kinds);
    free(v.tasks);
    free(v.placements);
    return whole;
}

const kvf__group *kvf__section_group(const kvf__section *s, const char *by, uint64_t context, uint32_t task,
                                     uint32_t placement) {
    for (uint32_t i = 0; i < s->n_groups; i++) {
        const kvf__group *g = &s->groups[i];
        if (!strcmp(g->by, by) && g->context == context && g->task == task && g->placement == placement) return g;
    }
    return NULL;
}

const kvf__score *kvf__group_score(const kvf__section *s, const kvf__group *g, uint32_t policy, uint32_t rho) {
    return &g->scores[(size_t)policy * s->n_rhos + rho];
}

/* ---- Statistics ----------------------------------------------------------------------------------------------- */

typedef struct rows { /* what goes into one bootstrap */
    double *figures;  /* (row, column) */
    uint32_t *sources, *unit;
    uint32_t n, n_columns, n_sources;
} rows;

static bool rows_begin(rows *x, uint32_t n, uint32_t n_columns) {
    *x = (rows){.n_columns = n_columns};
    x->figures = malloc(((size_t)n * n_columns + 1) * sizeof *x->figures);
    x->unit = malloc((n + 1) * sizeof *x->unit);
    return x->figures && x->unit;
}

static void rows_free(rows *x) {
    free(x->figures);
    free(x->sources);
    free(x->unit);
}

/* The row of figures belongs to a unit of this source. */
static bool rows_add(rows *x, uint32_t source) {
    uint32_t at = 0;
    while (at < x->n_sources && x->sources[at] != source) at++;
    if (at == x->n_sources && !add_number(&x->sources, &x->n_sources, source)) return false;
    x->unit[x->n++] = at;
    return true;
}

/* Groups of a handful of units have means alone. */
static bool rows_bootstrap(const kvf__scores *scores, const kvf__group *g, const rows *x,
                           const kvf__statistic *statistics, uint32_t n, kvf__interval *out) {
    bool fine = !strcmp(g->by, "context and kind") || !strcmp(g->by, "cell");
    kvf__sample sample = {x->figures, x->n, x->n_columns, scores->by_source ? x->unit : NULL};
    return kvf__bootstrap(&sample, statistics, n, fine ? 0 : KVF__RESAMPLES, KVF__BOOTSTRAP_SEED, out);
}

/* The means of the figures in wanted[], over the units that have all of them. */
static bool score_figures(const kvf__scores *scores, const kvf__section *s, const kvf__group *g, uint32_t policy,
                          uint32_t rho, const kvf__figure *wanted, uint32_t n, kvf__score *out) {
    const kvf__records *r = scores->records;
    rows x;
    bool whole = rows_begin(&x, g->n_units, n);
    for (uint32_t i = 0; whole && i < g->n_units; i++) {
        const kvf__cell *c = kvf__records_cell(r, s->table, policy, rho, g->units[i]);
        double *to = x.figures + (size_t)x.n * n;
        bool known = true;
        for (uint32_t f = 0; f < n; f++) known = !isnan(to[f] = kvf__cell_figure(r, c, wanted[f])) && known;
        if (known) whole = rows_add(&x, r->units[g->units[i]].source);
    }
    kvf__statistic means[KVF__N_FIGURES];
    kvf__interval found[KVF__N_FIGURES];
    for (uint32_t f = 0; f < n; f++) means[f] = (kvf__statistic){f, KVF__NO_COLUMN};
    whole = whole && rows_bootstrap(scores, g, &x, means, n, found);
    for (uint32_t f = 0; whole && f < n; f++) out->figures[wanted[f]] = found[f];
    rows_free(&x);
    return whole;
}

/* All figures: those that the same units have, as is usual, in one pass. */
static bool score_means(const kvf__scores *scores, const kvf__section *s, const kvf__group *g, uint32_t policy,
                        uint32_t rho, kvf__score *out) {
    const kvf__records *r = scores->records;
    kvf__figure some[KVF__N_FIGURES];
    uint32_t n_some = 0;
    bool alike = true;
    for (kvf__figure f = 0; f < KVF__N_FIGURES; f++) {
        uint32_t n = 0;
        for (uint32_t i = 0; i < g->n_units; i++)
            n += isnan(kvf__cell_figure(r, kvf__records_cell(r, s->table, policy, rho, g->units[i]), f)) ? 0 : 1;
        out->figures[f] = (kvf__interval){NAN, NAN, NAN, 0};
        if (!n || (f == KVF__FIGURE_EXACT && !s->is_task)) continue;
        some[n_some++] = f;
        alike = alike && n == out->n;
    }
    if (alike) return !n_some || score_figures(scores, s, g, policy, rho, some, n_some, out);
    bool whole = true;
    for (uint32_t f = 0; whole && f < n_some; f++) whole = score_figures(scores, s, g, policy, rho, &some[f], 1, out);
    return whole;
}

static bool score_pairs(const kvf__scores *scores, const kvf__section *s, const kvf__group *g, uint32_t policy,
                        uint32_t rho, uint32_t base, kvf__score *out) {
    const kvf__records *r = scores->records;
    rows x;
    bool whole = rows_begin(&x, g->n_units, 3);
    for (uint32_t i = 0; whole && i < g->n_units && base != KVF__NO_NAME; i++) {
        double a = kvf__cell_figure(r, kvf__records_cell(r, s->table, policy, rho, g->units[i]), s->figure);
        double b = kvf__cell_figure(r, kvf__records_cell(r, s->table, base, rho, g->units[i]), s->figure);
        if (isnan(a) || isnan(b)) continue;
        double *to = x.figures + (size_t)x.n * 3;
        to[0] = a, to[1] = b, to[2] = a - b;
        whole = rows_add(&x, r->units[g->units[i]].source);
    }
    out->n_paired = x.n;
    kvf__statistic both[2] = {{0, 1}, {2, KVF__NO_COLUMN}};
    kvf__interval found[2];
    whole = whole && rows_bootstrap(scores, g, &x, both, 2, found);
    if (whole) out->ratio = found[0], out->more = found[1];
    rows_free(&x);
    return whole;
}

static void score_cells(const kvf__records *r, const kvf__section *s, const kvf__group *g, uint32_t policy,
                        uint32_t rho, kvf__score *out) {
    double held = 0, most = 0;
    uint32_t n_held = 0;
    out->why = KVF__NO_NAME;
    for (uint32_t i = 0; i < g->n_units; i++) {
        const kvf__cell *c = kvf__records_cell(r, s->table, policy, rho, g->units[i]);
        if (!c) {
            out->n_missing++;
        } else if (c->why != KVF__NO_NAME) {
            out->n_empty++;
            if (out->why == KVF__NO_NAME) out->why = c->why;
        } else {
            out->n++;
            double share = c->held_blocks / c->target_blocks;
            if (isnan(share) || isinf(share)) continue;
            held += share;
            if (share > most) most = share;
            out->n_over += share > KVF__HELD_MOST + 1e-9;
            n_held++;
        }
    }
    out->held = n_held ? held / n_held : NAN;
    out->held_most = n_held ? most : NAN;
}

/* ---- Baselines -------------------------------------------------------------------------------------------------- */

/* What is held against: the published policies, by the label of the policy or of one of its presets. */
static bool is_baseline(const char *label) {
    return kvf__listed(
        "streaming,h2o,roco,snapkv,pyramidkv,cam,sirllm,uniform,evict,reciprocal,exp_decay,d2o,d2o:paper,"
        "d2o:serving,d2o:authors",
        label);
}

/* The best of those that have figures at as many units as any; scores of the group "all" are there. */
static uint32_t best_baseline(const kvf__records *r, const kvf__section *s, uint32_t rho) {
    uint32_t best = KVF__NO_NAME, n_most = 0;
    double best_value = NAN;
    for (uint32_t p = 0; p < s->n_policies; p++) {
        const kvf__score *score = kvf__group_score(s, &s->groups[0], p, rho);
        double value = score->figures[s->figure].value * (s->figure == KVF__FIGURE_EXACT ? -1 : 1);
        if (!is_baseline(kvf__records_name(r, r->policies[s->policies[p]].label)) || isnan(value)) continue;
        if (score->n < n_most || (score->n == n_most && value >= best_value)) continue;
        best = s->policies[p];
        n_most = score->n;
        best_value = value;
    }
    return best;
}

static void choose_baselines(const kvf__scores *scores, kvf__section *s) {
    const kvf__records *r = scores->records;
    for (uint32_t rho = 0; rho < s->n_rhos; rho++) {
        s->base[rho] = KVF__NO_NAME;
        for (uint32_t p = 0; p < s->n_policies && s->base[rho] == KVF__NO_NAME; p++) {
            const kvf__policy_entry *entry = &r->policies[s->policies[p]];
            bool named = !strcmp(scores->baseline, kvf__records_name(r, entry->label)) ||
                         !strcmp(scores->baseline, entry->shown);
            if (named && kvf__group_score(s, &s->groups[0], p, rho)->n) s->base[rho] = s->policies[p];
        }
        if (!strcmp(scores->baseline, "best")) s->base[rho] = best_baseline(r, s, rho);
    }
}

/* An ablation changes d2o, and is held against the variant that is d2o as it is; else against its first one. */
static void choose_ablated(const kvf__records *r, kvf__section *s) {
    uint32_t options = KVF__NO_NAME, base = s->policies[0];
    for (uint32_t p = 0; p < r->n_policies; p++)
        if (!strcmp(kvf__records_name(r, r->policies[p].label), "d2o")) options = r->policies[p].options;
    for (uint32_t p = s->n_policies; p-- > 0;)
        if (options != KVF__NO_NAME && r->policies[s->policies[p]].options == options) base = s->policies[p];
    for (uint32_t rho = 0; rho < s->n_rhos; rho++) s->base[rho] = base;
}

/* ---- All of it -------------------------------------------------------------------------------------------------- */

static bool score_group(const kvf__scores *scores, const kvf__section *s, kvf__group *g) {
    for (uint32_t p = 0; p < s->n_policies; p++)
        for (uint32_t rho = 0; rho < s->n_rhos; rho++) {
            kvf__score *score = &g->scores[(size_t)p * s->n_rhos + rho];
            score_cells(scores->records, s, g, s->policies[p], s->rhos[rho], score);
            if (!score_means(scores, s, g, s->policies[p], s->rhos[rho], score)) return false;
        }
    return true;
}

static bool compare_group(const kvf__scores *scores, const kvf__section *s, kvf__group *g) {
    for (uint32_t p = 0; p < s->n_policies; p++)
        for (uint32_t rho = 0; rho < s->n_rhos; rho++)
            if (!score_pairs(scores, s, g, s->policies[p], s->rhos[rho], s->base[rho],
                             &g->scores[(size_t)p * s->n_rhos + rho]))
                return false;
    return true;
}

static bool score_section(const kvf__scores *scores, kvf__section *s) {
    bool whole = make_groups(scores->records, s);
    for (uint32_t i = 0; whole && i < s->n_groups; i++) whole = score_group(scores, s, &s->groups[i]);
    if (whole && s->table == KVF__NO_NAME) choose_baselines(scores, s);
    if (whole && s->table != KVF__NO_NAME) choose_ablated(scores->records, s);
    for (uint32_t i = 0; whole && i < s->n_groups; i++) whole = compare_group(scores, s, &s->groups[i]);
    return whole;
}

bool kvf__scores_make(kvf__scores *scores, const kvf__records *records, const char *baseline, bool by_source) {
    *scores = (kvf__scores){.records = records, .baseline = baseline, .by_source = by_source};
    bool whole = make_sections(scores);
    for (uint32_t i = 0; whole && i < scores->n_sections; i++) whole = score_section(scores, &scores->sections[i]);
    if (whole) return true;
    kvf__say("out of memory");
    kvf__scores_free(scores);
    return false;
}

void kvf__scores_free(kvf__scores *scores) {
    for (uint32_t i = 0; i < scores->n_sections; i++) {
        kvf__section *s = &scores->sections[i];
        for (uint32_t k = 0; k < s->n_groups; k++) {
            free(s->groups[k].units);
            free(s->groups[k].scores);
        }
        free(s->groups);
        free(s->policies);
        free(s->rhos);
        free(s->base);
        free(s->contexts);
    }
    free(scores->sections);
    *scores = (kvf__scores){.records = NULL};
}
