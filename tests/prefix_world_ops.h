/* The operations of a world (prefix_world.h, which includes this): each on the manager and on the model. */
#ifndef KVF_TEST_PREFIX_WORLD_OPS_H
#define KVF_TEST_PREFIX_WORLD_OPS_H

/* ---- Growth ------------------------------------------------------------------------------------------------ */

/* Leading blocks that an append drops: all their positions are at or before next_pos - window. */
static inline uint32_t drops(const world *w, const wseq *s, uint32_t k) {
    uint32_t window = w->windows[k / w->m->n_groups], first = s->n - s->n_slots[k], n = 0;
    while (window && (n + 1) * BS <= s->n_slots[k] && first + (n + 1) * BS - 1 + window <= s->n) n++;
    return n;
}

static inline void drop_leading(world *w, wseq *s) {
    for (uint32_t k = 0; k < w->n_tables; k++) {
        uint32_t n = drops(w, s, k) * BS;
        s->n_slots[k] -= n;
        memmove(s->slots[k], s->slots[k] + n, s->n_slots[k] * sizeof s->slots[k][0]);
        /* Blocks that are pinned or, with growth, shared are given up for nothing. */
        if (n && (w->list.n || s->growth)) s->secure = false;
        w->n_dropped += n / BS;
    }
}

static inline bool is_promised(const world *w, const wseq *s, uint32_t n_tokens) {
    if (!s->secure) return false;
    for (uint32_t k = 0; k < w->n_tables; k++)
        if ((s->n_slots[k] + n_tokens + BS - 1) / BS - drops(w, s, k) > s->reserve[k] ||
            (drops(w, s, k) && (w->list.n || s->growth)))
            return false;
    return true;
}

static inline bool may_append(const world *w, const wseq *s, uint32_t n_tokens) {
    if (!s->alive || s->swapped || s->compacting || s->n + n_tokens > N_POS || w->list.n + 2 * N_TABLES_MAX > N_COPIES)
        return false;
    for (uint32_t k = 0; k < w->n_tables; k++)
        if (s->n_slots[k] - drops(w, s, k) * BS + n_tokens > N_SLOTS) return false;
    return true;
}

/* The next tokens: mostly those of its prompt. */
static inline void choose_tokens(world *w, wseq *s, uint32_t n_tokens, bool random) {
    const prompt *p = &w->prompts[s->prompt];
    for (uint32_t i = s->n; i < s->n + n_tokens; i++)
        s->tokens[i] = random && rnd(w, 16) == 0 ? rnd(w, 3) : p->tokens[i];
    v_fill(p, s->tokens, s->n, s->n + n_tokens, s->v);
}

static inline void op_append(world *w, uint32_t q, uint32_t n_tokens, uint32_t q2, bool random) {
    wseq *s = &w->seqs[q], *s2 = q2 < N_SEQS && q2 != q && may_append(w, &w->seqs[q2], n_tokens) ? &w->seqs[q2] : NULL;
    kvf_append_item items[2] = {{s->handle, n_tokens}, {s2 ? s2->handle : 0, n_tokens}};
    uint64_t before = fingerprint(w), evicted = w->m->cache.stats.evicted;
    uint32_t n_copies = w->list.n, missing = 99;
    bool promised = is_promised(w, s, n_tokens) && (!s2 || is_promised(w, s2, n_tokens));
    kvf_status can = kvf_can_append(w->m, items, s2 ? 2 : 1, &missing);
    MUST(fingerprint(w) == before, "can_append has changed something", 0, 0);
    kvf_status status = kvf_append(w->m, items, s2 ? 2 : 1, &w->list);
    MUST(can == status && (can == KVF_OK) == (missing == 0), "can_append says otherwise", can, status);
    MUST(!promised || status == KVF_OK, "a promised append has failed", q, n_tokens);
    if (went(w, status, before)) {
        if (w->m->cache.stats.evicted != evicted)
            MUST(fewest_free(w) < w->n_tables, "evicted though blocks were free", fewest_free(w), 0);
        drop_leading(w, s);
        if (s2) drop_leading(w, s2);
        run_copies(w, n_copies);
        choose_tokens(w, s, n_tokens, random);
        write_slots(w, s, n_tokens);
        if (s2) choose_tokens(w, s2, n_tokens, random), write_slots(w, s2, n_tokens);
    }
    check_all(w, NULL);
}

