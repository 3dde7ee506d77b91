/* Equal memory: the blocks a policy may hold, the blocks it holds, and a lower budget if those are too many. */
#include <math.h>
#include <stdlib.h>

#include "eval/eval.h"

enum { STEPS = 256, HALVINGS = 30 };

static const double slack = 1.01; /* of the target: what counts as equal */

double kvf__eval_target(const kvf__eval_shape *s, double rho) {
    return floor(rho * s->n_prompt * s->n_layers / s->block_size + 1e-6) * s->n_groups;
}

/* At 1 nothing is ever evicted, so that a cell grows past its target and has no sizes that could be lowered. */
double kvf__eval_first_rho(double rho) { return rho < 1 ? rho : 0.999999; }

bool kvf__eval_within(double held, double target) { return held <= target * slack; }

/* Blocks of a layer's tables in decode step t, from 1: the last token that is forced is never appended. */
static double at_step(const kvf__eval_shape *s, const kvf_layer_size *size, uint32_t t) {
    double slots = size->reserve;
    if (size->reserve == UINT32_MAX) slots = (double)(size->keep < s->n_prompt ? size->keep : s->n_prompt) + t;
    if (s->deferred && t == 1 && slots < s->n_prompt + 1.0) slots = s->n_prompt + 1.0;
    return ceil(slots / s->block_size);
}

/* Of n_tables tables, one for each of the sizes. */
static double held_of(const kvf__eval_shape *s, const kvf_layer_size *sizes, uint32_t n_tables) {
    uint32_t first = s->n_steps > 1 ? 1 : 0,
             n = s->n_steps > 1 ? s->n_steps - 1 : 1; /* without a step: the prompt's end */
    double held = 0;
    for (uint32_t i = 0; i < n_tables; i++) {
        bool grows = sizes[i].reserve == UINT32_MAX;
        double sum = at_step(s, &sizes[i], first);
        for (uint32_t t = 1; t < n && grows; t++) sum += at_step(s, &sizes[i], first + t);
        if (!grows && n > 1) sum += (n - 1) * at_step(s, &sizes[i], first + 1);
        held += sum / n;
    }
    return held;
}

double kvf__eval_held(const kvf__eval_shape *s, const kvf_layer_size *sizes) {
    return held_of(s, sizes, s->n_layers) * s->n_groups;
}

double kvf__eval_held_by_groups(const kvf__eval_shape *s, const kvf_layer_size *sizes) {
    return held_of(s, sizes, s->n_layers * s->n_groups);
}

typedef struct search {
    const kvf__eval_shape *shape;
    kvf_policy_options options;
    kvf_policy_state *running; /* of the sequence that held too much */
    uint32_t seq;
    kvf_policy_state *scratch; /* where layers are equal: sizes follow from the options alone */
    kvf_layer_size *sizes;     /* [n_layers] */
} search;

/* Blocks held with that rho; infinite if the policy refuses it. Policies with equal layers are projected anew, since
 * one that compresses only its prompt cannot be previewed after its prompt; for the others the running sequence has
 * the layer weights. */
static double would_hold(search *s, double rho) {
    int sized = 0;
    s->options.rho = rho;
    if (!s->scratch) {
        if (kvf_policy_preview_budget(s->running, s->seq, rho, 0, s->sizes, &sized, NULL) || !sized) return INFINITY;
        return kvf__eval_held(s->shape, s->sizes);
    }
    kvf_policy_need need; /* refuses full layers that leave nothing to the others, as a submission does */
    if (kvf_policy_project(&s->options, s->shape->n_layers, 1, s->shape->block_size, s->shape->n_prompt, 0, &need,
                           NULL) ||
        kvf_policy_open(s->scratch, 0, &s->options, NULL) ||
        kvf_policy_budget(s->scratch, 0, NULL, s->shape->n_prompt, NULL) || !kvf_policy_sizes(s->scratch, 0))
        return INFINITY;
    return kvf__eval_held(s->shape, kvf_policy_sizes(s->scratch, 0));
}

static bool begin_search(search *s) {
    kvf_policy_state_config config = {.struct_size = sizeof config,
                                      .n_layers = s->shape->n_layers,
                                      .n_kv_heads = 1,
                                      .n_q_heads = 1,
                                      .head_dim = 64,
                                      .block_size = s->shape->block_size,
                                      .max_seqs = 1,
                                      .max_slots = s->shape->n_prompt + s->shape->n_steps};
    s->sizes = malloc(s->shape->n_layers * sizeof *s->sizes);
    bool equal = !kvf_policy_has_metric(&s->options);
    return s->sizes && (!equal || !kvf_policy_state_create(&config, &s->scratch, NULL));
}

/* Blocks do not always fall with rho: full layers may leave nothing for the others, and minima raise the total. So
 * this steps downward to the first rho that fits, and from there upward as far as it still fits. */
double kvf__eval_lower(const kvf__eval_shape *shape, const kvf_policy_options *options, kvf_policy_state *state,
                       uint32_t seq, double rho, double target) {
    search s = {.shape = shape, .options = *options, .running = state, .seq = seq};
    double low = 0, high = rho;
    bool ok = begin_search(&s);
    for (int i = STEPS - 1; ok && i > 0 && low == 0; i--) {
        double at = rho * i / STEPS;
        if (would_hold(&s, at) <= target)
            low = at;
        else
            high = at;
    }
    for (int i = 0; i < HALVINGS && low > 0; i++) {
        double middle = (low + high) / 2;
        if (would_hold(&s, middle) <= target)
            low = middle;
        else
            high = middle;
    }
    double told = floor(low * 1e9) / 1e9; /* as records have it, so that who runs with that rho gets the same */
    if (told > 0 && would_hold(&s, told) <= target) low = told;
    kvf_policy_state_destroy(s.scratch);
    free(s.sizes);
    return low;
}
