/* kvfold/model.h: a Llama-family decoder from a GGUF file, with its tokenizer, chat templates and sampler.
 * The forward pass keeps K and V in the caller's pages and can sum up attention probabilities for a policy. Part of
 * libkvfold_engine: programs that only manage blocks need not link it.
 *
 * Simple use
 *     kvf_model *model = NULL;
 *     kvf_error err;
 *     uint32_t ids[64];
 *     size_t n_ids = 0;
 *     kvf_status status = kvf_model_open("SmolLM2-135M-Instruct.Q4_1.gguf", NULL, &model, &err);
 *     if (status) return status; // err.text names the file, the key or tensor, and the remedy
 *     const kvf_message message = {"user", "Who are you?", 12};
 *     status = kvf_chat_encode(kvf_model_tokenizer(model), NULL, &message, 1, ids, 64, &n_ids, &err);
 *     // kvf_engine_submit (engine.h) generates from ids[0..n_ids); kvf_tokenizer_piece turns a token into text
 *     kvf_model_close(model);
 *     return status;
 *
 * Rules
 *     The file is mapped, not read. Weights stay in it with their types and are dequantised to fp32 piece by piece when they
 *     are multiplied (docs/decisions/005-quantised-weights.md).
 *     A model and its tokenizer are read-only after kvf_model_open; any number of threads may share them.
 */
#ifndef KVFOLD_MODEL_H
#define KVFOLD_MODEL_H

#include "kvfold/attention.h"
#include "kvfold/base.h"
#include "kvfold/blockmgr.h"
#include "kvfold/probe.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVF_NO_TOKEN UINT32_MAX

typedef struct kvf_model kvf_model;
typedef struct kvf_tokenizer kvf_tokenizer;
typedef struct kvf_activations kvf_activations;

typedef struct kvf_model_config {
    size_t struct_size;
    int tokenizer_only;      /* 1: open the tokenizer only, without the weights */
    kvf_allocator allocator; /* all zero: the default */
    kvf_log log;             /* warnings while the file is opened: skipped tensors, ignored keys */
} kvf_model_config;

typedef struct kvf_model_info {
    size_t struct_size;
    char name[128], architecture[32], tokenizer[32], pre_tokenizer[32],
        weights[96]; /* weights: "Q4_1 x 210, F32 x 61" */
    uint32_t gguf_version;
    uint32_t n_layers, n_q_heads, n_kv_heads, head_dim, n_embd, n_ff, n_vocab, n_context;
    float rope_base, norm_epsilon;
    int tied_output;                             /* 1: the output head is the embedding */
    uint64_t n_params, file_bytes, weight_bytes; /* weight_bytes: allocated, in addition to the mapped file */
    uint32_t n_tensors;
    uint32_t sliding_window;  /* positions that a query sees, its own included; 0: all. See kvf_model_layer_window */
    uint32_t n_files;         /* parts of a split file; 1 otherwise */
    uint32_t n_window_layers; /* layers with the window: all of them, or those that the file names; 0 without one */
} kvf_model_info;

/** Opens a GGUF file (v2 or v3; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K; whole or split), checks every
 *  field and prepares the weights. Tensors that the forward pass does not use are skipped with a warning. A tensor that would change
 *  the results (a bias, a norm that the architecture lacks) is refused.
 *  @param path the file; of a split file the first part (NAME-00001-of-00003.gguf), with the others in the same folder.
 *  @param config or NULL. @param out the model. @param err names file, key or tensor, value and remedy, or NULL.
 *  @own the caller, kvf_model_close. The file stays mapped: nobody may truncate it or write to it until then. If its bytes are gone,
 *  or the disk fails, reading them raises SIGBUS in the reading thread and ends the process. The library installs no handler: a
 *  program that must go on gives the model a private copy of the file; tools/signals.c names the file and exits.
 *  @threads any; a model is read-only afterwards and may be shared.
 *  @errors KVF_E_INVALID (path or config), KVF_E_IO, KVF_E_FORMAT (truncated, inconsistent, hostile), KVF_E_UNSUPPORTED (architecture,
 *  type, or a key or tensor that this library does not implement), KVF_E_NO_MEMORY.
 *  @cost reads the index, the vocabulary and vectors; allocates. Matrices stay in the mapped file; the first forward passes
 *  read them from disk. */
KVF_API KVF_CHECK kvf_status kvf_model_open(const char *path, const kvf_model_config *config, kvf_model **out,
                                            kvf_error *err);

/** Closes it; NULL is allowed.
 *  @param model a model whose activations are all destroyed. @own takes it. @threads none may use it. @errors none. @cost unmaps, frees. */
KVF_API void kvf_model_close(kvf_model *model);

/** The model's sizes, names and hyperparameters, as the file has them.
 *  @param model a model. @own the model's. @threads any. @errors none. @cost O(1). */
