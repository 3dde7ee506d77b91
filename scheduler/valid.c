/* The scheduler's invariants. */
#include "scheduler/sched.h"

static bool list_is_valid(const kvf_sched *s, const kvf__list *list) {
    uint32_t n = 0, prev = KVF__SLOT_NONE;
    for (uint32_t i = list->head; i != KVF__SLOT_NONE; prev = i, i = s->slots[i].next) {
        const kvf__req *r = &s->slots[i];
        if (++n > list->n || r->prev != prev) return false;
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
        for (uint32_t h = leader->held; h != KVF__SLOT_NONE; h = s->slots[h].next) {
            const kvf__req *r = &s->slots[h];
            if (r->state != KVF__REQ_HELD || r->leader != i || ++n > leader->n_held) return false;
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
    uint32_t n_in[KVF__N_REQ_STATES] = {0}, n_parting = 0;
    for (uint32_t i = 0; i < s->n_slots_used; i++) {
        const kvf__req *r = &s->slots[i];
        n_in[r->state]++;
        n_parting += r->parting;
        if (r->state != KVF__REQ_FREE && !kvf__req_is_valid(s, r)) return false;
    }
    uint32_t n_queued = n_in[KVF__REQ_WAITING] + n_in[KVF__REQ_FORKED] + n_in[KVF__REQ_SWAPPED];
    uint32_t n_running =
        n_in[KVF__REQ_PREFILL] + n_in[KVF__REQ_PROMPT_END] + n_in[KVF__REQ_DECODE] + n_in[KVF__REQ_PAUSED];
    return !memcmp(n_in, s->n_in, sizeof n_in) && s->queue.n == n_queued && s->running.n == n_running &&
           s->n_parting == n_parting;
}

bool kvf__sched_is_valid(const kvf_sched *s) {
    uint32_t n_free = 0, n_holders = 0, end = 0, n_held = 0, n_reserved = 0;
    if (!list_is_valid(s, &s->queue) || !list_is_valid(s, &s->running)) return false;
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
