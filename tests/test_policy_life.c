/* Whole lives of sequences, a prompt's compression and 50 decode steps with their events, against a naive reference that
 * shares nothing with the library and never takes a number over from it: kept positions, merges, K and V within 1e-5, tau
 * within 1e-6. A decision that lies within 1e-6 of the other way is taken as the library took it, and counted. */
#include "policy_life.h"

/* ---- The naive reference: tokens of one (layer, KV head) by position ---------------------------------------------- */

typedef struct token {
    uint32_t pos;
    double k[LIFE_D], v[LIFE_D], score, weight;
} token;

typedef struct head {
    token t[LIFE_TOKENS];
    uint32_t n;
    double tau;
    /* of the event under way, by rank among the evicted */
    token gone[LIFE_TOKENS];
    uint32_t n_gone, target[LIFE_TOKENS];
    double u[LIFE_TOKENS];
    bool merge[LIFE_TOKENS];
} head;

static struct naive {
    const life_case *c;
    head h[LIFE_LAYERS][LIFE_KV];
    uint32_t S[LIFE_LAYERS], M[LIFE_LAYERS], next_pos, B;
    bool sized, full[LIFE_LAYERS];
    uint64_t n_merged, n_evicted, n_close;
} m;

static double naive_variance(uint32_t l, uint32_t q) {
    double mean = 0, sum = 0;
    uint32_t n = m.c->n_prompt;
    for (uint32_t p = 0; p < n; p++) mean += (double)life_sum(m.c, l, q, p) / n;
    for (uint32_t p = 0; p < n; p++) sum += pow((double)life_sum(m.c, l, q, p) - mean, 2);
    return sum / (n - 1);
}

/* w = softmax(-F) of the layers that count, F by head_minmax. */
static void naive_weights(double *w) {
    uint32_t hq = m.c->n_kv * m.c->g;
    double sum = 0;
    for (uint32_t l = 0; l < m.c->n_layers; l++) {
        double v[LIFE_KV * LIFE_G], min = 1e300, max = 0, F = 0;
        for (uint32_t q = 0; q < hq; q++) {
            v[q] = naive_variance(l, q);
            min = fmin(min, v[q]);
            max = fmax(max, v[q]);
        }
        for (uint32_t q = 0; q < hq; q++) F += (v[q] - min) / (max - min + 1e-6) / hq;
        sum += w[l] = exp(-F);
    }
    for (uint32_t l = 0; l < m.c->n_layers; l++) w[l] /= sum;
}

static double clamp(double x, double lo, double hi) { return fmin(fmax(x, lo), hi); }

/* x = clamp(lam * w, lo, hi) with the sum total, by halving; whole numbers by largest remainder, ties to the lower layer. */
static void naive_share(const double *w, uint32_t n, uint64_t total, double lo, double hi, uint32_t *out) {
    double low = 0, high = 1e12, x[LIFE_LAYERS], rest[LIFE_LAYERS];
    uint64_t used = 0;
    for (int i = 0; i < 300; i++) {
        double lam = (low + high) / 2, sum = 0;
        for (uint32_t l = 0; l < n; l++) sum += clamp(lam * w[l], lo, hi);
        *(sum < (double)total ? &low : &high) = lam;
    }
    for (uint32_t l = 0; l < n; l++) {
        x[l] = clamp(high * w[l], lo, hi);
        used += out[l] = (uint32_t)floor(x[l] + 1e-6);
        rest[l] = x[l] - floor(x[l] + 1e-6);
    }
    for (; used < total; used++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t l = 0; l < n; l++)
            if (out[l] < hi && (best == UINT32_MAX || rest[l] > rest[best] + 1e-9)) best = l;
        out[best]++;
        rest[best] = -1;
    }
}

