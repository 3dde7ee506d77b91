/* Admission, and release: what a request holds while it runs. */
#include "scheduler/sched.h"

static void give_sequence(kvf_sched *s, kvf__req *r) {
    kvf_policy_close(s->config.policies, r->seq_index);
    kvf_status status = kvf_seq_free(s->config.manager, r->seq);
    (void)status; /* stale only if the caller freed it, which leaves nothing to free */
    r->seq = 0;
}

/* Makes the reservations that admission counts, with those of the held samples. */
static kvf_status reserve_admission(kvf_sched *s, kvf__req *r) {
    if (r->n_held) return kvf__group_reserve(s, r);
    kvf_status status = kvf__sched_take_admission(s, r, kvf__sched_admission_blocks(s, r));
    if (status == KVF_E_NO_BLOCKS && r->bound == KVF__GROWS &&
        s->running.n == 0) /* alone it needs no more than to begin */
        status = kvf__sched_take_admission(s, r, kvf__sched_begin_blocks(s, r));
    return status;
}

/* Creates a sequence with its prefix hit and its reservation, or changes nothing. */
static kvf__admission open_sequence(kvf_sched *s, kvf__req *r) {
    kvf_manager *manager = s->config.manager;
    if (kvf_seq_create(manager, &r->seq) != KVF_OK) return KVF__ADMIT_LATER;
    kvf__admission result = KVF__ADMIT_NO_BLOCKS;
    if (reserve_admission(s, r) != KVF_OK) goto undo;
    result = KVF__ADMIT_REFUSED;
    if (kvf_seq_index(manager, r->seq, &r->seq_index) == KVF_OK &&
        kvf_policy_open(s->config.policies, r->seq_index, &r->options, &s->error) == KVF_OK)
        return KVF__ADMITTED;
undo:
    kvf__group_unreserve(s, r);
    if (kvf_seq_free(manager, r->seq) != KVF_OK) result = KVF__ADMIT_REFUSED;
    r->seq = 0;
    return result;
}

/* All or nothing: without room the request stays as it is. */
kvf__admission kvf__sched_admit(kvf_sched *s, kvf__req *r) {
    if (kvf__sched_needs(s, r).extent && (s->lacks_extent || !kvf__sched_take_extent(s, r, r->n_prompt)))
        return KVF__ADMIT_LATER;
    kvf__admission result = open_sequence(s, r);
    if (result == KVF__ADMIT_NO_BLOCKS && r->match.n_tokens && s->running.n == 0) {
        kvf__sched_forget_match(r); /* nobody else will make room: what was found has to */
        result = open_sequence(s, r);
    }
    if (result != KVF__ADMITTED) {
        kvf__sched_give_extent(s, r);
        return result;
    }
    r->was_forked = r->state == KVF__REQ_FORKED;
    kvf__sched_move(s, r, KVF__MOVE_PREFILL);
    r->segment = 0;
    kvf__repeat_forget(r);
    r->n_computed = r->match.n_tokens;
    return KVF__ADMITTED;
}

static void release(kvf_sched *s, kvf__req *r) {
    kvf__sched_give_extent(s, r);
    kvf__group_unreserve(s, r);
    give_sequence(s, r);
    if (r->bound == KVF__TIGHTENED) r->bound = KVF__BOUNDED;
    r->reserved = KVF__AS_ADMITTED;
    r->n_computed = 0;
    kvf__repeat_forget(r);
    r->match.again = 1;
}

void kvf__sched_put_back(kvf_sched *s, kvf__req *r, kvf__move move) {
    release(s, r);
    kvf__sched_move(s, r, move);
    kvf__parting_enter(s, r);
}

void kvf__sched_requeue(kvf_sched *s, kvf__req *r) {
    if (r->bound == KVF__GROWS) r->n_blocks = KVF__MAX(r->n_blocks, kvf__sched_present_blocks(s, r));
    kvf__sched_put_back(s, r, KVF__MOVE_PREEMPT);
}

static void leave(kvf_sched *s, kvf__req *r) {
    if (r->state == KVF__REQ_HELD)
        kvf__group_leave(s, r);
    else if (r->seq)
        release(s, r);
    kvf__parting_leave(s, r);
    kvf__sched_give_slot(s, r);
}

void kvf__sched_drop(kvf_sched *s, kvf__req *r) {
    if (!kvf__group_promote(s, r)) leave(s, r);
}

void kvf__sched_end(kvf_sched *s, kvf__req *r, kvf_end_reason reason) {
    if (s->reported) {
        s->reported = false;
        s->n_ends = s->n_preempted = 0;
    }
    s->ends[s->n_ends++] = (kvf_step_end){r->name, r->user, (uint32_t)reason};
    while (r->n_held) {
        kvf__req *held = kvf__sched_at(s, r->held);
        s->ends[s->n_ends++] = (kvf_step_end){held->name, held->user, (uint32_t)reason};
        leave(s, held);
    }
    leave(s, r);
}
