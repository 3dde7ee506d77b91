/* The states of a request, its moves and what is legal in each, the queue and the running list, slots and names, extents of the
 * accumulators. */
#include <assert.h>

#include "scheduler/sched.h"

kvf__req *kvf__sched_at(kvf_sched *s, uint32_t slot) { return slot == KVF__SLOT_NONE ? NULL : &s->slots[slot]; }

uint32_t kvf__sched_slot(const kvf_sched *s, const kvf__req *r) { return (uint32_t)(r - s->slots); }

kvf__req *kvf__sched_find(kvf_sched *s, kvf_request name) {
    uint64_t slot = name & ((UINT64_C(1) << s->slot_bits) - 1);
    if (!name || slot >= s->n_slots_used || s->slots[slot].name != name) return NULL;
    return &s->slots[slot];
}

kvf_status kvf__sched_live(kvf_sched *s, kvf_request name, kvf__req **out) {
    if (!s) return KVF_E_INVALID;
    *out = kvf__sched_find(s, name);
    if (*out) return KVF_OK;
    return kvf__fail(&s->error, KVF_E_NOT_FOUND, "request %llu: is not live: it was never given out, or has ended",
                     (unsigned long long)name);
}

kvf__req *kvf__sched_take_slot(kvf_sched *s, const kvf__req *request) {
    uint32_t slot = s->free_slot;
    if (slot != KVF__SLOT_NONE)
        s->free_slot = s->slots[slot].next;
    else
        slot = s->n_slots_used++, s->n_in[KVF__REQ_FREE]++;
    assert(slot < s->n_slots); /* fewer than max_waiting wait, and no more than max_running run */
    kvf__req *r = &s->slots[slot];
    *r = *request;
    r->state = KVF__REQ_FREE;
    r->name = ++s->serial << s->slot_bits | slot;
    r->prev = r->next = r->extent_begin = r->held = r->leader = KVF__SLOT_NONE;
    r->reserved = KVF__AS_ADMITTED;
    r->parting = false;
    if (r->arrival) return r; /* a fork: of its group */
    r->arrival = r->name;
    if (s->config.order != KVF_ORDER_ARRIVAL && s->config.order != KVF_ORDER_DEADLINE) r->rank += (int64_t)s->serial;
    return r;
}

void kvf__sched_give_slot(kvf_sched *s, kvf__req *r) {
    kvf__sched_move(s, r, KVF__MOVE_END);
    r->name = 0;
    r->next = s->free_slot;
    s->free_slot = kvf__sched_slot(s, r);
}

/* From the tail: a new arrival mostly belongs there, and the running list has few members. A preempted request belongs near
 * the queue's front, which is searched from the head. */
static void insert(kvf_sched *s, kvf__list *list, kvf__req *r) {
    uint32_t after = list->tail;
    if (list->n && kvf__sched_before(r, &s->slots[list->tail])) {
        uint32_t before = list->head;
        while (kvf__sched_before(&s->slots[before], r)) before = s->slots[before].next;
        after = s->slots[before].prev;
    }
    uint32_t slot = kvf__sched_slot(s, r);
    r->prev = after;
    r->next = after == KVF__SLOT_NONE ? list->head : s->slots[after].next;
    if (r->prev == KVF__SLOT_NONE)
        list->head = slot;
    else
        s->slots[r->prev].next = slot;
    if (r->next == KVF__SLOT_NONE)
        list->tail = slot;
    else
        s->slots[r->next].prev = slot;
    list->n++;
}

static void take_out(kvf_sched *s, kvf__list *list, kvf__req *r) {
    if (r->prev == KVF__SLOT_NONE)
        list->head = r->next;
    else
        s->slots[r->prev].next = r->next;
    if (r->next == KVF__SLOT_NONE)
        list->tail = r->prev;
    else
        s->slots[r->next].prev = r->prev;
    r->prev = r->next = KVF__SLOT_NONE;
    list->n--;
}

enum { FREE = KVF__REQ_FREE, WAITING, FORKED, PREFILL, PROMPT_END, DECODE, SWAPPED, PAUSED, PAUSED_PREEMPTED, HELD };
static_assert((int)HELD == (int)KVF__REQ_HELD, "in the order of kvf__req_state");

