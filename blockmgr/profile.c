/* The profile: turns the changes of a call into figures and events. */
#include "blockmgr/profile.h"

#include <stddef.h>

/* ---- Figures ---------------------------------------------------------------------------------- */

#define WORD(field) ((offsetof(kvf_profile, field) - offsetof(kvf_profile, now)) / sizeof(uint64_t))
#define LAYER_WORD(layer, field)                                             \
    ((sizeof(kvf_profile) - offsetof(kvf_profile, now)) / sizeof(uint64_t) + \
     ((layer) * sizeof(kvf_profile_layer) + offsetof(kvf_profile_layer, field)) / sizeof(uint64_t))

/* Only the manager's thread writes, so its own reads need no ordering. */
static uint64_t get(const kvf__profile *p, size_t word) {
    return atomic_load_explicit(&p->words[word], memory_order_relaxed);
}
static void put(kvf__profile *p, size_t word, uint64_t value) {
    atomic_store_explicit(&p->words[word], value, memory_order_release);
}
static void add(kvf__profile *p, size_t word, uint64_t n) { put(p, word, get(p, word) + n); }
/* Sets a gauge and raises its high-water mark. */
static void mark(kvf__profile *p, size_t word, size_t word_max, uint64_t value) {
    put(p, word, value);
    if (value > get(p, word_max)) put(p, word_max, value);
}

/* Counts a value in a histogram. word: its field n; sum, max and the buckets follow. */
static void count(kvf__profile *p, size_t word, uint64_t value) {
    size_t bucket = value ? 64 - (size_t)__builtin_clzll(value) : 0;
    add(p, word, 1);
    add(p, word + 1, value);
    if (value > get(p, word + 2)) put(p, word + 2, value);
    add(p, word + 3 + bucket, 1);
}

static void open_call(kvf_manager *m) {
    kvf__profile *p = m->profile;
    uint64_t version = atomic_load_explicit(&p->version, memory_order_relaxed);
    atomic_store_explicit(&p->version, version + 1, memory_order_relaxed); /* the release of the first word orders it */
    if (p->config.clock) {
        uint64_t now = p->config.clock(p->config.clock_ctx);
        if (now < p->now)
            add(p, WORD(n_clock_back), 1);
        else
            p->now = now;
    }
    put(p, WORD(now), p->now);
    add(p, WORD(n_calls), 1);
}

static void figures(kvf_manager *m) {
    kvf__profile *p = m->profile;
    kvf_pool_occupancy blocks = kvf__pools_occupancy(m, m->blocks);
    put(p, WORD(free), blocks.n_free);
    mark(p, WORD(held), WORD(held_max), blocks.n_held);
    mark(p, WORD(cached), WORD(cached_max), blocks.n_total - blocks.n_free - blocks.n_held);
    mark(p, WORD(promised), WORD(promised_max), blocks.n_promised);
    mark(p, WORD(shared), WORD(shared_max), blocks.n_shared);
    put(p, WORD(outside), p->counts[m->config.n_layers].held);
    kvf_pool_occupancy host = kvf__pools_occupancy(m, m->host_blocks);
    mark(p, WORD(host_held), WORD(host_held_max), host.n_held);
    mark(p, WORD(host_cached), WORD(host_cached_max), host.n_total - host.n_free - host.n_held);
    mark(p, WORD(pages_held), WORD(pages_held_max), m->pages.n - m->pages.n_free);
    mark(p, WORD(seqs), WORD(seqs_max), m->n_seqs);
}

