/* The profile read by other threads while one works: no race (under TSan), no torn copy, no event lost or invented. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "kvfold/profile.h"

enum { LAYERS = 3, ROUNDS = 3000, SEQS = 6 };

typedef struct shared {
    kvf_manager *m;
    atomic_int stop;
    atomic_ullong reads, drained_taken, drained_freed, drained;
    atomic_int bad;
} shared;

static void wrong(shared *s, const char *what) {
    fprintf(stderr, "FAIL: %s\n", what);
    atomic_store(&s->bad, 1);
}

/* Every copy must be one between two calls: these sums hold there alone. */
static void *reader(void *ctx) {
    shared *s = ctx;
    uint64_t calls = 0;
    while (!atomic_load(&s->stop)) {
        kvf_profile p = {.struct_size = sizeof p};
        kvf_profile_layer l[LAYERS];
        if (kvf_profile_read(s->m, &p, l, sizeof *l, LAYERS)) wrong(s, "read");
        uint64_t held = p.outside, used = 0;
        for (int i = 0; i < LAYERS; i++) held += l[i].held, used += l[i].slots_used;
        if (p.held + p.cached + p.free != p.total) wrong(s, "held + cached + free is not total");
        if (held != p.held) wrong(s, "the layers' held do not add up");
        if (used != p.slots_used) wrong(s, "the layers' slots do not add up");
        if (p.taken_blocks - p.freed_blocks != p.held) wrong(s, "taken - freed is not held");
        if (p.lifetime.n != p.freed_blocks) wrong(s, "a histogram is torn");
        if (p.n_calls < calls) wrong(s, "went back");
        calls = p.n_calls;
        atomic_fetch_add(&s->reads, 1);
    }
    return NULL;
}

static void *drainer(void *ctx) {
    shared *s = ctx;
    for (int last = 0; !last;) {
        last = atomic_load(&s->stop);
        kvf_profile_event e[64];
        for (uint32_t n = 64; n == 64;) {
            if (kvf_profile_drain(s->m, e, 64, &n)) wrong(s, "drain");
            for (uint32_t i = 0; i < n; i++) {
                if (e[i].kind == KVF_PROFILE_ALLOC) atomic_fetch_add(&s->drained_taken, e[i].n_blocks);
                if (e[i].kind == KVF_PROFILE_FREE) atomic_fetch_add(&s->drained_freed, e[i].n_blocks);
            }
            atomic_fetch_add(&s->drained, n);
        }
    }
    return NULL;
}

static int work(kvf_manager *m) {
    static kvf_copy items[4096];
    uint64_t x = 88172645463325252u;
    kvf_seq seqs[SEQS] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        kvf_seq *s = &seqs[x % SEQS], child = 0;
        kvf_copy_list copies = {items, 0, 4096};
        uint32_t n = 0;
        kvf_append_item item = {*s, (uint32_t)(x >> 32) % 40 + 1};
        kvf_block block;
        if (!*s && kvf_seq_create(m, s)) return 1;
        item.seq = *s;
        if (kvf_append(m, &item, 1, &copies) || x >> 60 == 3) {
            if (kvf_copies_done(m, &copies) || kvf_seq_free(m, *s)) return 1;
            *s = 0;
            continue;
        }
        if (kvf_copies_done(m, &copies)) return 1;
        if (kvf_seq_table(m, *s, 1, 0, &n, NULL, NULL)) return 1;
        kvf_compact_item shrink = {*s, 1, n / 2, NULL};
        kvf_compaction c;
        if (n > 20 && !kvf_compact_begin(m, &shrink, 1, &c) && kvf_compact_commit(m)) return 1;
        if (x >> 61 == 1 && !kvf_seq_fork(m, *s, &copies, &child) && kvf_seq_free(m, child)) return 1;
        if (!kvf_block_take(m, 0, &block) && kvf_block_release(m, block)) return 1;
    }
    for (int i = 0; i < SEQS; i++)
        if (seqs[i] && kvf_seq_free(m, seqs[i])) return 1;
    return 0;
}

int main(void) {
    kvf_profile_config pc;
    kvf_profile_config_init(&pc, sizeof pc);
    pc.n_events = 256;
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = LAYERS;
    c.n_kv_heads = 2;
    c.n_blocks = 256;
    c.block_size = 8;
    c.max_seqs = SEQS + 1;
    c.max_slots = 512;
    c.profile = &pc;
    static shared s;
    kvf_error err = {.text = ""};
    if (kvf_manager_create(&c, &s.m, &err)) return fprintf(stderr, "FAIL: %s\n", err.text), 1;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        if (pthread_create(&threads[i], NULL, i < 2 ? reader : drainer, &s)) return 1;
    /* Until the others had their turns: rounds are short beside a scheduler's time slice. */
    for (int i = 0; i < 1000 && (atomic_load(&s.reads) < 1000 || atomic_load(&s.drained) < 4 * pc.n_events); i++)
        if (work(s.m)) wrong(&s, "the work");
    atomic_store(&s.stop, 1);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    kvf_profile p = {.struct_size = sizeof p};
    if (kvf_profile_read(s.m, &p, NULL, 0, 0) || p.held) wrong(&s, "blocks were left");
    if (atomic_load(&s.drained) != p.events) wrong(&s, "events that were put in did not come out");
    if (!p.events_dropped && atomic_load(&s.drained_taken) != p.taken_blocks) wrong(&s, "taken by events");
    if (!p.events_dropped && atomic_load(&s.drained_freed) != p.freed_blocks) wrong(&s, "freed by events");
    if (atomic_load(&s.reads) < 1000 || atomic_load(&s.drained) < 4 * pc.n_events || p.compactions < 100 ||
        p.taken_blocks < 1000)
        wrong(&s, "too little was done");
    printf("%llu reads, %llu events, %llu dropped\n", atomic_load(&s.reads), (unsigned long long)p.events,
           (unsigned long long)p.events_dropped);
    kvf_manager_destroy(s.m);
    return atomic_load(&s.bad);
}
