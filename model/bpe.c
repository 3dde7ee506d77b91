/* model/bpe.c: text to ids: control tokens (of any vocabulary), words, and byte-level merges within a word.
 *
 * A word is a linked list of symbols, at first one per byte. The merge with the lowest rank is applied first, the leftmost
 * if ranks are equal. Candidate merges are in a heap; outdated ones are dropped when they reach its top. O(n log n) for a
 * word of n bytes. */
#include "model/tokenizer.h"

enum { MAX_TEXT_BYTES = INT32_MAX }; /* symbols are numbered in 32 bits */

static kvf_status no_memory(kvf__encoder *e, size_t n) {
    return kvf__fail(e->err, KVF_E_NO_MEMORY, "tokenizer: no memory for %zu tokens", n);
}

/* More room for n elements in all, the used ones kept. */
static bool grow(const kvf_allocator *allocator, void **p, size_t *capacity, size_t used, size_t n,
                 size_t element_bytes) {
    size_t wanted, bytes;
    if (n <= *capacity) return true;
    if (!kvf__add(n, *capacity, &wanted) || !kvf__mul(wanted, element_bytes, &bytes)) return false;
    void *q = kvf__alloc(allocator, bytes);
    if (!q) return false;
    if (used) memcpy(q, *p, used * element_bytes);
    kvf__free(allocator, *p, *capacity * element_bytes);
    *p = q;
    *capacity = wanted;
    return true;
}

kvf_status kvf__encoder_id(kvf__encoder *e, uint32_t id) {
    if (id == KVF_NO_TOKEN) return KVF_OK; /* a byte that the vocabulary cannot write */
    void *ids = e->ids;
    if (!grow(&e->tokenizer->allocator, &ids, &e->id_capacity, e->n_ids, e->n_ids + 1, sizeof *e->ids))
        return no_memory(e, e->n_ids + 1);
    e->ids = ids;
    e->ids[e->n_ids++] = id;
    e->at_begin = kvf__token_begins_text(e->tokenizer, id);
    return KVF_OK;
}

kvf_status kvf__encoder_begin(kvf__encoder *e) {
    kvf_status status = kvf__encoder_id(e, e->tokenizer->bos_id);
    e->begun = status == KVF_OK && e->n_ids == 1;
    return status;
}

kvf_status kvf__encoder_control(kvf__encoder *e, uint32_t id) {
    bool there = e->begun && e->n_ids == 1 && id == e->ids[0];
    e->begun = false;
    return there ? KVF_OK : kvf__encoder_id(e, id);
}

/* ---- The heap ------------------------------------------------------------------------------------------ */

static bool before(const kvf__candidate *a, const kvf__candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->at < b->at;
}

/* Pushes the pair that begins at symbol `at`, if it has a merge. The heap has room for twice the symbols: at first
 * one candidate for each neighbouring pair, and each merge removes one and adds at most two. */
static void push_candidate(kvf__encoder *e, uint32_t at) {
    const kvf__symbol *s = &e->symbols[at];
    if (s->next == KVF_NO_TOKEN) return;
    const kvf__merge *merge = kvf__tokenizer_merge(e->tokenizer, s->id, e->symbols[s->next].id);
    if (!merge) return;
    const kvf__candidate c = {merge->rank, at, merge->left, merge->right};
    size_t i = e->n_heap++;
    for (; i && before(&c, &e->heap[(i - 1) / 2]); i = (i - 1) / 2) e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = c;
}