/* [state][move]: the state that follows; 0: the move is illegal. */
static const unsigned char moves[KVF__N_REQ_STATES][KVF__N_MOVES] = {
    /* QUEUE, FORK, HOLD, PREFILL, PROMPT_END, DECODE, SWAP_OUT, SWAP_IN, PREEMPT, PAUSE, TOKEN, END */
    [FREE] = {WAITING, FORKED, HELD, 0, 0, DECODE, 0, 0, 0, 0, 0, 0},
    [WAITING] = {0, FORKED, 0, PREFILL, 0, 0, 0, 0, 0, 0, 0, FREE},
    [FORKED] = {0, 0, 0, PREFILL, 0, 0, 0, 0, 0, 0, WAITING, FREE},
    [PREFILL] = {0, 0, 0, 0, PROMPT_END, 0, 0, 0, WAITING, 0, 0, FREE},
    [PROMPT_END] = {0, 0, 0, PREFILL, 0, DECODE, 0, 0, WAITING, 0, PROMPT_END, FREE},
    [DECODE] = {0, 0, 0, PREFILL, 0, DECODE, SWAPPED, 0, WAITING, PAUSED, DECODE, FREE},
    [SWAPPED] = {WAITING, 0, 0, 0, 0, 0, 0, DECODE, 0, 0, 0, FREE},
    [PAUSED] = {0, 0, 0, PREFILL, 0, DECODE, 0, 0, PAUSED_PREEMPTED, 0, 0, FREE},
    [PAUSED_PREEMPTED] = {WAITING, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, FREE},
    [HELD] = {WAITING, 0, 0, PREFILL, PROMPT_END, DECODE, 0, 0, 0, 0, 0, FREE},
};

/* What a request has in each state: its list; which kvf__bound, kvf__reserved and kvf__samples it may have, as bits; its sequence
 * (0: none, 1: has one, 2: either); whether it may have an extent, hold samples, and be in s->parting. n_computed lies between two
 * of the counts: none, known - 1, known, n_prefill - 1, n_prefill. */
enum { NOWHERE, QUEUE, RUNNING };
enum { GROWS = 1 << KVF__GROWS, BOUNDED = 1 << KVF__BOUNDED, ANY_BOUND = 7 };
enum { AS_ADMITTED = 1 << KVF__AS_ADMITTED, ANY_RESERVED = 15 };
enum { ALIKE = 1 << KVF__ALIKE, FORKS = 1 << KVF__FORKS, OWN = 1 << KVF__OWN_OPTIONS, ANY_SAMPLES = 7 };
enum { NONE, LAST, KNOWN, WITHIN, PREFILLED };
static const struct rule {
    unsigned char list, bound, reserved, samples, seq, extent, holds, parting, computed_from, computed_to;
} rules[KVF__N_REQ_STATES] = {
    [FREE] = {NOWHERE, ANY_BOUND, ANY_RESERVED, ANY_SAMPLES, 2, 0, 0, 0, NONE, KNOWN},
    [WAITING] = {QUEUE, GROWS | BOUNDED, AS_ADMITTED, ANY_SAMPLES, 0, 0, 1, 1, NONE, NONE},
    [FORKED] = {QUEUE, GROWS | BOUNDED, AS_ADMITTED, FORKS, 0, 0, 0, 1, NONE, NONE},
    [PREFILL] = {RUNNING, ANY_BOUND, ANY_RESERVED, ANY_SAMPLES, 1, 1, 1, 1, NONE, WITHIN},
    [PROMPT_END] = {RUNNING, ANY_BOUND, ANY_RESERVED, ANY_SAMPLES, 1, 1, 1, 0, PREFILLED, PREFILLED},
    [DECODE] = {RUNNING, ANY_BOUND, ANY_RESERVED, ANY_SAMPLES, 1, 0, 0, 0, NONE, KNOWN},
    [SWAPPED] = {QUEUE, ANY_BOUND, ANY_RESERVED, ALIKE | OWN, 1, 0, 0, 0, NONE, LAST},
    [PAUSED] = {RUNNING, ANY_BOUND, ANY_RESERVED, ALIKE | OWN, 1, 0, 0, 0, LAST, KNOWN},
    [PAUSED_PREEMPTED] = {NOWHERE, GROWS | BOUNDED, AS_ADMITTED, ALIKE | OWN, 0, 0, 0, 0, NONE, NONE},
    [HELD] = {NOWHERE, ANY_BOUND, AS_ADMITTED, ANY_SAMPLES, 2, 0, 0, 0, NONE, NONE},
};

/* [kvf__bound]: the kvf__reserved that go with it. Sizes that have room make a tightened request bounded; only what grows can do without
 * a reservation. */
static const unsigned char reserved_of[] = {
    [KVF__GROWS] = ANY_RESERVED,
    [KVF__BOUNDED] = ANY_RESERVED & ~(1 << KVF__NOTHING),
    [KVF__TIGHTENED] = ANY_RESERVED & ~(1 << KVF__AS_SIZED),
};

