/* The next step: growth first, then the chunks of running prompts, then admissions. */
#include <assert.h>

#include "scheduler/sched.h"

static bool begins_segment(const kvf__req *r) {
    return r->segment < r->n_segments && r->segments[r->segment].begin == r->n_computed;
}

static kvf_step_item make_item(kvf_sched *s, const kvf__req *r, kvf_step_kind kind, uint32_t n_tokens) {
    uint32_t end = r->n_computed + n_tokens;
    bool prefill = kind == KVF_STEP_PREFILL, repeated = r->repetition == KVF__REPEATED;
    bool prompt_ends = prefill && end == r->n_prefill && !kvf__repeat_owed(s, r);
    kvf_step_item item = {
        .request = r->name,
        .seq = r->seq,
        .user = r->user,
        .kind = (uint32_t)kind,
        .token_begin = r->n_computed,
        .n_tokens = n_tokens,
        .prompt_ends = prompt_ends,
        .samples = end == r->n_known && r->max_new > 0 && (kind == KVF_STEP_DECODE || prompt_ends),
        .prefill_offset = kind != KVF_STEP_DECODE ? r->extent_begin : KVF__SLOT_NONE,
        .n_columns = kind != KVF_STEP_DECODE ? kvf__sched_n_columns(s, r) : 0,
        .begins = prefill && !repeated && (r->n_computed == r->match.n_tokens || begins_segment(r)),
        .n_held = prompt_ends ? r->n_held : 0,
        .logits_only = prefill && repeated,
    };
    if (kind == KVF_STEP_REPEAT) kvf__repeat_mark_item(s, r, &item);
    kvf__sched_mark_item(s, r, &item);
    return item;
}

static void push_item(kvf_sched *s, kvf__req *r, kvf_step_kind kind, uint32_t n_tokens) {
    uint32_t i = s->n_items++;
    for (; i > s->n_decode && kvf__sched_before(r, kvf__sched_find(s, s->items[i - 1].request)); i--)
        s->items[i] = s->items[i - 1];
    s->items[i] = make_item(s, r, kind, n_tokens);
    s->n_tokens += n_tokens;
}

/* A request that is swapped in during a plan decodes too. */
static void push_decode(kvf_sched *s, kvf__req *r) {
    uint32_t i = s->n_items++;
    for (; i > s->n_decode || (i && kvf__sched_before(r, kvf__sched_find(s, s->items[i - 1].request))); i--)
        s->items[i] = s->items[i - 1];
    s->items[i] = make_item(s, r, KVF_STEP_DECODE, 1);
    s->n_decode++;
    s->n_tokens++;
}

/* Every decoding request gets one token; then each running prompt gets a chunk, as long as max_batch_tokens allows. A prompt never
 * passes an earlier one: the first that does not fit ends the list. */
static void list_running(kvf_sched *s) {
    s->n_items = s->n_decode = s->n_tokens = 0;
    s->lacks_extent = false;
    for (kvf__req *r = kvf__sched_at(s, s->running.head); r; r = kvf__sched_at(s, r->next)) {
        if (r->state != KVF__REQ_DECODE || r->n_computed == r->n_known || kvf__req_is_complete(s, r)) continue;
        push_item(s, r, KVF_STEP_DECODE, 1);
        s->n_decode = s->n_items;
    }
    for (kvf__req *r = kvf__sched_at(s, s->running.head); r; r = kvf__sched_at(s, r->next)) {
        if (r->state != KVF__REQ_PREFILL) continue;
        if (!kvf__sched_lend_extent(s, r)) {
            s->lacks_extent = true;
            continue; /* those that hold the columns may come later */
        }
        bool repeats = kvf__repeat_due(s, r);
        uint32_t n = repeats ? kvf__repeat_chunk(s, r) : kvf__sched_chunk_end(s, r, r->n_computed) - r->n_computed;
        if (n > s->config.max_batch_tokens - s->n_tokens) break;
        push_item(s, r, repeats ? KVF_STEP_REPEAT : KVF_STEP_PREFILL, n);
    }
}

static kvf_status append_items(kvf_sched *s) {
    if (!s->n_items) return KVF_OK;
    for (uint32_t i = 0; i < s->n_items; i++) s->appends[i] = (kvf_append_item){s->items[i].seq, s->items[i].n_tokens};
    return kvf_append(s->config.manager, s->appends, s->n_items, &s->copies);
}

