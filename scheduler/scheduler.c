/* Creating a scheduler, and the calls about one request. */
#include "scheduler/sched.h"

/* ---- Create -------------------------------------------------------------------------------------- */

#define MAX_WAITING_LIMIT (UINT32_C(1) << 24) /* leaves a name at least 39 bits of serial number */

void kvf_sched_config_init(kvf_sched_config *config, size_t struct_size) {
    kvf__init(config, struct_size, &(kvf_sched_config){0}, sizeof *config);
}

static kvf_status config_defaults(kvf_sched_config *c, const kvf_manager_config *m, kvf_error *err) {
    if (c->max_running == 0) c->max_running = m->max_seqs;
    if (c->max_waiting == 0) c->max_waiting = 65536;
    if (c->chunk == 0) c->chunk = 512;
    if (c->max_prefill_tokens == 0) c->max_prefill_tokens = m->max_slots;
    if (c->max_context == 0) c->max_context = m->max_slots;
    if (c->max_running > m->max_seqs)
        return kvf__fail_field(err, KVF_E_INVALID, "max_running", c->max_running, 0,
                               "must be at most the manager's max_seqs %u", m->max_seqs);
    if (c->max_waiting > MAX_WAITING_LIMIT)
        return kvf__fail_field(err, KVF_E_INVALID, "max_waiting", c->max_waiting, 0, "must be at most %u",
                               MAX_WAITING_LIMIT);
    if (c->chunk % m->block_size)
        return kvf__fail_field(err, KVF_E_INVALID, "chunk", c->chunk, 0, "must be a multiple of the block size %u",
                               m->block_size);
    if (c->preempt > KVF_PREEMPT_SWAP)
        return kvf__fail_field(err, KVF_E_INVALID, "preempt", c->preempt, 0, "must be a kvf_preempt, at most %d",
                               KVF_PREEMPT_SWAP);
    if (c->order > KVF_ORDER_PREFIX)
        return kvf__fail_field(err, KVF_E_INVALID, "order", c->order, 0, "must be a kvf_order, at most %d",
                               KVF_ORDER_PREFIX);
    bool timed = c->order == KVF_ORDER_DEADLINE;
    uint64_t most = timed ? UINT64_C(1) << 62 : MAX_WAITING_LIMIT;
    if (c->patience > most)
        return kvf__fail_field(err, KVF_E_INVALID, "patience", c->patience, most, "must be at most %llu %s",
                               (unsigned long long)most, timed ? "units of time" : "places");
    if (!c->patience) c->patience = timed ? UINT64_C(60000000000) : 256;
    if (c->max_context < 2 || c->max_context > m->max_slots)
        return kvf__fail_field(err, KVF_E_INVALID, "max_context", c->max_context, 0,
                               "must be in [2, %u], the manager's max_slots", m->max_slots);
    if (c->n_instruction > KVF_MAX_INSTRUCTION_TOKENS)
        return kvf__fail_field(err, KVF_E_INVALID, "n_instruction", c->n_instruction, 0, "must be at most %u",
                               KVF_MAX_INSTRUCTION_TOKENS);
    uint64_t least = (uint64_t)c->chunk + c->max_running;
    if (least > UINT32_MAX)
        return kvf__fail(err, KVF_E_OVERFLOW, "chunk %u with max_running %u: their sum must be below 2^32", c->chunk,
                         c->max_running);
    if (c->max_batch_tokens == 0) c->max_batch_tokens = (uint32_t)least;
    if (c->max_batch_tokens < least)
        return kvf__fail_field(err, KVF_E_INVALID, "max_batch_tokens", c->max_batch_tokens, 0,
                               "must be at least %llu, chunk %u and one token for each of max_running %u",
                               (unsigned long long)least, c->chunk, c->max_running);
    return KVF_OK;
}

