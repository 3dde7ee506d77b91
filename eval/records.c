/* Records of the output: the fields of each line, and the key that identifies a cell. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"

const char *const kvf__measure_names[] = {"nll", "divergence", "needle", "recall", "multiturn", "ablation"};

/* ---- Values ----------------------------------------------------------------------------------------------- */

/* Six digits: enough for a token, and a third of the bytes. */
static json_t *short_number(double x) {
    char text[40];
    if (!isfinite(x)) return json_null();
    snprintf(text, sizeof text, "%.6g", x);
    return json_real(strtod(text, NULL));
}

static bool counts(const kvf__eval_item *item, uint32_t step) { return !item->counts || item->counts[step]; }

static double mean_of(const kvf__eval_item *item, const double *values) {
    double sum = 0;
    for (uint32_t i = 0; i < item->n_forced; i++)
        if (counts(item, i)) sum += values[i];
    return sum / item->n_scored;
}

static uint32_t sum_of(const kvf__eval_item *item, const uint8_t *values) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < item->n_forced; i++)
        if (counts(item, i)) sum += values[i];
    return sum;
}

static json_t *numbers(const kvf__eval_item *item, const double *values) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < item->n_forced; i++)
        if (counts(item, i)) json_array_append_new(list, short_number(values[i]));
    return list;
}

static json_t *flags(const kvf__eval_item *item, const uint8_t *values) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < item->n_forced; i++)
        if (counts(item, i)) json_array_append_new(list, json_integer(values[i]));
    return list;
}

static json_t *integers(const uint32_t *values, uint32_t n) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < n; i++) json_array_append_new(list, json_integer(values[i]));
    return list;
}

static json_t *reals(const double *values, uint32_t n) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < n; i++) json_array_append_new(list, kvf__json_number(values[i]));
    return list;
}

static json_t *text(const char *value) { return kvf__json_text(value, strlen(value)); }

/* ---- Keys ------------------------------------------------------------------------------------------------- */

/* What a record is about, as it begins. An ablation is a divergence with a table. */
static json_t *begin(const char *record, const kvf__eval_item *item, kvf__measure measure) {
    json_t *o = json_object();
    if (measure == KVF__MEASURE_ABLATION) measure = KVF__MEASURE_DIVERGENCE;
    json_object_set_new(o, "record", json_string(record));
    json_object_set_new(o, "measure", json_string(kvf__measure_names[measure]));
    json_object_set_new(o, "source", text(item->source));
    json_object_set_new(o, "kind", text(item->kind));
    json_object_set_new(o, "context", json_integer(item->context));
    json_object_set_new(o, "offset", json_integer((json_int_t)item->offset));
    json_object_set_new(o, "sample", json_integer(item->sample));
    json_object_set_new(o, "n_prompt", json_integer(item->n_prompt));
    json_object_set_new(o, "n_scored", json_integer(item->n_scored));
    if (item->task) json_object_set_new(o, "task", json_string(item->task));
    if (item->placement) json_object_set_new(o, "placement", json_string(item->placement));
    if (item->task) json_object_set_new(o, "seed", json_integer((json_int_t)item->seed));
    if (!isnan(item->depth)) json_object_set_new(o, "depth", short_number(item->depth));
    return o;
}

static json_t *begin_cell(const kvf__eval_item *item, const kvf__eval_cell *cell, kvf__measure measure, uint32_t k) {
    json_t *o = begin("cell", item, measure);
    if (cell->policy->table) json_object_set_new(o, "table", json_string(cell->policy->table));
    json_object_set_new(o, "policy", text(cell->policy->label));
    json_object_set(o, "policy_options", cell->policy->json);
    json_object_set_new(o, "rho", short_number(cell->rho));
    json_object_set_new(o, "seed", json_integer((json_int_t)cell->seed));
    json_object_set_new(o, "k", json_integer(k));
    return o;
}

json_t *kvf__eval_key(const json_t *record) {
    static const char *const fields[] = {"record", "measure",   "source", "context", "offset", "sample",
                                         "task",   "placement", "depth",  "table",   "policy", "policy_options",
                                         "rho",    "seed",      "k",      "n_scored"};
    json_t *key = json_array();
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        json_t *value = json_object_get(record, fields[i]);
        json_array_append_new(key, value ? json_incref(value) : json_null());
    }
    /* As text without an order of fields, and with numbers as a line has them. */
    char *flat = json_dumps(key, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(10));
    json_t *result = flat ? json_string(flat) : NULL;
    free(flat);
    json_decref(key);
    return result;
}