/* Makes room for a request that found no block to grow: preempts the latest one, which came no earlier. The only running request is
 * not preempted: it has the whole pool, and ends instead. */
static void shed_latest(kvf_sched *s) {
    if (kvf__sched_preempt_paused(s)) return;
    kvf__req *r = kvf__sched_at(s, s->running.tail);
    if (s->running.n == 1) {
        bool bounded = r->bound == KVF__BOUNDED;
        if (!bounded && r->reserved != KVF__NOTHING && kvf__sched_reserve_nothing(s, r) == KVF_OK) return;
        kvf__sched_end(s, r, bounded ? KVF_END_NO_BLOCKS : KVF_END_LENGTH);
        return;
    }
    s->swapping = kvf__sched_swap_out(s, r);
    s->preempted[s->n_preempted++] = (kvf_step_item){.request = r->name, .user = r->user, .swapped = s->swapping};
    if (!s->swapping) kvf__sched_requeue(s, r);
}

/* Sets reservations that could not be exact at the prompt's end, because the sizes came with the overflow or the first event was
 * deferred. Without room the earlier reservation stays, and growth is made possible below. Reservations of forks are set at each
 * plan, since shared blocks change when others give them up; twice, because one fork may give back what another lacks. */
static void settle_reservations(kvf_sched *s) {
    bool lacks = true;
    for (int pass = 0; pass < 2 && lacks; pass++) {
        lacks = false;
        for (kvf__req *r = kvf__sched_at(s, s->running.head); r; r = kvf__sched_at(s, r->next)) {
            if (r->state != KVF__REQ_DECODE || r->reserved == KVF__AS_SIZED) continue;
            if (!kvf_policy_sizes(s->config.policies, r->seq_index)) continue;
            lacks |= kvf__sched_reserve_sized(s, r) != KVF_OK && r->reserved == KVF__AS_SHARED;
        }
    }
}

/* Grows the requests that find blocks although those of swapped requests are not free yet; a prompt passes no earlier one. The others
 * grow in the next step, when the copies are done. */
static kvf_status grow_what_fits(kvf_sched *s) {
    list_running(s);
    uint32_t n_listed = s->n_items;
    bool in_order = true;
    s->n_items = s->n_decode = s->n_tokens = 0;
    for (uint32_t i = 0; i < n_listed; i++) {
        const kvf_step_item item = s->items[i];
        if (item.kind != KVF_STEP_DECODE && !in_order) break;
        s->appends[s->n_items] = (kvf_append_item){item.seq, item.n_tokens};
        kvf_status status = kvf_can_append(s->config.manager, s->appends, s->n_items + 1, NULL);
        in_order &= status == KVF_OK;
        if (status == KVF_E_NO_BLOCKS) continue;
        if (status != KVF_OK) return kvf__fail_as(&s->error, status, kvf_manager_error(s->config.manager));
        s->items[s->n_items++] = item;
        s->n_decode += item.kind == KVF_STEP_DECODE;
        s->n_tokens += item.n_tokens;
    }
    kvf_status status = append_items(s);
    return status == KVF_OK ? status : kvf__fail_as(&s->error, status, kvf_manager_error(s->config.manager));
}

static kvf_status grow_running(kvf_sched *s) {
    for (;;) {
        list_running(s);
        kvf_status status = append_items(s);
        if (status == KVF_OK) return KVF_OK;
        s->n_items = s->n_decode = s->n_tokens = 0;
        if (status != KVF_E_NO_BLOCKS) return kvf__fail_as(&s->error, status, kvf_manager_error(s->config.manager));
        shed_latest(s);
        if (s->swapping) return grow_what_fits(s);
    }
}

/* Ends the head of the queue, which could not be admitted although nothing runs that could give a block back. */
static void end_head(kvf_sched *s, kvf__req *r, kvf__admission admission) {
    if (r->n_held && r->samples != KVF__FORKS && admission != KVF__ADMIT_REFUSED)
        kvf__group_dissolve(s, r);
    else if (admission == KVF__ADMIT_REFUSED)
        kvf__sched_end(s, r, KVF_END_REFUSED);
    else
        kvf__sched_end(s, r, r->bound == KVF__BOUNDED ? KVF_END_NO_BLOCKS : KVF_END_LENGTH);
}