static void lay_out(kvf_sched *s, kvf__slab *slab) {
    size_t n_copies = 0;
    /* A block a table in a step, and as many pages as there are: each copy takes a page that is pinned until it is done. */
    if (!kvf__mul(s->config.max_running, s->n_tables, &n_copies)) slab->bad = true;
    n_copies += s->n_score_pages;
    if (s->tiers) /* one goes out, and what comes in takes blocks that are pinned until it is there */
        n_copies += 2 * ((size_t)s->n_blocks + s->n_score_pages);
    if (n_copies > UINT32_MAX) slab->bad = true;
    kvf__slab_take(slab, 1, sizeof *s);
    s->want = kvf__slab_take(slab, s->n_tables, sizeof *s->want);
    s->sizes = kvf__slab_take(slab, s->n_layers, sizeof *s->sizes);
    s->extents = kvf__slab_take(slab, (size_t)s->config.max_running + 1, sizeof *s->extents);
    s->items = kvf__slab_take(slab, (size_t)s->config.max_running + 1, sizeof *s->items);
    s->appends = kvf__slab_take(slab, s->config.max_running, sizeof *s->appends);
    s->preempted = kvf__slab_take(slab, 3 * (size_t)s->config.max_running, sizeof *s->preempted);
    s->ends = kvf__slab_take(slab, (size_t)s->n_slots + s->config.max_running, sizeof *s->ends);
    s->copies.items = kvf__slab_take(slab, n_copies, sizeof *s->copies.items);
    s->copies.capacity = (uint32_t)n_copies;
    s->slots = kvf__slab_take(slab, s->n_slots, sizeof *s->slots);
    s->parting = kvf__slab_take(slab, s->n_slots, sizeof *s->parting);
}

kvf_status kvf_sched_create(const kvf_sched_config *config, kvf_sched **out, kvf_error *err) {
    kvf_sched s = {0};
    if (!out) return kvf__fail(err, KVF_E_INVALID, "out: is NULL");
    kvf_status status = kvf__config_read(&s.config, sizeof s.config, config, "kvf_sched_config", err);
    if (status != KVF_OK) return status;
    if (!s.config.manager || !s.config.policies)
        return kvf__fail(err, KVF_E_INVALID, "%s: is NULL: a scheduler works on a manager and a policy state",
                         s.config.manager ? "policies" : "manager");
    const kvf_manager_config *m = kvf_manager_get_config(s.config.manager);
    status = config_defaults(&s.config, m, err);
    if (status == KVF_OK) status = kvf__allocator_resolve(&s.config.allocator, &s.config.allocator, err);
    if (status != KVF_OK) return status;
    s.n_layers = m->n_layers;
    s.n_groups = m->n_kv_heads / m->heads_per_group;
    s.n_tables = s.n_layers * s.n_groups;
    s.block_size = m->block_size;
    s.n_blocks = m->n_blocks;
    s.n_score_pages = m->n_score_pages;
    s.max_slots = m->max_slots;
    s.tiers = m->n_host_blocks != 0;
    s.swaps = s.tiers && s.config.preempt != KVF_PREEMPT_RECOMPUTE;
    s.windows = m->layer_windows;
    s.n_slots = s.config.max_waiting + s.config.max_running;
    while (UINT64_C(1) << s.slot_bits < s.n_slots) s.slot_bits++;
    s.free_slot = KVF__SLOT_NONE;
    s.queue = s.running = (kvf__list){KVF__SLOT_NONE, KVF__SLOT_NONE, 0};

    kvf__slab slab = {0};
    lay_out(&s, &slab);
    if (slab.bad)
        return kvf__fail(err, KVF_E_OVERFLOW,
                         "max_running %u, max_waiting %u, %u tables: the scheduler's size is out of range",
                         s.config.max_running, s.config.max_waiting, s.n_tables);
    s.bytes = slab.used;
    /* Not cleared: most of it is room for waiting requests, which costs no memory before it is used. */
    unsigned char *base = s.config.allocator.alloc(s.config.allocator.ctx, s.bytes, KVF__CACHE_LINE);
    if (!base)
        return kvf__fail(err, KVF_E_NO_MEMORY, "scheduler: no memory for %zu bytes: lower max_waiting %u", s.bytes,
                         s.config.max_waiting);
    slab = (kvf__slab){.base = base};
    lay_out(&s, &slab);
    memcpy(base, &s, sizeof s);
    *out = (kvf_sched *)(void *)base;
    return KVF_OK;
}

