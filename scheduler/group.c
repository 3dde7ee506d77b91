/* Samples of one prompt, and forks: their reservations, splitting a group, and which sample becomes leader. */
#include "scheduler/sched.h"

/* ---- Held samples -------------------------------------------------------------------------------- */

/* They are in the order of their names: a new one becomes the last. */
void kvf__group_hold(kvf_sched *s, kvf__req *leader, kvf__req *r) {
    uint32_t *end = &leader->held;
    while (*end != KVF__SLOT_NONE) end = &s->slots[*end].next;
    *end = kvf__sched_slot(s, r);
    kvf__sched_move(s, r, KVF__MOVE_HOLD);
    r->arrival = leader->arrival;
    r->rank = leader->rank;
    r->leader = kvf__sched_slot(s, leader);
    leader->n_held++;
}

/* Frees the empty sequence that carries a held sample's reservation, and its place in max_running. */
static void drop_reservation(kvf_sched *s, kvf__req *held) {
    if (!held->seq) return;
    kvf_status status = kvf_seq_free(s->config.manager, held->seq);
    (void)status; /* stale only if the caller freed it, which leaves nothing to free */
    held->seq = 0;
    s->n_reserved--;
}

void kvf__group_leave(kvf_sched *s, kvf__req *held) {
    kvf__req *leader = &s->slots[held->leader];
    uint32_t *link = &leader->held, slot = kvf__sched_slot(s, held);
    while (*link != slot) link = &s->slots[*link].next;
    *link = held->next;
    held->next = held->leader = KVF__SLOT_NONE;
    held->rank = leader->rank; /* it may have got another one since */
    leader->n_held--;
    drop_reservation(s, held);
}

static kvf__req *unhold(kvf_sched *s, kvf__req *leader) {
    kvf__req *held = kvf__sched_at(s, leader->held);
    if (held) kvf__group_leave(s, held);
    return held;
}

void kvf__group_dissolve(kvf_sched *s, kvf__req *leader) {
    for (kvf__req *r; (r = unhold(s, leader));) {
        if (r->bound == KVF__TIGHTENED) r->bound = KVF__BOUNDED;
        r->match.again = 1; /* the leader's look-up was the prompt's first */
        kvf__sched_move(s, r, KVF__MOVE_QUEUE);
        kvf__parting_enter(s, r);
    }
}

/* ---- Their reservations -------------------------------------------------------------------------- */

/* With options of their own all samples share the uncompressed prompt, and then each moves to blocks of its own. */
uint64_t kvf__group_own_options_blocks(const kvf_sched *s, const kvf__req *leader) {
    return kvf__sched_prompt_blocks(s, leader) + leader->child_blocks;
}

bool kvf__group_takes(const kvf_sched *s, const kvf__req *leader, const kvf__req *r, uint64_t *needed) {
    uint64_t more = kvf__sched_prompt_blocks(s, r), now = kvf__sched_prompt_blocks(s, leader);
    uint64_t with = *needed + r->child_blocks + (more > now ? more - now : 0);
    if (leader->n_held + 2 > s->config.max_running || with > KVF__MIN(s->n_blocks, s->n_score_pages)) return false;
    *needed = with;
    return true;
}

/* Blocks to count for the leader. The samples share its tables. When they evict, each moves to blocks of its own, and the shared
 * ones become free with the last of them. So one table more is counted; for requests that are forked again and again, one for
 * every two of them. */
static uint64_t leader_blocks(const kvf_sched *s, const kvf__req *r, uint32_t n) {
    uint64_t own = kvf__sched_admission_blocks(s, r);
    if (r->samples == KVF__OWN_OPTIONS && n > 1) return kvf__group_own_options_blocks(s, r);
    uint32_t n_bases = n < 2 || r->bound != KVF__BOUNDED ? 0 : r->samples == KVF__FORKS ? n / 2 : 1;
    return KVF__MAX(own, (uint64_t)r->child_blocks * (n_bases ? 1 + n_bases : 0));
}

uint32_t kvf__group_fit(const kvf_sched *s, const kvf__req *r, uint32_t n, uint64_t *needed) {
    uint32_t there_are = r->needs.scores ? KVF__MIN(s->n_blocks, s->n_score_pages) : s->n_blocks, most = 1;
    kvf__req alone = *r;
    alone.n_prefill = r->n_prompt;
    for (uint32_t m = 2; m <= n; m++) {
        *needed = leader_blocks(s, &alone, m) + (uint64_t)(m - 1) * r->child_blocks;
        if (*needed <= there_are && m <= s->config.max_running) most = m;
    }
    return most;
}