static void layer_figures(kvf_manager *m) {
    kvf__profile *p = m->profile;
    uint64_t used = 0, idle = 0;
    for (uint32_t l = 0; l < m->config.n_layers; l++) {
        uint64_t layer_idle = (uint64_t)m->layer_blocks[l] * m->config.block_size - m->layer_slots[l];
        mark(p, LAYER_WORD(l, entries), LAYER_WORD(l, entries_max), m->layer_blocks[l]);
        mark(p, LAYER_WORD(l, held), LAYER_WORD(l, held_max), p->counts[l].held);
        mark(p, LAYER_WORD(l, shared), LAYER_WORD(l, shared_max), p->counts[l].shared);
        put(p, LAYER_WORD(l, slots_used), m->layer_slots[l]);
        put(p, LAYER_WORD(l, cached), p->counts[l].cached);
        mark(p, LAYER_WORD(l, slots_idle), LAYER_WORD(l, slots_idle_max), layer_idle);
        used += m->layer_slots[l];
        idle += layer_idle;
    }
    put(p, WORD(slots_used), used);
    mark(p, WORD(slots_idle), WORD(slots_idle_max), idle);
    put(p, WORD(fragmentation_ppm), used + idle ? idle * 1000000 / (used + idle) : 0);
}

/* ---- Events -------------------------------------------------------------------------------------- */

static void push(kvf_manager *m, kvf_profile_event event) {
    kvf__profile *p = m->profile;
    uint64_t head = atomic_load_explicit(p->head, memory_order_relaxed);
    if (head - atomic_load_explicit(p->tail, memory_order_acquire) == p->config.n_events) {
        add(p, WORD(events_dropped), 1);
        return;
    }
    event.time = p->now;
    p->events[head & (p->config.n_events - 1)] = event;
    atomic_store_explicit(p->head, head + 1, memory_order_release);
    add(p, WORD(events), 1);
}

static void push_blocks(kvf_manager *m, kvf_profile_kind kind, uint32_t layer, uint32_t seq, uint32_t block,
                        uint32_t n_blocks) {
    if (!n_blocks) return;
    if (layer == m->config.n_layers) layer = UINT32_MAX;
    push(m, (kvf_profile_event){.kind = (uint32_t)kind,
                                .layer = layer,
                                .seq = seq,
                                .n_blocks = n_blocks,
                                .block = block,
                                .other = KVF_NO_BLOCK});
}

/* ---- Blocks ---------------------------------------------------------------------------------------- */

static void touch(kvf__profile *p, uint32_t id) {
    if (p->blocks[id].touched) return;
    p->blocks[id].touched = true;
    p->touched[p->n_touched++] = id;
}

static uint32_t class_of(kvf_manager *m, uint32_t id) { return (uint32_t)(kvf__pool_of(m->blocks, id) - m->blocks); }

/* Indexed by kvf__cause. */
static const size_t cause_words[] = {WORD(freed_by_end),     WORD(freed_by_compaction), WORD(freed_by_rollback),
                                     WORD(freed_by_release), WORD(freed_by_eviction),   WORD(freed_by_swap),
                                     WORD(freed_by_window),  WORD(freed_by_adoption),   WORD(freed_by_removal)};

static void fell_free(kvf_manager *m, uint32_t id) {
    kvf__profile *p = m->profile;
    kvf__profile_block *b = &p->blocks[id];
    count(p, WORD(lifetime), p->now - b->born);
    count(p, WORD(idle_time), p->now - b->used);
    add(p, WORD(freed_blocks), 1);
    add(p, cause_words[b->cause], 1);
    if (b->cause == KVF__CAUSE_COMPACTION && !b->idle) p->freed.of[class_of(m, id)]++;
    if (b->layer < m->config.n_layers) add(p, LAYER_WORD(b->layer, freed_blocks), 1);
    p->counts[b->layer].held -= !b->idle;
    p->counts[b->layer].cached -= b->idle;
    p->counts[b->layer].shared -= b->shared;
    b->live = b->idle = b->shared = b->fresh = false;
    b->born = 1;
    b->used = p->now;
}

