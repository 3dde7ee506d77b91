/* Copies of blocks by id are the copies of their rows, one after another: on the CPU, in its streams, and on a device that runs
 * the rows of an operation in any order. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "kvfold/attention.h"
#include "tests/fake_device.h"

TestSuite(copies);

enum { BS = 8, HEADS = 2, DIM = 8, ARRAYS = 3, LISTS = 60, MOST = 40 };
static const uint32_t n_blocks[2] = {40, 24}, n_pages[2] = {16, 12}; /* by kvf_memory */

/* One piece of memory for each tier, so that all of it can be compared. */
typedef struct area {
    kvf_pages pages[2];
    kvf_score_pages scores[2];
    unsigned char *memory[2];
    size_t bytes[2];
} area;

static void make(area *a) {
    for (int m = 0; m < 2; m++) {
        const size_t block = BS * HEADS * DIM * 2, slots = (size_t)n_blocks[m] * HEADS * BS * 4;
        a->bytes[m] = n_blocks[m] * 2 * block + 5 * slots + (size_t)n_pages[m] * ARRAYS * HEADS * BS * 4;
        unsigned char *p = a->memory[m] = malloc(a->bytes[m]);
        cr_assert(p);
        a->pages[m] = (kvf_pages){.struct_size = sizeof(kvf_pages),
                                  .dtype = KVF_BF16,
                                  .n_blocks = n_blocks[m],
                                  .block_size = BS,
                                  .heads_per_group = HEADS,
                                  .head_dim = DIM,
                                  .k = p,
                                  .v = p + block, /* side by side */
                                  .k_block_stride = 2 * block,
                                  .v_block_stride = 2 * block};
        p += n_blocks[m] * 2 * block;
        a->pages[m].pos = (uint32_t *)(void *)p;
        a->pages[m].key_norm = (float *)(void *)(p + slots);
        a->pages[m].weight = (float *)(void *)(p + 2 * slots);
        a->pages[m].bias = (float *)(void *)(p + 3 * slots);
        a->pages[m].score = (float *)(void *)(p + 4 * slots);
        a->scores[m] =
            (kvf_score_pages){sizeof(kvf_score_pages), (float *)(void *)(p + 5 * slots), n_pages[m], ARRAYS, HEADS, BS};
    }
}

static void drop(area *a) {
    free(a->memory[0]);
    free(a->memory[1]);
}

/* Never 0xff, by which the fake device marks what it has yet to write. */
static void refill(area *a, uint64_t *seed) {
    for (int m = 0; m < 2; m++)
        for (size_t i = 0; i < a->bytes[m]; i++) a->memory[m][i] = (unsigned char)(gw_random(seed) % 255);
}

/* ---- Row by row ------------------------------------------------------------------------------------------- */

static void copy_rows(unsigned char *to, const unsigned char *from, size_t n_rows, size_t slot_bytes, size_t n_slots) {
    for (size_t row = 0; row < n_rows; row++)
        for (size_t i = 0; i < n_slots * slot_bytes; i++)
            to[row * BS * slot_bytes + i] = from[row * BS * slot_bytes + i];
}

static void copy_one(area *a, const kvf_copy *c) {
    static const int from_of[] = {0, 0, 0, 1, 0, 1}, to_of[] = {0, 0, 1, 0, 1, 0};
    int from = from_of[c->kind], to = to_of[c->kind];
    const kvf_pages *x = &a->pages[from], *y = &a->pages[to];
    if (c->kind == KVF_COPY_SCORE_PAGE || c->kind == KVF_COPY_SCORE_OUT || c->kind == KVF_COPY_SCORE_IN) {
        const size_t page = ARRAYS * HEADS * BS;
        copy_rows((unsigned char *)(a->scores[to].base + c->dst * page),
                  (unsigned char *)(a->scores[from].base + c->src * page), ARRAYS * HEADS, 4, c->n_slots);
        return;
    }
    copy_rows((unsigned char *)y->k + y->k_block_stride * c->dst, (unsigned char *)x->k + x->k_block_stride * c->src,
              HEADS, DIM * 2, c->n_slots);
    copy_rows((unsigned char *)y->v + y->v_block_stride * c->dst, (unsigned char *)x->v + x->v_block_stride * c->src,
              HEADS, DIM * 2, c->n_slots);
    const size_t slots = HEADS * BS;
    void *const ins[] = {x->pos, x->key_norm, x->weight, x->bias, x->score};
    void *const outs[] = {y->pos, y->key_norm, y->weight, y->bias, y->score};
    for (int i = 0; i < 5; i++)
        copy_rows((unsigned char *)outs[i] + c->dst * slots * 4, (unsigned char *)ins[i] + c->src * slots * 4, HEADS, 4,
                  c->n_slots);
}

/* A list as managers make them: nothing is written twice, or after a copy of the list has read it; but a copy may read what an
 * earlier one writes. */
