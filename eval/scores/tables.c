/* Scores as tables: for people on standard output, and as Markdown for a document. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "eval/scores/grid.h"
#include "eval/scores/scores.h"
#include "tools/occupancy.h"
#include "tools/text.h"

typedef struct writer {
    const kvf__scores *scores;
    const kvf__records *records;
    FILE *out;
    bool markdown, failed;
} writer;

/* ---- Words ------------------------------------------------------------------------------------------------- */

static const char *policy_name(const writer *w, const kvf__section *s, uint32_t policy) {
    return w->records->policies[s->policies[policy]].shown;
}

static const char *name(const writer *w, uint32_t number) { return kvf__records_name(w->records, number); }

static bool is_full(const writer *w, const kvf__section *s, uint32_t policy) {
    return !strcmp(name(w, w->records->policies[s->policies[policy]].label), "full");
}

static const char *places(const kvf__section *s) { return s->is_task ? "samples" : "places"; }
static const char *counted(const kvf__section *s, uint32_t n) {
    return n == 1 ? (s->is_task ? "sample" : "place") : places(s);
}

static void heading(const writer *w, int level, const char *text) {
    if (w->markdown)
        fprintf(w->out, "\n%.*s %s\n\n", level, "######", text);
    else
        fprintf(w->out, "\n%s\n", text);
}

static kvf__short section_title(const writer *w, const kvf__section *s) {
    static const struct {
        const char *measure, *title;
    } titles[] = {{"divergence", "Divergence from the full cache"},
                  {"nll", "Likelihood of the text"},
                  {"recall", "Recall"},
                  {"needle", "Needle"},
                  {"multiturn", "Dialogues"}};
    kvf__short t;
    snprintf(t.text, sizeof t.text, "%s", name(w, s->measure));
    for (size_t i = 0; i < sizeof titles / sizeof titles[0]; i++)
        if (!strcmp(titles[i].measure, name(w, s->measure))) snprintf(t.text, sizeof t.text, "%s", titles[i].title);
    static const struct {
        const char *table, *title;
    } tables[] = {{"4", "layer budgets"},
                  {"6", "parts of the method"},
                  {"7", "similarity of keys or values"},
                  {"8", "merge weights"},
                  {"9", "heavy hitters to recent window, and the EMA"}};
    if (s->table == KVF__NO_NAME) return t;
    int used = snprintf(t.text, sizeof t.text, "Ablation, table %.20s", name(w, s->table));
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++)
        if (!strcmp(tables[i].table, name(w, s->table)))
            snprintf(t.text + used, sizeof t.text - (size_t)used, ": %s", tables[i].title);
    return t;
}

static kvf__short group_title(const writer *w, const kvf__group *g) {
    kvf__short t = {""};
    size_t used = 0;
    const uint32_t names[] = {g->kind, g->task, g->placement};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i] != KVF__NO_NAME)
            used +=
                (size_t)snprintf(t.text + used, sizeof t.text - used, "%s%.28s", used ? ", " : "", name(w, names[i]));
    if (g->context)
        snprintf(t.text + used, sizeof t.text - used, "%scontext %.20s", used ? ", " : "",
                 kvf__show_count(g->context).text);
    else if (!used)
        snprintf(t.text, sizeof t.text, "%s", g->placement == KVF__NO_NAME ? "all" : "");
    return t;
}

/* ---- Figures ------------------------------------------------------------------------------------------------- */

typedef enum shape { SHAPE_NATS, SHAPE_SHARE, SHAPE_QUOTIENT } shape;

static shape shape_of(kvf__figure f) {
    return f == KVF__FIGURE_AGREE || f == KVF__FIGURE_EXACT || f == KVF__FIGURE_HITS ? SHAPE_SHARE : SHAPE_NATS;
}

