/* Measures the block manager: nanoseconds a block to allocate, append and free, beside plain C.
 *
 * kvfold-bench pool [-r REPETITIONS] [-b|--blocks BLOCKS]. The floor is an array as a free list and tables of ids, one
 * check and one move a block; floor_header also reads and writes one 8-byte header of each block, which anything that
 * counts references must. The manager runs with all that it accounts for: references, generations, reservations,
 * occupancy, high-water marks. "shuffled" means that the free list hands ids out in random order. "prompt" appends all
 * of a sequence in one call, "step" one block to every table in each call. */
#define _GNU_SOURCE
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/json.h"
#include "kvfold/blockmgr.h"

enum { LAYERS = 32, BLOCK = 16, PER_TABLE = 64, PER_SEQ = LAYERS * PER_TABLE };
enum { TAKE, RELEASE, APPEND, FREE, N_OPS };
enum { OURS, PLAIN, HEADER, N_KINDS };

typedef struct pool {
    uint32_t n_blocks, n_seqs;
    kvf_manager *manager;
    kvf_seq *seqs;          /* [n_seqs] */
    kvf_append_item *items; /* [n_seqs] */
    kvf_block *handles;     /* [n_blocks] */
    uint32_t *order;        /* [n_blocks], in which all are released */
    unsigned char *seen;    /* [n_blocks] */
    /* The floor. */
    uint32_t *free_list, *taken; /* [n_blocks] */
    uint32_t n_free;
    uint32_t *tables;  /* [n_seqs][LAYERS][PER_TABLE] */
    uint32_t *lengths; /* [n_seqs][LAYERS] */
    uint64_t *headers; /* [n_blocks] */
} pool;

static void must(const pool *p, kvf_status status, const char *what) {
    if (status) kvf__bench_die("%s: %s: %s", what, kvf_status_name(status), kvf_manager_error(p->manager));
}

/* ---- The floor --------------------------------------------------------------------------------- */

/* Not inlined, so that the compiler knows of no caller: the constant `header` makes two versions of each. */
#define FLOOR(name, header)                                                                                 \
    __attribute__((noinline)) static bool take_##name(pool *p, uint32_t *restrict to, uint32_t n) {         \
        uint32_t n_free = p->n_free, *restrict list = p->free_list;                                         \
        uint64_t *restrict headers = p->headers;                                                            \
        for (uint32_t i = 0; i < n; i++) {                                                                  \
            if (n_free == 0) return false;                                                                  \
            to[i] = list[--n_free];                                                                         \
            if (header) headers[to[i]]++;                                                                   \
        }                                                                                                   \
        p->n_free = n_free;                                                                                 \
        return true;                                                                                        \
    }                                                                                                       \
    __attribute__((noinline)) static bool give_##name(pool *p, const uint32_t *restrict from, uint32_t n) { \
        uint32_t n_free = p->n_free, *restrict list = p->free_list;                                         \
        uint64_t *restrict headers = p->headers;                                                            \
        for (uint32_t i = 0; i < n; i++) {                                                                  \
            if (from[i] >= p->n_blocks) return false;                                                       \
            if (header) headers[from[i]]--;                                                                 \
            list[n_free++] = from[i];                                                                       \
        }                                                                                                   \
        p->n_free = n_free;                                                                                 \
        return true;                                                                                        \
    }
FLOOR(plain, false)
FLOOR(header, true)

static void floor_run(pool *p, bool header, bool steps, double *seconds) {
    bool ok = true;
    uint32_t n_tables = p->n_seqs * LAYERS, part = steps ? 1 : PER_TABLE;
    p->n_free = 0;
    for (uint32_t i = 0; i < p->n_blocks; i++) p->free_list[p->n_free++] = p->order[i];
    double t = kvf__clock();
    ok &= header ? take_header(p, p->taken, p->n_blocks) : take_plain(p, p->taken, p->n_blocks);
    seconds[TAKE] = kvf__clock() - t;
    for (uint32_t i = 0; i < p->n_blocks; i++) p->taken[i] = p->order[i];
    t = kvf__clock();
    ok &= header ? give_header(p, p->taken, p->n_blocks) : give_plain(p, p->taken, p->n_blocks);
    seconds[RELEASE] = kvf__clock() - t;
    memset(p->lengths, 0, n_tables * sizeof *p->lengths);
    t = kvf__clock();
    for (uint32_t at = 0; at < PER_TABLE; at += part)
        for (uint32_t i = 0; i < n_tables; i++) {
            uint32_t *to = p->tables + (size_t)i * PER_TABLE + p->lengths[i];
            ok &= header ? take_header(p, to, part) : take_plain(p, to, part);
            p->lengths[i] += part;
        }
    seconds[APPEND] = kvf__clock() - t;
    ok &= p->n_free == 0;
    t = kvf__clock();
    for (uint32_t i = 0; i < n_tables; i++) {
        const uint32_t *from = p->tables + (size_t)i * PER_TABLE;
        ok &= header ? give_header(p, from, p->lengths[i]) : give_plain(p, from, p->lengths[i]);
    }
    seconds[FREE] = kvf__clock() - t;
    if (!ok || p->n_free != p->n_blocks) kvf__bench_die("pool: the floor lost blocks");
}

