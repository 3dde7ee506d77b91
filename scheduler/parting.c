/* Prompts with equal beginnings: which of those that are not computed yet have one, and at which token they part.
 *
 * Prompts that arrive together share their common beginning only if one of them computes it first, the others wait for it, and
 * policies that need column sums find a snapshot at its end. So
 *   - a prompt ends a chunk where enough others part from it (kvf__parting_end), and where it parts from a cached prompt
 *     (parts_at); a snapshot is taken there;
 *   - the head of the queue waits while a prompt of this step computes their common beginning (kvf__parting_waits).
 *
 * s->parting is sorted by salt, extra keys and tokens, so that prompts with equal beginnings are neighbours. Two prompts have as
 * many tokens in common as the least `common` between them. */
#include "scheduler/sched.h"

#define KVF__PARTING_NEIGHBOURS 256u /* how far a prompt looks for others to either side */

/* Sharing fewer tokens than this is not worth a chunk of their own, or a step's wait. */
static uint32_t least_gain(const kvf_sched *s) { return KVF__MAX(s->config.chunk / 8, s->block_size); }

static int compare_bytes(const void *a, size_t a_bytes, const void *b, size_t b_bytes) {
    size_t n = KVF__MIN(a_bytes, b_bytes);
    int order = n ? memcmp(a, b, n) : 0;
    return order ? order : (a_bytes > b_bytes) - (a_bytes < b_bytes);
}

/* By salt and extra keys: only prompts that agree in these share anything. */
static int compare_kind(const kvf_prefix_key *a, const kvf_prefix_key *b) {
    int order = compare_bytes(a->salt, a->salt_bytes, b->salt, b->salt_bytes);
    if (order) return order;
    return compare_bytes(a->extras, (size_t)a->n_extras * sizeof *a->extras, b->extras,
                         (size_t)b->n_extras * sizeof *b->extras);
}

/* Tokens that both prompts begin with. */
static uint32_t common_tokens(const kvf__req *a, const kvf__req *b) {
    const uint32_t *x = a->prefix.key.tokens, *y = b->prefix.key.tokens;
    uint32_t n = 0, most = KVF__MIN(a->n_prompt, b->n_prompt);
    while (n + 64 <= most && !memcmp(x + n, y + n, 64 * sizeof *x)) n += 64;
    while (n < most && x[n] == y[n]) n++;
    return n;
}

static uint32_t shared_tokens(const kvf__req *a, const kvf__req *b) {
    return compare_kind(&a->prefix.key, &b->prefix.key) ? 0 : common_tokens(a, b);
}

/* A total order: equal prompts by their names. */
static int compare(const kvf__req *a, const kvf__req *b) {
    int order = compare_kind(&a->prefix.key, &b->prefix.key);
    if (order) return order;
    uint32_t n = common_tokens(a, b);
    if (n < a->n_prompt && n < b->n_prompt) return a->prefix.key.tokens[n] < b->prefix.key.tokens[n] ? -1 : 1;
    if (a->n_prompt != b->n_prompt) return a->n_prompt < b->n_prompt ? -1 : 1;
    return (a->name > b->name) - (a->name < b->name);
}

