/* Measures the prefix cache: nanoseconds a layer-block to match and to insert, beside hashing and one header a block.
 *
 * kvfold-bench prefix [-r REPETITIONS] [-b|--blocks BLOCKS]. Prompts of 512 tokens in 32 layers, one behind the other, all
 * different, over a free list in random order. insert: kvf_prefix_store of a prompt whose blocks are in its tables. lookup:
 * kvf_prefix_lookup of one that is cached and idle. match: lookup and kvf_prefix_attach, that is with the references
 * taken and the tables written. The floor hashes the tokens of each block (XXH3, 128 bits) and reads and writes 8 bytes for
 * each block of each layer, by ids in the same order. "us_per_prompt" is the median for all of a prompt. */
#define _GNU_SOURCE
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench/json.h"
#include "kvfold/prefix.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { LAYERS = 32, BLOCK = 16, TOKENS = 512, PER_TABLE = TOKENS / BLOCK, PER_SEQ = LAYERS * PER_TABLE };
enum { INSERT, LOOKUP, MATCH, N_OPS };

typedef struct cache {
    uint32_t n_blocks, n_seqs;
    kvf_manager *manager;
    kvf_seq *seqs;     /* [n_seqs] */
    uint32_t *tokens;  /* [n_seqs][TOKENS] */
    uint32_t *ids;     /* [n_seqs][PER_SEQ], of the floor */
    uint64_t *headers; /* [n_blocks], of the floor */
    uint64_t sum;
} cache;

static void must(const cache *c, kvf_status status, const char *what) {
    if (status) kvf__bench_die("%s: %s: %s", what, kvf_status_name(status), kvf_manager_error(c->manager)->text);
}

static kvf_prefix_key key_of(const cache *c, uint32_t i) {
    return (kvf_prefix_key){
        .struct_size = sizeof(kvf_prefix_key), .tokens = c->tokens + (size_t)i * TOKENS, .n_tokens = TOKENS};
}

__attribute__((noinline)) static uint64_t floor_run(uint64_t *restrict headers, const uint32_t *restrict ids,
                                                    const uint32_t *restrict tokens, bool touch) {
    uint64_t sum = 0;
    for (uint32_t b = 0; b < PER_TABLE; b++) sum += XXH3_128bits(tokens + b * BLOCK, BLOCK * sizeof *tokens).low64;
    for (uint32_t i = 0; touch && i < PER_SEQ; i++) headers[ids[i]]++;
    return sum;
}

/* The free list in random order, by way of handles. */
static void shuffle(cache *c, uint64_t *state) {
    kvf_block *handles = kvf__bench_take(c->n_blocks * sizeof *handles);
    for (uint32_t i = 0; i < c->n_blocks; i++) must(c, kvf_block_take(c->manager, 0, &handles[i]), "kvf_block_take");
    for (uint32_t i = c->n_blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)((double)(kvf__bench_uniform(state) * 0.5f + 0.5f) * i);
        kvf_block x = handles[i];
        handles[i] = handles[j];
        handles[j] = x;
    }
    for (uint32_t i = 0; i < c->n_blocks; i++) must(c, kvf_block_release(c->manager, handles[i]), "kvf_block_release");
    free(handles);
}

/* Every prompt is found whole, in the blocks that it was stored from; the manager's own audit. */
static void check(cache *c) {
    kvf_error err = {.text = ""};
    for (uint32_t i = 0; i < c->n_seqs; i++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            const uint32_t *row;
            uint32_t n_blocks;
            must(c, kvf_seq_table(c->manager, c->seqs[i], layer, 0, NULL, &n_blocks, &row), "kvf_seq_table");
            if (n_blocks != PER_TABLE ||
                memcmp(row, c->ids + (size_t)i * PER_SEQ + layer * PER_TABLE, PER_TABLE * sizeof *row))
                kvf__bench_die("prefix: a hit gave other blocks");
        }
    if (kvf_audit(c->manager, &err)) kvf__bench_die("prefix: %s", err.text);
}

static void free_all(cache *c) {
    for (uint32_t i = 0; i < c->n_seqs; i++) must(c, kvf_seq_free(c->manager, c->seqs[i]), "kvf_seq_free");
}

static void prepare(cache *c) {
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        must(c, kvf_seq_create(c->manager, &c->seqs[i]), "kvf_seq_create");
        must(c, kvf_append(c->manager, &(kvf_append_item){c->seqs[i], TOKENS}, 1, NULL), "kvf_append");
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            const uint32_t *row;
            must(c, kvf_seq_table(c->manager, c->seqs[i], layer, 0, NULL, NULL, &row), "kvf_seq_table");
            memcpy(c->ids + (size_t)i * PER_SEQ + layer * PER_TABLE, row, PER_TABLE * sizeof *row);
        }
    }
}