/* Swaps the head of the queue in, with its next token. If it is alone and there is no room, there never will be: it is recomputed. */
static kvf_status bring_back(kvf_sched *s, kvf__req *r, bool *more) {
    if (s->n_tokens == s->config.max_batch_tokens || s->snapshot_unpinned) return KVF_OK; /* in the next step */
    bool alone = s->running.n == 0;
    kvf_status status = kvf__sched_swap_in(s, r);
    bool made_room = status == KVF_E_NO_BLOCKS && kvf__sched_preempt_paused(s);
    *more = status == KVF_OK || made_room || (status == KVF_E_NO_BLOCKS && alone);
    if (status == KVF_E_NO_BLOCKS && alone) kvf__sched_swap_forget(s, r);
    if (status == KVF_E_NO_BLOCKS) return KVF_OK;
    const kvf_append_item append = {r->seq, 1};
    if (status == KVF_OK) status = kvf_append(s->config.manager, &append, 1, &s->copies);
    if (status != KVF_OK) return kvf__fail_as(&s->error, status, kvf_manager_error(s->config.manager));
    push_decode(s, r);
    return KVF_OK;
}

/* Suspects are admitted one at a time, the members of a group together, so that a step which fails again names one. But nothing
 * waits for a request that is in no step. */
static bool waits_for_suspect(kvf_sched *s, const kvf__req *head) {
    for (kvf__req *r = kvf__sched_at(s, s->running.head); r && head->suspect && s->n_items;
         r = kvf__sched_at(s, r->next))
        if (r->suspect && r->state != KVF__REQ_PAUSED && r->arrival != head->arrival) return true;
    return false;
}

/* Admits the head of the queue and gives it its first chunk. *more becomes false if it has to wait, and all behind it with it. *whole:
 * it may be found in the cache as a whole. */
static kvf_status admit_head(kvf_sched *s, bool *more, bool *whole) {
    kvf__req *r = kvf__sched_at(s, s->queue.head);
    *more = false;
    if (!r || waits_for_suspect(s, r)) return KVF_OK;
    while (s->running.n + s->n_reserved + 1 + r->n_held > s->config.max_running)
        if (!kvf__sched_preempt_paused(s)) return KVF_OK;
    if (r->state == KVF__REQ_SWAPPED) return bring_back(s, r, more);
    kvf__sched_look_up(s, r, *whole);
    *whole = true;
    if (kvf__parting_waits(s, r)) return KVF_OK; /* it finds more in a later step */
    uint32_t begin = r->match.n_tokens, n = kvf__sched_chunk_end(s, r, begin) - begin;
    if (n > s->config.max_batch_tokens - s->n_tokens) return KVF_OK;
    if (s->snapshot_unpinned && !kvf__sched_takes_free(s, r, n)) return KVF_OK; /* in the next step */
    kvf__admission admission = kvf__sched_admit(s, r);
    if (admission == KVF__ADMITTED) {
        kvf__parting_note_cached(s, r);
        n = kvf__sched_chunk_end(s, r, r->n_computed) - r->n_computed; /* the match may have been given up */
        const kvf_append_item append = {r->seq, n};
        kvf_status status = kvf_append(s->config.manager, &append, 1, &s->copies);
        if (status != KVF_OK) {
            kvf__sched_requeue(s, r);
            return kvf__fail_as(&s->error, status, kvf_manager_error(s->config.manager));
        }
        *more = true;
        if (kvf__sched_snapshot_unpinned(s, r)) {
            if (!kvf__sched_snapshot_stands(s, r)) { /* it took the block itself: again, with less */
                kvf__sched_requeue(s, r);
                *whole = false;
                return KVF_OK;
            }
            s->snapshot_unpinned = true;
        }
        push_item(s, r, KVF_STEP_PREFILL, n);
    } else if ((admission == KVF__ADMIT_NO_BLOCKS || (admission == KVF__ADMIT_LATER && !s->n_items)) &&
               kvf__sched_preempt_paused(s)) {
        *more = true;
    } else if (admission == KVF__ADMIT_LATER && s->running.n == 0 && kvf__sched_swap_forget_last(s)) {
        *more = true; /* it held a sequence */
    } else if (admission == KVF__ADMIT_REFUSED || (admission == KVF__ADMIT_NO_BLOCKS && s->running.n == 0)) {
        end_head(s, r, admission);
        *more = true;
    }
    return KVF_OK;
}

