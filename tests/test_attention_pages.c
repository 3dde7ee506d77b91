/* Append, copies, errors, and reported failures of other systems: addresses past 4 GiB, causal alignment, the range of
 * half precision. */
#define _GNU_SOURCE
#include "attention_cases.h"

#include <sys/mman.h>

static kvf_stream *stream_of(uint32_t n) {
    kvf_stream *stream;
    cr_assert_eq(kvf_stream_create_cpu(NULL, n, &stream, NULL), KVF_OK);
    return stream;
}

Test(attention_pages, append_writes_rows_and_metadata) {
    for (kvf_dtype dtype = KVF_F32; dtype <= KVF_BF16; dtype++) {
        world *w = make_world((shape){2, 2, 1, 40, 8, 3, {21, 5, 0}, {30, 1, 12}, dtype, true, 0, 0}, 1);
        kvf_stream *stream = stream_of(2);
        for (uint32_t i = 0; i < 3; i++) {
            w->next_pos[i] += w->s.tokens[i];
            for (uint32_t g = 0; g < 2; g++) w->n_slots[table_of(w, i, g)] += w->s.tokens[i];
        }
        w->k[3] = 7e4f; /* infinite in half precision */
        kvf_attention a = make_call(w);
        cr_assert_eq(kvf_attention_append(stream, &a, NULL), KVF_OK);
        for (uint32_t seq = 0; seq < 3; seq++)
            for (uint32_t kv = 0; kv < 4; kv++)
                for (uint32_t t = 0; t < w->s.tokens[seq]; t++) {
                    uint32_t table = table_of(w, seq, kv / 2), slot = context_of(&w->s, seq, kv / 2) + t;
                    uint32_t block = w->rows[w->row_offset[table] + slot / 8];
                    size_t at = ((size_t)block * 2 + kv % 2) * 8 + slot % 8, in = ((kv % 2) * 8 + slot % 8) * 40;
                    const unsigned char *k = (unsigned char *)w->pages.k + block * w->pages.k_block_stride;
                    const unsigned char *v = (unsigned char *)w->pages.v + block * w->pages.v_block_stride;
                    const float *from_k = w->k + (w->q_begin[seq] + t) * w->kv_stride + kv * 40;
                    const float *from_v = w->v + (w->q_begin[seq] + t) * w->kv_stride + kv * 40;
                    double norm = 0;
                    for (uint32_t i = 0; i < 40; i++) {
                        float x = dtype ? kvf__widen(dtype, ((const uint16_t *)(const void *)k)[in + i])
                                        : ((const float *)(const void *)k)[in + i];
                        float y = dtype ? kvf__widen(dtype, ((const uint16_t *)(const void *)v)[in + i])
                                        : ((const float *)(const void *)v)[in + i];
                        cr_assert_eq(x, stored(w, from_k[i]));
                        cr_assert_eq(y, stored(w, from_v[i]));
                        norm += (double)x * (double)x;
                    }
                    cr_assert_eq(w->pages.key_norm[at], (float)sqrt(norm));
                    cr_assert_eq(w->pages.pos[at], w->s.context[seq] + 100 + t,
                                 "positions go on from next_pos, not from slots");
                    cr_assert_eq(w->pages.weight[at], 1.0f);
                    cr_assert_eq(w->pages.bias[at], 0.0f);
                    cr_assert(isinf(w->pages.score[at]) && w->pages.score[at] > 0);
                }
        kvf_stream_destroy(stream);
        free_world(w);
    }
}

Test(attention_pages, append_touches_nothing_else) {
    world *w = make_world((shape){1, 1, 1, 8, 8, 1, {3}, {2}, KVF_F32, false, 0, 0}, 1), *before = make_world(w->s, 1);
    w->n_slots[table_of(w, 0, 0)] += 2;
    w->next_pos[0] += 2;
    kvf_attention a = make_call(w);
    cr_assert_eq(kvf_attention_append(NULL, &a, NULL), KVF_OK);
    uint32_t block = w->rows[w->row_offset[table_of(w, 0, 0)]];
    for (uint32_t b = 0; b < w->pages.n_blocks; b++)
        for (uint32_t slot = 0; slot < 8; slot++) {
            if (b == block && (slot == 3 || slot == 4)) continue;
            size_t at = b * w->pages.k_block_stride + slot * 32;
            cr_assert_arr_eq((char *)w->pages.k + at, (char *)before->pages.k + at, 32);
            cr_assert_arr_eq((char *)w->pages.v + at, (char *)before->pages.v + at, 32);
            cr_assert_eq(w->pages.weight[b * 8 + slot], 0.0f);
            cr_assert_eq(w->pages.score[b * 8 + slot], 0.0f);
        }
    free_world(w);
    free_world(before);
}

