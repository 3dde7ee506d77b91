/* tests/tiny_models.h: the tiny models that tests/data/tiny_logits.json has the logits of. A change here, or in what
 * gguf_writer.h writes, needs new ones: python3 scripts/tiny_reference.py --make tests/data/tiny_logits.json */
#ifndef KVF_TESTS_TINY_MODELS_H
#define KVF_TESTS_TINY_MODELS_H

#include "tests/gguf_writer.h"

static const struct tiny_case {
    const char *name;
    struct tiny_model_params params;
} tiny_cases[] = {
    {"f32", {.weight_type = GW_F32, .seed = 1, .skip = "tokenizer.chat_template"}},
    {"f16", {.weight_type = GW_F16, .seed = 2, .n_q_heads = 6, .n_kv_heads = 2, .head_dim = 16, .n_ff = 80}},
    {"q8_0", {.weight_type = GW_Q8_0, .seed = 3, .separate_output = 1}},
    {"q4_0", {.weight_type = GW_Q4_0, .seed = 4, .embd_type_p1 = GW_Q8_0 + 1, .rope_base = 500000}},
    {"q4_1", {.weight_type = GW_Q4_1, .seed = 5, .n_layers = 3, .n_q_heads = 8, .n_kv_heads = 1, .head_dim = 8}},
    {"rope_freqs", {.weight_type = GW_F32, .seed = 6, .rope_freqs = 1, .separate_output = 1, .n_kv_heads = 4}},
};

enum { TINY_CASES = sizeof tiny_cases / sizeof *tiny_cases, TINY_TOKENS = 24 };

/* The prompt of every case. */
static inline uint32_t tiny_token(uint32_t i) { return (i * 37 + 11) % TINY_N_VOCAB; }

#endif