/* "0.412 [0.380, 0.447]", and " few" where it is drawn from few. */
static kvf__short interval_text(const kvf__interval *x, shape as, bool bold) {
    kvf__short t = {"–"};
    if (isnan(x->value)) return t;
    double unit = as == SHAPE_SHARE ? 100 : 1, size = fabs(x->value);
    int digits = as == SHAPE_SHARE ? 1 : as == SHAPE_QUOTIENT ? 2 : size < 0.1 ? 4 : size < 100 ? 3 : 1;
    const char *mark = bold ? "**" : "", *end = as == SHAPE_SHARE ? "%" : "", *few = x->n < KVF__FEW ? " few" : "";
    if (isnan(x->low))
        snprintf(t.text, sizeof t.text, "%s%.*f%s%s", mark, digits, x->value * unit, end, mark);
    else
        snprintf(t.text, sizeof t.text, "%s%.*f%s%s [%.*f, %.*f]%s", mark, digits, x->value * unit, end, mark, digits,
                 x->low * unit, digits, x->high * unit, few);
    return t;
}

static bool any_figure(const kvf__section *s, const kvf__group *g, kvf__figure f) {
    for (uint32_t i = 0; i < s->n_policies * s->n_rhos; i++)
        if (!isnan(g->scores[i].figures[f].value)) return true;
    return false;
}

static bool any_base(const kvf__section *s) {
    for (uint32_t rho = 0; rho < s->n_rhos; rho++)
        if (s->base[rho] != KVF__NO_NAME) return true;
    return false;
}

/* The policies of a section, sorted by the main figure at a rho, best first, those without it last; an ablation keeps
 * the paper's order. */
static uint32_t *order_policies(const kvf__section *s, const kvf__group *g, uint32_t rho) {
    uint32_t *order = malloc((s->n_policies + 1) * sizeof *order);
    for (uint32_t p = 0; order && p < s->n_policies; p++) {
        double value = kvf__group_score(s, g, p, rho)->figures[s->figure].value * (s->is_task ? -1 : 1);
        uint32_t at = p;
        for (; at > 0 && s->table == KVF__NO_NAME; at--) {
            double before =
                kvf__group_score(s, g, order[at - 1], rho)->figures[s->figure].value * (s->is_task ? -1 : 1);
            if (!(value < before) && !(isnan(before) && !isnan(value))) break;
            order[at] = order[at - 1];
        }
        order[at] = p;
    }
    return order;
}

static void end_grid(writer *w, kvf__grid *grid) {
    if (!kvf__grid_print(grid, w->out, w->markdown)) w->failed = true;
    kvf__grid_free(grid);
}

/* ---- Policies down, figures across: one rho (for people) -------------------------------------------------------- */

static void put_count(kvf__grid *grid, const kvf__score *score, uint32_t n) {
    if (score->n == n)
        kvf__grid_add(grid, "%u", n);
    else
        kvf__grid_add(grid, "%u of %u", score->n, n);
}

static void put_held(kvf__grid *grid, const kvf__score *score) {
    if (isnan(score->held))
        kvf__grid_add(grid, "–");
    else
        kvf__grid_add(grid, "%.1f%%%s", score->held * 100, score->n_over ? "!" : "");
}

/* Columns of write_rho(): the available figures (NLL itself only if nothing gives the full cache's), the comparison
 * after the main figure, and the main figure by context. */
typedef struct columns {
    kvf__figure figures[KVF__N_FIGURES];
    uint32_t n_figures, n_contexts;
    uint32_t base;
} columns;

static columns find_columns(const kvf__section *s, const kvf__group *g, uint32_t rho) {
    columns c = {.base = s->base[rho], .n_contexts = s->n_contexts > 1 ? s->n_contexts : 0};
    uint32_t first = s->is_task ? KVF__FIGURE_EXACT : 0; /* of tasks the answers stand before their likelihood */
    for (uint32_t i = 0; i < KVF__N_FIGURES; i++) {
        kvf__figure f = (kvf__figure)((first + i) % KVF__N_FIGURES);
        if (any_figure(s, g, f) && (f != KVF__FIGURE_NLL || !any_figure(s, g, KVF__FIGURE_NLL_MORE)))
            c.figures[c.n_figures++] = f;
    }
    if (!any_figure(s, g, s->figure)) c.base = KVF__NO_NAME; /* nothing is held against it */
    return c;
}