void kvf_sched_destroy(kvf_sched *sched) {
    if (!sched) return;
    /* What is held takes over, one after the other. */
    while (sched->running.n) kvf__sched_drop(sched, kvf__sched_at(sched, sched->running.head));
    while (kvf__sched_swap_forget_last(sched)) continue;
    kvf_allocator allocator = sched->config.allocator;
    kvf__free(&allocator, sched, sched->bytes);
}

const kvf_error *kvf_sched_error(const kvf_sched *sched) { return sched ? &sched->error : &kvf__no_error; }

void kvf_sched_counts(const kvf_sched *sched, uint32_t *n_running, uint32_t *n_waiting) {
    if (n_running) *n_running = sched ? sched->running.n - sched->n_in[KVF__REQ_PAUSED] : 0;
    if (n_waiting) *n_waiting = sched ? sched->queue.n + sched->n_in[KVF__REQ_HELD] : 0;
}

uint32_t kvf_sched_ahead(const kvf_sched *sched, void **users, uint32_t capacity) {
    uint32_t n = 0;
    for (uint32_t i = sched && users ? sched->queue.head : KVF__SLOT_NONE; i != KVF__SLOT_NONE && n < capacity;
         i = sched->slots[i].next)
        users[n++] = sched->slots[i].user;
    return n;
}

/* ---- Requests ------------------------------------------------------------------------------------ */

static kvf_status check_request(kvf_sched *s, const kvf_sched_request *given) {
    if (given->sample_options && given->forks)
        return kvf__fail(&s->error, KVF_E_INVALID, "sample_options: what is forked again and again has one policy");
    if (given->priority < -1000 || given->priority > 1000)
        return kvf__fail_real(&s->error, KVF_E_INVALID, "priority", given->priority, "must be in [-1000, 1000]");
    if (given->n_prompt == 0)
        return kvf__fail_field(&s->error, KVF_E_INVALID, "n_prompt", 0, 0, "a prompt has at least 1 token");
    if (given->n_prompt >= s->config.max_context)
        return kvf__fail_field(&s->error, KVF_E_NEVER_FITS, "n_prompt", given->n_prompt, 0,
                               "the context has %u positions, one of them for an answer: at most %u",
                               s->config.max_context, s->config.max_context - 1);
    if (given->forks && given->n_samples > s->config.max_running)
        return kvf__fail_field(&s->error, KVF_E_INVALID, "n_samples", given->n_samples, 0,
                               "must be at most max_running %u, with forks", s->config.max_running);
    uint32_t n_waiting = s->queue.n + s->n_in[KVF__REQ_HELD] - s->n_reserved + s->n_in[KVF__REQ_PAUSED_PREEMPTED];
    if (n_waiting >= s->config.max_waiting)
        return kvf__fail_field(&s->error, KVF_E_LIMIT, "max_waiting", s->config.max_waiting, 0,
                               "so many requests wait or are paused without blocks: run steps, or finish some");
    if (given->n_samples > s->config.max_waiting - n_waiting)
        return kvf__fail_field(&s->error, KVF_E_LIMIT, "n_samples", given->n_samples, 0,
                               "max_waiting is %u and %u wait: run steps, or ask for fewer", s->config.max_waiting,
                               n_waiting);
    return KVF_OK;
}

