/* model/tokenizer.c: reads a tokenizer (byte-level BPE or SentencePiece) from a GGUF file; looks tokens up; gives their
 * bytes. */
#include "model/tokenizer.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

/* ---- The byte-level alphabet ---------------------------------------------------------------------------- */

/* Bytes that Latin-1 can print stand for themselves; the others, in order, for U+0100 and on. */
uint32_t kvf__byte_to_code_point(unsigned byte) {
    if (byte <= 32) return 256 + byte;
    if (byte < 127) return byte;
    if (byte <= 160) return 256 + 33 + (byte - 127);
    return byte == 173 ? 256 + 33 + 34 : byte;
}

/* The byte that a code point stands for, or -1. */
static int code_point_to_byte(uint32_t c) {
    if (c >= 33 && c < 256 && kvf__byte_to_code_point(c) == c) return (int)c;
    if (c < 256 || c > 256 + 33 + 34) return -1;
    uint32_t extra = c - 256;
    return (int)(extra <= 32 ? extra : extra < 33 + 34 ? 127 + extra - 33 : 173);
}

/* A text in the alphabet, as bytes (at most as many as it has). False when a character of it is not of the alphabet. */
static bool decode_alphabet(kvf__text text, char *out, size_t *n) {
    size_t used = 0;
    for (size_t i = 0; i < text.bytes;) {
        const unsigned char *p = (const unsigned char *)text.data + i;
        uint32_t length = (uint32_t)kvf__utf8_length(text.data + i, text.bytes - i, NULL);
        if (length != 1 && length != 2) return false;
        int byte = code_point_to_byte(length == 1 ? p[0] : (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu));
        if (byte < 0) return false;
        out[used++] = (char)byte;
        i += length;
    }
    *n = used;
    return true;
}

/* A text of a SentencePiece vocabulary, where U+2581 stands for a space. Returns the bytes written. */
static size_t decode_spaces(kvf__text text, char *out) {
    static const char space[] = "\xe2\x96\x81";
    size_t used = 0;
    for (size_t i = 0; i < text.bytes;) {
        bool is_space = text.bytes - i >= 3 && !memcmp(text.data + i, space, 3);
        out[used++] = is_space ? ' ' : text.data[i];
        i += is_space ? 3 : 1;
    }
    return used;
}

/* "<0x0A>": a byte token as SentencePiece writes it; -1 when the text is not exactly that. */
static int parse_byte_token(kvf__text text) {
    static const char digits[] = "0123456789ABCDEF";
    if (text.bytes != 6 || memcmp(text.data, "<0x", 3) || text.data[5] != '>') return -1;
    const char *high = memchr(digits, text.data[3], 16), *low = memchr(digits, text.data[4], 16);
    return high && low ? (int)((high - digits) * 16 + (low - digits)) : -1;
}

/* ---- Lookup --------------------------------------------------------------------------------------------- */

/* FNV-1a: of two texts one after the other it is the hash of both together. */
static uint64_t hash_bytes(uint64_t h, kvf__text text) {
    for (size_t i = 0; i < text.bytes; i++) h = (h ^ (unsigned char)text.data[i]) * 0x100000001b3u;
    return h;
}

