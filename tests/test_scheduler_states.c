/* The states of a request: every pair of state and move, the lists and counts that follow, what an illegal move does, and what a
 * request may have in each state. */
#include "scheduler_steps.h"

/* [state][move], moves in the order of kvf__move: the letter of the state that follows, '.' for an illegal move. */
static const char letters[] = "?FWKPEDSZXH";
static const char *const table[] = {
    "............", /* none */
    "WKH..D......", /* free */
    ".K.P.......F", /* waiting */
    "...P......WF", /* forked (K) */
    "....E...W..F", /* prefill */
    "...P.D..W.EF", /* prompt end */
    "...P.DS.WZDF", /* decode */
    "W......D...F", /* swapped */
    "...P.D..X..F", /* paused (Z) */
    "W..........F", /* paused, preempted (X) */
    "W..PED.....F", /* held */
};

static kvf__req_state state_of(char letter) { return (kvf__req_state)(strchr(letters, letter) - letters); }

/* A scheduler of three slots; the first and the last stay in both lists' ends, the second is put into a state. */
typedef struct bare {
    kvf_sched s;
    kvf__req slots[3];
} bare;

static void bare_put(bare *b, kvf__req_state state) {
    static const char *const paths[] = {"", "", "W", "K", "WP", "WPE", "D", "DS", "DZ", "DZX", "H"};
    kvf__req *r = &b->slots[1];
    for (const char *step = paths[state]; *step; step++)
        for (int m = 0; m < KVF__N_MOVES; m++)
            if (table[r->state][m] == *step) {
                kvf__sched_move(&b->s, r, (kvf__move)m);
                break;
            }
    cr_assert(r->state == state);
}

static void bare_make(bare *b) {
    *b = (bare){.s = {.n_slots = 3, .n_slots_used = 3, .free_slot = KVF__SLOT_NONE}};
    b->s.slots = b->slots;
    b->s.queue = b->s.running = (kvf__list){KVF__SLOT_NONE, KVF__SLOT_NONE, 0};
    b->s.n_in[KVF__REQ_FREE] = 3;
    for (uint32_t i = 0; i < 3; i++) {
        b->slots[i] = (kvf__req){.name = i + 1, .arrival = i + 1, .state = KVF__REQ_FREE};
        b->slots[i].prev = b->slots[i].next = b->slots[i].held = b->slots[i].leader = KVF__SLOT_NONE;
    }
    kvf__sched_move(&b->s, &b->slots[0], KVF__MOVE_QUEUE);
    kvf__sched_move(&b->s, &b->slots[2], KVF__MOVE_DECODE);
}

static bool in_list(const bare *b, const kvf__list *list, uint32_t slot) {
    uint32_t n = 0;
    bool found = false;
    for (uint32_t i = list->head; i != KVF__SLOT_NONE; i = b->slots[i].next, n++) found |= i == slot;
    cr_assert(n == list->n);
    return found;
}

Test(scheduler_states, every_state_and_move) {
    for (int state = KVF__REQ_FREE; state < KVF__N_REQ_STATES; state++)
        for (int m = 0; m < KVF__N_MOVES; m++) {
            bare b;
            bare_make(&b);
            bare_put(&b, (kvf__req_state)state);
            char expected = table[state][m];
            kvf__sched_move(&b.s, &b.slots[1], (kvf__move)m);
            kvf__req_state now = b.slots[1].state;
            cr_assert(b.s.corrupt == (expected == '.'), "%c, move %d", letters[state], m);
            cr_assert(now == (expected == '.' ? (kvf__req_state)state : state_of(expected)), "%c, move %d is %c",
                      letters[state], m, letters[now]);
            cr_assert(in_list(&b, &b.s.queue, 1) == (strchr("WKS", letters[now]) != NULL));
            cr_assert(in_list(&b, &b.s.running, 1) == (strchr("PEDZ", letters[now]) != NULL));
            for (int i = KVF__REQ_FREE; i < KVF__N_REQ_STATES; i++)
                cr_assert(b.s.n_in[i] == (uint32_t)((int)now == i) + (i == KVF__REQ_WAITING) + (i == KVF__REQ_DECODE));
        }
}

