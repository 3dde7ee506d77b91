/* The argument checks that all paths share, and the workspace's layout. */
#include "attention/call.h"

#include <math.h>

#include "base/view_stamp.h"

static kvf_status check_pages(const kvf__call *c, kvf_error *err) {
    const kvf_pages *p = &c->pages;
    uint32_t bs = p->block_size;
    if (bs < 8 || bs > 256 || (bs & (bs - 1)))
        return kvf__fail(err, KVF_E_INVALID, "block_size %u: must be a power of two in [8, 256]", bs);
    if (c->view.block_size != bs)
        return kvf__fail(err, KVF_E_INVALID, "block_size %u of the pages: the view has %u", bs, c->view.block_size);
    if (p->heads_per_group == 0 || p->heads_per_group > 1024)
        return kvf__fail(err, KVF_E_INVALID, "heads_per_group %u: must be in [1, 1024]", p->heads_per_group);
    if (c->view.heads_per_group != p->heads_per_group)
        return kvf__fail(err, KVF_E_INVALID, "heads_per_group %u of the pages: the view has %u", p->heads_per_group,
                         c->view.heads_per_group);
    if (p->head_dim == 0 || p->head_dim > 256 || p->head_dim % 8)
        return kvf__fail(err, KVF_E_INVALID, "head_dim %u: must be a multiple of 8 in [8, 256]", p->head_dim);
    size_t element = kvf_dtype_bytes(p->dtype);
    if (!element) return kvf__fail(err, KVF_E_INVALID, "dtype %d: must be KVF_F32, KVF_F16 or KVF_BF16", (int)p->dtype);
    if (p->n_blocks == 0) return kvf__fail(err, KVF_E_INVALID, "n_blocks 0: the pages need at least one block");
    if (!p->k || !p->v) return kvf__fail(err, KVF_E_INVALID, "pages: %s is NULL", p->k ? "v" : "k");
    uint64_t least = (uint64_t)p->heads_per_group * bs * p->head_dim * element;
    for (int i = 0; i < 2; i++) {
        uint64_t stride = i ? p->v_block_stride : p->k_block_stride;
        size_t end;
        if (stride < least || stride % element)
            return kvf__fail(err, KVF_E_INVALID, "%c_block_stride %llu: must be a multiple of %zu, at least %llu bytes",
                             i ? 'v' : 'k', (unsigned long long)stride, element, (unsigned long long)least);
        if (!kvf__mul((size_t)stride, p->n_blocks, &end))
            return kvf__fail(err, KVF_E_INVALID, "%c_block_stride %llu: wraps over %u blocks", i ? 'v' : 'k',
                             (unsigned long long)stride, p->n_blocks);
    }
    return KVF_OK;
}

/* Of a window: a slot's position, which the grid of tiles is by, follows from the newest. */
static kvf_status check_window(const kvf__call *c, uint32_t seq, uint32_t group, uint32_t n_slots, kvf_error *err) {
    uint32_t next_pos = c->view.next_pos[seq];
    if (next_pos >= n_slots && (next_pos - n_slots) % c->pages.block_size == 0) return KVF_OK;
    return kvf__fail(err, KVF_E_INVALID,
                     "sequence %u, group %u: %u slots up to position %u: a window's table must begin where a block of "
                     "positions does",
                     seq, group, n_slots, next_pos);
}

static kvf_status check_view(const kvf__call *c, kvf_error *err) {
    const kvf_view *v = &c->view;
    if (!v->rows || !v->row_offset || !v->n_slots)
        return kvf__fail(err, KVF_E_INVALID, "view: %s is NULL",
                         !v->rows         ? "rows"
                         : !v->row_offset ? "row_offset"
                                          : "n_slots");
    if (v->n_groups == 0 || v->n_groups > 1024)
        return kvf__fail(err, KVF_E_INVALID, "n_groups %u: must be in [1, 1024]", v->n_groups);
    if (!kvf__view_is_current(v))
        return kvf__fail(err, KVF_E_STALE, "view: its buffer has been filled again since; use the view of that fill");
    if (c->a.layer >= v->n_layers)
        return kvf__fail(err, KVF_E_INVALID, "layer %u: the view has %u layers", c->a.layer, v->n_layers);
    if (c->a.seq_begin > c->a.seq_end || c->a.seq_end > v->n_seqs)
        return kvf__fail(err, KVF_E_INVALID, "sequences [%u, %u): the view has %u", c->a.seq_begin, c->a.seq_end,
                         v->n_seqs);
    if (!c->a.q_begin) return kvf__fail(err, KVF_E_INVALID, "q_begin is NULL");
    return KVF_OK;
}

