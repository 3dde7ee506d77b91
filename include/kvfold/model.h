/* kvfold/model.h: a Llama-family decoder over paged KV, from GGUF files; its tokenizer and sampler.
 *
 * The file is mapped, not read: weights stay there in its types, and are dequantised to fp32 piece by piece where they are
 * multiplied (docs/decisions/005-quantised-weights.md). K and V live in the caller's pages.
 * Part of libkvfold_engine: programs that only manage blocks need not link it.
 */
#ifndef KVFOLD_MODEL_H
#define KVFOLD_MODEL_H

#include "kvfold/attention.h"
#include "kvfold/base.h"
#include "kvfold/blockmgr.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_NO_TOKEN UINT32_MAX

typedef struct kvf_model kvf_model;
typedef struct kvf_tokenizer kvf_tokenizer;
typedef struct kvf_activations kvf_activations;

typedef struct kvf_model_config {
    size_t struct_size;
    kvf_stream *stream;      /* no longer used: opening reads little; or NULL */
    int tokenizer_only;      /* 1: no weights are touched */
    kvf_allocator allocator; /* all zero: the default */
    kvf_log log;             /* warnings while the file is opened: tensors that are skipped, keys that do not hold */
} kvf_model_config;

typedef struct kvf_model_info {
    size_t struct_size;
    char name[128], architecture[32], tokenizer[32], pre_tokenizer[32],
        weights[96]; /* weights: "Q4_1 x 210, F32 x 61" */
    uint32_t gguf_version;
    uint32_t n_layers, n_q_heads, n_kv_heads, head_dim, n_embd, n_ff, n_vocab, n_context;
    float rope_base, norm_epsilon;
    int tied_output;                             /* the output head is the embedding */
    uint64_t n_params, file_bytes, weight_bytes; /* weight_bytes: in memory, beside the mapped file */
    uint32_t n_tensors;
    uint32_t
        sliding_window; /* 0: none; else a query sees so many positions, its own included: kvf_model_layer_window */
    uint32_t n_files;   /* parts of a split file; 1 otherwise */
    uint32_t
        n_window_layers; /* layers that have the window: all of them, or those that the file names; 0 without one */
} kvf_model_info;

/** Opens a GGUF file (v2 or v3; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K; whole or split), checks every
 *  field and prepares the weights. Tensors that nothing is computed with are skipped, with a warning; one that would change the
 *  results (a bias, a norm that the architecture lacks) is refused.
 *  @param path the file; of a split one the first part (NAME-00001-of-00003.gguf), beside which the others lie. @param config or NULL. @param out the model. @param err names file, key or tensor, value and remedy, or NULL.
 *  @own the caller, kvf_model_close. The file stays mapped: nobody may cut it short or write to it until then. Where its bytes are
 *  gone, or the disk fails, reading them raises SIGBUS in whichever thread does, and ends the process; the library installs no
 *  handler. A program that must live on gives the model a file of its own; tools/signals.c names the file and exits. @threads any; a model is read-only afterwards and may be shared.
 *  @errors KVF_E_INVALID (path or config), KVF_E_IO, KVF_E_FORMAT (truncated, lying, hostile), KVF_E_UNSUPPORTED (architecture,
 *  type, or a key or tensor that asks for what is not computed), KVF_E_NO_MEMORY.
 *  @cost reads the index, the vocabulary and vectors; allocates. Matrices stay in the file's map, in its types: the
 *  first passes bring their pages in. */
KVF_API KVF_CHECK kvf_status kvf_model_open(const char *path, const kvf_model_config *config, kvf_model **out,
                                            kvf_error *err);

/** Closes it; NULL is allowed.
 *  @param model a model no activations exist for. @own takes it. @threads none may use it. @errors none. @cost unmaps, frees. */
KVF_API void kvf_model_close(kvf_model *model);

/** What the file says.
 *  @param model a model. @own the model's. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_model_info *kvf_model_get_info(const kvf_model *model);

/** A layer's sliding window: info's sliding_window or, in layers of full attention, 0.
 *  @param model a model. @param layer under n_layers. @own nothing. @threads any. @errors none: 0 past the last.
 *  @cost O(1). */
KVF_API uint32_t kvf_model_layer_window(const kvf_model *model, uint32_t layer);