kvf_status kvf__group_check(kvf_sched *s, const kvf__req *r, uint32_t n) {
    uint64_t needed = 0;
    uint32_t most = kvf__group_fit(s, r, n, &needed);
    if (most >= n) return KVF_OK;
    return kvf__fail_size(&s->error, KVF_E_NEVER_FITS, "n_blocks", s->n_blocks, needed,
                          "%u samples of a prompt of %u tokens need %llu blocks together, the pool has %u; ask for at "
                          "most %u, or",
                          n, r->n_prompt, (unsigned long long)needed, s->n_blocks, most);
}

kvf_status kvf__group_reserve(kvf_sched *s, kvf__req *leader) {
    kvf_status status = KVF_OK;
    for (kvf__req *r = kvf__sched_at(s, leader->held); r && status == KVF_OK; r = kvf__sched_at(s, r->next)) {
        status = kvf_seq_create(s->config.manager, &r->seq);
        if (status != KVF_OK) break;
        s->n_reserved++;
        status = kvf__sched_reserve_blocks(s, r, r->seq, r->child_blocks);
    }
    if (status == KVF_OK) /* last, since it is counted once */
        status = kvf__sched_take_admission(s, leader, leader_blocks(s, leader, 1 + leader->n_held));
    return status; /* the caller gives back what was taken */
}

void kvf__group_unreserve(kvf_sched *s, kvf__req *leader) {
    for (kvf__req *r = kvf__sched_at(s, leader->held); r; r = kvf__sched_at(s, r->next)) drop_reservation(s, r);
}

/* Without room for a lower budget the earlier reservations stay; the fork is then all or none, as usual. */
kvf_status kvf__group_reserve_change(kvf_sched *s, const kvf__req *leader, const kvf__req *to, bool all) {
    kvf_status status = KVF_OK;
    for (kvf__req *r = kvf__sched_at(s, leader->held); r && status == KVF_OK; r = kvf__sched_at(s, r->next)) {
        if (r->seq) status = kvf__sched_reserve_blocks(s, to, r->seq, to->child_blocks);
        if (status == KVF_E_NO_BLOCKS && !all) status = KVF_OK;
    }
    return status;
}

void kvf__group_reserve_back(kvf_sched *s, const kvf__req *leader) {
    for (kvf__req *r = kvf__sched_at(s, leader->held); r; r = kvf__sched_at(s, r->next)) {
        if (!r->seq) continue;
        kvf_status status = kvf__sched_reserve_blocks(s, leader, r->seq, leader->child_blocks);
        (void)status; /* no more than it had a moment ago */
    }
}

void kvf__group_take_budget(kvf__req *r, const kvf__req *to) {
    r->options = to->options;
    r->budget = to->budget;
    r->bound = to->bound;
    r->n_blocks = to->n_blocks;
    r->n_peak = to->n_peak;
    r->n_steady = to->n_steady;
    r->child_blocks = to->child_blocks;
    r->evicts = to->evicts;
    r->needs = to->needs;
}

/* ---- Forks --------------------------------------------------------------------------------------- */

/* The list that forks write their copies to. If the caller has taken the present copies, it starts empty. */
static kvf_copy_list *copies(kvf_sched *s) {
    if (s->copies_given) s->copies.n = 0;
    s->copies_given = false;
    return &s->copies;
}

/* A sequence and a policy state for the child; it is in no list yet. */
static kvf_status fork_state(kvf_sched *s, const kvf__req *parent, kvf__req *child) {
    kvf_manager *manager = s->config.manager;
    kvf_status status = kvf_seq_fork(manager, parent->seq, copies(s), &child->seq);
    if (status != KVF_OK) return status;
    status = kvf_seq_index(manager, child->seq, &child->seq_index);
    if (status == KVF_OK) status = kvf_policy_fork(s->config.policies, parent->seq_index, child->seq_index);
    if (status == KVF_OK) return KVF_OK;
    kvf_status freed = kvf_seq_free(manager, child->seq);
    child->seq = 0;
    return freed == KVF_OK ? status : freed;
}

static void unfork_state(kvf_sched *s, kvf__req *child) {
    if (!child->seq) return;
    kvf_policy_close(s->config.policies, child->seq_index);
    kvf_status status = kvf_seq_free(s->config.manager, child->seq);
    (void)status; /* it was made in this call */
    child->seq = 0;
}

/* The copies from the first one on are for nobody: they need not run, and pin nothing any more. */
static void drop_copies(kvf_sched *s, uint32_t first) {
    kvf_copy_list rest = {s->copies.items + first, s->copies.n - first, s->copies.n - first};
    kvf_status status = kvf_copies_done(s->config.manager, &rest);
    (void)status; /* they were made in this call */
    s->copies.n = first;
}

static void run_fork(kvf_sched *s, kvf__req *parent, kvf__req *child) {
    child->n_computed = parent->n_computed;
    child->n_prefill = parent->n_prefill;
    child->bound = parent->bound;
    child->reserved = parent->reserved = KVF__AS_SHARED;
    kvf__sched_move(s, child, KVF__MOVE_DECODE);
}

