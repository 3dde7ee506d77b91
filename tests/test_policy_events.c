/* Random prompts, segments and decode steps against a naive model in double precision, written from the rules alone;
 * and the same run over other paths, threads, head groups and fresh blocks, which must be equal bit for bit. */
#include "test_policy_rig.h"
#include "tests/counts.h"

enum { MAX_D = 128, MAX_SLOTS = 400, MAX_HEADS = 8, MAX_LAYERS = 3 };

/* ---- The naive model: one list of tokens per layer and KV head, in slot order ---------------------------- */

typedef struct token {
    uint32_t pos;
    double k[MAX_D], v[MAX_D], prompt, current, weight;
    float score; /* from the model */
} token;

typedef struct list {
    token t[MAX_SLOTS];
    uint32_t n, scored;
    double tau; /* NaN: none yet */
    /* the event under way */
    uint32_t gone[MAX_SLOTS], target[MAX_SLOTS], n_gone;
    double u[MAX_SLOTS];
    bool merge[MAX_SLOTS], is_gone[MAX_SLOTS];
} list;

typedef struct naive {
    kvf_policy_options o;
    uint32_t n_layers, n_kv, d, next_pos, rows[MAX_LAYERS]; /* rows: of score window, since the last whole one */
    kvf_dtype dtype;
    list *lists; /* [n_layers][n_kv] */
    uint64_t merged, dropped, events;
} naive;

static list *list_of(naive *m, uint32_t layer, uint32_t h) { return &m->lists[layer * m->n_kv + h]; }

typedef struct rank {
    int group; /* 0 window, 1 sink, 2 other */
    double score;
    uint32_t pos, slot;
} rank;

static int by_rank(const void *pa, const void *pb) {
    const rank *a = pa, *b = pb;
    if (a->group != b->group) return a->group - b->group;
    if (a->group == 2 && a->score != b->score) return a->score > b->score ? -1 : 1;
    return a->pos < b->pos ? -1 : a->pos > b->pos;
}

static double norm_of_v(const naive *m, const token *t) {
    double sum = 0;
    for (uint32_t e = 0; e < m->d; e++) sum += t->v[e] * t->v[e];
    return sqrt(sum);
}

/* What the slots are worth, by the options. */
static void naive_worth(const naive *m, const list *x, uint32_t window, double *worth) {
    uint32_t order[MAX_SLOTS], n = 0, half = m->o.score_pool / 2;
    double raw[MAX_SLOTS];
    for (uint32_t s = 0; s < x->n; s++) {
        const token *t = &x->t[s];
        double a = t->prompt + t->current, seen = m->next_pos - t->pos;
        if (m->o.score == KVF_SCORE_MEAN) a /= seen;
        if (m->o.score == KVF_SCORE_SQRT) a /= sqrt(seen);
        if (m->o.score_norm == KVF_SCORE_NORM_V) a *= norm_of_v(m, t);
        raw[s] = worth[s] = m->o.ops->needs ? a : 0.0;
    }
    if (m->o.score_pool == 1) return;
    for (uint32_t pos = 0; pos + window < m->next_pos; pos++)
        for (uint32_t s = 0; s < x->n; s++)
            if (x->t[s].pos == pos) order[n++] = s;
    for (uint32_t i = 0; i < n; i++) {
        double sum = 0;
        for (uint32_t j = i >= half ? i - half : 0; j < n && j <= i + half; j++) sum += raw[order[j]];
        worth[order[i]] = sum / m->o.score_pool;
    }
}

static void naive_select(const naive *m, list *x, uint32_t keep, uint32_t window) {
    static rank ranks[MAX_SLOTS];
    double worth[MAX_SLOTS];
    naive_worth(m, x, window, worth);
    for (uint32_t s = 0; s < x->n; s++) {
        bool recent = x->t[s].pos + window >= m->next_pos;
        ranks[s] = (rank){recent ? 0 : x->t[s].pos < m->o.sinks ? 1 : 2, worth[s], x->t[s].pos, s};
    }
    qsort(ranks, x->n, sizeof *ranks, by_rank);
    memset(x->is_gone, 0, sizeof x->is_gone);
    x->n_gone = 0;
    for (uint32_t i = keep; i < x->n; i++) x->is_gone[ranks[i].slot] = true;
    for (uint32_t pos = 0; pos < m->next_pos; pos++)
        for (uint32_t s = 0; s < x->n; s++)
            if (x->is_gone[s] && x->t[s].pos == pos) x->gone[x->n_gone++] = s;
}

