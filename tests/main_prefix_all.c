/* Every sequence of operations up to a depth on a tiny manager with a prefix cache, against the naive model of
 * prefix_world.h, which compares everything after each. Operations that change nothing end a branch.
 * Usage: main_prefix_all [DEPTH [BLOCKS LAYERS [HOST BLOCKS]]]; without, what fits into a test run. */
#include <signal.h>

#include "tests/prefix_world.h"

enum { DEPTH_MAX = 12, SLAB_MAX = 1 << 19 };

static world w;
static struct {
    world model;
    unsigned char slab[SLAB_MAX];
} saved[DEPTH_MAX + 1];
static unsigned long n_run;
static int path[DEPTH_MAX];

/* ---- The operations: two sequences, each of these; then those of the whole manager ------------------------------- */

enum {
    START_A,
    START_B,
    START_GROWTH,
    START_SNAPSHOT,
    START_HOST,
    SHORT,
    LONG,
    STORE,
    STORE_WHOLE,
    SNAPSHOT,
    ROLLBACK,
    FREE,
    FORK,
    RESERVE,
    BEGIN,
    N_OF_SEQ
};
enum { COMMIT = 2 * N_OF_SEQ, CANCEL, COPIES, TAKE, HOLD, CLEAR, OFFLOAD, N_OPERATIONS };

static void start(uint32_t q, int op) {
    kvf_prefix_options o;
    kvf_prefix_options_init(&o, sizeof o);
    o.partial = op != START_SNAPSHOT;
    o.need_snapshot = op == START_SNAPSHOT;
    o.host = op == START_HOST;
    op_start(&w, q, op == START_B, BS + 2, o, op == START_GROWTH ? BS : 0, true);
}

static void run_of_seq(uint32_t q, int op) {
    wseq *s = &w.seqs[q];
    uint32_t layer = w.m->config.n_layers - 1, n_keep = 1;
    switch (op) {
    case START_A:
    case START_B:
    case START_GROWTH:
    case START_SNAPSHOT:
    case START_HOST: start(q, op); break;
    case SHORT:
    case LONG:
        if (may_append(&w, s, op == SHORT ? 3 : 5)) op_append(&w, q, op == SHORT ? 3 : 5, N_SEQS, false);
        break;
    case STORE: op_store(&w, q, s->n, true, 0); break;
    case STORE_WHOLE: op_store(&w, q, s->n / BS * BS, false, 0); break;
    case SNAPSHOT: op_snapshot(&w, q, s->n, 0); break;
    case ROLLBACK: op_rollback(&w, q, 2); break;
    case FREE: op_free(&w, q); break;
    case FORK: op_fork(&w, q, 1 - q); break;
    case RESERVE: op_reserve(&w, q, BS, false); break;
    default: op_begin(&w, 1, &q, &layer, &n_keep);
    }
}

static void run(int op) {
    static const char *const names[N_OF_SEQ] = {"start A",  "start B", "start growth", "start snapshot", "start host",
                                                "short",    "long",    "store",        "store whole",    "snapshot",
                                                "rollback", "free",    "fork",         "reserve",        "begin"};
    w.doing = op < 2 * N_OF_SEQ ? names[op % N_OF_SEQ] : "of all";
    if (op < 2 * N_OF_SEQ) run_of_seq((uint32_t)(op / N_OF_SEQ), op % N_OF_SEQ);
    if (op == COMMIT) op_commit(&w);
    if (op == CANCEL) op_cancel(&w);
    if (op == COPIES && w.list.n) op_copies_done(&w);
    if (op == TAKE) op_hold(&w, 0, KVF_NO_BLOCK);
    if (op == HOLD) op_hold(&w, 1, 0);
    if (op == CLEAR && w.m->cache.n_nodes) op_forget(&w, 0);
    if (op == OFFLOAD) op_offload(&w, 1);
}

/* ---- The walk -------------------------------------------------------------------------------------------------------- */

