/* The blocks that a request may need, and its reservations. */
#include <stdio.h>

#include "scheduler/sched.h"

/* Most blocks that a layer's table of so many slots holds, when it grows chunk by chunk. With a sliding window earlier blocks are
 * freed. */
static uint32_t blocks_of(const kvf_sched *s, uint32_t layer, uint32_t slots) {
    uint32_t window = s->windows ? s->windows[layer] : 0;
    uint64_t most = (uint64_t)window + s->config.chunk + s->block_size - 2;
    if (window == KVF_LAYER_NONE) return 0;
    return kvf__ceil_div(window ? (uint32_t)KVF__MIN(slots, most) : slots, s->block_size);
}

/* The same for all tables. */
static uint64_t blocks_for(const kvf_sched *s, uint32_t slots) {
    uint64_t n = 0;
    if (!s->windows) return (uint64_t)kvf__ceil_div(slots, s->block_size) * s->n_tables;
    for (uint32_t l = 0; l < s->n_layers; l++) n += (uint64_t)blocks_of(s, l, slots) * s->n_groups;
    return n;
}

/* The most slots, in whole blocks, for which n_blocks are enough. */
static uint64_t slots_for(const kvf_sched *s, uint32_t n_blocks) {
    uint32_t low = 0, high = s->max_slots / s->block_size;
    while (low < high) {
        uint32_t middle = high - (high - low) / 2;
        if (blocks_for(s, middle * s->block_size) <= n_blocks) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return (uint64_t)low * s->block_size;
}

/* what: "blocks" or "score pages". by_budget: the budget asks for more than the prompt. */
static kvf_status never_fits(kvf_sched *s, uint32_t n_prompt, const char *field, const char *what, uint64_t need,
                             uint32_t there_are, bool by_budget) {
    char remedy[96];
    if (by_budget)
        snprintf(remedy, sizeof remedy, "lower the budget (rho, min_tokens, budget_tokens), generate fewer tokens");
    else
        snprintf(remedy, sizeof remedy, "shorten the prompt to at most %llu tokens",
                 (unsigned long long)slots_for(s, there_are));
    return kvf__fail_size(&s->error, KVF_E_NEVER_FITS, field, there_are, need,
                          "a prompt of %u tokens needs %llu %s, the pool has %u; %s, or", n_prompt,
                          (unsigned long long)need, what, there_are, remedy);
}

/* Blocks to count for a further sample of the same prompt. Bounded: its whole reservation, which the prompt's end sets; if the
 * sizes are not known by then, the prompt's own. Not bounded: the reservation of the layers that evict, and one block a
 * table to grow by. */
static uint64_t child_blocks(const kvf_sched *s, const kvf__req *r, const kvf_policy_need *need) {
    const kvf_policy_options *o = &r->options;
    if (r->bound == KVF__BOUNDED) {
        bool sized = need->budget_tokens < r->n_prompt && !o->defer_first_decode;
        return sized ? KVF__MIN(need->steady_blocks, blocks_for(s, r->max_table_slots)) : r->n_blocks;
    }
    if (!kvf_policy_evicts(o)) return s->n_tables;
    uint64_t slots = (uint64_t)need->budget_tokens + KVF__MAX(o->evict_every, s->block_size / 2);
    return s->n_tables + blocks_for(s, (uint32_t)KVF__MIN(slots, r->max_table_slots));
}

/* It must replay its generated tokens if it evicts. With a policy that never evicts, and needs no sums of the prompt alone, prefill
 * gives the same pages as decode within rounding. */
static void size_needs(kvf__req *r) {
    uint32_t needs = kvf_policy_needs(&r->options);
    r->needs = (kvf__needs){.stats = (needs & KVF_NEEDS_COL_SUMS ? KVF_SNAPSHOT_SUMS : 0u) |
                                     (needs & KVF_NEEDS_SQUARES ? KVF_SNAPSHOT_SQUARES : 0u) |
                                     (needs & KVF_NEEDS_LOGPROBS ? KVF_SNAPSHOT_LOGPROBS : 0u),
                            .scores = kvf_policy_n_arrays(&r->options) > 0,
                            .n_last = needs & KVF_NEEDS_LAST_ROWS ? r->options.score_window : 0};
    if (needs & KVF_NEEDS_REPEAT) r->needs.piece = r->options.repeat_piece ? r->options.repeat_piece : UINT32_MAX;
    r->needs.extent = r->needs.stats || r->needs.n_last || r->needs.piece;
    r->evicts = r->bound == KVF__BOUNDED || kvf_policy_evicts(&r->options) || r->needs.extent;
}

static kvf_status repetition_never_fits(kvf_sched *s, const kvf__req *r, uint64_t peak, uint32_t there_are) {
    return kvf__fail_size(
        &s->error, KVF_E_NEVER_FITS, there_are < s->n_blocks ? "n_score_pages" : "n_blocks", there_are, peak,
        "a prompt of %u tokens needs %llu blocks while policy %s repeats it, the pool has %u; shorten the prompt, set a "
        "smaller repeat_piece, or",
        r->n_prompt, (unsigned long long)peak, r->options.ops->name, there_are);
}

/* Sets the fields that follow from n_prompt, max_new and options; refuses a request that could not even run alone. */
kvf_status kvf__sched_size_request(kvf_sched *s, kvf__req *r) {
    kvf_policy_need need = {0};
    kvf_status status = kvf_policy_options_check(&r->options, s->n_layers, s->block_size, &s->error);
    if (status == KVF_OK)
        status = kvf_policy_project(&r->options, s->n_layers, s->n_groups, s->block_size, r->n_prompt, r->max_new,
                                    &need, &s->error);
    if (status != KVF_OK) return status;
    if (s->windows) need.prompt_blocks = KVF__MIN(need.prompt_blocks, blocks_for(s, r->n_prompt + 1));
    r->bound = need.bounded && !r->n_segments ? KVF__BOUNDED : KVF__GROWS;
    r->budget = kvf_policy_evicts(&r->options) ? need.budget_tokens : UINT32_MAX;
    size_needs(r);
    /* The last token is sampled and never computed. */
    uint64_t last = (uint64_t)r->n_prompt + KVF__MAX(r->max_new, 1) - 1;
    r->max_table_slots = (uint32_t)KVF__MIN(last, s->config.max_context - 1);
    if (r->needs.extent && r->n_prompt > s->config.max_prefill_tokens)
        return kvf__fail_field(
            &s->error, KVF_E_NEVER_FITS, "n_prompt", r->n_prompt, 0,
            "policy %s keeps figures of the prompt, for which there is room for max_prefill_tokens %u: "
            "raise that, shorten the prompt, or use a policy that needs no such figures",
            r->options.ops->name, s->config.max_prefill_tokens);
    uint64_t peak = 0;
    if (r->needs.piece) {
        status = kvf__repeat_check(s, r, r->n_prompt, r->n_prompt);
        if (status != KVF_OK) return status;
        peak = blocks_for(s, r->n_prompt + s->config.n_instruction +
                                 kvf__repeat_piece(s, r->needs.piece, r->n_prompt, r->n_prompt));
        need.prompt_blocks = blocks_for(s, r->n_prompt + (r->options.defer_first_decode != 0));
    }
    uint64_t blocks = need.prompt_blocks;
    if (r->bound == KVF__BOUNDED) {
        blocks = KVF__MAX(blocks, need.steady_blocks);
        /* A prompt within the budget: until the overflow each table may hold the budget, whatever the sizes will be. */
        if (need.budget_tokens >= r->n_prompt) blocks = KVF__MAX(blocks, blocks_for(s, need.budget_tokens));
        blocks = KVF__MIN(blocks, blocks_for(s, r->max_table_slots));
    }
    bool by_budget = blocks > need.prompt_blocks;
    uint32_t there_are = r->needs.scores ? KVF__MIN(s->n_blocks, s->n_score_pages) : s->n_blocks;
    if (peak > there_are) return repetition_never_fits(s, r, peak, there_are);
    if (blocks > s->n_blocks) return never_fits(s, r->n_prompt, "n_blocks", "blocks", blocks, s->n_blocks, by_budget);
    if (r->needs.scores && blocks > s->n_score_pages)
        return never_fits(s, r->n_prompt, "n_score_pages", "score pages", blocks, s->n_score_pages, by_budget);
    if (r->bound == KVF__BOUNDED) {
        r->n_blocks = (uint32_t)blocks;
        r->n_steady = (uint32_t)KVF__MIN(need.steady_blocks, blocks);
    }
    r->n_peak = (uint32_t)peak;
    r->child_blocks = (uint32_t)KVF__MIN(child_blocks(s, r, &need), s->n_blocks);
    return KVF_OK;
}

/* ---- Reservations -------------------------------------------------------------------------------- */

/* What admission counts, over all tables. Unbounded: what is prefilled and the next token, and not less than it needed
 * when it was preempted: else it would come back into the room that it has just made. */
uint64_t kvf__sched_admission_blocks(const kvf_sched *s, const kvf__req *r) {
    if (r->bound == KVF__BOUNDED) return KVF__MAX(r->n_blocks, r->n_peak);
    uint64_t blocks = blocks_for(s, KVF__MAX(r->n_prefill, KVF__MIN(r->n_prefill + 1, r->max_table_slots)));
    return KVF__MAX(KVF__MAX(blocks, r->n_blocks), r->n_peak);
}

uint64_t kvf__sched_begin_blocks(const kvf_sched *s, const kvf__req *r) {
    return KVF__MAX(blocks_for(s, r->n_prefill), r->n_peak);
}

/* With the largest piece of any of its held samples. */
uint64_t kvf__sched_prompt_blocks(const kvf_sched *s, const kvf__req *r) {
    uint32_t peak = r->n_peak;
    for (uint32_t slot = r->held; slot != KVF__SLOT_NONE; slot = s->slots[slot].next)
        peak = KVF__MAX(peak, s->slots[slot].n_peak);
    return KVF__MAX(blocks_for(s, r->n_prompt), peak);
}

/* Spreads blocks evenly over the tables, the remainder over the first. Which table will need them is not known yet, but only the sum
 * counts in the pool. A table with a sliding window gets no more than it can ever hold; the others share what that leaves. */
static void want_blocks(kvf_sched *s, uint64_t n_blocks) {
    uint32_t n_open = s->n_tables;
    memset(s->want, 0, s->n_tables * sizeof *s->want);
    for (bool first = true; n_blocks && n_open; first = false) {
        uint64_t base = n_blocks / n_open, extra = n_blocks % n_open;
        n_open = 0;
        for (uint32_t t = 0, k = 0; t < s->n_tables; t++) {
            uint32_t most = blocks_of(s, t / s->n_groups, s->max_slots);
            if (!first && s->want[t] == most) continue;
            uint64_t share = base + (k++ < extra), more = KVF__MIN(share, most - s->want[t]);
            s->want[t] += (uint32_t)more;
            n_blocks -= more;
            n_open += s->want[t] < most;
        }
    }
    for (uint32_t t = 0; t < s->n_tables; t++)
        s->want[t] = (uint32_t)KVF__MIN((uint64_t)s->want[t] * s->block_size, s->max_slots);
}

/* The size of a table: of its head group if the groups have different sizes, else of its layer. */
static kvf_layer_size size_of(const kvf_sched *s, const kvf_layer_size *sizes, const kvf_layer_size *groups,
                              uint32_t t) {
    return groups ? groups[t] : sizes[t / s->n_groups];
}

/* Sets want by the sizes: S + k in each layer that evicts, 0 in one that never does. Returns false if a table still holds more,
 * because its first event is deferred: its want is then one more token, until that event. */
static bool want_sized(kvf_sched *s, const kvf__req *r, const kvf_layer_size *sizes, const kvf_layer_size *groups) {
    bool sized = true;
    for (uint32_t t = 0; t < s->n_tables; t++) {
        uint32_t layer = t / s->n_groups, n_slots = 0, reserve = size_of(s, sizes, groups, t).reserve;
        s->want[t] = 0;
        if (reserve == UINT32_MAX) continue;
        kvf_status status = kvf_seq_table(s->config.manager, r->seq, layer, t % s->n_groups, &n_slots, NULL, NULL);
        if (status != KVF_OK) return false;
        if (n_slots >= reserve) {
            reserve = n_slots + 1;
            sized = false;
        }
        s->want[t] = KVF__MAX(KVF__MIN(reserve, r->max_table_slots), n_slots);
    }
    return sized;
}

static kvf_reserve reserve_of(const kvf_sched *s, const kvf__req *r) {
    return (kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = s->want, .with_scores = r->needs.scores};
}

static kvf_status reserve_want(kvf_sched *s, const kvf__req *r) {
    kvf_reserve reserve = reserve_of(s, r);
    return kvf_seq_reserve(s->config.manager, r->seq, &reserve);
}

/* Attaches the prefix hit to a new sequence and makes its reservation. A policy that never evicts reserves only blocks behind the
 * hit. So does one that evicts if no other sequence holds the hit's blocks, since its first event can then write in place. Otherwise
 * the event needs a fresh block for each block that stays, after the rest of the prompt is appended. In no case is more
 * reserved, besides the hit, than the request needs without the cache. */
kvf_status kvf__sched_take_admission(kvf_sched *s, kvf__req *r, uint64_t blocks) {
    kvf_reserve reserve = reserve_of(s, r);
    uint64_t found = (uint64_t)kvf__ceil_div(r->match.n_tokens, s->block_size) * s->n_tables;
    if (found && r->bound != KVF__BOUNDED) {
        reserve.growth = 1;
    } else if (kvf__sched_shared_blocks(s, r)) {
        reserve.growth = 1;
        if (r->samples != KVF__OWN_OPTIONS || !r->n_held)
            blocks = KVF__MAX(KVF__MIN(blocks_for(s, r->n_prefill) + r->n_steady, found + r->n_blocks), r->n_peak);
    }
    want_blocks(s, blocks);
    return kvf__sched_attach(s, r, &reserve);
}

kvf_status kvf__sched_reserve_blocks(kvf_sched *s, const kvf__req *r, kvf_seq seq, uint64_t n_blocks) {
    want_blocks(s, n_blocks);
    return kvf_seq_reserve(
        s->config.manager, seq,
        &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = s->want, .with_scores = r->needs.scores});
}

