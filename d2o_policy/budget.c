/* Layer level: exact integer sizes from weights, and what a request will need (README.md, layer level). */
#include <math.h>

#include "d2o_policy/policy.h"

#define FLOOR_SLACK 1e-6 /* 99.9999999 is meant to be 100 */

static void sort_doubles(double *a, uint32_t n) {
    for (uint32_t i = n / 2, end = n; end > 1;) { /* heap sort: no allocation, at most 2,048 numbers */
        double x;
        if (i > 0) {
            x = a[--i];
        } else {
            x = a[--end];
            a[end] = a[0];
        }
        uint32_t hole = i;
        for (uint32_t child; (child = 2 * hole + 1) < end; hole = child) {
            if (child + 1 < end && a[child + 1] > a[child]) child++;
            if (a[child] <= x) break;
            a[hole] = a[child];
        }
        a[hole] = x;
    }
}

static double clamped_sum(const double *w, uint32_t n, double lam, double lo, double hi) {
    double sum = 0.0;
    for (uint32_t l = 0; l < n; l++) sum += KVF__MIN(KVF__MAX(lam * KVF__MAX(w[l], 1e-30), lo), hi);
    return sum;
}

/* Gives the units that flooring left to the largest remainders, ties to the lower layer; there are fewer units than
 * layers below hi. */
static void hand_out(const double *rest, uint32_t n, uint64_t left, uint32_t hi, uint32_t *order, uint32_t *out) {
    for (uint32_t i = 0; i < n; i++) { /* insertion sort, stable */
        uint32_t j = i;
        for (; j > 0 && rest[order[j - 1]] < rest[i]; j--) order[j] = order[j - 1];
        order[j] = i;
    }
    for (uint32_t i = 0; i < n && left > 0; i++) {
        if (out[order[i]] >= hi) continue;
        out[order[i]]++;
        left--;
    }
}

void kvf__exact_sizes(const double *w, uint32_t n, uint64_t total, uint32_t lo, uint32_t hi, double *scratch,
                      uint32_t *order, uint32_t *out) {
    /* The sum of clamp(lam * w, lo, hi) is piecewise linear in lam, with breakpoints lo / w and hi / w. */
    double *points = scratch, *rest = scratch + 2 * (size_t)n, goal = (double)total;
    for (uint32_t l = 0; l < n; l++) {
        points[2 * l] = lo / KVF__MAX(w[l], 1e-30);
        points[2 * l + 1] = hi / KVF__MAX(w[l], 1e-30);
    }
    sort_doubles(points, 2 * n);
    uint32_t a = 0, b = 2 * n - 1; /* the first point whose sum reaches the goal; the last one reaches n * hi */
    while (a < b) {
        uint32_t mid = (a + b) / 2;
        if (clamped_sum(w, n, points[mid], lo, hi) >= goal)
            b = mid;
        else
            a = mid + 1;
    }
    double above = points[a], below = a ? points[a - 1] : 0.0, fixed = 0.0, free_w = 0.0;
    for (uint32_t l = 0; l < n; l++) {
        double x = KVF__MAX(w[l], 1e-30);
        rest[l] = lo / x >= above ? lo : hi / x <= below ? hi : -1.0;
        if (rest[l] < 0.0)
            free_w += x;
        else
            fixed += rest[l];
    }
    uint64_t used = 0;
    for (uint32_t l = 0; l < n; l++) {
        double x = rest[l] < 0.0 ? KVF__MAX(w[l], 1e-30) * ((goal - fixed) / free_w) : rest[l];
        double whole = floor(x + FLOOR_SLACK);
        out[l] = (uint32_t)KVF__MIN(KVF__MAX(whole, lo), hi);
        rest[l] = rint((x - whole) * 1e9); /* remainders equal but for rounding are ties */
        used += out[l];
    }
    hand_out(rest, n, total > used ? total - used : 0, hi, order, out);
}

/* ---- From options to sizes ------------------------------------------------------------------------ */