/* Its rank: a deadline, or by how many places it is moved from the place that it gets with its name. */
static int64_t rank_of(const kvf_sched *s, const kvf_sched_request *given) {
    const kvf_sched_config *c = &s->config;
    if (c->order == KVF_ORDER_PRIORITY) return -given->priority * (int64_t)c->patience;
    if (c->order == KVF_ORDER_SHORTEST) return (int64_t)(given->n_prompt * c->patience / c->chunk);
    if (c->order != KVF_ORDER_DEADLINE) return 0;
    return given->deadline ? (int64_t)KVF__MIN(KVF__MAX(given->deadline, s->now), INT64_MAX - 1) : INT64_MAX;
}

/* The options of a sample, and what follows from them. */
static kvf_status size_sample(kvf_sched *s, const kvf_policy_options *options, kvf__req *candidate) {
    if (!options)
        return kvf__fail(&s->error, KVF_E_INVALID, "options: is NULL: fill them with kvf_policy_options_init");
    kvf_status status = kvf_policy_options_read(&candidate->options, sizeof candidate->options, options, &s->error);
    return status == KVF_OK ? kvf__sched_size_request(s, candidate) : status;
}

/* Samples with options of their own. All are sized before the first gets a slot: if one is impossible, all are refused. One group
 * has as many of them as the pool can hold together. */
static kvf_status submit_own_options(kvf_sched *s, const kvf_sched_request *given, const kvf__req *base,
                                     kvf_request *out) {
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < given->n_samples && status == KVF_OK; i++) {
        kvf__req candidate = *base;
        status = size_sample(s, given->sample_options[i], &candidate);
    }
    kvf__req *leader = NULL;
    uint64_t needed = 0;
    for (uint32_t i = 0; i < given->n_samples && status == KVF_OK; i++) {
        kvf__req candidate = *base;
        candidate.samples = given->n_samples > 1 ? KVF__OWN_OPTIONS : KVF__ALIKE;
        candidate.user = given->sample_users ? given->sample_users[i] : given->user;
        status = size_sample(s, given->sample_options[i], &candidate);
        kvf__req *r = kvf__sched_take_slot(s, &candidate);
        if (leader && kvf__group_takes(s, leader, r, &needed)) {
            kvf__group_hold(s, leader, r);
        } else {
            kvf__sched_move(s, r, KVF__MOVE_QUEUE);
            leader = r;
            needed = kvf__group_own_options_blocks(s, r);
        }
        if (given->sample_names) given->sample_names[i] = r->name;
        if (i == 0) *out = r->name;
    }
    return status;
}

/* Makes as many groups as needed: one has at most as many samples as the pool can hold together. */
static kvf_status submit_groups(kvf_sched *s, const kvf_sched_request *given, kvf__req *candidate, kvf_request *out) {
    uint64_t needed = 0;
    kvf_status status = given->forks ? kvf__group_check(s, candidate, given->n_samples) : KVF_OK;
    if (status != KVF_OK) return status;
    uint32_t most = kvf__group_fit(s, candidate, given->n_samples, &needed);
    kvf__req *leader = NULL;
    for (uint32_t i = 0; i < given->n_samples; i++) {
        candidate->user = given->sample_users ? given->sample_users[i] : given->user;
        kvf__req *r = kvf__sched_take_slot(s, candidate);
        if (i % most) {
            kvf__group_hold(s, leader, r);
        } else {
            kvf__sched_move(s, r, KVF__MOVE_QUEUE);
            leader = r;
        }
        if (given->sample_names) given->sample_names[i] = r->name;
        if (i == 0) *out = r->name;
    }
    return KVF_OK;
}

kvf_status kvf_sched_submit(kvf_sched *sched, const kvf_sched_request *request, kvf_request *out) {
    kvf_sched_request given;
    if (!sched) return KVF_E_INVALID;
    if (!out) return kvf__fail(&sched->error, KVF_E_INVALID, "out: is NULL");
    kvf_status status = kvf__config_read(&given, sizeof given, request, "kvf_sched_request", &sched->error);
    if (given.n_samples == 0) given.n_samples = 1;
    if (status == KVF_OK) status = check_request(sched, &given);
    if (status != KVF_OK) return status;
    kvf__req candidate = {.n_prompt = given.n_prompt,
                          .max_new = given.max_new,
                          .n_known = given.n_prompt,
                          .rank = rank_of(sched, &given),
                          .samples = given.forks ? KVF__FORKS : KVF__ALIKE};
    if (given.sample_options) return submit_own_options(sched, &given, &candidate, out);
    status = size_sample(sched, given.options, &candidate);
    return status == KVF_OK ? submit_groups(sched, &given, &candidate, out) : status;
}