static uint64_t mix(uint64_t h) {
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

uint32_t kvf__tokenizer_lookup2(const kvf_tokenizer *t, kvf__text begin, kvf__text end) {
    size_t i = mix(hash_bytes(hash_bytes(0xcbf29ce484222325u, begin), end)) & t->text_mask;
    for (; t->by_text[i] != KVF_NO_TOKEN; i = (i + 1) & t->text_mask) {
        kvf__text text = t->texts[t->by_text[i]];
        if (text.bytes == begin.bytes + end.bytes && !memcmp(text.data, begin.data, begin.bytes) &&
            !memcmp(text.data + begin.bytes, end.data, end.bytes))
            break;
    }
    return t->by_text[i];
}

uint32_t kvf__tokenizer_lookup(const kvf_tokenizer *t, kvf__text text) {
    return kvf__tokenizer_lookup2(t, text, (kvf__text){"", 0});
}

static size_t merge_slot(const kvf_tokenizer *t, uint32_t left, uint32_t right) {
    size_t i = mix((uint64_t)left << 32 | right) & t->merge_mask;
    while (t->merges[i].left != KVF_NO_TOKEN && (t->merges[i].left != left || t->merges[i].right != right))
        i = (i + 1) & t->merge_mask;
    return i;
}

const kvf__merge *kvf__tokenizer_merge(const kvf_tokenizer *t, uint32_t left, uint32_t right) {
    const kvf__merge *merge = &t->merges[merge_slot(t, left, right)];
    return merge->left == KVF_NO_TOKEN ? NULL : merge;
}

/* ---- Loading -------------------------------------------------------------------------------------------- */

typedef struct loading {
    const kvf__gguf *gguf;
    kvf_tokenizer *t;
    kvf_error *err;
} loading;

static kvf_status no_memory(const loading *l) {
    return kvf__fail(l->err, KVF_E_NO_MEMORY, "%s: no memory for the tokenizer", l->gguf->path.text);
}

static size_t table_size(uint64_t n) {
    size_t size = 16;
    while (size < 2 * n) size *= 2;
    return size;
}

static kvf_status load_texts(const loading *l, const kvf__gguf_key *tokens) {
    kvf_tokenizer *t = l->t;
    if (tokens->n == 0 || tokens->n > INT32_MAX)
        return kvf__fail(l->err, KVF_E_FORMAT,
                         "%s: key tokenizer.ggml.tokens: %" PRIu64 " tokens: must be 1 to 2^31 - 1", l->gguf->path.text,
                         tokens->n);
    t->n_vocab = (uint32_t)tokens->n;
    t->text_mask = table_size(tokens->n) - 1;
    t->texts = kvf__alloc(&t->allocator, t->n_vocab * sizeof *t->texts);
    t->types = kvf__alloc(&t->allocator, t->n_vocab);
    t->is_end = kvf__alloc(&t->allocator, t->n_vocab);
    t->by_text = kvf__alloc(&t->allocator, (t->text_mask + 1) * sizeof *t->by_text);
    if (!t->texts || !t->types || !t->is_end || !t->by_text) return no_memory(l);
    memset(t->by_text, 0xff, (t->text_mask + 1) * sizeof *t->by_text);
    const unsigned char *at = tokens->data;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        t->texts[id] = kvf__gguf_next_text(&at);
        t->max_text_bytes = KVF__MAX(t->max_text_bytes, t->texts[id].bytes);
    }
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        if (kvf__tokenizer_lookup(t, t->texts[id]) != KVF_NO_TOKEN) continue;
        size_t i = mix(hash_bytes(0xcbf29ce484222325u, t->texts[id])) & t->text_mask;
        while (t->by_text[i] != KVF_NO_TOKEN) i = (i + 1) & t->text_mask;
        t->by_text[i] = id;
    }
    return KVF_OK;
}

static kvf_status same_length(const loading *l, const kvf__gguf_key *key, const char *name) {
    if (key->n == l->t->n_vocab) return KVF_OK;
    return kvf__fail(l->err, KVF_E_FORMAT,
                     "%s: key %s: %" PRIu64 " elements: must be one for each of the %" PRIu32 " tokens",
                     l->gguf->path.text, name, key->n, l->t->n_vocab);
}

static kvf_status load_scores(const loading *l, const kvf__gguf_key *scores) {
    kvf_tokenizer *t = l->t;
    t->scores = kvf__alloc(&t->allocator, t->n_vocab * sizeof *t->scores);
    if (!t->scores) return no_memory(l);
    memcpy(t->scores, scores->data, t->n_vocab * sizeof *t->scores);
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        if (isnan(t->scores[id]))
            return kvf__fail(l->err, KVF_E_FORMAT,
                             "%s: key tokenizer.ggml.scores: token %" PRIu32 " has score NaN: must be a number",
                             l->gguf->path.text, id);
    }
    return KVF_OK;
}