static void put_heads(writer *w, const kvf__section *s, const columns *c, kvf__grid *grid) {
    static const char *const heads[KVF__N_FIGURES] = {"KL", "NLL", "NLL - full", "agree", "right", "tokens right"};
    kvf__grid_add(grid, "policy");
    for (uint32_t i = 0; i < c->n_figures; i++) {
        kvf__grid_add(grid, "%s", heads[c->figures[i]]);
        if (c->figures[i] == s->figure && c->base != KVF__NO_NAME)
            kvf__grid_add(grid, s->is_task ? "more than %s" : "/ %s", w->records->policies[c->base].shown);
    }
    for (uint32_t i = 0; i < c->n_contexts; i++) kvf__grid_add(grid, "at %s", kvf__show_count(s->contexts[i]).text);
    kvf__grid_add(grid, "of target");
    kvf__grid_add(grid, "%s", places(s));
}

static void put_policy(writer *w, const kvf__section *s, const columns *c, uint32_t policy, uint32_t rho,
                       kvf__grid *grid) {
    const kvf__score *score = kvf__group_score(s, &s->groups[0], policy, rho);
    shape as = s->is_task ? SHAPE_SHARE : SHAPE_NATS;
    kvf__grid_add(grid, "%s", policy_name(w, s, policy));
    for (uint32_t i = 0; i < c->n_figures; i++) {
        kvf__figure f = c->figures[i];
        kvf__grid_add(grid, "%s", interval_text(&score->figures[f], shape_of(f), false).text);
        if (f == s->figure && c->base != KVF__NO_NAME)
            kvf__grid_add(grid, "%s",
                          interval_text(s->is_task ? &score->more : &score->ratio,
                                        s->is_task ? SHAPE_SHARE : SHAPE_QUOTIENT, false)
                              .text);
    }
    for (uint32_t i = 0; i < c->n_contexts; i++) {
        const kvf__group *g = kvf__section_group(s, "context", s->contexts[i], KVF__NO_NAME, KVF__NO_NAME);
        kvf__interval mean = {NAN, NAN, NAN, 0};
        if (g) mean.value = kvf__group_score(s, g, policy, rho)->figures[s->figure].value;
        kvf__grid_add(grid, "%s", interval_text(&mean, as, false).text);
    }
    put_held(grid, score);
    put_count(grid, score, s->groups[0].n_units);
}

static void write_rho(writer *w, const kvf__section *s, uint32_t rho) {
    const kvf__group *g = &s->groups[0];
    columns c = find_columns(s, g, rho);
    uint32_t *order = order_policies(s, g, rho);
    if (!order) {
        w->failed = true;
        return;
    }
    fprintf(w->out, "\nrho %g\n", w->records->rhos[s->rhos[rho]]);
    kvf__grid grid;
    kvf__grid_begin(&grid, 3 + c.n_figures + (c.base != KVF__NO_NAME) + c.n_contexts);
    put_heads(w, s, &c, &grid);
    for (uint32_t i = 0; i < s->n_policies; i++) {
        const kvf__score *score = kvf__group_score(s, g, order[i], rho);
        if (score->n || score->n_empty) put_policy(w, s, &c, order[i], rho, &grid);
    }
    end_grid(w, &grid);
    free(order);
}

/* ---- Policies down, rhos across: one figure (for documents) ----------------------------------------------------- */

typedef kvf__short (*cell_fn)(const kvf__section *s, const kvf__score *score, kvf__figure figure, bool best);

static kvf__short figure_cell(const kvf__section *s, const kvf__score *score, kvf__figure f, bool best) {
    (void)s;
    kvf__short t = interval_text(&score->figures[f], shape_of(f), best);
    if (isnan(score->figures[f].value) && score->n_empty) snprintf(t.text, sizeof t.text, "empty");
    return t;
}