static void gone(kvf__profile *p, uint32_t id, uint32_t seq, kvf__cause cause) {
    kvf__profile_block *b = &p->blocks[id];
    if (!b->live || b->gone) return;
    b->gone = true;
    b->seq = seq;
    b->cause = (uint8_t)cause;
    p->gone[p->n_gone_blocks++] = id;
}

/* A block that does not become free now has a holder. The holder that releases it later sets the cause. A copy sets none; then
 * the cause set here counts. */
void kvf__profile_gone(void *ctx, uint32_t id, kvf__gone_why why, bool fell_free) {
    static const kvf__cause causes[] = {KVF__CAUSE_EVICTION, KVF__CAUSE_ADOPTION, KVF__CAUSE_REMOVAL};
    kvf__profile *p = ctx;
    if (fell_free)
        gone(p, id, UINT32_MAX, causes[why]);
    else
        p->blocks[id].cause = (uint8_t)causes[why];
}
void kvf__profile_dropped(kvf__profile *p, uint32_t id, uint32_t seq) { gone(p, id, seq, KVF__CAUSE_WINDOW); }

/* Begins a call's report. Blocks that became free within the call come first; they may have been taken again since. */
static void begin(kvf_manager *m) {
    kvf__profile *p = m->profile;
    open_call(m);
    for (uint32_t i = 0; i < p->n_gone_blocks; i++) {
        uint32_t id = p->gone[i];
        p->blocks[id].gone = false;
        fell_free(m, id);
        push_blocks(m, KVF_PROFILE_FREE, p->blocks[id].layer, p->blocks[id].seq, id, 1);
    }
    p->n_gone_blocks = 0;
}

/* A table or handle is a new holder of the block. True if the block was taken for it, false if it had a holder already. */
static bool gained(kvf_manager *m, uint32_t id, uint32_t layer) {
    kvf__profile *p = m->profile;
    kvf__profile_block *b = &p->blocks[id];
    touch(p, id);
    if (b->live) {
        count(p, WORD(reuse_gap), p->now - b->used);
        add(p, WORD(shared_blocks), 1);
        b->used = p->now;
        return false;
    }
    if (b->born) count(p, WORD(free_gap), p->now - b->used);
    b->born = b->used = p->now;
    b->layer = layer;
    b->live = true;
    p->counts[layer].held++;
    add(p, WORD(taken_blocks), 1);
    if (layer < m->config.n_layers) add(p, LAYER_WORD(layer, taken_blocks), 1);
    return true;
}

static void lost(kvf_manager *m, uint32_t id, uint32_t seq, kvf__cause cause) {
    kvf__profile_block *b = &m->profile->blocks[id];
    b->seq = seq;
    b->cause = (uint8_t)cause;
    touch(m->profile, id);
}

/* Whether a live block is free now. Otherwise updates whether it is held or idle in the cache. */
static bool became_free(kvf_manager *m, uint32_t id) {
    kvf__profile_block *b = &m->profile->blocks[id];
    kvf__profile_count *count_of = &m->profile->counts[b->layer];
    bool held = kvf__pool_refs(m->blocks, id) != 0;
    if (!held && kvf__pool_node(m->blocks, id) == KVF_NO_BLOCK) return true;
    if (b->idle == !held) return false;
    b->idle = !held;
    if (b->idle && b->cause == KVF__CAUSE_COMPACTION) {
        m->profile->freed.of[class_of(m, id)]++;
        b->cause = KVF__CAUSE_REMOVAL; /* counted here once; its removal from the cache will have its own cause */
    }
    count_of->held += held ? 1u : UINT64_MAX; /* one more, or one less */
    count_of->cached += held ? UINT64_MAX : 1u;
    return false;
}

