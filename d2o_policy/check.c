/* The checks at the begin of every call of the vtable. The loops behind them cannot fail. */
#include "d2o_policy/pages.h"

kvf_status kvf__batch_read(kvf__batch *to, const kvf_policy_batch *given, const char *what, kvf_error *err) {
    kvf_status st = kvf__config_read(&to->b, sizeof to->b, given, "kvf_policy_batch", err);
    if (st) return st;
    kvf_policy_batch *b = &to->b;
    if (!b->view) return kvf__fail(err, KVF_E_INVALID, "%s: state, batch and view must be set", what);
    st = kvf__config_read(&to->view, sizeof to->view, b->view, "kvf_view", err);
    if (!st && b->pages) st = kvf__config_read(&to->pages, sizeof to->pages, b->pages, "kvf_pages", err);
    if (!st && b->scores) st = kvf__config_read(&to->scores, sizeof to->scores, b->scores, "kvf_score_pages", err);
    if (!st && b->mass) st = kvf__config_read(&to->mass, sizeof to->mass, b->mass, "kvf_mass", err);
    if (st) return st;
    b->view = &to->view;
    if (b->pages) b->pages = &to->pages;
    if (b->scores) b->scores = &to->scores;
    if (b->mass) b->mass = &to->mass;
    return KVF_OK;
}

kvf_status kvf__view_check(const kvf_policy_state *state, const kvf_policy_batch *batch, const char *what,
                           kvf_error *err) {
    if (!state || !batch || !batch->view)
        return kvf__fail(err, KVF_E_INVALID, "%s: state, batch and view must be set", what);
    const kvf_policy_state_config *c = &state->config;
    const kvf_view *v = batch->view;
    if (v->n_seqs && (!v->rows || !v->row_offset || !v->n_slots || !v->next_pos || !v->seq_index))
        return kvf__fail(err, KVF_E_INVALID, "%s: view: rows, row_offset, n_slots, next_pos and seq_index must be set",
                         what);
    if (v->n_layers != c->n_layers || v->block_size != c->block_size || v->heads_per_group == 0 ||
        (uint64_t)v->n_groups * v->heads_per_group != c->n_kv_heads)
        return kvf__fail(
            err, KVF_E_INVALID,
            "%s: view of %u layers, %u groups of %u heads, block_size %u: the state has %u layers, %u heads, %u", what,
            v->n_layers, v->n_groups, v->heads_per_group, v->block_size, c->n_layers, c->n_kv_heads, c->block_size);
    return KVF_OK;
}

kvf_status kvf__pages_check(const kvf_policy_state *state, const kvf_policy_batch *batch, const char *what,
                            kvf_error *err) {
    const kvf_pages *p = batch->pages;
    if (!p || !p->k || !p->v || !p->pos)
        return kvf__fail(err, KVF_E_INVALID, "%s: pages with k, v and pos must be set", what);
    if (kvf_dtype_bytes(p->dtype) == 0 || p->head_dim != state->config.head_dim ||
        p->block_size != batch->view->block_size || p->heads_per_group != batch->view->heads_per_group)
        return kvf__fail(
            err, KVF_E_INVALID,
            "%s: pages of type %d, head_dim %u, block_size %u, heads_per_group %u: must be %u, %u, %u and a "
            "known type",
            what, (int)p->dtype, p->head_dim, p->block_size, p->heads_per_group, state->config.head_dim,
            batch->view->block_size, batch->view->heads_per_group);
    return KVF_OK;
}

kvf_status kvf__score_pages_check(const kvf_policy_batch *batch, uint32_t n_arrays, const kvf_event *event,
                                  uint32_t n_slots, kvf_error *err) {
    const kvf_score_pages *s = batch->scores;
    const kvf_view *v = batch->view;
    if (!s || !s->base || !v->score_rows || s->n_arrays < n_arrays || s->block_size != v->block_size ||
        s->heads_per_group != v->heads_per_group)
        return kvf__fail(err, KVF_E_INVALID,
                         "score pages: must be set, with at least %u arrays, %u heads of a group and %u slots a page",
                         n_arrays, v->heads_per_group, v->block_size);
    kvf__event_part part = kvf__part_of(v, event);
    for (uint64_t t = part.table; t < part.table + part.n_heads / v->heads_per_group; t++) {
        for (uint32_t b = 0; b < kvf__ceil_div(n_slots, v->block_size); b++)
            if (v->score_rows[v->row_offset[t] + b] >= s->n_pages)
                return kvf__fail(err, KVF_E_STATE,
                                 "score pages: row %u, layer %u has none for slot %u: take them first", event->row,
                                 event->layer, b * v->block_size);
    }
    return KVF_OK;
}

