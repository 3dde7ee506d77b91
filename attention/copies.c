/* Copy lists, within a tier or between two: checked, divided into copies that may run in any order, and given to a device. */
#include "attention/call.h"
#include "base/copy_index.h"

/* The memory that copies run in, by kvf_memory. A tier that is not there has no ids. */
typedef struct tiers {
    kvf_pages pages[2];
    kvf_score_pages scores[2];
} tiers;

static kvf_status read_tier(tiers *t, int tier, const kvf_pages *pages, const kvf_score_pages *scores, kvf_error *err) {
    t->pages[tier] = (kvf_pages){.n_blocks = 0};
    t->scores[tier] = (kvf_score_pages){.n_pages = 0};
    kvf_status st = pages ? kvf__config_read(&t->pages[tier], sizeof *t->pages, pages, "kvf_pages", err) : KVF_OK;
    if (st || !scores) return st;
    return kvf__config_read(&t->scores[tier], sizeof *t->scores, scores, "kvf_score_pages", err);
}

/* Of 4-byte slots. */
static kvf_copy_plane slot_plane(void *of_device, void *of_host, uint32_t n_rows, uint32_t block_size) {
    uint64_t stride = (uint64_t)n_rows * block_size * 4;
    return (kvf_copy_plane){{of_device, of_host}, {stride, stride}, n_rows, block_size * 4, 4};
}

/* What both tiers have has the same shape. */
static void make_planes(const tiers *t, kvf_copy_plane *planes) {
    const kvf_pages *p = &t->pages[0], *h = &t->pages[1];
    const kvf_score_pages *s = &t->scores[0], *hs = &t->scores[1];
    uint32_t heads = p->heads_per_group, bs = p->block_size, slot_bytes = (uint32_t)kvf__row_bytes(p);
    const kvf_copy_plane all[KVF_COPY_PLANES] = {
        {{p->k, h->k}, {p->k_block_stride, h->k_block_stride}, heads, bs * slot_bytes, slot_bytes},
        {{p->v, h->v}, {p->v_block_stride, h->v_block_stride}, heads, bs * slot_bytes, slot_bytes},
        slot_plane(p->pos, h->pos, heads, bs),
        slot_plane(p->key_norm, h->key_norm, heads, bs),
        slot_plane(p->weight, h->weight, heads, bs),
        slot_plane(p->bias, h->bias, heads, bs),
        slot_plane(p->score, h->score, heads, bs),
        slot_plane(s->base, hs->base, s->n_arrays * s->heads_per_group, s->block_size)};
    memcpy(planes, all, sizeof all);
}

static kvf_status check_shapes(const tiers *t, bool pages, bool scores, kvf_error *err) {
    const kvf_pages *a = &t->pages[0], *b = &t->pages[1];
    const kvf_score_pages *x = &t->scores[0], *y = &t->scores[1];
    if (pages && (a->dtype != b->dtype || a->block_size != b->block_size || a->heads_per_group != b->heads_per_group ||
                  a->head_dim != b->head_dim || !a->pos != !b->pos || !a->key_norm != !b->key_norm ||
                  !a->weight != !b->weight || !a->bias != !b->bias || !a->score != !b->score))
        return kvf__fail(err, KVF_E_INVALID,
                         "host_pages: must have the dtype, block_size, heads_per_group, head_dim and arrays of pages");
    if (scores &&
        (x->n_arrays != y->n_arrays || x->heads_per_group != y->heads_per_group || x->block_size != y->block_size))
        return kvf__fail(err, KVF_E_INVALID,
                         "host_scores: must have the n_arrays, heads_per_group and block_size of scores");
    return KVF_OK;
}

