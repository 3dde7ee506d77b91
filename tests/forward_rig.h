/* tests/forward_rig.h: a model over pages of its own, for tests that run forward passes without the engine. */
#ifndef KVF_TESTS_FORWARD_RIG_H
#define KVF_TESTS_FORWARD_RIG_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "kvfold/model.h"

enum { RIG_SEQS = 40 };

typedef struct forward_rig {
    const kvf_model *model;
    const kvf_model_info *info;
    kvf_stream *stream;
    kvf_manager *manager;
    kvf_activations *activations;
    kvf_pages pages;
    kvf_view view;
    kvf_seq seqs[RIG_SEQS];
    kvf_error err;
    uint32_t q_begin[RIG_SEQS + 1];
    kvf_copy copies[RIG_SEQS * 64];
} forward_rig;

static inline void rig_check(kvf_status st, const char *what, const char *detail) {
    if (st == KVF_OK) return;
    fprintf(stderr, "forward_rig: %s: %s: %s\n", what, kvf_status_name(st), detail);
    abort();
}

static inline void *rig_memory(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) abort();
    memset(p, 0xff, bytes); /* NaN in fp32 and fp16 */
    return p;
}

static inline float *rig_floats(size_t n) { return rig_memory(n * sizeof(float)); }

static const uint32_t rig_first = 0; /* the sequence that most tests use */

/* windows: of the layers, or NULL. */
static inline void rig_open_windows(forward_rig *r, const kvf_model *model, kvf_dtype dtype, uint32_t n_threads,
                                    uint32_t heads_per_group, uint32_t n_blocks, uint32_t max_tokens,
                                    uint32_t max_slots, const uint32_t *windows) {
    memset(r, 0, sizeof *r);
    r->model = model;
    r->info = kvf_model_get_info(model);
    rig_check(kvf_stream_create_cpu(NULL, n_threads, &r->stream, &r->err), "stream", r->err.text);
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = r->info->n_layers;
    c.n_kv_heads = r->info->n_kv_heads;
    c.heads_per_group = heads_per_group ? heads_per_group : c.n_kv_heads;
    c.n_blocks = n_blocks;
    c.max_seqs = RIG_SEQS;
    c.max_slots = max_slots;
    c.layer_windows = windows;
    rig_check(kvf_manager_create(&c, &r->manager, &r->err), "manager", r->err.text);
    for (int i = 0; i < RIG_SEQS; i++) rig_check(kvf_seq_create(r->manager, &r->seqs[i]), "sequence", "");
    kvf_pages *p = &r->pages;
    *p = (kvf_pages){.struct_size = sizeof *p,
                     .dtype = dtype,
                     .n_blocks = n_blocks,
                     .block_size = 16,
                     .heads_per_group = c.heads_per_group,
                     .head_dim = r->info->head_dim};
    size_t half = kvf_pages_block_bytes(p) / 2, meta = (size_t)n_blocks * c.heads_per_group * 16 * 4;
    p->k = rig_memory(half * n_blocks);
    p->v = rig_memory(half * n_blocks);
    p->k_block_stride = p->v_block_stride = half;
    p->pos = rig_memory(meta);
    p->key_norm = rig_memory(meta);
    rig_check(kvf_activations_create(model, max_tokens, RIG_SEQS, max_slots, n_threads, &r->activations, &r->err),
              "activations", r->err.text);
}

static inline void rig_open(forward_rig *r, const kvf_model *model, kvf_dtype dtype, uint32_t n_threads,
                            uint32_t heads_per_group, uint32_t n_blocks, uint32_t max_tokens, uint32_t max_slots) {
    rig_open_windows(r, model, dtype, n_threads, heads_per_group, n_blocks, max_tokens, max_slots, NULL);
}

static inline void rig_close(forward_rig *r) {
    kvf_activations_destroy(r->activations);
    kvf_manager_destroy(r->manager);
    kvf_stream_destroy(r->stream);
    free(r->pages.k);
    free(r->pages.v);
    free(r->pages.pos);
    free(r->pages.key_norm);
}