void kvf__split(const kvf_policy_options *o, uint32_t keep, kvf_layer_size *size) {
    uint32_t window;
    if (kvf__policy_flags(o) & KVF_POLICY_RECENT) {
        window = keep - KVF__MIN(o->sinks, keep - 1);
    } else if (o->window) {
        window = KVF__MIN(o->window, keep);
    } else {
        uint32_t s = o->sinks_extra ? keep - KVF__MIN(o->sinks, keep) : keep;
        window = KVF__MAX(1u, (uint32_t)((uint64_t)s * o->m_parts / (o->n_parts + o->m_parts)));
    }
    size->keep = keep;
    size->hh = keep - window;
    size->window = window;
}

uint32_t kvf__budget_tokens(const kvf_policy_options *o, uint32_t n_prompt) {
    if (o->budget_tokens) return o->budget_tokens;
    uint32_t b = (uint32_t)floor(o->rho * n_prompt + FLOOR_SLACK);
    if (o->redistribute) b = KVF__MAX(b, o->min_tokens);
    return KVF__MAX(b, 1u);
}

uint32_t kvf__global_window(const kvf_policy_options *o, uint32_t budget) {
    kvf_layer_size even;
    kvf__split(o, budget, &even);
    return isnan(o->threshold) || !o->window ? even.window : o->window; /* a threshold leaves the budget out */
}

kvf__share kvf__layer_share(const kvf_policy_options *o, uint32_t n_layers, uint32_t block_size, uint32_t n_prompt,
                            uint32_t budget, uint32_t lo, bool clamp) {
    kvf__share s = {.n_full = kvf__policy_n_full(o, n_layers), .lo = lo, .hi = KVF__NO_UPPER, .unit = 1};
    s.n = n_layers - s.n_full;
    /* What the full layers hold, the others pay for. */
    uint64_t all = (uint64_t)budget * n_layers, paid = (uint64_t)s.n_full * KVF__MAX(n_prompt, budget);
    uint64_t tokens = all > paid ? all - paid : 0, k = kvf__policy_room(o, block_size);
    if (o->budget == KVF_BUDGET_GLOBAL) { /* full layers are beside the budget; each table has its sinks and window */
        uint32_t protected = o->sinks + kvf__global_window(o, budget);
        s.lo = lo = KVF__MAX((uint32_t)floor(o->head_floor * budget + FLOOR_SLACK), protected);
        tokens = (uint64_t)budget * s.n;
    }
    if (clamp) s.hi = KVF__MAX(n_prompt, lo);
    if (o->budget_unit == KVF_BUDGET_BLOCK) {
        s.unit = block_size;
        s.lo = (uint32_t)((lo + k + block_size - 1) / block_size);
        s.hi = KVF__MAX(s.lo, (uint32_t)((s.hi + k + block_size - 1) / block_size));
    }
    s.total = tokens / s.unit;
    uint64_t least = (uint64_t)s.n * s.lo, most = (uint64_t)s.n * s.hi;
    if (s.total < least) {
        s.raised_tokens = least * s.unit - tokens;
        s.total = least;
    }
    s.total = KVF__MIN(s.total, most);
    return s;
}

uint64_t kvf__global_units(const kvf__share *share, uint32_t budget, uint64_t n) {
    return KVF__MAX(budget * n / share->unit, n * share->lo);
}

