/* Generated traces: arrivals, lengths and prefix groups from a seed. */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <string.h>

#include "tools/text.h"
#include "tools/trace.h"

uint64_t kvf__random_next(kvf__random *r) {
    uint64_t x = r->state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double kvf__random_unit(kvf__random *r) { return (double)(kvf__random_next(r) >> 11) * 0x1p-53; }

static double exponential(kvf__random *r, double mean) { return -mean * log(1 - kvf__random_unit(r)); }

/* A whole number from 0 on, geometric. */
static double geometric(kvf__random *r, double mean) {
    return mean > 0 ? floor(exponential(r, 1 / log1p(1 / mean))) : 0;
}

static double normal(kvf__random *r) { /* Box and Muller */
    double u = 1 - kvf__random_unit(r), v = kvf__random_unit(r);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* mean is that of the lengths, so that the logarithm's is log(mean) - sigma^2 / 2. */
static uint32_t length(kvf__random *r, double mean, double sigma, uint32_t least, uint32_t most) {
    double x = exp(log(mean) - sigma * sigma / 2 + sigma * normal(r));
    return x < least ? least : x > most ? most : (uint32_t)x;
}

bool kvf__trace_generate(const kvf__trace_make *make, kvf__trace *t) {
    kvf__random r = {make->seed};
    bool seen[1024] = {false};
    double now = 0;
    *t = (kvf__trace){.form = "made", .n_groups = make->n_groups};
    for (uint32_t i = 0, left = 0; i < make->n_requests; i++) {
        if (!make->bursty) {
            now += i ? exponential(&r, 1 / make->rate) : 0;
        } else if (left) {
            left--; /* of one burst: all at once */
        } else {
            double size = 1 + geometric(&r, make->burst - 1);
            left = size > 1e6 ? 1000000 : (uint32_t)size - 1;
            now += i ? exponential(&r, make->burst / make->rate) : 0;
        }
        kvf__trace_request q = {.arrival_s = now, .group = KVF__TRACE_NONE};
        q.n_prompt = length(&r, make->prompt_mean, make->prompt_sigma, 1, make->prompt_max);
        q.n_output = length(&r, make->output_mean, make->output_sigma, 1, make->output_max);
        if (make->n_groups && kvf__random_unit(&r) < make->grouped) {
            q.group = (uint32_t)(kvf__random_next(&r) % make->n_groups);
            uint64_t whole = (uint64_t)q.n_prompt + make->shared_tokens; /* the prefix stands before what is its own */
            q.n_prompt = whole > make->prompt_max ? make->prompt_max : (uint32_t)whole;
            uint32_t shared = make->shared_tokens < q.n_prompt ? make->shared_tokens : q.n_prompt;
            if (seen[q.group]) q.n_shared = shared;
            seen[q.group] = true;
        }
        if (kvf__trace_add(t, q, NULL)) continue;
        kvf__say("--generate %u: out of memory", make->n_requests);
        kvf__trace_free(t);
        return false;
    }
    return true;
}
