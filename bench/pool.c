/* Measures the block manager: nanoseconds a block to allocate, append and free, beside plain C.
 *
 * kvfold-bench pool [-r REPETITIONS] [-b|--blocks BLOCKS]. The floor is an array as a free list and tables of ids, one
 * check and one move a block; floor_header also reads and writes one 8-byte header of each block, which anything that
 * counts references must. The floor has the form of what it stands beside: a call a block for allocate and release, a call
 * a table for a prompt and its end, one loop over all tables for a step. The manager runs with all that it accounts for:
 * references, generations, reservations, occupancy, high-water marks. "shuffled" means that the free list hands ids out
 * in random order. "prompt" appends all of a sequence in one call, "step" one block to every table in each call.
 * pool/decode appends a token to each of 256 sequences of 32 layers a call, a block every 16th time, not all at once.
 * pool/metadata is what the manager itself takes for Llama-3-8B. */
#define _GNU_SOURCE
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/json.h"
#include "kvfold/blockmgr.h"

enum { LAYERS = 32, BLOCK = 16, PER_TABLE = 64, PER_SEQ = LAYERS * PER_TABLE };
enum { DECODE_SEQS = 256, DECODE_STEPS = 64, DECODE_PROMPT = 512 };
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
    if (status) kvf__bench_die("%s: %s: %s", what, kvf_status_name(status), kvf_manager_error(p->manager)->text);
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
    }                                                                                                       \
    __attribute__((noinline)) static bool take_one_##name(pool *p, uint32_t *to) {                          \
        if (p->n_free == 0) return false;                                                                   \
        uint32_t id = p->free_list[--p->n_free];                                                            \
        if (header) p->headers[id]++;                                                                       \
        *to = id;                                                                                           \
        return true;                                                                                        \
    }                                                                                                       \
    __attribute__((noinline)) static bool give_one_##name(pool *p, uint32_t id) {                           \
        if (id >= p->n_blocks) return false;                                                                \
        if (header) p->headers[id]--;                                                                       \
        p->free_list[p->n_free++] = id;                                                                     \
        return true;                                                                                        \
    }                                                                                                       \
    static bool calls_##name(pool *p, bool give) {                                                          \
        bool ok = true;                                                                                     \
        for (uint32_t i = 0; i < p->n_blocks; i++)                                                          \
            ok &= give ? give_one_##name(p, p->taken[i]) : take_one_##name(p, &p->taken[i]);                \
        return ok;                                                                                          \
    }                                                                                                       \
    /* tokens more in every table; a table whose last block is full takes one. */                           \
    __attribute__((noinline)) static bool step_##name(pool *p, uint32_t n_tables, uint32_t tokens) {        \
        uint32_t n_free = p->n_free, *restrict list = p->free_list, *restrict n_slots = p->lengths;         \
        uint32_t *restrict row = p->tables;                                                                 \
        uint64_t *restrict headers = p->headers;                                                            \
        for (uint32_t i = 0; i < n_tables; i++, row += PER_TABLE) {                                         \
            if (n_slots[i] % BLOCK == 0) {                                                                  \
                if (n_free == 0) return false;                                                              \
                uint32_t id = list[--n_free];                                                               \
                row[n_slots[i] / BLOCK] = id;                                                               \
                if (header) headers[id]++;                                                                  \
            }                                                                                               \
            n_slots[i] += tokens;                                                                           \
        }                                                                                                   \
        p->n_free = n_free;                                                                                 \
        return true;                                                                                        \
    }
FLOOR(plain, false)
FLOOR(header, true)

static void floor_fill(pool *p) {
    p->n_free = p->n_blocks;
    memcpy(p->free_list, p->order, p->n_blocks * sizeof *p->order);
    memset(p->lengths, 0, (size_t)p->n_seqs * LAYERS * sizeof *p->lengths);
}

static void floor_run(pool *p, bool header, bool steps, double *seconds) {
    bool ok = true;
    uint32_t n_tables = p->n_seqs * LAYERS;
    floor_fill(p);
    double t = kvf__clock();
    ok &= header ? calls_header(p, false) : calls_plain(p, false);
    seconds[TAKE] = kvf__clock() - t;
    memcpy(p->taken, p->order, p->n_blocks * sizeof *p->order);
    t = kvf__clock();
    ok &= header ? calls_header(p, true) : calls_plain(p, true);
    seconds[RELEASE] = kvf__clock() - t;
    t = kvf__clock();
    for (uint32_t at = 0; steps && at < PER_TABLE; at++)
        ok &= header ? step_header(p, n_tables, BLOCK) : step_plain(p, n_tables, BLOCK);
    for (uint32_t i = 0; !steps && i < n_tables; i++) {
        uint32_t *to = p->tables + (size_t)i * PER_TABLE;
        ok &= header ? take_header(p, to, PER_TABLE) : take_plain(p, to, PER_TABLE);
        p->lengths[i] = PER_TABLE * BLOCK;
    }
    seconds[APPEND] = kvf__clock() - t;
    ok &= p->n_free == 0;
    t = kvf__clock();
    for (uint32_t i = 0; i < n_tables; i++) {
        const uint32_t *from = p->tables + (size_t)i * PER_TABLE;
        ok &= header ? give_header(p, from, p->lengths[i] / BLOCK) : give_plain(p, from, p->lengths[i] / BLOCK);
    }
    seconds[FREE] = kvf__clock() - t;
    if (!ok || p->n_free != p->n_blocks) kvf__bench_die("pool: the floor lost blocks");
}