/* What an event's scores are read from: the prompt's accumulators, or the pages. */
static kvf_status check_scores(const kvf_policy_batch *b, const kvf__policy_seq *s, uint32_t i, uint32_t n,
                               kvf_error *err) {
    const kvf_event *e = &b->events[i];
    kvf__roles r = kvf__score_roles(&s->options);
    if (kvf__policy_asks_probe(&s->options) && !b->pages->score)
        return kvf__fail(err, KVF_E_INVALID, "event %u: score probe: pages.score must be set, or use another score", i);
    if (r.n == 0) return KVF_OK;
    bool prompt = kvf__of_prompt(b, e), window = s->options.score == KVF_SCORE_WINDOW;
    float *const *sums = window ? b->prompt_last : b->prompt_sums;
    if (prompt && b->prompt_stride < n)
        return kvf__fail(err, KVF_E_INVALID, "event %u: prompt_stride %zu: must be at least the table's %u slots", i,
                         b->prompt_stride, n);
    bool lacks = r.score != KVF__NONE && (!sums || !sums[e->row]);
    lacks = lacks || (r.squares != KVF__NONE && (!b->prompt_squares || !b->prompt_squares[e->row]));
    lacks = lacks || (r.surprise != KVF__NONE && (!b->prompt_logprobs || !b->prompt_logprobs[e->row]));
    if (prompt && lacks)
        return kvf__fail(err, KVF_E_INVALID, "event %u: policy %s needs%s%s%s of the prompt: all must be set", i,
                         s->options.ops->name,
                         r.score == KVF__NONE ? ""
                         : window             ? " prompt_last"
                                              : " prompt_sums",
                         r.squares == KVF__NONE ? "" : " prompt_squares",
                         r.surprise == KVF__NONE ? "" : " prompt_logprobs");
    kvf__event_part part = kvf__part_of(b->view, e);
    uint32_t n_heads = b->view->n_groups * b->view->heads_per_group;
    if (prompt) n = KVF__MIN(s->scored[(size_t)e->layer * n_heads + part.head_begin], n);
    return kvf__score_pages_check(b, r.n, e, n, err);
}

/* Slots, blocks and options of one event. */
static kvf_status check_event(const kvf_policy_state *state, const kvf_policy_batch *batch, uint32_t i,
                              kvf_error *err) {
    const kvf_event *e = &batch->events[i];
    const kvf_view *v = batch->view;
    if (e->row >= v->n_seqs || e->layer >= v->n_layers || e->kind > KVF_EVENT_DECODE)
        return kvf__fail(err, KVF_E_INVALID,
                         "event %u: row %u, layer %u, kind %u: the view has %u rows, %u layers, and 2 kinds", i, e->row,
                         e->layer, e->kind, v->n_seqs, v->n_layers);
    const kvf__policy_seq *s = kvf__policy_seq_get(state, v->seq_index[e->row]);
    if (!s) return kvf__fail(err, KVF_E_STALE, "event %u: seq %u is not open", i, v->seq_index[e->row]);
    if (v->next_pos[e->row] > KVF__MAX_POSITION)
        return kvf__fail(err, KVF_E_INVALID, "event %u: next_pos %u: must be at most %u", i, v->next_pos[e->row],
                         KVF__MAX_POSITION);
    if (e->n_groups && (e->group_begin >= v->n_groups || e->n_groups > v->n_groups - e->group_begin))
        return kvf__fail(err, KVF_E_INVALID, "event %u: groups [%u, %u + %u): the view has %u", i, e->group_begin,
                         e->group_begin, e->n_groups, v->n_groups);
    kvf__event_part part = kvf__part_of(v, e);
    uint32_t n = v->n_slots[part.table];
    if (e->n_keep == 0 || e->n_keep > n)
        return kvf__fail(err, KVF_E_INVALID, "event %u: n_keep %u: must be in [1, %u], the slots there are", i,
                         e->n_keep, n);
    if (e->n_keep < n && !s->sized)
        return kvf__fail(err, KVF_E_STATE, "event %u: the sizes of seq %u are not known yet", i, v->seq_index[e->row]);
    for (uint64_t t = part.table; t < part.table + part.n_heads / v->heads_per_group; t++) {
        if (v->n_slots[t] != n)
            return kvf__fail(err, KVF_E_INVALID, "event %u: group %u has %u slots, group %u %u: must be equal", i,
                             (uint32_t)(t % v->n_groups), v->n_slots[t], (uint32_t)(part.table % v->n_groups), n);
        for (uint32_t b = 0; b < kvf__ceil_div(n, v->block_size); b++)
            if (v->rows[v->row_offset[t] + b] >= batch->pages->n_blocks)
                return kvf__fail(err, KVF_E_INVALID, "event %u: block %u: the pages have %u", i,
                                 v->rows[v->row_offset[t] + b], batch->pages->n_blocks);
    }
    return check_scores(batch, s, i, n, err);
}

