/* Preemption to the host: a decoding request is swapped out, and later goes on where it was. */
#include "scheduler/sched.h"

/* Recomputing takes one step for a chunk or less of a prompt, but one step for each replayed token. */
static bool worth_it(const kvf_sched *s, const kvf__req *r) {
    if (s->config.preempt == KVF_PREEMPT_SWAP) return true;
    return (kvf__req_replays(s, r) && r->n_computed > r->n_prompt) || r->n_computed > s->config.chunk;
}

/* Not a prompt, which has sums besides its blocks, nor a request that may have to be forked while it waits. */
bool kvf__sched_swap_out(kvf_sched *s, kvf__req *r) {
    if (!s->swaps || r->state != KVF__REQ_DECODE || r->n_computed == r->n_known || r->samples == KVF__FORKS ||
        !worth_it(s, r))
        return false;
    if (kvf_swap_out(s->config.manager, &r->seq, 1, &s->copies) != KVF_OK) return false;
    kvf__sched_move(s, r, KVF__MOVE_SWAP_OUT);
    return true;
}

/* Needs room for one more block in each table, so that it is not swapped out again at once; alone it needs only its next token. */
kvf_status kvf__sched_swap_in(kvf_sched *s, kvf__req *r) {
    uint32_t n_tokens = s->running.n ? s->block_size : 1;
    kvf_status status = kvf_swap_in(s->config.manager, &r->seq, 1, n_tokens, &s->copies);
    if (status != KVF_OK) return status;
    kvf__sched_move(s, r, KVF__MOVE_SWAP_IN);
    return KVF_OK;
}

void kvf__sched_swap_forget(kvf_sched *s, kvf__req *r) { kvf__sched_put_back(s, r, KVF__MOVE_QUEUE); }

bool kvf__sched_swap_forget_last(kvf_sched *s) {
    for (kvf__req *r = kvf__sched_at(s, s->queue.tail); r; r = kvf__sched_at(s, r->prev)) {
        if (r->state != KVF__REQ_SWAPPED) continue;
        kvf__sched_swap_forget(s, r);
        return true;
    }
    return false;
}