static const char types_name[] = "tokenizer.ggml.token_type";

/* What the file says of a token: load_marks may have made it a control token. */
static int32_t file_type(const loading *l, uint32_t id) {
    const kvf__gguf_key *types = kvf__gguf_find(l->gguf, types_name);
    int32_t type = KVF__TOKEN_NORMAL;
    if (types) memcpy(&type, types->data + id * sizeof type, sizeof type);
    return type;
}

static kvf_status load_types(const loading *l, bool spm) {
    static const char scores_name[] = "tokenizer.ggml.scores";
    kvf_tokenizer *t = l->t;
    const kvf__gguf_key *types, *scores;
    kvf_status status = kvf__gguf_array(l->gguf, types_name, KVF__GGUF_I32, spm, &types, l->err);
    if (status == KVF_OK && types) status = same_length(l, types, types_name);
    if (status == KVF_OK) status = kvf__gguf_array(l->gguf, scores_name, KVF__GGUF_F32, spm, &scores, l->err);
    if (status == KVF_OK && scores) status = same_length(l, scores, scores_name);
    if (status == KVF_OK && spm) status = load_scores(l, scores);
    if (status != KVF_OK) return status;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        int32_t type = KVF__TOKEN_NORMAL;
        if (types) memcpy(&type, types->data + id * sizeof type, sizeof type);
        if (type < KVF__TOKEN_NORMAL || type > KVF__TOKEN_BYTE)
            return kvf__fail(l->err, KVF_E_FORMAT, "%s: key %s: token %" PRIu32 " has type %" PRId32 ": must be 1 to 6",
                             l->gguf->path.text, types_name, id, type);
        t->types[id] = (uint8_t)type;
    }
    return KVF_OK;
}

/* The bytes that a token stands for, at most as many as its text has. */
static kvf_status token_bytes(const loading *l, uint32_t id, char *out, size_t *n) {
    kvf_tokenizer *t = l->t;
    kvf__text text = t->texts[id];
    uint8_t type = t->types[id];
    *n = text.bytes;
    if (type == KVF__TOKEN_BYTE) {
        int byte = parse_byte_token(text);
        kvf__shown shown;
        if (byte < 0)
            return kvf__fail(l->err, KVF_E_FORMAT,
                             "%s: key tokenizer.ggml.tokens: byte token %" PRIu32
                             " \"%s\": must be \"<0x00>\" to \"<0xFF>\"",
                             l->gguf->path.text, id, kvf__show(&shown, text));
        out[0] = (char)byte;
        *n = 1;
        if (t->byte_ids[byte] == KVF_NO_TOKEN) t->byte_ids[byte] = id;
    } else if (t->scores && kvf__token_is_plain(type)) {
        *n = decode_spaces(text, out);
    } else if (t->scores || type != KVF__TOKEN_NORMAL || !decode_alphabet(text, out, n)) {
        memcpy(out, text.data, text.bytes);
    }
    return KVF_OK;
}

/* Sets the bytes of each token. A normal token of a byte-level vocabulary is written in the byte alphabet; one that
 * is not stands for its text. */