static uint32_t make_list(uint64_t *seed, kvf_copy *items) {
    static const int is_page[] = {0, 1, 0, 0, 1, 1}, from_of[] = {0, 0, 0, 1, 0, 1}, to_of[] = {0, 0, 1, 0, 1, 0};
    bool used[2][2][40] = {{{false}}};
    uint32_t n = 0;
    for (uint32_t tries = 0; tries < 4 * MOST && n < MOST; tries++) {
        uint32_t kind = (uint32_t)gw_random(seed) % KVF_COPY_KINDS;
        const uint32_t *size = is_page[kind] ? n_pages : n_blocks;
        kvf_copy c = {kind, (uint32_t)gw_random(seed) % size[from_of[kind]],
                      (uint32_t)gw_random(seed) % size[to_of[kind]], (uint32_t)gw_random(seed) % (BS + 1)};
        if (gw_random(seed) % 2) c.n_slots = BS;
        if (used[to_of[kind]][is_page[kind]][c.dst] || (from_of[kind] == to_of[kind] && c.src == c.dst)) continue;
        used[to_of[kind]][is_page[kind]][c.dst] = used[from_of[kind]][is_page[kind]][c.src] = true;
        items[n++] = c;
    }
    return n;
}

static kvf_status queue(const kvf_device *device, kvf_stream *stream, const area *a, const kvf_copy_list *list,
                        kvf_error *err) {
    return kvf_copies_queue(device, stream, &a->pages[0], &a->scores[0], &a->pages[1], &a->scores[1], list, err);
}

static void expect_equal(const area *have, const area *want, const char *what, uint32_t list) {
    for (int m = 0; m < 2; m++)
        cr_assert(!memcmp(have->memory[m], want->memory[m], want->bytes[m]), "%s, list %u: memory %d differs", what,
                  list, m);
}

Test(copies, of_blocks_are_those_of_their_rows) {
    area want, have;
    struct fake_device f;
    const kvf_device fake = fake_device(&f), *devices[] = {kvf_device_cpu(), kvf_device_cpu(), &fake};
    kvf_stream *streams[3] = {NULL};
    kvf_device_event *events[3] = {NULL};
    kvf_allocator a;
    kvf_copy items[MOST];
    uint64_t seed = 7;
    cr_assert_eq(kvf__allocator_resolve(NULL, &a, NULL), KVF_OK);
    make(&want), make(&have);
    for (int d = 1; d < 3; d++) { /* 0: at once */
        cr_assert_eq(devices[d]->stream_create(devices[d]->ctx, &a, &streams[d], NULL), KVF_OK);
        cr_assert_eq(devices[d]->event_create(devices[d]->ctx, streams[d], &events[d], NULL), KVF_OK);
    }
    for (uint32_t i = 0; i < LISTS; i++) {
        kvf_copy_list list = {items, make_list(&seed, items), MOST};
        cr_assert_gt(list.n, 20u);
        for (int d = 0; d < 3; d++) {
            uint64_t begin = seed;
            refill(&want, &begin);
            memcpy(have.memory[0], want.memory[0], want.bytes[0]);
            memcpy(have.memory[1], want.memory[1], want.bytes[1]);
            for (uint32_t k = 0; k < list.n; k++) copy_one(&want, &items[k]);
            cr_assert_eq(queue(devices[d], streams[d], &have, &list, NULL), KVF_OK);
            if (d) cr_assert_eq(devices[d]->event_record(devices[d]->ctx, events[d], NULL), KVF_OK);
            if (d) cr_assert_eq(devices[d]->event_wait(devices[d]->ctx, events[d], NULL), KVF_OK);
            expect_equal(&have, &want, devices[d]->name, i);
        }
    }
    cr_assert(f.n_changed == 0 && f.n_touched == 0);
    for (int d = 1; d < 3; d++) {
        devices[d]->event_destroy(devices[d]->ctx, events[d]);
        devices[d]->stream_destroy(devices[d]->ctx, streams[d]);
    }
    cr_assert_eq(f.n_alive, 0);
    drop(&want), drop(&have);
}