/* Nothing can run: every running request waits for a token that the caller tells only when another fork, now in the queue, has
 * computed its own. Later groups are preempted to make room for that fork. If there are none, its group has the pool to
 * itself and the pool is too small. */
static kvf_status break_standstill(kvf_sched *s) {
    kvf_status status = KVF_OK;
    while (!s->n_items && !s->n_ends && s->queue.n && s->running.n && status == KVF_OK) {
        kvf__req *tail = kvf__sched_at(s, s->running.tail), *head = kvf__sched_at(s, s->queue.head);
        bool same = tail->arrival == head->arrival;
        if (tail->samples != KVF__FORKS || (!same && kvf__sched_before(tail, head))) return KVF_OK;
        if (same) {
            kvf__sched_end(s, head, KVF_END_LENGTH);
            return KVF_OK;
        }
        s->preempted[s->n_preempted++] = (kvf_step_item){.request = tail->name, .user = tail->user};
        kvf__sched_requeue(s, tail);
        bool more, whole = true;
        status = admit_head(s, &more, &whole);
    }
    return status;
}

/* Requests without a deadline stand at the queue's end until a plan tells the time. */
static void set_deadlines(kvf_sched *s, uint64_t now) {
    s->now = KVF__MAX(s->now, now);
    if (s->config.order != KVF_ORDER_DEADLINE) return;
    int64_t due = (int64_t)KVF__MIN(KVF__MIN(s->now, INT64_MAX) + s->config.patience, INT64_MAX - 1);
    for (kvf__req *r; (r = kvf__sched_at(s, s->queue.tail)) && r->rank == INT64_MAX;) kvf__sched_set_rank(s, r, due);
}

kvf_status kvf_sched_plan(kvf_sched *sched, uint64_t now, kvf_step *step) {
    if (!sched) return KVF_E_INVALID;
    if (!kvf__output_is_valid(step))
        return kvf__fail(&sched->error, KVF_E_INVALID, "step: must be given, its struct_size set to sizeof(kvf_step)");
    if (sched->planned && sched->n_items)
        return kvf__fail(&sched->error, KVF_E_STATE,
                         "a step of %u items is planned: run it and call kvf_sched_done first", sched->n_items);
    if (sched->corrupt)
        return kvf__fail(&sched->error, KVF_E_CORRUPT, "the scheduler asked for an illegal move: destroy it");
    if (sched->reported) sched->n_ends = sched->n_preempted = 0;
    sched->reported = false;
    sched->planned = sched->snapshot_unpinned = false;
    if (sched->copies_given) sched->copies.n = 0;
    sched->copies_given = sched->swapping = false;
    set_deadlines(sched, now);
    settle_reservations(sched);
    kvf_status status = grow_running(sched);
    if (status != KVF_OK) return status;
    for (bool more = !sched->swapping, whole = true; more && status == KVF_OK;)
        status = admit_head(sched, &more, &whole);
    if (status == KVF_OK && !sched->swapping) status = break_standstill(sched);
    if (status != KVF_OK && !sched->n_items) return status; /* what has its slots runs in any case */
    assert(kvf__sched_is_valid(sched));
    sched->planned = true;
    sched->reported = true;
    sched->copies_given = true;
    const kvf_step planned = {
        .item_bytes = sizeof *sched->items,
        .end_bytes = sizeof *sched->ends,
        .items = sched->items,
        .n_items = sched->n_items,
        .n_decode = sched->n_decode,
        .ends = sched->ends,
        .n_ends = sched->n_ends,
        .preempted = sched->preempted,
        .n_preempted = sched->n_preempted,
        .copies = sched->copies,
        .n_tokens = sched->n_tokens,
        .n_running = sched->running.n,
        .n_waiting = sched->queue.n + sched->n_in[KVF__REQ_HELD],
    };
    kvf__output(step, &planned, sizeof planned);
    return KVF_OK;
}

