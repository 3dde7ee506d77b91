/* model/tokenizer.h: struct kvf_tokenizer, as tokenizer.c (loading, lookup), special.c (tokens found in a text), bpe.c and
 * spm.c (encoding), pretokenize.c and chat.c share it.
 *
 * Invariants: read-only once created; every id in it is below n_vocab. Merges and bytes never give a control token, so
 * plain text can never become one. */
#ifndef KVF_MODEL_TOKENIZER_H
#define KVF_MODEL_TOKENIZER_H

#include "base/base.h"
#include "kvfold/model.h"
#include "model/gguf.h"

/* Kinds of tokens as the format numbers them. */
typedef enum kvf__token_type {
    KVF__TOKEN_NORMAL = 1,
    KVF__TOKEN_UNKNOWN = 2,
    KVF__TOKEN_CONTROL = 3,
    KVF__TOKEN_USER_DEFINED = 4,
    KVF__TOKEN_UNUSED = 5,
    KVF__TOKEN_BYTE = 6
} kvf__token_type;

/* One merge: the pair (left, right) becomes `result`; lowest rank first. An empty slot has left KVF_NO_TOKEN. */
typedef struct kvf__merge {
    uint32_t left, right, rank, result;
} kvf__merge;

/* Tokens that are searched for in a text, sorted by their bytes; none is empty. */
typedef struct kvf__specials {
    uint32_t *ids; /* [n] */
    size_t n;
    bool first[256]; /* their first bytes */
} kvf__specials;

typedef struct kvf__pretokenizer kvf__pretokenizer;
typedef struct kvf__spm_scratch kvf__spm_scratch;

struct kvf_tokenizer {
    kvf_allocator allocator;
    uint32_t n_vocab;
    kvf__text *texts; /* [n_vocab] as the file writes them, in the map */
    uint8_t *types;   /* [n_vocab] kvf__token_type */
    uint8_t *is_end;  /* [n_vocab] */
    char *bytes;      /* what the tokens stand for, joined */
    size_t n_bytes;
    size_t *begins;        /* [n_vocab + 1] into bytes */
    size_t max_text_bytes; /* of a text */
    uint32_t *by_text;     /* [text_mask + 1] open addressing: id, or KVF_NO_TOKEN; of equal texts the lowest id */
    size_t text_mask;
    kvf__merge *merges; /* [merge_mask + 1] open addressing by pair */
    size_t merge_mask;
    uint32_t byte_ids[256];     /* KVF_NO_TOKEN: the vocabulary has none */
    kvf__specials controls;     /* and unknown tokens: found where the caller asks for them */
    kvf__specials user_defined; /* found in any text */
    uint32_t bos_id;            /* or KVF_NO_TOKEN */
    bool add_bos;
    kvf__text chat_template; /* in the map; data NULL: none */
    kvf__pretokenizer *pre;  /* NULL with scores */
    /* A SentencePiece vocabulary has scores and no merges; all of this is 0 in others, unknown_id is KVF_NO_TOKEN. */
    float *scores;       /* [n_vocab] none is NaN; NULL: merges it is */
    uint32_t unknown_id; /* what stands for a byte that has no token, or KVF_NO_TOKEN */
    bool add_space;      /* before a text: at its begin and after a control token */
    /* What kvf_tokenizer_max_ids goes by. */
    size_t space_ids;     /* ids of one space: 0 to 3 without a token of its own */
    size_t control_bytes; /* of the shortest control token, 0: none can be written out */
    bool counted[256];    /* kvf_tokenizer_min_ids: by byte, whether it always becomes part of a token */
};

/* What the text of a file may become. */
static inline bool kvf__token_is_plain(uint8_t type) {
    return type == KVF__TOKEN_NORMAL || type == KVF__TOKEN_USER_DEFINED || type == KVF__TOKEN_UNUSED;
}

/* The longest token of this kind at the start of the text: returns its bytes in the text, 0 if there is none
 * (special.c). In a SentencePiece vocabulary user-defined tokens match U+2581 and the space alike. */
size_t kvf__user_defined_at(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes, uint32_t *id);
size_t kvf__control_at(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes, uint32_t *id);
bool kvf__specials_create(kvf_tokenizer *tokenizer); /* once the tokens' bytes are there; false: no memory */
void kvf__specials_destroy(kvf_tokenizer *tokenizer);

/* Whether a text after this token is one of its own, with a space before it. */
static inline bool kvf__token_begins_text(const kvf_tokenizer *tokenizer, uint32_t id) {
    return tokenizer->types[id] == KVF__TOKEN_CONTROL;
}

/* Reads the tokenizer of a checked file, which must outlive it. */
kvf_status kvf__tokenizer_create(const kvf__gguf *gguf, const kvf_allocator *allocator, kvf_tokenizer **out,
                                 kvf_error *err);