kvf_status kvf_sched_token(kvf_sched *sched, kvf_request request, int *ended) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status != KVF_OK) return status;
    if (r->n_held)
        return kvf__fail(&sched->error, KVF_E_STATE,
                         "request %llu: %u samples are held for its prompt: kvf_sched_prompt_done comes first",
                         (unsigned long long)request, r->n_held);
    bool computed = r->n_computed == r->n_known || r->state == KVF__REQ_FORKED; /* by its parent */
    bool may = kvf__sched_may(r, KVF__MOVE_TOKEN) && computed;
    if (!may || kvf__req_is_complete(sched, r))
        return kvf__fail(&sched->error, KVF_E_STATE,
                         "request %llu: %s: a token follows an item with samples set, after kvf_sched_done",
                         (unsigned long long)request,
                         may ? "has its last token" : "has known tokens that are not computed");
    kvf__sched_move(sched, r, KVF__MOVE_TOKEN);
    r->suspect = false;
    r->n_known++;
    if (ended) *ended = kvf__req_is_complete(sched, r);
    return KVF_OK;
}

/* The exact sizes are at most what admission counted. So running out here means that blocks were taken outside the scheduler, or
 * that a policy grows past its projection. */
static kvf_status prompt_without_room(kvf_sched *s, kvf__req *r) {
    bool alone = s->running.n == 1;
    bool bounded = r->bound == KVF__BOUNDED;
    if (alone && r->samples != KVF__FORKS) kvf__group_dissolve(s, r);
    if (alone && !bounded && !r->n_held) {
        kvf_status status = kvf__sched_reserve_nothing(s, r);
        if (status != KVF_OK) return kvf__fail_as(&s->error, status, kvf_manager_error(s->config.manager));
        kvf__sched_give_extent(s, r);
        kvf__sched_go_on(s, r);
        return KVF_OK;
    }
    kvf_status status =
        kvf__fail(&s->error, KVF_E_NO_BLOCKS, "request %llu: its sizes need more blocks than are free: %s",
                  (unsigned long long)r->name, alone ? "ended, being alone in the pool" : "put back in the queue");
    if (alone)
        kvf__sched_end(s, r, bounded ? KVF_END_NO_BLOCKS : KVF_END_LENGTH);
    else
        kvf__sched_requeue(s, r);
    return status;
}

kvf_status kvf_sched_fork_prompt(kvf_sched *sched, kvf_request request) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status != KVF_OK) return status;
    if (r->state != KVF__REQ_PROMPT_END || (r->n_held && r->samples != KVF__OWN_OPTIONS))
        return kvf__fail(&sched->error, KVF_E_STATE, "request %llu: %s", (unsigned long long)request,
                         r->n_held ? "its samples have its options: kvf_sched_prompt_done forks them"
                                   : "its prompt has not just ended");
    if (r->n_held) status = kvf__group_fork_prompt(sched, r);
    if (status == KVF_E_NO_BLOCKS && sched->running.n == 1) { /* one after the other then */
        kvf__group_dissolve(sched, r);
        return KVF_OK;
    }
    if (status == KVF_E_NO_BLOCKS) return prompt_without_room(sched, r);
    if (status != KVF_OK) return kvf__fail_as(&sched->error, status, kvf_manager_error(sched->config.manager));
    return KVF_OK;
}

