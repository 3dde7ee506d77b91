/* model/model.c: opens a model: the file's config and tensors, checked against one another. */
#include "model/model.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "model/tokenizer.h"

/* The architectures we read. Their keys begin with the name. */
typedef struct architecture {
    const char *name;
    bool rope_halves; /* the rows of Q and K are not permuted for rotation in pairs */
    bool qkv_bias;
} architecture;

static const architecture architectures[] = {
    {"llama", false, false},
    {"mistral", false, false}, /* most Mistral files say llama */
    {"qwen2", true, true},
};

enum {
    MAX_HEADS = 1024,
    MAX_GROUP = 64, /* query heads of a KV head, as attention has them */
    MAX_HEAD_DIM = 256,
    MAX_WIDTH = 1 << 20,
    MAX_CONTEXT = 1 << 30
};

typedef struct opening {
    kvf_model *m;
    const char *arch; /* its name */
    bool qkv_bias;
    const kvf_log *log;
    kvf_error *err;
} opening;

/* ---- Config --------------------------------------------------------------------------------------------- */

typedef struct key_name {
    char text[96];
} key_name;

static const char *key_of(const opening *o, const char *suffix, key_name *out) {
    snprintf(out->text, sizeof out->text, "%s.%s", o->arch, suffix);
    return out->text;
}

/* An integer key in [min, max]; absent it keeps the value that *out has, unless it is required. */
static kvf_status read_count(const opening *o, const char *suffix, int required, uint32_t min, uint32_t max,
                             uint32_t *out) {
    key_name key;
    uint32_t v = *out;
    bool found;
    kvf_status status = kvf__gguf_u32(&o->m->gguf, key_of(o, suffix, &key), required, &v, &found, o->err);
    if (status == KVF_OK && found && (v < min || v > max))
        return kvf__fail(o->err, KVF_E_FORMAT, "%s: key %s: %" PRIu32 ": must be in [%" PRIu32 ", %" PRIu32 "]",
                         o->m->gguf.path.text, key.text, v, min, max);
    if (status == KVF_OK) *out = v;
    return status;
}

/* A positive finite number. */
static kvf_status read_positive(const opening *o, const char *suffix, int required, float *out) {
    key_name key;
    float v = *out;
    kvf_status status = kvf__gguf_f32(&o->m->gguf, key_of(o, suffix, &key), required, &v, NULL, o->err);
    if (status == KVF_OK && !(v > 0 && isfinite(v)))
        return kvf__fail(o->err, KVF_E_FORMAT, "%s: key %s: %g: must be positive and finite", o->m->gguf.path.text,
                         key.text, (double)v);
    if (status == KVF_OK) *out = v;
    return status;
}

static kvf_status unsupported(const opening *o, const char *suffix, const char *value, const char *remedy) {
    key_name key;
    return kvf__fail(o->err, KVF_E_UNSUPPORTED, "%s: key %s: %s: %s", o->m->gguf.path.text, key_of(o, suffix, &key),
                     value, remedy);
}

static void copy_text(char *out, size_t capacity, kvf__text text) {
    size_t n = KVF__MIN(text.bytes, capacity - 1);
    for (size_t i = 0; i < n; i++) out[i] = (unsigned char)text.data[i] < 32 ? '?' : text.data[i];
    out[n] = 0;
}

static kvf_status read_architecture(opening *o) {
    kvf_model *m = o->m;
    kvf__text arch, name = {"", 0}, model, pre = {"default", 7};
    kvf_status status = kvf__gguf_text(&m->gguf, "general.architecture", 1, &arch, NULL, o->err);
    if (status != KVF_OK) return status;
    char list[128] = "";
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++) {
        const architecture *a = &architectures[i];
        if (kvf__text_equal(arch, a->name)) {
            o->arch = a->name;
            o->qkv_bias = a->qkv_bias;
            m->rope_halves = a->rope_halves;
        }
        strcat(strcat(list, i ? ", " : ""), a->name);
    }
    kvf__shown shown;
    if (!o->arch)
        return kvf__fail(o->err, KVF_E_UNSUPPORTED, "%s: key general.architecture: \"%s\": must be one of: %s",
                         m->gguf.path.text, kvf__show(&shown, arch), list);
    status = kvf__gguf_text(&m->gguf, "general.name", 0, &name, NULL, o->err);
    if (status == KVF_OK) status = kvf__gguf_text(&m->gguf, "tokenizer.ggml.model", 1, &model, NULL, o->err);
    if (status == KVF_OK) status = kvf__gguf_text(&m->gguf, "tokenizer.ggml.pre", 0, &pre, NULL, o->err);
    if (status != KVF_OK) return status;
    copy_text(m->info.name, sizeof m->info.name, name);
    copy_text(m->info.architecture, sizeof m->info.architecture, arch);
    copy_text(m->info.tokenizer, sizeof m->info.tokenizer, model);
    copy_text(m->info.pre_tokenizer, sizeof m->info.pre_tokenizer, pre);
    m->info.gguf_version = m->gguf.version;
    for (const kvf__gguf *part = &m->gguf; part; part = part->next_part) {
        m->info.file_bytes += part->file_bytes;
        m->info.n_files++;
    }
    return KVF_OK;
}

