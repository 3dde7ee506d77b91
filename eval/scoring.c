/* Figures from logits: likelihood of the true token, divergence from the full cache, agreement of the likeliest token. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"

struct kvf__eval_held_logits { /* that came before those of the full cache */
    kvf__eval_held_logits *next;
    uint32_t sample, step;
    float logits[];
};

typedef struct row { /* of logits */
    double log_sum;  /* log of the sum of exp(logit) */
    uint32_t best;   /* ties to the lower id */
} row;

static row row_of(const float *logits, uint32_t n) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best] || isnan(logits[best])) best = i;
    double max = logits[best], sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += exp((double)logits[i] - max);
    return (row){max + log(sum), best};
}

static void free_figures(kvf__eval_figures *f) {
    free(f->nll);
    free(f->kl);
    free(f->hit);
    free(f->agree);
    *f = (kvf__eval_figures){0};
}

bool kvf__eval_scorer_begin(kvf__eval_scorer *s, uint32_t n_vocab, uint32_t n_samples, const uint32_t *truth,
                            uint32_t n_steps, bool want_kl) {
    *s = (kvf__eval_scorer){.n_vocab = n_vocab, .n_steps = n_steps, .n_samples = n_samples};
    s->truth = truth;
    s->want_kl = want_kl;
    s->p_step = UINT32_MAX;
    s->figures = calloc(n_samples, sizeof *s->figures);
    s->full_best = malloc(n_steps * sizeof *s->full_best);
    bool ok = s->figures && s->full_best;
    if (want_kl) {
        s->full = malloc((size_t)n_steps * n_vocab * sizeof *s->full);
        s->p = malloc(n_vocab * sizeof *s->p);
        ok = ok && s->full && s->p;
    }
    for (uint32_t i = 0; ok && i < n_samples; i++) {
        kvf__eval_figures *f = &s->figures[i];
        f->nll = malloc(n_steps * sizeof *f->nll);
        f->kl = want_kl && i ? malloc(n_steps * sizeof *f->kl) : NULL;
        f->hit = malloc(n_steps);
        f->agree = malloc(n_steps);
        ok = f->nll && f->hit && f->agree && (!want_kl || !i || f->kl);
    }
    if (!ok) kvf__say("eval: out of memory for the scores of %u samples", n_samples);
    return ok;
}

void kvf__eval_scorer_end(kvf__eval_scorer *s) {
    for (uint32_t i = 0; s->figures && i < s->n_samples; i++) free_figures(&s->figures[i]);
    for (kvf__eval_held_logits *h = s->held, *next; h; h = next) {
        next = h->next;
        free(h);
    }
    free(s->figures);
    free(s->full);
    free(s->p);
    free(s->full_best);
    *s = (kvf__eval_scorer){0};
}

/* The full cache's probabilities at a step, kept for the samples that follow. */
static void take_p(kvf__eval_scorer *s, uint32_t step) {
    if (s->p_step == step) return;
    const float *logits = s->full + (size_t)step * s->n_vocab;
    s->p_log_sum = row_of(logits, s->n_vocab).log_sum;
    for (uint32_t i = 0; i < s->n_vocab; i++) s->p[i] = exp((double)logits[i] - s->p_log_sum);
    s->p_step = step;
}

/* KL(full || sample) in nats: sum p (log p - log q). */
static double divergence(kvf__eval_scorer *s, uint32_t step, const float *logits, double log_sum) {
    take_p(s, step);
    const float *full = s->full + (size_t)step * s->n_vocab;
    double sum = 0;
    for (uint32_t i = 0; i < s->n_vocab; i++)
        if (s->p[i] > 0) sum += s->p[i] * ((double)full[i] - (double)logits[i]);
    return sum - s->p_log_sum + log_sum;
}

static bool keep_for_later(kvf__eval_scorer *s, uint32_t sample, uint32_t step, const float *logits) {
    kvf__eval_held_logits *h = malloc(sizeof *h + s->n_vocab * sizeof *logits);
    if (!h) return false;
    h->sample = sample;
    h->step = step;
    memcpy(h->logits, logits, s->n_vocab * sizeof *logits);
    h->next = s->held;
    s->held = h;
    return true;
}

static void take_full(kvf__eval_scorer *s, uint32_t step, const float *logits, const row *r) {
    s->full_best[step] = r->best;
    if (s->want_kl) memcpy(s->full + (size_t)step * s->n_vocab, logits, s->n_vocab * sizeof *logits);
    kvf__eval_held_logits **at = &s->held;
    while (*at) {
        kvf__eval_held_logits *h = *at;
        if (h->step != step) {
            at = &h->next;
            continue;
        }
        *at = h->next;
        kvf__eval_scorer_take(s, h->sample, step, h->logits);
        free(h);
    }
}

void kvf__eval_scorer_take(kvf__eval_scorer *s, uint32_t sample, uint32_t step, const float *logits) {
    if (sample >= s->n_samples || step >= s->n_steps) return;
    if (sample && step >= s->figures[0].n_done) {
        s->failed |= !keep_for_later(s, sample, step, logits);
        return;
    }
    kvf__eval_figures *f = &s->figures[sample];
    row r = row_of(logits, s->n_vocab);
    f->nll[step] = r.log_sum - (double)logits[s->truth[step]];
    f->hit[step] = r.best == s->truth[step];
    f->n_done = step + 1;
    if (!sample) take_full(s, step, logits, &r);
    f->agree[step] = r.best == s->full_best[step];
    if (f->kl) f->kl[step] = divergence(s, step, logits, r.log_sum);
}
