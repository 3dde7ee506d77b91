/* Copy lists, within a tier or between two: converted to copies of a device, or carried out on host memory. */
#include "attention/call.h"

enum { MOST_COPIES = 7 }; /* of a block: K, V and the slots' metadata */

static bool of_blocks(uint32_t kind) {
    return kind == KVF_COPY_BLOCK || kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_BLOCK_IN;
}
/* 0: the device's, 1: the host's. */
static int src_tier(uint32_t kind) { return kind == KVF_COPY_BLOCK_IN || kind == KVF_COPY_SCORE_IN; }
static int dst_tier(uint32_t kind) { return kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_SCORE_OUT; }

/* The first n_slots of each row of a block; an array that is not kept has none. */
static uint32_t give_rows(kvf_device_copy *out, void *to, size_t dst_at, const void *from, size_t src_at,
                          uint32_t n_rows, uint32_t block_size, uint32_t n_slots, size_t slot_bytes) {
    if (!to || !n_slots) return 0;
    size_t stride = block_size * slot_bytes;
    *out = (kvf_device_copy){(unsigned char *)to + dst_at,
                             (const unsigned char *)from + src_at,
                             n_slots * slot_bytes,
                             stride,
                             stride,
                             n_rows};
    if (n_slots == block_size) { /* one run */
        out->bytes = n_rows * stride;
        out->n_rows = 1;
    }
    return 1;
}

static uint32_t give_block(kvf_device_copy *out, const kvf_pages *to, const kvf_pages *from, const kvf_copy *c) {
    size_t row_bytes = kvf__row_bytes(from);
    size_t src = kvf__meta_at(from, c->src, 0, 0) * 4, dst = kvf__meta_at(to, c->dst, 0, 0) * 4;
    uint32_t heads = from->heads_per_group, bs = from->block_size, n = 0;
    n += give_rows(out, to->k, kvf__block_at(c->dst, to->k_block_stride), from->k,
                   kvf__block_at(c->src, from->k_block_stride), heads, bs, c->n_slots, row_bytes);
    n += give_rows(out + n, to->v, kvf__block_at(c->dst, to->v_block_stride), from->v,
                   kvf__block_at(c->src, from->v_block_stride), heads, bs, c->n_slots, row_bytes);
    n += give_rows(out + n, to->pos, dst, from->pos, src, heads, bs, c->n_slots, sizeof *to->pos);
    n += give_rows(out + n, to->key_norm, dst, from->key_norm, src, heads, bs, c->n_slots, sizeof *to->key_norm);
    n += give_rows(out + n, to->weight, dst, from->weight, src, heads, bs, c->n_slots, sizeof *to->weight);
    n += give_rows(out + n, to->bias, dst, from->bias, src, heads, bs, c->n_slots, sizeof *to->bias);
    return n + give_rows(out + n, to->score, dst, from->score, src, heads, bs, c->n_slots, sizeof *to->score);
}

static uint32_t give_score_page(kvf_device_copy *out, const kvf_score_pages *to, const kvf_score_pages *from,
                                const kvf_copy *c) {
    uint32_t rows = from->n_arrays * from->heads_per_group, bs = from->block_size;
    size_t src = kvf__score_index(from, c->src, 0, 0, 0), dst = kvf__score_index(to, c->dst, 0, 0, 0);
    return give_rows(out, to->base, dst * sizeof *to->base, from->base, src * sizeof *to->base, rows, bs, c->n_slots,
                     sizeof *to->base);
}

uint32_t kvf_copies_next(void *source, kvf_device_copy *out) {
    kvf_copies_source *s = source;
    uint32_t n = 0;
    if (!s || !s->copies || !out) return 0;
    while (s->n_given < s->copies->n && n + MOST_COPIES <= KVF_DEVICE_COPIES) {
        const kvf_copy *c = &s->copies->items[s->n_given++];
        int src = src_tier(c->kind), dst = dst_tier(c->kind);
        if (src == dst && c->src == c->dst) continue;
        n += of_blocks(c->kind) ? give_block(out + n, &s->pages[dst], &s->pages[src], c)
                                : give_score_page(out + n, &s->scores[dst], &s->scores[src], c);
    }
    return n;
}

