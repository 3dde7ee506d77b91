/* Scores as one JSON object: the machine-readable summary, and the data of the page. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "eval/scores/scores.h"
#include "tools/page.h"

enum { CURVE_POINTS = 96 };

static json_t *real(double x) { return kvf__json_number(x); }

static json_t *name_json(const kvf__records *r, uint32_t name) {
    return name == KVF__NO_NAME ? json_null() : json_string(kvf__records_name(r, name));
}

static json_t *interval_json(const kvf__interval *x) {
    return json_pack("[o, o, o]", real(x->value), real(x->low), real(x->high));
}

static json_t *count(uint64_t n) { return json_integer((json_int_t)n); }

/* ---- Scores ----------------------------------------------------------------------------------------------- */

static json_t *score_json(const kvf__records *r, const kvf__score *s) {
    json_t *o = json_pack("{s:i, s:i, s:i, s:o, s:i, s:i, s:o, s:o}", "n", (int)s->n, "empty", (int)s->n_empty,
                          "missing", (int)s->n_missing, "why", name_json(r, s->why), "paired", (int)s->n_paired, "over",
                          (int)s->n_over, "held", real(s->held), "held_most", real(s->held_most));
    uint32_t n_drawn = 0;
    for (kvf__figure f = 0; f < KVF__N_FIGURES; f++) n_drawn = s->figures[f].n > n_drawn ? s->figures[f].n : n_drawn;
    json_object_set_new(o, "drawn", count(n_drawn));
    json_object_set_new(o, "drawn_pairs", count(s->ratio.n));
    for (kvf__figure f = 0; f < KVF__N_FIGURES; f++)
        if (!isnan(s->figures[f].value)) json_object_set_new(o, kvf__figure_name(f), interval_json(&s->figures[f]));
    if (!s->n_paired) return o;
    json_object_set_new(o, "ratio", interval_json(&s->ratio));
    json_object_set_new(o, "more", interval_json(&s->more));
    return o;
}

static json_t *group_json(const kvf__records *r, const kvf__section *s, const kvf__group *g) {
    json_t *scores = json_array();
    for (uint32_t p = 0; p < s->n_policies; p++) {
        json_t *row = json_array();
        for (uint32_t rho = 0; rho < s->n_rhos; rho++)
            json_array_append_new(row, score_json(r, kvf__group_score(s, g, p, rho)));
        json_array_append_new(scores, row);
    }
    return json_pack("{s:s, s:o, s:o, s:o, s:o, s:i, s:o, s:o, s:b, s:o}", "by", g->by, "context",
                     g->context ? count(g->context) : json_null(), "kind", name_json(r, g->kind), "task",
                     name_json(r, g->task), "placement", name_json(r, g->placement), "units", (int)g->n_units, "full",
                     real(g->full), "full_hits", real(g->full_hits), "counts", (int)g->counts, "scores", scores);
}

/* ---- Units: every figure, for tables and maps ------------------------------------------------------------------ */

static json_t *unit_json(const kvf__records *r, const kvf__unit *u) {
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "source", name_json(r, u->source),
                     "kind", name_json(r, u->kind), "context", count(u->context), "offset", count(u->offset), "sample",
                     count(u->sample), "seed", count(u->seed), "task", name_json(r, u->task), "placement",
                     name_json(r, u->placement), "depth", real(u->depth), "full_nll", real(u->full_nll), "full_exact",
                     real(u->full_exact));
}

/* (policy, rho, unit): null where there is none. The units are those of all groups, counted or not. */
static json_t *values_json(const kvf__records *r, const kvf__section *s, const uint32_t *units, uint32_t n,
                           kvf__figure figure) {
    json_t *out = json_array();
    for (uint32_t p = 0; p < s->n_policies; p++) {
        json_t *rows = json_array();
        for (uint32_t rho = 0; rho < s->n_rhos; rho++) {
            json_t *row = json_array();
            for (uint32_t u = 0; u < n; u++)
                json_array_append_new(
                    row, real(kvf__cell_figure(
                             r, kvf__records_cell(r, s->table, s->policies[p], s->rhos[rho], units[u]), figure)));
            json_array_append_new(rows, row);
        }
        json_array_append_new(out, rows);
    }
    return out;
}