/* Prompts of lengths that differ, so that about as many sequences take a block in each step. */
static uint32_t decode_prompt(uint32_t seq) { return DECODE_PROMPT + seq % BLOCK; }

static double floor_decode(pool *p, bool header) {
    bool ok = true;
    floor_fill(p);
    for (uint32_t i = 0; i < p->n_seqs * LAYERS; i++) {
        p->lengths[i] = decode_prompt(i / LAYERS);
        ok &= take_plain(p, p->tables + (size_t)i * PER_TABLE, (p->lengths[i] + BLOCK - 1) / BLOCK);
    }
    double t = kvf__clock();
    for (int s = 0; s < DECODE_STEPS; s++)
        ok &= header ? step_header(p, p->n_seqs * LAYERS, 1) : step_plain(p, p->n_seqs * LAYERS, 1);
    t = kvf__clock() - t;
    for (uint32_t i = 0; i < p->n_seqs * LAYERS; i++) ok &= p->lengths[i] == decode_prompt(i / LAYERS) + DECODE_STEPS;
    if (!ok) kvf__bench_die("pool: the floor lost blocks");
    return t;
}

/* ---- The manager ------------------------------------------------------------------------------- */

static void take_all(pool *p) {
    for (uint32_t i = 0; i < p->n_blocks; i++)
        if (kvf_block_take(p->manager, 0, &p->handles[i])) kvf__bench_die("pool: kvf_block_take failed");
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
    kvf_error err = {.text = ""};
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
    must(p, kvf_occupancy_read(p->manager, &now, NULL, 0), "kvf_occupancy_read");
    if (now.blocks.n_held != p->n_blocks || now.blocks.n_free) kvf__bench_die("pool: blocks are left over");
    if (kvf_audit(p->manager, &err)) kvf__bench_die("pool: %s", err.text);
}
static void check_empty(pool *p) {
    kvf_error err = {.text = ""};
    kvf_occupancy now = {.struct_size = sizeof now};
    must(p, kvf_occupancy_read(p->manager, &now, NULL, 0), "kvf_occupancy_read");
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
        must(p,
             kvf_seq_reserve(p->manager, p->seqs[i],
                             &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = slots, .with_scores = 0}),
             "kvf_seq_reserve");
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

