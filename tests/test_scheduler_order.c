/* The order of the queue: each kvf_order against a naive model that sorts by what the header says, and the bound on how many later
 * requests come before an earlier one. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "scheduler/sched.h"

#define OK(call) cr_assert((call) == KVF_OK, "%s: %s", #call, kvf_sched_error(w.sched)->text)

enum { MAX_REQUESTS = 400, MAX_TOKENS = 128, CHUNK = 16, BLOCK = 8 };
typedef enum life { NOT_YET, WAITING, RUNNING, GONE } life;

typedef struct asked {
    kvf_request name;
    life life;
    int64_t number; /* of its submission, from 1 */
    uint32_t n_prompt, max_new, n_known, family;
    int32_t priority;
    uint64_t deadline, submitted, seen; /* times; seen: of its first plan, 0: none yet */
    int64_t place;                      /* KVF_ORDER_PREFIX */
    bool computed, ran;                 /* its prompt; it was in a step */
    uint32_t tokens[MAX_TOKENS];
} asked;

static struct world {
    kvf_manager *manager;
    kvf_policy_state *policies;
    kvf_sched *sched;
    kvf_sched_config config;
    kvf_policy_options full;
    kvf_step step;
    asked of[MAX_REQUESTS];
    uint32_t n, n_preempted;
    uint64_t now, seed;
} w;

static uint32_t below(uint32_t n) {
    w.seed = w.seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w.seed >> 33) % n);
}

static void world_begin(uint32_t order, uint64_t patience, uint32_t n_blocks, uint32_t max_running, uint64_t seed) {
    memset(&w, 0, sizeof w);
    w.seed = seed;
    kvf_manager_config m;
    kvf_manager_config_init(&m, sizeof m);
    m.n_layers = m.n_kv_heads = m.heads_per_group = 1;
    m.block_size = BLOCK;
    m.n_blocks = n_blocks;
    m.max_seqs = 8;
    m.max_slots = MAX_TOKENS;
    m.prefix_cache = order == KVF_ORDER_PREFIX;
    cr_assert(kvf_manager_create(&m, &w.manager, NULL) == KVF_OK);
    kvf_policy_state_config p = {.struct_size = sizeof p,
                                 .n_layers = 1,
                                 .n_kv_heads = 1,
                                 .n_q_heads = 1,
                                 .head_dim = 8,
                                 .block_size = BLOCK,
                                 .max_seqs = 8,
                                 .max_slots = MAX_TOKENS};
    cr_assert(kvf_policy_state_create(&p, &w.policies, NULL) == KVF_OK);
    kvf_sched_config_init(&w.config, sizeof w.config);
    w.config.manager = w.manager;
    w.config.policies = w.policies;
    w.config.max_running = max_running;
    w.config.max_waiting = MAX_REQUESTS;
    w.config.chunk = CHUNK;
    w.config.order = order;
    w.config.patience = patience;
    cr_assert(kvf_sched_create(&w.config, &w.sched, NULL) == KVF_OK);
    w.config.patience = w.sched->config.patience;
    cr_assert(kvf_policy_options_init(&w.full, sizeof w.full, "full", NULL, NULL) == KVF_OK);
    w.step.struct_size = sizeof w.step;
    w.now = 1;
}

static void world_end(void) {
    kvf_sched_destroy(w.sched);
    kvf_policy_state_destroy(w.policies);
    kvf_manager_destroy(w.manager);
}

/* ---- The naive model ------------------------------------------------------------------------------ */

static uint32_t common(const asked *a, const asked *b) {
    uint32_t n = 0;
    while (n < a->n_prompt && n < b->n_prompt && a->tokens[n] == b->tokens[n]) n++;
    return n;
}

/* Whether a's prompt comes before b's in a list sorted by tokens. */
static bool sorts_before(const asked *a, const asked *b) {
    uint32_t n = common(a, b);
    if (n < a->n_prompt && n < b->n_prompt) return a->tokens[n] < b->tokens[n];
    return a->n_prompt != b->n_prompt ? a->n_prompt < b->n_prompt : a->number < b->number;
}