static uint32_t count_of(const kvf__req *r, unsigned count) {
    switch (count) {
    case LAST: return r->n_known - 1;
    case KNOWN: return r->n_known;
    case WITHIN: return r->n_prefill - 1;
    case PREFILLED: return r->n_prefill;
    default: return 0;
    }
}

bool kvf__req_is_valid(const kvf_sched *s, const kvf__req *r) {
    const struct rule *rule = &rules[r->state];
    if (r->n_known < r->n_prompt || r->n_known - r->n_prompt > r->max_new || r->n_known > s->config.max_context)
        return false;
    if (!(rule->bound >> r->bound & 1) || !(rule->reserved >> r->reserved & 1) || !(rule->samples >> r->samples & 1) ||
        !(reserved_of[r->bound] >> r->reserved & 1))
        return false;
    if ((rule->seq == 0 && r->seq) || (rule->seq == 1 && !r->seq) || (r->parting && !rule->parting)) return false;
    if ((r->extent_begin != KVF__SLOT_NONE && !rule->extent) || (r->n_held && !rule->holds)) return false;
    if (r->n_held && r->n_known != r->n_prompt) return false; /* they are forked before the first token */
    if ((r->state == KVF__REQ_PREFILL || r->state == KVF__REQ_PROMPT_END) && r->n_prefill > r->n_known) return false;
    return r->n_computed >= count_of(r, rule->computed_from) && r->n_computed <= count_of(r, rule->computed_to);
}

bool kvf__sched_may(const kvf__req *r, kvf__move move) { return moves[r->state][move] != 0; }

static kvf__list *list_of(kvf_sched *s, kvf__req_state state) {
    return rules[state].list == QUEUE ? &s->queue : rules[state].list == RUNNING ? &s->running : NULL;
}

void kvf__sched_move(kvf_sched *s, kvf__req *r, kvf__move move) {
    kvf__req_state next = (kvf__req_state)moves[r->state][move];
    if (next == KVF__REQ_NONE) {
        s->corrupt = true;
        return;
    }
    kvf__list *from = list_of(s, r->state), *to = list_of(s, next);
    s->n_in[r->state]--;
    s->n_in[next]++;
    r->state = next;
    if (from == to) return;
    if (from) take_out(s, from, r);
    if (to) insert(s, to, r);
}

/* First fit. The prompts' tokens are contiguous, so that a column sum is one row whatever else runs. */
bool kvf__sched_take_extent(kvf_sched *s, kvf__req *r, uint32_t n_columns) {
    uint32_t i = 0, begin = 0;
    while (i < s->n_extents && s->extents[i].begin - begin < n_columns) begin = s->extents[i++].end;
    if (s->config.max_prefill_tokens - begin < n_columns) return false;
    memmove(s->extents + i + 1, s->extents + i, (s->n_extents - i) * sizeof *s->extents);
    s->extents[i] = (kvf__extent){begin, begin + n_columns};
    s->n_extents++;
    r->extent_begin = begin;
    return true;
}

uint32_t kvf__sched_n_columns(const kvf_sched *s, const kvf__req *r) {
    for (uint32_t i = 0; i < s->n_extents; i++)
        if (s->extents[i].begin == r->extent_begin) return s->extents[i].end - s->extents[i].begin;
    return 0;
}

void kvf__sched_give_extent(kvf_sched *s, kvf__req *r) {
    if (r->extent_begin == KVF__SLOT_NONE) return;
    uint32_t i = 0;
    while (s->extents[i].begin != r->extent_begin) i++;
    s->n_extents--;
    memmove(s->extents + i, s->extents + i + 1, (s->n_extents - i) * sizeof *s->extents);
    r->extent_begin = KVF__SLOT_NONE;
}

void kvf__sched_set_rank(kvf_sched *s, kvf__req *r, int64_t rank) {
    kvf__list *list = list_of(s, r->state);
    if (list) take_out(s, list, r);
    r->rank = rank;
    if (list) insert(s, list, r);
}

kvf__needs kvf__sched_needs(const kvf_sched *s, const kvf__req *leader) {
    kvf__needs needs = leader->needs;
    for (uint32_t slot = leader->held; slot != KVF__SLOT_NONE; slot = s->slots[slot].next) {
        const kvf__needs *more = &s->slots[slot].needs;
        needs.extent |= more->extent;
        needs.stats |= more->stats;
        needs.n_last = KVF__MAX(needs.n_last, more->n_last);
        needs.piece = KVF__MAX(needs.piece, more->piece);
    }
    return needs;
}