static kvf_status load_bytes(const loading *l) {
    kvf_tokenizer *t = l->t;
    size_t total = 0; /* cannot wrap: the texts lie in the file, one after the other */
    for (uint32_t id = 0; id < t->n_vocab; id++) total += t->texts[id].bytes;
    t->n_bytes = total;
    t->bytes = kvf__alloc(&t->allocator, total);
    t->begins = kvf__alloc(&t->allocator, ((size_t)t->n_vocab + 1) * sizeof *t->begins);
    if (!t->bytes || !t->begins) return no_memory(l);
    memset(t->byte_ids, 0xff, sizeof t->byte_ids);
    size_t used = 0, n;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        t->begins[id] = used;
        kvf_status status = token_bytes(l, id, t->bytes + used, &n);
        if (status != KVF_OK) return status;
        used += n;
    }
    t->begins[t->n_vocab] = used;
    for (unsigned byte = 0; byte < 256 && !t->scores; byte++) {
        uint32_t c = kvf__byte_to_code_point(byte);
        char text[2] = {(char)(c < 128 ? c : 0xc0 | c >> 6), (char)(0x80 | (c & 63))};
        uint32_t id = kvf__tokenizer_lookup(t, (kvf__text){text, c < 128 ? 1 : 2});
        if (id != KVF_NO_TOKEN && t->types[id] == KVF__TOKEN_NORMAL) t->byte_ids[byte] = id;
    }
    return KVF_OK;
}

static kvf_status bad_merge(const loading *l, uint64_t rank, kvf__text text, const char *why) {
    kvf__shown shown;
    return kvf__fail(l->err, KVF_E_FORMAT, "%s: key tokenizer.ggml.merges: merge %" PRIu64 " \"%s\": %s",
                     l->gguf->path.text, rank, kvf__show(&shown, text), why);
}

static kvf_status load_merge(const loading *l, uint64_t rank, kvf__text text) {
    kvf_tokenizer *t = l->t;
    const char *space = text.bytes ? memchr(text.data, ' ', text.bytes) : NULL;
    size_t n_left = space ? (size_t)(space - text.data) : 0;
    if (n_left == 0 || n_left + 1 == text.bytes || memchr(space + 1, ' ', text.bytes - n_left - 1))
        return bad_merge(l, rank, text, "must be two parts with one space between them");
    kvf__text left = {text.data, n_left}, right = {space + 1, text.bytes - n_left - 1};
    kvf__merge merge = {kvf__tokenizer_lookup(t, left), kvf__tokenizer_lookup(t, right), (uint32_t)rank,
                        kvf__tokenizer_lookup2(t, left, right)};
    if (merge.left == KVF_NO_TOKEN || merge.right == KVF_NO_TOKEN || merge.result == KVF_NO_TOKEN)
        return bad_merge(l, rank, text, "its parts and their sum must be tokens");
    const uint32_t ids[] = {merge.left, merge.right, merge.result};
    for (int i = 0; i < 3; i++) {
        if (kvf__token_is_plain(t->types[ids[i]])) continue;
        if (kvf__token_is_plain((uint8_t)file_type(l, ids[i]))) return KVF_OK; /* a mark: text does not become it */
        return bad_merge(l, rank, text, "a control, unknown or byte token takes part in it");
    }
    kvf__merge *slot = &t->merges[merge_slot(t, merge.left, merge.right)];
    if (slot->left == KVF_NO_TOKEN) *slot = merge;
    return KVF_OK;
}

static kvf_status load_merges(const loading *l) {
    kvf_tokenizer *t = l->t;
    const kvf__gguf_key *merges;
    kvf_status status = kvf__gguf_array(l->gguf, "tokenizer.ggml.merges", KVF__GGUF_STRING, 1, &merges, l->err);
    if (status != KVF_OK) return status;
    if (merges->n > INT32_MAX)
        return kvf__fail(l->err, KVF_E_FORMAT,
                         "%s: key tokenizer.ggml.merges: %" PRIu64 " merges: must be at most 2^31 - 1",
                         l->gguf->path.text, merges->n);
    t->merge_mask = table_size(merges->n) - 1;
    t->merges = kvf__alloc(&t->allocator, (t->merge_mask + 1) * sizeof *t->merges);
    if (!t->merges) return no_memory(l);
    memset(t->merges, 0xff, (t->merge_mask + 1) * sizeof *t->merges);
    const unsigned char *at = merges->data;
    for (uint64_t rank = 0; rank < merges->n && status == KVF_OK; rank++)
        status = load_merge(l, rank, kvf__gguf_next_text(&at));
    return status;
}