/* Behind the first of the two prompts beside it that begin alike, at most `patience` places up. */
static int64_t place_beside(const asked *r) {
    const asked *beside[2] = {NULL, NULL};
    int64_t place = r->number;
    for (uint32_t i = 0; i < w.n; i++) {
        const asked *q = &w.of[i];
        if (q == r || q->life == GONE || q->computed) continue;
        bool after = sorts_before(r, q);
        const asked **best = &beside[after];
        if (!*best || sorts_before(q, *best) == after) *best = q;
    }
    for (int i = 0; i < 2; i++)
        if (beside[i] && common(r, beside[i]) >= BLOCK && beside[i]->place < place) place = beside[i]->place;
    int64_t least = r->number - (int64_t)w.config.patience;
    return place < least ? least : place;
}

static double key(const asked *r) {
    double patience = (double)w.config.patience;
    switch (w.config.order) {
    case KVF_ORDER_PRIORITY: return (double)r->number - r->priority * patience;
    case KVF_ORDER_DEADLINE: return r->deadline ? (double)r->deadline : (double)r->seen + patience;
    case KVF_ORDER_SHORTEST: return (double)(r->number + (int64_t)(r->n_prompt * w.config.patience / CHUNK));
    case KVF_ORDER_PREFIX: return (double)r->place;
    default: return (double)r->number;
    }
}

static bool before(const asked *a, const asked *b) {
    return key(a) < key(b) || (!(key(a) > key(b)) && a->number < b->number);
}

/* A later request came before an earlier one: the header says when it may. */
static void check_passed(const asked *earlier, const asked *later) {
    int64_t places = later->number - earlier->number, patience = (int64_t)w.config.patience;
    bool may = false;
    switch (w.config.order) {
    case KVF_ORDER_PRIORITY: may = places < (later->priority - earlier->priority) * patience; break;
    case KVF_ORDER_DEADLINE: may = (double)later->submitted <= key(earlier); break;
    case KVF_ORDER_SHORTEST: may = places * CHUNK <= (int64_t)earlier->n_prompt * patience; break;
    case KVF_ORDER_PREFIX: may = places <= patience; break;
    default: break;
    }
    cr_assert(may, "%lld came before %lld", (long long)later->number, (long long)earlier->number);
}

/* ---- Steps ---------------------------------------------------------------------------------------- */

static asked *submit(uint32_t n_prompt, uint32_t max_new, int32_t priority, uint64_t deadline, uint32_t family) {
    cr_assert(w.n < MAX_REQUESTS && n_prompt + max_new <= MAX_TOKENS);
    asked *r = &w.of[w.n++];
    *r = (asked){.life = WAITING,
                 .number = w.n,
                 .n_prompt = n_prompt,
                 .n_known = n_prompt,
                 .max_new = max_new,
                 .priority = priority,
                 .deadline = deadline,
                 .submitted = w.now,
                 .family = family};
    for (uint32_t i = 0; i < MAX_TOKENS; i++) r->tokens[i] = i < 12 ? family : 1 + below(1000);
    const kvf_sched_request request = {.struct_size = sizeof request,
                                       .n_prompt = n_prompt,
                                       .max_new = max_new,
                                       .options = &w.full,
                                       .user = r,
                                       .priority = priority,
                                       .deadline = deadline};
    OK(kvf_sched_submit(w.sched, &request, &r->name));
    if (w.config.order == KVF_ORDER_PREFIX) {
        kvf_sched_prefix prefix = {.struct_size = sizeof prefix};
        prefix.key = (kvf_prefix_key){.struct_size = sizeof prefix.key, .tokens = r->tokens, .n_tokens = MAX_TOKENS};
        OK(kvf_sched_set_prefix(w.sched, r->name, &prefix));
        r->place = place_beside(r);
    }
    return r;
}