Test(attention_pages, copies_move_blocks_and_score_pages) {
    world *w = make_world((shape){1, 2, 1, 16, 8, 1, {30}, {1}, KVF_F16, true, 0, 0}, 2);
    uint32_t src = w->rows[w->row_offset[table_of(w, 0, 0)]], dst = w->rows[w->row_offset[table_of(w, 0, 0)] + 4];
    size_t slots = 2 * 8, bytes = w->pages.k_block_stride;
    unsigned char *pool = w->pages.k;
    for (size_t i = 0; i < slots; i++) {
        w->pages.pos[src * slots + i] = (uint32_t)i + 5;
        w->pages.key_norm[src * slots + i] = w->pages.weight[src * slots + i] = (float)i + 0.5f;
    }
    float scores[4 * 3 * 2 * 8];
    for (size_t i = 0; i < sizeof scores / sizeof *scores; i++) scores[i] = (float)i;
    kvf_score_pages s = {
        .struct_size = sizeof s, .base = scores, .n_pages = 4, .n_arrays = 3, .heads_per_group = 2, .block_size = 8};
    kvf_copy items[] = {{KVF_COPY_BLOCK, src, dst, 8}, {KVF_COPY_SCORE_PAGE, 1, 3, 5}};
    kvf_copy_list list = {items, 2, 2};
    cr_assert_eq(kvf_copies_run(&w->pages, &s, NULL, NULL, &list), KVF_OK);
    cr_assert_arr_eq(pool + src * bytes, pool + dst * bytes, bytes);
    cr_assert_arr_eq(w->pages.pos + src * slots, w->pages.pos + dst * slots, slots * 4);
    cr_assert_arr_eq(w->pages.key_norm + src * slots, w->pages.key_norm + dst * slots, slots * 4);
    cr_assert_arr_eq(w->pages.weight + src * slots, w->pages.weight + dst * slots, slots * 4);
    cr_assert_arr_eq(w->pages.bias + src * slots, w->pages.bias + dst * slots, slots * 4);
    for (size_t i = 0; i < 48; i++)
        cr_assert_eq(scores[3 * 48 + i], (float)(i % 8 < 5 ? 48 + i : 3 * 48 + i), "only the leading slots");
    /* Wrong ids change nothing, wherever in the list they are. */
    kvf_copy bad[][2] = {{{KVF_COPY_BLOCK, dst, src, 8}, {KVF_COPY_BLOCK, w->pages.n_blocks, 0, 8}},
                         {{KVF_COPY_BLOCK, dst, src, 8}, {KVF_COPY_BLOCK, 0, w->pages.n_blocks, 8}},
                         {{KVF_COPY_BLOCK, dst, src, 8}, {KVF_COPY_BLOCK, 0, 1, 9}},
                         {{KVF_COPY_BLOCK, dst, src, 8}, {KVF_COPY_SCORE_PAGE, 0, 4, 8}},
                         {{KVF_COPY_BLOCK, dst, src, 8}, {2, 0, 1, 8}}};
    memset(pool + dst * bytes, 0, bytes);
    memset(pool + src * bytes, 1, bytes);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        list.items = bad[i];
        cr_assert_eq(kvf_copies_run(&w->pages, &s, NULL, NULL, &list), KVF_E_INVALID, "case %zu", i);
        cr_assert_eq(pool[src * bytes], 1);
    }
    list.items = items;
    cr_assert_eq(kvf_copies_run(&w->pages, NULL, NULL, NULL, &list), KVF_E_INVALID, "score pages that are not there");
    free_world(w);
}

/* Pages of a tier, all in one piece of memory, each element another number. */
static kvf_pages tier_pages(uint32_t n_blocks, uint32_t head_dim, unsigned char *memory) {
    size_t half = (size_t)2 * 8 * head_dim * 4, slots = (size_t)n_blocks * 16;
    kvf_pages p = {.struct_size = sizeof p,
                   .dtype = KVF_F32,
                   .block_size = 8,
                   .n_blocks = n_blocks,
                   .heads_per_group = 2,
                   .head_dim = head_dim,
                   .k_block_stride = half,
                   .v_block_stride = half};
    p.k = memory;
    p.v = memory + n_blocks * half;
    p.pos = (uint32_t *)(void *)(memory + 2 * n_blocks * half);
    p.key_norm = (float *)(void *)(p.pos + slots);
    p.weight = p.key_norm + slots;
    p.bias = p.weight + slots;
    p.score = p.bias + slots;
    return p;
}

