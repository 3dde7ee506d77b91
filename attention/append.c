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
    float back[MAX_HEAD_DIM];
    for (uint32_t h = 0; h < c->n_kv_heads; h++) {
        size_t t = kvf__table(c, i, h / p->heads_per_group);
        uint32_t head = h % p->heads_per_group, slot = c->view.n_slots[t] - behind;
        uint32_t block = c->view.rows[c->view.row_offset[t] + slot / bs];
        size_t from = (size_t)r * c->a.kv_stride + (size_t)h * d, meta = kvf__meta_at(p, block, head, slot % bs);
        const float *stored = store_row(kvf__k_at(p, block, head, slot % bs), c->a.k + from, d, p->dtype, back);
        if (p->key_norm) p->key_norm[meta] = norm_of(stored, d);
        (void)store_row(kvf__v_at(p, block, head, slot % bs), c->a.v + from, d, p->dtype, back);
        p->pos[meta] = c->view.next_pos[i] - behind;
        if (p->weight) p->weight[meta] = 1.0f;
        if (p->bias) p->bias[meta] = 0.0f;
        if (p->score) p->score[meta] = INFINITY;
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
