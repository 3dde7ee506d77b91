/* Copy lists carried out on host memory, within a tier and between two. */
#include "attention/call.h"

/* Where the blocks and score pages of both tiers live. */
typedef struct tiers {
    kvf_pages pages[2];
    kvf_score_pages scores[2];
} tiers;

static bool of_blocks(uint32_t kind) {
    return kind == KVF_COPY_BLOCK || kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_BLOCK_IN;
}
/* 0: the device's, 1: the host's. */
static int src_tier(uint32_t kind) { return kind == KVF_COPY_BLOCK_IN || kind == KVF_COPY_SCORE_IN; }
static int dst_tier(uint32_t kind) { return kind == KVF_COPY_BLOCK_OUT || kind == KVF_COPY_SCORE_OUT; }

static void copy_slots(void *to, size_t dst, const void *from, size_t src, size_t n, size_t bytes) {
    if (to) memcpy((unsigned char *)to + dst * bytes, (const unsigned char *)from + src * bytes, n * bytes);
}

static void copy_block(const kvf_pages *to, const kvf_pages *from, const kvf_copy *copy) {
    size_t row_bytes = from->head_dim * kvf_dtype_bytes(from->dtype), head_bytes = from->block_size * row_bytes;
    const unsigned char *k_src = (unsigned char *)from->k + from->k_block_stride * copy->src;
    const unsigned char *v_src = (unsigned char *)from->v + from->v_block_stride * copy->src;
    unsigned char *k_dst = (unsigned char *)to->k + to->k_block_stride * copy->dst;
    unsigned char *v_dst = (unsigned char *)to->v + to->v_block_stride * copy->dst;
    for (uint32_t h = 0; h < from->heads_per_group; h++) {
        size_t src = kvf__slot_index(from, copy->src, h, 0), dst = kvf__slot_index(to, copy->dst, h, 0);
        memcpy(k_dst + h * head_bytes, k_src + h * head_bytes, copy->n_slots * row_bytes);
        memcpy(v_dst + h * head_bytes, v_src + h * head_bytes, copy->n_slots * row_bytes);
        copy_slots(to->pos, dst, from->pos, src, copy->n_slots, sizeof *to->pos);
        copy_slots(to->key_norm, dst, from->key_norm, src, copy->n_slots, sizeof *to->key_norm);
        copy_slots(to->weight, dst, from->weight, src, copy->n_slots, sizeof *to->weight);
        copy_slots(to->bias, dst, from->bias, src, copy->n_slots, sizeof *to->bias);
    }
}

static void copy_score_page(const kvf_score_pages *to, const kvf_score_pages *from, const kvf_copy *copy) {
    size_t rows = (size_t)from->n_arrays * from->heads_per_group, bs = from->block_size;
    for (size_t r = 0; r < rows; r++)
        copy_slots(to->base, ((size_t)copy->dst * rows + r) * bs, from->base, ((size_t)copy->src * rows + r) * bs,
                   copy->n_slots, sizeof *to->base);
}

/* A tier that is not there has no ids. */
static kvf_status read_tier(tiers *t, int tier, const kvf_pages *pages, const kvf_score_pages *scores) {
    t->pages[tier] = (kvf_pages){.n_blocks = 0};
    t->scores[tier] = (kvf_score_pages){.n_pages = 0};
    if (pages && kvf__config_read(&t->pages[tier], sizeof *t->pages, pages, "kvf_pages", NULL)) return KVF_E_INVALID;
    if (scores && kvf__config_read(&t->scores[tier], sizeof *t->scores, scores, "kvf_score_pages", NULL))
        return KVF_E_INVALID;
    return KVF_OK;
}

/* What is copied has the same shape at both ends, and each array that one end has. */
static bool same_shapes(const tiers *t, bool pages, bool scores) {
    const kvf_pages *a = &t->pages[0], *b = &t->pages[1];
    const kvf_score_pages *x = &t->scores[0], *y = &t->scores[1];
    if (pages && (a->dtype != b->dtype || a->block_size != b->block_size || a->heads_per_group != b->heads_per_group ||
                  a->head_dim != b->head_dim || !a->pos != !b->pos || !a->key_norm != !b->key_norm ||
                  !a->weight != !b->weight || !a->bias != !b->bias))
        return false;
    return !scores ||
           (x->n_arrays == y->n_arrays && x->heads_per_group == y->heads_per_group && x->block_size == y->block_size);
}

static kvf_status check_copy(const tiers *t, const kvf_copy *c) {
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

kvf_status kvf_copies_run_tiers(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_pages *host_pages,
                                const kvf_score_pages *host_scores, const kvf_copy_list *copies) {
    tiers t;
    if (!pages || !copies || (copies->n && !copies->items)) return KVF_E_INVALID;
    if (read_tier(&t, 0, pages, scores) || read_tier(&t, 1, host_pages, host_scores)) return KVF_E_INVALID;
    if (!same_shapes(&t, host_pages != NULL, scores && host_scores)) return KVF_E_INVALID;
    for (uint32_t i = 0; i < copies->n; i++)
        if (check_copy(&t, &copies->items[i])) return KVF_E_INVALID;
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        int src = src_tier(c->kind), dst = dst_tier(c->kind);
        if (src == dst && c->src == c->dst) continue;
        if (of_blocks(c->kind))
            copy_block(&t.pages[dst], &t.pages[src], c);
        else
            copy_score_page(&t.scores[dst], &t.scores[src], c);
    }
    return KVF_OK;
}

kvf_status kvf_copies_run(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_copy_list *copies) {
    return kvf_copies_run_tiers(pages, scores, NULL, NULL, copies);
}