KVF_API const kvf_model_info *kvf_model_get_info(const kvf_model *model);

/** A layer's sliding window: kvf_model_info.sliding_window, or 0 in a layer with full attention.
 *  @param model a model. @param layer under n_layers. @own nothing. @threads any. @errors none: 0 past the last layer.
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
    /* Sums of attention probabilities, as in kvf_mass, for all layers. */
    float *const *prompt_sums; /* [n_seqs], each NULL or [n_layers][n_q_heads][prompt_stride]; or NULL */
    size_t prompt_stride;
    float *row; /* [n_decode][n_kv_heads][row_stride], overwritten by every layer: read it in after_layer; or NULL */
    size_t row_stride;
    const uint8_t *row_wanted, *row_gqa;
    /* Called after each layer's attention, in the caller's thread. If it fails, the pass ends with its status. */
    kvf_status (*after_layer)(void *ctx, uint32_t layer, const kvf_mass *mass);
    void *ctx;
    /* Logits, for chosen token rows only. */
    const uint32_t *out_rows; /* [n_out], ascending */
    uint32_t n_out;
    float *logits; /* [n_out][n_vocab] */
    kvf_cpu_path path;
    /* 1: the bits of a row's matrix products depend only on the row and the weights, not on the other rows of the batch, the row's
     * index, or the number of threads. With many rows about a tenth slower (docs/decisions/006-deterministic.md). */
    int deterministic;
    /* 1: in products with weights of Q4_0, Q4_1 and Q8_0 the activations are rounded to 8 bits, with a scale for every 32. Faster,
     * but logits are less exact (docs/decisions/006-deterministic.md says by how much). A row's bits in these products depend
     * only on the row and the weights, and are the same on every CPU. */
    int fast_activations;
    /* As kvf_mass.last_sums: column sums of the queries from position last_begin[i] on. [n_seqs], each NULL or
     * [n_layers][n_q_heads][prompt_stride]; or NULL. */
    float *const *prompt_last;
    const uint32_t *last_begin; /* [n_seqs] */
    /* As kvf_mass.sq_sums: sums of squares, reduced by row_gqa. [n_seqs], each NULL or [n_layers][n_kv_heads][prompt_stride]; or
     * NULL. */
    float *const *prompt_squares;
    /* logprobs[i] becomes the natural log of the probability that token row i gives to the token targets[i]; -inf if that token's
     * logit is NaN. With KVF_NO_TOKEN logprobs[i] stays unchanged. Costs the product with the output head for these rows. */
    const uint32_t *targets; /* [n_tokens] or NULL */
    double *logprobs;        /* [n_tokens] */
    /* [n_seqs] or NULL. For each sequence the first layer whose output has a NaN or an infinity in one of its rows; n_layers: only the
     * logits have (NaN or +inf); KVF_FINITE: none has. The results of such a sequence are useless, and so is any attention to
     * its K and V. */
    uint32_t *not_finite;
    /* 0: if the pass fails, prompt_sums, prompt_last, prompt_squares and prompt_max are as before. The pass copies them first, to memory that the
     * activations allocate as needed. 1: they may be lost on failure, and are not copied. */
    int sums_may_be_lost;
    /* Scores of the new tokens, written to pages->score after each layer's attention; NULL: they have none. */
    const kvf_probe *probe;
    /* Called after each layer's attention with the state that entered it, [n_tokens][n_embd] after the first RMSNorm, in CPU
     * memory; or NULL. For those who fit a probe. */
    kvf_status (*hidden)(void *ctx, uint32_t layer, const float *state);
    /* As kvf_mass.max_prob: the largest probability of each slot of the positions [max_begin[i], max_end[i]). [n_seqs], each NULL or
     * [n_layers][n_q_heads][prompt_stride]; or NULL. */
    float *const *prompt_max;
    const uint32_t *max_begin, *max_end; /* [n_seqs]; required with prompt_max */
    /* [n_seqs] or NULL. 1: in prompt_max the probabilities that a token of the sequence gives are divided by the norm of its residual
     * stream, as it enters the layer. */
    const uint8_t *max_by_residual;
} kvf_forward;

#define KVF_FINITE UINT32_MAX /* kvf_forward.not_finite */

/** Runs the pass: writes K and V of the new tokens into the pages, fills the sums and the logits.
 *  @param model a model. @param activations of it. @param stream where it runs. @param forward see kvf_forward. @param err detail, or NULL.
 *  @own nothing is kept. @threads one at a time for an activations object.
 *  @errors KVF_E_INVALID (an id or a target outside the vocabulary, sizes beyond the activations', more threads
 *  than they were made for), KVF_E_UNSUPPORTED (path), those of after_layer, KVF_E_NO_MEMORY (the BLAS, the copy of the sums). On
 *  failure the sums of prompts are as before; K, V, rows and logits are not. What after_layer did is not undone. The pass may
 *  be run again over the same view: kvf_policy_observe adds each token's row once for each layer.
 *  @cost 2 * parameters * tokens operations and the attention; allocates when the copied sums are longer than ever before. */