/* embedding_length / head_count. */
static kvf_status derive_head_dim(const opening *o, uint32_t *out) {
    const kvf_model_info *info = &o->m->info;
    const char *path = o->m->gguf.path.text;
    if (info->n_embd % info->n_q_heads)
        return kvf__fail(o->err, KVF_E_FORMAT,
                         "%s: key %s.embedding_length: %" PRIu32 ": must be a multiple of the %" PRIu32
                         " heads of %s.attention.head_count",
                         path, o->arch, info->n_embd, info->n_q_heads, o->arch);
    *out = info->n_embd / info->n_q_heads;
    if (*out % 8 || *out > MAX_HEAD_DIM)
        return kvf__fail(o->err, KVF_E_UNSUPPORTED,
                         "%s: key %s.embedding_length: %" PRIu32 " over %" PRIu32 " heads gives heads of %" PRIu32
                         ": must be a multiple of 8, at most %d",
                         path, o->arch, info->n_embd, info->n_q_heads, *out, MAX_HEAD_DIM);
    return KVF_OK;
}

/* Of K and of V, each with a key of its own; those that have none are derived. They must be alike. */
static kvf_status read_head_dim(const opening *o) {
    static const char *const lengths[] = {"attention.key_length", "attention.value_length"};
    char value[16];
    uint32_t v[2] = {0, 0}, derived = 0;
    kvf_status status = KVF_OK;
    for (int i = 0; i < 2; i++) {
        status = read_count(o, lengths[i], 0, 1, UINT32_MAX, &v[i]);
        if (status != KVF_OK) return status;
        snprintf(value, sizeof value, "%" PRIu32, v[i]);
        if (v[i] % 8 || v[i] > MAX_HEAD_DIM)
            return unsupported(o, lengths[i], value, "must be a multiple of 8, at most 256");
    }
    if (!v[0] || !v[1]) status = derive_head_dim(o, &derived);
    if (status != KVF_OK) return status;
    int given = v[1] ? 1 : 0;
    snprintf(value, sizeof value, "%" PRIu32, v[given]);
    for (int i = 0; i < 2; i++)
        if (!v[i]) v[i] = derived;
    if (v[0] != v[1]) return unsupported(o, lengths[given], value, "the heads of K and V must have the same length");
    o->m->info.head_dim = v[0];
    return KVF_OK;
}

static kvf_status read_heads(const opening *o) {
    kvf_model_info *info = &o->m->info;
    kvf_status status = read_count(o, "attention.head_count", 1, 1, MAX_HEADS, &info->n_q_heads);
    info->n_kv_heads = info->n_q_heads;
    if (status == KVF_OK) status = read_count(o, "attention.head_count_kv", 0, 1, MAX_HEADS, &info->n_kv_heads);
    if (status != KVF_OK) return status;
    const char *path = o->m->gguf.path.text;
    if (info->n_q_heads % info->n_kv_heads)
        return kvf__fail(o->err, KVF_E_FORMAT,
                         "%s: key %s.attention.head_count_kv: %" PRIu32 ": must divide the %" PRIu32
                         " heads of %s.attention.head_count",
                         path, o->arch, info->n_kv_heads, info->n_q_heads, o->arch);
    if (info->n_q_heads / info->n_kv_heads > MAX_GROUP)
        return kvf__fail(o->err, KVF_E_UNSUPPORTED,
                         "%s: key %s.attention.head_count_kv: %" PRIu32 " for %" PRIu32
                         " heads: must be at most %d heads a KV head",
                         path, o->arch, info->n_kv_heads, info->n_q_heads, MAX_GROUP);
    return read_head_dim(o);
}

