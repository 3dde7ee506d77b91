/* Forward passes of one prompt, its repetition, and what they leave. */
#include "tools/calibrate/machine.h"

#include <stdlib.h>
#include <string.h>

#include "tools/text.h"

enum { CHUNK = 512, BLOCK = 16, LEAST_PIECE = 64 };

struct kvf__machine {
    const kvf_model *model;
    const kvf_model_info *info;
    kvf_stream *stream;
    kvf_manager *manager;
    kvf_activations *activations;
    kvf_pages pages;
    kvf_view view;
    kvf_seq seq;
    kvf_copy *copies;
    uint32_t n_copies, n, piece, n_instruction;
    uint32_t *instruction, *joined; /* joined: the instruction and a piece */
    float *max;                     /* [n_layers][n_q_heads][n] */
    float *states;                  /* the caller's, of the chunk at hand */
    uint32_t at, n_chunk;
    kvf_error err;
};

static bool failed(kvf__machine *m, kvf_status st) {
    if (st) kvf__say("calibrate: %s", m->err.text[0] ? m->err.text : kvf_status_text(st));
    return st != KVF_OK;
}

/* ---- Create ------------------------------------------------------------------------------------------- */

static bool make_pages(kvf__machine *m, uint32_t n_blocks) {
    kvf_pages *p = &m->pages;
    *p = (kvf_pages){.struct_size = sizeof *p,
                     .dtype = KVF_F32,
                     .n_blocks = n_blocks,
                     .block_size = BLOCK,
                     .heads_per_group = m->info->n_kv_heads,
                     .head_dim = m->info->head_dim};
    size_t half = kvf_pages_block_bytes(p) / 2, slots = (size_t)n_blocks * m->info->n_kv_heads * BLOCK;
    p->k_block_stride = p->v_block_stride = half;
    p->k = malloc(half * n_blocks);
    p->v = malloc(half * n_blocks);
    p->pos = malloc(slots * sizeof *p->pos);
    p->score = malloc(slots * sizeof *p->score);
    return p->k && p->v && p->pos && p->score;
}

static kvf_status make_parts(kvf__machine *m, uint32_t n_threads, uint32_t n_slots) {
    kvf_manager_config c;
    kvf_manager_config_init(&c, sizeof c);
    c.n_layers = m->info->n_layers;
    c.n_kv_heads = c.heads_per_group = m->info->n_kv_heads;
    c.block_size = BLOCK;
    c.n_blocks = m->pages.n_blocks;
    c.max_seqs = 1;
    c.max_slots = n_slots;
    kvf_status st = kvf_stream_create_cpu(NULL, n_threads, &m->stream, &m->err);
    if (!st) st = kvf_manager_create(&c, &m->manager, &m->err);
    if (!st)
        st = kvf_activations_create(m->model, CHUNK, 1, n_slots, kvf_stream_n_threads(m->stream), &m->activations,
                                    &m->err);
    m->view.struct_size = sizeof m->view;
    return st;
}

kvf__machine *kvf__machine_begin(const kvf_model *model, uint32_t n_threads, uint32_t n, const uint32_t *instruction,
                                 uint32_t n_instruction) {
    const kvf_model_info *info = kvf_model_get_info(model);
    kvf__machine *m = calloc(1, sizeof *m);
    uint32_t left = info->n_context > n + n_instruction ? info->n_context - n - n_instruction : 0;
    if (left < LEAST_PIECE) {
        kvf__say("--context %u: leaves %u of the model's %u positions for the repetition, which needs %d; give fewer",
                 n, left, info->n_context, LEAST_PIECE);
        free(m);
        return NULL;
    }
    bool ok = m != NULL;
    if (ok) {
        *m = (kvf__machine){
            .model = model, .info = info, .n = n, .piece = left < n ? left : n, .n_instruction = n_instruction};
        uint32_t n_slots = n + n_instruction + m->piece, n_blocks = (n_slots + BLOCK - 1) / BLOCK * info->n_layers;
        m->n_copies = n_blocks;
        m->copies = malloc(m->n_copies * sizeof *m->copies);
        m->instruction = malloc((n_instruction + 1) * sizeof *m->instruction);
        m->joined = malloc((n_instruction + m->piece) * sizeof *m->joined);
        m->max = malloc((size_t)info->n_layers * info->n_q_heads * n * sizeof *m->max);
        ok = m->copies && m->instruction && m->joined && m->max && make_pages(m, n_blocks);
        if (ok && n_instruction) memcpy(m->instruction, instruction, n_instruction * sizeof *instruction);
        if (ok && failed(m, make_parts(m, n_threads, n_slots))) {
            kvf__machine_end(m);
            return NULL;
        }
    }
    if (ok) return m;
    kvf__say("calibrate: out of memory for prompts of %u tokens", n);
    kvf__machine_end(m);
    return NULL;
}

void kvf__machine_end(kvf__machine *m) {
    if (!m) return;
    kvf_activations_destroy(m->activations);
    kvf_manager_destroy(m->manager);
    kvf_stream_destroy(m->stream);
    void *all[] = {m->copies, m->instruction, m->joined, m->max, m->pages.k, m->pages.v, m->pages.pos, m->pages.score};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(m);
}