/* Evaluates the touched blocks, when the call has made all its changes. */
static void settle(kvf_manager *m) {
    kvf__profile *p = m->profile;
    uint32_t layer = 0, seq = 0, first = KVF_NO_BLOCK, n = 0; /* a run of blocks that became free */
    for (uint32_t i = 0; i < p->n_touched; i++) {
        uint32_t id = p->touched[i];
        kvf__profile_block *b = &p->blocks[id];
        b->touched = false;
        bool shared = kvf__pool_holders(m->blocks, id) > 1;
        if (shared != b->shared) p->counts[b->layer].shared += shared ? 1u : UINT64_MAX; /* one more, or one less */
        b->shared = shared;
        if (!b->live || !became_free(m, id)) continue;
        fell_free(m, id);
        if (n && (b->layer != layer || b->seq != seq)) {
            push_blocks(m, KVF_PROFILE_FREE, layer, seq, first, n);
            n = 0;
        }
        if (!n++) layer = b->layer, seq = b->seq, first = id;
    }
    push_blocks(m, KVF_PROFILE_FREE, layer, seq, first, n);
    p->n_touched = 0;
}

/* Reports the nodes added to and removed from the prefix cache since the last call. */
static void cache_events(kvf_manager *m) {
    kvf__profile *p = m->profile;
    const kvf_prefix_stats *now = &m->cache.stats;
    uint64_t stored = now->stored - p->n_stored, gone = now->evicted + now->removed - p->n_gone;
    p->n_stored = now->stored;
    p->n_gone = now->evicted + now->removed;
    push_blocks(m, KVF_PROFILE_STORE, UINT32_MAX, UINT32_MAX, KVF_NO_BLOCK, (uint32_t)(stored * m->seq_tables));
    push_blocks(m, KVF_PROFILE_EVICT, UINT32_MAX, UINT32_MAX, KVF_NO_BLOCK, (uint32_t)(gone * m->seq_tables));
}

/* Updates evicted_bytes and freed_bytes. */
static void byte_figures(kvf_manager *m) {
    kvf__profile *p = m->profile;
    uint64_t bs = m->config.block_size, evicted_bytes = 0, freed_bytes = 0, taken_bytes = 0;
    kvf__counts evicted = {{0}};
    evicted.of[0] = get(p, WORD(evicted_slots));
    if (m->layer_class) {
        evicted.of[0] = 0;
        for (uint32_t l = 0; l < m->config.n_layers; l++)
            evicted.of[m->layer_class[l]] += get(p, LAYER_WORD(l, evicted_slots));
    }
    for (uint32_t i = 0; i < m->config.n_classes; i++) {
        uint64_t bytes = m->classes[i].block_bytes, n = evicted.of[i];
        evicted_bytes += n / bs * bytes + n % bs * bytes / bs;
        freed_bytes += p->freed.of[i] * bytes;
        taken_bytes += p->fresh_taken.of[i] * bytes;
    }
    put(p, WORD(evicted_bytes), evicted_bytes);
    uint64_t net = freed_bytes > taken_bytes ? freed_bytes - taken_bytes : 0;
    if (net > get(p, WORD(freed_bytes))) put(p, WORD(freed_bytes), net);
}

static void end(kvf_manager *m) {
    kvf__profile *p = m->profile;
    settle(m);
    if (m->cache.on) cache_events(m);
    figures(m);
    layer_figures(m);
    byte_figures(m);
    uint64_t version = atomic_load_explicit(&p->version, memory_order_relaxed);
    atomic_store_explicit(&p->version, version + 1, memory_order_release);
}

/* ---- Tables ------------------------------------------------------------------------------------------ */