/* The keys that llama3 has besides the factor. */
static kvf_status read_llama3(const opening *o, kvf__rope_scaling *s) {
    s->low_turns = 1;
    s->high_turns = 4;
    kvf_status status = read_count(o, "rope.scaling.original_context_length", 1, 1, MAX_CONTEXT, &s->original_context);
    if (status == KVF_OK) status = read_positive(o, "rope.scaling.low_freq_factor", 0, &s->low_turns);
    if (status == KVF_OK) status = read_positive(o, "rope.scaling.high_freq_factor", 0, &s->high_turns);
    if (status == KVF_OK && !(s->high_turns > s->low_turns))
        return kvf__fail(o->err, KVF_E_FORMAT,
                         "%s: key %s.rope.scaling.high_freq_factor: %g: must exceed low_freq_factor, %g",
                         o->m->gguf.path.text, o->arch, (double)s->high_turns, (double)s->low_turns);
    return status;
}

/* A factor without a type means linear scaling; older files have it as rope.scale_linear. With type none all other
 * keys are ignored. */
static kvf_status read_rope_scaling(const opening *o) {
    static const char *const names[] = {"rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"};
    kvf__rope_scaling *s = &o->m->rope_scaling;
    kvf__text type = {"linear", 6};
    key_name key;
    kvf__shown shown;
    char value[32];
    bool has_type, found[3];
    float v[3] = {1, 1, 1};
    kvf_status status = kvf__gguf_text(&o->m->gguf, key_of(o, "rope.scaling.type", &key), 0, &type, &has_type, o->err);
    if (status != KVF_OK || kvf__text_equal(type, "none")) return status;
    bool llama3 = kvf__text_equal(type, "llama3");
    if (!llama3 && !kvf__text_equal(type, "linear"))
        return unsupported(o, "rope.scaling.type", kvf__show(&shown, type), "must be one of none, linear, llama3");
    for (int i = 0; i < 3; i++) {
        status = read_positive(o, names[i], 0, &v[i]);
        if (status != KVF_OK) return status;
        found[i] = kvf__gguf_find(&o->m->gguf, key_of(o, names[i], &key)) != NULL;
    }
    snprintf(value, sizeof value, "%g", (double)v[2]);
    if (v[2] < 1 || v[2] > 1) return unsupported(o, names[2], value, "only 1 is supported");
    if (llama3 && kvf__gguf_find_tensor(&o->m->gguf, "rope_freqs.weight")) {
        kvf__log(
            o->log, KVF_LOG_WARN,
            "%s: tensor rope_freqs.weight: its factors hold; those that key %s makes of llama3 are not applied as well",
            o->m->gguf.path.text, key_of(o, "rope.scaling.type", &key));
        return KVF_OK;
    }
    if (found[0] && found[1] && (v[0] < v[1] || v[0] > v[1]))
        return kvf__fail(o->err, KVF_E_FORMAT, "%s: key %s.rope.scale_linear: %g: rope.scaling.factor says %g",
                         o->m->gguf.path.text, o->arch, (double)v[1], (double)v[0]);
    if (has_type && !found[0] && (llama3 || !found[1]))
        return kvf__fail(o->err, KVF_E_FORMAT, "%s: key %s.rope.scaling.factor: is missing", o->m->gguf.path.text,
                         o->arch);
    s->factor = found[0] ? v[0] : v[1];
    s->kind = llama3 ? KVF__ROPE_LLAMA3 : s->factor < 1 || s->factor > 1 ? KVF__ROPE_LINEAR : KVF__ROPE_PLAIN;
    return llama3 ? read_llama3(o, s) : KVF_OK;
}

/* Keys that would change what is computed, and that we do not compute. */
static kvf_status refuse_variants(const opening *o) {
    char value[16];
    uint32_t experts = 0;
    kvf_status status = read_count(o, "expert_count", 0, 0, UINT32_MAX, &experts);
    snprintf(value, sizeof value, "%" PRIu32, experts);
    return status == KVF_OK && experts ? unsupported(o, "expert_count", value, "only 0 is supported") : status;
}

