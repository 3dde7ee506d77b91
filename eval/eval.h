/* eval/eval.h: kvfold eval measures policies against the full cache, at equal memory.
 *
 * Glossary
 *   - item: one prompt with the tokens that follow it: a place of a text, or a sample of a task.
 *   - cell: one policy at one rho (and seed) on one item; a line of the output.
 *   - batch: cells of one item that share one computation of the prompt. It is written when it is complete, and
 *     otherwise run again as a whole.
 *
 * Invariants
 *   - The command line alone decides which cells form a batch, not what an earlier run did. So a resumed run writes the
 *     same bytes as an uninterrupted one.
 *   - Every batch includes the full cache, so a cell and its reference are computed side by side.
 */
#ifndef KVF_EVAL_EVAL_H
#define KVF_EVAL_EVAL_H

#include "tools/pieces.h"

typedef enum kvf__measure {
    KVF__MEASURE_NLL,
    KVF__MEASURE_DIVERGENCE,
    KVF__MEASURE_NEEDLE,
    KVF__MEASURE_RECALL,
    KVF__MEASURE_MULTITURN,
    KVF__MEASURE_ABLATION
} kvf__measure;

/* ---- policies.c, ablation.c --------------------------------------------------------------------------- */

typedef struct kvf__eval_policy {
    char label[96];
    kvf_policy_options options; /* rho is the cell's */
    json_t *json;               /* the options as texts, without those of the budget */
    const char *table;          /* of the paper, for an ablation; or NULL */
    uint32_t share;             /* policies of the same number can be samples of one request */
    const char *seed_option;    /* of a policy that draws: a cell for each seed; or NULL */
} kvf__eval_policy;

typedef struct kvf__eval_policies {
    kvf__eval_policy *list;
    uint32_t n, capacity, n_shares;
} kvf__eval_policies;

/* Reads --policies, or with "all" takes every one the library has. False after a message. */
bool kvf__eval_policies_read(const kvf__cli *cli, const kvf_model_info *info, kvf__eval_policies *policies);
/* The variants of the paper's tables that --tables names. */
bool kvf__eval_ablation(const kvf__cli *cli, const kvf_model_info *info, kvf__eval_policies *policies);
/* One more: "[LABEL=]NAME[:PRESET][,OPTION=VALUE]...". */
bool kvf__eval_policy_add(const kvf__cli *cli, const kvf_model_info *info, const char *spec, const char *table,
                          kvf__eval_policies *policies);
void kvf__eval_policies_free(kvf__eval_policies *policies);

/* ---- items.c, texts.c, filler.c, tasks.c, dialogues.c -------------------------------------------------------------- */

typedef struct kvf__eval_text { /* a text file, in tokens */
    char source[KVF__SOURCE_BYTES], kind[KVF__KIND_BYTES];
    uint32_t *ids; /* without a token that begins it */
    size_t n;
    uint64_t n_bytes, digest;
} kvf__eval_text;

typedef struct kvf__eval_texts {
    kvf__eval_text *list;
    uint32_t n;
} kvf__eval_texts;

typedef struct kvf__eval_item {
    char source[KVF__SOURCE_BYTES], kind[KVF__KIND_BYTES];
    uint32_t context;             /* as asked for; tasks and dialogues may have fewer tokens in their prompt */
    uint64_t offset;              /* where its prompt begins in the text, in tokens */
    uint32_t sample;              /* number of the window, or of the sample */
    const char *task, *placement; /* NULL: a text */
    double depth;                 /* of the fact that is asked for; NAN: none */
    uint64_t seed;
    uint32_t *tokens; /* [n_prompt + n_forced] */
    uint32_t n_prompt, n_forced;
    uint8_t *counts; /* [n_forced] 1: scored; NULL: all */
    uint32_t n_scored;
} kvf__eval_item;

typedef struct kvf__eval_items {
    kvf__eval_item *list;
    uint32_t n, capacity;
} kvf__eval_items;