/* Compares the entries of a table from `from` on with the profile's copy, and reports the differences. */
static void compare(kvf_manager *m, uint32_t t, uint32_t from, kvf__cause cause) {
    kvf__profile *p = m->profile;
    kvf__profile_table *was = &p->tables[t];
    uint32_t *old = p->rows + (size_t)t * m->row_capacity;
    const uint32_t *row = kvf__row(m, t);
    uint32_t seq = t / m->seq_tables, layer = t / m->n_groups % m->config.n_layers, end_new = kvf__n_blocks(m, t);
    uint32_t end_old = was->n_blocks, n_new = 0, n_shared = 0, first_new = KVF_NO_BLOCK, first_shared = KVF_NO_BLOCK;
    for (uint32_t i = from; i < KVF__MAX(end_old, end_new); i++) {
        uint32_t before = i < end_old ? old[i] : KVF_NO_BLOCK, now = i < end_new ? row[i] : KVF_NO_BLOCK;
        if (before == now) continue;
        if (now != KVF_NO_BLOCK && p->blocks[now].live && p->blocks[now].fresh) {
            p->blocks[now].fresh = false;
            touch(p, now);
        } else if (now != KVF_NO_BLOCK && gained(m, now, layer)) {
            if (!n_new++) first_new = now;
        } else if (now != KVF_NO_BLOCK) {
            if (!n_shared++) first_shared = now;
        }
        if (before != KVF_NO_BLOCK) lost(m, before, seq, cause);
        if (i < end_new) old[i] = now;
    }
    push_blocks(m, KVF_PROFILE_ALLOC, layer, seq, first_new, n_new);
    push_blocks(m, KVF_PROFILE_SHARE, layer, seq, first_shared, n_shared);
    *was = (kvf__profile_table){m->n_slots[t], end_new};
}

static void push_copy(kvf_manager *m, const kvf_copy *c, uint32_t layer, uint32_t seq) {
    bool block = c->kind == KVF_COPY_BLOCK;
    add(m->profile, block ? WORD(copied_blocks) : WORD(copied_pages), 1);
    if (!block) return;
    push(m, (kvf_profile_event){
                .kind = KVF_PROFILE_COPY, .layer = layer, .seq = seq, .n_blocks = 1, .block = c->src, .other = c->dst});
}

void kvf__profile_figures(kvf_manager *m) {
    begin(m);
    end(m);
}

/* Repeats on the profile's copy the drop of leading blocks that an append makes in a window's table. */
static void follow_window(kvf_manager *m, uint32_t t) {
    kvf__profile *p = m->profile;
    kvf__profile_table *was = &p->tables[t];
    uint32_t *old = p->rows + (size_t)t * m->row_capacity;
    uint32_t n = kvf__window_drops(m, kvf__window_of(m, t % m->seq_tables), was->n_slots);
    if (!n) return;
    for (uint32_t i = 0; i < n; i++) lost(m, old[i], t / m->seq_tables, KVF__CAUSE_WINDOW);
    was->n_blocks -= n;
    was->n_slots -= n * m->config.block_size;
    memmove(old, old + n, was->n_blocks * sizeof *old);
}

void kvf__profile_appended(kvf_manager *m, const kvf_append_item *items, uint32_t n_items, const kvf_copy_list *copies,
                           uint32_t first_copy) {
    kvf__profile *p = m->profile;
    uint32_t copy = first_copy;
    begin(m);
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t seq = 0;
        if (kvf__seq_find(m, items[i].seq, &seq)) continue; /* cannot happen: the append has found it */
        for (uint32_t t = seq * m->seq_tables; t < (seq + 1) * m->seq_tables; t++) {
            if (m->windowed) follow_window(m, t);
            uint32_t n_blocks = p->tables[t].n_blocks, n_slots = p->tables[t].n_slots;
            uint32_t last = n_blocks ? n_blocks - 1 : 0;
            compare(m, t, last, KVF__CAUSE_END);
            if (n_slots % m->config.block_size) p->blocks[kvf__row(m, t)[last]].used = p->now;
            /* Copies come in the order of the tables. */
            if (!copies || copy == copies->n || !n_blocks || copies->items[copy].dst != kvf__row(m, t)[last]) continue;
            push_copy(m, &copies->items[copy++], t / m->n_groups % m->config.n_layers, seq);
        }
    }
    end(m);
}