static double cosine(const naive *m, const token *a, const token *b) {
    double dot = 0, na = 0, nb = 0;
    for (uint32_t i = 0; i < m->d; i++) {
        dot += a->k[i] * b->k[i];
        na += a->k[i] * a->k[i];
        nb += b->k[i] * b->k[i];
    }
    return na > 0 && nb > 0 ? dot / sqrt(na) / sqrt(nb) : 0.0;
}

/* The library's choice is taken over where ours is within rounding of it. */
static void naive_match(const naive *m, list *x, const kvf_plan_entry *entries) {
    for (uint32_t i = 0; i < x->n_gone; i++) {
        double best = -3;
        for (uint32_t s = 0; s < x->n; s++) {
            if (x->is_gone[s]) continue;
            double u = cosine(m, &x->t[x->gone[i]], &x->t[s]);
            if (u > best || (u == best && x->t[s].pos < x->t[x->target[i]].pos)) {
                best = u;
                x->target[i] = s;
            }
        }
        uint32_t theirs = entries[i].target;
        cr_assert_eq(entries[i].slot, x->gone[i]);
        cr_assert(theirs < x->n && !x->is_gone[theirs]);
        if (theirs != x->target[i])
            cr_assert_float_eq(cosine(m, &x->t[x->gone[i]], &x->t[theirs]), best, 1e-6, "a nearer key was missed");
        x->target[i] = theirs;
        x->u[i] = best;
        cr_assert_float_eq(entries[i].u, best, 1e-6);
    }
}

static double next_tau(const naive *m, double tau, double mean) {
    if (!isnan(m->o.gate)) return m->o.gate;
    return isnan(tau) ? mean : m->o.beta_new * mean + m->o.beta_old * tau;
}

static void naive_gate(naive *m, uint32_t layer, const kvf_plan_entry *entries) {
    double sum = 0;
    uint32_t n = list_of(m, layer, 0)->n_gone;
    for (uint32_t h = 0; h < m->n_kv; h++)
        for (uint32_t i = 0; i < n; i++) sum += list_of(m, layer, h)->u[i];
    for (uint32_t h = 0; h < m->n_kv; h++) {
        list *x = list_of(m, layer, h);
        double mean = 0;
        for (uint32_t i = 0; i < n; i++) mean += x->u[i] / n;
        if (m->o.scope == KVF_SCOPE_LAYER) mean = sum / (n * m->n_kv);
        bool first = isnan(x->tau);
        double tau = next_tau(m, x->tau, mean);
        for (uint32_t i = 0; i < n; i++) {
            double u = x->u[i];
            if (m->o.scope == KVF_SCOPE_LAYER) {
                u = 0;
                for (uint32_t k = 0; k < m->n_kv; k++) u += list_of(m, layer, k)->u[i] / m->n_kv;
            }
            const kvf_plan_entry *e = &entries[h * n + i];
            x->merge[i] = e->merge;
            if (fabs(u - tau) > 1e-6) cr_assert_eq(e->merge, u > tau, "u %.9f tau %.9f", u, tau);
            if (first && n == 1 && isnan(m->o.gate)) cr_assert(e->merge, "a first event of one token always merges");
        }
        x->tau = isnan(m->o.gate) ? tau : NAN;
    }
}

/* Of a query that saw it. */
static double attention_of(const naive *m, const token *t) { return t->prompt / (m->next_pos - t->pos); }