static void naive_sizes(bool clamped) {
    const kvf_policy_options *o = &m.c->o;
    uint32_t n = m.c->n_layers, L = m.c->n_prompt, bs = m.c->bs, k = o->evict_every ? o->evict_every : bs / 2;
    double w[LIFE_LAYERS], parts = o->n_parts + o->m_parts;
    naive_weights(w);
    if (!o->redistribute) {
        for (uint32_t l = 0; l < n; l++) {
            double x = L * clamp(w[l] * n * o->rho, 0.01, 1);
            m.M[l] = (uint32_t)floor(x * o->m_parts / parts + 1e-6);
            m.S[l] = m.M[l] + (uint32_t)floor(x * o->n_parts / parts + 1e-6);
        }
    } else {
        uint64_t total = (uint64_t)m.B * n;
        double lo = fmin(m.B, 16), hi = clamped ? L : 1e9;
        if (o->budget_unit == KVF_BUDGET_BLOCK) {
            total /= bs;
            lo = ceil((lo + k) / bs);
            hi = fmax(lo, ceil((hi + k) / bs));
        }
        naive_share(w, n, (uint64_t)clamp((double)total, lo * n, hi * n), lo, hi, m.S);
        for (uint32_t l = 0; l < n; l++) {
            if (o->budget_unit == KVF_BUDGET_BLOCK) m.S[l] = bs * m.S[l] - k;
            m.M[l] = KVF__MAX(1, m.S[l] * o->m_parts / (o->n_parts + o->m_parts));
        }
    }
    m.sized = true;
}

/* Whether token a of the head goes before token b, neither being of the window. */
static bool goes_first(const token *a, const token *b) {
    uint32_t T = m.c->o.sinks;
    if ((a->pos < T) != (b->pos < T)) return a->pos >= T;
    if (a->pos >= T && a->score != b->score) return a->score < b->score;
    return a->pos > b->pos;
}

static void naive_evict(head *x, uint32_t S, uint32_t M) {
    bool gone[LIFE_TOKENS] = {false};
    uint32_t n = 0;
    x->n_gone = x->n - S;
    for (uint32_t i = 0; i < x->n_gone; i++) {
        uint32_t worst = UINT32_MAX;
        for (uint32_t s = 0; s < x->n; s++)
            if (!gone[s] && x->t[s].pos + M < m.next_pos && (worst == UINT32_MAX || goes_first(&x->t[s], &x->t[worst])))
                worst = s;
        gone[worst] = true;
    }
    x->n_gone = 0;
    for (uint32_t s = 0; s < x->n; s++)
        if (gone[s])
            x->gone[x->n_gone++] = x->t[s];
        else
            x->t[n++] = x->t[s];
    x->n = n;
}

static double cosine(const token *a, const token *b) {
    double dot = 0, na = 0, nb = 0;
    for (uint32_t i = 0; i < m.c->d; i++) {
        dot += a->k[i] * b->k[i];
        na += a->k[i] * a->k[i];
        nb += b->k[i] * b->k[i];
    }
    return na > 0 && nb > 0 ? dot / sqrt(na * nb) : 0.0;
}

/* The nearest kept token of each evicted one; target_pos: the library's. */
static void naive_match(head *x, const uint32_t *target_pos) {
    for (uint32_t i = 0; i < x->n_gone; i++) {
        uint32_t theirs = UINT32_MAX;
        x->u[i] = -2;
        for (uint32_t s = 0; s < x->n; s++) {
            double u = cosine(&x->gone[i], &x->t[s]);
            if (u > x->u[i]) x->u[i] = u, x->target[i] = s;
            if (x->t[s].pos == target_pos[i]) theirs = s;
        }
        cr_assert(theirs != UINT32_MAX, "the library merges into a token that is not kept");
        if (theirs == x->target[i]) continue;
        cr_assert(cosine(&x->gone[i], &x->t[theirs]) > x->u[i] - 1e-6, "position %u: nearest is %u, not %u",
                  x->gone[i].pos, x->t[x->target[i]].pos, target_pos[i]);
        x->target[i] = theirs;
        m.n_close++;
    }
}