static inline bool any_covered(const world *w, const wseq *s) {
    for (uint32_t k = 0; k < w->n_tables; k++)
        if (kvf__tail_covered(w->m, kvf__seq_index(s->handle) * w->n_tables + k)) return true;
    return false;
}

static inline void op_rollback(world *w, uint32_t q, uint32_t n_tokens) {
    wseq *s = &w->seqs[q];
    if (!s->alive || s->swapped || s->compacting) return;
    for (uint32_t k = 0; k < w->n_tables; k++)
        if (s->n_slots[k] < n_tokens) return;
    for (uint32_t k = 0; k < w->n_tables; k++) {
        uint32_t window = w->windows[k / w->m->n_groups];
        if (!window || s->n_slots[k] - n_tokens >= KVF__MIN(window - 1, s->n - n_tokens)) continue;
        MUST(kvf_seq_rollback(w->m, s->handle, n_tokens) == KVF_E_INVALID, "rollback of a window", n_tokens, k);
        return;
    }
    MUST(!kvf_seq_rollback(w->m, s->handle, n_tokens), "rollback", n_tokens, 0);
    for (uint32_t k = 0; k < w->n_tables; k++) s->n_slots[k] -= n_tokens;
    s->n -= n_tokens;
    /* What is given up but pinned or, with growth, shared does not fall free and may not be had again. */
    if (w->list.n || s->growth || any_covered(w, s)) s->secure = false;
    check_all(w, NULL);
}

/* ---- Sequences ------------------------------------------------------------------------------------------------- */

static inline void op_free(world *w, uint32_t q) {
    wseq *s = &w->seqs[q];
    if (!s->alive) return;
    if (s->compacting) {
        w->n_items = 0;
        for (uint32_t i = 0; i < N_SEQS; i++) w->seqs[i].compacting = false;
    }
    MUST(!kvf_seq_free(w->m, s->handle), "free", q, 0);
    s->alive = s->compacting = s->swapped = false;
    check_all(w, NULL);
}

static inline void op_fork(world *w, uint32_t q, uint32_t to) {
    wseq *s = &w->seqs[q];
    if (!s->alive || s->swapped || s->compacting || w->seqs[to].alive || w->list.n + 64 > N_COPIES) return;
    uint64_t before = fingerprint(w);
    kvf_seq child = 0;
    uint32_t n_copies = w->list.n;
    if (went(w, kvf_seq_fork(w->m, s->handle, &w->list, &child), before)) {
        run_copies(w, n_copies);
        w->seqs[to] = *s;
        w->seqs[to].handle = child;
        s->secure = false;
    }
    check_all(w, NULL);
}

static inline void fill_reserve(const world *w, uint32_t n_slots, bool growth, uint32_t *slots, kvf_reserve *r) {
    for (uint32_t k = 0; k < w->n_tables; k++) slots[k] = KVF__MIN(n_slots + k, (uint32_t)N_SLOTS);
    *r = (kvf_reserve){.struct_size = sizeof *r, .n_slots = slots, .growth = growth};
}
static inline void note_reserve(const world *w, wseq *s, const uint32_t *slots, bool growth) {
    s->secure = true;
    s->growth = growth;
    for (uint32_t k = 0; k < w->n_tables; k++) s->reserve[k] = (slots[k] + BS - 1) / BS;
}

static inline void op_reserve(world *w, uint32_t q, uint32_t n_slots, bool growth) {
    wseq *s = &w->seqs[q];
    uint32_t slots[N_TABLES_MAX];
    kvf_reserve r;
    if (!s->alive || s->swapped || s->compacting) return;
    uint64_t before = fingerprint(w);
    fill_reserve(w, n_slots, growth, slots, &r);
    if (went(w, kvf_seq_reserve(w->m, s->handle, &r), before)) note_reserve(w, s, slots, growth);
    check_all(w, NULL);
}