json_t *kvf__eval_cell_key(const kvf__eval_item *item, const kvf__eval_cell *cell, kvf__measure measure, uint32_t k) {
    json_t *record = begin_cell(item, cell, measure, k), *key = kvf__eval_key(record);
    json_decref(record);
    return key;
}

json_t *kvf__eval_text_key(const kvf__eval_item *item, kvf__measure measure) {
    json_t *record = begin(item->task ? "sample" : "text", item, measure), *key = kvf__eval_key(record);
    json_decref(record);
    return key;
}

/* ---- Records ---------------------------------------------------------------------------------------------- */

json_t *kvf__eval_text_record(const kvf__eval_batch *b, kvf__measure measure) {
    const kvf__eval_item *item = b->item;
    json_t *o = begin(item->task ? "sample" : "text", item, measure), *full = json_object(), *layers = json_object();
    json_object_set_new(full, "nll", kvf__json_number(mean_of(item, b->full.nll)));
    json_object_set_new(full, "nll_by_token", numbers(item, b->full.nll));
    if (item->task) json_object_set_new(full, "hits", json_integer(sum_of(item, b->full.hit)));
    json_object_set_new(o, "full", full);
    if (b->density_head_minmax) {
        uint32_t n = b->n_layers;
        json_object_set_new(layers, "density_head_minmax", reals(b->density_head_minmax, n));
        json_object_set_new(layers, "variance", reals(b->variance, n));
    }
    json_object_set_new(o, "layers", layers);
    return o;
}

static void put_answer(json_t *o, const kvf__eval_batch *b, const kvf__eval_figures *f) {
    const kvf__eval_item *item = b->item;
    uint32_t hits = sum_of(item, f->hit), full_hits = sum_of(item, b->full.hit);
    json_object_set_new(o, "n_answer", json_integer(item->n_scored));
    json_object_set_new(o, "hits", json_integer(hits));
    json_object_set_new(o, "exact", json_integer(hits == item->n_scored));
    json_object_set_new(o, "full_hits", json_integer(full_hits));
    json_object_set_new(o, "full_exact", json_integer(full_hits == item->n_scored));
    json_object_set_new(o, "nll", kvf__json_number(mean_of(item, f->nll)));
}

static void put_text(json_t *o, const kvf__eval_batch *b, const kvf__eval_figures *f) {
    const kvf__eval_item *item = b->item;
    json_object_set_new(o, "nll", kvf__json_number(mean_of(item, f->nll)));
    if (f->kl) json_object_set_new(o, "kl", kvf__json_number(mean_of(item, f->kl)));
    json_object_set_new(o, "agree", kvf__json_number((double)sum_of(item, f->agree) / item->n_scored));
    json_object_set_new(o, "nll_by_token", numbers(item, f->nll));
    if (f->kl) json_object_set_new(o, "kl_by_token", numbers(item, f->kl));
    json_object_set_new(o, "agree_by_token", flags(item, f->agree));
}

json_t *kvf__eval_cell_record(const kvf__eval_batch *b, uint32_t index, kvf__measure measure, uint32_t k) {
    const kvf__eval_cell *c = &b->cells[index];
    json_t *o = begin_cell(b->item, c, measure, k);
    json_object_set_new(o, "target_blocks", kvf__json_number(c->target));
    if (c->rho_used > 0) json_object_set_new(o, "rho_used", kvf__json_number(c->rho_used));
    if (c->held > 0) json_object_set_new(o, "held_blocks", kvf__json_number(c->held));
    if (c->blocks) json_object_set_new(o, "blocks_by_layer", integers(c->blocks, b->n_layers));
    if (c->sizes) json_object_set_new(o, "sizes", integers(c->sizes, b->n_layers));
    if (c->group_sizes) json_object_set(o, "group_sizes", c->group_sizes);
    if (c->empty[0]) json_object_set_new(o, "empty", json_string(c->empty));
    bool answer = b->item->task != NULL, text = !answer || measure == KVF__MEASURE_MULTITURN;
    if (answer && !c->empty[0]) put_answer(o, b, &c->figures);
    if (text && !c->empty[0]) put_text(o, b, &c->figures);
    return o;
}