static bool add_units(json_t *o, const kvf__records *r, const kvf__section *s) {
    uint32_t *units = malloc((r->n_units + 1) * sizeof *units), n = 0;
    json_t *list = json_array(), *values = json_object();
    const char *by = s->is_task ? "cell" : "all";
    for (uint32_t i = 0; units && i < s->n_groups; i++) {
        const kvf__group *g = &s->groups[i];
        for (uint32_t u = 0; !strcmp(g->by, by) && u < g->n_units; u++) {
            units[n++] = g->units[u];
            json_array_append_new(list, unit_json(r, &r->units[g->units[u]]));
        }
    }
    const kvf__figure of_texts[] = {KVF__FIGURE_KL, KVF__FIGURE_NLL_MORE, KVF__FIGURE_NLL}, of_task = KVF__FIGURE_EXACT;
    const kvf__figure *figures = s->is_task ? &of_task : of_texts;
    uint32_t n_figures = s->is_task ? 1 : s->figure == KVF__FIGURE_NLL ? 3 : 2;
    for (uint32_t f = 0; units && f < n_figures; f++)
        json_object_set_new(values, kvf__figure_name(figures[f]), values_json(r, s, units, n, figures[f]));
    json_object_set_new(o, "units", list);
    json_object_set_new(o, "values", values);
    free(units);
    return units != NULL;
}

/* ---- Curves: running means by position --------------------------------------------------------------------------- */

typedef enum curve { CURVE_NLL, CURVE_NLL_MORE, CURVE_KL, CURVE_FULL } curve;

static double token_figure(const kvf__cell *c, const kvf__unit *u, curve kind, uint32_t t) {
    double full = u->full_nll_by_token && t < u->n_tokens ? (double)u->full_nll_by_token[t] : NAN;
    if (kind == CURVE_FULL) return full;
    if (!c || t >= c->n_tokens) return NAN;
    if (kind == CURVE_KL) return c->kl_by_token ? (double)c->kl_by_token[t] : NAN;
    double nll = c->nll_by_token ? (double)c->nll_by_token[t] : NAN;
    return kind == CURVE_NLL ? nll : nll - full;
}

static uint32_t longest(const kvf__records *r) {
    uint32_t n = 0;
    for (uint64_t i = 0; i < r->n_cells; i++)
        if ((r->cells[i].nll_by_token || r->cells[i].kl_by_token) && r->cells[i].n_tokens > n) n = r->cells[i].n_tokens;
    return n;
}

/* Of point i of `points`: the tokens before its end. */
static uint32_t point_end(uint32_t i, uint32_t points, uint32_t n) {
    return (uint32_t)(((uint64_t)i + 1) * n / points);
}

/* The mean up to each position, over the group's units; null when none has the figures. policy KVF__NO_NAME: any. */
static json_t *curve_json(const kvf__records *r, const kvf__section *s, const kvf__group *g, uint32_t policy,
                          uint32_t rho, curve kind, uint32_t n, double *sums) {
    uint32_t points = n < CURVE_POINTS ? n : CURVE_POINTS;
    memset(sums, 0, 2 * n * sizeof *sums); /* sums, then how many */
    for (uint32_t u = 0; u < g->n_units; u++) {
        const kvf__cell *c = policy == KVF__NO_NAME ? NULL : kvf__records_cell(r, s->table, policy, rho, g->units[u]);
        if (policy != KVF__NO_NAME && (!c || c->why != KVF__NO_NAME)) continue;
        for (uint32_t t = 0; t < n; t++) {
            double x = token_figure(c, &r->units[g->units[u]], kind, t);
            if (isnan(x)) continue;
            sums[t] += x;
            sums[n + t]++;
        }
    }
    json_t *out = json_array();
    double sum = 0, many = 0;
    for (uint32_t i = 0, t = 0; i < points; i++) {
        for (; t < point_end(i, points, n); t++) sum += sums[t], many += sums[n + t];
        json_array_append_new(out, many > 0 ? real(sum / many) : json_null());
    }
    if (many > 0) return out;
    json_decref(out);
    return json_null();
}