/* ---- Marks ----------------------------------------------------------------------------------------------- */

/* The id that a key gives, KVF_NO_TOKEN without the key and on failure. */
static kvf_status load_id(const loading *l, const char *name, uint32_t *id) {
    uint32_t value = KVF_NO_TOKEN;
    bool found;
    *id = KVF_NO_TOKEN;
    kvf_status status = kvf__gguf_u32(l->gguf, name, 0, &value, &found, l->err);
    if (status != KVF_OK || !found) return status;
    if (value >= l->t->n_vocab)
        return kvf__fail(l->err, KVF_E_FORMAT, "%s: key %s: %" PRIu32 ": must be below the %" PRIu32 " tokens",
                         l->gguf->path.text, name, value, l->t->n_vocab);
    *id = value;
    return KVF_OK;
}

/* A token that a key names becomes a control token if the file lists it as user-defined or has no types. A normal
 * token that occurs in texts, such as a newline, stays normal. */
static void make_control(kvf_tokenizer *t, uint32_t id) {
    kvf__text text = t->texts[id];
    bool tagged = text.bytes > 2 && ((text.data[0] == '<' && text.data[text.bytes - 1] == '>') ||
                                     (text.data[0] == '[' && text.data[text.bytes - 1] == ']'));
    if (t->types[id] == KVF__TOKEN_USER_DEFINED || (t->types[id] == KVF__TOKEN_NORMAL && tagged))
        t->types[id] = KVF__TOKEN_CONTROL;
}

/* Marks of the templates that models are trained with. Files have them as control tokens, or should have. */
static void load_known_marks(kvf_tokenizer *t, bool has_eos) {
    static const char *const begins[] = {
        "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<start_of_turn>", "[INST]",
        "[/INST]"};
    static const char *const ends[] = {"<|im_end|>",
                                       "<|eot_id|>",
                                       "<|eom_id|>",
                                       "<|end|>",
                                       "<|endoftext|>",
                                       "<|end_of_text|>",
                                       "<end_of_turn>",
                                       "<|end_of_turn|>",
                                       "<|eot|>",
                                       "<|EOT|>",
                                       "<EOT>",
                                       "_<EOT>",
                                       "<|endofturn|>",
                                       "<turn|>",
                                       "<eos>",
                                       "<end_of_utterance>",
                                       "<|return|>",
                                       "<|call|>",
                                       "[EOT]",
                                       "[EOS]",
                                       "<|END_OF_TURN_TOKEN|>",
                                       "<\357\275\234end\342\226\201of\342\226\201sentence\357\275\234>"};
    const size_t n_begins = sizeof begins / sizeof *begins, n_ends = sizeof ends / sizeof *ends;
    for (size_t i = 0; i < n_begins + n_ends; i++) {
        uint32_t id = kvf_tokenizer_find(t, i < n_begins ? begins[i] : ends[i - n_begins]);
        if (id == KVF_NO_TOKEN) continue;
        if (t->types[id] == KVF__TOKEN_NORMAL || t->types[id] == KVF__TOKEN_USER_DEFINED)
            t->types[id] = KVF__TOKEN_CONTROL;
        if (i >= n_begins && t->types[id] == KVF__TOKEN_CONTROL) t->is_end[id] = 1;
    }
    /* A tag of HTML, too, in vocabularies that end with another token. */
    uint32_t id = kvf_tokenizer_find(t, "</s>");
    if (id == KVF_NO_TOKEN) return;
    if (!has_eos || kvf__text_contains(t->chat_template, "</s>")) make_control(t, id);
    if (t->types[id] == KVF__TOKEN_CONTROL) t->is_end[id] = 1;
}