/* Lengths and query rows of every table of the range, and block ids that are not known to be in range. */
static kvf_status check_tables(kvf__call *c, kvf__call_kind kind, kvf_error *err) {
    const uint32_t *q_begin = c->a.q_begin;
    const bool known = kvf__view_ids_below(&c->view, c->pages.n_blocks);
    c->max_slots = 0;
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end; i++) {
        if (q_begin[i + 1] < q_begin[i])
            return kvf__fail(err, KVF_E_INVALID, "q_begin[%u] %u: less than the entry before it, %u", i + 1,
                             q_begin[i + 1], q_begin[i]);
        uint32_t n = q_begin[i + 1] - q_begin[i];
        if (kind == KVF__DECODE && n != 1)
            return kvf__fail(err, KVF_E_INVALID, "sequence %u: %u query rows: decode takes one a sequence", i, n);
        for (uint32_t g = 0; g < c->view.n_groups; g++) {
            size_t t = kvf__table(c, i, g);
            uint32_t slots = c->view.n_slots[t];
            if (n > slots)
                return kvf__fail(err, KVF_E_INVALID, "sequence %u, group %u: %u query rows over %u slots: append first",
                                 i, g, n, slots);
            const uint32_t *row = c->view.rows + c->view.row_offset[t];
            for (uint32_t b = 0, n_blocks = kvf__ceil_div(slots, c->pages.block_size); b < n_blocks && !known; b++)
                if (row[b] >= c->pages.n_blocks)
                    return kvf__fail(err, KVF_E_INVALID, "sequence %u, group %u, block %u: id %u: there are %u blocks",
                                     i, g, b, row[b], c->pages.n_blocks);
            kvf_status st = c->a.window && kind != KVF__APPEND ? check_window(c, i, g, slots, err) : KVF_OK;
            if (st) return st;
            if (n) c->max_slots = KVF__MAX(c->max_slots, slots);
        }
        if (kind == KVF__APPEND && c->view.next_pos[i] < n)
            return kvf__fail(err, KVF_E_INVALID, "sequence %u: %u new tokens: next_pos is %u", i, n,
                             c->view.next_pos[i]);
    }
    bool any = c->a.seq_begin < c->a.seq_end;
    c->token_begin = any ? q_begin[c->a.seq_begin] : 0;
    c->token_end = any ? q_begin[c->a.seq_end] : 0;
    return KVF_OK;
}

static kvf_status check_row(const char *name, const void *p, size_t stride, size_t least, kvf_error *err) {
    if (!p) return kvf__fail(err, KVF_E_INVALID, "%s is NULL", name);
    if (stride < least)
        return kvf__fail(err, KVF_E_INVALID, "%s: rows %zu floats apart: must be at least %zu", name, stride, least);
    return KVF_OK;
}

static kvf_status check_gqa(const kvf__call *c, kvf_error *err) {
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end && c->mass.row_gqa; i++)
        if (c->mass.row_gqa[i] > KVF_GQA_FIRST)
            return kvf__fail(err, KVF_E_INVALID, "row_gqa[%u] %u: must be a kvf_gqa", i, c->mass.row_gqa[i]);
    return KVF_OK;
}

/* What queries' positions follow from. */
static kvf_status check_last(const kvf__call *c, kvf_error *err) {
    if (!c->mass.last_begin) return kvf__fail(err, KVF_E_INVALID, "last_begin is NULL: last_sums needs it");
    if (!c->view.next_pos) return kvf__fail(err, KVF_E_INVALID, "view: next_pos is NULL: last_sums needs it");
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end; i++)
        if (c->view.next_pos[i] < c->a.q_begin[i + 1] - c->a.q_begin[i])
            return kvf__fail(err, KVF_E_INVALID, "sequence %u: %u query rows: next_pos is %u", i,
                             c->a.q_begin[i + 1] - c->a.q_begin[i], c->view.next_pos[i]);
    return KVF_OK;
}