static json_t *group_curves(const kvf__records *r, const kvf__section *s, const kvf__group *g, uint32_t n,
                            double *sums) {
    static const char *const names[] = {"nll", "nll_more", "kl"};
    json_t *o = json_object();
    for (curve k = CURVE_NLL; k <= CURVE_KL; k++) {
        json_t *policies = json_array();
        for (uint32_t p = 0; p < s->n_policies; p++) {
            json_t *row = json_array();
            for (uint32_t rho = 0; rho < s->n_rhos; rho++)
                json_array_append_new(row, curve_json(r, s, g, s->policies[p], s->rhos[rho], k, n, sums));
            json_array_append_new(policies, row);
        }
        json_object_set_new(o, names[k], policies);
    }
    json_object_set_new(o, "full", curve_json(r, s, g, KVF__NO_NAME, 0, CURVE_FULL, n, sums));
    json_object_set_new(o, "context", g->context ? count(g->context) : json_null());
    return o;
}

static bool add_curves(json_t *o, const kvf__records *r, const kvf__section *s) {
    uint32_t n = longest(r), points = n < CURVE_POINTS ? n : CURVE_POINTS;
    json_t *ends = json_array(), *list = json_array();
    double *sums = malloc((2 * (size_t)n + 1) * sizeof *sums);
    for (uint32_t i = 0; i < points; i++) json_array_append_new(ends, count(point_end(i, points, n)));
    for (uint32_t i = 0; sums && n && i < s->n_groups; i++)
        if (!strcmp(s->groups[i].by, "all") || (!strcmp(s->groups[i].by, "context") && s->n_contexts > 1))
            json_array_append_new(list, group_curves(r, s, &s->groups[i], n, sums));
    json_object_set_new(o, "curves", json_pack("{s:o, s:o}", "ends", ends, "groups", list));
    free(sums);
    return sums != NULL;
}

/* ---- Layers ------------------------------------------------------------------------------------------------------ */

/* What a layer has of the budget, 1 being an equal share, on average over the cells; null when none says. */
static json_t *budget_json(const kvf__records *r, const kvf__section *s, uint32_t policy, uint32_t rho) {
    double *sums = NULL;
    uint32_t n_layers = 0, n = 0;
    for (uint32_t i = 0; i < s->groups[0].n_units; i++) {
        const kvf__cell *c = kvf__records_cell(r, s->table, policy, rho, s->groups[0].units[i]);
        const float *sizes = c && c->sizes ? c->sizes : c ? c->blocks : NULL;
        double total = 0;
        for (uint32_t l = 0; sizes && l < c->n_layers; l++) total += (double)sizes[l];
        if (!(total > 0) || (sums && c->n_layers != n_layers)) continue;
        if (!sums) sums = calloc(n_layers = c->n_layers, sizeof *sums);
        for (uint32_t l = 0; sums && l < n_layers; l++) sums[l] += (double)sizes[l] / total * n_layers;
        n++;
    }
    json_t *out = sums ? json_array() : json_null();
    for (uint32_t l = 0; sums && l < n_layers; l++) json_array_append_new(out, real(sums[l] / n));
    free(sums);
    return out;
}