/* A swap of 48 layers is one operation each way; what reads an earlier copy's target waits for it. */
Test(copies, a_swap_of_48_layers_is_one_operation) {
    area x;
    struct fake_device f;
    const kvf_device fake = fake_device(&f);
    kvf_manager_config c;
    kvf_manager *m = NULL;
    kvf_seq seq;
    kvf_copy items[48];
    kvf_copy_list list = {items, 0, 48};
    kvf_stream *s = NULL;
    kvf_error err = {.text = ""};
    kvf_allocator a;
    cr_assert_eq(kvf__allocator_resolve(NULL, &a, NULL), KVF_OK);
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = 48, c.n_kv_heads = HEADS, c.block_size = BS, c.n_blocks = 64, c.n_host_blocks = 64;
    c.max_seqs = 2, c.max_slots = 64;
    cr_assert_eq(kvf_manager_create(&c, &m, &err), KVF_OK, "%s", err.text);
    make(&x);
    uint64_t seed = 1;
    refill(&x, &seed);
    x.pages[0].n_blocks = x.pages[1].n_blocks = 64; /* ids only: the fake device's stream is dropped before it runs */
    for (int i = 0; i < 2; i++) x.pages[i].k_block_stride = x.pages[i].v_block_stride = BS * HEADS * DIM * 2;
    for (int i = 0; i < 2; i++) x.pages[i].pos = NULL, x.pages[i].key_norm = NULL, x.pages[i].weight = NULL;
    for (int i = 0; i < 2; i++) x.pages[i].bias = NULL, x.pages[i].score = NULL;
    const size_t bytes = 64 * x.pages[0].k_block_stride;
    for (int i = 0; i < 2; i++) x.pages[i].k = calloc(1, bytes), x.pages[i].v = calloc(1, bytes);
    cr_assert_eq(fake.stream_create(fake.ctx, &a, &s, NULL), KVF_OK);
    cr_assert_eq(kvf_seq_create(m, &seq), KVF_OK);
    cr_assert_eq(kvf_append(m, &(kvf_append_item){seq, 5}, 1, NULL), KVF_OK);
    cr_assert_eq(kvf_swap_out(m, &seq, 1, &list), KVF_OK);
    cr_assert_eq(list.n, 48u);
    cr_assert_eq(queue(&fake, s, &x, &list, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(f.n_ops, 1);
    cr_assert_eq(kvf_copies_done(m, &list), KVF_OK);
    cr_assert_eq(kvf_swap_in(m, &seq, 1, 0, &list), KVF_OK);
    cr_assert_eq(queue(&fake, s, &x, &list, &err), KVF_OK, "%s", err.text);
    cr_assert_eq(f.n_ops, 2);
    kvf_copy chain[] = {{KVF_COPY_BLOCK, 1, 2, 8}, {KVF_COPY_BLOCK, 1, 3, 8}, {KVF_COPY_BLOCK_OUT, 2, 2, 8}};
    cr_assert_eq(queue(&fake, s, &x, &(kvf_copy_list){chain, 3, 3}, &err), KVF_OK);
    cr_assert_eq(f.n_ops, 4, "two parts");
    fake.stream_destroy(fake.ctx, s);
    for (int i = 0; i < 2; i++) free(x.pages[i].k), free(x.pages[i].v);
    kvf_manager_destroy(m);
    drop(&x);
}

Test(copies, refused_ones_copy_nothing_and_failures_are_told) {
    area x;
    struct fake_device f;
    const kvf_device fake = fake_device(&f);
    kvf_device lame = fake;
    kvf_error err = {.text = ""};
    make(&x);
    uint64_t seed = 1;
    refill(&x, &seed);
    unsigned char *before = malloc(x.bytes[0]);
    cr_assert(before);
    memcpy(before, x.memory[0], x.bytes[0]);
    const struct {
        kvf_copy copy;
        const char *text;
    } bad[] = {{{KVF_COPY_KINDS, 0, 0, 8}, "copy 1: kind 6: must be a kvf_copy_kind"},
               {{KVF_COPY_BLOCK, 40, 0, 8}, "copy 1: src 40: there are 40"},
               {{KVF_COPY_BLOCK_OUT, 0, 24, 8}, "copy 1: dst 24: there are 24"},
               {{KVF_COPY_SCORE_IN, 12, 0, 8}, "copy 1: src 12: there are 12"},
               {{KVF_COPY_BLOCK, 0, 1, 9}, "copy 1: n_slots 9: must be at most block_size, 8"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kvf_copy items[] = {{KVF_COPY_BLOCK, 1, 2, 8}, bad[i].copy};
        cr_assert_eq(queue(&fake, NULL, &x, &(kvf_copy_list){items, 2, 2}, &err), KVF_E_INVALID, "%zu", i);
        cr_assert(strstr(err.text, bad[i].text), "\"%s\"", err.text);
    }
    kvf_copy out = {KVF_COPY_BLOCK_OUT, 1, 2, 8};
    const kvf_copy_list list = {&out, 1, 1};
    cr_assert_eq(kvf_copies_queue(&fake, NULL, &x.pages[0], NULL, NULL, NULL, &list, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "copy 0: kind 2: these pages are not given"), "%s", err.text);
    x.pages[1].head_dim = 16;
    cr_assert_eq(queue(&fake, NULL, &x, &list, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "host_pages: must have the dtype"), "%s", err.text);
    x.pages[1].head_dim = DIM;
    x.scores[1].n_arrays = 1;
    cr_assert_eq(queue(&fake, NULL, &x, &list, &err), KVF_E_INVALID);
    x.scores[1].n_arrays = ARRAYS;
    lame.copy_blocks = NULL;
    cr_assert_eq(queue(&lame, NULL, &x, &list, &err), KVF_E_INVALID);
    cr_assert(strstr(err.text, "copy_blocks is NULL"), "%s", err.text);
    cr_assert_eq(f.n_calls, 0);
    f.fail_after = 0;
    cr_assert_eq(queue(&fake, NULL, &x, &list, &err), KVF_E_DEVICE);
    cr_assert(strstr(err.text, "copy_blocks has failed"), "%s", err.text);
    cr_assert(!memcmp(before, x.memory[0], x.bytes[0]));
    free(before);
    drop(&x);
}
