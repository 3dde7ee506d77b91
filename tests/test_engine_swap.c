/* Preemption to the host: what comes back goes on to the bit as if it had never gone. */
#define _DEFAULT_SOURCE
#include "tests/engine_forks_rig.h"

TestSuite(engine_swap, .init = open_model, .fini = close_model);

enum { N_JOBS = 6 };

typedef struct outcome {
    struct job jobs[N_JOBS];
    kvf_engine_stats stats;
} outcome;

static kvf_engine_config config_swap(uint32_t n_blocks, uint32_t host_blocks, uint32_t preempt) {
    kvf_engine_config c = config_of(n_blocks);
    c.deterministic = 1;
    c.host_bytes = host_blocks ? config_of(host_blocks).kv_bytes : 0;
    c.preempt = preempt;
    return c;
}

/* Two that grow, and behind them one by one and three samples of a policy that they push out. */
static void submit_all(kvf_engine *e, const char *policy, outcome *out) {
    uint32_t prompt[MAX_TOKENS];
    for (uint32_t i = 0; i < N_JOBS; i++) {
        kvf_generate g = request_of(prompt, 40 + 11 * i, 11 + i, i < 2 ? 130 : 60 + 8 * i);
        g.n = i == 4 ? 3 : 1;
        submit(e, &out->jobs[i], g, i < 2 ? "full" : policy);
    }
}

static void finish(kvf_engine *e, outcome *out) {
    run(e);
    out->stats.struct_size = sizeof out->stats;
    cr_assert_eq(kvf_engine_get_stats(e, &out->stats), KVF_OK);
    cr_assert_eq(out->stats.occupancy.host_blocks.n_held, 0);
    cr_assert_eq(out->stats.occupancy.host_score_pages.n_held, 0);
    cr_assert_eq(out->stats.occupancy.n_swapped, 0);
    kvf_engine_destroy(e);
}

static void run_all(const kvf_engine_config *c, const char *policy, outcome *out) {
    kvf_engine *e = create(c);
    memset(out, 0, sizeof *out);
    submit_all(e, policy, out);
    finish(e, out);
}

static void expect_equal(const outcome *a, const outcome *b, const char *what) {
    for (uint32_t j = 0; j < N_JOBS; j++) {
        cr_assert_eq(a->jobs[j].n_ended, b->jobs[j].n_ended);
        for (uint32_t i = 0; i < a->jobs[j].n_ended; i++) {
            const struct answer *x = &a->jobs[j].answers[i], *y = &b->jobs[j].answers[i];
            cr_assert_eq(x->n_tokens, y->n_tokens, "%s, %u.%u: %u and %u tokens", what, j, i, x->n_tokens, y->n_tokens);
            cr_assert(!memcmp(x->tokens, y->tokens, x->n_tokens * sizeof *x->tokens), "%s, %u.%u: tokens", what, j, i);
            cr_assert(!memcmp(x->logprobs, y->logprobs, x->n_tokens * sizeof *x->logprobs), "%s, %u.%u: a bit", what, j,
                      i);
            cr_assert(x->held == y->held && x->merged == y->merged, "%s, %u.%u: %llu held, %llu merged", what, j, i,
                      (unsigned long long)y->held, (unsigned long long)y->merged);
        }
    }
}

Test(engine_swap, results_are_those_without_preemption) {
    outcome *there = malloc(sizeof *there), *gone = malloc(sizeof *gone);
    cr_assert(there && gone);
    uint64_t n_samples = 0;
    for (size_t p = 0; p < N_POLICIES; p++) {
        kvf_engine_config big = config_swap(1000, 0, KVF_PREEMPT_AUTO);
        uint64_t n_in = 0;
        big.heads_per_group = heads_for(policies[p]);
        run_all(&big, policies[p], there);
        cr_assert_eq(there->stats.n_preempted, 0);
        for (uint32_t n_blocks = 120; n_blocks <= 160; n_blocks += 40)
            for (uint32_t preempt = KVF_PREEMPT_AUTO; preempt <= KVF_PREEMPT_SWAP; preempt++) {
                if (n_blocks == 160 && preempt != KVF_PREEMPT_SWAP) continue;
                kvf_engine_config small = config_swap(n_blocks, 300, preempt);
                small.prefix_cache = n_blocks == 160;
                small.heads_per_group = big.heads_per_group;
                run_all(&small, policies[p], gone);
                const kvf_engine_stats *s = &gone->stats;
                expect_equal(there, gone, policies[p]);
                n_in += s->n_swapped_in;
                for (uint32_t i = 0; i < 3; i++) n_samples += gone->jobs[4].answers[i].n_preempted != 0;
                if (preempt == KVF_PREEMPT_RECOMPUTE) cr_assert_eq(s->n_swapped_out, 0);
                if (s->n_swapped_out) cr_assert_gt(s->host_bytes_max, 0);
            }
        cr_assert_gt(n_in, 0, "%s: none came back", policies[p]);
    }
    cr_assert_gt(n_samples, 10, "no sample was preempted");
    free(there);
    free(gone);
}