/* ---- The manager ------------------------------------------------------------------------------- */

static void take_all(pool *p) {
    for (uint32_t i = 0; i < p->n_blocks; i++)
        if (kvf_block_take(p->manager, &p->handles[i])) kvf__bench_die("pool: kvf_block_take failed");
}
static void release_all(pool *p) {
    for (uint32_t i = 0; i < p->n_blocks; i++)
        if (kvf_block_release(p->manager, p->handles[i])) kvf__bench_die("pool: kvf_block_release failed");
}

/* Puts the handles into the order in which they are to be released, whatever the list gave. */
static void arrange(pool *p) {
    kvf_block *by_id = kvf__bench_take(p->n_blocks * sizeof *by_id);
    for (uint32_t i = 0; i < p->n_blocks; i++) by_id[kvf_block_id(p->handles[i])] = p->handles[i];
    for (uint32_t i = 0; i < p->n_blocks; i++) p->handles[i] = by_id[p->order[i]];
    free(by_id);
}

/* Every block in one table, once; the manager's own audit; the figures. */
static void check_full(pool *p) {
    kvf_error err = {""};
    kvf_occupancy now = {.struct_size = sizeof now};
    memset(p->seen, 0, p->n_blocks);
    for (uint32_t i = 0; i < p->n_seqs; i++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint32_t n_slots, n_blocks;
            const uint32_t *row;
            must(p, kvf_seq_table(p->manager, p->seqs[i], layer, 0, &n_slots, &n_blocks, &row), "kvf_seq_table");
            if (n_slots != PER_TABLE * BLOCK || n_blocks != PER_TABLE) kvf__bench_die("pool: a table is too short");
            for (uint32_t b = 0; b < n_blocks; b++)
                if (row[b] >= p->n_blocks || p->seen[row[b]]++) kvf__bench_die("pool: block %u twice", row[b]);
        }
    must(p, kvf_occupancy_read(p->manager, &now, NULL), "kvf_occupancy_read");
    if (now.blocks.n_held != p->n_blocks || now.blocks.n_free) kvf__bench_die("pool: blocks are left over");
    if (kvf_audit(p->manager, &err)) kvf__bench_die("pool: %s", err.text);
}
static void check_empty(pool *p) {
    kvf_error err = {""};
    kvf_occupancy now = {.struct_size = sizeof now};
    must(p, kvf_occupancy_read(p->manager, &now, NULL), "kvf_occupancy_read");
    if (now.blocks.n_free != p->n_blocks || now.blocks.n_promised) kvf__bench_die("pool: blocks are missing");
    if (kvf_audit(p->manager, &err)) kvf__bench_die("pool: %s", err.text);
}

static void manager_run(pool *p, bool steps, bool check, double *seconds) {
    uint32_t slots[LAYERS];
    take_all(p); /* sets the list's order */
    arrange(p);
    release_all(p);
    double t = kvf__clock();
    take_all(p);
    seconds[TAKE] = kvf__clock() - t;
    arrange(p);
    t = kvf__clock();
    release_all(p);
    seconds[RELEASE] = kvf__clock() - t;
    for (uint32_t i = 0; i < LAYERS; i++) slots[i] = PER_TABLE * BLOCK;
    for (uint32_t i = 0; i < p->n_seqs; i++) {
        must(p, kvf_seq_create(p->manager, &p->seqs[i]), "kvf_seq_create");
        must(p, kvf_seq_reserve(p->manager, p->seqs[i], slots, 0), "kvf_seq_reserve");
        p->items[i] = (kvf_append_item){p->seqs[i], steps ? BLOCK : PER_TABLE * BLOCK};
    }
    t = kvf__clock();
    if (steps)
        for (uint32_t at = 0; at < PER_TABLE; at++)
            must(p, kvf_append(p->manager, p->items, p->n_seqs, NULL), "kvf_append");
    else
        for (uint32_t i = 0; i < p->n_seqs; i++) must(p, kvf_append(p->manager, &p->items[i], 1, NULL), "kvf_append");
    seconds[APPEND] = kvf__clock() - t;
    if (check) check_full(p);
    t = kvf__clock();
    for (uint32_t i = 0; i < p->n_seqs; i++) must(p, kvf_seq_free(p->manager, p->seqs[i]), "kvf_seq_free");
    seconds[FREE] = kvf__clock() - t;
    if (check) check_empty(p);
}

/* ---- Cases --------------------------------------------------------------------------------------- */