/* The same by layer and head group; null when none says, or the models differ. */
static json_t *heads_json(const kvf__records *r, const kvf__section *s, uint32_t policy, uint32_t rho) {
    double *sums = NULL;
    uint32_t n_layers = 0, n_groups = 0, n = 0;
    for (uint32_t i = 0; i < s->groups[0].n_units; i++) {
        const kvf__cell *c = kvf__records_cell(r, s->table, policy, rho, s->groups[0].units[i]);
        if (!c || !c->group_sizes || (sums && (c->n_layers != n_layers || c->n_groups != n_groups))) continue;
        uint32_t n_tables = c->n_layers * c->n_groups;
        double total = 0;
        for (uint32_t t = 0; t < n_tables; t++) total += (double)c->group_sizes[t];
        if (n_tables == 0 || !(total > 0)) continue;
        if (!sums) sums = calloc(n_tables, sizeof *sums), n_layers = c->n_layers, n_groups = c->n_groups;
        for (uint32_t t = 0; sums && t < n_tables; t++) sums[t] += (double)c->group_sizes[t] / total * n_tables;
        n++;
    }
    json_t *out = sums ? json_array() : json_null();
    for (uint32_t l = 0; sums && l < n_layers; l++) {
        json_t *row = json_array();
        for (uint32_t g = 0; g < n_groups; g++) json_array_append_new(row, real(sums[l * n_groups + g] / n));
        json_array_append_new(out, row);
    }
    free(sums);
    return out;
}

/* The mean of the densities (or variances) over the section's units that tell of them; all policies have the same. */
static json_t *layers_json(const kvf__records *r, const kvf__section *s, bool density) {
    double *sums = NULL;
    uint32_t n_layers = 0, n = 0;
    for (uint32_t i = 0; i < s->groups[0].n_units; i++) {
        const kvf__unit *u = &r->units[s->groups[0].units[i]];
        const float *values = density ? u->density : u->variance;
        if (!values || (sums && u->n_layers != n_layers)) continue;
        if (!sums) sums = calloc(n_layers = u->n_layers, sizeof *sums);
        for (uint32_t l = 0; sums && l < n_layers; l++) sums[l] += (double)values[l];
        n++;
    }
    json_t *out = sums ? json_array() : json_null();
    for (uint32_t l = 0; sums && l < n_layers; l++) json_array_append_new(out, real(sums[l] / n));
    free(sums);
    return out;
}

/* [policy][rho] of one of the two above. */
static json_t *budgets_json(const kvf__records *r, const kvf__section *s,
                            json_t *(*of)(const kvf__records *, const kvf__section *, uint32_t, uint32_t)) {
    json_t *out = json_array();
    for (uint32_t p = 0; p < s->n_policies; p++) {
        json_t *row = json_array();
        for (uint32_t rho = 0; rho < s->n_rhos; rho++)
            json_array_append_new(row, of(r, s, s->policies[p], s->rhos[rho]));
        json_array_append_new(out, row);
    }
    return out;
}

/* ---- All of it --------------------------------------------------------------------------------------------------- */

/* The policy with the best main figure at a rho over all units, of equal ones the first; the full cache is none. */
static json_t *best_json(const kvf__records *r, const kvf__section *s, uint32_t rho) {
    const char *best = NULL;
    double least = NAN;
    for (uint32_t p = 0; p < s->n_policies; p++) {
        const kvf__policy_entry *policy = &r->policies[s->policies[p]];
        double value = kvf__group_score(s, &s->groups[0], p, rho)->figures[s->figure].value * (s->is_task ? -1 : 1);
        if (isnan(value) || !(isnan(least) || value < least) || !strcmp(kvf__records_name(r, policy->label), "full"))
            continue;
        best = policy->shown;
        least = value;
    }
    return best ? json_string(best) : json_null();
}