/* What ran before the plan and was preempted by it came last; who was admitted came first. */
static void check_plan(const life *was) {
    bool in_step[MAX_REQUESTS] = {false};
    for (uint32_t i = 0; i < w.step.n_items; i++) {
        const asked *r = w.step.items[i].user;
        in_step[r - w.of] = true;
        if (i && i != w.step.n_decode) cr_assert(before(w.step.items[i - 1].user, r), "items are not in order");
    }
    for (uint32_t i = 0; i < w.n; i++) {
        const asked *r = &w.of[i];
        for (uint32_t k = 0; k < w.n; k++) {
            const asked *q = &w.of[k];
            bool preempted = was[i] == RUNNING && r->life == WAITING;
            bool stayed = was[k] == RUNNING && q->life == RUNNING;
            if (preempted && stayed) cr_assert(before(q, r), "%u was preempted before %u", i + 1, k + 1);
            bool admitted = r->life == WAITING && in_step[i];
            if (!admitted || q->life != WAITING || in_step[k]) continue;
            cr_assert(before(r, q), "%u was admitted before %u", i + 1, k + 1);
            if (!r->ran && !q->ran && r->number > q->number) check_passed(q, r);
        }
    }
}

static void run_step(void) {
    life was[MAX_REQUESTS];
    for (uint32_t i = 0; i < w.n; i++) {
        was[i] = w.of[i].life;
        if (!w.of[i].seen) w.of[i].seen = w.now;
    }
    OK(kvf_sched_plan(w.sched, w.now, &w.step));
    for (uint32_t i = 0; i < w.step.n_preempted; i++) {
        asked *r = w.step.preempted[i].user;
        r->life = WAITING;
        r->computed = false;
        w.n_preempted++;
    }
    for (uint32_t i = 0; i < w.step.n_ends; i++) ((asked *)w.step.ends[i].user)->life = GONE;
    check_plan(was);
    cr_assert(kvf__sched_is_valid(w.sched));
    cr_assert(kvf_copies_done(w.manager, &w.step.copies) == KVF_OK);
    if (!w.step.n_items) return;
    OK(kvf_sched_done(w.sched));
    for (uint32_t i = 0; i < w.step.n_items; i++) {
        const kvf_step_item *item = &w.step.items[i];
        asked *r = item->user;
        int ended = 0;
        r->life = RUNNING;
        r->ran = true;
        if (item->prompt_ends) OK(kvf_sched_prompt_done(w.sched, r->name));
        if (item->prompt_ends) r->computed = true;
        if (item->samples) OK(kvf_sched_token(w.sched, r->name, &ended));
        if (item->samples) r->tokens[r->n_known++] = 1;
        if (ended) OK(kvf_sched_finish(w.sched, r->name));
        if (ended) r->life = GONE;
    }
    w.now += 1 + below(20);
}

static bool any_left(void) {
    for (uint32_t i = 0; i < w.n; i++)
        if (w.of[i].life != GONE) return true;
    return false;
}

Test(scheduler_order, is_that_of_a_naive_model) {
    uint32_t n_preempted = 0;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        uint32_t order = (uint32_t)(seed % 5);
        world_begin(order, 1 + seed % 23, 20, 2 + seed % 5, seed);
        for (uint32_t to_come = 60, n_steps = 0; to_come || any_left(); n_steps++) {
            for (uint32_t n = below(8) ? 0 : below(9); n && to_come; n--, to_come--)
                submit(1 + below(100), 1 + below(25), (int32_t)below(7) - 3, below(3) ? w.now + below(400) : 0,
                       1 + below(5));
            run_step();
            cr_assert(n_steps < 5000, "order %u: requests wait for ever", order);
        }
        n_preempted += w.n_preempted;
        world_end();
    }
    cr_assert(n_preempted > 100, "%u preemptions", n_preempted);
}