/* Where texts and answers begin and end. Before anything goes by the tokens' types: it may change them. */
static kvf_status load_marks(const loading *l) {
    static const char *const end_keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                           "tokenizer.ggml.eom_token_id"};
    kvf_tokenizer *t = l->t;
    bool has_eos = false;
    uint32_t id;
    kvf_status status = kvf__gguf_text(l->gguf, "tokenizer.chat_template", 0, &t->chat_template, NULL, l->err);
    for (size_t i = 0; i < sizeof end_keys / sizeof *end_keys && status == KVF_OK; i++) {
        status = load_id(l, end_keys[i], &id);
        if (status != KVF_OK || id == KVF_NO_TOKEN) continue;
        has_eos |= i == 0;
        t->is_end[id] = 1;
        make_control(t, id);
    }
    if (status == KVF_OK) status = load_id(l, "tokenizer.ggml.padding_token_id", &id);
    if (status == KVF_OK) status = load_id(l, "tokenizer.ggml.bos_token_id", &t->bos_id);
    if (status != KVF_OK) return status;
    if (t->bos_id != KVF_NO_TOKEN) make_control(t, t->bos_id);
    load_known_marks(t, has_eos);
    return KVF_OK;
}

/* What stands for a byte that has no token, and whether texts begin with the begin token. */
static kvf_status load_habits(const loading *l) {
    kvf_tokenizer *t = l->t;
    uint32_t unknown;
    kvf_status status = load_id(l, "tokenizer.ggml.unknown_token_id", &unknown);
    if (status != KVF_OK) return status;
    bool usable = t->scores && unknown != KVF_NO_TOKEN && t->types[unknown] == KVF__TOKEN_UNKNOWN;
    t->unknown_id = usable ? unknown : KVF_NO_TOKEN;
    t->add_bos = t->scores || kvf__pretokenizer_adds_bos(t->pre);
    return kvf__gguf_bool(l->gguf, "tokenizer.ggml.add_bos_token", 0, &t->add_bos, NULL, l->err);
}

/* ---- The whole ------------------------------------------------------------------------------------------- */

/* How a SentencePiece vocabulary wants a text prepared. Llama's take it as it is, but for one space before it. */
static kvf_status load_spm(const loading *l) {
    static const char strip[] = "tokenizer.ggml.remove_extra_whitespaces",
                      map[] = "tokenizer.ggml.precompiled_charsmap";
    bool strips = false;
    const kvf__gguf_key *key = kvf__gguf_find(l->gguf, map);
    l->t->add_space = true;
    kvf_status status = kvf__gguf_bool(l->gguf, "tokenizer.ggml.add_space_prefix", 0, &l->t->add_space, NULL, l->err);
    if (status == KVF_OK) status = kvf__gguf_bool(l->gguf, strip, 0, &strips, NULL, l->err);
    if (status == KVF_OK && strips)
        return kvf__fail(l->err, KVF_E_UNSUPPORTED, "%s: key %s: true: must be false or absent", l->gguf->path.text,
                         strip);
    if (status == KVF_OK && key && (key->n || key->type != KVF__GGUF_ARRAY))
        return kvf__fail(l->err, KVF_E_UNSUPPORTED,
                         "%s: key %s: a table of %" PRIu64 " elements that replaces characters: must be absent",
                         l->gguf->path.text, map, key->n);
    return status;
}

/* For kvf_tokenizer_max_ids: a space by its bytes, as spm.c writes what has no token, and the shortest control token. For
 * kvf_tokenizer_min_ids: which bytes always become part of a token. */