/* An array names each layer that slides; a number n, every n-th layer that does not, 0 none. Without either all slide. */
static kvf_status read_pattern(const opening *o) {
    kvf_model *m = o->m;
    key_name name;
    uint32_t n = 0, n_layers = m->info.n_layers;
    const kvf__gguf_key *key = kvf__gguf_find(&m->gguf, key_of(o, "attention.sliding_window_pattern", &name));
    if (!key || key->type != KVF__GGUF_ARRAY) {
        kvf_status status = read_count(o, "attention.sliding_window_pattern", 0, 0, UINT32_MAX, &n);
        for (uint32_t l = 0; n && l < n_layers; l++) m->full_attention[l] = l % n == n - 1;
        return status;
    }
    uint32_t type = key->element_type;
    if (type != KVF__GGUF_BOOL && type != KVF__GGUF_U32 && type != KVF__GGUF_I32)
        return kvf__fail(o->err, KVF_E_FORMAT, "%s: key %s: type array of %s: must be a number or an array of bool",
                         m->gguf.path.text, name.text, kvf__gguf_type_name(type));
    if (key->n != n_layers)
        return kvf__fail(o->err, KVF_E_FORMAT, "%s: key %s: %" PRIu64 " elements: must be the %" PRIu32 " layers",
                         m->gguf.path.text, name.text, key->n, n_layers);
    size_t bytes = type == KVF__GGUF_BOOL ? 1 : 4;
    for (uint32_t l = 0; l < n_layers; l++) {
        bool slides = false;
        for (size_t i = 0; i < bytes; i++) slides |= key->data[l * bytes + i] != 0;
        m->full_attention[l] = !slides;
    }
    return KVF_OK;
}

/* Keys by which layers that slide would be other layers than those that do not. */
static kvf_status refuse_other_layers(const opening *o) {
    static const char *const lengths[] = {"attention.key_length_swa", "attention.value_length_swa"};
    const kvf_model_info *info = &o->m->info;
    char value[32];
    float base = info->rope_base;
    kvf_status status = read_positive(o, "rope.freq_base_swa", 0, &base);
    if (status != KVF_OK) return status;
    snprintf(value, sizeof value, "%g", (double)base);
    if (base < info->rope_base || base > info->rope_base)
        return unsupported(o, "rope.freq_base_swa", value, "layers that slide must have the base of the others");
    for (int i = 0; i < 2; i++) {
        uint32_t length = info->head_dim;
        status = read_count(o, lengths[i], 0, 0, UINT32_MAX, &length);
        if (status != KVF_OK) return status;
        snprintf(value, sizeof value, "%" PRIu32, length);
        if (length != info->head_dim)
            return unsupported(o, lengths[i], value, "layers that slide must have heads as long as the others'");
    }
    return KVF_OK;
}

static kvf_status read_windows(const opening *o) {
    kvf_model *m = o->m;
    kvf_model_info *info = &m->info;
    uint32_t n_full = 0;
    kvf_status status = read_count(o, "attention.sliding_window", 0, 0, UINT32_MAX, &info->sliding_window);
    if (status == KVF_OK) status = read_pattern(o);
    if (status != KVF_OK) return status;
    for (uint32_t l = 0; l < info->n_layers; l++) n_full += m->full_attention[l];
    key_name key;
    if (!info->sliding_window && n_full < info->n_layers &&
        kvf__gguf_find(&m->gguf, key_of(o, "attention.sliding_window_pattern", &key)))
        return kvf__fail(o->err, KVF_E_FORMAT,
                         "%s: key %s: %" PRIu32 " layers slide, but attention.sliding_window is missing or 0",
                         m->gguf.path.text, key.text, info->n_layers - n_full);
    if (info->sliding_window >= info->n_context || n_full == info->n_layers) info->sliding_window = 0; /* sees it all */
    if (!info->sliding_window) return KVF_OK;
    info->n_window_layers = info->n_layers - n_full;
    return refuse_other_layers(o);
}

