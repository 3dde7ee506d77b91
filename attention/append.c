/* Writing pages: new tokens into their slots, and copies of whole blocks. */
#include "attention/call.h"

#include <math.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { TOKENS_PER_ITEM = 16, MAX_HEAD_DIM = 256 };

uint64_t kvf_pages_block_bytes(const kvf_pages *p) {
    size_t bytes;
    if (!p || !kvf__mul((size_t)p->heads_per_group * p->block_size, p->head_dim, &bytes) ||
        !kvf__mul(bytes, 2 * kvf_dtype_bytes(p->dtype), &bytes))
        return 0;
    return bytes;
}

#if defined(__x86_64__)
/* fp16, d being a multiple of 8; back: what was stored. */
static __attribute__((target("avx,f16c"))) void narrow8(uint16_t *to, float *back, const float *src, uint32_t d) {
    for (uint32_t c = 0; c < d; c += 8) {
        __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(src + c), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(void *)(to + c), h);
        _mm256_storeu_ps(back + c, _mm256_cvtph_ps(h));
    }
}
#endif

/* Stores one row; returns what was stored, in back unless it is src itself. */
static const float *store_row(void *dst, const float *src, uint32_t d, kvf_dtype dtype, float *back) {
    if (dtype == KVF_F32) {
        memcpy(dst, src, d * sizeof *src);
        return src;
    }
    uint16_t *h = dst;
#if defined(__x86_64__)
    if (dtype == KVF_F16 && kvf__cpu_detect().avx2_fma_f16c) {
        narrow8(h, back, src, d);
        return back;
    }
#endif
    for (uint32_t c = 0; c < d; c++) {
        h[c] = kvf__narrow(dtype, src[c]);
        back[c] = kvf__widen(dtype, h[c]);
    }
    return back;
}

/* A left fold in double: one order on every path. */
static float norm_of(const float *x, uint32_t d) {
    double sum = 0;
    for (uint32_t c = 0; c < d; c++) sum += (double)x[c] * (double)x[c];
    return (float)sqrt(sum);
}

/* Token r of the t-th new token of sequence i, in all KV heads. */
static void append_token(const kvf__call *c, uint32_t i, uint32_t r) {
    const kvf_pages *p = &c->pages;
    uint32_t d = p->head_dim, bs = p->block_size, behind = c->a.q_begin[i + 1] - r; /* 1 for the newest */
    size_t row_bytes = d * kvf_dtype_bytes(p->dtype);
    float back[MAX_HEAD_DIM];
    for (uint32_t h = 0; h < c->n_kv_heads; h++) {
        size_t t = kvf__table(c, i, h / p->heads_per_group);
        uint32_t head = h % p->heads_per_group, slot = c->view.n_slots[t] - behind;
        uint32_t block = c->view.rows[c->view.row_offset[t] + slot / bs];
        unsigned char *k = (unsigned char *)p->k + p->k_block_stride * block + c->k_head_bytes * head;
        unsigned char *v = (unsigned char *)p->v + p->v_block_stride * block + c->k_head_bytes * head;
        size_t from = (size_t)r * c->a.kv_stride + (size_t)h * d, meta = kvf__slot_index(p, block, head, slot % bs);
        const float *stored = store_row(k + slot % bs * row_bytes, c->a.k + from, d, p->dtype, back);
        if (p->key_norm) p->key_norm[meta] = norm_of(stored, d);
        (void)store_row(v + slot % bs * row_bytes, c->a.v + from, d, p->dtype, back);
        p->pos[meta] = c->view.next_pos[i] - behind;
        if (p->weight) p->weight[meta] = 1.0f;
        if (p->bias) p->bias[meta] = 0.0f;
    }
}

static void append_item(void *ctx, uint32_t item, uint32_t thread) {
    const kvf__call *c = ctx;
    (void)thread;
    uint32_t r = c->token_begin + item * TOKENS_PER_ITEM, end = KVF__MIN(c->token_end - r, TOKENS_PER_ITEM) + r;
    uint32_t lo = c->a.seq_begin, hi = c->a.seq_end; /* the last sequence that begins at or before r */
    while (hi - lo > 1) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (c->a.q_begin[mid] <= r)
            lo = mid;
        else
            hi = mid;
    }
    for (; r < end; r++) {
        while (r >= c->a.q_begin[lo + 1]) lo++;
        append_token(c, lo, r);
    }
}