/* While the sizes are unknown, a bounded request keeps the reservation of its admission, which covers its budget; any other request
 * grows from the free pool. */
kvf_status kvf__sched_reserve_sized(kvf_sched *s, kvf__req *r) {
    const kvf_layer_size *sizes = kvf_policy_sizes(s->config.policies, r->seq_index);
    bool repeated =
        r->n_peak && !r->match.n_tokens && r->state == KVF__REQ_PROMPT_END && r->reserved == KVF__AS_ADMITTED;
    if (!sizes && r->bound == KVF__BOUNDED && repeated) /* a piece's blocks are given back */
        return kvf__sched_reserve_blocks(s, r, r->seq, r->n_blocks);
    if (!sizes && r->bound == KVF__BOUNDED) return KVF_OK;
    bool sized = false;
    if (sizes)
        sized = want_sized(s, r, sizes, kvf_policy_group_sizes(s->config.policies, r->seq_index));
    else
        want_blocks(s, 0);
    kvf_status status = reserve_want(s, r);
    if (status != KVF_OK) return status;
    if (r->reserved != KVF__AS_SHARED) r->reserved = sized ? KVF__AS_SIZED : KVF__AS_ADMITTED;
    if (sizes && r->bound == KVF__TIGHTENED) r->bound = KVF__BOUNDED;
    return KVF_OK;
}