kvf_status kvf__kernels_choose(kvf_cpu_path path, const kvf__kernels **out, kvf_error *err) {
    *out = &kvf__policy_kernels_scalar;
    if (path == KVF_CPU_REF || path == KVF_CPU_SCALAR) return KVF_OK;
#if defined(__x86_64__)
    kvf__cpu cpu = kvf__cpu_detect();
    if ((path == KVF_CPU_AUTO || path == KVF_CPU_AVX512) && cpu.avx512) {
        *out = &kvf__policy_kernels_avx512;
        return KVF_OK;
    }
    if ((path == KVF_CPU_AUTO || path == KVF_CPU_AVX2) && cpu.avx2_fma_f16c) {
        *out = &kvf__policy_kernels_avx2;
        return KVF_OK;
    }
#endif
    if (path == KVF_CPU_AUTO) return KVF_OK;
    return kvf__fail(err, KVF_E_UNSUPPORTED, "path %d: this CPU does not have it; use KVF_CPU_AUTO", (int)path);
}

kvf_status kvf__batch_check(kvf_policy_state *state, kvf_stream *stream, const kvf_policy_batch *batch,
                            const char *what, kvf__call *call, kvf_error *err) {
    kvf_status st = kvf__view_check(state, batch, what, err);
    if (!st) st = kvf__pages_check(state, batch, what, err);
    if (st) return st;
    if (batch->n_events && !batch->events) return kvf__fail(err, KVF_E_INVALID, "%s: events is NULL", what);
    *call = (kvf__call){.state = state, .batch = batch};
    st = kvf__kernels_choose(batch->path, &call->kernels, err);
    for (uint32_t i = 0; i < batch->n_events && !st; i++) {
        st = check_event(state, batch, i, err);
        if (st) break;
        const kvf_event *e = &batch->events[i];
        uint32_t n = batch->view->n_slots[kvf__part_of(batch->view, e).table];
        call->max_slots = KVF__MAX(call->max_slots, n);
    }
    if (st || batch->n_events == 0) return st;
    uint32_t n_threads = kvf_stream_n_threads(stream);
    size_t bytes = 0;
    st = kvf_policy_workspace_bytes(n_threads, state->config.head_dim, state->config.n_kv_heads, call->max_slots,
                                    &bytes);
    if (st || !batch->workspace || batch->workspace_bytes < bytes || (uintptr_t)batch->workspace % KVF__CACHE_LINE)
        return kvf__fail(err, KVF_E_INVALID, "%s: workspace_bytes %zu: must be at least %zu, 64-byte aligned", what,
                         batch->workspace ? batch->workspace_bytes : 0, bytes);
    call->thread_bytes = bytes / n_threads;
    return KVF_OK;
}

kvf__scratch kvf__call_scratch(const kvf__call *call, uint32_t thread) {
    kvf__scratch s;
    kvf__slab slab = {(unsigned char *)call->batch->workspace + thread * call->thread_bytes, 0, false};
    kvf__scratch_carve(&slab, call->state->config.head_dim, call->max_slots, &s);
    return s;
}

kvf_status kvf__plan_check(const kvf_policy_batch *batch, const kvf_plan *plan, const char *what, kvf_error *err) {
    if (!plan || plan->n_events != batch->n_events)
        return kvf__fail(err, KVF_E_STATE, "%s: the plan has %u events, the batch %u: match this batch first", what,
                         plan ? plan->n_events : 0, batch->n_events);
    for (uint32_t i = 0; i < plan->n_events; i++) {
        const kvf_event *a = &plan->events[i].event, *b = &batch->events[i];
        uint32_t n = batch->view->n_slots[kvf__part_of(batch->view, b).table];
        if (a->row != b->row || a->layer != b->layer || a->n_keep != b->n_keep || a->kind != b->kind ||
            a->group_begin != b->group_begin || a->n_groups != b->n_groups || plan->events[i].n_before != n)
            return kvf__fail(err, KVF_E_STATE,
                             "%s: event %u is not the one the plan was made for: match this batch first", what, i);
    }
    return KVF_OK;
}

/* Heap sort: in place, no allocation, the same order everywhere. */
void kvf__sort_u64(uint64_t *a, uint32_t n) {
    for (uint32_t i = n / 2, end = n; end > 1;) {
        uint64_t x;
        if (i > 0) {
            x = a[--i];
        } else {
            x = a[--end];
            a[end] = a[0];
        }
        uint32_t hole = i;
        for (uint32_t child; (child = 2 * hole + 1) < end; hole = child) {
            if (child + 1 < end && a[child + 1] > a[child]) child++;
            if (a[child] <= x) break;
            a[hole] = a[child];
        }
        a[hole] = x;
    }
}