static void run(cache *c, bool checked, double *ours, double *plain) {
    kvf_prefix_options options;
    kvf_prefix_options_init(&options, sizeof options);
    kvf_prefix_match match = {.struct_size = sizeof match};
    uint64_t found = 0;
    options.max_tokens = TOKENS;
    prepare(c);
    double t = kvf__clock();
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        kvf_prefix_key key = key_of(c, i);
        must(c, kvf_prefix_store(c->manager, c->seqs[i], &key, TOKENS, NULL, NULL), "kvf_prefix_store");
    }
    ours[INSERT] = kvf__clock() - t;
    free_all(c);
    t = kvf__clock();
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        kvf_prefix_key key = key_of(c, i);
        must(c, kvf_prefix_lookup(c->manager, &key, &options, &match), "kvf_prefix_lookup");
        found += match.n_tokens;
    }
    ours[LOOKUP] = kvf__clock() - t;
    t = kvf__clock();
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        kvf_prefix_key key = key_of(c, i);
        must(c, kvf_prefix_lookup(c->manager, &key, &options, &match), "kvf_prefix_lookup");
        must(c, kvf_seq_create(c->manager, &c->seqs[i]), "kvf_seq_create");
        must(c, kvf_prefix_attach(c->manager, c->seqs[i], &key, &match, NULL, NULL), "kvf_prefix_attach");
        found += match.n_tokens;
    }
    ours[MATCH] = kvf__clock() - t;
    if (found != 2ull * c->n_seqs * TOKENS) kvf__bench_die("prefix: %llu tokens found", (unsigned long long)found);
    if (checked) check(c);
    free_all(c);
    must(c, kvf_prefix_clear(c->manager), "kvf_prefix_clear");
    for (int op = 0; op < N_OPS; op++) {
        t = kvf__clock();
        for (uint32_t i = 0; i < c->n_seqs; i++)
            c->sum += floor_run(c->headers, c->ids + (size_t)i * PER_SEQ, c->tokens + (size_t)i * TOKENS, op != LOOKUP);
        plain[op] = kvf__clock() - t;
    }
}

static void measure(cache *c, int repetitions, size_t metadata_bytes) {
    static const char *const names[N_OPS] = {"prefix/insert", "prefix/lookup", "prefix/match"};
    static kvf__bench_times times[N_OPS][2], ratios[N_OPS];
    double s[2][N_OPS];
    for (int r = -2; r < repetitions; r++) { /* the first is checked; two warm up */
        run(c, r == -2, s[0], s[1]);
        for (int op = 0; op < N_OPS && r >= 0; op++) {
            for (int kind = 0; kind < 2; kind++) times[op][kind].s[r] = s[kind][op], times[op][kind].n = repetitions;
            ratios[op].s[r] = s[0][op] / s[1][op];
            ratios[op].n = repetitions;
        }
    }
    for (int op = 0; op < N_OPS; op++) {
        double n = (double)c->n_seqs * PER_SEQ, scale = 1e9 / n;
        for (int kind = 0; kind < 2; kind++) kvf__bench_sort(&times[op][kind]);
        kvf__bench_sort(&ratios[op]);
        kvf__bench_begin(names[op], &times[op][0], scale, "ns/layer-block", 1,
                         (double)c->n_seqs * TOKENS * 4 + (op == LOOKUP ? 0 : 12 * n));
        kvf__bench_floor(scale * kvf__bench_quantile(&times[op][1], .5), &ratios[op]);
        kvf__bench_number("us_per_prompt", 1e6 / c->n_seqs * kvf__bench_quantile(&times[op][0], .5));
        kvf__bench_number("prompts", c->n_seqs);
        kvf__bench_number("tokens", TOKENS);
        kvf__bench_number("layers", LAYERS);
        kvf__bench_number("blocks", c->n_blocks);
        kvf__bench_number("metadata_bytes", (double)metadata_bytes);
        kvf__bench_end();
    }
}

int kvf__bench_prefix(int argc, char **argv) {
    static const struct option longs[] = {{"blocks", required_argument, NULL, 'b'}, {NULL, 0, NULL, 0}};
    int repetitions = 31, option;
    long blocks = 65536;
    while ((option = getopt_long(argc, argv, "r:b:", longs, NULL)) != -1) switch (option) {
        case 'r': repetitions = (int)kvf__bench_int("-r", optarg, 1, KVF__BENCH_MAX_REPETITIONS); break;
        case 'b': blocks = kvf__bench_int("--blocks", optarg, PER_SEQ, (long)PER_SEQ << 16); break;
        default: kvf__bench_die("prefix [-r REPETITIONS] [-b|--blocks BLOCKS]");
        }
    cache c = {.n_seqs = (uint32_t)((blocks + PER_SEQ - 1) / PER_SEQ)};
    c.n_blocks = c.n_seqs * PER_SEQ;
    kvf_manager_config config;
    kvf_manager_config_init(&config, sizeof config);
    config.n_layers = LAYERS;
    config.n_kv_heads = 8;
    config.block_size = BLOCK;
    config.n_blocks = c.n_blocks;
    config.max_seqs = c.n_seqs;
    config.max_slots = TOKENS;
    config.prefix_cache = 1;
    kvf_error err = {.text = ""};
    size_t bytes;
    uint64_t state = 5;
    if (kvf_manager_bytes(&config, &bytes, &err) || kvf_manager_create(&config, &c.manager, &err))
        kvf__bench_die("%s", err.text);
    c.seqs = kvf__bench_take(c.n_seqs * sizeof *c.seqs);
    c.tokens = kvf__bench_take((size_t)c.n_seqs * TOKENS * sizeof *c.tokens);
    c.ids = kvf__bench_take(c.n_blocks * sizeof *c.ids);
    c.headers = kvf__bench_take(c.n_blocks * sizeof *c.headers);
    for (uint32_t i = 0; i < c.n_seqs * TOKENS; i++)
        c.tokens[i] = (uint32_t)((double)(kvf__bench_uniform(&state) * 0.5f + 0.5f) * 32000);
    shuffle(&c, &state);
    measure(&c, repetitions, bytes);
    kvf_manager_destroy(c.manager);
    void *all[] = {c.seqs, c.tokens, c.ids, c.headers};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return c.sum == 1; /* read, so that the floor is not left out */
}