static kvf_status check_max(const kvf__call *c, kvf_error *err) {
    const kvf_mass *m = &c->mass;
    if (!m->max_begin || !m->max_end)
        return kvf__fail(err, KVF_E_INVALID, "%s is NULL: max_prob needs it", m->max_begin ? "max_end" : "max_begin");
    if (!c->view.next_pos) return kvf__fail(err, KVF_E_INVALID, "view: next_pos is NULL: max_prob needs it");
    for (uint32_t i = c->a.seq_begin; i < c->a.seq_end; i++) {
        uint32_t begin = m->max_begin[i], end = m->max_end[i], next = c->view.next_pos[i];
        if (!m->max_prob[i]) continue;
        if (begin > end || end > next)
            return kvf__fail(err, KVF_E_INVALID,
                             "sequence %u: max_begin %u, max_end %u: must ascend, up to next_pos %u", i, begin, end,
                             next);
        for (uint32_t g = 0; g < c->view.n_groups; g++) {
            uint32_t n = kvf__max_slots_of(c, i, c->view.n_slots[kvf__table(c, i, g)]).end;
            if (m->col_stride < n)
                return kvf__fail(err, KVF_E_INVALID, "col_stride %zu: position max_end %u of sequence %u is slot %u",
                                 m->col_stride, end, i, n);
        }
    }
    return KVF_OK;
}

static kvf_status check_mass(const kvf__call *c, kvf__call_kind kind, kvf_error *err) {
    const kvf_mass *m = &c->mass;
    bool cols = kind == KVF__PREFILL && (m->col_sums || m->last_sums || m->sq_sums);
    if (cols && m->col_stride < c->max_slots)
        return kvf__fail(err, KVF_E_INVALID, "col_stride %zu: the longest table has %u slots", m->col_stride,
                         c->max_slots);
    kvf_status st = cols && m->last_sums ? check_last(c, err) : KVF_OK;
    if (!st && kind == KVF__PREFILL && m->max_prob) st = check_max(c, err);
    if (st) return st;
    if (cols && m->sq_sums) return check_gqa(c, err);
    if (kind == KVF__DECODE && m->row && m->row_stride < c->max_slots)
        return kvf__fail(err, KVF_E_INVALID, "row_stride %zu: the longest table has %u slots", m->row_stride,
                         c->max_slots);
    return kind == KVF__DECODE && m->row ? check_gqa(c, err) : KVF_OK;
}

static kvf_status check_heads(kvf__call *c, kvf_error *err) {
    uint32_t n_q = c->a.n_q_heads, n_kv = c->n_kv_heads;
    if (n_q == 0 || n_q % n_kv)
        return kvf__fail(err, KVF_E_INVALID, "n_q_heads %u: must be a multiple of the %u KV heads", n_q, n_kv);
    if (n_q / n_kv > 64)
        return kvf__fail(err, KVF_E_INVALID, "n_q_heads %u: at most 64 for each of the %u KV heads", n_q, n_kv);
    c->n_per_kv = n_q / n_kv;
    if (!isfinite(c->a.scale)) return kvf__fail(err, KVF_E_INVALID, "scale %g: must be finite", (double)c->a.scale);
    c->scale = c->a.scale != 0.0f ? c->a.scale : (float)(1.0 / sqrt((double)c->pages.head_dim));
    return KVF_OK;
}