static void load_bounds(const loading *l) {
    kvf_tokenizer *t = l->t;
    t->space_ids = 1;
    uint32_t space = kvf_tokenizer_find(t, KVF__SPM_SPACE), user_defined;
    bool has_space = space != KVF_NO_TOKEN && kvf__token_is_plain(t->types[space]);
    has_space |= kvf__user_defined_at(t, KVF__SPM_SPACE, strlen(KVF__SPM_SPACE), &user_defined) != 0;
    if (t->scores && !has_space) {
        bool known, after_unknown = false;
        t->space_ids = 0;
        for (const char *p = KVF__SPM_SPACE; *p; p++, after_unknown = !known) {
            known = t->byte_ids[(unsigned char)*p] != KVF_NO_TOKEN;
            t->space_ids += known || (!after_unknown && t->unknown_id != KVF_NO_TOKEN);
        }
    }
    for (uint32_t id = 0; id < t->n_vocab; id++)
        if (t->types[id] == KVF__TOKEN_CONTROL && t->texts[id].bytes &&
            (!t->control_bytes || t->texts[id].bytes < t->control_bytes))
            t->control_bytes = t->texts[id].bytes;
    bool all = true;
    for (int b = 0; b < 256; b++) all &= t->counted[b] = t->byte_ids[b] != KVF_NO_TOKEN;
    if (t->scores && !all)
        memset(t->counted, 0, sizeof t->counted); /* one unknown token may stand for a text of any length */
}

static kvf_status load_bpe(const loading *l) {
    kvf__text pre = {"default", 7};
    kvf_status status = kvf__gguf_text(l->gguf, "tokenizer.ggml.pre", 0, &pre, NULL, l->err);
    if (status == KVF_OK) status = kvf__pretokenizer_create(l->gguf, pre, &l->t->allocator, &l->t->pre, l->err);
    return status == KVF_OK ? load_merges(l) : status;
}

static kvf_status load(const loading *l) {
    const kvf__gguf_key *tokens;
    kvf__text model;
    kvf__shown shown;
    kvf_status status = kvf__gguf_text(l->gguf, "tokenizer.ggml.model", 1, &model, NULL, l->err);
    if (status != KVF_OK) return status;
    bool spm = kvf__text_equal(model, "llama");
    if (!spm && !kvf__text_equal(model, "gpt2"))
        return kvf__fail(
            l->err, KVF_E_UNSUPPORTED,
            "%s: key tokenizer.ggml.model: \"%s\": must be \"gpt2\" (byte-level BPE) or \"llama\" (SentencePiece)",
            l->gguf->path.text, kvf__show(&shown, model));
    status = kvf__gguf_array(l->gguf, "tokenizer.ggml.tokens", KVF__GGUF_STRING, 1, &tokens, l->err);
    if (status == KVF_OK) status = load_texts(l, tokens);
    if (status == KVF_OK) status = load_types(l, spm);
    if (status == KVF_OK) status = load_marks(l);
    if (status == KVF_OK) status = load_bytes(l);
    if (status == KVF_OK) status = spm ? load_spm(l) : load_bpe(l);
    if (status == KVF_OK && !kvf__specials_create(l->t)) status = no_memory(l);
    if (status == KVF_OK) status = load_habits(l);
    if (status == KVF_OK) load_bounds(l);
    return status;
}

kvf_status kvf__tokenizer_create(const kvf__gguf *gguf, const kvf_allocator *allocator, kvf_tokenizer **out,
                                 kvf_error *err) {
    kvf_tokenizer *t = kvf__alloc(allocator, sizeof *t);
    const loading l = {gguf, t, err};
    if (!t) return no_memory(&l);
    t->allocator = *allocator;
    kvf_status status = load(&l);
    if (status == KVF_OK)
        *out = t;
    else
        kvf__tokenizer_destroy(t);
    return status;
}

void kvf__tokenizer_destroy(kvf_tokenizer *t) {
    if (!t) return;
    const kvf_allocator a = t->allocator;
    kvf__free(&a, t->texts, t->n_vocab * sizeof *t->texts);
    kvf__free(&a, t->types, t->n_vocab);
    kvf__free(&a, t->is_end, t->n_vocab);
    kvf__free(&a, t->by_text, (t->text_mask + 1) * sizeof *t->by_text);
    kvf__free(&a, t->bytes, t->n_bytes);
    kvf__free(&a, t->begins, ((size_t)t->n_vocab + 1) * sizeof *t->begins);
    kvf__free(&a, t->scores, t->n_vocab * sizeof *t->scores);
    kvf__free(&a, t->merges, (t->merge_mask + 1) * sizeof *t->merges);
    kvf__specials_destroy(t);
    kvf__pretokenizer_destroy(t->pre);
    kvf__free(&a, t, sizeof *t);
}