/* Where a prompt stands, or would stand. */
static uint32_t place_of(const kvf_sched *s, const kvf__req *r) {
    uint32_t low = 0, high = s->n_parting;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (compare(&s->slots[s->parting[middle].slot], r) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Only while it waits or its prompt runs. */
void kvf__parting_enter(kvf_sched *s, kvf__req *r) {
    bool now = r->state == KVF__REQ_WAITING || r->state == KVF__REQ_FORKED || r->state == KVF__REQ_PREFILL;
    if (r->parting || !now || !kvf__req_caches(s, r)) return;
    uint32_t at = place_of(s, r), after = s->n_parting - at;
    memmove(s->parting + at + 1, s->parting + at, after * sizeof *s->parting);
    s->parting[at] = (kvf__parting){.slot = kvf__sched_slot(s, r)};
    s->n_parting++;
    if (after) s->parting[at].common = shared_tokens(r, &s->slots[s->parting[at + 1].slot]);
    if (at) s->parting[at - 1].common = shared_tokens(&s->slots[s->parting[at - 1].slot], r);
    r->parting = true;
}

/* Called when its prompt is computed, and when it goes. */
void kvf__parting_leave(kvf_sched *s, kvf__req *r) {
    if (!r->parting) return;
    uint32_t at = place_of(s, r);
    if (at) s->parting[at - 1].common = KVF__MIN(s->parting[at - 1].common, s->parting[at].common);
    s->n_parting--;
    memmove(s->parting + at, s->parting + at + 1, (s->n_parting - at) * sizeof *s->parting);
    r->parting = false;
}

/* Right behind the earlier one of its neighbours with the same beginning. Only what it shares most with stands beside it. */
void kvf__parting_rank(kvf_sched *s, kvf__req *r) {
    if (s->config.order != KVF_ORDER_PREFIX || !r->parting || r->state != KVF__REQ_WAITING) return;
    uint32_t at = place_of(s, r);
    int64_t own = (int64_t)(r->arrival >> s->slot_bits), rank = own;
    if (at && s->parting[at - 1].common >= least_gain(s)) rank = KVF__MIN(rank, s->slots[s->parting[at - 1].slot].rank);
    if (at + 1 < s->n_parting && s->parting[at].common >= least_gain(s))
        rank = KVF__MIN(rank, s->slots[s->parting[at + 1].slot].rank);
    kvf__sched_set_rank(s, r, KVF__MAX(rank, own - (int64_t)s->config.patience));
}

/* Tokens of the longest snapshot of these statistics that there is room for: a longer one is not kept, and nobody finds it. */
static uint32_t longest_snapshot(const kvf_sched *s, uint32_t stats) {
    uint64_t n = kvf_manager_get_config(s->config.manager)->n_snapshot_pages;
    n /= (uint32_t)__builtin_popcount(stats);
    return (uint32_t)KVF__MIN(n * s->block_size, UINT32_MAX);
}

/* Whether it goes on from a snapshot of these statistics, which another prompt leaves. */
static bool continues_from(kvf_sched *s, const kvf__req *r, uint32_t stats) {
    uint32_t own = kvf__sched_needs(s, r).stats;
    return own && !(own & ~stats) && !r->prefix.no_hits;
}

/* A walk over the neighbours to one side. shared: tokens, in whole blocks, that the next one has in common with the prompt at which the
 * walk began. Equal prompts are skipped: they find the snapshot at the prompt's end. */
typedef struct side {
    uint32_t at, n_left, shared;
} side;

static void step_down(kvf_sched *s, const kvf__req *r, side *w) {
    uint32_t common = w->shared;
    do {
        if (!w->n_left || !w->at) {
            w->shared = 0;
            return;
        }
        w->n_left--;
        w->at--;
        common = KVF__MIN(common, s->parting[w->at].common);
    } while (common == r->n_prompt && s->slots[s->parting[w->at].slot].n_prompt == common);
    w->shared = common;
}

static void step_up(kvf_sched *s, const kvf__req *r, side *w) {
    uint32_t common = w->shared;
    do {
        if (!w->n_left || w->at + 1 >= s->n_parting) {
            w->shared = 0;
            return;
        }
        w->n_left--;
        common = KVF__MIN(common, s->parting[w->at].common);
        w->at++;
    } while (common == r->n_prompt && s->slots[s->parting[w->at].slot].n_prompt == common);
    w->shared = common;
}

/* The first place behind `begin` where so many prompts part from this one that a chunk which ends there saves tokens: the
 * farther neighbours share less, so both sides are walked outwards together. UINT32_MAX: nowhere. */
static uint32_t next_parting(kvf_sched *s, const kvf__req *r, uint32_t begin) {
    uint32_t best = UINT32_MAX, place = 0, n = 0, from = place_of(s, r), bs = s->block_size;
    uint32_t stats = kvf__sched_needs(s, r).stats, longest = longest_snapshot(s, stats);
    side down = {from, KVF__PARTING_NEIGHBOURS, r->n_prompt}, up = down;
    step_down(s, r, &down);
    step_up(s, r, &up);
    for (;;) {
        bool lower = down.shared >= up.shared;
        const side *w = lower ? &down : &up;
        uint32_t shared = w->shared - w->shared % bs;
        if (shared <= begin) return best;
        n = shared == place ? n : 0;
        place = shared;
        n += continues_from(s, &s->slots[s->parting[w->at].slot], stats);
        if (place <= longest && (uint64_t)n * (place - begin) >= least_gain(s)) best = place;
        if (lower)
            step_down(s, r, &down);
        else
            step_up(s, r, &up);
    }
}

uint32_t kvf__parting_end(kvf_sched *s, const kvf__req *r, uint32_t begin) {
    if (begin >= r->n_prompt || !r->parting || !continues_from(s, r, UINT32_MAX)) return UINT32_MAX;
    uint32_t end = next_parting(s, r, begin);
    return r->parts_at > begin ? KVF__MIN(end, r->parts_at) : end;
}

/* Where the chunk that begins at `begin` ends: on the grid, at prefix_end, where prompts part, or with what is prefilled. */
uint32_t kvf__sched_chunk_end(kvf_sched *s, const kvf__req *r, uint32_t begin) {
    if (kvf__sched_hit_again(s, r, begin)) return r->match.n_snapshot_tokens;
    uint32_t end = KVF__MIN(r->n_prefill, begin - begin % s->config.chunk + s->config.chunk);
    if (begin < r->prefix.prefix_end) end = KVF__MIN(end, r->prefix.prefix_end);
    return KVF__MIN(end, kvf__parting_end(s, r, begin));
}

/* A prompt that is admitted shares more with a cached one than it found a snapshot for: the third that comes finds it. */
void kvf__parting_note_cached(kvf_sched *s, kvf__req *r) {
    r->parts_at = 0;
    if (!kvf__req_caches(s, r) || !continues_from(s, r, UINT32_MAX)) return;
    kvf_prefix_key key = r->prefix.key;
    key.n_tokens = r->n_prompt;
    kvf_prefix_options options;
    kvf_prefix_options_init(&options, sizeof options);
    options.host = s->tiers;
    kvf_prefix_match match = {.struct_size = sizeof match};
    kvf_status status = kvf_prefix_lookup(s->config.manager, &key, &options, &match);
    if (status != KVF_OK || match.n_tokens < r->match.n_tokens + least_gain(s)) return;
    if (match.n_tokens > longest_snapshot(s, kvf__sched_needs(s, r).stats)) return;
    if (match.n_tokens + s->block_size < r->n_prompt) r->parts_at = match.n_tokens; /* else its end does */
}

/* What a prompt of this step, q, will have left for r to begin from. */
static uint32_t will_find(kvf_sched *s, const kvf__req *q, const kvf__req *r, kvf__needs needs) {
    uint32_t stats = kvf__sched_needs(s, q).stats;
    if (needs.stats & ~stats) return 0;
    uint32_t longest = needs.stats ? longest_snapshot(s, stats) : UINT32_MAX;
    uint32_t shared = shared_tokens(q, r), bs = s->block_size;
    if (shared == r->n_prompt && shared <= longest && (q->n_prompt == shared || !needs.stats) && !needs.n_last)
        return shared;
    uint32_t most = KVF__MIN(shared, needs.n_last ? r->n_prompt - needs.n_last : r->n_prompt - 1), found = 0;
    most -= most % bs;
    if (!needs.stats) return most;
    for (uint32_t end = q->n_computed; end < most;) {
        end = kvf__sched_chunk_end(s, q, end);
        if (end <= KVF__MIN(most, longest)) found = end;
    }
    return found;
}

bool kvf__parting_waits(kvf_sched *s, const kvf__req *r) {
    kvf__needs needs = kvf__sched_needs(s, r);
    if (!r->parting || r->prefix.no_hits || (needs.n_last && r->n_prompt <= needs.n_last)) return false;
    for (uint32_t i = s->n_decode; i < s->n_items; i++) {
        const kvf__req *q = kvf__sched_find(s, s->items[i].request);
        if (!q->parting || q->n_computed >= q->n_prompt) continue;
        uint32_t found = will_find(s, q, r, needs);
        if (found > q->n_computed && found >= r->match.n_tokens + least_gain(s)) return true;
    }
    return false;
}

bool kvf__parting_is_valid(const kvf_sched *s) {
    for (uint32_t i = 0; i < s->n_parting; i++) {
        const kvf__req *r = &s->slots[s->parting[i].slot];
        if (!r->name || !r->parting) return false;
        if (i + 1 == s->n_parting) continue;
        const kvf__req *next = &s->slots[s->parting[i + 1].slot];
        if (compare(r, next) >= 0 || s->parting[i].common != shared_tokens(r, next)) return false;
    }
    return true;
}