static uint64_t state_of(void) {
    uint64_t h = mix(mix(fingerprint(&w), w.n_items), w.list.n);
    for (int i = 0; i < 2; i++) h = mix(mix(h, w.seqs[i].n + 100 * w.seqs[i].alive), w.holds[i].handle != 0);
    return h;
}

static void save(int at) {
    saved[at].model = w;
    memcpy(saved[at].slab, w.m, w.m->slab_bytes);
}
static void restore(int at) {
    w = saved[at].model;
    memcpy(w.m, saved[at].slab, w.m->slab_bytes);
}

static void name_path(int number) {
    for (int i = 0; i < DEPTH_MAX && path[i] >= 0; i++) fprintf(stderr, "%d ", path[i]);
    fprintf(stderr, "\n");
    (void)number;
}

static void walk(int at, int depth) {
    save(at);
    uint64_t before = state_of();
    for (int op = 0; op < N_OPERATIONS; op++) {
        if (op / N_OF_SEQ == 1 && !w.seqs[0].alive && op % N_OF_SEQ <= START_HOST) continue; /* by symmetry */
        if (!w.n_host && (op == OFFLOAD || (op < 2 * N_OF_SEQ && op % N_OF_SEQ == START_HOST))) continue;
        path[at] = op;
        run(op);
        n_run++;
        if (state_of() != before) {
            if (at + 1 < depth) walk(at + 1, depth);
            restore(at);
        }
        path[at] = -1;
    }
}

/* With a host tier it begins where a prompt of two nodes is idle on the device, and the tail is about to be copied. */
static const int prologue[] = {START_A, LONG, LONG, STORE, FREE, OFFLOAD};
enum { N_PROLOGUE = sizeof prologue / sizeof *prologue };

static void enumerate(int depth, uint32_t n_blocks, uint32_t n_layers, uint32_t n_host) {
    kvf_manager_config config;
    kvf_manager_config_init(&config, sizeof config);
    config.n_layers = n_layers;
    config.n_kv_heads = 1;
    config.n_blocks = n_blocks;
    config.n_snapshot_pages = 2;
    config.n_host_blocks = n_host;
    world_open(&w, config, 2); /* even: without a profile, which would be saved and restored too */
    w.extras = false;
    w.deferred = n_host != 0;
    if (w.m->slab_bytes > SLAB_MAX) world_fail(&w, "the slab is too large", (long)w.m->slab_bytes, SLAB_MAX);
    for (uint32_t i = 0; i < 2; i++) { /* two prompts that part in the first block */
        w.prompts[i] = (prompt){.n = BS + 2};
        for (uint32_t j = 0; j < N_POS; j++) w.prompts[i].tokens[j] = j < 4 || !i ? j % 3 : 7;
    }
    n_run = 0;
    for (int i = 0; n_host && i < N_PROLOGUE; i++) run(prologue[i]);
    walk(0, depth);
    printf("prefix: %lu operations, depth %d, %u blocks, %u layers, %u host blocks\n", n_run, depth, n_blocks, n_layers,
           n_host);
    kvf_manager_destroy(w.m);
}

int main(int argc, char **argv) {
    signal(SIGABRT, name_path);
    for (int i = 0; i < DEPTH_MAX; i++) path[i] = -1;
    int depth = argc > 1 ? atoi(argv[1]) : 0;
    if (depth > DEPTH_MAX) return 2;
    if (argc > 3) {
        enumerate(depth, (uint32_t)atoi(argv[2]), (uint32_t)atoi(argv[3]), argc > 4 ? (uint32_t)atoi(argv[4]) : 0);
        return 0;
    }
    enumerate(depth ? depth : 6, 3, 2, 0);
    enumerate(depth ? depth : 5, 3, 1, 0);
    enumerate(depth ? depth : 5, 5, 2, 0);
    enumerate(depth ? depth : 5, 3, 1, 2);
    enumerate(depth ? depth : 5, 4, 2, 3);
    enumerate(depth ? depth : 5, 4, 2, 4);
    return 0;
}