typedef struct kvf__eval_inputs { /* what items are made of */
    const kvf__cli *cli;
    const kvf_tokenizer *tokenizer;
    const kvf_model_info *info;
    kvf__eval_texts texts;
    uint32_t bos; /* the token that begins a prompt, KVF_NO_TOKEN: none */
} kvf__eval_inputs;

/* A new item at the end of the list with room for its tokens (and counts, zeroed, where wanted); NULL after a message. */
kvf__eval_item *kvf__eval_item_add(kvf__eval_items *items, uint32_t n_prompt, uint32_t n_forced, bool counts);
void kvf__eval_items_free(kvf__eval_items *items);

/* Numbers with commas between them, each in [min, max]; n 0 after a message that names the option. The caller frees. */
double *kvf__eval_numbers(const char *option, const char *text, double min, double max, bool whole, uint32_t *n);

bool kvf__eval_texts_read(kvf__eval_inputs *inputs);
void kvf__eval_texts_free(kvf__eval_texts *texts);
/* n tokens of filler text that does not contain the answer: of the sample's text, or generated. False after a
 * message. source and kind are the item's. */
bool kvf__filler(const kvf__eval_inputs *inputs, kvf__dice *dice, uint32_t sample, uint32_t n, kvf__pieces *out,
                 const char **source, const char **kind, uint64_t *offset);
/* Each adds the items of a measure; false after a message. */
bool kvf__eval_text_items(const kvf__eval_inputs *inputs, kvf__eval_items *items);
bool kvf__eval_task_items(const kvf__eval_inputs *inputs, bool needle, kvf__eval_items *items);
bool kvf__eval_dialogue_items(const kvf__eval_inputs *inputs, kvf__eval_items *items);

/* ---- memory.c: equal memory ------------------------------------------------------------------------------ */

typedef struct kvf__eval_shape { /* of an item in the pool */
    uint32_t n_prompt, n_steps;  /* steps: tokens forced */
    uint32_t n_layers, n_groups, block_size;
    bool deferred; /* its first event is after the first decode step, which holds all of the prompt */
} kvf__eval_shape;

/* Blocks a policy may hold, floor(rho * prompt * layers / block size) for each group. */
double kvf__eval_target(const kvf__eval_shape *shape, double rho);
/* What a cell of this rho begins with: below 1, where its policy evicts. */
double kvf__eval_first_rho(double rho);
/* Whether so many blocks on average are within the target. */
bool kvf__eval_within(double held, double target);
/* Blocks that sizes reserve, averaged over the decode steps. */
double kvf__eval_held(const kvf__eval_shape *shape, const kvf_layer_size *sizes);
/* The same of sizes [n_layers][n_groups]. */
double kvf__eval_held_by_groups(const kvf__eval_shape *shape, const kvf_layer_size *sizes);
/* The largest rho below the cell's with which a policy stays within the target; 0 if there is none. state and seq:
 * the sequence that ran with the cell's rho. */
double kvf__eval_lower(const kvf__eval_shape *shape, const kvf_policy_options *options, kvf_policy_state *state,
                       uint32_t seq, double rho, double target);

/* ---- scoring.c -------------------------------------------------------------------------------------------- */

typedef struct kvf__eval_figures { /* of one sample, by step */
    double *nll, *kl;              /* kl: NULL where it is not measured, and of the full cache */
    uint8_t *hit, *agree;          /* the likeliest token is the true one; is the full cache's */
    uint32_t n_done;
} kvf__eval_figures;

typedef struct kvf__eval_held_logits kvf__eval_held_logits;

/* Computes figures from logits. Sample 0 is the full cache; in a step its logits may arrive after those of other
 * samples. */
typedef struct kvf__eval_scorer {
    uint32_t n_vocab, n_steps, n_samples;
    const uint32_t *truth; /* [n_steps] */
    bool want_kl, failed;
    kvf__eval_figures *figures; /* [n_samples] */
    float *full;                /* [n_steps][n_vocab], with want_kl */
    double *p;                  /* [n_vocab] probabilities of the full cache at p_step */
    double p_log_sum;
    uint32_t p_step;
    uint32_t *full_best; /* [n_steps] */
    kvf__eval_held_logits *held;
} kvf__eval_scorer;

