/* Random operations of all kinds on a manager with a prefix cache, against a naive model (prefix_world.h): a hit must give
 * blocks that hold the very tokens, whatever was shared, copied, compacted, evicted and stored before.
 * Usage: main_prefix_random [FIRST_SEED [SEEDS [OPERATIONS]]]; OPERATIONS a seed, only those counted that called the manager
 * and were audited and compared after. A failure names its seed. */
#include <signal.h>
#include <unistd.h>

#include "tests/prefix_world.h"

static world all;
static volatile unsigned long seed_now;

static void name_seed(int number) {
    char text[64];
    int n = snprintf(text, sizeof text, "failed with seed %lu\n", seed_now);
    if (write(2, text, (size_t)n) != n) _exit(2);
    signal(number, SIG_DFL);
    raise(number);
}

static void start(world *w) {
    uint32_t which = rnd(w, N_PROMPTS), n = w->prompts[which].n;
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    o.need_snapshot = rnd(w, 4) == 0;
    o.partial = (int)rnd(w, 2);
    o.host = w->list.n + 64 < N_COPIES && rnd(w, 3);
    if (rnd(w, 4) == 0) o.max_tokens = 1 + rnd(w, n + BS);
    uint32_t reserve = rnd(w, 3) ? rnd(w, 5 * BS) : 0;
    op_start(w, pick(w, false) % N_SEQS, which, n, o, reserve, rnd(w, 2));
}

static void begin(world *w) {
    uint32_t q[3], layer[3], n_keep[3], n = 1 + rnd(w, 3);
    for (uint32_t i = 0; i < n; i++) {
        q[i] = rnd(w, N_SEQS);
        layer[i] = rnd(w, w->m->config.n_layers);
        n_keep[i] = 1 + rnd(w, 2 * BS);
    }
    op_begin(w, n, q, layer, n_keep);
}

static void step(world *w) {
    static const char *const names[] = {"start",  "append", "append",   "store",   "store",   "free", "fork",
                                        "begin",  "end",    "rollback", "reserve", "copies",  "hold", "snapshot",
                                        "scores", "forget", "append",   "lookup",  "offload", "swap", "flush"};
    uint32_t op = rnd(w, sizeof names / sizeof *names), live = pick(w, true), n;
    w->n_done[op]++;
    if (live == N_SEQS && op != 12 && op != 15 && op != 18) op = 0;
    w->doing = names[op];
    wseq *s = &w->seqs[live % N_SEQS];
    switch (op) {
    case 0: start(w); break;
    case 1:
    case 2:
    case 16:
        n = 1 + rnd(w, op == 1 ? BS + 4 : 3 * BS);
        if (may_append(w, s, n)) op_append(w, live, n, rnd(w, 4) ? N_SEQS : rnd(w, N_SEQS), true);
        break;
    case 3:
    case 4: op_store(w, live, rnd(w, 3) ? s->n : rnd(w, s->n + 1), rnd(w, 2), rnd(w, 3) ? 0 : rnd(w, 101)); break;
    case 5: op_free(w, live); break;
    case 6: op_fork(w, live, rnd(w, N_SEQS)); break;
    case 7: begin(w); break;
    case 8:
        if (rnd(w, 4)) {
            op_commit(w);
        } else {
            op_cancel(w);
        }
        break;
    case 9: op_rollback(w, live, rnd(w, rnd(w, 4) ? 4 : 3 * BS)); break;
    case 10: op_reserve(w, live, rnd(w, 5 * BS), rnd(w, 2)); break;
    case 11: op_copies_done(w); break;
    case 12: op_hold(w, rnd(w, N_HOLDS), rnd(w, 3) ? rnd(w, w->n_blocks) : KVF_NO_BLOCK); break;
    case 13: op_snapshot(w, live, rnd(w, 2) ? s->n : s->n / BS * BS, rnd(w, 3) == 0 ? 1 + rnd(w, 3) : 0); break;
    case 14: op_scores(w, live); break;
    case 15: op_forget(w, rnd(w, 8) ? 3 + (int)rnd(w, 3) : (int)rnd(w, 3)); break;
    case 18: op_offload(w, 1 + rnd(w, rnd(w, 3) ? 3 : 12)); break;
    case 19: op_swap(w, live); break;
    case 20: flush(w, 1 + rnd(w, 8)); break;
    default: {
        uint64_t v[N_POS];
        kvf_prefix_options o;
        kvf_prefix_options_init(&o, sizeof o);
        uint32_t which = rnd(w, N_PROMPTS);
        o.partial = (int)rnd(w, 2);
        o.need_snapshot = (int)rnd(w, 2);
        o.host = (int)rnd(w, 2);
        (void)lookup(w, &w->prompts[which], 1 + rnd(w, N_SLOTS), &o, v);
    }
    }
}