static void naive_fold(const naive *m, list *x, uint32_t target) {
    bool weighs = m->o.merge == KVF_MERGE_MASS || m->o.merge == KVF_MERGE_ATTENTION;
    double w[MAX_SLOTS], z = 0, own = 1, kept = attention_of(m, &x->t[target]);
    uint32_t from[MAX_SLOTS], n = 0;
    for (uint32_t i = 0; i < x->n_gone; i++)
        if (x->merge[i] && x->target[i] == target) {
            from[n] = x->gone[i];
            w[n++] = x->u[i];
        }
    if (!n) return;
    for (uint32_t i = 0; i < n; i++) {
        if (m->o.merge == KVF_MERGE_PAPER) w[i] = exp(w[i]);
        if (m->o.merge == KVF_MERGE_AVERAGE) w[i] = 1;
        if (m->o.merge == KVF_MERGE_MASS) w[i] = x->t[from[i]].weight;
        if (m->o.merge == KVF_MERGE_ATTENTION)
            w[i] = x->t[target].weight * fmin(1, attention_of(m, &x->t[from[i]]) / kept);
        z += w[i];
    }
    if (m->o.merge == KVF_MERGE_PAPER) own = exp(1);
    if (weighs) own = x->t[target].weight;
    z = m->o.merge == KVF_MERGE_AUTHORS ? n + 1.0 : z + own;
    token *t = &x->t[target];
    for (uint32_t i = 0; i < n; i++) t->score = fmaxf(t->score, x->t[from[i]].score);
    for (uint32_t e = 0; e < m->d; e++) {
        double k = own * t->k[e], v = own * t->v[e];
        for (uint32_t i = 0; i < n; i++) {
            k += w[i] * x->t[from[i]].k[e];
            v += w[i] * x->t[from[i]].v[e];
        }
        if (m->o.merge_keys) t->k[e] = k / z;
        t->v[e] = v / z;
    }
    if (m->o.merge == KVF_MERGE_ATTENTION) t->prompt *= z / own;
    if (weighs) t->weight = z;
}

static int by_pos(const void *a, const void *b) {
    uint32_t x = ((const token *)a)->pos, y = ((const token *)b)->pos;
    return x < y ? -1 : x > y;
}

static void naive_reorder(list *x, uint32_t keep, uint32_t kind) {
    uint32_t n = 0;
    if (kind == KVF_EVENT_PROMPT) {
        for (uint32_t s = 0; s < x->n; s++)
            if (!x->is_gone[s]) x->t[n++] = x->t[s];
        qsort(x->t, n, sizeof *x->t, by_pos);
    } else {
        uint32_t hole = 0;
        for (uint32_t s = keep; s < x->n; s++) {
            if (x->is_gone[s]) continue;
            while (!x->is_gone[hole]) hole++;
            x->t[hole++] = x->t[s];
        }
    }
    x->n = keep;
}

/* Of no built-in one: compresses a prompt alone, by its last rows. */
static const kvf_policy_ops prompt_only = {
    .struct_size = sizeof prompt_only,
    .name = "prompt_only",
    .needs = KVF_NEEDS_LAST_ROWS,
    .flags = KVF_POLICY_PROMPT_ONLY | KVF_POLICY_EQUAL_LAYERS,
};

/* ---- A run: the rigs in step, the model beside the first ---------------------------------------------------- */

enum { N_RIGS = 6 }; /* 0: default; 1: fresh blocks; 2: two threads; 3: groups of one head; 4: plain C; 5: AVX2 */

typedef struct run {
    rig_config c;
    rig *r[N_RIGS];
    naive m;
    uint64_t seed;
    float *sums[N_RIGS][1];
    double k_bound, v_bound;
} run;

static void run_open(run *x, const kvf_policy_options *o) {
    rig_config c = x->c;
    x->m = (naive){.o = *o,
                   .n_layers = c.n_layers,
                   .n_kv = c.n_kv,
                   .d = c.d,
                   .dtype = c.dtype,
                   .lists = calloc(c.n_layers * c.n_kv, sizeof(list))};
    for (uint32_t i = 0; i < c.n_layers * c.n_kv; i++) x->m.lists[i].tau = NAN;
    for (int i = 0; i < N_RIGS; i++) {
        rig_config v = c;
        v.threads = i == 2 ? 2 : 1;
        if (i == 3) v.hpg = 1;
        v.path = i == 4 ? KVF_CPU_SCALAR : i == 5 && kvf_cpu_has_path(KVF_CPU_AVX2) ? KVF_CPU_AVX2 : KVF_CPU_AUTO;
        x->r[i] = rig_new(v);
        OK(kvf_policy_open(x->r[i]->state, 0, o, err));
    }
}

