/* model/tensors.c: assigns the tensors of a file to their places in a model; others are skipped or refused. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "model/model.h"

typedef struct taking {
    kvf_model *m;
    const char *arch; /* its name */
    bool qkv_bias;
    const kvf_log *log;
    kvf_error *err;
} taking;

/* ---- Tensors that have a place -------------------------------------------------------------------------- */

/* A tensor by name, in the shape that the config gives it. A vector (n_rows 1) is F32. */
static kvf_status take_tensor(taking *k, const char *name, int required, uint64_t n_rows, uint64_t n_cols,
                              kvf__tensor *out) {
    const char *path = k->m->gguf.path.text;
    const kvf__gguf_tensor *t = kvf__gguf_find_tensor(&k->m->gguf, name);
    *out = (kvf__tensor){.data = NULL};
    if (!t) {
        if (!required) return KVF_OK;
        return kvf__fail(k->err, KVF_E_FORMAT, "%s: tensor %s: is missing", path, name);
    }
    if (!t->bytes)
        return kvf__fail(k->err, KVF_E_UNSUPPORTED,
                         "%s: tensor %s: type %" PRIu32 " (%s): must be " KVF__TENSOR_TYPES ": convert the file", path,
                         name, t->type, kvf__tensor_type_name(t->type));
    if (t->dims[0] != n_cols || t->dims[1] != n_rows || t->dims[2] != 1 || t->dims[3] != 1)
        return kvf__fail(k->err, KVF_E_FORMAT,
                         "%s: tensor %s: dims [%" PRIu64 ", %" PRIu64 ", %" PRIu64 ", %" PRIu64 "]: must be [%" PRIu64
                         ", %" PRIu64 "] by the file's keys",
                         path, name, t->dims[0], t->dims[1], t->dims[2], t->dims[3], n_cols, n_rows);
    if (n_rows == 1 && t->type != KVF__TENSOR_F32)
        return kvf__fail(k->err, KVF_E_UNSUPPORTED, "%s: tensor %s: type %s: must be F32 for a vector", path, name,
                         kvf__tensor_type_name(t->type));
    snprintf(out->name, sizeof out->name, "%s", name);
    out->type = t->type;
    out->n_rows = (uint32_t)n_rows;
    out->n_cols = (uint32_t)n_cols;
    out->data = t->data;
    out->bytes = t->bytes;
    k->m->gguf.tensors[t - k->m->gguf.tensors].used = true;
    return KVF_OK;
}

static kvf_status take_layer(taking *k, uint32_t i, kvf__layer *out) {
    const kvf_model_info *info = &k->m->info;
    uint64_t q = (uint64_t)info->n_q_heads * info->head_dim, kv = (uint64_t)info->n_kv_heads * info->head_dim;
    const struct {
        const char *suffix;
        int required;
        uint64_t n_rows, n_cols;
        kvf__tensor *tensor;
    } table[] = {
        {"attn_norm.weight", 1, 1, info->n_embd, &out->attn_norm},
        {"attn_q.weight", 1, q, info->n_embd, &out->attn_q},
        {"attn_k.weight", 1, kv, info->n_embd, &out->attn_k},
        {"attn_v.weight", 1, kv, info->n_embd, &out->attn_v},
        {"attn_q.bias", k->qkv_bias, 1, q, &out->attn_q_bias},
        {"attn_k.bias", k->qkv_bias, 1, kv, &out->attn_k_bias},
        {"attn_v.bias", k->qkv_bias, 1, kv, &out->attn_v_bias},
        {"attn_output.weight", 1, info->n_embd, q, &out->attn_output},
        {"ffn_norm.weight", 1, 1, info->n_embd, &out->ffn_norm},
        {"ffn_gate.weight", 1, info->n_ff, info->n_embd, &out->ffn_gate},
        {"ffn_up.weight", 1, info->n_ff, info->n_embd, &out->ffn_up},
        {"ffn_down.weight", 1, info->n_embd, info->n_ff, &out->ffn_down},
    };
    kvf_status status = KVF_OK;
    memset(out, 0, sizeof *out);
    for (size_t t = 0; t < sizeof table / sizeof *table && status == KVF_OK; t++) {
        char name[sizeof table[t].tensor->name];
        if (!table[t].required) continue; /* what the architecture does not have is a tensor of no place */
        snprintf(name, sizeof name, "blk.%" PRIu32 ".%s", i, table[t].suffix);
        status = take_tensor(k, name, 1, table[t].n_rows, table[t].n_cols, table[t].tensor);
    }
    return status;
}

static kvf_status check_rope_freqs(const taking *k) {
    const kvf__tensor *t = &k->m->rope_freqs;
    const float *x = t->data;
    for (uint32_t i = 0; x && i < t->n_cols; i++)
        if (!(x[i] > 0 && isfinite(x[i])))
            return kvf__fail(k->err, KVF_E_FORMAT,
                             "%s: tensor %s: element %" PRIu32 " is %g: must be positive and finite",
                             k->m->gguf.path.text, t->name, i, (double)x[i]);
    return KVF_OK;
}

/* ---- The others ----------------------------------------------------------------------------------------- */

static bool begins_with(kvf__text name, const char *prefix) {
    size_t n = strlen(prefix);
    return name.bytes >= n && !memcmp(name.data, prefix, n);
}