typedef struct sums {
    uint64_t n_hits, n_evicted, n_dropped, n_offloaded, n_left_device, n_left_host, n_loaded;
} sums;

static void run(unsigned long seed, unsigned long n_operations, sums *n) {
    world *w = &all;
    kvf_manager_config config;
    kvf_manager_config_init(&config, sizeof config);
    uint64_t salt = seed * 0x9e3779b97f4a7c15u;
    config.n_layers = 1 + (uint32_t)(salt >> 60) % 3;
    config.n_kv_heads = 2;
    config.heads_per_group = config.n_layers == 2 && (salt >> 50 & 1) ? 1 : 2;
    config.n_blocks = 3 + (uint32_t)(salt >> 40) % (N_BLOCKS_MAX - 2);
    config.prefix_eviction = (uint32_t)(seed % 4);
    config.n_snapshot_pages = 1 + (uint32_t)(salt >> 30) % N_PAGES;
    const uint32_t windows[3] = {(uint32_t)(salt >> 20) % 3 * 7, (uint32_t)(salt >> 16) % 20,
                                 (uint32_t)(salt >> 12) % 2};
    if (seed % 3 == 0) config.layer_windows = windows;
    if (seed % 8 < 6) {
        config.n_host_blocks = 1 + (uint32_t)(salt >> 8) % N_HOST_MAX;
        config.n_host_score_pages = 64;
    }
    /* Layers of two classes, every seventh time. */
    const uint32_t layer_class[3] = {0, 1, (uint32_t)(salt >> 8) & 1};
    kvf_block_class classes[2] = {{.n_blocks = 1 + (uint32_t)(salt >> 44) % (config.n_blocks - 1)}};
    classes[1].n_blocks = config.n_blocks - classes[0].n_blocks;
    classes[0].n_host_blocks = config.n_host_blocks / 2;
    classes[1].n_host_blocks = config.n_host_blocks - classes[0].n_host_blocks;
    if (seed % 7 == 3 && config.n_layers > 1) {
        config.n_classes = 2;
        config.classes = classes;
        config.layer_class = layer_class;
    }
    seed_now = seed;
    world_open(w, config, seed);
    causes causes_now = {.spare = w->n_blocks};
    w->causes = &causes_now;
    w->deferred = salt >> 5 & 1;
    w->m->cache.zero_hash = seed % 5 == 4;
    while (w->n_checked < n_operations) step(w);
    n->n_hits += w->n_hits;
    n->n_evicted += w->m->cache.stats.evicted;
    n->n_dropped += w->n_dropped;
    n->n_offloaded += w->m->cache.stats.offloaded;
    n->n_left_device += w->m->cache.stats.left_device;
    n->n_left_host += w->m->cache.stats.left_host;
    n->n_loaded += w->m->cache.stats.loaded;
    w->doing = "end of the run";
    for (uint32_t h = 0; h < N_HOLDS; h++)
        if (w->holds[h].handle) op_hold(w, h, 0);
    for (uint32_t q = 0; q < N_SEQS; q++) op_free(w, q);
    op_copies_done(w);
    op_forget(w, 0);
    kvf_occupancy o = {.struct_size = sizeof o};
    MUST(!kvf_occupancy_read(w->m, &o, NULL, 0) && o.blocks.n_free == w->n_blocks &&
             o.host_blocks.n_free == w->n_host && !w->m->cache.n_nodes,
         "blocks are missing", o.blocks.n_free, o.host_blocks.n_free);
    kvf_manager_destroy(w->m);
}

int main(int argc, char **argv) {
    unsigned long first = argc > 1 ? strtoul(argv[1], NULL, 10) : 1,
                  n_seeds = argc > 2 ? strtoul(argv[2], NULL, 10) : 400;
    unsigned long n_operations = argc > 3 ? strtoul(argv[3], NULL, 10) : 2500;
    sums n = {0};
    signal(SIGABRT, name_seed);
    signal(SIGSEGV, name_seed);
    for (unsigned long seed = first; seed < first + n_seeds; seed++) run(seed, n_operations, &n);
    printf("prefix: %lu seeds from %lu, %lu operations, %llu hits, %llu nodes evicted, %llu blocks dropped by windows, "
           "%llu nodes copied to the host, %llu left the device, %llu the host, %llu came back\n",
           n_seeds, first, n_seeds * n_operations, (unsigned long long)n.n_hits, (unsigned long long)n.n_evicted,
           (unsigned long long)n.n_dropped, (unsigned long long)n.n_offloaded, (unsigned long long)n.n_left_device,
           (unsigned long long)n.n_left_host, (unsigned long long)n.n_loaded);
    return n.n_hits && n.n_evicted && n.n_dropped && n.n_left_device && n.n_left_host && n.n_loaded ? 0 : 1;
}