/* One request against a stream that the order puts before it: it runs, and the bound is reached but not passed. */
Test(scheduler_order, a_stream_of_others_does_not_starve_a_request) {
    static const struct {
        uint32_t order, n_before; /* how many of the stream run before it */
    } cases[] = {{KVF_ORDER_ARRIVAL, 0}, {KVF_ORDER_PRIORITY, 2 * 7 - 1}, {KVF_ORDER_SHORTEST, 4 * 7 - 1}};
    for (uint32_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        world_begin(cases[c].order, 7, 40, 1, 1);
        asked *first = submit(20, 1, 0, 0, 1);
        run_step(); /* it takes the place of max_running */
        const asked *last = submit(65, 1, -2, 0, 1);
        for (int i = 0; i < 40; i++) submit(1, 1, 0, 0, 1);
        while (!last->ran) run_step();
        uint32_t n = 0;
        for (uint32_t i = 0; i < w.n; i++) n += w.of[i].ran && &w.of[i] != last && &w.of[i] != first;
        cr_assert(n == cases[c].n_before, "order %u: %u of the stream ran before it", cases[c].order, n);
        world_end();
    }
}

/* Without a deadline a request has it `patience` after the plan that first sees it, not after its submission. */
Test(scheduler_order, a_request_without_a_deadline_is_due_some_time) {
    world_begin(KVF_ORDER_DEADLINE, 100, 40, 1, 1);
    submit(20, 1, 0, 0, 1);
    run_step();
    w.now = 5000; /* nothing was planned for a long time */
    const asked *none = submit(8, 1, 0, 0, 1), *soon = submit(8, 1, 0, 5050, 1);
    const asked *late = submit(8, 1, 0, 9000, 1), *past = submit(8, 1, 0, 3, 1);
    const asked *order[] = {past, soon, none, late};
    for (int i = 0; i < 4; i++) {
        while (!order[i]->ran) {
            for (int k = i + 1; k < 4; k++) cr_assert(!order[k]->ran, "%d ran before %d", k, i);
            run_step();
        }
    }
    world_end();
}

/* Prompts that begin alike run one after another, whatever arrived between them. */
Test(scheduler_order, prompts_that_begin_alike_come_together) {
    world_begin(KVF_ORDER_PREFIX, 0, 60, 1, 1);
    cr_assert(w.config.patience == 256);
    submit(30, 1, 0, 0, 9);
    run_step();
    for (uint32_t i = 0; i < 12; i++) submit(30, 1, 0, 0, 1 + i % 3);
    uint32_t families[12], n = 0;
    while (n < 12) {
        bool ran[MAX_REQUESTS];
        for (uint32_t i = 0; i < w.n; i++) ran[i] = w.of[i].ran;
        run_step();
        for (uint32_t i = 0; i < w.n; i++)
            if (w.of[i].ran && !ran[i]) families[n++] = w.of[i].family;
    }
    for (uint32_t i = 0; i < 12; i++) cr_assert(families[i] == 1 + i / 4, "%u. is of family %u", i, families[i]);
    world_end();
}

Test(scheduler_order, wrong_values_are_refused) {
    world_begin(KVF_ORDER_PRIORITY, 0, 20, 2, 1);
    kvf_sched_config c = w.config;
    kvf_sched *no = NULL;
    kvf_error err = {0};
    c.order = 5;
    cr_assert(kvf_sched_create(&c, &no, &err) == KVF_E_INVALID && strstr(err.text, "order 5: must be"));
    c.order = KVF_ORDER_SHORTEST;
    c.patience = (1u << 24) + 1;
    cr_assert(kvf_sched_create(&c, &no, &err) == KVF_E_INVALID && strstr(err.text, "patience 16777217: must be"));
    kvf_sched_request r = {.struct_size = sizeof r, .n_prompt = 4, .max_new = 1, .options = &w.full, .priority = -1001};
    kvf_request name = 0;
    cr_assert(kvf_sched_submit(w.sched, &r, &name) == KVF_E_INVALID &&
              strstr(kvf_sched_error(w.sched)->text, "priority -1001: must be in [-1000, 1000]"));
    world_end();
}