static inline void op_scores(world *w, uint32_t q) {
    wseq *s = &w->seqs[q];
    if (!s->alive || s->swapped || s->scored) return;
    MUST(!kvf_seq_take_scores(w->m, s->handle, s->n_slots), "take_scores", q, 0);
    s->scored = true;
    check_all(w, NULL);
}

/* ---- Lookup and attach ------------------------------------------------------------------------------------------- */

static inline uint32_t common_v(const uint64_t *a, const uint64_t *b, uint32_t n) {
    uint32_t i = 0;
    while (i < n && a[i] == b[i]) i++;
    return i;
}

/* The longest match by looking at every node. */
static inline uint32_t naive_lookup(const world *w, const uint64_t *v, uint32_t n, const kvf_prefix_options *o) {
    const kvf__cache *c = &w->m->cache;
    uint32_t limit = o->max_tokens ? KVF__MIN(o->max_tokens, n) : n - 1, whole = 0, exact = 0, partial = 0, best = 0;
    limit = KVF__MIN(limit, (uint32_t)N_SLOTS);
    for (uint32_t i = 0; i < c->n_max; i++) {
        const kvf__node *x = &c->nodes[i];
        uint32_t begin = x->depth * BS, end = begin + x->n_tokens;
        if (!x->n_tokens || begin >= n || (!o->host && !kvf__is_here(c, i))) continue;
        uint32_t same = common_v(w->nodes[i].v, v + begin, KVF__MIN(x->n_tokens, n - begin));
        if (same == x->n_tokens) {
            if (x->n_tokens == BS) whole = KVF__MAX(whole, end);
            if (end == n) exact = n;
            if (x->n_pages && ((end <= limit && !x->whole_only) || (end == n && limit >= n - 1)))
                best = KVF__MAX(best, KVF__MIN(end, limit));
        }
        if (same) partial = KVF__MAX(partial, begin + same);
    }
    if (o->need_snapshot) return best;
    uint32_t known = KVF__MAX(whole, exact);
    if (o->partial) known = KVF__MAX(known, partial);
    known = KVF__MIN(known, limit);
    return o->partial ? known : known - known % BS;
}

static inline kvf_prefix_match lookup(world *w, const prompt *p, uint32_t n, const kvf_prefix_options *o, uint64_t *v) {
    kvf_prefix_key key = key_of(p, p->tokens, n);
    kvf_prefix_match match = {.struct_size = sizeof match};
    uint64_t before = fingerprint(w);
    v_fill(p, p->tokens, 0, n, v);
    MUST(!kvf_prefix_lookup(w->m, &key, o, &match), "lookup", n, 0);
    MUST(fingerprint(w) == before, "lookup has changed something", 0, 0);
    uint32_t wanted = naive_lookup(w, v, n, o);
    if (o->partial && w->extras) /* a block whose extras differ later on is not looked into */
        MUST(match.n_tokens <= wanted && match.n_tokens >= wanted / BS * BS, "lookup", match.n_tokens, wanted);
    else
        MUST(match.n_tokens == wanted, "lookup", match.n_tokens, wanted);
    MUST(match.n_tokens == match.n_blocks * BS + match.n_partial, "match", match.n_tokens, match.n_blocks);
    return match;
}

static inline void read_snapshot(world *w, const kvf_prefix_match *match, const uint64_t *v) {
    uint32_t ids[N_PAGES], n = 0;
    if (!match->n_snapshot_pages) return;
    MUST(!kvf_prefix_snapshot_get(w->m, match, ids, N_PAGES, &n), "snapshot_get", 0, 0);
    MUST(n == match->n_snapshot_pages, "snapshot_get", n, match->n_snapshot_pages);
    for (uint32_t i = 0; i < n; i++)
        MUST(w->pages[ids[i]] == mix(v[match->n_snapshot_tokens - 1], i), "a snapshot of other tokens", ids[i], i);
}