/** The model's tokenizer.
 *  @param model a model. @own the model's. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_tokenizer *kvf_model_tokenizer(const kvf_model *model);

/** Buffers for forward passes of at most these sizes.
 *  @param model a model. @param max_tokens tokens of a step. @param max_seqs sequences of a step. @param max_slots slots of a table.
 *  @param n_threads of the stream that will run it. @param out the buffers. @param err detail, or NULL.
 *  @own the caller, kvf_activations_destroy, before the model. @threads one forward at a time.
 *  @errors KVF_E_INVALID, KVF_E_NO_MEMORY, KVF_E_OVERFLOW, KVF_E_STATE (tokenizer_only). @cost allocates once. */
KVF_API KVF_CHECK kvf_status kvf_activations_create(const kvf_model *model, uint32_t max_tokens, uint32_t max_seqs,
                                                    uint32_t max_slots, uint32_t n_threads, kvf_activations **out,
                                                    kvf_error *err);

/** Frees them; NULL is allowed.
 *  @param activations buffers. @own takes them. @threads none may use them. @errors none. @cost frees. */
KVF_API void kvf_activations_destroy(kvf_activations *activations);

/* One forward pass of a mixed batch. The i-th sequence of the view has the token rows [q_begin[i], q_begin[i + 1]); the
 * first n_decode sequences have one each and use decode attention, the others prefill attention. */
typedef struct kvf_forward {
    size_t struct_size;
    const kvf_view *view; /* with the new slots appended */
    const kvf_pages *pages;
    const uint32_t *tokens;  /* [n_tokens] ids < n_vocab */
    const uint32_t *q_begin; /* [n_seqs + 1] */
    uint32_t n_decode;
    /* Mass: as kvf_mass, for all layers. */
    float *const *prompt_sums; /* [n_seqs], each NULL or [n_layers][n_q_heads][prompt_stride]; or NULL */
    size_t prompt_stride;
    float *row; /* [n_decode][n_kv_heads][row_stride], reused by every layer; or NULL */
    size_t row_stride;
    const uint8_t *row_wanted, *row_gqa;
    /* Called after each layer's attention, in the caller's thread; a failure ends the pass with its status. */
    kvf_status (*after_layer)(void *ctx, uint32_t layer, const kvf_mass *mass);
    void *ctx;
    /* Logits of chosen token rows. */
    const uint32_t *out_rows; /* [n_out], ascending */
    uint32_t n_out;
    float *logits; /* [n_out][n_vocab] */
    kvf_cpu_path path;
    /* 1: a row's products give bits that depend on the row and the weights alone: not on what else is in the batch, its
     * place there, or the number of threads. With many rows about a tenth slower. */
    int deterministic;
    /* 1: products with weights of Q4_0, Q4_1 and Q8_0 take their activations in 8 bits, 32 of them a scale: faster, at the
     * cost of logits that are off (docs/decisions/006-deterministic.md has by how much). A row's bits depend on the row
     * and the weights alone in these products, and are the same on every CPU. */
    int fast_activations;
    /* Mass, as kvf_mass has it: sums over the queries from position last_begin[i] on ([n_seqs], each NULL or [n_layers][n_q_heads]
     * [prompt_stride]; or NULL), and sums of squares (each NULL or [n_layers][n_kv_heads][prompt_stride]; or NULL; by row_gqa). */
    float *const *prompt_last;
    const uint32_t *last_begin; /* [n_seqs] */
    float *const *prompt_squares;
    /* The natural log of the probability that token row i gives to targets[i] goes to logprobs[i]; KVF_NO_TOKEN: not wanted,
     * and left as it is. -inf where that token's logit is NaN. Takes the product with the output head for these rows. */
    const uint32_t *targets; /* [n_tokens] or NULL */
    double *logprobs;        /* [n_tokens] */
    /* [n_seqs] or NULL: the first layer after which a row of the sequence has a number that is NaN or infinite; n_layers: what comes
     * behind the layers (its logits: NaN or +inf); KVF_FINITE: none. Nothing of such a sequence is of use, and its K and V poison
     * what attends to them. */
    uint32_t *not_finite;
    /* A pass that fails leaves the sums of prompts (prompt_sums, prompt_last, prompt_squares) as they were: what they are is kept aside
     * meanwhile, in memory that the activations allocate as needed. 1: they may be lost, and nothing is kept. */
    int sums_may_be_lost;
} kvf_forward;

#define KVF_FINITE UINT32_MAX /* kvf_forward.not_finite */