static void run_close(run *x) {
    for (int i = 0; i < N_RIGS; i++) rig_free(x->r[i]);
    free(x->m.lists);
}

/* Appends one token to every layer. Keys lie around a few directions, so that cosines spread. */
static void run_token(run *x) {
    float k[MAX_D], v[MAX_D];
    uint64_t score_seed = x->seed + x->m.next_pos;
    for (uint32_t l = 0; l < x->c.n_layers; l++) {
        for (uint32_t h = 0; h < x->c.n_kv; h++) {
            uint64_t direction = rig_random(&x->seed) % 5, s = direction * 77 + h;
            for (uint32_t e = 0; e < x->c.d; e++) {
                k[e] = (float)(rig_normal(&s) + rig_normal(&x->seed));
                v[e] = (float)rig_normal(&x->seed);
            }
            list *t = list_of(&x->m, l, h);
            float score = rig_random(&score_seed) % 9 ? (float)rig_normal(&score_seed) : INFINITY;
            for (int i = 0; i < N_RIGS; i++) {
                rig_put(x->r[i], 0, l, h, t->n, x->m.next_pos, k, v);
                kvf__head head = rig_head(x->r[i], 0, l, h);
                x->r[i]->pages.score[kvf__slot_index(&head, t->n)] = score;
            }
            token *new = &t->t[t->n++];
            *new = (token){.pos = x->m.next_pos, .weight = 1, .score = score};
            for (uint32_t e = 0; e < x->c.d; e++) {
                new->k[e] = x->m.dtype == KVF_F32 ? k[e] : kvf__widen(x->m.dtype, kvf__narrow(x->m.dtype, k[e]));
                new->v[e] = x->m.dtype == KVF_F32 ? v[e] : kvf__widen(x->m.dtype, kvf__narrow(x->m.dtype, v[e]));
            }
        }
        for (int i = 0; i < N_RIGS; i++) rig_set_slots(x->r[i], 0, l, list_of(&x->m, l, 0)->n);
    }
    x->m.next_pos++;
    for (int i = 0; i < N_RIGS; i++) x->r[i]->next_pos[0] = x->m.next_pos;
}

/* Everything the library holds against the model; then the model takes over the stored numbers, so that rounding
 * does not add up, and the other rigs against the first. */
static void run_compare(run *x) {
    rig *r = x->r[0];
    kvf__roles roles = kvf__score_roles(&x->m.o);
    for (uint32_t l = 0; l < x->c.n_layers; l++)
        for (uint32_t h = 0; h < x->c.n_kv; h++) {
            list *t = list_of(&x->m, l, h);
            double tau = kvf_policy_tau(r->state, 0, l, h);
            cr_assert_eq(isnan(tau), isnan(t->tau));
            if (!isnan(tau)) cr_assert_float_eq(tau, t->tau, 1e-6);
            t->tau = tau;
            kvf__head head = rig_head(r, 0, l, h);
            cr_assert_eq(head.n_slots, t->n);
            for (uint32_t s = 0; s < t->n; s++) {
                size_t i = kvf__slot_index(&head, s);
                cr_assert_eq(r->pages.pos[i], t->t[s].pos, "layer %u head %u slot %u: position %u, expected %u", l, h,
                             s, r->pages.pos[i], t->t[s].pos);
                double norm = 0;
                for (uint32_t e = 0; e < x->c.d; e++) {
                    double k = rig_get(r, kvf__k_row(&head, s), e), v = rig_get(r, kvf__v_row(&head, s), e);
                    cr_assert_float_eq(k, t->t[s].k[e], x->k_bound * fmax(1, fabs(k)));
                    cr_assert_float_eq(v, t->t[s].v[e], x->v_bound * fmax(1, fabs(v)));
                    t->t[s].k[e] = k;
                    t->t[s].v[e] = v;
                    norm += k * k;
                }
                cr_assert_float_eq(r->pages.key_norm[i], sqrt(norm), 1e-5 * sqrt(norm));
                cr_assert_eq(r->pages.score[i], t->t[s].score, "layer %u head %u slot %u: score %g, expected %g", l, h,
                             s, (double)r->pages.score[i], (double)t->t[s].score);
                if (x->c.mass) {
                    cr_assert_float_eq(r->pages.weight[i], t->t[s].weight, 1e-5 * t->t[s].weight);
                    cr_assert_float_eq(r->pages.bias[i], log(t->t[s].weight), 1e-5);
                }
                double v_norm = norm_of_v(&x->m, &t->t[s]), *score[3] = {&t->t[s].prompt, &t->t[s].current, &v_norm};
                for (uint32_t a = 0; a < 3 && s < t->scored; a++) {
                    uint32_t array = a == 0 ? roles.score : a == 1 ? roles.recent : roles.v_norm;
                    if (array == KVF__NONE) continue;
                    double got = *rig_score(r, 0, l, h, array, s);
                    cr_assert_float_eq(got, *score[a], 1e-5 * fmax(1, fabs(got)), "array %u: %g, expected %g", array,
                                       got, *score[a]);
                    *score[a] = got;
                }
            }
        }
    kvf_policy_counts c = counts_of(r->state, 0);
    cr_assert(c.merged == x->m.merged && c.dropped == x->m.dropped && c.n_events == x->m.events);
    size_t n, n_other;
    unsigned char *first = rig_dump(r, 0, &n);
    for (int i = 1; i < N_RIGS; i++) {
        unsigned char *other = rig_dump(x->r[i], 0, &n_other);
        cr_assert(n == n_other && memcmp(first, other, n) == 0, "rig %d differs", i);
        free(other);
    }
    free(first);
}