static void all_tables(kvf_manager *m, uint32_t index, kvf__cause cause) {
    for (uint32_t t = index * m->seq_tables; t < (index + 1) * m->seq_tables; t++) compare(m, t, 0, cause);
}

void kvf__profile_seq(kvf_manager *m, uint32_t index, kvf__cause cause) {
    begin(m);
    all_tables(m, index, cause);
    end(m);
}

void kvf__profile_forked(kvf_manager *m, uint32_t index, const kvf_copy_list *copies, uint32_t first_copy) {
    begin(m);
    all_tables(m, index, KVF__CAUSE_END);
    for (uint32_t i = first_copy; copies && i < copies->n; i++) push_copy(m, &copies->items[i], UINT32_MAX, index);
    end(m);
}

void kvf__profile_swapped(kvf_manager *m, const kvf_seq *seqs, uint32_t n_seqs, const kvf_copy_list *copies,
                          uint32_t first_copy) {
    uint32_t n_out = 0, n_in = 0;
    begin(m);
    for (uint32_t i = 0; i < n_seqs; i++) all_tables(m, kvf__seq_index(seqs[i]), KVF__CAUSE_SWAP);
    for (uint32_t i = first_copy; copies && i < copies->n; i++) {
        n_out += copies->items[i].kind == KVF_COPY_BLOCK_OUT;
        n_in += copies->items[i].kind == KVF_COPY_BLOCK_IN;
    }
    add(m->profile, WORD(swapped_out_blocks), n_out);
    add(m->profile, WORD(swapped_in_blocks), n_in);
    if (n_out + n_in)
        push(m, (kvf_profile_event){.kind = KVF_PROFILE_SWAP,
                                    .layer = UINT32_MAX,
                                    .seq = n_seqs == 1 ? kvf__seq_index(seqs[0]) : UINT32_MAX,
                                    .n_blocks = n_out + n_in,
                                    .block = KVF_NO_BLOCK,
                                    .other = n_in != 0});
    end(m);
}

/* Reports blocks of the prefix cache that are copied to the host or from there. */
static void push_moved(kvf_manager *m, uint32_t seq, const kvf_copy_list *copies, uint32_t first_copy, bool in) {
    uint32_t n = copies ? copies->n - first_copy : 0;
    if (!n) return;
    add(m->profile, in ? WORD(loaded_blocks) : WORD(offloaded_blocks), n);
    push(m, (kvf_profile_event){.kind = KVF_PROFILE_SWAP,
                                .layer = UINT32_MAX,
                                .seq = seq,
                                .n_blocks = n,
                                .block = KVF_NO_BLOCK,
                                .other = in});
}

void kvf__profile_attached(kvf_manager *m, uint32_t index, const kvf_copy_list *copies, uint32_t first_copy) {
    begin(m);
    all_tables(m, index, KVF__CAUSE_END);
    push_moved(m, index, copies, first_copy, true);
    end(m);
}

void kvf__profile_offloaded(kvf_manager *m, const kvf_copy_list *copies, uint32_t first_copy) {
    begin(m);
    for (uint32_t i = first_copy; i < copies->n; i++) touch(m->profile, copies->items[i].src);
    push_moved(m, UINT32_MAX, copies, first_copy, false);
    end(m);
}

void kvf__profile_copied(kvf_manager *m, const kvf_copy_list *copies) {
    begin(m);
    for (uint32_t i = 0; i < copies->n; i++) {
        uint32_t kind = copies->items[i].kind;
        if (kind == KVF_COPY_BLOCK || kind == KVF_COPY_BLOCK_OUT) touch(m->profile, copies->items[i].src);
        if (kind == KVF_COPY_BLOCK || kind == KVF_COPY_BLOCK_IN) touch(m->profile, copies->items[i].dst);
    }
    end(m);
}

/* ---- Compaction ---------------------------------------------------------------------------------------- */

