/* The states of a request and its moves, the queue and the running list, slots and names, extents of the accumulators. */
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
    r->parting = false;
    if (!r->arrival) r->arrival = r->name;
    return r;
}

void kvf__sched_give_slot(kvf_sched *s, kvf__req *r) {
    kvf__parting_leave(s, r);
    kvf__sched_move(s, r, KVF__MOVE_END);
    r->name = 0;
    r->next = s->free_slot;
    s->free_slot = kvf__sched_slot(s, r);
}

/* From the tail: a new arrival belongs there, and the running list has few members. A preempted request belongs near
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
    kvf__parting_enter(s, r);
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

enum { FREE = KVF__REQ_FREE, WAITING, PREFILL, PROMPT_END, DECODE, SWAPPED, PAUSED, PAUSED_PREEMPTED, HELD };
static_assert((int)HELD == (int)KVF__REQ_HELD, "in the order of kvf__req_state");

/* [state][move]: the state that follows; 0: the move is illegal. */
static const unsigned char moves[KVF__N_REQ_STATES][KVF__N_MOVES] = {
    /* QUEUE, HOLD, PREFILL, PROMPT_END, DECODE, SWAP_OUT, SWAP_IN, PREEMPT, PAUSE, END */
    [FREE] = {WAITING, HELD, 0, 0, DECODE, 0, 0, 0, 0, 0},
    [WAITING] = {0, 0, PREFILL, 0, 0, 0, 0, 0, 0, FREE},
    [PREFILL] = {0, 0, 0, PROMPT_END, 0, 0, 0, WAITING, 0, FREE},
    [PROMPT_END] = {0, 0, PREFILL, 0, DECODE, 0, 0, WAITING, 0, FREE},
    [DECODE] = {0, 0, PREFILL, 0, DECODE, SWAPPED, 0, WAITING, PAUSED, FREE},
    [SWAPPED] = {WAITING, 0, 0, 0, 0, 0, DECODE, 0, 0, FREE},
    [PAUSED] = {0, 0, PREFILL, 0, DECODE, 0, 0, PAUSED_PREEMPTED, 0, FREE},
    [PAUSED_PREEMPTED] = {WAITING, 0, 0, 0, 0, 0, 0, 0, 0, FREE},
    [HELD] = {WAITING, 0, PREFILL, PROMPT_END, DECODE, 0, 0, 0, 0, FREE},
};

kvf__req_state kvf__sched_next_state(kvf__req_state state, kvf__move move) {
    return (kvf__req_state)moves[state][move];
}

static kvf__list *list_of(kvf_sched *s, kvf__req_state state) {
    if (state == KVF__REQ_WAITING || state == KVF__REQ_SWAPPED) return &s->queue;
    bool none = state == KVF__REQ_FREE || state == KVF__REQ_HELD || state == KVF__REQ_PAUSED_PREEMPTED;
    return none ? NULL : &s->running;
}