/* A tier that is not there has no ids. */
static kvf_status read_tier(kvf_copies_source *t, int tier, const kvf_pages *pages, const kvf_score_pages *scores) {
    t->pages[tier] = (kvf_pages){.n_blocks = 0};
    t->scores[tier] = (kvf_score_pages){.n_pages = 0};
    if (pages && kvf__config_read(&t->pages[tier], sizeof *t->pages, pages, "kvf_pages", NULL)) return KVF_E_INVALID;
    if (scores && kvf__config_read(&t->scores[tier], sizeof *t->scores, scores, "kvf_score_pages", NULL))
        return KVF_E_INVALID;
    return KVF_OK;
}

/* What is copied has the same shape at both ends, and each array that one end has. */
static bool same_shapes(const kvf_copies_source *t, bool pages, bool scores) {
    const kvf_pages *a = &t->pages[0], *b = &t->pages[1];
    const kvf_score_pages *x = &t->scores[0], *y = &t->scores[1];
    if (pages && (a->dtype != b->dtype || a->block_size != b->block_size || a->heads_per_group != b->heads_per_group ||
                  a->head_dim != b->head_dim || !a->pos != !b->pos || !a->key_norm != !b->key_norm ||
                  !a->weight != !b->weight || !a->bias != !b->bias || !a->score != !b->score))
        return false;
    return !scores ||
           (x->n_arrays == y->n_arrays && x->heads_per_group == y->heads_per_group && x->block_size == y->block_size);
}

static kvf_status check_copy(const kvf_copies_source *t, const kvf_copy *c) {
    if (c->kind >= KVF_COPY_KINDS) return KVF_E_INVALID;
    int src = src_tier(c->kind), dst = dst_tier(c->kind);
    bool block = of_blocks(c->kind);
    const kvf_pages *from = &t->pages[src], *to = &t->pages[dst];
    if (c->src >= (block ? from->n_blocks : t->scores[src].n_pages) ||
        c->dst >= (block ? to->n_blocks : t->scores[dst].n_pages) ||
        c->n_slots > (block ? from->block_size : t->scores[src].block_size))
        return KVF_E_INVALID;
    bool there = block ? from->k && from->v && to->k && to->v : t->scores[src].base && t->scores[dst].base;
    return there ? KVF_OK : KVF_E_INVALID;
}

kvf_status kvf_copies_begin(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_pages *host_pages,
                            const kvf_score_pages *host_scores, const kvf_copy_list *copies, kvf_copies_source *out) {
    kvf_copies_source s = {.copies = copies};
    if (!pages || !copies || copies->n > copies->capacity || (copies->n && !copies->items) || !out)
        return KVF_E_INVALID;
    if (read_tier(&s, 0, pages, scores) || read_tier(&s, 1, host_pages, host_scores)) return KVF_E_INVALID;
    if (!same_shapes(&s, host_pages != NULL, scores && host_scores)) return KVF_E_INVALID;
    for (uint32_t i = 0; i < copies->n; i++)
        if (check_copy(&s, &copies->items[i])) return KVF_E_INVALID;
    *out = s;
    return KVF_OK;
}

kvf_status kvf_copies_run(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_pages *host_pages,
                          const kvf_score_pages *host_scores, const kvf_copy_list *copies) {
    kvf_copies_source s;
    kvf_status st = kvf_copies_begin(pages, scores, host_pages, host_scores, copies, &s);
    if (st) return st;
    const kvf_device *cpu = kvf_device_cpu();
    return cpu->copy(cpu->ctx, &(kvf_device_list){kvf_copies_next, &s}, NULL);
}