static void run_events(run *x, const kvf_event *events, uint32_t n) {
    if (n == 0) return;
    for (int i = 0; i < N_RIGS; i++) rig_events(x->r[i], events, n, i == 1 ? rig_random(&x->seed) | 1 : 0);
    for (uint32_t i = 0; i < n; i++) {
        const kvf_event *e = &events[i];
        const kvf_plan_event *pe = &x->r[0]->plan->events[i];
        kvf_layer_size size = {.window = 0};
        if (kvf_policy_sizes(x->r[0]->state, 0)) size = kvf_policy_sizes(x->r[0]->state, 0)[e->layer];
        bool sums = x->sums[0][0] != NULL;
        if (list_of(&x->m, e->layer, 0)->n == e->n_keep) {
            for (uint32_t h = 0; h < x->c.n_kv && sums; h++) list_of(&x->m, e->layer, h)->scored = e->n_keep;
            continue;
        }
        const kvf_plan_entry *entries = x->r[0]->plan->entries + pe->entry_begin;
        for (uint32_t h = 0; h < x->c.n_kv; h++) {
            list *t = list_of(&x->m, e->layer, h);
            naive_select(&x->m, t, e->n_keep, size.window);
            if (x->m.o.merge != KVF_MERGE_NONE) naive_match(&x->m, t, entries + h * t->n_gone);
        }
        if (x->m.o.merge != KVF_MERGE_NONE) naive_gate(&x->m, e->layer, entries);
        for (uint32_t h = 0; h < x->c.n_kv; h++) {
            list *t = list_of(&x->m, e->layer, h);
            cr_assert_eq(pe->n_evict, t->n_gone);
            for (uint32_t k = 0; k < t->n_gone; k++) {
                cr_assert_eq(entries[h * t->n_gone + k].slot, t->gone[k], "layer %u head %u: another token was evicted",
                             e->layer, h);
                if (x->m.o.merge == KVF_MERGE_NONE) t->merge[k] = false;
                x->m.merged += t->merge[k];
                x->m.dropped += !t->merge[k];
            }
            for (uint32_t s = 0; s < t->n && x->m.o.merge != KVF_MERGE_NONE; s++) naive_fold(&x->m, t, s);
            naive_reorder(t, e->n_keep, e->kind);
            t->scored = e->n_keep;
        }
        x->m.events++;
    }
    run_compare(x);
}

static uint32_t run_due(run *x, kvf_moment moment, uint32_t kind, bool all, kvf_event *events) {
    kvf_event again[MAX_LAYERS];
    uint32_t n = rig_due(x->r[0], 0, moment, kind, all, events);
    for (int i = 1; i < N_RIGS; i++) {
        uint32_t m = rig_due(x->r[i], 0, moment, kind, all, again);
        cr_assert(m == n && memcmp(events, again, n * sizeof *events) == 0);
    }
    return n;
}