void kvf__sched_move(kvf_sched *s, kvf__req *r, kvf__move move) {
    kvf__req_state next = kvf__sched_next_state(r->state, move);
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

static bool req_is_valid(const kvf__req *r, bool running) {
    if (r->n_computed > r->n_known || r->n_known < r->n_prompt || r->n_known - r->n_prompt > r->max_new) return false;
    switch (r->state) {
    case KVF__REQ_WAITING: return !running && !r->seq && !r->n_computed && r->extent_begin == KVF__SLOT_NONE;
    case KVF__REQ_PREFILL: return running && r->seq && r->n_computed < r->n_prefill && r->n_prefill <= r->n_known;
    case KVF__REQ_PROMPT_END: return running && r->seq && r->n_computed == r->n_prefill;
    case KVF__REQ_PAUSED:
        return running && r->seq && r->n_computed + 1 >= r->n_known && r->extent_begin == KVF__SLOT_NONE;
    case KVF__REQ_DECODE: return running && r->seq && r->extent_begin == KVF__SLOT_NONE;
    case KVF__REQ_SWAPPED:
        return !running && r->seq && r->n_computed < r->n_known && r->extent_begin == KVF__SLOT_NONE && !r->n_held;
    case KVF__REQ_PAUSED_PREEMPTED:
    case KVF__REQ_HELD:
    case KVF__REQ_NONE:
    case KVF__N_REQ_STATES:
    case KVF__REQ_FREE: break;
    }
    return false;
}

static bool list_is_valid(const kvf_sched *s, const kvf__list *list, bool running) {
    uint32_t n = 0, prev = KVF__SLOT_NONE;
    for (uint32_t i = list->head; i != KVF__SLOT_NONE; prev = i, i = s->slots[i].next) {
        const kvf__req *r = &s->slots[i];
        if (++n > list->n || r->prev != prev || !req_is_valid(r, running)) return false;
        if (prev != KVF__SLOT_NONE && !kvf__sched_before(&s->slots[prev], r)) return false;
    }
    return n == list->n && list->tail == prev;
}

/* The held ones behind the leaders of a list. */
static bool held_are_valid(const kvf_sched *s, const kvf__list *list, bool running, uint32_t *n_held,
                           uint32_t *n_reserved) {
    for (uint32_t i = list->head; i != KVF__SLOT_NONE; i = s->slots[i].next) {
        const kvf__req *leader = &s->slots[i];
        uint32_t n = 0;
        if (leader->n_held && (leader->state == KVF__REQ_DECODE || leader->n_known != leader->n_prompt)) return false;
        for (uint32_t h = leader->held; h != KVF__SLOT_NONE; h = s->slots[h].next) {
            const kvf__req *r = &s->slots[h];
            if (r->state != KVF__REQ_HELD || r->leader != i || ++n > leader->n_held || r->n_known != r->n_prompt)
                return false;
            if (r->seq && !running) return false;
            *n_reserved += r->seq != 0;
        }
        if (n != leader->n_held) return false;
        *n_held += n;
    }
    return true;
}

/* The counts and the lengths of the lists follow from the states. */
static bool counts_are_valid(const kvf_sched *s) {
    uint32_t n_in[KVF__N_REQ_STATES] = {0};
    for (uint32_t i = 0; i < s->n_slots_used; i++) n_in[s->slots[i].state]++;
    return !memcmp(n_in, s->n_in, sizeof n_in) && s->queue.n == n_in[KVF__REQ_WAITING] + n_in[KVF__REQ_SWAPPED] &&
           s->running.n ==
               n_in[KVF__REQ_PREFILL] + n_in[KVF__REQ_PROMPT_END] + n_in[KVF__REQ_DECODE] + n_in[KVF__REQ_PAUSED];
}

bool kvf__sched_is_valid(const kvf_sched *s) {
    uint32_t n_free = 0, n_holders = 0, end = 0, n_held = 0, n_reserved = 0;
    if (!list_is_valid(s, &s->queue, false) || !list_is_valid(s, &s->running, true)) return false;
    for (uint32_t i = s->free_slot; i != KVF__SLOT_NONE; i = s->slots[i].next)
        if (s->slots[i].state != KVF__REQ_FREE || ++n_free > s->n_slots_used) return false;
    if (!held_are_valid(s, &s->queue, false, &n_held, &n_reserved)) return false;
    if (!held_are_valid(s, &s->running, true, &n_held, &n_reserved)) return false;
    if (!kvf__parting_is_valid(s)) return false;
    if (n_held != s->n_in[KVF__REQ_HELD] || n_reserved != s->n_reserved) return false;
    if (n_free != s->n_in[KVF__REQ_FREE] || s->corrupt || !counts_are_valid(s)) return false;
    for (uint32_t i = s->running.head; i != KVF__SLOT_NONE; i = s->slots[i].next)
        n_holders += s->slots[i].extent_begin != KVF__SLOT_NONE;
    for (uint32_t i = 0; i < s->n_extents; end = s->extents[i++].end)
        if (s->extents[i].begin < end || s->extents[i].end <= s->extents[i].begin) return false;
    return n_holders == s->n_extents && end <= s->config.max_prefill_tokens &&
           s->running.n + s->n_reserved <= s->config.max_running;
}