/* Before the first event: reserves the fresh blocks for each table that shares a block with another sequence. */
kvf_status kvf__sched_reserve_event(kvf_sched *s, kvf__req *r) {
    const kvf_layer_size *sizes = kvf_policy_sizes(s->config.policies, r->seq_index);
    if (!sizes) return KVF_OK;
    const kvf_layer_size *groups = kvf_policy_group_sizes(s->config.policies, r->seq_index);
    for (uint32_t t = 0; t < s->n_tables; t++) {
        kvf_layer_size size = size_of(s, sizes, groups, t);
        uint32_t reserve = size.reserve == UINT32_MAX ? size.keep : size.reserve; /* it may grow after its event */
        s->want[t] = reserve == UINT32_MAX ? 0 : KVF__MIN(reserve, r->max_table_slots);
    }
    kvf_reserve reserve = reserve_of(s, r);
    reserve.fresh = 1;
    return kvf_seq_reserve(s->config.manager, r->seq, &reserve);
}

/* Makes the reservation that a running request has under the budget of `to`. sized: s->sizes are its layers' sizes. With a budget
 * that never evicts it reserves nothing. */
kvf_status kvf__sched_reserve_change(kvf_sched *s, kvf__req *r, const kvf__req *to, bool sized) {
    bool in_prompt = r->state != KVF__REQ_DECODE && r->state != KVF__REQ_PAUSED;
    if (in_prompt && to->bound == KVF__GROWS) return KVF_OK; /* the reservation for its prompt stays */
    if (!in_prompt && sized)
        (void)want_sized(s, r, s->sizes, NULL); /* the event gives the groups their sizes */
    else
        want_blocks(s, to->bound != KVF__BOUNDED ? 0 : in_prompt ? kvf__sched_admission_blocks(s, to) : to->n_blocks);
    return reserve_want(s, r);
}