/* What a request may have in each state: bound (grows, bounded, tightened), reserved (as admitted, sized, shared, nothing), samples
 * (alike, forks, own options), sequence, extent, held samples, parting (- without, + with), and n_computed: 0, within the prefill,
 * its end, known - 1, known. */
static const char *const legal[] = {
    [KVF__REQ_WAITING] = "gb a afo - - -+ -+ 0",       [KVF__REQ_FORKED] = "gb a f - - - -+ 0",
    [KVF__REQ_PREFILL] = "gbt ashn afo + -+ -+ -+ 0w", [KVF__REQ_PROMPT_END] = "gbt ashn afo + -+ -+ - e",
    [KVF__REQ_DECODE] = "gbt ashn afo + - - - 0welk",  [KVF__REQ_SWAPPED] = "gbt ashn ao + - - - 0wel",
    [KVF__REQ_PAUSED] = "gbt ashn ao + - - - lk",      [KVF__REQ_PAUSED_PREEMPTED] = "gb a ao - - - - 0",
    [KVF__REQ_HELD] = "gbt a afo -+ - - - 0",
};

static bool is_legal(kvf__req_state state, const char *has) {
    const char *of = legal[state];
    for (int i = 0; i < 8; i++, of += strcspn(of, " "), of += *of == ' ')
        if (!memchr(of, has[i], strcspn(of, " "))) return false;
    return !(has[0] == 'b' && has[1] == 'n') && !(has[0] == 't' && has[1] == 's');
}

Test(scheduler_states, what_a_request_may_have) {
    static const char *const of[] = {"gbt", "ashn", "afo", "-+", "-+", "-+", "-+", "0welk"};
    static const uint32_t computed[] = {0, 7, 8, 11, 12}; /* of 8 to prefill, 12 known */
    kvf_sched s = {.config = {.max_context = 64}};
    for (int state = KVF__REQ_WAITING; state < KVF__N_REQ_STATES; state++)
        for (uint32_t i = 0; i < 3 * 4 * 3 * 16 * 5; i++) {
            char has[9] = "";
            uint32_t at[8], rest = i;
            for (uint32_t k = 0; k < 8; k++) {
                uint32_t n = (uint32_t)strlen(of[k]);
                at[k] = rest % n;
                rest /= n;
                has[k] = of[k][at[k]];
            }
            kvf__req r = {.state = (kvf__req_state)state,
                          .bound = (kvf__bound)at[0],
                          .reserved = (kvf__reserved)at[1],
                          .samples = (kvf__samples)at[2],
                          .seq = at[3],
                          .extent_begin = at[4] ? 0 : KVF__SLOT_NONE,
                          .n_held = at[5],
                          .parting = at[6] != 0,
                          .n_computed = computed[at[7]],
                          .n_prompt = at[5] ? 12 : 10, /* held samples have no token yet */
                          .n_known = 12,
                          .max_new = 4,
                          .n_prefill = 8};
            cr_assert(kvf__req_is_valid(&s, &r) == is_legal(r.state, has), "%c: %s", letters[state], has);
            r.n_known = r.n_prompt + 5;
            cr_assert(!kvf__req_is_valid(&s, &r), "more tokens than it may generate");
        }
}

Test(scheduler_states, an_illegal_move_ends_planning) {
    rig *g = rig_create(rig_pool(1, 1, 8), rig_config(8));
    rig_request *r = rig_submit(g, 0, 4, 1, rig_options("full", NULL));
    kvf__sched_move(g->sched, kvf__sched_find(g->sched, r->name), KVF__MOVE_SWAP_IN);
    kvf_step step = {.struct_size = sizeof step};
    cr_assert(kvf_sched_plan(g->sched, 0, &step) == KVF_E_CORRUPT &&
              strstr(kvf_sched_error(g->sched)->text, "illegal move"));
    rig_abort(g, r);
    rig_destroy(g);
}