static double reduce(kvf_gqa gqa, const double *x, uint32_t g) {
    double r = x[0];
    for (uint32_t i = 1; i < g; i++) r = gqa == KVF_GQA_SUM ? r + x[i] : gqa == KVF_GQA_MAX ? fmax(r, x[i]) : r;
    return r;
}

/* A prompt, or a later segment, of n tokens; total is the number of all prompt tokens. */
static void run_prompt(run *x, uint32_t n, uint32_t total) {
    rig_config c = x->c;
    for (uint32_t i = 0; i < n; i++) run_token(x);
    uint32_t hq = c.n_kv * c.g, stride = MAX_SLOTS;
    float *sums = malloc((size_t)c.n_layers * hq * stride * sizeof *sums);
    for (size_t i = 0; i < (size_t)c.n_layers * hq * stride; i++) sums[i] = (float)exp(rig_normal(&x->seed));
    for (uint32_t l = 0; l < c.n_layers; l++) {
        x->m.rows[l] = 0;
        for (uint32_t h = 0; h < c.n_kv; h++)
            for (uint32_t s = 0; s < list_of(&x->m, l, h)->n; s++) {
                double of_group[8] = {0};
                for (uint32_t q = 0; q < c.g; q++) of_group[q] = sums[((size_t)l * hq + h * c.g + q) * stride + s];
                token *t = &list_of(&x->m, l, h)->t[s];
                bool window = x->m.o.score == KVF_SCORE_WINDOW;
                double before = window ? t->prompt + t->current : t->prompt;
                if (s >= list_of(&x->m, l, h)->scored || (window && n >= x->m.o.score_window)) before = 0;
                t->prompt = before * x->m.o.score_decay + reduce(x->m.o.gqa, of_group, c.g);
                t->current = 0;
            }
    }
    kvf_policy_ops ops = kvf__policy_ops_resolve(x->m.o.ops);
    bool last = kvf_policy_needs(&x->m.o) & KVF_NEEDS_LAST_ROWS;
    kvf_event events[MAX_LAYERS];
    for (int i = 0; i < N_RIGS; i++) {
        rig *r = x->r[i];
        x->sums[i][0] = x->m.o.ops->needs ? sums : NULL;
        r->prompt_sums[0] = kvf_policy_needs(&x->m.o) & KVF_NEEDS_COL_SUMS ? sums : NULL;
        r->prompt_last[0] = last ? sums : NULL;
        r->prompt_stride = stride;
        double *variance = calloc((size_t)c.n_layers * hq, sizeof *variance);
        kvf_policy_batch b = rig_batch(r);
        bool first = n == total;
        if (first && ops.metric) OK(ops.metric(r->state, r->stream, &b, 0, n, variance, err));
        OK(ops.budget(r->state, 0, first && ops.metric ? variance : NULL, total, err));
        free(variance);
    }
    run_events(x, events, run_due(x, KVF_AT_PROMPT_END, KVF_EVENT_PROMPT, x->m.o.ops->needs != 0, events));
    for (int i = 0; i < N_RIGS; i++) x->sums[i][0] = x->r[i]->prompt_sums[0] = x->r[i]->prompt_last[0] = NULL;
    free(sums);
    run_compare(x);
}