/* Undoes kvf__sched_reserve_change: gives up what the current budget does not need. */
void kvf__sched_reserve_back(kvf_sched *s, kvf__req *r) {
    bool known = kvf_policy_sizes(s->config.policies, r->seq_index) != NULL;
    bool in_prompt = r->state != KVF__REQ_DECODE && r->state != KVF__REQ_PAUSED;
    kvf_status status = KVF_OK;
    if (r->state == KVF__REQ_DECODE && (known || r->bound != KVF__BOUNDED))
        status = kvf__sched_reserve_sized(s, r);
    else
        status = kvf__sched_reserve_blocks(
            s, r, r->seq, in_prompt || r->bound != KVF__BOUNDED ? kvf__sched_admission_blocks(s, r) : r->n_blocks);
    (void)status; /* no more than it has */
}

/* For a request alone in the pool. Its reservation would only keep one of its tables from blocks that another needs now. */
kvf_status kvf__sched_reserve_nothing(kvf_sched *s, kvf__req *r) {
    kvf_status status = kvf__sched_reserve_blocks(s, r, r->seq, 0);
    if (status != KVF_OK) return status;
    for (kvf__req *h = kvf__sched_at(s, r->held); h && status == KVF_OK; h = kvf__sched_at(s, h->next))
        if (h->seq) status = kvf__sched_reserve_blocks(s, r, h->seq, 0); /* it keeps its place */
    if (status != KVF_OK) return status;
    r->reserved = KVF__NOTHING;
    return KVF_OK;
}

/* By the sizes, or if these are unknown for one more token. */
uint32_t kvf__sched_present_blocks(kvf_sched *s, const kvf__req *r) {
    const kvf_layer_size *sizes = kvf_policy_sizes(s->config.policies, r->seq_index);
    const kvf_layer_size *groups = kvf_policy_group_sizes(s->config.policies, r->seq_index);
    uint32_t n = 0;
    for (uint32_t t = 0; t < s->n_tables; t++) {
        uint32_t layer = t / s->n_groups, n_slots = 0;
        uint32_t reserve = sizes ? size_of(s, sizes, groups, t).reserve : UINT32_MAX;
        kvf_status status = kvf_seq_table(s->config.manager, r->seq, layer, t % s->n_groups, &n_slots, NULL, NULL);
        if (status != KVF_OK) return 0;
        if (reserve == UINT32_MAX || reserve <= n_slots) reserve = n_slots + 1;
        n += kvf__ceil_div(KVF__MIN(reserve, r->max_table_slots), s->block_size);
    }
    return n;
}