/* "blk.12.": its number, and what follows in *rest; UINT32_MAX for other names. */
static uint32_t layer_of(kvf__text name, kvf__text *rest) {
    size_t at = 4;
    uint32_t layer = 0;
    if (!begins_with(name, "blk.")) return UINT32_MAX;
    for (; at < name.bytes && at < 12 && name.data[at] >= '0' && name.data[at] <= '9'; at++)
        layer = 10 * layer + (uint32_t)(name.data[at] - '0');
    if (at == 4 || at == name.bytes || name.data[at] != '.') return UINT32_MAX;
    *rest = (kvf__text){name.data + at + 1, name.bytes - at - 1};
    return layer;
}

/* Whether this tensor would change the results: it belongs to a layer that we compute (except rotation frequencies,
 * which old files repeat), to the embedding or the head, or to a layer beyond the last. */
static bool changes_results(const taking *k, kvf__text name) {
    static const char *const whole[] = {"token_embd", "output", "position_embd", "token_types", "rope_factors"};
    static const char *const parts[] = {"attn_norm.weight", "attn_q.weight", "attn_output.weight", "ffn_down.weight"};
    kvf__text rest = {"", 0};
    uint32_t layer = layer_of(name, &rest);
    if (layer < k->m->info.n_layers)
        return !kvf__text_contains(rest, "rot_embd") && !kvf__text_contains(rest, "rotary_emb");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (kvf__text_equal(rest, parts[i])) return true;
    for (size_t i = 0; i < sizeof whole / sizeof *whole; i++)
        if (begins_with(name, whole[i])) return true;
    return false;
}

/* One line for all that are skipped. */
static kvf_status judge_others(const taking *k) {
    const kvf__gguf *g = &k->m->gguf;
    const kvf__gguf_tensor *first = NULL;
    kvf__shown shown;
    char more[48] = "";
    size_t n = 0;
    for (size_t i = 0; i < g->n_tensors; i++) {
        const kvf__gguf_tensor *t = &g->tensors[i];
        if (t->used) continue;
        if (changes_results(k, t->name))
            return kvf__fail(
                k->err, KVF_E_UNSUPPORTED,
                "%s: tensor %s: architecture %s with %" PRIu32
                " layers has none of this name, and without it the results would be others: use a file of a "
                "model without it",
                g->path.text, kvf__show(&shown, t->name), k->arch, k->m->info.n_layers);
        if (!n++) first = t;
    }
    if (!n) return KVF_OK;
    if (n > 1) snprintf(more, sizeof more, " and %zu more", n - 1);
    kvf__log(k->log, KVF_LOG_WARN, "%s: tensor %s%s: architecture %s has no use for %s: skipped", g->path.text,
             kvf__show(&shown, first->name), more, k->arch, n > 1 ? "them" : "it");
    return KVF_OK;
}

/* ---- All of them ---------------------------------------------------------------------------------------- */

static kvf_status take_tensors(taking *k) {
    kvf_model *m = k->m;
    const kvf_model_info *info = &m->info;
    kvf__layer probe;
    kvf_status status = take_tensor(k, "token_embd.weight", 1, info->n_vocab, info->n_embd, &m->token_embd);
    if (status == KVF_OK) status = take_tensor(k, "output_norm.weight", 1, 1, info->n_embd, &m->output_norm);
    if (status == KVF_OK) status = take_tensor(k, "output.weight", 0, info->n_vocab, info->n_embd, &m->output);
    if (status == KVF_OK) status = take_tensor(k, "rope_freqs.weight", 0, 1, m->n_rot / 2, &m->rope_freqs);
    if (status == KVF_OK) status = check_rope_freqs(k);
    for (uint32_t i = 0; i < info->n_layers && status == KVF_OK; i++) status = take_layer(k, i, &probe);
    if (status != KVF_OK) return status; /* every layer is there before memory for its descriptor is taken */
    m->layers = kvf__alloc(&m->allocator, info->n_layers * sizeof *m->layers);
    if (!m->layers)
        return kvf__fail(k->err, KVF_E_NO_MEMORY, "%s: no memory for %" PRIu32 " layers", m->gguf.path.text,
                         info->n_layers);
    for (uint32_t i = 0; i < info->n_layers && status == KVF_OK; i++) status = take_layer(k, i, &m->layers[i]);
    return status == KVF_OK ? judge_others(k) : status;
}

/* "Q4_1 x 210, F32 x 61": the most frequent first; what there is no room for is left out. Of tensors that
 * are used. */
static void count_tensors(kvf_model *m) {
    uint32_t counts[KVF__TENSOR_BF16 + 1] = {0};
    kvf_model_info *info = &m->info;
    for (size_t i = 0; i < m->gguf.n_tensors; i++) {
        if (!m->gguf.tensors[i].used) continue;
        info->n_tensors++;
        counts[m->gguf.tensors[i].type]++;
        info->n_params += m->gguf.tensors[i].n_elements;
    }
    for (size_t used = 0;;) {
        char one[40];
        uint32_t best = 0;
        for (uint32_t type = 1; type <= KVF__TENSOR_BF16; type++)
            if (counts[type] > counts[best]) best = type;
        if (!counts[best]) break;
        int n =
            snprintf(one, sizeof one, "%s%s x %" PRIu32, used ? ", " : "", kvf__tensor_type_name(best), counts[best]);
        if (used + (size_t)n >= sizeof info->weights) break;
        memcpy(info->weights + used, one, (size_t)n + 1);
        used += (size_t)n;
        counts[best] = 0;
    }
}

kvf_status kvf__model_take_tensors(kvf_model *m, const char *arch, bool qkv_bias, const kvf_log *log, kvf_error *err) {
    taking k = {m, arch, qkv_bias, log, err};
    kvf_status status = take_tensors(&k);
    if (status == KVF_OK) count_tensors(m);
    return status;
}