/** Runs the pass: writes K and V of the new tokens into the pages, fills the mass and the logits.
 *  @param model a model. @param activations of it. @param stream where it runs. @param forward see above. @param err detail, or NULL.
 *  @own nothing is kept. @threads one at a time for an activations object.
 *  @errors KVF_E_INVALID (an id or a target outside the vocabulary, sizes beyond the activations', more threads
 *  than they were made for), KVF_E_UNSUPPORTED (path), those of after_layer, KVF_E_NO_MEMORY (the BLAS, sums kept aside). On
 *  failure the sums of prompts are as before; K, V, rows and logits are not. What after_layer did stays done: a policy's score
 *  pages have the rows of the layers before, so that such a sequence is computed anew, or its pages are restored by the caller.
 *  @cost 2 * parameters * tokens operations and the attention; allocates where sums are kept aside and were never so long. */
KVF_API KVF_CHECK kvf_status kvf_model_forward(const kvf_model *model, kvf_activations *activations, kvf_stream *stream,
                                               const kvf_forward *forward, kvf_error *err);

/* ---- Tokenizer ------------------------------------------------------------------------------------ */

enum {
    KVF_ENCODE_SPECIAL = 1, /* control tokens written out in the text ("<|im_end|>") become themselves */
    KVF_ENCODE_BOS = 2      /* put the beginning-of-sequence token first, where the model has one and wants it; with
                             * KVF_ENCODE_SPECIAL not where the text begins with it */
};

/** Text to ids. Any bytes are accepted; what is not UTF-8 is encoded byte by byte. Bytes that the vocabulary has no token for
 *  (some vocabularies lack control characters and bytes that UTF-8 never has) are left out, or become the unknown token of a
 *  SentencePiece vocabulary. Most of those also put one space before a text, at its begin and after each control token. User-defined tokens
 *  ("<tool>") are found in any text, whatever the flags: at each character the longest that begins there.
 *  @param tokenizer a tokenizer. @param text bytes, may hold NUL. @param n_bytes how many. @param flags KVF_ENCODE_*.
 *  @param ids result. @param capacity of ids; kvf_tokenizer_max_ids always does. @param n_ids how many there are (set on
 *  KVF_E_LIMIT too).
 *  @param err detail, or NULL. @own the caller's buffer. @threads any, concurrently.
 *  @errors KVF_E_INVALID, KVF_E_LIMIT (capacity; n_bytes of 2^31 or more), KVF_E_NO_MEMORY. @cost about O(n log n); allocates scratch. */
KVF_API KVF_CHECK kvf_status kvf_tokenizer_encode(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes,
                                                  uint32_t flags, uint32_t *ids, size_t capacity, size_t *n_ids,
                                                  kvf_error *err);

/** The most ids that a text can have, whatever its bytes and the flags; for a dialogue too, by the bytes that kvf_chat_render
 *  counts. n_bytes + 2 at most, but for a SentencePiece vocabulary that has no token for a space, or has control tokens of one byte.
 *  @param tokenizer a tokenizer. @param n_bytes of the text.
 *  @own nothing. @threads any. @errors none: SIZE_MAX when the number is larger. @cost O(1). */
KVF_API size_t kvf_tokenizer_max_ids(const kvf_tokenizer *tokenizer, size_t n_bytes);

/** The bytes of one token; control tokens give none unless special is set.
 *  @param tokenizer a tokenizer. @param id any value; outside the vocabulary: no bytes. @param special see above.
 *  @param buffer result. @param capacity of it; 512 always does for tokens of at most 512 bytes.
 *  @own the caller's buffer. @threads any. @errors none. @cost O(bytes). Returns the bytes the token has, of which at most
 *  capacity were written. */
KVF_API size_t kvf_tokenizer_piece(const kvf_tokenizer *tokenizer, uint32_t id, int special, char *buffer,
                                   size_t capacity);

/** Ids to text: the tokens' bytes, joined. The space that kvf_tokenizer_encode puts before a text is dropped where it would stand:
 *  at the begin, and after a control token that is written out. In the middle of a text use kvf_tokenizer_piece.
 *  @param tokenizer a tokenizer. @param ids ids. @param n_ids how many. @param special see kvf_tokenizer_piece.
 *  @param buffer result. @param capacity of it.
 *  @own the caller's buffer. @threads any. @errors none. @cost O(bytes). Returns the bytes there are, of which at most capacity were written. */
KVF_API size_t kvf_tokenizer_decode(const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t n_ids, int special,
                                    char *buffer, size_t capacity);

/** The id of a token by its exact text, KVF_NO_TOKEN when there is none.
 *  @param tokenizer a tokenizer. @param text e.g. "<|im_end|>". @own nothing. @threads any. @errors none. @cost O(length). */