void kvf__profile_begun(kvf_manager *m) {
    kvf__profile *p = m->profile;
    begin(m);
    p->begun = p->now;
    p->n_fresh = 0;
    for (uint32_t e = 0; e < m->n_entries; e++)
        for (uint32_t t = m->entries[e].table; t < m->entries[e].table + m->n_groups; t++) {
            uint32_t layer = t / m->n_groups % m->config.n_layers, n = m->tables[t].n_fresh;
            for (uint32_t i = 0; i < n; i++) {
                (void)gained(m, m->fresh[p->n_fresh + i], layer);
                p->blocks[m->fresh[p->n_fresh + i]].fresh = true;
            }
            if (n) push_blocks(m, KVF_PROFILE_ALLOC, layer, t / m->seq_tables, m->fresh[p->n_fresh], n);
            p->n_fresh += n;
            p->fresh_taken.of[kvf__class_of(m, t)] += n;
        }
    end(m);
}

/* Reports one (sequence, layer) of a compaction. */
static void committed(kvf_manager *m, uint32_t first) {
    kvf__profile *p = m->profile;
    kvf_profile_event event = {.kind = KVF_PROFILE_COMPACT,
                               .duration = p->now - p->begun,
                               .layer = first / m->n_groups % m->config.n_layers,
                               .seq = first / m->seq_tables,
                               .block = KVF_NO_BLOCK,
                               .other = KVF_NO_BLOCK,
                               .slots_before = p->tables[first].n_slots,
                               .slots_after = m->n_slots[first]};
    uint64_t evicted = 0;
    for (uint32_t t = first; t < first + m->n_groups; t++) {
        evicted += p->tables[t].n_slots - m->n_slots[t];
        event.slots_before = KVF__MAX(event.slots_before, p->tables[t].n_slots);
        event.slots_after = KVF__MAX(event.slots_after, m->n_slots[t]);
        event.n_blocks += p->tables[t].n_blocks - kvf__n_blocks(m, t);
        compare(m, t, 0, KVF__CAUSE_COMPACTION);
        for (uint32_t i = 0; i < kvf__n_blocks(m, t); i++) p->blocks[kvf__row(m, t)[i]].used = p->now;
    }
    add(p, WORD(compactions), 1);
    add(p, WORD(evicted_slots), evicted);
    add(p, LAYER_WORD(event.layer, evicted_slots), evicted);
    push(m, event);
}

void kvf__profile_committed(kvf_manager *m) {
    begin(m);
    for (uint32_t e = 0; e < m->n_entries; e++) committed(m, m->entries[e].table);
    m->profile->n_fresh = 0;
    end(m);
}

void kvf__profile_cancelled(kvf_manager *m) {
    kvf__profile *p = m->profile;
    begin(m);
    for (uint32_t i = 0; i < p->n_fresh; i++) {
        lost(m, m->fresh[i], UINT32_MAX, KVF__CAUSE_RELEASE);
        p->blocks[m->fresh[i]].fresh = false;
        p->fresh_taken.of[class_of(m, m->fresh[i])]--;
    }
    p->n_fresh = 0;
    end(m);
}

/* ---- Handles ---------------------------------------------------------------------------------------------- */

kvf_status kvf__profile_taken(kvf_manager *m, uint32_t id) {
    begin(m);
    (void)gained(m, id, m->config.n_layers);
    push_blocks(m, KVF_PROFILE_ALLOC, UINT32_MAX, UINT32_MAX, id, 1);
    end(m);
    return KVF_OK;
}

kvf_status kvf__profile_held(kvf_manager *m, uint32_t id) {
    begin(m);
    (void)gained(m, id, m->config.n_layers);
    push_blocks(m, KVF_PROFILE_SHARE, m->profile->blocks[id].layer, UINT32_MAX, id, 1);
    end(m);
    return KVF_OK;
}

kvf_status kvf__profile_released(kvf_manager *m, uint32_t id) {
    begin(m);
    lost(m, id, UINT32_MAX, KVF__CAUSE_RELEASE);
    end(m);
    return KVF_OK;
}