Test(engine_swap, a_step_goes_on_beside_a_swap) {
    outcome *out = calloc(1, sizeof *out);
    cr_assert_not_null(out);
    kvf_engine_config small = config_swap(120, 300, KVF_PREEMPT_SWAP);
    kvf_engine *e = create(&small);
    submit_all(e, policies[0], out);
    uint32_t n_beside = 0;
    kvf_engine_stats before = stats_of(e), now = before;
    for (int more = 1; more; before = now) {
        step(e, &more);
        now = stats_of(e);
        n_beside += now.n_swapped_out > before.n_swapped_out && now.n_decode_tokens > before.n_decode_tokens;
    }
    cr_assert_gt(now.n_swapped_out, 2);
    cr_assert_gt(n_beside, 0, "no step with a swap has run");
    finish(e, out);
    free(out);
}

Test(engine_swap, what_finds_no_room_on_the_host_is_computed_again) {
    outcome *there = malloc(sizeof *there), *gone = malloc(sizeof *gone);
    cr_assert(there && gone);
    kvf_engine_config big = config_swap(1000, 0, KVF_PREEMPT_AUTO);
    run_all(&big, policies[3], there);
    uint64_t n_out = 0, n_again = 0;
    for (uint32_t host = 1; host <= 61; host += 20) {
        kvf_engine_config small = config_swap(120, host, KVF_PREEMPT_SWAP);
        run_all(&small, policies[3], gone);
        expect_equal(there, gone, "a small host");
        n_out += gone->stats.n_swapped_out;
        n_again += gone->stats.n_preempted - gone->stats.n_swapped_out;
        cr_assert_leq(gone->stats.host_bytes_max, config_of(host).kv_bytes);
        cr_assert_eq(gone->stats.n_swapped_in, gone->stats.n_swapped_out);
    }
    cr_assert(n_out > 0 && n_again > 0, "%llu out, %llu computed again", (unsigned long long)n_out,
              (unsigned long long)n_again);
    free(there);
    free(gone);
}

/* Steps until a job of one answer, whose policy has a budget, is on the host; its place. */
static uint32_t step_until_swapped(kvf_engine *e, const outcome *out) {
    for (int more = 1; more;) {
        step(e, &more);
        for (uint32_t j = 0; j < N_JOBS; j++) {
            const kvf__live *r = j < 2 || j == 4 ? NULL : kvf__live_find(e, out->jobs[j].id);
            if (r && r->swapped) return j;
        }
    }
    cr_assert_fail("none was swapped");
    return N_JOBS;
}

Test(engine_swap, one_on_the_host_may_be_ended_or_changed) {
    outcome *out = calloc(1, sizeof *out);
    cr_assert_not_null(out);
    kvf_engine_config small = config_swap(90, 300, KVF_PREEMPT_SWAP);
    kvf_error err = {.text = ""};
    for (int what = 0; what < 3; what++) {
        kvf_engine *e = create(&small);
        submit_all(e, policies[3], out);
        uint32_t j = step_until_swapped(e, out), held = stats_of(e).occupancy.host_blocks.n_held;
        cr_assert_gt(held, 0);
        if (what == 0) cr_assert_eq(kvf_engine_abort(e, out->jobs[j].id), KVF_OK);
        if (what == 1) cr_assert_eq(kvf_engine_set_budget(e, out->jobs[j].id, 0.2, 0, &err), KVF_OK, "%s", err.text);
        if (what == 2) {
            kvf_engine_destroy(e);
            cr_assert_eq(out->jobs[j].answers[0].finish, KVF_FINISH_ABORTED);
            break;
        }
        cr_assert_lt(stats_of(e).occupancy.host_blocks.n_held, held); /* it gave up what it had there */
        finish(e, out);
        for (uint32_t i = 0; i < N_JOBS; i++) {
            cr_assert_eq(out->jobs[i].n_ended, i == 4 ? 3 : 1);
            cr_assert_eq(out->jobs[i].answers[0].finish, what == 0 && i == j ? KVF_FINISH_ABORTED : KVF_FINISH_LENGTH);
        }
    }
    free(out);
}

Test(engine_swap, refuses_what_makes_no_sense) {
    kvf_engine_config c = config_swap(120, 0, 3);
    kvf_engine *e = NULL;
    kvf_error err = {.text = ""};
    cr_assert_eq(kvf_engine_create(&c, &e, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "preempt 3"), "%s", err.text);
    c = config_swap(120, 0, KVF_PREEMPT_SWAP);
    c.host_bytes = 5;
    cr_assert_eq(kvf_engine_create(&c, &e, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "host_bytes 5"), "%s", err.text);
}