static kvf_status read_config(const opening *o) {
    kvf_model *m = o->m;
    kvf_model_info *info = &m->info;
    kvf_status status = read_count(o, "block_count", 1, 1, KVF__MAX_LAYERS, &info->n_layers);
    if (status == KVF_OK) status = read_count(o, "embedding_length", 1, 8, MAX_WIDTH, &info->n_embd);
    if (status == KVF_OK) status = read_count(o, "feed_forward_length", 1, 1, MAX_WIDTH, &info->n_ff);
    if (status == KVF_OK) status = read_count(o, "context_length", 1, 1, MAX_CONTEXT, &info->n_context);
    if (status == KVF_OK) status = read_heads(o);
    if (status != KVF_OK) return status;
    m->n_rot = info->head_dim;
    info->rope_base = 10000;
    status = read_count(o, "rope.dimension_count", 0, 2, info->head_dim, &m->n_rot);
    if (status == KVF_OK && m->n_rot % 2)
        return kvf__fail(o->err, KVF_E_FORMAT, "%s: key %s.rope.dimension_count: %" PRIu32 ": must be even",
                         m->gguf.path.text, o->arch, m->n_rot);
    if (status == KVF_OK) status = read_positive(o, "rope.freq_base", 0, &info->rope_base);
    if (status == KVF_OK) status = read_positive(o, "attention.layer_norm_rms_epsilon", 1, &info->norm_epsilon);
    if (status == KVF_OK) status = read_rope_scaling(o);
    if (status == KVF_OK) status = refuse_variants(o);
    if (status == KVF_OK) status = read_windows(o);
    info->n_vocab = kvf_tokenizer_n_vocab(m->tokenizer);
    uint32_t n_vocab = info->n_vocab;
    if (status == KVF_OK) status = read_count(o, "vocab_size", 0, 0, UINT32_MAX, &n_vocab);
    if (status == KVF_OK && n_vocab != info->n_vocab)
        return kvf__fail(o->err, KVF_E_FORMAT,
                         "%s: key %s.vocab_size: %" PRIu32 ": must be the %" PRIu32 " tokens of tokenizer.ggml.tokens",
                         m->gguf.path.text, o->arch, n_vocab, info->n_vocab);
    uint32_t quantization = 2;
    if (status == KVF_OK)
        status = kvf__gguf_u32(&m->gguf, "general.quantization_version", 0, &quantization, NULL, o->err);
    if (status == KVF_OK && quantization != 2)
        return kvf__fail(o->err, KVF_E_UNSUPPORTED,
                         "%s: key general.quantization_version: %" PRIu32 ": must be 2: convert the file",
                         m->gguf.path.text, quantization);
    return status;
}

/* ---- Opening -------------------------------------------------------------------------------------------- */

static kvf_status open_model(opening *o, const char *path) {
    kvf_model *m = o->m;
    m->info.struct_size = sizeof m->info;
    kvf_status status = kvf__gguf_open(path, &m->allocator, &m->gguf, o->err);
    if (status == KVF_OK) status = read_architecture(o);
    if (status == KVF_OK) status = kvf__tokenizer_create(&m->gguf, &m->allocator, &m->tokenizer, o->err);
    if (status == KVF_OK) status = read_config(o);
    if (status != KVF_OK) return status;
    bool vocabulary_alone = m->tokenizer_only && m->gguf.n_tensors == 0;
    if (!vocabulary_alone) status = kvf__model_take_tensors(m, o->arch, o->qkv_bias, o->log, o->err);
    if (status != KVF_OK) return status;
    m->info.tied_output = m->output.data == NULL;
    if (m->info.tied_output) m->output = m->token_embd;
    return m->tokenizer_only ? KVF_OK : kvf__weights_load(m, o->err);
}

kvf_status kvf_model_open(const char *path, const kvf_model_config *config, kvf_model **out, kvf_error *err) {
    kvf_model_config c = {.struct_size = sizeof c};
    kvf_allocator allocator;
    if (!path || !out) return kvf__fail(err, KVF_E_INVALID, "kvf_model_open: %s is NULL", path ? "out" : "path");
    kvf_status status = config ? kvf__config_read(&c, sizeof c, config, "kvf_model_config", err) : KVF_OK;
    if (status == KVF_OK) status = kvf__allocator_resolve(&c.allocator, &allocator, err);
    if (status != KVF_OK) return status;
    kvf_model *m = kvf__alloc(&allocator, sizeof *m);
    if (!m) return kvf__fail(err, KVF_E_NO_MEMORY, "model: no memory");
    m->allocator = allocator;
    m->tokenizer_only = c.tokenizer_only != 0;
    opening o = {.m = m, .log = &c.log, .err = err};
    status = open_model(&o, path);
    if (status == KVF_OK)
        *out = m;
    else
        kvf_model_close(m);
    return status;
}

void kvf_model_close(kvf_model *m) {
    if (!m) return;
    const kvf_allocator allocator = m->allocator;
    kvf__weights_free(m);
    kvf__tokenizer_destroy(m->tokenizer);
    kvf__free(&allocator, m->layers, m->info.n_layers * sizeof *m->layers);
    kvf__gguf_close(&m->gguf);
    kvf__free(&allocator, m, sizeof *m);
}

uint32_t kvf_model_layer_window(const kvf_model *model, uint32_t layer) {
    if (!model || layer >= model->info.n_layers || model->full_attention[layer]) return 0;
    return model->info.sliding_window;
}

const kvf_model_info *kvf_model_get_info(const kvf_model *model) { return model ? &model->info : NULL; }

const kvf_tokenizer *kvf_model_tokenizer(const kvf_model *model) { return model ? model->tokenizer : NULL; }