kvf_status kvf__call_check(kvf__call *c, kvf_stream *stream, const kvf_attention *a, kvf__call_kind kind,
                           kvf_error *err) {
    kvf_status st = kvf__config_read(&c->a, sizeof c->a, a, "kvf_attention", err);
    if (!st) st = kvf__config_read(&c->view, sizeof c->view, c->a.view, "kvf_view", err);
    if (!st) st = kvf__config_read(&c->pages, sizeof c->pages, c->a.pages, "kvf_pages", err);
    memset(&c->mass, 0, sizeof c->mass);
    if (!st && c->a.mass && kind != KVF__APPEND)
        st = kvf__config_read(&c->mass, sizeof c->mass, c->a.mass, "kvf_mass", err);
    if (!st) st = check_pages(c, err);
    if (!st) st = check_view(c, err);
    if (st) return st;
    if (kind == KVF__APPEND && (!c->view.next_pos || !c->pages.pos))
        return kvf__fail(err, KVF_E_INVALID, c->pages.pos ? "view: next_pos is NULL" : "pages: pos is NULL");
    if (c->a.window && !c->view.next_pos)
        return kvf__fail(err, KVF_E_INVALID, "view: next_pos is NULL, window is not 0");
    c->n_threads = kvf_stream_n_threads(stream);
    c->n_kv_heads = c->view.n_groups * c->view.heads_per_group;
    st = check_tables(c, kind, err);
    if (!st && kind != KVF__APPEND) st = check_heads(c, err);
    if (!st && kind != KVF__APPEND) st = check_mass(c, kind, err);
    if (st || c->token_begin == c->token_end) return st;
    size_t kv_row = (size_t)c->n_kv_heads * c->pages.head_dim, q_row = (size_t)c->a.n_q_heads * c->pages.head_dim;
    if (kind == KVF__APPEND) {
        st = check_row("k", c->a.k, c->a.kv_stride, kv_row, err);
        return st ? st : check_row("v", c->a.v, c->a.kv_stride, kv_row, err);
    }
    st = check_row("q", c->a.q, c->a.q_stride, q_row, err);
    return st ? st : check_row("out", c->a.out, c->a.out_stride, q_row, err);
}

/* Sequences whose tiles decode keeps at once; more than these are worked off in turns. */
enum { DECODE_SEQS = 8 };

bool kvf__workspace_layout(kvf__workspace *w, void *base, uint32_t n_threads, uint32_t head_dim, uint32_t n_q_heads,
                           uint32_t n_kv_heads, uint32_t max_slots, uint32_t max_seqs, uint32_t max_tokens) {
    kvf__slab s = {base, 0, false};
    size_t d = head_dim, pad = kvf__pad16(d), index, prefill, decode, ref;
    /* K and V of a tile; logits and output parts of some rows; outputs and states of all rows; bias of a tile; kept logits. */
    w->kept_floats = KVF__MIN(KVF__KEPT_FLOATS, KVF__ROWS * kvf__pad16((size_t)max_slots + KVF_TILE));
    w->scratch_floats = kvf__pad16(KVF_TILE * (d + pad) + KVF__SUB_ROWS * (KVF_TILE + pad) + KVF__ROWS * (pad + 2) +
                                   KVF_TILE + w->kept_floats);
    w->scratch = kvf__slab_take(&s, n_threads, w->scratch_floats * sizeof(float));
    if (!kvf__mul(max_seqs, n_kv_heads, &index) || !kvf__add(index, 1, &index)) return false;
    w->index = kvf__slab_take(&s, index, sizeof *w->index);
    w->turns = kvf__slab_take(&s, index, sizeof *w->turns);
    size_t n_tiles = (size_t)kvf__ceil_div(max_slots, KVF_TILE) + 1; /* a window may begin within a tile */
    if (!kvf__mul(max_tokens, (size_t)n_q_heads * 2 * sizeof(float), &prefill)) return false;
    if (!kvf__mul(n_tiles * KVF__MIN(max_seqs, DECODE_SEQS),
                  kvf__decode_tile_floats(n_q_heads, head_dim) * sizeof(float), &decode))
        return false;
    if (!kvf__mul(max_slots, 2 * sizeof(double), &ref)) return false;
    w->rest_bytes = KVF__MAX(prefill, KVF__MAX(decode, ref));
    w->rest = kvf__slab_take(&s, w->rest_bytes, 1);
    w->bytes = s.used;
    return !s.bad;
}

kvf_status kvf_attention_workspace_bytes(uint32_t n_threads, uint32_t head_dim, uint32_t n_q_heads, uint32_t n_kv_heads,
                                         uint32_t max_slots, uint32_t max_seqs, uint32_t max_tokens, size_t *bytes) {
    kvf__workspace w;
    if (!bytes || n_threads == 0 || n_threads > 1024 || head_dim == 0 || head_dim > 256 || head_dim % 8)
        return KVF_E_INVALID;
    if (n_kv_heads == 0 || n_q_heads == 0 || n_q_heads % n_kv_heads || n_q_heads / n_kv_heads > 64)
        return KVF_E_INVALID;
    if (!kvf__workspace_layout(&w, NULL, n_threads, head_dim, n_q_heads, n_kv_heads, max_slots, max_seqs, max_tokens))
        return KVF_E_OVERFLOW;
    *bytes = w.bytes;
    return KVF_OK;
}