kvf_status kvf_attention_append(kvf_stream *stream, const kvf_attention *a, kvf_error *err) {
    kvf__call c;
    kvf_status st = kvf__call_check(&c, stream, a, KVF__APPEND, err);
    if (st) return st;
    kvf__stream_for(stream, kvf__ceil_div(c.token_end - c.token_begin, TOKENS_PER_ITEM), append_item, &c);
    return KVF_OK;
}

static void copy_block(const kvf_pages *p, const kvf_copy *copy) {
    size_t row_bytes = p->head_dim * kvf_dtype_bytes(p->dtype), head_bytes = p->block_size * row_bytes;
    const unsigned char *k_src = (unsigned char *)p->k + p->k_block_stride * copy->src;
    const unsigned char *v_src = (unsigned char *)p->v + p->v_block_stride * copy->src;
    unsigned char *k_dst = (unsigned char *)p->k + p->k_block_stride * copy->dst;
    unsigned char *v_dst = (unsigned char *)p->v + p->v_block_stride * copy->dst;
    for (uint32_t h = 0; h < p->heads_per_group; h++) {
        size_t src = kvf__slot_index(p, copy->src, h, 0), dst = kvf__slot_index(p, copy->dst, h, 0);
        memcpy(k_dst + h * head_bytes, k_src + h * head_bytes, copy->n_slots * row_bytes);
        memcpy(v_dst + h * head_bytes, v_src + h * head_bytes, copy->n_slots * row_bytes);
        if (p->pos) memcpy(p->pos + dst, p->pos + src, copy->n_slots * sizeof *p->pos);
        if (p->key_norm) memcpy(p->key_norm + dst, p->key_norm + src, copy->n_slots * sizeof *p->key_norm);
        if (p->weight) memcpy(p->weight + dst, p->weight + src, copy->n_slots * sizeof *p->weight);
        if (p->bias) memcpy(p->bias + dst, p->bias + src, copy->n_slots * sizeof *p->bias);
    }
}

static void copy_score_page(const kvf_score_pages *s, const kvf_copy *copy) {
    size_t rows = (size_t)s->n_arrays * s->heads_per_group, bs = s->block_size;
    for (size_t r = 0; r < rows; r++)
        memcpy(s->base + ((size_t)copy->dst * rows + r) * bs, s->base + ((size_t)copy->src * rows + r) * bs,
               copy->n_slots * sizeof *s->base);
}

kvf_status kvf_copies_run(const kvf_pages *pages, const kvf_score_pages *scores, const kvf_copy_list *copies) {
    kvf_pages p;
    kvf_score_pages s = {0};
    if (!copies || (copies->n && !copies->items)) return KVF_E_INVALID;
    if (kvf__config_read(&p, sizeof p, pages, "kvf_pages", NULL)) return KVF_E_INVALID;
    if (scores && kvf__config_read(&s, sizeof s, scores, "kvf_score_pages", NULL)) return KVF_E_INVALID;
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        if (c->kind > KVF_COPY_SCORE_PAGE) return KVF_E_INVALID;
        bool block = c->kind == KVF_COPY_BLOCK;
        uint32_t n = block ? p.n_blocks : s.n_pages;
        if (c->src >= n || c->dst >= n || c->n_slots > (block ? p.block_size : s.block_size)) return KVF_E_INVALID;
        if (block ? !p.k || !p.v : !s.base) return KVF_E_INVALID;
    }
    for (uint32_t i = 0; i < copies->n; i++) {
        const kvf_copy *c = &copies->items[i];
        if (c->src == c->dst) continue;
        if (c->kind == KVF_COPY_BLOCK)
            copy_block(&p, c);
        else
            copy_score_page(&s, c);
    }
    return KVF_OK;
}