bool kvf__eval_scorer_begin(kvf__eval_scorer *scorer, uint32_t n_vocab, uint32_t n_samples, const uint32_t *truth,
                            uint32_t n_steps, bool want_kl);
void kvf__eval_scorer_take(kvf__eval_scorer *scorer, uint32_t sample, uint32_t step, const float *logits);
void kvf__eval_scorer_end(kvf__eval_scorer *scorer);

/* ---- batch.c ------------------------------------------------------------------------------------------------ */

typedef struct kvf__eval_cell {
    const kvf__eval_policy *policy;
    double rho, rho_used; /* used: lowered to hold no more than the target */
    bool lowered;         /* it was in this pass, so it runs again */
    uint64_t seed;
    double target, held;
    char empty[480];          /* why there are no figures; "": there are */
    uint32_t *blocks, *sizes; /* [n_layers] at the end; NULL: not known */
    json_t *group_sizes;      /* (layer, group), where head groups have sizes of their own; else NULL */
    kvf__eval_figures figures;
} kvf__eval_cell;

typedef struct kvf__eval_batch {
    const kvf__eval_item *item;
    kvf__eval_cell *cells;
    uint32_t n_cells, n_layers, piece; /* piece: tokens beside the prompt while a policy repeats it */
    bool want_kl;
    bool first; /* of its item: tells of the full cache and the layers too */
    kvf__eval_figures full;
    double *density_head_minmax, *variance; /* [n_layers], of a first batch of a text, or NULL */
} kvf__eval_batch;

typedef struct kvf__eval_machine { /* what batches run on */
    kvf_engine *engine;
    const kvf_model_info *info;
    uint32_t n_groups, block_size;
    bool (*stop)(void *user); /* asked between steps: whether to give up */
    void (*stepped)(void *user, uint64_t n_tokens);
    void *user;
} kvf__eval_machine;

typedef enum kvf__eval_outcome { KVF__EVAL_DONE, KVF__EVAL_STOPPED, KVF__EVAL_FAILED } kvf__eval_outcome;

/* Runs it; FAILED after a message. What it allocated is freed by kvf__eval_batch_free. */
kvf__eval_outcome kvf__eval_batch_run(const kvf__eval_machine *machine, kvf__eval_batch *batch);
void kvf__eval_batch_free(kvf__eval_batch *batch);
/* Policies that only measure the layers' densities: the engine must have room for them too. */
enum { KVF__EVAL_PROBES = 2 };
bool kvf__eval_probe(uint32_t i, kvf_policy_options *options);

/* ---- records.c ------------------------------------------------------------------------------------------------ */

json_t *kvf__eval_text_record(const kvf__eval_batch *batch, kvf__measure measure);
json_t *kvf__eval_cell_record(const kvf__eval_batch *batch, uint32_t cell, kvf__measure measure, uint32_t k);
/* What a cell is known by, from its record or before it has run. */
json_t *kvf__eval_key(const json_t *record);
json_t *kvf__eval_cell_key(const kvf__eval_item *item, const kvf__eval_cell *cell, kvf__measure measure, uint32_t k);
json_t *kvf__eval_text_key(const kvf__eval_item *item, kvf__measure measure);
extern const char *const kvf__measure_names[]; /* by kvf__measure */

/* ---- The commands ------------------------------------------------------------------------------------------- */

/* scope.c: whether every given option applies to this measure (or to report); false after a message. */
bool kvf__eval_check_scope(const kvf__cli *cli, const char *word);

int kvf__eval_single(const kvf__cli *cli);                        /* single.c: one text, one policy */
int kvf__eval_measure(const kvf__cli *cli, kvf__measure measure); /* run.c */

#endif