static void run_step(run *x) {
    kvf_event events[MAX_LAYERS];
    uint32_t k = x->m.o.evict_every ? x->m.o.evict_every : x->c.bs / 2;
    run_events(x, events, run_due(x, KVF_BEFORE_APPEND, KVF_EVENT_PROMPT, false, events));
    run_token(x);
    for (uint32_t l = 0; l < x->c.n_layers && kvf_policy_observes(&x->m.o); l++) {
        float row[MAX_HEADS * MAX_SLOTS];
        bool window = x->m.o.score == KVF_SCORE_WINDOW, whole = window && ++x->m.rows[l] == x->m.o.score_window;
        if (whole) x->m.rows[l] = 0;
        for (uint32_t h = 0; h < x->c.n_kv; h++) {
            list *t = list_of(&x->m, l, h);
            for (uint32_t s = 0; s < t->n; s++) {
                float a = row[h * MAX_SLOTS + s] = (float)rig_uniform(&x->seed) * 0.2f;
                bool two = x->m.o.score == KVF_SCORE_PROMPT_PLUS_CURRENT || window, old = s + 1 < t->n;
                token *y = &t->t[s];
                if (!old) y->prompt = y->current = 0;
                y->prompt += two ? 0 : a;
                y->current = two ? a + (window ? y->current : 0) : 0;
                if (whole) y->prompt = y->current, y->current = 0;
            }
            t->scored = t->n;
        }
        for (int i = 0; i < N_RIGS; i++) rig_observe(x->r[i], l, row, MAX_SLOTS);
    }
    bool deferred = x->m.o.defer_first_decode && !kvf_policy_sizes(x->r[0]->state, 0);
    uint32_t n = run_due(x, KVF_AFTER_STEP, deferred ? KVF_EVENT_PROMPT : KVF_EVENT_DECODE, false, events);
    const kvf_layer_size *sizes = kvf_policy_sizes(x->r[0]->state, 0);
    for (uint32_t l = 0, i = 0; l < x->c.n_layers && sizes; l++) { /* due exactly when S + k is reached */
        uint32_t slots = list_of(&x->m, l, 0)->n, keep = sizes[l].keep;
        bool due = i < n && events[i].layer == l;
        if (x->m.o.ops == &prompt_only)
            cr_assert(!due && (keep == UINT32_MAX || sizes[l].reserve == UINT32_MAX));
        else
            cr_assert_eq(due, keep != UINT32_MAX && (deferred ? slots > keep : slots >= keep + k));
        i += due;
    }
    run_events(x, events, n);
    run_compare(x);
}

static void draw(run *x, kvf_policy_options *o, uint32_t turn) {
    static const uint32_t gs[] = {1, 3, 4, 8}, ds[] = {64, 96, 128}, sizes[] = {8, 16, 32};
    static const char *const policies[] = {"d2o", "d2o", "fold", "h2o", "streaming"};
    static const char *const more[] = {"uniform", "evict", "reciprocal", "exp_decay"};
    uint64_t *s = &x->seed;
    bool own = turn % 10 == 9;
    if (own)
        OK(kvf_policy_options_init_ops(o, sizeof *o, &prompt_only, err));
    else
        OK(kvf_policy_options_init(o, sizeof *o, turn % 10 == 6 ? more[turn / 10 % 4] : policies[turn % 5], NULL, err));
    x->c = (rig_config){.n_seqs = 1,
                        .n_layers = 1 + (uint32_t)(rig_random(s) % 3),
                        .g = gs[turn % 4],
                        .cap = MAX_SLOTS,
                        .d = ds[turn / 2 % 3],
                        .bs = sizes[rig_random(s) % 3],
                        .threads = 1};
    x->c.n_kv = x->c.g == 8 ? 1 : 1 + (uint32_t)(rig_random(s) % 3); /* g 8: one KV head */
    x->c.hpg = x->c.n_kv;
    x->c.dtype = rig_random(s) % 3 ? KVF_F32 : turn % 2 ? KVF_BF16 : KVF_F16;
    o->rho = 0.2 + 0.6 * rig_uniform(s);
    o->min_tokens = rig_random(s) % 4 ? 8 : 200; /* 200: the prompt fits, and overflows in decode */
    if (o->min_tokens == 200) o->min_tokens = 0, o->budget_tokens = 120;
    o->gqa = (kvf_gqa)(rig_random(s) % 3);
    o->sinks = (uint32_t)(rig_random(s) % 6);
    o->sinks_extra = rig_random(s) % 4 == 0;
    o->merge = turn % 5 < 3 ? (kvf_merge)(turn / 3 % 6) : KVF_MERGE_NONE;
    o->merge_keys = rig_random(s) % 3 != 0;
    o->scope = rig_random(s) % 2 ? KVF_SCOPE_HEAD : KVF_SCOPE_LAYER;
    o->score = rig_random(s) % 3 ? (kvf_score)(turn / 2 % 5) : KVF_SCORE_ACCUMULATE;
    if (o->merge == KVF_MERGE_ATTENTION && (o->score == KVF_SCORE_PROMPT_PLUS_CURRENT || o->score == KVF_SCORE_WINDOW))
        o->score = KVF_SCORE_SQRT;
    o->score_window = 5 + (uint32_t)(rig_random(s) % 30); /* shorter and longer than a segment */
    o->score_norm = rig_random(s) % 3 ? KVF_SCORE_NORM_NONE : KVF_SCORE_NORM_V;
    o->score_pool = rig_random(s) % 4 ? 1 : 3 + 2 * (uint32_t)(rig_random(s) % 31);
    o->score_decay = rig_random(s) % 3 ? 1.0 : rig_uniform(s);
    o->window = rig_random(s) % 4 ? 0 : 1 + (uint32_t)(rig_random(s) % 40);
    o->metric = (kvf_metric)(rig_random(s) % 5);
    o->evict_every = rig_random(s) % 2 ? 1 : 8;
    if (rig_random(s) % 3 == 0) o->evict_every = 0;
    if (rig_random(s) % 3 == 0) o->budget_unit = KVF_BUDGET_BLOCK;
    if (o->budget_unit == KVF_BUDGET_TOKEN && rig_random(s) % 4 == 0) o->redistribute = 0;
    if (x->c.n_layers == 3 && rig_random(s) % 2 == 0) o->full_layers[o->n_full_layers++] = -1;
    if (rig_random(s) % 5 == 0) o->gate = 0.5;
    o->defer_first_decode = !own && rig_random(s) % 4 == 0;
    o->n_parts = (uint32_t)(rig_random(s) % 4);
    x->c.mass = kvf_policy_needs_weights(o);
    x->c.n_arrays = KVF__MAX(kvf_policy_n_arrays(o), 1u);
}