kvf_status kvf_sched_done(kvf_sched *sched) {
    if (!sched) return KVF_E_INVALID;
    if (!sched->planned) return kvf__fail(&sched->error, KVF_E_STATE, "no step is planned: kvf_sched_plan comes first");
    for (uint32_t i = 0; i < sched->n_items; i++) {
        const kvf_step_item *item = &sched->items[i];
        kvf__req *r = kvf__sched_find(sched, item->request);
        if (!r) continue; /* finished while the step ran */
        if (item->kind == KVF_STEP_REPEAT) {
            if (!kvf__repeat_done(sched, r, item->n_tokens)) kvf__sched_requeue(sched, r);
            continue;
        }
        r->n_computed += item->n_tokens;
        if (item->kind == KVF_STEP_PREFILL && !item->prompt_ends && r->n_computed == r->n_prefill) kvf__repeat_begin(r);
        if (item->prompt_ends) kvf__parting_leave(sched, r);
        if (item->prompt_ends)
            kvf__sched_move(sched, r, KVF__MOVE_PROMPT_END);
        else if (item->kind == KVF_STEP_DECODE)
            kvf__sched_go_on(sched, r);
        kvf__sched_store(sched, r, item->kind == KVF_STEP_PREFILL);
    }
    sched->planned = false;
    sched->n_items = 0;
    assert(kvf__sched_is_valid(sched));
    return KVF_OK;
}

/* An item's request is again as it was before the plan. */
static void take_back(kvf_sched *s, kvf__req *r, const kvf_step_item *item) {
    bool first = item->kind == KVF_STEP_PREFILL && r->repetition == KVF__UNREPEATED;
    if (first && r->n_computed == r->match.n_tokens) { /* admitted by this plan */
        bool forked = r->was_forked;
        kvf__sched_put_back(s, r, KVF__MOVE_PREEMPT);
        if (forked) kvf__sched_move(s, r, KVF__MOVE_FORK);
        return;
    }
    if (first && begins_segment(r)) kvf__sched_give_extent(s, r);
    kvf_status status = kvf_seq_rollback(s->config.manager, r->seq, item->n_tokens);
    if (status != KVF_OK) kvf__sched_requeue(s, r); /* only if the caller began a compaction, or freed it */
}

kvf_status kvf_sched_cancel(kvf_sched *sched) {
    if (!sched) return KVF_E_INVALID;
    if (!sched->planned) return kvf__fail(&sched->error, KVF_E_STATE, "no step is planned: kvf_sched_plan comes first");
    for (uint32_t i = sched->n_items; i-- > 0;) {
        kvf__req *r = kvf__sched_find(sched, sched->items[i].request);
        if (r) take_back(sched, r, &sched->items[i]); /* else it was finished meanwhile */
    }
    sched->n_items = sched->n_decode = sched->n_tokens = 0;
    sched->planned = sched->swapping = sched->snapshot_unpinned = false;
    assert(kvf__sched_is_valid(sched));
    return KVF_OK;
}

/* The state of their blocks is unknown, so all are given up. Freeing a sequence that is in a compaction cancels that too. */
kvf_status kvf_sched_undo(kvf_sched *sched) {
    if (!sched) return KVF_E_INVALID;
    bool known = false;
    for (kvf__req *r = kvf__sched_at(sched, sched->running.head); r; r = kvf__sched_at(sched, r->next))
        known |= r->suspect && r->state != KVF__REQ_PAUSED;
    while (sched->running.n) {
        kvf__req *r = kvf__sched_at(sched, sched->running.tail);
        if (r->state == KVF__REQ_PAUSED) {
            kvf__sched_put_back(sched, r, KVF__MOVE_PREEMPT);
            continue;
        }
        r->suspect |= !known;
        kvf__sched_requeue(sched, r);
    }
    sched->n_items = sched->n_decode = sched->n_tokens = 0;
    sched->planned = sched->swapping = sched->snapshot_unpinned = false;
    assert(kvf__sched_is_valid(sched));
    return KVF_OK;
}

kvf_status kvf_sched_shed(kvf_sched *sched, kvf_step_item *preempted) {
    if (!sched) return KVF_E_INVALID;
    if (!preempted) return kvf__fail(&sched->error, KVF_E_INVALID, "preempted: is NULL");
    if (sched->planned && sched->n_items)
        return kvf__fail(&sched->error, KVF_E_STATE, "a step is planned: call this after kvf_sched_done");
    if (kvf__sched_preempt_paused(sched)) {
        *preempted = sched->preempted[--sched->n_preempted];
        return KVF_OK;
    }
    if (sched->running.n < 2)
        return kvf__fail(&sched->error, KVF_E_NO_BLOCKS, "fewer than two requests run: none can make room");
    kvf__req *r = kvf__sched_at(sched, sched->running.tail);
    *preempted = (kvf_step_item){.request = r->name, .user = r->user};
    kvf__sched_requeue(sched, r);
    return KVF_OK;
}
