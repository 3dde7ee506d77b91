/* roco: evicts, of the tokens whose attention varies least, those with the lowest mean attention.
 *
 * Source: RoCo, arXiv 2402.06262, its robust cache omission policy. Of each token the sums of a and of a^2 over the queries
 * that saw it are kept, a being the attention it got, the query heads of a KV head as one (option gqa; with max the prompt's
 * sum of a is that of the strongest query head). next_pos - pos queries saw it. The standard deviation is infinite for the
 * window (the last 10 tokens) and the sinks. The budget - 0.3 budget slots of least deviation are candidates; of these the
 * lowest mean goes.
 *
 * The paper evicts one of budget + 1 slots at a time, so that 0.3 budget + 1 of them are no candidates. Here as many are none
 * however many go at once: of n slots, S of which stay, all but floor(0.3 S) + 1 are candidates. Deviations are compared as
 * floats; of equal ones the lower position is no candidate. */
#include <math.h>

#include "d2o_policy/policy.h"

#define UNSTABLE_SHARE 0.3

/* The n-th highest of x[0..count), 1 <= n <= count, no two equal; x is reordered. Hoare's selection. */
static uint64_t nth_highest(uint64_t *x, uint32_t count, uint32_t n) {
    int64_t lo = 0, hi = (int64_t)count - 1;
    while (lo < hi) {
        uint64_t pivot = x[lo + (hi - lo) / 2], swap;
        int64_t i = lo - 1, j = hi + 1;
        for (;;) {
            do i++;
            while (x[i] > pivot);
            do j--;
            while (x[j] < pivot);
            if (i >= j) break;
            swap = x[i];
            x[i] = x[j];
            x[j] = swap;
        }
        if ((int64_t)n - 1 <= j)
            hi = j;
        else
            lo = j + 1;
    }
    return x[lo];
}

/* Rises with the deviation of the attention that a slot got, then falls with its position. NaN counts as none. */
static uint64_t stability_key(const kvf_policy_slots *s, uint32_t slot) {
    double queries = s->next_pos - s->pos[slot], mean = (double)s->score[slot] / queries;
    float deviation = (float)sqrt((double)s->squares[slot] / queries - mean * mean);
    uint32_t bits = 0;
    if (deviation > 0) memcpy(&bits, &deviation, sizeof bits);
    return (uint64_t)bits << 32 | (UINT32_MAX - s->pos[slot]);
}

static void worth(const kvf_policy_slots *s, float *worth) {
    uint32_t window_begin = s->next_pos - KVF__MIN(s->size->window, s->next_pos), n = 0, n_infinite = 0;
    uint64_t *keys = (uint64_t *)(void *)s->scratch, least = UINT64_MAX;
    for (uint32_t slot = 0; slot < s->n_slots; slot++) {
        bool infinite = s->pos[slot] >= window_begin || s->pos[slot] < s->options->sinks;
        n_infinite += infinite;
        if (!infinite) keys[n++] = stability_key(s, slot);
    }
    uint32_t unstable = (uint32_t)(UNSTABLE_SHARE * s->n_keep) + 1;
    unstable -= KVF__MIN(unstable, n_infinite);
    if (n && unstable) least = nth_highest(keys, n, KVF__MIN(unstable, n));
    for (uint32_t slot = 0; slot < s->n_slots; slot++) {
        float mean = (float)((double)s->score[slot] / (double)(s->next_pos - s->pos[slot]));
        worth[slot] = least < UINT64_MAX && stability_key(s, slot) >= least ? INFINITY : mean;
    }
}

const kvf_policy_ops kvf__policy_roco = {
    .struct_size = sizeof(kvf_policy_ops),
    .name = "roco",
    .summary = "drops the least attended among tokens of stable attention",
    .needs = KVF_NEEDS_COL_SUMS | KVF_NEEDS_ROW | KVF_NEEDS_SQUARES,
    .flags = KVF_POLICY_EQUAL_LAYERS,
    .worth = worth,
};

void kvf__preset_roco(kvf_policy_options *o) {
    o->merge = KVF_MERGE_NONE;
    o->window = 10;
}