kvf_status kvf_sched_prompt_done(kvf_sched *sched, kvf_request request) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status != KVF_OK) return status;
    if (r->state != KVF__REQ_PROMPT_END)
        return kvf__fail(&sched->error, KVF_E_STATE,
                         "request %llu: its prompt has not just ended: call this once after an item with prompt_ends",
                         (unsigned long long)request);
    if (r->n_held && r->samples == KVF__OWN_OPTIONS)
        return kvf__fail(
            &sched->error, KVF_E_STATE,
            "request %llu: %u samples with options of their own are held: kvf_sched_fork_prompt comes first",
            (unsigned long long)request, r->n_held);
    do {
        status = kvf__sched_reserve_sized(sched, r);
    } while (status == KVF_E_NO_BLOCKS && kvf__sched_preempt_paused(sched));
    if (status == KVF_OK && r->n_held) {
        status = kvf__group_fork(sched, r);
        if (status == KVF_E_NO_BLOCKS && sched->running.n == 1 &&
            r->samples != KVF__FORKS) { /* one after the other then */
            kvf__group_dissolve(sched, r);
            status = KVF_OK;
        }
    }
    if (status == KVF_E_NO_BLOCKS) return prompt_without_room(sched, r);
    if (status != KVF_OK) return kvf__fail_as(&sched->error, status, kvf_manager_error(sched->config.manager));
    kvf__sched_give_extent(sched, r);
    kvf__sched_go_on(sched, r);
    return KVF_OK;
}

kvf_status kvf_sched_event_room(kvf_sched *sched, kvf_request request) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status != KVF_OK) return status;
    if (r->state != KVF__REQ_PROMPT_END && r->state != KVF__REQ_DECODE && r->state != KVF__REQ_PAUSED)
        return kvf__fail(&sched->error, KVF_E_STATE, "request %llu: its prompt is not computed: it has no event yet",
                         (unsigned long long)request);
    status = kvf__sched_reserve_event(sched, r);
    if (status == KVF_E_NO_BLOCKS) return KVF_OK;
    if (status != KVF_OK) kvf__fail_as(&sched->error, status, kvf_manager_error(sched->config.manager));
    return status;
}

kvf_status kvf_sched_set_prefix(kvf_sched *sched, kvf_request request, const kvf_sched_prefix *prefix) {
    kvf__req *r;
    kvf_sched_prefix given;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status == KVF_OK) status = kvf__config_read(&given, sizeof given, prefix, "kvf_sched_prefix", &sched->error);
    if (status != KVF_OK) return status;
    if (given.prefix_end % sched->block_size || given.prefix_end > r->n_prompt)
        return kvf__fail_field(&sched->error, KVF_E_INVALID, "prefix_end", given.prefix_end, 0,
                               "must be a multiple of the block size %u, at most n_prompt %u; 0: unknown",
                               sched->block_size, r->n_prompt);
    if (given.key.tokens && given.key.n_tokens < r->n_prompt)
        return kvf__fail(&sched->error, KVF_E_INVALID, "prefix: %u tokens are given: must be n_prompt %u at least",
                         given.key.n_tokens, r->n_prompt);
    if (given.key.salt_bytes > KVF_PREFIX_SALT_MAX)
        return kvf__fail_field(&sched->error, KVF_E_LIMIT, "salt_bytes", given.key.salt_bytes, 0,
                               "must be at most %u; of a longer one give a hash", KVF_PREFIX_SALT_MAX);
    if ((given.key.salt_bytes && !given.key.salt) || (given.key.n_extras && !given.key.extras))
        return kvf__fail(&sched->error, KVF_E_INVALID, "prefix: %s is NULL",
                         given.key.n_extras && !given.key.extras ? "extras" : "salt");
    bool first = !r->prefix.key.tokens;
    kvf__parting_leave(sched, r);
    r->prefix = given;
    r->prefix.key.struct_size = sizeof r->prefix.key;
    kvf__parting_enter(sched, r);
    if (first) kvf__parting_rank(sched, r);
    return KVF_OK;
}

