/* Later segments of a prompt: requests that are paused after their answer and continue with the next segment. */
#include "scheduler/sched.h"

static const kvf_sched_segment *next_segment(kvf__req *r) {
    while (r->segment < r->n_segments && r->segments[r->segment].end <= r->n_computed) r->segment++;
    return r->segment < r->n_segments ? &r->segments[r->segment] : NULL;
}

void kvf__sched_go_on(kvf_sched *s, kvf__req *r) {
    const kvf_sched_segment *segment = next_segment(r);
    bool prefills = segment && segment->begin == r->n_computed;
    kvf__sched_move(s, r, prefills ? KVF__MOVE_PREFILL : KVF__MOVE_DECODE);
    if (!prefills) return;
    r->n_prefill = segment->end;
    kvf__repeat_forget(r);
}

/* A segment's sums are by slot: it needs as many columns as its longest table will have slots. Log-probabilities are by position: they
 * need as many as it has tokens. */
bool kvf__sched_lend_extent(kvf_sched *s, kvf__req *r) {
    if (r->extent_begin != KVF__SLOT_NONE || !kvf__sched_needs(s, r).extent) return true;
    uint32_t longest = 0;
    for (uint32_t t = 0; t < s->n_tables; t++) {
        uint32_t n_slots = 0;
        kvf_status status =
            kvf_seq_table(s->config.manager, r->seq, t / s->n_groups, t % s->n_groups, &n_slots, NULL, NULL);
        if (status == KVF_OK) longest = KVF__MAX(longest, n_slots);
    }
    uint32_t n_columns = longest + r->n_prefill - r->n_computed;
    return kvf__sched_take_extent(
        s, r, r->needs.stats & (KVF_SNAPSHOT_SQUARES | KVF_SNAPSHOT_LOGPROBS) ? r->n_prefill : n_columns);
}

bool kvf__sched_preempt_paused(kvf_sched *s) {
    kvf__req *r = kvf__sched_at(s, s->running.tail);
    while (r && r->state != KVF__REQ_PAUSED) r = kvf__sched_at(s, r->prev);
    if (!r) return false;
    if (s->reported) {
        s->reported = false;
        s->n_ends = s->n_preempted = 0;
    }
    s->preempted[s->n_preempted++] = (kvf_step_item){.request = r->name, .user = r->user};
    kvf__sched_put_back(s, r, KVF__MOVE_PREEMPT);
    return true;
}

/* A request of a planned step goes on when that step is done: it can neither be paused nor get a segment before. */
static kvf_status check_between_steps(kvf_sched *s, const char *verb) {
    if (!s->planned || !s->n_items) return KVF_OK;
    return kvf__fail(&s->error, KVF_E_STATE, "a step is planned: %s between kvf_sched_done and the next plan", verb);
}

kvf_status kvf_sched_pause(kvf_sched *sched, kvf_request request) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status == KVF_OK) status = check_between_steps(sched, "pause");
    if (status != KVF_OK) return status;
    bool forks = r->samples == KVF__FORKS;
    if (!kvf__sched_may(r, KVF__MOVE_PAUSE) || r->n_computed + 1 < r->n_known || forks)
        return kvf__fail(&sched->error, KVF_E_STATE, "request %llu: %s", (unsigned long long)request,
                         forks ? "is forked again and again" : "is not at the end of an answer");
    kvf__sched_move(sched, r, KVF__MOVE_PAUSE);
    return KVF_OK;
}

static kvf_status check_extension(kvf_sched *s, const kvf__req *r, const kvf_sched_segment *segments, uint32_t n,
                                  uint32_t max_new) {
    if (r->state != KVF__REQ_PAUSED && r->state != KVF__REQ_PAUSED_PREEMPTED)
        return kvf__fail(&s->error, KVF_E_STATE, "request %llu: is not paused", (unsigned long long)r->name);
    const kvf_sched_segment *last = segments && n ? &segments[n - 1] : NULL;
    if (!last || n != r->n_segments + 1 || last->begin != r->n_known || last->end <= last->begin || !max_new)
        return kvf__fail(
            &s->error, KVF_E_INVALID,
            "segment: must be one more than the %u there are, begin at the %u known tokens, and have a token, "
            "and max_new one to follow",
            r->n_segments, r->n_known);
    if (last->end >= s->config.max_context)
        return kvf__fail(&s->error, KVF_E_NEVER_FITS,
                         "segment of %u behind %u tokens: the context has %u positions, one of them for an answer",
                         last->end - last->begin, last->begin, s->config.max_context);
    if (r->needs.extent && last->end > s->config.max_prefill_tokens)
        return kvf__fail(&s->error, KVF_E_NEVER_FITS,
                         "segment of %u behind %u tokens: policy %s keeps figures of it, for which there is room for "
                         "max_prefill_tokens %u",
                         last->end - last->begin, last->begin, r->options.ops->name, s->config.max_prefill_tokens);
    return r->needs.piece ? kvf__repeat_check(s, r, last->end - last->begin, last->end) : KVF_OK;
}

/* It may hold more than any reservation while a segment runs, so that it grows from the free pool like one that keeps all. */
kvf_status kvf_sched_extend(kvf_sched *sched, kvf_request request, const kvf_sched_segment *segments,
                            uint32_t n_segments, uint32_t max_new) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status == KVF_OK) status = check_between_steps(sched, "extend");
    if (status == KVF_OK) status = check_extension(sched, r, segments, n_segments, max_new);
    if (status != KVF_OK) return status;
    r->segments = segments;
    r->n_segments = n_segments;
    r->n_known = segments[n_segments - 1].end;
    r->max_new = r->n_known - r->n_prompt + KVF__MIN(max_new, sched->config.max_context - r->n_known);
    r->max_table_slots = KVF__MIN(r->n_prompt + r->max_new - 1, sched->config.max_context - 1);
    if (r->bound != KVF__GROWS) r->n_blocks = 0; /* what it needed when it was preempted: never */
    r->bound = KVF__GROWS;
    if (r->state == KVF__REQ_PAUSED) {
        kvf__sched_go_on(sched, r);
        return KVF_OK;
    }
    kvf__sched_move(sched, r, KVF__MOVE_QUEUE);
    kvf__parting_enter(sched, r);
    return KVF_OK;
}