static kvf__short against_cell(const kvf__section *s, const kvf__score *score, kvf__figure f, bool best) {
    (void)f;
    (void)best;
    return s->is_task ? interval_text(&score->more, SHAPE_SHARE, false)
                      : interval_text(&score->ratio, SHAPE_QUOTIENT, false);
}

static kvf__short held_cell(const kvf__section *s, const kvf__score *score, kvf__figure f, bool best) {
    (void)s;
    (void)f;
    (void)best;
    kvf__short t = {"–"};
    if (!isnan(score->held))
        snprintf(t.text, sizeof t.text, "%.1f%% (%.1f%%)", score->held * 100, score->held_most * 100);
    return t;
}

/* Whether no policy has a better figure at this rho; the full cache is no policy. */
static bool is_best(const writer *w, const kvf__section *s, const kvf__group *g, uint32_t policy, uint32_t rho,
                    kvf__figure f) {
    double sign = shape_of(f) == SHAPE_SHARE ? -1 : 1;
    double value = kvf__group_score(s, g, policy, rho)->figures[f].value * sign;
    for (uint32_t p = 0; p < s->n_policies; p++)
        if (kvf__group_score(s, g, p, rho)->figures[f].value * sign < value && !is_full(w, s, p)) return false;
    return !isnan(value) && !is_full(w, s, policy);
}

static void write_figure(writer *w, const kvf__section *s, const kvf__group *g, kvf__figure f, cell_fn cell,
                         bool name_base) {
    uint32_t *order = order_policies(s, g, 0);
    if (!order) {
        w->failed = true;
        return;
    }
    kvf__grid grid;
    kvf__grid_begin(&grid, 1 + s->n_rhos);
    kvf__grid_add(&grid, "policy");
    for (uint32_t rho = 0; rho < s->n_rhos; rho++) {
        double at = w->records->rhos[s->rhos[rho]];
        if (name_base && s->base[rho] != KVF__NO_NAME)
            kvf__grid_add(&grid, "rho %g, %s %s", at, s->is_task ? "more than" : "/",
                          w->records->policies[s->base[rho]].shown);
        else
            kvf__grid_add(&grid, "rho %g", at);
    }
    for (uint32_t i = 0; i < s->n_policies; i++) {
        kvf__grid_add(&grid, "%s", policy_name(w, s, order[i]));
        for (uint32_t rho = 0; rho < s->n_rhos; rho++)
            kvf__grid_add(&grid, "%s",
                          cell(s, kvf__group_score(s, g, order[i], rho), f, is_best(w, s, g, order[i], rho, f)).text);
    }
    end_grid(w, &grid);
    free(order);
}

/* ---- What is left out ------------------------------------------------------------------------------------------- */

static void write_uncounted(writer *w, const kvf__section *s) {
    bool first = true;
    for (uint32_t i = 0; i < s->n_groups; i++) {
        const kvf__group *g = &s->groups[i];
        if (strcmp(g->by, "cell") || g->counts) continue;
        if (first)
            fprintf(w->out, "\nNot counted, since the full cache answers less than %.0f%%:\n%s", KVF__FULL_LEAST * 100,
                    w->markdown ? "\n" : "");
        fprintf(w->out, "%s%s: %.0f%% of %u\n", w->markdown ? "- " : "  ", group_title(w, g).text, g->full * 100,
                g->n_units);
        first = false;
    }
}