KVF_API uint32_t kvf_tokenizer_find(const kvf_tokenizer *tokenizer, const char *text);

/** Whether a token ends a generation (end of sequence, end of turn): the file's keys name it, or its text is a known mark
 *  ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", ...), whatever type the file gives it. Such marks are control tokens here.
 *  @param tokenizer a tokenizer. @param id any value. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API int kvf_tokenizer_is_end(const kvf_tokenizer *tokenizer, uint32_t id);

/** The number of tokens.
 *  @param tokenizer a tokenizer. @own nothing. @threads any. @errors none. @cost O(1). */
KVF_API uint32_t kvf_tokenizer_n_vocab(const kvf_tokenizer *tokenizer);

typedef struct kvf_message {
    const char *role; /* "system", "user", "assistant", NUL terminated */
    const char *content;
    size_t content_bytes;
} kvf_message;

/** A dialogue as the model was trained to see it, as text for display, with the opening of the assistant's answer at its end.
 *  To run it use kvf_chat_encode: in this text a control token of the template and one that a content writes out look alike.
 *  @param tokenizer a tokenizer. @param template_name "auto" (by the control words of the file's template, which it must have),
 *  "chatml", "llama2", "llama3", "mistral", "none" (contents joined, without roles); NULL: "auto". In "llama2" and "mistral" messages of user and
 *  assistant take turns, user last, after at most one of system.
 *  @param messages the dialogue. @param n_messages how many. @param buffer result. @param capacity of it.
 *  @param n_bytes the bytes there are (set on KVF_E_LIMIT too). @param err detail, or NULL.
 *  @own the caller's buffer. @threads any.
 *  @errors KVF_E_NOT_FOUND (template name; the text lists them), KVF_E_UNSUPPORTED (the file has no template, or none of ours, or the
 *  vocabulary lacks its control tokens), KVF_E_INVALID (no message, a role, a turn, a NULL content), KVF_E_LIMIT, KVF_E_OVERFLOW. @cost O(bytes). */
KVF_API KVF_CHECK kvf_status kvf_chat_render(const kvf_tokenizer *tokenizer, const char *template_name,
                                             const kvf_message *messages, uint32_t n_messages, char *buffer,
                                             size_t capacity, size_t *n_bytes, kvf_error *err);

/** The same dialogue as ids, ready to run: only the template's own control tokens become control tokens; what a content writes
 *  out ("<|im_end|>") stays text; user-defined tokens are found in contents as in any text. Begins with the beginning-of-sequence
 *  token, once, where the model has one and it or the template wants it.
 *  @param tokenizer a tokenizer. @param template_name see kvf_chat_render.
 *  @param messages the dialogue. @param n_messages how many. @param ids result. @param capacity of it;
 *  kvf_tokenizer_max_ids of the bytes that kvf_chat_render counts always does. @param n_ids how many there are (set on KVF_E_LIMIT too). @param err detail, or NULL.
 *  @own the caller's buffer. @threads any, concurrently.
 *  @errors those of kvf_chat_render, KVF_E_NO_MEMORY. @cost about O(n log n); allocates scratch. */
KVF_API KVF_CHECK kvf_status kvf_chat_encode(const kvf_tokenizer *tokenizer, const char *template_name,
                                             const kvf_message *messages, uint32_t n_messages, uint32_t *ids,
                                             size_t capacity, size_t *n_ids, kvf_error *err);

/* ---- Sampling --------------------------------------------------------------------------------------- */

typedef struct kvf_sampling {
    float temperature; /* 0: greedy (ties to the lower id) */
    uint32_t top_k;    /* 0: all */
    float top_p;       /* (0, 1]; 0: 1 */
    uint64_t seed;
} kvf_sampling;

/** Draws the next token. The draw depends on the seed and step alone, never on the batch.
 *  @param sampling parameters. @param step the token's number in its request (the draw is a hash of seed and step).
 *  @param logits [n_vocab]. @param n_vocab how many. @param scratch [n_vocab] pairs of 8 bytes, 8-byte aligned; may be NULL when greedy.
 *  @param logprob natural log of the token's probability at temperature 1, or NULL.
 *  @own nothing is kept. @threads any. @errors none: NaN logits are never drawn; all NaN gives token 0.
 *  @cost O(n_vocab), with top_k or top_p a partial sort. */
KVF_API uint32_t kvf_sample(const kvf_sampling *sampling, uint64_t step, const float *logits, uint32_t n_vocab,
                            void *scratch, double *logprob);

#ifdef __cplusplus
}
#endif
#endif