/* The authors' sizes: ratios clamped to [0.01, 1], what is clamped is handed to nobody, hh and M floored one by one. */
static void ratio_sizes(const kvf_policy_state *state, kvf__policy_seq *s) {
    const kvf_policy_options *o = &s->options;
    uint32_t n = state->config.n_layers, base = KVF__MAX(s->n_prompt, s->budget);
    /* Where an absolute budget is set, or the budget is above the prompt, the ratio is the budget's. */
    bool absolute = o->budget_tokens || s->budget >= s->n_prompt;
    double rho = absolute ? (double)s->budget / base : o->rho, parts = (double)o->n_parts + o->m_parts;
    for (uint32_t l = 0; l < n; l++) {
        kvf_layer_size *z = &s->sizes[l];
        double x = base * KVF__MIN(KVF__MAX(s->weights[l] * n * rho, 0.01), 1.0), extra = 0.0;
        if (o->sinks_extra) {
            extra = KVF__MIN(o->sinks, x);
            x -= extra;
        }
        z->hh = (uint32_t)floor(x * o->n_parts / parts + FLOOR_SLACK) + (uint32_t)extra;
        z->window = (uint32_t)floor(x * o->m_parts / parts + FLOOR_SLACK);
        if (z->hh + z->window == 0) z->window = 1;
        z->keep = z->hh + z->window;
        if (o->window || kvf__policy_flags(o) & KVF_POLICY_RECENT) kvf__split(o, z->keep, z);
    }
}

void kvf__policy_size(kvf_policy_state *state, kvf__policy_seq *s, bool clamp) {
    const kvf_policy_options *o = &s->options;
    uint32_t n_layers = state->config.n_layers, k = kvf__policy_room(o, state->config.block_size);
    bool grows = kvf__policy_flags(o) & KVF_POLICY_PROMPT_ONLY;
    if (!o->redistribute) {
        ratio_sizes(state, s);
    } else {
        kvf__share share =
            kvf__layer_share(o, n_layers, state->config.block_size, s->n_prompt, s->budget, s->lo, clamp);
        double *w = state->scratch + 3 * (size_t)n_layers;
        uint32_t *x = state->integers + n_layers;
        for (uint32_t l = 0, i = 0; l < n_layers; l++)
            if (!kvf__policy_is_full_layer(o, l, n_layers)) w[i++] = s->weights[l];
        if (share.n) kvf__exact_sizes(w, share.n, share.total, share.lo, share.hi, state->scratch, state->integers, x);
        for (uint32_t l = 0, i = 0; l < n_layers; l++) {
            if (kvf__policy_is_full_layer(o, l, n_layers)) continue;
            kvf__split(o, share.unit == 1 ? x[i] : x[i] * share.unit - k, &s->sizes[l]);
            i++;
        }
        s->counts.raised_tokens = share.raised_tokens;
    }
    for (uint32_t l = 0; l < n_layers; l++) {
        kvf_layer_size *z = &s->sizes[l];
        if (kvf__policy_is_full_layer(o, l, n_layers))
            *z = (kvf_layer_size){UINT32_MAX, UINT32_MAX, 0, UINT32_MAX};
        else
            z->reserve = grows ? UINT32_MAX : z->keep + k;
    }
    s->sized = true;
    s->deferred = false;
}

/* ---- The projected need ------------------------------------------------------------------------------ */

static uint64_t blocks(uint64_t tokens, uint32_t block_size) { return (tokens + block_size - 1) / block_size; }

/* Most tokens of a repetition of the prompt that are held beside it. */
static uint32_t piece_tokens(const kvf_policy_options *o, uint32_t n_prompt) {
    if (!(kvf_policy_needs(o) & KVF_NEEDS_REPEAT)) return 0;
    return KVF_MAX_INSTRUCTION_TOKENS + (o->repeat_piece ? KVF__MIN(o->repeat_piece, n_prompt) : n_prompt);
}