/* A new sequence over what is cached of n tokens of a prompt. reserve 0: none. */
static inline void op_start(world *w, uint32_t q, uint32_t which, uint32_t n, kvf_prefix_options o, uint32_t reserve,
                            bool growth) {
    wseq *s = &w->seqs[q];
    const prompt *p = &w->prompts[which];
    uint64_t v[N_POS];
    uint32_t slots[N_TABLES_MAX];
    kvf_reserve r;
    kvf_seq handle = 0;
    if (s->alive) return;
    kvf_prefix_match match = lookup(w, p, n, &o, v);
    MUST(!kvf_seq_create(w->m, &handle), "create", 0, 0);
    uint64_t before = fingerprint(w);
    kvf_prefix_key key = key_of(p, p->tokens, n);
    if (reserve) fill_reserve(w, reserve, growth, slots, &r);
    uint32_t n_copies = w->list.n;
    if (match.n_host_blocks)
        MUST(kvf_prefix_attach(w->m, handle, &key, &match, reserve ? &r : NULL, NULL) == KVF_E_LIMIT &&
                 fingerprint(w) == before,
             "an attach without a list", match.n_host_blocks, 0);
    if (!went(w, kvf_prefix_attach(w->m, handle, &key, &match, reserve ? &r : NULL, &w->list), before)) {
        MUST(!kvf_seq_free(w->m, handle), "free", 0, 0);
        check_all(w, NULL);
        return;
    }
    MUST(w->list.n - n_copies == match.n_host_blocks, "copies from the host", w->list.n - n_copies,
         match.n_host_blocks);
    run_copies(w, n_copies);
    *s = (wseq){.handle = handle, .alive = true, .prompt = which, .n = match.n_tokens};
    memcpy(s->tokens, p->tokens, sizeof s->tokens);
    memcpy(s->v, v, n * sizeof *v);
    for (uint32_t k = 0; k < w->n_tables; k++) {
        s->n_slots[k] = match.n_tokens;
        for (uint32_t i = 0; i < match.n_tokens; i++) s->slots[k][i] = content(v[i], k);
        for (uint32_t i = 0; i * BS < match.n_tokens; i++)
            now_shared(w, kvf__row(w->m, kvf__seq_index(handle) * w->n_tables + k)[i], s);
    }
    if (reserve) note_reserve(w, s, slots, growth);
    w->n_hits += match.n_tokens != 0;
    w->n_hit_tokens += match.n_tokens;
    if (match.n_host_blocks)
        w->n_host_tokens += match.n_tokens - ((match.n_tokens + BS - 1) / BS - match.n_host_blocks / w->n_tables) * BS;
    MUST(w->m->cache.stats.host_hit_tokens == w->n_host_tokens, "host_hit_tokens", w->m->cache.stats.host_hit_tokens,
         w->n_host_tokens);
    MUST(w->m->cache.stats.hits == w->n_hits && w->m->cache.stats.hit_tokens == w->n_hit_tokens, "hits",
         w->m->cache.stats.hits, w->n_hits);
    read_snapshot(w, &match, v);
    check_all(w, NULL);
}

/* ---- Store and snapshots ------------------------------------------------------------------------------------------ */

/* Whether block d of a sequence is gone, or in a node that may not become another: then a store stops there. */
static inline bool is_taken(const world *w, const wseq *s, uint32_t d, uint32_t n_tokens) {
    const kvf__cache *c = &w->m->cache;
    uint32_t of = KVF__NO_NODE;
    for (uint32_t k = 0; k < w->n_tables; k++)
        if (d < (s->n - s->n_slots[k]) / BS) return true; /* a window has dropped it */
    for (uint32_t k = 0; k < w->n_tables; k++) {
        uint32_t at = d - (s->n - s->n_slots[k]) / BS;
        uint32_t node = c->node_of[kvf__row(w->m, kvf__seq_index(s->handle) * w->n_tables + k)[at]];
        if (node == KVF__NO_NODE || node == of) continue;
        if (of != KVF__NO_NODE || c->nodes[node].n_pages || c->nodes[node].n_tokens >= n_tokens) return true;
        of = node;
    }
    return false;
}

