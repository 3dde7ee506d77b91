/* tests/seeded.h: random operations on a world that has seed, rng, step and op, which a failure tells. */
#ifndef KVF_TESTS_SEEDED_H
#define KVF_TESTS_SEEDED_H

#include <criterion/criterion.h>
#include <stdint.h>
#include <stdio.h>

#define CHECK(w, cond, ...)                                                                                          \
    do {                                                                                                             \
        if (!(cond)) {                                                                                               \
            fprintf(stderr, "seed %llu, step %u, %s: ", (unsigned long long)(w)->seed, (w)->step, (w)->op);          \
            fprintf(stderr, __VA_ARGS__);                                                                            \
            cr_assert_fail("%s (seed %llu, step %u, %s)", #cond, (unsigned long long)(w)->seed, (w)->step, (w)->op); \
        }                                                                                                            \
    } while (0)
/* Evaluates each argument once. */
#define STATUS(w, got, want)                                                                    \
    do {                                                                                        \
        kvf_status got_ = (got), want_ = (want);                                                \
        CHECK(w, got_ == want_, "%s, not %s\n", kvf_status_name(got_), kvf_status_name(want_)); \
    } while (0)

static inline uint32_t seeded_next(uint64_t *rng, uint32_t n) { /* xorshift64*; in [0, n) */
    *rng ^= *rng << 13;
    *rng ^= *rng >> 7;
    *rng ^= *rng << 17;
    return (uint32_t)((*rng * 0x2545f4914f6cdd1du) >> 33) % n;
}
static inline uint32_t over(uint32_t a, uint32_t b) { return a > b ? a - b : 0; }
static inline uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

#endif