static kvf__candidate pop_candidate(kvf__encoder *e) {
    const kvf__candidate top = e->heap[0], last = e->heap[--e->n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < e->n_heap; i = child) {
        if (child + 1 < e->n_heap && before(&e->heap[child + 1], &e->heap[child])) child++;
        if (!before(&e->heap[child], &last)) break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

/* ---- One word ------------------------------------------------------------------------------------------ */

static kvf_status take_symbols(kvf__encoder *e, size_t n) {
    const kvf_allocator *allocator = &e->tokenizer->allocator;
    if (n <= e->symbol_capacity) return KVF_OK;
    size_t capacity = KVF__MAX(n, 2 * e->symbol_capacity);
    kvf__symbol *symbols = kvf__alloc(allocator, capacity * sizeof *symbols);
    kvf__candidate *heap = kvf__alloc(allocator, 2 * capacity * sizeof *heap);
    if (!symbols || !heap) {
        kvf__free(allocator, symbols, capacity * sizeof *symbols);
        kvf__free(allocator, heap, 2 * capacity * sizeof *heap);
        return no_memory(e, n);
    }
    kvf__free(allocator, e->symbols, e->symbol_capacity * sizeof *symbols);
    kvf__free(allocator, e->heap, 2 * e->symbol_capacity * sizeof *heap);
    e->symbols = symbols;
    e->heap = heap;
    e->symbol_capacity = capacity;
    return KVF_OK;
}

static void merge_symbols(kvf__encoder *e) {
    while (e->n_heap) {
        kvf__candidate c = pop_candidate(e);
        kvf__symbol *s = &e->symbols[c.at];
        if (s->id != c.left || s->next == KVF_NO_TOKEN || e->symbols[s->next].id != c.right) continue;
        kvf__symbol *gone = &e->symbols[s->next];
        s->id = kvf__tokenizer_merge(e->tokenizer, c.left, c.right)->result;
        s->next = gone->next;
        gone->id = KVF_NO_TOKEN;
        if (s->next != KVF_NO_TOKEN) e->symbols[s->next].prev = c.at;
        if (s->prev != KVF_NO_TOKEN) push_candidate(e, s->prev);
        push_candidate(e, c.at);
    }
}

/* The token that is exactly this word, where the model takes such words whole. */
static uint32_t whole_word(const kvf_tokenizer *t, const char *word, size_t n) {
    char text[512];
    size_t used = 0;
    if (!kvf__pretokenizer_whole_words(t->pre) || n > sizeof text / 2) return KVF_NO_TOKEN;
    for (size_t i = 0; i < n; i++) {
        uint32_t c = kvf__byte_to_code_point((unsigned char)word[i]);
        if (c >= 128) text[used++] = (char)(0xc0 | c >> 6);
        text[used++] = (char)(c >= 128 ? 0x80 | (c & 63) : c);
    }
    uint32_t id = kvf__tokenizer_lookup(t, (kvf__text){text, used});
    return id != KVF_NO_TOKEN && t->types[id] == KVF__TOKEN_NORMAL ? id : KVF_NO_TOKEN;
}

static kvf_status encode_word(void *ctx, const char *word, size_t n) {
    kvf__encoder *e = ctx;
    const kvf_tokenizer *t = e->tokenizer;
    uint32_t whole = whole_word(t, word, n), n_symbols = 0;
    if (whole != KVF_NO_TOKEN) return kvf__encoder_id(e, whole);
    kvf_status status = take_symbols(e, n);
    if (status != KVF_OK) return status;
    for (size_t i = 0; i < n; i++) {
        uint32_t id = t->byte_ids[(unsigned char)word[i]];
        if (id == KVF_NO_TOKEN) continue;
        e->symbols[n_symbols] = (kvf__symbol){id, n_symbols ? n_symbols - 1 : KVF_NO_TOKEN, n_symbols + 1};
        n_symbols++;
    }
    if (!n_symbols) return KVF_OK;
    e->symbols[n_symbols - 1].next = KVF_NO_TOKEN;
    e->n_heap = 0;
    for (uint32_t i = 0; i < n_symbols; i++) push_candidate(e, i);
    merge_symbols(e);
    for (uint32_t i = 0; i != KVF_NO_TOKEN && status == KVF_OK; i = e->symbols[i].next)
        status = kvf__encoder_id(e, e->symbols[i].id);
    return status;
}

/* ---- Text ---------------------------------------------------------------------------------------------- */

/* Encodes text without special tokens, by merges: valid UTF-8 word by word, other bytes one by one. PCRE2 sees only
 * valid UTF-8. */
static kvf_status encode_plain(kvf__encoder *e, const char *text, size_t n) {
    const kvf_tokenizer *t = e->tokenizer;
    if (t->scores) return kvf__spm_text(e, text, n);
    kvf_status status = KVF_OK;
    size_t begin = 0, at = 0;
    while (at < n && status == KVF_OK) {
        size_t length = kvf__utf8_length(text + at, n - at, NULL);
        if (length) {
            at += length;
            continue;
        }
        status = kvf__pretokenize(t->pre, e->match, text + begin, at - begin, encode_word, e, e->err);
        if (status == KVF_OK) status = kvf__encoder_id(e, t->byte_ids[(unsigned char)text[at]]);
        begin = ++at;
    }
    return status == KVF_OK ? kvf__pretokenize(t->pre, e->match, text + begin, at - begin, encode_word, e, e->err)
                            : status;
}

kvf_status kvf__encoder_text(kvf__encoder *e, const char *text, size_t n, bool special) {
    const kvf_tokenizer *t = e->tokenizer;
    if (!n) return KVF_OK; /* text may be NULL then */
    if (n > MAX_TEXT_BYTES)
        return kvf__fail(e->err, KVF_E_LIMIT, "text of %zu bytes: must be at most %d: encode it in parts", n,
                         MAX_TEXT_BYTES);
    size_t begin = 0;
    kvf_status status = KVF_OK;
    for (size_t at = 0; at < n && status == KVF_OK;) {
        uint32_t user_id = KVF_NO_TOKEN, id = KVF_NO_TOKEN;
        size_t user_defined = kvf__user_defined_at(t, text + at, n - at, &user_id);
        size_t length = special ? kvf__control_at(t, text + at, n - at, &id) : 0;
        bool is_control = length > user_defined;
        if (!is_control && (!user_defined || t->scores)) { /* spm.c finds the user-defined tokens of its text itself */
            length = user_defined ? user_defined : (uint32_t)kvf__utf8_length(text + at, n - at, NULL);
            at += length ? length : 1;
            continue;
        }
        status = encode_plain(e, text + begin, at - begin);
        if (status == KVF_OK) status = is_control ? kvf__encoder_control(e, id) : kvf__encoder_id(e, user_id);
        begin = at += is_control ? length : user_defined;
    }
    return status == KVF_OK ? encode_plain(e, text + begin, n - begin) : status;
}

kvf_status kvf__encoder_open(kvf__encoder *e, const kvf_tokenizer *tokenizer, kvf_error *err) {
    memset(e, 0, sizeof *e);
    e->tokenizer = tokenizer;
    e->err = err;
    e->at_begin = true;
    if (tokenizer->scores) return kvf__spm_open(e);
    e->match = kvf__pretokenize_begin(tokenizer->pre);
    return e->match ? KVF_OK : no_memory(e, 0);
}

void kvf__encoder_close(kvf__encoder *e) {
    const kvf_allocator *allocator = &e->tokenizer->allocator;
    kvf__free(allocator, e->ids, e->id_capacity * sizeof *e->ids);
    kvf__free(allocator, e->symbols, e->symbol_capacity * sizeof *e->symbols);
    kvf__free(allocator, e->heap, 2 * e->symbol_capacity * sizeof *e->heap);
    kvf__pretokenize_end(e->match);
    kvf__spm_close(e);
}

kvf_status kvf__encoder_result(const kvf__encoder *e, uint32_t *ids, size_t capacity, size_t *n_ids) {
    *n_ids = e->n_ids;
    if (e->n_ids > capacity)
        return kvf__fail(e->err, KVF_E_LIMIT, "capacity of %zu ids: the text has %zu", capacity, e->n_ids);
    if (e->n_ids) memcpy(ids, e->ids, e->n_ids * sizeof *ids);
    return KVF_OK;
}

kvf_status kvf_tokenizer_encode(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes, uint32_t flags,
                                uint32_t *ids, size_t capacity, size_t *n_ids, kvf_error *err) {
    kvf__encoder e;
    if (!tokenizer || (n_bytes && !text) || (capacity && !ids) || !n_ids)
        return kvf__fail(err, KVF_E_INVALID, "kvf_tokenizer_encode: tokenizer, text, ids and n_ids must be given");
    kvf_status status = kvf__encoder_open(&e, tokenizer, err);
    if (status == KVF_OK && (flags & KVF_ENCODE_BOS) && tokenizer->add_bos) status = kvf__encoder_begin(&e);
    if (status == KVF_OK) status = kvf__encoder_text(&e, text, n_bytes, (flags & KVF_ENCODE_SPECIAL) != 0);
    if (status == KVF_OK) status = kvf__encoder_result(&e, ids, capacity, n_ids);
    kvf__encoder_close(&e);
    return status;
}