static inline void op_store(world *w, uint32_t q, uint32_t n_tokens, bool partial, uint32_t priority) {
    wseq *s = &w->seqs[q];
    if (!s->alive || s->swapped || !s->n || n_tokens > s->n) return;
    kvf_prefix_key key = key_of(&w->prompts[s->prompt], s->tokens, s->n);
    kvf_prefix_store_options o = {.struct_size = sizeof o,
                                  .flags = partial ? KVF_PREFIX_PARTIAL : 0,
                                  .priority = priority,
                                  .duration = priority % 5};
    uint64_t before = fingerprint(w);
    bool taken[N_POS / BS + 1];
    for (uint32_t d = 0; d <= n_tokens / BS; d++)
        taken[d] = !s->compacted && d * BS < n_tokens && is_taken(w, s, d, KVF__MIN((uint32_t)BS, n_tokens - d * BS));
    kvf_status status = kvf_prefix_store(w->m, s->handle, &key, n_tokens, &o, NULL);
    if (s->compacted || s->compacting) {
        MUST(status == KVF_E_STATE && fingerprint(w) == before, "store of a compacted sequence", status, 0);
        return;
    }
    MUST(status == KVF_OK, "store", status, 0);
    check_all(w, s);
    uint32_t known = 0; /* what is found now: all, but behind a block that could not be entered */
    kvf_prefix_options all = {.struct_size = sizeof all, .max_tokens = s->n};
    kvf_prefix_match match = {.struct_size = sizeof match};
    MUST(!kvf_prefix_lookup(w->m, &key, &all, &match), "lookup", 0, 0);
    while (known < n_tokens / BS && known < match.n_blocks) known++;
    if (known == N_SLOTS / BS) return; /* as far as a lookup goes */
    MUST(known == n_tokens / BS || taken[known], "a stored block is not found", known, n_tokens);
    if (partial && known == n_tokens / BS && n_tokens % BS && !taken[known]) {
        kvf_prefix_key exact = key_of(&w->prompts[s->prompt], s->tokens, n_tokens);
        MUST(!kvf_prefix_lookup(w->m, &exact, &all, &match) && match.whole, "a stored partial block is not found",
             n_tokens, match.n_tokens);
    }
}

static inline void op_snapshot(world *w, uint32_t q, uint32_t n_tokens, uint32_t flags) {
    wseq *s = &w->seqs[q];
    uint32_t ids[N_PAGES], n = 99;
    if (!s->alive || !n_tokens || n_tokens > s->n) return;
    kvf_prefix_key key = key_of(&w->prompts[s->prompt], s->tokens, s->n);
    uint64_t before = fingerprint(w);
    kvf_status status = kvf_prefix_snapshot_put(w->m, s->handle, &key, n_tokens, flags, ids, N_PAGES, &n);
    if (status == KVF_E_NOT_FOUND) {
        MUST(fingerprint(w) == before, "a failed call has changed something", 0, 0);
        return;
    }
    if (went(w, status, before)) {
        MUST(n == 0 || n == (n_tokens + BS - 1) / BS, "snapshot_put", n, n_tokens);
        for (uint32_t i = 0; i < n; i++) w->pages[ids[i]] = mix(s->v[n_tokens - 1], i);
    }
    check_all(w, NULL);
}

/* ---- Compaction ------------------------------------------------------------------------------------------------------ */