static void naive_gate(uint32_t l, bool merged[LIFE_KV][LIFE_TOKENS]) {
    const kvf_policy_options *o = &m.c->o;
    uint32_t n_kv = m.c->n_kv, n = m.h[l][0].n_gone;
    for (uint32_t h = 0; h < n_kv; h++) {
        head *x = &m.h[l][h];
        double mean = 0, entry[LIFE_TOKENS];
        for (uint32_t i = 0; i < n; i++) {
            entry[i] = x->u[i];
            if (o->scope == KVF_SCOPE_LAYER) {
                entry[i] = 0;
                for (uint32_t k = 0; k < n_kv; k++) entry[i] += m.h[l][k].u[i] / n_kv;
            }
            mean += entry[i] / n;
        }
        if (isnan(o->gate)) x->tau = isnan(x->tau) ? mean : o->beta_new * mean + o->beta_old * x->tau;
        for (uint32_t i = 0; i < n; i++) {
            double tau = isnan(o->gate) ? x->tau : o->gate;
            x->merge[i] = merged[h][i];
            if (merged[h][i] == (entry[i] >= tau)) continue;
            cr_assert(fabs(entry[i] - tau) < 1e-6, "u %.9f, tau %.9f: merge %d", entry[i], tau, merged[h][i]);
            m.n_close++;
        }
    }
}

static void naive_merge(head *x) {
    const kvf_policy_options *o = &m.c->o;
    for (uint32_t s = 0; s < x->n; s++) {
        token *t = &x->t[s];
        double own = o->merge == KVF_MERGE_PAPER ? exp(1) : o->merge == KVF_MERGE_MASS ? t->weight : 1, z = own, n = 0;
        token sum = *t;
        for (uint32_t e = 0; e < m.c->d; e++) sum.k[e] *= own, sum.v[e] *= own;
        for (uint32_t i = 0; i < x->n_gone; i++) {
            if (!x->merge[i] || x->target[i] != s) continue;
            double w = o->merge == KVF_MERGE_PAPER     ? exp(x->u[i])
                       : o->merge == KVF_MERGE_AUTHORS ? x->u[i]
                       : o->merge == KVF_MERGE_MASS    ? x->gone[i].weight
                                                       : 1;
            for (uint32_t e = 0; e < m.c->d; e++) sum.k[e] += w * x->gone[i].k[e], sum.v[e] += w * x->gone[i].v[e];
            z += w;
            n++;
        }
        if (n == 0) continue;
        if (o->merge == KVF_MERGE_AUTHORS) z = 1 + n;
        for (uint32_t e = 0; e < m.c->d; e++) {
            if (o->merge_keys) t->k[e] = sum.k[e] / z;
            t->v[e] = sum.v[e] / z;
        }
        if (o->merge == KVF_MERGE_MASS) t->weight = z;
    }
}

/* The events that are due, each against the library's plan: entry i of a head is its i-th evicted token by position. */
static void naive_events(const life_lib *x, uint32_t positions[LIFE_LAYERS][LIFE_KV][LIFE_TOKENS], bool prompt,
                         uint32_t above) {
    uint32_t seen = 0;
    for (uint32_t l = 0; l < m.c->n_layers && m.sized; l++) {
        bool due = !m.full[l] && m.h[l][0].n >= m.S[l] + above;
        while (prompt && seen < x->n_events && x->events[seen].layer < l) seen++;
        if (!due) continue;
        cr_assert(seen < x->n_events && x->events[seen].layer == l && x->events[seen].n_keep == m.S[l],
                  "layer %u: no event to %u", l, m.S[l]);
        const kvf_plan_event *pe = &x->r->plan->events[seen++];
        bool merged[LIFE_KV][LIFE_TOKENS];
        for (uint32_t h = 0; h < m.c->n_kv; h++) {
            head *y = &m.h[l][h];
            uint32_t target[LIFE_TOKENS];
            naive_evict(y, m.S[l], m.M[l]);
            cr_assert_eq(y->n_gone, pe->n_evict);
            m.n_evicted += y->n_gone;
            for (uint32_t i = 0; i < y->n_gone; i++) {
                const kvf_plan_entry *e = &x->r->plan->entries[pe->entry_begin + (uint64_t)h * pe->n_evict + i];
                cr_assert_eq(positions[l][h][e->slot], y->gone[i].pos, "layer %u head %u: %u evicted, not %u", l, h,
                             positions[l][h][e->slot], y->gone[i].pos);
                target[i] = e->target == UINT32_MAX ? UINT32_MAX : positions[l][h][e->target];
                merged[h][i] = e->merge;
                m.n_merged += e->merge;
            }
            if (m.c->o.merge != KVF_MERGE_NONE) naive_match(y, target);
        }
        if (m.c->o.merge == KVF_MERGE_NONE) continue;
        naive_gate(l, merged);
        for (uint32_t h = 0; h < m.c->n_kv; h++) naive_merge(&m.h[l][h]);
    }
}