Test(policy_events, naive_model_agrees_and_all_ways_are_bit_equal) {
    static run x;
    uint64_t merged = 0, events = 0, overflows = 0, half = 0, brief = 0;
    for (uint32_t turn = 0; turn < 60; turn++) {
        kvf_policy_options o;
        x = (run){.seed = 1000 + turn};
        draw(&x, &o, turn);
        cr_log_info("seed %u: policy %s, %u layers, %u x %u heads of %u, block %u, %s, merge %d, scope %d, k %u",
                    1000 + turn, o.ops->name, x.c.n_layers, x.c.n_kv, x.c.g, x.c.d, x.c.bs,
                    x.c.dtype == KVF_F32   ? "fp32"
                    : x.c.dtype == KVF_F16 ? "fp16"
                                           : "bf16",
                    (int)o.merge, (int)o.scope, o.evict_every);
        /* Pages of 2 bytes round once per merge: half an ulp is 2^-11 of the value (bf16: 2^-8), and the model rounds
         * nothing. */
        x.k_bound = x.v_bound = x.c.dtype == KVF_F16 ? 0x1.1p-11 : x.c.dtype == KVF_BF16 ? 0x1.1p-8 : 1e-5;
        run_open(&x, &o);
        uint32_t n_prompt = 40 + (uint32_t)(rig_random(&x.seed) % 70);
        run_prompt(&x, n_prompt, n_prompt);
        bool unsized = !kvf_policy_sizes(x.r[0]->state, 0);
        for (uint32_t step = 0; step < 50; step++) {
            if (step == 30 && turn % 3 == 0) run_prompt(&x, 25, n_prompt + 25);
            run_step(&x);
        }
        overflows += unsized && !o.defer_first_decode && kvf_policy_sizes(x.r[0]->state, 0);
        merged += x.m.merged;
        events += x.m.events;
        half += x.c.dtype == KVF_F16, brief += x.c.dtype == KVF_BF16;
        run_close(&x);
    }
    cr_assert(merged > 1000 && events > 500 && overflows > 3 && half > 3 && brief > 3,
              "merged %llu, events %llu, overflows %llu, fp16 %llu, bf16 %llu", (unsigned long long)merged,
              (unsigned long long)events, (unsigned long long)overflows, (unsigned long long)half,
              (unsigned long long)brief);
}
