/* Why blocks fall free, in a world of prefix_world.h whose manager keeps a profile: after each operation only the causes that it can
 * have may have risen, they add up, and what compactions gave back lies between what the pool's own figures allow. */
#ifndef KVF_TEST_PREFIX_CAUSES_H
#define KVF_TEST_PREFIX_CAUSES_H

enum {
    BY_END,
    BY_COMPACTION,
    BY_ROLLBACK,
    BY_RELEASE,
    BY_EVICTION,
    BY_SWAP,
    BY_WINDOW,
    BY_ADOPTION,
    BY_REMOVAL,
    N_CAUSES
};

typedef struct causes {
    uint64_t n[N_CAUSES], freed_bytes;
    int64_t spare;          /* free and idle blocks */
    int64_t fresh;          /* taken by the compaction under way */
    int64_t net, net_max;   /* blocks that compactions gave back at once, less those they took; the most so far */
    int64_t late, late_max; /* likewise with all that fell free when copies were done, which may have been theirs */
} causes;

/* Copies that are done let go of what others let go of before. */
static const struct {
    const char *operation;
    uint32_t may; /* bits of causes */
} cause_rows[] = {
    {"start", 1u << BY_EVICTION},
    {"append", 1u << BY_EVICTION | 1u << BY_WINDOW},
    {"store", 1u << BY_ADOPTION | 1u << BY_REMOVAL},
    {"free", 1u << BY_END | 1u << BY_RELEASE}, /* with the fresh blocks of its compaction */
    {"fork", 1u << BY_EVICTION},
    {"begin", 1u << BY_EVICTION | 1u << BY_REMOVAL},
    {"end", 1u << BY_COMPACTION | 1u << BY_RELEASE},
    {"rollback", 1u << BY_ROLLBACK},
    {"reserve", 0},
    {"hold", 1u << BY_RELEASE | 1u << BY_EVICTION},
    {"snapshot", 0},
    {"scores", 0},
    {"forget", 1u << BY_REMOVAL},
    {"lookup", 0},
    {"offload", 0},
    {"swap", 1u << BY_SWAP | 1u << BY_EVICTION},
};

static inline bool cause_may_rise(const char *operation, uint32_t cause) {
    for (size_t i = 0; i < sizeof cause_rows / sizeof *cause_rows; i++)
        if (!strcmp(cause_rows[i].operation, operation)) return cause_rows[i].may >> cause & 1;
    return true;
}

/* freed_bytes is the most that freed less taken has come to. Of one class: all blocks have one size. */
static inline void check_freed_bytes(const world *w, causes *c, uint64_t freed_bytes) {
    const kvf_manager *m = w->m;
    int64_t spare = (int64_t)m->blocks->n_free + m->blocks->n_idle, more = spare - c->spare;
    bool begins = !strcmp(w->doing, "begin"), ends = !strcmp(w->doing, "end");
    if (begins) c->fresh -= more;
    if (begins || ends) c->net += more;
    if (!begins && !ends && !m->compacting) c->net += c->fresh; /* its sequence was freed meanwhile */
    if (!m->compacting) c->fresh = 0;
    if (!begins && !ends && more > 0) c->late += more;
    c->net_max = KVF__MAX(c->net_max, c->net);
    c->late_max = KVF__MAX(c->late_max, c->net + c->late);
    c->spare = spare;
    int64_t freed = (int64_t)(freed_bytes / m->config.block_bytes);
    MUST(freed >= c->net_max && freed <= c->late_max, "bytes that compactions gave back, in blocks", freed, c->net_max);
}

static inline void check_causes(world *w, causes *c) {
    kvf_profile p = {.struct_size = sizeof p};
    if (!w->m->profile) return;
    MUST(!kvf_profile_read(w->m, &p, NULL, 0, 0), "profile", 0, 0);
    const uint64_t now[N_CAUSES] = {p.freed_by_end,     p.freed_by_compaction, p.freed_by_rollback,
                                    p.freed_by_release, p.freed_by_eviction,   p.freed_by_swap,
                                    p.freed_by_window,  p.freed_by_adoption,   p.freed_by_removal};
    uint64_t sum = 0;
    for (uint32_t i = 0; i < N_CAUSES; i++) {
        MUST(now[i] >= c->n[i], "a cause has fallen", i, now[i]);
        MUST(now[i] == c->n[i] || cause_may_rise(w->doing, i), "a cause has risen", i, now[i] - c->n[i]);
        c->n[i] = now[i];
        sum += now[i];
    }
    MUST(sum == p.freed_blocks && p.taken_blocks - p.freed_blocks == p.held + p.cached, "all causes", sum,
         p.freed_blocks);
    MUST(p.freed_by_eviction == w->m->cache.stats.evicted_blocks, "evictions of both counters", p.freed_by_eviction,
         w->m->cache.stats.evicted_blocks);
    MUST(p.freed_bytes >= c->freed_bytes, "freed_bytes has fallen", p.freed_bytes, c->freed_bytes);
    c->freed_bytes = p.freed_bytes;
    if (w->m->config.n_classes == 1) check_freed_bytes(w, c, p.freed_bytes);
}

#endif