kvf_status kvf_sched_resize(kvf_sched *sched, kvf_request request) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status != KVF_OK) return status;
    if (r->state != KVF__REQ_PROMPT_END && r->state != KVF__REQ_DECODE && r->state != KVF__REQ_PAUSED)
        return kvf__fail(&sched->error, KVF_E_STATE, "request %llu: its prompt is not computed: its sizes come later",
                         (unsigned long long)request);
    status = kvf__sched_reserve_sized(sched, r);
    if (status == KVF_E_NO_BLOCKS && r->bound == KVF__BOUNDED &&
        kvf_policy_group_sizes(sched->config.policies, r->seq_index)) {
        /* Head groups that got their sizes in decode may round up to more blocks than equal ones. */
        r->bound = KVF__TIGHTENED;
        if (r->reserved == KVF__AS_SIZED) r->reserved = KVF__AS_ADMITTED;
    }
    /* An unbounded one grows from the free pool. A bounded one may share blocks with a later prompt. Each plan asks again. */
    if (status == KVF_E_NO_BLOCKS) return KVF_OK;
    if (status != KVF_OK) kvf__fail_as(&sched->error, status, kvf_manager_error(sched->config.manager));
    return status;
}

/* A copy of the request with the new budget, checked as at its submission. */
static kvf_status change_candidate(kvf_sched *s, const kvf__req *r, double rho, uint32_t budget_tokens, kvf__req *to) {
    *to = *r;
    if (r->samples == KVF__OWN_OPTIONS && (r->n_held || r->state == KVF__REQ_HELD))
        return kvf__fail(&s->error, KVF_E_STATE, "request %llu: its samples have options of their own",
                         (unsigned long long)r->name);
    if (kvf_policy_flags(&r->options) & KVF_POLICY_KEEPS_ALL)
        return kvf__fail_value(&s->error, KVF_E_INVALID, "policy", r->options.ops->name,
                               "has no budget to change, it keeps every token");
    to->options.rho = rho;
    to->options.budget_tokens = budget_tokens;
    if (r->seq && kvf_policy_needs(&r->options)) to->options.budget_may_change = 1; /* it goes on observing */
    if (r->bound != KVF__GROWS) to->n_blocks = 0; /* one that grows remembers what it needed */
    return kvf__sched_size_request(s, to);
}

/* The reservations of a running request and its held samples; all of them if the budget is higher. */
static kvf_status reserve_change(kvf_sched *s, kvf__req *r, const kvf__req *to) {
    int sized = 0;
    bool looser = to->budget > r->budget;
    kvf_status status = kvf_policy_preview_budget(s->config.policies, r->seq_index, to->options.rho,
                                                  to->options.budget_tokens, s->sizes, &sized, &s->error);
    if (status != KVF_OK) return status;
    status = kvf__group_reserve_change(s, r, to, looser);
    if (status == KVF_OK) status = kvf__sched_reserve_change(s, r, to, sized);
    if (status == KVF_OK) return KVF_OK;
    if (looser) kvf__group_reserve_back(s, r);
    if (status == KVF_E_NO_BLOCKS && looser)
        return kvf__fail(&s->error, KVF_E_NO_BLOCKS,
                         "request %llu: a budget of %u tokens a layer in place of %u needs more blocks than are free: "
                         "unchanged, try again when others have ended",
                         (unsigned long long)r->name, to->budget, r->budget);
    return kvf__fail_as(&s->error, status, kvf_manager_error(s->config.manager));
}

/* The policy's state comes last: all that can fail is done before. */
static kvf_status change_running(kvf_sched *s, kvf__req *r, const kvf__req *to) {
    kvf_status reserved = reserve_change(s, r, to);
    if (reserved != KVF_OK && (reserved != KVF_E_NO_BLOCKS || to->budget > r->budget)) return reserved;
    kvf_status status =
        kvf_policy_set_budget(s->config.policies, r->seq_index, to->options.rho, to->options.budget_tokens, &s->error);
    if (status != KVF_OK) return status;
    kvf__group_take_budget(r, to);
    /* A lower budget without room for its reservation gets it after its compaction. */
    if (reserved != KVF_OK && r->bound == KVF__BOUNDED) r->bound = KVF__TIGHTENED;
    if (r->reserved == KVF__AS_SIZED || (reserved == KVF_OK && r->reserved == KVF__NOTHING))
        r->reserved = KVF__AS_ADMITTED;
    return KVF_OK;
}