void kvf__tokenizer_destroy(kvf_tokenizer *tokenizer); /* NULL is allowed */

/* The id of a token by its text as the file writes it, KVF_NO_TOKEN when there is none. */
uint32_t kvf__tokenizer_lookup(const kvf_tokenizer *tokenizer, kvf__text text);
uint32_t kvf__tokenizer_lookup2(const kvf_tokenizer *tokenizer, kvf__text begin, kvf__text end); /* of the two joined */

/* The pair's merge, or NULL. */
const kvf__merge *kvf__tokenizer_merge(const kvf_tokenizer *tokenizer, uint32_t left, uint32_t right);

/* Code point that the byte-level alphabet writes for a byte. */
uint32_t kvf__byte_to_code_point(unsigned byte);

/* How a SentencePiece vocabulary writes a space: U+2581. */
#define KVF__SPM_SPACE "\xe2\x96\x81"

/* ---- Encoding (bpe.c, spm.c) --------------------------------------------------------------------------- */

typedef struct kvf__symbol {
    uint32_t id, prev,
        next; /* a linked list over the bytes of a word; a symbol that was merged away has id KVF_NO_TOKEN */
} kvf__symbol;

typedef struct kvf__candidate {
    uint32_t rank, at, left, right; /* the pair that stood at symbol `at` when it was pushed */
} kvf__candidate;

/* Scratch of one call: grows, never shrinks. Begin with kvf__encoder_open, end with kvf__encoder_close. */
typedef struct kvf__encoder {
    const kvf_tokenizer *tokenizer;
    kvf_error *err;
    uint32_t *ids;
    size_t n_ids, id_capacity;
    kvf__symbol *symbols;
    kvf__candidate *heap; /* twice as many as symbols */
    size_t n_heap, symbol_capacity;
    void *match; /* pretokenize.c's */
    kvf__spm_scratch *spm;
    bool at_begin; /* nothing yet, or a control token: kvf__token_begins_text */
    bool begun;    /* ids[0] is the begin token that kvf__encoder_begin put there */
} kvf__encoder;

kvf_status kvf__encoder_open(kvf__encoder *encoder, const kvf_tokenizer *tokenizer, kvf_error *err);
void kvf__encoder_close(kvf__encoder *encoder);
kvf_status kvf__encoder_id(kvf__encoder *encoder, uint32_t id); /* KVF_NO_TOKEN adds nothing */
/* The begin token, if the vocabulary has one; and a control token of a text or template, which is not added if it is
 * the begin token and that is already there. */
kvf_status kvf__encoder_begin(kvf__encoder *encoder);
kvf_status kvf__encoder_control(kvf__encoder *encoder, uint32_t id);
/* User-defined tokens are found in any text, control tokens only with `special`. */
kvf_status kvf__encoder_text(kvf__encoder *encoder, const char *text, size_t n_bytes, bool special);
/* With a SentencePiece vocabulary: scratch, and text in which no control token is looked for. Closing what was never
 * opened, or not wholly, is allowed. */
kvf_status kvf__spm_open(kvf__encoder *encoder);
void kvf__spm_close(kvf__encoder *encoder);
kvf_status kvf__spm_text(kvf__encoder *encoder, const char *text, size_t n_bytes);
/* Copies the result out; KVF_E_LIMIT sets only *n_ids. */
kvf_status kvf__encoder_result(const kvf__encoder *encoder, uint32_t *ids, size_t capacity, size_t *n_ids);

/* ---- Pre-tokenizers (pretokenize.c) --------------------------------------------------------------------- */

/* Looked up by the name in the file. whole_words: a word that is a token is taken as it is, without merges. add_bos:
 * the default if the file does not say. */
kvf_status kvf__pretokenizer_create(const kvf__gguf *gguf, kvf__text name, const kvf_allocator *allocator,
                                    kvf__pretokenizer **out, kvf_error *err);
void kvf__pretokenizer_destroy(kvf__pretokenizer *pre); /* NULL is allowed */
bool kvf__pretokenizer_whole_words(const kvf__pretokenizer *pre);
bool kvf__pretokenizer_adds_bos(const kvf__pretokenizer *pre);

/* Scratch for one thread; NULL: no memory. */
void *kvf__pretokenize_begin(const kvf__pretokenizer *pre);
void kvf__pretokenize_end(void *match); /* NULL is allowed */

/* Calls fn for each word of a valid UTF-8 text, in order; together the words are the text. */
typedef kvf_status (*kvf__word_fn)(void *ctx, const char *word, size_t n_bytes);
kvf_status kvf__pretokenize(const kvf__pretokenizer *pre, void *match, const char *text, size_t n_bytes,
                            kvf__word_fn fn, void *ctx, kvf_error *err);

#endif