KVF_API KVF_CHECK kvf_status kvf_model_forward(const kvf_model *model, kvf_activations *activations, kvf_stream *stream,
                                               const kvf_forward *forward, kvf_error *err);

/* A prompt, or a later segment of one, after forward passes over its repetition. */
typedef struct kvf_repetition {
    size_t struct_size;
    const kvf_view *view; /* from kvf_view_fill. The tables hold the prompt; its repetition may be rolled back or not */
    const kvf_pages *pages;
    uint32_t seq;        /* index in the view */
    uint32_t begin, end; /* positions of the prompt, as kvf_forward.max_begin and max_end */
    float *prompt_max;   /* [n_layers][n_q_heads][prompt_stride], as the passes have left it */
    size_t prompt_stride;
} kvf_repetition;

/** Multiplies the maxima of a repetition by the norm of each slot's value after the output projection: |W_o,h v| for slot and query
 *  head h, where W_o,h are the columns of the projection that belong to h.
 *  @param model a model. @param activations of it. @param stream where it runs. @param repetition prompt_max is changed in place.
 *  @param err detail, or NULL.
 *  @own nothing is kept. @threads one at a time for an activations object.
 *  @errors KVF_E_INVALID (sizes that differ from the model's, positions that the sequence has not), KVF_E_STALE (the view's buffer was
 *  filled again, or the view is not a manager's). Nothing has changed on failure.
 *  @cost O(layers * (n_embd + slots) * query heads * head_dim^2); no allocation. The bits do not depend on the number of threads.
 *  @source KVzip+: Jegou and Jeblick, arXiv 2601.07891. */
KVF_API KVF_CHECK kvf_status kvf_model_score(const kvf_model *model, kvf_activations *activations, kvf_stream *stream,
                                             const kvf_repetition *repetition, kvf_error *err);

/* ---- Tokenizer ------------------------------------------------------------------------------------ */

enum {
    KVF_ENCODE_SPECIAL = 1, /* control tokens written in the text ("<|im_end|>") are encoded as control tokens */
    KVF_ENCODE_BOS = 2      /* begin with the beginning-of-sequence token, if the model has one and wants it; with
                             * KVF_ENCODE_SPECIAL not if the text begins with it already */
};

/** Text to ids. Any bytes are accepted; bytes that are not UTF-8 are encoded one by one. Some vocabularies have no token for control
 *  characters, or for bytes that never occur in UTF-8: such bytes are left out, or become the unknown token of a SentencePiece
 *  vocabulary. Most SentencePiece vocabularies also put a space before the text, and before the text after each control token.
 *  User-defined tokens ("<tool>") are found in any text, whatever the flags: at each character the longest that begins there.
 *  @param tokenizer a tokenizer. @param text bytes, may contain NUL. @param n_bytes how many. @param flags KVF_ENCODE_*.
 *  @param ids result. @param capacity of ids; kvf_tokenizer_max_ids is always enough. @param n_ids how many there are (set on
 *  KVF_E_LIMIT too).
 *  @param err detail, or NULL. @own the caller's buffer. @threads any, concurrently.
 *  @errors KVF_E_INVALID, KVF_E_LIMIT (capacity; n_bytes of 2^31 or more), KVF_E_NO_MEMORY. @cost about O(n log n); allocates scratch. */
KVF_API KVF_CHECK kvf_status kvf_tokenizer_encode(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes,
                                                  uint32_t flags, uint32_t *ids, size_t capacity, size_t *n_ids,
                                                  kvf_error *err);

/** The most ids that a text of n_bytes can have, whatever its bytes and the flags. For a dialogue, pass the bytes that kvf_chat_render
 *  counts. At most n_bytes + 2, except for SentencePiece vocabularies that have no token for a space or have control tokens of one
 *  byte.
 *  @param tokenizer a tokenizer. @param n_bytes of the text.
 *  @own nothing. @threads any. @errors none: SIZE_MAX when the number is larger. @cost O(1). */
KVF_API size_t kvf_tokenizer_max_ids(const kvf_tokenizer *tokenizer, size_t n_bytes);

/** The fewest ids that a text can have, by its length alone: a prompt that cannot fit need not be encoded to know it. 0 for
 *  SentencePiece vocabularies that lack a byte, where one unknown token may stand for a text of any length.
 *  @param tokenizer a tokenizer. @param text bytes. @param n_bytes how many.
 *  @own nothing. @threads any. @errors none. @cost O(n_bytes), allocates nothing. */