/* ---- Passes ------------------------------------------------------------------------------------------- */

static kvf_status keep_states(void *ctx, uint32_t layer, const float *state) {
    kvf__machine *m = ctx;
    size_t d = m->info->n_embd;
    memcpy(m->states + ((size_t)layer * m->n + m->at) * d, state, m->n_chunk * d * sizeof *state);
    return KVF_OK;
}

/* Appends and runs tokens, in chunks. f: what the passes shall do besides. */
static bool run(kvf__machine *m, const uint32_t *tokens, uint32_t n, kvf_forward f) {
    kvf_status st = KVF_OK;
    for (m->at = 0; m->at < n && !st; m->at += m->n_chunk) {
        m->n_chunk = n - m->at < CHUNK ? n - m->at : CHUNK;
        const kvf_append_item item = {m->seq, m->n_chunk};
        const uint32_t q_begin[2] = {0, m->n_chunk};
        kvf_copy_list copies = {m->copies, 0, m->n_copies};
        if (kvf_append(m->manager, &item, 1, &copies) || kvf_view_fill(m->manager, 0, &m->seq, 1, &m->view)) {
            kvf__say("calibrate: %s", kvf_manager_error(m->manager)->text);
            return false;
        }
        f.view = &m->view;
        f.pages = &m->pages;
        f.tokens = tokens + m->at;
        f.q_begin = q_begin;
        f.ctx = m;
        st = kvf_model_forward(m->model, m->activations, m->stream, &f, &m->err);
    }
    return !failed(m, st);
}

static bool open_seq(kvf__machine *m) { return !failed(m, kvf_seq_create(m->manager, &m->seq)); }
static bool close_seq(kvf__machine *m) { return !failed(m, kvf_seq_free(m->manager, m->seq)); }

/* The prompt again, in pieces, each after the instruction and with nothing of the others. */
static bool repeat(kvf__machine *m, const uint32_t *tokens) {
    const uint32_t begin = 0, end = m->n;
    const uint8_t by_residual = 1;
    float *max[1] = {m->max};
    const kvf_forward f = {.struct_size = sizeof f,
                           .prompt_max = max,
                           .prompt_stride = m->n,
                           .max_begin = &begin,
                           .max_end = &end,
                           .max_by_residual = &by_residual,
                           .sums_may_be_lost = 1};
    memset(m->max, 0, (size_t)m->info->n_layers * m->info->n_q_heads * m->n * sizeof *m->max);
    for (uint32_t at = 0, n; at < m->n; at += n) {
        n = m->n - at < m->piece ? m->n - at : m->piece;
        if (m->n_instruction) memcpy(m->joined, m->instruction, m->n_instruction * sizeof *m->joined);
        memcpy(m->joined + m->n_instruction, tokens + at, n * sizeof *tokens);
        if (!run(m, m->joined, m->n_instruction + n, f)) return false;
        if (failed(m, kvf_seq_rollback(m->manager, m->seq, m->n_instruction + n))) return false;
    }
    if (failed(m, kvf_view_fill(m->manager, 0, &m->seq, 1, &m->view))) return false;
    const kvf_repetition r = {.struct_size = sizeof r,
                              .view = &m->view,
                              .pages = &m->pages,
                              .end = m->n,
                              .prompt_max = m->max,
                              .prompt_stride = m->n};
    return !failed(m, kvf_model_score(m->model, m->activations, m->stream, &r, &m->err));
}

bool kvf__machine_repeat(kvf__machine *m, const uint32_t *tokens, float *states, float *scores) {
    const kvf_forward f = {.struct_size = sizeof f, .hidden = keep_states};
    m->states = states;
    if (!open_seq(m)) return false;
    bool ok = run(m, tokens, m->n, f) && repeat(m, tokens);
    uint32_t tables = m->info->n_layers * m->info->n_kv_heads, group = m->info->n_q_heads / m->info->n_kv_heads;
    for (size_t t = 0; ok && t < tables; t++)
        for (uint32_t i = 0; i < m->n; i++) {
            float most = 0;
            for (uint32_t h = 0; h < group; h++) {
                float x = m->max[(t * group + h) * m->n + i];
                if (x > most) most = x;
            }
            scores[t * m->n + i] = most;
        }
    return close_seq(m) && ok;
}

bool kvf__machine_probe(kvf__machine *m, const uint32_t *tokens, const kvf_probe *probe, float *scores) {
    const kvf_forward f = {.struct_size = sizeof f, .probe = probe};
    if (!open_seq(m)) return false;
    bool ok = run(m, tokens, m->n, f);
    uint32_t heads = m->info->n_kv_heads;
    for (uint32_t l = 0; ok && l < m->info->n_layers; l++)
        for (uint32_t i = 0; i < m->n; i++)
            for (uint32_t h = 0; h < heads; h++) {
                uint32_t block = m->view.rows[m->view.row_offset[l] + i / BLOCK];
                scores[((size_t)l * heads + h) * m->n + i] =
                    m->pages.score[((size_t)block * heads + h) * BLOCK + i % BLOCK];
            }
    return close_seq(m) && ok;
}