/* The request to change, and what it becomes. Held samples have no state yet: they change with their leader. */
static kvf_status change_of(kvf_sched *s, kvf_request name, double rho, uint32_t budget_tokens, kvf__req **r,
                            kvf__req *to) {
    kvf_status status = kvf__sched_live(s, name, r);
    if (status != KVF_OK) return status;
    if ((*r)->state == KVF__REQ_HELD) *r = &s->slots[(*r)->leader];
    status = change_candidate(s, *r, rho, budget_tokens, to);
    if (status == KVF_OK && (*r)->state == KVF__REQ_SWAPPED) { /* under the new budget it would hold something else */
        kvf__sched_swap_forget(s, *r);
        status = change_candidate(s, *r, rho, budget_tokens, to);
    }
    return status == KVF_OK && (*r)->samples == KVF__FORKS ? kvf__group_check(s, to, 1 + (*r)->n_held) : status;
}

static void apply_to_held(kvf_sched *s, const kvf__req *r, const kvf__req *to) {
    for (kvf__req *h = kvf__sched_at(s, r->held); h; h = kvf__sched_at(s, h->next)) {
        kvf__group_take_budget(h, to);
        h->bound = r->bound;
    }
}

/* First all missing reservations are made, so that nothing can fail later; then the changes. */
kvf_status kvf_sched_set_budgets(kvf_sched *sched, const kvf_request *requests, uint32_t n_requests, double rho,
                                 uint32_t budget_tokens) {
    if (!sched) return KVF_E_INVALID;
    if (n_requests && !requests) return kvf__fail(&sched->error, KVF_E_INVALID, "requests: is NULL");
    if (n_requests > sched->n_slots)
        return kvf__fail_field(&sched->error, KVF_E_INVALID, "n_requests", n_requests, 0,
                               "there is room for %u live ones", sched->n_slots);
    kvf__req *r, to;
    kvf_status status = KVF_OK;
    uint32_t n = 0;
    for (; n < n_requests; n++) {
        status = change_of(sched, requests[n], rho, budget_tokens, &r, &to);
        if (status == KVF_OK && r->seq) status = reserve_change(sched, r, &to);
        if (status == KVF_E_NO_BLOCKS && to.budget <= r->budget) status = KVF_OK; /* it does without */
        if (status != KVF_OK) break;
    }
    while (status != KVF_OK && n-- > 0) {
        r = kvf__sched_find(sched, requests[n]);
        if (r->state == KVF__REQ_HELD) r = &sched->slots[r->leader];
        if (!r->seq) continue;
        kvf__group_reserve_back(sched, r);
        kvf__sched_reserve_back(sched, r);
    }
    for (uint32_t i = 0; i < n_requests && status == KVF_OK; i++) {
        status = change_of(sched, requests[i], rho, budget_tokens, &r, &to);
        if (status == KVF_OK && r->seq) status = change_running(sched, r, &to);
        if (status != KVF_OK) break;
        if (!r->seq) kvf__group_take_budget(r, &to);
        apply_to_held(sched, r, &to);
    }
    return status;
}

kvf_status kvf_sched_set_budget(kvf_sched *sched, kvf_request request, double rho, uint32_t budget_tokens) {
    return kvf_sched_set_budgets(sched, &request, 1, rho, budget_tokens);
}

kvf_status kvf_sched_finish(kvf_sched *sched, kvf_request request) {
    kvf__req *r;
    kvf_status status = kvf__sched_live(sched, request, &r);
    if (status != KVF_OK) return status;
    kvf__sched_drop(sched, r);
    return KVF_OK;
}