static void write_empty(writer *w, const kvf__section *s) {
    bool first = true;
    for (uint32_t p = 0; p < s->n_policies; p++)
        for (uint32_t rho = 0; rho < s->n_rhos; rho++) {
            const kvf__score *score = kvf__group_score(s, &s->groups[0], p, rho);
            if (!score->n_empty && !score->n_over) continue;
            if (first) fprintf(w->out, "\nEmpty cells, and cells that held too much:\n%s", w->markdown ? "\n" : "");
            first = false;
            fprintf(w->out, "%s%s at rho %g: ", w->markdown ? "- " : "  ", policy_name(w, s, p),
                    w->records->rhos[s->rhos[rho]]);
            if (score->n_empty)
                fprintf(w->out, "%u empty%s: %s", score->n_empty, score->n_empty > 1 ? ", the first" : "",
                        name(w, score->why));
            if (score->n_over)
                fprintf(w->out, "%s%u held more than %.0f%% of the target", score->n_empty ? "; " : "", score->n_over,
                        KVF__HELD_MOST * 100);
            fputc('\n', w->out);
        }
}

static uint32_t count_sources(const writer *w, const kvf__group *g) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_units; i++) {
        uint32_t before = 0;
        while (before < i && w->records->units[g->units[before]].source != w->records->units[g->units[i]].source)
            before++;
        n += before == i;
    }
    return n;
}

static void write_basis(const writer *w, const kvf__section *s) {
    const kvf__group *all = &s->groups[0];
    uint32_t n_sources = count_sources(w, all);
    fprintf(w->out, "Over %u %s of %u source%s", all->n_units, counted(s, all->n_units), n_sources,
            n_sources == 1 ? "" : "s");
    for (uint32_t c = 0; c < s->n_contexts; c++)
        fprintf(w->out, "%s%s", !c ? (s->n_contexts > 1 ? "; contexts " : "; context ") : ", ",
                kvf__show_count(s->contexts[c]).text);
    fprintf(w->out, ". Intervals: 95%%, paired bootstrap, %s resamples of %s.\n", kvf__show_count(KVF__RESAMPLES).text,
            w->scores->by_source ? "whole sources" : places(s));
    uint32_t n_drawn = w->scores->by_source ? n_sources : all->n_units;
    if (n_drawn < KVF__FEW)
        fprintf(w->out, "Few: drawn from %u, under %d; such an interval is too narrow, and who leads may be chance.\n",
                n_drawn, KVF__FEW);
    if (s->is_task && !isnan(all->full)) fprintf(w->out, "The full cache answers %.1f%%.\n", all->full * 100);
    if (!s->is_task && !isnan(all->full_hits))
        fprintf(w->out, "The full cache has %.1f%% of the tokens right.\n", all->full_hits * 100);
}

/* ---- For people -------------------------------------------------------------------------------------------------- */

bool kvf__scores_text(const kvf__scores *scores) {
    writer w = {scores, scores->records, stdout, false, false};
    for (uint32_t i = 0; i < scores->n_sections && !w.failed; i++) {
        const kvf__section *s = &scores->sections[i];
        if (i) fputc('\n', w.out);
        fprintf(w.out, "%s\n", section_title(&w, s).text);
        write_basis(&w, s);
        for (uint32_t rho = 0; rho < s->n_rhos; rho++) write_rho(&w, s, rho);
        write_uncounted(&w, s);
        write_empty(&w, s);
    }
    if (w.failed) kvf__say("out of memory");
    return !w.failed;
}

/* ---- For documents ------------------------------------------------------------------------------------------------ */

static void write_groups(writer *w, const kvf__section *s, const char *by, kvf__figure f, cell_fn cell, bool base) {
    for (uint32_t i = 0; i < s->n_groups; i++) {
        const kvf__group *g = &s->groups[i];
        if (strcmp(g->by, by) || (cell == figure_cell && !any_figure(s, g, f))) continue;
        if (!strcmp(by, "context") && s->n_contexts == 1) continue;
        if (!isnan(g->full))
            fprintf(w->out, "\n%s (%u %s; the full cache: %.0f%%)\n\n", group_title(w, g).text, g->n_units,
                    counted(s, g->n_units), g->full * 100);
        else
            fprintf(w->out, "\n%s (%u %s)\n\n", group_title(w, g).text, g->n_units, counted(s, g->n_units));
        write_figure(w, s, g, f, cell, base);
    }
}