/* ---- Audit -------------------------------------------------------------------------------------------------- */

#define BROKEN(...) kvf__fail(err, KVF_E_CORRUPT, "profile: " __VA_ARGS__)

static kvf_status audit_tables(const kvf_manager *m, kvf_error *err) {
    const kvf__profile *p = m->profile;
    for (uint32_t t = 0; t < m->config.max_seqs * m->seq_tables; t++) {
        uint32_t n_slots = m->n_slots[t], n_blocks = kvf__n_blocks(m, t);
        const kvf__profile_table *was = &p->tables[t];
        if (n_slots != was->n_slots || n_blocks != was->n_blocks)
            return BROKEN("table %u: %u slots in %u blocks, has %u in %u", t, was->n_slots, was->n_blocks, n_slots,
                          n_blocks);
        for (uint32_t i = 0; i < n_blocks; i++)
            if (kvf__row(m, t)[i] != p->rows[(size_t)t * m->row_capacity + i])
                return BROKEN("table %u: entry %u is another block", t, i);
    }
    return KVF_OK;
}

kvf_status kvf__profile_audit(const kvf_manager *m, kvf_error *err) {
    const kvf__profile *p = m->profile;
    kvf_status s = audit_tables(m, err);
    if (s) return s;
    uint64_t held = 0, idle = 0, shared = 0, counted = 0, counted_shared = 0;
    for (uint32_t i = 0; i < m->config.n_blocks; i++) {
        const kvf__profile_block *b = &p->blocks[i];
        if (b->live != (kvf__pool_refs(m->blocks, i) || kvf__pool_node(m->blocks, i) != KVF_NO_BLOCK) ||
            b->shared != (kvf__pool_holders(m->blocks, i) > 1))
            return BROKEN("block %u: live %d, shared %d, with %u references", i, b->live, b->shared,
                          kvf__pool_refs(m->blocks, i));
        if (b->touched || b->gone || (b->live && b->idle != !kvf__pool_refs(m->blocks, i)) ||
            b->layer > m->config.n_layers)
            return BROKEN("block %u: was not settled", i);
        held += b->live && !b->idle;
        idle += b->idle;
        shared += b->shared;
    }
    for (uint32_t l = 0; l <= m->config.n_layers; l++) {
        counted += p->counts[l].held;
        counted_shared += p->counts[l].shared;
    }
    if (held != counted || shared != counted_shared || held != get(p, WORD(held)) || shared != get(p, WORD(shared)))
        return BROKEN("%llu held and %llu shared, the layers' sums are %llu and %llu", (unsigned long long)held,
                      (unsigned long long)shared, (unsigned long long)counted, (unsigned long long)counted_shared);
    uint64_t taken = get(p, WORD(taken_blocks)), freed = get(p, WORD(freed_blocks)), by_cause = 0;
    for (size_t i = 0; i < sizeof cause_words / sizeof *cause_words; i++) by_cause += get(p, cause_words[i]);
    if (by_cause != freed || get(p, WORD(freed_by_eviction)) != m->cache.stats.evicted_blocks)
        return BROKEN("%llu freed, %llu by all causes; %llu evicted, the prefix cache says %llu",
                      (unsigned long long)freed, (unsigned long long)by_cause,
                      (unsigned long long)get(p, WORD(freed_by_eviction)),
                      (unsigned long long)m->cache.stats.evicted_blocks);
    if (taken - freed != held + idle || idle != get(p, WORD(cached)) ||
        get(p, WORD(promised)) != kvf__pools_occupancy(m, m->blocks).n_promised || get(p, WORD(seqs)) != m->n_seqs)
        return BROKEN("%llu taken and %llu freed, %llu held", (unsigned long long)taken, (unsigned long long)freed,
                      (unsigned long long)held);
    return KVF_OK;
}
