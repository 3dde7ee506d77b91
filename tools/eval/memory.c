/* Equal memory: how many blocks a policy may hold, how many it does, and a lower budget where those are too many. */
#include <math.h>

#include "tools/eval/eval.h"

enum { STEPS = 256, HALVINGS = 30 };

static const double slack = 1.01; /* of the target: what counts as equal */

double kvf__eval_target(const kvf__eval_shape *s, double rho) {
    return floor(rho * s->n_prompt * s->n_layers / s->block_size + 1e-6) * s->n_groups;
}

bool kvf__eval_within(double held, double target) { return held <= target * slack; }

/* Blocks of a layer's tables in decode step t, from 1: the last token that is forced is never appended. */
static double at_step(const kvf__eval_shape *s, const kvf_layer_size *size, uint32_t t) {
    double slots = size->reserve;
    if (size->reserve == UINT32_MAX) slots = (double)(size->keep < s->n_prompt ? size->keep : s->n_prompt) + t;
    if (s->deferred && t == 1 && slots < s->n_prompt + 1.0) slots = s->n_prompt + 1.0;
    return ceil(slots / s->block_size);
}

double kvf__eval_held(const kvf__eval_shape *s, const kvf_layer_size *sizes) {
    uint32_t first = s->n_steps > 1 ? 1 : 0,
             n = s->n_steps > 1 ? s->n_steps - 1 : 1; /* without a step: the prompt's end */
    double held = 0;
    for (uint32_t l = 0; l < s->n_layers; l++) {
        bool grows = sizes[l].reserve == UINT32_MAX;
        double sum = at_step(s, &sizes[l], first);
        for (uint32_t t = 1; t < n && grows; t++) sum += at_step(s, &sizes[l], first + t);
        if (!grows && n > 1) sum += (n - 1) * at_step(s, &sizes[l], first + 1);
        held += sum / n;
    }
    return held * s->n_groups;
}

/* Blocks by which a sequence would go on with that rho; infinite where that cannot be. */
static double would_hold(const kvf__eval_shape *s, kvf_policy_state *state, uint32_t seq, double rho,
                         kvf_layer_size *sizes) {
    int sized = 0;
    if (kvf_policy_preview_budget(state, seq, rho, 0, sizes, &sized, NULL) || !sized) return INFINITY;
    return kvf__eval_held(s, sizes);
}

/* Not everything falls with rho: below some full layers leave nothing for the others, and minima lift the total. So steps
 * downward, to the first that fits, and from there up as far as it goes. */
double kvf__eval_lower(const kvf__eval_shape *s, kvf_policy_state *state, uint32_t seq, double rho, double target) {
    kvf_layer_size sizes[1024];
    if (s->n_layers > sizeof sizes / sizeof sizes[0]) return 0;
    double low = 0, high = rho;
    for (int i = STEPS - 1; i > 0 && low == 0; i--) {
        double at = rho * i / STEPS;
        if (would_hold(s, state, seq, at, sizes) <= target)
            low = at;
        else
            high = at;
    }
    for (int i = 0; i < HALVINGS && low > 0; i++) {
        double middle = (low + high) / 2;
        if (would_hold(s, state, seq, middle, sizes) <= target)
            low = middle;
        else
            high = middle;
    }
    return low;
}