static inline void op_begin(world *w, uint32_t n_items, const uint32_t *q, const uint32_t *layer,
                            const uint32_t *n_keep) {
    if (w->n_items) return;
    uint64_t before = fingerprint(w);
    uint32_t n_groups = w->m->n_groups, n = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        wseq *s = &w->seqs[q[i]];
        bool good = s->alive && !s->swapped && n_keep[i];
        good &= !w->windows[layer[i]];
        for (uint32_t g = 0; good && g < n_groups; g++) good = s->n_slots[layer[i] * n_groups + g] > n_keep[i];
        for (uint32_t j = 0; good && j < n; j++) good = w->items[j].seq != s->handle || w->items[j].layer != layer[i];
        if (good) w->items[n++] = (kvf_compact_item){s->handle, layer[i], n_keep[i], NULL};
    }
    if (!n) return;
    bool needs = false; /* a block that somebody else holds; else it must succeed */
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t g = 0; g < n_groups; g++) {
            uint32_t t = kvf__seq_index(w->items[i].seq) * w->n_tables + w->items[i].layer * n_groups + g;
            for (uint32_t b = 0; b < kvf__n_blocks(w->m, t); b++)
                needs |= kvf__pool_refs(w->m->blocks, kvf__row(w->m, t)[b]) > 1;
        }
    kvf_status status = kvf_compact_begin(w->m, w->items, n, &w->compaction);
    MUST(needs || status == KVF_OK, "a private compaction has failed", n, status);
    if (went(w, status, before)) {
        w->n_items = n;
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t k = 0; k < N_SEQS; k++)
                if (w->seqs[k].alive && w->seqs[k].handle == w->items[i].seq) w->seqs[k].compacting = true;
    }
    check_all(w, NULL);
}

static inline wseq *seq_of(world *w, kvf_seq handle) {
    for (uint32_t k = 0; k < N_SEQS; k++)
        if (w->seqs[k].alive && w->seqs[k].handle == handle) return &w->seqs[k];
    return NULL;
}

/* Keeps an ascending choice of slots: into fresh blocks first, then in place. */
static inline void write_compacted(world *w, bool fresh) {
    uint32_t n_groups = w->m->n_groups;
    for (uint32_t i = 0; i < w->n_items; i++)
        for (uint32_t g = 0; g < n_groups; g++) {
            wseq *s = seq_of(w, w->items[i].seq);
            uint32_t k = w->items[i].layer * n_groups + g, t = kvf__seq_index(s->handle) * w->n_tables + k, n = 0;
            const uint32_t *row = w->compaction.dst_row[i * n_groups + g];
            if ((row != NULL) != fresh) continue;
            if (!row) row = kvf__row(w->m, t);
            for (uint32_t j = 0; n < w->items[i].n_keep; j++) {
                uint32_t left = s->n_slots[k] - j, wanted = w->items[i].n_keep - n;
                if (rnd(w, left) >= wanted) continue;
                s->slots[k][n] = s->slots[k][j];
                w->sim[row[n / BS]][n % BS] = s->slots[k][n];
                n++;
            }
            s->n_slots[k] = n;
        }
}

static inline void op_commit(world *w) {
    if (!w->n_items) return;
    write_compacted(w, true);
    write_compacted(w, false);
    MUST(!kvf_compact_commit(w->m), "commit", 0, 0);
    for (uint32_t i = 0; i < w->n_items; i++) {
        wseq *s = seq_of(w, w->items[i].seq);
        s->compacted = true;
        s->compacting = false;
        if (w->list.n || s->growth) s->secure = false;
    }
    w->n_items = 0;
    check_all(w, NULL);
}

static inline void op_cancel(world *w) {
    if (!w->n_items) return;
    MUST(!kvf_compact_cancel(w->m), "cancel", 0, 0);
    for (uint32_t i = 0; i < N_SEQS; i++) w->seqs[i].compacting = false;
    w->n_items = 0;
    check_all(w, NULL);
}

/* ---- Copies, holds, the rest -------------------------------------------------------------------------------------------- */

static inline void op_copies_done(world *w) {
    flush(w, N_COPIES);
    MUST(!kvf_copies_done(w->m, &w->list), "copies_done", 0, 0);
    check_all(w, NULL);
}