static void naive_append(void) {
    for (uint32_t l = 0; l < m.c->n_layers; l++)
        for (uint32_t h = 0; h < m.c->n_kv; h++) {
            float k[LIFE_D], v[LIFE_D];
            token *t = &m.h[l][h].t[m.h[l][h].n++];
            *t = (token){.pos = m.next_pos, .weight = 1};
            life_row(m.c, 0, l, h, m.next_pos, k);
            life_row(m.c, 1, l, h, m.next_pos, v);
            for (uint32_t e = 0; e < m.c->d; e++) t->k[e] = (double)k[e], t->v[e] = (double)v[e];
        }
    m.next_pos++;
}

/* ---- Both side by side -------------------------------------------------------------------------------------------- */

static double worst_kv, worst_tau;

static void compare(const life_lib *x) {
    for (uint32_t l = 0; l < m.c->n_layers; l++)
        for (uint32_t h = 0; h < m.c->n_kv; h++) {
            const head *y = &m.h[l][h];
            kvf__head lib = rig_head(x->r, 0, l, h);
            double tau = kvf_policy_tau(x->r->state, 0, l, h);
            cr_assert_eq(lib.n_slots, y->n, "layer %u: %u slots, not %u", l, lib.n_slots, y->n);
            cr_assert_eq(isnan(tau), isnan(y->tau));
            if (!isnan(tau)) {
                cr_assert_float_eq(tau, y->tau, 1e-6, "layer %u head %u: tau %.9f, not %.9f", l, h, tau, y->tau);
                worst_tau = fmax(worst_tau, fabs(tau - y->tau));
            }
            for (uint32_t s = 0; s < lib.n_slots; s++) {
                uint32_t pos = rig_pos(x->r, 0, l, h, s), i = 0;
                while (i < y->n && y->t[i].pos != pos) i++;
                cr_assert(i < y->n, "layer %u head %u keeps position %u", l, h, pos);
                cr_assert_eq(*rig_score(x->r, 0, l, h, 0, s), y->t[i].score);
                for (uint32_t e = 0; e < m.c->d; e++) {
                    double k = rig_get(x->r, kvf__k_row(&lib, s), e), v = rig_get(x->r, kvf__v_row(&lib, s), e);
                    double off =
                        fmax(fabs(k - y->t[i].k[e]) / fmax(1, fabs(k)), fabs(v - y->t[i].v[e]) / fmax(1, fabs(v)));
                    cr_assert(off <= 1e-5, "layer %u head %u position %u: off by %g", l, h, pos, off);
                    worst_kv = fmax(worst_kv, off);
                }
                if (m.c->o.merge == KVF_MERGE_MASS)
                    cr_assert_eq(x->r->pages.weight[kvf__slot_index(&lib, s)], y->t[i].weight);
            }
        }
}

static void note_positions(const life_lib *x, uint32_t out[LIFE_LAYERS][LIFE_KV][LIFE_TOKENS]) {
    for (uint32_t l = 0; l < m.c->n_layers; l++)
        for (uint32_t h = 0; h < m.c->n_kv; h++)
            for (uint32_t s = 0; s < rig_slots(x->r, 0, l); s++) out[l][h][s] = rig_pos(x->r, 0, l, h, s);
}