static double manager_decode(pool *p, bool check) {
    uint32_t slots[LAYERS];
    for (uint32_t i = 0; i < LAYERS; i++) slots[i] = DECODE_PROMPT + BLOCK + DECODE_STEPS;
    for (uint32_t i = 0; i < p->n_seqs; i++) {
        must(p, kvf_seq_create(p->manager, &p->seqs[i]), "kvf_seq_create");
        must(p,
             kvf_seq_reserve(p->manager, p->seqs[i],
                             &(kvf_reserve){.struct_size = sizeof(kvf_reserve), .n_slots = slots, .with_scores = 0}),
             "kvf_seq_reserve");
        p->items[i] = (kvf_append_item){p->seqs[i], decode_prompt(i)};
    }
    must(p, kvf_append(p->manager, p->items, p->n_seqs, NULL), "kvf_append");
    for (uint32_t i = 0; i < p->n_seqs; i++) p->items[i].n_tokens = 1;
    double t = kvf__clock();
    for (int s = 0; s < DECODE_STEPS; s++) must(p, kvf_append(p->manager, p->items, p->n_seqs, NULL), "kvf_append");
    t = kvf__clock() - t;
    for (uint32_t i = 0; check && i < p->n_seqs; i++) {
        uint32_t n_slots;
        must(p, kvf_seq_table(p->manager, p->seqs[i], LAYERS - 1, 0, &n_slots, NULL, NULL), "kvf_seq_table");
        if (n_slots != decode_prompt(i) + DECODE_STEPS) kvf__bench_die("pool: a table is too short");
    }
    kvf_error err = {.text = ""};
    if (check && kvf_audit(p->manager, &err)) kvf__bench_die("pool: %s", err.text);
    for (uint32_t i = 0; i < p->n_seqs; i++) must(p, kvf_seq_free(p->manager, p->seqs[i]), "kvf_seq_free");
    if (check) check_empty(p);
    return t;
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

static kvf_manager_config config_for(uint32_t n_seqs, uint32_t n_blocks) {
    kvf_manager_config config;
    kvf_manager_config_init(&config, sizeof config);
    config.n_layers = LAYERS;
    config.n_kv_heads = 8;
    config.block_size = BLOCK;
    config.n_blocks = n_blocks;
    config.max_seqs = n_seqs;
    config.max_slots = PER_TABLE * BLOCK;
    return config;
}

static size_t manager_bytes(const kvf_manager_config *config) {
    kvf_error err = {.text = ""};
    size_t bytes = 0;
    if (kvf_manager_bytes(config, &bytes, &err)) kvf__bench_die("%s", err.text);
    return bytes;
}

static pool open_pool(uint32_t n_seqs) {
    pool p = {.n_seqs = n_seqs, .n_blocks = n_seqs * PER_SEQ}; /* all blocks in whole sequences */
    kvf_manager_config config = config_for(p.n_seqs, p.n_blocks);
    kvf_error err = {.text = ""};
    if (kvf_manager_create(&config, &p.manager, &err)) kvf__bench_die("%s", err.text);
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
    for (uint32_t i = 0; i < p.n_blocks; i++) p.order[i] = i;
    return p;
}

static void close_pool(pool *p) {
    kvf_manager_destroy(p->manager);
    void *all[] = {p->seqs,      p->items, p->handles, p->order,   p->seen,
                   p->free_list, p->taken, p->tables,  p->lengths, p->headers};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void measure_decode(int repetitions) {
    static kvf__bench_times times[N_KINDS], ratios[N_KINDS];
    pool p = open_pool(DECODE_SEQS);
    for (int r = -1; r < repetitions; r++) {
        double s[N_KINDS] = {manager_decode(&p, r < 0), floor_decode(&p, false), floor_decode(&p, true)};
        for (int kind = 0; kind < N_KINDS && r >= 0; kind++) {
            times[kind].s[r] = s[kind];
            ratios[kind].s[r] = s[OURS] / s[kind];
            times[kind].n = ratios[kind].n = repetitions;
        }
    }
    for (int kind = 0; kind < N_KINDS; kind++) kvf__bench_sort(&times[kind]), kvf__bench_sort(&ratios[kind]);
    double scale = 1e9 / ((double)DECODE_SEQS * LAYERS * DECODE_STEPS);
    kvf__bench_begin("pool/decode", &times[OURS], scale, "ns/table", 1, 4.0 * DECODE_SEQS * LAYERS * DECODE_STEPS);
    kvf__bench_floor(scale * kvf__bench_quantile(&times[PLAIN], .5), &ratios[PLAIN]);
    kvf__bench_number("floor_header", scale * kvf__bench_quantile(&times[HEADER], .5));
    kvf__bench_number("ratio_header", kvf__bench_quantile(&ratios[HEADER], .5));
    kvf__bench_number("blocks", p.n_blocks);
    kvf__bench_number("sequences", DECODE_SEQS);
    kvf__bench_number("layers", LAYERS);
    kvf__bench_end();
    close_pool(&p);
}

/* Llama-3-8B, fp16, a pool of 16 GiB for 256 sequences of up to 8,192 tokens. */
static void print_metadata(void) {
    const double block_bytes = 2 * 8 * 128 * 2 * BLOCK, n_blocks = 262144;
    kvf_manager_config one = config_for(256, 262144), seqs, blocks;
    one.max_slots = 8192;
    seqs = blocks = one;
    seqs.max_seqs *= 2;
    blocks.n_blocks *= 2;
    double all = (double)manager_bytes(&one), per_block = ((double)manager_bytes(&blocks) - all) / n_blocks;
    double per_seq = ((double)manager_bytes(&seqs) - all) / one.max_seqs;
    kvf__bench_times t = {.s = {per_block}, .n = 1};
    kvf__bench_begin("pool/metadata", &t, 1, "bytes/block", 1, all);
    seqs.view_copies = one.view_copies = 1;
    kvf__bench_number("bytes_per_sequence", per_seq);
    kvf__bench_number("bytes_per_sequence_view_copies",
                      ((double)manager_bytes(&seqs) - (double)manager_bytes(&one)) / one.max_seqs);
    kvf__bench_number("kv_bytes", block_bytes * n_blocks);
    kvf__bench_number("share", all / (block_bytes * n_blocks));
    kvf__bench_number("share_per_block", per_block / block_bytes);
    kvf__bench_number("share_per_sequence", per_seq / (block_bytes * LAYERS * one.max_slots / BLOCK));
    kvf__bench_end();
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
    pool p = open_pool((uint32_t)((blocks + PER_SEQ - 1) / PER_SEQ));
    kvf_manager_config config = config_for(p.n_seqs, p.n_blocks);
    for (int shuffled = 0; shuffled < 2; shuffled++)
        for (int steps = 0; steps < 2; steps++) measure(&p, shuffled, steps, repetitions, manager_bytes(&config));
    close_pool(&p);
    measure_decode(repetitions);
    print_metadata();
    return 0;
}