/* What the parent held by itself is shared now, so that its reservation is owed in full again. Without room it is owed
 * until the next plan; an event may then find too few blocks, which kvf_sched_shed is for. */
static void reserve_again(kvf_sched *s, kvf__req *parent) {
    bool known = kvf_policy_sizes(s->config.policies, parent->seq_index) != NULL;
    kvf_status status = !known && parent->bound == KVF__BOUNDED
                            ? kvf__sched_reserve_blocks(s, parent, parent->seq, parent->child_blocks)
                            : kvf__sched_reserve_sized(s, parent);
    (void)status;
}

/* The sequences that carry the reservations are freed first: the forks take their blocks. */
kvf_status kvf__group_fork(kvf_sched *s, kvf__req *leader) {
    kvf__group_unreserve(s, leader);
    bool known = kvf_policy_sizes(s->config.policies, leader->seq_index) != NULL;
    uint32_t first_copy = copies(s)->n;
    kvf_status status = KVF_OK;
    if (!known && leader->bound == KVF__BOUNDED) /* a child's reservation, without what admission counted in addition */
        status = kvf__sched_reserve_blocks(s, leader, leader->seq, leader->child_blocks);
    for (kvf__req *r = kvf__sched_at(s, leader->held); r && status == KVF_OK; r = kvf__sched_at(s, r->next))
        status = fork_state(s, leader, r);
    for (kvf__req *r = kvf__sched_at(s, leader->held); r && status != KVF_OK; r = kvf__sched_at(s, r->next))
        unfork_state(s, r);
    if (status != KVF_OK) drop_copies(s, first_copy);
    if (status != KVF_OK) return status;
    while (leader->n_held) {
        kvf__req *r = kvf__sched_at(s, leader->held);
        kvf_seq seq = r->seq;
        r->seq = 0; /* no reservation to drop */
        kvf__group_leave(s, r);
        r->seq = seq;
        run_fork(s, leader, r);
    }
    reserve_again(s, leader);
    return KVF_OK;
}

/* Forks a child that shares the prompt: no event yet, no score page, a policy state with its own options. */
static kvf_status fork_sample(kvf_sched *s, const kvf__req *leader, kvf__req *r) {
    kvf_manager *manager = s->config.manager;
    kvf_status status = kvf_seq_fork(manager, leader->seq, copies(s), &r->seq);
    if (status != KVF_OK) return status;
    status = kvf_seq_index(manager, r->seq, &r->seq_index);
    if (status == KVF_OK) status = kvf_policy_open(s->config.policies, r->seq_index, &r->options, &s->error);
    if (status == KVF_OK) status = kvf__sched_reserve_blocks(s, r, r->seq, r->child_blocks);
    if (status != KVF_OK) unfork_state(s, r);
    return status;
}

/* Held samples become requests whose prompt has ended, like their leader. */
static void release_samples(kvf_sched *s, kvf__req *leader) {
    while (leader->n_held) {
        kvf__req *r = kvf__sched_at(s, leader->held);
        kvf_seq seq = r->seq;
        r->seq = 0; /* no reservation to drop */
        kvf__group_leave(s, r);
        r->seq = seq;
        r->n_computed = leader->n_computed;
        r->n_prefill = leader->n_prefill;
        r->reserved = KVF__AS_SHARED;
        kvf__sched_move(s, r, KVF__MOVE_PROMPT_END);
    }
    leader->reserved = KVF__AS_SHARED;
}

/* The reservations of admission are dropped while the forks are made; then each gets its own. */
kvf_status kvf__group_fork_prompt(kvf_sched *s, kvf__req *leader) {
    kvf__group_unreserve(s, leader);
    uint32_t first_copy = copies(s)->n;
    kvf_status status = kvf__sched_reserve_blocks(s, leader, leader->seq, 0);
    for (kvf__req *r = kvf__sched_at(s, leader->held); r && status == KVF_OK; r = kvf__sched_at(s, r->next))
        status = fork_sample(s, leader, r);
    if (status == KVF_OK) status = kvf__sched_reserve_blocks(s, leader, leader->seq, leader->child_blocks);
    if (status == KVF_OK) {
        release_samples(s, leader);
        return KVF_OK;
    }
    for (kvf__req *r = kvf__sched_at(s, leader->held); r; r = kvf__sched_at(s, r->next)) unfork_state(s, r);
    drop_copies(s, first_copy);
    kvf_status back = kvf__sched_reserve_blocks(s, leader, leader->seq, kvf__sched_admission_blocks(s, leader));
    (void)back; /* as far as there is room: it goes on alone, or back to the queue */
    return status;
}