KVF_API size_t kvf_tokenizer_min_ids(const kvf_tokenizer *tokenizer, const char *text, size_t n_bytes);

/** The bytes of one token. A control token has none unless special is set.
 *  @param tokenizer a tokenizer. @param id any value; outside the vocabulary: no bytes. @param special 1: control tokens have their text.
 *  @param buffer result. @param capacity of it; 512 is enough for tokens of at most 512 bytes.
 *  @own the caller's buffer. @threads any. @errors none. @cost O(bytes). Returns the number of
 *  bytes of the token; at most capacity of them were written. */
KVF_API size_t kvf_tokenizer_piece(const kvf_tokenizer *tokenizer, uint32_t id, int special, char *buffer,
                                   size_t capacity);

/** Ids to text: the bytes of the tokens, joined. The space that kvf_tokenizer_encode puts before a text is removed again, at the
 *  beginning and after a control token that is written out. For ids from the middle of a text use kvf_tokenizer_piece.
 *  @param tokenizer a tokenizer. @param ids ids. @param n_ids how many. @param special see kvf_tokenizer_piece.
 *  @param buffer result. @param capacity of it.
 *  @own the caller's buffer. @threads any. @errors none. @cost O(bytes). Returns the number of bytes of
 *  the text; at most capacity of them were written. */
KVF_API size_t kvf_tokenizer_decode(const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t n_ids, int special,
                                    char *buffer, size_t capacity);

/** The id of a token by its exact text, KVF_NO_TOKEN when there is none.
 *  @param tokenizer a tokenizer. @param text e.g. "<|im_end|>". @own nothing. @threads any. @errors none. @cost O(length). */
KVF_API uint32_t kvf_tokenizer_find(const kvf_tokenizer *tokenizer, const char *text);

/** Whether a token ends a generation (end of sequence, end of turn): a key of the file names it, or its text is a known end marker
 *  ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", ...). End markers are control tokens here, whatever type the file gives them.
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

/** A dialogue in the chat template of the model, as text for display. It ends with the opening of the assistant's answer. To run a
 *  dialogue use kvf_chat_encode: in this text a control token of the template cannot be told from the same words in a message.
 *  @param tokenizer a tokenizer. @param template_name "auto" (recognised by the control words of the file's template, which it must
 *  have), "chatml", "llama2", "llama3", "mistral", "none" (contents joined, without roles); NULL: "auto". In "llama2" and "mistral"
 *  messages of user and assistant alternate, user last, after at most one of system.
 *  @param messages the dialogue. @param n_messages how many. @param buffer result. @param capacity of it.
 *  @param n_bytes the bytes there are (set on KVF_E_LIMIT too). @param err detail, or NULL.
 *  @own the caller's buffer. @threads any.
 *  @errors KVF_E_NOT_FOUND (template name; the text lists them), KVF_E_UNSUPPORTED (the file has no template, or none of these, or the
 *  vocabulary lacks its control tokens), KVF_E_INVALID (no message, a role, a turn, a NULL content), KVF_E_LIMIT, KVF_E_OVERFLOW. @cost O(bytes). */
KVF_API KVF_CHECK kvf_status kvf_chat_render(const kvf_tokenizer *tokenizer, const char *template_name,
                                             const kvf_message *messages, uint32_t n_messages, char *buffer,
                                             size_t capacity, size_t *n_bytes, kvf_error *err);

/** A dialogue as ids, ready to run. Only the template's own control tokens become control tokens; a control token written in a
 *  message ("<|im_end|>") stays text. User-defined tokens are found in messages as in any text. The ids begin with one
 *  beginning-of-sequence token, if the model has one and it or the template wants it.
 *  @param tokenizer a tokenizer. @param template_name see kvf_chat_render.
 *  @param messages the dialogue. @param n_messages how many. @param ids result. @param capacity of it;
 *  kvf_tokenizer_max_ids of the bytes that kvf_chat_render counts is always enough. @param n_ids how many there are (set on KVF_E_LIMIT
 *  too). @param err detail, or NULL.
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

/** Samples the next token. The random number is a hash of seed and step, and so never depends on the batch.
 *  @param sampling parameters. @param step the token's number in its request.
 *  @param logits [n_vocab]. @param n_vocab how many. @param scratch [n_vocab] pairs of 8 bytes, 8-byte aligned; may be NULL when greedy.
 *  @param logprob natural log of the token's probability at temperature 1, or NULL.
 *  @own nothing is kept. @threads any. @errors none: a token whose logit is NaN is never sampled; if all are NaN the result is 0.
 *  @cost O(n_vocab), with top_k or top_p a partial sort. */
KVF_API uint32_t kvf_sample(const kvf_sampling *sampling, uint64_t step, const float *logits, uint32_t n_vocab,
                            void *scratch, double *logprob);

#ifdef __cplusplus
}
#endif
#endif