static inline void op_hold(world *w, uint32_t h, uint32_t id) {
    whold *x = &w->holds[h];
    uint64_t before = fingerprint(w);
    if (x->handle) {
        MUST(!kvf_block_release(w->m, x->handle), "release", h, 0);
        x->handle = 0;
    } else if (id == KVF_NO_BLOCK) {
        if (went(w, kvf_block_take(w->m, 0, &x->handle), before)) {
            for (uint32_t s = 0; s < BS; s++) w->sim[kvf_block_id(x->handle)][s] = mix(id, s);
            memcpy(x->slots, w->sim[kvf_block_id(x->handle)], sizeof x->slots);
        } else {
            x->handle = 0;
        }
    } else if (!w->n_items) { /* a compaction under way may still write what it holds */
        kvf_status status = kvf_block_hold(w->m, id, &x->handle);
        MUST(status == (kvf__pool_holders(w->m->blocks, id) ? KVF_OK : KVF_E_STALE), "hold", id, status);
        if (status) {
            x->handle = 0;
        } else {
            for (uint32_t s = 0; s < BS; s++) x->slots[s] = slot_of(w, DEVICE, id, s);
            now_shared(w, id, NULL);
        }
    }
    check_all(w, NULL);
}

/* ---- The host ------------------------------------------------------------------------------------------------------------ */

static inline void op_offload(world *w, uint32_t max_nodes) {
    uint32_t n_copies = w->list.n, n = 99, n_bare = w->m->cache.bare.n;
    bool roomy = true, may_pin = true; /* for so many, on the host and here */
    for (uint32_t i = 0; i < w->m->config.n_classes; i++) {
        roomy &= w->m->host_blocks[i].n_free >= max_nodes * w->m->cache.class_tables[i];
        may_pin &= kvf__pool_spare(&w->m->blocks[i]) >= max_nodes * w->m->cache.class_tables[i];
    }
    uint64_t offloaded = w->m->cache.stats.offloaded, evicted = w->m->cache.stats.evicted;
    if (!w->n_host || w->list.n + 2 * N_BLOCKS_MAX > N_COPIES) return;
    MUST(!kvf_prefix_offload(w->m, max_nodes, &w->list, &n), "offload", max_nodes, 0);
    MUST(n <= max_nodes && n <= n_bare && w->list.n - n_copies == n * w->n_tables, "offload", n, w->list.n - n_copies);
    MUST(w->m->cache.stats.offloaded - offloaded == n, "offloaded", w->m->cache.stats.offloaded, n);
    if (roomy) {
        MUST(w->m->cache.stats.evicted == evicted, "evicted though the host has room", evicted, 0);
        if (may_pin) MUST(n == KVF__MIN(max_nodes, n_bare), "offload", n, n_bare);
    }
    run_copies(w, n_copies);
    check_all(w, NULL);
}

/* To the host, or back. */
static inline void op_swap(world *w, uint32_t q) {
    wseq *s = &w->seqs[q];
    if (!w->n_host || !s->alive || s->compacting || w->list.n + 64 > N_COPIES) return;
    uint64_t before = fingerprint(w);
    uint32_t n_copies = w->list.n;
    kvf_status status =
        s->swapped ? kvf_swap_in(w->m, &s->handle, 1, 1, &w->list) : kvf_swap_out(w->m, &s->handle, 1, &w->list);
    if (went(w, status, before)) {
        run_copies(w, n_copies);
        s->swapped = !s->swapped;
        s->secure = false;
    }
    check_all(w, NULL);
}

static inline void op_forget(world *w, int what) {
    if (what == 0) MUST(!kvf_prefix_clear(w->m), "clear", 0, 0);
    if (what == 1) MUST(!kvf_prefix_drop(w->m, NULL, 0), "drop", 0, 0);
    if (what == 2) MUST(!kvf_prefix_drop(w->m, "a", 1), "drop", 0, 0);
    if (what > 2) MUST(!kvf_prefix_tick(w->m, w->m->cache.now + (uint64_t)what - 2), "tick", 0, 0);
    if (what == 0) MUST(!w->m->cache.n_nodes && !w->m->blocks->n_idle, "clear", w->m->cache.n_nodes, 0);
    check_all(w, NULL);
}

#endif