static json_t *section_json(const kvf__records *r, const kvf__section *s, bool curves) {
    json_t *o = json_object(), *policies = json_array(), *rhos = json_array(), *base = json_array();
    json_t *best = json_array(), *contexts = json_array(), *groups = json_array();
    for (uint32_t p = 0; p < s->n_policies; p++)
        json_array_append_new(policies, json_string(r->policies[s->policies[p]].shown));
    for (uint32_t i = 0; i < s->n_rhos; i++) {
        json_array_append_new(rhos, real(r->rhos[s->rhos[i]]));
        json_array_append_new(best, best_json(r, s, i));
        json_array_append_new(base,
                              s->base[i] == KVF__NO_NAME ? json_null() : json_string(r->policies[s->base[i]].shown));
    }
    for (uint32_t c = 0; c < s->n_contexts; c++) json_array_append_new(contexts, count(s->contexts[c]));
    for (uint32_t g = 0; g < s->n_groups; g++) json_array_append_new(groups, group_json(r, s, &s->groups[g]));
    json_object_set_new(o, "measure", name_json(r, s->measure));
    json_object_set_new(o, "table", name_json(r, s->table));
    json_object_set_new(o, "task", json_boolean(s->is_task));
    json_object_set_new(o, "figure", json_string(kvf__figure_name(s->figure)));
    json_object_set_new(o, "policies", policies);
    json_object_set_new(o, "rhos", rhos);
    json_object_set_new(o, "baselines", base);
    json_object_set_new(o, "best", best);
    json_object_set_new(o, "contexts", contexts);
    json_object_set_new(o, "groups", groups);
    json_object_set_new(o, "budgets", budgets_json(r, s, budget_json));
    json_object_set_new(o, "head_budgets", budgets_json(r, s, heads_json));
    json_object_set_new(o, "density", layers_json(r, s, true));
    json_object_set_new(o, "variance", layers_json(r, s, false));
    bool whole = add_units(o, r, s) && (!curves || s->is_task || add_curves(o, r, s));
    if (whole) return o;
    json_decref(o);
    return NULL;
}

static json_t *policies_json(const kvf__records *r) {
    json_t *out = json_array();
    for (uint32_t p = 0; p < r->n_policies; p++) {
        json_t *options = json_loads(kvf__records_name(r, r->policies[p].options), 0, NULL);
        json_array_append_new(out, json_pack("{s:s, s:o, s:o}", "name", r->policies[p].shown, "label",
                                             name_json(r, r->policies[p].label), "options",
                                             options ? options : json_null()));
    }
    return out;
}

json_t *kvf__scores_json(const kvf__scores *scores, bool curves) {
    const kvf__records *r = scores->records;
    json_t *o = json_object(), *sections = json_array();
    for (uint32_t i = 0; i < scores->n_sections; i++) {
        json_t *section = section_json(r, &scores->sections[i], curves);
        if (section && !json_array_append_new(sections, section)) continue;
        json_decref(sections);
        json_decref(o);
        return NULL;
    }
    json_object_set_new(o, "version", json_string(kvf_version()));
    json_object_set_new(o, "cells", count(r->n_cells));
    json_object_set_new(o, "bad_lines", count(r->n_bad));
    json_object_set_new(o, "replaced", count(r->n_replaced));
    json_object_set_new(o, "left_out", count(r->n_left_out));
    json_object_set_new(o, "baseline", json_string(scores->baseline));
    json_object_set_new(o, "resamples", json_integer(KVF__RESAMPLES));
    json_object_set_new(o, "resampled", json_string(scores->by_source ? "sources" : "pairs"));
    json_object_set_new(o, "few", json_integer(KVF__FEW));
    json_object_set_new(o, "full_least", real(KVF__FULL_LEAST));
    json_object_set(o, "sources", r->sources);
    json_object_set(o, "runs", r->runs);
    json_object_set_new(o, "policies", policies_json(r));
    json_object_set_new(o, "sections", sections);
    return o;
}

extern const unsigned char kvf__scores_head[], kvf__scores_tail[];
extern const size_t kvf__scores_head_bytes, kvf__scores_tail_bytes;

bool kvf__scores_page(const kvf__scores *s, const char *path) {
    kvf__page page = {kvf__scores_head, kvf__scores_tail, kvf__scores_head_bytes, kvf__scores_tail_bytes};
    return kvf__page_write(page, kvf__scores_json(s, true), 6, path, "html");
}