kvf_status kvf_policy_project(const kvf_policy_options *options, uint32_t n_layers, uint32_t n_groups,
                              uint32_t block_size, uint32_t n_prompt, uint32_t max_new, kvf_policy_need *need,
                              kvf_error *err) {
    kvf_policy_options copy;
    const kvf_policy_options *o = kvf__options_of(options, &copy);
    if (!o || !need)
        return kvf__fail(err, KVF_E_INVALID, "kvf_policy_project: options, their ops and need must be set");
    if (n_layers == 0 || n_layers > KVF__MAX_LAYERS || n_groups == 0 || block_size == 0)
        return kvf__fail(err, KVF_E_INVALID,
                         "n_layers %u, n_groups %u, block_size %u: must be positive, and at most %u layers", n_layers,
                         n_groups, block_size, KVF__MAX_LAYERS);
    if (n_prompt == 0 || n_prompt > KVF__MAX_TOKENS)
        return kvf__fail_field(err, KVF_E_INVALID, "n_prompt", n_prompt, 0, "must be in [1, %u]", KVF__MAX_TOKENS);
    kvf_status st = kvf_policy_options_check(o, n_layers, block_size, err);
    if (!st) st = kvf__policy_resolved(o, err);
    if (st) return st;
    uint32_t b = kvf__budget_tokens(o, n_prompt), k = kvf__policy_room(o, block_size);
    bool fits = b >= n_prompt; /* append only until the overflow */
    bool grows = kvf__policy_flags(o) & KVF_POLICY_PROMPT_ONLY;
    uint64_t whole = blocks((uint64_t)n_prompt + max_new, block_size);
    uint64_t at_end = (uint64_t)n_prompt + piece_tokens(o, n_prompt);
    kvf_policy_need r = {.prompt_blocks = (uint64_t)n_layers * n_groups * blocks(at_end, block_size),
                         .budget_tokens = b};
    if (kvf__policy_never_evicts(o) || (grows && fits)) {
        r.steady_blocks = (uint64_t)n_layers * n_groups * whole;
        *need = r;
        return KVF_OK;
    }
    kvf__share s = kvf__layer_share(o, n_layers, block_size, n_prompt, b, KVF__MIN(b, KVF_MIN_BUDGET_TOKENS), !fits);
    bool global = o->budget == KVF_BUDGET_GLOBAL;
    if (o->redistribute && !global && s.n_full && (uint64_t)b * n_layers <= (uint64_t)s.n_full * n_prompt)
        return kvf__fail_value(err, KVF_E_INVALID, "full_layers", "",
                               "%u full layers of %u tokens leave nothing of the budget, %u tokens x %u layers, to the "
                               "others: list fewer layers or raise rho or budget_tokens",
                               s.n_full, n_prompt, b, n_layers);
    if (o->defer_first_decode && !fits)
        r.prompt_blocks = (uint64_t)n_layers * n_groups * blocks(KVF__MAX(at_end, (uint64_t)n_prompt + 1), block_size);
    /* Groups of different sizes round up to whole blocks each by itself: of all tables together. */
    uint64_t steady, g = global || o->head_budget == KVF_HEAD_BUDGET_ADAPTIVE ? n_groups : 1;
    if (grows) /* each layer by all of max_new, from sizes that add up to the total */
        steady = g *
                 ((o->redistribute ? s.total * s.unit : (uint64_t)s.n * n_prompt) +
                  (uint64_t)s.n * ((uint64_t)max_new + block_size - 1)) /
                 block_size;
    else if (!o->redistribute && g > 1)
        steady = g * s.n * ((uint64_t)KVF__MAX(n_prompt, b) + k + block_size - 1) / block_size;
    else if (!o->redistribute)
        steady = s.n * blocks((uint64_t)KVF__MAX(n_prompt, b) + k, block_size);
    else if (o->budget_unit == KVF_BUDGET_BLOCK)
        steady = global ? kvf__global_units(&s, b, g * s.n) : g * s.total;
    else
        steady = g * (s.total + (uint64_t)s.n * (k + block_size - 1)) / block_size;
    if (fits) { /* until the overflow every layer holds up to B, which whole blocks of the total need not cover */
        steady = KVF__MAX(steady, g * s.n * blocks(b, block_size));
        steady = KVF__MIN(steady, g * s.n * whole);
    }
    if (!isnan(o->threshold)) steady = g * s.n * whole; /* nobody knows before the scores are there */
    r.steady_blocks = n_groups / g * steady + (uint64_t)n_groups * s.n_full * whole;
    r.bounded = s.n_full == 0 && !grows && isnan(o->threshold);
    *need = r;
    return KVF_OK;
}