/* The new leader's options: its own stay; in a group with common options it takes the old leader's, which may have changed. */
static void take_options(kvf_sched *s, const kvf__req *leader, kvf__req *r) {
    bool own = r->samples == KVF__OWN_OPTIONS;
    if (own && r->seq) {
        kvf_status status = kvf_policy_open(s->config.policies, r->seq_index, &r->options, &s->error);
        (void)status; /* they were checked at the submission, for the same sizes */
    }
    if (own) return;
    r->n_blocks = leader->n_blocks;
    r->n_peak = leader->n_peak;
    r->bound = leader->bound;
}

/* The first held one takes the leader's place, with all that it has: the prompt is computed once. */
bool kvf__group_promote(kvf_sched *s, kvf__req *leader) {
    kvf__req *r = unhold(s, leader);
    if (!r) return false;
    r->n_computed = leader->n_computed;
    r->n_prefill = leader->n_prefill;
    r->repetition = leader->repetition;
    r->n_repeated = leader->n_repeated;
    r->n_piece = leader->n_piece;
    r->extent_begin = leader->extent_begin;
    r->reserved = leader->reserved;
    r->seq = leader->seq;
    r->seq_index = leader->seq_index;
    r->match = leader->match;
    take_options(s, leader, r);
    r->held = leader->held;
    r->n_held = leader->n_held;
    for (kvf__req *h = kvf__sched_at(s, r->held); h; h = kvf__sched_at(s, h->next)) h->leader = kvf__sched_slot(s, r);
    kvf__sched_move(s, r,
                    leader->state == KVF__REQ_WAITING   ? KVF__MOVE_QUEUE
                    : leader->state == KVF__REQ_PREFILL ? KVF__MOVE_PREFILL
                                                        : KVF__MOVE_PROMPT_END);
    kvf__parting_enter(s, r);
    for (uint32_t i = 0; i < s->n_items; i++) {
        if (s->items[i].request != leader->name) continue;
        s->items[i].request = r->name;
        s->items[i].user = r->user;
        if (s->items[i].match) s->items[i].match = &r->match;
        if (s->items[i].n_held) s->items[i].n_held--;
    }
    kvf__parting_leave(s, leader);
    kvf__sched_give_slot(s, leader);
    return true;
}

/* ---- The calls ----------------------------------------------------------------------------------- */

static kvf_status check_parent(kvf_sched *s, const kvf__req *r, kvf_request name) {
    const char *why = NULL;
    if (s->planned && s->n_items)
        why = "a step is planned: fork between kvf_sched_done and the next plan";
    else if (r->samples != KVF__FORKS)
        why = "it was not submitted with `forks`: nothing is counted for its forks";
    else if (r->state != KVF__REQ_DECODE || r->n_computed != r->n_known)
        why = "has known tokens that are not computed: fork it when it could be told a token";
    else if (kvf__req_is_complete(s, r))
        why = "has its last token";
    if (why) return kvf__fail(&s->error, KVF_E_STATE, "request %llu: %s", (unsigned long long)name, why);
    if (s->n_slots_used - s->n_in[KVF__REQ_FREE] == s->n_slots)
        return kvf__fail_field(&s->error, KVF_E_LIMIT, "max_waiting", s->config.max_waiting, 0,
                               "there is no place for one more request");
    return KVF_OK;
}

kvf_status kvf_sched_fork(kvf_sched *sched, kvf_request parent, void *user, kvf_request *out) {
    if (!sched) return KVF_E_INVALID;
    if (!out) return kvf__fail(&sched->error, KVF_E_INVALID, "out: is NULL");
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, parent, &r);
    if (status == KVF_OK) status = check_parent(sched, r, parent);
    if (status != KVF_OK) return status;
    kvf__req candidate = *r;
    candidate.user = user;
    candidate.seq = 0;
    candidate.match.again = 1; /* what it shares was looked up and computed by the parent */
    kvf__req *child = kvf__sched_take_slot(sched, &candidate);
    bool room = sched->running.n + sched->n_reserved < sched->config.max_running;
    if (room && fork_state(sched, r, child) == KVF_OK) {
        run_fork(sched, r, child);
        reserve_again(sched, r);
    } else {
        child->n_computed = 0;
        if (child->bound == KVF__TIGHTENED) child->bound = KVF__BOUNDED;
        kvf__sched_move(sched, child, KVF__MOVE_FORK);
        kvf__parting_enter(sched, child);
    }
    *out = child->name;
    return KVF_OK;
}

kvf_copy_list *kvf_sched_copies(kvf_sched *sched) { return sched ? copies(sched) : NULL; }

kvf_seq kvf_sched_seq(const kvf_sched *sched, kvf_request request) {
    if (!sched) return 0;
    const kvf__req *r = kvf__sched_find((kvf_sched *)sched, request);
    return r && r->state != KVF__REQ_HELD && r->state != KVF__REQ_SWAPPED ? r->seq : 0;
}