static void write_memory(writer *w, const kvf__section *s) {
    bool known = false;
    for (uint32_t i = 0; i < s->n_policies * s->n_rhos; i++) known = known || !isnan(s->groups[0].scores[i].held);
    if (!known) return;
    heading(w, 4, "Memory: blocks held over the target, mean (most)");
    write_figure(w, s, &s->groups[0], s->figure, held_cell, false);
}

static void write_text_section(writer *w, const kvf__section *s) {
    static const struct {
        kvf__figure figure;
        const char *title;
    } tables[] = {{KVF__FIGURE_KL, "KL divergence, nats a token"},
                  {KVF__FIGURE_NLL_MORE, "NLL above the full cache's, nats a token"},
                  {KVF__FIGURE_NLL, "NLL, nats a token"},
                  {KVF__FIGURE_AGREE, "Tokens at which both caches have the same likeliest token"},
                  {KVF__FIGURE_HITS, "Tokens at which the likeliest token is the true one"}};
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        if (!any_figure(s, &s->groups[0], tables[i].figure)) continue;
        if (tables[i].figure == KVF__FIGURE_NLL && any_figure(s, &s->groups[0], KVF__FIGURE_NLL_MORE)) continue;
        heading(w, 4, tables[i].title);
        write_figure(w, s, &s->groups[0], tables[i].figure, figure_cell, false);
        if (s->table == KVF__NO_NAME) write_groups(w, s, "context", tables[i].figure, figure_cell, false);
        if (s->table == KVF__NO_NAME && tables[i].figure == s->figure)
            write_groups(w, s, "kind", tables[i].figure, figure_cell, false);
        if (tables[i].figure != s->figure || !any_base(s)) continue;
        heading(w, 4, "Ratio of means to the baseline");
        write_figure(w, s, &s->groups[0], s->figure, against_cell, true);
        if (s->table == KVF__NO_NAME) write_groups(w, s, "context", s->figure, against_cell, true);
    }
}

static void write_task_section(writer *w, const kvf__section *s) {
    heading(w, 4, "Right answers");
    write_figure(w, s, &s->groups[0], KVF__FIGURE_EXACT, figure_cell, false);
    write_groups(w, s, "context", KVF__FIGURE_EXACT, figure_cell, false);
    write_groups(w, s, "task and placement", KVF__FIGURE_EXACT, figure_cell, false);
    if (any_base(s)) {
        heading(w, 4, "Right answers minus the baseline's");
        write_figure(w, s, &s->groups[0], KVF__FIGURE_EXACT, against_cell, true);
    }
    static const struct {
        kvf__figure figure;
        const char *title;
    } more[] = {{KVF__FIGURE_HITS, "Right tokens of the answers"},
                {KVF__FIGURE_NLL_MORE, "NLL of the answers above the full cache's, nats a token"}};
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
        if (!any_figure(s, &s->groups[0], more[i].figure)) continue;
        heading(w, 4, more[i].title);
        write_figure(w, s, &s->groups[0], more[i].figure, figure_cell, false);
    }
}

bool kvf__scores_markdown(const kvf__scores *scores, const char *path) {
    kvf__out_file out;
    if (!kvf__out_open(&out, path)) return false;
    writer w = {scores, scores->records, out.file, true, false};
    for (uint32_t i = 0; i < scores->n_sections && !w.failed; i++) {
        const kvf__section *s = &scores->sections[i];
        fprintf(w.out, "%s### %s\n\n", i ? "\n" : "", section_title(&w, s).text);
        write_basis(&w, s);
        if (s->is_task)
            write_task_section(&w, s);
        else
            write_text_section(&w, s);
        write_memory(&w, s);
        write_uncounted(&w, s);
        write_empty(&w, s);
    }
    if (w.failed) kvf__say("out of memory");
    return kvf__out_close(&out) && !w.failed;
}