Test(attention_pages, copies_go_to_the_host_and_back) {
    enum { N = 4 * 16 * (2 * 16 + 5) };
    static _Alignas(64) unsigned char device[N * 4], host[N * 4];
    static float device_scores[4 * 48], host_scores[2 * 48];
    for (uint32_t i = 0; i < N; i++) {
        float here = (float)i, there = -here;
        memcpy(device + (size_t)i * 4, &here, 4);
        memcpy(host + (size_t)i * 4, &there, 4);
    }
    for (size_t i = 0; i < 192; i++) device_scores[i] = (float)i;
    kvf_pages d = tier_pages(4, 16, device), h = tier_pages(2, 16, host);
    kvf_score_pages ds = {.struct_size = sizeof ds,
                          .base = device_scores,
                          .n_pages = 4,
                          .n_arrays = 3,
                          .heads_per_group = 2,
                          .block_size = 8},
                    hs = ds;
    hs.base = host_scores;
    hs.n_pages = 2;
    kvf_copy items[] = {{KVF_COPY_BLOCK_OUT, 3, 1, 8},
                        {KVF_COPY_SCORE_OUT, 3, 0, 8},
                        {KVF_COPY_BLOCK_IN, 1, 0, 5},
                        {KVF_COPY_SCORE_IN, 0, 2, 5}};
    kvf_copy_list list = {items, 4, 4};
    cr_assert_eq(kvf_copies_run(&d, &ds, &h, &hs, &list), KVF_OK);
    for (size_t head = 0; head < 2; head++)
        for (size_t slot = 0; slot < 8; slot++) {
            bool back = slot < 5;
            size_t from = 3 * 16 + head * 8 + slot, out = 16 + head * 8 + slot, in = head * 8 + slot;
            cr_assert_eq(h.pos[out], d.pos[from]);
            cr_assert_eq(d.pos[in] == d.pos[from], back);
            cr_assert_eq(h.key_norm[out], d.key_norm[from]);
            cr_assert_eq(d.key_norm[in] == d.key_norm[from], back);
            cr_assert_eq(h.weight[out], d.weight[from]);
            cr_assert_eq(d.weight[in] == d.weight[from], back);
            cr_assert_eq(h.bias[out], d.bias[from]);
            cr_assert_eq(d.bias[in] == d.bias[from], back);
            cr_assert_eq(h.score[out], d.score[from]);
            cr_assert_eq(d.score[in] == d.score[from], back);
            for (size_t c = 0; c < 16; c++) {
                cr_assert_eq(((float *)h.k)[out * 16 + c], ((float *)d.k)[from * 16 + c]);
                cr_assert_eq(((float *)h.v)[out * 16 + c], ((float *)d.v)[from * 16 + c]);
                cr_assert_eq(((float *)d.k)[in * 16 + c] == ((float *)d.k)[from * 16 + c], back);
                cr_assert_eq(((float *)d.v)[in * 16 + c] == ((float *)d.v)[from * 16 + c], back);
            }
        }
    for (size_t i = 0; i < 48; i++) {
        cr_assert_eq(host_scores[i], device_scores[3 * 48 + i]);
        cr_assert_eq(device_scores[2 * 48 + i], (float)(i % 8 < 5 ? 3 * 48 + i : 2 * 48 + i));
    }
    kvf_copy bad[] = {{KVF_COPY_BLOCK_OUT, 4, 0, 8}, {KVF_COPY_BLOCK_OUT, 0, 2, 8}, {KVF_COPY_BLOCK_IN, 2, 0, 8},
                      {KVF_COPY_SCORE_IN, 2, 0, 8},  {KVF_COPY_SCORE_OUT, 0, 2, 8}, {KVF_COPY_BLOCK_OUT, 0, 0, 9},
                      {KVF_COPY_KINDS, 0, 0, 8}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(kvf_copies_run(&d, &ds, &h, &hs, &(kvf_copy_list){&bad[i], 1, 1}), KVF_E_INVALID, "%zu", i);
    cr_assert_eq(kvf_copies_run(&d, &ds, NULL, NULL, &list), KVF_E_INVALID, "a host that is not there");
    kvf_pages other = tier_pages(2, 8, host);
    cr_assert_eq(kvf_copies_run(&d, &ds, &other, &hs, &list), KVF_E_INVALID, "another head size");
    other = h;
    other.bias = NULL;
    cr_assert_eq(kvf_copies_run(&d, &ds, &other, &hs, &list), KVF_E_INVALID, "an array that the host lacks");
    other = h;
    other.score = NULL;
    cr_assert_eq(kvf_copies_run(&d, &ds, &other, &hs, &list), KVF_E_INVALID, "scores that the host lacks");
    hs.n_arrays = 2;
    cr_assert_eq(kvf_copies_run(&d, &ds, &h, &hs, &list), KVF_E_INVALID, "fewer scores");
}

/* Zero queries and value = position: the answer is the mean of the positions seen. Reported of masks that align to the
 * first key instead of the last. */
Test(attention_pages, e4_causal_mask_ends_at_the_newest_key) {
    static const struct { uint32_t context, tokens, chunk; } cases[] = {{3, 2, 2}, {0, 5, 5}, {4, 1, 1}, {0, 5, 3}};
    for (kvf_cpu_path path = KVF_CPU_AUTO; path <= KVF_CPU_AVX512; path++)
        for (size_t i = 0; kvf_cpu_has_path(path) && i < 4; i++) {
            world *w =
                make_world((shape){1, 1, 1, 8, 8, 1, {cases[i].context}, {cases[i].tokens}, KVF_F32, false, 0, 0}, i);
            memset(w->q, 0, w->n_total * w->q_stride * sizeof(float));
            for (uint32_t j = 0; j < 5; j++)
                for (uint32_t c = 0; c < 8; c++) {
                    w->dense_v[j * 8 + c] = (float)j;
                    if (j >= cases[i].context) w->v[(j - cases[i].context) * w->kv_stride + c] = (float)j;
                }
            results r = run_plan(w, (plan){.path = path, .chunk = cases[i].chunk});
            for (uint32_t t = 0; t < cases[i].tokens; t++)
                cr_assert_float_eq(r.out[t * 8], (float)(cases[i].context + t) / 2, 1e-6, "%s, case %zu, token %u: %g",
                                   path_name(path), i, t, (double)r.out[t * 8]);
            free_results(&r);
            free_world(w);
        }
}

/* Keys and queries of 256 with head size 128: the product is far beyond half precision. */
Test(attention_pages, d7_products_beyond_half_precision_stay_finite) {
    world *w = make_world((shape){1, 1, 2, 128, 16, 1, {20}, {4}, KVF_F16, false, 0, 0}, 4);
    world *single = make_world((shape){1, 1, 2, 128, 16, 1, {20}, {4}, KVF_F32, false, 0, 0}, 4);
    for (size_t i = 0; i < w->n_total * w->q_stride; i++) w->q[i] = single->q[i] = i % 3 ? 256.0f : -256.0f;
    for (size_t i = 0; i < (size_t)w->stride * 128; i++) {
        w->dense_k[i] = single->dense_k[i] = (i / 128 + i) % 5 ? 256.0f : -256.0f;
        w->dense_v[i] = single->dense_v[i] = (float)(i / 128) / 8;
    }
    for (size_t i = 0; i < w->n_total * w->kv_stride; i++) {
        w->k[i] = single->k[i] = i % 7 ? 256.0f : -256.0f;
        w->v[i] = single->v[i] = (float)(i % 16);
    }
    for (int decode = 0; decode < 2; decode++) {
        results want = run_plan(single, (plan){.path = KVF_CPU_REF, .decode = decode});
        for (kvf_cpu_path path = KVF_CPU_AUTO; path <= KVF_CPU_AVX512; path++) {
            if (!kvf_cpu_has_path(path)) continue;
            results got = run_plan(w, (plan){.path = path, .decode = decode});
            expect_near(&got, &want, 1e-5, path_name(path), true, true);
            free_results(&got);
        }
        free_results(&want);
    }
    free_world(w);
    free_world(single);
}

/* Block 131,072 of 16 x 8 x 128 halves begins at byte 2^32 of K: 32-bit arithmetic would find block 0. */
Test(attention_pages, e3_addresses_past_4_gib) {
    const uint32_t block = 131072, n_blocks = block + 2, d = 128, heads = 8, bs = 16;
    const size_t half = (size_t)heads * bs * d * 2, pool_bytes = n_blocks * half, slots = (size_t)n_blocks * heads * bs;
    void *pool[2];
    for (int i = 0; i < 2; i++) {
        pool[i] = mmap(NULL, pool_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pool[i] == MAP_FAILED) cr_skip_test("4 GiB of address space cannot be reserved");
    }
    uint32_t *pos = mmap(NULL, slots * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert(pos != MAP_FAILED);
    kvf_pages pages = {.struct_size = sizeof pages,
                       .dtype = KVF_F16,
                       .n_blocks = n_blocks,
                       .block_size = bs,
                       .heads_per_group = heads,
                       .head_dim = d,
                       .k = pool[0],
                       .v = pool[1],
                       .k_block_stride = half,
                       .v_block_stride = half,
                       .pos = pos};
    uint32_t row[] = {0}, n_slots[] = {bs}, next_pos[] = {bs}, q_begin[] = {0, bs}, one[] = {0, 1};
    uint64_t offset[] = {0};
    kvf_view view = {.struct_size = sizeof view,
                     .n_seqs = 1,
                     .n_layers = 1,
                     .n_groups = 1,
                     .heads_per_group = heads,
                     .block_size = bs,
                     .rows = row,
                     .row_offset = offset,
                     .n_slots = n_slots,
                     .next_pos = next_pos};
    size_t width = heads * d;
    float *x = zeros(bs * width, 4), *out = zeros(bs * width, 4);
    kvf_attention a = {.struct_size = sizeof a,
                       .view = &view,
                       .pages = &pages,
                       .seq_end = 1,
                       .n_q_heads = heads,
                       .q_begin = q_begin,
                       .q = x,
                       .k = x,
                       .v = x,
                       .q_stride = width,
                       .kv_stride = width,
                       .out = out,
                       .out_stride = width};
    cr_assert_eq(kvf_attention_workspace_bytes(1, d, heads, heads, bs, 1, bs, &a.workspace_bytes), KVF_OK);
    a.workspace = aligned_alloc(64, a.workspace_bytes);
    for (uint32_t i = 0; i < 2; i++) { /* 1.0 into block 0, 2.0 into block 131,072 */
        row[0] = i ? block : 0;
        for (size_t j = 0; j < bs * width; j++) x[j] = (float)(i + 1);
        cr_assert_eq(kvf_attention_append(NULL, &a, NULL), KVF_OK);
    }
    float lse[16 * 8];
    kvf_mass mass = {.struct_size = sizeof mass, .lse = lse};
    a.mass = &mass;
    const kvf_cpu_path paths[] = {KVF_CPU_REF, KVF_CPU_AUTO};
    for (int p = 0; p < 2; p++)
        for (int i = 0; i < 3; i++) {
            if (i == 2) { /* and a copy of it, one block further */
                kvf_copy copy = {KVF_COPY_BLOCK, block, block + 1, bs};
                cr_assert_eq(kvf_copies_run(&pages, NULL, NULL, NULL, &(kvf_copy_list){&copy, 1, 1}), KVF_OK);
            }
            float value = i ? 2.0f : 1.0f, want = value * 2.0f * (float)d / sqrtf((float)d) + logf((float)bs);
            row[0] = i ? block + (uint32_t)i - 1 : 0;
            a.path = paths[p];
            a.q_begin = one;
            cr_assert_eq(kvf_attention_decode(NULL, &a, NULL), KVF_OK);
            for (size_t j = 0; j < width; j++) cr_assert_float_eq(out[j], value, 1e-6);
            cr_assert_float_eq(lse[0], want, 1e-4, "keys: %g", (double)lse[0]);
            a.q_begin = q_begin;
            cr_assert_eq(kvf_attention_prefill(NULL, &a, NULL), KVF_OK);
            for (size_t j = 0; j < bs * width; j++) cr_assert_float_eq(out[j], value, 1e-6);
            cr_assert_float_eq(lse[bs * heads - 1], want, 1e-4, "keys: %g", (double)lse[bs * heads - 1]);
        }
    free(a.workspace);
    free(x);
    free(out);
    munmap(pool[0], pool_bytes);
    munmap(pool[1], pool_bytes);
    munmap(pos, slots * 4);
}

/* Head size 2 at one radian a position, padded to 8 with zeros; 10 tokens, {3, 4} and then {5} evicted, then an append.
 * Original positions are kept, so the newest query sees the key of position 9 one step away. */
Test(attention_pages, d4_positions_survive_evictions) {
    world *w = make_world((shape){1, 1, 1, 8, 8, 1, {7}, {1}, KVF_F32, false, 0, 0}, 1);
    static const uint32_t kept[] = {0, 1, 2, 6, 7, 8, 9};
    memset(w->dense_k, 0, 8 * 8 * 4);
    for (uint32_t j = 0; j < 7; j++) {
        w->dense_k[j * 8] = cosf((float)kept[j]);
        w->dense_k[j * 8 + 1] = sinf((float)kept[j]);
    }
    reset_pages(w);
    w->next_pos[0] = 10;
    uint32_t t = table_of(w, 0, 0), at = 7;
    w->next_pos[0]++; /* as kvf_append does */
    w->n_slots[t]++;
    memset(w->k, 0, 8 * 4);
    memset(w->q, 0, 8 * 4);
    w->k[0] = w->q[0] = cosf(10.0f);
    w->k[1] = w->q[1] = sinf(10.0f);
    float out[8], row[16], lse;
    kvf_mass mass = {.struct_size = sizeof mass, .row = row, .row_stride = 16, .lse = &lse};
    kvf_attention a = make_call(w);
    a.out = out;
    a.out_stride = 8;
    a.scale = 1.0f;
    a.mass = &mass;
    give_workspace(w, &a, 1);
    cr_assert_eq(kvf_attention_append(NULL, &a, NULL), KVF_OK);
    cr_assert_eq(kvf_attention_decode(NULL, &a, NULL), KVF_OK);
    cr_assert_eq(w->pages.pos[(size_t)w->rows[w->row_offset[t]] * 8 + at], 10, "not the number of slots");
    cr_assert_float_eq(logf(row[6]) + lse, 0.5403f, 1e-4, "score against the key from position 9");
    cr_assert_float_eq(logf(row[7]) + lse, 1.0f, 1e-4);
    free(a.workspace);
    free_world(w);
}

/* ---- Errors ---------------------------------------------------------------------------------- */

typedef struct broken {
    world *w;
    kvf_attention a;
    kvf_pages pages;
    kvf_view view;
    kvf_mass mass;
    uint32_t q_begin[3], rows[64];
    uint8_t gqa[2];
    uint32_t last_begin[2];
    float *cols[2]; /* the same memory */
} broken;

enum { APPEND = 1, PREFILL = 2, DECODE = 4, ATTEND = PREFILL | DECODE, ALL = 7 };

static void expect_error(broken *b, int calls, kvf_status status, const char *text) {
    kvf_status (*const call[])(kvf_stream *, const kvf_attention *,
                               kvf_error *) = {kvf_attention_append, kvf_attention_prefill, kvf_attention_decode};
    for (int i = 0; i < 3; i++) {
        kvf_error err = {.text = ""};
        if (!(calls & (1 << i))) continue;
        kvf_status st = call[i](NULL, &b->a, &err);
        cr_assert_eq(st, status, "call %d: \"%s\": status %d, text \"%s\"", i, text, st, err.text);
        cr_assert(strstr(err.text, text), "call %d: \"%s\" is not in \"%s\"", i, text, err.text);
        cr_assert_eq(call[i](NULL, &b->a, NULL), status);
    }
    for (size_t i = 0; i < 2 * b->w->q_stride; i++) cr_assert(isnan(b->a.out[i]), "outputs are untouched");
}

static void restore(broken *b) {
    world *w = b->w;
    b->pages = w->pages;
    b->view = w->view;
    cr_assert(w->pages.n_blocks <= sizeof b->rows / sizeof *b->rows);
    memcpy(b->rows, w->rows, w->pages.n_blocks * sizeof *b->rows);
    b->view.rows = b->rows;
    memcpy(b->q_begin, (uint32_t[]){0, 1, 2}, sizeof b->q_begin);
    memset(b->gqa, 0, sizeof b->gqa);
    b->mass = (kvf_mass){.struct_size = sizeof b->mass,
                         .row = b->mass.row,
                         .row_stride = w->stride,
                         .col_sums = b->cols,
                         .col_stride = w->stride,
                         .row_gqa = b->gqa,
                         .last_sums = b->cols,
                         .last_begin = b->last_begin,
                         .sq_sums = b->cols};
    void *workspace = b->a.workspace;
    size_t bytes = b->a.workspace_bytes;
    float *out = b->a.out;
    b->a = make_call(w);
    b->a.view = &b->view;
    b->a.pages = &b->pages;
    b->a.mass = &b->mass;
    b->a.q_begin = b->q_begin;
    b->a.out = out;
    b->a.workspace = workspace;
    b->a.workspace_bytes = bytes;
}

static const uint32_t position_0[2] = {0, 0}, position_9[2] = {9, 9};

static void give_max(broken *b, const uint32_t *begin, const uint32_t *end) {
    b->mass.max_prob = b->cols;
    b->mass.max_begin = begin;
    b->mass.max_end = end;
}

#define BROKEN(calls, status, text, ...)      \
    do {                                      \
        restore(b);                           \
        __VA_ARGS__;                          \
        expect_error(b, calls, status, text); \
    } while (0)

static broken *make_broken(void) {
    broken *b = zeros(1, sizeof *b);
    b->w = make_world((shape){1, 2, 2, 16, 8, 2, {20, 3}, {1, 1}, KVF_F16, false, 0, 0}, 1);
    for (uint32_t i = 0; i < 2; i++) {
        b->w->n_slots[table_of(b->w, i, 0)]++;
        b->w->next_pos[i]++;
    }
    b->mass.row = zeros(2 * 2 * b->w->stride, 4);
    b->cols[0] = b->cols[1] = zeros(4 * b->w->stride, 4);
    b->a = make_call(b->w);
    give_workspace(b->w, &b->a, 1);
    b->a.out = zeros(2 * b->w->q_stride, 4);
    for (size_t i = 0; i < 2 * b->w->q_stride; i++) b->a.out[i] = NAN;
    return b;
}

static void free_broken(broken *b) {
    free(b->mass.row);
    free(b->cols[0]);
    free(b->a.workspace);
    free(b->a.out);
    free_world(b->w);
    free(b);
}

Test(attention_pages, errors_of_pages_and_view) {
    broken *b = make_broken();
    const kvf_status bad = KVF_E_INVALID;
    BROKEN(ALL, bad, "kvf_attention: struct_size 1", b->a.struct_size = 1);
    BROKEN(ALL, bad, "kvf_view: is NULL", b->a.view = NULL);
    BROKEN(ALL, bad, "kvf_pages: is NULL", b->a.pages = NULL);
    BROKEN(ATTEND, bad, "kvf_mass: struct_size 0", b->mass.struct_size = 0);
    BROKEN(ALL, bad, "block_size 12: must be a power of two in [8, 256]", b->pages.block_size = 12);
    BROKEN(ALL, bad, "block_size 4: ", b->pages.block_size = 4);
    BROKEN(ALL, bad, "block_size 8 of the pages: the view has 16", b->view.block_size = 16);
    BROKEN(ALL, bad, "heads_per_group 0: ", b->pages.heads_per_group = 0);
    BROKEN(ALL, bad, "heads_per_group 2 of the pages: the view has 1", b->view.heads_per_group = 1);
    BROKEN(ALL, bad, "head_dim 20: must be a multiple of 8", b->pages.head_dim = 20);
    BROKEN(ALL, bad, "head_dim 264: ", b->pages.head_dim = 264);
    BROKEN(ALL, bad, "dtype 5: ", b->pages.dtype = (kvf_dtype)5);
    BROKEN(ALL, bad, "n_blocks 0: ", b->pages.n_blocks = 0);
    BROKEN(ALL, bad, "pages: k is NULL", b->pages.k = NULL);
    BROKEN(ALL, bad, "pages: v is NULL", b->pages.v = NULL);
    BROKEN(ALL, bad, "k_block_stride 510: must be a multiple of 2, at least 512 bytes", b->pages.k_block_stride = 510);
    BROKEN(ALL, bad, "v_block_stride 1023: ", b->pages.v_block_stride = 1023);
    BROKEN(ALL, bad, "v_block_stride 9223372036854775808: wraps", b->pages.v_block_stride = (uint64_t)1 << 63);
    BROKEN(ALL, bad, "view: rows is NULL", b->view.rows = NULL);
    BROKEN(ALL, bad, "view: row_offset is NULL", b->view.row_offset = NULL);
    BROKEN(ALL, bad, "view: n_slots is NULL", b->view.n_slots = NULL);
    BROKEN(ALL, bad, "n_groups 0: ", b->view.n_groups = 0);
    BROKEN(ALL, bad, "layer 2: the view has 2 layers", b->a.layer = 2);
    BROKEN(ALL, bad, "sequences [1, 0): ", b->a.seq_begin = 1; b->a.seq_end = 0);
    BROKEN(ALL, bad, "sequences [0, 3): the view has 2", b->a.seq_end = 3);
    BROKEN(ALL, bad, "q_begin is NULL", b->a.q_begin = NULL);
    BROKEN(ALL, bad, "q_begin[2] 0: less than", b->q_begin[2] = 0);
    BROKEN(APPEND | PREFILL, bad, "sequence 1, group 0: 5 query rows over 4 slots: append first", b->q_begin[2] = 6);
    BROKEN(DECODE, bad, "sequence 1: 2 query rows: decode takes one", b->q_begin[2] = 3);
    BROKEN(DECODE, bad, "sequence 0: 0 query rows: decode takes one", b->q_begin[1] = 0; b->q_begin[2] = 1);
    BROKEN(ALL, bad, "id 4294967295: there are", b->rows[b->w->row_offset[table_of(b->w, 0, 0)] + 2] = KVF_NO_BLOCK);
    BROKEN(APPEND, bad, "view: next_pos is NULL", b->view.next_pos = NULL);
    BROKEN(APPEND, bad, "pages: pos is NULL", b->pages.pos = NULL);
    BROKEN(APPEND, bad, "sequence 0: 1 new tokens: next_pos is 0", b->view.next_pos = (uint32_t[]){0, 9});
    restore(b);
    free_broken(b);
}

Test(attention_pages, errors_of_arguments_and_workspace) {
    broken *b = make_broken();
    const kvf_status bad = KVF_E_INVALID;
    char need[80];
    BROKEN(APPEND, bad, "k is NULL", b->a.k = NULL);
    BROKEN(APPEND, bad, "v is NULL", b->a.v = NULL);
    BROKEN(APPEND, bad, "k: rows 31 floats apart: must be at least 32", b->a.kv_stride = 31);
    BROKEN(ATTEND, bad, "q is NULL", b->a.q = NULL);
    BROKEN(ATTEND, bad, "q: rows 63 floats apart: must be at least 64", b->a.q_stride = 63);
    BROKEN(ATTEND, bad, "out: rows 63 floats apart", b->a.out_stride = 63);
    BROKEN(ATTEND, bad, "n_q_heads 0: ", b->a.n_q_heads = 0);
    BROKEN(ATTEND, bad, "n_q_heads 5: must be a multiple of the 2 KV heads", b->a.n_q_heads = 5);
    BROKEN(ATTEND, bad, "n_q_heads 130: at most 64 for each of the 2 KV heads", b->a.n_q_heads = 130);
    BROKEN(ATTEND, bad, "scale nan: must be finite", b->a.scale = fabsf(NAN));
    BROKEN(PREFILL, bad, "col_stride 20: the longest table has 21 slots", b->mass.col_stride = 20);
    BROKEN(DECODE, bad, "row_stride 20: the longest table has 21 slots", b->mass.row_stride = 20);
    BROKEN(ATTEND, bad, "row_gqa[1] 3: ", b->gqa[1] = 3);
    BROKEN(PREFILL, bad, "col_stride 20: the longest table has 21 slots", b->mass.col_stride = 20;
           b->mass.col_sums = b->mass.last_sums = NULL);
    BROKEN(PREFILL, bad, "last_begin is NULL", b->mass.last_begin = NULL);
    BROKEN(PREFILL, bad, "next_pos is NULL: last_sums", b->view.next_pos = NULL);
    BROKEN(PREFILL, bad, "max_begin is NULL", give_max(b, NULL, position_9));
    BROKEN(PREFILL, bad, "max_end is NULL", give_max(b, position_0, NULL));
    BROKEN(PREFILL, bad, "max_begin 9, max_end 0: must ascend", give_max(b, position_9, position_0));
    BROKEN(PREFILL, bad, "up to next_pos 1", give_max(b, position_0, position_9);
           b->view.next_pos = (uint32_t[]){1, 9});
    BROKEN(PREFILL, bad, "col_stride 20: position max_end 121 of sequence 0 is slot 21",
           give_max(b, position_0, b->w->next_pos);
           b->mass.col_sums = b->mass.last_sums = b->mass.sq_sums = NULL; b->mass.col_stride = 20);
    BROKEN(PREFILL, bad, "sequence 0: 1 query rows: next_pos is 0", b->view.next_pos = (uint32_t[]){0, 9});
    BROKEN(ATTEND, bad, "path 5: must be a kvf_cpu_path", b->a.path = (kvf_cpu_path)5);
    if (!kvf_cpu_has_path(KVF_CPU_AVX2))
        BROKEN(ATTEND, KVF_E_UNSUPPORTED, "path 3: this CPU lacks AVX2", b->a.path = KVF_CPU_AVX2);
    if (!kvf_cpu_has_path(KVF_CPU_AVX512))
        BROKEN(ATTEND, KVF_E_UNSUPPORTED, "path 4: this CPU lacks AVX-512", b->a.path = KVF_CPU_AVX512);
    restore(b);
    size_t bytes = b->a.workspace_bytes;
    snprintf(need, sizeof need, "workspace_bytes %zu: this call needs %zu", bytes - 1, bytes);
    BROKEN(ATTEND, bad, need, b->a.workspace_bytes = bytes - 1);
    b->a.workspace_bytes = bytes;
    void *workspace = b->a.workspace;
    BROKEN(ATTEND, bad, "workspace_bytes 0: this call needs", b->a.workspace = NULL);
    b->a.workspace = workspace;
    BROKEN(ATTEND, bad, "workspace: must be aligned to 64 bytes", b->a.workspace = (char *)workspace + 4);
    b->a.workspace = workspace;
    restore(b);
    cr_assert_eq(kvf_attention_prefill(NULL, NULL, NULL), bad);
    cr_assert_eq(kvf_attention_prefill(NULL, &b->a, NULL), KVF_OK, "nothing of this was left broken");
    free_broken(b);
}

Test(attention_pages, sizes_are_checked) {
    size_t bytes = 7;
    cr_assert_eq(kvf_attention_workspace_bytes(0, 64, 8, 8, 100, 1, 1, &bytes), KVF_E_INVALID);
    cr_assert_eq(kvf_attention_workspace_bytes(1, 12, 8, 8, 100, 1, 1, &bytes), KVF_E_INVALID);
    cr_assert_eq(kvf_attention_workspace_bytes(1, 64, 8, 3, 100, 1, 1, &bytes), KVF_E_INVALID);
    cr_assert_eq(kvf_attention_workspace_bytes(1, 64, 8, 0, 100, 1, 1, &bytes), KVF_E_INVALID);
    cr_assert_eq(kvf_attention_workspace_bytes(1, 64, 65, 1, 100, 1, 1, &bytes), KVF_E_INVALID);
    cr_assert_eq(bytes, 7);
    size_t before = 0; /* never less for more of anything */
    static const uint32_t more[][7] = {{1, 64, 8, 8, 100, 1, 1},       {2, 64, 8, 8, 100, 1, 1},
                                       {2, 128, 8, 8, 100, 1, 1},      {2, 128, 16, 8, 100, 1, 1},
                                       {2, 128, 16, 8, 8000, 1, 1},    {2, 128, 16, 8, 8000, 9, 1},
                                       {2, 128, 16, 8, 8000, 9, 90000}};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++, before = bytes) {
        const uint32_t *m = more[i];
        cr_assert_eq(kvf_attention_workspace_bytes(m[0], m[1], m[2], m[3], m[4], m[5], m[6], &bytes), KVF_OK);
        cr_assert(bytes > before);
    }
    kvf_pages p = {.dtype = KVF_F16, .block_size = 16, .heads_per_group = 8, .head_dim = 128};
    cr_assert_eq(kvf_pages_block_bytes(&p), 16 * 8 * 128 * 2 * 2);
    p.head_dim = p.heads_per_group = p.block_size = UINT32_MAX;
    cr_assert_eq(kvf_pages_block_bytes(&p), 0);
    p.head_dim = 0;
    cr_assert_eq(kvf_pages_block_bytes(&p), 0);
    cr_assert_eq(kvf_pages_block_bytes(NULL), 0);
    cr_assert_not(kvf_cpu_has_path((kvf_cpu_path)9));
}

/* A range without tokens is no error and needs nothing. */
Test(attention_pages, an_empty_range_does_nothing) {
    world *w = make_world((shape){1, 1, 1, 8, 8, 2, {5, 9}, {1, 1}, KVF_F32, false, 0, 0}, 1);
    kvf_attention a = make_call(w);
    a.seq_begin = a.seq_end = 1;
    cr_assert_eq(kvf_attention_append(NULL, &a, NULL), KVF_OK);
    cr_assert_eq(kvf_attention_prefill(NULL, &a, NULL), KVF_OK);
    cr_assert_eq(kvf_attention_decode(NULL, &a, NULL), KVF_OK);
    a.seq_begin = 0;
    a.seq_end = 2;
    a.q_begin = (uint32_t[]){0, 0, 0};
    cr_assert_eq(kvf_attention_prefill(NULL, &a, NULL), KVF_OK);
    free_world(w);
}