static void naive_begin(const life_case *c) {
    memset(&m, 0, sizeof m);
    m.c = c;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        for (uint32_t i = 0; i < c->o.n_full_layers; i++)
            m.full[l] |= c->o.full_layers[i] == (int32_t)l || c->o.full_layers[i] + (int32_t)c->n_layers == (int32_t)l;
        for (uint32_t h = 0; h < c->n_kv; h++) m.h[l][h].tau = NAN;
    }
    for (uint32_t p = 0; p < c->n_prompt; p++) naive_append();
    for (uint32_t l = 0; l < c->n_layers; l++)
        for (uint32_t h = 0; h < c->n_kv; h++)
            for (uint32_t p = 0; p < c->n_prompt; p++) {
                double a = 0;
                for (uint32_t q = 0; q < c->g; q++) {
                    double x = (double)life_sum(c, l, h * c->g + q, p);
                    a = c->o.gqa == KVF_GQA_MAX ? fmax(a, x) : a + x;
                }
                m.h[l][h].t[p].score = a;
            }
    m.B = c->o.budget_tokens ? c->o.budget_tokens : (uint32_t)floor(c->o.rho * c->n_prompt + 1e-6);
}

static void live(uint64_t seed) {
    life_case c = life_draw(seed);
    life_lib x;
    static uint32_t positions[LIFE_LAYERS][LIFE_KV][LIFE_TOKENS];
    uint32_t k = c.o.evict_every ? c.o.evict_every : c.bs / 2;
    cr_log_info("seed %llu: %u layers, %u x %u heads of %u, prompt %u, merge %d, scope %d, k %u",
                (unsigned long long)seed, c.n_layers, c.n_kv, c.g, c.d, c.n_prompt, (int)c.o.merge, (int)c.o.scope, k);
    naive_begin(&c);
    for (uint32_t l = 0; l < c.n_layers; l++)
        for (uint32_t h = 0; h < c.n_kv; h++)
            for (uint32_t s = 0; s < c.n_prompt; s++) positions[l][h][s] = s;
    life_begin(&x, &c);
    if (m.B < c.n_prompt && !c.o.defer_first_decode) {
        naive_sizes(true);
        naive_events(&x, positions, true, 1);
    }
    compare(&x);
    for (uint32_t step = 0; step < c.n_steps; step++) {
        note_positions(&x, positions);
        life_overflow(&x);
        if (!m.sized && m.next_pos == m.B) { /* this append would be B + 1 */
            naive_sizes(false);
            naive_events(&x, positions, false, 1);
        } else {
            cr_assert_eq(x.n_events, 0);
        }
        note_positions(&x, positions);
        naive_append();
        for (uint32_t l = 0; l < c.n_layers; l++)
            for (uint32_t h = 0; h < c.n_kv; h++)
                for (uint32_t s = 0; s < m.h[l][h].n; s++)
                    m.h[l][h].t[s].score += (double)life_mass(&c, l, h, step, m.h[l][h].t[s].pos);
        for (uint32_t l = 0; l < c.n_layers; l++)
            for (uint32_t h = 0; h < c.n_kv; h++) positions[l][h][rig_slots(x.r, 0, l)] = m.next_pos - 1;
        life_step(&x, step);
        bool deferred = c.o.defer_first_decode && !m.sized;
        if (deferred) naive_sizes(true);
        naive_events(&x, positions, false, deferred ? 1 : k);
        compare(&x);
    }
    rig_free(x.r);
}

#if defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
enum { N_LIVES = 40 };
#else
enum { N_LIVES = 200 };
#endif

Test(policy_life, random_lives_are_those_of_the_naive_reference) {
    uint64_t n_merged = 0, n_evicted = 0, n_close = 0;
    for (uint64_t seed = 0; seed < N_LIVES; seed++) {
        live(seed);
        n_merged += m.n_merged;
        n_evicted += m.n_evicted;
        n_close += m.n_close;
    }
    cr_log_info("%llu evicted, %llu merged, %llu taken as the library had them; K and V off by %g, tau by %g",
                (unsigned long long)n_evicted, (unsigned long long)n_merged, (unsigned long long)n_close, worst_kv,
                worst_tau);
    cr_assert(n_evicted > 250 * N_LIVES && n_merged > 100 * N_LIVES && n_close * 5000 < n_evicted);
}