/* ---- Public lookups ---------------------------------------------------------------------------------------- */

size_t kvf_tokenizer_piece(const kvf_tokenizer *t, uint32_t id, int special, char *buffer, size_t capacity) {
    if (!t || id >= t->n_vocab) return 0;
    if (!special && (t->types[id] == KVF__TOKEN_CONTROL || t->types[id] == KVF__TOKEN_UNKNOWN)) return 0;
    size_t n = t->begins[id + 1] - t->begins[id], written = KVF__MIN(n, capacity);
    if (written && buffer) memcpy(buffer, t->bytes + t->begins[id], written);
    return n;
}

/* The space that encoding adds before a text is not part of it. Decoding removes it at the beginning and, if control
 * tokens are written out, after each of them. */
size_t kvf_tokenizer_decode(const kvf_tokenizer *t, const uint32_t *ids, size_t n_ids, int special, char *buffer,
                            size_t capacity) {
    size_t n = 0;
    if (!t || !ids) return 0;
    if (!buffer) capacity = 0;
    bool at_begin = t->add_space;
    for (size_t i = 0; i < n_ids; i++) {
        size_t bytes = kvf_tokenizer_piece(t, ids[i], special, NULL, 0);
        if (!bytes) continue;
        const char *piece = t->bytes + t->begins[ids[i]];
        size_t skipped = at_begin && kvf__token_is_plain(t->types[ids[i]]) && piece[0] == ' ';
        bytes -= skipped;
        if (bytes && n < capacity) memcpy(buffer + n, piece + skipped, KVF__MIN(bytes, capacity - n));
        at_begin = t->add_space && kvf__token_begins_text(t, ids[i]);
        n += bytes;
    }
    return n;
}

uint32_t kvf_tokenizer_find(const kvf_tokenizer *t, const char *text) {
    return t && text ? kvf__tokenizer_lookup(t, (kvf__text){text, strlen(text)}) : KVF_NO_TOKEN;
}

int kvf_tokenizer_is_end(const kvf_tokenizer *t, uint32_t id) { return t && id < t->n_vocab && t->is_end[id]; }

/* An id stands for at least one byte of the text as the vocabulary writes it; there a space has space_ids bytes. In
 * addition come the begin token and a space before each text. The first text has no control token before it. Each
 * further text costs at least control_bytes + 1 bytes and adds the ids of its control token and its space; that
 * matters only if these ids are more than those of as many bytes of text. */
size_t kvf_tokenizer_max_ids(const kvf_tokenizer *t, size_t n_bytes) {
    if (!t) return 0;
    size_t most = t->bos_id != KVF_NO_TOKEN, per_byte = KVF__MAX(t->space_ids, 1), ids;
    if (!n_bytes) return most;
    if (t->add_space) {
        size_t gained = 1 + t->space_ids, lost = SIZE_MAX;
        if (t->control_bytes && !kvf__mul(t->control_bytes, per_byte, &lost)) lost = SIZE_MAX;
        most += t->space_ids;
        if (gained > lost) most += (n_bytes - 1) / (t->control_bytes + 1) * (gained - lost);
    }
    return kvf__mul(n_bytes, per_byte, &ids) && kvf__add(ids, most, &most) ? most : SIZE_MAX;
}

/* No token stands for more bytes than the vocabulary writes it with: it writes a space with two or three. */
size_t kvf_tokenizer_min_ids(const kvf_tokenizer *t, const char *text, size_t n_bytes) {
    size_t n = 0;
    for (size_t i = 0; t && text && i < n_bytes; i++) n += t->counted[(unsigned char)text[i]];
    return n ? (n - 1) / t->max_text_bytes + 1 : 0;
}

uint32_t kvf_tokenizer_n_vocab(const kvf_tokenizer *t) { return t ? t->n_vocab : 0; }