/* The calls that make a move, in a state that has no such move: refused, and nothing has changed. */
static void refused(rig *g, const rig_request *r, bool may_pause, bool prompt_ended) {
    const kvf_sched_segment segment = {.begin = 12, .end = 14};
    kvf_sched *s = g->sched;
    kvf__req_state before = kvf__sched_find(s, r->name)->state;
    if (!may_pause) cr_assert(kvf_sched_pause(s, r->name) == KVF_E_STATE);
    cr_assert(kvf_sched_extend(s, r->name, &segment, 1, 1) == KVF_E_STATE);
    if (!prompt_ended) {
        cr_assert(kvf_sched_prompt_done(s, r->name) == KVF_E_STATE);
        cr_assert(kvf_sched_fork_prompt(s, r->name) == KVF_E_STATE);
    }
    cr_assert(kvf__sched_find(s, r->name)->state == before && kvf__sched_is_valid(s));
}

Test(scheduler_states, calls_in_a_wrong_state_change_nothing) {
    rig *g = rig_create(rig_pool(1, 1, 8), rig_config(8));
    rig_request *r = rig_submit(g, 0, 10, 4, rig_options("full", NULL));
    const kvf__req *q = kvf__sched_find(g->sched, r->name);
    kvf_step step = {.struct_size = sizeof step};
    refused(g, r, false, false); /* it waits */
    for (int i = 0; i < 2; i++) {
        OK(kvf_sched_plan(g->sched, 0, &step));
        cr_assert(q->state == KVF__REQ_PREFILL);
        refused(g, r, false, false);
        OK(kvf_sched_done(g->sched));
    }
    cr_assert(q->state == KVF__REQ_PROMPT_END);
    refused(g, r, false, true);
    OK(kvf_sched_prompt_done(g->sched, r->name));
    cr_assert(q->state == KVF__REQ_DECODE);
    refused(g, r, true, false);
    OK(kvf_sched_token(g->sched, r->name, NULL));
    OK(kvf_sched_plan(g->sched, 0, &step)); /* its next step: the pause would be lost when that is done */
    cr_assert(step.n_items == 1);
    refused(g, r, false, false);
    OK(kvf_sched_done(g->sched));
    OK(kvf_sched_pause(g->sched, r->name));
    cr_assert(kvf_sched_pause(g->sched, r->name) == KVF_E_STATE && q->state == KVF__REQ_PAUSED);
    cr_assert(kvf_sched_prompt_done(g->sched, r->name) == KVF_E_STATE);
    OK(kvf_sched_undo(g->sched)); /* it gives up its blocks */
    cr_assert(q->state == KVF__REQ_PAUSED_PREEMPTED && kvf_sched_pause(g->sched, r->name) == KVF_E_STATE);
    cr_assert(kvf_sched_prompt_done(g->sched, r->name) == KVF_E_STATE && kvf__sched_is_valid(g->sched));
    rig_abort(g, r);
    rig_destroy(g);
}

/* A paused request that has given up its blocks keeps its slot: without a count of it there would be more requests than slots. */
Test(scheduler_states, preempted_paused_requests_count_as_waiting) {
    kvf_sched_config sc = rig_config(8);
    sc.max_running = sc.max_waiting = 1;
    rig *g = rig_create(rig_pool(1, 1, 8), sc);
    rig_request *r = rig_submit(g, 0, 4, 4, rig_options("full", NULL));
    kvf_step step = {.struct_size = sizeof step};
    OK(kvf_sched_plan(g->sched, 0, &step));
    OK(kvf_sched_done(g->sched));
    OK(kvf_sched_prompt_done(g->sched, r->name));
    OK(kvf_sched_pause(g->sched, r->name));
    rig_request *next = rig_submit(g, 1, 4, 4, rig_options("full", NULL));
    OK(kvf_sched_plan(g->sched, 0, &step));
    OK(kvf_sched_done(g->sched));
    cr_assert(step.n_preempted == 1 && kvf__sched_find(g->sched, r->name)->state == KVF__REQ_PAUSED_PREEMPTED);
    const kvf_policy_options options = rig_options("full", NULL);
    const kvf_sched_request third = {.struct_size = sizeof third, .n_prompt = 4, .max_new = 4, .options = &options};
    kvf_request name = 0;
    cr_assert(kvf_sched_submit(g->sched, &third, &name) == KVF_E_LIMIT, "a third of two slots");
    rig_abort(g, r);
    OK(kvf_sched_submit(g->sched, &third, &name));
    OK(kvf_sched_finish(g->sched, name));
    rig_abort(g, next);
    rig_destroy(g);
}