/* Appends n_new[i] tokens to the sequences which[i] and fills the view; returns a forward with one logits row a
 * sequence, that of its last token, in out_rows (room for n). */
static inline kvf_forward rig_append(forward_rig *r, const uint32_t *which, const uint32_t *n_new, uint32_t n,
                                     uint32_t n_decode, const uint32_t *tokens, uint32_t *out_rows, float *logits) {
    kvf_append_item items[RIG_SEQS];
    kvf_seq seqs[RIG_SEQS];
    kvf_copy_list copies = {r->copies, 0, sizeof r->copies / sizeof *r->copies};
    for (uint32_t i = 0; i < n; i++) {
        seqs[i] = r->seqs[which[i]];
        items[i] = (kvf_append_item){seqs[i], n_new[i]};
        r->q_begin[i + 1] = r->q_begin[i] + n_new[i];
        out_rows[i] = r->q_begin[i + 1] - 1;
    }
    rig_check(kvf_append(r->manager, items, n, &copies), "append", kvf_manager_error(r->manager)->text);
    r->view.struct_size = sizeof r->view;
    r->view.struct_size = sizeof r->view;
    rig_check(kvf_view_fill(r->manager, 0, seqs, n, &r->view), "view", kvf_manager_error(r->manager)->text);
    return (kvf_forward){.struct_size = sizeof(kvf_forward),
                         .view = &r->view,
                         .pages = &r->pages,
                         .tokens = tokens,
                         .q_begin = r->q_begin,
                         .n_decode = n_decode,
                         .out_rows = out_rows,
                         .n_out = n,
                         .logits = logits};
}

/* The same and runs it. */
static inline void rig_run(forward_rig *r, const uint32_t *which, const uint32_t *n_new, uint32_t n, uint32_t n_decode,
                           const uint32_t *tokens, float *logits) {
    uint32_t out_rows[RIG_SEQS];
    kvf_forward f = rig_append(r, which, n_new, n, n_decode, tokens, out_rows, logits);
    rig_check(kvf_model_forward(r->model, r->activations, r->stream, &f, &r->err), "forward", r->err.text);
}

/* Every sequence empty again. */
static inline void rig_reset(forward_rig *r) {
    for (int i = 0; i < RIG_SEQS; i++) {
        rig_check(kvf_seq_free(r->manager, r->seqs[i]), "free", "");
        rig_check(kvf_seq_create(r->manager, &r->seqs[i]), "sequence", "");
    }
}

static inline double rig_worst_of(const float *a, const float *b, size_t n) {
    double worst = 0;
    for (size_t i = 0; i < n; i++)
        worst = isnan(a[i]) || isnan(b[i]) ? INFINITY : fmax(worst, fabs((double)a[i] - b[i]));
    return worst;
}

/* Logits of every row of one new sequence of n tokens, in chunks; the last n_decode tokens one by one through the
 * decode path. */
static inline void rig_run_all(forward_rig *r, const uint32_t *ids, uint32_t n, uint32_t chunk, uint32_t n_decode,
                               kvf_cpu_path path, float *logits) {
    uint32_t rows[1024];
    rig_reset(r);
    for (uint32_t at = 0; at < n;) {
        int decode = at + n_decode >= n;
        uint32_t step = decode ? 1 : KVF__MIN(chunk, n - n_decode - at);
        kvf_forward f =
            rig_append(r, &rig_first, &step, 1, decode ? 1 : 0, ids + at, rows, logits + (size_t)at * r->info->n_vocab);
        for (uint32_t i = 0; i < step; i++) rows[i] = i;
        f.n_out = step;
        f.path = path;
        rig_check(kvf_model_forward(r->model, r->activations, r->stream, &f, &r->err), "forward", r->err.text);
        at += step;
    }
}

#endif