static kvf_status check_copy(const tiers *t, const kvf_copy_list *list, uint32_t i, kvf_error *err) {
    const kvf_copy *c = &list->items[i];
    if (c->kind >= KVF_COPY_KINDS)
        return kvf__fail(err, KVF_E_INVALID, "copy %u: kind %u: must be a kvf_copy_kind", i, c->kind);
    int from = kvf__copy_from(c->kind), to = kvf__copy_to(c->kind);
    bool block = kvf__copy_is_block(c->kind);
    if (block ? !t->pages[from].k || !t->pages[from].v || !t->pages[to].k || !t->pages[to].v
              : !t->scores[from].base || !t->scores[to].base)
        return kvf__fail(err, KVF_E_INVALID, "copy %u: kind %u: these %s are not given", i, c->kind,
                         block ? "pages" : "score pages");
    uint32_t n_from = block ? t->pages[from].n_blocks : t->scores[from].n_pages;
    uint32_t n_to = block ? t->pages[to].n_blocks : t->scores[to].n_pages;
    uint32_t bs = block ? t->pages[0].block_size : t->scores[0].block_size;
    if (c->src >= n_from || c->dst >= n_to)
        return kvf__fail(err, KVF_E_INVALID, "copy %u: %s %u: there are %u", i, c->src >= n_from ? "src" : "dst",
                         c->src >= n_from ? c->src : c->dst, c->src >= n_from ? n_from : n_to);
    if (c->n_slots > bs)
        return kvf__fail(err, KVF_E_INVALID, "copy %u: n_slots %u: must be at most block_size, %u", i, c->n_slots, bs);
    return KVF_OK;
}

/* What the copies of a part write, by kvf_memory and whether it is a block. Exact for ids below WRITTEN; of more, some ids look alike,
 * which only ends a part early. */
enum { WRITTEN = 1 << 14 };
typedef struct written {
    uint64_t bits[2][2][WRITTEN / 64];
} written;

static uint64_t *word_of(written *w, int memory, uint32_t kind, uint32_t id) {
    return &w->bits[memory][kvf__copy_is_block(kind)][id % WRITTEN / 64];
}

/* The end of the part that begins at `begin`: no copy of it reads what another one writes. The manager's lists need nothing else: what a
 * copy reads or writes is pinned until the list is done. */
static uint32_t part_end(const kvf_copy_list *list, uint32_t begin) {
    written w = {0};
    for (uint32_t i = begin; i < list->n; i++) {
        const kvf_copy *c = &list->items[i];
        if (*word_of(&w, kvf__copy_from(c->kind), c->kind, c->src) >> c->src % 64 & 1) return i;
        *word_of(&w, kvf__copy_to(c->kind), c->kind, c->dst) |= (uint64_t)1 << c->dst % 64;
    }
    return list->n;
}

kvf_status kvf_copies_queue(const kvf_device *device, kvf_stream *stream, const kvf_pages *pages,
                            const kvf_score_pages *scores, const kvf_pages *host_pages,
                            const kvf_score_pages *host_scores, const kvf_copy_list *copies, kvf_error *err) {
    kvf_device d;
    tiers t;
    kvf_block_copies part;
    if (!pages || !copies) return kvf__fail(err, KVF_E_INVALID, "%s is NULL", pages ? "copies" : "pages");
    if (copies->n > copies->capacity || (copies->n && !copies->items))
        return kvf__fail(err, KVF_E_INVALID, "copies: n %u: items must be set, with a capacity of at least n",
                         copies->n);
    kvf_status st = kvf__device_resolve(device, &d, err);
    if (!st) st = read_tier(&t, KVF_MEMORY_DEVICE, pages, scores, err);
    if (!st) st = read_tier(&t, KVF_MEMORY_HOST, host_pages, host_scores, err);
    if (!st) st = check_shapes(&t, host_pages != NULL, scores && host_scores, err);
    for (uint32_t i = 0; i < copies->n && !st; i++) st = check_copy(&t, copies, i, err);
    if (st) return st;
    make_planes(&t, part.planes);
    for (uint32_t i = 0, end; i < copies->n && !st; i = end) {
        end = part_end(copies, i);
        part.items = copies->items + i;
        part.n_items = end - i;
        st = d.copy_blocks(d.ctx, stream, &part, err);
    }
    return st;
}

kvf_status kvf_copies_run(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_pages *host_pages,
                          const kvf_score_pages *host_scores, const kvf_copy_list *copies) {
    return kvf_copies_queue(NULL, NULL, pages, scores, host_pages, host_scores, copies, NULL);
}