static void measure(pool *p, bool shuffled, bool steps, int repetitions, size_t metadata_bytes) {
    static const char *const names[N_OPS] = {"pool/allocate", "pool/release", "pool/append", "pool/free"};
    static kvf__bench_times times[N_OPS][N_KINDS], ratios[N_OPS][N_KINDS];
    double s[N_KINDS][N_OPS];
    uint64_t state = 5;
    for (uint32_t i = 0; i < p->n_blocks; i++) p->order[i] = i;
    for (uint32_t i = p->n_blocks - 1; shuffled && i > 0; i--) {
        uint32_t j = (uint32_t)((double)(kvf__bench_uniform(&state) * 0.5f + 0.5f) * i), x = p->order[i];
        p->order[i] = p->order[j];
        p->order[j] = x;
    }
    for (int r = -1; r < repetitions; r++) { /* the first is checked, and warms up */
        manager_run(p, steps, r < 0, s[OURS]);
        floor_run(p, false, steps, s[PLAIN]);
        floor_run(p, true, steps, s[HEADER]);
        for (int op = 0; op < N_OPS && r >= 0; op++)
            for (int kind = 0; kind < N_KINDS; kind++) {
                times[op][kind].s[r] = s[kind][op];
                ratios[op][kind].s[r] = s[OURS][op] / s[kind][op];
                times[op][kind].n = ratios[op][kind].n = repetitions;
            }
    }
    for (int op = steps ? APPEND : TAKE; op < N_OPS; op++) {
        for (int kind = 0; kind < N_KINDS; kind++)
            kvf__bench_sort(&times[op][kind]), kvf__bench_sort(&ratios[op][kind]);
        double scale = 1e9 / p->n_blocks;
        kvf__bench_begin(names[op], &times[op][OURS], scale, "ns/block", 1, 8.0 * p->n_blocks);
        kvf__bench_floor(scale * kvf__bench_quantile(&times[op][PLAIN], .5), &ratios[op][PLAIN]);
        kvf__bench_number("floor_header", scale * kvf__bench_quantile(&times[op][HEADER], .5));
        kvf__bench_number("ratio_header", kvf__bench_quantile(&ratios[op][HEADER], .5));
        kvf__bench_text("order", shuffled ? "shuffled" : "in order");
        if (op >= APPEND) kvf__bench_text("how", steps ? "step" : "prompt");
        kvf__bench_number("blocks", p->n_blocks);
        kvf__bench_number("sequences", p->n_seqs);
        kvf__bench_number("layers", LAYERS);
        kvf__bench_number("metadata_bytes", (double)metadata_bytes);
        kvf__bench_end();
    }
}

int kvf__bench_pool(int argc, char **argv) {
    static const struct option longs[] = {{"blocks", required_argument, NULL, 'b'}, {NULL, 0, NULL, 0}};
    int repetitions = 31, option;
    long blocks = 65536;
    while ((option = getopt_long(argc, argv, "r:b:", longs, NULL)) != -1) switch (option) {
        case 'r': repetitions = (int)kvf__bench_int("-r", optarg, 1, KVF__BENCH_MAX_REPETITIONS); break;
        case 'b': blocks = kvf__bench_int("--blocks", optarg, PER_SEQ, (long)PER_SEQ << 16); break;
        default: kvf__bench_die("pool [-r REPETITIONS] [-b|--blocks BLOCKS]");
        }
    pool p = {.n_seqs = (uint32_t)((blocks + PER_SEQ - 1) / PER_SEQ)}; /* all blocks in whole sequences */
    p.n_blocks = p.n_seqs * PER_SEQ;
    kvf_manager_config config = kvf_manager_config_default();
    config.n_layers = LAYERS;
    config.n_kv_heads = 8;
    config.block_size = BLOCK;
    config.n_blocks = p.n_blocks;
    config.max_seqs = p.n_seqs;
    config.max_slots = PER_TABLE * BLOCK;
    kvf_error err = {""};
    size_t bytes;
    if (kvf_manager_bytes(&config, &bytes, &err) || kvf_manager_create(&config, &p.manager, &err))
        kvf__bench_die("%s", err.text);
    p.seqs = kvf__bench_take(p.n_seqs * sizeof *p.seqs);
    p.items = kvf__bench_take(p.n_seqs * sizeof *p.items);
    p.handles = kvf__bench_take(p.n_blocks * sizeof *p.handles);
    p.order = kvf__bench_take(p.n_blocks * sizeof *p.order);
    p.seen = kvf__bench_take(p.n_blocks);
    p.free_list = kvf__bench_take(p.n_blocks * sizeof *p.free_list);
    p.taken = kvf__bench_take(p.n_blocks * sizeof *p.taken);
    p.tables = kvf__bench_take(p.n_blocks * sizeof *p.tables);
    p.lengths = kvf__bench_take((size_t)p.n_seqs * LAYERS * sizeof *p.lengths);
    p.headers = kvf__bench_take(p.n_blocks * sizeof *p.headers);
    for (int shuffled = 0; shuffled < 2; shuffled++)
        for (int steps = 0; steps < 2; steps++) measure(&p, shuffled, steps, repetitions, bytes);
    kvf_manager_destroy(p.manager);
    void *all[] = {p.seqs, p.items, p.handles, p.order, p.seen, p.free_list, p.taken, p.tables, p.lengths, p.headers};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return 0;
}
