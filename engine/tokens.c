/* The tokens of a request: its arrays, which grow, and asking the caller for them. */
#include "engine/internal.h"

void kvf__live_free_arrays(kvf_engine *e, kvf__live *r) {
    const kvf_allocator *a = &e->allocator;
    size_t n_top = (size_t)r->room * r->n_top;
    kvf__free(a, r->tokens, ((size_t)r->n_prompt + r->room) * sizeof *r->tokens);
    kvf__free(a, r->logprobs, r->room * sizeof *r->logprobs);
    kvf__free(a, r->top_tokens, n_top * sizeof *r->top_tokens);
    kvf__free(a, r->top_logprobs, n_top * sizeof *r->top_logprobs);
    r->tokens = r->top_tokens = NULL;
    r->logprobs = r->top_logprobs = NULL;
}

bool kvf__live_take_arrays(kvf_engine *e, kvf__live *r, uint32_t room) {
    const kvf_allocator *a = &e->allocator;
    size_t n_top = (size_t)room * r->n_top;
    r->room = room;
    r->tokens = kvf__alloc(a, ((size_t)r->n_prompt + room) * sizeof *r->tokens);
    r->logprobs = kvf__alloc(a, room * sizeof *r->logprobs);
    r->top_tokens = r->n_top ? kvf__alloc(a, n_top * sizeof *r->top_tokens) : NULL;
    r->top_logprobs = r->n_top ? kvf__alloc(a, n_top * sizeof *r->top_logprobs) : NULL;
    if (r->tokens && r->logprobs && (!r->n_top || (r->top_tokens && r->top_logprobs))) return true;
    kvf__live_free_arrays(e, r);
    return false;
}

/* Arrays grow by doubling: a request's memory follows the tokens it has generated, not max_tokens. */
bool kvf__live_make_room(kvf_engine *e, kvf__live *r, uint32_t n) {
    enum { LEAST = 16 };
    if (n <= r->room) return true;
    kvf__live was = *r;
    uint64_t room = KVF__MAX(KVF__MAX((uint64_t)n, 2 * (uint64_t)r->room), LEAST);
    if (!kvf__live_take_arrays(e, r, (uint32_t)KVF__MIN(room, KVF__MAX(n, r->max_tokens)))) {
        *r = was;
        return false;
    }
    memcpy(r->tokens, was.tokens, ((size_t)r->n_prompt + was.room) * sizeof *r->tokens);
    if (was.room) memcpy(r->logprobs, was.logprobs, was.room * sizeof *r->logprobs);
    size_t n_top = (size_t)was.room * r->n_top;
    if (n_top) memcpy(r->top_tokens, was.top_tokens, n_top * sizeof *r->top_tokens);
    if (n_top) memcpy(r->top_logprobs, was.top_logprobs, n_top * sizeof *r->top_logprobs);
    kvf_status st = kvf__engine_set_prefix(e, r); /* the tokens have moved; NOT_FOUND: the scheduler does not have it */
    (void)st;
    kvf__live_free_arrays(e, &was);
    return true;
}

kvf_status kvf__engine_check_ids(const kvf_engine *e, const uint32_t *ids, uint32_t n, const char *what,
                                 kvf_error *err) {
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] >= e->shape.n_vocab)
            return kvf__fail(err, KVF_E_INVALID, "%s %u at index %u: the vocabulary has %u tokens, ids are 0 to %u",
                             what, ids[i], i, e->shape.n_vocab, e->shape.n_vocab - 1);
    return KVF_OK;
}

/* ---- Requests that give their tokens when they may run -------------------------------------------------- */

kvf_status kvf__live_ask(kvf_engine *e, kvf__live *r, kvf_error *err) {
    uint32_t room = r->forced ? r->max_tokens : 0, n = r->n_prompt + room;
    if (r->tokens) return KVF_OK;
    if (!kvf__live_take_arrays(e, r, room))
        return kvf__fail(err, KVF_E_NO_MEMORY, "request: %u tokens could not be allocated", n);
    kvf_status st = r->give_tokens(r->user, r->tokens, n);
    if (st)
        kvf__fail(err, st, "give_tokens: %s", kvf_status_text(st));
    else if (!(st = kvf__engine_check_ids(e, r->tokens, n, "token id", err)) && (st = kvf__engine_set_prefix(e, r)))
        kvf__fail_as(err, st, kvf_sched_error(e->sched));
    if (st) kvf__live_free_arrays(e, r);
    return st;
}
